"""`ExpertParallel` in transformers' registry of expert parallelism: ``DistributedConfig(ep_implementation=...)``.

transformers shards the experts over the ranks of its mesh "ep", and replaces the ``forward`` of each experts module by
one that calls an implementation, with the parameters of this rank. The implementation gets the tokens that this rank
holds, and the numbers of their experts among those of all ranks. Importing this module imports transformers.

Source of the interface: ``transformers.distributed.expert_parallel``, transformers 5.24.

Axes: T tokens that this rank holds, K chosen experts per token, H features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from fusedmoe.base.errors import InputError
from fusedmoe.integrations.ranks_of_mesh import ranks_of
from fusedmoe.integrations.transformers.expert_modules import OPS, RANKS, top_k_of


def add(name: str, settings: dict[str, Any], runs_here: Callable[[nn.Module], bool]) -> None:
    """Add an implementation with these settings of `ExpertParallel`.

    ``runs_here``: whether a module of experts runs on fusedmoe.
    """

    def made(experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> Exchange:
        return Exchange(experts, ep_mesh, tp_mesh, settings, runs_here)

    EPImplementationInterface.register(name, made)


class Exchange(EPImplementation):
    """``y[t] = sum over k of w[t, k] * expert[index[t, k]](x[t])``, with the experts of all ranks of the mesh "ep".

    The ranks of the mesh "tp" hold the same tokens. Each of them exchanges its slice of these, so that an expert
    computes a token once.
    """

    def __init__(
        self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any, settings: dict[str, Any],
        runs_here: Callable[[nn.Module], bool],
    ) -> None:  # fmt: skip
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts, self._runs_here = experts, runs_here
        same, sharing = (dist.get_process_group_ranks(mesh.get_group()) for mesh in (tp_mesh, ep_mesh))
        if not {*same} <= {*sharing}:
            raise InputError(
                f"{type(experts).__name__}: expected all ranks that hold the same tokens to share the experts, got "
                f"ranks {same} with the same tokens and ranks {sharing} with the experts: ep_size is a multiple of "
                "tp_size"
            )
        ranks, top_k = ranks_of(ep_mesh, **settings), top_k_of(experts)
        experts.__dict__[RANKS] = ranks if top_k is None else ranks.chosen_for(top_k)
        experts.__dict__.pop(OPS, None)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return (T, H), of tokens (T, H), experts (T, K) and their weights (T, K)."""
        if not self._runs_here(self._experts):
            got = getattr(getattr(self._experts, "config", None), "_experts_implementation", None)
            raise InputError(
                f"{type(self._experts).__name__}: expected experts that run on fusedmoe, which exchanges their tokens, "
                f"got experts_implementation={got!r}: pass ep_implementation='all_to_all' for such experts"
            )
        given = hidden_states, top_k_index, top_k_weights
        if self.tp_mesh.size() == 1:
            return self.experts_forward(*given)  # type: ignore[no-any-return]
        y = self.experts_forward(*[_own_slice(t, self.tp_mesh) for t in given])
        return _of_slices(y, self.tp_mesh, hidden_states.shape)


def _own_slice(t: Tensor, mesh: Any) -> Tensor:
    """Return this rank's slice of the rows of a tensor that is the same on all ranks of a mesh.

    It is empty on some ranks if these are more than the rows.
    """
    whole = DTensor.from_local(t, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _of_slices(t: Tensor, mesh: Any, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of this shape that has these slices on the ranks of a mesh."""
    rows = DTensor.from_local(t.contiguous(), mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))  # type: ignore[arg-type]
    return rows.full_tensor()
