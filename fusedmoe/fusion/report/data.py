"""A plan as data, for ``explain()``, for the log and for tests."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from fusedmoe.base.target import ARCHITECTURES
from fusedmoe.fusion.language.rule import Direction, FusionError
from fusedmoe.fusion.report.estimate import Estimate
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.numerics.formats.groups import PACKED_ROWS


class Status(str, Enum):
    """The result of a rule at a position of the chain."""

    FUSED = "FUSED"  #: The rule runs there
    SHADOWED = "SHADOWED"  #: The rule could run there, but a cheaper step does
    UNAVAILABLE = "UNAVAILABLE"  #: The pattern matches, but a package, a device or a switch is missing
    CONSTRAINT = "CONSTRAINT"  #: The pattern matches, and the rule declines the ops
    NO_MATCH = "NO_MATCH"  #: The pattern does not match


Cause = Literal["", "device", "machine", "switch"]
"""The kind of thing that an UNAVAILABLE rule lacks; ``"machine"`` is a package or the operating system."""


class Exemption(str, Enum):
    """The reason why a rule that declined is not a miss."""

    NONE = ""
    QUANTIZED = "quantized"
    """An operand or a result is quantized, and the rule has no kernel for its format on any device."""
    UNQUANTIZED = "unquantized"  #: An operand is quantized, and the rule takes unquantized operands only
    KEEPS = "keeps"
    """The rule takes fewer ops here. It cannot take more, since the backward pass reads a value between them."""
    NOTHING = "nothing to do"  #: The rule declined ops that it would not speed up

    @property
    def is_of_formats(self) -> bool:
        """Whether the formats of operands or results are the reason."""
        return self in (Exemption.QUANTIZED, Exemption.UNQUANTIZED)


@dataclass(frozen=True)
class Attempt:
    """One rule at one position, and the result.

    A rule with optional slots may have several matches at a position. Its attempt is the match with the best status,
    and the longest of these. Each longer match is an attempt of its own, which shares only the additional ops.

    - ``start``, ``end`` (int): the positions that it covers; of a NO_MATCH, those up to the first mismatch, inclusive.
    """

    rule: str  #: The rule's name
    direction: Direction  #: ``"forward"`` or ``"backward"``
    start: int
    end: int
    matched: int  #: The number of slots bound
    #: The positions of the ops that the rule clearly has slots for: those up to the last op that a required slot
    #: matched, and up to an op of a subclass of the expected class. Any other op that ends the match is not included.
    shared: range
    status: Status  #: The result
    #: The shadowing rule, the missing requirement, the constraint, or the slot with the expected and the actual class.
    reason: str = ""
    on_this_device: bool = True  #: Whether the rule could run on this machine at all
    exemption: Exemption = Exemption.NONE  #: Of a CONSTRAINT: the reason why it is not a miss
    cause: Cause = ""  #: Of an UNAVAILABLE: the missing thing

    @property
    def missed(self) -> bool:
        """Whether ``fm.strict()`` raises for the ops of `shared` that run unfused: the rule can run on this device, but
        declined them, without an exemption.
        """
        declined = self.status in (Status.CONSTRAINT, Status.NO_MATCH) and self.on_this_device
        return declined and self.matched > 0 and len(self.shared) > 0 and not self.exemption.value

    def __str__(self) -> str:
        return (
            f"{self.rule}: {self.status.value}: {self.reason}" if self.reason else f"{self.rule}: {self.status.value}"
        )


@dataclass(frozen=True)
class PlannedStep:
    """One step of a plan.

    - ``needs``, ``gives`` (tuple of str): the values read and written, by the chain's names.
    """

    direction: Direction  #: ``"forward"`` or ``"backward"``
    ops: tuple[str, ...]  #: The ops that it covers, as ``label.Class``
    rule: str | None  #: The rule that fuses them; None for plain PyTorch
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    #: Bytes of `needs` and `gives` for the shapes explained, plus the rule's extra bytes. Eager PyTorch moves more.
    bytes_moved: int
    launches: int  #: Kernels launched, approximately
    host_sync: bool = False  #: Whether the host reads a tensor
    #: Of an unfused step: the rule that came nearest to taking it. Of a step whose rule is `FusionRule.apart`: the
    #: longer rule that came nearest, if one declined.
    nearest_miss: Attempt | None = None
    #: Of an unfused product of quantized operands: ``"native"`` if torch multiplies codes, ``"emulated"`` if it
    #: multiplies dequantized values.
    path: str = ""
    #: ``label:role`` (``input``, ``weight`` or ``grad``) of each op that quantizes, and the quantizer in words.
    quantizes: tuple[tuple[str, str], ...] = ()
    #: FLOPs of the products, for the shapes explained: ``2 R K N`` for R rows and a weight of N x K per expert.
    flops: float = 0.0
    of_codes: bool = False  #: Whether the products multiply codes
    #: The ops that exchange rows with other ranks, as ``label.Class``, and the bytes that each receives from them for
    #: the shapes explained.
    received: tuple[tuple[str, int], ...] = ()
    padding_bytes: int = 0  #: The part of `bytes_moved` that is padding of packed rows; see `PlanData.packed_rows`

    @property
    def is_of_weight(self) -> bool:
        """Whether the step quantizes a weight, and is repeated only after the weight has changed."""
        return any(what.endswith(":weight") for what, _ in self.quantizes)

    @property
    def status(self) -> str:
        """``FUSED`` or ``unfused``, with the `path` of a product of quantized operands."""
        return Status.FUSED.value if self.rule is not None else f"unfused {self.path}".rstrip()

    @property
    def why(self) -> str:
        """The reason why the step is unfused, or apart from a product; empty for other fused steps."""
        miss = self.nearest_miss
        if self.rule is not None:
            return "" if miss is None else str(miss)
        if self.received and (miss is None or miss.status is Status.NO_MATCH):
            return "an exchange with other ranks"
        return str(miss) if miss is not None else "no rule matches it"


@dataclass(frozen=True)
class PlanData:
    """A plan of one chain.

    - ``device``, ``dtype``, ``recipe`` (str): the conditions of the plan.
    - ``forward_source``, ``backward_source`` (str): the Python functions that run the steps: ``run0``, ``run1``, ...
      are the steps, in order.
    """

    #: The steps that cover ops, in order, forward then backward; before them those that quantize weights.
    steps: tuple[PlannedStep, ...]
    attempts: tuple[Attempt, ...]  #: Every rule at every position
    kept: tuple[str, ...]  #: Values kept for the backward pass, except parameters and quantized weights
    kept_bytes: int  #: The bytes of these values for the shapes explained, including the caller's own arguments
    device: str
    dtype: str
    recipe: str
    options: KernelOptions = DEFAULT  #: The options of the `Sequential`
    forward_source: str = ""
    backward_source: str = ""
    weight_bytes: int = 0  #: Bytes of quantized weights, which are kept until the weights change
    asked_arch: int | None = None  #: The argument ``arch`` of ``explain``
    given_dtype: str = ""  #: The dtype of the rows, if the argument ``dtype`` of ``explain`` is another one
    #: The requirements of fused steps that this machine lacks, in a plan of ``explain(..., arch=)``.
    assumed: tuple[str, ...] = ()
    #: The ops that run unfused although a rule for the device shares them, each with that rule. UNAVAILABLE rules count
    #: too. In a plan of ``explain(..., arch=)``, rules for other devices do not.
    missed: tuple[tuple[str, Attempt], ...] = ()
    #: The number of rows, or of tokens if the chain begins with a `Dispatch`, for which all bytes are counted.
    rows: int = 0
    #: The steps between ops: derived values, dequantization, sums of gradients, zeroed tails.
    glue: tuple[PlannedStep, ...] = ()
    #: The rows that no step writes, since all steps read them from another value: the rows, that value, and the index.
    gathered: tuple[tuple[str, str, str], ...] = ()
    #: The steps that run beside each other: the rule of one, whose last launch needs a few SMs only, the rule of the
    #: next, and the number of these SMs.
    beside: tuple[tuple[str, str, int], ...] = ()
    arch: int | None = None  #: The architecture of the GPU that the plan is for; None for other devices
    #: Of a recipe that quantizes: the estimated times under it and under ``"bf16"``, if all steps are fused.
    estimate: Estimate | None = None
    exchange: str = ""  #: The settings of the exchanges with other ranks; empty without such exchanges
    #: If a step reads or writes rows in the packed layout, in which each expert's are padded to a multiple of 256: the
    #: number of rows, and the most that they can be with their padding, for any splits. Bytes are counted, and memory
    #: is allocated, for the latter.
    packed_rows: tuple[int, int] | None = None
    kept_padding_bytes: int = 0  #: The part of `kept_bytes` that is padding of packed rows

    @property
    def planned_for(self) -> str:
        """Device, dtype and recipe, as in the first line of the table."""
        asked = " (requested)" if self.asked_arch is not None else ""
        dtype = f"{self.dtype} (requested, given {self.given_dtype})" if self.given_dtype else self.dtype
        return f"{self.device}{asked}, {dtype}, recipe {self.recipe}"

    @property
    def nothing_to_fuse(self) -> bool:
        """Whether the architecture ``asked_arch`` has no kernels for these ops, built-in or from another package; if
        there are products among them, none for these products.
        """
        steps = [step for step in self.steps if step.flops] or self.steps
        if self.asked_arch is None or any(step.rule is not None for step in steps):
            return False
        misses = [step.nearest_miss for step in steps if step.nearest_miss is not None]
        return self.asked_arch not in ARCHITECTURES or any(m.cause == "device" for m in misses)

    @property
    def without_kernel(self) -> tuple[PlannedStep, ...]:
        """The unfused steps without a fused kernel for the device, whatever is installed: no rule shares them, or the
        nearest rule is for other devices or for unquantized operands.
        """
        missed = {label for label, _ in self.missed}
        return tuple(s for s in self.unfused if missed.isdisjoint(s.ops) and _no_kernel(s.nearest_miss))

    @property
    def fused(self) -> tuple[PlannedStep, ...]:
        """The steps that a rule runs."""
        return tuple(s for s in self.steps if s.rule is not None)

    @property
    def unfused(self) -> tuple[PlannedStep, ...]:
        """The steps in plain PyTorch."""
        return tuple(s for s in self.steps if s.rule is None)

    @property
    def formats(self) -> dict[str, tuple[str, ...]]:
        """``label:role`` of all quantized values, by quantizer, in the order of the steps."""
        found: dict[str, tuple[str, ...]] = {}
        for step in self.steps:
            for what, quantizer in step.quantizes:
                found[quantizer] = (*found.get(quantizer, ()), what)
        return found

    def __str__(self) -> str:
        kept = f" ({', '.join(self.kept)})" if self.kept else ""
        lines = [
            ", ".join([f"planned for {self.planned_for}", *self.options.changed(), f"{self.rows:,} rows"]),
            *_table(self.steps),
            *_wrapped(f"kept for backward: {format_bytes(self.kept_bytes)}{kept}"),
        ]
        if self.packed_rows is not None:
            rows, most = self.packed_rows
            moved, held = sum(step.padding_bytes for step in self.steps), self.kept_padding_bytes
            lines += _wrapped(
                f"rows per expert are padded to a multiple of {PACKED_ROWS}: {rows:,} rows to at most {most:,}; "
                f"padding is at most {format_bytes(moved)} of what moves, {format_bytes(held)} of what is kept"
            )
        if self.gathered:
            read = [f"{rows} from {source} by {index}" for rows, source, index in self.gathered]
            lines += _wrapped(f"read through an index, not written: {', '.join(read)}")
        for light, carrier, sms in self.beside:
            lines += _wrapped(f"beside each other: the last launch of {light}, on {sms} SMs, and {carrier}")
        if self.exchange:
            lines += _wrapped(f"exchanges with other ranks: {self.exchange}")
            for label, count in (received for step in self.steps for received in step.received):
                lines += _wrapped(f"  {label}: {format_bytes(count)} received, as much sent")
        if self.glue:
            glue = [f"{step.ops[0]} ({step.rule})" if step.rule else step.ops[0] for step in self.glue]
            lines += _wrapped(f"glue: {', '.join(glue)}")
        if self.weight_bytes:
            lines.append(f"quantized weights: {format_bytes(self.weight_bytes)}, kept until the weights change")
        if self.formats:
            lines.append("quantized to:")
        for quantizer, what in self.formats.items():
            lines += _wrapped(f"  {quantizer}: {', '.join(what)}")
        if self.estimate is not None:
            lines.append(str(self.estimate))
        for missing in self.assumed:
            lines += _wrapped(f"not available on this machine, but assumed: {missing}")
        return "\n".join([*lines, *self._reasons()])

    def _reasons(self) -> list[str]:
        """Return the reasons why steps are unfused, and those why steps are apart from products, in lines."""
        apart = [step for step in self.fused if step.why]
        return [*self._because("unfused", self.unfused), *self._because("apart from a product", apart)]

    def _because(self, what: str, steps: Sequence[PlannedStep]) -> list[str]:
        """Return the reasons of steps, in lines: each reason once, with its ops."""
        reasons: dict[str, list[str]] = {}
        rules: dict[str, set[str]] = {}  # several rules may decline for the same reason
        for step in steps:
            miss, why = step.nearest_miss, step.why
            if miss is not None and (miss.status is Status.UNAVAILABLE or miss.exemption.is_of_formats):
                why = f"{miss.status.value}: {miss.reason}"
                rules.setdefault(why, set()).add(miss.rule)
            reasons.setdefault(why, []).extend(step.ops)
        lines = [f"{what}, because:"] if reasons else []
        for why, ops in reasons.items():
            who = "all of them" if len(steps) == len(self.steps) and len(reasons) == 1 else ", ".join(ops)
            declined = sorted(rules.get(why, ()))
            if len(declined) == 1:
                why = f"{declined[0]}: {why}"
            elif declined:
                why = f"{why} ({', '.join(declined)})"
            lines += _wrapped(f"  {who}: {why}")
        return lines


def _table(steps: Sequence[PlannedStep]) -> list[str]:
    rows = [("step", "ops", "direction", "rule", "status", "moves")]
    for i, step in enumerate(steps, 1):
        status = step.status + (" HOST SYNC" if step.host_sync else "")
        moves = format_bytes(step.bytes_moved)
        rows.append((str(i), " + ".join(step.ops), step.direction, step.rule or "-", status, moves))
    return in_columns(rows)


def in_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table, whose first row is the heading."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Explanation:
    """The plans of a `Sequential` for a call, one per chain, with the modules between the chains.

    ``str()`` of it is the table.
    """

    #: In order: the title of each part, and its plan; None for a module between chains.
    parts: tuple[tuple[str, PlanData | None], ...]

    @property
    def plans(self) -> tuple[PlanData, ...]:
        """The plans of the chains, in order."""
        return tuple(plan for _, plan in self.parts if plan is not None)

    @property
    def modules(self) -> tuple[str, ...]:
        """The titles of the modules that are called between chains, in order."""
        return tuple(title for title, plan in self.parts if plan is None)

    @property
    def steps(self) -> tuple[PlannedStep, ...]:
        """The steps of all chains, in order."""
        return tuple(step for plan in self.plans for step in plan.steps)

    @property
    def missed(self) -> tuple[tuple[str, Attempt], ...]:
        """`PlanData.missed` of all chains."""
        return tuple(missed for plan in self.plans for missed in plan.missed)

    def raise_if_missed(self) -> None:
        """Raise for ops that run unfused although there is a fused kernel for them; see `PlanData.missed`.

        Ops without one, such as products of quantized operands, do not raise.

        Raises `FusionError`: also if the argument ``arch`` of ``explain`` has no kernels.
        """
        raise_if_missed(self.plans, self.missed)

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [self.table(), *hints(self.plans)]))

    def table(self) -> str:
        """Return the table of each plan under its title."""
        return "\n\n".join(title if plan is None else f"{title}\n{plan}" for title, plan in self.parts)


def hints(plans: Iterable[PlanData]) -> list[str]:
    """Return hints: a recipe is slower than bf16, an architecture has no kernels, ``explain`` can plan for another."""
    found: dict[str, None] = {}
    for plan in plans:
        if plan.estimate is not None and plan.estimate.micro_batches != 1:
            found[_slower(plan.recipe, plan.estimate)] = None
        if plan.nothing_to_fuse:
            found[_no_kernels(plan)] = None
        misses = [step.nearest_miss for step in plan.unfused if step.nearest_miss is not None]
        for arch in ARCHITECTURES if plan.asked_arch is None else ():
            if any(m.cause == "device" and m.rule.startswith(f"sm{arch}.") for m in misses):
                found[f"explain(..., arch={arch}) shows what an sm_{arch} GPU would run"] = None
    return list(found)


def raise_if_missed(plans: Iterable[PlanData], missed: Sequence[tuple[str, object]]) -> None:
    """Raise `FusionError` for missed ops, or for an architecture without kernels."""
    for plan in plans:
        if plan.nothing_to_fuse:
            raise FusionError(f"strict: {_no_kernels(plan)}")
    if missed:
        raise FusionError(missed_text(missed, "there is a kernel"))


def _slower(recipe: str, estimate: Estimate) -> str:
    count = estimate.micro_batches
    unless = "" if count is None else f" with fewer than {count} micro-batches per optimizer step"
    return (
        f"recipe {recipe} is slower than bf16 for these shapes{unless}, as {estimate}. "
        'recipe="bf16" of an op leaves it unquantized'
    )


def _no_kernels(plan: PlanData) -> str:
    return f"there are no kernels for these ops on sm_{plan.asked_arch} yet"


def _no_kernel(nearest: Attempt | None) -> bool:
    if nearest is None or nearest.exemption.is_of_formats:
        return True
    return nearest.status in (Status.UNAVAILABLE, Status.NO_MATCH)


def missed_text(missed: Iterable[tuple[str, object]], although: str) -> str:
    """Return the message of a `FusionError`: these ops run unfused ``although`` ..."""
    lines = "".join(f"\n  {label}: {miss}" for label, miss in missed)
    return f"strict: these ops run unfused although {although} for them:{lines}"


def format_bytes(count: int) -> str:
    """``1536 -> "1.5 KiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
