"""Every family of Mixture-of-Experts models of transformers, under ``experts_implementation="fusedmoe"``.

The families are those whose experts carry transformers' decorator, as its source has it, and Llama-4: those of a newer
transformers are tested without a change here.
"""

import copy
import logging
import math
import re
from collections import Counter

import pytest
import torch
from kit import moe_families
from torch import nn

import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.base.log import forget_said
from fusedmoe.integrations.transformers import expert_modules

MODELS = [(family, None) for family in moe_families.family_names()] + moe_families.OTHER_MODELS
# families of which no tiny model can be made, and why
NOT_BUILT = {}
# the gates that differ from transformers' default with a SiLU; ModelFunction: no op computes the gate
ACTIVATIONS = {
    "beam": "SwiGLU()",
    "deepseek_v4": "SwiGLU(limit=its own)",
    "diffusion_gemma": "GeGLU()",
    "gemma4": "GeGLU()",
    "glm5_next": "SwiGLU(limit=its own)",
    "gpt_oss": "SwiGLU(limit=its own, alpha=1.702, offset=1.0, interleaved=True)",
    "hy_v4": "SwiGLU(limit=its own)",
    "hy_v4_vl": "SwiGLU(limit=its own)",
    "inkling2": "ModelFunction()",
    "inkling2_loop": "ModelFunction()",
    "llama4": "SwiGLU()",
    "minimax_m3_vl": "SwiGLU(limit=its own, alpha=1.702, offset=1.0)",
    "nemotron_h": "SquaredReLU()",
    "openai_privacy_filter": "SwiGLU(limit=its own, alpha=1.702, offset=1.0)",
}
# whose own code computes in fp32, whatever it is given: gates, a norm, routing weights, sums of experts' outputs
CASTS_TO_FLOAT32 = {"beam", "inkling2", "inkling2_loop", "muse_spark", "nemotron_h", "openai_privacy_filter"}
# whose eager experts compute in fp32 from end to end: in bf16 the yardstick is another of transformers' own
EXACT_EAGER = {"openai_privacy_filter": "batched_mm"}
# how often each layer's experts run, where it is not once: layers in a loop
CALLS = {"inkling2_loop": (1, 2)}
WITHOUT_GRADIENT = {
    "inkling2_loop": {"model.message_input.query"},  # attends to a single layer of the loop
    "phimoe": {f"model.layers.{i}.mlp.router.weight" for i in range(2)},  # hard choices outside of training
}


@pytest.fixture(autouse=True)
def registered():
    forget_said()
    fusedmoe_transformers.register()


@pytest.fixture
def asked(monkeypatch):
    """The experts modules that this package was called for, in order."""
    modules = []
    experts_of = expert_modules.experts_of
    monkeypatch.setattr(
        fusedmoe_transformers, "experts_of", lambda module: modules.append(module) or experts_of(module)
    )
    return modules


def build(family, implementation, dtype, model_class=None):
    try:
        tiny = moe_families.tiny(family, None if family == "llama4" else implementation, dtype, model_class=model_class)
    except Exception as error:
        if (model_class or family) in NOT_BUILT:
            pytest.skip(f"{NOT_BUILT[model_class or family]}: {error}")
        raise
    if family == "llama4" and implementation == "fusedmoe":
        fusedmoe_transformers.patch_llama4(tiny.model)
    return tiny


def results(tiny):
    logits, loss = moe_families.logits_and_loss(tiny)
    loss.backward()
    grads = {name: p.grad for name, p in tiny.model.named_parameters() if p.grad is not None}
    return {name: t.detach().double() for name, t in {"logits": logits, "loss": loss, **grads}.items()}


def relative(got, want):
    return ((got - want).norm() / want.norm()).item() if want.any() else float(got.any())


def errors(got, exact):
    return {name: relative(got[name], exact[name]) for name in exact}


DRAWS = 16  # where roundings meet a gate, errors have few large values among many small ones
FEW = 64  # values of a tensor whose error is not compared as that of a large tensor


def exceeds(ours, its, names):
    """Whether these tensors together are less exact."""
    ours, its = (math.sqrt(sum(of[name] ** 2 for name in names) / len(names)) for of in (ours, its))
    return ours > 1.5 * its


def test_there_are_families():
    assert {"gemma4", "gpt_oss", "llama4", "mixtral", "nemotron_h", "qwen3_moe"} <= {family for family, _ in MODELS}
    assert NOT_BUILT.keys() <= {model_class or family for family, model_class in MODELS}


@pytest.mark.parametrize(
    ("family", "model_class"),
    # quick: inkling2_loop has the layers of inkling2, one of them twice
    [pytest.param(f, c, marks=[pytest.mark.slow] if f == "inkling2" else [], id=c or f) for f, c in MODELS],
)
def test_as_exact_as_eager(family, model_class, asked, caplog):
    exact = results(build(family, "eager", torch.float64, model_class))
    eager_model = build(family, "eager", torch.float32, model_class)
    eager = results(eager_model)
    assert not asked

    with caplog.at_level(logging.WARNING, "fusedmoe"):
        double = results(build(family, "fusedmoe", torch.float64, model_class))
        asked.clear()
        tiny = build(family, "fusedmoe", torch.float32, model_class)
        got = results(tiny)

    experts = [module for _, module in tiny.experts]
    calls = CALLS.get(family, (1,) * len(experts))
    assert Counter(map(id, asked)) == {id(module): n for module, n in zip(experts, calls, strict=True)}
    chains = [module.__dict__[expert_modules.OPS].chain for module in experts]
    limits = {getattr(chain.activation, "limit", None) for chain in chains}
    assert limits <= {None, getattr(experts[0], "limit", None), getattr(experts[0], "swiglu_limit", None)}
    activations = {re.sub(r"limit=[\d.]+", "limit=its own", repr(chain.activation)) for chain in chains}
    if family in ACTIVATIONS:
        assert activations == {ACTIVATIONS[family]}
    elif isinstance(experts[0].act_fn, nn.SiLU) or type(experts[0].act_fn).__name__ == "SiLUActivation":
        assert activations == {"SwiGLU()"}
    said = [record for record in caplog.records if "runs unfused" in record.getMessage()]
    assert len(said) == ("ModelFunction()" in activations)

    shapes = {name: tensor.shape for name, tensor in eager_model.model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in tiny.model.state_dict().items()} == shapes

    assert exact.keys() == eager.keys() == double.keys() == got.keys()
    assert {name for name, tensor in exact.items() if not tensor.any()} == WITHOUT_GRADIENT.get(family, set())
    for name, _ in tiny.experts:
        assert any(key.startswith(f"{name}.") for key in exact), f"{name}: no gradients"
    for name in exact:
        assert relative(double[name], exact[name]) < (2e-6 if family in CASTS_TO_FLOAT32 else 1e-12), name
    its, ours = errors(eager, exact), errors(got, exact)
    # A single tensor's error is one draw of many roundings: some 64 of them are no difference. The gradient of a few
    # values, such as a scale, is a sum over more than a thousand terms of both signs, each of which has such errors.
    large = [name for name, tensor in exact.items() if tensor.numel() > FEW]
    floor = {name: (64 if name in large else 512) * torch.finfo(torch.float32).eps for name in exact}
    if any(ours[name] > max(1.5 * its[name], floor[name]) for name in exact) or exceeds(ours, its, large):
        draws = [its, *(errors_of_nudged(family, model_class, seed) for seed in range(DRAWS))]
        its = {name: max(draw[name] for draw in draws) for name in exact}
    for name in exact:
        assert ours[name] <= max(1.5 * its[name], floor[name]), name
    assert not exceeds(ours, its, large)


def errors_of_nudged(family, model_class, seed):
    """Errors of an eager model with each parameter a rounding off at random: another draw of the same roundings."""
    tiny, exact = (build(family, "eager", dtype, model_class) for dtype in (torch.float32, torch.float64))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter, same in zip(tiny.model.parameters(), exact.model.parameters(), strict=True):
            sign = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.mul_(1 + torch.finfo(torch.float32).eps * sign)
            same.copy_(parameter)
    return errors(results(tiny), results(exact))


DECORATED = [(family, model_class) for family, model_class in MODELS if family != "llama4"]


def through_experts(module, implementation, x, index, weights):
    module = copy.deepcopy(module)
    module.config = copy.copy(module.config)
    module.config._experts_implementation = implementation
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = module(x, index, weights)
    signs = torch.arange(y.numel()).view_as(y) % 3 - 1
    (y * signs).sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    assert y.dtype is x.dtype
    return {name: t.detach().double() for name, t in {"y": y, "x": x.grad, "weights": weights.grad, **grads}.items()}


def clamp_with_inclusive_bounds(t, min=None, max=None):
    """``t.clamp(min, max)`` whose gradient passes where t is a bound itself, as that of torch before 2.14 does.

    Preactivations in bf16 are often exactly the limit. There fusedmoe lets the gradient pass with any torch.
    """
    if min is not None:
        t = torch.where(t < min, min, t)
    return t if max is None else torch.where(t > max, max, t)


@pytest.mark.parametrize(("family", "model_class"), DECORATED, ids=[c or f for f, c in DECORATED])
def test_experts_in_bf16_are_as_exact_as_eager(family, model_class, monkeypatch):
    """The experts alone: in a whole model a rounding sends a token to another expert, and eager's to a third."""
    module = build(family, "eager", torch.bfloat16, model_class).experts[0][1]
    torch.manual_seed(0)
    hidden = module.down_proj.shape[2 if module.is_transposed else 1]
    x = torch.randn(40, hidden).bfloat16()
    index = torch.rand(40, module.num_experts).topk(min(2, module.num_experts)).indices
    weights = torch.rand(index.shape).bfloat16()
    exact = through_experts(copy.deepcopy(module).double(), "eager", x.double(), index, weights.double())
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "clamp", clamp_with_inclusive_bounds)
        eager = through_experts(module, EXACT_EAGER.get(family, "eager"), x, index, weights)
    got = through_experts(module, "fusedmoe", x, index, weights)
    assert exact.keys() == got.keys()
    for name, want in exact.items():
        assert want.any(), f"{name}: zeros would pass"
        # one rounding of the result itself
        floor = torch.finfo(torch.bfloat16).eps / 2
        assert relative(got[name], want) <= max(1.5 * relative(eager[name], want), floor), name


@pytest.mark.parametrize("family", ["gemma4", "gpt_oss", "llama4", "nemotron_h", "qwen3_moe"])
def test_bf16_models(family):
    """The logits, of weights that are the same in fp64."""
    model = build(family, "eager", torch.bfloat16)
    wide = build(family, "eager", torch.float64)
    wide.model.load_state_dict(model.model.state_dict())
    with torch.no_grad():
        exact, its = moe_families.logits_and_loss(wide)[0], moe_families.logits_and_loss(model)[0].double()
        ours = moe_families.logits_and_loss(build(family, "fusedmoe", torch.bfloat16))[0].double()
    assert relative(ours, exact) <= 1.5 * relative(its, exact) < 0.3


@pytest.mark.parametrize("family", ["aria", "gemma4", "hunyuan_v1_moe", "jamba", "qwen3_moe"])
def test_a_plan_is_for_as_many_experts_per_token_as_the_model_chooses(family):
    """Families have their own names for that number in the configuration."""
    tiny = build(family, "fusedmoe", torch.float32)
    chosen = []
    for _, module in tiny.experts:
        module.register_forward_pre_hook(lambda _, args: chosen.append(args[1].shape[-1]))
    with torch.no_grad():
        tiny.model(**tiny.inputs)
    assert chosen
    assert {fusedmoe_transformers.top_k_of(module) for _, module in tiny.experts} == set(chosen)
