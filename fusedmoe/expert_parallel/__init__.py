"""Expert parallelism: the ranks that share the experts of a layer, and the engines that move tokens between them."""

from fusedmoe.expert_parallel.group import ExpertParallel

__all__ = ["ExpertParallel"]
