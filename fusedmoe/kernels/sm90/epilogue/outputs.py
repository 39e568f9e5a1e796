"""Epilogues of the ragged M grouped GEMM: a formula on the accumulators, and a list of outputs.

A *formula* computes the values of one step in registers, and states how many boxes of input a step reads. A step
handles 64 rows and 32 columns of a result: a box, with `gemm.VALUES` values per thread.

An *output* is one result of the kernel. To add one, write a class that states:

- its name in symbols: `Output.name`;
- its tensors: `Output.tensors`, their number, `Output.fake` for the compiler, `Output.parameter` for the device code;
- its bytes: `Output.column_bytes` in memory, for the choice of tiles, and `Output.boxes` in shared memory, the boxes
  that it stores per step;
- its code: `Output.stores`, and `Output.start`, `Output.add`, `Output.finish` if it collects values over the steps.

quantized.py, codes_by_expert.py and derivative_codes.py have the outputs in FP8.

The warps of a math warpgroup g run this code. Boxes of results are theirs alone; the boxes of inputs are shared:

| barrier | arrives | waits |
|---|---|---|
| inputs of warpgroup g are full | TMA of warp 10 + g (`RaggedM.load_step`) | `Backward.take`, once per step |
| inputs of warpgroup g are empty | `RaggedM.release`, after the step's first box is stored | warp 10 + g |
| `STORE_BARRIER` + g | the warpgroup, once per box stored by TMA (`Gemm.put_box`) | the same |

Run: tests/unit/test_kernels_compile.py, tests/gpu/test_hopper_products.py; ``python -m benchmarks --only kernels``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from fusedmoe.kernels.device import formulas
from fusedmoe.kernels.device.codes import fp32_pair
from fusedmoe.kernels.sm90.gemm.common import VALUES, Consumer
from fusedmoe.kernels.sm90.gemm.scheduler import Tile
from fusedmoe.kernels.sm90.tiles.config import EPILOGUE_COLUMNS
from fusedmoe.numerics.activations import KINDS

VALUE_BYTES = 2  # of a value that is not quantized


class Numbers(NamedTuple):
    """Run-time numbers of a launch: constants of the activation, whether bias and row scale exist, whether the tail
    is written, and the schedule.
    """

    limit: Float32
    alpha: Float32
    offset: Float32
    biased: Int32
    scaled: Int32
    zero_tail: Int32
    band: Int32
    dynamic: Int32


class Arguments(NamedTuple):
    """Arguments of an epilogue, besides the accumulators. ``outputs`` has the `Output.parameter` of each output."""

    outputs: tuple[Any, ...]
    bias: cute.Tensor
    row_scale: cute.Tensor
    numbers: Numbers
    rows: Int32
    n: Int32
    scales: Any = None  # of A and of B, if there is one per expert
    counters: Any = None  # vector with the counters of tiles, if they are counted


class Block(NamedTuple):
    """A warpgroup's block of 64 rows of a tile."""

    acc: cute.Tensor
    base: int  # the block's first accumulator
    consumer: Consumer
    tile: Tile
    top: Int32  # first row in the tensors
    valid: Int32  # rows that belong to the expert
    lane: Int32
    warp_row: Int32  # the warp's first row within the block
    live: Any  # whether the tile belongs to an expert, not to the tail, whose results are zeros
    scales: Any = None  # row scale of each of the thread's two rows


class Values(NamedTuple):
    """The values of one step, in the accumulators' order."""

    result: Any  # acc + bias, or the activation
    parts: Any = ()  # boxes of the preactivation, or of its gradient: gate and up
    columns: Any = None  # column of each value of ``result``, if not in the accumulators' order
    scale_terms: Any = ()  # terms of the row scale's gradient


class Box(NamedTuple):
    """A box to store: box ``column`` of one ``part`` of a tensor."""

    values: Any
    part: int
    column: Any
    columns: Any = None
    paired: bool = False  # stored by `Copies.pairs`
    arranged: Any = None  # a function of 4 words in shared memory, which returns the 16 bytes of the result


# ------------------------------------------------------------------------------------------------ formulas


@dataclass(frozen=True)
class Formula:
    """Arithmetic of an epilogue. ``kind`` is one of `KINDS`, or "" for none."""

    kind: str = ""
    clamped: bool = False
    interleaved: bool = False
    scaled: bool | None = None  # whether there is a row scale; None: decided at run time
    biased: bool | None = None  # whether there may be a bias; None: decided at run time

    derivative: ClassVar[bool] = False  # reads the preactivation instead of computing it

    @property
    def name(self) -> str:
        """Part of the kernel's symbol."""
        flags = ((self.clamped, "_clamp"), (self.interleaved, "_inter"), (self.scaled, "_scale"))
        return ("d" if self.derivative else "") + (self.kind or "plain") + "".join(text for on, text in flags if on)

    @property
    def halves(self) -> int:
        """Boxes of the preactivation per box of the activation's result."""
        return 2 if self.kind and KINDS[self.kind].gated else 1

    @property
    def parts(self) -> int:
        """Parts of the preactivation's columns: gate and up, or one part if they alternate."""
        return 1 if self.interleaved else self.halves

    @property
    def paired(self) -> bool:
        """Whether a tile of B is half gate rows, half up rows."""
        return self.parts == 2 and not self.derivative

    @property
    def accumulators(self) -> int:
        """Accumulators per value of a result."""
        return 1 if self.derivative else self.halves

    @property
    def boxes_read(self) -> int:
        """Boxes of input per step."""
        return self.halves if self.derivative else 0

    def box_of(self, half: int, column: Any) -> tuple[int, Any]:
        """Part and box column of a step's ``half`` of the preactivation."""
        return (0, 2 * column + half) if self.interleaved else (half, column)

    def values(self, kernel, block, env, j, column, inputs) -> Values:
        """Values of step ``j`` of a block; ``column`` counts steps over all columns."""
        values = [block.acc[block.base + j * VALUES + v] for v in range(VALUES)]
        return Values(self.add_bias(values, block, env, column, 0))

    @cute.jit
    def row_scales(self, block, env):
        """The row scales of this thread's two rows of a block; zero in the tail, whose scales are undefined."""
        scales = [Float32(1.0), Float32(1.0)]
        if const_expr(self.scaled is not False):
            for h in cutlass.range_constexpr(2):
                if const_expr(self.scaled is True) or env.numbers.scaled != 0:
                    at = cutlass.min(block.top + block.warp_row + block.lane // 4 + 8 * h, env.rows - 1)
                    scales[h] = cutlass.select_(block.live, env.row_scale[at], Float32(0.0))
        return scales

    @cute.jit
    def add_bias(self, values, block, env, column, part):
        """The values plus the bias of their columns; unchanged in the tail."""
        if const_expr(self.biased is False):
            return values
        terms = cute.make_rmem_tensor((VALUES // 2,), Float32)
        terms.fill(0.0)
        if block.live and env.numbers.biased != 0:
            for v in cutlass.range_constexpr(VALUES // 2):
                terms[v] = self.bias(block, env, column, part, v)
        return [value + terms[v // 4 * 2 + v % 2] for v, value in enumerate(values)]

    @cute.jit
    def add_bias_if_any(self, values, block, env, column, part):
        """As `add_bias`, with no addition if there is no bias."""
        sums = cute.make_rmem_tensor((VALUES,), Float32)
        for v in cutlass.range_constexpr(VALUES):
            sums[v] = values[v]
        if block.live and env.numbers.biased != 0:
            terms = [self.bias(block, env, column, part, v) for v in range(VALUES // 2)]
            for v in cutlass.range_constexpr(VALUES):
                sums[v] = sums[v] + terms[v // 4 * 2 + v % 2]
        return [sums[v] for v in range(VALUES)]

    def bias(self, block, env, column, part, v: int):
        """The bias of the ``v``-th of this thread's 8 columns of a box."""
        width = env.n // 2 if self.paired else env.n
        at = column * EPILOGUE_COLUMNS + v // 2 * 8 + block.lane % 4 * 2 + v % 2
        return env.bias[block.tile.expert, part * width + cutlass.min(at, width - 1)].to(Float32)


@dataclass(frozen=True)
class Forward(Formula):
    """``act(acc + bias)``."""

    def values(self, kernel, block, env, j, column, inputs) -> Values:
        parts = []
        for half in range(self.halves):
            at = block.base + j * VALUES + half * (kernel.config.tile_n // 4)
            if self.interleaved:
                at = block.base + (2 * j + half) * VALUES
            part, box_column = self.box_of(half, column)
            values = [block.acc[at + v] for v in range(VALUES)]
            add_bias = self.add_bias_if_any if kernel.rounds else self.add_bias
            parts.append(add_bias(values, block, env, box_column, part))
        if kernel.rounds:
            parts = [kernel.packed(part) for part in parts]
            gates, ups = (unpacked(part) for part in (parts[0], parts[-1]))
        else:
            gates, ups = parts[0], parts[-1]
        columns = None
        if self.interleaved:
            # (half of the rows, box, group of 8 columns): gate and up are neighbours, and so are their results
            order = [(b, 4 * q + 2 * h) for b in range(2) for q in range(4) for h in range(2)]
            rounded = [gates, ups]
            gates, ups = [rounded[b][v] for b, v in order], [rounded[b][v + 1] for b, v in order]
            columns = [b * 16 + v + block.lane % 4 - v % 4 for b, v in order]
        constants = env.numbers[:3]
        pairs = zip(gates, ups, strict=True)
        results = [formulas.activation(self.kind, self.clamped, g, u, constants) for g, u in pairs]
        return Values(results, parts, columns)


@dataclass(frozen=True)
class Backward(Formula):
    """For acc, the gradient of ``act(p) * row_scale``: the gradients of p, and ``act(p) * row_scale`` again.

    Values are packed as soon as they are computed, since registers are scarce.
    """

    scaled: bool = False

    derivative = True

    def values(self, kernel, block, env, j, column, inputs) -> Values:
        x = [[t.to(Float32) for t in box] for box in self.take(kernel, block, inputs)]
        return self.values_of(kernel, block, env, block.base + j * VALUES, x)

    def values_of(self, kernel, block, env, first: int, x) -> Values:
        """Values of the accumulators from ``first`` on, and of their preactivation: gates and ups in fp32."""
        results = []
        for v in range(VALUES):
            d, scale = block.acc[first + v], block.scales[v // 2 % 2] if self.scaled else None
            g, u = x[0][v], x[-1][v]
            results.append(formulas.derivative(self.kind, self.clamped, d, g, u, env.numbers[:3], scale))
        *values, scale_terms = zip(*results, strict=True)
        *gradients, again = [kernel.packed(list(r)) for r in values]
        return Values(again, gradients, scale_terms=scale_terms)

    def take(self, kernel, block, inputs):
        """The thread's preactivation of a step: gates and ups in the accumulators' order, zeros in the tail."""
        if not self.interleaved:
            return [self.take_box(kernel, block, inputs, half) for half in range(self.halves)]
        pairs = self.take_box_pairs(kernel, block, inputs)
        places = [pair_box(v) * VALUES + pair_place(v) for v in range(VALUES)]
        return [pairs[place] for place in places], [pairs[place + 1] for place in places]

    @cute.jit
    def take_box(self, kernel, block, inputs, half: cutlass.Constexpr[int]):
        """Wait for a box of the preactivation, and read this thread's values of it: in fp32, if operands are in FP8."""
        r_in = cute.make_rmem_tensor((VALUES,), kernel.operands.value_element)
        r_in.fill(0.0)
        if block.live:
            ring, here = block.consumer.inputs, kernel.own(inputs, block.consumer.group)
            if const_expr(half == 0):
                ring.consumer_wait(here)
            fetch = block.consumer.copies.fetch
            source = fetch.partition_S(block.consumer.boxes)[None, None, None, kernel.read_box(here.index, half)]
            cute.copy(fetch, source, cute.make_tensor(r_in.iterator, cute.make_layout(source.shape)))
        if const_expr(kernel.operands.element.width == 8):  # in other products, the fp32 values would spill
            return unpacked(r_in)
        return [r_in[v] for v in range(VALUES)]

    @cute.jit
    def take_box_pairs(self, kernel, block, inputs):
        """Wait for both boxes of an interleaved preactivation, and read this thread's values of them."""
        r_in = cute.make_rmem_tensor((2 * VALUES,), kernel.operands.value_element)
        r_in.fill(0.0)
        if block.live:
            ring, here = block.consumer.inputs, kernel.own(inputs, block.consumer.group)
            ring.consumer_wait(here)
            pairs = block.consumer.copies.pairs
            for box in cutlass.range_constexpr(2):
                source = pairs.partition_S(block.consumer.boxes)[None, None, None, kernel.read_box(here.index, box)]
                cute.copy(pairs, source, cute.make_tensor(r_in.iterator + box * VALUES, cute.make_layout(source.shape)))
        return r_in


def unpacked(values):
    """The fp32 values of a register tensor of bf16. They are read in pairs, so that ptxas also rounds them to bf16 in
    pairs: conversions of single values have a fraction of the rate.
    """
    words = cute.recast_tensor(values, Int32)
    return [value for w in range(cute.size(words)) for value in fp32_pair(words[w], cutlass.BFloat16)]


def pair_box(v: int) -> int:
    """Which of the two boxes holds the interleaved gate and up of a thread's v-th accumulator of a step."""
    return v // 8


def pair_place(v: int) -> int:
    """The position of that gate among the thread's values of the box. The up value follows it.

    A thread's accumulators are pairs of adjacent columns in two rows. The box has four adjacent columns for each pair.
    """
    return v // 4 % 2 * 8 + v // 2 % 2 * 4 + v % 2 * 2


# ------------------------------------------------------------------------------------------------ outputs


@dataclass(frozen=True)
class Output:
    """A matrix (R, columns of the result) that is stored in boxes."""

    @property
    def tensors(self) -> int:
        """Arguments of the kernel."""
        return 1

    @property
    def name(self) -> str:
        """Part of the kernel's symbol."""
        return ""

    def boxes(self, formula: Formula) -> int:
        """Boxes that a step stores."""
        return 1

    def column_bytes(self, formula: Formula) -> float:
        """Bytes that a row of the output has in memory, per column of the accumulators; values have two bytes."""
        return self.boxes(formula) * VALUE_BYTES / formula.accumulators

    def boxes_of(self, formula: Formula, steps: int) -> int:
        """Boxes that all steps of a block of 64 rows store."""
        return steps * self.boxes(formula)

    def fake(self, kernel: Any, rows: Any) -> list[Any]:
        """The tensors, for the compiler."""
        return [kernel.fake_matrix(rows, kernel.box_element)]

    def parameter(self, kernel: Any, *tensors: cute.Tensor) -> Any:
        """Turn the tensors into the parameter of the device code."""
        formula = kernel.epilogue.formula
        return kernel.store_atom(*tensors, min(self.boxes(formula), formula.parts))

    def target(self, parameter: Any) -> Any:
        """The part of the parameter that boxes are stored to."""
        return parameter

    def stores(self, kernel: Any, block: Block, values: Values, column: Any, parameter: Any, state: Any) -> Any:
        """Yield the boxes of a step, in the order in which they are stored."""
        raise NotImplementedError

    def start(self) -> Any:
        """State at the start of a block of 64 rows."""
        return None

    def add(self, state: Any, values: Values) -> Any:
        """State after a step."""
        return state

    def finish(self, kernel: Any, block: Block, env: Arguments, parameter: Any, state: Any) -> None:
        """Finish a block of 64 rows."""


class BlockOutput(Output, ABC):
    """The last output of an epilogue of blocks of 128 adjacent rows of a warpgroup. It has the code for all outputs."""

    @property
    @abstractmethod
    def buffers(self) -> int:
        """Boxes in shared memory per math warpgroup."""

    @abstractmethod
    def places_blocks(self, formula: Formula) -> bool:
        """Whether results have places among blocks of which each expert begins a new one: see `TileWithBlock`."""

    @abstractmethod
    def scheduled_rows(self, rows: Any, parameter: Any) -> Any:
        """Rows of the tiles of all experts and of the tail; R is the first argument."""

    @abstractmethod
    def load_inputs(self, kernel: Any, load: Any, shared: Any, rings: Any, group: Any) -> None:
        """As `RaggedM.load_inputs`."""

    @abstractmethod
    def finish_tile(self, kernel: Any, acc: Any, tile: Any, consumer: Any, inputs: Any, env: Arguments) -> Any:
        """As `RaggedM.finish_tile`."""


@dataclass(frozen=True)
class Result(Output):
    """``result * row_scale``, of a formula with or without an activation."""

    def stores(self, kernel, block, values, column, parameter, state):
        if values.columns is None:
            scaled = [value * block.scales[v // 2 % 2] for v, value in enumerate(values.result)]
            yield Box(scaled, 0, column)
        else:
            scaled = [value * block.scales[v % 2] for v, value in enumerate(values.result)]
            yield Box(in_row_order(scaled), 0, column, in_row_order(values.columns))


@dataclass(frozen=True)
class Preactivation(Output):
    """The preactivation ``acc + bias``, kept for backward."""

    @property
    def name(self) -> str:
        return "_keep"

    def boxes(self, formula: Formula) -> int:
        return formula.halves

    def stores(self, kernel, block, values, column, parameter, state):
        for half, part in enumerate(values.parts):
            yield Box(part, *kernel.epilogue.formula.box_of(half, column))


@dataclass(frozen=True)
class Gradient(Output):
    """The gradient of the preactivation."""

    def boxes(self, formula: Formula) -> int:
        return formula.halves

    def stores(self, kernel, block, values, column, parameter, state):
        formula = kernel.epilogue.formula
        for half, part in enumerate(values.parts):
            if formula.interleaved:
                part = cute.make_rmem_tensor((VALUES,), kernel.operands.value_element)
                for v in range(VALUES):
                    for which in range(2):
                        if pair_box(v) == half:
                            part[pair_place(v) + which] = values.parts[which][v]
            part_index, box_column = formula.box_of(half, column)
            yield Box(part, part_index, box_column, paired=formula.interleaved)


@dataclass(frozen=True)
class Recomputed(Output):
    """``act(p) * row_scale``, recomputed for the next layer's weight gradient."""

    @property
    def name(self) -> str:
        return "_keep"

    def stores(self, kernel, block, values, column, parameter, state):
        yield Box(values.result, 0, column)


@dataclass(frozen=True)
class RowScaleGradient(Output):
    """For each row and column tile, the sum of ``acc * act(p)``: (column tiles, R) in fp32. The caller adds them up."""

    def boxes(self, formula: Formula) -> int:
        return 0

    def fake(self, kernel, rows):
        return [cute.runtime.make_fake_tensor(Float32, (cute.sym_int(), rows), (cute.sym_int(), 1))]

    def parameter(self, kernel, *tensors):
        return tensors[0]

    def start(self):
        return [Float32(0.0), Float32(0.0)]

    def add(self, state, values):
        for v, term in enumerate(values.scale_terms):
            state[v // 2 % 2] = state[v // 2 % 2] + term
        return state

    def stores(self, kernel, block, values, column, parameter, state):
        return ()

    @cute.jit
    def finish(self, kernel, block, env, parameter, state):
        for h in cutlass.range_constexpr(2):
            total = cute.arch.warp_reduction_sum(state[h], threads_in_group=4)
            within = block.warp_row + block.lane // 4 + 8 * h
            # a cluster's last column tile may lie past the last column
            if block.lane % 4 == 0 and within < block.valid and block.tile.column < kernel.tiles_n(env.n):
                parameter[block.tile.column, block.top + within] = total


def in_row_order(values: list[Any]) -> list[Any]:
    """Values of a thread's two rows in turn, in the order of `Gemm.row_of`: two of one row, two of the other."""
    return [values[v // 4 * 4 + (v % 4 // 2) + v % 2 * 2] for v in range(len(values))]


# ------------------------------------------------------------------------------------------------ epilogues


@dataclass(frozen=True)
class Epilogue:
    """A formula and its outputs, in the order in which a step stores them."""

    formula: Formula
    outputs: tuple[Output, ...]
    fp32: bool = False  # whether results are stored in fp32, instead of the operands' dtype

    @property
    def name(self) -> str:
        """Part of the kernel's symbol."""
        names = "".join(output.name for output in self.outputs)
        return self.formula.name + names + ("_fp32" if self.fp32 else "")

    @property
    def column_bytes(self) -> float:
        """Bytes that a row reads and writes, per column of the accumulators; values have two bytes."""
        read = self.formula.boxes_read * VALUE_BYTES / self.formula.accumulators
        return read + sum(output.column_bytes(self.formula) for output in self.outputs)

    @property
    def blocks(self) -> BlockOutput | None:
        """The last output, if it is a `BlockOutput`."""
        last = self.outputs[-1]
        return last if isinstance(last, BlockOutput) else None

    def boxes_of(self, steps: int) -> int:
        """Boxes that all steps of a block of 64 rows store."""
        return sum(output.boxes_of(self.formula, steps) for output in self.outputs)


PLAIN = Epilogue(Formula(), (Result(),))  # ``(acc + bias) * row_scale``
PLAIN_FP32 = Epilogue(Formula(), (Result(),), fp32=True)  # the same, unrounded


def activation(
    kind: str, *, clamped: bool = False, interleaved: bool = False, keep: bool = False, result: Output | None = None
) -> Epilogue:
    """``act(acc + bias) * row_scale``, as a `Result` or another output; with ``keep`` also ``acc + bias``."""
    kept = (Preactivation(),) if keep else ()
    return Epilogue(Forward(kind, clamped, interleaved), (*kept, result or Result()))


def derivative(
    kind: str, *, clamped: bool = False, interleaved: bool = False, keep: bool = False, row_scale: bool = False
) -> Epilogue:
    """The gradient of the preactivation; ``keep`` adds the activation, ``row_scale`` the row scale's gradient."""
    summed = (RowScaleGradient(),) if row_scale else ()
    again = (Recomputed(),) if keep else ()
    return Epilogue(Backward(kind, clamped, interleaved, row_scale), (*summed, Gradient(), *again))
