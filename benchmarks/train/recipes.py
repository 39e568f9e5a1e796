"""The loss under each recipe, from the same weights and on the same text: ``train_recipes.json``.

The model is a slice of Qwen3-30B-A3B, whose experts run on the fused kernels of the recipe. Stock experts in bf16 show
how far two implementations of the same recipe differ.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import release
from benchmarks.results import write
from benchmarks.train.models import MODELS, Model, built, qwen3
from benchmarks.train.steps import Job, train
from benchmarks.train.text import sequences
from benchmarks.train.variants import Variant, made

STOCK_EXPERTS = "bf16, stock experts"
RECIPES = ("bf16", STOCK_EXPERTS, "fp8_block", "fp8_tensor")
STEPS, SEEDS, LAYERS = 500, (0, 1, 2), 4
LAST = 50  # steps whose mean is compared
SLICE = replace(
    MODELS[0], title=f"Qwen3-30B-A3B, {LAYERS} of 48 layers", config=functools.partial(qwen3, LAYERS), micro_batches=1
)


def run(device: torch.device, results: Path, steps: int = STEPS, seeds: Sequence[int] = SEEDS,
        recipes: Sequence[str] = RECIPES, of: Model = SLICE, words: int | None = None) -> Path:  # fmt: skip
    """Train with each recipe and seed; write the file after each run, and return its path."""
    model: Any = built(of, device)
    text = sequences(of.length, model.config.vocab_size, *([words] if words else []))
    job = Job.of_model(of, model, text)
    runs: list[dict[str, Any]] = []
    for seed in seeds:
        for recipe in recipes:
            own = Variant(recipe, "fusedmoe", routers=True, recipe=recipe)
            ready = made(Variant(recipe, "grouped_mm") if recipe == STOCK_EXPERTS else own, model)
            trained = train(job, ready, steps, seed)
            runs.append({"seed": seed, "recipe": recipe, "losses": trained.losses})
            del ready
            release(device)
            print(f"seed {seed}  {recipe:20} mean of the last {LAST}: {last(runs[-1]):.4f}", flush=True)
            head = {"model": of.title, "tokens": of.tokens, "steps": steps, "last": LAST}
            written = write(results, "train_recipes", head | {"runs": runs})
    return written


def last(run: dict[str, Any]) -> float:
    """Return the mean loss of the last steps."""
    losses = run["losses"][-LAST:]
    return float(sum(losses) / len(losses))
