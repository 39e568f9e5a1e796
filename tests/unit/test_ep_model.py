"""The model of expert parallelism on paper: copies of tokens. The documentation has its predictions."""

import itertools

import pytest

from benchmarks import ep_model
from benchmarks.ep_model import ALLTOALL, HIERARCHICAL, Ranks
from benchmarks.shapes import Shape

pytest.importorskip("tomllib", reason="benchmarks/shapes.toml")
SMALL = Shape("small", 4, hidden=8, intermediate=4, experts=8, top_k=3)


def enumerated(shape, ranks, node):
    """The mean copies that a token of rank 0 causes, over all choices of experts: (alltoall, by node)."""
    here = shape.experts // ranks
    found = [[0, 0], [0, 0]]  # over NVLink, over the slow link
    choices = list(itertools.combinations(range(shape.experts), shape.top_k))
    for chosen in choices:
        targets = [expert // here for expert in chosen]
        for r in set(targets) - {0}:
            found[0][r >= node] += 1
        for at in {r // node for r in targets}:
            found[1][1] += at != 0  # to the first rank of the other node
            found[1][0] += sum(r // node == at and r % node != 0 for r in set(targets))
    return [[n / len(choices) for n in pair] for pair in found]


@pytest.mark.parametrize(("ranks", "node"), [(2, 8), (4, 8), (4, 2), (8, 2), (8, 4)])
def test_copies_are_those_of_all_choices(ranks, node, monkeypatch):
    monkeypatch.setattr(ep_model, "NODE", node)
    engines = (ALLTOALL, HIERARCHICAL)
    for engine, expected in zip(engines, enumerated(SMALL, ranks, node), strict=True):
        for copies in engine.traffic(SMALL, Ranks(ranks)):
            assert [copies.fast, copies.slow] == pytest.approx(expected), engine.name
