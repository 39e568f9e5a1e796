"""Kernels that turn codes with block scales into bf16: codes times scales, in the layout of the codes or transposed.

A thread has units of 16 codes, which are in one block. `Dequantize` writes the values where the codes are.
`DequantizeTransposed` has tiles of 64 lines x 128 codes, which go through shared memory: a thread has the same unit of
two adjacent lines, and stores pairs of values.

Axes: M lines of codes, L codes per line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.codes import CODES
from fusedmoe.kernels.device.warps import LANES, VECTOR, WarpKernel
from fusedmoe.kernels.rows.quantize.blocks import THREADS, on_tiles

UNIT = 16  # codes
CTAS_PER_SM = 4
TILE_LINES = 2 * LANES
TILE_CODES = THREADS // LANES * UNIT
SHARED_PERCENT = 40  # of an SM's memory: 16 KiB per CTA
TWO_TO_126 = 2.0**126


@dataclass(frozen=True)
class _Units(WarpKernel):
    """The values of units."""

    element: str  # of the codes: "e4m3", "e5m2" or "e2m1"
    scale: str  # of the blocks: "e8m0", "e4m3" or "fp32"; empty for codes without blocks
    block: int  # codes per block
    across: int  # lines per block

    @property
    def _suffix(self) -> str:
        return f"{self.element}_{self.scale or 'no'}_scale_{self.across}x{self.block}"

    @property
    def bytes_of_unit(self) -> int:
        return UNIT // 2 if self.element == "e2m1" else UNIT

    def compile(self) -> Any:
        """Compile without a GPU; a function of codes (M, L) as bytes, scale (M / across, L / block), fp32 or as bytes,
        and the results, bf16 (M, L) or (L, M).
        """
        codes = cute.runtime.make_fake_tensor(
            cutlass.Uint8, (cute.sym_int(), cute.sym_int(divisibility=self.bytes_of_unit)),
            (cute.sym_int64(divisibility=self.bytes_of_unit), 1), assumed_align=self.bytes_of_unit,
        )  # fmt: skip
        scale, alignment = (Float32, 4) if self.scale == "fp32" else (cutlass.Uint8, 1)
        scale = cute.runtime.make_fake_tensor(
            scale, (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1), assumed_align=alignment
        )
        out = cute.runtime.make_fake_tensor(
            BFloat16, (cute.sym_int(), cute.sym_int(divisibility=UNIT)), (cute.sym_int64(divisibility=UNIT), 1),
            assumed_align=16,
        )  # fmt: skip
        return self.compiled_for(codes, scale, out)

    @cute.jit
    def values(self, codes, scale, line, unit):
        """The values of a unit, as fp32 that bf16 represents or rounds once."""
        held = cute.make_rmem_tensor((self.bytes_of_unit,), cutlass.Uint8)
        cute.autovec_copy(cute.local_tile(codes[line, None], (self.bytes_of_unit,), (unit,)), held)
        found = cute.make_rmem_tensor((UNIT,), Float32)
        if const_expr(self.element == "e2m1"):
            words = cute.recast_tensor(held, Int32)
            for i in cutlass.range_constexpr(UNIT):
                code = words[i // 8] >> 4 * (i % 8)
                # exponent and mantissa of the code where those of fp32 are
                found[i] = ((code & 7) << 22 | (code & 8) << 28).bitcast(Float32) * Float32(TWO_TO_126)
        else:
            found.store(cute.recast_tensor(held, CODES[self.element]).load().to(Float32))
        if const_expr(self.scale != ""):
            given = scale[line // self.across, unit * UNIT // self.block]
            found.store(found.load() * (given if const_expr(self.scale == "fp32") else self.factor(given)))
        return found

    @cute.jit
    def factor(self, byte):
        """A scale as fp32."""
        if const_expr(self.scale == "e8m0"):
            number = Int32(byte)
            bits = cutlass.max(number << 23, 1 << 22)  # byte 0 is 2**-127
            if number == 255:
                bits = Int32(0x7FC00000)
            return bits.bitcast(Float32)
        codes = cute.make_rmem_tensor((4,), cutlass.Uint8)
        codes.fill(byte)
        wide = cute.make_rmem_tensor((4,), Float32)
        wide.store(cute.recast_tensor(codes, CODES["e4m3"]).load().to(Float32))
        return wide[0]


@dataclass(frozen=True)
class Dequantize(_Units):
    """Values in the layout of the codes."""

    @property
    def symbol(self) -> str:
        return f"sm90_dequantize_{self._suffix}"

    @cute.jit
    def __call__(self, codes, scale, out, stream):
        units = out.shape[1] // UNIT
        self.kernel(codes, scale, out, units).launch(
            **on_tiles(cute.ceil_div(out.shape[0] * units, THREADS), stream, CTAS_PER_SM, 0)
        )

    @cute.kernel
    def kernel(self, codes, scale, out, units):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        at = number * THREADS + thread
        line = at // units
        unit = at - line * units
        if line < out.shape[0]:
            rounded = cute.make_rmem_tensor((UNIT,), BFloat16)
            rounded.store(self.values(codes, scale, line, unit).load().to(BFloat16))
            cute.autovec_copy(rounded, cute.local_tile(out[line, None], (UNIT,), (unit,)))


@dataclass(frozen=True)
class DequantizeTransposed(_Units):
    """Values with lines and codes exchanged."""

    @property
    def symbol(self) -> str:
        return f"sm90_dequantize_transposed_{self._suffix}"

    @cute.jit
    def __call__(self, codes, scale, out, stream):
        wide = cute.ceil_div(out.shape[1], TILE_LINES)
        self.kernel(codes, scale, out, wide).launch(
            **on_tiles(cute.ceil_div(out.shape[0], TILE_CODES) * wide, stream, CTAS_PER_SM, SHARED_PERCENT)
        )

    @cute.kernel
    def kernel(self, codes, scale, out, wide):
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        tile = number // wide  # adjacent CTAs write adjacent columns of the result
        first, begin = (number - tile * wide) * TILE_LINES, tile * TILE_CODES
        smem = SmemAllocator()
        s_pairs = smem.allocate_tensor(Int32, cute.make_layout((LANES, TILE_CODES)), 16)

        lane, warp = thread % LANES, thread // LANES
        line, unit = first + 2 * lane, tile * (TILE_CODES // UNIT) + warp
        if line < out.shape[1] and unit * UNIT < out.shape[0]:
            low, high = self.values(codes, scale, line, unit), self.values(codes, scale, line + 1, unit)
            for i in cutlass.range_constexpr(UNIT):
                pair = cute.make_rmem_tensor((2,), Float32)
                pair[0], pair[1] = low[i], high[i]
                rounded = cute.make_rmem_tensor((2,), BFloat16)
                rounded.store(pair.load().to(BFloat16))
                s_pairs[lane, warp * UNIT + i] = cute.recast_tensor(rounded, Int32)[0]
        cute.arch.sync_threads()
        chunks = TILE_LINES // VECTOR
        for k in cutlass.range_constexpr(TILE_CODES * chunks // THREADS):
            row, chunk = k * (THREADS // chunks) + thread // chunks, thread % chunks
            if begin + row < out.shape[0] and first + chunk * VECTOR < out.shape[1]:
                words = cute.make_rmem_tensor((VECTOR // 2,), Int32)
                cute.autovec_copy(cute.local_tile(s_pairs[None, row], (VECTOR // 2,), (chunk,)), words)
                at = cute.local_tile(out[begin + row, None], (VECTOR,), (first // VECTOR + chunk,))
                cute.autovec_copy(cute.recast_tensor(words, BFloat16), at)
