"""Products for sm_90 under stand-ins: plans, launches, and results and gradients against the unfused chain."""

import functools
import logging
import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from kit.compare import assert_bitwise, label, pairwise
from kit.sm90_machine import (
    BF16,
    CLAMPED,
    FP8_DGRAD,
    FP8_DGRAD_ACTIVATION,
    FP8_GEMM,
    FP8_GEMM_ACTIVATION,
    FP8_WGRAD,
    ROWS,
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
    routed,
    rows,
    strided,
)
from kit.sm90_stand_ins import calls, install
from kit.toy import only_plan, outcome, rules_used
from torch import nn

import fusedmoe as fm
from fusedmoe.builtin_rules.rows.dispatch import bind_sum
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.sm90 import one_group
from fusedmoe.numerics.formats import E4M3, E5M2, Delayed, fp8_block, fp8_tensor
from fusedmoe.numerics.recipes import FP8Block, FP8Tensor

pytestmark = pytest.mark.usefixtures("hopper_machine")

FP16 = torch.float16
GEMM, GEMM_ACTIVATION = "sm90.grouped_gemm", "sm90.grouped_gemm_activation"
DGRAD, DGRAD_ACTIVATION, WGRAD = "sm90.grouped_dgrad", "sm90.grouped_dgrad_activation", "sm90.grouped_wgrad"
QUANTIZE, QUANTIZE_GRAD = "sm90.quantize", "sm90.quantize_grad"
IN_BF16, IN_CODES = "block_scaled_gemm_activation_backward", "block_scaled_gemm_activation_backward_codes"
DELAYED = FP8Tensor(delayed=Delayed(2))


def rules(plan, direction=None):
    """The rules of all steps, without those of weights; None for plain PyTorch."""
    steps = [step for step in plan.steps if direction in (None, step.direction)]
    return [step.rule for step in steps if not step.ops[0].endswith("weight.Quantize")]


# -------------------------------------------------------------------------------------- what fuses is the same function


def swiglu(**settings):
    return functools.partial(fm.SwiGLU, **settings)


ACTIVATIONS = {
    "swiglu": fm.SwiGLU,
    "clamped": swiglu(**CLAMPED),
    "geglu": fm.GeGLU,
    "geglu erf": functools.partial(fm.GeGLU, "none"),
    "reglu": fm.ReGLU,  # no limit: a rounding of the preactivation near it switches gradients on and off
    "squared relu": fm.SquaredReLU,
    "interleaved": swiglu(interleaved=True),
    "gpt-oss": swiglu(**CLAMPED, interleaved=True),
}
RECIPES = ("bf16", "fp8_block", "fp8_block:wgrad=bf16", "fp8_tensor")
CASES = pairwise(list(ACTIVATIONS)[:-2], (False, True), (False, True), RECIPES)
CASES += [("interleaved", True, False, "bf16"), ("gpt-oss", False, True, "bf16")]


@pytest.mark.parametrize("case", CASES, ids=label)
def test_experts(case):
    act, scale, bias, recipe = case
    plan = both_ways(experts(ACTIVATIONS[act](), scale=scale, bias=bias), None, recipe)
    assert not plan.unfused
    sums = ["sm90.column_sums"] * bias
    if recipe == "bf16":
        wanted = [GEMM_ACTIVATION, GEMM, *sums, WGRAD, DGRAD_ACTIVATION, *sums, WGRAD, DGRAD]
        launched = {"block_scaled_gemm", "quantize_rows"}
    else:
        # scales of experts follow from all rows; the gradient of a bias sums what was not quantized
        again = [QUANTIZE] * (recipe == "fp8_tensor")
        grad = [QUANTIZE_GRAD] * (recipe != "fp8_block" or bias)
        wgrad = WGRAD if recipe.endswith("bf16") else FP8_WGRAD
        wanted = [
            QUANTIZE, FP8_GEMM_ACTIVATION, *again, FP8_GEMM, QUANTIZE_GRAD, *sums, wgrad, FP8_DGRAD_ACTIVATION, *grad,
            *sums, wgrad, FP8_DGRAD,
        ]  # fmt: skip
        launched = {"grouped_gemm", "dequantize"} | ({"quantize_format"} if recipe != "fp8_tensor" else set())
    assert rules(plan) == wanted
    assert launched.isdisjoint(called())
    assert recipe != "bf16" or {*plan.kept} == {"0.input", "1.input", "offsets"} | ({"probs"} if scale else set())


@pytest.mark.parametrize(
    "case", pairwise(list(ACTIVATIONS), (False, True), ((15,), (1,), (3, 5), (2, 1, 4))), ids=label
)
def test_dense_layers(case):
    act, bias, shape = case
    plan = both_ways(dense(ACTIVATIONS[act](), bias=bias), torch.randn(*shape, H, dtype=BF16, requires_grad=True))
    assert not plan.unfused
    sums = ["sm90.linear_column_sums"] * bias
    backward = [*sums, "sm90.linear_wgrad", "sm90.linear_dgrad_activation", *sums, "sm90.linear_wgrad"]
    assert rules(plan) == ["sm90.linear_activation", "sm90.linear", *backward, "sm90.linear_dgrad"]
    assert {*plan.kept} == {"0.input", "1.input"}


def moe(**settings):
    return fm.MoE(H, I, E, K, dtype=BF16, **settings)


ROUTED = ["sm90.router_dispatch", "sm90.gathered_quantize", FP8_GEMM_ACTIVATION, FP8_GEMM, "sm90.combine"]
GRADIENTS = ["sm90.gathered_quantize_grad", FP8_WGRAD, FP8_DGRAD_ACTIVATION, QUANTIZE_GRAD, FP8_WGRAD, FP8_DGRAD]
WITHOUT = [*GRADIENTS[:3], *GRADIENTS[4:]]  # the epilogue writes codes
IN_16_BITS = [*GRADIENTS]
IN_16_BITS[1], IN_16_BITS[4] = "sm90.gathered_wgrad_dy", "sm90.gathered_wgrad_x"
LAYERS = [  # whole layers of models: tokens are quantized through the index of their rows
    ("fp8_block", [*ROUTED, *WITHOUT]),
    ("fp8_block:wgrad=bf16", [*ROUTED, *IN_16_BITS]),
    (FP8Tensor(), [*ROUTED[:3], QUANTIZE, *ROUTED[3:], *GRADIENTS]),
    (DELAYED, [*ROUTED, *GRADIENTS]),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "wanted"), LAYERS, ids=[str(row[0])[:40] for row in LAYERS])
def test_a_layer_of_a_model_in_fp8(recipe, wanted):
    layer, x = moe(), torch.randn(T, H, dtype=BF16, requires_grad=True)
    with fm.recipe(recipe):
        (plan,) = fm.explain(layer, tokens=T, arch=90).plans
        with fm.strict():
            layer(x).sum().backward()
    assert not plan.unfused
    assert rules(plan) == [*wanted, "sm90.router_backward"]


def keeps_bf16():
    chain = experts(bias=True)
    chain[0].recipe = chain[2].recipe = "bf16"
    return chain


def by_columns(chain):
    """Weights [E, in, out] in memory, as Llama-4 stores them: either of the last two axes may have unit stride."""
    for layer in (chain[0], chain[-1]):
        layer.weight = nn.Parameter(strided(layer.weight.detach(), "columns"))
    return chain


OTHERS = {
    "fp16": (lambda: experts(scale=True, dtype=FP16), "bf16"),
    "a layer alone": (lambda: fm.Sequential(fm.GroupedLinear(E, H, I, bias=True, dtype=BF16)), "bf16"),
    "a layer alone in FP8": (lambda: fm.Sequential(fm.GroupedLinear(E, H, 48, bias=True, dtype=BF16)), "fp8_block"),
    "layers that keep bf16": (keeps_bf16, "mxfp8"),
    "weights by columns": (lambda: by_columns(experts(scale=True)), "bf16"),
    "dense weights by columns": (lambda: by_columns(dense()), "bf16"),
    "no blocks of gate and up": (lambda: experts(width=48), "fp8_tensor"),
    "e4m3 gradients": (experts, FP8Tensor(hybrid=False)),
    "powers of two": (experts, FP8Tensor(power_of_two=True)),
}  # fmt: skip


@pytest.mark.parametrize(("make", "recipe"), OTHERS.values(), ids=OTHERS)
def test_other_chains(make, recipe):
    assert not both_ways(make(), None, recipe).unfused


@pytest.mark.parametrize("view", [lambda t: t[:, :, :H].transpose(0, 1), lambda t: t[:, ::2, :H]])
def test_rows_of_a_dense_layer_with_strides(view):
    chain, x = dense(), view(torch.randn(3, 10, H + 8, dtype=BF16))
    with fm.strict(), torch.no_grad():
        y = chain(x)
    with fm.disabled("*"), torch.no_grad():
        assert_close({"y": y}, {"y": chain(x)})
    assert "grouped_gemm" in called()


EXPANDED, BY_COLUMNS = (lambda y: torch.ones(y.shape[-1], dtype=y.dtype).expand(y.shape)), (
    lambda y: torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.mT.shape).mT
)  # fmt: skip


@pytest.mark.parametrize("gradient", [EXPANDED, BY_COLUMNS], ids=["expanded", "by columns"])
@pytest.mark.parametrize(("make", "recipe"), [(experts, "fp8_block"), (routed, "bf16"),
                                              (functools.partial(dense, bias=True), "bf16"),
                                              (functools.partial(experts, bias=True), "bf16")])  # fmt: skip
def test_gradients_that_kernels_cannot_read_are_copied(make, recipe, gradient):
    chain = make()
    x, named = operands(chain)
    found = []
    for disabled in ("none", "*"):
        with fm.recipe(recipe), fm.disabled(disabled), fm.strict():
            fm.clear_weight_cache(chain)
            y = chain(x, **named)
            grads = torch.autograd.grad(y, [x, *chain.parameters()], gradient(y))
            found.append(dict(enumerate(grads)))
    assert_close(*found, 0.015 if recipe == "bf16" else 0.06)
    assert any("wgrad" in name for name in called())


IN_A_CHAIN = {
    "before the experts": lambda: (fm.Linear(H, H, dtype=BF16), fm.GroupedLinear(E, H, H, dtype=BF16)),
    "after them": lambda: (fm.GroupedLinear(E, H, H, dtype=BF16), fm.Linear(H, H, dtype=BF16)),
    "a whole MLP after them": lambda: (fm.GroupedLinear(E, H, H, dtype=BF16), *dense(bias=True)),
}


@pytest.mark.parametrize("ops", IN_A_CHAIN.values(), ids=IN_A_CHAIN)
def test_rows_of_no_expert_count_in_no_gradient_of_a_dense_layer(ops):
    chain, x, upstream = fm.Sequential(*ops()), rows(requires_grad=False), torch.randn(ROWS, H, dtype=BF16)

    def results(poison):
        leaf, dy = x.clone(), upstream.clone()
        leaf[sum(SPLITS) :] = dy[sum(SPLITS) :] = poison
        leaf.requires_grad_()
        y = chain(leaf, splits=torch.tensor(SPLITS))
        return dict(enumerate([y.detach(), *torch.autograd.grad(y, [leaf, *chain.parameters()], dy)]))

    with fm.disabled("*"):
        expected = results(torch.nan)
    with fm.strict():
        got = results(torch.nan)
        assert all(torch.equal(got[name], t) for name, t in results(torch.inf).items())
    assert_close(got, expected)


@pytest.mark.parametrize(("make", "recipe", "shape"), [
    (experts, "bf16", (0,)), (lambda: experts(bias=True), "fp8_block", (0,)), (dense, "bf16", (2, 0)),
    (lambda: fm.Sequential(fm.SwiGLU()), "bf16", (0,)),
])  # fmt: skip
def test_no_rows_are_neither_a_fallback_nor_a_miss(make, recipe, shape, caplog):
    chain, x = make(), torch.empty(*shape, H, dtype=BF16, requires_grad=True)
    named = {"splits": torch.zeros(E, dtype=torch.int64)} if chain.runtime_inputs else {}
    with fm.recipe(recipe), fm.strict():
        y = chain(x, **named)
        y.sum().backward()
    assert y.shape == (*shape, getattr(chain[-1], "out_features", H // 2))
    assert not any(p.grad.any() for p in chain.parameters())
    assert {*called()} <= {"offsets_from_splits", "quantize_weight"}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# ---------------------------------------------------------------------------------- what runs, what is written and kept


BOTH, LINES, COLUMNS = ({"rows": True, "columns": True}, {"rows": True, "columns": False},
                        {"rows": False, "columns": True})  # fmt: skip


def test_the_forms_that_are_written_and_kept():
    """The layer's input by columns is recomputed: neither it nor its codes by rows are kept."""
    plan = both_ways(experts(scale=True), None, "fp8_block")
    (activation,), (derivative,) = called("block_scaled_gemm_activation"), called(IN_CODES)
    assert (activation["keep"], activation["quantized"]) == (True, fp8_block())
    assert called("quantize_rows") == [BOTH, BOTH]  # the rows and the gradient of the output
    assert (derivative["forms"], derivative["want_row_scale_grad"]) == ((True, True, True), True)
    assert {*plan.kept} == {"offsets", "1.input", "probs", "0.input:columns"}
    (step,) = [step for step in plan.steps if step.rule == FP8_DGRAD_ACTIVATION]
    assert step.ops == ("3.Dgrad", "2.ScaleGrad", "2.DScale", "1.DSwiGLU", "0:grad.QuantizeGrad")
    assert step.launches == 2  # one sums the gradient of the scale


@pytest.mark.parametrize("frozen", [(0,), (2,), ("x",), (0, 2)], ids=str)
def test_no_form_is_written_for_a_gradient_that_is_not_required(frozen):
    chain = experts()
    for at in {0, 2} & {*frozen}:
        chain[at].weight.requires_grad_(False)
    plan = both_ways(chain, rows(requires_grad="x" not in frozen), "fp8_block", splits=torch.tensor(SPLITS))
    (derivative,) = called(IN_CODES)
    assert derivative["forms"] == ("x" not in frozen, 0 not in frozen, 2 not in frozen)
    assert rules(plan, "backward").count(FP8_WGRAD) == 2 - len({0, 2} & {*frozen})
    assert len(called("quantize_rows")) == 2


def test_the_forms_that_weight_and_bias_gradients_read():
    """A step of its own quantizes for scales of experts, for the gradient of a bias, and for other weight gradients."""
    both_ways(experts(bias=True), None, "fp8_block")
    assert called("quantize_rows")[-2:] == [COLUMNS, BOTH]
    assert not called(IN_CODES)
    plan = both_ways(experts(scale=True), None, "fp8_block:wgrad=bf16")
    assert called("quantize_rows") == [LINES] * 3
    assert not any(value.endswith(":columns") for value in plan.kept)
    both_ways(experts(scale=True), None, "fp8_tensor")
    assert called("quantize_format")[-2:] == [BOTH] * 2
    (derivative,) = called(IN_BF16)
    assert (derivative["want_output"], derivative["codes"]) == (False, torch.float8_e5m2)


@pytest.mark.parametrize(("make", "recipe"), [(dense, "bf16"), (experts, "fp8_block")])
def test_without_gradients_nothing_is_kept(make, recipe):
    chain = make()
    x, named = operands(chain, frozen=("x",))
    with torch.inference_mode():
        plan = both_ways(chain, x, recipe, **named)
    assert plan.kept == ()
    if recipe == "bf16":
        (activation,) = called("grouped_gemm_activation")
        assert activation == {
            "options": KernelOptions(zero_tail=False),
            "keep_preactivation": False,
            "row_scale": False,
        }
    else:
        (activation,) = called("block_scaled_gemm_activation")
        assert (activation["keep"], activation["quantized"]) == (False, fp8_block())
        assert called("quantize_rows") == [LINES]
        assert called("quantize_weight") == [LINES] * 2


BIASES, WEIGHTS = ("0.bias", "3.bias"), ("0.weight", "3.weight")
FROZEN = [
    ("x",), ("0.weight",), ("3.weight",), BIASES, ("probs",), (*WEIGHTS, *BIASES, "probs"), ("x", *WEIGHTS, *BIASES),
]  # fmt: skip


@pytest.mark.parametrize("frozen", FROZEN, ids=str)
def test_only_what_is_wanted_is_computed(frozen):
    chain, scale_alone = experts(scale=True, bias=True), len(frozen) == 5 and "probs" not in frozen
    for name, parameter in chain.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x, named = operands(chain, frozen=frozen)
    plan = both_ways(chain, x, strict=not scale_alone, **named)
    assert len(called("grouped_wgrad")) == 2 - sum(n.endswith("weight") for n in frozen)
    assert len(called("column_sums")) == 2 - sum(n.endswith("bias") for n in frozen)
    derivatives = called("grouped_gemm_activation_backward")
    for call in derivatives:
        assert call["want_output"] == ("3.weight" not in frozen)
        assert call["want_row_scale_grad"] == ("probs" not in frozen)
    if scale_alone:  # no derivative recomputes what the gradient of the scale reads: it has to be written
        assert [s.ops for s in plan.unfused] == [("2.Scale",), ("2.ScaleGrad",)]
        assert rules_used(plan) == [GEMM_ACTIVATION, GEMM, DGRAD]
    else:
        assert not plan.unfused
        assert len(derivatives) == 1


def options_called():
    """The options of the calls, except for `zero_tail`, which depends on the step."""
    return [replace(what["options"], zero_tail=True) for _, what in calls if "options" in what]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_options_reach_every_kernel_and_backward_has_those_of_its_forward(recipe):
    chain = experts(scale=True, options={"sm_margin": 8, "schedule": "static"})
    x, named = operands(chain)
    with fm.recipe(recipe):
        y = chain(x, **named)
        chain.sm_margin = 0
        y.sum().backward()
        assert options_called() == [KernelOptions(8, "static")] * 6
        calls.clear()
        chain(x, **named).sum().backward()
    assert {*options_called()} == {KernelOptions(0, "static")}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16], ids=str)
def test_the_scale_its_gradient_and_the_bias_take_launches(dtype, recipe):
    """A scale that is not fp32 is converted, and its gradient converted back."""
    chain, converted = experts(scale=True, bias=True), int(dtype is not torch.float32)
    x, named = operands(chain, probs=dtype)
    with fm.disabled("sm90.dactivation"):  # which converts none: with few rows, launches cost the most
        plan = both_ways(chain, x, recipe, **named)
        with fm.recipe(recipe):
            y = chain(x, **named)
    launches = {step.rule: step.launches for step in plan.steps}
    fp8 = recipe != "bf16"
    assert launches[FP8_GEMM_ACTIVATION if fp8 else GEMM_ACTIVATION] == 1 + converted
    assert launches[FP8_DGRAD_ACTIVATION if fp8 else DGRAD_ACTIVATION] == 2 + 2 * converted
    assert launches["sm90.column_sums"] == 2
    assert {launches[rule] for rule in launches if rule.endswith(("gemm", "wgrad", "dgrad"))} == {1}
    with torch.no_grad():
        grads = y.grad_fn.apply(torch.ones_like(y))
    (of_scale,) = [t for t in grads if t is not None and t.shape == (ROWS,)]
    assert of_scale.dtype is dtype, "before autograd converts it"


# -------------------------------------------------------------------------------------------- FP8: plans of other steps

AFTER = [QUANTIZE_GRAD, FP8_WGRAD, FP8_DGRAD_ACTIVATION, QUANTIZE_GRAD, FP8_WGRAD, FP8_DGRAD]


@pytest.mark.parametrize(("power_of_two", "hybrid"), [(False, False), (True, True), (True, False)])
def test_formats_of_the_recipe(power_of_two, hybrid):
    plan = both_ways(experts(), None, FP8Block(hybrid=hybrid, power_of_two=power_of_two))
    gradient = torch.float8_e5m2 if hybrid else torch.float8_e4m3fn
    assert [call["codes"] for call in called("block_scaled_gemm")] == [torch.float8_e4m3fn, gradient]
    (derivative,) = called(IN_CODES if power_of_two else IN_BF16)
    if power_of_two:
        assert derivative["quantized"] == fp8_block(E5M2 if hybrid else E4M3)
    else:
        assert rules(plan, "backward") == AFTER
    assert derivative["codes"] is gradient
    assert called("block_scaled_gemm_activation")[0]["quantized"] == fp8_block(power_of_two=power_of_two)


@pytest.mark.parametrize("dtype", [FP16, torch.float32], ids=str)
def test_a_weight_gradient_has_the_dtype_of_the_gradient(dtype):
    """Of codes and scales: bit for bit that of plain PyTorch, also for experts with more rows than a block."""
    chain, splits = fm.Sequential(fm.GroupedLinear(E, H, 48, dtype=dtype)), torch.tensor([130, 0, 5, 1])
    x = torch.randn(139, H, dtype=dtype, requires_grad=True)
    plan = both_ways(chain, x, "fp8_block", strict=False, bound=1e-5, splits=splits)
    assert [s.launches for s in plan.steps if s.rule == FP8_WGRAD] == [1]
    assert [what["dtype"] for what in called("block_scaled_wgrad")] == [dtype]


@pytest.mark.parametrize("which", [QUANTIZE, QUANTIZE_GRAD, "sm90.quantize_weight", "sm90.*quantize*", FP8_GEMM,
                                   FP8_GEMM_ACTIVATION, FP8_DGRAD, FP8_DGRAD_ACTIVATION, FP8_WGRAD])  # fmt: skip
def test_each_rule_may_be_switched_off(which):
    """Scales of plain PyTorch, whose strides the kernels cannot read, are copied."""
    with fm.disabled(which):
        plan = both_ways(experts(scale=True), None, "fp8_block", strict="quantize" in which)
    others = {FP8_GEMM, FP8_GEMM_ACTIVATION, FP8_DGRAD, FP8_DGRAD_ACTIVATION, FP8_WGRAD} - {which}
    assert which not in rules_used(plan)
    assert len(others & {*rules_used(plan)}) >= (5 if "quantize" in which else 3)


@pytest.mark.parametrize(("scale", "wgrad"), [(True, "quantized"), (False, "bf16")])
def test_delayed_scaling(scale, wgrad):
    """FC1 writes codes. Histories are those of the unfused chain, up to the rounding of products."""
    recipe = FP8Tensor(delayed=Delayed(2), wgrad=wgrad)
    fused = experts(scale=scale)
    unfused, (_, named) = deepcopy(fused), operands(fused)
    for step in range(3):
        x = (rows(requires_grad=False) * 2**step).requires_grad_()
        with fm.recipe(recipe):
            with fm.disabled("*"):
                expected = outcome(unfused, x, **named)
            calls.clear()
            with fm.strict():
                assert_close(outcome(fused, x, **named), expected, 0.06)
        state, wanted = fused.state_dict(), unfused.state_dict()
        assert state.keys() == wanted.keys()
        for name, want in wanted.items():
            assert torch.allclose(state[name], want, rtol=0.02), name
            exact = "amax" not in name or name.startswith("0.amax_history.input") or ".weight." in name
            assert torch.equal(state[name], want) or not exact, name
    assert len(state) == 2 + 2 * 3 * 2
    plan = plan_of(fused, x, recipe, **named)
    assert not plan.unfused
    assert rules(plan)[:3] == [QUANTIZE, FP8_GEMM_ACTIVATION, FP8_GEMM]
    launches = {step.rule: step.launches for step in plan.steps}
    assert launches[QUANTIZE] == launches[QUANTIZE_GRAD] == launches["sm90.quantize_weight"] == 3
    assert launches[FP8_GEMM_ACTIVATION] == 4
    assert called("block_scaled_gemm_activation")[0]["quantized"] == fp8_tensor()
    assert called().count("transpose_rows") == (wgrad == "quantized")
    assert called().count("update_amax_history") == 6, "rows, weight and gradient of two layers"
    assert (f"{3 if scale else 2}.input:columns" in plan.kept) is (wgrad == "quantized")


def test_inference_with_delayed_scaling_leaves_the_histories():
    chain, (x, named) = experts(), operands(experts())
    with fm.recipe(DELAYED):
        outcome(chain, x, **named)
        before = {name: t.clone() for name, t in chain.state_dict().items()}
        with torch.no_grad():
            both_ways(chain, rows(requires_grad=False), DELAYED, **named)
    assert called("block_scaled_gemm_activation")[0]["quantized"] == fp8_tensor()
    assert {"transpose_rows", "update_amax_history"}.isdisjoint(called())
    assert all(torch.equal(t, before[name]) for name, t in chain.state_dict().items())


# ----------------------------------------------------------------------------------------------------- beside a product


def wide_layer(main_grad=False):
    """Its products take long enough that a sum over slots can run beside them."""
    torch.manual_seed(0)
    settings = {"dtype": BF16, "accumulate_into_main_grad": main_grad}
    layer = fm.Sequential(
        fm.Router(H, 8, 3, dtype=BF16), fm.Dispatch(), fm.GroupedLinear(8, H, 1024, **settings), fm.SwiGLU(),
        fm.Scale("probs"), fm.GroupedLinear(8, 512, H, **settings), fm.Combine(None),
    )  # fmt: skip
    if main_grad:
        for weight in (layer[2].weight, layer[5].weight):
            weight.main_grad = torch.zeros(weight.shape)
    return layer, torch.randn(37, H, dtype=BF16, requires_grad=True)


def gradients(layer, x, recipe, dy=None):
    """Those of the input and the weights; only the calls of backward are recorded."""
    with fm.recipe(recipe):
        y = layer(x)
    calls.clear()
    y.backward(torch.ones_like(y) if dy is None else dy)
    return [x.grad, *(getattr(p, "main_grad", p.grad) for p in layer.parameters())]


@pytest.mark.parametrize(("recipe", "main_grad"), [("bf16", False), ("fp8_block", False), ("fp8_block", True)])
def test_the_sum_over_slots_runs_beside_a_weight_gradient(recipe, main_grad, monkeypatch):
    """The results are those of one step after the other."""
    layer, x = wide_layer(main_grad)
    assert not plan_of(layer, x, recipe).beside  # it is short
    want = gradients(layer, x, recipe)
    monkeypatch.setattr("fusedmoe.builtin_rules.rows.dispatch.SHORTEST_US", 0.0)
    layer, x = wide_layer(main_grad)
    torch.use_deterministic_algorithms(True)  # torch then fills new tensors, in launches between the two steps
    try:
        assert not plan_of(layer, x, recipe).beside
    finally:
        torch.use_deterministic_algorithms(False)
    ((light, carrier, sms),) = plan_of(layer, x, recipe).beside
    assert (light, carrier) == ("sm90.router_backward", FP8_WGRAD if recipe != "bf16" else "sm90.gathered_wgrad_x")
    assert 16 <= sms <= 56
    assert_bitwise(gradients(layer, x, recipe), want)
    names = called()
    at = names.index("beside")
    assert (names[at - 1], names.count("beside")) == ("sum_slots", 1)
    assert "wgrad" in names[at + 1]
    assert called("sum_slots") == [{"scale": False, "adds": True, "beside_sms": sms}]
    assert {what["accumulate"] for name, what in calls if "accumulate" in what} == {main_grad}


def test_nothing_runs_beside_a_product_of_copies(monkeypatch):
    """They are made in a launch before the product, which must wait for it."""
    monkeypatch.setattr("fusedmoe.builtin_rules.rows.dispatch.SHORTEST_US", 0.0)
    for disabled, beside in (((), 1), (("sm90.*quantize*",), 0)):  # scales of plain PyTorch are copied
        with fm.disabled(*disabled):
            layer, x = wide_layer()
            assert len(plan_of(layer, x, "fp8_block").beside) == 1
            gradients(layer, x, "fp8_block")
        assert (len(called("beside")), len(called("block_scaled_wgrad"))) == (beside, 2)
    layer, x = wide_layer()
    dy = torch.randn(H, dtype=BF16).expand(x.shape)  # the kernels cannot read it
    with fm.disabled("sm90.gathered_wgrad_x", WGRAD):
        for grad, beside in ((dy, 0), (dy.contiguous(), 1)):
            gradients(layer, x, "bf16", grad)
            assert len(called("beside")) == beside
    rows_, slots = torch.randn(H, 4, dtype=BF16).mT, torch.arange(4, dtype=torch.int32).view(2, 2)
    bind_sum(rows_, slots, None, 16)(rows_, slots)  # nor does a sum of copies
    assert called("sum_slots")[-1] == {"scale": False}


# -------------------------------------------------------------------------------------- main_grad and quantized weights


def accumulating(chain, value=0.0):
    for layer in (chain[0], chain[-1]):
        layer.accumulate_into_main_grad = True
        layer.weight.main_grad = torch.full(layer.weight.shape, value)
    return chain


@pytest.mark.parametrize(("make", "recipe"), [(experts, "bf16"), (experts, "fp8_block"), (dense, "bf16")])
def test_weight_gradients_are_added_to_main_grad_unrounded(make, recipe):
    chain = accumulating(make(), 1.0)
    x, named = operands(chain)
    weights = [chain[i].weight for i in (0, 2)]
    with fm.recipe(recipe):
        with fm.disabled("*"):
            expected = outcome(chain, x, **named)
        unfused = [w.main_grad - 1 for w in weights]
        fm.clear_weight_cache(chain)
        calls.clear()
        accumulating(chain, 1.0)
        with fm.strict():
            assert_close(outcome(chain, x, **named), expected, 0.015 if recipe == "bf16" else 0.06)
        assert not only_plan(chain, x, **named).unfused
    assert "0.weight" not in expected
    launched = [what for name, what in calls if name.endswith("wgrad")]
    assert [(what["accumulate"], what["dtype"]) for what in launched] == [(True, torch.float32)] * 2
    for weight, want in zip(weights, unfused, strict=True):
        got = weight.main_grad - 1
        assert_close({"main_grad": got}, {"main_grad": want}, 0.015 if recipe == "bf16" else 0.06)
        assert not torch.equal(got, got.to(BF16).float())
        assert weight.grad is None
        assert make is dense or not got[1].any()


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_tensor"])
def test_the_gradients_of_micro_batches_add_up_in_grad(recipe, transposed):
    chain, named = experts(), {"splits": torch.tensor(SPLITS)}
    weights = {f"{i}.weight": nn.Parameter(chain[i].weight.detach().clone()) for i in (0, 2)}
    if transposed:
        weights = {name: nn.Parameter(w.detach().mT.contiguous()) for name, w in weights.items()}
        chain[0].transposed_grad = chain[2].transposed_grad = True
    chain, batches = chain.without_parameters(), [rows() for _ in range(3)]

    def loss(x):
        given = {name: w.mT if transposed else w for name, w in weights.items()}
        return chain.forward_with(given, x, **named).float().square().sum()

    with fm.recipe(recipe):
        alone = [torch.autograd.grad(loss(x), list(weights.values())) for x in batches]
        want = [first + second + third for first, second, third in zip(*alone, strict=True)]
        calls.clear()
        for x in batches:
            loss(x).backward()
    adds = not transposed or recipe == "fp8_block"  # no kernel has E5M2 as its second operand
    assert [what["accumulate"] for what in called("block_scaled_wgrad")] == [False] * 2 + [adds] * 4
    for w, total in zip(weights.values(), want, strict=True):
        assert total.any()
        assert torch.equal(w.grad, total)


# -------------------------------------------------------------------------------------------------------------- offsets


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_offsets_in_one_launch(dtype):
    chain, x = experts(), rows()
    every_second = torch.tensor(SPLITS, dtype=dtype).repeat_interleave(2)[::2]
    with fm.strict():
        y = chain(x, splits=torch.tensor(SPLITS, dtype=dtype))
        assert torch.equal(y, chain(x, splits=every_second))  # of a copy
        assert called().count("offsets_from_splits") == 2 * (dtype in (torch.int64, torch.int32))
        with fm.disabled("sm90.offsets_from_splits"):
            calls.clear()
            assert torch.equal(y, chain(x, splits=torch.tensor(SPLITS, dtype=dtype)))
    assert "offsets_from_splits" not in called()
    assert "grouped_gemm" in called()


def test_offsets_are_checked_in_debug_mode_after_calls_without_it(monkeypatch):
    chain, x, splits = experts(), rows(), torch.tensor([9, 0, 9, 9])
    for _ in range(2):
        chain(x, splits=splits)
    monkeypatch.setenv("FUSEDMOE_DEBUG", "1")
    for module in (chain, experts()):
        with pytest.raises(fm.InputError, match="splits: expected a sum of at most 16"):
            module(x, splits=splits)
    monkeypatch.delenv("FUSEDMOE_DEBUG")
    chain(x, splits=splits)


def test_offsets_of_one_group_are_views_of_one_table(monkeypatch):
    offsets = [one_group.offsets_of_one_group(rows, torch.device("cpu")) for rows in (0, 1, 4096)]
    assert [t.tolist() for t in offsets] == [[0], [1], [4096]]
    assert len({t.untyped_storage().data_ptr() for t in offsets}) == 1
    assert {(t.dtype, t.shape) for t in offsets} == {(torch.int32, (1,))}
    monkeypatch.setattr(one_group, "_TABLE_ROWS", 8)
    assert one_group.offsets_of_one_group(7, torch.device("cpu")) is not None
    assert one_group.offsets_of_one_group(8, torch.device("cpu")) is None
    both_ways(dense())


def test_planning_imports_no_kernels_and_a_plan_binds_once(monkeypatch):
    monkeypatch.setattr("importlib.import_module", functools.partial(pytest.fail, "imported"))
    chain = dense()
    x, _ = operands(chain)
    assert only_plan(chain, x).fused
    chain(x)
    install(lambda module, name, _: monkeypatch.setattr(module, name, None))
    chain(x)


# ------------------------------------------------------------------------------------------------- what `strict` misses


def missed(chain, x, **named):
    """The ops that `fm.strict()` names."""
    with fm.strict():
        try:
            chain(x, **named)
        except fm.FusionError as error:
            return re.findall(r"^  (\S+):", str(error), re.MULTILINE)
    return []


def scaled_first():
    """A chain as in Llama-4. The backward rule takes a scale between an activation and a layer."""
    dispatch, first, act, second, _ = routed(early=False)
    return fm.Sequential(dispatch, fm.Scale("probs"), first, act, second, fm.Combine(None))


def scaled(*ops):
    return lambda: fm.Sequential(fm.GroupedLinear(E, H, 2 * I, dtype=BF16), *ops, fm.Scale("probs"))


@pytest.mark.parametrize(("make", "dtype", "frozen", "found"), [
    (lambda: experts(scale=True), torch.float64, (), ["2.Scale", "2.ScaleGrad", "2.DScale"]),
    (scaled(fm.SwiGLU()), torch.float32, (), []),
    (scaled(fm.SwiGLU()), torch.float64, ("probs",), ["2.Scale", "2.DScale"]),
    (scaled(), torch.float32, (), []), (scaled(), torch.float64, (), []),
    (scaled(), torch.float64, ("probs",), ["1.Scale"]), (scaled_first, None, (), []),
])  # fmt: skip
def test_only_what_would_be_fused_is_missed(make, dtype, frozen, found, caplog):
    """A trained scale after the last layer would not be, whatever its dtype; after an activation it would."""
    chain = make()
    x, named = operands(chain, probs=dtype, frozen=frozen)
    assert missed(chain, x, **named) == found
    assert found or not [r for r in caplog.records if r.levelno >= logging.WARNING]
