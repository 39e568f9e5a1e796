"""``wgrad="bf16"``: forward and input gradients of the quantized recipe, and weight gradients of the values from before
quantization.
"""

from dataclasses import replace

import pytest
import torch
from oracles import expert_rows
from rounding import ROUNDOFF, error_of_sums, relative_error
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.fusion.program.differentiable import SecondOrderError
from fusedmoe.numerics.formats import Delayed, mxfp8
from fusedmoe.numerics.formats.roles import ROLES
from fusedmoe.numerics.recipes import MXFP8, NVFP4, RECIPES, Custom, FP8Tensor
from fusedmoe.ops import quantize as quantize_op

E, K, N = 4, 48, 64
SPLITS = torch.tensor([37, 0, 50, 1])
ROWS, TAIL = 93, 5

# the number of random draws changes with the number of forms: rounding to nearest makes the results comparable
NEAREST = {name: recipe for name, recipe in RECIPES.items() if name != "bf16"} | {
    "nvfp4": NVFP4(stochastic_rounding=False)
}
every_name = pytest.mark.parametrize("name", NEAREST)


def unquantized(recipe):
    return replace(recipe, wgrad="bf16")


def rows(dtype=torch.float32, width=K):
    x = torch.randn(ROWS, width, dtype=dtype)
    x[ROWS - TAIL :] = torch.nan
    return x.requires_grad_()


def gradient(dtype=torch.float32, width=N):
    dy = torch.randn(ROWS, width, dtype=dtype)
    dy[ROWS - TAIL :] = torch.nan
    return dy


def results(module, x, dy, recipe, **named):
    with fm.recipe(recipe):
        y = module(x, **named)
        leaves = {"x": x, **dict(module.named_parameters())}
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        found = torch.autograd.grad(y, [*wanted.values()], dy)
    return {"y": y.detach(), **dict(zip(wanted, found, strict=True))}


def assert_bitwise(got, want):
    assert want.any(), "zeros would pass"
    assert torch.equal(got, want)


@pytest.fixture
def axes(monkeypatch):
    """The axis of each quantization of rows or of their gradient, in order."""
    seen, plain = [], quantize_op.quantize

    def noted(x, quantizer, axis=-1, **options):
        if x.dim() == 2:
            seen.append(axis)
        return plain(x, quantizer, axis, **options)

    monkeypatch.setattr(quantize_op, "quantize", noted)
    return seen


# --- one layer -----------------------------------------------------------------------------------------------------


@every_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_grouped_layer(name, dtype):
    fc, x, dy = fm.GroupedLinear(E, K, N, bias=True, dtype=dtype), rows(dtype), gradient(dtype)
    quantized, got, plain = [
        results(fc, x, dy, recipe, splits=SPLITS) for recipe in (NEAREST[name], unquantized(NEAREST[name]), "bf16")
    ]
    for value in ("y", "x", "bias"):
        assert_bitwise(got[value], quantized[value])
    assert not torch.equal(got["y"], plain["y"])
    assert not torch.equal(got["x"], plain["x"])
    assert_bitwise(got["weight"], plain["weight"])
    assert not torch.equal(got["weight"], quantized["weight"])
    want = torch.zeros(E, N, K, dtype=torch.float64)
    for e, first, end in expert_rows(SPLITS):
        want[e] = dy[first:end].double().T @ x.detach()[first:end].double()
    assert relative_error(got["weight"], want) < ROUNDOFF[dtype] + error_of_sums(int(SPLITS.max()))


@every_name
@pytest.mark.parametrize("shape", [(30, K), (2, 15, K)], ids=str)
def test_a_dense_layer(name, shape):
    fc, x = fm.Linear(K, N), torch.randn(shape, requires_grad=True)
    dy = torch.randn(*shape[:-1], N)
    quantized, got, plain = [
        results(fc, x, dy, recipe) for recipe in (NEAREST[name], unquantized(NEAREST[name]), "bf16")
    ]
    for value in ("y", "x", "bias"):
        assert_bitwise(got[value], quantized[value])
    assert_bitwise(got["weight"], plain["weight"])
    assert not torch.equal(got["weight"], quantized["weight"])
    want = dy.flatten(0, -2).double().T @ x.detach().flatten(0, -2).double()
    assert relative_error(got["weight"], want) < error_of_sums(30)


def test_a_dense_layer_among_sorted_rows():
    """Rows without an expert count for nothing, whatever they hold."""
    chain = fm.Sequential(fm.GroupedLinear(E, K, N), fm.Linear(N, K))
    x, dy = rows(), gradient(width=K)
    quantized, got = [results(chain, x, dy, recipe, splits=SPLITS) for recipe in (MXFP8(), MXFP8(wgrad="bf16"))]
    for value in ("y", "x", "1.bias"):
        assert_bitwise(got[value], quantized[value])
    for name in ("0.weight", "1.weight"):
        assert got[name].isfinite().all()
        assert got[name].any()
        assert not torch.equal(got[name], quantized[name])


def test_stochastic_rounding_is_for_the_input_gradient_alone():
    fc, x, dy = fm.GroupedLinear(E, K, N), rows(), gradient()
    recipe = NVFP4(wgrad="bf16")
    torch.manual_seed(1)
    first = results(fc, x, dy, recipe, splits=SPLITS)
    torch.manual_seed(2)
    second = results(fc, x, dy, recipe, splits=SPLITS)
    assert_bitwise(first["weight"], second["weight"])
    assert not torch.equal(first["x"], second["x"])


# --- chains --------------------------------------------------------------------------------------------------------


def mlp(dtype=torch.float32, **options):
    return fm.Sequential(
        fm.GroupedLinear(E, K, 2 * N, bias=True, dtype=dtype, **options),
        fm.SwiGLU(),
        fm.Scale("probs"),
        fm.GroupedLinear(E, N, K, bias=True, dtype=dtype, **options),
    )


@every_name
def test_a_chain(name, axes):
    """Each weight gradient is that of the values around its layer, which calls of the single ops give."""
    chain, x, dy, probs = mlp(), rows(), gradient(width=K), torch.rand(ROWS)
    named = {"splits": SPLITS, "probs": probs}
    quantized = results(chain, x, dy, NEAREST[name], **named)
    assert {*axes} == {-1, -2}
    axes.clear()
    got = results(chain, x, dy, unquantized(NEAREST[name]), **named)
    assert {*axes} == {-1}
    assert got.keys() == quantized.keys()
    for value in ("y", "x", "0.bias", "3.bias"):
        assert_bitwise(got[value], quantized[value])

    up, act, scale, down = chain
    with fm.recipe(NEAREST[name]):
        h = up(x, splits=SPLITS)
        a = scale(act(h), probs=probs)
        y = down(a, splits=SPLITS)
    dh, da = torch.autograd.grad(y, (h, a), dy)
    assert da.any()
    for layer, operand, grad in (("0", x, dh), ("3", a, dy)):
        plain = chain[int(layer)](operand.detach(), splits=SPLITS)
        (want,) = torch.autograd.grad(plain, chain[int(layer)].weight, grad)
        assert_bitwise(got[f"{layer}.weight"], want)
        assert not torch.equal(got[f"{layer}.weight"], quantized[f"{layer}.weight"])


def test_a_routed_chain():
    layer = fm.MoE(K, N, E, 2, shared_intermediate=N)
    x, dy = torch.randn(40, K, requires_grad=True), torch.randn(40, K)
    quantized, got, plain = [results(layer, x, dy, recipe) for recipe in ("mxfp8", "mxfp8:wgrad=bf16", "bf16")]
    for value in quantized.keys() - {"experts.gate_up.weight", "experts.down.weight"}:
        if not value.startswith("shared"):
            assert_bitwise(got[value], quantized[value])
    for name in ("experts.gate_up.weight", "experts.down.weight", "shared.gate_up.weight", "shared.down.weight"):
        # the operands of the second layer are those of a quantized first layer
        error, of_quantized = (relative_error(r[name], plain[name].double()) for r in (got, quantized))
        assert 0 < error < 0.9 * of_quantized


def test_written_out_by_hand():
    chain, x, dy, probs = mlp(), rows(), gradient(width=K), torch.rand(ROWS)
    named = {"splits": SPLITS, "probs": probs}
    want = results(chain, x, dy, MXFP8(wgrad="bf16"), **named)
    up, act, scale, down = chain
    name = "mxfp8:wgrad=bf16"
    written = fm.Sequential(
        fm.Quantize(name, weight=name), up, fm.Quantize(backward=name), act, scale,
        fm.Quantize(fm.Quantizer(mxfp8(), wgrad="bf16")), fm.Quantize(weight="mxfp8"), down, fm.Quantize(backward=name),
    )  # fmt: skip
    got = results(written, x, dy, "bf16", **named)
    for a, b in zip(got.values(), want.values(), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("which", ["input", "grad"])
def test_each_operand_has_a_choice_of_its_own(which):
    roles = ROLES["mxfp8"]._replace(**{which: fm.Quantizer(mxfp8(), wgrad="bf16")})
    fc, x, dy = fm.GroupedLinear(E, K, N), rows(), gradient()
    with torch.no_grad():
        x[ROWS - TAIL :], dy[ROWS - TAIL :] = 0, 0  # an unquantized operand is summed over all rows, as under "bf16"
    quantized, got, plain = [
        results(fc, x, dy, recipe, splits=SPLITS) for recipe in ("mxfp8", Custom("one", *roles), "bf16")
    ]
    for value in ("y", "x"):
        assert_bitwise(got[value], quantized[value])
    want = torch.zeros(E, N, K, dtype=torch.float64)
    for e, first, end in expert_rows(SPLITS):
        operands = {"input": x.detach()[first:end], "grad": dy[first:end]}
        for role, t in operands.items():
            if role != which and end > first:
                operands[role] = fm.quantize(t, mxfp8(), -2).dequantize()
        want[e] = operands["grad"].double().T @ operands["input"].double()
    assert relative_error(got["weight"], want) < 1e-6
    assert not torch.equal(got["weight"], quantized["weight"])
    assert not torch.equal(got["weight"], plain["weight"])


def test_values_that_are_quantized_twice():
    """The source is what the first quantization gives: dequantized rows, and a dequantized gradient."""
    fc, x, dy = fm.GroupedLinear(E, K, N, bias=True), rows(), gradient()
    name = "mxfp8:wgrad=bf16"
    chain = fm.Sequential(
        fm.Quantize("fp8_row"), fm.Quantize(name, weight="mxfp8"), fc,
        fm.Quantize(backward=name), fm.Quantize(backward="fp8_row"),
    )  # fmt: skip
    got = results(chain, x, dy, "bf16", splits=SPLITS)
    offsets = SPLITS.cumsum(0, dtype=torch.int32)
    once = [fm.quantize(t.detach(), ROLES["fp8_row"].input, offsets=offsets).dequantize() for t in (x, dy)]
    want = results(fc, once[0].requires_grad_(), once[1], MXFP8(wgrad="bf16"), splits=SPLITS)
    for a, b in zip(got.values(), want.values(), strict=True):
        assert_bitwise(a, b)


# --- with what else a layer may have -------------------------------------------------------------------------------


def test_delayed_scaling_records_every_amax():
    recipes = [FP8Tensor(delayed=Delayed(history=3), wgrad=wgrad) for wgrad in ("quantized", "bf16")]
    chains = [mlp(), mlp()]
    chains[1].load_state_dict(chains[0].state_dict())
    for step in range(3):
        x, dy, probs = (rows() * 3**step).detach().requires_grad_(), gradient(width=K) * 2**step, torch.rand(ROWS)
        quantized, got = [
            results(chain, x, dy, recipe, splits=SPLITS, probs=probs)
            for chain, recipe in zip(chains, recipes, strict=True)
        ]
        for value in ("y", "x", "0.bias", "3.bias"):
            assert_bitwise(got[value], quantized[value])
        assert not torch.equal(got["0.weight"], quantized["0.weight"])
    histories = [{k: v for k, v in chain.state_dict().items() if "amax_history" in k} for chain in chains]
    assert len(histories[0]) == 2 * 3 * 2
    assert histories[0].keys() == histories[1].keys()
    for name, history in histories[0].items():
        assert_bitwise(histories[1][name], history)


@pytest.mark.parametrize("kind", ["grouped", "dense"])
def test_main_grad(kind):
    def made(**options):
        return fm.GroupedLinear(E, K, N, **options) if kind == "grouped" else fm.Linear(K, N, bias=False, **options)

    named = {"splits": SPLITS} if kind == "grouped" else {}
    fc, twin = made(accumulate_into_main_grad=True), made()
    twin.load_state_dict(fc.state_dict())
    fc.weight.main_grad = torch.ones_like(fc.weight)
    x, dy = torch.randn(88, K, requires_grad=True), torch.randn(88, N)
    expected = torch.ones_like(fc.weight)
    for _ in range(2):
        with fm.recipe("fp8_block:wgrad=bf16"):
            fc(x, **named).backward(dy)
            twin.weight.grad = None
            twin(x, **named).backward(dy)
        expected += twin.weight.grad
    assert fc.weight.grad is None
    assert_bitwise(fc.weight.main_grad, expected)
    assert not torch.equal(expected, torch.ones_like(expected))


def test_lora_on_a_layer_that_is_trained_too():
    layer = fm.GroupedLinear(E, K, N)
    op = fm.GroupedLoRA(layer, 8, 16.0)
    torch.nn.init.normal_(op.lora_B.weight)
    layer.weight.requires_grad_()
    x, dy = rows(), gradient()
    quantized, got, plain = [
        results(op, x, dy, recipe, splits=SPLITS) for recipe in ("mxfp8", "mxfp8:wgrad=bf16", "bf16")
    ]
    for value in ("y", "x", "lora_A.weight", "lora_B.weight"):
        assert_bitwise(got[value], quantized[value])
    assert_bitwise(got["base_layer.weight"], plain["base_layer.weight"])
    assert not torch.equal(got["base_layer.weight"], quantized["base_layer.weight"])


def test_a_frozen_weight(axes):
    chain, x, dy, probs = mlp(), rows(), gradient(width=K), torch.rand(ROWS)
    for fc in (chain[0], chain[3]):
        fc.weight.requires_grad_(False)
    named = {"splits": SPLITS, "probs": probs}
    quantized, got = [results(chain, x, dy, recipe, **named) for recipe in ("mxfp8", "mxfp8:wgrad=bf16")]
    assert got.keys() == quantized.keys() == {"y", "x", "0.bias", "3.bias"}
    for value, want in quantized.items():
        assert_bitwise(got[value], want)
    assert {*axes} == {-1}


def test_no_gradient_of_the_rows(axes):
    """The gradient is then read by nothing in quantized form."""
    fc, x, dy = fm.GroupedLinear(E, K, N), rows().detach(), gradient()
    got, plain = [results(fc, x, dy, recipe, splits=SPLITS) for recipe in ("mxfp8:wgrad=bf16", "bf16")]
    assert_bitwise(got["weight"], plain["weight"])
    assert axes == [-1]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    chain, x, dy, probs = mlp(), rows(), gradient(width=K), torch.rand(ROWS)
    recipe = FP8Tensor(delayed=Delayed(history=2), wgrad="bf16")
    named = {"splits": SPLITS, "probs": probs}
    results(chain, x, dy, recipe, **named)
    state = {name: t.clone() for name, t in chain.state_dict().items()}
    want = results(chain, x, dy, recipe, **named)
    chain.load_state_dict(state)
    with fm.recipe(recipe):
        y = checkpoint(lambda x: chain(x, **named), x, use_reentrant=use_reentrant)
    y.backward(dy)
    assert_bitwise(y.detach(), want["y"])
    for name, leaf in {"x": x, **dict(chain.named_parameters())}.items():
        assert_bitwise(leaf.grad, want[name])


def test_second_derivatives_are_refused_as_for_other_quantized_chains():
    fc, x = fm.GroupedLinear(E, K, N), rows()
    with fm.recipe("mxfp8:wgrad=bf16"):
        y = fc(x, splits=SPLITS)
    with pytest.raises(SecondOrderError, match="the chain computes with quantized values"):
        torch.autograd.grad(y.sum(), fc.weight, create_graph=True)


def test_autocast():
    fc, x, dy = fm.GroupedLinear(E, K, N), rows(), gradient(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got, plain = [results(fc, x, dy, recipe, splits=SPLITS) for recipe in ("mxfp8:wgrad=bf16", "bf16")]
    assert got["weight"].dtype is torch.float32
    assert_bitwise(got["weight"], plain["weight"])
    assert not torch.equal(got["y"], plain["y"])


def test_compiled():
    chain, x, dy, probs = mlp(), rows(), gradient(width=K), torch.rand(ROWS)
    named = {"splits": SPLITS, "probs": probs}
    want = results(chain, x, dy, "mxfp8:wgrad=bf16", **named)
    got = results(torch.compile(chain, backend="aot_eager", fullgraph=True), x, dy, "mxfp8:wgrad=bf16", **named)
    for a, b in zip(got.values(), want.values(), strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("count", [0, 3])
def test_few_rows_and_none(count):
    fc, splits = fm.GroupedLinear(E, K, N), torch.tensor([0, count, 0, 0])
    x, dy = torch.randn(count, K, requires_grad=True), torch.randn(count, N)
    got, plain = [results(fc, x, dy, recipe, splits=splits) for recipe in ("fp8_block:wgrad=bf16", "bf16")]
    assert torch.equal(got["weight"], plain["weight"])
    assert bool(got["weight"].any()) is bool(count)
