"""Evaluate the model on held-out text, and sample text from it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fusedmoe.commands.demo.model import ByteTransformer

TEMPERATURE = 0.7
BYTES_AT_A_TIME = 8192  # per forward pass of an evaluation


@contextlib.contextmanager
def evaluating(model: ByteTransformer) -> Iterator[None]:
    """Put the model in evaluation mode without gradients; restore its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def bits_per_byte(model: ByteTransformer, text: torch.Tensor) -> float:
    """Return ``-mean log2 p(next byte)`` over the text; every byte except the first is predicted once.

    The windows do not overlap, so the first bytes of a window have little context. The bigram model is scored on the
    same bytes.

    Parameters
    ----------
    model : ByteTransformer
        On any device.
    text : Tensor
        (bytes,) uint8 on the CPU.
    """
    context = model.config.context
    device = model.embedding.weight.device
    pieces = [text[start : start + context + 1] for start in range(0, len(text) - 1, context)]
    batch = max(1, BYTES_AT_A_TIME // context)
    whole = [piece for piece in pieces if len(piece) == context + 1]
    groups = [torch.stack(whole[i : i + batch]) for i in range(0, len(whole), batch)]
    groups += [piece[None] for piece in pieces if len(piece) <= context]  # the last window may be shorter
    nats = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model):
        for group in groups:
            window = group.to(device).long()
            logits, _ = model(window[:, :-1])
            nats += F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten(), reduction="sum")
    return float(nats) / (len(text) - 1) / math.log(2)


def sample(model: ByteTransformer, prompt: bytes, length: int, seed: int) -> bytes:
    """Return the prompt and ``length`` bytes sampled from the model at :data:`TEMPERATURE`."""
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.weight.device
    text = list(prompt)
    with evaluating(model):
        for _ in range(length):
            window = torch.tensor([text[-model.config.context :]], device=device)
            logits, _ = model(window)
            probabilities = (logits[0, -1].float().cpu() / TEMPERATURE).softmax(dim=-1)
            text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)
