"""The expert MLP on dispatched rows through the public API: forward, forward + backward, and their difference.

``fm.Sequential(GroupedLinear, SwiGLU, GroupedLinear)`` is compared with hand-written chains. All peers return the
gradients of the rows, the weights and the biases, if any.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks import reference
from benchmarks.cases import Case, Peer, Row
from benchmarks.ceiling import Ceiling
from benchmarks.peers.ours import Ours, sequential
from benchmarks.peers.plain import TorchCompiled, TorchEager
from benchmarks.peers.quack import Quack
from benchmarks.problem import Problem

FORWARD, STEP, BACKWARD = "forward", "forward + backward", "backward"


def forward_flops(problem: Problem) -> float:
    return problem.shape.forward_flops(problem.rows)


def step_flops(problem: Problem) -> float:
    return 3 * forward_flops(problem)


CASES = (
    Case("mlp_forward", FORWARD, forward_flops, reference.mlp_forward, grad=True, keeps=True),
    Case("mlp_step", STEP, step_flops, reference.mlp_step, grad=True),
)


def peers(tuned: bool = False) -> tuple[Peer, ...]:
    return Ours(), TorchEager(), TorchCompiled(), Quack(tuned)


def with_backward(rows: list[Row], problem: Problem, ceiling: Ceiling | None) -> list[Row]:
    """Append one row per peer: forward + backward minus forward."""
    forward = {row.peer: row.ms for row in rows if row.case == FORWARD}
    taken = {
        row.peer: row.ms - first
        for row in rows
        if row.case == STEP and row.ms is not None and (first := forward.get(row.peer)) is not None
    }
    ours = taken.get(Ours.name)
    more = []
    for peer, ms in taken.items():
        if ms <= 0:  # noise of tiny shapes
            continue
        tflops = (step_flops(problem) - forward_flops(problem)) / ms / 1e9
        more.append(
            replace(
                Row(BACKWARD, peer, "by difference", ms=ms, tflops=tflops),
                ceiling_percent=100 * tflops / ceiling.tflops if ceiling else None,
                ours_is=ms / ours if ours and ours > 0 else None,
            )
        )
    return rows + more


def plan(problem: Problem) -> str:
    """Return our plan, as `explain` prints it."""
    x = problem.x.detach().requires_grad_()
    return str(sequential(problem).explain(x, splits=problem.splits))
