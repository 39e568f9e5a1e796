"""Compiled kernels on disk. An entry is three files in ``<cache directory>/<version of fusedmoe>/``::

    <symbol>-<key>.o       the object file, host and device code
    <symbol>-<key>.json    the manifest: symbol, key, SHA-256 of the object, what it was built with
    <symbol>-<key>.lock    held by the process that compiles it

What is read here will be run, and the loader of object files takes damaged ones without a word. So an entry is used
only if its manifest names this kernel and this key, if the object's SHA-256 is the manifest's, and if directory and
files belong to this user or to root and are not writable by everyone. This file knows bytes; it knows no compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

__all__ = ["VARIABLE", "CacheUnusableError", "DamagedError", "Entry", "folder", "parsed", "read", "replace"]

VARIABLE = "FUSEDMOE_CACHE_DIR"
OFF = "0"  # the value of VARIABLE that keeps kernels in memory alone
PATIENCE_S = 300.0  # how long to wait for a process that compiles: far more than it takes, for one that is suspended
POLL_S = 0.05
LARGEST_OBJECT = 2**28  # bytes: a thousand times what a kernel takes
LARGEST_JSON = 2**24  # bytes


class CacheUnusableError(Exception):
    """The cache directory is not to be used; the message says why, and what to do."""


class DamagedError(Exception):
    """An entry is there and is not what was written, or not for us to trust; the message says what is wrong."""


def folder(version: str, root: str | Path | None = None) -> Path | None:
    """Return where the entries of a version of fusedmoe lie, existing or not; None where the disk is switched off.

    Without ``root``: FUSEDMOE_CACHE_DIR, else ``$XDG_CACHE_HOME/fusedmoe``, else ``~/.cache/fusedmoe``.

    Raises
    ------
    CacheUnusableError
        No place is known, or others may write there.
    """
    if root is None:
        root = os.environ.get(VARIABLE) or None
        if root == OFF:
            return None
    try:
        base = Path(os.path.realpath(_default() if root is None else Path(root).expanduser()))
    except RuntimeError as error:  # pathlib's word for a user without a home
        raise CacheUnusableError(f"{error}; set {VARIABLE}") from error
    if not hasattr(os, "geteuid"):
        raise CacheUnusableError("this platform does not say whom a file belongs to")
    for directory in (base, base / version):
        reason = _distrust_of(directory)
        if reason is not None:
            raise CacheUnusableError(f"{directory} {reason}: code from there is not run; correct it, or set {VARIABLE}")
    return base / version


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one kernel lies, or will lie.

    Attributes
    ----------
    folder : Path
        What :func:`folder` returned.
    symbol : str
        The function's name in the object file.
    key : str
        64 hexadecimal digits, of everything that decides what the object holds.
    """

    folder: Path
    symbol: str
    key: str

    @property
    def object_file(self) -> Path:
        return self._file("o")

    @property
    def manifest_file(self) -> Path:
        return self._file("json")

    @property
    def lock_file(self) -> Path:
        return self._file("lock")

    def read(self) -> bytes | None:
        """Return the object file, verified; None if there is no entry.

        Raises
        ------
        DamagedError
            Something is there that is not to be loaded.
        """
        manifest, object_ = read(self.manifest_file, LARGEST_JSON), read(self.object_file, LARGEST_OBJECT)
        if manifest is None:  # written last: an object alone is what an interrupted process left
            return None
        if object_ is None:
            raise DamagedError("the manifest is there, the object is not")
        says = parsed(manifest, "its manifest")
        sha256 = hashlib.sha256(object_).hexdigest()
        for name, expected in (("symbol", self.symbol), ("key", self.key), ("sha256", sha256)):
            got = says.get(name) if isinstance(says, dict) else None
            if got != expected:
                shown = repr(got) if got is None or isinstance(got, str) else f"of type {type(got).__name__}"
                raise DamagedError(f"its manifest has {name} {shown[:100]}, expected {expected!r}")
        return object_

    def write(self, object_: bytes, built_with: Mapping[str, str]) -> None:
        """Write the entry. A reader sees the old files or the new ones, or a pair that :meth:`read` refuses.

        Raises
        ------
        OSError
            The directory cannot be written.
        """
        manifest = {
            "symbol": self.symbol,
            "key": self.key,
            "sha256": hashlib.sha256(object_).hexdigest(),
            "built_with": dict(built_with),
        }
        self._make_folder()
        replace(self.object_file, object_)
        replace(self.manifest_file, json.dumps(manifest, indent=2).encode() + b"\n")

    def try_writing(self) -> None:
        """Find out whether :meth:`write` can work.

        Raises
        ------
        OSError
            The directory cannot be written.
        """
        self._make_folder()
        tempfile.TemporaryFile(dir=self.folder).close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from compiling the same kernel meanwhile.

        The kernel drops the lock of a process that dies. Where the file system has no locks, or the lock is held for
        longer than any compilation takes, the body runs without it: the same kernel is then compiled twice, and written
        twice, which does no harm.
        """
        descriptor = self._open_lock()
        if descriptor is None:
            yield
            return
        import fcntl  # missing on Windows, which does not come this far

        try:
            self._wait_for(descriptor)
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where a forked child holds a copy
            os.close(descriptor)

    def _file(self, suffix: str) -> Path:
        return self.folder / f"{self.symbol}-{self.key[:16]}.{suffix}"

    def _make_folder(self) -> None:
        self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for directory in (self.folder.parent, self.folder):
            directory.mkdir(mode=0o755, exist_ok=True)  # whatever the umask: not writable by others

    def _open_lock(self) -> int | None:
        try:
            self._make_folder()
            return os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError:  # a directory that cannot be written: said where the entry is written
            return None

    def _wait_for(self, descriptor: int) -> None:
        import fcntl

        begin, said = time.monotonic(), False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            except OSError:
                return
            if not said:
                logger.info("waiting for another process to compile %s", self.symbol)
                said = True
            if time.monotonic() - begin > PATIENCE_S:
                logger.warning("%s has been locked for %.0f s: going on without it", self.lock_file, PATIENCE_S)
                return
            time.sleep(POLL_S)


def _default() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the specification of XDG_CACHE_HOME ignores relative paths
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "fusedmoe"


def _distrust_of(directory: Path) -> str | None:
    """Return why code from a directory is not to be run; None if it may, or if there is no such directory."""
    try:
        return _distrust(directory.stat())
    except OSError:
        return None


def _distrust(status: os.stat_result) -> str | None:
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (id {status.st_uid})"
    if status.st_mode & stat.S_IWOTH:
        return "is writable by everyone"
    return None


def read(path: Path, largest: int) -> bytes | None:
    """Return a regular file that this user or root wrote; None if there is none. Every file of the cache is read here.

    Parameters
    ----------
    path
        The file.
    largest
        Its largest size in bytes.

    Raises
    ------
    DamagedError
        Something is there that is not to be read: no regular file, a link, too large, somebody else's.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # does not hang on a named pipe
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be opened ({error.strerror})") from error
    try:
        status = os.fstat(descriptor)
        reason = _distrust(status) if stat.S_ISREG(status.st_mode) else "is no file"
        if reason is None and status.st_size > largest:
            reason = f"is larger than {largest} bytes"
        if reason is not None:
            raise DamagedError(f"{path.name} {reason}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(largest)
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from error
    finally:
        os.close(descriptor)


def parsed(content: bytes, who: str) -> object:
    """Return what a file says as JSON; ``who`` it is, for the message.

    Raises
    ------
    DamagedError
        It is no JSON, or nested too deeply.
    """
    try:
        says: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{who} is no JSON ({error})") from error
    return says


def replace(path: Path, content: bytes) -> None:
    """Write a file: a reader sees the old content or the new one, whole."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # a cache built by root, in a container's image, is read by others
            file.write(content)
            file.flush()
            os.fsync(descriptor)  # else a crash of the machine may leave a whole name on half a file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
