"""The derivative of an activation in FP8 codes: an epilogue that quantizes by rows and by columns.

The accumulators are the gradient of an activation's result. The kernel writes the gradient dp of the preactivation by
rows and by columns, and the recomputed activation h by columns. Both are rounded to bf16 and then quantized, as if they
were written and read again. So codes and scales are those of `fusedmoe.formats.quantize`.

**Rows of a warpgroup.** A block of a column is 128 rows of one expert, of which the first is a multiple of 128 from the
expert's first row. In a tile of 256 x 128, each math warpgroup has 128 adjacent rows: a block of each of its columns,
and a block of each of its rows. So the two warpgroups exchange nothing.

**Steps.** A step has 128 rows and 32 columns. Its values replace its accumulators: dp stays in registers until the last
step, because the scale of a row needs all four. The steps are a loop, whose code is half as long as that of four steps
in line. Registers cannot be indexed at run time, so those of the accumulators and of dp shift after each step.

1. Largest magnitudes of the columns: of a thread's four rows, of the eight lanes of a warp that have other rows, and,
   in shared memory, of the four warps.
2. After a barrier of the warpgroup, one thread per column computes the scale.
3. After another one, all threads compute codes. They are transposed in shared memory: `stmatrix` stores pairs of codes
   of adjacent columns, so that a load returns 8 rows of a pair of columns. After a third barrier, a thread loads 16
   rows, and separates the two columns. So 8 lanes write 128 bytes of a column.

**Codes by rows** follow the last step. Each warp arranges whole rows in shared memory.

Rows after the expert's last one are zeros in the form by columns. The tail has tiles of its own, also for the blocks of
the form by columns that no expert has: see `DerivativeCodesRaggedM.scheduled_rows`.

Axes: R rows, P padded rows, I features of the activation, W features of the preactivation (I or 2 I).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float32, Int16, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warp
from cutlass.cutlass_dsl import T, dsl_user_op

from fusedmoe.kernels.sm90 import tiles
from fusedmoe.kernels.sm90.block_scaled import BlockScaledRaggedM
from fusedmoe.kernels.sm90.codes import (
    CODES,
    MAGNITUDES,
    encode_and_scale,
    fp32_pair,
    value_of_bits,
)
from fusedmoe.kernels.sm90.config import BLOCK_ROWS, EPILOGUE_COLUMNS, SCALE_BLOCK, SCALE_PITCH
from fusedmoe.kernels.sm90.epilogues import Backward, Block, Epilogue, Output, RowScaleGradient
from fusedmoe.kernels.sm90.gemm import BOX, MATH_WARPGROUPS, PRODUCER, STORE_BARRIER, VALUES, WARPGROUP, Tma
from fusedmoe.kernels.sm90.warps import LANES

WARPS = WARPGROUP // LANES
BLOCKS = SCALE_BLOCK // BLOCK_ROWS  # of 64 rows, per block of a column
STEPS = SCALE_BLOCK // EPILOGUE_COLUMNS  # per block of a row
GROUP = 8  # adjacent columns of which four lanes have a pair each
GROUPS = EPILOGUE_COLUMNS // GROUP  # of a step
PAIRS = EPILOGUE_COLUMNS // 2  # of columns of a step
VECTOR = 16  # codes of 16 bytes
CHUNK = 8  # pairs of codes in 16 bytes
STEP_WORDS = BLOCKS * VALUES  # of a thread: accumulators, or pairs of results
MOST_FORMS = 3  # by columns: gate, up and the activation


class Codes(NamedTuple):
    """Codes and scale of one form."""

    codes: cute.Tensor
    scale: cute.Tensor


class Forms(NamedTuple):
    """The results: dp by rows, (R, W), as pairs of two bytes; dp by columns, (W, P); and h by columns, (I, P)."""

    rows: Codes | None
    columns: Codes | None
    again: Codes | None


@dataclass(frozen=True)
class DerivativeCodes(Output):
    """The gradient of the preactivation in FP8, and the recomputed activation in FP8. Scales are powers of two."""

    rows: bool = True  # whether the gradient has a form by rows
    columns: bool = True  # whether it has one by columns
    again: bool = True  # whether the activation has one by columns, in E4M3
    element: str = "e4m3"  # of the gradient's codes, or "e5m2"

    @property
    def tensors(self) -> int:
        return 2 * (self.rows + self.columns + self.again)

    @property
    def suffix(self) -> str:
        forms = ((self.rows, "_rows"), (self.columns, "_columns"), (self.again, "_keep"))
        return f"_{self.element}" + "".join(text for on, text in forms if on)

    def boxes(self, formula):
        return 0

    def fake(self, kernel, rows):
        fake, pitch = cute.runtime.make_fake_tensor, lambda of: cute.sym_int64(divisibility=of)
        tensors = []
        if self.rows:
            scale = fake(Float32, (rows, cute.sym_int()), (1, pitch(SCALE_PITCH)), assumed_align=16)
            tensors += [kernel.fake_matrix(rows, BFloat16), scale]
        padded, blocks = cute.sym_int(divisibility=SCALE_BLOCK), cute.sym_int()
        for _ in range(self.columns + self.again):
            lines = cute.sym_int()
            tensors.append(fake(cutlass.Uint8, (lines, padded), (pitch(VECTOR), 1), assumed_align=16))
            tensors.append(fake(Float32, (lines, blocks), (1, pitch(SCALE_PITCH)), assumed_align=16))
        return tensors

    def parameter(self, kernel, *tensors):
        pairs = iter(zip(tensors[::2], tensors[1::2], strict=True))
        return Forms(*[Codes(*next(pairs)) if wanted else None for wanted in (self.rows, self.columns, self.again)])


@dataclass(frozen=True)
class DerivativeCodesRaggedM(BlockScaledRaggedM):
    """A ragged M kernel of FP8 codes, with the derivative of an activation in FP8."""

    def __post_init__(self) -> None:
        super().__post_init__()
        config, formula = self.config, self.epilogue.formula
        if (config.tile_m, config.tile_n) != (MATH_WARPGROUPS * SCALE_BLOCK, SCALE_BLOCK) or formula.interleaved:
            raise ValueError(
                f"derivative in FP8: expected [gate | up] and tiles of 256 x 128, got {formula.name} and {config.name}"
            )

    @property
    def sources(self) -> tuple[str, ...]:
        return *super().sources, __name__

    @property
    def codes(self) -> DerivativeCodes:
        """The output in FP8: the last one."""
        output = self.epilogue.outputs[-1]
        assert isinstance(output, DerivativeCodes)
        return output

    @property
    def forms(self) -> int:
        """Values with a form by columns."""
        return self.codes.columns * self.epilogue.formula.halves + self.codes.again

    @property
    def tile_kind(self) -> type:
        return tiles.TileWithBlock if self.forms else tiles.Tile

    @property
    def store_stages(self) -> int:
        """Buffers of 4 KiB: the codes by columns of a step, and one for magnitudes and factors. The codes by rows of a
        warp are in the former.
        """
        return MOST_FORMS + 1

    @property
    def registers(self) -> tuple[int, int]:
        return (24, 240)  # with 232, the derivative of GeGLU spills

    def scheduled_rows(self, rows, outputs):
        """The rows of the form by columns. So the tail has enough tiles for the blocks that no expert has, whose
        number depends on the splits.
        """
        forms = outputs[-1]
        columns = forms.columns if self.codes.columns else forms.again
        return columns.codes.shape[1] if const_expr(self.forms > 0) else rows

    # -- rows of a warpgroup

    def tiled_mma(self, a_major: Any, b_major: Any) -> cute.TiledMma:
        adjacent = cute.make_layout((BLOCK_ROWS, MATH_WARPGROUPS, BLOCKS), stride=(1, SCALE_BLOCK, BLOCK_ROWS))
        op = super().tiled_mma(a_major, b_major).op
        return cute.make_tiled_mma(op, (MATH_WARPGROUPS, 1, 1), (adjacent, self.config.tile_n, self.tile_k))

    def block_row(self, i, group):
        return group * SCALE_BLOCK + i * BLOCK_ROWS

    def factor_source(self, scales, tile, group, thread, env):
        return scales, tile, env.n, group, self.row_of(thread, 0) + tile.row % SCALE_PITCH

    def factors(self, source, i, j, stage):
        scales, tile, n, group, row = source
        factors = cute.make_rmem_tensor((2,), Float32)
        of_weight = scales.weight[j + self.first_weight_scale(tile, n, 0) % SCALE_PITCH, 0, stage]
        for h in range(2):
            factors[h] = scales.rows[i * BLOCK_ROWS + row + 8 * h, group, stage] * of_weight
        return factors

    @cute.jit
    def load_inputs(self, load, shared, rings, group):
        """As for other derivatives, with both blocks of 64 rows in each step."""
        state = pipeline.make_pipeline_state(PRODUCER, self.load_stages)
        turn = Int32(0)
        turn, tile = tiles.take(rings.tiles, turn, shared.slots)
        while tile.expert != tiles.END:
            shift = self.block_row(0, group)
            if tile.depth > 0 and shift < tile.rows:
                for j in cutlass.range(self.steps, unroll=1):
                    for i in cutlass.range_constexpr(BLOCKS):
                        view = cute.domain_offset((tile.row + shift + i * BLOCK_ROWS, 0, 0), load.tensor)
                        column = tile.column * self.steps + j
                        self.load_step(Tma(load.atom, view), shared.boxes, rings.inputs, state, column, group)
                        state.advance()
            turn, tile = tiles.take(rings.tiles, turn, shared.slots)

    # -- results

    @cute.jit
    def finish(self, acc, tile, consumer, inputs, env):
        """Accumulators to results, 32 columns of 128 rows at a time."""
        shift = self.block_row(0, consumer.group)
        if shift < tile.rows:
            inputs = self.finish_block_of_rows(acc, tile, shift, consumer, inputs, env)
        return inputs

    @cute.jit
    def finish_block_of_rows(self, acc, tile, shift, consumer, inputs, env):
        """The results of a warpgroup's 128 rows, in a loop over the steps."""
        blocks = self.blocks_of_rows(acc, tile, shift, consumer, env)
        sums = cute.make_rmem_tensor((BLOCKS * 2,), Float32)
        largest = cute.make_rmem_tensor((2 * BLOCKS * 2,), Int32)
        sums.fill(0.0)
        largest.fill(0)
        pool = self.pool_of(acc)
        for j in cutlass.range(STEPS, unroll=1):
            words, inputs = self.step(pool, j, blocks, sums, largest, inputs, env)
            self.put_last(pool, words)
        self.finish_rows(pool, blocks, sums, largest, env)
        return inputs

    def pool_of(self, acc):
        """The accumulators, in the order of the steps. The words of each step replace those of its accumulators."""
        pool = cute.make_rmem_tensor((STEPS * STEP_WORDS,), Int32)
        for j in range(STEPS):
            for i in range(BLOCKS):
                for v in range(VALUES):
                    pool[(j * BLOCKS + i) * VALUES + v] = acc[(i * STEPS + j) * VALUES + v].bitcast(Int32)
        return pool

    def put_last(self, pool, words) -> None:
        """Remove the first step of the pool, and append words of a step: registers cannot be indexed at run time."""
        kept = (STEPS - 1) * STEP_WORDS
        for k in range(kept):
            pool[k] = pool[k + STEP_WORDS]
        for k, word in enumerate(words):
            pool[kept + k] = word

    def blocks_of_rows(self, acc, tile, shift, consumer, env):
        """A warpgroup's blocks of 64 rows."""
        lane, warp_row = consumer.thread % LANES, consumer.thread // LANES * 16
        top = tile.row + shift
        # the tail may have tiles for blocks of columns alone
        valid = cutlass.min(tile.rows - shift, env.rows - top)
        blocks = []
        for i in range(BLOCKS):
            left = cutlass.min(valid - i * BLOCK_ROWS, BLOCK_ROWS)
            live = tile.depth > 0
            block = Block(acc, 0, consumer, tile, top + i * BLOCK_ROWS, left, lane, warp_row, live)
            blocks.append(block._replace(scales=self.epilogue.formula.row_scales(block, env)))
        return blocks

    def step(self, pool, j, blocks, sums, largest, inputs, env):
        """The results of step ``j``, whose accumulators are the first ones in the pool. Return the words of the
        gradient, and the state of the ring of inputs.
        """
        formula, codes = self.epilogue.formula, self.codes
        # words, by block of 64 rows
        values: list[list[list[Int32]]] = [[] for _ in range(formula.halves + codes.again)]
        for i, block in enumerate(blocks):
            acc = [pool[i * VALUES + v].bitcast(Float32) for v in range(VALUES)]
            found = formula.values(self, block._replace(acc=acc), env, 0, block.tile.column * self.steps + j, inputs)
            for output in self.epilogue.outputs[:-1]:
                sums[2 * i], sums[2 * i + 1] = output.add([sums[2 * i], sums[2 * i + 1]], found)
            inputs = self.release_step(block, inputs)
            for value, packed in zip(values, (*found.parts, found.result), strict=False):
                words = cute.recast_tensor(packed, Int32)
                value.append([nan_of_infinities(words[w]) for w in range(VALUES // 2)])
        masks = [self.masks(block) for block in blocks]
        columns = self.largest(values, largest, masks)
        if self.forms:
            skipped = 0 if codes.columns else formula.halves
            self.store_columns(values[skipped:], columns[skipped:], masks, blocks[0], j, env)
        kept = [values[half][i][w] for half in range(formula.halves) for i in range(BLOCKS) for w in range(VALUES // 2)]
        if not codes.rows:
            kept = []
        return kept + [Int32(0)] * (STEP_WORDS - len(kept)), inputs

    def finish_rows(self, pool, blocks, sums, largest, env):
        """The gradient by rows, and the row scale's gradient."""
        formula, consumer = self.epilogue.formula, blocks[0].consumer
        if self.codes.rows:
            if self.forms:
                self.wait_for_warpgroup(consumer)  # the buffers have been read
            codes, scale = env.outputs[-1].rows
            for half in range(formula.halves):
                for i, block in enumerate(blocks):
                    first = (half * BLOCKS + i) * (VALUES // 2)
                    steps = [[pool[j * STEP_WORDS + first + w] for w in range(VALUES // 2)] for j in range(STEPS)]
                    of_rows = [largest[(half * BLOCKS + i) * 2 + h] for h in range(2)]
                    rows = [self.row_codes(steps, of_rows[h], block, half, h, scale, env) for h in range(2)]
                    self.store_rows(rows, block, half, codes, env)
        for output in self.epilogue.outputs[:-1]:
            for i, block in enumerate(blocks):
                output.finish(self, block, env, env.outputs[0], [sums[2 * i], sums[2 * i + 1]])

    def release_step(self, block, inputs):
        """Release the inputs of a step: see `RaggedM.release`."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        return self.release(block, inputs)

    def wait_for_warpgroup(self, consumer) -> None:
        cute.arch.barrier(barrier_id=STORE_BARRIER + consumer.group, number_of_threads=WARPGROUP)

    def masks(self, block):
        """For each of a thread's two rows: the bits of a pair of magnitudes, or none if the expert has no such row."""
        rows = [block.warp_row + block.lane // 4 + 8 * h for h in range(2)]
        return [cutlass.select_(row < block.valid, Int32(MAGNITUDES), Int32(0)) for row in rows]

    def largest(self, values, rows, masks):
        """The largest magnitudes of a step. Of the columns of each value: by group of 8 columns, in pairs. Of the rows
        of the gradient: those before this step are in ``rows``, and are replaced. ``masks`` are those of the rows.
        """
        columns = []
        for m, value in enumerate(values):
            found = [[value[i][w] & masks[i][w % 2] for w in range(VALUES // 2)] for i in range(BLOCKS)]
            of_value = []
            for q in range(GROUPS):
                pairs = [found[i][2 * q + h] for i in range(BLOCKS) for h in range(2)]
                of_value.append(larger(larger(pairs[0], pairs[1]), larger(pairs[2], pairs[3])))
                if self.codes.rows and m < self.epilogue.formula.halves:
                    for i in range(BLOCKS):
                        for h in range(2):
                            at = (m * BLOCKS + i) * 2 + h
                            rows[at] = larger(rows[at], found[i][2 * q + h])
            columns.append(of_value)
        return columns

    # -- by columns

    def scratch(self, consumer) -> cute.Pointer:
        """The warpgroup's buffers in shared memory, without their swizzle."""
        return cute.recast_ptr(consumer.boxes.iterator) + consumer.group * (self.store_stages * BOX)

    @cute.jit
    def store_columns(self, values, largest, masks, block, j, env):
        """Write a step's codes and scales by columns."""
        consumer, tile, lane, forms = block.consumer, block.tile, block.lane, env.outputs[-1]
        count: cutlass.Constexpr[int] = len(values)
        warp_idx = consumer.thread // LANES
        scratch = self.scratch(consumer)
        found = cute.recast_ptr(scratch + MOST_FORMS * BOX, dtype=Int32)
        factors = cute.recast_ptr(found + count * WARPS * PAIRS, dtype=BFloat16)
        inside = tile.column < self.tiles_n(env.n)
        column_block = tile.block + consumer.group

        # each lane gets the pair of columns of its number; lanes that differ in bit 2 have the same
        pair = lane // 16 % 2 * 8 + lane // 8 % 2 * 4 + lane % 4
        for m in cutlass.range_constexpr(count):
            whole = self.over_rows(largest[m], lane)
            cute.make_tensor(found + (m * WARPS + warp_idx) * PAIRS + pair, cute.make_layout((1,)))[0] = whole
        self.wait_for_warpgroup(consumer)

        if warp_idx < count:  # a warp has the columns of a value, a lane has one
            halves = cute.make_tensor(
                cute.recast_ptr(found + warp_idx * (WARPS * PAIRS), dtype=Int16),
                cute.make_layout((EPILOGUE_COLUMNS, WARPS)),
            )
            bits = Int32(halves[lane, 0])
            for w in cutlass.range_constexpr(1, WARPS):
                bits = cutlass.max(bits, Int32(halves[lane, w]))
            amax = value_of_bits(bits, BFloat16)
            column = (tile.column * self.steps + j) * EPILOGUE_COLUMNS + lane
            encode = Float32(0.0)
            if const_expr(self.codes.columns):
                if warp_idx < self.epilogue.formula.halves:
                    encode, stored = encode_and_scale(amax, self.codes.element, True)
                    if inside and column_block < forms.columns.scale.shape[1]:
                        forms.columns.scale[warp_idx * env.n + column, column_block] = stored
            if const_expr(self.codes.again):
                if warp_idx == count - 1:
                    encode, stored = encode_and_scale(amax, "e4m3", True)
                    if inside and column_block < forms.again.scale.shape[1]:
                        forms.again.scale[column, column_block] = stored
            # a power of two; those of the four pairs of a thread are adjacent
            at = warp_idx * EPILOGUE_COLUMNS + lane % GROUP // 2 * GROUP + lane // GROUP * 2 + lane % 2
            cute.make_tensor(factors + at, cute.make_layout((1,)))[0] = encode.to(BFloat16)
        self.wait_for_warpgroup(consumer)

        for m in cutlass.range_constexpr(count):
            _, element, _ = self.form(m, count, forms, env)
            buffer, of_value = scratch + m * BOX, factors + m * EPILOGUE_COLUMNS
            self.put_columns(values[m], of_value, buffer, masks, warp_idx, lane, element)
        self.wait_for_warpgroup(consumer)
        for m in cutlass.range_constexpr(count):
            to, _, first = self.form(m, count, forms, env)
            if inside and column_block < to.scale.shape[1]:
                column = first + (tile.column * self.steps + j) * EPILOGUE_COLUMNS
                self.take_columns(to.codes, scratch + m * BOX, consumer.thread, column, column_block)

    def form(self, m: int, count: int, forms, env):
        """Tensors, element and first column of the ``m``-th value of ``count`` that have a form by columns."""
        if self.codes.again and m == count - 1:
            return forms.again, "e4m3", 0
        return forms.columns, self.codes.element, m * env.n

    @cute.jit
    def over_rows(self, largest, lane):
        """The largest of the 8 lanes that have other rows of the same columns: zero if all are NaN. A lane gets one of
        its 4 pairs.
        """
        for step in cutlass.range_constexpr(2):
            bit, half = 16 >> step, len(largest) // 2
            upper = lane & bit != 0
            for q in cutlass.range_constexpr(half):
                given = cutlass.select_(upper, largest[q], largest[q + half])
                kept = cutlass.select_(upper, largest[q + half], largest[q])
                largest[q] = larger(kept, cute.arch.shuffle_sync_bfly(given, bit))
            largest = largest[:half]
        return larger(larger(largest[0], cute.arch.shuffle_sync_bfly(largest[0], 4)), Int32(0))

    @cute.jit
    def put_columns(self, words, factors, buffer, masks, warp_idx, lane, element: cutlass.Constexpr[str]):
        """Write a step's codes to shared memory.

        A row of ``stmatrix`` is a pair of columns and 8 rows: 16 bytes, the chunk ``8 i + 2 warp + h`` of that pair's
        16 chunks. Chunks are swizzled so that neither stores nor loads have bank conflicts.
        """
        of_pairs = cute.make_rmem_tensor((GROUPS,), Int32)
        at = cute.recast_ptr((factors + lane % 4 * GROUP).align(16), dtype=Int32)
        cute.autovec_copy(cute.make_tensor(at, cute.make_layout((GROUPS,))), of_pairs)
        codes = cute.make_rmem_tensor((BLOCKS * GROUPS,), Int32)
        for i in cutlass.range_constexpr(BLOCKS):
            of_words = [of_pairs[w // 2] for w in range(VALUES // 2)]
            of_block = encoded([words[i][w] for w in range(VALUES // 2)], of_words, element)
            mask = cute.arch.prmt(masks[i][0], masks[i][1], 0x4400)  # bytes of all bits
            for q in cutlass.range_constexpr(GROUPS):
                codes[i * GROUPS + q] = of_block[q] & mask
        pairs = cute.recast_tensor(codes, BFloat16)
        pair, h = lane // 8 * 4 + lane % 8 // 2, lane % 2
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), BFloat16)
        for i in cutlass.range_constexpr(BLOCKS):
            chunk = 8 * i + ((2 * warp_idx + h) ^ (2 * (pair % 4)) ^ i)
            self.put_matrices(atom, pairs, i, buffer + (pair * 16 + chunk) * CHUNK)

    def put_matrices(self, atom, pairs, i: int, at) -> None:
        """Store the ``i``-th four registers of pairs of codes as four matrices; ``at`` is this lane's row."""
        source = cute.make_tensor(pairs.iterator + i * CHUNK, cute.make_layout((CHUNK,)))
        cute.copy(atom, source, cute.make_tensor(at.align(16), cute.make_layout((CHUNK,))))

    @cute.jit
    def take_columns(self, codes, buffer, thread, first, block):
        """Write 16 rows of a pair of columns: each thread has its own."""
        pair, part = thread // 8, thread % 8
        chunk = 8 * (part // 4) + ((2 * (part % 4)) ^ (2 * (pair % 4)) ^ (part // 4))
        words = cute.make_rmem_tensor((8,), Int32)
        for h in cutlass.range_constexpr(2):
            at = (buffer + (pair * 16 + (chunk ^ h)) * CHUNK).align(16)
            source = cute.make_tensor(cute.recast_ptr(at, dtype=Int32), cute.make_layout((4,)))
            cute.autovec_copy(source, cute.make_tensor(words.iterator + 4 * h, cute.make_layout((4,))))
        for e in cutlass.range_constexpr(2):
            column = cute.make_rmem_tensor((4,), Int32)
            for w in cutlass.range_constexpr(4):
                column[w] = cute.arch.prmt(words[2 * w], words[2 * w + 1], (0x6420, 0x7531)[e])
            at = block * (SCALE_BLOCK // VECTOR) + part
            to = cute.local_tile(codes[first + 2 * pair + e, None], (VECTOR,), (at,))
            cute.autovec_copy(cute.recast_tensor(column, cutlass.Uint8), to)

    # -- by rows

    @cute.jit
    def row_codes(self, steps, largest, block, half: cutlass.Constexpr[int], h: cutlass.Constexpr[int], scale, env):
        """Write the scale of this thread's row ``h``; return the codes of its values: a pair of each 8 columns."""
        for step in cutlass.range_constexpr(2):
            largest = larger(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
        amax = value_of_bits(larger(largest, largest >> 16) & 0xFFFF, BFloat16)
        encode, stored = encode_and_scale(amax, self.codes.element, True)
        row = block.warp_row + block.lane // 4 + 8 * h
        if block.lane % 4 == 0 and row < block.valid and block.tile.column < self.tiles_n(env.n):
            scale[block.top + row, half * (env.n // SCALE_BLOCK) + block.tile.column] = stored
        words = [steps[j][2 * q + h] for j in range(STEPS) for q in range(GROUPS)]
        return cute.recast_tensor(encoded(words, [pair_of(encode)] * len(words), self.codes.element), BFloat16)

    @cute.jit
    def store_rows(self, rows, block, half: cutlass.Constexpr[int], codes, env):
        """Write the codes of a warp's 16 rows.

        A row of ``stmatrix`` has 16 columns of one row: pairs of codes of two groups of 8 columns in turn.
        """
        consumer, lane = block.consumer, block.lane
        buffer = self.scratch(consumer) + consumer.thread // LANES * (16 * SCALE_BLOCK // 2)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
        cute.arch.sync_warp()  # all lanes have read the rows before
        for h in cutlass.range_constexpr(2):
            for b in cutlass.range_constexpr(2):
                at = (8 * h + lane % 8) * 8 + ((4 * b + lane // 8) ^ (lane % 8))
                self.put_matrices(atom, rows[h], b, buffer + at * CHUNK)
        cute.arch.sync_warp()
        chunk = lane % 8
        inside = block.tile.column < self.tiles_n(env.n)
        first = (half * env.n + block.tile.column * SCALE_BLOCK) // VECTOR
        for k in cutlass.range_constexpr(16 * 8 // LANES):
            row = k * 4 + lane // 8
            words, arranged = cute.make_rmem_tensor((4,), Int32), cute.make_rmem_tensor((4,), Int32)
            at = (buffer + (row * 8 + (chunk ^ (row % 8))) * CHUNK).align(16)
            cute.autovec_copy(cute.make_tensor(cute.recast_ptr(at, dtype=Int32), cute.make_layout((4,))), words)
            for e in cutlass.range_constexpr(2):
                for w in cutlass.range_constexpr(2):
                    arranged[2 * e + w] = cute.arch.prmt(words[2 * w], words[2 * w + 1], (0x5410, 0x7632)[e])
            if block.warp_row + row < block.valid and inside:
                to = cute.local_tile(codes[block.top + block.warp_row + row, None], (CHUNK,), (first + chunk,))
                cute.autovec_copy(cute.recast_tensor(arranged, BFloat16), to)


@dsl_user_op
def nan_of_infinities(word: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """A pair of bf16 values with NaN in place of infinities: ``0 * x + x``."""
    operands = [v.ir_value(loc=loc, ip=ip) for v in (Int32(word), Int32(0))]
    return Int32(llvm.inline_asm(T.i32(), operands, "fma.rn.bf16x2 $0, $1, $2, $1;", "=r,r,r", loc=loc, ip=ip))


@dsl_user_op
def larger(a: Int32, b: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The larger of each of two bf16 values, or the one that is not NaN."""
    operands = [v.ir_value(loc=loc, ip=ip) for v in (Int32(a), Int32(b))]
    return Int32(llvm.inline_asm(T.i32(), operands, "max.bf16x2 $0, $1, $2;", "=r,r,r", loc=loc, ip=ip))


def pair_of(factor):
    """A power of two as a pair of bf16 values."""
    bits = factor.bitcast(Int32)
    return bits | (bits >> 16)


@cute.jit
def encoded(words, factors, element: cutlass.Constexpr[str]):
    """The codes of pairs of bf16 values times pairs of factors, two pairs per word. The factors are powers of two, so
    products in bf16 are exact, or too small for a code other than zero.
    """
    count: cutlass.Constexpr[int] = len(words)
    values, scaled = (cute.make_rmem_tensor((count,), Int32) for _ in range(2))
    for w in cutlass.range_constexpr(count):
        values[w], scaled[w] = words[w], factors[w]
    products = cute.recast_tensor(values, BFloat16)
    products.store(products.load() * cute.recast_tensor(scaled, BFloat16).load())
    wide = cute.make_rmem_tensor((2 * count,), Float32)
    for w in cutlass.range_constexpr(count):
        wide[2 * w], wide[2 * w + 1] = fp32_pair(values[w], BFloat16)
    codes = cute.make_rmem_tensor((2 * count,), CODES[element])
    codes.store(wide.load().to(CODES[element]))
    return cute.recast_tensor(codes, Int32)


def derivative_codes(kind: str, codes: DerivativeCodes, *, clamped: bool = False, row_scale: bool = False) -> Epilogue:
    """The gradient of the preactivation and the activation, in FP8; ``row_scale`` adds the row scale's gradient."""
    summed = (RowScaleGradient(),) if row_scale else ()
    return Epilogue(Backward(kind, clamped, False, row_scale), (*summed, codes))
