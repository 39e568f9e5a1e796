"""Activations of the kernels' epilogues, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["swiglu", "geglu_tanh", "geglu_erf", "reglu", "squared_relu"]


@dataclass(frozen=True)
class Activation:
    """An activation and its constants; the ops of the same names define the formulas.

    Attributes
    ----------
    kind : str
        ``"swiglu"``, ``"geglu_tanh"``, ``"geglu_erf"`` and ``"reglu"`` are gated. ``"squared_relu"`` is not gated and
        ignores the other attributes.
    limit : float or None
        Upper bound of the gate; bound of the absolute value of up.
    alpha, offset : float
        Slope of the gate's nonlinearity; constant added to up.
    interleaved : bool
        Gate and up are the even and odd features of a row, instead of its halves.
    """

    kind: Kind
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0
    interleaved: bool = False

    @property
    def gated(self) -> bool:
        """Whether two input features give one output feature."""
        return self.kind != "squared_relu"
