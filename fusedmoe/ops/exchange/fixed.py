"""The ops of expert parallelism: `GatherTokens` before a local `Dispatch`, `ReturnTokens` after its `Combine`.

`Dispatch` and `Combine` with ``expert_parallel=`` are replaced by them and by their own local forms. Each rank has some
of the experts. It gets the tokens of all ranks, computes for each token the part of its own experts, and returns the
parts to the tokens' ranks, which add them.

Axes: P ranks, T tokens of this rank, N rows per rank in the exchange (at least the T of every rank), K chosen experts
per token, E experts of all ranks, H features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.base.errors import InputError
from fusedmoe.base.estimating import has_values
from fusedmoe.base.recompute import backward_pass
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.expert_parallel.capacity import RowLimit, rows_of_ranks
from fusedmoe.expert_parallel.engine import Pending, Wanted, forbid_capture
from fusedmoe.expert_parallel.wire import FORMAT, LAUNCHES, packed, unpacked
from fusedmoe.numerics.formats import Format
from fusedmoe.numerics.formats.quantizers import DTYPES
from fusedmoe.ops.op import BackwardOp, Op, SpecLike, TensorSpec, exact
from fusedmoe.ops.state.amax import looking


def sum_over_ranks(parts: Sequence[Tensor] | Tensor, tokens: int) -> Tensor:
    """Return the sum of the first ``tokens`` rows of the ranks' parts (N, ...), in fp32, in rank order."""
    first, *others = [part[:tokens] for part in parts]
    if len(others) == 1:  # torch adds two values of 16 bits in fp32, and rounds the sum: one pass over memory
        return first + others[0]
    total = exact(first)
    for part in others:
        total = total + part
    return total.to(first.dtype)


def summed(expert_parallel: ExpertParallel, tensors: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Return the sums over ranks of the parts (P*N, ...) that they have of this rank's tokens; see `sum_over_ranks`."""
    found = expert_parallel.engine.sums_over_ranks(tensors, tokens)
    if found is None:
        found = [sum_over_ranks(parts, tokens) for parts in expert_parallel.engine.exchange(tensors)]
    return found


def check_wire(expert_parallel: ExpertParallel, dtype: torch.dtype) -> None:
    """Raise if tokens of this dtype cannot travel as the ranks want."""
    wire = expert_parallel.dispatch_dtype
    if wire is not None and dtype not in DTYPES:
        raise InputError(f"ExpertParallel: dispatch_dtype {wire}: expected tokens in fp32, bf16 or fp16, got {dtype}")


class Provider(nn.Module):
    """A module that returns the rows and the values that it provides."""

    def values_from(
        self, x: Tensor, result: tuple[Tensor, dict[str, Tensor]], names: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows and the provided values; see `Op.values_from`."""
        return result


class AgreeOnTokens(Provider):
    """Tells a chain N, the largest number of tokens of a rank, as the size of an empty tensor ``rank_rows`` (N, 0).

    It is no op: N depends on the other ranks, and not on the shapes of this one. The hosts exchange their T.
    """

    provides = ("rank_rows",)
    exchanges = True
    purpose = "the hosts agree on the largest number of tokens of a rank"

    def __init__(self, expert_parallel: ExpertParallel) -> None:
        super().__init__()
        self.expert_parallel = expert_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows and ``rank_rows``; while `explain` looks, as if every rank had the T of this one."""
        tokens = x.shape[0]
        most = tokens if looking() else self.expert_parallel.most_tokens(tokens)
        return x, {"rank_rows": x.new_empty(most, 0)}


class CountRows(Provider):
    """Tells a chain R, the rows of a local `Dispatch`, as the size of an empty tensor ``local_rows`` (R, 0).

    R is that of the limit; if a rank needs more, that without a capacity; and if a token chooses an expert so often
    that a rank needs even more, one row for each slot. The ranks add up the rows of each rank, and
    the hosts read them: a host synchronisation. No CUDA graph can capture it.

    - ``num_experts``: E, of all ranks.
    """

    provides = ("local_rows",)
    purpose = "the hosts read the numbers of rows (overflow='rerun'): HOST SYNC"

    def __init__(self, num_experts: int, limit: RowLimit, expert_parallel: ExpertParallel) -> None:
        super().__init__()
        self.num_experts, self.limit, self.expert_parallel = num_experts, limit, expert_parallel
        agreed = () if expert_parallel.max_tokens is not None else ("rank_rows",)
        self.runtime_inputs = ("expert_index", *agreed)

    def forward(
        self, x: Tensor, expert_index: Tensor, rank_rows: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows and ``local_rows``; while `explain` looks, as if no rank needed more than the limit."""
        ep, chosen = self.expert_parallel, expert_index.shape[1]
        most = ep.max_tokens if rank_rows is None else rank_rows.shape[0]
        assert most is not None
        tokens = ep.ranks * most
        rows, bound = (limit.rows(tokens, chosen) for limit in (self.limit, replace(self.limit, capacity=None)))
        if rows < tokens * chosen and not looking():
            forbid_capture(expert_index, "overflow='rerun'")
            needed = int(ep.sum_over_ranks(rows_of_ranks(expert_index, ep.ranks, self.limit.experts)).max())
            rows = next(r for r in (rows, bound, tokens * chosen) if needed <= r)
        return x, {"local_rows": x.new_empty(rows, 0)}


class GatherTokens(Op):
    """``rows[r * N + t] = x[t]`` of rank r: the tokens of all ranks, with their experts and weights.

    - ``num_experts``: E, of all ranks.

    Called with ``x`` (T, H), ``expert_index`` (T, K), ``expert_weight`` (T, K) and, unless ``max_tokens`` is set,
    ``rank_rows`` (N, 0). Returns (P*N, H), and provides ``gathered_index`` (P*N, K) int32, in which the experts of this
    rank are 0 to E / P - 1, and all other ids are sentinels, and ``gathered_weight`` (P*N, K).

    Each gradient is the sum over the ranks of their parts, in fp32, in rank order.

    With ``dispatch_dtype``, the tokens travel as FP8 codes, and those of this rank are rounded too. The gradient of the
    rounding is the identity.
    """

    travels = ("output", "gathered_index", "gathered_weight")
    changes_rows = True

    @property
    def launches(self) -> int:  # type: ignore[override]
        """More with ``dispatch_dtype``, to quantize and dequantize."""
        return 6 + (LAUNCHES if self.travels_as else 0)

    @property
    def travels_as(self) -> Mapping[str, Format]:  # type: ignore[override]
        """Tokens as FP8 codes, if the ranks have a ``dispatch_dtype``."""
        return {} if self.expert_parallel.dispatch_dtype is None else {"output": FORMAT}

    def __init__(self, num_experts: int, expert_parallel: ExpertParallel) -> None:
        super().__init__()
        self.num_experts, self.expert_parallel = num_experts, expert_parallel
        self.alone = expert_parallel.batch_rows is not None
        agreed = () if expert_parallel.max_tokens is not None else ("rank_rows",)
        self.runtime_inputs = ("expert_index", "expert_weight", *agreed)
        # empty tensors: one with E / P as its size, and one with the dtype of the rows, for ops that get rows in fp32
        typed = () if expert_parallel.combine_dtype is None else ("row_dtype",)
        self.provides = ("gathered_index", "gathered_weight", "rank_experts", *typed)

    def infer(
        self, x: SpecLike, expert_index: SpecLike, expert_weight: SpecLike, rank_rows: SpecLike | None = None
    ) -> tuple[TensorSpec, ...]:
        tokens, rows = x.shape[0], self._rows(rank_rows)
        if tokens > rows:
            raise self.reject("x", f"at most max_tokens={rows} tokens", tokens)
        check_wire(self.expert_parallel, x.dtype)
        total, chosen = self.expert_parallel.ranks * rows, expert_index.shape[1]
        return (
            TensorSpec((total, x.shape[1]), x.dtype),
            TensorSpec((total, chosen), torch.int32),
            TensorSpec((total, chosen), expert_weight.dtype),
            *[TensorSpec(shape, x.dtype) for shape in self._shapes_of_empty()],
        )

    def _shapes_of_empty(self) -> list[tuple[int, ...]]:
        """Return the shapes of the empty tensors among the provided values."""
        return [(self.expert_parallel.local_experts(self.num_experts), 0), (0,)][: len(self.provides) - 2]

    def empty(self, x: Tensor) -> list[Tensor]:
        """Return the empty tensors among the provided values, which come last."""
        return [x.new_empty(shape) for shape in self._shapes_of_empty()]

    def _rows(self, rank_rows: SpecLike | None) -> int:
        """Return N."""
        if rank_rows is not None:
            return rank_rows.shape[0]
        assert self.expert_parallel.max_tokens is not None
        return self.expert_parallel.max_tokens

    def compute(
        self, x: Tensor, expert_index: Tensor, expert_weight: Tensor, rank_rows: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        if looking():  # `explain` runs a chain before another one, on one rank alone
            specs = self.infer(x, expert_index, expert_weight, rank_rows)
            return tuple([x.new_zeros(spec.shape, dtype=spec.dtype) for spec in specs])
        index, weight, *tokens = self.start(x, expert_index, expert_weight, rank_rows).wait_all()
        return unpacked(tokens, x.dtype), self.counted(index), weight, *self.empty(x)

    def start(
        self,
        x: Tensor,
        expert_index: Tensor,
        expert_weight: Tensor,
        rank_rows: Tensor | None = None,
        tokens: Sequence[Tensor] | None = None,
    ) -> Pending:
        """Begin to gather expert ids, in which those of this rank are 0 to E / P - 1, weights, and tokens as `unpacked`
        takes them: the small ones first, so that a fused step can sort the rows while the tokens travel. Then run what
        the layer computes meanwhile: its shared expert.

        - ``tokens``: the result of `packed`, if the caller has it.
        """
        ep = self.expert_parallel
        if tokens is None:
            tokens = packed(x, ep.dispatch_dtype)
        ep.compare_experts(x)
        pending = ep.engine.start_gather_of_tokens(
            tokens, expert_index, expert_weight, self._rows(rank_rows), ep.local_experts(self.num_experts)
        )
        ep.run_beside()
        return pending

    def counted(self, index: Tensor) -> Tensor:
        """Return the gathered expert ids (P*N, K), after the slots without a row were counted, on all ranks.

        It may raise their error: every rank then raises it here, after it has started the exchange, so that none waits
        for another.
        """
        ep, here = self.expert_parallel, self.expert_parallel.local_experts(self.num_experts)
        rows = ep.row_limit(self.num_experts).rows(*index.shape)
        # a recomputation has the slots of the original call
        is_new = not looking() and has_values(index) and backward_pass() == -1
        if is_new and not ep.counts_rows and rows < index.numel():
            ep.slots_without_row.count(rows_of_ranks(index + ep.rank * here, ep.ranks, here), rows)
        return index

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return (DGatherTokens(self),)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, {self.expert_parallel}"


class DGatherTokens(BackwardOp):
    """``dx[t] = sum over ranks of drows[t]``, ``dexpert_weight[t] = sum over ranks of dgathered_weight[t]``.

    One step, so that every rank exchanges both in the same order. A gradient that is not wanted, or that nothing
    contributes to, is left out: without it, no rank exchanges the gradients of rows for tokens that want none.
    """

    zeroes_tail = True
    launches = 6
    op: GatherTokens
    _sources: ClassVar[Mapping[str, str]] = {"grad_input": "grad_output", "grad_expert_weight": "grad_gathered_weight"}
    travels = tuple(_sources.values())

    def __init__(self, op: GatherTokens, gives: Sequence[str] = tuple(_sources)) -> None:
        super().__init__(op)
        self.gives = tuple(gives)
        self.travels = tuple([self._sources[name] for name in gives])
        self.needs = (*self.travels, "expert_index")

    def only(self, gives: tuple[str, ...]) -> DGatherTokens:
        return DGatherTokens(self.op, gives)

    def given(self, gradients: Collection[str]) -> DGatherTokens:
        return DGatherTokens(self.op, [name for name in self.gives if self._sources[name] in gradients])

    def compute(self, *needs: Tensor | None) -> tuple[Tensor | None, ...]:
        *grads, expert_index = needs
        assert expert_index is not None
        ep, tokens = self.op.expert_parallel, expert_index.shape[0]
        arrived = [None if g is None else g.contiguous() for g in grads]
        given = [g for g in arrived if g is not None]
        sums = iter(summed(ep, given, tokens) if given else [])
        return tuple(None if g is None else next(sums) for g in arrived)


class ReturnTokens(Op):
    """``y[t] = sum over ranks of rows[t]``, in fp32, in rank order: each rank's part of the results of this one.

    Called with rows (P*N, H), the part of this rank for the tokens of all ranks, ``expert_index`` (T, K), and
    ``rank_experts`` (E / P, 0). A part is zero if the token chose no expert of the rank. Returns (T, H), in the dtype
    of ``row_dtype`` if the ranks have a ``combine_dtype``, which the rows then have.
    """

    travels = ("input",)
    changes_rows = True
    zeroes_tail = True  # the output has a row per token, and so no tail
    launches = 4

    def __init__(self, expert_parallel: ExpertParallel) -> None:
        super().__init__()
        self.expert_parallel = expert_parallel
        self.alone = expert_parallel.batch_rows is not None
        typed = () if expert_parallel.combine_dtype is None else ("row_dtype",)
        self.runtime_inputs = ("expert_index", "gathered_index", "rank_experts", *typed)

    def infer(
        self,
        x: SpecLike,
        expert_index: SpecLike,
        gathered_index: SpecLike,
        rank_experts: SpecLike,
        row_dtype: SpecLike | None = None,
    ) -> TensorSpec:
        if x.shape[0] != gathered_index.shape[0]:
            raise self.reject("x", f"{gathered_index.shape[0]} rows, one per token of all ranks", x.shape[0])
        return TensorSpec((expert_index.shape[0], *x.shape[1:]), x.dtype if row_dtype is None else row_dtype.dtype)

    def compute(
        self,
        x: Tensor,
        expert_index: Tensor,
        gathered_index: Tensor,
        rank_experts: Tensor,
        row_dtype: Tensor | None = None,
    ) -> Tensor:
        x = x.contiguous()
        (y,) = [x[: expert_index.shape[0]]] if looking() else summed(self.expert_parallel, [x], expert_index.shape[0])
        return y.to(x.dtype if row_dtype is None else row_dtype.dtype)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return (DReturnTokens(self),)

    def extra_repr(self) -> str:
        return str(self.expert_parallel)


class DReturnTokens(BackwardOp):
    """``drows[r * N + t] = dy[t]`` of rank r; rounded to FP8, if the ranks have a ``dispatch_dtype``."""

    needs = ("grad_output", "gathered_index", "rank_experts")
    travels = ("grad_input",)
    zeroes_tail = True
    op: ReturnTokens

    @property
    def launches(self) -> int:  # type: ignore[override]
        """More with ``dispatch_dtype``, to quantize and dequantize."""
        return 2 + (LAUNCHES if self.travels_as else 0)

    @property
    def travels_as(self) -> Mapping[str, Format]:  # type: ignore[override]
        """Gradients as FP8 codes, if the ranks have a ``dispatch_dtype``."""
        return {} if self.op.expert_parallel.dispatch_dtype is None else {"grad_input": FORMAT}

    def compute(self, grad_output: Tensor, gathered_index: Tensor, rank_experts: Tensor) -> Tensor:
        gathered = unpacked(self.start(grad_output, gathered_index, rank_experts).wait_all(), grad_output.dtype)
        return gathered if self.op.expert_parallel.combine_dtype is None else exact(gathered)

    def start(
        self,
        grad_output: Tensor,
        gathered_index: Tensor,
        rank_experts: Tensor,
        tensors: Sequence[Tensor] | None = None,
    ) -> Pending:
        """Begin to gather the gradients (T, H) of the tokens that chose an expert of this rank, as `unpacked` takes
        them.

        - ``tensors``: the result of `packed`, if the caller has it.
        """
        ep, wanted = self.op.expert_parallel, Wanted(gathered_index, rank_experts.shape[0])
        if tensors is None:
            tensors = packed(grad_output, ep.dispatch_dtype)
        return ep.engine.start_gather(tensors, gathered_index.shape[0] // ep.ranks, wanted)
