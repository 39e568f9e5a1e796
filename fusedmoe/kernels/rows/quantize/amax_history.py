"""The end of a step of delayed scaling, in one launch. It has the bits of `fusedmoe.numerics.formats.delayed`, which
defines it.

The history moves on by one step in place, and the amax of this step becomes its first row. The reference, the factor of
the next step and the factor of this one follow. The launch also writes the scale of this step's codes.

A CTA has 32 experts, one per lane, since a row of the history has its experts side by side. Its warps share the steps.
They take the oldest chunk of steps first, and read all of it before they write: each step moves to the next place,
which belongs to this chunk or to the one before, and that has been read.

Magnitudes are compared as integers. The bits of NaN are above those of infinity, and these above all finite ones: so
the largest of the history is not finite if one of its values is not, as by ``torch.amax``.

Axes: S steps, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.codes import FLT_MAX
from fusedmoe.kernels.device.warps import LANES, WarpKernel, fake_vector

WARPS = 32
IN_FLIGHT = 16  # steps per warp and chunk: the 1024 of Transformer Engine are two chunks
CHUNK = WARPS * IN_FLIGHT
INFINITY = 0x7F800000  # as bits


@dataclass(frozen=True)
class UpdateAmaxHistory(WarpKernel):
    """The history, reference and factors of delayed scaling after a step."""

    @property
    def symbol(self) -> str:
        return "sm90_update_amax_history"

    def compile(self) -> Any:
        """Compile without a GPU; a function of the history (S, E), and of amax, reference, encode, previous and scale,
        all (E,); all fp32. Numbers follow: the largest code times the margin's factor, the least reference, a mask of
        the bits of factors, and whether the reference is the most recent amax.
        """
        experts = cute.sym_int()
        history = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(), experts), (cute.sym_int64(), 1))
        vectors = [fake_vector("fp32", experts) for _ in range(5)]
        return self.compiled_for(history, *vectors, Float32(1.0), Float32(0.0), Int32(-1), Int32(0))

    @cute.jit
    def __call__(self, history, amax, reference, encode, previous, scale, most, least, mask, recent, stream):
        self.kernel(history, amax, reference, encode, previous, scale, most, least, mask, recent).launch(
            grid=(cute.ceil_div(history.shape[1], LANES), 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, history, amax, reference, encode, previous, scale, most, least, mask, recent):
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        expert = block * LANES + lane
        steps, experts = history.shape
        kept = steps - 1  # the oldest step is dropped
        if expert >= experts:
            kept = Int32(0)

        largest = Int32(0)
        chunks = cute.ceil_div(steps - 1, CHUNK)
        for number in cutlass.range(chunks, unroll=1):
            first = (chunks - 1 - number) * CHUNK + warp
            held = cute.make_rmem_tensor((IN_FLIGHT,), Float32)
            held.fill(0.0)
            for i in cutlass.range_constexpr(IN_FLIGHT):
                if first + i * WARPS < kept:
                    held[i] = history[first + i * WARPS, expert]
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(IN_FLIGHT):
                if first + i * WARPS < kept:
                    history[first + i * WARPS + 1, expert] = held[i]
                largest = cutlass.max(largest, held[i].bitcast(Int32))

        s_largest = SmemAllocator().allocate_tensor(Int32, cute.make_layout((LANES, WARPS)), 16)
        s_largest[lane, warp] = largest
        cute.arch.sync_threads()
        if warp == 0 and expert < experts:
            newest = amax[expert]
            bits = newest.bitcast(Int32)
            if recent == 0:
                for w in cutlass.range_constexpr(WARPS):
                    bits = cutlass.max(bits, s_largest[lane, w])
            history[0, expert] = newest
            of_step, base = encode[expert], reference[expert]
            if bits > 0 and bits < INFINITY:
                base = bits.bitcast(Float32)
            factor = Float32(1.0)
            if base > 0.0:
                quotient = cutlass.min(most / cute.arch.fmax(base, least), Float32(FLT_MAX))
                factor = (quotient.bitcast(Int32) & mask).bitcast(Float32)
            reference[expert] = base
            encode[expert] = factor
            previous[expert] = of_step
            scale[expert] = Float32(1.0) / of_step
