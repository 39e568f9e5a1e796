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
from kit.first_calls import forget_kept_tensors
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusedmoe as fm
from fusedmoe.base.lasting import lasting
from fusedmoe.call.compile import operators
from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.sm90 import launch, one_group
from fusedmoe.kernels.sm100 import calls
from fusedmoe.numerics.formats import Delayed, Quantizer, fp8_tensor
from fusedmoe.numerics.formats.delayed import AmaxHistory

BF16 = torch.bfloat16
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 128, 128, 4, 2, 48
DELAYED = Quantizer(fp8_tensor(), delayed=Delayed(3))
STEPS_OF = {
    torch.ops.fusedmoe.run_chain.default: operators._forward,
    torch.ops.fusedmoe.run_chain_backward.default: operators._backward,
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


def kept(run, *args, of_passes=None):
    """Return the sizes of the memory that a run allocates and that outlives it, except the memory of its results."""
    allocated = Allocated()
    with allocated:
        results = run(*args)
    if of_passes is not None:
        of_passes += allocated.storages
    gc.collect()
    alive = {s.data_ptr(): s.size() for reference in allocated.storages if (s := reference()) is not None}
    return results, [size for place, size in alive.items() if place not in storages((args, results))]


@pytest.fixture
def first_calls(monkeypatch):
    forget_kept_tensors(monkeypatch)


@pytest.mark.parametrize(
    "make",
    [
        launch.TileCounters,
        launch.no_counter,
        lambda device: one_group.offsets_of_one_group(5, device),
        lambda device: slot_functions.no_scale(5, device),
        lambda device: calls.ones(5, device),
        lambda device: AmaxHistory(DELAYED, 2, device),
    ],
    ids=["tile counters", "no counter", "one group", "no scale", "ones", "amax history"],
)
def test_another_thread_makes_the_kept_tensors(make, first_calls):
    def run(x):
        stays.append(make(x.device))
        return []

    stays = []
    assert kept(run, torch.zeros(4)) == ([], [])


def test_tensors_of_another_thread_may_stay():
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


def kept_by_passes(layer, make_arguments):
    """Compile a layer and train two steps; return the memory that each pass keeps, see `kept`. After the steps, the
    memory of arguments, results and values kept for backward is free.
    """
    torch._dynamo.reset()
    x, inputs = make_arguments()
    assert "unfused" not in str(layer.explain(x, **inputs))
    found, memory = [], [weakref.ref(s) for s in storages((x, inputs)).values()]

    def counting(graph, _inputs):
        def run(*args):
            results, others = kept(graph, *args, of_passes=memory)
            found.append(others)
            return results

        return make_boxed_func(run)

    call = torch.compile(layer, backend=aot_autograd(fw_compiler=counting, bw_compiler=counting))
    for _ in range(2):
        y = call(x, **inputs)
        if y.requires_grad:
            y.float().square().mean().backward()
    del x, y, inputs
    layer.zero_grad()
    gc.collect()
    assert len(memory) > 4
    assert [s.size() for reference in memory if (s := reference()) is not None] == []
    return found


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_tensor", "mxfp8"])
def test_a_graph_keeps_only_its_results(recipe, first_calls, builtin_rules, launched):
    layer = fm.MoE(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, dtype=BF16)
    with fm.recipe(recipe):
        found = kept_by_passes(layer, lambda: (torch.randn(TOKENS, HIDDEN, dtype=BF16, requires_grad=True), {}))
    assert found == [[]] * 4  # forward and backward, twice
    assert len(launched) >= 2 * 9  # at least one for each step of bf16


def test_inference_keeps_only_its_results(first_calls, builtin_rules, launched):
    layer = fm.Sequential(fm.GroupedLinear(EXPERTS, HIDDEN, INTERMEDIATE, dtype=BF16))

    def arguments():
        return torch.randn(TOKENS, HIDDEN, dtype=BF16), {"splits": torch.full((EXPERTS,), TOKENS // EXPERTS)}

    with torch.no_grad(), fm.recipe("fp8_tensor"):
        assert kept_by_passes(layer, arguments) == [[]] * 2
    assert launched
