"""The kernel that chooses experts from logits. Its sums have a fixed order: no float is added atomically.

`Choose`: from the logits, the chosen experts and their weights, the rows per expert of each chunk of tokens, and the
column sums that losses need. A warp takes a token at a time. A lane has the logits of neighbouring experts in
registers, sorted once. K times, the warp takes the largest head of the lanes' lists, of the lowest lane that has it. So
ties go to the lowest id. A NaN ranks above infinity. Scores are compared by their logits unless a correction or a sum
of scores decides, because two logits may have one rounded score.

Its instructions take more time than its loads. So a lane keeps its ids in four bits each, and the weights are computed
with one slot per lane: for K up to 8, those of four tokens at once.

Axes: T tokens, K chosen experts per token, E experts, P parts of the weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.warps import ELEMENTS, LANES, WarpKernel, fake_vector

QUAD = 4  # fp32 values per load
LEAST = -(2**31)  # ranks below every value: experts that do not exist, or are taken
LEFT_OUT = LEAST + 1  # experts of the groups that are left out
NAN_KEY = 2**31 - 1
FAR = 2**31 - 1  # above every id
PLACE_BITS = 4  # of an expert's place in its lane
EPS = 1e-20  # of the normalisation


def fake_experts(rows: Any, columns: Any, unit: int) -> Any:
    """An fp32 matrix whose pitch is a multiple of ``unit``, for the compiler."""
    strides = (cute.sym_int64(divisibility=unit), 1)
    return cute.runtime.make_fake_tensor(Float32, (rows, columns), strides, assumed_align=16)


def sorting_network(n: int) -> list[tuple[int, int]]:
    """Pairs to compare and swap, in order, that sort n values; n is a power of two (Batcher's odd-even mergesort)."""
    pairs, p = [], 1
    while p < n:
        k = p
        while k >= 1:
            for j in range(k % p, n - k, 2 * k):
                pairs += [(i, i + k) for i in range(j, min(j + k, n - k)) if i // (2 * p) == (i + k) // (2 * p)]
            k //= 2
        p *= 2
    return pairs


@cute.jit
def keys_of(values):
    """Integers in the order of fp32 values: a NaN above all others, -0 equal to 0.

    The sum with zero is zero for both zeros. It has the bits of `NAN_KEY` for every NaN.
    """
    n: cutlass.Constexpr[int] = cute.size(values)
    keys = cute.make_rmem_tensor((n,), Int32)
    cleared = cute.make_rmem_tensor((n,), Float32)
    for i in cutlass.range_constexpr(n):
        cleared[i] = values[i] + Float32(0.0)
    bits = cute.recast_tensor(cleared, Int32)
    for i in cutlass.range_constexpr(n):
        keys[i] = bits[i] ^ ((bits[i] >> 31) & NAN_KEY)
    return keys


@cute.jit
def value_of(key):
    """The fp32 value of a key."""
    bits = cute.make_rmem_tensor((1,), Int32)
    bits[0] = key ^ ((key >> 31) & NAN_KEY)
    return cute.recast_tensor(bits, Float32)[0]


def largest(key: Any) -> Any:
    """The largest of the lanes' integers."""
    return cute.arch.warp_redux_sync(key, "max")


def smallest(number: Any) -> Any:
    """The smallest of the lanes' integers."""
    return cute.arch.warp_redux_sync(number, "min")


def total_of(value: Any) -> Any:
    """The sum of the lanes' values, in a fixed order."""
    return cute.arch.warp_reduction_sum(value)


def sigmoid(x: Any) -> Any:
    """``1 / (1 + exp(-x))``, without approximations."""
    return Float32(1.0) / (Float32(1.0) + cute.math.exp(-x))


@dataclass(frozen=True)
class OfTokens(WarpKernel):
    """A kernel whose warps take tokens one by one; a lane has ``per_lane`` neighbouring experts. Of the slots of
    ``at_once`` tokens together, a lane has one.
    """

    score: str  # "softmax", "topk_softmax" or "sigmoid"
    room: int  # maximum number of experts: 32 times a power of two
    aligned: bool = field(default=True, kw_only=True)  # E is a multiple of 4: logits move 16 bytes at a time
    slots: int = field(default=LANES, kw_only=True)  # maximum K: the lanes of a token, where a lane has a slot

    @property
    def per_lane(self) -> int:
        return self.room // LANES

    @property
    def at_once(self) -> int:
        """Tokens of a warp whose slots it computes at once."""
        return LANES // self.slots

    @property
    def unit(self) -> int:
        """The number of experts is a multiple of this."""
        return QUAD if self.aligned else 1

    @property
    def width(self) -> int:
        """Values per load."""
        return min(self.per_lane, self.unit)

    @cute.jit
    def load(self, t, token, lane, first, experts, absent: cutlass.Constexpr[float]):
        """The lane's values of a token, from column ``first`` on; ``absent`` for experts that do not exist."""
        values = cute.make_rmem_tensor((self.per_lane,), Float32)
        values.fill(absent)
        width = self.width
        for v in cutlass.range_constexpr(self.per_lane // width):
            expert = lane * self.per_lane + v * width
            if expert < experts:
                source = cute.local_tile(t[token, None], (width,), ((first + expert) // width,))
                cute.autovec_copy(source, cute.local_tile(values, (width,), (v,)))
        return values

    @cute.jit
    def store(self, t, token, lane, values, experts):
        """Write the lane's values of a token."""
        width = self.width
        for v in cutlass.range_constexpr(self.per_lane // width):
            expert = lane * self.per_lane + v * width
            if expert < experts:
                to = cute.local_tile(t[token, None], (width,), (expert // width,))
                cute.autovec_copy(cute.local_tile(values, (width,), (v,)), to)

    @cute.jit
    def load_vector(self, t, lane, experts):
        """The lane's values of a vector of the experts; zeros for experts that do not exist."""
        values = cute.make_rmem_tensor((self.per_lane,), Float32)
        values.fill(0.0)
        for i in cutlass.range_constexpr(self.per_lane):
            if lane * self.per_lane + i < experts:
                values[i] = Float32(t[lane * self.per_lane + i])
        return values

    @cute.jit
    def softmax(self, values):
        """Softmax over the warp's values, their maximum, and the sum of their exponentials relative to it."""
        n = self.per_lane
        most = values[0]
        for i in cutlass.range_constexpr(1, n):
            most = cute.arch.fmax(most, values[i])
        most = cute.arch.warp_reduction_max(most)
        probs = cute.make_rmem_tensor((n,), Float32)
        of_lane = Float32(0.0)
        for i in cutlass.range_constexpr(n):
            probs[i] = cute.math.exp(values[i] - most)
            of_lane += probs[i]
        total = total_of(of_lane)
        inverse = Float32(1.0) / total
        for i in cutlass.range_constexpr(n):
            probs[i] = probs[i] * inverse
        return probs, most, total

    @cute.jit
    def sigmoids(self, values, lane, experts):
        """Sigmoid of each value; zeros for experts that do not exist."""
        scores = cute.make_rmem_tensor((self.per_lane,), Float32)
        for i in cutlass.range_constexpr(self.per_lane):
            exists = lane * self.per_lane + i < experts
            score = cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(-values[i]))
            scores[i] = cutlass.select_(exists, score, Float32(0.0))
        return scores

    @cute.jit
    def total(self, values):
        """Sum over the warp's values."""
        of_lane = values[0]
        for i in cutlass.range_constexpr(1, self.per_lane):
            of_lane += values[i]
        return total_of(of_lane)

    @cute.jit
    def largest_chosen(self, logit, used):
        """The largest logit of the lanes of a token that are ``used``."""
        return cute.arch.warp_reduction_max(
            cutlass.select_(used, logit, Float32(-math.inf)), threads_in_group=self.slots
        )

    @cute.jit
    def softmax_of_chosen(self, logit, most, used):
        """Softmax over the lanes of a token that are ``used``, zeros in the others; ``most`` is the largest logit."""
        power = cutlass.select_(used, cute.math.exp(logit - most), Float32(0.0))
        return power / self.total_of_chosen(power)

    @cute.jit
    def total_of_chosen(self, value):
        """The sum over the lanes of a token, in a fixed order."""
        return cute.arch.warp_reduction_sum(value, threads_in_group=self.slots)

    @cute.jit
    def write_sums(self, s_sums, sums, of_lane, warps: cutlass.Constexpr[int], chunk, warp, lane, thread, experts):
        """Write the sums of the warps' columns, in the order of the warps."""
        for i in cutlass.range_constexpr(self.per_lane):
            s_sums[lane * self.per_lane + i, warp] = of_lane[i]
        cute.arch.sync_threads()
        for expert in cutlass.range(thread, experts, warps * LANES, unroll=1):
            total = Float32(0.0)
            for w in cutlass.range_constexpr(warps):
                total += s_sums[expert, w]
            sums[chunk, expert] = total


@dataclass(frozen=True)
class Choose(OfTokens):
    """The chosen experts and their weights."""

    renormalize: bool  # no effect with "topk_softmax"
    bias: str | None  # dtype of the router's bias: "fp32", "bf16" or "fp16"; None for none
    corrected: bool  # whether a correction is added for the choice
    grouped: bool  # whether groups of experts are left out
    parts: int  # blocks of columns whose sum is the logits
    writes_logits: bool  # write that sum plus the bias
    sums: bool  # whether losses need column sums

    @property
    def symbol(self) -> str:
        flags = (
            (self.renormalize, "renormalized"), (self.bias, f"bias_{self.bias}"), (self.corrected, "corrected"),
            (self.grouped, "grouped"), (self.parts > 1, f"parts{self.parts}"), (self.writes_logits, "logits"),
            (self.sums, "sums"), (not self.aligned, "any"), (self.slots < LANES, f"slots{self.slots}"),
        )  # fmt: skip
        return "_".join([f"sm90_choose_{self.score}_{self.room}", *(name for on, name in flags if on)])

    @property
    def warps(self) -> int:
        """Warps per CTA: fewer if a lane has more experts, and so needs more registers."""
        return min(32, 128 // self.per_lane)

    @property
    def ranks_scores(self) -> bool:
        """Whether scores decide, not logits."""
        summed = self.grouped and self.score == "sigmoid"
        return self.score != "topk_softmax" and (self.corrected or summed)

    @property
    def together(self) -> int:
        """Tokens whose experts a warp chooses together, so that it need not wait for each maximum: few registers."""
        return 2 if self.at_once > 1 and self.per_lane <= 4 and self.keys_are_logits and not self.sums else 1

    @property
    def keys_are_logits(self) -> bool:
        """Whether a chosen expert's key has its logit."""
        return not (self.ranks_scores or self.corrected or self.grouped)

    @property
    def group_terms(self) -> int:
        """The number of best experts whose scores are the score of a group."""
        return 2 if self.score == "sigmoid" else 1

    def compile(self) -> Any:
        """Compile without a GPU; a function of products (T, P*E) fp32, bias (E,), correction (E,) fp32, ids (T*K,)
        int64, weights (T*K,) fp32, logits (T, E) fp32, counts (chunks, E + 1) int32, sums (chunks, E + 1) fp32, K, the
        weights' scale, the numbers of groups and of those that are chosen, and the tokens of a chunk.
        """
        tokens, experts, slots = cute.sym_int(), cute.sym_int(divisibility=self.unit), cute.sym_int()
        of_chunks = [
            cute.runtime.make_fake_tensor(ELEMENTS[dtype], (cute.sym_int(), cute.sym_int()), (cute.sym_int64(), 1))
            for dtype in ("int32", "fp32")
        ]
        return self.compiled_for(
            fake_experts(tokens, cute.sym_int(divisibility=self.unit), QUAD), fake_vector(self.bias or "fp32", experts),
            fake_vector("fp32", experts), fake_vector("int64", slots), fake_vector("fp32", slots),
            fake_experts(tokens, experts, self.unit), *of_chunks, Int32(1), Float32(1), Int32(1), Int32(1), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, products, bias, correction, index, weight, logits, counts, sums,
        chosen, scale, groups, top_groups, chunk_tokens, stream,
    ):  # fmt: skip
        chunks = cute.ceil_div(products.shape[0], chunk_tokens)
        experts = products.shape[1] // self.parts
        self.kernel(
            products, bias, correction, index, weight, logits, counts, sums,
            experts, chosen, scale, groups, top_groups, chunk_tokens,
        ).launch(grid=(chunks, 1, 1), block=(self.warps * LANES, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, products, bias, correction, index, weight, logits, counts, sums,
        experts, chosen, scale, groups, top_groups, chunk_tokens,
    ):  # fmt: skip
        n = self.per_lane
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        chunk, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        s_count = smem.allocate_tensor(Int32, cute.make_layout((self.room + 1,)), 16)
        s_taken = smem.allocate_tensor(Int64, cute.make_layout((LANES, self.warps)), 16)
        for bucket in cutlass.range(thread, experts + 1, self.warps * LANES, unroll=1):
            s_count[bucket] = 0
        cute.arch.sync_threads()

        group_of = cute.make_rmem_tensor((n,), Int32)
        group_of.fill(0)
        if const_expr(self.grouped):
            for i in cutlass.range_constexpr(n):
                # experts that do not exist are in the last group: `leave_groups_out` shifts by this number
                group_of[i] = cutlass.min((lane * n + i) // (experts // groups), groups - 1)
        added: Any = self.load_vector(bias, lane, experts) if const_expr(self.bias is not None) else None
        corrections: Any = self.load_vector(correction, lane, experts) if const_expr(self.corrected) else None
        column_sums = cute.make_rmem_tensor((n,), Float32)
        column_sums.fill(0.0)
        squares = Float32(0.0)

        end = cutlass.min((chunk + 1) * chunk_tokens, products.shape[0])
        first = chunk * chunk_tokens + warp * self.at_once
        of_lane, slot = lane // self.slots, lane % self.slots
        for some in cutlass.range(first, end, self.warps * self.at_once, unroll=1):
            most_of_lane, total_of_lane = Float32(0.0), Float32(1.0)  # of the softmax of this lane's token
            for i in cutlass.range(0, cutlass.min(self.at_once, end - some), self.together, unroll=1):
                of_tokens = []
                for own in cutlass.range_constexpr(self.together):
                    token = cutlass.min(some + i + own, end - 1)
                    values = self.logits_of(products, added, token, lane, experts)
                    if const_expr(self.writes_logits):
                        self.store(logits, token, lane, values, experts)

                    # all scores, where they decide or are summed up
                    scores = values
                    if const_expr(self.sums or self.score == "softmax"):
                        scores, most, total = self.softmax(values)
                        if of_lane == i + own:
                            most_of_lane, total_of_lane = most, total
                        if const_expr(self.sums):
                            logarithm = most + cute.math.log(total)
                            squares += logarithm * logarithm
                    if const_expr(self.score == "sigmoid" and (self.sums or self.ranks_scores)):
                        scores = self.sigmoids(values, lane, experts)
                    if const_expr(self.sums):
                        factor = Float32(1.0)
                        if const_expr(self.score == "sigmoid"):
                            factor = Float32(1.0) / (self.total(scores) + Float32(EPS))
                        for j in cutlass.range_constexpr(n):
                            column_sums[j] = column_sums[j] + scores[j] * factor

                    ranked = scores if const_expr(self.ranks_scores) else values
                    if const_expr(self.corrected):
                        corrected = cute.make_rmem_tensor((n,), Float32)
                        for j in cutlass.range_constexpr(n):
                            corrected[j] = ranked[j] + corrections[j]
                        ranked = corrected
                    keys = keys_of(ranked)
                    if const_expr(not self.keys_are_logits):  # else they are -inf, and have the highest ids
                        for j in cutlass.range_constexpr(n):
                            if lane * n + j // self.width * self.width >= experts:
                                keys[j] = LEAST
                    if const_expr(self.grouped):
                        self.leave_groups_out(keys, group_of, lane, experts // groups, groups, top_groups)
                    of_tokens.append(keys)
                self.take(of_tokens, s_taken[None, warp], i, lane, chosen)

            # a lane has a slot
            cute.arch.sync_warp()
            token = some + of_lane
            used, expert, logit = slot < chosen and token < end, Int32(0), Float32(0.0)
            if used:
                taken = s_taken[lane, warp]
                expert, logit = Int32(taken & 0x7FFFFFFF), value_of(Int32(taken >> 32))
                cute.arch.atomic_add(s_count.iterator + expert, Int32(1), scope="cta")
                index[token * chosen + slot] = Int64(expert)
                if const_expr(not self.keys_are_logits):
                    logit = self.logit_of(products, bias, token, expert, experts)
            share = self.weight_of(logit, used, lane, most_of_lane, total_of_lane)
            if used:
                weight[token * chosen + slot] = share * scale
            cute.arch.sync_warp()

        cute.arch.sync_threads()
        for bucket in cutlass.range(thread, experts + 1, self.warps * LANES, unroll=1):
            counts[chunk, bucket] = s_count[bucket]
        if const_expr(self.sums):
            s_sums = smem.allocate_tensor(Float32, cute.make_layout((self.room, self.warps)), 16)
            s_squares = smem.allocate_tensor(Float32, cute.make_layout((self.warps,)), 16)
            if lane == 0:
                s_squares[warp] = squares
            self.write_sums(s_sums, sums, column_sums, self.warps, chunk, warp, lane, thread, experts)
            if thread == 0:
                total = Float32(0.0)
                for w in cutlass.range_constexpr(self.warps):
                    total += s_squares[w]
                sums[chunk, experts] = total

    @cute.jit
    def leave_groups_out(self, keys, group_of, lane, size, groups, top_groups):
        """Rank the experts of all groups except the best below every other."""
        n = self.per_lane
        own = Int32(LEAST)  # the score of group number ``lane``
        for group in cutlass.range(groups, unroll=1):
            best, at = Int32(LEAST), Int32(FAR)
            for i in cutlass.range_constexpr(n):
                if group_of[i] == group and keys[i] > best:
                    best, at = keys[i], lane * n + i
            first = largest(best)
            score = first
            if const_expr(self.group_terms == 2):
                if size > 1:
                    winner = smallest(cutlass.select_(best == first, at, Int32(FAR)))
                    best = Int32(LEAST)
                    for i in cutlass.range_constexpr(n):
                        if group_of[i] == group and keys[i] > best and lane * n + i != winner:
                            best = keys[i]
                    both = cute.make_rmem_tensor((1,), Float32)
                    both[0] = value_of(first) + value_of(largest(best))
                    score = keys_of(both)[0]
            if lane == group:
                own = score
        allowed = Int32(0)
        for _ in cutlass.range(top_groups, unroll=1):
            best = largest(own)
            group = smallest(cutlass.select_(own == best, lane, Int32(FAR)))
            if lane == group:
                own = Int32(LEAST)
            allowed = allowed | (Int32(1) << group)
        for i in cutlass.range_constexpr(n):
            if keys[i] != LEAST and ((allowed >> group_of[i]) & 1) == 0:
                keys[i] = LEFT_OUT

    @cute.jit
    def take(self, of_tokens, s_taken, first, lane, chosen):
        """Write the experts with the largest keys of each token, and their keys in the higher halves. The rows of the
        tokens in ``s_taken`` begin at number ``first``.
        """
        n = self.per_lane
        Places = Int64 if const_expr(n * PLACE_BITS > 32) else Int32
        places = cute.make_rmem_tensor((self.together,), Places)
        places.fill(0)
        heads, rows = [], []
        for own in cutlass.range_constexpr(self.together):
            # a key and, below it, the place in the lane: of equal keys, the lowest id is the largest number
            pairs = cute.make_rmem_tensor((n,), Int64)
            for i in cutlass.range_constexpr(n):
                pairs[i] = (Int64(of_tokens[own][i]) << 32) | Int64(n - 1 - i)
            for a, b in sorting_network(n):
                low, high = cutlass.min(pairs[a], pairs[b]), cutlass.max(pairs[a], pairs[b])
                pairs[a], pairs[b] = high, low
            keys = cute.make_rmem_tensor((n,), Int32)
            for i in cutlass.range_constexpr(n):
                keys[i] = Int32(pairs[i] >> 32)
                places[own] = places[own] | (Places((Int32(pairs[i]) & (n - 1)) ^ (n - 1)) << (i * PLACE_BITS))
            heads.append(keys)
            rows.append(cute.local_tile(s_taken, (self.slots,), (first + own,)))
        lower_lanes = (Int32(1) << lane) - Int32(1)
        for k in cutlass.range(chosen, unroll=1):
            for own in cutlass.range_constexpr(self.together):
                keys = heads[own]
                key = largest(keys[0])
                lanes = cute.arch.vote_ballot_sync(keys[0] == key)
                if keys[0] == key and (lanes & lower_lanes) == 0:
                    rows[own][k] = (Int64(key) << 32) | Int64((lane * n) | (Int32(places[own]) & (n - 1)))
                    places[own] = places[own] >> PLACE_BITS
                    for i in cutlass.range_constexpr(n - 1):
                        keys[i] = keys[i + 1]
                    keys[n - 1] = Int32(LEAST)

    @cute.jit
    def logits_of(self, products, added, token, lane, experts):
        """The lane's logits of a token, -inf for experts that do not exist."""
        values = self.load(products, token, lane, 0, experts, -math.inf)
        for part in cutlass.range_constexpr(1, self.parts):
            more = self.load(products, token, lane, part * experts, experts, 0.0)
            for i in cutlass.range_constexpr(self.per_lane):
                values[i] = values[i] + more[i]
        if const_expr(self.bias is not None):
            for i in cutlass.range_constexpr(self.per_lane):
                values[i] = values[i] + added[i]
        return values

    @cute.jit
    def logit_of(self, products, bias, token, expert, experts):
        """The logit of the expert that this lane has."""
        logit = Float32(products[token, expert])
        for part in cutlass.range_constexpr(1, self.parts):
            logit += products[token, part * experts + expert]
        if const_expr(self.bias is not None):
            logit += Float32(bias[expert])
        return logit

    @cute.jit
    def weight_of(self, logit, used, lane, most, total):
        """The weight of the expert that this lane has, without the scale."""
        if const_expr(self.score == "topk_softmax"):
            if const_expr(self.keys_are_logits):  # the first one is the largest
                most = cute.arch.shuffle_sync(logit, lane // self.slots * self.slots)
            else:
                most = self.largest_chosen(logit, used)
            share = self.softmax_of_chosen(logit, most, used)
        else:
            softmax = self.score != "sigmoid"
            share = cute.math.exp(logit - most) / total if const_expr(softmax) else sigmoid(logit)
            if const_expr(self.renormalize):
                share = share / (self.total_of_chosen(cutlass.select_(used, share, Float32(0.0))) + Float32(EPS))
        return share
