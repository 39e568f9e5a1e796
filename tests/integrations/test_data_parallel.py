"""DDP and FSDP2 over two processes are one process with the whole batch; their checkpoints; loss scaling; collectives
that write to a quantized weight.
"""

import copy
import time

import pytest
import torch
from kit import plain_models
from kit.two_ranks import HIDDEN, Counted, Ranks, batches
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedmoe as fm

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from torch.distributed import checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as dcp_state

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

E, H, I = 4, HIDDEN, 8  # noqa: E741  (experts, hidden, intermediate)
STEPS = 3
SPLITS = torch.tensor([[5, 0, 9, 8], [0, 20, 0, 4]])  # of each rank: an expert of it has no row, and rank 0 has a tail
FP32, FP64 = torch.float32, torch.float64


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
    def __init__(self, dtype=FP64):
        super().__init__()
        self.first = plain_models.MoE(H, I, E, 2, dtype=dtype)
        self.second = plain_models.MoE(H, I, E, 2, shared=I, dtype=dtype)
        self.third = plain_models.Experts(E, H, I, dtype)

    forward = Model.forward


def make(dtype=FP64):
    torch.manual_seed(0)
    model = Model().to(dtype)
    with torch.no_grad():
        model.first.router.weight.copy_(torch.eye(E, H))
    return model


def sharded(model, **options):
    for layer in (model.first, model.second, model.third):
        fsdp.fully_shard(layer, **options)
    return fsdp.fully_shard(model, **options)


def compiled_layers(model):
    for layer in (model.first, model.second, model.third):
        layer.compile(backend="eager", fullgraph=True)
    return model


WRAPPERS = {
    "DDP": DistributedDataParallel,
    "DDP, compiled": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "FSDP2": lambda model: sharded(model, reshard_after_forward=True),
    "FSDP2, not resharded": lambda model: sharded(model, reshard_after_forward=False),
    "FSDP2, compiled": lambda model: compiled_layers(sharded(model)),
}


def whole(model):
    options = dcp_state.StateDictOptions(full_state_dict=True)
    state = dcp_state.get_model_state_dict(model, options=options)
    return {name: t.detach().clone() for name, t in state.items()}


def loss_of(model, x, splits):
    return (model(x, splits).to(torch.promote_types(x.dtype, FP32)) - x.roll(1, -1)).square().sum(-1).mean()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # unlike Adam it sees a gradient's scale


def train(model, ranks, micro_batches=1, dtype=FP64, recipe="bf16"):
    """Losses of the batches of some ranks, of whose mean the gradients are."""
    optimizer, losses = optimizer_of(model), []
    given = list(zip(*[batches(rank, STEPS * micro_batches, dtype) for rank in ranks], strict=True))
    for i, parts in enumerate(given):
        last = (i + 1) % micro_batches == 0
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        elif hasattr(model, "require_backward_grad_sync"):  # as in the context no_sync
            model.require_backward_grad_sync = last
        with fm.recipe(recipe):
            losses.append([loss_of(model, x, SPLITS[rank]) for x, rank in zip(parts, ranks, strict=True)])
        (sum(losses[-1]) / len(parts) / micro_batches).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return [[loss.item() for loss in both] for both in losses]


def on_a_rank(rank, wrapper, micro_batches=1, recipe="bf16", dtype=FP64):
    """Losses of this rank, parameters after training, rows per expert of the first layer, bytes of kept weights."""
    inner = make(dtype)
    model = WRAPPERS[wrapper](inner)
    losses = train(model, [rank], micro_batches, dtype, recipe)
    load = make(dtype).first(next(batches(rank, 1, dtype)), return_stats=True)[1].load
    return losses, whole(inner), load, fm.weight_cache_bytes(inner)


def of_both(found):
    return [a + b for a, b in zip(found[0][0], found[1][0], strict=True)]


@pytest.mark.parametrize(("wrapper", "micro_batches"), [
    ("DDP", 2), ("DDP, compiled", 1), ("FSDP2", 2), ("FSDP2, not resharded", 2), ("FSDP2, compiled", 1),
])  # fmt: skip
def test_two_ranks_are_one_with_the_whole_batch(ranks, wrapper, micro_batches):
    one = plain_models.twin(Plain(), make())
    losses = train(one, [0, 1], micro_batches)
    found = ranks.run(on_a_rank, wrapper, micro_batches)
    torch.testing.assert_close(of_both(found), losses)
    before, parameters = make().state_dict(), {name: p.detach() for name, p in one.named_parameters()}
    for _, got, load, _ in found:
        torch.testing.assert_close(got, parameters)
        assert 0 in load.tolist()
    assert not torch.equal(found[0][2] > 0, found[1][2] > 0)
    assert min((p - before[name]).abs().max() for name, p in parameters.items()) > 1e-4
    assert all(torch.equal(p, found[1][1][name]) for name, p in found[0][1].items())


@pytest.mark.parametrize(("wrapper", "recipe"), [
    ("DDP", "mxfp8"), ("FSDP2", "mxfp8"), ("FSDP2, not resharded", "fp8_tensor"),
])  # fmt: skip
def test_quantized_weights_follow_what_both_ranks_learnt(ranks, wrapper, recipe):
    one = make(FP32)
    losses = train(one, [0, 1], dtype=FP32, recipe=recipe)
    found = ranks.run(on_a_rank, wrapper, recipe=recipe, dtype=FP32)
    assert of_both(found) == losses
    torch.testing.assert_close(found[0][1], dict(one.state_dict()), rtol=0, atol=0)
    assert (found[0][3] == 0) is (wrapper != "DDP"), "quantized weights of a layer whose weights are sharded again"
    assert abs(losses[-1][0] - train(make(FP32), [0, 1], dtype=FP32)[-1][0]) > 1e-6


# ---- checkpoints, from one layout into another ----------------------------------------------------------------------


class Trained:
    """A model in mxfp8, with AdamW; every process has the same rows, so that every layout has the same sums."""

    def __init__(self, is_sharded, fresh=False):
        self.model = make(FP32)
        if fresh:
            for parameter in self.model.parameters():
                nn.init.constant_(parameter, 0.01)
        if is_sharded:
            sharded(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def steps(self, count):
        losses = []
        for _ in range(count):
            with fm.recipe("mxfp8"):
                losses.append(loss_of(self.model, next(batches(0, 1, FP32)), SPLITS[0]))
            losses[-1].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [loss.item() for loss in losses]

    def states(self):
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def save(rank, folder, is_sharded=True):
    trained = Trained(is_sharded)
    trained.steps(2)
    dcp.save(trained.states(), checkpoint_id=folder)
    return whole(trained.model), trained.steps(2)


def load(rank, folder, is_sharded=True):
    trained = Trained(is_sharded, fresh=True)
    trained.steps(1)  # a quantized weight from before the load must not be used after it
    state = trained.states()
    dcp.load(state, checkpoint_id=folder)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    dcp_state.set_state_dict(trained.model, trained.optimizer, **parts)
    return whole(trained.model), trained.steps(2)


@pytest.mark.parametrize("from_ranks", [True, False])
def test_checkpoints_of_two_ranks_and_of_one_process(ranks, tmp_path, from_ranks):
    """Stock names and shapes, and the same training afterwards."""
    saved, continued = ranks.run(save, tmp_path)[0] if from_ranks else save(0, tmp_path, False)
    assert {name: t.shape for name, t in saved.items()} == {n: t.shape for n, t in Plain().state_dict().items()}
    assert all(t.unique().numel() > 1 for t in saved.values())
    for got, losses in [load(0, tmp_path, False)] if from_ranks else ranks.run(load, tmp_path):
        torch.testing.assert_close(got, saved, rtol=0, atol=0)
        assert losses == continued


# ---- collectives that write to a quantized weight: the next call quantizes it again, and nobody has to say so -------


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
    "broadcast_coalesced": lambda weight: dist._broadcast_coalesced(dist.group.WORLD, [weight.data], 2**20, 0),
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
    splits = torch.tensor([5, 3])
    fc, x = fm.GroupedLinear(2, 32, 32), torch.randn(8, 32)
    with fm.recipe("mxfp8"), Counted() as quantized:
        first = fc(x, splits=splits)
        if gradient:
            first.sum().backward()  # the gradient is still there when the weight is written to
        with torch.no_grad():
            first = fc(x, splits=splits)
            counts = [quantized.count]
            before = fc.weight.detach().clone()
            COLLECTIVES[name](fc.weight)
            changed = not torch.equal(before, fc.weight)
            for _ in range(2):
                y = fc(x, splits=splits)
                counts.append(quantized.count)
        want = copy.deepcopy(fc)(x, splits=splits).detach()
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


def test_an_overflow_in_fp16_is_skipped_and_training_goes_on():
    """Under autocast to fp16 a scale of 2**24 overflows in the experts' own gradients: the scaler finds its way."""
    torch.manual_seed(0)
    model = nn.Sequential(fm.MoE(H, I, E, 2, shared_intermediate=I), fm.MoE(H, I, E, 2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(40, H)
    skipped, losses = 0, []
    for _ in range(24):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = model(x)
        loss = (y.float() - x.roll(1, -1)).square().sum(-1).mean()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters()) == (not losses)
        else:
            losses.append(loss.item())
    assert skipped >= 2
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() and not torch.equal(before[name], p) for name, p in model.named_parameters())


def in_a_default_group_that_comes_and_goes(rank, store):
    numbers = iter(range(100))

    def init():
        of_group = dist.FileStore(f"{store}{next(numbers)}", 2)
        dist.init_process_group("gloo", store=of_group, rank=rank, world_size=2)
        # a rank that destroys the group closes its connections: not before the other rank has connected. This is no
        # collective, since their count is tested
        of_group.add("connected", 1)
        while of_group.add("connected", 0) < 2:
            time.sleep(0.001)

    found = []
    with torch.no_grad(), fm.recipe("mxfp8"):
        for _ in range(2):
            torch.manual_seed(rank)
            fc, x, splits = fm.GroupedLinear(2, 32, 32), torch.ones(8, 32), torch.tensor([5, 3])
            dist.destroy_process_group()
            init()
            dist.broadcast(torch.ones(1), 0)
            before = fc(x, splits=splits)
            dist.destroy_process_group()
            init()
            dist.broadcast(fc.weight, 0)  # as many collectives as in the other group
            y = fc(x, splits=splits)
            found.append((torch.equal(y, copy.deepcopy(fc)(x, splits=splits)), not torch.equal(y, before)))
    return found


def test_a_collective_of_a_default_group_that_comes_and_goes_is_noticed(tmp_path):
    """Its count of collectives begins anew, and says nothing by itself."""
    own = Ranks(tmp_path)
    try:
        of_rank_0, of_rank_1 = own.run(in_a_default_group_that_comes_and_goes, str(tmp_path / "again"))
    finally:
        own.stop()
    assert of_rank_0 == [(True, False)] * 2  # it sends
    assert of_rank_1 == [(True, True)] * 2
