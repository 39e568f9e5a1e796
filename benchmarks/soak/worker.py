"""The process that soaks: it runs each layer, records its launches and repeats them. It reports before every step that
may not end, so that the process that waits for it knows the kernel.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from benchmarks.soak.direct import Direct, MadeDirect
from benchmarks.soak.launches import OtherWork, Recorder, RefusedError, repeat
from benchmarks.soak.layers import DISTRIBUTIONS, Layer, MadeLayer
from benchmarks.soak.results import wrong_results
from fusedmoe.kernels.build import compiler
from fusedmoe.kernels.options import Schedule
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.tiles.choice import Problem, candidates
from fusedmoe.kernels.sm90.tiles.config import TileConfig

T = TypeVar("T")
Subject: TypeAlias = "Layer | Direct"
SCHEDULES: tuple[Schedule, ...] = ("dynamic", "static")


class Item(NamedTuple):
    """A kernel, and the rows per expert and the schedule that it is repeated with."""

    symbol: str
    distribution: str
    schedule: str


class Begins(NamedTuple):
    """A step that ends, or is followed by another message, within a limit."""

    symbol: str  # of the kernel; empty if the step is not a launch
    where: str
    limit_s: float


class Repeats(NamedTuple):
    """Repeats of an item have ended."""

    item: Item
    calls: int
    beside_load: int
    differing: int
    seconds: float


class Wrong(NamedTuple):
    """A problem of a kernel, or of a whole call if the symbol is empty."""

    symbol: str
    where: str
    problem: str


class Said(NamedTuple):
    """A line for the user."""

    text: str


Message: TypeAlias = "Begins | Repeats | Wrong | Said | None"
"""None is the last message."""


@dataclass(frozen=True)
class Request:
    """The task of the process."""

    device: str
    subjects: tuple[Subject, ...]
    calls: Mapping[str, int]  # the repeats of an item by symbol; launches of other kernels are not repeated
    done: frozenset[Item] = frozenset()
    refused: frozenset[str] = frozenset()  # the symbols, and the names of calls, that die or do not end
    limit_s: float = 10.0  # for a batch of repeats or a first launch
    setup_s: float = 180.0  # for everything else, such as compiling a kernel


def work(request: Request, connection: Connection) -> None:
    """Soak in this process, and send every `Message` through the connection."""
    warnings.simplefilter("ignore")
    logging.getLogger("fusedmoe.fusion").setLevel(logging.ERROR)
    device = torch.device(request.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    soak_here(request, connection.send)


def soak_here(request: Request, send: Callable[[Message], None]) -> None:
    """Soak in this process; SystemExit if the GPU is in an error state."""
    worker = _Worker(request, send)
    with compiler.wrapped(worker.recorder.wrap):
        for number, subject in enumerate(request.subjects, 1):
            begin, before = time.perf_counter(), worker.counts.total()
            worker.soak(subject)
            calls, seconds = worker.counts.total() - before, time.perf_counter() - begin
            if calls:
                send(Said(f"{number}/{len(request.subjects)} {subject.name}: {calls:,} calls, {seconds:.1f} s"))
    send(None)


@functools.cache
def _nth(number: int) -> Callable[[Problem], TileConfig]:
    """Return a function that chooses this candidate: always the same one, because it is part of a launch's key."""

    def choose(problem: Problem) -> TileConfig:
        found = candidates(problem)
        return found[number % len(found)]

    return choose


@contextlib.contextmanager
def nth_candidate(number: int) -> Iterator[None]:
    """Run every product with the candidate tiles of this number."""
    names = vars(products)
    before, names["choose"] = names["choose"], _nth(number)
    try:
        yield
    finally:
        names["choose"] = before


class _Worker:
    def __init__(self, request: Request, send: Callable[[Message], None]) -> None:
        self.request, self.send = request, send
        self.device = torch.device(request.device)
        self.recorder = Recorder(self._is_left, self._begins, request.refused)
        self.other = OtherWork(self.device) if self.device.type == "cuda" else None
        self.done = set(request.done)
        self.counts: Counter[str] = Counter()
        self.case, self.where, self.symbol = ("", ""), "", ""

    def soak(self, subject: Subject) -> None:
        """Soak all launches of a layer or function that are not done."""
        self.where = subject.name
        if self.where in self.request.refused:
            return
        self._begins()
        made = self._attempt(lambda: subject.make(self.device))
        if made is None:
            return
        seen: dict[int, set[str]] = {}  # by tiles: the plans are the same for all rows per expert
        for distribution in DISTRIBUTIONS:
            for schedule in SCHEDULES:
                self.case = distribution, schedule
                for tiles in range(subject.tiles):
                    if tiles in seen and not any(map(self._is_left, seen[tiles])):
                        continue
                    self.where = f"{subject.name}, {distribution}, {schedule}, tiles {tiles}"
                    if self.where in self.request.refused:
                        continue
                    self._begins()
                    with nth_candidate(tiles):
                        launched = self._attempt(lambda: self._record_and_repeat(made))
                    if launched is not None:
                        seen.setdefault(tiles, launched)

    def _record_and_repeat(self, made: MadeLayer | MadeDirect) -> set[str]:
        """Return the symbols of all launches of a call."""
        call = made.call(*self.case)
        with self.recorder.recording() as found:
            try:
                got = made.results(call)
            except RefusedError:  # the launches before it are repeated
                got = None
        if got is not None and found and isinstance(made, MadeLayer):
            for problem in wrong_results(call, got, made.expected(call)):
                self.send(Wrong("", self.where, problem))
        del got
        occurrences = Counter(launches.symbol for launches in found)
        self.done |= {Item(symbol, *self.case) for symbol in occurrences}
        while found:
            launches = found.pop(0)
            symbol, begin = launches.symbol, time.perf_counter()
            calls = max(-(-self.request.calls[symbol] // occurrences[symbol]), 2)
            repeated = repeat(launches, calls, self.other, self.device, functools.partial(self._begins, symbol))
            for problem in repeated.problems:
                self.send(Wrong(symbol, self.where, problem))
            counted = repeated.calls, repeated.beside_load, repeated.differing
            self.send(Repeats(Item(symbol, *self.case), *counted, time.perf_counter() - begin))
            self.counts[symbol] += repeated.calls
            self._begins()
        return set(self.recorder.seen)

    def _attempt(self, function: Callable[[], T]) -> T | None:
        """Return the result; report an error. An error of the GPU ends the process."""
        try:
            return function()
        except Exception as error:  # noqa: BLE001  reported, and the other calls run
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.send(Wrong(self.symbol, self.where, problem))
            if self.device.type == "cuda":
                try:
                    torch.cuda.synchronize(self.device)
                except RuntimeError as broken:
                    raise SystemExit(1) from broken
            return None

    def _is_left(self, symbol: str) -> bool:
        wanted = symbol in self.request.calls and symbol not in self.request.refused
        return wanted and Item(symbol, *self.case) not in self.done

    def _begins(self, symbol: str = "") -> None:
        self.symbol = symbol
        limit = self.request.limit_s if symbol else self.request.setup_s
        self.send(Begins(symbol, self.where, limit))
