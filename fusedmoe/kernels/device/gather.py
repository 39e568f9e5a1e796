"""Gathered rows: rows of an operand that an index chooses, copied into its stages by warps of the producer.

    stage[i, :] = operand[index of row i, the columns of the stage]

TMA on Hopper loads boxes of consecutive rows only. So gathered rows are copied by ``cp.async``, 16 bytes per lane.
Eight lanes copy 128 bytes of a row, the width of the swizzle: an instruction of a warp copies such parts of four rows.

**Lanes.** A warp copies its rows 4 j to 4 j + 3 by its j-th instruction: the lanes 8 g to 8 g + 7 copy row 4 j + g.
So a lane needs the indices of every fourth row. Of each 32 rows, lane 8 g + j reads the index of row 4 j + g, and
`spread` passes it to the other seven. The loop over K then has two instructions per copy: the address of the source,
and the copy. A stage whose copies are issued late delays the product.

**Swizzle.** Chunk c (16 bytes) of row i is stored as chunk ``c ^ (i % 8)`` of the row's 128 bytes. Row i is 4 j + g, so
``i % 8`` is g or g + 4: a lane's places in shared memory differ by constants from two addresses.

**Completion.** A stage is full once TMA has loaded the other operand, and the copies of all lanes have arrived: each
lane arrives at the stage's barrier by ``cp.async.mbarrier.arrive``, which the hardware performs after its copies.
The copies write through another proxy than the one that wgmma reads through. Therefore the math warpgroups execute a
proxy fence between their wait for a stage and its multiplication.

**Measured and left out**, on an H200: prefetches of later rows into the L2, whole rows before their tile (7 to 25%
slower) or parts of rows eight stages ahead (7 to 40%); a copy of the last row in place of zeros past an expert's last
row (4%: all column tiles read that row at once); in ragged M, indices that are read one tile ahead (no faster).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from fusedmoe.kernels.device.warps import LANES

CHUNK_BYTES = 16  # per lane and copy
ROW_BYTES = 128  # of a row in a stage
ROW_LANES = ROW_BYTES // CHUNK_BYTES
COPY_ROWS = LANES // ROW_LANES  # rows per instruction of a warp
OWN_LANES = (LANES - ROW_LANES) << 8 | LANES - 1  # of a shuffle: among the eight lanes of a row


class Gathered(NamedTuple):
    """A matrix whose row ``index[r]`` is row r of an operand."""

    matrix: cute.Tensor
    index: cute.Tensor


def chunk(lane: Int32) -> Int32:
    """Chunk of 16 bytes, out of a row's eight, that a lane copies."""
    return lane % ROW_LANES


def own_row(lane: Int32) -> Int32:
    """Row, of each 32, whose index a lane reads."""
    return lane % ROW_LANES * COPY_ROWS + lane // ROW_LANES


@cute.jit
def spread(indices: cute.Tensor, own: cute.Tensor) -> None:
    """Give each lane the indices of its rows: element j is that of row ``4 j + lane // 8``.

    ``own[q]`` is the index of row ``32 q + own_row(lane)``.
    """
    for j in cutlass.range_constexpr(cute.size(indices)):
        indices[j] = cute.arch.shuffle_sync(own[j // ROW_LANES], j % ROW_LANES, mask_and_clamp=OWN_LANES)


@cute.jit
def copy_rows(
    indices: cute.Tensor,
    operand: Int64,
    pitch: Int32,
    left: Int32,
    stage: Int32,
    lane: Int32,
    boxes: cutlass.Constexpr[int] = 1,
    box_bytes: cutlass.Constexpr[int] = 0,
    checked: cutlass.Constexpr[bool] = False,
) -> None:
    """Start the copies of 128 bytes of four rows per element of ``indices``, or of ``boxes`` times 128 bytes.

    - ``indices``: the indices of the lane's rows, from `spread`.
    - ``operand``: address of the lane's chunk of row 0.
    - ``pitch``: bytes between rows.
    - ``left``: bytes from the beginning of the lane's chunk to the end of the row. If none, the chunk is filled with
      zeros.
    - ``stage``: address of the warp's first row in shared memory.
    - ``boxes``, ``box_bytes``: multiples of 128 bytes of a row, and the distance from each to the next in shared
      memory.
    - ``checked``: whether an index may be negative. Such a row is filled with zeros, and nothing is read for it.
    """
    copy = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), Int32, num_bits_per_copy=128)
    group = lane // ROW_LANES
    even = stage + group * ROW_BYTES + (chunk(lane) ^ group) * CHUNK_BYTES
    odd = even ^ (COPY_ROWS * CHUNK_BYTES)
    valid = cute.make_rmem_tensor((1, 1), Boolean)
    for j in cutlass.range_constexpr(cute.size(indices)):
        source, to = operand + Int64(indices[j]) * Int64(pitch), (odd if j % 2 else even) + j * (COPY_ROWS * ROW_BYTES)
        for box in cutlass.range_constexpr(boxes):
            valid[0] = left > box * ROW_BYTES
            if const_expr(checked):
                valid[0] = (indices[j] | (left - 1 - box * ROW_BYTES)) >= 0
            cute.copy(
                copy,
                vector(source + box * ROW_BYTES, cute.AddressSpace.gmem),
                vector(to + box * box_bytes, cute.AddressSpace.smem),
                pred=valid,
            )


def vector(address: Int32 | Int64, space: cute.AddressSpace) -> cute.Tensor:
    """A chunk at an address, as an operand of its copy."""
    pointer = cute.make_ptr(Int32, address, space, assumed_align=CHUNK_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(((CHUNK_BYTES // 4, 1), 1)))
