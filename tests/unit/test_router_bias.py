"""The router's balance bias is fp32 through every module cast, move, load and assignment."""

import copy
import warnings

import pytest
import torch
from torch import nn

import fusedmoe as fm

E = 4
UNEVEN = torch.tensor([0, 8, 8, 16])  # below, at and above the mean of 8


def moe(**kwargs):
    return fm.MoE(16, 8, num_experts=E, top_k=2, score="sigmoid", **kwargs)


CASTS = {
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "to dtype": lambda m: m.to(torch.bfloat16),
    "to device and dtype": lambda m: m.to("cpu", torch.bfloat16),
    "to like a tensor": lambda m: m.to(torch.zeros(1, dtype=torch.bfloat16)),
    "type": lambda m: m.type(torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_two_thousand_small_steps_add_up(cast):
    parent = cast(nn.Sequential(moe(dtype=torch.float32)))
    router = parent[0].router
    for _ in range(2000):
        router.update_bias(UNEVEN)
    assert router.weight.dtype is not torch.float32
    torch.testing.assert_close(router.balance_bias, torch.tensor([2.0, 0.0, 0.0, -2.0]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_a_cast_keeps_the_values_that_were_there(cast):
    router = moe().router
    values = torch.tensor([1.001, -0.33333, 1e-3, 3.14159])
    router.balance_bias.copy_(values)
    cast(router)
    assert torch.equal(router.balance_bias, values)
    assert [name for name, _ in router.named_buffers()] == ["balance_bias"]


def test_meta_to_empty_and_back_to_a_device():
    router = moe(device="meta", dtype=torch.bfloat16).router.bfloat16()
    assert router.balance_bias.is_meta
    assert router.balance_bias.dtype is torch.float32
    router.to_empty(device="cpu")
    router.reset_parameters()
    assert torch.equal(router.balance_bias, torch.zeros(E))
    assert router.to("meta", torch.bfloat16).balance_bias.dtype is torch.float32


def test_under_another_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        router = moe().router
        router.to(torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert router.weight.dtype is torch.bfloat16
    assert router.balance_bias.dtype is torch.float32


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_in_bf16_is_loaded_into_fp32(assign):
    state = {name: t.bfloat16() for name, t in moe().state_dict().items()}
    state["router.balance_bias"] = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.bfloat16)
    layer = moe(dtype=torch.bfloat16, device="meta" if assign else None)
    layer.load_state_dict(state, assign=assign)
    assert layer.router.balance_bias.dtype is torch.float32
    assert layer.router.balance_bias.tolist() == [1.0, -2.0, 0.5, 0.0]
    assert state["router.balance_bias"].dtype is torch.bfloat16  # the caller's is left as it was


def test_one_that_is_set_as_an_attribute_is_made_fp32():
    router = moe().router
    router.balance_bias = torch.ones(E, dtype=torch.bfloat16)
    assert router.balance_bias.dtype is torch.float32
    router.balance_bias = None
    assert router.balance_bias is None


def test_a_deepcopy_and_a_shared_bias():
    router = copy.deepcopy(moe().bfloat16()).router
    router.share_memory()
    assert router.balance_bias.is_shared()
    assert router.balance_bias.dtype is torch.float32


def test_a_router_without_one_casts_as_any_module():
    router = fm.Router(16, E, top_k=2).bfloat16()
    assert router.balance_bias is None
    assert router.weight.dtype is torch.bfloat16


def test_a_cast_layer_routes_and_updates():
    layer = moe().bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, stats = layer(torch.randn(6, 16, dtype=torch.bfloat16), return_stats=True)
    layer.router.update_bias(stats.load)
    assert layer.router.balance_bias.dtype is torch.float32


def cast_data(router):
    for buffer in router.buffers():
        buffer.data = buffer.data.bfloat16()


def cast_buffer(router):
    router._buffers["balance_bias"] = router.balance_bias.bfloat16()


@pytest.mark.parametrize("cast", [cast_data, cast_buffer])
def test_small_steps_add_up_after_a_cast_that_goes_past_the_module(cast):
    """FSDP1, DDP and accelerate cast buffers so."""
    router = moe().router
    cast(router)
    assert router.balance_bias.dtype is torch.bfloat16
    buffer = router.balance_bias
    for _ in range(2000):
        router.update_bias(UNEVEN)
    assert router.balance_bias is buffer
    torch.testing.assert_close(router.balance_bias, torch.tensor([2.0, 0.0, 0.0, -2.0]), rtol=0, atol=1e-3)


FLOATS = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("tokens", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_choice_takes_a_bias_of_any_floating_dtype(dtype, tokens):
    router = moe(dtype=tokens).router
    values = torch.tensor([2.0, -4.0, 0.0, 4.0])  # larger than any difference of two scores
    router.balance_bias.data = values.to(dtype)
    routing = router(torch.randn(6, 16, dtype=tokens))
    assert routing.expert_index.tolist() == [[3, 0]] * 6
    assert router.balance_bias.dtype is dtype
    router.update_bias(UNEVEN)
    assert torch.equal(router.balance_bias, values + 1e-3 * torch.tensor([1.0, 0.0, 0.0, -1.0]))
