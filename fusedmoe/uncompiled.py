"""A chain as `torch.compile` meets it: a graph break, so that Dynamo does not trace the planner. Imported only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fusedmoe.chain import Chain
    from fusedmoe.kernels.options import KernelOptions


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_chain(chain: Chain, x: Tensor, named: dict[str, Tensor], options: KernelOptions) -> Tensor:
    """Return ``chain.run(x, named, options)``, run eagerly."""
    return chain.run(x, named, options)
