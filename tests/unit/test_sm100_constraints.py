"""What the rules for Blackwell decline, and why: machines, stamps, formats, layers, and tensors of a call."""

import json
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from sm100_machine import (
    BF16,
    DGRAD,
    DGRAD_ACTIVATION,
    GEMM,
    GEMM_ACTIVATION,
    PREFIX,
    QUANTIZE,
    QUANTIZE_GRAD,
    WGRAD,
    E,
    H,
    I,
    blackwell_machine,  # noqa: F401  (a fixture)
    experts,
    inputs,
    tokens,
)
from toy import only_plan, outcome, rules_used

import fusedmoe as fm
from fusedmoe import FusionError, Status
from fusedmoe.builtin_rules.sm100 import backend, quantize
from fusedmoe.formats import Quantizer, fp8_block, mxfp8
from fusedmoe.fusion.rule import Declined, NothingToDo
from fusedmoe.kernels import toolkit
from fusedmoe.kernels.sm100 import package
from fusedmoe.recipes import MXFP8, Custom

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")

FORWARD, BACKWARD = (GEMM, GEMM_ACTIVATION), (DGRAD, DGRAD_ACTIVATION, WGRAD)
PRODUCTS = (*FORWARD, *BACKWARD)
QUANTIZERS = (QUANTIZE, QUANTIZE_GRAD)
ALL = (*PRODUCTS, *QUANTIZERS)
GATHERED = ("sm100.gathered_quantize", "sm100.gathered_quantize_grad")
M = Quantizer(mxfp8())
FORMAT = "expected mxfp8 in e4m3 with scales of the rule rceil, rounded to nearest and not rotated"
WHY_MISSING, WHY_UNVERIFIED = package.why_missing.__wrapped__, package.why_unverified.__wrapped__  # not cached
VERIFY = "run `fusedmoe verify`"


def plan_of(chain, x=None, recipe="mxfp8", *, scale=False, **named):
    x = tokens() if x is None else x
    with fm.recipe(recipe):
        return only_plan(chain, x, **inputs(len(x), scale=scale), **named)


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


def test_all_rules_fuse_where_nothing_is_wrong():
    plan = plan_of(experts(scale=True), scale=True)
    assert used(plan) == {*ALL}
    assert not any(reasons(plan, rule) for rule in ALL)


# ------------------------------------------------------------------------------------------------- machines, packages


@pytest.fixture
def layer_plan():
    """Returns the plan of a layer, whose rules are all that there are for Blackwell."""

    def plan():
        with fm.recipe("mxfp8"):
            return only_plan(fm.MoE(H, I, E, 2, dtype=BF16), torch.randn(9, H, dtype=BF16, requires_grad=True))

    return plan


def assert_unavailable(plan, reason):
    assert not used(plan)
    for rule in (*ALL, *GATHERED):
        assert reasons(plan, rule, Status.UNAVAILABLE) == {reason}, rule


@pytest.mark.parametrize(
    ("arch", "reason"),
    [
        (None, "needs an sm_100 GPU, this device is cpu"),
        (90, "needs an sm_100 or sm_103 GPU, this one is sm_90"),
        (120, "needs an sm_100 or sm_103 GPU, this one is sm_120"),
    ],
)
def test_other_devices(arch, reason, layer_plan, monkeypatch):
    monkeypatch.setattr("fusedmoe.fusion.plans.arch_of", lambda device: arch)
    assert_unavailable(layer_plan(), reason)


def test_sm_103(layer_plan, monkeypatch):
    monkeypatch.setattr("fusedmoe.fusion.plans.arch_of", lambda device: 103)
    assert {*PRODUCTS} <= used(layer_plan())


def test_other_operating_systems(layer_plan, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert_unavailable(layer_plan(), "needs Linux, this is darwin")


def test_a_dsl_that_cannot_be_imported(layer_plan, monkeypatch):
    monkeypatch.setattr(toolkit, "why_unusable", lambda: "needs a newer driver")
    assert_unavailable(layer_plan(), "needs a newer driver")


def test_packages_that_the_kernels_are_compiled_with(layer_plan, monkeypatch):
    monkeypatch.setattr(toolkit, "missing_packages", lambda: ("a", "b"))
    assert_unavailable(layer_plan(), "needs a and b: pip install a b")


def installed(monkeypatch, version):
    """As if this version of NVIDIA's package were installed; none for None."""

    def found(name):
        if name == package.DISTRIBUTION:
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version
        return "1.0"

    monkeypatch.setattr(package.metadata, "version", found)
    monkeypatch.setattr(package, "why_missing", WHY_MISSING)


INSTALL = "pip install 'fusedmoe[blackwell]' (in a checkout: pip install '.[blackwell]')"


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, f"needs nvidia-cudnn-frontend 1.32: {INSTALL}"),
        ("1.31.9", f"needs nvidia-cudnn-frontend 1.32, found 1.31.9: {INSTALL}"),
        ("1.33.0", f"needs nvidia-cudnn-frontend 1.32, found 1.33.0: {INSTALL}"),
        ("2.32.0", f"needs nvidia-cudnn-frontend 1.32, found 2.32.0: {INSTALL}"),
    ],
)
def test_other_versions_of_the_package(version, reason, layer_plan, monkeypatch):
    installed(monkeypatch, version)
    assert_unavailable(layer_plan(), reason)


def test_later_fixes_of_the_package(layer_plan, monkeypatch):
    installed(monkeypatch, "1.32.7")
    assert {*PRODUCTS} <= used(layer_plan())


# ------------------------------------------------------------------------------------------------------------- stamps


@pytest.fixture
def stamp(monkeypatch, tmp_path):
    """Returns a function that writes a stamp, and its path. Nothing is verified before."""
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(package, "why_unverified", WHY_UNVERIFIED)
    path = package.stamp_file()

    def write(text):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps(text))

    return write, path


def test_a_machine_that_was_not_verified(stamp, layer_plan):
    assert_unavailable(layer_plan(), f"not verified on this machine: {VERIFY}")


def test_a_verified_machine(stamp, layer_plan):
    write, _ = stamp
    write({"versions": package.versions(), "passed": True})
    assert {*PRODUCTS} <= used(layer_plan())


def test_a_failed_verification(stamp, layer_plan):
    write, path = stamp
    write({"versions": package.versions(), "passed": False})
    assert_unavailable(layer_plan(), f"`fusedmoe verify` failed on this machine: {path}")


@pytest.mark.parametrize("name", package._VERSIONS)
def test_a_verification_of_other_versions(name, stamp, layer_plan):
    write, _ = stamp
    write({"versions": {**package.versions(), name: "0.1"}, "passed": True})
    now = package.versions()[name]
    assert_unavailable(layer_plan(), f"not verified on this machine since {name} 0.1 -> {now}: {VERIFY}")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "1", "{}", '{"passed": true}', '{"versions": {}}', '{"versions": 1, "passed": true}',
     '{"versions": ["a"], "passed": true}'],
)  # fmt: skip
def test_an_unreadable_stamp(text, stamp):
    write, path = stamp
    write(text)
    reason = WHY_UNVERIFIED()
    assert reason.startswith(f"not verified on this machine: {path} is unreadable (")
    assert reason.endswith(f"): {VERIFY}")


def test_a_stamp_without_versions(stamp):
    write, _ = stamp
    write({"versions": {}, "passed": True})
    assert "since fusedmoe None -> " in WHY_UNVERIFIED()


@pytest.mark.parametrize("folder", ["0", "untrusted"])
def test_no_cache_directory_for_the_stamp(folder, stamp, monkeypatch, tmp_path):
    directory = tmp_path / folder
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", "0" if folder == "0" else str(directory))
    reason = f"not verified on this machine: {VERIFY}, with a cache directory (FUSEDMOE_CACHE_DIR) for its result"
    assert WHY_UNVERIFIED() == reason


def test_a_plan_for_a_machine_that_is_absent(stamp, monkeypatch):
    """It assumes a verified machine, and says so."""
    monkeypatch.setattr("fusedmoe.fusion.plans.arch_of", lambda device: None)
    with fm.recipe("mxfp8"):
        found = experts().explain(tokens(), arch=100, **inputs())
    assert used(found.plans[0]) == {*ALL}
    assert f"not available on this machine, but assumed: not verified on this machine: {VERIFY}" in str(found)


def test_unverified_kernels_are_not_called(stamp):
    chain, x, named = experts(), tokens(), inputs()
    with fm.recipe("mxfp8"):
        got = outcome(chain, x, **named)
        fm.clear_weight_cache(chain)
        with fm.disabled("*"):
            want = outcome(chain, x, **named)
    assert want["y"].any()
    assert all(torch.equal(got[name], t) for name, t in want.items())


# ------------------------------------------------------------------------------------------------------------ formats


def of_rows(text):
    rows, gradient = f"input is {text}: {FORMAT}", f"grad_output is {text}: {FORMAT}"
    return dict.fromkeys(FORWARD, rows) | dict.fromkeys(BACKWARD, gradient)


def of_gradients(text, quantizer=None):
    return dict.fromkeys(BACKWARD, f"grad_output is {text}: {FORMAT}") | {
        QUANTIZE_GRAD: f"quantizes to {quantizer or text}: {FORMAT}"
    }


def quantizes(rows, gradient=None):
    return {QUANTIZE: f"quantizes to {rows}: {FORMAT}", QUANTIZE_GRAD: f"quantizes to {gradient or rows}: {FORMAT}"}


ROTATED = Quantizer(mxfp8(), hadamard=True)
RECIPES = {
    "fp8_block": ("fp8_block", of_rows("fp8 e4m3 1x128") | quantizes("fp8 e4m3 1x128")),
    "fp8_tensor": (
        "fp8_tensor",
        of_rows("fp8 e4m3 per-tensor") | of_gradients("fp8 e5m2 per-tensor")
        | quantizes("fp8 e4m3 per-tensor", "fp8 e5m2 per-tensor"),
    ),
    "nvfp4, gradients rounded stochastically": (
        "nvfp4",
        of_rows("nvfp4 e2m1 1x16")
        | quantizes("nvfp4 e2m1 1x16, Hadamard", "nvfp4 e2m1 1x16, stochastic rounding, Hadamard"),
    ),
    "e5m2 gradients": (MXFP8(hybrid=True), of_gradients("mxfp8 e5m2 1x32")),
    "scales of the specification": (
        MXFP8(scale_rule="floor"), of_rows("mxfp8 e4m3 1x32") | quantizes("mxfp8 e4m3 1x32")
    ),
    "square blocks of weights": (
        MXFP8(weight_2d=True),
        dict.fromkeys(FORWARD, f"fc.weight is mxfp8 e4m3 32x32: {FORMAT}")
        | dict.fromkeys((DGRAD, DGRAD_ACTIVATION), f"dgrad.weight is mxfp8 e4m3 32x32: {FORMAT}"),
    ),
    "rotated rows": (
        Custom(input=ROTATED, weight=M, grad=M),
        dict.fromkeys(FORWARD, f"input is mxfp8 e4m3 1x32: {FORMAT}")
        | {WGRAD: f"wgrad.input is mxfp8 e4m3 1x32: {FORMAT}", QUANTIZE: f"quantizes to {ROTATED}: {FORMAT}"},
    ),
    "rotated gradients": (
        Custom(input=M, weight=M, grad=ROTATED), of_gradients("mxfp8 e4m3 1x32", f"{ROTATED}")
    ),
    "rows alone": (
        Custom(input=M, grad=M),
        dict.fromkeys(FORWARD, "fc.weight is not quantized: expected MXFP8 operands")
        | dict.fromkeys((DGRAD, DGRAD_ACTIVATION), "dgrad.weight is not quantized: expected MXFP8 operands"),
    ),
    "weights alone": (
        Custom(weight=M),
        {GEMM: "input is not quantized: expected MXFP8 operands",
         DGRAD: "grad_output is not quantized: expected MXFP8 operands"},
    ),
    "no gradients": (
        Custom(input=M, weight=M),
        dict.fromkeys((DGRAD, WGRAD), "grad_output is not quantized: expected MXFP8 operands"),
    ),
    "gradients alone": (
        Custom(grad=M),
        {WGRAD: "wgrad.input is not quantized: expected MXFP8 operands",
         DGRAD: "dgrad.weight is not quantized: expected MXFP8 operands"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", RECIPES)
def test_other_formats(which):
    """They are no miss, since no device has a kernel."""
    recipe, expected = RECIPES[which]
    plan = plan_of(experts(scale=True), recipe=recipe, scale=True)
    assert_declined(plan, expected)
    misses = {miss.reason for _, miss in plan.missed if miss.rule.startswith(PREFIX)}
    assert misses.isdisjoint(expected.values())


def test_other_formats_of_the_result():
    """The product is fused all the same; the result is quantized by another step."""
    chain = fm.Sequential(
        fm.Quantize(M, weight=M), fm.GroupedLinear(E, H, 2 * I, dtype=BF16), fm.SwiGLU(),
        fm.Quantize(fp8_block(), weight=fp8_block(across=128)), fm.GroupedLinear(E, I, H, dtype=BF16),
    )  # fmt: skip
    plan = plan_of(chain, tokens(requires_grad=False), "bf16")
    assert_declined(plan, {GEMM_ACTIVATION: f"quantizes to fp8 e4m3 1x128: {FORMAT}"})
    assert GEMM in used(plan)


def test_other_formats_of_the_gradient():
    chain = fm.Sequential(
        fm.Quantize(None, backward=fp8_block()), fm.SwiGLU(), fm.Quantize(M, weight=M),
        fm.GroupedLinear(E, I, H, dtype=BF16), fm.Quantize(None, backward=M),
    )  # fmt: skip
    plan = plan_of(chain, tokens(hidden=2 * I), "bf16")
    assert_declined(plan, {DGRAD_ACTIVATION: f"quantizes to fp8 e4m3 1x128: {FORMAT}"})
    assert DGRAD in used(plan)


# ------------------------------------------------------------------------------------------------------------- layers


def widths(first, last):
    """The reasons: of the first layer's products, and of the last one's."""
    return {GEMM: {first, last}, GEMM_ACTIVATION: first, DGRAD: {first, last}, DGRAD_ACTIVATION: last,
            WGRAD: {first, last}}  # fmt: skip


@pytest.mark.parametrize(
    ("hidden", "width", "first", "last"),
    [(192, I, "in_features 192", "out_features 192"), (H, 48, "out_features 96", "in_features 48")],
)
def test_widths(hidden, width, first, last):
    plan = plan_of(experts(hidden=hidden, width=width), tokens(hidden=hidden))
    assert_declined(plan, widths(*(f"{name} is not a multiple of 128" for name in (first, last))))


def test_half_of_a_width():
    plan = plan_of(experts(width=192))
    assert reasons(plan, GEMM_ACTIVATION) == {"half of out_features, 192, is not a multiple of 128"}
    assert {GEMM, DGRAD, WGRAD} <= used(plan), "of the first layer"
    assert reasons(plan, DGRAD_ACTIVATION) == {"in_features 192 is not a multiple of 128"}


def test_widths_of_blocks():
    plan = plan_of(experts(width=48))
    assert reasons(plan, QUANTIZE) == {"48 features are not a multiple of 32"}
    assert reasons(plan, QUANTIZE_GRAD) == {"96 features are not a multiple of 64"}


def test_the_number_of_experts(monkeypatch):
    assert backend.MOST_EXPERTS == 1024
    for module in (backend, quantize):
        monkeypatch.setattr(module, "MOST_EXPERTS", E - 1)
    assert_declined(plan_of(experts(scale=True), scale=True), {rule: {"4 experts, over 3"} for rule in ALL})


def test_sms_that_are_left_to_others():
    plan = plan_of(experts(options={"sm_margin": 7}))
    assert_declined(plan, {rule: {"sm_margin 7: these kernels take all SMs"} for rule in PRODUCTS})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype):
    name = str(dtype).removeprefix("torch.")
    plan = plan_of(experts(dtype=dtype), tokens(dtype=dtype))
    text = f"is {name}: products of MXFP8 operands are bfloat16"
    assert_declined(plan, dict.fromkeys(FORWARD, f"input {text}") | dict.fromkeys(BACKWARD, f"grad_output {text}"))
    if dtype is torch.float32:
        assert_declined(plan, {rule: {"rows are float32, not bfloat16 or float16"} for rule in QUANTIZERS})
    plan = plan_of(experts(dtype=dtype, bias="frozen"), tokens(dtype=dtype))
    assert_declined(plan, dict.fromkeys(FORWARD, f"the bias is {name}, not bfloat16"))


INTERLEAVED = "interleaved gate and up: expected a weight with the rows [gate | up]"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"interleaved": True}, INTERLEAVED),
        ({"alpha": 1.702}, "alpha 1.702 and offset 0.0 without a limit"),
        ({"offset": 1.0}, "alpha 1.0 and offset 1.0 without a limit"),
    ],
)
def test_activations(settings, reason):
    if reason != INTERLEAVED:
        reason += ": the kernel has them for clamped activations alone"
    plan = plan_of(experts(fm.SwiGLU(**settings)))
    assert_declined(plan, {GEMM_ACTIVATION: {reason}, DGRAD_ACTIVATION: {reason}})
    assert {GEMM, DGRAD, WGRAD} <= used(plan)
    with (
        fm.recipe("mxfp8"),
        fm.strict(),
        pytest.raises(FusionError, match=r"1\.SwiGLU: sm100\.grouped_gemm_activation"),
    ):
        experts(fm.SwiGLU(**settings))(tokens(), **inputs())


def test_squared_relu_of_a_biased_layer():
    plan = plan_of(experts(fm.SquaredReLU(), bias="frozen"))
    assert_declined(plan, {GEMM_ACTIVATION: {"the kernel of the squared ReLU has no bias"}})


def test_gradients_that_are_read_unquantized():
    reason = "the gradient of the preactivation is read unquantized too: the epilogue writes codes"
    for chain, recipe in ((experts(bias="trained"), "mxfp8"), (experts(), MXFP8(wgrad="bf16"))):
        plan = plan_of(chain, recipe=recipe)
        assert_declined(plan, {DGRAD_ACTIVATION: {reason}})
        assert DGRAD in used(plan)


def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        plan, without = plan_of(experts(scale=True), scale=True), plan_of(experts())
    finally:
        torch.use_deterministic_algorithms(False)
    reason = "the gradient of the row scale is a sum by atomics, which is not deterministic"
    assert reason in reasons(plan, DGRAD_ACTIVATION)
    assert DGRAD_ACTIVATION not in used(plan)
    assert used(without) == {*ALL}


def test_rows_without_experts():
    chain = fm.Sequential(fm.Linear(H, I, dtype=BF16))
    with fm.recipe("mxfp8"):
        plan = only_plan(chain, torch.randn(9, H, dtype=BF16, requires_grad=True))
    assert_declined(plan, {rule: {"rows without experts have no packed layout"} for rule in QUANTIZERS})


def test_rows_of_three_dimensions():
    spec = SimpleNamespace(shape=(2, 3, 64))
    ctx = SimpleNamespace(spec=lambda name: spec, dtype=lambda name: BF16, exists=lambda name: True)
    with pytest.raises(Declined, match="rows have 3 dimensions, not 2"):
        quantize._step(ctx, "input", "output")


# ------------------------------------------------------------------------------------------------- tensors of a call


def codes(rows, features):
    """Codes of any size that take no memory."""
    return torch.empty(rows, features, dtype=torch.float8_e4m3fn, device="meta")


@pytest.mark.parametrize(
    ("rows", "width", "others"), [(2**23, 256, (64,)), (2**20, 128, (2**11,)), (2**20, 128, (64, 2**11))]
)
def test_the_number_of_elements(rows, width, others):
    """The kernels count them in 32 bits."""
    backend.guard_rows(codes(rows - 1, width), *others)
    widest = max(width, *others)
    with pytest.raises(Declined, match=rf"^{rows} rows of {widest} features: expected fewer than 2\^31 elements$"):
        backend.guard_rows(codes(rows, width), *others)


@pytest.mark.parametrize("rule", PRODUCTS)
def test_each_product_counts_elements_of_all_operands(rule):
    """The width of the result may be what is too large."""
    chain = experts(scale=True)
    rows, (wide, narrow) = 2**31 // (2 * I) + 256, (2 * I, 1)
    ctx = SimpleNamespace(spec=lambda name: SimpleNamespace(), exists=lambda name: False)
    made = {
        GEMM: (codes(rows, narrow), None, codes(E * wide, 1).view(E, wide, 1), None, None),
        GEMM_ACTIVATION: (codes(rows, narrow), None, codes(E * wide, 1).view(E, wide, 1), None, None),
        DGRAD: (codes(rows, narrow), None, codes(E * wide, 1).view(E, wide, 1), None, None),
        DGRAD_ACTIVATION: (codes(rows, narrow), None, None, None, None, codes(rows, wide)),
        WGRAD: (codes(rows, narrow), None, None),
    }[rule]
    (kind,) = [kind for kind in fm.rules() if kind.name == rule]
    bound = kind({"fc": chain[0], "act": chain[1], "scale": None, "dact": SimpleNamespace(op=chain[1]),
                  "scale_grad": None, "wgrad": SimpleNamespace(op=chain[0])})  # fmt: skip
    with pytest.raises(Declined, match=r"expected fewer than 2\^31 elements"):
        bound.build(ctx, ())(*made)


def test_a_call_without_rows():
    with pytest.raises(NothingToDo, match="no rows"):
        backend.guard_rows(codes(0, H), H)


def test_a_bias_that_is_not_contiguous():
    bias = torch.zeros(E, H, dtype=BF16)
    backend.guard_bias(None)
    backend.guard_bias(bias)
    with pytest.raises(Declined, match="the bias is not contiguous"):
        backend.guard_bias(bias.mT.contiguous().mT)
