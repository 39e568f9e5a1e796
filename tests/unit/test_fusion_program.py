"""The functions that plans are written as: their text, their names, what a traceback shows of them."""

from collections import OrderedDict

import pytest
import torch
from kit import toy
from kit.toy import assert_same, dgrad_dglu, experts, gemm_glu, inputs, only_plan, outcome, rows

import fusedmoe as fm
from fusedmoe.call.partition import partition_for


def program(chain, position=0):
    (part,) = partition_for(chain).parts
    return list(part.chain.table.plans.values())[position].program


def test_the_text_of_a_plan():
    chain, x, named = experts(), rows(), inputs()
    with fm.register(gemm_glu(guard=lambda *_: None), dgrad_dglu()):
        plan = only_plan(chain, x, **named)
    assert (
        plan.forward_source
        == """\
def program(given, run0, run1, report1, fallback1, run2):
    _0_input, splits, _0_weight, _0_bias, _2_weight, _2_bias, = given
    given.clear()
    offsets = run0(splits, _0_input)
    del splits
    try:
        _2_input, _1_input = run1(_0_input, _0_weight, offsets, None)
    except Declined as reason:
        report1(reason)
        run1 = None
    if run1 is None:
        _2_input, _1_input = fallback1(_0_input, _0_weight, _0_bias, offsets)
    del _0_bias
    _2_output = run2(_2_input, _2_weight, _2_bias, offsets)
    del _2_bias, _2_input
    return (_2_output, ), (offsets, _2_weight, _1_input, _0_input, _0_weight, ),
"""
    )
    assert (
        plan.backward_source
        == """\
def program(given, run0, report0, fallback0, run1, run2, run3):
    offsets, _2_weight, _1_input, _0_input, _0_weight, grad_2_output, = given
    given.clear()
    try:
        grad_1_input, _2_input = run0(grad_2_output, _2_weight, offsets, _1_input)
    except Declined as reason:
        report0(reason)
        run0 = None
    if run0 is None:
        grad_1_input, _2_input = fallback0(grad_2_output, _2_weight, offsets, _1_input)
    del _2_weight, _1_input
    grad_2_weight = run1(grad_2_output, _2_input, offsets)
    del grad_2_output, _2_input
    grad_0_weight = run2(grad_1_input, _0_input, offsets)
    del _0_input
    grad_0_input = run3(grad_1_input, _0_weight, offsets)
    del offsets, _0_weight, grad_1_input
    return (grad_0_input, None, grad_0_weight, None, grad_2_weight, None, ),
"""
    )


@pytest.mark.parametrize(
    "labels",
    [
        ("lambda", "run0", "日本"),
        ("a b", "a-b", "a_b"),
        ('"); raise SystemExit; ("', "\n", "#"),
    ],
)
def test_any_label_will_do(labels):
    torch.manual_seed(0)
    plain = experts()
    named = fm.Sequential(OrderedDict(zip(labels, plain, strict=True)))
    x = rows()
    rules = [gemm_glu(guard=toy.refuse), dgrad_dglu()]
    with fm.register(*rules):
        expected = outcome(plain, x, **inputs())
        got = outcome(named, x, **inputs())
    assert_same({name: got[name] for name in ("x", "y")}, {name: expected[name] for name in ("x", "y")})
    assert len(got) == len(expected)


def test_layers_that_are_alike_share_a_function():
    first, second, scaled = experts(), experts(), experts(scale=True)
    for chain in (first, second):
        chain(rows(), **inputs())
    scaled(rows(), **inputs(scale=True))
    assert program(first).run is program(second).run
    assert program(first).run is not program(scaled).run
