"""Recipes: the numeric formats in which the linear layers of a chain multiply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from fusedmoe.base.checks import FLAG, NOT_NEGATIVE, TEXT, Check, check_fields, instance, one_of
from fusedmoe.numerics.formats import Delayed, Quantizer, ScaleRule
from fusedmoe.numerics.formats.format import WGRAD
from fusedmoe.numerics.formats.roles import Roles, block_roles, mxfp8_roles, nvfp4_roles, row_roles, tensor_roles

_DELAYED = instance(Delayed, "a fusedmoe.numerics.formats.Delayed").or_none()
_QUANTIZER = instance(Quantizer, "a fusedmoe.Quantizer").or_none()


class Node(NamedTuple):
    """An op and its name in the `Sequential` that runs it."""

    label: str
    op: Any  # a `fusedmoe.ops.Op`


@dataclass(frozen=True)
class Recipe:
    """A numeric recipe. This base class quantizes nothing: a chain computes in the dtype of its rows and parameters.

    A subclass is a frozen dataclass and overrides `roles` or `rewrite`. Its values are part of the key of every plan.

    Recipes with FP8 or FP4 have ``wgrad``. With ``"bf16"``, the weight gradient multiplies the rows and the gradient
    from before quantization, in their dtype. With ``"quantized"``, it multiplies quantized operands, as the other
    products do.
    """

    _checks: ClassVar[Mapping[str, Check]] = {"name": TEXT}  # of fields that are no flags

    name: str = "bf16"  #: The name in ``explain()`` and in the log

    def __post_init__(self) -> None:
        check_fields(self, {**self._checks, **{f.name: FLAG for f in fields(self) if isinstance(f.default, bool)}})

    def roles(self) -> Roles:
        """Return the quantizers of the operands of every linear layer."""
        return Roles(None, None, None)

    def rewrite(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the chain with inserted ops; an override replaces the default, which inserts `Quantize` ops by role.

        An override keeps all nodes in their order. The ops that it inserts have unique labels and no parameters.
        `fusedmoe.call.quantization.by_roles` is the default.
        """
        raise NotImplementedError(f"{type(self).__name__} does not override rewrite(): call quantization.rewritten()")


@dataclass(frozen=True)
class FP8Tensor(Recipe):
    """FP8 with one scale per expert for rows, one for gradients, and one for the weight.

    Transformer Engine calls it ``Float8CurrentScaling`` and, with ``delayed``, ``DelayedScaling``.
    """

    _checks: ClassVar = {**Recipe._checks, "wgrad": WGRAD, "delayed": _DELAYED}

    name: str = "fp8_tensor"
    hybrid: bool = True  #: Gradients are in E5M2 instead of E4M3
    power_of_two: bool = False  #: Scales are powers of two
    delayed: Delayed | None = None  #: Scales follow from the amax of earlier steps instead of the current tensor
    wgrad: str = "quantized"  #: ``"quantized"`` or ``"bf16"``, see `Recipe`

    def roles(self) -> Roles:
        return tensor_roles(self.hybrid, self.power_of_two, self.delayed).with_wgrad(self.wgrad)


@dataclass(frozen=True)
class FP8Row(Recipe):
    """FP8 with one scale per row; where a product sums over rows, one per column and expert."""

    _checks: ClassVar = {**Recipe._checks, "wgrad": WGRAD}

    name: str = "fp8_row"
    hybrid: bool = False  #: Gradients are in E5M2 instead of E4M3
    power_of_two: bool = False  #: Scales are powers of two
    wgrad: str = "quantized"  #: ``"quantized"`` or ``"bf16"``, see `Recipe`

    def roles(self) -> Roles:
        return row_roles(self.hybrid, self.power_of_two).with_wgrad(self.wgrad)


@dataclass(frozen=True)
class FP8Block(Recipe):
    """DeepSeek-V3's FP8: one scale per 1x128 elements of rows and gradients, and per 128x128 elements of weights.

    Transformer Engine calls it ``Float8BlockScaling``.
    """

    _checks: ClassVar = {**Recipe._checks, "wgrad": WGRAD, "amax_epsilon": NOT_NEGATIVE}

    name: str = "fp8_block"
    hybrid: bool = False  #: Gradients are in E5M2 instead of E4M3
    power_of_two: bool = True  #: Scales are powers of two
    amax_epsilon: float = 0.0  #: A lower bound on the amax of a block
    wgrad: str = "quantized"  #: ``"quantized"`` or ``"bf16"``, see `Recipe`

    def roles(self) -> Roles:
        return block_roles(self.hybrid, self.power_of_two, self.amax_epsilon).with_wgrad(self.wgrad)


@dataclass(frozen=True)
class MXFP8(Recipe):
    """MXFP8: one scale, a power of two, per 1x32 elements.

    Transformer Engine calls it ``MXFP8BlockScaling``.
    """

    _checks: ClassVar = {**Recipe._checks, "wgrad": WGRAD, "scale_rule": one_of(("rceil", "floor"))}

    name: str = "mxfp8"
    hybrid: bool = False  #: Gradients are in E5M2 instead of E4M3
    #: ``"rceil"``: the smallest scale that clips nothing. ``"floor"``: the scale of the MX specification, which clips.
    scale_rule: str = "rceil"
    #: 32x32 elements of a weight share a scale, so that forward and backward use the same codes.
    weight_2d: bool = False
    wgrad: str = "quantized"  #: ``"quantized"`` or ``"bf16"``, see `Recipe`

    def roles(self) -> Roles:
        return mxfp8_roles(self.hybrid, ScaleRule(self.scale_rule), self.weight_2d).with_wgrad(self.wgrad)


@dataclass(frozen=True)
class NVFP4(Recipe):
    """NVFP4: four bits, one E4M3 scale per 1x16 elements, and one fp32 scale per expert.

    Transformer Engine calls it ``NVFP4BlockScaling``. Source: NVIDIA, "Pretraining Large Language Models with NVFP4".
    """

    _checks: ClassVar = {**Recipe._checks, "wgrad": WGRAD}

    name: str = "nvfp4"
    #: A random Hadamard transform rotates rows and gradients for the weight gradient, unless ``wgrad="bf16"``.
    hadamard: bool = True
    stochastic_rounding: bool = True  #: Gradients are rounded stochastically
    #: 16x16 elements of a weight share a scale, so that forward and backward use the same codes.
    weight_2d: bool = True
    wgrad: str = "quantized"  #: ``"quantized"`` or ``"bf16"``, see `Recipe`

    def roles(self) -> Roles:
        return nvfp4_roles(self.hadamard, self.stochastic_rounding, self.weight_2d).with_wgrad(self.wgrad)


@dataclass(frozen=True)
class Custom(Recipe):
    """A quantizer for each role: ``Custom("mine", input=Quantizer(mxfp8()), ...)``; None does not quantize."""

    _checks: ClassVar = {**Recipe._checks, "input": _QUANTIZER, "weight": _QUANTIZER, "grad": _QUANTIZER}

    name: str = "custom"
    input: Quantizer | None = None  #: The quantizer of a linear layer's rows
    weight: Quantizer | None = None  #: The quantizer of its weight
    grad: Quantizer | None = None  #: The quantizer of the gradient of its output

    def roles(self) -> Roles:
        return Roles(self.input, self.weight, self.grad)
