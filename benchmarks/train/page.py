"""The first section of docs/benchmarks.md, from ``train.json``; a part of docs/fp8.md, from ``train_recipes.json``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo import COLOURS
from benchmarks.marked import table
from benchmarks.train.recipes import STOCK_EXPERTS, last
from benchmarks.train.run import HOPPER_TFLOPS
from benchmarks.train.variants import OURS, OURS_COMPILED, STOCK, STOCK_COMPILED

INTRODUCTION = """\
## Training real models

Models of transformers train on real text, the source code of Python and torch. All rows of a table train from the same
weights, on the same text, with the same optimizer: AdamW in bf16, with bf16 states, and clipping. The variants take
turns in one process. In each round, a variant begins with new weights. The times of steps are medians of all rounds.
`python -m benchmarks --only train` measures them.

- *stock*: `experts_implementation="grouped_mm"`. *fusedmoe*: `"fusedmoe"`.
- *routers*: with `patch_routers(model, fp32_logits=True)`.
- *SonicMoE*: transformers' `"sonicmoe"`, which calls the installed package with tuned configurations.
- *Liger for the rest*: Liger's kernels for norms, rotary embeddings and the loss.
- *x stock*, *x stock compiled*: tokens per second, divided by those of stock experts, without and with `torch.compile`.
- *MoE*: time of the MoE blocks in a micro-batch, forward and backward, with gaps between launches: a median of three.
- *TFLOP/s*: without recomputation. The peak is that of dense bf16 products, {peak:.0f} TFLOP/s, also for FP8.
- *loss*: that of step {all_steps}. No loss of the first {compared} steps differs from that of stock
  experts by more than {bf16}, or {fp8} in FP8.
"""
HEADING = """\
### {title}

{parameters:.2f} billion parameters, {active:.2f} billion of which multiply each token. {tokens:,} tokens per step, in
{micro_batches} micro-batches of {sequences} x {length} tokens. Attention: `{attention}`. {rounds} rounds of {steps}
timed steps, after {sustained_s:.0f} s of load. {machine}, torch {torch}, transformers {transformers}, commit {commit}.
"""
RECIPES = """\
### In training, at the width of Qwen3-30B-A3B

{model}, trains on real text for {steps} steps of {tokens:,} tokens, from the same weights with each recipe (`python -m
benchmarks --only train-recipes`). The table has training losses in nats per word, with the routers' loss, as means of
the last {last} steps. {stock}{machine}, torch {torch}, commit {commit}.
"""
STOCK_TOO = "The gaps of stock experts show how far two implementations of the same recipe differ. "
PLOT = """\
![Loss of each recipe and seed, and its gap to bf16](_static/{picture})
"""
PICTURE = "fp8-qwen3-training.png"
SMOOTH = 25  # steps whose mean is drawn


def section(found: Mapping[str, Any] | None) -> list[str]:
    """Return the section of docs/benchmarks.md: a table of all models, and one per model."""
    if found is None:
        return []
    heading = {
        "peak": HOPPER_TFLOPS,
        "bf16": found["limits"]["bf16"],
        "fp8": found["limits"]["fp8_block"],
        "all_steps": len(_row(found["models"][0], STOCK)["losses"]),
        "compared": found["compared"],
    }
    parts = [INTRODUCTION.format(**heading), _summary(found["models"]) + "\n"]
    for model in found["models"]:
        parts += [_heading(found, model), _variants(model) + "\n"]
        notes = [f"{row['name']}: {row['note']}" for row in model["variants"] if row["note"]]
        if notes:
            parts.append(f"Not measured: {'; '.join(notes)}.\n")
    return parts


def _summary(models: Sequence[Mapping[str, Any]]) -> str:
    """Return the table with a row per model."""
    shown = (STOCK, "SonicMoE", OURS, f"{OURS}, `fp8_block`", STOCK_COMPILED, OURS_COMPILED)
    rows = []
    for model in models:
        stock, compiled = (_row(model, name).get("tokens_per_s") for name in (STOCK, STOCK_COMPILED))
        cells = []
        for name in shown:
            base = compiled if name.endswith("compiled") else stock
            speed = _row(model, name).get("tokens_per_s")
            factor = f" ({speed / base:.2f}x)" if speed and base and speed != base else ""
            cells.append(f"{speed:,.0f}{factor}" if speed else "")
        rows.append([model["title"], *cells])
    return table(["tokens per second", *shown], rows)


def _heading(found: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    counts = {"parameters": model["parameters"] / 1e9, "active": model["active_parameters"] / 1e9}
    versions = {name: model["versions"][name] for name in ("torch", "transformers")}
    return HEADING.format(**{**model, "machine": found["machine"]} | counts | versions)


def _variants(model: Mapping[str, Any]) -> str:
    """Return the table of a model."""
    stock, compiled = (_row(model, name).get("tokens_per_s") for name in (STOCK, STOCK_COMPILED))
    rows = []
    for row in model["variants"]:
        if "tokens_per_s" not in row:
            continue
        speed = row["tokens_per_s"]
        moe = "" if row["moe_ms"] is None else f"{row['moe_ms']:.1f}"
        low, high = row["quartiles_ms"]
        rows.append([
            row["name"], f"{speed:,.0f}", f"{speed / stock:.2f}" if stock else "",
            f"{speed / compiled:.2f}" if compiled else "",
            f"{row['step_ms']:.0f} ({low:.0f} to {high:.0f})", moe, f"{row['optimizer_ms']:.0f}",
            f"{row['tflops']:.0f} ({row['of_peak']:.0%})",
            f"{row['peak_gib']:.1f}" if "peak_gib" in row else "", f"{row['losses'][-1]:.3f}",
        ])  # fmt: skip
    head = [
        "", "tokens/s", "x stock", "x stock compiled", "step, ms (quartiles)", "MoE, ms", "optimizer, ms",
        "TFLOP/s (of peak)", "peak, GiB", "loss",
    ]  # fmt: skip
    return table(head, rows)


def _row(model: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next((row for row in model["variants"] if row["name"] == name), {})


def losses(found: Mapping[str, Any] | None) -> str:
    """Return the part of docs/fp8.md: the losses of each recipe and seed."""
    if found is None:
        return ""
    seeds, names = _seeds_and_recipes(found)
    of = {(run["recipe"], run["seed"]): last(run) for run in found["runs"]}
    rows = []
    for recipe in names:
        gaps = [of[recipe, seed] - of["bf16", seed] for seed in seeds]
        shown = [", ".join(f"{gap:+.4f}" for gap in gaps), f"{statistics.fmean(gaps):+.4f}"]
        rows.append(
            [
                recipe if recipe == STOCK_EXPERTS else f"`{recipe}`",
                *(f"{of[recipe, seed]:.4f}" for seed in seeds),
                *(shown if recipe != "bf16" else ["", ""]),
            ]
        )
    head = ["recipe", *(f"seed {seed}" for seed in seeds), "gaps to `bf16`", "their mean"]
    keys = ("model", "steps", "tokens", "last", "machine", "commit")
    values = {key: found[key] for key in keys} | {"torch": found["versions"]["torch"]}
    text = RECIPES.format(**values, stock=STOCK_TOO if STOCK_EXPERTS in names else "")
    return "\n".join([text, table(head, rows), "", PLOT.format(picture=PICTURE)])


def draw(found: Mapping[str, Any], folder: Path) -> Path:
    """Draw losses and gaps over steps, as means of several steps; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    seeds, names = _seeds_and_recipes(found)
    of = {(run["recipe"], run["seed"]): _smooth(run["losses"]) for run in found["runs"]}
    for recipe, colour in zip(names, COLOURS, strict=False):
        for number, seed in enumerate(seeds):
            style: dict[str, Any] = {"color": colour, "linestyle": ("-", "--", ":")[number % 3], "linewidth": 1.1}
            style["label"] = recipe if number == 0 else None
            curve, base = of[recipe, seed], of["bf16", seed]
            steps = range(SMOOTH, SMOOTH + len(curve))
            upper.plot(steps, curve, **style)
            lower.plot(steps, [a - b for a, b in zip(curve, base, strict=True)], **style)
    upper.set(title=f"Loss, mean of {SMOOTH} steps; one line per seed", ylabel="nats per word")
    lower.set(title="Gap to bf16 of the same seed", ylabel="nats per word", xlabel="step")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
        axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / PICTURE, dpi=100)
    return folder / PICTURE


def _seeds_and_recipes(found: Mapping[str, Any]) -> tuple[list[int], list[str]]:
    """Return the seeds that every recipe has, and the recipes."""
    names = list(dict.fromkeys(run["recipe"] for run in found["runs"]))
    have = {(run["recipe"], run["seed"]) for run in found["runs"]}
    seeds = sorted({seed for _, seed in have})
    return [seed for seed in seeds if all((name, seed) in have for name in names)], names


def _smooth(values: Sequence[float]) -> list[float]:
    return [statistics.fmean(values[end - SMOOTH : end]) for end in range(SMOOTH, len(values) + 1)]
