"""The text: the English reference pages that every CPython ships, split into what is trained on and what is held out.

The pages repeat each other (``specialnames`` contains ``attribute-access`` word for word, and so on: a fifth of all the
bytes), so a split by page would test on text that was trained on. Hence a paragraph that occurs twice is kept once,
before the split.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

VOCABULARY = 256  # every byte is a token
CHUNK_BYTES = 2048  # contiguous text of about this size goes to one side of the split ...
HELD_OUT_EVERY = 10  # ... and each tenth chunk is held out


@dataclass(frozen=True)
class Split:
    """The two sides of the split, each a (bytes,) uint8 tensor on the CPU."""

    train: torch.Tensor
    held_out: torch.Tensor


def unique_paragraphs(pages: Mapping[str, str]) -> list[str]:
    """Return the paragraphs of all pages, in the sorted order of their names, each distinct one once.

    Two paragraphs are the same where they differ in white space only.
    """
    seen: set[str] = set()
    paragraphs = []
    for name in sorted(pages):
        for paragraph in pages[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                paragraphs.append(paragraph.strip("\n"))
    return paragraphs


def chunks_of(paragraphs: Iterable[str], chunk_bytes: int = CHUNK_BYTES) -> list[bytes]:
    """Join whole paragraphs, in order, into chunks of at least ``chunk_bytes`` (the last one may be shorter)."""
    chunks = []
    chunk = b""
    for paragraph in paragraphs:
        chunk += paragraph.encode() + b"\n\n"
        if len(chunk) >= chunk_bytes:
            chunks.append(chunk)
            chunk = b""
    if chunk:
        chunks.append(chunk)
    return chunks


def load_split(pages: Mapping[str, str] | None = None) -> Split:
    """Split the reference pages, nine chunks in ten to train on, the tenth held out: the same wherever the pages are.

    Parameters
    ----------
    pages : mapping of str to str, optional
        Text by name; by default ``pydoc_data.topics.topics``.
    """
    if pages is None:
        from pydoc_data.topics import topics

        pages = topics
    chunks = chunks_of(unique_paragraphs(pages))
    train = [chunk for i, chunk in enumerate(chunks) if i % HELD_OUT_EVERY != HELD_OUT_EVERY // 2]
    held_out = [chunk for i, chunk in enumerate(chunks) if i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2]
    return Split(train=_as_tensor(b"".join(train)), held_out=_as_tensor(b"".join(held_out)))


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """An endless stream of random windows of a text; :meth:`state` is its position, and continues it exactly.

    Parameters
    ----------
    text : Tensor
        (bytes,) uint8, longer than ``context``.
    batch : int
        Windows in a batch.
    context : int
        Bytes that the model sees; a window has one more, the last target.
    seed : int
        Of the stream's own random numbers: nothing else that draws any can shift it.
    """

    def __init__(self, text: torch.Tensor, batch: int, context: int, seed: int) -> None:
        self._windows = text.unfold(0, context + 1, 1)  # (bytes - context, context + 1), a view
        self._batch = batch
        self._generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, each (batch, context) int64 on the CPU; the targets are the inputs one byte on."""
        starts = torch.randint(len(self._windows), (self._batch,), generator=self._generator)
        window = self._windows[starts].long()
        return window[:, :-1], window[:, 1:]

    def state(self) -> torch.Tensor:
        """Return the position in the stream, a uint8 tensor."""
        return self._generator.get_state()

    def load_state(self, state: torch.Tensor) -> None:
        """Go on from a position that :meth:`state` returned."""
        self._generator.set_state(state)


def bigram_bits_per_byte(train: torch.Tensor, held_out: torch.Tensor, smoothing: float = 0.05) -> float:
    """Return the bits a byte that a byte-bigram model of ``train`` needs for ``held_out``: the bar to stay below.

    ``-mean log2((n(a, b) + s) / (n(a) + 256 s))`` over the pairs (a, b) of the held-out text, n counting the training
    text. The small ``s`` is about the best one for the bigram, so the bar is not lowered for the model.
    """
    counts = torch.zeros(VOCABULARY * VOCABULARY, dtype=torch.float64)
    pairs = train[:-1].long() * VOCABULARY + train[1:].long()
    counts += torch.bincount(pairs, minlength=VOCABULARY * VOCABULARY)
    table = counts.view(VOCABULARY, VOCABULARY) + smoothing
    log2_probability = (table / table.sum(dim=1, keepdim=True)).log2()
    return float(-log2_probability[held_out[:-1].long(), held_out[1:].long()].mean())
