"""Ragged M grouped GEMM: rows (R, K), sorted by expert, times the weight of each row's expert (E, N, K).

    acc[r, n] = sum over k of a[r, k] * b[expert of r, n, k]        (fp32)

epilogue/outputs.py turns the accumulators into outputs. common.py describes the warps and the mainloop.

**Clusters.** The two CTAs of a cluster share the weights of two row tiles, or the rows of two column tiles
(scheduler.py). Each CTA loads half of the shared operand, for both. Rows that are not shared are loaded in one piece,
weights that are not shared in two halves.

**Gathered rows.** Row r of A may be row ``gather[r]`` of a matrix (T, K). gather.py copies such rows. A copy cannot
write to both CTAs of a cluster: each CTA copies all rows of its tile. Rows past an expert's last row are zeros.
Nothing is read for them: a copy of a valid row in their place would be read by all column tiles at once.

**Bounds.** A load may run past an expert's last row: those rows of the product are never stored. A store must end at
that row. The TMA descriptor of an output therefore has one dimension more than the tensor, over the same memory:

- A slice has 64 rows. Slice 0 starts 64 rows before the tensor.
- Row ``64 - valid`` of slice ``row + valid`` is row ``row`` of the tensor. A box that starts there has ``valid`` rows
  in the slice.
- The hardware drops its other rows, past the end of the slice.

So one descriptor is enough for all experts.

**Ranges.** A launch for some ranges of the rows may begin beside the launch before it, as that of `RaggedK.beside`. A
number of the launch says so, not the kernel: every launch has the attribute, and one that begins in its turn waits at
its start.

**Signals.** A launch for ranges may count the tiles of each block whose results are in memory, for a kernel that begins
beside it, once all CTAs of this launch have begun. The launch itself begins in its turn. A math warp adds a tile to its
block's counter when its stores are complete. It waits for them where it has waited long already: before the stores of
its next tile, with ping-pong tiles before its turn.

**Gated activations** need the gate and the up value of an output in one thread. If the weight is ``[gate | up]``, a
tile of B is half gate rows, half up rows, loaded by one descriptor. Columns j and j + tile_n / 2 of the accumulators
then form a pair. If gate and up alternate, adjacent columns do.

| warps | role | takes a tile from the ring | other barriers |
|---|---|---|---|
| 0 to 3, 4 to 7 | math warpgroups: products and epilogue | yes | see the table of common.py |
| 8 | loads A and B, and their scales if stages have some | yes | stages of A and B: waits for empty, arrives at full |
| 9 | scheduler | fills it | `scheduler.Drawing` |
| 10, 11 | load the inputs of the epilogue, for one math warpgroup each | yes | the ring of that warpgroup's inputs |
| 10, 11 or 12 to 15 | gather rows of A | yes | stages of A and B: all their lanes arrive, after their copies |

Run: tests/unit/test_kernels_compile.py, tests/gpu/test_hopper_products.py;
``python -m benchmarks --only tiles``.

Axes: M rows of a tile, N columns, K contraction, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from fusedmoe.kernels.device.gather import CHUNK_BYTES, COPY_ROWS, Gathered, chunk, copy_rows, own_row, spread
from fusedmoe.kernels.device.warps import LANES
from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, Arguments, Block, Epilogue, Numbers
from fusedmoe.kernels.sm90.gemm import scheduler
from fusedmoe.kernels.sm90.gemm.arguments import BESIDE, RaggedMArguments
from fusedmoe.kernels.sm90.gemm.common import (  # fmt: skip
    EPILOGUE_LOAD_WARP,
    LOAD,
    LOAD_WARP,
    PRODUCER,
    SCHEDULER_WARP,
    SHARED_LOAD,
    Copies,
    Gemm,
    Tma,
)
from fusedmoe.kernels.sm90.tiles import legal
from fusedmoe.kernels.sm90.tiles.config import ALIGNMENT_BYTES, BLOCK_ROWS, EPILOGUE_COLUMNS, SWIZZLE_BYTES


class Gathering(NamedTuple):
    """A lane's view of the gathered rows, see `RaggedM.gathering`."""

    index: cute.Tensor
    operand: Int64  # address of the matrix
    pitch: Int32  # bytes between rows
    k: Int32
    first: Int32  # first row of the warp's share of a tile
    lane: Int32
    stages: Int32  # address of the share in shared memory, in the first stage


class Loads(NamedTuple):
    """Loads of the operands: A for one CTA, and A and B for both CTAs of a cluster; or gathered rows in place of A."""

    whole_a: Tma | None
    shared_a: Tma | None
    shared_b: Tma
    gathered: Gathered | None
    scales: Any = None  # of rows and of the weight, if they have scales: loads of those of blocks, or one per expert


@dataclass(frozen=True)
class RaggedM(Gemm):
    """A ragged M kernel."""

    b_major: str = "k"  # or "n": the axis of the weight that has unit stride
    epilogue: Epilogue = PLAIN
    gather: bool = False  # whether the rows of A are read through an index
    ranges: bool = False  # whether ``offsets`` has ranges of rows, see `scheduler.expert_rows`
    signals: bool = False  # whether the tiles of each block of ranges are counted

    def __post_init__(self) -> None:
        formula = self.epilogue.formula
        needs = legal.RaggedMNeeds(
            scaled=self.operands.scaled, b_major=self.b_major, halves=self.paired, reads=self.boxes_read > 0,
            gather=self.gather, blocks=self.adjacent, formula=formula.name, interleaved=formula.interleaved,
        )  # fmt: skip
        legal.check(self.config, needs)
        if self.signals and not (self.ranges and self.epilogue == PLAIN):
            raise ValueError(
                f"signals: expected ranges, without an activation, got ranges={self.ranges}, {self.epilogue.name!r}"
            )

    @property
    def symbol(self) -> str:
        gather = "_gather" if self.gather else ""
        ranges = ("_ranges" if self.ranges else "") + ("_signals" if self.signals else "")
        name = f"{self.operands.dtype}_b{self.b_major}_{self.epilogue.name}_{self.config.name}{self.operands.suffix}"
        return f"sm90_ragged_m{gather}{ranges}_{name}"

    @property
    def paired(self) -> bool:
        """Whether a tile of B is half gate rows, half up rows."""
        return self.epilogue.formula.paired

    @property
    def box_element(self) -> Any:
        return Float32 if self.epilogue.fp32 else self.operands.value_element

    @property
    def boxes_read(self) -> int:
        return self.epilogue.formula.boxes_read

    @property
    def gathered_bytes(self) -> int:
        return self.config.tile_m * SWIZZLE_BYTES if self.gather else 0

    @property
    def gather_warps(self) -> int:
        return legal.gather_warps(self.config) if self.gather else 0

    @property
    def steps(self) -> int:
        """Steps of the epilogue per block of 64 rows."""
        return self.config.tile_n // self.epilogue.formula.accumulators // EPILOGUE_COLUMNS

    @property
    def boxes_per_block(self) -> int:
        return self.epilogue.boxes_of(self.steps)

    @property
    def rounds(self) -> bool:
        """Whether an activation is that of the rounded preactivation, so that backward can recompute it."""
        return self.operands.scaled

    @property
    def blocks(self) -> Any:
        """The `BlockOutput`, or None."""
        return self.epilogue.blocks

    @property
    def adjacent(self) -> bool:
        return self.blocks is not None

    @property
    def crowded(self) -> bool:
        return self.adjacent or (self.boxes_read > 0 and self.config.tile_n > 160)

    @property
    def tile_kind(self) -> type:
        if self.signals:
            return scheduler.TileWithCounter
        of_blocks = self.blocks is not None and self.blocks.places_blocks(self.epilogue.formula)
        return scheduler.TileWithBlock if of_blocks else scheduler.Tile

    @property
    def may_begin_early(self) -> bool:
        """Whether a number of the launch says if it begins beside the launch before it."""
        return self.ranges and not self.signals

    @property
    def store_stages(self) -> int:
        return super().store_stages if self.blocks is None else self.blocks.buffers

    # -- compile

    def compile(self) -> Any:
        """Compile without a GPU; the arguments are those of ``__call__``, without the stream."""
        rows, experts = cute.sym_int(), cute.sym_int()
        fake, operands = cute.runtime.make_fake_tensor, self.operands
        pitch = lambda: cute.sym_int64(divisibility=operands.alignment)  # noqa: E731
        strides = (pitch(), pitch(), 1) if self.b_major == "k" else (pitch(), 1, pitch())
        b = fake(operands.stored_element, (experts, cute.sym_int(), cute.sym_int()), strides, assumed_align=16)
        bias = fake(operands.value_element, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
        offsets, row_scale, counter = (
            fake(dtype, (n,), (1,))
            for dtype, n in ((Int32, cute.sym_int() if self.ranges else experts), (Float32, cute.sym_int()), (Int32, 1))
        )
        tokens = cute.sym_int() if self.gather else rows
        index = [fake(Int32, (rows,), (1,))] if self.gather else []
        scales = operands.fake_scales(experts, tokens) if operands.scaled else []
        inputs = [self.fake_matrix(rows, operands.value_element)] if self.boxes_read else []
        outputs = [tensor for output in self.epilogue.outputs for tensor in output.fake(self, rows)]
        return cute.compile(
            self, *RaggedMArguments(
                self.fake_matrix(tokens), b, offsets, bias, row_scale, counter, *[Float32(0)] * 3, *[Int32(0)] * 6
            ),
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), *scales, *index, *inputs, *outputs,
            options=f"--enable-tvm-ffi --gpu-arch {self.arch}",
        )  # fmt: skip

    def fake_matrix(self, rows: Any, element: Any = None) -> Any:
        """A matrix with this number of rows, for the compiler; of the operands' type, unless ``element`` is given."""
        element = element or self.operands.stored_element
        pitch = cute.sym_int64(divisibility=ALIGNMENT_BYTES * 8 // element.width)
        return cute.runtime.make_fake_tensor(element, (rows, cute.sym_int()), (pitch, 1), assumed_align=16)

    # -- host side of a launch

    @cute.jit
    def __call__(
        self, a, b, offsets, bias, row_scale, counter,
        limit, alpha, offset, biased, scaled, zero_tail, band, ctas, dynamic, stream, *tensors,
    ):  # fmt: skip
        """Launch. ``tensors`` are the scales of a and b, if their blocks have scales; the index, if rows are gathered;
        the input of the epilogue's formula, if it has one; and then its outputs.
        """
        config, operands, formula, scales = self.config, self.operands, self.epilogue.formula, None
        if const_expr(operands.scaled):
            a, b = cute.recast_tensor(a, operands.element), cute.recast_tensor(b, operands.b_element)
            scales, tensors = tuple(tensors[:2]), tensors[2:]
            if const_expr(operands.staged):
                scales = operands.scale_loads(scales)
        major = OperandMajorMode.K if self.b_major == "k" else OperandMajorMode.MN
        layouts = self.layouts(OperandMajorMode.K, major)

        # The weight as (N, K, E). For a gated activation N is (I, 2): the rows of gate, then those of up. If N has unit
        # stride, the weight is (I, K, 2, E), because a load covers one swizzle's width of N.
        experts, n, k = b.shape
        se, sn, sk = b.stride
        tile_n, layout = config.tile_n, cute.make_layout((n, k, experts), stride=(sn, sk, se))
        if const_expr(self.paired):
            tile_n, up = (config.tile_n // 2, 2), (n // 2) * sn  # type: ignore[assignment]
            layout = cute.make_layout(((n // 2, 2), k, experts), stride=((sn, up), sk, se))
            if const_expr(self.b_major == "n"):
                layout = cute.make_layout((n // 2, k, 2, experts), stride=(sn, sk, up, se))
        b_view = cute.make_tensor(b.iterator, layout)

        whole_a, shared_a, gathered, rows = None, None, None, a.shape[0]
        if const_expr(self.gather):
            gathered, rows, tensors = Gathered(a, tensors[0]), tensors[0].shape[0], tensors[1:]
        else:
            a_box, a_tile = cute.slice_(layouts.a, (None, None, 0)), (config.tile_m, operands.tile_k)
            whole_a, shared_a = (
                Tma(*cpasync.make_tiled_tma_atom(op, a, a_box, a_tile, num_multicast=ctas))
                for op, ctas in ((LOAD, 1), (SHARED_LOAD, config.ctas))
            )
        if const_expr(self.b_major == "n"):
            shared_b = self.across_atom(b_view, layouts.b, config.ctas)
        else:
            b_box, b_tile = cute.slice_(layouts.b, (None, None, 0)), (tile_n, operands.tile_k)
            shared_b = Tma(*cpasync.make_tiled_tma_atom(SHARED_LOAD, b_view, b_box, b_tile, num_multicast=config.ctas))
        inputs = None
        if const_expr(self.boxes_read > 0):
            view, box = self.in_parts(tensors[0], formula.parts), cute.slice_(layouts.boxes, (None, None, 0))
            inputs = Tma(*cpasync.make_tiled_tma_atom(LOAD, view, box, (BLOCK_ROWS, EPILOGUE_COLUMNS)))
        results = iter(tensors[1 if self.boxes_read else 0 :])
        parameters = tuple(
            output.parameter(self, *[next(results) for _ in range(output.tensors)]) for output in self.epilogue.outputs
        )
        self.kernel(
            Loads(whole_a, shared_a, shared_b, gathered, scales), inputs, parameters,
            self.tiled_mma(OperandMajorMode.K, major), layouts, offsets, bias, row_scale, counter,
            Numbers(limit, alpha, offset, biased, scaled, zero_tail, band, dynamic), rows, n, k, experts,
        ).launch(stream=stream, use_pdl=self.may_begin_early, **self.grid(ctas))  # fmt: skip

    def in_parts(self, t: cute.Tensor, count: int) -> cute.Tensor:
        """(R, count * W) as (R, W, count)."""
        width = t.shape[1] // count
        return cute.make_tensor(
            t.iterator, cute.make_layout((t.shape[0], width, count), stride=(t.stride[0], 1, width))
        )

    def store_atom(self, t: cute.Tensor, parts: int) -> Any:
        """A store by TMA that ends at an expert's last row: (64, W, parts, R + 1), see the module's docstring. For
        stores by threads, the tensor (R, W, parts).
        """
        if self.operands.scaled:
            width = cute.assume(t.shape[1] // parts, divby=128 // self.box_element.width)
            layout = cute.make_layout((t.shape[0], width, parts), stride=(t.stride[0], 1, width))
            return cute.make_tensor(t.iterator, layout)
        box = cute.slice_(self.box_layout(self.boxes), (None, None, 0))
        view = self.in_parts(t, parts)
        pitch = t.stride[0]
        start = cute.domain_offset((-BLOCK_ROWS, 0), t).iterator
        layout = cute.make_layout(
            (BLOCK_ROWS, view.shape[1], parts, t.shape[0] + 1), stride=(pitch, 1, view.stride[2], pitch)
        )
        return Tma(*cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), cute.make_tensor(start, layout), box, (BLOCK_ROWS, EPILOGUE_COLUMNS)
        ))  # fmt: skip

    # -- device side

    @cute.kernel
    def kernel(
        self, loads, inputs, outputs, tiled_mma, layouts, offsets, bias, row_scale, counter, numbers,
        rows, n, k, experts,
    ):  # fmt: skip
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared, rings = self.shared_memory(layouts)
        if const_expr(self.signals):
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.may_begin_early):
            if numbers.dynamic != BESIDE:
                cute.arch.griddepcontrol_wait()
        if warp_idx >= LOAD_WARP:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_idx == LOAD_WARP:
                self.load(loads, shared, rings, n)
            elif warp_idx == SCHEDULER_WARP:
                tile_k = self.operands.tile_k
                k_tiles = (k + tile_k - 1) // tile_k
                share = scheduler.Share(self.config, numbers.band, counter, numbers.dynamic, shared.drawing)
                scheduler.schedule_ragged_m(
                    offsets, self.scheduled_rows(rows, outputs, numbers), self.tiles_n(n), k_tiles, share, rings.tiles,
                    shared.slots, self.tile_kind, experts, self.ranges,
                )  # fmt: skip
                if const_expr(self.may_begin_early):
                    cute.arch.griddepcontrol_wait()  # kernels after this one depend on both
            elif const_expr(self.gather):
                if warp_idx >= self.gather_warp:
                    self.gather_rows(loads.gathered, shared, rings, k, warp_idx - self.gather_warp)
                elif const_expr(self.boxes_read > 0):
                    self.load_inputs(inputs, shared, rings, warp_idx - EPILOGUE_LOAD_WARP)
            elif const_expr(self.blocks is not None):
                self.blocks.load_inputs(self, inputs, shared, rings, warp_idx - EPILOGUE_LOAD_WARP)
            elif const_expr(self.boxes_read > 0):
                self.load_inputs(inputs, shared, rings, warp_idx - EPILOGUE_LOAD_WARP)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            of_experts = None if self.operands.staged else loads.scales
            env = Arguments(outputs, bias, row_scale, numbers, rows, n, of_experts, offsets if self.signals else None)
            self.math(tiled_mma, shared, rings, warp_idx // 4, env)

    def scheduled_rows(self, rows, outputs, numbers):
        """Rows of the tiles of all experts and of the tail; 0 for those of the experts alone."""
        if const_expr(self.blocks is not None):
            rows = self.blocks.scheduled_rows(rows, outputs[-1])
        return cutlass.select_(numbers.zero_tail != 0, Int32(rows), Int32(0))

    @cute.jit
    def load(self, loads, shared, rings, n):
        """The loading warp: A and B of every tile, stage by stage."""
        ab = rings.ab
        rank, _ = scheduler.ranks(self.config)
        alone, both = Int16(1 + rank), Int16(3)
        state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        turn = Int32(0)
        turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        while tile.expert != scheduler.END:
            if tile.depth > 0:
                shares_rows = tile.place != 0
                a = half_a = []
                if const_expr(not self.gather):
                    a = self.loads_a(loads.whole_a, shared.a, tile.row, 0, 1)
                    half_a = self.loads_a(loads.shared_a, shared.a, tile.row, rank, 2)
                half_b, other_b = (self.loads_b(loads.shared_b, shared.b, tile, n, r) for r in (rank, 1 - rank))
                b_to = Int16(cutlass.select_(shares_rows, alone, both))
                scales = []
                if const_expr(self.operands.staged):
                    scales = self.operands.scale_copies(self, loads.scales, shared.scales, tile, n)
                for k_tile in cutlass.range(tile.depth, unroll=1):
                    ab.producer_acquire(state)
                    full = ab.producer_get_barrier(state)
                    for atom, to, source in scales:
                        cute.copy(atom, source[None, k_tile], to[None, state.index], tma_bar_ptr=full)
                    self.copy(loads.shared_b, half_b, k_tile, state.index, full, b_to)
                    if shares_rows:
                        self.copy(loads.shared_b, other_b, k_tile, state.index, full, alone)
                        self.copy(loads.shared_a, half_a, k_tile, state.index, full, both)
                    else:
                        self.copy(loads.whole_a, a, k_tile, state.index, full, None)
                    state.advance()
            turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        ab.producer_tail(state)

    @cute.jit
    def gather_rows(self, gathered, shared, rings, k, share):
        """A gathering warp: its share of the rows of A of every tile, stage by stage."""
        ab, rows = rings.ab, self.gathering(gathered, shared, k, share)
        count = self.config.tile_m // self.gather_warps
        own = cute.make_rmem_tensor((count // LANES,), Int32)
        indices = cute.make_rmem_tensor((count // COPY_ROWS,), Int32)
        state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        turn = Int32(0)
        turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        while tile.expert != scheduler.END:
            self.read_indices(own, rows, tile)
            spread(indices, own)
            partial = rows.first + count > tile.rows
            for k_tile in cutlass.range(tile.depth, unroll=1):
                ab.sync_object_empty.wait(state.index, state.phase)
                if partial:
                    self.copy_gathered(indices, rows, k_tile, state.index, checked=True)
                else:
                    self.copy_gathered(indices, rows, k_tile, state.index, checked=False)
                cute.arch.cp_async_mbarrier_arrive_noinc(ab.producer_get_barrier(state))
                state.advance()
            turn, tile = scheduler.take(rings.tiles, turn, shared.slots)

    def gathering(self, gathered, shared, k, share):
        """What a lane of a gathering warp needs to copy its share of the rows of A."""
        count, lane, matrix = self.config.tile_m // self.gather_warps, cute.arch.lane_idx(), gathered.matrix
        value_bytes = self.operands.element.width // 8
        return Gathering(
            gathered.index,
            matrix.iterator.toint(),
            Int32(matrix.stride[0] * value_bytes),
            k,
            share * count,
            lane,
            shared.a.iterator.toint() + share * (count * SWIZZLE_BYTES),
        )

    @cute.jit
    def read_indices(self, own, rows, tile):
        """Read the indices of a tile's rows: -1 past the expert's last row, and in the tail."""
        valid = cutlass.select_(tile.depth > 0, tile.rows, Int32(0))
        for q in cutlass.range_constexpr(cute.size(own)):
            row = rows.first + q * LANES + own_row(rows.lane)
            own[q] = -1
            if row < valid:
                own[q] = rows.index[tile.row + row]

    def copy_gathered(self, indices, rows, k_tile, stage, checked):
        """Start the copies of one stage of a tile's rows."""
        value_bytes = self.operands.element.width // 8
        column = k_tile * self.operands.tile_k + chunk(rows.lane) * (CHUNK_BYTES // value_bytes)
        operand, left = rows.operand + column * value_bytes, (rows.k - column) * value_bytes
        place = rows.stages + stage * self.gathered_bytes
        copy_rows(indices, operand, rows.pitch, left, place, rows.lane, checked=checked)

    def copy(self, load, pairs, k_tile, stage, full, mask):
        """Start an operand's loads of a stage. ``mask``: the CTAs that receive them, or None for this CTA alone."""
        for to, source in pairs:
            cute.copy(load.atom, source[None, k_tile], to[None, stage], tma_bar_ptr=full, mcast_mask=mask)

    def loads_a(self, load, s_a, row, part, parts: int):
        """Shared and global sides of the loads of a part of a tile of A."""
        tile = (self.config.tile_m, self.operands.tile_k)
        g_a = cute.local_tile(cute.domain_offset((row, 0), load.tensor), tile, (0, None))
        s_a, g_a = cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2)
        return [cpasync.tma_partition(load.atom, part, cute.make_layout(parts), s_a, g_a)]

    def loads_b(self, load, s_b, tile, n, part):
        """Shared and global sides of the loads of a half of a tile of B."""
        (tma, view), config, column = load, self.config, tile.column
        if self.b_major == "n" and self.paired:
            halves = [view[None, None, half, tile.expert] for half in range(2)]
            return [
                pair
                for i, half in enumerate(halves)
                for pair in self.across(tma, half, s_b, config.tile_n // 2, column, n // 2, part, config.ctas, i)
            ]
        weight = view[None, None, tile.expert]
        if self.b_major == "n":
            return self.across(tma, weight, s_b, config.tile_n, column, n, part, config.ctas)
        # a tile past the last column loads the last one instead, see `across`; its results are not stored
        at = cutlass.min(column, self.tiles_n(n) - 1)
        tile_n, at = ((config.tile_n // 2, 2), (at, 0)) if self.paired else (config.tile_n, at)
        g_b = cute.group_modes(cute.local_tile(weight, (tile_n, self.operands.tile_k), (at, None)), 0, 2)
        return [cpasync.tma_partition(tma, part, cute.make_layout(config.ctas), cute.group_modes(s_b, 0, 2), g_b)]

    def tiles_n(self, n):
        """Number of column tiles."""
        width, tile = (n // 2, self.config.tile_n // 2) if self.paired else (n, self.config.tile_n)
        return (width + tile - 1) // tile

    @cute.jit
    def load_inputs(self, load, shared, rings, group):
        """A warp that loads the formula's input for one math warpgroup, box by box in the order of its epilogue."""
        config = self.config
        state = pipeline.make_pipeline_state(PRODUCER, self.load_stages)
        turn = Int32(0)
        turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        while tile.expert != scheduler.END:
            mine = tile.depth > 0
            if const_expr(config.pingpong):
                mine = mine and turn % 2 != group  # `turn` is that of the next tile
            if mine:
                for i in cutlass.range_constexpr(config.blocks):
                    shift = self.block_row(i, group)
                    if shift < tile.rows:
                        view = cute.domain_offset((tile.row + shift, 0, 0), load.tensor)
                        for j in cutlass.range(self.steps, unroll=1):
                            column = tile.column * self.steps + j
                            self.load_step(Tma(load.atom, view), shared.boxes, rings.inputs, state, column, group)
                            state.advance()
            turn, tile = scheduler.take(rings.tiles, turn, shared.slots)

    def load_step(self, rows, boxes, ring, state, column, group):
        """Load the boxes of one step of the first 64 of some ``rows``. ``column`` counts steps over all columns."""
        here = self.own(state, group)
        ring.producer_acquire(here)
        for half in range(self.boxes_read):
            part, at = self.epilogue.formula.box_of(half, column)
            g_p = cute.local_tile(rows.tensor[None, None, part], (BLOCK_ROWS, EPILOGUE_COLUMNS), (0, at))
            to_s, from_g = cpasync.tma_partition(
                rows.atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(g_p, 0, 2)
            )
            cute.copy(
                rows.atom, from_g, to_s[None, self.read_box(here.index, half)],
                tma_bar_ptr=ring.producer_get_barrier(here),
            )  # fmt: skip

    def finish(self, acc, tile, consumer, inputs, env):
        if self.blocks is not None:
            return self.blocks.finish_tile(self, acc, tile, consumer, inputs, env)
        return self.finish_tile(acc, tile, consumer, inputs, env)

    @cute.jit
    def finish_tile(self, acc, tile, consumer, inputs, env):
        """Accumulators to results, 64 rows at a time."""
        for i in cutlass.range_constexpr(self.config.blocks):
            shift = self.block_row(i, consumer.group)
            if shift < tile.rows:
                lane, warp_row = consumer.thread % 32, consumer.thread // 32 * 16
                top, valid = tile.row + shift, cutlass.min(tile.rows - shift, BLOCK_ROWS)
                base = i * (self.config.tile_n // 2)
                block = Block(acc, base, consumer, tile, top, valid, lane, warp_row, tile.depth > 0)
                formula = self.epilogue.formula
                if const_expr(formula.kind == ""):
                    # Without an activation, mainloops may be too short to hide the epilogue: short code for most calls.
                    if env.numbers.biased + env.numbers.scaled == 0:
                        self.finish_block(block, inputs, env, replace(formula, scaled=False, biased=False))
                    else:
                        self.finish_block(block, inputs, env, formula)
                else:
                    inputs = self.finish_block(block, inputs, env, formula)
        return inputs

    def finish_block(self, block, inputs, env, formula):
        """Accumulators of 64 rows to results, 32 columns at a time."""
        outputs = self.epilogue.outputs
        block = block._replace(scales=formula.row_scales(block, env))
        states = [output.start() for output in outputs]
        count = 0  # boxes stored
        for j in range(self.steps):
            column = block.tile.column * self.steps + j
            values = formula.values(self, block, env, j, column, inputs)
            states = [output.add(state, values) for output, state in zip(outputs, states, strict=True)]
            before = count
            for output, parameter, state in zip(outputs, env.outputs, states, strict=True):
                for box in output.stores(self, block, values, column, parameter, state):
                    self.store(box, block, count, output.target(parameter))
                    if self.boxes_read and count == before:
                        inputs = self.release(block, inputs)
                    count += 1
        for output, parameter, state in zip(outputs, env.outputs, states, strict=True):
            output.finish(self, block, env, parameter, state)
        return inputs

    @cute.jit
    def release(self, block, inputs):
        """Release a step's boxes to their loader, after the proxy fence of the first box stored, and the barrier or the
        synchronisation of the warp that follows it.

        The loader writes them by TMA, through another proxy than the reads. Without a fence in between, pending reads
        may return the next box. This happened with interleaved boxes that were released as soon as they were read, in
        CTAs with several tiles.
        """
        if block.live:
            ring = block.consumer.inputs
            ring.consumer_release(self.own(inputs, block.consumer.group))
            inputs.advance()
        return inputs

    def store(self, box, block, count, to):
        """Store the valid rows of a box from row ``block.top`` of an output; see the module's docstring."""
        if self.operands.scaled:
            self.operands.store(self, box, block, count, to)
            return
        rows = to.tensor[None, None, box.part, block.top + block.valid]
        here = cute.domain_offset((BLOCK_ROWS - block.valid, 0), rows)
        target = cute.local_tile(here, (BLOCK_ROWS, EPILOGUE_COLUMNS), (0, box.column))
        copies = block.consumer.copies
        copy = copies.pairs if box.paired else copies.store
        self.put_box(box.values, block.consumer, copy, count, to, target, box.columns)

    def box_copies(self, thread) -> Copies:
        copies = super().box_copies(thread)
        if not (self.epilogue.formula.interleaved and self.boxes_read):
            return copies
        # Interleaved boxes of gate and up: a thread copies its accumulators' values, four adjacent columns at a time.
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.operands.value_element, num_bits_per_copy=64)
        rows = BLOCK_ROWS
        places = cute.make_layout(((4, 8, 4), (4, 2, 2)), stride=((4 * rows, 1, 16), (rows, 8, 16 * rows)))
        pairs = cute.make_tiled_copy(atom, places, (rows, EPILOGUE_COLUMNS)).get_slice(thread)
        return copies._replace(pairs=pairs)
