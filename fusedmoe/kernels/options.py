"""Launch options of the grouped GEMM kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Schedule = Literal["static", "dynamic"]


@dataclass(frozen=True)
class KernelOptions:
    """Options of the launches.

    No option changes results, except that ``sm_margin`` may change the last bits of a row scale's gradient, whose order
    of summation depends on the tiles.
    """

    sm_margin: int = 0  # SMs left free for other kernels, such as communication
    # tile scheduler. ``"dynamic"``: each cluster draws its next tile from an atomic counter, so concurrent tiles stay
    # neighbours, and a slow SM computes fewer. ``"static"``: each cluster computes its tiles from its index
    schedule: Schedule = "dynamic"
    # SMs left free for an exchange that runs beside the launch. Unlike ``sm_margin``, it does not change the tiles, so
    # that the results have the bits of a launch without an exchange
    exchange_sms: int = 0
    # whether the rows after the last expert's are written, as zeros. The planner clears it where nothing reads them
    zero_tail: bool = True

    def changed(self) -> list[str]:
        """Return the options that differ from their defaults: ``["sm_margin 8", "schedule static"]``."""
        return [f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]


DEFAULT = KernelOptions()
