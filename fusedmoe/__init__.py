"""Fused kernels for training Mixture-of-Experts models: compose small ops, run the fewest kernels, see every decision.

import fusedmoe as fm

experts = fm.Sequential(fm.GroupedLinear(8, 512, 2 * 256), fm.SwiGLU(), fm.GroupedLinear(8, 256, 512))
y = experts(x, splits=tokens_per_expert)
print(experts.explain(x, splits=tokens_per_expert))
"""

from fusedmoe.builtin_rules import BUILTIN as _BUILTIN_RULES
from fusedmoe.environment import check as _check_environment
from fusedmoe.environment import configure_logging as _configure_logging
from fusedmoe.errors import InputError
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.explain_model import ModelExplanation, explain
from fusedmoe.formats import QuantizedTensor, Quantizer, quantize
from fusedmoe.fusion.plan import Attempt, Explanation, PlanData, PlannedStep, Status
from fusedmoe.fusion.registry import register, rules
from fusedmoe.fusion.rule import FusionError, FusionRule, PlanContext, RuleError, Step, require
from fusedmoe.layers import keep_in_bf16
from fusedmoe.loading import load_experts
from fusedmoe.lora import GroupedLoRA
from fusedmoe.losses import transformers_load_balancing_loss
from fusedmoe.moe import MoE, MoEStats
from fusedmoe.ops import (
    BackwardOp,
    Combine,
    Dispatch,
    GeGLU,
    GroupedLinear,
    Linear,
    Op,
    Quantize,
    ReGLU,
    Router,
    Scale,
    SquaredReLU,
    SwiGLU,
    TensorSpec,
    clear_weight_cache,
    weight_cache_bytes,
)
from fusedmoe.plotting import plot_expert_load
from fusedmoe.recipes import Recipe
from fusedmoe.sequential import Sequential
from fusedmoe.settings import disabled, recipe, strict
from fusedmoe.version import __version__ as __version__

__all__ = [
    "Attempt",
    "BackwardOp",
    "Combine",
    "Dispatch",
    "ExpertParallel",
    "Explanation",
    "FusionError",
    "FusionRule",
    "GeGLU",
    "GroupedLinear",
    "GroupedLoRA",
    "InputError",
    "Linear",
    "MoE",
    "MoEStats",
    "ModelExplanation",
    "Op",
    "PlanContext",
    "PlanData",
    "PlannedStep",
    "Quantize",
    "QuantizedTensor",
    "Quantizer",
    "ReGLU",
    "Recipe",
    "Router",
    "RuleError",
    "Scale",
    "Sequential",
    "SquaredReLU",
    "Status",
    "Step",
    "SwiGLU",
    "TensorSpec",
    "clear_weight_cache",
    "disabled",
    "explain",
    "keep_in_bf16",
    "load_experts",
    "plot_expert_load",
    "quantize",
    "recipe",
    "register",
    "require",
    "rules",
    "strict",
    "transformers_load_balancing_loss",
    "weight_cache_bytes",
]

_configure_logging()
_check_environment()
register(*_BUILTIN_RULES)
