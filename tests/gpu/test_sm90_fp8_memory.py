"""On Hopper, backward quantizes rows by columns again: the memory that forward keeps, and the same bits.

Axes: T tokens, K chosen experts per token, E experts, H hidden, I intermediate features.
"""

import pytest
import torch
from test_async import capture
from test_sm90_training import BF16, outcome
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not hopper, reason="needs an sm_90 GPU")

T, K, E, H, I = 4096, 8, 16, 1024, 256  # noqa: E741
COLUMNS = "sm90.gathered_quantize_columns"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def layer_and_tokens(hidden=H, intermediate=I, experts=E, count=T):
    layer = fm.MoE(hidden, intermediate, experts, K, device="cuda", dtype=BF16)
    x, dy = (torch.randn(count, hidden, device="cuda", dtype=BF16) for _ in range(2))
    return layer, x, dy


def rules(layer, x):
    (plan,) = layer.explain(x.clone().requires_grad_()).plans
    assert not plan.unfused
    return [step.rule for step in plan.steps]


def kept(layer, x, recipe):
    """The bytes that live from the end of forward on, beyond the result and the quantized weights."""
    with fm.recipe(recipe):
        layer(x)  # quantizes the weights
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = layer(x)
        return torch.cuda.memory_allocated() - before - y.nbytes


def test_the_memory_that_forward_keeps():
    """At most 5% more than in bf16, whose kernels keep tokens too. Qwen3-30B-A3B."""
    layer, x, _ = layer_and_tokens(2048, 768, 128, 16384)
    x.requires_grad_()
    with fm.recipe("fp8_block"):
        assert COLUMNS in rules(layer, x)
        with fm.disabled(COLUMNS):
            columns = kept(layer, x, "fp8_block")
    in_bf16, in_fp8 = kept(layer, x, "bf16"), kept(layer, x, "fp8_block")
    assert in_fp8 <= 1.05 * in_bf16
    assert columns - in_fp8 > 0.95 * (16384 * K * 2048)
    with fm.recipe("fp8_block"):
        (plan,) = layer.explain(x).plans
    assert plan.kept_bytes == pytest.approx(in_fp8 + x.nbytes, rel=0.02)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_the_same_bits(recipe):
    layer, x, dy = layer_and_tokens()
    with fm.recipe(recipe):
        assert COLUMNS in [step.rule for plan in layer.explain(x).plans for step in plan.steps]
        got = outcome(layer, x, {}, dy)
        with fm.disabled(COLUMNS):
            want = outcome(layer, x, {}, dy)
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert t.any(), f"{name}: zeros would pass"
        assert torch.equal(got[name], t), name


def test_a_step_is_one_graph_and_never_waits(no_sync):
    layer, x, dy = layer_and_tokens()
    weight = layer.experts.gate_up.weight
    leaf, found = x.clone().requires_grad_(), {}

    def step():
        with fm.recipe("fp8_block"):
            y = layer(leaf)
        gradients = torch.autograd.grad(y, (leaf, weight), dy)
        found.update(zip(("y", "x", "w"), (y.detach(), *gradients), strict=True))

    step()
    with no_sync():
        step()
    graph = capture(step)
    with torch.no_grad():
        leaf.copy_(x.flip(0))
    graph.replay()
    again = {name: t.clone() for name, t in found.items()}
    step()
    for name, t in found.items():
        assert t.any(), name
        assert torch.equal(again[name], t), name


def test_checkpointing_and_a_compiled_layer():
    layer, x, dy = layer_and_tokens()
    with fm.recipe("fp8_block"):
        want = outcome(layer, x, {}, dy)
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=False)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        assert torch.equal(dx, want["x"])
        got = outcome(torch.compile(layer, fullgraph=True), x, {}, dy)
    for name, t in want.items():
        assert t.any(), name
        assert torch.equal(got[name if name in got else f"_orig_mod.{name}"], t), name
