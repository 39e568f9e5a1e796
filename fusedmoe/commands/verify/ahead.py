"""Compiles the kernels of cases in several processes, since one process compiles one kernel at a time.

A process runs whole cases on the GPU, so that they take their kernels from the compiler, which puts them into the disk
cache. Their outcomes are ignored: the process that verifies runs the same cases, and loads the kernels.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial

import torch

from fusedmoe.commands.verify.cases import UNEVEN, Case, Sizes
from fusedmoe.commands.verify.checks import run_case
from fusedmoe.commands.verify.machine import Gpu
from fusedmoe.kernels.build import cache
from fusedmoe.kernels.sm100 import package
from fusedmoe.version import __version__

__all__ = ["compile_ahead", "one_per_layout"]

MOST_PROCESSES = 16
"""Each imports torch, and takes about half a gigabyte of the GPU's memory."""


def compile_ahead(
    cases: Sequence[Case],
    sizes: Sizes,
    device: torch.device,
    say: Callable[[str], None],
    run: Callable[[Case], None] | None = None,
    processes: int | None = None,
) -> None:
    """Put the kernels of cases into the disk cache.

    It does nothing with one CPU or without a cache directory. An error is left to the verification, which runs into it
    again.

    Parameters
    ----------
    cases
        The cases. One is run of those that differ only in their rows.
    sizes, device
        The widths of the layers, and the GPU.
    say
        Called with a line for the user, before the processes start.
    run
        The function that a process calls with a case; by default one that runs it.
    processes
        Their number; by default the number of CPUs, up to `MOST_PROCESSES`.
    """
    chosen = one_per_layout(cases)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(processes or cpus, MOST_PROCESSES, len(chosen))
    if processes < 2 or not _has_cache():
        return
    say(f"compiling the kernels of {len(chosen)} cases in {processes} processes")
    work = run or partial(_run, sizes=sizes, device=device)
    context = multiprocessing.get_context("spawn")  # CUDA works in no forked process
    with (
        concurrent.futures.ProcessPoolExecutor(processes, context) as pool,
        contextlib.suppress(BrokenProcessPool),  # from submit()
    ):
        concurrent.futures.wait([pool.submit(work, case) for case in chosen])


def one_per_layout(cases: Sequence[Case]) -> list[Case]:
    """Return the first of the cases that differ only in their layout."""
    first: dict[Case, Case] = {}
    for case in cases:
        first.setdefault(replace(case, layout=UNEVEN), case)
    return list(first.values())


def _has_cache() -> bool:
    try:
        return cache.folder(__version__) is not None
    except cache.CacheUnusableError:
        return False


def _run(case: Case, sizes: Sizes, device: torch.device) -> None:
    warnings.simplefilter("ignore")  # those of the verification itself are enough
    torch.cuda.set_device(device)
    with package.being_verified():
        run_case(case, sizes, Gpu(device), repeats=0)
