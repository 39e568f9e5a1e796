"""The constraints of the Hopper kernels, as predicates in plain Python: no torch, no CuTe DSL, no GPU.

Each returns None, or the reason why a kernel cannot be used. The reason names the value and, if one exists, the remedy.
Fusion rules check dtypes and sizes at plan time. They check strides and addresses, in the second half of this file, at
each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fusedmoe.kernels.sm90.tiles.config import ALIGNMENT_BYTES, ELEMENT_BYTES, SCALE_BLOCK

if TYPE_CHECKING:
    from fusedmoe.numerics.formats import Format

DTYPES = ("torch.bfloat16", "torch.float16")
ROW_SCALE_DTYPES = ("torch.float32", *DTYPES)
FP8_ELEMENTS = ("e4m3", "e5m2")
FP32_SCALE_RULES = ("fp32", "power of two")
MOST_EXPERTS = 1024
"""The maximum number of experts of the kernels that sort rows: they count each expert's rows in shared memory."""
MOST_ROUTED_EXPERTS = 512  # the maximum number of experts of the router's kernels: a lane has 16 of them in registers
LANES = 32  # threads of a warp: the maximum number of chosen experts, and of groups of experts, of the router's kernels
MOST_SLOTS_BESIDE = 8  # the maximum number of slots per token of the sum over slots that runs beside a product
UNIT = ALIGNMENT_BYTES // ELEMENT_BYTES
"""Every pitch, and so every width, is a multiple of this number of elements, as TMA requires."""


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def why_not_dtypes(operands: Mapping[str, object]) -> str | None:
    """All operands are bf16, or all are fp16. ``operands`` maps names to `torch.dtype`."""
    for name, dtype in operands.items():
        if str(dtype) not in DTYPES:
            return (
                f"{name} is {_short(dtype)}, not bfloat16 or float16: convert the module, or run under torch.autocast"
            )
    (first, dtype), *others = operands.items()
    for name, other in others:
        if other != dtype:
            return f"{name} is {_short(other)}, {first} is {_short(dtype)}: expected one dtype"
    return None


def why_not_row_scale(dtype: object) -> str | None:
    """The row scale is fp32, bf16 or fp16."""
    if str(dtype) in ROW_SCALE_DTYPES:
        return None
    return f"the row scale is {_short(dtype)}, not float32, bfloat16 or float16: convert it"


def why_not_routing(index_dtype: object, experts: int) -> str | None:
    """Expert ids are int32 or int64, and there are at most `MOST_EXPERTS`."""
    if str(index_dtype) not in ("torch.int32", "torch.int64"):
        return f"expert_index is {_short(index_dtype)}, not int32 or int64: convert it"
    return None if experts <= MOST_EXPERTS else f"{experts} experts, over {MOST_EXPERTS}"


def why_not_row_index(dtype: object) -> str | None:
    """The index that rows are read through is int32."""
    return None if str(dtype) == "torch.int32" else f"the index of the rows is {_short(dtype)}, not int32"


def why_not_router(
    x_dtype: object, weight_dtype: object, bias_dtype: object | None, experts: int, chosen: int, groups: int
) -> str | None:
    """Tokens and router weight are both bf16 or both fp16, or tokens are bf16 and the weight is fp32."""
    if str(x_dtype) not in DTYPES:
        return f"x is {_short(x_dtype)}, not bfloat16 or float16: convert it"
    exact = str(x_dtype) == "torch.bfloat16" and str(weight_dtype) == "torch.float32"
    if weight_dtype != x_dtype and not exact:
        wanted = "bfloat16 or float32" if str(x_dtype) == "torch.bfloat16" else "float16"
        return f"x is {_short(x_dtype)}, the router's weight is {_short(weight_dtype)}: expected {wanted}"
    if bias_dtype is not None and str(bias_dtype) not in ROW_SCALE_DTYPES:
        return f"the router's bias is {_short(bias_dtype)}, not float32, bfloat16 or float16"
    if experts > MOST_ROUTED_EXPERTS:
        return f"{experts} experts, over {MOST_ROUTED_EXPERTS}"
    if chosen > LANES or groups > LANES:
        return f"{chosen} chosen experts, {groups} groups: expected at most {LANES} of each"
    return None


def why_not_fp8_blocks(
    format: Format, expected: tuple[int | None, int | None], what: str = "quantizes to"
) -> str | None:
    """A format has E4M3 or E5M2 codes in blocks of the ``expected`` size, with fp32 scales.

    A size of (None, None) means one scale per expert.
    ``what`` is the kernels' use of the format, in the reason.
    """
    if format.block != expected:
        wanted = f"blocks of {'x'.join(map(str, expected))} values" if expected[0] else "one scale per expert"
    elif format.element.name not in FP8_ELEMENTS:
        wanted = f"codes in {' or '.join(FP8_ELEMENTS)}"
    elif format.rule.value not in FP32_SCALE_RULES:
        wanted = "fp32 scales"
    else:
        return None
    return f"no kernel {what} {format} yet: expected {wanted}"


def why_not_width_of_codes(name: str, features: int) -> str | None:
    """A number of features is a multiple of 16, which are 16 bytes of FP8 codes."""
    return None if features % ALIGNMENT_BYTES == 0 else f"{name} {features} is not a multiple of {ALIGNMENT_BYTES}"


def why_not_blocks(name: str, features: int) -> str | None:
    """A number of features is a multiple of 128, so that blocks of gate and of up do not overlap."""
    return None if features % SCALE_BLOCK == 0 else f"{name} {features} is not a multiple of {SCALE_BLOCK}"


def why_not_width(name: str, features: int) -> str | None:
    """A number of features is a multiple of 8."""
    return None if features % UNIT == 0 else f"{name} {features} is not a multiple of {UNIT}"


# ------------------------------------------------------------------------------------------------ known at the call


def why_not_matrix(
    name: str, shape: Sequence[int], strides: Sequence[int], address: int, transposed: bool = False
) -> str | None:
    """Features have unit stride or, with ``transposed``, rows may have it. All other strides are multiples of 8.

    - ``name``: name in the reason.
    - ``shape``, ``strides``: (rows, columns) or (experts, rows, columns); strides in elements.
    - ``address``: address of the first element, in bytes.
    - ``transposed``: whether the second to last axis may have unit stride instead.
    """
    row, column = strides[-2], strides[-1]
    by_rows = column == 1 and row >= shape[-1] and not row % UNIT
    by_columns = transposed and row == 1 and column >= shape[-2] and not column % UNIT
    between = len(strides) == 3 and strides[0] % UNIT
    if (by_rows or by_columns) and not between and not address % ALIGNMENT_BYTES:
        return None
    if not (by_rows or by_columns):
        axes = "one of the last two axes" if transposed else "the last axis"
        return f"{name} has strides {tuple(strides)}: expected unit stride in {axes}, multiples of {UNIT} in the others"
    if between:
        return f"{name} has strides {tuple(strides)}: expected a multiple of {UNIT} between experts"
    return why_not_address(name, address)


def why_not_gathered(row_stride: int) -> str | None:
    """Gathered rows are less than 2 GiB apart: the kernels have their pitch in 32 bits. The stride is in elements."""
    if row_stride * ELEMENT_BYTES < 2**31:
        return None
    return f"gathered rows are {row_stride} elements apart: expected less than 2 GiB"


def why_not_address(name: str, address: int) -> str | None:
    """An address is a multiple of 16 bytes."""
    return f"{name} does not begin at a multiple of {ALIGNMENT_BYTES} bytes" if address % ALIGNMENT_BYTES else None
