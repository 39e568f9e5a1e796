"""The expert MLP under each recipe: time of a training step, memory kept for backward, and error relative to bf16.

The chain is that of `benchmarks.mlp`. Every step quantizes the weights, as with one micro-batch per step. Delayed
scaling has the defaults of Transformer Engine, and an earlier step with the same operands. SQNR is
``20 log10(norm(a) / norm(a - b))`` for the result a under ``bf16`` and the result b under the recipe, with random
normal operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

import fusedmoe as fm
from benchmarks.peers.ours import sequential
from benchmarks.problem import Problem
from fusedmoe.commands.timing import Timer
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import FP8Tensor

NAMES = ("output", "dx", "dw1", "dw2")
DELAYED = "fp8_tensor, delayed"
DELAYED_SCALING = FP8Tensor(delayed=Delayed())  # the defaults are those of Transformer Engine's `DelayedScaling`
MEASURED = (
    "bf16", "fp8_tensor", DELAYED, "fp8_row", "fp8_block", "fp8_block:wgrad=bf16", "mxfp8", "nvfp4"
)  # fmt: skip


def measure(problem: Problem, timer: Timer) -> dict[str, dict[str, Any]]:
    """Return the figures of each recipe of `MEASURED`, by name.

    They are the milliseconds of a step, the bytes that forward keeps for backward, those of the quantized weights, the
    SQNR by name of result, and the path of each product.
    """
    x = problem.x.detach().requires_grad_()
    found: dict[str, dict[str, Any]] = {}
    exact = None
    for name in MEASURED:
        chain = sequential(problem)
        if name == DELAYED:
            _step(name, chain, x, problem)  # the first step has no scales
        results = _step(name, chain, x, problem)
        exact = results if exact is None else exact
        report = {"sqnr_db": {n: sqnr_db(a, b) for n, a, b in zip(NAMES, exact, results, strict=True)}}
        if results is not exact:
            del results
        with under(name):
            (plan,) = chain.explain(x, splits=problem.splits).plans
        report |= {"kept_bytes": plan.kept_bytes, "weight_bytes": plan.weight_bytes}
        report["products"] = {
            step.ops[0].rpartition(":")[2]: "fused" if step.rule else step.path or "plain"
            for step in plan.steps
            if any(op.endswith(("GroupedLinear", "Dgrad", "Wgrad")) for op in step.ops)
        }
        times = timer.measure({name: _timed(name, chain, x, problem)})
        report["ms"] = times[name].median_ms
        found[name] = report
    return found


def under(name: str) -> AbstractContextManager[None]:
    """Return the block of a recipe of `MEASURED`."""
    return fm.recipe(DELAYED_SCALING if name == DELAYED else name)


def lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the table."""
    noise = "".join(f"{n + ', dB':>12}" for n in NAMES)
    head = f"{'recipe':22}{'ms':>9}{'kept, GiB':>11}{'weights':>9}{noise}  products"
    return [head, *(_line(name, report) for name, report in found.items())]


def _line(name: str, report: dict[str, Any]) -> str:
    noise = "".join(f"{_db(report['sqnr_db'][n]):>12}" for n in NAMES)
    paths = ", ".join(dict.fromkeys(report["products"].values()))
    kept, weights = (report[what] / 2**30 for what in ("kept_bytes", "weight_bytes"))
    return f"{name:22}{report['ms']:9.2f}{kept:11.2f}{weights:9.2f}{noise}  {paths}"


def _db(sqnr: float | None) -> str:
    return "-" if sqnr is None else f"{sqnr:.1f}"


def sqnr_db(exact: Tensor, other: Tensor) -> float | None:
    """Return the SQNR in dB; None if the tensors are equal."""
    noise = (exact.float() - other.float()).norm().item()
    return 20 * math.log10(exact.float().norm().item() / noise) if noise else None


def _step(recipe: str, chain: fm.Sequential, x: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    with under(recipe):
        y = chain(x, splits=problem.splits)
    return y.detach(), *torch.autograd.grad(y, (x, chain[0].weight, chain[2].weight), problem.grad_y)


def _timed(recipe: str, chain: fm.Sequential, x: Tensor, problem: Problem) -> Callable[[], object]:
    def call() -> object:
        fm.clear_weight_cache(chain)
        return _step(recipe, chain, x, problem)

    return call
