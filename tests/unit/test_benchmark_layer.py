"""The benchmark of the whole layer, its router and a dense MLP: its code runs on a CPU, and its figures add up."""

import functools
import json
from dataclasses import replace

import pytest
import torch
from kit.timers import CountingTimer

from benchmarks import dense, layer, layer_page, layer_run, page, parts, router
from benchmarks.ceiling import Ceiling
from benchmarks.gpu import Settings
from benchmarks.parts import Variant
from benchmarks.peers.sonic import SONIC
from benchmarks.shapes import Shape
from fusedmoe.commands.bench import layer as bench_layer
from fusedmoe.commands.bench.layer import OURS, Peer, Sizes

CPU = torch.device("cpu")
TOP = Ceiling(tflops=800.0, copy_tb_s=3.0)
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
def test_a_whole_run_writes_its_file_and_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FUSEDMOE_COMMIT", "abc123")
    clamped = Shape("clamped", 64, 32, 16, 8, 2, "clamped_swiglu")
    settings = Settings((), (TINY, clamped), "uniform", CPU, tmp_path, tune_peers=True, reps=3)
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
