"""Activations and their derivatives: gated linear units, and the squared ReLU.

Of a gated linear unit, let g be the gate half and u the up half of a row, ``gc = min(g, limit)`` and
``uc = clamp(u, -limit, limit)``::

    y = phi(gc) * (uc + offset)

Axes: I intermediate features; rows are (..., 2 I), their halves (..., I).

Sources: Shazeer, "GLU Variants Improve Transformer"; GPT-OSS and DeepSeek-V4 for the clamp, alpha and offset; So et
al., "Primer", for the squared ReLU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fusedmoe.base.checks import FINITE, FLAG, POSITIVE, Check, one_of
from fusedmoe.ops.op import BackwardOp, Op, SpecLike, TensorSpec, defined_before, exact

# the overloads that autograd itself calls
_silu_backward = torch.ops.aten.silu_backward.default
_gelu_backward = torch.ops.aten.gelu_backward.default
_threshold_backward = torch.ops.aten.threshold_backward.default


class GLU(Op):
    """The base class: a subclass defines the nonlinearity `phi`, with slope ``alpha``, and its derivative `dphi`."""

    reads_tail = False
    kind: ClassVar[str]  # of `fusedmoe.numerics.activations.KINDS`, if the kernels have the activation
    launches = 5
    _checks: ClassVar[Mapping[str, Check]] = {
        "limit": POSITIVE.or_none(),
        "alpha": POSITIVE,
        "offset": FINITE,
        "interleaved": FLAG,
    }

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        other = any(defined_before(cls, name, "backward_ops") for name in ("halves", "clamped"))
        if other or (defined_before(cls, "phi", "dphi") and defined_before(cls, "phi", "backward_ops")):
            cls.backward_ops = Op.backward_ops  # type: ignore[method-assign]  # the inherited op fits another function

    def __init__(
        self, limit: float | None = None, alpha: float = 1.0, offset: float = 0.0, interleaved: bool = False
    ) -> None:
        super().__init__()
        self.limit, self.alpha, self.offset, self.interleaved = limit, alpha, offset, interleaved

    @property
    def parts(self) -> int:  # type: ignore[override]
        """2, for ``[gate | up]``; 0 if they are interleaved."""
        return 0 if self.interleaved else 2

    def phi(self, g: Tensor) -> Tensor:
        """Return the gate's nonlinearity."""
        raise NotImplementedError(f"{type(self).__name__} defines no phi()")

    def dphi(self, g: Tensor, grad: Tensor) -> Tensor:
        """Return ``grad`` times the derivative of `phi`."""
        raise NotImplementedError(f"{type(self).__name__} defines no dphi()")

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up, (..., I) each, in fp32 or fp64."""
        x = exact(x)
        if self.interleaved:
            return x[..., ::2], x[..., 1::2]
        gate, up = x.chunk(2, dim=-1)
        return gate, up

    def clamped(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``min(gate, limit)`` and ``clamp(up, -limit, limit)``."""
        if self.limit is None:
            return gate, up
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)

    def infer(self, x: SpecLike) -> TensorSpec:
        self.check_floats("x", x.dtype)
        if not x.shape or x.shape[-1] % 2:
            raise self.reject("x", "an even number of features, gate and up", tuple(x.shape))
        return TensorSpec((*x.shape[:-1], x.shape[-1] // 2), x.dtype)

    def compute(self, x: Tensor) -> Tensor:
        gate, up = self.clamped(*self.halves(x))
        y = self.phi(gate) * (up + self.offset if self.offset else up)
        return y if y.dtype is x.dtype else y.to(x.dtype)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return (_DERIVATIVES[type(self)](self) if type(self) in _DERIVATIVES else DGLU(self),)

    def extra_repr(self) -> str:
        defaults = {"approximate": "tanh", "limit": None, "alpha": 1.0, "offset": 0.0, "interleaved": False}
        return ", ".join(f"{k}={getattr(self, k)!r}" for k, v in defaults.items() if getattr(self, k, v) != v)


class DGLU(BackwardOp):
    """``dg = dy * (uc + offset) * phi'(gc) * [g <= limit]``, ``du = dy * phi(gc) * [-limit <= u <= limit]``.

    The bounds are inclusive. This matters since a bf16 preactivation can equal 7.0, where the derivative of torch's
    clamp differs between versions.
    """

    reads_tail = False
    launches = 8
    op: GLU

    def compute(self, grad_output: Tensor, x: Tensor) -> Tensor:
        op = self.op
        gate, up = op.halves(x)
        gate_c, up_c = op.clamped(gate, up)
        dy = exact(grad_output)
        grad_gate = op.dphi(gate_c, dy * (up_c + op.offset if op.offset else up_c))
        grad_up = dy * op.phi(gate_c)
        if op.limit is not None:
            # a NaN counts as inside the bounds, so that it propagates
            grad_gate = torch.where(gate > op.limit, 0, grad_gate)
            grad_up = torch.where(up.abs() > op.limit, 0, grad_up)
        if op.interleaved:
            dx = rearrange([grad_gate, grad_up], "two ... i -> ... (i two)")
        else:
            dx = torch.cat((grad_gate, grad_up), dim=-1)
        return dx if dx.dtype is x.dtype else dx.to(x.dtype)


class SwiGLU(GLU):
    """``y = gc * sigmoid(alpha * gc) * (uc + offset)``, ``gc = min(g, limit)``, ``uc = clamp(u, -limit, limit)``.

    Rows are (..., 2 I), the result (..., I) in the same dtype; the arithmetic is fp32 (fp64 for fp64). Known variants:

    - GPT-OSS: ``SwiGLU(limit=7.0, alpha=1.702, offset=1.0, interleaved=True)``;
    - DeepSeek-V4: ``SwiGLU(limit=10.0)``;
    - Transformer Engine's ScaledClampedQGeGLU: ``SwiGLU(limit, alpha, offset)`` and a `Scale`.

    Parameters
    ----------
    limit
        Bound of gate and up; None disables the clamp.
    alpha
        Slope of the sigmoid.
    offset
        Added to up.
    interleaved
        Gate and up are the even and odd features of a row, instead of its first and second half (``[gate | up]``).
    """

    kind = "swiglu"

    def phi(self, g: Tensor) -> Tensor:
        return F.silu(g) if self.alpha == 1 else g * torch.sigmoid(self.alpha * g)

    def dphi(self, g: Tensor, grad: Tensor) -> Tensor:
        if self.alpha == 1 and not torch.is_grad_enabled():  # torch cannot differentiate _silu_backward
            return _silu_backward(grad, g)  # type: ignore[no-any-return]
        s = torch.sigmoid(self.alpha * g)
        return grad * s * (1 + self.alpha * g * (1 - s))


class GeGLU(GLU):
    """``y = gelu(alpha * gc) / alpha * (uc + offset)``; see `SwiGLU` for the halves and the other parameters.

    Parameters
    ----------
    approximate
        ``"tanh"``: ``gelu(x) = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``; ``"none"``: ``x/2 (1 + erf(x /
        sqrt(2)))``.
    """

    _checks: ClassVar[Mapping[str, Check]] = {**GLU._checks, "approximate": one_of(("tanh", "none"))}

    def __init__(
        self,
        approximate: str = "tanh",
        limit: float | None = None,
        alpha: float = 1.0,
        offset: float = 0.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__(limit, alpha, offset, interleaved)
        self.approximate = approximate

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "geglu_tanh" if self.approximate == "tanh" else "geglu_erf"

    def phi(self, g: Tensor) -> Tensor:
        return F.gelu(self.alpha * g, approximate=self.approximate) / self.alpha

    def dphi(self, g: Tensor, grad: Tensor) -> Tensor:
        return _gelu_backward(grad, self.alpha * g, approximate=self.approximate)  # type: ignore[no-any-return]


class ReGLU(GLU):
    """``y = max(gc, 0) * (uc + offset)``; see `SwiGLU` for the halves and the parameters. ``alpha`` cancels out.

    The derivative of ``max(g, 0)`` at 0 is 0, as in torch.
    """

    kind = "reglu"

    def phi(self, g: Tensor) -> Tensor:
        return torch.relu(g)

    def dphi(self, g: Tensor, grad: Tensor) -> Tensor:
        return _threshold_backward(grad, g, 0)  # type: ignore[no-any-return]


class DSwiGLU(DGLU):
    """The derivative of `SwiGLU`; see `DGLU`."""


class DGeGLU(DGLU):
    """The derivative of `GeGLU`; see `DGLU`."""


class DReGLU(DGLU):
    """The derivative of `ReGLU`; see `DGLU`."""


# one derivative class per activation, so that a rule can match only those that it supports
_DERIVATIVES: dict[type[GLU], type[DGLU]] = {SwiGLU: DSwiGLU, GeGLU: DGeGLU, ReGLU: DReGLU}


class SquaredReLU(Op):
    """``y = max(x, 0)^2``, elementwise; the arithmetic is fp32 (fp64 for fp64), the result has x's dtype.

    It is the activation of Nemotron.
    """

    reads_tail = False
    kind: ClassVar[str] = "squared_relu"
    launches = 3
    parts = 1

    def infer(self, x: SpecLike) -> TensorSpec:
        self.check_floats("x", x.dtype)
        return TensorSpec(tuple(x.shape), x.dtype)

    def compute(self, x: Tensor) -> Tensor:
        return torch.relu(exact(x)).square().to(x.dtype)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return (DSquaredReLU(self),)


class DSquaredReLU(BackwardOp):
    """``dx = 2 * max(x, 0) * dy``."""

    reads_tail = False
    launches = 4
    op: SquaredReLU

    def compute(self, grad_output: Tensor, x: Tensor) -> Tensor:
        return (2 * torch.relu(exact(x)) * exact(grad_output)).to(x.dtype)


FusedActivation: TypeAlias = SwiGLU | GeGLU | ReGLU | SquaredReLU
"""The activations that the kernels have: the slot of a rule."""
FusedDerivative: TypeAlias = DSwiGLU | DGeGLU | DReGLU | DSquaredReLU  # their derivatives
ACTIVATIONS: dict[str, type[Op]] = {"swiglu": SwiGLU, "geglu": GeGLU, "reglu": ReGLU, "squared_relu": SquaredReLU}
"""The activations that `MoE` and the commands accept by name."""
