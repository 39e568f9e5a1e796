"""The gates of experts: which are recognised as an op, which must not be, and when one is looked at again."""

import copy
import functools
import logging
import types

import numpy
import pytest
import torch
import torch.nn.functional as F
from kit.compare import assert_close
from kit.stand_in_experts import Beta, E, Gated, H, I, Plain, arguments, by_tokens, config, outcome
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from fusedmoe.integrations.transformers import expert_modules, experts_forward, recognised

pytestmark = pytest.mark.usefixtures("registered")


@use_experts_implementation(has_gate=False)
class NotGated(Gated):
    def __init__(self, config):
        super().__init__(config)
        self.up_proj = nn.Parameter(torch.randn(E, I, H, dtype=torch.float64))
        del self.gate_up_proj


@use_experts_implementation(is_concatenated=False)
class Interleaved(Gated):
    alpha = 1.5
    _apply_gate = GptOssExperts._apply_gate


@use_experts_implementation
class Functional(Gated):
    """Whose act_fn is no module."""

    def __init__(self, config):
        super().__init__(config)
        del self.act_fn


def halves(x):
    return x.chunk(2, dim=-1)


def of_class(gate, **attributes):
    """A module of a class of its own, whose gate is that function of the module and its rows."""
    return use_experts_implementation(type("Own", (Gated,), {"_apply_gate": gate, **attributes}))(config())


def clamped(act_fn=None):
    module = of_class(DeepseekV4Experts._apply_gate)
    module.act_fn = act_fn or module.act_fn
    return module


def by_activation(act_fn, kind=Plain):
    module = kind(config())
    module._modules.pop("act_fn", None)  # which nothing but a module may take the place of
    module.act_fn = ACT2FN[act_fn] if isinstance(act_fn, str) else act_fn
    return module


def of_halves(self, x):
    return type(self).function(*halves(x))


def named(name, function):
    """A module whose gate, this function of gate and up, has the name of one of transformers' functions."""
    gate = types.FunctionType(of_halves.__code__, globals())
    gate.__module__, gate.__qualname__ = "transformers.integrations.moe", name
    return of_class(gate, function=staticmethod(function))


def computes_its_own(module, **tolerances):
    given = arguments()
    assert_close(outcome(experts_forward, module, *given), outcome(by_tokens, module, *given), **tolerances)


CLAMPED = "DeepseekV4Experts._apply_gate"
DEFAULT = "_default_apply_gate"
KNOWN = {
    "silu": (lambda: by_activation("silu"), "SwiGLU()"),
    "a function": (lambda: by_activation(F.silu, Functional), "SwiGLU()"),
    "gelu": (lambda: by_activation("gelu"), "GeGLU(approximate='none')"),
    "gelu_pytorch_tanh": (lambda: by_activation("gelu_pytorch_tanh"), "GeGLU()"),
    "quick_gelu": (lambda: by_activation("quick_gelu"), "SwiGLU(alpha=1.702)"),
    "relu": (lambda: by_activation("relu"), "ReGLU()"),
    "relu2, not gated": (lambda: by_activation("relu2", NotGated), "SquaredReLU()"),
    "clamped": (clamped, "SwiGLU(limit=7.0)"),
    "clamped, of gelu": (lambda: clamped(ACT2FN["gelu_new"]), "GeGLU(limit=7.0)"),
    "interleaved": (lambda: Interleaved(config()), "SwiGLU(limit=7.0, alpha=1.5, offset=1.0, interleaved=True)"),
    "in fp32": (
        lambda: named(DEFAULT, lambda g, u: (F.silu(g.float()) * u.float()).to(g.dtype)),
        "SwiGLU()",
    ),
    "clamped by another formula": (
        lambda: named(CLAMPED, lambda g, u: F.silu(g.clamp(max=7.0)) * u.clamp(-7.0, 7.0)),
        "SwiGLU(limit=7.0)",
    ),
}


@pytest.mark.parametrize(("make", "expected"), KNOWN.values(), ids=KNOWN)
def test_recognised(make, expected, caplog):
    module = make()
    with caplog.at_level(logging.WARNING, "fusedmoe"):
        assert repr(recognised(module)) == expected
        computes_its_own(module, rtol=1e-4, atol=1e-4)
    assert not caplog.records


# with the name of a function of transformers
DIFFERENT = {
    "a huge limit": (DEFAULT, lambda g, u: F.silu(g.clamp(max=3e5)) * u.clamp(-3e5, 3e5)),
    "another limit": (CLAMPED, lambda g, u: F.silu(g.clamp(max=6.5)) * u.clamp(-6.5, 6.5)),
    "up is not clamped": (CLAMPED, lambda g, u: F.silu(g.clamp(max=7.0)) * u),
    "zero where tiny": (DEFAULT, lambda g, u: F.silu(g.where(g.abs() > 1e-12, 0)) * u),
    "NaN becomes zero": (DEFAULT, lambda g, u: (F.silu(g) * u).nan_to_num(0.0)),
    "straight through": (DEFAULT, lambda g, u: (g + (F.silu(g) - g).detach()) * u),
    "by feature": (DEFAULT, lambda g, u: F.silu(g) * u * torch.linspace(1, 1.1, g.shape[-1], dtype=g.dtype)),
    "in fp16 inside": (DEFAULT, lambda g, u: (F.silu(g.half()) * u.half()).to(g.dtype)),
    "of another dtype": (DEFAULT, lambda g, u: (F.silu(g) * u).float()),
    "in place": (DEFAULT, lambda g, u: F.silu(g, inplace=True) * u),
}


@pytest.mark.parametrize(("name", "function"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_gate_that_computes_something_else_is_refused(name, function, caplog):
    with caplog.at_level(logging.INFO, "fusedmoe"):
        assert recognised(named(name, function)) is None
    (reason,) = caplog.messages
    assert "its gate differs from SwiGLU(" in reason or "its gate raises" in reason


@pytest.mark.parametrize("limit", [None, True, 0, numpy.float32(1.0), nn.Parameter(torch.ones(()))])
def test_a_limit_that_is_no_positive_number_is_refused(limit, caplog):
    module = clamped()
    del module.limit
    module.limit = limit
    with caplog.at_level(logging.INFO, "fusedmoe"):
        assert recognised(module) is None
    assert "expected positive numbers, got {'limit'" in caplog.text


# ---- gates that must not be taken for one of ours -----------------------------------------------------------------


def with_own(owner, name, value):
    """A module in which something was set on the instance, of the experts or of their activation."""
    module = Plain(config())
    setattr(getattr(module, owner) if owner else module, name, value)
    return module


def hooked():
    module = Plain(config())
    module.act_fn.register_forward_hook(lambda module, args, y: 2 * y)
    return module


def bounded(self, x):
    """A gate that looks for something that is not in every module."""
    gate, up = halves(x)
    bound = getattr(self, "bound", None)
    return F.silu(gate if bound is None else gate.clamp(max=bound)) * up


UNKNOWN = {
    "a gate of its own": lambda: of_class(lambda self, x: F.silu(halves(x)[0]) * halves(x)[1]),
    "with a number of the module": lambda: of_class(bounded, bound=1.5),
    "with a number": lambda: by_activation(Beta()),
    "partial": lambda: by_activation(functools.partial(F.gelu, approximate="tanh"), Functional),
    "hook": hooked,
    "gate set on the module": lambda: with_own("", "_apply_gate", lambda x: F.relu(halves(x)[0]) * halves(x)[1]),
    "forward set on the activation": lambda: with_own("act_fn", "forward", F.relu),
    "mish": lambda: by_activation("mish"),
    "not gated, silu": lambda: by_activation("silu", NotGated),
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_not_recognised(make, caplog):
    module = make()
    assert recognised(module) is None
    with caplog.at_level(logging.WARNING, "fusedmoe"):
        computes_its_own(module)
        experts_forward(make(), *arguments())
    assert len([r for r in caplog.records if "runs unfused" in r.getMessage()]) == 1


# ---- changes ------------------------------------------------------------------------------------------------------


def set_to(name, value):
    return lambda module: setattr(module, name, value)


def set_of_class(name, value):
    return lambda module: setattr(type(module), name, value)


def by_beta(self, x):
    return halves(x)[0] * torch.sigmoid(self._beta * halves(x)[0]) * halves(x)[1]


CHANGES = {
    "limit": (clamped, set_to("limit", 3.0)),
    "forward of act_fn": (clamped, lambda m: setattr(m.act_fn, "forward", torch.tanh)),
    "gate of the module": (clamped, set_to("_apply_gate", lambda x: torch.tanh(halves(x)[0]) * halves(x)[1])),
    "gate of the class": (clamped, set_of_class("_apply_gate", lambda self, x: F.relu(halves(x)[0]) * halves(x)[1])),
    "hook": (clamped, lambda m: m.act_fn.register_forward_hook(lambda module, args, y: y + 1)),
    "not recognised, found": (lambda: of_class(bounded), set_to("bound", 0.5)),
    "not recognised, of the class": (lambda: of_class(by_beta, _beta=1.0), set_of_class("_beta", 2.0)),
    "not recognised, in a new module": (lambda: copy.deepcopy(of_class(by_beta, _beta=1.0)), set_to("_beta", 2.0)),
}


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_a_changed_gate_is_looked_at_again(make, change):
    module = make()
    with torch.no_grad():
        module.gate_up_proj *= 3  # beyond the limit
    given = arguments()
    before = outcome(experts_forward, module, *given)
    chain = expert_modules.experts_of(module).chain
    assert expert_modules.experts_of(module).chain is chain
    change(module)
    after = outcome(experts_forward, module, *given)
    assert not torch.allclose(before["y"], after["y"])
    assert_close(after, outcome(by_tokens, module, *given))


def test_looking_at_a_gate_draws_no_random_numbers_and_leaves_the_module_alone():
    module = Plain(config())
    before, state = {name: copy.copy(value) for name, value in vars(module).items()}, torch.get_rng_state()
    recognised(module)
    assert torch.get_rng_state().equal(state)
    assert vars(module).keys() == before.keys()
    assert module.training
