"""Kernels of matrices in bf16 parts: a part is the nearest bf16 value to what the earlier parts leave of an fp32 value.
An infinite value is its own first part; the others are zero.

`Parts`: a weight as parts, one below the other. `SumParts`: the sum of products of parts, over groups of tokens too, in
a fixed order. It also adds up a row scale's gradient over column tiles: these are the groups, of one expert.

Axes: E experts, P parts, H hidden, G groups of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel, fake_matrix

QUAD = 4  # values per load
WARPS = 8  # per CTA
IN_FLIGHT = 8  # loads per thread


@cute.jit
def split_off(values, element: cutlass.Constexpr[type]):
    """The nearest values of an element type to fp32 values, and what they leave: nothing of an infinite value."""
    n: cutlass.Constexpr[int] = cute.size(values)
    part, rest = cute.make_rmem_tensor((n,), element), cute.make_rmem_tensor((n,), Float32)
    part.store(values.load().to(element))  # pairs of values in one instruction
    rest.store(part.load().to(Float32))
    for i in cutlass.range_constexpr(n):
        # the rest of infinity would be NaN, and so would the sum of the parts
        rest[i] = cutlass.select_(cute.math.isfinite(rest[i]), values[i] - rest[i], Float32(0.0))
    return part, rest


def parts_units(parts: Any, rows: tuple[int, ...]) -> Any:
    """The number of threads that write a weight's parts: one per 16 bytes of a part."""
    return parts.shape[0] // len(rows) * (parts.shape[1] // VECTOR)


@cute.jit
def write_parts(weight, parts, rows: cutlass.Constexpr, unit):
    """Write 16 bytes of each block of rows of a weight's parts; ``rows`` has the part of each block."""
    if unit < parts_units(parts, rows):
        vectors = weight.shape[1] // VECTOR
        expert = unit // vectors
        vector = unit - expert * vectors
        padded = parts.shape[0] // len(rows)
        loaded = cute.make_rmem_tensor((VECTOR,), weight.element_type)
        loaded.fill(0.0)
        if expert < weight.shape[0]:
            cute.autovec_copy(cute.local_tile(weight[expert, None], (VECTOR,), (vector,)), loaded)
        rest = cute.make_rmem_tensor((VECTOR,), Float32)
        rest.store(loaded.load().to(Float32))
        split = []
        for _ in cutlass.range_constexpr(max(rows) + 1):
            part, rest = split_off(rest, parts.element_type)
            split.append(part)
        for b in cutlass.range_constexpr(len(rows)):
            to = cute.local_tile(parts[b * padded + expert, None], (VECTOR,), (vector,))
            cute.autovec_copy(split[rows[b]], to)


@dataclass(frozen=True)
class Parts(WarpKernel):
    """A weight (E, H) as bf16 parts, one below the other."""

    dtype: str  # of the weight: "fp32", "bf16" or "fp16"
    rows: tuple[int, ...]  # the part that each block of rows has: 0 is hi, 1 mid, 2 lo
    out: str = "bf16"

    @property
    def symbol(self) -> str:
        return f"sm90_parts_{self.dtype}_{self.out}_{''.join(map(str, self.rows))}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of weight (E, H) and parts (blocks * padded E, H)."""
        columns = cute.sym_int(divisibility=VECTOR)
        return self.compiled_for(
            fake_matrix(self.dtype, cute.sym_int(), columns), fake_matrix(self.out, cute.sym_int(), columns)
        )

    @cute.jit
    def __call__(self, weight, parts, stream):
        units = parts_units(parts, self.rows)
        self.kernel(weight, parts).launch(
            grid=(cute.ceil_div(units, WARPS * LANES), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, weight, parts):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        write_parts(weight, parts, self.rows, block * (WARPS * LANES) + thread)


@dataclass(frozen=True)
class SumParts(WarpKernel):
    """``out[e] = sum over the groups g and parts p of products[g, p * padded E + e]``, in fp32."""

    out: str  # dtype of the result: "fp32", "bf16" or "fp16"
    parts: int

    @property
    def symbol(self) -> str:
        return f"sm90_sum_parts{self.parts}_{self.out}"

    def compile(self) -> Any:
        """Compile without a GPU; a function of products (G, P * padded E, H) fp32 and out (E, H)."""
        columns = cute.sym_int(divisibility=QUAD)
        pitch = cute.sym_int64(divisibility=QUAD)
        products = cute.runtime.make_fake_tensor(
            Float32, (cute.sym_int(), cute.sym_int(), columns), (cute.sym_int64(divisibility=QUAD), pitch, 1),
            assumed_align=16,
        )  # fmt: skip
        return self.compiled_for(products, fake_matrix(self.out, cute.sym_int(), columns))

    @cute.jit
    def __call__(self, products, out, stream):
        vectors = out.shape[1] // QUAD
        units = out.shape[0] * vectors
        self.kernel(products, out, vectors, units).launch(
            grid=(cute.ceil_div(units, WARPS * LANES), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, products, out, vectors, units):
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        unit = block * (WARPS * LANES) + thread
        if unit < units:
            expert = unit // vectors
            vector = unit - expert * vectors
            padded = products.shape[1] // self.parts
            total = cute.make_rmem_tensor((QUAD,), Float32)
            total.fill(0.0)
            together = IN_FLIGHT // self.parts
            for first in cutlass.range(0, products.shape[0], together, unroll=1):
                loaded = [cute.make_rmem_tensor((QUAD,), Float32) for _ in range(together * self.parts)]
                for g in cutlass.range_constexpr(together):
                    for p in cutlass.range_constexpr(self.parts):
                        to = loaded[g * self.parts + p]
                        to.fill(0.0)
                        if first + g < products.shape[0]:
                            row = products[first + g, p * padded + expert, None]
                            cute.autovec_copy(cute.local_tile(row, (QUAD,), (vector,)), to)
                for one in loaded:
                    total.store(total.load() + one.load())
            result = cute.make_rmem_tensor((QUAD,), out.element_type)
            result.store(total.load().to(out.element_type))
            cute.autovec_copy(result, cute.local_tile(out[expert, None], (QUAD,), (vector,)))
