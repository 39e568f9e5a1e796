"""Activation checkpointing around layers, whole and selective, eager and compiled: gradients are those without it."""

from functools import partial

import pytest
import torch
from kit import toy
from kit.compare import assert_bitwise
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusedmoe as fm

E, H, I = 4, 16, 8  # noqa: E741  (experts, hidden, intermediate)

pytestmark = [
    pytest.mark.usefixtures("fresh_graphs"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo's own
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function that doesn't take boxed"),
]


class Block(torch.nn.Module):
    """A residual MoE layer and experts that are called with splits: two chains, and what stands around them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(H)
        self.moe = fm.MoE(H, I, E, 2)
        self.experts = fm.Sequential(fm.GroupedLinear(E, H, 2 * I, bias=True), fm.SwiGLU(), fm.GroupedLinear(E, I, H))

    def forward(self, x, splits):
        x = x + self.moe(self.norm(x))
        return x + self.experts(x, splits=splits)


def outcome(block, call):
    x = torch.randn(24, H, generator=torch.Generator().manual_seed(1), requires_grad=True)
    return toy.outcome(block, x, call, splits=torch.tensor([5, 0, 10, 7]))


@pytest.mark.parametrize(("compiled", "recipe", "reentrant"), [
    ("no", "bf16", True), ("no", "mxfp8", False), ("around", "mxfp8", True), ("inside", "mxfp8", False),
])  # fmt: skip
def test_gradients_are_those_without(reentrant, compiled, recipe):
    block = Block()
    with fm.recipe(recipe):
        want = outcome(block, block)
        called = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled == "inside" else block

        def call(x, splits):
            return checkpoint(called, x, splits, use_reentrant=reentrant)

        if compiled == "around":
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
        assert_bitwise(outcome(block, call), want)


def selective(block, saved, seen):
    def policy(context, op, *args, **kwargs):
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda x, splits: checkpoint(block, x, splits, use_reentrant=False, context_fn=contexts)


ATEN = torch.ops.aten
OUTSIDE = ATEN.mm.default, ATEN.native_layer_norm.default  # the router's product is one


@pytest.mark.parametrize(("saved", "recipe"), [((), "bf16"), (OUTSIDE, "mxfp8")], ids=["nothing", "some"])
def test_selective_in_eager_mode(saved, recipe):
    """A policy sees what plain PyTorch runs for a chain, and no operator of the chain's own."""
    block, seen = Block(), []
    with fm.recipe(recipe):
        want = outcome(block, block)
        fm.clear_weight_cache(block)  # the second time the quantized weights are there already
        assert_bitwise(outcome(block, selective(block, saved, seen)), want)
    assert ATEN.native_layer_norm.default in seen
    assert not any(str(op).startswith("fusedmoe.run_chain") for op in seen)


@pytest.mark.parametrize(("save", "recipe"), [(True, "bf16"), (False, "mxfp8")])
def test_selective_in_a_compiled_graph(save, recipe):
    """There a chain is one operator, which a policy has saved or computed again."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    block, seen, graphs = Block(), [], {}
    with fm.recipe(recipe):
        want = outcome(block, block)
        outcome(block, torch.compile(block, backend="eager"))  # the operator is there from the first graph on
        chain = torch.ops.fusedmoe.run_chain.default

        def kept(name):
            def compiler(graph, inputs):
                graphs[name] = [node.target for node in graph.graph.nodes]
                return make_boxed_func(graph)

            return compiler

        backend = aot_autograd(
            fw_compiler=kept("forward"), bw_compiler=kept("backward"), partition_fn=min_cut_rematerialization_partition
        )
        call = torch.compile(selective(block, (chain,) if save else (), seen), backend=backend, fullgraph=True)
        assert_bitwise(outcome(block, call), want)
    assert set(seen) >= {chain, ATEN.native_layer_norm.default}
    assert graphs["forward"].count(chain) == 2
    assert graphs["backward"].count(torch.ops.fusedmoe.run_chain_backward.default) == 2
    assert graphs["backward"].count(chain) == (0 if save else 2)
