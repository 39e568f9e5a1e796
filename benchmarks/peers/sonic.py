"""SonicMoE's layer for given routing. Each dispatched row is a token with one expert of weight 1.

So the layer computes the same products as the other peers. It also gathers the rows, in its kernels, and combines them.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cases import Candidate
from benchmarks.peers.plain import leaves_of
from benchmarks.peers.quack import concatenated
from benchmarks.problem import Problem
from fusedmoe.bench.peers import interleave, sonic_functions

_NOTE = "with gather and combine"


class Sonic:
    """``tuned`` keeps SonicMoE's default: autotuning QuACK's kernels for each new row count (45 seconds or more)."""

    name = "SonicMoE"
    packages = ("sonicmoe", "quack")

    def __init__(self, tuned: bool = False) -> None:
        self.tuned = tuned

    def mlp_forward(self, problem: Problem) -> Candidate:
        call, _ = self._mlp(problem)
        return Candidate(call, note=_NOTE)

    def mlp_step(self, problem: Problem) -> Candidate:
        (call, leaves), dy = self._mlp(problem), problem.grad_y
        wanted = tuple(leaves.values())
        return Candidate(lambda: torch.autograd.grad(call(), wanted, dy), tuple(leaves), concatenated, _NOTE)

    def _mlp(self, problem: Problem) -> tuple[Any, dict[str, torch.Tensor]]:
        functional, kind = sonic_functions(self.tuned)
        if problem.activation.alpha != 1 or problem.activation.limit is not None:
            raise NotImplementedError("SonicMoE has no clamped SwiGLU")
        leaves = leaves_of(problem)
        leaves["grad_weight1"] = interleave(problem.weight1, 1).requires_grad_()
        x, w1, w2 = leaves.values()
        token = torch.arange(problem.rows, device=problem.device, dtype=torch.int32)
        weight = torch.ones(problem.rows, device=problem.device)
        expert, experts = problem.expert_of_row.to(torch.int32), problem.experts

        def call() -> torch.Tensor:
            stock1, stock2 = w1.permute(1, 2, 0), w2.permute(1, 2, 0)
            y, _ = functional.moe_general_routing_inputs(
                x, weight, token, expert, stock1, None, stock2, None, experts, 0, kind.SWIGLU
            )
            return y

        return call, leaves
