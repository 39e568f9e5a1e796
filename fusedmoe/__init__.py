"""Fused kernels for training Mixture-of-Experts models: compose small ops, run the fewest kernels, see every decision.

import fusedmoe as fm

experts = fm.Sequential(fm.GroupedLinear(8, 512, 2 * 256), fm.SwiGLU(), fm.GroupedLinear(8, 256, 512))
y = experts(x, splits=tokens_per_expert)
print(experts.explain(x, splits=tokens_per_expert))
"""

from fusedmoe.base.aliases import earlier_name as __getattr__  # noqa: F401
from fusedmoe.base.aliases import install as _install_aliases
from fusedmoe.base.environment import check as _check_environment
from fusedmoe.base.environment import configure_logging as _configure_logging
from fusedmoe.base.errors import InputError
from fusedmoe.builtin_rules import BUILTIN as _BUILTIN_RULES
from fusedmoe.call.settings import disabled, recipe, strict
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.fusion.language.registry import register, rules
from fusedmoe.fusion.language.rule import FusionError, FusionRule, PlanContext, RuleError, Step, require
from fusedmoe.fusion.report.data import Attempt, Explanation, PlanData, PlannedStep, Status
from fusedmoe.layers.explain_model import ModelExplanation, explain
from fusedmoe.layers.loading import load_experts
from fusedmoe.layers.lora import GroupedLoRA
from fusedmoe.layers.losses import transformers_load_balancing_loss
from fusedmoe.layers.moe import MoE, MoEStats
from fusedmoe.layers.plotting import plot_expert_load
from fusedmoe.layers.precision import keep_in_bf16
from fusedmoe.layers.sequential import Sequential
from fusedmoe.numerics import formats, recipes
from fusedmoe.numerics.formats import QuantizedTensor, Quantizer, quantize
from fusedmoe.numerics.recipes import Recipe
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
    "formats",
    "keep_in_bf16",
    "load_experts",
    "plot_expert_load",
    "quantize",
    "recipe",
    "recipes",
    "register",
    "require",
    "rules",
    "strict",
    "transformers_load_balancing_loss",
    "weight_cache_bytes",
]

_install_aliases()
_configure_logging()
_check_environment()
register(*_BUILTIN_RULES)
