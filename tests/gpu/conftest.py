"""What the GPU tests share. They need a GPU for which torch has a device-side grouped GEMM; others skip them."""

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kit.hopper import DEVICE, EMULATED, needs_hopper
from torch import distributed as dist

HERE = Path(__file__).parent
FEW_TESTS = 30  # which compile the kernels that they need, one by one
_outcomes: list[dict] = []


def pytest_collection_modifyitems(items):
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"))
            # of the first fp64 product in the thread of a backward pass
            item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"))
            # several processes create torch's directory for kernels at once
            item.add_marker(pytest.mark.filterwarnings("ignore:Specified kernel cache directory could not be created"))
            emulated = EMULATED and getattr(item.module, "pytestmark", None) is needs_hopper
            if not (capable or emulated):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU of compute capability 9.x or 10.x"))
    # files with few tests have the longest ones: a parallel run begins with them (--maxschedchunk=1 spreads them out)
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: tests[item.path] if HERE in item.path.parents else 0)


@pytest.fixture(scope="session", autouse=EMULATED)
def gpu():
    from emulator.gpu import emulated  # only for tests without a GPU

    with emulated() as machine:
        yield machine


def pytest_runtest_logreport(report):
    ended = report.when == "call" or report.outcome != "passed"  # a fixture may fail, or skip its test
    if ended and "tests/gpu/" in report.nodeid:
        _outcomes.append({"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)})


def pytest_sessionfinish(session):
    target = session.config.getoption("--results")
    is_worker = hasattr(session.config, "workerinput")  # of a parallel run, whose results its main process has
    if not target or not _outcomes or is_worker:
        return
    from benchmarks.results import write  # only where results are wanted

    write(Path(target), "test_gpu", summary(_outcomes))


def summary(outcomes):
    """Return the counts and seconds of each file, and the tests that did not pass."""
    files = {}
    for outcome in outcomes:
        of_file = files.setdefault(outcome["test"].split("::")[0], {"passed": 0, "others": 0, "seconds": 0.0})
        of_file["passed" if outcome["outcome"] == "passed" else "others"] += 1
        of_file["seconds"] = round(of_file["seconds"] + outcome["seconds"], 3)
    others = [outcome for outcome in outcomes if outcome["outcome"] != "passed"]
    passed = len(outcomes) - len(others)
    return {"passed": passed, "total": len(outcomes), "files": dict(sorted(files.items())), "others": others}


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture
def no_sync():
    """A context in which anything that waits for the device raises."""

    @contextmanager
    def forbidden():
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbidden


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone."""
    if not dist.is_nccl_available():
        pytest.skip("torch is built without NCCL")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def tiles(monkeypatch):
    """Have every product run with these tiles, instead of what the model of `choice` says."""
    from fusedmoe.kernels.sm90 import products  # only for tests of these kernels

    def use(config):
        monkeypatch.setattr(products, "choose", lambda problem: config)

    return use


@pytest.fixture(scope="module")
def build_ahead(request):
    """A function that compiles the kernels that another one returns into the cache on disk, side by side: one by one
    they would take minutes.
    """
    from fusedmoe.kernels.build import compiler  # only for tests of these kernels

    def build(make):
        if EMULATED or len(request.session.items) < FEW_TESTS:
            return
        kernels = list(dict.fromkeys(make()))
        if compiler.entry(kernels[0]) is None:  # the cache is switched off
            return
        # each worker of a parallel run begins elsewhere, and skips what others have built
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        first = worker * len(kernels) // workers
        missing = [k for k in kernels[first:] + kernels[:first] if not compiler.is_cached(k)]
        if missing:
            jobs = min(max(len(os.sched_getaffinity(0)) // workers, 1), len(missing))
            with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
                list(pool.map(compiler.build, missing))

    return build
