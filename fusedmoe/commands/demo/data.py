"""The text: the reference pages that CPython ships, split into training text and held-out text.

The pages repeat each other: a fifth of the bytes are duplicates (``specialnames`` contains ``attribute-access``).
A split by page would therefore hold out text that the model trains on. So duplicate paragraphs are removed first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fusedmoe.commands.demo.options import Job

VOCABULARY = 256  # every byte is a token
CHUNK_BYTES = 2048  # the unit of the split: contiguous text of about this size
HELD_OUT_EVERY = 10  # one chunk in ten is held out


@dataclass(frozen=True)
class Split:
    """Training text and held-out text, each a (bytes,) uint8 tensor on the CPU."""

    train: torch.Tensor
    held_out: torch.Tensor


def unique_paragraphs(pages: Mapping[str, str]) -> list[str]:
    """Return the distinct paragraphs of all pages, in the order of the page names, regardless of white space."""
    paragraphs = (paragraph for name in sorted(pages) for paragraph in pages[name].split("\n\n"))
    by_words: dict[str, str] = {}
    for paragraph in paragraphs:
        by_words.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    by_words.pop("", None)
    return list(by_words.values())


def chunks_of(paragraphs: Iterable[str], chunk_bytes: int = CHUNK_BYTES) -> list[bytes]:
    """Join consecutive paragraphs into chunks of at least ``chunk_bytes``; the last chunk may be shorter."""
    chunks = [b""]
    for paragraph in paragraphs:
        if len(chunks[-1]) >= chunk_bytes:
            chunks.append(b"")
        chunks[-1] += paragraph.encode() + b"\n\n"
    return chunks


def load_split(pages: Mapping[str, str] | None = None) -> Split:
    """Split the pages (text by name) deterministically: nine chunks in ten for training, one held out."""
    if pages is None:
        from pydoc_data.topics import topics

        pages = topics
    train = chunks_of(unique_paragraphs(pages))
    held_out = train[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    del train[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    return Split(*(torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in (train, held_out)))


def batches(text: torch.Tensor, job: Job) -> torch.Tensor:
    """Return the first bytes of the windows of all steps, (steps, batch): random, and the same for the same seed."""
    generator = torch.Generator().manual_seed(job.seed)
    return torch.randint(len(text) - job.context, (job.steps, job.batch), generator=generator, device="cpu")


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and next-byte targets of the windows that begin at ``starts``, each (batch, context) int64."""
    window = text.unfold(0, context + 1, 1)[starts].long()
    return window[:, :-1], window[:, 1:]


def bigram_bits_per_byte(train: torch.Tensor, held_out: torch.Tensor, smoothing: float = 0.05) -> float:
    """Return the bits per byte of a byte-bigram model of ``train`` on ``held_out``: the demo's baseline.

    ``-mean log2((n(a, b) + s) / (n(a) + 256 s))`` over the pairs (a, b) of the held-out text, with the counts n of the
    training text. The default smoothing s is about the best for this model.
    """
    pairs = train[:-1].long() * VOCABULARY + train[1:].long()
    counts = torch.bincount(pairs, minlength=VOCABULARY * VOCABULARY).double()
    table = counts.view(VOCABULARY, VOCABULARY) + smoothing
    log2_probability = (table / table.sum(dim=1, keepdim=True)).log2()
    return float(-log2_probability[held_out[:-1].long(), held_out[1:].long()].mean())
