"""Linear layers over rows sorted by expert.

Axes: R rows, E experts (groups), K features in, N features out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.checks import FLAG, POSITIVE_INTEGER, check_factory
from fusedmoe.errors import NO_EXPERT_PARALLELISM
from fusedmoe.formats import QuantizedTensor, products
from fusedmoe.kernels.torch import grouped_gemm
from fusedmoe.kernels.torch.rows import tail_mask
from fusedmoe.ops.main_grad import grad_instead, main_grad_of
from fusedmoe.ops.op import BackwardOp, Op, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fusedmoe.checks import Check
    from fusedmoe.formats.products import Operand
    from fusedmoe.ops.op import SpecLike


def _contiguous(grad: Operand) -> Operand:
    return grad if isinstance(grad, QuantizedTensor) else grad.contiguous()


class Dgrad(BackwardOp):
    """``dx[r] = dy[r] @ weight[expert of r]``."""

    zeroes_tail = True
    launches = 4

    needs = ("grad_output", "weight", "offsets")
    contracts: ClassVar[Mapping[str, int]] = {"grad_output": -1, "weight": -2}
    op: GroupedLinear

    def compute(self, grad_output: Operand, weight: Operand, offsets: Tensor) -> Tensor:
        return products.grouped_mm_dgrad(_contiguous(grad_output), weight, offsets)

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return products.path(operands[0], operands[1], device)


class Wgrad(BackwardOp):
    """``dW[e] = dy[rows of e].T @ x[rows of e]``; exact zeros for an expert without rows."""

    needs = ("grad_output", "input", "offsets")
    gives = ("grad_weight",)
    contracts: ClassVar[Mapping[str, int]] = {"grad_output": -2, "input": -2}
    op: GroupedLinear

    def compute(self, grad_output: Operand, x: Operand, offsets: Tensor) -> Tensor:
        return products.grouped_mm_wgrad(_contiguous(grad_output), x, offsets)

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return products.path(operands[0], operands[1], device)


class WgradIntoMainGrad(Wgrad):
    """``main_grad[e] += dW[e]``: `Wgrad`, added to the weight's ``main_grad`` instead of given to autograd."""

    may_give_none = True
    launches = 2

    def compute(self, grad_output: Operand, x: Operand, offsets: Tensor) -> Tensor | None:  # type: ignore[override]
        self.main_grad().add_(super().compute(grad_output, x, offsets))
        return self.added()

    def main_grad(self) -> Tensor:
        """Return what to add the gradient to. Raises `InputError` where there is none, or none that fits."""
        return main_grad_of(self.op)

    def added(self) -> Tensor | None:
        """Say that the gradient is added; return what autograd is to get."""
        return grad_instead(self.op)


class BiasGrad(BackwardOp):
    """``db[e] = sum of dy over the rows of e``, accumulated in fp32."""

    needs = ("grad_output", "offsets")
    gives = ("grad_bias",)
    unquantized = ("grad_output",)
    launches = 4
    op: GroupedLinear

    def compute(self, grad_output: Tensor, offsets: Tensor) -> Tensor:
        return grouped_gemm.grouped_bias_grad(grad_output, offsets)

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        return False


# The dense layer's backward steps are classes of their own: a rule for grouped products does not stand on them.
# Those that sum over rows leave out the rows that belong to no expert, where there are experts further on.


def _without_tail(rows: Operand, offsets: Tensor | None) -> Operand:
    """Return the rows with zeros in those that belong to no expert; quantized ones have them."""
    if offsets is None or isinstance(rows, QuantizedTensor):
        return rows
    tail = tail_mask(offsets, rows.shape[0])
    return rows.masked_fill(tail.view(-1, *(1,) * (rows.dim() - 1)), 0)


class LinearDgrad(BackwardOp):
    """``dx = dy @ weight``."""

    needs = ("grad_output", "weight")
    contracts: ClassVar[Mapping[str, int]] = {"grad_output": -1, "weight": -2}

    def compute(self, grad_output: Operand, weight: Operand) -> Tensor:
        return products.mm(grad_output, weight, weight_axis=-2)

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return products.path_dense(*operands)


class LinearWgrad(BackwardOp):
    """``dW = dy.T @ x``, over the rows that belong to an expert where they are sorted so."""

    needs = ("grad_output", "input", "offsets")
    gives = ("grad_weight",)
    contracts: ClassVar[Mapping[str, int]] = {"grad_output": -2, "input": -2}
    op: Linear

    def compute(self, grad_output: Operand, x: Operand, offsets: Tensor | None = None) -> Tensor:
        return products.mm_wgrad(_without_tail(grad_output, offsets), _without_tail(x, offsets))

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return products.path_dense(*operands[:2])


class LinearWgradIntoMainGrad(LinearWgrad):
    """``main_grad += dW``: `LinearWgrad`, added to the weight's ``main_grad`` instead of given to autograd."""

    may_give_none = True
    launches = 2

    def compute(  # type: ignore[override]
        self, grad_output: Operand, x: Operand, offsets: Tensor | None = None
    ) -> Tensor | None:
        main_grad_of(self.op).add_(super().compute(grad_output, x, offsets))
        return grad_instead(self.op)


class LinearBiasGrad(BackwardOp):
    """``db = sum of dy over the rows``, those that belong to an expert where they are sorted so; in fp32."""

    needs = ("grad_output", "offsets")
    gives = ("grad_bias",)
    unquantized = ("grad_output",)

    def compute(self, grad_output: Tensor, offsets: Tensor | None = None) -> Tensor:
        rows = _without_tail(grad_output, offsets)
        assert isinstance(rows, Tensor)
        return grouped_gemm.grouped_bias_grad(rows.flatten(0, -2), None)[0]


def _draw(op: Op, in_features: int) -> None:
    bound = 1 / math.sqrt(in_features)
    for parameter in op.parameters(recurse=False):
        nn.init.uniform_(parameter, -bound, bound)


class _LinearOp(Op):
    """A linear layer, which may have a recipe of its own."""

    _checks: ClassVar[Mapping[str, Check]] = {
        "num_groups": POSITIVE_INTEGER,
        "in_features": POSITIVE_INTEGER,
        "out_features": POSITIVE_INTEGER,
        "accumulate_into_main_grad": FLAG,
    }

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "recipe" and value is not None:
            from fusedmoe.recipes import resolve  # which is built on ops

            resolved = resolve(value)
            value = value if isinstance(value, str) else resolved  # Transformer Engine's cannot be hashed
        super().__setattr__(name, value)


class GroupedLinear(_LinearOp):
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
    accumulate_into_main_grad
        Add the weight's gradient to ``weight.main_grad``, as Megatron-LM and Transformer Engine have it: a tensor of
        the weight's shape in fp32 (fp64 for fp64), which has to be there in the backward pass and is never allocated
        here. ``weight.grad`` then means nothing: autograd gets None or, where the weight has an attribute
        ``grad_added_to_main_grad``, an uninitialised tensor (zeros if ``weight.zero_out_wgrad``), and the attribute is
        set to True. Every backward pass through the op adds, ``torch.autograd.grad`` of something else too. The bias
        gets its gradient as ever.
    recipe
        The recipe of this layer, whatever holds around the call: what ``fm.recipe`` takes. ``"bf16"`` is none.
        None leaves it to ``fm.recipe``. May be set as an attribute at any time.

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
    contracts: ClassVar[Mapping[str, int]] = {"input": -1, "weight": -1}
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
        *,
        accumulate_into_main_grad: bool = False,
        recipe: object = None,
    ) -> None:
        super().__init__()
        FLAG(f"{type(self).__name__}: bias", bias)
        check_factory(type(self).__name__, device, dtype)
        self.accumulate_into_main_grad, self.recipe = accumulate_into_main_grad, recipe
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        shape = (self.num_groups, self.out_features, self.in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        empty_bias = torch.empty(shape[:-1], device=device, dtype=dtype) if bias else None
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
            raise self.reject("splits", f"shape ({self.num_groups},), one count per expert", offsets.shape)
        return TensorSpec((x.shape[0], self.out_features), x.dtype)

    def compute(self, x: Operand, weight: Operand, bias: Tensor | None, offsets: Tensor) -> Tensor:
        y = products.grouped_mm(x, weight, offsets)
        return y if bias is None else grouped_gemm.grouped_bias(y, bias, offsets)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        wgrad = WgradIntoMainGrad if self.accumulate_into_main_grad else Wgrad
        return BiasGrad(self), wgrad(self), Dgrad(self)

    def host_sync(self, x: SpecLike, device: torch.device) -> bool:
        return x.shape[0] > 0 and not grouped_gemm.runs_on_device(device, x.dtype, self.in_features, self.out_features)

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return products.path(operands[0], operands[1], device)

    def extra_repr(self) -> str:
        text = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        text += ", bias=True" if self.bias is not None else ""
        text += ", accumulate_into_main_grad=True" if self.accumulate_into_main_grad else ""
        return text + ("" if self.recipe is None else f", recipe={self.recipe!r}")


class Linear(_LinearOp):
    """``y = x @ weight.T + bias``: one group, no splits; the dense MLP's layer.

    Parameters and attributes are those of `torch.nn.Linear`: ``weight`` (N, K), ``bias`` (N,); and
    ``accumulate_into_main_grad`` and ``recipe``, see `GroupedLinear`. Called with ``x`` (..., K). Among rows sorted by
    expert, those that belong to none count in no gradient of weight and bias.
    """

    parameter_names = ("weight", "bias")
    optional_inputs = ("offsets",)  # for the backward steps
    bias: nn.Parameter | None
    contracts: ClassVar[Mapping[str, int]] = {"input": -1, "weight": -1}

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
        FLAG(f"{type(self).__name__}: bias", bias)
        check_factory(type(self).__name__, device, dtype)
        self.accumulate_into_main_grad, self.recipe = accumulate_into_main_grad, recipe
        self.in_features, self.out_features = in_features, out_features
        shape = (self.out_features, self.in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        empty_bias = torch.empty(shape[:-1], device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if empty_bias is None else nn.Parameter(empty_bias))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters, uniform within ``1 / sqrt(in_features)``."""
        _draw(self, self.in_features)

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
        y = products.mm(x, weight, weight_axis=-1)
        return y if bias is None else y + bias

    def path(self, operands: Sequence[SpecLike | None], device: torch.device) -> str:
        return products.path_dense(*operands[:2])

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        wgrad = LinearWgradIntoMainGrad if self.accumulate_into_main_grad else LinearWgrad
        return LinearBiasGrad(self), wgrad(self), LinearDgrad(self)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}"
        text += "" if self.bias is not None else ", bias=False"
        text += ", accumulate_into_main_grad=True" if self.accumulate_into_main_grad else ""
        return text + ("" if self.recipe is None else f", recipe={self.recipe!r}")


def _check_parameters(
    op: Op, x: SpecLike, weight: SpecLike | None, bias: SpecLike | None, shape: tuple[int, ...]
) -> None:
    if weight is None or tuple(weight.shape) != shape:
        expected = f"shape {shape}"
        if weight is not None and len(shape) == 3 and tuple(weight.shape[1:]) == shape[1:]:
            expected += f", all {shape[0]} experts ({NO_EXPERT_PARALLELISM})"
        raise op.reject("weight", expected, None if weight is None else weight.shape)
    if bias is not None and tuple(bias.shape) != shape[:-1]:
        raise op.reject("bias", f"shape {shape[:-1]}", bias.shape)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype is not x.dtype:
            raise op.reject("x", f"{parameter.dtype}, the dtype of {name} (or run under torch.autocast)", x.dtype)
