"""torch.compile with fullgraph=True: a chain is one operator, with the bits of eager mode."""

import asyncio
import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from kit import toy
from kit.compare import assert_bitwise
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.call import settings
from fusedmoe.call.compile import operators
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import FP8Tensor

E, H, I = 4, 16, 8  # noqa: E741  (experts, hidden, intermediate)
ROWS = 12
SPLITS = torch.tensor([3, 4, 0, 4])  # an expert without rows, and a row of no expert
DELAYED = FP8Tensor(delayed=Delayed(history=4))

pytestmark = [
    pytest.mark.usefixtures("fresh_graphs"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
]


def mlp(**options):
    torch.manual_seed(0)
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I, **options), fm.SwiGLU(), fm.GroupedLinear(E, I, H, **options))


class Routed(nn.Module):
    """Rows by expert, experts and back, with a foreign module in the middle; the routing is given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.chain = fm.Sequential(fm.Dispatch(), *mlp(), nn.LayerNorm(H), fm.Combine("probs"))

    def forward(self, x, splits):
        index = torch.arange(2 * x.shape[0]).view(-1, 2) % E
        return self.chain(x, expert_index=index, expert_weight=x[:, :2].sigmoid())


class MoE(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.moe = fm.MoE(H, I, E, 2, **options)

    def forward(self, x, splits):
        y, stats = self.moe(x, return_stats=True)
        return y + stats.load_balancing_loss + stats.z_loss


class Two(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, splits):
        return self.second(self.first(x, splits=splits), splits=splits)


TWO = {  # the second chain, of the first
    "other settings, shared weight": lambda m: fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(0.1), m[2]),
    "the same": lambda m: m,
}


def two(second):
    first = mlp()
    return Two(first, TWO[second](first))


def hooked():
    module = mlp()
    module[1].register_forward_hook(lambda op, args, y: y * 2)
    return module


def rows(count=ROWS, seed=1):
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def outcome(module, called, x=None, splits=SPLITS, wants=True):
    x = (rows() if x is None else x).detach().requires_grad_(wants)
    return toy.outcome(module, x, called, splits=splits)


def compiled(module, backend="eager"):
    return torch.compile(module, backend=backend, fullgraph=True)


def counted(module):
    """The compiled module, and what counts its graphs."""
    counter = CompileCounterWithBackend("eager")
    return compiled(module, counter), counter


# ---- the same results ---------------------------------------------------------------------------------------------

FP16, BF16 = torch.float16, torch.bfloat16
# module, recipe, autocast, whether the rows want a gradient
CASES = {
    "fp8_row": (lambda: mlp(bias=True), "fp8_row", None, True),
    "mxfp8": (lambda: mlp(bias=True), "mxfp8", None, True),
    "nvfp4, rounded at random": (mlp, "nvfp4", None, False),
    "routed": (Routed, "fp8_block", None, True),
    "routed, autocast": (Routed, "mxfp8", BF16, True),
    "autocast to fp16": (lambda: mlp(bias=True), "bf16", FP16, True),
    "MoE": (lambda: MoE(shared_intermediate=I, shared_gate=True), "bf16", None, True),
    "one op": (lambda: fm.GroupedLinear(E, H, I, bias=True), "bf16", None, False),
    **{f"two, {second}": (partial(two, second), "bf16", None, True) for second in TWO},
    "hooks": (hooked, "bf16", None, True),
}  # fmt: skip


@pytest.mark.parametrize(("make", "recipe", "dtype", "wants"), CASES.values(), ids=CASES)
def test_compiled_is_eager(make, recipe, dtype, wants):
    module, results = make(), []
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    for called in (compiled(module, "aot_eager"), module):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype) if dtype else nullcontext(), fm.recipe(recipe):
            results.append(outcome(module, called, wants=wants))
    assert_bitwise(*results)
    assert ("x" in results[0]) is wants


def test_inductor():
    module = mlp(bias=True)
    got, want = outcome(module, compiled(module, "inductor")), outcome(module, module)
    assert got.keys() == want.keys()
    for key, t in want.items():
        torch.testing.assert_close(got[key], t)
        assert t.abs().sum() > 0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    module = mlp()
    called, counter = counted(module)
    want = module(rows(), splits=SPLITS).detach()
    for _ in range(2):
        with context():
            y = called(rows(), splits=SPLITS)
        assert_bitwise(y, want)
        assert y.grad_fn is None
        assert called(rows(), splits=SPLITS).requires_grad
    assert counter.frame_count == 2


def test_parameters_that_come_with_the_call():
    module, composed = mlp(bias=True), mlp(bias=True).without_parameters()
    given = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    got = outcome(module, compiled(lambda x, splits: composed.forward_with(given, x, splits=splits), "aot_eager"))
    assert_bitwise(got | {name: t.grad for name, t in given.items()}, outcome(module, module))


@pytest.mark.parametrize(("make", "copied"), [
    (mlp, lambda m: pickle.loads(pickle.dumps(m))), (lambda: fm.GroupedLinear(E, H, H), copy.deepcopy),
], ids=["Sequential", "one op"])  # fmt: skip
def test_a_copy_of_a_module_compiled_in_place_is_a_module_of_its_own(make, copied):
    module = make()
    keys = module.state_dict().keys()
    module.compile(backend="eager", fullgraph=True)
    want = module(rows(), splits=SPLITS)
    assert module.state_dict().keys() == keys
    other = copied(module)
    with torch.no_grad():
        list(other.parameters())[-1].mul_(2)
    assert_bitwise(module(rows(), splits=SPLITS), want)
    assert_bitwise(other(rows(), splits=SPLITS), 2 * want)


def test_results_of_an_operator_have_memory_of_their_own():
    x, y = torch.arange(1.0, 4.0), torch.arange(4.0, 7.0)
    results = x, y, y[1:]
    found = operators._own(results, [x])
    assert_bitwise(found, [*results])
    assert len({t.untyped_storage().data_ptr() for t in (x, *found)}) == 4


# ---- what is traced anew, and what is not -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: mlp(bias=True), MoE, Routed], ids=["Sequential", "MoE", "routed"])
def test_other_numbers_of_rows_take_one_more_graph(make):
    module = make()
    called, counter = counted(module)
    for count in (12, 11, 300, 2):
        x, splits = rows(count), torch.tensor([0, count // 2, 0, count - count // 2])
        assert_bitwise(outcome(module, called, x, splits), outcome(module, module, x, splits))
    assert counter.frame_count == 2


def test_other_splits_and_new_values_of_weights_take_no_other_graph():
    module = mlp()
    called = compiled(module, "aot_eager")
    with fm.recipe("mxfp8"):
        found = [outcome(module, called)]
        with torch.compiler.set_stance("fail_on_recompile"):
            for splits in ([12, 0, 0, 0], [3, 3, 3, 3]):
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(1.1)
                found.append(outcome(module, called, splits=torch.tensor(splits)))
                assert_bitwise(found[-1], outcome(module, module, splits=torch.tensor(splits)))
            with pytest.raises(RuntimeError, match="recompile"):
                called(rows(5), splits=SPLITS)
    assert len({of["y"].sum().item() for of in found}) == 3


CHANGES = {
    "an attribute": lambda m: setattr(m[1], "limit", 0.05),
    "another class": lambda m: setattr(m[1], "__class__", fm.ReGLU),  # as torch.nn.utils.parametrize does it
    "one more op": lambda m: m.append(fm.GroupedLinear(E, H, H)),
    "a recipe of its own": lambda m: setattr(m[0], "recipe", "fp8_row"),
    "no bias": lambda m: setattr(m[2], "bias", None),
    "another weight": lambda m: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach().flip(0))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_followed(change):
    module = mlp(bias=True)
    called = compiled(module)
    before = outcome(module, called)
    change(module)
    got = outcome(module, called)
    assert_bitwise(got, outcome(module, module))
    assert not (got["y"].shape == before["y"].shape and torch.equal(got["y"], before["y"]))


def test_the_settings_of_every_call_hold():
    module = mlp()
    called, counter = counted(module)
    found = {}
    for _ in range(2):
        for recipe in ("bf16", "mxfp8", "fp8_row"):
            with fm.recipe(recipe):
                found[recipe] = outcome(module, called)
                assert_bitwise(found[recipe], outcome(module, module))
    assert counter.frame_count == 3
    assert len({of["y"].sum().item() for of in found.values()}) == 3
    with fm.recipe("mxfp8"), fm.recipe("fp8_row"), torch.compiler.set_stance("fail_on_recompile"):
        assert_bitwise(outcome(module, called), found["fp8_row"])
    for margin in (0, 8, 0, 8):  # an option of kernels, which changes no result
        module.sm_margin = margin
        assert_bitwise(outcome(module, called), found["bf16"])
    assert counter.frame_count == 4


def wants_a_limit(rule, ctx):
    fm.require(rule.act.limit is not None, "wants a limit")


def test_rules_and_strict_are_followed():
    module, x = mlp(), rows()
    refusing = toy.rule("tests.refusing", {"act": fm.SwiGLU}, ("input",), check=wants_a_limit)
    called = compiled(module)
    with torch.no_grad():
        plain = called(x, splits=SPLITS)
        with fm.register(toy.doubled()):
            for _ in range(2):
                assert_bitwise(called(x, splits=SPLITS), 2 * plain)
                with fm.disabled("tests.*"):
                    assert_bitwise(called(x, splits=SPLITS), plain)
        with fm.register(refusing):
            assert_bitwise(called(x, splits=SPLITS), plain)
            with pytest.raises(Exception, match="wants a limit"), fm.strict():
                called(x, splits=SPLITS)
        assert_bitwise(called(x, splits=SPLITS), plain)


def test_wrong_arguments_are_named():
    called = compiled(mlp())
    with pytest.raises(Exception, match="the runtime input 'splits' is missing"):
        called(rows(), splits=None)
    assert_bitwise(called(rows(), splits=SPLITS), mlp()(rows(), splits=SPLITS))


# ---- what is not traced -------------------------------------------------------------------------------------------


def with_main_grad():
    module = mlp()
    module[0].accumulate_into_main_grad = True
    module[0].weight.main_grad = torch.zeros_like(module[0].weight)
    return module


STATEFUL = {"main_grad": (with_main_grad, "bf16"), "delayed scaling": (mlp, DELAYED)}


@pytest.mark.parametrize(("make", "recipe"), STATEFUL.values(), ids=STATEFUL)
def test_state_changes_as_in_eager_mode(make, recipe):
    module, other = make(), make()
    called, counts = torch.compile(module, backend="aot_eager"), []
    with fm.recipe(recipe):
        for seed in range(3):
            x = rows(seed=seed) * (seed + 1)
            assert_bitwise(outcome(module, called, x), outcome(other, other, x))
            counts.append(torch._dynamo.utils.counters["frames"]["total"])
        why = r"accumulate_into_main_grad, delayed scaling\) is not traced"
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=why):
            compiled(module)(rows(), splits=SPLITS)
    assert counts[1] == counts[2]
    if make is with_main_grad:
        assert_bitwise(module[0].weight.main_grad, other[0].weight.main_grad)
    else:
        assert module.state_dict().keys() > mlp().state_dict().keys()
        assert_bitwise(dict(module.state_dict()), dict(other.state_dict()))


# ---- settings that change where torch.compile does not see it: asyncio tasks, threads, recomputation ----------------
# A call computes what its own settings say, or is an error; it never runs the graph of another task's settings.

RECIPES = "mxfp8", "bf16", "fp8_row"


@pytest.fixture
def module():
    fm.rules()
    return mlp()


def expected(module, grad=False):
    """The output under each recipe, uncompiled; no two are alike."""
    found = {}
    for recipe in RECIPES:
        with fm.recipe(recipe), torch.set_grad_enabled(grad):
            found[recipe] = module(rows(), splits=SPLITS).detach()
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
                        outcomes.append(called(rows(), splits=SPLITS).detach())
                except fm.InputError as error:
                    outcomes.append(error)
        return recipe, outcomes

    async def main():
        return await asyncio.gather(*map(task, (*RECIPES, *RECIPES)))

    return asyncio.run(main())


@pytest.mark.parametrize(("backend", "grad"), [("eager", False), ("aot_eager", True)])
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

    def work(recipe):
        with torch.no_grad():
            assert_bitwise(called(rows(), splits=SPLITS), want["bf16"])
            for _ in range(5):
                with fm.recipe(recipe):
                    assert_bitwise(called(rows(), splits=SPLITS), want[recipe])
            with pytest.raises(Exception, match=r"x: expected shape \(rows, 16\)"):
                called(rows()[:, :7], splits=SPLITS)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, ("bf16", "mxfp8", "bf16")))


def gradients(module, call):
    """The gradients of a call in a block, whose backward pass runs after the block."""
    x = rows().clone().requires_grad_()
    module.zero_grad()
    with fm.recipe("mxfp8"):
        y = call(x)
    y.square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backward_pass_after_the_block_is_no_error(module, checkpointed):
    def call(x):
        if checkpointed:
            return checkpoint(module, x, splits=SPLITS, use_reentrant=False)
        return module(x, splits=SPLITS)

    assert_bitwise(
        gradients(module, compiled(call, "aot_eager")), gradients(module, lambda x: module(x, splits=SPLITS))
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_after_the_block_is_refused(module, reentrant):
    """The recomputation would run the graph for the settings outside of the block."""
    called = compiled(module, "aot_eager")
    called(rows(), splits=SPLITS)  # that graph is there
    message = r"for recipe Recipe\(name='bf16'\); .*Compile the function that checkpoints"
    with pytest.raises(fm.InputError, match=message):
        gradients(module, lambda x: checkpoint(lambda x: called(x, splits=SPLITS), x, use_reentrant=reentrant))


# ---- the first call of a process ----------------------------------------------------------------------------------

FIRST = """
import torch, fusedmoe as fm
module, x, splits = fm.Sequential(fm.GroupedLinear(4, 16, 32)), torch.randn(12, 16), torch.tensor([3, 4, 0, 4])
got = torch.compile(module, backend="eager", fullgraph=True)(x, splits=splits)
assert torch.equal(got, module(x, splits=splits)) and got.abs().sum() > 0
"""


@pytest.mark.slow
def test_the_first_call_of_a_process_may_be_compiled():
    """In a process of its own: plans of another graph would be there already."""
    folder = Path(fm.__file__).parents[1]
    subprocess.run([sys.executable, "-c", FIRST], check=True, cwd=folder)


def test_freezing_and_thawing():
    module = mlp()
    called = compiled(module, "aot_eager")
    everything = outcome(module, called)
    module[2].weight.requires_grad_(False)
    part = outcome(module, called)
    assert part.keys() == everything.keys() - {"2.weight"}
    assert_bitwise(part, {name: everything[name] for name in part})
    module[2].weight.requires_grad_(True)
    assert_bitwise(outcome(module, called), everything)


def test_rules_that_another_task_has_switched_off(module):
    called = compiled(module, "aot_eager")

    async def task(block):
        with block, torch.no_grad():
            await asyncio.sleep(0)
            return [called(rows(), splits=SPLITS) for _ in range(2)]

    async def main():
        return await asyncio.gather(task(fm.disabled("tests.*")), task(fm.disabled("other")))

    with torch.no_grad():
        plain = module(rows(), splits=SPLITS)
        with fm.register(toy.doubled()):
            without, doubled = asyncio.run(main())
    assert_bitwise(without, [plain] * 2)
    assert_bitwise(doubled, [2 * plain] * 2)
