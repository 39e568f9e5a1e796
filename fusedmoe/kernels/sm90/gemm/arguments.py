"""The arguments of the kernels, in order: the compiler builds these tuples, and ``__call__`` and launches have their
fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BESIDE = 2
"""``dynamic`` of a product of ranges that draws its tiles, and begins while the launch before it runs."""


class RaggedMArguments(NamedTuple):
    """Of `RaggedM`. Tensors follow: the scales of a and b, if they have scales; the index, if rows are gathered; the
    input of the epilogue's formula, if it has one; and its outputs.
    """

    a: Any
    b: Any
    offsets: Any
    bias: Any  # a placeholder, if there is none; so is the row scale
    row_scale: Any
    counter: Any  # of tiles
    limit: float  # constants of the activation
    alpha: float
    offset: float
    biased: int
    scaled: int
    zero_tail: int  # whether the rows after the last expert's are written; ranges have them or not
    band: int  # see `scheduler.band_of`
    ctas: int
    dynamic: int  # whether tiles are drawn from the counter; with ranges also `BESIDE`


class RaggedKArguments(NamedTuple):
    """Of `RaggedK`. Tensors follow: the scales of a and b, if they have scales, or the index, if one is gathered."""

    a: Any
    b: Any
    offsets: Any
    out: Any
    counter: Any
    band: int
    ctas: int
    dynamic: int
