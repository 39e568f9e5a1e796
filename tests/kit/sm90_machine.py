"""Layers, their inputs and their calls, for tests under the fixture `hopper_machine`: a CPU says that it is an sm_90
GPU, and stand-ins compute what its kernels do.
"""

import contextlib
import functools

import torch

import fusedmoe as fm
from kit.sm90_stand_ins import calls
from kit.toy import only_plan, outcome

BF16 = torch.bfloat16
E, H, I = 4, 64, 128  # noqa: E741  (experts, hidden, intermediate: whole blocks of every format)
SPLITS, ROWS = (5, 0, 7, 1), 16  # an expert without rows; three rows belong to no expert
T, K = 9, 2  # tokens, chosen experts per token
CLAMPED = {"limit": 0.4, "alpha": 1.702, "offset": 1.0}
FP8_GEMM, FP8_GEMM_ACTIVATION = "sm90.fp8_grouped_gemm", "sm90.fp8_grouped_gemm_activation"
FP8_DGRAD, FP8_DGRAD_ACTIVATION = "sm90.fp8_grouped_dgrad", "sm90.fp8_grouped_dgrad_activation"
FP8_WGRAD = "sm90.fp8_grouped_wgrad"


def called(name=None):
    """The names of the kernels that were launched, or the properties of the launches of one of them."""
    return [n if name is None else what for n, what in calls if name in (None, n)]


def _mlp(layer, act=None, *, scale=False, bias=False, hidden=H, width=I, dtype=BF16, **settings):
    act = fm.SwiGLU() if act is None else act
    wide = 1 if isinstance(act, fm.SquaredReLU) else 2
    settings |= {"bias": bias, "dtype": dtype}
    middle = [act, fm.Scale("probs")] if scale else [act]
    return [layer(hidden, wide * width, **settings), *middle, layer(width, hidden, **settings)]


def experts(act=None, *, num_experts=E, options=None, **how):
    """GroupedLinear, an activation, a Scale where wanted, GroupedLinear."""
    return fm.Sequential(*_mlp(functools.partial(fm.GroupedLinear, num_experts), act, **how), **(options or {}))


def dense(act=None, *, options=None, **how):
    return fm.Sequential(*_mlp(fm.Linear, act, **how), **(options or {}))


def routed(*, early=True, num_experts=E, **how):
    """Experts between Dispatch and Combine. The weights are applied early, before the last layer, or in the sum."""
    layer = functools.partial(fm.GroupedLinear, num_experts)
    return fm.Sequential(fm.Dispatch(), *_mlp(layer, scale=early, **how), fm.Combine(None if early else "probs"))


def rows(count=ROWS, features=H, dtype=BF16, requires_grad=True):
    """Rows sorted by expert, with NaN in those of no expert."""
    x = torch.randn(count, features, dtype=dtype)
    x[sum(SPLITS) :] = torch.nan
    return x.requires_grad_(requires_grad)


def routing(*, chosen=K, num_experts=E, sentinels=False, index=torch.int64, weight=torch.float32):
    """One expert has no rows; some tokens choose another twice; with sentinels, a token has no expert."""
    ids = torch.stack([torch.randperm(num_experts)[:chosen] for _ in range(T)])
    ids[ids == 1] = 2
    if sentinels:
        ids[0, 1], ids[3], ids[5, 0] = num_experts, num_experts, -1
    weights = torch.rand(T, chosen).to(weight).requires_grad_()
    return {"expert_index": ids.to(index), "expert_weight": weights}


def operands(chain, *, features=None, count=ROWS, probs=torch.float32, frozen=(), **how):
    """What a chain is called with: ``(rows or tokens, {name: runtime input})``, in the dtype of its weights."""
    layer = next((op for op in chain if hasattr(op, "in_features")), None)
    dtype = how.pop("dtype", BF16 if layer is None else layer.weight.dtype)
    if features is None:
        ops = [*chain]
        gated = any(isinstance(op, fm.SwiGLU) for op in ops[: ops.index(layer)])
        features = layer.in_features * (2 if gated else 1)
    if "expert_index" in chain.runtime_inputs:
        x, named = torch.randn(T, features, dtype=dtype), routing(**how)
    elif "splits" in chain.runtime_inputs:
        x, named = rows(count, features, dtype, requires_grad=False), {"splits": torch.tensor(SPLITS)}
    else:
        x, named = torch.randn(count, features, dtype=dtype), {}
    if "probs" in chain.runtime_inputs:
        named["probs"] = torch.rand(len(x)).to(probs).requires_grad_("probs" not in frozen)
    return x.requires_grad_("x" not in frozen), named


def seeded(chain, x, named):
    """`outcome`, with the random bits of stochastic rounding from one seed."""
    torch.manual_seed(3)
    return outcome(chain, x, **named)


def assert_close(got, expected, bound=0.015):
    """By default as close as two roundings of bf16 in a row leave two ways to compute the same."""
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert got[name].dtype is want.dtype, name
        assert want.abs().sum() > 0, f"{name}: zeros would pass"
        error = (got[name].double() - want.double()).norm() / want.double().norm()
        assert error <= bound, f"{name}: relative error {error}"


def both_ways(chain, x=None, recipe="bf16", *, strict=True, without=("*",), bound=None, **named):
    """Check a call against that with rules switched off; return its plan. A bound of 0 asks for the same bits."""
    if x is None:
        x, named = operands(chain)
    with fm.recipe(recipe):
        with fm.disabled(*without):
            expected = seeded(chain, x, named)
            assert without != ("*",) or not only_plan(chain, x, **named).fused
        fm.clear_weight_cache(chain)
        calls.clear()
        with fm.strict() if strict else contextlib.nullcontext():
            got = seeded(chain, x, named)
        plan = only_plan(chain, x, **named)
    assert_close(got, expected, (0.015 if recipe == "bf16" else 0.06) if bound is None else bound)
    if "splits" in named:
        splits = named["splits"]
        assert all(not got[name][splits.sum() :].any() for name in got.keys() & {"y", "x", "probs"}), (
            "rows of no expert"
        )
        of_experts = [t for name, t in got.items() if name.endswith(("weight", "bias")) and len(t) == len(splits)]
        assert not any(t[splits == 0].any() for t in of_experts), "experts without rows"
    return plan


def plan_of(chain, x=None, recipe="bf16", **named):
    if x is None:
        x, named = operands(chain)
    with fm.recipe(recipe):
        return only_plan(chain, x, **named)


def reasons(plan, rule):
    """Why a rule declined, at any position or for any weight."""
    misses = [step.nearest_miss for step in (*plan.steps, *plan.glue) if step.nearest_miss]
    return {a.reason for a in (*plan.attempts, *misses) if a.rule == rule and a.status is fm.Status.CONSTRAINT}


def strided(t, how):
    """The same values, elsewhere in memory: at another address, with another pitch, or by columns."""
    if how == "address":
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
    if how == "pitch":
        return t.new_empty(*t.shape[:-1], t.shape[-1] + 4)[..., : t.shape[-1]].copy_(t)
    return t.mT.contiguous().mT
