"""Small layers and chains with the inputs of their calls, and their outputs and gradients by name."""

import torch

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
ROUTED = {
    "weights in combine": lambda e: [
        fm.Dispatch(),
        fm.GroupedLinear(e, H, 2 * I, bias=True),
        fm.SwiGLU(),
        fm.GroupedLinear(e, I, H, bias=True),
        fm.Combine(),
    ],
    "weights in scale": lambda e: [
        fm.Dispatch(),
        fm.GroupedLinear(e, H, 2 * I),
        fm.SwiGLU(),
        fm.Scale("probs"),
        fm.GroupedLinear(e, I, H),
        fm.Combine(None),
    ],
    "no weights": lambda e: [
        fm.Dispatch(),
        fm.GroupedLinear(e, H, I),
        fm.SquaredReLU(),
        fm.GroupedLinear(e, I, H),
        fm.Combine(None),
    ],
}


def drawn(module, std=0.5):
    """The module with normal parameters, large enough for every one of them to matter."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return module


def chain(name, experts=3, dtype=torch.float64):
    return drawn(fm.Sequential(*(CHAINS | ROUTED)[name](experts)).to(dtype))


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def runtime_inputs(seq, rows, splits, dtype=torch.float64):
    """Those of a chain without routing; `probs` wants a gradient."""
    given = {"splits": splits, "probs": (torch.rand(rows, dtype=dtype) + 0.5).requires_grad_()}
    return {name: given[name] for name in seq.runtime_inputs}


def wanted_of(module, x, named):
    """All that wants a gradient, by name: the rows, the runtime inputs, the parameters."""
    return {k: t for k, t in {"x": x, **named, **dict(module.named_parameters())}.items() if t.requires_grad}


def outcome(module, x, dy=None, recipe=None, call=None, **named):
    """``{"y": output, "x": gradient, ...}`` of a call, by default for a normal gradient of the output."""
    with fm.recipe(recipe or "bf16"):
        y = (module if call is None else call)(x, **named)
        wanted = wanted_of(module, x, named)
        grads = torch.autograd.grad(y, [*wanted.values()], torch.randn_like(y) if dy is None else dy)
    return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}


def poison_tail(total, *tensors, value=torch.nan):
    """Fills the rows that belong to no expert, in place."""
    with torch.no_grad():
        for t in tensors:
            t[total:] = value
