"""The model of expert parallelism on paper: copies of tokens, and its comparison with measurements.

Its predictions are in the documentation, which other tests compare with it.
"""

import itertools

import pytest

from benchmarks import ep_model, page
from benchmarks.ep_model import (
    ALLGATHER,
    ALLTOALL,
    HIERARCHICAL,
    SYMMETRIC,
    Copies,
    Ranks,
)
from benchmarks.shapes import Shape

pytest.importorskip("tomllib", reason="benchmarks/shapes.toml")

RESULTS = page.load(page.LAYER_RESULTS, "layer")
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


def test_an_all_gather_brings_all_tokens():
    assert ALLGATHER.traffic(SMALL, Ranks(2)) == (Copies(1, 0), Copies(1, 0))
    gather, back = ALLGATHER.traffic(ep_model.DEEPSEEK_V3, Ranks(64))
    assert (gather.fast, gather.slow) == (63, 7), "a node gets 56 ranks' rows over 8 links"
    assert (back.fast, back.slow) == (7, 56)


def ep_results(machine, **rows):
    """Like an ``ep.json``."""
    named = [{"name": name.replace("_", " "), "ms": ms} for name, ms in rows.items()]
    shapes = [{"name": n, "tokens_per_rank": 8192, "rows": named} for n in ("qwen3-30b-a3b", "another")]
    return {"machine": machine, "ranks": 2, "shapes": shapes}


def test_the_prediction_has_the_experts_of_the_measurement():
    times = {"no communication": 5.0, "alltoall": 6.0, "symmetric": 7.0, "allgather": None, "unknown": 1.0}
    found = ep_model.checks(RESULTS, [ep_results("another GPU", **times)])
    assert [(c.engine, c.measured_ms) for c in found] == [(SYMMETRIC, 7.0), (ALLTOALL, 6.0)]
    alltoall = ep_model.predict(RESULTS, ep_model.layers()["qwen3-30b-a3b"], 2, ALLTOALL)
    assert found[1].predicted_ms == pytest.approx(5.0 + alltoall.exposed_ms)
    assert found[1].deviation == pytest.approx(found[1].predicted_ms / 6.0 - 1)
    assert not ep_model.checks(RESULTS, [ep_results("another GPU", alltoall=6.0)]), "without the experts' own time"
