"""torch: `F.grouped_mm`, with eager or compiled pointwise functions.

The functions are compiled for each shape, since dynamic shapes prevent vectorised loads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Candidate
from benchmarks.problem import Problem
from fusedmoe.numerics.activations import Activation

EAGER, COMPILED = "torch eager", "torch compiled"


class TorchCompiled:
    """The cases with pointwise functions; these are compiled."""

    name = COMPILED

    def fc1_activation(self, problem: Problem) -> Candidate:
        pointwise = self._pointwise(bias_glu, problem)
        x, w, offsets, b, expert = *_operands(problem, "x", "weight1"), problem.bias1, problem.expert_of_row

        def call() -> tuple[Tensor, Tensor]:
            return pointwise(F.grouped_mm(x, w.mT, offs=offsets), b, expert)

        return Candidate(call, ("output", "preactivation"))

    def fc2(self, problem: Problem) -> Candidate | None:
        if problem.bias2 is None:
            return None  # nothing to compile
        pointwise = torch.compile(add_bias, dynamic=False)
        x, w, offsets, b, expert = *_operands(problem, "activated", "weight2"), problem.bias2, problem.expert_of_row
        return Candidate(lambda: pointwise(F.grouped_mm(x, w.mT, offs=offsets), b, expert))

    def fc2_dgrad_activation(self, problem: Problem) -> Candidate:
        pointwise = self._pointwise(dglu, problem)
        dy, w, offsets, p = *_operands(problem, "grad_y", "weight2"), problem.preactivation
        return Candidate(lambda: pointwise(F.grouped_mm(dy, w, offs=offsets), p), ("grad_preactivation", "output"))

    def fc2_dgrad_activation_scaled(self, problem: Problem) -> Candidate:
        pointwise = self._pointwise(dglu_scaled, problem)
        dy, w, offsets, p, s = *_operands(problem, "grad_y", "weight2"), problem.preactivation, problem.row_scale
        return Candidate(
            lambda: pointwise(F.grouped_mm(dy, w, offs=offsets), p, s),
            ("grad_preactivation", "output", "grad_row_scale"),
        )

    def scaled_activation(self, problem: Problem) -> Candidate:
        pointwise, p, s = self._pointwise(glu_scaled, problem), problem.preactivation, problem.row_scale
        return Candidate(lambda: pointwise(p, s))

    def scaled_activation_backward(self, problem: Problem) -> Candidate:
        pointwise, d = self._pointwise(dglu_scaled_alone, problem), problem.grad_activated
        p, s = problem.preactivation, problem.row_scale
        return Candidate(lambda: pointwise(d, p, s), ("grad_preactivation", "grad_row_scale"))

    def mlp_forward(self, problem: Problem) -> Candidate:
        call, _ = self._mlp(problem)
        return Candidate(call)

    def mlp_step(self, problem: Problem) -> Candidate:
        (call, leaves), dy = self._mlp(problem), problem.grad_y
        wanted = tuple(leaves.values())
        return Candidate(lambda: torch.autograd.grad(call(), wanted, dy), tuple(leaves))

    def _mlp(self, problem: Problem) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
        """Return the chain under autograd, and its leaves by the names of their gradients."""
        pointwise = self._pointwise(bias_glu_alone, problem)
        offsets, expert = problem.offsets, problem.expert_of_row
        leaves = leaves_of(problem)
        x, w1, w2 = (leaves[name] for name in ("grad_x", "grad_weight1", "grad_weight2"))
        b1, b2 = leaves.get("grad_bias1"), leaves.get("grad_bias2")

        def call() -> Tensor:
            activated = pointwise(F.grouped_mm(x, w1.mT, offs=offsets), b1, expert)
            y = F.grouped_mm(activated, w2.mT, offs=offsets)
            return y if b2 is None else add_bias(y, b2, expert)

        return call, leaves

    def _pointwise(self, function: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
        compiled = torch.compile(function, dynamic=False)
        return functools.partial(compiled, activation=problem.activation)


class TorchEager(TorchCompiled):
    """All cases, without torch.compile."""

    name = EAGER

    def fc2(self, problem: Problem) -> Candidate:
        x, w, offsets = _operands(problem, "activated", "weight2")
        b, expert = problem.bias2, problem.expert_of_row
        if b is None:
            return Candidate(lambda: F.grouped_mm(x, w.mT, offs=offsets))
        return Candidate(lambda: add_bias(F.grouped_mm(x, w.mT, offs=offsets), b, expert))

    def fc1_dgrad(self, problem: Problem) -> Candidate:
        dp, w, offsets = _operands(problem, "grad_preactivation", "weight1")
        return Candidate(lambda: F.grouped_mm(dp, w, offs=offsets))

    def wgrad1(self, problem: Problem) -> Candidate:
        dp, x, offsets = _operands(problem, "grad_preactivation", "x")
        return Candidate(lambda: F.grouped_mm(dp.mT, x, offs=offsets), ("grad_weight1",))

    def wgrad2(self, problem: Problem) -> Candidate:
        dy, x, offsets = _operands(problem, "grad_y", "activated")
        return Candidate(lambda: F.grouped_mm(dy.mT, x, offs=offsets), ("grad_weight2",))

    def fc1(self, problem: Problem) -> Candidate:
        x, w, offsets = _operands(problem, "x", "weight1")
        return Candidate(lambda: F.grouped_mm(x, w.mT, offs=offsets))

    def fc2_plain(self, problem: Problem) -> Candidate:
        x, w, offsets = _operands(problem, "activated", "weight2")
        return Candidate(lambda: F.grouped_mm(x, w.mT, offs=offsets))

    def _pointwise(self, function: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
        return functools.partial(function, activation=problem.activation)


def leaves_of(problem: Problem) -> dict[str, Tensor]:
    """Return the operands that get gradients, by the gradients' names; they share the problem's memory."""
    named = {"grad_x": problem.x, "grad_weight1": problem.weight1, "grad_weight2": problem.weight2}
    if problem.bias1 is not None and problem.bias2 is not None:
        named |= {"grad_bias1": problem.bias1, "grad_bias2": problem.bias2}
    return {name: t.detach().requires_grad_() for name, t in named.items()}


class _AddBias(torch.autograd.Function):
    """``y[r] + bias[expert of r]``, with the bias gradient summed in fp32.

    The gradient of index_select sums thousands of rows in bf16, with a relative error of 5 %.
    """

    @staticmethod
    def forward(ctx, y: Tensor, bias_EN: Tensor, expert_R: Tensor) -> Tensor:
        ctx.save_for_backward(expert_R)
        ctx.experts = bias_EN.shape[0]
        return y + bias_EN.index_select(0, expert_R)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (expert_R,) = ctx.saved_tensors
        sums = torch.zeros(ctx.experts, grad.shape[1], dtype=torch.float32, device=grad.device)
        return grad, sums.index_add_(0, expert_R, grad.float()).to(grad.dtype), None


def add_bias(y: Tensor, bias_EN: Tensor, expert_R: Tensor) -> Tensor:
    """``y[r] + bias[expert of r]``"""
    return _AddBias.apply(y, bias_EN, expert_R)


def bias_glu(p: Tensor, bias_EN: Tensor | None, expert_R: Tensor, *, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the activated rows and the preactivation."""
    if bias_EN is not None:
        p = add_bias(p, bias_EN, expert_R)
    return glu(p, activation), p


def bias_glu_alone(p: Tensor, bias_EN: Tensor | None, expert_R: Tensor, *, activation: Activation) -> Tensor:
    return bias_glu(p, bias_EN, expert_R, activation=activation)[0]


def glu(p: Tensor, activation: Activation) -> Tensor:
    gate, up = _clamped(p, activation)
    phi = F.silu(gate) if activation.alpha == 1 else gate * torch.sigmoid(activation.alpha * gate)
    return phi * (up + activation.offset if activation.offset else up)


def dglu(d: Tensor, p: Tensor, *, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the gradient of the preactivation, and the recomputed activated rows."""
    gate, up = _clamped(p, activation)
    shifted = up + activation.offset if activation.offset else up
    s = torch.sigmoid(activation.alpha * gate)
    phi = gate * s
    grad_gate = d * shifted * (s * (1 + activation.alpha * gate * (1 - s)))
    grad_up = d * phi
    if activation.limit is not None:
        raw_gate, raw_up = p.chunk(2, dim=-1)
        grad_gate = grad_gate.masked_fill(raw_gate > activation.limit, 0)
        grad_up = grad_up.masked_fill(raw_up.abs() > activation.limit, 0)
    return torch.cat((grad_gate, grad_up), dim=-1), phi * shifted


def dglu_scaled(d: Tensor, p: Tensor, scale_R: Tensor, *, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `dglu` for rows scaled after the activation, and the scale's gradient, fp32."""
    scale = scale_R[:, None].to(p.dtype)
    grad_p, activated = dglu(d * scale, p, activation=activation)
    return grad_p, activated * scale, (d * activated).sum(-1, dtype=torch.float32)


def dglu_scaled_alone(d: Tensor, p: Tensor, scale_R: Tensor, *, activation: Activation) -> tuple[Tensor, Tensor]:
    grad_p, _, grad_scale = dglu_scaled(d, p, scale_R, activation=activation)
    return grad_p, grad_scale


def glu_scaled(p: Tensor, scale_R: Tensor, *, activation: Activation) -> Tensor:
    return glu(p, activation) * scale_R[:, None].to(p.dtype)


def _clamped(p: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    gate, up = p.chunk(2, dim=-1)
    if activation.limit is None:
        return gate, up
    return gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)


def _operands(problem: Problem, x: str, weight: str) -> tuple[Tensor, Tensor, Tensor]:
    return getattr(problem, x), getattr(problem, weight), problem.offsets
