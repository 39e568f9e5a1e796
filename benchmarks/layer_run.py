"""The section ``layer``: the whole layer on several shapes, its router, and a dense MLP, in one run and one file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import dense, layer, router
from benchmarks.cases import release
from benchmarks.ceiling import Ceiling
from benchmarks.gpu import Settings
from benchmarks.results import write
from fusedmoe.commands.timing import Timer

PARTS: dict[str, Callable[[Timer, torch.device], dict[str, Any]]] = {"router": router.measure, "dense": dense.measure}


def run(settings: Settings, timer: Timer, top: Ceiling) -> Path:
    """Measure; after each part, write the result file. ``tune_peers`` adds SonicMoE with tuned kernels."""
    started, device = time.perf_counter(), settings.device
    found: dict[str, Any] = {
        "reps": settings.reps, "peers_tuned": settings.tune_peers, "ceiling": asdict(top), "shapes": [],
    }  # fmt: skip
    for shape in settings.shapes:
        if not layer.runs(shape):
            print(f"\n{shape.name}: left out, SonicMoE cannot run it")
            continue
        found["shapes"].append(layer.measure(shape, timer, device, layer.candidates(settings.tune_peers)))
        release(device)
        write(settings.results, "layer", found)
    for name, measure in PARTS.items():
        found[name] = measure(timer, device)
        release(device)
    written = write(settings.results, "layer", found)
    print("\n" + "\n".join(layer.summary_lines(found)))
    print(f"took {time.perf_counter() - started:.0f} s", flush=True)
    return written
