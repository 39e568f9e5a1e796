"""Layers of a model that keep a recipe of their own, whatever holds around the call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusedmoe.checks import MODULE, integer
from fusedmoe.moe import MoE
from fusedmoe.ops import GroupedLinear, Linear
from fusedmoe.sequential import Sequential

if TYPE_CHECKING:
    from torch import nn


def keep_in_bf16(model: nn.Module, first: int = 0, last: int = 0) -> list[str]:
    """Keep the linear ops of a model's first and last layers unquantized under every recipe.

    A layer is an `MoE` or a `Sequential` that is within no other; they count in the order of ``model.named_modules()``.
    Sets ``recipe`` of the `GroupedLinear` and `Linear` ops in them to ``"bf16"``, which can be done by hand for ops
    outside of any.

    Returns
    -------
    list of str
        The names of the layers kept.
    """
    layers = _layers(MODULE("keep_in_bf16: model", model))
    as_many = integer(f"0 to {len(layers)} layers, which there are", 0, len(layers))
    first, last = as_many("keep_in_bf16: first", first), as_many("keep_in_bf16: last", last)
    kept = list(dict.fromkeys([*layers[:first], *layers[len(layers) - last :]]))
    for name in kept:
        for module in model.get_submodule(name).modules():
            if isinstance(module, (GroupedLinear, Linear)):
                module.recipe = "bf16"
    return kept


def _layers(model: nn.Module) -> list[str]:
    """The outermost `MoE` and `Sequential` modules, by name."""
    names: list[str] = []
    for name, module in model.named_modules():
        within = any(not outer or name.startswith(f"{outer}.") for outer in names)
        if isinstance(module, (MoE, Sequential)) and not within:
            names.append(name)
    return names
