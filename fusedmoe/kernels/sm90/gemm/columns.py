"""Ragged K products of FP8 codes by columns: the loads of the codes, and the stores of the gradient.

``a`` (N, P) and ``b`` (K, P) are the gradient and the input in *columns form*: they have unit stride along P, since FP8
products need K-major operands. P counts padded rows: each expert's rows begin at a multiple of 128. Padding has codes
of zero, so no product needs bounds along the rows. What follows the last expert's padding is not read.

**Results** are stored by threads, as those of ragged M products of FP8 codes. To a gradient that exists already,
threads add 16 bytes at a time: once per element and launch, so the result does not depend on the order. Neither has a
barrier.

Run: tests/unit/test_kernels_compile.py, tests/gpu/test_hopper_products.py; ``python -m benchmarks --only fp8``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from fusedmoe.kernels.sm90.gemm import scheduler
from fusedmoe.kernels.sm90.gemm.common import LOAD, PRODUCER, SHARED_LOAD, Tma
from fusedmoe.kernels.sm90.tiles.config import BLOCK_ROWS, EPILOGUE_COLUMNS

# fp32 values between the rows of a box: four rows of eight columns are in different banks. The addresses of a thread
# differ by constants. Those of a swizzled box do not, and ptxas spills other registers to keep them.
FP32_PITCH = EPILOGUE_COLUMNS + 8
FP32_BOX_BYTES = BLOCK_ROWS * FP32_PITCH * 4


class SharedScales(NamedTuple):
    """Stages of the scales in shared memory."""

    a: cute.Tensor  # (tile_m, stages)
    b: cute.Tensor  # (tile_n, stages)


class Operand(NamedTuple):
    """The loads of an operand."""

    codes: Tma  # (N, P)
    scales: Tma | None  # (N, P / 128), if stages have scales


def operand(kernel: Any, codes: Any, scales: Any, smem: Any, tile: int, ctas: int) -> Operand:
    """The loads of a stage's codes, and of its scales if stages have some, shared by this number of CTAs."""
    op = SHARED_LOAD if ctas > 1 else LOAD
    box = cute.slice_(smem, (None, None, 0))
    of_codes = cpasync.make_tiled_tma_atom(op, codes, box, (tile, kernel.operands.tile_k), num_multicast=ctas)
    of_scales = None
    if kernel.operands.staged:
        layout = cute.make_layout((tile, 1))
        of_scales = Tma(*cpasync.make_tiled_tma_atom(op, scales, layout, (tile, 1), num_multicast=ctas))
    return Operand(Tma(*of_codes), of_scales)


@cute.jit
def load(kernel, load_a, load_b, shared, rings, m, n):
    """The loading warp: codes and scales of A and B of every tile, stage by stage."""
    config, ab = kernel.config, rings.ab
    rank_m, rank_n = scheduler.ranks(config)
    a_mask, b_mask = kernel.multicast_masks(rank_m, rank_n)
    state = pipeline.make_pipeline_state(PRODUCER, kernel.stages)
    turn = Int32(0)
    turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
    while tile.expert != scheduler.END:
        of_a = copies(kernel, load_a, shared, 0, tile.place, m, config.tile_m, rank_n, config.cluster_n)
        of_b = copies(kernel, load_b, shared, 1, tile.column, n, config.tile_n, rank_m, config.cluster_m)
        first = tile.row // kernel.operands.tile_k
        for k_tile in cutlass.range(tile.depth, unroll=1):
            ab.producer_acquire(state)
            full = ab.producer_get_barrier(state)
            for some, mask in ((of_a, a_mask), (of_b, b_mask)):
                for atom, to, source in some:
                    at = (None, first + k_tile)
                    cute.copy(atom, source[at], to[None, state.index], tma_bar_ptr=full, mcast_mask=mask)
            state.advance()
        turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
    ab.producer_tail(state)


def copies(kernel, loads, shared, which: int, place, width, tile: int, rank, ctas: int):
    """Atom, shared side by stages, and global side by tiles of P, of each load of a tile of A (0) or B (1)."""
    # a tile past the last row loads the last one instead, see `Gemm.across`; its results are not stored
    place = cutlass.min(place, (width + tile - 1) // tile - 1)
    each = [(loads.codes, shared[which], kernel.operands.tile_k)]
    if loads.scales is not None:
        boxes = cute.make_tensor(
            shared.scales[which].iterator, cute.make_layout((tile, 1, kernel.stages), stride=(1, 1, tile))
        )
        each.append((loads.scales, boxes, 1))
    found = []
    for (atom, source), stages, deep in each:
        g = cute.local_tile(source, (tile, deep), (place, None))
        to, of = cpasync.tma_partition(
            atom, rank, cute.make_layout(ctas), cute.group_modes(stages, 0, 2), cute.group_modes(g, 0, 2)
        )
        found.append((atom, to, of))
    return found


def fp32_box_layout(boxes: int) -> Any:
    """Shared-memory layout of boxes of fp32."""
    layout = cute.make_layout((BLOCK_ROWS, EPILOGUE_COLUMNS, boxes), stride=(FP32_PITCH, 1, BLOCK_ROWS * FP32_PITCH))
    return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, layout)
