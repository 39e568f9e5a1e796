"""The parts of docs/recipes.md that have the figures of ``recipes.json``, and the table of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import marked
from benchmarks.marked import table
from benchmarks.recipes import NAMES

UNFUSED = "*"
TIME = """\
The time under each recipe, as a multiple of that of `bf16`, on an {machine} (commit {commit}). A star marks a recipe
that has no fused kernel for at least one of its products.
"""
MEMORY = """\
GiB per layer, as activations kept for backward + quantized weights, of the same run:
"""
RECIPES = """\
## Recipes

The signal-to-quantization-noise ratio, in dB, of the output and the gradients of the expert MLP under each recipe,
against `bf16` on random normal operands: the range over the shapes. {machine}, commit {commit}.
[Recipes](recipes.md) has the times and the memory of the same run.
"""


def filled(text: str, found: Mapping[str, Any]) -> str:
    """Return docs/recipes.md with the figures of a result file."""
    return marked.filled(text, {"time": time(found), "memory": memory(found)}, "docs/recipes.md")


def time(found: Mapping[str, Any]) -> str:
    """Return the table of times."""
    rows = []
    for shape in found["shapes"]:
        recipes = dict(shape["recipes"])
        bf16 = recipes.pop("bf16")
        cells = [_multiple(report["ms"] / bf16["ms"]) + _star(report) for report in recipes.values()]
        rows.append([shape["name"], f"{bf16['ms']:.1f} ms{_star(bf16)}", *cells])
    intro = TIME.format(machine=found["machine"], commit=found["commit"])
    return intro + "\n" + table(_head(found), rows) + "\n"


def memory(found: Mapping[str, Any]) -> str:
    """Return the table of memory."""
    rows = []
    for shape in found["shapes"]:
        cells = []
        for report in shape["recipes"].values():
            weights = report["weight_bytes"]
            cells.append(_gib(report["kept_bytes"]) + (f" + {_gib(weights)}" if weights else ""))
        rows.append([shape["name"], *cells])
    return MEMORY + "\n" + table(_head(found), rows) + "\n"


def benchmarks(found: Mapping[str, Any]) -> list[str]:
    """Return the section of docs/benchmarks.md: text and table."""
    rows = []
    for name in _names(found):
        noise = [[shape["recipes"][name]["sqnr_db"][of] for shape in found["shapes"]] for of in NAMES]
        if all(all(db) for db in noise):
            rows.append([f"`{name}`", *(_range(min(db), max(db)) for db in noise)])
    heading = {"machine": found["machine"], "commit": found["commit"]}
    return [RECIPES.format(**heading), table(["recipe", *NAMES], rows) + "\n"]


def _range(least: float, most: float) -> str:
    return f"{least:.1f}" if f"{least:.1f}" == f"{most:.1f}" else f"{least:.1f} to {most:.1f}"


def _head(found: Mapping[str, Any]) -> list[str]:
    return ["shape", *(f"`{name}`{comma}{remark}" for name, comma, remark in (r.partition(",") for r in _names(found)))]


def _names(found: Mapping[str, Any]) -> list[str]:
    return list(found["shapes"][0]["recipes"])


def _star(report: Mapping[str, Any]) -> str:
    return "" if set(report["products"].values()) == {"fused"} else UNFUSED


def _multiple(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 9.5 else f"{ratio:.0f}x"


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.2f}"
