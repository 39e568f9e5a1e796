"""What is set around a call: recipes, switched-off rules, strictness; nested, and one thread apart from another."""

import threading
from dataclasses import dataclass

import pytest
import torch
from kit import toy
from kit.toy import assert_same, experts, inputs, only_plan, outcome, rows, rules_used

import fusedmoe as fm
from fusedmoe.call import settings
from fusedmoe.ops.op import Node


class Halve(fm.Op):
    """y = x / 2"""

    def compute(self, x):
        return x / 2


class ByGroup(fm.Op):
    """y = x: wants the offsets and the splits"""

    runtime_inputs = ("offsets",)

    def compute(self, x, offsets):
        return x.clone()


@dataclass(frozen=True)
class Halving(fm.Recipe):
    """Halves the rows before the op with this label."""

    name: str = "halving"
    before: str = "1"
    insert: type = Halve

    def rewrite(self, nodes):
        at = [node.label for node in nodes].index(self.before)
        return (*nodes[:at], Node(f"{self.before}.inserted", self.insert()), *nodes[at:])


@dataclass(frozen=True)
class Rewritten(fm.Recipe):
    """A rewrite that the test gives."""

    name: str = "rewritten"
    how: object = None

    def rewrite(self, nodes):
        return self.how(nodes)


def test_settings_hold_inside_the_block_only():
    assert settings.current() == settings.Settings()
    with fm.strict(), fm.disabled("a.*"), fm.disabled("b"), fm.recipe("bf16") as recipe:
        now = settings.current()
        assert (now.strict, now.disabled, now.recipe) == (True, ("a.*", "b"), recipe)
        with fm.strict(False):
            assert not settings.current().strict
            assert settings.current().disabled == ("a.*", "b")
        assert settings.current().strict
    assert settings.current() == settings.Settings()


def test_a_recipe_that_inserts_an_op():
    chain, x, named = experts(), rows(), inputs()
    by_hand = fm.Sequential(chain[0], Halve(), chain[1], chain[2])
    with fm.recipe(Halving()):
        got = outcome(chain, x, **named)
        plan = only_plan(chain, x, **named)
        y = chain(x, **named)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    (dx,) = torch.autograd.grad((y * weights).sum(), [x])  # under the recipe of the forward pass
    torch.testing.assert_close(dx, got["x"])
    assert_same({k.replace("2.", "3."): v for k, v in got.items()}, outcome(by_hand, x, **named))
    assert [s.ops[0] for s in plan.steps[:4]] == [
        "0.GroupedLinear", "1.inserted.Halve", "1.SwiGLU", "2.GroupedLinear",
    ]  # fmt: skip
    assert "recipe halving" not in str(only_plan(chain, x, **named))


@pytest.mark.parametrize("before", ["0", "3"])
def test_an_inserted_op_may_take_runtime_inputs_of_the_chain_in_another_order(before):
    """`probs` is the first that the chain takes; the inserted op brings `splits` before it."""
    up, act, down = experts()
    chain = fm.Sequential(fm.Scale("probs"), up, act, down)
    x, named = rows(), inputs(scale=True)
    with fm.recipe(Halving(before=before, insert=ByGroup)):
        got = outcome(chain, x, **named)
    assert_same(got, outcome(chain, x, **named))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (lambda n: n[:-1], "must keep the chain's own ops, in their order"),
        (lambda n: n[::-1], "must keep the chain's own ops, in their order"),
        (lambda n: (*n, n[0]), "must keep the chain's own ops, in their order"),
        (lambda n: (Node("new", n[0].op), *n[1:]), "must keep the chain's own ops, in their order"),
        (lambda n: (*n, Node("1", Halve())), "label of its own, got '1' twice"),
        (lambda n: (*n, Node("new", n[0].op)), "no parameters, got new.GroupedLinear"),
        (lambda n: (*n, Node("new", fm.Scale("gains"))), "'gains'"),
    ],
    ids=["dropped", "reordered", "twice", "relabelled", "same label", "parameters", "another input"],
)
def test_a_rewrite_is_validated(how, text):
    with fm.recipe(Rewritten(how=how)), pytest.raises(fm.InputError, match=f"recipe 'rewritten': .*{text}"):
        experts()(rows(), **inputs())


def test_disabled_patterns_add_up_and_end(monkeypatch):
    chain, x, named = experts(), rows(), inputs()
    with fm.register(toy.gemm("a.gemm"), toy.glu_scale("b.act")):

        def used():
            return rules_used(only_plan(chain, x, **named))

        everything = ["a.gemm", "b.act", "a.gemm"]
        with fm.disabled("a.*"):
            assert used() == ["b.act"]
            with fm.disabled("b.ac?"):
                assert used() == []
            assert used() == ["b.act"]
        with fm.disabled("A.*", "gemm"):
            assert used() == everything
        for value, expected in [(" a.*, c", ["b.act"]), ("*", []), ("", everything), (",", everything)]:
            monkeypatch.setenv("FUSEDMOE_DISABLE", value)
            assert used() == expected


def test_threads_do_not_affect_each_other():
    """Two threads, side by side over one module, each under its own settings, many times."""
    chain, x, named = experts(), rows(), inputs()
    plain = chain(x, **named).detach()
    with fm.recipe(Halving(before="2")):
        halved = chain(x, **named).detach()
    assert not torch.equal(plain, halved)
    barrier = threading.Barrier(3)
    seen: dict[str, object] = {}

    def work(who, context, expected, rule):
        try:
            with context:
                for _ in range(20):
                    barrier.wait(timeout=30)
                    torch.testing.assert_close(chain(x, **named), expected)
                    assert rules_used(only_plan(chain, x, **named)) == rule
            seen[who] = "fine"
        except BaseException as error:
            seen[who] = error
            barrier.abort()
            raise

    with fm.register(toy.gemm("a.gemm")):
        rule = ["a.gemm"] * 2
        threads = [
            threading.Thread(target=work, args=("off", fm.disabled("a.*"), plain, [])),
            threading.Thread(target=work, args=("halved", fm.recipe(Halving(before="2")), halved, rule)),
        ]
        with fm.strict():  # of this thread alone
            for thread in threads:
                thread.start()
            for _ in range(20):
                barrier.wait(timeout=30)
                assert settings.current().disabled == ()
            for thread in threads:
                thread.join(timeout=60)
    assert seen == {"off": "fine", "halved": "fine"}
