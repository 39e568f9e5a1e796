"""Activations as data: what the kernels' epilogues compute, named without an op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["swiglu", "geglu_tanh", "geglu_erf", "reglu", "squared_relu"]


@dataclass(frozen=True)
class Activation:
    """An activation's formula and its constants, as the ops of the same names define them.

    Attributes
    ----------
    kind : str
        ``"swiglu"``, ``"geglu_tanh"``, ``"geglu_erf"`` and ``"reglu"`` are gated; ``"squared_relu"`` is not, and knows
        none of the rest.
    limit : float or None
        Bound of gate (above) and up (both sides).
    alpha, offset : float
        Slope of the gate's nonlinearity, and what is added to up.
    interleaved : bool
        Gate and up are the even and odd features of a row rather than its halves.
    """

    kind: Kind
    limit: float | None = None
    alpha: float = 1.0
    offset: float = 0.0
    interleaved: bool = False

    @property
    def gated(self) -> bool:
        """Whether it takes two features for one."""
        return self.kind != "squared_relu"
