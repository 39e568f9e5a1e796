"""The table of activations, and an activation with its constants, as data.

The ops (`fusedmoe.ops.glu`) define the functions. The kernels have the formulas in
`fusedmoe.kernels.device.formulas`. Everything else that depends on the activation reads this table, so a new one is an
entry here, a formula there, and an op.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "Activation", "Kind"]


@dataclass(frozen=True)
class Kind:
    """An entry of the table."""

    gated: bool = True  # whether two input features, gate and up, give one output feature
    # Whether the derivative's code at the widest tile exceeds an SM's instruction cache, which makes it slow. Then
    # narrower tiles are chosen.
    heavy: bool = False
    shipped: bool = False  # whether common kernels with the activation are built ahead of time

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `Activation` that it takes, which are those of the op."""
        return ("limit", "alpha", "offset", "interleaved") if self.gated else ()


KINDS: dict[str, Kind] = {
    "swiglu": Kind(shipped=True),
    "geglu_tanh": Kind(heavy=True, shipped=True),
    "geglu_erf": Kind(heavy=True, shipped=True),
    "reglu": Kind(shipped=True),
    "squared_relu": Kind(gated=False, shipped=True),
}
"""The activations of the kernels. A name is part of the symbols of kernels, and the `kind` of an op."""


@dataclass(frozen=True)
class Activation:
    """An activation and its constants."""

    kind: str  # of `KINDS`; one without a gate ignores the other attributes
    limit: float | None = None  # upper bound of the gate; bound of the absolute value of up
    alpha: float = 1.0  # slope of the gate's nonlinearity
    offset: float = 0.0  # constant added to up
    interleaved: bool = False  # gate and up are the even and odd features of a row, instead of its halves

    @property
    def gated(self) -> bool:
        """Whether two input features give one output feature."""
        return KINDS[self.kind].gated

    @property
    def heavy(self) -> bool:
        """Whether narrower tiles are chosen for the derivative; see `Kind`."""
        return KINDS[self.kind].heavy
