"""The expert MLP under each recipe: time of a training step, memory kept for backward, and error relative to bf16.

The chain is that of `benchmarks.mlp`. Every step quantizes the weights, as with one micro-batch per step. SQNR is
``20 log10(norm(a) / norm(a - b))`` for the result a under ``bf16`` and the result b under the recipe, with random
normal operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusedmoe as fm
from benchmarks.peers.ours import sequential
from benchmarks.problem import Problem
from fusedmoe.bench.timing import Timer
from fusedmoe.recipes import RECIPES

NAMES = ("output", "dx", "dw1", "dw2")


def measure(problem: Problem, timer: Timer) -> dict[str, dict[str, Any]]:
    """Return, for each recipe by name: ms, kept_bytes, SQNR by name of result, and the path of each product."""
    x = problem.x.detach().requires_grad_()
    found: dict[str, dict[str, Any]] = {}
    exact = None
    for name in RECIPES:
        chain = sequential(problem)
        results = _step(name, chain, x, problem)
        exact = results if exact is None else exact
        report = {"sqnr_db": {n: sqnr_db(a, b) for n, a, b in zip(NAMES, exact, results, strict=True)}}
        if results is not exact:
            del results
        with fm.recipe(name):
            (plan,) = chain.explain(x, splits=problem.splits).plans
        report["kept_bytes"] = plan.kept_bytes
        report["products"] = {
            step.ops[0].rpartition(":")[2]: "fused" if step.rule else step.path or "plain"
            for step in plan.steps
            if any(op.endswith(("GroupedLinear", "Dgrad", "Wgrad")) for op in step.ops)
        }
        times = timer.measure({name: _timed(name, chain, x, problem)})
        report["ms"] = times[name].median_ms
        found[name] = report
    return found


def lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table."""
    head = f"{'recipe':12}{'ms':>9}{'kept, GiB':>11}" + "".join(f"{n + ', dB':>12}" for n in NAMES) + "  products"
    return [head, *(_line(name, report) for name, report in found.items())]


def _line(name: str, report: dict[str, Any]) -> str:
    noise = "".join(f"{_db(report['sqnr_db'][n]):>12}" for n in NAMES)
    paths = ", ".join(dict.fromkeys(report["products"].values()))
    return f"{name:12}{report['ms']:9.2f}{report['kept_bytes'] / 2**30:11.2f}{noise}  {paths}"


def _db(sqnr: float | None) -> str:
    return "-" if sqnr is None else f"{sqnr:.1f}"


def sqnr_db(exact: Tensor, other: Tensor) -> float | None:
    """Return the SQNR in dB; None if the tensors are equal."""
    noise = (exact.float() - other.float()).norm().item()
    return 20 * math.log10(exact.float().norm().item() / noise) if noise else None


def _step(recipe: str, chain: fm.Sequential, x: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    with fm.recipe(recipe):
        y = chain(x, splits=problem.splits)
    return y.detach(), *torch.autograd.grad(y, (x, chain[0].weight, chain[2].weight), problem.grad_y)


def _timed(recipe: str, chain: fm.Sequential, x: Tensor, problem: Problem) -> Callable[[], object]:
    def call() -> object:
        fm.clear_weight_cache(chain)
        return _step(recipe, chain, x, problem)

    return call
