"""What all tests share."""

import gc
import os
import sys

import pytest

# small tensors: a pool of threads costs more than it brings, and far more where other processes want the cores too
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--results", metavar="DIR", default=None, help="write the outcome of the GPU tests there, as JSON")


@pytest.fixture(autouse=True)
def no_module_under_fsdp2_outlives_its_test():
    """While there is one in the process, weights that a call passes are not kept quantized."""
    yield
    if getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", None):
        gc.collect()
