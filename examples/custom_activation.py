"""A custom activation, its derivative, and fusion rules for both, in one file.

    python examples/custom_activation.py

The activation is a soft-capped SwiGLU, ``y = cap * tanh(silu(g) * u / cap)``: close to SwiGLU for small values, bounded
by the cap. Here `fm.register` registers the rules, as in a script or a notebook. In `third_party_rule/`, an installed
package registers its rules through an entry point.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedmoe as fm
from fusedmoe.fusion.language.rule import Run
from fusedmoe.ops import DScale, ScaleGrad

# ---- the op and its derivative: this alone composes with every other op --------------------------------------------


class SoftcapSwiGLU(fm.Op):
    """``y = cap * tanh(silu(g) * u / cap)`` of rows ``[g | u]``."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap  # public attributes are part of the plan's key

    def infer(self, x: fm.TensorSpec) -> fm.TensorSpec:
        if x.shape[-1] % 2:
            raise self.reject("x", "an even number of features, gate and up", tuple(x.shape))
        return fm.TensorSpec((*x.shape[:-1], x.shape[-1] // 2), x.dtype)

    def compute(self, x: Tensor) -> Tensor:
        gate, up = in_fp32(x).chunk(2, dim=-1)
        return (self.cap * torch.tanh(F.silu(gate) * up / self.cap)).to(x.dtype)

    def backward_ops(self) -> tuple[fm.BackwardOp, ...]:
        return (DSoftcapSwiGLU(self),)


class DSoftcapSwiGLU(fm.BackwardOp):
    """``d = dy * (1 - (y / cap)^2)``, ``dg = d * u * silu'(g)``, ``du = d * silu(g)``; y is recomputed."""

    op: SoftcapSwiGLU

    def compute(self, grad_output: Tensor, x: Tensor) -> Tensor:
        gate, up = in_fp32(x).chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        d = in_fp32(grad_output) * (1 - torch.tanh(silu * up / self.op.cap).square())
        return torch.cat([d * up * (sigmoid + silu * (1 - sigmoid)), d * silu], dim=-1).to(x.dtype)


def in_fp32(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


# ---- the rules: one step for the activation and the Scale after it, and one for their derivatives -------------------


class SoftcapSwiGLUScale(fm.FusionRule, name="example.softcap_swiglu_scale", direction="forward"):
    """Scale the activation's result in place, before rounding. A kernel would go here."""

    act: SoftcapSwiGLU
    scale: fm.Scale

    def offer(self, ctx: fm.PlanContext) -> fm.Step:
        fm.require(self.act.cap > 0, "cap %s is not positive", self.act.cap)
        return fm.Step(needs=("input", "scale.factor"), gives=("output",))

    def bind(self, ctx: fm.PlanContext, *tensors: Tensor) -> Run:
        def run(x: Tensor, factor: Tensor) -> Tensor:
            gate, up = in_fp32(x).chunk(2, dim=-1)
            y = F.silu(gate).mul_(up).div_(self.act.cap).tanh_()
            return y.mul_((self.act.cap * factor.to(y.dtype))[:, None]).to(x.dtype)

        return run


class SoftcapSwiGLUScaleBackward(fm.FusionRule, name="example.softcap_swiglu_scale_backward", direction="backward"):
    """Both derivatives. The scale's gradient needs the scale's input, which is recomputed and therefore not kept."""

    scale_grad: ScaleGrad | None  # absent if the scale needs no gradient
    dscale: DScale
    dact: DSoftcapSwiGLU

    def offer(self, ctx: fm.PlanContext) -> fm.Step:
        scale_grad = () if self.scale_grad is None else (f"scale_grad.{self.scale_grad.gives[0]}",)
        return fm.Step(needs=("grad_output", "dscale.factor", "dact.input"), gives=("grad_input", *scale_grad))

    def bind(self, ctx: fm.PlanContext, *tensors: Tensor) -> Run:
        op, scale_grad = self.dact.op, self.scale_grad

        def run(dy: Tensor, factor: Tensor, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            dx = self.dact.compute(in_fp32(dy) * factor[:, None], x)
            if scale_grad is None:
                return dx
            return dx, (in_fp32(dy) * op.compute(in_fp32(x))).sum(dim=1).to(factor.dtype)

        return run


RULES = (SoftcapSwiGLUScale, SoftcapSwiGLUScaleBackward)

# ---- the plans without and with the rules, and a check --------------------------------------------------------------


def by_autograd(experts: fm.Sequential, x: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
    """Return the experts' result from a loop over the experts in plain PyTorch."""
    up, act, _, down = experts
    results = []
    for e, (rows, p) in enumerate(zip(x.split(splits.tolist()), probs.split(splits.tolist()), strict=True)):
        gate, linear = (rows @ up.weight[e].T).chunk(2, dim=-1)
        results.append((act.cap * torch.tanh(F.silu(gate) * linear / act.cap) * p[:, None]) @ down.weight[e].T)
    return torch.cat(results)


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=float, default=2.0)
    cap = parser.parse_args(argv).cap
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    torch.manual_seed(0)
    up, down = fm.GroupedLinear(4, 64, 2 * 48), fm.GroupedLinear(4, 48, 64)
    experts = fm.Sequential(up, SoftcapSwiGLU(cap), fm.Scale("probs"), down).to(device, dtype)
    x = torch.randn(32, 64, device=device, dtype=dtype, requires_grad=True)
    named = {"splits": torch.tensor([9, 0, 16, 7], device=device), "probs": torch.rand(32, device=device)}
    named["probs"].requires_grad_()

    before = experts.explain(x, **named)
    print("Without the rules:", before, sep="\n")
    with fm.register(*RULES):  # without `with`, the rules stay registered
        after = experts.explain(x, **named)
        print("\nWith the rules:", after, sep="\n")

        # in fp64, so that rounding does not hide a wrong formula
        exact = copy.deepcopy(experts).double()
        x, probs = (3 * x).detach().double().requires_grad_(), named["probs"].detach().double().requires_grad_()
        inputs = [x, probs, *exact.parameters()]
        y = exact(x, splits=named["splits"], probs=probs)
        expected = by_autograd(exact, x, named["splits"], probs)
        weights = torch.randn_like(y)
        got = [y, *torch.autograd.grad(y, inputs, weights)]
        wanted = [expected, *torch.autograd.grad(expected, inputs, weights)]
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(got, wanted, strict=True)]
    print("\nRelative error against autograd in fp64, of the output and every gradient:")
    for name, error in zip(["y", "x", "probs", "0.weight", "3.weight"], errors, strict=True):
        print(f"  {name:8}  {error:.1e}")
    return {"before": before, "after": after, "errors": errors, "norms": [t.norm().item() for t in wanted]}


if __name__ == "__main__":
    main()
