"""The engine ``"symmetric"``: kernels that read and write each other's memory, inside one NVLink domain.

Each rank has a region in torch's symmetric memory, which all ranks can address. Exchanges have numbers, and the ranks
tell each other in words of their regions how far they are (kernels/exchange/control.py). No host takes part, there is
no barrier and no second stream: all work is on the stream of the layer, and a CUDA graph can capture it.

- A gather: `Send` copies this rank's rows to its region, and `Pull` reads the rows of the others, on a few SMs. A
  product that the stream gets next may begin beside `Pull`, and follow the rows (`Pending.follow`).
- A return: `Push` stores this rank's sums for others in their regions, and `Total` adds those that it gets. A rule
  launches both, on the region of `Symmetric.channel`.

What these kernels do not take, such as rows in fp32, is copied by torch, with the same words and at the same places in
the regions (`Signal`). So ranks need not agree on the kernels. FP8 codes and their scales travel in one row, by kernels
and by torch (`functions.pack`).

CUDA graphs have a region of their own. Exchanges follow each other, whatever streams they are on: an eager call, and a
call inside a capture, wait for the one before. The caller orders replays of graphs.

Axes as in engine.py.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from fusedmoe.base.errors import InputError
from fusedmoe.base.lasting import current_stream, external_stream, row_of_first_slot
from fusedmoe.expert_parallel.engine import Engine, Pending, Wanted, nothing
from fusedmoe.expert_parallel.torch_symmetric import SymmetricBuffer, why_not
from fusedmoe.kernels.exchange import functions
from fusedmoe.kernels.exchange.layout import (
    BEGIN,
    CONTROL_BYTES,
    CONTROL_WORDS,
    COPY_WARPS,
    END,
    MOST_RANKS,
    MOST_SLOTS,
    MOST_TIMEOUT_S,
    REPORT,
    TELL,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")

# Of `Pull`, an even number. On four H100s, 8 SMs read 292 GB/s from three ranks in turn, 12 and 16 read 297 GB/s.
PULL_SMS = 12
MOST_KINDS = 1024  # of exchanges, of which an engine keeps the kernels


def why_not_here() -> str | None:
    """Return the reason why this rank cannot run the engine by kernels on its current CUDA device; None if it can."""
    return why_not() or functions.why_not_on(torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True, eq=False)
class Channel:
    """The regions of exchanges that follow each other."""

    buffer: SymmetricBuffer
    region: functions.Region

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes


class Symmetric(Engine):
    """Exchanges by reads and writes of the memory of other ranks.

    - ``group``: the ranks, all in one NVLink domain, each with its own GPU.
    - ``timeout_s``: seconds that a rank waits for the others in one exchange.
    """

    name: ClassVar[str] = "symmetric"
    by_kernels: ClassVar[bool] = True
    most_ranks: ClassVar[int] = MOST_RANKS
    sms: ClassVar[int] = 0  # a product begins beside the kernel of an exchange, which has its SMs already

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        if reason := why_not_here():
            raise InputError(
                f"ExpertParallel: engine: expected one that this machine can run, got 'symmetric': {reason}"
            )
        if timeout_s > MOST_TIMEOUT_S:
            expected = f"at most {MOST_TIMEOUT_S} with engine 'symmetric'"
            raise InputError(f"ExpertParallel: timeout_s: expected {expected}, got {timeout_s:g}")
        self._channels: list[Channel] = []  # of eager calls, and of CUDA graphs
        self._in_graphs: list[Channel] = []  # those that a graph may have recorded, of any size
        self._streams: list[int | None] = [None, None]  # of the last eager exchange, and of the last captured one
        self._unfinished: _Pulled | None = None  # a gather without its `Pull`
        self._returns = False  # whether a return is without its `Total`
        self._captured = False  # whether a CUDA graph was captured when the last exchange began
        self._gathers: dict[tuple[Any, ...], _Gather] = {}
        self._sums: dict[tuple[Any, ...], _Sums] = {}
        self._bound_signal: Callable[[functions.Region, int], None] | None = None
        self._report: Tensor | None = None  # two words of the host's memory, see `REPORT`
        self._late: Any = (0, 0)  # the same

    # ---- gather

    def start_gather_of_tokens(
        self, tokens: Sequence[Tensor], index: Tensor, weight: Tensor, rows: int, experts: int
    ) -> Pending:
        scaled = functions.packs(tokens)
        if len(tokens) > 1 and not scaled:
            return super().start_gather_of_tokens(tokens, index, weight, rows, experts)
        *scale, x = tokens
        shapes = [(t.dtype, t.shape[1:]) for t in tokens]
        key = *shapes, index.dtype, weight.dtype, index.shape[1], rows, experts
        gather = self._gathers.get(key)
        if gather is None:
            gather = _kept(self._gathers, key, _Gather.of_tokens(self, x, index, weight, rows, experts, *scale))
        if gather.send is None or not functions.aligned(x):
            return super().start_gather_of_tokens(tokens, index, weight, rows, experts)
        channel = self.channel(gather.nbytes, x.device)
        if index.dtype not in (torch.int32, torch.int64):
            index = index.to(torch.int32)
        every, ids, weights = gather.send(channel.region, x, index.contiguous(), weight.contiguous(), *scale)
        results = _parts(every, tokens)
        return _Pulled(self, gather, channel, [ids, weights, *results], every, len(results), ids)

    def start_gather(self, tensors: Sequence[Tensor], rows: int, wanted: Wanted | None = None) -> Pending:
        first, pair = tensors[:-2], tensors[-2:]
        scaled = functions.packs(pair)
        last, scale = tensors[-1], [pair[0]] if scaled else []
        if len(tensors) == 1 + len(scale) and wanted is not None:
            key = *[(t.dtype, t.shape[1:]) for t in tensors], rows, wanted.ids.shape[1], wanted.experts
            gather = self._gathers.get(key)
            if gather is None:
                gather = _kept(self._gathers, key, _Gather.of_rows(self, last, rows, wanted, *scale))
            if gather.send is not None and functions.aligned(last):
                channel = self.channel(gather.nbytes, last.device)
                every, *_ = gather.send(channel.region, last, None, None, *scale)
                results = _parts(every, tensors)
                return _Pulled(self, gather, channel, results, every, len(results), wanted.ids)
        if scaled:
            *arrived, packed = self._copied([*first, functions.pack(last, pair[0])], rows)
            results = [*arrived, *_parts(packed, pair)]
        else:
            results = self._copied(tensors, rows)
        return Pending(results, [nothing] * len(results))

    def _copied(self, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Return the rows of all ranks, which torch copies."""
        shapes = [t.shape[1:] for t in tensors]
        places, nbytes = functions.places([rows * t.shape[1:].numel() * t.itemsize for t in tensors])
        results = [t.new_empty(self.ranks * rows, *shape) for t, shape in zip(tensors, shapes, strict=True)]
        if not sum(t.nbytes for t in results):
            return results
        channel = self.channel(nbytes, tensors[0].device)
        self._signal(channel, BEGIN)
        of_ranks = [
            [channel.buffer.of_rank(r, place, (rows, *shape), t.dtype) for r in range(self.ranks)]
            for t, shape, place in zip(tensors, shapes, places, strict=True)
        ]
        for t, there, result in zip(tensors, of_ranks, results, strict=True):
            there[self.rank][: len(t)].copy_(t)
            result[self.rank * rows :][: len(t)].copy_(t)
        self._signal(channel, TELL)
        for there, result in zip(of_ranks, results, strict=True):
            for rank in self._others():
                result[rank * rows : (rank + 1) * rows].copy_(there[rank])
        self._signal(channel, END)
        return results

    # ---- return

    def start_exchange(self, tensors: Sequence[Tensor]) -> Pending:
        places, nbytes = functions.places([t.nbytes for t in tensors])
        shapes = [(self.ranks, len(t) // self.ranks, *t.shape[1:]) for t in tensors]
        results = [t.new_empty(shape) for t, shape in zip(tensors, shapes, strict=True)]
        if not sum(t.nbytes for t in results):
            return Pending(results, [nothing] * len(results))
        channel = self.channel(nbytes, tensors[0].device)
        self._signal(channel, BEGIN)
        for t, shape, place in zip(tensors, shapes, places, strict=True):
            for rank in (*self._others(), self.rank):
                channel.buffer.of_rank(rank, place, shape, t.dtype)[self.rank].copy_(t.view(shape)[rank])
        self._signal(channel, TELL)
        for result, shape, place in zip(results, shapes, places, strict=True):
            result.copy_(channel.buffer.of_rank(self.rank, place, shape, result.dtype))
        self._signal(channel, END)
        return Pending(results, [nothing] * len(results))

    def sums_over_ranks(self, tensors: Sequence[Tensor], tokens: int) -> list[Tensor] | None:
        parts, *more = tensors
        rows = len(parts) // self.ranks
        key = tokens, rows, *[(t.dtype, t.shape[1:]) for t in tensors]
        sums = self._sums.get(key)
        if sums is None:
            sums = _kept(self._sums, key, _Sums.of(self, parts, more, rows, tokens))
        if sums.push is None or sums.total is None or not functions.aligned(parts) or not parts.is_contiguous():
            return None
        values, chosen = (more[0].reshape(-1), more[0].shape[1]) if more else (None, 1)
        slots = row_of_first_slot(len(parts) * chosen, 1, parts.device).view(len(parts), chosen)
        own, own_slots = parts[self.rank * rows :][:rows], row_of_first_slot(rows, chosen, parts.device)
        channel = self.channel(sums.nbytes, parts.device, returns=True)
        sums.push(channel.region, parts, values, slots, 0 if more else 1, self.ranks)
        y, of_values = sums.total(channel.region, own, own_slots)
        self.returned()
        return [y] if of_values is None else [y, of_values]

    # ---- channels

    def buffer_bytes(self) -> int:
        return sum(channel.nbytes for channel in {id(c): c for c in (*self._channels, *self._in_graphs)}.values())

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next one: at a time, every rank uses another one's memory."""
        return [(self.rank + i) % self.ranks for i in range(1, self.ranks)]

    def _signal(self, channel: Channel, phase: int) -> None:
        if self._bound_signal is None:
            self._bound_signal = functions.bind_signal(channel.region)
        self._bound_signal(channel.region, phase)

    def channel(self, nbytes: int, device: torch.device, returns: bool = False) -> Channel:
        who = f"ExpertParallel: rank {self.rank} of {self.ranks}"
        if self._late[0]:
            raise RuntimeError(f"{who}: {_told(self._late, self.timeout_s)}")
        capturing = torch.cuda.is_current_stream_capturing()
        self._require_no_error(who, capturing)
        self._wait_for_last(device, capturing)
        if self._unfinished is not None:
            self._unfinished.wait_all()
        if not self._channels or self._channels[0].nbytes < nbytes:
            if capturing:
                size = self._channels[0].nbytes if self._channels else 0
                raise InputError(
                    "ExpertParallel: engine 'symmetric': expected a call of this size before the capture of a CUDA "
                    f"graph, where no memory of {nbytes} bytes can be shared, got {size} bytes"
                )
            self._grow(nbytes, device)
        channel = self._channels[capturing]
        if capturing and channel not in self._in_graphs:
            self._in_graphs.append(channel)
        self._returns, self._captured = returns, capturing
        return channel

    def _require_no_error(self, who: str, capturing: bool) -> None:
        """Raise if an error has interrupted the last exchange, except if this rank can go on: the missing `Pull` of an
        eager gather can still be launched, and what was captured has not run.
        """
        if not self._returns and self._unfinished is None:
            return
        error = ""
        if self._captured:
            if self._unfinished is not None:
                self._unfinished.drop()
            self._returns, self._unfinished = False, None
            if capturing:
                error = "while a CUDA graph was captured: begin the capture again"
        elif self._returns:
            error = "in which other ranks have got wrong sums: start all ranks again"
        elif capturing:
            error = "which a graph cannot complete: run a layer before the capture of a CUDA graph"
        if error:
            raise RuntimeError(f"{who}: an error has interrupted the exchange before this one, {error}")

    def _wait_for_last(self, device: torch.device, capturing: bool) -> None:
        """Let the current stream wait for the last exchange, if that was on another stream."""
        stream, last = current_stream(device), self._streams[capturing]
        if stream == last:
            return
        if last is not None:
            before = external_stream(device, last)
            if not capturing or _is_capturing(before):  # else the last one was part of another graph
                torch.cuda.current_stream(device).wait_stream(before)
        self._streams[capturing] = stream

    def returned(self) -> None:
        self._returns = False

    def _grow(self, nbytes: int, device: torch.device) -> None:
        """Replace the channels: a collective. Every rank comes here in the same exchange."""
        sizes = [0] * self.ranks
        dist.all_gather_object(sizes, nbytes, self.group)
        if len({*sizes}) > 1:
            raise InputError(
                "ExpertParallel: engine 'symmetric': expected the same max_tokens, experts per token, features and "
                f"dtypes on every rank, got exchanges of {sizes} bytes"
            )
        torch.cuda.synchronize(device)  # this rank has completed the last exchange; the others come here after it, too
        # in powers of two, since the number of tokens may grow in small steps
        size = 1 << (nbytes - 1).bit_length()
        self._channels = [self._made(SymmetricBuffer(size, self.group, device), device) for _ in range(2)]

    def _made(self, buffer: SymmetricBuffer, device: torch.device) -> Channel:
        if self._report is None:
            self._report = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
            self._late = self._report.numpy()
            atexit.register(_tell_at_exit, self._report, self.rank, self.timeout_s)
        with torch.inference_mode(False):
            control = buffer.of_rank(self.rank, 0, (CONTROL_WORDS,), torch.int32)
            control[REPORT:].view(torch.int64).fill_(self._report.data_ptr())
            addresses = [buffer.of_rank(r, 0, (CONTROL_BYTES,), torch.uint8).data_ptr() for r in range(self.ranks)]
            peers = torch.tensor(addresses, device=device)
        return Channel(buffer, functions.Region(peers, control, self.rank, int(self.timeout_s * 1e9)))


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _kept(kernels: dict[tuple[Any, ...], _T], key: tuple[Any, ...], made: _T) -> _T:
    """Keep the kernels of one kind of exchange, and return them. There may be one for each number of tokens."""
    if len(kernels) >= MOST_KINDS:
        kernels.clear()
    kernels[key] = made
    return made


def _told(report: Sequence[int], timeout_s: float) -> str:
    """Return the report of a kernel that has waited too long, in words."""
    return f"rank {int(report[0]) - 1} did not come to exchange {int(report[1])} within {timeout_s:g} s"


def _tell_at_exit(report: Tensor, rank: int, timeout_s: float) -> None:
    """Write the report, if there is one, to stderr: the error of CUDA does not name the rank."""
    if report[0]:
        sys.stderr.write(f"ExpertParallel: rank {rank}: {_told(report.tolist(), timeout_s)}\n")


class _Gather(NamedTuple):
    """The kernels of gathers of one kind; ``send`` is None if they do not take such rows."""

    nbytes: int = 0
    send: Callable[..., Any] | None = None
    pull: Callable[..., Any] | None = None

    @classmethod
    def of_tokens(
        cls, engine: Symmetric, x: Tensor, index: Tensor, weight: Tensor, rows: int, experts: int, *scale: Tensor
    ) -> _Gather:
        chosen = index.shape[1]
        if not _takes(engine, rows) or functions.why_not(_as_copied(x, *scale), engine.ranks, chosen, weight.dtype):
            return cls()
        if index.dtype not in (torch.int32, torch.int64):
            index = index.to(torch.int32)
        sizes = [4 * rows * chosen, weight.itemsize * rows * chosen, rows * _row_bytes(x, *scale)]
        places, nbytes = functions.places(sizes)
        send = functions.bind_send(x, index, weight, engine.ranks, rows, experts, *scale)
        return cls(nbytes, send, functions.bind_pull(x, engine.ranks * rows, chosen, experts, places[-1], PULL_SMS))

    @classmethod
    def of_rows(cls, engine: Symmetric, x: Tensor, rows: int, wanted: Wanted, *scale: Tensor) -> _Gather:
        chosen, experts = wanted.ids.shape[1], wanted.experts
        if not _takes(engine, rows) or functions.why_not(_as_copied(x, *scale), engine.ranks, chosen):
            return cls()
        places, nbytes = functions.places([rows * _row_bytes(x, *scale)])
        send = functions.bind_send(x, None, None, engine.ranks, rows, experts, *scale)
        return cls(nbytes, send, functions.bind_pull(x, engine.ranks * rows, chosen, experts, places[-1], PULL_SMS))


def _takes(engine: Symmetric, rows: int) -> bool:
    """Whether the kernels of a gather take N rows per rank."""
    return rows > 0 and functions.can_list(engine.ranks * rows, engine.ranks, PULL_SMS)


def _as_copied(x: Tensor, *scale: Tensor) -> Tensor:
    """Return rows of the dtype and width that the kernels copy: codes with scales travel in pairs."""
    return x.new_empty(0, x.shape[1] // 2, dtype=torch.bfloat16) if scale else x


def _row_bytes(x: Tensor, *scale: Tensor) -> int:
    return functions.packed_width(x, *scale) if scale else x.itemsize * x.shape[1]


def _parts(every: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gathered rows of each of these tensors: of a matrix of rows, or of packed rows."""
    if len(tensors) == 1:
        return [every]
    scale, codes = tensors
    return [*reversed(functions.unpack(every, codes, scale))]


class _Sums(NamedTuple):
    """The kernels of a return of parts that are sums already: a part is a row with one slot. ``push`` is None if they
    do not take such parts.
    """

    nbytes: int = 0
    push: Callable[..., Any] | None = None
    total: Callable[..., Any] | None = None

    @classmethod
    def of(cls, engine: Symmetric, parts: Tensor, more: Sequence[Tensor], rows: int, tokens: int) -> _Sums:
        values = more[0] if more else None
        chosen = 1 if values is None else values.shape[1]
        dtype = torch.float32 if values is None else values.dtype
        if not rows or len(more) > 1 or chosen > MOST_SLOTS or functions.why_not(parts, engine.ranks, chosen, dtype):
            return cls()
        places, nbytes = functions.places([t.nbytes for t in (parts, *more)])
        slots = parts.new_empty(len(parts), chosen, dtype=torch.int64)
        flat = None if values is None else values.reshape(-1)
        push = functions.bind_push(parts, slots, flat, places[0], places[-1], PULL_SMS)
        of_values = None if values is None else dtype
        total = functions.bind_total(parts, tokens, chosen, of_values, rows, places[0], places[-1])
        return cls(nbytes, push, total)


class _Pulled(Pending):
    """A gather that `Send` has begun, and `Pull` ends.

    - ``rows``: the rows that `Pull` copies. The last ``parts`` results are parts of them, and may be incomplete.
    - ``ids``: see `Wanted`.
    """

    arrivals = PULL_SMS * COPY_WARPS

    def __init__(
        self, engine: Symmetric, gather: _Gather, channel: Channel, results: list[Tensor], rows: Tensor, parts: int,
        ids: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(results, [*[nothing] * (len(results) - parts), *[self._pull] * parts])
        self._engine, engine._unfinished = engine, self
        assert gather.pull is not None
        self._bound_pull, self._region, self._rows, self._ids = gather.pull, channel.region, rows, ids
        self._words: Tensor | None = None
        self._block = 0

    def _pull(self) -> None:
        self._waits = [nothing] * len(self._waits)  # of all parts: each refers to this object, which lives on otherwise
        self._engine._unfinished = None
        self._bound_pull(self._region, self._rows, self._ids, self._words, self._block)

    def drop(self) -> None:
        """Forget an exchange that was captured, and that no graph has."""
        self._waits = [nothing] * len(self._waits)

    def follow(self, words: Tensor, block: int = 0) -> None:
        if self._engine._unfinished is not self:
            raise RuntimeError("ExpertParallel: another exchange has begun before a product followed this one")
        self._words, self._block = words, block
        self.wait(len(self._results) - 1)
