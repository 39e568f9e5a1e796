"""The pattern language: a fusion rule is a class body.

    class GroupedGemmGLU(FusionRule, name="sm90.grouped_gemm_glu", direction="forward"):
        fc: GroupedLinear
        act: SwiGLU | GeGLU
        scale: Scale | None

Annotations are the pattern, in order; ``A | B`` is an alternative; ``X | None`` may be absent; field names are the
bindings. A class in a pattern matches its own instances only: a subclass may compute something else, so it has to be
named.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import types
import typing
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

from fusedmoe.fusion.names import primal
from fusedmoe.ops.op import BackwardOp, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from fusedmoe.kernels.options import KernelOptions
    from fusedmoe.ops.op import SpecLike
    from fusedmoe.recipes import Recipe

Direction = Literal["forward", "backward"]


class RuleError(RuntimeError):
    """A fusion rule is wrong in itself: its pattern, or the step that it built. Also raised for an op whose `compute`
    returns other shapes or dtypes than its `infer`.
    """


class FusionError(RuntimeError):
    """Raised under ``fm.strict()`` where something ran unfused that a rule for this device stood on."""


class Declined(Exception):  # noqa: N818  (not an error: the way in which a rule says no)
    """Why a rule does not take what it matched: ``message % values``. Raised by `require`."""

    def __init__(self, message: str, *values: object) -> None:
        super().__init__(message % values if values else message)
        self.message = message


class NothingToDo(Declined):
    """Raised by a guard where a call has nothing to compute, such as no rows: plain PyTorch makes the empty results.
    That is neither a fallback to log nor a miss under ``fm.strict()``.
    """


def require(condition: object, message: str, *values: object) -> None:
    """Decline with ``message % values`` unless the condition holds. Name the value that is off and, where there is one,
    the remedy.
    """
    if not condition:
        raise Declined(message, *values)


def expect_none(rule: str, method: str, answer: object) -> None:
    """Raise for a rule that says yes or no by what it returns."""
    if answer is not None:
        raise RuleError(f"rule {rule!r}: {method}() returned {answer!r}: expected None; decline through fm.require")


@dataclass(frozen=True)
class Slot:
    """One position of a pattern."""

    name: str
    types: tuple[type, ...]
    optional: bool

    @property
    def expected(self) -> str:
        """The alternatives, as a person would write them."""
        return " | ".join([t.__name__ for t in self.types] + (["None"] if self.optional else []))


@dataclass(frozen=True)
class Step:
    """One kernel launch (or a few) over flat tensors, as a rule builds it.

    Values are named by slot: ``"fc.weight"``, ``"act.input"``, ``"scale.probs"``; ``"input"``, ``"output"``,
    ``"grad_output"`` and ``"grad_input"`` are the ends of the whole span; a bare name such as ``"offsets"`` is a
    runtime input of the span. A slot of a backward rule stands for the op whose gradient it computes: ``"dact.input"``
    is what went into the activation in forward, and ``"wgrad.grad_weight"`` a gradient.

    Attributes
    ----------
    run : callable or None
        Takes the tensors of `needs`, in order, and returns those of `gives`. Where `keeps` is not empty it also takes
        ``keep=``, the names among `keeps` that the backward pass wants this time, and returns those after `gives`.
    needs, gives : tuple of str
        Values read and written. A backward step may also give forward values that it recomputes (``"dgrad.input"``).
    keeps : tuple of str
        Forward steps: values inside the span that it can write besides, for the backward pass.
    guard : callable or None
        Takes the tensors of `needs` and declines through `require` for facts known only at the call (row count,
        strides); never looks at contents. The ops then run unfused in this call.
    bind : callable or None
        In place of `run` and `guard`, for a kernel that is launched faster than Python finds out how: takes what they
        take, declines as a guard does, and otherwise returns the function to run. That function serves every call whose
        tensors agree in type, shape, dtype, strides, device, and in whether they begin at a multiple of 16 bytes; it
        may still decline for what else can change.
    zeroes_tail : bool
        The rows behind the last expert's come out as zeros.
    launches : int
        Kernels launched.
    extra_bytes : int
        Bytes moved besides reading `needs` and writing `gives` once.
    """

    run: Callable[..., Any] | None
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    guard: Callable[..., None] | None = None
    zeroes_tail: bool = False
    launches: int = 1
    extra_bytes: int = 0
    bind: Callable[..., Callable[..., Any]] | None = None

    def __post_init__(self) -> None:
        if (self.run is None) == (self.bind is None) or (self.bind is not None and self.guard is not None):
            raise RuleError("a step has either run, and perhaps a guard, or bind alone")


@dataclass(frozen=True)
class PlanContext:
    """What a rule may look at besides its bindings. Anything here, and any public attribute of an op, is part of the
    plan's key.

    Attributes
    ----------
    device : torch.device
        Where the rows are.
    arch : int or None
        90 for sm_90; None where there is no NVIDIA GPU.
    deterministic : bool
        `torch.are_deterministic_algorithms_enabled`.
    training : bool
        Whether there will be a backward pass.
    recipe : Recipe
        The recipe in force.
    options : KernelOptions
        What the `Sequential` asks of kernels: ``sm_margin``, ``schedule``.
    """

    device: torch.device
    arch: int | None
    deterministic: bool
    training: bool
    recipe: Recipe
    options: KernelOptions
    _specs: Mapping[str, SpecLike]
    _resolve: Callable[[str], str]
    _used_outside: Callable[[str], bool]

    def dtype(self, value: str) -> torch.dtype:
        """Return the dtype of a value, named as in `Step`."""
        return self.spec(value).dtype

    def spec(self, value: str) -> SpecLike:
        """Return shape and dtype of a value, named as in `Step`; of a quantized one, its `QuantizedSpec`."""
        resolved = self._resolve(value)
        return self._specs[resolved] if resolved in self._specs else self._specs[primal(resolved)]

    def wants(self, value: str) -> bool:
        """Whether something outside of the span reads a value, named as in `Step`, in this direction.

        What a backward step recomputes, such as ``"dgrad.input"``, belongs in `Step.gives` only then.
        """
        return self._used_outside(self._resolve(value))


_definitions: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class FusionRule:
    """A chain of ops, or of backward ops, and the step that computes all of it at once. See the module's page for the
    pattern.

    Attributes
    ----------
    identity : (str, int)
        The qualified name of the class, and how often a class of that name was defined before in this process.
    takes_quantized : bool
        Whether the step takes `QuantizedTensor` for operands that are quantized (by columns under the name
        ``"<slot>.columns"``, ``"<slot>.grad_columns"`` of the op that quantizes). A rule that does not say so is not
        asked where an operand is quantized.
    """

    name: ClassVar[str]
    direction: ClassVar[Direction]
    slots: ClassVar[tuple[Slot, ...]]
    identity: ClassVar[tuple[str, int]]
    takes_quantized: ClassVar[bool] = False

    def __init_subclass__(cls, *, name: str, direction: Direction, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if direction not in ("forward", "backward"):
            raise RuleError(f"rule {name!r}: direction: expected 'forward' or 'backward', got {direction!r}")
        cls.name, cls.direction = name, direction
        qualified = f"{cls.__module__}.{cls.__qualname__}"
        cls.identity = qualified, next(_definitions[qualified])
        # the frame of the class statement: a rule written inside a function may name what is local there
        cls.slots = _slots(cls, sys._getframe(1).f_locals)

    def __init__(self, bindings: Mapping[str, Op | BackwardOp | None]) -> None:
        for slot, bound in bindings.items():
            setattr(self, slot, bound)

    @classmethod
    def available(cls, device: torch.device, arch: int | None) -> None:
        """Decline through `require` where the rule cannot run on this device (UNAVAILABLE).

        ``explain(..., arch=90)`` asks it of an architecture that need not be there: look at the arguments alone.
        """

    @classmethod
    def installed(cls) -> None:
        """Decline through `require` where this machine lacks a package or another thing that the rule needs
        (UNAVAILABLE). ``explain(..., arch=90)`` assumes that it is there.
        """

    def check(self, ctx: PlanContext) -> None:
        """Decline through `require` where what was matched cannot be taken (CONSTRAINT)."""

    def build(self, ctx: PlanContext) -> Step:
        """Return the step that computes the span."""
        raise NotImplementedError(f"rule {self.name!r} defines no build()")


def _slots(cls: type[FusionRule], namespace: Mapping[str, object]) -> tuple[Slot, ...]:
    try:
        annotations = inspect.get_annotations(cls, locals=dict(namespace), eval_str=True)
    except NameError as error:
        raise RuleError(f"rule {cls.name!r}: a slot's type is not known here: {error}") from error
    if not annotations and hasattr(cls, "slots"):
        return cls.slots  # a subclass of a rule, with another check or build
    wanted: type = Op if cls.direction == "forward" else BackwardOp
    slots = []
    for name, annotation in annotations.items():
        origin: object = typing.get_origin(annotation)
        if ClassVar in (origin, annotation):
            continue
        union = origin in (Union, types.UnionType)
        members = typing.get_args(annotation) if union else (annotation,)
        optional = type(None) in members
        ops = tuple(t for t in members if t is not type(None))
        for t in ops:
            # a generic such as list[SwiGLU] is an instance of type on Python 3.10
            if typing.get_origin(t) is not None or not (isinstance(t, type) and issubclass(t, wanted)):
                raise RuleError(f"rule {cls.name!r}: slot {name!r}: expected {wanted.__name__} classes, got {t!r}")
        slots.append(Slot(name, ops, optional))
    if all(slot.optional for slot in slots):
        raise RuleError(f"rule {cls.name!r}: its pattern may match nothing: at least one slot must not be optional")
    return tuple(slots)
