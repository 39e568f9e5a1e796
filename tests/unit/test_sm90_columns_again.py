"""Rows by columns that backward quantizes again from the tokens, on the CPU: plans, and results with stand-ins.

The shapes here are small. A launch would cost more than the kept bytes, so most tests let launches cost nothing.
"""

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome, rules_used, status
from test_sm90_fp8_rules import stand_ins_for_fp8  # noqa: F401  (a fixture)
from test_sm90_rules import BF16, called, hopper_machine  # noqa: F401  (a fixture)
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.fusion.search import candidates
from fusedmoe.numerics.formats import Delayed, Quantizer, fp8_block, fp8_tensor, nvfp4

pytestmark = pytest.mark.usefixtures("builtin_rules")
T, K, E, H, I = 37, 2, 4, 64, 128  # noqa: E741
COLUMNS, WGRAD = "sm90.gathered_quantize_columns", "sm90.fp8_grouped_wgrad"
KEPT = "1.input:columns"


@pytest.fixture(autouse=True)
def launches_cost_nothing(monkeypatch):
    monkeypatch.setattr(candidates, "_US_PER_LAUNCH", 0.0)


def experts(hidden=H, dtype=BF16):
    return fm.Sequential(
        fm.Dispatch(),
        fm.GroupedLinear(E, hidden, 2 * I, dtype=dtype),
        fm.SwiGLU(),
        fm.Scale("probs"),
        fm.GroupedLinear(E, I, hidden, dtype=dtype),
        fm.Combine(None),
    )


def routing(chosen=K):
    index = torch.stack([torch.randperm(E)[:chosen] for _ in range(T)])
    index[index == 1] = E  # sentinels, and an expert without rows
    return {"expert_index": index, "expert_weight": torch.rand(T, chosen, requires_grad=True)}


def tokens(hidden=H, dtype=BF16):
    return torch.randn(T, hidden, dtype=dtype, requires_grad=True)


def plan_of(chain, x, recipe="fp8_block", **named):
    with fm.recipe(recipe):
        return only_plan(chain, x, **named)


def assert_same_bits(got, expected):
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert want.any(), f"{name}: zeros would pass"
        assert torch.equal(got[name], want), name


def both_ways(chain, x, recipe="fp8_block", **named):
    """Check that columns quantized again give the bits of those that are kept; return both plans."""
    with fm.recipe(recipe):
        with fm.disabled(COLUMNS):
            expected = outcome(chain, x, **named)
            kept = only_plan(chain, x, **named)
        stand_ins.calls.clear()
        with fm.strict():
            got = outcome(chain, x, **named)
        assert_same_bits(got, expected)
        return only_plan(chain, x, **named), kept


def test_tokens_are_kept_in_place_of_columns():
    chain, x, named = experts(), tokens(), routing()
    plan, kept = both_ways(chain, x, **named)
    assert called("quantize_rows") == [
        {"rows": True, "columns": False},  # the rows, forward
        {"rows": True, "columns": True},  # the gradient of the output
        {"rows": False, "columns": True},  # the rows, again
    ]
    assert called("gathered_quantize_rows") == [{"source": T, "rows": T * K}] * 3
    assert {*kept.kept} - {*plan.kept} == {KEPT}
    assert {*plan.kept} - {*kept.kept} == {"0.input"}
    padded = T * K + E * 127 - (T * K + E * 127) % 128
    assert kept.kept_bytes - plan.kept_bytes == H * padded + 4 * H * padded // 128 - 2 * T * H
    assert {*plan.kept} == {*only_plan(chain, x, **named).kept}, "those of bf16"
    assert not plan.unfused


def test_the_step_is_part_of_the_explanation():
    """It comes right before the weight gradient that reads the columns."""
    plan = plan_of(experts(), tokens(), **routing())
    steps = [(step.ops, step.direction, step.rule) for step in plan.steps]
    at = steps.index((("1:input.QuantizeColumns",), "backward", COLUMNS))
    assert steps[at + 1] == (("1.Wgrad",), "backward", WGRAD)
    step = plan.steps[at]
    assert step.gives == (KEPT,)
    assert (*step.needs,) == ("0.input", "0.offsets", "0.token_of_row")
    assert step.launches == 1
    source = plan.backward_source
    assert source.index("_1_input_columns_codes, _1_input_columns_scale = run") < source.index("grad_1_weight = run")


def test_mxfp8():
    plan, kept = both_ways(experts(), tokens(), "mxfp8", **routing())
    assert COLUMNS in rules_used(plan)
    assert KEPT in kept.kept
    assert KEPT not in plan.kept


def test_a_whole_layer():
    """The router keeps the tokens for its own weight gradient."""
    layer, x = fm.MoE(H, I, 4, K, dtype=BF16), tokens()
    plan, kept = both_ways(layer, x)
    assert COLUMNS in rules_used(plan)
    assert {*kept.kept} - {*plan.kept} == {"experts.gate_up.input:columns"}
    assert plan.kept_bytes == only_plan(layer, x).kept_bytes, "as in bf16"


def test_frozen_tokens():
    plan, _ = both_ways(experts(), tokens().detach(), **routing())
    assert COLUMNS in rules_used(plan)


def test_frozen_weights():
    """Nothing reads columns: neither they nor the tokens are kept."""
    chain = experts()
    chain[1].weight.requires_grad_(False)
    plan = plan_of(chain, tokens(), **routing())
    assert COLUMNS not in rules_used(plan)
    assert not [op for step in plan.steps for op in step.ops if "QuantizeColumns" in op]
    assert {KEPT, "0.input"}.isdisjoint(plan.kept)


def test_main_grad():
    chain, x, named = experts(), tokens(), routing()
    with fm.recipe("fp8_block"):
        want = outcome(chain, x, **named)["1.weight"].float()
        for layer in (chain[1], chain[4]):
            layer.accumulate_into_main_grad = True
            layer.weight.main_grad = torch.ones(layer.weight.shape)
        outcome(chain, x, **named)
    assert COLUMNS in rules_used(plan_of(chain, x, **named))
    assert want.any()
    assert (chain[1].weight.main_grad - 1 - want).norm() < 0.01 * want.norm()


def test_checkpointing_and_a_graph_that_is_kept():
    chain, x, named = experts(), tokens(), routing()
    leaves = x, named["expert_weight"], *chain.parameters()

    def grads(y, **options):
        return torch.autograd.grad(y, leaves, torch.ones_like(y), **options)

    with fm.recipe("fp8_block"), fm.strict():
        assert COLUMNS in rules_used(only_plan(chain, x, **named))
        y = chain(x, **named)
        once = grads(y, retain_graph=True)
        twice = grads(y)
        y = checkpoint(lambda x: chain(x, **named), x, use_reentrant=False)
        again = grads(y)
    for a, b, c in zip(once, twice, again, strict=True):
        assert a.any()
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_compiled_chain():
    chain, x, named = experts(), tokens(), routing()
    with fm.recipe("fp8_block"):
        want = outcome(chain, x, **named)
        stand_ins.calls.clear()
        got = outcome(torch.compile(chain, backend="aot_eager", fullgraph=True), x, **named)
    assert called("gathered_quantize_rows") == [{"source": T, "rows": T * K}] * 3
    assert_same_bits({name.removeprefix("_orig_mod."): t for name, t in got.items()}, want)


def test_tokens_that_change_before_backward():
    """The tokens are kept, not a copy of their codes: autograd checks that they are the same."""
    chain, x, named = experts(), tokens(), routing()
    changed = x * 1
    with fm.recipe("fp8_block"):
        y = chain(changed, **named)
    changed += y
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.float().sum().backward()


def test_a_kernel_that_declines_makes_the_rows():
    """Tokens with a pitch that the kernels cannot read."""
    chain, named = experts(), routing()
    odd = torch.randn(T, H + 1, dtype=BF16)[:, :H]
    with fm.recipe("fp8_block"):
        with fm.disabled("sm90.*quantize*"):
            expected = once(chain, odd.requires_grad_(), named)
        stand_ins.calls.clear()
        got = once(chain, odd, named)
        assert COLUMNS in rules_used(only_plan(chain, odd, **named))
    assert not called("gathered_quantize_rows")[1:], "that of the gradient alone"
    for a, b in zip(got, expected, strict=True):
        assert b.any()
        assert torch.equal(a, b)


def once(chain, x, named):
    y = chain(x, **named)
    return (y, *torch.autograd.grad(y, (x, *chain.parameters()), torch.ones_like(y)))


# ------------------------------------------------------------------------------------------------ must not fuse


def declined(chain, x, recipe="fp8_block", **named):
    """The status of the rule in a plan that does not have its step."""
    plan = plan_of(chain, x, recipe, **named)
    assert COLUMNS not in rules_used(plan)
    assert KEPT in plan.kept
    return status(plan, COLUMNS)


def test_few_rows(monkeypatch):
    """A launch costs more than the kept bytes."""
    monkeypatch.setattr(candidates, "_US_PER_LAUNCH", 3.0)
    assert declined(experts(), tokens(), **routing()) == (
        Status.SHADOWED,
        "by the forward pass, which keeps the result",
    )


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_row", "fp8_tensor"])
def test_scales_that_take_more_launches(recipe):
    reason = "its scales take more launches, which serve both forms in the forward pass"
    assert declined(experts(), tokens(), recipe, **routing(chosen=E)) == (Status.CONSTRAINT, reason)


def test_other_dtypes():
    found = declined(experts(dtype=torch.float32), tokens(dtype=torch.float32), **routing(chosen=E))
    assert found == (
        Status.CONSTRAINT,
        "input is float32, not bfloat16 or float16: convert the module, or run under torch.autocast",
    )


def test_widths_that_are_not_a_multiple_of_16():
    found = declined(experts(hidden=72), tokens(hidden=72), **routing())
    assert found == (Status.CONSTRAINT, "features 72 is not a multiple of 16")


def no_step(chain, x, recipe="fp8_block", **named):
    plan = plan_of(chain, x, recipe, **named)
    return COLUMNS not in rules_used(plan) and status(plan, COLUMNS)[0] is Status.NO_MATCH


def test_one_expert_per_token():
    """The tokens take more bytes than the columns."""
    chain, x, named = experts(), tokens(), routing(chosen=1)
    assert no_step(chain, x, **named)
    assert KEPT in plan_of(chain, x, **named).kept


def test_rows_in_order():
    chain = fm.Sequential(*[*experts()][1:5])
    x = torch.randn(90, H, dtype=BF16, requires_grad=True)
    named = {"splits": torch.tensor([30, 0, 50, 3]), "probs": torch.rand(90)}
    assert no_step(chain, x, **named)
    assert "0.input:columns" in plan_of(chain, x, **named).kept


def test_unquantized_weight_gradients():
    assert no_step(experts(), tokens(), "fp8_block:wgrad=bf16", **routing())


@pytest.mark.parametrize(
    "quantizer",
    [Quantizer(fp8_tensor(), delayed=Delayed()), Quantizer(nvfp4(), stochastic_rounding=True)],
    ids=["delayed", "stochastic"],
)
def test_quantizers_whose_results_differ(quantizer):
    assert fm.Quantize(fp8_block()).columns_again() is not None
    assert fm.Quantize(quantizer).columns_again() is None
    assert fm.Quantize(backward=fp8_block()).columns_again() is None
