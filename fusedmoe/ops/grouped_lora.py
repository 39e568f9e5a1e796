"""The low-rank update of a grouped linear layer, as an op before it and an op after it.

`fusedmoe.layers.lora.GroupedLoRA` inserts them. The layer itself is unchanged for rules, recipes and the planner::

    LoRADown    h = x @ A.T; returns x and provides h
    the layer   y = x @ weight.T + bias
    LoRAUp      y + scale * h @ B.T

Axes: R rows, E experts (groups), K features in, N features out, Q the rank.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.base.checks import FINITE, POSITIVE_INTEGER, Check, check_factory
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.kernels.torch import grouped_gemm
from fusedmoe.ops.initial_values import EXPERT_PARALLEL, uniform_
from fusedmoe.ops.op import BackwardOp, Op, SpecLike, TensorSpec


class LoRADown(Op):
    """``h[r] = x[r] @ weight[e].T`` for each row r of expert e, provided as ``lora_rows``; returns x unchanged.

    Parameters
    ----------
    num_groups, in_features, rank
        E, K and Q.
    device, dtype
        Device and dtype of the weight. The product casts it to the dtype of the rows.
    expert_parallel
        As for `GroupedLinear`.

    Attributes
    ----------
    weight : Parameter
        (E, Q, K), initialised as peft initialises ``lora_A``: uniform within ``1 / sqrt(K)``.
    """

    reads_tail = False
    parameter_names = ("weight",)
    runtime_inputs = ("offsets",)
    provides = ("lora_rows",)
    launches = 4
    _checks: ClassVar[Mapping[str, Check]] = {
        "num_groups": POSITIVE_INTEGER,
        "in_features": POSITIVE_INTEGER,
        "rank": POSITIVE_INTEGER,
    }

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        rank: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        expert_parallel: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        check_factory(type(self).__name__, device, dtype)
        self._sharded_over = EXPERT_PARALLEL(f"{type(self).__name__}: expert_parallel", expert_parallel)
        self.num_groups, self.in_features, self.rank = num_groups, in_features, rank
        self.weight = nn.Parameter(torch.empty(num_groups, rank, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a new weight, uniform within ``1 / sqrt(in_features)``."""
        # kaiming_uniform_(a=sqrt(5)) of each expert's (Q, K); applied to (E, Q, K) it would use a fan-in of Q * K
        uniform_(self.weight, 1 / math.sqrt(self.in_features), self._sharded_over)

    def infer(self, x: SpecLike, weight: SpecLike, offsets: SpecLike) -> tuple[TensorSpec, TensorSpec]:
        if len(x.shape) != 2 or x.shape[1] != self.in_features:
            raise self.reject("x", f"shape (rows, {self.in_features})", x.shape)
        _check(self, weight, (self.num_groups, self.rank, self.in_features), offsets)
        return TensorSpec(tuple(x.shape), x.dtype), TensorSpec((x.shape[0], self.rank), x.dtype)

    def compute(self, x: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return x, grouped_gemm.grouped_mm(x, weight.to(x.dtype), offsets)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return LoRADownWgrad(self), LoRADownDgrad(self)

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        return x.shape[0] > 0 and not grouped_gemm.runs_on_device(device, x.dtype, self.in_features, self.rank)

    def extra_repr(self) -> str:
        return f"num_groups={self.num_groups}, in_features={self.in_features}, rank={self.rank}"


class LoRADownDgrad(BackwardOp):
    """``dx[r] = dy[r] + dh[r] @ weight[e]``, where dy is the gradient of the returned rows."""

    reads_tail = False
    needs = ("grad_output", "grad_lora_rows", "weight", "offsets")
    launches = 5

    def compute(self, dy: Tensor | None, dh: Tensor | None, weight: Tensor, offsets: Tensor) -> Tensor:
        if dh is None:
            assert dy is not None
            return dy
        dx = grouped_gemm.grouped_mm_dgrad(dh.contiguous(), weight.to(dh.dtype), offsets)
        return dx if dy is None else dx.add_(dy)


class LoRADownWgrad(BackwardOp):
    """``dA[e] = dh[rows of e].T @ x[rows of e]``; exact zeros for an expert without rows."""

    reads_tail = False
    needs = ("grad_lora_rows", "input", "weight", "offsets")
    gives = ("grad_weight",)

    def compute(self, dh: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return grouped_gemm.grouped_mm_wgrad(dh.contiguous(), x, offsets).to(weight.dtype)


class LoRAUp(Op):
    """``y[r] + scale * h[r] @ weight[e].T`` for each row r of expert e, where h is ``lora_rows`` of `LoRADown`.

    Parameters
    ----------
    num_groups, rank, out_features
        E, Q and N.
    scale
        Factor of the product. Scaling and addition round once.
    device, dtype
        Device and dtype of the weight. The product casts it to the dtype of the rows.
    expert_parallel
        As for `GroupedLinear`.

    Attributes
    ----------
    weight : Parameter
        (E, N, Q), initialised with zeros.
    """

    reads_tail = False
    parameter_names = ("weight",)
    runtime_inputs = ("lora_rows", "offsets")
    rowwise_inputs = ("lora_rows",)
    passes_backward = True
    launches = 5
    _checks: ClassVar[Mapping[str, Check]] = {
        "num_groups": POSITIVE_INTEGER,
        "rank": POSITIVE_INTEGER,
        "out_features": POSITIVE_INTEGER,
        "scale": FINITE,
    }

    def __init__(
        self,
        num_groups: int,
        rank: int,
        out_features: int,
        scale: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        expert_parallel: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        check_factory(type(self).__name__, device, dtype)
        self._sharded_over = EXPERT_PARALLEL(f"{type(self).__name__}: expert_parallel", expert_parallel)
        self.num_groups, self.rank, self.out_features, self.scale = num_groups, rank, out_features, scale
        self.weight = nn.Parameter(torch.empty(num_groups, out_features, rank, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to zeros."""
        nn.init.zeros_(self.weight)

    def infer(self, y: SpecLike, weight: SpecLike, lora_rows: SpecLike, offsets: SpecLike) -> TensorSpec:
        if len(y.shape) != 2 or y.shape[1] != self.out_features:
            raise self.reject("x", f"shape (rows, {self.out_features})", y.shape)
        if tuple(lora_rows.shape) != (y.shape[0], self.rank):
            raise self.reject("lora_rows", f"shape ({y.shape[0]}, {self.rank})", lora_rows.shape)
        if lora_rows.dtype is not y.dtype:
            raise self.reject("lora_rows", f"{y.dtype}, the dtype of x", lora_rows.dtype)
        _check(self, weight, (self.num_groups, self.out_features, self.rank), offsets)
        return TensorSpec(tuple(y.shape), y.dtype)

    def compute(self, y: Tensor, weight: Tensor, lora_rows: Tensor, offsets: Tensor) -> Tensor:
        update = grouped_gemm.grouped_mm(lora_rows, weight.to(y.dtype), offsets)
        into = None if torch.compiler.is_exporting() else update  # torch.export differentiates this; out= forbids it
        return torch.add(y, update, alpha=self.scale, out=into)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return LoRAUpWgrad(self), LoRAUpDgrad(self)

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        return x.shape[0] > 0 and not grouped_gemm.runs_on_device(device, x.dtype, self.out_features, self.rank)

    def extra_repr(self) -> str:
        sizes = f"num_groups={self.num_groups}, rank={self.rank}, out_features={self.out_features}"
        return f"{sizes}, scale={self.scale}"


class LoRAUpWgrad(BackwardOp):
    """``dB[e] = scale * dy[rows of e].T @ h[rows of e]``; exact zeros for an expert without rows."""

    reads_tail = False
    needs = ("grad_output", "lora_rows", "weight", "offsets")
    gives = ("grad_weight",)
    launches = 2
    op: LoRAUp

    def compute(self, dy: Tensor, lora_rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        dw = grouped_gemm.grouped_mm_wgrad(dy.contiguous(), lora_rows, offsets)
        return dw.to(weight.dtype).mul_(self.op.scale)


class LoRAUpDgrad(BackwardOp):
    """``dh[r] = scale * dy[r] @ weight[e]``; the gradient of the op's input is dy itself."""

    reads_tail = False
    needs = ("grad_output", "weight", "offsets")
    gives = ("grad_lora_rows",)
    zeroes_tail = True
    launches = 5
    op: LoRAUp

    def compute(self, dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        dh = grouped_gemm.grouped_mm_dgrad(dy.contiguous(), weight.to(dy.dtype), offsets)
        return dh.mul_(self.op.scale)


def _check(op: LoRADown | LoRAUp, weight: SpecLike | None, shape: tuple[int, ...], offsets: SpecLike) -> None:
    if weight is None or tuple(weight.shape) != shape:
        raise op.reject("weight", f"shape {shape}", None if weight is None else weight.shape)
    if offsets.shape[0] != op.num_groups:
        raise op.reject("splits", f"shape ({op.num_groups},), one count per expert", offsets.shape)
