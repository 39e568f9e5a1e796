"""FLOP counters and FakeTensors where there are fused kernels."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fusedmoe as fm

E, H, I, R = 8, 128, 64, 256  # noqa: E741  (experts, hidden, intermediate, rows)
FORWARD = 2 * R * (H * 2 * I + I * H)


def mlp(device):
    torch.manual_seed(0)
    return fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, device=device, dtype=torch.bfloat16),
        fm.SwiGLU(),
        fm.GroupedLinear(E, I, H, device=device, dtype=torch.bfloat16),
    )


def count(seq, x, splits):
    with FlopCounterMode(display=False) as counter:
        y = seq(x, splits=splits)
        forward = counter.get_total_flops()
        y.sum().backward()
    return forward, counter.get_total_flops() - forward


def arguments(device):
    x = torch.randn(R, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.full((E,), R // E - 1, device=device)  # the last rows belong to no expert


def test_a_counter_counts_what_fused_kernels_compute_otherwise(device):
    seq, (x, splits) = mlp(device), arguments(device)
    before = seq(x, splits=splits)
    fused = seq.explain(x, splits=splits)
    assert count(seq, x, splits) == (FORWARD, 2 * FORWARD)
    assert str(seq.explain(x, splits=splits)) == str(fused)  # the calls after it are planned as those before
    assert torch.equal(seq(x, splits=splits), before)


def test_fake_tensors_never_reach_a_kernel(device):
    real, (x, splits) = mlp(device), arguments(device)
    y = real(x, splits=splits)
    y.sum().backward()
    mode = FakeTensorMode()
    fake_x, fake_splits = mode.from_tensor(x.detach()).requires_grad_(), mode.from_tensor(splits)
    with mode:
        seq = mlp(device)
        assert count(seq, fake_x, fake_splits) == (FORWARD, 2 * FORWARD)
        assert seq(fake_x, splits=fake_splits).device == y.device
    for fake, of_run in zip(
        [fake_x.grad, *(p.grad for p in seq.parameters())], [x.grad, *(p.grad for p in real.parameters())], strict=True
    ):
        assert (fake.shape, fake.dtype, fake.device) == (of_run.shape, of_run.dtype, of_run.device)
