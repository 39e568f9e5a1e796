"""Calls of other projects' kernels; each package is imported by the first call that needs it.

Axes: R rows sorted by expert, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

NOT_INSTALLED = "not installed"


def interleave(t: Tensor, dim: int = -1) -> Tensor:
    """Turn ``[gate | up]`` along ``dim`` into alternating features."""
    dim %= t.dim()
    halves: Tensor = t.unflatten(dim, (2, -1))
    return halves.transpose(dim, dim + 1).flatten(dim, dim + 1).contiguous()


def deinterleave(t: Tensor, dim: int = -1) -> Tensor:
    """Invert `interleave`."""
    dim %= t.dim()
    pairs: Tensor = t.unflatten(dim, (-1, 2))
    return pairs.transpose(dim, dim + 1).flatten(dim, dim + 1)


def quack_interface() -> Any:
    """Return ``quack.gemm_interface``."""
    from quack import gemm_interface

    return gemm_interface


def quack_expert_mlp(activation: str, tuned: bool) -> Callable[..., Tensor]:
    """Return ``mlp(x, weight1, weight2, bias1, bias2, cu_seqlens, ones)``: QuACK's fastest chain on sorted rows.

    The steps are those of SonicMoE without gather and combine. ``x`` (R, H), ``weight1`` (E, 2 I, H) with alternating
    gate and up rows, ``weight2`` (E, H, I), biases or None, ``cu_seqlens`` (E + 1,) int32. QuACK has no kernel for the
    gradient of a bias, so it is a product with ``ones`` (R, 8), which reads the gradient of the output once.
    """
    q = quack_interface()

    class ExpertMlp(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, cu: Tensor, ones: Tensor
        ) -> Tensor:
            p, a = q.gemm_gated(x, w1.mT, bias=b1, activation=activation, cu_seqlens_m=cu, tuned=tuned)
            ctx.save_for_backward(x, w1, w2, p, cu, ones)
            return q.gemm(a, w2.mT, bias=b2, cu_seqlens_m=cu, tuned=tuned)  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            x, w1, w2, p, cu, ones = ctx.saved_tensors
            # SonicMoE also uses the static scheduler
            how = {"activation": activation, "dynamic_scheduler": False, "tuned": tuned}
            dp, a = q.gemm_dgated(dy, w2, p, cu_seqlens_m=cu, **how)
            dw2 = q.gemm(dy.mT, a, cu_seqlens_k=cu, tuned=tuned)
            dw1 = q.gemm(dp.mT, x, cu_seqlens_k=cu, tuned=tuned)
            dx = q.gemm(dp, w1, cu_seqlens_m=cu, tuned=tuned)
            db1 = db2 = None
            if ones is not None:
                db1, db2 = (q.gemm(d.mT, ones, cu_seqlens_k=cu, tuned=tuned)[..., 0] for d in (dp, dy))
            return dx, dw1, dw2, db1, db2, None, None

    return ExpertMlp.apply


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


def why_not(raised: Exception, packages: Collection[str]) -> str:
    """Return an exception of a peer as a one-line note; ``packages`` are the modules that the peer needs."""
    if isinstance(raised, ModuleNotFoundError) and raised.name and raised.name in packages:
        return NOT_INSTALLED
    lines = str(raised).strip().splitlines() or [""]
    return f"{type(raised).__name__}: {lines[0]}"[:160].rstrip(": ")
