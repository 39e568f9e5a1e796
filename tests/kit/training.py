"""Outputs and gradients of calls on a GPU, by name, and what they are compared with.

Axes: R rows sorted by expert, T tokens, E experts, K chosen experts per token, H hidden, I intermediate features.
"""

import copy

import torch

import fusedmoe as fm
from kit.hopper import DEVICE

BF16 = torch.bfloat16
E, H, I, K = 16, 128, 64, 4  # noqa: E741
AS_EXACT = 1.5  # times the error of plain PyTorch


def outcome(module, x, dy, call=None, **named):
    """The output of a call and every gradient. Tensors are passed as they lie in memory."""
    leaves = {"x": x} | {name: t for name, t in named.items() if t.is_floating_point()}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    module.zero_grad(set_to_none=True)
    given = {**named, **{name: t for name, t in leaves.items() if name != "x"}}
    y = (module if call is None else call)(leaves["x"], **given)
    y.backward(dy)
    leaves |= dict(module.named_parameters())
    found = {"y": y.detach(), **{name: t.grad for name, t in leaves.items() if t.grad is not None}}
    return {name: t.clone() for name, t in found.items()}


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert t.any(), f"{name}: zeros would pass"
        assert torch.equal(got[name], t), name


def assert_as_exact(fused, plain, exact, most=0.1):
    """Each result is at most half again as far from ``exact`` as that of plain PyTorch."""
    assert fused.keys() == plain.keys() == exact.keys()
    for name, want in exact.items():
        assert fused[name].dtype is plain[name].dtype, name
        assert want.any(), f"{name}: zeros would pass"
        ours, theirs = error(fused[name], want.double()), error(plain[name], want.double())
        # a preactivation's rounding across a limit switches its gradient on or off, in both
        assert theirs < most, f"{name}: relative error of plain PyTorch {theirs}"
        assert ours <= AS_EXACT * theirs + 1e-6, f"{name}: relative error {ours}, that of plain PyTorch {theirs}"


def assert_as_exact_as_plain_pytorch(module, x, dy, **named):
    """Run a module fused, without a miss, and unfused; compare both with fp64. The fused results."""
    with fm.disabled("*"):
        in_fp64 = {name: t.double() if t.is_floating_point() else t for name, t in named.items()}
        exact = outcome(copy.deepcopy(module).double(), x.double(), dy.double(), **in_fp64)
    with fm.disabled("sm90.*"):
        plain = outcome(module, x, dy, **named)
    with fm.strict():
        fused = outcome(module, x, dy, **named)
    assert_as_exact(fused, plain, exact)
    return fused


def plan_of(module, x, **named):
    """The plan of a call that wants every gradient."""
    named = {name: t.detach().requires_grad_() if t.is_floating_point() else t for name, t in named.items()}
    (plan,) = module.explain(x.detach().requires_grad_(), **named).plans
    return plan


def random_splits(experts, rows, seed):
    """Rows per expert on the device; the first experts have more."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    chosen = torch.randint(0, experts, (rows,), device=DEVICE, generator=generator) ** 2 // experts
    return torch.bincount(chosen, minlength=experts)


def experts(bias=False, dtype=BF16, device=DEVICE):
    torch.manual_seed(0)
    kind = {"bias": bias, "device": device, "dtype": dtype}
    return fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, **kind), fm.SwiGLU(), fm.Scale("probs"), fm.GroupedLinear(E, I, H, **kind)
    )


def inputs(splits, spare=37, dtype=BF16):
    """Rows, factors and the gradient of the output, with a tail of NaN; splits on the device."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    rows = sum(splits) + spare
    x, dy = (torch.randn(rows, H, device=DEVICE, generator=generator).to(dtype) for _ in range(2))
    probs = torch.rand(rows, device=DEVICE, generator=generator) + 0.5
    for t in (x, dy, probs):
        t[sum(splits) :] = torch.nan
    return x.requires_grad_(), probs.requires_grad_(), dy, torch.tensor(splits, device=DEVICE)
