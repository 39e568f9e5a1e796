"""Train each model with each variant, in turns, from the same weights and on the same text."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import release
from benchmarks.results import commit, path, write
from benchmarks.train.models import MODELS, Model, active_parameters, built, flops_per_token
from benchmarks.train.steps import Job, Run, moe_ms, train
from benchmarks.train.text import sequences
from benchmarks.train.variants import STOCK, VARIANTS, Ready, Variant, made
from fusedmoe.base.machine import versions
from fusedmoe.commands.timing import why_not

STEPS, ROUNDS, SKIPPED = 10, 3, 2  # steps per round, of which the first are not timed
SUSTAINED_S = 60.0  # of load before the first timed step, since a GPU lowers its clock
GRAPHS = 64  # of one function
COMPARED = 5  # steps whose losses are compared with those of the stock experts
LIMITS = {"bf16": 0.01, "fp8_block": 0.03}  # of the difference of a loss
HOPPER_TFLOPS = 989.0  # dense bf16 products of an H100 or H200, by its data sheet


def run(
    models: Sequence[Model],
    device: torch.device,
    results: Path,
    steps: int = STEPS,
    rounds: int = ROUNDS,
    sustained_s: float = SUSTAINED_S,
    variants: Sequence[Variant] = VARIANTS,
    words: int | None = None,
) -> Path:
    """Measure, print each row, and write ``train.json`` after each model; return its path.

    The file keeps the entries of other models of an earlier run on the same machine.
    """
    # all variants share the functions of the model; beyond the limit, torch would run some of them uncompiled
    graphs = torch._dynamo.config.patch(recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True)
    for of in models:
        print(f"\n{of.title}: {of.tokens:,} tokens per step in {of.micro_batches} micro-batches", flush=True)
        with graphs:
            found = measure(of, device, variants, steps, rounds, sustained_s, words)
        protocol = {"steps": steps - SKIPPED, "rounds": rounds, "sustained_s": sustained_s}
        entry = found | protocol | {"commit": commit(), "versions": versions()}
        others = [model for model in _earlier(results) if model["name"] != of.name]
        order = [model.name for model in MODELS]
        entries = sorted([*others, entry], key=lambda model: order.index(model["name"]))
        written = write(results, "train", {"compared": COMPARED, "limits": LIMITS, "models": entries})
        release(device)
    return written


def _earlier(results: Path) -> list[dict[str, Any]]:
    """Return the entries of the file, if there is one."""
    file = path(results, "train")
    return json.loads(file.read_text())["models"] if file.exists() else []


def measure(of: Model, device: torch.device, variants: Sequence[Variant], steps: int, rounds: int, sustained_s: float,
            words: int | None = None) -> dict[str, Any]:  # fmt: skip
    """Return a model's entry of the result file."""
    model: Any = built(of, device)
    text = sequences(of.length, model.config.vocab_size, *([words] if words else []))
    job = Job.of_model(of, model, text)
    flops = flops_per_token(model, of.length)
    rows: dict[str, dict[str, Any]] = {}
    kept: dict[str, Ready] = {}  # compiled variants; others are made anew for each round, so that they keep no memory
    runs: dict[str, list[Run]] = {}

    def ready(variant: Variant) -> Ready:
        if variant.name in kept:
            return kept[variant.name]
        now = made(variant, model)
        if variant.compiled:
            kept[variant.name] = now
        return now

    for variant in variants:
        started = time.perf_counter()
        row = rows[variant.name] = asdict(variant)
        row["note"] = dict(of.without).get(variant.experts) or _attempt(
            lambda row=row, variant=variant: _first(job, ready(variant), steps, row, rows)
        )
        if not row["note"]:
            runs[variant.name] = []
        seconds = time.perf_counter() - started
        print(f"  first: {variant.name}: {row['note'] or row['losses'][:COMPARED]} ({seconds:.0f} s)", flush=True)
        release(device)
    _sustain(job, ready(variants[0]), sustained_s)
    for _ in range(rounds):
        for variant in variants:
            if variant.name in runs:
                runs[variant.name].append(train(job, ready(variant), steps))
                release(device)  # the variant's caches, such as those of quantized weights
    for variant in variants:
        if variant.name in runs:
            row = rows[variant.name] | _summary(of, runs[variant.name], flops)
            row["moe_ms"] = None if variant.compiled or variant.checkpointed else moe_ms(job, ready(variant))
            rows[variant.name] = row
            print("  " + line(row, rows.get(STOCK)), flush=True)
    return {
        "name": of.name, "title": of.title, "sequences": of.sequences, "length": of.length,
        "micro_batches": of.micro_batches, "tokens": of.tokens, "attention": of.attention,
        "parameters": sum(p.numel() for p in model.parameters()), "active_parameters": active_parameters(model),
        "flops_per_token": flops, "variants": list(rows.values()),
    }  # fmt: skip


def _first(job: Job, ready: Ready, steps: int, row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    """Run the first steps, which compile, for the losses; and further ones for the peak of memory."""
    row["losses"] = train(job, ready, steps).losses
    if rows[STOCK].get("note"):
        raise AssertionError("there are no losses of stock experts to compare with")
    stock = rows[STOCK]["losses"]
    row["difference"] = max(abs(a - b) for a, b in zip(row["losses"][:COMPARED], stock[:COMPARED], strict=True))
    if not row["difference"] <= LIMITS[row["recipe"]]:
        raise AssertionError(f"losses {row['losses'][:COMPARED]} differ from {stock[:COMPARED]}")
    if job.clock.on_gpu:
        torch.cuda.reset_peak_memory_stats()
        train(job, ready, SKIPPED)
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30


def _sustain(job: Job, ready: Ready, seconds: float) -> None:
    """Train for this many seconds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        train(job, ready, 4)


def _summary(of: Model, runs: Sequence[Run], flops: float) -> dict[str, Any]:
    """Return the figures of all timed steps."""
    steps = [ms for run in runs for ms in run.step_ms[SKIPPED:]]
    step_ms = statistics.median(steps)
    tokens_per_s = of.tokens / step_ms * 1e3
    low, _, high = statistics.quantiles(steps, n=4, method="inclusive")
    return {
        "step_ms": step_ms,
        "quartiles_ms": (low, high),
        "round_ms": [statistics.median(run.step_ms[SKIPPED:]) for run in runs],
        "optimizer_ms": statistics.median(ms for run in runs for ms in run.optimizer_ms[SKIPPED:]),
        "tokens_per_s": tokens_per_s,
        "tflops": tokens_per_s * flops / 1e12,
        "of_peak": tokens_per_s * flops / 1e12 / HOPPER_TFLOPS,
    }


def line(row: dict[str, Any], stock: dict[str, Any] | None) -> str:
    """Return a printed row."""
    of_stock = row["tokens_per_s"] / stock["tokens_per_s"] if stock and "tokens_per_s" in stock else float("nan")
    moe = "" if row["moe_ms"] is None else f"  MoE {row['moe_ms']:.1f} ms"
    peak = f"  {row['peak_gib']:.1f} GiB" if "peak_gib" in row else ""
    return (
        f"{row['name']:42}{row['tokens_per_s']:9,.0f} tokens/s  x stock {of_stock:.2f}  step {row['step_ms']:.1f} ms"
        f" (optimizer {row['optimizer_ms']:.1f}){moe}  {row['tflops']:.0f} TFLOP/s{peak}  losses {row['losses'][:5]}"
    )


def _attempt(call: Callable[[], None]) -> str:
    """Call; return an exception as a note, since a variant that does not run must not discard the others."""
    try:
        call()
    except Exception as raised:  # noqa: BLE001
        return why_not(raised)
    return ""
