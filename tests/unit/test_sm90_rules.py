"""The rules for sm_90, on the CPU: the architecture is pretended, and stand-ins compute what the kernels do."""

import functools
import importlib.util
import logging
import sys

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome, rules_used, status
from torch import nn

import fusedmoe as fm
from fusedmoe import FusionError, Status
from fusedmoe.builtin_rules import requirements
from fusedmoe.kernels.build import toolkit
from fusedmoe.kernels.options import KernelOptions

E, H, I = 3, 32, 16  # noqa: E741  (experts, hidden, intermediate)
SPLITS = (5, 0, 7)
ROWS = 15  # three of them belong to no expert
BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("builtin_rules")


@pytest.fixture(autouse=True)
def hopper_machine(monkeypatch):
    """The CPU says that it is an sm_90 GPU, whose kernels are the stand-ins."""
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
    stand_ins.install(monkeypatch.setattr, router=True)
    monkeypatch.setattr(toolkit, "missing_packages", lambda: ())
    stand_ins.calls.clear()


def experts(act=fm.SwiGLU, *, scale=True, bias=False, dtype=BF16, width=I, hidden=H, options=None, **settings):
    activation = act(**settings)
    wide = 1 if isinstance(activation, fm.SquaredReLU) else 2
    return fm.Sequential(
        fm.GroupedLinear(E, hidden, wide * width, bias=bias, dtype=dtype),
        activation,
        *([fm.Scale("probs")] if scale else []),
        fm.GroupedLinear(E, width, hidden, bias=bias, dtype=dtype),
        **(options or {}),
    )


def rows(count=ROWS, dtype=BF16, hidden=H, requires_grad=True):
    x = torch.randn(count, hidden, dtype=dtype)
    x[sum(SPLITS) :] = torch.nan
    return x.requires_grad_(requires_grad)


def inputs(*, scale=True, count=ROWS, dtype=torch.float32, requires_grad=True):
    named = {"splits": torch.tensor(SPLITS)}
    if scale:
        named["probs"] = torch.rand(count, dtype=dtype, requires_grad=requires_grad)
    return named


def called(name=None):
    return [n if name is None else what for n, what in stand_ins.calls if name in (None, n)]


def assert_close(got, expected):
    """As close as two roundings of bf16 in a row leave two ways to compute the same."""
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert got[name].dtype is want.dtype, name
        assert want.abs().sum() > 0, f"{name}: zeros would pass"
        error = (got[name].double() - want.double()).norm() / want.double().norm()
        assert error < 0.015, f"{name}: relative error {error}"


def both_ways(chain, x, **named):
    """Check a fused call against the unfused one; return its plan."""
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
        assert not only_plan(chain, x, **named).fused
    stand_ins.calls.clear()
    with fm.strict():
        got = outcome(chain, x, **named)
    assert_close(got, expected)
    assert not got["y"][sum(SPLITS) :].any()
    for name in ("x", "probs"):
        assert name not in got or not got[name][sum(SPLITS) :].any()
    for name in got:
        if name.endswith(("weight", "bias")):
            assert not got[name][1].any(), f"{name}: the expert without rows"
    return only_plan(chain, x, **named)


ACTIVATIONS = {
    "swiglu": (fm.SwiGLU, {}),
    "interleaved": (fm.SwiGLU, {"interleaved": True}),
    "gpt-oss": (fm.SwiGLU, {"limit": 0.4, "alpha": 1.702, "offset": 1.0, "interleaved": True}),
    "geglu": (fm.GeGLU, {}),
    "geglu erf": (fm.GeGLU, {"approximate": "none"}),
    "reglu": (fm.ReGLU, {}),  # no limit: a rounding of the preactivation near it switches gradients on and off
    "squared_relu": (fm.SquaredReLU, {}),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_whole_plan_computes_the_same(act, scale, bias):
    kind, settings = ACTIVATIONS[act]
    plan = both_ways(experts(kind, scale=scale, bias=bias, **settings), rows(), **inputs(scale=scale))
    assert not plan.unfused
    sums = ["sm90.column_sums"] if bias else []
    assert rules_used(plan) == [
        "sm90.grouped_gemm_activation",
        "sm90.grouped_gemm",
        *sums,
        "sm90.grouped_wgrad",
        "sm90.grouped_dgrad_activation",
        *sums,
        "sm90.grouped_wgrad",
        "sm90.grouped_dgrad",
    ]


def test_what_runs_and_what_is_kept():
    chain, x, named = experts(), rows(), inputs()
    plan = both_ways(chain, x, **named)
    assert called() == [
        "offsets_from_splits",
        "grouped_gemm_activation",
        "grouped_gemm",
        "grouped_gemm_activation_backward",  # before the weight gradient, for which it recomputes
        "grouped_wgrad",
        "grouped_wgrad",
        "grouped_gemm",
    ]
    assert [s.ops for s in plan.steps] == [
        ("0.GroupedLinear", "1.SwiGLU", "2.Scale"),
        ("3.GroupedLinear",),
        ("3.Wgrad",),
        ("3.Dgrad", "2.ScaleGrad", "2.DScale", "1.DSwiGLU"),
        ("0.Wgrad",),
        ("0.Dgrad",),
    ]
    assert set(plan.kept) == {"0.input", "1.input", "probs", "offsets"}
    assert "FUSED" in str(plan)
    assert "unfused" not in str(plan)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("factor", [torch.float32, BF16, torch.float16])
def test_dtypes(dtype, factor):
    plan = both_ways(experts(dtype=dtype), rows(dtype=dtype), **inputs(dtype=factor))
    assert not plan.unfused


FROZEN = {
    "nothing": (),
    "x": ("x",),
    "first weight": ("0.weight",),
    "second weight": ("3.weight",),
    "both weights": ("0.weight", "3.weight"),
    "biases": ("0.bias", "3.bias"),
    "probs": ("probs",),
    "all but x": ("0.weight", "3.weight", "0.bias", "3.bias", "probs"),
    "all but the first weight": ("x", "3.weight", "0.bias", "3.bias", "probs"),
    "all but probs": ("x", "0.weight", "3.weight", "0.bias", "3.bias"),
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parts(frozen):
    """Only what is wanted is computed."""
    names = FROZEN[frozen]
    chain = experts(bias=True)
    for name, parameter in chain.named_parameters():
        parameter.requires_grad_(name not in names)
    x, named = rows(requires_grad="x" not in names), inputs(requires_grad="probs" not in names)
    run = both_ways_lenient if frozen == "all but probs" else both_ways
    plan = run(chain, x, **named)
    stand_ins.calls.clear()
    outcome(chain, x, **named)
    assert len(called("grouped_wgrad")) == 2 - sum(n.endswith("weight") for n in names)
    assert len(called("column_sums")) == 2 - sum(n.endswith("bias") for n in names)
    for call in called("grouped_gemm_activation_backward"):
        assert call["want_output"] == ("3.weight" not in names)
        assert call["want_row_scale_grad"] == ("probs" not in names)
    if frozen != "all but probs":
        assert not plan.unfused
        assert len(called("grouped_gemm_activation_backward")) == 1
    else:  # no activation's derivative, so nobody recomputes what the scale's gradient reads: it has to be written
        assert [s.ops for s in plan.unfused] == [("2.Scale",), ("2.ScaleGrad",)]
        assert rules_used(plan) == ["sm90.grouped_gemm_activation", "sm90.grouped_gemm", "sm90.grouped_dgrad"]


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(grad):
    chain, x, named = experts(), rows(requires_grad=False), inputs(requires_grad=False)
    with grad():
        plan = both_ways(chain, x, **named)
    assert called("grouped_gemm_activation") == [
        {"options": KernelOptions(), "keep_preactivation": False, "row_scale": True}
    ]
    assert plan.kept == ()


def test_deterministic_mode():
    torch.use_deterministic_algorithms(True)
    try:
        assert not both_ways(experts(bias=True), rows(), **inputs()).unfused
    finally:
        torch.use_deterministic_algorithms(False)


def test_options_reach_every_kernel():
    chain = experts(options={"sm_margin": 8, "schedule": "static"})
    x, named = rows(), inputs()
    outcome(chain, x, **named)
    assert {what["options"] for _, what in stand_ins.calls if "options" in what} == {KernelOptions(8, "static")}
    assert ", sm_margin 8, schedule static, 15 rows\n" in str(chain.explain(x, **named))
    stand_ins.calls.clear()
    chain.sm_margin = 0
    outcome(chain, x, **named)
    assert {what["options"] for _, what in stand_ins.calls if "options" in what} == {KernelOptions(0, "static")}


def test_backward_has_the_options_of_its_forward():
    chain, x, named = experts(options={"sm_margin": 8}), rows(), inputs()
    y = chain(x, **named)
    chain.sm_margin = 0
    stand_ins.calls.clear()
    y.sum().backward()
    assert {what["options"].sm_margin for _, what in stand_ins.calls} == {8}


def test_moe():
    layer = fm.MoE(H, I, E, 2, shared_intermediate=I, dtype=BF16, sm_margin=4)
    x = torch.randn(10, H, dtype=BF16, requires_grad=True)
    with fm.disabled("*"):
        expected = outcome(layer, x)
    with fm.strict():  # the dense layers miss nothing
        assert_close(outcome(layer, x), expected)
    (plan,) = layer.explain(x).plans
    assert not plan.unfused
    assert all(what["options"].sm_margin == 4 for _, what in stand_ins.calls if "options" in what)


def test_a_scale_after_the_layer_is_fused_if_nobody_wants_its_gradient():
    chain = fm.Sequential(fm.GroupedLinear(E, H, I, dtype=BF16), fm.Scale("probs"))
    x = rows()
    plan = both_ways(chain, x, **inputs(requires_grad=False))
    assert plan.steps[0].ops == ("0.GroupedLinear", "1.Scale")
    plan = both_ways(chain, x, **inputs())
    assert rules_used(plan, "forward") == ["sm90.grouped_gemm"]
    assert plan.steps[0].ops == ("0.GroupedLinear",)
    assert status(plan, "sm90.grouped_gemm", 0)[0] is Status.FUSED


def test_a_layer_alone():
    plan = both_ways(fm.Sequential(fm.GroupedLinear(E, H, I, bias=True, dtype=BF16)), rows(), **inputs(scale=False))
    assert not plan.unfused


def test_an_expanded_gradient_is_copied():
    chain, x, named = experts(bias=True), rows(), inputs()
    with fm.strict():
        chain(x, **named).sum().backward()
    with fm.disabled("*"):
        expected = torch.autograd.grad(chain(x, **named).sum(), chain[0].weight)[0]
    assert_close({"w": chain[0].weight.grad}, {"w": expected})


def test_no_rows_is_neither_a_fallback_nor_a_miss(caplog):
    chain = experts(bias=True)
    for splits in ((0, 0, 0),):
        x = torch.zeros(0, H, dtype=BF16, requires_grad=True)
        named = {"splits": torch.tensor(splits), "probs": torch.rand(0)}
        with fm.strict():
            y = chain(x, **named)
            y.sum().backward()
    assert y.shape == (0, H)
    assert not chain[0].weight.grad.any()
    assert called() == ["offsets_from_splits"]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_an_untouched_weight_of_columns_is_read_in_place_where_a_kernel_can():
    """[H, E, I] in memory, say: unit stride along either of the last two axes will do in the second product."""
    chain, x, named = experts(), rows(), inputs()
    chain[3].weight = nn.Parameter(chain[3].weight.detach().mT.contiguous().mT)
    both_ways(chain, x, **named)


@pytest.mark.parametrize(
    ("act", "settings"), [(fm.SwiGLU, {}), (fm.SwiGLU, {"interleaved": True}), (fm.SquaredReLU, {})]
)
def test_before_an_activation_too(act, settings):
    """[E, H, 2 I] in memory, as Llama-4 stores it, and GPT-OSS with gate and up in turns."""
    chain, x, named = experts(act, **settings), rows(), inputs()
    chain[0].weight = nn.Parameter(chain[0].weight.detach().mT.contiguous().mT)
    both_ways(chain, x, **named)


# ------------------------------------------------------------------------------------------ what must not fuse, and why


def reasons(plan):
    """Every CONSTRAINT and UNAVAILABLE, by rule. Rules for Blackwell have tests of their own."""
    declined = (a for a in plan.attempts if a.status in (Status.CONSTRAINT, Status.UNAVAILABLE))
    return {a.rule: a.reason for a in declined if not a.rule.startswith("sm100.")}


# those that stand on Dispatch, Combine and their backward have a file of their own
DISPATCH = {
    "sm90.dispatch",
    "sm90.combine",
    "sm90.dcombine",
    "sm90.combine_weight_grad",
    "sm90.ddispatch",
    "sm90.dispatch_weight_grad",
}
GLUE = {"sm90.offsets_from_splits", "sm90.transposed_weight"}
LINEAR = {
    "sm90.linear", "sm90.linear_activation", "sm90.linear_dgrad", "sm90.linear_dgrad_activation", "sm90.linear_wgrad",
    "sm90.linear_column_sums",
}  # fmt: skip
ROUTER = {"sm90.router", "sm90.router_dispatch", "sm90.router_backward"}
GATHERED = {
    "sm90.gathered_gemm", "sm90.gathered_gemm_activation", "sm90.gathered_dgrad", "sm90.gathered_dgrad_activation",
    "sm90.gathered_wgrad_x", "sm90.gathered_wgrad_dy", "sm90.gathered_quantize", "sm90.gathered_quantize_grad",
    "sm90.gathered_quantize_columns",
}  # fmt: skip
QUANTIZE = {"sm90.quantize", "sm90.quantize_grad", "sm90.quantize_weight"}
FP8 = {
    "sm90.fp8_grouped_gemm", "sm90.fp8_grouped_gemm_activation", "sm90.fp8_grouped_dgrad",
    "sm90.fp8_grouped_dgrad_activation", "sm90.fp8_grouped_wgrad", "sm90.dequantized_gemm", "sm90.dequantized_dgrad",
    "sm90.dequantized_wgrad",
}  # fmt: skip
BASES = [rule for rule in requirements.OnSm90.__subclasses__() if issubclass(rule, fm.FusionRule)]  # of others, too
EXCHANGE = {
    "sm90.gemm_activation_of_arriving_tokens", "sm90.gemm_of_leaving_rows",
    "sm90.dgrad_activation_of_arriving_gradients", "sm90.wgrad_beside_exchange",
}  # fmt: skip
ALL = {rule.name for rule in BASES} - DISPATCH - GLUE - LINEAR - ROUTER - QUANTIZE - GATHERED - EXCHANGE


def declined(chain, x, **named):
    """The reasons of all rules, none of which runs; the call itself does."""
    plan = only_plan(chain, x, **named)
    assert not plan.fused
    outcome(chain, x, **named)
    assert not {name for name in called() if name != "offsets_from_splits"}
    assert reasons(plan).keys() == ALL
    return reasons(plan)


def test_the_rules_for_hopper():
    named = ALL | DISPATCH | GLUE | LINEAR | ROUTER | QUANTIZE | GATHERED | FP8 | EXCHANGE
    assert {rule.name for rule in fm.rules() if not rule.name.startswith("sm100.")} == named


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes(dtype):
    found = declined(experts(bias=True, dtype=dtype), rows(dtype=dtype), **inputs())
    short = str(dtype).removeprefix("torch.")
    for rule, reason in found.items():
        forward = "sm90.grouped_gemm", "sm90.grouped_gemm_activation", "sm90.activation"
        operand = "input" if rule in forward else "grad_output"
        expected = f"{operand} is {short}, not bfloat16 or float16: convert the module, or run under torch.autocast"
        assert reason == expected, rule


def test_mixed_dtypes():
    """No op lets them come: rows that a foreign op makes would be the way."""

    class Context:
        recipe = fm.Recipe()

        def dtype(self, value):
            return BF16 if value == "input" else torch.float16

    with pytest.raises(requirements.Declined, match=r"^fc.weight is float16, input is bfloat16: expected one dtype$"):
        requirements.check_common(Context(), "input", "fc.weight")


def test_odd_widths():
    plan = only_plan(experts(bias=True, hidden=36, width=20), rows(hidden=36), **inputs())
    assert rules_used(plan) == ["sm90.column_sums"]  # 40 features
    assert reasons(plan) == {
        "sm90.grouped_gemm": "in_features 20 is not a multiple of 8",  # the last of two places each
        "sm90.grouped_gemm_activation": "in_features 36 is not a multiple of 8",
        "sm90.grouped_wgrad": "in_features 36 is not a multiple of 8",
        "sm90.grouped_dgrad": "in_features 36 is not a multiple of 8",
        "sm90.grouped_dgrad_activation": "in_features 20 is not a multiple of 8",
        "sm90.column_sums": "out_features 36 is not a multiple of 8",
        "sm90.activation": "half of the features 20 is not a multiple of 8",
        "sm90.dactivation": "half of the features 20 is not a multiple of 8",
    }


@pytest.mark.parametrize(
    ("hidden", "width", "act", "reason"),
    [
        (32, 20, fm.SwiGLU, "half of out_features 20 is not a multiple of 8"),
        (32, 20, fm.SquaredReLU, "out_features 20 is not a multiple of 8"),
    ],
)
def test_odd_activation_width(hidden, width, act, reason):
    """40 features are a multiple of 8, and their halves are not."""
    plan = only_plan(experts(act, hidden=hidden, width=width), rows(hidden=hidden), **inputs())
    assert reasons(plan)["sm90.grouped_gemm_activation"] == reason


def test_odd_out_features():
    layer = fm.Sequential(fm.GroupedLinear(E, H, 12, bias=True, dtype=BF16))
    found = reasons(only_plan(layer, rows(), **inputs(scale=False)))
    assert found == dict.fromkeys(
        ("sm90.grouped_gemm", "sm90.grouped_wgrad", "sm90.grouped_dgrad", "sm90.column_sums"),
        "out_features 12 is not a multiple of 8",
    )


def test_a_row_scale_of_fp64():
    plan = both_ways_lenient(experts(), rows(), **inputs(dtype=torch.float64))
    reason = "the row scale is float64, not float32, bfloat16 or float16: convert it"
    assert status(plan, "sm90.grouped_dgrad_activation") == (Status.CONSTRAINT, reason)
    after = fm.Sequential(fm.GroupedLinear(E, H, I, dtype=BF16), fm.Scale("probs"))
    assert rules_used(only_plan(after, rows(), **inputs(dtype=torch.float64)), "forward") == ["sm90.grouped_gemm"]


def both_ways_lenient(chain, x, **named):
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    assert_close(outcome(chain, x, **named), expected)
    return only_plan(chain, x, **named)


def test_quantized_operands():
    """The rules for bf16 and fp16 take none. The bias's gradient sums what came before it was quantized."""
    sizes = {"width": 32}
    with fm.recipe("fp8_block"), fm.disabled("sm90.fp8_*"):
        plan = only_plan(experts(bias=True, **sizes), rows(), **inputs())
        with fm.strict():  # there is no kernel for them that could be missed
            outcome(experts(bias=True, **sizes), rows(), **inputs())
    others = {"sm90.column_sums", "sm90.activation", "sm90.dactivation"}
    assert {step.rule for step in plan.fused} == {*others, *QUANTIZE}
    assert set(called()) - {"offsets_from_splits"} == {
        "column_sums", "activation", "activation_backward", "quantize_rows", "quantize_weight",
    }  # fmt: skip
    found = {rule: reason for rule, reason in reasons(plan).items() if rule in ALL}
    assert found.keys() == ALL - others
    lines, blocks = "fp8 e4m3 1x128", "fp8 e4m3 128x128"
    for rule, reason in found.items():
        operands = lines if rule == "sm90.grouped_wgrad" else f"{blocks} and {lines}"
        assert reason == f"takes no {operands} operands"


def test_layers_that_keep_bf16_are_fused_under_any_recipe():
    chain = experts(bias=True)
    for op in (chain[0], chain[3]):
        op.recipe = "bf16"
    with fm.recipe("mxfp8"):
        both_ways(chain, rows(), **inputs())


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        (None, "needs an sm_90 GPU, this device is cpu"),
        (100, "needs an sm_90 GPU, this one is sm_100"),
    ],
)
def test_another_device(monkeypatch, arch, reason):
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: arch)
    assert set(declined(experts(bias=True), rows(), **inputs()).values()) == {reason}
    assert called() == []
    with fm.strict():
        experts()(rows(), **inputs())


def test_another_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    found = declined_without_running(experts(bias=True), rows(), **inputs())
    assert found == {"needs Linux, this is win32"}


def declined_without_running(chain, x, **named):
    plan = only_plan(chain, x, **named)
    assert reasons(plan).keys() == ALL
    return set(reasons(plan).values())


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ({"cutlass"}, "needs nvidia-cutlass-dsl: pip install nvidia-cutlass-dsl"),
        (
            {"cutlass", "tvm_ffi"},
            "needs nvidia-cutlass-dsl and apache-tvm-ffi: pip install nvidia-cutlass-dsl apache-tvm-ffi",
        ),
    ],
)
def test_a_missing_package(monkeypatch, missing, reason):
    find = importlib.util.find_spec
    monkeypatch.undo()
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    toolkit.missing_packages.cache_clear()
    try:
        assert set(declined(experts(bias=True), rows(), **inputs()).values()) == {reason}
    finally:
        toolkit.missing_packages.cache_clear()


def test_switched_off():
    with fm.disabled("sm90.*"):
        assert set(declined(experts(bias=True), rows(), **inputs()).values()) == {"switched off by 'sm90.*'"}
    assert called() == []  # the offsets are the plain ones too


@pytest.mark.parametrize(("dtype", "converted"), [(torch.float32, 0), (BF16, 1)], ids=["fp32", "bf16"])
def test_launches_count_the_scale_its_gradient_and_the_bias(dtype, converted):
    """A scale that is not fp32 is converted, and its gradient converted back."""
    with fm.disabled("sm90.dactivation"):  # which converts none: with few rows, launches cost the most
        plan = only_plan(experts(bias=True), rows(), **inputs(dtype=dtype))
    assert {step.rule: step.launches for step in plan.steps} == {
        "sm90.grouped_gemm_activation": 1 + converted,
        "sm90.grouped_gemm": 1,
        "sm90.column_sums": 2,
        "sm90.grouped_wgrad": 1,
        "sm90.grouped_dgrad_activation": 2 + 2 * converted,
        "sm90.grouped_dgrad": 1,
    }
    after = fm.Sequential(fm.GroupedLinear(E, H, I, dtype=BF16), fm.Scale("probs"))
    step = only_plan(after, rows(), **inputs(dtype=dtype, requires_grad=False)).steps[0]
    assert (step.rule, step.launches) == ("sm90.grouped_gemm", 1 + converted)


def strided(t, how):
    """The same values, elsewhere in memory."""
    if how == "address":
        room = t.new_empty(t.numel() + 1)
        return room[1:].view(t.shape).copy_(t)
    if how == "pitch":
        room = t.new_empty(*t.shape[:-1], t.shape[-1] + 4)
        return room[..., : t.shape[-1]].copy_(t)
    return t.mT.contiguous().mT


@pytest.mark.parametrize(
    ("which", "how", "reason"),
    [
        ("x", "address", "x does not begin at a multiple of 16 bytes"),
        ("x", "pitch", "x has strides (36, 1): expected unit stride in the last axis, multiples of 8 in the others"),
        ("x", "columns", "x has strides (1, 15): expected unit stride in the last axis, multiples of 8 in the others"),
        ("0.weight", "address", "the weight does not begin at a multiple of 16 bytes"),
        ("0.weight", "pitch", "the weight has strides (1152, 36, 1): expected unit stride in one of the last two axes"),
        ("3.weight", "address", "the weight does not begin at a multiple of 16 bytes"),
        ("3.weight", "pitch", "the weight has strides (640, 20, 1): expected unit stride in one of the last two axes"),
    ],
)
def test_guards(which, how, reason, caplog):
    chain, x, named = experts(), rows(), inputs()
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    if which == "x":
        leaf = strided(x.detach(), how).requires_grad_()
        with fm.strict(), pytest.raises(FusionError, match="declined this call: x "):
            chain(leaf, **named)
        y = chain(leaf, **named)
        assert_close({"y": y.detach()}, {"y": expected["y"]})
    else:
        name, _, _ = which.partition(".")
        chain[int(name)].weight = nn.Parameter(strided(chain[int(name)].weight.detach(), how))
        assert_close(outcome(chain, x, **named), expected)
        with fm.strict(), pytest.raises(FusionError, match="declined this call: the weight"):
            chain(x, **named)
    said = [r.getMessage() for r in caplog.records if "declined this call" in r.getMessage()]
    assert said
    assert all(f"declined this call: {reason}" in text for text in said)


def test_experts_off_16_bytes():
    chain, x, named = experts(), rows(), inputs()
    room = torch.empty(E * 2 * I * H + 4 * E, dtype=BF16)
    weight = room.as_strided((E, 2 * I, H), (2 * I * H + 4, H, 1)).copy_(chain[0].weight.detach())
    chain[0].weight = nn.Parameter(weight)
    with fm.strict(), pytest.raises(FusionError, match=r"the weight has strides \(1028, 32, 1\): .* between experts"):
        chain(x, **named)


def test_a_bias_that_is_not_contiguous():
    chain, x, named = experts(bias=True), rows(), inputs()
    for i in (0, 3):
        chain[i].bias = nn.Parameter(chain[i].bias.detach().T.contiguous().T)
    with fm.strict(), pytest.raises(FusionError, match="the bias is not contiguous"):
        chain(x, **named)
    both_ways_lenient(chain, x, **named)


def test_a_tensor_subclass(caplog):
    class Wrapped(torch.Tensor):
        pass

    chain, x, named = experts(), rows(), inputs()
    chain[0].weight.data = chain[0].weight.data
    weight = chain[0].weight.detach().as_subclass(Wrapped)
    del chain[0].weight
    chain[0].weight = weight
    with fm.strict(), pytest.raises(FusionError, match="the weight is a Wrapped, not a plain tensor"):
        chain(x, **named)


def test_the_cute_dsl_is_not_imported_to_plan(monkeypatch):
    monkeypatch.setattr("importlib.import_module", functools.partial(pytest.fail, "imported"))
    assert only_plan(experts(), rows(), **inputs()).fused


# -------------------------------------------------------------------------------------------------------------- offsets


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_offsets_in_one_launch(dtype):
    chain, x = experts(scale=False), rows()
    with fm.strict():
        chain(x, splits=torch.tensor(SPLITS, dtype=dtype))
    assert ("offsets_from_splits" in called()) == (dtype in (torch.int64, torch.int32))


def test_splits_with_strides_are_copied():
    chain, x = experts(scale=False), rows()
    with fm.strict():
        y = chain(x, splits=torch.tensor(SPLITS).repeat_interleave(2)[::2])
        assert torch.equal(y, chain(x, splits=torch.tensor(SPLITS)))
    assert called().count("offsets_from_splits") == 2


def test_offsets_are_checked_in_debug_mode(monkeypatch):
    monkeypatch.setenv("FUSEDMOE_DEBUG", "1")
    with pytest.raises(fm.InputError, match="splits: expected a sum of at most 15"):
        experts(scale=False)(rows(), splits=torch.tensor([9, 9, 9]))


def test_debug_mode_holds_for_calls_that_ran_without_it(monkeypatch):
    chain, x = experts(scale=False), rows()
    for _ in range(2):
        chain(x, splits=torch.tensor([9, 9, 9]))
    monkeypatch.setenv("FUSEDMOE_DEBUG", "1")
    with pytest.raises(fm.InputError, match="splits: expected a sum of at most 15"):
        chain(x, splits=torch.tensor([9, 9, 9]))
    monkeypatch.delenv("FUSEDMOE_DEBUG")
    chain(x, splits=torch.tensor([9, 9, 9]))


def test_offsets_can_be_switched_off_alone():
    with fm.disabled("sm90.offsets_from_splits"):
        experts()(rows(), **inputs())
    assert "offsets_from_splits" not in called()
    assert "grouped_gemm" in called()


# ------------------------------------------------------------------------------------------------------------ main_grad


def accumulating(chain, value=0.0):
    for i in (0, 3):
        chain[i].accumulate_into_main_grad = True
        chain[i].weight.main_grad = torch.full_like(chain[i].weight, value, dtype=torch.float32)
    return chain


def test_weight_gradients_are_added_to_main_grad_unrounded():
    chain, x, named = accumulating(experts(), 1.0), rows(), inputs()
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
        unfused = [chain[i].weight.main_grad.clone() for i in (0, 3)]
    assert "0.weight" not in expected
    accumulating(chain, 1.0)
    with fm.strict():
        assert_close(outcome(chain, x, **named), expected)
    assert [(c["accumulate"], c["dtype"]) for c in called("grouped_wgrad")] == [(True, torch.float32)] * 2
    for i, want in zip((0, 3), unfused, strict=True):
        got = chain[i].weight.main_grad
        assert (got[1] == 1).all()
        assert_close({"main_grad": got - 1}, {"main_grad": want - 1})
        assert not torch.equal(got - 1, (got - 1).to(BF16).float())
        assert chain[i].weight.grad is None
    plan = only_plan(chain, x, **named)
    assert [s.ops for s in plan.steps if s.rule == "sm90.grouped_wgrad"] == [
        ("3.WgradIntoMainGrad",),
        ("0.WgradIntoMainGrad",),
    ]


def test_a_weight_that_can_be_marked_is_marked():
    chain, x, named = accumulating(experts()), rows(), inputs()
    chain[0].weight.grad_added_to_main_grad = False
    chain[0].weight.zero_out_wgrad = True
    outcome(chain, x, **named)
    assert chain[0].weight.grad_added_to_main_grad is True
    assert chain[0].weight.grad.dtype is BF16
    assert not chain[0].weight.grad.any()
    assert chain[3].weight.grad is None


def test_no_main_grad():
    chain, x, named = accumulating(experts()), rows(), inputs()
    del chain[0].weight.main_grad
    with pytest.raises(fm.InputError, match=r"GroupedLinear\(.*: weight.main_grad: expected a tensor"):
        outcome(chain, x, **named)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda t: t.mT.contiguous().mT, "main_grad is not contiguous"),
        (lambda t: strided(t, "address"), "main_grad does not begin at a multiple of 16 bytes"),
    ],
)
def test_a_main_grad_that_the_kernel_cannot_write(make, reason, caplog):
    chain, x, named = accumulating(experts()), rows(), inputs()
    weight = chain[0].weight
    weight.main_grad = make(weight.main_grad)
    outcome(chain, x, **named)
    assert weight.main_grad.any()
    (said,) = [r.getMessage() for r in caplog.records if "declined this call" in r.getMessage()]
    assert said == f"0.WgradIntoMainGrad: sm90.grouped_wgrad declined this call: {reason}; it runs unfused"
