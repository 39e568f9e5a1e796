"""The engine ``"symmetric"``: ranks read each other's memory, inside one NVLink domain, by torch's symmetric memory.

A rank writes its rows into a buffer that all ranks can address, on the stream of the layer: a copy inside a GPU is a
kernel, which would wait for the SMs of a product beside it. After a barrier on the device, each rank reads the rows of
the others, on the engine's stream: all of them by its copy engines, which take no SM, or, where it wants few of them,
only these by a kernel on a few SMs. No host takes part. A CUDA graph can capture an exchange.

A second barrier ends each exchange: when a rank passes it, all ranks have read, and the next exchange may write. A
consumer of the rows does not wait for it. A product may begin before the rows of other ranks are complete: after the
copies, the engine's stream writes a word in memory, for which the product waits. It is launched after the first
barrier: from then on, the rows need no SM and no other rank to arrive, so that the product cannot wait for itself.

CUDA graphs have a buffer of their own, since a replay and the exchanges of the engine's stream do not wait for each
other, and a graph ends after the second barrier.

Axes as in engine.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist

from fusedmoe.base.errors import InputError
from fusedmoe.expert_parallel.engine import Engine, Pending, Wanted, expected_share, nothing
from fusedmoe.expert_parallel.torch_symmetric import SymmetricBuffer, gpu_id, why_not, write_word

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


ALIGNMENT = 256  # bytes: tensors of one exchange begin at multiples
# the largest share of another rank's rows for which a kernel reads them: it reads a tenth slower than the copy engines,
# and takes SMs from the products beside it
FEW = 0.8
# of the kernel, an even number: with 224 KiB under way per SM, it has 3.5 MiB under way, and NVLink delivers less than
# 1 MiB in the 2 us of a read
SMS = 16


class Symmetric(Engine):
    """`start_gather` and `start_exchange` by reads of the memory of other ranks.

    - ``group``: the ranks, all in one NVLink domain, each with its own GPU.
    - ``timeout_s``: seconds that a rank waits for the others in one exchange.
    """

    name: ClassVar[str] = "symmetric"
    compares_experts: ClassVar[bool] = False  # its ranks meet in no collective of the group

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        if reason := why_not(group):
            raise InputError(
                f"ExpertParallel: engine: expected one that this machine can run, got 'symmetric': {reason}"
            )
        self._buffers: list[SymmetricBuffer] = []  # of the engine's stream, and of CUDA graphs
        self._in_graphs: list[SymmetricBuffer] = []  # those that a graph may have recorded, of any size
        self._rooms: tuple[SymmetricBuffer | None, set[int]] = None, set()  # of `room`: a buffer, and addresses in it
        self._count = 0  # of exchanges
        self._stream: torch.cuda.Stream | None = None
        self._apart = False  # whether each rank has a GPU of its own, as far as the ranks have told

    def sms(self, chosen: int) -> int:
        return super().sms(chosen) + (SMS if expected_share(self.ranks, chosen) <= FEW else 0)

    def tells(self, chosen: int) -> bool:
        # The kernel that reads few rows may wait for an SM, and so may a copy inside a GPU. A CUDA graph may begin with
        # either of two branches.
        few = expected_share(self.ranks, chosen) <= FEW
        return self._apart and not few and not torch.cuda.is_current_stream_capturing()

    def start_gather(
        self,
        tensors: Sequence[Tensor],
        rows: int,
        wanted: Wanted | None = None,
        lend: bool = False,
        told: Tensor | None = None,
    ) -> Pending:
        shapes = [(self.ranks, rows, *t.shape[1:]) for t in tensors]
        offsets, nbytes = _layout([math.prod(s) * t.itemsize for s, t in zip(shapes, tensors, strict=True)])
        if told is not None:
            write_word(told, 0 if nbytes else 1)
        if not nbytes:
            empty = [t.new_empty(self.ranks * rows, *t.shape[1:]) for t in tensors]
            return Pending(empty, [nothing] * len(tensors), tensors)
        waits: list[Callable[[], None]] = []
        with self._exchange():
            buffer = self._writable(nbytes, tensors[0].device)
            of_ranks = [
                [buffer.of_rank(r, offset, shape, t.dtype) for r in range(self.ranks)]
                for t, shape, offset in zip(tensors, shapes, offsets, strict=True)
            ]
            *small, last = [
                _Gathered(t, there, self.rank, lend and t is tensors[-1])
                for t, there in zip(tensors, of_ranks, strict=True)
            ]
            _copy([pair for one in small for pair in (one.sent(), *one.own())])
            _copy([last.sent()])
            with self._reading(buffer):
                begun = nothing if told is None else self._recorded()
                for one in (*small, last):
                    few, copy = None, self._copy_of_few(wanted, one.result) if one is last else None
                    if wanted is not None and copy is not None:
                        few = copy, wanted.rows(*[s.result.flatten(0, 1) for s in small]).view(self.ranks, rows)
                    _read({r: one.sources[r] for r in self._others()}, one.result, few)
                    if one is last and told is not None:
                        write_word(told, 1)
                    waits.append(self._recorded())
            _copy(last.own())  # while the small ones travel
            waits[-1] = self._until_done(waits[-1])
        results = [one.result.flatten(0, 1) for one in (*small, last)]
        give_back = self._after_consumer if lend else nothing
        return Pending(results, waits, [*tensors, wanted, told], begun, give_back)

    def room(self, like: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        offsets, nbytes = _layout([t.nbytes for t in like])
        if not nbytes:
            return super().room(like, device)
        with self._exchange():
            buffer = self._writable(nbytes, device)
        rooms = [buffer.of_rank(self.rank, o, t.shape, t.dtype) for t, o in zip(like, offsets, strict=True)]
        self._rooms = buffer, {t.data_ptr() for t in rooms}
        return rooms

    def start_exchange(self, tensors: Sequence[Tensor], wanted: Wanted | None = None) -> Pending:
        received = [torch.empty_like(t) for t in tensors]
        offsets, nbytes = _layout([t.nbytes for t in tensors])
        if not nbytes:
            return self._exchanged(tensors, received, [nothing] * len(tensors))
        waits: list[Callable[[], None]] = []
        with self._exchange():
            buffer, rooms = self._rooms
            self._rooms = None, set()
            if buffer is None or rooms.isdisjoint(t.data_ptr() for t in tensors):
                buffer, rooms = self._writable(nbytes, tensors[0].device), set()
            # (P, N, ...) each: the rows of a rank for the others, and those of the others for it
            places = [(self.ranks, t.shape[0] // self.ranks, *t.shape[1:]) for t in tensors]
            for t, shape, offset in zip(tensors, places, offsets, strict=True):
                sent, mine = t.view(shape), buffer.of_rank(self.rank, offset, shape, t.dtype)
                for rank in self._others() if t.data_ptr() not in rooms else ():
                    mine[rank].copy_(sent[rank])
            with self._reading(buffer):
                chosen = None
                for t, shape, offset in zip(received, places, offsets, strict=True):
                    copy = self._copy_of_few(wanted, t.view(shape))
                    if wanted is not None and copy is not None and chosen is None:
                        chosen = wanted.rows()
                    sources = {r: buffer.of_rank(r, offset, shape, t.dtype)[self.rank] for r in self._others()}
                    few = None if copy is None or chosen is None else (copy, chosen)
                    _read(sources, t.view(shape), few)
                    waits.append(self._recorded())
            waits[-1] = self._until_done(waits[-1])
        return self._exchanged(tensors, received, waits, wanted)

    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in {*self._buffers, *self._in_graphs})

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next one: at a time, every rank reads another one's memory."""
        return [(self.rank + i) % self.ranks for i in range(1, self.ranks)]

    def _copy_of_few(self, wanted: Wanted | None, parts: Tensor) -> Callable[..., object] | None:
        """Return the kernel that reads the wanted rows of ``parts`` (P, N, ...) alone; None if all rows are read."""
        if wanted is None or expected_share(self.ranks, wanted.chosen) > FEW:
            return None
        return wanted.bind_copy(parts[0], SMS)

    def _until_done(self, wait: Callable[[], None]) -> Callable[[], None]:
        """Return the function that waits for the last result of an exchange, from the one that waits for its rows.

        A capture ends only after all of its work, so there this function waits for the second barrier.
        """
        return self._recorded() if torch.cuda.is_current_stream_capturing() else wait

    def _recorded(self) -> Callable[[], None]:
        """Return the function that lets the current stream wait for the work of the engine's stream so far."""
        assert self._stream is not None
        event = self._stream.record_event()
        return lambda: event.wait()

    def _after_consumer(self) -> None:
        """Let the engine's stream, and so the next exchange, wait for the work of the current stream."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())

    def _next_buffer(self, nbytes: int, device: torch.device) -> SymmetricBuffer:
        """Return the buffer of an exchange now, with at least these bytes: the same number on every rank."""
        capturing = torch.cuda.is_current_stream_capturing()
        size = self._buffers[0].nbytes if self._buffers else 0
        if size < nbytes:
            if capturing:
                raise InputError(
                    "ExpertParallel: engine 'symmetric': expected a call of this size before the capture of a CUDA "
                    f"graph, where no memory of {nbytes} bytes can be shared, got {size} bytes"
                )
            self._grow(nbytes, device)
        buffer = self._buffers[capturing]
        if capturing and buffer not in self._in_graphs:
            self._in_graphs.append(buffer)
        return buffer

    def _grow(self, nbytes: int, device: torch.device) -> None:
        """Replace the buffers: a collective. Every rank comes here in the same exchange."""
        of_ranks: list[tuple[int, str]] = [(0, "")] * self.ranks
        dist.all_gather_object(of_ranks, (nbytes, gpu_id(device)), self.group)
        sizes, gpus = zip(*of_ranks, strict=True)
        if len({*sizes}) > 1:
            raise InputError(
                "ExpertParallel: engine 'symmetric': expected the same max_tokens, experts per token, features and "
                f"dtypes on every rank, got exchanges of {[*sizes]} bytes"
            )
        self._apart = len({*gpus}) == self.ranks
        torch.cuda.synchronize(device)  # after the second barrier of the last exchange, no rank reads the old buffers
        # in powers of two, since the number of tokens may grow in small steps
        self._buffers = [SymmetricBuffer(1 << (nbytes - 1).bit_length(), self.group, device) for _ in range(2)]

    def _writable(self, nbytes: int, device: torch.device) -> SymmetricBuffer:
        """Return the buffer of the next exchange, which the current stream may write from now on."""
        self._count += 1
        buffer = self._next_buffer(nbytes, device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)
        current = torch.cuda.current_stream()
        if torch.cuda.is_current_stream_capturing():
            self._stream.wait_stream(current)  # the engine's stream becomes a part of the capture
        current.wait_stream(self._stream)  # until all ranks have read the last exchange
        return buffer

    @contextmanager
    def _reading(self, buffer: SymmetricBuffer) -> Iterator[None]:
        """Run a block on the engine's own stream, after all ranks have written what they wrote on their current stream.
        The next exchange waits until all ranks have read.

        All exchanges are on this stream, so that they follow each other whatever stream a layer runs on.
        """
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            buffer.barrier(self.timeout_s)
            try:
                yield
            finally:  # after an error too: the barriers of this rank stay those of the others
                buffer.barrier(self.timeout_s)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Explain errors of the GPU inside a block as those of an exchange."""
        try:
            yield
        except RuntimeError as error:
            if "CUDA error" not in str(error):
                raise
            raise RuntimeError(
                f"ExpertParallel: rank {self.rank} of {self.ranks}, at exchange {self._count}: the GPU failed, as if "
                f"another rank does not come within {self.timeout_s:g} s; the first lines on stderr then name that rank"
            ) from error


class _Gathered:
    """A tensor (T, ...) of this rank, and the result (P, N, ...) with those of all ranks.

    - ``given``: the tensor.
    - ``of_ranks``: for each rank, the place of such a result in its buffer. A rank writes its own rows there, whether
      or not its result is lent: the ranks may differ in this.
    - ``rank``: this rank.
    - ``lent``: whether the result is its place in the buffer.
    """

    def __init__(self, given: Tensor, of_ranks: Sequence[Tensor], rank: int, lent: bool) -> None:
        self.given, self.rank = given, rank
        self.sources = [there[r] for r, there in enumerate(of_ranks)]  # (N, ...) of each rank
        self.result = of_ranks[rank] if lent else given.new_empty(of_ranks[rank].shape)
        self._lent = lent

    def sent(self) -> tuple[Tensor, Tensor]:
        """Return where the other ranks read the tensor, and the tensor."""
        return self.sources[self.rank][: self.given.shape[0]], self.given

    def own(self) -> list[tuple[Tensor, Tensor]]:
        """Return its place in the result, and the tensor; nothing if `sent` is that place."""
        return [] if self._lent else [(self.result[self.rank, : self.given.shape[0]], self.given)]


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy to the first tensor of each pair from the second one: in one launch, if all have elements of four bytes."""
    if len(pairs) > 1 and all(t.itemsize == 4 for _, t in pairs):
        to, given = zip(*[(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs], strict=True)
        torch._foreach_copy_(to, given)
        return
    for a, b in pairs:
        a.copy_(b)


def _read(sources: Mapping[int, Tensor], parts: Tensor, few: tuple[Callable[..., object], Tensor] | None) -> None:
    """Read rows (N, ...) of each rank of ``sources`` into ``parts`` (P, N, ...).

    All rows, or with ``few`` the wanted ones (P, N), by this kernel.
    """
    if few is None:
        for rank, source in sources.items():
            parts[rank].copy_(source)
        return
    copy, wanted = few
    rows = parts.shape[1]
    row_of = torch.where(wanted, torch.arange(rows, device=parts.device), rows)
    for rank, source in sources.items():
        copy(source, row_of[rank], parts[rank])


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the first byte of each tensor of these sizes in a buffer, and the bytes of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
