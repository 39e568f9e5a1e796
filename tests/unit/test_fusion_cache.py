"""The plan cache: one plan for one kind of call, and a new one for everything that a rule may look at."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from kit import toy
from kit.toy import E, H, I, experts, gemm, inputs, rows

import fusedmoe as fm
from fusedmoe.base import changes
from fusedmoe.call.partition import partition_for


@dataclass(frozen=True)
class Tuned(fm.Recipe):
    name: str = "tuned"
    block: int = 128


def plans(chain):
    return [plan for part in partition_for(chain).parts for plan in part.chain.table.plans.values()]


@pytest.fixture
def called():
    """A scaled chain that was called once, and what it was called with."""
    chain = experts(scale=True)
    x, named = rows(), inputs(scale=True)
    chain(x, **named)
    assert len(plans(chain)) == 1
    return chain, x, named


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_same_kind_of_call_has_the_same_plan(called):
    chain, x, named = called
    (plan,) = plans(chain)
    chain(x, **named)
    chain(torch.randn_like(x).requires_grad_(), **named)
    chain(rows(15), splits=torch.tensor([0, 0, 15]), probs=torch.rand(15, dtype=torch.float64, requires_grad=True))
    chain.explain(x, **named)
    with fm.strict(), fm.recipe("bf16"), fm.disabled():
        chain(x, **named)
    assert plans(chain) == [plan]
    assert plans(chain)[0] is plan


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: fm.recipe(Tuned()),
        lambda: fm.disabled("nothing.*"),
        lambda: fm.register(gemm("toy.unrelated", launches=99)),
        deterministic,
    ],
    ids=["no grad", "inference mode", "recipe", "disabled pattern", "new rule", "deterministic"],
)
def test_what_holds_around_a_call(called, context):
    chain, x, named = called
    with context():
        chain(x, **named)
        assert len(plans(chain)) == 2
        chain(x, **named)
        assert len(plans(chain)) == 2


def test_the_environment(called, monkeypatch):
    chain, x, named = called
    monkeypatch.setenv("FUSEDMOE_DISABLE", "nothing")
    chain(x, **named)
    assert len(plans(chain)) == 2


def test_a_value_of_the_recipe(called):
    chain, x, named = called
    for recipe, expected in [(Tuned(), 2), (Tuned(block=128), 2), (Tuned(block=64), 3), (fm.Recipe(), 3)]:
        with fm.recipe(recipe):
            chain(x, **named)
        assert len(plans(chain)) == expected


def test_an_attribute_of_an_op(called):
    chain, x, named = called
    y = chain(x, **named)
    chain[1].limit = 0.01
    limited = chain(x, **named)
    assert not torch.equal(limited, y)
    assert len(plans(chain)) == 2
    chain[1].limit = None
    assert torch.equal(chain(x, **named), y)
    assert len(plans(chain)) == 2


def test_an_attribute_that_comes_and_goes(called):
    chain, x, named = called
    chain[1].note = "fast"
    chain(x, **named)
    assert len(plans(chain)) == 2
    del chain[1].note
    chain[1].hint = "fast"
    chain(x, **named)
    assert len(plans(chain)) == 3
    del chain[1].hint
    chain(x, **named)
    assert len(plans(chain)) == 3


def test_a_parameter_that_is_set_is_no_change_of_an_op(called):
    """FSDP2 sets every parameter twice in every step: what is known of the ops still holds."""
    chain, x, named = called
    before = changes.count
    chain[0].weight = torch.nn.Parameter(torch.randn_like(chain[0].weight))
    assert changes.count == before
    y = chain(x, **named)
    with fm.disabled("*"):
        assert torch.equal(y, chain(x, **named))
    chain[0].hint = "fast"
    assert changes.count != before
    before = changes.count
    del chain[0].hint
    assert changes.count != before


def test_autocast_in_turns():
    chain, x = experts(dtype=torch.float32), rows(dtype=torch.float32)
    full = chain(x, **inputs())
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = chain(x, **inputs())
        assert half.dtype is torch.bfloat16
        torch.testing.assert_close(half.float(), full, rtol=0.1, atol=0.02)
        assert torch.equal(chain(x, **inputs()), full)
        assert chain(x, **inputs()).dtype is torch.float32


def test_train_and_eval(called):
    chain, x, named = called
    chain.eval()(x, **named)
    assert len(plans(chain)) == 2


def test_a_private_attribute_is_no_part_of_the_key(called):
    chain, x, named = called
    chain[1]._note = ["unhashable"]
    chain(x, **named)
    assert len(plans(chain)) == 1


def test_an_unhashable_attribute_is_refused_by_name(called):
    chain, x, named = called
    chain[1].tiles = [64, 128]
    with pytest.raises(fm.InputError, match=r"SwiGLU\(\): tiles: expected a hashable value.*tuple.*got list"):
        chain(x, **named)
    chain[1].tiles = (64, 128)
    chain(x, **named)


@pytest.mark.parametrize("which", ["x", "probs", "0.weight", "3.weight"])
def test_which_arguments_want_a_gradient(called, which):
    chain, x, named = called
    tensors = {"x": x, **named, **dict(chain.named_parameters())}
    tensors[which].requires_grad_(False)
    chain(x, **named)
    assert len(plans(chain)) == 2
    tensors[which].requires_grad_(True)
    chain(x, **named)
    assert len(plans(chain)) == 2


def test_dtypes(called):
    chain, x, named = called
    chain(x, splits=named["splits"].int(), probs=named["probs"])
    assert len(plans(chain)) == 2
    chain(x, splits=named["splits"], probs=named["probs"].detach().float().requires_grad_())
    assert len(plans(chain)) == 3
    chain.float()(x.detach().float().requires_grad_(), **named)
    assert len(plans(chain)) == 4


def test_autocast_is_seen_through_the_dtypes():
    chain = experts(dtype=torch.float32)
    x = rows(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert chain(x, **inputs()).dtype is torch.bfloat16
        assert [p.dtype for p in plans(chain)] == [torch.bfloat16]
    assert chain(x, **inputs()).dtype is torch.float32
    assert len(plans(chain)) == 2


def test_the_device(called):
    chain, x, named = called
    with torch.device("meta"):
        meta = experts(scale=True)
    meta(x.to("meta"), **{k: v.to("meta") for k, v in named.items()})
    chain.to("meta")(x.detach().to("meta").requires_grad_(), **{k: v.to("meta") for k, v in named.items()})
    assert len(plans(chain)) == 2


@pytest.mark.parametrize(("count", "expected"), [(8, 1), (15, 1), (7, 2), (16, 2), (1, 2), (0, 2)])
def test_rows_count_as_powers_of_two(called, count, expected):
    chain, _, _ = called
    x = rows(count)
    chain(x, splits=torch.tensor([count, 0, 0]), probs=torch.rand(count, dtype=torch.float64, requires_grad=True))
    assert len(plans(chain)) == expected


def test_a_bias_that_appears(called):
    chain, x, named = called
    chain[0].bias = torch.nn.Parameter(torch.zeros(E, 2 * I, dtype=torch.float64))
    chain(x, **named)
    assert len(plans(chain)) == 2


def test_what_was_planned_before_changes_no_choice():
    """The rule pays off for many rows only; a small call before does not spoil it, nor the other way round."""

    def rule():
        return gemm(launches=6)  # two launches more than plain PyTorch, and no bytes less

    def few_and_many(order):
        chain = fm.Sequential(fm.GroupedLinear(E, H, H, dtype=torch.float64))
        with fm.register(rule()), torch.no_grad():
            return {
                n: toy.rules_used(toy.only_plan(chain, rows(n), splits=torch.tensor([n, 0, 0]))) for n in order
            }  # fmt: skip

    assert few_and_many([4, 4000]) == few_and_many([4000, 4])


def test_two_modules_share_nothing(called):
    chain, x, named = called
    other = experts(scale=True)
    other(x, **named)
    assert plans(chain)[0] is not plans(other)[0]


def test_plans_survive_new_parameter_values(called):
    chain, x, named = called
    with torch.no_grad():
        chain[0].weight.add_(1)
    chain[0].weight = torch.nn.Parameter(chain[0].weight.detach().clone())
    chain(x, **named)
    assert len(plans(chain)) == 1


def test_an_attribute_that_always_changes_leaves_no_plans_behind(monkeypatch):
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.MAX_PLANS", 8)
    act = fm.SwiGLU(limit=1.0)
    chain, x = fm.Sequential(act), 4 * torch.randn(6, 2 * 8)
    outputs = []
    for step in range(40):
        act.limit = 1.0 + step % 20
        outputs.append(chain(x))
        assert len(plans(chain)) <= 8
    for first, again in zip(outputs[:20], outputs[20:], strict=True):
        assert torch.equal(first, again)
    assert not torch.equal(outputs[0], outputs[1])
