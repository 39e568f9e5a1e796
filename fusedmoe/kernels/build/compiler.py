"""Get the function that launches a kernel: from memory, from the disk cache, or by compiling it.

    function = load(kernel)
    function(x, w, offsets, y, num_sms)  # torch tensors and numbers, by position

A kernel is always compiled to an object file, and its function loaded from there, so that every process runs the object
of the cache. Importing this module does not import the CuTe DSL; the first :func:`load` does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fusedmoe.kernels.build import cache
from fusedmoe.kernels.build.cache_key import built_with, key
from fusedmoe.kernels.build.kernel import Kernel
from fusedmoe.version import __version__

logger = logging.getLogger(__name__)

__all__ = ["Function", "Stats", "Wrap", "build", "entry", "is_cached", "load", "stats", "wrapped"]

Function = Callable[..., Any]
Wrap = Callable[[Kernel, Function], Function]  # returns the function to call in place of a kernel's

UNUSED = "compiled kernels are kept in memory only: %s"

SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")  # a C identifier that is short enough for a file name


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
    wrap: Wrap | None = None

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


def load(kernel: Kernel) -> Function:
    """Return the function that launches a kernel; the first call for a kernel loads or compiles it.

    The function takes the kernel's arguments by position and launches on torch's current stream.

    Raises `ValueError`: the symbol is not a C identifier, or two different kernels have the same symbol.
    """
    function = _state.functions.get(kernel)
    if function is not None:
        return function
    with _lock:
        function = _state.functions.get(kernel)
        if function is None:
            _claim_symbol(kernel)
            function = _load(kernel)
            if _state.wrap is not None:
                function = _state.wrap(kernel, function)
            _state.functions[kernel] = function
        return function


@contextlib.contextmanager
def wrapped(wrap: Wrap) -> Iterator[None]:
    """Replace the function of each kernel that is first loaded inside the block, for tools that watch launches.

    The process keeps these functions after the block.
    """
    before, _state.wrap = _state.wrap, wrap
    try:
        yield
    finally:
        _state.wrap = before


def build(kernel: Kernel, root: str | Path | None = None) -> bool:
    """Put a kernel into the disk cache; return whether it was compiled. ``root`` is the cache directory.

    Raises `fusedmoe.kernels.build.cache.CacheUnusableError`: there is no directory to write to, or writing failed.
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

    Raises `fusedmoe.kernels.build.cache.CacheUnusableError`: the directory cannot be used, or a source was edited while
    this process runs.
    """
    folder = cache.folder(__version__, root)
    return None if folder is None else cache.Entry(folder, kernel.symbol, key(kernel))


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
            place.write(object_, dict(built_with()))
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
