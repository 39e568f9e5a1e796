"""The order of scales that the matrix units of Blackwell read, against the formula of an entry's place."""

import pytest
import torch
from kit.compare import pairwise
from kit.splits import ends

from fusedmoe.numerics.formats import swizzle, swizzle_column_groups, swizzle_row_groups, unswizzle

DTYPES = [torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_function = pytest.mark.parametrize("function", [swizzle_row_groups, swizzle_column_groups])


def scales(*shape, dtype=torch.uint8):
    """Any bits, none of them zero: what pads is told from what was there."""
    if dtype.itemsize == 1:
        return torch.randint(1, 256, shape, dtype=torch.uint8).view(dtype)
    return torch.randint(1, 2**31, shape, dtype=torch.int32).view(dtype)


def bits(x):
    """For comparisons: NaNs are equal to themselves."""
    return x.view(torch.uint8) if x.element_size() == 1 else x.view(torch.int32)


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


@every_dtype
@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (129, 5), (300, 7), (256, 12), (96, 9)])
def test_formula(rows, columns, dtype):
    scale = scales(rows, columns, dtype=dtype)
    blocked = swizzle(scale)
    assert blocked.dtype is dtype
    assert torch.equal(bits(blocked), by_formula(scale))
    back = unswizzle(blocked, rows, columns)
    assert back.dtype is dtype
    assert torch.equal(bits(back), bits(scale))


@every_dtype
def test_every_leading_index_is_a_matrix_of_its_own_and_strides_do_not_matter(dtype):
    scale = scales(2, 3, 130, 6, dtype=dtype)
    blocked = swizzle(scale)
    assert blocked.shape == (2, 3, size(130, 6))
    for i in range(2):
        for j in range(3):
            assert torch.equal(bits(blocked[i, j]), bits(swizzle(scale[i, j])))
            assert torch.equal(bits(swizzle(scale[i, j].mT.contiguous().mT)), bits(blocked[i, j]))
    assert torch.equal(bits(unswizzle(blocked, 130, 6)), bits(scale))
    assert torch.equal(bits(swizzle(scale.mT.contiguous().mT)), bits(blocked))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4)])
def test_nothing(shape):
    blocked = swizzle(scales(*shape))
    assert blocked.numel() == 0
    assert unswizzle(blocked, *shape[-2:]).shape == shape


ROW_COUNTS = [[130, 0, 1, 128, 9], [0, 0, 0], [5], [0, 300], [256, 128], [1] * 9]
COLUMN_COUNTS = [[5, 0, 1, 4, 9], [0, 0, 0], [3], [0, 8], [4, 4], [1] * 9]


@pytest.mark.parametrize(
    ("along", "counts", "tail", "other", "dtype"),
    [
        *((0, *case) for case in pairwise(ROW_COUNTS, [0, 7], [6], DTYPES)),
        *((1, *case) for case in pairwise(COLUMN_COUNTS, [0, 3], [40, 300], DTYPES)),
    ],
    ids=str,
)
def test_groups(along, counts, tail, other, dtype):
    """Every expert's part is what its scales alone are, parts follow one another, and zeros follow the last."""
    total, function = sum(counts) + tail, (swizzle_row_groups, swizzle_column_groups)[along]
    scale = scales(*((total, other) if along == 0 else (other, total)), dtype=dtype)
    blocked, starts = function(scale, ends(*counts))
    assert blocked.dtype is dtype
    end, block = 0, (128, 4)[along]
    for start, group in zip(starts.tolist(), scale.split([*counts, tail], dim=along)[:-1], strict=True):
        assert start == end
        expected = bits(swizzle(group.contiguous()))
        end = start + expected.numel()
        assert torch.equal(bits(blocked[start:end]), expected)
    assert not bits(blocked[end:]).any()
    # enough for any splits, whatever these are
    most = (total // block + min(len(counts), total)) * block
    assert blocked.numel() == size(*((most, other) if along == 0 else (other, most)))


@every_function
def test_the_tail_changes_nothing_and_nothing_is_read_on_the_host(function):
    scale, offsets = scales(20, 20), ends(3, 0, 8)
    found = function(scale, offsets)
    other = scale.clone()
    other[(slice(11, None),) if function is swizzle_row_groups else (slice(None), slice(11, None))] = 0xFF
    assert not torch.equal(other, scale)
    assert torch.equal(function(other, offsets).blocked, found.blocked)
    # a meta tensor has no values: whatever asks for one raises
    for meta, real in zip(function(scale.to("meta"), offsets.to("meta")), found, strict=True):
        assert (meta.shape, meta.dtype) == (real.shape, real.dtype)
