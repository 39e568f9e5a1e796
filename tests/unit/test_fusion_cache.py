"""The plan cache: one plan for one kind of call, and a new one for everything that a rule may look at."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from kit.toy import E, I, experts, gemm, inputs, rows

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
    """A scaled chain that was called once, and its arguments."""
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


def routed(count):
    probs = torch.rand(count, dtype=torch.float64, requires_grad=True)
    return rows(count), {"splits": torch.tensor([count, 0, 0]), "probs": probs}


def test_the_same_kind_of_call_has_the_same_plan(called):
    chain, x, named = called
    (plan,) = plans(chain)
    chain(torch.randn_like(x).requires_grad_(), **named)
    chain.explain(x, **named)
    chain[1]._note = ["unhashable"]  # a private attribute is no part of the key
    with fm.strict(), fm.recipe("bf16"), fm.disabled():
        chain(x, **named)
    with torch.no_grad():
        chain[0].weight.add_(1)
    chain[0].weight = torch.nn.Parameter(chain[0].weight.detach().clone())
    chain(x, **named)
    for count in (8, 15):  # rows count as powers of two
        x, named = routed(count)
        chain(x, **named)
    assert len(plans(chain)) == 1
    assert plans(chain)[0] is plan
    other = experts(scale=True)
    other(x, **named)
    assert plans(other)[0] is not plan


CONTEXTS = {
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "recipe": lambda: fm.recipe(Tuned()),
    "disabled pattern": lambda: fm.disabled("nothing.*"),
    "new rule": lambda: fm.register(gemm("toy.unrelated", launches=99)),
    "deterministic": deterministic,
}


def set_(op, **attributes):
    for name, value in attributes.items():
        setattr(op, name, value)


CHANGES = {
    "attribute": lambda chain, x, named: set_(chain[1], limit=0.01),
    "new attribute": lambda chain, x, named: set_(chain[1], note="fast"),
    "bias": lambda chain, x, named: set_(chain[0], bias=torch.nn.Parameter(torch.zeros(E, 2 * I).double())),
    "eval": lambda chain, x, named: chain.eval() and None,
    "dtype of splits": lambda chain, x, named: (x, named | {"splits": named["splits"].int()}),
    "dtype of probs": lambda chain, x, named: (x, named | {"probs": named["probs"].detach().float().requires_grad_()}),
    "dtype": lambda chain, x, named: (chain.float() and x.detach().float().requires_grad_(), named),
    "device": lambda chain, x, named: (
        chain.to("meta") and x.detach().to("meta").requires_grad_(),
        {name: t.to("meta") for name, t in named.items()},
    ),
    **{f"{count} rows": lambda chain, x, named, count=count: routed(count) for count in (7, 16, 1, 0)},
    **{
        f"no gradient of {name}": lambda chain, x, named, name=name: {
            "x": x, **named, **dict(chain.named_parameters())
        }[name].requires_grad_(False) is None
        for name in ("x", "probs", "0.weight", "3.weight")
    },
}  # fmt: skip


@pytest.mark.parametrize("change", [*CONTEXTS, *CHANGES])
def test_another_kind_of_call_has_a_plan_of_its_own(called, change):
    chain, x, named = called
    given = CHANGES[change](chain, x, named) if change in CHANGES else None
    x, named = given or (x, named)
    with CONTEXTS.get(change, nullcontext)():
        for _ in range(2):
            chain(x, **named)
            assert len(plans(chain)) == 2


def test_what_comes_back_finds_its_plan(called, monkeypatch):
    chain, x, named = called
    y = chain(x, **named)
    chain[1].note = "fast"
    chain(x, **named)
    del chain[1].note
    assert torch.equal(chain(x, **named), y)
    for recipe, count in ((fm.Recipe(), 2), (Tuned(), 3), (Tuned(block=128), 3), (Tuned(block=64), 4)):
        with fm.recipe(recipe):
            chain(x, **named)
        assert len(plans(chain)) == count
    monkeypatch.setenv("FUSEDMOE_DISABLE", "nothing")
    chain(x, **named)
    assert len(plans(chain)) == 5


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
    assert [p.dtype for p in plans(chain)] == [torch.float32, torch.bfloat16]


def test_an_unhashable_attribute_is_refused_by_name(called):
    chain, x, named = called
    chain[1].tiles = [64, 128]
    with pytest.raises(fm.InputError, match=r"SwiGLU\(\): tiles: expected a hashable value.*tuple.*got list"):
        chain(x, **named)


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
