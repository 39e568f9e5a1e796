"""Slices of models train on text for hundreds of steps: fused and unfused experts have the same losses.

A wrong block of a weight gradient, or a buffer that is read before it is written, shows within a few steps.
"""

import functools
from dataclasses import replace

import pytest
import torch
from kit.hopper import needs_gpu

pytest.importorskip("transformers")

import fusedmoe as fm
from benchmarks.train import models, text
from benchmarks.train.steps import Job, train
from benchmarks.train.variants import Variant, made
from fusedmoe.integrations import transformers as integration

pytestmark = [needs_gpu, pytest.mark.filterwarnings("ignore")]  # those of transformers

STEPS, LAST, BOUND = 200, 20, 0.05  # BOUND: of the difference of the mean losses of the last steps
VOCABULARY, LENGTH = 4096, 256
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": LENGTH}
SLICES = {
    "qwen3": functools.partial(
        models.qwen3, 2, **SIZES, num_key_value_heads=4, head_dim=64, moe_intermediate_size=256, num_experts=32
    ),
    "olmoe": functools.partial(
        models.olmoe, 2, **SIZES, num_key_value_heads=8, intermediate_size=256, num_experts=16, num_experts_per_tok=4
    ),
    "gpt-oss": functools.partial(
        models.gpt_oss, 2, **SIZES, num_key_value_heads=4, head_dim=64, intermediate_size=256, num_local_experts=16
    ),
    "deepseek-v3": functools.partial(
        models.deepseek_v3, 3, **SIZES, num_key_value_heads=8, intermediate_size=512, moe_intermediate_size=256,
        n_routed_experts=32, num_experts_per_tok=4, q_lora_rank=128, kv_lora_rank=64,
    ),
}  # fmt: skip


def job(name):
    of = next(model for model in models.MODELS if model.name == name)
    attention = "eager" if name == "gpt-oss" else of.attention
    small = replace(of, config=SLICES[name], sequences=8, length=LENGTH, micro_batches=2, attention=attention, std=0.02)
    words = STEPS * small.tokens
    return Job.of_model(small, models.built(small, torch.device("cuda")), text.sequences(LENGTH, VOCABULARY, words))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("qwen3", "bf16"), ("gpt-oss", "bf16"), ("qwen3", "fp8_block"), ("olmoe", "fp8_tensor"),
     ("gpt-oss", "mxfp8"), ("deepseek-v3", "bf16"), ("deepseek-v3", "fp8_block")],
)  # fmt: skip
def test_losses_are_those_of_unfused_experts(name, recipe, record_property):
    of = job(name)
    torch.full((1 << 30,), float("nan"), dtype=torch.bfloat16, device="cuda")  # memory that the steps then reuse
    variant = Variant(recipe, "fusedmoe", routers=True, recipe=recipe)
    ready = made(variant, of.model)
    with fm.recipe(recipe):
        plan = str(integration.explain(ready.model.model.layers[-1].mlp.experts, tokens=of.of.tokens // 2))
    assert "FUSED" in plan
    assert "unfused" not in plan
    fused = train(of, ready, STEPS).losses
    with fm.disabled("*"):
        unfused = train(of, made(variant, of.model), STEPS).losses
    record_property("losses", [recipe, name, fused[:5], unfused[:5], mean(fused), mean(unfused)])
    assert unfused[0] - mean(unfused) > 2  # it learns
    assert fused[:5] == pytest.approx(unfused[:5], abs=0.02)
    assert mean(fused) == pytest.approx(mean(unfused), abs=BOUND)
    if recipe == "bf16":  # the bound is below the part of the losses that the experts contribute
        ready = made(Variant("bf16", "fusedmoe"), of.model)
        for module in ready.model.modules():
            if hasattr(module, "experts"):
                module.experts.register_forward_hook(lambda _module, _args, result: torch.zeros_like(result))
        without = mean(train(of, ready, STEPS).losses)
        record_property("without experts", without)
        assert without - mean(unfused) > BOUND


def mean(losses):
    return sum(losses[-LAST:]) / LAST
