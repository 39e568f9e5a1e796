"""Under ``torch.autocast`` a chain computes in the lower dtype, and gradients arrive in that of the parameters."""

import pytest
import torch
from chains import H, chain

import fusedmoe as fm

SPLITS = torch.tensor([2, 0, 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_a_chain_is_the_cast_chain(inside, dtype):
    seq = chain("gpt_oss", 3, torch.float32)
    x = torch.randn(6, H, requires_grad=True)
    probs = torch.rand(6, requires_grad=True)
    dy = torch.randn(6, H).to(dtype)
    with torch.autocast("cpu", dtype):
        y = seq(x, splits=SPLITS, probs=probs)
        if inside:
            y.backward(dy)
    if not inside:
        y.backward(dy)

    low = chain("gpt_oss", 3, dtype)
    low.load_state_dict(seq.state_dict())
    low_x = x.detach().to(dtype).requires_grad_()
    low_probs = probs.detach().clone().requires_grad_()
    expected = low(low_x, splits=SPLITS, probs=low_probs)
    expected.backward(dy)

    assert y.dtype is expected.dtype is dtype
    assert torch.equal(y, expected)
    assert y.any()
    for got, want in zip((x, probs, *seq.parameters()), (low_x, low_probs, *low.parameters()), strict=True):
        assert got.grad.dtype is torch.float32
        assert torch.equal(got.grad, want.grad.float())
        assert got.grad.any()


def test_a_lower_dtype_comes_in():
    # after another module that autocast ran in bf16
    seq = chain("mlp", 3, torch.float32)
    x = torch.randn(6, H).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = seq(x, splits=SPLITS)
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype is torch.bfloat16
    assert seq[0].weight.grad.dtype is torch.float32


def test_fp64_is_left_alone():
    seq = chain("mlp", 3)
    x = torch.randn(6, H, dtype=torch.float64)
    expected = seq(x, splits=SPLITS)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(seq(x, splits=SPLITS), expected)


def test_foreign_modules_between_chains_are_autocast_too():
    seq = fm.Sequential(fm.GroupedLinear(3, H, H), torch.nn.Linear(H, H), fm.GroupedLinear(3, H, H))
    with torch.autocast("cpu", torch.bfloat16):
        y = seq(torch.randn(5, H), splits=SPLITS)
    assert y.dtype is torch.bfloat16
    y.sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.any() for p in seq.parameters())


def test_autocast_off_inside_autocast():
    seq = chain("mlp", 3, torch.float32)
    x = torch.randn(6, H)
    expected = seq(x, splits=SPLITS)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert torch.equal(seq(x, splits=SPLITS), expected)


def test_autocast_is_still_on_afterwards():
    seq = chain("mlp", 3, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        seq(torch.randn(6, H), splits=SPLITS).sum().backward()
        assert torch.is_autocast_enabled("cpu")
        assert (torch.randn(2, 2) @ torch.randn(2, 2)).dtype is torch.bfloat16
