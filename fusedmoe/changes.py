"""A count of changes that may call for another plan: to attributes of ops, and to the set of rules.

While the count stays the same, a chain need not compare them.
"""

from __future__ import annotations

import itertools

_numbers = itertools.count(1)
count = 0


def note() -> None:
    """Count a change that was made."""
    global count
    count = next(_numbers)
