"""``fusedmoe bench``: compare one MoE layer of given sizes with the same layer in plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from fusedmoe import __version__
from fusedmoe.base.errors import InputError
from fusedmoe.base.machine import machine, versions
from fusedmoe.base.progress import counted
from fusedmoe.commands.bench.layer import OURS, PEERS, Peer, Sizes, Work
from fusedmoe.commands.bench.measure import CASES, as_data, lines, measure, plan
from fusedmoe.commands.options import option, required_sizes
from fusedmoe.commands.timing import CpuTimer, GpuTimer, Timer
from fusedmoe.numerics.recipes import BF16, resolve
from fusedmoe.ops.glu import ACTIVATIONS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = ("hidden", "intermediate", "experts", "top_k", "tokens")
REPS = {"cuda": 30, "cpu": 10}


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command."""

    hidden: int | None = option(None, "features per token", "H")
    intermediate: int | None = option(None, "intermediate features per expert", "I")
    experts: int | None = option(None, "number of experts", "E")
    top_k: int | None = option(None, "chosen experts per token", "K")
    tokens: int | None = option(None, "tokens per call: batch x sequence length", "T")
    activation: str = option("swiglu", "(default: %(default)s)", choices=tuple(ACTIVATIONS))
    dtype: str | None = option(
        None, "dtype of tokens and weights (default: bf16; on a CPU fp32)", choices=tuple(DTYPES)
    )
    recipe: str = option("bf16", "recipe of our layer; peers run in --dtype (default: bf16)")
    device: str | None = option(None, "(default: cuda if torch sees a GPU)", choices=("cpu", "cuda"))
    reps: int | None = option(None, "timed calls per variant (default: 30; on a CPU 10)", "N")
    json: bool = option(False, "print JSON")


def run(options: BenchOptions, timer: Timer | None = None, peers: tuple[Peer, ...] = PEERS) -> int:
    """Measure and print; return the exit status, 1 if our layer could not be measured."""
    given = required_sizes(options, SIZES)
    if given["top_k"] > given["experts"]:
        raise InputError(f"--top-k {given['top_k']}: must be at most --experts {given['experts']}")
    sizes = Sizes(**given, activation=options.activation)
    device = _device(options)
    recipe = resolve(options.recipe)
    dtype = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    reps = REPS[device.type] if options.reps is None else options.reps
    if reps < 1:
        raise InputError(f"--reps {reps}: must be 1 or more")
    taking_part = tuple(peer for peer in peers if device.type in peer.devices)
    try:
        work = Work(sizes, DTYPES[dtype], device, recipe)
        with counted(len(taking_part) + len(CASES), "steps") as advance:
            timer = timer or (GpuTimer(device, reps) if device.type == "cuda" else CpuTimer(reps))
            rows = measure(work, timer, taking_part, advance)
        planned = plan(work)
    except (RuntimeError, TypeError) as error:
        if not _is_out_of_memory(error):
            raise
        memory = "GPU" if device.type == "cuda" else "machine"
        raise InputError(
            f"these sizes do not fit into the memory of the {memory}: choose smaller ones, such as fewer --tokens"
        ) from error
    load = work.load()
    spread = {"least": int(load.min()), "median": int(load.median()), "most": int(load.max())}
    head = {"machine": machine(device), "fusedmoe": __version__, "versions": versions()}
    if options.json:
        asked = {**given, "activation": options.activation}
        how = {"dtype": dtype, "recipe": options.recipe, "device": device.type, "reps": reps}
        print(json.dumps({**head, **asked, **how, "rows_per_expert": spread, "plan": planned, "rows": as_data(rows)}))
    else:
        print(f"{head['machine']}, torch {torch.__version__}, fusedmoe {__version__}, {dtype}")
        print(
            f"one MoE layer, router included: {sizes.tokens} tokens, hidden {sizes.hidden}, "
            f"intermediate {sizes.intermediate}, {sizes.experts} experts, top {sizes.top_k}, {sizes.activation}"
        )
        print(f"rows per expert: {spread['least']} to {spread['most']}, median {spread['median']}")
        print(f"{OURS}, recipe {options.recipe}: {planned}")
        print(_method(device, reps))
        print("\n" + "\n".join(lines(rows)).rstrip())
        if recipe != BF16:
            print(f"\nOnly {OURS} runs under {options.recipe}; each call quantizes the weights.")
    return 0 if any(row.name == OURS and row.ms is not None for row in rows) else 1


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; on a CPU, or for sizes beyond 64 bits, the exception has no specific class."""
    messages = ("can't allocate memory", "not enough memory", "overflow")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error).lower() for text in messages)


def _method(device: torch.device, reps: int) -> str:
    text = f"medians and quartiles of {reps} interleaved calls; 'ours is 2x': ours is twice as fast"
    if device.type == "cuda":
        text += "\nthe L2 cache is flushed before each call; memory is without weights and inputs"
    else:
        text += f"\nwall time, {torch.get_num_threads()} threads; memory is measured on a GPU only"
    return text + "; error is relative to fp64"


def _device(options: BenchOptions) -> torch.device:
    available = torch.cuda.is_available()
    if options.device == "cuda" and not available:
        raise InputError("--device cuda: torch sees no GPU; see `fusedmoe doctor`")
    if options.device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
