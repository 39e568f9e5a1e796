"""Experts of Megatron-Core: a builder for ``MoESubmodules(experts=...)``.

    from fusedmoe.integrations.megatron import FusedGroupedMLP

    submodules = MoESubmodules(experts=FusedGroupedMLP, shared_experts=...)
    submodules = MoESubmodules(experts=ModuleSpec(module=FusedGroupedMLP, params={"recipe": "mxfp8"}), ...)

Takes the place of ``TEGroupedMLP``. Router, dispatcher and shared experts stay Megatron's. Checkpoints are
``TEGroupedMLP``'s and ``SequentialMLP``'s: a distributed one, with the optimizer's state, can be saved by any of the
three and loaded by any other; ``state_dict()`` has the names of ``TEGroupedMLP``, ``linear_fc1.weight0`` and on. In
memory each layer has one parameter for all experts, as with Megatron's ``moe_single_grouped_weight``.

Megatron is imported when experts are built. Source of the interface: ``megatron.core.transformer.moe``, Megatron-Core
0.16 to 0.20.

Axes: R rows, E experts of this rank, H hidden, I intermediate.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedmoe.errors import InputError
from fusedmoe.explain_model import even_splits
from fusedmoe.ops import GeGLU, GroupedLinear, Op, ReGLU, Scale, SquaredReLU, SwiGLU
from fusedmoe.sequential import Sequential

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fusedmoe.fusion.plan import Explanation

_LAYERS = ("linear_fc1", "linear_fc2")
_ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}  # by `moe_router_dtype`; else that of the rows


class FusedGroupedMLP(nn.Module):
    """``y[r] = (act(x[r] @ W1[e].T + b1[e]) * p[r]) @ W2[e].T + p[r] * b2[e]`` for each row r of expert e.

    ``act`` is what the configuration says: with ``gated_linear_unit``, ``f(min(g, c)) * (clamp(u, -c, c) + offset)`` of
    the halves g and u, f ``F.silu``, ``F.gelu``, ``F.relu`` or Megatron's ``quick_gelu``, c
    ``activation_func_clamp_value`` and offset ``glu_linear_offset``; without, Megatron's ``squared_relu``. With
    ``moe_apply_probs_on_input``, p multiplies x instead. Biases are there with ``add_bias_linear``.

    Parameters
    ----------
    num_local_experts
        E.
    config
        Megatron's ``TransformerConfig``. With ``gradient_accumulation_fusion`` the weights' gradients are added to
        their ``main_grad``, which has to be fp32.
    pg_collection
        Megatron's process groups; None for those of its global state.
    name
        Taken and not used.
    recipe
        What both products multiply in, whatever holds around the call; None leaves it to ``fm.recipe``. Has to be given
        where the configuration has ``fp8`` or ``fp4``: those are Transformer Engine's.

    Attributes
    ----------
    linear_fc1.weight, linear_fc2.weight : Parameter
        (E, 2 I, H), or (E, I, H) without a gate, and (E, H, I), in ``params_dtype``.
    linear_fc1.bias, linear_fc2.bias : Parameter or None
        (E, 2 I), or (E, I), and (E, H).

    Raises
    ------
    InputError
        The configuration asks for something that is not done here: expert tensor parallelism, another activation,
        quantization without a recipe, offloading or recomputation within the experts, and what else
        `_NOT_SUPPORTED` has.
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
                f"expert parallelism splits the experts without splitting each"
            )
        self.config, self.num_local_experts = config, num_local_experts
        self.ep_group, self.dp_group = pg_collection.ep, pg_collection.expt_dp
        hidden = getattr(config, "moe_latent_size", None) or config.hidden_size
        intermediate = config.moe_ffn_hidden_size
        wide = (2 if config.gated_linear_unit else 1) * intermediate
        shapes = (num_local_experts, wide, hidden), (num_local_experts, hidden, intermediate)
        self.linear_fc1 = _Layer(shapes[0], config, config.init_method)
        self.linear_fc2 = _Layer(shapes[1], config, config.output_layer_init_method)
        # beside the submodules: a hook on an op, such as Megatron's that waits for parameters, would split the chain
        self.__dict__["_chain"] = _chain(shapes, config, recipe)
        self.register_state_dict_post_hook(_one_entry_an_expert)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_one_entry_a_layer)  # type: ignore[no-untyped-call]

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor | Sequence[int], permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Run the experts of this rank.

        Parameters
        ----------
        permuted_local_hidden_states
            (R, H) in ``params_dtype``, sorted by expert; there may be more rows than belong to experts.
        tokens_per_expert
            (E,) integers, on any device, or a list. Those on a GPU are not read by the host.
        permuted_probs
            (R,) floating point; gets its gradient.

        Returns
        -------
        (Tensor, None)
            (R, H), zeros in rows that belong to no expert; and no bias, which is added already.

        Raises
        ------
        InputError
            Shapes, dtypes or devices do not fit.
        """
        x, inputs = permuted_local_hidden_states, self._inputs(permuted_local_hidden_states, tokens_per_expert)
        return self._ops()(x, probs=permuted_probs, **inputs), None

    def explain(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor | Sequence[int], permuted_probs: Tensor
    ) -> Explanation:
        """Return what `forward` does with this call, and why: ``print`` it for a table."""
        x, inputs = permuted_local_hidden_states, self._inputs(permuted_local_hidden_states, tokens_per_expert)
        return self._ops().explain(x, probs=permuted_probs, **inputs)

    def explain_rows(self, rows: int, arch: int | str | None = None) -> Explanation:
        """Return what `forward` does with so many evenly routed rows, and why: what ``fm.explain`` of a model asks.
        ``arch`` is that of `Sequential.explain`: 90 for what an sm_90 GPU would run.

        They are on the device and in the dtype of the weights, the probabilities in the router's dtype, and want
        gradients unless those are switched off. No hook of the layers runs: nothing is gathered.
        """
        weight = self.linear_fc1.weight
        kind: dict[str, Any] = {"device": weight.device, "requires_grad": torch.is_grad_enabled()}
        x = torch.zeros(rows, weight.shape[-1], dtype=weight.dtype, **kind)
        probs = torch.ones(rows, dtype=_ROUTER_DTYPES.get(self.config.moe_router_dtype, weight.dtype), **kind)
        splits = even_splits(rows, self.num_local_experts, weight.device)
        return self._ops(hooks=False).explain(x, arch=arch, probs=probs, splits=splits)

    def backward_dw(self) -> None:
        """Do nothing: the weights' gradients are there when `forward`'s backward pass is done.

        With ``delay_wgrad_compute`` Megatron calls this where it wants them computed. They are not delayed here, so
        that they overlap with no communication; they are the same.
        """

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return what ``megatron.core.dist_checkpointing`` saves and loads: the keys and shapes of ``SequentialMLP``.

        Each parameter is a ``ShardedTensorFactory`` of the parameter itself, by which the optimizer finds its state.
        Global shapes are (experts of all ranks, out, in), gate and up apart; where ``singleton_local_shards`` of the
        metadata is true, each expert has keys of its own. ``_extra_state`` is there for Transformer Engine, and empty.
        """
        from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
        from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

        singly = bool((metadata or {}).get("singleton_local_shards", False))
        replica = (0, 0, self.dp_group.rank())
        ranks, rank = self.ep_group.size(), self.ep_group.rank()
        first, everywhere = rank * self.num_local_experts, ranks * self.num_local_experts
        found: dict[str, Any] = {}
        for layer in _LAYERS:
            halves = 2 if layer == "linear_fc1" and self.config.gated_linear_unit else 1
            shards = _Shards(singly, halves, tuple(sharded_offsets), rank, ranks, first)
            for name, parameter in getattr(self, layer).named_parameters():
                found[f"{prefix}{layer}.{name}"] = ShardedTensorFactory(
                    f"{prefix}experts.{layer}.{name}", parameter, shards.build, shards.merge, replica
                )
            for expert in range(first, first + self.num_local_experts):
                of_expert = f"{expert}." if singly else ""
                offsets = sharded_offsets if singly else (*sharded_offsets, (len(sharded_offsets), expert, everywhere))
                found[f"{prefix}{layer}._extra_state{expert - first}"] = make_sharded_object_for_checkpoint(
                    None, f"{prefix}experts.{of_expert}{layer}._extra_state", offsets, replica
                )
        return found

    def _inputs(self, x: Tensor, tokens_per_expert: Tensor | Sequence[int]) -> dict[str, Tensor]:
        return {"splits": torch.as_tensor(tokens_per_expert).to(x.device, non_blocking=True)}

    def _ops(self, *, hooks: bool = True) -> Sequential:
        """Return the ops, with the parameters that the layers have now, or have once their hooks have run."""
        chain: Sequential = self.__dict__["_chain"]
        for name in _LAYERS:
            op, layer = getattr(chain, name), getattr(self, name)
            weight, bias = layer() if hooks else layer.forward()
            if op.weight is not weight:
                op.weight = weight
            if op.bias is not bias:
                op.bias = bias
        return chain


class _Layer(nn.Module):
    """The parameters of one product, (E, out, in) and (E, out). Called for them, so that hooks that gather them run."""

    bias: nn.Parameter | None

    def __init__(self, shape: tuple[int, int, int], config: Any, init_method: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._init_method = init_method if config.perform_initialization else None
        where: dict[str, Any] = {"dtype": config.params_dtype, "device": _device(config)}
        self.weight = nn.Parameter(torch.empty(shape, **where))
        bias = nn.Parameter(torch.empty(shape[:-1], **where)) if config.add_bias_linear else None
        self.register_parameter("bias", bias)
        for parameter in self.parameters():
            # of every rank its own, where Megatron sums gradients and norms
            parameter.allreduce = config.expert_model_parallel_size <= 1  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim, parameter.partition_stride = 1, 1  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weight as Megatron does one; biases are zeros."""
        if self._init_method is not None and not self.weight.is_meta:
            with torch.no_grad(), _experts_random_numbers(self.weight.device):
                for weight in self.weight:
                    self._init_method(weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        return self.weight, self.bias


class _Shards:
    """Takes a parameter of all experts of this rank apart, into what `SequentialMLP` saves, and puts it together."""

    def __init__(
        self, singly: bool, halves: int, offsets: tuple[Any, ...], rank: int, ranks: int, first_expert: int
    ) -> None:
        self._singly, self._halves, self._offsets = singly, halves, offsets
        self._rank, self._ranks, self._first_expert = rank, ranks, first_expert

    @torch.no_grad()
    def build(self, key: str, parameter: Tensor, replica_id: Any, flattened_range: slice | None = None) -> Any:
        """Return the shards of a parameter, or of a state of the optimizer's for it, which has a key of its own."""
        if flattened_range is not None:
            raise InputError(
                f"FusedGroupedMLP: {key}: expected a whole tensor to save or load, got a range of a flat one"
            )
        shard = self._shard(replica_id)
        axis = len(self._offsets)
        if not self._singly:
            parts = parameter.chunk(self._halves, dim=1)
            of_rank = axis, self._rank, self._ranks
            return [shard(key, part, of_rank, (axis + 1, i, self._halves)) for i, part in enumerate(parts)]
        before, layer, name = key.rsplit(".", 2)
        suffixes = ("_w", "_v") if self._halves == 2 else ("",)
        return [
            [
                shard(f"{before}.{expert}.{layer}.{name}{suffix}", part)
                for suffix, part in zip(suffixes, of_expert.chunk(self._halves), strict=True)
            ]
            for expert, of_expert in enumerate(parameter, self._first_expert)
        ]

    @torch.no_grad()
    def merge(self, parts: Any) -> Tensor:
        """Return the tensor of what `build` has returned, loaded."""
        return torch.stack([torch.cat(halves) for halves in parts]) if self._singly else torch.cat(parts, dim=1)

    def _shard(self, replica_id: Any) -> Callable[..., Any]:
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        def shard(key: str, tensor: Tensor, *offsets: tuple[int, int, int]) -> Any:
            more = {"replica_id": replica_id, "prepend_axis_num": len(self._offsets)}
            return ShardedTensor.from_rank_offsets(key, tensor.contiguous(), *self._offsets, *offsets, **more)

        return shard


def _one_entry_an_expert(module: FusedGroupedMLP, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    """``linear_fc1.weight`` -> ``linear_fc1.weight0``, ``linear_fc1.weight1``, ..., as views."""
    for layer in _LAYERS:
        for name, _ in getattr(module, layer).named_parameters():
            packed = state_dict.pop(f"{prefix}{layer}.{name}", None)
            if packed is not None:
                state_dict.update({f"{prefix}{layer}.{name}{i}": part for i, part in enumerate(packed)})


def _one_entry_a_layer(module: FusedGroupedMLP, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """``linear_fc1.weight0``, ``linear_fc1.weight1``, ... -> ``linear_fc1.weight``; which may also be there already."""
    for layer in _LAYERS:
        for name, _parameter in getattr(module, layer).named_parameters():
            keys = [f"{prefix}{layer}.{name}{i}" for i in range(module.num_local_experts)]
            if all(key in state_dict for key in keys):
                state_dict[f"{prefix}{layer}.{name}"] = torch.stack([state_dict.pop(key) for key in keys])
        for key in [key for key in state_dict if key.startswith(f"{prefix}{layer}._extra_state")]:
            del state_dict[key]  # of Transformer Engine's quantization


def _device(config: Any) -> torch.device:
    if getattr(config, "init_model_with_meta_device", False):
        return torch.device("meta")
    if config.use_cpu_initialization or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _experts_random_numbers(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Megatron's random numbers for what differs from expert-parallel rank to rank."""
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
    ops: dict[str, Op] = {"linear_fc1": fc1, "activation": _activation(config), "linear_fc2": fc2}
    where = 0 if config.moe_apply_probs_on_input else 3 if config.add_bias_linear else 2
    names = list(ops)
    names.insert(where, "probs")
    ops["probs"] = Scale("probs")
    return Sequential(OrderedDict((name, ops[name]) for name in names)).without_parameters()


def _activation(config: Any) -> Op:
    """Return the op of the configured activation."""
    from megatron.core import activations
    from megatron.core.fusions import fused_bias_geglu

    function = config.activation_func
    if not config.gated_linear_unit:
        if function is activations.squared_relu:
            return SquaredReLU()
        expected = "squared_relu"
    else:
        clamp: dict[str, Any] = {"limit": config.activation_func_clamp_value, "offset": config.glu_linear_offset}
        if function is F.silu:
            return SwiGLU(**clamp)
        if function in (activations.quick_gelu, fused_bias_geglu.quick_gelu):
            return SwiGLU(alpha=1.702, **clamp)
        if function is F.gelu:
            return GeGLU("none", **clamp)
        if function is F.relu:
            return ReGLU(**clamp)
        expected = "F.silu, quick_gelu, F.gelu or F.relu"
    raise InputError(
        f"FusedGroupedMLP: activation_func: expected {expected} with gated_linear_unit={config.gated_linear_unit}, got "
        f"{getattr(function, '__name__', function)!r}"
    )


# settings that ask for something else than is done here, whatever their value unless it is false, and what to do
_NOT_SUPPORTED = {
    "activation_func_fp8_input_store": "the activation's input is kept as it is",
    "use_te_activation_func": "the activation is fused here anyway",
    "moe_mlp_glu_interleave_size": "gate and up are the halves of linear_fc1, in memory and in checkpoints",
    "overlap_dispatch_backward_with_experts_wgrad": "weight gradients are not delayed here",
    "moe_paged_stash": "activations stay where they are",
}
_EXPERT_MODULES = ("expert_fc1", "moe_act", "fused_group_mlp")


def _check(config: Any, recipe: object) -> None:
    for name, remedy in _NOT_SUPPORTED.items():
        if getattr(config, name, None):
            raise InputError(f"FusedGroupedMLP: {name}: expected none, got {getattr(config, name)!r}; {remedy}")
    for name in ("fp8", "fp4"):
        if getattr(config, name, None) and recipe is None:
            raise InputError(
                f"FusedGroupedMLP: {name}={getattr(config, name)!r} is Transformer Engine's: expected a recipe for the "
                f'experts beside it, such as recipe="mxfp8", or "bf16" for none; got None'
            )
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else None
    offloaded = config.offload_modules if getattr(config, "fine_grained_activation_offloading", False) else None
    for name, modules in (("recompute_modules", recomputed), ("offload_modules", offloaded)):
        if found := set(modules or ()).intersection(_EXPERT_MODULES):
            raise InputError(
                f"FusedGroupedMLP: {name}: expected nothing within the experts, got {', '.join(sorted(found))}; "
                f"the experts are one step here: 'moe' recomputes the layer"
            )
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        raise InputError(
            f"FusedGroupedMLP: moe_apply_probs_on_input: expected with moe_router_topk=1, got {config.moe_router_topk}"
        )
