"""Chains to test, and what they mean: each op replaced by its formula."""

import torch
from oracles import glu, grouped_linear, scale, squared_relu

import fusedmoe as fm

H, I = 8, 4  # noqa: E741
GPT_OSS = {"limit": 0.7, "alpha": 1.702, "offset": 1.0, "interleaved": True}  # a limit that these values reach

CHAINS = {
    "layer": lambda e: [fm.GroupedLinear(e, H, H)],
    "layer with bias": lambda e: [fm.GroupedLinear(e, H, H, bias=True)],
    "glu last": lambda e: [fm.GroupedLinear(e, H, 2 * I), fm.SwiGLU()],
    "glu first": lambda e: [fm.SwiGLU(), fm.GroupedLinear(e, H // 2, H)],
    "scale last": lambda e: [fm.GroupedLinear(e, H, 2 * I, bias=True), fm.SwiGLU(), fm.Scale("probs")],
    "scale first": lambda e: [fm.Scale("probs"), fm.GroupedLinear(e, H, 2 * I), fm.GeGLU()],
    "mlp": lambda e: [fm.GroupedLinear(e, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(e, I, H)],
    "scaled mlp": lambda e: [
        fm.GroupedLinear(e, H, 2 * I),
        fm.SwiGLU(),
        fm.Scale("probs"),
        fm.GroupedLinear(e, I, H),
    ],
    "gpt_oss": lambda e: [
        fm.GroupedLinear(e, H, 2 * I, bias=True),
        fm.SwiGLU(**GPT_OSS),
        fm.Scale("probs"),
        fm.GroupedLinear(e, I, H, bias=True),
    ],
    "squared relu": lambda e: [fm.GroupedLinear(e, H, I), fm.SquaredReLU(), fm.GroupedLinear(e, I, H)],
}


def chain(name, experts, dtype=torch.float64):
    """The chain with normal parameters, large enough for every one of them to matter."""
    seq = fm.Sequential(*CHAINS[name](experts)).to(dtype)
    for parameter in seq.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return seq


def runtime_inputs(seq, rows, splits, dtype=torch.float64):
    given = {"splits": splits, "probs": torch.rand(rows, dtype=dtype) + 0.5}
    return {name: given[name] for name in seq.runtime_inputs}


def meaning(seq, x, splits, probs=None):
    """The same function, op by op, by the independent formulas."""
    for op in seq:
        if isinstance(op, fm.GroupedLinear):
            x = grouped_linear(x, op.weight, op.bias, splits)
        elif isinstance(op, fm.SwiGLU):
            x = glu(x, "swiglu", op.limit, op.alpha, op.offset, op.interleaved)
        elif isinstance(op, fm.GeGLU):
            x = glu(x, "geglu_tanh")
        elif isinstance(op, fm.SquaredReLU):
            x = squared_relu(x)
        else:
            assert isinstance(op, fm.Scale)
            x = scale(x, probs)
    return x
