"""One autograd function runs a plan: its forward steps, and, from what they kept, its backward steps.

Under ``create_graph=True`` its backward runs unfused and is recorded by autograd, so that the gradients have gradients;
see `fusedmoe.fusion.differentiable`. That takes the chain's arguments, also those that the plan does not keep. Small
ones and frozen parameters are held here. Of rows and of what was computed for this call (a weight that autocast has
cast, say) there is only a weak reference: whoever differentiates twice has to keep them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from fusedmoe.autocast import without_autocast
from fusedmoe.formats.tensor import packed, unpacked
from fusedmoe.fusion.differentiable import SecondOrderError
from fusedmoe.fusion.signature import signature
from fusedmoe.ops.weight_cache import note_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from torch import Tensor

    from fusedmoe.fusion.executable import Call

    # a tensor, or a reference to it or to what it is a view of; its count of changes in place; of a view its kind, as
    # in a signature, and its offset
    Held: TypeAlias = tuple[Tensor | ref[Tensor], int, tuple[Any, ...] | None, int]


class _RunPlan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...]
        outputs, saved = call.run([*arguments], *call.runs)  # type: ignore[assignment]
        ctx.call = call
        plan = call.plan
        if plan.keeps_quantized:
            saved, ctx.packed = packed(saved)  # type: ignore[assignment]
        ctx.save_for_backward(*saved)
        if call.held:
            ctx.held = _held(call, arguments)
        if len(outputs) > 1:
            ctx.mark_non_differentiable(*[t for t in outputs if not t.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # under create_graph=True
            return _differentiable_gradients(ctx, *grads)
        call: Call = ctx.call
        saved = unpacked(ctx.saved_tensors, ctx.packed) if call.plan.keeps_quantized else ctx.saved_tensors
        with without_autocast(call.plan.environment.device):  # the dtypes were settled in forward
            gradients = call.backward(saved, grads, ctx.needs_input_grad[1:])
        for layer in call.plan.graph.quantized_layers:
            note_gradient(layer)
        return (None, *gradients)


# ---- second derivatives ---------------------------------------------------------------------------------------------


def _differentiable_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    call: Call = ctx.call
    plan = call.plan
    call.check_second_derivatives()
    saved = dict(zip(plan.saved, ctx.saved_tensors, strict=True))
    arguments = [saved.get(name) if name in saved else _unsaved(ctx, i) for i, name in enumerate(plan.graph.arguments)]
    with without_autocast(plan.environment.device):
        return (None, *call.differentiable(ctx.needs_input_grad[1:]).run(arguments, saved, grads))


def _held(call: Call, arguments: Sequence[Tensor | None]) -> dict[int, Held] | None:
    """Return what second derivatives take besides what the plan keeps, by place; None where it cannot be held."""
    held: dict[int, Held] = {}
    try:
        for i, kept_alive in call.held:
            t: Any = arguments[i]
            if kept_alive:
                held[i] = t, t._version, None, 0
            elif (base := t._base) is None:
                held[i] = ref(t), t._version, None, 0
            else:
                held[i] = ref(base), t._version, call.tensors[i], t.storage_offset()
    except RuntimeError:  # made in inference mode: nobody counts its changes
        return None
    return held


def _held_uncast(call: Call, arguments: Sequence[Tensor | None]) -> dict[int, Held]:
    """Return the same of arguments before autocast has cast them."""
    held: dict[int, Held] = {}
    kinds = signature(arguments)
    for i, kept_alive in call.held:
        t: Any = arguments[i]
        if not kept_alive and not t.is_inference():
            reference = t if type(t) is nn.Parameter else ref(t if t._base is None else t._base)
            view = isinstance(reference, ref) and t._base is not None
            held[i] = reference, t._version, kinds[i] if view else None, t.storage_offset()
    return held


def _unsaved(ctx: Any, i: int) -> Tensor | None:
    """Return an argument that the plan does not keep, as autograd knows it: with the graph that it was computed by."""
    call: Call = ctx.call
    kind, name = call.tensors[i], call.plan.graph.arguments[i]
    if kind is None or i not in call.unsaved:
        return None
    accumulate = ctx.next_functions[sum(other is not None for other in call.tensors[:i])][0]
    if hasattr(accumulate, "variable"):  # a parameter, or another leaf
        return accumulate.variable  # type: ignore[no-any-return]
    t = _again(name, ctx.held.get(i)) if ctx.held else None
    if t is None and (uncast := getattr(ctx, "uncast", {}).get(i)) is not None:  # what was cast was for the call alone
        t = _again(name, uncast)
        if t is not None:
            with torch.enable_grad():
                t = t.to(kind[2])
    if t is None:
        raise SecondOrderError(
            f"second derivatives (create_graph=True): {name}, which the call was given, is gone, and the backward pass "
            f"alone does not need it; keep a reference to it until then"
        )
    return t


def _again(name: str, held: Held | None) -> Tensor | None:
    """Return a tensor that was held, as it was then; None if it is gone."""
    if held is None:
        return None
    reference, version, view, offset = held
    t: Any = reference() if isinstance(reference, ref) else reference
    if t is None:
        return None
    if hasattr(t, "_fix_weakref"):  # it may have been autograd's alone, and be freed under Python's hands
        t._fix_weakref()
    if t._version != version:
        raise SecondOrderError(
            f"second derivatives (create_graph=True): {name} has been modified by an inplace operation since the call: "
            f"it is at version {t._version}, expected version {version}"
        )
    if view is not None:
        _, shape, _, differentiable, _, strides, _ = view
        with torch.set_grad_enabled(differentiable):
            t = t.as_strided(shape, strides, offset)
    return t  # type: ignore[no-any-return]


# What `Function.apply` calls in turn, past what it does for functorch first: that takes as long as a kernel's launch.
_apply = super(torch.autograd.Function, _RunPlan).apply


def run_call(
    call: Call, arguments: Sequence[Tensor | None], uncast: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Run a plan's forward steps and, if it has gradients to give, let autograd run its backward steps, once, later.

    ``uncast`` are the arguments before autocast has cast some of them.
    """
    if not call.plan.wanted:
        return call.run([*arguments], *call.runs)[0]  # type: ignore[return-value]
    if torch._C._are_functorch_transforms_active():
        return _RunPlan.apply(call, *arguments)  # type: ignore[no-untyped-call, no-any-return]
    outputs: tuple[Tensor, ...] = _apply(call, *arguments)  # type: ignore[no-untyped-call]
    if uncast is not None and call.held:
        outputs[0].grad_fn.uncast = _held_uncast(call, uncast)  # type: ignore[union-attr]
    return outputs
