"""Process groups of the tests here."""

import pytest
from torch import distributed as dist


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Two processes of one gloo group."""
    from kit.two_ranks import Ranks

    started = Ranks(tmp_path_factory.mktemp("ranks"))
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def mesh():
    """A mesh of this process alone, with gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
