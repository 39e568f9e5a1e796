"""What the Hopper matrix products share: warps, main loop, and the way of results through shared memory.

Warps. Math warpgroups 0 and 1; warpgroup 2 has the loaders, which give their registers away: warp 8 loads A and B by
TMA, warp 9 schedules tiles (tiles.py), warps 10 and 11 load what the epilogue of warpgroup 0 and 1 reads, under the
main loop.

Main loop. A and B go round a ring of shared-memory stages, 64 of K each. One wgmma group stays in flight while the next
is issued; a stage goes back to the loader once the group after it has been issued. In ping-pong a warpgroup has the
tensor cores for a whole main loop: named barriers pass the turn on, so that the other's epilogue runs under it.

Results leave by boxes of 64 rows and 32 columns, through a few buffers of shared memory that each warpgroup has for
itself, so that the two never wait for each other there.

Axes: M rows of a tile, N columns, K contraction, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from fusedmoe.kernels.sm90 import tiles
from fusedmoe.kernels.sm90.config import BLOCK_ROWS, EPILOGUE_COLUMNS, TILE_K, TileConfig

WARPGROUP = 128
MATH_WARPGROUPS = 2
THREADS = (MATH_WARPGROUPS + 1) * WARPGROUP
LOAD_WARP = 8
SCHEDULER_WARP = 9
EPILOGUE_LOAD_WARP = 10
STORE_BARRIER = 1  # named barriers 1, 2: a math warpgroup's own
TURN_BARRIER = 3  # 3, 4: whose main loop it is, in ping-pong
BOX = BLOCK_ROWS * EPILOGUE_COLUMNS
ACROSS = 64  # columns of one load of an operand that is contiguous along M or N: the swizzle's 128 bytes
VALUES = BOX // WARPGROUP  # of a box, in one thread
PRODUCER, CONSUMER = pipeline.PipelineUserType.Producer, pipeline.PipelineUserType.Consumer
LOAD = cpasync.CopyBulkTensorTileG2SOp()
SHARED_LOAD = cpasync.CopyBulkTensorTileG2SMulticastOp()


def threads(count: int) -> pipeline.CooperativeGroup:
    """How many threads arrive at a barrier."""
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


@dataclass(frozen=True)
class Gemm:
    """One kernel: types, layouts and tiles that are compiled in.

    A subclass says what its tiles are, loads them (`load`) and writes them (`finish`).
    """

    dtype: str  # of A and B: "bf16" or "fp16"
    config: TileConfig
    arch: str = "sm_90a"

    @property
    def element(self) -> Any:
        return cutlass.BFloat16 if self.dtype == "bf16" else cutlass.Float16

    @property
    def box_element(self) -> Any:
        """Type of the results on their way through shared memory."""
        return self.element

    @property
    def boxes_a_block(self) -> int:
        """Boxes that a warpgroup writes for 64 rows of a tile."""
        raise NotImplementedError

    @property
    def boxes_read(self) -> int:
        """Boxes that a step of the epilogue reads."""
        return 0

    @property
    def store_stages(self) -> int:
        """Boxes in flight to memory, for each math warpgroup: they go round an exact number of times a block."""
        return next(n for n in (3, 4, 2, 5, 1) if self.boxes_a_block % n == 0)

    @property
    def load_stages(self) -> int:
        """Steps of the epilogue's input in flight, for each math warpgroup."""
        if not self.boxes_read:
            return 0
        return 3 if self.config.tile_n <= 128 else 2

    @property
    def boxes(self) -> int:
        """Boxes of shared memory in all: those to store, then those to read."""
        return MATH_WARPGROUPS * (self.store_stages + self.load_stages * self.boxes_read)

    @property
    def stages(self) -> int:
        """Stages of A and B."""
        return self.config.stages(self.boxes * BOX * self.box_element.width // 8)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory, but for the barriers."""
        stage = (self.config.tile_m + self.config.tile_n) * TILE_K * 2
        return self.stages * stage + self.boxes * BOX * self.box_element.width // 8

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that loads, and of one that multiplies."""
        return (24, 240) if self.boxes_read and self.config.tile_n > 160 else (40, 232)

    def tiled_mma(self, a_major: Any, b_major: Any) -> cute.TiledMma:
        atoms = 1 if self.config.pingpong else MATH_WARPGROUPS
        shape = (BLOCK_ROWS, self.config.tile_n)
        return hopper.make_trivial_tiled_mma(
            self.element, self.element, a_major, b_major, Float32, (atoms, 1, 1), shape
        )

    def grid(self, ctas: Int32) -> dict[str, Any]:
        """Launch shape of ``ctas`` CTAs: clusters along y."""
        of = self.config.ctas
        return {
            "grid": (of, ctas // of, 1), "block": (THREADS, 1, 1), "cluster": (of, 1, 1), "min_blocks_per_mp": 1,
        }  # fmt: skip

    def smem_layout(self, tile: tuple[int, int], major: Any, stages: int) -> Any:
        """Shared-memory layout of an operand's tile: the widest swizzle that its contiguous side takes."""
        by_k = major == OperandMajorMode.K
        kind = hopper.get_smem_layout_atom(
            LayoutEnum.ROW_MAJOR if by_k else LayoutEnum.COL_MAJOR, self.element, tile[1] if by_k else tile[0]
        )
        atom = warpgroup.make_smem_layout_atom(kind, self.element)
        return cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2) if by_k else (1, 0, 2))

    def box_layout(self, boxes: int) -> Any:
        """Shared-memory layout of the epilogue's boxes."""
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.box_element, EPILOGUE_COLUMNS)
        atom = warpgroup.make_smem_layout_atom(kind, self.box_element)
        return cute.tile_to_shape(atom, (BLOCK_ROWS, EPILOGUE_COLUMNS, boxes), order=(0, 1, 2))

    # -- device side

    def shared_memory(self, a_smem, b_smem, box_smem):
        """Allocate (A, B, boxes, slots, drawing) in shared memory, and the rings (of A and B, of tiles, of inputs)
        over it.
        """
        config = self.config
        smem = SmemAllocator()
        ab_barriers = smem.allocate_array(Int64, 2 * self.stages)
        ring_barriers = smem.allocate_array(Int64, 2 * tiles.RING_STAGES)
        read_barriers = smem.allocate_array(Int64, 2 * MATH_WARPGROUPS * max(self.load_stages, 1))
        drawing = tiles.make_drawing(smem, config)
        slots = smem.allocate_tensor(Int32, cute.make_layout((tiles.SLOT, tiles.RING_STAGES)), 16)
        s_a = smem.allocate_tensor(self.element, a_smem.outer, 1024, swizzle=a_smem.inner)
        s_b = smem.allocate_tensor(self.element, b_smem.outer, 1024, swizzle=b_smem.inner)
        s_box = smem.allocate_tensor(self.box_element, box_smem.outer, 1024, swizzle=box_smem.inner)
        ab = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=threads(1),
            consumer_group=threads((4 if config.pingpong else 8) * config.ctas),
            tx_count=(config.tile_m + config.tile_n) * TILE_K * 2,
            barrier_storage=ab_barriers,
            cta_layout_vmnk=cute.make_layout((1, config.cluster_m, config.cluster_n, 1)),
            defer_sync=True,
        )
        ring = pipeline.PipelineAsync.create(
            num_stages=tiles.RING_STAGES,
            producer_group=threads(1),
            consumer_group=threads(1 + 8 + (MATH_WARPGROUPS if self.boxes_read else 0)),
            barrier_storage=ring_barriers,
            defer_sync=True,
        )
        reads = None
        if const_expr(self.boxes_read):
            # one ring for each math warpgroup, side by side: `own` shifts a state to a warpgroup's
            reads = pipeline.PipelineTmaAsync.create(
                num_stages=MATH_WARPGROUPS * self.load_stages,
                producer_group=threads(1),
                consumer_group=threads(4),
                tx_count=self.boxes_read * BOX * 2,
                barrier_storage=read_barriers,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                defer_sync=True,
            )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(config.ctas, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(config.ctas, 1))
        return (s_a, s_b, s_box, slots, drawing), (ab, ring, reads)

    def across_atom(self, t: cute.Tensor, smem: cute.ComposedLayout, ctas: int) -> Any:
        """A load of 64 columns of an operand that is contiguous along M or N; see `across`."""
        one = cute.slice_(smem, (None, None, 0))
        box = cute.local_tile(cute.make_tensor(0, one.outer), (ACROSS, TILE_K), (0, 0)).layout
        return cpasync.make_tiled_tma_atom(
            SHARED_LOAD if ctas > 1 else LOAD, t, cute.make_composed_layout(one.inner, one.offset, box),
            (ACROSS, TILE_K), num_multicast=ctas,
        )  # fmt: skip

    def across(self, tma, view, s, tile: int, at, width, rank, ctas: int, behind: int = 0):
        """Shared and global sides of the loads of one tile that is contiguous along M or N: one a 64 columns. It lies
        behind so many others in the stage.

        Columns past the tensor's are wanted by nobody, but a box of which none exists takes several times as long to be
        filled with zeros as any other to load: such a box loads the last one that exists instead.
        """
        last = (width + ACROSS - 1) // ACROSS - 1
        pairs = []
        for b in range(tile // ACROSS):
            box = cutlass.min(at * (tile // ACROSS) + b, last)
            g_box = cute.local_tile(view, (ACROSS, TILE_K), (box, None))
            s_box = cute.local_tile(s, (ACROSS, TILE_K, self.stages), (behind * (tile // ACROSS) + b, 0, 0))
            pairs.append(
                cpasync.tma_partition(
                    tma, rank, cute.make_layout(ctas), cute.group_modes(s_box, 0, 2), cute.group_modes(g_box, 0, 2)
                )
            )
        return pairs

    def read_box(self, index, half):
        """Box of shared memory that a ring of inputs has its ``index``-th step's ``half`` in."""
        return MATH_WARPGROUPS * self.store_stages + index * self.boxes_read + half

    def own(self, state, group):
        """A state of one math warpgroup's ring, as a state of the rings side by side."""
        return pipeline.PipelineState(state.stages, state.count, state.index + group * self.load_stages, state.phase)

    @cute.jit
    def math(self, tiled_mma, shared, rings, group, env):
        """A math warpgroup: main loop and `finish` of its tiles. ``env`` is for the subclass's `finish`."""
        config = self.config
        s_a, s_b, s_box, slots, _ = shared
        ab, ring, _ = rings
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP
        part = tiled_mma.get_slice(0 if const_expr(config.pingpong) else group * WARPGROUP)
        r_a = tiled_mma.make_fragment_A(part.partition_A(s_a))
        r_b = tiled_mma.make_fragment_B(part.partition_B(s_b))
        acc = cute.make_rmem_tensor(part.partition_shape_C((config.tile_m, config.tile_n)), Float32)
        copies = self.box_copies(thread)

        if const_expr(config.pingpong):
            if group == 1:
                self.pass_turn(group)

        consumed = Int32(0)  # stages of A and B
        box_state = pipeline.make_pipeline_state(CONSUMER, max(self.load_stages, 1))
        turn = Int32(0)
        turn, slot = tiles.take(ring, turn, slots)
        expert, row, left, column, row_tile, depth = slot
        while expert != tiles.END:
            mine = Boolean(True)
            if const_expr(config.pingpong):
                mine = turn % 2 != group  # `turn` is that of the next tile
            if mine:
                if const_expr(config.pingpong):
                    cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=2 * WARPGROUP)
                if depth > 0:
                    self.main_loop(tiled_mma, acc, r_a, r_b, ab, consumed, depth, group)
                else:
                    acc.fill(0.0)
                    if const_expr(config.pingpong):
                        self.pass_turn(group)
                box_state = self.finish(
                    acc, s_box, copies, rings, box_state, group, thread, env,
                    expert, row, left, column, row_tile, depth > 0,
                )  # fmt: skip
            consumed += depth
            turn, slot = tiles.take(ring, turn, slots)
            expert, row, left, column, row_tile, depth = slot
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def pass_turn(self, group) -> None:
        """The tensor cores are the other warpgroup's now."""
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - group, number_of_threads=2 * WARPGROUP)

    def box_copies(self, thread):
        """How a warpgroup's 64 rows of accumulators get into a box and out of one."""
        # one atom of the product is where the accumulators lie, whatever the tile
        one = hopper.make_trivial_tiled_mma(
            self.element, self.element, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1),
            (BLOCK_ROWS, EPILOGUE_COLUMNS),
        )  # fmt: skip
        if const_expr(self.box_element.width == 16):
            store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.box_element)
        else:
            store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.box_element, num_bits_per_copy=64)
        fetch = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.element)
        return tuple(cute.make_tiled_copy_C(atom, one).get_slice(thread) for atom in (store, fetch))

    def finish(
        self, acc, s_box, copies, rings, box_state, group, thread, env,
        expert, row, left, column, row_tile, live,
    ):  # fmt: skip
        """Write a tile's results; the state of the ring of inputs after them. ``live`` is False without a main loop."""
        raise NotImplementedError

    @cute.jit
    def main_loop(self, tiled_mma, acc, r_a, r_b, ab, consumed, depth, group):
        """A @ B into ``acc`` over ``depth`` tiles of K; one product in flight while the next is issued."""
        # made anew for each tile: one number to keep through the epilogue, rather than two
        state = pipeline.PipelineState(self.stages, consumed, consumed % self.stages, consumed // self.stages % 2)
        released = state.clone()
        warpgroup.fence()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        ab.consumer_wait(state)
        for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
            cute.gemm(tiled_mma, acc, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], acc)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        state.advance()
        for _ in cutlass.range(depth - 1, unroll=1):
            ab.consumer_wait(state)
            for kb in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                cute.gemm(tiled_mma, acc, r_a[None, None, kb, state.index], r_b[None, None, kb, state.index], acc)
            warpgroup.commit_group()
            state.advance()
            warpgroup.wait_group(1)
            ab.consumer_release(released)
            released.advance()
        if const_expr(self.config.pingpong):
            self.pass_turn(group)
        warpgroup.wait_group(0)
        ab.consumer_release(released)

    def block_row(self, i: int, group):
        """First row, within the tile, of a warpgroup's i-th block."""
        return i * BLOCK_ROWS if self.config.pingpong else (i * MATH_WARPGROUPS + group) * BLOCK_ROWS

    def row_of(self, thread, v: int):
        """Row of a block that a thread's v-th value of a box belongs to."""
        return thread // 32 * 16 + thread % 32 // 4 + v // 2 % 2 * 8

    @cute.jit
    def packed(self, values):
        """A list of fp32 values as a register tensor of the results' type."""
        r_fp32 = cute.make_rmem_tensor((len(values),), Float32)
        for v in cutlass.range_constexpr(len(values)):
            r_fp32[v] = values[v]
        r_out = cute.make_rmem_tensor((len(values),), self.box_element)
        r_out.store(r_fp32.load().to(self.box_element))
        return r_out

    @cute.jit
    def put_box(self, values, s_box, to_box, group, thread, count, tma, target, columns=None):
        """Send a box of values to memory, by way of shared memory; ``target`` is the box in the tensor of ``tma``.

        Values lie as ``to_box`` has them, unless ``columns`` says which column of the box each belongs to.

        A box of shared memory is used again after `store_stages` boxes. Before the barrier of box c the storing warp
        waits until what box c + 1 will overwrite has been read, so one barrier a box is enough.
        """
        stages = self.store_stages
        where = group * stages + count % stages
        packed = values
        if const_expr(isinstance(values, list)):
            packed = self.packed(values)
        if const_expr(stages == 1):
            cute.arch.barrier(barrier_id=STORE_BARRIER + group, number_of_threads=WARPGROUP)
        if const_expr(columns is None):
            into = to_box.partition_D(s_box)[None, None, None, where]
            cute.copy(to_box, cute.make_tensor(packed.iterator, cute.make_layout(into.shape)), into)
        else:
            for v in cutlass.range_constexpr(VALUES):
                s_box[self.row_of(thread, v), columns[v], where] = packed[v]
        cute.arch.fence_proxy("async.shared", space="cta")
        if const_expr(stages > 1):
            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(stages - 2, read=True)
        cute.arch.barrier(barrier_id=STORE_BARRIER + group, number_of_threads=WARPGROUP)
        if thread < 32:
            of_s, to_g = cpasync.tma_partition(
                tma, 0, cute.make_layout(1), cute.group_modes(s_box, 0, 2), cute.group_modes(target, 0, 2)
            )
            cute.copy(tma, of_s[None, where], to_g)
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(stages == 1):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
