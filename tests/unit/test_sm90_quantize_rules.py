"""The rules for sm_90 that quantize to FP8, on the CPU: plans, and results with stand-ins for the kernels.

The products of FP8 codes run in plain PyTorch here, so results agree bit for bit with those of the unfused chain.
"""

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome, rules_used, status
from test_sm90_rules import BF16, E, called, hopper_machine, inputs, rows, strided  # noqa: F401  (a fixture)
from test_sm90_slot_rules import K, T, routing, tokens
from test_sm90_slot_rules import experts as routed_experts

import fusedmoe as fm
from fusedmoe import FusionError, Status
from fusedmoe.numerics.formats import E2M1, E4M3, Format, Quantizer, ScaleRule, fp8_block
from fusedmoe.numerics.formats.roles import ROLES
from fusedmoe.numerics.recipes import MXFP8, NVFP4, FP8Block

pytestmark = pytest.mark.usefixtures("builtin_rules")
H, I = 32, 48  # noqa: E741
RULES = {"sm90.quantize", "sm90.quantize_grad", "sm90.quantize_weight"}
BLOCK = ROLES["fp8_block"]


@pytest.fixture(autouse=True)
def products_in_plain_pytorch(monkeypatch):
    monkeypatch.setenv("FUSEDMOE_DISABLE", "sm90.fp8_*")


def experts(hidden=H, width=I, dtype=BF16):
    return fm.Sequential(
        fm.GroupedLinear(E, hidden, 2 * width, dtype=dtype),
        fm.SwiGLU(),
        fm.GroupedLinear(E, width, hidden, dtype=dtype),
    )


def quantizing(plan):
    """The rules of all steps and all glue that quantize, by their names in the plan."""
    steps = (*plan.steps, *plan.glue)
    return {"+".join(s.ops): s.rule for s in steps if any("Quantize" in op for op in s.ops)}


def both_ways(chain, x, recipe="fp8_block", **named):
    """Check that fused quantization gives the bits of plain PyTorch; return the plan."""
    with fm.recipe(recipe):
        with fm.disabled("sm90.*quantize*"):
            expected = outcome(chain, x, **named)
            assert not RULES & {s.rule for s in only_plan(chain, x, **named).steps}
        stand_ins.calls.clear()
        fm.clear_weight_cache(chain)
        with fm.strict():
            got = outcome(chain, x, **named)
        plan = only_plan(chain, x, **named)
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert want.any(), f"{name}: zeros would pass"
        assert torch.equal(got[name], want), name
    return plan


@pytest.mark.parametrize("hybrid", [False, True], ids=["e4m3", "hybrid"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", ""])
def test_every_operand_is_quantized_in_one_launch(power_of_two, hybrid):
    recipe = FP8Block(hybrid=hybrid, power_of_two=power_of_two, amax_epsilon=1e-12)
    plan = both_ways(experts(), rows(), recipe, **inputs(scale=False))
    assert quantizing(plan) == {
        "0:weight.Quantize": "sm90.quantize_weight",
        "2:weight.Quantize": "sm90.quantize_weight",
        "0:input.Quantize": "sm90.quantize",
        "2:input.Quantize": "sm90.quantize",
        "2:grad.QuantizeGrad": "sm90.quantize_grad",
        "0:grad.QuantizeGrad": "sm90.quantize_grad",
    }
    assert called("quantize_weight") == [{"rows": True, "columns": True}] * 2
    assert called("quantize_rows") == [{"rows": True, "columns": True}] * 4
    assert {s.launches for s in plan.steps if s.rule in RULES} == {1}
    assert "quantized weights: " in str(plan)


NARROW = ("mxfp8", "nvfp4", "fp8_row", "fp8_tensor", "mxfp8 2d", "nvfp4 1d")


@pytest.mark.parametrize("layers", ["grouped", "dense", "routed"])
@pytest.mark.parametrize("which", NARROW)
def test_other_recipes_are_quantized_to_the_same_bits(which, layers):
    """The products run in plain PyTorch here."""
    recipe = {"mxfp8 2d": MXFP8(weight_2d=True), "nvfp4 1d": NVFP4(weight_2d=False)}.get(which, which)
    chain, x, named = experts(), rows(), inputs(scale=False)
    if layers == "dense":
        chain = fm.Sequential(fm.Linear(H, 64, dtype=BF16), fm.GeGLU(), fm.Linear(32, H, dtype=BF16))
        x, named = torch.randn(3, 5, H, dtype=BF16, requires_grad=True), {}
    if layers == "routed":
        chain, x, named = routed_experts(), tokens(), routing()

    def run():
        torch.manual_seed(3)  # of stochastic rounding
        return outcome(chain, x, **named)

    with fm.recipe(recipe):
        with fm.disabled("sm90.*quantize*"):
            expected = run()
        stand_ins.calls.clear()
        fm.clear_weight_cache(chain)
        with fm.disabled("sm90.dequantized_*"):
            got = run()
            plan = only_plan(chain, x, **named)
    gathered = {"sm90.gathered_quantize", "sm90.gathered_quantize_grad"} if layers == "routed" else set()
    assert {*quantizing(plan).values()} == RULES | gathered
    assert called("quantize_format")
    for name, want in expected.items():
        assert want.any(), f"{name}: zeros would pass"
        assert torch.equal(got[name], want), name


@pytest.mark.parametrize("which", ["mxfp8", "nvfp4", "fp8_tensor"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_dequantized_products(which, bias):
    """Up to the rounding of products before a bias or a scale per expert, after which codes differ."""
    chain = fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, bias=bias, dtype=BF16),
        fm.SwiGLU(),
        fm.GroupedLinear(E, I, H, bias=bias, dtype=BF16),
    )
    x, named = rows(), inputs(scale=False)
    with fm.recipe(which):
        with fm.disabled("*"):
            torch.manual_seed(3)
            expected = outcome(chain, x, **named)
        stand_ins.calls.clear()
        fm.clear_weight_cache(chain)
        torch.manual_seed(3)
        got = outcome(chain, x, **named)
        plan = only_plan(chain, x, **named)
    assert {"sm90.dequantized_gemm", "sm90.dequantized_dgrad", "sm90.dequantized_wgrad"} <= {*rules_used(plan)}
    assert len(called("dequantize")) == 12
    for name, want in expected.items():
        error = (got[name].double() - want.double()).norm() / want.double().norm()
        assert error < 0.05, f"{name}: relative error {error}"


@pytest.mark.parametrize("which", ["mxfp8", "nvfp4"])
def test_a_first_gradient_leaves_the_quantized_weight_valid(which):
    """The scales of experts are applied to a gradient of NVFP4 before autograd gets it."""
    layer, x, named = fm.GroupedLinear(E, H, I, dtype=BF16), rows(), inputs(scale=False)
    counts = []
    with fm.recipe(which):
        for _ in range(3):
            stand_ins.calls.clear()
            layer(x, **named).sum().backward()
            counts.append(len(called()))
        assert "sm90.dequantized_wgrad" in rules_used(only_plan(fm.Sequential(layer), x, **named))
    assert layer.weight.grad.any()
    assert counts[0] > counts[1] == counts[2], "the weight is quantized once"


def test_only_the_forms_that_are_read_are_written():
    chain, named = experts(), inputs(scale=False)
    with torch.no_grad():
        both_ways(chain, rows(requires_grad=False), **named)
    assert called("quantize_weight") == called("quantize_rows") == [{"rows": True, "columns": False}] * 2
    for layer in (chain[0], chain[2]):
        layer.weight.requires_grad_(False)
    both_ways(chain, rows(), **named)  # no weight gradient: no columns of rows and gradients
    assert called("quantize_weight") == [{"rows": True, "columns": True}] * 2
    assert called("quantize_rows") == [{"rows": True, "columns": False}] * 4


def test_a_gradient_of_the_weight_alone_takes_columns_alone():
    chain = fm.Sequential(fm.GroupedLinear(E, H, 32, dtype=BF16))
    both_ways(chain, rows(requires_grad=False), **inputs(scale=False))
    forms = {"rows": True, "columns": True}, {"rows": False, "columns": True}
    assert called("quantize_rows") == [*forms]
    assert called("quantize_weight") == [{"rows": True, "columns": False}]


def test_dense_layers_and_rows_with_several_axes():
    """The rows of a dense layer have no offsets, and may have more than one leading axis."""
    chain = fm.Sequential(fm.Linear(H, 64, dtype=BF16), fm.GeGLU(), fm.Linear(32, H, dtype=BF16))
    plan = both_ways(chain, torch.randn(3, 5, H, dtype=BF16, requires_grad=True))
    assert {*quantizing(plan).values()} == RULES
    assert called("quantize_rows") == [{"rows": True, "columns": True}] * 4


def test_a_quantize_op_without_a_linear_layer_after_it():
    """What it makes is dequantized in plain PyTorch."""
    chain = fm.Sequential(fm.Quantize(BLOCK.input, backward=BLOCK.grad), fm.SwiGLU(), fm.Quantize(BLOCK.input))
    plan = both_ways(chain, torch.randn(40, 64, dtype=BF16, requires_grad=True))
    assert [s.rule for s in plan.steps if s.rule] == [
        "sm90.quantize", "sm90.activation", "sm90.quantize", "sm90.dactivation", "sm90.quantize_grad",
    ]  # fmt: skip
    assert called("quantize_rows") == [{"rows": True, "columns": False}] * 3


@pytest.mark.parametrize("sentinels", [False, True], ids=["", "sentinels"])
def test_rows_of_tokens_are_read_through_their_index(sentinels):
    plan = both_ways(routed_experts(), tokens(), **routing(sentinels=sentinels))
    assert {"sm90.gathered_quantize", "sm90.gathered_quantize_grad"} <= {*rules_used(plan)}
    assert plan.gathered == (
        ("1:input.input", "0.input", "0.token_of_row"),
        ("grad(5.input)", "grad(5.output)", "0.token_of_row"),
    )
    assert called("gathered_quantize_rows") == [{"source": T, "rows": T * K}] * 2
    assert "gather_rows" not in called()


# ------------------------------------------------------------------------------------------------ weights


def test_weights_are_cached_until_they_change():
    chain, x, named = experts(), rows(), inputs(scale=False)
    with fm.recipe("fp8_block"):
        first = chain(x, **named)
        assert called("quantize_weight") == [{"rows": True, "columns": True}] * 2
        stand_ins.calls.clear()
        assert torch.equal(chain(x, **named), first)
        with torch.no_grad():
            assert torch.equal(chain(x, **named), first)
        assert not called("quantize_weight")
        assert fm.weight_cache_bytes(chain) > chain[0].weight.numel() * 2
        with torch.no_grad():
            chain[0].weight.mul_(2)
        assert not torch.equal(chain(x, **named), first)
        assert called("quantize_weight") == [{"rows": True, "columns": True}]


def test_a_rule_does_not_read_the_weights_that_plain_pytorch_cached():
    """Their scales have other strides. Plain PyTorch reads those of a rule."""
    chain, x, named = experts(), rows(), inputs(scale=False)
    with fm.recipe("fp8_block"):
        with fm.disabled("sm90.quantize_weight"):
            expected = chain(x, **named)
            assert not called("quantize_weight")
        assert torch.equal(chain(x, **named), expected)
        assert len(called("quantize_weight")) == 2
        form = chain[0]._of_process.quantized_weight.forms[-1]
        assert form.scale.stride() == (4, 1, 4)
        with fm.disabled("sm90.quantize_weight"):
            assert torch.equal(chain(x, **named), expected)
        assert chain[0]._of_process.quantized_weight.forms[-1] is form


# ------------------------------------------------------------------------------------------------ must not fuse


NONE = "no kernel quantizes to"
OTHER_FORMATS = {
    "1x64": (Format("odd", E4M3, (1, 64), ScaleRule.RCEIL), f"{NONE} odd e4m3 1x64 yet: expected blocks of 1x128"),
    "fp32 scales": (Format("odd", E4M3, (1, 32), ScaleRule.FP32), f"{NONE} odd e4m3 1x32 yet: expected"),
    "128x128": (fp8_block(across=128), f"{NONE} fp8 e4m3 128x128 yet: expected blocks of 1x128 values"),
    "e2m1": (
        Format("odd", E2M1, (1, 128), ScaleRule.TWO_LEVEL, tensor_scale=True),
        f"{NONE} odd e2m1 1x128 yet: expected codes in e4m3 or e5m2",
    ),
    "e8m0": (
        Format("odd", E4M3, (1, 128), ScaleRule.RCEIL),
        f"{NONE} odd e4m3 1x128 yet: expected fp32 scales",
    ),
    "hadamard": (
        Quantizer(fp8_block(), hadamard=True),
        "no kernel rotates rows before it quantizes them yet: expected hadamard=False",
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", OTHER_FORMATS)
def test_other_formats_run_in_plain_pytorch(which):
    """Of rows and gradients; this is no miss, since no device has a kernel."""
    quantizer, reason = OTHER_FORMATS[which]
    chain = fm.Sequential(fm.Quantize(quantizer, backward=quantizer), fm.Linear(H, H, dtype=BF16))
    if which == "128x128":  # only rows without experts may share blocks
        chain = fm.Sequential(fm.Quantize(quantizer), fm.SwiGLU())
    x = torch.randn(20, H, dtype=BF16, requires_grad=True)
    with fm.strict():
        chain(x).sum().backward()
    plan = only_plan(chain, x)
    assert not called("quantize_rows")
    for rule in ("sm90.quantize", "sm90.quantize_grad")[: 1 if which == "128x128" else 2]:
        found, why = status(plan, rule)
        assert found is Status.CONSTRAINT
        assert why.startswith(reason)


@pytest.mark.parametrize(
    ("quantizer", "reason"),
    [
        (fp8_block(), f"{NONE} fp8 e4m3 1x128 yet: expected blocks of 128x128 values"),
        (Format("odd", E4M3, (128, 128), ScaleRule.FLOOR), f"{NONE} odd e4m3 128x128 yet: expected fp32 scales"),
    ],
    ids=["1x128", "e8m0"],
)
def test_other_formats_of_weights_run_in_plain_pytorch(quantizer, reason):
    chain = fm.Sequential(fm.Quantize(weight=quantizer), fm.Linear(H, H, dtype=BF16))
    x = torch.randn(20, H, dtype=BF16, requires_grad=True)
    with fm.strict():
        chain(x).sum().backward()
    assert not called("quantize_weight")
    found, why = glue_status(only_plan(chain, x))
    assert found is Status.CONSTRAINT
    assert why.startswith(reason)


def glue_status(plan):
    """The status of ``sm90.quantize_weight`` and its reason, at the only weight."""
    (miss,) = [s.nearest_miss for s in plan.steps if s.nearest_miss and "weight" in s.nearest_miss.rule]
    return miss.status, miss.reason


@pytest.mark.parametrize(("hidden", "width"), [(40, 32), (32, 24)])
def test_widths_that_are_not_a_multiple_of_16(hidden, width):
    chain, named = experts(hidden, width), inputs(scale=False)
    x = rows(hidden=hidden)
    with fm.recipe("fp8_block"):
        plan = only_plan(chain, x, **named)
        with fm.disabled("*"):
            expected = outcome(chain, x, **named)
        fm.clear_weight_cache(chain)
        got = outcome(chain, x, **named)
        with fm.strict(), pytest.raises(FusionError, match="is not a multiple of 16"):
            chain(x, **named)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    odd = 40 if hidden == 40 else 24
    assert {a.reason for a in plan.attempts if a.rule in RULES and a.status is Status.CONSTRAINT} == {
        f"features {odd} is not a multiple of 16"
    }


def test_other_dtypes():
    x = rows(dtype=torch.float32)
    with fm.recipe("fp8_block"):
        chain = experts(dtype=torch.float32)
        plan = only_plan(chain, x, **inputs(scale=False))
        with fm.disabled("*"):
            expected = outcome(chain, x, **inputs(scale=False))
        fm.clear_weight_cache(chain)
        got = outcome(chain, x, **inputs(scale=False))
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert not RULES & {s.rule for s in plan.steps}
    for rule, operand in (("sm90.quantize", "input"), ("sm90.quantize_grad", "grad_output")):
        reason = f"{operand} is float32, not bfloat16 or float16: convert the module, or run under torch.autocast"
        assert status(plan, rule) == (Status.CONSTRAINT, reason)


@pytest.mark.parametrize("how", ["address", "pitch", "columns"])
@pytest.mark.parametrize("which", ["x", "weight"])
def test_strides(which, how):
    chain, x, named = experts(), rows(), inputs(scale=False)
    if which == "x":
        x = strided(x.detach(), how)
    else:
        chain[0].weight = torch.nn.Parameter(strided(chain[0].weight.detach(), how))
    with fm.recipe("fp8_block"):
        with fm.disabled("*"):
            expected = outcome(chain, x, **named)
        fm.clear_weight_cache(chain)
        stand_ins.calls.clear()
        got = outcome(chain, x, **named)
        if (which, how) == ("weight", "columns"):
            assert len(called("quantize_weight")) == 2  # either of the last two axes may have unit stride
        else:
            name = "the weight" if which == "weight" else "x"
            with fm.strict(), pytest.raises(FusionError, match=f"declined this call: {name} "):
                chain(x, **named)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_gradient_with_other_strides_is_copied():
    chain = fm.Sequential(fm.GroupedLinear(E, H, 32, dtype=BF16))
    x, named = rows(), inputs(scale=False)
    with fm.recipe("fp8_block"), fm.strict():
        stand_ins.calls.clear()
        chain(x, **named).sum().backward()  # expanded
    assert len(called("quantize_rows")) == 2


def test_no_rows():
    chain, x = experts(), torch.empty(0, H, dtype=BF16, requires_grad=True)
    with fm.recipe("fp8_block"), fm.strict():
        chain(x, splits=torch.zeros(E, dtype=torch.int64)).sum().backward()
    assert not called("quantize_rows")
