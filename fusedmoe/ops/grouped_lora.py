"""LoRA on stacked experts: a grouped linear layer, and the low-rank update that is trained in its stead.

The update is two ops around the layer, so that the layer itself stays what rules, recipes and the planner know:

    LoRADown    h = x @ A.T, handed on beside x
    the layer   y = x @ weight.T + bias
    LoRAUp      y + scale * h @ B.T

Axes: R rows, E experts (groups), K features in, N features out, Q the rank.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fusedmoe.errors import InputError
from fusedmoe.kernels.torch import grouped_gemm
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.op import BackwardOp, Op, TensorSpec, exact
from fusedmoe.sequential import Sequential

if TYPE_CHECKING:
    from fusedmoe.ops.op import SpecLike


class LoRADown(Op):
    """``h[r] = x[r] @ weight[e].T`` for each row r of expert e, which it provides as ``lora_rows``; the rows pass.

    Parameters
    ----------
    num_groups, in_features, rank
        E, K and Q.
    device, dtype
        Of the weight. The product is in the dtype of the rows, to which the weight is cast.

    Attributes
    ----------
    weight : Parameter
        (E, Q, K), initialised as peft initialises each expert's ``lora_A``: uniform within ``1 / sqrt(K)``.
    """

    parameter_names = ("weight",)
    runtime_inputs = ("offsets",)
    provides = ("lora_rows",)
    launches = 4

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        rank: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_groups, self.in_features, self.rank = num_groups, in_features, rank
        self.weight = nn.Parameter(torch.empty(num_groups, rank, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw a new weight, uniform within ``1 / sqrt(in_features)``."""
        # kaiming_uniform_ with a=sqrt(5) of each expert's (Q, K); asked of all three axes it takes Q * K for the fan-in
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)

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
    """``dx[r] = dy[r] + dh[r] @ weight[e]``, dy the gradient of the rows that passed."""

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

    needs = ("grad_lora_rows", "input", "weight", "offsets")
    gives = ("grad_weight",)

    def compute(self, dh: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return grouped_gemm.grouped_mm_wgrad(dh.contiguous(), x, offsets).to(weight.dtype)


class LoRAUp(Op):
    """``y[r] + scale * h[r] @ weight[e].T`` for each row r of expert e, h the ``lora_rows`` of the `LoRADown` before.

    Parameters
    ----------
    num_groups, rank, out_features
        E, Q and N.
    scale
        Factor on the product, which is added to y in one rounding.
    device, dtype
        Of the weight. The product is in the dtype of the rows, to which the weight is cast.

    Attributes
    ----------
    weight : Parameter
        (E, N, Q), zeros at first.
    """

    parameter_names = ("weight",)
    runtime_inputs = ("lora_rows", "offsets")
    rowwise_inputs = ("lora_rows",)
    passes_backward = True
    launches = 5

    def __init__(
        self,
        num_groups: int,
        rank: int,
        out_features: int,
        scale: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
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
        into = None if torch.compiler.is_exporting() else update  # exported it is differentiated, which out= is not
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

    needs = ("grad_output", "lora_rows", "weight", "offsets")
    gives = ("grad_weight",)
    launches = 2
    op: LoRAUp

    def compute(self, dy: Tensor, lora_rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        dw = grouped_gemm.grouped_mm_wgrad(dy.contiguous(), lora_rows, offsets)
        return dw.to(weight.dtype).mul_(self.op.scale)


class LoRAUpDgrad(BackwardOp):
    """``dh[r] = scale * dy[r] @ weight[e]``; what is added to passes its gradient on as it is."""

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
        raise op.reject("splits", f"shape ({op.num_groups},), one count an expert", offsets.shape)


def _scale(rank: object, alpha: object) -> float:
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InputError(f"GroupedLoRA: rank: expected a positive integer, got {rank!r}")
    if alpha is None:
        return 1.0
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise InputError(f"GroupedLoRA: alpha: expected a finite number, got {alpha!r}")
    return alpha / rank


class GroupedLoRA(Sequential):
    """``y[r] = x[r] @ weight[e].T + bias[e] + alpha / rank * (x[r] @ A[e].T) @ B[e].T`` for each row r of expert e.

    A `GroupedLinear` that stays as it is, and a low-rank update of it that is trained. B starts as zeros, and so does
    the update.

    Parameters
    ----------
    layer
        The layer; its weight and bias are frozen here. It becomes part of this module, and is not copied.
    rank
        Q. In bf16 a multiple of 8 lets the update run on a GPU without a host synchronisation.
    alpha
        The update is scaled by ``alpha / rank``; by 1 if None.
    dtype
        Of A and B: that of the layer's weight by default. Whatever it is, they are multiplied in the dtype of the rows,
        as under autocast: fp32 with bf16 rows keeps what an optimizer steps by, and changes no product.

    Attributes
    ----------
    base_layer : GroupedLinear
        The layer. ``base_layer.requires_grad_()`` trains it too.
    lora_A : LoRADown
        ``lora_A.weight`` (E, Q, K).
    lora_B : LoRAUp
        ``lora_B.weight`` (E, N, Q).

    Notes
    -----
    Called as the layer is: rows (R, K) and ``splits=``. It is a `Sequential` of the three, in the order ``lora_A``,
    ``base_layer``, ``lora_B``. So the layer's products run on the kernels that it has, without the activation behind
    it, as the update comes in between. Its weight gradient is computed only if it is wanted. A recipe quantizes the
    layer; A, B and the rows that they are multiplied by stay as they are.

    In ``state_dict``: ``base_layer.weight``, ``base_layer.bias``, ``lora_A.weight`` and ``lora_B.weight``. It loads a
    checkpoint of the bare layer too, with ``strict=False``, as that has no A and B.

    Examples
    --------
    >>> experts = Sequential(
    ...     GroupedLoRA(GroupedLinear(8, 64, 2 * 32), rank=8, alpha=16), SwiGLU(),
    ...     GroupedLoRA(GroupedLinear(8, 32, 64), rank=8, alpha=16),
    ... )
    """

    lora_A: LoRADown  # noqa: N815  (as peft names them)
    base_layer: GroupedLinear
    lora_B: LoRAUp  # noqa: N815

    def __init__(
        self, layer: GroupedLinear, rank: int, alpha: float | None = None, *, dtype: torch.dtype | None = None
    ) -> None:
        if type(layer) is not GroupedLinear:
            raise InputError(f"GroupedLoRA: layer: expected a GroupedLinear, got {layer!r}")
        scale = _scale(rank, alpha)
        weight = layer.weight
        kind: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype if dtype is None else dtype}
        super().__init__(
            OrderedDict(
                lora_A=LoRADown(layer.num_groups, layer.in_features, rank, **kind),
                base_layer=layer.requires_grad_(False),
                lora_B=LoRAUp(layer.num_groups, rank, layer.out_features, scale, **kind),
            )
        )

    def reset_lora(self) -> None:
        """Draw a new A, and set B to zeros."""
        self.lora_A.reset_parameters()
        self.lora_B.reset_parameters()

    @torch.no_grad()
    def merged(self) -> GroupedLinear:
        """Return a new layer that computes the same: ``weight[e] + alpha / rank * B[e] @ A[e]``, rounded once."""
        base, scale = self.base_layer, self.lora_B.scale
        weight = base.weight.clone()
        for e, (a, b) in enumerate(zip(self.lora_A.weight, self.lora_B.weight, strict=True)):  # one in fp32 at a time
            into = exact(weight[e])
            weight[e] = torch.addmm(into, b.to(into.dtype), a.to(into.dtype), alpha=scale)
        layer = GroupedLinear(
            base.num_groups,
            base.in_features,
            base.out_features,
            bias=base.bias is not None,
            device="meta",
            accumulate_into_main_grad=base.accumulate_into_main_grad,
            recipe=base.recipe,
        )
        layer.weight = nn.Parameter(weight)
        layer.bias = None if base.bias is None else nn.Parameter(base.bias.clone())
        return layer.train(self.training)

    def __getitem__(self, idx: int | slice) -> Any:
        if isinstance(idx, slice):  # a part of it is none
            return Sequential(OrderedDict([*self._modules.items()]))[idx]
        return super().__getitem__(idx)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):  # a checkpoint of the bare layer
            if prefix + name in state_dict:
                state_dict[f"{prefix}base_layer.{name}"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)
