"""The rules for activations apart from products, on the CPU: stand-ins compute what the kernels do."""

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome, rules_used, status
from test_sm90_rules import (  # noqa: F401  (a fixture)
    BF16,
    assert_close,
    both_ways_lenient,
    called,
    experts,
    hopper_machine,
    inputs,
    rows,
)

import fusedmoe as fm
from fusedmoe import Status

pytestmark = pytest.mark.usefixtures("builtin_rules")

FORWARD, BACKWARD = "sm90.activation", "sm90.dactivation"
PRODUCTS = ("sm90.grouped_*", "sm90.linear*")
CLAMPED = {"limit": 1.0, "alpha": 1.702, "offset": 1.0}
ACTIVATIONS = [
    fm.SwiGLU(), fm.SwiGLU(**CLAMPED), fm.SwiGLU(**CLAMPED, interleaved=True), fm.GeGLU(), fm.GeGLU("none"),
    fm.ReGLU(limit=0.5), fm.SquaredReLU(),
]  # fmt: skip


def elementwise(act, scale=True):
    return fm.Sequential(act, *([fm.Scale("probs")] if scale else []))


def apart(x, by):
    """The same rows, ``by`` elements further apart, with NaN between them."""
    room = x.new_full((x.shape[0], x.shape[1] + by), torch.nan)
    room[:, : x.shape[1]] = x.detach()
    return room[:, : x.shape[1]].requires_grad_()


def operands(count=15, features=48, dtype=BF16, scale=torch.float32, requires_grad=True):
    x = torch.randn(count, features, dtype=dtype, requires_grad=True)
    factor = torch.rand(count) + 0.5
    return x, {} if scale is None else {"probs": factor.to(scale).requires_grad_(requires_grad)}


def gradients(chain, x, probs):
    """The output and the gradients of a call with these very tensors: `outcome` copies them."""
    y = chain(x, probs=probs)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return {"y": y.detach(), **dict(zip("xs", torch.autograd.grad(y, (x, probs), weights), strict=True))}


@pytest.mark.parametrize("scale", [None, torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_one_launch_forward_and_one_backward(act, dtype, scale):
    x, named = operands(dtype=dtype, scale=scale)
    chain = elementwise(act, scale is not None)
    plan = both_ways_lenient(chain, x, **named)
    assert rules_used(plan) == [FORWARD, BACKWARD]
    assert not plan.unfused
    assert [step.launches for step in plan.steps] == [1, 1]
    of_scale = {"scale": scale is not None}
    of_results = {"want_scale": scale is not None, "want_output": False}
    assert stand_ins.calls == [("activation", of_scale), ("activation_backward", of_results)]


def test_a_scale_without_a_gradient():
    x, named = operands(requires_grad=False)
    plan = both_ways_lenient(elementwise(fm.SwiGLU()), x, **named)
    assert rules_used(plan) == [FORWARD, BACKWARD]
    assert called("activation_backward") == [{"want_scale": False, "want_output": False}]


def test_a_gradient_of_the_scale_alone():
    """Its gradient is a step in plain PyTorch, which reads the result of the activation."""
    x, named = operands()
    plan = both_ways_lenient(elementwise(fm.SwiGLU()), x.detach(), **named)
    assert {op for step in plan.unfused for op in step.ops} == {"1.Scale", "1.ScaleGrad"}


def test_products_have_activations_in_their_epilogues():
    plan = only_plan(experts(), rows(), **inputs())
    assert not {FORWARD, BACKWARD} & {*rules_used(plan)}
    assert status(plan, FORWARD) == (Status.SHADOWED, "by sm90.grouped_gemm_activation")


def test_the_preactivation_is_all_that_is_kept():
    """With many rows, where bytes cost more than launches: the step recomputes the next layer's input."""
    chain, count = experts(), 100_000
    x = torch.empty(count, 32, dtype=BF16, device="meta", requires_grad=True)
    named = {
        "splits": torch.empty(3, dtype=torch.int64, device="meta"),
        "probs": torch.empty(count, device="meta", requires_grad=True),
    }
    chain = chain.to("meta")
    with fm.disabled(*PRODUCTS):
        (plan,) = chain.explain(x, arch=90, **named).plans
    assert [step.rule for step in plan.steps] == [None, FORWARD, None, None, None, BACKWARD, None, None]
    assert {"1.input", "probs"} < {*plan.kept}
    assert not {"2.input", "3.input"} & {*plan.kept}


def test_it_recomputes_the_input_of_the_next_layer(monkeypatch):
    monkeypatch.setattr("fusedmoe.fusion.search.candidates._US_PER_LAUNCH", 0.0)
    with fm.disabled(*PRODUCTS):
        plan = both_ways_lenient(experts(), rows(), **inputs())
        assert rules_used(plan) == [FORWARD, BACKWARD]
        assert "3.input" not in plan.kept
        assert called("activation_backward") == [{"want_scale": True, "want_output": True}]


@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_rows_after_the_last_expert(scale):
    """They are NaN, and so is their scale: they stay NaN up to the next layer. The gradients are zeros there."""
    chain = fm.Sequential(fm.SwiGLU(), *([fm.Scale("probs")] if scale else []), fm.GroupedLinear(3, 16, 32, dtype=BF16))
    x, named = rows(), inputs(scale=scale)
    used = int(named["splits"].sum())
    assert x[used:].isnan().all()
    if scale:
        named["probs"] = named["probs"].detach().clone()
        named["probs"][used:] = torch.nan
        named["probs"].requires_grad_()
    with fm.disabled(*PRODUCTS):
        got = outcome(chain, x, **named)
    assert {"activation", "activation_backward"} < {*called()}
    with fm.disabled("*"):
        assert_close(got, outcome(chain, x, **named))
    for name in ("y", "x", *(["probs"] if scale else [])):
        assert not got[name][used:].any()


def test_rows_with_several_axes():
    x = torch.randn(3, 5, 48, dtype=BF16, requires_grad=True)
    plan = both_ways_lenient(elementwise(fm.GeGLU(), scale=False), x)
    assert rules_used(plan) == [FORWARD, BACKWARD]
    plan = both_ways_lenient(elementwise(fm.GeGLU()), x, probs=torch.rand(3).requires_grad_())
    assert rules_used(plan) == [FORWARD, BACKWARD]  # without the scale
    assert {op for step in plan.unfused for op in step.ops} == {"1.Scale", "1.ScaleGrad", "1.DScale"}
    reasons = {a.reason for a in plan.attempts if a.status is Status.CONSTRAINT}
    assert reasons == {"rows with a scale have shape (3, 5, 48): expected (rows, features)"}


@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_one_plan_serves_rows_with_other_numbers_of_axes(scale):
    """It is made for rows with two axes. Others run in plain PyTorch if the kernel cannot take them."""
    chain = elementwise(fm.SwiGLU(), scale)
    for shape in ((16, 48), (8, 2, 48), *([] if scale else [(1, 48), (48,)])):
        x = torch.randn(shape, dtype=BF16, requires_grad=True)
        both_ways_lenient(chain, x, **({"probs": torch.rand(shape[0]).requires_grad_()} if scale else {}))


def test_strides():
    """Rows may be apart; a gradient that the kernel cannot read is copied; other rows run in plain PyTorch."""
    chain, (x, named) = elementwise(fm.SwiGLU()), operands()
    with fm.disabled("*"):
        expected = gradients(chain, x, **named)
    assert_close(gradients(chain, apart(x, 8), **named), expected)
    assert called() == ["activation", "activation_backward"]
    stand_ins.calls.clear()
    (got,) = torch.autograd.grad(chain(x, **named).sum(), x)  # of an expanded gradient
    assert called() == ["activation", "activation_backward"]
    with fm.disabled("*"):
        assert_close({"x": got}, {"x": torch.autograd.grad(chain(x, **named).sum(), x)[0]})
    stand_ins.calls.clear()
    for odd in (apart(x, 1), x.detach().mT.contiguous().mT.requires_grad_()):
        assert_close(gradients(chain, odd, **named), expected)
    assert called() == []
    alternate = named["probs"].detach().repeat_interleave(2)[::2].requires_grad_()
    assert_close(gradients(chain, x, probs=alternate), expected)
    assert called() == ["activation", "activation_backward"]  # of a copy of the scale


def test_no_rows(caplog):
    chain, (x, named) = elementwise(fm.SwiGLU()), operands(count=0)
    with fm.strict():
        chain(x, **named).sum().backward()
    assert called() == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("features", "dtype", "reason"),
    [
        (24, BF16, "half of the features 12 is not a multiple of 8"),
        (
            48,
            torch.float32,
            "input is float32, not bfloat16 or float16: convert the module, or run under torch.autocast",
        ),
    ],
)
def test_constraints(features, dtype, reason):
    x, named = operands(features=features, dtype=dtype)
    plan = both_ways_lenient(elementwise(fm.SwiGLU()), x, **named)
    assert status(plan, FORWARD) == (Status.CONSTRAINT, reason)
    assert not plan.fused
    with fm.strict(), pytest.raises(fm.FusionError, match=f"0.SwiGLU: {FORWARD}: CONSTRAINT"):
        elementwise(fm.SwiGLU())(x, **named)


def test_a_scale_of_fp64():
    x, named = operands(scale=torch.float64)
    plan = both_ways_lenient(elementwise(fm.SwiGLU()), x, **named)
    assert rules_used(plan) == [FORWARD, BACKWARD]  # without the scale
    reasons = {a.reason for a in plan.attempts if a.status is Status.CONSTRAINT}
    assert reasons == {"the row scale is float64, not float32, bfloat16 or float16: convert it"}


def test_explain_says_why_a_product_does_not_compute_it():
    """The reason of the rule that would have; none if there is no such rule, or one that costs more."""
    chain, x, named = experts(width=48), rows(), inputs()
    with fm.recipe("fp8_block"):
        plan = only_plan(chain, x, **named)
    (step,) = [step for step in plan.steps if step.rule == FORWARD]
    assert step.why == "sm90.fp8_grouped_gemm_activation: CONSTRAINT: half of out_features 48 is not a multiple of 128"
    assert "apart from a product, because:" in str(plan)
    x, named = operands()
    plan = only_plan(elementwise(fm.SwiGLU()), x, **named)
    assert [step.why for step in plan.steps] == ["", ""]
    assert "because" not in str(plan)
