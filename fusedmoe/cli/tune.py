"""``fusedmoe tune``: measure the tiles that the products of an expert MLP can have, and keep the fastest."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fusedmoe.errors import InputError
from fusedmoe.kernels import cache
from fusedmoe.kernels.sm90 import choice, tuned, tuning
from fusedmoe.kernels.sm90.config import TileConfig
from fusedmoe.kernels.sm90.limits import why_not_width
from fusedmoe.kernels.sm90.tuning import Measure, Mlp, Product
from fusedmoe.progress import counted

__all__ = ["Gpu", "TuneOptions", "add_arguments", "find_gpu", "run"]

SIZES = ("hidden", "intermediate", "experts", "rows")


@dataclass(frozen=True)
class TuneOptions:
    """The options of the command, as its help describes them."""

    hidden: int | None = None
    intermediate: int | None = None
    experts: int | None = None
    rows: int | None = None
    activation: str = "swiglu"
    dtype: str = "bf16"
    reps: int = 30
    clear: bool = False


@dataclass(frozen=True)
class Gpu:
    """What is measured on: its name and how many SMs it has."""

    name: str
    sms: int


class NoGpuError(Exception):
    """There is nothing here to measure on; the message says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("--hidden", metavar="H", type=int, help="features of a token")
    parser.add_argument("--intermediate", metavar="I", type=int, help="features between an expert's two layers")
    parser.add_argument("--experts", metavar="E", type=int, help="experts on this GPU")
    parser.add_argument("--rows", metavar="R", type=int, help="rows of all experts together: tokens x chosen experts")
    parser.add_argument(
        "--activation", choices=tuple(tuning.ACTIVATIONS), default="swiglu", help="(default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="(default: %(default)s)")
    parser.add_argument("--reps", metavar="N", type=int, default=30, help="timed calls of each (default: %(default)s)")
    parser.add_argument("--clear", action="store_true", help="forget what was measured on this machine")


def run(options: TuneOptions, measure: Measure = tuning.measure, gpu: Gpu | None = None) -> int:
    """Measure, print and keep; the exit status. ``gpu``: by default the current one.

    Raises
    ------
    fusedmoe.InputError
        An option has a value that it cannot have.
    """
    if options.clear:
        if any(getattr(options, name) is not None for name in SIZES):
            raise InputError("--clear: measures nothing, so it takes no sizes")
    else:
        mlp = _mlp(options)
    try:
        file = tuned.path()
        if file is None:
            raise cache.CacheUnusableError(
                f"{cache.VARIABLE}={cache.OFF} switches off the cache, where tables are kept"
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
    """Return the GPU to measure on.

    Raises
    ------
    NoGpuError
        There is none that the kernels run on.
    """
    import torch

    if not torch.cuda.is_available():
        raise NoGpuError("torch sees no GPU, and tiles are measured on one; `fusedmoe doctor` says more")
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    if (device.major, device.minor) != (9, 0) or torch.version.hip:
        raise NoGpuError(f"the kernels are for sm_90, and this GPU is {device.name}")
    for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(module) is None:
            raise NoGpuError(f"{package} is not installed, which compiles the kernels")
    return Gpu(device.name, device.multi_processor_count)


def _mlp(options: TuneOptions) -> Mlp:
    sizes: dict[str, int] = {}
    for name in SIZES:
        size = getattr(options, name)
        if size is None:
            raise InputError(f"--{name}: missing")
        if size < 1:
            raise InputError(f"--{name} {size}: must be 1 or more")
        sizes[name] = size
    for name in ("hidden", "intermediate"):
        reason = why_not_width(f"--{name}", sizes[name])
        if reason is not None:
            raise InputError(reason)
    if options.reps < 1:
        raise InputError(f"--reps {options.reps}: must be 1 or more")
    return Mlp(**sizes, activation=options.activation, dtype=options.dtype)


def _clear(file: Path) -> int:
    there = os.path.lexists(file)
    file.unlink(missing_ok=True)
    print(f"removed {file}" if there else f"there is no {file}")
    return 0


def _tune(mlp: Mlp, reps: int, measure: Measure, gpu: Gpu, file: Path) -> int:
    import torch

    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # fails before anything is measured for nothing
    print(
        f"{gpu.name}, {mlp.dtype}, {mlp.activation}, {mlp.rows} rows of {mlp.experts} experts, medians of {reps} calls"
    )
    products = tuning.products(mlp, gpu.sms)
    total = sum(len(choice.candidates(product.problem)) for product in products)
    with counted(total, "configurations") as advance:
        for product in products:
            try:
                times = measure(mlp, product, reps, advance)
            except torch.OutOfMemoryError:
                message = f"{product.title}: the GPU's memory is full; give less --rows"
                print(f"fusedmoe tune: error: {message}", file=sys.stderr)
                return 1
            print(_table(product, times), flush=True)
            best = min(times, key=lambda config: times[config])
            tuned.add(file, gpu.name, product.problem.coarse, best.name, times[best])
    print(f"\nkept in {file}; `fusedmoe tune --clear` removes it")
    return 0


def _table(product: Product, times: Mapping[TileConfig, float]) -> str:
    """One product's candidates, the fastest first."""
    p = product.problem
    best = min(times, key=lambda config: times[config])
    marks = {best: ["best"]}
    marks.setdefault(choice.by_model(p), []).append("the model's")
    marks.setdefault(choice.choose(p), []).append("in use so far")
    lines = [f"\n{product.title}: {p.columns} columns, depth {p.depth}", f"  {'config':<16}{'ms':>10}{'TFLOP/s':>10}"]
    for config in sorted(times, key=lambda config: times[config]):
        rate = product.flops / times[config] / 1e9
        line = f"  {config.name:<16}{times[config]:>10.4f}{rate:>10.0f}  {', '.join(marks.get(config, []))}"
        lines.append(line.rstrip())
    return "\n".join(lines)
