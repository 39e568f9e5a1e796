"""The steps of a plan: a fusion rule's, or plain PyTorch. Values have the chain's names; see `values`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusedmoe.fusion.graph.values import NONE, Form
from fusedmoe.numerics.formats import QuantizedTensor
from fusedmoe.numerics.formats.packed import PackedTensor


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
    # the result of `fusedmoe.fusion.language.rule.FusionRule.build` for `beside_sms`
    binder: Callable[[int], Callable[..., Callable[..., Any]]]
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


def on_tensors(step: Plain, forms: Mapping[str, Form], specs: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Return a plain step's function of flat tensors, for calls with these specs."""
    run, takes = step.run, [forms.get(value) for value in step.needs]
    if not any(takes) and forms.keys().isdisjoint(step.gives):
        return run
    assert specs is not None, "a program with quantized values runs with specs"
    operands_of = [(form, specs.get(value)) for value, form in zip(step.needs, takes, strict=True)]

    def flat(*tensors: Tensor | None) -> Any:
        each = iter(tensors)
        operands: list[Any] = []
        for form, spec in operands_of:
            if form is None:
                operands.append(next(each))
            else:
                held: Any = [next(each) for _ in form.tensors]
                operands.append(spec.tensor(held, next(each)))  # type: ignore[union-attr]
        out = run(*operands)
        results: list[Tensor | None] = []
        for result in out if isinstance(out, (tuple, list)) else (out,):
            results += result.tensors() if isinstance(result, (QuantizedTensor, PackedTensor)) else [result]
        return results if len(results) > 1 else results[0]

    return flat
