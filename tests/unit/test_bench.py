"""`fusedmoe bench`: every candidate does the same work, is checked, and is reported with what was measured."""

import functools
import itertools
import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from kit.timers import CountingTimer

import fusedmoe
from fusedmoe.commands.bench import command as bench_cli
from fusedmoe.commands.bench import layer, measure
from fusedmoe.commands.bench.layer import Peer, Reference, Sizes, Work
from fusedmoe.commands.main import main
from fusedmoe.numerics.recipes import resolve
from fusedmoe.ops.glu import ACTIVATIONS

CPU = torch.device("cpu")
SIZES = {"hidden": 32, "intermediate": 16, "experts": 6, "top_k": 2, "tokens": 40}
ARGUMENTS = [part for name, size in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(size))]


def work(activation="swiglu", dtype=torch.float32, recipe="bf16", **sizes):
    return Work(Sizes(**SIZES | sizes, activation=activation), dtype, CPU, resolve(recipe))


def worst_error(candidate, w):
    errors, rerouted = measure.check(w, candidate, Reference(w, w.index))
    assert set(errors) == {"y", "x", "router", "weight1", "weight2"}
    assert rerouted == 0
    return max(errors.values())


def rows_of(w, *peers):
    return measure.measure(w, CountingTimer(), peers)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["ours", "torch_grouped", "torch_loop"])
def test_every_candidate_computes_the_layer(name, activation):
    w = work(activation)
    assert worst_error(getattr(layer, name)(w), w) < 2e-6


def test_the_compiled_candidate_is_one_graph(monkeypatch):
    eager = functools.partial(torch.compile, backend="aot_eager")  # Inductor would need a compiler of C++
    monkeypatch.setattr(torch, "compile", eager)
    w = work(dtype=torch.bfloat16)  # torch traces no grouped product of another dtype
    assert worst_error(layer.torch_compiled(w), w) < 0.02


def test_other_choices_of_experts_are_counted_and_are_no_error(monkeypatch):
    def rounded(x, router, top_k):
        logits, index = F.linear(x, router).bfloat16().float().topk(top_k, dim=-1)
        return index, torch.softmax(logits, dim=-1)

    monkeypatch.setattr(layer, "route", rounded)
    w = work(tokens=400, experts=16)
    candidate = layer.torch_loop(w)
    errors, rerouted = measure.check(w, candidate, Reference(w, w.index))
    chosen, exact = candidate.chosen().sort().values, w.index.sort().values
    assert rerouted == sum(a.tolist() != b.tolist() for a, b in zip(chosen, exact, strict=True))
    assert 0 < rerouted < 40
    assert max(errors.values()) < 0.02, "the weights of the chosen experts are rounded with their logits"


@pytest.mark.parametrize(
    "change",
    [
        lambda w, c: c._replace(forward=lambda: c.forward() * 1.01),
        lambda w, c: c._replace(forward=lambda: torch.zeros_like(w.x) * c.forward()),
        lambda w, c: c._replace(forward=lambda: c.forward() * torch.nan),
        lambda w, c: c._replace(restored=lambda t: t.flip(0)),
    ],
    ids=["a percent off", "zeros", "nan", "order of gradients"],
)
def test_a_wrong_candidate_is_named_and_not_timed(change):
    rows = rows_of(work(), Peer("changed", lambda w: change(w, layer.torch_loop(w))), Peer("fusedmoe", layer.ours))
    wrong, right = rows[:2]
    assert wrong.note.startswith("wrong: relative error ")
    assert wrong.ms is None
    assert right.ms == 1
    assert json.dumps(measure.as_data(rows), allow_nan=False)


def test_a_recipe_is_allowed_its_noise():
    w = work(recipe="mxfp8", hidden=64, intermediate=32)
    ours, *_ = rows_of(w, Peer("fusedmoe", layer.ours))
    assert ours.note == "recipe mxfp8"
    assert 0.01 < ours.error < 0.2
    assert ours.ms == 1


def test_weights_are_quantized_in_every_call():
    w = work(recipe="mxfp8", hidden=64, intermediate=32)
    candidate = layer.ours(w)
    before = candidate.forward()
    with torch.no_grad():
        candidate.leaves.weight2.data.mul_(2)  # which no counter of torch sees
    torch.testing.assert_close(candidate.forward(), 2 * before)


def test_an_exception_of_a_peer_is_its_note():
    def raises(w):
        raise RuntimeError("no such tile\nand more of it")

    of_gpus, ours, torch_loop = Peer("for GPUs", raises, ("cuda",)), Peer("fusedmoe", layer.ours), layer.torch_loop
    rows = rows_of(work(), Peer("raises", raises), of_gpus, ours, Peer("torch loop", torch_loop))
    of_forward = {row.name: row for row in rows if row.case == measure.FORWARD}
    assert set(of_forward) == {"raises", "fusedmoe", "torch loop"}
    assert of_forward["raises"].note == "RuntimeError: no such tile"
    loop = of_forward["torch loop"]
    assert (loop.ms, loop.quartiles_ms, loop.ours_is) == (2, (1.5, 2.5), 2)
    assert loop.tflops == pytest.approx(Sizes(**SIZES).forward_flops / 2e-3 / 1e12)
    step = next(row for row in rows if row.case == measure.STEP and row.name == "torch loop")
    assert step.tflops == pytest.approx(3 * loop.tflops)
    line = next(line for line in measure.lines(rows) if "torch loop" in line)
    assert line.split()[2:7] == ["2.000", "1.500", "to", "2.500", "2.00x"]


def test_the_command_says_what_was_measured_on_what(capsys):
    assert main(["bench", *ARGUMENTS, "--reps", "2", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    out = captured.out
    assert f"torch {torch.__version__}, fusedmoe {fusedmoe.__version__}, fp32" in out
    assert "40 tokens, hidden 32, intermediate 16, 6 experts, top 2, swiglu" in out
    assert "forward 0 of " in out, "how much of ours is fused"
    assert "6/6 steps" in captured.err


def test_the_command_prints_json(capsys):
    options = ["--json", "--recipe", "mxfp8", "--dtype", "bf16", "--reps", "1", "--device", "cpu"]
    sizes = [*ARGUMENTS, "--hidden", "64", "--intermediate", "32"]
    assert main(["bench", *sizes, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hidden"], found["tokens"], found["recipe"], found["dtype"]) == (64, 40, "mxfp8", "bf16")
    names = ("fusedmoe", "torch grouped_mm", "torch loop")
    assert [(row["case"], row["name"]) for row in found["rows"]] == [*itertools.product(measure.CASES, names)]
    assert all(row["ms"] > 0 for row in found["rows"])


def test_the_command_ends_with_1_where_ours_was_not_measured(capsys):
    def raises(w):
        raise RuntimeError("no")

    options = bench_cli.BenchOptions(**SIZES, device="cpu", dtype="fp32")
    assert bench_cli.run(options, CountingTimer(), (Peer("fusedmoe", raises), Peer("torch", layer.torch_loop))) == 1
    assert "RuntimeError: no" in capsys.readouterr().out


def test_an_error_that_is_not_of_memory_is_raised(monkeypatch):
    monkeypatch.setattr(bench_cli, "Work", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        bench_cli.run(bench_cli.BenchOptions(**SIZES, device="cpu", dtype="fp32"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (ARGUMENTS[2:], "--hidden: missing"),
        ([*ARGUMENTS, "--experts", "1"], "--top-k 2: must be at most --experts 1"),
        ([*ARGUMENTS, "--hidden", str(1 << 44), "--device", "cpu"], "do not fit into the memory"),
        ([*ARGUMENTS, "--hidden", str(1 << 63), "--device", "cpu"], "do not fit into the memory"),
        ([*ARGUMENTS, "--tokens", "0"], "--tokens 0: must be 1 or more"),
        ([*ARGUMENTS, "--reps", "0"], "--reps 0: must be 1 or more"),
        ([*ARGUMENTS, "--device", "cuda"], "torch sees no GPU"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_package_has_no_benchmarks_and_no_peers():
    """Neither is in the wheel."""
    for file in Path(fusedmoe.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for other in ("benchmarks", "quack", "sonicmoe", "liger_kernel", "deep_gemm"):
            assert not re.search(rf"^\s*(import|from) {other}\b", text, re.MULTILINE), file
