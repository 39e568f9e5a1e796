"""Narrow numeric formats: their definitions, quantization and dequantization."""

from fusedmoe.formats.format import (
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
from fusedmoe.formats.quantizers import amax_by_expert, quantize
from fusedmoe.formats.swizzle import SwizzledGroups, swizzle, swizzle_column_groups, swizzle_row_groups, unswizzle
from fusedmoe.formats.tensor import QuantizedSpec, QuantizedTensor

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
