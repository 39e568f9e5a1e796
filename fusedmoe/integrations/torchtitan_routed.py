"""Experts and their exchange of tokens for torchtitan: an override that replaces a model's `RoutedExperts`.

    --override.imports fusedmoe.integrations.torchtitan_routed.routed_experts
    --override.imports 'fusedmoe.integrations.torchtitan_routed.routed_experts={"max_tokens": 8192}'

Dispatch, experts and combine are one chain of fusedmoe's ops. `ExpertParallel` takes the place of torchtitan's token
dispatcher. For everything else see `torchtitan`. Importing this module imports torchtitan.

Source of the interface: ``torchtitan.models.common.moe`` and ``torchtitan.models.common.token_dispatcher``,
torchtitan 0.3.

Axes: B sequences, L tokens of each, T = B L tokens, K chosen experts per token, E experts, D model features.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from fusedmoe.base.errors import InputError
from fusedmoe.expert_parallel import ExpertParallel
from fusedmoe.fusion.report.data import Explanation
from fusedmoe.integrations.ranks_of_mesh import ranks_of
from fusedmoe.integrations.torchtitan import WithChain, experts
from fusedmoe.layers.sequential import Sequential
from fusedmoe.ops import Combine, Dispatch, Op, Scale


class FusedRoutedExperts(WithChain, RoutedExperts):  # type: ignore[misc]
    """``y[t] = sum over k of score[t, k] * expert[id[t, k]](x[t])``: dispatch, experts and combine in one chain.

    Under expert parallelism the ranks of the mesh axis "ep" exchange tokens with `ExpertParallel`.

    Attributes
    ----------
    inner_experts : FusedGroupedExperts
        The parameters of this rank.
    expert_parallel : ExpertParallel or None
        The ranks; `parallelize` sets them if the axis has more than one. All layers have the same object.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):  # type: ignore[misc]
        """torchtitan's configuration, and ``engine`` and ``max_tokens`` as for `ExpertParallel`."""

        engine: str = "auto"
        max_tokens: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.engine, self.max_tokens = config.engine, config.max_tokens
        self.expert_parallel: ExpertParallel | None = None

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        """Run the experts in bf16 on the tokens of this rank.

        Returns (B, L, D) in x's dtype.

        Parameters
        ----------
        x_BLD
            The tokens of this rank, any number of them.
        topk_scores_BLK
            The factors of the experts' results.
        topk_expert_ids_BLK
            Integers; 0 to E - 1, of all ranks.
        num_local_tokens_per_expert_E
            Is not read.
        """
        parameters = self.inner_experts.chain_parameters()
        y_TD = self.chain_for(parameters).forward_with(
            parameters,
            x_BLD.flatten(0, 1).bfloat16(),
            expert_index=topk_expert_ids_BLK.flatten(0, 1),
            expert_weight=topk_scores_BLK.flatten(0, 1),
        )
        return y_TD.to(x_BLD.dtype).view(x_BLD.shape)

    def parallelize(self, parallel_dims: Any) -> None:
        """Shard the parameters as torchtitan does, and join the ranks of the axis "ep": every rank calls it."""
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:
            self.expert_parallel = ranks_of(mesh, engine=self.engine, max_tokens=self.max_tokens)
            self.forget_chain()

    def explain_rows(self, rows: int, arch: int | str | None = None) -> Explanation:
        """Return the plan of `forward` for ``rows`` evenly routed tokens; see `FusedGroupedExperts.explain_rows`."""
        parameters = self.inner_experts.parameters_to_explain()
        weight = parameters["down.weight"]
        kind: dict[str, Any] = {"device": weight.device, "requires_grad": torch.is_grad_enabled()}
        x_TD = torch.zeros(rows, weight.shape[1], dtype=torch.bfloat16, **kind)
        slots = torch.arange(rows * self.token_dispatcher.top_k, device=weight.device).view(rows, -1)
        routing = {
            "expert_index": slots % self.inner_experts.num_experts,
            "expert_weight": torch.ones(slots.shape, dtype=torch.float32, **kind),
        }
        return self.chain_for(parameters).explain_with(parameters, x_TD, arch=arch, **routing)

    def _recipe(self) -> str | None:
        return self.inner_experts.recipe  # type: ignore[no-any-return]

    def _new_chain(self, sizes: tuple[int, ...], bias: bool) -> Sequential:
        ep = self.expert_parallel
        if ep is not None:
            ep = ep.chosen_for(self.token_dispatcher.top_k)
        ops: OrderedDict[str, Op] = OrderedDict(dispatch=Dispatch(self.inner_experts.num_experts, expert_parallel=ep))
        for name, op in self.inner_experts.ops_of(sizes, bias).items():
            if name == "down" and not bias:
                ops["scale"] = Scale("probs")  # before `down`, where it fuses; a bias of `down` must be scaled too
            ops[name] = op
        ops["combine"] = Combine("probs" if bias else None, expert_parallel=ep)
        return Sequential(ops)


@override(target=RoutedExperts.Config, description="Experts and their exchange of tokens by fusedmoe.")  # type: ignore[untyped-decorator]
def routed_experts(
    config: Any, *, recipe: str | None = None, engine: str = "auto", max_tokens: int | None = None
) -> Any:
    """The override of experts and token dispatcher: return the configuration of `FusedRoutedExperts` for torchtitan's.

    Raises `InputError`: the configuration, or that of its experts, belongs to another class.

    Parameters
    ----------
    config
        Configuration of `RoutedExperts`, with any token dispatcher. A configuration of fused experts is returned
        unchanged.
    recipe
        See `FusedGroupedExperts`.
    engine, max_tokens
        See `ExpertParallel`.
    """
    if type(config) is FusedRoutedExperts.Config:
        return config
    if type(config) is not RoutedExperts.Config:
        found = type(config)
        raise InputError(
            f"routed_experts: config: expected a configuration of RoutedExperts, got "
            f"{found.__module__}.{found.__qualname__}"
        )
    dispatcher = config.token_dispatcher
    return derive(
        config,
        FusedRoutedExperts.Config,
        inner_experts=experts(config.inner_experts, recipe=recipe),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=dispatcher.num_experts, top_k=dispatcher.top_k),
        engine=engine,
        max_tokens=max_tokens,
    )
