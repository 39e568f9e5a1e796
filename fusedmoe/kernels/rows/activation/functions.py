"""The kernels of `kernel.py` as functions of torch tensors. No call waits for the device.

Each ``bind_*`` returns the function for tensors of the same shapes, dtypes and strides as its arguments. Rows are bf16
or fp16, with unit stride along their features. I and pitches are multiples of 8, addresses multiples of 16 bytes.
`limits` checks these constraints.

Axes: R rows, I features of the activation's result, N features of the preactivation: 2 I if the activation is gated.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fusedmoe.base.target import kernel_arch
from fusedmoe.kernels.build.compiler import load
from fusedmoe.kernels.rows.move.functions import NAMES
from fusedmoe.kernels.rows.move.slot_functions import no_scale
from fusedmoe.kernels.sm90.launch import compiled_in, constants
from fusedmoe.numerics.activations import Activation


def bind_activation(
    p_RN: Tensor, scale_R: Tensor | None, activation: Activation
) -> Callable[[Tensor, Tensor | None], Tensor]:
    """Return the function of ``(p, scale)``: ``y[r] = act(p[r]) * scale[r]``, (R, I), in the dtype of p.

    - ``p_RN``: the preactivation; R > 0.
    - ``scale_R``: fp32, bf16 or fp16, contiguous; None for no scale.
    """
    from fusedmoe.kernels.rows.activation.kernel import Activate  # deferred: imports the CuTe DSL

    rows, columns = p_RN.shape
    features = columns // 2 if activation.gated else columns
    kernel = load(Activate(*_kind(p_RN, scale_R, activation), arch=kernel_arch(p_RN.device)))
    nothing, numbers = no_scale(rows, p_RN.device), constants(activation)

    def run(p_RN: Tensor, scale_R: Tensor | None) -> Tensor:
        y_RI = p_RN.new_empty(rows, features)
        kernel(p_RN, nothing if scale_R is None else scale_R, y_RI, *numbers)
        return y_RI

    return run


def bind_activation_backward(
    dy_RI: Tensor, p_RN: Tensor, scale_R: Tensor | None, activation: Activation, want_scale: bool, want_output: bool
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor | None]]:
    """Return the function of ``(dy, p, scale)``: the gradients of p and of the scale, and y of `bind_activation`.

    - ``dy_RI``: the gradient of y, in the dtype of p.
    - ``p_RN``, ``scale_R``, ``activation``: as for `bind_activation`.
    - ``want_scale``, ``want_output``: whether the gradient of the scale, in its dtype, and y are computed; None
      otherwise.
    """
    from fusedmoe.kernels.rows.activation.kernel import ActivateBackward  # deferred: imports the CuTe DSL

    rows, _ = dy_RI.shape
    kind = _kind(p_RN, scale_R, activation)
    kernel = load(ActivateBackward(*kind, want_scale, want_output, arch=kernel_arch(p_RN.device)))
    nothing, numbers = no_scale(rows, p_RN.device), constants(activation)

    def run(dy_RI: Tensor, p_RN: Tensor, scale_R: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dp_RN = p_RN.new_empty(p_RN.shape)
        scale = nothing if scale_R is None else scale_R
        dscale_R = scale.new_empty(rows) if want_scale else None
        y_RI = dy_RI.new_empty(dy_RI.shape) if want_output else None
        kernel(
            dy_RI, p_RN, scale, dp_RN, scale if dscale_R is None else dscale_R, dy_RI if y_RI is None else y_RI,
            *numbers,
        )  # fmt: skip
        return dp_RN, dscale_R, y_RI

    return run


def _kind(p: Tensor, scale: Tensor | None, activation: Activation) -> tuple[str, str, bool, bool, str | None]:
    parts = compiled_in(activation)
    assert parts is not None
    return NAMES[p.dtype], parts.kind, parts.clamped, parts.interleaved, None if scale is None else NAMES[scale.dtype]
