"""This package: its kernels, and its public API."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

import fusedmoe as fm
from benchmarks.cases import OURS, Candidate
from benchmarks.problem import Problem
from fusedmoe.kernels.options import DEFAULT


class Ours:
    """The functions of `fusedmoe.kernels.sm90.products`, and `fm.Sequential`."""

    name = OURS

    def fc1_activation(self, problem: Problem) -> Candidate:
        a, x, w, b = problem.activation, problem.x, problem.weight1, problem.bias1
        run = _functions().bind_grouped_gemm_activation(x, w, b, None, a, True, DEFAULT)
        return Candidate(lambda: run(x, w, b, problem.offsets, None), ("output", "preactivation"))

    def fc2(self, problem: Problem) -> Candidate:
        return _gemm(problem.activated, problem.weight2, problem.offsets, problem.bias2)

    def fc2_dgrad_activation(self, problem: Problem) -> Candidate:
        return _derivative(problem, None, ("grad_preactivation", "output"))

    def fc2_dgrad_activation_scaled(self, problem: Problem) -> Candidate:
        return _derivative(problem, problem.row_scale, ("grad_preactivation", "output", "grad_row_scale"))

    def fc1_dgrad(self, problem: Problem) -> Candidate:
        return _gemm(problem.grad_preactivation, problem.weight1.mT, problem.offsets)

    def wgrad1(self, problem: Problem) -> Candidate:
        return _wgrad(problem.grad_preactivation, problem.x, problem.offsets, "grad_weight1")

    def wgrad2(self, problem: Problem) -> Candidate:
        return _wgrad(problem.grad_y, problem.activated, problem.offsets, "grad_weight2")

    def fc1(self, problem: Problem) -> Candidate:
        return _gemm(problem.x, problem.weight1, problem.offsets)

    def fc2_plain(self, problem: Problem) -> Candidate:
        return _gemm(problem.activated, problem.weight2, problem.offsets)

    def mlp_forward(self, problem: Problem) -> Candidate:
        seq, x, splits = sequential(problem), problem.x.detach().requires_grad_(), problem.splits
        return Candidate(lambda: seq(x, splits=splits))

    def mlp_step(self, problem: Problem) -> Candidate:
        seq, x, splits, dy = sequential(problem), problem.x.detach().requires_grad_(), problem.splits, problem.grad_y
        first, _, second = seq
        leaves: dict[str, Any] = {"grad_x": x, "grad_weight1": first.weight, "grad_weight2": second.weight}
        if problem.shape.biases:
            leaves |= {"grad_bias1": first.bias, "grad_bias2": second.bias}
        wanted = tuple(leaves.values())
        return Candidate(lambda: torch.autograd.grad(seq(x, splits=splits), wanted, dy), tuple(leaves))


def sequential(problem: Problem) -> fm.Sequential:
    """Return the expert MLP in the public API, with the problem's weights."""
    a = problem.activation
    wide, biases = 2 * problem.intermediate, problem.shape.biases
    first = fm.GroupedLinear(problem.experts, problem.hidden, wide, biases, "meta", problem.dtype)
    second = fm.GroupedLinear(problem.experts, problem.intermediate, problem.hidden, biases, "meta", problem.dtype)
    first.weight, second.weight = nn.Parameter(problem.weight1), nn.Parameter(problem.weight2)
    if problem.bias1 is not None and problem.bias2 is not None:
        first.bias, second.bias = nn.Parameter(problem.bias1), nn.Parameter(problem.bias2)
    return fm.Sequential(first, fm.SwiGLU(limit=a.limit, alpha=a.alpha, offset=a.offset), second)


def _functions() -> Any:
    return importlib.import_module("fusedmoe.kernels.sm90.products")


def _gemm(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Candidate:
    run = _functions().bind_grouped_gemm(x, weight, bias, None, DEFAULT)
    return Candidate(lambda: run(x, weight, bias, offsets, None))


def _derivative(problem: Problem, scale: Tensor | None, names: tuple[str, ...]) -> Candidate:
    dy, w, p, offsets = problem.grad_y, problem.weight2, problem.preactivation, problem.offsets
    bind = _functions().bind_grouped_gemm_activation_backward
    run = bind(dy, w, p, scale, problem.activation, True, scale is not None, DEFAULT)
    return Candidate(lambda: run(dy, w, offsets, p, scale)[: len(names)], names)


def _wgrad(dy: Tensor, x: Tensor, offsets: Tensor, name: str) -> Candidate:
    run = _functions().bind_grouped_wgrad(dy, x, offsets, x.dtype, False, DEFAULT)
    return Candidate(lambda: run(dy, x, offsets), (name,))
