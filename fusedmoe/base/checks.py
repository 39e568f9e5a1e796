"""Checks of arguments of constructors and functions, and of attributes that are set later.

A `Check` validates a value and returns the value to store: a plain ``int``, ``float`` or ``bool`` for a NumPy scalar.
No check reads a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fusedmoe.base.errors import InputError

WRONG = object()


def said(value: object) -> str:
    """Return the short text of a value for an error message, without reading a tensor."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a module {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


@dataclass(frozen=True)
class Check:
    """The validation of a setting."""

    expected: str  # description of valid values, for the message
    kept: Callable[[Any], Any]  # returns the value to store, or `WRONG`
    say: Callable[[Any], str] = said  # returns the text of an invalid value for the message

    def __call__(self, what: str, value: Any) -> Any:
        """Return the value to store; raise `InputError` for an invalid one. ``what`` names it: ``"SwiGLU: limit"``."""
        kept = self.kept(value)
        if kept is WRONG:
            raise InputError(f"{what}: expected {self.expected}, got {self.say(value)}")
        return kept

    def or_none(self) -> Check:
        """Return this check extended to accept None."""
        return Check(f"{self.expected} or None", lambda value: None if value is None else self.kept(value), self.say)


def integer(expected: str, least: int | None = None, most: int | None = None) -> Check:
    """Return a check for an integer within bounds."""

    def kept(value: Any) -> Any:
        if type(value) is bool or not isinstance(value, Integral):
            return WRONG
        number = int(value)
        return number if (least is None or number >= least) and (most is None or number <= most) else WRONG

    return Check(expected, kept)


def number(expected: str, holds: Callable[[float], bool] = math.isfinite, infinite: bool = False) -> Check:
    """Return a check for a number for which ``holds`` is true: a finite one, or with ``infinite`` any except NaN."""

    def kept(value: Any) -> Any:
        if type(value) is bool or not isinstance(value, Real):
            return WRONG
        if not math.isfinite(value) and not (infinite and math.isinf(value)):
            return WRONG
        plain = int(value) if isinstance(value, Integral) else float(value)
        return plain if holds(plain) else WRONG

    return Check(expected, kept)


def one_of(names: Collection[str]) -> Check:
    """Return a check for one of these strings."""
    texts = [*map(repr, names)]
    expected = " or ".join(texts) if len(texts) == 2 else f"one of {', '.join(texts)}"
    return Check(expected, lambda value: value if isinstance(value, str) and value in names else WRONG)


def instance(kind: type | tuple[type, ...], expected: str) -> Check:
    """Return a check for an instance of a class."""
    return Check(expected, lambda value: value if isinstance(value, kind) else WRONG)


def _flag(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    # detects NumPy's bool without importing NumPy
    return bool(value) if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_") else WRONG


ANY_INTEGER = integer("an integer")
POSITIVE_INTEGER = integer("a positive integer", 1)
FINITE = number("a finite number")
POSITIVE = number("a positive number", lambda value: value > 0)
NOT_NEGATIVE = number("a finite number, 0 or more", lambda value: value >= 0)
FLAG = Check("True or False", _flag)
TEXT = instance(str, "a str")
TENSOR = replace(instance(Tensor, "a tensor"), say=lambda value: type(value).__name__)
MODULE = replace(instance(nn.Module, "a module"), say=lambda value: type(value).__name__)

FLOATS = Check(
    "a floating-point dtype of 16 bits or more",
    lambda value: value if value.is_floating_point and value.itemsize > 1 else WRONG,
)
"""The dtypes of arithmetic; floats of 8 bits and fewer are codes."""

_PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PARAMETER_DTYPE = Check(
    "float32, bfloat16, float16, float64 or None",
    lambda value: value if value is None or value in _PARAMETER_DTYPES else WRONG,
)


def _device(value: Any) -> Any:
    if isinstance(value, bool):
        return WRONG
    try:
        return None if value is None else torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        return WRONG


DEVICE = Check("a torch.device, its name or None", _device)


def check_all(who: str, checks: Mapping[str, Check], **values: Any) -> None:
    """Check each value with the check of its name."""
    for name, value in values.items():
        checks[name](f"{who}: {name}", value)


def check_fields(owner: Any, checks: Mapping[str, Check]) -> None:
    """Check the fields of a frozen dataclass, and store the values that the checks return."""
    for name, check in checks.items():
        object.__setattr__(owner, name, check(f"{type(owner).__name__}: {name}", getattr(owner, name)))


def check_factory(who: str, device: Any, dtype: Any) -> None:
    """Check the ``device`` and ``dtype`` of a constructor's parameters."""
    DEVICE(f"{who}: device", device)
    PARAMETER_DTYPE(f"{who}: dtype", dtype)


class Checked:
    """A module whose settings are checked whenever they are set, in the constructor and later."""

    _checks: ClassVar[Mapping[str, Check]] = {}  # the check of each setting, by attribute name
    # The settings that cannot be changed, since other attributes are derived from them.
    _fixed: ClassVar[tuple[str, ...]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        check = self._checks.get(name)
        if check is not None:
            who = f"{type(self).__name__}: {name}"
            value = check(who, value)
            if name in self._fixed and self.__dict__.get(name, value) != value:
                expected = f"{self.__dict__[name]!r}, which cannot be changed"
                raise InputError(f"{who}: expected {expected}, got {value!r}; construct a new {type(self).__name__}")
        super().__setattr__(name, value)


# ---- names of runtime inputs --------------------------------------------------------------------------------------

_OWN = (
    "input", "output", "weight", "bias", "offsets", "columns", "none", "random_state", "device_random_state",
    "checked_row_of_slot", "checked_slot_of_row",
)  # fmt: skip
_ARGUMENTS = ("self", "arch")
_INTEGERS = ("splits", "row_of_slot", "slot_of_row", "token_of_row", "expert_index")


def reserved(name: str) -> bool:
    """Whether a name already has a meaning in an op or in a call."""
    return name in _OWN or name in _ARGUMENTS or name.startswith("grad_")


def _input_name(value: Any) -> Any:
    usable = isinstance(value, str) and value.isidentifier() and not reserved(value) and value not in _INTEGERS
    return str(value) if usable else WRONG


INPUT_NAME = Check(
    "the name of a runtime input with one float per row, such as 'probs': an identifier other than "
    f"{', '.join(map(repr, (*_OWN, *_ARGUMENTS, *_INTEGERS)))}, that does not start with 'grad_'",
    _input_name,
)
"""The name of a factor of rows, for `Scale` and `Combine`."""


def check_names(who: str, kind: str, names: Collection[str], parameters: Collection[str]) -> None:
    """Raise `InputError` if a value that an op takes or provides has a reserved name or that of a parameter."""
    for name in names:
        if not str(name).isidentifier() or reserved(name) or name in parameters:
            taken = ", ".join(map(repr, dict.fromkeys((*_OWN, *_ARGUMENTS, *parameters))))
            raise InputError(
                f"{who}: {kind}: expected identifiers other than {taken}, that do not start with 'grad_', got {name!r}"
            )
