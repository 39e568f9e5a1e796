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
that without communication. The file `ep.json` also has the bandwidth of single exchanges, host times, host
synchronisations, SMs of the kernels that communicate, memory and errors. Without a GPU, it runs a tiny layer on
gloo. [Expert parallelism at scale](expert_parallel_scale.md) predicts what no machine here can measure.
"""
MEASURED = """\
{ranks} x {machine}, {backend}, torch {torch}, commit {commit}, medians of {reps} calls:
"""


def render(results: dict[str, Any] | None) -> str:
    """Return the section, with a table if there are results."""
    if results is None:
        return SECTION
    rows = []
    for shape in results["shapes"]:
        for row in shape["rows"]:
            if row["ms"]:
                rows.append(
                    [
                        shape["name"], str(shape["tokens_per_rank"]), row["name"], f"{row['ms']:.2f}",
                        _number(row["exposed_ms"], ".2f"), _number(row["host_us"], ".0f"),
                        _number(row["host_syncs"], "d"), _number(_gib(row["peak_bytes"]), ".2f"),
                    ]
                )  # fmt: skip
    head = ["shape", "tokens per rank", "", "ms", "exposed, ms", "host us", "host syncs", "peak, GiB"]
    versions = results["versions"]
    heading = MEASURED.format(**{k: results[k] for k in ("ranks", "machine", "backend", "commit", "reps")}, **versions)
    return "\n".join([SECTION, heading, table(head, rows) + "\n"])


def _gib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / 2**30


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
