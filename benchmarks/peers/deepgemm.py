"""DeepGEMM's bf16 grouped product, for groups whose sizes are multiples of 128 rows.

DeepGEMM pins another version of tvm-ffi, so ``python -m benchmarks --only deepgemm`` runs in a separate environment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.cases import Candidate
from benchmarks.problem import Problem


class DeepGemm:
    """Plain products."""

    name = "DeepGEMM"

    def fc1(self, problem: Problem) -> Candidate:
        return self._gemm(problem.x, problem.weight1, problem)

    def fc2_plain(self, problem: Problem) -> Candidate:
        return self._gemm(problem.activated, problem.weight2, problem)

    def _gemm(self, x: Tensor, weight: Tensor, problem: Problem) -> Candidate:
        import deep_gemm

        expert_of_row = problem.expert_of_row.to(torch.int32)

        def call() -> Tensor:
            y = x.new_empty(x.shape[0], weight.shape[1])
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, weight, y, expert_of_row)
            return y

        return Candidate(call)
