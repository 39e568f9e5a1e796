"""What a step returned against what was announced, asked once for each kind of call: the first time that it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from fusedmoe.formats import QuantizedSpec, QuantizedTensor
from fusedmoe.fusion.names import primal
from fusedmoe.fusion.rule import RuleError
from fusedmoe.ops.op import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from fusedmoe.ops.op import SpecLike

Specs = dict[str, "TensorSpec | QuantizedSpec"]


def announced(specs: Mapping[str, SpecLike | None]) -> Specs:
    """Return the specs without the tensors that stand for some of them, which they must not keep alive."""
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
    """Compare what a step returned with the specs of what it gives.

    Parameters
    ----------
    who
        The rule and the ops, or the op, for the message.
    gives, results
        The values by the chain's names, and what was returned for them, as many.
    specs
        Of every value of the forward pass. A gradient has the shape and the dtype of what it is the gradient of.
    device
        Where the step's operands are; None where it has none.
    according_to
        Where the expectation comes from, for the message.
    may_be_none
        Whether a gradient may be None, which stands for no gradient.

    Raises
    ------
    RuleError
        A result has another type, shape, dtype or device.
    """
    for value, result in zip(gives, results, strict=True):
        spec, is_gradient = specs.get(primal(value)), primal(value) != value
        if spec is None or (result is None and is_gradient and may_be_none):
            continue
        kind = QuantizedTensor if isinstance(spec, QuantizedSpec) and not is_gradient else Tensor
        wanted = tuple(spec.shape), spec.dtype, device
        # a gradient may be quantized where its value is not
        if isinstance(result, (Tensor, QuantizedTensor) if is_gradient else kind):
            found = tuple(result.shape), result.dtype, None if device is None else result.device
            if found == wanted:
                continue
        expected = f"{kind.__name__} of {_text(*wanted)}"
        raise RuleError(f"{who}: {value}: expected {expected}{according_to}, got {_described(result)}")


def _described(result: object) -> str:
    if isinstance(result, (Tensor, QuantizedTensor)):
        return f"{type(result).__name__} of {_text(tuple(result.shape), result.dtype, result.device)}"
    return repr(result)


def _text(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> str:
    on = "" if device is None else f" on {device}"
    return f"shape {shape} and dtype {str(dtype).removeprefix('torch.')}{on}"
