"""Every python block of the README and of docs/ runs as it stands, the blocks of a page one after the other.

A block whose fence says ```` ```python no-run ```` is shown only: a fragment, or one that needs a GPU.
"""

import json
import re
from pathlib import Path

import pytest

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
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # a block may write files
    namespace = {"__name__": f"docs.{page.stem}"}
    for line, info, code in blocks(page):
        assert info in ("", "no-run"), f"{page.name}:{line - 1}: '{info}' is not known after ```python; write no-run"
        if info == "no-run":
            continue
        # leading newlines make a traceback's line numbers those of the page
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
    printed = capsys.readouterr().out
    for match in TABLE.finditer(page.read_text(encoding="utf-8")):
        assert match["table"] in printed, f"{page.name}: the table is not the one that the page's code prints"


def test_the_benchmark_tables_are_those_of_the_result_files():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    results = json.loads((ROOT / "benchmarks/results/nvidia-h100-80gb-hbm3/host.json").read_text(encoding="utf-8"))
    assert host_table(results) in page
    assert f"took {results['host']['cpu']['planning_ms']:.1f} ms there" in page


def host_table(results: dict) -> str:
    """The table of docs/benchmarks.md, out of a result file."""
    versions = f"torch {results['versions']['torch']}, Python {results['versions']['python']}"
    lines = [
        f"Machine of an {results['machine']}, {versions}, commit {results['commit']}:",
        "",
        "| tensors on | pass | planned | by hand | planned - by hand |",
        "|---|---|---|---|---|",
    ]
    for device, report in results["host"].items():
        for title, times in report["passes"].items():
            cells = [f"{times[v]['least_us']:.0f} ({times[v]['median_us']:.0f})" for v in ("planned", "by hand")]
            over = report["overhead_us"][title]
            cells.append(f"{over['least']:.0f} ({over['median']:.0f})")
            lines.append(f"| {device} | {title} | {' | '.join(cells)} |")
    return "\n".join(lines)
