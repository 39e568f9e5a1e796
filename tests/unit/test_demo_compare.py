"""Numeric recipes in the demo: what is trained under which, and runs that differ in nothing else side by side."""

import io
import json
import re
import signal
import sys
from dataclasses import dataclass, fields

import pytest
import torch
from matplotlib import colors, image
from rich.console import Console

import fusedmoe as fm
from fusedmoe.base.machine import machine
from fusedmoe.call import settings
from fusedmoe.commands.demo import checkpoint, comparison, report, train
from fusedmoe.commands.demo import run as demo_run
from fusedmoe.commands.demo.compare import compare
from fusedmoe.commands.demo.comparison import Outcome, gap_curve, gap_percent
from fusedmoe.commands.demo.data import Split, load_split
from fusedmoe.commands.demo.errors import DemoError, InterruptedRunError, UsageError
from fusedmoe.commands.demo.model import ByteTransformer, ModelConfig
from fusedmoe.commands.demo.options import GPU_DEFAULTS, Call, job_of
from fusedmoe.commands.main import main
from fusedmoe.numerics import recipes
from fusedmoe.ops.op import Node

TINY = {
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "experts": 4,
    "top_k": 2,
    "intermediate": 16,
    "context": 16,
    "batch": 4,
    "steps": 4,
    "device": "cpu",
    "dtype": "float32",
}
write_figure = comparison.write_figure


class Round(fm.Op):
    """Rounds rows to halves; the gradient passes."""

    def compute(self, x):
        return x + ((2 * x).round() / 2 - x).detach()


class Block(fm.Op):
    """y = x, and lets no gradient pass."""

    def compute(self, x):
        return x.detach() + 0 * x


@dataclass(frozen=True)
class Same(fm.Recipe):
    name: str = "same"


@dataclass(frozen=True)
class Rounded(fm.Recipe):
    """Inserts an op before the experts' first product."""

    name: str = "rounded"
    op: type = Round

    def rewrite(self, nodes):
        at = [node.label for node in nodes].index("experts.gate_up")
        return (*nodes[:at], Node(f"experts.gate_up.{self.name}", self.op()), *nodes[at:])


@dataclass(frozen=True)
class Refusing(fm.Recipe):
    name: str = "refusing"

    def rewrite(self, nodes):
        raise fm.InputError("experts.gate_up.Round: input: expected a last dimension that 32 divides, got 16")


@pytest.fixture(autouse=True)
def _known_recipes(monkeypatch):
    for recipe in (Same(), Rounded(), Rounded("blocked", Block), Refusing()):
        monkeypatch.setitem(recipes.RECIPES, recipe.name, recipe)


@pytest.fixture(scope="module", autouse=True)
def _little_text_and_no_figures():
    whole = load_split()
    little = Split(train=whole.train[:20_000], held_out=whole.held_out[:500])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_run, "load_split", lambda: little)
        patch.setattr(report, "write_figure", lambda *_: None)  # to draw takes longer than to train
        patch.setattr(comparison, "write_figure", lambda *_: None)
        yield


def console_into(file):
    return Console(file=file, width=200, highlight=False, soft_wrap=True, emoji=False, markup=False)


def demo(of, folder, *, given=None, **call):
    """Call ``run`` or ``compare``; what was printed."""
    console = console_into(io.StringIO())
    chosen = {"eval_interval": 2, "sample_bytes": 0} | call
    assert of(TINY | (given or {}), Call(output=folder, **chosen), console) == 0
    assert settings.current() == settings.Settings()
    return console.file.getvalue()


def run(folder, **keywords):
    return demo(demo_run.run, folder, **keywords)


def compared(folder, *names, **keywords):
    return demo(compare, folder, compare=names, **keywords)


def resumed(folder, *names, given=None, **call):
    """As a user goes on: with none of the job's options."""
    console = console_into(io.StringIO())
    call = {"eval_interval": 2, "sample_bytes": 0} | call
    assert compare(given or {}, Call(output=folder, compare=names, resume=True, **call), console) == 0
    return console.file.getvalue()


@pytest.fixture
def figure(monkeypatch):
    """The comparison's figure is drawn."""
    monkeypatch.setattr(comparison, "write_figure", write_figure)


def curves_in(folder):
    history = checkpoint.load(folder)["history"]
    return history["losses"].tolist(), history["evaluations"]


def runs_in(folder):
    return {run["recipe"]: run for run in json.loads((folder / "compare.json").read_text())["runs"]}


@pytest.fixture
def trained(monkeypatch):
    """The recipe and the number of each training step, as it is taken."""
    steps = []
    train_step = train.Trainer.train_step

    def noted(self):
        steps.append((self.job.recipe, self.step + 1))
        train_step(self)

    monkeypatch.setattr(train.Trainer, "train_step", noted)
    return steps


# One run


@pytest.mark.parametrize("recipe", ["bf16", "rounded"])
def test_every_forward_pass_is_under_the_recipe_of_the_job(tmp_path, monkeypatch, recipe):
    forward = ByteTransformer.forward
    seen = []

    def noted(self, bytes_BS):
        seen.append((self.training, len(bytes_BS), settings.current().recipe))
        return forward(self, bytes_BS)

    monkeypatch.setattr(ByteTransformer, "forward", noted)
    run(tmp_path, given={"recipe": recipe}, sample_bytes=3)
    assert {in_force for *_, in_force in seen} == {recipes.RECIPES[recipe]}
    assert [training for training, *_ in seen].count(True) == TINY["steps"]
    evaluated = [batch for training, batch, _ in seen if not training]
    assert evaluated.count(1) >= 3  # the sample's bytes, and ...
    assert max(evaluated) > 1  # ... the held-out text


def test_plans_with_a_backward_and_without_are_made_under_it(tmp_path, monkeypatch):
    rewrite = Rounded.rewrite
    seen = []

    def noted(self, nodes):
        seen.append((settings.current().recipe, torch.is_grad_enabled()))
        return rewrite(self, nodes)

    monkeypatch.setattr(Rounded, "rewrite", noted)
    text = run(tmp_path, given={"recipe": "rounded"})
    assert set(seen) == {(Rounded(), True), (Rounded(), False)}
    assert "float32, recipe rounded, seed 0" in text
    assert "planned for cpu, float32, recipe rounded" in text
    for direction in ("forward", "backward"):
        assert re.search(rf"experts\.gate_up\.rounded\.\S+ +{direction} ", text)


def test_the_backward_is_that_of_the_recipe(tmp_path):
    run(tmp_path / "bf16")
    run(tmp_path / "blocked", given={"recipe": "blocked"})
    (first, *plain), (blocked_first, *blocked) = (curves_in(tmp_path / name)[0] for name in ("bf16", "blocked"))
    assert blocked_first == first  # forward is the same, so that the first step's gradients make all the difference
    assert all(a != b for a, b in zip(plain, blocked, strict=True))


def test_the_default_is_no_quantization(tmp_path):
    assert job_of({"device": "cpu"}).recipe == "bf16"
    text = run(tmp_path)
    assert "float32, recipe bf16 (no quantization), seed 0" in text
    assert json.loads((tmp_path / "results.json").read_text())["job"]["recipe"] == "bf16"


def test_a_checkpoint_goes_on_under_its_recipe_bit_for_bit_and_under_no_other(tmp_path):
    run(tmp_path / "whole", given={"recipe": "rounded"})
    run(tmp_path / "other")
    run(tmp_path / "pieces", given={"recipe": "rounded"}, stop_at=2)
    with pytest.raises(UsageError, match=r"--recipe bf16: the checkpoint was made with --recipe rounded; leave"):
        run(tmp_path / "pieces", given={"recipe": "bf16"}, resume=True)
    run(tmp_path / "pieces", resume=True)
    assert checkpoint.load(tmp_path / "pieces")["job"]["recipe"] == "rounded"
    assert curves_in(tmp_path / "pieces") == curves_in(tmp_path / "whole") != curves_in(tmp_path / "other")


def test_a_checkpoint_from_before_the_option_is_one_without_quantization(tmp_path):
    run(tmp_path / "whole")
    run(tmp_path / "old", stop_at=2)
    state = checkpoint.load(tmp_path / "old")
    del state["job"]["recipe"]
    checkpoint.save(tmp_path / "old", state)
    with pytest.raises(UsageError, match=r"--recipe rounded: the checkpoint was made with --recipe bf16"):
        run(tmp_path / "old", given={"recipe": "rounded"}, resume=True)
    run(tmp_path / "old", given={"recipe": "bf16"}, resume=True)
    assert checkpoint.load(tmp_path / "old")["job"]["recipe"] == "bf16"
    assert curves_in(tmp_path / "old") == curves_in(tmp_path / "whole")


def test_what_a_recipe_refuses_is_a_message(tmp_path):
    with pytest.raises(
        UsageError, match=r"--recipe refusing: experts\.gate_up\.Round: input: expected a last dimension"
    ):
        run(tmp_path, given={"recipe": "refusing"})


def test_recipes_registered_later_are_choices(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"--recipe \{bf16,.*same,rounded,blocked,refusing\}", text)
    assert "bf16 is no quantization, in the model's --dtype (float32 on a CPU)" in text
    with pytest.raises(SystemExit):
        main(["demo", "--recipe", "fp3"])
    assert re.search(r"--recipe: invalid choice: 'fp3' \(choose from .*rounded", capsys.readouterr().err)
    with pytest.raises(UsageError, match=r"--recipe fp3: choose from bf16, .*same, rounded"):
        job_of({"device": "cpu", "recipe": "fp3"})


def test_unquantized_weight_gradients_are_part_of_a_name(tmp_path):
    name = "mxfp8:wgrad=bf16"
    assert f"Recipe 2 of 2: {name}" in compared(tmp_path, "mxfp8", name)
    assert list(runs_in(tmp_path)) == ["mxfp8", name]
    (first, *quantized), (again, *unquantized) = (curves_in(tmp_path / recipe)[0] for recipe in ("mxfp8", name))
    assert first == again  # no weight gradient has changed a weight yet
    assert quantized != unquantized
    for other in ("rounded:wgrad=bf16", "bf16:wgrad=bf16", "mxfp8:wgrad=fp8"):
        with pytest.raises(UsageError, match=f"--recipe {other}: choose from bf16, "):
            job_of({"device": "cpu", "recipe": other})


@pytest.mark.usefixtures("builtin_rules")
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_block:wgrad=bf16"])
def test_every_step_of_the_default_model_has_a_kernel_on_hopper(recipe):
    sizes = {item.name: GPU_DEFAULTS[item.name] for item in fields(ModelConfig)}
    model = ByteTransformer(ModelConfig(**sizes), torch.device("meta"), torch.bfloat16)
    with fm.recipe(recipe), demo_run.deterministic_kernels():
        (group,) = fm.explain(model, tokens=GPU_DEFAULTS["batch"] * GPU_DEFAULTS["context"], arch=90).groups
    (plan,) = group.explanation.plans
    assert len(group.names) == GPU_DEFAULTS["layers"]
    assert not plan.unfused
    assert any("fp8" in step.rule for step in plan.steps) is (recipe != "bf16")


# Several


@pytest.mark.usefixtures("figure")
def test_same_numerics_are_the_same_curves_and_other_numerics_are_not(tmp_path):
    text = compared(tmp_path, "same", "bf16", "rounded")
    same, bf16, rounded = (tmp_path / name for name in ("same", "bf16", "rounded"))
    assert curves_in(same) == curves_in(bf16)
    assert all(a != b for a, b in zip(curves_in(bf16)[0], curves_in(rounded)[0], strict=True))
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["machine"] == machine(torch.device("cpu"))
    assert written["versions"]["torch"] == torch.__version__
    assert written["baseline"] == "bf16"
    assert written["job"]["seed"] == 0
    assert "recipe" not in written["job"]
    runs = runs_in(tmp_path)
    assert list(runs) == ["same", "bf16", "rounded"]
    assert runs["same"]["gap_percent"] == runs["bf16"]["gap_percent"] == 0
    gap = runs["rounded"]["gap_percent"]
    bits = {name: runs[name]["held_out_bits_per_byte"] for name in runs}
    assert gap != 0
    assert bits["rounded"] == pytest.approx(bits["bf16"] * (1 + gap / 100))
    for name in runs:
        results = json.loads((tmp_path / name / "results.json").read_text())
        assert results["held_out_bits_per_byte"] == bits[name]
        assert results["job"] == written["job"] | {"recipe": name}
        assert runs[name]["training_seconds"] == results["training_seconds"] > 0
        row = re.search(rf"^ +{name} +{bits[name]:.4f} +(\S+) % +([\d.]+) s *$", text, re.M)
        assert row[1] == f"{runs[name]['gap_percent']:+.2f}"
        assert float(row[2]) == pytest.approx(results["training_seconds"], abs=0.06)
    assert re.search(r"^ +recipe +held-out bits/byte +gap to bf16 +training *$", text, re.M)
    assert [line for line in text.splitlines() if line.startswith("Recipe ")] == [
        "Recipe 1 of 3: same",
        "Recipe 2 of 3: bf16",
        "Recipe 3 of 3: rounded",
    ]
    assert text.rstrip().endswith(f"Written: {tmp_path / 'compare.png'}, {tmp_path / 'compare.json'}")


def test_a_run_of_a_comparison_is_the_single_run(tmp_path):
    compared(tmp_path, "same", "rounded")
    run(tmp_path / "single", given={"recipe": "rounded"})
    assert curves_in(tmp_path / "single") == curves_in(tmp_path / "rounded")
    assert sorted(path.name for path in (tmp_path / "single").iterdir()) == sorted(
        path.name for path in (tmp_path / "rounded").iterdir()
    )
    run(tmp_path / "rounded", given={"steps": 5}, resume=True)
    assert checkpoint.load(tmp_path / "rounded")["step"] == 5


def test_the_first_is_what_others_are_compared_with_where_bf16_is_not_among_them(tmp_path):
    text = compared(tmp_path, "rounded", "same")
    assert "gap to rounded" in text
    assert json.loads((tmp_path / "compare.json").read_text())["baseline"] == "rounded"
    assert runs_in(tmp_path)["same"]["gap_percent"] != 0


def test_the_gap_is_in_percent_and_positive_where_worse():
    a, b = (Outcome(name, [4.0], [(1, bits)], 1.0, 3.0) for name, bits in (("a", 2.0), ("b", 2.1)))
    assert gap_percent(b, a) == pytest.approx(5)
    assert gap_percent(a, a) == 0


def test_the_gap_over_time_is_where_both_were_evaluated():
    a = Outcome("a", [4.0] * 4, [(2, 4.0), (4, 2.0)], 1.0, 3.0)
    b = Outcome("b", [4.0] * 4, [(1, 9.0), (2, 3.0), (3, 9.0), (4, 2.5)], 1.0, 3.0)
    assert gap_curve(b, a) == [(2, pytest.approx(-25)), (4, pytest.approx(25))]


def test_the_figure_has_a_curve_of_each_recipe_and_the_bigram_line(tmp_path):
    outcomes = [
        Outcome(f"recipe{i}", [5.0 - i - 0.02 * s for s in range(100)], [(50, 4.5 - i), (100, 4 - i)], 1.0, 6.0)
        for i in range(4)
    ]
    path = write_figure(tmp_path, outcomes)
    assert path == tmp_path / "compare.png"
    pixels = image.imread(path)[..., :3]
    assert min(pixels.shape[:2]) > 800
    training, held_out, gap = torch.from_numpy(pixels).tensor_split(3)

    def in_rows(colour, part):
        return ((part - torch.tensor(colors.to_rgb(colour))).abs().amax(dim=-1) < 0.02).sum(dim=1)

    def drawn(colour, part):
        return int(in_rows(colour, part).sum())

    for colour in comparison.COLOURS[:4]:
        assert min(drawn(colour, part) for part in (training, held_out, gap)) > 200
    assert drawn(comparison.COLOURS[4], torch.from_numpy(pixels)) < 30
    assert in_rows("tab:gray", held_out).max() > 300  # a line from side to side
    assert max(in_rows("tab:gray", part).max() for part in (training, gap)) < 100
    assert len(set(comparison.COLOURS)) == len(comparison.COLOURS) == len(comparison.MARKS)


@pytest.mark.usefixtures("figure")
def test_without_matplotlib_the_table_and_the_numbers_come_all_the_same(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = compared(tmp_path, "bf16", "same", given={"steps": 1})
    assert report.MISSING_MATPLOTLIB in text.partition("gap to bf16")[2]
    assert not (tmp_path / "compare.png").exists()
    assert runs_in(tmp_path)["same"]["gap_percent"] == 0


# Going on


def test_after_ctrl_c_it_goes_on_with_what_is_unfinished(tmp_path, monkeypatch, trained):
    compared(tmp_path / "whole", "bf16", "rounded", "same")
    noted = train.Trainer.train_step

    def interrupted(self):
        if (self.job.recipe, self.step) == ("rounded", 1):
            signal.raise_signal(signal.SIGINT)
        noted(self)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "train_step", interrupted)
        with pytest.raises(InterruptedRunError) as caught:
            compared(tmp_path / "pieces", "bf16", "rounded", "same")
    assert caught.value.exit_code == 128 + signal.SIGINT
    assert str(caught.value).endswith(
        f"rounded/checkpoint.pt; continue with: fusedmoe demo --compare bf16,rounded,same --resume --eval-interval 2 "
        f"--output {tmp_path / 'pieces'}"
    )
    assert checkpoint.load(tmp_path / "pieces" / "rounded")["step"] == 2
    assert not (tmp_path / "pieces" / "compare.json").exists()

    trained.clear()
    text = resumed(tmp_path / "pieces", "bf16", "rounded", "same")
    assert trained == [("rounded", 3), ("rounded", 4), *[("same", step) for step in (1, 2, 3, 4)]]
    assert "Finished earlier; its numbers are in" in text.partition("Recipe 2")[0]
    assert "Resuming after step 2 of 4" in text.partition("Recipe 2")[2].partition("Recipe 3")[0]
    for name in ("bf16", "rounded", "same"):
        assert curves_in(tmp_path / "pieces" / name) == curves_in(tmp_path / "whole" / name)
        pieces, whole = runs_in(tmp_path / "pieces")[name], runs_in(tmp_path / "whole")[name]
        assert pieces["evaluations"] == whole["evaluations"]
        assert pieces["gap_percent"] == whole["gap_percent"]


def test_ctrl_c_after_the_last_step_says_how_to_go_on_too(tmp_path, monkeypatch, trained):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_run, "sample", interrupted)
        with pytest.raises(InterruptedRunError, match=r"continue with: fusedmoe demo --compare bf16,same --resume"):
            compared(tmp_path, "bf16", "same", sample_bytes=1)
    assert not (tmp_path / "bf16" / "results.json").exists()
    trained.clear()
    resumed(tmp_path, "bf16", "same")
    assert {recipe for recipe, _ in trained} == {"same"}
    assert set(runs_in(tmp_path)) == {"bf16", "same"}


def test_ctrl_c_before_anything_is_saved_points_at_no_checkpoint(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_run, "describe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path, "bf16", "same")


def test_finished_runs_are_compared_again_without_training(tmp_path, trained):
    compared(tmp_path, "bf16", "rounded")
    before = runs_in(tmp_path)
    (tmp_path / "compare.json").unlink()
    trained.clear()
    resumed(tmp_path, "rounded", "bf16")
    assert trained == []
    after = runs_in(tmp_path)
    assert list(after) == ["rounded", "bf16"]
    assert after == before


def test_more_steps_go_on_with_every_run(tmp_path, trained):
    compared(tmp_path, "bf16", "same")
    trained.clear()
    resumed(tmp_path, "bf16", "same", given={"steps": 5})
    assert trained == [("bf16", 5), ("same", 5)]
    assert json.loads((tmp_path / "compare.json").read_text())["job"]["steps"] == 5


def test_stop_at_stops_each_run_and_compares_later(tmp_path, trained):
    text = compared(tmp_path, "bf16", "same", stop_at=1)
    assert trained == [("bf16", 1), ("same", 1)]
    assert "Nothing is compared before every run has 4 steps; continue with: fusedmoe demo --compare bf16,same" in text
    assert not (tmp_path / "compare.json").exists()
    resumed(tmp_path, "bf16", "same")
    assert runs_in(tmp_path)["same"]["gap_percent"] == 0


def test_a_new_comparison_takes_nothing_of_the_one_before(tmp_path, trained):
    compared(tmp_path, "bf16", "same")
    text = compared(tmp_path, "bf16", "same", stop_at=1)
    assert text.count("The checkpoint of an earlier run is kept as") == 2
    assert text.index(str(tmp_path / "same" / "checkpoint.previous.pt")) < text.index("Recipe 1 of 2")
    trained.clear()
    resumed(tmp_path, "bf16", "same")
    assert trained == [(recipe, step) for recipe in ("bf16", "same") for step in (2, 3, 4)]


def test_results_of_another_run_than_the_checkpoint_s_are_written_again(tmp_path, trained):
    compared(tmp_path, "bf16", "same")
    before = runs_in(tmp_path)
    path = tmp_path / "same" / "results.json"
    results = json.loads(path.read_text())
    results["held_out_bits_per_byte"] = results["evaluations"][-1][1] = 1.0
    trained.clear()
    for content in (json.dumps(results), "{"):
        path.write_text(content)
        resumed(tmp_path, "bf16", "same")
        assert runs_in(tmp_path)["same"] == before["same"]
    assert trained == []


def test_runs_of_different_jobs_are_not_compared(tmp_path):
    run(tmp_path / "bf16", given={"recipe": "bf16"}, stop_at=1)
    run(tmp_path / "same", given={"recipe": "same", "steps": 5}, stop_at=1)
    run(tmp_path / "rounded", given={"recipe": "rounded", "seed": 1}, stop_at=1)
    with pytest.raises(UsageError, match=r"bf16 has --steps 4, that of same --steps 5; .* choose one with --steps"):
        resumed(tmp_path, "bf16", "same")
    with pytest.raises(UsageError, match=r"--seed 0, that of rounded --seed 1; .* start again without --resume"):
        resumed(tmp_path, "bf16", "rounded")
    with pytest.raises(UsageError, match=r"bf16: --hidden 32: the checkpoint was made with --hidden 16"):
        resumed(tmp_path, "bf16", "same", given={"hidden": 32})


def test_without_any_checkpoint_there_is_nothing_to_go_on_from(tmp_path):
    with pytest.raises(DemoError, match=r"no checkpoint in any of .*bf16, .*same; start without --resume"):
        resumed(tmp_path, "bf16", "same")


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "bf16,fp3"], r"--compare bf16,fp3: no recipe is called fp3; choose from bf16, .*rounded"),
        (["--compare", "same,bf16,same"], r"--compare same,bf16,same: same is repeated; name each recipe once"),
        (["--compare", ""], r"--compare: got no recipe; choose from bf16, .*rounded, .*commas"),
        (["--compare", " , "], r"--compare: got no recipe; choose from"),
        (["--compare", "bf16,same", "--recipe", "same"], r"--recipe same with --compare bf16,same: leave out --recipe"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_is_written(tmp_path, capsys, arguments, message):
    assert main(["demo", *arguments, "--output", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert re.search(message, captured.err)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("figure")
def test_the_command_compares(tmp_path, capsys):
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in (TINY | {"steps": 1}).items()]
    arguments = ["demo", *sizes, "--sample-bytes", "0", "--output", str(tmp_path)]
    assert main([*arguments, "--compare", "bf16, rounded"]) == 0
    out = capsys.readouterr().out
    assert "gap to bf16" in out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG\r\n")
