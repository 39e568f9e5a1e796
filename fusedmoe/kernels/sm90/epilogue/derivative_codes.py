"""The derivative of an activation in FP8 codes: an epilogue that quantizes by rows and by columns.

The accumulators are the gradient of an activation's result. The kernel writes the gradient dp of the preactivation by
rows and by columns, and the recomputed activation h by columns. Both are rounded to bf16 and then quantized, as if they
were written and read again. So codes and scales are those of `fusedmoe.numerics.formats.quantize`.

**Rows of a warpgroup.** A block of a column is 128 rows of one expert, of which the first is a multiple of 128 from the
expert's first row. In a tile of 256 x 128, each math warpgroup has 128 adjacent rows: a block of each of its columns,
and a block of each of its rows. So the two warpgroups exchange nothing.

**Steps.** A step has 128 rows and 32 columns. Its values replace its accumulators: dp stays in registers until the last
step, because the scale of a row needs all four. The steps are a loop, whose code is half as long as that of four steps
in line. Registers cannot be indexed at run time, so those of the accumulators and of dp shift after each step.

1. A step takes both stages of its ring of inputs: the preactivation of 64 rows each.
2. Largest magnitudes of the columns: of a thread's four rows, of the eight lanes of a warp that have other rows, and,
   in shared memory, of the four warps.
3. After a barrier of the warpgroup, each warp computes the factors of all columns for itself.
4. All threads compute codes. They are transposed in shared memory: `stmatrix` stores pairs of codes of adjacent
   columns, so that a load returns 8 rows of a pair of columns. After a second barrier, a thread loads 16 rows, and
   separates the two columns. So 8 lanes write 128 bytes of a column.

**Codes by rows** follow the last step. Each warp arranges whole rows in shared memory.

**Instructions.** No product overlaps this epilogue, and each scheduler has only two math warps. So the rare cases,
infinities and rows after the expert's last one, have code of their own, which replaces values before they are used.
Addresses are sums of 32-bit numbers, up to the last product.

Rows after the expert's last one are zeros in the form by columns. The tail has tiles of its own, also for the blocks of
the form by columns that no expert has: see `DerivativeCodes.scheduled_rows`.

| barrier | arrives | waits |
|---|---|---|
| inputs of warpgroup g are full, one stage per block of 64 rows | TMA of warp 10 + g (`load_inputs`) | `take` |
| inputs of warpgroup g are empty | `release_step`, once the values are computed | warp 10 + g |
| `STORE_BARRIER` + g, first of a step | the warpgroup: magnitudes of all warps are in shared memory | the same |
| `STORE_BARRIER` + g, second of a step | the warpgroup: codes by columns are in shared memory | the same |
| `STORE_BARRIER` + g, after the last step | the warpgroup: buffers have been read, for codes by rows | the same |

Run: tests/unit/test_kernels_compile.py, tests/gpu/test_hopper_codes.py; ``python -m benchmarks --only fp8``.

Axes: R rows, P padded rows, I features of the activation, W features of the preactivation (I or 2 I).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warp
from cutlass.cutlass_dsl import T, dsl_user_op

from fusedmoe.kernels.device.codes import (
    MAGNITUDES,
    MOST_EXPONENT,
    NEGATIVES,
    encoded,
    fp32_pair,
    larger,
    max_of_pairs,
    nan_of_infinities,
)
from fusedmoe.kernels.device.warps import LANES
from fusedmoe.kernels.sm90.epilogue.outputs import Backward, Block, BlockOutput, Epilogue, RowScaleGradient
from fusedmoe.kernels.sm90.gemm import scheduler
from fusedmoe.kernels.sm90.gemm.common import BOX, PRODUCER, STORE_BARRIER, VALUES, WARPGROUP, Tma
from fusedmoe.kernels.sm90.tiles.config import BLOCK_ROWS, EPILOGUE_COLUMNS, SCALE_BLOCK, SCALE_PITCH

WARPS = WARPGROUP // LANES
BLOCKS = SCALE_BLOCK // BLOCK_ROWS  # of 64 rows, per block of a column
STEPS = SCALE_BLOCK // EPILOGUE_COLUMNS  # per block of a row
GROUP = 8  # adjacent columns of which four lanes have a pair each
GROUPS = EPILOGUE_COLUMNS // GROUP  # of a step
PAIRS = EPILOGUE_COLUMNS // 2  # of columns of a step
VECTOR = 16  # codes of 16 bytes
CHUNK_BYTES = 16  # of shared memory, swizzled as a whole
CHUNK = 8  # pairs of codes, or bf16 values, in 16 bytes
BOX_BYTES = 2 * BOX
WORDS = VALUES // 2  # pairs of a thread's values of a box
VALUE_WORDS = BLOCKS * WORDS  # of a step: those of the first 64 rows, then those of the others
STEP_WORDS = BLOCKS * VALUES  # of a thread: accumulators, or pairs of results
MOST_FORMS = 3  # by columns: gate, up and the activation
FOUND_BYTES = WARPS * PAIRS * 4 + 64  # of the magnitudes of a value's columns; those of the next one are in other banks
# pairs of bf16 values: see `factor_and_scales`
ONES_BELOW_INFINITY = 0x00800080  # added to an infinity, a negative integer
ROUND_UP = 0x001F001F  # a significand above 1.75 to the next power of two
EXPONENTS = 0x7F807F80
LARGEST_POWER = 0x7F007F00  # 2**127
LEAST = {element: exponent << 7 | exponent << 23 for element, exponent in MOST_EXPONENT.items()}


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
class DerivativeCodes(BlockOutput):
    """The gradient of the preactivation in FP8, and the recomputed activation in FP8. Scales are powers of two."""

    rows: bool = True  # whether the gradient has a form by rows
    columns: bool = True  # whether it has one by columns
    again: bool = True  # whether the activation has one by columns, in E4M3
    element: str = "e4m3"  # of the gradient's codes, or "e5m2"

    @property
    def tensors(self) -> int:
        return 2 * (self.rows + self.columns + self.again)

    @property
    def name(self) -> str:
        forms = ((self.rows, "_rows"), (self.columns, "_columns"), (self.again, "_keep"))
        return f"_{self.element}" + "".join(text for on, text in forms if on)

    @property
    def buffers(self) -> int:
        """Of 4 KiB: the codes by columns of a step, or by rows of a warp, and one for magnitudes and factors."""
        return MOST_FORMS + 1

    def forms(self, formula) -> int:
        """Values with a form by columns."""
        return self.columns * formula.halves + self.again

    def places_blocks(self, formula):
        return self.forms(formula) > 0

    def scheduled_rows(self, rows, parameter):
        """The rows of the form by columns: the tail has tiles for the blocks that no expert has, for any splits."""
        form = parameter.columns if self.columns else parameter.again
        return rows if form is None else form.codes.shape[1]

    def load_inputs(self, kernel, load, shared, rings, group):
        Blocks(kernel, self).load_inputs(load, shared, rings, group)

    def finish_tile(self, kernel, acc, tile, consumer, inputs, env):
        return Blocks(kernel, self).finish_tile(acc, tile, consumer, inputs, env)

    def boxes(self, formula):
        return 0

    def column_bytes(self, formula):
        return (self.rows + self.columns) * formula.halves + self.again

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
class Blocks:
    """The epilogue of a kernel whose last output is ``codes``."""

    kernel: Any
    codes: DerivativeCodes

    @property
    def formula(self) -> Backward:
        formula = self.kernel.epilogue.formula
        assert isinstance(formula, Backward)
        return formula

    @property
    def forms(self) -> int:
        """Values with a form by columns."""
        return self.codes.forms(self.formula)

    @property
    def gradients(self) -> int:
        """Values with a form by columns before the activation: those of the gradient, or none."""
        return self.forms - self.codes.again

    @property
    def values(self) -> int:
        """Values of which there is any form: gate, up and the activation."""
        return (self.codes.rows or self.codes.columns) * self.formula.halves + self.codes.again

    @cute.jit
    def load_inputs(self, load, shared, rings, group):
        """As for other derivatives, with both blocks of 64 rows in each step."""
        state = pipeline.make_pipeline_state(PRODUCER, self.kernel.load_stages)
        turn = Int32(0)
        turn, tile = scheduler.take(rings.tiles, turn, shared.slots)
        while tile.expert != scheduler.END:
            shift = self.kernel.block_row(0, group)
            if tile.depth > 0 and shift < tile.rows:
                for j in cutlass.range(self.kernel.steps, unroll=1):
                    for i in cutlass.range_constexpr(BLOCKS):
                        view = cute.domain_offset((tile.row + shift + i * BLOCK_ROWS, 0, 0), load.tensor)
                        column = tile.column * self.kernel.steps + j
                        self.kernel.load_step(Tma(load.atom, view), shared.boxes, rings.inputs, state, column, group)
                        state.advance()
            turn, tile = scheduler.take(rings.tiles, turn, shared.slots)

    # -- results

    @cute.jit
    def finish_tile(self, acc, tile, consumer, inputs, env):
        """Accumulators to results, 32 columns of 128 rows at a time."""
        shift = self.kernel.block_row(0, consumer.group)
        if shift < tile.rows:
            inputs = self.finish_block_of_rows(acc, tile, shift, consumer, inputs, env)
        return inputs

    @cute.jit
    def finish_block_of_rows(self, acc, tile, shift, consumer, inputs, env):
        """The results of a warpgroup's 128 rows, in a loop over the steps."""
        block = self.block_of_rows(tile, shift, consumer, env)
        sums = cute.make_rmem_tensor((BLOCKS * 2,), Float32)
        largest = cute.make_rmem_tensor((2 * BLOCKS * 2,), Int32)
        sums.fill(0.0)
        largest.fill(0)
        pool = self.pool_of(acc)
        for j in cutlass.range(STEPS, unroll=1):
            words, inputs = self.step(pool, j, block, sums, largest, inputs, env)
            self.put_last(pool, words)
        self.finish_rows(pool, block, sums, largest, env)
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

    def block_of_rows(self, tile, shift, consumer, env):
        """A warpgroup's 128 rows, as two blocks of 64."""
        lane, warp_row = consumer.thread % LANES, consumer.thread // LANES * 16
        top = tile.row + shift
        # the tail may have tiles for blocks of columns alone
        valid = cutlass.min(tile.rows - shift, env.rows - top)
        block = Block(None, 0, consumer, tile, top, valid, lane, warp_row, tile.depth > 0)
        formula = self.formula
        scales = [formula.row_scales(block._replace(top=top + i * BLOCK_ROWS), env) for i in range(BLOCKS)]
        return block._replace(scales=scales)

    def step(self, pool, j, block, sums, largest, inputs, env):
        """The results of step ``j``, whose accumulators are the first ones in the pool. Return the words of the
        gradient, and the state of the ring of inputs.
        """
        formula, codes = self.formula, self.codes
        preactivation = self.take(block, inputs)
        values = cute.make_rmem_tensor((self.values * VALUE_WORDS,), Int32)
        for i in range(BLOCKS):
            acc = [pool[i * VALUES + v].bitcast(Float32) for v in range(VALUES)]
            x = [self.unpacked(preactivation, half, i) for half in range(formula.halves)]
            found = formula.values_of(self.kernel, block._replace(acc=acc, scales=block.scales[i]), env, 0, x)
            for output in self.kernel.epilogue.outputs[:-1]:
                sums[2 * i], sums[2 * i + 1] = output.add([sums[2 * i], sums[2 * i + 1]], found)
            if i == 0:
                inputs = self.release_step(block, inputs)
            packed = (*found.parts,) if codes.rows or codes.columns else ()
            for m, value in enumerate((*packed, found.result) if codes.again else packed):
                words = cute.recast_tensor(value, Int32)
                for w in range(WORDS):
                    values[m * VALUE_WORDS + i * WORDS + w] = words[w]
        columns = self.largest(values, largest, block)
        if self.forms:
            self.store_columns(values, columns, block, j, env)
        kept = formula.halves * VALUE_WORDS if codes.rows else 0
        return [values[k] if k < kept else Int32(0) for k in range(STEP_WORDS)], inputs

    @cute.jit
    def take(self, block, inputs):
        """Wait for a step's boxes of the preactivation, and read this thread's words of them; zeros in the tail."""
        halves: cutlass.Constexpr[int] = self.formula.halves
        values = cute.make_rmem_tensor((BLOCKS * halves * VALUES,), BFloat16)
        if block.live:
            consumer = block.consumer
            row = consumer.thread // LANES * 16 + block.lane % 16  # of 64 bytes, whose chunks of 16 are swizzled
            first = row * 64 + (block.lane // 16 ^ row // 2 % 4) * CHUNK_BYTES
            first += (
                self.address(consumer.boxes)
                + self.kernel.read_box(consumer.group * self.kernel.load_stages, 0) * BOX_BYTES
            )
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), BFloat16)
            for i in cutlass.range_constexpr(BLOCKS):
                consumer.inputs.consumer_wait(self.stage(inputs, consumer.group, i))
                for half in cutlass.range_constexpr(halves):
                    for c in cutlass.range_constexpr(2):
                        box = i * halves + half
                        source = pointer(BFloat16, (first ^ (c * 2 * CHUNK_BYTES)) + box * BOX_BYTES)
                        to = values.iterator + (box * 2 + c) * CHUNK
                        layout = cute.make_layout((CHUNK,))
                        cute.copy(atom, cute.make_tensor(source, layout), cute.make_tensor(to, layout))
        else:
            values.fill(0.0)
        return cute.recast_tensor(values, Int32)

    def unpacked(self, words, half: int, i: int):
        """The fp32 values of a box of the preactivation."""
        first = (i * self.formula.halves + half) * WORDS
        return [t for w in range(WORDS) for t in fp32_pair(words[first + w], BFloat16)]

    def stage(self, inputs, group, i: int):
        """The ``i``-th stage of a step. A step has all stages of the ring, so the first one is that of block 0."""
        assert self.kernel.load_stages == BLOCKS
        return pipeline.PipelineState(
            inputs.stages, inputs.count, Int32(i) + group * self.kernel.load_stages, inputs.phase
        )

    @cute.jit
    def release_step(self, block, inputs):
        """Release the inputs of a step: see `RaggedM.release`. Return the state of those of the next one."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        phase = inputs.phase
        if block.live:
            for i in cutlass.range_constexpr(BLOCKS):
                block.consumer.inputs.consumer_release(self.stage(inputs, block.consumer.group, i))
            phase = phase ^ 1
        return pipeline.PipelineState(inputs.stages, inputs.count, inputs.index, phase)

    def wait_for_warpgroup(self, consumer) -> None:
        cute.arch.barrier(barrier_id=STORE_BARRIER + consumer.group, number_of_threads=WARPGROUP)

    # -- largest magnitudes

    @cute.jit
    def largest(self, values, rows, block):
        """The largest magnitudes of a step. Of the columns: of a thread's rows, by value and group of 8 columns, in
        pairs. Of the rows of the gradient: those before this step are in ``rows``, and are replaced.

        Infinities become NaN, and rows after the expert's last one zeros. Both are rare.
        """
        before = cute.make_rmem_tensor_like(rows)
        for k in cutlass.range_constexpr(cute.size(rows)):
            before[k] = rows[k]
        columns = cute.make_rmem_tensor((self.values * GROUPS,), Int32)
        self.find_largest(values, columns, rows)
        whole = columns[0]
        for k in cutlass.range_constexpr(1, self.values * GROUPS):
            whole = larger(whole, columns[k])
        infinite = (whole + ONES_BELOW_INFINITY) & NEGATIVES != 0
        if infinite or (block.live and block.valid < SCALE_BLOCK):
            for i in cutlass.range_constexpr(BLOCKS):
                for h in cutlass.range_constexpr(2):
                    row = i * BLOCK_ROWS + block.warp_row + block.lane // 4 + 8 * h
                    mask = cutlass.select_(row < block.valid, Int32(-1), Int32(0))
                    for m in cutlass.range_constexpr(self.values):
                        for q in cutlass.range_constexpr(GROUPS):
                            at = m * VALUE_WORDS + i * WORDS + 2 * q + h
                            values[at] = nan_of_infinities(values[at]) & mask
            for k in cutlass.range_constexpr(cute.size(rows)):
                rows[k] = before[k]
            self.find_largest(values, columns, rows)
        return columns

    def find_largest(self, values, columns, rows) -> None:
        for m in range(self.values):
            for q in range(GROUPS):
                found = [values[m * VALUE_WORDS + i * WORDS + 2 * q + h] for i in range(BLOCKS) for h in range(2)]
                pairs = [word & MAGNITUDES for word in found]
                columns[m * GROUPS + q] = larger(larger(pairs[0], pairs[1]), larger(pairs[2], pairs[3]))
                if self.codes.rows and m < self.formula.halves:
                    for k, pair in enumerate(pairs):
                        rows[m * BLOCKS * 2 + k] = larger(rows[m * BLOCKS * 2 + k], pair)

    # -- by columns

    def address(self, boxes):
        """The address of boxes in shared memory, without their swizzle."""
        return cute.recast_ptr(boxes.iterator).toint()

    def scratch(self, consumer):
        """The address of the warpgroup's buffers in shared memory."""
        return self.address(consumer.boxes) + consumer.group * (self.codes.buffers * BOX_BYTES)

    @cute.jit
    def store_columns(self, values, largest, block, j, env):
        """Write a step's codes and scales by columns."""
        consumer, lane, forms = block.consumer, block.lane, env.outputs[-1]
        skipped: cutlass.Constexpr[int] = self.values - self.forms
        warp_idx = consumer.thread // LANES
        scratch = self.scratch(consumer)
        found = scratch + MOST_FORMS * BOX_BYTES

        # each lane gets the pair of columns of its number; lanes that differ in bit 2 have the same
        pair = lane // 16 % 2 * 8 + lane // 8 % 2 * 4 + lane % 4
        for m in cutlass.range_constexpr(self.forms):
            whole = self.over_rows([largest[(skipped + m) * GROUPS + q] for q in range(GROUPS)], lane)
            put_word(found + warp_idx * (PAIRS * 4) + pair * 4 + m * FOUND_BYTES, whole)
        self.wait_for_warpgroup(consumer)

        factors = found + MOST_FORMS * FOUND_BYTES + warp_idx * (MOST_FORMS * PAIRS * 4)
        inside = self.inside(block, forms, env)
        self.put_factors(found, factors, block, inside, j, forms, env)
        cute.arch.sync_warp()
        for m in cutlass.range_constexpr(self.forms):
            words = [values[(skipped + m) * VALUE_WORDS + k] for k in range(VALUE_WORDS)]
            self.put_columns(
                words, factors + m * (PAIRS * 4), scratch + m * BOX_BYTES, warp_idx, lane, self.element_of(m)
            )
        self.wait_for_warpgroup(consumer)
        if inside:
            self.take_columns(scratch, block, j, forms, env)

    def element_of(self, m: int) -> str:
        """The element of the ``m``-th value with a form by columns."""
        return self.codes.element if m < self.gradients else "e4m3"

    @cute.jit
    def inside(self, block, forms, env):
        """Whether there are this tile's columns, and the warpgroup's block of the form by columns."""
        scale = (forms.columns if self.codes.columns else forms.again).scale  # those of all forms have equal shapes
        return block.tile.column < self.kernel.tiles_n(env.n) and self.column_block(block) < scale.shape[1]

    def column_block(self, block):
        return block.tile.block + block.consumer.group

    @cute.jit
    def over_rows(self, largest, lane):
        """One of 4 pairs: the largest of the 8 lanes that have other rows of the same columns; zero if all are NaN."""
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
    def put_factors(self, found, factors, block, inside, j, forms, env):
        """Compute the factors of all columns of a step: a lane has those of a pair of columns. Each warp does so for
        itself, which is cheaper than another barrier. One of the warps writes the scales.
        """
        warp_idx = block.consumer.thread // LANES
        pair, upper = block.lane % PAIRS, block.lane // PAIRS
        wanted = (forms.columns, self.codes.element, self.gradients), (forms.again, "e4m3", int(self.codes.again))
        for k in cutlass.range_constexpr(2):
            to, element, count = wanted[k]
            if const_expr(count > 0):
                m = k * self.gradients + (upper if count == 2 else 0)  # the lanes of the upper half, if there is one
                at = found + m * FOUND_BYTES + pair * 4
                bits = word_at(at)
                for w in cutlass.range_constexpr(1, WARPS):
                    bits = max_of_pairs(bits, word_at(at + w * (PAIRS * 4)))
                factor, scales = factor_and_scales(bits, LEAST[element])
                # those of the four pairs of a thread are adjacent
                put_word(factors + m * (PAIRS * 4) + (pair % 4 * 4 + pair // 4) * 4, factor)
                if warp_idx == k and inside and upper < count:
                    column = block.tile.column * SCALE_BLOCK + j * EPILOGUE_COLUMNS + 2 * pair + upper * env.n
                    line = at_multiple(
                        to.scale.iterator.toint(), self.column_block(block), Int32(to.scale.stride[1] * 4)
                    )
                    put_fp32(at_multiple(line, column, 4), scales)

    @cute.jit
    def put_columns(self, words, factors, buffer, warp_idx, lane, element: cutlass.Constexpr[str]):
        """Write a step's codes to shared memory.

        A row of ``stmatrix`` is a pair of columns and 8 rows: 16 bytes, the chunk ``8 i + 2 warp + h`` of that pair's
        16 chunks. Chunks are swizzled so that neither stores nor loads have bank conflicts.
        """
        of_pairs = vector_at(factors + lane % 4 * CHUNK_BYTES)
        of_words = [of_pairs[w % WORDS // 2] for w in range(VALUE_WORDS)]
        codes = encoded(words, of_words, element)
        pair, h = lane // 8 * 4 + lane % 8 // 2, lane % 2
        first = buffer + (pair * 16 + ((2 * warp_idx + h) ^ (2 * (pair % 4)))) * CHUNK_BYTES
        for i in cutlass.range_constexpr(BLOCKS):
            put_matrices(codes, i * GROUPS, (first ^ (i * CHUNK_BYTES)) + i * 8 * CHUNK_BYTES, True)

    @cute.jit
    def take_columns(self, scratch, block, j, forms, env):
        """Write the codes of a step: each thread has 16 rows of a pair of columns of each value."""
        thread = block.consumer.thread
        pair, part = thread // 8, thread % 8
        chunk = part // 4 * 8 + ((2 * (part % 4)) ^ (2 * (pair % 4)) ^ (part // 4))
        source = scratch + (pair * 16 + chunk) * CHUNK_BYTES
        column = block.tile.column * SCALE_BLOCK + j * EPILOGUE_COLUMNS + 2 * pair
        row = self.column_block(block) * (SCALE_BLOCK // VECTOR) + part
        for m in cutlass.range_constexpr(self.forms):
            of_gradient: cutlass.Constexpr[bool] = m < self.gradients
            codes, first = (forms.columns.codes, m * env.n) if const_expr(of_gradient) else (forms.again.codes, 0)
            words = [vector_at((source ^ (h * CHUNK_BYTES)) + m * BOX_BYTES) for h in range(2)]
            pitch = Int32(codes.stride[0])
            target = at_multiple(at_multiple(codes.iterator.toint(), row, VECTOR), first + column, pitch)
            for e in cutlass.range_constexpr(2):
                four = [cute.arch.prmt(ws[2 * w], ws[2 * w + 1], (0x6420, 0x7531)[e]) for ws in words for w in range(2)]
                put_vector(at_multiple(target, e, pitch), four)

    # -- by rows

    def finish_rows(self, pool, block, sums, largest, env):
        """The gradient by rows, and the row scale's gradient."""
        formula, consumer = self.formula, block.consumer
        if self.codes.rows:
            if self.forms:
                self.wait_for_warpgroup(consumer)  # the buffers have been read
            codes, scale = env.outputs[-1].rows
            factors = self.row_factors(largest, block, scale, env)
            for line in range(formula.halves * BLOCKS):
                steps = [[pool[j * STEP_WORDS + line * WORDS + w] for w in range(WORDS)] for j in range(STEPS)]
                rows = []
                for h in range(2):
                    words = [step[2 * q + h] for step in steps for q in range(GROUPS)]
                    factor = cute.arch.prmt(factors[line], factors[line], (0x1010, 0x3232)[h])
                    rows.append(encoded(words, [factor] * len(words), self.codes.element))
                self.store_rows(rows, block, line, codes, env)
        for output in self.kernel.epilogue.outputs[:-1]:
            for i in range(BLOCKS):
                of_block = block._replace(top=block.top + i * BLOCK_ROWS, valid=block.valid - i * BLOCK_ROWS)
                output.finish(self.kernel, of_block, env, env.outputs[0], [sums[2 * i], sums[2 * i + 1]])

    @cute.jit
    def row_factors(self, largest, block, scale, env):
        """Write the scales of this thread's rows, and return their factors: those of both rows, by value and block."""
        lines: cutlass.Constexpr[int] = self.formula.halves * BLOCKS
        least: cutlass.Constexpr[int] = LEAST[self.codes.element]
        whole = [Int32(0)] * lines
        for line in cutlass.range_constexpr(lines):
            rows = largest[2 * line], largest[2 * line + 1]
            whole[line] = larger(cute.arch.prmt(*rows, 0x5410), cute.arch.prmt(*rows, 0x7632))
        for step in cutlass.range_constexpr(2):
            for line in cutlass.range_constexpr(lines):
                whole[line] = larger(whole[line], cute.arch.shuffle_sync_bfly(whole[line], 1 << step))
        whole = [larger(bits, Int32(0)) for bits in whole]  # zero if all are NaN
        factors = [factor_and_scales(bits, least)[0] for bits in whole]

        # of the four lanes of a row, each writes the scales of one value and block
        line = block.lane % 4
        bits = whole[0]
        for k in cutlass.range_constexpr(1, lines):
            bits = cutlass.select_(line == k, whole[k], bits)
        _, stored = factor_and_scales(bits, least)
        row = line % BLOCKS * BLOCK_ROWS + block.warp_row + block.lane // 4
        column = line // BLOCKS * (env.n // SCALE_BLOCK) + block.tile.column
        to = at_multiple(scale.iterator.toint(), column, Int32(scale.stride[1] * 4))
        to = at_multiple(to, block.top + row, 4)
        inside = line < lines and block.tile.column < self.kernel.tiles_n(env.n)
        for h in cutlass.range_constexpr(2):
            if inside and row + 8 * h < block.valid:
                put_fp32(to + 32 * h, [stored[h]])
        return factors

    @cute.jit
    def store_rows(self, rows, block, line: cutlass.Constexpr[int], codes, env):
        """Write the codes of a warp's 16 rows.

        A row of ``stmatrix`` has 16 columns of one row: pairs of codes of two groups of 8 columns in turn.
        """
        consumer, lane = block.consumer, block.lane
        i: cutlass.Constexpr[int] = line % BLOCKS
        buffer = self.scratch(consumer) + consumer.thread // LANES * (16 * SCALE_BLOCK)
        cute.arch.sync_warp()  # all lanes have read the rows before
        to = buffer + (lane % 8 * 8 + (lane // 8 ^ lane % 8)) * CHUNK_BYTES
        for h in cutlass.range_constexpr(2):
            for b in cutlass.range_constexpr(2):
                put_matrices(rows[h], 4 * b, (to ^ (4 * b * CHUNK_BYTES)) + h * 64 * CHUNK_BYTES, False)
        cute.arch.sync_warp()
        source = buffer + (lane // 8 * 8 + (lane % 8 ^ lane // 8)) * CHUNK_BYTES
        pitch = Int32(codes.stride[0] * 2)
        row = block.warp_row + lane // 8
        first = (line // BLOCKS * env.n + block.tile.column * SCALE_BLOCK) // VECTOR
        target = at_multiple(codes.iterator.toint(), first + lane % 8, VECTOR)
        target = at_multiple(target, block.top + i * BLOCK_ROWS + row, pitch)
        inside = block.tile.column < self.kernel.tiles_n(env.n)
        for k in cutlass.range_constexpr(16 * 8 // LANES):
            words = vector_at((source ^ (k % 2 * 4 * CHUNK_BYTES)) + k * 32 * CHUNK_BYTES)
            arranged = [cute.arch.prmt(words[2 * w], words[2 * w + 1], s) for s in (0x5410, 0x7632) for w in range(2)]
            if i * BLOCK_ROWS + row + k * 4 < block.valid and inside:
                put_vector(at_multiple(target, k * 4, pitch), arranged)


def pointer(element, address):
    """A pointer to 16 bytes of shared memory."""
    return cute.make_ptr(element, address, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)


def word_at(address):
    """A word of shared memory."""
    return cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.smem), cute.make_layout((1,)))[0]


def put_word(address, word) -> None:
    """Write a word to shared memory."""
    cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.smem), cute.make_layout((1,)))[0] = word


def vector_at(address):
    """16 bytes of shared memory, as four words."""
    words = cute.make_rmem_tensor((4,), Int32)
    cute.autovec_copy(cute.make_tensor(pointer(Int32, address), cute.make_layout((4,))), words)
    return words


def put_vector(address, values) -> None:
    """Write four words to memory."""
    words = cute.make_rmem_tensor((4,), Int32)
    for k, value in enumerate(values):
        words[k] = value
    to = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=VECTOR)
    cute.autovec_copy(words, cute.make_tensor(to, cute.make_layout((4,))))


def put_fp32(address, values) -> None:
    """Write one or two adjacent fp32 values to memory."""
    held = cute.make_rmem_tensor((len(values),), Float32)
    for k, value in enumerate(values):
        held[k] = value
    to = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4 * len(values))
    cute.autovec_copy(held, cute.make_tensor(to, cute.make_layout((len(values),))))


def put_matrices(words, first: int, address, transposed: bool) -> None:
    """Store four words of pairs of codes as four matrices; ``address`` is that of this lane's row."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, 4), BFloat16)
    pairs, layout = cute.recast_tensor(words, BFloat16), cute.make_layout((CHUNK,))
    source = cute.make_tensor(pairs.iterator + 2 * first, layout)
    cute.copy(atom, source, cute.make_tensor(pointer(BFloat16, address), layout))


def factor_and_scales(magnitudes, least):
    """The factors of two blocks, as a pair of bf16 values, and their scales in fp32: as `encode_and_scale` of powers of
    two, except for a block of zeros, whose factor does not matter. ``magnitudes`` is a pair of bf16 values that are
    finite, and ``least`` is `LEAST` of the element.
    """
    # the exponent of a power of two that is not smaller than a magnitude divided by 1.75
    exponents = max_of_pairs(magnitudes + ROUND_UP, Int32(least)) & EXPONENTS
    factors = least - exponents + LARGEST_POWER
    scales = []
    for bits, own in zip(fp32_bits(exponents - least), fp32_bits(magnitudes), strict=True):
        scale = cutlass.max(bits, 1 << 22)  # 2**-127 is subnormal
        scales.append(Int32(cutlass.select_(own != 0, scale, Int32(0x3F800000))).bitcast(Float32))
    return factors, scales


def fp32_bits(word):
    """The bits of a pair of bf16 values as fp32 values."""
    return word << 16, word & -0x10000


@dsl_user_op
def at_multiple(address: Int64, count: Int32, pitch: Int32, *, loc: Any = None, ip: Any = None) -> Int64:
    """``address + count * pitch``, of 32-bit factors in one instruction."""
    operands = [v.ir_value(loc=loc, ip=ip) for v in (Int32(count), Int32(pitch), Int64(address))]
    return Int64(llvm.inline_asm(T.i64(), operands, "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", loc=loc, ip=ip))


def derivative_codes(kind: str, codes: DerivativeCodes, *, clamped: bool = False, row_scale: bool = False) -> Epilogue:
    """The gradient of the preactivation and the activation, in FP8; ``row_scale`` adds the row scale's gradient."""
    summed = (RowScaleGradient(),) if row_scale else ()
    return Epilogue(Backward(kind, clamped, False, row_scale), (*summed, codes))
