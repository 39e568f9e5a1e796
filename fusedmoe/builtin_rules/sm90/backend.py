"""What the rules for sm_90 share: when the kernels are there, what all of them take, ops as the kernels' data."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedmoe.fusion.rule import Declined, NothingToDo, PlanContext, require
from fusedmoe.kernels import toolkit
from fusedmoe.kernels.activation import Activation, Kind
from fusedmoe.kernels.sm90 import limits
from fusedmoe.ops.glu import GLU, GeGLU, ReGLU, SwiGLU
from fusedmoe.ops.squared_relu import SquaredReLU

if TYPE_CHECKING:
    from fusedmoe.ops.op import Op

Run = Callable[..., Any]

_PACKAGES = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
_PLAIN = (Tensor, torch.nn.Parameter)
_KINDS: dict[type, Kind] = {SwiGLU: "swiglu", ReGLU: "reglu", SquaredReLU: "squared_relu"}


class OnHopper:
    """A rule whose kernels are those of `fusedmoe.kernels.sm90`: named first among a rule's bases."""

    @classmethod
    def available(cls, device: torch.device, arch: int | None) -> None:
        """Decline on other devices."""
        require_hopper(device, arch)

    @classmethod
    def installed(cls) -> None:
        """Decline where a package is missing that the kernels are compiled with."""
        require_packages()


def require_hopper(device: torch.device, arch: int | None) -> None:
    """Decline unless this is an sm_90 GPU."""
    require(arch is not None, "needs an sm_90 GPU, this device is %s", device)
    require(arch == 90, "needs an sm_90 GPU; there are no kernels for sm_%s yet", arch)


def require_packages() -> None:
    """Decline unless this machine has what the kernels are compiled with."""
    require(sys.platform == "linux", "needs Linux, this is %s", sys.platform)
    missing = missing_packages()
    require(not missing, "needs %s: pip install %s", " and ".join(missing), " ".join(missing))
    unusable = toolkit.why_unusable()
    require(unusable is None, "%s", unusable)


@functools.cache
def missing_packages() -> tuple[str, ...]:
    """Return the distributions that are not installed. Looks for them; imports none."""
    return tuple(name for module, name in _PACKAGES.items() if importlib.util.find_spec(module) is None)


@functools.cache
def functions() -> Any:
    """Return the kernels' module, imported when the first of them runs."""
    return importlib.import_module("fusedmoe.kernels.sm90.functions")


def decline(reason: str | None) -> None:
    """Decline for a reason that a predicate of `fusedmoe.kernels.sm90.limits` gave, if it gave one."""
    if reason is not None:
        raise Declined(reason)


def check_common(ctx: PlanContext, *operands: str, **widths: int) -> None:
    """Decline operands not all bf16 or all fp16, and widths off 16 bytes."""
    decline(limits.why_not_dtypes({name: ctx.dtype(name) for name in operands}))
    for name, width in widths.items():
        decline(limits.why_not_width(name, width))


def activation_of(op: Op) -> Activation:
    """Return an activation as the kernels know it."""
    if isinstance(op, GeGLU):
        kind: Kind = "geglu_tanh" if op.approximate == "tanh" else "geglu_erf"
    else:
        kind = _KINDS[type(op)]
    if not isinstance(op, GLU):
        return Activation(kind)
    return Activation(kind, op.limit, op.alpha, op.offset, op.interleaved)


def guard_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Decline rows, a weight or a bias that a kernel cannot read where it is; leave a call without rows to plain
    PyTorch.
    """
    if not x.shape[0]:
        raise NothingToDo("no rows")
    guard_matrix("x", x)
    guard_matrix("the weight", weight, transposed=True)
    if bias is not None:
        require(bias.is_contiguous(), "the bias is not contiguous")


def guard_gradient(grad: Tensor) -> None:
    """Leave a call without rows to plain PyTorch; any strides will do, see `unreadable`."""
    if not grad.shape[0]:
        raise NothingToDo("no rows")
    if type(grad) not in _PLAIN:
        _decline_type("the gradient", grad)


def guard_matrix(name: str, t: Tensor, transposed: bool = False) -> None:
    """Decline a tensor that is no plain one in memory, or not laid out as TMA reads it."""
    if type(t) not in _PLAIN:
        _decline_type(name, t)
    decline(limits.why_not_matrix(name, t.shape, t.stride(), t.data_ptr(), transposed))


def _decline_type(name: str, t: Tensor) -> None:
    raise Declined("%s is a %s, not a plain tensor", name, type(t).__name__)


def unreadable(grad: Tensor) -> bool:
    """Whether TMA cannot read a gradient where it is, since autograd has expanded or transposed it: see `readable`."""
    return limits.why_not_matrix("", grad.shape, grad.stride(), grad.data_ptr()) is not None


def readable(grad: Tensor) -> Tensor:
    """Return a copy that TMA can read."""
    return grad.clone(memory_format=torch.contiguous_format)
