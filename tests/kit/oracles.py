"""The formulas again, written on their own: plain loops and masks, differentiable by autograd, in the dtype that they
are given. Nothing here calls the package's arithmetic; of an op only its settings and parameters are read.

Axes: R rows, E experts, T tokens, K chosen experts per token, H and I features.
"""

import math

import torch
import torch.nn.functional as F

import fusedmoe as fm
from kit.splits import expert_rows


def exact_copies(*tensors):
    """The same values in fp64, as leaves that want gradients."""
    return [t.detach().double().requires_grad_() for t in tensors]


def grouped_linear(x, weight, bias, splits):
    parts, end = [], 0
    for expert, first, end in expert_rows(splits):
        parts.append(F.linear(x[first:end], weight[expert], None if bias is None else bias[expert]))
    return torch.cat([*parts, x.new_zeros(x.shape[0] - end, weight.shape[1])])


def _swish(g, alpha):
    return g / (1 + torch.exp(-alpha * g))


def _gelu_tanh(g, alpha):
    x = alpha * g
    return 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _gelu_erf(g, alpha):
    return 0.5 * g * (1 + torch.erf(alpha * g / math.sqrt(2)))


def _relu(g, alpha):
    return torch.where(g <= 0, 0, g)


GATES = {"swiglu": _swish, "geglu_tanh": _gelu_tanh, "geglu_erf": _gelu_erf, "reglu": _relu}


def glu(x, kind, limit=None, alpha=1.0, offset=0.0, interleaved=False):
    """``phi(gc) * (uc + offset)``; the masks let the gradient through at the bounds themselves."""
    half = x.shape[-1] // 2
    gate, up = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return GATES[kind](gate, alpha) * (up + offset)


def squared_relu(x):
    return torch.where(x <= 0, 0, x * x)


def scale(x, s):
    return x * s.reshape(-1, *[1] * (x.dim() - 1))


def kind_of(op):
    if isinstance(op, fm.GeGLU):
        return "geglu_tanh" if op.approximate == "tanh" else "geglu_erf"
    return {fm.SwiGLU: "swiglu", fm.ReGLU: "reglu"}[type(op)]


def meaning(ops, x, splits=None, probs=None, expert_index=None, expert_weight=None):
    """The function of a chain, op by op; from a `Dispatch` to its `Combine`, one slot at a time."""
    ops = [*ops]
    while ops:
        op = ops.pop(0)
        if isinstance(op, fm.GroupedLoRA):
            update = grouped_linear(grouped_linear(x, op.lora_A.weight, None, splits), op.lora_B.weight, None, splits)
            x = grouped_linear(x, op.base_layer.weight, op.base_layer.bias, splits) + op.lora_B.scale * update
        elif isinstance(op, fm.GroupedLinear):
            x = grouped_linear(x, op.weight, op.bias, splits)
        elif isinstance(op, fm.Linear) and splits is not None:  # rows of no expert come out as zeros
            x = grouped_linear(x, op.weight[None], None if op.bias is None else op.bias[None], splits.sum()[None])
        elif isinstance(op, fm.Linear):
            x = F.linear(x, op.weight, op.bias)
        elif isinstance(op, fm.SquaredReLU):
            x = squared_relu(x)
        elif isinstance(op, fm.Scale):
            x = scale(x, probs)
        elif isinstance(op, fm.Dispatch):
            end = next(i for i, other in enumerate(ops) if isinstance(other, fm.Combine))
            x = _routed(op.num_experts, ops[:end], ops[end].weights, x, expert_index, expert_weight)
            del ops[: end + 1]
        else:
            x = glu(x, kind_of(op), op.limit, op.alpha, op.offset, op.interleaved)
    return x


def _routed(experts, ops, weights, x, expert_index, expert_weight):
    """``y[t] = sum over k of w[t, k] * expert(e[t, k], x[t])``."""
    experts = experts or next(op.num_groups for op in ops if isinstance(op, fm.GroupedLinear))
    rows = [[] for _ in range(len(x))]
    for t, k in slots(expert_index, experts):
        one = torch.bincount(expert_index[t, k][None], minlength=experts)
        row = meaning(ops, x[t : t + 1], splits=one, probs=expert_weight[t, k][None])[0]
        rows[t].append(expert_weight[t, k] * row if weights else row)
    zeros = x.new_zeros(next((len(r[0]) for r in rows if r), x.shape[1]))
    return torch.stack([sum(r, zeros) for r in rows]) if rows else x.new_zeros(0, x.shape[1])


def slots(expert_index, experts):
    """Slots (token, k) that have an expert."""
    return [(t, k) for t, ids in enumerate(expert_index.tolist()) for k, e in enumerate(ids) if 0 <= e < experts]
