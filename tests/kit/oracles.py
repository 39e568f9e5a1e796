"""The formulas again, written on their own: plain loops and masks, differentiable by autograd, in the dtype that they
are given. Nothing here calls the package's arithmetic except `quantize`, whose oracle is `kit.formats`; of an op only
its settings and parameters are read.

Axes: R rows, E experts, T tokens, K chosen experts per token, H and I features.
"""

import copy
import math
from dataclasses import replace

import torch
import torch.nn.functional as F

import fusedmoe as fm
from kit.layers import outcome
from kit.splits import expert_rows, slots_by_expert


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


def meaning(ops, x, splits=None, probs=None, expert_index=None, expert_weight=None, linear=grouped_linear):
    """The function of a chain, op by op; from a `Dispatch` to its `Combine`, of the rows of the slots.

    ``linear`` is the function of all linear layers.
    """
    ops = [*ops]
    while ops:
        op = ops.pop(0)
        if isinstance(op, fm.GroupedLoRA):
            hidden = grouped_linear(x, op.lora_A.weight, None, splits)
            update = op.lora_B.scale * grouped_linear(hidden, op.lora_B.weight, None, splits)
            x = linear(x, op.base_layer.weight, op.base_layer.bias, splits) + update
        elif isinstance(op, fm.GroupedLinear):
            x = linear(x, op.weight, op.bias, splits)
        elif isinstance(op, fm.Linear):  # rows of no expert come out as zeros
            rows = x.reshape(-1, x.shape[-1])
            counted = torch.tensor([len(rows)]) if splits is None else splits.sum()[None]
            y = linear(rows, op.weight[None], None if op.bias is None else op.bias[None], counted)
            x = y.view(*x.shape[:-1], y.shape[1])
        elif isinstance(op, fm.SquaredReLU):
            x = squared_relu(x)
        elif isinstance(op, fm.Scale):
            x = scale(x, probs)
        elif isinstance(op, fm.Dispatch):
            end = next(i for i, other in enumerate(ops) if isinstance(other, fm.Combine))
            experts = op.num_experts or next(op.num_groups for op in ops if isinstance(op, fm.GroupedLinear))
            x = _routed(experts, ops[:end], ops[end].weights, x, expert_index, expert_weight, linear)
            del ops[: end + 1]
        else:
            x = glu(x, kind_of(op), op.limit, op.alpha, op.offset, op.interleaved)
    return x


def _routed(experts, ops, weights, x, expert_index, expert_weight, linear):
    """``y[t] = sum over k of w[t, k] * expert(e[t, k], x[t])``."""
    slots = slots_by_expert(expert_index, experts)
    token, k = torch.tensor(slots, dtype=torch.int64, device=x.device).view(-1, 2).unbind(1)
    splits, weight = torch.bincount(expert_index[token, k], minlength=experts), expert_weight[token, k]
    rows = meaning(ops, x[token], splits, weight, linear=linear)
    rows = rows * weight[:, None] if weights else rows
    return rows.new_zeros(len(x), rows.shape[1]).index_add(0, token, rows)


def exact_outcome(module, x, dy, linear=grouped_linear, **named):
    """`outcome` by the formulas, of the same operands in fp64."""

    def exact(t):
        return t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t

    double = copy.deepcopy(module).double()
    ops = [double] if isinstance(double, fm.GroupedLoRA) or not isinstance(double, fm.Sequential) else double
    named = {name: exact(t) for name, t in named.items()}

    def call(x, **named):
        return meaning(ops, x, **named, linear=linear)

    return outcome(double, exact(x), dy.double(), call=call, **named)


class _QuantizedProduct(torch.autograd.Function):
    """The three products of a linear layer in fp64. Each expert's operands are quantized along the axis of the sum."""

    @staticmethod
    def forward(ctx, x, weight, roles, splits):
        ctx.save_for_backward(x, weight)
        ctx.roles, ctx.splits = roles, splits
        y = x.new_zeros(len(x), weight.shape[1])
        for e, first, end in expert_rows(splits):
            if end > first:
                y[first:end] = values_of(x[first:end], roles.input) @ values_of(weight[e], roles.weight).T
        return y

    @staticmethod
    def backward(ctx, dy):
        (x, weight), roles = ctx.saved_tensors, ctx.roles
        dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
        for e, first, end in expert_rows(ctx.splits):
            if end > first:
                grad = dy[first:end]
                dx[first:end] = values_of(grad, roles.grad) @ values_of(weight[e], roles.weight, -2)
                dw[e] = _over_rows(grad, roles.grad, x[first:end], roles.input)
        return dx, dw, None, None


def values_of(x, quantizer, axis=-1):
    """The values of a matrix once it is quantized, in fp64."""
    return x if quantizer is None else fm.quantize(x.float(), quantizer, axis).dequantize().double()


def _over_rows(dy, grad, x, forward):
    """``dy.T @ x`` of one expert: two rotated operands where they lie, in the rotated space, padding included."""
    grad, forward = (None if q is None or q.wgrad == "bf16" else q for q in (grad, forward))
    if not (grad and forward and grad.hadamard and forward.hadamard):
        return values_of(dy, grad, -2).T @ values_of(x, forward, -2)
    codes = [fm.quantize(t.float(), quantizer, -2) for t, quantizer in ((dy, grad), (x, forward))]
    a, b = (replace(q, rotated=False, shape=(q.length, q.shape[1])).dequantize().double() for q in codes)
    return a.T @ b


def quantized(roles):
    """The function of a linear layer whose operands are quantized, for `meaning`."""

    def linear(x, weight, bias, splits):
        y = _QuantizedProduct.apply(x, weight, roles, splits)
        if bias is None:
            return y
        of_row = bias.repeat_interleave(splits, 0)
        return y + F.pad(of_row, (0, 0, 0, len(y) - len(of_row)))

    return linear
