"""Linear layers: grouped by expert, and dense.

Axes: R rows, E experts (groups), K features in, N features out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.base.checks import FLAG, POSITIVE_INTEGER, TENSOR, WRONG, Check, check_factory
from fusedmoe.base.errors import SPREAD_OVER_RANKS, InputError
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.kernels.torch import grouped_gemm, quantized_products
from fusedmoe.kernels.torch.quantized_products import Operand
from fusedmoe.numerics.expert_rows import tail_mask
from fusedmoe.numerics.formats import E4M3, Format, QuantizedSpec, QuantizedTensor, fp8_block, quantize
from fusedmoe.numerics.recipes import resolve, shortest
from fusedmoe.ops.initial_values import EXPERT_PARALLEL, drawn, uniform_
from fusedmoe.ops.op import BackwardOp, Op, SpecLike, TensorSpec
from fusedmoe.ops.state import grad_sums, unrounded_grads
from fusedmoe.ops.state.main_grad import grad_instead, main_grad_bytes, main_grad_of

_PADDING = 64.0  # rows, on average: of quantized rows by columns, each expert has a multiple of 128


def _contiguous(grad: Operand) -> Operand:
    return grad if isinstance(grad, QuantizedTensor) else grad.contiguous()


class Dgrad(BackwardOp):
    """``dx[r] = dy[r] @ weight[expert of r]``."""

    reads_tail = False
    zeroes_tail = True
    launches = 4

    needs = ("grad_output", "weight", "offsets")
    contracts: ClassVar[Mapping[str, int]] = {"grad_output": -1, "weight": -2}
    op: GroupedLinear

    def compute(self, grad_output: Operand, weight: Operand, offsets: Tensor) -> Tensor:
        return quantized_products.grouped_mm_dgrad(_contiguous(grad_output), weight, offsets)

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return quantized_products.path(operands[0], operands[1], device)

    def flops(self, rows: SpecLike) -> float:
        return self.op.flops(rows)


class Wgrad(BackwardOp):
    """``dW[e] = dy[rows of e].T @ x[rows of e]``; exact zeros for an expert without rows.

    With ``transposed_grad`` of the layer, the memory layout of dW is (E, K, N), if a product can write it.
    """

    reads_tail = False
    needs = ("grad_output", "input", "offsets")
    gives = ("grad_weight",)
    contracts: ClassVar[Mapping[str, int]] = {"grad_output": -2, "input": -2}
    op: GroupedLinear

    def compute(self, grad_output: Operand, x: Operand, offsets: Tensor) -> Tensor:
        dy = _contiguous(grad_output)
        if self.transposed and isinstance(dy, Tensor) and isinstance(x, Tensor):
            return quantized_products.grouped_mm_wgrad(x, dy, offsets).mT
        return quantized_products.grouped_mm_wgrad(dy, x, offsets)

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return quantized_products.path(operands[0], operands[1], device)

    def flops(self, rows: SpecLike) -> float:
        return self.op.flops(rows, padding=_PADDING)

    @property
    def transposed(self) -> bool:
        """Whether the memory layout of dW is (E, K, N)."""
        return self.op.transposed_grad

    def sum_so_far(self, dtype: torch.dtype) -> Tensor | None:
        """Return the tensor that a kernel must add dW to, and that the step then returns; see
        `fusedmoe.ops.state.grad_sums`.

        None if autograd adds dW, or if the tensor has another dtype. A step calls this once, just before its kernel
        runs.
        """
        return grad_sums.take(self.op, dtype)

    def unrounded_dtype(self) -> torch.dtype | None:
        """Return the dtype of the parameter, if `unrounded` would return a gradient."""
        return unrounded_grads.dtype_of(self.op)

    def unrounded(self) -> unrounded_grads.Unrounded | None:
        """Return dW for a kernel to write in the dtype of the parameter, if autocast has cast the weight; see
        `fusedmoe.ops.state.unrounded_grads`. A step calls this once.
        """
        return unrounded_grads.take(self.op)


class WgradIntoMainGrad(Wgrad):
    """``main_grad[e] += dW[e]``: `Wgrad`, accumulated in the weight's ``main_grad`` instead of ``weight.grad``."""

    may_give_none = True
    launches = 2
    transposed = False  # `main_grad` has the layout of the weight

    def compute(self, grad_output: Operand, x: Operand, offsets: Tensor) -> Tensor | None:  # type: ignore[override]
        self.main_grad().add_(super().compute(grad_output, x, offsets))
        return self.added()

    @property
    def added_bytes(self) -> int:
        return main_grad_bytes(self.op)

    def main_grad(self) -> Tensor:
        """Return the weight's ``main_grad``; raise `InputError` if it is missing or does not fit."""
        return main_grad_of(self.op)

    def added(self) -> Tensor | None:
        """Mark the gradient as added; return the placeholder for autograd."""
        return grad_instead(self.op)


class BiasGrad(BackwardOp):
    """``db[e] = sum of dy over the rows of e``, accumulated in fp32."""

    reads_tail = False
    needs = ("grad_output", "offsets")
    gives = ("grad_bias",)
    unquantized = ("grad_output",)
    launches = 4
    op: GroupedLinear

    def compute(self, grad_output: Tensor, offsets: Tensor) -> Tensor:
        return grouped_gemm.grouped_bias_grad(grad_output, offsets)

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        return False


# The dense layer has its own backward classes, so that rules for grouped products do not match them. If the chain has
# offsets, sums over rows exclude rows without an expert.


def _without_tail(rows: Operand, offsets: Tensor | None) -> Operand:
    """Return the rows, with zeros for rows without an expert; quantized rows have these zeros already."""
    if offsets is None or isinstance(rows, QuantizedTensor):
        return rows
    tail = tail_mask(offsets, rows.shape[0])
    return rows.masked_fill(tail.view(-1, *(1,) * (rows.dim() - 1)), 0)


class LinearDgrad(BackwardOp):
    """``dx = dy @ weight``."""

    reads_tail = False
    needs = ("grad_output", "weight")
    contracts: ClassVar[Mapping[str, int]] = {"grad_output": -1, "weight": -2}

    def compute(self, grad_output: Operand, weight: Operand) -> Tensor:
        return quantized_products.mm(grad_output, weight, weight_axis=-2)

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return quantized_products.path_dense(*operands)

    def flops(self, rows: SpecLike) -> float:
        return self.op.flops(rows)


class LinearWgrad(BackwardOp):
    """``dW = dy.T @ x``; with offsets, over the rows that belong to an expert."""

    reads_tail = False
    needs = ("grad_output", "input", "offsets")
    gives = ("grad_weight",)
    contracts: ClassVar[Mapping[str, int]] = {"grad_output": -2, "input": -2}
    op: Linear

    def compute(self, grad_output: Operand, x: Operand, offsets: Tensor | None = None) -> Tensor:
        return quantized_products.mm_wgrad(_without_tail(grad_output, offsets), _without_tail(x, offsets))

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return quantized_products.path_dense(*operands[:2])

    def flops(self, rows: SpecLike) -> float:
        return self.op.flops(rows, padding=_PADDING)


class LinearWgradIntoMainGrad(LinearWgrad):
    """``main_grad += dW``: `LinearWgrad`, accumulated in the weight's ``main_grad`` instead of ``weight.grad``."""

    may_give_none = True
    launches = 2

    def compute(  # type: ignore[override]
        self, grad_output: Operand, x: Operand, offsets: Tensor | None = None
    ) -> Tensor | None:
        main_grad_of(self.op).add_(super().compute(grad_output, x, offsets))
        return grad_instead(self.op)

    @property
    def added_bytes(self) -> int:
        return main_grad_bytes(self.op)


class LinearBiasGrad(BackwardOp):
    """``db = sum of dy over the rows``, in fp32; with offsets, over the rows that belong to an expert."""

    reads_tail = False
    needs = ("grad_output", "offsets")
    gives = ("grad_bias",)
    unquantized = ("grad_output",)
    launches = 2

    def compute(self, grad_output: Tensor, offsets: Tensor | None = None) -> Tensor:
        rows = _without_tail(grad_output, offsets)
        assert isinstance(rows, Tensor)
        return grouped_gemm.grouped_bias_grad(rows.flatten(0, -2), None)[0]


class _LinearOp(Op):
    """The parts that grouped and dense linear layers share."""

    reads_tail = False
    parameter_names = ("weight", "bias")
    contracts: ClassVar[Mapping[str, int]] = {"input": -1, "weight": -1}
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    accumulate_into_main_grad: bool
    recipe: Any  # a Recipe or None; `__setattr__` resolves names
    _sharded_over: ExpertParallel | None = None  # `expert_parallel.shards` reads it
    _checks: ClassVar[Mapping[str, Check]] = {
        "num_groups": POSITIVE_INTEGER,
        "in_features": POSITIVE_INTEGER,
        "out_features": POSITIVE_INTEGER,
        "accumulate_into_main_grad": FLAG,
    }

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "recipe" and value is not None:
            value = resolve(value)
        super().__setattr__(name, value)

    def _make_parameters(
        self, shape: tuple[int, ...], bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        FLAG(f"{type(self).__name__}: bias", bias)
        check_factory(type(self).__name__, device, dtype)
        if self.weight_format is None:
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            spec = QuantizedSpec(shape, torch.float32, self.weight_format, -1, stacked=True)
            for name, (sizes, kind) in zip(self.stored_weight, spec.tensors(), strict=True):
                held = torch.empty(sizes, device=device, dtype=kind)
                self.register_parameter(name, nn.Parameter(held, requires_grad=False))
        empty_bias = torch.empty(shape[:-1], device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if empty_bias is None else nn.Parameter(empty_bias))
        self.reset_parameters()

    def flops(self, rows: SpecLike, padding: float = 0.0) -> float:
        """Return the FLOPs of a product of the layer, with ``padding`` more rows per expert if they are quantized."""
        count = float(math.prod(map(int, rows.shape[:-1])))
        if isinstance(rows, QuantizedSpec) and rows.experts is not None:
            count += padding * rows.experts
        return 2.0 * count * self.in_features * self.out_features

    def reset_parameters(self) -> None:
        """Draw new parameters, uniform within ``1 / sqrt(in_features)``."""
        bound = 1 / math.sqrt(self.in_features)
        for name, parameter in self.named_parameters(recurse=False):
            if name not in self.stored_weight:
                uniform_(parameter, bound, self._sharded_over)

    def _extra_repr(self, sizes: tuple[str, ...], bias_default: bool) -> str:
        parts = [f"{name}={getattr(self, name)}" for name in sizes]
        if (bias := self.bias is not None) is not bias_default:
            parts.append(f"bias={bias}")
        if self.weight_format is not None:
            parts.append(f"weight_format={str(self.weight_format)!r}")
        if self.accumulate_into_main_grad:
            parts.append("accumulate_into_main_grad=True")
        return ", ".join(parts if self.recipe is None else [*parts, f"recipe={shortest(self.recipe)!r}"])


FP8_CHECKPOINT = fp8_block(across=128, power_of_two=False)
"""The format of the weights of FP8 checkpoints: E4M3, one fp32 scale for each 128x128 values."""


def _weight_format(value: object) -> object:
    """Return a format of weights that kernels and products take by rows and by columns; else `WRONG`."""
    square = isinstance(value, Format) and value.element == E4M3 and value.block == (128, 128)
    return value if square and value.rule.dtype is torch.float32 else WRONG  # type: ignore[attr-defined]


class GroupedLinear(_LinearOp):
    """``y[r] = x[r] @ weight[e].T + bias[e]`` for each row r of expert e.

    Called with rows ``x`` (R, K), sorted by expert, in the weight's dtype, and ``splits`` (E,), rows per expert:
    integers on x's device. Returns (R, N). Rows after ``splits.sum()`` are not read; their results are zeros.

    With ``weight_format``:

    - The weight is frozen. A call with ``weight.requires_grad`` raises `InputError`, unless gradients are disabled.
    - Rows are in fp32, bf16 or fp16. They, and the gradient of the output, are quantized by the recipe of the layer,
      else by that of the call. Without one, they are quantized in E4M3 with blocks of 1x128 and with the rule of
      ``weight_format`` for scales. The recipe ``"bf16"`` of the layer leaves them unquantized.
    - Fused kernels multiply the codes. The input gradient needs them transposed: a copy of E * K * N bytes, for the
      time of that product.
    - ``dtype`` is the dtype of the bias, and ``module.to(dtype)`` casts the bias alone.

    Parameters
    ----------
    num_groups
        E, the number of experts.
    in_features, out_features
        K and N.
    bias
        Whether the layer has a bias.
    device, dtype
        Device and dtype of the parameters, as for `torch.nn.Linear`.
    accumulate_into_main_grad
        Accumulate the weight's gradient in ``weight.main_grad``, as in Megatron-LM and Transformer Engine. The caller
        allocates it before the backward pass: the weight's shape, fp32 (fp64 for fp64). Every backward pass through
        the op adds to it, also one of ``torch.autograd.grad`` with respect to other tensors. ``weight.grad`` has no
        meaning: it gets None, or a placeholder if the weight has an attribute ``grad_added_to_main_grad``, which is
        then set to True. The placeholder is uninitialised, or zeros if ``weight.zero_out_wgrad``. The bias gets its
        gradient as usual.
    recipe
        The recipe of this layer, with the same values as ``fm.recipe``, over which it takes precedence. ``"bf16"``
        disables quantization; None uses ``fm.recipe``. The attribute can be set at any time.
    weight_format
        The format in which the weight is stored, ``fusedmoe.numerics.formats.fp8_block(across=128, power_of_two=...)``;
        None stores it in ``dtype``. See above, and `from_quantized`.
    expert_parallel
        The ranks, if the experts are those of this rank: ``num_groups`` counts these alone. It decides which initial
        values they get (see `reset_parameters`), and what the functions of `fusedmoe.expert_parallel` do with them.

    Attributes
    ----------
    weight : Parameter
        (E, N, K), each expert initialised as in `torch.nn.Linear`: uniform within ``1 / sqrt(K)``. With
        ``weight_format``, its codes, in float8_e4m3fn.
    weight_scale_inv : Parameter
        With ``weight_format`` only: the scales (E, ceil(N / 128), ceil(K / 128)), fp32. A code times its scale is the
        value: ``weight[e, n, k] * weight_scale_inv[e, n // 128, k // 128]``.
    bias : Parameter or None
        (E, N).
    transposed_grad : bool
        Whether the gradient of the weight is computed as ``.mT`` of a contiguous tensor (E, K, N), if a product can
        write it. Set it to True for a weight that is passed as ``.mT`` of a parameter (E, K, N), see
        `Sequential.forward_with`: otherwise autograd transposes the gradient when it adds it to that of the parameter.
        Values do not depend on it.
    """

    runtime_inputs = ("offsets",)
    zeroes_tail = True
    launches = 4
    weight_scale_inv: nn.Parameter
    transposed_grad: bool = False
    _checks: ClassVar[Mapping[str, Check]] = {
        **_LinearOp._checks,
        "weight_format": Check("fusedmoe.numerics.formats.fp8_block(across=128) or None", _weight_format).or_none(),
        "transposed_grad": FLAG,
    }
    _fixed = ("weight_format",)

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        accumulate_into_main_grad: bool = False,
        recipe: object = None,
        weight_format: Format | None = None,
        expert_parallel: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        self.weight_format = weight_format
        self._sharded_over = EXPERT_PARALLEL(f"{type(self).__name__}: expert_parallel", expert_parallel)
        if accumulate_into_main_grad and weight_format is not None:
            expected = "False, since a weight that is stored quantized has no gradient"
            raise InputError(f"{type(self).__name__}: accumulate_into_main_grad: expected {expected}, got True")
        self.accumulate_into_main_grad, self.recipe = accumulate_into_main_grad, recipe
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self._make_parameters(self.weight_shape, bias, device, dtype)

    @classmethod
    def from_quantized(
        cls,
        weight: Tensor,
        weight_scale_inv: Tensor,
        bias: Tensor | None = None,
        *,
        recipe: object = None,
        weight_format: Format = FP8_CHECKPOINT,
        expert_parallel: ExpertParallel | None = None,
    ) -> GroupedLinear:
        """Return a layer with a weight that is already quantized, such as that of an FP8 checkpoint, without a copy.

        Raises `InputError`: a tensor has the wrong shape or dtype.

        Parameters
        ----------
        weight
            The codes (E, N, K), float8_e4m3fn.
        weight_scale_inv
            (E, ceil(N / 128), ceil(K / 128)), fp32. A code times its scale is the value.
        bias
            (E, N), in the dtype of the rows.
        recipe, weight_format, expert_parallel
            As for the constructor. The default format is that of FP8 checkpoints, with any scales. With
            ``fp8_block(across=128)``, the scales of rows and gradients are powers of two.
        """
        TENSOR(f"{cls.__name__}.from_quantized: weight", weight)
        TENSOR(f"{cls.__name__}.from_quantized: weight_scale_inv", weight_scale_inv)
        if weight.dim() != 3:
            raise InputError(
                f"{cls.__name__}.from_quantized: weight: expected codes (E, N, K), got shape {tuple(weight.shape)}"
            )
        experts, out_features, in_features = weight.shape
        layer = cls(
            experts,
            in_features,
            out_features,
            device="meta",
            recipe=recipe,
            weight_format=weight_format,
            expert_parallel=expert_parallel,
        )
        given = {"weight": weight, "weight_scale_inv": weight_scale_inv}
        for name, t in given.items():
            expected: Tensor = getattr(layer, name)
            if (t.shape, t.dtype) != (expected.shape, expected.dtype):
                what = f"shape {tuple(expected.shape)} in {expected.dtype}"
                raise layer.reject(name, what, f"shape {tuple(t.shape)} in {t.dtype}")
            setattr(layer, name, nn.Parameter(t.detach(), requires_grad=False))
        if bias is not None:
            if tuple(TENSOR(f"{cls.__name__}.from_quantized: bias", bias).shape) != (experts, out_features):
                raise layer.reject("bias", f"shape {(experts, out_features)}", bias.shape)
            layer.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias)
        return layer

    def dequantized(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of the weight in high precision, (E, N, K), without a gradient.

        Parameters
        ----------
        dtype
            Dtype of the result; by default that of the weight, or torch's default dtype with a ``weight_format``.
        """
        weight = self.weight.detach()
        if self.weight_format is None:
            return weight.to(weight.dtype if dtype is None else dtype, copy=True)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        held = QuantizedTensor(weight, self.weight_scale_inv.detach(), self.weight_format, -1, self.weight_shape, dtype)
        return held.dequantize()

    @property
    def gives_grad(self) -> bool:
        """Whether the weight gets a gradient through autograd."""
        return self.weight_format is None and not self.accumulate_into_main_grad

    @property
    def expert_parallel(self) -> ExpertParallel | None:
        """The ranks that share the experts."""
        return self._sharded_over  # no public attribute, since plans do not depend on it

    @property
    def parameter_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the parameters."""
        return ("weight", "bias", *self.stored_weight[1:])

    @property
    def weight_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """(E, N, K)."""
        return self.num_groups, self.out_features, self.in_features

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new parameters, uniform within ``1 / sqrt(in_features)``; those of a ``weight_format`` are quantized.

        With ``expert_parallel``, each rank draws the values of the experts of all ranks, one expert at a time, and
        keeps those of its own. With the same seed on every rank the experts then differ, and the states of the
        generators are equal afterwards. On a CPU, the values are those of a layer with all experts and that seed.
        """
        super().reset_parameters()
        if self.weight_format is None or self.weight.is_meta:
            return
        bound = 1 / math.sqrt(self.in_features)
        for expert, values in drawn(self.weight, bound, self._sharded_over, torch.float32):
            q = quantize(values, self.weight_format)
            self.weight[expert].copy_(q.data)
            self.weight_scale_inv[expert].copy_(q.scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply a function to the parameters, as `torch.nn.Module` does. It may move a stored weight, not cast it."""
        stored = [getattr(self, name) for name in self.stored_weight]

        def applied(t: Tensor) -> Tensor:
            result = fn(t)
            cast = result.dtype is not t.dtype and any(t is own for own in stored)
            return t.to(result.device) if cast else result

        return super()._apply(applied if stored else fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        codes = state_dict.get(f"{prefix}weight")
        expected = "codes in float8_e4m3fn" if self.weight_format else "values, not codes (weight_format is None)"
        if codes is not None and (codes.dtype is E4M3.dtype) is not (self.weight_format is not None):
            # a copy would cast the one to the other without an error
            args[-1].append(f"{self!r}: {prefix}weight: expected {expected}, got {codes.dtype}")
            return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def infer(self, x: SpecLike, weight: SpecLike, bias: SpecLike | None, offsets: SpecLike) -> TensorSpec:
        if len(x.shape) != 2 or x.shape[1] != self.in_features:
            raise self.reject("x", f"shape (rows, {self.in_features})", x.shape)
        _check_parameters(self, x, weight, bias, self.weight_shape)
        if offsets.shape[0] != self.num_groups:
            raise self.reject("splits", f"shape ({self.num_groups},), one count per expert", offsets.shape)
        return TensorSpec((x.shape[0], self.out_features), x.dtype)

    def compute(self, x: Operand, weight: Operand, bias: Tensor | None, offsets: Tensor) -> Tensor:
        y = quantized_products.grouped_mm(x, weight, offsets)
        return y if bias is None else grouped_gemm.grouped_bias(y, bias, offsets)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        wgrad = WgradIntoMainGrad if self.accumulate_into_main_grad else Wgrad
        return BiasGrad(self), wgrad(self), Dgrad(self)

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        return x.shape[0] > 0 and not grouped_gemm.runs_on_device(device, x.dtype, self.in_features, self.out_features)

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return quantized_products.path(operands[0], operands[1], device)

    def extra_repr(self) -> str:
        return self._extra_repr(("num_groups", "in_features", "out_features"), bias_default=False)


class Linear(_LinearOp):
    """``y = x @ weight.T + bias``: the layer of a dense MLP, without groups and splits.

    Parameters and attributes are those of `torch.nn.Linear`, with ``weight`` (N, K) and ``bias`` (N,). For
    ``accumulate_into_main_grad`` and ``recipe`` see `GroupedLinear`. Called with ``x`` (..., K). In a chain with
    splits, rows without an expert do not contribute to the gradients of weight and bias.
    """

    optional_inputs = ("offsets",)  # for the backward steps

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        accumulate_into_main_grad: bool = False,
        recipe: object = None,
    ) -> None:
        super().__init__()
        self.accumulate_into_main_grad, self.recipe = accumulate_into_main_grad, recipe
        self.in_features, self.out_features = in_features, out_features
        self._make_parameters((self.out_features, self.in_features), bias, device, dtype)

    def infer(
        self, x: SpecLike, weight: SpecLike, bias: SpecLike | None, offsets: SpecLike | None = None
    ) -> TensorSpec:
        if len(x.shape) < 2 or x.shape[-1] != self.in_features:
            raise self.reject("x", f"shape (..., rows, {self.in_features})", x.shape)
        _check_parameters(self, x, weight, bias, (self.out_features, self.in_features))
        return TensorSpec((*x.shape[:-1], self.out_features), x.dtype)

    def compute(self, x: Operand, weight: Operand, bias: Tensor | None, offsets: Tensor | None = None) -> Tensor:
        if isinstance(x, Tensor) and isinstance(weight, Tensor):
            return nn.functional.linear(x, weight, bias)
        y = quantized_products.mm(x, weight, weight_axis=-1)
        return y if bias is None else y + bias

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return quantized_products.path_dense(*operands[:2])

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        wgrad = LinearWgradIntoMainGrad if self.accumulate_into_main_grad else LinearWgrad
        return LinearBiasGrad(self), wgrad(self), LinearDgrad(self)

    def extra_repr(self) -> str:
        return self._extra_repr(("in_features", "out_features"), bias_default=True)


def _check_parameters(
    op: Op, x: SpecLike, weight: SpecLike | None, bias: SpecLike | None, shape: tuple[int, ...]
) -> None:
    if weight is None or tuple(weight.shape) != shape:
        expected = f"shape {shape}"
        if weight is not None and len(shape) == 3 and tuple(weight.shape[1:]) == shape[1:]:
            expected += f", all {shape[0]} experts ({SPREAD_OVER_RANKS})"
        raise op.reject("weight", expected, None if weight is None else weight.shape)
    if bias is not None and tuple(bias.shape) != shape[:-1]:
        raise op.reject("bias", f"shape {shape[:-1]}", bias.shape)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype is not x.dtype:
            raise op.reject("x", f"{parameter.dtype}, the dtype of {name} (or run under torch.autocast)", x.dtype)
