"""``fusedmoe tune``: measure the tile configurations of an expert MLP's products, and save the fastest."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fusedmoe.base.errors import InputError
from fusedmoe.base.progress import counted
from fusedmoe.commands.options import option, required_sizes
from fusedmoe.kernels.build import cache, toolkit
from fusedmoe.kernels.sm90.limits import why_not_width
from fusedmoe.kernels.sm90.tiles import choice, tuned, tuning
from fusedmoe.kernels.sm90.tiles.config import TileConfig
from fusedmoe.kernels.sm90.tiles.tuning import Measure, Mlp, Product

SIZES = ("hidden", "intermediate", "experts", "rows")


@dataclass(frozen=True)
class TuneOptions:
    """The options of the command."""

    hidden: int | None = option(None, "features per token", "H")
    intermediate: int | None = option(None, "intermediate features per expert", "I")
    experts: int | None = option(None, "experts on this GPU", "E")
    rows: int | None = option(None, "rows in total: tokens x chosen experts per token", "R")
    top_k: int = option(1, "chosen experts per token (default: %(default)s)", "K")
    activation: str = option("swiglu", "(default: %(default)s)", choices=tuple(tuning.ACTIVATIONS))
    dtype: str = option("bf16", "(default: %(default)s)", choices=("bf16", "fp16"))
    reps: int = option(30, "timed calls per tile (default: %(default)s)", "N")
    clear: bool = option(False, "delete the measurements of this machine")


@dataclass(frozen=True)
class Gpu:
    """The GPU to measure on: its name and its number of SMs."""

    name: str
    sms: int


class NoGpuError(Exception):
    """The machine has no GPU to measure on; the message has the reason."""


def run(options: TuneOptions, measure: Measure = tuning.measure, gpu: Gpu | None = None) -> int:
    """Measure, print and save; return the exit status. ``gpu`` defaults to the current one."""
    if options.clear:
        if any(getattr(options, name) is not None for name in SIZES):
            raise InputError("--clear: expected without sizes")
    else:
        mlp = _mlp(options)
    try:
        file = tuned.path()
        if file is None:
            raise cache.CacheUnusableError(
                f"{cache.VARIABLE}={cache.OFF} switches off the cache, which stores the measurements"
            )
        if options.clear:
            return _clear(file)
        return _tune(mlp, options.reps, measure, gpu or find_gpu(), file)
    except (cache.CacheUnusableError, NoGpuError) as error:
        print(f"fusedmoe tune: error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"fusedmoe tune: error: cannot write {file} ({error.strerror}); set {cache.VARIABLE}", file=sys.stderr)
    return 1


def find_gpu() -> Gpu:
    """Return the GPU to measure on. `NoGpuError` is raised if none runs the kernels, or their packages are missing."""
    import torch

    if not torch.cuda.is_available():
        raise NoGpuError("torch sees no GPU to measure on; see `fusedmoe doctor`")
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    if (device.major, device.minor) != (9, 0) or torch.version.hip:
        raise NoGpuError(f"the kernels are for sm_90, and this GPU is {device.name}")
    if missing := toolkit.missing_packages():
        raise NoGpuError(f"compiling kernels needs {' and '.join(missing)}: not installed")
    return Gpu(device.name, device.multi_processor_count)


def _mlp(options: TuneOptions) -> Mlp:
    sizes = required_sizes(options, SIZES)
    for name in ("hidden", "intermediate"):
        if reason := why_not_width(f"--{name}", sizes[name]):
            raise InputError(reason)
    required_sizes(options, ("reps", "top_k"))
    return Mlp(**sizes, activation=options.activation, dtype=options.dtype, top_k=options.top_k)


def _clear(file: Path) -> int:
    existed = os.path.lexists(file)
    file.unlink(missing_ok=True)
    print(f"removed {file}" if existed else f"{file} does not exist")
    return 0


def _tune(mlp: Mlp, reps: int, measure: Measure, gpu: Gpu, file: Path) -> int:
    import torch

    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # fail before measuring
    print(
        f"{gpu.name}, {mlp.dtype}, {mlp.activation}, {mlp.rows} rows of {mlp.experts} experts, "
        f"{mlp.top_k} per token, medians of {reps} calls"
    )
    products = tuning.products(mlp, gpu.sms)
    total = sum(len(choice.candidates(product.problem)) for product in products)
    with counted(total, "configurations") as advance:
        for product in products:
            try:
                times = measure(mlp, product, reps, advance)
            except torch.OutOfMemoryError:
                message = f"{product.title}: the GPU is out of memory; choose fewer --rows"
                print(f"fusedmoe tune: error: {message}", file=sys.stderr)
                return 1
            print(_table(product, times), flush=True)
            best = min(times, key=lambda config: times[config])
            tuned.add(file, gpu.name, product.problem.coarse, best.name, times[best])
    print(f"\nsaved in {file}; `fusedmoe tune --clear` removes it")
    return 0


def _table(product: Product, times: Mapping[TileConfig, float]) -> str:
    """Return the table of one product's candidates, fastest first."""
    p = product.problem
    best = min(times, key=lambda config: times[config])
    marks = {best: ["best"]}
    marks.setdefault(choice.by_model(p), []).append("the cost model's choice")
    marks.setdefault(choice.choose(p), []).append("used until now")
    lines = [f"\n{product.title}: {p.columns} columns, depth {p.depth}", f"  {'config':<16}{'ms':>10}{'TFLOP/s':>10}"]
    for config in sorted(times, key=lambda config: times[config]):
        rate = product.flops / times[config] / 1e9
        line = f"  {config.name:<16}{times[config]:>10.4f}{rate:>10.0f}  {', '.join(marks.get(config, []))}"
        lines.append(line.rstrip())
    return "\n".join(lines)
