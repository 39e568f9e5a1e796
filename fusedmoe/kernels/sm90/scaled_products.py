"""The products of FP8 codes with scales per block or per expert, as functions of flat tensors. `functions` has those of
bf16 rows.

Axes: R rows sorted by expert, E experts, K contraction, N output features. An operand is its codes and its scales, as
`fusedmoe.numerics.formats` defines them for 1 x 128 blocks of rows and 128 x 128 blocks of weights:

- rows (R, K): codes with unit stride along K, E4M3 or, for gradients, E5M2; scales (R, K / 128) fp32 with unit stride
  along R;
- weights (E, N, K): codes with unit stride along K, E4M3; scales (E, N / 128, K / 128) fp32 with unit stride along
  N / 128, and no gaps between experts.

Scales per expert, (E,) fp32 and contiguous, may take the place of both operands' scales per block.

Quotients are rounded up. Pitches of codes are multiples of 16, those of scales of 4. `with_strides` makes a copy of
scales with such strides. Results are bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.kernels.rows.move.functions import bind_sum_partials
from fusedmoe.kernels.rows.quantize.block_functions import Form, scale_like
from fusedmoe.kernels.sm90 import limits
from fusedmoe.kernels.sm90.launch import (
    CompiledIn,
    compiled_in,
    constants,
    placeholders,
    scheduling,
    sms_for,
    tile_counter,
)
from fusedmoe.kernels.sm90.tiles.choice import Family, Problem, choose
from fusedmoe.kernels.sm90.tiles.config import ALIGNMENT_BYTES, SCALE_BLOCK, SCALE_PITCH
from fusedmoe.numerics.expert_rows import padded_rows
from fusedmoe.numerics.formats import E4M3, ScaleRule

if TYPE_CHECKING:
    from fusedmoe.kernels.options import Schedule
    from fusedmoe.kernels.sm90.epilogue.outputs import Output
    from fusedmoe.kernels.sm90.tiles.config import TileConfig
    from fusedmoe.numerics.activations import Activation
    from fusedmoe.numerics.formats import Format

NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def block_scaled_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    options: KernelOptions = DEFAULT,
) -> Tensor:
    """``y[r] = (x[r] @ weight[e].T + bias[e]) * row_scale[r]`` for each row r of expert e: (R, N) bf16 of x (R, K).

    ``bias`` (E, N) is bf16, ``row_scale`` (R,) fp32, bf16 or fp16. Rows after ``offsets[-1]`` are not read, and are
    zeros in the result.
    """
    run = bind_block_scaled_gemm(x, weight, bias, row_scale, options, by_expert=x_scale.dim() == 1)
    return run(x, x_scale, weight, weight_scale, bias, offsets, row_scale)


def bind_block_scaled_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    options: KernelOptions,
    *,
    by_expert: bool = False,
) -> Callable[..., Tensor]:
    """Return `block_scaled_gemm` of ``(x, x_scale, weight, weight_scale, bias, offsets, row_scale)``; ``by_expert``: of
    scales per expert.
    """
    rows, columns = x.shape[0], weight.shape[1]
    launch = _ragged_m("fp8_plain", x, weight, options, by_expert=by_expert)

    def run(
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        offsets: Tensor,
        row_scale: Tensor | None,
    ) -> Tensor:
        y = x.new_empty(rows, columns, dtype=torch.bfloat16)
        launch(x, x_scale, weight, weight_scale, offsets, bias, row_scale, y)
        return y

    return run


def block_scaled_gemm_activation(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    activation: Activation,
    *,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    keep_preactivation: bool = True,
    quantized: Format | None = None,
    options: KernelOptions = DEFAULT,
) -> tuple[Tensor, ...]:
    """``p[r] = x[r] @ weight[e].T + bias[e]``, ``y[r] = activation(p[r]) * row_scale[r]``.

    p is rounded to bf16 before the activation. y is rounded to bf16 and, with ``quantized``, then quantized by rows.

    Parameters
    ----------
    weight
        (E, N, K). For a gated activation, the rows of gate come before those of up, and half of N is a multiple of 128,
        or of 16 with scales per expert.
    keep_preactivation
        Return p too.
    quantized
        The format of y, in blocks of 1 x 128; None for y in bf16.

    Returns
    -------
    tuple of Tensor
        y (R, I), or its codes (R, I) and its scale (R, I / 128) with unit stride along R; then p (R, N) if it is kept.
    """
    run = bind_block_scaled_gemm_activation(
        x, weight, bias, row_scale, activation, keep_preactivation, quantized, options, by_expert=x_scale.dim() == 1
    )
    return run(x, x_scale, weight, weight_scale, bias, offsets, row_scale)


def bind_block_scaled_gemm_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    activation: Activation,
    keep_preactivation: bool,
    quantized: Format | None,
    options: KernelOptions,
    *,
    by_expert: bool = False,
) -> Callable[..., tuple[Tensor, ...]]:
    """Return `block_scaled_gemm_activation` of ``(x, x_scale, weight, weight_scale, bias, offsets, row_scale)``;
    ``by_expert``: of scales per expert.

    For a format with one scale per expert, the function takes two more tensors, (E,) fp32: the factor of each expert,
    and zeros, to which it writes the largest finite magnitude of each expert's y. It returns the codes of y, and then p
    if it is kept.
    """
    rows, columns = x.shape[0], weight.shape[1]
    features = columns // 2 if activation.gated else columns
    launch = _ragged_m(
        "fp8_activation", x, weight, options, compiled_in(activation), keep=keep_preactivation, quantized=quantized,
        by_expert=by_expert,
    )._replace(numbers=constants(activation))  # fmt: skip

    def run(
        x: Tensor,
        x_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        offsets: Tensor,
        row_scale: Tensor | None,
        *factor_and_amax: Tensor,
    ) -> tuple[Tensor, ...]:
        p = (x.new_empty(rows, columns, dtype=torch.bfloat16),) if keep_preactivation else ()
        if quantized is not None and quantized.block[1] is None:
            codes, (factor, amax) = x.new_empty(rows, features, dtype=torch.uint8), factor_and_amax
            y: tuple[Tensor, ...] = (codes.view(quantized.element.dtype),)
            written: tuple[Tensor, ...] = (codes.view(torch.bfloat16), factor, amax.view(torch.int32))
        elif quantized is None:
            y = (x.new_empty(rows, features, dtype=torch.bfloat16),)
            written = y
        else:
            codes = x.new_empty(rows, features, dtype=torch.uint8)
            scale = scale_like(x, rows, features)
            y, written = (codes.view(quantized.element.dtype), scale), (codes.view(torch.bfloat16), scale)
        launch(x, x_scale, weight, weight_scale, offsets, bias, row_scale, *p, *written)
        return (*y, *p)

    return run


def bind_block_scaled_gemm_activation_backward(
    grad_output: Tensor,
    weight: Tensor,
    preactivation: Tensor,
    row_scale: Tensor | None,
    activation: Activation,
    want_output: bool,
    want_row_scale_grad: bool,
    options: KernelOptions,
    *,
    by_expert: bool = False,
) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    """Return the function of ``(grad_output, its scale, weight, its scale, offsets, preactivation, row_scale)`` that
    `functions.grouped_gemm_activation_backward` is for FP8 operands: ``grad_output`` (R, H), and ``weight`` (E, I, H)
    by columns; ``by_expert``: with scales per expert. The results are bf16, and the row scale's gradient is fp32.
    """
    (rows, features), outputs = preactivation.shape, weight.shape[1]
    scaled = want_row_scale_grad or row_scale is not None
    launch = _ragged_m(
        "fp8_derivative", grad_output, weight, options, compiled_in(activation),
        derivative=True, scaled=scaled, keep=want_output, by_expert=by_expert,
    )._replace(numbers=constants(activation))  # fmt: skip
    derivative = _with_row_scale(launch, preactivation, outputs, row_scale, want_row_scale_grad)

    def run(
        grad_output: Tensor,
        grad_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        offsets: Tensor,
        preactivation: Tensor,
        row_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        grad = preactivation.new_empty(rows, features)
        y = preactivation.new_empty(rows, outputs) if want_output else None
        results = (grad,) if y is None else (grad, y)
        operands = grad_output, grad_scale, weight, weight_scale
        return grad, y, derivative(*operands, offsets, row_scale, preactivation, *results)

    return run


def bind_block_scaled_gemm_activation_backward_codes(
    grad_output: Tensor,
    weight: Tensor,
    preactivation: Tensor,
    row_scale: Tensor | None,
    activation: Activation,
    quantized: Format,
    forms: tuple[bool, bool, bool],
    want_row_scale_grad: bool,
    options: KernelOptions,
) -> Callable[..., tuple[tuple[Form, ...], Tensor | None]]:
    """Return `bind_block_scaled_gemm_activation_backward` with results in FP8: the ``forms`` that are true of the
    gradient by rows, the gradient by columns and the output by columns; and the row scale's gradient.

    A form is codes and scales, with shapes and strides as by `quantize_functions.bind_quantize_rows`. ``quantized`` is
    the format of the gradient, with scales that are powers of two. The output is E4M3. I is a multiple of 128.
    """
    (rows, features), (experts, outputs, _) = preactivation.shape, weight.shape
    scaled = want_row_scale_grad or row_scale is not None
    launch = _ragged_m(
        "fp8_derivative_codes", grad_output, weight, options, compiled_in(activation),
        derivative=True, scaled=scaled, quantized=quantized, forms=forms,
    )._replace(numbers=constants(activation))  # fmt: skip
    derivative = _with_row_scale(launch, preactivation, outputs, row_scale, want_row_scale_grad)
    padded = padded_rows(rows, experts, SCALE_BLOCK)
    by_rows, by_columns, again = forms
    of_grad = quantized.element.dtype
    shapes = [(rows, features, of_grad)] * by_rows + [(features, padded, of_grad)] * by_columns
    shapes += [(outputs, padded, E4M3.dtype)] * again

    def run(
        grad_output: Tensor,
        grad_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        offsets: Tensor,
        preactivation: Tensor,
        row_scale: Tensor | None,
    ) -> tuple[tuple[Form, ...], Tensor | None]:
        results: list[Form] = []
        written: list[Tensor] = []
        for lines, length, dtype in shapes:
            codes = preactivation.new_empty(lines, length, dtype=torch.uint8)
            scale = scale_like(preactivation, lines, length)
            results.append((codes.view(dtype), scale))
            written += [codes.view(torch.bfloat16) if by_rows and not written else codes, scale]
        operands = grad_output, grad_scale, weight, weight_scale
        return tuple(results), derivative(*operands, offsets, row_scale, preactivation, *written)

    return run


def _with_row_scale(
    launch: _Launch, preactivation: Tensor, outputs: int, row_scale: Tensor | None, want_grad: bool
) -> Callable[..., Tensor | None]:
    """Return the launch of a derivative as a function of ``(grad_output, its scale, weight, its scale, offsets,
    row_scale, preactivation, *results)``, which returns the row scale's gradient, (R,) fp32, if it is wanted.

    With a row scale, the derivative also writes a sum per row and column tile, and a second launch adds up those of a
    row. A gradient that is wanted without a row scale is that of a row scale of ones.
    """
    rows, device = preactivation.shape[0], preactivation.device
    scaled = row_scale is not None or want_grad
    partials = (-(-outputs // launch.tile_n), -(-rows // limits.UNIT) * limits.UNIT)
    total = bind_sum_partials(*partials) if want_grad else None

    def run(
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        offsets: Tensor,
        row_scale: Tensor | None,
        preactivation: Tensor,
        *results: Tensor,
    ) -> Tensor | None:
        if not scaled:
            launch(a, a_scale, b, b_scale, offsets, None, None, preactivation, *results)
            return None
        partial = torch.empty(partials, dtype=torch.float32, device=device)
        if row_scale is None:
            row_scale = torch.ones(rows, dtype=torch.float32, device=device)
        launch(a, a_scale, b, b_scale, offsets, None, row_scale, preactivation, partial[:, :rows], *results)
        return None if total is None else total(partial)[:rows]

    return run


def with_strides(scale: Tensor) -> Tensor:
    """Return scales (..., M, blocks) as `scale_like` makes them. Scales with other strides are copied: those of plain
    PyTorch, of checkpoints, and those that the forward operator of a compiled graph has kept. Scales per expert, (E,),
    are contiguous in the result.
    """
    if has_strides(scale):
        return scale
    if scale.dim() == 1:
        return scale.contiguous()
    *experts, m, blocks = scale.shape
    return scale_like(scale, m, blocks * SCALE_BLOCK, *experts).copy_(scale)


def has_strides(scale: Tensor) -> bool:
    """Whether the kernels can read scales: unit stride along M, pitches of whole vectors, no gap between experts.
    Scales per expert are contiguous.
    """
    if scale.dim() == 1:
        return scale.is_contiguous()
    *experts, line, pitch = scale.stride()
    dense = not experts or experts[0] == pitch * scale.shape[-1]
    whole = pitch % SCALE_PITCH == 0 and pitch >= scale.shape[-2]
    return line == 1 and whole and dense and scale.data_ptr() % ALIGNMENT_BYTES == 0


class _Launch(NamedTuple):
    """A ragged M kernel with the numbers of its launches."""

    kernel: Callable[..., Any]
    device: torch.device
    schedule: Schedule
    scheduling: tuple[int, int]
    tile_n: int  # columns of a tile
    numbers: tuple[float, float, float] = (0.0, 1.0, 0.0)  # constants of the activation

    def __call__(
        self,
        a: Tensor,
        a_scale: Tensor,
        b: Tensor,
        b_scale: Tensor,
        offsets: Tensor,
        bias: Tensor | None,
        row_scale: Tensor | None,
        *tensors: Tensor,
    ) -> None:
        no_bias, no_scale = placeholders(self.device, torch.bfloat16)
        counter, dynamic = tile_counter(self.device, self.schedule)
        self.kernel(
            a.view(torch.uint8), b.view(torch.uint8), offsets, no_bias if bias is None else bias,
            no_scale if row_scale is None else row_scale.float(), counter, *self.numbers, bias is not None,
            row_scale is not None, *self.scheduling, dynamic, a_scale, b_scale, *tensors,
        )  # fmt: skip


def _ragged_m(
    family: Family,
    a: Tensor,
    b: Tensor,
    options: KernelOptions,
    activation: CompiledIn | None = None,
    *,
    derivative: bool = False,
    scaled: bool = False,
    keep: bool = False,
    quantized: Format | None = None,
    by_expert: bool = False,
    forms: tuple[bool, bool, bool] | None = None,
) -> _Launch:
    """Return the launch of a ragged M product of operands like these, with scales per block or ``by_expert``."""
    epilogue = _Epilogue(activation, derivative, scaled, keep, quantized, forms)
    return _ragged_m_launch(choose, family, a.device, a.dtype, a.shape[0], tuple(b.shape), options, epilogue, by_expert)


class _Epilogue(NamedTuple):
    """The parts of an epilogue that are compiled in."""

    activation: CompiledIn | None
    derivative: bool
    scaled: bool  # derivatives only: whether there is a row scale
    keep: bool  # of the preactivation, or of the recomputed activation
    quantized: Format | None
    forms: tuple[bool, bool, bool] | None  # of a derivative in FP8


@functools.lru_cache(maxsize=4096)
def _ragged_m_launch(
    choose: Callable[[Problem], TileConfig],  # `tuning.forced` replaces it
    family: Family,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    weight: tuple[int, int, int],
    options: KernelOptions,
    epilogue: _Epilogue,
    by_expert: bool,
) -> _Launch:
    """Make the launch of a ragged M product; cached, since that takes as long as a launch."""
    experts, columns, depth = weight
    sms = sms_for(device, options)
    problem = Problem(family, rows, experts, columns, depth, sms, dtype.itemsize)
    config = choose(problem)
    kernel = _kernel(NAMES[dtype], config, epilogue, by_expert) if rows else _no_kernel
    return _Launch(kernel, device, options.schedule, scheduling(problem, config, sms), config.tile_n)


def _no_kernel(*_: Any) -> None:
    """Launch nothing: there are no rows."""


@functools.cache
def _kernel(dtype: str, config: TileConfig, epilogue: _Epilogue, by_expert: bool) -> Any:
    from fusedmoe.kernels.sm90.epilogue import outputs as epilogues  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.epilogue.codes_by_expert import CodesByExpert
    from fusedmoe.kernels.sm90.epilogue.derivative_codes import (  # deferred, too
        DerivativeCodes,
        derivative_codes,
    )
    from fusedmoe.kernels.sm90.epilogue.quantized import RowCodes  # deferred, too
    from fusedmoe.kernels.sm90.gemm.block_scales import BlockScaledRows
    from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
    from fusedmoe.kernels.sm90.gemm.tensor_scales import TensorScaled

    activation, derivative, scaled, keep, quantized, forms = epilogue
    if forms is not None:
        assert activation is not None
        assert not activation.interleaved
        assert quantized is not None
        assert quantized.rule is ScaleRule.POWER_OF_TWO
        results = DerivativeCodes(*forms, quantized.element.name)
        compiled = derivative_codes(activation.kind, results, clamped=activation.clamped, row_scale=scaled)
        return compiler.load(RaggedM(BlockScaledRows(dtype), config, epilogue=compiled))
    if activation is None:
        compiled = epilogues.PLAIN
    elif derivative:
        compiled = epilogues.derivative(**activation._asdict(), keep=keep, row_scale=scaled)
    else:
        codes: Output | None = None
        if quantized is not None and quantized.block[1] is None:
            codes = CodesByExpert(quantized.element.name)
        elif quantized is not None:
            codes = RowCodes(quantized.element.name, quantized.rule is ScaleRule.POWER_OF_TWO)
        compiled = epilogues.activation(**activation._asdict(), keep=keep, result=codes)
    operands = TensorScaled(dtype) if by_expert else BlockScaledRows(dtype)
    return compiler.load(RaggedM(operands, config, epilogue=compiled))
