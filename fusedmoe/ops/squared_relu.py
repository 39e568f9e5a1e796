"""The squared ReLU and its derivative. Source: So et al., "Primer"; the activation of Nemotron."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fusedmoe.ops.op import BackwardOp, Op, TensorSpec, exact

if TYPE_CHECKING:
    from torch import Tensor

    from fusedmoe.ops.op import SpecLike


class SquaredReLU(Op):
    """``y = max(x, 0)^2``, elementwise; the arithmetic is fp32 (fp64 for fp64), the result has x's dtype."""

    launches = 3
    parts = 1

    def infer(self, x: SpecLike) -> TensorSpec:
        self.check_floats("x", x.dtype)
        return TensorSpec(tuple(x.shape), x.dtype)

    def compute(self, x: Tensor) -> Tensor:
        return torch.relu(exact(x)).square().to(x.dtype)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return (DSquaredReLU(self),)


class DSquaredReLU(BackwardOp):
    """``dx = 2 * max(x, 0) * dy``."""

    launches = 4

    def compute(self, grad_output: Tensor, x: Tensor) -> Tensor:
        return (2 * torch.relu(exact(x)) * exact(grad_output)).to(x.dtype)
