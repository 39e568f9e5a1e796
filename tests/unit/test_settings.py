"""What is set around a call: recipes, switched-off rules, strictness; and however a block ends, its settings end."""

import contextlib
import gc
import os
import sys
import threading
from dataclasses import dataclass

import pytest
import torch
from kit import toy
from kit.toy import assert_same, experts, inputs, only_plan, outcome, rows, rules_used

import fusedmoe as fm
from fusedmoe.call import settings
from fusedmoe.ops.op import Node

DEFAULT = settings.Settings()
PACKAGE = os.path.dirname(fm.__file__)


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
    with fm.strict(), fm.disabled("a.*"), fm.disabled("b"), fm.recipe("bf16") as recipe:
        with fm.strict(False):
            assert settings.current() == settings.Settings(disabled=("a.*", "b"), recipe=recipe)
        assert settings.current().strict
    assert settings.current() == DEFAULT


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
    barrier, done = threading.Barrier(2), []

    def work(context, expected, rule):
        with context:
            for _ in range(20):
                barrier.wait(timeout=30)
                torch.testing.assert_close(chain(x, **named), expected)
                assert rules_used(only_plan(chain, x, **named)) == rule
        done.append(rule)

    with fm.register(toy.gemm("a.gemm")), fm.strict():  # strict is of this thread alone
        others = (fm.disabled("a.*"), plain, []), (fm.recipe(Halving(before="2")), halved, ["a.gemm"] * 2)
        threads = [threading.Thread(target=work, args=arguments) for arguments in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert settings.current().disabled == ()
    assert len(done) == 2


# ---- how blocks end -----------------------------------------------------------------------------------------------


def interrupted(function, at):
    """Run a function, with Ctrl-C before its n-th instruction. Instructions of the functions that it calls count.

    Return the KeyboardInterrupt, whose traceback keeps every frame alive; None if there are fewer instructions.
    """
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        file = frame.f_code.co_filename
        if "site-packages" in file and not file.startswith(PACKAGE):  # a callback, whose error Python would only report
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 traces them only if asked before settrace
    gc.disable()  # finalizers of other tests, whose error Python would only report too
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)
        gc.enable()
    return None


def nested_blocks():
    with fm.recipe("mxfp8"), fm.strict():
        pass


@fm.recipe("mxfp8")
def a_decorated_function():
    assert settings.current().recipe.name == "mxfp8"


def a_block_in_a_generator():
    def generator():
        with fm.recipe("mxfp8"):
            yield

    for _ in generator():
        pass


@pytest.mark.parametrize("function", [nested_blocks, a_decorated_function, a_block_in_a_generator])
def test_an_interrupt_at_any_instruction_leaves_no_setting(function):
    function()  # what is computed once is not what is tested
    with contextlib.nullcontext() if function is nested_blocks else fm.disabled("outer.*"):
        before, key = settings.current(), settings.thread.key
        for at in range(1, 100_000):
            error = interrupted(function, at)
            assert settings.current() == before, f"after an interrupt at instruction {at}"
            assert settings.thread.key == key, f"after an interrupt at instruction {at}"
            if error is None:
                break
    assert at > 100
    assert settings.current() == DEFAULT
    assert settings.thread.key == ""


def held(*blocks):
    """A generator that is within these blocks while it is not closed."""
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block)
        yield


def test_the_inner_settings_stay_when_an_outer_generator_is_closed():
    a, b, c = held(fm.recipe("mxfp8")), held(fm.disabled("b")), held(fm.disabled("c"), fm.strict())
    for generator in (a, b, c):
        next(generator)
    now = settings.current()
    assert (now.recipe.name, now.disabled, now.strict) == ("mxfp8", ("b", "c"), True)
    b.close()
    now = settings.current()
    assert (now.recipe.name, now.disabled, now.strict) == ("mxfp8", ("c",), True)
    assert settings.current() is now  # no new object for each call: a call compares them
    a.close()
    now = settings.current()
    assert (now.recipe.name, now.disabled, now.strict) == ("bf16", ("c",), True)
    with fm.disabled("d"):
        c.close()
        assert settings.current() == settings.Settings(disabled=("d",))
    assert settings.current() == DEFAULT
    assert settings.thread.key == ""


def test_a_generator_that_is_closed_in_another_thread():
    generator = held(fm.recipe("mxfp8"))
    next(generator)
    assert settings.current().recipe.name == "mxfp8"
    seen = []

    def close():
        generator.close()
        seen.append((settings.current(), settings.thread.key))

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert seen == [(DEFAULT, "")]
    assert settings.current() == DEFAULT


def test_a_block_may_be_entered_again_and_within_itself():
    block = fm.disabled("a")
    for _ in range(2):
        with block:
            assert settings.current().disabled == ("a",)
            with block:
                assert settings.current().disabled == ("a", "a")
            assert settings.current().disabled == ("a",)
    block.__enter__()
    with pytest.raises(RuntimeError, match="already entered"):
        block.__enter__()
    block.__exit__(None, None, None)
    assert settings.current() == DEFAULT


def yields():
    yield settings.current().recipe.name


async def awaits():
    return settings.current().recipe.name


async def yields_and_awaits():
    yield settings.current().recipe.name


@pytest.mark.parametrize("function", [yields, awaits, yields_and_awaits])
def test_a_decorated_generator_or_coroutine_is_refused(function):
    for block in (fm.recipe("mxfp8"), fm.strict(), fm.disabled("*")):
        with pytest.raises(fm.InputError, match=rf"function: expected .*{function.__name__}"):
            block(function)
