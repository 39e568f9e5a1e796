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


def test_is_a_torch_sequential(chain):
    assert isinstance(chain, nn.Sequential)


def test_index(chain):
    assert isinstance(chain[0], fm.GroupedLinear)
    assert isinstance(chain[1], fm.SwiGLU)
    assert chain[-1] is chain[2]
    with pytest.raises(IndexError):
        chain[3]
    with pytest.raises(IndexError):
        chain[-4]


def test_slice_is_a_sequential_of_the_same_ops(chain):
    first = chain[:2]
    assert type(first) is fm.Sequential
    assert list(first) == [chain[0], chain[1]]
    x = rows()
    torch.testing.assert_close(chain[2:](first(x, **inputs()), **inputs()), chain(x, **inputs()))


def test_iterate_and_len(chain):
    assert len(chain) == 3
    assert [type(op) for op in chain] == [fm.GroupedLinear, fm.SwiGLU, fm.GroupedLinear]
    assert list(chain) == [chain[i] for i in range(3)]


def test_append_insert_extend_are_seen_by_the_next_call():
    x = rows()
    chain = fm.Sequential(fm.GroupedLinear(E, H, 2 * I, dtype=torch.float64))
    assert chain(x, **inputs()).shape == (9, 2 * I)
    chain.append(fm.GroupedLinear(E, I, H, dtype=torch.float64))
    chain.insert(1, fm.SwiGLU())
    assert chain(x, **inputs()).shape == (9, H)
    chain.extend([fm.SwiGLU(), fm.SquaredReLU()])
    assert chain(x, **inputs()).shape == (9, H // 2)
    assert list(chain.state_dict()) == ["0.weight", "2.weight"]


def test_delete_and_replace_are_seen_by_the_next_call(chain):
    x = rows()
    y = chain(x, **inputs())
    chain[1] = fm.GeGLU()
    assert not torch.equal(chain(x, **inputs()), y)
    chain[1] = fm.SwiGLU()
    assert torch.equal(chain(x, **inputs()), y)
    del chain[2]
    assert chain(x, **inputs()).shape == (9, I)
    del chain[-1]
    assert len(chain) == 1
    assert chain(x, **inputs()).shape == (9, 2 * I)


def test_pop_and_concatenate(chain):
    last = chain.pop(2)
    joined = chain + fm.Sequential(last)
    assert len(joined) == 3
    assert len(chain) == 2


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


def test_repr_shows_the_ops(chain):
    text = repr(chain)
    assert text.startswith("Sequential(")
    assert "(0): GroupedLinear(num_groups=3, in_features=8, out_features=8)" in text


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


def test_ops_and_sequential_agree_with_a_call_op_by_op(chain):
    x, named = rows(), inputs()
    h = chain[1](chain[0](x, **named))
    torch.testing.assert_close(chain(x, **named), chain[2](h, **named))


def test_runtime_inputs_are_listed_in_order_of_first_use():
    assert experts(scale=True).runtime_inputs == ("splits", "probs")
    assert fm.Sequential(fm.Scale("a"), fm.SwiGLU(), fm.Scale("b")).runtime_inputs == ("a", "b")
