"""The layers again in plain PyTorch, one expert at a time: same names and shapes of parameters, nothing of the package.

Axes: R rows, T tokens, E experts, K chosen experts per token, H hidden, I intermediate.
"""

import torch
import torch.nn.functional as F
from torch import nn


def swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class GroupedLinear(nn.Module):
    def __init__(self, experts, wide, narrow, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, narrow, wide, dtype=dtype))

    def forward(self, x_RK, splits):
        parts = x_RK.split([*splits.tolist(), x_RK.shape[0] - int(splits.sum())])
        done = [part @ weight.T for part, weight in zip(parts, self.weight, strict=False)]
        return torch.cat([*done, x_RK.new_zeros(len(parts[-1]), self.weight.shape[1])])


class Experts(nn.Sequential):
    """Two grouped layers around a SwiGLU: ``0.weight`` (E, 2I, H) and ``2.weight`` (E, H, I)."""

    def __init__(self, experts, hidden, intermediate, dtype):
        first = GroupedLinear(experts, hidden, 2 * intermediate, dtype)
        super().__init__(first, nn.Identity(), GroupedLinear(experts, intermediate, hidden, dtype))

    def forward(self, x_RH, splits):
        return self[2](swiglu(self[0](x_RH, splits)), splits)


class MoE(nn.Module):
    """Softmax router, renormalized weights of the K best, SwiGLU experts; a shared one where there is a size for it."""

    def __init__(self, hidden, intermediate, experts, top_k, shared=None, dtype=torch.float64):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False, dtype=dtype)
        self.experts = nn.ModuleDict({
            "gate_up": GroupedLinear(experts, hidden, 2 * intermediate, dtype),
            "down": GroupedLinear(experts, intermediate, hidden, dtype),
        })  # fmt: skip
        self.shared = None
        if shared is not None:
            self.shared = nn.ModuleDict({
                "gate_up": nn.Linear(hidden, 2 * shared, bias=False, dtype=dtype),
                "down": nn.Linear(shared, hidden, bias=False, dtype=dtype),
            })  # fmt: skip

    def forward(self, x):
        x_TH = x.reshape(-1, x.shape[-1])
        weight_TK, index_TK = self.router(x_TH).softmax(-1).topk(self.top_k, -1)
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        y_TH = torch.zeros_like(x_TH)
        gate_up, down = self.experts["gate_up"].weight, self.experts["down"].weight
        for expert in range(len(gate_up)):
            token, k = (index_TK == expert).nonzero(as_tuple=True)
            rows = swiglu(x_TH[token] @ gate_up[expert].T) @ down[expert].T
            y_TH = y_TH.index_add(0, token, rows * weight_TK[token, k, None])
        if self.shared is not None:
            y_TH = y_TH + self.shared["down"](swiglu(self.shared["gate_up"](x_TH)))
        return y_TH.view_as(x)


def twin(plain, module):
    """The plain model with the parameters of the other: the names must be the same, all of them."""
    plain.load_state_dict(module.state_dict())
    return plain
