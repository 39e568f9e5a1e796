"""What `fusedmoe.integrations.torchtitan` uses of torchtitan 0.3, by the same names: configurations that build modules,
experts with their parameters, overrides by target. Nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import nn


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
