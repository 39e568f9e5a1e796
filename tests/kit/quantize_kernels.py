"""Values to quantize, and comparisons of what kernels make of them with `fusedmoe.quantize`, bit by bit."""

import math
from dataclasses import replace

import torch

from fusedmoe.builtin_rules.rows.narrow_forms import bind_forms, bind_weight_forms
from fusedmoe.builtin_rules.sm100.nvfp4_forms import bind_packed_forms
from fusedmoe.kernels.exchange.functions import pack, unpack
from fusedmoe.kernels.rows.quantize.block_functions import (
    bind_quantize_columns_of_codes,
    bind_quantize_rows,
    bind_quantize_weight,
    bind_transpose_codes,
)
from fusedmoe.kernels.rows.quantize.format_functions import bind_dequantize
from fusedmoe.kernels.sm90.products import has_strides
from fusedmoe.kernels.sm100.quantize_functions import (
    PACKING,
    SCALES,
    TILE,
    bind_quantize_packed,
    bind_quantize_packed_weight,
)
from fusedmoe.numerics.formats import E5M2, Quantizer, ScaleRule, fp8_block, fp8_row, fp8_tensor, mxfp8, nvfp4, quantize
from fusedmoe.numerics.formats.groups import PACKED_ROWS, PaddedRows
from fusedmoe.numerics.formats.packed import Packed, quantize_packed
from fusedmoe.numerics.formats.swizzle import swizzle, swizzle_column_groups
from kit.hopper import DEVICE
from kit.hopper_products import BF16, assert_same_bits, bits, offsets_of
from kit.poison import nan_in_new_tensors

BLOCKS = {
    "block": fp8_block(),
    "block e5m2": fp8_block(E5M2),
    "block fp32": fp8_block(power_of_two=False),
    "block epsilon": fp8_block(amax_epsilon=0.3),
    "block fp32 epsilon": fp8_block(E5M2, power_of_two=False, amax_epsilon=1e-12),
}
QUANTIZERS = {
    **{name: Quantizer(format) for name, format in BLOCKS.items()},
    "mxfp8": Quantizer(mxfp8()),
    "mxfp8 e5m2": Quantizer(mxfp8(E5M2)),
    "mxfp8 floor": Quantizer(mxfp8(rule=ScaleRule.FLOOR)),
    "nvfp4": Quantizer(nvfp4()),
    "nvfp4 rotated": Quantizer(nvfp4(), hadamard=True),
    "nvfp4 gradient": Quantizer(nvfp4(), stochastic_rounding=True, hadamard=True),
    "row": Quantizer(fp8_row()),
    "row e5m2": Quantizer(fp8_row(E5M2, power_of_two=True)),
    "tensor": Quantizer(fp8_tensor()),
    "tensor e5m2": Quantizer(fp8_tensor(E5M2, power_of_two=True, amax_epsilon=0.3)),
}
WEIGHTS = {
    **{name: replace(format, block=(128, 128)) for name, format in BLOCKS.items()},
    "mxfp8": mxfp8(),
    "mxfp8 32x32": mxfp8(across=32),
    "nvfp4": nvfp4(),
    "nvfp4 16x16": nvfp4(16),
    "row": fp8_row(),
    "tensor": fp8_tensor(),
}
AXES = {"rows": (-1,), "columns": (-2,), "both": (-1, -2)}
SPLITS = {
    "around a block": [0, 1, 31, 32, 33, 0, 15, 16, 17],
    "around a tile": [0, 1, 127, 128, 129, 0],
    "around a packed tile": [0, 255, 256, 257, 0],
    "all in one": [0, 0, 300, 0],
    "all in the only one": [256],
    "one row in the only one": [1],
    "nothing": [0, 0, 0],
    "one row per expert": [1] * 140,  # more experts than one look at the offsets covers
    "many empty": [0] * 130 + [3, 0, 0, 5] + [0] * 130 + [200],
}


# ---- values


def values(rows, columns, dtype=BF16, seed=0, pitch=0):
    """Blocks of all magnitudes: of ordinary values, zeros of both signs, subnormals, NaN and infinities."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = -(-rows // 16), -(-columns // 16)

    def spread(t):
        return t.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]

    def draw(*size):
        return torch.rand(*size, device=DEVICE, generator=generator)

    least, most = (-140, 127) if dtype is BF16 else (-24, 15)
    x = torch.randn(rows, columns, device=DEVICE, generator=generator)
    x *= torch.exp2(spread((draw(*shape) * (most - least - 4) + least).floor()))
    x = x.to(dtype)
    kind, special = draw(rows, columns), spread(draw(*shape) < 0.3)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 0.0)):
        x[(kind < 0.05 * (i + 1)) & (kind >= 0.05 * i) & special] = value
    x[spread(draw(*shape) < 0.05)] = 0.0
    x[spread(draw(*shape) < 0.05)] = torch.inf
    x[spread(draw(*shape) < 0.05)] = -torch.nan
    around = torch.full((rows + 8, columns + 8 + pitch), torch.nan, dtype=dtype, device=DEVICE)
    around[4 : 4 + rows, 8 : 8 + columns] = x
    return around[4 : 4 + rows, 8 : 8 + columns]


def ordinary(rows, columns, dtype=BF16, seed=0, pitch=0):
    """Normal values, which no format rounds to zero, with large ones among them."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(rows, columns + pitch, device=DEVICE, generator=generator)
    x *= torch.rand(rows, columns + pitch, device=DEVICE, generator=generator).mul(4).exp2()
    return x.to(dtype)[:, :columns]


def with_tail(splits, tail, columns, dtype=BF16, make=values, **settings):
    """Rows sorted by expert, followed by NaN."""
    x = make(sum(splits) + tail, columns, dtype, **settings)
    x[sum(splits) :] = torch.nan
    return x


def weight_like(shape, dtype=BF16, transposed=False, make=values):
    """Matrices in a larger tensor of NaN."""
    *stack, rows, columns = shape
    rows, columns = (columns, rows) if transposed else (rows, columns)
    each = [make(rows, columns, dtype, seed=i) for i in range(stack[0] if stack else 1)]
    around = torch.full((len(each), rows + 1, columns + 8), torch.nan, dtype=dtype, device=DEVICE)
    weight = around[:, :rows, :columns]
    weight.copy_(torch.stack(each))
    weight = weight.mT if transposed else weight
    return weight if stack else weight[0]


def every_exponent(columns, dtype=BF16):
    """A row for each exponent, with mantissas around that of the largest code; a wrong rounding changes the scale."""
    x = torch.zeros(256, columns, dtype=dtype, device=DEVICE)
    exponents, mantissas = (256, 128) if dtype is BF16 else (32, 1024)
    for i in range(256):
        exponent, step = i % exponents, (i // exponents + i) % 5 - 2
        x.view(torch.int16)[i, 5] = min(exponent, exponents - 2) * mantissas + mantissas * 3 // 4 + step
    assert x.isfinite().all()
    return x


def an_index(rows, tokens):
    generator = torch.Generator(DEVICE).manual_seed(1)
    return torch.randint(0, tokens, (rows,), device=DEVICE, dtype=torch.int32, generator=generator)


def unsigned(t):
    return t.contiguous().view(torch.uint8)


# ---- comparisons


def bound_rows(x, quantizer, axes, offsets=None, index=None):
    """A function of rows, offsets and index that returns the tensors of each form."""
    if quantizer.format.block == (1, 128):
        return bind_quantize_rows(x, quantizer.format, offsets, index, rows=-1 in axes, columns=-2 in axes)
    return bind_forms(x, quantizer, axes, offsets, index)


def bound_weight(weight, quantizer, axes):
    if quantizer.format.block == (128, 128):
        return bind_quantize_weight(weight, quantizer.format, rows=-1 in axes, columns=-2 in axes)
    return bind_weight_forms(weight, quantizer, axes)


def seeded(run):
    """The results of a function that draws random bits."""
    torch.manual_seed(11)
    return run()


def compare(found, wanted):
    for form, want in zip(found, wanted, strict=True):
        for got, expected in zip(form, want.tensors(), strict=True):
            assert got.shape == expected.shape
            assert_same_bits(got, expected)
        if want.format.block in ((1, 128), (128, 128)):  # products read these: scales have unit stride along the lines
            codes, scale = form
            assert scale.stride()[-2:] == (1, -(-scale.shape[-2] // 4) * 4)
            assert scale.dim() < 3 or scale.stride(0) == scale.shape[2] * scale.stride(2)
            assert scale.data_ptr() % 16 == codes.data_ptr() % 16 == codes.stride(-2) % 16 == 0


def check_rows(x, which, axes=(-1, -2), offsets=None, index=None):
    """Compare the kernel's forms, between NaN, with those of plain PyTorch, which are returned."""
    quantizer = QUANTIZERS[which] if isinstance(which, str) else which
    with nan_in_new_tensors():
        found = seeded(lambda: bound_rows(x, quantizer, axes, offsets, index)(x, offsets, index))
    source = x if index is None else x[index]
    wanted = seeded(lambda: [quantize(source, quantizer, axis, offsets=offsets) for axis in axes])
    compare(found, wanted)
    return wanted


def check_columns_of_codes(tokens, offsets, index):
    """Compare with columns of the dequantized tokens, which are packed as they travel. After the last expert's padding,
    nothing is written.
    """
    rows = quantize(tokens, fp8_block())
    like = rows.data, rows.scale
    given = *unpack(pack(*like), *like), offsets, index
    with nan_in_new_tensors():
        codes, scale = bind_quantize_columns_of_codes(*given)(*given)
    source = rows.dequantize()[index.clamp(max=len(tokens) - 1)]
    want = quantize(source, fp8_block(), -2, offsets=offsets)
    assert codes.shape == want.data.shape
    assert scale.shape == want.scale.shape
    blocks = int((-(-offsets.diff(prepend=offsets.new_zeros(1)) // 128)).sum())
    assert_same_bits(codes[:, : 128 * blocks], want.data[:, : 128 * blocks])
    assert_same_bits(scale[:, :blocks], want.scale[:, :blocks])
    assert bits(codes[:, 128 * blocks :]).unique().tolist() in ([], [0xFF], [0x7F])
    assert scale[:, blocks:].isnan().all()
    assert has_strides(scale)
    assert codes[:, : 128 * blocks].float().nan_to_num().norm() > 0 or not blocks


def check_weight(weight, which, axes=(-1, -2)):
    quantizer = Quantizer(WEIGHTS[which])
    with nan_in_new_tensors():
        found = bound_weight(weight, quantizer, axes)(weight)
    wanted = [quantize(weight, quantizer, axis) for axis in axes]
    compare(found, wanted)
    assert all(bits(form.data).any() for form in wanted)
    return wanted


def check_dequantized(t, transposed=False):
    """The values of plain PyTorch."""
    with nan_in_new_tensors():
        found = bind_dequantize(t.data, t.scale, t.format, transposed=transposed)(t.data, t.scale)
    wanted, _ = t.split(BF16)
    wanted = wanted.mT if transposed else wanted
    assert found.shape == wanted.shape
    nan = wanted.isnan()
    assert torch.equal(found.isnan(), nan)
    assert_same_bits(found.masked_fill(nan, 0), wanted.masked_fill(nan, 0))
    assert (wanted != 0).any()


def check_transposed_codes(shape):
    """Every code, NaN too, and scales of any strides. Whole tensors are written, and no more."""
    codes = torch.arange(math.prod(shape), device=DEVICE).mul(37).remainder(251).add(5).to(torch.uint8).view(shape)
    codes = codes.view(torch.float8_e4m3fn)
    scale = torch.rand(shape[0], -(-shape[1] // 128), -(-shape[2] // 128), device=DEVICE)
    for given in (scale, scale.mT.contiguous().mT):
        with nan_in_new_tensors():
            codes_t, scale_t = bind_transpose_codes(codes, given)(codes, given)
        assert codes_t.is_contiguous()
        assert torch.equal(bits(codes_t), bits(codes.mT))
        assert torch.equal(scale_t, scale.mT)
        assert has_strides(scale_t)


# ---- packed rows, for Blackwell

PACKED = {"mxfp8": None, "nvfp4": Quantizer(nvfp4()), "nvfp4 rotated": Quantizer(nvfp4(), hadamard=True)}


def bound_packed(x, which, offsets, index=None, axes=(-1, -2), halves=False):
    wanted = {"rows": -1 in axes, "columns": -2 in axes, "halves": halves}
    if which == "mxfp8":
        return bind_quantize_packed(x, offsets, index, **wanted)
    return bind_packed_forms(x, PACKED[which], offsets, index, **wanted)


def packed_mxfp8(x, offsets, axis, halves):
    """Codes and scales of plain PyTorch."""
    padded = PaddedRows.of(offsets, x.shape[0], PACKING)
    if halves:
        x = x.unflatten(-1, (2, -1, 32)).transpose(-3, -2).flatten(-3)
    packed = padded.spread(x)
    if axis == -1:
        q = quantize(packed, mxfp8(), -1)
        return q.data, swizzle(unsigned(q.scale))
    q = quantize(packed, mxfp8(), -2, offsets=padded.ends_E)
    blocked = swizzle_column_groups(unsigned(q.scale), padded.ends_E // 32).blocked
    # `quantize` may pad rows once more, after the last expert's
    return q.data.mT[: padded.num_padded], blocked[: padded.num_padded // TILE * -(-x.shape[1] // TILE) * SCALES]


def compare_packed(found, x, which, offsets, axes=(-1, -2), halves=False, untouched=True):
    """Compare with plain PyTorch, and check that nothing is written after the last expert's rows."""
    padded = PaddedRows.of(offsets, x.shape[0], PACKED_ROWS if which != "mxfp8" else PACKING)
    end = int(padded.ends_E[-1])
    for (codes, scale, *tensor_scale), axis in zip(found, axes, strict=True):
        if which == "mxfp8":
            want, want_scale = packed_mxfp8(x, offsets, axis, halves)
            assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
            lines = end
        else:
            form = quantize_packed(x, PACKED[which], Packed(axis, halves), offsets)
            want, want_scale = form.data, form.scale
            assert (codes.dtype, scale.dtype) == (torch.uint8, torch.float8_e4m3fn)
            assert torch.equal(*tensor_scale, form.tensor_scale)
            lines = end if axis == -1 else end // 2
        assert codes.shape == want.shape
        assert scale.shape == want_scale.shape
        got, want, scale, want_scale = map(unsigned, (codes, want, scale, want_scale))
        if which != "mxfp8" and axis == -2:
            got, want = got.mT, want.mT
        written = scale.numel() // padded.num_padded * end
        assert torch.equal(got[:lines], want[:lines])
        assert torch.equal(scale[:written], want_scale[:written])
        assert not untouched or (got[lines:] == 255).all()
        assert not untouched or (scale[written:] == 255).all()


def check_packed(x, which, offsets, index=None, axes=(-1, -2), halves=False):
    with nan_in_new_tensors():
        found = bound_packed(x, which, offsets, index, axes, halves)(x, offsets, index)
    compare_packed(found, x if index is None else x[index], which, offsets, axes, halves)
    return found


def check_packed_index(which, axes=(-1, -2), halves=False):
    """Rows of tokens. The index of a row without an expert is not read."""
    tokens, index = values(70, 256, pitch=24), an_index(210, 70)
    offsets = offsets_of([0, 140, 5, 0, 50])
    wanted = check_packed(tokens, which, offsets, index, axes, halves)
    index[195:] = 1 << 30
    with nan_in_new_tensors():
        found = bound_packed(tokens, which, offsets, index, axes, halves)(tokens, offsets, index)
    for got, want in zip(found, wanted, strict=True):
        assert all(torch.equal(unsigned(a), unsigned(b)) for a, b in zip(got, want, strict=True))


def check_packed_weight(weight, axes=(-1, -2), halves=False):
    with nan_in_new_tensors():
        run = bind_quantize_packed_weight(weight, rows=-1 in axes, columns=-2 in axes, halves=halves)
        found = run(weight)
    packed = weight.unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3) if halves else weight
    for (codes, scale), axis in zip(found, axes, strict=True):
        want = quantize(packed, mxfp8(), axis)
        assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
        assert torch.equal(unsigned(codes), unsigned(want.data))
        assert torch.equal(unsigned(scale), swizzle(unsigned(want.scale)).flatten())
        assert unsigned(codes).any()
