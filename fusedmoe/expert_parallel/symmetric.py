"""The engine ``"symmetric"``: kernels that read and write each other's memory, inside one NVLink domain.

Each rank has a region in torch's symmetric memory, which all ranks can address. Exchanges have numbers, and the ranks
tell each other in words of their regions how far they are (kernels/exchange/control.py). No host takes part, there is
no barrier and no second stream: all work is on the stream of the layer, and a CUDA graph can capture it.

- A gather: `Send` copies this rank's rows to its region, and `Pull` reads the rows of the others, on a few SMs. A
  product that the stream gets next may begin beside `Pull`, and follow the rows (`Pending.follow`).
- A return: `Push` stores this rank's sums for others in their regions, and `Total` adds those that it gets. A rule
  launches both; see `Symmetric.begin_return`.

What these kernels do not take, such as rows in fp32, is copied by torch, with the same words and at the same places in
the regions (`Signal`). So ranks need not agree on the kernels.

CUDA graphs have a region of their own, since a replay and an eager call may be on different streams.

Axes as in engine.py.
"""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist

from fusedmoe.base.errors import InputError
from fusedmoe.base.lasting import current_stream, external_stream
from fusedmoe.expert_parallel.engine import Engine, Pending, Wanted, nothing
from fusedmoe.expert_parallel.torch_symmetric import SymmetricBuffer, why_not
from fusedmoe.kernels.exchange import functions
from fusedmoe.kernels.exchange.layout import BEGIN, CONTROL_BYTES, CONTROL_WORDS, END, REPORT, TELL

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Of `Pull`, an even number. With 224 KiB under way per SM, 16 have 3.5 MiB under way, and NVLink delivers less than
# 1 MiB in the 2 us of a read.
PULL_SMS = 16


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
    compares_experts: ClassVar[bool] = False  # its ranks meet in no collective of the group
    by_kernels: ClassVar[bool] = True
    sms: ClassVar[int] = 0  # a product begins beside the kernel of an exchange, which has its SMs already

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        if reason := why_not(group):
            raise InputError(
                f"ExpertParallel: engine: expected one that this machine can run, got 'symmetric': {reason}"
            )
        self._channels: list[Channel] = []  # of eager calls, and of CUDA graphs
        self._in_graphs: list[Channel] = []  # those that a graph may have recorded, of any size
        self._stream: int | None = None  # the stream of the last eager exchange
        self._bound: dict[tuple[Any, ...], Callable[..., Any]] = {}  # functions that launch kernels
        self._report: Tensor | None = None  # two words of the host's memory, see `REPORT`

    # ---- gather

    def start_gather_of_tokens(
        self, tokens: Sequence[Tensor], index: Tensor, weight: Tensor, rows: int, experts: int
    ) -> Pending:
        chosen, last = index.shape[1], tokens[-1]
        if not rows or len(tokens) > 1 or functions.why_not(last, self.ranks, chosen, weight.dtype):
            return super().start_gather_of_tokens(tokens, index, weight, rows, experts)
        if index.dtype not in (torch.int32, torch.int64):
            index = index.to(torch.int32)
        places, nbytes = self._gathered_places([(chosen,), (chosen,), last.shape[1:]], rows, [4, weight.itemsize, 2])
        index, weight = index.contiguous(), weight.contiguous()
        key = "send", last.dtype, last.shape[1], index.dtype, weight.dtype, chosen, rows, experts
        send = self._bound.get(key)
        if send is None:
            send = self._bound[key] = functions.bind_send(last, index, weight, self.ranks, rows, experts)
        with self._exchange(nbytes, last.device) as channel:
            gathered, ids, weights = send(channel.region, last, index, weight)
        assert ids is not None
        assert weights is not None
        return _Pulled(self, channel, [ids, weights, gathered], Wanted(ids, experts), places[-1])

    def start_gather(self, tensors: Sequence[Tensor], rows: int, wanted: Wanted | None = None) -> Pending:
        shapes = [t.shape[1:] for t in tensors]
        places, nbytes = self._gathered_places(shapes, rows, [t.itemsize for t in tensors])
        results = [t.new_empty(self.ranks * rows, *shape) for t, shape in zip(tensors, shapes, strict=True)]
        if not sum(t.nbytes for t in results):
            return Pending(results, [nothing] * len(results))
        last = tensors[-1]
        kernels = len(tensors) == 1 and wanted is not None
        if wanted is not None and kernels and not functions.why_not(last, self.ranks, wanted.ids.shape[1]):
            key = "send", last.dtype, last.shape[1], rows
            send = self._bound.get(key)
            if send is None:
                send = self._bound[key] = functions.bind_send(last, None, None, self.ranks, rows, 0)
            with self._exchange(nbytes, last.device) as channel:
                gathered, *_ = send(channel.region, last)
            return _Pulled(self, channel, [gathered], wanted, places[-1])
        with self._exchange(nbytes, last.device) as channel:
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
        return Pending(results, [nothing] * len(results))

    def _gathered_places(
        self, shapes: Sequence[Sequence[int]], rows: int, itemsizes: Sequence[int]
    ) -> tuple[list[int], int]:
        """Return the first byte of each tensor of a gather in a region, and the bytes of all."""
        return functions.places([rows * math.prod(s) * n for s, n in zip(shapes, itemsizes, strict=True)])

    # ---- return

    def start_exchange(self, tensors: Sequence[Tensor]) -> Pending:
        places, nbytes = functions.places([t.nbytes for t in tensors])
        shapes = [(self.ranks, len(t) // self.ranks, *t.shape[1:]) for t in tensors]
        results = [t.new_empty(shape) for t, shape in zip(tensors, shapes, strict=True)]
        if not sum(t.nbytes for t in results):
            return Pending(results, [nothing] * len(results))
        with self._exchange(nbytes, tensors[0].device) as channel:
            self._signal(channel, BEGIN)
            for t, shape, place in zip(tensors, shapes, places, strict=True):
                for rank in (*self._others(), self.rank):
                    channel.buffer.of_rank(rank, place, shape, t.dtype)[self.rank].copy_(t.view(shape)[rank])
            self._signal(channel, TELL)
            for result, shape, place in zip(results, shapes, places, strict=True):
                result.copy_(channel.buffer.of_rank(self.rank, place, shape, result.dtype))
            self._signal(channel, END)
        return Pending(results, [nothing] * len(results))

    def begin_return(self, nbytes: int, device: torch.device) -> Channel:
        with self._exchange(nbytes, device) as channel:
            return channel

    # ---- channels

    def buffer_bytes(self) -> int:
        return sum(channel.nbytes for channel in {id(c): c for c in (*self._channels, *self._in_graphs)}.values())

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next one: at a time, every rank uses another one's memory."""
        return [(self.rank + i) % self.ranks for i in range(1, self.ranks)]

    def _signal(self, channel: Channel, phase: int) -> None:
        signal = self._bound.get(("signal",))
        if signal is None:
            signal = self._bound["signal",] = functions.bind_signal(channel.region)
        signal(channel.region, phase)

    @contextmanager
    def _exchange(self, nbytes: int, device: torch.device) -> Iterator[Channel]:
        """Give the channel of an exchange now, of the same number of bytes on every rank, and explain errors."""
        try:
            yield self._channel(nbytes, device)
        except RuntimeError as error:
            if "CUDA error" not in str(error):
                raise
            told = _told(self._report, self.timeout_s)
            raise RuntimeError(
                f"ExpertParallel: rank {self.rank} of {self.ranks}: the GPU failed"
                + (f": {told}" if told else f", as if another rank does not come within {self.timeout_s:g} s")
            ) from error

    def _channel(self, nbytes: int, device: torch.device) -> Channel:
        capturing = torch.cuda.is_current_stream_capturing()
        if not self._channels or self._channels[0].nbytes < nbytes:
            if capturing:
                size = self._channels[0].nbytes if self._channels else 0
                raise InputError(
                    "ExpertParallel: engine 'symmetric': expected a call of this size before the capture of a CUDA "
                    f"graph, where no memory of {nbytes} bytes can be shared, got {size} bytes"
                )
            self._grow(nbytes, device)
        channel = self._channels[capturing]
        if capturing:
            if channel not in self._in_graphs:
                self._in_graphs.append(channel)
        elif (stream := current_stream(device)) != self._stream:
            if self._stream is not None:  # exchanges follow each other, whatever stream a layer runs on
                torch.cuda.current_stream(device).wait_stream(external_stream(device, self._stream))
            self._stream = stream
        return channel

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
            self._report = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
            atexit.register(_tell_at_exit, self._report, self.rank, self.timeout_s)
        with torch.inference_mode(False):
            control = buffer.of_rank(self.rank, 0, (CONTROL_WORDS,), torch.int32)
            control[REPORT:].view(torch.int64).fill_(self._report.data_ptr())
            addresses = [buffer.of_rank(r, 0, (CONTROL_BYTES,), torch.uint8).data_ptr() for r in range(self.ranks)]
            peers = torch.tensor(addresses, device=device)
        return Channel(buffer, functions.Region(peers, control, self.rank, int(self.timeout_s * 1e9)))


def _told(report: Tensor | None, timeout_s: float) -> str:
    """Return what a kernel that has waited too long has reported; an empty string if none has."""
    if report is None or not (late := int(report[0])):
        return ""
    return f"rank {late - 1} did not come to exchange {int(report[1])} within {timeout_s:g} s"


def _tell_at_exit(report: Tensor, rank: int, timeout_s: float) -> None:
    """Write the report to stderr: the error of CUDA does not name the rank."""
    if told := _told(report, timeout_s):
        sys.stderr.write(f"ExpertParallel: rank {rank}: {told}\n")


class _Pulled(Pending):
    """A gather that `Send` has begun, and `Pull` ends. Only the last result may be incomplete.

    - ``engine``, ``channel``: of the exchange.
    - ``at_rows``: the first byte of the last tensor in a region.
    """

    def __init__(
        self, engine: Symmetric, channel: Channel, results: list[Tensor], wanted: Wanted, at_rows: int
    ) -> None:
        super().__init__(results, [*[nothing] * (len(results) - 1), self._pull])
        self._region, self._wanted = channel.region, wanted
        self._words: Tensor | None = None
        self.arrivals = functions.arrivals(PULL_SMS)
        rows, ids = results[-1], wanted.ids
        key = "pull", rows.dtype, rows.shape, ids.shape[1], wanted.experts, at_rows
        pull = engine._bound.get(key)
        if pull is None:
            pull = engine._bound[key] = functions.bind_pull(rows, ids, wanted.experts, at_rows, PULL_SMS)
        self._bound_pull = pull

    def _pull(self) -> None:
        self._bound_pull(self._region, self._results[-1], self._wanted.ids, self._words)

    def follow(self, words: Tensor) -> None:
        self._words = words
        self.wait(len(self._results) - 1)
