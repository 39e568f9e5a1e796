"""References for the measured kernels: one expert, in fp64, from the exact operands.

The forward formulas are independent of the package; autograd computes the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.problem import Problem
from fusedmoe.numerics.activations import Activation

Outputs = dict[str, Tensor]


def glu(p: Tensor, activation: Activation) -> Tensor:
    """``g sigmoid(alpha g) (u + offset)`` of ``[gate | up]``, clamped by the limit, if any."""
    gate, up = p.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return gate / (1 + torch.exp(-activation.alpha * gate)) * (up + activation.offset)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
    y = x.double() @ weight[expert].double().T
    return y if bias is None else y + bias[expert].double()


def fc1_activation(problem: Problem, expert: int) -> Outputs:
    rows = problem.rows_of(expert)
    p = _linear(problem.x[rows], problem.weight1, problem.bias1, expert)
    return {"output": glu(p, problem.activation), "preactivation": p}


def fc2(problem: Problem, expert: int) -> Outputs:
    rows = problem.rows_of(expert)
    return {"output": _linear(problem.activated[rows], problem.weight2, problem.bias2, expert)}


def fc2_dgrad_activation(problem: Problem, expert: int) -> Outputs:
    d = problem.grad_y[problem.rows_of(expert)].double() @ problem.weight2[expert].double()
    return _glu_backward(problem, expert, d)


def fc2_dgrad_activation_scaled(problem: Problem, expert: int) -> Outputs:
    d = problem.grad_y[problem.rows_of(expert)].double() @ problem.weight2[expert].double()
    return _glu_backward(problem, expert, d, _scale(problem, expert))


def _scale(problem: Problem, expert: int) -> Tensor:
    return problem.row_scale[problem.rows_of(expert)].double()


def _glu_backward(problem: Problem, expert: int, d: Tensor, scale: Tensor | None = None) -> Outputs:
    """For the gradient d of the activated rows."""
    rows = problem.rows_of(expert)
    p = problem.preactivation[rows].double().requires_grad_()
    with torch.enable_grad():
        activated = glu(p, problem.activation)
    scaled = d if scale is None else d * scale[:, None]
    (grad_p,) = torch.autograd.grad(activated, p, scaled)
    activated = activated.detach()
    if scale is None:
        return {"grad_preactivation": grad_p, "output": activated}
    grad_scale = (d * activated).sum(-1)
    return {"grad_preactivation": grad_p, "output": activated * scale[:, None], "grad_row_scale": grad_scale}


def scaled_activation(problem: Problem, expert: int) -> Outputs:
    rows = problem.rows_of(expert)
    return {"output": glu(problem.preactivation[rows].double(), problem.activation) * _scale(problem, expert)[:, None]}


def scaled_activation_backward(problem: Problem, expert: int) -> Outputs:
    d = problem.grad_activated[problem.rows_of(expert)].double()
    found = _glu_backward(problem, expert, d, _scale(problem, expert))
    del found["output"]
    return found


def fc1_dgrad(problem: Problem, expert: int) -> Outputs:
    rows = problem.rows_of(expert)
    return {"output": problem.grad_preactivation[rows].double() @ problem.weight1[expert].double()}


def wgrad1(problem: Problem, expert: int) -> Outputs:
    rows = problem.rows_of(expert)
    return {"grad_weight1": problem.grad_preactivation[rows].double().T @ problem.x[rows].double()}


def wgrad2(problem: Problem, expert: int) -> Outputs:
    rows = problem.rows_of(expert)
    return {"grad_weight2": problem.grad_y[rows].double().T @ problem.activated[rows].double()}


def fc1(problem: Problem, expert: int) -> Outputs:
    """FC1 without bias and activation: a plain product."""
    return {"output": _linear(problem.x[problem.rows_of(expert)], problem.weight1, None, expert)}


def fc2_plain(problem: Problem, expert: int) -> Outputs:
    return {"output": _linear(problem.activated[problem.rows_of(expert)], problem.weight2, None, expert)}


def mlp_forward(problem: Problem, expert: int) -> Outputs:
    rows = problem.rows_of(expert)
    p = _linear(problem.x[rows], problem.weight1, problem.bias1, expert)
    return {"output": _linear(glu(p, problem.activation), problem.weight2, problem.bias2, expert)}


def mlp_step(problem: Problem, expert: int) -> Outputs:
    """Every gradient of the two layers for the output gradient ``grad_y``."""
    rows = problem.rows_of(expert)
    named = {
        "grad_x": problem.x[rows],
        "grad_weight1": problem.weight1[expert],
        "grad_weight2": problem.weight2[expert],
    }
    if problem.bias1 is not None and problem.bias2 is not None:
        named |= {"grad_bias1": problem.bias1[expert], "grad_bias2": problem.bias2[expert]}
    leaves = {name: t.double().requires_grad_() for name, t in named.items()}
    with torch.enable_grad():
        p = leaves["grad_x"] @ leaves["grad_weight1"].T + leaves.get("grad_bias1", 0)
        y = glu(p, problem.activation) @ leaves["grad_weight2"].T + leaves.get("grad_bias2", 0)
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), problem.grad_y[rows].double()), strict=True))
