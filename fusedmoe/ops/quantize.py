"""`Quantize`: rows, their gradient, or the weight of the layer that follows, in a small format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fusedmoe.checks import Check, instance
from fusedmoe.errors import InputError
from fusedmoe.formats import Format, QuantizedSpec, QuantizedTensor, Quantizer, amax_by_expert, quantize
from fusedmoe.formats.quantizers import DTYPES
from fusedmoe.formats.roles import ROLES
from fusedmoe.ops import amax_state, weight_cache
from fusedmoe.ops.op import BackwardOp, Op

if TYPE_CHECKING:
    from fusedmoe.ops.op import SpecLike

Forms = QuantizedTensor | tuple[QuantizedTensor, ...]


class Quantize(Op):
    """``y = dequantize(quantize(x))``, and its gradient likewise; the ops around it compute with the codes.

    In a chain, what goes on to the next op is the `fusedmoe.formats.QuantizedTensor`: a linear layer multiplies its
    codes, any other op gets what it stands for. Nothing is quantized twice, but for the two axes that the products of
    forward and backward sum over. Alone, or as the last op, it returns the dequantized values, in the dtype of ``x``.
    The gradient of rounding is taken for 1 (straight through).

    Parameters
    ----------
    forward
        What to quantize the rows to; None passes them as they are.
    backward
        What to quantize the gradient that arrives from behind to; None passes it as it is.
    weight
        What to quantize the weight of the linear layer right behind to.

        Each of the three is a name (``"mxfp8"``: what the recipe of that name has in that place; so with every recipe
        that quantizes), a `fusedmoe.formats.Quantizer` or a `fusedmoe.formats.Format`.

    Notes
    -----
    Rows (..., features) in fp32, bf16 or fp16. Among rows sorted by expert, experts share nothing: no scale, no block;
    rows that belong to none are not looked at and come out as zeros.

    Examples
    --------
    >>> experts = Sequential(
    ...     Quantize("mxfp8", weight="mxfp8"), GroupedLinear(8, 64, 64), Quantize(backward="mxfp8"), SwiGLU()
    ... )
    """

    optional_inputs = ("offsets",)
    zeroes_tail = True
    launches = 12
    only_quantizes = True
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
            if quantizer.hadamard:  # its partner in the weight gradient's product are no rows of the weight
                raise self.reject("weight", "a quantizer that rotates nothing", quantizer)
            if quantizer.stochastic_rounding:  # kept, it draws nothing when checkpointing computes a call again
                raise self.reject("weight", "a quantizer that rounds to nearest", quantizer)

    @classmethod
    def for_layer(
        cls,
        layer: Op,
        forward: Quantizer | None = None,
        backward: Quantizer | None = None,
        weight: Quantizer | None = None,
    ) -> Quantize:
        """Return the op that a recipe puts beside a layer, which keeps what has to last from step to step."""
        op = cls(forward, backward, weight)
        op.__dict__["_layer"] = layer  # not as a submodule
        return op

    @property
    def _owner(self) -> Op:
        """Whose the state is that has to last."""
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
        """Whether rows pass as they are."""
        return self.quantizer is None

    @property
    def passes_backward(self) -> bool:  # type: ignore[override]
        """Whether the gradient passes as it is."""
        return self.grad_quantizer is None

    def infer(self, x: SpecLike, offsets: SpecLike | None = None) -> QuantizedSpec:  # type: ignore[override]
        assert self.quantizer is not None, "otherwise there is no step"
        if len(x.shape) < 2:
            raise self.reject("x", "shape (..., rows, features)", tuple(x.shape))
        if offsets is not None and (self.quantizer.format.block[0] or 1) > 1:
            raise self.reject("forward", "blocks of one row, since experts share none", self.quantizer)
        return _spec(self, "x", x, self.quantizer, offsets)

    def compute(  # type: ignore[override]
        self, x: Tensor, offsets: Tensor | None = None, *, axes: Sequence[int] = (-1, -2), training: bool = False
    ) -> Forms:
        assert self.quantizer is not None, "otherwise there is no step"
        return _quantized(self._owner, "input", x, self.quantizer, offsets, axes, training)

    def backward_ops(self) -> tuple[BackwardOp, ...]:
        return () if self.grad_quantizer is None else (QuantizeGrad(self),)

    def extra_repr(self) -> str:
        given = {"forward": self.quantizer, "backward": self.grad_quantizer, "weight": self.weight_quantizer}
        return ", ".join(f"{name}={str(q)!r}" for name, q in given.items() if q is not None)


class QuantizeGrad(BackwardOp):
    """``dx = quantize(dy)``."""

    needs = ("grad_output", "offsets")
    zeroes_tail = True
    launches = 12
    op: Quantize

    @property
    def quantizes(self) -> Quantizer | None:  # type: ignore[override]
        """The quantizer of the gradient."""
        return self.op.grad_quantizer

    def infer(self, x: SpecLike, offsets: SpecLike | None = None) -> QuantizedSpec:
        """Return the spec of the gradient by rows, for rows like these."""
        assert self.op.grad_quantizer is not None
        return _spec(self.op, "the gradient of x", x, self.op.grad_quantizer, offsets)

    def compute(  # type: ignore[override]
        self, grad_output: Tensor, offsets: Tensor | None, *, axes: Sequence[int] = (-1, -2), training: bool = True
    ) -> Forms:
        assert self.op.grad_quantizer is not None
        return _quantized(self.op._owner, "grad", grad_output, self.op.grad_quantizer, offsets, axes, training)


class WeightQuantization:
    """What quantizes a layer's weight: once, until the weight changes.

    Parameters
    ----------
    layer
        The linear layer.
    quantizer
        What to quantize its weight to.
    """

    def __init__(self, layer: Op, quantizer: Quantizer) -> None:
        self.layer, self.quantizer = layer, quantizer

    def infer(self, weight: SpecLike) -> QuantizedSpec:
        """Return the spec of the result, by rows."""
        return _spec(self.layer, "weight", weight, self.quantizer)._replace(stacked=len(weight.shape) == 3)

    def __call__(self, weight: Tensor, *, axes: Sequence[int] = (-1, -2), training: bool = False) -> Forms:
        training = training and not amax_state.looking()
        entry = weight_cache.find(self.layer, weight, self.quantizer, axes)
        if entry is not None:
            if training and not entry.counted:  # it was quantized for inference
                self._step(weight, training)
                entry.counted = True
            return _forms([entry.forms[axis] for axis in axes])
        encode, lasts = self._step(weight, training)
        forms = [quantize(weight, self.quantizer, axis, encode=encode) for axis in axes]
        if lasts:
            weight_cache.keep(self.layer, weight, self.quantizer, dict(zip(axes, forms, strict=True)), training)
        return _forms(forms)

    def _step(self, weight: Tensor, training: bool) -> tuple[Tensor | None, bool]:
        """Return what to multiply by under delayed scaling, and whether the result is one to keep: not before there has
        been a step, when nothing is known of the weight's size.
        """
        if self.quantizer.delayed is None:
            return None, True
        experts = weight.shape[0] if weight.dim() == 3 else 1
        history = amax_state.history(self.layer, "weight", self.quantizer, experts, weight.device)
        begun = history.begun
        encode, again = amax_state.step(history, "weight", training, lambda: amax_by_expert(weight, None))
        return encode, begun and not again


def _resolved(role: str, quantizer: str | Quantizer | Format | None) -> Quantizer | None:
    if isinstance(quantizer, str):
        if quantizer not in ROLES:
            names = ", ".join(map(repr, ROLES))
            raise InputError(f"Quantize: {role}: expected a Quantizer, a Format or one of {names}, got {quantizer!r}")
        roles = ROLES[quantizer]
        return {"forward": roles.input, "backward": roles.grad, "weight": roles.weight}[role]
    if isinstance(quantizer, Format):
        return Quantizer(quantizer)
    if quantizer is not None and not isinstance(quantizer, Quantizer):
        raise InputError(f"Quantize: {role}: expected a Quantizer, a Format, a name or None, got {quantizer!r}")
    return quantizer


def _spec(op: Op, what: str, x: SpecLike, quantizer: Quantizer, offsets: SpecLike | None = None) -> QuantizedSpec:
    if x.dtype not in DTYPES:
        raise op.reject(what, "float32, bfloat16 or float16, to be quantized", x.dtype)
    experts = None if offsets is None else offsets.shape[0]
    return QuantizedSpec(tuple(x.shape), x.dtype, quantizer.format, -1, experts)


def _quantized(
    owner: Op,
    role: str,
    x: Tensor,
    quantizer: Quantizer,
    offsets: Tensor | None,
    axes: Sequence[int],
    training: bool,
) -> Forms:
    """Return rows, or their gradient, quantized along each of these axes: the one result there is, or a tuple."""
    shape = tuple(x.shape)
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    encode = None
    if quantizer.delayed is not None:
        history = amax_state.history(owner, role, quantizer, 1 if offsets is None else offsets.shape[0], rows.device)
        encode, _ = amax_state.step(history, role, training, lambda: amax_by_expert(rows, offsets))
    forms = [quantize(rows, quantizer, axis, offsets=offsets, encode=encode) for axis in axes]
    return _forms(forms if rows is x else [replace(form, shape=shape) for form in forms])


def _forms(forms: list[QuantizedTensor]) -> Forms:
    """Return the one result there is, or a tuple."""
    return tuple(forms) if len(forms) > 1 else forms[0]
