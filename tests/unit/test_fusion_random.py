"""Ops that draw random numbers, among rules: what is computed again draws the same numbers, or is not fused."""

import pytest
import torch
from kit import toy
from kit.toy import only_plan, rows, rules_used

import fusedmoe as fm
from fusedmoe.fusion.language.rule import FusionRule, Step
from fusedmoe.ops import BackwardOp, Op
from fusedmoe.ops.op import AutogradBackward
from fusedmoe.ops.state.random import NAMES


class Noise(Op):
    draws_random = True

    def compute(self, x):
        return x * torch.rand_like(x)


class DSquare(BackwardOp):
    def compute(self, grad_output, x):
        return 2 * x * grad_output


class Square(Op):
    def compute(self, x):
        return x.square()

    def backward_ops(self):
        return (DSquare(self),)


def noise_square(keeps):
    """Both ops in one step, which hides what is between them."""

    class NoiseSquare(FusionRule, name="toy.noise_square", direction="forward"):
        noise: Noise
        square: Square

        def offer(self, ctx):
            return Step(needs=("input",), gives=("output",), keeps=keeps)

        def build(self, ctx, keep):
            def run(x):
                kept = {"noise.random_state": torch.get_rng_state(), "noise.device_random_state": None}
                y = self.noise.compute(x).square()
                return (y, *(kept[name] for name in keep)) if keep else y

            return toy.bound(run)

    return NoiseSquare


class DSquareDNoise(FusionRule, name="toy.dsquare_dnoise", direction="backward"):
    """From what went into the first op; it declines, and its stand-ins need what is between."""

    square: DSquare
    noise: AutogradBackward

    def offer(self, ctx):
        needs = ("grad_output", "noise.input", *(f"noise.{name}" for name in NAMES))
        return Step(needs=needs, gives=("grad_input",))

    def build(self, ctx, keep):
        return toy.refuse


def gradients(module, x, state):
    torch.set_rng_state(state)
    (dx,) = torch.autograd.grad(module(x).sum(), x)
    return dx


@pytest.mark.parametrize(
    ("rules", "used"),
    [
        ([noise_square(())], []),  # it cannot keep what the backward pass needs
        ([noise_square(tuple(f"noise.{name}" for name in NAMES)), DSquareDNoise], None),
        ([DSquareDNoise], None),
    ],
)
def test_rules_around_an_op_that_draws(rules, used):
    module, x, state = fm.Sequential(Noise(), Square()), rows(), torch.get_rng_state()
    torch.set_rng_state(state)
    want = 2 * x.detach() * torch.rand_like(x).square()
    torch.testing.assert_close(gradients(module, x, state), want)
    with fm.register(*rules):
        names = rules_used(only_plan(module, x))
        assert names == ([rule.name for rule in rules] if used is None else used)
        torch.testing.assert_close(gradients(module, x, state), want)
        if used is None and len(rules) > 1:
            assert only_plan(module, x).kept == ("0.input", *(f"0.{name}" for name in NAMES))
    assert want.any()
