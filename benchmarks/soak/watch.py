"""Soaks in another process, and ends that process if a step exceeds its limit: a launch that hangs is an error."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from benchmarks.soak.layers import DISTRIBUTIONS
from benchmarks.soak.worker import SCHEDULES, Begins, Item, Repeats, Request, Said, Subject, Wrong, work
from fusedmoe.kernels.build.kernel import Kernel

CALLS = 20_000
"""The least number of repeats of a family."""
LIMIT_S = 10.0
"""Seconds for a call: far longer than a batch of repeats takes."""
MOST_PROCESSES = 6
"""After so many processes that hung or died, the rest is not soaked."""
MOST_PROBLEMS = 200

Target = Callable[[Request, Connection], None]


def family_of(kernel: Kernel) -> str:
    """Return the kernels that a kernel is counted with: those of its class with the same operands."""
    operands, blocks = getattr(kernel, "operands", kernel), getattr(kernel, "blocks", None)
    kind = "" if operands is kernel else type(operands).__name__
    words = [type(kernel).__name__, *([kind] if kind not in ("", "Plain") else [])]
    words += [] if blocks is None else [type(blocks).__name__]
    words += [dtype for dtype in ("fp16", "e5m2") if getattr(operands, "dtype", "") == dtype]
    gathers = getattr(kernel, "gather", None) or getattr(kernel, "gathered", None)
    words += ["gathered rows"] if gathers else []
    words += [word for word in ("ranges", "beside") if getattr(kernel, word, False)]
    return ", ".join(words)


@dataclass
class Soaked:
    """The outcome of a soak."""

    families: dict[str, list[str]]  # the symbols by family
    wanted: int  # the least number of repeats of a family
    calls: Counter[str] = field(default_factory=Counter)  # the repeats of each symbol
    beside_load: Counter[str] = field(default_factory=Counter)  # those beside the load of another stream
    differing: Counter[str] = field(default_factory=Counter)  # those with other bits than the first launch
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    items: set[Item] = field(default_factory=set)  # those that were repeated
    wrong: list[Wrong] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)  # the symbols that hung or ended the process

    @property
    def passed(self) -> bool:
        """Whether there is no problem, and every kernel was repeated often enough."""
        return not self.wrong and not self.not_reached()

    def not_reached(self) -> list[str]:
        """Return the kernels and families that were not repeated as wanted, each as a line."""
        cases = [(distribution, schedule) for distribution in DISTRIBUTIONS for schedule in SCHEDULES]
        lines = []
        for family, symbols in self.families.items():
            for symbol in symbols:
                missing = [case for case in cases if Item(symbol, *case) not in self.items]
                if missing:
                    first = "" if len(missing) == len(cases) else f" with {', '.join(missing[0])}"
                    more = f" and {len(missing) - 1} more" if first and len(missing) > 1 else ""
                    lines.append(f"{symbol}: not reached{first}{more}")
            calls = sum(self.calls[symbol] for symbol in symbols)
            if calls < self.wanted:
                lines.append(f"{family}: {calls:,} calls of {self.wanted:,}")
        return lines

    def problems(self) -> list[str]:
        """Return the failures and the kernels that were not reached, each as a line."""
        return [*map(line_of, self.wrong), *(f"FAILED {line}" for line in self.not_reached())]

    def add(self, message: Repeats) -> None:
        """Add the repeats of an item."""
        symbol = message.item.symbol
        self.items.add(message.item)
        self.calls[symbol] += message.calls
        self.beside_load[symbol] += message.beside_load
        self.differing[symbol] += message.differing
        self.seconds[symbol] += message.seconds


def soak(
    kernels: Sequence[Kernel],
    subjects: Iterable[Subject],
    device: str,
    say: Callable[[str], None],
    calls: int = CALLS,
    target: Target = work,
    limit_s: float = LIMIT_S,
) -> Soaked:
    """Soak the kernels that the subjects run, each family at least ``calls`` times, with ``target`` in a process."""
    families: dict[str, list[str]] = {}
    for kernel in kernels:
        families.setdefault(family_of(kernel), []).append(kernel.symbol)
    found = Soaked(families, calls)
    cases = len(DISTRIBUTIONS) * len(SCHEDULES)
    of_item = {s: max(math.ceil(calls / len(symbols) / cases), 2) for symbols in families.values() for s in symbols}
    request = Request(device, tuple(subjects), of_item, limit_s=limit_s)
    for _ in range(MOST_PROCESSES):
        refused = _run(request, target, found, say)
        if refused is None:
            return found
        request = replace(request, done=frozenset(found.items), refused=request.refused | {refused})
    found.wrong.append(Wrong("", "", f"{MOST_PROCESSES} processes hung or died: the rest is not soaked"))
    return found


def _run(request: Request, target: Target, found: Soaked, say: Callable[[str], None]) -> str | None:
    """Run a process; return the symbol or the call that it hung or died in, None if it finished."""
    context = multiprocessing.get_context("spawn")  # CUDA works in no forked process
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(request, sender), daemon=True)
    process.start()
    sender.close()  # so that the end of the process ends the connection
    now = Begins("", "the start of the process", request.setup_s)
    begin = time.monotonic()
    problem = ""
    while not problem:
        try:
            if not receiver.poll(max(now.limit_s - (time.monotonic() - begin), 0)):
                problem = f"a call did not end within {now.limit_s:g} s"
                break
            message = receiver.recv()
        except (EOFError, ConnectionError):
            process.join(10)
            problem = f"the process died (exit status {process.exitcode})"
            break
        if message is None:
            process.join(10)
            break
        if isinstance(message, Begins):
            now, begin = message, time.monotonic()
        elif isinstance(message, Repeats):
            found.add(message)
        elif isinstance(message, Wrong):
            _add(found, message, say)
        elif isinstance(message, Said):
            say(message.text)
    if process.is_alive():
        process.kill()
        process.join(30)
    if not problem:
        return None
    if now.symbol:
        found.ended.add(now.symbol)
    _add(found, Wrong(now.symbol, now.where, problem), say)
    return now.symbol or now.where


def _add(found: Soaked, wrong: Wrong, say: Callable[[str], None]) -> None:
    if len(found.wrong) < MOST_PROBLEMS:
        found.wrong.append(wrong)
        say(line_of(wrong))


def line_of(wrong: Wrong) -> str:
    """Return a problem as a line."""
    where = f" ({wrong.where})" if wrong.where else ""
    return f"FAILED {wrong.symbol or 'a call'}: {wrong.problem}{where}"
