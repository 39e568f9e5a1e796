"""The exchange by a `VaryingEngine`, ``"alltoall"``: a token goes once to each rank that has some of its experts.

The numbers of rows depend on contents, which no op of a planned chain may do. So these are plain modules, which split
the chain: `GatherVaryingTokens` in place of `GatherTokens`, `ReturnVaryingTokens` in place of `ReturnTokens`.

Axes: P ranks, T tokens of this rank, S rows that this rank sends, G rows that it gets, K chosen experts per token, E
experts of all ranks, H features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fusedmoe.base.autocast import autocast_dtype, casts_rows
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.expert_parallel.engine import VaryingEngine, chosen_ids
from fusedmoe.expert_parallel.wire import packed, unpacked
from fusedmoe.ops.exchange.fixed import Provider, check_wire
from fusedmoe.ops.op import exact
from fusedmoe.ops.state.amax import looking

_T = TypeVar("_T")


class _Routes(NamedTuple):
    """The tokens that travel between the ranks."""

    engine: VaryingEngine | None  # None if all tokens stay here
    tokens: int  # T
    token_of_sent: Tensor  # (S,) int64, in the order of the ranks that get them, then of the tokens
    sent: list[int]  # rows for each rank
    received: list[int]  # rows from each rank


def _send(routes: _Routes, x: Tensor, wire: torch.dtype | None = None) -> Tensor:
    """Return the rows (G, ...) of all ranks' tokens for this one: by rank, then by token.

    They travel as `packed` has them for the ``dispatch_dtype`` ``wire``.
    """
    engine, rows = routes.engine, x[routes.token_of_sent]
    if engine is None:
        return rows
    arrived = [engine.exchange_rows(t, routes.sent, routes.received) for t in packed(rows, wire)]
    return unpacked(arrived, x.dtype)


def _sum(routes: _Routes, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum per token (T, ...) of what the ranks return for it, in fp32, in rank order."""
    if routes.engine is not None:
        rows = routes.engine.exchange_rows(rows, routes.received, routes.sent)
    total = exact(rows.new_zeros(routes.tokens, *rows.shape[1:]))
    for tokens, part in zip(routes.token_of_sent.split(routes.sent), rows.split(routes.sent), strict=True):
        total[tokens] = total[tokens] + part  # a rank has a token once: each sum has one place
    return total.to(dtype)


class _Send(torch.autograd.Function):
    """`_send` of several tensors, each with its ``wire``; `_Sum` is its gradient, since rounding's is the identity."""

    @staticmethod
    def forward(ctx: Any, routes: _Routes, wires: Sequence[torch.dtype | None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.routes, ctx.wires = routes, wires
        return tuple(_send(routes, t, wire) for t, wire in zip(tensors, wires, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        arrived, wires = _only(wanted, grads), _only(wanted, ctx.wires)
        summed = iter(_Sum.apply(ctx.routes, [g.dtype for g in arrived], wires, *arrived))  # type: ignore[no-untyped-call]
        return None, None, *(next(summed) if wants else None for wants in wanted)


class _Sum(torch.autograd.Function):
    """`_sum` of several tensors, each rounded to its dtype, in order. Their gradients travel with their ``wires``."""

    @staticmethod
    def forward(
        ctx: Any, routes: _Routes, dtypes: Sequence[torch.dtype], wires: Sequence[torch.dtype | None], *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.routes, ctx.dtypes, ctx.wires = routes, [t.dtype for t in rows], wires
        return tuple(_sum(routes, t, dtype) for t, dtype in zip(rows, dtypes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        arrived = _only(wanted, grads)
        sent = iter(_Send.apply(ctx.routes, _only(wanted, ctx.wires), *arrived))  # type: ignore[no-untyped-call]
        return (
            None,
            None,
            None,
            *(next(sent).to(d) if wants else None for d, wants in zip(ctx.dtypes, wanted, strict=True)),
        )


def _only(wanted: Sequence[bool], values: Sequence[_T]) -> list[_T]:
    """Return the values that are wanted."""
    return [value for value, wants in zip(values, wanted, strict=True) if wants]


def _stays(x: Tensor) -> bool:
    """Whether nothing may be sent: `explain` looks, or the tensors have no memory."""
    return looking() or isinstance(x, FakeTensor) or x.is_meta


class GatherVaryingTokens(Provider):
    """The tokens of all ranks that have an expert on this rank, in the order of the ranks, then of the tokens.

    - ``num_experts``: E, of all ranks.

    Called with ``x`` (T, H), ``expert_index`` (T, K) and ``expert_weight`` (T, K). Returns (G, H), and provides
    ``gathered_index`` (G, K) int32, in which the experts of this rank are 0 to E / P - 1, and others are sentinels,
    ``gathered_weight`` (G, K), ``local_rows`` (R, 0), where R is the number of their slots with an expert of this rank,
    ``row_dtype``, an empty tensor of the dtype of the rows, and for `ReturnVaryingTokens` ``token_of_sent`` (S,) and
    ``rows_per_rank`` (2, P) on the host: those sent and those received.

    Each gradient is the sum over the ranks of their parts, in fp32, in rank order.

    With ``dispatch_dtype``, the tokens are rounded as by `GatherTokens`.
    """

    runtime_inputs = ("expert_index", "expert_weight")
    provides = ("gathered_index", "gathered_weight", "local_rows", "row_dtype", "token_of_sent", "rows_per_rank")
    changes_rows = True
    exchanges = True
    purpose = "the hosts read the numbers of rows that travel: HOST SYNC"

    def __init__(self, num_experts: int, expert_parallel: ExpertParallel) -> None:
        super().__init__()
        self.num_experts, self.expert_parallel = num_experts, expert_parallel

    def forward(self, x: Tensor, expert_index: Tensor, expert_weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows and the provided values; if `explain` looks, as if all tokens stayed on this rank."""
        if casts_rows(x):
            x = x.to(autocast_dtype(x.device))  # as the chain would do after it: fewer bytes travel
        check_wire(self.expert_parallel, x.dtype)
        index = chosen_ids(expert_index, self.num_experts)
        routes, counts, slots = self._routes(x, index)
        with torch.no_grad():
            ep = self.expert_parallel
            index = _send(routes, index) - ep.rank * ep.local_experts(self.num_experts)
        wires = self.expert_parallel.dispatch_dtype, None
        rows, weight = _Send.apply(routes, wires, x, expert_weight)  # type: ignore[no-untyped-call]
        return rows, {
            "gathered_index": index,
            "gathered_weight": weight,
            "local_rows": x.new_empty(slots, 0),
            "row_dtype": x.new_empty(0),
            "token_of_sent": routes.token_of_sent,
            "rows_per_rank": counts,
        }

    def _routes(self, x: Tensor, index: Tensor) -> tuple[_Routes, Tensor, int]:
        """Return the routes, the rows sent to and received from each rank, (2, P) on the host, and R."""
        ep, tokens = self.expert_parallel, x.shape[0]
        if _stays(x):
            rows = [tokens if rank == ep.rank else 0 for rank in range(ep.ranks)]
            routes = _Routes(None, tokens, torch.arange(tokens, device=x.device), rows, rows)
            return routes, torch.tensor([rows, rows], device="cpu"), index.numel()
        engine = ep.engine
        assert isinstance(engine, VaryingEngine)
        ep.compare_experts(x)
        rank_of = index.div(ep.local_experts(self.num_experts), rounding_mode="floor")  # -1 for a sentinel
        ranks = torch.arange(ep.ranks, device=x.device, dtype=rank_of.dtype)
        chosen_PTK = rank_of == ranks.view(-1, 1, 1)
        goes_PT = chosen_PTK.any(-1)
        counts, slots = engine.counts(torch.stack([goes_PT.sum(1), chosen_PTK.sum((1, 2))], 1)).unbind(-1)
        sent, received = counts.tolist()
        # the number of tokens is known by now: nonzero() would wait for the device again
        places = goes_PT.flatten().to(torch.uint8).sort(descending=True, stable=True).indices[: sum(sent)]
        return _Routes(engine, tokens, places % max(tokens, 1), sent, received), counts, int(slots[1].sum())

    def extra_repr(self) -> str:
        """Return the settings, as `torch.nn.Module` prints them."""
        return f"num_experts={self.num_experts}, {self.expert_parallel}"


class ReturnVaryingTokens(nn.Module):
    """``y[t] = sum over ranks of rows[t]``, in fp32, in rank order, of the ranks that got token t.

    Called with rows (G, H), the part of this rank for the tokens that it got, and with the values of
    `GatherVaryingTokens`. Returns (T, H), in the dtype of the gathered rows. With ``dispatch_dtype``, the gradients are
    rounded as by `DReturnTokens`.
    """

    runtime_inputs = ("expert_index", "row_dtype", "token_of_sent", "rows_per_rank")
    changes_rows = True
    exchanges = True
    purpose = "the rows return, as many as the hosts have read"

    def __init__(self, expert_parallel: ExpertParallel) -> None:
        super().__init__()
        self.expert_parallel = expert_parallel

    def forward(
        self, x: Tensor, expert_index: Tensor, row_dtype: Tensor, token_of_sent: Tensor, rows_per_rank: Tensor
    ) -> Tensor:
        """Return the sums; if `explain` looks, as if all tokens had stayed on this rank."""
        tokens, ep = expert_index.shape[0], self.expert_parallel
        if _stays(x):
            rows = [tokens if rank == ep.rank else 0 for rank in range(ep.ranks)]
            routes = _Routes(None, tokens, token_of_sent, rows, rows)
        else:
            assert isinstance(ep.engine, VaryingEngine)
            routes = _Routes(ep.engine, tokens, token_of_sent, *rows_per_rank.tolist())
        (y,) = _Sum.apply(routes, [row_dtype.dtype], [ep.dispatch_dtype], x)  # type: ignore[no-untyped-call]
        return y  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the settings, as `torch.nn.Module` prints them."""
        return str(self.expert_parallel)
