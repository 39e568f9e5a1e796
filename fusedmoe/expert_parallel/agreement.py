"""The largest number of tokens of a rank, on which the hosts of a group agree in each call.

On one host, the ranks tell each other in shared memory: a word per rank, which has the number of the call and the
number of tokens, so that one store writes both. This takes some microseconds after the last rank has come, where a
collective of gloo takes half a millisecond. On several hosts, it is a collective.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from fusedmoe.expert_parallel.engine import writes_no_weight

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_BITS = 40  # of a word, for the number of tokens; the others have the number of the call
_CALLS = 1 << (64 - _BITS)
_LINE = 8  # words from one rank's to the next: a cache line
_SPINS = 2000  # looks before a rank begins to sleep between them


class Agreement:
    """`most` on the ranks of a group that has collectives of CPU tensors.

    - ``timeout_s``: seconds that a rank waits for the others on one host. A collective has the time-out of the group.
    """

    def __init__(self, group: ProcessGroup, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._words: Any = None  # a memory view of 64-bit words, from the first call on
        self._calls = 0

    def most(self, tokens: int) -> int:
        """Return the largest number of tokens of a rank in this call: a collective."""
        if self._calls == 0:
            self._words = _shared_words(self._group)
        self._calls += 1
        if self._words is not None:
            return self._in_memory(tokens)
        largest = torch.tensor([tokens], device="cpu")
        with writes_no_weight(self._group, largest.device):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return int(largest)

    def _in_memory(self, tokens: int) -> int:
        """Write this rank's word, and wait for the others.

        Two words per rank are used in turn: a rank that has come to the next call has read all words of this one, but
        another one may not have. No rank can be two calls ahead.
        """
        words, call = self._words, self._calls % _CALLS
        ranks, half = self._group.size(), self._calls % 2
        words[(2 * self._group.rank() + half) * _LINE] = call << _BITS | tokens
        most, looks, end = tokens, 0, 0.0
        for rank in range(ranks):
            place = (2 * rank + half) * _LINE
            while (word := words[place]) >> _BITS != call:
                looks += 1
                if looks == _SPINS:
                    end = time.monotonic() + self._timeout_s
                if looks >= _SPINS:
                    time.sleep(2e-5)
                    if time.monotonic() > end:
                        raise RuntimeError(
                            f"ExpertParallel: rank {rank} of {ranks} did not come to call {self._calls} of a layer "
                            f"within {self._timeout_s:g} s"
                        )
            most = max(most, word & ((1 << _BITS) - 1))
        return most


def host_id() -> str:
    """Return an id of the host and of the container: torch's symmetric memory names a process by its pid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _shared_words(group: ProcessGroup) -> Any:
    """Return the shared words of the ranks; None if they are on several hosts or cannot share memory: a collective."""
    ranks, rank = group.size(), group.rank()
    nbytes = 2 * ranks * _LINE * 8
    path = _made_file(nbytes) if rank == 0 else ""
    told: list[tuple[str, str]] = [("", "")] * ranks
    dist.all_gather_object(told, (host_id(), path), group)
    hosts, paths = zip(*told, strict=True)
    memory = _mapped(paths[0], nbytes) if len({*hosts}) == 1 and paths[0] else None
    have = [False] * ranks
    dist.all_gather_object(have, memory is not None, group)
    if path:
        with suppress(OSError):
            os.unlink(path)  # the ranks have it open
    return memory if all(have) else None


def _made_file(nbytes: int) -> str:
    """Return the path of a new file of zeros, in memory if the host has a file system for that; "" if there is none."""
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    try:
        descriptor, path = tempfile.mkstemp(prefix="fusedmoe-", dir=folder)
        os.truncate(descriptor, nbytes)
        os.close(descriptor)
    except OSError:
        return ""
    return path


def _mapped(path: str, nbytes: int) -> Any:
    try:
        with open(path, "r+b") as file:
            return memoryview(mmap.mmap(file.fileno(), nbytes)).cast("Q")
    except OSError:
        return None
