"""The benchmarks run, their references are right, and no peer can end a run."""

import json
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from kit import sm90_stand_ins
from kit.timers import CountingTimer

from benchmarks import (
    cases,
    gpu,
    host,
    host_trees,
    kernels,
    mlp,
    plot,
    recipes,
    reference,
    shapes,
)
from benchmarks.cases import Candidate, Case, Row
from benchmarks.ceiling import Ceiling
from benchmarks.peers.ours import Ours
from benchmarks.peers.plain import TorchEager
from benchmarks.problem import Problem
from benchmarks.shapes import Shape
from fusedmoe.numerics.recipes import RECIPES

CPU = torch.device("cpu")
TOP = Ceiling(tflops=800.0, copy_tb_s=3.0)


def tiny(activation="swiglu", routing="empty", dtype=torch.float32, rows=96):
    shape = Shape("tiny", rows // 2, 32, 16, 6, 2, activation)
    return Problem(shape, shapes.splits(rows, 6, routing), CPU, dtype)


def test_host_times_are_of_work_that_was_done():
    report = host.measure(CPU, rounds=10)
    for times in report.passes.values():
        assert set(times) == set(host.VARIANTS)
        assert all(0 < t.least_us <= t.median_us for t in times.values())
    forward, both = report.passes["forward"], report.passes["forward + backward"]
    assert all(both[v].least_us > forward[v].least_us for v in host.VARIANTS)
    assert report.planning_ms > 0


def test_the_routings_differ_as_they_say():
    for routing in shapes.ROUTINGS:
        counts = shapes.splits(5000, 64, routing)
        assert (counts.shape, counts.sum()) == ((64,), 5000)
        assert torch.equal(counts, shapes.splits(5000, 64, routing))
    uniform, zipf, half, empty = (shapes.splits(64_000, 64, routing) for routing in shapes.ROUTINGS)
    assert 800 < uniform.min() <= uniform.max() < 1200
    assert zipf.max() / 64_000 == pytest.approx(1 / sum(1 / n for n in range(1, 65)), rel=0.1)
    assert half.max() == pytest.approx(32_000, rel=0.05)
    assert (empty == 0).sum() == 16
    assert shapes.aligned_splits(3000, 8).tolist() == [256] * 8


CASES = (*kernels.CASES, *kernels.ALIGNED_CASES, *mlp.CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
@pytest.mark.parametrize(("peer", "dtype", "bound"), [(TorchEager, torch.float32, 2e-6), (Ours, torch.bfloat16, 0.01)])
def test_peers_agree_with_the_reference(peer, case, dtype, bound, monkeypatch):
    """With stand-ins of our kernels. A run checks the results of other peers before it measures them."""
    sm90_stand_ins.install(monkeypatch.setattr)
    problem = tiny("clamped_swiglu", dtype=dtype)
    if peer is TorchEager:
        problem.preactivation = problem.preactivation * 25  # where the limit matters
    with torch.set_grad_enabled(case.grad):
        candidate = getattr(peer(), case.key)(problem)
        assert cases.worst_error(case, problem, candidate) < bound


def test_wrong_results_are_seen():
    problem, (first, second, *_) = tiny(), kernels.CASES
    for value, error in ((0.0, 1), (math.nan, math.inf)):
        candidate = Candidate(lambda value=value: torch.full((problem.rows, problem.hidden), value))
        assert cases.worst_error(second, problem, candidate) == error
    y, _ = TorchEager().fc1_activation(problem).call()
    with pytest.raises(ValueError, match="preactivation: not returned"):
        cases.worst_error(first, problem, Candidate(lambda: y))


# -- peers that are absent, raise, or are wrong

FC2 = Case("fc2", "FC2", kernels.fc2_flops, reference.fc2)


def peer(name, prepare):
    return SimpleNamespace(name=name, fc2=prepare)


def test_a_peer_that_raises_is_a_note_and_the_others_are_measured():
    def raises(problem):
        raise RuntimeError("no such tile\nand more of it")

    def raises_when_timed(problem):
        calls = iter([TorchEager().fc2(problem).call])
        return Candidate(lambda: next(calls)())

    def wrong(problem):
        return Candidate(lambda: 2 * TorchEager().fc2(problem).call())

    others = peer("raises", raises), peer("when timed", raises_when_timed), peer("wrong", wrong)
    absent = peer("has nothing to show", lambda problem: None), SimpleNamespace(name="has no such case")
    measured = peer(cases.OURS, TorchEager().fc2), TorchEager()
    rows = {row.peer: row for row in cases.run_case(FC2, tiny(), (*others, *absent, *measured), CountingTimer(), TOP)}
    assert {name: row.note for name, row in rows.items() if row.ms is None} == {
        "raises": "RuntimeError: no such tile", "when timed": "StopIteration", "wrong": "wrong: relative error 1",
    }  # fmt: skip
    # the others alone, so that they are measured together
    rows = {row.peer: row for row in cases.run_case(FC2, tiny(), measured, CountingTimer(), TOP)}
    ours, eager = rows[cases.OURS], rows["torch eager"]
    assert (ours.ms, eager.ms, eager.ours_is) == (1, 2, 2)
    assert eager.tflops == pytest.approx(2 * 96 * 32 * 16 / 2e-3 / 1e12)
    assert (eager.host_idle_us, eager.host_queued_us) == (10, 20)


def test_backward_is_the_difference():
    problem = tiny()
    times = {cases.OURS: (1.0, 3.0), "a": (2.0, 7.0), "absent": (None, None)}
    rows = [Row(case, name, ms=ms[n]) for n, case in enumerate((mlp.FORWARD, mlp.STEP)) for name, ms in times.items()]
    *same, ours, a = mlp.with_backward(rows, problem, TOP)
    assert same == rows
    assert (ours.ms, a.ms, a.ours_is) == (2.0, 5.0, 2.5)
    assert a.tflops == pytest.approx(12 * problem.rows * problem.hidden * problem.intermediate / 5e-3 / 1e12)


def test_a_whole_run_writes_its_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setenv("FUSEDMOE_COMMIT", "abc123")
    settings = gpu.Settings(
        sections=gpu.SECTIONS,
        shapes=(Shape("tiny", 256, 32, 16, 2, 1), Shape("tinier", 32, 32, 16, 4, 2, "clamped_swiglu")),
        routing="zipf",
        device=CPU,
        results=tmp_path,
    )
    files = gpu.run(settings, CountingTimer(grows=True), TOP)
    assert [file.name for file in files] == [f"{section}-zipf.json" for section in gpu.SECTIONS]
    assert "expert MLP, forward + backward" in capsys.readouterr().out
    found = json.loads(files[1].read_text())
    assert [shape["name"] for shape in found["shapes"]] == ["tiny", "tinier"]
    assert (found["commit"], found["machine"] != "") == ("abc123", True)
    assert found["shapes"][0]["plan"].startswith("chain")
    assert found["geometric_mean_speedups"]["forward"]["torch eager"]["shapes"] == 2
    assert set(plot.figures(found)) == {mlp.FORWARD, mlp.STEP, mlp.BACKWARD}
    (of_recipes,) = (json.loads(file.read_text()) for file in files if file.name == "recipes-zipf.json")
    assert {*RECIPES} < {*recipes.MEASURED} == {*of_recipes["shapes"][0]["recipes"]}
    for name, report in of_recipes["shapes"][0]["recipes"].items():
        noise = set(report["sqnr_db"].values())
        assert noise == {None} if name == "bf16" else all(5 < db < 40 for db in noise)
        wgrad = {"plain"} if name == "bf16" or name.endswith("wgrad=bf16") else set()
        assert set(report["products"].values()) == wgrad | ({"emulated"} if name != "bf16" else set())
    current, delayed = (of_recipes["shapes"][0]["recipes"][name]["sqnr_db"] for name in ("fp8_tensor", recipes.DELAYED))
    assert delayed == pytest.approx(current, abs=1), "the scales of the same operands"


def test_the_interval_that_contains_the_median():
    assert host_trees.median_interval([3.0]) == (3.0, 3.0)
    rng = torch.Generator().manual_seed(0)
    found = [host_trees.median_interval(torch.rand(41, generator=rng).tolist()) for _ in range(1000)]
    assert sum(low <= 0.5 <= high for low, high in found) / 1000 == pytest.approx(0.96, abs=0.03)
    assert statistics.mean(high - low for low, high in found) < 0.4


def test_trees_take_turns_and_the_ratio_is_of_this_tree(tmp_path, monkeypatch):
    turns = []

    class Tree(SimpleNamespace):
        def time_us(self, case):
            turns.append(self.folder == tmp_path)
            return 20.0 if self.folder == tmp_path else 10.0

    monkeypatch.setattr(host_trees, "Tree", lambda folder, *_: Tree(folder=folder, cases=["a case"], stop=lambda: None))
    (record,) = host_trees.compare(tmp_path, "cpu", rounds=4, repeats=1)
    assert (record["base_us"], record["us"], record["ratio"], record["interval"]) == (20, 10, 0.5, [0.5, 0.5])
    assert [sum(turns[i : i + 4]) for i in range(0, 16, 4)] == [2] * 4, "each round times both trees twice"
    assert [sum(turns[i::4]) for i in range(4)] == [2] * 4, "neither tree has a fixed place in a round"
