"""What the rules for Blackwell decline, and why: machines, formats, layers, and tensors of a call."""

import json
import sys
from importlib import metadata

import pytest
import torch
from kit.compare import assert_accurate
from kit.sm90_stand_ins import calls
from kit.sm100_machine import (
    BF16,
    DGRAD,
    DGRAD_ACTIVATION,
    DGRAD_DDISPATCH,
    GATHERED_QUANTIZE,
    GATHERED_QUANTIZE_GRAD,
    GEMM,
    GEMM_ACTIVATION,
    GEMM_COMBINE,
    PREFIX,
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
from kit.toy import only_plan, outcome, rules_used

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.builtin_rules.sm100 import packed, quantize
from fusedmoe.kernels.build import toolkit
from fusedmoe.kernels.sm100 import package
from fusedmoe.kernels.torch import grouped_gemm
from fusedmoe.numerics.formats import Quantizer, fp8_block, mxfp8, nvfp4
from fusedmoe.numerics.formats.groups import PACKED_ROWS, padded_rows
from fusedmoe.numerics.recipes import MXFP8, Custom

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")

FORWARD, BACKWARD = (GEMM, GEMM_ACTIVATION), (DGRAD, DGRAD_ACTIVATION, WGRAD)
PRODUCTS, QUANTIZERS, DGRADS = (*FORWARD, *BACKWARD), (QUANTIZE, QUANTIZE_GRAD), (DGRAD, DGRAD_ACTIVATION)
ALL = (*PRODUCTS, *QUANTIZERS)
OF_A_LAYER = {GEMM_COMBINE, GEMM_ACTIVATION, DGRAD_DDISPATCH, DGRAD_ACTIVATION, WGRAD}
FP16, FP32 = torch.float16, torch.float32
M, ROTATED, NVFP4_WEIGHT = Quantizer(mxfp8()), Quantizer(mxfp8(), hadamard=True), Quantizer(nvfp4(across=16))
FORMAT = "expected mxfp8 in e4m3 with scales of the rule rceil, rounded to nearest and not rotated, or nvfp4"


def plan_of(chain, x=None, recipe="mxfp8"):
    x = tokens() if x is None else x
    with fm.recipe(recipe):
        return only_plan(chain, x, **inputs(len(x), scale="probs" in chain.runtime_inputs))


def reasons(plan, rule, wanted=Status.CONSTRAINT):
    """Why a rule was declined anywhere, besides what it cannot keep where others are declined."""
    found = {a.reason for a in plan.attempts if a.rule == rule and a.status is wanted}
    return {reason for reason in found if not reason.startswith("cannot keep")}


def used(plan):
    return {name for name in rules_used(plan) if name.startswith(PREFIX)}


def assert_declined(plan, expected):
    """``expected``: all reasons of each rule, as a set, or one of them."""
    for rule, want in expected.items():
        assert rule not in used(plan), rule
        found = reasons(plan, rule)
        assert found == want if isinstance(want, set) else want in found, f"{rule}: {found}"


# ---- formats, layers and settings


def of(rules, reason):
    return dict.fromkeys(rules, reason)


def unquantized(name):
    return f"{name} is not quantized: expected MXFP8 or NVFP4 operands"


def not_16_bit(name):
    text = f"is {name}: products of packed operands are bfloat16"
    return of(FORWARD, f"input {text}") | of(BACKWARD, f"grad_output {text}")


def widths(first, last):
    """The reasons: of the first layer's products, and of the last one's."""
    first, last = (f"{name} is not a multiple of 128" for name in (first, last))
    return of((GEMM, DGRAD, WGRAD), {first, last}) | {GEMM_ACTIVATION: first, DGRAD_ACTIVATION: last}


def other_result():
    """Two layers, of which the second takes another format."""
    return fm.Sequential(
        fm.Quantize(M, weight=M), fm.GroupedLinear(E, H, 2 * I, dtype=BF16), fm.SwiGLU(),
        fm.Quantize(nvfp4(), weight=NVFP4_WEIGHT), fm.GroupedLinear(E, I, H, dtype=BF16),
    )  # fmt: skip


def other_gradient():
    return fm.Sequential(
        fm.Quantize(None, backward=fp8_block()), fm.SwiGLU(), fm.Quantize(M, weight=M),
        fm.GroupedLinear(E, I, H, dtype=BF16), fm.Quantize(None, backward=M),
    )  # fmt: skip


INTERLEAVED = "interleaved gate and up: expected a weight with the rows [gate | up]"
CONSTANTS = "alpha 1.702 and offset 0.0 without a limit: the kernel has them for clamped activations alone"
ACTIVATIONS = (GEMM_ACTIVATION, DGRAD_ACTIVATION)
UNQUANTIZED_GRADIENT = "the gradient of the preactivation is read unquantized too: the epilogue writes codes"
DECLINED = [  # id, options of the experts or a chain, recipe, options of the rows, declined, fused all the same, missed
    ("e5m2 gradients", {}, MXFP8(hybrid=True), {}, of(BACKWARD, f"grad_output is mxfp8 e5m2 1x32: {FORMAT}")
     | {QUANTIZE_GRAD: f"quantizes to mxfp8 e5m2 1x32: {FORMAT}"}, (GEMM,), False),
    ("scales of the specification", {}, MXFP8(scale_rule="floor"), {},
     of(FORWARD, f"input is mxfp8 e4m3 1x32: {FORMAT}") | of(QUANTIZERS, f"quantizes to mxfp8 e4m3 1x32: {FORMAT}"),
     (), False),
    ("square blocks of weights", {}, MXFP8(weight_2d=True), {},
     of(FORWARD, f"fc.weight is mxfp8 e4m3 32x32: {FORMAT}")
     | of(DGRADS, f"dgrad.weight is mxfp8 e4m3 32x32: {FORMAT}"), (WGRAD,), False),
    ("rotated rows", {}, Custom(input=ROTATED, weight=M, grad=M), {},
     of(FORWARD, f"input is mxfp8 e4m3 1x32: {FORMAT}")
     | {WGRAD: f"wgrad.input is mxfp8 e4m3 1x32: {FORMAT}", QUANTIZE: f"quantizes to {ROTATED}: {FORMAT}"}, (), False),
    ("rows alone", {}, Custom(input=M, grad=M), {},
     of(FORWARD, unquantized("fc.weight")) | of(DGRADS, unquantized("dgrad.weight")), (WGRAD,), False),
    ("no gradients", {}, Custom(input=M, weight=M), {}, of((DGRAD, WGRAD), unquantized("grad_output")), (GEMM,), False),
    ("two formats", {}, Custom(input=M, weight=NVFP4_WEIGHT, grad=M), {},
     of((*FORWARD, *DGRADS), "the operands are e4m3 and e2m1: expected one format"), (WGRAD,), False),
    ("another format of the result", other_result, "bf16", {"requires_grad": False},
     {GEMM_ACTIVATION: "quantizes to nvfp4 e2m1 1x16, from operands in mxfp8 e4m3 1x32"}, (GEMM,), False),
    ("another format of the gradient", other_gradient, "bf16", {"hidden": 2 * I},
     {DGRAD_ACTIVATION: f"quantizes to fp8 e4m3 1x128: {FORMAT}"}, (DGRAD,), False),
    ("hidden", {"hidden": 192}, "mxfp8", {"hidden": 192}, widths("in_features 192", "out_features 192"), (), True),
    ("width", {"width": 48}, "mxfp8", {}, widths("out_features 96", "in_features 48")
     | {QUANTIZE: {"48 features are not a multiple of 32"}, QUANTIZE_GRAD: {"96 features are not a multiple of 64"}},
     (), True),
    ("half of a width", {"width": 192}, "mxfp8", {}, {
        GEMM_ACTIVATION: {"half of out_features, 192, is not a multiple of 128"},
        DGRAD_ACTIVATION: {"in_features 192 is not a multiple of 128"}}, (GEMM, DGRAD, WGRAD), True),
    ("sm_margin", {"options": {"sm_margin": 7}}, "mxfp8", {}, of(PRODUCTS, {"sm_margin 7: these kernels take all SMs"}),
     (), True),
    ("fp32", {"dtype": FP32}, "mxfp8", {"dtype": FP32},
     not_16_bit("float32") | of(QUANTIZERS, {"rows are float32, not bfloat16 or float16"}), (), True),
    ("fp16", {"dtype": FP16, "bias": "frozen"}, "mxfp8", {"dtype": FP16},
     of(FORWARD, "the bias is float16, not bfloat16"), (), True),
    ("squared ReLU of a biased layer", {"act": fm.SquaredReLU(), "bias": "frozen"}, "mxfp8", {},
     {GEMM_ACTIVATION: {"the kernel of the squared ReLU has no bias"}}, (), True),
    ("gradient of a bias", {"bias": "trained"}, "mxfp8", {},
     {DGRAD_ACTIVATION: {UNQUANTIZED_GRADIENT}}, (DGRAD,), True),
    ("interleaved", {"act": fm.SwiGLU(interleaved=True)}, "mxfp8", {}, of(ACTIVATIONS, {INTERLEAVED}),
     (GEMM, DGRAD, WGRAD), True),
    ("constants", {"act": fm.SwiGLU(alpha=1.702)}, "mxfp8", {}, of(ACTIVATIONS, {CONSTANTS}),
     (GEMM, DGRAD, WGRAD), True),
]  # fmt: skip


@pytest.mark.parametrize(("made", "recipe", "of_x", "expected", "fused", "missed"), [row[1:] for row in DECLINED],
                         ids=[row[0] for row in DECLINED])  # fmt: skip
def test_declined(made, recipe, of_x, expected, fused, missed):
    """A format is no miss, since no device has a kernel."""
    with fm.disabled("sm100.activation", "sm100.dactivation"):
        plan = plan_of(made() if callable(made) else experts(**{"scale": True} | made), tokens(**of_x), recipe)
    assert_declined(plan, expected)
    assert {*fused} <= used(plan)
    misses = {miss.reason for _, miss in plan.missed if miss.rule in expected}
    assert bool(misses) is missed, misses


def test_the_number_of_experts(monkeypatch):
    assert packed.MOST_EXPERTS == 1024
    for module in (packed, quantize):
        monkeypatch.setattr(module, "MOST_EXPERTS", E - 1)
    assert_declined(plan_of(experts(scale=True)), of(ALL, {"4 experts, over 3"}))


def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        plan, without = plan_of(experts(scale=True)), plan_of(experts())
    finally:
        torch.use_deterministic_algorithms(False)
    reason = "the gradient of the row scale is a sum by atomics, which is not deterministic"
    assert_declined(plan, {DGRAD_ACTIVATION: reason})
    assert DGRAD in used(plan)
    assert used(without) == {*ALL, QUANTIZE_WEIGHT}


def test_rows_without_experts():
    with fm.recipe("mxfp8"):
        plan = only_plan(fm.Sequential(fm.Linear(H, I, dtype=BF16)), torch.randn(9, H, dtype=BF16, requires_grad=True))
    assert_declined(plan, of(QUANTIZERS, {"rows without experts have no packed layout"}))


# ---- tensors of a call


@pytest.mark.parametrize(("hidden", "width", "widest"), [(4 * I, I, 4 * I), (I, H, H)])
def test_products_count_elements_in_32_bits(hidden, width, widest, monkeypatch, caplog):
    """The wider of operands and results counts."""
    assert packed.MOST_ELEMENTS == 2**31
    count = padded_rows(ROWS, E, PACKED_ROWS)
    monkeypatch.setattr(packed, "MOST_ELEMENTS", count * widest)
    with fm.recipe("mxfp8"):
        outcome(experts(hidden=hidden, width=width), tokens(hidden=hidden), **inputs())
    for rule in PRODUCTS:
        assert f"{rule} declined this call: {count} rows of " in caplog.text
    packed.guard_rows(count - 1, 1, widest)  # one row fewer is accepted


# ---- machines: other devices, missing packages, no verification

WHY_MISSING, WHY_UNVERIFIED = package.why_missing.__wrapped__, package.why_unverified  # the former not cached
VERIFY = "run `fusedmoe verify`"
INSTALL = "pip install 'fusedmoe[blackwell]' (in a checkout: pip install '.[blackwell]')"
ARCH_OF = "fusedmoe.fusion.program.plan_table.arch_of"


def layer_plan():
    """The plan of a layer, whose rules are all that there are for Blackwell."""
    with fm.recipe("mxfp8"):
        return only_plan(fm.MoE(H, I, E, 2, dtype=BF16), torch.randn(9, H, dtype=BF16, requires_grad=True))


def assert_unavailable(reason):
    plan = layer_plan()
    assert not used(plan)
    for rule in (*OF_A_LAYER, *QUANTIZERS, GATHERED_QUANTIZE, GATHERED_QUANTIZE_GRAD):
        assert reasons(plan, rule, Status.UNAVAILABLE) == {reason}, rule


@pytest.mark.parametrize(
    ("owner", "name", "value", "reason"),
    [
        (None, ARCH_OF, lambda device: None, "needs an sm_100 GPU, this device is cpu"),
        (None, ARCH_OF, lambda device: 120, "needs an sm_100 or sm_103 GPU, this one is sm_120"),
        (sys, "platform", "darwin", "needs Linux, this is darwin"),
        (toolkit, "why_unusable", lambda: "needs a newer driver", "needs a newer driver"),
    ],
    ids=["cpu", "sm_120", "darwin", "driver"],
)
def test_other_machines(owner, name, value, reason, monkeypatch):
    monkeypatch.setattr(name, value) if owner is None else monkeypatch.setattr(owner, name, value)
    assert_unavailable(reason)


@pytest.mark.parametrize(
    ("version", "found"), [(None, ""), ("1.31.9", ", found 1.31.9"), ("2.32.0", ", found 2.32.0"), ("1.32.7", None)]
)
def test_other_versions_of_the_package(version, found, monkeypatch):
    def installed(name):
        if name == package.DISTRIBUTION and version is None:
            raise metadata.PackageNotFoundError(name)
        return version if name == package.DISTRIBUTION else "1.0"

    monkeypatch.setattr(package.metadata, "version", installed)
    monkeypatch.setattr(package, "why_missing", WHY_MISSING)
    monkeypatch.setattr(ARCH_OF, lambda device: 103)
    if found is None:
        assert used(layer_plan()) >= OF_A_LAYER
    else:
        assert_unavailable(f"needs nvidia-cudnn-frontend 1.32{found}: {INSTALL}")


@pytest.fixture
def stamp(monkeypatch, tmp_path):
    """The path of a stamp, and a function that writes it. Nothing is verified before."""
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(package, "why_unverified", WHY_UNVERIFIED)
    monkeypatch.setattr(package, "machine_architectures", lambda: (100,))
    monkeypatch.setattr(package, "_why_not_stamped", package._why_not_stamped.__wrapped__)  # not cached
    path = package.stamp_file(100)

    def write(text):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps({"architecture": "sm_100", **text}))

    return path, write


def test_a_verified_machine(stamp):
    path, write = stamp
    assert_unavailable(f"not verified on this machine: {VERIFY}")
    write({"versions": package.versions(), "passed": True})
    assert used(layer_plan()) >= OF_A_LAYER
    write({"versions": package.versions(), "passed": False})
    assert_unavailable(f"`fusedmoe verify` failed or did not finish on this machine: {path}")
    write({"versions": {}, "passed": True})
    assert "since fusedmoe None -> " in WHY_UNVERIFIED()
    for name, version in package.versions().items():
        write({"versions": {**package.versions(), name: "0.1"}, "passed": True})
        assert WHY_UNVERIFIED() == f"not verified on this machine since {name} 0.1 -> {version}: {VERIFY}"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"versions": {}}', '{"versions": ["a"], "passed": true}'])
def test_an_unreadable_stamp(text, stamp):
    path, write = stamp
    write(text)
    reason = WHY_UNVERIFIED()
    assert reason.startswith(f"not verified on this machine: {path} is unreadable (")
    assert reason.endswith(f"): {VERIFY}")


# ---- rules that let torch compute bf16 products; the kernel of the tail is a stand-in

MM, MM_DGRAD = "sm100.grouped_mm", "sm100.grouped_mm_dgrad"
FEW, FEW_ROWS = (5, 0, 9, 1), 18  # three rows belong to no expert


@pytest.fixture
def tail_is_not_written(monkeypatch):
    """As on a GPU: NaN shows it."""
    plain = torch.nn.functional.grouped_mm

    def grouped_mm(a, b, *, offs):
        y = plain(a, b, offs=offs)
        if y.dim() == 2:
            y[int(offs[-1]) :] = torch.nan
        return y

    monkeypatch.setattr(grouped_gemm.F, "grouped_mm", grouped_mm)
    calls.clear()


def few(count=FEW_ROWS, splits=FEW, **options):
    return tokens(count, splits, **options), inputs(count, splits, scale=True)


@pytest.mark.usefixtures("tail_is_not_written")
@pytest.mark.parametrize("bias", [False, "trained"], ids=["", "bias"])
def test_products_of_torch(bias):
    chain, (x, named) = experts(scale=True, bias=bias), few()
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    calls.clear()
    got = outcome(chain, x, **named)
    assert_accurate(got, expected, 1e-2)
    assert not any(got[name][sum(FEW) :].any() for name in ("y", "x", "probs"))
    plan, sums = only_plan(chain, x, **named), ["sm100.column_sums"] if bias else []
    assert rules_used(plan) == [
        MM, "sm100.activation", MM, *sums, MM_DGRAD, "sm100.dactivation", *sums, MM_DGRAD,
    ]  # fmt: skip
    assert {op for step in plan.unfused for op in step.ops} == {"3.Wgrad", "0.Wgrad"}
    assert [name for name, _ in calls].count("zero_tail") == 4


@pytest.mark.usefixtures("tail_is_not_written")
def test_products_of_torch_in_a_routed_layer_and_of_an_expanded_gradient():
    chain = fm.Sequential(fm.Dispatch(), *experts(scale=True), fm.Combine(None))
    x = torch.randn(9, H, dtype=BF16, requires_grad=True)
    named = {"expert_index": torch.randint(E + 1, (9, 2)), "expert_weight": torch.rand(9, 2).requires_grad_()}
    with fm.disabled("*"):
        expected = outcome(chain, x, **named)
    assert_accurate(outcome(chain, x, **named), expected, 1e-2)
    assert {MM, MM_DGRAD, "sm100.dispatch", "sm100.combine"} < {*rules_used(only_plan(chain, x, **named))}
    chain, (x, named) = experts(scale=True), few()
    with fm.disabled("*"):
        want = torch.autograd.grad(chain(x, **named).nan_to_num().sum(), x)[0]
    assert_accurate(torch.autograd.grad(chain(x, **named).sum(), x)[0], want, 1e-2)


@pytest.mark.parametrize(("options", "of_x", "recipe", "reason"), [
    ({"dtype": FP16}, {"dtype": FP16}, "bf16", "input is float16, not bfloat16"),
    ({"hidden": 12, "width": 12}, {"hidden": 12}, "bf16", "in_features 12 is not a multiple of 8"),
    ({"options": {"sm_margin": 8}}, {}, "bf16", "sm_margin 8: torch's product takes all SMs"),
    ({}, {}, "fp8_block", "takes no fp8 e4m3 128x128 and fp8 e4m3 1x128 operands"),
])  # fmt: skip
def test_products_that_torch_does_not_compute(options, of_x, recipe, reason):
    x, named = few(**of_x)
    with fm.recipe(recipe):
        plan = only_plan(experts(scale=True, **options), x, **named)
    assert (Status.CONSTRAINT, reason) in [(a.status, a.reason) for a in plan.attempts if a.rule == MM]
    assert not {MM, MM_DGRAD} & {*rules_used(plan)}
