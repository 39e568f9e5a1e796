"""Options of ``fusedmoe demo``, their defaults per device, and their checks.

A :class:`Job` defines the training and is saved in the checkpoint. A :class:`Call` has the options of one command.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fusedmoe.commands.demo.errors import UsageError
from fusedmoe.numerics.formats.roles import WGRAD_BF16
from fusedmoe.numerics.recipes import BF16, RECIPES, named

ACTIVATIONS = ("swiglu", "geglu", "reglu", "squared_relu", "gpt_oss")
ROUTERS = ("softmax", "sigmoid")
MOST_THREADS = 8  # by default: for matrix products this small, 16 are no faster
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _RecipeNames(Collection[str]):
    """The names of recipes: those in the dict, so that they include recipes registered later, and their variants."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and named(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(RECIPES)

    def __len__(self) -> int:
        return len(RECIPES)


def _option(text: str, **more: Any) -> Any:
    return field(metadata={"help": text, **more})


@dataclass(frozen=True, kw_only=True)
class Job:
    """Sizes, data order and optimisation. Two runs of one job on one machine agree bit for bit."""

    layers: int = _option("transformer blocks")
    hidden: int = _option("features per token")
    heads: int = _option("attention heads; divides --hidden")
    experts: int = _option("experts per block")
    top_k: int = _option("chosen experts per token")
    intermediate: int = _option("intermediate features per expert")
    context: int = _option("bytes per sequence")
    batch: int = _option("sequences per step")
    activation: str = _option("activation of the experts; gpt_oss is a clamped SwiGLU", choices=ACTIVATIONS)
    router: str = _option("softmax with a load-balancing loss, or sigmoid with loss-free balancing", choices=ROUTERS)
    steps: int = _option("training steps; with --resume, a larger number continues")
    lr: float = _option("peak learning rate (warm-up, then cosine)")
    weight_decay: float = _option("AdamW's weight decay of matrices")
    dropout: float = _option("dropout after attention and experts, at least 0 and below 1")
    aux_loss: float = _option("weight of the load-balancing loss")
    z_loss: float = _option("weight of the router's z-loss")
    bias_rate: float = _option("update rate of the loss-free balancing bias (router sigmoid)")
    seed: int = _option("seed of the weights, the data order and the sample")
    device: str = _option("cpu or cuda (cuda if available)")
    threads: int = _option("CPU threads (half of the cores, at most 8)")
    dtype: str = _option("dtype of weights and activations; master weights are float32", choices=tuple(DTYPES))
    recipe: str = _option(
        f"numeric recipe of the experts; {BF16.name} is no quantization, in the model's --dtype (float32 on a CPU); "
        f"{WGRAD_BF16} after another name leaves the operands of weight gradients unquantized",
        choices=_RecipeNames(),
    )

    def check(self) -> None:
        """Raise a :class:`UsageError` that names the invalid option, its value and the valid values."""
        for item in dataclasses.fields(self):
            value, choices = getattr(self, item.name), item.metadata.get("choices")
            if item.type == "int" and item.name != "seed" and value < 1:
                raise UsageError(f"{flag(item.name)} {value}: must be 1 or more")
            if choices is not None and value not in choices:  # argparse checks the command line alone
                raise UsageError(f"{flag(item.name)} {value}: choose from {', '.join(choices)}")
        for name in ("weight_decay", "aux_loss", "z_loss", "bias_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{flag(name)} {getattr(self, name)}: must be 0 or more")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"--lr {self.lr}: must be more than 0")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"--dropout {self.dropout}: must be 0 or more, and below 1")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}: must be 0 or more, and below 2**63")
        if self.hidden % (2 * self.heads) != 0:
            raise UsageError(
                f"--hidden {self.hidden} with --heads {self.heads}: each head needs an even number of features, "
                f"so --hidden must be a multiple of {2 * self.heads}"
            )
        if self.top_k > self.experts:
            raise UsageError(f"--top-k {self.top_k} with --experts {self.experts}: --top-k must be at most --experts")
        check_device(self.device)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Options of one call of the command."""

    output: Path
    compare: tuple[str, ...] | None = None
    resume: bool = False
    eval_interval: int | None = None
    checkpoint_interval: int | None = None
    stop_at: int | None = None
    sample_bytes: int = 400

    def check(self) -> None:
        """Raise a :class:`UsageError` for an invalid option."""
        for name in ("eval_interval", "checkpoint_interval", "stop_at"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{flag(name)} {value}: must be 1 or more")
        if self.sample_bytes < 0:
            raise UsageError(f"--sample-bytes {self.sample_bytes}: must be 0 or more")
        if self.compare is not None:
            check_comparison(self.compare)


# Measured: about two minutes on two cores. Without AMX, bfloat16 matrix products take ten times as long as float32 ones
# (10 against 100 GFLOP/s on two AVX2 cores).
CPU_DEFAULTS: dict[str, Any] = {
    "layers": 4, "hidden": 128, "heads": 4, "experts": 8, "top_k": 2, "intermediate": 128, "context": 128, "batch": 8,
    "activation": "swiglu", "router": "softmax", "steps": 600, "lr": 3e-3, "weight_decay": 0.1, "dropout": 0.0,
    "aux_loss": 0.01, "z_loss": 1e-4, "bias_rate": 1e-2, "seed": 0, "dtype": "float32", "recipe": BF16.name,
}  # fmt: skip
# Twelve epochs, a minute and a half on an H100. With more, a model of this width overfits: with batch 64, the held-out
# text has 1.6 bits per byte after 9 epochs and 2.9 after 67.
GPU_DEFAULTS: dict[str, Any] = CPU_DEFAULTS | {
    "layers": 6, "hidden": 512, "heads": 8, "experts": 32, "top_k": 4, "intermediate": 256, "context": 256, "batch": 16,
    "steps": 1000, "lr": 1e-3, "dropout": 0.2, "dtype": "bfloat16",
}  # fmt: skip


def default_device() -> str:
    """Return ``"cuda"`` if available, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_threads() -> int:
    """Return half of torch's default number of threads, at most :data:`MOST_THREADS`.

    The threads synchronise some hundred times per step, which takes milliseconds if another program uses a core. With
    one of two cores busy, a step takes 165 ms with one thread and over 350 ms with two. On an idle machine, the second
    thread saves less than a third.
    """
    return max(1, min(MOST_THREADS, torch.get_num_threads() // 2))


def check_device(name: str) -> None:
    """Raise a :class:`UsageError` for a device that torch does not know or this machine lacks."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device {name}: not a device; choose cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: choose cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {name}: torch finds no such GPU; `fusedmoe doctor` says why; --device cpu needs no GPU"
        )


def check_comparison(recipes: tuple[str, ...]) -> None:
    """Raise a :class:`UsageError` if no recipe is given, or one is unknown or repeated."""
    possible = f"choose from {', '.join(_RecipeNames())}, with commas between them"
    if not recipes:
        raise UsageError(f"--compare: got no recipe; {possible}")
    option = f"--compare {','.join(recipes)}"
    if unknown := [name for name in recipes if name not in _RecipeNames()]:
        raise UsageError(f"{option}: no recipe is called {', '.join(unknown)}; {possible}")
    if twice := sorted({name for name in recipes if recipes.count(name) > 1}):
        raise UsageError(f"{option}: {', '.join(twice)} is repeated; name each recipe once")


def job_of(given: dict[str, Any]) -> Job:
    """Complete the given fields with the device's defaults, and check the job."""
    device = given.get("device") or default_device()
    check_device(device)
    defaults = dict(CPU_DEFAULTS if torch.device(device).type == "cpu" else GPU_DEFAULTS)
    if given.get("router", defaults["router"]) == "sigmoid":
        defaults["aux_loss"] = 0.0  # the bias balances the load without a loss
    job = Job(**(defaults | {"device": device, "threads": default_threads()} | given))
    job.check()
    return job


def flag(name: str) -> str:
    """Return the command-line option of a field."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option. Fields of the job that are not given are absent from the namespace; see :func:`job_of`."""
    job = parser.add_argument_group("job (default on a CPU / on a GPU)")
    for item in dataclasses.fields(Job):
        default = f" ({_default_text(item.name)})" if item.name in CPU_DEFAULTS else ""
        job.add_argument(
            flag(item.name),
            type={"int": int, "float": float, "str": str}[str(item.type)],
            choices=item.metadata.get("choices"),
            metavar=None if "choices" in item.metadata else {"int": "N", "float": "X", "str": "NAME"}[str(item.type)],
            default=argparse.SUPPRESS,
            help=item.metadata["help"] + default,
        )
    call = parser.add_argument_group("this call")
    call.add_argument("--output", type=Path, default=Path("fusedmoe-demo"), metavar="DIR", help="folder (%(default)s)")
    call.add_argument(
        "--compare",
        type=recipe_names,
        metavar="NAME,...",
        help="train the job once under each of these recipes, in subfolders of --output, and compare them",
    )
    call.add_argument("--resume", action="store_true", help="resume from the checkpoint in --output, bit for bit")
    call.add_argument("--eval-interval", type=int, metavar="N", help="steps between evaluations (an eighth of --steps)")
    call.add_argument(
        "--checkpoint-interval", type=int, metavar="N", help="steps between checkpoints (an eighth of --steps)"
    )
    call.add_argument("--stop-at", type=int, metavar="N", help="stop after step N; --resume continues")
    call.add_argument("--sample-bytes", type=int, default=400, metavar="N", help="length of the sample (%(default)s)")


def recipe_names(text: str) -> tuple[str, ...]:
    """``"bf16, mxfp8" -> ("bf16", "mxfp8")``."""
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def split_namespace(namespace: argparse.Namespace) -> tuple[dict[str, Any], Call]:
    """Return the given fields of the job, and the checked call."""
    values = vars(namespace)
    given = {item.name: values[item.name] for item in dataclasses.fields(Job) if item.name in values}
    call = Call(**{item.name: values[item.name] for item in dataclasses.fields(Call)})
    call.check()
    return given, call


def _default_text(name: str) -> str:
    cpu, gpu = CPU_DEFAULTS[name], GPU_DEFAULTS[name]
    return f"{cpu}" if cpu == gpu else f"{cpu} / {gpu}"
