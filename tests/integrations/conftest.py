"""What is started once for all tests here."""

import pytest


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Two processes of one gloo group."""
    from two_ranks import Ranks

    started = Ranks(tmp_path_factory.mktemp("ranks"))
    try:
        yield started
    finally:
        started.stop()
