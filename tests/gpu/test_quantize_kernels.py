"""The quantize kernels: codes and scales have the bits of `fusedmoe.quantize`, and dequantized values those of
`QuantizedTensor.split`, for any splits and values. Those for Blackwell, packed and swizzled, run on Hopper too.
"""

from functools import partial
from itertools import product

import pytest
import torch
from kit.hopper import DEVICE, capture, needs_gpu, needs_hopper
from kit.hopper_products import BF16, FP16, bits, kernels_of, offsets_of
from kit.poison import nan_in_new_tensors
from kit.quantize_kernels import (
    AXES,
    BLOCKS,
    PACKED,
    QUANTIZERS,
    SPLITS,
    WEIGHTS,
    an_index,
    bound_packed,
    bound_rows,
    bound_weight,
    check_columns_of_codes,
    check_dequantized,
    check_packed,
    check_packed_index,
    check_packed_weight,
    check_rows,
    check_transposed_codes,
    check_weight,
    compare,
    compare_packed,
    every_exponent,
    ordinary,
    unsigned,
    values,
    weight_like,
    with_tail,
)

from fusedmoe.builtin_rules.rows.narrow_forms import bind_forms, bind_weight_forms
from fusedmoe.kernels.rows.quantize.block_functions import TOKEN_READERS
from fusedmoe.kernels.sm100.quantize_functions import bind_quantize_packed_nvfp4
from fusedmoe.numerics.formats import Delayed, Quantizer, amax_by_expert, fp8_block, fp8_tensor, quantize
from fusedmoe.numerics.formats.delayed import AmaxHistory
from fusedmoe.numerics.formats.groups import PACKED_ROWS, PaddedRows, padded_rows
from fusedmoe.numerics.formats.swizzle import swizzle, swizzle_column_groups
from fusedmoe.ops.state.amax import Step

pytestmark = needs_hopper

of_axes = pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
of_halves = pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
of_packed = pytest.mark.parametrize("which", ["mxfp8", "nvfp4 rotated"])
FEW = ("block", "mxfp8", "nvfp4 gradient", "row", "tensor")
THROUGH_AN_INDEX = FEW[:-1]


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    def calls():
        offsets, index = offsets_of([33, 31]), an_index(64, 70)
        for which, axes in product(QUANTIZERS, AXES.values()):
            yield partial(check_rows, ordinary(64, 48, FP16), which, axes, offsets)
            for ends in (None, offsets):
                yield partial(check_rows, ordinary(64, 48), which, axes, ends)
                if which in THROUGH_AN_INDEX:
                    yield partial(check_rows, ordinary(70, 48), which, axes, ends, index)
        for which, axes, transposed in product(WEIGHTS, AXES.values(), (False, True)):
            yield partial(check_weight, weight_like((2, 48, 64), transposed=transposed), which, axes)
        for which, axes, halves in product(PACKED, AXES.values(), (False, True)):
            yield partial(check_packed, ordinary(64, 128), which, offsets, axes=axes, halves=halves)

    build_ahead(lambda: kernels_of(calls()))


# ---- rows


@of_axes
@pytest.mark.parametrize("which", QUANTIZERS)
def test_formats(which, axes):
    """Ordinary values; all magnitudes, NaN and infinities; a tail of NaN without an expert; fp16."""
    offsets = offsets_of([33, 0, 31, 1, 20])
    for form in check_rows(with_tail([33, 0, 31, 1, 20], 12, 144, make=ordinary), which, axes, offsets):
        codes = form.codes().view(torch.uint8) & (7 if which.startswith("nvfp4") else 0x7F)
        sparse = form.axis == -2 and which.startswith(("tensor", "block"))  # padding has more rows than the experts
        assert (codes != 0).float().mean() > (0.1 if sparse else 0.25)
    for dtype in (BF16, FP16):
        check_rows(values(200, 144, dtype, seed=3, pitch=24), which, axes, offsets_of([130, 0, 61]))


@pytest.mark.parametrize("which", FEW)
@pytest.mark.parametrize("kind", SPLITS)
def test_rows_sorted_by_expert(kind, which):
    splits = SPLITS[kind]
    for tail, make in ((0, ordinary), (1, values), (140, ordinary)):
        x = with_tail(splits, tail, 48 if len(splits) < 100 else 16, make=make, seed=tail)
        if x.shape[0]:
            for axes in AXES.values() if which == "block" else ((-1, -2),):
                wanted = check_rows(x, which, axes, offsets_of(splits))
                assert not sum(splits) or all(bits(form.data).any() for form in wanted)


@of_axes
@pytest.mark.parametrize("which", ["block", "mxfp8", "nvfp4 rotated", "tensor"])
def test_rows_without_experts(which, axes):
    for rows, columns in ((1, 16), (31, 272), (127, 128), (129, 48), (300, 400)):
        check_rows(ordinary(rows, columns), which, axes)


@of_axes
@pytest.mark.parametrize("which", THROUGH_AN_INDEX)
def test_rows_through_an_index(which, axes):
    """The index of a row without an expert is not read."""
    tokens, index = (values if which == "block" else ordinary)(70, 160), an_index(210, 70)
    check_rows(tokens, which, axes, None, index)
    check_rows(tokens, which, axes, offsets_of([0, 140, 5, 0, 50]), index)


@pytest.mark.parametrize("columns", [16, 1056])
@pytest.mark.parametrize("kind", SPLITS)
def test_columns_of_codes(kind, columns):
    """An index of a row without an expert is not read."""
    used, offsets = sum(SPLITS[kind]), offsets_of(SPLITS[kind])
    index = torch.full((used + 13,), 1 << 30, dtype=torch.int32, device=DEVICE)
    index[:used] = an_index(used, 70)
    check_columns_of_codes(values(70, columns), offsets, index)


@pytest.mark.parametrize("columns", [16, 1056])
@pytest.mark.parametrize("kind", SPLITS)
def test_codes_of_tokens_are_copied(kind, columns):
    """Row codes of rows that share tokens. An index past the tokens is not read in the tail, whose codes are zeros."""
    used, offsets = sum(SPLITS[kind]), offsets_of(SPLITS[kind])
    index = torch.full((used + 13,), 1 << 30, dtype=torch.int32, device=DEVICE)
    tokens = values(index.shape[0] // TOKEN_READERS, columns)
    index[:used] = an_index(used, tokens.shape[0])
    rows = torch.zeros(index.shape[0], columns, dtype=BF16, device=DEVICE)
    rows[:used] = tokens[index[:used]]
    with nan_in_new_tensors():
        found = bound_rows(tokens, QUANTIZERS["block"], (-1,), offsets, index)(tokens, offsets, index)
    compare(found, [quantize(rows, fp8_block(), -1, offsets=offsets)])
    assert used == 0 or bits(found[0][0]).any()


def without_finite_values(dtype):
    """Rows and columns of infinities, of NaN, of both, and of zeros beside them; whole blocks of 128 x 128."""
    x = torch.randn(256, 160, device=DEVICE).to(dtype)
    for i, value in enumerate((torch.inf, -torch.inf, torch.nan, 0.0)):
        x[i], x[:, 8 + i] = value, value
    x[4, ::2], x[4, 1::2], x[5], x[5, 3] = torch.inf, torch.nan, 0.0, -torch.inf
    x[::2, 12], x[1::2, 12] = -torch.inf, torch.nan
    x[128:] = torch.inf
    return x


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("which", BLOCKS)
def test_blocks_without_a_finite_value(which, dtype):
    for axes in AXES.values():
        for form in check_rows(without_finite_values(dtype), which, axes):
            assert (bits(form.data) & 0x7F == 0x7F).any()
            assert form.scale.isfinite().all()
    weight = torch.randn(2, 256, 272, device=DEVICE).to(dtype)
    weight[0, :128, :128], weight[0, 128:, 128:256], weight[1, :, :128] = torch.inf, -torch.inf, torch.nan
    for form in check_weight(weight, which):
        assert form.scale.isfinite().all()


@pytest.mark.parametrize("which", ["block", "block e5m2", "block fp32", "mxfp8", "mxfp8 e5m2", "mxfp8 floor"])
def test_every_exponent_of_the_largest_magnitude(which):
    for dtype in (BF16, FP16):
        check_rows(every_exponent(128, dtype), which, (-1, -2))


@of_axes
@pytest.mark.parametrize("through_index", [False, True], ids=["", "index"])
def test_delayed_scaling(through_index, axes):
    """Codes by the factors of the step before, and the history with the amax of this one."""
    quantizer = Quantizer(fp8_tensor(), delayed=Delayed(3))
    history = AmaxHistory(quantizer, 3, DEVICE)
    offsets = offsets_of([130, 0, 31])
    x = values(170, 144, seed=3, pitch=24)
    index = torch.arange(169, -1, -1, dtype=torch.int32, device=DEVICE) if through_index else None
    source = x if index is None else x[index]
    run = bind_forms(x, quantizer, axes, offsets, index, training=True)
    for _ in range(2):
        step, encode = Step(history, "input", True), history.encode.clone()
        with nan_in_new_tensors():
            found = run(x, offsets, index, step)
        compare(found, [quantize(source, quantizer, axis, offsets=offsets, encode=encode) for axis in axes])
        assert torch.equal(history.amax[0], amax_by_expert(source, offsets))
    assert history.amax[1].any()
    assert (history.encode[::2] != 1).all()
    infer = bind_forms(x, quantizer, axes, offsets, index)
    found = infer(x, offsets, index, Step(history, "input", False))
    compare(found, [quantize(source, quantizer, axis, offsets=offsets, encode=history.encode) for axis in axes])
    weight = ordinary(3 * 48, 64).view(3, 48, 64)
    for w in (weight, weight.mT.contiguous().mT):
        step, encode = Step(history, "weight", True), history.encode.clone()
        found = bind_weight_forms(w, quantizer, axes, True)(w, step)
        compare(found, [quantize(w, quantizer, axis, encode=encode) for axis in axes])
        assert torch.equal(history.amax[0], amax_by_expert(w))


# ---- weights


@of_axes
@pytest.mark.parametrize("which", WEIGHTS)
def test_weights(which, axes):
    for shape, transposed in (((2, 272, 144), False), ((3, 128, 256), True), ((144, 400), False), ((48, 160), True)):
        for make in (values, ordinary):
            check_weight(weight_like(shape, BF16, transposed, make), which, axes)
    if which in BLOCKS:
        check_weight(weight_like((2, 160, 144), FP16), which, axes)


@pytest.mark.parametrize("shape", [(2, 272, 144), (3, 128, 256), (1, 16, 400)], ids=str)
def test_transposed_codes(shape):
    check_transposed_codes(shape)


@pytest.mark.parametrize("which", ["mxfp8", "mxfp8 e5m2", "nvfp4 rotated", "tensor e5m2", "block", "block fp32"])
def test_dequantized_rows(which):
    offsets = offsets_of([33, 0, 31, 1, 20])
    for x in (ordinary(100, 144), values(100, 144, seed=3)):
        for axis in (-1, -2):
            check_dequantized(quantize(x, QUANTIZERS[which], axis, offsets=offsets), transposed=axis == -2)


@pytest.mark.parametrize("which", ["mxfp8", "mxfp8 32x32", "nvfp4 16x16", "tensor"])
def test_dequantized_weights(which):
    weight = torch.stack([ordinary(96, 160), values(96, 160)])
    for axis in (-1, -2):
        check_dequantized(quantize(weight, WEIGHTS[which], axis))


# ---- packed and swizzled, for Blackwell


@of_packed
@of_axes
@pytest.mark.parametrize("kind", SPLITS)
def test_packed_rows_sorted_by_expert(kind, axes, which):
    """A tail without an expert, of NaN, whose packed rows the kernel does not write."""
    for tail, columns, make in ((0, 128, values), (300, 256, ordinary)):
        if sum(SPLITS[kind]) + tail:
            check_packed(with_tail(SPLITS[kind], tail, columns, make=make), which, offsets_of(SPLITS[kind]), axes=axes)


@of_halves
@pytest.mark.parametrize("which", PACKED)
def test_packed_features(which, halves):
    """Fewer features than a tile has, and some more: what is missing has scales of zero."""
    splits = [33, 0, 31, 1, 130]
    widths = (128, 384) if which != "mxfp8" else (64, 128, 192, 384) if halves else (32, 64, 96, 128, 384)
    for columns in widths:
        for make, dtype in ((values, BF16), (ordinary, BF16), (ordinary, FP16)):
            x = with_tail(splits, 12, columns, dtype, make)
            for codes, scale, *_ in check_packed(x, which, offsets_of(splits), halves=halves):
                assert unsigned(codes)[:30].any()
                assert unsigned(scale)[:16].any()


@of_packed
@of_axes
@of_halves
def test_packed_rows_through_an_index(halves, axes, which):
    check_packed_index(which, axes, halves)


def test_every_exponent_of_packed_values():
    """By rows, and by columns."""
    x = every_exponent(256)
    x[40] = x[:, 5]
    check_packed(x, "mxfp8", offsets_of([256]))


@pytest.mark.parametrize("which", ["nvfp4", "nvfp4 rotated"])
def test_random_bits_round_packed_values(which):
    """Those of a code lie where the code does."""
    splits, quantizer = [140, 0, 61, 1], PACKED[which]
    offsets, x = offsets_of(splits), with_tail(splits, 9, 128, make=ordinary)
    padded = PaddedRows.of(offsets, x.shape[0], PACKED_ROWS)
    packed, ends, count = padded.spread(x), padded.ends_E, padded.num_padded
    end = int(ends[-1])
    random = [torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE) for shape in ((count, 128), (128, count))]
    stochastic = Quantizer(quantizer.format, stochastic_rounding=True, hadamard=quantizer.hadamard)
    by_rows = quantize(packed, stochastic, offsets=ends, random_bits=random[0])
    more = PaddedRows.of(ends, count, 16).num_padded - count
    bits = torch.nn.functional.pad(random[1], (0, more + -(count + more) % 16))
    by_columns = quantize(packed, stochastic, -2, offsets=ends, random_bits=bits)
    assert not torch.equal(by_rows.data, quantize(packed, quantizer, offsets=ends).data)
    factors = tuple(1 / q.tensor_scale for q in (by_rows, by_columns))
    run = bind_quantize_packed_nvfp4(x, offsets, columns=True, rotated=quantizer.hadamard, stochastic=True)
    (codes, scale), (codes_t, scale_t) = run(x, offsets, factors, tuple(random))
    assert torch.equal(codes[:end], by_rows.data[:end])
    assert torch.equal(codes_t[:, : end // 2], by_columns.data[:, : end // 2])
    assert torch.equal(unsigned(scale)[: end * 8], swizzle(unsigned(by_rows.scale))[: end * 8])
    blocked = swizzle_column_groups(unsigned(by_columns.scale), ends // 16).blocked
    assert torch.equal(unsigned(scale_t)[: end * 8], blocked[: end * 8])


@of_axes
@of_halves
@pytest.mark.parametrize(("experts", "lines", "columns"), [(1, 128, 128), (3, 256, 384), (2, 640, 128)])
def test_packed_weights(experts, lines, columns, axes, halves):
    """Rows may be further apart than need be."""
    for make, dtype, pitch in ((values, BF16, 8), (ordinary, BF16, 0), (values, FP16, 0)):
        x = make(experts * lines, columns + pitch, dtype)
        check_packed_weight(x.reshape(experts, lines, columns + pitch)[..., :columns], axes, halves)


# ---- on a GPU


@needs_gpu
@of_halves
def test_full_size_of_packed_values(halves):
    rows, columns, experts = 65_536, 2048, 128
    x = torch.randn(rows, columns, device=DEVICE).to(BF16)
    for splits in ([rows // experts] * experts, [0] * 5 + [rows - 77] + [0] * 122):
        for which in ("mxfp8", "nvfp4 rotated"):
            check_packed(x, which, offsets_of(splits), halves=halves)
    check_packed_weight(torch.randn(64, 1536, 2048, device=DEVICE).to(BF16), halves=halves)


@needs_gpu
def test_more_than_two_to_the_31_elements():
    rows, columns = 2**18 + 5, 8208
    x = torch.ones(rows, columns, dtype=BF16, device=DEVICE)
    x[-1] = 3
    offsets = offsets_of([3, rows - 3])
    (codes, scale), (codes_t, scale_t) = bound_rows(x, QUANTIZERS["block"], (-1, -2), offsets)(x, offsets, None)
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
@pytest.mark.parametrize(
    ("which", "packed"),
    [*((which, False) for which in ("block", "mxfp8", "nvfp4 rotated", "row", "tensor")), ("mxfp8", True),
     ("nvfp4 rotated", True)],
)  # fmt: skip
def test_nothing_waits_for_the_device_and_a_graph_follows_the_splits(no_sync, which, packed):
    x, offsets = torch.randn(400, 256, device=DEVICE).to(BF16), offsets_of([5, 0, 300, 7])
    run = bound_packed(x, which, offsets) if packed else bound_rows(x, QUANTIZERS[which], (-1, -2), offsets)
    weight = torch.randn(2, 256, 128, device=DEVICE).to(BF16)
    of_weight = bound_weight(weight, QUANTIZERS["tensor"], (-1,))
    run(x, offsets, None)
    of_weight(weight)
    with no_sync():
        run(x, offsets, None)
        of_weight(weight)
    found = []
    graph = capture(lambda: found.append(run(x, offsets, None)), warm_ups=1)
    for splits in ([5, 0, 300, 7], [0, 0, 0, 0], [400, 0, 0, 0], [0, 1, 0, 390]):
        offsets.copy_(offsets_of(splits))
        graph.replay()
        if packed:
            compare_packed(found[-1], x, which, offsets, untouched=False)
        else:
            compare(found[-1], [quantize(x, QUANTIZERS[which], axis, offsets=offsets) for axis in (-1, -2)])
