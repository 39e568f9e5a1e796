"""The experts of transformers: which gates are recognised, and what goes on around a call.

That whole models compute what eager ones compute is tested for every family in test_transformers_families.py.
"""

import copy
import functools
import importlib.util
import io
import logging
import pickle
import types

import families_page
import moe_families
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.fusion.log import forget_said
from fusedmoe.integrations.transformers import experts_forward, recognised

E, H, I, K, T = 8, 16, 12, 2, 20  # noqa: E741  (experts, hidden, intermediate, chosen, tokens)


@pytest.fixture(autouse=True)
def registered():
    forget_said()
    fusedmoe_transformers.register()
    torch.manual_seed(0)


class Gated(nn.Module):
    """Experts as transformers' models have them."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, self.limit = E, 7.0
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H, dtype=torch.float64))
        self.down_proj = nn.Parameter(torch.randn(E, H, I, dtype=torch.float64))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("eager")


@use_experts_implementation
class Plain(Gated):
    pass


@use_experts_implementation(has_gate=False)
class NotGated(Gated):
    def __init__(self, config):
        super().__init__(config)
        self.up_proj = nn.Parameter(torch.randn(E, I, H, dtype=torch.float64))
        del self.gate_up_proj


@use_experts_implementation(is_concatenated=False)
class Interleaved(Gated):
    def _apply_gate(self, x):
        return self.act_fn(x[..., ::2]) * x[..., 1::2]


def config(implementation="fusedmoe", **settings):
    return types.SimpleNamespace(_experts_implementation=implementation, num_experts_per_tok=K, **settings)


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
    module.act_fn = ACT2FN[name] if isinstance(name, str) else name
    return module


def halves(x):
    return x.chunk(2, dim=-1)


def arguments(dtype=torch.float64, tokens=T):
    x = torch.randn(tokens, H, dtype=dtype, requires_grad=True)
    index = torch.rand(tokens, E).topk(K).indices
    weights = torch.rand(tokens, K, dtype=dtype, requires_grad=True)
    return x, index, weights


def outcome(function, module, x, index, weights):
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    module.zero_grad()
    y = function(module, x, index, weights)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}


def by_tokens(module, x, index, weights):
    """What the experts mean: token by token, with the module's own functions."""
    y = []
    for t in range(len(x)):
        total = torch.zeros_like(x[t])
        for k in range(index.shape[1]):
            e = int(index[t, k])
            if e >= module.num_experts:
                continue
            up = module.gate_up_proj if module.has_gate else module.up_proj
            h = fusedmoe_transformers._activation(module, x[t : t + 1] @ up[e].T)
            total = total + weights[t, k] * (h @ module.down_proj[e].T)[0]
        y.append(total)
    return torch.stack(y)


def assert_same(got, want, **tolerances):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], **tolerances, msg=lambda text, name=name: f"{name}: {text}")
        assert want[name].any(), f"{name}: zeros would pass"


def computes_its_own(module):
    given = arguments()
    assert_same(outcome(experts_forward, module, *given), outcome(by_tokens, module, *given))


def of_halves(self, x):
    return type(self).function(self, *halves(x))


def at(function):
    """A gate: that function of the module, gate and up. It has no closure, which would keep it from being tried."""

    def make():
        module = gated(of_halves)
        type(module).function = staticmethod(function)
        return module

    return make


# ---- gates that are one of ours -----------------------------------------------------------------------------------

KNOWN = {
    "silu": (lambda: by_activation("silu"), "SwiGLU()"),
    "swish": (lambda: by_activation("swish"), "SwiGLU()"),
    "a function": (lambda: gated(lambda self, x: F.silu(halves(x)[0]) * halves(x)[1]), "SwiGLU()"),
    "gelu": (lambda: by_activation("gelu"), "GeGLU(approximate='none')"),
    "gelu in python": (lambda: by_activation("gelu_python"), "GeGLU(approximate='none')"),
    "gelu_pytorch_tanh": (lambda: by_activation("gelu_pytorch_tanh"), "GeGLU()"),
    "gelu_new": (lambda: by_activation("gelu_new"), "GeGLU()"),
    "quick_gelu": (lambda: by_activation("quick_gelu"), "SwiGLU(alpha=1.702)"),
    "relu": (lambda: by_activation("relu"), "ReGLU()"),
    "partial": (lambda: by_activation(functools.partial(F.gelu, approximate="tanh"), Functional), "GeGLU()"),
    "interleaved": (lambda: Interleaved(config()), "SwiGLU(interleaved=True)"),
    "relu2, not gated": (lambda: by_activation("relu2", NotGated), "SquaredReLU()"),
    "slices": (lambda: gated(lambda self, x: F.silu(x[..., : self.width]) * x[..., self.width :], width=I), "SwiGLU()"),
    "clamped": (
        lambda: gated(lambda self, x: F.silu(halves(x)[0].clamp(max=self.limit)) * halves(x)[1].clamp(-7.0, 7.0)),
        "SwiGLU(limit=7.0)",
    ),
    "alpha of the module": (
        lambda: gated(lambda self, x: halves(x)[0] * torch.sigmoid(self.beta * halves(x)[0]) * halves(x)[1], beta=1.5),
        "SwiGLU(alpha=1.5)",
    ),
    "alpha of the class": (
        lambda: by_activation(type("Own", (nn.Module,), {"b": 2.5, "forward": lambda s, g: g * (s.b * g).sigmoid()})()),
        "SwiGLU(alpha=2.5)",
    ),
    "in fp32": (at(lambda self, g, u: (F.silu(g.float()) * u.float()).to(g.dtype)), "SwiGLU()"),
}  # fmt: skip


@use_experts_implementation
class Functional(Gated):
    """Whose act_fn is no module."""

    def __init__(self, config):
        super().__init__(config)
        del self.act_fn


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


def set_on_the_module():
    module = Plain(config())
    module._apply_gate = lambda x: F.relu(halves(x)[0]) * halves(x)[1]
    return module


def forward_set_on_the_activation():
    module = by_activation("silu")
    module.act_fn.forward = F.relu
    return module


def closure(beta):
    return gated(lambda self, x: silu_times(self, x) * beta)


UNKNOWN = {
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
    "not in fp64": at(lambda self, g, u: F.silu(g) * u if g.dtype is not torch.float64 else 0),
    "dropout": at(lambda self, g, u: F.dropout(F.silu(g) * u, 0.1, self.training)),
    "parameter": lambda: by_activation(WithParameter()),
    "buffer": lambda: by_activation(WithBuffer()),
    "private number": lambda: by_activation(Private()),
    "changes itself": lambda: by_activation(Counting()),
    "training": lambda: by_activation(OnlyInTraining()),
    "hook": hooked,
    "gate set on the module": set_on_the_module,
    "forward set on the activation": forward_set_on_the_activation,
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
    assert len([r for r in caplog.records if "runs as it is" in r.getMessage()]) == 1


def test_trying_draws_no_random_numbers_and_leaves_the_module_alone():
    module = UNKNOWN["dropout"]()
    before, state = {name: copy.copy(value) for name, value in vars(module).items()}, torch.get_rng_state()
    recognised(module)
    assert torch.get_rng_state().equal(state)
    assert vars(module).keys() == before.keys()
    assert module.training


def change_limit(module):
    module.limit = 3.0


def change_beta(module):
    module.act_fn.beta = 2.0


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


class Beta(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = 1.0

    def forward(self, gate):
        return gate * torch.sigmoid(self.beta * gate)


@pytest.mark.parametrize(
    "change", [change_limit, change_beta, change_act_fn, change_forward, change_gate, change_class, change_hooks]
)
def test_a_changed_gate_is_tried_again(change):
    def gate(self, x):
        return self.act_fn(halves(x)[0].clamp(max=self.limit)) * halves(x)[1].clamp(-self.limit, self.limit)

    module = gated(gate, Beta())
    with torch.no_grad():
        module.gate_up_proj *= 3  # beyond the limit
    given = arguments()
    before = outcome(experts_forward, module, *given)
    assert repr(recognised(module)) == "SwiGLU(limit=7.0)"
    chain = fusedmoe_transformers._experts_of(module).chain
    assert fusedmoe_transformers._experts_of(module).chain is chain
    change(module)
    after = outcome(experts_forward, module, *given)
    assert not torch.allclose(before["y"], after["y"])
    assert_same(after, outcome(by_tokens, module, *given))


def test_layers_of_a_model_share_what_was_found(monkeypatch):
    tried = []
    recognise = fusedmoe_transformers._recognise
    monkeypatch.setattr(fusedmoe_transformers, "_recognised_before", {})
    monkeypatch.setattr(fusedmoe_transformers, "_recognise", lambda *a: tried.append(a) or recognise(*a))
    for family in ("qwen3_moe", "gemma4"):
        tiny = moe_families.tiny(family, "fusedmoe")
        moe_families.logits_and_loss(tiny)
        assert len(tiny.experts) == 2
        assert len(tried) == 1
        tried.clear()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_it_is_tried_in_any_mode(around, monkeypatch):
    monkeypatch.setattr(fusedmoe_transformers, "_recognised_before", {})
    with around(), torch.device("meta"):
        assert repr(recognised(by_activation("silu"))) == "SwiGLU()"
    y = experts_forward(by_activation("silu"), *arguments())
    assert y.requires_grad


# ---- around a call ------------------------------------------------------------------------------------------------


def test_expert_parallelism_skips_what_is_elsewhere():
    """As transformers' expert_parallel does it: fewer experts, and their number as the index of all others."""
    module = Plain(config("grouped_mm")).float()
    x, index, weights = arguments(torch.float32)
    here = E // 2
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach()[:here].clone())
    module.down_proj = nn.Parameter(module.down_proj.detach()[:here].clone())
    index = torch.where(index < here, index, here)
    with torch.no_grad():
        weights.masked_fill_(index == here, 0.0)
    module.num_experts, module._is_expert_parallel = here, True
    assert (index == here).all(-1).any(), "tokens all of whose experts are elsewhere"
    want = outcome(lambda m, *given: m(*given), module, x, index, weights)
    got = outcome(experts_forward, module, x, index, weights)
    assert_same(got, want, rtol=1e-4, atol=1e-4)

    elsewhere = index == here
    with torch.no_grad():
        x[elsewhere.all(-1)] = torch.nan
        weights[elsewhere] = torch.nan
    poisoned = outcome(experts_forward, module, x, index, weights)
    assert_same(poisoned, got)
    assert not poisoned["y"][elsewhere.all(-1)].any()
    assert not poisoned["weights"][elsewhere].any()


def test_experts_that_were_sharded_after_a_call():
    module, given = Plain(config()), arguments()
    experts_forward(module, *given)
    whole = module.gate_up_proj.detach(), module.down_proj.detach()
    module.gate_up_proj, module.down_proj = (nn.Parameter(w[:4].clone()) for w in whole)
    module.num_experts = 4
    x, index, weights = given
    computed = outcome(experts_forward, module, x, index.clamp(max=4), weights)
    assert_same(computed, outcome(by_tokens, module, x, index.clamp(max=4), weights))


@pytest.fixture
def mesh(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_parameters_that_are_dtensors(mesh):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    module, given = Plain(config()), arguments()
    want = outcome(experts_forward, module, *given)
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(module, name).detach()
        setattr(module, name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
    got = outcome(experts_forward, module, *given)
    for name in ("gate_up_proj", "down_proj"):
        assert isinstance(got[name], DTensor)
        got[name] = got[name].to_local()
    assert_same(got, want)


@pytest.mark.parametrize(("rows", "factor"), [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes(rows, factor, autocast):
    module = Plain(config())
    exact = outcome(experts_forward, module, *arguments())
    torch.manual_seed(0)
    module = Plain(config()).to(torch.float32 if autocast else torch.bfloat16)
    x, index, weights = arguments()
    x, weights = x.detach().to(rows), weights.detach().to(factor)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = outcome(experts_forward, module, x, index, weights)
    assert got["y"].dtype is rows
    assert got["x"].dtype is rows
    assert got["weights"].dtype is factor
    for name, want in exact.items():
        error = (got[name].double() - want).norm() / want.norm()
        assert error < 0.03, f"{name}: {error}"


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    module, given = Plain(config()), arguments(tokens=tokens)
    got = outcome(experts_forward, module, *given)
    assert got["y"].shape == got["x"].shape == (tokens, H)
    assert got["gate_up_proj"].shape == module.gate_up_proj.shape
    assert got["gate_up_proj"].any() == bool(tokens)
    if tokens:
        assert_same(got, outcome(by_tokens, module, *given))


def test_frozen_experts():
    module, given = Plain(config()), arguments()
    want = outcome(experts_forward, module, *given)
    module.requires_grad_(False)
    assert_same(outcome(experts_forward, module, *given), {name: want[name] for name in ("y", "x", "weights")})


def test_wrong_shapes_say_so():
    module, (x, index, weights) = Plain(config()), arguments()
    with pytest.raises(fm.InputError, match=rf"GroupedLinear\(.*x: expected shape \(rows, {H}\)"):
        experts_forward(module, x[:, :-1], index, weights)
    with pytest.raises(fm.InputError, match=rf"expert_weight: expected shape \({T}, {K}\)"):
        experts_forward(module, x, index, weights[:, :-1])
    with pytest.raises(fm.InputError, match="expert_index: expected integers"):
        experts_forward(module, x, weights, weights)
    with pytest.raises(fm.InputError, match="got 0 more and num_tokens"):
        experts_forward(module, x, index, weights, num_tokens=3)
    module.down_proj = nn.Parameter(module.down_proj.detach().mT)
    del module.__dict__[fusedmoe_transformers._OPS]
    with pytest.raises(fm.InputError, match=rf"Plain: expected weights .* got \({E}, {2 * I}, {H}\) and"):
        experts_forward(module, x, index, weights)


def test_explain():
    tiny = moe_families.tiny("olmoe", "fusedmoe")
    explained = fusedmoe_transformers.explain(tiny.experts[0][1], tokens=16)
    assert [part[0] for part in explained.parts] == ["chain dispatch to combine"]
    assert "SwiGLU" in str(explained)


def test_explain_of_a_whole_model():
    tiny = moe_families.tiny("olmoe", "fusedmoe")
    explained = fm.explain(tiny.model, tokens=16)
    assert [group.kind for group in explained.groups] == ["OlmoeExperts"]
    assert explained.groups[0].names == tuple(name for name, _ in tiny.experts)
    tiny.model.set_experts_implementation("eager")
    assert not fm.explain(tiny.model).groups
    llama = moe_families.tiny("llama4", None).model
    assert not fm.explain(llama).groups
    fusedmoe_transformers.patch_llama4(llama)
    assert [group.kind for group in fm.explain(llama, tokens=16).groups] == ["Llama4TextExperts"]


# ---- around a model -----------------------------------------------------------------------------------------------


def results(tiny, **inputs):
    tiny.model.zero_grad()
    output = tiny.model(**tiny.inputs, **inputs)
    output.loss.backward()
    grads = {name: p.grad.clone() for name, p in tiny.model.named_parameters() if p.grad is not None}
    values = {name: output[name].detach() for name in ("logits", "loss", "aux_loss") if output.get(name) is not None}
    return {**values, **grads}


def both(family, change=lambda tiny: None, **inputs):
    """Check that eager and ours give the same in fp64; return the names."""
    found = []
    for implementation in ("eager", "fusedmoe"):
        tiny = moe_families.tiny(family, implementation, torch.float64)
        change(tiny)
        found.append(results(tiny, **inputs))
    assert_same(found[1], found[0], rtol=1e-9, atol=1e-12)
    assert all(fusedmoe_transformers._OPS in module.__dict__ for _, module in tiny.experts)
    return found[0].keys()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_auxiliary_losses_are_the_models(family):
    assert "aux_loss" in both(family, output_router_logits=True)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_gradient_checkpointing_in_training(family, monkeypatch):
    monkeypatch.setattr(fusedmoe_transformers, "_recognised_before", {})  # tried while the first pass saves tensors

    def change(tiny):
        # by the name that it has in this version
        enable = (
            getattr(tiny.model, "activation_checkpointing_enable", None) or tiny.model.gradient_checkpointing_enable
        )
        enable()
        tiny.model.train()

    both(family, change)


def test_copies_and_pickles_of_a_model_that_has_run():
    tiny = moe_families.tiny("gpt_oss", "fusedmoe", torch.float64)
    want = results(tiny)
    own = tiny.model
    saved = io.BytesIO()
    torch.save(own, saved)
    saved.seek(0)
    for model in (copy.deepcopy(own), pickle.loads(pickle.dumps(own)), torch.load(saved, weights_only=False)):
        for name, module in model.named_modules():
            assert module is not own.get_submodule(name) or not name
        tiny.model = model
        assert_same(results(tiny), want)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        assert not torch.allclose(results(tiny)["logits"], want["logits"])
    tiny.model = own
    assert_same(results(tiny), want)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_generate(family, use_cache):
    tokens = []
    for implementation in ("eager", "fusedmoe"):
        tiny = moe_families.tiny(family, implementation)
        settings = {"do_sample": False, "use_cache": use_cache, "pad_token_id": 0, "eos_token_id": None}
        tokens.append(tiny.model.generate(tiny.inputs["input_ids"], max_new_tokens=6, **settings))
    assert tokens[0].equal(tokens[1])
    assert tokens[0].shape[1] == moe_families.LENGTH + 6
    assert len(tokens[0][:, moe_families.LENGTH :].unique()) > 2


def test_every_way_to_ask_for_it(tmp_path):
    tiny = moe_families.tiny("qwen3_moe", "eager")
    want = results(tiny)
    tiny.model.save_pretrained(tmp_path)
    kind = type(tiny.model)
    loaded = kind.from_pretrained(tmp_path, experts_implementation="fusedmoe")
    by_auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="fusedmoe")
    made = transformers.AutoModelForCausalLM.from_config(tiny.model.config, experts_implementation="fusedmoe")
    made.load_state_dict(tiny.model.state_dict())
    switched = kind.from_pretrained(tmp_path)
    switched.set_experts_implementation("fusedmoe")
    for model in (loaded, by_auto, made, switched):
        assert model.config._experts_implementation == "fusedmoe"
        tiny.model = model.eval()
        assert_same(results(tiny), want, rtol=1e-4, atol=1e-6)
        experts = model.model.layers[0].mlp.experts
        assert fusedmoe_transformers._OPS in experts.__dict__
        del experts.__dict__[fusedmoe_transformers._OPS]
        model.set_experts_implementation("eager")
        results(tiny)
        assert fusedmoe_transformers._OPS not in experts.__dict__


def test_a_model_of_several_parts():
    found = moe_families.find_class("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration")
    config = found.config_class()
    assert "text_config" in config.sub_configs
    small = moe_families.small_config(type(config.text_config), {})
    config.text_config = small
    config.vision_config.depth, config.vision_config.hidden_size, config.vision_config.num_heads = 1, 32, 2
    config.vision_config.deepstack_visual_indexes, config.vision_config.out_hidden_size = [0], 64
    with torch.device("meta"):
        model = found._from_config(config, experts_implementation={"text_config": "fusedmoe"})
    assert model.config.text_config._experts_implementation == "fusedmoe"
    assert model.config.vision_config._experts_implementation != "fusedmoe"


def test_registered_twice_and_by_another_name():
    fusedmoe_transformers.register()
    try:
        fusedmoe_transformers.register("another")
        assert ExpertsInterface._global_mapping["another"] is ExpertsInterface._global_mapping["fusedmoe"]
        tiny = moe_families.tiny("olmoe", "another", torch.float64)
        assert_same(results(tiny), results(moe_families.tiny("olmoe", "eager", torch.float64)), rtol=1e-9, atol=1e-12)
        assert fusedmoe_transformers._OPS in tiny.experts[0][1].__dict__
    finally:
        ExpertsInterface._global_mapping.pop("another", None)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_recipe_around_a_model(family):
    tiny = moe_families.tiny(family, "fusedmoe", torch.bfloat16)
    _, module = tiny.experts[0]
    x = torch.randn(64, 64).bfloat16()
    index = torch.rand(64, 8).topk(2).indices
    given = (x, index, torch.rand(64, 2).bfloat16())
    plain = outcome(experts_forward, module, *given)
    with fm.recipe("fp8_row"):
        quantized = outcome(experts_forward, module, *given)
    for name, want in plain.items():
        noise = (quantized[name].double() - want.double()).norm() / want.double().norm()
        assert noise < 10 ** (-15 / 20), f"{name}: {noise}"  # an SQNR of 15 dB
        assert noise > 0 or name == "down_proj_bias", name  # a sum of what came unquantized
    with fm.recipe("fp8_row"):
        moe_families.logits_and_loss(tiny)[1].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for _, m in tiny.experts for p in m.parameters())


def test_strict_is_no_error_on_a_cpu():
    tiny = moe_families.tiny("qwen3_moe", "fusedmoe", torch.bfloat16)
    with fm.strict():
        moe_families.logits_and_loss(tiny)[1].backward()


# ---- Llama-4 ------------------------------------------------------------------------------------------------------


def llama4(dtype=torch.float64):
    return moe_families.tiny("llama4", None, dtype, num_experts_per_tok=2)


def test_llama4_there_and_back():
    tiny = llama4()
    want = results(tiny)
    keys = tiny.model.state_dict().keys()
    assert fusedmoe_transformers.patch_llama4(tiny.model) == fusedmoe_transformers.patch_llama4(tiny.model) == 2
    assert tiny.model.state_dict().keys() == keys
    assert_same(results(tiny), want, rtol=1e-9, atol=1e-12)
    assert all(fusedmoe_transformers._OPS in module.__dict__ for _, module in tiny.experts)
    for model in (copy.deepcopy(tiny.model), pickle.loads(pickle.dumps(tiny.model))):
        layer = model.model.layers[0].feed_forward
        assert layer.forward.args[0] is layer
        assert layer.experts.forward.args[0] is layer.experts
        copied = copy.copy(tiny)
        copied.model = model
        assert_same(results(copied), want, rtol=1e-9, atol=1e-12)
        for parameter in model.parameters():
            parameter.data.zero_()
    assert_same(results(tiny), want, rtol=1e-9, atol=1e-12)
    assert fusedmoe_transformers.unpatch_llama4(tiny.model) == 2
    assert fusedmoe_transformers.unpatch_llama4(tiny.model) == 0
    assert "forward" not in vars(tiny.model.model.layers[0].feed_forward)
    assert_same(results(tiny), want, rtol=0, atol=0)


def test_llama4_returns_the_routers_logits_and_runs_its_hooks():
    tiny = llama4()
    layer = tiny.model.model.layers[0].feed_forward
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    want = layer(x)
    fusedmoe_transformers.patch_llama4(tiny.model)
    ran = []
    layer.experts.register_forward_hook(lambda *args: ran.append("experts"))
    layer.router.register_forward_hook(lambda *args: ran.append("router"))
    got = layer(x)
    assert ran == ["router", "experts"]
    torch.testing.assert_close(got, want)
    assert got[0].shape == (10, 64)
    assert got[1].shape == (10, 8)


def test_llama4_in_bf16_where_scores_are_one_or_nothing():
    """Scores of equal value, and some that are rounded to zero."""
    tiny = llama4(torch.bfloat16)
    layer = tiny.model.model.layers[0].feed_forward
    layer.router.weight.data.mul_(300)
    x = torch.randn(40, 64).bfloat16()
    scores, _ = layer.router(x)
    assert ((scores == 1).sum(1) == 2).any()
    want = layer(x)[0]
    fusedmoe_transformers.patch_llama4(tiny.model)
    error = (layer(x)[0] - want).norm() / want.norm()
    assert error < 0.01


def test_llama4_errors():
    with pytest.raises(fm.InputError, match="Llama4TextMoe layers, got Linear"):
        fusedmoe_transformers.patch_llama4(nn.Linear(2, 2))
    tiny = llama4()
    layer = tiny.model.model.layers[1].feed_forward
    layer.forward = types.MethodType(type(layer).forward, layer)
    with pytest.raises(fm.InputError, match=r"'model.layers.1.feed_forward' was replaced before"):
        fusedmoe_transformers.patch_llama4(tiny.model)
    assert "forward" not in vars(tiny.model.model.layers[0].feed_forward)


# ---- the page -----------------------------------------------------------------------------------------------------


def test_the_page_has_the_table_of_families():
    text = families_page.PAGE.read_text("utf-8")
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip("the page is of another version of transformers")
    assert families_page.TABLE.search(text)[0] == families_page.table()


def test_the_page_names_the_families_that_are_not_decorated():
    named = {"dbrx", "jetmoe", "llama4", "longcat_flash", "nllb_moe", "step3p7", "switch_transformers"}
    for family in named:
        source = importlib.util.find_spec(f"transformers.models.{family}.modeling_{family}").origin
        with open(source, encoding="utf-8") as file:
            assert "@use_experts_implementation" not in file.read(), family
