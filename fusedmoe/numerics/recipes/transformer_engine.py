"""Conversion of Transformer Engine's recipes to recipes of fusedmoe.

Class names and fields identify them, so that Transformer Engine is not imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from fusedmoe.base.errors import InputError
from fusedmoe.base.log import say_once
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes.recipe import MXFP8, NVFP4, FP8Block, FP8Tensor, Recipe

logger = logging.getLogger(__name__)
_T = TypeVar("_T", bool, float)

_IGNORED = {
    # the accumulation precision of the hardware; products here always accumulate in fp32
    "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad",
    # read separately, or for attention
    "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad",
    "fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad",
    "fp8_dpa", "fp8_mha", "fp4_format",
    # options of nvfp4_4over6, which is refused
    "nvfp4_4over6_err_mode", "nvfp4_4over6_e4m3_use_256",
}  # fmt: skip

_WGRADS = {(False, False, False): "quantized", (False, False, True): "bf16"}  # by override_linear_precision

_NOT_IN_FOUR_BITS = ("power_2_scale", "amax_epsilon")  # quantization parameters that NVFP4 does not use here


class _Fields:
    """The fields of a recipe. A field that no conversion takes must have a value without effect."""

    def __init__(self, recipe: Any) -> None:
        self.kind = type(recipe).__name__
        names = getattr(type(recipe), "__dataclass_fields__", vars(recipe))
        self.left = {name: getattr(recipe, name) for name in names if name not in _IGNORED}

    def take(self, name: str, default: Any) -> Any:
        return self.left.pop(name, default)

    def hybrid(self, default: str) -> bool:
        """Return whether gradients are in E5M2."""
        given = self.take("fp8_format", None)
        name = default if given is None else getattr(given, "name", str(given))
        if name not in ("E4M3", "HYBRID"):
            raise InputError(f"recipe {self.kind}: fp8_format: expected E4M3 or HYBRID, got {name}")
        return bool(name == "HYBRID")

    def finish(self, harmless: Mapping[str, Any]) -> None:
        """Raise if a field that is left is unknown or has a value with an effect."""
        for name, value in self.left.items():
            if name not in harmless:
                raise InputError(f"recipe {self.kind}: {name}: a field that fusedmoe does not know; got {value!r}")
            if value != harmless[name]:
                raise InputError(f"recipe {self.kind}: {name}: expected {harmless[name]!r}, got {value!r}")


def _parameter(recipe: Any, name: str, default: _T) -> _T:
    """Return the value of a quantization parameter, which must be the same for rows, weights and gradients."""
    params = [getattr(recipe, f"fp8_quant_{role}", None) for role in ("fwd_inp", "fwd_weight", "bwd_grad")]
    given = {type(default)(getattr(p, name, default)) for p in params if p is not None} or {default}
    if len(given) > 1:
        raise InputError(f"recipe {type(recipe).__name__}: {name}: expected the same for all roles, got {given}")
    return given.pop()


def _delayed_scaling(recipe: Any, fields: _Fields) -> Recipe:
    algorithm = fields.take("amax_compute_algo", "max")
    if algorithm not in ("max", "most_recent"):
        raise InputError(f"recipe {fields.kind}: amax_compute_algo: expected 'max' or 'most_recent', got {algorithm!r}")
    if fields.take("reduce_amax", True) and torch.distributed.is_available() and torch.distributed.is_initialized():
        message = "recipe %s: reduce_amax: every rank scales by the amax of its own rows; it is not reduced over ranks"
        say_once(logger, logging.WARNING, message, fields.kind)
    history, margin = fields.take("amax_history_len", 1024), fields.take("margin", 0)
    delayed = Delayed(int(history), algorithm == "most_recent", int(margin))
    # of older versions; Megatron-LM sets it for fp8_wgrad=False
    override = fields.take("override_linear_precision", (False, False, False))
    if not isinstance(override, tuple) or override not in _WGRADS:
        expected = "(False, False, False), or (False, False, True) for unquantized weight gradients"
        raise InputError(f"recipe {fields.kind}: override_linear_precision: expected {expected}, got {override!r}")
    return FP8Tensor(hybrid=fields.hybrid("HYBRID"), delayed=delayed, wgrad=_WGRADS[override])


def _current_scaling(recipe: Any, fields: _Fields) -> Recipe:
    power_of_two = bool(fields.take("use_power_2_scales", False))
    if epsilon := _parameter(recipe, "amax_epsilon", 0.0):
        raise InputError(f"recipe {fields.kind}: amax_epsilon: expected 0.0, got {epsilon}")
    return FP8Tensor(hybrid=fields.hybrid("HYBRID"), power_of_two=_parameter(recipe, "power_2_scale", power_of_two))


def _mxfp8(recipe: Any, fields: _Fields) -> Recipe:
    return MXFP8(hybrid=fields.hybrid("E4M3"), weight_2d=bool(fields.take("enable_2d_quantization", False)))


def _fp8_block(recipe: Any, fields: _Fields) -> Recipe:
    power_of_two = not fields.take("use_f32_scales", False)
    return FP8Block(
        hybrid=fields.hybrid("E4M3"),
        power_of_two=_parameter(recipe, "power_2_scale", power_of_two),
        amax_epsilon=_parameter(recipe, "amax_epsilon", 0.0),
    )


def _nvfp4(recipe: Any, fields: _Fields) -> Recipe:
    fields.take("fp8_format", None)  # for tensors that are not in four bits, which do not occur here
    hadamard = not fields.take("disable_rht", False)
    stochastic_rounding = not fields.take("disable_stochastic_rounding", False)
    weight_2d = not fields.take("disable_2d_quantization", False)
    # Transformer Engine's layers read the parameters; the flags are only their defaults
    params = {role: getattr(recipe, f"fp4_quant_{role}", None) for role in ("fwd_inp", "fwd_weight", "bwd_grad")}
    if params["fwd_inp"] is not None:
        hadamard = bool(params["fwd_inp"].random_hadamard_transform)
    if params["fwd_weight"] is not None:
        weight_2d = bool(params["fwd_weight"].fp4_2d_quantization)
    if params["bwd_grad"] is not None:
        stochastic_rounding = bool(params["bwd_grad"].stochastic_rounding)
    expected = {
        "fwd_inp": {"random_hadamard_transform": hadamard},
        "fwd_weight": {"fp4_2d_quantization": weight_2d},
        "bwd_grad": {"random_hadamard_transform": hadamard, "stochastic_rounding": stochastic_rounding},
    }
    for role, given in params.items():
        for name in ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization", *_NOT_IN_FOUR_BITS):
            only = expected[role].get(name, 0.0 if name == "amax_epsilon" else False)
            value = getattr(given, name, only)
            if given is not None and value != only:
                raise InputError(f"recipe {fields.kind}: fp4_quant_{role}.{name}: expected {only!r}, got {value!r}")
    return NVFP4(hadamard=hadamard, stochastic_rounding=stochastic_rounding, weight_2d=weight_2d)


_CONVERSIONS: dict[str, tuple[Callable[[Any, _Fields], Recipe], dict[str, Any]]] = {
    # the conversion, and the values without effect of the other fields
    "DelayedScaling": (_delayed_scaling, {"scaling_factor_compute_algo": None, "backward_override": None}),
    "Float8CurrentScaling": (_current_scaling, {"backward_override": None}),
    "MXFP8BlockScaling": (_mxfp8, {"margin": 0, "backward_override": None}),
    "Float8BlockScaling": (
        _fp8_block,
        {
            "x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1, "backward_override": None,
        },
    ),
    "NVFP4BlockScaling": (
        _nvfp4, {"row_scaled_activation": False, "nvfp4_4over6": "none", "backward_override": None},
    ),
}  # fmt: skip


def converted(recipe: object) -> Recipe | None:
    """Return the recipe for a recipe of Transformer Engine; None for any other object.

    Raises `InputError`: a field has an unsupported value; the message names the field.
    """
    found = next((_CONVERSIONS[c.__name__] for c in type(recipe).__mro__ if c.__name__ in _CONVERSIONS), None)
    if found is None:
        return None
    convert, harmless = found
    fields = _Fields(recipe)
    result = convert(recipe, fields)
    fields.finish(harmless)
    return result
