"""Glue: the steps that a chain needs between its ops. A fusion rule matches one glue step at a time, as it matches ops.

A rule refers to a value by the slot and a name in `needs` or `gives`: ``"derive.splits"``, ``"total.output"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.base.errors import InputError
from fusedmoe.numerics.expert_rows import zero_tail_
from fusedmoe.numerics.formats import QuantizedSpec, QuantizedTensor, Quantizer
from fusedmoe.numerics.formats.packed import Packed
from fusedmoe.numerics.formats.quantizers import DTYPES
from fusedmoe.ops.derived import OFFSETS, Derived
from fusedmoe.ops.op import Op, SpecLike
from fusedmoe.ops.quantize import WeightQuantization


class Glue:
    """A step in plain PyTorch that belongs to no op; its attributes are as for `Op`."""

    needs: tuple[str, ...] = ("input",)  # the values that `compute` takes, in order
    gives: tuple[str, ...] = ("output",)  # the values that it returns
    gathers: Mapping[str, tuple[str, str]] = {}
    quantizes: Quantizer | None = None
    packs = False
    zeroes_tail = True
    reads_tail = False
    launches = 1

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values of `gives`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return type(self).__name__


class Derive(Glue):
    """A value that is derived from a runtime input and the number of rows.

    - ``derived``: the definition.
    - ``taker``: the op that error messages name.
    """

    def __init__(self, derived: Derived, taker: str) -> None:
        self.derived, self.taker = derived, taker
        self.needs, self.gives = (derived.source, "rows"), (derived.name,)

    def compute(self, source: Tensor, rows: Tensor) -> Tensor:
        try:
            return self.derived.compute(source, rows)
        except InputError as error:
            raise InputError(f"{self.taker}: {error}") from None

    def check(self, source: Tensor, rows: Tensor) -> None:
        """Check the contents of the input, for ``FUSEDMOE_DEBUG``. This waits for the device.

        Raises `InputError`: an entry is out of range.
        """
        try:
            self.derived.check(source, rows)
        except InputError as error:
            raise InputError(f"{self.taker}: {error}") from None


class DeriveOffsets(Derive):
    """``offsets[e] = splits[0] + ... + splits[e]``, at most the rows R: integers (E,) to int32 (E,)."""


def derive(derived: Derived, taker: str) -> Derive:
    """Return the glue that computes a derived value."""
    return (DeriveOffsets if derived is OFFSETS else Derive)(derived, taker)


class QuantizeWeight(Glue):
    """``output = quantize(weight)``, by rows, by columns, or both; the result is cached until the weight changes.

    - ``run``: the function that quantizes the weight, and caches the result on the layer.
    - ``launches``: number of kernels that it launches.
    """

    needs = ("weight",)

    def __init__(self, run: WeightQuantization, launches: int) -> None:
        self.run, self.launches = run, launches
        self.quantizes = run.quantizer
        self.packs = len(run.layer.weight_shape) == 3  # one matrix per expert

    def compute(self, weight: Tensor, *, axes: Sequence[int | Packed] = (-1, -2), training: bool = False) -> Any:
        return self.run(weight, axes=axes, training=training)


class StoredWeight(Glue):
    """The forms of a weight that a layer stores quantized, as flat tensors.

    By rows, these are its parameters, without a copy. By columns, they are transposed: square blocks are the same along
    both axes. The transposed codes are a copy, since kernels read codes along the axis that they sum over.

    A backward pass makes the form by columns for the step that reads it, and no call keeps it, since it takes as much
    memory as the parameters.
    """

    needs = ("weight", "scale")
    launches = 2

    def __init__(self, layer: Op) -> None:
        assert layer.weight_format is not None
        self.layer, self.format = layer, layer.weight_format
        self.quantizes: Quantizer = Quantizer(self.format)

    def infer(self, weight: SpecLike | None, scale: SpecLike | None, dtype: torch.dtype) -> QuantizedSpec:
        """Return the spec by rows, for rows of this dtype.

        Raises `InputError`: codes or scales have the wrong shape or dtype, or the rows the wrong dtype.
        """
        if dtype not in DTYPES:
            raise self.layer.reject("x", "float32, bfloat16 or float16, for a quantized weight", dtype)
        shape = self.layer.weight_shape
        spec = QuantizedSpec(shape, dtype, self.format, -1, stacked=len(shape) == 3)
        for name, given, expected in zip(self.layer.stored_weight, (weight, scale), spec.tensors(), strict=True):
            if given is None or (tuple(given.shape), given.dtype) != expected:
                got = None if given is None else f"shape {tuple(given.shape)} in {given.dtype}"
                raise self.layer.reject(name, f"shape {expected[0]} in {expected[1]}", got)
        return spec

    def compute(
        self, weight: Tensor, scale: Tensor, *, axes: Sequence[int] = (-1, -2), training: bool = False
    ) -> tuple[Tensor, ...]:
        forms = [(weight, scale) if axis == -1 else (weight.mT.contiguous(), scale.mT) for axis in axes]
        return tuple([t for form in forms for t in form])


class Dequantize(Glue):
    """``output = dequantize(input)``, in the dtype of the values before quantization."""

    launches = 3

    def compute(self, t: QuantizedTensor) -> Tensor:
        return t.dequantize()


class SumGradients(Glue):
    """``output = term0 + term1 + ...``: the gradient of a value that several ops read."""

    zeroes_tail = False

    def __init__(self, terms: int) -> None:
        self.needs = tuple(f"term{i}" for i in range(terms))

    def compute(self, *terms: Tensor) -> Tensor:
        total = terms[0] + terms[1]
        for term in terms[2:]:
            total = total + term
        return total


class ZeroTail(Glue):
    """``output[r] = input[r]``, and zeros for the rows after the last expert's: ``offsets`` (E,) int32."""

    needs = ("input", "offsets")
    launches = 4

    def compute(self, t: Tensor, offsets: Tensor) -> Tensor:
        return zero_tail_(t.clone(), offsets)
