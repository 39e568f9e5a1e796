"""One autograd function runs a plan: its forward steps, and, from what they kept, its backward steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from fusedmoe.autocast import without_autocast
from fusedmoe.formats.tensor import packed, unpacked
from fusedmoe.ops.weight_cache import note_gradient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fusedmoe.fusion.executable import Call


class _RunPlan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...]
        outputs, saved = call.run([*arguments], *call.runs)  # type: ignore[assignment]
        ctx.call = call
        if call.plan.keeps_quantized:
            saved, ctx.packed = packed(saved)  # type: ignore[assignment]
        ctx.save_for_backward(*saved)
        if len(outputs) > 1:
            ctx.mark_non_differentiable(*[t for t in outputs if not t.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # under create_graph=True
            return _gradients_once(ctx, torch.empty(0, requires_grad=True), *grads)
        return _gradients(ctx, *grads)


def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    call: Call = ctx.call
    saved = unpacked(ctx.saved_tensors, ctx.packed) if call.plan.keeps_quantized else ctx.saved_tensors
    with without_autocast(call.plan.environment.device):  # the dtypes were settled in forward
        gradients = call.backward(saved, grads, ctx.needs_input_grad[1:])
    for layer in call.plan.graph.quantized_layers:
        note_gradient(layer)
    return (None, *gradients)


@once_differentiable
def _gradients_once(ctx: Any, _: Tensor, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients, whose own are an error. They depend on the arguments, also where ``grads`` are constants:
    torch's guard is for those that require a gradient, as the tensor ahead of them does.
    """
    return _gradients(ctx, *grads)


# What `Function.apply` calls in turn, past what it does for functorch first: that takes as long as a kernel's launch.
_apply = super(torch.autograd.Function, _RunPlan).apply


def run_call(call: Call, arguments: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Run a plan's forward steps and, if it has gradients to give, let autograd run its backward steps, once, later."""
    if not call.plan.wanted:
        return call.run([*arguments], *call.runs)[0]  # type: ignore[return-value]
    if torch._C._are_functorch_transforms_active():
        return _RunPlan.apply(call, *arguments)  # type: ignore[no-untyped-call, no-any-return]
    return _apply(call, *arguments)  # type: ignore[no-untyped-call, no-any-return]
