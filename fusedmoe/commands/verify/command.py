"""``fusedmoe verify``: check the built-in fusion rules on this machine's GPU, or repeat its kernels many times."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fusedmoe.base.environment import disabled_by_environment
from fusedmoe.base.errors import InputError
from fusedmoe.base.progress import counted
from fusedmoe.commands import compile as ahead_of_time
from fusedmoe.kernels.build import cache, shipped, toolkit
from fusedmoe.kernels.sm100 import package
from fusedmoe.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusedmoe.commands.verify.cases import Case
    from fusedmoe.commands.verify.machine import Machine
    from fusedmoe.commands.verify.rules import Verification

__all__ = ["NO_GPU", "VerifyOptions", "add_arguments", "run"]

NO_GPU = 2
"""The exit status on a machine without a GPU that has kernels."""


@dataclass(frozen=True)
class VerifyOptions:
    """The options of the command; see its help."""

    json: str | None = None
    soak: bool = False
    calls: int | None = None
    only: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("--json", metavar="FILE", help="write versions, GPU and results to this file")
    parser.add_argument(
        "--soak",
        action="store_true",
        help="instead, repeat every shipped Hopper kernel thousands of times; see the docs",
    )
    parser.add_argument(
        "--calls", metavar="N", type=int, help="with --soak: calls of each family of kernels (default: 20000)"
    )
    parser.add_argument("--only", metavar="PATTERN", help="with --soak: kernels whose name matches, 'sm90_ragged_k_*'")


def run(
    options: VerifyOptions,
    find: Callable[[], Machine] | None = None,
    cases: Sequence[Case] | None = None,
    repeats: int | None = None,
) -> int:
    """Verify or soak, print and write; return the exit status: 1 for a failure, 2 without a GPU that has kernels.

    Parameters
    ----------
    options
        The options of the command.
    find, cases, repeats
        The function that finds the GPU, the cases, and the repeats of each; by default those of
        `fusedmoe.commands.verify`.

    Raises
    ------
    fusedmoe.InputError
        An option is invalid, or rules are switched off by the environment.
    """
    if disabled := disabled_by_environment():
        raise InputError(f"FUSEDMOE_DISABLE={disabled}: expected no rules switched off; unset it")
    if options.soak:
        return _soak(options, find)
    if options.calls is not None or options.only is not None:
        raise InputError(f"{'--calls' if options.only is None else '--only'}: expected with --soak")
    # deferred: the modules import the whole package
    from fusedmoe.commands.verify import cases as all_cases
    from fusedmoe.commands.verify.ahead import compile_ahead
    from fusedmoe.commands.verify.checks import REPEATS
    from fusedmoe.commands.verify.machine import NoGpuError, find_gpu
    from fusedmoe.commands.verify.report import as_data, problems, table
    from fusedmoe.commands.verify.rules import verify

    begin = time.perf_counter()
    try:
        machine = (find or find_gpu)()
        cases = all_cases.cases_for(machine.arch) if cases is None else cases
        _forget_stamp(machine)
        with counted(len(cases), "cases") as advance, _quiet():
            ahead = functools.partial(compile_ahead, say=print)
            found = verify(machine, cases, repeats=repeats or REPEATS, advance=advance, compile_ahead=ahead)
    except NoGpuError as error:
        print(f"fusedmoe verify: error: {error}", file=sys.stderr)
        return NO_GPU
    print(f"{machine.name} (sm_{machine.arch}), driver {machine.driver}, fusedmoe {__version__}\n")
    print(table(found))
    if lines := problems(found):
        print("\n" + "\n".join(lines))
    checked = [result for result in found.rules if result.cases or not result.passed]
    passed, left = sum(result.passed for result in checked), len(found.rules) - len(checked)
    not_checked = f", {left} more not checked" if left else ""
    seconds = time.perf_counter() - begin
    print(
        f"\n{passed} of {len(checked)} rules passed{not_checked}, {len(found.outcomes)} cases, {seconds:.0f} s",
        flush=True,
    )
    written = _stamp(machine, found)
    if options.json is not None:
        data = as_data(found, machine) | {"seconds": round(seconds, 1)}
        written = _write(Path(options.json), json.dumps(data, indent=2)) and written
    return 0 if found.passed and written else 1


def _soak(options: VerifyOptions, find: Callable[[], Machine] | None) -> int:
    # deferred: the modules import the whole package
    from fusedmoe.commands.verify.machine import NoGpuError, find_gpu
    from fusedmoe.commands.verify.report import soak_as_data, soak_table
    from fusedmoe.commands.verify.soak.direct import DIRECT
    from fusedmoe.commands.verify.soak.layers import LAYERS
    from fusedmoe.commands.verify.soak.watch import CALLS, soak

    calls = CALLS if options.calls is None else options.calls
    if calls < 1:
        raise InputError(f"--calls {calls}: must be 1 or more")
    begin = time.perf_counter()
    try:
        machine = (find or find_gpu)()
        if machine.arch != 90:
            raise NoGpuError(f"--soak repeats Hopper kernels (sm_90), and {machine.name} is sm_{machine.arch}")
        if missing := toolkit.missing_packages():
            raise NoGpuError(f"the kernels need {' and '.join(missing)}: not installed")
    except NoGpuError as error:
        print(f"fusedmoe verify: error: {error}", file=sys.stderr)
        return NO_GPU
    pattern = "*" if options.only is None else options.only
    kernels = [kernel for kernel in shipped.shipped("sm_90a") if fnmatch.fnmatchcase(kernel.symbol, pattern)]
    if not kernels:
        raise InputError(f"--only {pattern}: no kernel's name matches; `fusedmoe compile --list` shows the names")
    print(f"{machine.name} (sm_{machine.arch}), driver {machine.driver}, fusedmoe {__version__}", flush=True)
    ahead_of_time.run(ahead_of_time.CompileOptions(only=options.only))  # a failure ends in another one below
    seconds = time.perf_counter() - begin
    print(f"soaking {len(kernels)} kernels, {calls:,} calls of each family, after {seconds:.0f} s", flush=True)
    soaked = soak(kernels, (*LAYERS, *DIRECT), str(machine.device), functools.partial(print, flush=True), calls)
    print("\n" + soak_table(soaked))
    if lines := soaked.problems():
        print("\n" + "\n".join(lines))
    seconds = time.perf_counter() - begin
    print(f"\n{'passed' if soaked.passed else 'FAILED'}, {soaked.calls.total():,} calls, {seconds:.0f} s", flush=True)
    data = soak_as_data(soaked, machine) | {"only": options.only, "seconds": round(seconds, 1)}
    written = options.json is None or _write(Path(options.json), json.dumps(data, indent=1))
    return 0 if soaked.passed and written else 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Log no warnings about ops that run unfused, since the cases switch rules off."""
    of_engine = logging.getLogger("fusedmoe.fusion")
    before = of_engine.level
    if before == logging.NOTSET:  # else FUSEDMOE_LOG asks for them
        of_engine.setLevel(logging.ERROR)
    try:
        yield
    finally:
        of_engine.setLevel(before)


def _forget_stamp(machine: Machine) -> None:
    """Turn off the rules that need a stamp: a kernel may end the process before the result is known."""
    if machine.arch in package.ARCHITECTURES and package.why_missing() is None:
        with contextlib.suppress(OSError):  # reported with the result
            package.write_stamp(machine.arch, passed=False)


def _stamp(machine: Machine, found: Verification) -> bool:
    """Write the stamp that the rules for Blackwell need; return whether that succeeded."""
    if machine.arch not in package.ARCHITECTURES:
        return True
    try:
        path = package.write_stamp(machine.arch, found.passed, gpu=machine.name, driver=machine.driver)
    except OSError as error:
        path, reason = None, f"cannot write it ({error.strerror})"
    else:
        reason = "there is no cache directory"
    if path is None:
        where = f"set {cache.VARIABLE} to a directory, without which the rules stay off"
        print(f"fusedmoe verify: error: the result is not kept: {reason}; {where}", file=sys.stderr)
        return False
    print(f"the rules for sm_{machine.arch} are {'on' if found.passed else 'off'}: {path}")
    return True


def _write(file: Path, text: str) -> bool:
    try:
        file.write_text(text + "\n")
    except OSError as error:
        print(f"fusedmoe verify: error: cannot write {file} ({error.strerror})", file=sys.stderr)
        return False
    return True
