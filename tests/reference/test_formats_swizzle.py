"""The order of scales that the matrix units of Blackwell read, against the formula of an entry's place."""

import pytest
import torch

from fusedmoe.numerics.formats import (
    mxfp8,
    nvfp4,
    quantize,
    swizzle,
    swizzle_column_groups,
    swizzle_row_groups,
    unswizzle,
)

DTYPES = [torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.float32]


def scales(*shape, dtype=torch.uint8):
    """Any bits, none of them zero: what pads is told from what was there."""
    if dtype.itemsize == 1:
        return torch.randint(1, 256, shape, dtype=torch.uint8).view(dtype)
    return torch.randint(1, 2**31, shape, dtype=torch.int32).view(dtype)


def bits(x):
    """For comparisons: NaNs are equal to themselves."""
    return x.view(torch.uint8) if x.element_size() == 1 else x.view(torch.int32)


def ends(*counts):
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def size(rows, columns):
    return -(-rows // 128) * -(-columns // 4) * 512


def by_formula(scale):
    """An entry at a time."""
    rows, columns = scale.shape
    across = -(-columns // 4)
    blocked = torch.zeros(size(rows, columns), dtype=bits(scale).dtype)
    for i in range(rows):
        for j in range(columns):
            offset = (i // 128 * across + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
            blocked[offset] = bits(scale)[i, j]
    return blocked


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (129, 5), (300, 7), (256, 12), (96, 9)])
def test_formula(rows, columns, dtype):
    scale = scales(rows, columns, dtype=dtype)
    blocked = swizzle(scale)
    assert blocked.dtype is dtype
    assert torch.equal(bits(blocked), by_formula(scale))
    back = unswizzle(blocked, rows, columns)
    assert back.dtype is dtype
    assert torch.equal(bits(back), bits(scale))


def test_places_by_hand():
    scale = torch.arange(256 * 8, dtype=torch.int32).view(256, 8)
    blocked = swizzle(scale)
    assert blocked[:6].tolist() == [0, 1, 2, 3, 32 * 8, 32 * 8 + 1]  # rows 0, 32, 64 and 96 lie side by side
    assert blocked[16:20].tolist() == [8, 9, 10, 11]  # then rows 1, 33, ...
    assert blocked[512:516].tolist() == [4, 5, 6, 7]  # the tile to the right
    assert blocked[1024] == 128 * 8  # the tile below


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_leading_index_is_a_matrix_of_its_own(dtype):
    scale = scales(2, 3, 130, 6, dtype=dtype)
    blocked = swizzle(scale)
    assert blocked.shape == (2, 3, size(130, 6))
    for i in range(2):
        for j in range(3):
            assert torch.equal(bits(blocked[i, j]), bits(swizzle(scale[i, j])))
    assert torch.equal(bits(unswizzle(blocked, 130, 6)), bits(scale))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4)])
def test_nothing(shape):
    blocked = swizzle(scales(*shape))
    assert blocked.numel() == 0
    assert unswizzle(blocked, *shape[-2:]).shape == shape


def test_strides_do_not_matter():
    scale = scales(140, 9)
    wide = torch.stack((scale, scales(140, 9)), -1)
    assert torch.equal(swizzle(wide[..., 0]), swizzle(scale))
    assert torch.equal(swizzle(scale.mT.contiguous().mT), swizzle(scale))


COUNTS = [[130, 0, 1, 128, 9], [0, 0, 0], [5], [0, 300], [256, 128], [1] * 9]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", [0, 7])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_groups_of_rows(counts, tail, dtype):
    rows, columns = sum(counts) + tail, 6
    scale = scales(rows, columns, dtype=dtype)
    blocked, starts = swizzle_row_groups(scale, ends(*counts))
    check_groups(blocked, starts, scale.split([*counts, tail])[:-1], dtype)
    assert blocked.numel() == size((rows // 128 + min(len(counts), rows)) * 128, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("rows", [40, 300])
@pytest.mark.parametrize("counts", [[5, 0, 1, 4, 9], [0, 0, 0], [3], [0, 8], [4, 4], [1] * 9], ids=str)
def test_groups_of_columns(counts, rows, tail, dtype):
    columns = sum(counts) + tail
    scale = scales(rows, columns, dtype=dtype)
    blocked, starts = swizzle_column_groups(scale, ends(*counts))
    check_groups(blocked, starts, scale.split([*counts, tail], dim=1)[:-1], dtype)
    assert blocked.numel() == size(rows, (columns // 4 + min(len(counts), columns)) * 4)


def check_groups(blocked, starts, groups, dtype):
    """Every expert's part is what its scales alone are, parts follow one another, and zeros follow the last."""
    assert blocked.dtype is dtype
    end = 0
    for start, group in zip(starts.tolist(), groups, strict=True):
        assert start == end
        expected = bits(swizzle(group.contiguous()))
        end = start + expected.numel()
        assert torch.equal(bits(blocked[start:end]), expected)
    assert not bits(blocked[end:]).any()


@pytest.mark.parametrize("function", [swizzle_row_groups, swizzle_column_groups])
def test_what_lies_behind_the_last_expert_changes_nothing(function):
    scale = scales(20, 20)
    blocked = function(scale, ends(3, 0, 8)).blocked
    other = scale.clone()
    other[(slice(11, None),) if function is swizzle_row_groups else (slice(None), slice(11, None))] = 0xFF
    assert not torch.equal(other, scale)
    assert torch.equal(function(other, ends(3, 0, 8)).blocked, blocked)


@pytest.mark.parametrize("function", [swizzle_row_groups, swizzle_column_groups])
def test_the_size_does_not_depend_on_the_splits(function):
    scale = scales(64, 64)
    sizes = {
        function(scale, ends(*counts)).blocked.shape for counts in ([64, 0, 0], [1, 1, 1], [0, 0, 0], [20, 21, 22])
    }
    assert len(sizes) == 1


@pytest.mark.parametrize("function", [swizzle_row_groups, swizzle_column_groups])
def test_nothing_is_read_on_the_host(function):
    # a meta tensor has no values: whatever asks for one raises
    blocked, starts = function(scales(40, 50).to("meta"), ends(3, 0, 8).to("meta"))
    real = function(scales(40, 50), ends(3, 0, 8))
    assert (blocked.shape, blocked.dtype) == (real.blocked.shape, real.blocked.dtype)
    assert (starts.shape, starts.dtype) == (real.starts.shape, real.starts.dtype)


@pytest.mark.parametrize("format", [mxfp8(), nvfp4()], ids=str)
def test_scales_of_quantized_rows(format):
    counts = [70, 0, 33]
    x, offsets = torch.randn(110, 96), ends(*counts)
    by_rows, by_columns = (quantize(x, format, axis, offsets=offsets) for axis in (-1, -2))
    blocks = ends(*(-(-c // format.block[1]) for c in counts))
    rows = swizzle_row_groups(by_rows.scale, offsets)
    columns = swizzle_column_groups(by_columns.scale, blocks)
    first = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        part = x[first : first + count]
        for groups, alone in (
            (rows, quantize(part, format)),
            (columns, quantize(part, format, -2)),
        ):
            blocked = bits(swizzle(alone.scale))
            if format.tensor_scale:
                assert blocked.any()
            start = int(groups.starts[expert])
            assert torch.equal(bits(groups.blocked)[start : start + blocked.numel()], blocked)
        first += count
