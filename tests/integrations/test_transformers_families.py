"""Every family of Mixture-of-Experts models that the installed transformers has."""

import copy
import logging
import re
from collections import Counter

import pytest
import torch
from kit import moe_families
from kit.stand_in_experts import outcome
from torch import nn

import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.integrations.transformers import expert_modules

MODELS = [(family, None) for family in moe_families.family_names()] + moe_families.OTHER_MODELS
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
# whose configurations have their own names for the number of experts per token
OWN_TOP_K = {"aria", "gemma4", "hunyuan_v1_moe", "jamba", "qwen3_moe"}

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def asked(monkeypatch):
    """The experts modules that this package was called for, in order, and their numbers of experts per token."""
    calls = []
    experts_of = expert_modules.experts_of
    monkeypatch.setattr(fusedmoe_transformers, "experts_of", lambda module: calls.append(module) or experts_of(module))
    return calls


def build(family, implementation, model_class=None):
    given = None if family == "llama4" else implementation
    tiny = moe_families.tiny(family, given, torch.float64, model_class=model_class)
    if family == "llama4" and implementation == "fusedmoe":
        fusedmoe_transformers.patch_llama4(tiny.model)
    return tiny


def relative(got, want):
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm()).item() if want.any() else float(got.any())


@pytest.mark.parametrize(
    ("family", "model_class"),
    # quick: inkling2_loop has the layers of inkling2, one of them twice
    [pytest.param(f, c, marks=[pytest.mark.slow] if f == "inkling2" else [], id=c or f) for f, c in MODELS],
)
def test_as_exact_as_eager(family, model_class, asked, caplog):
    """The model in fp64, and one module of its experts in bf16."""
    eager = build(family, "eager", model_class)
    want = moe_families.step(eager)
    assert not asked
    assert {name for name, tensor in want.items() if not tensor.any()} == WITHOUT_GRADIENT.get(family, set())

    tiny = build(family, "fusedmoe", model_class)
    experts, chosen = [module for _, module in tiny.experts], set()
    for module in experts:
        module.register_forward_pre_hook(lambda _, args: chosen.add(args[1].shape[-1]))
    with caplog.at_level(logging.WARNING, "fusedmoe"):
        got = moe_families.step(tiny)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert relative(got[name], tensor) < (2e-6 if family in CASTS_TO_FLOAT32 else 1e-12), name
    for name, _ in tiny.experts:
        assert any(key.startswith(f"{name}.") for key in want), f"{name}: no gradients"
    shapes = {name: tensor.shape for name, tensor in eager.model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in tiny.model.state_dict().items()} == shapes

    calls = CALLS.get(family, (1,) * len(experts))
    assert Counter(map(id, asked)) == {id(module): n for module, n in zip(experts, calls, strict=True)}
    if family in OWN_TOP_K:
        assert {fusedmoe_transformers.top_k_of(module) for module in experts} == chosen
    activations = activations_of(experts)
    if family in ACTIVATIONS:
        assert activations == {ACTIVATIONS[family]}
    elif isinstance(experts[0].act_fn, nn.SiLU) or type(experts[0].act_fn).__name__ == "SiLUActivation":
        assert activations == {"SwiGLU()"}
    said = [record for record in caplog.records if "runs unfused" in record.getMessage()]
    assert len(said) == ("ModelFunction()" in activations)
    if family != "llama4":
        experts_in_bf16_are_as_exact_as_eager(family, eager.experts[0][1].bfloat16())


def activations_of(experts):
    """Their ops; a limit is that of the model."""
    chains = [module.__dict__[expert_modules.OPS].chain for module in experts]
    limits = {getattr(chain.activation, "limit", None) for chain in chains}
    assert limits <= {None, getattr(experts[0], "limit", None), getattr(experts[0], "swiglu_limit", None)}
    return {re.sub(r"limit=[\d.]+", "limit=its own", repr(chain.activation)) for chain in chains}


def experts_in_bf16_are_as_exact_as_eager(family, module):
    """The experts alone: in a whole model a rounding sends a token to another expert, and eager's to a third."""
    hidden = module.down_proj.shape[2 if module.is_transposed else 1]
    x = torch.randn(40, hidden).bfloat16()
    index = torch.rand(40, module.num_experts).topk(min(2, module.num_experts)).indices
    weights = torch.rand(index.shape).bfloat16()

    def through(module, implementation, x, weights):
        module.config = copy.copy(module.config)
        module.config._experts_implementation = implementation
        found = outcome(lambda m, *given: m(*given), module, x, index, weights)
        assert found["y"].dtype is x.dtype
        return found

    exact = through(copy.deepcopy(module).double(), "eager", x.double(), weights.double())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "clamp", clamp_with_inclusive_bounds)
        eager = through(module, EXACT_EAGER.get(family, "eager"), x, weights)
    got = through(module, "fusedmoe", x, weights)
    assert exact.keys() == got.keys()
    for name, want in exact.items():
        assert want.any(), f"{name}: zeros would pass"
        floor = torch.finfo(torch.bfloat16).eps / 2  # one rounding of the result itself
        assert relative(got[name], want) <= max(1.5 * relative(eager[name], want), floor), name


def clamp_with_inclusive_bounds(t, min=None, max=None):
    """``t.clamp(min, max)`` whose gradient passes where t is a bound itself, as that of torch before 2.14 does.

    Preactivations in bf16 are often exactly the limit. There fusedmoe lets the gradient pass with any torch.
    """
    if min is not None:
        t = torch.where(t < min, min, t)
    return t if max is None else torch.where(t > max, max, t)


def test_there_are_families():
    assert {"gemma4", "gpt_oss", "llama4", "mixtral", "nemotron_h", "qwen3_moe"} <= {family for family, _ in MODELS}
