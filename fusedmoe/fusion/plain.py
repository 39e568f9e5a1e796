"""A step of a chain in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Plain:
    """One step in plain PyTorch: an op, a backward op, or glue between them (derived values, gradient sums, tail
    masks).
    """

    label: str
    run: Callable[..., Any]
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    zeroes_tail: bool = True
    launches: int = 1
    bind: Callable[..., Callable[..., Any]] | None = None  # as in `fusedmoe.fusion.rule.Step`
    first: Callable[..., Any] | None = None  # what runs it the first time for calls of a kind, if not `run`
