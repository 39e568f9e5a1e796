"""The formulas again, written on their own: plain loops and masks, differentiable by autograd, in the dtype that they
are given. Nothing here calls the package.

Axes: R rows, E experts, T tokens, K chosen experts per token, H and I features.
"""

import math

import torch
import torch.nn.functional as F


def exact_copies(*tensors):
    """The same values in fp64, as leaves that want gradients."""
    return [t.detach().double().requires_grad_() for t in tensors]


def expert_rows(splits):
    """(expert, first row, end) of every expert, those without rows too."""
    first = 0
    for expert, count in enumerate(splits.tolist()):
        yield expert, first, first + count
        first += count


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


def slots_by_expert(expert_index, num_experts):
    """Slots (token, k) in the order of their rows: by expert, then by token, then by k. Sentinels are left out."""
    slots = [(t, k) for t in range(expert_index.shape[0]) for k in range(expert_index.shape[1])]
    ids = expert_index.tolist()
    return [(t, k) for e in range(num_experts) for t, k in slots if ids[t][k] == e]


def experts_dense(x, expert_index, expert_weight, num_experts, expert):
    """``y[t] = sum over k of w[t, k] * expert(e[t, k], x[t])``, one slot at a time."""
    outputs = []
    for t, ids in enumerate(expert_index.tolist()):
        y = x.new_zeros(x.shape[1])
        for k, e in enumerate(ids):
            if 0 <= e < num_experts:
                y = y + expert_weight[t, k] * expert(e, x[t])
        outputs.append(y)
    return torch.stack(outputs) if outputs else x.new_zeros(0, x.shape[1])
