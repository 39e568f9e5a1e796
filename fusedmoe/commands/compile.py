"""``fusedmoe compile``: compile the shipped kernels into the disk cache, ahead of time and without a GPU."""

from __future__ import annotations

import concurrent.futures
import fnmatch
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fusedmoe import __version__
from fusedmoe.base.errors import InputError
from fusedmoe.base.progress import counted
from fusedmoe.base.target import checked_arch
from fusedmoe.commands.options import option
from fusedmoe.kernels.build import cache, compiler, shipped, toolkit
from fusedmoe.kernels.build.kernel import Kernel


@dataclass(frozen=True)
class CompileOptions:
    """The options of the command."""

    arch: str = option("sm_90a", "target architecture, such as 90 or 100 (default: %(default)s)")
    list: bool = option(False, "list the kernels and whether they are cached, and exit")
    only: str | None = option(None, "kernels whose name matches, such as 'sm90_ragged_k_*'", "PATTERN")
    jobs: int | None = option(None, "compiler processes; 1: this process (default: one per CPU)", "N")
    cache_dir: str | None = option(None, f"cache directory (default: {cache.VARIABLE}, else ~/.cache/fusedmoe)", "DIR")


STATUSES = ("compiled", "already cached", "FAILED")


class Outcome(NamedTuple):
    """The result for one kernel; ``error`` is the reason for a failure."""

    symbol: str
    status: str  # one of `STATUSES`
    seconds: float
    error: str = ""


def run(options: CompileOptions) -> int:
    """Build or list the kernels; return the exit status."""
    if options.jobs is not None and options.jobs < 1:
        raise InputError(f"--jobs {options.jobs}: must be 1 or more")
    if options.cache_dir == "":
        raise InputError("--cache-dir: expected a directory, got an empty name")
    arch = f"sm_{checked_arch(options.arch, '--arch')}a"
    everything = shipped.shipped(arch)
    if not everything:
        print(f"fusedmoe {__version__} ships no kernels for {arch}")
        return 0
    kernels = [k for k in everything if options.only is None or fnmatch.fnmatchcase(k.symbol, options.only)]
    if not kernels:
        raise InputError(f"--only {options.only}: no kernel's name matches; --list shows the names")
    try:
        folder = _folder(options.cache_dir)
    except cache.CacheUnusableError as error:
        print(f"fusedmoe compile: error: {error}", file=sys.stderr)
        return 1
    if options.list:
        width = max(len(kernel.symbol) for kernel in kernels)
        for kernel in kernels:
            cached = compiler.is_cached(kernel, options.cache_dir)
            print(f"{kernel.symbol:<{width}}  {'cached' if cached else 'not cached'}")
        status = 0
    else:
        status = _compile(kernels, options, f"{arch} in {folder}")
    if others := shipped.not_shipped(arch):
        print(others)
    return status


def _folder(root: str | None) -> Path:
    if missing := toolkit.missing_packages():
        raise cache.CacheUnusableError(f"compiling kernels needs {' and '.join(missing)}: not installed")
    folder = cache.folder(__version__, root)
    if folder is None:
        raise cache.CacheUnusableError(f"{cache.VARIABLE}={cache.OFF} switches the cache off; add --cache-dir")
    return folder


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _outcomes(kernels: Sequence[Kernel], options: CompileOptions) -> Iterator[Outcome]:
    """Build the kernels and yield each outcome as soon as it is known."""
    jobs = min(options.jobs or usable_cpus(), len(kernels))
    if jobs == 1:
        yield from (_build(kernel, options.cache_dir) for kernel in kernels)
        return
    left = {kernel.symbol: kernel for kernel in kernels}
    for outcome in _outcomes_of_pool(kernels, jobs, options.cache_dir):
        del left[outcome.symbol]
        yield outcome
    for kernel in left.values():  # a process died and broke the pool; a pool per kernel finds the kernel
        died = Outcome(kernel.symbol, "FAILED", 0.0, "the process that compiled it died; is there enough memory?")
        yield next(_outcomes_of_pool([kernel], 1, options.cache_dir), died)


def _outcomes_of_pool(kernels: Sequence[Kernel], jobs: int, root: str | None) -> Iterator[Outcome]:
    """Build in a pool of processes; end early if one of them dies."""
    context = multiprocessing.get_context("spawn")  # torch has threads, and a forked process with threads may hang
    pool = concurrent.futures.ProcessPoolExecutor(jobs, context, signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        futures = [pool.submit(_build, kernel, root) for kernel in kernels]
        for future in concurrent.futures.as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:
                continue
    except BrokenProcessPool:  # from submit()
        return
    finally:
        pool.shutdown(cancel_futures=True)


def _build(kernel: Kernel, root: str | None) -> Outcome:
    begin = time.perf_counter()
    try:
        compiled = compiler.build(kernel, root)
    except Exception as error:  # noqa: BLE001  reported, and the other kernels are built
        why = "" if isinstance(error, cache.CacheUnusableError) else f"{type(error).__name__}: "
        return Outcome(kernel.symbol, "FAILED", time.perf_counter() - begin, f"{why}{error}")
    return Outcome(kernel.symbol, "compiled" if compiled else "already cached", time.perf_counter() - begin)


def _compile(kernels: Sequence[Kernel], options: CompileOptions, where: str) -> int:
    """Build the kernels, print each outcome and a summary, and return the exit status."""
    width, outcomes, begin = max(len(kernel.symbol) for kernel in kernels), [], time.perf_counter()
    with counted(len(kernels), "kernels") as advance:
        for outcome in _outcomes(kernels, options):
            seconds = "" if outcome.status == "already cached" else f"  {outcome.seconds:6.1f} s"
            print(f"{outcome.symbol:<{width}}  {outcome.status:<14}{seconds}".rstrip(), flush=True)
            outcomes.append(outcome)
            advance(outcome.symbol)
    failed = [outcome for outcome in outcomes if outcome.status == "FAILED"]
    for outcome in failed:
        print(f"fusedmoe compile: error: {outcome.symbol}: {outcome.error}", file=sys.stderr)
    counts = Counter(outcome.status for outcome in outcomes)
    parts = ", ".join(f"{counts[status]} {status.lower()}" for status in STATUSES if counts[status])
    plural = "kernel" if len(outcomes) == 1 else "kernels"
    print(f"{len(outcomes)} {plural} for {where}: {parts}; {time.perf_counter() - begin:.1f} s")
    return 1 if failed else 0
