"""`ExpertParallel`: the ranks that share the experts of a layer, and the settings of their exchange."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import torch
from torch import Tensor
from torch import distributed as dist

from fusedmoe.base.autocast import autocast_dtype
from fusedmoe.base.checks import FLAG, POSITIVE, POSITIVE_INTEGER, one_of, said
from fusedmoe.base.errors import InputError
from fusedmoe.expert_parallel import allgather, alltoall, auto, symmetric  # noqa: F401  (their engines are now in ENGINES)
from fusedmoe.expert_parallel.agreement import Agreement
from fusedmoe.expert_parallel.capacity import Overflow, RowLimit, rounded_up
from fusedmoe.expert_parallel.copies import Copies
from fusedmoe.expert_parallel.engine import ENGINES, Engine, writes_no_weight
from fusedmoe.expert_parallel.subgroup import group_of_hosts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

OverflowPolicy = Literal["raise", "rerun", "drop"]

_ENGINE = one_of(("auto", *ENGINES))
_OVERFLOW = one_of(get_args(OverflowPolicy))
_WHO = "ExpertParallel"


class ExpertParallel:
    """The ranks of a process group that share the experts of a layer, and the exchange of tokens between them.

    With P ranks and E experts, rank r has the experts ``r * E / P`` to ``(r + 1) * E / P - 1``. Each rank calls the
    layer with its own tokens, and gets the results of these tokens. All layers of a model can share one object.

    An exchange is a collective: every rank must call the layer, forward and backward, in the same order, also a rank
    without tokens. On all ranks, the same tensors must want gradients, and the settings, the dtypes and the number of
    experts per token must be the same.

    If the backend of the group has no collectives of CPU tensors (NCCL alone), and ``max_tokens`` is None or the engine
    is ``"auto"``, the first constructor makes a gloo group of the same ranks: every rank of the group must call it.

    Parameters
    ----------
    group
        A ``torch.distributed.ProcessGroup`` that this process is in, or a `DeviceMesh` of one dimension; None for the
        default group.
    engine
        ``"allgather"``: every rank gets all tokens, by collectives of the group's backend.
        ``"alltoall"``: a rank gets the tokens that chose one of its experts. The host waits for the device in each
        call, to learn how many these are.
        ``"symmetric"``: kernels read the tokens that chose one of the rank's experts from the memory of other GPUs, and
        write results to it; for ranks inside one NVLink domain. No host waits.
        ``"auto"``: ``"symmetric"`` if all ranks can run it: at most 32 on one host, each with its own GPU of compute
        capability 9.0, 10.0 or 10.3 as the current device, and with the packages of the kernels. If the group has
        NCCL, the ranks tell each other in the constructor: every rank of the group must call it. Otherwise, an `MoE`
        takes ``"alltoall"`` if a token has fewer experts than there are ranks, else ``"allgather"``. A `Dispatch` does
        not know the number, and takes ``"allgather"``. `settings` has the reason.
    max_tokens
        The largest number of tokens of a rank in a call, the same on all ranks. Each call then exchanges this many rows
        per rank, and no rank needs to know how many the others have. A rank with more tokens raises an error, and the
        others wait for it until their time-out. None: the ranks tell each other the largest number in each call,
        on their hosts. No host waits for its device. ``"alltoall"`` does not use it.
    capacity
        The rows of a rank's experts, as a multiple of those under even routing: ``ceil(capacity * N * K)``, rounded up
        to a multiple of 128, for N tokens per rank (see ``max_tokens``) with K experts each. All ranks must give the
        same. None: P*N*min(K, E/P) rows, which suffice for any routing in which no token chooses an expert twice.
    overflow
        The treatment of slots (a token's k-th expert) that find no row, since a rank needs more. The last experts of
        the rank lose their rows first, and of each expert the last tokens. ``"raise"``: an error, see `check`.
        ``"drop"``: the slots contribute nothing, and `dropped` counts them. ``"rerun"``: the call runs without
        ``capacity`` instead. For this the hosts read the needed rows before the products of each call: a host
        synchronisation.
    batch_rows
        The most rows that a rank's experts compute at a time, rounded up to a multiple of 128. If a rank may need more,
        the experts run several times in each call, each time on the next rows in the order of the experts, and again in
        the backward pass, which keeps no values of them. The memory of activations is then that of one batch, for any
        routing, and no slot is dropped. The parts of a token's result in several batches are added in fp32. Batches
        without rows run too. All ranks must give the same. None: all rows at once. Not with ``capacity``.
    combine_dtype
        ``torch.float32``: the parts of a token's result travel in fp32, twice the bytes of bf16, and their sum is
        rounded once. None: they have the dtype of the rows.
    dispatch_dtype
        ``torch.float8_e4m3fn``: what goes to the experts travels as FP8 codes, with one fp32 scale per 128 values of a
        row: tokens, and in the backward pass the gradients of results. Each row becomes ``dequantize(quantize(row))``
        of `fm.quantize` with ``fp8_block()``, in its own dtype, also on the rank that it comes from. The gradient of
        this rounding is the identity. Results and gradients of tokens return in the dtype of the rows. None: the rows
        travel as they are.
    timeout_s
        Seconds that a rank waits for the others in an exchange of ``"symmetric"``, at most 3,600, and that the hosts
        wait for each other without ``max_tokens`` on one host. Other collectives have the time-out of the group.
    equal_experts
        Whether all ranks may have the same experts, as copies of a dense MLP. If not, the ranks compare a few values in
        some exchanges, and raise an error if they are equal, since a wrapper that takes experts for replicas may have
        copied them.
    """

    def __init__(
        self,
        group: Any = None,
        engine: str = "auto",
        *,
        max_tokens: int | None = None,
        capacity: float | None = None,
        overflow: OverflowPolicy = "raise",
        batch_rows: int | None = None,
        combine_dtype: torch.dtype | None = None,
        dispatch_dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
        equal_experts: bool = False,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(f"{_WHO}: group: expected torch.distributed to be initialised: call init_process_group")
        self.group: ProcessGroup = _process_group(group)
        self.ranks: int = self.group.size()
        self.rank: int = self.group.rank()
        self.engine_name: str = _ENGINE(f"{_WHO}: engine", engine)
        self.max_tokens: int | None = POSITIVE_INTEGER.or_none()(f"{_WHO}: max_tokens", max_tokens)
        self._why_not_symmetric = auto.why_not(self.group) if self.engine_name == "auto" else None
        self._of_hosts = self.group if self.max_tokens is not None else group_of_hosts(self.group)
        self.capacity: float | None = POSITIVE.or_none()(f"{_WHO}: capacity", capacity)
        if capacity is not None and not self._kind_of_engine.static_shapes:
            raise InputError(
                f"{_WHO}: capacity: expected None with engine {engine!r}, which takes all rows that arrive, "
                f"got {capacity}"
            )
        self.batch_rows: int | None = POSITIVE_INTEGER.or_none()(f"{_WHO}: batch_rows", batch_rows)
        if batch_rows is not None:
            if capacity is not None:
                raise InputError(f"{_WHO}: batch_rows: expected None with capacity={capacity}, got {batch_rows}")
            if not self._kind_of_engine.static_shapes:
                raise InputError(f"{_WHO}: batch_rows: expected None with engine {engine!r}, got {batch_rows}")
        self.overflow: OverflowPolicy = _OVERFLOW(f"{_WHO}: overflow", overflow)
        self.slots_without_row = Overflow(self.overflow != "drop", self.capacity, self.ranks)
        if combine_dtype not in (None, torch.float32):
            raise InputError(f"{_WHO}: combine_dtype: expected torch.float32 or None, got {said(combine_dtype)}")
        self.combine_dtype: torch.dtype | None = combine_dtype
        if dispatch_dtype not in (None, torch.float8_e4m3fn):
            expected = "torch.float8_e4m3fn or None"
            raise InputError(f"{_WHO}: dispatch_dtype: expected {expected}, got {said(dispatch_dtype)}")
        self.dispatch_dtype: torch.dtype | None = dispatch_dtype
        self.timeout_s: float = POSITIVE(f"{_WHO}: timeout_s", timeout_s)
        self._agreement = Agreement(self._of_hosts, self.timeout_s)
        self.equal_experts: bool = FLAG(f"{_WHO}: equal_experts", equal_experts)
        self.copies = Copies()
        self.engine: Engine = self._kind_of_engine(self.group, self.timeout_s)
        self._beside: Callable[[], object] | None = None  # the work of a layer for `run_beside`, inside `beside`

    @property
    def _kind_of_engine(self) -> type[Engine]:
        if self.engine_name != "auto":
            return ENGINES[self.engine_name]
        return ENGINES["symmetric" if self._why_not_symmetric is None else "allgather"]

    def chosen_for(self, top_k: int) -> ExpertParallel:
        """Return this object with the engine for K chosen experts per token, if it has ``"auto"``; else itself."""
        if self.engine_name != "auto" or self._why_not_symmetric is None:
            return self
        if top_k >= self.ranks or self.capacity is not None or self.batch_rows is not None:
            return self
        chosen = copy.copy(self)
        chosen.engine_name, chosen.engine = "alltoall", ENGINES["alltoall"](self.group, self.timeout_s)
        return chosen

    def local_experts(self, num_experts: int, who: str = _WHO) -> int:
        """Return the number of experts on each rank: E / P.

        Raises `InputError`: e is not divisible by P.
        """
        if num_experts % self.ranks:
            raise InputError(
                f"{who}: num_experts: expected a multiple of {self.ranks}, the number of ranks, got {num_experts}"
            )
        return num_experts // self.ranks

    def row_limit(self, num_experts: int) -> RowLimit:
        """Return the limit of the rows of a rank's experts, of E on all ranks."""
        return RowLimit(self.ranks, self.local_experts(num_experts), self.capacity)

    @property
    def counts_rows(self) -> bool:
        """Whether the hosts read the needed rows before the products."""
        return self.overflow == "rerun" and self.capacity is not None

    def check(self) -> None:
        """Raise if a call since the last check needed more rows than it had. The host waits for the device.

        With ``overflow="raise"``, a call on a CPU raises the error itself. On a GPU, no host waits for its device: the
        error comes 32 calls later, or from `check`. A replayed CUDA graph only counts. All ranks that share the experts
        raise the error in the same call. A training loop can call `check` once per step, before the optimizer, on every
        rank. With ``overflow="drop"`` it never raises.

        Raises `InputError`: the error names the rank with the largest number of rows over the limit, and that number.
        """
        self.slots_without_row.check()

    def dropped(self) -> int:
        """Return the number of slots that found no row in all calls, on all ranks that share the experts. The host
        waits for the device.

        It is the same on each of these ranks.
        """
        return self.slots_without_row.dropped()

    def most_tokens(self, tokens: int) -> int:
        """Return the largest number of tokens of a rank in this call, which this rank has ``tokens`` of.

        The hosts exchange their numbers: a collective.
        """
        if self.max_tokens is not None:
            return self.max_tokens
        return self._agreement.most(tokens)

    def compare_experts(self, x: Tensor) -> None:
        """Raise if something has copied the experts of one rank to all; called in each exchange of rows ``x``."""
        if self.ranks > 1 and not self.equal_experts:
            self.copies.check(self.group, x)

    @property
    def can_run_beside(self) -> bool:
        """Whether tokens travel while a rank computes. Without static shapes, its host waits."""
        return self.ranks > 1 and self.engine.static_shapes

    @contextmanager
    def beside(self, work: Callable[[], object], device: torch.device) -> Iterator[None]:
        """Run a function once: while tokens of the block travel or, if none do, at the end of the block.

        `run_beside` calls it inside a step of a chain, which has no gradients and no autocast. It runs with those of
        the block.
        """
        grad, dtype, before = torch.is_grad_enabled(), autocast_dtype(device), self._beside

        def run() -> None:
            self._beside = None
            autocast = nullcontext() if dtype is None else torch.autocast(device.type, dtype)
            with torch.set_grad_enabled(grad), autocast:
                work()

        self._beside = run
        try:
            yield
            if self._beside is run:
                run()
        finally:
            self._beside = before

    def run_beside(self) -> None:
        """Run the function of `beside`, if there is one: after an exchange has begun, before its results are read."""
        if self._beside is not None:
            self._beside()

    def sum_over_ranks(self, t: Tensor, group: Any = None) -> Tensor:
        """Return the sum of a tensor over ranks, such as of `MoEStats.load` for `Router.update_bias`. A collective.

        - ``group``: the ranks, such as all data-parallel ones: a process group or a `DeviceMesh` of one dimension. None
          for those that share the experts.
        """
        ranks, total = self.group if group is None else _process_group(group), t.clone()
        with writes_no_weight(ranks, t.device):
            dist.all_reduce(total, group=ranks)
        return total

    def settings(self) -> str:
        """Return the settings in words, for ``explain()``."""
        of_hosts = " agreed by the hosts" if self.max_tokens is None else f" at most {self.max_tokens}"
        parts = [f"engine {self.engine.name!r}", f"{self.ranks} ranks"]
        if self._why_not_symmetric is not None and torch.cuda.is_available():
            parts[0] += f" (not 'symmetric': {self._why_not_symmetric})"
        if self.engine.static_shapes:
            parts.append(f"tokens per rank{of_hosts}")
        if self.capacity is not None:
            parts.append(f"capacity {self.capacity:g}, overflow {self.overflow!r}")
        if self.batch_rows is not None:
            parts.append(f"experts compute at most {rounded_up(self.batch_rows)} rows at a time")
        if self.dispatch_dtype is not None:
            parts.append(f"rows travel to the experts as {_named(self.dispatch_dtype)}")
        if self.combine_dtype is not None:
            parts.append(f"results travel as {_named(self.combine_dtype)}")
        parts.append(f"buffers of {self.engine.buffer_bytes()} bytes")
        waits = self.counts_rows or not self.engine.static_shapes
        return ", ".join([*parts, "HOST SYNC" if waits else "no host synchronisation"])

    def __copy__(self) -> ExpertParallel:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: object) -> ExpertParallel:
        return self  # the group is one of the process

    def __reduce__(self) -> NoReturn:
        raise InputError(
            f"{_WHO}: a process group cannot be pickled: save the state_dict of the model, and construct the model in "
            "each process"
        )

    def __repr__(self) -> str:
        wires = {"combine_dtype": self.combine_dtype, "dispatch_dtype": self.dispatch_dtype}
        of_wires = {name: None if dtype is None else _named(dtype) for name, dtype in wires.items()}
        given = {
            "max_tokens": self.max_tokens, "capacity": self.capacity, "batch_rows": self.batch_rows, **of_wires
        }  # fmt: skip
        settings = [f", {name}={value}" for name, value in given.items() if value is not None]
        return f"ExpertParallel(rank {self.rank} of {self.ranks}, engine={self.engine.name!r}{''.join(settings)})"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _process_group(group: Any) -> ProcessGroup:
    """Return the process group of the argument ``group``."""
    found = group
    if group is None:
        found = dist.group.WORLD
    elif hasattr(group, "get_group") and hasattr(group, "ndim"):  # a DeviceMesh
        if group.ndim != 1:
            raise InputError(f"{_WHO}: group: expected a mesh of one dimension, got {group}: pass mesh['ep']")
        found = group.get_group()
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError(f"{_WHO}: group: expected a group that this rank is in, rank {dist.get_rank()} is not")
    if not isinstance(found, dist.ProcessGroup):
        raise InputError(f"{_WHO}: group: expected a ProcessGroup, a DeviceMesh or None, got {said(group)}")
    if dist.get_rank(found) < 0:
        raise InputError(f"{_WHO}: group: expected a group that this rank is in, rank {dist.get_rank()} is not")
    return found
