"""Optimizers and loss scaling of torch. Training against a plain model is in `test_data_parallel`."""

import pytest
import torch
from torch import nn

import fusedmoe as fm

E, H, I = 4, 16, 8  # noqa: E741  (experts, hidden, intermediate)


def make(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(fm.MoE(H, I, E, 2, shared_intermediate=I), fm.MoE(H, I, E, 2)).to(dtype)


OPTIMIZERS = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_quantized_weights_are_of_the_weights_after_the_step(name):
    """Every step's loss is that of a model that never quantized anything before."""
    model = make(torch.float32)
    optimizer = OPTIMIZERS[name](model.parameters())
    losses = []
    for x in torch.randn(4, 40, H):
        with fm.recipe("mxfp8"):
            loss = model(x).square().mean()
            other = make(torch.float32)
            other.load_state_dict(model.state_dict())
            assert torch.equal(loss, other(x).square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(set(losses)) == 4


def test_an_overflow_in_fp16_is_skipped_and_training_goes_on():
    """Under autocast to fp16 a scale of 2**24 overflows in the experts' own gradients: the scaler finds its way."""
    model = make(torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(40, H)
    skipped, losses = 0, []
    for _ in range(24):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = model(x)
        loss = (y.float() - x.roll(1, -1)).square().sum(-1).mean()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            skipped += 1
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters()) == (not losses)
        else:
            losses.append(loss.item())
    assert skipped >= 2
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() and not torch.equal(before[name], p) for name, p in model.named_parameters())
