"""The operands of one shape on dispatched rows, the same for all peers.

Axes: R rows sorted by expert, E experts, H hidden, I intermediate. Operands are random normal, since a GPU runs faster
on zeros; the standard deviation is 0.2 for rows and 0.02 for weights. Intermediate values are also random, so that each
kernel is measured and checked independently.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.shapes import Shape
from fusedmoe.numerics.activations import Activation

ROW_SCALE, WEIGHT_SCALE = 0.2, 0.02


@dataclass
class Problem:
    """One shape with its splits; each tensor is drawn on first access, with a separate seed."""

    shape: Shape
    splits_cpu: Tensor
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    activation: Activation = field(init=False)

    def __post_init__(self) -> None:
        self.activation = self.shape.glu
        self.rows = int(self.splits_cpu.sum())
        self.experts, self.hidden, self.intermediate = self.shape.experts, self.shape.hidden, self.shape.intermediate
        self.splits = self.splits_cpu.to(self.device)
        self.offsets = self.splits.cumsum(0).to(torch.int32)
        self._ends = [0, *self.splits_cpu.cumsum(0).tolist()]

    def rows_of(self, expert: int) -> slice:
        """Return an expert's rows."""
        return slice(self._ends[expert], self._ends[expert + 1])

    def sample(self) -> list[int]:
        """Return the checked experts: those with the fewest rows, the median, and the most."""
        order = self.splits_cpu.argsort(stable=True).tolist()
        return sorted({order[0], order[len(order) // 2], order[-1]})

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """(E + 1,) int32: the start of each expert's rows, and the end of the last."""
        return torch.tensor(self._ends, dtype=torch.int32, device=self.device)

    @cached_property
    def expert_of_row(self) -> Tensor:
        """(R,) int64."""
        return torch.repeat_interleave(torch.arange(self.experts), self.splits_cpu).to(self.device)

    @cached_property
    def x(self) -> Tensor:
        """(R, H)"""
        return self._draw(1, ROW_SCALE, self.rows, self.hidden)

    @cached_property
    def weight1(self) -> Tensor:
        """(E, 2 I, H): [gate; up]"""
        return self._draw(2, WEIGHT_SCALE, self.experts, 2 * self.intermediate, self.hidden)

    @cached_property
    def weight2(self) -> Tensor:
        """(E, H, I)"""
        return self._draw(3, WEIGHT_SCALE, self.experts, self.hidden, self.intermediate)

    @cached_property
    def bias1(self) -> Tensor | None:
        """(E, 2 I), if the shape has biases."""
        return self._draw(4, WEIGHT_SCALE, self.experts, 2 * self.intermediate) if self.shape.biases else None

    @cached_property
    def bias2(self) -> Tensor | None:
        """(E, H)"""
        return self._draw(5, WEIGHT_SCALE, self.experts, self.hidden) if self.shape.biases else None

    @cached_property
    def preactivation(self) -> Tensor:
        """(R, 2 I): [gate | up]"""
        return self._draw(6, ROW_SCALE, self.rows, 2 * self.intermediate)

    @cached_property
    def activated(self) -> Tensor:
        """(R, I)"""
        return self._draw(7, ROW_SCALE, self.rows, self.intermediate)

    @cached_property
    def grad_preactivation(self) -> Tensor:
        """(R, 2 I)"""
        return self._draw(8, ROW_SCALE, self.rows, 2 * self.intermediate)

    @cached_property
    def grad_y(self) -> Tensor:
        """(R, H)"""
        return self._draw(9, ROW_SCALE, self.rows, self.hidden)

    @cached_property
    def row_scale(self) -> Tensor:
        """(R,) fp32, between 0.5 and 1.5."""
        seeded = torch.Generator(self.device).manual_seed(10)
        return torch.rand(self.rows, generator=seeded, device=self.device) + 0.5

    @cached_property
    def grad_activated(self) -> Tensor:
        """(R, I)"""
        return self._draw(11, ROW_SCALE, self.rows, self.intermediate)

    def forget(self, *names: str) -> None:
        """Free operands; they are drawn again on the next access."""
        for name in names:
            self.__dict__.pop(name, None)

    def _draw(self, seed: int, scale: float, *size: int) -> Tensor:
        seeded = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randn(size, generator=seeded, device=self.device, dtype=self.dtype)
        return drawn.mul_(scale)
