"""Compiled modules whose settings change where `torch.compile` does not see it: asyncio tasks, threads, recomputation.

A call computes what its own settings say, or is an error; it never runs the graph of another task's settings.
"""

import asyncio
import contextvars
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.call import settings
from fusedmoe.fusion.language.rule import FusionRule, Step

E, H, I = 4, 16, 8  # noqa: E741
SPLITS = torch.tensor([3, 4, 0, 4])
X = torch.randn(12, H, generator=torch.Generator().manual_seed(1))
RECIPES = "mxfp8", "bf16", "fp8_row"
OTHER_TASK = r"torch.compile chose a graph for .*; expected one for .*does not await"


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    fm.rules()
    yield
    torch._dynamo.reset()


@pytest.fixture
def module():
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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_tasks_that_take_turns_compute_what_their_own_settings_say(module, backend):
    want = expected(module)
    for recipe, outcomes in in_turns(compiled(module, backend), grad=False):
        assert all(torch.equal(y, want[recipe]) for y in outcomes), recipe
    assert settings.thread.key == ""


def test_tasks_that_take_turns_in_training_are_right_or_an_error(module):
    want, errors = expected(module, grad=True), 0
    for recipe, outcomes in in_turns(compiled(module), grad=True):
        for outcome in outcomes:
            if isinstance(outcome, fm.InputError):
                errors += 1
            else:
                assert torch.equal(outcome, want[recipe])
    assert errors


def test_the_error_names_both_settings_and_a_remedy(module):
    called = compiled(module)
    called(X, splits=SPLITS)  # a graph for the default settings, whose key a new thread has
    with fm.recipe("mxfp8"), fm.strict():
        context = contextvars.copy_context()
        with pytest.raises(fm.InputError, match=OTHER_TASK) as raised:
            in_thread(lambda: context.run(called, X, splits=SPLITS))
    assert "for recipe Recipe(name='bf16'), strict False; expected one for recipe MXFP8(" in str(raised.value)


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
        assert torch.equal(infer(), want["bf16"])
    assert torch.equal(asyncio.run(main()), want["mxfp8"])
    assert torch.equal(infer(), want["bf16"])


def test_a_call_after_the_error_finds_its_own_graph(module):
    called, want = compiled(module), expected(module, grad=True)
    called(X, splits=SPLITS)

    def twice():
        with pytest.raises(fm.InputError, match=OTHER_TASK):
            called(X, splits=SPLITS)
        return called(X, splits=SPLITS)

    with fm.recipe("mxfp8"):
        context = contextvars.copy_context()
        assert torch.equal(in_thread(lambda: context.run(twice)), want["mxfp8"])


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
    assert all(torch.equal(y, plain) for y in without)
    assert all(torch.equal(y, 2 * plain) for y in doubled)


def gradients(module, call):
    """The gradients of a call in a block, whose backward pass runs after the block."""
    x = X.clone().requires_grad_()
    module.zero_grad()
    with fm.recipe("mxfp8"):
        y = call(x)
    y.square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("how", ["compiled", "compiled checkpoint"])
def test_a_backward_pass_after_the_block_is_no_error(module, how):
    want = gradients(module, lambda x: module(x, splits=SPLITS))
    call = compiled(module)

    def compiled_checkpoint(x):
        return checkpoint(lambda x: module(x, splits=SPLITS), x, use_reentrant=False)

    if how == "compiled checkpoint":
        call = compiled(compiled_checkpoint)
    got = gradients(module, call if how == "compiled checkpoint" else lambda x: call(x, splits=SPLITS))
    for a, b in zip(got, want, strict=True):
        assert b.abs().sum() > 0
        assert torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_after_the_block_is_refused(module, reentrant):
    """The recomputation would run the graph for the settings outside of the block."""
    called = compiled(module)
    called(X, splits=SPLITS)  # that graph is there
    with pytest.raises(
        fm.InputError, match=r"for recipe Recipe\(name='bf16'\); .*Compile the function that checkpoints"
    ):
        gradients(module, lambda x: checkpoint(lambda x: called(x, splits=SPLITS), x, use_reentrant=reentrant))
