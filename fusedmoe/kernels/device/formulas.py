"""The arithmetic of the epilogues: activations and their derivatives on fp32 scalars in registers.

The formulas are those of the ops. `GATES` and `UNGATED` have them by name, for each entry of
`fusedmoe.numerics.activations.KINDS`. ``constants`` (limit, alpha and offset) are run-time numbers. ``kind`` and
``clamped``, whether a limit exists, are compile-time constants. Comparisons are written so that a NaN stays a NaN.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

LOG2_E = math.log2(math.e)


def sigmoid(x, alpha):
    """``1 / (1 + exp(-alpha * x))``. alpha * log2(e) is computed first: it is the same for all values."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * (alpha * Float32(-LOG2_E)), fastmath=True))


# ------------------------------------------------------------------------------------------ with a gate: phi and slope


def swiglu(g, alpha):
    """``g * sigmoid(alpha * g)``."""
    s = sigmoid(g, alpha)
    y = g * s
    return y, s + alpha * (y - y * s)


def geglu_tanh(g, alpha):
    """``gelu(alpha * g) / alpha`` by its approximation with tanh."""
    x = alpha * g
    inner = Float32(math.sqrt(2 / math.pi)) * (x + Float32(0.044715) * x * x * x)
    t = Float32(2.0) * sigmoid(inner, Float32(2.0)) - Float32(1.0)  # tanh(inner)
    half = Float32(0.5) + Float32(0.5) * t
    d_inner = Float32(math.sqrt(2 / math.pi)) * (Float32(1.0) + Float32(3 * 0.044715) * x * x)
    return g * half, half + Float32(0.5) * x * (Float32(1.0) - t * t) * d_inner


def geglu_erf(g, alpha):
    """``gelu(alpha * g) / alpha``."""
    x = alpha * g
    cdf = Float32(0.5) + Float32(0.5) * cute.math.erf(x * Float32(math.sqrt(0.5)))
    density = cute.math.exp2(x * x * Float32(-0.5 * LOG2_E), fastmath=True) * Float32(1 / math.sqrt(2 * math.pi))
    return g * cdf, cdf + x * density


def reglu(g, alpha):
    """``max(g, 0)``."""
    positive = g > Float32(0.0)
    zero = Float32(0.0)
    # not max(g, 0): that would turn a NaN into a zero
    y = cutlass.select_(g <= zero, zero, g)
    return y, cutlass.select_(positive, Float32(1.0), zero)


GATES = {formula.__name__: formula for formula in (swiglu, geglu_tanh, geglu_erf, reglu)}
"""Functions of g and alpha: ``phi(g)`` and ``phi'(g)``."""


def clamp(g, u, limit):
    """``min(g, limit)`` and ``clamp(u, -limit, limit)``."""
    least = cute.arch.fmin(u, limit, nan=True)
    return cute.arch.fmin(g, limit, nan=True), cute.arch.fmax(least, -limit, nan=True)


def glu(phi_and_slope, clamped, g, u, constants):
    """``phi(min(g, limit)) * (clamp(u, -limit, limit) + offset)``."""
    limit, alpha, offset = constants
    if clamped:
        g, u = clamp(g, u, limit)
    y, _ = phi_and_slope(g, alpha)
    return y * (u + offset)


def glu_backward(phi_and_slope, clamped, d, g, u, constants, scale):
    """For the gradient ``d`` of ``act * scale``: gradients of gate and up, ``act * scale``, and ``d * act``."""
    limit, alpha, offset = constants
    d_gate, beyond = d, Boolean(False)
    if clamped:
        d_gate = cutlass.select_(g > limit, Float32(0.0), d)
        beyond = cute.math.absf(u) > limit
        g, u = clamp(g, u, limit)
    phi, slope = phi_and_slope(g, alpha)
    up = u + offset
    du = d * phi
    d_scale = du * up
    if clamped:
        du = cutlass.select_(beyond, Float32(0.0), du)
    if scale is not None:
        # up carries the scale into gate's gradient and the activation: one product less than scaling each
        up, du = up * scale, du * scale
    return d_gate * slope * up, du, phi * up, d_scale


# ------------------------------------------------------------------------------------------------------ without a gate


def squared_relu(x):
    """``max(x, 0)^2``."""
    y = cutlass.select_(x <= Float32(0.0), Float32(0.0), x)
    return y * y


def squared_relu_backward(d, x, scale):
    """For the gradient ``d`` of ``act * scale``: ``2 max(x, 0) d scale``, ``act * scale``, and ``d * act``."""
    y = cutlass.select_(x <= Float32(0.0), Float32(0.0), x)
    act = y * y
    d_scale = d * act
    if scale is not None:
        y, act = y * scale, act * scale
    return Float32(2.0) * y * d, act, d_scale


UNGATED = {"squared_relu": (squared_relu, squared_relu_backward)}  # the activation of x, and its derivative


# ------------------------------------------------------------------------------------------------------------ by name


def activation(kind, clamped, g, u, constants):
    """The activation of gate and up; without a gate, that of ``g``."""
    if kind in GATES:
        return glu(GATES[kind], clamped, g, u, constants)
    value, _ = UNGATED[kind]
    return value(g)


def derivative(kind, clamped, d, g, u, constants, scale):
    """For the gradient ``d`` of ``act * scale``: the gradient of ``g``, with a gate that of ``u``, ``act * scale``, and
    ``d * act``.
    """
    if kind in GATES:
        return glu_backward(GATES[kind], clamped, d, g, u, constants, scale)
    _, backward = UNGATED[kind]
    return backward(d, g, scale)
