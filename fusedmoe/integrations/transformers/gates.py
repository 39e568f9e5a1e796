"""Find the op that is equivalent to a model's gate, the function between the two products of its experts.

`recognise` looks up the gate in tables of transformers' functions, and compares the op found there with the gate
itself. It refuses a gate that is not in the tables, and a gate whose values or derivatives differ. An INFO message
gives the reason. The result is valid while `settings_of` and `functions_of` return the same values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.ops import GeGLU, Op, ReGLU, SquaredReLU, SwiGLU
from fusedmoe.ops.glu import GLU

logger = logging.getLogger(__name__)

GATE = "_apply_gate"  # the method of an experts class with a gate other than act_fn(gate) * up


class RowLayout(NamedTuple):
    """The rows that a gate takes: (R, 2 * intermediate), or (R, intermediate) if not gated."""

    gated: bool
    interleaved: bool  # gate and up are the even and odd features
    intermediate: int


class Gate(NamedTuple):
    """A gate: ``phi(min(g, limit)) * (clamp(u, -limit, limit) + offset)``."""

    limit: str = ""  # the name of the module's attribute with the number; "" if the gate has none
    alpha: str = ""
    offset: float = 0.0
    activation: str = ""  # the key of phi in `ACTIVATIONS`; "" for the module's act_fn


def _gate_of_fp8_experts(module: nn.Module) -> Gate | None:
    """Return the gate of ``FP8Experts``, which depends on the configuration; None for one with soft caps."""
    if getattr(module, "gate_softcap", None) is not None:
        return None
    if getattr(module, "swiglu_alpha", None) is not None:
        return Gate("swiglu_limit", "swiglu_alpha", 1.0, "SiLU")
    return Gate() if getattr(module, "limit", None) is None else Gate("limit")


# by qualified name, in modules of transformers
GATES: dict[str, Gate] = {
    "_default_apply_gate": Gate(),
    "BeamExperts._apply_gate": Gate(),
    "DeepseekV4Experts._apply_gate": Gate("limit"),
    "Glm5NextTextExperts._apply_gate": Gate("swiglu_limit", activation="SiLU"),
    "GptOssExperts._apply_gate": Gate("limit", "alpha", 1.0, "SiLU"),
    "HYV4Experts._apply_gate": Gate("swiglu_limit", activation="SiLU"),
    "HYV4VLExperts._apply_gate": Gate("swiglu_limit", activation="SiLU"),
    "MiniMaxM3VLExperts._apply_gate": Gate("swiglu_limit", "swiglu_alpha", 1.0, "SiLU"),
    "OpenAIPrivacyFilterExperts._apply_gate": Gate("limit", "alpha", 1.0, "SiLU"),
}
# by name, in modules of transformers and torch
ACTIVATIONS: dict[str, Callable[..., Op]] = {
    **dict.fromkeys(("silu", "SiLU", "SiLUActivation"), SwiGLU),
    "QuickGELUActivation": partial(SwiGLU, alpha=1.702),
    "GELUActivation": partial(GeGLU, "none"),
    **dict.fromkeys(("GELUTanh", "NewGELUActivation", "AccurateGELUActivation"), GeGLU),
    "ReLU": ReGLU,
    "ReLUSquaredActivation": SquaredReLU,
}
_NAMES = [name for gate in GATES.values() for name in (gate.limit, gate.alpha) if name]
SETTINGS = *dict.fromkeys(_NAMES), "gate_softcap", "up_softcap"


class _RefusedError(Exception):
    """The reason for a refusal."""


def recognise(module: nn.Module, gate: Callable[[nn.Module, Tensor], Tensor], layout: RowLayout) -> Op | None:
    """Return the op that is equivalent to a module's gate; None if the gate is not recognised.

    - ``module``: the module of experts.
    - ``gate``: a function of the module and rows that calls the module's gate.
    - ``layout``: the rows that the gate takes.
    """
    try:
        op = _op_of(module, layout)
        with ThreadPoolExecutor(1) as thread:  # without the caller's grad mode, autocast and saved-tensor hooks
            thread.submit(_compare, op, partial(gate, module), layout).result()
    except _RefusedError as reason:
        logger.info("%s: %s", type(module).__name__, reason)
        return None
    return op


def settings_of(module: nn.Module, names: tuple[str, ...]) -> tuple[object, ...]:
    """Return these attributes and the class of ``act_fn``, on which `torch.compile` has guards."""
    return (*[getattr(module, name) for name in names], type(_act_fn(module)))


def _act_fn(module: nn.Module) -> Any:
    """Return the module's own ``act_fn``, or None."""
    # not getattr, which takes microseconds for a missing attribute
    return module._modules.get("act_fn", module.__dict__.get("act_fn"))


def functions_of(module: nn.Module) -> tuple[object, ...]:
    """Return the functions that the gate calls, and whether ``act_fn`` has hooks."""
    act_fn = _act_fn(module)
    own = vars(act_fn) if isinstance(act_fn, nn.Module) else {}
    gates = getattr(type(module), GATE, None), vars(module).get(GATE)
    hooked = any(own.get(f"_{name}_hooks") for name in ("forward", "forward_pre", "backward", "backward_pre"))
    return *gates, act_fn, own.get("forward"), own.get("act"), hooked


def _op_of(module: nn.Module, layout: RowLayout) -> Op:
    """Return the op of the tables for a module's gate."""
    of_class, own, act_fn, own_forward, _, hooked = functions_of(module)
    if own is not None or own_forward is not None or hooked:
        raise _RefusedError("a function was set on its gate, or its act_fn has a hook")
    name = "" if of_class is None else _name(of_class, "transformers")
    known = GATES.get(name) if layout.gated and of_class is not None else Gate()
    if layout.gated and name == "FP8Experts._apply_gate":
        known = _gate_of_fp8_experts(module)
    if known is None:
        raise _RefusedError(f"{of_class} is not a known gate")
    function = act_fn if hasattr(act_fn, "__qualname__") else type(act_fn)
    make = ACTIVATIONS.get(known.activation or _name(function, "transformers", "torch"))
    if make is None or (make is SquaredReLU) is layout.gated:
        raise _RefusedError(f"its act_fn, {act_fn!r}, is not a known activation")
    if not layout.gated:
        return make()
    attributes = {"limit": known.limit, "alpha": known.alpha}
    numbers: dict[str, Any] = {key: getattr(module, name, None) for key, name in attributes.items() if name}
    if not all(type(number) in (int, float) and number > 0 for number in numbers.values()):
        raise _RefusedError(f"expected positive numbers, got {numbers}")
    return make(**numbers, offset=known.offset, interleaved=layout.interleaved)


def _name(function: Any, *packages: str) -> str:
    """Return the qualified name of a function or class; "" if it is not from these packages."""
    return function.__qualname__ if str(function.__module__).partition(".")[0] in packages else ""


def _compare(op: Op, gate: Callable[[Tensor], Tensor], layout: RowLayout) -> None:
    """Raise unless op and gate agree, with derivatives, for magnitudes from 1e-18 to 1e18, and the gate passes NaN."""
    width = layout.intermediate * (2 if layout.gated else 1)
    generator = torch.Generator().manual_seed(0)
    shape = max(2, 8192 // width), width
    how: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    with torch.device("cpu"):
        signs = torch.randn(shape, generator=generator, **how).sign()
        x = signs * 10 ** (36 * torch.rand(shape, generator=generator, **how) - 18)
        try:
            results = [_values_and_derivatives(function, x, layout) for function in (gate, op.compute)]
            passes_nan = gate(torch.full_like(x, torch.nan)).isnan().all()
        except Exception as error:  # foreign code
            raise _RefusedError(f"called on a CPU, its gate raises {error!r}") from error
    inputs = _halves(x, layout)
    scales = [inputs[0].square(), inputs[0].abs()]
    if isinstance(op, GLU):
        gate_c, up_c = op.clamped(*inputs)
        scales = [gate_c.abs() * (up_c.abs() + op.offset), up_c.abs() + op.offset, gate_c.abs()]
    # the tolerance allows a gate that computes in fp32
    same = ((results[0] - results[1]).abs() <= 4e-6 * torch.stack(scales)).all()
    if not (same and passes_nan):
        raise _RefusedError(f"its gate differs from {op}")


def _values_and_derivatives(function: Callable[..., Any], x: Tensor, layout: RowLayout) -> Tensor:
    """Return y and its derivatives by gate and up, (3, *y.shape); if not gated, y and its derivative, (2, *y.shape)."""
    x = x.detach().requires_grad_()
    y = function(x)
    if y.dtype is not x.dtype:
        raise TypeError(f"its result for {x.dtype} is {y.dtype}")
    (grad,) = torch.autograd.grad(y.sum(), x)
    return torch.stack([y.detach(), *_halves(grad, layout)])


def _halves(rows: Tensor, layout: RowLayout) -> tuple[Tensor, ...]:
    if not layout.gated:
        return (rows,)
    return (rows[:, ::2], rows[:, 1::2]) if layout.interleaved else rows.chunk(2, dim=-1)
