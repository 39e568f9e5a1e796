"""QuACK, whose kernels SonicMoE uses: its varlen products on rows sorted by expert.

Gate and up are alternating features, QuACK's native layout, prepared outside the timing. In this interface,
``swiglu_oai`` has no clamp. This saves a little work, and results are equal: no preactivation comes near the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Candidate
from benchmarks.peers.plain import leaves_of
from benchmarks.problem import Problem


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


_INTERLEAVED = {"preactivation": -1, "grad_preactivation": -1, "grad_weight1": 0, "grad_bias1": 0}


def concatenated(name: str, t: Tensor) -> Tensor:
    """Return one expert's part of an output in the ``[gate | up]`` layout."""
    return deinterleave(t, _INTERLEAVED[name]) if name in _INTERLEAVED else t


class Quack:
    """``tuned`` autotunes for each shape (almost a minute each) instead of using the default configurations."""

    name = "QuACK"

    def __init__(self, tuned: bool = False) -> None:
        self.tuned = tuned

    def fc1_activation(self, problem: Problem) -> Candidate:
        q, x, w, cu = quack_interface(), problem.x, interleave(problem.weight1, 1), problem.cu_seqlens
        how = {"activation": _activation(problem), "tuned": self.tuned}
        bias = None if problem.bias1 is None else interleave(problem.bias1)
        return Candidate(
            lambda: q.gemm_gated(x, w.mT, bias=bias, cu_seqlens_m=cu, **how),
            ("preactivation", "output"),
            concatenated,
            _note(problem),
        )

    def fc2(self, problem: Problem) -> Candidate:
        return self._gemm(problem.activated, problem.weight2.mT, problem, problem.bias2)

    def fc2_dgrad_activation(self, problem: Problem) -> Candidate:
        return self._dgated(problem, ("grad_preactivation", "output"))

    def fc2_dgrad_activation_scaled(self, problem: Problem) -> Candidate:
        names = ("grad_preactivation", "output", "grad_row_scale")
        return self._dgated(problem, names, colvec_scale=problem.row_scale, colvec_reduce=True)

    def fc1_dgrad(self, problem: Problem) -> Candidate:
        # the product sums over gate and up, so their order does not matter
        return self._gemm(problem.grad_preactivation, problem.weight1, problem)

    def wgrad1(self, problem: Problem) -> Candidate:
        return self._wgrad(problem.grad_preactivation, problem.x, problem, "grad_weight1")

    def wgrad2(self, problem: Problem) -> Candidate:
        return self._wgrad(problem.grad_y, problem.activated, problem, "grad_weight2")

    def fc1(self, problem: Problem) -> Candidate:
        return self._gemm(problem.x, problem.weight1.mT, problem)

    def fc2_plain(self, problem: Problem) -> Candidate:
        return self._gemm(problem.activated, problem.weight2.mT, problem)

    def mlp_forward(self, problem: Problem) -> Candidate:
        call, _ = self._mlp(problem)
        return Candidate(call, note=_note(problem))

    def mlp_step(self, problem: Problem) -> Candidate:
        (call, leaves), dy = self._mlp(problem), problem.grad_y
        wanted = tuple(leaves.values())
        return Candidate(lambda: torch.autograd.grad(call(), wanted, dy), tuple(leaves), concatenated, _note(problem))

    def _gemm(self, x: Tensor, w: Tensor, problem: Problem, bias: Tensor | None = None) -> Candidate:
        q, cu, tuned = quack_interface(), problem.cu_seqlens, self.tuned
        return Candidate(lambda: q.gemm(x, w, bias=bias, cu_seqlens_m=cu, tuned=tuned))

    def _wgrad(self, dy: Tensor, x: Tensor, problem: Problem, name: str) -> Candidate:
        q, cu, tuned = quack_interface(), problem.cu_seqlens, self.tuned
        return Candidate(lambda: q.gemm(dy.mT, x, cu_seqlens_k=cu, tuned=tuned), (name,))

    def _dgated(self, problem: Problem, names: tuple[str, ...], **scale: Any) -> Candidate:
        q, dy, w, p = quack_interface(), problem.grad_y, problem.weight2, interleave(problem.preactivation)
        # SonicMoE also uses the static scheduler
        how = scale | {"activation": _activation(problem), "dynamic_scheduler": False, "tuned": self.tuned}
        cu = problem.cu_seqlens
        return Candidate(lambda: q.gemm_dgated(dy, w, p, cu_seqlens_m=cu, **how), names, concatenated, _note(problem))

    def _mlp(self, problem: Problem) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
        """Return QuACK's fastest chain on dispatched rows (SonicMoE's without gather and combine), and its leaves."""
        cu, mlp = problem.cu_seqlens, quack_expert_mlp(_activation(problem), self.tuned)
        ones = torch.ones(problem.rows, 8, device=problem.device, dtype=problem.dtype) if problem.shape.biases else None
        leaves = leaves_of(problem)
        for name in ("grad_weight1", "grad_bias1"):
            if name in leaves:
                leaves[name] = interleave(leaves[name].detach(), 1).requires_grad_()
        x, w1, w2 = (leaves[name] for name in ("grad_x", "grad_weight1", "grad_weight2"))
        b1, b2 = leaves.get("grad_bias1"), leaves.get("grad_bias2")
        return lambda: mlp(x, w1, w2, b1, b2, cu, ones), leaves


def _note(problem: Problem) -> str | None:
    return None if problem.activation.limit is None else "without the clamp"


def _activation(problem: Problem) -> str:
    a = problem.activation
    if (a.alpha, a.offset) == (1.0, 0.0) and a.limit is None:
        return "swiglu"
    if (a.alpha, a.offset) == (1.702, 1.0):
        return "swiglu_oai"
    raise NotImplementedError(f"QuACK has no activation like {a}")
