"""Every python block of the README and of docs/ runs as it stands, the blocks of a page one after the other.

A block whose fence says ```` ```python no-run ```` is shown only: a fragment, or one that needs a GPU.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

import fusedmoe as fm
from benchmarks import page
from fusedmoe import ops

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = re.compile(r"^```text\n(?P<table>chain .*?)^```\s*$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```\s*$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """(line, info, code) of each python block, the line being where its code begins."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start("code")) + 1, m["info"].strip(), m["code"]) for m in BLOCK.finditer(text)]


@pytest.mark.usefixtures("builtin_rules")
@pytest.mark.parametrize("document", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_blocks_run(document, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # a block may write files
    namespace = {"__name__": f"docs.{document.stem}"}
    for line, info, code in blocks(document):
        assert info in ("", "no-run"), f"{document.name}:{line - 1}: '{info}' after ```python: write no-run"
        if info == "no-run":
            continue
        # leading newlines make a traceback's line numbers those of the page
        exec(compile("\n" * (line - 1) + code, str(document), "exec"), namespace)
    printed = capsys.readouterr().out
    for match in TABLE.finditer(document.read_text(encoding="utf-8")):
        assert match["table"] in printed, f"{document.name}: the table is not the one that the page's code prints"


def drawing(name):
    """A script of docs/figures, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"{name}_figure", ROOT / "docs" / "figures" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "document"), [("plan", "index.md"), ("fp8", "fp8.md")])
def test_a_picture_is_what_its_script_draws(name, document):
    figure = drawing(name)
    assert figure.PICTURE.read_text(encoding="utf-8") == figure.draw()
    assert f"_static/{figure.PICTURE.name}" in (ROOT / "docs" / document).read_text(encoding="utf-8")


def explained(recipe):
    """The steps of an expert MLP for Hopper, and its ops."""
    layers = [fm.GroupedLinear(2, 128, 2 * 128, device="meta"), fm.GroupedLinear(2, 128, 128, device="meta")]
    experts = fm.Sequential(layers[0], fm.SwiGLU(), fm.Scale("probs"), layers[1]).bfloat16()
    x = torch.empty(16, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    probs = torch.empty(16, device="meta", requires_grad=True)
    splits = torch.empty(2, dtype=torch.int64, device="meta")
    with fm.recipe(recipe):
        return experts.explain(x, splits=splits, probs=probs, arch=90).steps, experts


@pytest.mark.usefixtures("builtin_rules")
def test_the_pictures_show_the_plans_for_hopper():
    figure = drawing("plan")
    steps, experts = explained("bf16")
    assert [(s.direction, s.ops, s.rule) for s in steps] == [s[:3] for s in figure.STEPS]
    named = [type(op).__name__ + ('("probs")' if isinstance(op, fm.Scale) else "") for op in experts]
    assert named == list(figure.OPS)
    steps, _ = explained("fp8_block")
    of_plan = sorted(step.rule for step in steps if step.rule != "sm90.quantize_weight")
    assert sorted(kernel.rule for kernel in drawing("fp8").KERNELS.values()) == of_plan


@pytest.mark.parametrize(
    ("written", "render"),
    [
        (page.PAGE, page.render),
        (page.EP_PAGE, page.render_ep),
        (page.FP8_PAGE, page.render_fp8),
        (page.RECIPES_PAGE, page.render_recipes),
    ],
    ids=["benchmarks", "expert parallelism", "fp8", "recipes"],
)
def test_pages_are_written_from_the_result_files(written, render):
    pytest.importorskip("tomllib")
    assert written.read_text(encoding="utf-8") == render()


def result(name):
    return json.loads((page.RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def words(document):
    return " ".join((ROOT / "docs" / document).read_text(encoding="utf-8").split())


def of_transformers():
    """The results of the layer in transformers, ``{(part, case, implementation, compiled): measured}``."""
    results = result("transformers")
    measured = {(m["part"], m["case"], m["implementation"], m["compiled"]): m for m in results["measured"]}
    return results, lambda part, name, compiled=False: measured[part, "forward + backward", name, compiled]


def rows_of(name):
    return next(shape["rows"] for shape in result(name)["shapes"] if shape["name"] == "qwen3-30b-a3b")


def test_the_figures_of_the_tour_are_those_of_the_result_files():
    text, (results, measured) = words("index.md"), of_transformers()
    stack, moe = measured("stack", "grouped_mm"), measured("MoE part", "grouped_mm")
    ours, layers = measured("MoE part", "fusedmoe"), results["layers"]
    assert f"{100 * layers * moe['ms'] / stack['ms']:.0f} % of a training step of {layers} layers" in text
    assert f"({layers} times {moe['ms']:.1f} of {stack['ms']:.0f} ms" in text
    assert f"{moe['kept_gib']:.2f} GiB per layer in the example above, and {ours['kept_gib']:.2f} GiB with" in text
    assert f"in {ours['ms']:.1f} ms instead of {moe['ms']:.1f} ms" in text
    ms = {row["peer"]: row["ms"] for row in rows_of("kernels") if row["case"] == "FC2 dgrad + dSwiGLU"}
    assert f"take {ms['torch eager']:.1f} ms. One fused kernel takes [{ms['fusedmoe']:.1f} ms]" in text


def test_the_figures_of_which_recipe_are_those_of_the_result_files():
    text, (stack, measured) = words("recipes.md"), of_transformers()
    means = result("mlp")["geometric_mean_speedups"]["forward + backward"]
    eager, compiled = means["torch eager"], means["torch compiled"]
    assert eager["shapes"] == compiled["shapes"] == 9
    assert f"{eager['mean']:.2f} times as fast as eager PyTorch and {compiled['mean']:.2f} times as fast as" in text
    (forward,) = (row["ms"] for row in rows_of("mlp") if (row["peer"], row["case"]) == ("fusedmoe", "forward"))
    assert f"{forward:.1f} ms for `qwen3-30b-a3b` on an H100" in text
    kept = [measured("MoE part", name)["kept_gib"] for name in ("fusedmoe", "grouped_mm")]
    assert f"{kept[0]:.2f} instead of {kept[1]:.2f} GiB per layer for {stack['tokens']} tokens" in text


def test_the_times_in_transformers_are_those_of_the_result_file():
    text, (_, measured) = words("transformers.md"), of_transformers()
    for compiled, before in ((False, ""), (True, "Compiled, it takes ")):
        ours, theirs = (measured("MoE part", name, compiled=compiled)["ms"] for name in ("fusedmoe", "grouped_mm"))
        assert f"{before}{ours:.1f} ms, and {theirs:.1f} ms with `grouped_mm`" in text
        assert theirs >= 1.3 * ours  # the aim of the project


def test_the_comparison_of_recipes_is_that_of_the_result_files():
    def runs(name):
        results = json.loads((ROOT / "benchmarks" / "results" / "demo" / name).read_text(encoding="utf-8"))
        return {run["recipe"]: run for run in results["runs"]}

    seeds = [runs(name) for name in ("compare.json", "compare-seed-1.json", "compare-seed-2.json")]
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for name, on_gpu in runs("nvidia-h100-80gb-hbm3.json").items():
        bits = ", ".join(f"{seed[name]['held_out_bits_per_byte']:.3f}" for seed in seeds)
        gpu = f"{on_gpu['held_out_bits_per_byte']:.3f}"
        if name == "bf16":
            assert f"| bf16 | {bits} | | | {gpu} | |" in text
            continue
        gaps, last = [seed[name]["gap_percent"] for seed in seeds], on_gpu["gap_percent"]
        mean = sum(gaps) / len(gaps)
        each = ", ".join(f"{gap:+.2f}" for gap in gaps)
        assert f"| {name} | {bits} | {each} % | {mean:+.2f} % | {gpu} | {last:+.2f} % |" in text
        if name != "nvfp4":  # whose gap is only reported
            assert max(abs(mean), abs(last)) < 1


# ---- the API page names what rule authors need ----------------------------------------------------------------------

API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
BACKWARD_OPS = dict(re.findall(r"^\| `([^|]+)` \| ((?:`\w+`(?:, )?)+) \|$", API, re.MULTILINE))

OPS = {
    "GroupedLinear": lambda: fm.GroupedLinear(2, 8, 8),
    "GroupedLinear(accumulate_into_main_grad=True)": lambda: fm.GroupedLinear(2, 8, 8, accumulate_into_main_grad=True),
    "Linear": lambda: fm.Linear(8, 8),
    "Linear(accumulate_into_main_grad=True)": lambda: fm.Linear(8, 8, accumulate_into_main_grad=True),
    "SwiGLU": fm.SwiGLU,
    "GeGLU": fm.GeGLU,
    "ReGLU": fm.ReGLU,
    "SquaredReLU": fm.SquaredReLU,
    "Scale": lambda: fm.Scale("probs"),
    "Router": lambda: fm.Router(8, 4, 2),
    "Dispatch": lambda: fm.Dispatch(2),
    "Combine": fm.Combine,
    "Combine(None)": lambda: fm.Combine(None),
}


@pytest.mark.parametrize("name", OPS)
def test_the_backward_ops_of_an_op_are_those_of_the_page(name):
    expected = [type(step).__name__ for step in OPS[name]().backward_ops()]
    assert re.findall(r"`(\w+)`", BACKWARD_OPS[name]) == expected


def test_the_page_documents_every_backward_op():
    classes = {name for name in ops.__all__ if isinstance(getattr(ops, name), type)}
    backward = {name for name in classes if issubclass(getattr(ops, name), fm.BackwardOp)} - {"BackwardOp"}
    (members,) = re.findall(r"automodule:: fusedmoe\.ops\n   :members: (.*)", API)
    assert backward <= set(members.split(", "))
    assert backward - {"DGLU"} <= set(re.findall(r"`(\w+)`", API))
