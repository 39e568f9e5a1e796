"""Quantizers for the operands of a linear layer's three products, by recipe name."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fusedmoe.numerics.formats.format import (
    E4M3,
    E5M2,
    Delayed,
    Element,
    Quantizer,
    ScaleRule,
    fp8_block,
    fp8_row,
    fp8_tensor,
    mxfp8,
    nvfp4,
)


class Roles(NamedTuple):
    """The quantizers of rows, weights and gradients; None does not quantize.

    ``y = input @ weight.T`` takes both operands by rows; ``dx = grad @ weight`` takes grad by rows and the weight by
    columns; ``dw = grad.T @ input`` takes both by columns, or unquantized where `Quantizer.wgrad` is ``"bf16"``.
    """

    input: Quantizer | None
    weight: Quantizer | None
    grad: Quantizer | None

    def with_wgrad(self, wgrad: str) -> Roles:
        """Return these quantizers with another `Quantizer.wgrad` of rows and gradients; ``"bf16"`` ends the rotation.

        Raises `InputError`: ``wgrad`` is neither ``"quantized"`` nor ``"bf16"``.
        """

        def changed(quantizer: Quantizer | None) -> Quantizer | None:
            if quantizer is None:
                return None
            return replace(quantizer, wgrad=wgrad, hadamard=quantizer.hadamard and wgrad == "quantized")

        return Roles(changed(self.input), self.weight, changed(self.grad))


def grad_element(hybrid: bool) -> Element:
    """Return the element type of gradients: E5M2, which has more range, for a hybrid recipe, else E4M3."""
    return E5M2 if hybrid else E4M3


def tensor_roles(hybrid: bool = True, power_of_two: bool = False, delayed: Delayed | None = None) -> Roles:
    """One scale per expert."""
    forward = Quantizer(fp8_tensor(E4M3, power_of_two), delayed=delayed)
    return Roles(forward, forward, Quantizer(fp8_tensor(grad_element(hybrid), power_of_two), delayed=delayed))


def row_roles(hybrid: bool = False, power_of_two: bool = False) -> Roles:
    """One scale per row."""
    forward = Quantizer(fp8_row(E4M3, power_of_two))
    return Roles(forward, forward, Quantizer(fp8_row(grad_element(hybrid), power_of_two)))


def block_roles(hybrid: bool = False, power_of_two: bool = True, amax_epsilon: float = 0.0) -> Roles:
    """1x128 blocks of rows and gradients, 128x128 blocks of weights."""
    return Roles(
        Quantizer(fp8_block(E4M3, 1, power_of_two, amax_epsilon)),
        Quantizer(fp8_block(E4M3, 128, power_of_two, amax_epsilon)),
        Quantizer(fp8_block(grad_element(hybrid), 1, power_of_two, amax_epsilon)),
    )


def mxfp8_roles(hybrid: bool = False, rule: ScaleRule = ScaleRule.RCEIL, weight_2d: bool = False) -> Roles:
    """1x32 blocks; 32x32 blocks of weights if ``weight_2d``."""
    return Roles(
        Quantizer(mxfp8(E4M3, rule=rule)),
        Quantizer(mxfp8(E4M3, 32 if weight_2d else 1, rule)),
        Quantizer(mxfp8(grad_element(hybrid), rule=rule)),
    )


def nvfp4_roles(hadamard: bool = True, stochastic_rounding: bool = True, weight_2d: bool = True) -> Roles:
    """1x16 blocks, 16x16 of weights if ``weight_2d``; ``hadamard`` rotates both operands of the weight gradient."""
    return Roles(
        Quantizer(nvfp4(), hadamard=hadamard),
        Quantizer(nvfp4(16 if weight_2d else 1)),
        Quantizer(nvfp4(), stochastic_rounding, hadamard),
    )


ROLES: dict[str, Roles] = {
    "fp8_tensor": tensor_roles(),
    "fp8_row": row_roles(),
    "fp8_block": block_roles(),
    "mxfp8": mxfp8_roles(),
    "nvfp4": nvfp4_roles(),
}
"""The quantizers of each named recipe with its default options."""

WGRAD_BF16 = ":wgrad=bf16"
"""The end of a name that means a recipe with unquantized weight gradients: ``"mxfp8:wgrad=bf16"``."""


def roles_named(name: str) -> Roles | None:
    """Return the quantizers of a named recipe, also with `WGRAD_BF16` after the name; None for another name."""
    roles = ROLES.get(name.removesuffix(WGRAD_BF16))
    return roles.with_wgrad("bf16") if roles is not None and name.endswith(WGRAD_BF16) else roles
