"""The pattern language: the class body of a rule, and where its pattern stands on a chain."""

import itertools
import re
from typing import ClassVar, Optional, Union

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import toy

import fusedmoe as fm
from fusedmoe.fusion.language.matcher import Mismatch, match
from fusedmoe.fusion.language.rule import Declined, FusionRule, RuleError, Slot, require
from fusedmoe.ops import DSwiGLU, GeGLU, GroupedLinear, Linear, Scale, SquaredReLU, SwiGLU

# ---- class bodies -------------------------------------------------------------------------------------------------


def test_annotations_are_the_pattern_in_order():
    class Rule(FusionRule, name="toy.rule", direction="forward"):
        tile: ClassVar[int] = 128
        note: ClassVar = "anything"
        width = 3
        fc: GroupedLinear
        act: Union[SwiGLU, GeGLU]  # noqa: UP007
        scale: Optional[Scale]  # noqa: UP045
        both: SwiGLU | GeGLU | None

    assert (Rule.name, Rule.direction) == ("toy.rule", "forward")
    assert Rule.slots == (
        Slot("fc", (GroupedLinear,), optional=False),
        Slot("act", (SwiGLU, GeGLU), optional=False),
        Slot("scale", (Scale,), optional=True),
        Slot("both", (SwiGLU, GeGLU), optional=True),
    )
    assert [s.expected for s in Rule.slots[1:]] == ["SwiGLU | GeGLU", "Scale | None", "SwiGLU | GeGLU | None"]
    bindings = dict.fromkeys(("fc", "act", "scale", "both")) | {"act": SwiGLU()}
    assert {name: getattr(Rule(bindings), name) for name in bindings} == bindings


FUTURE = """
from __future__ import annotations
from typing import ClassVar
from fusedmoe import FusionRule, GeGLU, GroupedLinear, SwiGLU

class Rule(FusionRule, name="toy.future", direction="forward"):
    tile: ClassVar[int] = 128
    act: SwiGLU | GeGLU

def inside():
    class Local(GroupedLinear): ...
    class InFunction(FusionRule, name="toy.local", direction="forward"):
        fc: Local
    return InFunction, Local
"""


def test_string_annotations():
    namespace = {"__name__": __name__}
    exec(compile(FUTURE, "future.py", "exec", dont_inherit=True), namespace)
    assert [slot.expected for slot in namespace["Rule"].slots] == ["SwiGLU | GeGLU"]
    rule, local = namespace["inside"]()
    assert rule.slots[0].types == (local,)


@pytest.mark.parametrize(
    ("slots", "direction", "error"),
    [
        *[
            ({"act": annotation}, "forward", "slot 'act': expected Op classes, got")
            for annotation in (int, "int", fm.Sequential, SwiGLU | int, list[SwiGLU], DSwiGLU, SwiGLU())
        ],
        ({"act": SwiGLU}, "backward", "slot 'act': expected BackwardOp classes, got .*SwiGLU"),
        ({"act": "SwigGLU"}, "forward", "type is not known here: name 'SwigGLU'"),
        ({"act": SwiGLU | None, "scale": Scale | None}, "forward", "may match nothing"),
        ({}, "forward", "may match nothing"),
        ({"act": SwiGLU}, "sideways", "expected 'forward' or 'backward', got 'sideways'"),
        ({"derive": fm.ops.glue.DeriveOffsets, "fc": GroupedLinear}, "forward", "glue is matched alone.* got 2"),
    ],
    ids=str,
)
def test_a_wrong_pattern_is_refused(slots, direction, error):
    with pytest.raises(RuleError, match=f"rule 'toy.rule': .*{error}"):
        toy.rule("toy.rule", slots, direction=direction)


def test_a_rule_without_offer_or_bind_says_so():
    class Unfinished(FusionRule, name="toy.unfinished", direction="forward"):
        act: SwiGLU

    for rule, method in ((Unfinished, "offer"), (toy.rule("toy.unbound", {"act": SwiGLU}, ("input",)), "bind")):
        with fm.register(rule), pytest.raises(NotImplementedError, match=rf"'{rule.name}' defines no {method}\(\)"):
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


# ---- patterns on chains -------------------------------------------------------------------------------------------


def slot(name, *types, optional=False):
    return Slot(name, types, optional)


class Sub(SwiGLU):
    pass


fc, act, gelu, scale, relu, sub = Linear(4, 4), SwiGLU(), GeGLU(), Scale("probs"), SquaredReLU(), Sub()
OPS = {"fc": fc, "act": act, "gelu": gelu, "scale": scale, "sub": sub}
TYPES = [(Linear,), (SwiGLU,), (SwiGLU, GeGLU), (Scale,), (SwiGLU, Sub)]


def ways(pattern, ops):
    """Every choice of the slots that are there under which each has an op of exactly its types."""
    for there in itertools.product([True, False], repeat=len(pattern)):
        bound = [s for s, is_there in zip(pattern, there, strict=True) if is_there]
        given = ops[: len(bound)]
        complete = len(given) == len(bound) and all(s.optional for s in pattern if s not in bound)
        if complete and all(type(op) in s.types for s, op in zip(bound, given, strict=True)):
            named = dict(zip([s.name for s in bound], given, strict=True))
            yield {s.name: named.get(s.name) for s in pattern}


@given(
    kinds=st.lists(st.tuples(st.sampled_from(TYPES), st.booleans()), min_size=1, max_size=4),
    chain=st.lists(st.sampled_from(list(OPS)), max_size=5),
    start=st.integers(0, 2),
)
def test_it_stands_wherever_it_can_most_slots_first(kinds, chain, start):
    pattern = tuple(slot(f"s{i}", *types, optional=optional) for i, (types, optional) in enumerate(kinds))
    chain = [OPS[name] for name in chain]
    expected = [*ways(pattern, chain[start:])]
    found = match(pattern, chain, start)
    if not expected:
        assert isinstance(found, Mismatch)
        return
    assert len(found) == len(expected)
    assert all(m.bindings in expected for m in found)
    counts = [sum(op is not None for op in m.bindings.values()) for m in found]
    assert counts == sorted(counts, reverse=True)
    assert [m.end for m in found] == [start + count for count in counts]


FC, ACT, SCALE = slot("fc", Linear), slot("act", SwiGLU, GeGLU), slot("scale", Scale, optional=True)
LAST, BEFORE = slot("last", Linear), slot("before", Scale, optional=True)
MIDDLE = (FC, slot("a", Scale, optional=True), slot("b", Scale, optional=True), ACT, LAST)


@pytest.mark.parametrize(
    ("pattern", "chain", "matched", "stood", "text"),
    [
        ((FC, ACT), [relu], 0, 0, "'fc': expected Linear, got SquaredReLU"),
        ((FC, ACT), [fc, relu], 1, 1, "'act': expected SwiGLU | GeGLU, got SquaredReLU"),
        ((FC, ACT), [fc], 1, 1, "'act': expected SwiGLU | GeGLU, got the end of the chain"),
        ((FC, ACT), [fc, fc, act], 1, 1, "'act': expected SwiGLU | GeGLU, got Linear"),
        ((FC, ACT), [fc, sub], 1, 2, "'act': .* got Sub, a subclass of SwiGLU, which may compute something else"),
        ((BEFORE, FC, ACT), [relu], 0, 0, "'fc'"),
        ((BEFORE, FC, ACT), [scale, fc, relu], 2, 2, "'act'"),
        (MIDDLE, [fc, relu], 1, 1, "'act'"),
        (MIDDLE, [fc, scale, scale, relu], 3, 1, "'act'"),
        (MIDDLE, [fc, scale, scale, sub], 3, 4, "'act'"),
        (MIDDLE, [fc, scale, act, relu], 3, 3, "'last'"),
        ((slot("act", SwiGLU), FC), [sub], 0, 1, "'act'"),
        ((ACT, slot("a", Scale, optional=True), LAST), [act, scale, relu], 2, 1, "'last': expected Linear, got Squ"),
        # a and b are bound, or end is: the way that got farthest is that of the required slots
        ((SCALE, slot("b", SquaredReLU, optional=True), slot("end", Scale), FC), [scale, relu, act], 1, 1, "'fc'"),
    ],
)
def test_a_mismatch_is_about_the_ops_up_to_the_last_that_had_to_be_there(pattern, chain, matched, stood, text):
    """The op of an optional slot counts only if a later slot of the pattern matched, or almost matched."""
    missed = match(pattern, chain, 0)
    assert (missed.matched, missed.shared) == (matched, stood)
    assert re.match(f"slot {text}".replace("|", r"\|"), str(missed))
