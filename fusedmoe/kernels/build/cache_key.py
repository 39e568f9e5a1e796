"""The key of a kernel in the disk cache: a hash of its sources, its target, and the build environment."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import sys
import time
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from fusedmoe.kernels.build.cache import CacheUnusableError
from fusedmoe.kernels.build.kernel import Kernel
from fusedmoe.version import __version__

__all__ = ["built_with", "key"]

# Their versions determine the compiled code, and whether the runtime can load an object.
PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)

# Variables of the CuTe DSL that do not change the object. All others are part of the key, those of later versions
# included. A kernel's options --gpu-arch and --enable-tvm-ffi override CUTE_DSL_ARCH and ENABLE_TVM_FFI.
WITHOUT_EFFECT = re.compile(
    r"CUTE_DSL_(ARCH|CACHE_DIR|DISABLE_FILE_CACHING|DUMP_DIR|ENABLE_TVM_FFI|FILTER_STACKTRACE|JIT_CACHE_MAX_ELEMS"
    r"|JIT_TIME_PROFILING|KEEP|KEEP_\w+|LIBS|LOG_\w+|NO_CACHE|PRINT_\w+|SHOW_STACKTRACE|WARNINGS_IGNORE)"
)

# The x86 instruction sets among the flags of /proc/cpuinfo. The other flags depend on the operating system's version.
INSTRUCTION_SETS = re.compile(
    r"(3dnow|abm|adx|aes|amx|apx|avx|bmi|clflushopt|clwb|cmov|cx16|f16c|fma|fsgsbase|gfni|lahf|lwp|mmx|movbe|movdir|pclmul"
    r"|pni|popcnt|prefetch|rdrand|rdseed|sha|sm[34]|sse|ssse|tbm|vaes|vpclmul|waitpkg|xop|xsave).*"
)

_started_ns = time.time_ns()


def key(kernel: Kernel) -> str:
    """Return the SHA-256 of everything that determines a kernel's object and where it can be loaded.

    It does not include Python's version: objects load under every version.

    Raises `CacheUnusableError`: a source was edited while this process runs.
    """
    parts = {
        "symbol": kernel.symbol,
        "arch": kernel.arch,
        "sources": {name: _digest(name) for name in sorted(kernel.sources)},
        "built_with": dict(built_with()),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@functools.cache
def built_with() -> tuple[tuple[str, str], ...]:
    """Return the build environment that determines an object, as names and values.

    It is constant within a process: the CuTe DSL reads its variables on import.
    """
    cutlass = importlib.import_module("cutlass")

    return (
        ("fusedmoe", __version__),
        *((name, _version(name)) for name in PACKAGES),
        ("CUDA toolkit", str(cutlass.CUDA_VERSION)),  # the newest installed version that the driver supports
        ("CPU", _cpu()),
        *sorted(
            (n, value) for n, value in os.environ.items() if n.startswith("CUTE_") and not WITHOUT_EFFECT.fullmatch(n)
        ),
    )


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def _cpu() -> str:
    """Return this CPU's model and instruction sets: an object contains host code for the CPU that built it."""
    first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    sets = sorted(filter(INSTRUCTION_SETS.fullmatch, fields.get("flags", "").split()))
    sets += sorted(fields.get("Features", "").split())  # the instruction sets on Arm
    model = [fields.get(name, "") for name in ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")]
    return " ".join(filter(None, [platform.machine(), *model, *sets]))


def _digest(module: str) -> str:
    """Return the SHA-256 of the source of a module, or of all modules of a package, without importing any."""
    digest = hashlib.sha256()
    for path in _files(module):
        text = path.read_bytes()
        _refuse_edited(path)
        digest.update(f"{path.name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _files(module: str) -> list[Path]:
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    name = top
    for part in rest:
        name = f"{name}.{part}"
        # not importlib.util.find_spec, which imports the parent packages
        spec = None if spec is None else PathFinder.find_spec(name, spec.submodule_search_locations)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).rglob("*.py"))
    if spec is not None and spec.origin is not None and not files:
        files = [Path(spec.origin)]
    if not files:
        raise ModuleNotFoundError(f"module {module!r}, a source of a kernel, was not found", name=module)
    return files


def _refuse_edited(path: Path) -> None:
    """Refuse a file that was edited after its import: the cache would hold the old code under the new source's key."""
    if path.stat().st_mtime_ns > _started_ns and str(path) in _imported_files():
        raise CacheUnusableError(f"{path} was edited while this process runs")


def _imported_files() -> set[str]:
    return {file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None)) is not None}
