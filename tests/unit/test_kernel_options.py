"""`sm_margin` and `schedule`: given, changed, checked, shown, part of the plan's key; whose hold where they nest."""

import copy
import logging
import pickle

import pytest
import torch
from kit.toy import E, H, I, bound, experts, inputs, only_plan, outcome, rows

import fusedmoe as fm
from fusedmoe import InputError
from fusedmoe.call.partition import partition_for
from fusedmoe.fusion.language.rule import FusionRule, Step
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.ops import GroupedLinear, Wgrad

BOTH = {"sm_margin": 16, "schedule": "static"}


def seeing(seen):
    """Rules, one a direction, that note the options with which they are built."""

    class Forward(FusionRule, name="toy.forward", direction="forward"):
        fc: GroupedLinear

        def offer(self, ctx):
            return Step(needs=("input", "fc.weight", "fc.bias", "offsets"), gives=("output",), zeroes_tail=True)

        def build(self, ctx, keep):
            seen.append(ctx.options)
            return bound(self.fc.compute)

    class Backward(FusionRule, name="toy.backward", direction="backward"):
        wgrad: Wgrad

        def offer(self, ctx):
            return Step(needs=("grad_output", "wgrad.input", "offsets"), gives=("wgrad.grad_weight",))

        def build(self, ctx, keep):
            seen.append(ctx.options)
            return bound(self.wgrad.compute)

    return Forward, Backward


def chain(**options):
    return fm.Sequential(*experts(), **options)


def test_defaults():
    made = chain()
    assert (made.sm_margin, made.schedule) == (0, "dynamic")
    assert made._options == DEFAULT


@pytest.mark.parametrize("how", ["given", "set"])
def test_rules_see_them_in_both_directions(how):
    seen = []
    made = chain(**BOTH) if how == "given" else chain()
    if how == "set":
        made.sm_margin, made.schedule = 16, "static"
    with fm.register(*seeing(seen)):
        outcome(made, rows(), **inputs())
    assert seen == [KernelOptions(16, "static")] * 4


def test_an_op_alone_has_the_defaults():
    seen = []
    with fm.register(*seeing(seen)):
        experts()[0](rows(), **inputs())
    assert set(seen) == {DEFAULT}


def test_a_change_is_a_new_plan_and_back_the_old_one():
    made, x, named = chain(), rows(), inputs()
    (part,) = partition_for(made).parts
    for margin, plans in [(0, 1), (8, 2), (8, 2), (0, 2), (4, 3)]:
        made.sm_margin = margin
        made(x, **named)
        assert len(part.chain.table.plans) == plans
    made.schedule = "static"
    made(x, **named)
    assert len(part.chain.table.plans) == 4


def test_they_are_shown_if_not_the_default():
    made, x, named = chain(), rows(), inputs()
    assert "sm_margin" not in f"{made.explain(x, **named)}{made}"
    assert "schedule" not in f"{made.explain(x, **named)}{made}"
    made.sm_margin = 16
    assert (
        str(made.explain(x, **named)).splitlines()[1] == "planned for cpu, float64, recipe bf16, sm_margin 16, 9 rows"
    )
    assert "sm_margin=16" in repr(made)
    made.schedule = "static"
    assert ", sm_margin 16, schedule static, 9 rows\n" in str(made.explain(x, **named))
    assert "sm_margin=16, schedule='static'" in repr(made)
    assert only_plan(made, x, **named).options == KernelOptions(16, "static")


@pytest.mark.parametrize("margin", [-1, 1.0, "8", None, True])
def test_a_margin_that_is_none(margin):
    text = f"sm_margin: expected a number of SMs, 0 or more, got {margin!r}"
    with pytest.raises(InputError, match=f"^Sequential: {text}$"):
        chain(sm_margin=margin)
    with pytest.raises(InputError, match=f"^MoE: {text}$"):
        fm.MoE(H, I, E, 1, sm_margin=margin)
    made = chain(sm_margin=2)
    with pytest.raises(InputError, match=f"^Sequential: {text}$"):
        made.sm_margin = margin
    assert made.sm_margin == 2


@pytest.mark.parametrize("schedule", ["Static", "", None, 0])
def test_a_schedule_that_is_none(schedule):
    text = f"schedule: expected 'static' or 'dynamic', got {schedule!r}"
    with pytest.raises(InputError, match=f"^Sequential: {text}$"):
        chain(schedule=schedule)
    with pytest.raises(InputError, match=f"^MoE: {text}$"):
        fm.MoE(H, I, E, 1, schedule=schedule)
    made = chain()
    with pytest.raises(InputError, match=f"^Sequential: {text}$"):
        made.schedule = schedule


def test_they_are_keyword_only():
    with pytest.raises(TypeError):
        fm.Sequential(fm.SwiGLU(), 8)


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m[:2], lambda m: m[1:]],
    ids=["copy", "deepcopy", "pickle", "slice", "tail"],
)
def test_copies_and_slices_keep_them(copied):
    twin = copied(chain(**BOTH))
    assert (twin.sm_margin, twin.schedule) == (16, "static")
    twin.sm_margin = 1
    assert chain(**BOTH).sm_margin == 16


def test_they_are_not_in_the_state_dict():
    assert chain(**BOTH).state_dict().keys() == chain().state_dict().keys()


def test_one_made_without_its_constructor_has_the_defaults():
    made = chain(**BOTH)
    del made.__dict__["_options"]  # as from a pickle of before there were options
    assert (made.sm_margin, made.schedule) == (0, "dynamic")
    made(rows(), **inputs())


def test_the_outermost_decides(caplog):
    seen = []
    inner = fm.Sequential(*list(experts())[1:], sm_margin=8)
    outer = fm.Sequential(experts()[0], inner, sm_margin=2)
    with fm.register(*seeing(seen)):
        outcome(outer, rows(), **inputs())
        outcome(outer, rows(), **inputs())
        assert set(seen) == {KernelOptions(2)}
        seen.clear()
        inner(torch.randn(9, 2 * I, dtype=torch.float64), **inputs())
        assert seen == [KernelOptions(8)] * 2  # forward, backward
    (said,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert said.getMessage() == (
        "nested Sequential '1': sm_margin 8 applies only when it is called by itself; set it on the outer Sequential"
    )


@pytest.mark.parametrize("margin", [0, 2])
def test_a_nested_one_that_says_nothing_else_is_no_news(caplog, margin):
    outer = fm.Sequential(experts()[0], fm.Sequential(*list(experts())[1:], sm_margin=margin), sm_margin=2)
    outer(rows(), **inputs())
    assert not caplog.records


def test_one_that_is_called_as_a_module_has_its_own():
    seen = []
    inner = fm.Sequential(*list(experts())[1:], sm_margin=8)
    inner.register_forward_hook(lambda *_: None)
    outer = fm.Sequential(experts()[0], inner, sm_margin=2)
    with fm.register(*seeing(seen)):
        outer(rows(), **inputs())
    assert set(seen) == {KernelOptions(2), KernelOptions(8)}


def test_moe_passes_them_on():
    layer = fm.MoE(H, I, E, 1, shared_intermediate=I, **BOTH)
    for options in [(16, "static"), (1, "static"), (1, "dynamic")]:
        layer.sm_margin, layer.schedule = options
        assert (layer.sm_margin, layer.schedule) == options
        assert layer.experts._options == layer.shared._options == KernelOptions(*options)
    x = torch.randn(5, H)
    assert "sm_margin 1" in str(layer.explain(x))
    assert torch.equal(layer(x), layer(x))


# Dynamo's own looking around
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_calls_have_them():
    seen = []
    made = chain(**BOTH)
    with fm.register(*seeing(seen)):
        torch.compile(made, backend="eager")(rows(), **inputs())
    assert set(seen) == {KernelOptions(16, "static")}
