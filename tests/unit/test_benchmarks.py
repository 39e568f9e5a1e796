"""The benchmarks run, their references are right, and no peer can end a run."""

import itertools
import json
import math
import re
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
from kit import sm90_stand_ins
from kit.timers import CountingTimer

from benchmarks import __main__ as command
from benchmarks import (
    activations,
    cases,
    gpu,
    host,
    kernels,
    mlp,
    plot,
    recipes,
    reference,
    results,
    shapes,
    table,
    tiles,
)
from benchmarks.cases import Candidate, Case, Row
from benchmarks.ceiling import Ceiling
from benchmarks.peers.ours import Ours
from benchmarks.peers.plain import TorchEager
from benchmarks.peers.quack import concatenated, deinterleave, interleave
from benchmarks.problem import Problem
from benchmarks.shapes import Shape
from fusedmoe.kernels.sm90.tiles import tuning
from fusedmoe.kernels.sm90.tiles.choice import CO_256
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.recipes import RECIPES

CPU = torch.device("cpu")
TOP = Ceiling(tflops=800.0, copy_tb_s=3.0)


def tiny(activation="swiglu", routing="empty", dtype=torch.float32, rows=96):
    shape = Shape("tiny", rows // 2, 32, 16, 6, 2, activation)
    return Problem(shape, shapes.splits(rows, 6, routing), CPU, dtype)


# -- host time


def test_host_times_are_of_work_that_was_done():
    report = host.measure(CPU, rounds=10)
    for times in report.passes.values():
        assert set(times) == set(host.VARIANTS)
        assert all(0 < t.least_us <= t.median_us for t in times.values())
    forward, both = report.passes["forward"], report.passes["forward + backward"]
    assert all(both[v].least_us > forward[v].least_us for v in host.VARIANTS)
    assert report.planning_ms > 0


def test_a_result_file_names_machine_versions_and_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMOE_COMMIT", "abc123")
    written = json.loads(results.write(tmp_path, "some", {"figure": 1.5}).read_text())
    assert written["figure"] == 1.5
    assert written["commit"] == "abc123"
    assert written["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in written["versions"]["torch"]
    assert written["machine"]


def test_a_commit_has_all_digits(monkeypatch):
    monkeypatch.delenv("FUSEDMOE_COMMIT", raising=False)
    if (commit := results.commit()) == "unknown":
        pytest.skip("not a checkout of git")
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)


# -- shapes and splits


def test_the_shapes_of_the_file():
    pytest.importorskip("tomllib")
    known = shapes.load()
    assert len(known) == 10
    assert set(shapes.QUICK) <= set(known)
    assert known["qwen3-30b-a3b"].rows == 262144
    assert known["qwen3-30b-a3b"].forward_flops() == 6 * 262144 * 2048 * 768
    oss = known["gpt-oss-20b"]
    assert oss.glu == Activation("swiglu", limit=7.0, alpha=1.702, offset=1.0)
    assert oss.biases
    assert [shape.biases for shape in known.values()].count(True) == 1


def test_the_routings_differ_as_they_say():
    for routing, experts in itertools.product(shapes.ROUTINGS, (1, 2, 64)):
        counts = shapes.splits(5000, experts, routing)
        assert (counts.shape, counts.sum()) == ((experts,), 5000)
        assert torch.equal(counts, shapes.splits(5000, experts, routing))
    uniform, zipf, half, empty = (shapes.splits(64_000, 64, routing) for routing in shapes.ROUTINGS)
    assert 800 < uniform.min() <= uniform.max() < 1200
    share = zipf.max() / 64_000
    assert share == pytest.approx(1 / sum(1 / n for n in range(1, 65)), rel=0.1)
    assert half.max() == pytest.approx(32_000, rel=0.05)
    assert half.sort().values[-2] < 700
    assert (empty == 0).sum() == 16
    with pytest.raises(ValueError, match="routing"):
        shapes.splits(8, 2, "odd")
    assert shapes.aligned_splits(3000, 8).tolist() == [256] * 8
    assert shapes.aligned_splits(1000, 8).tolist() == [0] * 8


# -- operands


def test_a_problem_is_drawn_once_and_the_same_again():
    problem = tiny()
    x = problem.x
    assert problem.x is x
    problem.forget("x", "never_drawn")
    assert problem.x is not x
    assert torch.equal(problem.x, x)
    assert x.std() == pytest.approx(0.2, rel=0.1)
    assert problem.weight1.std() == pytest.approx(0.02, rel=0.1)
    assert problem.cu_seqlens.tolist() == [0, *problem.offsets.tolist()]
    assert problem.expert_of_row.bincount(minlength=6).tolist() == problem.splits_cpu.tolist()
    counts = problem.splits_cpu[problem.sample()]
    assert len(counts) == 3
    assert (counts.min(), counts.max()) == (problem.splits_cpu.min(), problem.splits_cpu.max())


def test_interleaving_alternates_gate_and_up():
    t = torch.arange(8).view(2, 4)
    assert interleave(t).tolist() == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert interleave(t.T, 0).T.tolist() == [[0, 2, 1, 3], [4, 6, 5, 7]]
    for dim in (0, 1):
        assert torch.equal(deinterleave(interleave(t, dim), dim), t)
    weight = torch.arange(12).view(1, 6, 2)
    assert torch.equal(concatenated("grad_weight1", interleave(weight, 1)[0]), weight[0])
    assert torch.equal(concatenated("output", t), t)


# -- references


PEERS = [
    (peer, case, dtype, bound)
    for peer, dtype, bound in (
        (TorchEager, torch.float32, 2e-6),
        (Ours, torch.bfloat16, 0.01),
    )
    for case in (*kernels.CASES, *kernels.ALIGNED_CASES, *mlp.CASES)
]


@pytest.mark.parametrize(("peer", "case", "dtype", "bound"), PEERS, ids=[f"{p.__name__}-{c.key}" for p, c, *_ in PEERS])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_peers_agree_with_the_reference(peer, case, dtype, bound, activation, monkeypatch):
    """With stand-ins of our kernels. A run checks the results of other peers before it measures them."""
    sm90_stand_ins.install(monkeypatch.setattr)
    problem = tiny(activation, dtype=dtype)
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
    right = TorchEager().fc1_activation(problem)
    y, p = right.call()
    candidate = Candidate(lambda: (y, p * 1.5), right.names)
    assert cases.worst_error(first, problem, candidate) == pytest.approx(0.5, rel=1e-3)
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

    taking_part = [
        peer("raises", raises),
        peer("raises when timed", raises_when_timed),
        peer("wrong", wrong),
        peer("has nothing to show", lambda problem: None),
        SimpleNamespace(name="has no such case"),
        peer(cases.OURS, TorchEager().fc2),
        TorchEager(),
    ]
    rows = {row.peer: row for row in cases.run_case(FC2, tiny(), taking_part, CountingTimer(), TOP)}
    assert set(rows) == {"raises", "raises when timed", "wrong", cases.OURS, "torch eager"}
    assert rows["raises"].note == "RuntimeError: no such tile"
    assert rows["raises when timed"].note == "StopIteration"
    assert rows["wrong"].note == "wrong: relative error 1"
    assert rows["wrong"].error == pytest.approx(1)
    assert all(rows[name].ms is None for name in ("raises", "raises when timed", "wrong"))
    # the others alone, so that they are measured together
    rows = {row.peer: row for row in cases.run_case(FC2, tiny(), taking_part[-2:], CountingTimer(), TOP)}
    ours, eager = rows[cases.OURS], rows["torch eager"]
    assert eager.error < 1e-6
    assert (ours.ms, eager.ms, eager.ours_is) == (1, 2, 2)
    flops = 2 * 96 * 32 * 16
    assert eager.tflops == pytest.approx(flops / 2e-3 / 1e12)
    assert eager.ceiling_percent == pytest.approx(100 * eager.tflops / 800)
    assert (eager.host_idle_us, eager.host_queued_us) == (10, 20)


# -- means, tables, files


def test_mean_speedups_leave_out_ours_and_what_was_not_measured():
    rows = [
        Row("FC2", "a", ours_is=1.0),
        Row("FC2", "a", ours_is=4.0),
        Row("FC2", "a", note="absent"),
        Row("FC2", cases.OURS, ours_is=1.0),
    ]
    found = cases.mean_speedups(rows)
    assert math.isnan(cases.geometric_mean([]))
    assert found == {"FC2": {"a": {"mean": pytest.approx(2), "least": 1.0, "shapes": 2}}}
    assert table.means(found) == ["FC2: fusedmoe is 2.00x a (least 1.00x, 2 shapes)"]


def test_backward_is_the_difference():
    problem = tiny()
    rows = [
        Row(mlp.FORWARD, cases.OURS, ms=1.0),
        Row(mlp.FORWARD, "a", ms=2.0),
        Row(mlp.FORWARD, "b", note="absent"),
        Row(mlp.STEP, cases.OURS, ms=3.0),
        Row(mlp.STEP, "a", ms=7.0),
        Row(mlp.STEP, "b", note="absent"),
    ]
    *same, ours, a = mlp.with_backward(rows, problem, TOP)
    assert same == rows
    assert (ours.ms, a.ms, a.ours_is) == (2.0, 5.0, 2.5)
    assert a.tflops == pytest.approx(12 * problem.rows * problem.hidden * problem.intermediate / 5e-3 / 1e12)


def test_a_whole_run_writes_its_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    settings = gpu.Settings(
        sections=gpu.SECTIONS,
        shapes=(Shape("tiny", 256, 32, 16, 2, 1), Shape("tinier", 32, 32, 16, 4, 2, "clamped_swiglu")),
        routing="zipf",
        device=CPU,
        results=tmp_path,
    )
    files = gpu.run(settings, CountingTimer(grows=True), TOP)
    assert [file.name for file in files] == [f"{section}-zipf.json" for section in gpu.SECTIONS]
    printed = capsys.readouterr().out
    assert "tiny: 256 rows" in printed
    assert "expert MLP, forward + backward" in printed
    found = json.loads(files[1].read_text())
    assert [shape["name"] for shape in found["shapes"]] == ["tiny", "tinier"]
    assert found["shapes"][0]["plan"].startswith("chain")
    assert found["ceiling"]["tflops"] == 800
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


def test_peers_compute_the_activation_and_its_derivative(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    problem = tiny("clamped_swiglu")
    for case in activations.CASES:
        rows = {row.peer: row for row in cases.run_case(case, problem, activations.peers(), CountingTimer())}
        for name in (activations.PLAIN, "torch eager", "torch compiled"):
            assert rows[name].error < 1e-5, (case.key, name)


def test_pictures_of_a_result_file(tmp_path):
    pytest.importorskip("matplotlib")
    measured = {"peer": "torch eager", "tflops": 500.0}
    rows = [measured | {"case": "FC1 + SwiGLU"}, measured | {"case": "FC2", "tflops": None}]
    rows.append({"case": "FC3", "peer": "a peer of older results", "tflops": 500.0})
    found = {
        "machine": "a GPU",
        "routing": "uniform",
        "ceiling": {"tflops": 800.0},
        "shapes": [{"name": "one", "rows": rows}, {"name": "two", "rows": []}],
    }
    (picture,) = plot.draw(found, "gpu-kernels", tmp_path)
    assert picture.name == "gpu-kernels-fc1-swiglu.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


# -- the command


def test_the_command_refuses_what_it_cannot_do(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, said in (
        (["--only", "kernels"], "needs a GPU"),
        (
            ["--only", "host,kernel"],
            "kernel: expected some of host, layer, kernels, mlp, activations, recipes, deepgemm",
        ),
        (["--quick", "--shape", "mixtral-8x7b"], "not allowed with"),
    ):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert said in capsys.readouterr().err


def test_every_product_of_the_layers_has_times(monkeypatch):
    measure = create_autospec(tuning.measure, return_value={CO_256: 0.123456})
    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(tiles, "LAYERS", {(64, 32, 4, 2): (8, 16)})
    found = list(tiles.measure(torch.device("cuda"), 3))
    assert len(found) == measure.call_count == 2 * len(tuning.products(tuning.Mlp(64, 32, 4, 32), 132))
    assert {entry["problem"]["rows"] for entry in found} == {32, 64}
    assert {call.args[0].top_k for call in measure.call_args_list} == {2}
    assert all(entry["ms"] == {"128x256co_c21": 0.12346} for entry in found)
