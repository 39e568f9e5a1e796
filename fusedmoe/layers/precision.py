"""`keep_in_bf16`: exclude layers of a model from quantization."""

from __future__ import annotations

from torch import nn

from fusedmoe.base.checks import MODULE, integer
from fusedmoe.layers.moe import MoE
from fusedmoe.layers.sequential import Sequential
from fusedmoe.ops import GroupedLinear, Linear


def keep_in_bf16(model: nn.Module, first: int = 0, last: int = 0) -> list[str]:
    """Keep the linear ops of a model's first and last layers unquantized under every recipe.

    A layer is an outermost `MoE` or `Sequential`, in the order of ``model.named_modules()``. The function sets
    ``recipe`` of their `GroupedLinear` and `Linear` ops to ``"bf16"``.

    Returns the names of the first and last layers.
    """
    layers: list[str] = []
    for name, module in MODULE("keep_in_bf16: model", model).named_modules():
        within = any(not outer or name.startswith(f"{outer}.") for outer in layers)
        if isinstance(module, (MoE, Sequential)) and not within:
            layers.append(name)
    as_many = integer(f"0 to {len(layers)}, the number of layers", 0, len(layers))
    first, last = as_many("keep_in_bf16: first", first), as_many("keep_in_bf16: last", last)
    kept = list(dict.fromkeys([*layers[:first], *layers[len(layers) - last :]]))
    for name in kept:
        for module in model.get_submodule(name).modules():
            if isinstance(module, (GroupedLinear, Linear)):
                module.recipe = "bf16"
    return kept
