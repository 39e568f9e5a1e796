"""SonicMoE: whole layers, for `benchmarks.layer`, and its modules, for `benchmarks.train`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers.quack import deinterleave, interleave, quack_interface
from fusedmoe.commands.bench.layer import Candidate, Peer, Work


class Sonic(NamedTuple):
    """SonicMoE's modules.

    ``use(tuned)`` lets it call QuACK's kernels with tuned or with default configurations until the next such call.
    """

    functional: Any
    activations: Any
    use: Callable[[bool], None]


def sonic_modules() -> Sonic:
    """Return `sonicmoe.functional`, its enumeration of activations, and the choice of configurations.

    By itself, SonicMoE always tunes, which takes about a minute for each layer. QuACK keeps the configurations that it
    found in the folder ``QUACK_CACHE_DIR``.
    """
    from sonicmoe import functional
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import backward, forward

    interface = quack_interface()
    called = [
        (module, name, {tuned: functools.partial(getattr(interface, name), tuned=tuned) for tuned in (False, True)})
        for module in (forward, backward)
        for name in ("gemm", "gemm_gated", "gemm_dgated")
        if hasattr(module, name)
    ]

    def use(tuned: bool) -> None:
        for module, name, by_tuned in called:
            setattr(module, name, by_tuned[tuned])

    return Sonic(functional, ActivationType, use)


def sonic(work: Work, tuned: bool = False) -> Candidate:
    """Return SonicMoE's layer with its router, whose logits are in the dtype of the tokens."""
    functional, kind, use = sonic_modules()
    leaves, top_k = work.leaves(interleave(work.weight1, 1)), work.sizes.top_k
    x, router, weight1, weight2 = leaves

    def layer(inference: bool) -> Tensor:
        use(tuned)
        stock1, stock2 = weight1.permute(1, 2, 0), weight2.permute(1, 2, 0)
        y, _, _ = functional.moe_TC_softmax_topk_layer(
            x, router, stock1, None, stock2, None, top_k, 0, kind.SWIGLU, inference
        )
        return y  # type: ignore[no-any-return]

    def chosen() -> Tensor:
        with torch.no_grad():
            logits = F.linear(x, router)
            _, index = functional.TC_Softmax_Topk_Router_Function.apply(logits, len(router), top_k, True, False)
        return index.long()  # type: ignore[no-any-return]

    own = functools.partial(deinterleave, dim=0)
    return Candidate(functools.partial(layer, False), leaves, chosen, functools.partial(layer, True), own)


SONIC = Peer("SonicMoE", sonic, ("cuda",))
SONIC_TUNED = Peer("SonicMoE tuned", functools.partial(sonic, tuned=True), ("cuda",))
