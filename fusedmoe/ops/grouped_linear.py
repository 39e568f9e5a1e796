"""Linear layers over rows sorted by expert.

Axes: R rows, E experts (groups), K features in, N features out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fusedmoe.errors import InputError
from fusedmoe.kernels.torch import grouped_gemm
from fusedmoe.ops.op import BackwardOp, Op, TensorSpec

if TYPE_CHECKING:
    from fusedmoe.ops.op import SpecLike


class Dgrad(BackwardOp):
    """``dx[r] = dy[r] @ weight[expert of r]``."""

    zeroes_tail = True
    launches = 4

    def __init__(self, op: GroupedLinear | Linear) -> None:
        super().__init__(op)
        self.needs = ("grad_output", "weight", *op.runtime_inputs)

    def compute(self, grad_output: Tensor, weight: Tensor, offsets: Tensor | None = None) -> Tensor:
        if offsets is None:
            return grad_output @ weight
        return grouped_gemm.grouped_mm_dgrad(grad_output.contiguous(), weight, offsets)


class Wgrad(BackwardOp):
    """``dW[e] = dy[rows of e].T @ x[rows of e]``; exact zeros for an expert without rows."""

    gives = ("grad_weight",)

    def __init__(self, op: GroupedLinear | Linear) -> None:
        super().__init__(op)
        self.needs = ("grad_output", "input", *op.runtime_inputs)

    def compute(self, grad_output: Tensor, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        if offsets is None:
            return grad_output.flatten(0, -2).mT @ x.flatten(0, -2)
        return grouped_gemm.grouped_mm_wgrad(grad_output.contiguous(), x, offsets)


class BiasGrad(BackwardOp):
    """``db[e] = sum of dy over the rows of e``, accumulated in fp32."""

    gives = ("grad_bias",)
    launches = 4

    def __init__(self, op: GroupedLinear | Linear) -> None:
        super().__init__(op)
        self.needs = ("grad_output", *op.runtime_inputs)

    def compute(self, grad_output: Tensor, offsets: Tensor | None = None) -> Tensor:
        sums = grouped_gemm.grouped_bias_grad(grad_output.flatten(0, -2), offsets)
        return sums[0] if offsets is None else sums

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        return False


def _positive(op: str, **sizes: object) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InputError(f"{op}: {name}: expected a positive integer, got {size!r}")


def _draw(op: Op, in_features: int) -> None:
    bound = 1 / math.sqrt(in_features)
    for parameter in op.parameters(recurse=False):
        nn.init.uniform_(parameter, -bound, bound)


class GroupedLinear(Op):
    """``y[r] = x[r] @ weight[e].T + bias[e]`` for each row r of expert e.

    Parameters
    ----------
    num_groups
        E, the number of experts.
    in_features, out_features
        K and N.
    bias
        Whether there is a bias.
    device, dtype
        Of the parameters, as for `torch.nn.Linear`.

    Attributes
    ----------
    weight : Parameter
        (E, N, K), initialised as `torch.nn.Linear` does each expert: uniform within ``1 / sqrt(K)``.
    bias : Parameter or None
        (E, N).

    Notes
    -----
    Called with rows ``x`` (R, K), sorted by expert, in the weight's dtype, and ``splits`` (E,), rows an expert:
    integers on x's device. Rows past ``splits.sum()`` are not read and come out as zeros. Returns (R, N).
    """

    parameter_names = ("weight", "bias")
    bias: nn.Parameter | None
    runtime_inputs = ("offsets",)
    zeroes_tail = True
    launches = 4

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _positive("GroupedLinear", num_groups=num_groups, in_features=in_features, out_features=out_features)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype))
        empty_bias = torch.empty(num_groups, out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if empty_bias is None else nn.Parameter(empty_bias))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters, uniform within ``1 / sqrt(in_features)``."""
        _draw(self, self.in_features)

    def infer(self, x: SpecLike, weight: SpecLike, bias: SpecLike | None, offsets: SpecLike) -> TensorSpec:
        if len(x.shape) != 2 or x.shape[1] != self.in_features:
            raise self.reject("x", f"shape (rows, {self.in_features})", x.shape)
        shape = (self.num_groups, self.out_features, self.in_features)
        _check_parameters(self, x, weight, bias, shape)
        if offsets.shape[0] != self.num_groups:
            raise self.reject("splits", f"shape ({self.num_groups},), one count an expert", offsets.shape)
        return TensorSpec((x.shape[0], self.out_features), x.dtype)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
        y = grouped_gemm.grouped_mm(x, weight, offsets)
        return y if bias is None else grouped_gemm.grouped_bias(y, bias, offsets)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return BiasGrad(self), Wgrad(self), Dgrad(self)

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        return not grouped_gemm.runs_on_device(device, x.dtype, self.in_features, self.out_features)

    def extra_repr(self) -> str:
        text = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        return text + (", bias=True" if self.bias is not None else "")


class Linear(Op):
    """``y = x @ weight.T + bias``: one group, no splits; the dense MLP's layer.

    Parameters and attributes are those of `torch.nn.Linear`: ``weight`` (N, K), ``bias`` (N,). Called with ``x`` (...,
    K).
    """

    parameter_names = ("weight", "bias")
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _positive("Linear", in_features=in_features, out_features=out_features)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        empty_bias = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if empty_bias is None else nn.Parameter(empty_bias))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters, uniform within ``1 / sqrt(in_features)``."""
        _draw(self, self.in_features)

    def infer(self, x: SpecLike, weight: SpecLike, bias: SpecLike | None) -> TensorSpec:
        if len(x.shape) < 2 or x.shape[-1] != self.in_features:
            raise self.reject("x", f"shape (..., rows, {self.in_features})", x.shape)
        _check_parameters(self, x, weight, bias, (self.out_features, self.in_features))
        return TensorSpec((*x.shape[:-1], self.out_features), x.dtype)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return BiasGrad(self), Wgrad(self), Dgrad(self)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        return text + ("" if self.bias is not None else ", bias=False")


def _check_parameters(op: Op, x: SpecLike, weight: SpecLike, bias: SpecLike | None, shape: tuple[int, ...]) -> None:
    if tuple(weight.shape) != shape:
        raise op.reject("weight", f"shape {shape}", weight.shape)
    if bias is not None and tuple(bias.shape) != shape[:-1]:
        raise op.reject("bias", f"shape {shape[:-1]}", bias.shape)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype is not x.dtype:
            raise op.reject("x", f"{parameter.dtype}, the dtype of {name} (or run under torch.autocast)", x.dtype)
