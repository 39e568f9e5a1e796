"""The pattern language: a fusion rule is a class body.

    class GroupedGemmGLU(FusionRule, name="mine.grouped_gemm_glu", direction="forward"):
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union

from fusedmoe.fusion.values import spec_of
from fusedmoe.ops.glue import Glue
from fusedmoe.ops.op import BackwardOp, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


@dataclass(frozen=True, kw_only=True)
class Step:
    """The values that a rule's step reads and writes: one kernel launch, or a few.

    Values are named by slot: ``"fc.weight"``, ``"act.input"``, ``"scale.probs"``. ``"input"``, ``"output"``,
    ``"grad_output"`` and ``"grad_input"`` are the ends of the whole span. A bare name such as ``"offsets"`` is a
    runtime input of the span. A slot of a backward rule stands for the op whose gradient it computes: ``"dact.input"``
    is the input of the activation in forward, and ``"wgrad.grad_weight"`` a gradient.

    A suffix names the form of a quantized value: ``"output:rows"``, ``"output:columns"``, ``"output:dequantized"``.
    Without a suffix it is the form that the op reads. A quantized value stands for its tensors: codes, scale and, if
    the format has one, tensor scale.

    Attributes
    ----------
    needs, gives : tuple of str
        The values read and written.
    keeps : tuple of str
        Values that the step can write besides, each only if another step, or the backward pass, reads it. A backward
        step may also keep forward values, which it computes again (``"dgrad.input"``).
    zeroes_tail : bool
        The rows after the last expert's come out as zeros.
    launches : int
        Kernels launched.
    extra_bytes : int
        Bytes moved besides reading `needs` and writing `gives` once.
    """

    needs: tuple[str, ...]
    gives: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    zeroes_tail: bool = False
    launches: int = 1
    extra_bytes: int = 0


Bind = Callable[..., Callable[..., Any]]
"""Takes the tensors of `Step.needs` and returns the function that runs the step for tensors of the same kind."""


@dataclass(frozen=True)
class PlanContext:
    """The inputs of a rule besides its bindings. They, and the public attributes of ops, are part of a plan's key.

    Attributes
    ----------
    device : torch.device
        Where the rows are.
    arch : int or None
        The number of the GPU's architecture, such as 100; None without an NVIDIA GPU.
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
    _specs: Mapping[str, SpecLike | None]
    _resolve: Callable[[str], str]

    def dtype(self, value: str) -> torch.dtype:
        """Return the dtype of a value, named as in `Step`."""
        return self.spec(value).dtype

    def spec(self, value: str) -> SpecLike:
        """Return shape and dtype of a value, named as in `Step`; of a quantized one, its `QuantizedSpec`."""
        spec = spec_of(self._specs, self._resolve(value))
        if spec is None:
            raise RuleError(f"{value!r} is absent here, and has no dtype")
        return spec


_definitions: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class FusionRule:
    """A chain of ops, or of backward ops, and the step that computes the whole chain. The module's docstring explains
    the pattern.

    Attributes
    ----------
    identity : (str, int)
        The qualified name of the class, and how often a class of that name was defined before in this process.
    takes_quantized : bool
        Whether the step takes operands that are quantized, as their tensors. If not, such operands are a CONSTRAINT.
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

    def __init__(self, bindings: Mapping[str, Op | BackwardOp | Glue | None]) -> None:
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

    def offer(self, ctx: PlanContext) -> Step:
        """Return the values that the step reads and writes, or decline the match through `require` (CONSTRAINT)."""
        raise NotImplementedError(f"rule {self.name!r} defines no offer()")

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        """Return the binder of a step that was chosen.

        The binder takes the tensors of `Step.needs`, in order. It declines, through `require`, for facts that are known
        only at the call, such as strides and the number of rows; it never reads a tensor's contents. Otherwise it
        returns the function that runs the step. That function takes the same tensors and returns those of `Step.gives`,
        then those of ``keep``. It serves every call whose tensors agree in type, shape, dtype, strides and device, and
        in whether they begin at a multiple of 16 bytes. It may still decline, before it writes, for anything else.

        Parameters
        ----------
        ctx
            As for `offer`.
        keep
            The names among `Step.keeps` that are read, in that order.
        """
        raise NotImplementedError(f"rule {self.name!r} defines no build()")


def _slots(cls: type[FusionRule], namespace: Mapping[str, object]) -> tuple[Slot, ...]:
    try:
        annotations = inspect.get_annotations(cls, locals=dict(namespace), eval_str=True)
    except NameError as error:
        raise RuleError(f"rule {cls.name!r}: a slot's type is not known here: {error}") from error
    if not annotations and hasattr(cls, "slots"):
        return cls.slots  # a subclass of a rule, with another check or build
    wanted = Op if cls.direction == "forward" else BackwardOp
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
            if typing.get_origin(t) is not None or not (isinstance(t, type) and issubclass(t, (wanted, Glue))):
                raise RuleError(f"rule {cls.name!r}: slot {name!r}: expected {wanted.__name__} classes, got {t!r}")
        slots.append(Slot(name, ops, optional))
    if len(slots) > 1 and any(issubclass(t, Glue) for slot in slots for t in slot.types):
        raise RuleError(f"rule {cls.name!r}: glue is matched alone: expected one slot, got {len(slots)}")
    if all(slot.optional for slot in slots):
        raise RuleError(f"rule {cls.name!r}: its pattern may match nothing: at least one slot must not be optional")
    return tuple(slots)
