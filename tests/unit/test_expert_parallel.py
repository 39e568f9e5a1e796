"""Errors of expert parallelism: the settings, weights that do not fit, and calls that cannot exchange tokens."""

import contextlib
import sys
import types

import pytest
import torch
from torch import distributed as dist
from torch import nn

import fusedmoe as fm
from fusedmoe.expert_parallel import engine
from fusedmoe.expert_parallel.engine import Pending

REMEDY = "experts are spread over ranks by expert_parallel="


def sharded(layer, change):
    """The layer with its experts' weights changed."""
    for op in (layer.experts.gate_up, layer.experts.down):
        op.weight = nn.Parameter(change(op.weight.detach()))
    return layer


def test_weights_of_a_wrong_shape():
    with pytest.raises(fm.InputError, match="MoE: expert_parallel: expected an ExpertParallel or None, got 2"):
        fm.MoE(8, 4, 4, 2, expert_parallel=2)
    layer = sharded(fm.MoE(8, 4, 4, 2), lambda weight: weight[:, :, :2].clone())
    with pytest.raises(fm.InputError, match=r"weight: expected shape \(4, 8, 8\), got \(4, 8, 2\)$"):
        layer(torch.randn(3, 8))  # which says nothing of ranks
    layer = sharded(fm.MoE(8, 4, 4, 2), lambda weight: weight[:2].clone())
    with pytest.raises(fm.InputError, match=rf"gate_up.*\(4, 8, 8\), all 4 experts \({REMEDY}.*got \(2, 8, 8\)"):
        layer(torch.randn(3, 8))


def test_a_call_while_another_thread_imports_dtensor(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", types.ModuleType("torch.distributed.tensor"))
    assert fm.MoE(8, 4, 4, 2)(torch.randn(3, 8)).shape == (3, 8)


@pytest.fixture
def mesh():
    if not dist.is_available():
        pytest.skip("torch is built without distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_router_that_is_a_dtensor_is_refused(mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    layer = fm.MoE(8, 4, 4, 2, num_groups=2, top_groups=2)
    layer.router.weight = nn.Parameter(distribute_tensor(layer.router.weight.detach(), mesh, [Replicate()]))
    with pytest.raises(fm.InputError, match=r"router\.Router.*weight: expected a plain tensor of all 4 experts, got"):
        layer(torch.randn(3, 8))


def test_a_dtensor_is_refused_and_explained(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    layer = sharded(fm.MoE(8, 4, 4, 2), lambda weight: distribute_tensor(weight, mesh, [Shard(0)]))
    x = torch.randn(3, 8)
    assert "gate_up" in str(layer.explain(x)), "the plan of a sharded model can still be read"
    for grad in (False, True, False):  # also where the plan is there already
        with torch.set_grad_enabled(grad), pytest.raises(fm.InputError, match=REMEDY) as raised:
            layer(x)
        assert str(raised.value).startswith(
            "experts.gate_up.GroupedLinear(num_groups=4, in_features=8, out_features=8): weight: "
        )
        assert "got a DTensor, Shard(dim=0); " in str(raised.value)


def test_unawaited_results_are_awaited_on_the_stream_of_their_memory(monkeypatch):
    """After an error, memory that an engine still writes must not be used again."""
    streams = ["the stream of the layer"]
    monkeypatch.setattr(engine, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(engine, "external_stream", lambda device, address: address)

    @contextlib.contextmanager
    def on(stream):
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "stream", on)
    waited = []
    waits = [lambda: waited.append("the first"), lambda: waited.append(streams[-1])]
    pending = Pending([[types.SimpleNamespace(device=torch.device("cuda", 0))], torch.zeros(1)], waits, [])
    pending.wait(0)
    assert waited == ["the first"]
    streams.append("another one")
    del pending
    assert waited == ["the first", "the stream of the layer"]


@pytest.mark.parametrize("value", [2.0, torch.inf])
def test_an_infinite_largest_norm_computes_the_norm_alone(value):
    layer = nn.Linear(3, 2)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, value)
    assert fm.expert_parallel.clip_grad_norm_(layer, float("inf")).item() == pytest.approx(value * 8**0.5)
    assert all((p.grad == value).all() for p in layer.parameters())
    for wrong in (-1.0, float("nan"), -float("inf")):
        with pytest.raises(fm.InputError, match=r"max_norm: expected a number, 0 or more; math\.inf computes the norm"):
            fm.expert_parallel.clip_grad_norm_(layer, wrong)
