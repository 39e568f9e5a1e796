"""What a caller may ask of every matrix-product kernel, whatever it computes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Schedule = Literal["static", "dynamic"]


@dataclass(frozen=True)
class KernelOptions:
    """How the kernels share the GPU with others. Neither setting changes a result, but for
    the last bits of a row scale's gradient, whose sum follows the tiles.

    Attributes
    ----------
    sm_margin : int
        SMs left free for other kernels, such as those of communication.
    schedule : str
        ``"static"``: a CTA knows its tiles beforehand. ``"dynamic"``: it draws the next from a counter in memory, which
        evens out what other kernels on the GPU slow down.
    """

    sm_margin: int = 0
    schedule: Schedule = "static"

    def changed(self) -> list[str]:
        """Return those that are not the default, in words: ``["sm_margin 8", "schedule dynamic"]``."""
        return [f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]


DEFAULT = KernelOptions()
