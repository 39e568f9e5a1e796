"""NCCL's collectives that write to a quantized weight are noticed, without waiting for the device."""

import copy

import pytest
import torch
from torch import distributed as dist

import fusedmoe as fm
from fusedmoe.ops import quantize as quantize_op

E, H, I = 2, 64, 64  # noqa: E741


@pytest.fixture
def world(device):
    if not dist.is_nccl_available():
        pytest.skip("torch is built without NCCL")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def coalesced(weight):
    with dist.distributed_c10d._coalescing_manager(device=weight.device, async_ops=True) as manager:
        dist.all_reduce(weight)
    manager.wait()


def in_a_group_of_its_own(weight):
    group = dist.new_group([0])
    dist.broadcast(weight, 0, group=group)
    dist.destroy_process_group(group)


COLLECTIVES = {
    "broadcast": lambda weight: dist.broadcast(weight, 0),
    "all_reduce": dist.all_reduce,
    "all_reduce, asynchronous": lambda weight: dist.all_reduce(weight, async_op=True).wait(),
    "all_gather": lambda weight: dist.all_gather([weight], weight.clone()),
    "coalesced": coalesced,
    "subgroup": lambda weight: dist.broadcast(weight, 0, group=dist.new_group([0])),
    "group of its own": in_a_group_of_its_own,
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_noticed(device, world, no_sync, name):
    fc = fm.GroupedLinear(E, H, I, device=device, dtype=torch.bfloat16).requires_grad_(False)
    x, splits = torch.randn(8, H, device=device, dtype=torch.bfloat16), torch.tensor([5, 3], device=device)
    with fm.recipe("mxfp8"):
        first = fc(x, splits=splits)
        fc.weight.data.mul_(2)  # with one rank a collective changes nothing; alone, this goes unnoticed
        assert torch.equal(fc(x, splits=splits), first)
        COLLECTIVES[name](fc.weight.data)
        with no_sync():
            y = fc(x, splits=splits)
        assert torch.equal(y, copy.deepcopy(fc)(x, splits=splits))
    assert torch.equal(y, 2 * first)


@pytest.mark.parametrize("recipe", ["fp8_row", "mxfp8", "nvfp4"])
def test_micro_batches_keep_a_weight_and_a_zeroed_gradient_does_not(device, no_sync, recipe, monkeypatch):
    """An update by hand that torch does not count: only the count of the gradient's changes shows it."""
    fc = fm.GroupedLinear(E, H, I, device=device, dtype=torch.bfloat16)
    x = torch.randn(8, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    splits = torch.tensor([5, 3], device=device)
    counted = []

    def counting(t, *args, **kwargs):
        counted.append(t.dim() == 3)
        return fm.quantize(t, *args, **kwargs)

    monkeypatch.setattr(quantize_op, "quantize", counting)
    with fm.recipe(recipe), fm.disabled("sm90.quantize*"):  # plain PyTorch quantizes, and is counted
        for _ in range(2):
            counted.clear()
            for _ in range(4):
                fc(x, splits=splits).sum().backward()
            assert sum(counted) == 2  # by rows and by columns
            fc.weight.data.sub_(fc.weight.grad)
            fc.weight.grad.zero_()
            with no_sync(), torch.no_grad():
                y = fc(x, splits=splits)
            assert torch.equal(y, copy.deepcopy(fc)(x, splits=splits))
            fm.clear_weight_cache(fc)
