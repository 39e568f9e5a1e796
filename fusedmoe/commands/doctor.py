"""``fusedmoe doctor``: report this machine's software and GPUs, and the available kernels."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from importlib import metadata

import torch

import fusedmoe
from fusedmoe.base.environment import disabled_by_environment
from fusedmoe.base.extras import install_command
from fusedmoe.base.target import arch_of
from fusedmoe.call.settings import patterns
from fusedmoe.commands.options import option
from fusedmoe.fusion.language import registry
from fusedmoe.fusion.language.registry import why_unavailable
from fusedmoe.fusion.language.rule import FusionRule, RuleError
from fusedmoe.kernels.build import toolkit
from fusedmoe.kernels.torch.grouped_gemm import runs_on_device
from fusedmoe.kernels.torch.quantized_products import multiplies_codes

# (distribution, the extra of fusedmoe that installs it); None: a dependency of fusedmoe or torch, where wheels exist
PACKAGES: tuple[tuple[str, str | None], ...] = (
    ("triton", None),
    ("nvidia-cutlass-dsl", None),
    ("apache-tvm-ffi", None),
    ("einops", None),
    ("transformers", "transformers"),
    ("matplotlib", "demo"),
    ("transformer-engine", "te"),
)

# reported in addition to FUSEDMOE_*
VARIABLES = ("CUDA_VISIBLE_DEVICES", "TORCH_LOGS")


@dataclasses.dataclass(frozen=True)
class Fact:
    """A named property of this machine."""

    name: str
    value: str


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A device that torch can use."""

    index: int  # the index of ``torch.device("cuda", index)``
    name: str
    arch: str  # ``sm_90``; under ROCm AMD's name, ``gfx942``
    memory_gib: float  # the device's total memory in GiB
    sms: int  # number of streaming multiprocessors (compute units under ROCm)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A way to run a step; ``note`` describes it, or gives the reason why it is not available on this machine."""

    name: str
    available: bool
    note: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `doctor`. ``str()`` gives the text that the command prints."""

    software: tuple[Fact, ...]
    packages: tuple[Fact, ...]
    environment: tuple[Fact, ...]
    gpus: tuple[Gpu, ...]
    no_gpu: str | None
    kernels: tuple[Kernel, ...]
    broken_entry_points: tuple[Fact, ...] = ()

    def __str__(self) -> str:
        gpus = [Fact(f"{g.index}: {g.name}", f"{g.arch}, {g.memory_gib:.1f} GiB, {g.sms} SMs") for g in self.gpus]
        sections = {
            "software": self.software,
            "packages": self.packages,
            "environment": self.environment or [Fact("nothing set", "")],
            "GPUs": gpus or [Fact("none", self.no_gpu or "")],
            "kernels": [Fact(k.name, f"{'yes' if k.available else 'no '}  {k.note}") for k in self.kernels],
        }
        if self.broken_entry_points:
            sections["packages whose fusion rules are not used"] = self.broken_entry_points
        width = max(len(fact.name) for facts in sections.values() for fact in facts)
        return "\n\n".join(
            "\n".join([title, *(f"  {fact.name:<{width}}  {fact.value}".rstrip() for fact in facts)])
            for title, facts in sections.items()
        )


def doctor() -> Report:
    """Inspect this machine, without importing the CuTe DSL, compiling or launching kernels."""
    no_gpu = _why_no_gpu()
    gpus = () if no_gpu else tuple(map(_gpu, range(torch.cuda.device_count())))
    return Report(
        software=_software(),
        packages=tuple(_packages()),
        environment=tuple(_environment()),
        gpus=gpus,
        no_gpu=no_gpu,
        kernels=kernel_lines(gpus),
        broken_entry_points=tuple(
            Fact(b.package, f"entry point {b.name} ({b.value}) failed to load: {b.error}")
            for b in registry.broken_entry_points()
        ),
    )


def kernel_lines(gpus: Sequence[Gpu]) -> tuple[Kernel, ...]:
    """Return the ways to run a step, and whether each is available on a machine with these GPUs."""
    cpu = Kernel(
        "torch grouped GEMM, cpu", True, "fp32, bf16 and fp16 in one call; other dtypes: a loop over the experts"
    )
    one_of_each = {gpu.arch: gpu for gpu in reversed(gpus)}
    devices = [torch.device("cuda", gpu.index) for gpu in one_of_each.values()] or [torch.device("cpu")]
    rules = tuple(_fused(rule, devices) for rule in registry.rules())
    if not rules:
        none = f"fusedmoe {fusedmoe.__version__} ships none, and no package adds any: every step is plain PyTorch"
        rules = (Kernel("fused kernels", False, none),)
    return (cpu, *(kernel for arch in sorted(one_of_each) for kernel in _of_torch(one_of_each[arch])), *rules)


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """The options of the command."""

    json: bool = option(False, "print JSON")


def run(options: DoctorOptions) -> int:
    """Print the report, as text or with ``--json`` as JSON."""
    report = doctor()
    print(json.dumps(dataclasses.asdict(report), indent=2) if options.json else report)
    return 0


def _software() -> tuple[Fact, ...]:
    cuda, rocm = torch.version.cuda, torch.version.hip
    runtime = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPU only"
    return (
        Fact("fusedmoe", fusedmoe.__version__),
        Fact("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        Fact("platform", platform.platform()),
        Fact("CPU", f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"),
        Fact("torch", torch.__version__),
        Fact("torch's runtime", runtime),
        Fact("NVIDIA driver", driver()),
    )


def driver() -> str:
    """Return the driver's version from nvidia-smi; torch knows only the CUDA version that the driver supports."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none (no nvidia-smi on the PATH)"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return ", ".join(sorted(set(answer.split()))) or "nvidia-smi lists no GPU"


def _packages() -> Iterable[Fact]:
    for name, extra in PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Fact(name, f"not installed: {install_command(extra)}" if extra else "not installed")
            continue
        yield Fact(name, version)
        if name == toolkit.DSL:
            yield Fact("its CUDA libraries", _toolkit(version))


def _toolkit(dsl_version: str) -> str:
    """Describe the CUDA libraries of the CuTe DSL: their versions, and any fault."""
    unusable = toolkit.why_unusable()
    if unusable is not None:
        return f"unusable: {unusable}"
    found, chosen = toolkit.libraries(), toolkit.chosen()
    text = ", ".join(f"cu{major} {version}" for major, version in found.items())
    if len(found) > 1:
        text += f"; cu{chosen} is used"
    others = [f"{toolkit.distribution(major)}=={dsl_version}" for major, v in found.items() if v != dsl_version]
    if others:
        return f"{text}; their version is not that of {toolkit.DSL}: pip install {' '.join(others)}"
    cuda = torch.version.cuda
    if cuda is None or int(cuda.partition(".")[0]) == chosen:
        return text
    text += f"; torch has CUDA {cuda}, which is compatible"
    if chosen == 12:
        text += f". Optional, for CUDA 13's compiler: {install_command('cu13')}"
    return text


def _environment() -> Iterable[Fact]:
    for name, value in sorted(os.environ.items()):
        if name.startswith("FUSEDMOE_") or name in VARIABLES:
            yield Fact(name, repr(value))


def _why_no_gpu() -> str | None:
    """Return the reason why torch has no GPU; None if it has one."""
    if not (torch.version.cuda or torch.version.hip):
        return f"torch {torch.__version__} is built for the CPU only"
    if torch.cuda.device_count() == 0:
        return "torch sees no device: check the driver and CUDA_VISIBLE_DEVICES"
    try:
        torch.cuda.init()
    except RuntimeError as error:  # such as a driver that is too old
        return str(error).splitlines()[0]
    return None


def _gpu(index: int) -> Gpu:
    device = torch.cuda.get_device_properties(index)
    return Gpu(
        index=index,
        name=device.name,
        arch=device.gcnArchName if torch.version.hip else f"sm_{device.major}{device.minor}",
        memory_gib=round(device.total_memory / 2**30, 1),
        sms=device.multi_processor_count,
    )


def _fused(rule: type[FusionRule], devices: Iterable[torch.device]) -> Kernel:
    disabled = patterns(disabled_by_environment())
    try:
        found = [why_unavailable(rule, device, arch_of(device), disabled) for device in devices]
    except RuleError as error:  # a call raises it too
        return Kernel(rule.name, False, f"a bug of this rule: {type(error).__name__}: {error}")
    here = None in found
    reasons = (unavailable.reason for unavailable in found if unavailable is not None)
    return Kernel(rule.name, here, f"{rule.direction}, a fusion rule" if here else "; ".join(reasons))


def _of_torch(gpu: Gpu) -> Iterable[Kernel]:
    """Yield torch's grouped products on a GPU."""
    device, loop = torch.device("cuda", gpu.index), "a loop over the experts, HOST SYNC"
    notes = {
        "grouped GEMM": (f"bf16 on the device; other dtypes and misaligned rows: {loop}", loop),
        "FP8 grouped GEMM": (
            "E4M3, one scale per tensor or per row, for bf16; every other recipe is emulated",
            "every recipe except bf16 is emulated",
        ),
    }
    available = runs_on_device(device, torch.bfloat16), multiplies_codes(device)
    for here, (name, (note, otherwise)) in zip(available, notes.items(), strict=True):
        note = note if here else f"torch has none for {gpu.arch}: {otherwise}"
        yield Kernel(f"torch {name}, {gpu.arch}", here, note)
