"""Small experts modules as transformers' models have them, calls of them, and what these should give."""

import types

import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation

from fusedmoe.integrations.transformers import expert_modules

E, H, I, K, T = 8, 16, 12, 2, 20  # noqa: E741  (experts, hidden, intermediate, chosen, tokens)


class Gated(nn.Module):
    """Experts as transformers' models have them."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, self.limit = E, 7.0
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H, dtype=torch.float64))
        self.down_proj = nn.Parameter(torch.randn(E, H, I, dtype=torch.float64))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("eager")


@use_experts_implementation
class Plain(Gated):
    pass


class Beta(nn.Module):
    """An activation with a number that may change."""

    def __init__(self):
        super().__init__()
        self.beta = 1.0

    def forward(self, gate):
        return gate * torch.sigmoid(self.beta * gate)


def config(implementation="fusedmoe", **settings):
    return types.SimpleNamespace(_experts_implementation=implementation, num_experts_per_tok=K, **settings)


def arguments(dtype=torch.float64, tokens=T):
    x = torch.randn(tokens, H, dtype=dtype, requires_grad=True)
    index = torch.rand(tokens, E).topk(K).indices
    weights = torch.rand(tokens, K, dtype=dtype, requires_grad=True)
    return x, index, weights


def outcome(function, module, x, index, weights):
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    module.zero_grad()
    y = function(module, x, index, weights)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}


def by_tokens(module, x, index, weights):
    """What the experts mean: token by token, with the module's own functions."""
    y = []
    for t in range(len(x)):
        total = torch.zeros_like(x[t])
        for k in range(index.shape[1]):
            e = int(index[t, k])
            if e >= module.num_experts:
                continue
            up = module.gate_up_proj if module.has_gate else module.up_proj
            h = expert_modules.activation_of(module, x[t : t + 1] @ up[e].T)
            total = total + weights[t, k] * (h @ module.down_proj[e].T)[0]
        y.append(total)
    return torch.stack(y)
