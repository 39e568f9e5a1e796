"""Copies of rows by a few SMs, to or from the memory of another GPU; and of values of slots.

The copies go through shared memory: a lane copies and stores its own columns by ``cp.async``, and most of an SM's
shared memory is under way. NVLink delivers less than 1 MiB in the 2 us of a read, so a few SMs suffice. A warp has
every W-th row of W warps.

Axes: N rows, H columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.gather import CHUNK_BYTES, vector
from fusedmoe.kernels.device.warps import LANES, VECTOR, lowest_bit
from fusedmoe.kernels.exchange.layout import COPY_WARPS

CTAS = 2  # of a cluster, since products run in clusters of two: these cannot use a single free SM
VECTORS = 8  # per lane and step: a step of a warp is 2,048 columns of a row
STAGES = 7  # steps of a warp under way
BLOCK_BYTES = LANES * CHUNK_BYTES  # of a row that a warp copies at once


def launch(ctas: Int32, stream: Any, warps: int = COPY_WARPS) -> dict[str, Any]:
    """Launch arguments."""
    return {
        "grid": (ctas, 1, 1), "block": (warps * LANES, 1, 1), "cluster": (CTAS, 1, 1), "min_blocks_per_mp": 1,
        "stream": stream,
    }  # fmt: skip


def worker() -> tuple[Int32, Int32]:
    """The number of this warp, and the number of warps."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    return cta * COPY_WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx()), ctas * COPY_WARPS


class Shared(NamedTuple):
    """Shared memory."""

    staged: cute.Tensor  # the stages of a lane: (vector, block, stage)
    list: cute.Tensor | None  # of the CTA: numbers of 16 bits
    listed: cute.Tensor | None  # those that a warp takes, every `COPY_WARPS`-th
    counts: cute.Tensor | None  # of numbers with a step: (step, warp)
    barriers: cute.Pointer | None  # of the CTA


def allocate(element: Any, stages: int = STAGES, listed: int = 0, barriers: int = 0) -> Shared:
    """Allocate the stages of each warp, a list of so many numbers (steps.py), and barriers."""
    smem, lane = SmemAllocator(), cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    layout = cute.make_layout((VECTOR, LANES, VECTORS, stages, COPY_WARPS))
    staged = smem.allocate_tensor(element, layout, 16)[None, lane, None, None, warp]
    numbers, of_warp, counts = None, None, None
    if listed:
        numbers = smem.allocate_tensor(Int16, cute.make_layout(listed), 16)
        by_warps = cute.make_layout((COPY_WARPS, listed // COPY_WARPS))
        of_warp = cute.make_tensor(numbers.iterator, by_warps)[warp, None]
        counts = smem.allocate_tensor(Int32, cute.make_layout((LANES, COPY_WARPS)), 16)
    return Shared(staged, numbers, of_warp, counts, smem.allocate_array(Int64, barriers) if barriers else None)


@cute.jit
def copy_rows(
    source: Int64, to: Int64, columns: Int32, staged: cute.Tensor, first: Int32, stride: Int32, wanted: Int32
):
    """Copy up to 32 rows of a warp: row ``first + i * stride`` if bit i of ``wanted`` is set. Both matrices (N, H) are
    contiguous, and begin at an address.
    """
    lane, vectors = cute.arch.lane_idx(), columns // VECTOR
    blocks = cute.ceil_div(vectors, LANES * VECTORS)
    steps = cute.arch.popc(wanted) * blocks
    left, stored = wanted, wanted  # bits of the rows that are not fetched, and not stored
    block, at_block = Int32(0), Int32(0)
    stage, at_stage = Int32(0), Int32(0)
    for step in cutlass.range(1 - STAGES, steps, unroll=1):
        row = first + lowest_bit(left) * stride
        fetch(source, vectors, row, block, lane, left != 0, staged[None, None, stage])
        cute.arch.cp_async_commit_group()
        stage = cutlass.select_(stage == STAGES - 1, Int32(0), stage + 1)
        block += 1
        if block == blocks:
            block = Int32(0)
            left = left & (left - 1)
        if step >= 0:
            cute.arch.cp_async_wait_group(STAGES - 1)
            row = first + lowest_bit(stored) * stride
            store(to, vectors, row, at_block, lane, staged[None, None, at_stage])
            at_stage = cutlass.select_(at_stage == STAGES - 1, Int32(0), at_stage + 1)
            at_block += 1
            if at_block == blocks:
                at_block = Int32(0)
                stored = stored & (stored - 1)
    cute.arch.cp_async_wait_group(0)  # the stages may be written again


@cute.jit
def fetch(source, vectors, row, block, lane, wanted, stage):
    """Start the copies of a step; zeros in place of columns past the last, and of a row that is not wanted."""
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), Int32, num_bits_per_copy=128)
    valid = cute.make_rmem_tensor((1, 1), Boolean)
    begin = block * (LANES * VECTORS) + lane
    address = source + (Int64(row) * Int64(vectors) + Int64(begin)) * CHUNK_BYTES
    to = stage[None, 0].iterator.toint()
    for v in cutlass.range_constexpr(VECTORS):
        valid[0] = wanted and begin + v * LANES < vectors
        cute.copy(
            atom, vector(address + v * BLOCK_BYTES, cute.AddressSpace.gmem),
            vector(to + v * BLOCK_BYTES, cute.AddressSpace.smem), pred=valid,
        )  # fmt: skip


@cute.jit
def store(to, vectors, row, block, lane, stage):
    """Store a step."""
    begin = block * (LANES * VECTORS) + lane
    address = to + (Int64(row) * Int64(vectors) + Int64(begin)) * CHUNK_BYTES
    loaded = [cute.make_rmem_tensor((VECTOR,), stage.element_type) for _ in range(VECTORS)]
    for v in cutlass.range_constexpr(VECTORS):
        cute.autovec_copy(stage[None, v], loaded[v])
    for v in cutlass.range_constexpr(VECTORS):
        if begin + v * LANES < vectors:
            pointer = cute.make_ptr(
                stage.element_type, address + v * BLOCK_BYTES, cute.AddressSpace.gmem, assumed_align=CHUNK_BYTES
            )  # fmt: skip
            cute.autovec_copy(loaded[v], cute.make_tensor(pointer, cute.make_layout((VECTOR,))))


@cute.jit
def put_values(values, slots, out):
    """Store the value of each slot's row; zero for a sentinel."""
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    thread, _, _ = cute.arch.thread_idx()
    threads = COPY_WARPS * LANES
    for slot in cutlass.range(cta * threads + thread, cute.size(slots), ctas * threads, unroll=4):
        row = Int32(slots[slot])
        value = Float32(0.0).to(values.element_type)
        if row < cute.size(values):
            value = values[row]
        out[slot] = value
