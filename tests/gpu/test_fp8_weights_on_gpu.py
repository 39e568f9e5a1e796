"""Weights that are stored in FP8, on a GPU: the fused kernels against plain PyTorch, and no host synchronisation."""

import pytest
import torch
from kit.hopper import DEVICE, needs_gpu  # beside this file

import fusedmoe as fm
from fusedmoe.numerics.formats import fp8_block
from fusedmoe.ops import GroupedLinear

pytestmark = needs_gpu
E, H, I, ROWS = 8, 512, 384, 2000  # noqa: E741


def stored(n, k, power_of_two):
    codes = (torch.randn(E, n, k, device=DEVICE) * 100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(E, n // 128, k // 128, device=DEVICE).add_(0.5).mul_(0.01 / k**0.5)
    format = fp8_block(across=128, power_of_two=power_of_two)
    scale = torch.exp2(scale.log2().floor()) if power_of_two else scale
    return GroupedLinear.from_quantized(codes, scale, weight_format=format)


def called(experts, x, splits):
    x = x.detach().requires_grad_()
    y = experts(x, splits=splits)
    y.backward(torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y).to(y.dtype))
    return y.detach().float(), x.grad.float()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fused_kernels_compute_what_plain_pytorch_does(power_of_two):
    torch.manual_seed(0)
    experts = fm.Sequential(stored(2 * I, H, power_of_two), fm.SwiGLU(), stored(H, I, power_of_two))
    x = torch.randn(ROWS, H, device=DEVICE, dtype=torch.bfloat16)
    splits = torch.tensor([300, 0, 17, 512, 128, 1, 900, 100], device=DEVICE)
    got = called(experts, x, splits)
    with fm.disabled("sm90.*"):
        want = called(experts, x, splits)
    for g, w in zip(got, want, strict=True):
        assert w.norm() > 0
        assert (g - w).norm() < 2e-2 * w.norm()  # bf16 rounds scales in plain PyTorch; a step of FP8 may differ
        assert not g[int(splits.sum()) :].any()


def test_no_product_runs_unfused_or_waits_for_the_device():
    experts = fm.Sequential(stored(2 * I, H, False), fm.SwiGLU(), stored(H, I, False))
    x = torch.randn(ROWS, H, device=DEVICE, dtype=torch.bfloat16)
    splits = torch.full((E,), ROWS // E, device=DEVICE)
    called(experts, x, splits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with fm.strict():
            y, dx = called(experts, x, splits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert y.any()
    assert dx.any()
    explained = experts.explain(x.requires_grad_(), splits=splits)
    assert all(step.rule for step in explained.steps), str(explained)
