"""Module hooks of inner ops, replaced and overridden forwards: they run, the results stay, and explain() says so."""

import functools

import pytest
import torch
from kit.toy import assert_same, experts, gemm, inputs, outcome, rows, rules_used
from torch.nn.modules import module as torch_module

import fusedmoe as fm

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
