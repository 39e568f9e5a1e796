"""``fusedmoe verify``: check the built-in fusion rules on this machine's GPU."""

from __future__ import annotations

import argparse
import contextlib
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
from fusedmoe.commands.options import option
from fusedmoe.kernels.build import cache
from fusedmoe.kernels.sm100 import package
from fusedmoe.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusedmoe.commands.verify.cases import Case
    from fusedmoe.commands.verify.machine import Gpu
    from fusedmoe.commands.verify.rules import Verification

NO_GPU = 2
"""The exit status on a machine without a GPU that has kernels."""


@dataclass(frozen=True)
class VerifyOptions:
    """The options of the command."""

    json: str | None = option(None, "write versions, GPU and results to this file", "FILE")
    soak: bool = option(False, argparse.SUPPRESS)  # earlier options, which are errors
    calls: str | None = option(None, argparse.SUPPRESS)
    only: str | None = option(None, argparse.SUPPRESS)


def run(
    options: VerifyOptions,
    find: Callable[[], Gpu] | None = None,
    cases: Sequence[Case] | None = None,
    repeats: int | None = None,
) -> int:
    """Verify, print and write; return the exit status: 1 for a failure, 2 without a GPU that has kernels.

    ``find`` returns the GPU. The defaults are those of `fusedmoe.commands.verify`.
    """
    if options.soak or options.calls or options.only:
        raise InputError("a soak is `python -m benchmarks.soak` in fusedmoe's repository, or `make soak`")
    if disabled := disabled_by_environment():
        raise InputError(f"FUSEDMOE_DISABLE={disabled}: expected no rules switched off; unset it")
    # deferred: the modules import the whole package
    from fusedmoe.commands.verify import cases as all_cases
    from fusedmoe.commands.verify.ahead import compile_ahead
    from fusedmoe.commands.verify.checks import REPEATS
    from fusedmoe.commands.verify.machine import NoGpuError, find_gpu
    from fusedmoe.commands.verify.rules import as_data, problems, table, verify

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
        try:
            Path(options.json).write_text(json.dumps(data, indent=2) + "\n")
        except OSError as error:
            print(f"fusedmoe verify: error: cannot write {options.json} ({error.strerror})", file=sys.stderr)
            written = False
    return 0 if found.passed and written else 1


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


def _forget_stamp(machine: Gpu) -> None:
    """Turn off the rules that need a stamp: a kernel may end the process before the result is known."""
    if machine.arch in package.ARCHITECTURES and package.why_missing() is None:
        with contextlib.suppress(OSError):  # reported with the result
            package.write_stamp(machine.arch, passed=False)


def _stamp(machine: Gpu, found: Verification) -> bool:
    """Write the stamp that the rules for Blackwell need; return whether that succeeded."""
    if machine.arch not in package.ARCHITECTURES:
        return True
    reason = "there is no cache directory"
    try:
        path = package.write_stamp(machine.arch, found.passed, gpu=machine.name, driver=machine.driver)
    except OSError as error:
        path, reason = None, f"cannot write it ({error.strerror})"
    if path is None:
        where = f"set {cache.VARIABLE} to a directory, without which the rules stay off"
        print(f"fusedmoe verify: error: the result is not kept: {reason}; {where}", file=sys.stderr)
        return False
    print(f"the rules for sm_{machine.arch} are {'on' if found.passed else 'off'}: {path}")
    return True
