"""A rank whose process is killed: the others raise an error in their next exchange."""

import os
import signal

import pytest
import torch
from kit.expert_parallel_ranks import H, moe
from kit.two_ranks import Ranks
from torch import distributed as dist

import fusedmoe as fm

pytestmark = pytest.mark.distributed


def killed(rank, engine, most, in_backward, message):
    """Rank 1 is killed before the forward or the backward pass of the second step."""
    ep = fm.ExpertParallel(engine=engine, max_tokens=most, timeout_s=5)
    layer, x = moe(ep), torch.ones(4, H, requires_grad=True)

    def step(dies):
        if dies and not in_backward:
            os.kill(os.getpid(), signal.SIGKILL)
        y = layer(x).sum()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        y.backward()

    step(dies=False)
    dist.barrier()
    with pytest.raises(RuntimeError, match=message):
        step(dies=rank == 1)


CLOSED = r"(?i)connection (closed|reset) by peer|broken pipe"  # by gloo
LATE = "^ExpertParallel: rank 1 of 2 did not come to call 2 of a layer within 5 s$"


@pytest.mark.parametrize(
    ("engine", "most", "in_backward", "message"),
    [
        ("allgather", 8, False, CLOSED),
        ("allgather", 8, True, CLOSED),
        ("allgather", None, False, LATE),  # the hosts agree on the number of tokens first
        ("alltoall", None, False, CLOSED),
        ("alltoall", None, True, CLOSED),
    ],
    ids=["allgather", "allgather, backward", "agreement", "alltoall", "alltoall, backward"],
)
def test_a_rank_that_dies(tmp_path, engine, most, in_backward, message):
    started = Ranks(tmp_path)
    try:
        with pytest.raises(AssertionError, match=r"\Arank 1 is gone\Z"):  # rank 0 has no error but the expected one
            started.run(killed, engine, most, in_backward, message)
    finally:
        started.stop()
