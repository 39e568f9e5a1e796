"""The autograd function that runs a plan: its forward steps, and its backward steps on the saved values.

Under ``create_graph=True`` the backward pass runs unfused and autograd records it, so that the gradients have
gradients; see `fusedmoe.fusion.program.differentiable`. This backward pass needs all arguments of the chain, including
those that the plan does not save:

- Autograd's graph has the trained parameters.
- This module holds small inputs and frozen parameters.
- For rows, and for tensors computed for this call (such as a weight cast by autocast), it holds weak references. The
  caller must keep these tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn

from fusedmoe.base.autocast import without_autocast
from fusedmoe.base.errors import InputError
from fusedmoe.fusion.language.rule import RuleError
from fusedmoe.fusion.program.differentiable import SecondOrderError
from fusedmoe.fusion.program.plan import BoundPlan
from fusedmoe.fusion.program.signature import DTYPE, signature
from fusedmoe.ops.op import Op
from fusedmoe.ops.state import grad_sums, unrounded_grads, weight_cache

Held: TypeAlias = tuple[Tensor | ref[Tensor], int, ref[Tensor] | None, tuple[Any, ...] | None, int]


class _RunPlan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: BoundPlan, *arguments: Tensor | None) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...]
        outputs, saved = call.run([*arguments], *call.runs)  # type: ignore[assignment]
        ctx.call = call
        ctx.save_for_backward(*saved)
        if call.held:
            ctx.held = _held(call, arguments)
        if call.trained:
            ctx.versions = _versions(call, arguments)
        if call.quantized_weights:
            ctx.passed = weight_cache.trained_of_call()
        if call.summed_weights:
            # hooks on these tensors must get their gradients
            ctx.views = {op: arguments[i] for op, i, _ in call.summed_weights if op.transposed_grad}
        if len(outputs) > 1:
            ctx.mark_non_differentiable(*[t for t in outputs if not t.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: BoundPlan = ctx.call
        try:
            if torch.is_grad_enabled():  # under create_graph=True
                return _differentiable_gradients(ctx, *grads)
            unrounded: dict[Op, unrounded_grads.Unrounded] = {}
            with without_autocast(call.plan.environment.device):  # the dtypes were settled in forward
                saved = [*ctx.saved_tensors]
                # otherwise, autograd would hold all of them until the last step, unlike those of separate nodes
                ctx.maybe_clear_saved_tensors()  # not under retain_graph=True
                if call.summed_weights:
                    nodes = _nodes_of_weights(ctx)
                    sums, unrounded = grad_sums.find(nodes, in_graph=False), unrounded_grads.find(nodes)
                    with grad_sums.offered(sums), unrounded_grads.offered(unrounded):
                        gradients = call.backward(saved, grads, ctx.needs_input_grad[1:])
                else:
                    gradients = call.backward(saved, grads, ctx.needs_input_grad[1:])
            if unrounded:
                gradients = unrounded_grads.with_given(unrounded, gradients)
            for layer, i in call.quantized_weights:
                weight_cache.note_gradient(layer, gradients[i], ctx.passed.get(layer))
            if call.summed_weights:
                gradients = grad_sums.without_sums(sums, gradients)
            if unrounded:
                gradients = unrounded_grads.without_given(unrounded, gradients)
            return (None, *gradients)
        except Exception as error:
            _raise_if_batched(call, grads, error)
            raise


def _nodes_of_weights(ctx: Any) -> list[tuple[Op, Any, Tensor | None]]:
    """Return the arguments of `grad_sums.find`."""
    nodes, views = ctx.next_functions, ctx.views
    return [(op, nodes[i][0], views.get(op)) for op, _, i in ctx.call.summed_weights]


def _raise_if_batched(call: BoundPlan, grads: Sequence[Tensor | None], error: Exception) -> None:
    """Raise an error that names the reason if the gradients are a batch: the error of torch names only an operator."""
    if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grads):
        raise InputError(
            f"{_ops_of(call)}: backward: expected one gradient, got a batch of gradients (is_grads_batched=True, "
            f"vectorize=True), which a step does not support; compute them one by one (vectorize=False)"
        ) from error


# ---- second derivatives ---------------------------------------------------------------------------------------------


def _differentiable_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    call: BoundPlan = ctx.call
    plan = call.plan
    call.check_second_derivatives()
    saved = dict(zip(plan.saved_tensors, ctx.saved_tensors, strict=True))
    arguments = [saved.get(name) if name in saved else _unsaved(ctx, i) for i, name in enumerate(plan.graph.arguments)]
    with without_autocast(plan.environment.device):
        return (None, *call.differentiable(ctx.needs_input_grad[1:]).run(arguments, saved, grads))


def _versions(call: BoundPlan, arguments: Sequence[Tensor | None]) -> list[int]:
    """Return the versions of the trained parameters that the plan does not save."""
    try:
        return [arguments[i]._version for i in call.trained]  # type: ignore[union-attr]
    except RuntimeError:  # a tensor made in inference mode has no version
        return [-1 if (t := arguments[i]) is None or t.is_inference() else t._version for i in call.trained]


def _held(call: BoundPlan, arguments: Sequence[Tensor | None]) -> dict[int, Held] | None:
    """Return the arguments to hold for second derivatives, by index; None if they cannot be held."""
    held: dict[int, Held] = {}
    try:
        for i, kept_alive in call.held:
            t: Any = arguments[i]
            held[i] = (t, t._version, None, None, 0) if kept_alive else _referred(t, call.tensors[i])
    except RuntimeError:  # a tensor made in inference mode has no version
        return None
    return held


def _held_uncast(call: BoundPlan, arguments: Sequence[Tensor | None]) -> dict[int, Held]:
    """Return the same for the arguments before autocast."""
    held: dict[int, Held] = {}
    kinds = signature(arguments)
    for i, kept_alive in call.held:
        t: Any = arguments[i]
        if not kept_alive and not t.is_inference():
            held[i] = (t, t._version, None, None, 0) if type(t) is nn.Parameter else _referred(t, kinds[i])
    return held


def _referred(t: Any, kind: tuple[Any, ...] | None) -> Held:
    """Return a weak reference to a tensor and, if the tensor can be recreated as a view, to its base."""
    base = t._base
    if base is None or t._backward_hooks:  # a recreated view would lack the hooks
        return ref(t), t._version, None, None, 0
    return ref(t), t._version, ref(base), kind, t.storage_offset()


def _unsaved(ctx: Any, i: int) -> Tensor | None:
    """Return an argument that the plan does not save, with its autograd graph."""
    call: BoundPlan = ctx.call
    kind, name = call.tensors[i], call.plan.graph.arguments[i]
    if kind is None or i not in call.unsaved:
        return None
    accumulate = ctx.next_functions[sum(other is not None for other in call.tensors[:i])][0]
    held = (getattr(ctx, "held", None) or {}).get(i)
    if hasattr(accumulate, "variable"):  # a parameter, or another leaf
        t = accumulate.variable
        if not t.is_inference():  # an inference tensor has no version
            _check_version(name, t, held[1] if held else ctx.versions[call.trained.index(i)])
        return t  # type: ignore[no-any-return]
    t = _again(name, held, accumulate)
    if t is None and (uncast := getattr(ctx, "uncast", {}).get(i)) is not None:  # the cast tensor was freed
        t = _again(name, uncast, accumulate.next_functions[0][0] if accumulate is not None else None)
        if t is not None:
            with torch.enable_grad():
                t = t.to(kind[DTYPE])
    if t is None:
        raise SecondOrderError(
            f"second derivatives (create_graph=True): {name}, an argument of the call, was freed, since first "
            f"derivatives do not need it; keep a reference to it until the backward pass. This is impossible between "
            f"two parts of a Sequential, such as around an op with hooks: remove the hooks"
        )
    return t  # type: ignore[no-any-return]


def _again(name: str, held: Held | None, node: Any) -> Tensor | None:
    """Return a held tensor as it was in the call; None if it was freed. ``node`` is its autograd node."""
    if held is None:
        return None
    reference, version, base, view, offset = held
    t: Any = _alive(reference)
    if t is not None:
        _check_version(name, t, version)
        return t  # type: ignore[no-any-return]
    source: Any = None if base is None else _alive(base)
    if source is None or view is None:
        return None
    _check_version(name, source, version)
    _, shape, _, differentiable, _, strides, _ = view
    if differentiable and not _only_views(node, source):
        return None
    with torch.set_grad_enabled(differentiable):
        return source.as_strided(shape, strides, offset)  # type: ignore[no-any-return]


def _alive(held: Tensor | ref[Tensor]) -> Tensor | None:
    t: Any = held() if isinstance(held, ref) else held
    if hasattr(t, "_fix_weakref"):  # autograd may have been the only owner of the tensor, and may free it
        t._fix_weakref()
    return t  # type: ignore[no-any-return]


def _check_version(name: str, t: Tensor, version: int) -> None:
    if t._version != version:
        raise SecondOrderError(
            f"second derivatives (create_graph=True): {name} has been modified by an inplace operation since the call: "
            f"it is at version {t._version}, expected version {version}"
        )


def _only_views(node: Any, base: Tensor) -> bool:
    """Whether only view operators of torch lead from a base to its view.

    A ``torch.autograd.Function`` may also return a view of its input, but with a gradient of its own.
    """
    end = base.grad_fn
    while node is not None and node is not end and not hasattr(node, "variable"):
        if isinstance(node, torch.autograd.function.BackwardCFunction) or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return node is not None


# `Function.apply` without its work for functorch, which takes as long as a kernel launch
_apply = super(torch.autograd.Function, _RunPlan).apply


def run_call(
    call: BoundPlan, arguments: Sequence[Tensor | None], uncast: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Run the forward steps of a plan; if gradients are required, autograd records its backward steps.

    ``uncast`` are the arguments before autocast.
    """
    if call.quantized_weights:
        passed = weight_cache.passed_weights(call.quantized_weights, arguments if uncast is None else uncast)
        if passed:
            with weight_cache.passing(passed):
                return _run(call, arguments, uncast)
    return _run(call, arguments, uncast)


class Kept(NamedTuple):
    """A run of forward steps without autograd: the plan, the values that its backward steps read, and the parameters
    of weights that the call passes.
    """

    call: BoundPlan
    saved: list[Tensor | None]
    passed: dict[Op, Tensor]

    @classmethod
    def by(cls, call: BoundPlan, arguments: Sequence[Tensor | None], uncast: Sequence[Tensor | None]) -> Kept:
        """Run the forward steps; ``uncast`` are the arguments before autocast."""
        with weight_cache.passing(weight_cache.passed_weights(call.quantized_weights, uncast)):
            _, saved = call.run([*arguments], *call.runs)
            return cls(call, [*saved], weight_cache.trained_of_call())

    def gradients(
        self, grads: Sequence[Tensor | None], wanted: tuple[bool, ...], sums: dict[Op, Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Run the backward steps, once. A kernel may add the gradient of an op's weight to ``sums``: that is then the
        gradient.
        """
        with grad_sums.offered({op: grad_sums.Sum(total, total) for op, total in sums.items()}):
            gradients = self.call.backward(self.saved, grads, wanted)
        for layer, i in self.call.quantized_weights:
            weight_cache.note_gradient(layer, gradients[i], self.passed.get(layer))
        return gradients


def _run_in_transform(call: BoundPlan, arguments: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Run a call inside a transform of torch.func, without gradients, if its steps can; raise otherwise."""
    reason: Exception | None = None
    if not call.plan.wanted:
        try:
            return call.run([*arguments], *call.runs)[0]  # type: ignore[return-value]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, RuleError) as error:
            reason = error
    raise InputError(
        f"{_ops_of(call)}: expected a call outside of the transforms of torch.func (vmap, grad, jvp, ...), got one "
        f"inside, where these ops cannot run; for a batch, give its rows in one tensor or loop over it, and for "
        f"gradients use torch.autograd"
    ) from reason


def _ops_of(call: BoundPlan) -> str:
    return ", ".join([f"{label}.{type(op).__name__}" for label, op in call.plan.graph.nodes])


def _run(
    call: BoundPlan, arguments: Sequence[Tensor | None], uncast: Sequence[Tensor | None] | None
) -> tuple[Tensor, ...]:
    if torch._C._are_functorch_transforms_active():
        return _run_in_transform(call, arguments)
    if not call.plan.wanted:
        return call.run([*arguments], *call.runs)[0]  # type: ignore[return-value]
    outputs: tuple[Tensor, ...] = _apply(call, *arguments)  # type: ignore[no-untyped-call]
    if uncast is not None and call.held:
        node: Any = next(t.grad_fn for t in outputs if t.grad_fn is not None)  # an index has none
        node.uncast = _held_uncast(call, uncast)
    return outputs
