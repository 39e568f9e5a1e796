"""The kernel of the gradient of a router's logits.

A warp computes the scores again. A lane first has a slot: for K up to 8, the warp takes four tokens at once, unless the
gradient depends on the logits of all experts. Then the lane has neighbouring experts of each token. The terms of the
slots get there through shared memory; no expert gets two, since a token's experts are distinct. The warp writes each
fp32 value as a sum of bf16 *parts*, side by side, so that tensor cores can multiply them: each part has 8 more bits.

The kernel also writes the ends of the groups of tokens over which the gradient of the weight is summed. Further CTAs
write the parts of the router's weight, for the gradient of the tokens.

Axes: T tokens, K chosen experts per token, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.warps import LANES, VECTOR, fake_matrix, fake_vector
from fusedmoe.kernels.rows.move.parts import parts_units, split_off, write_parts
from fusedmoe.kernels.rows.router.choose import EPS, QUAD, OfTokens, fake_experts, sigmoid

WARPS = 8  # per CTA


@dataclass(frozen=True)
class ChooseBackward(OfTokens):
    """The gradient of the logits, as bf16 parts or in fp32 or both."""

    renormalize: bool
    columns: tuple[int, ...]  # the part in each block of columns, 0 for the highest; empty if no parts are wanted
    of_rows: bool  # whether the weights' gradient is that of rows, not of slots
    grads: str = ""  # the other gradients that exist: "l" of the logits, "p" of the column sums, "z" of the squares
    sums: bool = False  # whether the column sums, the bias's gradient, are wanted
    whole: bool = False  # whether the gradient in fp32 is wanted
    weight: str | None = None  # dtype of the router's weight, if its parts are wanted: "fp32" or "bf16"
    rows: tuple[int, ...] = ()  # the part in each block of rows of the weight's parts

    @property
    def symbol(self) -> str:
        flags = (
            (self.renormalize, "renormalized"), (self.of_rows, "rows"), (self.grads, self.grads), (self.sums, "sums"),
            (self.whole, "whole"), (not self.aligned, "any"), (self.slots < LANES, f"slots{self.slots}"),
            (self.weight, f"weight_{self.weight}_{''.join(map(str, self.rows))}"),
        )  # fmt: skip
        columns = "".join(map(str, self.columns)) or "none"
        return "_".join([f"sm90_choose_backward_{self.score}_{self.room}_{columns}", *(n for on, n in flags if on)])

    @property
    def needs_softmax(self) -> bool:
        """Whether a softmax over all experts has a gradient."""
        return self.score == "softmax" or "z" in self.grads or ("p" in self.grads and self.score != "sigmoid")

    @property
    def reads_all(self) -> bool:
        """Whether the gradient depends on the logits of all experts. A warp then has one token at a time."""
        return self.needs_softmax or "p" in self.grads

    def compile(self) -> Any:
        """Compile without a GPU; a function of logits (T, E) fp32, ids (T*K,) int64, rows of slots (T*K,) int64, the
        weights' gradient (T*K,) or (R,) fp32, the gradients of logits (T, E), column sums (E,) and squares (1,), all
        fp32, parts (T, blocks * padded E) bf16, the gradient (T, E) fp32, column sums (CTAs, E) fp32, the ends of
        groups of tokens (G,) int32, the router's weight (E, H), its parts (blocks * padded E, H) bf16, K, the weights'
        scale, the tokens of a CTA, and those of a group.
        """
        tokens, experts, slots = cute.sym_int(), cute.sym_int(divisibility=self.unit), cute.sym_int()
        hidden = cute.sym_int(divisibility=VECTOR)
        sums = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(), experts), (cute.sym_int64(), 1))
        return self.compiled_for(
            fake_experts(tokens, experts, self.unit), fake_vector("int64", slots), fake_vector("int64", slots),
            fake_vector("fp32", cute.sym_int()), fake_experts(tokens, experts, self.unit), fake_vector("fp32", experts),
            fake_vector("fp32", 1), fake_matrix("bf16", cute.sym_int(), cute.sym_int(divisibility=VECTOR)),
            fake_experts(tokens, experts, self.unit), sums,
            fake_vector("int32", cute.sym_int()), fake_matrix(self.weight or "bf16", experts, hidden),
            fake_matrix("bf16", cute.sym_int(), hidden), Int32(1), Float32(1), Int32(1), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, logits, index, row_of_slot, grad, grad_logits, grad_sums, grad_squares, parts, whole, sums, ends,
        weight, weight_parts, chosen, scale, cta_tokens, group_tokens, stream,
    ):  # fmt: skip
        ctas, of_tokens = 0, cute.ceil_div(logits.shape[0], cta_tokens)
        if const_expr(self.weight is not None):
            ctas = cute.ceil_div(parts_units(weight_parts, self.rows), WARPS * LANES)
        self.kernel(
            logits, index, row_of_slot, grad, grad_logits, grad_sums, grad_squares, parts, whole, sums, ends,
            weight, weight_parts, chosen, scale, cta_tokens, group_tokens, of_tokens,
        ).launch(grid=(of_tokens + ctas, 1, 1), block=(WARPS * LANES, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, logits, index, row_of_slot, grad, grad_logits, grad_sums, grad_squares, parts, whole, sums, ends,
        weight, weight_parts, chosen, scale, cta_tokens, group_tokens, of_tokens,
    ):  # fmt: skip
        cta, _, _ = cute.arch.block_idx()
        if cta < of_tokens:
            self.of_logits(
                logits, index, row_of_slot, grad, grad_logits, grad_sums, grad_squares, parts, whole, sums, ends,
                chosen, scale, cta_tokens, group_tokens, cta,
            )  # fmt: skip
        if const_expr(self.weight is not None):
            if cta >= of_tokens:
                thread, _, _ = cute.arch.thread_idx()
                write_parts(weight, weight_parts, self.rows, (cta - of_tokens) * (WARPS * LANES) + thread)

    @cute.jit
    def of_logits(
        self, logits, index, row_of_slot, grad, grad_logits, grad_sums, grad_squares, parts, whole, sums, ends,
        chosen, scale, cta_tokens, group_tokens, cta,
    ):  # fmt: skip
        """Write the gradient of the logits of a CTA's tokens."""
        n = self.per_lane
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        experts = logits.shape[1]
        of_columns = cute.make_rmem_tensor((n,), Float32)
        of_columns.fill(0.0)
        of_probs = self.load_vector(grad_sums, lane, experts) if const_expr("p" in self.grads) else None

        if cta == 0:
            for group in cutlass.range(thread, cute.size(ends), WARPS * LANES, unroll=1):
                ends[group] = cutlass.min((group + 1) * group_tokens, logits.shape[0])
        smem = SmemAllocator()
        s_terms = smem.allocate_tensor(Float32, cute.make_layout((self.room, self.at_once, WARPS)), 16)
        own_terms = s_terms[None, None, warp]
        zeros = cute.make_rmem_tensor((n,), Float32)
        zeros.fill(0.0)
        for i in cutlass.range_constexpr(self.at_once):
            self.put_terms(own_terms[None, i], lane, zeros)
        cute.arch.sync_warp()

        end = cutlass.min((cta + 1) * cta_tokens, logits.shape[0])
        first = cta * cta_tokens + warp * self.at_once
        for some in cutlass.range(first, end, WARPS * self.at_once, unroll=1):
            # a lane has a slot
            token, slot = some + lane // self.slots, lane % self.slots
            used, expert, g, logit = slot < chosen and token < end, Int32(0), Float32(0.0), Float32(0.0)
            if used:
                expert, g = self.chosen_slot(index, row_of_slot, grad, token * chosen + slot)
                logit = Float32(logits[token, expert])
            values, softmax, most, total = zeros, zeros, Float32(0.0), Float32(1.0)
            if const_expr(self.reads_all):
                values = self.load(logits, some, lane, 0, experts, -math.inf)
            if const_expr(self.needs_softmax):
                softmax, most, total = self.softmax(values)
            term, dense = self.of_weight(logit, g * scale, used, most, total)
            if used:
                own_terms[expert, lane // self.slots] = term
            cute.arch.sync_warp()

            # a lane has neighbouring experts
            for i in cutlass.range_constexpr(self.at_once):
                if some + i < end:
                    terms = self.get_terms(own_terms[None, i], lane)
                    self.put_terms(own_terms[None, i], lane, zeros)
                    result = self.of_scores(values, softmax, most, total, dense, of_probs, grad_squares, lane, experts)
                    for j in cutlass.range_constexpr(n):
                        result[j] = result[j] + terms[j]
                    if const_expr("l" in self.grads):
                        more = self.load(grad_logits, some + i, lane, 0, experts, 0.0)
                        for j in cutlass.range_constexpr(n):
                            result[j] = result[j] + more[j]
                    if const_expr(self.whole):
                        self.store(whole, some + i, lane, result, experts)
                    if const_expr(len(self.columns) > 0):
                        self.store_parts(parts, some + i, lane, result, experts)
                    for j in cutlass.range_constexpr(n):
                        of_columns[j] = of_columns[j] + result[j]
            cute.arch.sync_warp()

        if const_expr(self.sums):
            s_sums = smem.allocate_tensor(Float32, cute.make_layout((self.room, WARPS)), 16)
            self.write_sums(s_sums, sums, of_columns, WARPS, cta, warp, lane, thread, experts)

    @cute.jit
    def chosen_slot(self, index, row_of_slot, grad, slot):
        """The expert of a slot and the gradient of its weight."""
        g = Float32(0.0)
        if const_expr(self.of_rows):
            row = Int32(row_of_slot[slot])
            if row < cute.size(grad):
                g = grad[row]
        else:
            g = grad[slot]
        return Int32(index[slot]), g

    @cute.jit
    def get_terms(self, s_terms, lane):
        """The terms of the lane's experts."""
        n = self.per_lane
        width = min(n, QUAD)
        terms = cute.make_rmem_tensor((n,), Float32)
        for v in cutlass.range_constexpr(n // width):
            source = cute.local_tile(s_terms, (width,), (lane * (n // width) + v,))
            cute.autovec_copy(source, cute.local_tile(terms, (width,), (v,)))
        return terms

    @cute.jit
    def put_terms(self, s_terms, lane, terms):
        """Write the terms of the lane's experts."""
        n = self.per_lane
        width = min(n, QUAD)
        for v in cutlass.range_constexpr(n // width):
            to = cute.local_tile(s_terms, (width,), (lane * (n // width) + v,))
            cute.autovec_copy(cute.local_tile(terms, (width,), (v,)), to)

    @cute.jit
    def of_weight(self, logit, g, used, most, total):
        """A term of the logit of this lane's chosen expert, and the coefficient of the softmax in all logits' gradient.
        ``g`` is the gradient of that expert's weight, without the scale.
        """
        zero = Float32(0.0)
        dense = zero
        if const_expr(self.score == "topk_softmax"):
            share = self.softmax_of_chosen(logit, self.largest_chosen(logit, used), used)
            term = share * (g - self.total_of_chosen(g * share))
        else:
            if const_expr(self.score == "sigmoid"):
                score = cutlass.select_(used, sigmoid(logit), zero)
            else:
                score = cutlass.select_(used, cute.math.exp(logit - most) / total, zero)
            if const_expr(self.renormalize):
                norm = self.total_of_chosen(score) + Float32(EPS)
                g = (g - self.total_of_chosen(g * score) / norm) / norm
            if const_expr(self.score == "sigmoid"):
                term = g * score * (Float32(1.0) - score)
            else:
                term = g * score
                dense = zero - self.total_of_chosen(term)
        return term, dense

    @cute.jit
    def of_scores(self, values, softmax, most, total, dense, of_probs, grad_squares, lane, experts):
        """The gradient of every logit, without the terms of the chosen experts."""
        n = self.per_lane
        result = cute.make_rmem_tensor((n,), Float32)
        result.fill(0.0)
        if const_expr(self.needs_softmax):
            if const_expr("z" in self.grads):
                dense += Float32(2.0) * grad_squares[0] * (most + cute.math.log(total))
            for i in cutlass.range_constexpr(n):
                result[i] = dense * softmax[i]
        if const_expr("p" in self.grads):
            scores, factor = softmax, Float32(1.0)
            if const_expr(self.score == "sigmoid"):
                scores = self.sigmoids(values, lane, experts)
                factor = Float32(1.0) / (self.total(scores) + Float32(EPS))
            products = cute.make_rmem_tensor((n,), Float32)
            for i in cutlass.range_constexpr(n):
                products[i] = of_probs[i] * scores[i]
            mean = self.total(products) * factor
            for i in cutlass.range_constexpr(n):
                slope = scores[i]
                if const_expr(self.score == "sigmoid"):
                    slope = scores[i] * (Float32(1.0) - scores[i]) * factor
                result[i] = result[i] + slope * (of_probs[i] - mean)
        return result

    @cute.jit
    def store_parts(self, parts, token, lane, values, experts):
        """Write the values as bf16 parts; zeros in the columns that only fill a block up."""
        n = self.per_lane
        width, blocks = min(n, VECTOR), len(self.columns)
        padded = parts.shape[1] // blocks
        rest = cute.make_rmem_tensor((n,), Float32)
        for i in cutlass.range_constexpr(n):
            rest[i] = Float32(cutlass.select_(lane * n + i < experts, values[i], Float32(0.0)))
        for p in cutlass.range_constexpr(max(self.columns) + 1):
            part, rest = split_off(rest, parts.element_type)
            for b in cutlass.range_constexpr(blocks):
                if const_expr(self.columns[b] == p):
                    for v in cutlass.range_constexpr(n // width):
                        expert = lane * n + v * width
                        if expert < padded:
                            to = cute.local_tile(parts[token, None], (width,), ((b * padded + expert) // width,))
                            cute.autovec_copy(cute.local_tile(part, (width,), (v,)), to)
