"""The quantize kernels for Blackwell, which run on Hopper too: they have the bits of `fusedmoe.quantize`, packed and
swizzled, for any splits and values.
"""

import pytest
import torch
from kit.hopper import needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors
from test_sm90_quantize import BF16, FP16, offsets_of, values
from test_sm90_quantize_formats import ordinary

from fusedmoe.kernels.sm100.quantize_functions import (
    PACKING,
    SCALES,
    TILE,
    bind_quantize_packed,
    bind_quantize_packed_weight,
)
from fusedmoe.numerics.formats import mxfp8, quantize
from fusedmoe.numerics.formats.groups import PaddedRows
from fusedmoe.numerics.formats.swizzle import swizzle, swizzle_column_groups

pytestmark = needs_hopper

FORMS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
SPLITS = {
    "around a tile": [127, 0, 128, 129, 1],
    "around a packed tile": [0, 255, 256, 257, 0],
    "all in one": [0, 0, 300, 0],
    "all in the only one": [300],
    "one row in the only one": [1],
    "nothing": [0, 0, 0],
    "one row per expert": [1] * 33,
    "33 experts": [3, 0, 40, 0, 0, 129] + [0] * 20 + [31, 32, 33, 0, 0, 1, 0],
    "more experts than one look at the offsets covers": [0] * 130 + [3, 0, 0, 5] + [0] * 130 + [40],
}


def unsigned(t):
    return t.contiguous().view(torch.uint8)


def wanted_forms(x, offsets, rows, columns, halves):
    """Codes and scales of plain PyTorch, and the bounds of what the kernel writes."""
    padded = PaddedRows.of(offsets, x.shape[0], PACKING)
    ends, end = padded.ends_E, int(padded.ends_E[-1])
    if halves:
        x = x.unflatten(-1, (2, -1, 32)).transpose(-3, -2).flatten(-3)
    packed, found = padded.spread(x), []
    size = padded.num_padded // TILE * -(-x.shape[1] // TILE) * SCALES
    if rows:
        q = quantize(packed, mxfp8(), -1)
        found.append((unsigned(q.data), swizzle(unsigned(q.scale))))
    if columns:
        q = quantize(packed, mxfp8(), -2, offsets=ends)
        blocked = swizzle_column_groups(unsigned(q.scale), ends // 32).blocked
        # `quantize` may pad rows once more, after the last expert's
        found.append((unsigned(q.data.mT[: padded.num_padded]), blocked[:size]))
    return found, padded.num_padded, end, size


def check_packed(x, offsets, index=None, form="both", halves=False):
    """Compare with plain PyTorch, and check that nothing is written after the last expert's rows."""
    rows, columns = FORMS[form]
    with nan_in_new_tensors():
        run = bind_quantize_packed(x, offsets, index, rows=rows, columns=columns, halves=halves)
        found = run(x, offsets, index)
    source = x if index is None else x[index]
    wanted, packed, end, size = wanted_forms(source, offsets, rows, columns, halves)
    written = end // TILE * -(-x.shape[1] // TILE) * SCALES
    for (codes, scale), (want, want_scale) in zip(found, wanted, strict=True):
        assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
        assert codes.shape == want.shape == (packed, x.shape[1])
        assert scale.shape == want_scale.shape == (size,)
        assert torch.equal(unsigned(codes)[:end], want[:end])
        assert torch.equal(unsigned(scale)[:written], want_scale[:written])
        assert (unsigned(codes)[end:] == 255).all()
        assert (unsigned(scale)[written:] == 255).all()
    return found


def with_tail(splits, tail, columns, dtype, device, make=values):
    """Rows sorted by expert, followed by NaN."""
    used = sum(splits)
    x = make(used + tail, columns, dtype, device) if make is values else make(used + tail, columns, device).to(dtype)
    x[used:] = torch.nan
    return x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SPLITS)
def test_rows_sorted_by_expert(device, kind, form):
    """A tail without an expert, of NaN, whose packed rows the kernel does not write."""
    for tail, columns, make in ((0, 96, values), (300, 160, ordinary)):
        if sum(SPLITS[kind]) + tail:
            x = with_tail(SPLITS[kind], tail, columns, BF16, device, make)
            check_packed(x, offsets_of(SPLITS[kind], device), form=form)


@pytest.mark.parametrize(
    ("columns", "halves"),
    [*((columns, False) for columns in (32, 64, 96, 128, 384)), *((columns, True) for columns in (64, 128, 192, 384))],
)
def test_features(device, columns, halves):
    """Fewer features than a tile has, and some more: what is missing has scales of zero."""
    splits = [33, 0, 31, 1, 130]
    for make in (values, ordinary):
        x = with_tail(splits, 12, columns, BF16, device, make)
        for codes, scale in check_packed(x, offsets_of(splits, device), halves=halves):
            assert unsigned(codes)[:30].any()
            assert unsigned(scale)[:16].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
def test_fp16(device, form, halves):
    splits = [140, 0, 5]
    check_packed(with_tail(splits, 3, 192, FP16, device), offsets_of(splits, device), form=form, halves=halves)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
def test_rows_through_an_index(device, form, halves):
    """The index of a row without an expert is not read."""
    tokens = values(70, 192, BF16, device, pitch=24)
    generator = torch.Generator(device).manual_seed(1)
    index = torch.randint(0, 70, (210,), device=device, dtype=torch.int32, generator=generator)
    offsets = offsets_of([0, 140, 5, 0, 50], device)
    rows, columns = FORMS[form]
    wanted = check_packed(tokens, offsets, index, form, halves)
    index[195:] = 1 << 30
    with nan_in_new_tensors():
        run = bind_quantize_packed(tokens, offsets, index, rows=rows, columns=columns, halves=halves)
        found = run(tokens, offsets, index)
    for got, want in zip(found, wanted, strict=True):
        assert all(torch.equal(unsigned(a), unsigned(b)) for a, b in zip(got, want, strict=True))


def test_every_exponent_of_the_largest_magnitude(device):
    """A block for each exponent of bf16, with mantissas around that of the largest code: by rows, and by columns."""
    x = torch.zeros(256, 256, dtype=BF16, device=device)
    for i in range(256):
        most = min(i, 254) * 128 + 96 + i % 5 - 2
        x.view(torch.int16)[i, 5] = x.view(torch.int16)[40, i] = most
    assert x.isfinite().all()
    check_packed(x, offsets_of([256], device))


def check_weight(weight, form="both", halves=False):
    """Compare with plain PyTorch."""
    rows, columns = FORMS[form]
    with nan_in_new_tensors():
        found = bind_quantize_packed_weight(weight, rows=rows, columns=columns, halves=halves)(weight)
    packed = weight.unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3) if halves else weight
    axes = [axis for axis, wanted in ((-1, rows), (-2, columns)) if wanted]
    for (codes, scale), axis in zip(found, axes, strict=True):
        want = quantize(packed, mxfp8(), axis)
        assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
        assert torch.equal(unsigned(codes), unsigned(want.data))
        assert torch.equal(unsigned(scale), swizzle(unsigned(want.scale)).flatten())
    return found


def weights_of(experts, lines, columns, device, make, dtype=BF16, pitch=0):
    """A weight (E, N, K), whose rows are ``pitch`` elements apart more than need be."""
    x = make(experts * lines, columns + pitch, dtype, device) if make is values else make(
        experts * lines, columns + pitch, device
    ).to(dtype)  # fmt: skip
    return x.view(experts, lines, columns + pitch)[..., :columns]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
@pytest.mark.parametrize(("experts", "lines", "columns"), [(1, 128, 128), (3, 256, 384), (2, 640, 128)])
def test_weights(device, experts, lines, columns, form, halves):
    for make, pitch in ((values, 8), (ordinary, 0)):
        weight = weights_of(experts, lines, columns, device, make, pitch=pitch)
        for codes, scale in check_weight(weight, form, halves):
            assert unsigned(codes).any()
            assert unsigned(scale).any()


@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
def test_weights_in_fp16(device, halves):
    check_weight(weights_of(2, 256, 128, device, values, FP16), halves=halves)


# -------------------------------------------------------------------------------------------------------- on a GPU


@needs_gpu
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
def test_weights_of_full_size(device, halves):
    check_weight(torch.randn(64, 1536, 2048, device=device).to(BF16), halves=halves)


@needs_gpu
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
def test_full_size(device, halves):
    rows, columns, experts = 65_536, 2048, 128
    x = torch.randn(rows, columns, device=device).to(BF16)
    for splits in ([rows // experts] * experts, [0] * 5 + [rows - 77] + [0] * 122):
        check_packed(x, offsets_of(splits, device), halves=halves)


@needs_gpu
def test_nothing_waits_for_the_device_and_a_graph_follows_the_splits(device, no_sync):
    x = torch.randn(400, 256, device=device).to(BF16)
    offsets = offsets_of([5, 0, 300, 7], device)
    run = bind_quantize_packed(x, offsets, columns=True)
    run(x, offsets)
    with no_sync():
        run(x, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x, offsets)
    for splits in ([5, 0, 300, 7], [0, 0, 0, 0], [400, 0, 0, 0], [0, 1, 0, 390]):
        offsets.copy_(offsets_of(splits, device))
        graph.replay()
        wanted, _, end, _ = wanted_forms(x, offsets, True, True, False)
        written = end // TILE * 2 * SCALES
        for (codes, scale), (want, want_scale) in zip(found, wanted, strict=True):
            assert torch.equal(unsigned(codes)[:end], want[:end])
            assert torch.equal(unsigned(scale)[:written], want_scale[:written])
