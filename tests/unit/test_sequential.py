"""`Sequential` as a container that behaves like `torch.nn.Sequential`; foreign modules in it, which split the chain;
and hooks of inner ops, replaced and overridden forwards, which run.
"""

import functools
import re

import pytest
import torch
from kit.toy import E, H, I, assert_same, experts, gemm, inputs, outcome, rows, rules_used
from torch import nn
from torch.nn.modules import module as torch_module

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


# ---- foreign modules ------------------------------------------------------------------------------------------------


def routing(tokens=6):
    return {
        "expert_index": torch.tensor([[0, 2], [2, E], [2, 0], [0, 0], [-1, 2], [2, 0]])[:tokens],
        "expert_weight": torch.rand(tokens, 2, dtype=torch.float64, requires_grad=True),
    }


def tokens(count=6):
    return torch.randn(count, H, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("where", [1, 4])
def test_what_dispatch_provides_crosses_a_split_with_its_gradients(where):
    """Router weights reach Combine, or Scale, on the other side of a foreign module; their gradients come back."""
    modules = [fm.Dispatch(), *experts(), fm.Combine()]
    whole = fm.Sequential(*modules)
    split = fm.Sequential(*modules[:where], nn.Identity(), *modules[where:])
    x, named = tokens(), routing()
    expected, got = outcome(whole, x, **named), outcome(split, x, **named)
    assert {"x", "expert_weight"} < expected.keys()
    renamed = {f"{i + (i >= where)}.weight": f"{i}.weight" for i in range(5)}
    assert_same({renamed.get(k, k): v for k, v in got.items()}, expected)
    assert len(split.explain(x, **named).plans) == 2
    assert split.runtime_inputs == whole.runtime_inputs == ("expert_index", "expert_weight")


class Returning(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, x):
        return self.give(x)


dynamos_own = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")


@dynamos_own
@pytest.mark.parametrize(
    ("module", "named"),
    [
        (nn.GRU(4, 4), "GRU: output: expected a tensor, the rows for 2.{}, got tuple"),
        (Returning(lambda x: None), "Returning: output: expected a tensor, the rows for 2.{}, got NoneType"),
        (Returning(lambda x: [x]), "Returning: output: expected a tensor, the rows for 2.{}, got list"),
    ],
    ids=["tuple", "None", "list"],
)
@pytest.mark.parametrize(("grouped", "backend"), [(False, "eager"), (True, None)])
def test_a_module_that_returns_no_tensor_to_an_op_is_named(module, named, grouped, backend):
    """The op failed with an AttributeError of the tuple."""
    make = (lambda: fm.GroupedLinear(2, 4, 4)) if grouped else (lambda: fm.Linear(4, 4))
    given = {"splits": torch.tensor([1, 2])} if grouped else {}
    chain, x = fm.Sequential(make(), module, make()), torch.randn(3, 4)
    call = chain if backend is None else torch.compile(chain, backend=backend)
    with pytest.raises(fm.InputError, match=re.escape("Sequential: 1." + named.format(type(chain[2]).__name__))):
        call(x, **given)


@dynamos_own
def test_compiled_after_another_with_a_module_that_dynamo_does_not_trace():
    """The graph up to there was taken for the next one too: an op had no attribute '_description'."""
    x = torch.randn(3, 4)
    for chain in (fm.Sequential(fm.Linear(4, 4), nn.GRU(4, 4)), fm.Sequential(fm.Linear(4, 4), nn.Tanh())):
        torch.testing.assert_close(torch.compile(chain, backend="eager")(x), chain(x))


# ---- hooks ----------------------------------------------------------------------------------------------------------


TITLE = "module 1: SwiGLU: called as a module because of its hooks"


def titles(chain, x, **named):
    return [title for title, _ in chain.explain(x, **named).parts]


@pytest.fixture
def setup():
    chain, x, named = experts(), rows(), inputs()
    return chain, x, named, outcome(chain, x, **named)


def test_forward_hooks_run_and_may_change_the_output(setup):
    chain, x, named, before = setup
    seen = []
    handle = chain[1].register_forward_hook(lambda _m, args, out: seen.append((args[0].shape, out.shape)))
    assert_same(outcome(chain, x, **named), before)
    assert seen == [((9, 8), (9, 4))]
    assert titles(chain, x, **named) == ["chain 0", TITLE, "chain 2"]
    handle.remove()
    assert titles(chain, x, **named) == ["chain 0 to 2"]
    with chain[1].register_forward_hook(lambda _m, _args, out: 2 * out):
        torch.testing.assert_close(outcome(chain, x, **named)["y"], 2 * before["y"])


def test_forward_pre_hooks_run_with_keywords(setup):
    chain, x, named, before = setup
    seen = []
    chain[2].register_forward_pre_hook(lambda _m, _args, kwargs: seen.append(set(kwargs)), with_kwargs=True)
    chain.register_forward_hook(lambda *_: seen.append("the Sequential's own splits nothing"))
    with fm.register(gemm()):
        assert_same(outcome(chain, x, **named), before)
        first, last = chain.explain(x, **named).parts
    assert seen[0] == {"splits"}
    assert len(seen) == 2
    assert (first[0], rules_used(first[1])) == ("chain 0 to 1", ["toy.gemm"])
    assert last[0] == "module 2: GroupedLinear: called as a module because of its hooks"


def test_full_backward_hooks_run(setup):
    chain, x, named, before = setup
    seen = []
    chain[1].register_full_backward_hook(lambda _m, grad_in, grad_out: seen.append((grad_in[0], grad_out[0])))
    chain[2].register_full_backward_pre_hook(lambda _m, grad_out: seen.append(grad_out[0].shape))
    assert_same(outcome(chain, x, **named), before)
    assert seen[0] == (9, 8)
    assert [tuple(g.shape) for g in seen[1]] == [(9, 8), (9, 4)]


def test_a_replaced_forward_runs(setup):
    """As accelerate does it: the instance's forward wraps the class's."""
    chain, x, named, before = setup
    calls = []
    old = chain[0].forward

    def forward(module, *args, **kwargs):
        calls.append(set(kwargs))
        return old(*args, **kwargs)

    chain[0].forward = functools.update_wrapper(functools.partial(forward, chain[0]), old)
    assert_same(outcome(chain, x, **named), before)
    assert calls == [{"splits"}]
    assert titles(chain, x, **named)[0] == "module 0: GroupedLinear: called as a module because of its hooks"


class Negated(fm.SwiGLU):
    def forward(self, x, /, **inputs):
        return -super().forward(x, **inputs)


def test_a_subclass_that_overrides_forward_runs_it(setup):
    chain, x, named, before = setup
    chain[1] = Negated()
    got = outcome(chain, x, **named)
    torch.testing.assert_close(got["y"], -before["y"])
    torch.testing.assert_close(got["x"], -before["x"])
    assert titles(chain, x, **named)[1] == "module 1: Negated: called as a module because of its hooks"


def test_global_hooks_run_for_every_op(setup):
    chain, x, named, before = setup
    seen = []
    with torch_module.register_module_forward_hook(lambda m, _args, _out: seen.append(type(m))):
        assert_same(outcome(chain, x, **named), before)
        assert seen == [fm.GroupedLinear, fm.SwiGLU, fm.GroupedLinear, fm.Sequential]
    assert titles(chain, x, **named) == ["chain 0 to 2"]
