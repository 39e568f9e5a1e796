"""The rules for sm_90 that read rows through their index, on the CPU: plans, and results with stand-ins.

The stand-ins make the rows before they compute, so that a wrong operand or index shows.
"""

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome, rules_used, status
from test_sm90_rules import BF16, assert_close, called, hopper_machine  # noqa: F401  (a fixture)
from test_sm90_slot_rules import E, H, I, K, T, experts, fewer_rows, routing, tokens

import fusedmoe as fm
from fusedmoe import FusionError, Status

pytestmark = pytest.mark.usefixtures("builtin_rules")

ROUTED = ["sm90.dispatch", "sm90.gathered_gemm_activation", "sm90.grouped_gemm", "sm90.combine"]
LAST = ["sm90.dispatch_weight_grad", "sm90.ddispatch"]


def both_ways(chain, x, **named):
    """Check a call against the unfused one, and that no rows are written which the plan says are not."""
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    stand_ins.calls.clear()
    with fm.strict():
        got = outcome(chain, x, **named)
    assert_close(got, expected)
    return only_plan(chain, x, **named)


def results(plan, rule):
    return {(a.status, a.reason) for a in plan.attempts if a.rule == rule}


def values(plan):
    return [rows for rows, _, _ in plan.gathered]


@pytest.mark.parametrize("sentinels", [False, True], ids=["", "sentinels"])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("weight_dtype", [torch.float32, BF16])
def test_rows_are_neither_written_nor_kept(sentinels, index_dtype, weight_dtype):
    named = routing(sentinels=sentinels, index_dtype=index_dtype, dtype=weight_dtype)
    with fm.disabled("sm90.dactivation"):  # which converts no weights: with few rows, launches cost the most
        plan = both_ways(experts(), tokens(), **named)
    assert rules_used(plan) == [
        *ROUTED, "sm90.gathered_wgrad_dy", "sm90.gathered_dgrad_activation", "sm90.gathered_wgrad_x",
        "sm90.grouped_dgrad", *LAST,
    ]  # fmt: skip
    assert plan.gathered == (
        ("1.input", "0.input", "0.token_of_row"),
        ("grad(5.input)", "grad(5.output)", "0.token_of_row"),
    )
    assert "gather_rows" not in called()
    for name in (
        "gathered_gemm_activation",
        "gathered_wgrad_dy",
        "gathered_gemm_activation_backward",
        "gathered_wgrad_x",
    ):
        assert called(name) == [{"source": T, "rows": T * K}]


@pytest.mark.parametrize(("given", "rows"), [(True, 11), (False, 9)])
def test_fewer_rows_than_slots(given, rows):
    chain = experts()
    plan = both_ways(chain, tokens(), **routing(sentinels=True), **fewer_rows(chain, given))
    assert rules_used(plan)[:4] == ROUTED
    assert called("gathered_wgrad_x") == [{"source": T, "rows": rows}]


def test_what_is_kept():
    """The tokens and the index are kept in place of the rows."""
    chain, x, named = experts(), tokens(), routing()
    gathered = only_plan(chain, x, **named)
    with fm.disabled("sm90.gathered_*"):
        rows = only_plan(chain, x, **named)
    assert "1.input" in rows.kept
    assert {"0.input", "0.token_of_row"}.isdisjoint(rows.kept)
    assert {*gathered.kept} == {*rows.kept} - {"1.input", "0.slot_of_row"} | {"0.input", "0.token_of_row"}
    assert rows.kept_bytes - gathered.kept_bytes == 2 * (T * K * H) + 8 * (T * K) - 2 * (T * H) - 4 * (T * K)


def test_the_explanation_names_the_rows_and_their_source():
    chain, x, named = experts(), tokens(), routing()
    plan = only_plan(chain, x, **named)
    text = " ".join(str(plan).split())
    assert (
        "read through an index, not written: 1.input from 0.input by 0.token_of_row, grad(5.input) from "
        "grad(5.output) by 0.token_of_row"
    ) in text
    assert "DCombine" not in text
    (first,) = [s for s in plan.steps if s.rule == "sm90.gathered_gemm_activation"]
    assert first.needs == ("0.input", "1.weight", "1.bias", "0.offsets", "0.probs", "0.token_of_row")
    assert status(plan, "sm90.dcombine") == (Status.SHADOWED, "by the steps that read its rows through their index")
    with fm.disabled("sm90.gathered_*"):
        rows = only_plan(chain, x, **named)
    assert "read through an index" not in str(rows)
    # the rows count as read either way, the index only here; Dispatch writes, and reads x, for rows in order only
    (in_order,) = [s for s in rows.steps if s.rule == "sm90.grouped_gemm_activation"]
    assert first.bytes_moved - in_order.bytes_moved == 4 * T * K
    written, unwritten = rows.steps[0], plan.steps[0]
    assert written.bytes_moved - unwritten.bytes_moved == 2 * (T * K * H) + 2 * (T * H)
    assert (written.launches, unwritten.launches) == (3, 2)


@pytest.mark.parametrize("weight_dtype", [torch.float32, BF16])
def test_weighted_in_the_sum(weight_dtype):
    """The gradient's rows are scaled: they are no rows of another value."""
    plan = both_ways(experts(early=False), tokens(), **routing(dtype=weight_dtype))
    assert values(plan) == ["1.input"]
    assert {"sm90.dcombine", "sm90.grouped_dgrad_activation", "sm90.gathered_wgrad_x"} <= {*rules_used(plan)}
    assert called("gather_rows") == [{"scale": True}]
    assert results(plan, "sm90.gathered_dgrad_activation") >= {(
        Status.NO_MATCH, "grad_output: expected rows of another value",
    )}  # fmt: skip


def test_a_bias_gradient_reads_the_gradients_rows_in_order():
    chain = fm.Sequential(
        fm.Dispatch(), fm.GroupedLinear(E, H, 2 * I, bias=True, dtype=BF16), fm.SwiGLU(), fm.Scale("probs"),
        fm.GroupedLinear(E, I, H, bias=True, dtype=BF16), fm.Combine(None),
    )  # fmt: skip
    plan = both_ways(chain, tokens(), **routing())
    assert values(plan) == ["1.input"]
    assert [r for r in rules_used(plan) if "gathered" in r] == [
        "sm90.gathered_gemm_activation",
        "sm90.gathered_wgrad_x",
    ]
    assert called("gather_rows") == [{"scale": False}]


def costs(monkeypatch, **of_rules):
    for rule in fm.rules():
        if rule.gathers:
            monkeypatch.setattr(rule, "gather_cost", of_rules.get(rule.__name__, 1.0))


def test_a_high_cost_of_gathering_makes_rows_in_order_win(monkeypatch):
    chain, x, named = experts(), tokens(), routing()
    with fm.disabled("sm90.gathered_*"):
        in_order = rules_used(only_plan(chain, x, **named))
    costs(monkeypatch, GatheredGemmActivation=1e6, GatheredWgradX=1e6)
    plan = only_plan(experts(), x, **named)
    assert values(plan) == ["grad(5.input)"]
    costs(monkeypatch, GatheredGemmActivation=1e6)  # rows in order forward, tokens kept for backward
    with fm.disabled("sm90.activation"):
        plan = only_plan(experts(), x, **named)
    assert rules_used(plan)[:2] == ["sm90.dispatch", "sm90.grouped_gemm_activation"]
    assert "sm90.gathered_wgrad_x" in rules_used(plan)
    assert "1.input" not in plan.kept
    costs(monkeypatch, **dict.fromkeys([rule.__name__ for rule in fm.rules()], 1e6))
    assert rules_used(only_plan(experts(), x, **named)) == in_order


def test_inference():
    chain, x, named = experts(), tokens().detach(), routing()
    with torch.no_grad():
        plan = both_ways(chain, x, **named)
    assert rules_used(plan) == ROUTED
    assert values(plan) == ["1.input"]
    assert plan.kept == ()


def test_frozen_weights():
    chain, named = experts(), routing()
    for p in chain.parameters():
        p.requires_grad_(False)
    plan = both_ways(chain, tokens(), **named)
    assert values(plan) == ["1.input", "grad(5.input)"]
    assert rules_used(plan, "backward") == ["sm90.gathered_dgrad_activation", "sm90.grouped_dgrad", *LAST]


def test_frozen_tokens():
    plan = both_ways(experts(), tokens().detach(), **routing())
    assert values(plan) == ["1.input", "grad(5.input)"]
    assert "sm90.gathered_wgrad_x" in rules_used(plan, "backward")
    assert "sm90.grouped_dgrad" not in rules_used(plan, "backward")


def test_one_expert_per_token():
    named = {"expert_index": torch.randint(0, E, (T, 1)), "expert_weight": torch.rand(T, 1, requires_grad=True)}
    plan = both_ways(experts(), tokens(), **named)
    assert values(plan) == ["1.input", "grad(5.input)"]


def test_a_layer_alone():
    """One product reads both: its rows forward, its gradient's backward. One operand of a weight gradient at most."""
    chain = fm.Sequential(fm.Dispatch(), fm.GroupedLinear(E, H, H, dtype=BF16), fm.Combine(None))
    named = routing()
    named["expert_weight"].requires_grad_(False)
    plan = both_ways(chain, tokens(), **named)
    assert rules_used(plan)[:2] == ["sm90.dispatch", "sm90.gathered_gemm"]
    assert {"sm90.gathered_dgrad", "sm90.gathered_wgrad_x", "sm90.gathered_wgrad_dy"} & {*rules_used(plan)}
    assert len(called("gather_rows")) == 1


def test_main_grad():
    chain, x, named = experts(), tokens(), routing()
    want = outcome(chain, x, **named)["1.weight"].float()
    for layer in (chain[1], chain[4]):
        layer.accumulate_into_main_grad = True
        layer.weight.main_grad = torch.ones(layer.weight.shape)
    outcome(chain, x, **named)
    assert {"sm90.gathered_wgrad_x", "sm90.gathered_wgrad_dy"} <= {*rules_used(only_plan(chain, x, **named))}
    error = chain[1].weight.main_grad - 1 - want
    assert error.norm() < 0.01 * want.norm()


def test_the_whole_layer():
    layer = fm.MoE(H, I, E, K, dtype=BF16)
    x = tokens()
    with fm.disabled("*"):
        expected = outcome(layer, x)
    with fm.strict():
        assert_close(outcome(layer, x), expected)
    first, second = layer.explain(x, arch=90).steps[:2]
    assert (first.rule, second.rule) == ("sm90.router_dispatch", "sm90.gathered_gemm_activation")
    # the router reads the tokens; to write the rows, a launch would read them again
    with fm.disabled("sm90.gathered_*"):
        writes_rows = layer.explain(x, arch=90).steps[0]
    assert first.bytes_moved > 2 * (T * H)
    assert writes_rows.bytes_moved - first.bytes_moved == 2 * (T * K * H) + 2 * (T * H)
    assert writes_rows.launches - first.launches == 1


def test_second_derivatives_run_from_the_tokens():
    chain, named = experts(), routing()
    x = tokens()

    def squared():
        (dx,) = torch.autograd.grad(chain(x, **named).float().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.float().square().sum(), chain[1].weight)[0]

    got = squared()
    with fm.disabled("*"):
        want = squared()
    assert want.abs().sum() > 0
    assert (got - want).float().norm() < 0.02 * want.float().norm()


def test_a_product_that_declines_makes_the_rows_without_sorting_again(monkeypatch):
    chain, x, named = experts(), tokens(), routing()
    dispatch = []
    compute = fm.Dispatch.compute

    def watched(self, *args):
        dispatch.append(args)
        return compute(self, *args)

    wide = torch.nn.Parameter(torch.randn(E, 2 * I, H + 4).to(BF16)[..., :H])  # no pitch of 16 bytes
    chain[1].weight = wide
    plan = only_plan(chain, x, **named)
    assert values(plan) == ["1.input", "grad(5.input)"]
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    stand_ins.calls.clear()
    monkeypatch.setattr(fm.Dispatch, "compute", watched)
    got = outcome(chain, x, **named)
    assert_close(got, expected)
    assert not dispatch
    assert "gathered_gemm_activation" not in called()
    assert "gathered_wgrad_x" in called()
    with fm.strict(), pytest.raises(FusionError, match="the weight"):
        chain(x, **named)


def test_unreadable_tokens_are_sorted_by_kernels():
    """The sort does not read the tokens, unless it also writes their rows."""
    chain, named = experts(), routing()
    x = torch.randn(T, H + 1).to(BF16)[:, :H]  # no pitch of 16 bytes
    with torch.no_grad():
        with fm.disabled("*"):
            expected = chain(x, **named)
        for rules, sorts in (((), True), (("sm90.gathered_*",), False)):
            stand_ins.calls.clear()
            with fm.disabled(*rules):
                got = chain(x, **named)
            assert expected.any()
            assert_close({"y": got}, {"y": expected})
            assert ("route" in called()) is sorts
            assert "gathered_gemm_activation" not in called()


def test_tokens_too_far_apart_are_gathered_by_plain_pytorch():
    """The stride of a single row may be any number."""
    chain, named = experts(), {"expert_index": torch.tensor([[2, 0]]), "expert_weight": torch.rand(1, K)}
    x = torch.randn(H, dtype=BF16).as_strided((1, H), (2**30, 1))
    with torch.no_grad():
        with fm.disabled("*"):
            expected = chain(x, **named)
        stand_ins.calls.clear()
        got = chain(x, **named)
        assert expected.any()
        assert_close({"y": got}, {"y": expected})
        assert "gathered_gemm_activation" not in called()
        with fm.strict(), pytest.raises(FusionError, match="gathered rows are 1073741824 elements apart"):
            chain(x, **named)


def test_tokens_that_change_before_backward():
    """The tokens are kept, not a copy of their rows: autograd checks that they are the same."""
    chain, x, named = experts(), tokens(), routing()
    changed = x * 1
    y = chain(changed, **named)
    changed += y
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.float().sum().backward()


def test_no_tokens():
    chain = experts()
    x = torch.randn(0, H, dtype=BF16, requires_grad=True)
    named = {"expert_index": torch.zeros(0, K, dtype=torch.int64), "expert_weight": torch.zeros(0, K)}
    with fm.strict():
        y = chain(x, **named)
        y.sum().backward()
    assert y.shape == x.grad.shape == (0, H)
    assert not any("gathered" in name for name in called())


def test_no_experts_per_token():
    chain, x = experts(), tokens()
    named = {"expert_index": torch.zeros(T, 0, dtype=torch.int64), "expert_weight": torch.zeros(T, 0)}
    with fm.strict():
        y = chain(x, **named)
        y.sum().backward()
    assert y.shape == x.shape
    assert not y.any()
    assert not x.grad.any()


def test_rows_that_dispatch_does_not_make_are_read_in_order():
    """An op between Dispatch and the layer, and one between the layer and Combine."""

    class Doubled(fm.Op):
        def compute(self, x):
            return 2 * x

    layers = [*experts()]
    chain = fm.Sequential(layers[0], Doubled(), *layers[1:5], Doubled(), layers[5])
    x, named = tokens(), routing()
    plan = only_plan(chain, x, **named)
    assert not plan.gathered
    assert not [rule for rule in rules_used(plan) if "gathered" in rule]
    for rule in ("sm90.gathered_gemm_activation", "sm90.gathered_wgrad_x", "sm90.gathered_dgrad_activation"):
        assert {a for a, _ in results(plan, rule)} == {Status.NO_MATCH}


def test_products_of_quantized_operands_are_not_gathered():
    """The steps that quantize read the rows through their index."""
    with fm.recipe("mxfp8"):
        plan = only_plan(experts(), tokens(), **routing())
    gathered = {rule for rule in rules_used(plan) if "gathered" in rule}
    assert gathered == {"sm90.gathered_quantize", "sm90.gathered_quantize_grad"}


class Permute(fm.Op):
    """Rows in another order, by an int64 index."""

    runtime_inputs = ("order",)
    provides = ("row_index",)
    gathers = {"output": ("input", "row_index")}  # noqa: RUF012

    def infer(self, x, order):
        return fm.TensorSpec(tuple(x.shape), x.dtype), fm.TensorSpec(tuple(order.shape), order.dtype)

    def compute(self, x, order):
        return x[order], order.clone()


def test_the_index_is_int32():
    chain = fm.Sequential(Permute(), fm.GroupedLinear(E, H, H, dtype=BF16))
    splits = torch.tensor([3, 2, 0, 4])
    order = torch.randperm(9)
    plan = only_plan(chain, tokens(), order=order, splits=splits)
    assert (Status.CONSTRAINT, "the index of the rows is int64, not int32") in results(plan, "sm90.gathered_gemm")
    plan = both_ways(chain, tokens(), order=order.to(torch.int32), splits=splits)
    # the op has written the rows, so the product reads them; the weight gradient saves that they are kept
    assert rules_used(plan) == ["sm90.grouped_gemm", "sm90.gathered_wgrad_x", "sm90.grouped_dgrad"]
    assert {"0.input", "0.row_index"} <= {*plan.kept}
    assert "1.input" not in plan.kept
    assert not plan.gathered
