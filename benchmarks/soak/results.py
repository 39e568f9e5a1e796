"""Compares the results of a layer with those of plain PyTorch, all experts at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedmoe.commands.verify.calls import Call
from fusedmoe.commands.verify.cases import BOUNDS
from fusedmoe.commands.verify.checks import OF_ROWS

OF_EXPERT = 0.25
"""The bound of the relative error of an expert's part. One wrong tile of eight has an error of 0.35."""


def wrong_results(call: Call, got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """Return a problem for each result that is too far from plain PyTorch, or not zeros for rows without an expert."""
    if got.keys() != want.keys():
        return [f"expected {', '.join(want)}, got {', '.join(got)}"]
    bound = BOUNDS.get(call.case.recipe, BOUNDS["fp8_tensor"]).unfused
    problems = []
    for name, result in got.items():
        error, of_expert, others = _errors(call, name, result, want[name])
        if not error <= bound:
            problems.append(f"{name}: relative error {error:.2g} against plain PyTorch, bound {bound:g}")
        if not of_expert <= OF_EXPERT:
            problems.append(f"{name}: relative error {of_expert:.2g} of an expert, bound {OF_EXPERT:g}")
        if others:
            problems.append(f"{name}: the rows without an expert are not zeros")
    return problems


def _errors(call: Call, name: str, got: Tensor, want: Tensor) -> tuple[float, float, bool]:
    """Return the relative error, the largest one of an expert, and whether rows without an expert are not zeros."""
    if got.shape != want.shape:
        return math.inf, math.inf, False
    off, norm = (t.float().reshape(len(t), -1).square().sum(1).double() for t in (got.float() - want.float(), want))
    others = False
    if name in OF_ROWS:
        used = call.used
        others = bool((got[~used] != 0).any())
        off, norm = off.where(used, 0.0), norm.where(used, 0.0)
    error = float(_relative(off.sum(), norm.sum()))
    if name in ("y", "x") and call.ends:
        ends = torch.tensor(call.ends, device=off.device)
        expert = torch.searchsorted(ends, torch.arange(len(off), device=off.device), right=True)
        off, norm = (t.new_zeros(len(ends) + 1).index_add_(0, expert, t) for t in (off, norm))
    elif len(off) != call.num_experts or name.startswith("router"):
        return error, 0.0, others
    return error, float(_relative(off, norm).max()), others


def _relative(off: Tensor, norm: Tensor) -> Tensor:
    """Return the relative errors; infinity for an error where zeros are expected, and for NaN."""
    return torch.where(norm > 0, off / norm, torch.where(off > 0, torch.inf, 0.0)).sqrt().nan_to_num(nan=torch.inf)
