"""What the rules for Blackwell decline, and why: formats, layers, and tensors of a call.

test_sm100_machines.py has machines and packages.
"""

from types import SimpleNamespace

import pytest
import torch
from kit.sm100_machine import (
    BF16,
    DGRAD,
    DGRAD_ACTIVATION,
    GEMM,
    GEMM_ACTIVATION,
    PREFIX,
    QUANTIZE,
    QUANTIZE_GRAD,
    QUANTIZE_WEIGHT,
    WGRAD,
    E,
    H,
    I,
    blackwell_machine,  # noqa: F401  (a fixture)
    experts,
    inputs,
    tokens,
)
from kit.toy import only_plan, rules_used

import fusedmoe as fm
from fusedmoe import FusionError, Status
from fusedmoe.builtin_rules import guards
from fusedmoe.builtin_rules.sm100 import packed, quantize
from fusedmoe.fusion.language.rule import Declined, NothingToDo
from fusedmoe.numerics.formats import Quantizer, fp8_block, mxfp8, nvfp4
from fusedmoe.numerics.recipes import MXFP8, NVFP4, Custom

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")

FORWARD, BACKWARD = (GEMM, GEMM_ACTIVATION), (DGRAD, DGRAD_ACTIVATION, WGRAD)
PRODUCTS = (*FORWARD, *BACKWARD)
QUANTIZERS = (QUANTIZE, QUANTIZE_GRAD)
ALL = (*PRODUCTS, *QUANTIZERS)
M = Quantizer(mxfp8())
FORMAT = "expected mxfp8 in e4m3 with scales of the rule rceil, rounded to nearest and not rotated, or nvfp4"


def plan_of(chain, x=None, recipe="mxfp8", *, scale=False, **named):
    x = tokens() if x is None else x
    with fm.recipe(recipe):
        return only_plan(chain, x, **inputs(len(x), scale=scale), **named)


def reasons(plan, rule, wanted=Status.CONSTRAINT):
    """Why a rule was declined anywhere, besides what it cannot keep where others are declined."""
    found = {a.reason for a in plan.attempts if a.rule == rule and a.status is wanted}
    return {reason for reason in found if not reason.startswith("cannot keep")}


def used(plan):
    return {name for name in rules_used(plan) if name.startswith(PREFIX)}


def assert_declined(plan, expected):
    """``expected``: all reasons of each rule, as a set, or one of them."""
    for rule, want in expected.items():
        assert rule not in used(plan), rule
        found = reasons(plan, rule)
        assert found == want if isinstance(want, set) else want in found, f"{rule}: {found}"


def test_all_rules_fuse_where_nothing_is_wrong():
    plan = plan_of(experts(scale=True), scale=True)
    assert used(plan) == {*ALL, QUANTIZE_WEIGHT}
    assert not any(reasons(plan, rule) for rule in ALL)


# ------------------------------------------------------------------------------------------------------------ formats


def of_rows(text):
    rows, gradient = f"input is {text}: {FORMAT}", f"grad_output is {text}: {FORMAT}"
    return dict.fromkeys(FORWARD, rows) | dict.fromkeys(BACKWARD, gradient)


def of_gradients(text, quantizer=None):
    return dict.fromkeys(BACKWARD, f"grad_output is {text}: {FORMAT}") | {
        QUANTIZE_GRAD: f"quantizes to {quantizer or text}: {FORMAT}"
    }


def quantizes(rows, gradient=None):
    return {QUANTIZE: f"quantizes to {rows}: {FORMAT}", QUANTIZE_GRAD: f"quantizes to {gradient or rows}: {FORMAT}"}


ROTATED, NVFP4_WEIGHT = Quantizer(mxfp8(), hadamard=True), Quantizer(nvfp4(across=16))
RECIPES = {
    "fp8_block": ("fp8_block", of_rows("fp8 e4m3 1x128") | quantizes("fp8 e4m3 1x128")),
    "fp8_tensor": (
        "fp8_tensor",
        of_rows("fp8 e4m3 per-tensor") | of_gradients("fp8 e5m2 per-tensor")
        | quantizes("fp8 e4m3 per-tensor", "fp8 e5m2 per-tensor"),
    ),
    "e5m2 gradients": (MXFP8(hybrid=True), of_gradients("mxfp8 e5m2 1x32")),
    "scales of the specification": (
        MXFP8(scale_rule="floor"), of_rows("mxfp8 e4m3 1x32") | quantizes("mxfp8 e4m3 1x32")
    ),
    "square blocks of weights": (
        MXFP8(weight_2d=True),
        dict.fromkeys(FORWARD, f"fc.weight is mxfp8 e4m3 32x32: {FORMAT}")
        | dict.fromkeys((DGRAD, DGRAD_ACTIVATION), f"dgrad.weight is mxfp8 e4m3 32x32: {FORMAT}"),
    ),
    "rotated rows": (
        Custom(input=ROTATED, weight=M, grad=M),
        dict.fromkeys(FORWARD, f"input is mxfp8 e4m3 1x32: {FORMAT}")
        | {WGRAD: f"wgrad.input is mxfp8 e4m3 1x32: {FORMAT}", QUANTIZE: f"quantizes to {ROTATED}: {FORMAT}"},
    ),
    "rotated gradients": (
        Custom(input=M, weight=M, grad=ROTATED), of_gradients("mxfp8 e4m3 1x32", f"{ROTATED}")
    ),
    "rows alone": (
        Custom(input=M, grad=M),
        dict.fromkeys(FORWARD, "fc.weight is not quantized: expected MXFP8 or NVFP4 operands")
        | dict.fromkeys((DGRAD, DGRAD_ACTIVATION), "dgrad.weight is not quantized: expected MXFP8 or NVFP4 operands"),
    ),
    "weights alone": (
        Custom(weight=M),
        {GEMM: "input is not quantized: expected MXFP8 or NVFP4 operands",
         DGRAD: "grad_output is not quantized: expected MXFP8 or NVFP4 operands"},
    ),
    "no gradients": (
        Custom(input=M, weight=M),
        dict.fromkeys((DGRAD, WGRAD), "grad_output is not quantized: expected MXFP8 or NVFP4 operands"),
    ),
    "gradients alone": (
        Custom(grad=M),
        {WGRAD: "wgrad.input is not quantized: expected MXFP8 or NVFP4 operands",
         DGRAD: "dgrad.weight is not quantized: expected MXFP8 or NVFP4 operands"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", RECIPES)
def test_other_formats(which):
    """They are no miss, since no device has a kernel."""
    recipe, expected = RECIPES[which]
    plan = plan_of(experts(scale=True), recipe=recipe, scale=True)
    assert_declined(plan, expected)
    misses = {miss.reason for _, miss in plan.missed if miss.rule.startswith(PREFIX)}
    assert misses.isdisjoint(expected.values())


def test_operands_of_two_formats():
    """No kernel multiplies MXFP8 and NVFP4, or quantizes the result of the one to the other."""
    plan = plan_of(experts(scale=True), recipe=Custom(input=M, weight=NVFP4_WEIGHT, grad=M), scale=True)
    reason = "the operands are e4m3 and e2m1: expected one format"
    assert_declined(plan, dict.fromkeys((GEMM, GEMM_ACTIVATION, DGRAD, DGRAD_ACTIVATION), reason))
    assert WGRAD in used(plan)
    chain = fm.Sequential(
        fm.Quantize(M, weight=M), fm.GroupedLinear(E, H, 2 * I, dtype=BF16), fm.SwiGLU(),
        fm.Quantize(nvfp4(), weight=NVFP4_WEIGHT), fm.GroupedLinear(E, I, H, dtype=BF16),
    )  # fmt: skip
    plan = plan_of(chain, tokens(requires_grad=False), "bf16")
    assert_declined(plan, {GEMM_ACTIVATION: "quantizes to nvfp4 e2m1 1x16, from operands in mxfp8 e4m3 1x32"})
    assert GEMM in used(plan)


def test_nvfp4_fuses_whatever_its_options():
    for recipe in ("nvfp4", NVFP4(hadamard=False), NVFP4(stochastic_rounding=False), NVFP4(weight_2d=False)):
        plan = plan_of(experts(scale=True), recipe=recipe, scale=True)
        assert used(plan) == {*ALL, QUANTIZE_WEIGHT}
        assert not any(reasons(plan, rule) for rule in ALL)


def test_other_formats_of_the_result():
    """The product is fused all the same; the result is quantized by another step."""
    chain = fm.Sequential(
        fm.Quantize(M, weight=M), fm.GroupedLinear(E, H, 2 * I, dtype=BF16), fm.SwiGLU(),
        fm.Quantize(fp8_block(), weight=fp8_block(across=128)), fm.GroupedLinear(E, I, H, dtype=BF16),
    )  # fmt: skip
    plan = plan_of(chain, tokens(requires_grad=False), "bf16")
    assert_declined(plan, {GEMM_ACTIVATION: f"quantizes to fp8 e4m3 1x128: {FORMAT}"})
    assert GEMM in used(plan)


def test_other_formats_of_the_gradient():
    chain = fm.Sequential(
        fm.Quantize(None, backward=fp8_block()), fm.SwiGLU(), fm.Quantize(M, weight=M),
        fm.GroupedLinear(E, I, H, dtype=BF16), fm.Quantize(None, backward=M),
    )  # fmt: skip
    plan = plan_of(chain, tokens(hidden=2 * I), "bf16")
    assert_declined(plan, {DGRAD_ACTIVATION: f"quantizes to fp8 e4m3 1x128: {FORMAT}"})
    assert DGRAD in used(plan)


# ------------------------------------------------------------------------------------------------------------- layers


def widths(first, last):
    """The reasons: of the first layer's products, and of the last one's."""
    return {GEMM: {first, last}, GEMM_ACTIVATION: first, DGRAD: {first, last}, DGRAD_ACTIVATION: last,
            WGRAD: {first, last}}  # fmt: skip


@pytest.mark.parametrize(
    ("hidden", "width", "first", "last"),
    [(192, I, "in_features 192", "out_features 192"), (H, 48, "out_features 96", "in_features 48")],
)
def test_widths(hidden, width, first, last):
    plan = plan_of(experts(hidden=hidden, width=width), tokens(hidden=hidden))
    assert_declined(plan, widths(*(f"{name} is not a multiple of 128" for name in (first, last))))


def test_half_of_a_width():
    plan = plan_of(experts(width=192))
    assert reasons(plan, GEMM_ACTIVATION) == {"half of out_features, 192, is not a multiple of 128"}
    assert {GEMM, DGRAD, WGRAD} <= used(plan), "of the first layer"
    assert reasons(plan, DGRAD_ACTIVATION) == {"in_features 192 is not a multiple of 128"}


def test_widths_of_blocks():
    plan = plan_of(experts(width=48))
    assert reasons(plan, QUANTIZE) == {"48 features are not a multiple of 32"}
    assert reasons(plan, QUANTIZE_GRAD) == {"96 features are not a multiple of 64"}


def test_the_number_of_experts(monkeypatch):
    assert packed.MOST_EXPERTS == 1024
    for module in (packed, quantize):
        monkeypatch.setattr(module, "MOST_EXPERTS", E - 1)
    assert_declined(plan_of(experts(scale=True), scale=True), {rule: {"4 experts, over 3"} for rule in ALL})


def test_sms_that_are_left_to_others():
    plan = plan_of(experts(options={"sm_margin": 7}))
    assert_declined(plan, {rule: {"sm_margin 7: these kernels take all SMs"} for rule in PRODUCTS})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype):
    name = str(dtype).removeprefix("torch.")
    plan = plan_of(experts(dtype=dtype), tokens(dtype=dtype))
    text = f"is {name}: products of packed operands are bfloat16"
    assert_declined(plan, dict.fromkeys(FORWARD, f"input {text}") | dict.fromkeys(BACKWARD, f"grad_output {text}"))
    if dtype is torch.float32:
        assert_declined(plan, {rule: {"rows are float32, not bfloat16 or float16"} for rule in QUANTIZERS})
    plan = plan_of(experts(dtype=dtype, bias="frozen"), tokens(dtype=dtype))
    assert_declined(plan, dict.fromkeys(FORWARD, f"the bias is {name}, not bfloat16"))


INTERLEAVED = "interleaved gate and up: expected a weight with the rows [gate | up]"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"interleaved": True}, INTERLEAVED),
        ({"alpha": 1.702}, "alpha 1.702 and offset 0.0 without a limit"),
        ({"offset": 1.0}, "alpha 1.0 and offset 1.0 without a limit"),
    ],
)
def test_activations(settings, reason):
    if reason != INTERLEAVED:
        reason += ": the kernel has them for clamped activations alone"
    plan = plan_of(experts(fm.SwiGLU(**settings)))
    assert_declined(plan, {GEMM_ACTIVATION: {reason}, DGRAD_ACTIVATION: {reason}})
    assert {GEMM, DGRAD, WGRAD} <= used(plan)
    with (
        fm.recipe("mxfp8"),
        fm.strict(),
        fm.disabled("sm100.activation"),
        pytest.raises(FusionError, match=r"1\.SwiGLU: sm100\.grouped_gemm_activation"),
    ):
        experts(fm.SwiGLU(**settings))(tokens(), **inputs())


def test_squared_relu_of_a_biased_layer():
    plan = plan_of(experts(fm.SquaredReLU(), bias="frozen"))
    assert_declined(plan, {GEMM_ACTIVATION: {"the kernel of the squared ReLU has no bias"}})


def test_gradients_that_are_read_unquantized():
    reason = "the gradient of the preactivation is read unquantized too: the epilogue writes codes"
    for chain, recipe in ((experts(bias="trained"), "mxfp8"), (experts(), MXFP8(wgrad="bf16"))):
        plan = plan_of(chain, recipe=recipe)
        assert_declined(plan, {DGRAD_ACTIVATION: {reason}})
        assert DGRAD in used(plan)


def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        plan, without = plan_of(experts(scale=True), scale=True), plan_of(experts())
    finally:
        torch.use_deterministic_algorithms(False)
    reason = "the gradient of the row scale is a sum by atomics, which is not deterministic"
    assert reason in reasons(plan, DGRAD_ACTIVATION)
    assert DGRAD_ACTIVATION not in used(plan)
    assert used(without) == {*ALL, QUANTIZE_WEIGHT}


def test_rows_without_experts():
    chain = fm.Sequential(fm.Linear(H, I, dtype=BF16))
    with fm.recipe("mxfp8"):
        plan = only_plan(chain, torch.randn(9, H, dtype=BF16, requires_grad=True))
    assert_declined(plan, {rule: {"rows without experts have no packed layout"} for rule in QUANTIZERS})


def test_rows_of_three_dimensions():
    spec = SimpleNamespace(shape=(2, 3, 64))
    ctx = SimpleNamespace(spec=lambda name: spec, dtype=lambda name: BF16, exists=lambda name: True)
    with pytest.raises(Declined, match="rows have 3 dimensions, not 2"):
        quantize._step(ctx, M, "input", "output")


# ------------------------------------------------------------------------------------------------- tensors of a call


def codes(rows, features):
    """Codes of any size that take no memory."""
    return torch.empty(rows, features, dtype=torch.float8_e4m3fn, device="meta")


@pytest.mark.parametrize(
    ("rows", "width", "others"), [(2**23, 256, (64,)), (2**20, 128, (2**11,)), (2**20, 128, (64, 2**11))]
)
def test_the_number_of_elements(rows, width, others):
    """The kernels count them in 32 bits."""
    packed.guard_rows(rows - 1, width, *others)
    widest = max(width, *others)
    with pytest.raises(Declined, match=rf"^{rows} rows of {widest} features: expected fewer than 2\^31 elements$"):
        packed.guard_rows(rows, width, *others)


@pytest.mark.parametrize("rule", PRODUCTS)
def test_each_product_counts_elements_of_all_operands(rule):
    """The width of the result may be what is too large."""
    chain = experts(scale=True)
    rows, (wide, narrow) = 2**31 // (2 * I) + 256, (2 * I, 1)
    ctx = SimpleNamespace(spec=lambda name: SimpleNamespace(shape=(rows, narrow)), exists=lambda name: False, keep=())
    made = {
        GEMM: (codes(rows, narrow), None, codes(E * wide, 1).view(E, wide, 1), None, None),
        GEMM_ACTIVATION: (codes(rows, narrow), None, codes(E * wide, 1).view(E, wide, 1), None, None, None),
        DGRAD: (codes(rows, narrow), None, codes(E * wide, 1).view(E, wide, 1), None, None),
        DGRAD_ACTIVATION: (codes(rows, narrow), None, None, None, None, codes(rows, wide)),
        WGRAD: (codes(rows, narrow), None, None),
    }[rule]
    (kind,) = [kind for kind in fm.rules() if kind.name == rule]
    bound = kind({"fc": chain[0], "act": chain[1], "scale": None, "dact": SimpleNamespace(op=chain[1]),
                  "scale_grad": None, "wgrad": SimpleNamespace(op=chain[0]), "dgrad": SimpleNamespace(op=chain[-1]),
                  "quantize": SimpleNamespace(quantizer=M, quantizes=M)})  # fmt: skip
    with pytest.raises(Declined, match=r"expected fewer than 2\^31 elements"):
        bound.bind(ctx, *made)


def test_a_call_without_rows():
    with pytest.raises(NothingToDo, match="no rows"):
        packed.guard_rows(0, H)


def test_a_bias_that_is_not_contiguous():
    bias = torch.zeros(E, H, dtype=BF16)
    guards.contiguous("the bias", None)
    guards.contiguous("the bias", bias)
    with pytest.raises(Declined, match="the bias is not contiguous"):
        guards.contiguous("the bias", bias.mT.contiguous().mT)
