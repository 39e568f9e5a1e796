"""The benchmark section `ep` on two processes: all of its variants compute the same, and it writes their figures."""

import json
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from benchmarks import ep, ep_run, ep_train
from benchmarks.ep import CODES, FUSED_PEER, REFERENCE, UNFUSED_PEER
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
    written = ep_run.run(shapes, {SHAPE.name: (TOKENS,)}, CPU, torch.float32, 2, Path(folder))
    return None if written is None else str(written)


def test_the_section_writes_its_figures(ranks, tmp_path):
    written = ranks.run(section_on_a_rank, str(tmp_path))
    assert written[1] is None, "the first rank writes"
    results = json.loads(Path(written[0]).read_text())
    assert (results["ranks"], results["backend"], results["dtype"]) == (2, "gloo", "float32")
    settings = [(s["name"], s["tokens_per_rank"], s["recipe"]) for s in results["shapes"]]
    assert settings == [("tiny", TOKENS, "bf16"), ("tiny", TOKENS, "fp8_block")]
    for entry in results["shapes"][:1]:
        rows = {row["name"]: row for row in entry["rows"]}
        assert list(rows) == [name for name in ep.CANDIDATES if name != CODES]
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
    quantized = {row["name"]: row for row in results["shapes"][1]["rows"]}
    assert [*quantized] == [name for name in ep.CANDIDATES if name not in (UNFUSED_PEER, FUSED_PEER)]
    for name in (REFERENCE, "allgather"):
        assert 1e-3 < quantized[name]["errors"]["y"] < 0.1, "of FP8"
        assert quantized[name]["ms"] > 0


@pytest.mark.slow
def test_the_section_of_training_writes_its_figures(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    results = json.loads(ep_train.run(2, ep_train.TINY, tmp_path).read_text())
    assert [*results["rows"]] == [*ep_train.VARIANTS]
    stock, *others, quantized, codes = (row["losses"] for row in results["rows"].values())
    for losses in others:
        assert losses == pytest.approx(stock, rel=1e-5)
    assert others[0] != quantized == pytest.approx(stock, rel=0.02)
    assert codes == pytest.approx(quantized, rel=1e-3), "codes lose little when they are quantized again"
    text = ep_train.render([results | {"rows": results["rows"] | {"other": {"note": "failed"}}}])
    assert text.count("\n| ") == 1 + len(ep_train.VARIANTS)
    assert "| 1.00 |" in text


@pytest.mark.slow
def test_a_job_that_fails_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(ep_train, "VARIANTS", {"unknown": ("--experts", "unknown")})
    results = json.loads(ep_train.run(1, ep_train.TINY, tmp_path).read_text())
    assert "invalid choice: 'unknown'" in results["rows"]["unknown"]["note"]
