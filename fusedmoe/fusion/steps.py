"""The steps of a plan: a fused kernel, or plain PyTorch. Values have the chain's names, see `values`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusedmoe.fusion.values import NONE

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A step in plain PyTorch: an op, a backward op, or glue.

    Attributes
    ----------
    label : str
        ``fc1.GroupedLinear``.
    run : callable
        The function of `needs`; it returns `gives`.
    needs, gives : tuple of str
        The values read and written.
    zeroes_tail : bool
        The rows after the last expert's come out as zeros.
    launches : int
        Kernels launched, approximately.
    first : callable or None
        The function for the first run of each kind of call, if not `run`.
    """

    label: str
    run: Callable[..., Any]
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    zeroes_tail: bool = True
    launches: int = 1
    first: Callable[..., Any] | None = None

    @property
    def all_needs(self) -> tuple[str, ...]:
        """The values that must exist before the step runs."""
        return self.needs


@dataclass(frozen=True, kw_only=True)
class Fused:
    """The step of a fusion rule.

    Attributes
    ----------
    label : str
        The ops that it covers.
    rule : str
        The name of the rule.
    bind : callable
        As `fusedmoe.fusion.rule.FusionRule.build` returns it.
    needs, gives, zeroes_tail, launches
        As for `Plain`.
    may_give_none : bool
        A gradient among `gives` may be None although one arrives.
    fallback : tuple of Plain
        The steps that run if the rule declines the call. They also compute values that only they need.
    """

    label: str
    rule: str
    bind: Callable[..., Callable[..., Any]]
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    may_give_none: bool
    zeroes_tail: bool
    launches: int
    fallback: tuple[Plain, ...]

    @property
    def fallback_needs(self) -> tuple[str, ...]:
        """The values that the fallback reads."""
        made = {value for step in self.fallback for value in step.gives}
        return tuple(dict.fromkeys(v for step in self.fallback for v in step.needs if v not in made and v != NONE))

    @property
    def all_needs(self) -> tuple[str, ...]:
        """The values that must exist before the step, or its fallback, runs."""
        return (*self.needs, *self.fallback_needs)


AnyStep = Plain | Fused
