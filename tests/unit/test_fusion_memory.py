"""What a call holds on to: values are released after their last use, and without a backward pass nothing is kept."""

import gc
import weakref

import pytest
import torch
from kit import toy
from kit.toy import dgrad_dglu, experts, gemm_glu, inputs, only_plan, rows

import fusedmoe as fm
from fusedmoe.ops import BackwardOp, Op


class Watch(Op):
    """y = x + 1; notes what is alive of what other watches saw when it runs."""

    def __init__(self, log):
        super().__init__()
        self._log = log

    def compute(self, x):
        self._log.append(([ref() is not None for ref in self._log.refs], "forward"))
        y = x + 1
        self._log.refs.append(weakref.ref(y))
        return y

    def backward_ops(self):
        return (DWatch(self),)


class DWatch(BackwardOp):
    needs = ("grad_output",)

    def compute(self, grad_output):
        log = self.op._log
        log.append(([ref() is not None for ref in log.refs], "backward"))
        grad = grad_output * 1
        log.refs.append(weakref.ref(grad))
        return grad


class Log(list):
    def __init__(self):
        super().__init__()
        self.refs = []


def watched(count):
    log = Log()
    return fm.Sequential(*(Watch(log) for _ in range(count))), log


def test_intermediate_values_are_released_after_their_last_use():
    chain, log = watched(4)
    y = chain(rows(requires_grad=False))
    # when the third runs, the first's result is gone; the second's is its input
    assert [alive for alive, _ in log] == [[], [True], [False, True], [False, False, True]]
    assert [ref() is not None for ref in log.refs] == [False, False, False, True]
    assert y is log.refs[-1]()


def test_nothing_is_kept_without_a_backward_pass():
    chain, x, named = experts(), rows(requires_grad=False), inputs()
    with torch.no_grad():
        assert chain(x, **named).grad_fn is None
    chain.requires_grad_(False)
    plan = only_plan(chain, x, **named)
    assert (plan.kept, plan.kept_bytes, chain(x, **named).grad_fn) == ((), 0, None)
    assert set(only_plan(chain, rows(), **named).kept) == {"1.input", "offsets"}  # of frozen weights, no rows


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("make", [experts, lambda: fm.MoE(toy.H, 8, 4, 2, dtype=torch.float64)], ids=["chain", "MoE"])
def test_a_deleted_module_is_freed_at_once(make, fused):
    """Its plans form no reference cycle with it: the weights would stay in memory until Python looks for cycles."""
    module, x = make(), rows()
    named = inputs() if isinstance(module, fm.Sequential) else {}
    refs = [weakref.ref(p) for p in module.parameters()]
    gc.collect()
    gc.disable()
    try:
        with fm.register(*([gemm_glu(), dgrad_dglu()] if fused else [])):
            module.explain(x, **named)
            module(x, **named).sum().backward()
            with torch.no_grad():
                module(x, **named)
        del module
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()
