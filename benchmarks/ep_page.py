"""The parts of docs/benchmarks.md and docs/expert_parallel.md with the figures of each ``ep-<P>-ranks.json``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.ep import REFERENCE
from benchmarks.marked import table

SECTION = """\
## Expert parallelism

`torchrun --nproc-per-node 2 -m benchmarks --only ep` measures the experts of a layer whose ranks share them, from
tokens, expert ids and routing weights to results and gradients. It compares each [engine](expert_parallel.md) that
the machine can run with the same rows without communication, and with an NCCL all-to-all of rows sorted by expert,
whose host reads the numbers of rows, and whose experts are plain torch (`F.grouped_mm`) or those of `fusedmoe`. A
time is the median over the calls of the slowest rank's time. The exposed communication of a step is its time minus
that without communication. The host time of a candidate that synchronises includes its waits for the device. The
peak of memory includes the buffers of `symmetric`. The rows without communication and their gradients are there before
the measurement, and so not in its peak. *SMs* are the most that a kernel of the communication takes beside products.
The bandwidth of an exchange alone includes waits for other ranks and copies into buffers. The files
`ep-<P>-ranks.json`, of P ranks, also have quartiles, errors, plans and eager times. Without a GPU, the section runs a
tiny layer on gloo.
[Expert parallelism](expert_parallel.md#which-engine) has the steps of all engines side by side.
"""
MEASURED = """\
### {ranks} x {machine}

NCCL {nccl}, torch {torch}, commit {commit}, medians of {reps} calls.

{steps}

*x no communication* is the time divided by that without communication. At 1, no communication is exposed.

{exchanges}
"""


def render(measured: Iterable[dict[str, Any]] = ()) -> str:
    """Return the section, with tables for each GPU that has results."""
    return "\n".join([SECTION, *map(_of_gpu, measured)])


ENGINES = """\
Milliseconds of one training step of one MoE layer, from tokens, expert ids and routing weights to results and
gradients, with uniform random routing. {ranks} x {machine}, commit {commit};
[details](benchmarks.md#expert-parallelism).

{steps}
"""


def engines(measured: Iterable[dict[str, Any]]) -> str:
    """Return the part of docs/expert_parallel.md: the steps of all candidates, side by side."""
    return "\n".join(
        ENGINES.format(
            steps=_side_by_side(results["shapes"]), **{name: results[name] for name in ("ranks", "machine", "commit")}
        )
        for results in measured
    )


def _side_by_side(shapes: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(row["name"] for shape in shapes for row in shape["rows"]))
    rows = []
    for shape in shapes:
        ms = {row["name"]: row["ms"] for row in shape["rows"]}
        rows.append([*_head(shape), shape["recipe"], *(_number(ms.get(name), ".2f") for name in names)])
    return table(["shape", "tokens per rank", "recipe", *names], rows)


def _of_gpu(results: dict[str, Any]) -> str:
    heading = {name: results[name] for name in ("ranks", "machine", "nccl", "commit", "reps")}
    shapes = results["shapes"]
    return MEASURED.format(
        steps=_steps(shapes), exchanges=_exchanges(shapes), torch=results["versions"]["torch"],
        **heading,
    )  # fmt: skip


def _steps(shapes: Iterable[dict[str, Any]]) -> str:
    """Return the table of forward + backward."""
    rows = [
        [
            *_head(shape), shape["recipe"], row["name"], f"{row['ms']:.2f}", _number(row["x_no_communication"], ".2f"),
            _number(row["exposed_ms"], ".2f"), _number(row["host_us"], ".0f"), _number(row["host_syncs"], "d"),
            _number((row["communication"] or {}).get("sms"), "d"), _number(_peak_gib(row), ".2f"),
        ]
        for shape in shapes
        for row in shape["rows"]
        if row["ms"]
    ]  # fmt: skip
    head = [
        "shape",
        "tokens per rank",
        "recipe",
        "",
        "ms",
        f"x {REFERENCE}",
        "exposed, ms",
        "host us",
        "host syncs",
        "SMs",
    ]
    return table([*head, "peak, GiB"], rows)


def _exchanges(shapes: Iterable[dict[str, Any]]) -> str:
    """Return the table of single exchanges."""
    rows = [
        [*_head(shape), f"{name}, {what}", f"{one['ms']:.3f}", f"{one['gb_s']:.0f}"]
        for shape in shapes
        for name, found in shape["exchanges"].items()
        for what, one in found.items()
    ]
    return table(["shape", "tokens per rank", "exchange alone", "ms", "GB/s each way"], rows)


def _head(shape: dict[str, Any]) -> list[str]:
    return [shape["name"], str(shape["tokens_per_rank"])]


def _peak_gib(row: dict[str, Any]) -> float | None:
    return None if row["peak_bytes"] is None else (row["peak_bytes"] + row["buffer_bytes"]) / 2**30


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
