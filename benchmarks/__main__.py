"""``python -m benchmarks``: measure, print tables, write the results.

Sections: ``host`` (host overhead of the framework), ``layer`` (the whole layer, from tokens to tokens; its router; a
dense MLP), ``kernels`` (each kernel), ``mlp`` (the expert MLP through the public API), ``activations`` (activations
apart from products), ``recipes`` (the expert MLP under each recipe), ``deepgemm`` (DeepGEMM's products, in a separate
environment), ``tiles`` (every tile configuration for many layers, about five minutes), ``transformers`` (a stack of
decoder layers), ``train`` (training of whole models on text, about five minutes per model), ``train-recipes`` (losses
of training under FP8 recipes), ``fp8`` (training under ``fp8_block`` and ``fp8_tensor``: kernels, whole layers, unfused
FP8), ``ep`` (expert parallelism, started by ``torchrun --nproc-per-node P -m benchmarks --only ep``), ``ep-train``
(training of a model with expert parallelism, on all GPUs of the machine).
The default is ``host``, and with a GPU also ``layer``, ``kernels`` and ``mlp``.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks import ep, ep_run, ep_train, gpu, host, layer, layer_run, shapes, stack, tiles
from benchmarks.ceiling import ceiling
from benchmarks.fp8 import run as fp8
from benchmarks.results import ROOT, machine, write
from benchmarks.train import models as train_models
from benchmarks.train import recipes as train_recipes
from benchmarks.train import run as train_run
from fusedmoe.commands.timing import GpuTimer

WITHOUT_GPU = ("host", "ep", "ep-train")
SECTIONS = (
    "host", "layer", *gpu.SECTIONS, "tiles", "transformers", "train", "train-recipes", "fp8", "ep", "ep-train",
)  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(argv)
    devices = args.device or ["cpu"] + ["cuda"] * torch.cuda.is_available()
    sections = args.only or ("host", *(("layer", "kernels", "mlp") if "cuda" in devices else ()))
    on_gpu = tuple(section for section in sections if section in gpu.SECTIONS)
    if (need_gpu := [s for s in sections if s not in WITHOUT_GPU]) and not torch.cuda.is_available():
        parser.error(f"--only {','.join(need_gpu)}: needs a GPU, and torch sees none")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # host times must not include the wake-up of a thread pool
    if "ep" in sections:
        if sections != ("ep",) or not ep_run.started():
            parser.error("--only ep: start it alone: torchrun --nproc-per-node P -m benchmarks --only ep")
        ep_run.run_ranks(_chosen(parser, tuple(args.shape or ep.TOKENS), ep.known()), args.reps, args.results)
    if "ep-train" in sections:
        print("written to", ep_train.run(torch.cuda.device_count() or 2, ep_train.settings(), args.results))
    if "host" in sections:
        _host(devices, args.rounds, args.results)
    if "tiles" in sections:
        measured = []
        for product in tiles.measure(torch.device("cuda", torch.cuda.current_device()), args.reps):
            measured.append(product)
            written = write(args.results, "tiles", {"tiles": measured})
        print("written to", written)
    if "transformers" in sections:
        device = torch.device("cuda", torch.cuda.current_device())
        found = []
        timer = GpuTimer(device, args.reps, host_reps=2)
        for measured_now in stack.measure(timer, device, args.layers, args.parts, not args.uncompiled):
            found.append(measured_now)
            print(stack.lines(measured_now), flush=True)
            written = write(args.results, "transformers", stack.results(found, args.layers, args.reps))
        print("written to", written)
    if "train" in sections or "train-recipes" in sections:
        device = torch.device("cuda", torch.cuda.current_device())
        if "train" in sections:
            chosen_models = [model for model in train_models.MODELS if model.name in args.models]
            print("written to", train_run.run(chosen_models, device, args.results))
        if "train-recipes" in sections:
            print("written to", train_recipes.run(device, args.results))
    if "fp8" in sections:
        device = torch.device("cuda", torch.cuda.current_device())
        timers = fp8.Timers.on(device, args.reps)
        top = ceiling(timers.kernels, device)
        chosen = fp8.Chosen.of(_chosen(parser, tuple(args.shape)) if args.shape else None)
        print("written to", fp8.run(chosen, timers, top, device, args.results, args.reps))
    if on_gpu or "layer" in sections:
        _with_ceiling(parser, args, on_gpu, "layer" in sections)


def _with_ceiling(
    parser: argparse.ArgumentParser, args: argparse.Namespace, sections: tuple[str, ...], whole_layer: bool
) -> None:
    """Run the sections whose results are relative to the GPU's measured ceiling."""
    device = torch.device("cuda", torch.cuda.current_device())
    settings = gpu.Settings(
        sections=sections,
        shapes=_chosen(parser, args.shape or (shapes.QUICK if args.quick else None)),
        routing=args.routing,
        device=device,
        results=args.results,
        tune_peers=args.tune_peers,
        reps=args.reps,
    )
    print(f"\n{machine()}; medians of {args.reps} calls, L2 flushed, host gaps hidden")
    timer = GpuTimer(device, args.reps)
    top = ceiling(timer, device)
    print(f"measured ceiling: bf16 8192^3 product {top.tflops:.0f} TFLOP/s, copy {top.copy_tb_s:.2f} TB/s", flush=True)
    if whole_layer:
        of_layer = replace(settings, shapes=_chosen(parser, args.shape or layer.SHAPES))
        print("written to", layer_run.run(of_layer, timer, top))
    if sections:
        for file in gpu.run(settings, timer, top):
            print("written to", file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", type=_sections, metavar="SECTION,...", help=f"among {', '.join(SECTIONS)}")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the result files")
    parser.add_argument("--device", choices=("cpu", "cuda"), action="append", help="default: all available")
    parser.add_argument("--rounds", type=int, default=300, help="host: rounds per measurement (default: %(default)s)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--shape",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="shapes of benchmarks/shapes.toml; default: all; layer: four",
    )
    which.add_argument("--quick", action="store_true", help=f"{', '.join(shapes.QUICK)}; in layer the default")
    parser.add_argument("--routing", choices=shapes.ROUTINGS, default="uniform", help="distribution of the rows")
    parser.add_argument("--reps", type=int, default=30, help="timed calls per peer (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=stack.LAYERS, help="transformers: layers (default: %(default)s)")
    parser.add_argument(
        "--parts",
        type=_parts,
        default=stack.PARTS,
        metavar="PART,...",
        help=f"transformers: among {', '.join(stack.PARTS)}; default: all",
    )
    names = tuple(model.name for model in train_models.MODELS)
    parser.add_argument(
        "--models",
        type=functools.partial(_some_of, names),
        default=names,
        metavar="MODEL,...",
        help=f"train: among {', '.join(names)}; default: all",
    )
    parser.add_argument("--uncompiled", action="store_true", help="transformers: without torch.compile")
    parser.add_argument(
        "--tune-peers", action="store_true", help="let QuACK and, in layer, SonicMoE autotune: minutes per shape"
    )
    return parser


def _sections(text: str) -> tuple[str, ...]:
    return _some_of(SECTIONS, text)


def _parts(text: str) -> tuple[str, ...]:
    return _some_of(stack.PARTS, text)


def _some_of(known: tuple[str, ...], text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := [name for name in chosen if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(known)}")
    return chosen


def _chosen(
    parser: argparse.ArgumentParser, names: tuple[str, ...] | None, known: dict[str, shapes.Shape] | None = None
) -> tuple[shapes.Shape, ...]:
    known = known or shapes.load()
    if unknown := [name for name in names or () if name not in known]:
        parser.error(f"--shape {', '.join(unknown)}: expected some of {', '.join(known)}")
    return tuple(known[name] for name in names or known)


def _host(devices: list[str], rounds: int, results: Path) -> None:
    print(f"host time of GroupedLinear, SwiGLU, GroupedLinear on few rows, microseconds per call; {machine()}")
    print("minimum over the rounds (median, which includes other work of the machine)")
    print(f"{'':24}{'planned':>18}{'by hand':>18}{'by hand, lean':>18}{'planned - by hand':>20}")
    reports = {}
    for name in devices:
        report = host.measure(torch.device(name), rounds)
        for title, times in report.passes.items():
            row = "".join(f"{_both(times[v].least_us, times[v].median_us):>18}" for v in host.VARIANTS)
            print(f"{name + ' ' + title:24}{row}{_both(*report.overhead_us(title)):>20}")
        print(f"{name + ' planning a chain':24}{report.planning_ms:15.2f} ms")
        overhead = {
            title: dict(zip(("least", "median"), report.overhead_us(title), strict=True)) for title in report.passes
        }
        reports[name] = asdict(report) | {"overhead_us": overhead}
    print("written to", write(results, "host", {"host": reports}))


def _both(least_us: float, median_us: float) -> str:
    return f"{least_us:.1f} ({median_us:.1f})"


if __name__ == "__main__":
    main()
