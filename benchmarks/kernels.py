"""Each kernel of an expert MLP on dispatched rows: the products with their fused epilogues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks import reference
from benchmarks.cases import Case, Peer, Row, release, run_case
from benchmarks.ceiling import Ceiling
from benchmarks.peers.ours import Ours
from benchmarks.peers.plain import TorchCompiled, TorchEager
from benchmarks.peers.quack import Quack
from benchmarks.problem import Problem
from fusedmoe.commands.timing import Timer


def fc1_flops(problem: Problem) -> float:
    """``2 R K N``, also for dgrad and wgrad."""
    return 2.0 * problem.rows * problem.hidden * 2 * problem.intermediate


def fc2_flops(problem: Problem) -> float:
    return fc1_flops(problem) / 2


CASES = (
    Case("fc1_activation", "FC1 + SwiGLU, preactivation kept", fc1_flops, reference.fc1_activation),
    Case("fc2", "FC2", fc2_flops, reference.fc2),
    Case("fc2_dgrad_activation", "FC2 dgrad + dSwiGLU", fc2_flops, reference.fc2_dgrad_activation),
    Case(
        "fc2_dgrad_activation_scaled",
        "FC2 dgrad + dSwiGLU, row scale and its gradient",
        fc2_flops,
        reference.fc2_dgrad_activation_scaled,
    ),
    Case("fc1_dgrad", "FC1 dgrad", fc1_flops, reference.fc1_dgrad),
    Case("wgrad1", "FC1 wgrad", fc1_flops, reference.wgrad1),
    Case("wgrad2", "FC2 wgrad", fc2_flops, reference.wgrad2),
)
ALIGNED_CASES = (
    Case("fc1", "plain FC1, equal groups of 128-row multiples", fc1_flops, reference.fc1),
    Case("fc2_plain", "plain FC2, equal groups of 128-row multiples", fc2_flops, reference.fc2_plain),
)


def peers(tuned: bool = False) -> tuple[Peer, ...]:
    """Ours first; ``tuned`` lets the others autotune."""
    return Ours(), TorchEager(), TorchCompiled(), Quack(tuned)


def measure(
    problem: Problem,
    cases: Iterable[Case],
    taking_part: Iterable[Peer],
    timer: Timer,
    ceiling: Ceiling | None = None,
) -> Iterator[list[Row]]:
    """Yield the rows of each case on one problem."""
    taking_part = tuple(taking_part)
    for case in cases:
        yield run_case(case, problem, taking_part, timer, ceiling)
        release(problem.device)
