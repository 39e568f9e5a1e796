"""Experts for torchtitan: an override that replaces a model's `GroupedExperts` with ops of fusedmoe.

    --override.imports fusedmoe.integrations.torchtitan.experts
    --override.imports 'fusedmoe.integrations.torchtitan.experts={"recipe": "mxfp8"}'

Parameters keep their names, shapes, placements and initialisation, so checkpoints and parallel plans remain valid.
Router, dispatcher and losses do not change; `torchtitan_routed` replaces the dispatcher too. GPT-OSS's experts are
supported. Quantized experts are not: choose a recipe instead. Importing this module imports torchtitan.

Source of the interface: ``torchtitan.config.override``, ``torchtitan.models.common.moe`` and
``torchtitan.models.gpt_oss.moe``, torchtitan 0.3.

Axes: R rows, E experts, D model features, F intermediate features, G = 2 F.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import GroupedExperts

from fusedmoe.base.errors import InputError
from fusedmoe.fusion.report.data import Explanation
from fusedmoe.layers.explain_model import even_splits, register_reason_for_router
from fusedmoe.layers.sequential import Sequential
from fusedmoe.numerics.recipes import resolve
from fusedmoe.ops import GroupedLinear, Op, SwiGLU
from fusedmoe.ops.op import constant_in_graphs, made_untraced

_CHAIN = "_fusedmoe_chain"  # in __dict__, not a submodule, so that the state_dict does not include it


class _Held(NamedTuple):
    """The ops of a module, with the shape of its down weight and the recipe that they were made for."""

    sizes: tuple[int, ...]
    recipe: str | None
    chain: Sequential


class WithChain:
    """A module that keeps its ops, which are made again only after a change of sizes or recipe."""

    def _new_chain(self, sizes: tuple[int, ...], bias: bool) -> Sequential:
        """Return new ops for a down weight of shape ``sizes``, (E, D, F)."""
        raise NotImplementedError

    def _recipe(self) -> str | None:
        raise NotImplementedError

    def chain_for(self, parameters: dict[str, Tensor]) -> Sequential:
        """Return the ops for parameters of these shapes."""
        sizes = tuple(parameters["down.weight"].shape)
        if torch.compiler.is_compiling():
            self._prepare(sizes, "down.bias" in parameters)  # runs while the graph is traced
        held: _Held | None = self.__dict__.get(_CHAIN)
        if held is None or held.sizes != sizes or held.recipe != self._recipe():
            self._prepare(sizes, "down.bias" in parameters)
            held = self.__dict__[_CHAIN]
        return held.chain

    def forget_chain(self) -> None:
        """Make the ops again in the next call."""
        self.__dict__.pop(_CHAIN, None)

    @constant_in_graphs
    def _prepare(self, sizes: tuple[int, ...], bias: bool) -> None:
        held: _Held | None = self.__dict__.get(_CHAIN)
        if held is None or held.sizes != sizes or held.recipe != self._recipe():
            self.__dict__[_CHAIN] = _Held(sizes, self._recipe(), self._new_chain(sizes, bias).without_parameters())


class FusedGroupedExperts(WithChain, GroupedExperts):  # type: ignore[misc]
    """``y[r] = (silu(x[r] @ w1[e].T) * (x[r] @ w3[e].T)) @ w2[e].T`` for each row r of expert e.

    The first product takes gate and up as one weight, ``torch.cat([w1, w3], dim=1)`` in bf16. Each call reads and
    writes 4 E F D bytes for that copy. The copy is kept for the backward pass, unless activation checkpointing
    recomputes it. The gradients of w1 and w3 are the halves of one tensor.

    Attributes
    ----------
    w1_EFD, w3_EFD, w2_EDF : Parameter
        Gate, up and down, with torchtitan's layouts. The local shard of a DTensor is used.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):  # type: ignore[misc]
        """torchtitan's configuration, and ``recipe`` for both products; None for the recipe of ``fm.recipe``."""

        recipe: str | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._set_recipe(config.recipe)

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Run the experts of this rank in bf16, as torchtitan does for all dtypes of parameters and rows.

        Returns (R, D) in x's dtype; zeros in rows that belong to no expert. Under tensor parallelism, a partial sum.

        Raises `InputError`: a shape, dtype or device is wrong.

        Parameters
        ----------
        x_RD
            The rows, sorted by expert; R may exceed the sum of ``num_tokens_per_expert_E``.
        num_tokens_per_expert_E
            Rows per expert, (E,) integers on x's device. The host does not read them on a GPU.
        """
        parameters = self.chain_parameters()
        y_RD = self.chain_for(parameters).forward_with(parameters, x_RD.bfloat16(), splits=num_tokens_per_expert_E)
        return y_RD.to(x_RD.dtype)

    def explain(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Explanation:
        """Return the plan of `forward` for these arguments."""
        parameters = self.chain_parameters()
        return self.chain_for(parameters).explain_with(parameters, x_RD.bfloat16(), splits=num_tokens_per_expert_E)

    def explain_rows(self, rows: int, arch: int | str | None = None) -> Explanation:
        """Return the plan of `forward` for ``rows`` evenly routed rows on the device of the parameters.

        ``fm.explain`` calls this method for a model. ``arch`` is as for `Sequential.explain`: 90 for an sm_90 GPU.
        Gradients are planned unless grad mode is off. As in `forward`, the weights are copied, and the local shard of a
        DTensor is used.

        Raises `InputError`: a parameter is sharded over a mesh axis other than expert or tensor parallelism. FSDP
        gathers it when the model is called, so its size in the call is unknown.
        """
        parameters = self.parameters_to_explain()
        weight = parameters["gate_up.weight"]
        kind: dict[str, Any] = {"device": weight.device, "requires_grad": torch.is_grad_enabled()}
        x_RD = torch.zeros(rows, weight.shape[-1], dtype=torch.bfloat16, **kind)
        splits = even_splits(rows, weight.shape[0], weight.device)
        return self.chain_for(parameters).explain_with(parameters, x_RD, arch=arch, splits=splits)

    def chain_parameters(self) -> dict[str, Tensor]:
        """Return this rank's parameters in the ops' layout, (E, out, in)."""
        gate_EFD, up_EFD, down_EDF = _in_bf16(self.w1_EFD), _in_bf16(self.w3_EFD), _in_bf16(self.w2_EDF)
        return {"gate_up.weight": torch.cat([gate_EFD, up_EFD], dim=1), "down.weight": down_EDF}

    def parameters_to_explain(self) -> dict[str, Tensor]:
        """Return `chain_parameters`; raise for those that a call gathers."""
        for name, parameter in self.named_parameters(recurse=False):
            if axes := _gathered_axes(parameter):
                raise InputError(
                    f"{type(self).__name__}: {name}: expected all of this rank's experts, got a shard over "
                    f"{', '.join(axes)}, which a call gathers: plan before sharding"
                )
        return self.chain_parameters()

    def _activation(self) -> Op:
        return SwiGLU()

    def _set_recipe(self, recipe: str | None) -> None:
        if recipe is not None:
            resolve(recipe)  # raise now instead of in the first step
        self.recipe = recipe

    def _recipe(self) -> str | None:
        return self.recipe

    def _new_chain(self, sizes: tuple[int, ...], bias: bool) -> Sequential:
        return Sequential(self.ops_of(sizes, bias))

    def ops_of(self, sizes: tuple[int, ...], bias: bool) -> OrderedDict[str, Op]:
        """Return new ops without dispatch and combine."""
        experts, dim, hidden_dim = sizes
        options: dict[str, Any] = {"bias": bias, "device": "meta", "recipe": self.recipe}
        return OrderedDict(
            gate_up=made_untraced(GroupedLinear, experts, dim, 2 * hidden_dim, **options),
            activation=self._activation(),
            down=made_untraced(GroupedLinear, experts, hidden_dim, dim, **options),
        )


class FusedGptOssGroupedExperts(FusedGroupedExperts):
    """GPT-OSS's experts, ``y[r] = act(x[r] @ mlp1[e].T + b1[e]) @ mlp2[e].T + b2[e]``; see `FusedGroupedExperts`.

    ``act(g, u) = gc * sigmoid(1.702 gc) * (uc + 1)`` with ``gc = min(g, swiglu_limit)``, ``uc = clamp(u, -swiglu_limit,
    swiglu_limit)``, g and u the even and odd features.

    Attributes
    ----------
    mlp1_weight_EGD, mlp1_bias_EG, mlp2_weight_EDF, mlp2_bias_ED : Parameter
        With torchtitan's layouts. They are cast to bf16, and not copied if they are bf16 already.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FusedGroupedExperts.Config):
        """torchtitan's configuration, and ``recipe``."""

        swiglu_limit: float = 7.0

    def __init__(self, config: Config) -> None:
        GroupedExperts.__base__.__init__(self)  # as torchtitan does: GroupedExperts would create its own parameters
        experts, dim, hidden_dim = config.num_experts, config.dim, config.hidden_dim
        self.num_experts, self.swiglu_limit = experts, config.swiglu_limit
        # the defaults of torch, as in torchtitan
        how: dict[str, Any] = {"device": torch.get_default_device(), "dtype": torch.get_default_dtype()}
        self.mlp1_weight_EGD = nn.Parameter(torch.empty(experts, 2 * hidden_dim, dim, **how))
        self.mlp1_bias_EG = nn.Parameter(torch.empty(experts, 2 * hidden_dim, **how))
        self.mlp2_weight_EDF = nn.Parameter(torch.empty(experts, dim, hidden_dim, **how))
        self.mlp2_bias_ED = nn.Parameter(torch.empty(experts, dim, **how))
        self._set_recipe(config.recipe)

    def chain_parameters(self) -> dict[str, Tensor]:
        bias_ED = _local(self.mlp2_bias_ED)
        tensor_parallel = _size_of_mesh_axis(self.mlp2_bias_ED, "tp")
        if tensor_parallel > 1:  # the ranks' outputs are summed, so each adds a share; gradients are not divided
            bias_ED = (bias_ED / tensor_parallel).detach() + (bias_ED - bias_ED.detach())
        return {
            "gate_up.weight": _in_bf16(self.mlp1_weight_EGD),
            "gate_up.bias": _in_bf16(self.mlp1_bias_EG),
            "down.weight": _in_bf16(self.mlp2_weight_EDF),
            "down.bias": bias_ED.bfloat16(),
        }

    def _activation(self) -> Op:
        return SwiGLU(limit=self.swiglu_limit, alpha=1.702, offset=1.0, interleaved=True)


# by name, since importing the class would import the whole model
_GPT_OSS = ("torchtitan.models.gpt_oss.moe", "GptOssGroupedExperts.Config")


@override(target=GroupedExperts.Config, description="Experts by fusedmoe: fused grouped products.")  # type: ignore[untyped-decorator]
def experts(config: Any, *, recipe: str | None = None) -> Any:
    """The override: return the configuration of the fused experts for torchtitan's.

    Raises `InputError`: the configuration belongs to another class.

    Parameters
    ----------
    config
        Configuration of `GroupedExperts` or of GPT-OSS's experts. A configuration of fused experts is returned
        unchanged.
    recipe
        See `FusedGroupedExperts`.
    """
    found = type(config)
    if found in (FusedGroupedExperts.Config, FusedGptOssGroupedExperts.Config):
        return config
    if found is GroupedExperts.Config:
        return derive(config, FusedGroupedExperts.Config, recipe=recipe)
    if (found.__module__, found.__qualname__) == _GPT_OSS:
        return derive(config, FusedGptOssGroupedExperts.Config, recipe=recipe)
    raise InputError(
        f"experts: config: expected a configuration of GroupedExperts or GptOssGroupedExperts, got "
        f"{found.__module__}.{found.__qualname__}; for quantized products, remove the model's converter and choose a "
        f"recipe instead"
    )


@register_reason_for_router
def _why_own_router(router: nn.Module) -> str | None:
    if type(router).__module__.partition(".")[0] != "torchtitan":
        return None
    return "torchtitan's dispatcher, losses and expert biases need its results before the experts run"


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[no-any-return]


def _in_bf16(parameter: Any) -> Tensor:
    return _local(parameter).bfloat16()


def _size_of_mesh_axis(parameter: Any, axis: str) -> int:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or axis not in (mesh.mesh_dim_names or ()):
        return 1
    return int(mesh.size(mesh.mesh_dim_names.index(axis)))


def _gathered_axes(parameter: Any) -> list[str]:
    """Return the mesh axes over which a parameter is sharded until FSDP gathers it for `forward`."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return []
    names = mesh.mesh_dim_names or ("an unnamed axis",) * mesh.ndim
    placed = zip(names, mesh.shape, parameter.placements, strict=True)
    return [n for n, size, p in placed if size > 1 and not p.is_replicate() and n not in ("ep", "tp", "etp")]
