"""``y = cap * tanh(x / cap)``: Gemma 2's soft cap, and its derivative."""

import torch
from torch import Tensor

import fusedmoe as fm


class Softcap(fm.Op):
    """``y = cap * tanh(x / cap)``, elementwise: close to x for small x, bounded by the cap."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def compute(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)

    def backward_ops(self) -> tuple[fm.BackwardOp, ...]:
        return (DSoftcap(self),)

    def extra_repr(self) -> str:
        return f"cap={self.cap}"


class DSoftcap(fm.BackwardOp):
    """``dx = dy * (1 - (y / cap)^2)``, from the op's output, so that the plan need not keep the op's input."""

    needs = ("grad_output", "output")
    op: Softcap

    def compute(self, grad_output: Tensor, y: Tensor) -> Tensor:
        return grad_output * (1 - (y / self.op.cap).square())
