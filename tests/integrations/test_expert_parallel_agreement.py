"""The hosts of a group agree on the largest number of tokens, in shared memory and by collectives."""

import random
import time
from unittest import mock

import pytest
from kit.expert_parallel_ranks import on_each
from torch import distributed as dist

from fusedmoe.expert_parallel import agreement

pytestmark = pytest.mark.distributed


def calls(ep, patches, count, delays):
    """The results of some calls with random numbers of tokens and delays of the ranks; whether memory was shared."""
    numbers, pauses = random.Random(1), random.Random(ep.rank)
    with mock.patch.multiple(agreement, **patches):
        made = agreement.Agreement(ep.group, 30.0)
        different = 0
        for _ in range(count):
            tokens = [
                numbers.randrange(2**40) if numbers.random() < 0.1 else numbers.randrange(9) for _ in range(ep.ranks)
            ]
            if delays and pauses.random() < 0.2:
                time.sleep(pauses.random() * 2e-3)
            different += made.most(tokens[ep.rank]) != max(tokens)
    return different, made._words is not None


@on_each
def shared(ep):
    return calls(ep, {"_SPINS": 20}, 500, delays=True)


@on_each
def numbers_wrap(ep):
    return calls(ep, {"_CALLS": 4, "_SPINS": 1}, 200, delays=False)


@on_each
def on_two_hosts(ep):
    return calls(ep, {"host_id": lambda: f"host of {ep.rank % 2}"}, 20, delays=False)


@on_each
def one_cannot_map(ep):
    unable = {"_mapped": (lambda path, nbytes: None) if ep.rank == 1 else agreement._mapped}
    return calls(ep, unable, 20, delays=False)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("function", "in_memory"), [(shared, True), (numbers_wrap, True), (on_two_hosts, False), (one_cannot_map, False)]
)
def test_all_ranks_get_the_largest_number(hopper_ranks, function, in_memory, size):
    assert hopper_ranks.run(function, size, 8)[:size] == [(0, in_memory)] * size


@on_each
def alone(ep):
    made = agreement.Agreement(ep.group, 0.2)
    made.most(3)
    dist.barrier(ep.group)
    if ep.rank == 1:
        return None
    with pytest.raises(RuntimeError) as raised:
        made.most(3)
    return str(raised.value)


def test_a_rank_that_does_not_come(hopper_ranks):
    message = hopper_ranks.run(alone, 2, 8)[0]
    assert message == "ExpertParallel: rank 1 of 2 did not come to call 2 of a layer within 0.2 s"
