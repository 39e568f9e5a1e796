"""FSDP2 over two processes is one process with the whole batch."""

import warnings

import pytest
import torch
from kit import plain_models
from kit.two_ranks import HIDDEN, batches
from torch import distributed as dist
from torch import nn

import fusedmoe as fm

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

fsdp = pytest.importorskip("torch.distributed.fsdp")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

pytestmark = pytest.mark.distributed

E, H, I = 4, HIDDEN, 8  # noqa: E741  (experts, hidden, intermediate)
STEPS = 3


class Model(nn.Module):
    """Two layers, and experts that are called with splits; the first router reads what `batches` writes."""

    def __init__(self):
        super().__init__()
        self.first = fm.MoE(H, I, E, 2)
        self.second = fm.MoE(H, I, E, 2, shared_intermediate=I)
        self.third = fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H))

    def forward(self, x, splits):
        return self.third(self.second(self.first(x)), splits=splits)


class Plain(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.first = plain_models.MoE(H, I, E, 2, dtype=dtype)
        self.second = plain_models.MoE(H, I, E, 2, shared=I, dtype=dtype)
        self.third = plain_models.Experts(E, H, I, dtype)

    forward = Model.forward


SPLITS = torch.tensor([[5, 0, 9, 8], [0, 20, 0, 4]])  # of each rank: an expert has no row, and rank 0 has a tail


def make(dtype=torch.float64):
    torch.manual_seed(0)
    model = Model().to(dtype)
    with torch.no_grad():
        model.first.router.weight.copy_(torch.eye(E, H))
    return model


def loss_of(model, x, splits):
    return (model(x, splits).to(torch.promote_types(x.dtype, torch.float32)) - x.roll(1, -1)).square().sum(-1).mean()


def sharded(model, **options):
    for layer in (model.first, model.second, model.third):
        fsdp.fully_shard(layer, **options)
    return fsdp.fully_shard(model, **options)


def whole(model):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: t.detach().clone() for name, t in state.items()}


def train(model, rank, micro_batches=1, dtype=torch.float64, recipe="bf16"):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []  # sees the scale
    given = list(batches(rank, STEPS * micro_batches, dtype))
    for i, x in enumerate(given):
        last = (i + 1) % micro_batches == 0
        if micro_batches > 1:
            model.set_requires_gradient_sync(last)
        with fm.recipe(recipe):
            losses.append(loss_of(model, x, SPLITS[rank]))
        (losses[-1] / micro_batches).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


def on_a_rank(rank, reshard, micro_batches, recipe="bf16", dtype=torch.float64):
    model = sharded(make(dtype), reshard_after_forward=reshard)
    losses = train(model, rank, micro_batches, dtype, recipe)
    x = next(batches(rank, 1, dtype))
    load = make(dtype).first(x, return_stats=True)[1].load
    return losses, whole(model), load, fm.weight_cache_bytes(model)


def in_one_process(model, micro_batches=1, recipe="bf16", dtype=torch.float64):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []  # sees the scale
    given = list(zip(*[batches(rank, STEPS * micro_batches, dtype) for rank in range(2)], strict=True))
    for i, both in enumerate(given):
        with fm.recipe(recipe):
            losses.append([loss_of(model, x, splits) for x, splits in zip(both, SPLITS, strict=True)])
        (sum(losses[-1]) / 2 / micro_batches).backward()
        if (i + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [[a.item(), b.item()] for a, b in losses], {n: p.detach() for n, p in model.named_parameters()}


def by_step(found):
    return [list(both) for both in zip(found[0][0], found[1][0], strict=True)]


@pytest.mark.parametrize(("reshard", "micro_batches"), [(True, 1), (False, 1), (True, 2), (False, 2)])
def test_two_ranks_are_one_with_the_whole_batch(ranks, reshard, micro_batches):
    losses, parameters = in_one_process(plain_models.twin(Plain(), make()), micro_batches)
    found = ranks.run(on_a_rank, reshard, micro_batches)
    torch.testing.assert_close(by_step(found), losses)
    before = make().state_dict()
    for _, got, load, _ in found:
        torch.testing.assert_close(got, parameters)
        assert 0 in load.tolist()
    assert not torch.equal(found[0][2] > 0, found[1][2] > 0)
    assert min((p - before[name]).abs().max() for name, p in parameters.items()) > 1e-4


@pytest.mark.parametrize("reshard", [True, False])
def test_quantized_weights_follow_what_both_ranks_learnt(ranks, reshard):
    losses, parameters = in_one_process(make(torch.float32), 1, "mxfp8", torch.float32)
    found = ranks.run(on_a_rank, reshard, 1, "mxfp8", torch.float32)
    assert by_step(found) == losses
    torch.testing.assert_close(found[0][1], parameters, rtol=0, atol=0)
    assert found[0][3] == 0, "quantized weights of a layer whose weights are sharded again"
    unquantized, _ = in_one_process(make(torch.float32), 1, "bf16", torch.float32)
    assert abs(losses[-1][0] - unquantized[-1][0]) > 1e-6


def in_bf16(rank, reshard):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(make(torch.float32), reshard_after_forward=reshard, mp_policy=policy)
    return train(model, rank, dtype=torch.float32), whole(model)


@pytest.mark.parametrize("reshard", [True, False])
def test_mixed_precision(ranks, reshard):
    """Layers in bf16, of parameters that an optimizer changes in fp32: cast by hand, and the sums are the same."""
    found = ranks.run(in_bf16, reshard)
    model = make(torch.float32)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []  # sees the scale
    for both in zip(*[batches(rank, STEPS, torch.float32) for rank in range(2)], strict=True):
        optimizer.zero_grad()
        losses.append([])
        gradients = []
        for x, splits in zip(both, SPLITS, strict=True):
            cast = {name: p.bfloat16() for name, p in model.named_parameters()}
            y = torch.func.functional_call(model, cast, (x.bfloat16(), splits))
            loss = (y.float() - x.roll(1, -1)).square().sum(-1).mean()
            losses[-1].append(loss.item())
            gradients.append(torch.autograd.grad(loss, list(cast.values())))
        for parameter, a, b in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = (a.float() + b.float()) / 2
        optimizer.step()
    assert by_step(found) == losses
    for name, parameter in model.named_parameters():
        assert found[0][1][name].dtype is torch.float32
        torch.testing.assert_close(found[0][1][name], parameter.detach(), rtol=0, atol=0)


def from_meta(rank):
    with torch.device("meta"):
        model = Model()
    sharded(model)
    model.to_empty(device="cpu")
    torch.manual_seed(1 + rank)  # each draws its own shard
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support on cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    before = whole(model)
    return train(model, rank, dtype=torch.float32), before, whole(model)


def test_built_on_the_meta_device(ranks):
    found = ranks.run(from_meta)
    _, start, end = found[0]
    for name, parameter in start.items():
        bound = parameter.shape[-1] ** -0.5
        assert not parameter.is_meta
        assert 0.9 * bound < parameter.abs().max() <= bound, name
        assert parameter.unique().numel() > 0.9 * parameter.numel(), "two shards of the same numbers"
    model = Plain(torch.float32)
    model.load_state_dict(start)
    losses, parameters = in_one_process(model, dtype=torch.float32)
    torch.testing.assert_close(by_step(found), losses)
    torch.testing.assert_close(end, parameters)


def compiled(rank):
    model = sharded(make())
    for layer in (model.first, model.second, model.third):
        layer.compile(backend="eager", fullgraph=True)
    return train(model, rank), whole(model)


def test_compiled_layers(ranks):
    losses, parameters = in_one_process(plain_models.twin(Plain(), make()))
    found = ranks.run(compiled)
    torch.testing.assert_close(by_step(found), losses)
    torch.testing.assert_close(found[1][1], parameters)
