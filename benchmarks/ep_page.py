"""The part of docs/benchmarks.md about expert parallelism, from ``ep.json``."""

from __future__ import annotations

from typing import Any

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
the measurement, and so not in its peak. The bandwidth of an exchange includes copies into buffers. The file `ep.json`
also has quartiles, errors and plans. Without a GPU, the section runs a tiny layer on gloo.
[Expert parallelism at scale](expert_parallel_scale.md) predicts what no machine here can measure.
"""
MEASURED = """\
{ranks} x {machine}, {backend}, torch {torch}, commit {commit}, medians of {reps} calls:
"""


def render(results: dict[str, Any] | None) -> str:
    """Return the section, with a table if there are results."""
    if results is None:
        return SECTION
    rows, exchanges = [], []
    for shape in results["shapes"]:
        for name, found in shape["exchanges"].items():
            exchanges += [
                [
                    shape["name"], str(shape["tokens_per_rank"]), f"{name}, {what}", f"{one['ms']:.3f}",
                    f"{one['gb_s']:.0f}",
                ]
                for what, one in found.items()
            ]  # fmt: skip
        for row in shape["rows"]:
            if row["ms"]:
                rows.append(
                    [
                        shape["name"], str(shape["tokens_per_rank"]), row["name"], f"{row['ms']:.2f}",
                        _number(row["x_no_communication"], ".2f"), _number(row["exposed_ms"], ".2f"),
                        _number(row["host_us"], ".0f"), _number(row["host_syncs"], "d"),
                        _number((row["communication"] or {}).get("sms"), "d"), _number(_peak_gib(row), ".2f"),
                    ]
                )  # fmt: skip
    head = [
        "shape", "tokens per rank", "", "ms", "x no communication", "exposed, ms", "host us", "host syncs", "SMs",
        "peak, GiB",
    ]  # fmt: skip
    versions = results["versions"]
    heading = MEASURED.format(**{k: results[k] for k in ("ranks", "machine", "backend", "commit", "reps")}, **versions)
    of_exchanges = table(["shape", "tokens per rank", "exchange alone", "ms", "GB/s each way"], exchanges)
    return "\n".join([SECTION, heading, table(head, rows) + "\n", of_exchanges + "\n"])


def _peak_gib(row: dict[str, Any]) -> float | None:
    return None if row["peak_bytes"] is None else (row["peak_bytes"] + row["buffer_bytes"]) / 2**30


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
