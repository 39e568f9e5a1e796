"""Which tiles the CTAs of a cluster get, and in which order: the functions that a GPU runs, compiled for the host."""

import functools
import itertools

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles")

import cutlass
from cutlass import Int32, cute

from fusedmoe.kernels.sm90.gemm import scheduler

TILE_M = 128


@cute.jit
def write_places(
    places: cute.Tensor, counts: cute.Tensor, rows: Int32, tiles_n: Int32, band: Int32, turned: Int32
) -> None:
    """Row tile, column tile and whether it is left over, of each cluster's tile and each of its CTAs."""
    count = scheduler.cluster_tiles(rows, tiles_n, TILE_M)
    counts[0] = count
    for local in cutlass.range(count, unroll=1):
        for rank in cutlass.range_constexpr(2):
            row_tiles = (rows + TILE_M - 1) // TILE_M
            row_tile, column, left_over = scheduler.place_pairs(local, row_tiles, tiles_n, band, Int32(rank), turned)
            places[local, rank, 0] = row_tile
            places[local, rank, 1] = column
            places[local, rank, 2] = Int32(left_over)


@functools.cache
def compiled():
    def on_host(*shape):
        strides = [1]
        for extent in shape[:0:-1]:
            strides.insert(0, strides[0] * extent)
        memory = cute.AddressSpace.generic
        return cute.runtime.make_fake_tensor(Int32, shape, tuple(strides), memspace=memory, assumed_align=4)

    numbers = [Int32(0)] * 4
    return cute.compile(write_places, on_host(4096, 2, 3), on_host(1), *numbers, options="--enable-tvm-ffi")


@functools.cache
def places(rows, tiles_n, band, turned):
    """One tuple per tile of a cluster: (row tile, column, left over) of both CTAs."""
    out, count = torch.zeros(4096, 2, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    compiled()(out, count, rows, tiles_n, band, turned)
    return [tuple(map(tuple, both)) for both in out[: int(count)].tolist()]


@pytest.mark.parametrize("row_tiles", [1, 2, 3, 8, 17, 18])
def test_every_tile_belongs_to_one_cta_and_a_cluster_shares_weights_or_rows(row_tiles):
    for tiles_n, band, turned in itertools.product((1, 2, 3, 6, 11), (1, 4), (0, 1, 5)):
        clusters = places(row_tiles * TILE_M - 5, tiles_n, band, turned)
        found = [(row, column) for both in clusters for row, column, _ in both if column < tiles_n]
        assert sorted(found) == [*itertools.product(range(row_tiles), range(tiles_n))]
        for (row, column, left_over), (other_row, other_column, other) in clusters:
            assert left_over == other
            if left_over:
                assert row == other_row == row_tiles - 1
                assert other_column == column + 1
            else:
                assert (other_row, other_column) == (row + 1, column)


def test_no_rows_have_no_tiles():
    assert places(0, 6, 4, 0) == []


def test_a_row_tile_left_over_is_worked_on_beside_the_pairs_of_its_columns():
    """512 experts of 320 rows: three clusters read the same two columns of weights."""
    for turned in range(4):
        of_expert = places(320, 6, 4, turned)
        for first in range(0, 9, 3):
            columns = {column for both in of_expert[first : first + 3] for _, column, _ in both}
            assert columns == {first // 3 * 2, first // 3 * 2 + 1}


def test_every_cluster_gets_its_share_of_row_tiles_left_over():
    """They take longer. With 66 clusters and 6 tiles per expert, a cluster has the same place in each expert."""
    tiles_of = [both for expert in range(66) for both in places(320, 4, 4, expert)]
    shares = [sum(first[2] for first, _ in tiles_of[cluster::66]) for cluster in range(66)]
    assert max(shares) - min(shares) <= 1
