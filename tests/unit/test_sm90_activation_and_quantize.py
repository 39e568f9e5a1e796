"""The rules for sm_90 of activations apart from products, and of quantization: plans, and results under stand-ins.

Where products of codes run in plain PyTorch, results agree bit for bit with those of the unfused chain.
"""

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
    K,
    T,
    assert_close,
    both_ways,
    called,
    dense,
    experts,
    operands,
    plan_of,
    reasons,
    routed,
    routing,
    rows,
)
from kit.sm90_stand_ins import calls
from kit.toy import only_plan, outcome, rules_used, status

import fusedmoe as fm
from fusedmoe import Status
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


@pytest.mark.parametrize("frozen", ["probs", "x"])
def test_a_scale_or_rows_without_a_gradient(frozen):
    """A gradient of the scale alone is a step in plain PyTorch, which reads the result of the activation."""
    x, named = operands(elementwise(), features=48, frozen=(frozen,))
    plan = both_ways(elementwise(), x, strict=frozen == "probs", **named)
    if frozen == "probs":
        assert rules_used(plan) == [FORWARD, BACKWARD]
        assert called("activation_backward") == [{"want_scale": False, "want_output": False}]
    else:
        assert {op for step in plan.unfused for op in step.ops} == {"1.Scale", "1.ScaleGrad"}


def test_products_have_activations_in_their_epilogues_unless_the_layers_are_dense():
    plan = plan_of(experts(scale=True))
    assert not {FORWARD, BACKWARD} & {*rules_used(plan)}
    assert status(plan, FORWARD) == (Status.SHADOWED, "by sm90.grouped_gemm_activation")
    plan = both_ways(dense(scale=True))
    apart = {step.rule: step.ops for step in plan.steps if step.rule in (FORWARD, BACKWARD)}
    assert apart == {FORWARD: ("1.SwiGLU", "2.Scale"), BACKWARD: ("2.ScaleGrad", "2.DScale", "1.DSwiGLU")}
    assert [step.why for step in plan_of(elementwise(), *[torch.randn(4, 48, dtype=BF16)], probs=torch.rand(4)).steps] \
        == [""]  # fmt: skip


def test_the_preactivation_is_all_that_is_kept(monkeypatch):
    """With many rows, where bytes cost more than launches: the step recomputes the next layer's input."""
    chain, count = experts(scale=True).to("meta"), 100_000
    x = torch.empty(count, H, dtype=BF16, device="meta", requires_grad=True)
    splits = torch.empty(E, dtype=torch.int64, device="meta")
    probs = torch.empty(count, device="meta", requires_grad=True)
    with fm.disabled(*PRODUCTS):
        (plan,) = chain.explain(x, arch=90, splits=splits, probs=probs).plans
    assert [step.rule for step in plan.steps] == [None, FORWARD, None, None, None, BACKWARD, None, None]
    assert {"1.input", "probs"} < {*plan.kept}
    assert not {"2.input", "3.input"} & {*plan.kept}
    monkeypatch.setattr("fusedmoe.fusion.search.candidates._US_PER_LAUNCH", 0.0)
    with fm.disabled(*PRODUCTS):
        plan = both_ways(experts(scale=True), strict=False)
        assert rules_used(plan) == [FORWARD, BACKWARD]
        assert "3.input" not in plan.kept
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


@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_one_plan_serves_rows_with_other_numbers_of_axes(scale):
    """It is made for rows with two axes. Others run in plain PyTorch if the kernel cannot take them."""
    chain = elementwise(scale=scale)
    for shape in ((16, 48), (8, 2, 48), *([] if scale else [(1, 48), (48,)])):
        x = torch.randn(shape, dtype=BF16, requires_grad=True)
        named = {"probs": torch.rand(shape[0]).requires_grad_()} if scale else {}
        both_ways(chain, x, strict=False, **named)
    both = elementwise(fm.GeGLU(), scale)
    plan = both_ways(both, torch.randn(3, 5, 48, dtype=BF16, requires_grad=True), strict=False,
                     **({"probs": torch.rand(3).requires_grad_()} if scale else {}))  # fmt: skip
    assert rules_used(plan) == [FORWARD, BACKWARD]
    if scale:
        assert {op for step in plan.unfused for op in step.ops} == {"1.Scale", "1.ScaleGrad", "1.DScale"}
        why = "rows with a scale have shape (3, 5, 48): expected (rows, features)"
        assert reasons(plan, FORWARD) == reasons(plan, BACKWARD) == {why}


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
BOTH, LINES = {"rows": True, "columns": True}, {"rows": True, "columns": False}


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


@in_pytorch
@pytest.mark.parametrize("hybrid", [False, True], ids=["e4m3", "hybrid"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", ""])
def test_every_operand_is_quantized_in_one_launch(power_of_two, hybrid):
    plan = same_bits(small(), None, FP8Block(hybrid=hybrid, power_of_two=power_of_two, amax_epsilon=1e-12))
    assert quantizing(plan) == {
        f"{i}:{operand}.{op}": f"sm90.{rule}"
        for i in (0, 2)
        for operand, op, rule in (
            ("weight", "Quantize", "quantize_weight"), ("input", "Quantize", "quantize"),
            ("grad", "QuantizeGrad", "quantize_grad"),
        )
    }  # fmt: skip
    assert called("quantize_weight") == [BOTH] * 2
    assert called("quantize_rows") == [BOTH] * 4
    assert {s.launches for s in plan.steps if s.rule in RULES} == {1}
    assert "quantized weights: " in str(plan)


DENSE_ROWS = (3, 5, 32)  # more than one leading axis, and no offsets
NARROW = ("mxfp8", "nvfp4", "fp8_row", "fp8_tensor", MXFP8(weight_2d=True), NVFP4(weight_2d=False))


@in_pytorch
@pytest.mark.parametrize("make", [small, dense, routed], ids=label)
@pytest.mark.parametrize("recipe", [*NARROW, "fp8_block"], ids=str)
def test_recipes_are_quantized_to_the_same_bits(recipe, make):
    chain, x, named = make(), None, {}
    if make is dense:
        chain = dense(fm.GeGLU(), hidden=32, width=32)
        x = torch.randn(DENSE_ROWS, dtype=BF16, requires_grad=True)
    elif make is routed:
        x, named = operands(chain)
    with fm.disabled("sm90.dequantized_*"):
        plan = same_bits(chain, x, recipe, strict=recipe == "fp8_block", **named)
    gathered = {"sm90.gathered_quantize", "sm90.gathered_quantize_grad"} if make is routed else set()
    assert {*quantizing(plan).values()} == RULES | gathered
    assert called("quantize_rows" if recipe == "fp8_block" else "quantize_format")


@pytest.mark.parametrize("which", ["mxfp8", "nvfp4", "fp8_tensor"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_dequantized_products(which, bias, monkeypatch):
    """Up to the rounding of products before a bias or a scale per expert, after which codes differ."""
    monkeypatch.setenv("FUSEDMOE_DISABLE", "sm90.fp8_*")
    plan = both_ways(small(bias=bias), None, which, strict=False)
    assert {"sm90.dequantized_gemm", "sm90.dequantized_dgrad", "sm90.dequantized_wgrad"} <= {*rules_used(plan)}
    assert len(called("dequantize")) == 12


@pytest.mark.parametrize("which", ["mxfp8", "nvfp4"])
def test_a_first_gradient_leaves_the_quantized_weight_valid(which):
    """The scales of experts are applied to a gradient of NVFP4 before autograd gets it."""
    chain, counts = fm.Sequential(fm.GroupedLinear(E, 32, 48, dtype=BF16)), []
    x, named = operands(chain)
    with fm.recipe(which):
        for _ in range(3):
            calls.clear()
            chain(x, **named).sum().backward()
            counts.append(len(calls))
        assert "sm90.dequantized_wgrad" in rules_used(only_plan(chain, x, **named))
    assert chain[0].weight.grad.any()
    assert counts[0] > counts[1] == counts[2], "the weight is quantized once"


@in_pytorch
def test_only_the_forms_that_are_read_are_written():
    chain, splits = small(), torch.tensor(SPLITS)
    with torch.no_grad():
        same_bits(chain, rows(features=32, requires_grad=False), splits=splits)
    assert called("quantize_weight") == called("quantize_rows") == [LINES] * 2
    same_bits(chain.requires_grad_(False), rows(features=32), splits=splits)  # no weight gradient: no columns of rows
    assert called("quantize_weight") == [BOTH] * 2
    assert called("quantize_rows") == [LINES] * 4
    one = fm.Sequential(fm.GroupedLinear(E, 32, 32, dtype=BF16))
    same_bits(one, rows(features=32, requires_grad=False), splits=splits)  # a gradient of the weight alone
    assert called("quantize_rows") == [BOTH, {"rows": False, "columns": True}]
    assert called("quantize_weight") == [LINES]
    alone = fm.Sequential(fm.Quantize(BLOCK.input, backward=BLOCK.grad), fm.SwiGLU(), fm.Quantize(BLOCK.input))
    plan = same_bits(alone, torch.randn(40, 64, dtype=BF16, requires_grad=True))  # dequantized in plain PyTorch
    assert [s.rule for s in plan.steps if s.rule] == [
        "sm90.quantize", "sm90.activation", "sm90.quantize", "sm90.dactivation", "sm90.quantize_grad",
    ]  # fmt: skip
    assert called("quantize_rows") == [LINES] * 3


@in_pytorch
def test_rows_of_tokens_are_read_through_their_index():
    plan = same_bits(routed(), torch.randn(T, H, dtype=BF16, requires_grad=True), **routing(sentinels=True))
    assert {"sm90.gathered_quantize", "sm90.gathered_quantize_grad"} <= {*rules_used(plan)}
    assert plan.gathered == (
        ("1:input.input", "0.input", "0.token_of_row"), ("grad(5.input)", "grad(5.output)", "0.token_of_row"),
    )  # fmt: skip
    assert called("gathered_quantize_rows") == [{"source": T, "rows": T * K}] * 2
    assert "gather_rows" not in called()


@in_pytorch
def test_weights_are_cached_until_they_change():
    chain = small()
    x, named = operands(chain)
    with fm.recipe("fp8_block"), torch.no_grad():
        with fm.disabled("sm90.quantize_weight"):
            first = chain(x, **named)
        assert not called("quantize_weight")
        # a rule does not read the weights that plain PyTorch cached, whose scales have other strides
        assert torch.equal(chain(x, **named), first)
        assert len(called("quantize_weight")) == 2
        form = chain[0]._of_process.quantized_weight.forms[-1]
        assert form.scale.stride() == (4, 1, 4)
        calls.clear()
        assert torch.equal(chain(x, **named), first)
        with fm.disabled("sm90.quantize_weight"):  # plain PyTorch reads those of a rule
            assert torch.equal(chain(x, **named), first)
        assert chain[0]._of_process.quantized_weight.forms[-1] is form
        assert not called("quantize_weight")
        assert fm.weight_cache_bytes(chain) > chain[0].weight.numel()
        chain[0].weight.mul_(2)
        assert not torch.equal(chain(x, **named), first)
        assert len(called("quantize_weight")) == 1


# ---------------------------------------------------------------------------------- codes of stored weights, transposed

TRANSPOSED = "sm90.transposed_weight"


def stored(n, k):
    q = fm.quantize(torch.randn(E, n, k) / k**0.5, fp8_block(across=128, power_of_two=False))
    return fm.GroupedLinear.from_quantized(q.data, q.scale)


def stored_experts():
    return fm.Sequential(stored(2 * I, H), fm.SwiGLU(), stored(H, I))


def stored_glue(plan):
    return {step.ops[0]: step.rule for step in plan.glue if "StoredWeight" in step.ops[0]}


def test_codes_are_transposed_right_before_their_product(monkeypatch):
    """Nothing keeps them, and their scales need no copy."""
    chain, splits, copied = stored_experts(), torch.tensor(SPLITS), []
    monkeypatch.setattr(
        "fusedmoe.builtin_rules.products.fp8.with_strides", lambda t: copied.append(t) or products.with_strides(t)
    )
    plan = both_ways(chain, rows(), without=(TRANSPOSED,), bound=0, splits=splits)
    assert stored_glue(plan) == {"0:weight.StoredWeight": TRANSPOSED, "2:weight.StoredWeight": TRANSPOSED}
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


def test_what_needs_no_transposed_codes():
    splits, frozen = torch.tensor(SPLITS), rows(requires_grad=False)
    with torch.no_grad():
        plan = both_ways(stored_experts(), frozen, without=(TRANSPOSED,), bound=0, splits=splits)
    assert TRANSPOSED not in stored_glue(plan).values()
    fm.Sequential(stored(2 * I, H))(frozen, splits=splits)  # only the gradient of its rows would read them
    assert not called("transpose_codes")


def test_codes_that_are_not_contiguous():
    chain, x, splits = stored_experts(), rows(), torch.tensor(SPLITS)
    want, codes = outcome(chain, x, splits=splits), chain[0].weight
    wide = torch.zeros(E, 2 * I, H + 16, dtype=codes.dtype)
    wide.view(torch.uint8)[..., :H] = codes.view(torch.uint8)
    chain[0].weight = torch.nn.Parameter(wide[..., :H], requires_grad=False)
    calls.clear()
    assert_close(outcome(chain, x, splits=splits), want, 0)
    assert called("transpose_codes") == [{"shape": (E, H, I)}]
