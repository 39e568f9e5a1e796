"""Activations of the kernels' epilogues, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["swiglu", "geglu_tanh", "geglu_erf", "reglu", "squared_relu"]


@dataclass(frozen=True)
class Activation:
    """An activation and its constants; the ops of the same names define the formulas."""

    # ``"swiglu"``, ``"geglu_tanh"``, ``"geglu_erf"`` and ``"reglu"`` are gated. ``"squared_relu"`` is not gated and
    # ignores the other attributes
    kind: Kind
    limit: float | None = None  # upper bound of the gate; bound of the absolute value of up
    alpha: float = 1.0  # slope of the gate's nonlinearity
    offset: float = 0.0  # constant added to up
    interleaved: bool = False  # gate and up are the even and odd features of a row, instead of its halves

    @property
    def gated(self) -> bool:
        """Whether two input features give one output feature."""
        return self.kind != "squared_relu"
