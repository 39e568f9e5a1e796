"""Activations apart from products: the kernels alone, and the expert MLP whose products are those of torch.

Such an MLP is that of ``bf16`` on Blackwell. Here it runs on Hopper, with the rules of Blackwell for torch's products
in place of those of Hopper.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

import fusedmoe as fm
from benchmarks import mlp, reference
from benchmarks.cases import OURS, Candidate, Case, Peer
from benchmarks.marked import table
from benchmarks.peers.ours import sequential
from benchmarks.peers.plain import COMPILED, EAGER, TorchCompiled, TorchEager, leaves_of
from benchmarks.problem import Problem
from fusedmoe.builtin_rules.requirements import OnSm90
from fusedmoe.builtin_rules.sm100.grouped_mm import GroupedMm, GroupedMmDgrad

FORWARD, BACKWARD = "SwiGLU, row scale", "derivative, gradient of the row scale"
STEP = "expert MLP with torch's products, forward + backward"
PLAIN = "ops in PyTorch"
PRODUCTS = ("sm90.grouped_*", "sm90.gathered_*")


@contextmanager
def products_of_torch() -> Iterator[None]:
    """Let torch compute the products in the block."""

    class OnHopper(OnSm90, GroupedMm, name="benchmarks.grouped_mm", direction="forward"):
        """`sm100.grouped_mm` on Hopper."""

    class DgradOnHopper(OnSm90, GroupedMmDgrad, name="benchmarks.grouped_mm_dgrad", direction="backward"):
        """`sm100.grouped_mm_dgrad` on Hopper."""

    with fm.register(OnHopper), fm.register(DgradOnHopper), fm.disabled(*PRODUCTS):
        yield


def no_flops(problem: Problem) -> float:
    return 0.0


CASES = (
    Case("scaled_activation", FORWARD, no_flops, reference.scaled_activation),
    Case("scaled_activation_backward", BACKWARD, no_flops, reference.scaled_activation_backward),
    Case("mlp_step", STEP, mlp.step_flops, reference.mlp_step, grad=True),
)
GRADIENTS = ("grad_preactivation", "grad_row_scale")


class Ours:
    """The kernels, and `fm.Sequential`, to be called in `products_of_torch`."""

    name = OURS

    def scaled_activation(self, problem: Problem) -> Candidate:
        p, scale = problem.preactivation, problem.row_scale
        run = _functions().bind_activation(p, scale, problem.activation)
        return Candidate(lambda: run(p, scale))

    def scaled_activation_backward(self, problem: Problem) -> Candidate:
        d, p, scale = problem.grad_activated, problem.preactivation, problem.row_scale
        run = _functions().bind_activation_backward(d, p, scale, problem.activation, True, False)
        return Candidate(lambda: run(d, p, scale)[:2], GRADIENTS)

    def mlp_step(self, problem: Problem) -> Candidate:
        return _step(problem)


class InPyTorch:
    """The ops of this package without any rule."""

    name = PLAIN

    def scaled_activation(self, problem: Problem) -> Candidate:
        act, scale, p, s = *_ops(problem), problem.preactivation, problem.row_scale
        return Candidate(lambda: scale.compute(act.compute(p), s))

    def scaled_activation_backward(self, problem: Problem) -> Candidate:
        act, scale, d, p, s = *_ops(problem), problem.grad_activated, problem.preactivation, problem.row_scale
        (of_act,), (of_scale, of_rows), y = act.backward_ops(), scale.backward_ops(), act.compute(p)
        return Candidate(lambda: (of_act.compute(of_rows.compute(d, s), p), of_scale.compute(d, y, s)), GRADIENTS)

    def mlp_step(self, problem: Problem) -> Candidate:
        return _step(problem, "*")


def peers() -> tuple[Peer, ...]:
    return Ours(), InPyTorch(), TorchEager(), TorchCompiled()


def section(found: Mapping[str, Any]) -> list[str]:
    """Return the section of docs/benchmarks.md: text and table."""
    rows = []
    for shape in found["shapes"]:
        for case in (FORWARD, BACKWARD, STEP):
            ms = {r["peer"]: r["ms"] for r in shape["rows"] if r["case"] == case and r["ms"]}
            if OURS not in ms:
                continue
            moved = bytes_moved(shape, case)
            speed = f"{moved / ms[OURS] / 1e9:.2f}" if moved else ""
            others = [f"{ms[peer] / ms[OURS]:.2f}" if peer in ms else "" for peer in (PLAIN, EAGER, COMPILED)]
            rows.append([shape["name"], case, f"{ms[OURS]:.3f}", speed, *others])
    heading = {"machine": found["machine"], "commit": found["commit"], "reps": found["reps"]}
    head = ["shape", "case", "ms", "TB/s", *(f"x {peer}" for peer in (PLAIN, EAGER, COMPILED))]
    return [TEXT.format(**heading, copy=found["ceiling"]["copy_tb_s"]), table(head, rows) + "\n"]


def bytes_moved(shape: Mapping[str, Any], case: str) -> int:
    """Return the bytes that a case must read and write; 0 for the MLP."""
    wide = {FORWARD: 3, BACKWARD: 5}.get(case, 0)  # rows of I features, in bf16
    return 2 * wide * int(shape["rows_in_all"]) * int(shape["intermediate"])


TEXT = """\
## Activations apart from products

The kernels of [activations apart from products](kernels.md#activations-apart-from-products), and the expert MLP with
them and torch's products, on an {machine} (commit {commit}, medians of {reps} calls). On Blackwell, `bf16` runs in this
way; this MLP has no row scale. *ops in PyTorch* are the ops of `fusedmoe` without any rule, whose arithmetic is fp32.
So is that of *torch compiled*. *torch eager* rounds after each operation. A copy moves {copy:.2f} TB/s.
"""


def _ops(problem: Problem) -> tuple[fm.SwiGLU, fm.Scale]:
    a = problem.activation
    return fm.SwiGLU(limit=a.limit, alpha=a.alpha, offset=a.offset), fm.Scale("probs")


def _step(problem: Problem, *without: str) -> Candidate:
    chain, splits, dy, names = sequential(problem), problem.splits, problem.grad_y, tuple(leaves_of(problem))
    first, _, second = chain
    x = problem.x.detach().requires_grad_()
    leaves: dict[str, Tensor] = {"grad_x": x, "grad_weight1": first.weight, "grad_weight2": second.weight}
    leaves |= {"grad_bias1": first.bias, "grad_bias2": second.bias} if problem.shape.biases else {}

    def call() -> tuple[Tensor, ...]:
        with fm.disabled(*without) if without else nullcontext():
            return torch.autograd.grad(chain(x, splits=splits), [leaves[name] for name in names], dy)

    return Candidate(call, names)


def _functions() -> Any:
    return importlib.import_module("fusedmoe.kernels.sm90.products")
