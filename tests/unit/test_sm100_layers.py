"""`MoE` on the rules for Blackwell, on a CPU; and chains whose rows the emulator quantizes, by the kernel's code."""

import shutil

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")
pytest.importorskip("cudnn.gemm.cutedsl.grouped", exc_type=ImportError)
if shutil.which("gcc") is None:
    pytest.skip("needs gcc, which links the kernels' host code", allow_module_level=True)

from blackwell.expert_mlp import Problem, in_plain_pytorch
from emulator.gpu import emulated
from kit.sm100_chains import (
    EMULATION,
    SAME,
    assert_near,
    check,
    device_in_pytorch,  # noqa: F401  (a fixture)
    launched,
    launches_of_test,  # noqa: F401  (a fixture)
    rules,
    run,
    unfused,
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
    KERNELS,
    QUANTIZE,
    QUANTIZE_GRAD,
    QUANTIZE_WEIGHT,
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
from fusedmoe.kernels.sm100 import quantize_functions

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")

WEIGHTS = [QUANTIZE_WEIGHT, QUANTIZE_WEIGHT]
FUSED = [GEMM_ACTIVATION, GEMM_COMBINE, GATHERED_QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, WGRAD, DGRAD_DDISPATCH]
APART = [GEMM, ACTIVATION, QUANTIZE, GEMM_COMBINE]
BIASED = [GEMM, ACTIVATION, QUANTIZE, GEMM]  # the weights of rows follow the bias, and their gradients read the rows


def moe_in_plain_pytorch(layer, x, dy):
    """The same arithmetic: the layer's router, then each expert's rows in the order of the tokens."""
    x = x.detach().requires_grad_()
    routing = layer.router(x)
    weight_TK, expert_TK = routing.expert_weight, routing.expert_index
    order = expert_TK.flatten().argsort(stable=True)
    token = order // expert_TK.shape[1]
    probs = weight_TK.detach().flatten()[order]
    splits = expert_TK.flatten().bincount(minlength=E)
    first, last = layer.experts.gate_up, layer.experts.down
    rows, dy_rows = x.detach()[token], dy[token]
    want = in_plain_pytorch(
        Problem("swiglu", None, first.weight.detach(), last.weight.detach(), rows, dy_rows, probs, splits)
    )
    dweight = torch.zeros(weight_TK.numel()).index_copy_(0, order, want.dprobs).view_as(weight_TK)
    dx, drouter = torch.autograd.grad(weight_TK, (x, layer.router.weight), dweight.to(weight_TK.dtype))
    zeros = torch.zeros(x.shape)
    return {
        "y": zeros.index_add(0, token, want.y), "x": zeros.index_add(0, token, want.dx) + dx,
        "router.weight": drouter, "experts.gate_up.weight": want.dw1, "experts.down.weight": want.dw2,
    }  # fmt: skip


def problem(tokens=150, requires_grad=True, **settings):
    layer = fm.MoE(H, I, E, 2, dtype=BF16, **settings)
    x = torch.randn(tokens, H, dtype=BF16, requires_grad=requires_grad)
    return layer, x, torch.randn(tokens, H, dtype=BF16)


def both_ways(layer, x, dy, *disabled):
    """Check a call against the unfused one; return its plan and its results."""
    with torch.set_grad_enabled(x.requires_grad), fm.recipe("mxfp8"):
        emulated = unfused(layer, x, dy)
        with fm.disabled(*disabled):
            got = run(layer, x, dy)
            plan = only_plan(layer, x)
    assert_near(got, emulated, EMULATION)
    return plan, got


def test_a_layer_of_a_model(launches):
    """The router, and the sums over slots, have no kernel here."""
    layer, x, dy = problem()
    plan, got = both_ways(layer, x, dy)
    assert_near(got, moe_in_plain_pytorch(layer, x, dy), SAME)
    assert rules(plan) == [*WEIGHTS, GATHERED_QUANTIZE, *FUSED]
    assert launched(launches) == {"glu": 1, "quant": 2, "dglu": 1, "wgrad": 2}
    with fm.recipe("mxfp8"):
        (asked,) = fm.explain(layer, tokens=150, arch=100).plans
    assert rules(asked) == rules(plan)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_tokens_are_quantized_through_the_index_of_their_rows(training):
    layer, x, dy = problem(requires_grad=training)
    plan, got = both_ways(layer, x, dy, QUANTIZE)
    assert rules(plan) == [*WEIGHTS, GATHERED_QUANTIZE, *FUSED[: None if training else 2]]
    if training:
        assert_near(got, moe_in_plain_pytorch(layer, x, dy), SAME)


@pytest.mark.parametrize(
    ("settings", "forward", "backward"),
    [
        ({"bias": True}, BIASED, [QUANTIZE_GRAD, WGRAD, DGRAD, DACTIVATION, QUANTIZE_GRAD, WGRAD, DGRAD_DDISPATCH]),
        pytest.param({"activation": "squared_relu"}, FUSED[:2], FUSED[2:], marks=pytest.mark.slow),
        (
            {"activation": "geglu"},
            APART,
            [GATHERED_QUANTIZE_GRAD, WGRAD, DGRAD, DACTIVATION, QUANTIZE_GRAD, WGRAD, DGRAD_DDISPATCH],
        ),
    ],
    ids=["bias", "squared_relu", "geglu"],
)
def test_other_layers(settings, forward, backward):
    layer, x, dy = problem(**settings)
    plan, _ = both_ways(layer, x, dy)
    assert rules(plan) == [*WEIGHTS, GATHERED_QUANTIZE, *forward, *backward]


# ------------------------------------------------------------------------- rows that the sums over slots read packed


def routed(combine=None, requires_grad=True, bias=False):
    """A chain with Dispatch and Combine, and its inputs: tokens with two experts, with one, and with none."""
    middle = [fm.SwiGLU(), *([fm.Scale("probs")] if combine is None else [])]
    chain = fm.Sequential(
        fm.Dispatch(), fm.GroupedLinear(E, H, 2 * I, dtype=BF16), *middle,
        fm.GroupedLinear(E, I, H, bias=bias, dtype=BF16), fm.Combine(combine),
    )  # fmt: skip
    if bias:
        torch.nn.init.normal_(chain[-2].bias.requires_grad_(False))
    index = torch.randint(E, (150, 2))
    index[::3, 1] = index[::5, 0] = E  # sentinels
    weight = torch.rand(150, 2) + 0.1
    x = torch.randn(150, H, dtype=BF16, requires_grad=requires_grad)
    named = {"expert_index": index, "expert_weight": weight.requires_grad_(requires_grad)}
    return chain, x, torch.randn(150, H, dtype=BF16), named


def both(chain, x, dy, named, recipe="mxfp8"):
    """Check a call against the unfused one; return its plan and its results."""
    with torch.set_grad_enabled(x.requires_grad), fm.recipe(recipe):
        emulated = unfused(chain, x, dy, **named)
        got, plan = run(chain, x, dy, **named), only_plan(chain, x, **named)
    assert_near(got, emulated, EMULATION)
    without = (named["expert_index"] == E).all(1)
    assert without.any()
    assert not any(got[name][without].any() for name in ("y", "x") if name in got)
    return plan, got


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_sums_over_slots_read_packed_rows(bias, launches):
    chain, x, dy, named = routed(bias=bias)
    plan, got = both(chain, x, dy, named)
    assert rules(plan) == [*WEIGHTS, GATHERED_QUANTIZE, *FUSED]
    (step,) = [step for step in plan.steps if step.rule == DGRAD_DDISPATCH]
    assert step.ops == ("1.Dgrad", "0.DispatchWeightGrad", "0.DDispatch")
    launches.clear()
    with fm.disabled(GEMM_COMBINE, DGRAD_DDISPATCH):
        plan, apart = both(chain, x, dy, named)
    assert {GEMM, DGRAD} <= {*rules(plan)}
    assert all(torch.equal(got[name], apart[name]) for name in got)
    assert launched(launches) == {"glu": 1, "quant": 2, "dglu": 1, "wgrad": 2}


def test_weights_of_rows_after_the_last_layer():
    """In training, their gradients read the rows in order."""
    with fm.disabled(GEMM):  # which takes fewer launches, and reads and writes more
        plan, _ = both(*routed("probs", requires_grad=False))
    assert GEMM_COMBINE in rules(plan)
    plan, _ = both(*routed("probs"))
    assert GEMM_COMBINE not in rules(plan)
    assert {GEMM, DGRAD_DDISPATCH} <= {*rules(plan)}
    reasons = {attempt.reason for attempt in plan.attempts if attempt.rule == GEMM_COMBINE}
    assert any(reason.startswith("cannot keep 4.input") for reason in reasons)


def test_gradients_of_tokens_alone():
    chain, x, dy, named = routed()
    named["expert_weight"] = named["expert_weight"].detach()
    plan, _ = both(chain, x, dy, named)
    (step,) = [step for step in plan.steps if step.rule == DGRAD_DDISPATCH]
    assert step.ops == ("1.Dgrad", "0.DDispatch")


def test_no_tokens(launches):
    chain, x, _, named = routed()
    x, named = x[:0].detach().requires_grad_(), {name: t[:0].detach() for name, t in named.items()}
    with fm.recipe("mxfp8"), fm.strict():
        chain(x, **named).sum().backward()
    assert x.grad.shape == (0, H)
    assert not launches


# ------------------------------------------------------------------------------------------------------- the emulator


@pytest.fixture
def emulator(monkeypatch):
    """The kernels that quantize run, compiled for the GPU that is emulated, between those in PyTorch."""
    with emulated() as gpu:
        monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 100)
        for function in KERNELS:
            monkeypatch.setattr(quantize_functions, function.__name__, function)
        yield gpu


@pytest.mark.slow  # test_emulated_kernels.py has the kernel, test_sm100_nvfp4.py one in such a chain
@pytest.mark.parametrize("bias", [False, "trained"], ids=["", "gate and up"])
def test_the_kernel_quantizes_what_the_products_read(bias, emulator):
    """Weights, rows and gradients; with trained biases, also rows and gradients between the layers."""
    count, splits = 44, (20, 0, 19, 1)
    chain, x = experts(scale=True, bias=bias), tokens(count, splits)
    check(chain, x, plain_middle=bool(bias), **inputs(count, splits, scale=True))
    assert emulator.launches == (4 if bias else 2) + 2, "and of two weights"


@pytest.mark.slow  # as above
def test_the_kernel_quantizes_through_an_index(emulator):
    layer, x, dy = problem(20)
    _, got = both_ways(layer, x, dy, QUANTIZE)
    assert_near(got, moe_in_plain_pytorch(layer, x, dy), SAME)
    assert emulator.launches == 4, "two of weights"
