"""The quantize kernels for Blackwell, which run on Hopper too: they have the bits of `fusedmoe.quantize`, packed and
swizzled, for any splits and values.
"""

import pytest
import torch
from kit.hopper import DEVICE, capture, needs_gpu, needs_hopper
from kit.hopper_products import BF16, FP16, offsets_of
from kit.quantize_kernels import (
    AXES,
    PACKED,
    SPLITS,
    bound_packed,
    check_packed,
    check_packed_index,
    check_packed_weight,
    compare_packed,
    every_exponent,
    ordinary,
    unsigned,
    values,
    with_tail,
)

from fusedmoe.kernels.sm100.quantize_functions import bind_quantize_packed_nvfp4
from fusedmoe.numerics.formats import Quantizer, quantize
from fusedmoe.numerics.formats.groups import PACKED_ROWS, PaddedRows
from fusedmoe.numerics.formats.swizzle import swizzle, swizzle_column_groups

pytestmark = needs_hopper

of_axes = pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
of_halves = pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
EACH = pytest.mark.parametrize("which", ["mxfp8", "nvfp4 rotated"])


@EACH
@of_axes
@pytest.mark.parametrize("kind", SPLITS)
def test_rows_sorted_by_expert(kind, axes, which):
    """A tail without an expert, of NaN, whose packed rows the kernel does not write."""
    for tail, columns, make in ((0, 128, values), (300, 256, ordinary)):
        if sum(SPLITS[kind]) + tail:
            check_packed(with_tail(SPLITS[kind], tail, columns, make=make), which, offsets_of(SPLITS[kind]), axes=axes)


@of_halves
@pytest.mark.parametrize("which", PACKED)
def test_features(which, halves):
    """Fewer features than a tile has, and some more: what is missing has scales of zero."""
    splits = [33, 0, 31, 1, 130]
    widths = (128, 384) if which != "mxfp8" else (64, 128, 192, 384) if halves else (32, 64, 96, 128, 384)
    for columns in widths:
        for make, dtype in ((values, BF16), (ordinary, BF16), (ordinary, FP16)):
            x = with_tail(splits, 12, columns, dtype, make)
            for codes, scale, *_ in check_packed(x, which, offsets_of(splits), halves=halves):
                assert unsigned(codes)[:30].any()
                assert unsigned(scale)[:16].any()


@EACH
@of_axes
@of_halves
def test_rows_through_an_index(halves, axes, which):
    check_packed_index(which, axes, halves)


def test_every_exponent_of_the_largest_magnitude():
    """By rows, and by columns."""
    x = every_exponent(256)
    x[40] = x[:, 5]
    check_packed(x, "mxfp8", offsets_of([256]))


@pytest.mark.parametrize("which", ["nvfp4", "nvfp4 rotated"])
def test_random_bits_round(which):
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
def test_weights(experts, lines, columns, axes, halves):
    """Rows may be further apart than need be."""
    for make, dtype, pitch in ((values, BF16, 8), (ordinary, BF16, 0), (values, FP16, 0)):
        x = make(experts * lines, columns + pitch, dtype)
        check_packed_weight(x.reshape(experts, lines, columns + pitch)[..., :columns], axes, halves)


# ---- on a GPU


@needs_gpu
@of_halves
def test_full_size(halves):
    rows, columns, experts = 65_536, 2048, 128
    x = torch.randn(rows, columns, device=DEVICE).to(BF16)
    for splits in ([rows // experts] * experts, [0] * 5 + [rows - 77] + [0] * 122):
        for which in ("mxfp8", "nvfp4 rotated"):
            check_packed(x, which, offsets_of(splits), halves=halves)
    check_packed_weight(torch.randn(64, 1536, 2048, device=DEVICE).to(BF16), halves=halves)


@needs_gpu
@EACH
def test_nothing_waits_for_the_device_and_a_graph_follows_the_splits(no_sync, which):
    x = torch.randn(400, 256, device=DEVICE).to(BF16)
    offsets = offsets_of([5, 0, 300, 7])
    run = bound_packed(x, which, offsets)
    run(x, offsets, None)
    with no_sync():
        run(x, offsets, None)
    found = []
    graph = capture(lambda: found.append(run(x, offsets, None)), warm_ups=1)
    for splits in ([5, 0, 300, 7], [0, 0, 0, 0], [400, 0, 0, 0], [0, 1, 0, 390]):
        offsets.copy_(offsets_of(splits))
        graph.replay()
        compare_packed(found[-1], x, which, offsets, untouched=False)
