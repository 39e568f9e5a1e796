"""Compiled modules that change, are copied, come first in a process or a thread, or break the graph."""

import copy
import pickle
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import FP8Tensor

E, H, I = 4, 16, 8  # noqa: E741
SPLITS = torch.tensor([3, 4, 0, 4])
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def mlp(**options):
    torch.manual_seed(0)
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I, **options), fm.SwiGLU(), fm.GroupedLinear(E, I, H, **options))


def rows(seed=1):
    return torch.randn(12, H, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


FIRST = """
import torch, fusedmoe as fm
torch.manual_seed(0)
for make in (lambda: fm.Sequential(fm.GroupedLinear(4, 16, 32), fm.SwiGLU()), lambda: fm.GroupedLinear(4, 16, 32)):
    module, x, splits = make(), torch.randn(12, 16), torch.tensor([3, 4, 0, 4])
    got = torch.compile(module, backend="eager", fullgraph=True)(x, splits=splits)
    assert torch.equal(got, module(x, splits=splits)) and got.abs().sum() > 0
"""


@pytest.mark.slow
def test_the_first_call_of_a_process_may_be_compiled():
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, check=False, cwd=Path(fm.__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_first_recipe_of_a_thread_is_followed():
    """A graph from before any setting was set in the thread is no graph for the recipe."""
    fm.rules()
    module, x = mlp(), rows()
    called = torch.compile(module, backend="eager", fullgraph=True)
    with fm.recipe("mxfp8"), torch.no_grad():
        want = module(x, splits=SPLITS)
    found = []

    def work():
        with torch.no_grad():
            found.append(called(x, splits=SPLITS))
            with fm.recipe("mxfp8"):
                found.append(called(x, splits=SPLITS))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    plain, quantized = found
    assert torch.equal(quantized, want)
    assert not torch.equal(plain, want)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("make", [mlp, lambda: fm.GroupedLinear(E, H, H)], ids=["Sequential", "one op"])
def test_a_copy_of_a_module_compiled_in_place_is_a_module_of_its_own(make, copied):
    fm.rules()
    module = make()
    module.compile(backend="eager", fullgraph=True)
    want = module(rows(), splits=SPLITS)
    other = copied(module)
    with torch.no_grad():
        list(other.parameters())[-1].mul_(2)
    assert torch.equal(module(rows(), splits=SPLITS), want)
    assert torch.equal(other(rows(), splits=SPLITS), 2 * want)


def test_an_op_that_becomes_another_class_is_followed():
    """As torch.nn.utils.parametrize does it."""
    fm.rules()
    module = mlp()
    called = torch.compile(module, backend="eager", fullgraph=True)
    before = called(rows(), splits=SPLITS)
    module[1].__class__ = fm.ReGLU
    got = called(rows(), splits=SPLITS)
    assert torch.equal(got, module(rows(), splits=SPLITS))
    assert not torch.equal(got, before)


def test_delayed_scaling_is_not_traced_anew_with_every_step():
    fm.rules()
    module = mlp()
    called = torch.compile(module, backend="eager")
    counts = []
    with fm.recipe(FP8Tensor(delayed=Delayed(history=4))):
        for step in range(3):
            called(rows(step), splits=SPLITS).sum().backward()
            counts.append(torch._dynamo.utils.counters["frames"]["total"])
    assert counts[1] == counts[2]


@pytest.mark.parametrize("wrong", [{"splits": None}, {"x": torch.tensor(1.0)}], ids=["no splits", "scalar"])
def test_wrong_arguments_are_named(wrong):
    fm.rules()
    given = {"x": rows(), "splits": SPLITS, **wrong}
    with pytest.raises(Exception, match=r"expected rows, got a scalar|the runtime input 'splits' is missing"):
        torch.compile(mlp(), backend="eager", fullgraph=True)(given.pop("x"), **given)


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "weights are quantized"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_row", "nvfp4"])
def test_a_selective_policy_meets_the_same_operators_again(recipe, warm):
    """Though the second time the quantized weights might be there already."""
    torch.manual_seed(0)
    module, x = fm.MoE(64, 32, E, 2), torch.randn(40, 64)

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mul.Tensor else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    results = []
    with fm.recipe(recipe):
        for call in (module, lambda x: checkpoint(module, x, use_reentrant=False, context_fn=contexts)):
            module.zero_grad()
            if warm:
                module(x)
            else:
                fm.clear_weight_cache(module)
            torch.manual_seed(1)
            call(x).square().sum().backward()
            results.append([p.grad.clone() for p in module.parameters()])
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(*results, strict=True))
