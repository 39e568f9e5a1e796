"""Casts to small types, bit for bit against ml_dtypes and gfloat: all bf16 values, and fp32 of all exponents."""

import gfloat
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats
from kit import formats as oracles

from fusedmoe.numerics.formats import E2M1, E4M3, E5M2, nvfp4, quantize
from fusedmoe.numerics.formats.casts import from_codes, pack, to_codes, unpack
from fusedmoe.numerics.formats.format import Quantizer

GFLOAT = {
    "e4m3": gfloat_formats.format_info_ocp_e4m3,
    "e5m2": gfloat_formats.format_info_ocp_e5m2,
    "e2m1": gfloat_formats.format_info_ocp_e2m1,
}
every_element = pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=str)


def bf16(count=2**16):
    """The first so many bit patterns: from 0 upwards, then the negative ones."""
    return torch.arange(count, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()


def any_fp32(count):
    """Any bits: all exponents, subnormals, infinities and NaNs."""
    return torch.randint(-(2**31), 2**31, (count,)).to(torch.int32).view(torch.float32)


def beside_ties(element):
    """The values halfway between neighbours, and the fp32 beside them."""
    values = from_codes(torch.arange(2 ** (element.bits - 1), dtype=torch.uint8).view(element.dtype), element)
    values = values[values.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    beside = torch.cat([ties, *(ties.nextafter(torch.tensor(to)) for to in (0.0, torch.inf))])
    return torch.cat((beside, -beside))


def byte_codes(x, element, *args):
    return to_codes(x, element, *args).view(torch.uint8).numpy()


@every_element
def test_rounding_to_nearest(element):
    # a third of the random values near the type's own exponents
    x = torch.cat((bf16(), any_fp32(200_000), torch.randn(100_000) * element.max / 3, beside_ties(element)))
    assert x.isnan().any()
    assert x.isinf().any()
    np.testing.assert_array_equal(byte_codes(x, element), oracles.codes_of(x.numpy(), element.name))
    x = torch.cat((bf16(), beside_ties(element)))
    x = x[x.isfinite()]
    info = GFLOAT[element.name]
    rounded = gfloat.round_ndarray(info, x.double().numpy(), sat=True)
    np.testing.assert_array_equal(byte_codes(x, element), gfloat.encode_ndarray(info, rounded).astype(np.uint8))


@every_element
def test_values_of_all_codes(element):
    codes = torch.arange(2**element.bits, dtype=torch.uint8)
    values = from_codes(codes.view(element.dtype), element)
    assert values.dtype is torch.float32
    expected = oracles.values_of(codes.numpy(), element.name)
    np.testing.assert_array_equal(values.numpy(), expected)
    np.testing.assert_array_equal(np.signbit(values.numpy())[values == 0], np.signbit(expected)[expected == 0])
    finite = values.isfinite()
    assert torch.equal(to_codes(values, element).view(torch.uint8)[finite], codes[finite])


@pytest.mark.parametrize("length", [0, 1, 2, 7, 16])
def test_packing(length):
    codes = torch.randint(0, 16, (3, 2, length), dtype=torch.uint8)
    packed = pack(codes)
    assert packed.shape == (3, 2, (length + 1) // 2)
    assert torch.equal(unpack(packed, length), codes)
    np.testing.assert_array_equal(packed.numpy(), oracles.packed(codes.numpy()))


# --- stochastic rounding -------------------------------------------------------------------------------------------

UP_TO_8 = 0x4100 + 1  # bf16 values from 0 to 8: beyond the largest of E2M1, where nothing is left to chance


def test_stochastic_rounding():
    bits = torch.arange(256, dtype=torch.uint8)
    for part in bf16(UP_TO_8).split(4096):
        x = part[:, None].expand(-1, 256).clone()
        x[::2] *= -1
        codes = byte_codes(x, E2M1, bits.expand_as(x))
        np.testing.assert_array_equal(codes, oracles.stochastic_codes(x.numpy(), bits.expand_as(x).numpy()))
    x = torch.cat((any_fp32(200_000), torch.randn(200_000) * 3, beside_ties(E2M1)))
    bits = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    assert x.isnan().any()
    with np.errstate(invalid="ignore"):
        expected = oracles.stochastic_codes(x.numpy(), bits.numpy())
    np.testing.assert_array_equal(byte_codes(x, E2M1, bits), expected)


def test_seeds():
    x, quantizer = torch.randn(64, 64), Quantizer(nvfp4(), stochastic_rounding=True)

    def of_global(seed):
        torch.manual_seed(seed)
        return quantize(x, quantizer).data

    def of_generator(seed):
        return quantize(x, quantizer, generator=torch.Generator().manual_seed(seed)).data

    for codes in (of_global, of_generator):
        assert torch.equal(codes(1), codes(1))
        assert not torch.equal(codes(1), codes(2))
    state = torch.get_rng_state()
    of_generator(3)
    assert torch.equal(torch.get_rng_state(), state)
