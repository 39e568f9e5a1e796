"""The built-in fusion rules, one file a fusion.

There are none yet: every step runs in plain PyTorch until the first kernels land. A new rule is added to `BUILTIN`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusedmoe.fusion.rule import FusionRule

BUILTIN: tuple[type[FusionRule], ...] = ()
