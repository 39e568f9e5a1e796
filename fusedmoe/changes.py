"""A count of the changes that may call for another plan: of ops' attributes, and of the set of rules.

A chain that finds the count where it was need not look at each of them.
"""

from __future__ import annotations

import itertools

_numbers = itertools.count(1)
count = 0


def note() -> None:
    """Count one more change, after it was made."""
    global count
    count = next(_numbers)
