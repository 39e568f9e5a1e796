"""`sm_margin` and `schedule`: given, changed, checked, shown, part of the plan's key; whose hold where they nest."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from kit.toy import E, H, I, bound, experts, inputs, outcome, rows

import fusedmoe as fm
from fusedmoe.call.partition import partition_for
from fusedmoe.fusion.language.rule import FusionRule, Step
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.ops import GroupedLinear, Wgrad

BOTH = {"sm_margin": 16, "schedule": "static"}


def seeing(seen, reads=True):
    """Rules, one a direction, that note the options with which they are built; ``reads``: their `reads_tail`."""

    class Forward(FusionRule, name="toy.forward", direction="forward"):
        fc: GroupedLinear
        reads_tail = reads

        def offer(self, ctx):
            return Step(needs=("input", "fc.weight", "fc.bias", "offsets"), gives=("output",), zeroes_tail=True)

        def build(self, ctx, keep):
            seen.append(ctx.options)
            return bound(self.fc.compute)

    class Backward(FusionRule, name="toy.backward", direction="backward"):
        wgrad: Wgrad
        reads_tail = reads

        def offer(self, ctx):
            return Step(needs=("grad_output", "wgrad.input", "offsets"), gives=("wgrad.grad_weight",))

        def build(self, ctx, keep):
            seen.append(ctx.options)
            return bound(self.wgrad.compute)

    return Forward, Backward


def seen_by(call, *arguments):
    """The options with which rules are built in a call and its backward pass, except for `zero_tail`."""
    seen = []
    with fm.register(*seeing(seen)):
        outcome(call, *arguments, **inputs())
    return [replace(options, zero_tail=True) for options in seen]


def chain(**options):
    return fm.Sequential(*experts(), **options)


def test_rules_see_them_in_both_directions():
    made = chain()
    assert (made.sm_margin, made.schedule, made._options) == (0, "dynamic", DEFAULT)
    made.sm_margin, made.schedule = 16, "static"
    for each in (made, chain(**BOTH)):
        assert seen_by(each, rows()) == [KernelOptions(16, "static")] * 4
    assert {*seen_by(experts()[0], rows())} == {DEFAULT}, "an op alone"
    assert chain(**BOTH).state_dict().keys() == chain().state_dict().keys()
    with pytest.raises(TypeError):
        fm.Sequential(fm.SwiGLU(), 8)


@pytest.mark.parametrize("reads", [True, False])
def test_a_tail_is_zero_where_a_rule_may_read_it(reads):
    """Two layers, whose second one gives the result, and the gradients of their weights."""
    seen = []
    with fm.register(*seeing(seen, reads)):
        outcome(chain(), rows(), **inputs())
    assert [options.zero_tail for options in seen] == [reads, True, False, False]


def test_a_change_is_a_new_plan_and_back_the_old_one():
    made, x, named = chain(), rows(), inputs()
    (part,) = partition_for(made).parts
    for margin, schedule, plans in [
        (0, "dynamic", 1), (8, "dynamic", 2), (8, "dynamic", 2), (0, "dynamic", 2), (4, "dynamic", 3), (4, "static", 4),
    ]:  # fmt: skip
        made.sm_margin, made.schedule = margin, schedule
        made(x, **named)
        assert len(part.chain.table.plans) == plans


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: m[:2]], ids=["copy", "deepcopy", "slice"])
def test_copies_and_slices_keep_them(copied):
    made = chain(**BOTH)
    twin = copied(made)
    assert (twin.sm_margin, twin.schedule) == (16, "static")
    twin.sm_margin = 1
    assert made.sm_margin == 16
    del made.__dict__["_options"]  # as from a pickle of before there were options
    assert (made.sm_margin, made.schedule) == (0, "dynamic")


def test_the_outermost_decides(caplog):
    nested = fm.Sequential(*list(experts())[1:], sm_margin=8)
    outer = fm.Sequential(experts()[0], nested, sm_margin=2)
    assert {*seen_by(outer, rows()), *seen_by(outer, rows())} == {KernelOptions(2)}
    assert seen_by(nested, torch.randn(9, 2 * I, dtype=torch.float64)) == [KernelOptions(8)] * 2  # forward, backward
    (said,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert said.getMessage() == (
        "nested Sequential '1': sm_margin 8 applies only when it is called by itself; set it on the outer Sequential"
    )
    nested.register_forward_hook(lambda *_: None)  # one that is called as a module has its own
    assert {*seen_by(outer, rows())} == {KernelOptions(2), KernelOptions(8)}


def test_moe_passes_them_on():
    layer = fm.MoE(H, I, E, 1, shared_intermediate=I, **BOTH)
    for options in [(16, "static"), (1, "static"), (1, "dynamic")]:
        layer.sm_margin, layer.schedule = options
        assert (layer.sm_margin, layer.schedule) == options
        assert layer.experts._options == layer.shared._options == KernelOptions(*options)
    assert "sm_margin 1" in str(layer.explain(torch.randn(5, H)))
