"""The interface of the engines, which move rows between the ranks of a group.

Axes: P ranks, N rows per rank (the same number on every rank), T rows of this rank (at most N), H columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.base.errors import InputError
from fusedmoe.base.lasting import current_stream, external_stream

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# for each group, by the name of a backend, how many of the collectives that it has counted write to no weight
_harmless: WeakKeyDictionary[ProcessGroup, dict[str, int]] = WeakKeyDictionary()


@contextmanager
def writes_no_weight(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    """Collectives of the group inside the block write to new tensors: quantized weights stay valid."""
    before = collectives(group, device)
    yield
    after = collectives(group, device)
    if before is not None and after is not None:
        of_group, name = _harmless.setdefault(group, {}), group._get_backend(device).name()
        of_group[name] = of_group.get(name, 0) + after - before


def collectives(group: ProcessGroup, device: torch.device) -> int | None:
    """Return how many collectives that may write to a weight a group has run on the device; None if it counts none."""
    try:
        backend: Any = group._get_backend(device)
        counted: int = backend._get_sequence_number_for_group()
    except RuntimeError:  # the backend does not count collectives
        return None
    of_group = _harmless.get(group)
    return counted if of_group is None else counted - of_group.get(backend.name(), 0)


def chosen_ids(expert_index: Tensor, num_experts: int) -> Tensor:
    """Return expert ids as int32, with -1 or E for sentinels: in few launches, since all other work waits for it."""
    wide = expert_index if expert_index.dtype is torch.int64 else expert_index.to(torch.int32)
    return wide.clamp(-1, num_experts).to(torch.int32)


class Pending:
    """Tensors that an engine is still writing.

    - ``results``: the results of the exchange, one for each tensor that was given.
    - ``waits``: for each, a function that lets the current stream wait until it is complete.
    - ``given``: objects that hold the tensors that the exchange reads: they live until it is complete.
    """

    # The number by which the word of a rank grows when its rows are there, if a kernel can follow them; see `follow`.
    arrivals: int = 0

    def __init__(self, results: list[Any], waits: Sequence[Callable[[], object]], given: Sequence[object] = ()) -> None:
        self._results, self._waits, self._given = results, [*waits], given
        first = results[0]
        device = (first if isinstance(first, torch.Tensor) else first[0]).device
        self._stream = (device, current_stream(device)) if device.type == "cuda" else None

    def unfinished(self, number: int) -> Any:
        """Return a result of which the rows of other ranks may still be written."""
        return self._results[number]

    def wait(self, number: int) -> Any:
        """Return a result; work that the current stream gets from now on finds it complete."""
        self._waits[number]()
        self._waits[number] = nothing
        return self._results[number]

    def wait_all(self) -> list[Any]:
        """Return all results."""
        return [self.wait(i) for i in range(len(self._results))]

    def shift_ids(self, first: int) -> None:
        """Subtract a number from the first result, once it is complete."""
        wait, ids = self._waits[0], self._results[0]

        def shifted() -> None:
            wait()
            ids.sub_(first)

        self._waits[0] = shifted

    def follow(self, words: Tensor, block: int = 0) -> None:
        """Let the next kernel of the current stream, which may begin beside the last one, follow the rows of the last
        result, and their scales if rows travel as codes. If ``arrivals`` is not 0, this is called in place of `wait` of
        these results.

        ``words`` is a matrix (S, W) int32, with a line per step, at most 32. The last element of a line grows by
        `arrivals` when the rows of the step are there. Step s is for the rows of ``block`` experts of this rank, from
        ``s * block`` on, and is there after all steps before it. With ``block`` 0, step 0 is that of this rank's rows,
        whose word does not grow, and step s is rank ``this rank + s``.
        """
        raise NotImplementedError

    def __del__(self) -> None:
        # after an error before the wait, memory that is still read or written must not be used again
        left = [wait for wait in self._waits if wait is not nothing]
        if left:
            with nullcontext() if self._stream is None else torch.cuda.stream(external_stream(*self._stream)):
                for wait in left:
                    wait()


def nothing() -> None:
    """Wait for a result that is complete."""


class Wanted(NamedTuple):
    """The rows of a gather that matter to this rank: those that chose one of its experts. An engine may leave out all
    others.
    """

    ids: Tensor  # (P*N, K) int32: those of this rank's experts, 0 to ``experts - 1``, and others
    experts: int


ENGINES: dict[str, type[Engine]] = {}  # by name; a class that has one is entered here


class Engine:
    """Two exchanges of rows with static shapes. Each is a collective: every rank calls it, in the same order.

    To add an engine, write its class in a module of its own, and import that in `fusedmoe.expert_parallel.group`.

    Arguments:
    - ``timeout_s``: seconds that a rank waits for the others in one exchange, if the engine itself waits.
    """

    name: ClassVar[str] = ""  # the engine's name, as `ExpertParallel` takes it
    # Whether all shapes of an exchange follow from those of its arguments. If not, the engine is a `VaryingEngine`: the
    # hosts wait for their devices, so that no work runs beside an exchange.
    static_shapes: ClassVar[bool] = True
    # Whether an exchange is some kernels on the stream of the layer, see `fusedmoe.kernels.exchange`: a product may
    # begin beside one of them.
    by_kernels: ClassVar[bool] = False
    # The SMs that a product beside an exchange leaves to it.
    sms: ClassVar[int] = 2

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            ENGINES[cls.name] = cls

    def __init__(self, group: ProcessGroup, timeout_s: float = math.inf) -> None:
        self.group, self.timeout_s = group, timeout_s
        self.ranks, self.rank = group.size(), group.rank()

    def start_gather_of_tokens(
        self, tokens: Sequence[Tensor], index: Tensor, weight: Tensor, rows: int, experts: int
    ) -> Pending:
        """Begin to gather expert ids, routing weights and tokens: those of this rank's experts are 0 to
        ``experts - 1`` in the ids, and all others are sentinels.

        - ``tokens``: (T, ...) each, contiguous.
        - ``index``: (T, K), of the experts of all ranks. Other ids are sentinels.
        - ``weight``: (T, K).
        - ``rows``: N.
        - ``experts``: E / P.
        """
        ids = chosen_ids(index, self.ranks * experts)
        if len(ids) < rows:  # sentinels also in the rows of a rank after its own tokens
            ids = F.pad(ids, (0, 0, 0, rows - len(ids)), value=-1)
        pending = self.start_gather([ids, weight.contiguous(), *tokens], rows)
        pending.shift_ids(self.rank * experts)
        return pending

    def start_gather(self, tensors: Sequence[Tensor], rows: int, wanted: Wanted | None = None) -> Pending:
        """Begin to gather the rows of all ranks, in rank order: (P*N, ...) for each tensor (T, ...).

        Those of this rank are complete first, for the current stream. The others arrive in the order of the tensors.

        - ``tensors``: (T, ...) each, contiguous, on one device.
        - ``rows``: N. The rows of a rank after its own T have any values.
        - ``wanted``: the wanted rows of the last tensor. All other rows have any values. None: all rows are wanted.
        """
        raise NotImplementedError

    def start_exchange(self, tensors: Sequence[Tensor]) -> Pending:
        """Begin to exchange rows: from (P*N, ...) with N rows for each rank, (P, N, ...), the rows that each rank has
        for this one; as a tensor or, of two ranks, as a list.

        The rows of this rank for itself are those of the argument when the exchange is waited for: the caller may write
        them until then.

        - ``tensors``: (P*N, ...) each, contiguous, on one device.
        """
        raise NotImplementedError

    def sums_over_ranks(self, tensors: Sequence[Tensor], tokens: int) -> list[Tensor] | None:
        """Return the sums over ranks, in fp32 and in the order of the ranks, of what `exchange` would return, for the
        first rows of each rank, ``tokens``; None if the engine does not sum such tensors.
        """
        return None

    def channel(self, nbytes: int, device: torch.device, returns: bool = False) -> Any:
        """Return the channel of the next exchange, with the ``region`` that the kernels of `fusedmoe.kernels.exchange`
        take: of the same number of bytes on every rank, those of `places`. Only if the engine is ``by_kernels``.

        The exchange is that of `start_exchange` if `bind_push` or `bind_push_sums` begins it and `bind_total` ends it,
        with the tensors at their `places`. Then ``returns`` is true, and the caller calls `returned` after the launch
        of `bind_total`. If an error comes between, the ranks are out of step: the next exchange raises a
        `RuntimeError`.
        """
        raise NotImplementedError

    def returned(self) -> None:
        """End an exchange of a `channel` that ``returns``."""
        raise NotImplementedError

    def gather(self, tensors: Sequence[Tensor], rows: int, wanted: Wanted | None = None) -> list[Tensor]:
        """Return the results of `start_gather`."""
        return self.start_gather(tensors, rows, wanted).wait_all()

    def exchange(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor] | Tensor]:
        """Return the results of `start_exchange`."""
        return self.start_exchange(tensors).wait_all()

    def _exchanged(
        self,
        tensors: Sequence[Tensor],
        received: Sequence[Tensor],
        waits: Sequence[Callable[[], object]],
        *given: object,
    ) -> Pending:
        """Return the results of an exchange: those ``received`` from the other ranks, and this rank's of the argument.

        Of two ranks, the latter is a view, and nothing is copied.
        """
        own = [t.view(self.ranks, -1, *t.shape[1:])[self.rank] for t in tensors]
        parts = [out.view(self.ranks, -1, *out.shape[1:]) for out in received]
        if self.ranks == 2:
            in_order = [
                [part[r] if r != self.rank else t for r in range(2)] for part, t in zip(parts, own, strict=True)
            ]
            return Pending(in_order, waits, [*tensors, *given])

        def copied(part: Tensor, t: Tensor, wait: Callable[[], object]) -> Callable[[], object]:
            def run() -> None:
                wait()
                part[self.rank].copy_(t)

            return run

        return Pending([*parts], [*map(copied, parts, own, waits)], [*tensors, *given])

    def buffer_bytes(self) -> int:
        """Return the bytes of the buffers that outlive a call."""
        return 0


class VaryingEngine(Engine):
    """Exchanges of rows whose numbers depend on the contents of tensors; the hosts know them."""

    static_shapes: ClassVar[bool] = False

    def counts(self, sent_PC: Tensor) -> Tensor:
        """Return C numbers per rank, such as rows, of those that this rank sends, and those that it gets: (2, P, C)
        int64 on the host.

        The host waits for the device. A collective.
        """
        raise NotImplementedError

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first ``sent[0]`` rows to rank 0, the next to rank 1, ...; return the rows received, in rank order.

        A collective.
        """
        raise NotImplementedError


def as_bytes(t: Tensor) -> Tensor:
    """Return a contiguous tensor (N, ...) as bytes (N, B), which every backend can send."""
    width = t.numel() // t.shape[0] * t.element_size() if t.shape[0] else 0
    return t.reshape(-1).view(torch.uint8).view(t.shape[0], width)


def forbid_capture(t: Tensor, setting: str) -> None:
    """Raise if a CUDA graph is being captured, in which the host cannot read a tensor."""
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        raise InputError(
            f"ExpertParallel: expected settings that a CUDA graph can capture, got {setting}, with which the host "
            "reads a tensor in each call"
        )
