"""A count of changes that may require a new plan: to attributes of ops, and to the set of rules.

While the count is unchanged, a chain compares neither attributes nor rules.
"""

from __future__ import annotations

import itertools

_numbers = itertools.count(1)
count = 0


def note() -> None:
    """Count a change that was made."""
    global count
    count = next(_numbers)
