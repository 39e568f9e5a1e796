"""A run of a compiled graph keeps no tensor alive except its results, in memory that the thread has allocated.

``torch.compile(mode="reduce-overhead")`` runs a graph once with the memory pool of a CUDA graph, in which torch then
allows no other tensors. The launches are planned and bound as on a GPU of sm_90, and their kernels do nothing.
"""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
from emulator.gpu import emulated
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusedmoe as fm
from fusedmoe import torch_operators
from fusedmoe.kernels import compiler
from fusedmoe.kernels.sm90 import one_group, slot_functions
from fusedmoe.lasting import lasting, unread

BF16 = torch.bfloat16
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 128, 128, 4, 2, 48
STEPS_OF = {
    torch.ops.fusedmoe.run_chain.default: torch_operators._forward,
    torch.ops.fusedmoe.run_chain_backward.default: torch_operators._backward,
}


def storages(values):
    """Return the memory of the tensors, by its address."""
    found = (t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor))
    return {s.data_ptr(): s for s in found if s.size()}


class Allocated(TorchDispatchMode):
    """Records the memory that this thread allocates."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in STEPS_OF:  # record the allocations of its steps
            with self:
                return STEPS_OF[function](*args, **kwargs or {})
        results = function(*args, **kwargs or {})
        given = storages((args, kwargs))
        self.storages += [weakref.ref(s) for place, s in storages(results).items() if place not in given]
        return results


def kept(run, *args):
    """Return the sizes of the memory that a run allocates and that outlives it, except the memory of its results."""
    allocated = Allocated()
    with allocated:
        results = run(*args)
    gc.collect()
    alive = {s.data_ptr(): s.size() for reference in allocated.storages if (s := reference()) is not None}
    return results, [size for place, size in alive.items() if place not in storages((args, results))]


@pytest.fixture
def first_calls(monkeypatch):
    """As in a new process: there are no tensors of earlier calls."""
    monkeypatch.setattr(slot_functions, "_no_scales", {})
    monkeypatch.setattr(one_group, "_tables", {})
    unread.cache_clear()


def test_tensors_that_another_thread_makes_may_stay():
    def run(x, make):
        stays.append(make(lambda: torch.ones(8), x.device))
        return [x + 1]

    stays = []
    assert kept(run, torch.zeros(4), lasting)[1] == []
    assert kept(run, torch.zeros(4), lambda make, _device: make())[1] == [32]
    with torch.inference_mode():
        assert not lasting(lambda: torch.ones(8), torch.device("cpu")).is_inference()


@pytest.fixture
def launched():
    """The kernels that a GPU of sm_90 would have run so far."""
    kernels = []
    with emulated(), patch.object(compiler, "_load", lambda kernel: lambda *_: kernels.append(kernel)):
        yield kernels


def kept_by_passes(layer, *args, **inputs):
    """Compile a layer and train two steps; return the memory that each pass keeps, see `kept`."""
    torch._dynamo.reset()
    found = []

    def counting(graph, _inputs):
        def run(*args):
            results, others = kept(graph, *args)
            found.append(others)
            return results

        return make_boxed_func(run)

    call = torch.compile(layer, backend=aot_autograd(fw_compiler=counting, bw_compiler=counting))
    for _ in range(2):
        y = call(*args, **inputs)
        if y.requires_grad:
            y.float().square().mean().backward()
    return found


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_tensor", "mxfp8"])
def test_a_graph_keeps_only_its_results(recipe, first_calls, builtin_rules, launched):
    layer = fm.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dtype=BF16)
    x = torch.randn(TOKENS, HIDDEN, dtype=BF16, requires_grad=True)
    with fm.recipe(recipe):
        assert "unfused" not in str(layer.explain(x))
        assert kept_by_passes(layer, x) == [[]] * 4  # forward and backward, twice
    assert len(launched) >= 2 * 9  # at least one for each step of bf16


def test_inference_keeps_only_its_results(first_calls, builtin_rules, launched):
    layer = fm.Sequential(fm.GroupedLinear(EXPERTS, HIDDEN, INTERMEDIATE, dtype=BF16))
    x, splits = torch.randn(TOKENS, HIDDEN, dtype=BF16), torch.full((EXPERTS,), TOKENS // EXPERTS)
    with torch.no_grad(), fm.recipe("fp8_tensor"):
        assert "unfused" not in str(layer.explain(x, splits=splits))
        assert kept_by_passes(layer, x, splits=splits) == [[]] * 2
    assert launched
