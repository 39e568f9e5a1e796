"""Gathered rows: rows of an operand that an index chooses, copied into its stages by warps of the producer.

    stage[i, :] = operand[index of row i, the columns of the stage]

TMA on Hopper loads boxes of consecutive rows only. So gathered rows are copied by ``cp.async``, 16 bytes per lane.
Eight lanes copy 128 bytes of a row, the width of the swizzle: an instruction of a warp copies such parts of four rows.

**Indices.** Lane l of a warp holds the index of row ``32 q + l``, for each 32 rows q of its share. An instruction
copies the rows j, 8 + j, 16 + j and 24 + j of 32: each eight lanes get their index from their own lane j. A row with a
negative index is filled with zeros, and nothing is read for it.

**Swizzle.** Chunk c (16 bytes) of row i is stored as chunk ``c ^ (i % 8)`` of the row's 128 bytes. The four rows of an
instruction have the same ``i % 8``, so its place is an exclusive or with a constant.

**Completion.** A stage is full once TMA has loaded the other operand, and the copies of all lanes have arrived: each
lane arrives at the stage's barrier by ``cp.async.mbarrier.arrive``, which the hardware performs after its copies.
The copies write through another proxy than the one that wgmma reads through. Therefore the math warpgroups execute a
proxy fence between their wait for a stage and its multiplication.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from fusedmoe.kernels.sm90.warps import LANES

CHUNK_BYTES = 16  # per lane and copy
ROW_BYTES = 128  # of a row in a stage
ROW_LANES = ROW_BYTES // CHUNK_BYTES
COPIES_UNROLLED = 8  # enough to hide the latency of a shuffle, and few instructions: see choice.py
OWN_LANES = (LANES - ROW_LANES) << 8 | LANES - 1  # of a shuffle: among the eight lanes of a row


class Gathered(NamedTuple):
    """A matrix whose row ``index[r]`` is row r of an operand."""

    matrix: cute.Tensor
    index: cute.Tensor


def chunk(lane: Int32) -> Int32:
    """Chunk of 16 bytes, out of a row's eight, that a lane copies."""
    return lane % ROW_LANES


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
) -> None:
    """Start the copies of 128 bytes of 32 rows per element of ``indices``, or of ``boxes`` times 128 bytes.

    Parameters
    ----------
    indices
        The lane's indices, in registers.
    operand
        Address of the lane's chunk of row 0.
    pitch
        Bytes between rows.
    left
        Bytes from the beginning of the lane's chunk to the end of the row. If none, the chunk is filled with zeros.
    stage
        Address of the first row in shared memory.
    boxes, box_bytes
        Multiples of 128 bytes of a row, and the distance from each to the next in shared memory.
    """
    place = stage + lane // ROW_LANES * (ROW_LANES * ROW_BYTES) + chunk(lane) * CHUNK_BYTES
    copy = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), Int32, num_bits_per_copy=128)
    valid = cute.make_rmem_tensor((1, 1), Boolean)
    for j in cutlass.range(ROW_LANES, unroll=max(COPIES_UNROLLED // cute.size(indices), 1)):
        swizzled = (place ^ (j * CHUNK_BYTES)) + j * ROW_BYTES
        for q in cutlass.range_constexpr(cute.size(indices)):
            index = cute.arch.shuffle_sync(indices[q], j, mask_and_clamp=OWN_LANES)
            source, to = operand + Int64(index) * Int64(pitch), swizzled + q * (LANES * ROW_BYTES)
            for box in cutlass.range_constexpr(boxes):
                valid[0] = (index | (left - 1 - box * ROW_BYTES)) >= 0
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
