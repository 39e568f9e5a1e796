"""Layers whose steps all have FP8 kernels on Hopper, their calls, and what these are compared with.

Axes: R rows sorted by expert, T tokens, E experts, K chosen experts per token, H hidden, I intermediate features.
"""

import torch

import fusedmoe as fm
from fusedmoe.kernels.rows.quantize import block_functions
from kit.hopper import DEVICE, EMULATED

BF16 = torch.bfloat16
E, K, H, I, T = (4, 2, 128, 128, 70) if EMULATED else (8, 2, 256, 128, 300)  # noqa: E741
RECIPES = ["fp8_block", "fp8_block:wgrad=bf16"]
CLOSE = 10 ** (-30 / 20)  # of norms, 30 dB: a bf16 value that is rounded otherwise may get another code
OF_RECIPE = 1.5  # times the error that the recipe has in plain PyTorch


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


def outcome(call, parameters, x, dy, **named):
    """The output of a call and every gradient, by name; ``parameters`` are named too."""
    leaves = {"x": x} | {name: t for name, t in named.items() if t.is_floating_point()}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    parameters = {name: p for name, p in parameters if p.requires_grad}
    for p in parameters.values():
        p.grad = None
    y = call(leaves["x"], **{**named, **{name: t for name, t in leaves.items() if name != "x"}})
    y.backward(dy)
    found = {"y": y.detach(), **{name: t.grad for name, t in (leaves | parameters).items()}}
    return {name: t.clone() for name, t in found.items()}


def of(layer, x, dy, **named):
    return outcome(layer, layer.named_parameters(), x, dy, **named)


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert t.any(), f"{name}: zeros would pass"
        assert torch.equal(got[name], t), name


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


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
    assert fused.keys() == plain.keys() == want.keys()
    for name, c in want.items():
        assert c.any(), f"{name}: zeros would pass"
        assert fused[name].dtype is plain[name].dtype
        ours, theirs = error(fused[name], c.double()), error(plain[name], c.double())
        assert theirs < 0.1, f"{name}: {theirs}"
        assert ours <= OF_RECIPE * theirs, f"{name}: {ours}, in plain PyTorch {theirs}"
        assert error(fused[name], plain[name].double()) < CLOSE, name
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
