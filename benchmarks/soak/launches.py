"""Records the launches of a call, and repeats each one on the memory that it had.

A launch is repeated with the same arguments. Before each repeat, the memory that it writes gets its old content back:
new tensors are poison, a sum gets the old addend. After it, that memory must have the bits of the first launch. The
device compares and counts; the host waits once per batch of repeats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedmoe.commands.verify.machine import ALL_BITS, poisoned_memory
from fusedmoe.kernels.build.compiler import Function
from fusedmoe.kernels.build.kernel import Kernel

BATCH = 50
"""Repeats per batch: far less than a second."""
FLUSH_BYTES = 64 << 20
"""More than the L2."""
BEFORE_BESIDE = "sm90_sum_on_few_sms", "sm90_ragged_m_ranges_signals"
"""The symbol of the launch that a kernel with ``beside`` follows begins with one of these."""


@dataclass
class _Memory:
    """The memory of an argument, as integers: now, before the launch (None if it was poison), and after it (None if the
    launch does not change it).
    """

    name: str
    now: Tensor
    before: Tensor | None
    after: Tensor | None = None

    def restore(self) -> None:
        """Write the content before the launch."""
        if self.before is None:
            self.now.fill_(_poison(self.now))
        else:
            self.now.copy_(self.before)

    def differs(self) -> Tensor:
        """Return the number of words that are not those after the launch."""
        if self.after is not None:
            return (self.now != self.after).sum()
        return (self.now != (_poison(self.now) if self.before is None else self.before)).sum()


def _words(t: Tensor) -> Tensor:
    """Return the whole memory that a tensor is part of, as integers."""
    storage = t.untyped_storage()
    as_bytes = torch.empty(0, dtype=torch.uint8, device=t.device)
    as_bytes.set_(storage)
    return as_bytes.view(next(d for d in (torch.int64, torch.int32, torch.uint8) if not storage.nbytes() % d.itemsize))


def _poison(words: Tensor) -> int:
    return ALL_BITS if words.dtype is torch.uint8 else -1


class Launches:
    """One launch, or two of which the second runs beside the first, and their memory; the symbol is the last one's."""

    def __init__(self, kernel: Kernel, function: Function, arguments: tuple[Any, ...]) -> None:
        self.symbol = kernel.symbol
        self._calls = [(function, arguments)]
        self._memory: dict[int, _Memory] = {}
        for number, t in enumerate(arguments):
            if not isinstance(t, Tensor) or not t.untyped_storage().nbytes():
                continue
            name = f"argument {number}, {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
            words = _words(t)
            if words.data_ptr() not in self._memory:
                poison = bool((words == _poison(words)).all())
                self._memory[words.data_ptr()] = _Memory(name, words, None if poison else words.clone())

    def first(self) -> None:
        """Launch for the first time, and remember the results."""
        self.launch()
        for memory in self._memory.values():
            if bool(memory.differs()):
                memory.after = memory.now.clone()

    def after(self, first: Launches) -> Launches:
        """Return the pair of a launch and this one, which runs beside it."""
        self._calls = [*first._calls, *self._calls]
        merged = dict(first._memory)
        for place, memory in self._memory.items():
            if place in merged:
                memory.before = merged[place].before
                memory.after = merged[place].after if memory.after is None else memory.after
            merged[place] = memory
        self._memory = merged
        return self

    def launch(self) -> None:
        """Launch on the memory as it is."""
        for function, arguments in self._calls:
            function(*arguments)

    def reset(self) -> None:
        """Give all memory its content before the launch: later launches have changed it."""
        for memory in self._memory.values():
            memory.restore()

    def again(self, differing: Tensor) -> None:
        """Launch on the content before the first launch, and add the number of words that differ from it."""
        written = [memory for memory in self._memory.values() if memory.after is not None]
        for memory in written:
            memory.restore()
        self.launch()
        for memory in written:
            differing.add_(memory.differs())

    def changed(self) -> list[str]:
        """Return the arguments that the launch must not change, and that have changed: such as a tile counter."""
        read = [memory for memory in self._memory.values() if memory.after is None]
        found = [memory.name for memory in read if bool(memory.differs())]
        for memory in read:
            memory.restore()
        return found


class RefusedError(Exception):
    """A launch of a kernel that hangs or ends the process, which is not launched again."""


class Recorder:
    """Records launches while `recording` is active, of the symbols that it ``wants``.

    ``begins`` is called with the symbol of a launch before it, and with an empty text after it has ended. Launches of
    ``refused`` symbols raise `RefusedError`.
    """

    def __init__(
        self, wants: Callable[[str], bool], begins: Callable[[str], None], refused: Collection[str] = ()
    ) -> None:
        self._wants, self._begins, self._refused = wants, begins, refused
        self._found: list[Launches] | None = None
        self._last: Launches | None = None
        self.seen: set[str] = set()

    def wrap(self, kernel: Kernel, function: Function) -> Function:
        """Return the function that a process calls in place of a kernel's, see `compiler.wrapped`."""

        def launch(*arguments: Any) -> None:
            if self._found is None:
                function(*arguments)
            else:
                self._record(kernel, function, arguments)

        return launch

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Launches]]:
        """Record the launches inside the block, in poisoned memory, into a list."""
        self._found, self._last, self.seen = [], None, set()
        try:
            with poisoned_memory():
                yield self._found
        finally:
            self._found = self._last = None

    def _record(self, kernel: Kernel, function: Function, arguments: tuple[Any, ...]) -> None:
        assert self._found is not None
        symbol = kernel.symbol
        if symbol in self._refused:
            raise RefusedError(symbol)
        self.seen.add(symbol)
        self._begins(symbol)
        last, self._last = self._last, None
        wanted = self._wants(symbol)
        if wanted or symbol.startswith(BEFORE_BESIDE):
            self._last = launches = Launches(kernel, function, arguments)
            launches.first()
            if wanted:
                beside = last is not None and getattr(kernel, "beside", False)
                self._found.append(launches.after(last) if beside else launches)
        else:
            function(*arguments)
        _wait()
        self._begins("")


class OtherWork:
    """Copies and products on a stream of its own, and writes that flush the L2 of a GPU."""

    WIDTH = 2048

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        shape = 3, self.WIDTH, self.WIDTH
        self._a, self._b, self._c = torch.randn(*shape, dtype=torch.float32, device=device).bfloat16()
        self._from, self._to = torch.zeros(2, FLUSH_BYTES, dtype=torch.uint8, device=device)

    def on_another_stream(self) -> None:
        """Enqueue a product and a copy beside the work of the current stream."""
        with torch.cuda.stream(self._stream):
            torch.mm(self._a, self._b, out=self._c)
            self._to.copy_(self._from)

    def flush(self) -> None:
        """Replace the content of the L2, on the current stream."""
        self._to.zero_()


@dataclass
class Repeated:
    """The repeats of a launch: all, those beside the work of another stream, and those with other bits."""

    calls: int = 0
    beside_load: int = 0
    differing: int = 0
    problems: tuple[str, ...] = ()


def repeat(
    launches: Launches, calls: int, other: OtherWork | None, device: torch.device, begins: Callable[[], None]
) -> Repeated:
    """Repeat launches in at least two batches: back to back, and beside the load of another stream, in turns.

    ``calls`` is at least two. ``begins`` is called before each batch.
    """
    found = Repeated()
    batches = max(-(-calls // BATCH), 2)
    _wait()  # for the call that was recorded: the load's stream has not waited for it
    launches.reset()
    for number in range(batches):
        size = calls // batches + (number < calls % batches)
        loaded = other is not None and number % 2 == 1
        begins()
        words = torch.zeros(size, dtype=torch.int64, device=device)
        for i in range(size):
            if loaded:
                other.on_another_stream()
            elif other is not None and i % 3 == 0:
                other.flush()
            launches.again(words[i])
        _wait()
        _note(found, launches, words.tolist(), loaded)
    return found


def _note(found: Repeated, launches: Launches, words: list[int], loaded: bool) -> None:
    """Add the outcome of a batch."""
    wrong = [(found.calls + i, count) for i, count in enumerate(words) if count]
    problems = [f"call {i + 1}: {count} words differ from the first call's" for i, count in wrong[:1]]
    problems += [f"calls {found.calls + 1} to {found.calls + len(words)} changed {name}" for name in launches.changed()]
    found.calls += len(words)
    found.beside_load += len(words) * loaded
    found.differing += len(wrong)
    found.problems = (*found.problems, *problems)[:3]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
