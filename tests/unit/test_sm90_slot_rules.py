"""The rules for sm_90 that sort rows and bring them back, on the CPU: stand-ins compute what the kernels do."""

import inspect

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome, rules_used
from test_sm90_rules import BF16, assert_close, called, hopper_machine  # noqa: F401  (a fixture)

import fusedmoe as fm
from fusedmoe import FusionError, Status
from fusedmoe.expert_parallel.capacity import RowLimit
from fusedmoe.kernels.sm90 import products

T, K, E, H, I = 9, 2, 4, 32, 16  # noqa: E741
pytestmark = pytest.mark.usefixtures("builtin_rules")

FORWARD = ["sm90.dispatch", "sm90.grouped_gemm_activation", "sm90.grouped_gemm", "sm90.combine"]


@pytest.fixture(autouse=True)
def rows_in_order():
    """test_sm90_gather_rules.py has the rules that read rows through their index."""
    with fm.disabled("sm90.gathered_*"):
        yield


def experts(*, early=True, dtype=BF16, hidden=H, num_experts=E):
    return fm.Sequential(
        fm.Dispatch(),
        fm.GroupedLinear(num_experts, hidden, 2 * I, dtype=dtype),
        fm.SwiGLU(),
        *([fm.Scale("probs")] if early else []),
        fm.GroupedLinear(num_experts, I, hidden, dtype=dtype),
        fm.Combine(None if early else "probs"),
    )


def routing(*, sentinels=False, index_dtype=torch.int64, dtype=torch.float32, num_experts=E):
    index = torch.stack([torch.randperm(num_experts)[:K] for _ in range(T)])
    index[index == 1] = 2  # an expert without rows; some tokens choose another twice
    if sentinels:
        index[0, 1], index[3], index[5, 0] = num_experts, num_experts, -1
    weight = torch.rand(T, K).to(dtype).requires_grad_()
    return {"expert_index": index.to(index_dtype), "expert_weight": weight}


def tokens(dtype=BF16, hidden=H):
    return torch.randn(T, hidden, dtype=dtype).requires_grad_()


def both_ways(chain, x, **named):
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    stand_ins.calls.clear()
    with fm.strict():
        got = outcome(chain, x, **named)
    assert_close(got, expected)
    return only_plan(chain, x, **named)


@pytest.mark.parametrize("sentinels", [False, True], ids=["", "sentinels"])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("weight_dtype", [torch.float32, BF16])
def test_weighted_before_the_second_product(sentinels, index_dtype, weight_dtype):
    named = routing(sentinels=sentinels, index_dtype=index_dtype, dtype=weight_dtype)
    with fm.disabled("sm90.dactivation"):  # which converts no weights: with few rows, launches cost the most
        plan = both_ways(experts(), tokens(), **named)
    assert rules_used(plan) == [
        *FORWARD, "sm90.dcombine", "sm90.grouped_wgrad", "sm90.grouped_dgrad_activation", "sm90.grouped_wgrad",
        "sm90.grouped_dgrad", "sm90.dispatch_weight_grad", "sm90.ddispatch",
    ]  # fmt: skip
    assert called("gather_rows") == [{"scale": False}] * 2
    assert called("sum_slots") == [{"scale": False}] * 2


@pytest.mark.parametrize("sentinels", [False, True], ids=["", "sentinels"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, BF16])
def test_weighted_in_the_sum(sentinels, weight_dtype):
    plan = both_ways(experts(early=False), tokens(), **routing(sentinels=sentinels, dtype=weight_dtype))
    assert rules_used(plan) == [
        *FORWARD, "sm90.combine_weight_grad", "sm90.dcombine", "sm90.grouped_wgrad", "sm90.grouped_dgrad_activation",
        "sm90.grouped_wgrad", "sm90.grouped_dgrad", "sm90.dispatch_weight_grad", "sm90.ddispatch",
    ]  # fmt: skip
    assert called("gather_rows") == [{"scale": False}, {"scale": True}]
    assert called("sum_slots") == [{"scale": True}, {"scale": False}]


def fewer_rows(chain, given):
    """Let a chain have 11 rows, given as an argument, or 9, by its limit; return the further runtime inputs."""
    dispatch = chain[0]
    dispatch.num_experts = E
    if given:
        dispatch.runtime_inputs = (*dispatch.runtime_inputs, "local_rows")
        return {"local_rows": torch.empty(11, 0)}
    dispatch.limit = RowLimit(1, 1, None)
    return {}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_fewer_rows_than_slots(given, early):
    chain = experts(early=early)
    plan = both_ways(chain, tokens(), **routing(sentinels=True), **fewer_rows(chain, given))
    assert {"sm90.dispatch", "sm90.combine", "sm90.dcombine", "sm90.ddispatch"} <= set(rules_used(plan))
    assert len(called("gather_rows")) == 2


def test_rows_of_sentinels_are_never_read():
    """NaN in what a sentinel's slot brings stays out of everything."""
    chain, named = experts(early=False), routing(sentinels=True)
    with torch.no_grad():
        named["expert_weight"][0, 1] = torch.nan
    x = tokens()
    with torch.no_grad():
        x[3] = torch.nan  # whose slots are both sentinels
    got = outcome(chain, x, **named)
    for name, t in got.items():
        assert t.isfinite().all(), name
    assert not got["y"][3].any()
    assert not got["x"][3].any()


@pytest.mark.parametrize(("change", "reason"), [
    ({"dtype": torch.float32}, "x is float32, not bfloat16 or float16"),
    ({"hidden": 36}, "features 36 is not a multiple of 8"),
])  # fmt: skip
def test_what_rows_are_declined(change, reason):
    dtype, hidden = change.get("dtype", BF16), change.get("hidden", H)
    chain, named = experts(dtype=dtype, hidden=hidden), routing()
    plan = only_plan(chain, tokens(dtype, hidden), **named)
    for rule in ("sm90.dispatch", "sm90.combine", "sm90.dcombine", "sm90.ddispatch"):
        (attempt,) = [a for a in plan.attempts if a.rule == rule and a.status is Status.CONSTRAINT]
        assert reason in attempt.reason


def test_what_routings_are_declined():
    def reasons(named, num_experts=E):
        plan = only_plan(experts(num_experts=num_experts), tokens(), **named)
        return [a.reason for a in plan.attempts if a.rule == "sm90.dispatch" and a.status is Status.CONSTRAINT]

    assert reasons(routing(index_dtype=torch.int16)) == ["expert_index is int16, not int32 or int64: convert it"]
    assert reasons(routing(dtype=torch.float64)) == [
        "the row scale is float64, not float32, bfloat16 or float16: convert it"
    ]
    assert reasons(routing(num_experts=1025), 1025) == ["1025 experts, over 1024"]


def test_a_routing_that_is_not_contiguous_runs_unfused():
    chain, x, named = experts(), tokens(), routing()
    expected = outcome(chain, x, **named)
    named["expert_index"] = named["expert_index"].T.contiguous().T
    stand_ins.calls.clear()
    assert_close(outcome(chain, x, **named), expected)
    assert "route" not in called()
    with fm.strict(), pytest.raises(FusionError, match="expert_index or expert_weight is not contiguous"):
        chain(x, **named)


def test_a_gradient_that_is_expanded_is_copied():
    chain, x, named = experts(), tokens(), routing()
    stand_ins.calls.clear()
    with fm.strict():
        chain(x, **named).sum().backward()
    assert called("gather_rows") == [{"scale": False}] * 2
    assert x.grad.abs().sum() > 0


def test_no_tokens():
    chain = experts()
    x = torch.randn(0, H, dtype=BF16, requires_grad=True)
    named = {"expert_index": torch.zeros(0, K, dtype=torch.int64), "expert_weight": torch.zeros(0, K)}
    stand_ins.calls.clear()
    with fm.strict():
        y = chain(x, **named)
        y.sum().backward()
    assert y.shape == x.grad.shape == (0, H)
    assert not set(called()) & {"route", "gather_rows", "sum_slots"}


@pytest.mark.parametrize("early", [True, False], ids=["scale", "combine"])
def test_tokens_without_experts(early):
    """There are tokens, but no rows, and kernels with one warp per row cannot be launched."""
    chain, x = experts(early=early), tokens()
    named = {"expert_index": torch.zeros(T, 0, dtype=torch.int64), "expert_weight": torch.zeros(T, 0).requires_grad_()}
    stand_ins.calls.clear()
    with fm.strict():
        y = chain(x, **named)
        y.sum().backward()
    assert y.shape == x.grad.shape == (T, H)
    assert y.count_nonzero() == x.grad.count_nonzero() == 0
    assert named["expert_weight"].grad.shape == (T, 0)
    assert not set(called()) & {"route", "gather_rows", "sum_slots", "row_dots", "slot_values"}


def test_stand_ins_have_the_signatures_of_the_kernels(monkeypatch):
    monkeypatch.undo()
    kernels = {name: getattr(module, name) for name, module in stand_ins.PLACES.items()}
    assert {name for name in products.__all__ if name.startswith("bind_")} <= kernels.keys()
    for name, kernel in kernels.items():
        assert kernel is not stand_ins.BIND[name]
        ours, theirs = (len(inspect.signature(f).parameters) for f in (kernel, stand_ins.BIND[name]))
        assert ours == theirs, name
