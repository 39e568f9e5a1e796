"""Grouped matrix product over ragged rows: rows (R, K), sorted by expert, times each expert's weight (E, N, K).

    acc[r, n] = sum over k of a[r, k] * b[expert of r, n, k]        (fp32)

and an epilogue on the accumulators:

    plain        out = (acc + bias) * row_scale
    activation   p = acc + bias (written where backward needs it), out = act(p) * row_scale
    derivative   for acc, the gradient of act(p) * row_scale: grad_p, act(p) * row_scale, and per row the sum of
                 acc * act(p) over the tile's columns, which another launch sums over tiles

Clusters. Two CTAs share the weights of two row tiles, or the rows of two column tiles, as tiles.py has it: each loads
half of what they share, for both. What is a CTA's own comes whole (rows), or as both halves (weights).

Warps. Math warpgroups 0 and 1; warpgroup 2 has the loaders, which give their registers away: warp 8 loads A and B by
TMA, warp 9 schedules tiles (tiles.py), warps 10 and 11 load what the epilogue of warpgroup 0 and 1 reads, under the
main loop.

Ragged rows. A load may run past an expert's last row: those rows of the product are never stored. A store must stop
there: each expert's end is a bound of the output's TMA descriptor, which has one dimension more than the tensor. Its
rows are only 64 long and start 64 rows before the tensor; a box that starts at row ``64 - valid`` of the slice ``row +
valid`` begins at ``row`` in memory, and the hardware drops what lies past row 64 of the slice. So one descriptor
serves all experts.

Gated activations read gate and up of one output from one thread: where the weight is ``[gate | up]``, a tile of B is
half gate rows, half up rows (one descriptor), and accumulators j and j + tile_n / 2 belong together.
Where gate and up alternate they are neighbouring accumulators.

Axes: M rows of a tile, N columns, K contraction, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int16, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from fusedmoe.kernels.sm90 import epilogues, tiles
from fusedmoe.kernels.sm90.config import BLOCK_ROWS, EPILOGUE_COLUMNS, TILE_K
from fusedmoe.kernels.sm90.gemm import (
    ACROSS,
    EPILOGUE_LOAD_WARP,
    LOAD,
    LOAD_WARP,
    PRODUCER,
    SCHEDULER_WARP,
    SHARED_LOAD,
    VALUES,
    Gemm,
)  # fmt: skip


@dataclass(frozen=True)
class Epilogue:
    """What becomes of the accumulators, as far as it changes the code.

    ``act`` is an `Activation.kind` or "" for none; ``derivative`` tells act from its backward.
    """

    act: str = ""
    derivative: bool = False
    clamped: bool = False
    interleaved: bool = False
    keep: bool = False  # also write: the preactivation; of the derivative: the recomputed activation
    row_scale: bool = False  # of the derivative: there is a row scale, and its gradient is wanted

    @property
    def gated(self) -> bool:
        return self.act not in ("", "squared_relu")

    @property
    def name(self) -> str:
        flags = (
            (self.derivative, "d"), (True, self.act or "plain"), (self.clamped, "_clamp"), (self.interleaved, "_inter"),
            (self.row_scale, "_scale"), (self.keep, "_keep"),
        )  # fmt: skip
        return "".join(text for on, text in flags if on)


@dataclass(frozen=True)
class RaggedM(Gemm):
    """One kernel of this page."""

    b_major: str = "k"  # or "n": which axis of the weight has unit stride
    epilogue: Epilogue = Epilogue()

    def __post_init__(self) -> None:
        if (self.config.cluster_m, self.config.cluster_n) != (2, 1):
            raise ValueError(f"ragged rows: expected a cluster of two row tiles, got {self.config.name}")
        if self.paired and self.b_major == "n" and self.config.tile_n % (2 * ACROSS):
            raise ValueError(f"halves of a tile come {ACROSS} columns at a time, got {self.config.name}")

    @property
    def symbol(self) -> str:
        return f"sm90_ragged_m_{self.dtype}_b{self.b_major}_{self.epilogue.name}_{self.config.name}"

    @property
    def sources(self) -> tuple[str, ...]:
        names = ("ragged_m", "gemm", "tiles", "epilogues", "config")
        return tuple(f"fusedmoe.kernels.sm90.{name}" for name in names)

    @property
    def paired(self) -> bool:
        """A tile of B is half gate rows, half up rows."""
        return self.epilogue.gated and not self.epilogue.derivative and not self.epilogue.interleaved

    @property
    def boxes_read(self) -> int:
        return (2 if self.epilogue.gated else 1) if self.epilogue.derivative else 0

    @property
    def steps(self) -> int:
        """Steps of the epilogue over a block of 64 rows."""
        two_for_one = self.epilogue.gated and not self.epilogue.derivative
        return self.config.tile_n // (2 if two_for_one else 1) // EPILOGUE_COLUMNS

    @property
    def boxes_a_block(self) -> int:
        e = self.epilogue
        halves = 2 if e.gated else 1
        if e.derivative:
            return self.steps * (halves + e.keep)
        return self.steps * (1 + (halves if e.keep and e.act else 0))

    # -- compile

    def compile(self) -> Any:
        """Compile without a GPU; a function of torch tensors and numbers, to be called as `functions.py` does."""
        e = self.epilogue
        index64 = lambda: cute.sym_int64(divisibility=8)  # noqa: E731
        rows, experts = cute.sym_int(), cute.sym_int()
        fake = cute.runtime.make_fake_tensor

        def matrix(dtype: Any = self.element, rows: Any = rows) -> Any:
            return fake(dtype, (rows, cute.sym_int()), (index64(), 1), assumed_align=16)

        strides = (index64(), index64(), 1) if self.b_major == "k" else (index64(), 1, index64())
        b = fake(self.element, (experts, cute.sym_int(), cute.sym_int()), strides, assumed_align=16)
        vector = lambda dtype, n: fake(dtype, (n,), (1,))  # noqa: E731
        bias = fake(self.element, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
        partial = fake(Float32, (cute.sym_int(), rows), (cute.sym_int(), 1)) if e.row_scale else None
        p = matrix() if e.derivative or (e.act and e.keep) else None
        second = matrix() if e.derivative and e.keep else None
        return cute.compile(
            self, matrix(), b, vector(Int32, experts), matrix(), p, second, bias, vector(Float32, cute.sym_int()),
            partial, vector(Int32, 1), Float32(0), Float32(0), Float32(0), Int32(0), Int32(0), Int32(0), Int32(0),
            Int32(0), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {self.arch}",
        )  # fmt: skip

    # -- host side of a launch

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        offsets: cute.Tensor,
        out: cute.Tensor,
        p: cute.Tensor | None,
        second: cute.Tensor | None,
        bias: cute.Tensor,
        row_scale: cute.Tensor,
        partial: cute.Tensor | None,
        counter: cute.Tensor,
        limit: Float32,
        alpha: Float32,
        offset: Float32,
        biased: Int32,
        scaled: Int32,
        band: Int32,
        ctas: Int32,
        dynamic: Int32,
        stream,
    ):
        e, config = self.epilogue, self.config
        major = OperandMajorMode.K if self.b_major == "k" else OperandMajorMode.MN
        tiled_mma = self.tiled_mma(OperandMajorMode.K, major)
        a_smem = self.smem_layout((config.tile_m, TILE_K), OperandMajorMode.K, self.stages)
        b_smem = self.smem_layout((config.tile_n, TILE_K), major, self.stages)
        box_smem = self.box_layout(self.boxes)

        # weights as (N, K, E); for a gated activation the rows of gate, then those of up: N is (I, 2) or, where it has
        # unit stride and comes 64 columns at a time, (I, K, 2, E)
        experts, n, k = b.shape
        se, sn, sk = b.stride
        tile_n, layout = config.tile_n, cute.make_layout((n, k, experts), stride=(sn, sk, se))
        if const_expr(self.paired):
            tile_n, up = (config.tile_n // 2, 2), (n // 2) * sn  # type: ignore[assignment]
            layout = cute.make_layout(((n // 2, 2), k, experts), stride=((sn, up), sk, se))
            if const_expr(self.b_major == "n"):
                layout = cute.make_layout((n // 2, k, 2, experts), stride=(sn, sk, up, se))
        b_view = cute.make_tensor(b.iterator, layout)

        a_box, a_tile = cute.slice_(a_smem, (None, None, 0)), (config.tile_m, TILE_K)
        whole_a, shared_a = (
            cpasync.make_tiled_tma_atom(op, a, a_box, a_tile, num_multicast=ctas)
            for op, ctas in ((LOAD, 1), (SHARED_LOAD, config.ctas))
        )
        if const_expr(self.b_major == "n"):
            shared_b = self.across_atom(b_view, b_smem, config.ctas)
        else:
            b_box = cute.slice_(b_smem, (None, None, 0))
            shared_b = cpasync.make_tiled_tma_atom(
                SHARED_LOAD, b_view, b_box, (tile_n, TILE_K), num_multicast=config.ctas
            )
        box = cute.slice_(box_smem, (None, None, 0))
        halves = 2 if e.gated and not e.interleaved else 1
        # derivative: `out` is grad_p, two halves; `second` the activation. Else `p` has the halves, `out` the
        # activation
        tma_out, out_tma = self.store_atom(out, halves if e.derivative else 1, box)
        tma_p, p_tma = None, None
        if const_expr(e.derivative):
            p_view = self.halves(p, halves)
            tma_p, p_tma = cpasync.make_tiled_tma_atom(LOAD, p_view, box, (BLOCK_ROWS, EPILOGUE_COLUMNS))
        elif const_expr(p is not None):
            tma_p, p_tma = self.store_atom(p, halves, box)
        tma_second, second_tma = None, None
        if const_expr(second is not None):
            tma_second, second_tma = self.store_atom(second, 1, box)

        self.kernel(
            *whole_a,
            *shared_a,
            *shared_b,
            tma_out,
            out_tma,
            tma_p,
            p_tma,
            tma_second,
            second_tma,
            tiled_mma,
            a_smem,
            b_smem,
            box_smem,
            offsets,
            bias,
            row_scale,
            partial,
            counter,
            limit,
            alpha,
            offset,
            biased,
            scaled,
            band,
            dynamic,
            a.shape[0],
            n,
            k,
        ).launch(stream=stream, **self.grid(ctas))

    def halves(self, t: cute.Tensor, count: int) -> cute.Tensor:
        """(R, count * W) as (R, W, count)."""
        width = t.shape[1] // count
        return cute.make_tensor(
            t.iterator, cute.make_layout((t.shape[0], width, count), stride=(t.stride[0], 1, width))
        )

    def store_atom(self, t: cute.Tensor, count: int, box: Any) -> Any:
        """A store whose rows end where a slice says: (64, W, count, R + 1), see the module's page."""
        view = self.halves(t, count)
        pitch = t.stride[0]
        start = cute.domain_offset((-BLOCK_ROWS, 0), t).iterator
        layout = cute.make_layout(
            (BLOCK_ROWS, view.shape[1], count, t.shape[0] + 1), stride=(pitch, 1, view.stride[2], pitch)
        )
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), cute.make_tensor(start, layout), box, (BLOCK_ROWS, EPILOGUE_COLUMNS)
        )

    # -- device side

    @cute.kernel
    def kernel(
        self,
        tma_whole_a: cute.CopyAtom,
        whole_a_tma: cute.Tensor,
        tma_shared_a: cute.CopyAtom,
        shared_a_tma: cute.Tensor,
        tma_shared_b: cute.CopyAtom,
        shared_b_tma: cute.Tensor,
        tma_out: cute.CopyAtom,
        out_tma: cute.Tensor,
        tma_p: cute.CopyAtom | None,
        p_tma: cute.Tensor | None,
        tma_second: cute.CopyAtom | None,
        second_tma: cute.Tensor | None,
        tiled_mma: cute.TiledMma,
        a_smem: cute.ComposedLayout,
        b_smem: cute.ComposedLayout,
        box_smem: cute.ComposedLayout,
        offsets: cute.Tensor,
        bias: cute.Tensor,
        row_scale: cute.Tensor,
        partial: cute.Tensor | None,
        counter: cute.Tensor,
        limit: Float32,
        alpha: Float32,
        offset: Float32,
        biased: Int32,
        scaled: Int32,
        band: Int32,
        dynamic: Int32,
        rows: Int32,
        n: Int32,
        k: Int32,
    ):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared, rings = self.shared_memory(a_smem, b_smem, box_smem)
        if warp_idx >= LOAD_WARP:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_idx == LOAD_WARP:
                whole_a, shared_a = (tma_whole_a, whole_a_tma), (tma_shared_a, shared_a_tma)
                self.load(whole_a, shared_a, (tma_shared_b, shared_b_tma), shared, rings, n)
            elif warp_idx == SCHEDULER_WARP:
                k_tiles = (k + TILE_K - 1) // TILE_K
                share = tiles.Share(self.config, band, counter, dynamic, shared[4])
                tiles.schedule_ragged_m(offsets, rows, self.tiles_n(n), k_tiles, share, rings[1], shared[3])
            elif const_expr(self.boxes_read > 0):
                self.load_boxes(tma_p, p_tma, shared, rings, warp_idx - EPILOGUE_LOAD_WARP)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            env = SimpleNamespace(
                out=(tma_out, out_tma), p=(tma_p, p_tma), second=(tma_second, second_tma), bias=bias,
                row_scale=row_scale, partial=partial, constants=(limit, alpha, offset), rows=rows, n=n,
                biased=biased, scaled=scaled,
            )  # fmt: skip
            self.math(tiled_mma, shared, rings, warp_idx // 4, env)

    @cute.jit
    def load(self, whole_a, shared_a, shared_b, shared, rings, n):
        """The loading warp: A and B of every tile, stage by stage. Each CTA loads half of what the cluster shares, for
        both.
        """
        s_a, s_b, _, slots, _ = shared
        ab, ring, _ = rings
        rank, _ = tiles.ranks(self.config)
        alone, both = Int16(1 + rank), Int16(3)
        ab_state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        turn = Int32(0)
        turn, slot = tiles.take(ring, turn, slots)
        expert, row, column, shares_rows, depth = slot[0], slot[1], slot[3], slot[4] != 0, slot[5]
        while expert != tiles.END:
            if depth > 0:
                a = self.loads_a(whole_a, s_a, row, 0, 1)
                half_a = self.loads_a(shared_a, s_a, row, rank, 2)
                half_b, other_b = (self.loads_b(shared_b, s_b, expert, column, n, r) for r in (rank, 1 - rank))
                b_to = Int16(cutlass.select_(shares_rows, alone, both))
                for k_tile in cutlass.range(depth, unroll=1):
                    to = self.next_stage(ab, ab_state, k_tile)
                    self.copy(shared_b, half_b, to, b_to)
                    if shares_rows:
                        self.copy(shared_b, other_b, to, alone)
                        self.copy(shared_a, half_a, to, both)
                    else:
                        self.copy(whole_a, a, to, None)
                    ab_state.advance()
            turn, slot = tiles.take(ring, turn, slots)
            expert, row, column, shares_rows, depth = slot[0], slot[1], slot[3], slot[4] != 0, slot[5]
        ab.producer_tail(ab_state)

    def next_stage(self, ab, state, k_tile):
        """Wait for a stage; where loads of a tile of K go."""
        ab.producer_acquire(state)
        return SimpleNamespace(index=state.index, full=ab.producer_get_barrier(state), k_tile=k_tile)

    def copy(self, operand, loads, to, mask):
        """Start an operand's loads of a stage; ``mask``: the CTAs that get them, where that is to be said."""
        for shared, source in loads:
            cute.copy(operand[0], source[None, to.k_tile], shared[None, to.index], tma_bar_ptr=to.full, mcast_mask=mask)

    def loads_a(self, operand, s_a, row, part, parts: int):
        """Shared and global sides of the loads of a part of a tile of A."""
        g_a = cute.local_tile(cute.domain_offset((row, 0), operand[1]), (self.config.tile_m, TILE_K), (0, None))
        s_a, g_a = cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2)
        return [cpasync.tma_partition(operand[0], part, cute.make_layout(parts), s_a, g_a)]

    def loads_b(self, operand, s_b, expert, column, n, part):
        """Shared and global sides of the loads of a half of a tile of B."""
        (tma, view), config = operand, self.config
        if self.b_major == "n" and self.paired:
            halves = [view[None, None, half, expert] for half in range(2)]
            return [
                load
                for i, half in enumerate(halves)
                for load in self.across(tma, half, s_b, config.tile_n // 2, column, n // 2, part, config.ctas, i)
            ]
        weight = view[None, None, expert]
        if self.b_major == "n":
            return self.across(tma, weight, s_b, config.tile_n, column, n, part, config.ctas)
        # a tile past the last column (see `across`), whose results nobody stores
        at = cutlass.min(column, self.tiles_n(n) - 1)
        tile_n, at = ((config.tile_n // 2, 2), (at, 0)) if self.paired else (config.tile_n, at)
        g_b = cute.group_modes(cute.local_tile(weight, (tile_n, TILE_K), (at, None)), 0, 2)
        return [cpasync.tma_partition(tma, part, cute.make_layout(config.ctas), cute.group_modes(s_b, 0, 2), g_b)]

    def tiles_n(self, n):
        """Tiles across the columns."""
        width, tile = (n // 2, self.config.tile_n // 2) if self.paired else (n, self.config.tile_n)
        return (width + tile - 1) // tile

    @cute.jit
    def load_boxes(self, tma_p, p_tma, shared, rings, group):
        """A warp that loads the preactivation for one math warpgroup, box by box in the order of its epilogue."""
        config = self.config
        _, _, s_box, slots, _ = shared
        _, ring, reads = rings
        state = pipeline.make_pipeline_state(PRODUCER, self.load_stages)
        turn = Int32(0)
        turn, slot = tiles.take(ring, turn, slots)
        expert, row, left, column, depth = slot[0], slot[1], slot[2], slot[3], slot[5]
        while expert != tiles.END:
            mine = depth > 0
            if const_expr(config.pingpong):
                mine = mine and turn % 2 != group  # `turn` is that of the next tile
            if mine:
                for i in cutlass.range_constexpr(config.blocks):
                    shift = self.block_row(i, group)
                    if shift < left:
                        view = cute.domain_offset((row + shift, 0, 0), p_tma)
                        for j in cutlass.range(self.steps, unroll=1):
                            here = self.own(state, group)
                            reads.producer_acquire(here)
                            for half in cutlass.range_constexpr(self.boxes_read):
                                part, at = self.box_of(half, column * self.steps + j)
                                g_p = cute.local_tile(view[None, None, part], (BLOCK_ROWS, EPILOGUE_COLUMNS), (0, at))
                                to_s, from_g = cpasync.tma_partition(
                                    tma_p, 0, cute.make_layout(1), cute.group_modes(s_box, 0, 2),
                                    cute.group_modes(g_p, 0, 2),
                                )  # fmt: skip
                                cute.copy(
                                    tma_p, from_g, to_s[None, self.read_box(here.index, half)],
                                    tma_bar_ptr=reads.producer_get_barrier(here),
                                )  # fmt: skip
                            state.advance()
            turn, slot = tiles.take(ring, turn, slots)
            expert, row, left, column, depth = slot[0], slot[1], slot[2], slot[3], slot[5]

    def box_of(self, half, box_column):
        """Where a box of the preactivation is: which part of its columns, which box there. Parts are gate and up, or
        there is one with both, in turns.
        """
        return (0, 2 * box_column + half) if self.epilogue.interleaved else (half, box_column)

    @cute.jit
    def finish(
        self, acc, s_box, copies, rings, box_state, group, thread, env,
        expert, row, left, column, row_tile, live,
    ):  # fmt: skip
        """Accumulators to results, 64 rows and 32 columns at a time. ``live`` is False for the tail's zeros."""
        for i in cutlass.range_constexpr(self.config.blocks):
            shift = self.block_row(i, group)
            if shift < left:
                block = SimpleNamespace(
                    acc=acc, base=i * (self.config.tile_n // 2), s_box=s_box, copies=copies, reads=rings[2],
                    group=group, thread=thread, lane=thread % 32, warp_row=thread // 32 * 16, expert=expert, live=live,
                    top=row + shift, valid=cutlass.min(left - shift, BLOCK_ROWS),
                )  # fmt: skip
                block.scales = self.row_scales(block, env)
                sums = [Float32(0.0), Float32(0.0)]
                for j in cutlass.range_constexpr(self.steps):
                    boxes = j * (self.boxes_a_block // self.steps)  # written before
                    box_column = column * self.steps + j
                    if const_expr(not self.epilogue.act):
                        self.plain(block, env, j, boxes, box_column)
                    elif const_expr(not self.epilogue.derivative):
                        self.activation(block, env, j, boxes, box_column)
                    else:
                        box_state, sums = self.derivative(block, env, j, boxes, box_column, box_state, sums)
                if const_expr(self.epilogue.row_scale):
                    for h in cutlass.range_constexpr(2):
                        total = cute.arch.warp_reduction_sum(sums[h], threads_in_group=4)
                        within = block.warp_row + block.lane // 4 + 8 * h
                        # a cluster's last column tile may lie past the last column
                        if block.lane % 4 == 0 and within < block.valid and column < self.tiles_n(env.n):
                            env.partial[column, block.top + within] = total
        return box_state

    @property
    def may_scale(self) -> bool:
        """Whether there is code for a row scale: under a run-time flag, but in the derivative, short of registers."""
        return not self.epilogue.derivative or self.epilogue.row_scale

    @cute.jit
    def row_scales(self, block, env):
        """The row scale of this thread's two rows of a block; zero in the tail, whose scales may be anything."""
        scales = [Float32(1.0), Float32(1.0)]
        if const_expr(self.may_scale):
            for h in cutlass.range_constexpr(2):
                if const_expr(self.epilogue.derivative) or env.scaled != 0:
                    at = cutlass.min(block.top + block.warp_row + block.lane // 4 + 8 * h, env.rows - 1)
                    scales[h] = cutlass.select_(block.live, env.row_scale[at], Float32(0.0))
        return scales

    def scaled(self, values, scales):
        """The values times their row's scale."""
        return [value * scales[v // 2 % 2] for v, value in enumerate(values)]

    @cute.jit
    def plain(self, block, env, j: cutlass.Constexpr[int], boxes: cutlass.Constexpr[int], box_column):
        """One step without an activation."""
        values = [block.acc[block.base + j * VALUES + v] for v in range(VALUES)]
        values = self.add_bias(values, block, env, box_column, 0)
        self.store(self.scaled(values, block.scales), block, boxes, env.out, 0, box_column)

    @cute.jit
    def activation(self, block, env, j: cutlass.Constexpr[int], boxes: cutlass.Constexpr[int], box_column):
        """One step of an activation: 32 columns of results, and of each half of the preactivation."""
        e = self.epilogue
        halves = 2 if e.gated else 1
        parts = []  # boxes of the preactivation
        for half in cutlass.range_constexpr(halves):
            at = block.base + j * VALUES + half * (self.config.tile_n // 4)
            if const_expr(e.interleaved):
                at = block.base + (2 * j + half) * VALUES
            part, column = self.box_of(half, box_column)
            values = [block.acc[at + v] for v in range(VALUES)]
            parts.append(self.add_bias(values, block, env, column, part))
        columns = None
        if const_expr(e.interleaved):
            # (row half, box, group of 8 columns) -> gate and up are neighbours, and so are their results' columns
            order = [(b, 4 * q + 2 * h) for b in range(2) for q in range(4) for h in range(2)]
            gates, ups = [parts[b][v] for b, v in order], [parts[b][v + 1] for b, v in order]
            columns = [b * 16 + v + block.lane % 4 - v % 4 for b, v in order]
        else:
            gates, ups = parts[0], parts[-1]
        if const_expr(e.gated):
            values = [epilogues.glu(e.act, e.clamped, g, u, *env.constants) for g, u in zip(gates, ups, strict=True)]
        else:
            values = [epilogues.squared_relu(g) for g in gates]
        if const_expr(e.keep):
            for half in cutlass.range_constexpr(halves):
                part, column = self.box_of(half, box_column)
                self.store(parts[half], block, boxes + half, env.p, part, column)
            boxes = boxes + halves
        if const_expr(e.interleaved):
            values = self.in_row_order(values, block.scales)
            columns = self.in_row_order(columns, None)
            self.store(values, block, boxes, env.out, 0, box_column, columns)
        else:
            self.store(self.scaled(values, block.scales), block, boxes, env.out, 0, box_column)

    def in_row_order(self, values, scales):
        """Values that alternate between a thread's two rows, scaled, as `row_of` has rows: two of one, two of the
        other.
        """
        if scales is not None:
            values = [value * scales[v % 2] for v, value in enumerate(values)]
        return [values[v // 4 * 4 + (v % 4 // 2) + v % 2 * 2] for v in range(len(values))]

    @cute.jit
    def derivative(self, block, env, j: cutlass.Constexpr[int], boxes: cutlass.Constexpr[int], box_column, state, sums):
        """One step of a derivative: the gradients of the preactivation, the activation again, the row scale's
        gradient.
        """
        e = self.epilogue
        inputs = self.take_pairs(block, state) if e.gated else [self.take_box(block, state, 0)]
        d = [block.acc[block.base + j * VALUES + v] for v in range(VALUES)]
        x = [[t[v].to(Float32) for v in range(VALUES)] for t in inputs]
        results = []
        for v in cutlass.range_constexpr(VALUES):
            scale = block.scales[v // 2 % 2] if self.may_scale else None
            if const_expr(e.gated):
                result = epilogues.glu_backward(e.act, e.clamped, d[v], x[0][v], x[1][v], *env.constants, scale)
            else:
                result = epilogues.squared_relu_backward(d[v], x[0][v], scale)
            results.append(result)
        *values, d_scale = zip(*results, strict=True)
        *grads, again = [self.packed(list(r)) for r in values]
        if const_expr(e.row_scale):
            for v in cutlass.range_constexpr(VALUES):
                sums[v // 2 % 2] = sums[v // 2 % 2] + d_scale[v]
        for half in cutlass.range_constexpr(len(grads)):
            part, column = self.box_of(half, box_column)
            if const_expr(e.interleaved):
                mixed = cute.make_rmem_tensor((VALUES,), self.element)
                for v in cutlass.range_constexpr(VALUES):
                    for which in cutlass.range_constexpr(2):
                        if const_expr(self.pair_box(v) == half):
                            mixed[self.pair_place(v) + which] = grads[which][v]
                self.store(mixed, block, boxes + half, env.out, part, column, copy=2)
            else:
                self.store(grads[half], block, boxes + half, env.out, part, column)
            if const_expr(half == 0):
                state = self.release_boxes(block, state)
        if const_expr(e.keep):
            self.store(again, block, boxes + len(grads), env.second, 0, box_column)
        return state, sums

    @cute.jit
    def add_bias(self, values, block, env, box_column, part):
        """The values plus their columns' bias; nothing in the tail, which belongs to no expert."""
        if const_expr(not self.epilogue.derivative):
            width = env.n // 2 if self.paired else env.n
            terms = cute.make_rmem_tensor((VALUES // 2,), Float32)
            terms.fill(0.0)
            if block.live and env.biased != 0:
                for v in cutlass.range_constexpr(VALUES // 2):
                    column = box_column * EPILOGUE_COLUMNS + v // 2 * 8 + block.lane % 4 * 2 + v % 2
                    terms[v] = env.bias[block.expert, part * width + cutlass.min(column, width - 1)].to(Float32)
            values = [value + terms[v // 4 * 2 + v % 2] for v, value in enumerate(values)]
        return values

    @cute.jit
    def take_pairs(self, block, state):
        """Gates and ups of a step, as the accumulators lie; zeros in the tail."""
        if const_expr(not self.epilogue.interleaved):
            return self.take_box(block, state, 0), self.take_box(block, state, 1)
        r_in = cute.make_rmem_tensor((2 * VALUES,), self.element)
        r_in.fill(0.0)
        if block.live:
            here = self.own(state, block.group)
            block.reads.consumer_wait(here)
            pairs = block.copies[2]
            for box in cutlass.range_constexpr(2):
                source = pairs.partition_S(block.s_box)[None, None, None, self.read_box(here.index, box)]
                cute.copy(pairs, source, cute.make_tensor(r_in.iterator + box * VALUES, cute.make_layout(source.shape)))
        places = [self.pair_box(v) * VALUES + self.pair_place(v) for v in range(VALUES)]
        return [r_in[place] for place in places], [r_in[place + 1] for place in places]

    def box_copies(self, thread):
        copies = super().box_copies(thread)
        if not (self.epilogue.interleaved and self.epilogue.derivative):
            return copies
        # boxes of gate and up in turns: what belongs to a thread's accumulators, four columns side by side at a time
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.element, num_bits_per_copy=64)
        rows = BLOCK_ROWS
        places = cute.make_layout(((4, 8, 4), (4, 2, 2)), stride=((4 * rows, 1, 16), (rows, 8, 16 * rows)))
        return *copies, cute.make_tiled_copy(atom, places, (rows, EPILOGUE_COLUMNS)).get_slice(thread)

    def pair_box(self, v: int) -> int:
        """Which of the two boxes has the gate and up of a thread's v-th accumulator of a step, in turns."""
        return v // 8

    def pair_place(self, v: int) -> int:
        """Where that gate is among the thread's values of the box; up is behind it. Accumulators have 8 columns in two
        rows of each, two columns side by side: these are four, gates and ups.
        """
        return v // 4 % 2 * 8 + v // 2 % 2 * 4 + v % 2 * 2

    @cute.jit
    def take_box(self, block, state, half: cutlass.Constexpr[int]):
        """Wait for a box of the preactivation; this thread's values of it, zeros in the tail."""
        of_box = block.copies[1]
        r_in = cute.make_rmem_tensor((VALUES,), self.element)
        r_in.fill(0.0)
        if block.live:
            here = self.own(state, block.group)
            if const_expr(half == 0):
                block.reads.consumer_wait(here)
            source = of_box.partition_S(block.s_box)[None, None, None, self.read_box(here.index, half)]
            cute.copy(of_box, source, cute.make_tensor(r_in.iterator, cute.make_layout(source.shape)))
        return [r_in[v] for v in range(VALUES)]

    @cute.jit
    def release_boxes(self, block, state):
        """Give a step's boxes back to their loader, behind the proxy fence and the barrier of the first box stored.

        The loader writes them by TMA, another proxy than that of the reads: without a fence between, reads that were
        issued may still find what comes next. They did, in boxes that were given back as soon as they were read, where
        gate and up alternate and a CTA has several tiles.
        """
        if block.live:
            block.reads.consumer_release(self.own(state, block.group))
            state.advance()
        return state

    @cute.jit
    def store(self, values, block, count: cutlass.Constexpr[int], to, part, box_column, columns=None, copy=0):
        """Send a box's first ``valid`` rows to row ``top`` of an output; see the module's page."""
        tma, view = to
        here = cute.domain_offset((BLOCK_ROWS - block.valid, 0), view[None, None, part, block.top + block.valid])
        target = cute.local_tile(here, (BLOCK_ROWS, EPILOGUE_COLUMNS), (0, box_column))
        self.put_box(values, block.s_box, block.copies[copy], block.group, block.thread, count, tma, target, columns)
