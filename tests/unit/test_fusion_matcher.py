"""Where a pattern stands on a chain, in how many ways, and how far it got where it does not."""

import pytest

from fusedmoe.fusion.language.matcher import Match, Mismatch, match
from fusedmoe.fusion.language.rule import Slot
from fusedmoe.ops import GeGLU, Linear, Scale, SquaredReLU, SwiGLU


def slot(name, *types, optional=False):
    return Slot(name, types, optional)


FC, ACT, SCALE = slot("fc", Linear), slot("act", SwiGLU, GeGLU), slot("scale", Scale, optional=True)
PATTERN = (FC, ACT, SCALE)
fc, act, gelu, scale, relu = Linear(4, 4), SwiGLU(), GeGLU(), Scale("probs"), SquaredReLU()


class Sub(SwiGLU):
    pass


def test_every_way_most_slots_first():
    assert match(PATTERN, [fc, act, scale], 0) == [
        Match({"fc": fc, "act": act, "scale": scale}, 3),
        Match({"fc": fc, "act": act, "scale": None}, 2),
    ]


def test_an_alternative_and_an_absent_slot():
    assert match(PATTERN, [fc, gelu, fc], 0) == [Match({"fc": fc, "act": gelu, "scale": None}, 2)]


def test_it_matches_at_the_position_asked_for_only():
    chain = [relu, fc, act]
    assert isinstance(match(PATTERN, chain, 0), Mismatch)
    assert match(PATTERN, chain, 1) == [Match({"fc": fc, "act": act, "scale": None}, 3)]


def test_an_optional_slot_in_front_and_in_the_middle():
    pattern = (slot("before", Scale, optional=True), FC, slot("between", Scale, optional=True), ACT)
    assert match(pattern, [fc, act], 0) == [Match({"before": None, "fc": fc, "between": None, "act": act}, 2)]
    assert match(pattern, [scale, fc, scale, act], 0)[0].end == 4


def test_two_optional_slots_of_the_same_type():
    pattern = (ACT, slot("a", Scale, optional=True), slot("b", Scale, optional=True))
    found = match(pattern, [act, scale, scale], 0)
    assert [m.end for m in found] == [3, 2, 2, 1]
    assert found[0].bindings == {"act": act, "a": scale, "b": scale}


@pytest.mark.parametrize(
    ("chain", "matched", "text"),
    [
        ([relu], 0, "slot 'fc': expected Linear, got SquaredReLU"),
        ([fc, relu], 1, "slot 'act': expected SwiGLU | GeGLU, got SquaredReLU"),
        ([fc], 1, "slot 'act': expected SwiGLU | GeGLU, got the end of the chain"),
        ([fc, fc, act], 1, "slot 'act': expected SwiGLU | GeGLU, got Linear"),
        (
            [fc, Sub()],
            1,
            "slot 'act': expected SwiGLU | GeGLU, got Sub, a subclass of SwiGLU, which may compute something else",
        ),
    ],
    ids=["first slot", "second slot", "end", "repeated", "subclass"],
)
def test_a_mismatch_says_how_far_it_got(chain, matched, text):
    missed = match(PATTERN, chain, 0)
    assert isinstance(missed, Mismatch)
    assert (missed.matched, str(missed)) == (matched, text)


def test_the_farthest_of_several_ways_is_told():
    pattern = (ACT, slot("a", Scale, optional=True), slot("end", Linear))
    missed = match(pattern, [act, scale, relu], 0)
    assert (missed.matched, str(missed)) == (2, "slot 'end': expected Linear, got SquaredReLU")


LAST = slot("last", Linear)
LEADING = (slot("before", Scale, optional=True), FC, ACT)
MIDDLE = (FC, slot("a", Scale, optional=True), slot("b", Scale, optional=True), ACT, LAST)


@pytest.mark.parametrize(
    ("pattern", "chain", "matched", "stood"),
    [
        (LEADING, [relu], 0, 0),
        (LEADING, [scale, relu], 1, 0),
        (LEADING, [scale, fc, relu], 2, 2),
        (LEADING, [scale, fc, Sub()], 2, 3),
        (MIDDLE, [fc, relu], 1, 1),
        (MIDDLE, [fc, scale, scale, relu], 3, 1),
        (MIDDLE, [fc, scale, scale], 3, 1),
        (MIDDLE, [fc, scale, scale, Sub()], 3, 4),
        (MIDDLE, [fc, scale, act, relu], 3, 3),
        ((slot("act", SwiGLU), FC), [Sub()], 0, 1),
    ],
)  # fmt: skip
def test_a_mismatch_is_about_the_ops_up_to_the_last_that_had_to_be_there(pattern, chain, matched, stood):
    """The op of an optional slot counts only if a later slot of the pattern matched, or almost matched."""
    missed = match(pattern, chain, 0)
    assert (missed.matched, missed.shared) == (matched, stood)


def test_the_way_that_got_farthest_is_that_of_the_required_slots():
    pattern = (slot("a", Scale, optional=True), slot("b", SquaredReLU, optional=True), slot("end", Scale), FC)
    missed = match(pattern, [scale, relu, act], 0)  # a and b are bound, or end is
    assert (missed.shared, str(missed)) == (1, "slot 'fc': expected Linear, got SquaredReLU")


def test_a_subclass_that_is_named_matches():
    sub = Sub()
    assert match((slot("act", SwiGLU, Sub),), [sub], 0) == [Match({"act": sub}, 1)]
    # and its base is not a match for it
    assert isinstance(match((slot("act", Sub),), [act], 0), Mismatch)


def test_at_the_end_of_the_chain():
    missed = match(PATTERN, [fc], 1)
    assert str(missed) == "slot 'fc': expected Linear, got the end of the chain"
