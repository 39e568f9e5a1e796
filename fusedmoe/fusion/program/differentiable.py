"""Gradients of a chain that autograd can differentiate, for ``create_graph=True``.

The forward steps run again from the chain's arguments, then the backward steps. All run in plain PyTorch, and autograd
records them. So the first gradients are those of an unfused backward pass. Their derivatives follow from the ops:

- the `backward_ops` of an op compute its derivative;
- autograd differentiates the `compute` of a backward step.

Rows after the last expert's are zeroed in all arguments, incoming gradients and results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedmoe.fusion.graph.backward import backward_chain
from fusedmoe.fusion.graph.forward import Graph
from fusedmoe.fusion.graph.places import Place, drawn_again
from fusedmoe.fusion.graph.steps import Plain
from fusedmoe.fusion.graph.values import NONE
from fusedmoe.fusion.program.order import needed_steps
from fusedmoe.fusion.program.source import Program
from fusedmoe.ops.op import AutogradBackward, BackwardOp, Op, SpecLike
from fusedmoe.ops.state import random


class SecondOrderError(RuntimeError):
    """Raised for second derivatives (``create_graph=True``) that do not exist, with the reason."""


def why_not(graph: Graph) -> str:
    """Return the reason why the gradients of a chain have no derivatives; an empty text if they have."""
    if graph.all_quantizers:
        return "the chain computes with quantized values, whose rounding has no derivative; use recipe 'bf16'"
    for label, op in graph.nodes:
        if getattr(op, "accumulate_into_main_grad", False):
            return f"{label} has accumulate_into_main_grad=True, so autograd cannot differentiate its gradient"
        if op.travels:
            return f"{label} exchanges tensors with other ranks, which autograd cannot differentiate"
    return ""


class GradientProgram(NamedTuple):
    """Wanted gradients as a function of the chain's arguments and of the incoming gradients."""

    program: Program
    constants: tuple[str, ...]  # the kept values that it takes; they have no gradient
    incoming: tuple[int, ...]  # the outputs whose gradients it takes

    def run(
        self, arguments: Sequence[Tensor | None], kept: Mapping[str, Tensor | None], grads: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return a gradient, or None, for each argument. Autograd records the computation."""
        given = [*arguments, *[kept[v] for v in self.constants], *[grads[i] for i in self.incoming]]
        with torch.enable_grad():
            (results,) = self.program.run(given, *self.program.runs(strict=False))
        return results


def argument_names(graph: Graph, kept: Collection[str]) -> set[str]:
    """Return the arguments that a gradient program may take, if these values are kept."""
    values = {v for step in map(_forward_step, graph.forward) for v in step.needs} & {*graph.arguments}
    return values | {p.step.needs[0] for value, p in graph.derived.items() if value not in kept} | {graph.arguments[0]}


def gradient_program(
    graph: Graph, arguments: Sequence[SpecLike | None], wanted: Sequence[bool], kept: Collection[str]
) -> GradientProgram:
    """Return the program of the wanted gradients. Derived values that are kept are not computed again."""
    names = graph.arguments
    if not set(graph.random_states) <= {*kept}:
        raise SecondOrderError(
            "second derivatives (create_graph=True): an op with draws_random is part of a fused step, which does not "
            "keep the state of the generator"
        )
    specs = graph.infer(dict(zip(names, arguments, strict=True)))
    asked = {name for name, w in zip(names, wanted, strict=True) if w}
    backward = backward_chain(graph, asked, specs)
    forward = [*(place.step for place in graph.derived.values()), *map(_forward_step, graph.forward)]
    steps = [*forward, *map(_backward_step, backward.places), *(place.step for place in backward.sums)]

    # rows and gradients are given under other names: the results of the masks have the names of the values
    rowwise = [names[0], *(name for name in graph.inputs if _is_float(specs[name]))]
    tails = {value: value for value in rowwise} | {g: value for value, g in backward.incoming.items()}
    renamed = {name: f"given {name}" for name, value in tails.items() if graph.tail_offsets(value) is not None}
    for name, given_name in renamed.items():
        mask = graph.zero_tail(tails[name], name)
        assert mask is not None
        steps.append(replace(mask.step, needs=(given_name, *mask.step.needs[1:])))
    # offsets depend on the number of rows alone: they read the given rows, since the masked rows wait for offsets
    counted = graph.tail_offsets(names[0])
    steps = [
        replace(step, needs=(step.needs[0], renamed[names[0]])) if counted in step.gives else step for step in steps
    ]

    gradients = dict.fromkeys(names, NONE) | dict(backward.gradients)
    for name, gradient in backward.gradients.items():
        if (mask := graph.zero_tail(gradient, f"zeroed {gradient}")) is not None:
            steps.append(mask.step)
            gradients[name] = mask.step.gives[0]
    incoming = [(i, backward.incoming[v]) for i, v in enumerate(graph.outputs) if v in backward.incoming]
    constants = (*(value for value in graph.derived if value in kept), *graph.random_states)
    given = [renamed.get(v, v) for v in (*names, *constants, *(g for _, g in incoming))]
    results = [gradients[name] for name in names]
    program = Program(needed_steps(steps, results, given), given, [results], {})
    return GradientProgram(program, constants, tuple(i for i, _ in incoming))


def _is_float(spec: Any) -> bool:
    return spec is not None and bool(spec.dtype.is_floating_point)


# ---- forward steps --------------------------------------------------------------------------------------------------


def _forward_step(place: Place) -> Plain:
    """Return the step of an op, with its backward ops as its derivative."""
    op = place.item
    assert isinstance(op, Op)
    if any(isinstance(item, AutogradBackward) for item in op.backward_ops()):
        return drawn_again(place)  # autograd differentiates `compute`
    read = {"input", *op.parameter_names, *op.runtime_inputs, *op.optional_inputs}
    read.update(random.NAMES, *[item.needs for item in op.backward_ops()])
    made = {"output", *place.provides}
    names = tuple(name for name in place.values if name in read and name not in made)
    run = partial(_run_op, _NamedOp(place, names))
    return replace(place.step, run=run, needs=tuple(place.values[name] for name in names))


class _NamedOp:
    """An op as a function of values by name.

    - ``place``: the place of the op.
    - ``names``: the values that the op and its backward ops may read, by the op's names.
    """

    def __init__(self, place: Place, names: tuple[str, ...]) -> None:
        self.op, self.names = place.op, names
        op = place.op
        self.takes = ("input", *op.parameter_names, *op.runtime_inputs, *op.optional_inputs)
        self.gives = (*(() if op.passes_forward else ("output",)), *place.provides)
        self._keywords = place.keywords

    def outputs(self, values: Mapping[str, Tensor | None]) -> tuple[Tensor, ...]:
        x: Any = values["input"]
        states: Any = [values[name] for name in random.NAMES if name in values] or None
        with random.drawing_again(states, x.device):
            y = self.op.compute(*[values[name] for name in self.takes], **self._keywords)  # type: ignore[arg-type]
        return (y,) if isinstance(y, Tensor) else tuple(y)

    def gradients(self, values: Mapping[str, Tensor | None], wanted: Mapping[str, bool]) -> dict[str, Tensor]:
        """Return the wanted gradients by name, from values and incoming gradients by name."""
        values = dict(values)
        found: dict[str, Tensor] = {}

        def add(name: str, gradient: Tensor) -> None:
            found[name] = found[name] + gradient if name in found else gradient

        dy = values.get("grad_output")
        if self.op.passes_backward and dy is not None and wanted["input"]:
            add("input", dy)
        for item in self.op.backward_ops():
            gives = tuple(g for g in item.gives if self._is_stage(g) or wanted[self._value(g)])
            arriving = [values.get(name) for name in item.needs if name.startswith("grad_")]
            if not gives or all(g is None for g in arriving):
                continue
            kept = item if len(gives) == len(item.gives) else item.only(gives)
            needs = [values.get(name) if name.startswith("grad_") else values[name] for name in kept.needs]
            out = _run_backward_op(kept, *needs)
            for name, gradient in zip(kept.gives, (out,) if isinstance(out, Tensor) else out, strict=True):
                if self._is_stage(name):
                    values[name] = gradient
                elif wanted[self._value(name)]:
                    add(self._value(name), gradient)
        return found

    def _is_stage(self, gradient: str) -> bool:
        return gradient.removeprefix("grad_") in self.op.stages

    def _value(self, gradient: str) -> str:
        name = gradient.removeprefix("grad_")
        return self.op.aliases.get(name, name)


def _run_op(op: _NamedOp, *tensors: Tensor | None) -> Any:
    outputs = _Differentiable.apply(op, *tensors)  # type: ignore[no-untyped-call]
    return outputs if len(outputs) > 1 else outputs[0]


class _Differentiable(torch.autograd.Function):
    """An op whose derivative its backward ops compute, so that autograd can differentiate it twice."""

    @staticmethod
    def forward(ctx: Any, op: _NamedOp, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        outputs = op.outputs(dict(zip(op.names, tensors, strict=True)))
        ctx.op = op
        ctx.save_for_backward(*tensors, *outputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in outputs if not t.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        op: _NamedOp = ctx.op
        values = dict(zip((*op.names, *op.gives), ctx.saved_tensors, strict=True))
        values |= {f"grad_{name}": g for name, g in zip(op.gives, grads, strict=True)}
        wanted = dict(zip(op.names, ctx.needs_input_grad[1:], strict=True))
        found = op.gradients(values, wanted)
        return (None, *[found.get(name) for name in op.names])


# ---- backward steps -------------------------------------------------------------------------------------------------


def _backward_step(place: Place) -> Plain:
    item = place.item
    assert isinstance(item, BackwardOp)
    return replace(place.step, run=partial(_run_backward_op, item))


def _run_backward_op(item: BackwardOp, *needs: Tensor | None) -> Any:
    """Run a backward op, and check that autograd recorded it: every gradient depends on the incoming ones, so one that
    requires no gradient was not recorded.
    """
    if isinstance(item, AutogradBackward) or type(item).__module__.startswith("fusedmoe."):
        return item.compute(*needs)
    recording = torch.is_grad_enabled()
    watched = [
        g.detach().requires_grad_() if recording and name.startswith("grad_") and g is not None and not g.requires_grad
        else g
        for name, g in zip(item.needs, needs, strict=True)
    ]  # fmt: skip
    out = item.compute(*watched)
    for name, gradient in zip(item.gives, (out,) if isinstance(out, Tensor) else out, strict=True):
        if recording and not gradient.requires_grad and gradient.numel():
            raise SecondOrderError(
                f"{item!r}: compute: expected plain PyTorch that autograd can differentiate, for second derivatives "
                f"(create_graph=True), got a {name} that does not depend on {_gradients(item)}"
            )
    return out


def _gradients(item: BackwardOp) -> str:
    return " or ".join(name for name in item.needs if name.startswith("grad_"))
