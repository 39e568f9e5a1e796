"""Process groups, frameworks and compiled graphs of the tests here. A pool of processes is started once, by the first
test that asks for it.
"""

import contextlib
import importlib.util
import warnings

import pytest
import torch
from kit.two_ranks import pool
from torch import distributed as dist


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Two processes of one gloo group."""
    yield from pool(tmp_path_factory, 2)


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    """Four processes of one gloo group."""
    yield from pool(tmp_path_factory, 4)


@pytest.fixture(scope="session")
def hopper_ranks(tmp_path_factory):
    """Four processes whose kernels may be replaced by the stand-ins of `kit.hopper_ranks`, which they keep."""
    yield from pool(tmp_path_factory, 4)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where the ranks have the buffers of the engine "symmetric"."""
    return str(tmp_path_factory.mktemp("buffers"))


@pytest.fixture
def mesh():
    """A mesh of this process alone, with gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def registered():
    """The experts of transformers may be ours. Every message is said again."""
    import fusedmoe.integrations.transformers as fusedmoe_transformers
    from fusedmoe.base.log import forget_said

    forget_said()
    fusedmoe_transformers.register()
    torch.manual_seed(0)


@pytest.fixture
def fresh_graphs():
    """No graph of another test is there, and none is left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def chains_called(monkeypatch):
    """The experts' chains that integrations called with parameters of a model."""
    import fusedmoe as fm

    chains, run = [], fm.Sequential.forward_with

    def noted(self, *args, **kwargs):
        chains.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(fm.Sequential, "forward_with", noted)
    return chains


@contextlib.contextmanager
def transformer_engine_is_absent():
    """For packages that take the recipes of Transformer Engine, where those are installed, for all of it."""
    find, absent = importlib.util.find_spec, "transformer_engine"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == absent else find(name, *args))
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def without_transformer_engine():
    with transformer_engine_is_absent():
        yield


@pytest.fixture(scope="session")
def peft():
    with transformer_engine_is_absent():
        return pytest.importorskip("peft")
