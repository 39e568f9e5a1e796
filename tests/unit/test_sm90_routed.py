"""The rules for sm_90 that route, sort, gather and sum rows, and those that read rows through their index."""

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.compare import label, pairwise
from kit.sm90_machine import (
    BF16,
    FP8_WGRAD,
    E,
    H,
    I,
    K,
    T,
    assert_close,
    both_ways,
    called,
    operands,
    plan_of,
    routed,
    routing,
    strided,
)
from kit.toy import only_plan, outcome, rules_used, status

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.expert_parallel.capacity import RowLimit
from fusedmoe.fusion.search import candidates
from fusedmoe.kernels.sm90 import router as router_functions

pytestmark = pytest.mark.usefixtures("hopper_machine")

FP32, FP16 = torch.float32, torch.float16
GATHERED = "sm90.gathered_*"
LAST = ["sm90.dispatch_weight_grad", "sm90.ddispatch"]
ROUTED = ["sm90.dispatch", "sm90.gathered_gemm_activation", "sm90.grouped_gemm", "sm90.combine"]


def tokens(requires_grad=True, dtype=BF16, count=T):
    return torch.randn(count, H, dtype=dtype).requires_grad_(requires_grad)


def values(plan):
    return [rows for rows, _, _ in plan.gathered]


# ------------------------------------------------------------------------------------------ rows in order, and gathered

ROUTINGS = pairwise((False, True), (torch.int64, torch.int32), (FP32, BF16), (False, True), (True, False))


@pytest.mark.parametrize("case", ROUTINGS, ids=label)
def test_rows_are_written_once_or_not_at_all(case):
    sentinels, index, weight, early, in_order = case
    named = routing(sentinels=sentinels, index=index, weight=weight)
    off = ["sm90.dactivation"]  # which converts no weights: with few rows, launches cost the most
    with fm.disabled(*off, *([GATHERED] if in_order else [])):
        plan = both_ways(routed(early=early), tokens(), **named)
    of_weights = [] if early else ["sm90.combine_weight_grad"]
    if in_order:
        forward = ["sm90.dispatch", "sm90.grouped_gemm_activation", *ROUTED[2:]]
        middle = ["sm90.dcombine", "sm90.grouped_wgrad", "sm90.grouped_dgrad_activation", "sm90.grouped_wgrad"]
        assert values(plan) == []
        assert called("gather_rows") == [{"scale": False}, {"scale": not early}]
    elif early:
        forward = ROUTED
        middle = ["sm90.gathered_wgrad_dy", "sm90.gathered_dgrad_activation", "sm90.gathered_wgrad_x"]
        assert plan.gathered == (
            ("1.input", "0.input", "0.token_of_row"), ("grad(5.input)", "grad(5.output)", "0.token_of_row"),
        )  # fmt: skip
        assert "gather_rows" not in called()
        for name in ("gemm_activation", "wgrad_dy", "gemm_activation_backward", "wgrad_x"):
            assert called(f"gathered_{name}") == [{"source": T, "rows": T * K}]
    else:  # the gradient's rows are scaled: they are no rows of another value
        forward = ROUTED
        middle = ["sm90.dcombine", "sm90.grouped_wgrad", "sm90.grouped_dgrad_activation", "sm90.gathered_wgrad_x"]
        assert values(plan) == ["1.input"]
        assert called("gather_rows") == [{"scale": True}]
        declined = {(a.status, a.reason) for a in plan.attempts if a.rule == "sm90.gathered_dgrad_activation"}
        assert (Status.NO_MATCH, "grad_output: expected rows of another value") in declined
    assert rules_used(plan) == [*forward, *of_weights, *middle, "sm90.grouped_dgrad", *LAST]
    assert called("sum_slots") == [{"scale": not early}, {"scale": False}]


@pytest.mark.parametrize(("early", "given", "off"), pairwise((True, False), (11, None), ((), (GATHERED,))), ids=str)
def test_fewer_rows_than_slots(early, given, off):
    """Their number is that of an argument, or follows from a limit."""
    chain, named = routed(early=early), routing(sentinels=True)
    chain[0].num_experts = E
    if given is None:
        chain[0].limit = RowLimit(1, 1, None)
    else:
        chain[0].runtime_inputs = (*chain[0].runtime_inputs, "local_rows")
        named["local_rows"] = torch.empty(given, 0)
    with fm.disabled(*off):
        plan = both_ways(chain, tokens(), **named)
    if off:
        assert {"sm90.dispatch", "sm90.combine", "sm90.dcombine", "sm90.ddispatch"} <= {*rules_used(plan)}
        assert len(called("gather_rows")) == 2
    else:
        assert rules_used(plan)[:4] == ROUTED
        assert called("gathered_wgrad_x") == [{"source": T, "rows": given or 9}]


@pytest.mark.parametrize("off", [(), (GATHERED,)], ids=["gathered", "in order"])
def test_rows_of_sentinels_are_never_read(off):
    """NaN in what a sentinel's slot brings stays out of everything."""
    chain, x, named = routed(early=False), tokens(False), routing(sentinels=True)
    x[3] = torch.nan  # whose slots are both sentinels
    named["expert_weight"].data[0, 1] = torch.nan
    with fm.disabled(*off):
        got = outcome(chain, x.requires_grad_(), **named)
    assert all(t.isfinite().all() and t.any() for t in got.values())
    assert not got["y"][3].any()
    assert not got["x"][3].any()


def test_tokens_and_the_index_are_kept_and_read_in_place_of_the_rows():
    chain, x, named = routed(), tokens(), routing()
    gathered = only_plan(chain, x, **named)
    with fm.disabled(GATHERED):
        in_order = only_plan(chain, x, **named)
    assert {*gathered.kept} == {*in_order.kept} - {"1.input", "0.slot_of_row"} | {"0.input", "0.token_of_row"}
    saved = in_order.kept_bytes - gathered.kept_bytes
    assert saved == 2 * (T * K * H) + 8 * (T * K) - 2 * (T * H) - 4 * (T * K)
    by_index = "by the steps that read its rows through their index"
    assert status(gathered, "sm90.dcombine") == (Status.SHADOWED, by_index)


def test_what_is_not_wanted_is_not_computed():
    with torch.no_grad():
        plan = both_ways(routed(), tokens(False), **routing())
    assert rules_used(plan) == ROUTED
    assert values(plan) == ["1.input"]
    assert plan.kept == ()
    plan = both_ways(routed(), tokens(False), **routing())
    assert values(plan) == ["1.input", "grad(5.input)"]
    assert "sm90.gathered_wgrad_x" in rules_used(plan, "backward")
    assert "sm90.grouped_dgrad" not in rules_used(plan, "backward")
    plan = both_ways(routed().requires_grad_(False), tokens(), **routing(chosen=1))
    assert values(plan) == ["1.input", "grad(5.input)"]
    assert rules_used(plan, "backward") == ["sm90.gathered_dgrad_activation", "sm90.grouped_dgrad", *LAST]


def test_a_product_that_declines_makes_the_rows_without_sorting_again(monkeypatch):
    chain, x, named, compute = routed(), tokens(), routing(), fm.Dispatch.compute
    chain[1].weight = torch.nn.Parameter(strided(chain[1].weight.detach(), "pitch"))
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    dispatched = []
    monkeypatch.setattr(fm.Dispatch, "compute", lambda *of: dispatched.append(of) or compute(*of))
    stand_ins.calls.clear()
    assert_close(outcome(chain, x, **named), expected)
    assert values(only_plan(chain, x, **named)) == ["1.input", "grad(5.input)"]
    assert not dispatched
    assert "gathered_gemm_activation" not in called()
    assert "gathered_wgrad_x" in called()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.usefixtures("launches_cost_nothing")
def test_tokens_that_change_before_backward(recipe):
    """The tokens are kept, not a copy of their rows or codes: autograd checks that they are the same."""
    chain, x, named = routed(), tokens(), routing()
    changed = x * 1
    with fm.recipe(recipe):
        y = chain(changed, **named)
    changed += y
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed.float().sum().backward()


NOTHING = pairwise((True, False), ((0, K), (T, 0)), ((), (GATHERED,)))


@pytest.mark.parametrize(("early", "size", "off"), NOTHING, ids=str)
def test_no_tokens_or_no_experts(early, size, off):
    """There may be tokens, but no rows: kernels with one warp per row cannot be launched."""
    count, chosen = size
    chain, x = routed(early=early), tokens(count=count)
    named = {
        "expert_index": torch.zeros(count, chosen, dtype=torch.int64),
        "expert_weight": torch.zeros(count, chosen, requires_grad=True),
    }
    with fm.disabled(*off), fm.strict():
        y = chain(x, **named)
        y.sum().backward()
    assert y.shape == x.grad.shape == (count, H)
    assert y.count_nonzero() == x.grad.count_nonzero() == 0
    assert named["expert_weight"].grad.shape == (count, chosen)
    assert called() == []


class Permute(fm.Op):
    """Rows in another order, by an index."""

    runtime_inputs = ("order",)
    provides = ("row_index",)
    gathers = {"output": ("input", "row_index")}  # noqa: RUF012

    def infer(self, x, order):
        return fm.TensorSpec(tuple(x.shape), x.dtype), fm.TensorSpec(tuple(order.shape), order.dtype)

    def compute(self, x, order):
        return x[order], order.clone()


def test_the_index_is_int32():
    chain = fm.Sequential(Permute(), fm.GroupedLinear(E, H, H, dtype=BF16))
    splits, order = torch.tensor([3, 2, 0, 4]), torch.randperm(9)
    plan = only_plan(chain, tokens(), order=order, splits=splits)
    assert (Status.CONSTRAINT, "the index of the rows is int64, not int32") in {
        (a.status, a.reason) for a in plan.attempts if a.rule == "sm90.gathered_gemm"
    }
    plan = both_ways(chain, tokens(), order=order.to(torch.int32), splits=splits)
    # the op has written the rows, so the product reads them; the weight gradient saves that they are kept
    assert rules_used(plan) == ["sm90.grouped_gemm", "sm90.gathered_wgrad_x", "sm90.grouped_dgrad"]
    assert {"0.input", "0.row_index"} <= {*plan.kept}
    assert "1.input" not in plan.kept
    assert not plan.gathered


# --------------------------------------------------------------------- rows by columns, quantized again from the tokens

COLUMNS, KEPT = "sm90.gathered_quantize_columns", "1.input:columns"


@pytest.fixture
def launches_cost_nothing(monkeypatch):
    """The shapes here are small: a launch would cost more than the kept bytes."""
    monkeypatch.setattr(candidates, "_US_PER_LAUNCH", 0.0)


again = pytest.mark.usefixtures("launches_cost_nothing")


@again
def test_tokens_are_kept_in_place_of_columns():
    chain, x, named = routed(), tokens(), routing(sentinels=True)
    plan = both_ways(chain, x, "fp8_block", without=(COLUMNS,), bound=0, **named)
    assert called("quantize_rows") == [
        {"rows": True, "columns": False},  # the rows, forward
        {"rows": True, "columns": True},  # the gradient of the output
        {"rows": False, "columns": True},  # the rows, again
    ]
    assert called("gathered_quantize_rows") == [{"source": T, "rows": T * K}] * 3
    assert not plan.unfused
    with fm.disabled(COLUMNS):
        kept = plan_of(chain, x, "fp8_block", **named)
    assert {*kept.kept} - {*plan.kept} == {KEPT}
    assert {*plan.kept} - {*kept.kept} == {"0.input"}
    assert {*plan.kept} == {*only_plan(chain, x, **named).kept}, "those of bf16"
    steps = [(step.ops, step.direction, step.rule) for step in plan.steps]
    at = steps.index((("1:input.QuantizeColumns",), "backward", COLUMNS))
    assert steps[at + 1] == (("1.Wgrad",), "backward", FP8_WGRAD)
    step = plan.steps[at]
    assert (step.gives, step.needs, step.launches) == ((KEPT,), ("0.input", "0.offsets", "0.token_of_row"), 1)


@again
@pytest.mark.parametrize(("make", "recipe"), [(routed, "mxfp8"), (lambda: fm.MoE(H, I, E, K, dtype=BF16), "fp8_block")])
def test_columns_are_quantized_again(make, recipe):
    """The router of a whole layer keeps the tokens for its own weight gradient."""
    chain, x, named = make(), tokens(), routing() if make is routed else {}
    plan = both_ways(chain, x, recipe, without=(COLUMNS,), bound=0, **named)
    assert COLUMNS in rules_used(plan)
    assert not [name for name in plan.kept if name.endswith((KEPT, "gate_up.input:columns"))]
    assert named or plan.kept_bytes == only_plan(chain, x).kept_bytes, "as in bf16"
    if named:  # in plain PyTorch, where no kernel reads the tokens
        strided = torch.cat([x, x[:, :1]], 1).detach()[:, :-1].requires_grad_()
        both_ways(chain, strided, recipe, strict=False, without=(COLUMNS,), bound=0, **named)


def frozen_weights():
    chain = routed()
    chain[1].weight.requires_grad_(False)
    return chain


@again
@pytest.mark.parametrize(("make", "how", "recipe", "kept"), [
    (frozen_weights, {}, "fp8_block", False),  # nothing reads columns: neither they nor the tokens are kept
    (routed, {"chosen": 1}, "fp8_block", True),  # the tokens take more bytes than the columns
    (routed, {}, "fp8_block:wgrad=bf16", False),
])  # fmt: skip
def test_columns_are_not_quantized_again(make, how, recipe, kept):
    chain = make()
    x, named = operands(chain, **how)
    plan = plan_of(chain, x, recipe, **named)
    assert COLUMNS not in rules_used(plan)
    assert (KEPT in plan.kept) is kept
    assert not kept or status(plan, COLUMNS)[0] is Status.NO_MATCH


# ----------------------------------------------------------------------------------------------------------- the router

OPTIONS = {
    "softmax": {"bias": True},
    "not renormalised": {"renormalize": False, "scale": 2.5},
    "topk_softmax": {"score": "topk_softmax", "scale": 2.5},
    "sigmoid": {"score": "sigmoid", "renormalize": False, "balance_bias": True},
    "deepseek": {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5},
    "all groups": {"num_groups": 8, "top_groups": 8},
}


class Observe(fm.Op):
    """Adds a number to the rows that depends on the router's other values: most to the last columns."""

    def __init__(self, *names):
        super().__init__()
        self.runtime_inputs = names

    def compute(self, x, *values):
        total = sum((value * torch.linspace(1, 2, value.numel()).view_as(value)).sum() / len(x) for value in values)
        return (x + total * torch.linspace(0, 1, x.shape[1])).to(x.dtype)


class AfterOne(Observe):
    """The gradient of its value is a view that begins one number after the start of another tensor."""

    def compute(self, x, value):
        return super().compute(x, torch.cat([value.new_ones(1), value.flatten()]))


def router(dtype=BF16, num_experts=8, **options):
    made = fm.Router(H, num_experts, 3, dtype=dtype, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if made.balance_bias is not None:
        made.balance_bias.uniform_(-0.2, 0.2)
    return made


def layer(dtype=BF16, *observers, of=BF16, **options):
    return fm.Sequential(router(dtype, **options), *routed(num_experts=8, width=16, dtype=of), *observers)


def many(dtype=BF16, requires_grad=True):
    return tokens(requires_grad, dtype, 37)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_router_and_the_sort_are_one_step_in_each_direction(options, dtype):
    used = rules_used(both_ways(layer(dtype, **options), many()))
    assert used[:4] == ["sm90.router_dispatch", *ROUTED[1:]]
    assert used[-1] == "sm90.router_backward"
    assert not {"sm90.dispatch", *LAST} & {*used}
    assert called("route") == [{"counted": True}]
    assert called("logits_grad") == [{"blocks": router_functions.blocks_for(dtype), "rows": True}]
    assert {"scale": False, "adds": True} in called("sum_slots")
    assert not {"slot_values", "offsets_from_splits"} & {*called()}  # the sort writes the offsets


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_router_called_alone(options, dtype):
    """No gradient of the rows arrives: the product is the gradient of the tokens."""
    made, x = router(dtype, **options), many()

    def results():
        routing = made(x)
        torch.manual_seed(2)
        loss = sum((value * torch.randn_like(value)).sum() for value in routing[1:])
        gradients = torch.autograd.grad(loss, [x, *made.parameters()])
        return routing._asdict() | dict(zip(("x", "weight", "bias"), gradients, strict=False))

    with fm.disabled("*"):
        expected = results()
    stand_ins.calls.clear()
    with fm.strict():
        assert_close(results(), expected)
    assert called() == ["router", "logits_grad", "router_wgrad", "router_dgrad"]
    assert called("router")[0]["want_sums"] is False


@pytest.mark.parametrize(("observe", "options"), [
    (Observe("probs_sum"), {"score": "sigmoid"}), (AfterOne("router_logits"), {}),
    (Observe("z_sum", "probs_sum", "router_logits"), {"score": "topk_softmax", "bias": True}),
])  # fmt: skip
def test_values_for_losses(observe, options):
    used = rules_used(both_ways(layer(BF16, observe, **options), many()))
    assert {"sm90.router_dispatch", "sm90.router_backward"} <= {*used}
    assert called("router")[0]["want_sums"] is ("probs_sum" in observe.runtime_inputs)


def test_a_router_without_experts():
    chain = fm.Sequential(router(num_experts=64, num_groups=64, top_groups=64), Observe("router_logits", "probs_sum"))
    assert rules_used(both_ways(chain, many())) == ["sm90.router", "sm90.router_backward"]


@pytest.mark.parametrize("frozen", [("0.weight",), ("0.",), ("x",), ("1", "2", "5"), ("0.", "2", "5"), ("0.", "x"),
                                    ("x", "2", "5")], ids=str)  # fmt: skip
def test_frozen_parts_of_the_router(frozen):
    chain = layer(bias=True)
    for name, parameter in chain.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    used = rules_used(both_ways(chain, many(requires_grad="x" not in frozen)))
    assert ("sm90.router_backward" in used) is (frozen != ("0.", "x"))
    assert (called("router_wgrad") != []) is {"0.", "0.weight"}.isdisjoint(frozen)
    assert (called("router_dgrad") != []) is ("x" not in frozen)


def test_the_parts_of_a_span_that_another_rule_takes():
    """Without the rule of the whole span, the remaining steps are those of the other rules and plain ones."""
    with fm.disabled("sm90.router_dispatch"):
        assert rules_used(both_ways(layer(), many()))[:2] == ["sm90.router", "sm90.dispatch"]
    with fm.disabled("sm90.router_backward"):
        assert rules_used(both_ways(layer(), many(), strict=False))[-2:] == LAST
    # the gradient of weights that another op reads is a sum: the step begins after `DispatchWeightGrad`
    used = rules_used(both_ways(layer(BF16, Observe("expert_weight")), many(), strict=False))
    assert used[-1] == "sm90.router_backward"
    assert called("logits_grad")[0]["rows"] is False


def test_fp16_runs_forward_alone():
    used = rules_used(both_ways(layer(FP16, of=FP16), many(FP16), strict=False))
    assert "sm90.router_dispatch" in used
    assert "sm90.router_backward" not in used


def test_no_tokens():
    x = tokens(count=0)
    with fm.strict():
        layer()(x).sum().backward()
    assert x.grad.shape == (0, H)
    assert not {"router", "route", "logits_grad"} & {*called()}
