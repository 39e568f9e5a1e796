"""FP8 codes by rows whose blocks have scales: the operands of ragged M products.

    acc[r, n] = sum over blocks b of K of (sum over k in b of a[r, k] * b[n, k]) * a_scale[r, b] * b_scale[n, b]

**Scales.** Those of A are (R, K / 128), one per row, stored with unit stride along rows. Those of the weight are
(E, N / 128, K / 128), one per 128 x 128 elements, stored with unit stride along N. So TMA loads those of a tile with
each stage. The first element of a box must be at a multiple of 16 bytes: otherwise, an H200 stops at an "illegal
instruction". So a box begins up to three scales early: boxes of 132 scales for 128 rows, and a box of 32 scales of the
weight, of which a tile needs one or two.

Run: tests/unit/test_kernels_compile.py, tests/gpu/test_hopper_products.py; ``python -m benchmarks --only fp8``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.sm90.gemm.common import LOAD, Tma
from fusedmoe.kernels.sm90.gemm.scaled import WAVE_VALUES, Staged
from fusedmoe.kernels.sm90.tiles.config import BLOCK_ROWS, SCALE_BLOCK, SCALE_PITCH

BOX_ROWS = 128  # rows whose scales a box has
ROW_SCALES = BOX_ROWS + SCALE_PITCH  # per box
ROW_SPACE = 160  # fp32 values per box: TMA writes at multiples of 128 bytes
WEIGHT_SCALES = 32  # per box


class Scales(NamedTuple):
    """Stages of the scales in shared memory."""

    rows: cute.Tensor  # (ROW_SPACE, boxes, stages)
    weight: cute.Tensor  # (WEIGHT_SCALES, boxes, stages)


class Source(NamedTuple):
    """Where the factors of a thread are."""

    kernel: Any
    scales: Scales
    tile: Any
    n: Any
    group: Any
    row: Any  # the first row of the thread in a box of row scales


def row_boxes(kernel: Any) -> int:
    """Boxes of row scales per stage."""
    return int(kernel.config.tile_m // BOX_ROWS)


def weight_boxes(kernel: Any) -> int:
    """Boxes of the weight's scales per stage: two if a tile has columns of gate and columns of up."""
    return 2 if kernel.paired else 1


def first_weight_scale(kernel: Any, tile: Any, n: Any, part: int) -> Any:
    """The first of a tile's scales among those along N; with ``part`` 1, the first of its columns of up."""
    per_part = kernel.config.tile_n // weight_boxes(kernel) // SCALE_BLOCK
    return part * (n // 2 // SCALE_BLOCK) + tile.column * per_part


@dataclass(frozen=True)
class BlockScaledRows(Staged):
    """FP8 codes by rows (R, K), of a weight (E, N, K) in E4M3, with scales per block."""

    def scale_bytes(self, kernel: Any) -> int:
        return 4 * (ROW_SCALES * row_boxes(kernel) + WEIGHT_SCALES * weight_boxes(kernel))

    def scale_space(self, kernel: Any) -> int:
        return 4 * (ROW_SPACE * row_boxes(kernel) + WEIGHT_SCALES * weight_boxes(kernel))

    # -- host side of a launch

    def fake_scales(self, experts: Any, *extents: Any) -> list[Any]:
        (rows,) = extents
        fake, pitch = cute.runtime.make_fake_tensor, lambda: cute.sym_int64(divisibility=SCALE_PITCH)
        of_rows = fake(Float32, (rows, cute.sym_int()), (1, pitch()), assumed_align=16)
        of_weight = fake(
            Float32, (experts, cute.sym_int(), cute.sym_int()), (pitch(), 1, pitch()), assumed_align=16
        )  # fmt: skip
        return [of_rows, of_weight]

    def scale_loads(self, tensors: Any) -> tuple[Tma, Tma]:
        """The loads of a stage's row scales, and of a box of the weight's scales, (N / 128, K / 128 * E)."""
        of_rows, of_weight = tensors
        experts, wide, deep = of_weight.shape
        layout = cute.make_layout((wide, deep * experts), stride=(1, of_weight.stride[2]))
        of_weight = cute.make_tensor(of_weight.iterator, layout)
        rows, weight = (
            cpasync.make_tiled_tma_atom(LOAD, scales, cute.make_layout((size, 1)), (size, 1))
            for scales, size in ((of_rows, ROW_SCALES), (of_weight, WEIGHT_SCALES))
        )
        return Tma(*rows), Tma(*weight)

    # -- device side

    def shared_scales(self, kernel: Any, smem: SmemAllocator) -> Scales:
        sizes = ((ROW_SPACE, row_boxes(kernel)), (WEIGHT_SCALES, weight_boxes(kernel)))
        return Scales(*[smem.allocate_tensor(Float32, cute.make_layout((*size, kernel.stages)), 128) for size in sizes])

    def scale_copies(self, kernel: Any, loads: Any, scales: Scales, tile: Any, n: Any) -> list[Any]:
        """Atom, shared side by stages, and global side by tiles of K, of each load of a tile's scales."""
        of_rows, of_weight = loads
        boxes = [(of_rows, tile.row + i * BOX_ROWS, 0, scales.rows[None, i, None]) for i in range(row_boxes(kernel))]
        for part in range(weight_boxes(kernel)):
            first = first_weight_scale(kernel, tile, n, part)
            boxes.append((of_weight, first, tile.expert * tile.depth, scales.weight[None, part, None]))
        copies = []
        for (atom, source), first, block, stages in boxes:
            size = ROW_SCALES if atom is of_rows.atom else WEIGHT_SCALES
            aligned = first // SCALE_PITCH * SCALE_PITCH
            g = cute.local_tile(cute.domain_offset((aligned, block), source), (size, 1), (0, None))
            layout = cute.make_layout((size, 1, kernel.stages), stride=(1, 1, stages.stride[1]))
            s = cute.make_tensor(stages.iterator, layout)
            to, of = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
            )
            copies.append((atom, to, of))
        return copies

    # -- mainloop

    def factor_source(self, kernel, scales, tile, group, thread, env) -> Source:
        if kernel.adjacent:  # a box has the rows of one warpgroup
            row = kernel.row_of(thread, 0) + tile.row % SCALE_PITCH
        else:
            row = kernel.block_row(0, group) + kernel.row_of(thread, 0) + tile.row % SCALE_PITCH
        return Source(kernel, scales, tile, env.n, group, row)

    def factors(self, source, i, j, stage):
        """A factor for each of the two rows of a thread."""
        kernel, scales, tile, n, group, row = source
        factors = cute.make_rmem_tensor((2,), Float32)
        part, column = (j, 0) if weight_boxes(kernel) == 2 else (0, j)
        column += first_weight_scale(kernel, tile, n, part) % SCALE_PITCH
        of_weight = scales.weight[column, part, stage]
        for h in range(2):
            at, box = (i * BLOCK_ROWS + row + 8 * h, group) if kernel.adjacent else (row + 8 * h, i)
            factors[h] = scales.rows[at, box, stage] * of_weight
        return factors

    def from_stage(self, factors) -> list[Any]:
        return [factors[0], factors[1]]

    def promote(self, acc, first, wave, factors) -> None:
        for pair in range(WAVE_VALUES // 2):  # two of one row, two of the other
            for v in (2 * pair, 2 * pair + 1):
                acc[first + v] = acc[first + v] + wave[v] * factors[pair % 2]
