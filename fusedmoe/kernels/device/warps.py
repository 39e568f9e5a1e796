"""Common parts of the kernels without a matrix product: their compilation, and functions of a warp."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from fusedmoe.kernels.build.sources import sources_of

LANES = 32
# Of a word that another kernel of the GPU writes. They take 80 minutes, by 164 ns per read on an H200: longer than any
# exchange may wait (`exchange.layout.MOST_TIMEOUT_S`), which then reports the missing rank.
MOST_READS = 30_000_000_000
VECTOR = 8  # columns per lane: 16 bytes

ELEMENTS = {
    "bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32, "int32": Int32, "int64": Int64
}  # fmt: skip


@dataclass(frozen=True)
class WarpKernel:
    """A kernel without a matrix product."""

    arch: str = field(default="sm_90a", kw_only=True)

    @property
    def family(self) -> str:
        """The architecture as symbols begin with it: ``sm90`` for ``sm_90a``."""
        return self.arch.removesuffix("a").replace("_", "")

    @property
    def symbol(self) -> str:
        """As of `fusedmoe.kernels.build.kernel.Kernel`."""
        raise NotImplementedError

    @property
    def sources(self) -> tuple[str, ...]:
        """As of `fusedmoe.kernels.build.kernel.Kernel`."""
        return sources_of(self)

    def compile(self) -> Any:
        """As of `fusedmoe.kernels.build.kernel.Kernel`."""
        raise NotImplementedError

    def compiled_for(self, *arguments: Any) -> Any:
        """Compile without a GPU for tensors and numbers like these, on any stream."""
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return cute.compile(self, *arguments, stream, options=f"--enable-tvm-ffi --gpu-arch {self.arch}")


def fake_vector(dtype: str, size: Any) -> Any:
    """A contiguous vector, for the compiler."""
    return cute.runtime.make_fake_tensor(ELEMENTS[dtype], (size,), (1,))


def fake_matrix(dtype: str, rows: Any, columns: Any) -> Any:
    """A matrix with unit stride along its columns, for the compiler."""
    strides = (cute.sym_int64(divisibility=VECTOR), 1)
    return cute.runtime.make_fake_tensor(ELEMENTS[dtype], (rows, columns), strides, assumed_align=16)


def lowest_bit(mask: Int32) -> Int32:
    """Return the number of the lowest bit of a mask that is set; 32 if none is."""
    return cute.arch.popc((mask - 1) & ~mask)


@cute.jit
def inclusive_sum(value, lane):
    """Sum over this lane and all lower lanes."""
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step)
        if lane >= (1 << step):
            value += below
    return value


@dsl_user_op
def trap(*, loc: Any = None, ip: Any = None) -> None:
    """End the kernel with an error, and with it the CUDA context."""
    llvm.inline_asm(None, [], "trap;", "", has_side_effects=True, loc=loc, ip=ip)


def one_after(*values: Int32 | Float32) -> Int32:
    """Return 1, computed from the bits of these values.

    As the count of an arrival, it orders the arrival after the loads of the values. Without it, the hardware may
    perform an arrival in the shared memory of another CTA while an earlier load is outstanding. A use of a loaded value
    before the arrival does not help: ptxas moves it past the arrival. An arrival at the scope of the cluster has a
    fence for all memory, with which the schedule of short tiles takes up to a fifth longer.

    Compilers cannot know the result. It is 1 because grids have an extent of 1 along z.
    """
    bits = Int32(0)
    for value in values:
        bits = bits | (value if isinstance(value, Int32) else value.bitcast(Int32))
    return (bits & (cute.arch.grid_dim()[2] - 1)) + 1
