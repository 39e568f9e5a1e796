"""`quantize`, bit for bit: against vectors worked out by hand, and against loops over experts and blocks."""

import itertools

import numpy as np
import pytest
import torch
from kit import formats as oracles
from kit.compare import label, pairwise
from kit.splits import ends

from fusedmoe.base.errors import InputError
from fusedmoe.numerics.formats import (
    E4M3,
    E5M2,
    Delayed,
    Quantizer,
    ScaleRule,
    amax_by_expert,
    fp8_block,
    fp8_row,
    fp8_tensor,
    hadamard,
    mxfp8,
    nvfp4,
    quantize,
)

INF, NAN = float("inf"), float("nan")
FLOOR = ScaleRule.FLOOR
ONE_ROW = [
    fp8_row(),
    fp8_row(E5M2, power_of_two=True, amax_epsilon=0.5),
    fp8_block(),
    fp8_block(E5M2, power_of_two=False),
    fp8_block(amax_epsilon=0.25),
    mxfp8(),
    mxfp8(E5M2),
    mxfp8(rule=FLOOR),
    mxfp8(E5M2, rule=FLOOR),
    nvfp4(),
]
TENSOR = [fp8_tensor(), fp8_tensor(E5M2, power_of_two=True), fp8_tensor(amax_epsilon=1e3)]
SQUARE = [fp8_block(across=128), fp8_block(E5M2, across=128, power_of_two=False), mxfp8(across=32), nvfp4(across=16)]
FORMATS = [*TENSOR, *ONE_ROW, *SQUARE]
AXES = [-1, -2]
OF_EXPERTS = [*itertools.product([*TENSOR, *ONE_ROW], AXES)]
axes = pytest.mark.parametrize("axis", AXES)


def formats(which):
    return pytest.mark.parametrize("format", which, ids=str)


def wide(*shape, dtype=torch.float32):
    """Magnitudes of many binades, zeros of both signs, and whole rows and columns of zeros."""
    x = (
        torch.randn(shape)
        * torch.exp2(torch.randint(-7, 8, (*shape[:-1], 1)))
        * torch.exp2(torch.randint(-4, 5, shape))
    )
    x = x.masked_fill(torch.rand(shape) < 0.1, 0.0).masked_fill(torch.rand(shape) < 0.05, -0.0)
    x[..., ::7, :] = 0
    x[..., 40:72] = 0
    return x.to(dtype)


def bits(x):
    """What two tensors are compared by, so that -0 is not 0; NaNs are all one."""
    if x.is_floating_point() and x.element_size() > 1:
        return x.float().nan_to_num(nan=12345.0, posinf=INF, neginf=-INF).view(torch.int32)
    return x.view(torch.uint8)


def check_same(actual, expected):
    for name, a, b in zip(("data", "scale", "tensor_scale"), actual.tensors(), expected.tensors(), strict=False):
        assert (a is None) is (b is None), name
        if a is not None:
            assert a.dtype is b.dtype, name
            assert torch.equal(bits(a), bits(b)), name


def check(actual, x, format, axis, offsets=None, hadamard=False):
    """A `QuantizedTensor` against the loops, with the layout that its documentation gives."""
    expected = oracles.quantize(
        x.float().numpy(), format, axis, None if offsets is None else offsets.tolist(), hadamard
    )
    assert actual.data.dtype is format.element.dtype
    assert actual.scale.dtype is format.rule.dtype
    np.testing.assert_array_equal(actual.data.view(torch.uint8).numpy(), expected.data)
    scale = actual.scale if actual.scale.dtype is torch.float32 else actual.scale.view(torch.uint8)
    np.testing.assert_array_equal(scale.numpy(), expected.scale)
    if format.tensor_scale:
        assert actual.tensor_scale.dtype is torch.float32
        np.testing.assert_array_equal(actual.tensor_scale.numpy(), expected.tensor_scale)
    else:
        assert actual.tensor_scale is None
    assert actual.data.is_contiguous()
    assert actual.scale.is_contiguous()
    assert (actual.format, actual.axis, actual.dtype, actual.shape) == (format, axis, x.dtype, tuple(x.shape))
    assert actual.offsets is offsets
    assert actual.rotated is hadamard
    if not hadamard:
        values = torch.from_numpy(np.ascontiguousarray(expected.values))
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(bits(actual.dequantize(dtype)), bits(values.to(dtype)))
        assert torch.equal(bits(actual.dequantize()), bits(values.to(x.dtype)))


SPLITS = [([130, 0, 1, 20, 37], 6), ([70], 0), ([0, 0, 0], 9), ([17, 0], 3), ([0], 0), ([1] * 5, 0), ([0, 0, 128], 0)]
SHAPES = [(140, 149), (1, 1), (33, 16), (0, 40), (5, 0), (3, 140, 149), (1, 20, 33), (2, 32, 0)]


# blocks of several rows would be shared between experts, by rows
@pytest.mark.parametrize(
    ("split", "case", "dtype"),
    pairwise(SPLITS, [*OF_EXPERTS, *((f, -2) for f in SQUARE)], [torch.float32, torch.float16, torch.bfloat16]),
    ids=label,
)
def test_rows_of_experts(split, case, dtype):
    (counts, tail), (format, axis) = split, case
    x, offsets = wide(sum(counts) + tail, 149, dtype=dtype), ends(*counts)
    assert x.isfinite().all()
    check(quantize(x, format, axis, offsets=offsets), x, format, axis, offsets)


@axes
@formats(FORMATS)
def test_one_matrix_and_stacked_weights(format, axis):
    for shape in SHAPES:
        x = wide(*shape)
        if x.dim() == 3:
            x *= torch.logspace(-2, 2, shape[0])[:, None, None]  # nobody's scale is another's
        found = quantize(x, format, axis)
        check(found, x, format, axis)
        assert len(found.tensors()) == 2 + format.tensor_scale
        with pytest.raises(InputError, match="dgrad"):  # no product takes the other axis
            found.along(-3 - axis, "dgrad")
        assert found.nbytes == sum(t.numel() * t.element_size() for t in found.tensors())
        # columns are rows of the transpose, whatever the strides
        check_same(found, quantize(x.mT, format, -3 - axis))
        check_same(found, quantize(x.mT.contiguous().mT, format, axis))
    if format not in SQUARE:
        x, offsets = wide(50, 40).T, ends(20, 15)
        check(quantize(x, format, axis, offsets=offsets), x, format, axis, offsets)


@pytest.mark.parametrize(("format", "axis"), OF_EXPERTS, ids=label)
def test_tail_rows_are_not_looked_at(format, axis):
    x, offsets = wide(50, 40), ends(20, 0, 17)
    x[37:] = 0
    expected = quantize(x, format, axis, offsets=offsets)
    for value in (NAN, INF, 1e30):
        poisoned = x.clone()
        poisoned[37:] = value
        source = poisoned.clone()
        found = quantize(poisoned, format, axis, offsets=offsets)
        assert torch.equal(bits(poisoned), bits(source))
        check_same(found, expected)
        assert not bits(found.dequantize()[37:]).any()
        assert torch.equal(amax_by_expert(poisoned, offsets), amax_by_expert(x, offsets))


@axes
@formats(FORMATS)
def test_a_value_that_is_not_finite_spoils_itself_or_its_block(format, axis):
    finite = wide(64, 64)
    at = torch.zeros(64, 64, dtype=torch.bool)
    at[11, 13] = at[0, 0] = True
    expected = quantize(finite.masked_fill(at, 0.0), format, axis)
    spoiled = at.clone()
    if format.element.bits == 4:  # which has no NaN: the scale of the block has it
        across, along = format.block if axis == -1 else format.block[::-1]
        spoiled[11 // across * across :, 13 // along * along :][:across, :along] = True
        spoiled[:across, :along] = True
    for poison in (NAN, INF, -INF):
        x = finite.masked_fill(at, poison)
        x[0, 0] *= -1
        found = quantize(x, format, axis)
        check(found, x, format, axis)
        assert format.element.bits == 4 or torch.equal(bits(found.scale), bits(expected.scale))
        assert found.dequantize()[spoiled].isnan().all()
        assert torch.equal(bits(found.dequantize()[~spoiled]), bits(expected.dequantize()[~spoiled]))
        assert format.tensor_scale is False or torch.equal(found.tensor_scale, expected.tensor_scale)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_nothing_that_is_finite(poison):
    x = torch.full((2, 32), poison)
    assert quantize(x, fp8_row()).scale.tolist() == [[1.0], [1.0]]
    assert quantize(x, fp8_tensor()).scale.tolist() == [1.0]
    assert quantize(x, mxfp8()).scale.view(torch.uint8).tolist() == [[0], [0]]
    assert quantize(x, mxfp8()).dequantize().isnan().all()
    four = quantize(x, nvfp4())
    assert four.tensor_scale.tolist() == [1.0]
    assert four.scale.view(torch.uint8).tolist() == [[0x7F, 0x7F]] * 2
    assert four.dequantize().isnan().all()


@axes
@formats([f for f in FORMATS if f.scales_are_exact])
def test_bf16_holds_values_up_to_the_factor(format, axis):
    square = format in SQUARE
    found = quantize(
        wide(2, 100, 140) if square else wide(100, 140), format, axis, offsets=None if square else ends(40, 0, 1, 55)
    )
    values, factor = found.split()
    assert values.any()
    assert torch.equal(values.bfloat16().float(), values)
    if not format.tensor_scale:
        assert torch.equal(found.dequantize(torch.bfloat16).float(), found.dequantize(torch.float32))
    assert (factor is None) is (format.block[1] is not None and not format.tensor_scale)


def test_amax_by_expert():
    x = torch.tensor([[1.0, -3.0], [NAN, 2.0], [-INF, 0.0], [5.0, 6.0]])
    assert amax_by_expert(x).tolist() == [6.0]
    assert amax_by_expert(x, ends(2, 0, 1)).tolist() == [3.0, 0.0, 0.0]
    assert amax_by_expert(x.view(2, 2, 2)).tolist() == [3.0, 6.0]
    assert amax_by_expert(x.bfloat16(), ends(1)).dtype is torch.float32


@axes
def test_factors_from_elsewhere(axis):
    """As delayed scaling gives them: what has grown since is clipped; an infinity is not."""
    x, offsets, encode = wide(50, 40), ends(20, 0, 17), torch.tensor([3.0, 5.0, 1e3])
    found = quantize(x, Quantizer(fp8_tensor(), delayed=Delayed()), axis, offsets=offsets, encode=encode)
    assert torch.equal(found.scale, 1 / encode)
    values = found.dequantize()
    for first, end, factor in ((0, 20, 3.0), (20, 37, 1e3)):
        codes = oracles.codes_of(x[first:end].numpy() * np.float32(factor), "e4m3")
        expected = oracles.values_of(codes, "e4m3") * (np.float32(1) / np.float32(factor))
        np.testing.assert_array_equal(values[first:end].numpy(), expected)
    assert not values[37:].any()
    # the product of a value and its factor may be infinite: the value saturates
    x = torch.tensor([[1e30, -1e30, INF, -INF, NAN, 1.0]])
    for format in TENSOR:
        rows = x if axis == -1 else x.T
        found = quantize(rows, Quantizer(format, delayed=Delayed()), axis, encode=torch.tensor([1e20]))
        codes = found.data.float().flatten()[:6]
        assert codes[[0, 1, 5]].tolist() == [format.element.max, -format.element.max, format.element.max]
        assert codes[2:5].isnan().all()


def test_codes_that_are_quantized_again_along_the_other_axis_lose_little():
    """Scales are powers of two: only values that are small beside others of their new block change."""
    torch.manual_seed(0)
    x = (torch.randn(512, 512) * torch.randn(512, 1).mul(2).exp() * torch.randn(1, 512).mul(1.5).exp()).bfloat16()
    once = quantize(x, fp8_block(), -1).dequantize().float()
    again = quantize(once.bfloat16(), fp8_block(), -2).dequantize().float()
    assert (once - x.float()).norm() > 1e-2 * x.float().norm()
    assert 0 < (again - once).norm() < 1e-4 * once.norm()


@axes
@formats([nvfp4(), nvfp4(across=16)])
def test_stochastic_rounding_of_a_tensor(format, axis):
    """Scales are those of rounding to nearest; the random bits come in the layout of the codes."""
    x = wide(48, 80) * (1 + axis / 10)
    rows = x if axis == -1 else x.T
    random_bits = torch.randint(0, 256, rows.shape, dtype=torch.uint8)
    found = quantize(x, Quantizer(format, stochastic_rounding=True), axis, random_bits=random_bits)
    expected = oracles.quantize_matrix(rows.numpy(), format, random_bits.numpy())
    np.testing.assert_array_equal(found.codes().numpy(), expected.codes)
    np.testing.assert_array_equal(found.scale.view(torch.uint8).numpy(), expected.scale)
    nearest = quantize(x, format, axis, random_bits=random_bits)
    assert torch.equal(bits(nearest.scale), bits(found.scale))
    assert not torch.equal(nearest.data, found.data)


REFUSED = [
    ({"x": torch.zeros(4, 16, dtype=torch.float64)}, "x: .*float64"),
    ({"x": torch.zeros(2, 3, 4), "offsets": ends(1, 2)}, "x"),
    ({"axis": 1}, "axis"),
    ({"offsets": torch.tensor([4])}, "offsets"),
    ({"quantizer": mxfp8(across=32), "offsets": ends(4)}, "offsets: expected none"),
    ({"encode": torch.ones(1)}, "encode: expected none"),
    ({"quantizer": fp8_tensor(), "encode": torch.ones(2)}, "encode"),
    (
        {"quantizer": Quantizer(nvfp4(), stochastic_rounding=True), "random_bits": torch.zeros(4, 8).byte()},
        "random_bits",
    ),
]


@pytest.mark.parametrize(("arguments", "word"), REFUSED)
def test_arguments_that_do_not_fit_are_refused(arguments, word):
    with pytest.raises(InputError, match=f"^quantize: {word}"):
        quantize(**{"x": torch.zeros(4, 16), "quantizer": mxfp8(), **arguments})


# --- rotations -----------------------------------------------------------------------------------------------------


def test_rotations():
    h = hadamard.matrix()
    assert h.dtype is torch.float32
    np.testing.assert_array_equal(h.numpy(), oracles.HADAMARD)
    assert torch.equal(h @ h.T, torch.eye(16))
    x = torch.randint(-100, 101, (7, 64)) / 8  # sums of 16 are exact in fp32 in any order
    found = hadamard.rotate(x)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, (x.view(7, 4, 16) @ h).bfloat16().view(7, 64))
    exact = torch.randint(-8, 9, (8, 32)).float()  # its rotation has eight bits
    assert torch.equal(hadamard.rotate_back(hadamard.rotate(exact)), exact)


ROTATED = [mxfp8(), mxfp8(E5M2), nvfp4(), fp8_block(E4M3)]


@pytest.mark.parametrize(("split", "format"), pairwise(SPLITS, ROTATED), ids=str)
def test_rotated_rows_of_experts(split, format):
    # multiples of 1/8 up to 12: the sums of a tile are exact, and then rounded to bf16
    counts, tail = split
    x, offsets = torch.randint(-100, 101, (sum(counts) + tail, 40)) / 8, ends(*counts)
    x[offsets[-1] :] = NAN
    found = quantize(x, Quantizer(format, hadamard=True), -2, offsets=offsets)
    check(found, x, format, -2, offsets, hadamard=True)
    values = found.dequantize()
    assert values.shape == x.shape
    for first, end in itertools.pairwise([0, *offsets.tolist()]):
        if end > first:
            error = (values[first:end] - x[first:end]).norm() / x[first:end].norm()
            assert error < (0.2 if format.element.bits == 4 else 0.1)
    assert not values[offsets[-1] :].any()


@formats(ROTATED)
@pytest.mark.parametrize("shape", [(40, 33), (2, 70, 20)], ids=str)
def test_rotated_without_experts(shape, format):
    x = torch.randint(-100, 101, shape) / 8
    check(quantize(x, Quantizer(format, hadamard=True), -2), x, format, -2, hadamard=True)
    by_rows = quantize(x, Quantizer(format, hadamard=True), -1)
    assert not by_rows.rotated
    check_same(by_rows, quantize(x, format))
