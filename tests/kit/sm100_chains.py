"""Calls of chains on the rules for Blackwell on a CPU, and what they are compared with.

Needs what `blackwell.on_cpu` needs.
"""

from collections import Counter

import pytest
import torch
from blackwell.expert_mlp import Problem, in_plain_pytorch
from blackwell.on_cpu import blackwell_on_cpu

import fusedmoe as fm
from fusedmoe.kernels.sm100 import calls
from kit.sm100_machine import BF16, PREFIX
from kit.toy import only_plan, rules_used

SAME, EMULATION = 4e-3, 3e-2
"""Bounds of the relative error: from the same arithmetic, and from the unfused chain."""


def swiglu():
    return fm.SwiGLU()


def clamped():
    """One in ten elements of gate or up is beyond the limit."""
    return fm.SwiGLU(limit=4.0, alpha=1.702, offset=1.0)


@pytest.fixture(scope="module", name="device")
def device_in_pytorch():
    """NVIDIA's kernels, with device code in PyTorch."""
    calls.kernel.cache_clear()  # a kernel tells of its launches where it was made
    with blackwell_on_cpu() as launches:
        yield launches
    calls.kernel.cache_clear()


@pytest.fixture(autouse=True, name="launches")
def launches_of_test(device, monkeypatch):
    """The launches of a test. Memory that is read without being written is NaN."""
    plain = torch.Tensor.new_empty

    def nan(like, *args, **kwargs):
        out = plain(like, *args, **kwargs)
        # through .data, as a kernel writes: torch counts no write
        out.data.view(torch.uint8).fill_(0x7F if out.dtype is torch.float8_e4m3fn else 0xFF)
        return out

    monkeypatch.setattr(torch.Tensor, "new_empty", nan)
    device.clear()
    return device


def launched(launches):
    """How many kernels of each kind were launched."""
    found = [type(launch.kernel).__module__.split(".")[-2] for launch in launches if launch.name == "kernel"]
    return Counter(found)


def run(chain, x, dy, **named):
    """The output and all gradients, by name, of new leaves."""
    x = x.detach().requires_grad_(x.requires_grad)
    named = {name: t.detach().requires_grad_(t.requires_grad) for name, t in named.items()}
    chain.zero_grad()
    y = chain(x, **named)
    if y.requires_grad:
        y.backward(dy)
    leaves = {"x": x, **named, **dict(chain.named_parameters())}
    return {"y": y.detach(), **{name: t.grad for name, t in leaves.items() if t.grad is not None}}


def assert_near(got, expected, bound):
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert want.any(), f"{name}: zeros would pass"
        error = float((got[name].double() - want.double()).norm() / want.double().norm())
        assert error <= bound, f"{name}: {error}"


def same_arithmetic(chain, x, dy, splits, probs=None, *, plain_middle=False, format="mxfp8"):
    """The same products of the same codes in plain PyTorch; only the rows of experts."""
    first, act, last = chain[0], chain[1], chain[-1]
    clamp = None
    if getattr(act, "limit", None) is not None:
        clamp = {"linear_offset": act.offset, "geglu_alpha": act.alpha}
        clamp |= {"glu_clamp_max": act.limit, "glu_clamp_min": -act.limit}
    of_rows = torch.ones(len(x)) if probs is None else probs.detach()
    problem = Problem(
        "srelu" if isinstance(act, fm.SquaredReLU) else "swiglu", clamp, first.weight.detach(), last.weight.detach(),
        x.detach(), dy, of_rows, splits, *(layer.bias if layer.bias is None else layer.bias.detach()
                                           for layer in (first, last)),
    )  # fmt: skip

    def middle(h, probs):
        return fm.Sequential(act, fm.Scale("probs"))(h, probs=probs)

    want = in_plain_pytorch(problem, middle if plain_middle else None, format)
    found = {"y": want.y, "x": want.dx, "0.weight": want.dw1, f"{len(chain) - 1}.weight": want.dw2}
    if probs is not None:
        found["probs"] = want.dprobs
    if first.bias is not None and first.bias.requires_grad:
        found |= {"0.bias": want.db1, f"{len(chain) - 1}.bias": want.db2}
    return found


def unfused(chain, x, dy, **named):
    with fm.disabled("*"):
        found = run(chain, x, dy, **named)
    fm.clear_weight_cache(chain)
    return found


def check(
    chain, x, *, recipe="mxfp8", format="mxfp8", same=True, plain_middle=False, emulation=EMULATION, bound=SAME, **named
):
    """Check a call against both computations; return its plan and its results.

    ``bound`` is that of the error from the same arithmetic, and ``emulation`` from the unfused chain.
    """
    used = int(named["splits"].sum())
    dy = torch.randn(len(x), chain[-1].out_features).to(BF16)
    dy[used:] = torch.nan
    with fm.recipe(recipe):
        emulated = unfused(chain, x, dy, **named)
        got = run(chain, x, dy, **named)
        plan = only_plan(chain, x, **named)
    assert_near(got, emulated, emulation)
    for name in {"y", "x", "probs"} & got.keys():
        assert not got[name][used:].any(), f"{name}: rows of no expert"
    for name in got.keys() - {"y", "x", "probs"}:
        empty = named["splits"] == 0
        assert not got[name][empty].any(), f"{name}: experts without rows"
    if same:
        with torch.enable_grad():
            want = same_arithmetic(chain, x, dy, plain_middle=plain_middle, format=format, **named)
        rows = {"y", "x", "probs"}
        assert_near({n: t[:used] if n in rows else t for n, t in got.items()}, {n: want[n] for n in got}, bound)
    return plan, got


# the rules of `fusedmoe.builtin_rules.ROWS`
MOVING = {
    f"{PREFIX}{name}"
    for name in (
        "dispatch", "combine", "dcombine", "combine_weight_grad", "ddispatch", "dispatch_weight_grad", "column_sums",
        "linear_column_sums", "offsets_from_splits",
    )
}  # fmt: skip


def rules(plan):
    """The rules of a plan that quantize and multiply."""
    return [name for name in rules_used(plan) if name.startswith(PREFIX) and name not in MOVING]


def unfused_ops(plan):
    """The ops that run in plain PyTorch, without those that quantize weights."""
    return [step.ops[0].split(".")[1] for step in plan.unfused if not step.ops[0].endswith("weight.Quantize")]
