"""The disk cache of compiled kernels. An entry is three files in ``<cache directory>/<version of fusedmoe>/``::

    <symbol>-<key>.o       the object file, host and device code
    <symbol>-<key>.json    the manifest: symbol, key, SHA-256 of the object, build environment
    <symbol>-<key>.lock    held by the process that compiles the kernel

Loading an object runs its code, and the loader does not detect damaged files. So an entry is used only if

- its manifest has this symbol, this key and the SHA-256 of the object, and
- the directory and the files belong to this user or to root, and others cannot write to them.
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
OFF = "0"  # value of VARIABLE that keeps kernels in memory only
PATIENCE_S = 300.0  # longest wait for another process that compiles: far longer than a compilation
POLL_S = 0.05
LARGEST_OBJECT = 2**28  # bytes: a thousand times a kernel's size
LARGEST_JSON = 2**24  # bytes


class CacheUnusableError(Exception):
    """The cache directory cannot be used; the message has the reason and a remedy."""


class DamagedError(Exception):
    """An entry is corrupt or not trusted; the message has the reason."""


def folder(version: str, root: str | Path | None = None) -> Path | None:
    """Return the directory of a version's entries, whether or not it exists; None if the cache is switched off.

    ``root`` defaults to FUSEDMOE_CACHE_DIR, else ``$XDG_CACHE_HOME/fusedmoe``, else ``~/.cache/fusedmoe``.

    Raises `CacheUnusableError`: the directory is unknown or not trusted.
    """
    if root is None:
        root = os.environ.get(VARIABLE) or None
        if root == OFF:
            return None
    try:
        base = Path(os.path.realpath(_default() if root is None else Path(root).expanduser()))
    except RuntimeError as error:  # from pathlib, for a user without a home directory
        raise CacheUnusableError(f"{error}; set {VARIABLE}") from error
    if not hasattr(os, "geteuid"):
        raise CacheUnusableError("files have no owner on this platform")
    for directory in (base, base / version):
        reason = _distrust_of(directory)
        if reason is not None:
            raise CacheUnusableError(f"{directory} {reason}, so its code is not run; change that, or set {VARIABLE}")
    return base / version


@dataclasses.dataclass(frozen=True)
class Entry:
    """The place of a kernel on disk, whether or not its files exist."""

    folder: Path  # the result of :func:`folder`
    symbol: str  # the function's name in the object file
    key: str  # SHA-256 of everything that determines the object, 64 hexadecimal digits

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
        """Return the verified object file; None if there is no entry.

        Raises `DamagedError`: the entry is corrupt or not trusted.
        """
        manifest, object_ = read(self.manifest_file, LARGEST_JSON), read(self.object_file, LARGEST_OBJECT)
        if manifest is None:  # written last: an interrupted process may leave an object without it
            return None
        if object_ is None:
            raise DamagedError("it has a manifest but no object")
        fields = parsed(manifest, "its manifest")
        sha256 = hashlib.sha256(object_).hexdigest()
        for name, expected in (("symbol", self.symbol), ("key", self.key), ("sha256", sha256)):
            got = fields.get(name) if isinstance(fields, dict) else None
            if got != expected:
                shown = repr(got) if got is None or isinstance(got, str) else f"of type {type(got).__name__}"
                raise DamagedError(f"its manifest has {name} {shown[:100]}, expected {expected!r}")
        return object_

    def write(self, object_: bytes, built_with: Mapping[str, str]) -> None:
        """Write the entry. A concurrent :meth:`read` gets the old files or the new ones, or refuses a mixed pair.

        Raises `OSError`: the directory is not writable.
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
        """Check that :meth:`write` can work.

        Raises `OSError`: the directory is not writable.
        """
        self._make_folder()
        tempfile.TemporaryFile(dir=self.folder).close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock that prevents other processes from compiling the same kernel.

        The operating system releases the lock of a process that dies. If the file system has no locks, or another
        process holds the lock for longer than PATIENCE_S, the body runs without it. Then the kernel may be compiled and
        written twice, which is harmless.
        """
        descriptor = self._open_lock()
        if descriptor is None:
            yield
            return
        import fcntl  # missing on Windows, where folder() raises

        try:
            self._wait_for(descriptor)
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # close() does not unlock if a forked child holds a copy
            os.close(descriptor)

    def _file(self, suffix: str) -> Path:
        return self.folder / f"{self.symbol}-{self.key[:16]}.{suffix}"

    def _make_folder(self) -> None:
        self.folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for directory in (self.folder.parent, self.folder):
            directory.mkdir(mode=0o755, exist_ok=True)  # not writable by others, whatever the umask

    def _open_lock(self) -> int | None:
        try:
            self._make_folder()
            return os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError:  # the directory is not writable; write() reports it
            return None

    def _wait_for(self, descriptor: int) -> None:
        import fcntl

        begin, logged = time.monotonic(), False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            except OSError:
                return
            if not logged:
                logger.info("waiting for another process to compile %s", self.symbol)
                logged = True
            if time.monotonic() - begin > PATIENCE_S:
                logger.warning("%s has been locked for %.0f s: compiling without the lock", self.lock_file, PATIENCE_S)
                return
            time.sleep(POLL_S)


def _default() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # the XDG specification requires that a relative path is ignored
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "fusedmoe"


def _distrust_of(directory: Path) -> str | None:
    """Return why a directory is not trusted; None if it is, or does not exist."""
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
    """Return the content of a trusted file of the cache; None if it does not exist.

    - ``largest``: its maximum size in bytes.

    Raises `DamagedError`: the file is not regular, too large, unreadable, or not trusted.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # O_NONBLOCK: a named pipe would block
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be opened ({error.strerror})") from error
    try:
        status = os.fstat(descriptor)
        reason = _distrust(status) if stat.S_ISREG(status.st_mode) else "is not a regular file"
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
    """Return the parsed JSON content of a file, which messages call ``who``.

    Raises `DamagedError`: the content is not JSON, or nested too deeply.
    """
    try:
        value: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{who} is not JSON ({error})") from error
    return value


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)  # others read a cache that root built into a container image
            file.write(content)
            file.flush()
            os.fsync(descriptor)  # otherwise a crash of the machine may leave a truncated file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
