"""``wgrad="bf16"`` in plans: the operands of weight gradients, the values kept, and the rules that match them."""

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.saved import check_bytes
from kit.sm90_machine import called
from kit.toy import only_plan, outcome

import fusedmoe as fm
from fusedmoe.numerics.recipes import RECIPES

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
