"""The kernel of the gradient of a router's logits.

A warp has one token, and computes its scores again. It writes each fp32 value as a sum of bf16 *parts*, side by side,
so that tensor cores can multiply them: each part has 8 more bits. It also writes the ends of the groups of tokens over
which the gradient of the weight is summed.

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

from fusedmoe.kernels.sm90.parts import split_off
from fusedmoe.kernels.sm90.router import EPS, OfTokens, fake_experts, sigmoid, total_of
from fusedmoe.kernels.sm90.warps import LANES, VECTOR, fake_matrix, fake_vector

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

    @property
    def symbol(self) -> str:
        flags = (
            (self.renormalize, "renormalized"), (self.of_rows, "rows"), (self.grads, self.grads), (self.sums, "sums"),
            (self.whole, "whole"), (not self.aligned, "any"),
        )  # fmt: skip
        columns = "".join(map(str, self.columns)) or "none"
        return "_".join([f"sm90_choose_backward_{self.score}_{self.room}_{columns}", *(n for on, n in flags if on)])

    @property
    def sources(self) -> tuple[str, ...]:
        return *super().sources, "fusedmoe.kernels.sm90.parts"

    @property
    def needs_softmax(self) -> bool:
        """Whether a softmax over all experts has a gradient."""
        return self.score == "softmax" or "z" in self.grads or ("p" in self.grads and self.score != "sigmoid")

    def compile(self) -> Any:
        """Compile without a GPU; a function of logits (T, E) fp32, ids (T*K,) int64, rows of slots (T*K,) int64, the
        weights' gradient (T*K,) fp32, the gradients of logits (T, E), column sums (E,) and squares (1,), all fp32,
        parts (T, blocks * padded E) bf16, the gradient (T, E) fp32, column sums (CTAs, E) fp32, the ends of groups of
        tokens (G,) int32, K, the weights' scale, the tokens of a CTA, and those of a group.
        """
        tokens, experts, slots = cute.sym_int(), cute.sym_int(divisibility=self.unit), cute.sym_int()
        sums = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(), experts), (cute.sym_int64(), 1))
        return self.compiled_for(
            fake_experts(tokens, experts, self.unit), fake_vector("int64", slots), fake_vector("int64", slots),
            fake_vector("fp32", slots), fake_experts(tokens, experts, self.unit), fake_vector("fp32", experts),
            fake_vector("fp32", 1), fake_matrix("bf16", cute.sym_int(), cute.sym_int(divisibility=VECTOR)),
            fake_experts(tokens, experts, self.unit), sums,
            fake_vector("int32", cute.sym_int()), Int32(1), Float32(1), Int32(1), Int32(1),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self, logits, index, row_of_slot, grad, grad_logits, grad_sums, grad_squares, parts, whole, sums, ends,
        chosen, scale, cta_tokens, group_tokens, stream,
    ):  # fmt: skip
        ctas = cute.ceil_div(logits.shape[0], cta_tokens)
        self.kernel(
            logits, index, row_of_slot, grad, grad_logits, grad_sums, grad_squares, parts, whole, sums, ends,
            chosen, scale, cta_tokens, group_tokens,
        ).launch(grid=(ctas, 1, 1), block=(WARPS * LANES, 1, 1), stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self, logits, index, row_of_slot, grad, grad_logits, grad_sums, grad_squares, parts, whole, sums, ends,
        chosen, scale, cta_tokens, group_tokens,
    ):  # fmt: skip
        n = self.per_lane
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        experts = logits.shape[1]
        of_columns = cute.make_rmem_tensor((n,), Float32)
        of_columns.fill(0.0)
        of_probs = self.load_vector(grad_sums, lane, experts) if const_expr("p" in self.grads) else None

        if cta == 0:
            for group in cutlass.range(thread, cute.size(ends), WARPS * LANES, unroll=1):
                ends[group] = cutlass.min((group + 1) * group_tokens, logits.shape[0])
        end = cutlass.min((cta + 1) * cta_tokens, logits.shape[0])
        for token in cutlass.range(cta * cta_tokens + warp, end, WARPS, unroll=1):
            values = self.load(logits, token, lane, 0, experts, -math.inf)
            expert, g = self.chosen_slot(index, row_of_slot, grad, token, chosen, lane)
            logit = Float32(logits[token, expert])
            g = g * scale

            result, term = self.of_scores(values, logit, g, of_probs, grad_squares, lane, lane < chosen, experts)
            for k in cutlass.range(chosen, unroll=4):
                at, value = cute.arch.shuffle_sync(expert, k), cute.arch.shuffle_sync(term, k)
                for i in cutlass.range_constexpr(n):
                    if at == lane * n + i:
                        result[i] = result[i] + value
            if const_expr("l" in self.grads):
                more = self.load(grad_logits, token, lane, 0, experts, 0.0)
                for i in cutlass.range_constexpr(n):
                    result[i] = result[i] + more[i]
            if const_expr(self.whole):
                self.store(whole, token, lane, result, experts)
            if const_expr(len(self.columns) > 0):
                self.store_parts(parts, token, lane, result, experts)
            for i in cutlass.range_constexpr(n):
                of_columns[i] = of_columns[i] + result[i]

        if const_expr(self.sums):
            smem = SmemAllocator()
            s_sums = smem.allocate_tensor(Float32, cute.make_layout((self.room, WARPS)), 16)
            self.write_sums(s_sums, sums, of_columns, WARPS, cta, warp, lane, thread, experts)

    @cute.jit
    def chosen_slot(self, index, row_of_slot, grad, token, chosen, lane):
        """The expert of slot ``lane`` and the gradient of its weight; zeros after the last slot."""
        expert, g = Int32(0), Float32(0.0)
        if lane < chosen:
            slot = token * chosen + lane
            expert = Int32(index[slot])
            if const_expr(self.of_rows):
                row = Int32(row_of_slot[slot])
                if row < cute.size(grad):
                    g = grad[row]
            else:
                g = grad[slot]
        return expert, g

    @cute.jit
    def of_scores(self, values, logit, g, of_probs, grad_squares, lane, used, experts):
        """The gradient of every logit, and a term of the logit of this lane's chosen expert. ``g`` is the gradient of
        that expert's weight, without the scale, and zero if there is none.
        """
        n, zero = self.per_lane, Float32(0.0)
        result = cute.make_rmem_tensor((n,), Float32)
        result.fill(0.0)
        softmax, most, total, dense = values, zero, Float32(1.0), zero
        if const_expr(self.needs_softmax):
            softmax, most, total = self.softmax(values)

        # the weights: `dense` is a term of each expert's score, multiplied by its softmax
        if const_expr(self.score == "topk_softmax"):
            share = self.softmax_of_chosen(logit, used)
            term = share * (g - total_of(g * share))
        else:
            if const_expr(self.score == "sigmoid"):
                score = cutlass.select_(used, sigmoid(logit), zero)
            else:
                score = cutlass.select_(used, cute.math.exp(logit - most) / total, zero)
            if const_expr(self.renormalize):
                norm = total_of(score) + Float32(EPS)
                g = (g - total_of(g * score) / norm) / norm
            if const_expr(self.score == "sigmoid"):
                term = g * score * (Float32(1.0) - score)
            else:
                term = g * score
                dense = zero - total_of(term)
        term = cutlass.select_(used, term, zero)

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
        return result, term

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
