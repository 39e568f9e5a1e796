"""The engine ``"symmetric"``: ranks read each other's memory, inside one NVLink domain, by torch's symmetric memory.

A rank writes its rows into a buffer that all ranks can address. After a barrier on the device, each rank copies the
rows of the others by its copy engines, which take no SM. No host takes part. A CUDA graph can capture an exchange.

Two buffers take turns. A rank writes the buffer of exchange i again in exchange i + 2. Before that, it passes the
barrier of exchange i + 1, where every rank arrives after it has read the rows of exchange i.

Axes as in engine.py.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch

from fusedmoe.errors import InputError
from fusedmoe.expert_parallel.engine import Engine, Pending, nothing
from fusedmoe.expert_parallel.torch_symmetric import SymmetricBuffer, why_not

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

ALIGNMENT = 256  # bytes: tensors of one exchange begin at multiples


class Symmetric(Engine):
    """`start_gather` and `start_exchange` by reads of the memory of other ranks.

    Parameters
    ----------
    group
        The ranks, all in one NVLink domain, each with its own GPU.
    timeout_s
        Seconds that a rank waits for the others in one exchange.
    """

    name: ClassVar[str] = "symmetric"

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        super().__init__(group)
        if reason := why_not(group):
            raise InputError(
                f"ExpertParallel: engine: expected one that this machine can run, got 'symmetric': {reason}"
            )
        self.timeout_s = timeout_s
        self._buffers: list[SymmetricBuffer] = []
        self._turn = 0
        self._count = 0  # of exchanges
        self._stream: torch.cuda.Stream | None = None

    def start_gather(self, tensors: Sequence[Tensor], rows: int) -> Pending:
        gathered = [t.new_empty(self.ranks * rows, *t.shape[1:]) for t in tensors]
        offsets, nbytes = _layout([t.nbytes // self.ranks for t in gathered])
        waits = [nothing] * len(tensors)
        if not nbytes:
            return Pending(gathered, waits, tensors)
        parts = [out.view(self.ranks, rows, *out.shape[1:]) for out in gathered]
        for part, t in zip(parts, tensors, strict=True):
            part[self.rank, : t.shape[0]].copy_(t)
        with self._exchange(nbytes, tensors[0].device) as buffer:
            for t, offset in zip(tensors, offsets, strict=True):
                buffer.of_rank(self.rank, offset, t.shape, t.dtype).copy_(t)
            buffer.barrier(self.timeout_s)
            for i, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
                for rank in self._others():
                    part[rank].copy_(buffer.of_rank(rank, offset, part.shape[1:], part.dtype))
                waits[i] = _wait_for(torch.cuda.current_stream().record_event())
        return Pending(gathered, waits, tensors)

    def start_exchange(self, tensors: Sequence[Tensor]) -> Pending:
        received = [[*t.view(self.ranks, -1, *t.shape[1:])] for t in tensors]
        offsets, nbytes = _layout([t.nbytes for t in tensors])
        waits = [nothing] * len(tensors)
        if not nbytes:
            return Pending(received, waits, tensors)
        places = [(offset, (self.ranks, *parts[0].shape)) for offset, parts in zip(offsets, received, strict=True)]
        arrived = [[part if r == self.rank else torch.empty_like(part) for r, part in enumerate(p)] for p in received]
        with self._exchange(nbytes, tensors[0].device) as buffer:
            for parts, (offset, shape) in zip(received, places, strict=True):
                mine = buffer.of_rank(self.rank, offset, shape, parts[0].dtype)
                for rank in self._others():
                    mine[rank].copy_(parts[rank])
            buffer.barrier(self.timeout_s)
            for i, (parts, (offset, shape)) in enumerate(zip(arrived, places, strict=True)):
                for rank in self._others():
                    parts[rank].copy_(buffer.of_rank(rank, offset, shape, parts[rank].dtype)[self.rank])
                waits[i] = _wait_for(torch.cuda.current_stream().record_event())
        return Pending(arrived, waits, tensors)

    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next one: at a time, every rank reads another one's memory."""
        return [(self.rank + i) % self.ranks for i in range(1, self.ranks)]

    def _next_buffer(self, nbytes: int, device: torch.device) -> SymmetricBuffer:
        """Return the buffer whose turn it is, with at least these bytes: the same number on every rank."""
        if not self._buffers or self._buffers[0].nbytes < nbytes:
            if torch.cuda.is_current_stream_capturing():
                raise InputError(
                    "ExpertParallel: engine 'symmetric': expected a call of this size before the capture of a CUDA "
                    f"graph, where no memory of {nbytes} bytes can be shared, got {self.buffer_bytes() // 2} bytes"
                )
            # every rank comes here in the same exchange; no rank may still read the old buffers when they are freed
            torch.cuda.synchronize(device)
            for buffer in self._buffers:
                buffer.barrier(self.timeout_s)
            torch.cuda.synchronize(device)
            self._buffers = [SymmetricBuffer(nbytes, self.group, device) for _ in range(2)]
        self._turn ^= 1
        return self._buffers[self._turn]

    @contextmanager
    def _exchange(self, nbytes: int, device: torch.device) -> Iterator[SymmetricBuffer]:
        """Run a block on the engine's own stream, after the work of the current one, with the buffer whose turn it is.

        All exchanges are on this stream, so that they follow each other whatever stream a layer runs on.
        """
        self._count += 1
        try:
            buffer = self._next_buffer(nbytes, device)
            if self._stream is None:
                self._stream = torch.cuda.Stream(device, priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                yield buffer
        except RuntimeError as error:
            if "CUDA error" not in str(error):
                raise
            raise RuntimeError(
                f"ExpertParallel: rank {self.rank} of {self.ranks}, at exchange {self._count}: the GPU failed, as if "
                f"another rank does not come within {self.timeout_s:g} s; the first lines on stderr name that rank"
            ) from error


def _wait_for(event: torch.cuda.Event) -> Callable[[], None]:
    """Return the function that lets the current stream wait for an event."""
    return lambda: torch.cuda.current_stream().wait_event(event)


def _layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the first byte of each tensor of these sizes in a buffer, and the bytes of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end
