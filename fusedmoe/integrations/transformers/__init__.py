"""Experts for Hugging Face transformers: `register` adds ``experts_implementation="fusedmoe"``.

    import fusedmoe.integrations.transformers as fusedmoe_transformers

    fusedmoe_transformers.register()
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", experts_implementation="fusedmoe")

Parameters, ``state_dict``, router and auxiliary losses do not change.

- `register_expert_parallel` lets `ExpertParallel` exchange the tokens of a model that transformers shards.
- `patch_routers` runs the model's routers in one chain with the experts, where `Router` chooses the same experts.
- The function between the two products of the experts is fused if `gates` recognises it; otherwise it runs unfused.
- Llama-4's experts are not in transformers' experts interface; use `patch_llama4`.
- `patch_dense` runs dense MLPs and shared experts with the kernels too.
- Experts of FP8 checkpoints (``FP8Experts`` with blocks of 128x128) run on the weights as they are stored. The weights
  are frozen.
- transformers runs experts with other quantized weights, such as tensor subclasses of torchao, without fusedmoe.

One WARNING reports each unfused function and each class of experts that transformers runs.

Source of the interface: ``transformers.integrations.moe``, transformers 5.7 and later.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.base.checks import FLAG, MODULE, POSITIVE_INTEGER, TEXT
from fusedmoe.base.errors import InputError
from fusedmoe.base.extras import install_command
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.expert_parallel.group import OverflowPolicy
from fusedmoe.fusion.report.data import Explanation
from fusedmoe.integrations.transformers import expert_modules, routers
from fusedmoe.integrations.transformers.dense import patch_dense as patch_dense
from fusedmoe.integrations.transformers.dense import unpatch_dense as unpatch_dense
from fusedmoe.integrations.transformers.expert_modules import (
    RANKS,
    TOP_K,
    experts_of,
    is_llama4,
    is_quantized,
    layout_of,
    number_of_all_experts,
    number_of_experts,
    parameters_of,
    runs_as_stock,
)
from fusedmoe.integrations.transformers.expert_modules import top_k_of as top_k_of
from fusedmoe.integrations.transformers.router_kinds import class_in_transformers
from fusedmoe.layers.explain_model import register_explainer, register_reason_for_router
from fusedmoe.ops import Op

NAME = "fusedmoe"


def register(name: str = NAME) -> None:
    """Add ``experts_implementation=name`` to transformers: ``from_pretrained``, ``from_config`` and
    ``model.set_experts_implementation`` accept it. Repeated calls have no effect.

    Raises `ImportError`: transformers is not installed, or older than 5.7.
    """
    TEXT("register: name", name)
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        raise ImportError(f"register() needs transformers 5.7 or newer: {install_command('transformers')}") from error

    ExpertsInterface.register(name, experts_forward)
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    except ImportError:  # not a public name
        return
    FP8ExpertsInterface.register(name, experts_forward)


def register_expert_parallel(
    name: str = NAME,
    engine: str = "auto",
    *,
    max_tokens: int | None = None,
    capacity: float | None = None,
    overflow: OverflowPolicy = "raise",
    combine_dtype: torch.dtype | None = None,
    dispatch_dtype: torch.dtype | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Add ``ep_implementation=name`` to transformers' ``DistributedConfig``: `ExpertParallel` exchanges the tokens.

    Call `register` too, and load the model with the experts implementation that it adds. A model is loaded with the
    settings of the last call for this name.

        DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="fusedmoe")

    The ranks that share the experts exchange their tokens. With ``tp_size`` over 1, ``tp_size`` ranks hold the same
    tokens, and each of them exchanges a slice of these. transformers shards the experts and averages their gradients.

    Raises `ImportError`: transformers has no registry of expert parallelism; 5.24 has one. `ExpertParallel` checks the
    settings when a model is loaded.

    Parameters
    ----------
    name
        Name of the implementation.
    engine, max_tokens, capacity, overflow, combine_dtype, dispatch_dtype, timeout_s
        As for `ExpertParallel`. The tokens of a rank are those of its slice.
    """
    TEXT("register_expert_parallel: name", name)
    try:
        # here, since it imports transformers
        from fusedmoe.integrations.transformers import expert_parallel
    except ImportError as error:
        raise ImportError(
            "register_expert_parallel() needs a transformers with EPImplementationInterface, such as 5.24: "
            f"{install_command('transformers')}"
        ) from error
    settings = {
        "engine": engine, "max_tokens": max_tokens, "capacity": capacity, "overflow": overflow,
        "combine_dtype": combine_dtype, "dispatch_dtype": dispatch_dtype, "timeout_s": timeout_s,
    }  # fmt: skip
    expert_parallel.add(name, settings, runs_here)


def expert_parallel_of(model: nn.Module) -> ExpertParallel | None:
    """Return the `ExpertParallel` of a model's experts, for its `check` and `dropped`; None if they have none.

    The layers of a model count slots without a row together.
    """
    found = (vars(module).get(RANKS) for module in MODULE("expert_parallel_of: model", model).modules())
    return next((ranks for ranks in found if ranks is not None), None)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: object, **kwargs: object
) -> Tensor:
    """``y[t] = sum over k of w[t, k] * expert[index[t, k]](x[t])``; transformers calls it as the experts' forward.

    Returns (T, H), in the dtype of ``hidden_states``.

    Parameters
    ----------
    self
        The experts module, of a class with transformers' decorator ``use_experts_implementation``.
    hidden_states
        (T, H).
    top_k_index
        (T, K) integers; ``num_experts`` for a slot of another rank. With `register_expert_parallel`, the experts of all
        ranks.
    top_k_weights
        (T, K).
    """
    if args or kwargs:
        raise InputError(
            f"{type(self).__name__}: expected hidden_states, top_k_index and top_k_weights, "
            f"got {len(args)} more and {', '.join(kwargs) or 'no others by name'}"
        )
    experts = experts_of(self)
    if experts.stock is not None:
        return experts.stock(self, hidden_states, top_k_index, top_k_weights)
    parameters = parameters_of(self, experts.layout)
    x = hidden_states
    if not (experts.layout.fp8 or torch.is_autocast_enabled(x.device.type)):
        x = x.to(parameters["down.weight"].dtype)  # type: ignore[union-attr]
    y = experts.chain.forward_with(parameters, x, expert_index=top_k_index, expert_weight=top_k_weights)
    return y.to(hidden_states.dtype)


def explain(
    module: nn.Module, tokens: int = 4096, top_k: int | None = None, arch: int | str | None = None
) -> Explanation:
    """Return the plan of an experts module for ``tokens`` evenly routed tokens, with a router that is patched.

    Raises `InputError`: fusedmoe cannot run the module, or K is unknown.

    Parameters
    ----------
    module
        An experts module, as in `experts_forward`.
    tokens
        T.
    top_k
        K; by default the model configuration's.
    arch
        Architecture, as for `Sequential.explain`: 90 for an sm_90 GPU.
    """
    tokens, top_k = POSITIVE_INTEGER("explain: tokens", tokens), POSITIVE_INTEGER.or_none()("explain: top_k", top_k)
    experts = experts_of(module)
    if experts.stock is not None:
        raise InputError(runs_as_stock(module, experts.layout))
    parameters = parameters_of(module, experts.layout)
    weight = parameters["down.weight"]
    assert weight is not None
    number = number_of_experts(module)
    if len(weight) != number:
        raise InputError(
            f"{type(module).__name__}: expected weights of {number} experts, got {len(weight)}: plan before sharding, "
            f"since a call gathers sharded weights"
        )
    chosen = top_k or top_k_of(module)
    if chosen is None:
        raise InputError(
            f"{type(module).__name__}: top_k: expected the number of experts per token, got None, and the model's "
            f"configuration has none of {', '.join(TOP_K)}"
        )
    kind = weight.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    how: dict[str, Any] = {"device": weight.device, "requires_grad": torch.is_grad_enabled()}
    dtype = torch.get_autocast_dtype(kind) if autocast else _dtype_of_rows(module, weight)
    x = torch.zeros(tokens, weight.shape[1], dtype=dtype, **how)
    slots = torch.arange(tokens * chosen, device=weight.device).view(tokens, chosen)
    weights = torch.ones(tokens, chosen, dtype=torch.float32, **how)
    routed: dict[str, Any] = {
        "arch": arch,
        "expert_index": slots % number_of_all_experts(module),
        "expert_weight": weights,
    }
    with_router = routers.explained(module, experts, x, **routed)
    return with_router or experts.chain.explain_with(parameters, x, **routed)


def _dtype_of_rows(module: nn.Module, weight: Tensor) -> torch.dtype:
    """Return the dtype of a call's rows: the weight's, or for weights in FP8 that of the model's configuration."""
    if weight.dtype.itemsize > 1:
        return weight.dtype
    found = getattr(getattr(module, "config", None), "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def recognised(module: nn.Module) -> Op | None:
    """Return the op of the function between the products of an experts module; None if it is not recognised.

    See `fusedmoe.integrations.transformers.gates.recognise`.
    """
    return expert_modules.recognised(module, layout_of(module))


def runs_here(module: nn.Module) -> bool:
    """Whether `experts_forward` is the forward of a module."""
    if _is_partial_of(vars(module).get("forward"), (experts_forward,)):
        return True
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if name is None or not hasattr(module, "is_transposed"):  # an attribute that the decorator sets
        return False
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_EXPERTS_FUNCTIONS.get(name) is experts_forward


@register_explainer
def _explained(module: nn.Module, tokens: int) -> Explanation | None:
    return explain(module, tokens) if runs_here(module) else None


# ---- routers -----------------------------------------------------------------------------------------------------


def patch_routers(model: nn.Module, *, fp32_logits: bool = False) -> int:
    """Run the routers of a model as `fusedmoe.Router`, in one chain with the experts that follow; return their number.

    A router is patched if `Router` chooses the same experts with the same weights: it is in a table of transformers'
    classes, and agrees with `Router` on numbers. Such routers compute their logits in fp32, as DeepSeek-V3's does. A
    WARNING names each class that is left as it is, with the reason, and ``fm.explain(model)`` does.

    The router is still called as a module of the model, with its own parameters: hooks, recorded ``router_logits``,
    losses and the ``state_dict`` do not change. Logits and weights are fp32. A router runs as before under
    `torch.autocast`, in fp64, with DTensors, and after a change of its settings or of its weight's shape. The experts
    run in a chain of their own while they do not run on `fusedmoe`, or have hooks, adapters or another dtype, or the
    router has forward hooks other than those of transformers.

    Repeated calls have no effect. `unpatch_routers` restores the model.

    Raises `InputError`: the model has no router next to experts, or other code has replaced a ``forward``.

    Parameters
    ----------
    model
        A model of transformers.
    fp32_logits
        Patch also the routers that compute their logits in the dtype of the model, such as Qwen3-MoE's. `Router`
        computes them in fp32, and so chooses other experts for some tokens of a model in bf16.
    """
    fp32_logits = FLAG("patch_routers: fp32_logits", fp32_logits)
    return routers.patch(MODULE("patch_routers: model", model), fp32_logits, runs_here)


def unpatch_routers(model: nn.Module) -> int:
    """Undo `patch_routers`; return the number of routers."""
    return routers.unpatch(MODULE("unpatch_routers: model", model))


@register_reason_for_router
def _why_own_router(router: nn.Module) -> str | None:
    return routers.why_own(router) if class_in_transformers(router) is not None else None


# ---- Llama-4 ------------------------------------------------------------------------------------------------------


def patch_llama4(model: nn.Module) -> int:
    """Run only the chosen experts in every ``Llama4TextMoe`` of a model; return the number of these layers.

    A layer computes ``y = shared_expert(x) + sum over k of expert[k](x * s[k])`` with the router's scores s. Unpatched,
    it runs every expert on every token, most of them on zeros. Repeated calls have no effect. `unpatch_llama4` restores
    the model.

    Raises `InputError`: the model has no such layer, a layer's experts are quantized, or other code has replaced a
    ``forward``.
    """
    layers = _llama4_layers(MODULE("patch_llama4: model", model))
    if not layers:
        raise InputError(f"patch_llama4: expected a model with Llama4TextMoe layers, got {type(model).__name__}")
    ours = (_llama4_forward, experts_forward)
    for name, layer in layers:
        if not is_llama4(layer.experts) or is_quantized(layer.experts):
            got = "quantized ones" if is_llama4(layer.experts) else type(layer.experts).__name__
            raise InputError(f"patch_llama4: {name}.experts: expected unquantized Llama4TextExperts, got {got}")
        for module in (layer, layer.experts):
            replaced = vars(module).get("forward")
            if replaced is not None and not _is_partial_of(replaced, ours):
                raise InputError(f"patch_llama4: the forward of {name!r} was already replaced, by {replaced!r}")
    for _, layer in layers:
        # partials, since copies and pickles of them refer to the copied module
        layer.forward = functools.partial(_llama4_forward, layer)
        layer.experts.forward = functools.partial(experts_forward, layer.experts)
        layer.experts.num_experts_per_tok = layer.top_k  # the experts have no configuration
    return len(layers)


def unpatch_llama4(model: nn.Module) -> int:
    """Undo `patch_llama4`; return the number of layers."""
    undone = 0
    for _, layer in _llama4_layers(MODULE("unpatch_llama4: model", model)):
        if _is_partial_of(vars(layer).get("forward"), (_llama4_forward,)):
            del layer.forward, layer.experts.forward, layer.experts.num_experts_per_tok
            undone += 1
    return undone


def _llama4_layers(model: nn.Module) -> list[tuple[str, Any]]:
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    return [(name, module) for name, module in model.named_modules() if isinstance(module, Llama4TextMoe)]


def _is_partial_of(function: object, functions: tuple[object, ...]) -> bool:
    return isinstance(function, functools.partial) and function.func in functions


def _llama4_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer's output (T, H) and the router's logits (T, E)."""
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)  # (T, E); zero for experts that are not chosen
    weights, index = scores.topk(self.top_k, dim=-1)
    return self.shared_expert(x) + self.experts(x, index, weights), logits
