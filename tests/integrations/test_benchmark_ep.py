"""The benchmark section `ep` on two processes: all of its variants compute the same, and it writes their figures."""

import json
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from benchmarks import ep, ep_run
from benchmarks.ep import FUSED_PEER, REFERENCE, UNFUSED_PEER
from benchmarks.shapes import Shape

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

pytestmark = pytest.mark.distributed

SHAPE = Shape("tiny", 24, hidden=16, intermediate=8, experts=6, top_k=3)
TOKENS = 24
CPU = torch.device("cpu")
RAN = (REFERENCE, "allgather", UNFUSED_PEER, FUSED_PEER)  # on every machine


def section_on_a_rank(rank, folder):
    shapes = (SHAPE, Shape("dispatched", 8, 16, 8, 6, top_k=1), Shape("odd", 8, 16, 8, experts=5, top_k=2))
    written = ep_run.run(shapes, (TOKENS,), CPU, torch.float32, 2, Path(folder))
    return None if written is None else str(written)


def test_the_section_writes_its_figures(ranks, tmp_path):
    written = ranks.run(section_on_a_rank, str(tmp_path))
    assert written[1] is None, "the first rank writes"
    results = json.loads(Path(written[0]).read_text())
    assert (results["ranks"], results["backend"], results["dtype"]) == (2, "gloo", "float32")
    assert [(s["name"], s["tokens_per_rank"]) for s in results["shapes"]] == [("tiny", TOKENS)]
    for entry in results["shapes"]:
        rows = {row["name"]: row for row in entry["rows"]}
        assert list(rows) == list(ep.CANDIDATES)
        base = rows[REFERENCE]["ms"]
        for name, row in rows.items():
            if row["note"]:
                assert (row["ms"], name in RAN) == (None, False)
                continue
            assert set(row["errors"]) == {"y", *ep.Leaves._fields}
            assert all(0 < error < 1e-5 for error in row["errors"].values()), name
            if name != REFERENCE:
                assert row["exposed_ms"] == pytest.approx(row["ms"] - base)
        assert "dispatch.gather.GatherTokens" in rows["allgather"]["plan"]
        figures = entry["exchanges"]["allgather"]["exchange"]
        assert figures["bytes"] == entry["tokens_per_rank"] * SHAPE.hidden * 4
        assert figures["gb_s"] == pytest.approx(figures["bytes"] / figures["ms"] / 1e6)
