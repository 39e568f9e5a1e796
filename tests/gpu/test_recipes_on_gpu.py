"""Recipes on a GPU: the same codes as on a CPU, no host synchronisation, CUDA graphs, native products, kept weights."""

import copy

import pytest
import torch
from kit.compare import pairwise
from kit.hopper import DEVICE, capture
from kit.hopper_products import bits
from kit.quantize_kernels import QUANTIZERS, WEIGHTS
from kit.training import BF16, E, H, I, experts, inputs, random_splits
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.kernels.torch import quantized_products
from fusedmoe.numerics.formats import E2M1, E4M3, E5M2, Delayed, casts
from fusedmoe.numerics.formats.roles import ROLES
from fusedmoe.numerics.recipes import NVFP4, FP8Block, FP8Row, FP8Tensor

RECIPES = [*ROLES, FP8Tensor(delayed=Delayed(history=4)), FP8Row(hybrid=True), FP8Block(power_of_two=False)]


def name(recipe):
    return recipe if isinstance(recipe, str) else repr(recipe)


def assert_same_codes(ours, theirs):
    for on_gpu, on_cpu in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert (on_gpu is None) is (on_cpu is None)
        assert on_gpu is None or torch.equal(bits(on_gpu.cpu()), bits(on_cpu))


def wide(*shape):
    """Magnitudes from beside fp32's smallest to beside its largest, zeros, and a few that are no numbers."""
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.exp2(torch.randint(-40, 40, (*shape[:-1], 1)).float())
    flat = x.view(-1, shape[-1])
    flat[3] = 0
    flat[4] *= 2.0**-100
    flat[5, 7], flat[6, 1], flat[7, 2], flat[8, 0] = torch.nan, torch.inf, -torch.inf, -0.0
    return x


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=str)
def test_casts_of_every_bf16(element):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(BF16).float()
    assert torch.equal(bits(casts.to_codes(x.to(DEVICE), element).cpu()), bits(casts.to_codes(x, element)))


@pytest.mark.parametrize(
    ("which", "axis", "dtype"), pairwise([*QUANTIZERS], (-1, -2), (BF16, torch.float32, torch.float16)), ids=str
)
def test_rows_have_the_same_codes_as_on_a_cpu(which, axis, dtype):
    quantizer, x = QUANTIZERS[which], wide(300, 272).to(dtype)
    offsets = torch.tensor([0, 5, 5, 133, 261, 262, 290], dtype=torch.int32)
    x[290:] = torch.nan
    random_bits = None
    if quantizer.stochastic_rounding:
        shape = fm.quantize(x, quantizer, axis, offsets=offsets).codes().shape
        random_bits = torch.randint(0, 256, shape, dtype=torch.uint8)
    on_cpu = fm.quantize(x, quantizer, axis, offsets=offsets, random_bits=random_bits)
    random_bits = None if random_bits is None else random_bits.to(DEVICE)
    on_gpu = fm.quantize(x.to(DEVICE), quantizer, axis, offsets=offsets.to(DEVICE), random_bits=random_bits)
    assert_same_codes(on_gpu, on_cpu)
    values, expected = on_gpu.dequantize(), on_cpu.dequantize()
    torch.testing.assert_close(values.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_have_the_same_codes_as_on_a_cpu(format, axis):
    w = wide(3, 160, 272).bfloat16()
    assert_same_codes(fm.quantize(w.to(DEVICE), format, axis), fm.quantize(w, format, axis))


def operands(used=550, seed=1):
    """Rows of 600, of which so many have an expert."""
    x, probs, dy, _ = inputs([used], 600 - used)
    return x, probs, random_splits(E, used, seed), dy


def outcome(chain, x, probs, splits, dy):
    torch.manual_seed(7)  # what rounds stochastically
    y = chain(x, splits=splits, probs=probs)
    return [y.detach(), *torch.autograd.grad(y, [x, probs, *chain.parameters()], dy)]


@pytest.mark.parametrize("recipe", [*RECIPES[:4], *RECIPES[5:], NVFP4(stochastic_rounding=False)], ids=name)
def test_the_same_training_as_on_a_cpu(recipe):
    """There in fp32, here in bf16 or natively: within bf16's rounding of activations, not of the format."""
    chain = experts(bias=True)
    x, probs, splits, dy = operands()
    twin = experts(bias=True).cpu()
    on_cpu = [t.detach().cpu().requires_grad_(t.requires_grad) for t in (x, probs, splits.float(), dy)]
    on_cpu[2] = splits.cpu()
    with fm.recipe(recipe):
        ours, theirs = outcome(chain, x, probs, splits, dy), outcome(twin, *on_cpu)
    with fm.recipe("bf16"):
        unquantized = outcome(chain, x, probs, splits, dy)
    # an activation that rounds to another bf16 may get another code, which may be as far away as the format is coarse
    closest = 0.15 if isinstance(recipe, NVFP4) else 0.05 if recipe == "fp8_tensor" else 0.03  # E5M2 is coarser
    for i, (a, b, exact) in enumerate(zip(ours, theirs, unquantized, strict=True)):
        a, b, exact = (t.cpu().double() for t in (a, b, exact))
        assert torch.isfinite(a).all()
        assert (a - b).norm() <= closest * b.norm()
        if i < len(ours) - 1:  # the last bias gets the sum of what comes in
            assert (a - exact).norm() > 2e-3 * exact.norm()


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
def test_a_graph_of_a_training_step_quantizes_what_it_finds(recipe, no_sync):
    """Replays follow the splits, the rows, and weights that were changed between them. Nothing waits for the device."""
    chain, twin = experts(bias=True), experts(bias=True)
    x, probs, splits, dy = operands(used=600)
    out = {}

    def step():
        y = chain(x, splits=splits, probs=probs)
        out["all"] = [y.detach(), *torch.autograd.grad(y, [x, probs, *chain.parameters()], dy)]

    with fm.recipe(recipe):
        graph = capture(step)
        for _ in range(3):  # the warm-ups, for what delayed scaling remembers
            outcome(twin, x, probs, splits, dy)
        for seed, used in ((4, 600), (5, 1), (6, 350)):
            splits.copy_(random_splits(E, used, seed))
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
                for p, q in zip(chain.parameters(), twin.parameters(), strict=True):
                    p.mul_(1.5 + seed / 100)
                    q.copy_(p)
            graph.replay()
            found = [t.clone() for t in out["all"]]
            with no_sync():
                eager = outcome(twin, x, probs, splits, dy)
            assert found[0].any()
            if recipe != "nvfp4":
                assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
            else:  # each replay draws anew
                assert torch.equal(found[0], eager[0])
                graph.replay()
                assert used == 1 or not torch.equal(found[1], out["all"][1])
    assert fm.weight_cache_bytes(chain) == 0  # a replay may change a weight, and nobody would know
    assert fm.weight_cache_bytes(twin) > 0


@pytest.mark.parametrize("recipe", ["fp8_row", "fp8_block", "mxfp8", FP8Tensor(delayed=Delayed(history=4))], ids=name)
def test_weights_that_a_graph_trains_are_seen_between_its_replays(recipe):
    chain = experts(bias=True)
    x, probs, splits, dy = operands(used=600)
    optimizer = torch.optim.SGD(chain.parameters(), lr=1e-3)
    for p in chain.parameters():
        p.grad = torch.zeros_like(p)

    def step():
        optimizer.zero_grad(set_to_none=False)
        chain(x, splits=splits, probs=probs).backward(dy)
        optimizer.step()

    def evaluated():
        with torch.no_grad(), fm.recipe(recipe):
            return chain(x, splits=splits, probs=probs)

    with fm.recipe(recipe):
        graph = capture(step)
    found = []
    for _ in range(3):
        graph.replay()
        found.append(evaluated())
        fm.clear_weight_cache(chain)
        assert found[-1].isfinite().all()
        assert torch.equal(found[-1], evaluated())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.parametrize(
    ("recipe", "inside", "use_reentrant"),
    pairwise(("mxfp8", "fp8_row", FP8Tensor(delayed=Delayed(history=4))), (True, False), (False, True)),
    ids=str,
)
def test_what_is_checkpointed_is_computed_again_by_the_recipe_of_its_forward(recipe, inside, use_reentrant):
    """In autograd's own thread, where no block holds that is around ``backward()``."""
    x, probs, splits, dy = operands(used=600)
    found = []
    for again in (False, True):
        torch.manual_seed(1)
        chain = experts(bias=True)

        def run(x, probs, chain=chain):
            return chain(x, splits=splits, probs=probs)

        for _ in range(3):
            leaves = [t.detach().clone().requires_grad_() for t in (x, probs)]
            chain.zero_grad()
            with fm.recipe(recipe):
                y = checkpoint(run, *leaves, use_reentrant=use_reentrant) if again else run(*leaves)
                if inside:
                    y.backward(dy)
            if not inside:
                y.backward(dy)
        found.append([y.detach(), *(t.grad for t in (*leaves, *chain.parameters()))])
    for plain, recomputed in zip(*found, strict=True):
        assert plain.any()
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("recipe", ["fp8_row", FP8Tensor(hybrid=False)], ids=name)
def test_torch_multiplies_codes_natively_where_it_can(recipe, monkeypatch):
    """All three products; each as close to fp64 of the very codes as when it is emulated. No rule takes them here."""
    torch.manual_seed(3)
    layer = fm.Sequential(fm.GroupedLinear(E, H, 2 * I, device=DEVICE, dtype=BF16))
    x = torch.randn(600, H, device=DEVICE, dtype=BF16, requires_grad=True)
    splits = random_splits(E, 550, seed=2)
    dy = torch.randn(600, 2 * I, device=DEVICE, dtype=BF16)
    dy[550:] = torch.nan

    def run():
        with fm.recipe(recipe), fm.disabled("sm90.fp8_*"):
            y = layer(x, splits=splits)
            return [y.detach(), *torch.autograd.grad(y, [x, layer[0].weight], dy)]

    with fm.recipe(recipe), fm.disabled("sm90.fp8_*"):
        paths = {s.ops[0].rpartition(".")[2]: s.path for s in layer.explain(x, splits=splits).steps if s.path}
    assert paths == {"GroupedLinear": "native", "Wgrad": "native", "Dgrad": "native"}
    native = run()
    fm.clear_weight_cache(layer)
    monkeypatch.setattr(quantized_products, "multiplies_codes", lambda device: False)
    emulated = run()
    exact = exact_products(recipe, layer[0].weight.detach(), x.detach(), splits, dy)
    for a, b, want in zip(native, emulated, exact, strict=True):
        ours, theirs = ((t.double() - want).norm() / want.norm() for t in (a, b))
        assert ours <= max(1.5 * theirs, 3e-3)
        assert theirs < 5e-3


def exact_products(recipe, weight, x, splits, dy):
    """Output, dx and dw in fp64 of the dequantized operands, an expert at a time."""
    roles = (ROLES[recipe] if isinstance(recipe, str) else recipe.roles())._asdict()
    offsets = splits.cumsum(0).to(torch.int32)

    def values(role, t, axis, offsets=None):
        return fm.quantize(t, roles[role], axis, offsets=offsets).dequantize(torch.float64)

    x_rows, x_columns = (values("input", x, axis, offsets) for axis in (-1, -2))
    dy_rows, dy_columns = (values("grad", dy, axis, offsets) for axis in (-1, -2))
    w_rows, w_columns = (values("weight", weight, axis) for axis in (-1, -2))
    y, dx, dw = torch.zeros_like(dy_rows), torch.zeros_like(x_rows), torch.zeros_like(w_rows)
    ends = offsets.tolist()
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        rows = slice(start, end)
        y[rows], dx[rows] = x_rows[rows] @ w_rows[e].T, dy_rows[rows] @ w_columns[e]
        dw[e] = dy_columns[rows].T @ x_columns[rows]
    return y, dx, dw


@pytest.mark.parametrize("recipe", RECIPES, ids=name)
@pytest.mark.parametrize(("rows", "used"), [(0, 0), (1, 0), (1, 1), (40, 1)])
def test_hardly_any_rows(recipe, rows, used):
    """No rows at all; rows of which none, or one, belongs to an expert."""
    chain = experts(bias=True)
    x, probs, dy, _ = inputs([used], rows - used)
    splits = torch.zeros(E, dtype=torch.int64, device=DEVICE)
    splits[3] = used
    with fm.recipe(recipe):
        y, dx, dprobs, *parameters = outcome(chain, x, probs, splits, dy)
    assert not y[used:].any()
    assert not dx[used:].any()
    assert not dprobs[used:].any()
    for gradient in parameters:
        others = torch.cat((gradient[:3], gradient[4:]))
        assert not others.any()
        assert torch.isfinite(gradient).all()
        assert gradient[3].any().item() is (used > 0)


# ---- weights that are kept quantized


def coalesced(weight):
    with dist.distributed_c10d._coalescing_manager(device=weight.device, async_ops=True) as manager:
        dist.all_reduce(weight)
    manager.wait()


COLLECTIVES = {
    "broadcast": lambda weight: dist.broadcast(weight, 0),
    "all_reduce, asynchronous": lambda weight: dist.all_reduce(weight, async_op=True).wait(),
    "coalesced": coalesced,
    "subgroup": lambda weight: dist.broadcast(weight, 0, group=dist.new_group([0])),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_noticed(one_rank, no_sync, name):
    fc = fm.GroupedLinear(2, 64, 64, device=DEVICE, dtype=BF16).requires_grad_(False)
    x, splits = torch.randn(8, 64, device=DEVICE, dtype=BF16), torch.tensor([5, 3], device=DEVICE)
    with fm.recipe("mxfp8"):
        first = fc(x, splits=splits)
        fc.weight.data.mul_(2)  # with one rank a collective changes nothing; alone, this goes unnoticed
        assert torch.equal(fc(x, splits=splits), first)
        COLLECTIVES[name](fc.weight.data)
        with no_sync():
            y = fc(x, splits=splits)
        assert torch.equal(y, copy.deepcopy(fc)(x, splits=splits))
    assert torch.equal(y, 2 * first)
