"""`fusedmoe bench` and the benchmark of the layer on a GPU: every installed candidate is right, timed and measured."""

import functools
import json

import pytest
import torch
from kit.hopper import needs_gpu

from benchmarks import dense, layer, layer_page, layer_run, router
from benchmarks.ceiling import Ceiling
from benchmarks.gpu import Settings
from benchmarks.peers.sonic import SONIC
from benchmarks.shapes import Shape
from fusedmoe.commands.bench import command as bench_cli
from fusedmoe.commands.bench.layer import OURS, OURS_PEER, Sizes, Work
from fusedmoe.commands.bench.measure import FORWARD, INFERENCE, STEP, measure
from fusedmoe.commands.main import main
from fusedmoe.commands.timing import GpuTimer

pytestmark = [
    needs_gpu,
    pytest.mark.filterwarnings("ignore"),  # those of torch's compiler and of peers
]

SIZES = Sizes(hidden=1024, intermediate=512, experts=16, top_k=4, tokens=4096)


def test_every_candidate_is_right_and_measured(device):
    work = Work(SIZES, torch.bfloat16, device)
    rows = measure(work, GpuTimer(device, reps=5, host_reps=3))
    names = {row.name for row in rows}
    assert names == {OURS, "torch grouped_mm", "torch grouped_mm, compiled", "torch loop"}
    for row in rows:
        assert row.ms is not None, f"{row.name}: {row.note}"
        assert 0 < row.quartiles_ms[0] <= row.ms <= row.quartiles_ms[1]
        assert 0 < row.error < 0.03
        assert row.peak_bytes > 0
        assert (row.kept_bytes is None) == (row.case != FORWARD)
    ours = {row.case: row for row in rows if row.name == OURS}
    kept = {row.name: row.kept_bytes for row in rows if row.case == FORWARD and row.ms is not None}
    assert kept[OURS] < kept["torch grouped_mm"], "less is kept than eager autograd keeps"
    assert ours[STEP].ms > ours[FORWARD].ms
    assert ours[INFERENCE].peak_bytes < ours[FORWARD].peak_bytes
    tokens = SIZES.tokens * SIZES.hidden * 2
    assert ours[STEP].peak_bytes > tokens, "the gradient of the tokens at least"


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_the_command(recipe, capsys):
    sizes = {"hidden": 512, "intermediate": 256, "experts": 8, "top_k": 2, "tokens": 2048}
    options = bench_cli.BenchOptions(**sizes, recipe=recipe, reps=3, json=True)
    assert bench_cli.run(options) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"] == torch.cuda.get_device_name()
    assert found["dtype"] == "bf16"
    assert {row["note"] for row in found["rows"] if row["name"] == OURS} == {
        "" if recipe == "bf16" else "recipe fp8_block"
    }


def test_more_tokens_than_memory_end_in_an_error(capsys):
    sizes = ["--hidden", "8192", "--intermediate", "8192", "--experts", "8", "--top-k", "8", "--tokens", str(1 << 28)]
    with pytest.raises(SystemExit):
        main(["bench", *sizes, "--reps", "1"])
    assert "such as fewer --tokens" in capsys.readouterr().err


def test_the_section_of_the_whole_layer(device, tmp_path, monkeypatch):
    sizes = {"router": Sizes(1024, 128, 16, 4, 4096), "dense": dense.DenseSizes(1024, 512, 1024)}
    parts = {"router": router.measure, "dense": dense.measure}
    monkeypatch.setattr(
        layer_run, "PARTS", {name: functools.partial(part, sizes=sizes[name]) for name, part in parts.items()}
    )
    monkeypatch.setattr(layer, "candidates", lambda tuned: (OURS_PEER, SONIC))  # torch's compiler takes long
    settings = Settings((), (Shape("small", 4096, 1024, 512, 16, 4),), "uniform", device, tmp_path, reps=3)
    file = layer_run.run(settings, GpuTimer(device, reps=3, host_reps=2), Ceiling(800.0, 3.0))
    found = json.loads(file.read_text())
    (shape,) = found["shapes"]
    sonic = [row for row in shape["rows"] if row["name"] == SONIC.name]
    assert all(row["ms"] or row["note"].startswith("ModuleNotFoundError") for row in sonic), [
        row["note"] for row in sonic
    ]
    assert shape["rerouted"][OURS] <= 2
    ours, unfused = shape["errors"][OURS], shape["errors"][layer.UNFUSED]
    assert set(ours) == {"y", "x", "router", "weight1", "weight2"}
    assert all(0 < error < 2 * unfused[name] for name, error in ours.items())
    counted = shape["launches"][OURS]
    assert 4 < counted[INFERENCE]["launches"] <= counted[FORWARD]["launches"] < counted[STEP]["launches"] < 150
    for of_case in counted.values():
        assert of_case["busy_us"] > of_case["groups_us"]["products"] * 0.9 > 0
        assert of_case["idle_us"] >= 0
        assert sum(kernel["count"] for kernel in of_case["kernels"]) == of_case["launches"]
    for part in ("router", "dense"):
        assert all(row["ms"] > 0 for row in found[part]["rows"] if row["name"] != router.IN_LAYER), found[part]["rows"]
    assert "## The whole layer" in "\n".join(layer_page.render(found))
