"""Expert parallelism on CPUs: the ranks of a group, together, are one process with all tokens and all experts. Also
under dtypes, torch.compile and torch.export.
"""

import copy
from functools import partial
from itertools import cycle

import pytest
import torch
from kit.compare import pairwise
from kit.expert_parallel_ranks import (
    E,
    H,
    K,
    Poisoned,
    Recording,
    Selective,
    bounds,
    check,
    compared,
    engine,
    experts,
    in_group,
    moe,
    on_each,
    outcomes,
    pair,
    randn,
    ranks_of,
    result,
    routes,
    shard_of,
    summed_gradients,
)
from kit.two_ranks import Counted
from torch import distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.numerics import recipes
from fusedmoe.numerics.formats import Delayed

pytestmark = pytest.mark.distributed

EVEN, UNEVEN, EMPTY_RANK, ALL_EMPTY = (6, 6, 6, 6), (5, 1, 9, 3), (0, 7, 0, 4), (0, 0, 0, 0)
MANY = (96, 50, 0, 71)  # more rows than a block of a rank's capacity
both_sizes = pytest.mark.parametrize("size", [2, 4])

# ---- one table of layers --------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Layers one after the other, and two beside each other."""

    def __init__(self, ep, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(moe(ep, shared_intermediate=4 if i == 1 else None) for i in range(layers))
        self.beside = moe(ep, bias=True, top_k=3)

    def forward(self, x):
        for made in self.layers:
            x = x + torch.tanh(made(x))
        return self.layers[0](x) + self.beside(x)  # the first layer again


def frozen(ep, names):
    made = moe(ep)
    for name in names:
        made.get_submodule(name).requires_grad_(False)
    return made


def adapted(ep):
    made = moe(ep, shared_intermediate=4)
    made.requires_grad_(False)
    made.experts.gate_up = fm.GroupedLoRA(made.experts.gate_up, rank=4, alpha=8)
    made.experts.down = fm.GroupedLoRA(made.experts.down, rank=4, alpha=8)
    return made


def in_sequences(layer, x):
    """Tokens of shape (sequences, length, H)."""
    y = layer(x.unflatten(0, (-1, 3)))
    assert y.dim() == 3
    return y


def twice_backward(layer, x):
    y = layer(x)
    y.sum().backward(retain_graph=True)
    return y


@torch.autocast("cpu", torch.bfloat16)
def in_autocast(layer, x):
    return layer(x).float()


@fm.recipe("mxfp8")
def under_mxfp8(layer, x):
    return layer(x)


LAYERS = {
    "softmax of the chosen": {"score": "topk_softmax", "router_bias": True},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "groups, sigmoid": {"score": "sigmoid", "num_groups": 4, "top_groups": 2},
    "balance bias": {"balance_bias": True},
    "biases": {"bias": True, "router_bias": True},
    "clamped": {"activation": fm.SwiGLU(limit=1.5, alpha=1.702, offset=1.0), "bias": True, "score": "topk_softmax"},
    "squared_relu": {"activation": "squared_relu"},
    "shared": {"shared_intermediate": 6, "shared_gate": True, "bias": True},
    "one expert per token": {"top_k": 1, "renormalize": False},
}
three = partial(moe, top_k=3)
scaled, combined = partial(experts, weights=None), partial(experts, weights="probs")
ROUTED = {"routed": {}}
# ranks, settings, layer, tokens of each rank, and options of `layer` below
CASES = {
    **{
        f"{tokens}, at most {most}, {size}": (size, most, moe, tokens)
        for tokens, most, size in pairwise((EVEN, UNEVEN, EMPTY_RANK, ALL_EMPTY), (None, 9), (2, 4))
    },
    **{
        name: (size, None, partial(moe, **options), UNEVEN)
        for size, (name, options) in zip(cycle((4, 2)), LAYERS.items(), strict=False)
    },
    "a group of one": (1, None, partial(moe, shared_intermediate=6, bias=True), UNEVEN),
    "several layers": (2, None, Model, UNEVEN),
    "LoRA": (2, None, adapted, UNEVEN),
    "LoRA, x without a gradient": (4, 9, adapted, EMPTY_RANK, {"x_grad": False}),
    "frozen router": (2, None, partial(frozen, names=("router",)), UNEVEN, {"x_grad": False}),
    "frozen experts": (2, None, partial(frozen, names=("experts",)), UNEVEN, {"x_grad": False}),
    "frozen gate_up": (2, None, partial(frozen, names=("router", "experts.gate_up")), UNEVEN, {"x_grad": False}),
    "recomputed": (2, None, moe, EMPTY_RANK, {"call": partial(checkpoint, use_reentrant=False)}),
    "recomputed, max_tokens": (4, 9, Model, EMPTY_RANK, {"call": partial(checkpoint, use_reentrant=True)}),
    "sequences": (4, None, partial(moe, shared_intermediate=6), (6, 3, 0, 9), {"call": in_sequences}),
    "two backward passes": (2, None, moe, UNEVEN, {"call": twice_backward}),
    "autocast": (2, None, moe, UNEVEN, {"call": in_autocast, "dtype": torch.float32, "within": 0.02}),
    "a recipe": (4, 9, moe, EMPTY_RANK, {"call": under_mxfp8, "dtype": torch.float32, "within": 1e-3}),
    "bf16": (2, None, partial(moe, shared_intermediate=4), UNEVEN, {"dtype": torch.bfloat16, "within": 0.02}),
    "alltoall, bf16": (
        2, {"engine": "alltoall"}, partial(moe, shared_intermediate=4), UNEVEN,
        {"dtype": torch.bfloat16, "within": 0.02},
    ),
    # the ops by themselves
    **{
        f"{weights}, sentinels {sentinels}, at most {most}, {size}": (
            size, most, partial(experts, weights=weights), UNEVEN, {"routed": {"sentinels": sentinels}},
        )
        for weights, sentinels, most, size in pairwise((None, "probs"), (False, True), (None, 9), (2, 4))
    },
    **{
        str(dtype): (2, None, scaled, UNEVEN, {"routed": {"sentinels": dtype is not torch.uint8, "dtype": dtype}})
        for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8)
    },
    **{
        f"other modules at {places}, {weights}, at most {most}": (
            2, most, partial(experts, weights=weights, foreign=places), UNEVEN, ROUTED,
        )
        for places, weights, most in pairwise(((0,), (1,), (2,), (3,), (-1,), (1, 3)), (None, "probs"), (None, 9))
    },
    **{
        f"hooks on {names}, {weights}, at most {most}": (
            2, most, partial(experts, weights=weights), UNEVEN, {"routed": {}, "hooked": names},
        )
        for names, weights, most in pairwise(
            (("0",), ("4",), ("0", "4"), ("1",), ("0", "1", "2", "3")), (None, "probs"), (None, 9)
        )
    },
    **{
        f"hooks on {names}, at most {most}": (2, most, partial(moe, bias=bias), tokens, {"hooked": names})
        for names, most, (tokens, bias) in pairwise(
            (("router",), ("experts",), ("experts.dispatch",), ("experts.combine",),
             ("experts.dispatch", "experts.combine"), ("router", "experts.down")),
            (None, 9), ((UNEVEN, True), (EMPTY_RANK, False)),
        )
    },
    # other engines, and ranks with fewer rows
    **{
        f"alltoall, {kind}, {tokens}, {size}": (
            size, {"engine": "alltoall"}, partial(experts, weights=weights), tokens, {"routed": {"kind": kind}},
        )
        for kind, tokens, size, weights in pairwise(
            ("usual", "to rank 0", "no remote"), (UNEVEN, EMPTY_RANK, ALL_EMPTY), (2, 4), (None, "probs")
        )
    },
    "alltoall, a layer": (2, {"engine": "alltoall"}, Model, UNEVEN),
    "all tokens to one rank": (4, None, scaled, UNEVEN, {"routed": {"kind": "to rank 0"}}),
    "enough capacity": (2, {"capacity": 100.0}, three, MANY),
    "a run again": (4, {"capacity": 1.01, "overflow": "rerun"}, three, MANY),
    "a run again, max_tokens": (2, {"capacity": 0.25, "overflow": "rerun", "max_tokens": 96}, three, MANY),
    # experts in batches of rows
    **{
        f"batches, {kind}, {weights}, sentinels {sentinels}, at most {most}, {size}": (
            size, {"batch_rows": 128, "max_tokens": most}, partial(experts, weights=weights), MANY,
            {"routed": {"kind": kind, "sentinels": sentinels, "top_k": 2}},
        )
        for kind, weights, sentinels, most, size in pairwise(
            ("usual", "to rank 0", "no remote"), (None, "probs"), (False, True), (None, 96), (2, 4)
        )
    },
    "batches, a layer": (4, {"batch_rows": 100}, partial(three, shared_intermediate=4), MANY),
    "batches, several layers": (2, {"batch_rows": 128}, Model, MANY),
    "batches, no tokens": (2, {"batch_rows": 128}, three, ALL_EMPTY),
    "batches, LoRA": (2, {"batch_rows": 128}, adapted, MANY, {"x_grad": False}),
    "batches, frozen experts": (2, {"batch_rows": 128}, partial(frozen, names=("experts",)), MANY),
    "batches, frozen gate_up": (
        4, {"batch_rows": 128}, partial(frozen, names=("router", "experts.gate_up")), MANY, {"x_grad": False},
    ),
    "batches, recomputed": (2, {"batch_rows": 128}, three, MANY, {"call": partial(checkpoint, use_reentrant=False)}),
    "batches, recomputed, reentrant": (
        4, {"batch_rows": 128}, three, MANY, {"call": partial(checkpoint, use_reentrant=True)},
    ),
    "batches, two backward passes": (2, {"batch_rows": 128}, moe, MANY, {"call": twice_backward}),
    "batches, autocast": (
        2, {"batch_rows": 128}, moe, MANY, {"call": in_autocast, "dtype": torch.float32, "within": 0.02},
    ),
    "batches, a recipe": (
        4, {"batch_rows": 128}, moe, MANY, {"call": under_mxfp8, "dtype": torch.float32, "within": 1e-3},
    ),
    "batches, bf16": (2, {"batch_rows": 128}, three, MANY, {"dtype": torch.bfloat16, "within": 0.02}),
    "batches, combine_dtype": (
        2, {"batch_rows": 128, "combine_dtype": torch.float32}, three, MANY, {"dtype": torch.bfloat16, "within": 0.02},
    ),
    "batches, hooks on experts": (2, {"batch_rows": 128}, three, MANY, {"hooked": ("experts",)}),
    "batches, padding": (2, {"batch_rows": 128, "max_tokens": 99}, three, MANY, {"kind": Poisoned}),
    "batches, unwanted rows": (4, {"batch_rows": 128}, three, MANY, {"kind": Selective}),
    # buffers in which a rank may find anything
    **{
        f"padding of {name}": (size, most, make, tokens, {"kind": Poisoned, **options})
        for name, size, most, make, tokens, options in (
            ("a layer", 2, 12, moe, UNEVEN, {}),
            ("biases", 4, None, partial(moe, bias=True), EMPTY_RANK, {}),
            ("a shared expert", 4, 12, partial(moe, score="sigmoid", shared_intermediate=4), UNEVEN, {}),
            ("ops", 2, 12, scaled, UNEVEN, {"routed": {}}),
            ("ops with a hook", 4, 12, combined, UNEVEN, {"routed": {}, "hooked": ("0",)}),
            ("ops with the last hook", 2, 12, scaled, UNEVEN, {"routed": {}, "hooked": ("5",)}),
            ("ops with hooks inside", 2, 12, combined, UNEVEN, {"routed": {}, "hooked": ("1", "2")}),
        )
    },
    "unwanted rows": (2, 12, moe, UNEVEN, {"kind": Selective}),
    "unwanted rows, biases": (4, None, partial(moe, bias=True), EMPTY_RANK, {"kind": Selective}),
    "unwanted rows, shared": (4, 12, partial(moe, shared_intermediate=4), UNEVEN, {"kind": Selective}),
}  # fmt: skip


@on_each
def layer(ep, make, tokens, routed=None, hooked=(), kind=None, **options):
    tokens, calls = tokens[: ep.ranks], []

    def made(ep):
        layer = make(ep)
        for name in hooked:
            layer.get_submodule(name).register_forward_hook(lambda module, given, out: calls.append(module))
        return layer

    if routed is not None:
        options["inputs"] = routes(tokens, **routed)
    with engine(ep, kind) as used:
        local = check(ep, made, tokens, **options)
    assert len(calls) == 2 * len(hooked)
    assert kind is not Selective or used.unwanted > 0
    assert ep.dropped() == 0
    return [name for name, p in local.named_parameters() if p.grad is not None]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_are_one_process(four, case):
    size, settings, make, tokens, *options = case
    trained = four.run(layer, size, settings, make, tokens, **dict(*options))[0]
    assert make is not adapted or (len(trained) == 4 and all("lora" in name for name in trained))


@pytest.mark.parametrize(("how", "size", "settings"), [(torch.no_grad, 2, None), (torch.inference_mode, 4, 9)])
@in_group()
def test_without_gradients(ep, how):
    """A token with NaN too, which other tokens of its rank and of other ranks do not see."""
    whole, local = pair(ep, moe)
    tokens = UNEVEN[: ep.ranks]
    x = randn(sum(tokens), H, seed=1)
    x[2] = torch.nan
    with how():
        y, want = local(x[bounds(ep, tokens)]), whole(x)[bounds(ep, tokens)]
    compared({"y": y}, {"y": want}, equal_nan=True)
    assert y.isnan().any(1).sum() == (ep.rank == 0)
    assert want.nan_to_num(1).abs().min() > 0


@pytest.mark.parametrize(("size", "settings"), [(2, None), (4, 9)])
@in_group()
def test_gradients_that_nothing_wants_do_not_travel(ep):
    """The sizes that travel in the last exchange, for gradients that some tensors do not want."""
    tokens = UNEVEN[: ep.ranks]
    rows = ep.ranks * (ep.max_tokens or max(tokens))
    with engine(ep, Recording) as recorded:
        check(ep, moe, tokens, x_grad=False)
        assert recorded.log[-1] == ("exchange", [((rows, K), torch.float64)])
        for weights in (None, "probs"):
            check(ep, partial(experts, weights=weights), tokens, inputs=routes(tokens, wants=False))
            assert recorded.log[-1] == ("exchange", [((rows, H), torch.float64)])


@pytest.mark.parametrize(("size", "settings", "options", "tokens"), [
    (2, None, {}, UNEVEN), (4, 9, {"score": "sigmoid"}, EMPTY_RANK),
    (4, None, {"score": "topk_softmax", "shared_intermediate": 4}, UNEVEN),
])  # fmt: skip
@in_group()
def test_statistics(ep, options, tokens):
    """Losses and load are those of a rank's own tokens; their gradients too."""
    whole, local = pair(ep, partial(moe, **options))
    tokens = tokens[: ep.ranks]
    here = bounds(ep, tokens)
    x_AH, dy_AH = randn(sum(tokens), H, seed=1), randn(sum(tokens), H, seed=2)

    def loss_of(stats, rows, rank):
        """That of rank 1 may read the statistics alone: all ranks exchange gradients alike."""
        losses = (1 + rank) * stats.load_balancing_loss + 0.5 * stats.z_loss
        return losses if rank == 1 and "shared_intermediate" not in options else losses + rows.sum()

    x = x_AH.clone().requires_grad_()
    of_ranks = [whole.router.stats(whole.router(part)) for part in x.split(tokens)]
    rows = (whole(x) * dy_AH).split(tokens)
    sum(loss_of(*part) for part in zip(of_ranks, rows, range(ep.ranks), strict=True)).backward()
    want = {"x": x.grad[here]} | of_ranks[ep.rank]._asdict()
    mine = x_AH[here].clone().requires_grad_()
    y, stats = local(mine, return_stats=True)
    loss_of(stats, y * dy_AH[here], ep.rank).backward()
    got = {"x": mine.grad} | stats._asdict() | summed_gradients(ep, whole, local)
    assert int(stats.load.sum()) == mine.shape[0] * K
    theirs = dict(whole.named_parameters())
    want |= {name: shard_of(ep, theirs[name].grad, p) for name, p in local.named_parameters()}
    total = ep.sum_over_ranks(stats.load)
    compared(got, want)
    assert torch.equal(total, whole(x_AH, return_stats=True)[1].load)


@in_group(size=2, settings=None)
def test_second_derivatives_are_refused(ep):
    layer, x = moe(ep).double(), randn(3, H, seed=1).requires_grad_()
    with pytest.raises(RuntimeError, match=r"dispatch.gather exchanges tensors with other ranks"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


# ---- alltoall -------------------------------------------------------------------------------------------------------


@both_sizes
@in_group(settings={"engine": "alltoall"})
def test_alltoall_has_a_row_for_each_slot(ep):
    tokens = UNEVEN[: ep.ranks]
    given, here, rows = routes(tokens), bounds(ep, tokens), []
    local = experts(ep).double()
    local[1].register_forward_hook(lambda module, given, y: rows.append(y.shape[0]))
    local(randn(sum(tokens), H, seed=1)[here], **given(here))
    index = given(slice(0, sum(tokens)))["expert_index"]
    assert rows == [int((index // (E // ep.ranks) == ep.rank).sum())]
    assert rows[0] > 0


@on_each
def chosen_engines(ep):
    layers = [moe(ep, top_k=k, renormalize=False) for k in (1, ep.ranks)]
    for layer in layers:
        layer(torch.randn(5 + ep.rank, H)).sum().backward()
        assert layer.router.weight.grad.abs().sum() > 0
    return [layer.experts.dispatch.expert_parallel.engine.name for layer in layers] + [ep.engine.name]


@both_sizes
def test_auto_takes_alltoall_for_few_experts_per_token(four, size):
    assert four.run(chosen_engines, size, {"engine": "auto"})[0] == ["alltoall", "allgather", "allgather"]


# ---- recipes --------------------------------------------------------------------------------------------------------


RECIPES = ["fp8_block", "mxfp8", "fp8_row", "fp8_tensor", recipes.NVFP4(stochastic_rounding=False)]


@pytest.mark.parametrize(("recipe", "dtype", "how"), pairwise(
    RECIPES, (torch.bfloat16, torch.float32), ((2, None, None, True), (4, 9, "probs", False))
), ids=str)  # fmt: skip
def test_recipes_quantize_what_one_process_quantizes(four, recipe, dtype, how):
    size, most, weights, sentinels = how
    four.run(quantized, size, most, recipe, dtype, weights, sentinels)


@on_each
def quantized(ep, recipe, dtype, weights, sentinels):
    """The experts alone, with given routes: each expert sees the same rows in the same order as in one process."""
    tokens = UNEVEN[: ep.ranks]
    made, given = partial(experts, weights=weights), routes(tokens, sentinels)
    with fm.recipe(recipe):
        got, want = outcomes(ep, *pair(ep, made, dtype), tokens, inputs=given, dtype=dtype)
    plain, _ = outcomes(ep, *pair(ep, made, dtype), tokens, inputs=given, dtype=dtype)
    for name, t in want.items():
        if name in ("y", "x"):
            error = 2**-7 if dtype is torch.bfloat16 else 1e-6  # of sums over a token's experts
            assert (got[name] - t).norm() <= error * t.norm(), name
        else:
            assert torch.equal(got[name], t), name
            assert not name.endswith(".weight") or not torch.equal(plain[name], t), f"{name}: the recipe has no effect"


@on_each
def times_quantized(ep):
    """How often weights are quantized: in micro-batches with tokens of their own, and after another collective."""
    local = moe(ep)
    counts = []
    with fm.recipe("mxfp8"), Counted() as quantized:
        for step in range(4):
            if step == 3:
                dist.all_reduce(torch.ones(1), group=ep.group)
            x = torch.randn(3 + step + ep.rank, H, requires_grad=True)
            y, stats = checkpoint(local, x, True, use_reentrant=False)
            (y.sum() + stats.z_loss).backward()
            ep.sum_over_ranks(stats.load)
            counts.append(quantized.count)
    return counts


@pytest.mark.parametrize(("size", "most"), [(2, None), (4, 12)])
def test_exchanges_leave_weights_quantized(four, size, most):
    """Other collectives may write to a weight, and have it quantized again."""
    for once, *later in four.run(times_quantized, size, most)[:size]:
        assert once > 0
        assert later == [once, once, 2 * once]


@pytest.mark.parametrize(("size", "settings", "recomputed"), [(2, None, False), (4, 9, True)])
@in_group()
def test_delayed_scaling(ep, recomputed):
    """The scales of each expert are those of one process in every step, and so is the state that is saved."""
    whole, local = pair(ep, scaled, torch.float32)
    call = partial(checkpoint, use_reentrant=False) if recomputed else None
    with fm.recipe(recipes.FP8Tensor(delayed=Delayed(history=3))):
        for step in range(4):
            tokens = tuple((step + 2) * (rank + 1) % 7 for rank in range(ep.ranks))
            got, want = outcomes(
                ep, whole, local, tokens, inputs=routes(tokens, False), dtype=torch.float32, call=call, zeros=["x", "y"]
            )
            for name, t in want.items():
                if name not in ("y", "x"):
                    assert torch.equal(got[name], t), f"step {step}: {name}"
    mine, theirs = local.state_dict(), whole.state_dict()
    assert sum("amax_history" in name for name in mine) >= 8
    assert mine.keys() == theirs.keys()
    for name, t in theirs.items():
        axis = -1 if "amax_history" in name else 0  # of the experts
        assert torch.equal(mine[name], t.tensor_split(ep.ranks, axis)[ep.rank]), name


# ---- the order of collectives ---------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Layers that are recomputed, without gradients, and in branches, whose order backward autograd decides."""

    def __init__(self, ep):
        super().__init__()
        options = {}, {"bias": True}, {"score": "sigmoid", "top_k": 3}, {"shared_intermediate": 4}
        self.layers = nn.ModuleList(moe(ep, **of) for of in options)
        self.layers[3].experts.dispatch.register_forward_hook(lambda module, given, out: None)

    def forward(self, x):
        first, second, third, hooked = self.layers
        x = x + torch.tanh(checkpoint(first, x, use_reentrant=True))
        x = x + torch.tanh(checkpoint(third, x, use_reentrant=False))
        y, stats = second(x, return_stats=True)
        with torch.no_grad():
            kept = first(x)
        return hooked(x + y) + second(x) * third(kept), stats.load_balancing_loss


@on_each
def log_of_exchanges(ep, seed, steps):
    """Which exchanges this rank began, with the sizes that travel, over steps with numbers of tokens of its own."""
    torch.manual_seed(0)
    model = Mixed(ep)
    generator = torch.Generator().manual_seed(100 * seed + ep.rank)
    agreed = ep.most_tokens
    with engine(ep, Recording) as recorded:

        def most_tokens(tokens):
            recorded.log.append("agree")
            return agreed(tokens)

        ep.most_tokens = most_tokens
        try:
            for step in range(steps):
                # plans differ with the power of two of T
                tokens = 2 ** int(torch.randint(0, 8, (), generator=generator)) - 1
                x = torch.randn(tokens, H, generator=generator).requires_grad_()
                recorded.log.append(f"step {step}")
                y, losses = model(x)
                recorded.log.append("backward")
                (y.square().sum() + losses).backward()
        finally:
            del ep.most_tokens
    return recorded.log


@pytest.mark.parametrize(("size", "max_tokens"), [(2, 127), (4, None)])
@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_all_ranks_exchange_in_the_same_order(four, size, max_tokens, steps):
    first, *others = four.run(log_of_exchanges, size, max_tokens, steps, steps)[:size]
    assert all(other == first for other in others)
    assert len([entry for entry in first if entry[0] == "exchange"]) >= steps * 2 * 6
    assert ("agree" in first) is (max_tokens is None)


# ---- dispatch_dtype: tokens and gradients travel to the experts as FP8 codes ----------------------------------------
# The oracle is one process with the tokens of all ranks, which rounds tokens and gradients of results itself.

HIDDEN, CHOSEN = 192, 3  # a row has one block and a half
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SCALE = torch.tensor([1.0] * 128 + [100.0] * 64)  # another one per block


def rounded(t):
    """The definition, written out: the scale of 128 values is the least power of two with which none is over 448."""
    blocks = [block.double() for block in t.split(128, dim=-1)]
    scales = [2 ** (block.abs().amax(-1, keepdim=True) / 448).log2().ceil() for block in blocks]
    found = [(block / scale).to(FP8).double() * scale for block, scale in zip(blocks, scales, strict=True)]
    return torch.cat(found, -1).to(t.dtype)


class Rounded(torch.autograd.Function):
    """Rounds in forward or in backward."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward_alone = forward
        return rounded(x) if forward else x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad if ctx.forward_alone else rounded(grad), None


def plain(layer, x, **given):
    return layer(x * SCALE.to(x.dtype), **given)


def rounding(layer, x, **given):
    return Rounded.apply(layer(Rounded.apply(x * SCALE.to(x.dtype), True), **given), False)


def relative(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@on_each
def rounds(ep, tokens, dtype, weights, within, kind=None):
    """Compare with the oracle; return the effect of rounding on each tensor."""
    tokens = tokens[: ep.ranks]
    make = partial(experts, weights=weights, hidden=HIDDEN, wide=32, bias=False)
    whole, local = pair(ep, make, dtype, std=0.2)
    inputs = routes(tokens, top_k=CHOSEN, of=dtype)
    results = []
    for call in (rounding, plain):
        layer = copy.deepcopy(whole)
        x, dy = (randn(sum(tokens), HIDDEN, seed=seed, dtype=dtype) for seed in (1, 2))
        found = result(layer, x, dy, inputs(slice(0, len(x))), call)
        results.append(found | {name: p.grad for name, p in layer.named_parameters()})

    def call(layer, x, **given):
        return (rounding if layer is whole else plain)(layer, x, **given)

    with engine(ep, kind):
        got, want = outcomes(ep, whole, local, tokens, inputs=inputs, dtype=dtype, hidden=HIDDEN, call=call)
    compared(got, want, within=within)
    return [relative(found, without) for found, without in zip(*(r.values() for r in results), strict=True)]


@pytest.mark.parametrize(("size", "settings", "tokens", "weights"), pairwise(
    (2, 4), ({"engine": "allgather"}, {"max_tokens": 9}, {"engine": "alltoall"}), (EVEN, UNEVEN, EMPTY_RANK),
    (None, "probs"),
), ids=str)  # fmt: skip
def test_tokens_and_gradients_are_rounded(four, size, settings, tokens, weights):
    settings = settings | {"dispatch_dtype": FP8}
    for effects in four.run(rounds, size, settings, tokens, torch.float32, weights, 2e-6)[:size]:
        assert all(0.01 < effect < 0.1 for effect in effects), effects  # of the option


def test_tokens_in_bf16_and_padding_with_nan_are_rounded(four):
    four.run(rounds, 2, {"engine": "alltoall", "dispatch_dtype": FP8}, UNEVEN, BF16, None, 1e-2)
    four.run(rounds, 4, {"max_tokens": 9, "dispatch_dtype": FP8}, UNEVEN, torch.float32, None, 2e-6, Poisoned)


@in_group(size=2, settings={"dispatch_dtype": FP8})
def test_other_dtypes_are_refused(ep):
    with pytest.raises(
        fm.InputError, match=r"dispatch_dtype .*: expected tokens in fp32, bf16 or fp16, got torch.float64"
    ):
        experts(ep).double()(randn(3, 16, seed=1), **routes((3,))(slice(0, 3)))


# ---- combine_dtype --------------------------------------------------------------------------------------------------


@on_each
def weighted_sums(ep):
    """Dispatch and Combine alone, which round nothing else: the error with this combine_dtype, and without."""
    x, given = randn(24, HIDDEN, seed=ep.rank, dtype=BF16), routes((24,), top_k=4, of=torch.float32)(slice(0, 24))
    given["expert_weight"] = given["expert_weight"].detach().abs() + 0.1
    index, weight = given["expert_index"], given["expert_weight"]
    exact = torch.where((index >= 0) & (index < E), weight, 0).double().sum(1, keepdim=True) * x.double()
    errors = []
    for of in (ep, ranks_of(ep.ranks, {"engine": ep.engine.name})):
        layer = fm.Sequential(fm.Dispatch(E, expert_parallel=of), fm.Combine("probs", expert_parallel=of))
        y = layer(x, **given)
        assert y.dtype is BF16
        errors.append(relative(y, exact))
    return errors


@pytest.mark.parametrize(("size", "name"), [(2, "allgather"), (4, "alltoall")])
def test_sums_in_fp32_are_rounded_once(four, size, name):
    for fine, coarse in four.run(weighted_sums, size, {"engine": name, "combine_dtype": torch.float32})[:size]:
        assert 0 < fine < 0.95 * coarse < 0.01


# ---- torch.compile, torch.export and explain() ----------------------------------------------------------------------


@in_group(size=2, settings=6)
def test_a_compiled_model(ep):
    """The layer is not traced: a graph break before and after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, H), moe(ep, shared_intermediate=8))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")

    def outcome(run, x):
        model.zero_grad()
        return result(run, x, torch.ones_like(x)) | {name: p.grad for name, p in model.named_parameters()}

    for count in (5, 3 - ep.rank):
        x = randn(count, H, seed=count, dtype=torch.float32)
        want = outcome(model, x)
        assert want["y"].any()
        for _ in range(2):
            compared(outcome(compiled, x), want)


@in_group(size=2, settings=6)
def test_one_graph_is_refused(ep):
    layer, x = moe(ep), torch.randn(6, H)
    with pytest.raises(fm.InputError, match=r"torch.export: expected a module with all experts on one rank"):
        torch.export.export(layer, (x,))
    with pytest.raises(Exception, match="exchanges tokens with other ranks"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)


@on_each
def explained(ep):
    """Only rank 0 explains: no other rank answers it."""
    texts = []
    if ep.rank == 0:
        for most, device in ((None, "cpu"), (6, "meta")):
            layer = moe(ranks_of(2, most), shared_intermediate=8).to(device)
            texts.append(str(layer.explain(torch.randn(6, H, device=device).requires_grad_(), arch=90)))
        # exchanges run unfused for so few tokens, which is no miss; the rule for the last one sends all gradients
        last = ("experts.dispatch.gather.DGatherTokens",)
        layer, x = layer.to(BF16), torch.empty(6, H, device="meta", dtype=BF16)
        for wanted in (False, True):
            plan = layer.explain(x.requires_grad_(wanted), arch=90)
            plan.raise_if_missed()
            unfused = [s.ops for s in plan.steps if s.rule is None]
            assert len(unfused) == (3 if wanted else 4), unfused
            assert (last in unfused) != wanted
    dist.barrier(ep.group)
    return texts


def test_explain_communicates_nothing(four):
    agreed, at_most = four.run(explained, 2, None)[0]
    # 6 rows of 16 fp32 from the other rank, with two ids of 4 bytes and two weights of 4 bytes each
    received = 6 * (16 * 4 + 2 * 4 + 2 * 4)
    assert f"experts.dispatch.gather.GatherTokens: {received} B received, as much sent" in agreed
    assert "module experts.dispatch.agree: AgreeOnTokens: the hosts agree on" in agreed
    assert "tokens per rank at most 6" in at_most
    assert "AgreeOnTokens" not in at_most
