"""Megatron-Core's functions and configuration, and process groups that are numbers alone."""

import importlib.util
import sys
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest


@dataclass
class Group:
    """A process group, as far as it says how many ranks there are and which one this is."""

    ranks: int = 1
    of: int = 0

    def size(self):
        return self.ranks

    def rank(self):
        return self.of


def _import():
    """Import Megatron-Core, without Transformer Engine where that cannot be imported."""
    modules = ["activations", "process_groups_config", "transformer.transformer_config", "transformer.moe.experts"]
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (ImportError, RuntimeError):  # its package without a framework raises the latter
            patch.setitem(sys.modules, "transformer_engine", None)
        return [importlib.import_module(f"megatron.core.{name}") for name in modules]


def megatron_core():
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron-Core is not installed")
    activations, groups, config, experts = _import()

    def transformer_config(**settings):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return config.TransformerConfig(**{"num_layers": 1, "num_attention_heads": 4} | settings)

    def process_groups(ep=None, expt_tp=None, expt_dp=None):
        collection = groups.ProcessGroupCollection()
        for name, group in (("ep", ep), ("expt_tp", expt_tp), ("expt_dp", expt_dp)):
            setattr(collection, name, group or Group())
        return collection

    return SimpleNamespace(
        squared_relu=activations.squared_relu, quick_gelu=activations.quick_gelu,
        transformer_config=transformer_config, ProcessGroupCollection=process_groups,
        SequentialMLP=experts.SequentialMLP,
    )  # fmt: skip
