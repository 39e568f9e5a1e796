"""Whole chains in NVFP4 on the rules for Blackwell, forward and backward, on a CPU: through NVIDIA's wrappers, with
device code in PyTorch. test_sm100_rules.py has MXFP8.
"""

import shutil

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")
pytest.importorskip("cudnn.gemm.cutedsl.grouped", exc_type=ImportError)
if shutil.which("gcc") is None:
    pytest.skip("needs gcc, which links the kernels' host code", allow_module_level=True)

from emulator.gpu import emulated
from kit.sm100_chains import (
    SAME,
    assert_near,
    check,
    clamped,
    device_in_pytorch,  # noqa: F401  (a fixture)
    launched,
    launches_of_test,  # noqa: F401  (a fixture)
    rules,
    run,
    swiglu,
    unfused,
    unfused_ops,
)
from kit.sm100_machine import (
    ACTIVATION,
    BF16,
    DACTIVATION,
    DGRAD,
    DGRAD_ACTIVATION,
    DGRAD_DDISPATCH,
    GATHERED_QUANTIZE,
    GATHERED_QUANTIZE_GRAD,
    GEMM,
    GEMM_ACTIVATION,
    GEMM_COMBINE,
    NVFP4_KERNEL,
    QUANTIZE,
    QUANTIZE_GRAD,
    QUANTIZE_WEIGHT,
    ROWS,
    WGRAD,
    E,
    H,
    I,
    blackwell_machine,  # noqa: F401  (a fixture)
    experts,
    inputs,
    tokens,
)
from kit.toy import only_plan

import fusedmoe as fm
from fusedmoe.builtin_rules.sm100 import nvfp4_forms
from fusedmoe.kernels.sm100 import calls, quantize_functions
from fusedmoe.numerics.recipes import NVFP4

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")

NEAREST = NVFP4(stochastic_rounding=False)
EMULATION = 0.08
"""Bound of the relative error from the unfused chain: a value that was rounded to bf16 elsewhere may have another code,
which is up to a third away.
"""
WEIGHTS = [QUANTIZE_WEIGHT, QUANTIZE_WEIGHT]
FORWARD = [*WEIGHTS, QUANTIZE, GEMM_ACTIVATION, GEMM]
BACKWARD = [QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, WGRAD, DGRAD]
ALL = {"glu": 1, "quant": 2, "dglu": 1, "wgrad": 2}


def checked(chain, x, *, recipe=NEAREST, **options):
    """Check a call against both computations; return its plan and its results."""
    return check(chain, x, recipe=recipe, format="nvfp4", **{"emulation": EMULATION} | options)


@pytest.mark.parametrize(
    ("act", "scale", "bias"),
    [
        (swiglu, True, False),
        # these have kernels of their own, which take long to compile; test_sm100_rules.py has such chains in MXFP8
        *(
            pytest.param(*of, marks=pytest.mark.slow)
            for of in (
                (swiglu, False, False), (swiglu, False, "frozen"), (clamped, True, "frozen"),
                (fm.SquaredReLU, False, False), (fm.SquaredReLU, True, False),
            )
        ),
    ],
)  # fmt: skip
def test_whole_chains(act, scale, bias, launches):
    with fm.disabled(ACTIVATION, DACTIVATION):  # of few rows, they take fewer launches
        plan, _ = checked(experts(act(), scale=scale, bias=bias), tokens(), **inputs(scale=scale))
    assert rules(plan) == [*FORWARD, *BACKWARD]
    assert not unfused_ops(plan)
    squared = act is fm.SquaredReLU
    assert launched(launches) == ({"srelu": 1, "quant": 2, "dsrelu": 1, "wgrad": 2} if squared else ALL)
    assert {launch.kernel.sf_vec_size for launch in launches} == {16}


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 0.35),  # gradients are rounded stochastically, and draw others
        ({"hadamard": False, "stochastic_rounding": False}, EMULATION),
        ({"weight_2d": False, "stochastic_rounding": False}, EMULATION),
    ],
    ids=["stochastic", "not rotated", "blocks of a row"],
)
def test_options_of_the_recipe(options, bound, launches):
    plan, _ = checked(
        experts(scale=True), tokens(), recipe=NVFP4(**options), same=False, emulation=bound, **inputs(scale=True)
    )
    assert rules(plan) == [*FORWARD, *BACKWARD]
    assert launched(launches) == ALL


def test_stochastic_rounding_has_no_bias():
    """The mean of many gradients is much nearer to the gradient without quantization than one of them."""
    splits = (60, 0, 39, 1)
    chain, x, named = experts(scale=True), tokens(100, splits), inputs(100, splits, scale=True)
    dy = torch.randn(100, H).to(BF16)

    def gradients(recipe, count):
        with fm.recipe(recipe):
            return torch.stack([run(chain, x, dy, **named)["0.weight"].double() for _ in range(count)])

    exact = gradients(NVFP4(hadamard=False, stochastic_rounding=False), 1)[0]
    drawn = gradients(NVFP4(hadamard=False), 16)
    assert not torch.equal(drawn[0], drawn[1])
    one, mean = ((t - exact).norm() for t in (drawn[0], drawn.mean(0)))
    spread = (drawn - drawn.mean(0)).norm() / 4
    assert spread > 0
    assert mean < 0.8 * one


def test_trained_biases(launches):
    plan, _ = checked(experts(scale=True, bias="trained"), tokens(), plain_middle=True, **inputs(scale=True))
    forward = [*WEIGHTS, QUANTIZE, GEMM, ACTIVATION, QUANTIZE, GEMM]
    assert rules(plan) == [*forward, QUANTIZE_GRAD, WGRAD, DGRAD, DACTIVATION, QUANTIZE_GRAD, WGRAD, DGRAD]
    assert launched(launches) == {"quant": 4, "wgrad": 2}


def test_any_splits_and_any_number_of_rows_run_the_same_kernels(launches):
    chain = experts(scale=True)
    checked(chain, tokens(), **inputs(scale=True))
    kernels = calls.kernel.cache_info().currsize
    for count, splits in (ROWS, (0, 0, 600, 0)), (ROWS, (256, 0, 0, 256)), (7, (1, 1, 1, 1)), (1100, (1, 1098, 1, 0)):
        launches.clear()
        plan, _ = checked(chain, tokens(count, splits), same=False, **inputs(count, splits, scale=True))
        assert rules(plan) == [*FORWARD, *BACKWARD], splits
        assert launched(launches) == ALL
    assert calls.kernel.cache_info().currsize == kernels


def test_rows_of_no_expert_alone(launches):
    """All results are zeros, not what memory held before."""
    chain, none = experts(scale=True), (0,) * E
    x, dy = tokens(300, none), torch.randn(300, H).to(BF16)
    with fm.recipe("nvfp4"):
        got = run(chain, x, dy, **inputs(300, none, scale=True))
    assert launched(launches) == ALL
    assert {*got} == {"y", "x", "probs", "0.weight", "3.weight"}
    assert not any(t.any() for t in got.values())


@pytest.mark.parametrize("off", dict.fromkeys([*FORWARD, *BACKWARD]))
def test_each_rule_may_be_switched_off(off):
    """The other rules take packed values from plain PyTorch."""
    with fm.disabled(off):
        plan, _ = checked(experts(scale=True), tokens(), same=False, **inputs(scale=True))
    assert off not in rules(plan)
    assert len({*FORWARD, *BACKWARD} & {*rules(plan)}) >= 2


@pytest.mark.parametrize("which", ["gate and up", "scales", "scales of experts"])
def test_a_mistake_in_the_layout_shows(which, monkeypatch):
    """The bounds tell right from wrong."""
    if which == "gate and up":
        monkeypatch.setattr("fusedmoe.builtin_rules.sm100.nvfp4_forms.interleave", lambda x, *_: x)
    elif which == "scales":
        monkeypatch.setattr("fusedmoe.builtin_rules.sm100.nvfp4_forms.swizzle", lambda scale: scale.contiguous())
    else:
        monkeypatch.setattr(torch.Tensor, "sqrt", lambda t: t)  # the derivative squares the scale
    chain = experts(scale=True)
    with torch.no_grad():
        chain[0].weight.mul_(torch.logspace(-1, 1, H))  # blocks have different scales
    with pytest.raises(AssertionError, match=r"0\.weight: |y: |x: "):
        checked(chain, tokens(), same=False, **inputs(scale=True))


def test_the_kernel_adds_to_main_grad():
    """Where rows of the weight are in order; gate and up are added by another launch."""
    chain, x, dy, named = experts(scale=True), tokens(), torch.randn(ROWS, H).to(BF16), inputs(scale=True)
    with fm.recipe(NEAREST):
        want = run(chain, x, dy, **named)
        for layer in (chain[0], chain[3]):
            layer.accumulate_into_main_grad = True
            layer.weight.main_grad = torch.ones(layer.weight.shape)
        run(chain, x, dy, **named)
    added = {name: chain.get_parameter(name).main_grad - 1 for name in ("0.weight", "3.weight")}
    assert_near(added, {name: want[name] for name in added}, SAME)


def test_weights_are_quantized_again_only_after_they_have_changed(monkeypatch):
    made, swizzle = [], nvfp4_forms.swizzle
    monkeypatch.setattr(nvfp4_forms, "swizzle", lambda scale: made.append(scale.shape) or swizzle(scale))
    chain, x, named = experts(scale=True), tokens(requires_grad=False), inputs(scale=True)
    with fm.recipe(NEAREST), torch.no_grad():
        first = chain(x, **named)
        assert len(made) == 2, "of two layers"
        assert torch.equal(chain(x, **named), first)
        assert len(made) == 2
        chain[0].weight.mul_(0.5)
        assert not torch.equal(chain(x, **named), first)
        assert len(made) == 3


def test_a_layer_of_a_model(launches):
    layer = fm.MoE(H, I, E, 2, dtype=BF16)
    x, dy = torch.randn(150, H, dtype=BF16, requires_grad=True), torch.randn(150, H, dtype=BF16)
    with fm.recipe(NEAREST):
        emulated_results = unfused(layer, x, dy)
        got, plan = run(layer, x, dy), only_plan(layer, x)
        (asked,) = fm.explain(layer, tokens=150, arch=100).plans
    assert_near(got, emulated_results, EMULATION)
    forward = [*WEIGHTS, GATHERED_QUANTIZE, GEMM_ACTIVATION, GEMM_COMBINE]
    backward = [GATHERED_QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, WGRAD, DGRAD_DDISPATCH]
    assert rules(plan) == rules(asked) == [*forward, *backward]
    assert launched(launches) == ALL


def test_the_kernel_quantizes_what_the_products_read(monkeypatch):
    """On the emulator, by the kernel's code: rows, gradients, and what is between the layers."""
    count, splits = 44, (20, 0, 19, 1)
    with emulated() as gpu:
        monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 100)
        monkeypatch.setattr(quantize_functions, "bind_quantize_packed_nvfp4", NVFP4_KERNEL)
        checked(experts(scale=True), tokens(count, splits), **inputs(count, splits, scale=True))
        assert gpu.launches == 4
