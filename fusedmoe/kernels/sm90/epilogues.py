"""The arithmetic of the epilogues: activations and their derivatives on fp32 scalars in registers.

Each function is the formula of the op of the same name; ``limit``, ``alpha`` and ``offset`` are run-time numbers,
whether there is a limit is not. Comparisons are written so that a NaN stays a NaN.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

LOG2_E = math.log2(math.e)


@cute.jit
def sigmoid(x: Float32, alpha: Float32) -> Float32:
    """``1 / (1 + exp(-alpha * x))``. alpha and log2(e) meet first: their product is the same for all values."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * (alpha * Float32(-LOG2_E)), fastmath=True))


@cute.jit
def gate_and_slope(kind: cutlass.Constexpr[str], g: Float32, alpha: Float32) -> tuple[Float32, Float32]:
    """``phi(g)`` and ``phi'(g)``."""
    if const_expr(kind == "swiglu"):
        s = sigmoid(g, alpha)
        y = g * s
        return y, s + alpha * (y - y * s)
    if const_expr(kind == "geglu_tanh"):
        x = alpha * g
        inner = Float32(math.sqrt(2 / math.pi)) * (x + Float32(0.044715) * x * x * x)
        t = Float32(2.0) * sigmoid(inner, Float32(2.0)) - Float32(1.0)  # tanh(inner)
        half = Float32(0.5) + Float32(0.5) * t
        d_inner = Float32(math.sqrt(2 / math.pi)) * (Float32(1.0) + Float32(3 * 0.044715) * x * x)
        return g * half, half + Float32(0.5) * x * (Float32(1.0) - t * t) * d_inner
    if const_expr(kind == "geglu_erf"):
        x = alpha * g
        cdf = Float32(0.5) + Float32(0.5) * cute.math.erf(x * Float32(math.sqrt(0.5)))
        density = cute.math.exp2(x * x * Float32(-0.5 * LOG2_E), fastmath=True) * Float32(1 / math.sqrt(2 * math.pi))
        return g * cdf, cdf + x * density
    positive = g > Float32(0.0)
    zero = Float32(0.0)
    # not max(g, 0): that would turn a NaN into a zero
    y = cutlass.select_(g <= zero, zero, g)
    return y, cutlass.select_(positive, Float32(1.0), zero)


@cute.jit
def clamp(g: Float32, u: Float32, limit: Float32) -> tuple[Float32, Float32]:
    """``min(g, limit)`` and ``clamp(u, -limit, limit)``."""
    least = cute.arch.fmin(u, limit, nan=True)
    return cute.arch.fmin(g, limit, nan=True), cute.arch.fmax(least, -limit, nan=True)


@cute.jit
def glu(
    kind: cutlass.Constexpr[str],
    clamped: cutlass.Constexpr[bool],
    g: Float32,
    u: Float32,
    limit: Float32,
    alpha: Float32,
    offset: Float32,
) -> Float32:
    """``phi(min(g, limit)) * (clamp(u, -limit, limit) + offset)``."""
    if const_expr(clamped):
        g, u = clamp(g, u, limit)
    y, _ = gate_and_slope(kind, g, alpha)
    return y * (u + offset)


@cute.jit
def glu_backward(
    kind: cutlass.Constexpr[str],
    clamped: cutlass.Constexpr[bool],
    d: Float32,
    g: Float32,
    u: Float32,
    limit: Float32,
    alpha: Float32,
    offset: Float32,
    scale: Float32 | None,
) -> tuple[Float32, Float32, Float32, Float32]:
    """For the gradient ``d`` of ``act * scale``: gradients of gate and up, ``act * scale``, and ``d * act``."""
    d_gate, beyond = d, cutlass.Boolean(False)
    if const_expr(clamped):
        d_gate = cutlass.select_(g > limit, Float32(0.0), d)
        beyond = cute.math.absf(u) > limit
        g, u = clamp(g, u, limit)
    phi, slope = gate_and_slope(kind, g, alpha)
    up = u + offset
    du = d * phi
    d_scale = du * up
    if const_expr(clamped):
        du = cutlass.select_(beyond, Float32(0.0), du)
    if const_expr(scale is not None):
        # gate's gradient and the activation have their scale from up: one product less than to scale each
        up, du = up * scale, du * scale
    return d_gate * slope * up, du, phi * up, d_scale


@cute.jit
def squared_relu(x: Float32) -> Float32:
    """``max(x, 0)^2``."""
    y = cutlass.select_(x <= Float32(0.0), Float32(0.0), x)
    return y * y


@cute.jit
def squared_relu_backward(d: Float32, x: Float32, scale: Float32 | None) -> tuple[Float32, Float32, Float32]:
    """For the gradient ``d`` of ``act * scale``: ``2 max(x, 0) d scale``, ``act * scale``, and ``d * act``."""
    y = cutlass.select_(x <= Float32(0.0), Float32(0.0), x)
    act = y * y
    d_scale = d * act
    if const_expr(scale is not None):
        y, act = y * scale, act * scale
    return Float32(2.0) * y * d, act, d_scale
