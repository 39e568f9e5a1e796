"""``python -m benchmarks.soak``: soak, print a line for each family of kernels, and write the outcome.

The exit status is 1 for a failure, and 2 without a Hopper GPU or with wrong options. The outcome of all kernels with
the default number of calls is a result file, ``results/<gpu>/soak.json``.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.soak import watch
from benchmarks.soak.direct import DIRECT
from benchmarks.soak.layers import LAYERS
from benchmarks.soak.watch import CALLS, Soaked
from fusedmoe.base import machine as installed
from fusedmoe.base.environment import disabled_by_environment
from fusedmoe.commands import compile as ahead_of_time
from fusedmoe.commands.verify.machine import NoGpuError, find_gpu
from fusedmoe.commands.verify.rules import aligned, installed_on
from fusedmoe.kernels.build import shipped, toolkit
from fusedmoe.version import __version__

HEAD = ("family", "kernels", "calls", "beside load", "differing", "hung or died", "seconds")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write versions, GPU and results to this file")
    parser.add_argument("--calls", metavar="N", type=int, default=CALLS, help="calls of each family (%(default)s)")
    parser.add_argument("--only", metavar="PATTERN", help="kernels whose name matches, 'sm90_ragged_k_*'")
    options = parser.parse_args(argv)
    if disabled := disabled_by_environment():
        parser.error(f"FUSEDMOE_DISABLE={disabled}: expected no rules switched off; unset it")
    if options.calls < 1:
        parser.error(f"--calls {options.calls}: must be 1 or more")
    pattern = options.only or "*"
    kernels = [kernel for kernel in shipped.shipped("sm_90a") if fnmatch.fnmatchcase(kernel.symbol, pattern)]
    if not kernels:
        parser.error(f"--only {pattern}: no kernel's name matches; `fusedmoe compile --list` shows the names")
    begin = time.perf_counter()
    try:
        machine = find_gpu()
        if machine.arch != 90:
            raise NoGpuError(f"a soak repeats Hopper kernels (sm_90), and {machine.name} is sm_{machine.arch}")
        if missing := toolkit.missing_packages():
            raise NoGpuError(f"the kernels need {' and '.join(missing)}: not installed")
    except NoGpuError as error:
        parser.error(str(error))
    say = functools.partial(print, flush=True)
    say(f"{machine.name} (sm_{machine.arch}), driver {machine.driver}, fusedmoe {__version__}")
    ahead_of_time.run(ahead_of_time.CompileOptions(only=options.only))  # a failure ends in another one below
    seconds = time.perf_counter() - begin
    say(f"soaking {len(kernels)} kernels, {options.calls:,} calls of each family, after {seconds:.0f} s")
    soaked = watch.soak(kernels, (*LAYERS, *DIRECT), str(machine.device), say, options.calls)
    families = [_of_family(soaked, name, symbols) for name, symbols in soaked.families.items()]
    say("\n" + aligned([HEAD, *map(_row, families)]))
    if lines := soaked.problems():
        say("\n" + "\n".join(lines))
    seconds = time.perf_counter() - begin
    say(f"\n{'passed' if soaked.passed else 'FAILED'}, {soaked.calls.total():,} calls, {seconds:.0f} s")
    found = {
        **installed_on(machine),
        "commit": results.commit(),
        "versions": installed.versions(),
        "passed": soaked.passed,
        "calls per family": soaked.wanted,
        "families": families,
        "problems": lines,
        "only": options.only,
        "seconds": round(seconds, 1),
    }
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.only is None and options.calls == CALLS:
        say(results.write(results.ROOT / "results", "soak", found))
    return 0 if soaked.passed else 1


def _of_family(soaked: Soaked, family: str, symbols: list[str]) -> dict[str, Any]:
    return {
        "family": family,
        "kernels": len(symbols),
        "calls": sum(soaked.calls[symbol] for symbol in symbols),
        "beside_load": sum(soaked.beside_load[symbol] for symbol in symbols),
        "differing": sum(soaked.differing[symbol] for symbol in symbols),
        "ended": len(soaked.ended.intersection(symbols)),
        "seconds": round(sum(soaked.seconds[symbol] for symbol in symbols), 1),
    }


def _row(family: dict[str, Any]) -> tuple[str, ...]:
    name, *counts, seconds = family.values()
    return (name, *(f"{count:,}" for count in counts), f"{seconds:.1f}")


if __name__ == "__main__":
    sys.exit(main())
