"""The products of the Hopper kernels, as functions of flat tensors.

Axes: R rows sorted by expert, E experts, K contraction, N output features, I intermediate features (N = 2 I if gated),
H hidden features. No function waits for the GPU, except the first call on a device, which makes the tile counters.

An operand is a tensor in bf16 or fp16 on one sm_90 GPU, with unit stride along its features, or it is `Codes`. `limits`
states the other constraints. Each ``bind_*`` returns the function for operands of the same shapes, dtypes and strides
as its arguments. That function does no look-ups. Arguments that several functions have:

- ``offsets`` (E,) int32, the ends of the experts' rows, at most R. Rows after the last end, the *tail*, are never read,
  and are zeros in the results.
- ``weight`` (E, N, K), with unit stride along N or K; ``bias`` (E, N); ``row_scale`` (R,).
- ``activation`` and ``options``: see `Activation` and `KernelOptions`.
- ``gather`` (R,) int32, contiguous: row r of the first operand is ``operand[gather[r]]``. That operand then has T rows,
  and R is the size of ``gather``. The indices of the tail are not read; all others must be in [0, T). The rows of the
  operand are less than 2 GiB apart.

**Codes.** Both operands are codes and their scales, as `fusedmoe.numerics.formats` defines them for 1 x 128 blocks of
rows and 128 x 128 blocks of weights; quotients are rounded up:

- rows (R, K): codes with unit stride along K, E4M3 or, for gradients, E5M2; scales (R, K / 128) fp32 with unit stride
  along R;
- weights (E, N, K): codes with unit stride along K, E4M3; scales (E, N / 128, K / 128) fp32 with unit stride along
  N / 128, and no gaps between experts;
- for a weight gradient, columns (N, P) and (K, P), unit stride along P: see `bind_grouped_wgrad`.

Scales per expert, (E,) fp32 and contiguous, may take the place of both operands' scales per block. Pitches of codes are
multiples of 16, those of scales of 4. `with_strides` makes a copy of scales with such strides. Bias and results are
bf16. Rows are not gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.rows.move.functions import bind_sum_partials
from fusedmoe.kernels.rows.quantize.block_functions import Form, scale_like
from fusedmoe.kernels.sm90 import limits
from fusedmoe.kernels.sm90.launch import (
    Codes,
    Epilogue,
    Operand,
    Part,
    RaggedKKey,
    RaggedMKey,
    RaggedMLaunch,
    compiled_in,
    constants,
    may_begin_beside,
    ragged_k,
    ragged_m,
    scales_of,
    values_of,
)
from fusedmoe.kernels.sm90.tiles.choice import Family, choose
from fusedmoe.kernels.sm90.tiles.config import ALIGNMENT_BYTES, SCALE_BLOCK, SCALE_PITCH
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.expert_rows import padded_rows
from fusedmoe.numerics.formats import E4M3, Format

Optional = Tensor | None
WgradOperand = Literal["grad_output", "x"]  # an operand of a weight gradient
KERNEL_OPERAND: dict[WgradOperand | None, str | None] = {None: None, "grad_output": "a", "x": "b"}


def bind_grouped_gemm(
    x: Operand,
    weight: Operand,
    bias: Optional,
    row_scale: Optional,
    options: KernelOptions,
    gather: Optional = None,
    *,
    ranges: bool = False,
) -> Callable[..., Tensor]:
    """Return a function of ``(x, weight, bias, offsets, row_scale, gather=None, out=None)``.

    For each row r of expert e, it returns ``y[r] = (x[r] @ weight[e].T + bias[e]) * row_scale[r]``: (R, N) of x (R, K);
    with ``gather``, x is (T, K). Of a gradient dy and ``weight.mT``, the result is the gradient of the input.

    With ``ranges``, an iterable of `Part` takes the place of the offsets: one launch for each part, which has some
    consecutive blocks of `bind_row_ranges` or `bind_expert_blocks`. The launch reads the rows of a block when no word
    up to that block's is negative.
    """
    rows, columns = _rows(x, gather), values_of(weight).shape[1]
    launch = _ragged_m(
        "plain", x, weight, Epilogue(), options, gather, bias=bias, row_scale=row_scale, ranges=ranges
    ).run
    same = isinstance(x, Tensor)

    def run(
        x: Any,
        weight: Operand,
        bias: Optional,
        offsets: Tensor,
        row_scale: Optional,
        gather: Optional = None,
        out: Optional = None,
    ) -> Tensor:
        if out is None:
            # not a tuple, which takes 1.5 times as long
            out = x.new_empty(rows, columns) if same else x.codes.new_empty(rows, columns, dtype=torch.bfloat16)
        if gather is None:
            launch(x, weight, offsets, bias, row_scale, out)
        else:
            launch(x, weight, offsets, bias, row_scale, gather, out)
        return out

    return run


def bind_counted_gemm(
    x: Operand, weight: Operand, bias: Optional, options: KernelOptions
) -> tuple[Callable[..., Tensor], tuple[int, int]]:
    """Return `bind_grouped_gemm` of a product without a row scale that counts its tiles: a function of ``(x, weight,
    bias, blocks, out=None)``, the rows of a tile, and the number of column tiles.

    When the results of a tile are in memory, the product adds 2 to the counter of its block, with release semantics. A
    range of the block with r rows has ``ceil(r / rows of a tile)`` row tiles, each with all column tiles.

    A launch may begin beside the product, on the SMs that ``options`` leave free. It must not use the tile counter, nor
    let others begin before it ends, and it must end after the product: see `exchange.functions.bind_push_sums`.

    - ``blocks``: all blocks of `bind_row_ranges` or `bind_expert_blocks`.
    """
    rows, columns, same = _rows(x, None), values_of(weight).shape[1], isinstance(x, Tensor)
    launch, tile_m, tile_n = _ragged_m(
        "plain", x, weight, Epilogue(), options, None, bias=bias, ranges=True, signals=True
    )

    def run(x: Any, weight: Operand, bias: Optional, blocks: Tensor, out: Optional = None) -> Tensor:
        if out is None:
            out = x.new_empty(rows, columns) if same else x.codes.new_empty(rows, columns, dtype=torch.bfloat16)
        launch(x, weight, [Part(blocks)], bias, None, out)
        return out

    return run, (tile_m, -(-columns // tile_n))


def bind_grouped_gemm_activation(
    x: Operand,
    weight: Operand,
    bias: Optional,
    row_scale: Optional,
    activation: Activation,
    keep_preactivation: bool,
    options: KernelOptions,
    gather: Optional = None,
    *,
    quantized: Format | None = None,
    ranges: bool = False,
) -> Callable[..., Any]:
    """Return a function of ``(x, weight, bias, offsets, row_scale, gather=None)``:
    ``p[r] = x[r] @ weight[e].T + bias[e]``, ``y[r] = activation(p[r]) * row_scale[r]``.

    Of `Codes`, p is rounded to bf16 before the activation. y is rounded to bf16 and, with ``quantized``, then quantized
    by rows.

    - ``x``: (R, K); with ``gather`` (T, K).
    - ``weight``: (E, N, K). For a gated activation, the rows of gate come before those of up, or the two alternate. Of
      `Codes`, they do not alternate, and half of N is a multiple of 128, or of 16 with scales per expert.
    - ``keep_preactivation``: return p too.
    - ``quantized``: of `Codes`: the format of y, in blocks of 1 x 128; None for y in bf16.
    - ``ranges``: as for `bind_grouped_gemm`.

    Its results: y (R, I), or the codes of y (R, I) and their scale (R, I / 128) with unit stride along R; then p (R, N)
    if p is kept. Of tensors, without p, the result is y alone.

    For a format with one scale per expert, the function takes two more tensors in place of ``gather``, (E,) fp32: the
    factor of each expert, and zeros, to which it writes the largest finite magnitude of each expert's y. It returns the
    codes of y, and then p if it is kept.
    """
    rows, columns = _rows(x, gather), values_of(weight).shape[1]
    features = columns // 2 if activation.gated else columns
    epilogue = Epilogue(compiled_in(activation), keep=keep_preactivation, quantized=quantized)
    launch = _ragged_m(
        "activation", x, weight, epilogue, options, gather,
        activation=activation, bias=bias, row_scale=row_scale, ranges=ranges,
    ).run  # fmt: skip

    def run(
        x: Tensor, weight: Tensor, bias: Optional, offsets: Tensor, row_scale: Optional, gather: Optional = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        y = x.new_empty(rows, features)
        index = () if gather is None else (gather,)
        if not keep_preactivation:
            launch(x, weight, offsets, bias, row_scale, *index, y)
            return y
        p = x.new_empty(rows, columns)
        launch(x, weight, offsets, bias, row_scale, *index, p, y)
        return y, p

    def run_codes(
        x: Codes, weight: Codes, bias: Optional, offsets: Tensor, row_scale: Optional, *factor_and_amax: Tensor
    ) -> tuple[Tensor, ...]:
        like = x.codes
        p = (like.new_empty(rows, columns, dtype=torch.bfloat16),) if keep_preactivation else ()
        if quantized is not None and quantized.block[1] is None:
            codes, (factor, amax) = like.new_empty(rows, features, dtype=torch.uint8), factor_and_amax
            y: tuple[Tensor, ...] = (codes.view(quantized.element.dtype),)
            written: tuple[Tensor, ...] = (codes.view(torch.bfloat16), factor, amax.view(torch.int32))
        elif quantized is None:
            y = (like.new_empty(rows, features, dtype=torch.bfloat16),)
            written = y
        else:
            codes = like.new_empty(rows, features, dtype=torch.uint8)
            scale = scale_like(like, rows, features)
            y, written = (codes.view(quantized.element.dtype), scale), (codes.view(torch.bfloat16), scale)
        launch(x, weight, offsets, bias, row_scale, *p, *written)
        return (*y, *p)

    return run if isinstance(x, Tensor) else run_codes


def bind_grouped_gemm_activation_backward(
    grad_output: Operand,
    weight: Operand,
    preactivation: Tensor,
    row_scale: Optional,
    activation: Activation,
    want_output: bool,
    want_row_scale_grad: bool,
    options: KernelOptions,
    gather: Optional = None,
    *,
    ranges: bool = False,
) -> Callable[..., tuple[Tensor, Optional, Optional]]:
    """Return a function of ``(grad_output, weight, offsets, preactivation, row_scale, gather=None)``: gradient of p,
    given ``d[r] = grad_output[r] @ weight[e]``, the gradient of ``activation(p[r]) * row_scale[r]``.

    It is one launch; with ``want_row_scale_grad``, a sum follows.

    - ``grad_output``: (R, H); with ``gather`` (T, H).
    - ``weight``: (E, H, I) as the layer after the activation stores it, with unit stride along H or I. Of `Codes`, (E,
      I, H): the form by columns.
    - ``preactivation``: p: (R, 2 I) if gated, else (R, I).
    - ``want_output``: return the recomputed ``activation(p) * row_scale`` too.
    - ``want_row_scale_grad``: return ``sum over i of d[r, i] * activation(p)[r, i]`` too. The kernel writes one sum per
      column tile. A second launch adds them up in a fixed order, so the result is deterministic.
    - ``ranges``: as for `bind_grouped_gemm`.

    Its results: gradient of p, the activation (R, I), and the row scale's gradient (R,) in fp32; None where not wanted.
    """
    rows, features = preactivation.shape
    scaled = want_row_scale_grad or row_scale is not None
    epilogue = Epilogue(compiled_in(activation), derivative=True, scaled=scaled, keep=want_output)
    product = _bind_derivative(
        "derivative", grad_output, weight, preactivation, row_scale, activation, epilogue, want_row_scale_grad,
        options, gather, ranges,
    )  # fmt: skip
    outputs = values_of(_by_columns(weight)).shape[1]

    def run(
        grad_output: Operand,
        weight: Operand,
        offsets: Tensor,
        preactivation: Tensor,
        row_scale: Optional,
        gather: Optional = None,
    ) -> tuple[Tensor, Optional, Optional]:
        grad = preactivation.new_empty(rows, features)
        y = preactivation.new_empty(rows, outputs) if want_output else None
        results, index = (grad,) if y is None else (grad, y), () if gather is None else (gather,)
        return grad, y, product(grad_output, weight, offsets, preactivation, row_scale, index, results)

    return run


def bind_grouped_gemm_activation_backward_codes(
    grad_output: Codes,
    weight: Codes,
    preactivation: Tensor,
    row_scale: Optional,
    activation: Activation,
    quantized: Format,
    forms: tuple[bool, bool, bool],
    want_row_scale_grad: bool,
    options: KernelOptions,
    *,
    ranges: bool = False,
) -> Callable[..., tuple[tuple[Form, ...], Optional]]:
    """Return `bind_grouped_gemm_activation_backward` with results in FP8: the ``forms`` that are true of the gradient
    by rows, the gradient by columns and the output by columns; and the row scale's gradient.

    A form is codes and scales, with shapes and strides as by `block_functions.bind_quantize_rows`. ``quantized`` is the
    format of the gradient, with scales that are powers of two. The output is E4M3. I is a multiple of 128.

    - ``ranges``: as for `bind_grouped_gemm`, but with a single part: all blocks of `bind_row_ranges`, with
      ``paddings``.
    """
    (rows, features), (experts, outputs, _) = preactivation.shape, weight.codes.shape
    scaled = want_row_scale_grad or row_scale is not None
    epilogue = Epilogue(compiled_in(activation), derivative=True, scaled=scaled, quantized=quantized, forms=forms)
    product = _bind_derivative(
        "fp8_derivative_codes", grad_output, weight, preactivation, row_scale, activation, epilogue,
        want_row_scale_grad, options, ranges=ranges,
    )  # fmt: skip
    padded = padded_rows(rows, experts, SCALE_BLOCK)
    by_rows, by_columns, again = forms
    of_grad = quantized.element.dtype
    shapes = [(rows, features, of_grad)] * by_rows + [(features, padded, of_grad)] * by_columns
    shapes += [(outputs, padded, E4M3.dtype)] * again

    def run(
        grad_output: Codes, weight: Codes, offsets: Tensor, preactivation: Tensor, row_scale: Optional
    ) -> tuple[tuple[Form, ...], Optional]:
        results: list[Form] = []
        written: list[Tensor] = []
        for lines, length, dtype in shapes:
            codes = preactivation.new_empty(lines, length, dtype=torch.uint8)
            scale = scale_like(preactivation, lines, length)
            results.append((codes.view(dtype), scale))
            written += [codes.view(torch.bfloat16) if by_rows and not written else codes, scale]
        return tuple(results), product(grad_output, weight, offsets, preactivation, row_scale, (), tuple(written))

    return run


def _bind_derivative(
    family: Family,
    grad_output: Operand,
    weight: Operand,
    preactivation: Tensor,
    row_scale: Optional,
    activation: Activation,
    epilogue: Epilogue,
    want_grad: bool,
    options: KernelOptions,
    gather: Optional = None,
    ranges: bool = False,
) -> Callable[..., Optional]:
    """Return a derivative of ``(grad_output, weight, offsets, preactivation, row_scale, index, results)``, which
    returns the row scale's gradient, (R,) fp32, if it is wanted.

    With a row scale, the kernel also writes a sum per row and column tile, and a second launch adds up those of a row.
    A gradient that is wanted without a row scale is that of a row scale of ones.
    """
    rows, device = preactivation.shape[0], preactivation.device
    launch, _, tile_n = _ragged_m(
        family, grad_output, _by_columns(weight), epilogue, options, gather,
        activation=activation, row_scale=row_scale, ranges=ranges, unscaled=want_grad and row_scale is None,
    )  # fmt: skip
    tiles = -(-values_of(_by_columns(weight)).shape[1] // tile_n) if rows else 1
    partials = (tiles, -(-rows // limits.UNIT) * limits.UNIT)
    total = bind_sum_partials(*partials) if want_grad else None

    def run(
        grad_output: Operand,
        weight: Operand,
        offsets: Tensor,
        preactivation: Tensor,
        row_scale: Optional,
        index: tuple[Tensor, ...],
        results: tuple[Tensor, ...],
    ) -> Optional:
        b = _by_columns(weight)
        if not epilogue.scaled:
            launch(grad_output, b, offsets, None, None, *index, preactivation, *results)
            return None
        partial = torch.empty(partials, dtype=torch.float32, device=device)
        if row_scale is None:
            row_scale = torch.ones(rows, dtype=torch.float32, device=device)
        launch(grad_output, b, offsets, None, row_scale, *index, preactivation, partial[:, :rows], *results)
        return None if total is None else total(partial)[:rows]

    return run


def _by_columns(weight: Operand) -> Operand:
    """Return a weight (E, H, I) as (E, I, H); codes are by columns already."""
    return weight.mT if isinstance(weight, Tensor) else weight


def bind_grouped_wgrad(
    grad_output: Operand,
    x: Operand,
    offsets: Tensor,
    dtype: torch.dtype,
    accumulate: bool,
    options: KernelOptions,
    gather: Optional = None,
    gathered: WgradOperand | None = None,
    beside: bool = False,
    *,
    transposed: bool = False,
) -> Callable[..., Tensor]:
    """Return a function of ``(grad_output, x, offsets, out=None, gather=None)``: ``dW[e] = grad_output[rows of e].T @
    x[rows of e]``, (E, N, K); zeros for an expert without rows.

    - ``grad_output``, ``x``: (R, N) and (R, K). The one that is ``gathered`` has T rows instead. Of `Codes`, both are
      in columns form: codes (N, P) and (K, P), N and K multiples of 16; ``x`` is E4M3. Each expert's rows begin at a
      multiple of 128; the codes of padding are zeros. Codes after the last expert's padding are not read. Scales are
      (N, P / 128) and (K, P / 128), with the strides of `with_strides`, or both (E,).
    - ``out``: (E, N, K) of this ``dtype``: the tensor to write or to add to; None for a new one. Of `Codes`, the dtype
      is bf16, fp16 or fp32.
    - ``accumulate``: add to ``out``, after rounding to its dtype. The gradient of an expert without rows does not
      change.
    - ``gather``, ``gathered``: (R,) int32, and the operand that it is for: row r of that operand is its row
      ``gather[r]``. Entries of the tail are not read.

    Raises `ValueError`: only one of ``gather`` and ``gathered`` is given, ``gathered`` is not "grad_output" or "x", or
    ``gather`` is not a contiguous int32 vector.

    With ``transposed``, the result is ``.mT`` of a contiguous tensor (E, K, N), and so is ``out``. Of `Codes` of
    two dtypes, it is not: no kernel takes E5M2 as its second operand.

    With ``beside``, the kernel begins while the launch before it runs, if that launch allows it, on the SMs that this
    launch leaves free; the schedule is dynamic, see `launch.may_begin_beside`. No argument may be a result of that
    launch.
    """
    if gathered not in KERNEL_OPERAND or (gather is None) != (gathered is None):
        given = f"{'no' if gather is None else 'an'} index"
        raise ValueError(
            f"gathered: expected 'grad_output' or 'x' and an index, or None and no index, got {gathered!r}, {given}"
        )
    a, b = values_of(grad_output), values_of(x)
    if transposed and a.dtype is b.dtype:
        exchanged: dict[WgradOperand | None, WgradOperand | None] = {None: None, "x": "grad_output", "grad_output": "x"}
        product = bind_grouped_wgrad(
            x, grad_output, offsets, dtype, accumulate, options, gather, exchanged[gathered], beside
        )
        return lambda dy, x, offsets, out=None, gather=None: (
            product(x, dy, offsets, None if out is None else out.mT, gather).mT
        )
    experts, device = offsets.shape[0], b.device
    if isinstance(x, Tensor):
        rows, n, k = _rows(a if gathered == "grad_output" else b, gather), a.shape[1], b.shape[1]
    else:
        n, k, rows = a.shape[0], b.shape[0], a.shape[1]  # with padding
    same, plain, launch = dtype is b.dtype, isinstance(x, Tensor), None
    if rows:
        launch = ragged_k(
            RaggedKKey(
                choose=choose, device=device, dtype=a.dtype, scales=scales_of(grad_output), rows=rows, experts=experts,
                n=n, k=k, out=dtype, accumulate=accumulate, gathered=KERNEL_OPERAND[gathered], options=options,
                beside=may_begin_beside(device, beside),
            )
        )  # fmt: skip

    def run(grad_output: Operand, x: Any, offsets: Tensor, out: Optional = None, gather: Optional = None) -> Tensor:
        if out is None:
            like = x if plain else x.codes
            out = like.new_empty(experts, n, k) if same else like.new_empty(experts, n, k, dtype=dtype)
        if launch is None:
            if not accumulate:
                out.zero_()
        elif gather is None:
            launch(grad_output, x, offsets, out)
        else:
            launch(grad_output, x, offsets, out, gather)
        return out

    return run


def _ragged_m(
    kind: Family,
    a: Operand,
    b: Operand,
    epilogue: Epilogue,
    options: KernelOptions,
    gather: Optional,
    *,
    activation: Activation | None = None,
    bias: Optional = None,
    row_scale: Optional = None,
    unscaled: bool = False,
    ranges: bool = False,
    signals: bool = False,
) -> RaggedMLaunch:
    """Return the launch of a ragged M product of operands like these. ``kind`` is the family of plain operands;
    ``unscaled``: a row scale of ones takes the place of the missing one.
    """
    rows, values, weight = _rows(a, gather), values_of(a), values_of(b)
    experts, columns, depth = weight.shape
    b_major = "k" if weight.stride()[2] == 1 and depth > 1 else "n"
    scales = scales_of(a)
    scale = torch.float32 if unscaled else None if row_scale is None else row_scale.dtype
    return ragged_m(
        RaggedMKey(
            choose=choose, family=_family(kind, activation, scales is not None, b_major), device=values.device,
            dtype=values.dtype, scales=scales, rows=rows, experts=experts, columns=columns, depth=values.shape[1],
            b_major=b_major if scales is None else "k", epilogue=epilogue, constants=constants(activation),
            biased=bias is not None, scale=scale, options=options, gather=gather is not None, ranges=ranges,
            signals=signals,
        )
    )  # fmt: skip


def _family(kind: Family, activation: Activation | None, scaled: bool, b_major: str) -> Family:
    """Return the family of a product, for the choice of tiles."""
    if scaled:
        in_fp8: dict[Family, Family] = {
            "plain": "fp8_plain", "activation": "fp8_activation", "derivative": "fp8_derivative"
        }  # fmt: skip
        return in_fp8.get(kind, kind)
    if activation is None:
        return kind
    if kind == "derivative" and activation.heavy:
        return "heavy_derivative"
    if kind == "activation" and b_major == "n" and activation.gated and not activation.interleaved:
        return "transposed_activation"
    return kind


def _rows(operand: Operand, gather: Optional) -> int:
    """Return R, after a check of the index."""
    values = values_of(operand)
    if gather is None:
        return values.shape[0]
    if gather.dtype is not torch.int32 or gather.dim() != 1 or not gather.is_contiguous():
        shape, strides = tuple(gather.shape), gather.stride()
        raise ValueError(f"gather is {gather.dtype}, {shape}, strides {strides}: expected a contiguous int32 vector")
    reason = limits.why_not_gathered(values.stride(0))
    if reason is not None:
        raise ValueError(reason)
    return gather.shape[0]


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
    """Whether kernels can read scales: contiguous per expert; else unit stride along M, whole vectors, no gaps."""
    if scale.dim() == 1:
        return scale.is_contiguous()
    *experts, line, pitch = scale.stride()
    dense = not experts or experts[0] == pitch * scale.shape[-1]
    whole = pitch % SCALE_PITCH == 0 and pitch >= scale.shape[-2]
    return line == 1 and whole and dense and scale.data_ptr() % ALIGNMENT_BYTES == 0
