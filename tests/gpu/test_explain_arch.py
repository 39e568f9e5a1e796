"""``explain(..., arch=90)`` on any machine gives the plan of an sm_90 GPU; its kernels return what was announced."""

import pytest
import torch
from kit.hopper import needs_gpu

import fusedmoe as fm

pytestmark = needs_gpu

BF16 = torch.bfloat16


@pytest.mark.parametrize("recipe", ["bf16", "fp8_row", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_asked_elsewhere_and_there(recipe, bias, dtype):
    def plan(device, **asked):
        layer = fm.MoE(192, 136, 12, 3, bias=bias, device=device, dtype=dtype)
        with fm.recipe(recipe):
            return fm.explain(layer, tokens=300, **asked).groups[0].explanation.plans[0]

    there = plan("cuda")
    for device in ("cpu", "meta", "cuda"):
        asked = plan(device, arch=90)
        assert asked.steps == there.steps
        assert (asked.attempts, asked.kept_bytes) == (there.attempts, there.kept_bytes)


@pytest.mark.parametrize("weight_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("bias", [False, True])
def test_every_kernel_returns_what_was_announced(bias, weight_dtype):
    """The first call of a kind compares shapes, dtypes and device of each step's results, forward and backward."""
    layer = fm.MoE(192, 136, 12, 3, bias=bias, device="cuda", dtype=BF16)
    x = torch.randn(300, 192, device="cuda", dtype=BF16, requires_grad=True)
    index = torch.randint(0, 12, (300, 3), device="cuda")
    weight = torch.rand(300, 3, device="cuda", dtype=weight_dtype, requires_grad=True)
    with fm.strict(unavailable=True):
        y = layer.experts(x, expert_index=index, expert_weight=weight)
        y.sum().backward()
    assert weight.grad.dtype is weight_dtype
    assert weight.grad.abs().sum() > 0
    assert x.grad.abs().sum() > 0


def test_a_wrong_kernel_is_named():
    class Wrong(fm.FusionRule, name="test.wrong", direction="forward"):
        act: fm.SwiGLU

        def offer(self, ctx):
            return fm.Step(needs=("act.input",), gives=("output",), launches=0)

        def build(self, ctx, keep):
            return lambda *tensors: lambda h: self.act.compute(h)[:3].cpu()

    x = torch.randn(5, 64, device="cuda", dtype=BF16)
    text = r"rule 'test.wrong' on 0.SwiGLU: 0.output: .* on cuda:0.* on cpu"
    with fm.register(Wrong), pytest.raises(fm.RuleError, match=text):
        fm.Sequential(fm.SwiGLU())(x)
