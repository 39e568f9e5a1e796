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
from fusedmoe.kernels.options import KernelOptions, Schedule
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.rows.move import slot_functions
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

    def ranges(self) -> Part:
        """Return the rows of three ranks, on the second of them, with all rows there."""
        run = row_functions.bind_row_ranges(self.offsets, self.token_of_row, 1, 3, self.tokens)
        return Part(run(self.offsets, self.token_of_row))


def _both(
    bind: Callable[..., Any], o: Operands, *tensors: Any, call: Callable[[Any], tuple[Any, ...]]
) -> tuple[Values, Values]:
    """Return the results of a product by ranges, and of the whole product."""
    whole = bind(*tensors)(*call(o.offsets))
    parts = bind(*tensors, ranges=True)(*call([o.ranges()]))
    return _named(parts), _named(whole)


def _named(results: Any) -> Values:
    each = results if isinstance(results, tuple) else (results,)
    return {str(i): t for i, t in enumerate(each) if t is not None}


def product_of_ranges(o: Operands, options: KernelOptions) -> tuple[Values, Values]:
    """The second product."""
    bind, x, w = products.bind_grouped_gemm, o.inner, o.down
    return _both(bind, o, x, w, None, o.scale, options, call=lambda rows: (x, w, None, rows, o.scale))


def activation_of_ranges(o: Operands, options: KernelOptions, keep: bool = True) -> tuple[Values, Values]:
    """The first product and its activation, of tokens through their index; ``keep``: with the preactivation."""
    bind, x, w, index = products.bind_grouped_gemm_activation, o.x, o.gate_up, o.token_of_row
    arguments = x, w, None, o.scale, SWIGLU, keep, options, index
    return _both(bind, o, *arguments, call=lambda rows: (x, w, None, rows, o.scale, index))


def derivative_of_ranges(o: Operands, options: KernelOptions) -> tuple[Values, Values]:
    """The gradient of the first product's result."""
    bind, dy, w, p, index = products.bind_grouped_gemm_activation_backward, o.dy, o.down, o.grads, o.token_of_row
    arguments = dy, w, p, o.scale, SWIGLU, True, True, options, index
    return _both(bind, o, *arguments, call=lambda rows: (dy, w, rows, p, o.scale, index))


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


def wgrad_beside_sum(o: Operands, options: KernelOptions, adds: bool = False) -> tuple[Values, Values]:
    """The last weight gradient of a layer in bf16; ``adds``: added to a gradient."""

    def wgrad(beside: bool) -> Callable[[], Tensor]:
        operands = o.dy, o.inner, o.offsets
        run = products.bind_grouped_wgrad(
            *operands, torch.bfloat16, adds, options, o.token_of_row, "grad_output", beside
        )
        out = torch.ones_like(o.down) if adds else None
        return lambda: run(*operands, out, o.token_of_row)

    return _beside(o, wgrad)


def fp8_wgrad_beside_sum(o: Operands, options: KernelOptions, adds: bool = False) -> tuple[Values, Values]:
    """The last weight gradient of a layer in FP8; ``adds``: added to a gradient."""
    dy, x = (quantize(rows, fp8_block(), -2, offsets=o.offsets) for rows in (o.rows, o.inner))
    operands = Codes(dy.data, with_strides(dy.scale)), Codes(x.data, with_strides(x.scale)), o.offsets

    def wgrad(beside: bool) -> Callable[[], Tensor]:
        run = products.bind_grouped_wgrad(*operands, torch.bfloat16, adds, options, beside=beside)
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


DIRECT = (
    Direct("product of ranges", product_of_ranges, tiles=3),
    Direct("activation of ranges", activation_of_ranges, tiles=3),
    Direct("activation of ranges, without preactivation", partial(activation_of_ranges, keep=False), tiles=3),
    Direct("derivative of ranges", derivative_of_ranges, tiles=2),
    Direct("weight gradient beside a sum", wgrad_beside_sum, tiles=3),
    Direct("added weight gradient beside a sum", partial(wgrad_beside_sum, adds=True), tiles=3),
    Direct("FP8 weight gradient beside a sum", fp8_wgrad_beside_sum, tiles=3),
    Direct("added FP8 weight gradient beside a sum", partial(fp8_wgrad_beside_sum, adds=True), tiles=3),
    *(replace(Direct("sum over slots beside", wgrad_beside_sum), top_k=top_k) for top_k in (2, 4)),
    *(replace(Direct("sums and copies", sums_and_copies), top_k=top_k) for top_k in (2, 4, 8)),
)
