"""The router's kernels as functions of torch tensors. No call waits for the device, except the first one on a device,
which makes the tile counters.

Each ``bind_*`` returns the function for tensors of the same shapes, dtypes and strides as its arguments. Tokens and
router weight have unit stride in H, a multiple of 8. All other tensors are contiguous. `limits` checks these
constraints.

A gradient of logits consists of bf16 *parts*, side by side: the nearest bf16 value, the nearest one to what is left,
and so on. Two parts have 16 bits of precision, which suits results in bf16. Three have the 24 bits of fp32; the
gradient of an fp32 weight needs them. A block of columns has one part, and zeros after its E columns up to a multiple
of 8.

Axes: T tokens, K chosen experts per token, E experts, H hidden, P blocks of parts, G groups of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.base.lasting import unread
from fusedmoe.kernels.build.compiler import load
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.rows.move.functions import NAMES
from fusedmoe.kernels.rows.move.slot_functions import bind_route, count_pitch
from fusedmoe.kernels.sm90.gemm.arguments import RaggedKArguments, RaggedMArguments
from fusedmoe.kernels.sm90.launch import placeholders, scheduling, sms_for, tile_counter
from fusedmoe.kernels.sm90.limits import LANES, UNIT
from fusedmoe.kernels.sm90.one_group import bind_offsets
from fusedmoe.kernels.sm90.products import bind_grouped_gemm, bind_grouped_wgrad
from fusedmoe.kernels.sm90.tiles.choice import Problem
from fusedmoe.kernels.sm90.tiles.config import TileConfig

QUAD = 4  # fp32 values in 16 bytes
CHUNK_SLOTS = 2048  # at most, in a chunk of `Route`
MOST_CHUNK_TOKENS = 256
LEAST_CHUNK_TOKENS = 32
FEW_SLOTS = 8  # of a token: then a warp computes the weights of four tokens at once
CHUNKS = 128  # about one per SM
BACKWARD_TOKENS = 32  # per CTA
GROUP_UNIT = 64  # rows of a tile of the contraction
TILES = 132  # of a weight's gradient: one per SM; two write and read twice as many sums, and take a quarter longer
LOGIT_TILES = tuple(TileConfig(128, width, 2, 1, pingpong=False) for width in (64, 128, 192))
WGRAD_COLUMNS = 192  # of a tile of a weight's gradient
WGRAD_TILE = TileConfig(128, 128, 2, 1, pingpong=False)


@dataclass(frozen=True)
class Choice:
    """How a router turns logits into experts and weights: its settings, see `fusedmoe.Router`."""

    score: str
    top_k: int
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    corrected: bool = False  # whether there is a balance bias

    @property
    def formula(self) -> tuple[str, bool]:
        """Score and renormalisation that give the same weights in the fewest operations.

        A softmax that is renormalised over the chosen experts is the softmax of their logits. This does not hold if a
        correction chooses experts whose scores are tiny: the sum of their scores has an addend, 1e-20.
        """
        if self.score == "softmax" and self.renormalize and not self.corrected:
            return "topk_softmax", False
        return self.score, self.renormalize and self.score != "topk_softmax"


class Routed(NamedTuple):
    """The results of a router's kernels. ``sums`` (E + 1,): of the probabilities, and of the squared logsumexp."""

    expert_index: Tensor
    expert_weight: Tensor
    logits: Tensor
    counts: Tensor
    sums: Tensor | None


def chunk_tokens(tokens: int, chosen: int) -> int:
    """Return the tokens of a chunk: few enough that the chunks occupy a GPU, and that `Route` can place its slots."""
    by_size = -(-tokens // CHUNKS // LEAST_CHUNK_TOKENS) * LEAST_CHUNK_TOKENS
    return min(max(by_size, LEAST_CHUNK_TOKENS), MOST_CHUNK_TOKENS, CHUNK_SLOTS // chosen)


def slots_at_once(chosen: int) -> int:
    """Return the maximum number of slots of a token of the kernel that serves this number of slots."""
    return FEW_SLOTS if chosen <= FEW_SLOTS else LANES


def room(experts: int) -> int:
    """Return the maximum number of experts of the kernel that serves this number of experts."""
    return LANES << (-(-experts // LANES) - 1).bit_length()


def bind_router(
    x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, choice: Choice, want_sums: bool, options: KernelOptions
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Routed]:
    """Return the router of ``(x, weight, bias, correction)``; the correction, the balance bias, is fp32 or None.

    Logits have the accuracy of fp32. ``counts`` are the slots per expert, then zero, of each chunk of `chunk_tokens`.
    There are two launches; one more for an fp32 weight, and one for the sums.
    """
    from fusedmoe.kernels.rows.router.choose import Choose  # deferred: imports the CuTe DSL

    tokens, experts, chosen, device = x_TH.shape[0], weight_EH.shape[0], choice.top_k, x_TH.device
    split = weight_EH.dtype is not x_TH.dtype
    parts = 3 if split else 1
    in_product = bias_E is not None and bias_E.dtype is x_TH.dtype and not split
    added = None if bias_E is None or in_product else NAMES[bias_E.dtype]
    aligned = experts % QUAD == 0
    final = aligned and not split and added is None  # whether the products are the logits
    score, renormalize = choice.formula
    grouped = choice.top_groups < choice.num_groups
    kernel = load(
        Choose(
            score, room(experts), renormalize, bias=added, corrected=choice.corrected, grouped=grouped, parts=parts,
            writes_logits=not final, sums=want_sums, aligned=aligned, slots=slots_at_once(chosen),
        )
    )  # fmt: skip
    product = _bind_logits(x_TH, parts * experts, in_product, options)
    to_parts = _bind_parts(weight_EH, x_TH.dtype, (0, 1, 2), experts) if split else None
    of_chunk = chunk_tokens(tokens, chosen)
    chunks, pitch = -(-tokens // of_chunk), count_pitch(experts)
    numbers = (chosen, choice.scale, choice.num_groups, choice.top_groups, of_chunk)
    no_sums = unread(device, torch.float32, 1, experts)
    no_vector = no_sums[0]

    def run(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, correction_E: Tensor | None) -> Routed:
        weight = weight_EH if to_parts is None else to_parts(weight_EH)
        products = product(x_TH, weight, bias_E if in_product else None)
        logits = products if final else products.new_empty(tokens, experts)
        index = products.new_empty(tokens, chosen, dtype=torch.int64)
        weight_TK = products.new_empty(tokens, chosen)
        counts = products.new_empty(chunks, pitch, dtype=torch.int32)[:, : experts + 1]
        sums = products.new_empty(chunks, experts + 1) if want_sums else no_sums
        kernel(
            products, no_vector if added is None else bias_E, no_vector if correction_E is None else correction_E,
            index.view(-1), weight_TK.view(-1), logits, counts, sums, *numbers,
        )  # fmt: skip
        return Routed(index, weight_TK, logits, counts, sums.sum(0) if want_sums else None)

    return run


def bind_route_counted(
    index_TK: Tensor, weight_TK: Tensor, num_experts: int, num_rows: int | None = None
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """Return `bind_route` of ``(ids, weights, counts)``, with the counts of `bind_router`: one launch."""
    tokens, chosen = index_TK.shape
    return bind_route(index_TK, weight_TK, num_experts, chunk_tokens(tokens, chosen) * chosen, num_rows)


class LogitsGrads(NamedTuple):
    """The gradients from which that of the logits is computed. All are fp32, and any may be None.

    ``weight`` is the gradient of the weights: (T, K), or of rows (R,) if ``row_of_slot`` (T, K) is given. ``logits``
    is (T, E), at an address that is a multiple of 16 bytes, ``probs_sum`` (E,) and ``z_sum`` ().
    """

    weight: Tensor | None
    row_of_slot: Tensor | None
    logits: Tensor | None
    probs_sum: Tensor | None
    z_sum: Tensor | None


class LogitsGrad(NamedTuple):
    """The gradient of a router's logits.

    ``parts`` is (T, P * padded E) bf16, ``ends`` (G,) int32, the ends of groups of tokens. ``sums`` (E,) fp32, the sum
    over the tokens, is the gradient of the router's bias. ``whole`` is the gradient (T, E) in fp32. ``weight`` is the
    router's weight in parts, for `bind_router_dgrad`.
    """

    parts: Tensor
    ends: Tensor
    sums: Tensor | None
    whole: Tensor | None
    weight: Tensor | None


def bind_logits_grad(
    logits_TE: Tensor,
    grads: LogitsGrads,
    choice: Choice,
    blocks: tuple[int, ...],
    groups: int,
    want_sums: bool,
    want_whole: bool,
    weight_EH: Tensor | None,
) -> Callable[[Tensor, Tensor, LogitsGrads, Tensor | None], LogitsGrad]:
    """Return the gradient of the logits of ``(logits, ids, grads, weight)``: one launch, and one more for the sums.

    All gradients are contiguous. One more launch makes zeros if none is that of the weights.

    - ``blocks``: the part in each block of columns, see `blocks_for`. Empty if no product follows.
    - ``groups``: G: `weight_groups`, or 1 if no gradient of the weight follows.
    - ``weight_EH``: the router's weight, if `bind_router_dgrad` follows.
    """
    from fusedmoe.kernels.rows.router.gradient import ChooseBackward  # deferred: imports the CuTe DSL

    (tokens, experts), chosen, device = logits_TE.shape, choice.top_k, logits_TE.device
    score, renormalize = choice.formula
    exist = {"l": grads.logits, "p": grads.probs_sum, "z": grads.z_sum}
    others = "".join(letter for letter, grad in exist.items() if grad is not None)
    of_rows = grads.row_of_slot is not None
    rows = () if weight_EH is None else weight_rows(weight_EH.dtype)
    no_weight = unread(device, torch.bfloat16, experts, UNIT) if weight_EH is None else None
    shape = ChooseBackward(
        score, room(experts), renormalize, blocks, of_rows, others, want_sums, want_whole,
        None if weight_EH is None else NAMES[weight_EH.dtype], rows, aligned=experts % QUAD == 0,
    )  # fmt: skip
    kernel = load(shape if shape.reads_all else replace(shape, slots=slots_at_once(chosen)))
    ctas, columns = -(-tokens // BACKWARD_TOKENS), max(len(blocks), 1) * padded(experts)
    no_sums = unread(device, torch.float32, 1, experts)
    no_vector, no_scalar = no_sums[0], no_sums[0, :1]
    group_tokens = -(-tokens // groups // GROUP_UNIT) * GROUP_UNIT

    def run(logits_TE: Tensor, index_TK: Tensor, grads: LogitsGrads, weight_EH: Tensor | None = None) -> LogitsGrad:
        weight, row_of_slot, logits, probs_sum, z_sum = grads
        if weight is None:
            weight = logits_TE.new_zeros(tokens, chosen)
        parts = logits_TE.new_empty(tokens if blocks else 0, columns, dtype=torch.bfloat16)
        whole = torch.empty_like(logits_TE) if want_whole else None
        sums = logits_TE.new_empty(ctas, experts) if want_sums else no_sums
        ends, index = index_TK.new_empty(groups, dtype=torch.int32), index_TK.view(-1)
        split = None
        if weight_EH is not None:
            split = parts.new_empty(len(rows) * padded(experts), weight_EH.shape[1])
        kernel(
            logits_TE, index, index if row_of_slot is None else row_of_slot.view(-1),
            weight.view(-1), logits_TE if logits is None else logits,
            no_vector if probs_sum is None else probs_sum, no_scalar if z_sum is None else z_sum.view(1),
            parts, logits_TE if whole is None else whole, sums, ends,
            no_weight if weight_EH is None else weight_EH, no_weight if split is None else split,
            chosen, choice.scale, BACKWARD_TOKENS, group_tokens,
        )  # fmt: skip
        return LogitsGrad(parts, ends, sums.sum(0) if want_sums else None, whole, split)

    return run


def blocks_for(weight_dtype: torch.dtype) -> tuple[int, ...]:
    """Return the part in each block of columns of a logits' gradient, for a router weight of this dtype.

    A product with an fp32 weight also has a term with the weight's second part, and so the first block twice.
    """
    return (0, 0, 1, 2) if weight_dtype is torch.float32 else (0, 1)


def weight_rows(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the part in each block of rows of a router weight of this dtype, for the gradient of the tokens."""
    return (1, 0, 0) if dtype is torch.float32 else (0, 0)


def padded(experts: int) -> int:
    """Return the columns of a block."""
    return -(-experts // UNIT) * UNIT


def bind_router_dgrad(
    parts: Tensor, weight_EH: Tensor, options: KernelOptions
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``dx = dlogits @ weight``, (T, H) bf16, of ``(parts, ends, weight's parts)``: one launch."""
    columns = len(weight_rows(weight_EH.dtype)) * padded(weight_EH.shape[0])
    like = parts.new_empty(columns, weight_EH.shape[1])
    product = bind_grouped_gemm(parts[:, :columns], like.T.unsqueeze(0), None, None, options)

    def run(parts: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
        # the last end is that of one group with all tokens
        return product(parts[:, :columns], weight.T.unsqueeze(0), None, ends[-1:], None)

    return run


def bind_router_wgrad(
    parts: Tensor, x_TH: Tensor, experts: int, groups: int, dtype: torch.dtype, options: KernelOptions
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``dweight = dlogits.T @ x``, (E, H), of ``(parts, ends, x)``: two launches, by groups of tokens and their sum."""
    from fusedmoe.kernels.rows.move.parts import SumParts  # deferred: imports the CuTe DSL

    exact, hidden = dtype is torch.float32, x_TH.shape[1]
    first, count = (padded(experts), 3) if exact else (0, 2)  # without the first of two equal blocks
    if exact:
        product = _bind_exact_wgrad(parts[:, first:], x_TH, groups, options)
    else:
        like = torch.empty(groups, dtype=torch.int32, device=x_TH.device)
        product = bind_grouped_wgrad(parts, x_TH, like, torch.float32, False, options)
    kernel = load(SumParts(NAMES[dtype], count))

    def run(parts: Tensor, ends: Tensor, x_TH: Tensor) -> Tensor:
        products = product(parts[:, first:], x_TH, ends, None)
        grad = x_TH.new_empty(experts, hidden, dtype=dtype)
        kernel(products, grad)
        return grad

    return run


def weight_groups(tokens: int, experts: int, hidden: int, weight_dtype: torch.dtype) -> int:
    """Return the number of groups of tokens for a weight's gradient, so that the tiles of all groups fill a GPU."""
    rows = (3 if weight_dtype is torch.float32 else 2) * padded(experts)
    tiles = -(-rows // WGRAD_TILE.tile_m) * -(-hidden // WGRAD_COLUMNS)
    return max(min(TILES // tiles, -(-tokens // GROUP_UNIT)), 1)


def _bind_parts(
    weight_EH: Tensor, out: torch.dtype, blocks: tuple[int, ...], height: int
) -> Callable[[Tensor], Tensor]:
    """Return a weight's parts, one block of ``height`` rows below the other."""
    from fusedmoe.kernels.rows.move.parts import Parts  # deferred: imports the CuTe DSL

    kernel = load(Parts(NAMES[weight_EH.dtype], blocks, NAMES[out]))
    rows, columns = len(blocks) * height, weight_EH.shape[1]

    def run(weight_EH: Tensor) -> Tensor:
        parts = weight_EH.new_empty(rows, columns, dtype=out)
        kernel(weight_EH, parts)
        return parts

    return run


def _bind_logits(
    x_TH: Tensor, columns: int, biased: bool, options: KernelOptions
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """``x @ weight.T + bias`` in fp32, (T, columns), of ``(x, weight, bias)``."""
    from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN_FP32  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.gemm.operands import Promoted
    from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM

    (tokens, hidden), device = x_TH.shape, x_TH.device
    config, pitch = logits_tile(columns), -(-columns // QUAD) * QUAD
    kernel = load(RaggedM(Promoted(NAMES[x_TH.dtype]), config, epilogue=PLAIN_FP32))
    problem = Problem("plain", tokens, 1, columns, hidden, sms_for(device, options))
    numbers = (0.0, 1.0, 0.0, biased, False, False, *scheduling(problem, config, problem.sms))
    no_bias, no_scale = placeholders(device, x_TH.dtype)
    offsets = bind_offsets(tokens, device)

    def run(x_TH: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products = x_TH.new_empty(tokens, pitch, dtype=torch.float32)[:, :columns]
        of_bias = no_bias if bias is None else bias.unsqueeze(0)
        counter, dynamic = tile_counter(device, options.schedule)
        arguments = RaggedMArguments(
            x_TH, weight.unsqueeze(0), offsets(), of_bias, no_scale, counter, *numbers, dynamic
        )  # fmt: skip
        kernel(*arguments, products)
        return products

    return run


def logits_tile(columns: int) -> TileConfig:
    """Return the tile of a product with this many columns: the least columns in excess, then the fewest tiles."""
    return min(LOGIT_TILES, key=lambda tile: (-(-columns // tile.tile_n) * tile.tile_n, -tile.tile_n))


def _bind_exact_wgrad(
    parts: Tensor, x_TH: Tensor, groups: int, options: KernelOptions
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """`bind_grouped_wgrad` with fp32 results of the accuracy of fp32."""
    from fusedmoe.kernels.sm90.gemm.operands import Promoted  # deferred: imports the CuTe DSL
    from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK

    (tokens, rows), hidden, device = parts.shape, x_TH.shape[1], x_TH.device
    kernel = load(RaggedK(Promoted(NAMES[x_TH.dtype]), WGRAD_TILE, out="fp32"))
    problem = Problem("wgrad", tokens, groups, hidden, rows, sms_for(device, options))
    numbers = scheduling(problem, WGRAD_TILE, problem.sms)

    def run(parts: Tensor, x_TH: Tensor, ends: Tensor, _: Tensor | None) -> Tensor:
        products = x_TH.new_empty(groups, rows, hidden, dtype=torch.float32)
        counter, dynamic = tile_counter(device, options.schedule)
        kernel(*RaggedKArguments(parts, x_TH, ends, products, counter, *numbers, dynamic))
        return products

    return run
