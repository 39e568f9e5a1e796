"""Toy fusion rules in plain PyTorch, for chains small enough to follow, and what the tests do with both.

The rules compute what the ops compute, in one Python function, so that outputs and gradients of a fused run can be
compared with the unfused one. Each is made by a function, so that a test can have it otherwise: without its keeps,
with a guard, at another cost.
"""

import torch

import fusedmoe as fm
from fusedmoe.fusion.language.rule import FusionRule, Step
from fusedmoe.kernels.torch.grouped_gemm import grouped_mm, grouped_mm_dgrad, grouped_mm_wgrad
from fusedmoe.ops import Dgrad, DScale, DSwiGLU, GeGLU, GroupedLinear, Scale, ScaleGrad, SwiGLU, Wgrad

E, H, I = 3, 8, 4  # noqa: E741  (experts, hidden, intermediate)
SPLITS = (3, 0, 4)
ROWS = 9  # two of them belong to no expert
IN = ("input", "fc.weight", "offsets")  # of a rule whose first slot is fc


def experts(*, scale=False, dtype=torch.float64, act=SwiGLU, **options):
    """GroupedLinear, GLU, a Scale where wanted, GroupedLinear."""
    middle = [Scale("probs")] if scale else []
    return fm.Sequential(
        GroupedLinear(E, H, 2 * I, dtype=dtype), act(**options), *middle, GroupedLinear(E, I, H, dtype=dtype)
    )


def rows(count=ROWS, dtype=torch.float64, requires_grad=True, hidden=H):
    return torch.randn(count, hidden, dtype=dtype, requires_grad=requires_grad)


def inputs(*, scale=False, dtype=torch.float64, count=ROWS):
    named = {"splits": torch.tensor(SPLITS)}
    if scale:
        named["probs"] = torch.rand(count, dtype=dtype, requires_grad=True)
    return named


def outcome(module, x, call=None, dy=None, **named):
    """The output, and every gradient, by name, on fresh leaves; by default for a gradient that rises from -1 to 1.
    ``call``: the module as it is called, such as compiled.
    """
    x = x.detach().requires_grad_(x.requires_grad)  # with its strides
    named = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in named.items()}
    module.zero_grad()
    y = (module if call is None else call)(x, **named)
    if y.requires_grad:
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) if dy is None else dy)
    leaves = {"x": x, **named, **dict(module.named_parameters())}
    return {"y": y.detach(), **{name: t.grad.clone() for name, t in leaves.items() if t.grad is not None}}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")
        assert expected[name].abs().sum() > 0, f"{name}: zeros would pass"


def status(plan, rule, start=None):
    """(status, reason) of a rule at a position, or where it got farthest."""
    attempts = [a for a in ended(plan, rule) if start is None or a.start == start]
    best = max(attempts, key=lambda a: (a.matched, -a.start))
    return best.status, best.reason


def ended(plan, rule):
    """How a rule ended at each position, without what is told of ways in which it takes more ops there."""
    return [a for a in plan.attempts if a.rule == rule and a.shared.start == a.start]


def rules_used(plan, direction=None):
    return [s.rule for s in plan.steps if s.rule is not None and direction in (None, s.direction)]


def only_plan(module, x, **named):
    (plan,) = module.explain(x, **named).plans
    return plan


def bound(run, guard=None):
    """Bind a function that runs the same for all tensors that the guard lets pass."""

    def bind(*tensors):
        if guard is not None:
            guard(*tensors)
        return run

    return bind


def rule(
    name, slots, needs=(), gives=("output",), *, run=None, direction="forward", guard=None, check=None, available=None,
    takes_quantized=False, **step,
):  # fmt: skip
    """A rule made of its parts.

    ``run(rule, keep)`` returns the function of a step; without it, the rule is planned and never runs. ``guard`` may
    decline a call, ``check(rule, ctx)`` a match, ``available(device, arch)`` a device. Values may be functions of the
    rule.
    """

    def values(rule, given):
        return given(rule) if callable(given) else given

    def offer(self, ctx):
        if check is not None:
            check(self, ctx)
        return Step(needs=values(self, needs), gives=values(self, gives), **step)

    body = {"__annotations__": slots, "__module__": __name__, "offer": offer, "takes_quantized": takes_quantized}
    if run is not None:
        body["build"] = lambda self, ctx, keep: bound(run(self, keep), guard)
    if available is not None:
        body["available"] = staticmethod(available)
    return type(FusionRule)("Rule", (FusionRule,), body, name=name, direction=direction)


def doubled():
    """Computes another function than its SwiGLU, so that its use shows."""
    run = lambda self, keep: lambda x: 2 * self.act.compute(x)  # noqa: E731
    return rule("tests.doubled", {"act": SwiGLU}, ("input",), run=run, launches=0)


def needs_sm90(device, arch):
    fm.require(arch == 90, "needs sm_90, this device is %s", device)


def gemm(name="toy.gemm", *, guard=None, **step):
    """One GroupedLinear."""

    def check(self, ctx):
        fm.require(self.fc.bias is None, "a bias is not taken, use bias=False")

    return rule(
        name, {"fc": GroupedLinear}, IN, run=lambda self, keep: grouped_mm, check=check, guard=guard,
        zeroes_tail=True, **step,
    )  # fmt: skip


def gemm_glu(name="toy.gemm_glu", *, guard=None, keeps=("act.input",), calls=None, **step):
    """GroupedLinear, SwiGLU or GeGLU, and a Scale where there is one; it can keep what went into the activation."""

    def check(self, ctx):
        fm.require(self.act.limit is None, "limit %s is not taken, use limit=None", self.act.limit)

    def run(self, keep):
        def flat(x, weight, offsets, probs):
            if calls is not None:
                calls.append((name, keep))
            h = grouped_mm(x, weight, offsets)
            y = self.act.compute(h)
            return (y if probs is None else self.scale.compute(y, probs), *(h for _ in keep))

        return flat

    slots = {"fc": GroupedLinear, "act": SwiGLU | GeGLU, "scale": Scale | None}
    needs = (*IN, "scale.factor")
    return rule(name, slots, needs, run=run, check=check, guard=guard, keeps=keeps, zeroes_tail=True, **step)


def glu_scale(name="toy.glu_scale", **step):
    """SwiGLU, and a Scale where there is one."""

    def run(self, keep):
        return lambda x, probs: self.act.compute(x) if probs is None else self.scale.compute(self.act.compute(x), probs)

    return rule(name, {"act": SwiGLU, "scale": Scale | None}, ("act.input", "scale.factor"), run=run, **step)


def dgrad_dglu(name="toy.dgrad_dglu", *, guard=None, recomputes=True, calls=None, **step):
    """FC2's data gradient, the Scale's two gradients where there are, and the GLU's derivative. What went into FC2 is
    computed again, for FC2's weight gradient.
    """

    def needs(self):
        probs = () if self.dscale is None else (f"dscale.{self.dscale.op.name}",)
        return ("grad_output", "dgrad.weight", "offsets", "dact.input", *probs)

    def gives(self):
        return ("grad_input", *(() if self.dprobs is None else (f"dprobs.grad_{self.dprobs.op.name}",)))

    def run(self, keep):
        def flat(dy, weight, offsets, h, *probs):
            if calls is not None:
                calls.append((name, keep))
            d = grouped_mm_dgrad(dy.contiguous(), weight, offsets)
            y = self.dact.op.compute(h)
            given = []
            if self.dprobs is not None:
                given.append(self.dprobs.compute(d, y, *probs))
            if self.dscale is not None:
                d, y = self.dscale.compute(d, *probs), self.dscale.op.compute(y, *probs)
            return (self.dact.compute(d, h), *given, *(y for _ in keep))

        return flat

    slots = {"dgrad": Dgrad, "dprobs": ScaleGrad | None, "dscale": DScale | None, "dact": DSwiGLU}
    return rule(
        name, slots, needs, gives, run=run, direction="backward", guard=guard, zeroes_tail=True,
        keeps=("dgrad.input",) if recomputes else (), **step,
    )  # fmt: skip


def wgrad(name="toy.wgrad", *, guard=None, change=lambda gradient: gradient, **step):
    """One weight gradient."""

    def run(self, keep):
        return lambda dy, x, offsets: change(grouped_mm_wgrad(dy.contiguous(), x, offsets))

    needs = ("grad_output", "wgrad.input", "offsets")
    return rule(
        name, {"wgrad": Wgrad}, needs, ("wgrad.grad_weight",), run=run, direction="backward", guard=guard, **step
    )


def refuse(*_tensors):
    """A guard that takes no call."""
    fm.require(False, "rows are %d, not a multiple of 128", _tensors[0].shape[0])
