"""``python -m benchmarks.demo RECIPE,...``: train the demo under several recipes, with everything else equal.

The result files, one per seed, are in ``results/demo/``. Their losses are a part of docs/fp8.md and of docs/recipes.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fusedmoe as fm
from fusedmoe.base.machine import machine, versions
from fusedmoe.commands.demo.command import describe
from fusedmoe.commands.demo.data import bigram_bits_per_byte, load_split
from fusedmoe.commands.demo.options import add_job_arguments, given_of, job_of
from fusedmoe.commands.demo.train import Trainer, train

# The colour-blind-safe palette of Okabe and Ito, without yellow, which is hard to see on white.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
PICTURE, ALL_RECIPES = "fp8-training.png", "demo-compare.png"
TEXT = """\
### In training, in the demo

Held-out bits per byte of the demo's language model after {steps} steps, with everything else equal (`python -m
benchmarks.demo`): {layers} layers of {experts} experts, {top_k} of them per token, hidden {hidden}, intermediate
{intermediate}, steps of {tokens} bytes. {machine}, torch {torch}.
"""
PLOT = """\
![Held-out loss of each recipe and seed, and its gap to {baseline}](_static/{picture})

The largest gap of a seed is {largest:+.2f} %. Between seeds, `{baseline}` itself differs by up to {spread:.2f} %.
"""


def run(names: Sequence[str], given: Mapping[str, Any], folder: Path) -> Path:
    """Train the job under each recipe, in subfolders; write ``compare.json`` after each, and return its path."""
    split = load_split()
    bigram, path = bigram_bits_per_byte(split.train, split.held_out), folder / "compare.json"
    runs: list[dict[str, Any]] = []
    for name in names:
        job = job_of({**given, "recipe": name})
        (folder / name).mkdir(parents=True, exist_ok=True)
        print(f"\nRecipe {len(runs) + 1} of {len(names)}: {name}")
        with fm.recipe(name):
            trainer = Trainer(job, split)
            describe(trainer, split, bigram)
            train(trainer, folder / name)
        bits = trainer.evaluations[-1][1]
        runs.append({
            "recipe": name, "held_out_bits_per_byte": bits, "training_seconds": trainer.seconds,
            "gap_percent": (bits / (runs[0]["held_out_bits_per_byte"] if runs else bits) - 1) * 100,
            "evaluations": trainer.evaluations,
        })  # fmt: skip
        head = {"machine": machine(torch.device(job.device)), "versions": versions(), "baseline": names[0]}
        of_job = {key: value for key, value in dataclasses.asdict(job).items() if key != "recipe"}
        results = head | {"bigram_bits_per_byte": bigram, "runs": runs, "job": of_job}
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return path


def section(compared: Sequence[Mapping[str, Any]]) -> str:
    """Return the text, the table and the picture; ``compared`` has the comparison of each seed, of equal jobs."""
    first = compared[0]
    job, baseline, seeds = first["job"], first["baseline"], [of_seed["job"]["seed"] for of_seed in compared]
    for of_seed in compared:
        if {**of_seed["job"], "seed": None} != {**job, "seed": None}:
            raise ValueError(f"seeds {seeds} of different jobs: {job} and {of_seed['job']}")
    bits, gaps = (
        {recipe: [_run(of_seed, recipe)[key] for of_seed in compared] for recipe in recipes(compared)}
        for key in ("held_out_bits_per_byte", "gap_percent")
    )
    lines = [
        f"| recipe | {' | '.join(f'seed {seed}' for seed in seeds)} | gaps to `{baseline}` | their mean |",
        "|---" * (len(seeds) + 3) + "|",
    ]
    for recipe, of_seeds in bits.items():
        cells = [f"`{recipe}`", *(f"{value:.3f}" for value in of_seeds)]
        if recipe != baseline:
            each = ", ".join(f"{gap:+.2f}" for gap in gaps[recipe])
            cells += [f"{each} %", f"{sum(gaps[recipe]) / len(seeds):+.2f} %"]
        lines.append("| " + " | ".join(cells + [""] * (len(seeds) + 3 - len(cells))) + " |")
    sizes = {name: job[name] for name in ("steps", "layers", "experts", "top_k", "hidden", "intermediate")}
    text = TEXT.format(
        **sizes, tokens=job["batch"] * job["context"], machine=first["machine"], torch=first["versions"]["torch"]
    )
    largest = max((gap for of_seeds in gaps.values() for gap in of_seeds), key=abs)
    spread = (max(bits[baseline]) / min(bits[baseline]) - 1) * 100
    plot = PLOT.format(baseline=baseline, picture=PICTURE, largest=largest, spread=spread)
    return "\n".join([text, *lines, "", plot])


def recipes(compared: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the recipes, in order."""
    return [run["recipe"] for run in compared[0]["runs"]]


def draw(compared: Sequence[Mapping[str, Any]], folder: Path, picture: str = PICTURE) -> Path:
    """Draw held-out loss and gap over steps, a line per recipe and seed; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, gaps = figure.subplots(2, 1, sharex=True)
    baseline = compared[0]["baseline"]
    for recipe, colour in zip(recipes(compared), COLOURS, strict=False):
        for number, of_seed in enumerate(compared):
            label = recipe if number == 0 else None
            base = dict(_run(of_seed, baseline)["evaluations"])
            curve = [(step, value) for step, value in _run(of_seed, recipe)["evaluations"] if step in base]
            style: dict[str, Any] = {"color": colour, "label": label, "marker": ".", "linewidth": 1.2}
            style["linestyle"] = ("-", "--", ":")[number % 3]
            steps = [step for step, _ in curve]
            losses.plot(steps, [value for _, value in curve], **style)
            gaps.plot(steps, [(value / base[step] - 1) * 100 for step, value in curve], **style)
    for percent in (-1, 1):
        gaps.axhline(percent, color="tab:gray", linewidth=0.8, linestyle="--")
    losses.set(title="Held-out text" + ("; one line per seed" if len(compared) > 1 else ""), ylabel="bits per byte")
    gaps.set(title=f"Gap to {baseline} of the same seed; dashed: 1 %", ylabel="percent", xlabel="step")
    for axes in (losses, gaps):
        axes.grid(alpha=0.3)
        axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / picture, dpi=120)
    return folder / picture


def _run(of_seed: Mapping[str, Any], recipe: str) -> Mapping[str, Any]:
    return next(run for run in of_seed["runs"] if run["recipe"] == recipe)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("recipes", help="names with commas between them; the first is the baseline")
    add_job_arguments(parser)
    parser.add_argument("--output", type=Path, default=Path("fusedmoe-demo"), metavar="DIR", help="(%(default)s)")
    options = parser.parse_args(argv)
    if "recipe" in given_of(options):
        parser.error("--recipe: the first argument names the recipes")
    found = run(options.recipes.split(","), given_of(options), options.output)
    print("\n" + section([json.loads(found.read_text(encoding="utf-8"))]).partition("\n\n![")[0])
    print("written to", found)


if __name__ == "__main__":
    main()
