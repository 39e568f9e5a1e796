"""Whole chains on the rules for Blackwell, forward and backward, on a CPU: through NVIDIA's wrappers, with device code
in PyTorch.

test_sm100_training.py has several calls in a row; test_sm100_constraints.py what the rules decline.
"""

import shutil

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")
pytest.importorskip("cudnn.gemm.cutedsl.grouped", exc_type=ImportError)
if shutil.which("gcc") is None:
    pytest.skip("needs gcc, which links the kernels' host code", allow_module_level=True)

from kit.sm100_chains import (
    EMULATION,
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
    GEMM,
    GEMM_ACTIVATION,
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
from kit.toy import rules_used

import fusedmoe as fm
from fusedmoe import FusionError
from fusedmoe.builtin_rules.sm100 import packed
from fusedmoe.kernels.sm100 import calls
from fusedmoe.numerics.formats import Quantizer, mxfp8
from fusedmoe.numerics.recipes import MXFP8, Custom

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")

WEIGHTS = [QUANTIZE_WEIGHT, QUANTIZE_WEIGHT]
FORWARD = [*WEIGHTS, QUANTIZE, GEMM_ACTIVATION, GEMM]
BACKWARD = [QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, WGRAD, DGRAD]
M, ROTATED = Quantizer(mxfp8()), Quantizer(mxfp8(), hadamard=True)
APART_FORWARD = [*WEIGHTS, QUANTIZE, GEMM, ACTIVATION, QUANTIZE, GEMM]
APART_BACKWARD = [QUANTIZE_GRAD, WGRAD, DGRAD, DACTIVATION, QUANTIZE_GRAD, WGRAD, DGRAD]


# ------------------------------------------------------------------------------------------------------- whole chains


@pytest.mark.parametrize(
    ("act", "scale", "bias"),
    [
        (swiglu, True, False), (clamped, True, "frozen"),
        # these have kernels of their own, which take long to compile
        *(
            pytest.param(*of, marks=pytest.mark.slow)
            for of in (
                (swiglu, False, False), (swiglu, True, "frozen"), (swiglu, False, "frozen"), (clamped, True, False),
                (fm.SquaredReLU, True, False), (fm.SquaredReLU, False, False),
            )
        ),
    ],
)  # fmt: skip
def test_whole_chains(act, scale, bias, launches):
    plan, _ = check(experts(act(), scale=scale, bias=bias), tokens(), **inputs(scale=scale))
    assert rules(plan) == [*FORWARD, *BACKWARD]
    assert not unfused_ops(plan)
    glu, dglu = ("srelu", "dsrelu") if act is fm.SquaredReLU else ("glu", "dglu")
    assert launched(launches) == {glu: 1, "quant": 2, dglu: 1, "wgrad": 2}
    (step,) = [step for step in plan.steps if step.rule == DGRAD_ACTIVATION]
    assert step.ops == (
        ("3.Dgrad", "2.ScaleGrad", "2.DScale", f"1.D{act().__class__.__name__}", "0:grad.QuantizeGrad")
        if scale
        else ("2.Dgrad", f"1.D{act().__class__.__name__}", "0:grad.QuantizeGrad")
    )


@pytest.mark.parametrize(("act", "scale"), [(swiglu, True), (clamped, False), (fm.SquaredReLU, True)])
def test_trained_biases(act, scale, launches):
    """Their gradients sum unquantized rows, so that the activation and its derivative run by themselves."""
    plan, got = check(experts(act(), scale=scale, bias="trained"), tokens(), plain_middle=True, **inputs(scale=scale))
    assert rules(plan) == [*APART_FORWARD, *APART_BACKWARD]
    assert launched(launches) == {"quant": 4, "wgrad": 2}
    assert {"0.bias", "3.bias" if scale else "2.bias"} <= got.keys()


ONE_PLAN = [
    (ROWS, (100, 150, 30, 40)), (ROWS, (0, 0, 600, 0)), (ROWS, (0, 0, 0, 1)), (ROWS, (256, 0, 0, 256)),
    (300, (300, 0, 0, 0)), (7, (1, 1, 1, 1)), (1, (0, 1, 0, 0)), (1100, (1, 1098, 1, 0)),
]  # fmt: skip


def test_any_splits_and_any_number_of_rows_run_the_same_kernels(launches):
    chain = experts(scale=True)
    check(chain, tokens(), **inputs(scale=True))
    kernels, compiled = calls.kernel.cache_info().currsize, {*map(id, (launch.kernel for launch in launches))}
    for count, splits in ONE_PLAN:
        launches.clear()
        plan, _ = check(chain, tokens(count, splits), **inputs(count, splits, scale=True))
        assert rules(plan) == [*FORWARD, *BACKWARD], splits
        assert launched(launches) == {"glu": 1, "quant": 2, "dglu": 1, "wgrad": 2}
        assert {id(launch.kernel) for launch in launches} <= compiled
    assert calls.kernel.cache_info().currsize == kernels


def test_rows_of_no_expert_alone(launches):
    """All results are zeros, not what memory held before."""
    chain, none = experts(scale=True), (0,) * E
    x, dy = tokens(300, none), torch.randn(300, H).to(BF16)
    with fm.recipe("mxfp8"):
        got = run(chain, x, dy, **inputs(300, none, scale=True))
    assert launched(launches) == {"glu": 1, "quant": 2, "dglu": 1, "wgrad": 2}
    assert {*got} == {"y", "x", "probs", "0.weight", "3.weight"}
    assert not any(t.any() for t in got.values())


def test_no_rows(launches):
    chain, x = experts(), torch.empty(0, H, dtype=BF16, requires_grad=True)
    with fm.recipe("mxfp8"), fm.strict():
        chain(x, splits=torch.zeros(E, dtype=torch.int64)).sum().backward()
    assert x.grad.shape == (0, H)
    assert not launches


@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
def test_padding_rows_do_not_have_the_activation_of_the_bias(scale):
    """It would be far larger than that of the rows, with which they share blocks by columns."""
    chain, x, named = experts(scale=scale, bias="frozen"), tokens(), inputs(scale=scale)
    if scale:
        named["probs"].detach().mul_(1e-6)
    else:
        x.detach().mul_(0.1).add_(1)
        with torch.no_grad():
            chain[0].weight[:, :I] = -24 / H  # a gate of 12 - 24
            chain[0].bias[:, :I] = 12
    plan, _ = check(chain, x, emulation=0.1, **named)
    assert rules(plan) == [*FORWARD, *BACKWARD]


def test_a_mistake_in_the_layout_shows(monkeypatch):
    """The bounds tell right from wrong: gate and up of the weight do not alternate."""
    monkeypatch.setattr("fusedmoe.numerics.formats.packed.interleave", lambda x, axis=-1: x)
    with pytest.raises(AssertionError, match="y: "):
        check(experts(), tokens(), **inputs())


# -------------------------------------------------------------------------------------------------------- other plans


def frozen(*names):
    chain = experts()
    for name in names:
        chain.get_parameter(name).requires_grad_(False)
    return chain


@pytest.mark.parametrize(
    ("chain", "requires_grad", "backward", "count"),
    [
        (("0.weight",), True, [QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, DGRAD], {"dglu": 1, "wgrad": 1, "quant": 2}),
        (("2.weight",), True, [QUANTIZE_GRAD, DGRAD_ACTIVATION, WGRAD, DGRAD], {"dglu": 1, "wgrad": 1, "quant": 2}),
        ((), False, [QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, WGRAD], {"dglu": 1, "wgrad": 2, "quant": 1}),
        (("0.weight", "2.weight"), True, [QUANTIZE_GRAD, DGRAD_ACTIVATION, DGRAD], {"dglu": 1, "quant": 2}),
    ],
    ids=["first weight", "last weight", "rows", "weights"],
)
def test_gradients_that_are_not_required(chain, requires_grad, backward, count, launches):
    plan, _ = check(frozen(*chain), tokens(requires_grad=requires_grad), same=False, **inputs())
    assert rules(plan) == [*FORWARD, *backward]
    assert launched(launches) == {"glu": 1, **count}


@pytest.mark.parametrize("bias", [False, "trained"], ids=["", "bias"])
def test_inference(bias, launches):
    """Without a backward pass, the activation of a biased layer is fused too."""
    with torch.no_grad():
        plan, got = check(
            experts(scale=True, bias=bias), tokens(requires_grad=False), **inputs(scale=True, requires_grad=False)
        )
    assert rules(plan) == FORWARD
    assert not plan.kept
    assert {*got} == {"y"}
    assert launched(launches) == {"glu": 1, "quant": 1}


def test_deterministic_algorithms(launches):
    """The gradient of a row scale is a sum by atomics."""
    torch.use_deterministic_algorithms(True)
    try:
        plan, _ = check(experts(scale=True), tokens(), same=False, **inputs(scale=True))
        assert DGRAD in rules(plan)
        assert DGRAD_ACTIVATION not in rules(plan)
        launches.clear()
        plan, _ = check(experts(), tokens(), **inputs())
        assert rules(plan) == [*FORWARD, *BACKWARD]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("act", "width", "forward"),
    [(fm.GeGLU(), I, APART_FORWARD), (fm.ReGLU(), I, APART_FORWARD), (fm.SwiGLU(interleaved=True), I,
     APART_FORWARD), (fm.SwiGLU(), 192, [QUANTIZE_WEIGHT, QUANTIZE, GEMM, ACTIVATION])],
    ids=["geglu", "reglu", "interleaved", "half of a width"],
)  # fmt: skip
def test_other_activations(act, width, forward, launches):
    """Products alone, with and without gate and up in blocks, and beside a layer that runs unfused."""
    plan, _ = check(experts(act, width=width), tokens(), same=False, **inputs())
    assert rules_used(plan, "forward") == forward
    assert DGRAD in rules_used(plan, "backward")
    assert WGRAD in rules_used(plan, "backward")
    assert launched(launches)["quant"] == (4 if width == I else 2)


def test_weight_gradients_in_bf16(launches):
    plan, _ = check(experts(scale=True), tokens(), recipe=MXFP8(wgrad="bf16"), same=False, **inputs(scale=True))
    assert WGRAD not in rules(plan)
    assert {QUANTIZE_GRAD, DGRAD} <= {*rules(plan)}
    assert launched(launches)["wgrad"] == 0


@pytest.mark.parametrize("off", dict.fromkeys([*FORWARD, *BACKWARD]))
def test_each_rule_may_be_switched_off(off):
    """The other rules take packed values from plain PyTorch."""
    with fm.disabled(off):
        plan, _ = check(experts(scale=True), tokens(), same=False, **inputs(scale=True))
    assert off not in rules(plan)
    assert len({*FORWARD, *BACKWARD} & {*rules(plan)}) >= 2


@pytest.mark.parametrize("dtype", [BF16, torch.float64], ids=str)
def test_row_scales_of_other_dtypes(dtype):
    named = inputs(scale=True)
    named["probs"] = named["probs"].detach().to(dtype).requires_grad_()
    plan, got = check(experts(scale=True), tokens(), same=False, **named)
    assert rules(plan) == [*FORWARD, *BACKWARD]
    assert got["probs"].dtype is dtype


def test_weights_that_are_transposed_in_memory():
    chain = experts()
    for layer in (chain[0], chain[2]):
        layer.weight = torch.nn.Parameter(layer.weight.detach().mT.contiguous().mT)
    plan, _ = check(chain, tokens(), **inputs())
    assert rules(plan) == [*FORWARD, *BACKWARD]


def test_one_layer():
    layer = fm.Sequential(fm.GroupedLinear(E, H, I, bias=True, dtype=BF16))
    plan, _ = check(layer, tokens(), same=False, **inputs())
    assert rules(plan) == [QUANTIZE_WEIGHT, QUANTIZE, GEMM, QUANTIZE_GRAD, WGRAD, DGRAD]


def test_three_layers(launches):
    """The layer between two activations reads and writes packed values in both directions. Errors of three add up."""
    chain = fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, dtype=BF16), fm.SwiGLU(), fm.GroupedLinear(E, I, 2 * I, dtype=BF16), fm.SwiGLU(),
        fm.Scale("probs"), fm.GroupedLinear(E, I, H, dtype=BF16),
    )  # fmt: skip
    plan, _ = check(chain, tokens(), same=False, emulation=2 * EMULATION, **inputs(scale=True))
    assert rules(plan) == [
        *WEIGHTS, QUANTIZE_WEIGHT, QUANTIZE, GEMM_ACTIVATION, GEMM_ACTIVATION, GEMM,
        QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, WGRAD, DGRAD_ACTIVATION, WGRAD, DGRAD,
    ]  # fmt: skip
    assert launched(launches) == {"glu": 2, "quant": 2, "dglu": 2, "wgrad": 3}


def test_a_derivative_of_rows_that_plain_pytorch_packs(launches, monkeypatch):
    """With many rows, where launches cost little. The kernel does not pack a weight that plain PyTorch multiplies too,
    since it has no other forms.
    """
    monkeypatch.setattr("fusedmoe.fusion.search.candidates._US_PER_LAUNCH", 0.0)
    count, splits = 8192, (4000, 0, 4101, 1)
    with fm.disabled(GEMM_ACTIVATION, ACTIVATION):
        plan, _ = check(experts(), tokens(count, splits), same=False, **inputs(count, splits))
    assert rules(plan) == [QUANTIZE_WEIGHT, QUANTIZE, GEMM, *BACKWARD]
    assert launched(launches) == {"quant": 2, "dglu": 1, "wgrad": 2}


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (MXFP8(hybrid=True), {"quant": 2}),
        (MXFP8(weight_2d=True), {"wgrad": 2}),
        (Custom(input=M, weight=M), {"quant": 2}),
        (Custom(input=M, grad=M), {"wgrad": 2}),
        (Custom(input=ROTATED, weight=M, grad=M), {"quant": 2}),
        (Custom(input=M, weight=M, grad=ROTATED), {"quant": 2}),
    ],
    ids=["e5m2 gradients", "square blocks", "no gradients", "no weights", "rotated rows", "rotated gradients"],
)
def test_recipes_of_which_some_operands_are_packed(recipe, expected, launches):
    """Products of packed operands alone have kernels; the others run in plain PyTorch."""
    check(experts(scale=True), tokens(), recipe=recipe, same=False, **inputs(scale=True))
    assert launched(launches) == expected


# ------------------------------------------------------------------------------------------ calls that a rule declines


def assert_strict_says(chain, x, named, match):
    with fm.recipe("mxfp8"), fm.strict(), pytest.raises(FusionError, match=match):
        chain(x, **named).float().nan_to_num().sum().backward()


def test_too_many_elements(monkeypatch, launches):
    """Every product runs in plain PyTorch, from the rows themselves."""
    monkeypatch.setattr(packed, "MOST_ELEMENTS", 1536 * 256)  # of packed rows
    chain, x, named = experts(scale=True), tokens(), inputs(scale=True)
    plan, _ = check(chain, x, same=False, **named)
    assert rules(plan) == [*FORWARD, *BACKWARD]
    assert not launches
    assert_strict_says(chain, x, named, "declined this call: 1536 rows of 256 features: expected fewer than")
    check(chain, tokens(200, (200, 0, 0, 0)), **inputs(200, (200, 0, 0, 0), scale=True))
    assert launched(launches) == {"glu": 1, "quant": 2, "dglu": 1, "wgrad": 2}


@pytest.mark.parametrize("first", [True, False], ids=["before an activation", "last"])
def test_a_bias_that_is_not_contiguous(first, launches):
    chain, x, named = experts(bias="frozen"), tokens(), inputs()
    layer = chain[0] if first else chain[2]
    layer.bias = torch.nn.Parameter(layer.bias.detach().mT.contiguous().mT, requires_grad=False)
    check(chain, x, same=False, **named)
    assert launched(launches) == ({"quant": 2, "dglu": 1, "wgrad": 2} if first else
                                  {"glu": 1, "quant": 1, "dglu": 1, "wgrad": 2})  # fmt: skip
    assert_strict_says(chain, x, named, "declined this call: the bias is not contiguous")


def test_rows_that_the_kernel_cannot_read(launches):
    """They are quantized in plain PyTorch, for the kernels of the products."""
    chain, named = experts(scale=True), inputs(scale=True)
    x = torch.cat([tokens(requires_grad=False), torch.zeros(ROWS, 1, dtype=BF16)], 1)[:, :-1].requires_grad_()
    assert x.stride() == (H + 1, 1)
    check(chain, x, **named)
    assert launched(launches) == {"glu": 1, "quant": 2, "dglu": 1, "wgrad": 2}
    assert_strict_says(chain, x, named, r"sm100\.quantize declined this call: x has strides")


def test_gradients_with_any_strides(launches):
    """They are copied: those of a sum are expanded."""
    chain, x, named = experts(), tokens(requires_grad=False), inputs()
    with fm.recipe("mxfp8"):
        want = unfused(chain, x, torch.ones(ROWS, H, dtype=BF16), **named)
        with fm.strict():
            y = chain(x, **named)
            y.sum().backward()
    got = {name: p.grad for name, p in chain.named_parameters()}
    assert_near(got, {name: want[name] for name in got}, EMULATION)
    assert launched(launches) == {"glu": 1, "quant": 1, "dglu": 1, "wgrad": 2}
