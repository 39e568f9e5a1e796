"""``wgrad="bf16"`` in plans: what weight gradients read, what is kept, the rules that match them, and its names."""

import dataclasses

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome
from test_explain_quantized import check_bytes
from test_sm90_rules import called, hopper_machine  # noqa: F401  (a fixture)
from test_te_recipes import DelayedScaling

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.fusion.language.rule import FusionRule, Step
from fusedmoe.numerics.formats import Delayed, fp8_tensor, mxfp8, nvfp4
from fusedmoe.numerics.recipes import BF16 as NOTHING
from fusedmoe.numerics.recipes import (
    MXFP8,
    NVFP4,
    RECIPES,
    Custom,
    FP8Block,
    FP8Row,
    FP8Tensor,
    named,
    resolve,
    shortest,
)
from fusedmoe.ops import SwiGLU

BF16 = torch.bfloat16
E, H, I, R = 4, 64, 32, 40  # noqa: E741
SPLITS = torch.tensor([5, 0, 12, 21])
NAMES = [name for name in RECIPES if name != "bf16"]
every_name = pytest.mark.parametrize("name", NAMES)


def experts(*between):
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), *between, fm.GroupedLinear(E, I, H)).to(BF16)


def rows(requires_grad=True):
    return torch.randn(R, H, dtype=BF16, requires_grad=requires_grad)


def routed(*between):
    return fm.Sequential(fm.Dispatch(), *experts(*between), fm.Combine(None if between else "probs"))


def routing():
    index, weight = torch.randint(0, E, (R, 2)), torch.rand(R, 2, requires_grad=True)
    return {"expert_index": index, "expert_weight": weight}


def reads(plan):
    """The operands of each weight gradient."""
    return {s.ops[0]: s.needs[:2] for s in plan.steps if "Wgrad" in s.ops[0]}


def plan_under(recipe, chain, x, **given):
    with fm.recipe(recipe):
        return only_plan(chain, x, **given)


# --- plans ---------------------------------------------------------------------------------------------------------


@every_name
def test_weight_gradients_read_the_values_from_before_quantization(name):
    plan = plan_under(f"{name}:wgrad=bf16", experts(), rows(), splits=SPLITS)
    assert reads(plan) == {
        "2.Wgrad": ("grad(2:grad.output)", "2:input.input"), "0.Wgrad": ("grad(1.input)", "0:input.input"),
    }  # fmt: skip
    assert {s.ops[0]: s.path for s in plan.steps if s.path} == dict.fromkeys(
        ("0.GroupedLinear", "2.GroupedLinear", "2.Dgrad", "0.Dgrad"), "emulated"
    )
    quantized = [s for s in plan.steps if "Quantize" in s.ops[0]]
    assert len(quantized) == 6
    for s in quantized:  # a weight has a form for each product
        assert any(v.endswith(":columns") for v in s.gives) is ("weight" in s.ops[0])
    assert not any(v.endswith(":columns") for v in plan.kept)


@every_name
def test_what_is_kept(name):
    """The rows of each layer once, and what the activation's derivative reads: nothing quantized."""
    chain, x = experts(), rows()
    with fm.recipe(f"{name}:wgrad=bf16"):
        plan = check_bytes(chain, x, splits=SPLITS)
    assert set(plan.kept) == {"offsets", "0:input.input", "1.input", "2:input.input"}
    assert plan.kept_bytes == 4 * E + 2 * R * (H + 2 * I + I)
    assert plan.kept_bytes == plan_under("bf16", chain, x, splits=SPLITS).kept_bytes


def test_few_rows_per_expert_take_less_memory_than_columns_and_many_take_more():
    chain = experts()
    for count, less in ((R, True), (4096, False)):
        x, splits = torch.randn(count, H, dtype=BF16, requires_grad=True), torch.full((E,), count // E)
        kept = [plan_under(r, chain, x, splits=splits).kept_bytes for r in ("fp8_block:wgrad=bf16", "fp8_block")]
        assert (kept[0] < kept[1]) is less


def test_nothing_is_kept_for_a_frozen_weight_or_in_inference():
    chain = experts()
    chain[2].weight.requires_grad_(False)
    plan = plan_under("mxfp8:wgrad=bf16", chain, rows(), splits=SPLITS)
    assert set(plan.kept) == {"offsets", "0:input.input", "1.input"}
    with torch.no_grad():
        assert plan_under("mxfp8:wgrad=bf16", chain, rows(), splits=SPLITS).kept == ()


def test_the_explanation_names_it():
    plan = plan_under("fp8_block:wgrad=bf16", experts(), rows(), splits=SPLITS)
    assert plan.formats == {
        "fp8 e4m3 128x128": ("0:weight", "2:weight"),
        "fp8 e4m3 1x128, wgrad bf16": ("0:input", "2:input", "2:grad", "0:grad"),
    }


def test_the_quantized_weights_are_those_of_the_quantized_recipe():
    chain, x = experts(), rows()
    with fm.recipe("mxfp8"):
        chain(x, splits=SPLITS).sum().backward()
    held = [op._of_process.quantized_weight for op in (chain[0], chain[2])]
    with fm.recipe("mxfp8:wgrad=bf16"):
        chain(x, splits=SPLITS)
    assert all(h is not None for h in held)
    assert [op._of_process.quantized_weight for op in (chain[0], chain[2])] == held


@pytest.mark.parametrize("layer", [0, 2])
def test_one_layer_of_a_chain(layer):
    chain = experts()
    chain[layer].recipe = "mxfp8:wgrad=bf16"
    plan = plan_under("mxfp8", chain, rows(), splits=SPLITS)
    other = 2 - layer
    assert reads(plan) == {
        f"{layer}.Wgrad": ({0: "grad(1.input)", 2: "grad(2:grad.output)"}[layer], f"{layer}:input.input"),
        f"{other}.Wgrad": (f"grad({other}:grad.input):columns", f"{other}.input:columns"),
    }


def test_a_fused_step_that_cannot_keep_the_rows_gives_way():
    class GluQuantize(FusionRule, name="toy.glu_quantize", direction="forward"):
        act: SwiGLU
        quantize: fm.Quantize
        takes_quantized = True

        def offer(self, ctx):
            return Step(needs=("input", "quantize.offsets"), gives=("output",), keeps=("output:columns",))

    with fm.register(GluQuantize):
        plan = plan_under("mxfp8:wgrad=bf16", experts(), rows(), splits=SPLITS)
    (attempt,) = [a for a in plan.attempts if a.rule == "toy.glu_quantize" and a.start == 2]
    assert (attempt.status, attempt.reason) == (
        Status.CONSTRAINT, "cannot keep 2:input.input, which 2.Wgrad needs",
    )  # fmt: skip


# --- the rules for sm_90 -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("builtin_rules")
@every_name
@pytest.mark.parametrize("chain", [experts, lambda: routed(fm.Scale("probs")), routed], ids=["", "scaled", "weighted"])
def test_the_rules_for_unquantized_weight_gradients_match(name, chain):
    chain = chain()
    given = {"splits": SPLITS} if len(chain) == 3 else routing()
    explain = lambda recipe: plan_asked(recipe, chain, rows(), **given)  # noqa: E731
    used = {s.ops[0]: s.rule for s in explain(f"{name}:wgrad=bf16").steps if "Wgrad" in s.ops[0]}
    last, first = used.values()
    assert first == ("sm90.grouped_wgrad" if len(chain) == 3 else "sm90.gathered_wgrad_x")
    # the kernel that quantizes the gradient's rows reads them through their index, so nothing else reads the rows
    through_index = any(isinstance(op, fm.Scale) for op in chain)
    assert last == ("sm90.gathered_wgrad_dy" if through_index else "sm90.grouped_wgrad")
    fp8 = "sm90.fp8_grouped_wgrad"
    others = {"fp8_block": fp8, "fp8_tensor": fp8, "fp8_row": None}  # torch multiplies the codes of fp8_row
    quantized = others.get(name, "sm90.dequantized_wgrad")
    assert [s.rule for s in explain(name).steps if "Wgrad" in s.ops[0]] == [quantized, quantized]


def plan_asked(recipe, chain, x, **given):
    with fm.recipe(recipe):
        (plan,) = chain.explain(x, arch=90, **given).plans
    return plan


@pytest.mark.usefixtures("builtin_rules")
def test_tokens_and_index_are_kept_in_place_of_the_rows():
    chain, x, given = routed(fm.Scale("probs")), rows(), routing()
    plan = plan_asked("mxfp8:wgrad=bf16", chain, x, **given)
    (step,) = [s for s in plan.steps if s.rule == "sm90.gathered_wgrad_x"]
    assert step.needs == ("grad(2.input)", "0.input", "0.offsets", "0.token_of_row")
    assert {"0.input", "0.token_of_row"} <= {*plan.kept}
    assert {"1:input.input", "1.input:columns"}.isdisjoint(plan.kept)


@pytest.mark.usefixtures("builtin_rules", "hopper_machine")
@pytest.mark.parametrize("main_grad", [False, True])
def test_they_compute_the_unfused_gradients(main_grad):
    chain, x, given = routed(fm.Scale("probs")), rows(), routing()
    layers = [chain[1], chain[4]]
    for layer in layers:
        layer.accumulate_into_main_grad = main_grad

    def gradients():
        for layer in layers:
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
        with fm.recipe("mxfp8:wgrad=bf16"):
            found = outcome(chain, x, **given)
        return found, [w.main_grad if main_grad else w.grad for w in (layer.weight for layer in layers)]

    with fm.disabled("*"):
        want, wanted = gradients()
    wanted = [w.clone() for w in wanted]
    stand_ins.calls.clear()
    with fm.strict():
        got, found = gradients()
    assert {name for name in called() if "wgrad" in name} == {"gathered_wgrad_dy", "grouped_wgrad", "gathered_wgrad_x"}
    assert got.keys() == want.keys()
    for a, b in zip(found, wanted, strict=True):
        assert b.any()
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2 * b.abs().max().item())


# --- names ---------------------------------------------------------------------------------------------------------


@every_name
def test_names(name):
    text, kind = f"{name}:wgrad=bf16", type(RECIPES[name])
    recipe = kind(wgrad="bf16")
    assert named(text) == resolve(text) == recipe != kind()
    assert hash(recipe) != hash(kind())
    assert shortest(recipe) == text
    assert shortest(kind()) == name
    roles, plain = recipe.roles(), kind().roles()
    assert roles.weight == plain.weight
    for role, other in ((roles.input, plain.input), (roles.grad, plain.grad)):
        assert (role.format, role.delayed, role.stochastic_rounding) == (
            other.format, other.delayed, other.stochastic_rounding,
        )  # fmt: skip
        assert (role.wgrad, role.hadamard, other.wgrad) == ("bf16", False, "quantized")
        assert str(role).endswith(", wgrad bf16")
    op = fm.Quantize(text, text, text)
    assert (op.quantizer, op.weight_quantizer, op.grad_quantizer) == tuple(roles)
    with fm.recipe(text) as found:
        assert found == recipe
    assert f"recipe='{text}'" in repr(fm.Linear(H, H, recipe=text))


def test_other_fields_stay():
    recipe = FP8Tensor(hybrid=False, delayed=Delayed(3), wgrad="bf16")
    assert recipe.roles().grad == fm.Quantizer(fp8_tensor(), delayed=Delayed(3), wgrad="bf16")
    assert shortest(recipe) is recipe
    assert NVFP4(hadamard=True, wgrad="bf16").roles().grad.hadamard is False
    quantizers = Custom("mine", input=fm.Quantizer(mxfp8())).roles()
    assert quantizers.with_wgrad("bf16") == (fm.Quantizer(mxfp8(), wgrad="bf16"), None, None)
    assert quantizers.with_wgrad("bf16").with_wgrad("quantized") == quantizers


@pytest.mark.parametrize(
    ("override", "wgrad"), [((False, False, False), "quantized"), ((False, False, True), "bf16")], ids=str
)
def test_a_recipe_of_transformer_engine(override, wgrad):
    assert resolve(older(override)) == FP8Tensor(delayed=Delayed(1024), wgrad=wgrad)


def older(override):
    """A recipe of a version of Transformer Engine that has this field."""
    fields = [("override_linear_precision", object, override)]
    return dataclasses.make_dataclass("Older", fields, bases=(DelayedScaling,))()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FP8Block(wgrad="fp16"), "FP8Block: wgrad: expected 'quantized' or 'bf16', got 'fp16'"),
        (lambda: FP8Row(wgrad=True), "FP8Row: wgrad: expected 'quantized' or 'bf16', got True"),
        (
            lambda: fm.Quantizer(mxfp8(), wgrad=BF16),
            "Quantizer: wgrad: expected 'quantized' or 'bf16', got torch.bfloat16",
        ),
        (
            lambda: fm.Quantizer(nvfp4(), hadamard=True, wgrad="bf16"),
            "Quantizer: hadamard: expected False for wgrad='bf16', which rotates nothing",
        ),
        (
            lambda: fm.Quantize(weight=fm.Quantizer(mxfp8(), wgrad="bf16")),
            "weight: expected a quantizer with wgrad='quantized', got mxfp8 e4m3 1x32, wgrad bf16",
        ),
        (lambda: MXFP8().roles().with_wgrad("fp8"), "Quantizer: wgrad: expected 'quantized' or 'bf16', got 'fp8'"),
        (lambda: resolve("bf16:wgrad=bf16"), "may end in ':wgrad=bf16' except 'bf16', got 'bf16:wgrad=bf16'"),
        (lambda: resolve("mxfp8:wgrad=fp16"), "expected a Recipe, .* got 'mxfp8:wgrad=fp16'"),
        (lambda: resolve("mxfp8:"), "expected a Recipe, .* got 'mxfp8:'"),
        (lambda: resolve(":wgrad=bf16"), "expected a Recipe, .* got ':wgrad=bf16'"),
        (lambda: fm.Quantize("fp7:wgrad=bf16"), "Quantize: forward: expected .* got 'fp7:wgrad=bf16'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_do_not_exist(make, message):
    with pytest.raises(fm.InputError, match=message):
        make()


@pytest.mark.parametrize("override", [(True, False, True), (False, True, False), None, (True, True)], ids=str)
def test_other_overrides_are_refused(override):
    with pytest.raises(fm.InputError, match=r"recipe Older: override_linear_precision: expected \(False, .* got "):
        resolve(older(override))


def test_a_recipe_without_the_field_has_no_such_name(monkeypatch):
    monkeypatch.setitem(RECIPES, "mine", Custom("mine"))
    assert named("mine") == Custom("mine")
    assert named("mine:wgrad=bf16") is None
    assert named("bf16") is NOTHING
