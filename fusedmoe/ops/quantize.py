"""`Quantize`: quantizes rows, their gradient, and the weight of the following linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from fusedmoe.base.checks import Check, instance
from fusedmoe.base.errors import InputError
from fusedmoe.numerics.formats import Format, QuantizedSpec, QuantizedTensor, Quantizer, amax_by_expert, quantize
from fusedmoe.numerics.formats.packed import Packed, PackedTensor, quantize_packed
from fusedmoe.numerics.formats.quantizers import DTYPES
from fusedmoe.numerics.formats.roles import ROLES, WGRAD_BF16, roles_named
from fusedmoe.ops.op import BackwardOp, Op, SpecLike
from fusedmoe.ops.state import amax, weight_cache

Form = QuantizedTensor | PackedTensor
Forms = Form | tuple[Form, ...]
Axes = Sequence[int | Packed]


class Quantize(Op):
    """``y = dequantize(quantize(x))`` and ``dx = dequantize(quantize(dy))``; linear layers multiply the codes.

    In a chain, the next op gets the `fusedmoe.numerics.formats.QuantizedTensor` if it is a linear layer, and the
    dequantized values otherwise. Each axis that a forward or backward product sums over has its own quantized form.
    Called alone, or as the last op, `Quantize` returns the dequantized values in the dtype of ``x``. The gradient is
    straight-through: rounding has the derivative 1.

    Each parameter is a `fusedmoe.numerics.formats.Quantizer`, a `fusedmoe.numerics.formats.Format`, or the name of a
    recipe, such as ``"mxfp8"`` or ``"mxfp8:wgrad=bf16"``, for the recipe's quantizer of this operand. With
    ``wgrad="bf16"``, the weight gradient of a linear layer in the same chain reads ``x``, or ``dy``, itself.

    Rows are (..., features) in fp32, bf16 or fp16. Experts share no scale and no block. Rows without an expert are not
    read, and become zeros.

    Parameters
    ----------
    forward
        The quantizer of the rows; None leaves them unchanged.
    backward
        The quantizer of the gradient of the output; None leaves it unchanged.
    weight
        The quantizer of the weight of the linear layer right after this op.

    Examples
    --------
    >>> experts = Sequential(
    ...     Quantize("mxfp8", weight="mxfp8"), GroupedLinear(8, 64, 64), Quantize(backward="mxfp8"), SwiGLU()
    ... )
    """

    reads_tail = False
    optional_inputs = ("offsets",)
    zeroes_tail = True
    launches = 12
    only_quantizes = True
    packs = True
    _checks: ClassVar[Mapping[str, Check]] = {
        name: instance(Quantizer, "a fusedmoe.Quantizer").or_none()
        for name in ("quantizer", "grad_quantizer", "weight_quantizer")
    }

    def __init__(
        self,
        forward: str | Quantizer | Format | None = None,
        backward: str | Quantizer | Format | None = None,
        weight: str | Quantizer | Format | None = None,
    ) -> None:
        super().__init__()
        self.quantizer = _resolved("forward", forward)
        self.grad_quantizer = _resolved("backward", backward)
        self.weight_quantizer = _resolved("weight", weight)
        if (quantizer := self.weight_quantizer) is not None:
            if quantizer.hadamard:  # only the operands of the weight gradient may be rotated: rows and gradients
                raise self.reject("weight", "a quantizer without hadamard", quantizer)
            if quantizer.wgrad != "quantized":  # the weight gradient does not read the weight
                raise self.reject("weight", "a quantizer with wgrad='quantized'", quantizer)
            if quantizer.stochastic_rounding:  # a cached weight draws no numbers in a recomputation by checkpointing
                raise self.reject("weight", "a quantizer that rounds to nearest", quantizer)

    @classmethod
    def for_layer(
        cls,
        layer: Op,
        forward: Quantizer | None = None,
        backward: Quantizer | None = None,
        weight: Quantizer | None = None,
    ) -> Quantize:
        """Return the op that a recipe inserts for a layer; the layer stores its state between steps."""
        op = cls(forward, backward, weight)
        op.__dict__["_layer"] = layer  # not as a submodule
        return op

    @property
    def _owner(self) -> Op:
        """The op that stores the state between steps."""
        layer: Op | None = self.__dict__.get("_layer")
        return self if layer is None else layer

    @property
    def quantizes(self) -> Quantizer | None:  # type: ignore[override]
        """The quantizer of the rows."""
        return self.quantizer

    @property
    def quantizes_weight(self) -> Quantizer | None:  # type: ignore[override]
        """The quantizer of the weight."""
        return self.weight_quantizer

    def weight_quantization(self, layer: Op) -> WeightQuantization:
        assert self.weight_quantizer is not None
        return WeightQuantization(layer, self.weight_quantizer)

    @property
    def passes_forward(self) -> bool:  # type: ignore[override]
        """Whether rows are unchanged."""
        return self.quantizer is None

    @property
    def passes_backward(self) -> bool:  # type: ignore[override]
        """Whether the gradient is unchanged."""
        return self.grad_quantizer is None

    def infer(self, x: SpecLike, offsets: SpecLike | None = None) -> QuantizedSpec:  # type: ignore[override]
        assert self.quantizer is not None, "otherwise there is no step"
        if len(x.shape) < 2:
            raise self.reject("x", "shape (..., rows, features)", tuple(x.shape))
        if offsets is not None and (self.quantizer.format.block[0] or 1) > 1:
            raise self.reject("forward", "blocks of one row, since experts share none", self.quantizer)
        return _spec(self, "x", x, self.quantizer, offsets)

    def compute(  # type: ignore[override]
        self, x: Tensor, offsets: Tensor | None = None, *, axes: Axes = (-1, -2), training: bool = False
    ) -> Forms:
        assert self.quantizer is not None, "otherwise there is no step"
        return _quantized(x, self.quantizer, offsets, axes, self.delayed_step(x, offsets, training))

    def delayed_step(self, x: Tensor, offsets: Tensor | None, training: bool) -> amax.Step | None:
        """Return the step of delayed scaling that a call with these tensors is; None without delayed scaling."""
        assert self.quantizer is not None, "otherwise there is no step"
        return _delayed_step(self._owner, "input", self.quantizer, x, offsets, training)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return () if self.grad_quantizer is None else (QuantizeGrad(self),)

    def columns_again(self) -> BackwardOp | None:
        quantizer = self.quantizer
        if quantizer is None or quantizer.delayed is not None or quantizer.stochastic_rounding:
            return None  # the second result would differ
        return QuantizeColumns(self)

    def extra_repr(self) -> str:
        given = {"forward": self.quantizer, "backward": self.grad_quantizer, "weight": self.weight_quantizer}
        return ", ".join(f"{name}={str(q)!r}" for name, q in given.items() if q is not None)


class QuantizeGrad(BackwardOp):
    """``dx = quantize(dy)``."""

    reads_tail = False
    needs = ("grad_output", "offsets")
    zeroes_tail = True
    launches = 12
    packs = True
    op: Quantize

    def __init__(self, op: Quantize) -> None:
        super().__init__(op)
        self.quantizes = op.grad_quantizer

    def infer(self, x: SpecLike, offsets: SpecLike | None = None) -> QuantizedSpec:
        """Return the spec of the gradient by rows, for an op with the input ``x``."""
        assert self.op.grad_quantizer is not None
        return _spec(self.op, "the gradient of x", x, self.op.grad_quantizer, offsets)

    def compute(  # type: ignore[override]
        self, grad_output: Tensor, offsets: Tensor | None, *, axes: Axes = (-1, -2), training: bool = True
    ) -> Forms:
        assert self.op.grad_quantizer is not None
        step = self.delayed_step(grad_output, offsets, training)
        return _quantized(grad_output, self.op.grad_quantizer, offsets, axes, step)

    def delayed_step(self, grad: Tensor, offsets: Tensor | None, training: bool) -> amax.Step | None:
        """As `Quantize.delayed_step`."""
        assert self.op.grad_quantizer is not None
        return _delayed_step(self.op._owner, "grad", self.op.grad_quantizer, grad, offsets, training)


class QuantizeColumns(BackwardOp):
    """``columns = quantize(x)`` by columns, so that the forward pass need not keep them."""

    reads_tail = False
    needs = ("input", "offsets")
    gives = ("columns",)
    zeroes_tail = True
    launches = 12
    op: Quantize

    def compute(self, x: Tensor, offsets: Tensor | None) -> Forms:
        return self.op.compute(x, offsets, axes=(-2,))


class WeightQuantization:
    """Quantizes a layer's weight, and caches the result until the weight changes.

    - ``layer``: the linear layer.
    - ``quantizer``: the quantizer of its weight.
    """

    def __init__(self, layer: Op, quantizer: Quantizer) -> None:
        self.layer, self.quantizer = layer, quantizer

    def infer(self, weight: SpecLike) -> QuantizedSpec:
        """Return the spec of the result, by rows."""
        return _spec(self.layer, "weight", weight, self.quantizer)._replace(stacked=len(weight.shape) == 3)

    def __call__(
        self,
        weight: Tensor,
        *,
        axes: Axes = (-1, -2),
        training: bool = False,
        by: tuple[str, Callable[[Tensor, amax.Step | None], Sequence[Form]]] | None = None,
    ) -> Forms:
        """Return the weight's forms along these axes.

        ``by`` has the name of a rule, and the rule's function of a weight and a step of delayed scaling. The function
        quantizes the weight along these axes in place of plain PyTorch, and ends the step.
        """
        training = training and not amax.looking()
        maker = "" if by is None else by[0]
        entry = weight_cache.find(self.layer, weight, self.quantizer, axes, maker)
        if entry is not None:
            if training and not entry.counted:  # inference has quantized the weight
                step, _ = self._step(weight, training)
                if step is not None and step.counts:
                    step.end(amax_by_expert(weight))
                entry.counted = True
            return _forms([entry.forms[axis] for axis in axes])
        step, lasts = self._step(weight, training)
        if by is None:
            encode = None if step is None else step.encode
            forms: Sequence[Form] = [_form(weight, self.quantizer, axis, None, encode) for axis in axes]
            if step is not None and step.counts:
                step.end(amax_by_expert(weight))
        else:
            forms = by[1](weight, step)
        if lasts:
            weight_cache.keep(self.layer, weight, self.quantizer, dict(zip(axes, forms, strict=True)), training, maker)
        return _forms(forms)

    def tensors(
        self,
        weight: Tensor,
        *,
        axes: Axes,
        training: bool,
        by: tuple[str, Callable[[Tensor, amax.Step | None], Sequence[Form]]],
    ) -> tuple[Tensor, ...]:
        """Return the tensors of all forms, one by one, made by the function of a rule; see `__call__`."""
        found = self(weight, axes=axes, training=training, by=by)
        return tuple(t for form in (found if isinstance(found, tuple) else (found,)) for t in form.tensors())

    def _step(self, weight: Tensor, training: bool) -> tuple[amax.Step | None, bool]:
        """Return the step of delayed scaling, and whether the result may be cached.

        A result from before the first step may not be cached, since its scale does not come from the weight.
        """
        if self.quantizer.delayed is None:
            return None, True
        experts = weight.shape[0] if weight.dim() == 3 else 1
        history = amax.history(self.layer, "weight", self.quantizer, experts, weight.device)
        step = amax.Step(history, "weight", training)
        return step, history.begun and not step.again


def _resolved(role: str, quantizer: str | Quantizer | Format | None) -> Quantizer | None:
    if isinstance(quantizer, str):
        roles = roles_named(quantizer)
        if roles is None:
            names = f"one of {', '.join(map(repr, ROLES))}, which may end in {WGRAD_BF16!r}"
            raise InputError(f"Quantize: {role}: expected a Quantizer, a Format or {names}, got {quantizer!r}")
        return {"forward": roles.input, "backward": roles.grad, "weight": roles.weight}[role]
    if isinstance(quantizer, Format):
        return Quantizer(quantizer)
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise InputError(f"Quantize: {role}: expected a Quantizer, a Format, a name or None, got {quantizer!r}")
    return quantizer


def _spec(op: Op, what: str, x: SpecLike, quantizer: Quantizer, offsets: SpecLike | None = None) -> QuantizedSpec:
    if x.dtype not in DTYPES:
        raise op.reject(what, "float32, bfloat16 or float16 for quantization", x.dtype)
    experts = None if offsets is None else offsets.shape[0]
    return QuantizedSpec(tuple(x.shape), x.dtype, quantizer.format, -1, experts)


def _delayed_step(
    owner: Op, role: str, quantizer: Quantizer, x: Tensor, offsets: Tensor | None, training: bool
) -> amax.Step | None:
    if quantizer.delayed is None:
        return None
    experts = 1 if offsets is None else offsets.shape[0]
    return amax.Step(amax.history(owner, role, quantizer, experts, x.device), role, training)


def _quantized(x: Tensor, quantizer: Quantizer, offsets: Tensor | None, axes: Axes, step: amax.Step | None) -> Forms:
    """Return rows, or their gradient, quantized along each of these axes; see `_forms`."""
    shape = tuple(x.shape)
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    encode = None if step is None else step.encode
    forms = [_form(rows, quantizer, axis, offsets, encode) for axis in axes]
    if step is not None and step.counts:
        step.end(amax_by_expert(rows, offsets))
    if rows is not x:
        forms = [replace(form, shape=shape) if isinstance(form, QuantizedTensor) else form for form in forms]
    return _forms(forms)


def _form(x: Tensor, quantizer: Quantizer, axis: int | Packed, offsets: Tensor | None, encode: Tensor | None) -> Form:
    if isinstance(axis, Packed):
        return quantize_packed(x, quantizer, axis, offsets)
    return quantize(x, quantizer, axis, offsets=offsets, encode=encode)


def _forms(forms: Sequence[Form]) -> Forms:
    """Return a single form itself, several forms as a tuple."""
    return tuple(forms) if len(forms) > 1 else forms[0]
