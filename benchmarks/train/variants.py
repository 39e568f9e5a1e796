"""The variants of a model: its experts, routers, recipe, other kernels, and `torch.compile`. They share parameters."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

import fusedmoe as fm
from benchmarks.peers.sonic import sonic_modules


@dataclass(frozen=True)
class Variant:
    """A way to run a model.

    Attributes
    ----------
    name : str
        Its name in the tables.
    experts : str
        transformers' name of an experts implementation, or ``"liger"``.
    routers : bool
        Whether `patch_routers` has put the routers into one chain with the experts.
    recipe : str
        The recipe of the experts.
    liger : bool
        Whether Liger's kernels compute norms, rotary embeddings and the loss.
    compiled, checkpointed : bool
        Whether the model runs under `torch.compile`, and recomputes each layer in backward.
    """

    name: str
    experts: str
    routers: bool = False
    recipe: str = "bf16"
    liger: bool = False
    compiled: bool = False
    checkpointed: bool = False


STOCK, STOCK_COMPILED = "stock", "stock, compiled"
OURS, OURS_COMPILED = "fusedmoe + routers", "fusedmoe + routers, compiled"
VARIANTS = (
    Variant(STOCK, "grouped_mm"),
    Variant("fusedmoe", "fusedmoe"),
    Variant(OURS, "fusedmoe", routers=True),
    Variant("fusedmoe + routers, `fp8_block`", "fusedmoe", routers=True, recipe="fp8_block"),
    Variant("SonicMoE", "sonicmoe"),
    Variant("stock, Liger for the rest", "grouped_mm", liger=True),
    Variant("fusedmoe + routers, Liger for the rest", "fusedmoe", routers=True, liger=True),
    Variant("stock, checkpointed", "grouped_mm", checkpointed=True),
    Variant("fusedmoe + routers, checkpointed", "fusedmoe", routers=True, checkpointed=True),
    Variant(STOCK_COMPILED, "grouped_mm", compiled=True),
    Variant("fusedmoe, compiled", "fusedmoe", compiled=True),
    Variant(OURS_COMPILED, "fusedmoe", routers=True, compiled=True),
    Variant(f"{OURS}, `fp8_block`, compiled", "fusedmoe", routers=True, recipe="fp8_block", compiled=True),
    Variant("Liger, its experts too", "liger", liger=True),  # the last one: it tunes its kernels for minutes
)


@dataclass(frozen=True)
class Ready:
    """A variant that can be called, and the context of its forward and backward passes."""

    model: nn.Module
    call: Callable[..., Any]
    context: Callable[[], AbstractContextManager[Any]]


def made(variant: Variant, model: nn.Module) -> Ready:
    """Return a variant of `model` that shares its parameters and buffers."""
    from fusedmoe.integrations.transformers import patch_routers, register

    register()
    shared = [*model.parameters(), *model.buffers()]
    own: Any = copy.deepcopy(model, {id(one): one for one in shared})
    if variant.experts == "sonicmoe":
        _provide_sonic()
    if variant.experts != "liger":
        own.set_experts_implementation(variant.experts)
    patches = _apply_liger(own, variant.experts == "liger") if variant.liger else nullcontext
    if variant.routers:
        patch_routers(own, fp32_logits=True)
    if variant.checkpointed:
        own.gradient_checkpointing_enable({"use_reentrant": False})
    own.train()

    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(patches())
            stack.enter_context(fm.recipe(variant.recipe))
            yield

    return Ready(own, torch.compile(own) if variant.compiled else own, context)


def _provide_sonic() -> None:
    """Let transformers' implementation call the installed, tuned SonicMoE instead of a download of the same code."""
    from transformers.integrations import sonicmoe as integration

    sonic = sonic_modules()
    sonic.use(True)
    integration._SONICMOE = integration.SonicMoE(sonic.activations, sonic.functional.moe_general_routing_inputs)


def _apply_liger(model: Any, experts: bool) -> Callable[[], AbstractContextManager[None]]:
    """Apply Liger's kernels to one model; return the context in which the names that Liger replaces are replaced.

    Liger replaces methods of the model, and names of the module that defines it. Other variants use the same module.
    """
    from liger_kernel.transformers import monkey_patch

    name = f"apply_liger_kernel_to_{model.config.model_type}"
    if not hasattr(monkey_patch, name):
        raise NotImplementedError(f"Liger has no kernels for {model.config.model_type}")
    module = sys.modules[type(model).__module__]
    before = dict(vars(module))
    try:
        getattr(monkey_patch, name)(model=model, swiglu=experts)
    finally:  # also after an error, so that no other variant runs with Liger's names
        replaced = {name: value for name, value in vars(module).items() if name in before and before[name] is not value}
        _set(module, {name: before[name] for name in replaced})

    @contextmanager
    def patched() -> Iterator[None]:
        _set(module, replaced)
        try:
            yield
        finally:
            _set(module, {name: before[name] for name in replaced})

    return patched


def _set(module: ModuleType, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(module, name, value)
