"""`Dispatch` sorts tokens into rows by expert, `Combine` sums the rows per token.

Neither reads a tensor on the host, and no shape depends on the contents of a tensor.

Axes: T tokens, K chosen experts per token, R rows, E experts, H features. R = T*K, except for the experts of one of
several ranks, most of whose slots are those of other ranks; see `Dispatch.rows`.

A routing slot (t, k) whose expert id is outside [0, E) is a sentinel and is skipped, so that a token may choose fewer
than K experts. The rows of sentinels come after the rows of all experts. With R < T*K, only the first R slots in this
order have a row, and ``row_of_slot`` is R for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from fusedmoe.base.checks import INPUT_NAME, POSITIVE_INTEGER, Check, instance
from fusedmoe.base.errors import InputError
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.expert_parallel.capacity import RowLimit
from fusedmoe.numerics.expert_rows import gather_rows, sort_by_expert, tail_mask
from fusedmoe.ops.exchange.fixed import ReturnTokens
from fusedmoe.ops.exchange.varying import ReturnVaryingTokens
from fusedmoe.ops.op import BackwardOp, Op, SpecLike, TensorSpec, exact_together

_RANKS = instance(ExpertParallel, "an ExpertParallel").or_none()
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _sum_in_fp32(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.sum(dim, dtype=torch.promote_types(x.dtype, torch.float32)).to(dtype or x.dtype)


def return_of(ep: ExpertParallel) -> ReturnTokens | ReturnVaryingTokens:
    """Return the last module of `Combine` over these ranks."""
    return ReturnTokens(ep) if ep.engine.static_shapes else ReturnVaryingTokens(ep)


class Dispatch(Op):
    """``rows[r] = x[token of r]``, sorted by expert: one row per chosen expert of each token.

    Called with ``x`` (T, H), ``expert_index`` (T, K) integers and ``expert_weight`` (T, K) floats. Returns rows
    (R, H) and provides

    - ``splits`` (E,) int64: rows per expert;
    - ``probs`` (R,): the ``expert_weight`` of each row, zero after the last expert's rows;
    - ``row_of_slot`` (T, K) int64: the row of slot (t, k), R for a sentinel and for a slot without a row;
    - ``slot_of_row`` (R,) int64: the slot ``t * K + k`` of each row;
    - ``token_of_row`` (R,) int32: the token t of each row, ``slot_of_row // K``, also of a sentinel's row.

    The rows of an expert are in token order. The gradient of ``x`` sums a token's rows in fp32, in slot order.

    Parameters
    ----------
    num_experts
        E. None takes the ``num_groups`` of the next grouped op in the `Sequential`.
    expert_parallel
        The ranks that share the experts, an `ExpertParallel`. ``num_experts`` then counts the experts of all ranks, and
        the rows are those of this rank's experts, from the tokens of all ranks. `Combine` must get the same object.
        The op also provides the values with which `Combine` returns the rows.
    """

    runtime_inputs: tuple[str, ...] = ("expert_index", "expert_weight")
    provides: tuple[str, ...] = ("splits", "probs", "row_of_slot", "slot_of_row", "token_of_row")
    gathers: ClassVar[Mapping[str, tuple[str, str]]] = {"output": ("input", "token_of_row")}
    changes_rows = True
    launches = 15
    _checks: ClassVar[Mapping[str, Check]] = {"num_experts": POSITIVE_INTEGER.or_none(), "expert_parallel": _RANKS}

    def __init__(self, num_experts: int | None = None, *, expert_parallel: ExpertParallel | None = None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.expert_parallel = expert_parallel
        self.limit: RowLimit | None = None  # of the rows, see `rows`
        if expert_parallel is not None:
            if num_experts is None:
                raise InputError(
                    "Dispatch: num_experts: expected the experts of all ranks of expert_parallel, got None"
                )
            expert_parallel.local_experts(num_experts, "Dispatch")
            returned = return_of(expert_parallel).runtime_inputs
            self.provides = (*type(self).provides, *(name for name in returned if name != "expert_index"))

    @property
    def aliases(self) -> dict[str, str]:  # type: ignore[override]
        """The fixed names, for rules and backward ops, of index and weight: those of all ranks have other names."""
        return dict(zip(("expert_index", "expert_weight"), self.runtime_inputs, strict=False))

    def rows(self, expert_index: SpecLike, local_rows: SpecLike | None = None) -> int:
        """Return R: that of ``local_rows`` (R, 0) if it is given, else that of `limit`, else one row for each slot."""
        if local_rows is not None:
            return local_rows.shape[0]
        tokens, chosen = expert_index.shape
        return tokens * chosen if self.limit is None else self.limit.rows(tokens, chosen)

    def infer(
        self, x: SpecLike, expert_index: SpecLike, expert_weight: SpecLike, local_rows: SpecLike | None = None
    ) -> tuple[TensorSpec, ...]:
        if len(x.shape) != 2:
            raise self.reject("x", "shape (tokens, features)", x.shape)
        if len(expert_index.shape) != 2 or expert_index.shape[0] != x.shape[0]:
            raise self.reject("expert_index", f"shape ({x.shape[0]}, experts per token)", expert_index.shape)
        if expert_index.dtype not in _INTEGERS:
            raise self.reject("expert_index", "integers", expert_index.dtype)
        if tuple(expert_weight.shape) != tuple(expert_index.shape):
            raise self.reject(
                "expert_weight", f"shape {tuple(expert_index.shape)}, as expert_index", expert_weight.shape
            )
        self.check_floats("expert_weight", expert_weight.dtype)
        tokens, chosen = expert_index.shape
        rows = self.rows(expert_index, local_rows)
        if local_rows is not None and rows > tokens * chosen:
            raise self.reject("local_rows", f"shape (R, 0), R at most {tokens * chosen}", local_rows.shape)
        assert self.num_experts is not None, "fusedmoe.call.placing has set it"
        return (
            TensorSpec((rows, x.shape[1]), x.dtype),
            TensorSpec((self.num_experts,), torch.int64),
            TensorSpec((rows,), expert_weight.dtype),
            TensorSpec((tokens, chosen), torch.int64),
            TensorSpec((rows,), torch.int64),
            TensorSpec((rows,), torch.int32),
        )

    def compute(
        self, x: Tensor, expert_index: Tensor, expert_weight: Tensor, local_rows: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        assert self.num_experts is not None, "fusedmoe.call.placing has set it"
        slot_of_row, row_of_slot, splits = sort_by_expert(
            expert_index, self.num_experts, self.rows(expert_index, local_rows)
        )
        token_of_row = slot_of_row // max(expert_index.shape[1], 1)
        rows = x[token_of_row] if token_of_row.numel() else x.new_empty(0, x.shape[1])
        probs = expert_weight.reshape(-1)[slot_of_row].masked_fill_(
            tail_mask(splits.sum(0, keepdim=True), rows.shape[0]), 0
        )
        return rows, splits, probs, row_of_slot, slot_of_row, token_of_row.to(torch.int32)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return DispatchWeightGrad(self), DDispatch(self)

    def extra_repr(self) -> str:
        parts = [] if self.num_experts is None else [f"num_experts={self.num_experts}"]
        return ", ".join(parts if self.expert_parallel is None else [*parts, str(self.expert_parallel)])


class DDispatch(BackwardOp):
    """``dx[t] = sum over k of drows[row_of_slot[t, k]]``, in fp32."""

    reads_tail = False
    needs = ("grad_output", "row_of_slot")
    zeroes_tail = True
    launches = 5

    def compute(self, grad_output: Tensor, row_of_slot: Tensor) -> Tensor:
        return _sum_in_fp32(gather_rows(grad_output, row_of_slot), 1)


class DispatchWeightGrad(BackwardOp):
    """``dexpert_weight[t, k] = dprobs[row_of_slot[t, k]]``."""

    reads_tail = False
    needs = ("grad_probs", "row_of_slot")
    gives = ("grad_expert_weight",)
    zeroes_tail = True
    launches = 4

    def compute(self, grad_probs: Tensor, row_of_slot: Tensor) -> Tensor:
        return gather_rows(grad_probs, row_of_slot)


class Combine(Op):
    """``y[t] = sum over k of w[row] * rows[row]``, ``row = row_of_slot[t, k]``, in fp32: the inverse of `Dispatch`.

    Called with rows (R, H) and the values that `Dispatch` provides: ``row_of_slot`` (T, K), ``slot_of_row`` (R,) and,
    unless ``weights`` is None, ``probs`` (R,). Returns (T, H) in the dtype of the rows. A token whose slots are all
    sentinels gets zeros.

    Parameters
    ----------
    weights
        Name of the runtime input w (R,), the weights of the rows; None for w = 1, if an earlier `Scale` applies the
        weights. The name cannot be changed later.
    expert_parallel
        That of the `Dispatch`. The rows of a token on other ranks are added too: in fp32, in the order of the ranks.

    Attributes
    ----------
    output_dtype : torch.dtype or None
        The least dtype of the output, if it is not that of the rows. The op then also takes ``row_dtype``, an empty
        tensor of the rows' dtype. `ExpertParallel` sets it in the op that runs.
    """

    reads_tail = False
    provided_with: ClassVar[Mapping[str, str]] = {"token_of_row": "slot_of_row"}
    changes_rows = True
    zeroes_tail = True  # the output has a row per token, and so no tail
    launches = 7
    _checks: ClassVar[Mapping[str, Check]] = {"weights": INPUT_NAME.or_none(), "expert_parallel": _RANKS}
    _fixed = ("weights", "expert_parallel")

    def __init__(self, weights: str | None = "probs", *, expert_parallel: ExpertParallel | None = None) -> None:
        super().__init__()
        self.weights = weights
        self.expert_parallel = expert_parallel
        self.output_dtype: torch.dtype | None = None
        self.rowwise_inputs = self.applies = () if self.weights is None else (self.weights,)
        of_ranks = () if expert_parallel is None else return_of(expert_parallel).runtime_inputs
        self.runtime_inputs = ("row_of_slot", "slot_of_row", *self.applies, *of_ranks)

    def weighted_by(self, weights: str) -> Combine:
        """Return a copy that applies the weights of this name, on one rank."""
        made = Combine(weights)
        made.output_dtype = self.output_dtype
        made.runtime_inputs = (*made.runtime_inputs, *self.runtime_inputs[len(Combine(None).runtime_inputs) :])
        return made

    def infer(self, x: SpecLike, row_of_slot: SpecLike, slot_of_row: SpecLike, *others: SpecLike) -> TensorSpec:
        probs = None if self.weights is None else others[0]
        if len(x.shape) != 2:
            raise self.reject("x", "shape (rows, features)", x.shape)
        rows = x.shape[0]
        if len(row_of_slot.shape) != 2 or row_of_slot.shape[0] * row_of_slot.shape[1] < rows:
            raise self.reject(
                "row_of_slot", f"shape (tokens, experts per token) of at least {rows} slots, the number of rows",
                row_of_slot.shape,
            )  # fmt: skip
        if tuple(slot_of_row.shape) != (rows,):
            raise self.reject("slot_of_row", f"shape ({rows},)", slot_of_row.shape)
        self.check_floats("x", x.dtype)
        if probs is not None:
            if tuple(probs.shape) != (rows,):
                raise self.reject(str(self.weights), f"shape ({rows},), one weight per row", probs.shape)
            self.check_floats(str(self.weights), probs.dtype)
        return TensorSpec((row_of_slot.shape[0], x.shape[1]), self._dtype_for(x))

    def _dtype_for(self, x: SpecLike) -> torch.dtype:
        return x.dtype if self.output_dtype is None else torch.promote_types(x.dtype, self.output_dtype)

    def compute(self, x: Tensor, row_of_slot: Tensor, slot_of_row: Tensor, *others: Tensor) -> Tensor:
        slots_TKH, dtype = gather_rows(x, row_of_slot), self._dtype_for(x)
        if self.weights is None:
            return _sum_in_fp32(slots_TKH, 1, dtype)
        rows, weights = exact_together(slots_TKH, gather_rows(others[0], row_of_slot).unsqueeze(-1))
        return (rows * weights).sum(1).to(dtype)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return (DCombine(self),) if self.weights is None else (CombineWeightGrad(self), DCombine(self))

    def extra_repr(self) -> str:
        parts = [] if self.weights == "probs" else [f"weights={self.weights!r}"]
        return ", ".join(parts if self.expert_parallel is None else [*parts, str(self.expert_parallel)])


def _token_rows(grad_output: Tensor, row_of_slot: Tensor, slot_of_row: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``dy[token of r]`` for every row, and the mask of the rows without an expert."""
    rows = slot_of_row.shape[0]
    if rows == 0:
        return grad_output.new_empty(0, grad_output.shape[1]), slot_of_row.new_empty(0, dtype=torch.bool)
    used = (row_of_slot < rows).sum().view(1)
    return grad_output[slot_of_row // row_of_slot.shape[1]], tail_mask(used, rows)


class DCombine(BackwardOp):
    """``drows[r] = w[r] * dy[token of r]``; zeros for rows without an expert."""

    reads_tail = False
    zeroes_tail = True
    launches = 9
    op: Combine

    def __init__(self, op: Combine) -> None:
        super().__init__(op)
        self.needs = ("grad_output", *op.runtime_inputs)
        if op.weights is None and op.output_dtype is None:
            self.gathers = {"grad_input": ("grad_output", "token_of_row")}

    def compute(self, grad_output: Tensor, row_of_slot: Tensor, slot_of_row: Tensor, *others: Tensor) -> Tensor:
        dy, tail = _token_rows(grad_output, row_of_slot, slot_of_row)
        dtype = dy.dtype if self.op.output_dtype is None else others[-1].dtype
        if self.op.weights is not None:
            rows, weights = exact_together(dy, others[0].unsqueeze(-1))
            dy = rows * weights
        return dy.to(dtype).masked_fill_(tail.unsqueeze(-1), 0)


class CombineWeightGrad(BackwardOp):
    """``dw[r] = sum over features of rows[r] * dy[token of r]``; zeros for rows without an expert."""

    reads_tail = False
    zeroes_tail = True
    launches = 9
    op: Combine

    def __init__(self, op: Combine) -> None:
        super().__init__(op)
        self.needs = ("grad_output", "input", *op.runtime_inputs)
        self.gives = (f"grad_{op.weights}",)

    def compute(
        self, grad_output: Tensor, x: Tensor, row_of_slot: Tensor, slot_of_row: Tensor, probs: Tensor, *others: Tensor
    ) -> Tensor:
        dy, tail = _token_rows(grad_output, row_of_slot, slot_of_row)
        exact_dy, exact_x, _ = exact_together(dy, x, probs)
        return (exact_dy * exact_x).sum(1).to(probs.dtype).masked_fill_(tail, 0)
