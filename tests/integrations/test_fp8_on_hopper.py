"""Every way into ``fp8_block`` is planned with the FP8 kernels of Hopper, on a machine without a GPU.

tests/gpu/test_fp8_training.py runs such layers.
"""

import importlib

import pytest
import torch
import transformers
from kit.fp8_layers import RECIPES, assert_products_are_fp8, rules
from kit.fp8_models import fp8_model
from kit.megatron_core import megatron_core
from kit.torchtitan_models import imported

import fusedmoe as fm
from fusedmoe.integrations.megatron import FusedGroupedMLP

BF16 = torch.bfloat16
E, H, I = 8, 256, 128  # noqa: E741
EACH = pytest.mark.parametrize("recipe", RECIPES)


def plan_of(model):
    (group,) = fm.explain(model, tokens=512, arch=90).groups
    (plan,) = group.explanation.plans
    return plan


@EACH
@pytest.mark.usefixtures("registered")
def test_transformers(recipe):
    config = transformers.Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=2, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=256, intermediate_size=256,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16, experts_implementation="fusedmoe")
    with fm.recipe(recipe):
        assert_products_are_fp8(plan_of(model), recipe)


@EACH
def test_torchtitan(recipe):
    config = imported("torchtitan.models.common.moe").GroupedExperts.Config(dim=H, hidden_dim=I, num_experts=E)
    module = importlib.import_module("fusedmoe.integrations.torchtitan").experts(config, recipe=recipe).build()
    (plan,) = module.explain_rows(512, arch=90).plans
    assert_products_are_fp8(plan, recipe)


@EACH
def test_megatron(recipe):
    megatron = megatron_core()
    config = megatron.transformer_config(
        activation_func=torch.nn.functional.silu, gated_linear_unit=True, hidden_size=H, moe_ffn_hidden_size=I,
        num_moe_experts=E, add_bias_linear=False, use_cpu_initialization=True, params_dtype=BF16,
    )  # fmt: skip
    groups = megatron.ProcessGroupCollection()
    with fm.disabled("sm90.activation", "sm90.dactivation"):  # with few rows, they take fewer launches
        (plan,) = FusedGroupedMLP(E, config, pg_collection=groups, recipe=recipe).explain_rows(512, arch=90).plans
    assert_products_are_fp8(plan, recipe)


@pytest.mark.usefixtures("registered")
def test_an_fp8_checkpoint_of_transformers():
    tiny = fp8_model("qwen3_moe", BF16, hidden_size=H, moe_intermediate_size=I)
    with fm.recipe("fp8_block"):
        plan = plan_of(tiny.model)
    assert not plan.unfused, str(plan)
    assert {"sm90.fp8_grouped_gemm_activation", "sm90.fp8_grouped_gemm", "sm90.fp8_grouped_dgrad"} <= set(rules(plan))
    assert not {rule for rule in rules(plan) if "wgrad" in rule or "quantize_weight" in rule}
