"""The common parts of the Hopper grouped GEMMs: warp roles, mainloop, and the stores through shared memory.

A *ragged M* product (varlen_m in other libraries) has a different number of rows per expert in A and in the result. A
*ragged K* product (varlen_k) has a different extent of the contraction per expert.

**Warp specialization.** Warpgroups 0 and 1 are the consumers, called math warpgroups here. Warpgroup 2 is the producer,
and gives up most of its registers:

- warp 8 loads A and B by TMA;
- warp 9 is the tile scheduler (scheduler.py);
- warps 10 and 11 load the inputs of the epilogues of warpgroups 0 and 1, during the mainloop;
- the rows of a gathered operand are copied by warps 10 and 11, or by a fourth warpgroup (gather.py).

**Mainloop.** A and B pass through a ring of shared-memory stages. A stage has 128 bytes of K, the widest swizzle. The
operands (operands.py) have the loop. With ping-pong tiles, a warpgroup has the tensor cores for a whole mainloop. Then
a named barrier gives them to the other warpgroup, so the epilogue of one overlaps the mainloop of the other.

**Epilogue.** Results are stored in boxes of 64 rows and 32 columns, through a few buffers in shared memory. Each math
warpgroup has its own buffers, so the two warpgroups never wait for each other there.

**Barriers.** Those of rings are mbarriers; those with a number are named barriers.

| barrier | arrives | waits |
|---|---|---|
| a stage of A and B is full | TMA of warp 8, and all lanes of the warps that gather | the math warps that multiply it |
| a stage of A and B is empty | a lane of each of these warps, in all CTAs that share it | warp 8, those that gather |
| a tile is in the ring | warp 9 | math warps, warp 8, those that gather or load inputs |
| a place in the ring is empty | a lane of each of these | warp 9 |
| inputs of warpgroup g are full | TMA of warp 10 + g | the four warps of warpgroup g |
| inputs of warpgroup g are empty | a lane of each of these | warp 10 + g |
| 1 + g (`STORE_BARRIER`) | all threads of math warpgroup g | all of them: a box is in shared memory |
| 3 + g (`TURN_BARRIER`) | the other math warpgroup | math warpgroup g: it has the tensor cores |

Run: tests/unit/test_kernels_compile.py, tests/unit/test_emulated_kernels.py, tests/gpu/test_hopper_products.py;
``python -m benchmarks --only tiles``.

Axes: M rows of a tile, N columns, K contraction, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from fusedmoe.kernels.build.sources import sources_of
from fusedmoe.kernels.device.warps import LANES
from fusedmoe.kernels.sm90.gemm import scheduler as tiles
from fusedmoe.kernels.sm90.tiles.config import BLOCK_ROWS, EPILOGUE_COLUMNS, SCALE_BLOCK, TileConfig

WARPGROUP = 128
MATH_WARPGROUPS = 2
LOAD_WARP = 8
SCHEDULER_WARP = 9
EPILOGUE_LOAD_WARP = 10
STORE_BARRIER = 1  # named barriers 1 and 2: one per math warpgroup
TURN_BARRIER = 3  # 3 and 4: permission to use the tensor cores, with ping-pong tiles
BOX = BLOCK_ROWS * EPILOGUE_COLUMNS
VALUES = BOX // WARPGROUP  # values of a box per thread
PRODUCER, CONSUMER = pipeline.PipelineUserType.Producer, pipeline.PipelineUserType.Consumer
LOAD = cpasync.CopyBulkTensorTileG2SOp()
SHARED_LOAD = cpasync.CopyBulkTensorTileG2SMulticastOp()


def threads(count: int) -> pipeline.CooperativeGroup:
    """The group of ``count`` threads that arrive at a barrier."""
    return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)


def pass_turn(group: Int32) -> None:
    """Give the tensor cores to the other warpgroup."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - group, number_of_threads=2 * WARPGROUP)


class Tma(NamedTuple):
    """A TMA copy: its atom, and the tensor as coordinates of the descriptor."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Layouts(NamedTuple):
    """Shared-memory layouts of A's and B's stages, and of the epilogue's boxes."""

    a: cute.ComposedLayout
    b: cute.ComposedLayout
    boxes: cute.ComposedLayout


class Shared(NamedTuple):
    """Shared memory of a CTA. ``slots`` are the scheduler's, ``boxes`` the epilogue's."""

    a: cute.Tensor
    b: cute.Tensor
    boxes: cute.Tensor
    slots: cute.Tensor
    drawing: tiles.Drawing
    scales: Any = None  # of the operands' blocks, see block_scales.py


class Rings(NamedTuple):
    """Pipelines over the shared memory: stages of A and B, tiles, and inputs of the epilogue."""

    ab: pipeline.PipelineTmaAsync
    tiles: pipeline.PipelineAsync
    inputs: pipeline.PipelineTmaAsync | None


class Copies(NamedTuple):
    """Copies of a thread's registers to a box and from one; ``pairs``: both ways, for interleaved gate and up."""

    store: Any
    fetch: Any
    pairs: Any = None


class Consumer(NamedTuple):
    """A thread of math warpgroup ``group`` and the resources of its epilogue."""

    group: Int32
    thread: Int32
    boxes: cute.Tensor
    copies: Copies
    inputs: pipeline.PipelineTmaAsync | None


@dataclass(frozen=True)
class Gemm(ABC):
    """One kernel: the operands, layouts and tiles that are compiled in.

    A subclass, a *kind* of product, schedules its tiles, loads them, and writes their results (`finish`). Its operands
    (operands.py) have the types, the scales and the mainloop.
    """

    operands: Any  # an `operands.Operands`
    config: TileConfig
    arch: str = "sm_90a"

    @property
    def sources(self) -> tuple[str, ...]:
        """As of `fusedmoe.kernels.build.kernel.Kernel`."""
        return sources_of(self)

    @property
    @abstractmethod
    def symbol(self) -> str:
        """As of `fusedmoe.kernels.build.kernel.Kernel`."""

    @property
    @abstractmethod
    def box_element(self) -> Any:
        """Type of the results in shared memory."""

    @property
    @abstractmethod
    def boxes_per_block(self) -> int:
        """Boxes that a warpgroup writes per 64 rows of a tile."""

    @property
    @abstractmethod
    def boxes_read(self) -> int:
        """Boxes that a step of the epilogue reads."""

    @property
    @abstractmethod
    def gathered_bytes(self) -> int:
        """Bytes of a stage that are gathered; TMA loads the others."""

    @property
    @abstractmethod
    def adjacent(self) -> bool:
        """Whether a cooperative warpgroup has adjacent rows of a tile: whole blocks of 128 rows, not every other 64."""

    @property
    @abstractmethod
    def crowded(self) -> bool:
        """Whether a math warpgroup needs all registers that the producer can spare."""

    @property
    @abstractmethod
    def tile_kind(self) -> type:
        """The type of the tiles that the math warps take."""

    @property
    def counts(self) -> bool:
        """Whether tiles are counted when their results are in memory."""
        return self.tile_kind is tiles.TileWithCounter

    @property
    def box_bytes(self) -> int:
        return BOX * self.box_element.width // 8

    @property
    def store_stages(self) -> int:
        """Boxes in flight to memory per math warpgroup: a divisor of `boxes_per_block` that costs no stage of A and B,
        if possible. With two boxes, each waits until TMA has read the one before.
        """
        numbers = [n for n in (3, 4, 2, 5) if self.boxes_per_block % n == 0] or [1]
        read = self.load_stages * self.boxes_read
        stages = [self.stages_beside(MATH_WARPGROUPS * (n + read) * self.box_bytes) for n in numbers]
        return numbers[stages.index(max(stages))]

    @property
    def load_stages(self) -> int:
        """Steps of the epilogue's inputs in flight per math warpgroup.

        A third step would take the shared memory of a third box of results, or of a fifth stage of A and B. On an H200,
        a derivative with 128 x 128 tiles is 1 to 4% faster with three boxes than with three steps, and 10% faster with
        five stages than with four.
        """
        return 2 if self.boxes_read else 0

    @property
    def boxes(self) -> int:
        """Boxes in shared memory: first the stored ones, then the read ones."""
        return MATH_WARPGROUPS * (self.store_stages + self.load_stages * self.boxes_read)

    @property
    def gather_warps(self) -> int:
        """Warps that copy gathered rows, 2 or 4. All their lanes arrive at the barrier of every stage."""
        return 2 if self.gathered_bytes else 0

    @property
    def gather_warp(self) -> int:
        """The first of them: four are a warpgroup of their own; two are warps 10 and 11."""
        return 12 if self.gather_warps == 4 else 10

    @property
    def threads(self) -> int:
        """Threads of a CTA: two math warpgroups, and one or two of the producer."""
        return (MATH_WARPGROUPS + (2 if self.gather_warps == 4 else 1)) * WARPGROUP

    @property
    def stages(self) -> int:
        """Stages of A and B."""
        return self.stages_beside(self.boxes * self.box_bytes)

    def stages_beside(self, epilogue_bytes: int) -> int:
        """Stages of A, B and their scales that fit beside an epilogue's shared memory."""
        return self.config.stages(epilogue_bytes, self.scale_space)

    @property
    def scale_space(self) -> int:
        """Shared memory of a stage's scales."""
        return self.operands.scale_space(self) if self.operands.staged else 0

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory, without the barriers."""
        return self.stages * (self.config.stage_bytes + self.scale_space) + self.boxes * self.box_bytes

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of the producer, and of a math warpgroup."""
        if self.threads > 3 * WARPGROUP:
            accumulators = self.config.tile_m * self.config.tile_n // WARPGROUP // (1 if self.config.pingpong else 2)
            return (24, 232) if accumulators > 160 else (48, 208)
        return (24, 240) if self.crowded else (40, 232)

    def tiled_mma(self, a_major: Any, b_major: Any) -> cute.TiledMma:
        config, operands = self.config, self.operands
        groups = 1 if config.pingpong else MATH_WARPGROUPS
        rows = None
        if self.adjacent:
            blocks = SCALE_BLOCK // BLOCK_ROWS
            rows = cute.make_layout((BLOCK_ROWS, groups, blocks), stride=(1, SCALE_BLOCK, BLOCK_ROWS))
        mma = hopper.make_trivial_tiled_mma(
            operands.element, operands.b_element, a_major, b_major, Float32, (groups, 1, 1),
            (BLOCK_ROWS, operands.wave_columns(config)),
        )  # fmt: skip
        if rows is None:
            return mma
        return cute.make_tiled_mma(mma.op, (groups, 1, 1), (rows, config.tile_n, operands.tile_k))

    def grid(self, ctas: Int32) -> dict[str, Any]:
        """Launch arguments for ``ctas`` CTAs, with clusters along y."""
        of = self.config.ctas
        return {
            "grid": (of, ctas // of, 1), "block": (self.threads, 1, 1), "cluster": (of, 1, 1), "min_blocks_per_mp": 1,
        }  # fmt: skip

    def layouts(self, a_major: Any, b_major: Any) -> Layouts:
        """Shared-memory layouts of the kernel."""
        a = self.smem_layout((self.config.tile_m, self.operands.tile_k), a_major, self.stages)
        b = self.smem_layout((self.config.tile_n, self.operands.tile_k), b_major, self.stages)
        return Layouts(a, b, self.box_layout(self.boxes))

    def smem_layout(self, tile: tuple[int, int], major: Any, stages: int) -> Any:
        """Shared-memory layout of an operand's tile: the widest swizzle that fits its contiguous side."""
        by_k = major == OperandMajorMode.K
        kind = hopper.get_smem_layout_atom(
            LayoutEnum.ROW_MAJOR if by_k else LayoutEnum.COL_MAJOR, self.operands.element, tile[1] if by_k else tile[0]
        )
        atom = warpgroup.make_smem_layout_atom(kind, self.operands.element)
        return cute.tile_to_shape(atom, (*tile, stages), order=(0, 1, 2) if by_k else (1, 0, 2))

    def box_layout(self, boxes: int) -> Any:
        """Shared-memory layout of the epilogue's boxes."""
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.box_element, EPILOGUE_COLUMNS)
        atom = warpgroup.make_smem_layout_atom(kind, self.box_element)
        return cute.tile_to_shape(atom, (BLOCK_ROWS, EPILOGUE_COLUMNS, boxes), order=(0, 1, 2))

    # -- device side

    def shared_memory(self, layouts: Layouts) -> tuple[Shared, Rings]:
        """Allocate the shared memory and the rings over it."""
        config, operands = self.config, self.operands
        smem = SmemAllocator()
        ab_barriers = smem.allocate_array(Int64, 2 * self.stages)
        ring_barriers = smem.allocate_array(Int64, 2 * tiles.RING_STAGES)
        read_barriers = smem.allocate_array(Int64, 2 * MATH_WARPGROUPS * max(self.load_stages, 1))
        drawing = tiles.make_drawing(smem, config)
        slots = smem.allocate_tensor(Int32, cute.make_layout((tiles.SLOT, tiles.RING_STAGES)), 16)
        s_a = smem.allocate_tensor(operands.element, layouts.a.outer, 1024, swizzle=layouts.a.inner)
        s_b = smem.allocate_tensor(operands.b_element, layouts.b.outer, 1024, swizzle=layouts.b.inner)
        s_box = smem.allocate_tensor(self.box_element, layouts.boxes.outer, 1024, swizzle=layouts.boxes.inner)
        scales, scale_bytes = None, 0
        if operands.staged:
            scales, scale_bytes = operands.shared_scales(self, smem), operands.scale_bytes(self)
        ab = pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=threads(1 + LANES * self.gather_warps),
            consumer_group=threads((4 if config.pingpong else 8) * config.ctas),
            tx_count=config.stage_bytes - self.gathered_bytes + scale_bytes,
            barrier_storage=ab_barriers,
            cta_layout_vmnk=cute.make_layout((1, config.cluster_m, config.cluster_n, 1)),
            defer_sync=True,
        )
        ring = pipeline.PipelineAsync.create(
            num_stages=tiles.RING_STAGES,
            producer_group=threads(1),
            consumer_group=threads(1 + 8 + (MATH_WARPGROUPS if self.boxes_read else 0) + self.gather_warps),
            barrier_storage=ring_barriers,
            defer_sync=True,
        )
        reads = None
        if const_expr(self.boxes_read):
            # one ring per math warpgroup, side by side: `own` shifts a state to a warpgroup's ring
            reads = pipeline.PipelineTmaAsync.create(
                num_stages=MATH_WARPGROUPS * self.load_stages,
                producer_group=threads(1),
                consumer_group=threads(4),
                tx_count=self.boxes_read * self.box_bytes,
                barrier_storage=read_barriers,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                defer_sync=True,
            )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(config.ctas, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(config.ctas, 1))
        return Shared(s_a, s_b, s_box, slots, drawing, scales), Rings(ab, ring, reads)

    def across_atom(self, t: cute.Tensor, smem: cute.ComposedLayout, ctas: int) -> Any:
        """The TMA load of one swizzle's width of an operand that is MN-major; see `across`."""
        one, k = cute.slice_(smem, (None, None, 0)), self.operands.tile_k
        box = cute.local_tile(cute.make_tensor(0, one.outer), (k, k), (0, 0)).layout
        return Tma(*cpasync.make_tiled_tma_atom(
            SHARED_LOAD if ctas > 1 else LOAD, t, cute.make_composed_layout(one.inner, one.offset, box), (k, k),
            num_multicast=ctas,
        ))  # fmt: skip

    def across(self, tma, view, s, tile: int, at, width, rank, ctas: int, before: int = 0):
        """Shared and global sides of the loads of one MN-major tile: one load per swizzle's width, 64 columns for
        two-byte operands. The stage has ``before`` tiles of the same size before this one.

        Columns past the tensor are never used. But TMA takes several times as long to fill a box with zeros as to load
        one. So in place of a box that is entirely past the tensor, the last box of the tensor is loaded.
        """
        k = self.operands.tile_k
        last = (width + k - 1) // k - 1
        pairs = []
        for b in range(tile // k):
            box = cutlass.min(at * (tile // k) + b, last)
            g_box = cute.local_tile(view, (k, k), (box, None))
            s_box = cute.local_tile(s, (k, k, self.stages), (before * (tile // k) + b, 0, 0))
            pairs.append(
                cpasync.tma_partition(
                    tma, rank, cute.make_layout(ctas), cute.group_modes(s_box, 0, 2), cute.group_modes(g_box, 0, 2)
                )
            )
        return pairs

    def read_box(self, index, half):
        """Box in shared memory of one ``half`` of the ``index``-th step in a ring of inputs."""
        return MATH_WARPGROUPS * self.store_stages + index * self.boxes_read + half

    def own(self, state, group):
        """Convert a state of one math warpgroup's ring to a state of both rings side by side."""
        return pipeline.PipelineState(state.stages, state.count, state.index + group * self.load_stages, state.phase)

    @cute.jit
    def math(self, tiled_mma, shared, rings, group, env):
        """A math warpgroup: mainloop and `finish` of each of its tiles. ``env`` is passed to `finish`."""
        config, ab = self.config, rings.ab
        tidx, _, _ = cute.arch.thread_idx()
        thread = tidx % WARPGROUP
        part = tiled_mma.get_slice(0 if const_expr(config.pingpong) else group * WARPGROUP)
        r_a = tiled_mma.make_fragment_A(part.partition_A(shared.a))
        r_b = tiled_mma.make_fragment_B(part.partition_B(shared.b))
        acc = cute.make_rmem_tensor(part.partition_shape_C((config.tile_m, config.tile_n)), Float32)
        consumer = Consumer(group, thread, shared.boxes, self.box_copies(thread), rings.inputs)

        if const_expr(config.pingpong or self.operands.takes_turns):
            if group == 1:
                pass_turn(group)

        consumed = Int32(0)  # stages of A and B
        counter = Int32(-1)  # of the tile before
        inputs = pipeline.make_pipeline_state(CONSUMER, max(self.load_stages, 1))
        turn = Int32(0)
        turn, tile = tiles.take(rings.tiles, turn, shared.slots, self.tile_kind)
        while tile.expert != tiles.END:
            mine = Boolean(True)
            if const_expr(config.pingpong):
                mine = turn % 2 != group  # `turn` is that of the next tile
            if mine:
                if const_expr(self.counts and config.pingpong):  # while the other warpgroup has the tensor cores
                    self.count(counter, group, thread, env)
                if const_expr(config.pingpong):
                    cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=2 * WARPGROUP)
                if tile.depth > 0:
                    self.operands.main_loop(
                        self, tiled_mma, acc, r_a, r_b, ab, consumed, tile, group, shared.scales, env
                    )  # fmt: skip
                else:
                    acc.fill(0.0)
                    if const_expr(config.pingpong):
                        pass_turn(group)
                if const_expr(self.counts and not config.pingpong):  # the stores have had a mainloop to complete
                    self.count(counter, group, thread, env)
                inputs = self.finish(acc, tile, consumer, inputs, env)
                if const_expr(self.counts):
                    counter = tile.counter
            consumed += tile.depth
            turn, tile = tiles.take(rings.tiles, turn, shared.slots, self.tile_kind)
        if const_expr(self.counts):
            self.count(counter, group, thread, env)
        elif thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def count(self, counter, group, thread, env):
        """Count a tile, an element of ``env.counters``, after its results are in memory; -1 counts none.

        A tile counts 2: 1 for each of two cooperative warpgroups, which store parts of it. The release of the thread
        that counts covers the stores of FP8 products by all threads before the barrier. It has issued those by TMA
        itself: they are visible to it when they are complete.
        """
        if const_expr(self.operands.scaled):
            cute.arch.barrier(barrier_id=STORE_BARRIER + group, number_of_threads=WARPGROUP)
        if thread < 32:
            if const_expr(not self.operands.scaled):
                cute.arch.cp_async_bulk_wait_group(0, read=False)
            if counter >= 0:
                with cute.arch.elect_one():
                    cute.arch.red(
                        env.counters.iterator + counter, Int32(2 if self.config.pingpong else 1), op="add",
                        dtype="s32", sem="release", scope="gpu",
                    )  # fmt: skip

    def box_copies(self, thread) -> Copies:
        """Copies of a warpgroup's 64 rows of accumulators to a box and from one."""
        # the layout of one atom's accumulators, which is the same for every tile
        element = self.operands.value_element
        one = hopper.make_trivial_tiled_mma(
            element, element, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1),
            (BLOCK_ROWS, EPILOGUE_COLUMNS),
        )  # fmt: skip
        if const_expr(self.box_element.width == 16):
            store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.box_element)
        else:
            store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.box_element, num_bits_per_copy=64)
        fetch = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), element)
        return Copies(*(cute.make_tiled_copy_C(atom, one).get_slice(thread) for atom in (store, fetch)))

    @abstractmethod
    def finish(self, acc, tile, consumer, inputs, env):
        """Write a tile's results. Return the state of the ring of inputs. A tile of depth 0 has had no mainloop."""

    def wait_for_stage(self, ab, state) -> None:
        """Wait until a stage is full, and order copies through the generic proxy before wgmma's reads."""
        ab.consumer_wait(state)
        if self.gather_warps:
            cute.arch.fence_proxy("async.shared", space="cta")

    def block_row(self, i: int, group):
        """First row, within the tile, of a warpgroup's i-th block of 64 rows."""
        if self.adjacent:
            return group * SCALE_BLOCK + i * BLOCK_ROWS
        return i * BLOCK_ROWS if self.config.pingpong else (i * MATH_WARPGROUPS + group) * BLOCK_ROWS

    def row_of(self, thread, v: int):
        """Row, within a block, of a thread's v-th value of a box."""
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
    def put_box(self, values, consumer, copy, count, tma, target, columns=None):
        """Store a box of values through shared memory; ``target`` is the box in the tensor of ``tma``.

        The values are in the order of ``copy``, unless ``columns`` gives the column of each.

        A buffer is used again after `store_stages` boxes. Before the barrier of box c, the storing warp waits until TMA
        has read the buffer that box c + 1 will overwrite. So one barrier per box is enough.
        """
        stages = self.store_stages
        group, thread, boxes = consumer.group, consumer.thread, consumer.boxes
        where = group * stages + count % stages
        packed = values
        if const_expr(isinstance(values, list)):
            packed = self.packed(values)
        if const_expr(stages == 1):
            cute.arch.barrier(barrier_id=STORE_BARRIER + group, number_of_threads=WARPGROUP)
        if const_expr(columns is None):
            into = copy.partition_D(boxes)[None, None, None, where]
            cute.copy(copy, cute.make_tensor(packed.iterator, cute.make_layout(into.shape)), into)
        else:
            for v in cutlass.range_constexpr(VALUES):
                boxes[self.row_of(thread, v), columns[v], where] = packed[v]
        cute.arch.fence_proxy("async.shared", space="cta")
        if const_expr(stages > 1):
            if thread < 32:
                cute.arch.cp_async_bulk_wait_group(stages - 2, read=True)
        cute.arch.barrier(barrier_id=STORE_BARRIER + group, number_of_threads=WARPGROUP)
        if thread < 32:
            of_s, to_g = cpasync.tma_partition(
                tma.atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(target, 0, 2)
            )
            cute.copy(tma.atom, of_s[None, where], to_g)
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(stages == 1):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
