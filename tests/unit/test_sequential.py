"""`Sequential` as a container: it behaves like `torch.nn.Sequential`."""

from collections import OrderedDict

import pytest
import torch
from kit.toy import E, H, I, assert_same, experts, inputs, outcome, rows
from torch import nn

import fusedmoe as fm


@pytest.fixture
def chain():
    return experts()


def test_it_is_a_torch_sequential(chain):
    assert isinstance(chain, nn.Sequential)
    assert [type(op) for op in chain] == [fm.GroupedLinear, fm.SwiGLU, fm.GroupedLinear]
    assert (len(chain), chain[-1]) == (3, chain[2])
    for outside in (3, -4):
        with pytest.raises(IndexError):
            chain[outside]
    first = chain[:2]
    assert type(first) is fm.Sequential
    assert list(first) == [chain[0], chain[1]]
    x, named = rows(), inputs()
    torch.testing.assert_close(chain[2:](first(x, **named), **named), chain(x, **named))
    torch.testing.assert_close(chain[2](chain[1](chain[0](x, **named)), **named), chain(x, **named))
    assert "(0): GroupedLinear(num_groups=3, in_features=8, out_features=8)" in repr(chain)


def test_changes_are_seen_by_the_next_call(chain):
    x, named = rows(), inputs()
    y = chain(x, **named)
    chain[1] = fm.GeGLU()
    assert not torch.equal(chain(x, **named), y)
    chain[1] = fm.SwiGLU()
    assert torch.equal(chain(x, **named), y)
    last = chain.pop(2)
    assert chain(x, **named).shape == (9, I)
    del chain[-1]
    assert chain(x, **named).shape == (9, 2 * I)
    chain.append(last)
    chain.insert(1, fm.SwiGLU())
    assert torch.equal(chain(x, **named), y)
    chain.extend([fm.SwiGLU(), fm.SquaredReLU()])
    assert chain(x, **named).shape == (9, H // 2)
    assert list(chain.state_dict()) == ["0.weight", "2.weight"]


def test_sums_and_multiples_are_sequentials():
    first = fm.Sequential(fm.GroupedLinear(E, H, H, dtype=torch.float64), sm_margin=8)
    second, other = fm.Sequential(fm.SquaredReLU()), nn.Sequential(fm.SquaredReLU())
    x = rows()
    for made in (first + second, first + other, other + first, 2 * first, first * 2):
        assert type(made) is fm.Sequential
        assert made.sm_margin == 8
        want = x
        for op in made:
            want = op(want, **(inputs() if op is first[0] else {}))
        torch.testing.assert_close(made(x, **inputs()), want)
    assert len(first * 2) == 2
    with pytest.raises(TypeError):
        first + 2
    with pytest.raises(fm.InputError, match="Sequential: times: expected a number of repetitions, 1 or more, got 0"):
        first * 0


def test_from_an_ordered_dict():
    up, act, down = experts()
    chain = fm.Sequential(OrderedDict(up=up, act=act, down=down))
    assert chain.up is up
    assert list(chain.state_dict()) == ["up.weight", "down.weight"]
    plan = chain.explain(rows(), **inputs()).plans[0]
    assert [s.ops for s in plan.steps[:3]] == [("up.GroupedLinear",), ("act.SwiGLU",), ("down.GroupedLinear",)]


def test_without_ops_it_is_the_identity():
    x = rows()
    assert fm.Sequential()(x) is x
    with pytest.raises(fm.InputError, match="no op takes the runtime input 'splits'"):
        fm.Sequential()(x, **inputs())


def test_a_nested_sequential_counts_as_its_ops():
    up, act, down = experts()
    flat, nested = fm.Sequential(up, act, down), fm.Sequential(up, fm.Sequential(act, down))
    x, named = rows(), inputs()
    assert list(nested.state_dict()) == ["0.weight", "1.1.weight"]
    (plan,) = nested.explain(x, **named).plans
    assert [s.ops for s in plan.steps if s.direction == "forward"] == [
        ("0.GroupedLinear",), ("1.0.SwiGLU",), ("1.1.GroupedLinear",),
    ]  # fmt: skip
    renamed = {"1.1.weight": "2.weight"}
    assert_same({renamed.get(k, k): v for k, v in outcome(nested, x, **named).items()}, outcome(flat, x, **named))


def test_the_same_op_twice_gets_both_gradients():
    square = fm.GroupedLinear(E, H, H, dtype=torch.float64)
    chain = fm.Sequential(square, fm.SquaredReLU(), square)
    x, named = rows(), inputs()
    got = outcome(chain, x, **named)

    twin = fm.GroupedLinear(E, H, H, dtype=torch.float64)
    twin.load_state_dict(square.state_dict())
    expected = outcome(fm.Sequential(square, fm.SquaredReLU(), twin), x, **named)
    expected["0.weight"] = expected["0.weight"] + expected.pop("2.weight")
    assert_same(got, expected)
    assert list(chain.state_dict()) == ["0.weight", "2.weight"]
