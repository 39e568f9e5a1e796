"""``wgrad="bf16"``: forward and input gradients of the quantized recipe, and weight gradients of the values from before
quantization.
"""

import copy
from dataclasses import replace

import pytest
import torch
from kit.compare import assert_accurate, assert_bitwise, pairwise
from kit.layers import leaf, outcome, poison_tail
from kit.rounding import error_bound
from kit.splits import TAIL, UNEVEN, UNEVEN_ROWS, expert_rows

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed, mxfp8
from fusedmoe.numerics.formats.roles import ROLES
from fusedmoe.numerics.recipes import MXFP8, NVFP4, RECIPES, Custom, FP8Tensor
from fusedmoe.ops import quantize as quantize_op

E, K, N = 4, 48, 64
LIVE = UNEVEN_ROWS - TAIL
F32, BF16 = torch.float32, torch.bfloat16
MIXED = "mxfp8:wgrad=bf16"

# the number of random draws changes with the number of forms: rounding to nearest makes the results comparable
NEAREST = {name: recipe for name, recipe in RECIPES.items() if name != "bf16"} | {
    "nvfp4": NVFP4(stochastic_rounding=False)
}
every_name = pytest.mark.parametrize("name", NEAREST)


def given(width=N, dtype=F32, **named):
    """Rows and a gradient of this width, those of no expert NaN."""
    x, dy = leaf(UNEVEN_ROWS, K, dtype=dtype), torch.randn(UNEVEN_ROWS, width, dtype=dtype)
    poison_tail(LIVE, x, dy)
    return {"x": x, "dy": dy, "splits": UNEVEN, **named}


def three(module, call, name="mxfp8"):
    """Under the recipe, with unquantized weight gradients, and in bf16."""
    return (outcome(module, **call, recipe=r) for r in (NEAREST[name], replace(NEAREST[name], wgrad="bf16"), "bf16"))


def exact_wgrad(x, dy):
    parts = [(x.detach()[first:end].double(), dy[first:end].double()) for _, first, end in expert_rows(UNEVEN)]
    return torch.stack([grad.T @ rows for rows, grad in parts])


def assert_mixed(quantized, got, weights=(), plain=None):
    """All but the weight gradients is that of the recipe; these are unquantized if `plain`, and others anyway."""
    assert_bitwise(*({k: t for k, t in found.items() if k not in weights} for found in (got, quantized)))
    for name in weights:
        assert not torch.equal(got[name], quantized[name]), name
        if plain is not None:
            assert_bitwise(got[name], plain[name])


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


@pytest.mark.parametrize(("name", "dtype"), pairwise([*NEAREST], [F32, BF16, torch.float16]), ids=str)
def test_a_grouped_layer(name, dtype):
    fc, call = fm.GroupedLinear(E, K, N, bias=True, dtype=dtype), given(dtype=dtype)
    quantized, got, plain = three(fc, call, name)
    assert_mixed(quantized, got, ["weight"], plain)
    assert not torch.equal(got["y"], plain["y"])
    assert not torch.equal(got["x"], plain["x"])
    assert_accurate(got["weight"], exact_wgrad(call["x"], call["dy"]), error_bound(dtype, 50))


def test_stochastic_rounding_is_for_the_input_gradient_alone():
    fc, call, found = fm.GroupedLinear(E, K, N), given(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(outcome(fc, **call, recipe=NVFP4(wgrad="bf16")))
    assert_bitwise(found[0]["weight"], found[1]["weight"])
    assert not torch.equal(found[0]["x"], found[1]["x"])


def test_no_gradient_of_the_rows(axes):
    """The gradient is then read by nothing in quantized form."""
    fc, call = fm.GroupedLinear(E, K, N), given()
    call["x"] = call["x"].detach()
    got, plain = (outcome(fc, **call, recipe=recipe) for recipe in (MIXED, "bf16"))
    assert_bitwise(got["weight"], plain["weight"])
    assert axes == [-1]


@pytest.mark.parametrize("which", ["input", "grad"])
def test_each_operand_has_a_choice_of_its_own(which):
    roles = ROLES["mxfp8"]._replace(**{which: fm.Quantizer(mxfp8(), wgrad="bf16")})
    fc, call = fm.GroupedLinear(E, K, N), given()
    # an unquantized operand is summed over all rows, as under "bf16"
    poison_tail(LIVE, call["x"], call["dy"], value=0)
    quantized, got, plain = (outcome(fc, **call, recipe=r) for r in ("mxfp8", Custom("one", *roles), "bf16"))
    assert_mixed(quantized, got, ["weight"])
    operands = {"input": call["x"].detach().clone(), "grad": call["dy"].clone()}
    for role, t in operands.items():
        for _, first, end in expert_rows(UNEVEN):
            if role != which and end > first:
                t[first:end] = fm.quantize(t[first:end], mxfp8(), -2).dequantize()
    assert_accurate(got["weight"], exact_wgrad(operands["input"], operands["grad"]), 1e-6)
    assert not torch.equal(got["weight"], plain["weight"])


# --- chains --------------------------------------------------------------------------------------------------------


def mlp():
    up, down = fm.GroupedLinear(E, K, 2 * N, bias=True), fm.GroupedLinear(E, N, K, bias=True)
    return fm.Sequential(up, fm.SwiGLU(), fm.Scale("probs"), down)


def of_mlp():
    return given(K, probs=torch.rand(UNEVEN_ROWS))


WEIGHTS = ["0.weight", "3.weight"]


@every_name
def test_a_chain(name, axes):
    """Each weight gradient is that of the values around its layer, which calls of the single ops give."""
    chain, call = mlp(), of_mlp()
    x, dy, splits, probs = call.values()
    quantized = outcome(chain, **call, recipe=NEAREST[name])
    assert {*axes} == {-1, -2}
    axes.clear()
    got = outcome(chain, **call, recipe=replace(NEAREST[name], wgrad="bf16"))
    assert {*axes} == {-1}
    up, act, scale, down = chain
    with fm.recipe(NEAREST[name]):
        h = up(x, splits=splits)
        a = scale(act(h), probs=probs)
        dh, da = torch.autograd.grad(down(a, splits=splits), (h, a), dy)
    assert da.any()
    want = {}
    for label, layer, operand, grad in (("0.weight", up, x, dh), ("3.weight", down, a, dy)):
        (want[label],) = torch.autograd.grad(layer(operand.detach(), splits=splits), layer.weight, grad)
    assert_mixed(quantized, got, WEIGHTS, want)


def test_a_dense_layer_among_sorted_rows():
    """Rows without an expert count for nothing, whatever they hold."""
    chain, call = fm.Sequential(fm.GroupedLinear(E, K, N), fm.Linear(N, K)), given(K)
    quantized, got = (outcome(chain, **call, recipe=recipe) for recipe in (MXFP8(), MIXED))
    assert_mixed(quantized, got, ["0.weight", "1.weight"])
    assert all(got[name].isfinite().all() and got[name].any() for name in ("0.weight", "1.weight"))


# --- with other features of a layer --------------------------------------------------------------------------------


def test_delayed_scaling_records_every_amax():
    recipes = [FP8Tensor(delayed=Delayed(history=3), wgrad=wgrad) for wgrad in ("quantized", "bf16")]
    chains = [chain := mlp(), copy.deepcopy(chain)]
    for step in range(3):
        call = of_mlp()
        call["x"], call["dy"] = (call["x"].detach() * 3**step).requires_grad_(), call["dy"] * 2**step
        found = [outcome(c, **call, recipe=recipe) for c, recipe in zip(chains, recipes, strict=True)]
        assert_mixed(*found, WEIGHTS)
    histories = [{k: v for k, v in c.state_dict().items() if "amax_history" in k} for c in chains]
    assert len(histories[0]) == 2 * 3 * 2
    assert_bitwise(*histories)


def test_main_grad():
    fc, twin = fm.GroupedLinear(E, K, N, accumulate_into_main_grad=True), fm.GroupedLinear(E, K, N)
    twin.load_state_dict(fc.state_dict())
    fc.weight.main_grad, expected = torch.ones_like(fc.weight), torch.ones_like(fc.weight)
    x, dy = leaf(LIVE, K, dtype=F32), torch.randn(LIVE, N)
    for _ in range(2):
        with fm.recipe("fp8_block:wgrad=bf16"):
            fc(x, splits=UNEVEN).backward(dy)
        expected += outcome(twin, x, dy, "fp8_block:wgrad=bf16", splits=UNEVEN)["weight"]
    assert fc.weight.grad is None
    assert_bitwise(fc.weight.main_grad, expected)
    assert not torch.equal(expected, torch.ones_like(expected))


def test_a_frozen_weight(axes):
    chain, call = mlp(), of_mlp()
    for fc in (chain[0], chain[3]):
        fc.weight.requires_grad_(False)
    quantized, got = (outcome(chain, **call, recipe=recipe) for recipe in ("mxfp8", MIXED))
    assert {*got} == {"y", "x", "0.bias", "3.bias"}
    assert_mixed(quantized, got)
    assert {*axes} == {-1}


def test_autocast():
    fc, call = fm.GroupedLinear(E, K, N), given()
    call["dy"] = call["dy"].bfloat16()
    with torch.autocast("cpu", BF16):
        got, plain = (outcome(fc, **call, recipe=recipe) for recipe in (MIXED, "bf16"))
    assert got["weight"].dtype is F32
    assert_bitwise(got["weight"], plain["weight"])
    assert not torch.equal(got["y"], plain["y"])
