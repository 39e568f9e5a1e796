"""The package of NVIDIA's kernels, and the record that they were verified on this machine. Neither imports the package.

`fusedmoe verify` runs the kernels on this machine's GPU. Only if they are right there, it writes a *stamp* to the cache
directory: the architecture, and the versions that were verified. Without it, no rule for Blackwell runs. Each
architecture has a stamp of its own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path

import torch

from fusedmoe.base import changes
from fusedmoe.base.extras import install_command
from fusedmoe.base.target import arch_of
from fusedmoe.kernels.build import cache
from fusedmoe.version import __version__

ARCHITECTURES = (100, 103)
"""The architectures that the kernels are for. A verification is valid for one of them."""
DISTRIBUTION = "nvidia-cudnn-frontend"
TESTED = (1, 32)  # the tested version: its later fixes are accepted too
_REMEDY = "run `fusedmoe verify`"
_VERSIONS = ("fusedmoe", DISTRIBUTION, "nvidia-cutlass-dsl", "torch")


@functools.cache
def why_missing() -> str | None:
    """Return why the package cannot be used, with a remedy; None if it can."""
    wanted, command = ".".join(map(str, TESTED)), install_command("blackwell")
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"needs {DISTRIBUTION} {wanted}: {command}"
    if tuple(version.split(".")[:2]) != tuple(map(str, TESTED)):
        return f"needs {DISTRIBUTION} {wanted}, found {version}: {command}"
    return None


def versions() -> dict[str, str]:
    """Return the versions that a verification is valid for."""
    found = {"fusedmoe": __version__}
    for name in _VERSIONS[1:]:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def stamp_file(arch: int) -> Path | None:
    """Return the file of an architecture's stamp, whether or not it exists; None if the cache directory cannot be used.

    ``arch`` is 100 for sm_100.
    """
    try:
        folder = cache.folder(__version__)
    except cache.CacheUnusableError:
        return None
    return None if folder is None else folder / f"verified-sm_{arch}.json"


def write_stamp(arch: int, passed: bool, **details: str) -> Path | None:
    """Write the result of a verification; return the file, or None if there is no cache directory.

    - ``arch``: the architecture of the GPU, 100 for sm_100.
    - ``passed``: whether all rules passed.
    - ``**details``: further facts for the reader of the file, such as the name of the GPU.

    Raises `OSError`: the file cannot be written.
    """
    path = stamp_file(arch)
    if path is not None:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        stamp = {**details, "architecture": _name(arch), "versions": versions(), "passed": passed}
        cache.replace(path, json.dumps(stamp, indent=2).encode() + b"\n")
    _why_not_stamped.cache_clear()
    changes.note()
    return path


_verifying: ContextVar[bool] = ContextVar("fusedmoe.verifying", default=False)


@contextmanager
def being_verified() -> Iterator[None]:
    """Let the kernels count as verified inside the block, for the verification itself."""
    token = _verifying.set(True)
    changes.note()
    try:
        yield
    finally:
        _verifying.reset(token)
        changes.note()


def why_unverified() -> str | None:
    """Return why the kernels count as unverified on this machine, with the remedy; None if stamps say otherwise.

    Each architecture among the machine's GPUs needs a stamp of its own.
    """
    if _verifying.get():
        return None
    reasons = [_why_not_stamped(arch) for arch in machine_architectures()]
    return next(filter(None, reasons), None) if reasons else f"not verified on this machine: {_REMEDY}"


def machine_architectures() -> tuple[int, ...]:
    """Return the architectures of this machine's Blackwell GPUs that the kernels are for."""
    found = {arch_of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
    return tuple(arch for arch in ARCHITECTURES if arch in found)


@functools.cache
def _why_not_stamped(arch: int) -> str | None:
    path = stamp_file(arch)
    if path is None:
        return f"not verified on this machine: {_REMEDY}, with a cache directory ({cache.VARIABLE}) for its result"
    try:
        stamp = json.loads(path.read_text())
        of, verified, passed = stamp["architecture"], dict(stamp["versions"]), stamp["passed"]
    except FileNotFoundError:
        return f"not verified on this machine: {_REMEDY}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"not verified on this machine: {path} is unreadable ({error}): {_REMEDY}"
    if of != _name(arch):
        return f"not verified on this machine: {path} is of {of}, this GPU is {_name(arch)}: {_REMEDY}"
    now = versions()
    changed = [f"{name} {verified.get(name)} -> {now[name]}" for name in now if verified.get(name) != now[name]]
    if changed:
        return f"not verified on this machine since {', '.join(changed)}: {_REMEDY}"
    return None if passed is True else f"`fusedmoe verify` failed or did not finish on this machine: {path}"


def _name(arch: int) -> str:
    return f"sm_{arch}"
