"""Compiles the kernels of cases in several processes, since one process compiles one kernel at a time.

A process runs whole cases on the GPU, so that they take their kernels from the compiler, which puts them into the disk
cache. Their outcomes are ignored: the process that verifies runs the same cases, and loads the kernels.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial

import torch

from fusedmoe.commands.compile import usable_cpus
from fusedmoe.commands.verify.cases import UNEVEN, Case, Sizes
from fusedmoe.commands.verify.checks import run_case
from fusedmoe.commands.verify.machine import Gpu
from fusedmoe.kernels.build import cache
from fusedmoe.kernels.sm100 import package
from fusedmoe.version import __version__

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
    """Put the kernels of cases into the disk cache; run one of the cases that differ only in their rows.

    ``processes`` is by default the number of CPUs, up to `MOST_PROCESSES`. With one, or without a cache directory,
    nothing is done. An error is left to the verification, which runs into it again.
    """
    chosen = one_per_layout(cases)
    processes = min(processes or usable_cpus(), MOST_PROCESSES, len(chosen))
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
