"""The rules for products of FP8 operands on sm_90, on the CPU: plans, and results with stand-ins for the kernels.

test_sm90_fp8_wgrad_rule.py has the constraints of the weight gradient.
"""

from copy import deepcopy

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome, rules_used, status
from test_sm90_rules import BF16, SPLITS, E, called, hopper_machine, inputs, rows  # noqa: F401  (a fixture)
from torch import nn

import fusedmoe as fm
from fusedmoe import FusionError, Status
from fusedmoe.builtin_rules.products.fp8 import guard_codes, of_codes
from fusedmoe.fusion.language.rule import Declined, NothingToDo
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.numerics.formats import (
    E4M3,
    E5M2,
    Delayed,
    Format,
    Quantizer,
    ScaleRule,
    fp8_block,
    fp8_row,
    fp8_tensor,
    mxfp8,
)
from fusedmoe.numerics.recipes import FP8Block, FP8Tensor

pytestmark = pytest.mark.usefixtures("builtin_rules")
H, I = 64, 128  # noqa: E741
GEMM, GEMM_ACTIVATION = "sm90.fp8_grouped_gemm", "sm90.fp8_grouped_gemm_activation"
DGRAD, DGRAD_ACTIVATION = "sm90.fp8_grouped_dgrad", "sm90.fp8_grouped_dgrad_activation"
WGRAD = "sm90.fp8_grouped_wgrad"
BACKWARD = ["sm90.quantize_grad", WGRAD, DGRAD_ACTIVATION, WGRAD, DGRAD]
QUANTIZED_AFTER = ["sm90.quantize_grad", WGRAD, DGRAD_ACTIVATION, "sm90.quantize_grad", WGRAD, DGRAD]
IN_CODES = "block_scaled_gemm_activation_backward_codes"
ROWS, WEIGHT = fp8_block(), fp8_block(across=128)


@pytest.fixture(autouse=True)
def stand_ins_for_fp8(hopper_machine, monkeypatch):  # noqa: F811
    """Those of `hopper_machine` are for FP8 operands too."""


def experts(act=fm.SwiGLU, *, scale=False, bias=False, hidden=H, width=I, dtype=BF16, options=None, **settings):
    activation = act(**settings)
    wide = 1 if isinstance(activation, fm.SquaredReLU) else 2
    return fm.Sequential(
        fm.GroupedLinear(E, hidden, wide * width, bias=bias, dtype=dtype),
        activation,
        *([fm.Scale("probs")] if scale else []),
        fm.GroupedLinear(E, width, hidden, bias=bias, dtype=dtype),
        **(options or {}),
    )


def plan_of(chain, x, recipe="fp8_block", **named):
    with fm.recipe(recipe):
        return only_plan(chain, x, **named)


def rules(plan):
    """The rules of all steps, except for those of weights."""
    return [step.rule for step in plan.steps if not step.ops[0].endswith("weight.Quantize")]


def both_ways(chain, x, recipe="fp8_block", strict=True, **named):
    """Check a fused call against the unfused one; return its plan.

    Both quantize the same values, except where the unfused chain rounds values between two ops.
    """
    with fm.recipe(recipe):
        with fm.disabled("*"):
            expected = outcome(chain, x, **named)
            assert not only_plan(chain, x, **named).fused
        fm.clear_weight_cache(chain)
        stand_ins.calls.clear()
        if strict:
            with fm.strict():
                got = outcome(chain, x, **named)
        else:
            got = outcome(chain, x, **named)
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert want.any(), f"{name}: zeros would pass"
        assert got[name].dtype is want.dtype
        error = (got[name].double() - want.double()).norm() / want.double().norm()
        assert error < 0.06, f"{name}: {error}"
    for name in {"y", "x", "probs"} & got.keys():
        assert not got[name][sum(SPLITS) :].any(), "rows of the tail"
    return plan_of(chain, x, recipe, **named)


# ------------------------------------------------------------------------------------------------------ what fuses


ACTIVATIONS = {
    "swiglu": (fm.SwiGLU, {}),
    "clamped": (fm.SwiGLU, {"limit": 0.4, "alpha": 1.702, "offset": 1.0}),
    "geglu": (fm.GeGLU, {}),
    "geglu erf": (fm.GeGLU, {"approximate": "none"}),
    "reglu": (fm.ReGLU, {}),
    "squared_relu": (fm.SquaredReLU, {}),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_whole_plan_computes_the_same(act, scale, bias):
    kind, settings = ACTIVATIONS[act]
    chain = experts(kind, scale=scale, bias=bias, **settings)
    plan = both_ways(chain, rows(hidden=H), **inputs(scale=scale))
    assert not plan.unfused
    backward = BACKWARD
    if bias:  # its gradient sums the unquantized gradient of the preactivation
        quantize, wgrad, derivative, quantize_again, *others = QUANTIZED_AFTER
        sums = "sm90.column_sums"
        backward = [quantize, sums, wgrad, derivative, quantize_again, sums, *others]
    assert rules(plan) == ["sm90.quantize", GEMM_ACTIVATION, GEMM, *backward]
    assert {"grouped_gemm", "grouped_wgrad", "quantize_format"}.isdisjoint(called())


def test_the_forms_that_are_written_and_kept():
    """The layer's input by columns is recomputed: neither it nor its codes by rows are kept."""
    plan = both_ways(experts(scale=True), rows(hidden=H), **inputs())
    (activation,) = called("block_scaled_gemm_activation")
    assert (activation["keep"], activation["quantized"]) == (True, fp8_block())
    assert called("quantize_rows") == [
        {"rows": True, "columns": True},  # the rows
        {"rows": True, "columns": True},  # the gradient of the output
    ]
    (derivative,) = called(IN_CODES)
    assert (derivative["forms"], derivative["want_row_scale_grad"]) == ((True, True, True), True)
    assert {*plan.kept} == {"offsets", "1.input", "probs", "0.input:columns"}
    (step,) = [step for step in plan.steps if step.rule == DGRAD_ACTIVATION]
    assert step.ops == ("3.Dgrad", "2.ScaleGrad", "2.DScale", "1.DSwiGLU", "0:grad.QuantizeGrad")
    assert step.launches == 2  # one sums the gradient of the scale


@pytest.mark.parametrize("frozen", ["first", "last", "rows"])
def test_the_forms_that_are_read(frozen):
    """No form is written for a gradient that is not required."""
    chain, x = experts(), rows(hidden=H, requires_grad=frozen != "rows")
    if frozen != "rows":
        chain[0 if frozen == "first" else 2].weight.requires_grad_(False)
    plan = both_ways(chain, x, **inputs(scale=False))
    (derivative,) = called(IN_CODES)
    assert derivative["forms"] == (frozen != "rows", frozen != "first", frozen != "last")
    assert "sm90.quantize_grad" in rules_used(plan, "backward")
    assert len(called("quantize_rows")) == 2


def test_the_gradient_of_a_bias_reads_the_unquantized_gradient():
    plan = both_ways(experts(bias=True), rows(hidden=H), **inputs(scale=False))
    reason = "the gradient of the preactivation is read unquantized too: the epilogue writes codes"
    assert reason in {a.reason for a in plan.attempts if a.rule == DGRAD_ACTIVATION}
    assert called("quantize_rows")[-2:] == [{"rows": False, "columns": True}, {"rows": True, "columns": True}]
    assert not called(IN_CODES)


def test_inference_keeps_nothing():
    x = rows(hidden=H, requires_grad=False)
    with torch.no_grad():
        plan = both_ways(experts(), x, **inputs(scale=False))
    assert plan.kept == ()
    (activation,) = called("block_scaled_gemm_activation")
    assert (activation["keep"], activation["quantized"]) == (False, fp8_block())
    assert called("quantize_rows") == [{"rows": True, "columns": False}]
    assert called("quantize_weight") == [{"rows": True, "columns": False}] * 2


def test_unquantized_weight_gradients():
    """They read the rows, and the input of the second layer, recomputed in bf16."""
    plan = both_ways(experts(scale=True), rows(hidden=H), "fp8_block:wgrad=bf16", **inputs())
    assert rules_used(plan, "backward") == [
        "sm90.quantize_grad", "sm90.grouped_wgrad", DGRAD_ACTIVATION, "sm90.quantize_grad", "sm90.grouped_wgrad", DGRAD,
    ]  # fmt: skip
    assert all(forms == {"rows": True, "columns": False} for forms in called("quantize_rows"))
    assert len(called("quantize_rows")) == 3
    assert not any(value.endswith(":columns") for value in plan.kept)
    assert "block_scaled_wgrad" not in called()


def test_frozen_weights_have_no_gradients():
    chain = experts()
    for layer in (chain[0], chain[2]):
        layer.weight.requires_grad_(False)
    plan = both_ways(chain, rows(hidden=H), **inputs(scale=False))
    assert rules_used(plan, "backward") == ["sm90.quantize_grad", DGRAD_ACTIVATION, DGRAD]
    assert called(IN_CODES)[0]["forms"] == (True, False, False)


@pytest.mark.parametrize("hybrid", [False, True], ids=["e4m3", "hybrid"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", ""])
def test_formats_of_the_recipe(power_of_two, hybrid):
    recipe = FP8Block(hybrid=hybrid, power_of_two=power_of_two)
    plan = both_ways(experts(), rows(hidden=H), recipe, **inputs(scale=False))
    gradient = torch.float8_e5m2 if hybrid else torch.float8_e4m3fn
    assert [call["codes"] for call in called("block_scaled_gemm")] == [torch.float8_e4m3fn, gradient]
    if power_of_two:
        (derivative,) = called(IN_CODES)
        assert derivative["quantized"] == fp8_block(E5M2 if hybrid else E4M3)
    else:
        (derivative,) = called("block_scaled_gemm_activation_backward")
        reason = "the gradient of the preactivation has scales of any size: the epilogue has powers of two"
        assert reason in {a.reason for a in plan.attempts if a.rule == DGRAD_ACTIVATION}
        assert rules_used(plan, "backward") == QUANTIZED_AFTER
    assert derivative["codes"] is gradient
    assert called("block_scaled_gemm_activation")[0]["quantized"] == fp8_block(power_of_two=power_of_two)


@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_one_layer(scale):
    """A scale after it is fused if it is not trained."""
    layer = fm.Sequential(fm.GroupedLinear(E, H, 48, bias=True, dtype=BF16), *([fm.Scale("probs")] if scale else []))
    named = inputs(scale=scale, requires_grad=False)
    plan = both_ways(layer, rows(hidden=H), strict=not scale, **named)
    assert rules_used(plan, "forward")[-1] == GEMM
    assert called("block_scaled_gemm")[0]["row_scale"] is scale
    assert {WGRAD, DGRAD} <= {*rules_used(plan, "backward")}


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_row_scales_of_other_dtypes(dtype):
    plan = both_ways(experts(scale=True), rows(hidden=H), **inputs(dtype=dtype))
    launches = {step.rule: step.launches for step in plan.steps}
    assert launches[GEMM_ACTIVATION] == 2
    assert launches[DGRAD_ACTIVATION] == 4  # the product, the scale, and its gradient in two


def test_kernel_options():
    chain = experts(options={"sm_margin": 7, "schedule": "static"})
    both_ways(chain, rows(hidden=H), **inputs(scale=False))
    products = [what for name, what in stand_ins.calls if name.startswith("block_scaled")]
    assert len(products) == 6
    assert {(what["options"].sm_margin, what["options"].schedule) for what in products} == {(7, "static")}


@pytest.mark.parametrize("recipe", [FP8Tensor(), FP8Tensor(delayed=Delayed(2))], ids=["current", "delayed"])
def test_a_layer_of_a_model_with_one_scale_per_expert(recipe):
    layer = fm.MoE(H, I, 4, 2, dtype=BF16)
    x = torch.randn(9, H, dtype=BF16, requires_grad=True)
    with fm.recipe(recipe):
        (plan,) = fm.explain(layer, tokens=9, arch=90).plans
        with fm.strict():
            layer(x).sum().backward()
    assert not plan.unfused
    quantize = [] if recipe.delayed else ["sm90.quantize"]
    assert rules(plan) == [
        "sm90.router_dispatch", "sm90.gathered_quantize", GEMM_ACTIVATION, *quantize, GEMM, "sm90.combine",
        "sm90.gathered_quantize_grad", WGRAD, DGRAD_ACTIVATION, "sm90.quantize_grad", WGRAD, DGRAD,
        "sm90.router_backward",
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_block:wgrad=bf16"])
def test_a_layer_of_a_model(recipe):
    """Tokens are quantized through the index of their rows. Nothing runs in plain PyTorch."""
    layer = fm.MoE(H, I, 4, 2, dtype=BF16)
    x = torch.randn(9, H, dtype=BF16, requires_grad=True)
    with fm.recipe(recipe):
        (plan,) = fm.explain(layer, tokens=9, arch=90).plans
        with fm.strict():
            layer(x).sum().backward()
    assert not plan.unfused
    wgrads = ["sm90.gathered_wgrad_dy", "sm90.gathered_wgrad_x"] if recipe != "fp8_block" else [WGRAD, WGRAD]
    assert rules(plan) == [
        "sm90.router_dispatch", "sm90.gathered_quantize", GEMM_ACTIVATION, GEMM, "sm90.combine",
        "sm90.gathered_quantize_grad", wgrads[0], DGRAD_ACTIVATION,
        *([] if recipe == "fp8_block" else ["sm90.quantize_grad"]), wgrads[1], DGRAD, "sm90.router_backward",
    ]  # fmt: skip


def layer_with_a_router(main_grad=False):
    """Its products take long enough that a sum over slots can run beside them."""
    torch.manual_seed(0)
    layer = fm.Sequential(
        fm.Router(H, 4, 2, dtype=BF16), fm.Dispatch(),
        fm.GroupedLinear(4, H, 1024, dtype=BF16, accumulate_into_main_grad=main_grad), fm.SwiGLU(), fm.Scale("probs"),
        fm.GroupedLinear(4, 512, H, dtype=BF16, accumulate_into_main_grad=main_grad), fm.Combine(None),
    )  # fmt: skip
    if main_grad:
        for weight in (layer[2].weight, layer[5].weight):
            weight.main_grad = torch.zeros(weight.shape)
    return layer, torch.randn(9, H, dtype=BF16, requires_grad=True)


def gradients(layer, x):
    """Those of the input and the weights; only the calls of backward are recorded."""
    with fm.recipe("fp8_block"):
        y = layer(x)
    stand_ins.calls.clear()
    y.sum().backward()
    return [x.grad, *(getattr(p, "main_grad", p.grad) for p in layer.parameters())]


@pytest.mark.parametrize("main_grad", [False, True], ids=["", "main_grad"])
def test_the_sum_over_slots_runs_beside_a_weight_gradient(main_grad, monkeypatch):
    """The results are those of one step after the other."""
    alone, x = layer_with_a_router(main_grad)
    assert not plan_of(alone, x).beside  # it is short
    want = gradients(alone, x)
    assert not called("beside")
    monkeypatch.setattr("fusedmoe.builtin_rules.rows.dispatch.SHORTEST_US", 0.0)
    layer, x = layer_with_a_router(main_grad)
    ((light, carrier, sms),) = plan_of(layer, x).beside
    assert (light, carrier) == ("sm90.router_backward", WGRAD)
    assert 16 <= sms <= 56
    got = gradients(layer, x)
    assert all(map(torch.equal, got, want))
    assert all(t.any() for t in want)
    names = called()
    at = names.index("beside")
    assert names[at - 1 : at + 2] == ["sum_slots", "beside", "block_scaled_wgrad"]
    assert names.count("beside") == 1
    assert called("sum_slots") == [{"scale": False, "adds": True, "beside_sms": sms}]
    assert {what["accumulate"] for what in called("block_scaled_wgrad")} == {main_grad}


def test_nothing_runs_beside_a_product_of_copies(monkeypatch):
    """Scales of plain PyTorch are copied, in a launch before the product, which must wait for it."""
    monkeypatch.setattr("fusedmoe.builtin_rules.rows.dispatch.SHORTEST_US", 0.0)
    for disabled, beside in (((), 1), (("sm90.*quantize*",), 0)):
        with fm.disabled(*disabled):
            layer, x = layer_with_a_router()
            assert len(plan_of(layer, x).beside) == 1
            gradients(layer, x)
        assert len(called("beside")) == beside
        assert len(called("block_scaled_wgrad")) == 2


def test_a_dense_layer_is_unfused_and_says_why():
    chain = fm.Sequential(fm.Linear(H, 2 * I, dtype=BF16), fm.SwiGLU(), fm.Linear(I, H, dtype=BF16))
    x = torch.randn(9, H, dtype=BF16, requires_grad=True)
    with fm.recipe("fp8_block"), fm.strict():  # there is no kernel
        chain(x).sum().backward()
    plan = plan_of(chain, x)
    products = {"0.Linear", "2.Linear", "2.LinearWgrad", "2.LinearDgrad", "0.LinearWgrad", "0.LinearDgrad"}
    unfused = {step.ops[0]: step.nearest_miss for step in plan.unfused}
    assert products <= unfused.keys()
    for op in products:
        assert unfused[op].rule.startswith("sm90.linear")
        assert unfused[op].reason.startswith("takes no fp8 e4m3 1")
        assert unfused[op].reason.endswith(" operands")


# ------------------------------------------------------------------------------------------------ other steps unfused


@pytest.mark.parametrize("which", ["sm90.quantize", "sm90.quantize_grad", "sm90.quantize_weight", "sm90.*quantize*"])
def test_scales_of_plain_pytorch_are_copied(which):
    """Their strides are others than those that the kernels read."""
    with fm.disabled(which):
        plan = both_ways(experts(scale=True), rows(hidden=H), **inputs())
    assert {GEMM_ACTIVATION, GEMM, DGRAD_ACTIVATION, WGRAD, DGRAD} <= {*rules_used(plan)}


@pytest.mark.parametrize("which", [GEMM, GEMM_ACTIVATION, DGRAD, DGRAD_ACTIVATION, WGRAD])
def test_each_rule_may_be_switched_off(which):
    with fm.disabled(which):
        plan = both_ways(experts(scale=True), rows(hidden=H), strict=False, **inputs())
    assert which not in rules_used(plan)
    assert len({GEMM, GEMM_ACTIVATION, DGRAD, DGRAD_ACTIVATION, WGRAD} & {*rules_used(plan)}) >= 3


def test_scales_of_both_operands():
    found = []
    good, odd = torch.rand(4, 8).mT[:7], torch.rand(7, 3)
    assert products.has_strides(good)
    run = of_codes(lambda *operands: found.append(operands), Codes("a", good), Codes("b", odd))
    run("a", good, "b", odd, "others")
    (((a, of_a), (b, of_b), others),) = found
    assert (a, b, others) == ("a", "b", "others")
    assert of_a is good
    assert products.has_strides(of_b)
    assert torch.equal(of_b, odd)

    found.clear()
    readable = of_codes(lambda *operands: found.append(operands), Codes("a", good), Codes("b", good))
    readable("a", good, "b", good)
    assert found == [(Codes("a", good), Codes("b", good))]


# ------------------------------------------------------------------------------------------------------ weight cache


def train(chain, x, named, passes=1):
    with fm.recipe("fp8_block"):
        for _ in range(passes):
            chain(x, **named).sum().backward()


@pytest.mark.parametrize("main_grad", [False, True], ids=["", "main_grad"])
def test_weights_are_quantized_once_per_optimizer_step(main_grad):
    chain, x, named = experts(), rows(hidden=H), inputs(scale=False)
    layers = [chain[0], chain[2]]
    for layer in layers:
        layer.accumulate_into_main_grad = main_grad
        if main_grad:
            layer.weight.main_grad = torch.zeros(layer.weight.shape)
    train(chain, x, named, passes=3)  # micro-batches
    assert called("quantize_weight") == [{"rows": True, "columns": True}] * 2
    if main_grad:
        assert [what["accumulate"] for what in called("block_scaled_wgrad")] == [True] * 6
        assert all(layer.weight.main_grad.any() for layer in layers)
        with torch.no_grad():
            for layer in layers:
                layer.weight.sub_(0.1 * layer.weight.main_grad)
    else:
        torch.optim.SGD(chain.parameters(), lr=0.1).step()
    stand_ins.calls.clear()
    train(chain, x, named, passes=2)
    assert called("quantize_weight") == [{"rows": True, "columns": True}] * 2


def test_the_gradients_of_micro_batches_add_up_in_main_grad():
    chain, x, named = experts(), rows(hidden=H), inputs(scale=False)
    layers = [chain[0], chain[2]]
    train(chain, x, named)
    once = [layer.weight.grad.float() for layer in layers]
    for layer in layers:
        layer.accumulate_into_main_grad = True
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    train(chain, x, named, passes=2)
    for layer, want in zip(layers, once, strict=True):
        assert want.any()
        assert (layer.weight.main_grad - 2 * want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_tensor"])
def test_the_gradients_of_micro_batches_add_up_in_grad(recipe, transposed):
    chain, named = experts(), inputs(scale=False)
    weights = {f"{i}.weight": nn.Parameter(chain[i].weight.detach().clone()) for i in (0, 2)}
    if transposed:
        weights = {name: nn.Parameter(w.detach().mT.contiguous()) for name, w in weights.items()}
        chain[0].transposed_grad = chain[2].transposed_grad = True
    chain = chain.without_parameters()
    batches = [rows(hidden=H) for _ in range(3)]

    def loss(x):
        given = {name: w.mT if transposed else w for name, w in weights.items()}
        return chain.forward_with(given, x, **named).float().square().sum()

    with fm.recipe(recipe):
        alone = [torch.autograd.grad(loss(x), list(weights.values())) for x in batches]
        want = [first + second + third for first, second, third in zip(*alone, strict=True)]
        stand_ins.calls.clear()
        for x in batches:
            loss(x).backward()
    adds = not transposed or recipe == "fp8_block"  # no kernel has E5M2 as its second operand
    assert [what["accumulate"] for what in called("block_scaled_wgrad")] == [False] * 2 + [adds] * 4
    for w, total in zip(weights.values(), want, strict=True):
        assert total.any()
        assert torch.equal(w.grad, total)


# ----------------------------------------------------------------------------------------- one scale per expert


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_current_scaling(act, bias):
    """A step of its own quantizes the input of the second layer, in both forms, since its scales follow from it."""
    kind, settings = ACTIVATIONS[act]
    chain = experts(kind, scale=True, bias=bias, **settings)
    plan = both_ways(chain, rows(hidden=H), "fp8_tensor", **inputs())
    assert not plan.unfused
    assert rules(plan)[:4] == ["sm90.quantize", GEMM_ACTIVATION, "sm90.quantize", GEMM]
    assert rules_used(plan, "backward") == (QUANTIZED_AFTER if not bias else rules_used(plan, "backward"))
    assert called("quantize_format")[-2:] == [{"rows": True, "columns": True}] * 2
    assert called("block_scaled_gemm_activation_backward")[0]["want_output"] is False
    assert called("block_scaled_gemm_activation_backward")[0]["codes"] is torch.float8_e5m2
    assert {"dequantize", "quantize_rows"}.isdisjoint(called())


@pytest.mark.parametrize("recipe", [FP8Tensor(hybrid=False), FP8Tensor(power_of_two=True), FP8Tensor(wgrad="bf16")])
def test_formats_with_one_scale_per_expert(recipe):
    plan = both_ways(experts(), rows(hidden=H), recipe, **inputs(scale=False))
    assert not plan.unfused
    gradient = torch.float8_e5m2 if recipe.hybrid else torch.float8_e4m3fn
    assert [call["codes"] for call in called("block_scaled_gemm")] == [torch.float8_e4m3fn, gradient]
    assert (WGRAD in rules(plan)) is (recipe.wgrad == "quantized")


@pytest.mark.parametrize("wgrad", ["quantized", "bf16"])
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_delayed_scaling(scale, wgrad):
    """FC1 writes codes. Histories are those of the unfused chain, up to the rounding of products."""
    recipe = FP8Tensor(delayed=Delayed(2), wgrad=wgrad)
    fused, named = experts(scale=scale), inputs(scale=scale)
    unfused = deepcopy(fused)
    for step in range(3):
        x = (rows(hidden=H).detach() * 2**step).requires_grad_()
        with fm.recipe(recipe):
            with fm.disabled("*"):
                expected = outcome(unfused, x, **named)
            stand_ins.calls.clear()
            with fm.strict():
                got = outcome(fused, x, **named)
        for name, want in expected.items():
            assert want.any(), f"{name}: zeros would pass"
            assert (got[name] - want).norm() < 0.06 * want.norm(), name
        state, wanted = fused.state_dict(), unfused.state_dict()
        assert state.keys() == wanted.keys()
        for name, want in wanted.items():
            assert torch.allclose(state[name], want, rtol=0.02), name
            exact = "amax" not in name or name.startswith("0.amax_history.input") or ".weight." in name
            assert torch.equal(state[name], want) or not exact, name
    assert len(state) == 2 + 2 * 3 * 2
    plan = plan_of(fused, x, recipe, **named)
    assert not plan.unfused
    assert rules(plan)[:3] == ["sm90.quantize", GEMM_ACTIVATION, GEMM]
    launches = {step.rule: step.launches for step in plan.steps}
    assert launches["sm90.quantize"] == launches["sm90.quantize_grad"] == launches["sm90.quantize_weight"] == 3
    assert launches[GEMM_ACTIVATION] == 4
    assert called("block_scaled_gemm_activation")[0]["quantized"] == fp8_tensor()
    assert called().count("transpose_rows") == (wgrad == "quantized")
    assert called().count("update_amax_history") == 6, "rows, weight and gradient of two layers"
    last = "3" if scale else "2"
    assert (f"{last}.input:columns" in plan.kept) is (wgrad == "quantized")


def test_inference_with_delayed_scaling_leaves_the_histories():
    recipe = FP8Tensor(delayed=Delayed(2))
    chain, named = experts(), inputs(scale=False)
    with fm.recipe(recipe):
        outcome(chain, rows(hidden=H), **named)
        before = {name: t.clone() for name, t in chain.state_dict().items()}
        x = rows(hidden=H, requires_grad=False)
        with torch.no_grad():
            with fm.disabled("*"):
                want = chain(x, **named)
            fm.clear_weight_cache(chain)
            stand_ins.calls.clear()
            got = chain(x, **named)
    assert called("block_scaled_gemm_activation")[0]["quantized"] == fp8_tensor()
    assert {"transpose_rows", "update_amax_history"}.isdisjoint(called())
    assert (got - want).norm() < 0.06 * want.norm()
    assert all(torch.equal(t, before[name]) for name, t in chain.state_dict().items())


def test_one_scale_per_expert_has_no_blocks_of_gate_and_up():
    both_ways(experts(width=48), rows(hidden=H), "fp8_tensor", **inputs(scale=False))
    chain = fm.Sequential(fm.GroupedLinear(E, H, 2 * 24, dtype=BF16), fm.SwiGLU())
    plan = plan_of(chain, rows(hidden=H), "fp8_tensor", **inputs(scale=False))
    assert status(plan, GEMM_ACTIVATION) == (Status.CONSTRAINT, "half of out_features 24 is not a multiple of 16")


def test_the_scale_of_an_expert_is_not_known_in_its_epilogue():
    chain, x = experts(), rows(hidden=H)
    plan = plan_of(chain, x, "fp8_tensor", **inputs(scale=False))
    miss = next(s for s in plan.steps if s.ops == ("2:input.Quantize",))
    assert miss.rule == "sm90.quantize"
    with fm.disabled("sm90.quantize"):
        plan = plan_of(chain, x, "fp8_tensor", **inputs(scale=False))
    reason = "the scale of an expert depends on all its rows: expected delayed scaling"
    assert status(plan, GEMM_ACTIVATION, start=0)[1] != reason
    (step,) = [s for s in plan.steps if s.ops == ("2:input.Quantize",)]
    assert step.nearest_miss.reason == reason


def test_delayed_scaling_of_a_result_in_blocks():
    """Of operands with scales per block; only the result has one scale per expert."""
    delayed = Quantizer(fp8_tensor(), delayed=Delayed(2))
    chain = fm.Sequential(
        fm.Quantize(ROWS, weight=WEIGHT), fm.GroupedLinear(E, H, 2 * I, dtype=BF16), fm.SwiGLU(),
        fm.Quantize(delayed, weight=delayed), fm.GroupedLinear(E, I, H, dtype=BF16),
    )  # fmt: skip
    x, named = rows(hidden=H, requires_grad=False), inputs(scale=False)
    with torch.no_grad(), fm.strict():
        chain(x, **named)
        (plan,) = chain.explain(x, **named).plans
    assert rules_used(plan)[-2:] == [GEMM_ACTIVATION, GEMM]
    assert called("block_scaled_gemm_activation")[0]["quantized"] == fp8_tensor()


# ------------------------------------------------------------------------------------------------ must not fuse


def odd(across=1, rule=ScaleRule.RCEIL):
    return Format("odd", E4M3, (across, 128), rule)


OPERANDS = {
    "mxfp8 rows": (
        mxfp8(), WEIGHT, "no kernel multiplies rows in mxfp8 e4m3 1x32 yet: expected blocks of 1x128 values"
    ),
    "rows per row": (
        fp8_row(), WEIGHT, "no kernel multiplies rows in fp8 e4m3 per-row yet: expected blocks of 1x128 values"
    ),
    "e8m0 rows": (odd(), WEIGHT, "no kernel multiplies rows in odd e4m3 1x128 yet: expected fp32 scales"),
    "e5m2 rows": (fp8_block(E5M2), WEIGHT, "{rows} is e5m2: expected e4m3"),
    "1x128 weight": (
        ROWS, ROWS, "no kernel multiplies a weight in fp8 e4m3 1x128 yet: expected blocks of 128x128 values"
    ),
    "e8m0 weight": (
        ROWS, odd(128), "no kernel multiplies a weight in odd e4m3 128x128 yet: expected fp32 scales"
    ),
    "e5m2 weight": (ROWS, fp8_block(E5M2, 128), "{weight} is e5m2: expected e4m3"),
    "rows with a scale per expert": (
        fp8_tensor(), WEIGHT,
        "no kernel multiplies a weight in fp8 e4m3 128x128 yet: expected one scale per expert",
    ),
    "weight with a scale per expert": (
        ROWS, fp8_tensor(),
        "no kernel multiplies a weight in fp8 e4m3 per-tensor yet: expected blocks of 128x128 values",
    ),
    "e5m2 weight with a scale per expert": (fp8_tensor(), fp8_tensor(E5M2), "{weight} is e5m2: expected e4m3"),
    "rows alone": (ROWS, None, "{weight} is not quantized: expected FP8 operands"),
    "weight alone": (None, WEIGHT, "{rows} is not quantized: expected FP8 operands"),
}  # fmt: skip
NAMES = {
    GEMM: {"rows": "input", "weight": "fc.weight"},
    GEMM_ACTIVATION: {"rows": "input", "weight": "fc.weight"},
    DGRAD: {"rows": "grad_output", "weight": "dgrad.weight"},
    DGRAD_ACTIVATION: {"rows": "grad_output", "weight": "dgrad.weight"},
}


@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize("rule", NAMES)
def test_other_operands(rule, which):
    """They are no miss, since no device has a kernel."""
    of_rows, of_weight, reason = OPERANDS[which]
    backward = rule in (DGRAD, DGRAD_ACTIVATION)
    layer = fm.GroupedLinear(E, I if rule == DGRAD_ACTIVATION else H, 2 * I, dtype=BF16)
    quantized = (
        [fm.Quantize(None, weight=of_weight), layer, fm.Quantize(None, backward=of_rows)]
        if backward
        else [fm.Quantize(of_rows, weight=of_weight), layer]
    )
    if rule == DGRAD_ACTIVATION:
        chain, x = fm.Sequential(fm.SwiGLU(), *quantized), rows(hidden=2 * I)
    else:
        chain, x = fm.Sequential(*quantized, *([fm.SwiGLU()] if rule == GEMM_ACTIVATION else [])), rows(hidden=H)
    named = inputs(scale=False)
    if backward and which == "e5m2 rows":  # gradients may be
        assert rule in rules_used(only_plan(chain, x, **named))
        return
    with fm.strict():
        outcome(chain, x, **named)
    found, why = status(only_plan(chain, x, **named), rule)
    assert found is Status.CONSTRAINT
    assert why == reason.format(**NAMES[rule])
    assert not [name for name in called() if name.startswith("block_scaled_gemm")]


@pytest.mark.parametrize(("hidden", "width"), [(40, 128), (64, 24)])
def test_widths_that_are_not_a_multiple_of_16(hidden, width):
    plan = plan_of(experts(fm.SquaredReLU, hidden=hidden, width=width), rows(hidden=hidden), **inputs(scale=False))
    assert not {GEMM, GEMM_ACTIVATION, DGRAD, DGRAD_ACTIVATION, WGRAD} & {*rules_used(plan)}
    first, last = ("in_features", "out_features") if hidden == 40 else ("out_features", "in_features")
    number = 40 if hidden == 40 else 24
    assert status(plan, GEMM_ACTIVATION) == (Status.CONSTRAINT, f"{first} {number} is not a multiple of 16")
    assert status(plan, DGRAD_ACTIVATION) == (Status.CONSTRAINT, f"{last} {number} is not a multiple of 16")
    assert status(plan, GEMM, start=4)[1] == f"{last} {number} is not a multiple of 16"
    with fm.recipe("fp8_block"), fm.strict(), pytest.raises(FusionError, match="is not a multiple of 16"):
        experts(hidden=hidden, width=width)(rows(hidden=hidden), **inputs(scale=False))


def test_half_of_the_features_has_whole_blocks():
    chain, x, named = experts(width=48), rows(hidden=H), inputs(scale=False)
    plan = plan_of(chain, x, **named)
    reason = "half of out_features 48 is not a multiple of 128"
    assert status(plan, GEMM_ACTIVATION) == (Status.CONSTRAINT, reason)
    assert rules(plan) == ["sm90.quantize", GEMM, "sm90.activation", "sm90.quantize", GEMM, *QUANTIZED_AFTER]
    assert f"1.SwiGLU: {GEMM_ACTIVATION}: CONSTRAINT: {reason}" in " ".join(str(plan).split())
    why = {a.reason for a in plan.attempts if a.rule == DGRAD_ACTIVATION}
    assert "in_features 48 is not a multiple of 128" in why
    both_ways(chain, x, **named)
    why = pytest.raises(FusionError, match=f"1.SwiGLU: {GEMM_ACTIVATION}: .*48")
    with fm.recipe("fp8_block"), fm.strict(), fm.disabled("sm90.activation"), why:
        chain(x, **named)
    both_ways(experts(fm.SquaredReLU, width=48), x, **named)  # not gated


def test_interleaved_gate_and_up():
    """The derivative in bf16 takes them, and the kernel of the activation alone."""
    chain, x, named = experts(interleaved=True), rows(hidden=H), inputs(scale=False)
    plan = both_ways(chain, x, **named)
    reason = "interleaved gate and up: expected a weight with the rows [gate | up]"
    assert status(plan, GEMM_ACTIVATION) == (Status.CONSTRAINT, reason)
    assert reason in {a.reason for a in plan.attempts if a.rule == DGRAD_ACTIVATION}
    assert rules(plan) == ["sm90.quantize", GEMM, "sm90.activation", "sm90.quantize", GEMM, *QUANTIZED_AFTER]
    assert reason in " ".join(str(plan).split())


def test_a_lower_bound_on_amax():
    """The result is then quantized by a step of its own."""
    recipe = FP8Block(amax_epsilon=1e-3)
    chain, x, named = experts(), rows(hidden=H), inputs(scale=False)
    plan = both_ways(chain, x, recipe, strict=False, **named)
    assert rules(plan)[:4] == ["sm90.quantize", GEMM_ACTIVATION, "sm90.quantize", GEMM]
    (reason,) = {a.reason for a in plan.attempts if a.rule == GEMM_ACTIVATION and a.status is Status.CONSTRAINT}
    assert reason == "amax_epsilon 0.001: the epilogue has no lower bound on amax"
    assert called("block_scaled_gemm_activation")[0]["quantized"] is None
    assert reason in {a.reason for a in plan.attempts if a.rule == DGRAD_ACTIVATION}
    assert rules_used(plan, "backward") == QUANTIZED_AFTER


@pytest.mark.parametrize(("gradient", "reason"), [
    (mxfp8(), "no kernel quantizes to mxfp8 e4m3 1x32 yet: expected blocks of 1x128 values"),
    (odd(), "no kernel quantizes to odd e4m3 1x128 yet: expected fp32 scales"),
    (Quantizer(ROWS, hadamard=True), "the gradient of the preactivation is rotated: expected hadamard=False"),
])  # fmt: skip
def test_other_formats_of_the_gradient(gradient, reason):
    """The derivative is fused all the same; the gradient is quantized by another step."""
    chain = fm.Sequential(
        fm.Quantize(None, backward=gradient), fm.SwiGLU(), fm.Quantize(ROWS, weight=WEIGHT),
        fm.GroupedLinear(E, I, H, dtype=BF16), fm.Quantize(None, backward=ROWS),
    )  # fmt: skip
    x, named = rows(hidden=2 * I), inputs(scale=False)
    plan = only_plan(chain, x, **named)
    assert DGRAD_ACTIVATION in rules_used(plan)
    assert reason in {a.reason for a in plan.attempts if a.rule == DGRAD_ACTIVATION}
    outcome(chain, x, **named)
    assert called("block_scaled_gemm_activation_backward")
    assert not called(IN_CODES)


@pytest.mark.parametrize(("recomputed", "reason"), [
    (fp8_block(E5M2), "dgrad.input:columns is e5m2: expected e4m3"),
    (fp8_block(power_of_two=False), "dgrad.input:columns has scales of any size: the epilogue has powers of two"),
])  # fmt: skip
def test_other_formats_of_the_recomputed_input_in_codes(recomputed, reason):
    """Another launch quantizes the input of the last layer by columns."""
    chain = fm.Sequential(
        fm.Quantize(None, backward=ROWS), fm.SwiGLU(), fm.Quantize(recomputed, weight=WEIGHT),
        fm.GroupedLinear(E, I, H, dtype=BF16), fm.Quantize(None, backward=ROWS),
    )  # fmt: skip
    plan = only_plan(chain, rows(hidden=2 * I), **inputs(scale=False))
    assert reason in {a.reason for a in plan.attempts if a.rule == DGRAD_ACTIVATION}
    assert QUANTIZED_AFTER[2] in rules_used(plan)
    assert rules_used(plan, "backward").count("sm90.quantize_grad") == 2


@pytest.mark.parametrize(("format", "reason"), [
    (mxfp8(), "no kernel quantizes to mxfp8 e4m3 1x32 yet: expected blocks of 1x128 values"),
    (odd(), "no kernel quantizes to odd e4m3 1x128 yet: expected fp32 scales"),
])  # fmt: skip
def test_other_formats_of_the_result(format, reason):
    """The product and the activation are fused all the same; the result is quantized by another step."""
    chain = fm.Sequential(
        fm.Quantize(ROWS, weight=WEIGHT), fm.GroupedLinear(E, H, 2 * I, dtype=BF16), fm.SwiGLU(), fm.Quantize(format)
    )
    x, named = rows(hidden=H), inputs(scale=False)
    plan = only_plan(chain, x, **named)
    assert GEMM_ACTIVATION in rules_used(plan)
    assert reason in {a.reason for a in plan.attempts if a.rule == GEMM_ACTIVATION}
    outcome(chain, x, **named)
    assert called("block_scaled_gemm_activation")[0]["quantized"] is None


def test_other_formats_of_the_recomputed_input():
    """The input of the last layer, by columns."""
    chain = fm.Sequential(
        fm.SwiGLU(), fm.Quantize(mxfp8(), weight=WEIGHT), fm.GroupedLinear(E, I, H, dtype=BF16),
        fm.Quantize(None, backward=ROWS),
    )  # fmt: skip
    plan = only_plan(chain, rows(hidden=2 * I), **inputs(scale=False))
    reason = "no kernel quantizes to mxfp8 e4m3 1x32 yet: expected blocks of 1x128 values"
    assert status(plan, DGRAD_ACTIVATION) == (Status.CONSTRAINT, reason)
    assert DGRAD in rules_used(plan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype):
    chain, x, named = experts(bias=True, dtype=dtype), rows(dtype=dtype, hidden=H), inputs(scale=False)
    plan = plan_of(chain, x, **named)
    for rule, operand in ((GEMM, "input"), (GEMM_ACTIVATION, "input"), (DGRAD, "grad_output")):
        reason = f"{operand} is {dtype}: products of FP8 operands are bfloat16".replace("torch.", "")
        assert status(plan, rule) == (Status.CONSTRAINT, reason)
    assert status(plan, DGRAD_ACTIVATION)[1].startswith("grad_output is float")
    assert {GEMM, GEMM_ACTIVATION, DGRAD, DGRAD_ACTIVATION}.isdisjoint(rules_used(plan))
    outcome(chain, x, **named)


def test_a_row_scale_of_fp64():
    chain, x, named = experts(scale=True), rows(hidden=H), inputs(dtype=torch.float64)
    plan = both_ways(chain, x, strict=False, **named)
    reason = "the row scale is float64, not float32, bfloat16 or float16: convert it"
    assert reason in {a.reason for a in plan.attempts if a.rule == GEMM_ACTIVATION}
    assert status(plan, DGRAD_ACTIVATION) == (Status.CONSTRAINT, reason)
    after = fm.Sequential(fm.GroupedLinear(E, H, I, dtype=BF16), fm.Scale("probs"))
    frozen = inputs(dtype=torch.float64, requires_grad=False)
    plan = plan_of(after, x, **frozen)
    assert reason in {a.reason for a in plan.attempts if a.rule == GEMM}
    assert GEMM in rules_used(plan)


@pytest.mark.parametrize("first", [True, False], ids=["before an activation", "last"])
def test_a_bias_that_is_not_contiguous(first):
    chain, x, named = experts(bias=True), rows(hidden=H), inputs(scale=False)
    layer = chain[0] if first else chain[2]
    layer.bias = torch.nn.Parameter(layer.bias.detach().mT.contiguous().mT)
    both_ways(chain, x, strict=False, **named)
    with fm.recipe("fp8_block"), fm.strict(), pytest.raises(FusionError, match="the bias is not contiguous"):
        chain(x, **named)


def test_codes_that_tma_cannot_read():
    good = torch.zeros(8, 64, dtype=torch.uint8)
    guard_codes(good, good[None])
    around = torch.zeros(8, 72, dtype=torch.uint8)
    for codes in (around[:, :64], around.flatten()[8 : 8 + 512].view(8, 64), good.mT, good[:1].expand(8, 64)):
        with pytest.raises(Declined, match=r"codes have strides \(.*\): expected rows of a multiple of 16 bytes"):
            guard_codes(good, codes)
    with pytest.raises(NothingToDo, match="no rows"):
        guard_codes(good[:0], good)


def test_no_rows():
    chain, x = experts(), torch.empty(0, H, dtype=BF16, requires_grad=True)
    with fm.recipe("fp8_block"), fm.strict():
        chain(x, splits=torch.zeros(E, dtype=torch.int64)).sum().backward()
    assert not [name for name in called() if name.startswith("block_scaled")]


def test_a_hadamard_rotation_of_columns():
    """Products by rows do not rotate. No kernel recomputes rotated columns."""
    rotated = Quantizer(ROWS, hadamard=True)
    chain = fm.Sequential(
        fm.SwiGLU(), fm.Quantize(rotated, weight=WEIGHT), fm.GroupedLinear(E, I, H, dtype=BF16),
        fm.Quantize(None, backward=rotated),
    )  # fmt: skip
    x, named = rows(hidden=2 * I), inputs(scale=False)
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    fm.clear_weight_cache(chain)
    with fm.strict():
        got = outcome(chain, x, **named)
    for name, want in expected.items():
        assert want.any()
        assert (got[name].double() - want.double()).norm() < 0.06 * want.double().norm(), name
    plan = only_plan(chain, x, **named)
    assert status(plan, DGRAD_ACTIVATION) == (
        Status.CONSTRAINT, "dgrad.input:columns is rotated: expected hadamard=False",
    )  # fmt: skip
    assert GEMM in rules_used(plan)


def test_other_architectures():
    x, named = rows(hidden=H), inputs(scale=False)
    with fm.recipe("fp8_block"):
        (plan,) = experts().explain(x, arch=100, **named).plans
    assert {step.rule for step in plan.fused} == {"sm100.activation", "sm100.dactivation"}
    for rule in (GEMM, GEMM_ACTIVATION, DGRAD, DGRAD_ACTIVATION, WGRAD):
        assert status(plan, rule) == (
            Status.UNAVAILABLE, "needs an sm_90 GPU, this one is sm_100",
        )  # fmt: skip
