"""Run the section: quantize kernels, products, unfused FP8, whole layers. After each part, write ``fp8.json``."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import shapes, table
from benchmarks.cases import release
from benchmarks.ceiling import Ceiling
from benchmarks.fp8 import layers, products, quantize, unfused
from benchmarks.problem import Problem
from benchmarks.results import write
from benchmarks.shapes import Shape
from fusedmoe.commands import compile as ahead_of_time
from fusedmoe.commands.timing import GpuTimer, Timer, why_not

QUANTIZE = UNFUSED = "qwen3-30b-a3b"
PRODUCTS = ("qwen3-30b-a3b", "deepseek-v3-ep32")
LAYERS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3-ep32")
MORE_LAYERS = (
    "qwen3-235b-a22b",
    "olmoe-1b-7b",
    "sonic-30b-n1024",
    "qwen3-next-80b-a3b",
    "sonic-7b-n256",
    "sonic-7b-n1024",
    "gpt-oss-20b",
)
TENSOR = ("qwen3-30b-a3b", "deepseek-v3-ep32")  # layers and products with one scale per expert too
SECONDS = 165.0  # after which no further shape of `MORE_LAYERS` begins


class Timers(NamedTuple):
    """The timers of kernels, of layers, and of several micro-batches."""

    kernels: Timer
    layers: Timer
    micro_batches: Timer

    @classmethod
    def on(cls, device: torch.device, reps: int) -> Timers:
        """Return timers with at most ``reps`` timed calls; layers get fewer, and micro-batches fewest."""
        each = ((20, 2), (12, 2), (5, 1))
        return cls(*(GpuTimer(device, min(reps, most), host_reps) for most, host_reps in each))


@dataclass(frozen=True)
class Chosen:
    """The shapes of each part, in order. A later shape of ``more`` is left out if there is no time for it.

    ``tensor`` has the names of shapes whose layers and products are also measured with one scale per expert.
    """

    quantize: Sequence[Shape]
    products: Sequence[Shape]
    unfused: Sequence[Shape]
    layers: Sequence[Shape]
    more: Sequence[Shape] = ()
    tensor: Sequence[str] = TENSOR

    @classmethod
    def of(cls, given: Sequence[Shape] | None = None) -> Chosen:
        """Return the usual shapes, or the given ones for every part."""
        if given is not None:
            return cls(given, given, given, given, tensor=[shape.name for shape in given])
        known = shapes.load()
        by_part = ([QUANTIZE], PRODUCTS, [UNFUSED], LAYERS, MORE_LAYERS)
        return cls(*([known[name] for name in names] for names in by_part))


def run(
    chosen: Chosen,
    timers: Timers,
    top: Ceiling,
    device: torch.device,
    results: Path,
    reps: int,
    seconds: float = SECONDS,
) -> Path:
    """Measure and print; return the result file. An exception in a part is recorded, and the run goes on."""
    started = time.perf_counter()
    found: dict[str, Any] = {
        "reps": reps, "ceiling": asdict(top), "micro_batches": layers.MICRO_BATCHES, "quantize": [],
        "products": [], "unfused": [], "layers": [], "left_out": {}, "failed": {}, "seconds": {},
    }  # fmt: skip

    @contextmanager
    def part(name: str) -> Iterator[None]:
        """Record the time of a part, and its exception; write the file."""
        begin = time.perf_counter()
        try:
            yield
        except Exception as raised:  # noqa: BLE001 recorded, and the run goes on
            found["failed"][name] = {"why": why_not(raised), "traceback": traceback.format_exc()}
            print(f"  {name} failed:\n{traceback.format_exc()}", flush=True)
        release(device)
        found["seconds"][name] = round(time.perf_counter() - begin, 2)
        written.append(write(results, "fp8", found))

    def on_rows(section: str, of_section: Sequence[Shape], measure: Callable[[Problem], list[dict[str, Any]]]) -> None:
        for shape in of_section:
            with part(f"{section}, {shape.name}"):
                problem = Problem(shape, shapes.splits(shape.rows, shape.experts, "uniform"), device)
                print(f"\n{section}, {table.header(problem, 'uniform')}", flush=True)
                entry: dict[str, Any] = asdict(shape) | {"rows_in_all": problem.rows}
                found[section].append(entry)
                entry["rows"] = measure(problem)

    def of_layer(shape: Shape) -> None:
        if why := layers.why_left_out(shape):
            found["left_out"][shape.name] = why
            return
        with part(f"layers, {shape.name}"):
            print(f"\nlayer {shape.name}: {asdict(shape)}", flush=True)
            recipes = (*layers.RECIPES, *(layers.BY_EXPERT if shape.name in chosen.tensor else ()))
            entry = layers.measure(shape, timers.layers, timers.micro_batches, device, recipes)
            found["layers"].append(entry)

    written: list[Path] = []
    if device.type == "cuda":
        with part("compile"):
            ahead_of_time.run(ahead_of_time.CompileOptions())

    def quantized(problem: Problem) -> list[dict[str, Any]]:
        rows = quantize.measure(problem, timers.kernels, top)
        print("\n".join(quantize.lines(rows)), flush=True)
        return rows

    on_rows("quantize", chosen.quantize, quantized)

    def multiplied(problem: Problem) -> list[dict[str, Any]]:
        return products.measure(problem, timers.kernels, by_expert=problem.shape.name in chosen.tensor)

    on_rows("products", chosen.products, multiplied)
    for shape in chosen.layers:
        of_layer(shape)
    on_rows("unfused", chosen.unfused, lambda problem: unfused.measure(problem, timers.layers))
    longest = max([s for name, s in found["seconds"].items() if name.startswith("layers")], default=0.0)
    for shape in chosen.more:
        if time.perf_counter() - started + longest > seconds:
            found["left_out"][shape.name] = f"no time left of {seconds:.0f} s"
        else:
            of_layer(shape)
    found["speedups"] = layers.speedups(found["layers"])
    found["seconds"]["all"] = round(time.perf_counter() - started, 2)
    print(f"\nleft out: {found['left_out'] or 'nothing'}; failed: {', '.join(found['failed']) or 'nothing'}")
    for case, by_recipe in found["speedups"].items():
        each = ", ".join(f"{recipe} {value:.2f}x" for recipe, value in by_recipe.items())
        print(f"bf16 / recipe, {case}: {each}")
    print(f"took {found['seconds']}", flush=True)
    return write(results, "fp8", found)
