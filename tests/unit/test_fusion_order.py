"""Steps that run beside each other: which ones, in which order, and how long their values live."""

import pytest
import torch
from kit.toy import assert_same, bound, dgrad_dglu, experts, inputs, only_plan, outcome, refuse, rule, wgrad
from kit.toy import rows as tokens

import fusedmoe as fm
from fusedmoe.builtin_rules.rows import dispatch
from fusedmoe.call.partition import partition_for
from fusedmoe.fusion.graph.steps import Fused
from fusedmoe.fusion.program import order
from fusedmoe.fusion.program.order import Pair, in_order, pairs_of
from fusedmoe.kernels.torch.grouped_gemm import grouped_mm_dgrad
from fusedmoe.ops import Dgrad

# ---- steps alone --------------------------------------------------------------------------------------------------


def step(label, needs, gives, light_us=0.0, carries_us=0.0):
    return Fused(
        label=label, rule=label, binder=lambda sms: bound(lambda *_: None), needs=tuple(needs), gives=tuple(gives),
        may_give_none=False, zeroes_tail=True, launches=1, fallback=(), light_us=light_us, carries_us=carries_us,
    )  # fmt: skip


def labels(units):
    return [" || ".join(s.label for s in unit) for unit in units]


FIRST = step("first", "a", "b")
LIGHT = step("light", "b", "x", light_us=900.0)
LONG = step("long", "a", "y", carries_us=100.0)
LAST = step("last", "by", "z")


def test_a_pair_comes_as_soon_as_its_values_exist():
    steps = [LONG, LAST, FIRST, LIGHT]
    assert labels(in_order(steps, {"a"})) == ["long", "first", "last", "light"]
    assert labels(in_order(steps, {"a"}, [Pair(LIGHT, LONG, 8)])) == ["first", "light || long", "last"]


@pytest.mark.parametrize(
    ("us", "bytes_of_w", "chosen"), [(200.0, 1000, "other"), (100.0, 1000, "long"), (100.0, 0, "other")]
)
def test_the_longest_carrier_then_that_with_which_the_fewest_bytes_live_at_once(us, bytes_of_w, chosen):
    other = step("other", "a", "w", carries_us=us)
    nbytes = {"a": 0, "b": 500, "w": bytes_of_w}
    (pair,) = pairs_of([FIRST, LONG, other, LIGHT], {"a"}, ["x", "y", "w"], lambda v: nbytes.get(v, 1))
    assert (pair.light.label, pair.carrier.label) == ("light", chosen)


def test_no_pair_where_more_bytes_would_live_at_once():
    # in order, b is gone before y comes
    steps = [FIRST, LIGHT, LONG]
    assert labels(in_order(steps, {"a"})) == ["first", "light", "long"]
    assert not pairs_of(steps, {"a"}, ["x", "y"], {"a": 0, "b": 10, "x": 1, "y": 5}.__getitem__)
    assert pairs_of(steps, {"a"}, ["x", "y"], {"a": 0, "b": 10, "x": 1, "y": 0}.__getitem__)


@pytest.mark.parametrize(
    ("light", "carrier"),
    [
        (LIGHT, step("long", "x", "y", carries_us=100.0)),  # it reads the light step's result
        (step("light", "y", "x", light_us=900.0), LONG),  # the other way round
        (step("light", "b", "x"), LONG),
        (LIGHT, step("long", "a", "y")),
        (step("light", "b", "x", light_us=order.MOST_SMS * 100.0), LONG),  # as long on that many SMs
    ],
)
def test_steps_that_are_no_pair(light, carrier):
    assert not pairs_of([FIRST, carrier, light], {"a"}, ["x", "y"], lambda v: 1)


def test_each_step_is_in_one_pair_at_most():
    again = step("again", "b", "v", light_us=900.0)
    longer = step("longer", "a", "w", carries_us=200.0)
    results = ["x", "y", "v", "w"]
    (pair,) = pairs_of([FIRST, LIGHT, again, LONG], {"a"}, results, lambda v: 0)
    assert pair[:2] == (LIGHT, LONG)
    pairs = pairs_of([FIRST, LIGHT, again, LONG, longer], {"a"}, results, lambda v: 0)
    assert [pair[:2] for pair in pairs] == [(LIGHT, longer), (again, LONG)]


def test_two_pairs_of_which_each_would_wait_for_the_other():
    light = step("light", "a", "b", light_us=900.0)
    other = step("other", "a", "c", light_us=900.0)
    after_light = step("after light", "b", "y", carries_us=100.0)
    after_other = step("after other", "c", "z", carries_us=100.0)
    (pair,) = pairs_of([light, other, after_light, after_other], {"a"}, ["y", "z"], lambda v: 0)
    assert pair[:2] == (light, after_other)


# ---- plans --------------------------------------------------------------------------------------------------------


def noted(made, label, seen):
    """The rule, which notes the `beside_sms` that it is built for."""
    plain = made.build

    def build(self, ctx, keep):
        seen.append((label, ctx.beside_sms))
        return plain(self, ctx, keep)

    made.build = build
    return made


def light_dgrad(seen, guard=None):
    """The gradient of the rows, as a light step."""
    made = rule(
        "toy.light_dgrad", {"dgrad": Dgrad}, ("grad_output", "dgrad.weight", "offsets"), ("grad_input",),
        run=lambda self, keep: lambda dy, weight, offsets: grouped_mm_dgrad(dy.contiguous(), weight, offsets),
        direction="backward", guard=guard, zeroes_tail=True, light_us=900.0,
    )  # fmt: skip
    return noted(made, "light", seen)


def carrying_wgrad(seen, guard=None):
    return noted(wgrad(guard=guard, carries_us=100.0), "carrier", seen)


@pytest.fixture
def rules():
    """The two rules, with the derivative between them, and what they note."""
    seen = []
    with fm.register(dgrad_dglu(), light_dgrad(seen), carrying_wgrad(seen)):
        yield seen


def test_the_text_of_a_pair(rules):
    plan = only_plan(experts(), tokens(), **inputs())
    assert plan.beside == (("toy.light_dgrad", "toy.wgrad", 16),)
    assert "beside each other: the last launch of toy.light_dgrad, on 16 SMs, and toy.wgrad\n" in str(plan)
    lines = [line.strip() for line in plan.backward_source.splitlines() if not line.startswith("        ")]
    skipped = ("try:", "except", "report", "if run", "def", "given")
    assert [line for line in lines if not line.startswith(skipped)] == [
        "offsets, _2_weight, _1_input, _0_input, _0_weight, grad_2_output, = given",
        "del _2_weight, _1_input",
        "# its last launch runs beside the next step",
        # what the light step reads lives until its carrier is launched
        "del _0_weight, grad_2_output, _2_input",
        "del offsets, _0_input, grad_1_input",
        "return (grad_0_input, None, grad_0_weight, None, grad_2_weight, None, ),",
    ]
    calls = [line.strip() for line in plan.backward_source.splitlines() if "= run" in line and "None" not in line]
    assert [call.split(" = ")[0] for call in calls] == [
        "grad_1_input, _2_input", "grad_0_input", "grad_2_weight", "grad_0_weight",
    ]  # fmt: skip


def test_both_steps_of_a_pair_are_built_for_it(rules):
    chain, x, named = experts(), tokens(), inputs()
    got = outcome(chain, x, **named)
    assert rules == [("carrier", 0), ("carrier", 0), ("light", 0), ("light", 16), ("carrier", 16)]
    with fm.disabled("toy.*"):
        assert_same(got, outcome(chain, x, **named))


def test_a_step_without_its_partner_runs_alone(rules):
    chain = experts()
    chain(tokens(), **inputs())
    (part,) = partition_for(chain).parts
    (plan,) = part.chain.table.plans.values()
    every = tuple(argument in plan.wanted for argument in plan.graph.arguments)
    assert len(plan.backward(every).program.pairs) == 1
    only_rows = plan.backward((True, *[False] * (len(every) - 1))).program
    assert not only_rows.pairs
    assert "beside" not in only_rows.source


@pytest.mark.parametrize("guards", [(refuse, None), (None, refuse)], ids=["light", "carrier"])
def test_a_partner_that_declines_the_call(guards):
    chain, x, named = experts(), tokens(), inputs()
    with fm.register(dgrad_dglu(), light_dgrad([], guards[0]), carrying_wgrad([], guards[1])):
        assert only_plan(chain, x, **named).beside
        got = outcome(chain, x, **named)
    assert_same(got, outcome(chain, x, **named))


def test_no_pairs_where_torch_fills_new_tensors(rules):
    torch.use_deterministic_algorithms(True)
    try:
        assert not only_plan(experts(), tokens(), **inputs()).beside
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("readable", "sms"), [(True, 16), (False, 0)])
def test_a_sum_of_copied_rows_runs_alone(readable, sms, monkeypatch):
    """The memory of the copy is free when the call returns, while the next step may still read it."""
    launched = []

    def bind_sum_slots(rows, row_of_slot, scale, addend, sms):
        return lambda rows, *_: launched.append((rows.is_contiguous(), sms))

    monkeypatch.setattr(dispatch.slot_functions, "bind_sum_slots", bind_sum_slots)
    rows = torch.ones(8, 64, dtype=torch.bfloat16)
    rows = rows if readable else rows[:1, :1].expand(8, 64)  # as autograd gives the gradient of a sum
    row_of_slot = torch.arange(8).view(4, 2)
    dispatch.bind_sum(rows, row_of_slot, None, 16)(rows, row_of_slot)
    assert launched == [(True, sms)]
