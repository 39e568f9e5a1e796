"""Collectives that write to a quantized weight: the next call quantizes it again, and nobody has to say so."""

import copy

import pytest
import torch
from kit.two_ranks import Counted
from torch import distributed as dist

import fusedmoe as fm

pytestmark = pytest.mark.distributed

E, H, I = 2, 32, 32  # noqa: E741  (experts, in features, out features)
SPLITS = torch.tensor([5, 3])


def all_reduce_in_place_of_compiled_graphs(weight):
    group = dist.group.WORLD.group_name
    torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(weight.data, "sum", group))


def coalesced(weight):
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(weight.data)
    manager.wait()


def broadcast_in_a_group_of_its_own(weight):
    group = dist.new_group([0, 1])
    dist.broadcast(weight, 0, group=group)
    dist.destroy_process_group(group)


COLLECTIVES = {
    "broadcast": lambda weight: dist.broadcast(weight, 0),
    "all_reduce and wait": lambda weight: dist.all_reduce(weight, async_op=True).wait(),
    "all_reduce_ of compiled graphs": all_reduce_in_place_of_compiled_graphs,
    "coalesced": coalesced,
    "gathered": lambda weight: dist.all_gather(list(weight.data.unbind()), weight.detach()[0].clone()),
    "in a subgroup": lambda weight: dist.broadcast(weight.data, 1, group=_SUBGROUPS[0]),
    "in a group of its own": broadcast_in_a_group_of_its_own,
}
_SUBGROUPS = []  # of this process


def after_a_collective(rank, name, gradient):
    """Whether the weight changed, what was quantized before and after, and the outputs of the layer and of a copy."""
    if not _SUBGROUPS:
        _SUBGROUPS.append(dist.new_group([0, 1]))
    torch.manual_seed(rank)
    fc, x = fm.GroupedLinear(E, H, I), torch.randn(8, H)
    with fm.recipe("mxfp8"), Counted() as quantized:
        first = fc(x, splits=SPLITS)
        if gradient:
            first.sum().backward()  # the gradient is still there when the weight is written to
        with torch.no_grad():
            first = fc(x, splits=SPLITS)
            counts = [quantized.count]
            before = fc.weight.detach().clone()
            COLLECTIVES[name](fc.weight)
            changed = not torch.equal(before, fc.weight)
            for _ in range(2):
                y = fc(x, splits=SPLITS)
                counts.append(quantized.count)
        want = copy.deepcopy(fc)(x, splits=SPLITS).detach()
    return changed, counts, torch.equal(y, want), torch.equal(y, first)


@pytest.mark.parametrize(("name", "gradient"), [(name, i % 2 == 1) for i, name in enumerate(COLLECTIVES)])
def test_a_collective_that_writes_to_a_weight_is_noticed(ranks, name, gradient):
    found = ranks.run(after_a_collective, name, gradient)
    changed = [f[0] for f in found]
    assert any(changed)
    for of_rank, (once, again, kept), as_fresh, as_before in found:
        assert as_fresh
        assert as_before is not of_rank
        assert once > 0
        assert again == once + 1  # by rows, without gradients
        assert kept == again  # nothing has happened since
