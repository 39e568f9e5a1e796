"""The rules for sm_90 of activations apart from products, and of quantization, under stand-ins."""

import pytest
import torch
from kit import layers
from kit.compare import label, pairwise
from kit.sm90_machine import (
    BF16,
    CLAMPED,
    SPLITS,
    E,
    H,
    I,
    assert_close,
    both_ways,
    called,
    dense,
    experts,
    operands,
    routed,
    rows,
)
from kit.sm90_stand_ins import calls
from kit.toy import rules_used

import fusedmoe as fm
from fusedmoe.kernels.sm90 import products
from fusedmoe.numerics.formats import fp8_block
from fusedmoe.numerics.formats.roles import ROLES
from fusedmoe.numerics.recipes import MXFP8, NVFP4, FP8Block

pytestmark = pytest.mark.usefixtures("hopper_machine")

FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
FORWARD, BACKWARD = "sm90.activation", "sm90.dactivation"
PRODUCTS = ("sm90.grouped_*", "sm90.linear*")


def elementwise(act=None, scale=True):
    return fm.Sequential(act or fm.SwiGLU(), *([fm.Scale("probs")] if scale else []))


# ------------------------------------------------------------------------------------------ activations without product

ACTIVATIONS = [
    fm.SwiGLU(), fm.SwiGLU(**CLAMPED), fm.SwiGLU(**CLAMPED, interleaved=True), fm.GeGLU(), fm.GeGLU("none"),
    fm.ReGLU(limit=0.5), fm.SquaredReLU(),
]  # fmt: skip


@pytest.mark.parametrize("case", pairwise(ACTIVATIONS, (BF16, FP16), (None, FP32, BF16, FP16)), ids=label)
def test_one_launch_forward_and_one_backward(case):
    act, dtype, scale = case
    chain = elementwise(act, scale is not None)
    x, named = operands(chain, features=48, dtype=dtype, probs=scale or FP32)
    plan = both_ways(chain, x, **named)
    assert rules_used(plan) == [FORWARD, BACKWARD]
    assert not plan.unfused
    assert [step.launches for step in plan.steps] == [1, 1]
    of_results = {"want_scale": scale is not None, "want_output": False}
    assert calls == [("activation", {"scale": scale is not None}), ("activation_backward", of_results)]
    if scale:
        y = chain(x, **named)
        of_scale = y.grad_fn.apply(torch.ones_like(y))
        assert [t.dtype for t in of_scale if t is not None and t.dim() == 1] == [scale], "before autograd converts it"


def test_a_gradient_of_the_scale_alone():
    """It is a step in plain PyTorch, which reads the result of the activation."""
    x, named = operands(elementwise(), features=48, frozen=("x",))
    plan = both_ways(elementwise(), x, strict=False, **named)
    assert {op for step in plan.unfused for op in step.ops} == {"1.Scale", "1.ScaleGrad"}


def test_the_preactivation_is_all_that_is_kept(monkeypatch):
    """Where bytes cost more than launches, the step recomputes the next layer's input."""
    monkeypatch.setattr("fusedmoe.fusion.search.candidates._US_PER_LAUNCH", 0.0)
    with fm.disabled(*PRODUCTS):
        plan = both_ways(experts(scale=True), strict=False)
        assert rules_used(plan) == [FORWARD, BACKWARD]
        assert {"1.input", "probs"} < {*plan.kept}
        assert not {"2.input", "3.input"} & {*plan.kept}
        assert called("activation_backward") == [{"want_scale": True, "want_output": True}]


@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_rows_after_the_last_expert(scale):
    """They are NaN, and so is their scale: they stay NaN up to the next layer. The gradients are zeros there."""
    chain = fm.Sequential(*elementwise(scale=scale), fm.GroupedLinear(E, I, 32, dtype=BF16))
    x, named = operands(chain)
    if scale:
        named["probs"].data[sum(SPLITS) :] = torch.nan
    with fm.disabled(*PRODUCTS):
        both_ways(chain, x, strict=False, **named)
    assert {"activation", "activation_backward"} < {*called()}


def apart(x, by):
    """The same rows, ``by`` elements further apart, with NaN between them."""
    room = x.new_full((x.shape[0], x.shape[1] + by), torch.nan)
    room[:, : x.shape[1]] = x.detach()
    return room[:, : x.shape[1]].requires_grad_()


def test_strides():
    """Rows may be apart; a gradient or scale that the kernel cannot read is copied; other rows run in plain PyTorch."""
    chain, by_columns = elementwise(), torch.linspace(-1, 1, 16 * 24, dtype=BF16).view(24, 16).mT
    x, named = operands(chain, features=48)
    alternate = {"probs": named["probs"].detach().repeat_interleave(2)[::2].requires_grad_()}
    with fm.disabled("*"):
        expected = layers.outcome(chain, x, by_columns, **named)
    both = ["activation", "activation_backward"]
    for rows_, probs, launched in (
        (x, named, both), (apart(x, 8), named, both), (x, alternate, both), (apart(x, 1), named, []),
        (x.detach().mT.contiguous().mT.requires_grad_(), named, []),
    ):  # fmt: skip
        calls.clear()
        assert_close(layers.outcome(chain, rows_, by_columns, **probs), expected)
        assert called() == launched


# ----------------------------------------------------------------------------- quantization, before products in PyTorch

RULES = {"sm90.quantize", "sm90.quantize_grad", "sm90.quantize_weight"}
BLOCK = ROLES["fp8_block"]


@pytest.fixture
def products_in_plain_pytorch(monkeypatch):
    monkeypatch.setenv("FUSEDMOE_DISABLE", "sm90.fp8_*")


in_pytorch = pytest.mark.usefixtures("products_in_plain_pytorch")
QUANTIZES = ("sm90.*quantize*",)


def small(**how):
    return experts(hidden=32, width=48, **how)


def quantizing(plan):
    """The rules of all steps and all glue that quantize, by their names in the plan."""
    steps = (*plan.steps, *plan.glue)
    return {"+".join(s.ops): s.rule for s in steps if any("Quantize" in op for op in s.ops)}


def same_bits(chain, x=None, recipe="fp8_block", strict=True, **named):
    return both_ways(chain, x, recipe, strict=strict, without=QUANTIZES, bound=0, **named)


DENSE_ROWS = (3, 5, 32)  # more than one leading axis, and no offsets
NARROW = ("mxfp8", "nvfp4", "fp8_row", "fp8_tensor", MXFP8(weight_2d=True), NVFP4(weight_2d=False))
BLOCKS = ("fp8_block", FP8Block(hybrid=False, power_of_two=False, amax_epsilon=1e-12))


@in_pytorch
@pytest.mark.parametrize("make", [small, dense, routed], ids=label)
@pytest.mark.parametrize("recipe", [*NARROW, *BLOCKS], ids=str)
def test_recipes_are_quantized_to_the_same_bits(recipe, make):
    chain, x, named = make(), None, {}
    if make is dense:
        chain = dense(fm.GeGLU(), hidden=32, width=32)
        x = torch.randn(DENSE_ROWS, dtype=BF16, requires_grad=True)
    elif make is routed:
        x, named = operands(chain)
    with fm.disabled("sm90.dequantized_*"):
        plan = same_bits(chain, x, recipe, strict=recipe in BLOCKS, **named)
    gathered = {"sm90.gathered_quantize", "sm90.gathered_quantize_grad"} if make is routed else set()
    assert {*quantizing(plan).values()} == RULES | gathered
    assert called("quantize_rows" if recipe in BLOCKS else "quantize_format")


@pytest.mark.parametrize(("which", "bias"), [("mxfp8", True), ("nvfp4", False), ("fp8_tensor", True)])
def test_dequantized_products(which, bias, monkeypatch):
    """Up to the rounding of products before a bias or a scale per expert, after which codes differ."""
    monkeypatch.setenv("FUSEDMOE_DISABLE", "sm90.fp8_*")
    plan = both_ways(small(bias=bias), None, which, strict=False)
    assert {"sm90.dequantized_gemm", "sm90.dequantized_dgrad", "sm90.dequantized_wgrad"} <= {*rules_used(plan)}
    assert len(called("dequantize")) == 12


@in_pytorch
def test_quantizers_between_activations():
    """Their results are dequantized in plain PyTorch."""
    alone = fm.Sequential(fm.Quantize(BLOCK.input, backward=BLOCK.grad), fm.SwiGLU(), fm.Quantize(BLOCK.input))
    plan = same_bits(alone, torch.randn(40, 64, dtype=BF16, requires_grad=True))
    assert [s.rule for s in plan.steps if s.rule] == [
        "sm90.quantize", "sm90.activation", "sm90.quantize", "sm90.dactivation", "sm90.quantize_grad",
    ]  # fmt: skip
    assert called("quantize_rows") == [{"rows": True, "columns": False}] * 3


@in_pytorch
def test_weights_are_cached_until_they_change():
    chain = small()
    x, named = operands(chain)
    with fm.recipe("fp8_block"), torch.no_grad():
        with fm.disabled("sm90.quantize_weight"):
            first = chain(x, **named)
        # a rule does not read the weights that plain PyTorch cached, whose scales have other strides
        assert torch.equal(chain(x, **named), first)
        assert len(called("quantize_weight")) == 2
        assert chain[0]._of_process.quantized_weight.forms[-1].scale.stride() == (4, 1, 4)
        with fm.disabled("sm90.quantize_weight"):  # plain PyTorch reads those of a rule
            assert torch.equal(chain(x, **named), first)
        chain[0].weight.mul_(2)
        assert not torch.equal(chain(x, **named), first)
        assert len(called("quantize_weight")) == 3


# ---------------------------------------------------------------------------------- codes of stored weights, transposed

TRANSPOSED = "sm90.transposed_weight"


def stored(n, k):
    q = fm.quantize(torch.randn(E, n, k) / k**0.5, fp8_block(across=128, power_of_two=False))
    return fm.GroupedLinear.from_quantized(q.data, q.scale)


def test_codes_are_transposed_right_before_their_product(monkeypatch):
    """Nothing keeps them, and their scales need no copy."""
    chain, copied = fm.Sequential(stored(2 * I, H), fm.SwiGLU(), stored(H, I)), []
    splits = torch.tensor(SPLITS)
    monkeypatch.setattr(
        "fusedmoe.builtin_rules.products.fp8.with_strides", lambda t: copied.append(t) or products.with_strides(t)
    )
    plan = both_ways(chain, rows(), without=(TRANSPOSED,), bound=0, splits=splits)
    glue = {step.ops[0]: step.rule for step in plan.glue if "StoredWeight" in step.ops[0]}
    assert glue == {"0:weight.StoredWeight": TRANSPOSED, "2:weight.StoredWeight": TRANSPOSED}
    assert called("transpose_codes") == [{"shape": (E, H, I)}, {"shape": (E, 2 * I, H)}]
    order = [name for name in called() if name == "transpose_codes" or "backward" in name]
    assert order == ["transpose_codes", "block_scaled_gemm_activation_backward", "transpose_codes"]
    assert not any("weight" in value for value in plan.kept)
    assert fm.weight_cache_bytes(chain) == 0
    copied.clear()
    y = chain(rows(), splits=splits)
    in_forward = len(copied)
    y.sum().backward()
    assert len(copied) == in_forward
