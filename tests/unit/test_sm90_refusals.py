"""What the rules for sm_90 decline, and why. A declined chain computes the same as without rules."""

import functools
import importlib.util
import re

import pytest
import torch
from kit import layers
from kit.sm90_machine import (
    BF16,
    FP8_DGRAD,
    FP8_DGRAD_ACTIVATION,
    FP8_GEMM,
    FP8_GEMM_ACTIVATION,
    FP8_WGRAD,
    E,
    H,
    I,
    K,
    T,
    assert_close,
    both_ways,
    called,
    dense,
    experts,
    operands,
    reasons,
    routed,
    strided,
)
from kit.toy import only_plan, outcome
from torch import nn

import fusedmoe as fm
from fusedmoe import FusionError, Status
from fusedmoe.builtin_rules.products.fp8 import guard_codes, on_readable_codes
from fusedmoe.fusion.language.rule import Declined, NothingToDo
from fusedmoe.kernels.build import toolkit
from fusedmoe.numerics.formats import (
    E2M1,
    E4M3,
    E5M2,
    Format,
    Quantizer,
    ScaleRule,
    fp8_block,
    fp8_tensor,
    mxfp8,
)
from fusedmoe.numerics.recipes import Custom, FP8Block

pytestmark = pytest.mark.usefixtures("hopper_machine")

FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64
LINES, BLOCKS = fp8_block(), fp8_block(across=128)
ROTATED = Quantizer(LINES, hadamard=True)
COLUMNS = "sm90.gathered_quantize_columns"


def layer(out_features, *others, **settings):
    return fm.Sequential(fm.GroupedLinear(E, H, out_features, dtype=BF16, **settings), *others)


def last(of_input, backward=LINES, of_gradient=None):
    """An activation and the layer after it, with quantized operands."""
    first = [fm.Quantize(None, backward=of_gradient)] if of_gradient else []
    quantized = fm.Quantize(of_input, weight=BLOCKS), fm.GroupedLinear(E, I, H, dtype=BF16)
    return fm.Sequential(*first, fm.SwiGLU(), *quantized, fm.Quantize(None, backward=backward))


def first(of_result):
    quantized = fm.Quantize(LINES, weight=BLOCKS), fm.GroupedLinear(E, H, 2 * I, dtype=BF16)
    return fm.Sequential(*quantized, fm.SwiGLU(), fm.Quantize(of_result))


def one_layer(quantizer=None, backward=None, weight=None):
    return fm.Sequential(fm.Quantize(quantizer, backward=backward, weight=weight), fm.Linear(H, H, dtype=BF16))


def router(hidden=H, num_experts=8, dtype=BF16, **options):
    return fm.Sequential(fm.Router(hidden, num_experts, 2, dtype=dtype, **options), fm.Dispatch(num_experts))


def stored():
    codes = [fm.quantize(torch.randn(E, n, k) / 8, BLOCKS) for n, k in ((2 * I, 72), (72, I))]
    one, two = (fm.GroupedLinear.from_quantized(q.data, q.scale) for q in codes)
    return fm.Sequential(one, fm.SwiGLU(), two)


def odd(across=1, lines=128, rule=ScaleRule.RCEIL, element=E4M3, **settings):
    return Format("odd", element, (across, lines), rule, **settings)


def both(reason, *rules):
    return dict.fromkeys([f"sm90.{rule}" for rule in rules], reason)


NOT_16_BIT = "{} is float32, not bfloat16 or float16: convert the module, or run under torch.autocast"
NO_SCALE = "the row scale is float64, not float32, bfloat16 or float16: convert it"
WIDTH, CODES = "{} is not a multiple of 8", "{} is not a multiple of 16"
FORWARD, BACKWARD = ("grouped_gemm", "grouped_gemm_activation"), ("grouped_dgrad", "grouped_dgrad_activation")
SQUARED = fm.SquaredReLU()
ACTIVATIONS, SORTING = ("activation", "dactivation"), ("dispatch", "combine", "dcombine", "ddispatch")
QUANTIZE = ("quantize", "quantize_grad")
TO_OTHERS = "no kernel quantizes to {} yet: expected {}"
TO_MXFP8, TO_E8M0 = TO_OTHERS.format("mxfp8 e4m3 1x32", "blocks of 1x128"), TO_OTHERS.format("odd e4m3 1x128", "fp32")
FP8, INTERLEAVED = {"recipe": "fp8_block"}, "interleaved gate and up: expected a weight with the rows [gate | up]"
UNQUANTIZED = {"recipe": "fp8_block", "disabled": ("sm90.fp8_*",)}


def of_operands(forward, backward=None, wgrad=None):
    """The reasons of the products that take FP8 operands."""
    found = dict.fromkeys((FP8_GEMM, FP8_GEMM_ACTIVATION), forward) | {FP8_WGRAD: wgrad}
    found |= dict.fromkeys((FP8_DGRAD, FP8_DGRAD_ACTIVATION), backward)
    return {rule: reason for rule, reason in found.items() if reason}


def custom(*formats):
    """A recipe with these formats of rows, weight and gradient."""
    quantizers = [f if f is None or isinstance(f, Quantizer) else Quantizer(f) for f in formats]
    return Custom(**dict(zip(("input", "weight", "grad"), quantizers, strict=True)))


def multiplies(what, format, expected):
    return f"no kernel multiplies {what} in {format} yet: expected {expected}"


ALONE = "is not quantized: expected FP8 operands"
OF_EXPERT = multiplies("a weight", "fp8 e4m3 128x128", "one scale per expert")
OPERANDS = [  # quantizers of rows, weight and gradient, and the reasons
    (mxfp8(), BLOCKS, mxfp8(), [multiplies("rows", "mxfp8 e4m3 1x32", "blocks of 1x128 values")] * 3),
    (fp8_block(E5M2), BLOCKS, LINES, ["input is e5m2: expected e4m3", None, "wgrad.input is e5m2: expected e4m3"]),
    (LINES, LINES, LINES, [multiplies("a weight", "fp8 e4m3 1x128", "blocks of 128x128 values")] * 2),
    (LINES, fp8_block(E5M2, 128), LINES, [f"{name}.weight is e5m2: expected e4m3" for name in ("fc", "dgrad")]),
    (fp8_tensor(), BLOCKS, fp8_tensor(), [OF_EXPERT] * 2),
    (LINES, fp8_tensor(), LINES, [multiplies("a weight", "fp8 e4m3 per-tensor", "blocks of 128x128 values")] * 2),
    (LINES, None, LINES, [f"{name}.weight {ALONE}" for name in ("fc", "dgrad")]),
    (None, BLOCKS, LINES, [f"input {ALONE}", None, f"wgrad.input {ALONE}"]),
    (LINES, BLOCKS, fp8_tensor(E5M2), [None, OF_EXPERT, multiplies("rows", "fp8 e4m3 1x128", "one scale per expert")]),
    (ROTATED, BLOCKS, ROTATED, [None, None, "grad_output is rotated: expected hadamard=False"]),
]  # fmt: skip
DECLINED = [  # id, chain, settings, reason of each rule, whether `strict` misses it
    ("fp32", lambda: experts(bias=True, dtype=FP32), {}, both(NOT_16_BIT.format("input"), *FORWARD, "activation")
     | both(NOT_16_BIT.format("grad_output"), *BACKWARD, "grouped_wgrad", "column_sums", "dactivation"), True),
    ("odd features", lambda: experts(bias=True, hidden=36, width=20), {}, {
        "sm90.grouped_gemm": WIDTH.format("in_features 20"), "sm90.column_sums": WIDTH.format("out_features 36"),
        "sm90.grouped_dgrad_activation": WIDTH.format("in_features 20"),
        **both(WIDTH.format("half of the features 20"), *ACTIVATIONS),
        **both(WIDTH.format("in_features 36"), "grouped_gemm_activation", "grouped_wgrad", "grouped_dgrad"),
     }, True),
    ("odd half", lambda: experts(width=20), {},
     {"sm90.grouped_gemm_activation": WIDTH.format("half of out_features 20")}, True),
    ("odd layer", lambda: layer(12, bias=True), {},
     both(WIDTH.format("out_features 12"), "grouped_gemm", "grouped_wgrad", "grouped_dgrad", "column_sums"), True),
    ("fp64 scale", lambda: experts(scale=True), {"probs": FP64},
     both(NO_SCALE, "grouped_gemm_activation", "grouped_dgrad_activation", *ACTIVATIONS), True),
    ("quantized", lambda: experts(bias=True), UNQUANTIZED,
     both("takes no fp8 e4m3 128x128 and fp8 e4m3 1x128 operands", *FORWARD, *BACKWARD)
     | both("takes no fp8 e4m3 1x128 operands", "grouped_wgrad"), False),
    ("dense, quantized", dense, FP8, both("takes no fp8 e4m3 128x128 and fp8 e4m3 1x128", "linear", "linear_activation",
     "linear_dgrad", "linear_dgrad_activation") | both("takes no fp8 e4m3 1x128 operands", "linear_wgrad"), False),
    ("dense, fp32", lambda: dense(dtype=FP32), {}, both(NOT_16_BIT.format("input"), "linear", "linear_activation")
     | both(NOT_16_BIT.format("grad_output"), "linear_wgrad", "linear_dgrad", "linear_dgrad_activation"), True),
    ("dense, one feature", lambda: fm.Sequential(fm.Linear(H, 1, bias=False, dtype=BF16)), {},
     both("out_features is 1, a product for plain PyTorch", "linear", "linear_wgrad"), False),
    ("tokens in fp32", lambda: routed(dtype=FP32), {}, both("x is float32, not bfloat16 or float16", *SORTING), True),
    ("odd tokens", lambda: routed(hidden=36), {}, both(WIDTH.format("features 36"), *SORTING), True),
    ("int16 ids", routed, {"index": torch.int16},
     both("expert_index is int16, not int32 or int64: convert it", "dispatch"), True),
    ("fp64 weights", routed, {"weight": FP64}, both(NO_SCALE, "dispatch"), True),
    ("1025 experts", lambda: routed(num_experts=1025, hidden=8, width=8), {"num_experts": 1025},
     both("1025 experts, over 1024", "dispatch"), True),
    ("router, odd features", lambda: router(36), {"features": 36}, both(WIDTH.format("hidden 36"), "router"), True),
    ("router, 513 experts", lambda: router(8, 513), {"features": 8}, both("513 experts, over 512", "router"), True),
    ("router, 64 groups", lambda: router(num_experts=64, num_groups=64, top_groups=63), {"features": H},
     both("2 chosen experts, 64 groups: expected at most 32 of each", "router"), True),
    ("router in fp16", lambda: router(dtype=FP16), {"features": H},
     both("the router's weight is float16: expected bfloat16 or float32", "router"), True),
    ("fp8, odd features", lambda: experts(SQUARED, hidden=40), FP8, {
        FP8_GEMM_ACTIVATION: CODES.format("in_features 40"), FP8_GEMM: CODES.format("out_features 40"),
        FP8_DGRAD_ACTIVATION: CODES.format("out_features 40"), FP8_DGRAD: CODES.format("in_features 40"),
        FP8_WGRAD: CODES.format("in_features 40"), **both(CODES.format("features 40"), *QUANTIZE, "quantize_weight"),
     }, True),
    ("fp8, odd width", lambda: experts(SQUARED, width=24), FP8, {
        FP8_GEMM_ACTIVATION: CODES.format("out_features 24"), FP8_GEMM: CODES.format("in_features 24"),
        FP8_DGRAD_ACTIVATION: CODES.format("in_features 24"), FP8_WGRAD: CODES.format("out_features 24"),
     }, True),
    ("fp8, halves without whole blocks", lambda: experts(width=48), FP8, {
        FP8_GEMM_ACTIVATION: "half of out_features 48 is not a multiple of 128",
        FP8_DGRAD_ACTIVATION: "in_features 48 is not a multiple of 128",
     }, False),
    ("fp8, one scale per expert", lambda: layer(48, fm.SwiGLU()), {"recipe": "fp8_tensor"},
     {FP8_GEMM_ACTIVATION: CODES.format("half of out_features 24")}, False),
    ("fp8, interleaved", lambda: experts(fm.SwiGLU(interleaved=True)), FP8,
     dict.fromkeys((FP8_GEMM_ACTIVATION, FP8_DGRAD_ACTIVATION), INTERLEAVED), False),
    ("fp8, amax_epsilon", experts, {"recipe": FP8Block(amax_epsilon=1e-3)},
     dict.fromkeys((FP8_GEMM_ACTIVATION, FP8_DGRAD_ACTIVATION),
                   "amax_epsilon 0.001: the epilogue has no lower bound on amax"), False),
    ("fp8, scales of any size", experts, {"recipe": FP8Block(power_of_two=False)}, {
        FP8_DGRAD_ACTIVATION: "the gradient of the preactivation has scales of any size: the epilogue has powers of two"
     }, False),
    ("fp8, fp16", lambda: experts(bias=True, dtype=FP16), FP8, {
        **dict.fromkeys((FP8_GEMM, FP8_GEMM_ACTIVATION), "input is float16: products of FP8 operands are bfloat16"),
        **dict.fromkeys((FP8_DGRAD, FP8_DGRAD_ACTIVATION), "grad_output is float16: products of FP8 operands are"),
     }, True),
    ("fp8, fp32", lambda: experts(dtype=FP32), FP8, {
        FP8_GEMM: "input is float32: products of FP8", **both(NOT_16_BIT.format("input"), "quantize"),
        **both(NOT_16_BIT.format("grad_output"), "quantize_grad"),
     }, True),
    ("fp8, fp64 scale", lambda: experts(scale=True), FP8 | {"probs": FP64},
     dict.fromkeys((FP8_GEMM_ACTIVATION, FP8_DGRAD_ACTIVATION), NO_SCALE), True),
    ("fp8, bias gradient", lambda: experts(bias=True), FP8, {
        FP8_DGRAD_ACTIVATION: "the gradient of the preactivation is read unquantized too: the epilogue writes codes"
     }, False),
    ("mxfp8 gradient", lambda: last(LINES, of_gradient=mxfp8()), {}, {FP8_DGRAD_ACTIVATION: TO_MXFP8}, False),
    ("rotated gradient", lambda: last(LINES, of_gradient=ROTATED), {},
     {FP8_DGRAD_ACTIVATION: "the gradient of the preactivation is rotated: expected hadamard=False"}, False),
    ("e5m2 input again", lambda: last(fp8_block(E5M2), of_gradient=LINES), {},
     {FP8_DGRAD_ACTIVATION: "dgrad.input:columns is e5m2: expected e4m3"}, False),
    ("input again with scales of any size", lambda: last(fp8_block(power_of_two=False), of_gradient=LINES), {},
     {FP8_DGRAD_ACTIVATION: "dgrad.input:columns has scales of any size: the epilogue has powers of two"}, False),
    ("rotated input again", lambda: last(ROTATED, ROTATED), {},
     {FP8_DGRAD_ACTIVATION: "dgrad.input:columns is rotated: expected hadamard=False"}, False),
    ("mxfp8 result", lambda: first(mxfp8()), {}, {FP8_GEMM_ACTIVATION: TO_MXFP8}, False),
    ("result with the scale of an expert", experts, {"recipe": "fp8_tensor", "disabled": ("sm90.quantize",)},
     {FP8_GEMM_ACTIVATION: "the scale of an expert depends on all its rows: expected delayed scaling"}, False),
    *((f"operands {i}", experts, {"recipe": custom(*formats)}, of_operands(*found), False)
      for i, (*formats, found) in enumerate(OPERANDS)),
    *((name, functools.partial(one_layer, quantizer, quantizer), {}, both(reason, *QUANTIZE), False)
      for name, quantizer, reason in (
        ("1x64", odd(lines=64), TO_OTHERS.format("odd e4m3 1x64", "blocks of 1x128")),
        ("e2m1", odd(element=E2M1, rule=ScaleRule.TWO_LEVEL, tensor_scale=True),
         TO_OTHERS.format("odd e2m1 1x128", "codes in e4m3 or e5m2")),
        ("e8m0", odd(), TO_E8M0),
        ("hadamard", ROTATED, "no kernel rotates rows before it quantizes them yet: expected hadamard=False"),
    )),
    ("blocks of rows", lambda: fm.Sequential(fm.Quantize(BLOCKS), fm.SwiGLU()), {"features": 64},
     both(TO_OTHERS.format("fp8 e4m3 128x128", "blocks of 1x128 values"), "quantize"), False),
    ("weight in lines", lambda: one_layer(weight=LINES), {},
     both(TO_OTHERS.format("fp8 e4m3 1x128", "blocks of 128x128 values"), "quantize_weight"), False),
    ("stored weight", stored, {"dtype": BF16}, both(CODES.format("out_features 72"), "transposed_weight"), True),
    ("columns in fp8_row", routed, {"recipe": "fp8_row", "chosen": E},
     {COLUMNS: "its scales take more launches, which serve both forms in the forward pass"}, False),
    ("columns in fp32", lambda: routed(dtype=FP32), FP8 | {"chosen": E}, {COLUMNS: NOT_16_BIT.format("input")}, True),
    ("columns, odd features", lambda: routed(hidden=72), FP8, {COLUMNS: CODES.format("features 72")}, True),
]  # fmt: skip


@pytest.mark.parametrize(("make", "settings", "found", "missed"), [row[1:] for row in DECLINED],
                         ids=[row[0] for row in DECLINED])  # fmt: skip
def test_declined(make, settings, found, missed):
    how = {name: value for name, value in settings.items() if name not in ("recipe", "disabled")}
    recipe, chain = settings.get("recipe", "bf16"), make()
    x, named = operands(chain, **how)
    with fm.disabled(*settings.get("disabled", ())):
        plan = both_ways(chain, x, recipe, strict=not missed, bound=0.06, **named)
        for rule, reason in found.items():
            assert any(reason in text for text in reasons(plan, rule)), (rule, reasons(plan, rule))
        if missed:
            with fm.recipe(recipe), fm.strict(), pytest.raises(FusionError):
                chain(x, **named)


# ------------------------------------------------------------------------------------------------------- other machines


def missing(monkeypatch, *names):
    find = importlib.util.find_spec
    monkeypatch.undo()
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find(name))
    toolkit.missing_packages.cache_clear()


def arch(monkeypatch, number):
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: number)


MACHINES = [
    (lambda patch: arch(patch, None), (), "needs an sm_90 GPU, this device is cpu"),
    (lambda patch: arch(patch, 100), (), "needs an sm_90 GPU, this one is sm_100"),
    (lambda patch: missing(patch, "cutlass", "tvm_ffi"), (),
     "needs nvidia-cutlass-dsl and apache-tvm-ffi: pip install nvidia-cutlass-dsl apache-tvm-ffi"),
    (lambda patch: None, ("sm90.*",), "switched off by 'sm90.*'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "disabled", "reason"), MACHINES, ids=[row[-1] for row in MACHINES])
def test_machines_without_the_kernels(monkeypatch, request, change, disabled, reason):
    change(monkeypatch)
    request.addfinalizer(lambda: (monkeypatch.undo(), toolkit.missing_packages.cache_clear()))
    for recipe in ("bf16", "fp8_block"):
        chain = experts(bias=True)
        x, named = operands(chain)
        with fm.recipe(recipe), fm.disabled(*disabled, "sm100.*"):
            plan = only_plan(chain, x, **named)
            assert not plan.fused
            declined = {a.rule: a.reason for a in plan.attempts if a.status is Status.UNAVAILABLE and "sm90" in a.rule}
            assert {*declined.values()} == {reason}
            assert len(declined) > 5
            with fm.strict():
                outcome(chain, x, **named)
    assert called() == []


# ------------------------------------------------------------------------------------ tensors of a call, of any strides


def weight(how, at=0):
    def change(chain, x, named):
        chain[at].weight = nn.Parameter(strided(chain[at].weight.detach(), how))

    return change


def tokens(how):
    return lambda chain, x, named: strided(x.detach(), how).requires_grad_()


def bias(at):
    def change(chain, x, named):
        chain[at].bias = nn.Parameter(chain[at].bias.detach().mT.contiguous().mT)

    return change


def subclass(chain, x, named):
    class Wrapped(torch.Tensor):
        pass

    wrapped = chain[0].weight.detach().as_subclass(Wrapped)
    del chain[0].weight
    chain[0].weight = wrapped


def between_experts(chain, x, named):
    room = torch.empty(E * 2 * I * H + 4 * E, dtype=BF16)
    apart = room.as_strided((E, 2 * I, H), (2 * I * H + 4, H, 1))
    chain[0].weight = nn.Parameter(apart.copy_(chain[0].weight.detach()))


def ids_by_columns(chain, x, named):
    named["expert_index"] = named["expert_index"].T.contiguous().T


def far_apart(chain, x, named):
    """The stride of a single row may be any number."""
    named.update(expert_index=torch.tensor([[2, 0]]), expert_weight=torch.rand(1, K))
    return torch.randn(H, dtype=BF16).as_strided((1, H), (2**30, 1))


def cast_bias(chain, x, named):
    chain[0].balance_bias.data = chain[0].balance_bias.data.to(BF16)


LAST_AXIS = "expected unit stride in the last axis, multiples of 8 in the others"
ADDRESS = "does not begin at a multiple of 16 bytes"
GUARDED = [  # chain, recipe, change, reason
    (experts, "bf16", tokens("address"), f"x {ADDRESS}"),
    (experts, "bf16", tokens("pitch"), f"x has strides (68, 1): {LAST_AXIS}"),
    (experts, "bf16", tokens("columns"), f"x has strides (1, 16): {LAST_AXIS}"),
    (experts, "bf16", weight("address"), f"the weight {ADDRESS}"),
    (experts, "bf16", weight("pitch"), "the weight has strides (17408, 68, 1): expected unit stride in one of the"),
    (experts, "bf16", between_experts, "the weight has strides (16388, 64, 1): expected"),
    (experts, "bf16", subclass, "the weight is a Wrapped, not a plain tensor"),
    (lambda: experts(bias=True), "bf16", bias(0), "the bias is not contiguous"),
    (lambda: experts(bias=True), "bf16", bias(2), "the bias is not contiguous"),
    (lambda: experts(bias=True), "fp8_block", bias(2), "the bias is not contiguous"),
    (experts, "fp8_block", tokens("columns"), f"x has strides (1, 16): {LAST_AXIS}"),
    (experts, "fp8_block", weight("pitch"), "the weight has strides (17408, 68, 1)"),
    (dense, "bf16", weight("address"), f"the weight {ADDRESS}"),
    (routed, "bf16", ids_by_columns, "expert_index or expert_weight is not contiguous"),
    (routed, "bf16", tokens("address"), f"x {ADDRESS}"),
    (routed, "bf16", far_apart, "gathered rows are 1073741824 elements apart"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "recipe", "change", "reason"), GUARDED, ids=map(str, range(len(GUARDED))))
def test_tensors_that_kernels_cannot_read(make, recipe, change, reason, caplog):
    chain = make()
    x, named = operands(chain)
    changed = change(chain, x, named)
    x = x if changed is None else changed
    dy = torch.randn_like(x)
    with fm.disabled("*"):
        expected = layers.outcome(chain, x, dy, recipe, **named)
    fm.clear_weight_cache(chain)
    got = layers.outcome(chain, x, dy, recipe, **named)
    assert_close(got, expected, 0.015 if recipe == "bf16" else 0.06)
    assert any(f"declined this call: {reason}" in r.getMessage() for r in caplog.records)
    with fm.recipe(recipe), fm.strict(), pytest.raises(FusionError, match=re.escape(reason)):
        chain(x, **named)


@pytest.mark.parametrize(("change", "reason"), [
    (cast_bias, "the balance bias is torch.bfloat16, not float32"),
    (lambda chain, x, named: setattr(chain[0].weight, "data", torch.randn(H, 8, dtype=BF16).T),
     "the router's weight has strides"),
])  # fmt: skip
def test_routers_that_kernels_cannot_read(change, reason):
    chain = router(score="sigmoid", balance_bias=True)
    change(chain, None, None)
    with fm.strict(), pytest.raises(FusionError, match=re.escape(reason)):
        chain(torch.randn(T, H, dtype=BF16))


@pytest.mark.parametrize(("make", "recipe", "how"), [
    (experts, "bf16", "columns"), (experts, "fp8_block", "address"), (dense, "bf16", "columns"),
])  # fmt: skip
def test_a_main_grad_that_kernels_cannot_add_to(make, recipe, how, caplog):
    chain = make(accumulate_into_main_grad=True)
    x, named = operands(chain)
    for at in (0, 2):
        chain[at].weight.main_grad = strided(torch.zeros(chain[at].weight.shape), how)
    with fm.recipe(recipe):
        outcome(chain, x, **named)
        assert all(chain[at].weight.main_grad.any() for at in (0, 2))
        assert not any("wgrad" in name for name in called())
        reason = "main_grad is not contiguous" if how == "columns" else f"main_grad {ADDRESS}"
        said = [r.getMessage() for r in caplog.records if "declined this call" in r.getMessage()]
        assert len(said) == 2
        assert all(text.endswith(f"declined this call: {reason}; it runs unfused") for text in said)
        with fm.strict(), pytest.raises(FusionError, match=reason):
            outcome(chain, x, **named)


def test_codes_that_tma_cannot_read():
    good, around = torch.zeros(8, 64, dtype=torch.uint8), torch.zeros(8, 72, dtype=torch.uint8)
    guard_codes(good, good[None])
    bad = around[:, :64], around.flatten()[8 : 8 + 512].view(8, 64), good.mT, good[:1].expand(8, 64)
    for codes in bad:
        with pytest.raises(Declined, match=r"codes have strides \(.*\): expected rows of a multiple of 16 bytes"):
            guard_codes(good, codes)
    with pytest.raises(NothingToDo, match="no rows"):
        guard_codes(good[:0], good)
    given = []
    on_readable_codes(lambda *tensors: given.append(tensors), bad[0], good)(bad[0], "scale", good, "other scale")
    ((copied, *others),) = given
    assert copied.stride() == (64, 1)
    assert torch.equal(copied, bad[0])
    assert others[1] is good
