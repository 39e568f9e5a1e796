"""`Sequential` as a container: it behaves like `torch.nn.Sequential`."""

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
