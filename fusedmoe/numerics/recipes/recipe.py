"""Recipes: the numeric formats in which the linear layers of a chain multiply."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from fusedmoe.base.checks import FLAG, NOT_NEGATIVE, TEXT, check_fields
from fusedmoe.base.errors import InputError
from fusedmoe.numerics.formats import Delayed, Quantizer, ScaleRule
from fusedmoe.numerics.formats.format import WGRAD
from fusedmoe.numerics.formats.roles import Roles, block_roles, mxfp8_roles, nvfp4_roles, row_roles, tensor_roles


class Node(NamedTuple):
    """An op and its name in the `Sequential` that runs it."""

    label: str
    op: Any  # a `fusedmoe.ops.Op`


@dataclass(frozen=True)
class Recipe:
    """A numeric recipe. This base class quantizes nothing: a chain computes in the dtype of its rows and parameters.

    A subclass is a frozen dataclass and overrides `roles` or `rewrite`. Its values are part of the key of every plan.

    Attributes
    ----------
    name : str
        The name in ``explain()`` and in the log.
    """

    name: str = "bf16"

    def __post_init__(self) -> None:
        check_fields(self, {"name": TEXT, **{f.name: FLAG for f in fields(self) if isinstance(f.default, bool)}})

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

    Attributes
    ----------
    hybrid : bool
        Gradients are in E5M2 instead of E4M3.
    power_of_two : bool
        Scales are powers of two.
    delayed : Delayed or None
        Scales follow from the amax of earlier steps instead of the current tensor.
    wgrad : str
        ``"bf16"``: the weight gradient multiplies the rows and the gradient from before quantization, in their dtype.
        ``"quantized"``: it multiplies quantized operands, as the other products do.
    """

    name: str = "fp8_tensor"
    hybrid: bool = True
    power_of_two: bool = False
    delayed: Delayed | None = None
    wgrad: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"wgrad": WGRAD})
        if not isinstance(self.delayed, Delayed | None):
            raise InputError(
                f"FP8Tensor: delayed: expected a fusedmoe.numerics.formats.Delayed or None, got {self.delayed!r}"
            )

    def roles(self) -> Roles:
        return tensor_roles(self.hybrid, self.power_of_two, self.delayed).with_wgrad(self.wgrad)


@dataclass(frozen=True)
class FP8Row(Recipe):
    """FP8 with one scale per row; where a product sums over rows, one per column and expert.

    Attributes
    ----------
    hybrid : bool
        Gradients are in E5M2 instead of E4M3.
    power_of_two : bool
        Scales are powers of two.
    wgrad : str
        ``"bf16"``: the weight gradient multiplies the rows and the gradient from before quantization, in their dtype.
        ``"quantized"``: it multiplies quantized operands, as the other products do.
    """

    name: str = "fp8_row"
    hybrid: bool = False
    power_of_two: bool = False
    wgrad: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"wgrad": WGRAD})

    def roles(self) -> Roles:
        return row_roles(self.hybrid, self.power_of_two).with_wgrad(self.wgrad)


@dataclass(frozen=True)
class FP8Block(Recipe):
    """DeepSeek-V3's FP8: one scale per 1x128 elements of rows and gradients, and per 128x128 elements of weights.

    Transformer Engine calls it ``Float8BlockScaling``.

    Attributes
    ----------
    hybrid : bool
        Gradients are in E5M2 instead of E4M3.
    power_of_two : bool
        Scales are powers of two.
    amax_epsilon : float
        A lower bound on the amax of a block.
    wgrad : str
        ``"bf16"``: the weight gradient multiplies the rows and the gradient from before quantization, in their dtype.
        ``"quantized"``: it multiplies quantized operands, as the other products do.
    """

    name: str = "fp8_block"
    hybrid: bool = False
    power_of_two: bool = True
    amax_epsilon: float = 0.0
    wgrad: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"amax_epsilon": NOT_NEGATIVE, "wgrad": WGRAD})

    def roles(self) -> Roles:
        return block_roles(self.hybrid, self.power_of_two, self.amax_epsilon).with_wgrad(self.wgrad)


@dataclass(frozen=True)
class MXFP8(Recipe):
    """MXFP8: one scale, a power of two, per 1x32 elements.

    Transformer Engine calls it ``MXFP8BlockScaling``.

    Attributes
    ----------
    hybrid : bool
        Gradients are in E5M2 instead of E4M3.
    scale_rule : str
        ``"rceil"``: the smallest scale that clips nothing. ``"floor"``: the scale of the MX specification, which clips.
    weight_2d : bool
        32x32 elements of a weight share a scale, so that forward and backward use the same codes.
    wgrad : str
        ``"bf16"``: the weight gradient multiplies the rows and the gradient from before quantization, in their dtype.
        ``"quantized"``: it multiplies quantized operands, as the other products do.
    """

    name: str = "mxfp8"
    hybrid: bool = False
    scale_rule: str = "rceil"
    weight_2d: bool = False
    wgrad: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"wgrad": WGRAD})
        if self.scale_rule not in ("rceil", "floor"):
            raise InputError(f"MXFP8: scale_rule: expected 'rceil' or 'floor', got {self.scale_rule!r}")

    def roles(self) -> Roles:
        return mxfp8_roles(self.hybrid, ScaleRule(self.scale_rule), self.weight_2d).with_wgrad(self.wgrad)


@dataclass(frozen=True)
class NVFP4(Recipe):
    """NVFP4: four bits, one E4M3 scale per 1x16 elements, and one fp32 scale per expert.

    Transformer Engine calls it ``NVFP4BlockScaling``. Source: NVIDIA, "Pretraining Large Language Models with NVFP4".

    Attributes
    ----------
    hadamard : bool
        A random Hadamard transform rotates rows and gradients for the weight gradient, unless ``wgrad="bf16"``.
    stochastic_rounding : bool
        Gradients are rounded stochastically.
    weight_2d : bool
        16x16 elements of a weight share a scale, so that forward and backward use the same codes.
    wgrad : str
        ``"bf16"``: the weight gradient multiplies the rows and the gradient from before quantization, in their dtype.
        ``"quantized"``: it multiplies quantized operands, as the other products do.
    """

    name: str = "nvfp4"
    hadamard: bool = True
    stochastic_rounding: bool = True
    weight_2d: bool = True
    wgrad: str = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, {"wgrad": WGRAD})

    def roles(self) -> Roles:
        return nvfp4_roles(self.hadamard, self.stochastic_rounding, self.weight_2d).with_wgrad(self.wgrad)


@dataclass(frozen=True)
class Custom(Recipe):
    """A quantizer for each role: ``Custom("mine", input=Quantizer(mxfp8()), ...)``; None does not quantize.

    Attributes
    ----------
    input, weight, grad : Quantizer or None
        The quantizers of a linear layer's rows, of its weight, and of the gradient of its output.
    """

    name: str = "custom"
    input: Quantizer | None = None
    weight: Quantizer | None = None
    grad: Quantizer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for role in ("input", "weight", "grad"):
            if not isinstance(quantizer := getattr(self, role), Quantizer | None):
                raise InputError(f"Custom: {role}: expected a fusedmoe.Quantizer or None, got {quantizer!r}")

    def roles(self) -> Roles:
        return Roles(self.input, self.weight, self.grad)
