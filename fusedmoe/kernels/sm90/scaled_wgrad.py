"""The weight gradient of FP8 codes with scales per block or per expert, as a function of flat tensors.

Both operands are in columns form, as `fusedmoe.numerics.formats` defines it for 1 x 128 blocks, of which 128 rows of
one column share a scale, or for one scale per expert.

Axes: R rows sorted by expert, P padded rows, E experts, N features of the gradient, K features of the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.sm90.launch import schedule_of, scheduling, sms_for, tile_counter
from fusedmoe.kernels.sm90.scaled_products import NAMES
from fusedmoe.kernels.sm90.tiles.choice import Problem, choose

if TYPE_CHECKING:
    from fusedmoe.kernels.sm90.tiles.config import TileConfig

RESULTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def block_scaled_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offsets: Tensor,
    rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    options: KernelOptions = DEFAULT,
) -> Tensor:
    """``dw[e] = dy[rows of e].T @ x[rows of e]``: (E, N, K), zeros for an expert without rows.

    Parameters
    ----------
    dy, x
        Codes (N, P) and (K, P), unit stride along P, a pitch of a multiple of 16 bytes, N and K multiples of 16. ``dy``
        is E4M3 or E5M2, ``x`` is E4M3. Each expert's rows begin at a multiple of 128; the codes of padding are zeros.
        Codes after the last expert's padding are not read.
    dy_scale, x_scale
        fp32, (N, P / 128) and (K, P / 128), with the strides of `block_scaled_functions.with_strides`; or both (E,).
    offsets
        The end of each expert's rows among the R rows without padding: (E,) int32, contiguous.
    rows
        R.
    dtype
        Dtype of the result: bf16, fp16 or fp32.
    out
        Contiguous tensor (E, N, K) to which the gradient is added, after rounding to its dtype; it is returned. Each
        element is added to once, so the result does not depend on the order.
    """
    accumulate = out is not None
    dtype = dtype if out is None else out.dtype
    run = bind_block_scaled_wgrad(dy, x, offsets, rows, dtype, accumulate, options, by_expert=dy_scale.dim() == 1)
    return run(dy, dy_scale, x, x_scale, offsets, out)


def bind_block_scaled_wgrad(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    rows: int,
    dtype: torch.dtype,
    accumulate: bool,
    options: KernelOptions,
    beside: bool = False,
    *,
    by_expert: bool = False,
    transposed: bool = False,
) -> Callable[..., Tensor]:
    """Return `block_scaled_wgrad` of ``(dy, dy_scale, x, x_scale, offsets, out)``; ``out`` is None for a new tensor.
    ``by_expert``: of scales per expert.

    With ``transposed``, the result is ``.mT`` of a contiguous tensor (E, K, N), and so is ``out``, if dy has the dtype
    of x: no kernel takes E5M2 as its second operand.

    ``beside`` is that of `functions.bind_grouped_wgrad`: the kernel may begin while the launch before it runs.
    """
    if transposed and dy.dtype is x.dtype:
        product = bind_block_scaled_wgrad(x, dy, offsets, rows, dtype, accumulate, options, beside, by_expert=by_expert)
        return lambda dy, dy_scale, x, x_scale, offsets, out: (
            product(x, x_scale, dy, dy_scale, offsets, None if out is None else out.mT).mT
        )
    experts, n, k = offsets.shape[0], dy.shape[0], x.shape[0]
    device = x.device
    if rows:
        beside, schedule = schedule_of(device, beside, options.schedule)
        kernel, numbers = _launch(
            choose, device, dy.dtype, rows, experts, n, k, dtype, accumulate, options, beside, by_expert
        )

    def run(
        dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offsets: Tensor, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            out = torch.empty(experts, n, k, dtype=dtype, device=device)
        if rows:
            counter, dynamic = tile_counter(device, schedule)
            a, b = dy.view(torch.uint8), x.view(torch.uint8)
            kernel(a, b, offsets, out, counter, *numbers, dynamic, dy_scale, x_scale)
        elif not accumulate:
            out.zero_()
        return out

    return run


@functools.lru_cache(maxsize=4096)
def _launch(
    choose: Callable[[Problem], TileConfig],  # `tuning.forced` replaces it
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    experts: int,
    n: int,
    k: int,
    out: torch.dtype,
    accumulate: bool,
    options: KernelOptions,
    beside: bool,
    by_expert: bool,
) -> tuple[Callable[..., Any], tuple[int, int]]:
    """Return the kernel and its numbers; cached, since that takes as long as a launch."""
    sms = sms_for(device, options)
    problem = Problem("fp8_wgrad", rows, experts, k, n, sms, dtype.itemsize)
    config = choose(problem)
    kernel = _kernel(
        dtype=NAMES[dtype], config=config, out=RESULTS[out], accumulate=accumulate, beside=beside, by_expert=by_expert
    )
    return kernel, scheduling(problem, config, sms)


@functools.cache
def _kernel(*, dtype: str, config: TileConfig, out: str, accumulate: bool, beside: bool, by_expert: bool) -> Any:
    from fusedmoe.kernels.sm90.gemm.block_scales_k import BlockScaledColumns  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
    from fusedmoe.kernels.sm90.gemm.tensor_scales import TensorScaled

    operands = TensorScaled(dtype) if by_expert else BlockScaledColumns(dtype)
    return compiler.load(RaggedK(operands, config, out=out, accumulate=accumulate, beside=beside))
