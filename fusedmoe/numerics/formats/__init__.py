"""Narrow numeric formats: their definitions, quantization and dequantization."""

from fusedmoe.numerics.formats.format import (
    E2M1,
    E4M3,
    E5M2,
    Delayed,
    Element,
    Format,
    Quantizer,
    ScaleRule,
    fp8_block,
    fp8_row,
    fp8_tensor,
    mxfp8,
    nvfp4,
)
from fusedmoe.numerics.formats.quantizers import amax_by_expert, quantize
from fusedmoe.numerics.formats.swizzle import (
    SwizzledGroups,
    swizzle,
    swizzle_column_groups,
    swizzle_row_groups,
    unswizzle,
)
from fusedmoe.numerics.formats.tensor import QuantizedSpec, QuantizedTensor

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "Delayed",
    "Element",
    "Format",
    "QuantizedSpec",
    "QuantizedTensor",
    "Quantizer",
    "ScaleRule",
    "SwizzledGroups",
    "amax_by_expert",
    "fp8_block",
    "fp8_row",
    "fp8_tensor",
    "mxfp8",
    "nvfp4",
    "quantize",
    "swizzle",
    "swizzle_column_groups",
    "swizzle_row_groups",
    "unswizzle",
]
