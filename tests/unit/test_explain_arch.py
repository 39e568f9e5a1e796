"""``explain(..., arch=90)``: what a GPU would run that is not there. Nothing here touches a GPU."""

import importlib.util
import re

import pytest
import torch
from kit.toy import only_plan, rule
from torch import nn

import fusedmoe as fm
from fusedmoe.kernels.build import toolkit
from fusedmoe.kernels.sm100 import package
from fusedmoe.numerics.formats import E4M3, Format, Quantizer, ScaleRule
from fusedmoe.numerics.recipes import Custom

pytestmark = pytest.mark.usefixtures("builtin_rules")

BF16 = torch.bfloat16
E, H, I = 4, 64, 32  # noqa: E741


def experts(dtype=BF16, device=None, **options):
    return fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, dtype=dtype, device=device, **options),
        fm.SwiGLU(),
        fm.GroupedLinear(E, I, H, dtype=dtype, device=device, **options),
    )


def call(dtype=BF16, device=None, rows=20):
    x = torch.zeros(rows, H, dtype=dtype, device=device, requires_grad=True)
    return x, {"splits": torch.tensor([5, 0, 12, 3], device=device)}


def needs_sm100(device, arch):
    fm.require(arch == 100, "needs sm_100")


FORWARD = ["sm90.grouped_gemm_activation", "sm90.grouped_gemm"]
BACKWARD = ["sm90.grouped_wgrad", "sm90.grouped_dgrad_activation", "sm90.grouped_wgrad", "sm90.grouped_dgrad"]


def used(plan):
    return [step.rule for step in plan.steps]


def only_plan_of(explanation):
    (plan,) = explanation.plans
    return plan


def test_it_is_the_plan_that_such_a_gpu_gets(monkeypatch):
    """The same rules, steps and bytes as where the device itself is of that architecture, on the meta device too."""
    x, named = call()
    asked = only_plan_of(experts().explain(x, arch=90, **named))
    x_meta, named_meta = call(device="meta")
    of_meta = only_plan_of(experts(device="meta").explain(x_meta, arch=90, **named_meta))
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
    monkeypatch.setattr(toolkit, "missing_packages", lambda: ())
    there = only_plan(experts(), x, **named)
    for name in ("steps", "attempts", "kept", "kept_bytes", "forward_source", "backward_source"):
        assert getattr(asked, name) == getattr(of_meta, name) == getattr(there, name), name
    assert used(asked) == FORWARD + BACKWARD
    assert (asked.device, asked.dtype, asked.asked_arch, asked.missed) == ("sm_90", "bfloat16", 90, ())
    assert "planned for sm_90 (requested), bfloat16, recipe bf16" in str(asked)
    # the input, and the preactivation in place of what the activation gives
    assert asked.kept == ("offsets", "1.input", "0.input")
    assert asked.kept_bytes == E * 4 + 20 * 2 * I * 2 + 20 * H * 2


def test_host_syncs_are_those_of_the_architecture():
    """Products in fp32 are a loop on an H100, which reads the splits; on this CPU nothing waits."""
    x, named = call(torch.float32)
    chain = experts(torch.float32)
    assert [s.host_sync for s in chain.explain(x, arch=90, **named).steps].count(True) == 6
    assert not any(s.host_sync for s in chain.explain(x, **named).steps)
    with fm.disabled("sm90.*"):  # torch has a product in bf16
        bf16, named = call()
        assert not any(s.host_sync for s in experts().explain(bf16, arch=90, **named).steps)
        assert any(s.host_sync for s in experts().explain(bf16, arch=80, **named).steps)
    x, named = call()
    with fm.recipe("fp8_row"):
        paths = [{s.path for s in experts().explain(x, arch=arch, **named).steps if s.path} for arch in (80, 90, None)]
    assert paths == [{"emulated"}, {"native"}, {"emulated"}]


ODD = Quantizer(Format("odd", E4M3, (1, 64), ScaleRule.RCEIL))
WITHOUT_KERNELS = Custom("odd", input=ODD, weight=ODD, grad=ODD)


@pytest.mark.parametrize("arch", [None, 90])
def test_under_a_recipe_without_kernels_no_gpu_has_one(arch):
    x, named = call()
    with fm.recipe(WITHOUT_KERNELS):
        explanation = experts().explain(x, arch=arch, **named)
    reasons = {s.ops[0]: s.nearest_miss.reason for s in only_plan_of(explanation).unfused if s.nearest_miss}
    for op in ("0.GroupedLinear", "2.GroupedLinear", "2.Dgrad", "0.Wgrad"):
        assert re.fullmatch(r"no kernel (dequantizes|multiplies) .* yet: expected .*", reasons[op])
    quantized = [reason for op, reason in reasons.items() if "Quantize" in op]
    assert len(quantized) == 6
    assert all(re.match("no kernel (quantizes to|multiplies rows in) ", reason) for reason in quantized)
    # nothing is missed where there is no kernel
    assert [label for label, _ in explanation.missed] == (["1.SwiGLU", "1.DSwiGLU"] if arch is None else [])
    assert str(explanation).count("sm_90 GPU") == (2 if arch is None else 0)  # for the activation, and in the last line


def test_a_recipe_with_kernels_is_fused_on_a_gpu():
    x, named = call()
    with fm.recipe("fp8_block"):
        here, there = (experts().explain(x, arch=arch, **named) for arch in (None, 90))
    assert {step.nearest_miss.reason for step in here.plans[0].unfused} == {"needs an sm_90 GPU, this device is cpu"}
    with pytest.raises(fm.FusionError, match=r"0:input\.Quantize: sm90\.quantize: UNAVAILABLE: needs"):
        here.raise_if_missed()
    assert [rule for rule in used(there.plans[0]) if "quantize" not in rule] == [
        "sm90.fp8_grouped_gemm", "sm90.activation", "sm90.fp8_grouped_gemm", "sm90.fp8_grouped_wgrad",
        "sm90.fp8_grouped_dgrad_activation", "sm90.fp8_grouped_wgrad", "sm90.fp8_grouped_dgrad",
    ]  # fmt: skip
    why = "1.SwiGLU: sm90.fp8_grouped_gemm_activation: CONSTRAINT: half of out_features 32 is not a multiple of 128"
    assert f"apart from a product, because: {why}" in " ".join(str(there).split())
    there.raise_if_missed()
    with fm.recipe("fp8_block"), fm.disabled("sm90.activation"), pytest.raises(fm.FusionError, match=why):
        experts().explain(x, arch=90, **named).raise_if_missed()


def blackwell(recipe="mxfp8", arch=100, rows=20, moe=False):
    """The plan of an expert MLP or of an MoE layer whose widths NVIDIA's kernels take."""
    x = torch.zeros(rows, 256, dtype=BF16, requires_grad=True)
    with fm.recipe(recipe):
        if moe:
            return fm.MoE(256, 128, E, 2, dtype=BF16).explain(x, arch=arch)
        up, down = fm.GroupedLinear(E, 256, 256, dtype=BF16), fm.GroupedLinear(E, 128, 256, dtype=BF16)
        return fm.Sequential(up, fm.SwiGLU(), down).explain(x, splits=torch.tensor([rows, 0, 0, 0]), arch=arch)


@pytest.mark.parametrize("arch", [100, 103])
def test_mxfp8_on_blackwell(arch, monkeypatch):
    monkeypatch.setattr(package, "why_missing", lambda: None)
    monkeypatch.setattr(package, "why_unverified", lambda: "not verified on this machine: run `fusedmoe verify`")
    explanation = blackwell(arch=arch)
    (plan,) = explanation.plans
    names = (
        "quantize_weight quantize_weight quantize grouped_gemm_activation_quantize grouped_gemm quantize_grad "
        "grouped_wgrad grouped_dgrad_activation_quantize grouped_wgrad grouped_dgrad"
    )
    assert used(plan) == [f"sm100.{name}" for name in names.split()]
    assert plan.assumed == ("not verified on this machine: run `fusedmoe verify`",)
    assert f"planned for sm_{arch} (requested)" in str(plan)
    assert "not available on this machine, but assumed: not verified on this machine" in str(plan)
    assert "glue: offsets (sm100.offsets_from_splits), padded_offsets, place_of_row" in str(plan)
    explanation.raise_if_missed()


def test_padding_on_blackwell():
    (plan,) = blackwell().plans
    assert plan.packed_rows == (20, E * 256)
    # codes and scales by columns of the first layer's input (256 features), of the second's (128), the preactivation
    sizes = [1024 * 256 + 256 * 32, 1024 * 128 + 128 * 32, 1024 * 256 * 2]
    packed = [value for value in plan.kept if "packed" in value]
    assert sorted(packed) == ["0.input:packed_columns", "1.input:packed", "2.input:packed_columns"]
    assert plan.kept_padding_bytes == sum(size * 1004 // 1024 for size in sizes)
    assert plan.kept_bytes - sum(sizes) == 20 * 256 * 2 + 20 * 8 + 2 * E * 4  # the input, places of rows, offsets
    assert [step.padding_bytes > 0 for step in plan.fused] == [False] * 2 + [True] * 8  # none of weights
    assert plan.fused[2].padding_bytes == (1024 * 256 + 1024 * 8) * 1004 // 1024 + sizes[0] * 1004 // 1024
    assert "padded to a multiple of 256: 20 rows to at most 1,024; padding is at most" in " ".join(str(plan).split())


@pytest.mark.parametrize(
    ("recipe", "rules", "unfused"),
    [
        ("mxfp8", "dispatch gathered_quantize grouped_gemm_combine grouped_dgrad_ddispatch", set()),
        # products are torch's, as those of weight gradients in plain PyTorch are
        ("bf16", "dispatch grouped_mm activation combine grouped_mm_dgrad dactivation ddispatch", {"Wgrad"}),
    ],
)
def test_a_layer_on_blackwell(recipe, rules, unfused):
    """The router, whose products are those of Hopper, runs in plain PyTorch."""
    (plan,) = blackwell(recipe, moe=True).plans
    assert {step.rule for step in plan.fused} >= {f"sm100.{name}" for name in rules.split()}
    router = {"Router", "RouterLogitsGrad", "RouterWeightGrad", "DRouter"}
    assert {op.rpartition(".")[2] for step in plan.unfused for op in step.ops} == router | unfused
    fp32 = experts().float().explain(torch.zeros(20, H, requires_grad=True), arch=100, **call()[1])
    assert "there are no kernels for these ops on sm_100 yet" in str(fp32)


def test_wrong_input_is_refused_as_in_a_call():
    x, named = call()
    for wrong, given, text in ((x, {}, "'splits' is missing"), (x[:, :8], named, "shape"), (x[0, 0], named, "scalar")):
        with pytest.raises(fm.InputError, match=text):
            experts().explain(wrong, arch=90, **given)
    with pytest.raises(fm.InputError, match="explain: dtype: expected with arch="):
        fm.explain(experts(), dtype=BF16)


def test_packages_that_this_machine_lacks_are_assumed_and_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cutlass" else find(name))
    toolkit.missing_packages.cache_clear()
    x, named = call()
    try:
        plan = only_plan_of(experts().explain(x, arch=90, **named))
    finally:
        toolkit.missing_packages.cache_clear()
    assert used(plan) == FORWARD + BACKWARD
    assert plan.assumed == ("needs nvidia-cutlass-dsl: pip install nvidia-cutlass-dsl",)
    assert "not available on this machine, but assumed: needs nvidia-cutlass-dsl" in str(plan)


# ---- modules between chains ----------------------------------------------------------------------------------------


def test_a_module_in_front_of_a_chain_is_called_without_memory():
    foreign, called_on = nn.Linear(H, 2 * H, dtype=BF16), []
    foreign.register_forward_hook(lambda module, args, output: called_on.append(type(args[0]).__name__))
    after = fm.GroupedLinear(E, 2 * H, H, dtype=BF16)
    chain = fm.Sequential(*experts(), foreign, after, nn.Identity())
    x, named = call()
    explanation = chain.explain(x, arch=90, **named)
    titles = [title.partition(":")[0] for title, _ in explanation.parts]
    assert titles == ["chain 0 to 2", "module 3", "chain 4", "module 5"]
    assert used(explanation.plans[1]) == ["sm90.grouped_gemm", "sm90.grouped_wgrad", "sm90.grouped_dgrad"]
    assert called_on == ["FakeTensor"]
    assert foreign.weight.grad is None


def hooked(module):
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(("device", "nested"), [("cpu", False), ("meta", True)])
def test_ops_that_are_called_for_their_hooks_run_nothing(device, nested):
    up, act, down = experts(device=device)
    chain = fm.Sequential(hooked(fm.Sequential(up, act)), down) if nested else fm.Sequential(hooked(up), act, down)
    x, named = call(device=device)
    explanation = chain.explain(x, arch=90, **named)
    (title, _), (_, plan) = explanation.parts
    assert title.endswith("called as a module because of its hooks")
    backward = ["sm90.grouped_wgrad", "sm90.grouped_dgrad" if nested else "sm90.grouped_dgrad_activation"]
    assert used(plan) == [*([] if nested else ["sm90.activation"]), "sm90.grouped_gemm", *backward]


def test_a_module_that_reads_what_it_is_given_is_named():
    class Reads(nn.Module):
        def forward(self, x):
            return x * float(x.sum())

    x, named = call()
    with pytest.raises(fm.InputError, match=r"module '3' \(Reads\) cannot be called on tensors without memory"):
        fm.Sequential(*experts(), Reads(), fm.SwiGLU()).explain(x, arch=90, **named)


# ---- layers and models ---------------------------------------------------------------------------------------------


def test_another_dtype_is_named_with_the_one_that_was_given():
    model = fm.MoE(H, I, E, 2)
    with pytest.raises(fm.FusionError, match="x is float32, not bfloat16 or float16"):
        fm.explain(model, arch=90).raise_if_missed()
    result = fm.explain(model, arch=90, dtype=BF16)
    result.raise_if_missed()
    (plan,) = result.plans
    assert not plan.unfused
    assert (plan.dtype, plan.given_dtype) == ("bfloat16", "float32")
    assert "sm_90 (requested), bfloat16 (requested, given float32), recipe bf16" in str(result)


def test_a_model_that_has_nothing_to_fuse_or_cannot_be_planned_is_no_success():
    assert str(fm.explain(nn.Linear(3, 3))) == "no module of this model runs on fusedmoe"
    with pytest.raises(fm.FusionError, match="no module of this model runs on fusedmoe"):
        fm.explain(nn.Linear(3, 3), arch=90).raise_if_missed()
    with pytest.raises(fm.FusionError, match=r"0: not planned: no linear layer"):
        fm.explain(nn.ModuleList([fm.Sequential(fm.SwiGLU()), experts()]), arch=90).raise_if_missed()


# ---- strict --------------------------------------------------------------------------------------------------------


def test_a_rule_for_another_architecture_is_no_miss():
    with fm.register(rule("toy.of_another", {"fc": fm.Linear}, available=needs_sm100)):
        explanation = fm.explain(fm.Sequential(fm.Linear(H, H, dtype=BF16)), arch=90)
        explanation.raise_if_missed()
        (plan,) = explanation.plans
        assert plan.without_kernel == plan.unfused


def test_strict_with_unavailable_raises_where_the_device_is_in_the_way():
    chain, (x, named) = experts(), call()
    with fm.strict():
        chain(x, **named)
    text = "0.GroupedLinear: sm90.grouped_gemm_activation: UNAVAILABLE: needs an sm_90 GPU, this device is cpu"
    with fm.strict(unavailable=True), pytest.raises(fm.FusionError, match=text):
        chain(x, **named)
    with fm.strict(unavailable=True), fm.strict():
        chain(x, **named)
    with fm.strict(unavailable=True), fm.recipe(WITHOUT_KERNELS):
        fm.Sequential(chain[0])(x, **named)
        with pytest.raises(fm.FusionError, match=r"1\.SwiGLU: sm90\.activation: UNAVAILABLE"):
            chain(x, **named)
    with fm.strict(unavailable=True):
        assert chain.explain(x, **named).missed  # says so, and raises nothing


def test_strict_with_unavailable_under_torch_compile():
    chain, (x, named) = experts(), call()
    torch._dynamo.reset()
    compiled = torch.compile(chain, backend="eager", dynamic=True)
    with fm.strict():
        compiled(x, **named)
    with fm.strict(unavailable=True), pytest.raises(Exception, match="UNAVAILABLE: needs an sm_90 GPU"):
        compiled(x, **named)
    with fm.strict():
        compiled(x, **named)


@pytest.mark.parametrize("arch", [None, 90])
def test_modules_between_chains_keep_their_buffers(arch):
    """A norm that is in training must not count the call of `explain`, nor the rows that `fm.explain` makes up."""
    norm = nn.BatchNorm1d(H, dtype=BF16)
    chain = fm.Sequential(*experts(), norm, *experts())
    x, inputs = call()
    before = {name: (b, b.clone()) for name, b in norm.named_buffers()}
    chain.explain(x, arch=arch, **inputs)
    fm.explain(chain, arch=arch)
    for name, b in norm.named_buffers():
        assert b is before[name][0], name
        assert torch.equal(b, before[name][1]), name
    chain(x, **inputs)
    assert norm.num_batches_tracked == 1
