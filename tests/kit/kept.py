"""Results of compilers, kept between runs in `.pytest_cache`, by everything that determines them."""

import contextlib
import functools
import hashlib
import os
import time
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".pytest_cache" / "compiled"
UNUSED_SECONDS = 14 * 24 * 3600  # after which a file is removed


def kept(parts, make):
    """Return the bytes that ``make()`` returned for the same `parts`, strings, before; else call it and keep them.

    Several processes may ask at once: one of them calls `make`, and the others wait for its file.
    """
    import fcntl  # not on Windows, where no kernel is compiled

    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / hashlib.sha256(repr(parts).encode()).hexdigest()
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            found = file.read_bytes()
            os.utime(file)
            return found
        made = make()
        new = file.with_suffix(".new")
        new.write_bytes(made)
        os.replace(new, file)
    remove_unused()
    return made


def remove_unused():
    for file in FOLDER.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may remove it
            if file.suffix != ".lock" and file.stat().st_mtime < time.time() - UNUSED_SECONDS:
                file.unlink()


def versions(*distributions):
    """The versions of installed packages, to be given to `kept`; "absent" for those that are not installed."""
    found = []
    for name in distributions:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} absent")
    return found


@functools.cache
def contents(*paths):
    """Hashes of files, to be given to `kept`."""
    return [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths]
