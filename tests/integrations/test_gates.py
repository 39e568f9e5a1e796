"""The gates of experts: which are recognised as an op, which must not be, and when one is looked at again."""

import copy
import functools
import logging
import types

import numpy
import pytest
import torch
import torch.nn.functional as F
from kit.stand_in_experts import Beta, E, Gated, H, I, K, Plain, arguments, assert_same, by_tokens, config, outcome
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.base.log import forget_said
from fusedmoe.integrations.transformers import expert_modules, experts_forward, recognised


@pytest.fixture(autouse=True)
def registered():
    forget_said()
    fusedmoe_transformers.register()
    torch.manual_seed(0)


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


def gated(gate, act_fn=None, **attributes):
    """A module of a class of its own, whose gate is that function of the module and its rows."""
    kind = use_experts_implementation(type("Own", (Gated,), {"_apply_gate": gate}))
    module = kind(config())
    if act_fn is not None:
        module.act_fn = act_fn
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def by_activation(name, kind=Plain):
    module = kind(config())
    module._modules.pop("act_fn", None)  # which nothing but a module may take the place of
    module.act_fn = ACT2FN[name] if isinstance(name, str) else name
    return module


def halves(x):
    return x.chunk(2, dim=-1)


def computes_its_own(module):
    given = arguments()
    assert_same(outcome(experts_forward, module, *given), outcome(by_tokens, module, *given))


def of_halves(self, x):
    return type(self).function(self, *halves(x))


def at(function):
    """A gate: that function of the module, gate and up."""

    def make():
        module = gated(of_halves)
        type(module).function = staticmethod(function)
        return module

    return make


@use_experts_implementation
class Functional(Gated):
    """Whose act_fn is no module."""

    def __init__(self, config):
        super().__init__(config)
        del self.act_fn


# ---- gates that are one of ours -----------------------------------------------------------------------------------

KNOWN = {
    "silu": (lambda: by_activation("silu"), "SwiGLU()"),
    "swish": (lambda: by_activation("swish"), "SwiGLU()"),
    "a function": (lambda: by_activation(F.silu, Functional), "SwiGLU()"),
    "gelu": (lambda: by_activation("gelu"), "GeGLU(approximate='none')"),
    "gelu in python": (lambda: by_activation("gelu_python"), "GeGLU(approximate='none')"),
    "gelu_pytorch_tanh": (lambda: by_activation("gelu_pytorch_tanh"), "GeGLU()"),
    "gelu_python_tanh": (lambda: by_activation("gelu_python_tanh"), "GeGLU()"),
    "gelu_accurate": (lambda: by_activation("gelu_accurate"), "GeGLU()"),
    "gelu_new": (lambda: by_activation("gelu_new"), "GeGLU()"),
    "quick_gelu": (lambda: by_activation("quick_gelu"), "SwiGLU(alpha=1.702)"),
    "relu": (lambda: by_activation("relu"), "ReGLU()"),
    "relu2, not gated": (lambda: by_activation("relu2", NotGated), "SquaredReLU()"),
    "clamped": (lambda: gated(DeepseekV4Experts._apply_gate), "SwiGLU(limit=7.0)"),
    "clamped, of gelu": (lambda: gated(DeepseekV4Experts._apply_gate, ACT2FN["gelu_new"]), "GeGLU(limit=7.0)"),
    "interleaved": (lambda: Interleaved(config()), "SwiGLU(limit=7.0, alpha=1.5, offset=1.0, interleaved=True)"),
    "in fp32": (lambda: as_in_transformers("in fp32"), "SwiGLU()"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_recognised(name, caplog):
    make, expected = KNOWN[name]
    module = make()
    with caplog.at_level(logging.WARNING, "fusedmoe"):
        assert repr(recognised(module)) == expected
        given = arguments()
        tolerances = {"rtol": 1e-4, "atol": 1e-4} if name == "in fp32" else {}
        assert_same(outcome(experts_forward, module, *given), outcome(by_tokens, module, *given), **tolerances)
    assert not caplog.records


# ---- gates that compute something else than transformers' function of the same name ---------------------------------

CLAMPED = "DeepseekV4Experts._apply_gate"
DEFAULT = "_default_apply_gate"
SAME = {
    "the same": (DEFAULT, lambda self, g, u: F.silu(g) * u),
    "in fp32": (DEFAULT, lambda self, g, u: (F.silu(g.float()) * u.float()).to(g.dtype)),
    "clamped": (CLAMPED, lambda self, g, u: F.silu(g.clamp(max=7.0)) * u.clamp(-7.0, 7.0)),
}
DIFFERENT = {
    "swapped halves": (DEFAULT, lambda self, g, u: g * F.silu(u)),
    "a huge limit": (DEFAULT, lambda self, g, u: F.silu(g.clamp(max=3e5)) * u.clamp(-3e5, 3e5)),
    "another limit": (CLAMPED, lambda self, g, u: F.silu(g.clamp(max=6.5)) * u.clamp(-6.5, 6.5)),
    "not clamped": (CLAMPED, lambda self, g, u: F.silu(g) * u),
    "up is not clamped": (CLAMPED, lambda self, g, u: F.silu(g.clamp(max=7.0)) * u),
    "gate is clamped below": (CLAMPED, lambda self, g, u: F.silu(g.clamp(-7.0, 7.0)) * u.clamp(-7.0, 7.0)),
    "clamped after the activation": (CLAMPED, lambda self, g, u: F.silu(g).clamp(max=7.0) * u.clamp(-7.0, 7.0)),
    "alpha nearby": (DEFAULT, lambda self, g, u: g * torch.sigmoid(1.0001 * g) * u),
    "another offset": (DEFAULT, lambda self, g, u: F.silu(g) * (u + 0.5)),
    "doubled": (DEFAULT, lambda self, g, u: 2 * F.silu(g) * u),
    "zero where tiny": (DEFAULT, lambda self, g, u: F.silu(g.where(g.abs() > 1e-12, 0)) * u),
    "NaN becomes zero": (DEFAULT, lambda self, g, u: (F.silu(g) * u).nan_to_num(0.0)),
    "no gradient of gate": (DEFAULT, lambda self, g, u: F.silu(g).detach() * u),
    "straight through": (DEFAULT, lambda self, g, u: (g + (F.silu(g) - g).detach()) * u),
    "over rows": (DEFAULT, lambda self, g, u: F.silu(g) * u / len(g)),
    "by feature": (DEFAULT, lambda self, g, u: F.silu(g) * u * torch.linspace(1, 1.1, g.shape[-1], dtype=g.dtype)),
    "in fp16 inside": (DEFAULT, lambda self, g, u: (F.silu(g.half()) * u.half()).to(g.dtype)),
    "not in fp64": (DEFAULT, lambda self, g, u: F.silu(g) * u if g.dtype is not torch.float64 else 0),
    "of another dtype": (DEFAULT, lambda self, g, u: (F.silu(g) * u).float()),
    "random": (DEFAULT, lambda self, g, u: F.dropout(F.silu(g) * u, 0.1)),
    "in place": (DEFAULT, lambda self, g, u: F.silu(g, inplace=True) * u),
}


def as_in_transformers(name):
    """A module whose gate has the name of one of transformers' functions."""
    known, function = (SAME | DIFFERENT)[name]
    module = at(function)()
    gate = types.FunctionType(of_halves.__code__, globals())
    gate.__module__, gate.__qualname__ = "transformers.integrations.moe", known
    type(module)._apply_gate = gate
    return module


@pytest.mark.parametrize("name", SAME)
def test_a_gate_that_computes_the_same_is_recognised(name):
    assert repr(recognised(as_in_transformers(name))) == f"SwiGLU({'limit=7.0' if name == 'clamped' else ''})"


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_gate_that_computes_something_else_is_refused(name, caplog):
    with caplog.at_level(logging.INFO, "fusedmoe"):
        assert recognised(as_in_transformers(name)) is None
    (reason,) = caplog.messages
    assert "its gate differs from SwiGLU(" in reason or "its gate raises" in reason


@pytest.mark.parametrize("limit", [None, True, 0, numpy.float32(1.0), nn.Parameter(torch.ones(()))])
def test_a_limit_that_is_no_positive_number_is_refused(limit, caplog):
    module = gated(DeepseekV4Experts._apply_gate)
    del module.limit
    module.limit = limit
    with caplog.at_level(logging.INFO, "fusedmoe"):
        assert recognised(module) is None
    assert "expected positive numbers, got {'limit'" in caplog.text


# ---- gates that must not be taken for one of ours -----------------------------------------------------------------


class Own(nn.Module):
    """An activation with something in it."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self.set, self._function = True, forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, gate):
        return self._function(self, gate)


class WithParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()).double())

    def forward(self, gate):
        return gate * torch.sigmoid(self.beta * gate)


class WithBuffer(WithParameter):
    def __init__(self):
        super().__init__()
        del self.beta
        self.register_buffer("beta", torch.ones(()).double())


class Private(nn.Module):
    def __init__(self):
        super().__init__()
        self._beta = 1.0

    def forward(self, gate):
        return gate * torch.sigmoid(self._beta * gate)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, gate):
        self.calls += 1
        return F.silu(gate)


class OnlyInTraining(nn.Module):
    def forward(self, gate):
        return F.relu(gate) if self.training else F.silu(gate)


def silu_times(module, x):
    gate, up = halves(x)
    return F.silu(gate) * up


def hooked():
    module = by_activation("silu")
    module.act_fn.register_forward_hook(lambda module, args, y: 2 * y)
    return module


def hooked_by_an_observer():
    module = by_activation("silu")
    module.act_fn.register_forward_hook(lambda module, args, y: None)
    return module


def set_on_the_module():
    module = Plain(config())
    module._apply_gate = lambda x: F.relu(halves(x)[0]) * halves(x)[1]
    return module


def forward_set_on_the_activation():
    module = by_activation("silu")
    module.act_fn.forward = F.relu
    return module


def the_same_set_on_the_module():
    module = Plain(config())
    module._apply_gate = functools.partial(type(module)._apply_gate, module)
    return module


def the_same_forward_set_on_the_activation():
    module = by_activation("silu")
    module.act_fn.forward = F.silu
    return module


def named_as_in_transformers():
    """A gate with the name of one of transformers' functions, which is defined here."""
    module = as_in_transformers("the same")
    type(module)._apply_gate.__module__ = __name__
    return module


def closure(beta):
    return gated(lambda self, x: silu_times(self, x) * beta)


def bounded(self, x):
    """A gate that looks for something that is not in every module."""
    gate, up = halves(x)
    bound = getattr(self, "bound", None)
    return F.silu(gate if bound is None else gate.clamp(max=bound)) * up


def normed(self, x):
    gate, up = halves(x)
    return F.silu(self.norm(gate) if hasattr(self, "norm") else gate) * up


def by_beta(self, x):
    gate, up = halves(x)
    return gate * torch.sigmoid(self.beta * gate) * up


def by_config(self, x):
    return silu_times(self, x) * getattr(getattr(self, "config", None), "num_experts_per_tok", K) / K


def by_helper(self, x):
    return self.helper(halves(x)[0]) * halves(x)[1]


def by_variables(self, x):
    gate, up = halves(x)
    bound = vars(self)["_buffers"].get("bound")
    return F.silu(gate if bound is None else gate.clamp(max=bound)) * up


def look_in_the_configuration(self, name):
    try:
        return nn.Module.__getattr__(self, name)
    except AttributeError:
        if name == "bound":
            return self.config.num_experts_per_tok / 10
        raise


class Exact(nn.Module):
    def forward(self, gate):
        return F.silu(gate) if type(self) is Exact else F.relu(gate)


def of_class(gate, **attributes):
    return use_experts_implementation(type("OfClass", (Gated,), {"_apply_gate": gate, **attributes}))(config())


class Callable:
    beta = 1.0

    def __call__(self, gate):
        return gate * torch.sigmoid(self.beta * gate)


UNKNOWN = {
    "a method of its own": lambda: gated(lambda self, x: F.silu(halves(x)[0]) * halves(x)[1]),
    "a gate with a number of the module": lambda: gated(by_beta, beta=1.5),
    "an act_fn with a number": lambda: by_activation(Beta()),
    "partial": lambda: by_activation(functools.partial(F.gelu, approximate="tanh"), Functional),
    "swapped halves": at(lambda self, gate, up: gate * F.silu(up)),
    "a limit of its own": at(lambda self, g, u: F.silu(g.clamp(max=6.5)) * u.clamp(-6.5, 6.5)),
    "a huge limit": at(lambda self, g, u: F.silu(g.clamp(max=3e5)) * u.clamp(-3e5, 3e5)),
    "up is not clamped": at(lambda self, g, u: F.silu(g.clamp(max=self.limit)) * u),
    "gate is clamped below": at(lambda self, g, u: F.silu(g.clamp(-self.limit, self.limit)) * u.clamp(-7, 7)),
    "clamped after the activation": at(lambda self, g, u: F.silu(g).clamp(max=self.limit) * u.clamp(-7, 7)),
    "clamped after it, at 14": at(lambda self, g, u: F.silu(g).clamp(max=14.0) * u.clamp(-14.0, 14.0)),
    "alpha nearby": at(lambda self, g, u: g * torch.sigmoid(1.7021 * g) * u),
    "another offset": at(lambda self, g, u: F.silu(g) * (u + 0.5)),
    "doubled": at(lambda self, g, u: 2 * F.silu(g) * u),
    "zero where tiny": at(lambda self, g, u: F.silu(g.where(g.abs() > 1e-12, 0)) * u),
    "NaN becomes zero": at(lambda self, g, u: (F.silu(g) * u).nan_to_num(0.0)),
    "no gradient of gate": at(lambda self, g, u: F.silu(g).detach() * u),
    "straight through": at(lambda self, g, u: (g + (F.silu(g) - g).detach()) * u),
    "over rows": at(lambda self, g, u: F.silu(g) * u / len(g)),
    "in bf16 another": at(lambda self, g, u: (F.relu if g.dtype is torch.bfloat16 else F.silu)(g) * u),
    "in fp16 inside": at(lambda self, g, u: (F.silu(g.half()) * u.half()).to(g.dtype)),
    "of the configuration": lambda: gated(lambda self, x: silu_times(self, x) * self.config.num_experts_per_tok / K),
    "looks for a configuration": lambda: gated(by_config),
    "looks for a parameter": lambda: gated(bounded, bound=nn.Parameter(torch.ones(I).double())),
    "looks for a buffer": lambda: gated(bounded, bound=nn.Buffer(torch.ones(()).double())),
    "looks for a tensor": lambda: gated(bounded, bound=torch.ones(()).double()),
    "looks for a number of numpy's": lambda: gated(bounded, bound=numpy.float32(1.0)),
    "looks for a submodule": lambda: gated(normed, norm=nn.LayerNorm(I).double()),
    "a tuple of its class": lambda: of_class(lambda self, x: silu_times(self, x) * self.factors[0], factors=(1.0,)),
    "is of a class exactly": lambda: by_activation(Exact()),
    "looks in its variables": lambda: gated(by_variables, bound=nn.Buffer(torch.ones(()).double())),
    "has an attribute of the configuration": lambda: of_class(bounded, __getattr__=look_in_the_configuration),
    "a tensor's method": lambda: by_activation(torch.ones((), dtype=torch.float64).mul),
    "a callable object": lambda: by_activation(functools.partial(Callable())),
    "not in fp64": at(lambda self, g, u: F.silu(g) * u if g.dtype is not torch.float64 else 0),
    "dropout": at(lambda self, g, u: F.dropout(F.silu(g) * u, 0.1, self.training)),
    "parameter": lambda: by_activation(WithParameter()),
    "buffer": lambda: by_activation(WithBuffer()),
    "private number": lambda: by_activation(Private()),
    "changes itself": lambda: by_activation(Counting()),
    "training": lambda: by_activation(OnlyInTraining()),
    "hook": hooked,
    "hook that changes nothing": hooked_by_an_observer,
    "gate set on the module": set_on_the_module,
    "the same gate set on the module": the_same_set_on_the_module,
    "forward set on the activation": forward_set_on_the_activation,
    "the same forward set on the activation": the_same_forward_set_on_the_activation,
    "a function of another package": named_as_in_transformers,
    "closure": lambda: closure(1.0),
    "mish": lambda: by_activation("mish"),
    "clipped gelu": lambda: by_activation("gelu_10"),
    "leaky": lambda: by_activation("leaky_relu"),
    "not gated, silu": lambda: by_activation("silu", NotGated),
    "not gated, relu": lambda: by_activation("relu", NotGated),
    "not gated, gelu": lambda: by_activation("gelu", NotGated),
}  # fmt: skip
NOT_COMPARED = {"dropout", "over rows", "not in fp64"}  # by the row they are something else, or random, or nothing


@pytest.mark.parametrize("name", UNKNOWN)
def test_not_recognised(name, caplog):
    module = UNKNOWN[name]()
    assert recognised(module) is None
    if name in NOT_COMPARED:
        return
    with caplog.at_level(logging.WARNING, "fusedmoe"):
        computes_its_own(module)
        experts_forward(UNKNOWN[name](), *arguments())
    assert len([r for r in caplog.records if "runs unfused" in r.getMessage()]) == 1


def test_looking_at_a_gate_draws_no_random_numbers_and_leaves_the_module_alone():
    module = by_activation("silu")
    before, state = {name: copy.copy(value) for name, value in vars(module).items()}, torch.get_rng_state()
    recognised(module)
    assert torch.get_rng_state().equal(state)
    assert vars(module).keys() == before.keys()
    assert module.training


def change_limit(module):
    module.limit = 3.0


def change_act_fn(module):
    module.act_fn = nn.ReLU()


def change_forward(module):
    module.act_fn.forward = torch.tanh


def change_gate(module):
    module._apply_gate = types.MethodType(lambda self, x: torch.tanh(halves(x)[0]) * halves(x)[1], module)


def change_class(module):
    type(module)._apply_gate = lambda self, x: F.relu(halves(x)[0]) * halves(x)[1]


def change_hooks(module):
    module.act_fn.register_forward_hook(lambda module, args, y: y + 1)


def set_bound(module):
    module.bound = 0.5


def set_on_class(module):
    type(module)._beta = 2.0


def set_private(module):
    module._beta = 2.0


def replace_helper(module):
    module.helper = torch.tanh


def replace_helper_of_class(module):
    type(module).helper = staticmethod(F.relu)


def change_partial(module):
    module.act_fn.keywords["beta"] = 2.0


def by_private(self, x):
    return halves(x)[0] * torch.sigmoid(self._beta * halves(x)[0]) * halves(x)[1]


def with_beta(gate, beta):
    return gate * torch.sigmoid(beta * gate)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: gated(bounded), set_bound),
        (lambda: of_class(by_private, _beta=1.0), set_on_class),
        (lambda: of_class(by_private, _beta=1.0), set_private),
        (lambda: of_class(by_helper, helper=staticmethod(F.silu)), replace_helper),
        (lambda: of_class(by_helper, helper=staticmethod(F.silu)), replace_helper_of_class),
        (lambda: by_activation(functools.partial(with_beta, beta=1.0)), change_partial),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("again", [False, True], ids=["", "in a new module"])
def test_what_a_gate_that_is_not_recognised_reads_may_change(make, change, again):
    module = make()
    with torch.no_grad():
        module.gate_up_proj *= 3
    given = arguments()
    before = outcome(experts_forward, module, *given)
    assert recognised(module) is None
    if again:
        module, state = copy.deepcopy(module), module.state_dict()
        module.load_state_dict(state)
    change(module)
    after = outcome(experts_forward, module, *given)
    assert not torch.allclose(before["y"], after["y"])
    assert_same(after, outcome(by_tokens, module, *given))


@pytest.mark.parametrize(
    "change", [change_limit, change_act_fn, change_forward, change_gate, change_class, change_hooks]
)
def test_a_changed_gate_is_looked_at_again(change):
    module = gated(DeepseekV4Experts._apply_gate)
    with torch.no_grad():
        module.gate_up_proj *= 3  # beyond the limit
    given = arguments()
    before = outcome(experts_forward, module, *given)
    assert repr(recognised(module)) == "SwiGLU(limit=7.0)"
    chain = expert_modules.experts_of(module).chain
    assert expert_modules.experts_of(module).chain is chain
    change(module)
    after = outcome(experts_forward, module, *given)
    assert not torch.allclose(before["y"], after["y"])
    assert_same(after, outcome(by_tokens, module, *given))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_it_is_recognised_in_any_mode(around):
    with around(), torch.device("meta"):
        assert repr(recognised(by_activation("silu"))) == "SwiGLU()"
    y = experts_forward(by_activation("silu"), *arguments())
    assert y.requires_grad
