"""Names of values, as strings; `graph` says what they mean."""

from __future__ import annotations

NONE = "none"
"""The value that is always None: a gradient that does not arrive."""


def grad(value: str) -> str:
    """Return the name of a value's gradient."""
    return f"grad({value})"


def primal(value: str) -> str:
    """Return the value that ``grad(v)``, or a contribution ``grad(v)#1`` to it, is the gradient of; any other value as
    it is.
    """
    return value[5:].rpartition(")")[0] if value.startswith("grad(") else value


def columns(value: str) -> str:
    """Return the name of a quantized value as it is by columns; its own name is that by rows."""
    return f"{value}:columns"


def dequantized(value: str) -> str:
    """Return the name of what a quantized value stands for."""
    return f"{value}:dequantized"


def quantized(parameter: str) -> str:
    """Return the name of a parameter as it is quantized, by rows."""
    return f"{parameter}:quantized"
