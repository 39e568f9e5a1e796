"""The steps of a plan: a fusion rule's, or plain PyTorch. Values have the chain's names; see `values`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusedmoe.fusion.graph.values import NONE

if TYPE_CHECKING:
    from collections.abc import Callable

    from fusedmoe.fusion.language.rule import Bind


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A step in plain PyTorch: an op, a backward op, or glue."""

    label: str  # ``fc1.GroupedLinear``
    run: Callable[..., Any]  # the function of `needs`; it returns `gives`
    needs: tuple[str, ...]  # the values read
    gives: tuple[str, ...]  # the values written
    zeroes_tail: bool = True  # the rows after the last expert's come out as zeros
    launches: int = 1  # kernels launched, approximately
    first: Callable[..., Any] | None = None  # the function for the first run of each kind of call, if not `run`

    @property
    def all_needs(self) -> tuple[str, ...]:
        """The values that must exist before the step runs."""
        return self.needs


@dataclass(frozen=True, kw_only=True)
class Fused:
    """The step of a fusion rule."""

    label: str  # the ops that it covers
    rule: str  # the name of the rule
    binder: Callable[[int], Bind]  # the result of `fusedmoe.fusion.language.rule.FusionRule.build` for `beside_sms`
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    may_give_none: bool  # a gradient among `gives` may be None although no incoming gradient is None
    zeroes_tail: bool
    launches: int
    light_us: float = 0.0  # as of `fusedmoe.fusion.language.rule.Step`
    carries_us: float = 0.0
    multiplies_codes: bool = False  # this and the next: as of `fusedmoe.fusion.language.rule.FusionRule`
    apart: bool = False
    # the steps that run if the rule declines the call; they also compute the values that only they need
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
