"""Layers whose steps all have FP8 kernels on Hopper, their calls, and what these are compared with.

Axes: R rows sorted by expert, T tokens, E experts, K chosen experts per token, H hidden, I intermediate features.
"""

import torch

import fusedmoe as fm
from fusedmoe.kernels.rows.quantize import block_functions
from kit.hopper import DEVICE
from kit.training import BF16, assert_as_exact, error

E, K, H, I, T = 8, 2, 256, 128, 300  # noqa: E741
RECIPES = ["fp8_block", "fp8_block:wgrad=bf16"]
CLOSE = 10 ** (-30 / 20)  # of norms, 30 dB: a bf16 value that is rounded otherwise may get another code


def moe(**settings):
    torch.manual_seed(0)
    return fm.MoE(H, I, E, K, device=DEVICE, dtype=BF16, **settings)


def experts(**linear):
    torch.manual_seed(0)
    linear = {"device": DEVICE, "dtype": BF16, **linear}
    return fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, **linear),
        fm.SwiGLU(),
        fm.Scale("probs"),
        fm.GroupedLinear(E, I, H, **linear),
    )


def tokens(seed=1, count=T):
    """Tokens, and the gradient of a layer's output for them."""
    x, dy = normal(seed, 2, count, H)
    return x, dy


def rows(splits, tail=0, seed=1, beyond=0.0):
    """Rows, splits and routing weights, and the gradient of the output; ``tail`` rows without an expert."""
    used = sum(splits)
    x, dy = normal(seed, 2, used + tail, H)
    probs = torch.rand(used + tail, generator=torch.Generator().manual_seed(seed)).to(DEVICE) + 0.1
    for t in (x, dy, probs):
        t[used:] = beyond
    return x, {"splits": torch.tensor(splits, device=DEVICE), "probs": probs}, dy


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, BF16)


def assert_as_exact_as_the_recipe(recipe, run, exact):
    """Run fused, without a miss, and in plain PyTorch; compare both with the results in fp32. The fused results.

    The layer of ``run`` must have no cached weights. ``exact`` runs the layer in fp32.
    """
    with fm.strict(), fm.recipe(recipe):
        fused = run()
    with fm.disabled("sm90.*"), fm.recipe(recipe):
        plain = run()
    with fm.disabled("*"), fm.recipe("bf16"):
        want = exact()
    assert_as_exact(fused, plain, want)
    for name, t in plain.items():
        assert error(fused[name], t.double()) < CLOSE, name
    return fused


def rules(plan):
    """The rules of a plan's steps; None for a step without a kernel."""
    return [step.rule for step in plan.steps]


def assert_products_are_fp8(plan, recipe, forward_only=False):
    """All steps have kernels, and products those of FP8, except weight gradients that the recipe leaves in bf16."""
    assert not plan.unfused, str(plan)
    found = set(rules(plan))
    wanted = ["gemm_activation", "gemm"] + ([] if forward_only else ["dgrad_activation", "dgrad"])
    if recipe == "fp8_block" and not forward_only:
        wanted.append("wgrad")
    assert {rule for rule in found if "fp8" in rule} == {f"sm90.fp8_grouped_{name}" for name in wanted}
    in_bf16 = {
        rule for rule in found if rule.startswith(("sm90.grouped_", "sm90.gathered_")) and "quantize" not in rule
    }
    assert all("wgrad" in rule for rule in in_bf16), in_bf16
    assert bool(in_bf16) is (recipe != "fp8_block" and not forward_only)


def count_quantized_weights(monkeypatch):
    """The shapes of weights that kernels quantize from now on, in modules that have not been called yet."""
    counted, bind = [], block_functions.bind_quantize_weight

    def counting(weight, *format, **forms):
        run = bind(weight, *format, **forms)

        def launch(weight):
            counted.append(tuple(weight.shape))
            return run(weight)

        return launch

    monkeypatch.setattr(block_functions, "bind_quantize_weight", counting)
    return counted


def kernels():
    """The shipped kernels of FP8, and of weight gradients in bf16, to compile ahead."""
    from fusedmoe.kernels.build import shipped

    wanted = ("e4m3", "quantize", "ragged_k_bf16", "ragged_k_gather")
    return [kernel for kernel in shipped.shipped("sm_90a") if any(part in kernel.symbol for part in wanted)]
