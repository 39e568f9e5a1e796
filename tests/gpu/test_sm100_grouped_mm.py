"""The rules for Blackwell that let torch compute bf16 products, on Hopper, which runs the same calls and kernels."""

import pytest
import torch
from kit.hopper import needs_gpu

import fusedmoe as fm
from fusedmoe.builtin_rules.requirements import OnSm90
from fusedmoe.builtin_rules.sm100.grouped_mm import GroupedMm, GroupedMmDgrad

pytestmark = needs_gpu

BF16 = torch.bfloat16
E, H, I = 8, 256, 128  # noqa: E741
SPLITS = (100, 0, 257, 1, 30, 0, 64, 12)


@pytest.fixture
def on_hopper():
    class Product(OnSm90, GroupedMm, name="tests.grouped_mm", direction="forward"):
        pass

    class Gradient(OnSm90, GroupedMmDgrad, name="tests.grouped_mm_dgrad", direction="backward"):
        pass

    with fm.register(Product), fm.register(Gradient), fm.disabled("sm90.grouped_*"):
        yield


@pytest.mark.parametrize("tail", [0, 1, 700])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_an_expert_mlp(on_hopper, device, bias, tail):
    torch.manual_seed(0)
    chain = fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, bias=bias, dtype=BF16), fm.SwiGLU(), fm.Scale("probs"),
        fm.GroupedLinear(E, I, H, bias=bias, dtype=BF16),
    ).to(device)  # fmt: skip
    used = sum(SPLITS)
    x = torch.randn(used + tail, H, device=device, dtype=BF16)
    x[used:] = torch.nan
    probs = torch.rand(used + tail, device=device)
    dy = torch.randn(used + tail, H, device=device, dtype=BF16)
    splits = torch.tensor(SPLITS, device=device)

    def results():
        leaves = [t.detach().requires_grad_() for t in (x, probs)]
        y = chain(leaves[0], splits=splits, probs=leaves[1])
        return y, *torch.autograd.grad(y, (*leaves, *chain.parameters()), dy)

    got = results()
    (plan,) = chain.explain(x.requires_grad_(), splits=splits, probs=probs.requires_grad_()).plans
    assert [step.rule for step in plan.steps].count("tests.grouped_mm") == 2
    assert [step.rule for step in plan.steps].count("tests.grouped_mm_dgrad") == 2
    with fm.disabled("*"):
        want = results()
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= 0.015 * b.double().norm()
        assert b.any()
    for rows in got[:3]:
        assert not rows[used:].any()
