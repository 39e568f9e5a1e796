"""The demo's optimizer: plain AdamW in float32, and in bfloat16 no update is lost to rounding."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from fusedmoe.commands.demo.optimizer import BETAS, MasterAdamW, learning_rate


def gradients_into(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_learning_rate_warms_up_peaks_and_falls_to_a_twentieth():
    rates = [learning_rate(step, 100, 2.0) for step in range(100)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert max(rates) == 2.0
    assert all(later < earlier for earlier, later in pairwise(rates[5:]))
    assert rates[-1] == pytest.approx(0.1, rel=0.05)
    assert learning_rate(0, 1, 2.0) == 2.0


def test_float32_is_plain_adamw_with_decay_on_matrices_alone():
    torch.manual_seed(0)
    model, expected = nn.Linear(4, 3), nn.Linear(4, 3)
    expected.load_state_dict(model.state_dict())
    ours = MasterAdamW(model, weight_decay=0.5)
    groups = [{"params": [expected.weight], "weight_decay": 0.5}, {"params": [expected.bias], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=BETAS)
    for step in range(3):
        gradients_into(model, step)
        gradients_into(expected, step)
        ours.step(0.01)
        plain.step()
    torch.testing.assert_close(model.weight, expected.weight)
    torch.testing.assert_close(model.bias, expected.bias)
    assert model.weight.grad is None


def test_a_long_gradient_is_clipped_and_its_norm_returned():
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.tensor([[30.0]])
    optimizer = MasterAdamW(model, weight_decay=0.0)
    assert float(optimizer.step(0.0)) == 30.0
    moment = optimizer.state()["adamw"]["state"][0]["exp_avg"]
    torch.testing.assert_close(moment, torch.tensor([[1 - BETAS[0]]]))


def test_updates_too_small_for_a_bfloat16_weight_add_up():
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = MasterAdamW(model, weight_decay=0.0)
    for _ in range(20):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.step(1e-3)  # an eighth of what bfloat16 can tell from 1
    assert model.weight.item() == pytest.approx(0.98, abs=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_goes_on_bit_for_bit(dtype):
    torch.manual_seed(0)
    model, other = nn.Linear(4, 3, dtype=dtype), nn.Linear(4, 3, dtype=dtype)
    optimizer = MasterAdamW(model, 0.1)
    gradients_into(model, 0)
    optimizer.step(0.01)
    other.load_state_dict(model.state_dict())
    continued = MasterAdamW(other, 0.1)
    continued.load_state(optimizer.state())
    for step in (1, 2):
        gradients_into(model, step)
        gradients_into(other, step)
        optimizer.step(0.01)
        continued.step(0.01)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)
