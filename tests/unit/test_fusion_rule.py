"""The pattern language: what a rule's class body may say, and what it may not."""

from typing import ClassVar, Optional, Union

import pytest
import torch

import fusedmoe as fm
from fusedmoe.fusion.language.rule import Declined, FusionRule, RuleError, Slot, require
from fusedmoe.ops import Dgrad, DSwiGLU, GeGLU, GroupedLinear, Scale, SwiGLU


def test_annotations_are_the_pattern_in_order():
    class Rule(FusionRule, name="toy.rule", direction="forward"):
        fc: GroupedLinear
        act: SwiGLU | GeGLU
        scale: Scale | None

    assert (Rule.name, Rule.direction) == ("toy.rule", "forward")
    assert Rule.slots == (
        Slot("fc", (GroupedLinear,), optional=False),
        Slot("act", (SwiGLU, GeGLU), optional=False),
        Slot("scale", (Scale,), optional=True),
    )
    assert [slot.expected for slot in Rule.slots] == ["GroupedLinear", "SwiGLU | GeGLU", "Scale | None"]


def test_the_older_spellings_of_unions():
    class Rule(FusionRule, name="toy.rule", direction="forward"):
        act: Union[SwiGLU, GeGLU]  # noqa: UP007
        scale: Optional[Scale]  # noqa: UP045
        both: Union[SwiGLU, GeGLU, None]  # noqa: UP007

    assert [slot.expected for slot in Rule.slots] == ["SwiGLU | GeGLU", "Scale | None", "SwiGLU | GeGLU | None"]


def test_a_backward_rule_names_backward_ops():
    class Rule(FusionRule, name="toy.rule", direction="backward"):
        dgrad: Dgrad
        dact: DSwiGLU

    assert [slot.types for slot in Rule.slots] == [(Dgrad,), (DSwiGLU,)]


FUTURE = """
from __future__ import annotations
from typing import ClassVar
from fusedmoe import FusionRule, GeGLU, GroupedLinear, Scale, SwiGLU

class Rule(FusionRule, name="toy.future", direction="forward"):
    tile: ClassVar[int] = 128
    fc: GroupedLinear
    act: SwiGLU | GeGLU
    scale: Scale | None

def inside():
    class Local(GroupedLinear): ...
    class InFunction(FusionRule, name="toy.local", direction="forward"):
        fc: Local
    return InFunction, Local
"""


def test_string_annotations():
    namespace = {"__name__": __name__}
    exec(compile(FUTURE, "future.py", "exec", dont_inherit=True), namespace)
    assert [slot.expected for slot in namespace["Rule"].slots] == ["GroupedLinear", "SwiGLU | GeGLU", "Scale | None"]
    rule, local = namespace["inside"]()
    assert rule.slots[0].types == (local,)


def test_class_variables_are_no_slots():
    class Rule(FusionRule, name="toy.rule", direction="forward"):
        tile: ClassVar[int] = 128
        note: ClassVar = "anything"
        width = 3
        act: SwiGLU

    assert [slot.name for slot in Rule.slots] == ["act"]


@pytest.mark.parametrize("annotation", [int, "int", fm.Sequential, SwiGLU | int, list[SwiGLU], DSwiGLU, SwiGLU()])
def test_a_slot_of_no_op_is_refused(annotation):
    body = {"__annotations__": {"act": annotation}, "__module__": __name__}
    with pytest.raises(RuleError, match=r"rule 'toy.rule': slot 'act': expected Op classes, got"):
        type(FusionRule)("Rule", (FusionRule,), body, name="toy.rule", direction="forward")


def test_an_op_in_a_backward_rule_is_refused():
    with pytest.raises(RuleError, match=r"rule 'toy.rule': slot 'act': expected BackwardOp classes, got .*SwiGLU"):

        class Rule(FusionRule, name="toy.rule", direction="backward"):
            act: SwiGLU


def test_an_unknown_name_is_refused():
    with pytest.raises(RuleError, match=r"rule 'toy.rule': a slot's type is not known here: name 'SwigGLU'"):

        class Rule(FusionRule, name="toy.rule", direction="forward"):
            act: "SwigGLU"  # noqa: F821


def test_a_pattern_that_may_match_nothing_is_refused():
    with pytest.raises(RuleError, match=r"rule 'toy.rule': its pattern may match nothing"):

        class Rule(FusionRule, name="toy.rule", direction="forward"):
            act: SwiGLU | None
            scale: Scale | None

    with pytest.raises(RuleError, match=r"rule 'toy.empty': its pattern may match nothing"):

        class Empty(FusionRule, name="toy.empty", direction="forward"):
            pass


def test_an_unknown_direction_is_refused():
    with pytest.raises(RuleError, match="expected 'forward' or 'backward', got 'sideways'"):

        class Rule(FusionRule, name="toy.rule", direction="sideways"):
            act: SwiGLU


def test_a_name_and_a_direction_are_wanted():
    with pytest.raises(TypeError, match="name"):

        class Rule(FusionRule):
            act: SwiGLU


def test_bindings_are_attributes():
    class Rule(FusionRule, name="toy.rule", direction="forward"):
        act: SwiGLU
        scale: Scale | None

    act = SwiGLU()
    rule = Rule({"act": act, "scale": None})
    assert (rule.act, rule.scale) == (act, None)


def test_a_rule_without_offer_or_bind_says_so():
    class Unfinished(FusionRule, name="toy.unfinished", direction="forward"):
        act: SwiGLU

    class Unbound(Unfinished, name="toy.unbound", direction="forward"):
        def offer(self, ctx):
            return fm.Step(needs=("input",), gives=("output",))

    for rule, method in ((Unfinished, "offer"), (Unbound, "bind")):
        text = rf"rule '{rule.name}' defines no {method}\(\)"
        with fm.register(rule), pytest.raises(NotImplementedError, match=text):
            SwiGLU()(torch.ones(2, 2))


def test_require_formats_only_what_it_refuses():
    class Loud:
        def __str__(self):
            raise AssertionError("formatted")

    require(True, "%s", Loud())
    with pytest.raises(Declined, match=r"^width 7 is not a multiple of 8$"):
        require(7 % 8 == 0, "width %d is not a multiple of %d", 7, 8)
    with pytest.raises(Declined, match=r"^100% of nothing$"):
        require([], "100% of nothing")
