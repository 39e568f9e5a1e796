"""A plan as data: what ``explain()`` prints, what the log lines are made from, what tests assert on."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from fusedmoe.kernels.options import DEFAULT, KernelOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusedmoe.fusion.rule import Direction


class Status(str, Enum):
    """What became of a rule at a position of the chain."""

    FUSED = "FUSED"
    """It runs there."""
    SHADOWED = "SHADOWED"
    """It could, and something cheaper does."""
    UNAVAILABLE = "UNAVAILABLE"
    """It stands there, but a package, a device or a switch is missing."""
    CONSTRAINT = "CONSTRAINT"
    """It stands there, and declines what it found."""
    NO_MATCH = "NO_MATCH"
    """Its pattern does not stand there."""


@dataclass(frozen=True)
class Attempt:
    """One rule at one position, and how it ended.

    Where a rule has optional slots, it may stand at a position in several ways, over fewer ops and over more. Of those
    there is the one that ended best (of these the longest), and each longer one, which is about its further ops alone:
    why the rule does not take them too.

    Attributes
    ----------
    rule : str
        Its name.
    direction : str
        ``"forward"`` or ``"backward"``.
    start, end : int
        The positions that it covers; of a NO_MATCH, those up to the one that did not fit, inclusive.
    matched : int
        Slots bound.
    about : range
        The positions of the ops that it says something of, see `stands_on`.
    status : Status
        How it ended.
    reason : str
        The rule that shadows it, what is missing, the constraint, or slot, expected and got.
    on_this_device : bool
        Whether the rule could run on this machine at all.
    excused : bool
        Of a CONSTRAINT: nothing is missed. An operand is quantized, which the rule has no kernel for on any device; or
        the rule could take fewer ops, and takes no more since it cannot keep what lies between for the backward pass.
    """

    rule: str
    direction: Direction
    start: int
    end: int
    matched: int
    about: range
    status: Status
    reason: str = ""
    on_this_device: bool = True
    excused: bool = False

    @property
    def missed(self) -> bool:
        """Whether this device has a kernel for the ops that it is about, in this place, and it does not run: what
        ``fm.strict()`` raises for.
        """
        stood = self.matched > 0 and len(self.about) > 0 and self.status in (Status.CONSTRAINT, Status.NO_MATCH)
        return stood and self.on_this_device and not self.excused

    def stands_on(self, position: int) -> bool:
        """Whether the rule has something for the op there: a slot was bound to it, or would have been but that the op
        is of a subclass.

        The op at which a pattern ended is none of the rule's: a `Combine` after a layer misses no activation. Nor are
        those that optional slots were bound to right before it: a rule for a scale between an activation and a layer
        has none for a scale between a `Dispatch` and a layer.
        """
        return position in self.about

    def __str__(self) -> str:
        return (
            f"{self.rule}: {self.status.value}: {self.reason}" if self.reason else f"{self.rule}: {self.status.value}"
        )


@dataclass(frozen=True)
class PlannedStep:
    """One step of a plan.

    Attributes
    ----------
    direction : str
        ``"forward"`` or ``"backward"``.
    ops : tuple of str
        The ops covered, as ``label.Class``.
    rule : str or None
        The rule that fuses them; None for plain PyTorch.
    needs, gives : tuple of str
        Values read and written, by the chain's names.
    bytes_moved : int
        Bytes of `needs` and `gives` for the shapes explained, and what the rule says it moves besides. Eager PyTorch
        moves more.
    launches : int
        Kernels launched, about.
    host_sync : bool
        It reads a tensor on the host.
    nearest_miss : Attempt or None
        Of an unfused step: the rule that came nearest to taking it.
    path : str
        Of an unfused product of quantized operands: ``"native"`` where torch multiplies their codes, ``"emulated"``
        where it multiplies what they stand for.
    quantizes : tuple of (str, str)
        What it quantizes, as ``label:role`` of the op that does so (``input``, ``weight``, ``grad``), and to what: the
        quantizer in words.
    """

    direction: Direction
    ops: tuple[str, ...]
    rule: str | None
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    bytes_moved: int
    launches: int
    host_sync: bool = False
    nearest_miss: Attempt | None = None
    path: str = ""
    quantizes: tuple[tuple[str, str], ...] = ()

    @property
    def status(self) -> str:
        """``FUSED`` or ``unfused``, with the `path` of a product of quantized operands."""
        return Status.FUSED.value if self.rule is not None else f"unfused {self.path}".rstrip()

    @property
    def why(self) -> str:
        """For an unfused step, in words: why no rule takes it."""
        if self.rule is not None:
            return ""
        return str(self.nearest_miss) if self.nearest_miss is not None else "no rule stands on it"


@dataclass(frozen=True)
class PlanData:
    """A plan of one chain: every step, every rule tried, what is kept for backward.

    Attributes
    ----------
    steps : tuple of PlannedStep
        In the order in which they run, forward then backward.
    attempts : tuple of Attempt
        Every rule at every position, see `Attempt`.
    kept : tuple of str
        Values kept for the backward pass, parameters and quantized weights apart.
    kept_bytes : int
        Their bytes, for the shapes explained; what the caller holds anyway (its own arguments) is counted too.
    device, dtype, recipe : str
        What it was planned for.
    options : KernelOptions
        What the `Sequential` asks of kernels.
    forward_source, backward_source : str
        The Python functions that run the steps, as text: ``run0``, ``run1``, ... are the steps, in the order in which
        they are called.
    weight_bytes : int
        Bytes of quantized weights, which are kept until the weights change.
    """

    steps: tuple[PlannedStep, ...]
    attempts: tuple[Attempt, ...]
    kept: tuple[str, ...]
    kept_bytes: int
    device: str
    dtype: str
    recipe: str
    options: KernelOptions = DEFAULT
    forward_source: str = ""
    backward_source: str = ""
    weight_bytes: int = 0

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
        """What is quantized, by what it is quantized to, both in the order of the steps."""
        found: dict[str, tuple[str, ...]] = {}
        for step in self.steps:
            for what, quantizer in step.quantizes:
                found[quantizer] = (*found.get(quantizer, ()), what)
        return found

    def __str__(self) -> str:
        kept = f" ({', '.join(self.kept)})" if self.kept else ""
        lines = [
            ", ".join([f"planned for {self.device}", self.dtype, f"recipe {self.recipe}", *self.options.changed()]),
            *_table(self.steps),
            *_wrapped(f"kept for backward: {format_bytes(self.kept_bytes)}{kept}"),
        ]
        if self.weight_bytes:
            lines.append(f"quantized weights: {format_bytes(self.weight_bytes)}, kept until the weights change")
        if self.formats:
            lines.append("quantized to:")
        for quantizer, what in self.formats.items():
            lines += _wrapped(f"  {quantizer}: {', '.join(what)}")
        reasons: dict[str, list[str]] = {}
        unavailable: dict[str, list[str]] = {}  # what several rules miss alike is said once
        for step in self.unfused:
            miss = step.nearest_miss
            why = step.why
            if miss is not None and miss.status is Status.UNAVAILABLE:
                why = miss.reason
                rules = unavailable.setdefault(why, [])
                rules += [] if miss.rule in rules else [miss.rule]
            reasons.setdefault(why, []).extend(step.ops)
        if reasons:
            lines.append("unfused, because:")
        for why, ops in reasons.items():
            who = "all of them" if len(self.unfused) == len(self.steps) and len(reasons) == 1 else ", ".join(ops)
            rules = unavailable.get(why, [])
            if len(rules) == 1:
                why = f"{rules[0]}: {Status.UNAVAILABLE.value}: {why}"
            elif rules:
                why = f"{Status.UNAVAILABLE.value}: {why} ({', '.join(sorted(rules))})"
            lines += _wrapped(f"  {who}: {why}")
        return "\n".join(lines)


def _table(steps: Sequence[PlannedStep]) -> list[str]:
    rows = [("step", "ops", "direction", "rule", "status", "moves")]
    for i, step in enumerate(steps, 1):
        status = step.status + (" HOST SYNC" if step.host_sync else "")
        moves = format_bytes(step.bytes_moved)
        rows.append((str(i), " + ".join(step.ops), step.direction, step.rule or "-", status, moves))
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * w for w in widths), *lines[1:]]


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Explanation:
    """What a `Sequential` will do with a call: a plan for each chain, and the modules between them.

    ``str()`` of it is the table.

    Attributes
    ----------
    parts : tuple of (str, PlanData or None)
        In order: the title of each part, and its plan; None for a module that is not an op.
    """

    parts: tuple[tuple[str, PlanData | None], ...]

    @property
    def plans(self) -> tuple[PlanData, ...]:
        """The plans of the chains, in order."""
        return tuple(plan for _, plan in self.parts if plan is not None)

    @property
    def steps(self) -> tuple[PlannedStep, ...]:
        """The steps of all chains, in order."""
        return tuple(step for plan in self.plans for step in plan.steps)

    def __str__(self) -> str:
        return "\n\n".join(title if plan is None else f"{title}\n{plan}" for title, plan in self.parts)


def format_bytes(count: int) -> str:
    """``1536 -> "1.5 KiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
