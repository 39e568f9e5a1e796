"""The kernels that the section needs, compiled on all CPUs before anything is measured."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from fusedmoe.commands.timing import why_not
from fusedmoe.kernels.build import compiler

if TYPE_CHECKING:
    from fusedmoe.kernels.build.kernel import Kernel

# shipped kernels that no layer of the section launches
_OTHERS = re.compile(
    r"geglu|reglu|squared_relu|clamp|fp16|e5m2|column_sums|swiglu_(?!keep|scale)|bn_swiglu|route_int64_bf16|scaled_bf16"
)
_BY_EXPERT = re.compile(r"e5m2_.*(tensor_scales|by_expert)")


def needed() -> list[Kernel]:
    """Return the kernels of training in bf16 and in FP8 with SwiGLU, with every candidate of their tiles.

    Those with one scale per expert are the shipped ones, with gradients in E5M2.
    """
    from fusedmoe.kernels.rows.quantize.blocks import QuantizeRows
    from fusedmoe.kernels.sm90.epilogue.derivative_codes import (
        DerivativeCodes,
        DerivativeCodesRaggedM,
        derivative_codes,
    )
    from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, activation, derivative
    from fusedmoe.kernels.sm90.epilogue.quantized import RowCodes
    from fusedmoe.kernels.sm90.gemm.block_scaled import BlockScaledRaggedM  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.gemm.block_scaled_k import BlockScaledRaggedK
    from fusedmoe.kernels.sm90.shipped import shipped
    from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES

    kernels: list[Kernel] = [BlockScaledRaggedM("e4m3", config, epilogue=PLAIN) for config in CANDIDATES["fp8_plain"]]
    for config in CANDIDATES["fp8_activation"]:
        for keep, result in ((True, None), (True, RowCodes()), (False, RowCodes())):
            how: dict[str, Any] = {} if result is None else {"result": result}
            epilogue = activation("swiglu", keep=keep, **how)
            kernels.append(BlockScaledRaggedM("e4m3", config, epilogue=epilogue))
    for config in CANDIDATES["fp8_derivative"]:
        for scaled in (True, False):
            epilogue = derivative("swiglu", keep=True, row_scale=scaled)
            kernels.append(BlockScaledRaggedM("e4m3", config, epilogue=epilogue))
    for config in CANDIDATES["fp8_derivative_codes"]:
        for scaled in (True, False):
            epilogue = derivative_codes("swiglu", DerivativeCodes(), row_scale=scaled)
            kernels.append(DerivativeCodesRaggedM("e4m3", config, epilogue=epilogue))
    for config in CANDIDATES["fp8_wgrad"]:
        kernels.append(BlockScaledRaggedK("e4m3", config, out="bf16"))
        kernels.append(BlockScaledRaggedK("e4m3", config, out="fp32", accumulate=True))
    kernels.append(QuantizeRows("bf16", "e4m3", False, True, True, True, False))
    kernels += [k for k in shipped() if _BY_EXPERT.search(k.symbol) or not _OTHERS.search(k.symbol)]
    return list({kernel.symbol: kernel for kernel in kernels}.values())  # most of the former are shipped too


def compile_ahead() -> dict[str, Any]:
    """Compile what the disk cache lacks; return the number of kernels, the seconds, and the reasons of failures.

    A kernel that failed is compiled again at its first use, where the exception becomes a note of its case.
    """
    begin = time.perf_counter()
    missing = [kernel for kernel in needed() if not compiler.is_cached(kernel)]
    failures = {}
    if missing:
        jobs = min(len(os.sched_getaffinity(0)), len(missing))
        context = multiprocessing.get_context("spawn")  # a forked process has no threads of torch
        with ProcessPoolExecutor(jobs, context) as pool:
            outcomes = pool.map(_build, missing)
            failures = {k.symbol: why for k, why in zip(missing, outcomes, strict=True) if why}
    return {"compiled": len(missing) - len(failures), "seconds": time.perf_counter() - begin, "failures": failures}


def _build(kernel: Kernel) -> str:
    try:
        compiler.build(kernel)
    except Exception as raised:  # noqa: BLE001 reported, and the other kernels are compiled
        return why_not(raised)
    return ""
