"""Options of ``fusedmoe demo``, their defaults per device, and their checks."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedmoe.base.errors import InputError
from fusedmoe.commands.options import flag
from fusedmoe.numerics.formats.roles import WGRAD_BF16
from fusedmoe.numerics.recipes import BF16, RECIPES, named

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CHANGEABLE = ("steps", "device")  # --resume takes the other fields of the job from the checkpoint


def _option(text: str) -> Any:
    return field(metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Job:
    """Sizes, data order and optimisation. On a CPU, two runs of one job agree bit for bit."""

    layers: int = _option("transformer blocks")
    hidden: int = _option("features per token")
    heads: int = _option("attention heads; divides --hidden")
    experts: int = _option("experts per block")
    top_k: int = _option("chosen experts per token")
    intermediate: int = _option("intermediate features per expert")
    context: int = _option("bytes per sequence")
    batch: int = _option("sequences per step")
    steps: int = _option("training steps; with --resume, a larger number continues")
    lr: float = _option("peak learning rate (warm-up, then cosine)")
    dropout: float = _option("dropout after attention and experts")
    seed: int = _option("seed of the weights, the data order and the sample")
    device: str = _option("cpu or cuda (cuda if available)")
    dtype: str = _option(f"{' or '.join(DTYPES)}, of weights and activations; master weights are float32")
    recipe: str = _option(
        f"numeric recipe of the experts; {BF16.name} is no quantization, in the model's --dtype; "
        f"{WGRAD_BF16} after another name leaves the operands of weight gradients unquantized"
    )

    def check(self) -> None:
        """Raise an `InputError` that names the invalid option, its value and the valid values."""
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.type == "int" and value < (0 if item.name == "seed" else 1):
                raise InputError(f"{flag(item.name)} {value}: must be {0 if item.name == 'seed' else 1} or more")
        if not 0 < self.lr < float("inf"):
            raise InputError(f"--lr {self.lr}: must be more than 0")
        if not 0 <= self.dropout < 1:
            raise InputError(f"--dropout {self.dropout}: must be 0 or more, and below 1")
        if self.hidden % (2 * self.heads):
            raise InputError(f"--hidden {self.hidden}: must be a multiple of {2 * self.heads}, twice --heads")
        if self.top_k > self.experts:
            raise InputError(f"--top-k {self.top_k}: must be at most --experts {self.experts}")
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype}: choose from {', '.join(DTYPES)}")
        if named(self.recipe) is None:
            raise InputError(f"--recipe {self.recipe}: choose from {', '.join(RECIPES)}")
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"--device {self.device}: choose cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("--device cuda: torch sees no GPU; see `fusedmoe doctor`")


# Measured: about two minutes on two cores. Without AMX, bfloat16 matrix products take ten times as long as float32 ones
# (10 against 100 GFLOP/s on two AVX2 cores).
CPU_DEFAULTS: dict[str, Any] = {
    "layers": 4, "hidden": 128, "heads": 4, "experts": 8, "top_k": 2, "intermediate": 128, "context": 128, "batch": 8,
    "steps": 600, "lr": 3e-3, "dropout": 0.0, "seed": 0, "dtype": "float32", "recipe": BF16.name,
}  # fmt: skip
# Twelve epochs, a minute and a half on an H100. With more, a model of this width overfits: with batch 64, the held-out
# text has 1.6 bits per byte after 9 epochs and 2.9 after 67.
GPU_DEFAULTS: dict[str, Any] = CPU_DEFAULTS | {
    "layers": 6, "hidden": 512, "heads": 8, "experts": 32, "top_k": 4, "intermediate": 256, "context": 256, "batch": 16,
    "steps": 1000, "lr": 1e-3, "dropout": 0.2, "dtype": "bfloat16",
}  # fmt: skip


def job_of(given: dict[str, Any]) -> Job:
    """Complete the given fields with the device's defaults, and check the job."""
    device = given.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    job = Job(**((GPU_DEFAULTS if device == "cuda" else CPU_DEFAULTS) | {"device": device} | given))
    job.check()
    return job


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the fields of the job; those not given are absent from the namespace."""
    job = parser.add_argument_group("job (default on a CPU / on a GPU)")
    for item in dataclasses.fields(Job):
        of_cpu, of_gpu = CPU_DEFAULTS.get(item.name), GPU_DEFAULTS.get(item.name)
        default = "" if of_cpu is None else f" ({of_cpu})" if of_cpu == of_gpu else f" ({of_cpu} / {of_gpu})"
        kind, metavar = {"int": (int, "N"), "float": (float, "X"), "str": (str, "NAME")}[str(item.type)]
        job.add_argument(
            flag(item.name), type=kind, metavar=metavar, default=argparse.SUPPRESS, help=item.metadata["help"] + default
        )


def given_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given fields of the job."""
    return {item.name: getattr(options, item.name) for item in dataclasses.fields(Job) if hasattr(options, item.name)}
