"""The quantize kernels for Hopper: codes and scales have the bits of `fusedmoe.quantize`, for any splits and values."""

import math
from dataclasses import replace

import pytest
import torch
from kit.hopper import needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors

from fusedmoe.kernels.rows.quantize.block_functions import (
    TOKEN_READERS,
    bind_quantize_rows,
    bind_quantize_weight,
    bind_transpose_codes,
)
from fusedmoe.kernels.sm90.products import has_strides
from fusedmoe.numerics.formats import E4M3, E5M2, fp8_block, quantize
from fusedmoe.numerics.formats.groups import padded_rows

pytestmark = needs_hopper

BF16, FP16 = torch.bfloat16, torch.float16
FORMATS = {
    "e4m3": fp8_block(),
    "e5m2": fp8_block(E5M2),
    "fp32 scales": fp8_block(power_of_two=False),
    "epsilon": fp8_block(amax_epsilon=0.3),
    "fp32 scales, epsilon": fp8_block(E5M2, power_of_two=False, amax_epsilon=1e-12),
}
FORMS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
SPLITS = {
    "around a tile": [0, 1, 127, 128, 129, 0],
    "all in one": [0, 0, 300, 0],
    "all in the only one": [256],
    "nothing": [0, 0, 0],
    "one row per expert": [1] * 140,  # more experts than one look at the offsets covers
    "many empty": [0] * 130 + [3, 0, 0, 5] + [0] * 130 + [200],
}


def of_weights(format):
    return replace(format, block=(128, 128))


def values(rows, columns, dtype, device, seed=0, pitch=0):
    """Blocks of all magnitudes: of ordinary values, zeros of both signs, subnormals, NaN and infinities."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = -(-rows // 16), -(-columns // 16)

    def spread(t):
        return t.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]

    def draw(*size):
        return torch.rand(*size, device=device, generator=generator)

    least, most = (-140, 127) if dtype is BF16 else (-24, 15)
    x = torch.randn(rows, columns, device=device, generator=generator)
    x *= torch.exp2(spread((draw(*shape) * (most - least - 4) + least).floor()))
    x = x.to(dtype)
    kind, special = draw(rows, columns), spread(draw(*shape) < 0.3)
    for i, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 0.0)):
        x[(kind < 0.05 * (i + 1)) & (kind >= 0.05 * i) & special] = value
    x[spread(draw(*shape) < 0.05)] = 0.0
    x[spread(draw(*shape) < 0.05)] = torch.inf
    x[spread(draw(*shape) < 0.05)] = -torch.nan
    around = torch.full((rows + 8, columns + 8 + pitch), torch.nan, dtype=dtype, device=device)
    around[4 : 4 + rows, 8 : 8 + columns] = x
    return around[4 : 4 + rows, 8 : 8 + columns]


def offsets_of(splits, device):
    return torch.tensor(splits, device=device).cumsum(0).to(torch.int32)


def bits(t):
    return t.contiguous().view(torch.uint8 if t.element_size() == 1 else torch.int32)


def check(found, wanted):
    """Compare codes and scales; the scales have unit stride along the lines, and whole vectors between the blocks."""
    for (codes, scale), want in zip(found, wanted, strict=True):
        assert codes.dtype is want.data.dtype
        assert codes.shape == want.data.shape
        assert scale.shape == want.scale.shape
        assert torch.equal(bits(codes), bits(want.data))
        assert torch.equal(bits(scale), bits(want.scale))
        lines = scale.shape[-2]
        assert scale.stride()[-2:] == (1, -(-lines // 4) * 4)
        assert scale.data_ptr() % 16 == codes.data_ptr() % 16 == codes.stride(-2) % 16 == 0


def check_rows(x, format, offsets, form, index=None):
    rows, columns = FORMS[form]
    with nan_in_new_tensors():
        found = bind_quantize_rows(x, format, offsets, index, rows=rows, columns=columns)(x, offsets, index)
    source = x if index is None else x[index]
    wanted = [quantize(source, format, axis, offsets=offsets) for axis in (-1, -2)[1 - rows : 1 + columns]]
    check(found, wanted)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SPLITS)
def test_rows_sorted_by_expert(device, kind, form):
    """A tail without an expert, of NaN, of several lengths."""
    used = sum(SPLITS[kind])
    offsets = offsets_of(SPLITS[kind], device)
    tails, columns = ((0, 1, 140), 272) if len(SPLITS[kind]) < 100 else ((140,), 16)
    for tail in tails:
        x = values(used + tail, columns, BF16, device, seed=tail)
        x[used:] = torch.nan
        if x.shape[0]:
            found = check_rows(x, FORMATS["e4m3"], offsets, form)
            assert used == 0 or all(bits(codes).any() for codes, _ in found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("format", FORMATS)
def test_formats(device, format, dtype, form):
    splits = [130, 0, 61]
    x = values(200, 144, dtype, device, seed=3, pitch=24)
    check_rows(x, FORMATS[format], offsets_of(splits, device), form)


def without_finite_values(x):
    """Rows and columns of infinities, of NaN, of both, and of zeros beside them; whole blocks of 128 x 128."""
    for i, value in enumerate((torch.inf, -torch.inf, torch.nan, 0.0)):
        x[i], x[:, 8 + i] = value, value
    x[4, ::2], x[4, 1::2], x[5], x[5, 3] = torch.inf, torch.nan, 0.0, -torch.inf
    x[::2, 12], x[1::2, 12] = -torch.inf, torch.nan
    x[128:] = torch.inf
    return x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("format", FORMATS)
def test_blocks_without_a_finite_value(device, format, dtype, form):
    x = without_finite_values(torch.randn(256, 160, device=device).to(dtype))
    for codes, scale in check_rows(x, FORMATS[format], None, form):
        assert (bits(codes) & 0x7F == 0x7F).any()
        assert scale.isfinite().all()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("format", FORMATS)
def test_blocks_of_weights_without_a_finite_value(device, format, dtype):
    weight = torch.randn(2, 256, 272, device=device).to(dtype)
    weight[0, :128, :128], weight[0, 128:, 128:256], weight[1, :, :128] = torch.inf, -torch.inf, torch.nan
    found = bind_quantize_weight(weight, of_weights(FORMATS[format]), columns=True)(weight)
    check(found, [quantize(weight, of_weights(FORMATS[format]), axis) for axis in (-1, -2)])
    assert all(scale.isfinite().all() for _, scale in found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (127, 128), (129, 48), (300, 400)])
def test_rows_without_experts(device, rows, columns, form):
    check_rows(values(rows, columns, BF16, device), FORMATS["e4m3"], None, form)


@pytest.mark.parametrize("form", FORMS)
def test_rows_through_an_index(device, form):
    """The index of a row without an expert is not read."""
    tokens = values(70, 160, BF16, device)
    generator = torch.Generator(device).manual_seed(1)
    index = torch.randint(0, 70, (210,), device=device, dtype=torch.int32, generator=generator)
    check_rows(tokens, FORMATS["e4m3"], None, form, index)
    check_rows(tokens, FORMATS["e4m3"], offsets_of([0, 140, 5, 0, 50], device), form, index)


@pytest.mark.parametrize("columns", [16, 1056])
@pytest.mark.parametrize("kind", SPLITS)
def test_codes_of_tokens_are_copied(device, kind, columns):
    """Row codes of rows that share tokens. An index past the tokens is not read in the tail, whose codes are zeros."""
    used, offsets = sum(SPLITS[kind]), offsets_of(SPLITS[kind], device)
    index = torch.full((used + 13,), 1 << 30, dtype=torch.int32, device=device)
    tokens = values(index.shape[0] // TOKEN_READERS, columns, BF16, device)
    index[:used] = torch.randint(0, tokens.shape[0], (used,), device=device, dtype=torch.int32)
    rows = torch.zeros(index.shape[0], columns, dtype=BF16, device=device)
    rows[:used] = tokens[index[:used]]
    with nan_in_new_tensors():
        run = bind_quantize_rows(tokens, FORMATS["e4m3"], offsets, index)
        found = run(tokens, offsets, index)
    check(found, [quantize(rows, FORMATS["e4m3"], -1, offsets=offsets)])
    assert used == 0 or bits(found[0][0]).any()


@pytest.mark.parametrize("seed", range(4))
def test_random_splits(device, seed):
    generator = torch.Generator().manual_seed(seed)
    experts = int(torch.randint(1, 40, (), generator=generator))
    splits = torch.randint(0, 90, (experts,), generator=generator) * (torch.rand(experts, generator=generator) < 0.6)
    tail = int(torch.randint(0, 300, (), generator=generator))
    x = values(int(splits.sum()) + tail + 1, 128, BF16, device, seed=seed)
    check_rows(x, FORMATS["e4m3"], offsets_of(splits.tolist(), device), "both")


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_every_exponent_of_the_largest_magnitude(device, element, dtype):
    """A block for each exponent, with mantissas around that of the largest code; a wrong rounding changes the scale."""
    x = torch.zeros(256, 128, dtype=dtype, device=device)
    exponents, mantissas = (256, 128) if dtype is BF16 else (32, 1024)
    near = mantissas * 3 // 4
    for i in range(256):
        exponent, step = i % exponents, (i // exponents) % 5 - 2
        x.view(torch.int16)[i, 5] = min(exponent, exponents - 2) * mantissas + near + step
    assert x.isfinite().all()
    check_rows(x, fp8_block(element), None, "both")
    check_rows(x, fp8_block(element, power_of_two=False), None, "both")


# ---------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(2, 272, 144), (3, 128, 256), (144, 400)], ids=str)
def test_weights(device, shape, form, transposed):
    check_weight(weight_like(shape, BF16, device, transposed), FORMATS["e4m3"], form)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("format", FORMATS)
def test_formats_of_weights(device, format, dtype):
    check_weight(weight_like((2, 160, 144), dtype, device), FORMATS[format], "both")


def weight_like(shape, dtype, device, transposed=False):
    """Matrices in a larger tensor of NaN."""
    *stack, rows, columns = shape
    rows, columns = (columns, rows) if transposed else (rows, columns)
    each = [values(rows, columns, dtype, device, seed=i) for i in range(stack[0] if stack else 1)]
    around = torch.full((len(each), rows + 1, columns + 8), torch.nan, dtype=dtype, device=device)
    weight = around[:, :rows, :columns]
    weight.copy_(torch.stack(each))
    weight = weight.mT if transposed else weight
    return weight if stack else weight[0]


def check_weight(weight, format, form):
    (rows, columns), format = FORMS[form], of_weights(format)
    with nan_in_new_tensors():
        found = bind_quantize_weight(weight, format, rows=rows, columns=columns)(weight)
    check(found, [quantize(weight, format, axis) for axis in (-1, -2)[1 - rows : 1 + columns]])
    for codes, scale in found:
        assert bits(codes).any()
        assert scale.dim() < 3 or scale.stride(0) == scale.shape[2] * scale.stride(2)


@pytest.mark.parametrize("shape", [(2, 272, 144), (3, 128, 256), (1, 16, 400)], ids=str)
def test_transposed_codes(device, shape):
    """Every code, NaN too, and scales of any strides. Whole tensors are written, and no more."""
    codes = torch.arange(math.prod(shape), device=device).mul(37).remainder(251).add(5).to(torch.uint8).view(shape)
    codes = codes.view(torch.float8_e4m3fn)
    scale = torch.rand(shape[0], -(-shape[1] // 128), -(-shape[2] // 128), device=device)
    for given in (scale, scale.mT.contiguous().mT):
        with nan_in_new_tensors():
            codes_t, scale_t = bind_transpose_codes(codes, given)(codes, given)
        assert codes_t.is_contiguous()
        assert torch.equal(bits(codes_t), bits(codes.mT))
        assert torch.equal(scale_t, scale.mT)
        assert has_strides(scale_t)


# ------------------------------------------------------------------------------------------------------------ async


@needs_gpu
def test_full_size(device):
    rows, columns, experts = 65_536, 2048, 128
    x = torch.randn(rows, columns, device=device).to(BF16)
    for splits in ([rows // experts] * experts, [0] * 5 + [rows - 77] + [0] * 122):
        check_rows(x, FORMATS["e4m3"], offsets_of(splits, device), "both")


@needs_gpu
def test_more_than_two_to_the_31_elements(device):
    rows, columns = 2**18 + 5, 8208
    x = torch.ones(rows, columns, dtype=BF16, device=device)
    x[-1] = 3
    offsets = offsets_of([3, rows - 3], device)
    (codes, scale), (codes_t, scale_t) = bind_quantize_rows(x, fp8_block(), offsets, columns=True)(x, offsets)
    assert (scale[:-1] == 2.0**-8).all()
    assert (scale[-1] == 2.0**-7).all()
    assert (codes.view(torch.uint8)[:-1] == 0x78).all()  # 256
    assert (codes.view(torch.uint8)[-1] == 0x7C).all()  # 384
    assert codes_t.shape == (columns, padded_rows(rows, 2, 128))
    assert int((codes_t.view(torch.uint8) != 0).sum()) == rows * columns
    last = 1 + (rows - 3 - 1) // 128  # the first expert's rows have a block of their own
    assert (scale_t[:, last] == 2.0**-7).all()
    assert (codes_t.view(torch.uint8)[:, 128 + rows - 4] == 0x7C).all()


@needs_gpu
def test_a_graph_follows_the_splits(device):
    x = torch.randn(400, 256, device=device).to(BF16)
    offsets = offsets_of([5, 0, 300, 7], device)
    run = bind_quantize_rows(x, fp8_block(), offsets, columns=True)
    run(x, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x, offsets)
    for splits in ([5, 0, 300, 7], [0, 0, 0, 0], [400, 0, 0, 0], [0, 1, 0, 390]):
        offsets.copy_(offsets_of(splits, device))
        graph.replay()
        check(found, [quantize(x, fp8_block(), axis, offsets=offsets) for axis in (-1, -2)])


@needs_gpu
def test_nothing_waits_for_the_device(device, no_sync):
    x, offsets = torch.randn(400, 256, device=device).to(BF16), offsets_of([5, 0, 300, 7], device)
    weight = torch.randn(2, 256, 128, device=device).to(BF16)
    rows, both = (
        bind_quantize_rows(x, fp8_block(), offsets, columns=True),
        bind_quantize_weight(weight, fp8_block(across=128), columns=True),
    )
    with no_sync():
        found, of_weight = rows(x, offsets), both(weight)
    check(found, [quantize(x, fp8_block(), axis, offsets=offsets) for axis in (-1, -2)])
    check(of_weight, [quantize(weight, fp8_block(across=128), axis) for axis in (-1, -2)])
