"""The parts of a page that are written from result files: each is between two comments that name it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def filled(text: str, parts: Mapping[str, str], page: str) -> str:
    """Return a page with its parts, by name, replaced.

    Raises
    ------
    ValueError
        The page has no part of a name.
    """
    for name, part in parts.items():
        pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page}: no part {name}")
        body = "\n" + part.rstrip("\n") + "\n\n" if part else ""
        text = pattern.sub(lambda match, body=body: match[1] + body + match[2], text)  # type: ignore[misc]
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
