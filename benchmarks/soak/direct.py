"""Launches that no layer of one GPU makes at these sizes: those beside another launch, and those of expert parallelism.

Each function runs kernels on some operands and returns their results, and the same values from other kernels: both must
have the same bits. Axes: R rows, T tokens, K chosen experts per token, E experts, H hidden, I intermediate features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.soak.layers import ROWS, rows_per_expert
from fusedmoe.kernels.exchange import functions as exchange_functions
from fusedmoe.kernels.exchange.functions import Region
from fusedmoe.kernels.exchange.layout import BEGIN, CONTROL_WORDS, COPY_WARPS, END, READY, TELL
from fusedmoe.kernels.options import KernelOptions, Schedule
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.rows.quantize import block_functions, format_functions
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.launch import Codes, Part
from fusedmoe.kernels.sm90.products import with_strides
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.formats import fp8_block, quantize

FEW_SMS = 16
"""Of a sum that another launch runs beside."""
SWIGLU = Activation("swiglu")

Values = dict[str, Tensor]
"""Results by name."""


@dataclass(frozen=True)
class Direct:
    """A function of operands, and the number of candidate tiles that it runs with."""

    name: str
    run: Callable[[Operands, KernelOptions], tuple[Values, Values]]
    tiles: int = 1
    experts: int = 128
    top_k: int = 8
    rows: int = ROWS
    hidden: int = 512
    intermediate: int = 256

    def make(self, device: torch.device) -> MadeDirect:
        """Return the function with random operands."""
        return MadeDirect(self, device)


class MadeDirect:
    """A function with the weights of its operands."""

    def __init__(self, direct: Direct, device: torch.device) -> None:
        self.direct, self.device = direct, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.gate_up = self.randn(direct.experts, 2 * direct.intermediate, direct.hidden)
        self.down = self.randn(direct.experts, direct.hidden, direct.intermediate)

    def randn(self, *shape: int) -> Tensor:
        """Return normal values in bf16."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device=self.device).bfloat16()

    def call(self, distribution: str, schedule: Schedule) -> tuple[Operands, KernelOptions]:
        """Return the operands with these rows per expert."""
        return Operands(self, distribution), KernelOptions(schedule=schedule)

    def results(self, call: tuple[Operands, KernelOptions]) -> Values:
        """Return the results; raise ValueError if they are not those of other kernels."""
        got, want = self.direct.run(*call)
        for name, result in got.items():
            if not torch.equal(result, want[name]):
                raise ValueError(f"{name} differs from that of other kernels")
        return got


class Operands:
    """Rows sorted by expert, and their tokens. The index of a row without a token is not read."""

    def __init__(self, made: MadeDirect, distribution: str) -> None:
        direct, device = made.direct, made.device
        splits = torch.tensor(rows_per_expert(distribution, direct.experts, direct.rows), device="cpu")
        used, self.tokens = int(splits.sum()), direct.rows // direct.top_k
        slots = torch.randperm(direct.rows, generator=torch.Generator().manual_seed(2), device="cpu")[:used]
        # the rows of an expert are in token order
        expert = torch.arange(direct.experts, device="cpu").repeat_interleave(splits)
        slot_of_row = slots[(expert * direct.rows + slots).argsort()]
        row_of_slot = torch.full((direct.rows,), direct.rows, device="cpu")
        row_of_slot[slot_of_row] = torch.arange(used, device="cpu")
        token_of_row = torch.zeros(direct.rows, dtype=torch.int32, device="cpu")
        token_of_row[:used] = (slot_of_row // direct.top_k).int()
        self.offsets, self.token_of_row = splits.cumsum(0).int().to(device), token_of_row.to(device)
        self.row_of_slot = row_of_slot.view(self.tokens, direct.top_k).to(device)
        self.gate_up, self.down = made.gate_up, made.down
        self.x, self.dy = made.randn(self.tokens, direct.hidden), made.randn(self.tokens, direct.hidden)
        self.rows = made.randn(direct.rows, direct.hidden)
        self.grads = made.randn(direct.rows, 2 * direct.intermediate)
        self.inner = made.randn(direct.rows, direct.intermediate)
        self.scale = torch.rand(direct.rows, generator=made.generator, dtype=torch.float32, device=device) + 0.2

    def ranges(self, tile: int = 128, paddings: bool = False) -> Part:
        """Return the rows of three ranks, on the second of them, with all rows there."""
        of_product = {"tile": tile, "paddings": paddings}
        run = row_functions.bind_row_ranges(self.offsets, self.token_of_row, 1, 3, self.tokens, **of_product)
        return Part(run(self.offsets, self.token_of_row))

    def blocks_of_experts(self) -> Part:
        """Return the same rows by blocks of experts, with own rows first."""
        own = 1, self.tokens // 3
        run = row_functions.bind_expert_blocks(self.offsets, self.token_of_row, own=own)
        return Part(run(self.offsets, self.token_of_row, 0))


def _both(
    bind: Callable[..., Any],
    o: Operands,
    *tensors: Any,
    call: Callable[[Any], tuple[Any, ...]],
    by_experts: bool = False,
) -> tuple[Values, Values]:
    """Return the results of a product by ranges, and of the whole product."""
    whole = bind(*tensors)(*call(o.offsets))
    parts = bind(*tensors, ranges=True)(*call([o.blocks_of_experts() if by_experts else o.ranges()]))
    return _named(parts), _named(whole)


def _named(results: Any) -> Values:
    each = results if isinstance(results, tuple) else (results,)
    return {str(i): t for i, t in enumerate(each) if t is not None}


def product_of_ranges(o: Operands, options: KernelOptions) -> tuple[Values, Values]:
    """The second product."""
    bind, x, w = products.bind_grouped_gemm, o.inner, o.down
    return _both(bind, o, x, w, None, o.scale, options, call=lambda rows: (x, w, None, rows, o.scale))


def _codes(x: Tensor, w: Tensor) -> tuple[Codes, Codes]:
    """Return the operands of a product in FP8."""
    of_rows, of_weight = quantize(x, fp8_block(), -1), quantize(w, fp8_block(across=128), -1)
    return (
        Codes(of_rows.data, with_strides(of_rows.scale)),
        Codes(of_weight.data, with_strides(of_weight.scale)),
    )


def fp8_product_of_ranges(o: Operands, options: KernelOptions) -> tuple[Values, Values]:
    """The second product, in FP8."""
    operands = _codes(o.inner, o.down)
    arguments = *operands, None, None, options
    return _both(products.bind_grouped_gemm, o, *arguments, call=lambda rows: (*operands, None, rows, None))


def activation_of_ranges(
    o: Operands, options: KernelOptions, keep: bool = True, by_experts: bool = False
) -> tuple[Values, Values]:
    """The first product and its activation, of tokens through their index; ``keep``: with the preactivation."""
    bind, x, w, index = products.bind_grouped_gemm_activation, o.x, o.gate_up, o.token_of_row
    arguments = x, w, None, o.scale, SWIGLU, keep, options, index
    return _both(bind, o, *arguments, call=lambda rows: (x, w, None, rows, o.scale, index), by_experts=by_experts)


def fp8_activation_of_ranges(o: Operands, options: KernelOptions, keep: bool = True) -> tuple[Values, Values]:
    """The first product and its activation in FP8."""
    x, weight = quantize(o.rows, fp8_block(), offsets=o.offsets), quantize(o.gate_up, fp8_block(across=128))
    a, w = (Codes(t.data, with_strides(t.scale)) for t in (x, weight))
    bind = partial(products.bind_grouped_gemm_activation, quantized=fp8_block())
    arguments = a, w, None, o.scale, SWIGLU, keep, options
    found = _both(bind, o, *arguments, call=lambda rows: (a, w, None, rows, o.scale))
    got, want = ({name: t.float() if t.itemsize == 1 else t for name, t in each.items()} for each in found)
    return got, want


def derivative_of_ranges(o: Operands, options: KernelOptions) -> tuple[Values, Values]:
    """The gradient of the first product's result."""
    bind, dy, w, p, index = products.bind_grouped_gemm_activation_backward, o.dy, o.down, o.grads, o.token_of_row
    arguments = dy, w, p, o.scale, SWIGLU, True, True, options, index
    return _both(bind, o, *arguments, call=lambda rows: (dy, w, rows, p, o.scale, index))


def fp8_derivative_of_ranges(o: Operands, options: KernelOptions) -> tuple[Values, Values]:
    """The gradient of the first product's result, of codes and scales, in three forms."""
    of_rows = quantize(o.rows, fp8_block(), offsets=o.offsets)
    of_weight = quantize(o.down.mT.contiguous(), fp8_block(across=128))
    dy, w = (Codes(t.data, with_strides(t.scale)) for t in (of_rows, of_weight))
    arguments = dy, w, o.grads, o.scale, SWIGLU, fp8_block(), (True, True, True), True, options
    bind = products.bind_grouped_gemm_activation_backward_codes
    found = []
    for rows, ranges in (([o.ranges(256, True)], True), (o.offsets, False)):
        forms, of_scale = bind(*arguments, ranges=ranges)(dy, w, rows, o.grads, o.scale)
        values: Values = {"row scale": of_scale}
        for i, (codes, scale) in enumerate(forms):
            values |= {f"codes {i}": codes.float(), f"scales {i}": 1024 * scale}  # which are small
        found.append(values)
    return found[0], found[1]


def _beside(o: Operands, wgrad: Callable[[bool], Callable[[], Tensor]]) -> tuple[Values, Values]:
    """Return a sum over slots and the weight gradient that runs beside it, and both one after the other."""
    found = []
    for sms in (FEW_SMS, 0):
        total = slot_functions.bind_sum_slots(o.rows, o.row_of_slot, None, o.x, sms)
        product = wgrad(sms > 0)
        # copied before the sum: the product follows it immediately
        addend = o.x.clone()
        sums = total(o.rows, o.row_of_slot, None, addend)
        found.append({"sums": sums, "weight gradient": product()})
    return found[0], found[1]


def wgrad_beside_sum(
    o: Operands, options: KernelOptions, adds: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[Values, Values]:
    """The last weight gradient of a layer of bf16, in a dtype; ``adds``: added to a gradient."""

    def wgrad(beside: bool) -> Callable[[], Tensor]:
        operands = o.dy, o.inner, o.offsets
        run = products.bind_grouped_wgrad(*operands, dtype, adds, options, o.token_of_row, "grad_output", beside)
        out = torch.ones_like(o.down) if adds else None
        return lambda: run(*operands, out, o.token_of_row)

    return _beside(o, wgrad)


def fp8_wgrad_beside_sum(
    o: Operands, options: KernelOptions, adds: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[Values, Values]:
    """The last weight gradient of a layer of FP8, in a dtype; ``adds``: added to a gradient."""
    dy, x = (quantize(rows, fp8_block(), -2, offsets=o.offsets) for rows in (o.rows, o.inner))
    operands = Codes(dy.data, with_strides(dy.scale)), Codes(x.data, with_strides(x.scale)), o.offsets

    def wgrad(beside: bool) -> Callable[[], Tensor]:
        run = products.bind_grouped_wgrad(*operands, dtype, adds, options, beside=beside)
        out = torch.ones_like(o.down) if adds else None
        return lambda: run(*operands, out)

    return _beside(o, wgrad)


def sums_and_copies(o: Operands, options: KernelOptions) -> tuple[Values, Values]:
    """A sum over slots and a received part; copies of the rows of one slot; the gradient of a bias in fp32."""
    part = slot_functions.bind_sum_slots_and_part(o.rows, o.row_of_slot, None)(o.rows, o.row_of_slot, None, o.x)
    total = slot_functions.bind_sum_slots(o.rows, o.row_of_slot, None)(o.rows, o.row_of_slot)
    bias = row_functions.column_sums(o.grads, o.offsets, torch.float32)
    in_bf16 = row_functions.column_sums(o.grads, o.offsets)
    return (
        {"part": part, "bias": bias.bfloat16()},
        {"part": total + o.x, "bias": in_bf16},
    )


RANKS, HERE = 2, 3
"""Of the exchanges: ranks, and the experts of each."""


def _regions(o: Operands, sizes: list[int]) -> tuple[list[Region], list[int]]:
    """Return the regions of the ranks, in memory of this GPU, and the places of tensors of these sizes in them.

    Launches follow each other, so a kernel must find the words that it waits for: those of the first exchange.
    """
    places, nbytes = exchange_functions.places(sizes)
    memory = torch.zeros(RANKS, nbytes // 4, dtype=torch.int32, device=o.x.device)
    memory[:, READY : READY + RANKS] = 1
    peers = torch.tensor([m.data_ptr() for m in memory], device=o.x.device)
    return [Region(peers, m[:CONTROL_WORDS], r, 10**9) for r, m in enumerate(memory)], places


def gather(
    o: Operands, options: KernelOptions, index: torch.dtype = torch.int64, block: int = 0
) -> tuple[Values, Values]:
    """The tokens of all ranks; then those of the first rank again, without ids, after a signal. ``block``: the experts
    of a step, or 0 for steps by ranks.
    """
    rows, chosen = len(o.row_of_slot) // RANKS, o.row_of_slot.shape[1]
    tokens = o.x[: RANKS * rows].view(RANKS, rows, -1)
    ids = (o.row_of_slot[: RANKS * rows] % (RANKS * HERE + 2) - 1).to(index).view(RANKS, rows, chosen)
    weights = o.scale[: ids.numel()].view(ids.shape)
    regions, places = _regions(o, [4 * ids[0].numel(), 4 * ids[0].numel(), tokens[0].nbytes])
    send = exchange_functions.bind_send(tokens[0], ids[0], weights[0], RANKS, rows, HERE)
    pull = exchange_functions.bind_pull(tokens[0], RANKS * rows, chosen, HERE, places[-1], FEW_SMS)
    for _ in range(2):  # first, the last rank has not written its ids when others read them
        sent = [send(region, tokens[r], ids[r], weights[r]) for r, region in enumerate(regions)]
    got, want = {}, {}
    for r, (region, (every, of_rank, of_weights)) in enumerate(zip(regions, sent, strict=True)):
        assert of_rank is not None
        assert of_weights is not None
        words = of_rank.new_zeros(-(-HERE // block) if block else RANKS, 3)
        pull(region, every, of_rank, words, block)
        got[f"words {r}"], want[f"words {r}"] = words, torch.zeros_like(words)
        want[f"words {r}"][0 if block else 1 :, -1] = FEW_SMS * COPY_WARPS
        valid = torch.where((ids >= 0) & (ids < RANKS * HERE), ids, -1) - r * HERE
        there = ((valid >= 0) & (valid < HERE)).any(2)
        there[r] = True
        got |= {f"tokens {r}": every.view(tokens.shape)[there], f"ids {r}": of_rank.view(ids.shape)}
        want |= {f"tokens {r}": tokens[there], f"ids {r}": valid.int()}
        got[f"weights {r}"], want[f"weights {r}"] = of_weights.view(ids.shape), weights
    signal = exchange_functions.bind_signal(regions[0])
    of_rows = exchange_functions.bind_send(tokens[0], None, None, RANKS, rows, HERE)
    for phase in (BEGIN, END):
        signal(regions[0], phase)
        signal(regions[1], phase)
    every, *_ = of_rows(regions[0], tokens[0])
    regions[0].control[READY + 1] = regions[0].control[READY]
    signal(regions[0], TELL)
    got["own tokens"], want["own tokens"] = every[:rows], tokens[0]
    return got, want


def gather_of_codes(
    o: Operands, options: KernelOptions, index: torch.dtype | None = torch.int64
) -> tuple[Values, Values]:
    """The codes and scales of the tokens of all ranks; without an index, those of the first rank alone."""
    rows, chosen = len(o.row_of_slot) // RANKS, o.row_of_slot.shape[1]
    of_tokens = quantize(o.x[: RANKS * rows], fp8_block())
    codes, scales = of_tokens.data.view(RANKS, rows, -1), with_strides(of_tokens.scale).view(RANKS, rows, -1)
    ids = torch.zeros(RANKS, rows, chosen, dtype=index or torch.int32, device=o.x.device)
    if index is not None:
        ids = (o.row_of_slot[: RANKS * rows] % (RANKS * HERE + 2) - 1).to(index).view(ids.shape)
    weights = o.scale[: ids.numel()].view(ids.shape)
    sizes = [] if index is None else [4 * ids[0].numel(), 4 * ids[0].numel()]
    width = exchange_functions.packed_width(codes[0], scales[0])
    regions, places = _regions(o, [*sizes, rows * width])
    of_ranks = [(ids[r], weights[r]) if index is not None else (None, None) for r in range(RANKS)]
    send = exchange_functions.bind_send(codes[0], *of_ranks[0], RANKS, rows, HERE, scales[0])
    pull = exchange_functions.bind_pull(codes[0], RANKS * rows, chosen, HERE, places[-1], FEW_SMS)
    for _ in range(1 if index is None else 2):  # see `gather`
        sent = [send(region, codes[r], *of_ranks[r], scales[r]) for r, region in enumerate(regions)]
    got, want = {}, {}
    for r, (region, (every, of_rank, _)) in enumerate(zip(regions, sent, strict=True)):
        here = torch.zeros_like(ids, dtype=torch.int32).view(-1, chosen) if of_rank is None else of_rank
        pull(region, every, here)
        there = ((here >= 0) & (here < HERE)).any(1)
        there[r * rows : (r + 1) * rows] = True
        found = exchange_functions.unpack(every, codes[0], scales[0])
        for name, mine, whole in zip(("codes", "scales"), found, (of_tokens.data, of_tokens.scale), strict=True):
            got[f"{name} {r}"], want[f"{name} {r}"] = mine[there].float(), whole[there].float()
    for values in (got, want):  # scales are small
        values |= {name: 1024 * value for name, value in values.items()}
    return got, want


def scattered(o: Operands, options: KernelOptions) -> tuple[Values, Values]:
    """Codes and scales of tokens in the rows of their slots: of all ranks at once, and of one after the other; and the
    values of the tokens.
    """
    tokens = len(o.row_of_slot) // RANKS * RANKS
    slots, of_tokens, count = o.row_of_slot[:tokens], quantize(o.x[:tokens], fp8_block()), len(o.token_of_row)
    codes, scale = of_tokens.data, of_tokens.scale.contiguous()
    scatter = exchange_functions.bind_scatter(codes, scale, slots, 1, RANKS, count)
    arrived, words = (torch.zeros(RANKS, 1, dtype=torch.int32, device=o.x.device) for _ in range(2))
    once, rows = scatter(codes, scale, slots), scatter(codes, scale, slots, None, arrived)
    scatter(codes, scale, slots, rows, arrived, words)
    there = o.token_of_row < tokens
    there[int(o.offsets[-1]) :] = False
    tokens_there = o.token_of_row[there]
    values = format_functions.bind_dequantize(codes, scale, of_tokens.format)(codes, scale)
    got = {"words": words, "values": values}
    want = {"words": torch.zeros_like(words), "values": of_tokens.dequantize()}
    at = o.token_of_row.clamp(max=tokens - 1)
    columns = block_functions.bind_quantize_columns_of_codes(codes, scale, o.offsets, at)(codes, scale, o.offsets, at)
    by_columns = block_functions.bind_quantize_rows(
        values, of_tokens.format, o.offsets, at, rows=False, columns=True, zero_tail=False
    )
    ((wanted, of_wanted),) = by_columns(values, o.offsets, at)
    blocks = int((-(-o.offsets.diff(prepend=o.offsets.new_zeros(1)) // 128)).sum())  # the others are not written
    got["columns"], want["columns"] = (t[:, : 128 * blocks].float() for t in (columns[0], wanted))
    got["columns' scales"], want["columns' scales"] = (1024 * t[:, :blocks] for t in (columns[1], of_wanted))
    want["words"][1:] = exchange_functions.SCATTER_ARRIVALS
    for name, part, given in (("codes", 0, codes), ("scales", 1, scale)):
        for way, found in (("at once", once), ("by ranks", rows)):
            got[f"{name} {way}"] = 1024 * found[part][there].float()  # scales are small
            want[f"{name} {way}"] = 1024 * given.float()[tokens_there]
    return got, want


def returned(o: Operands, options: KernelOptions, valued: bool = True, of_rows: bool = False) -> tuple[Values, Values]:
    """The sums over ranks of sums over slots; ``valued``: with a value per slot; ``of_rows``: by one kernel."""
    rows, chosen = len(o.row_of_slot) // RANKS, o.row_of_slot.shape[1]
    slots = o.row_of_slot[: RANKS * rows]
    given = [(o.rows, o.scale if valued else None), (-o.rows.flip(0), o.scale.flip(0) if valued else None)]
    total = slot_functions.bind_sum_slots(o.rows, slots, None)
    sums = [total(each, slots) for each, _ in given]
    regions, (at_parts, at_values) = _regions(o, [sums[0].nbytes, 4 * slots.numel()])
    push = exchange_functions.bind_push(sums[0], slots, given[0][1], at_parts, at_values, FEW_SMS)
    push_sums = exchange_functions.bind_push_sums(o.rows, slots, given[0][1], at_parts, at_values, FEW_SMS)
    of_values = o.scale.dtype if valued else None
    over_ranks = exchange_functions.bind_total(o.rows, rows, chosen, of_values, rows, at_parts, at_values)
    for region, each, (rows_of_rank, values) in zip(regions, sums, given, strict=True):
        if of_rows:
            push_sums(region, rows_of_rank, slots, values)
        else:
            push(region, each, values, slots, 0 if valued else 1, RANKS)
    got, want = {}, {}
    for r, region in enumerate(regions):
        own = slice(r * rows, (r + 1) * rows)
        got[f"sums {r}"], found = over_ranks(region, given[r][0], slots[own])
        want[f"sums {r}"] = (sums[0][own].float() + sums[1][own].float()).bfloat16()
        if found is not None:
            padded = [torch.cat([values, values.new_zeros(1)]) for _, values in given if values is not None]
            got[f"values {r}"], want[f"values {r}"] = found, padded[0][slots[own]] + padded[1][slots[own]]
    return got, want


def returned_beside_product(
    o: Operands, options: KernelOptions, fp8: bool = False, by_experts: bool = False
) -> tuple[Values, Values]:
    """The sums over ranks of sums over slots, which leave while the second product computes the rows. By experts, one
    rank computes them in halves of the tokens.
    """
    each, chosen = len(o.row_of_slot) // RANKS, o.row_of_slot.shape[1]
    slots = o.row_of_slot[: RANKS * each]
    given: list[Any] = [(x, o.down) for x in (o.inner, -o.inner.flip(0))]
    if fp8:
        given = [_codes(*operands) for operands in given]
    whole = products.bind_grouped_gemm(*given[0], None, None, options)
    wanted = [whole(*operands, None, o.offsets, None) for operands in given]
    sums = [slot_functions.bind_sum_slots(rows, slots, None)(rows, slots) for rows in wanted]
    regions, (at_parts,) = _regions(o, [sums[0].nbytes])
    run, tiles = products.bind_counted_gemm(*given[0], None, replace(options, exchange_sms=FEW_SMS))
    experts = len(o.offsets) if by_experts else 0
    halves = [each if by_experts and r else 0 for r in range(RANKS)]
    pushes = [
        exchange_functions.bind_push_sums(wanted[0], slots, None, at_parts, at_parts, FEW_SMS, tiles, experts, half)
        for half in halves
    ]
    over_ranks = exchange_functions.bind_total(wanted[0], each, chosen, None, each, at_parts, at_parts)
    got, want = {}, {}
    for r, region in enumerate(regions):
        if by_experts:
            of_rows, own = (o.offsets, o.token_of_row), (r, each) if halves[r] else None
            blocks = row_functions.bind_expert_blocks(*of_rows, True, own, halves[r])(*of_rows, 0)
        else:
            of_rank = row_functions.bind_row_ranges(o.offsets, o.token_of_row, r, RANKS, RANKS * each)
            blocks = of_rank(o.offsets, o.token_of_row, 0, True)
        got[f"rows {r}"] = run(*given[r], None, blocks)
        pushes[r](region, got[f"rows {r}"], slots, None, blocks)
        want[f"rows {r}"] = wanted[r]
    for r, region in enumerate(regions):
        own = slice(r * each, (r + 1) * each)
        got[f"sums {r}"], _ = over_ranks(region, got[f"rows {r}"], slots[own])
        want[f"sums {r}"] = (sums[0][own].float() + sums[1][own].float()).bfloat16()
    return got, want


DIRECT = (
    Direct("product of ranges", product_of_ranges, tiles=3),
    Direct("FP8 product of ranges", fp8_product_of_ranges, tiles=2),
    Direct("activation of ranges", activation_of_ranges, tiles=3),
    Direct("activation of ranges, without preactivation", partial(activation_of_ranges, keep=False), tiles=3),
    Direct("activation of ranges, by experts", partial(activation_of_ranges, by_experts=True), tiles=3),
    Direct("derivative of ranges", derivative_of_ranges, tiles=2),
    Direct("FP8 derivative of ranges", fp8_derivative_of_ranges),
    Direct("weight gradient beside a sum", wgrad_beside_sum, tiles=3),
    Direct("added weight gradient beside a sum", partial(wgrad_beside_sum, adds=True), tiles=3),
    Direct("weight gradient in fp32 beside a sum", partial(wgrad_beside_sum, dtype=torch.float32), tiles=3),
    Direct("FP8 weight gradient beside a sum", fp8_wgrad_beside_sum, tiles=3),
    Direct("added FP8 weight gradient beside a sum", partial(fp8_wgrad_beside_sum, adds=True), tiles=3),
    Direct("FP8 weight gradient in fp32 beside a sum", partial(fp8_wgrad_beside_sum, dtype=torch.float32), tiles=3),
    *(replace(Direct("sum over slots beside", wgrad_beside_sum), top_k=top_k) for top_k in (2, 4)),
    Direct("FP8 activation of ranges", fp8_activation_of_ranges),
    Direct("FP8 activation of ranges, without preactivation", partial(fp8_activation_of_ranges, keep=False)),
    Direct("codes in the order of experts", scattered),
    Direct("gather", gather),
    Direct("gather of 32-bit ids", partial(gather, index=torch.int32)),
    Direct("gather by experts", partial(gather, block=1)),
    Direct("gather by blocks of experts", partial(gather, block=2)),
    Direct("gather of codes", gather_of_codes),
    Direct("gather of codes, 32-bit ids", partial(gather_of_codes, index=torch.int32)),
    Direct("gather of codes alone", partial(gather_of_codes, index=None)),
    Direct("return", returned),
    Direct("return without values", partial(returned, valued=False)),
    Direct("return of rows", partial(returned, of_rows=True)),
    Direct("return of rows without values", partial(returned, valued=False, of_rows=True)),
    Direct("return beside a product", returned_beside_product, tiles=3),
    Direct("return beside a product, by experts", partial(returned_beside_product, by_experts=True), tiles=3),
    Direct("return beside an FP8 product", partial(returned_beside_product, fp8=True), tiles=2),
    *(replace(Direct("sums and copies", sums_and_copies), top_k=top_k) for top_k in (2, 4, 8)),
)
