"""The section ``ep``: one process per rank, started by ``torchrun``. The first rank prints and writes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks import ep
from benchmarks.cases import release
from benchmarks.ep_timing import timer_of
from benchmarks.results import write
from benchmarks.shapes import Shape

TIMEOUT = timedelta(minutes=5)


def started() -> bool:
    """Whether ``torchrun`` started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(shapes: Sequence[Shape], reps: int, results: Path) -> None:
    """Join the process group of ``torchrun``, and run the section: NCCL with GPUs, else gloo with tiny shapes."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        if device.type == "cuda":
            run(shapes, ep.TOKENS, device, torch.bfloat16, reps, results)
        else:
            run((ep.TINY,), {ep.TINY.name: ep.TINY_TOKENS}, device, torch.float32, reps, results)
    finally:
        dist.destroy_process_group()


def run(
    shapes: Sequence[Shape],
    tokens: Mapping[str, Sequence[int]],
    device: torch.device,
    dtype: torch.dtype,
    reps: int,
    results: Path,
) -> Path | None:
    """Measure each shape, with each number of its tokens per rank and under each recipe. After each, the first
    rank writes ``ep-<P>-ranks.json``, of P ranks, and it returns the file in the end.

    A shape with clamps and biases, or one whose rows arrive dispatched (K = 1), is left out.
    """
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    timer = timer_of(device, reps)
    found: dict[str, Any] = {
        "ranks": ranks, "backend": dist.get_backend(), "reps": reps, "dtype": str(dtype).removeprefix("torch."),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else None, "shapes": [],
    }  # fmt: skip
    written = None
    for shape in shapes:
        if shape.activation != "swiglu" or shape.top_k == 1 or shape.experts % ranks:
            if first:
                print(f"\n{shape.name}: left out")
            continue
        for of_rank, recipe in itertools.product(tokens.get(shape.name, ep.OTHER_TOKENS), ep.RECIPES):
            entry = ep.measure(shape, of_rank, recipe, timer, device, dtype)
            release(device)
            found["shapes"].append(entry)
            if first:
                print("\n".join(ep.lines(entry)), flush=True)
                written = write(results, f"ep-{ranks}-ranks", found)
    if first:
        print("written to", written)
    return written
