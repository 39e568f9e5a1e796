"""Get the function that launches a kernel: from memory, from the disk cache, or by compiling it.

    function = load(kernel)
    function(x, w, offsets, y, num_sms)  # torch tensors and numbers, by position

A kernel is always compiled to an object file, and its function loaded from there, so that every process runs the object
of the cache. Importing this module does not import the CuTe DSL; the first :func:`load` does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fusedmoe.kernels import cache
from fusedmoe.version import __version__

logger = logging.getLogger(__name__)

__all__ = ["Compiled", "Function", "Kernel", "Stats", "build", "entry", "is_cached", "key", "load", "stats"]

Function = Callable[..., Any]

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

UNUSED = "compiled kernels are kept in memory only: %s"

SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")  # a C identifier that is short enough for a file name


class Compiled(Protocol):
    """The result of ``cute.compile``."""

    def export_to_c(self, object_file_path: str, function_name: str) -> None: ...


class Kernel(Protocol):
    """A kernel with all its compile-time parameters: a frozen dataclass, hashable and picklable."""

    @property
    def symbol(self) -> str:
        """A unique C identifier: ``sm90_ragged_m_bf16_128x256x64_c2x1_swiglu``."""

    @property
    def arch(self) -> str:
        """The target architecture: ``sm_90a``."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Dotted names of the modules whose source determines the object; a package includes all its modules.

        The sources are read, not imported.
        """

    def compile(self) -> Compiled:
        """Compile without a GPU: ``cute.compile(function, *fake_arguments, stream, options=...)``.

        The options must contain ``--enable-tvm-ffi`` and ``--gpu-arch`` with :attr:`arch`: the loader of objects does
        not check the architecture. The stream is ``make_fake_stream(use_tvm_ffi_env_stream=True)``.
        """

    def __hash__(self) -> int: ...


class Stats(NamedTuple):
    """Counts of :func:`load` and :func:`build` in this process."""

    compiled: int  # compiled kernels
    from_disk: int  # functions loaded from the disk cache
    in_memory: int  # functions currently in memory


@dataclass
class _State:
    functions: dict[Kernel, Function]
    by_symbol: dict[str, Kernel]
    said: set[str]
    compiled: int = 0
    from_disk: int = 0

    def warn_once(self, message: str, *values: object) -> None:
        text = message % values
        if text not in self.said:
            self.said.add(text)
            logger.warning(message, *values)


class _Obtained(NamedTuple):
    object_: bytes
    compiled: bool
    unwritten: OSError | None = None


_state = _State({}, {}, set())
_lock = threading.RLock()  # one thread compiles or loads at a time
_started_ns = time.time_ns()


def load(kernel: Kernel) -> Function:
    """Return the function that launches a kernel; the first call for a kernel loads or compiles it.

    The function takes the kernel's arguments by position and launches on torch's current stream.

    Raises
    ------
    ValueError
        The symbol is not a C identifier, or two different kernels have the same symbol.
    """
    function = _state.functions.get(kernel)
    if function is not None:
        return function
    with _lock:
        function = _state.functions.get(kernel)
        if function is None:
            _claim_symbol(kernel)
            function = _state.functions[kernel] = _load(kernel)
        return function


def build(kernel: Kernel, root: str | Path | None = None) -> bool:
    """Put a kernel into the disk cache; return whether it was compiled. ``root`` is the cache directory.

    Raises
    ------
    fusedmoe.kernels.cache.CacheUnusableError
        There is no directory to write to, or writing failed.
    """
    with _lock:
        _claim_symbol(kernel)
        place = entry(kernel, root)
        if place is None:
            raise cache.CacheUnusableError(f"{cache.VARIABLE}={cache.OFF} switches it off")
        if is_cached(kernel, root):
            return False
        try:
            place.try_writing()  # fail before compiling
        except OSError as error:
            raise _unwritable(place, error) from error
        obtained = _obtain(kernel, place)
        if obtained.unwritten is not None:
            raise _unwritable(place, obtained.unwritten)
        return obtained.compiled


def is_cached(kernel: Kernel, root: str | Path | None = None) -> bool:
    """Whether the disk cache has a verified entry for a kernel."""
    try:
        place = entry(kernel, root)
        return place is not None and place.read() is not None
    except (cache.CacheUnusableError, cache.DamagedError):
        return False


def stats() -> Stats:
    """Return the counts of this process."""
    return Stats(_state.compiled, _state.from_disk, len(_state.functions))


def entry(kernel: Kernel, root: str | Path | None = None) -> cache.Entry | None:
    """Return a kernel's entry in the disk cache, whether or not it exists; None if the cache is switched off.

    Raises
    ------
    fusedmoe.kernels.cache.CacheUnusableError
        The directory cannot be used, or a source was edited while this process runs.
    """
    folder = cache.folder(__version__, root)
    return None if folder is None else cache.Entry(folder, kernel.symbol, key(kernel))


def key(kernel: Kernel) -> str:
    """Return the SHA-256 of everything that determines a kernel's object and where it can be loaded.

    It does not include Python's version: objects load under every version.

    Raises
    ------
    fusedmoe.kernels.cache.CacheUnusableError
        A source was edited while this process runs.
    """
    parts = {
        "symbol": kernel.symbol,
        "arch": kernel.arch,
        "sources": {name: _digest(name) for name in sorted(kernel.sources)},
        "built_with": dict(_built_with()),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _claim_symbol(kernel: Kernel) -> None:
    if not SYMBOL.fullmatch(kernel.symbol):
        raise ValueError(f"{kernel!r}: its symbol {kernel.symbol!r} is not a C identifier of at most 200 characters")
    other = _state.by_symbol.setdefault(kernel.symbol, kernel)
    if other != kernel:
        raise ValueError(f"two kernels have the symbol {kernel.symbol!r}: {other!r} and {kernel!r}")


def _load(kernel: Kernel) -> Function:
    try:
        place = entry(kernel)
    except cache.CacheUnusableError as unusable:
        _state.warn_once(UNUSED, unusable)
        place = None
    if place is None:
        return _function(_compile(kernel), kernel.symbol)
    obtained = _obtain(kernel, place)
    if obtained.unwritten is not None:
        _state.warn_once(UNUSED, _unwritable(place, obtained.unwritten))
    function = _function(obtained.object_, kernel.symbol)
    _state.from_disk += not obtained.compiled
    return function


def _unwritable(place: cache.Entry, error: OSError) -> cache.CacheUnusableError:
    return cache.CacheUnusableError(f"cannot write to {place.folder} ({error.strerror or error}); set {cache.VARIABLE}")


def _obtain(kernel: Kernel, place: cache.Entry) -> _Obtained:
    """Return an object file from disk, or compile the kernel and write the object to disk."""
    with contextlib.suppress(cache.DamagedError):  # another process may be writing it: read again with the lock held
        stored = place.read()
        if stored is not None:
            return _Obtained(stored, compiled=False)
    with place.locked():
        try:
            stored = place.read()  # the previous holder of the lock may have written it
        except cache.DamagedError as error:
            logger.warning("%s is compiled again instead of loaded: %s", place.object_file, error)
            stored = None
        if stored is not None:
            return _Obtained(stored, compiled=False)
        object_ = _compile(kernel)
        try:
            place.write(object_, dict(_built_with()))
        except OSError as error:
            return _Obtained(object_, compiled=True, unwritten=error)
        return _Obtained(object_, compiled=True)


def _compile(kernel: Kernel) -> bytes:
    begin = time.perf_counter()
    with _memory_file() as path:
        kernel.compile().export_to_c(object_file_path=path, function_name=kernel.symbol)
        object_ = Path(path).read_bytes()
    _state.compiled += 1
    logger.info("compiled %s in %.1f s", kernel.symbol, time.perf_counter() - begin)
    return object_


def _function(object_: bytes, symbol: str) -> Function:
    """Load the verified bytes; the file on disk may have changed since."""
    from cutlass import cute

    with _memory_file() as path:
        Path(path).write_bytes(object_)
        function: Function = cute.runtime.load_module(path, enable_tvm_ffi=True)[symbol]
    return function


@contextlib.contextmanager
def _memory_file() -> Iterator[str]:
    """Yield the path of a file in memory: compiler and loader take paths only."""
    descriptor = os.memfd_create("fusedmoe")
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


@functools.cache
def _built_with() -> tuple[tuple[str, str], ...]:
    """Return the build environment that determines an object, as names and values.

    It is constant within a process: the CuTe DSL reads its variables on import.
    """
    cutlass = importlib.import_module("cutlass")

    return (
        ("fusedmoe", __version__),
        *((name, _version(name)) for name in PACKAGES),
        ("CUDA toolkit", str(cutlass.CUDA_VERSION)),  # the newest installed version that the driver supports
        ("CPU", _cpu()),
        *sorted((name, value) for name, value in os.environ.items() if _alters_code(name)),
    )


def _alters_code(variable: str) -> bool:
    return variable.startswith("CUTE_") and not WITHOUT_EFFECT.fullmatch(variable)


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
    files = [] if spec is None else _package_files(spec)
    if spec is not None and spec.origin is not None and not files:
        files = [Path(spec.origin)]
    if not files:
        raise ModuleNotFoundError(f"module {module!r}, a source of a kernel, was not found", name=module)
    return files


def _package_files(spec: ModuleSpec) -> list[Path]:
    return sorted(file for folder in spec.submodule_search_locations or () for file in Path(folder).rglob("*.py"))


def _refuse_edited(path: Path) -> None:
    """Refuse a file that was edited after its import: the cache would hold the old code under the new source's key."""
    if path.stat().st_mtime_ns > _started_ns and str(path) in _imported_files():
        raise cache.CacheUnusableError(f"{path} was edited while this process runs")


def _imported_files() -> set[str]:
    return {file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None)) is not None}
