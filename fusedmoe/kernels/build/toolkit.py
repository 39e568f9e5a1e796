"""The installed CuTe DSL: its packages, the CUDA versions of its libraries, and the driver's CUDA version.

The DSL ships its libraries in one distribution per CUDA major version. It uses the newest version that the driver
supports; without a driver, the newest installed. The version may differ from torch's CUDA version. Nothing here imports
the DSL or initializes CUDA.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from importlib import metadata

__all__ = ["DSL", "chosen", "driver_cuda", "libraries", "missing_packages", "why_unusable"]

DSL = "nvidia-cutlass-dsl"
PACKAGES = {"cutlass": DSL, "tvm_ffi": "apache-tvm-ffi"}  # distribution by module
MAJORS = (12, 13)  # CUDA major versions that the DSL has libraries for


@functools.cache
def missing_packages() -> tuple[str, ...]:
    """Return the required distributions that are not installed."""
    return tuple(name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None)


def libraries() -> dict[int, str]:
    """Return the versions of the installed DSL libraries, by CUDA major version."""
    versions = {major: _version(distribution(major)) for major in MAJORS}
    return {major: version for major, version in versions.items() if version is not None}


def distribution(major: int) -> str:
    """Return the distribution of the DSL's libraries for a CUDA major version."""
    return f"{DSL}-libs-cu{major}"


@functools.cache
def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver supports, (13, 0) for 13.0; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # no libcuda, or a stub without the function
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


def chosen() -> int | None:
    """Return the CUDA major version whose libraries the DSL will use; None if it can use none."""
    driver = driver_cuda()
    return max((major for major in libraries() if driver is None or major <= driver[0]), default=None)


@functools.cache
def why_unusable() -> str | None:
    """Return why the installed DSL cannot be imported, with a remedy; None if it can, or is not installed."""
    version = _version(DSL)
    if version is None or chosen() is not None:
        return None
    found, driver = libraries(), driver_cuda()
    if not found or driver is None:
        return f"{DSL} {version} lacks its libraries: pip install {distribution(MAJORS[0])}=={version}"
    names = " and ".join(f"CUDA {major}" for major in found)
    known = f"{DSL} has libraries for {names}, and the driver supports CUDA {driver[0]}.{driver[1]}"
    if driver[0] < MAJORS[0]:
        return f"{known}: update the driver"
    return f"{known}: pip install {distribution(driver[0])}=={version}, or update the driver"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
