"""``python -m benchmarks.plot``: draw TFLOP/s by shape from result files, one picture per case, to `docs/_static`."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.page import PEERS
from benchmarks.results import ROOT

PICTURES = ROOT.parent / "docs" / "_static"


def figures(results: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """TFLOP/s by case, peer and shape, of the peers that take part today."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape in results["shapes"]:
        for row in shape["rows"]:
            if row["tflops"] is not None and row["peer"] in PEERS:
                found.setdefault(row["case"], {}).setdefault(row["peer"], {})[shape["name"]] = row["tflops"]
    return found


def draw(results: dict[str, Any], name: str, folder: Path) -> list[Path]:
    """Write ``folder/name-case.png`` for each case; needs matplotlib, which the `demo` extra installs."""
    from matplotlib.figure import Figure

    written = []
    for case, peers in figures(results).items():
        shapes = [shape["name"] for shape in results["shapes"]]
        figure = Figure(figsize=(1.2 + 1.1 * len(shapes), 4), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(peers)
        for i, (peer, by_shape) in enumerate(peers.items()):
            at = [x - 0.4 + (i + 0.5) * width for x in range(len(shapes))]
            axes.bar(at, [by_shape.get(shape, 0.0) for shape in shapes], width, label=peer)
        axes.axhline(results["ceiling"]["tflops"], color="grey", linestyle=":", label="8192³ matrix product")
        axes.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
        axes.set_ylabel("TFLOP/s")
        axes.set_title(f"{case} ({results['machine']}, {results['routing']})")
        axes.legend(fontsize="small", ncols=2)
        folder.mkdir(parents=True, exist_ok=True)
        written.append(folder / f"{name}-{re.sub(r'[^a-z0-9]+', '-', case.lower()).strip('-')}.png")
        figure.savefig(written[-1], dpi=120)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", help="default: every kernels.json and mlp.json in results/")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder of the pictures (default: %(default)s)")
    args = parser.parse_args()
    files = args.files or sorted(f for name in ("kernels", "mlp") for f in (ROOT / "results").glob(f"*/{name}.json"))
    for file in files:
        for picture in draw(json.loads(file.read_text(encoding="utf-8")), f"{file.parent.name}-{file.stem}", args.out):
            print(picture)


if __name__ == "__main__":
    main()
