"""The model of expert parallelism on paper: copies of tokens, and its comparison with measurements.

Its predictions are in the documentation, which other tests compare with it.
"""

import itertools
import json
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import ep, ep_model, page
from benchmarks.ep_model import (
    ALLGATHER,
    ALLTOALL,
    HIERARCHICAL,
    SYMMETRIC,
    Copies,
    Ranks,
)
from benchmarks.shapes import Shape
from fusedmoe.expert_parallel.engine import expected_share

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


def test_the_approximation_is_close_for_many_experts():
    for parts in (2, 8, 64):
        exact = ep_model.chance(ep_model.DEEPSEEK_V3, parts)
        assert expected_share(parts, ep_model.DEEPSEEK_V3.top_k) == pytest.approx(exact, rel=0.03)
        assert expected_share(parts, ep_model.DEEPSEEK_V3.top_k) < exact


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


def test_the_section_ep_needs_torchrun(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        command.main(["--only", "ep"])
    assert "torchrun --nproc-per-node P -m benchmarks --only ep" in capsys.readouterr().err


def test_host_synchronisations_are_counted(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call():
        assert modes == ["warn"]
        for text in ("called a synchronizing CUDA operation", "another", "called a synchronizing CUDA operation"):
            warnings.warn(text, UserWarning, stacklevel=1)

    assert ep.host_syncs(call) == 2
    assert modes == ["warn", 0]


class Profiled:
    """In the place of torch's profiler: it writes a given trace."""

    events: list[dict]

    def __init__(self, activities):
        pass

    def start(self):
        pass

    def stop(self):
        pass

    def export_chrome_trace(self, file):
        Path(file).write_text(json.dumps({"traceEvents": self.events}))


def test_the_sms_of_communication_are_the_blocks_of_its_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(ep, "profile", Profiled)

    def kernel(name, blocks, us):
        return {"cat": "kernel", "name": name, "dur": us, "args": {"grid": [blocks, 1, 1]}}

    nccl, other = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel_cutlass_RaggedM"

    def copied(nbytes, us, kind="PtoP"):
        return {"cat": "gpu_memcpy", "name": f"Memcpy {kind} (Device -> Device)", "dur": us, "args": {"bytes": nbytes}}

    none = {"copies_gb_s": None}
    Profiled.events = [kernel(nccl, 24, 90), kernel(other, 132, 500), kernel("barrier_kernel", 1, 7), {"name": nccl}]
    assert ep.communication(lambda: None, torch.device("cuda")) == {"sms": 24, "us": 97} | none
    Profiled.events = [kernel(other, 132, 500), copied(4 << 20, 9, "DtoD"), copied(1 << 18, 5)]
    assert ep.communication(lambda: None, torch.device("cuda")) == {"sms": 0, "us": 0} | none
    Profiled.events += [copied(3_000_000, 8), copied(5_000_000, 12)]
    assert ep.communication(lambda: None, torch.device("cuda")) == {"sms": 0, "us": 0, "copies_gb_s": 400.0}
    Profiled.events = [{"cat": "kernel", "name": nccl, "dur": 1, "args": {}}]
    assert ep.communication(lambda: None, torch.device("cuda")) is None
