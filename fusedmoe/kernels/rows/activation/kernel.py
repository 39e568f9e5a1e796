"""Kernels that apply an activation and a row scale to rows, and their derivatives, for rows that no product has in its
epilogue.

`Activate`: ``y[r] = act(p[r]) * scale[r]``. A lane has `VECTORS` vectors of 8 results. The vectors of all rows are
numbered in order, so any width fills the warps.

`ActivateBackward`: ``dp[r] = act'(p[r]) * dy[r] * scale[r]`` and, on demand, y again and
``dscale[r] = sum over features of dy * act``. A warp has one row, so the order of the sum is fixed.

The arithmetic is fp32, and each result is rounded once. Every row is read: a row of NaN has results of NaN.

Axes: R rows, I features of the result, N features of p: 2 I if the activation is gated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from fusedmoe.kernels.device import formulas
from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix, fake_vector
from fusedmoe.numerics.activations import KINDS

WARPS = 8  # per CTA
VECTORS = 2  # of results, that a lane loads the operands of at once


@dataclass(frozen=True)
class _Elementwise(WarpKernel):
    """Common parts: the activation, and the loads and stores of its operands."""

    dtype: str  # "bf16" or "fp16"
    kind: str  # of `fusedmoe.numerics.activations.KINDS`
    clamped: bool  # whether there is a limit
    interleaved: bool  # whether gate and up are even and odd features
    scale: str | None  # dtype of the scale: "fp32", "bf16" or "fp16"; None for none

    @property
    def gated(self) -> bool:
        """Whether p has gate and up."""
        return KINDS[self.kind].gated

    @property
    def _of_activation(self) -> str:
        words = self.kind, "clamped" * self.clamped, "interleaved" * self.interleaved, self.dtype
        return "_".join(filter(None, words)) + (f"_scaled_{self.scale}" if self.scale else "")

    @cute.jit
    def loaded(self, row, vector, count):
        """8 values of a row: those of one vector; zeros if there are only ``count`` vectors."""
        values = cute.make_rmem_tensor((VECTOR,), row.element_type)
        values.fill(0.0)
        if vector < count:
            cute.autovec_copy(cute.local_tile(row, (VECTOR,), (vector,)), values)
        return values

    @cute.jit
    def loaded_pair(self, row, vector, count):
        """The vectors of p that have gate and up of a vector of results; the same vector twice without a gate."""
        if const_expr(not self.gated):
            values = self.loaded(row, vector, count)
            return values, values
        if const_expr(self.interleaved):
            return self.loaded(row, 2 * vector, 2 * count), self.loaded(row, 2 * vector + 1, 2 * count)
        return self.loaded(row, vector, count), self.loaded(row, count + vector, 2 * count)

    def gate_and_up(self, pair, i):
        """Gate and up of result i, in fp32, from `loaded_pair`."""
        first, second = pair
        if self.interleaved:
            half, at = (first, 2 * i) if i < VECTOR // 2 else (second, 2 * i - VECTOR)
            return Float32(half[at]), Float32(half[at + 1])
        return Float32(first[i]), Float32(second[i])

    @cute.jit
    def stored(self, values, row, vector):
        """Round 8 values and write them to a vector of a row."""
        rounded = cute.make_rmem_tensor((VECTOR,), row.element_type)
        for i in cutlass.range_constexpr(VECTOR):
            rounded[i] = Float32(values[i]).to(row.element_type)
        cute.autovec_copy(rounded, cute.local_tile(row, (VECTOR,), (vector,)))


@dataclass(frozen=True)
class Activate(_Elementwise):
    """An activation, and optionally a factor per row."""

    @property
    def symbol(self) -> str:
        return f"{self.family}_activate_{self._of_activation}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of p (R, N), scale (R,), y (R, I), limit, alpha and offset."""
        rows = cute.sym_int()
        features, columns = cute.sym_int(divisibility=VECTOR), cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, rows, columns), fake_vector(self.scale or "fp32", rows),
            fake_matrix(self.dtype, rows, features), Float32(0.0), Float32(1.0), Float32(0.0),
        )  # fmt: skip

    @cute.jit
    def __call__(self, p, scale, y, limit, alpha, offset, stream):
        count = y.shape[1] // VECTOR
        self.kernel(p, scale, y, (limit, alpha, offset), count).launch(
            grid=(cute.ceil_div(y.shape[0] * count, WARPS * LANES * VECTORS), 1, 1),
            block=(WARPS * LANES, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, p, scale, y, constants, count):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        first = block * (WARPS * LANES * VECTORS) + thread
        operands, rows, vectors = [], [], []
        for v in cutlass.range_constexpr(VECTORS):
            number = first + v * (WARPS * LANES)
            row = number // count
            # vectors after the last row load those of the last row, and are not stored
            there = cutlass.min(row, y.shape[0] - 1)
            operands.append(self.loaded_pair(p[there, None], number - row * count, count))
            rows.append(row)
            vectors.append(number - row * count)
        for v in cutlass.range_constexpr(VECTORS):
            if rows[v] < y.shape[0]:
                factor = Float32(1.0)
                if const_expr(self.scale is not None):
                    factor = Float32(scale[rows[v]])
                values = []
                for i in cutlass.range_constexpr(VECTOR):
                    gate, up = self.gate_and_up(operands[v], i)
                    value = formulas.activation(self.kind, self.clamped, gate, up, constants)
                    values.append(value * factor if const_expr(self.scale is not None) else value)
                self.stored(values, y[rows[v], None], vectors[v])


@dataclass(frozen=True)
class ActivateBackward(_Elementwise):
    """The derivative of `Activate`."""

    sums: bool  # whether the gradient of the scale is written
    again: bool  # whether y is written

    @property
    def symbol(self) -> str:
        results = "_sums" * self.sums + "_again" * self.again
        return f"{self.family}_activate_backward_{self._of_activation}{results}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of dy (R, I), p (R, N), scale (R,), dp (R, N), dscale (R,), y (R, I),
        limit, alpha and offset. Results that are not written may be any tensors of these kinds.
        """
        rows = cute.sym_int()
        features, columns = cute.sym_int(divisibility=VECTOR), cute.sym_int(divisibility=VECTOR)
        of_results, of_p = fake_matrix(self.dtype, rows, features), fake_matrix(self.dtype, rows, columns)
        return self.compiled_for(
            of_results, of_p, fake_vector(self.scale or "fp32", rows), fake_matrix(self.dtype, rows, columns),
            fake_vector(self.scale or "fp32", rows), fake_matrix(self.dtype, rows, features), Float32(0.0),
            Float32(1.0), Float32(0.0),
        )  # fmt: skip

    @cute.jit
    def __call__(self, dy, p, scale, dp, dscale, y, limit, alpha, offset, stream):
        self.kernel(dy, p, scale, dp, dscale, y, (limit, alpha, offset)).launch(
            grid=(cute.ceil_div(dy.shape[0], WARPS), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, dy, p, scale, dp, dscale, y, constants):
        block, _, _ = cute.arch.block_idx()
        row, lane = block * WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        if row < dy.shape[0]:
            factor = Float32(1.0)
            if const_expr(self.scale is not None):
                factor = Float32(scale[row])
            total = Float32(0.0)
            count = dy.shape[1] // VECTOR
            for start in cutlass.range(lane, count, LANES * VECTORS, unroll=1):
                operands = []
                for v in cutlass.range_constexpr(VECTORS):
                    vector = start + v * LANES
                    of_p = self.loaded_pair(p[row, None], vector, count)
                    operands.append((self.loaded(dy[row, None], vector, count), of_p))
                for v in cutlass.range_constexpr(VECTORS):
                    vector, (of_dy, of_p) = start + v * LANES, operands[v]
                    if vector < count:
                        of_row = dp[row, None], y[row, None]
                        total += self.written(of_dy, of_p, factor, constants, *of_row, vector, count)
            if const_expr(self.sums):
                total = cute.arch.warp_reduction_sum(total)
                if lane == 0:
                    dscale[row] = total.to(dscale.element_type)

    @cute.jit
    def written(self, of_dy, of_p, factor, constants, dp, y, vector, count):
        """Write the results of one vector; return its part of the gradient of the scale."""
        total = Float32(0.0)
        gates, ups, acts = [], [], []
        for i in cutlass.range_constexpr(VECTOR):
            d, (gate, up) = Float32(of_dy[i]), self.gate_and_up(of_p, i)
            scale = factor if const_expr(self.scale is not None) else None
            *of_x, act, d_scale = formulas.derivative(self.kind, self.clamped, d, gate, up, constants, scale)
            gates.append(of_x[0])
            ups.append(of_x[-1])
            acts.append(act)
            total += d_scale
        if const_expr(not self.gated):
            self.stored(gates, dp, vector)
        elif const_expr(self.interleaved):
            pairs = [half for pair in zip(gates, ups, strict=True) for half in pair]
            self.stored(pairs[:VECTOR], dp, 2 * vector)
            self.stored(pairs[VECTOR:], dp, 2 * vector + 1)
        else:
            self.stored(gates, dp, vector)
            self.stored(ups, dp, count + vector)
        if const_expr(self.again):
            self.stored(acts, y, vector)
        return total
