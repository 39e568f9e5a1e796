"""Every python block of the README and of docs/ runs as it stands, the blocks of a page one after the other.

A block whose fence says ```` ```python no-run ```` is shown only: a fragment, or one that needs a GPU.
"""

import json
import re
from pathlib import Path

import pytest

from benchmarks import page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = re.compile(r"^```text\n(?P<table>chain .*?)^```\s*$", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```\s*$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """(line, info, code) of each python block, the line being where its code begins."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start("code")) + 1, m["info"].strip(), m["code"]) for m in BLOCK.finditer(text)]


def test_there_are_pages():
    assert {"README.md", "composing.md", "promises.md"} <= {page.name for page in PAGES}


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


def test_the_benchmark_page_is_written_from_the_result_files():
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page.render()


def test_the_times_in_transformers_are_those_of_the_result_file():
    results = json.loads((page.RESULTS / "transformers.json").read_text(encoding="utf-8"))
    ms = {
        (m["implementation"], m["compiled"]): m["ms"]
        for m in results["measured"]
        if (m["part"], m["case"]) == ("MoE part", "forward + backward")
    }
    text = " ".join((ROOT / "docs" / "transformers.md").read_text(encoding="utf-8").split())
    plain = f"{ms['fusedmoe', False]:.1f} ms, against {ms['grouped_mm', False]:.1f} ms with `grouped_mm`"
    compiled = f"compiled {ms['fusedmoe', True]:.1f} against {ms['grouped_mm', True]:.1f} ms"
    assert plain in text
    assert compiled in text
    for is_compiled in (False, True):  # what the project sets out for
        assert ms["grouped_mm", is_compiled] >= 1.3 * ms["fusedmoe", is_compiled]


def test_the_comparison_of_recipes_is_that_of_the_result_files():
    def runs(name):
        results = json.loads((ROOT / "benchmarks" / "results" / "demo" / name).read_text(encoding="utf-8"))
        return {run["recipe"]: run for run in results["runs"]}

    seeds = [runs(name) for name in ("compare.json", "compare-seed-1.json", "compare-seed-2.json")]
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for name, on_gpu in runs("nvidia-h100-80gb-hbm3.json").items():
        bits = ", ".join(f"{seed[name]['held_out_bits_per_byte']:.3f}" for seed in seeds)
        gaps = [seed[name]["gap_percent"] for seed in seeds]
        mean = sum(gaps) / len(gaps)
        cells = [", ".join(f"{gap:+.2f}" for gap in gaps) + " %", f"{mean:+.2f} %"]
        last = f"{on_gpu['gap_percent']:+.2f} %"
        gpu = f"{on_gpu['held_out_bits_per_byte']:.3f}"
        if name == "bf16":
            assert f"| bf16 | {bits} | | | {gpu} | |" in text
        else:
            assert f"| {name} | {bits} | {cells[0]} | {cells[1]} | {gpu} | {last} |" in text
            if name != "nvfp4":  # whose gap is only reported
                assert abs(mean) < 1
                assert abs(on_gpu["gap_percent"]) < 1
