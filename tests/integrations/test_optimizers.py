"""Optimizers, clipping and loss scaling of torch: the plain model, trained the same way, is the oracle."""

import pytest
import torch
from kit import plain_models
from torch import nn

import fusedmoe as fm

E, H, I = 4, 16, 8  # noqa: E741  (experts, hidden, intermediate)


def make(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(fm.MoE(H, I, E, 2, shared_intermediate=I), fm.MoE(H, I, E, 2)).to(dtype)


def plain(model, dtype=torch.float64):
    layers = plain_models.MoE(H, I, E, 2, shared=I, dtype=dtype), plain_models.MoE(H, I, E, 2, dtype=dtype)
    return plain_models.twin(nn.Sequential(*layers), model)


def train(model, optimizer, steps=4, clip=None, scaler=None, dtype=torch.float64, spoiled=()):
    """Losses and norms; the gradients of the steps that are spoiled have an inf in them."""
    told = []
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(2, 20, H, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.zero_grad()
        loss = (model(x) - x.roll(1, -1)).square().sum(-1).mean()
        told.append(loss.item())
        (loss if scaler is None else scaler.scale(loss)).backward()
        if step in spoiled:
            next(model.parameters()).grad[0, 0] = torch.inf
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            told.append(nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True).item())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return told


OPTIMIZERS = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9, fused=True),
}


def assert_trained(model, want):
    before = make(torch.float64).state_dict()
    for name, parameter in want.named_parameters():
        got = model.get_parameter(name)
        torch.testing.assert_close(got, parameter, msg=lambda text, name=name: f"{name}: {text}")
        assert (parameter - before[name]).abs().max() > 1e-4, f"{name} has not moved"


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_plain_models(name, clip):
    model = make()
    want = plain(model)
    got = train(model, OPTIMIZERS[name](model.parameters()), clip=clip)
    expected = train(want, OPTIMIZERS[name](want.parameters()), clip=clip)
    torch.testing.assert_close(got, expected)
    assert_trained(model, want)
    if clip is not None:
        assert min(expected[1::2]) > clip, "not every step was clipped"


@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW fused", "SGD fused"])
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


@pytest.mark.parametrize("clip", [None, 0.01])
def test_loss_scaling_skips_steps_with_infinite_gradients(clip):
    model = make()
    want = plain(model)
    results = []
    for trained in (model, want):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, foreach=True)
        told = train(trained, optimizer, steps=5, clip=clip, scaler=scaler, spoiled=(1,))
        results.append((told, scaler.get_scale(), int(optimizer.state[next(trained.parameters())]["step"])))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][1:] == (2.0**10, 4)  # halved once, doubled once after it; five steps but one
    assert_trained(model, want)


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
