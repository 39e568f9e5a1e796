"""The kernels of exchanges under compute-sanitizer, in a process of its own: no access out of bounds, no read
of memory that nobody wrote, no race.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kit.exchanges_of_one_gpu import EXCHANGES, PRODUCTS
from kit.hopper import needs_gpu

SANITIZER = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], "/usr/local/cuda/bin"]))
UNSUPPORTED = "Device not supported"  # by the sanitizer, as in some virtual machines
TOOLS = {
    "initcheck": ("--report-api-errors", "no"),
    "memcheck": ("--report-api-errors", "no"),  # libraries ask the driver for functions that it does not have
    "racecheck": (),
    "synccheck": ("--num-cuda-barriers", "4096"),  # per block: the tool finds the number in kernels of nvcc alone
}
"""The options of each tool."""


@needs_gpu
@pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, of the CUDA toolkit")
@pytest.mark.parametrize("tool", TOOLS)
def test_exchanges_between_regions_of_one_gpu(tool):
    """Each tensor has an allocation of its own, so an access past its end is out of bounds. "initcheck" does not see
    that TMA writes memory, so it runs without products.
    """
    names = EXCHANGES if tool == "initcheck" else (*EXCHANGES, *PRODUCTS)
    paths = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [SANITIZER, "--tool", tool, *TOOLS[tool], "--error-exitcode", "3"]
    command += [sys.executable, "-m", "kit.exchanges_of_one_gpu", *names]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    if UNSUPPORTED in ran.stdout + ran.stderr:
        pytest.skip(f"compute-sanitizer: {UNSUPPORTED}")
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert {*names} <= {*ran.stdout.splitlines()}
