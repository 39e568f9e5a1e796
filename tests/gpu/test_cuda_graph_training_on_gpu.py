"""examples/cuda_graph_training.py on GPUs: replays of a whole training step have the bits of eager steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.hopper import needs_gpu

pytestmark = needs_gpu

ROOT = Path(__file__).parents[2]
ALONE, STEPS = 1, 20


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_tensor"])
@pytest.mark.parametrize("ranks", [ALONE, 2, 4])
def test_replays_have_the_bits_of_eager_steps(ranks, recipe):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *([] if ranks == ALONE else torchrun), str(ROOT / "examples/cuda_graph_training.py")]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run(
        [*command, "--compare", str(STEPS), "--recipe", recipe],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"0 of {STEPS} steps differ" in found.stdout
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss (\S+),", found.stdout, re.MULTILINE)]
    eager, replayed = losses[: len(losses) // 2], losses[len(losses) // 2 :]
    assert eager == replayed
    assert eager[-1] < eager[0] - 1
