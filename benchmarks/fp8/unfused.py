"""The expert MLP on dispatched rows: fused FP8 and bf16, and what plain PyTorch offers for both.

All take rows in bf16 and return y, or the gradients of the rows and of both weights. Weights are quantized in every
call, except by the peer whose name says otherwise. The errors are relative to fp64 of the same operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import fusedmoe as fm
from benchmarks import mlp
from benchmarks.cases import Candidate, worst_error
from benchmarks.fp8.layers import RECIPES
from benchmarks.peers.ours import sequential
from benchmarks.peers.plain import TorchCompiled
from benchmarks.peers.unfused_fp8 import UnfusedFp8
from benchmarks.problem import Problem
from fusedmoe.commands.bench.layer import OURS
from fusedmoe.commands.timing import Timer, times_of, why_not

WRONG = 0.25  # limit of the relative error, in norm
OURS_IN_FP8 = f"{OURS}, fp8_block"


class MlpPeer(Protocol):
    """A participant: its name, and its calls as `mlp.CASES` names them."""

    @property
    def name(self) -> str: ...

    def mlp_forward(self, problem: Problem) -> Candidate: ...

    def mlp_step(self, problem: Problem) -> Candidate: ...


class UnderRecipe:
    """`fm.Sequential` under a recipe; each call quantizes the weights."""

    def __init__(self, recipe: str) -> None:
        self.recipe, self.name = recipe, f"{OURS}, {recipe}"

    def mlp_forward(self, problem: Problem) -> Candidate:
        return Candidate(self._call(problem)[0])

    def mlp_step(self, problem: Problem) -> Candidate:
        call, leaves = self._call(problem)
        wanted, dy = tuple(leaves.values()), problem.grad_y
        return Candidate(lambda: torch.autograd.grad(call(), wanted, dy), tuple(leaves))

    def _call(self, problem: Problem) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
        chain, x = sequential(problem), problem.x.detach().requires_grad_()

        def call() -> Tensor:
            fm.clear_weight_cache(chain)
            with fm.recipe(self.recipe):
                return chain(x, splits=problem.splits)

        return call, {"grad_x": x, "grad_weight1": chain[0].weight, "grad_weight2": chain[2].weight}


@dataclass(frozen=True)
class PeerRow:
    """A peer's figures; ``note`` is the reason for missing ones."""

    case: str
    peer: str
    note: str = ""
    error: float | None = None
    ms: float | None = None
    least_ms: float | None = None
    tflops: float | None = None
    fp8_block_is: float | None = None  # this time divided by that of the fused recipe
    host_idle_us: float | None = None


def peers() -> tuple[MlpPeer, ...]:
    """Return the participants. Those that take longest to compile come last."""
    return (*map(UnderRecipe, RECIPES), UnfusedFp8(), UnfusedFp8(once=True), TorchCompiled())


def measure(problem: Problem, timer: Timer) -> list[dict[str, Any]]:
    """Measure and print; return the entries of the result file."""
    found: list[dict[str, Any]] = []
    torch.compiler.reset()
    for case in mlp.CASES:
        with torch.set_grad_enabled(case.grad):
            rows = _measured(case, problem, timer)
        print("\n".join(lines(rows)), flush=True)
        found += [asdict(row) for row in rows]
    return found


def _measured(case: Any, problem: Problem, timer: Timer) -> list[PeerRow]:
    notes: dict[str, str | None] = {}
    errors: dict[str, float] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for peer in peers():
        try:
            candidate = getattr(peer, case.key)(problem)
            errors[peer.name] = worst_error(case, problem, candidate)
        except Exception as raised:  # noqa: BLE001 reported in the peer's row
            notes[peer.name] = why_not(raised)
            continue
        wrong = not errors[peer.name] < WRONG
        notes[peer.name] = f"wrong: relative error {errors[peer.name]:.2g}" if wrong else ""
        if not wrong:
            calls[peer.name] = candidate.call
    times = times_of(timer, calls, notes)
    ours, rows = times.get(OURS_IN_FP8), []
    for name, note in notes.items():
        figures: dict[str, Any] = {"error": errors.get(name)}
        if time := times.get(name):
            figures |= {
                "ms": time.median_ms,
                "least_ms": time.least_ms,
                "tflops": case.flops(problem) / time.median_ms / 1e9,
                "fp8_block_is": time.median_ms / ours.median_ms if ours else None,
                "host_idle_us": time.host_idle_us,
            }
        rows.append(PeerRow(case.title, name, note or "", **figures))
    return rows


def lines(rows: list[PeerRow]) -> list[str]:
    """Return the table of a case."""
    text = [f"  {rows[0].case if rows else '':52}{'ms':>9}{'TFLOP/s':>9}{'fp8_block is':>14}{'error':>10}"]
    for row in rows:
        figures = ""
        if row.ms is not None:
            ratio = "" if row.fp8_block_is is None else f"{row.fp8_block_is:.2f}x"
            figures = f"{row.ms:9.3f}{row.tflops:9.0f}{ratio:>14}{row.error:10.1e}"
        text.append(f"    {row.peer:50}{figures}  {row.note}".rstrip())
    return text
