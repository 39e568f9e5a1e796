"""The parameters of experts that are spread over four ranks are those of one process with all experts and tokens."""

import contextlib
import copy
import warnings
from functools import cache
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from kit.two_ranks import in_ranks
from torch import distributed as dist
from torch import nn

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fusedmoe as fm
from fusedmoe import expert_parallel as ep_of
from fusedmoe.expert_parallel import capacity
from fusedmoe.numerics.formats import Delayed, fp8_block

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

SIZE = 4
E, H, I, K = 8, 6, 4, 2  # noqa: E741  (experts, hidden, intermediate, chosen experts)
TOKENS = 5, 3, 0, 8  # of each rank
STEPS = 3


@cache
def groups(rank):
    """The groups of a rank: all, pairs of neighbours (P = 2), and the replicas of what the pairs share."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    world = dist.init_device_mesh("cpu", (SIZE,))
    four, two = fm.ExpertParallel(world), fm.ExpertParallel(mesh["ep"])
    batched = fm.ExpertParallel(mesh["ep"], batch_rows=4)
    return SimpleNamespace(mesh=mesh, world=world, four=four, two=two, batched=batched, pair=two.group)


def same(got, expected, tolerance=0.0):
    got, expected = dict(got), dict(expected)
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        torch.testing.assert_close(torch.as_tensor(got[name]), t, rtol=tolerance, atol=tolerance, msg=name)


# ---- initial values -------------------------------------------------------------------------------------------------


def layers(ep, dtype, device=None):
    """Layers with experts, all kinds of weights, and the experts of P ranks in total."""
    ranks = 1 if ep is None else ep.ranks
    linear = {"dtype": dtype, "device": device, "expert_parallel": ep}
    moe = fm.MoE(H, I, E, K, bias=True, shared_intermediate=I, **linear)
    experts = moe.experts
    lora = fm.GroupedLoRA(fm.GroupedLinear(E // ranks, H, H, **linear), rank=2)
    stored = fm.GroupedLinear(2 * E // ranks, 136, 8, weight_format=fp8_block(across=128), bias=True, **linear)
    assert experts.down.weight.shape[0] == E // ranks
    return nn.ModuleDict({"moe": moe, "lora": lora, "stored": stored})


def start(ep, dtype, meta):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = layers(ep, dtype, "meta" if meta else None)
    if meta:
        assert torch.equal(torch.get_rng_state(), before), "drawn on the meta device"
        model.to_empty(device="cpu")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    values = {name: t.double() for name, t in model.state_dict().items()}
    return values, torch.get_rng_state()


STARTS = [(torch.float32, False), (torch.float64, True), (torch.bfloat16, False)]


def starts(rank, case):
    return [start(ep, *case) for ep in (groups(rank).four, groups(rank).two)]


def is_shard(name):
    return ".experts." in name or name.startswith(("lora.", "stored."))


@pytest.mark.parametrize("case", STARTS, ids=str)
def test_the_experts_of_all_ranks_are_those_of_one_process(four, case):
    expected, state = start(None, *case)
    for size, found in zip((4, 2), zip(*four.run(starts, case), strict=True), strict=True):
        ranks = found[:size]
        for name, t in expected.items():
            got = [values[name] for values, _ in ranks]
            whole = torch.cat(got) if is_shard(name) else got[0]
            torch.testing.assert_close(whole, t, rtol=0, atol=0, msg=name)
            assert is_shard(name) or all(torch.equal(other, got[0]) for other in got)
        assert all(torch.equal(after, state) for _, after in ranks), "generators differ afterwards"


def reset(module):
    torch.manual_seed(5)
    module.reset_parameters()


def starts_sharded(rank, dim):
    """Experts that FSDP2 shards over the replicas, made on the meta device; also the state for a checkpoint."""
    every = groups(rank)
    model = fm.MoE(H, I, E, K, bias=dim == 0, device="meta", expert_parallel=every.two)
    fully_shard(model.experts, mesh=every.mesh["dp"], shard_placement_fn=lambda _: Shard(dim))
    model.to_empty(device="cpu")
    for op in (model.experts.gate_up, model.experts.down):
        reset(op)
        assert op.weight.to_local().shape[dim] == op.weight.shape[dim] // 2
    state = ep_of.state_dict(model)["model"]
    return {name: t.full_tensor() for name, t in state.items() if name.startswith("experts.")}


@pytest.mark.parametrize("dim", [0, 1])
def test_experts_of_fsdp_from_the_meta_device(four, dim):
    one = fm.MoE(H, I, E, K, bias=dim == 0)
    for op in (one.experts.gate_up, one.experts.down):
        reset(op)
    for found in four.run(starts_sharded, dim):
        same(found, {name: t for name, t in one.state_dict().items() if name.startswith("experts.")})


# ---- weights of other layouts ---------------------------------------------------------------------------------------


@in_ranks("four")
def test_load_experts_takes_this_ranks_part(rank):
    ep = groups(rank).two
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(E, *s, generator=generator) for s in ((I, H), (I, H), (H, I)))
    gate_bias, up_bias, down_bias = (torch.randn(E, n, generator=generator) for n in (I, I, H))
    router = torch.randn(E, H, generator=generator)
    own = slice(ep.rank * E // 2, (ep.rank + 1) * E // 2)
    weights = {"gate": gate, "up": up, "down": down, "gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
    of_this_rank, one_by_one = ({name: part(t) for name, t in weights.items()} for part in (lambda t: t[own], iter))
    for each in (weights, of_this_rank, one_by_one):
        layer = fm.MoE(H, I, E, K, bias=True, expert_parallel=ep)
        fm.load_experts(layer, router=router, **each)
        same(layer.state_dict().items(), {
            "router.weight": router,
            "experts.gate_up.weight": torch.cat((gate, up), 1)[own],
            "experts.gate_up.bias": torch.cat((gate_bias, up_bias), 1)[own],
            "experts.down.weight": down[own],
            "experts.down.bias": down_bias[own],
        }.items())  # fmt: skip
    with pytest.raises(fm.InputError, match=r"gate: expected shape .*, or 8 experts of all ranks, got \(3, "):
        fm.load_experts(layer, router=router, **weights | {"gate": gate[:3]})
    sharded = distribute_tensor(gate, groups(rank).mesh["ep"], [Shard(0)])
    with pytest.raises(fm.InputError, match="gate: expected a plain tensor"):
        fm.load_experts(layer, router=router, **weights | {"gate": sharded})


# ---- gradients ------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, ep):
        super().__init__()
        self.first = nn.Linear(H, H)
        self.second = fm.MoE(H, I, E, K, shared_intermediate=I, expert_parallel=ep)
        self.third = fm.MoE(H, I, E, K, bias=True, expert_parallel=ep)

    def forward(self, x):
        return self.third(x + self.second(self.first(x)))


def make(ep=None):
    torch.manual_seed(0)
    with torch.device("cpu"):
        return Model(ep).double()


def given(rank, step):
    """The tokens of one of the four ranks."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(TOKENS[(rank + step) % SIZE], H, generator=generator, dtype=torch.float64)


def loss_of(model, batches):
    """The mean over the batches of each one's mean."""
    y = model(torch.cat(batches))
    parts = zip(y.split([*map(len, batches)]), batches, strict=True)
    return sum((y - x.roll(1, -1)).square().sum() / max(len(x), 1) for y, x in parts) / len(batches)


class Layout:
    """A model on some ranks, and which of the four batches this rank has; without a kind, one process has all."""

    def __init__(self, kind=None, rank=0, batches=False):
        self.kind, every = kind, None if kind is None else groups(rank)
        self.ep = None if kind is None else every.four if kind in ("ddp4", "fsdp4") else every.two
        self.ep = every.batched if batches else self.ep
        self.batches = {None: range(SIZE), "pair": [2 * (rank % 2), 2 * (rank % 2) + 1]}.get(kind, [rank])
        self.group = every.pair if kind == "pair" else None
        self.model = self.inner = make(self.ep)
        if kind not in (None, "fsdp2x2"):
            ep_of.average_gradients(self.inner, self.group)
        if kind in ("ddp4", "ddp2x2", "pair"):
            self.model = DistributedDataParallel(self.inner, process_group=self.group)
        elif kind is not None:
            ignored = set(ep_of.shards(self.inner).values())
            if kind == "fsdp2x2":
                ignored = set()
                for layer in (self.inner.second, self.inner.third):
                    fully_shard(layer.experts, mesh=every.mesh["dp"])
                    layer.experts.set_gradient_divide_factor(SIZE)
            self.model = fully_shard(self.inner, mesh=every.world, ignored_params=ignored)

    def backward(self, step, scale=1.0, sync=True):
        waits = not sync and isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync() if waits else contextlib.nullcontext():
            (scale * loss_of(self.model, [given(rank, step) for rank in self.batches])).backward()

    def parameters(self):
        """For an optimizer: experts that FSDP2 leaves alone are not in one group with its DTensors."""
        experts = ep_of.shards(self.inner)
        others = [p for name, p in self.inner.named_parameters() if name not in experts]
        return self.inner.parameters() if self.kind is None else [{"params": [*experts.values()]}, {"params": others}]

    def whole(self, of=lambda p: p):
        """All experts' parameters, or other tensors of them, gathered without the functions that are tested."""
        found = {}
        for name, parameter in self.inner.named_parameters():
            t = of(parameter)
            t = (t.full_tensor() if hasattr(t, "full_tensor") else t).detach()
            if self.ep is not None and ".experts." in name:
                parts = [torch.empty_like(t) for _ in range(self.ep.ranks)]
                dist.all_gather(parts, t.contiguous(), group=self.ep.group)
                t = torch.cat(parts)
            found[name] = t.clone()
        return found


KINDS = ["ddp4", "ddp2x2", "pair", "fsdp4", "fsdp2x2"]
MICRO_BATCHES = [(1, True), (2, False)]  # per step, and whether each of them is reduced


def train(layout, micro_batches, sync, clip):
    """Norms of all gradients, and the parameters."""
    # SGD sees the scale, unlike Adam; foreach, the default on GPUs, takes no DTensors together with other tensors
    optimizer = torch.optim.SGD(layout.parameters(), lr=0.05, momentum=0.9, foreach=True)
    norms = []
    for step in range(STEPS):
        for i in range(micro_batches):
            layout.backward(micro_batches * step + i, 1 / micro_batches, sync or i + 1 == micro_batches)
        norms.append(clip(layout.model, 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, layout.whole()


def trained(rank, kind, batches=False):
    with mock.patch.object(capacity, "ROWS", 4):  # few tokens have many batches of rows
        found = [train(Layout(kind, rank, batches), *case, ep_of.clip_grad_norm_) for case in MICRO_BATCHES]
    return found if rank == SIZE - 1 else [norms for norms, _ in found]


def clip(model, most):
    return nn.utils.clip_grad_norm_(model.parameters(), most)


@pytest.fixture(scope="module")
def in_one_process():
    return [train(Layout(), *case, clip) for case in MICRO_BATCHES]


@pytest.mark.parametrize(
    ("kind", "batches"),
    [
        *[pytest.param(kind, False, marks=[pytest.mark.slow] if kind == "ddp4" else []) for kind in KINDS],
        ("ddp2x2", True), ("fsdp2x2", True),
    ],
)  # fmt: skip
def test_ranks_train_as_one_process_with_all_tokens(four, in_one_process, kind, batches):
    *others, last = four.run(trained, kind, batches)
    before = make().state_dict()
    for case, (norms, parameters) in enumerate(in_one_process):
        got_norms, got = last[case]
        torch.testing.assert_close(got_norms, norms, rtol=1e-12, atol=0)
        assert all(other[case] == got_norms for other in others), "another norm on another rank"
        same(got, parameters, 1e-12)
        assert min((p - before[name]).abs().max() for name, p in parameters.items()) > 1e-4
        assert max(norms) > 0.3, "nothing was clipped"


@in_ranks("four")
def test_norms(rank):
    """A rank without gradients joins the sum, and gradients in bf16 stay so."""
    inner = make(groups(rank).two)
    if rank == 0:
        inner.second.experts.down.weight.grad = torch.full_like(inner.second.experts.down.weight, 2.0)
    assert ep_of.clip_grad_norm_(inner, 1e9).item() == pytest.approx(2 * (E // 2 * H * I) ** 0.5 * (rank < 2))
    layer = fm.MoE(H, I, E, K, dtype=torch.bfloat16, expert_parallel=groups(rank).two)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    norm = 2 * (E * H + 3 * E * H * I) ** 0.5
    assert ep_of.clip_grad_norm_(layer, 1.0).item() == pytest.approx(norm, rel=1e-2)
    assert {p.grad.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer.router.weight.grad.mean().item() == pytest.approx(2 / norm, rel=1e-2)


def gradients_after(model, rank):
    loss_of(model, [given(rank, 0)]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@in_ranks("four")
def test_parameters_that_are_made_or_unfrozen_later(rank):
    """Parameters that are unfrozen, assigned, copied or added after `average_gradients`."""
    ep = groups(rank).two

    def averaged(frozen=False):
        model = make(ep)
        for parameter in ep_of.shards(model).values():
            parameter.requires_grad_(not frozen)
        ep_of.average_gradients(model)
        return model

    expected = gradients_after(averaged(), rank)
    assigned, unfrozen = averaged(), averaged(frozen=True)
    assigned.load_state_dict({name: t.clone() for name, t in assigned.state_dict().items()}, assign=True)
    unfrozen(given(rank, 0))
    unfrozen.requires_grad_()
    for model in (assigned, unfrozen, copy.deepcopy(averaged())):
        for _ in range(2):  # no second division
            model.zero_grad()
            same(gradients_after(model, rank), expected)
    model = averaged()
    torch.manual_seed(1)
    model.second.experts.down = lora = fm.GroupedLoRA(model.second.experts.down, rank=2)
    lora.lora_B.weight.data.fill_(0.1)
    found = gradients_after(model, rank)
    model.zero_grad()
    ep_of.average_gradients(model)
    expected = gradients_after(model, rank)
    for name in ("lora_A", "lora_B"):
        name = f"second.experts.down.{name}.weight"
        assert expected[name].any()
        assert torch.equal(found[name], expected[name])


def into_main_grad(rank, placeholder):
    """The owner of ``main_grad`` divides it, and sums it over replicas: here there are none."""
    layout = Layout("ddp4", rank)
    ops = [op for op in layout.inner.modules() if isinstance(op, fm.GroupedLinear)]
    for op in ops:
        op.accumulate_into_main_grad = True
        op.weight.main_grad = torch.zeros_like(op.weight)
        if placeholder:
            op.weight.grad_added_to_main_grad = False
    for step in range(2):
        layout.backward(step)
        assert all((op.weight.grad is not None) is placeholder for op in ops)
    for parameter in ep_of.shards(layout.inner).values():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.div_(SIZE)
    norm = ep_of.clip_grad_norm_(layout.inner, 0.5)
    return norm, layout.whole(lambda p: getattr(p, "main_grad", p.grad))


@pytest.mark.parametrize("placeholder", [False, True])
def test_main_grad(four, placeholder):
    one = Layout()
    for step in range(2):
        one.backward(step)
    want = clip(one.inner, 0.5)
    assert want > 0.5
    for norm, found in four.run(into_main_grad, placeholder):
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
        if found is not None:
            same(found, one.whole(lambda p: p.grad), 1e-6)  # torch divides by the norm plus 1e-6


@in_ranks("four")
def test_ranks_that_have_made_different_numbers_of_groups(rank):
    """They have the same groups of replicas and of hosts. torch names a group after the number of those before it."""
    groups(rank)
    without_hosts = dist.new_group(backend="cuda:gloo")  # as NCCL alone: no collectives of CPU tensors
    more = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    ep = fm.ExpertParallel(without_hosts)
    assert ep.most_tokens(rank + 5) == SIZE + 4
    assert fm.ExpertParallel(without_hosts)._of_hosts is ep._of_hosts
    model = make(groups(rank).two)
    ep_of.average_gradients(model)
    weight = model.second.experts.down.weight
    (weight.sum() * (rank + 1)).backward()
    assert weight.grad.unique().item() == (rank + 1 + (rank + 2) % SIZE + 1) / SIZE  # of this rank and its replica
    for group in more:
        dist.destroy_process_group(group)


@in_ranks("four")
def test_what_cannot_be_averaged(rank):
    every = groups(rank)
    inner = make(every.four)
    ops = [("second", ["weight"]), ("third", ["weight", "bias"])]
    expected = [f"{layer}.experts.{op}.{p}" for layer, own in ops for op in ("gate_up", "down") for p in own]
    assert [*ep_of.shards(inner)] == expected
    assert ep_of.shards(make()) == {}
    with pytest.raises(fm.InputError, match=r"group: expected all data-parallel ranks.*of 4 ranks.*got ranks \["):
        ep_of.average_gradients(inner, every.pair)
    with torch.device("meta"):
        meta = Model(every.four)
    with pytest.raises(fm.InputError, match=r"second\.experts\.gate_up\.weight: expected .* memory"):
        ep_of.average_gradients(meta)
    stored = fm.GroupedLinear(2, 8, 8, weight_format=fp8_block(across=128))
    codes, scales = stored.weight.detach(), stored.weight_scale_inv.detach()
    stored = fm.GroupedLinear.from_quantized(codes, scales, expert_parallel=every.four)
    assert [*ep_of.shards(stored)] == ["weight", "weight_scale_inv"]
    state = ep_of.state_dict(stored)["model"]
    assert [(t.shape[0], t.dtype) for t in state.values()] == [(8, torch.float8_e4m3fn), (8, torch.float32)]


@in_ranks("four")
def test_sums_over_the_ranks_of_experts_and_over_all(rank):
    every, load = groups(rank), torch.tensor([rank, 1])
    pair = rank // 2 * 2
    assert every.two.sum_over_ranks(load).tolist() == [2 * pair + 1, 2]
    for ranks in (every.world, every.world.get_group()):
        assert every.two.sum_over_ranks(load, ranks).tolist() == [6, 4]
    assert load.tolist() == [rank, 1]


@in_ranks("four")
def test_weights_of_a_chain_that_are_not_spread_over_its_ranks(rank):
    """Each rank has other experts, but gradients and checkpoints would take these for the same."""
    every, x = groups(rank), torch.randn(3, H)
    given = {"expert_index": torch.zeros(3, K, dtype=torch.int64), "expert_weight": torch.ones(3, K)}
    for own, ranks in ((None, "None"), (every.two, r"ExpertParallel\(rank \d of 2")):
        chain = fm.Sequential(
            fm.Dispatch(E, expert_parallel=every.four), fm.GroupedLinear(2, H, H, expert_parallel=own),
            fm.Combine(None, expert_parallel=every.four),
        )  # fmt: skip
        expected = (
            r"^1\.GroupedLinear: expert_parallel: expected the ranks of 0\.Dispatch, ExpertParallel\(rank \d of 4"
        )
        with pytest.raises(fm.InputError, match=rf"{expected}.*, got {ranks}"):
            chain(x, **given)


@in_ranks("four")
def test_experts_that_are_taken_for_replicas(rank):
    """DDP and FSDP2 that were not told of the experts, which they take for the same on all ranks."""
    every = groups(rank)
    inner = make(every.two)
    inner(given(rank, 0))  # planned before DDP
    copied = copy.deepcopy(inner)
    ep_of.average_gradients(inner.second)
    x = given(rank, 0)
    with pytest.raises(
        fm.InputError, match=r"second\.experts\.gate_up\.weight: expected to be left alone.*average_grad"
    ):
        DistributedDataParallel(inner)(x)
    ep_of.average_gradients(copied)
    before = copy.deepcopy(copied.state_dict())
    DistributedDataParallel(torch.compile(copied, backend="eager"))
    same(copied.state_dict(), before)  # not those of rank 0
    over = r"weight: expected .* sharded over ranks \[0, 1, 2, 3\]"
    with pytest.raises(fm.InputError, match=rf"GroupedLinear\(.*\): {over}"):
        fully_shard(make(every.two), mesh=every.world)
    sharded = make(every.two)
    sharded.second.experts.gate_up.register_parameter(
        "weight", nn.Parameter(distribute_tensor(sharded.second.experts.gate_up.weight.data, every.world, [Shard(0)]))
    )
    for function in (ep_of.shards, ep_of.state_dict, lambda model: ep_of.clip_grad_norm_(model, 1.0)):
        with pytest.raises(fm.InputError, match=over):
            function(sharded)
    ep_of.average_gradients(inner)
    with pytest.raises(fm.InputError, match=r"weight: expected a plain parameter after average_gradients.*a DTensor"):
        fully_shard(inner.second.experts, mesh=every.mesh["dp"])


# ---- copies of one rank's experts -----------------------------------------------------------------------------------


def broadcast(ep, rank):
    model = make(ep)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return model


def fsdp1(ep, rank):
    return FullyShardedDataParallel(make(ep), device_id=torch.device("cpu"))


def new_ep(rank):
    """Ranks that have exchanged nothing yet."""
    return fm.ExpertParallel(groups(rank).two.group)


def called(model, rank, times):
    for step in range(times):
        model(given(rank, step))


@pytest.mark.parametrize("make_model", [broadcast, fsdp1])
@in_ranks("four")
def test_copies_of_the_experts_of_one_rank_raise(rank, make_model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of them are deprecated
        model = make_model(new_ep(rank), rank)
        with pytest.raises(fm.InputError, match=r"weight: expected each rank to have experts of its own"):
            called(model, rank, 4)


@in_ranks("four")
def test_ranks_with_other_hooks_compare_in_the_same_exchanges(rank):
    """One rank calls other modules, or only looks: the ranks still compare in the same exchanges."""
    model = make(new_ep(rank))
    everywhere = [m.register_forward_hook(lambda *_: None) for m in model.modules()] if rank == 0 else []
    for step in range(3):
        model(given(rank, step)).sum().backward()
    for handle in everywhere:
        handle.remove()
    if rank == 1:
        model.second.experts.register_forward_hook(lambda *_: None)
        model.second.explain(given(rank, 0))
    for step in range(6):
        model(given(rank, step)).sum().backward()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    with pytest.raises(fm.InputError, match="experts of its own"):
        called(model, rank, 16)  # until the exchange 32


@in_ranks("four")
def test_experts_that_are_equal_on_purpose(rank):
    """Constants, and experts of which the user says so."""
    constant = make(new_ep(rank))
    said = broadcast(fm.ExpertParallel(groups(rank).two.group, equal_experts=True), rank)
    for parameter in constant.parameters():
        nn.init.constant_(parameter, 0.01)
    for model in (constant, said):
        called(model, rank, 2)


# ---- loss scaling ---------------------------------------------------------------------------------------------------


def overflowing(rank, fused, unscale):
    """Three steps; in the second one, one rank's gradient of a shard overflows."""
    model = make(groups(rank).four)
    ep_of.average_gradients(model)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    empty = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # without gradients
    scaler = ep_of.GradScaler("cpu", init_scale=4.0)
    values, scales = [], []
    for step in range(3):
        scaler.scale(loss_of(model, [given(rank, step)])).backward()
        if (rank, step) == (1, 1):
            model.module.second.experts.down.weight.grad[0, 0, 0] = torch.inf
        if unscale:
            scaler.unscale_(optimizer)
            scaler.unscale_(empty)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        values.append({name: t.clone() for name, t in model.state_dict().items()})
        scales.append(scaler.get_scale())
    assert scales == [4.0, 2.0, 2.0]
    same(values[1], values[0])
    assert not torch.equal(*(v["module.first.weight"] for v in values[1:]))
    return {name: t for name, t in values[2].items() if ".experts." not in name}


@pytest.mark.parametrize(("fused", "unscale"), [(False, True), (True, False)])
def test_all_ranks_skip_a_step(four, fused, unscale):
    first, *others = four.run(overflowing, fused, unscale)
    for other in others:
        same(other, first)


@in_ranks("four")
def test_a_scaler_for_other_models(rank):
    layout = Layout("fsdp4", rank)  # DTensors and plain parameters
    optimizer = torch.optim.SGD(layout.model.parameters(), lr=0.1, foreach=False)
    scaler = ep_of.GradScaler("cpu", group=groups(rank).world, init_scale=4.0)
    norms = []
    for given_scaler in (scaler, torch.amp.GradScaler("cpu", enabled=False)):
        given_scaler.scale(loss_of(layout.model, [given(rank, 0)])).backward()
        given_scaler.unscale_(optimizer)
        norms.append(ep_of.clip_grad_norm_(layout.model, 1e9).item())
        optimizer.zero_grad()
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    given_scaler.step(optimizer)
    alone = make(groups(rank).four)  # whose gradients nothing averages
    for model, parameters in (
        *[(layout.model, layout.parameters()) for layout in (Layout("ddp4", rank), Layout("fsdp2x2", rank))],
        (alone, ep_of.shards(alone).values()),
    ):
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps the step
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(loss_of(model, [given(rank, 0)])).backward()
        with pytest.raises(fm.InputError, match=r"^GradScaler: expected fm\.expert_parallel\.GradScaler"):
            scaler.step(optimizer)
        optimizer.step()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def optimizer_of(layout):
    return torch.optim.AdamW(layout.parameters(), lr=1e-2, foreach=True)


def steps(layout, optimizer, first, last):
    for step in range(first, last):
        layout.backward(step)
        optimizer.step()
        optimizer.zero_grad()


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(layout, optimizer, step):
    """For a checkpoint; one process has all experts, and uses torch's functions alone."""
    if layout.ep is None:
        model_state, optimizer_state = get_state_dict(layout.model, optimizer, options=FLAT)
        return {"model": model_state, "optimizer": optimizer_state, "step": step}
    return ep_of.state_dict(layout.model, optimizer) | {"step": step}


def saved(rank, kind, folder):
    """The parameters in a checkpoint, and those after two more steps."""
    layout = Layout(kind, rank)
    optimizer = optimizer_of(layout)
    steps(layout, optimizer, 0, 2)
    checkpoint.save(state_of(layout, optimizer, 2), checkpoint_id=folder, process_group=layout.group)
    before = layout.whole()
    steps(layout, optimizer, 2, 4)
    return before, layout.whole()


def resumed(rank, kind, folder):
    layout = Layout(kind, rank)
    optimizer = optimizer_of(layout)
    for parameter in layout.model.parameters():
        nn.init.constant_(parameter, 0.01)
    if kind is not None:
        steps(layout, optimizer, 0, 1)
    state = state_of(layout, optimizer, 0)
    checkpoint.load(state, checkpoint_id=folder, process_group=layout.group)
    assert state["step"] == 2
    if kind is None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(layout.model, optimizer, **parts, options=FLAT)
    else:
        ep_of.load_state_dict(layout.model, optimizer, state)
    before = layout.whole()
    steps(layout, optimizer, 2, 4)
    return before, layout.whole()


@pytest.mark.parametrize(("kind", "others"), [
    (None, ["ddp4", "fsdp2x2"]), ("ddp2x2", [None, "ddp4", "pair"]), ("fsdp2x2", [None, "fsdp4"]),
])  # fmt: skip
def test_a_checkpoint_is_loaded_by_any_number_of_ranks(four, tmp_path, kind, others):
    def run(function, kind):
        return function(0, None, tmp_path) if kind is None else four.run(function, kind, tmp_path)[1]

    before, after = run(saved, kind)
    for got_before, got_after in (run(resumed, other) for other in others):
        same(got_before, before)
        same(got_after, after, 1e-12)
    assert min((after[name] - before[name]).abs().max() for name in after) > 1e-4


@in_ranks("four")
def test_state_of_an_optimizer_that_is_not_per_expert(rank):
    every, found = groups(rank), []
    for ep in (every.four, every.two):  # one expert and two experts on each rank
        layer = fm.MoE(H, I, SIZE, K, bias=True, expert_parallel=ep)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer(torch.ones(3, H)).sum().backward()
        optimizer.step()
        for parameter in layer.parameters():
            like = parameter.shape
            optimizer.state[parameter] |= {"steps": torch.ones(1)}
            if len(like) > 1:  # as in Adafactor
                columns = torch.full((*like[:-2], 1, like[-1]), float(ep.rank))
                optimizer.state[parameter] |= {"rows": torch.ones(*like[:-1], 1), "columns": columns}
        state = ep_of.state_dict(layer, optimizer)["optimizer"]
        found.append({key: tuple(t.shape) for key, t in state.items() if isinstance(t, torch.Tensor)})
    one, two = found
    assert one == two
    of_weight = {name.rpartition(".")[2]: t for name, t in one.items() if ".down.weight." in name}
    assert of_weight == {
        "momentum_buffer": (SIZE, H, I), "steps": (1,), "rows": (SIZE, H, 1), "columns": (SIZE, 1, I),
    }  # fmt: skip
    of_bias = {name.rpartition(".")[2]: t for name, t in one.items() if ".down.bias." in name}
    assert of_bias == {"momentum_buffer": (SIZE, H), "steps": (1,), "rows": (SIZE, 1), "columns": (1, H)}


DELAYED = fm.numerics.recipes.FP8Tensor(delayed=Delayed(history=3))


def with_history(model, rank):
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        with fm.recipe(DELAYED):
            model(x).square().sum().backward()
    return model


def histories(rank, folder):
    torch.manual_seed(0)
    model = with_history(fm.MoE(32, 32, E, K, expert_parallel=groups(rank).four), rank)
    checkpoint.save(ep_of.state_dict(model), checkpoint_id=folder)
    torch.manual_seed(1)
    other = with_history(fm.MoE(32, 32, E, K, expert_parallel=groups(rank).two), rank)
    state = ep_of.state_dict(other)
    checkpoint.load(state, checkpoint_id=folder)
    ep_of.load_state_dict(other, None, state)
    return [{name: t.clone() for name, t in m.state_dict().items()} for m in (model, other)]


def test_delayed_scales_of_experts(four, tmp_path):
    found = four.run(histories, tmp_path)
    assert sum("amax_history" in name for name in found[0][0]) > 6
    for name in found[0][0]:
        dim = 0 if name.startswith("experts.") else None
        dim = dim if "amax_history" not in name else found[0][0][name].dim() - 1
        before, after = [each[0][name] for each in found], [each[1][name] for each in found[:2]]
        if dim is None:
            assert torch.equal(before[0], after[0])
            continue
        torch.testing.assert_close(torch.cat(after, dim), torch.cat(before, dim), rtol=0, atol=0)
        assert not torch.equal(before[0], before[1]), name
