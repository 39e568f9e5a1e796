"""The quantize kernel of packed rows in NVFP4, which runs on Hopper too: it has the bits of `fusedmoe.quantize`, packed
and swizzled, for any splits and values.
"""

import pytest
import torch
from kit.hopper import needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors
from test_sm90_quantize import BF16, FP16, offsets_of, values
from test_sm90_quantize_formats import ordinary
from test_sm100_quantize import FORMS, SPLITS, unsigned, with_tail

from fusedmoe.builtin_rules.sm100.nvfp4_forms import bind_packed_forms
from fusedmoe.kernels.sm100.quantize_functions import bind_quantize_packed_nvfp4
from fusedmoe.numerics.formats import Quantizer, nvfp4, quantize
from fusedmoe.numerics.formats.groups import PACKED_ROWS, PaddedRows
from fusedmoe.numerics.formats.packed import Packed, quantize_packed
from fusedmoe.numerics.formats.swizzle import swizzle, swizzle_column_groups

pytestmark = needs_hopper

PLAIN, ROTATED = Quantizer(nvfp4()), Quantizer(nvfp4(), hadamard=True)


def written(form, packed, end, by_columns):
    """The codes and scales of a form that a kernel writes, and those that it does not."""
    codes, scale = (unsigned(t) for t in form)
    last = end * (scale.numel() // packed)
    if by_columns:
        return (codes[:, : end // 2], scale[:last]), (codes[:, end // 2 :], scale[last:])
    return (codes[:end], scale[:last]), (codes[end:], scale[last:])


def compare(found, wanted, packed, end, axes):
    for (*got, tensor_scale), want, axis in zip(found, wanted, axes, strict=True):
        assert (got[0].dtype, got[1].dtype) == (torch.uint8, torch.float8_e4m3fn)
        assert [t.shape for t in got] == [want.data.shape, want.scale.shape]
        assert torch.equal(tensor_scale, want.tensor_scale)
        inside, outside = written(got, packed, end, axis == -2)
        expected, _ = written((want.data, want.scale), packed, end, axis == -2)
        assert all(torch.equal(a, b) for a, b in zip(inside, expected, strict=True))
        assert all((t == 255).all() for t in outside)


def check_packed(x, offsets, index=None, form="both", halves=False, quantizer=ROTATED):
    """Compare with plain PyTorch, and check that nothing is written after the last expert's rows."""
    rows, columns = FORMS[form]
    axes = [axis for axis, wanted in ((-1, rows), (-2, columns)) if wanted]
    with nan_in_new_tensors():
        run = bind_packed_forms(x, quantizer, offsets, index, rows=rows, columns=columns, halves=halves)
        found = run(x, offsets, index)
    source = x if index is None else x[index]
    wanted = [quantize_packed(source, quantizer, Packed(axis, halves), offsets) for axis in axes]
    padded = PaddedRows.of(offsets, source.shape[0], PACKED_ROWS)
    compare(found, wanted, padded.num_padded, int(padded.ends_E[-1]), axes)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SPLITS)
def test_rows_sorted_by_expert(device, kind, form):
    """A tail without an expert, of NaN, whose packed rows the kernel does not write."""
    for tail, columns, make in ((0, 128, values), (300, 256, ordinary)):
        if sum(SPLITS[kind]) + tail:
            x = with_tail(SPLITS[kind], tail, columns, BF16, device, make)
            check_packed(x, offsets_of(SPLITS[kind], device), form=form)


@pytest.mark.parametrize("quantizer", [PLAIN, ROTATED], ids=["plain", "rotated"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
def test_features(device, quantizer, dtype, halves):
    splits = [33, 0, 31, 1, 130]
    for columns in (128, 384):
        x = with_tail(splits, 12, columns, dtype, device, ordinary)
        for codes, scale, _ in check_packed(x, offsets_of(splits, device), halves=halves, quantizer=quantizer):
            assert codes[:30].any()
            assert unsigned(scale)[:16].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("halves", [False, True], ids=["", "halves"])
def test_rows_through_an_index(device, form, halves):
    """The index of a row without an expert is not read."""
    tokens = values(70, 256, BF16, device, pitch=24)
    generator = torch.Generator(device).manual_seed(1)
    index = torch.randint(0, 70, (210,), device=device, dtype=torch.int32, generator=generator)
    offsets = offsets_of([0, 140, 5, 0, 50], device)
    rows, columns = FORMS[form]
    wanted = check_packed(tokens, offsets, index, form, halves)
    index[195:] = 1 << 30
    with nan_in_new_tensors():
        run = bind_packed_forms(tokens, ROTATED, offsets, index, rows=rows, columns=columns, halves=halves)
        found = run(tokens, offsets, index)
    for got, want in zip(found, wanted, strict=True):
        assert all(torch.equal(unsigned(a), unsigned(b)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("quantizer", [PLAIN, ROTATED], ids=["plain", "rotated"])
def test_random_bits_round(device, quantizer):
    """Those of a code lie where the code does."""
    splits = [140, 0, 61, 1]
    offsets = offsets_of(splits, device)
    x = with_tail(splits, 9, 128, BF16, device, ordinary)
    padded = PaddedRows.of(offsets, x.shape[0], PACKED_ROWS)
    packed, ends = padded.spread(x), padded.ends_E
    count, end = padded.num_padded, int(ends[-1])
    random = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for shape in ((count, 128), (128, count))]
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


# -------------------------------------------------------------------------------------------------------- on a GPU


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
    run = bind_packed_forms(x, ROTATED, offsets, rows=True, columns=True)
    run(x, offsets)
    with no_sync():
        run(x, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x, offsets)
    for splits in ([5, 0, 300, 7], [0, 0, 0, 0], [400, 0, 0, 0], [0, 1, 0, 390]):
        offsets.copy_(offsets_of(splits, device))
        graph.replay()
        padded = PaddedRows.of(offsets, 400, PACKED_ROWS)
        end = int(padded.ends_E[-1])
        for (*form, tensor_scale), axis in zip(found, (-1, -2), strict=True):
            want = quantize_packed(x, ROTATED, Packed(axis), offsets)
            inside, _ = written(form, padded.num_padded, end, axis == -2)
            expected, _ = written((want.data, want.scale), padded.num_padded, end, axis == -2)
            assert all(torch.equal(a, b) for a, b in zip(inside, expected, strict=True))
            assert torch.equal(tensor_scale, want.tensor_scale)
