"""The package of NVIDIA's kernels, and the record that they were verified on this machine. Neither imports the package.

`fusedmoe verify` runs the kernels on this machine's GPU. Only if they are right there, it writes a *stamp* to the cache
directory: the architecture, and the versions that were verified. Without it, no rule for Blackwell runs.
"""

from __future__ import annotations

import functools
import json
import logging
from importlib import metadata
from pathlib import Path

from fusedmoe.extras import install_command
from fusedmoe.kernels import cache
from fusedmoe.version import __version__

logger = logging.getLogger(__name__)

DISTRIBUTION = "nvidia-cudnn-frontend"
TESTED = (1, 32)
"""The tested version: its later fixes are accepted too."""
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


def stamp_file() -> Path | None:
    """Return the file of the stamp, whether or not it exists; None if the cache directory cannot be used."""
    try:
        folder = cache.folder(__version__)
    except cache.CacheUnusableError:
        return None
    return None if folder is None else folder / "verified-sm_100.json"


@functools.cache
def why_unverified() -> str | None:
    """Return why the kernels count as unverified on this machine, with the remedy; None if a stamp says otherwise."""
    remedy = "run `fusedmoe verify`"
    path = stamp_file()
    if path is None:
        return f"not verified on this machine: {remedy}, with a cache directory ({cache.VARIABLE}) for its result"
    try:
        stamp = json.loads(path.read_text())
        verified, passed = dict(stamp["versions"]), stamp["passed"]
    except FileNotFoundError:
        return f"not verified on this machine: {remedy}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"not verified on this machine: {path} is unreadable ({error}): {remedy}"
    if not passed:
        return f"`fusedmoe verify` failed on this machine: {path}"
    now = versions()
    changed = [f"{name} {verified.get(name)} -> {now[name]}" for name in now if verified.get(name) != now[name]]
    return f"not verified on this machine since {', '.join(changed)}: {remedy}" if changed else None
