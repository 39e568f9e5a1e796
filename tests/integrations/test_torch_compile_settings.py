"""Compiled modules whose settings change where `torch.compile` does not see it: asyncio tasks, threads, recomputation.

A call computes what its own settings say, or is an error; it never runs the graph of another task's settings.
"""

import asyncio
import contextvars
import threading

import pytest
import torch
from kit.compare import assert_bitwise
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.call import settings
from fusedmoe.fusion.language.rule import FusionRule, Step

E, H, I = 4, 16, 8  # noqa: E741
SPLITS = torch.tensor([3, 4, 0, 4])
X = torch.randn(12, H, generator=torch.Generator().manual_seed(1))
RECIPES = "mxfp8", "bf16", "fp8_row"
OTHER_TASK = r"torch.compile chose a graph for .*; expected one for .*does not await"

pytestmark = pytest.mark.usefixtures("fresh_graphs")


@pytest.fixture
def module():
    fm.rules()
    torch.manual_seed(0)
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H))


def compiled(module, backend="aot_eager"):
    return torch.compile(module, backend=backend, fullgraph=True)


def expected(module, grad=False):
    """The output under each recipe, uncompiled; no two are alike."""
    found = {}
    for recipe in RECIPES:
        with fm.recipe(recipe), torch.set_grad_enabled(grad):
            found[recipe] = module(X, splits=SPLITS).detach()
    assert len({t.sum().item() for t in found.values()}) == len(RECIPES)
    return found


def in_turns(called, grad):
    """Tasks that await within their blocks, so that each runs among the blocks of the others."""

    async def task(recipe):
        outcomes = []
        with fm.recipe(recipe):
            for _ in range(3):
                await asyncio.sleep(0)
                try:
                    with torch.set_grad_enabled(grad):
                        outcomes.append(called(X, splits=SPLITS).detach())
                except fm.InputError as error:
                    outcomes.append(error)
        return recipe, outcomes

    async def main():
        return await asyncio.gather(*map(task, (*RECIPES, *RECIPES)))

    return asyncio.run(main())


def in_thread(function):
    """Run a function in a thread of its own; return or raise what it does."""
    outcome = []

    def work():
        try:
            outcome.append((function(), None))
        except BaseException as error:  # noqa: BLE001  (raised below)
            outcome.append((None, error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ((result, error),) = outcome
    if error is not None:
        raise error
    return result


@pytest.mark.parametrize(("backend", "grad"), [("eager", False), ("aot_eager", False), ("aot_eager", True)])
def test_tasks_that_take_turns_compute_what_their_own_settings_say(module, backend, grad):
    want, errors = expected(module, grad), 0
    for recipe, outcomes in in_turns(compiled(module, backend), grad):
        for outcome in outcomes:
            if isinstance(outcome, fm.InputError):  # in training
                errors += 1
            else:
                assert_bitwise(outcome, want[recipe])
    assert bool(errors) is grad
    assert settings.thread.key == ""


def test_threads_have_settings_of_their_own(module):
    """A graph from before any setting was set in the thread is no graph for the recipe."""
    called, want = compiled(module, "eager"), expected(module)
    failed = []

    def work(recipe):
        try:
            with torch.no_grad():
                assert_bitwise(called(X, splits=SPLITS), want["bf16"])
                for _ in range(5):
                    with fm.recipe(recipe):
                        assert_bitwise(called(X, splits=SPLITS), want[recipe])
                with pytest.raises(Exception, match=r"x: expected shape \(rows, 16\)"):
                    called(X[:, :7], splits=SPLITS)
        except BaseException as error:  # noqa: BLE001  (told by the main thread)
            failed.append(error)

    threads = [threading.Thread(target=work, args=(recipe,)) for recipe in ("bf16", "mxfp8", "bf16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_the_error_names_both_settings_and_the_next_call_finds_its_own_graph(module):
    called, want = compiled(module), expected(module, grad=True)
    called(X, splits=SPLITS)  # a graph for the default settings, whose key a new thread has

    def twice():
        with pytest.raises(fm.InputError, match=OTHER_TASK) as raised:
            called(X, splits=SPLITS)
        assert "for recipe Recipe(name='bf16'), strict False; expected one for recipe MXFP8(" in str(raised.value)
        return called(X, splits=SPLITS)

    with fm.recipe("mxfp8"), fm.strict():
        context = contextvars.copy_context()
        assert_bitwise(in_thread(lambda: context.run(twice)), want["mxfp8"])


@pytest.mark.parametrize("first", [False, True], ids=["other graphs", "first graph"])
def test_a_context_that_was_copied_to_a_thread(module, first):
    called, want = compiled(module), expected(module)

    def infer():
        with torch.no_grad():
            return called(X, splits=SPLITS)

    async def main():
        with fm.recipe("mxfp8"):
            return await asyncio.to_thread(infer)

    if not first:
        assert_bitwise(infer(), want["bf16"])
    assert_bitwise(asyncio.run(main()), want["mxfp8"])
    assert_bitwise(infer(), want["bf16"])


class Doubled(FusionRule, name="tests.doubled", direction="forward"):
    """Computes something else than the op, so that its use shows."""

    act: fm.SwiGLU

    def offer(self, ctx):
        return Step(needs=("input",), gives=("output",), launches=0)

    def build(self, ctx, keep):
        return lambda *tensors: lambda x: 2 * self.act.compute(x)


def test_rules_that_another_task_has_switched_off(module):
    called = compiled(module)

    async def task(block):
        with block, torch.no_grad():
            await asyncio.sleep(0)
            return [called(X, splits=SPLITS) for _ in range(2)]

    async def main():
        return await asyncio.gather(task(fm.disabled("tests.*")), task(fm.disabled("other")))

    with torch.no_grad():
        plain = module(X, splits=SPLITS)
        with fm.register(Doubled):
            without, doubled = asyncio.run(main())
    assert_bitwise(without, [plain] * 2)
    assert_bitwise(doubled, [2 * plain] * 2)


def gradients(module, call):
    """The gradients of a call in a block, whose backward pass runs after the block."""
    x = X.clone().requires_grad_()
    module.zero_grad()
    with fm.recipe("mxfp8"):
        y = call(x)
    y.square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backward_pass_after_the_block_is_no_error(module, checkpointed):
    def call(x):
        return module(x, splits=SPLITS)

    def checkpointing(x):
        return checkpoint(call, x, use_reentrant=False)

    want = gradients(module, call)
    assert_bitwise(gradients(module, compiled(checkpointing if checkpointed else call)), want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_after_the_block_is_refused(module, reentrant):
    """The recomputation would run the graph for the settings outside of the block."""
    called = compiled(module)
    called(X, splits=SPLITS)  # that graph is there
    message = r"for recipe Recipe\(name='bf16'\); .*Compile the function that checkpoints"
    with pytest.raises(fm.InputError, match=message):
        gradients(module, lambda x: checkpoint(lambda x: called(x, splits=SPLITS), x, use_reentrant=reentrant))
