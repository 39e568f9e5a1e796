"""Experts for Megatron-Core: a builder for ``MoESubmodules(experts=...)``.

    from fusedmoe.integrations.megatron import FusedGroupedMLP

    submodules = MoESubmodules(experts=FusedGroupedMLP, shared_experts=...)
    submodules = MoESubmodules(experts=ModuleSpec(module=FusedGroupedMLP, params={"recipe": "mxfp8"}), ...)

`FusedGroupedMLP` replaces ``TEGroupedMLP``; router, dispatcher and shared experts remain Megatron's. Its distributed
checkpoints, optimizer state included, are interchangeable with those of ``TEGroupedMLP`` and ``SequentialMLP``. Its
``state_dict()`` has the names of ``TEGroupedMLP``: ``linear_fc1.weight0`` and so on. In memory, each layer has one
parameter for all experts, as with Megatron's ``moe_single_grouped_weight``.

Megatron is imported when experts are built. Source of the interface: ``megatron.core.transformer.moe``, Megatron-Core
0.16 to 0.20.

Axes: R rows, E experts of this rank, H hidden, I intermediate.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmoe.base.errors import InputError
from fusedmoe.fusion.report.data import Explanation
from fusedmoe.integrations.megatron.checkpoint import LAYERS, sharded_state_dict, split_by_expert, stack_experts
from fusedmoe.layers.explain_model import even_splits, register_reason_for_router
from fusedmoe.layers.sequential import Sequential
from fusedmoe.ops import GeGLU, GroupedLinear, Op, ReGLU, Scale, SquaredReLU, SwiGLU

_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}  # by `moe_router_dtype`; otherwise the rows' dtype


class FusedGroupedMLP(nn.Module):
    """``y[r] = (act(x[r] @ W1[e].T + b1[e]) * p[r]) @ W2[e].T + p[r] * b2[e]`` for each row r of expert e.

    The configuration defines ``act``:

    - with ``gated_linear_unit``, ``f(min(g, c)) * (clamp(u, -c, c) + offset)`` of the halves g and u, where f is
      ``F.silu``, ``F.gelu``, ``F.relu`` or Megatron's ``quick_gelu``, c is ``activation_func_clamp_value`` and offset
      is ``glu_linear_offset``;
    - without it, Megatron's ``squared_relu``.

    With ``moe_apply_probs_on_input``, p multiplies x instead. ``add_bias_linear`` adds biases.

    Raises `InputError`: the configuration has an unsupported setting: expert tensor parallelism, another activation,
    quantization without a recipe, offloading or recomputation within the experts, or a setting in `_NOT_SUPPORTED`.

    Parameters
    ----------
    num_local_experts
        E.
    config
        Megatron's ``TransformerConfig``. With ``gradient_accumulation_fusion``, the weights' gradients are added to
        their ``main_grad``, which must be fp32.
    pg_collection
        Megatron's process groups; None for the groups of its global state.
    name
        Ignored.
    recipe
        Recipe of both products; None for that of ``fm.recipe``. Required if the configuration has ``fp8`` or ``fp4``,
        which are settings of Transformer Engine.

    Attributes
    ----------
    linear_fc1.weight, linear_fc2.weight : Parameter
        (E, 2 I, H), or (E, I, H) without a gate, and (E, H, I), in ``params_dtype``.
    linear_fc1.bias, linear_fc2.bias : Parameter or None
        (E, 2 I), or (E, I), and (E, H).
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        *,
        pg_collection: Any = None,
        name: str | None = None,
        recipe: object = None,
    ) -> None:
        super().__init__()
        _check(config, recipe)
        if pg_collection is None:
            from megatron.core.process_groups_config import ProcessGroupCollection

            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        if pg_collection.expt_tp.size() > 1:
            raise InputError(
                f"FusedGroupedMLP: expected expert_tensor_parallel_size=1, got {pg_collection.expt_tp.size()}; "
                f"use expert parallelism, which does not shard single experts"
            )
        self.config, self.num_local_experts = config, num_local_experts
        self.ep_group, self.dp_group = pg_collection.ep, pg_collection.expt_dp
        hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
        intermediate = config.moe_ffn_hidden_size
        wide = (2 if config.gated_linear_unit else 1) * intermediate
        shapes = (num_local_experts, wide, hidden), (num_local_experts, hidden, intermediate)
        self.linear_fc1 = _Layer(shapes[0], config, config.init_method)
        self.linear_fc2 = _Layer(shapes[1], config, config.output_layer_init_method)
        # not a submodule: a hook on an op, such as Megatron's hook that waits for parameters, would split the chain
        self.__dict__["_chain"] = _chain(shapes, config, recipe)
        self.register_state_dict_post_hook(split_by_expert)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(stack_experts)  # type: ignore[no-untyped-call]

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor | Sequence[int], permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Run the experts of this rank.

        Returns (R, H), zeros in rows that belong to no expert; and None for the bias, which is already added.

        Raises `InputError`: a shape, dtype or device is wrong.

        Parameters
        ----------
        permuted_local_hidden_states
            (R, H) in ``params_dtype``, sorted by expert; R may exceed the sum of ``tokens_per_expert``.
        tokens_per_expert
            (E,) integers, on any device, or a list. A tensor on a GPU is not read on the host.
        permuted_probs
            (R,) floating point, differentiable.
        """
        splits = _on_device_of(permuted_local_hidden_states, tokens_per_expert)
        return self._ops()(permuted_local_hidden_states, probs=permuted_probs, splits=splits), None

    def explain(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor | Sequence[int], permuted_probs: Tensor
    ) -> Explanation:
        """Return the plan of `forward` for these arguments."""
        splits = _on_device_of(permuted_local_hidden_states, tokens_per_expert)
        return self._ops().explain(permuted_local_hidden_states, probs=permuted_probs, splits=splits)

    def explain_rows(self, rows: int, arch: int | str | None = None) -> Explanation:
        """Return the plan of `forward` for ``rows`` evenly routed rows, on the device and in the dtype of the weights.

        ``fm.explain`` calls this method for a model. ``arch`` is as for `Sequential.explain`: 90 for an sm_90 GPU.
        Gradients are planned unless grad mode is off. The layers' hooks do not run, so parameters are not gathered.
        """
        weight = self.linear_fc1.weight
        kind: dict[str, Any] = {"device": weight.device, "requires_grad": torch.is_grad_enabled()}
        x = torch.zeros(rows, weight.shape[-1], dtype=weight.dtype, **kind)
        probs = torch.ones(rows, dtype=_ROUTER_DTYPES.get(self.config.moe_router_dtype, weight.dtype), **kind)
        splits = even_splits(rows, self.num_local_experts, weight.device)
        return self._ops(hooks=False).explain(x, arch=arch, probs=probs, splits=splits)

    def backward_dw(self) -> None:
        """Do nothing: the backward pass of `forward` computes the weights' gradients.

        Megatron calls this with ``delay_wgrad_compute`` to overlap weight gradients with communication. They are not
        delayed here; their values are the same.
        """

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded tensors for ``megatron.core.dist_checkpointing``, with the keys of ``SequentialMLP``.

        Each value is a ``ShardedTensorFactory`` of the parameter itself, by which the optimizer finds the
        parameter's state. Global shapes are (experts of all ranks, out, in), with gate and up as separate shards. With
        ``singleton_local_shards`` in the metadata, each expert has its own keys. ``_extra_state`` is empty; Transformer
        Engine expects it.
        """
        return sharded_state_dict(self, prefix, sharded_offsets, metadata)

    def _ops(self, *, hooks: bool = True) -> Sequential:
        """Return the ops with the layers' current parameters, after the layers' hooks have run if ``hooks``."""
        chain: Sequential = self.__dict__["_chain"]
        for name in LAYERS:
            op, layer = getattr(chain, name), getattr(self, name)
            weight, bias = layer() if hooks else layer.forward()
            if op.weight is not weight:
                op.weight = weight
            if op.bias is not bias:
                op.bias = bias
        return chain


@register_reason_for_router
def _why_own_router(router: nn.Module) -> str | None:
    if type(router).__module__.partition(".")[0] != "megatron":
        return None
    return "Megatron's dispatcher, losses, capacity and expert biases need its results before the experts run"


class _Layer(nn.Module):
    """The parameters of one product, (E, out, in) and (E, out). Calling it runs the hooks that gather them."""

    bias: nn.Parameter | None

    def __init__(self, shape: tuple[int, int, int], config: Any, init_method: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._init_method = init_method if config.perform_initialization else None
        where: dict[str, Any] = {"dtype": config.params_dtype, "device": _device(config)}
        self.weight = nn.Parameter(torch.empty(shape, **where))
        bias = nn.Parameter(torch.empty(shape[:-1], **where)) if config.add_bias_linear else None
        self.register_parameter("bias", bias)
        for parameter in self.parameters():
            # Megatron reduces gradients and norms by these attributes
            parameter.allreduce = config.expert_model_parallel_size <= 1  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim, parameter.partition_stride = 1, 1  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise each expert's weight with Megatron's ``init_method``, and biases to zero."""
        if self._init_method is not None and not self.weight.is_meta:
            with torch.no_grad(), _experts_random_numbers(self.weight.device):
                for weight in self.weight:
                    self._init_method(weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        return self.weight, self.bias


def _on_device_of(x: Tensor, tokens_per_expert: Tensor | Sequence[int]) -> Tensor:
    if not isinstance(tokens_per_expert, Tensor):
        tokens_per_expert = torch.tensor(tokens_per_expert, device="cpu")
    return tokens_per_expert.to(x.device, non_blocking=True)


def _device(config: Any) -> torch.device:
    if getattr(config, "init_model_with_meta_device", False):
        return torch.device("meta")
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _experts_random_numbers(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context of Megatron's random number generator for expert-parallel parameters."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

    tracker = get_cuda_rng_tracker()
    if not tracker.is_initialized():
        return contextlib.nullcontext()
    return tracker.fork(get_expert_parallel_rng_tracker_name())  # type: ignore[no-any-return]


def _chain(shapes: tuple[tuple[int, int, int], tuple[int, int, int]], config: Any, recipe: object) -> Sequential:
    fc1, fc2 = (
        GroupedLinear(
            experts,
            in_features,
            out_features,
            bias=config.add_bias_linear,
            device="meta",
            accumulate_into_main_grad=config.gradient_accumulation_fusion,
            recipe=recipe,
        )
        for experts, out_features, in_features in shapes
    )
    ops: list[tuple[str, Op]] = [("linear_fc1", fc1), ("activation", _activation(config)), ("linear_fc2", fc2)]
    # p also multiplies the bias of the second layer
    place = 0 if config.moe_apply_probs_on_input else 3 if config.add_bias_linear else 2
    ops.insert(place, ("probs", Scale("probs")))
    return Sequential(OrderedDict(ops)).without_parameters()


def _activation(config: Any) -> Op:
    """Return the op of the configured activation."""
    from megatron.core import activations
    from megatron.core.fusions import fused_bias_geglu

    function = config.activation_func
    ops: dict[Any, Callable[..., Op]] = {activations.squared_relu: SquaredReLU}
    settings, expected = {}, "squared_relu"
    if config.gated_linear_unit:
        quick = functools.partial(SwiGLU, alpha=1.702)
        ops = {F.silu: SwiGLU, F.gelu: functools.partial(GeGLU, "none"), F.relu: ReGLU}
        ops |= {activations.quick_gelu: quick, fused_bias_geglu.quick_gelu: quick}
        settings = {"limit": config.activation_func_clamp_value, "offset": config.glu_linear_offset}
        expected = "F.silu, quick_gelu, F.gelu or F.relu"
    if function in ops:
        return ops[function](**settings)
    raise InputError(
        f"FusedGroupedMLP: activation_func: expected {expected} with gated_linear_unit={config.gated_linear_unit}, got "
        f"{getattr(function, '__name__', function)!r}"
    )


# unsupported settings and the reasons; any false value is accepted
_NOT_SUPPORTED = {
    "activation_func_fp8_input_store": "the activation's input is saved unquantized",
    "use_te_activation_func": "fusedmoe fuses the activation itself",
    "moe_mlp_glu_interleave_size": "gate and up are the halves of linear_fc1, in memory and in checkpoints",
    "overlap_dispatch_backward_with_experts_wgrad": "weight gradients are not delayed",
    "moe_paged_stash": "activations are not offloaded",
}
_EXPERT_MODULES = ("expert_fc1", "moe_act", "fused_group_mlp")


def _check(config: Any, recipe: object) -> None:
    for name, reason in _NOT_SUPPORTED.items():
        if getattr(config, name, None):
            raise InputError(f"FusedGroupedMLP: {name}: expected none, got {getattr(config, name)!r}; {reason}")
    for name in ("fp8", "fp4"):
        if getattr(config, name, None) and recipe is None:
            raise InputError(
                f"FusedGroupedMLP: {name}={getattr(config, name)!r} configures Transformer Engine: expected a recipe "
                f'for the experts as well, such as recipe="mxfp8", or "bf16" for no quantization; got None'
            )
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else None
    offloaded = config.offload_modules if getattr(config, "fine_grained_activation_offloading", False) else None
    for name, modules in (("recompute_modules", recomputed), ("offload_modules", offloaded)):
        if found := set(modules or ()).intersection(_EXPERT_MODULES):
            raise InputError(
                f"FusedGroupedMLP: {name}: expected nothing within the experts, got {', '.join(sorted(found))}; "
                f"'moe' recomputes the whole layer"
            )
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        raise InputError(
            f"FusedGroupedMLP: moe_apply_probs_on_input: expected with moe_router_topk=1, got {config.moe_router_topk}"
        )
