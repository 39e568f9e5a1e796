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

from fusedmoe.environment import disabled_by_environment
from fusedmoe.errors import InputError
from fusedmoe.kernels import cache
from fusedmoe.kernels.sm100 import package
from fusedmoe.progress import counted
from fusedmoe.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fusedmoe.verify.cases import Case
    from fusedmoe.verify.checks import Effort
    from fusedmoe.verify.machine import Machine
    from fusedmoe.verify.rules import Verification

__all__ = ["NO_GPU", "VerifyOptions", "add_arguments", "run"]

NO_GPU = 2
"""The exit status on a machine without a GPU that has kernels."""


@dataclass(frozen=True)
class VerifyOptions:
    """The options of the command; see its help."""

    json: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("--json", metavar="FILE", help="write versions, GPU, rules and cases to this file")


def run(
    options: VerifyOptions,
    find: Callable[[], Machine] | None = None,
    cases: Sequence[Case] | None = None,
    effort: Effort | None = None,
) -> int:
    """Verify, print and write; return the exit status: 1 if a rule failed, 2 without a GPU that has kernels.

    Parameters
    ----------
    options
        The options of the command.
    find, cases, effort
        The function that finds the GPU, the cases, and how much of each runs; by default those of `fusedmoe.verify`.

    Raises
    ------
    fusedmoe.InputError
        An option is invalid, or rules are switched off by the environment.
    """
    # deferred: the modules import the whole package
    from fusedmoe.verify import cases as all_cases
    from fusedmoe.verify.ahead import compile_ahead
    from fusedmoe.verify.checks import Effort
    from fusedmoe.verify.machine import NoGpuError, find_gpu
    from fusedmoe.verify.report import as_data, problems, table
    from fusedmoe.verify.rules import verify

    if disabled := disabled_by_environment():
        raise InputError(f"FUSEDMOE_DISABLE={disabled}: expected no rules switched off; unset it")
    begin = time.perf_counter()
    try:
        machine = (find or find_gpu)()
        cases = all_cases.cases_for(machine.arch) if cases is None else cases
        _forget_stamp(machine)
        with counted(len(cases), "cases") as advance, _quiet():
            ahead = functools.partial(compile_ahead, say=print)
            found = verify(machine, cases, effort=effort or Effort(), advance=advance, compile_ahead=ahead)
    except NoGpuError as error:
        print(f"fusedmoe verify: error: {error}", file=sys.stderr)
        return NO_GPU
    print(f"{machine.name} (sm_{machine.arch}), driver {machine.driver or 'unknown'}, fusedmoe {__version__}\n")
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
