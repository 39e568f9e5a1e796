"""`Scale` multiplies rows by a runtime input; its two gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from fusedmoe.base.checks import INPUT_NAME, Check
from fusedmoe.ops.op import BackwardOp, Op, SpecLike, TensorSpec, exact_together


class Scale(Op):
    """``y[r] = x[r] * s[r]``, where s (R,) is the runtime input of the given name. Both x and s get gradients.

    The arithmetic is fp32 (fp64 if x or s is fp64). The result has the dtype of x. In fp16 results below 6.1e-5 lose
    bits; a `Combine` without weights that follows linear layers then applies s, and the plan has no `Scale`.

    Raises `InputError`: the name is no identifier, or is reserved: ``"input"``, ``"weight"``, ``"splits"``, ...

    Parameters
    ----------
    name
        Name of the runtime input: ``Scale("probs")`` takes ``probs=``. It cannot be changed later.
    """

    reads_tail = False
    launches = 3
    _checks: ClassVar[Mapping[str, Check]] = {"name": INPUT_NAME}
    _fixed = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.runtime_inputs = self.rowwise_inputs = self.applies = (self.name,)

    @property
    def aliases(self) -> dict[str, str]:  # type: ignore[override]
        """The fixed name ``factor``, for rules, of the runtime input."""
        return {"factor": self.name}

    def infer(self, x: SpecLike, scale: SpecLike) -> TensorSpec:
        if len(x.shape) < 2:
            raise self.reject("x", "shape (rows, ..., features)", x.shape)
        if tuple(scale.shape) != (x.shape[0],):
            raise self.reject(self.name, f"shape ({x.shape[0]},), one value per row", scale.shape)
        self.check_floats("x", x.dtype)
        self.check_floats(self.name, scale.dtype)
        return TensorSpec(tuple(x.shape), x.dtype)

    def compute(self, x: Tensor, scale: Tensor) -> Tensor:
        exact_x, exact_scale = exact_together(x, scale)
        return (exact_x * exact_scale.view(-1, *(1,) * (x.dim() - 1))).to(x.dtype)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return ScaleGrad(self), DScale(self)

    def extra_repr(self) -> str:
        return repr(self.name)


class DScale(BackwardOp):
    """``dx[r] = dy[r] * s[r]``."""

    reads_tail = False
    launches = 3

    def __init__(self, op: Scale) -> None:
        super().__init__(op)
        self.needs = ("grad_output", op.name)

    def compute(self, grad_output: Tensor, scale: Tensor) -> Tensor:
        dy, s = exact_together(grad_output, scale)
        return (dy * s.view(-1, *(1,) * (dy.dim() - 1))).to(grad_output.dtype)


class ScaleGrad(BackwardOp):
    """``ds[r] = sum over features of dy[r] * x[r]``."""

    reads_tail = False
    launches = 4

    def __init__(self, op: Scale) -> None:
        super().__init__(op)
        self.needs = ("grad_output", "input", op.name)
        self.gives = (f"grad_{op.name}",)

    def compute(self, grad_output: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        dy, exact_x, _ = exact_together(grad_output, x, scale)
        return (dy * exact_x).flatten(1).sum(1).to(scale.dtype)
