"""Options and fixtures of all tests."""

import gc
import os
import sys

import pytest

# small tensors: a pool of threads costs more than it brings, and far more where other processes want the cores too
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor compiles in the process of the test, instead of in a pool of processes, each of which imports torch
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--results", metavar="DIR", default=None, help="write the outcome of the GPU tests there, as JSON")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def only_objects_of_this_file_are_searched_for_garbage():
    """Imported modules have millions of others: a search among them takes most of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_module_under_fsdp2_outlives_its_test():
    """While there is one in the process, weights that a call passes are not kept quantized."""
    yield
    if getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", None):
        gc.collect()


@pytest.fixture
def count(monkeypatch):
    """Returns how often a weight was quantized since its last call, once for each form."""
    import fusedmoe as fm
    from fusedmoe.ops import quantize as quantize_op

    counted = []

    def counting(x, *args, **kwargs):
        counted.append(x.dim() == 3)
        return fm.quantize(x, *args, **kwargs)

    monkeypatch.setattr(quantize_op, "quantize", counting)

    def since():
        found = sum(counted)
        counted.clear()
        return found

    return since
