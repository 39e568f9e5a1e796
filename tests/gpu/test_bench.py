"""`fusedmoe bench` on a GPU: every candidate that is installed is right, timed, and its memory measured."""

import json

import pytest
import torch

from fusedmoe.bench.layer import OURS, Sizes, Work
from fusedmoe.bench.measure import FORWARD, STEP, measure
from fusedmoe.bench.peers import NOT_INSTALLED
from fusedmoe.bench.timing import GpuTimer
from fusedmoe.cli import bench as bench_cli
from fusedmoe.cli.main import main

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.skipif(not hopper, reason="needs an sm_90 GPU"),
    pytest.mark.filterwarnings("ignore"),  # those of torch's compiler and of peers
]

SIZES = Sizes(hidden=1024, intermediate=512, experts=16, top_k=4, tokens=4096)


def test_every_candidate_is_right_and_measured(device):
    work = Work(SIZES, torch.bfloat16, device)
    rows = measure(work, GpuTimer(device, reps=5, host_reps=3))
    names = {row.name for row in rows}
    assert names == {OURS, "torch grouped_mm", "torch grouped_mm, compiled", "torch loop", "QuACK", "SonicMoE"}
    for row in rows:
        if row.note == NOT_INSTALLED:
            continue
        assert row.ms is not None, f"{row.name}: {row.note}"
        assert 0 < row.quartiles_ms[0] <= row.ms <= row.quartiles_ms[1]
        assert 0 < row.error < 0.03
        assert row.peak_bytes > 0
        assert (row.kept_bytes is None) == (row.case == STEP)
    ours = {row.case: row for row in rows if row.name == OURS}
    kept = {row.name: row.kept_bytes for row in rows if row.case == FORWARD and row.ms is not None}
    assert kept[OURS] < kept["torch grouped_mm"], "less is kept than eager autograd keeps"
    assert ours[STEP].ms > ours[FORWARD].ms
    tokens = SIZES.tokens * SIZES.hidden * 2
    assert ours[STEP].peak_bytes > tokens, "the gradient of the tokens at least"


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_the_command(recipe, capsys):
    sizes = {"hidden": 512, "intermediate": 256, "experts": 8, "top_k": 2, "tokens": 2048}
    options = bench_cli.BenchOptions(**sizes, recipe=recipe, reps=3, json=True)
    assert bench_cli.run(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"] == torch.cuda.get_device_name()
    assert found["dtype"] == "bf16"
    assert {row["note"] for row in found["rows"] if row["name"] == OURS} == {
        "" if recipe == "bf16" else "recipe fp8_block"
    }


def test_more_tokens_than_memory_end_in_an_error(capsys):
    sizes = ["--hidden", "8192", "--intermediate", "8192", "--experts", "8", "--top-k", "8", "--tokens", str(1 << 28)]
    with pytest.raises(SystemExit):
        main(["bench", *sizes, "--reps", "1"])
    assert "such as fewer --tokens" in capsys.readouterr().err
