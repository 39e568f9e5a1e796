"""Numeric formats as data: the element type, the block of elements that share a scale, and the rule for the scale.

Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats (MX) Specification 1.0; NVIDIA,
"Pretraining Large Language Models with NVFP4"; DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from fusedmoe.base.checks import (
    ANY_INTEGER,
    FINITE,
    FLAG,
    POSITIVE,
    POSITIVE_INTEGER,
    TEXT,
    WRONG,
    Check,
    check_fields,
    instance,
    integer,
    one_of,
)
from fusedmoe.base.errors import InputError


@dataclass(frozen=True)
class Element:
    """A small floating-point type."""

    name: str  #: For example ``"e4m3"``: 4 exponent bits, 3 mantissa bits
    bits: int  #: Width of a code, including the sign
    #: The largest finite value. Finite values beyond it saturate.
    max: float
    max_exponent: int  #: ``floor(log2(max))``
    dtype: torch.dtype  #: Storage type of the codes; uint8 holds two 4-bit codes, the even element in the low half

    def __post_init__(self) -> None:
        bits, dtype = POSITIVE_INTEGER, instance(torch.dtype, "a torch.dtype")
        check_fields(self, {"name": TEXT, "bits": bits, "max": POSITIVE, "max_exponent": ANY_INTEGER, "dtype": dtype})

    def __str__(self) -> str:
        return self.name


E4M3 = Element("e4m3", 8, 448.0, 8, torch.float8_e4m3fn)
E5M2 = Element("e5m2", 8, 57344.0, 15, torch.float8_e5m2)
E2M1 = Element("e2m1", 4, 6.0, 2, torch.uint8)


class ScaleRule(str, Enum):
    """The rule that derives a scale from ``amax``, the largest finite magnitude among the elements that share it.

    ``max`` is `Element.max`. An element is stored as ``q = round(x * encode)`` and has the value ``q * scale``.
    """

    FP32 = "fp32"  #: ``encode = max / amax``, ``scale = 1 / encode``, both rounded to fp32; both 1 where amax is 0
    POWER_OF_TWO = "power of two"
    """As FP32, with ``encode`` rounded down to a power of two, so that the scale neither rounds nor clips elements."""
    RCEIL = "rceil"  #: ``scale = 2 ** ceil(log2(amax / max))`` in E8M0: the smallest scale that clips no element
    FLOOR = "floor"
    """``scale = 2 ** (floor(log2(amax)) - max_exponent)`` in E8M0, the rule of the MX specification; it may clip."""
    TWO_LEVEL = "two level"
    """``scale = e4m3(amax / 6 * tensor_encode)`` with ``tensor_encode = 448 * 6 / (expert's amax)``. An element has
    the value ``q * scale / tensor_encode``.
    """

    @property
    def dtype(self) -> torch.dtype:
        """Storage type of the scales."""
        return _SCALE_DTYPES[self]


_SCALE_DTYPES = {
    ScaleRule.FP32: torch.float32,
    ScaleRule.POWER_OF_TWO: torch.float32,
    ScaleRule.RCEIL: torch.float8_e8m0fnu,
    ScaleRule.FLOOR: torch.float8_e8m0fnu,
    ScaleRule.TWO_LEVEL: torch.float8_e4m3fn,
}


def _block(value: object) -> object:
    sizes = tuple(value) if isinstance(value, tuple | list) else ()
    each = tuple(None if size is None else ANY_INTEGER.kept(size) for size in sizes)
    return each if len(each) == 2 and WRONG not in each else WRONG


_FORMAT = {
    "name": TEXT,
    "element": instance(Element, "a fusedmoe.numerics.formats.Element"),
    "block": Check("two sizes, each an integer or None", _block),
    "rule": instance(ScaleRule, "a fusedmoe.numerics.formats.ScaleRule"),
    "tensor_scale": FLAG,
    "amax_epsilon": FINITE,
}


@dataclass(frozen=True)
class Format:
    """A target format of quantization."""

    name: str  #: The name that ``explain()`` prints
    element: Element  #: The type of the codes
    #: Size of a block of elements that share a scale: across the quantized axis, and along it. None means the whole
    #: extent of one expert. The last block may be smaller.
    block: tuple[int | None, int | None]
    rule: ScaleRule  #: Rule and storage type of the scales
    tensor_scale: bool = False  #: Whether every expert also has an fp32 scale; only with `ScaleRule.TWO_LEVEL`
    amax_epsilon: float = 0.0  #: Lower bound on amax, for rules with fp32 scales

    def __post_init__(self) -> None:
        def reject(field: str, expected: str) -> InputError:
            return InputError(f"Format {self.name!r}: {field}: expected {expected}, got {getattr(self, field)!r}")

        check_fields(self, _FORMAT)
        across, along = self.block
        if not all(size is None or size > 0 for size in self.block) or (across is None and along is not None):
            raise reject("block", "positive sizes; None across requires None along")
        if along is None and self.rule.dtype is not torch.float32:
            raise reject("block", f"a size along, which the rule {self.rule.value!r} requires")
        if across not in (None, 1) and along is None:
            raise reject("block", "1 or None across, which None along requires")
        if self.tensor_scale is not (self.rule is ScaleRule.TWO_LEVEL):
            raise reject("tensor_scale", f"{self.rule is ScaleRule.TWO_LEVEL} for the rule {self.rule.value!r}")
        if (self.element == E2M1) is not (self.rule is ScaleRule.TWO_LEVEL):
            raise reject("element", f"e2m1 for the rule 'two level', and only for it; the rule is {self.rule.value!r}")
        if self.amax_epsilon < 0 or (self.amax_epsilon and self.rule.dtype is not torch.float32):
            raise reject("amax_epsilon", "0 or more, and 0 for scales that are not fp32")

    @property
    def scales_are_exact(self) -> bool:
        """Whether bf16, with eight significant bits, holds an element times its block's scale exactly."""
        return self.rule is not ScaleRule.FP32

    def __str__(self) -> str:
        across, along = self.block
        shape = f"{across}x{along}" if along is not None else "per-tensor" if across is None else "per-row"
        return f"{self.name} {self.element} {shape}"


def column_block(format: Format) -> int:
    """Return the multiple to which each expert's rows are padded by columns: a block, or what products of codes need
    where there are no blocks: 128 for one scale per expert, and 16 for one per row.
    """
    across, along = format.block
    if along is not None:
        return along
    return 128 if across is None else 16


def _fp32_rule(name: str, power_of_two: bool) -> ScaleRule:
    power_of_two = FLAG(f"{name}: power_of_two", power_of_two)
    return ScaleRule.POWER_OF_TWO if power_of_two else ScaleRule.FP32


def fp8_tensor(element: Element = E4M3, power_of_two: bool = False, amax_epsilon: float = 0.0) -> Format:
    """FP8 with one scale per expert."""
    return Format("fp8", element, (None, None), _fp32_rule("fp8_tensor", power_of_two), amax_epsilon=amax_epsilon)


def fp8_row(element: Element = E4M3, power_of_two: bool = False, amax_epsilon: float = 0.0) -> Format:
    """FP8 with one scale per row; by columns, with one scale per column and expert."""
    return Format("fp8", element, (1, None), _fp32_rule("fp8_row", power_of_two), amax_epsilon=amax_epsilon)


def fp8_block(element: Element = E4M3, across: int = 1, power_of_two: bool = True, amax_epsilon: float = 0.0) -> Format:
    """FP8 with one scale per ``across`` x 128 elements: DeepSeek-V3's 1x128 and 128x128."""
    rule = _fp32_rule("fp8_block", power_of_two)
    return Format("fp8", element, (across, 128), rule, amax_epsilon=amax_epsilon)


def mxfp8(element: Element = E4M3, across: int = 1, rule: ScaleRule = ScaleRule.RCEIL) -> Format:
    """MXFP8: FP8 with one E8M0 scale per ``across`` x 32 elements."""
    if rule not in (ScaleRule.RCEIL, ScaleRule.FLOOR):
        raise InputError(f"mxfp8: rule: expected ScaleRule.RCEIL or ScaleRule.FLOOR, got {rule!r}")
    return Format("mxfp8", element, (across, 32), rule)


def nvfp4(across: int = 1) -> Format:
    """NVFP4: E2M1 with one E4M3 scale per ``across`` x 16 elements and one fp32 scale per expert."""
    return Format("nvfp4", E2M1, (across, 16), ScaleRule.TWO_LEVEL, tensor_scale=True)


@dataclass(frozen=True)
class Delayed:
    """Delayed scaling: scales from the amax of earlier steps, so that quantization does not wait for a reduction.

    Elements saturate if amax has grown by more than ``2**margin`` since those steps.

    Attributes
    ----------
    history : int
        Number of steps in the amax history.
    most_recent : bool
        Use the last step's amax instead of the largest in the history.
    margin : int
        Binades of headroom: ``encode = max / 2**margin / amax``.
    """

    history: int = 1024
    most_recent: bool = False
    margin: int = 0

    def __post_init__(self) -> None:
        steps, binades = integer("a number of steps, 1 or more", 1), integer("a number of binades")
        check_fields(self, {"history": steps, "margin": binades, "most_recent": FLAG})


WGRAD = one_of(("quantized", "bf16"))  # the values of `Quantizer.wgrad` and of the recipes' fields of that name


@dataclass(frozen=True)
class Quantizer:
    """A format and the options for quantizing to it.

    Attributes
    ----------
    format : Format
        The format.
    stochastic_rounding : bool
        Round stochastically, so that rounding is unbiased; only for E2M1. `torch.manual_seed` seeds the random bits.
    hadamard : bool
        Rotate tiles of 16 rows before quantizing by columns, for the weight gradient; see
        `fusedmoe.numerics.formats.hadamard`.
    delayed : Delayed or None
        Delayed scaling, for formats with one scale per tensor.
    wgrad : str
        The operand of products that sum over rows, such as the weight gradient: ``"quantized"``, or ``"bf16"`` for the
        rows, or their gradient, from before quantization, in their own dtype. Only for rows and their gradient.
    """

    format: Format
    stochastic_rounding: bool = False
    hadamard: bool = False
    delayed: Delayed | None = None
    wgrad: str = "quantized"

    def __post_init__(self) -> None:
        delayed = instance(Delayed, "a fusedmoe.numerics.formats.Delayed").or_none()
        of_format = instance(Format, "a fusedmoe.numerics.formats.Format")
        flags = {"stochastic_rounding": FLAG, "hadamard": FLAG}
        check_fields(self, {"format": of_format, **flags, "delayed": delayed, "wgrad": WGRAD})
        if self.stochastic_rounding and self.format.element != E2M1:
            raise InputError(f"Quantizer: stochastic_rounding: expected a format of e2m1, got {self.format}")
        if self.hadamard and (self.format.block[1] or 0) % 16:
            raise InputError(f"Quantizer: hadamard: expected blocks of a multiple of 16 elements, got {self.format}")
        if self.hadamard and (self.format.block[1] is None or self.format.block[0] != 1):
            raise InputError(f"Quantizer: hadamard: expected blocks of one row, got {self.format}")
        if self.hadamard and self.wgrad != "quantized":
            raise InputError(f"Quantizer: hadamard: expected False for wgrad={self.wgrad!r}, which rotates nothing")
        if self.delayed is not None and self.format.block != (None, None):
            raise InputError(f"Quantizer: delayed: expected a format with one scale per tensor, got {self.format}")

    def __str__(self) -> str:
        extras = [
            "delayed" if self.delayed is not None else "",
            "stochastic rounding" if self.stochastic_rounding else "",
            "Hadamard" if self.hadamard else "",
            f"wgrad {self.wgrad}" if self.wgrad != "quantized" else "",
        ]
        return ", ".join([str(self.format), *filter(None, extras)])
