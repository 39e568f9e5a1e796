"""The common parts of the rules that compute while rows travel between the ranks of `ExpertParallel`: products of
ranges of rows, and sums that leave for other ranks.

A product then computes the rows in parts, by experts or by the ranks of their tokens, in whole tiles: it has the same
tiles as otherwise, so that the results have the same bits (kernels/rows/move/ranges.py). A step makes the same
exchanges as the plain steps, in the same order. So it does not matter if the ranks choose different steps.

With an engine whose exchanges are kernels (``by_kernels``), a product begins beside the kernel of an exchange, on the
SMs that this leaves, and gets the others when it ends. It follows arriving rows by blocks of experts, or rank by rank
if a rank has few experts or rows are codes. A kernel that sums leaving rows follows the product, by blocks of experts
or rank by rank. With another engine, the product is launched once for this rank's rows, and once for the others when
they are there. It then leaves some SMs to the kernels of the exchange, except in the first layer: the expert ids, by
which rows are sorted, have arrived, so these kernels have their SMs.

Axes: P ranks, N rows per rank in an exchange, T tokens of this rank, K chosen experts per token, R rows, H features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedmoe.base.lasting import row_of_first_slot
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.expert_parallel.engine import Pending
from fusedmoe.fusion.language.rule import NothingToDo, require
from fusedmoe.kernels.exchange import functions as exchange_functions
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.rows.move.functions import MOST_RANKS
from fusedmoe.kernels.rows.quantize.block_functions import Form
from fusedmoe.kernels.sm90.launch import Part
from fusedmoe.numerics.formats import QuantizedSpec
from fusedmoe.ops.exchange.fixed import GatherTokens, ReturnTokens, sum_over_ranks
from fusedmoe.ops.op import SpecLike, TensorSpec

# of the kernel that sums rows for other ranks, even numbers: beside the product of the rows, at least and at most;
# beside another product; alone
LEAST_SMS, MOST_SMS, BESIDE_SMS, ALONE_SMS = 8, 32, 16, 64
QUICK_US = 6.0  # of the product of a rank's rows, for which nothing is hidden
# of an exchange between two H100s, and of products of some rows beside it; and the factor between their times, also for
# products of so few rows that each division costs the time to read weights
LATENCY_US, LINK_GB_S = 20, 330
TFLOPS, DERIVATIVE_TFLOPS, FP8_TFLOPS, FP8_DERIVATIVE_TFLOPS, MEMORY_GB_S = 650, 475, 1000, 600, 3000
MARGIN, FEW_ROWS_MARGIN = 1.15, 0.5
# GB/s: of sums that leave beside a product; of an SM that sums or copies beside a product
LEAVING_GB_S, SM_GB_S = 310, 40
SMS = 132  # of an H100
TILE = 128  # rows
OWN_TILES = 4  # of an expert's own rows, at least, if they come first
HALF_EXPERTS = 1  # of a token here: sums leave in halves only if there are more, on average
HALF_TILES = 4  # of an expert's rows in half of the tokens, at least, if sums leave in halves
LEAST_BLOCKS = 16  # of experts, if a product and the kernel beside it follow each other by experts


def nbytes(*specs: SpecLike) -> int:
    """Return the bytes of tensors."""
    plain = [s if isinstance(s, QuantizedSpec) else TensorSpec(tuple(map(int, s.shape)), s.dtype) for s in specs]
    return sum(s.nbytes for s in plain)


def require_ranks(op: GatherTokens | ReturnTokens) -> None:
    """Decline silently if nothing travels."""
    if op.expert_parallel.ranks == 1:
        raise NothingToDo("one rank exchanges nothing")


def require_few_ranks(expert_parallel: ExpertParallel) -> None:
    """Decline more ranks than rows can be divided by."""
    ranks = expert_parallel.ranks
    require(ranks <= MOST_RANKS, "%d ranks: the kernel that divides rows by ranks has at most %d", ranks, MOST_RANKS)


def beside_exchange(options: KernelOptions, expert_parallel: ExpertParallel) -> KernelOptions:
    """Return the options of a product beside an exchange of tokens."""
    return replace(options, exchange_sms=expert_parallel.engine.sms)


def experts_beside(
    expert_parallel: ExpertParallel,
    tokens: int,
    row_bytes: int,
    chosen: int,
    experts: int,
    row_flops: int,
    tflops: int,
    more_us: float = 0.0,
) -> int:
    """Return the number of experts whose rows are divided by ranks, so that their products take as long as an exchange.

    A product that computes the rows of one rank after those of another reads the weights of its experts several times.
    So it does this for no more experts than an exchange takes. An engine that tells of each rank's rows leaves the
    products of the rows of all ranks except the last to hide the exchange; others leave those of this rank's rows.

    - ``tokens``: P*N.
    - ``row_bytes``: of a row that travels.
    - ``chosen``, ``experts``: K, and the number of experts of this rank.
    - ``row_flops``, ``tflops``: the operations of a row of the product, and its speed.
    - ``more_us``: from the arrival of the last rows until the product can read them.
    """
    ranks = expert_parallel.ranks
    each, of_rank = tokens // ranks, tokens * chosen / (ranks * ranks * experts)  # rows of a rank, of an expert too
    exchange_us = LATENCY_US + (ranks - 1) * each * row_bytes / LINK_GB_S / 1e3 + more_us
    row_us, margin = row_flops / tflops / 1e6, MARGIN
    if expert_parallel.engine.by_kernels:
        us = (ranks - 1) * of_rank * row_us
        if reads_weights(expert_parallel, tokens, chosen, experts, row_flops, tflops):
            us, margin = (ranks - 1) * us_of_weight(row_flops), FEW_ROWS_MARGIN
    elif of_rank <= TILE:
        return experts
    else:
        us = (of_rank - TILE / 2) * row_us  # of tiles that have no other rows
    return min(experts, math.ceil(margin * exchange_us / us))


def us_of_weight(row_flops: int) -> float:
    """Return the time to read an expert's weight. An element of it is two operations of a row, and two bytes."""
    return row_flops / MEMORY_GB_S / 1e3


def reads_weights(
    expert_parallel: ExpertParallel, tokens: int, chosen: int, experts: int, row_flops: int, tflops: int
) -> bool:
    """Whether the product of the rows of one rank takes as long as to read the weights: each expert has few of them."""
    return us_of_step(expert_parallel, tokens, chosen, row_flops, tflops) < experts * us_of_weight(row_flops)


def sms_of_leaving(
    expert_parallel: ExpertParallel,
    tokens: int,
    row_bytes: int,
    chosen: int,
    product_us: float,
    experts: int = 0,
    halves: bool = False,
) -> int:
    """Return the SMs on which sums leave beside the product of their rows: those with which both end first.

    The product takes one block after the other. When a block is done, its sums can leave, after those of the blocks
    before. By ranks, each block has as many. By experts, a token is in the block of the last of its experts here, so
    later blocks have more. In halves, the half with this rank's own tokens comes last, and fewer of it leave.

    - ``tokens``, ``row_bytes``, ``chosen``: as of `experts_beside`.
    - ``product_us``: the time of the product on all SMs.
    - ``experts``: those of this rank if sums leave by experts, else 0.
    - ``halves``: see `in_halves`.
    """
    ranks = expert_parallel.ranks
    leaving = tokens * (ranks - 1) // ranks * row_bytes
    moved = leaving * (1 + chosen / ranks)  # the rows of sums are read
    blocks, more, of_token = ranks - 1, 1, 1.0  # the rows of this rank's own tokens are the last block
    parts = [(1.0, 1.0)]  # of the product and of the sums, one after the other
    if experts:
        blocks, more = -(-experts // row_functions.experts_of_block(experts, halves=halves)), 0
        of_token = max(of_token, chosen / ranks)  # experts here
    if halves:
        low = ranks // 2
        others = ranks - low if expert_parallel.rank < low else low  # the ranks of the first half
        first = others / ranks, others / (ranks - 1)
        parts = [first, (1 - first[0], 1 - first[1])]

    def us(sms: int) -> float:
        product = product_us * SMS / (SMS - sms)
        sums = max(leaving / LEAVING_GB_S, moved / (sms * SM_GB_S)) / 1e3
        end, begin, left = product, 0.0, 1.0
        for of_product, of_sums in parts:
            for i in range(blocks):
                done = begin + product * of_product * (i + 1) / (blocks + more)
                end = max(end, done + sums * (left - of_sums * float((i / blocks) ** of_token)))
            begin, left = begin + product * of_product, left - of_sums
        return end

    return min(range(LEAST_SMS, MOST_SMS + 1, 4), key=us)


def us_of_step(expert_parallel: ExpertParallel, tokens: int, chosen: int, row_flops: int, tflops: int) -> float:
    """Return the time of the product of the rows that this rank's experts have of one rank; see `experts_beside`."""
    return tokens * chosen / expert_parallel.ranks**2 * row_flops / tflops / 1e6


def own_rows_first(expert_parallel: ExpertParallel, tokens: int, chosen: int, experts: int) -> bool:
    """Whether a product that follows arriving rows by experts computes this rank's rows first: each expert has several
    tiles of them. Weights are then read twice. Without own rows, the product would follow the exchange from the start,
    which first brings the most rows: a token comes with its first expert.

    - ``tokens``, ``chosen``, ``experts``: as of `experts_beside`.
    """
    return tokens * chosen / (expert_parallel.ranks**2 * experts) >= OWN_TILES * TILE


def in_halves(expert_parallel: ExpertParallel, tokens: int, chosen: int, experts: int) -> bool:
    """Whether a product whose sums leave by experts computes the half of the tokens without this rank's own first: a
    token has several experts here, and each expert several tiles of a half, on average. Weights are then read twice.
    Without halves, most sums of tokens with several experts here are complete with the last blocks.

    - ``tokens``, ``chosen``, ``experts``: as of `experts_beside`.
    """
    ranks = expert_parallel.ranks
    return chosen / ranks > HALF_EXPERTS and tokens * chosen / (ranks * experts) / 2 >= HALF_TILES * TILE


def is_quick(expert_parallel: ExpertParallel, us: float) -> bool:
    """Whether an exchange beside products of `us_of_step` is so quick that one launch for all rows is better: it hides
    nothing, but neither a division of rows by ranks nor more launches are needed. Only if kernels make the exchange.
    """
    return expert_parallel.engine.by_kernels and us < QUICK_US


class Ranges:
    """Ranges of the rows of a call, by experts or by the ranks of their tokens.

    - ``offsets``, ``token_of_row``: tensors like those of the call.
    - ``tokens``: the tokens of all ranks.
    - ``experts``: the number of experts whose rows are divided.
    - ``zero_tail``: as of `KernelOptions`.
    - ``own_first``: of a product that follows arriving rows by experts, whether this rank's rows come first; see
      `own_rows_first`.
    - ``halves``: of a product whose sums leave by experts, whether it computes the tokens in halves; see `in_halves`.
    - ``tile``, ``paddings``: for ranges by ranks, see `bind_row_ranges`. With ``paddings``, only `scattered` may be
      called.

    The parts that the methods give are those that a product takes with ``ranges``, see `products.bind_grouped_gemm`.
    """

    def __init__(
        self,
        expert_parallel: ExpertParallel,
        offsets: Tensor,
        token_of_row: Tensor,
        tokens: int,
        experts: int,
        zero_tail: bool,
        own_first: bool = False,
        halves: bool = False,
        tile: int = TILE,
        paddings: bool = False,
    ) -> None:
        assert not (own_first and halves), "rows arrive with own rows first, and sums leave in halves"
        self._ranks, each = expert_parallel.ranks, tokens // expert_parallel.ranks
        self._run = row_functions.bind_row_ranges(
            offsets, token_of_row, expert_parallel.rank, self._ranks, tokens, experts, zero_tail, tile, paddings
        )
        experts_here = offsets.shape[0]
        self.by_experts = experts_here >= LEAST_BLOCKS  # whether kernels beside a product follow blocks of experts
        self.half = self._ranks // 2 * each if halves and self.by_experts else 0
        if self.by_experts:
            self._own_first, self._block = own_first, row_functions.experts_of_block(experts_here, own_first)
            own = (expert_parallel.rank, each) if own_first or self.half else None
            self._blocks_of_experts = row_functions.bind_expert_blocks(offsets, token_of_row, zero_tail, own, self.half)

    def arriving(self, offsets: Tensor, token_of_row: Tensor, pending: Pending, number: int) -> Iterator[Part]:
        """Yield this rank's rows, then, when the result of this number has arrived, those of the others. If a kernel
        can follow the rows, yield all of them as one part. Its product waits for the rows of each block of experts, or
        for those of each rank if there are few experts.
        """
        if pending.arrivals and self.by_experts:
            blocks = self._blocks_of_experts(offsets, token_of_row, pending.arrivals)
            words = blocks.view(-1, 2 * (len(offsets) + 1) + 2)
            if self._own_first:  # a word for two blocks, after that of own rows
                words = words[:-1].view(-1, 2 * words.shape[1])
            pending.follow(words, self._block)
            yield Part(blocks, beside=True)
            return
        blocks = self._run(offsets, token_of_row, pending.arrivals)
        if pending.arrivals:
            pending.follow(blocks.view(self._ranks, -1))
            yield Part(blocks, beside=True)
            return
        size = blocks.shape[0] // self._ranks
        yield Part(blocks[:size])
        pending.wait(number)
        yield Part(blocks[size:])

    def scattered(
        self, offsets: Tensor, token_of_row: Tensor, row_of_slot: Tensor, pending: Pending, number: int,
        scatter: Callable[..., Form],
    ) -> tuple[Form, list[Part]]:  # fmt: skip
        """Return the codes and scales of rows, and all rows as one part, for a product in FP8. If a kernel can follow
        the rows, other ranks' are still written, rank after rank, and the product waits for each rank's.

        - ``number``: of the result with the scales of tokens. Their codes are the next one, and the last.
        - ``scatter``: the function of `bind_scatter`.
        """
        if not pending.arrivals:
            scale, codes = pending.wait(number), pending.wait(number + 1)
            return scatter(codes, scale, row_of_slot), [Part(self._run(offsets, token_of_row, 0))]
        scale, codes = pending.unfinished(number), pending.unfinished(number + 1)
        arrived = offsets.new_full((self._ranks, 1), -pending.arrivals)
        blocks = self._run(offsets, token_of_row, exchange_functions.SCATTER_ARRIVALS)
        rows = scatter(codes, scale, row_of_slot, None, arrived)
        pending.follow(arrived)
        lines = blocks[: self._ranks * (2 * (len(offsets) + 1) + 2)].view(self._ranks, -1)
        scatter(codes, scale, row_of_slot, rows, arrived, lines)
        return rows, [Part(blocks, beside=True)]

    def leaving(self, offsets: Tensor, token_of_row: Tensor, by_experts: bool = False) -> Tensor:
        """Return the blocks of all rows, in the order in which they leave: by ranks, this one's own rows are last."""
        if by_experts:
            return self._blocks_of_experts(offsets, token_of_row, 0)
        return self._run(offsets, token_of_row, 0, True)

    def before_own(self, offsets: Tensor, token_of_row: Tensor) -> tuple[Part, Part]:
        """Return the rows of the other ranks, and this rank's own."""
        blocks = self.leaving(offsets, token_of_row)
        size = blocks.shape[0] // self._ranks
        return Part(blocks[:-size]), Part(blocks[-size:])


def bind_sum_over_ranks(like: Tensor, ranks: int, tokens: int) -> Callable[[Sequence[Tensor] | Tensor], Tensor]:
    """Return `sum_over_ranks` for parts of rows like ``like`` (P*N, H), of more than two ranks."""
    every, device = like.shape[0], like.device

    def rows_of_parts() -> Tensor:  # in each call: a plan, of which each number of tokens has one, keeps no memory
        rows = row_of_first_slot(every, 1, device)
        return rows.view(ranks, every // ranks)[:, :tokens].T.contiguous()

    total = slot_functions.bind_sum_slots(like, like.new_empty(tokens, ranks, dtype=torch.int64), None)

    def run(parts: Sequence[Tensor] | Tensor) -> Tensor:
        assert isinstance(parts, torch.Tensor)
        return total(parts.flatten(0, 1), rows_of_parts())

    return run


class Leaving(Protocol):
    """Sums for other ranks that leave in one call."""

    def leave(self) -> None:
        """Let the sums leave, after the launch that gives their rows."""

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Return the results of this rank's tokens, and the sums of the values."""


class Returns:
    """Sums over the slots of tokens, of which those of other ranks' tokens leave first; then the sums over ranks.

    - ``every``: P*N, the tokens of all ranks.
    - ``tokens``: T, the tokens of this rank.
    """

    def __init__(self, expert_parallel: ExpertParallel, every: int, tokens: int) -> None:
        self.engine, self.ranks, self.rank = expert_parallel.engine, expert_parallel.ranks, expert_parallel.rank
        self.tokens, self.every = tokens, every
        each = self.every // self.ranks
        self.own = slice(self.rank * each, (self.rank + 1) * each)

    def begin(
        self, rows: Tensor, row_of_slot: Tensor, scale: Tensor | None = None, values: Tensor | None = None
    ) -> Leaving:
        """Begin a call with rows (R, H), which the caller may still write until they leave, their numbers (P*N, K), a
        factor per row or None, and None or values per row (R,) that return by slot: (T, K).
        """
        raise NotImplementedError


class ReturnsByExchange(Returns):
    """Returns by `Engine.start_exchange`; the tensors are like those of `begin`."""

    def __init__(
        self,
        expert_parallel: ExpertParallel,
        rows: Tensor,
        row_of_slot: Tensor,
        scale: Tensor | None,
        values: Tensor | None,
        tokens: int,
    ) -> None:
        super().__init__(expert_parallel, row_of_slot.shape[0], tokens)
        of_others = slice(0, self.own.start), slice(self.own.stop, self.every)
        self.sums = [
            (there, slot_functions.bind_sum_slots(rows, row_of_slot[there], scale))
            for there in of_others
            if there.start < there.stop
        ]
        self.of_values = None if values is None else slot_functions.bind_slot_values(values, row_of_slot)
        self.over_ranks = None
        if self.ranks == 2 and tokens:
            of_tokens = row_of_slot[self.own][:tokens]
            self.add_to_part = slot_functions.bind_sum_slots_and_part(rows, of_tokens, scale)
        elif tokens:
            self.sum_own = slot_functions.bind_sum_slots(rows, row_of_slot[self.own], scale)
            self.over_ranks = bind_sum_over_ranks(rows.new_empty(self.every, rows.shape[1]), self.ranks, tokens)

    def begin(
        self, rows: Tensor, row_of_slot: Tensor, scale: Tensor | None = None, values: Tensor | None = None
    ) -> Leaving:
        return _Exchanged(self, rows, row_of_slot, scale, values)


class _Exchanged:
    """One call of `ReturnsByExchange`."""

    def __init__(
        self,
        returns: ReturnsByExchange,
        rows: Tensor,
        row_of_slot: Tensor,
        scale: Tensor | None,
        values: Tensor | None,
    ) -> None:
        self._returns, self._given, self._values = returns, (rows, row_of_slot, scale), values

    def leave(self) -> None:
        returns, (rows, row_of_slot, scale) = self._returns, self._given
        self._parts = rows.new_empty(returns.every, rows.shape[1])
        for there, total in returns.sums:
            total(rows, row_of_slot[there], scale, None, self._parts[there])
        given = [self._parts]
        if returns.of_values is not None and self._values is not None:
            given.append(returns.of_values(self._values.contiguous(), row_of_slot))
        self._leaving = returns.engine.start_exchange(given)

    def finish(self) -> tuple[Tensor, Tensor | None]:
        y = self._sum()
        return y, None if self._values is None else sum_over_ranks(self._leaving.wait(1), self._returns.tokens)

    def _sum(self) -> Tensor:
        returns, leaving, (rows, row_of_slot, scale) = self._returns, self._leaving, self._given
        if not returns.tokens:
            leaving.wait(0)
            return rows.new_empty(0, rows.shape[1])
        if returns.over_ranks is None:
            part = leaving.wait(0)[1 - returns.rank][: returns.tokens]
            return returns.add_to_part(rows, row_of_slot[returns.own][: returns.tokens], scale, part)
        returns.sum_own(rows, row_of_slot[returns.own], scale, None, self._parts[returns.own])
        return returns.over_ranks(leaving.wait(0))


class ReturnsByKernels(Returns):
    """Returns by the kernels of `fusedmoe.kernels.exchange`, of an engine that is ``by_kernels``.

    - ``rows``, ``row_of_slot``, ``scale``, ``values``: tensors like those of `begin`.
    - ``sms``: those of `PushSums`.
    - ``tiles``, ``experts``, ``half``: of the product that computes the rows, as for `bind_push_sums`; None and zeros
      if the rows are there.
    """

    def __init__(
        self,
        expert_parallel: ExpertParallel,
        rows: Tensor,
        row_of_slot: Tensor,
        scale: Tensor | None,
        values: Tensor | None,
        tokens: int,
        sms: int,
        tiles: tuple[int, int] | None = None,
        experts: int = 0,
        half: int = 0,
    ) -> None:
        assert scale is None
        super().__init__(expert_parallel, row_of_slot.shape[0], tokens)
        (every, chosen), columns, each = row_of_slot.shape, rows.shape[1], self.every // self.ranks
        sizes = [every * columns * rows.itemsize, *([] if values is None else [every * chosen * values.itemsize])]
        places, self.nbytes = exchange_functions.places(sizes)
        at_parts, at_values = places[0], places[-1]
        self.device = rows.device
        self.push = exchange_functions.bind_push_sums(
            rows, row_of_slot, values, at_parts, at_values, sms, tiles, experts, half
        )  # fmt: skip
        of_values = None if values is None else values.dtype
        self.total = exchange_functions.bind_total(rows, tokens, chosen, of_values, each, at_parts, at_values)

    def begin(
        self, rows: Tensor, row_of_slot: Tensor, scale: Tensor | None = None, values: Tensor | None = None
    ) -> _Pushed:
        return _Pushed(self, rows, row_of_slot, None if values is None else values.contiguous())


class _Pushed:
    """One call of `ReturnsByKernels`."""

    def __init__(self, returns: ReturnsByKernels, rows: Tensor, row_of_slot: Tensor, values: Tensor | None) -> None:
        self._returns, self._given = returns, (rows, row_of_slot, values)
        self._channel = returns.engine.channel(returns.nbytes, returns.device, returns=True)

    def leave(self, blocks: Tensor | None = None) -> None:
        """Launch `PushSums`. ``blocks``: those of the product that computes the rows."""
        self._returns.push(self._channel.region, *self._given, blocks)

    def finish(self) -> tuple[Tensor, Tensor | None]:
        returns, (rows, row_of_slot, _) = self._returns, self._given
        sums = returns.total(self._channel.region, rows, row_of_slot[returns.own])
        returns.engine.returned()
        return sums


class ReturnsOfProduct:
    """Sums over slots of the rows that a product computes. They leave as soon as their rows are there: `PushSums` runs
    beside the product, and waits for its tiles.

    - ``rows``, ``row_of_slot``, ``tokens``: as of `Returns`.
    - ``ranges``: those of the rows.
    - ``counted``: `products.bind_counted_gemm` of the operands, given the options.
    - ``sms``: those of `PushSums`.
    - ``experts``: as for `bind_push_sums`.
    """

    def __init__(
        self,
        expert_parallel: ExpertParallel,
        rows: Tensor,
        row_of_slot: Tensor,
        tokens: int,
        ranges: Ranges,
        counted: Callable[[KernelOptions], tuple[Callable[..., Tensor], tuple[int, int]]],
        options: KernelOptions,
        sms: int,
        experts: int,
    ) -> None:
        self._ranges, self._by_experts = ranges, bool(experts)
        self._product, tiles = counted(replace(options, exchange_sms=sms))
        half = ranges.half if experts else 0
        self._returns = ReturnsByKernels(
            expert_parallel, rows, row_of_slot, None, None, tokens, sms, tiles, experts, half
        )  # fmt: skip

    def run(
        self, given: Sequence[Any], rows: Tensor, row_of_slot: Tensor, offsets: Tensor, token_of_row: Tensor
    ) -> Tensor:
        """Return the results of this rank's tokens, and write the ``rows`` of the product of the ``given`` tensors."""
        leaving = self._returns.begin(rows, row_of_slot)
        blocks = self._ranges.leaving(offsets, token_of_row, self._by_experts)
        self._product(*given, blocks, rows)
        leaving.leave(blocks)  # nothing may come before: it begins beside the product
        y, _ = leaving.finish()
        return y


def bind_returns(
    expert_parallel: ExpertParallel,
    rows: Tensor,
    row_of_slot: Tensor,
    scale: Tensor | None,
    values: Tensor | None,
    tokens: int,
    *,
    beside: bool,
) -> Returns:
    """Return the `Returns` of an engine; ``beside``: whether a product runs while sums leave."""
    if expert_parallel.engine.by_kernels:
        sms = BESIDE_SMS if beside else ALONE_SMS
        return ReturnsByKernels(expert_parallel, rows, row_of_slot, scale, values, tokens, sms)
    return ReturnsByExchange(expert_parallel, rows, row_of_slot, scale, values, tokens)
