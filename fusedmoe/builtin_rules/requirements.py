"""Common parts of the rules: the requirements of architectures, checks of operands, and descriptions of ops for the
kernels.

A rule for kernels without a matrix product names no architecture: `on` makes one rule of it per architecture.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import ClassVar

import torch

from fusedmoe.fusion.language.rule import Declined, FusionRule, PlanContext, Step, require
from fusedmoe.kernels.build import toolkit
from fusedmoe.kernels.sm90 import limits
from fusedmoe.kernels.sm100 import package
from fusedmoe.numerics.activations import KINDS, Activation
from fusedmoe.numerics.formats import QuantizedSpec
from fusedmoe.ops.glu import GLU, SquaredReLU
from fusedmoe.ops.scale import ScaleGrad


class OnSm90:
    """Base of every rule for Hopper. It precedes the rule, or `FusionRule`, in the bases."""

    prefix: ClassVar[str] = "sm90"
    reads_tail: ClassVar[bool] = False

    @classmethod
    def available(cls, device: torch.device, arch: int | None) -> None:
        """Decline on any device except an sm_90 GPU."""
        require(arch is not None, "needs an sm_90 GPU, this device is %s", device)
        require(arch == 90, "needs an sm_90 GPU, this one is sm_%s", arch)

    @classmethod
    def installed(cls) -> None:
        """Decline on a machine that cannot compile the kernels."""
        require(sys.platform == "linux", "needs Linux, this is %s", sys.platform)
        decline(_missing_packages())
        decline(toolkit.why_unusable())


class OnSm100:
    """Base of every rule for Blackwell. It precedes the rule, or `FusionRule`, in the bases."""

    prefix: ClassVar[str] = "sm100"

    @classmethod
    def available(cls, device: torch.device, arch: int | None) -> None:
        """Decline on any device except an sm_100 or sm_103 GPU."""
        require(arch is not None, "needs an sm_100 GPU, this device is %s", device)
        require(arch in package.ARCHITECTURES, "needs an sm_100 or sm_103 GPU, this one is sm_%s", arch)

    @classmethod
    def installed(cls) -> None:
        """Decline on a machine that cannot compile the kernels, or on which they were not verified."""
        require(sys.platform == "linux", "needs Linux, this is %s", sys.platform)
        reasons = package.why_missing(), _missing_packages(), toolkit.why_unusable(), package.why_unverified()
        decline("; ".join(filter(None, reasons)) or None)


def _missing_packages() -> str | None:
    missing = toolkit.missing_packages()
    return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}" if missing else None


def on(architecture: type[OnSm90 | OnSm100], *rules: type[FusionRule]) -> tuple[type[FusionRule], ...]:
    """Return rules that name no architecture for one: ``dispatch`` becomes ``sm90.dispatch``."""

    def made(rule: type[FusionRule]) -> type[FusionRule]:
        keywords = {"name": f"{architecture.prefix}.{rule.name}", "direction": rule.direction}
        names = {"__module__": rule.__module__, "__doc__": rule.__doc__}
        return types.new_class(rule.__name__, (architecture, rule), keywords, lambda body: body.update(names))

    return tuple(map(made, rules))


def decline(reason: str | None) -> None:
    """Decline for a reason, such as one that a predicate of `fusedmoe.kernels.sm90.limits` returned; None is none."""
    if reason is not None:
        raise Declined(reason)


def check_common(ctx: PlanContext, *operands: str, **widths: int) -> None:
    """Decline operands that are not all bf16 or all fp16, and widths that are not a multiple of 16 bytes."""
    decline(limits.why_not_dtypes({name: ctx.dtype(name) for name in operands}))
    for name, width in widths.items():
        decline(limits.why_not_width(name, width))


def check_bf16(ctx: PlanContext, operands: str, *values: str) -> None:
    """Decline values that are not bf16. ``operands`` are those of the products, for the message."""
    for name in values:
        dtype = name_of(ctx.dtype(name))
        require(dtype == "bfloat16", "%s is %s: products of %s operands are bfloat16", name, dtype, operands)


def quantized_spec(ctx: PlanContext, name: str, expected: str) -> QuantizedSpec:
    """Return the spec of a quantized value; decline any other."""
    spec = ctx.spec(name)
    require(isinstance(spec, QuantizedSpec), "%s is not quantized: expected %s", name, expected)
    assert isinstance(spec, QuantizedSpec)
    return spec


def check_row_scale(ctx: PlanContext, factor: str) -> int:
    """Decline a row scale that the kernels cannot read. Return the launches that convert it to fp32."""
    if not ctx.exists(factor):
        return 0
    dtype = ctx.dtype(factor)
    decline(limits.why_not_row_scale(dtype))
    return int(dtype is not torch.float32)


def check_dscale(ctx: PlanContext, scale_grad: ScaleGrad | None) -> tuple[tuple[str, ...], int]:
    """Decline a row scale ``dscale.factor`` that the kernels cannot read. Return the gradient of the scale as `Step`
    names it, if it is asked for, and the launches on the scale and its gradient besides the product.
    """
    conversions = check_row_scale(ctx, "dscale.factor")
    if scale_grad is None:
        return (), conversions
    return (f"scale_grad.{scale_grad.gives[0]}",), 1 + 2 * conversions


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def activation_of(op: GLU | SquaredReLU) -> Activation:
    """Return an activation as data, for the kernels."""
    return Activation(op.kind, **{name: getattr(op, name) for name in KINDS[op.kind].options})


class ThroughIndex:
    """Base of a rule whose step reads the rows `gathers` through their index, which its kernel takes last. It precedes
    the rule for rows in order in the bases.
    """

    gathers: ClassVar[str]
    gather_cost: ClassVar[float] = 1.2  # of `Step`

    def offer(self, ctx: PlanContext) -> Step:
        rows = self.gathers
        step: Step = super().offer(ctx)  # type: ignore[misc]
        decline(limits.why_not_row_index(ctx.dtype(f"{rows}:index")))
        needs = (*(f"{name}:source" if name == rows else name for name in step.needs), f"{rows}:index")
        return replace(step, needs=needs, gather_cost=self.gather_cost)
