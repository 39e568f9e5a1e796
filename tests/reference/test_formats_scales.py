"""Scales from amax, bit for bit: over all bf16, and over the significands of fp32."""

import ml_dtypes
import numpy as np
import pytest
import torch
from kit import formats as oracles

from fusedmoe.numerics.formats import E4M3, E5M2, fp8_block, fp8_row, nvfp4, quantize
from fusedmoe.numerics.formats.scales import (
    decoded,
    e8m0_floor,
    e8m0_rceil,
    encode_and_scale,
    power_of_two,
    tensor_encode,
)

FLT_MAX = torch.finfo(torch.float32).max
every_element = pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)


def bf16_amax():
    """All that are finite: 0 and subnormals too."""
    return torch.arange(0x7F80, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()


def fp32_amax(*exponents, step=128):
    """Significands: every so many, the first and the last few, and those beside 1.75, which 448 and 57344 have."""
    beside = (torch.arange(1, 9), 2**23 - torch.arange(1, 9), 0x600000 + torch.arange(-8, 9))
    mantissa = torch.cat((torch.arange(0, 2**23, step), *beside))
    return torch.cat([(mantissa + ((e + 127) << 23)).to(torch.int32).view(torch.float32) for e in exponents])


@every_element
@pytest.mark.parametrize(
    ("function", "exact"), [(e8m0_rceil, oracles.rceil_byte), (e8m0_floor, oracles.floor_byte)], ids=["rceil", "floor"]
)
def test_e8m0(function, exact, element):
    # floats beside powers of two, which log2 in fp32 takes for those, are among them
    amax = torch.cat((bf16_amax(), fp32_amax(-100, 0, 127, step=2048), fp32_amax(8, step=512)))
    assert function(amax, element).tolist() == [exact(a, element.max) for a in amax.numpy()]


def test_power_of_two():
    byte = torch.arange(256, dtype=torch.uint8)
    expected = byte.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.isnan(expected[255])
    assert expected[0] == 2.0**-127
    np.testing.assert_array_equal(power_of_two(byte).numpy(), expected)
    np.testing.assert_array_equal(decoded(byte.view(torch.float8_e8m0fnu)).numpy(), expected)


@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
@every_element
def test_fp32_rules(element, epsilon):
    amax = torch.cat((bf16_amax(), fp32_amax(-127, 0, 127, step=2048)))
    for power_of_two_scale, exact in ((False, oracles.fp32_encode), (True, oracles.power_of_two_encode)):
        encode, scale = encode_and_scale(amax, fp8_row(element, power_of_two_scale, epsilon))
        expected = np.array([exact(a, element.max, epsilon) for a in amax.numpy()])
        np.testing.assert_array_equal(encode.numpy(), expected)
        np.testing.assert_array_equal(scale.numpy(), np.float32(1) / expected)
        assert encode.isfinite().all()
        assert (scale.isfinite() & (scale > 0)).all()


def deepgemm(x, across):
    """DeepGEMM's ``per_token_cast_to_fp8`` and ``per_block_cast_to_fp8`` with ``use_ue8m0``, from its formulas."""
    rows, columns = x.shape
    blocks = x.float().view(rows // across, across, columns // 128, 128)
    amax = blocks.abs().amax((1, 3)).clamp(1e-4)
    bits = (amax / 448.0).view(torch.int32)
    exponent = (bits >> 23 & 0xFF) + (bits & 0x7FFFFF != 0).int()
    factor = (exponent.clamp(1, 254) << 23).view(torch.float32)
    codes = (blocks * (1.0 / factor)[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(rows, columns), factor


@pytest.mark.parametrize("across", [1, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_deepgemm(dtype, across):
    # from above DeepGEMM's lower bound of 1e-4
    down, right = (64, 54) if across == 1 else (6, 64)
    amax = bf16_amax()
    amax = amax[(amax >= 2.0**-13) & (amax < 2.0**14)]
    amax = amax[torch.randint(len(amax), (down, right))]
    x = ((torch.rand(down, across, right, 128) * 2 - 1) * amax[:, None, :, None]).to(dtype)
    x[:, 0, :, 0] = amax
    x = x.view(down * across, right * 128)
    codes, factor = deepgemm(x, across)
    found = quantize(x, fp8_block(across=across))
    assert torch.equal(found.scale, factor)
    assert torch.equal(found.data.view(torch.uint8), codes.view(torch.uint8))


TENSOR_AMAX = [1.0, 42.0, 3e-3, 2.0**-126, 1e-39, 1e-45, 2688.0, 7.3e8, FLT_MAX, 0.0]


def test_nvfp4_tensor_scale():
    amax = torch.cat((torch.tensor(TENSOR_AMAX), bf16_amax(), fp32_amax(-10, 0, step=2048)))
    expected = np.array([oracles.tensor_encode(a) for a in amax.numpy()])
    np.testing.assert_array_equal(tensor_encode(amax).numpy(), expected)
    assert tensor_encode(torch.tensor([0.0, 1e-45, 2688.0])).tolist() == [1, FLT_MAX, 1]


@pytest.mark.parametrize("part", range(len(TENSOR_AMAX)))
def test_nvfp4_block_scale(part):
    """Each amax of a tensor with a tenth of bf16's values for its blocks."""
    tensor_amax = TENSOR_AMAX[part]
    # a block exceeds its tensor only where amax comes from elsewhere: then the scale is clipped
    blocks = bf16_amax()[part :: len(TENSOR_AMAX)]
    amax = torch.cat((blocks, torch.rand(2000) * min(tensor_amax, 1e38), torch.zeros(1)))
    encode = tensor_encode(torch.tensor([tensor_amax]))
    factor, scale = encode_and_scale(amax, nvfp4(), encode)
    expected = [oracles.two_level(a, encode.numpy()[0]) for a in amax.numpy()]
    np.testing.assert_array_equal(scale.view(torch.uint8).numpy(), [code for code, _ in expected])
    np.testing.assert_array_equal(factor.numpy(), [factor for _, factor in expected])
    assert factor.isfinite().all()
