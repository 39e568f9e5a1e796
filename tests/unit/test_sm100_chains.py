"""Chains on the rules for Blackwell, on a CPU: through NVIDIA's wrappers, with device code in PyTorch."""

import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")
pytest.importorskip("cudnn.gemm.cutedsl.grouped", exc_type=ImportError)
if shutil.which("gcc") is None:
    pytest.skip("needs gcc, which links the kernels' host code", allow_module_level=True)

from blackwell.on_cpu import blackwell_on_cpu
from emulator.gpu import emulated
from kit.compare import assert_accurate
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
    MOVING,
    PREFIX,
    QUANTIZE,
    QUANTIZE_FUNCTIONS,
    QUANTIZE_GRAD,
    QUANTIZE_WEIGHT,
    ROWS,
    SPLITS,
    WGRAD,
    E,
    H,
    I,
    blackwell_machine,  # noqa: F401  (a fixture)
    experts,
    inputs,
    tokens,
)  # fmt: skip
from kit.toy import only_plan, outcome, rules_used

import fusedmoe as fm
from fusedmoe import FusionError
from fusedmoe.commands.verify import rounding
from fusedmoe.kernels.sm100 import calls, quantize_functions
from fusedmoe.numerics.formats import Quantizer, mxfp8
from fusedmoe.numerics.recipes import MXFP8, NVFP4, Custom

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")

SAME = 4e-3  # bound of the relative error from the same arithmetic
NEAREST = NVFP4(stochastic_rounding=False)
# A recipe, and the bound of the relative error from the unfused chain. A value that was rounded to bf16 elsewhere may
# have another code, which is up to a third away in NVFP4.
FORMATS = {"mxfp8": ("mxfp8", 3e-2), "nvfp4": (NEAREST, 0.08)}
M = Quantizer(mxfp8())

WEIGHTS = [QUANTIZE_WEIGHT, QUANTIZE_WEIGHT]
FORWARD = [*WEIGHTS, QUANTIZE, GEMM_ACTIVATION, GEMM]
BACKWARD = [QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, WGRAD, DGRAD]
FUSED = [*FORWARD, *BACKWARD]
APART_FORWARD = [*WEIGHTS, QUANTIZE, GEMM, ACTIVATION, QUANTIZE, GEMM]
APART = [*APART_FORWARD, QUANTIZE_GRAD, WGRAD, DGRAD, DACTIVATION, QUANTIZE_GRAD, WGRAD, DGRAD]
ALL = {"glu": 1, "quant": 2, "dglu": 1, "wgrad": 2}
SQUARED = {"srelu": 1, "quant": 2, "dsrelu": 1, "wgrad": 2}


def clamped(limit=4.0, alpha=1.702, offset=1.0):
    """One in ten elements of gate or up is beyond the limit."""
    return fm.SwiGLU(limit=limit, alpha=alpha, offset=offset)


@pytest.fixture(scope="module")
def device():
    """NVIDIA's kernels, with device code in PyTorch."""
    calls.kernel.cache_clear()  # a kernel tells of its launches where it was made
    with blackwell_on_cpu() as launches:
        yield launches
    calls.kernel.cache_clear()


@pytest.fixture(autouse=True)
def launches(device, monkeypatch):
    """The launches of a test. Memory that is read without being written is NaN."""
    plain = torch.Tensor.new_empty

    def nan(like, *args, **kwargs):
        out = plain(like, *args, **kwargs)
        # through .data, as a kernel writes: torch counts no write
        out.data.view(torch.uint8).fill_(0x7F if out.dtype is torch.float8_e4m3fn else 0xFF)
        return out

    monkeypatch.setattr(torch.Tensor, "new_empty", nan)
    device.clear()
    return device


def launched(launches):
    """How many kernels of each kind were launched."""
    return Counter(type(launch.kernel).__module__.split(".")[-2] for launch in launches if launch.name == "kernel")


def rules(plan):
    """The rules of a plan that quantize and multiply."""
    return [name for name in rules_used(plan) if name.startswith(PREFIX) and name not in MOVING]


def unfused(chain, x, dy, **named):
    with fm.disabled("*"):
        found = outcome(chain, x, dy=dy, **named)
    fm.clear_weight_cache(chain)
    return found


def same_arithmetic(chain, x, dy, format, **named):
    """The same products of the same codes in plain PyTorch. The device code of `blackwell.soft_kernels` shares nothing
    with it.
    """
    of_rows = "splits" in named
    case = SimpleNamespace(module="experts" if of_rows else "routed", recipe=format)
    ends = tuple(named["splits"].cumsum(0).tolist()) if of_rows else ()
    given = {"probs": torch.ones(len(x)), **named}
    return rounding.results(
        SimpleNamespace(case=case, module=chain, x=x, inputs=given, grad_output=dy, num_experts=E, ends=ends)
    )


def check(chain, x, dy=None, *, recipe=None, format="mxfp8", same=True, emulation=None, **named):
    """Check a call against both computations; return its plan and its results.

    ``emulation`` is the bound of the error from the unfused chain.
    """
    of_format, bound = FORMATS[format]
    splits = named.get("splits", torch.tensor([len(x)]))
    used = int(splits.sum())
    dy = torch.randn(len(x), chain[-1].out_features).to(BF16) if dy is None else dy
    dy[used:] = torch.nan
    with fm.recipe(of_format if recipe is None else recipe):
        emulated = unfused(chain, x, dy, **named)
        got = outcome(chain, x, dy=dy, **named)
        plan = only_plan(chain, x, **named)
    assert_accurate(got, emulated, bound if emulation is None else emulation)
    for name, t in got.items():
        without = t[used:] if name in ("y", "x", "probs") else t[: len(splits)][splits == 0]
        assert not without.any(), f"{name}: no rows, or of no expert"
    if same:
        want = same_arithmetic(chain, x, dy, format, **named)
        assert_accurate(got, {name: want[name] for name in got}, SAME)
    return plan, got


def slow(*values):
    """A chain with kernels of its own, which take long to compile."""
    return pytest.param(*values, marks=pytest.mark.slow)


# ---- whole chains


@pytest.mark.parametrize(("format", "act", "scale", "bias"), [
    ("mxfp8", fm.SwiGLU, True, False), ("mxfp8", clamped, True, "frozen"), ("nvfp4", fm.SwiGLU, True, False),
    slow("mxfp8", fm.SquaredReLU, True, False), slow("mxfp8", fm.SwiGLU, False, "frozen"),
    slow("nvfp4", fm.SquaredReLU, False, False), slow("nvfp4", clamped, True, "frozen"),
])  # fmt: skip
def test_whole_chains(format, act, scale, bias, launches):
    fewer_launches = (ACTIVATION, DACTIVATION) if format == "nvfp4" else ()
    with fm.disabled(*fewer_launches):
        plan, _ = check(experts(act(), scale=scale, bias=bias), tokens(), format=format, **inputs(scale=scale))
    assert rules(plan) == FUSED
    assert launched(launches) == (SQUARED if act is fm.SquaredReLU else ALL)
    assert {launch.kernel.sf_vec_size for launch in launches} == {16 if format == "nvfp4" else 32}
    assert not [step for step in plan.unfused if not step.ops[0].endswith("weight.Quantize")]
    (step,) = [step for step in plan.steps if step.rule == DGRAD_ACTIVATION]
    derivative = f"1.D{type(act()).__name__}"
    ops = ("3.Dgrad", "2.ScaleGrad", "2.DScale", derivative) if scale else ("2.Dgrad", derivative)
    assert step.ops == (*ops, "0:grad.QuantizeGrad")


@pytest.mark.parametrize(("format", "act", "scale"), [("mxfp8", clamped, False), ("nvfp4", fm.SwiGLU, True)])
def test_trained_biases(format, act, scale, launches):
    """Their gradients sum unquantized rows, so that the activation and its derivative run by themselves."""
    chain, named = experts(act(), scale=scale, bias="trained"), inputs(scale=scale)
    plan, got = check(chain, tokens(), format=format, same=False, **named)
    assert rules(plan) == APART
    assert launched(launches) == {"quant": 4, "wgrad": 2}
    assert {"0.bias", "3.bias" if scale else "2.bias"} <= got.keys()


@pytest.mark.parametrize("format", FORMATS)
def test_any_splits_and_any_number_of_rows_run_the_same_kernels(format, launches):
    chain = experts(scale=True)
    check(chain, tokens(), format=format, **inputs(scale=True))
    kernels, compiled = calls.kernel.cache_info().currsize, {id(launch.kernel) for launch in launches}
    for count, splits in (
        (ROWS, (0, 0, 600, 0)), (ROWS, (256, 0, 0, 256)), (300, (300, 0, 0, 0)), (7, (1, 1, 1, 1)), (1, (0, 1, 0, 0)),
        (1100, (1, 1098, 1, 0)),
    ):  # fmt: skip
        launches.clear()
        same = format == "mxfp8"
        plan, _ = check(chain, tokens(count, splits), format=format, same=same, **inputs(count, splits, scale=True))
        assert rules(plan) == FUSED, splits
        assert launched(launches) == ALL
        assert {id(launch.kernel) for launch in launches} <= compiled
    assert calls.kernel.cache_info().currsize == kernels


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_no_expert_alone(format, launches):
    """All results are zeros, not what memory held before."""
    chain, none = experts(scale=True), (0,) * E
    x, dy = tokens(300, none), torch.randn(300, H).to(BF16)
    with fm.recipe(FORMATS[format][0]):
        got = outcome(chain, x, dy=dy, **inputs(300, none, scale=True))
    assert launched(launches) == ALL
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
    assert rules(plan) == FUSED


# ---- other plans


@pytest.mark.parametrize(("frozen", "backward", "count"), [
    ("0.weight", [QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, DGRAD], {"dglu": 1, "wgrad": 1, "quant": 2}),
    ("2.weight", [QUANTIZE_GRAD, DGRAD_ACTIVATION, WGRAD, DGRAD], {"dglu": 1, "wgrad": 1, "quant": 2}),
    ("x", [QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, WGRAD], {"dglu": 1, "wgrad": 2, "quant": 1}),
])  # fmt: skip
def test_gradients_that_are_not_required(frozen, backward, count, launches):
    chain, x = experts(), tokens(requires_grad=frozen != "x")
    for name, parameter in chain.named_parameters():
        parameter.requires_grad_(name != frozen)
    plan, _ = check(chain, x, same=False, **inputs())
    assert rules(plan) == [*FORWARD, *backward]
    assert launched(launches) == {"glu": 1, **count}


@pytest.mark.parametrize("bias", [False, "trained"], ids=["", "bias"])
def test_inference(bias, launches):
    """Without a backward pass, the activation of a biased layer is fused too."""
    chain, x = experts(scale=True, bias=bias), tokens(requires_grad=False)
    named = inputs(scale=True, requires_grad=False)
    with torch.no_grad():
        plan, got = check(chain, x, **named)
    assert rules(plan) == FORWARD
    assert not plan.kept
    assert {*got} == {"y"}
    assert launched(launches) == {"glu": 1, "quant": 1}


@pytest.mark.parametrize(("act", "width", "forward"), [
    (fm.GeGLU(), I, APART_FORWARD), (fm.SwiGLU(), 192, [QUANTIZE_WEIGHT, QUANTIZE, GEMM, ACTIVATION]),
], ids=["geglu", "half of a width"])  # fmt: skip
def test_other_activations(act, width, forward, launches):
    """Products alone, with and without gate and up in blocks, and beside a layer that runs unfused."""
    plan, _ = check(experts(act, width=width), tokens(), same=False, **inputs())
    assert rules_used(plan, "forward") == forward
    assert {DGRAD, WGRAD} <= {*rules_used(plan, "backward")}
    assert launched(launches)["quant"] == (4 if width == I else 2)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("off", dict.fromkeys(FUSED))
def test_each_rule_may_be_switched_off(off, format):
    """The other rules take packed values from plain PyTorch."""
    scale = off != GEMM  # without it, another rule also takes the output of an unfused layer
    with fm.disabled(off):
        plan, _ = check(experts(scale=scale), tokens(), same=False, format=format, **inputs(scale=scale))
    assert off not in rules(plan)
    assert len({*FUSED} & {*rules(plan)}) >= 2


def test_row_scales_of_fp64_and_weights_that_are_transposed_in_memory():
    chain, named = experts(scale=True), inputs(scale=True)
    named["probs"] = named["probs"].detach().double().requires_grad_()
    for layer in (chain[0], chain[3]):
        layer.weight = torch.nn.Parameter(layer.weight.detach().mT.contiguous().mT)
    plan, got = check(chain, tokens(), same=False, **named)
    assert rules(plan) == FUSED
    assert got["probs"].dtype is torch.float64


@pytest.mark.parametrize(
    ("recipe", "expected"), [(MXFP8(hybrid=True), {"quant": 2}), (Custom(input=M, grad=M), {"wgrad": 2})], ids=str
)
def test_recipes_of_which_some_operands_are_packed(recipe, expected, launches):
    """Products of packed operands alone have kernels; the others run in plain PyTorch."""
    check(experts(scale=True), tokens(), recipe=recipe, same=False, **inputs(scale=True))
    assert launched(launches) == expected


@pytest.mark.parametrize(("options", "bound"), [
    ({}, 0.35),  # gradients are rounded stochastically, and draw others
    ({"hadamard": False, "stochastic_rounding": False}, 0.08),
    ({"weight_2d": False, "stochastic_rounding": False}, 0.08),
], ids=["stochastic", "not rotated", "blocks of a row"])  # fmt: skip
def test_options_of_nvfp4(options, bound, launches):
    chain, named = experts(scale=True), inputs(scale=True)
    plan, _ = check(chain, tokens(), recipe=NVFP4(**options), same=False, emulation=bound, **named)
    assert rules(plan) == FUSED
    assert launched(launches) == ALL


# ---- calls that a rule declines


def assert_strict_says(chain, x, named, match):
    with fm.recipe("mxfp8"), fm.strict(), pytest.raises(FusionError, match=match):
        chain(x, **named).float().nan_to_num().sum().backward()


def test_a_bias_that_is_not_contiguous(launches):
    chain, x, named = experts(bias="frozen"), tokens(), inputs()
    chain[0].bias = torch.nn.Parameter(chain[0].bias.detach().mT.contiguous().mT, requires_grad=False)
    check(chain, x, same=False, **named)
    assert launched(launches) == {"quant": 2, "dglu": 1, "wgrad": 2}
    assert_strict_says(chain, x, named, "declined this call: the bias is not contiguous")


def test_rows_that_the_kernel_cannot_read(launches, caplog):
    """They are quantized in plain PyTorch, for the kernels of the products."""
    chain, named = experts(scale=True), inputs(scale=True)
    x = torch.cat([tokens(requires_grad=False), torch.zeros(ROWS, 1, dtype=BF16)], 1)[:, :-1].requires_grad_()
    assert x.stride() == (H + 1, 1)
    check(chain, x, **named)
    assert "declined this call: x has strides" in caplog.text
    assert launched(launches) == ALL
    assert_strict_says(chain, x, named, r"sm100\.quantize declined this call: x has strides")


def test_gradients_with_any_strides(launches):
    """They are copied: those of a sum are expanded."""
    chain, x, named = experts(), tokens(requires_grad=False), inputs()
    with fm.recipe("mxfp8"):
        want = unfused(chain, x, torch.ones(ROWS, H, dtype=BF16), **named)
        chain.zero_grad()
        with fm.strict():
            chain(x, **named).sum().backward()
    got = {name: p.grad for name, p in chain.named_parameters()}
    assert_accurate(got, {name: want[name] for name in got}, 3e-2)
    assert launched(launches) == {"glu": 1, "quant": 1, "dglu": 1, "wgrad": 2}


# ---- several calls: micro-batches, main_grad, and layers that share kernels


def batch(count=ROWS, splits=SPLITS):
    """Rows, the gradient of the output, and runtime inputs."""
    return tokens(count, splits), torch.randn(count, H).to(BF16), inputs(count, splits, scale=True)


def into_main_grad(chain):
    """Return the weights by name, each with a main_grad that is not zero."""
    weights = {}
    for name, layer in chain.named_children():
        if isinstance(layer, fm.GroupedLinear):
            layer.accumulate_into_main_grad = True
            layer.weight.main_grad = torch.randn(layer.weight.shape)
            weights[f"{name}.weight"] = layer.weight
    return weights


@pytest.mark.parametrize(("format", "act"), [("mxfp8", fm.SwiGLU), ("nvfp4", fm.SwiGLU),
                                             slow("mxfp8", fm.SquaredReLU)])  # fmt: skip
def test_micro_batches_add_to_main_grad(format, act, launches):
    """Each adds its gradient in fp32, unrounded where the rows of the weight are in order."""
    chain, batches = experts(act(), scale=True), [batch(), batch(300, (0, 40, 130, 100))]
    with fm.recipe(FORMATS[format][0]):
        alone = [outcome(chain, x, dy=dy, **named) for x, dy, named in batches]
        weights = into_main_grad(chain)
        before = {name: weight.main_grad.clone() for name, weight in weights.items()}
        fm.clear_weight_cache(chain)
        launches.clear()
        kept = []
        for (x, dy, named), want in zip(batches, alone, strict=True):
            got = outcome(chain, x, dy=dy, **named)
            kept.append([layer._of_process.quantized_weight for layer in (chain[0], chain[-1])])
            assert all(torch.equal(got[name], want[name]) for name in ("y", "x", "probs"))
        assert rules(only_plan(chain, x, **named)) == FUSED
        kernels = [launch.kernel for launch in launches if launch.name == "kernel"]
        adds = [k.accumulate_on_output for k in kernels if "wgrad" in type(k).__module__]
        assert adds == [True, act is fm.SquaredReLU] * 2, "gate and up are added by another launch"
        assert all(kept[0])
        assert all(a is b for a, b in zip(*kept, strict=True)), "weights are quantized once for both"
        added = {name: weight.main_grad - before[name] for name, weight in weights.items()}
        assert_accurate(added, {name: sum(got[name].float() for got in alone) for name in weights}, SAME)
        assert all(not (weight.grad is not None and weight.grad.any()) for weight in weights.values())
        with torch.no_grad():
            for weight in weights.values():
                weight.sub_(0.1 * weight.main_grad)
        stepped = outcome(chain, batches[0][0], dy=batches[0][1], **batches[0][2])
        assert not torch.equal(stepped["y"], alone[0]["y"])


def test_a_main_grad_that_the_kernel_cannot_write(launches):
    """Each call decides: main_grad may be another tensor in the next."""
    chain, (x, dy, named) = experts(scale=True), batch()
    with fm.recipe("mxfp8"):
        alone = outcome(chain, x, dy=dy, **named)
        weights = into_main_grad(chain)
        before = {name: weight.main_grad.clone() for name, weight in weights.items()}
        for weight in weights.values():
            weight.main_grad = weight.main_grad.mT.contiguous().mT
        launches.clear()
        outcome(chain, x, dy=dy, **named)
        assert launched(launches)["wgrad"] == 0
        added = {name: weight.main_grad - before[name] for name, weight in weights.items()}
        assert_accurate(added, {name: alone[name] for name in weights}, 3e-2)
        with fm.strict(), pytest.raises(FusionError, match=f"{WGRAD} declined this call: main_grad is not contig"):
            outcome(chain, x, dy=dy, **named)
        for weight in weights.values():
            weight.main_grad = weight.main_grad.contiguous().clone()
        launches.clear()
        outcome(chain, x, dy=dy, **named)
        assert launched(launches)["wgrad"] == 2


@pytest.mark.parametrize("act", [fm.SwiGLU, clamped], ids=["", "clamped"])
def test_two_chains_take_turns(act, launches):
    """Layers of one shape share kernels, and nothing else. Constants are parameters of one kernel, and compiled into
    two others.
    """
    one, other = experts(act(), scale=True), experts(act() if act is fm.SwiGLU else clamped(2.0, 1.5, 0.5), scale=True)
    x, dy, named = batch()
    with fm.recipe("mxfp8"):
        alone = [outcome(chain, x, dy=dy, **named) for chain in (one, other)]
        kernels, outputs = calls.kernel.cache_info().currsize, []
        for chain in (one, other):
            chain.zero_grad()
            outputs.append(chain(x, **named))
        for y in outputs[::-1]:
            y.backward(dy)
    assert calls.kernel.cache_info().currsize == kernels
    assert not torch.equal(outputs[0], outputs[1])
    for chain, y, want in zip((one, other), outputs, alone, strict=True):
        assert torch.equal(y, want["y"])
        assert all(torch.equal(p.grad, want[name]) for name, p in chain.named_parameters())
        check(chain, x, **named)
    assert len({id(launch.kernel) for launch in launches if "dglu" in type(launch.kernel).__module__}) == (
        1 if act is fm.SwiGLU else 2
    )


# ---- layers of a model, and chains with Dispatch and Combine


OF_LAYER = [GEMM_ACTIVATION, GEMM_COMBINE, GATHERED_QUANTIZE_GRAD, WGRAD, DGRAD_ACTIVATION, WGRAD, DGRAD_DDISPATCH]
DERIVED = [WGRAD, DGRAD, DACTIVATION, QUANTIZE_GRAD, WGRAD, DGRAD_DDISPATCH]
BIASED = [GEMM, ACTIVATION, QUANTIZE, GEMM, QUANTIZE_GRAD, *DERIVED]  # gradients of the weights of rows read the rows
OF_GEGLU = [GEMM, ACTIVATION, QUANTIZE, GEMM_COMBINE, GATHERED_QUANTIZE_GRAD, *DERIVED]


@pytest.mark.parametrize(("format", "settings", "expected"), [
    ("mxfp8", {}, OF_LAYER), ("nvfp4", {}, OF_LAYER), ("mxfp8", {"bias": True}, BIASED),
    ("mxfp8", {"activation": "geglu"}, OF_GEGLU), slow("mxfp8", {"activation": "squared_relu"}, OF_LAYER),
])  # fmt: skip
def test_a_layer_of_a_model(format, settings, expected, launches):
    """The router, and the sums over slots, have no kernel here."""
    layer, x = fm.MoE(H, I, E, 2, dtype=BF16, **settings), torch.randn(150, H, dtype=BF16, requires_grad=True)
    plan, _ = check(layer, x, torch.randn(150, H).to(BF16), format=format, same=False)
    assert rules(plan) == [*WEIGHTS, GATHERED_QUANTIZE, *expected]
    if not settings:
        assert launched(launches) == ALL
        with fm.recipe(FORMATS[format][0]):
            (asked,) = fm.explain(layer, tokens=150, arch=100).plans
        assert rules(asked) == rules(plan)


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


def check_routed(chain, x, dy, named, **how):
    plan, got = check(chain, x, dy, **how, **named)
    without = (named["expert_index"] == E).all(1)
    assert without.any()
    assert not any(got[name][without].any() for name in ("y", "x") if name in got)
    return plan, got


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_sums_over_slots_read_packed_rows(bias, launches):
    problem = routed(bias=bias)
    plan, got = check_routed(*problem)
    assert rules(plan) == [*WEIGHTS, GATHERED_QUANTIZE, *OF_LAYER]
    (step,) = [step for step in plan.steps if step.rule == DGRAD_DDISPATCH]
    assert step.ops == ("1.Dgrad", "0.DispatchWeightGrad", "0.DDispatch")
    launches.clear()
    with fm.disabled(GEMM_COMBINE, DGRAD_DDISPATCH):
        plan, apart = check_routed(*problem)
    assert {GEMM, DGRAD} <= {*rules(plan)}
    assert all(torch.equal(got[name], apart[name]) for name in got)
    assert launched(launches) == ALL


def test_weights_of_rows_after_the_last_layer():
    """In training, their gradients read the rows in order."""
    with fm.disabled(GEMM), torch.no_grad():  # which takes fewer launches, and reads and writes more
        plan, _ = check_routed(*routed("probs", requires_grad=False), same=False)
    assert GEMM_COMBINE in rules(plan)
    plan, _ = check_routed(*routed("probs"), same=False)
    assert GEMM_COMBINE not in rules(plan)
    assert {GEMM, DGRAD_DDISPATCH} <= {*rules(plan)}
    reasons = {attempt.reason for attempt in plan.attempts if attempt.rule == GEMM_COMBINE}
    assert any(reason.startswith("cannot keep 4.input") for reason in reasons)


# ---- rows that the emulator quantizes, by the kernel's code, between products in PyTorch


@pytest.mark.parametrize(("format", "bias", "count"), [("nvfp4", False, 4), slow("mxfp8", "trained", 6)])
def test_the_kernel_quantizes_what_the_products_read(format, bias, count, monkeypatch):
    """Rows and gradients, weights in MXFP8, and what is between the layers with trained biases and in NVFP4."""
    rows, splits = 44, (20, 0, 19, 1)
    chain, x, named = experts(scale=True, bias=bias), tokens(rows, splits), inputs(rows, splits, scale=True)
    with emulated() as gpu:
        monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 100)
        for name, function in QUANTIZE_FUNCTIONS.items():
            monkeypatch.setattr(quantize_functions, name, function)
        check(chain, x, format=format, same=not bias, **named)
        assert gpu.launches == count
