"""What `fusedmoe.integrations.torchtitan` uses of torchtitan 0.3, by the same names: configurations that build modules,
experts with their parameters, overrides by target. Nothing of it computes. `exact_expert` does, for both classes.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from kit.framework_oracle import swiglu

LIMIT = 0.5  # of GPT-OSS's activation: low enough that many values are beyond it
KINDS = ["GroupedExperts", "GptOssGroupedExperts"]


def imported(module):
    """A module of torchtitan's; without its kernels in Triton, which no test here runs, where there is no Triton."""
    pytest.importorskip("torchtitan")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("triton") is None:
            patch.setitem(sys.modules, "torchtitan.distributed.minimal_async_ep.kernels", MagicMock())
        return pytest.importorskip(module, exc_type=ImportError)  # parts of it want a newer torch than 2.11


def exact_expert(parameters):
    """`expert(e, rows)` of torchtitan's formulas, from all parameters by name."""
    p = parameters

    def plain(e, r):
        return swiglu(r @ p["w1_EFD"][e].T, r @ p["w3_EFD"][e].T) @ p["w2_EDF"][e].T

    def gpt_oss(e, r):
        both = r @ p["mlp1_weight_EGD"][e].T + p["mlp1_bias_EG"][e]
        hidden = swiglu(both[:, ::2], both[:, 1::2], LIMIT, 1.702, 1.0)
        return hidden @ p["mlp2_weight_EDF"][e].T + p["mlp2_bias_ED"][e]

    return plain if "w1_EFD" in p else gpt_oss


def filled(module, dtype=torch.float32):
    """The module with values that bf16 holds exactly, so that an exact result is of the very same numbers."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_((0.3 * torch.randn(parameter.shape, generator=generator)).bfloat16())
    return module.to(dtype)


class Module(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        param_init: dict[str, Any] | None = None
        sharding_config: Any = None
        _owner: ClassVar[Any] = None

        def build(self):
            return self._owner(config=replace(self))

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            cls.Config._owner = cls


class GroupedExperts(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        hidden_dim: int
        num_experts: int

    def __init__(self, config):
        super().__init__()
        experts, dim, hidden_dim = config.num_experts, config.dim, config.hidden_dim
        self.num_experts = experts
        self.w1_EFD = nn.Parameter(torch.empty(experts, hidden_dim, dim))
        self.w2_EDF = nn.Parameter(torch.empty(experts, dim, hidden_dim))
        self.w3_EFD = nn.Parameter(torch.empty(experts, hidden_dim, dim))


class GptOssGroupedExperts(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        swiglu_limit: float = 7.0

    def __init__(self, config):
        Module.__init__(self)
        experts, dim, hidden_dim = config.num_experts, config.dim, config.hidden_dim
        self.mlp1_weight_EGD = nn.Parameter(torch.empty(experts, 2 * hidden_dim, dim))
        self.mlp1_bias_EG = nn.Parameter(torch.empty(experts, 2 * hidden_dim))
        self.mlp2_weight_EDF = nn.Parameter(torch.empty(experts, dim, hidden_dim))
        self.mlp2_bias_ED = nn.Parameter(torch.empty(experts, dim))


GptOssGroupedExperts.Config.__module__ = "torchtitan.models.gpt_oss.moe"

OVERRIDES: dict[str, Any] = {}


def override(*, target, fqns=None, description="", exact=False):
    def register(factory):
        OVERRIDES[f"{factory.__module__}.{factory.__name__}"] = target, factory
        return factory

    return register


def derive(source, target, **changes):
    shared = {f.name for f in fields(source)} & {f.name for f in fields(target)}
    return target(**{name: getattr(source, name) for name in shared} | changes)


MODULES = {
    "torchtitan.config.override": {"override": override, "derive": derive},
    "torchtitan.models.common.moe": {"GroupedExperts": GroupedExperts},
    "torchtitan.models.gpt_oss.moe": {"GptOssGroupedExperts": GptOssGroupedExperts},
}
