"""The pattern language: a fusion rule is a class body.

    class GroupedGemmGLU(FusionRule, name="mine.grouped_gemm_glu", direction="forward"):
        fc: GroupedLinear
        act: SwiGLU | GeGLU
        scale: Scale | None

Annotations are the pattern, in order; ``A | B`` is an alternative; ``X | None`` may be absent; field names are the
bindings. A class in a pattern matches its own instances only. A subclass may compute something else, so a pattern must
name it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Union

import torch

from fusedmoe.fusion.graph.values import spec_of
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.numerics.recipes import Recipe
from fusedmoe.ops.glue import Glue
from fusedmoe.ops.op import BackwardOp, Op, SpecLike

Direction = Literal["forward", "backward"]


class RuleError(RuntimeError):
    """A fusion rule has a defect, in its pattern or in its step. Also raised for an op whose `compute` returns other
    shapes or dtypes than its `infer`.
    """


class FusionError(RuntimeError):
    """Raised by ``fm.strict()`` and by `raise_if_missed` for ops that run unfused although a kernel exists."""


class Declined(Exception):  # noqa: N818  (not an error: a rule declines with it)
    """The reason why a rule declines a match or a call: ``message % values``. Raised by `require`."""

    def __init__(self, message: str, *values: object) -> None:
        super().__init__(message % values if values else message)
        self.message = message


class NothingToDo(Declined):
    """Raised by a binder for a call with nothing to compute, such as no rows, and by `FusionRule.offer` for ops that
    the kernel would not speed up. Plain PyTorch computes the results. This is no miss under ``fm.strict()``; the
    fallback of a call is not logged.
    """


def require(condition: object, message: str, *values: object) -> None:
    """Decline with ``message % values`` unless the condition holds. The message should name the wrong value and, if
    there is one, the remedy.
    """
    if not condition:
        raise Declined(message, *values)


def expect_none(rule: str, method: str, answer: object) -> None:
    """Raise if a method that declines through `require` returned a value."""
    if answer is not None:
        raise RuleError(f"rule {rule!r}: {method}() returned {answer!r}: expected None; decline through fm.require")


@dataclass(frozen=True)
class Slot:
    """One position of a pattern."""

    name: str
    types: tuple[type, ...]
    optional: bool

    @functools.cached_property
    def expected(self) -> str:
        """The alternatives, as a pattern writes them."""
        return " | ".join([t.__name__ for t in self.types] + (["None"] if self.optional else []))


@dataclass(frozen=True, kw_only=True)
class Step:
    """The values that a rule's step reads and writes, and its cost. A step is one kernel launch, or a few.

    Values are named by slot: ``"fc.weight"``, ``"act.input"``, ``"scale.probs"``. ``"input"``, ``"output"``,
    ``"grad_output"`` and ``"grad_input"`` are the ends of the whole span. A bare name such as ``"offsets"`` is a
    runtime input of the span. In a backward rule, a slot has the values of the op whose gradient it computes:
    ``"dact.input"`` is the forward input of the activation, and ``"wgrad.grad_weight"`` is a gradient.

    A suffix names the form of a quantized value: ``"output:rows"``, ``"output:columns"``, ``"output:dequantized"``. A
    name without a suffix means the form that the op reads. A quantized value is passed as its tensors: codes, scale
    and, if the format has one, tensor scale.

    A rule whose `FusionRule.gathers` is ``"input"`` reads rows of another value: ``"input:source"`` and
    ``"input:index"`` are that value and the index of its rows. The rows themselves are then not written, unless another
    step reads them. Of rows without an expert, a step may read any row of the source.

    - ``needs``, ``gives`` (tuple of str): the values read and written. A step for an op that provides ``splits`` may
      also give ``"<slot>.offsets"``, the ends of the experts' rows; otherwise one more step derives them.
    """

    needs: tuple[str, ...]
    gives: tuple[str, ...]
    #: Values that the step can also write, each only if another step or the backward pass reads it. A backward step may
    #: list forward values that it can recompute (``"dgrad.input"``).
    keeps: tuple[str, ...] = ()
    #: The rows after the last expert's come out as zeros, or are undefined if ``ctx.options.zero_tail`` is False.
    zeroes_tail: bool = False
    launches: int = 1  #: Kernels launched
    #: Bytes moved besides reading `needs` and writing `gives` once. Rows that are read through their index count as
    #: rows, not as their source.
    extra_bytes: int = 0
    gather_cost: float = 1.0  #: The cost to read a byte of rows through their index, in bytes read in order
    #: Microseconds of the step's last launch on a single SM, if the launch can leave the other SMs to the next step; 0
    #: otherwise.
    light_us: float = 0.0
    #: Microseconds of the step on the whole GPU, if it can begin while the last launch of another step runs; 0
    #: otherwise. `PlanContext.beside_sms` has the details.
    carries_us: float = 0.0


Run = Callable[..., Any]
"""Runs a step: takes the tensors of `Step.needs`, returns those of `Step.gives`, then those of `PlanContext.keep`."""
Bind = Callable[..., Run]
"""Takes the tensors of `Step.needs` and returns the function that runs the step for tensors of the same kind."""


@dataclass(frozen=True)
class PlanContext:
    """The inputs of a rule besides its bindings. These and the public attributes of ops are part of a plan's key."""

    device: torch.device  #: Where the rows are
    arch: int | None  #: The architecture of an NVIDIA GPU as a number, such as 100; None for other devices
    deterministic: bool  #: `torch.are_deterministic_algorithms_enabled`
    training: bool  #: Whether there will be a backward pass
    recipe: Recipe  #: The recipe in force
    #: The options of the `Sequential`: ``sm_margin``, ``schedule``. In `FusionRule.bind`, ``zero_tail`` is False if
    #: nothing reads the rows after the last expert's of the step's results.
    options: KernelOptions
    _specs: Mapping[str, SpecLike | None]
    _resolve: Callable[[str], str]
    _read_outside: frozenset[str]
    #: In `FusionRule.bind`: the SMs that the last launch of a light step runs on, beside the step that carries it; 0
    #: for a step alone. Both steps get the number. The light step comes first, on the same stream, and neither reads
    #: what the other writes. Its last launch lets the next launch begin early. The carrier has one launch, which begins
    #: early, and which ends after the launch before it has ended.
    beside_sms: int = 0
    keep: tuple[str, ...] = ()  #: In `FusionRule.bind`: the names among `Step.keeps` that are read, in that order

    def dtype(self, value: str) -> torch.dtype:
        """Return the dtype of a value, named as in `Step`."""
        return self.spec(value).dtype

    def exists(self, value: str) -> bool:
        """Whether a value, named as in `Step`, exists: an op may lack an optional value, or its gradient."""
        return spec_of(self._specs, self._resolve(value)) is not None

    def same(self, value: str, other: str) -> bool:
        """Whether two names, as in `Step`, mean one value."""
        return self._resolve(value) == self._resolve(other)

    def is_read_outside(self, value: str) -> bool:
        """Whether an op outside of the span reads a value that is made inside, named as in `Step`."""
        return self._resolve(value) in self._read_outside

    def spec(self, value: str) -> SpecLike:
        """Return the shape and the dtype of a value, named as in `Step`; for a quantized value, a `QuantizedSpec`."""
        spec = spec_of(self._specs, self._resolve(value))
        if spec is None:
            raise RuleError(f"{value!r} is absent from this match, so it has no shape and no dtype")
        return spec


_definitions: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


class FusionRule:
    """A pattern of ops, backward ops or glue, and the step that computes a match. The annotations of a subclass are its
    pattern.
    """

    name: ClassVar[str]
    direction: ClassVar[Direction]
    slots: ClassVar[tuple[Slot, ...]]
    #: The qualified name of the class, and the number of earlier classes of that name in this process.
    identity: ClassVar[tuple[str, int]]
    #: Whether the step takes quantized operands. A match with such operands ends in CONSTRAINT otherwise.
    takes_quantized: ClassVar[bool] = False
    #: Whether the step takes quantized operands only: the pattern matches nothing without such operands.
    quantized_only: ClassVar[bool] = False
    #: Whether the step multiplies codes, without dequantizing them first. The estimate of ``explain()`` depends on it.
    multiplies_codes: ClassVar[bool] = False
    #: Whether the first op alone has quantized operands, and the others have rules of their own: a format without a
    #: kernel is no reason for those.
    first_reads_codes: ClassVar[bool] = False
    #: Whether products compute the ops in their epilogues where they can: ``explain()`` then says why they do not.
    apart: ClassVar[bool] = False
    #: Whether rows without an expert that the step reads change a result elsewhere than in the same rows, see
    #: `fusedmoe.ops.op.Op.reads_tail`.
    reads_tail: ClassVar[bool] = True
    #: The rows that the step reads through their index, named as in `Step`: the pattern matches only where these are
    #: rows of another value, as `fusedmoe.ops.op.Op.gathers` says. Empty for a step that reads all rows in order.
    gathers: ClassVar[str] = ""

    def __init_subclass__(cls, *, name: str, direction: Direction, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if direction not in ("forward", "backward"):
            raise RuleError(f"rule {name!r}: direction: expected 'forward' or 'backward', got {direction!r}")
        cls.name, cls.direction = name, direction
        qualified = f"{cls.__module__}.{cls.__qualname__}"
        cls.identity = qualified, next(_definitions[qualified])
        # the frame of the class statement: the pattern of a rule in a function may name local classes
        cls.slots = _slots(cls, sys._getframe(1).f_locals)

    def __init__(self, bindings: Mapping[str, Op | BackwardOp | Glue | None]) -> None:
        for slot, bound in bindings.items():
            setattr(self, slot, bound)

    @classmethod
    def available(cls, device: torch.device, arch: int | None) -> None:
        """Decline through `require` if the rule cannot run on this device (UNAVAILABLE).

        ``explain(..., arch=90)`` passes a device that may be absent: only the arguments may be used.
        """

    @classmethod
    def installed(cls) -> None:
        """Decline through `require` if this machine lacks a requirement of the rule, such as a package (UNAVAILABLE). A
        plan of ``explain(..., arch=90)`` assumes that the requirement is met, and lists it.
        """

    def supports(self, ctx: PlanContext) -> None:
        """Decline through `require` if the rule has no kernel, on any device, for the formats of quantized operands and
        results (CONSTRAINT). This is reported even if the rule is unavailable, and is no miss under ``fm.strict()``.
        """

    def offer(self, ctx: PlanContext) -> Step:
        """Return the values that the step reads and writes, or decline the match through `require` (CONSTRAINT)."""
        raise NotImplementedError(f"rule {self.name!r} defines no offer()")

    def bind(self, ctx: PlanContext, *tensors: Any) -> Run:
        """Return the function that runs the step for tensors like these: those of `Step.needs`, in order.

        Decline, through `require`, for facts that are known only at the call, such as strides and the number of rows;
        never read a tensor's contents. The function takes the same tensors and returns those of `Step.gives`, then
        those of ``ctx.keep``. It serves every call whose tensors agree in type, shape, dtype, strides and device, and
        in whether they begin at a multiple of 16 bytes. It may still decline, before it writes, for anything else.
        """
        raise NotImplementedError

    def build(self, ctx: PlanContext, keep: tuple[str, ...]) -> Bind:
        """Return the binder of a step that was chosen: `bind` of a context, unless a subclass prepares more than that
        once per plan.

        Parameters
        ----------
        ctx
            As for `offer`.
        keep
            `PlanContext.keep`.
        """
        if type(self).bind is FusionRule.bind:
            raise NotImplementedError(f"rule {self.name!r} defines no bind()")
        return functools.partial(self.bind, replace(ctx, keep=keep))


def _slots(cls: type[FusionRule], namespace: Mapping[str, object]) -> tuple[Slot, ...]:
    try:
        annotations = inspect.get_annotations(cls, locals=dict(namespace), eval_str=True)
    except NameError as error:
        raise RuleError(f"rule {cls.name!r}: a slot's type is not known here: {error}") from error
    if not annotations and hasattr(cls, "slots"):
        return cls.slots  # a subclass of a rule, with another offer or bind
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
