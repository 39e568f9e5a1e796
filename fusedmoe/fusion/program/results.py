"""The check of a step's results against their specs, at the first run of each kind of call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.fusion.graph.values import primal, spec_of
from fusedmoe.fusion.language.rule import RuleError
from fusedmoe.numerics.formats import QuantizedSpec, QuantizedTensor
from fusedmoe.ops.op import SpecLike, TensorSpec

Specs = dict[str, "TensorSpec | QuantizedSpec"]


def without_tensors(specs: Mapping[str, SpecLike | None]) -> Specs:
    """Return the specs, with a `TensorSpec` in place of each tensor, so that they keep no tensor alive."""
    return {
        value: spec if isinstance(spec, (TensorSpec, QuantizedSpec)) else TensorSpec(tuple(spec.shape), spec.dtype)
        for value, spec in specs.items()
        if spec is not None
    }


def check_results(
    who: str,
    gives: Sequence[str],
    results: Sequence[Any],
    specs: Specs,
    device: torch.device | None,
    according_to: str = "",
    may_be_none: bool = True,
) -> None:
    """Compare the results of a step, ``who``, with their specs.

    ``gives`` are the names of the tensors in the program. A gradient without a spec has the shape and the dtype of its
    primal value. With ``may_be_none`` a gradient may be None, which means no gradient. ``device`` is that of the step's
    operands. ``according_to`` is the source of the specs, for the message.

    Raises `RuleError`: a result has another type, shape, dtype or device.
    """
    for value, result in zip(gives, results, strict=True):
        spec, is_gradient = spec_of(specs, value), primal(value) != value
        if spec is None or (result is None and is_gradient and may_be_none):
            continue
        wanted = tuple(spec.shape), spec.dtype, device
        if isinstance(result, Tensor):
            found = tuple(result.shape), result.dtype, None if device is None else result.device
            if found == wanted:
                continue
        raise RuleError(f"{who}: {value}: expected Tensor of {_text(*wanted)}{according_to}, got {_described(result)}")


def _described(result: object) -> str:
    if isinstance(result, (Tensor, QuantizedTensor)):
        return f"{type(result).__name__} of {_text(tuple(result.shape), result.dtype, result.device)}"
    return repr(result)


def _text(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> str:
    on = "" if device is None else f" on {device}"
    return f"shape {shape} and dtype {str(dtype).removeprefix('torch.')}{on}"
