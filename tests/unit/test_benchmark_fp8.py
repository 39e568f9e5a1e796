"""The benchmark of FP8 training: its code runs on a CPU, its figures add up, and no part can end a run."""

import json

import pytest
import torch
from kit import sm90_stand_ins
from kit.timers import CountingTimer

from benchmarks import shapes
from benchmarks.ceiling import Ceiling
from benchmarks.fp8 import layers, page, products, quantize, run, unfused
from benchmarks.peers import unfused_fp8
from benchmarks.problem import Problem
from benchmarks.shapes import Shape
from fusedmoe.ops.state import weight_cache

CPU = torch.device("cpu")
TOP = Ceiling(tflops=800.0, copy_tb_s=4.0)
LAYER, ROWS = Shape("a layer", 96, 128, 128, 4, 2), Shape("experts alone", 160, 128, 128, 3, 1)


PARTS = ("accuracy", "training", "speed", "memory")
EMPTY = "".join(f"<!-- {name}: from a file -->\n<!-- end of {name} -->\n" for name in PARTS)
TIMERS = run.Timers(CountingTimer(), CountingTimer(), CountingTimer())


def problem(shape=ROWS):
    return Problem(shape, shapes.splits(shape.rows, shape.experts, "empty"), CPU)


@pytest.fixture
def stand_ins(monkeypatch):
    """The kernels in plain PyTorch; nothing is compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    sm90_stand_ins.install(monkeypatch.setattr)


@pytest.mark.usefixtures("stand_ins")
def test_quantize_kernels_have_times_and_bytes():
    rows = {(row["kernel"], row["shape"]): row for row in quantize.measure(problem(LAYER), CountingTimer(), TOP)}
    assert len(rows) == 3 * 2 + 2 + 2
    assert all(0 < row["error"] < 0.04 and not row["note"] for row in rows.values())
    both = rows["gathered rows and columns", (192, 128)]
    padded = (192 // 128 + 4) * 128
    assert both["read_bytes"] == 192 * 128 * 2 + 192 * 4
    assert both["written_bytes"] == 192 * 128 + 192 * 4 + 128 * padded + 128 * padded // 128 * 4
    assert both["tb_s"] == pytest.approx((both["read_bytes"] + both["written_bytes"]) / (both["ms"] * 1e-3) / 1e12)


@pytest.mark.usefixtures("stand_ins")
def test_products_alternate_and_are_checked():
    rows = products.measure(problem(), CountingTimer(), by_expert=True)
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
def test_a_whole_run_writes_its_file(tmp_path, monkeypatch):
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
    text = page.filled(EMPTY, found)
    assert page.filled(text, found) == text != EMPTY
    assert page.filled(text, None) == EMPTY
