"""The steps that bring values into the forms in which others read them: quantized by rows, by columns, or what that
stands for. See `graph`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fusedmoe.errors import InputError
from fusedmoe.formats import QuantizedSpec
from fusedmoe.fusion.names import columns, dequantized
from fusedmoe.fusion.plain import Plain
from fusedmoe.ops.op import Node, TensorSpec
from fusedmoe.ops.quantize import Quantize, WeightQuantization

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from fusedmoe.formats import QuantizedTensor


def with_forms(step: Plain, needs: Collection[str], training: bool) -> Plain:
    """Return a step that quantizes, giving the forms that are read."""
    gives = tuple(v for v in step.gives if v in needs) or step.gives[:1]
    axes = tuple(-1 if v == step.gives[0] else -2 for v in gives)
    return replace(step, run=partial(step.run, axes=axes, training=training), gives=gives)


def dequantize(value: str) -> Plain:
    """Return the step that gives what a quantized value stands for."""

    def run(t: QuantizedTensor) -> Tensor:
        return t.dequantize()

    return Plain(f"dequantize {value}", run, (value,), (dequantized(value),), launches=3)


def set_forms(specs: dict[str, Any], value: str, spec: QuantizedSpec) -> None:
    """Add the specs of a quantized value's forms."""
    specs[value] = spec
    specs[columns(value)] = spec._replace(axis=-2)
    specs[dequantized(value)] = TensorSpec(spec.shape, spec.dtype)


def weight_quantizations(nodes: Sequence[Node]) -> dict[str, tuple[str, WeightQuantization, int]]:
    """Return what quantizes the weights of linear layers that a `Quantize` before them wants quantized, with its label
    and launches.
    """
    found = {}
    for i, (label, op) in enumerate(nodes):
        if not isinstance(op, Quantize) or op.weight_quantizer is None:
            continue
        following = next((node for node in nodes[i + 1 :] if not isinstance(node.op, Quantize)), None)
        if following is None or "weight" not in following.op.contracts:
            what = "the end of the chain" if following is None else f"{following.label}.{type(following.op).__name__}"
            raise InputError(f"{label}.{op!r}: weight: expected a linear layer to follow, got {what}")
        weight = f"{following.label}.weight"
        if weight in found:
            raise InputError(f"{label}.{op!r}: weight: {following.label}'s weight would be quantized twice")
        found[weight] = f"{label}.Quantize", WeightQuantization(following.op, op.weight_quantizer), op.launches
    return found
