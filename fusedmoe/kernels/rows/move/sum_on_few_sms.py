"""The sum over slots on a few SMs, beside a product that has the others.

`SumOnFewSms` computes what `SumSlots` without a scale computes, bit by bit: ``out[t] = sum over k of rows[row of slot
(t, k)]`` in fp32, in the order of k, and then an optional addend of the token.

An SM reads at most 64 bytes per cycle, and a read takes about a microsecond while a product runs. So more than 100 KiB
must be under way per SM, more than the registers hold. The kernel copies rows to shared memory by ``cp.async``: most of
an SM's shared memory is under way. It also keeps every other CTA from the SM.

A warp takes a token at a time. A *step* of the warp is the sum of some of the token's columns: 512, or 1024 of two
slots. A lane copies and sums its own columns, 8 at a time, so no lane waits for another one's copies. An SM issues 4
instructions per cycle, which is close to what the copies and the conversions to fp32 take.

Axes: T tokens, K slots per token, R rows, H columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.gather import CHUNK_BYTES, vector
from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector
from fusedmoe.kernels.rows.move.slots import SLOTS

WARPS = 8  # per CTA
CTAS = 2  # of a cluster, since products run in clusters of two: these cannot use a single free SM
SHARED_BYTES = 224 << 10  # of the stages of a CTA, at most
BLOCK_BYTES = LANES * CHUNK_BYTES  # of a row that a warp copies at once


@dataclass(frozen=True)
class SumOnFewSms(WarpKernel):
    """Sums over each token's rows, with a given number of CTAs."""

    dtype: str  # "bf16" or "fp16"
    slots: int = SLOTS[-1]  # at least K: one of `SLOTS`
    adds: bool = False  # whether there is an addend per token

    @property
    def symbol(self) -> str:
        adds = "_adds" if self.adds else ""
        return f"sm90_sum_on_few_sms_by_{self.slots}_{self.dtype}{adds}"

    @property
    def vectors(self) -> int:
        """Vectors per lane of a row."""
        return max(SLOTS[-1] // self.slots, 2)

    @property
    def copies(self) -> int:
        """Copies of a lane per step: vectors of each row, and of the addend."""
        return (self.slots + self.adds) * self.vectors

    @property
    def stages(self) -> int:
        """Steps of a warp that are in shared memory at once."""
        return SHARED_BYTES // (WARPS * LANES * CHUNK_BYTES * self.copies)

    def compile(self) -> Any:
        """Compile without a GPU; a function of rows (R, H), rows of slots (T*K,) int64, addend (T, H), out
        (T, H), which may be the addend, K, and the number of CTAs.
        """
        rows, slots, tokens = (cute.sym_int() for _ in range(3))
        columns = cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, rows, columns), fake_vector("int64", slots),
            fake_matrix(self.dtype, tokens, columns), fake_matrix(self.dtype, tokens, columns), Int32(1), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(self, rows, row_of_slot, addend, out, chosen, ctas, stream):
        self.kernel(rows, row_of_slot, addend, out, chosen).launch(
            grid=(ctas, 1, 1), block=(WARPS * LANES, 1, 1), cluster=(CTAS, 1, 1), min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, rows, row_of_slot, addend, out, chosen):
        cute.arch.griddepcontrol_launch_dependents()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        layout = cute.make_layout((VECTOR, LANES, self.copies, self.stages, WARPS))
        staged = SmemAllocator().allocate_tensor(rows.element_type, layout, 16)[None, lane, None, None, warp]
        blocks = cute.ceil_div(out.shape[1], VECTOR * LANES * self.vectors)
        token, stride = cta * WARPS + warp, ctas * WARPS
        walk = Walk(out.shape[0], stride, out.shape[1] // VECTOR, blocks)
        steps = cute.ceil_div(out.shape[0] - token, stride) * blocks
        ahead, now = (token, Int32(0)), (token, Int32(0))
        to, at = Int32(0), Int32(0)  # the stages of both
        row = self.row_of_lane(row_of_slot, chosen, walk, ahead, lane)
        for step in cutlass.range(1 - self.stages, steps, unroll=1):
            self.fetch(rows, addend, walk, ahead, lane, row, staged, to)
            cute.arch.cp_async_commit_group()
            ahead, to = advance(walk, ahead), self.next_stage(to)
            row = self.row_of_lane(row_of_slot, chosen, walk, ahead, lane)  # arrives while the next step is summed
            if step >= 0:
                cute.arch.cp_async_wait_group(self.stages - 1)
                self.add(out, walk, now, lane, staged, at)
                now, at = advance(walk, now), self.next_stage(at)

    def next_stage(self, stage):
        return cutlass.select_(stage == self.stages - 1, Int32(0), stage + 1)

    @cute.jit
    def row_of_lane(self, row_of_slot, chosen, walk, step, lane):
        """Lane i's: the row of slot i, or -1. Nothing here may wait for it."""
        token, _ = step
        row = Int64(-1)
        if token < walk.tokens and lane < chosen:
            row = row_of_slot[token * chosen + lane]
        return row

    @cute.jit
    def fetch(self, rows, addend, walk, step, lane, row, staged, stage):
        """Start the copies of a step; zeros in place of missing rows and of columns past the last."""
        token, block = step
        first = block * (LANES * self.vectors) + lane
        left = walk.vectors - 1 - first  # negative: no such columns
        if token >= walk.tokens:
            left = Int32(-1)
        place = Int32(row) * Int32(rows.stride[0] // VECTOR)  # in vectors
        if Int32(row) >= rows.shape[0]:
            place = Int32(-1)
        base, to = rows.iterator.toint() + first * CHUNK_BYTES, staged[None, 0, stage].iterator.toint()
        for i in cutlass.range_constexpr(self.slots):
            of_slot = cute.arch.shuffle_sync(place, i)
            for v in cutlass.range_constexpr(self.vectors):
                source = base + Int64(of_slot) * CHUNK_BYTES + v * BLOCK_BYTES
                self.copy(source, to + (i * self.vectors + v) * BLOCK_BYTES, of_slot | (left - v * LANES))
        if const_expr(self.adds):
            source = addend.iterator.toint() + (Int64(token) * (addend.stride[0] // VECTOR) + first) * CHUNK_BYTES
            for v in cutlass.range_constexpr(self.vectors):
                self.copy(
                    source + v * BLOCK_BYTES, to + (self.slots * self.vectors + v) * BLOCK_BYTES, left - v * LANES
                )

    def copy(self, source, to, wanted):
        """Start the copy of a vector; store zeros if ``wanted`` is negative."""
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), Int32, num_bits_per_copy=128)
        valid = cute.make_rmem_tensor((1, 1), Boolean)
        valid[0] = wanted >= 0
        cute.copy(atom, vector(source, cute.AddressSpace.gmem), vector(to, cute.AddressSpace.smem), pred=valid)

    @cute.jit
    def add(self, out, walk, step, lane, staged, stage):
        """Sum a step."""
        token, block = step
        first = block * (LANES * self.vectors) + lane
        loaded = [cute.make_rmem_tensor((VECTOR,), out.element_type) for _ in range(self.copies)]
        for i in cutlass.range_constexpr(self.copies):
            cute.autovec_copy(staged[None, i, stage], loaded[i])
        for v in cutlass.range_constexpr(self.vectors):
            total = [Float32(0.0) for _ in range(VECTOR)]
            for i in cutlass.range_constexpr(self.slots + self.adds):  # in the order of `SumSlots`
                values = in_fp32(loaded[i * self.vectors + v], self.dtype)
                total = [total[c] + values[c] for c in range(VECTOR)]
            if first + v * LANES < walk.vectors:
                sums = cute.make_rmem_tensor((VECTOR,), Float32)
                result = cute.make_rmem_tensor((VECTOR,), out.element_type)
                for c in cutlass.range_constexpr(VECTOR):
                    sums[c] = total[c]
                result.store(sums.load().to(out.element_type))
                cute.autovec_copy(result, cute.local_tile(out[token, None], (VECTOR,), (first + v * LANES,)))


def in_fp32(values, dtype: str) -> list[Float32]:
    """The values of a vector in fp32. The upper half of a word with two bf16 values needs one instruction."""
    if dtype != "bf16":
        return [Float32(values[c]) for c in range(VECTOR)]
    words = cute.recast_tensor(values, Int32)
    halves = []
    for w in range(VECTOR // 2):
        halves += [(words[w] << 16).bitcast(Float32), (words[w] & -65536).bitcast(Float32)]
    return halves


class Walk(NamedTuple):
    """The order of a warp's steps: by token, then by block of columns."""

    tokens: Int32
    stride: Int32  # from a token of the warp to the next
    vectors: Int32  # of a row
    blocks: Int32


@cute.jit
def advance(walk, step):
    """The step after a step."""
    token, block = step
    block += 1
    if block == walk.blocks:
        block = Int32(0)
        token += walk.stride
    return token, block
