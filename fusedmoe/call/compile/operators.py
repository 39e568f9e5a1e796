"""The operators that run a chain in a graph of `torch.compile`, forward and backward.

    fusedmoe::run_chain(handle, kinds, tensors) -> results, kept
    fusedmoe::run_chain_backward(plan, sizes, saved, grads, kinds, number) -> gradients

An operator takes texts, numbers and tensors only. `fusedmoe.call.compile.handles` has the chains and plans that the
texts refer to. The fake implementations return tensors like those of the plan's steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedmoe.base.autocast import without_autocast
from fusedmoe.call.compile.handles import (
    WANTS_GRADIENT,
    CompiledPlan,
    arguments_of,
    decode,
    encode,
    encode_shapes,
    handle_for_call,
    plan_of,
    plan_of_key,
)
from fusedmoe.fusion.graph.steps import Fused
from fusedmoe.fusion.language.rule import RuleError
from fusedmoe.fusion.program.differentiable import SecondOrderError
from fusedmoe.ops.op import SpecLike, TensorSpec
from fusedmoe.ops.state import grad_sums

# ---- forward -------------------------------------------------------------------------------------------------------


def _forward(handle: str, kinds: str, tensors: list[Tensor]) -> list[Tensor]:
    """Return the chain's results, and the values for backward that are none of its arguments."""
    handle = handle_for_call(handle, WANTS_GRADIENT in kinds, tensors)
    arguments = arguments_of(handle, kinds, tensors)
    traced = plan_of(handle, kinds, arguments)
    call = traced.call(arguments)
    with torch.no_grad(), without_autocast(tensors[0].device):
        outputs, saved = call.run([*arguments], *call.runs)
    by_name = dict(zip(traced.plan.saved_tensors, saved, strict=True))
    return _own((*outputs, *[by_name[v] for v in traced.kept]), tensors)


def _own(results: Sequence[Tensor | None], arguments: Sequence[Tensor]) -> list[Tensor]:
    """Return the results as an operator may: contiguous, none in the memory of an argument or of another result."""
    taken = {t.untyped_storage().data_ptr() for t in arguments if t.numel()}
    own = []
    for t in results:
        assert t is not None
        result = t.contiguous()
        if result.numel() and result.untyped_storage().data_ptr() in taken:
            result = result.clone()
        taken.add(result.untyped_storage().data_ptr())
        own.append(result)
    return own


def _forward_fake(handle: str, kinds: str, tensors: list[Tensor]) -> list[Tensor]:
    arguments = arguments_of(handle, kinds, tensors)
    traced = plan_of(handle, kinds, arguments)
    specs = traced.plan.infer(arguments)
    return [_empty(specs[v], tensors[0]) for v in (*traced.plan.graph.outputs, *traced.kept)]


def _empty(spec: SpecLike | None, like: Tensor) -> Tensor:
    assert spec is not None
    return like.new_empty(tuple(spec.shape), dtype=spec.dtype)


# ---- backward ------------------------------------------------------------------------------------------------------


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    handle, kinds, tensors = inputs
    arguments = arguments_of(handle, kinds, tensors)
    ctx.traced = traced = plan_of(handle, kinds, arguments)
    values: dict[str, Tensor | None] = dict(zip(traced.names, decode(kinds, tensors), strict=True))
    values.update(zip((*traced.plan.outputs, *traced.kept), output, strict=True))
    saved = [values[v] for v in traced.saved]
    ctx.save_for_backward(*[t for t in saved if t is not None])
    ctx.kinds, ctx.number = _encode_saved(traced, saved)
    ctx.present = [a is not None for a in arguments]
    ctx.sizes = encode_shapes(arguments)


def _encode_saved(traced: CompiledPlan, saved: Sequence[Tensor | None]) -> tuple[str, int]:
    """Return the letters of saved tensors, with that of a wanted gradient for each weight whose gradients kernels may
    add; and the number of the call, so that no two calls which add are equal.
    """
    weights = {name for _, name in traced.plan.summed_weights}
    letters = [*encode(saved)]
    for i, (name, t) in enumerate(zip(traced.saved, saved, strict=True)):
        if name in weights and t is not None and grad_sums.is_input(t, name in traced.transposed):
            letters[i] = WANTS_GRADIENT
    return "".join(letters), next(traced.numbers) if WANTS_GRADIENT in letters else 0


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[None, None, list[Tensor | None]]:
    if torch.is_grad_enabled():  # AOTAutograd, which refuses them too, does not trace with gradients of gradients
        raise SecondOrderError(
            "second derivatives (create_graph=True): a compiled graph has none; call the module without torch.compile"
        )
    traced: CompiledPlan = ctx.traced
    arrived = grads[: len(traced.plan.outputs)]  # the values kept for backward have no gradients
    present = [g for g in arrived if g is not None]
    kinds = ctx.kinds + encode(arrived)
    found = iter(
        torch.ops.fusedmoe.run_chain_backward(traced.key, ctx.sizes, [*ctx.saved_tensors], present, kinds, ctx.number)
    )
    gradients = [next(found) if g else None for g, p in zip(traced.gradients, ctx.present, strict=True) if p]
    return None, None, gradients


def _backward(
    plan: str, sizes: list[int], saved: list[Tensor], grads: list[Tensor], kinds: str, number: int = 0
) -> list[Tensor]:
    """Return a gradient for each argument that gets one."""
    traced = plan_of_key(plan)
    decoded = decode(kinds, (*saved, *grads))
    values, arrived = dict(zip(traced.saved, decoded, strict=False)), decoded[len(traced.saved) :]
    with torch.no_grad(), without_autocast((*saved, *grads)[0].device):
        kept = [t.mT if v in traced.transposed and t is not None else t for v, t in values.items()]
        inputs = {
            name: t for name, t, kind in zip(traced.saved, decoded, kinds, strict=False) if kind == WANTS_GRADIENT
        }
        weights = [(op, inputs[name]) for op, name in traced.plan.summed_weights if name in inputs]
        nodes = [(op, grad_sums.node_of(weight), None) for op, weight in weights if weight is not None]
        sums = grad_sums.find(nodes, in_graph=True)
        with grad_sums.offered(sums):
            found = traced.backward_call(sizes).backward(kept, arrived, traced.gradients)
    gradients = [t for t, g in zip(found, traced.gradients, strict=True) if g]
    if not traced.checked:
        _check_gradients(traced, sizes, gradients)
        traced.checked = True
    grad_sums.hand_over(sums, gradients)
    names = [name for name, g in zip(traced.names, traced.gradients, strict=True) if g]
    return _own(_in_layout(traced, zip(names, gradients, strict=True)), (*saved, *grads))


def _in_layout(traced: CompiledPlan, gradients: Iterable[tuple[str, Tensor | None]]) -> list[Tensor | None]:
    """Return the gradients of the tensors that the operator took."""
    return [t.mT if name in traced.transposed and t is not None else t for name, t in gradients]


def _backward_fake(
    plan: str, sizes: list[int], saved: list[Tensor], grads: list[Tensor], kinds: str, number: int = 0
) -> list[Tensor]:
    like = (*saved, *grads)[0]
    traced = plan_of_key(plan)
    gradients = [(name, _empty(spec, like)) for name, spec in _expected_gradients(traced, sizes)]
    return [t.contiguous() for t in _in_layout(traced, gradients) if t is not None]


def _expected_gradients(traced: CompiledPlan, sizes: list[int]) -> list[tuple[str, TensorSpec]]:
    """Return each argument that gets a gradient, with the gradient's spec."""
    specs = zip(traced.names, traced.specs(sizes), traced.gradients, strict=True)
    return [(name, spec) for name, spec, gets_one in specs if gets_one and spec is not None]


def _check_gradients(traced: CompiledPlan, sizes: list[int], found: Sequence[Tensor | None]) -> None:
    """Raise `RuleError` if a rule's step returned another gradient than the graph was made for."""
    for (name, spec), g in zip(_expected_gradients(traced, sizes), found, strict=True):
        if g is None or g.shape != spec.shape or g.dtype != spec.dtype:
            got = "None" if g is None else f"shape {tuple(g.shape)} and dtype {g.dtype}"
            rules = sorted({span.step.rule for span in traced.plan.spans if isinstance(span.step, Fused)})
            raise RuleError(
                f"the gradient of {name}: expected shape {spec.shape} and dtype {spec.dtype}, got {got}, from a step "
                f"of {' or '.join(rules) or 'an op'}; a call without torch.compile names the step"
            )


_library = torch.library.Library("fusedmoe", "FRAGMENT")
_library.define("run_chain(str handle, str kinds, Tensor[] tensors) -> Tensor[]")
_library.define(
    "run_chain_backward(str plan, SymInt[] sizes, Tensor[] saved, Tensor[] grads, str kinds, int number=0) -> Tensor[]"
)
_library.impl("run_chain", _forward, "CompositeExplicitAutograd")
_library.impl("run_chain_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("fusedmoe::run_chain", _forward_fake, lib=_library)
torch.library.register_fake("fusedmoe::run_chain_backward", _backward_fake, lib=_library)
torch.library.register_autograd("fusedmoe::run_chain", _differentiate, setup_context=_keep_for_backward, lib=_library)
