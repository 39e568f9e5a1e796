"""The common parts of the rules of `products.py`: products of ranges of rows, and sums that leave for other ranks.

Axes: P ranks, N rows per rank in an exchange, T tokens of this rank, K chosen experts per token, R rows, H features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fusedmoe.base.lasting import lasting
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.expert_parallel.engine import Pending
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.sm90.launch import Part

SMS_FOR_BARRIER = 2
# of an exchange between two H100s, and of products of some rows beside it; and the factor between their times
LATENCY_US, LINK_GB_S = 20, 330
TFLOPS, DERIVATIVE_TFLOPS = 550, 300
MARGIN = 1.15
TILE = 128  # rows


def beside_exchange(options: KernelOptions, expert_parallel: ExpertParallel, chosen: int) -> KernelOptions:
    """Return the options of a product beside an exchange of tokens with K chosen experts."""
    return replace(options, exchange_sms=expert_parallel.engine.sms(chosen))


def experts_beside(
    expert_parallel: ExpertParallel, tokens: int, row_bytes: int, chosen: int, experts: int, row_flops: int, tflops: int
) -> int:
    """Return the number of experts whose products of this rank's rows take as long as an exchange.

    A product that computes some rows and then the others reads the weights of its experts twice. So it does
    this for no more experts than an exchange takes.

    - ``tokens``: P*N.
    - ``row_bytes``: of a row that travels.
    - ``chosen``, ``experts``: K, and the number of experts of this rank.
    - ``row_flops``, ``tflops``: the operations of a row of the product, and its speed.
    """
    each = tokens // expert_parallel.ranks
    exchange_us = LATENCY_US + (expert_parallel.ranks - 1) * each * row_bytes / LINK_GB_S / 1e3
    rows = each * chosen / (expert_parallel.ranks * experts) - TILE / 2  # in tiles that have no other rows
    if rows <= TILE / 2:
        return experts
    return min(experts, math.ceil(MARGIN * exchange_us / (rows * row_flops / tflops / 1e6)))


class Ranges:
    """Ranges of the rows of a call: those of this rank's tokens, of some experts, and the others.

    - ``offsets``, ``token_of_row``: tensors like those of the call.
    - ``tokens``: the tokens of all ranks.
    - ``experts``: the number of experts whose rows are divided.

    The parts that the methods give are those that a product takes as ``ranges``, see `functions.bind_grouped_gemm`.
    """

    def __init__(
        self, expert_parallel: ExpertParallel, offsets: Tensor, token_of_row: Tensor, tokens: int, experts: int
    ) -> None:
        rank, ranks = expert_parallel.rank, expert_parallel.ranks
        self._run = row_functions.bind_row_ranges(offsets, token_of_row, rank, ranks, tokens, experts)
        self._ranks = ranks

    def own_first(self, offsets: Tensor, token_of_row: Tensor, arriving: Pending, number: int) -> Iterator[Part]:
        """Yield this rank's rows, then, when the result of this number has arrived, those of the others."""
        own, others = self.own_and_others(offsets, token_of_row)
        yield own
        arriving.wait(number)
        yield others

    def own_and_others(self, offsets: Tensor, token_of_row: Tensor) -> tuple[Part, Part]:
        """Return this rank's rows, and those of the other ranks."""
        blocks = self._run(offsets, token_of_row)
        size = blocks.shape[0] // self._ranks
        return Part(blocks[:size]), Part(blocks[size:])


def bind_sum_over_ranks(like: Tensor, ranks: int, tokens: int) -> Callable[[Sequence[Tensor] | Tensor], Tensor]:
    """Return `sum_over_ranks` for parts of rows like ``like`` (P*N, H), of more than two ranks: one kernel."""
    each, device = like.shape[0] // ranks, like.device

    def rows_of_parts() -> Tensor:
        return torch.arange(tokens, device=device)[:, None] + each * torch.arange(ranks, device=device)

    row_of_part = lasting(rows_of_parts, device)
    total = slot_functions.bind_sum_slots(like, row_of_part, None)

    def run(parts: Sequence[Tensor] | Tensor) -> Tensor:
        assert isinstance(parts, torch.Tensor)
        return total(parts.flatten(0, 1), row_of_part)

    return run


class Returns:
    """Sums over the slots of tokens, of which those of other ranks' tokens leave first; then the sums over ranks.

    - ``rows``, ``row_of_slot``, ``scale``: tensors like those of the call: rows (R, H), their numbers (P*N, K), and a
      factor per row or None.
    - ``tokens``: T, the tokens of this rank.
    """

    def __init__(
        self, expert_parallel: ExpertParallel, rows: Tensor, row_of_slot: Tensor, scale: Tensor | None, tokens: int
    ) -> None:
        ranks, rank, every = expert_parallel.ranks, expert_parallel.rank, row_of_slot.shape[0]
        self.engine, self.rank, self.tokens = expert_parallel.engine, rank, tokens
        each = every // ranks
        self.own = slice(rank * each, (rank + 1) * each)
        self._sums = [
            (there, slot_functions.bind_sum_slots(rows, row_of_slot[there], scale))
            for there in (slice(0, self.own.start), slice(self.own.stop, every))
            if there.start < there.stop
        ]
        self._parts = rows.new_empty(every, rows.shape[1], device="meta")
        self._over_ranks = None
        if ranks == 2 and tokens:
            of_tokens = row_of_slot[self.own][:tokens]
            self._add_to_part = slot_functions.bind_sum_slots_and_part(rows, of_tokens, scale)
        elif tokens:
            self._sum_own = slot_functions.bind_sum_slots(rows, row_of_slot[self.own], scale)
            self._over_ranks = bind_sum_over_ranks(rows.new_empty(every, rows.shape[1]), ranks, tokens)

    def of_others(self, rows: Tensor, row_of_slot: Tensor, scale: Tensor | None, *like: Tensor) -> Tensor:
        """Return the sums for other ranks' tokens, in parts (P*N, H), for an exchange of these and of ``like``."""
        parts = self.engine.room([self._parts, *like], rows.device)[0]
        for there, total in self._sums:
            total(rows, row_of_slot[there], scale, None, parts[there])
        return parts

    def finished(
        self, leaving: Pending, parts: Tensor, rows: Tensor, row_of_slot: Tensor, scale: Tensor | None
    ) -> Tensor:
        """Return the results of this rank's tokens (T, H): the sum of its part and those of the others."""
        if not self.tokens:
            leaving.wait(0)
            return rows.new_empty(0, rows.shape[1])
        if self._over_ranks is None:
            part = leaving.wait(0)[1 - self.rank][: self.tokens]
            return self._add_to_part(rows, row_of_slot[self.own][: self.tokens], scale, part)
        self._sum_own(rows, row_of_slot[self.own], scale, None, parts[self.own])
        return self._over_ranks(leaving.wait(0))
