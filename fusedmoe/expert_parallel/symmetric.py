"""The engine ``"symmetric"``: ranks read each other's memory, inside one NVLink domain, by torch's symmetric memory.

A rank writes its rows into a buffer that all ranks can address. After a barrier on the device, each rank reads the rows
of the others: all of them by its copy engines, which take no SM, or, where it wants few of them, only these by a kernel
on a few SMs. No host takes part. A CUDA graph can capture an exchange.

A second barrier ends each exchange: when a rank passes it, all ranks have read, and the next exchange may write. A
consumer of the rows does not wait for it. CUDA graphs have a buffer of their own, since a replay and the exchanges of
the engine's stream do not wait for each other, and a graph ends after the second barrier.

Axes as in engine.py.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import distributed as dist

from fusedmoe.errors import InputError
from fusedmoe.expert_parallel.engine import Engine, Pending, expected_share, nothing
from fusedmoe.expert_parallel.torch_symmetric import SymmetricBuffer, why_not
from fusedmoe.kernels.sm90 import functions
from fusedmoe.kernels.toolkit import missing_packages
from fusedmoe.target import arch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fusedmoe.expert_parallel.engine import Wanted

ALIGNMENT = 256  # bytes: tensors of one exchange begin at multiples
# the largest share of another rank's rows for which a kernel reads them: it reads a tenth slower than the copy engines,
# and takes SMs from the products beside it
FEW = 0.8
# of the kernel, an even number: with 224 KiB under way per SM, it has 3.5 MiB under way, and NVLink delivers less than
# 1 MiB in the 2 us of a read
SMS = 16


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
        self._buffers: list[SymmetricBuffer] = []  # of the engine's stream, and of CUDA graphs
        self._in_graphs: list[SymmetricBuffer] = []  # those that a graph may have recorded, of any size
        self._count = 0  # of exchanges
        self._stream: torch.cuda.Stream | None = None

    def sms(self, chosen: int) -> int:
        return super().sms(chosen) + (SMS if expected_share(self.ranks, chosen) <= FEW else 0)

    def start_gather(self, tensors: Sequence[Tensor], rows: int, wanted: Wanted | None = None) -> Pending:
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
                chosen = None
                if wanted is not None and i == len(parts) - 1 and self._reads_few(wanted, gathered[i]):
                    chosen = wanted.rows(*gathered[:-1]).view(self.ranks, rows)
                sources = {r: buffer.of_rank(r, offset, part.shape[1:], part.dtype) for r in self._others()}
                _read(sources, part, chosen)
                waits[i] = _wait_for(torch.cuda.current_stream().record_event())
            waits[-1] = self._after_reads(buffer, waits[-1])
        return Pending(gathered, waits, [*tensors, wanted])

    def start_exchange(self, tensors: Sequence[Tensor], wanted: Wanted | None = None) -> Pending:
        received = [torch.empty_like(t) for t in tensors]
        offsets, nbytes = _layout([t.nbytes for t in tensors])
        waits = [nothing] * len(tensors)
        if not nbytes:
            return self._exchanged(tensors, received, waits)
        with self._exchange(nbytes, tensors[0].device) as buffer:
            # (P, N, ...) each: the rows of a rank for the others, and those of the others for it
            places = [(self.ranks, t.shape[0] // self.ranks, *t.shape[1:]) for t in tensors]
            for t, shape, offset in zip(tensors, places, offsets, strict=True):
                sent, mine = t.view(shape), buffer.of_rank(self.rank, offset, shape, t.dtype)
                for rank in self._others():
                    mine[rank].copy_(sent[rank])
            buffer.barrier(self.timeout_s)
            chosen = None
            for i, (t, shape, offset) in enumerate(zip(received, places, offsets, strict=True)):
                if reads_few := wanted is not None and self._reads_few(wanted, t):
                    assert wanted is not None
                    chosen = wanted.rows() if chosen is None else chosen
                sources = {r: buffer.of_rank(r, offset, shape, t.dtype)[self.rank] for r in self._others()}
                _read(sources, t.view(shape), chosen if reads_few else None)
                waits[i] = _wait_for(torch.cuda.current_stream().record_event())
            waits[-1] = self._after_reads(buffer, waits[-1])
        return self._exchanged(tensors, received, waits, wanted)

    def buffer_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in {*self._buffers, *self._in_graphs})

    def _others(self) -> list[int]:
        """Return the other ranks, beginning with the next one: at a time, every rank reads another one's memory."""
        return [(self.rank + i) % self.ranks for i in range(1, self.ranks)]

    def _reads_few(self, wanted: Wanted, t: Tensor) -> bool:
        """Whether a kernel reads the wanted rows of a tensor alone."""
        few = expected_share(self.ranks, wanted.chosen) <= FEW
        return few and why_no_copies_of_rows(t.dtype, t.shape[1:], t.device) is None

    def _after_reads(self, buffer: SymmetricBuffer, wait: Callable[[], None]) -> Callable[[], None]:
        """Let the engine's stream wait until all ranks have read; return the function that waits for the last result.

        A capture ends only after all of its work, so there this function waits for the barrier.
        """
        buffer.barrier(self.timeout_s)
        if torch.cuda.is_current_stream_capturing():
            return _wait_for(torch.cuda.current_stream().record_event())
        return wait

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
        of_ranks = [0] * self.ranks
        dist.all_gather_object(of_ranks, nbytes, self.group)
        if len({*of_ranks}) > 1:
            raise InputError(
                "ExpertParallel: engine 'symmetric': expected the same max_tokens, experts per token, features and "
                f"dtypes on every rank, got exchanges of {of_ranks} bytes"
            )
        torch.cuda.synchronize(device)  # after the second barrier of the last exchange, no rank reads the old buffers
        # in powers of two, since the number of tokens may grow in small steps
        self._buffers = [SymmetricBuffer(1 << (nbytes - 1).bit_length(), self.group, device) for _ in range(2)]

    @contextmanager
    def _exchange(self, nbytes: int, device: torch.device) -> Iterator[SymmetricBuffer]:
        """Run a block on the engine's own stream, after the work of the current one, with the buffer for it.

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


def why_no_copies_of_rows(dtype: torch.dtype, row: Sequence[int], device: torch.device) -> str | None:
    """Return the reason why no kernel copies some rows of a tensor; None if one does."""
    if arch_of(device) != 90:
        return "the kernel needs an sm_90 GPU"
    if missing := missing_packages():
        return f"the kernel needs {missing[0]}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel copies bf16 and fp16, not {dtype}"
    return None if len(row) == 1 and row[0] % 8 == 0 else f"the kernel copies rows of multiples of 8 values, not {row}"


def _read(sources: Mapping[int, Tensor], parts: Tensor, wanted: Tensor | None) -> None:
    """Read rows (N, ...) of each rank of ``sources`` into ``parts`` (P, N, ...): all, or those of ``wanted`` (P, N)."""
    if wanted is None:
        for rank, source in sources.items():
            parts[rank].copy_(source)
        return
    rows = parts.shape[1]
    row_of = torch.where(wanted, torch.arange(rows, device=parts.device), rows)
    copy = functions.bind_copy_rows(parts[0], SMS)
    for rank, source in sources.items():
        copy(source, row_of[rank], parts[rank])


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
