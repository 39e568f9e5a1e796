"""The values of a chain: their names, the forms of quantized values, and the tensors that hold a form in a program.

A name has the form ``<label>.<name>``; a runtime input has its bare name:

- ``"fc1.input"``: the input of the op labelled fc1, which is the output of the op before it;
- ``"<last>.output"``: the chain's result; ``"fc1.weight"``: a parameter; ``"grad(fc1.input)"``: a gradient;
- ``"splits"``: a runtime input of the chain; ``"dispatch.splits"``: a value that an op provides.

A quantized value has three forms, each with a name: by rows (``"fc1.input"``), by columns (``"fc1.input:columns"``),
and dequantized (``"fc1.input:dequantized"``). The first two differ in the axis that the blocks of the format run along,
and in the padding of rows; `QuantizedSpec` has both. In a program, each of these two is two or three flat tensors:
``.codes``, ``.scale`` and, if the format has one, ``.tensor_scale``. Only plain-PyTorch steps use `QuantizedTensor`.

Values in the formats of `fusedmoe.numerics.formats.packed` have *packed* forms too: by rows (``"fc1.input:packed"``)
and by columns (``"fc1.input:packed_columns"``). The rows before an activation have one although they are not quantized
(``"act.input:packed"``). Rules read and write packed forms; a plain step only writes them, where a rule reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fusedmoe.numerics.formats import QuantizedSpec, Quantizer
from fusedmoe.numerics.formats.packed import Packed
from fusedmoe.ops.op import SpecLike, TensorSpec

NONE = "none"  # the value that is always None: an absent operand, or a gradient that does not arrive


def grad(value: str) -> str:
    """Return the name of a value's gradient."""
    return f"grad({value})"


def primal(value: str) -> str:
    """Return v for ``grad(v)`` and for ``grad(v)#1``, a contribution to it. Other values are returned unchanged."""
    return value[5:].rpartition(")")[0] if value.startswith("grad(") else value


def columns(value: str) -> str:
    """Return the name of a quantized value by columns."""
    return f"{value}:columns"


def dequantized(value: str) -> str:
    """Return the name of a quantized value after dequantization."""
    return f"{value}:dequantized"


def packed(value: str) -> str:
    """Return the name of a value in the packed layout, by rows if it is quantized."""
    return f"{value}:packed"


def packed_columns(value: str) -> str:
    """Return the name of a quantized value in the packed layout, by columns."""
    return f"{value}:packed_columns"


def by_rows(value: str) -> str:
    """Return the name by rows of a value, from the name of any of its forms."""
    name, _, form = value.rpartition(":")
    return name if form in ("columns", "dequantized", "packed", "packed_columns") else value


def quantized(parameter: str) -> str:
    """Return the name of a quantized parameter, by rows."""
    return f"{parameter}:quantized"


def spec_of(specs: Mapping[str, SpecLike | None], value: str) -> SpecLike | None:
    """Return the spec of a value. A gradient without a spec has the shape and the dtype of its primal value."""
    if value in specs:
        return specs[value]
    spec = specs.get(primal(value))
    return TensorSpec(spec.shape, spec.dtype) if isinstance(spec, QuantizedSpec) else spec


class Gathered(NamedTuple):
    """Rows of another value: ``rows[r] = source[row_index[r]]``, except for rows without an expert."""

    source: str
    row_index: str


# ---- forms ----------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """The tensors of a quantized value by rows, or by columns."""

    tensors: tuple[str, ...]  # codes, scale and, if the format has one, tensor scale, by their names in the program
    offsets: str  # the offsets of the rows; `NONE` if the rows are not sorted by expert


Forms = dict[str, Form]


def packed_forms(value: str, halves: bool) -> dict[str, Packed]:
    """Return the packed forms of a quantized value, by their names."""
    return {packed(value): Packed(-1, halves), packed_columns(value): Packed(-2, halves)}


def forms_of(values: Iterable[str], quantizer: Quantizer, offsets: str = NONE) -> Forms:
    """Return the quantized forms of a value, by their names."""
    parts = ("codes", "scale", "tensor_scale")[: 3 if quantizer.format.tensor_scale else 2]
    return {form: Form(tuple(f"{form}.{p}" for p in parts), offsets) for form in values}


def form_specs(
    value: str, spec: QuantizedSpec, quantizer: Quantizer, packs: Mapping[str, Packed]
) -> dict[str, SpecLike | None]:
    """Return the specs of the forms of a value, whose spec by rows and whose packed forms are given."""
    return {
        value: spec,
        columns(value): spec._replace(axis=-2, rotated=quantizer.hadamard),
        dequantized(value): TensorSpec(spec.shape, spec.dtype),
        **{name: _packed_spec(spec, quantizer, form) for name, form in packs.items()},
    }


def _packed_spec(spec: QuantizedSpec, quantizer: Quantizer, form: Packed) -> QuantizedSpec:
    rotated = quantizer.hadamard and form.axis == -2
    return spec._replace(axis=form.axis, rotated=rotated, packed=True, halves=form.halves)


def tensor_specs(specs: Mapping[str, SpecLike | None], forms: Mapping[str, Form]) -> dict[str, TensorSpec]:
    """Return the specs of the tensors of all forms."""
    found: dict[str, TensorSpec] = {}
    for name, form in forms.items():
        spec = specs.get(name)
        if isinstance(spec, QuantizedSpec):
            found.update(zip(form.tensors, [TensorSpec(*held) for held in spec.tensors()], strict=True))
    return found


def tensors_of(values: Iterable[str], forms: Mapping[str, Form], offsets: bool = False) -> tuple[str, ...]:
    """Return the names of the tensors of some values, in order; with ``offsets``, each form's offsets follow it."""
    names: list[str] = []
    for value in values:
        form = forms.get(value)
        if form is None:
            names.append(value)
        else:
            names += (*form.tensors, form.offsets) if offsets else form.tensors
    return tuple(names)
