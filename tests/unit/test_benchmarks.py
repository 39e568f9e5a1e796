"""The benchmarks run, their references are right, and no peer can end a run."""

import functools
import json
import math
import re
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kit import sm90_stand_ins
from kit.timers import CountingTimer

from benchmarks import (
    cases,
    dense,
    ep,
    gpu,
    host,
    host_trees,
    kernels,
    layer,
    layer_page,
    layer_run,
    mlp,
    page,
    parts,
    plot,
    recipes,
    reference,
    router,
    shapes,
)
from benchmarks.cases import Candidate, Case, Row
from benchmarks.ceiling import Ceiling
from benchmarks.fp8 import layers, products, quantize, run, unfused
from benchmarks.fp8 import page as fp8_page
from benchmarks.parts import Variant
from benchmarks.peers import unfused_fp8
from benchmarks.peers.ours import Ours
from benchmarks.peers.plain import TorchEager
from benchmarks.peers.sonic import SONIC
from benchmarks.problem import Problem
from benchmarks.shapes import Shape
from fusedmoe.commands.bench import layer as bench_layer
from fusedmoe.commands.bench.layer import OURS, Peer, Sizes
from fusedmoe.numerics.recipes import RECIPES
from fusedmoe.ops.state import weight_cache

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


# -- FP8 training

LAYER, ROWS = Shape("a layer", 96, 128, 128, 4, 2), Shape("experts alone", 160, 128, 128, 3, 1)
PARTS = ("accuracy", "training", "speed", "memory")
EMPTY = "".join(f"<!-- {name}: from a file -->\n<!-- end of {name} -->\n" for name in PARTS)
TIMERS = run.Timers(CountingTimer(), CountingTimer(), CountingTimer())


def fp8_problem(shape=ROWS):
    return Problem(shape, shapes.splits(shape.rows, shape.experts, "empty"), CPU)


@pytest.fixture
def stand_ins(monkeypatch):
    """The kernels in plain PyTorch; nothing is compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    sm90_stand_ins.install(monkeypatch.setattr)


@pytest.mark.usefixtures("stand_ins")
def test_quantize_kernels_have_times_and_bytes():
    rows = {(row["kernel"], row["shape"]): row for row in quantize.measure(fp8_problem(LAYER), CountingTimer(), TOP)}
    assert len(rows) == 3 * 2 + 2 + 2
    assert all(0 < row["error"] < 0.04 and not row["note"] for row in rows.values())
    both = rows["gathered rows and columns", (192, 128)]
    padded = (192 // 128 + 4) * 128
    assert both["read_bytes"] == 192 * 128 * 2 + 192 * 4
    assert both["written_bytes"] == 192 * 128 + 192 * 4 + 128 * padded + 128 * padded // 128 * 4
    assert both["tb_s"] == pytest.approx((both["read_bytes"] + both["written_bytes"]) / (both["ms"] * 1e-3) / 1e12)


@pytest.mark.usefixtures("stand_ins")
def test_products_alternate_and_are_checked():
    rows = products.measure(fp8_problem(), CountingTimer(), by_expert=True)
    for name, count, ms, least, most in (
        ("bf16", len(products.PRODUCTS), 1, 0, 0.006),
        ("fp8", len(products.PRODUCTS), 2, 0.006, 0.06),
        (products.BY_EXPERT, 3, 3, 0.01, 0.07),
    ):
        found = [row for row in rows if row["format"] == name]
        assert len(found) == count
        for row in found:
            assert (row["note"], row["ms"], row["speedup"]) == ("", ms, pytest.approx(1 / ms))
            assert least < row["error"] < most
    assert rows[0]["tflops"] == pytest.approx(2 * 160 * 128 * 256 / 1e-3 / 1e12)


@pytest.mark.usefixtures("builtin_rules")
def test_a_layer_has_rows_errors_and_a_plan():
    shape = ROWS
    entry = layers.measure(shape, CountingTimer(), CountingTimer(), CPU)
    assert len(entry["rows"]) == len(layers.CASES) * len(layers.RECIPES)
    for n, row in enumerate(entry["rows"]):
        assert row["ms"] == (n % 3 + 1) / (8 if row["case"] == layers.ACCUMULATED else 1)
        assert (row["speedup"], row["note"]) == (pytest.approx(1 / (n % 3 + 1)), "")
    assert entry["rows"][0]["tflops"] == pytest.approx(6 * shape.rows * 128 * 128 / 1e-3 / 1e12)
    for recipe, found in entry["recipes"].items():
        assert set(found["errors"]) == {"y", "x", "weight1", "weight2", "probs"}
        assert found["unfused"] == []
        least, most = (0, 0.01) if recipe == "bf16" else (0.01, 0.2)
        assert all(least < error < most for error in found["errors"].values())
    assert layers.speedups([entry])[layers.STEP] == {"fp8_block": 0.5, "fp8_block:wgrad=bf16": pytest.approx(1 / 3)}


@pytest.mark.parametrize("shape", [LAYER, ROWS], ids=lambda shape: shape.name)
def test_weights_are_quantized_in_every_step_or_once_per_micro_batches(shape, monkeypatch):
    counted, keep = [], weight_cache.keep
    monkeypatch.setattr(weight_cache, "keep", lambda *of, **how: counted.append(of[0]) or keep(*of, **how))
    operands = (layers.of_layer if shape is LAYER else layers.of_rows)(shape, CPU)
    for recipe in (*layers.RECIPES[1:], layers.BY_EXPERT[0]):
        subject, accumulating = operands.subject(), operands.subject(accumulates=True)
        for case, of_case, quantized in (
            (layers.FORWARD, subject, 2),
            (layers.STEP, subject, 2),
            (layers.ACCUMULATED, accumulating, 2),
            (layers.CACHED_FORWARD, accumulating, 0),
        ):
            call = layers.call_of(case, of_case, recipe)
            for _ in range(2):
                counted.clear()
                call()
                assert len(counted) == quantized, case


def test_micro_batches_add_up_in_main_grad():
    operands = layers.of_rows(ROWS, CPU)
    subject, accumulating = operands.subject(), operands.subject(accumulates=True)
    *_, dw1, dw2 = layers.call_of(layers.STEP, subject, "bf16")()
    with_main_grad = layers.call_of(layers.ACCUMULATED, accumulating, "bf16")()
    assert len(with_main_grad) == 2, "the gradients of the rows and of their scale"
    for name, dw in (("weight1", dw1), ("weight2", dw2)):
        torch.testing.assert_close(operands.main_grads[name], 8 * dw.float(), rtol=0.01, atol=1e-5)


@pytest.mark.usefixtures("stand_ins")
def test_a_whole_run_of_fp8_writes_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMOE_COMMIT", "abc123")
    monkeypatch.setattr(unfused, "peers", lambda: (unfused.UnderRecipe("fp8_block"), unfused_fp8.UnfusedFp8()))
    clamped = Shape("clamped", 64, 32, 16, 8, 2, "clamped_swiglu")
    chosen = run.Chosen([LAYER], [ROWS], [ROWS], [ROWS, clamped], [LAYER], tensor=["experts alone"])
    file = run.run(chosen, TIMERS, TOP, CPU, tmp_path, reps=3)
    found = json.loads(file.read_text())
    assert file.name == "fp8.json"
    assert (found["commit"], found["failed"]) == ("abc123", {})
    assert found["left_out"] == {"clamped": "clamped_swiglu with biases is not measured"}
    measured = {entry["name"]: {row["recipe"] for row in entry["rows"]} for entry in found["layers"]}
    assert measured == {"experts alone": {*layers.RECIPES, *layers.BY_EXPERT}, "a layer": {*layers.RECIPES}}
    peers = {row["peer"] for row in found["unfused"][0]["rows"]}
    assert peers == {"fusedmoe, fp8_block", "torch FP8 by rows, compiled"}
    assert found["speedups"][layers.STEP]["fp8_block"] == 0.5
    text = fp8_page.filled(EMPTY, found)
    assert fp8_page.filled(text, found) == text != EMPTY
    assert fp8_page.filled(text, None) == EMPTY


# -- the whole layer, its router and a dense MLP

TINY = Shape("tiny", 64, 32, 16, 8, 2)


@pytest.fixture
def small(monkeypatch):
    """A run on a CPU, in which torch is SonicMoE; the parts of the layer have few features."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    sonic = [Peer(name, bench_layer.torch_grouped) for name in (SONIC.name, "SonicMoE tuned")]
    peers = layer.OURS_PEER, *sonic, layer.COMPILED._replace(devices=("cpu",))
    monkeypatch.setattr(layer, "candidates", lambda tuned: peers)
    of_router = functools.partial(router.measure, sizes=Sizes(32, 16, 8, 2, 64))
    of_dense = functools.partial(dense.measure, sizes=dense.DenseSizes(64, 32, 16))
    monkeypatch.setattr(layer_run, "PARTS", {"router": of_router, "dense": of_dense})


@pytest.mark.usefixtures("small")
def test_a_whole_run_of_the_layer_writes_its_file_and_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FUSEDMOE_COMMIT", "abc123")
    clamped = Shape("clamped", 64, 32, 16, 8, 2, "clamped_swiglu")
    settings = gpu.Settings((), (TINY, clamped), "uniform", CPU, tmp_path, tune_peers=True, reps=3)
    file = layer_run.run(settings, CountingTimer(), TOP)
    assert file.name == "layer.json"
    found = json.loads(file.read_text())
    (shape,) = found["shapes"]
    names = [OURS, "SonicMoE", "SonicMoE tuned", layer.COMPILED.name]
    assert [(row["case"], row["name"], row["ms"]) for row in shape["rows"]] == [
        (case, name, n)
        for case in ("inference", "forward", "forward + backward")
        for n, name in enumerate(names, start=1)
    ]
    for name in (*names, layer.UNFUSED):
        assert set(shape["errors"][name]) == set(layer_page.ERRORS)
        assert all(0 < error < 0.03 for error in shape["errors"][name].values()), name
        assert 0 <= shape["rerouted"][name] <= TINY.tokens
    for part in ("router", "dense"):
        assert all(0 < error < 0.03 for row in found[part]["rows"] for error in (row["errors"] or {}).values())
    assert found["router"]["rows"][-1]["name"] == router.IN_LAYER
    assert found["router"]["rows"][-1]["ms"] == -1, "the layer was given 1 ms, its experts 2 ms"
    assert {row["name"] for row in found["dense"]["rows"]} == {OURS, dense.ONE_LINEAR, dense.TWO_LINEARS}

    printed = capsys.readouterr().out
    assert "clamped: left out, SonicMoE cannot run it" in printed
    assert "time, forward: SonicMoE tuned / fusedmoe = 3.00 (least 3.00: tiny 3.00)" in printed
    text = page.render(tmp_path, file.parent)
    assert "| tiny | 1.00 | 3.00 | 2.00 | 4.00 | 3.00 | 2.00 | 4.00 |" in text
    assert "| *geometric mean* |  |  |  |  | 3.00 | 2.00 | 4.00 |" in text
    assert "| forward + backward | fusedmoe | 1.000 | 2.00 | 3.00 | 10 |" in text


def test_a_wrong_part_is_named_and_not_timed():
    x = torch.randn(4, 3, requires_grad=True)

    def variant(factor):
        def exact():
            return x.detach().double() * factor, torch.full((4, 3), factor, dtype=torch.float64)

        return Variant(lambda: x * 2, {"x": x}, torch.ones(4, 3), exact)

    def nan():
        return replace(variant(2), grad_output=torch.full((4, 3), torch.nan))

    makers = {"right": lambda: variant(2), "wrong": lambda: variant(3), "absent": lambda: 1 / 0, "nan": nan}
    rows = parts.compare(makers, CountingTimer(), CPU)
    assert [row.ms for row in rows] == [1, None, None, None] * 2
    assert rows[1].note == "wrong: relative error 0.33"
    assert rows[2].note == "ZeroDivisionError: division by zero"
    assert rows[3].note == "wrong: relative error inf", "a gradient of NaN next to a right output"
    assert rows[0].errors == {"output": 0.0, "x": 0.0}


def test_kernels_that_communicate_are_known_by_their_names(tmp_path):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which names the kernels")
    pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, as the kernels do")
    from kit.compiled import compile_keeping

    from fusedmoe.kernels.build.shipped import shipped

    told = {}
    for kernel in shipped("sm_90a"):
        kind = type(kernel).__name__
        moves = type(kernel).__module__.startswith(("fusedmoe.kernels.exchange", "fusedmoe.kernels.rows.move"))
        if kind in told or not moves:
            continue
        folder = tmp_path / kind
        folder.mkdir()
        compile_keeping(kernel, "ptx", folder)
        (source,) = folder.glob("*.ptx")
        name = re.search(r"\.entry (\w+)", source.read_text())[1]
        told[kind] = bool(ep._COMMUNICATES.search(name)), bool(ep._ALONE.search(name))
    assert [told.pop(kind) for kind in ("Pull", "Push", "PushSums")] == [(True, False)] * 3
    assert [told.pop(kind) for kind in ("Send", "Total", "Signal")] == [(True, True)] * 3
    assert len(told) > 5
    assert {*told.values()} == {(False, False)}
