"""The router's balance bias is fp32 through every module cast, move, load and assignment."""

import copy

import pytest
import torch
from torch import nn

import fusedmoe as fm

E, BF16 = 4, torch.bfloat16
UNEVEN = torch.tensor([0, 8, 8, 16])  # below, at and above the mean of 8


def moe(**kwargs):
    return fm.MoE(16, 8, num_experts=E, top_k=2, score="sigmoid", **kwargs)


def assert_small_steps_add_up(router):
    for _ in range(2000):
        router.update_bias(UNEVEN)
    torch.testing.assert_close(router.balance_bias, torch.tensor([2.0, 0.0, 0.0, -2.0]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.double, lambda m: m.type(BF16)])
def test_a_cast_keeps_the_values_and_small_steps_add_up(cast):
    parent = nn.Sequential(moe(dtype=torch.float32))
    router, values = parent[0].router, torch.tensor([1.001, -0.33333, 1e-3, 3.14159])
    router.balance_bias.copy_(values)
    cast(parent)
    assert torch.equal(router.balance_bias, values)
    assert [name for name, _ in router.named_buffers()] == ["balance_bias"]
    assert router.weight.dtype is not torch.float32
    router.balance_bias.zero_()
    assert_small_steps_add_up(router)


def test_meta_to_empty_and_back_to_a_device():
    router = moe(device="meta", dtype=BF16).router.bfloat16()
    assert router.balance_bias.is_meta
    assert router.balance_bias.dtype is torch.float32
    router.to_empty(device="cpu")
    router.reset_parameters()
    assert torch.equal(router.balance_bias, torch.zeros(E))
    assert router.to("meta", BF16).balance_bias.dtype is torch.float32


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_in_bf16_is_loaded_into_fp32(assign):
    state = {name: t.bfloat16() for name, t in moe().state_dict().items()}
    state["router.balance_bias"] = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=BF16)
    layer = moe(dtype=BF16, device="meta" if assign else None)
    layer.load_state_dict(state, assign=assign)
    assert layer.router.balance_bias.dtype is torch.float32
    assert layer.router.balance_bias.tolist() == [1.0, -2.0, 0.5, 0.0]
    assert state["router.balance_bias"].dtype is BF16  # the caller's is left as it was


def test_one_that_is_set_copied_shared_or_absent():
    router = copy.deepcopy(moe().bfloat16()).router
    router.share_memory()
    assert router.balance_bias.is_shared()
    assert router.balance_bias.dtype is torch.float32
    router.balance_bias = torch.ones(E, dtype=BF16)
    assert router.balance_bias.dtype is torch.float32
    router.balance_bias = None
    assert router.balance_bias is None
    router = fm.Router(16, E, top_k=2).bfloat16()
    assert router.balance_bias is None
    assert router.weight.dtype is BF16


@pytest.mark.parametrize("of_data", [True, False])
def test_small_steps_add_up_after_a_cast_that_goes_past_the_module(of_data):
    """FSDP1, DDP and accelerate cast buffers so."""
    router = moe().router
    if of_data:
        router.balance_bias.data = router.balance_bias.data.bfloat16()
    else:
        router._buffers["balance_bias"] = router.balance_bias.bfloat16()
    buffer = router.balance_bias
    assert buffer.dtype is BF16
    assert_small_steps_add_up(router)
    assert router.balance_bias is buffer


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float64, BF16), (torch.float8_e4m3fn, torch.float32)], ids=str)
def test_the_choice_takes_a_bias_of_any_floating_dtype(dtype, tokens):
    router = moe(dtype=tokens).router
    values = torch.tensor([2.0, -4.0, 0.0, 4.0])  # larger than any difference of two scores
    router.balance_bias.data = values.to(dtype)
    assert router(torch.randn(6, 16, dtype=tokens)).expert_index.tolist() == [[3, 0]] * 6
    assert router.balance_bias.dtype is dtype
    router.update_bias(UNEVEN)
    assert torch.equal(router.balance_bias, values + 1e-3 * torch.tensor([1.0, 0.0, 0.0, -1.0]))
