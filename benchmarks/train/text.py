"""The text: the source code of Python's standard library and of torch, as words of a vocabulary of its frequent words.

It is real text that every machine has. Like the text of any language, it has a skewed distribution of words.
"""

from __future__ import annotations

import collections
import re
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

WORDS = re.compile(r"\w+|[^\w\s]|\n\s*")
INSTALLED = {"site-packages", "dist-packages"}
ENOUGH = 4_500_000  # words


def sequences(length: int, vocabulary: int, words: int = ENOUGH) -> Tensor:
    """Return the first `words` words, cut into (n, length) int64 ids below `vocabulary`, on the CPU.

    The id of a word is its rank by frequency. All words beyond the `vocabulary` - 1 most frequent ones share an id.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(library.rglob("*.py")) if not INSTALLED.intersection(file.parts)]
    files += sorted(Path(torch.__file__).parent.rglob("*.py"))
    text: list[str] = []
    for file in files:
        text += WORDS.findall(file.read_text(encoding="utf-8", errors="ignore"))
        if len(text) >= words:
            break
    if len(text) < words:
        raise ValueError(f"expected at least {words:,} words in {library} and torch, got {len(text):,}")
    frequent = collections.Counter(text[:words]).most_common(vocabulary - 1)
    rank = {word: i for i, (word, _) in enumerate(frequent)}
    ids = torch.tensor([rank.get(word, vocabulary - 1) for word in text[: words - words % length]])
    return ids.view(-1, length)
