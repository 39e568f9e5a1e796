"""Compiled kernels: out of memory, out of the cache on disk, or compiled; and never out of a file that is not theirs.

A function that came out of an object file refuses tensors that are not on a GPU, naming the argument: that it does so
shows, without a GPU, which kernel it is.
"""

import fnmatch
import json
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fusedmoe
from fusedmoe.commands.main import main
from fusedmoe.kernels.build import cache, cache_key, compiler, shipped

cutlass = pytest.importorskip("cutlass")
cute = cutlass.cute

THREADS = 128
PATHS = [str(Path(fusedmoe.__file__).parents[1]), str(Path(__file__).parent)]


def scale_kernel(dtype, bias):
    """y[i] = x[i] + bias, and how it is launched."""

    @cute.kernel
    def device(x: cute.Tensor, y: cute.Tensor):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < x.shape[0]:
            y[i] = x[i] + dtype(bias)

    @cute.jit
    def launch(x: cute.Tensor, y: cute.Tensor, stream):
        blocks = cute.ceil_div(x.shape[0], THREADS)
        device(x, y).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    return launch


@dataclass(frozen=True)
class Toy:
    """y[i] = x[i] + bias."""

    bias: int = 1
    dtype: str = "Float32"
    sources: tuple[str, ...] = (__name__,)
    arch: str = "sm_90a"

    @property
    def symbol(self):
        return f"toy_{self.dtype.lower()}_{self.bias}"

    def compile(self):
        dtype = getattr(cutlass, self.dtype)
        n = cute.sym_int()
        x, y = (cute.runtime.make_fake_compact_tensor(dtype, (n,), assumed_align=4) for _ in range(2))
        return cute.compile(
            scale_kernel(dtype, self.bias),
            x,
            y,
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
            options=f"--enable-tvm-ffi --gpu-arch {self.arch}",
        )


@dataclass(frozen=True)
class Awaited(Toy):
    """Takes long to compile, and leaves a file that says who did."""

    folder: str = ""

    def compile(self):
        with open(Path(self.folder) / f"compiled-by-{os.getpid()}", "x"):
            time.sleep(1)
        return super().compile()


@dataclass(frozen=True)
class Broken(Toy):
    symbol: str = "toy_broken"

    def compile(self):
        raise RuntimeError("no such instruction")


@dataclass(frozen=True)
class Deadly(Toy):
    """Takes its process along, once it is not the test's own."""

    symbol: str = "toy_deadly"
    survivor: int = 0

    def compile(self):
        assert os.getpid() != self.survivor
        os._exit(1)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """A cache directory of the test's own, and nothing loaded yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(cache.VARIABLE, str(folder))
    monkeypatch.setattr(cache_key, "_started_ns", time.time_ns())  # this file may be younger than the test session
    another_process(monkeypatch)
    yield folder
    cache_key.built_with.cache_clear()


def another_process(monkeypatch):
    """Forget what is in memory, as if the process began here."""
    monkeypatch.setattr(compiler, "_state", compiler._State({}, {}, set()))


def place(kernel):
    found = compiler.entry(kernel)
    assert found is not None
    return found


def compiled_again(kernel, monkeypatch, caplog, *words):
    """Load in another process: it must compile, say so once with these words, and leave the entry whole."""
    another_process(monkeypatch)
    caplog.clear()
    assert not compiler.is_cached(kernel)
    compiler.load(kernel)
    assert compiler.stats() == (1, 0, 1)
    (record,) = warnings(caplog)
    for word in (str(place(kernel).object_file), *words):
        assert word in record
    another_process(monkeypatch)
    compiler.load(kernel)
    assert compiler.stats() == (0, 1, 1)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def refuses_cpu_tensors(function, dtype=torch.float32):
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(torch.ones(4, dtype=dtype), torch.ones(4, dtype=dtype))


def python(code, *arguments, **options):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=environment, stdout=subprocess.PIPE, encoding="utf-8", **options
    )


def test_memory_then_disk_then_compiler(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fusedmoe.kernels.build.compiler")
    assert not compiler.is_cached(Toy())
    first = compiler.load(Toy())
    assert compiler.stats() == (1, 0, 1)
    assert caplog.messages[0].startswith("compiled toy_float32_1 in ")
    assert compiler.load(Toy()) is first
    assert compiler.is_cached(Toy())
    another_process(monkeypatch)
    second = compiler.load(Toy())
    assert compiler.stats() == (0, 1, 1)
    assert len(caplog.messages) == 1
    refuses_cpu_tensors(first)
    refuses_cpu_tensors(second)


@pytest.mark.slow  # processes that import torch
def test_other_processes(tmp_path):
    """Two at once: each finds what is there, and one of them compiles what is not, while the other one waits."""
    compiler.load(Toy())
    code = """
import json, os, sys, time
from pathlib import Path
import fusedmoe, fusedmoe.kernels.build.compiler, fusedmoe.kernels.build.shipped, fusedmoe.commands.compile
said = {"imported": [name for name in ("cutlass", "tvm_ffi") if name in sys.modules]}
from test_kernel_cache import Awaited, Toy, compiler, refuses_cpu_tensors
refuses_cpu_tensors(compiler.load(Toy()))
said["first"] = compiler.stats()
folder = Path(sys.argv[1])
(folder / f"ready-{os.getpid()}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.01)
compiler.load(Awaited(2, folder=sys.argv[1]))
print(json.dumps(said | {"both": compiler.stats()}))
"""
    processes = [python(code, str(tmp_path)) for _ in range(2)]
    said = [json.loads(process.communicate(timeout=90)[0]) for process in processes]
    assert [each["imported"] for each in said] == [[], []]  # the package alone imports no compiler
    assert [each["first"] for each in said] == [[0, 1, 1], [0, 1, 1]]
    assert sorted(each["both"] for each in said) == [[0, 2, 2], [1, 1, 2]]
    assert len(list(tmp_path.glob("compiled-by-*"))) == 1


def test_threads_compile_once():
    functions = []
    threads = [threading.Thread(target=lambda: functions.append(compiler.load(Toy()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.stats() == (1, 0, 1)
    assert functions == [functions[0]] * 4


def test_the_lock_of_a_dead_process_holds_nobody_up():
    place(Toy())._make_folder()
    code = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""
    with python(code, str(place(Toy()).lock_file)) as process:
        assert process.stdout.readline() == "locked\n"
        process.send_signal(signal.SIGKILL)
    begin = time.monotonic()
    compiler.load(Toy())
    assert time.monotonic() - begin < 30
    assert compiler.stats() == (1, 0, 1)


def test_a_lock_held_for_too_long_is_passed_by(monkeypatch, caplog):
    monkeypatch.setattr(cache, "PATIENCE_S", 0.1)
    caplog.set_level(logging.INFO)
    with place(Toy()).locked():
        compiler.load(Toy())
    assert "waiting for another process to compile toy_float32_1" in caplog.messages
    assert len(warnings(caplog)) == 1
    assert compiler.is_cached(Toy())


def test_a_file_system_without_locks(monkeypatch):
    import fcntl

    def flock(descriptor, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    compiler.load(Toy())
    assert compiler.is_cached(Toy())


def test_every_flipped_bit_is_noticed(monkeypatch, caplog):
    compiler.load(Toy())
    path = place(Toy()).object_file
    good = path.read_bytes()
    for position in (0, 100, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[position] ^= 4
        path.write_bytes(bad)
        with pytest.raises(cache.DamagedError, match="sha256"):
            place(Toy()).read()
    compiled_again(Toy(), monkeypatch, caplog, "sha256")
    assert path.read_bytes() == good


@pytest.mark.parametrize("size", [0, 1000])
def test_a_truncated_object(monkeypatch, caplog, size):
    compiler.load(Toy())
    os.truncate(place(Toy()).object_file, size)
    compiled_again(Toy(), monkeypatch, caplog, "sha256")


def test_a_missing_object(monkeypatch, caplog):
    compiler.load(Toy())
    place(Toy()).object_file.unlink()
    compiled_again(Toy(), monkeypatch, caplog, "no object")


def test_an_object_without_its_manifest_is_what_an_interrupted_process_leaves(monkeypatch, caplog):
    compiler.load(Toy())
    place(Toy()).manifest_file.unlink()
    another_process(monkeypatch)
    compiler.load(Toy())
    assert compiler.stats() == (1, 0, 1)
    assert warnings(caplog) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"sha256"', "\xff"], ids=repr)
def test_a_damaged_manifest(monkeypatch, caplog, text):
    compiler.load(Toy())
    place(Toy()).manifest_file.write_text(text, encoding="latin-1")
    compiled_again(Toy(), monkeypatch, caplog, "manifest")


@pytest.mark.parametrize("field", ["symbol", "key", "sha256"])
@pytest.mark.parametrize("value", ["0" * 64, None])
def test_a_manifest_that_says_something_else(monkeypatch, caplog, field, value):
    compiler.load(Toy())
    path = place(Toy()).manifest_file
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    compiled_again(Toy(), monkeypatch, caplog, f"{field} {value!r}")


def test_the_object_of_another_kernel(monkeypatch, caplog):
    for kernel in (Toy(1), Toy(2)):
        compiler.load(kernel)
    os.replace(place(Toy(2)).object_file, place(Toy(1)).object_file)
    compiled_again(Toy(1), monkeypatch, caplog, "sha256")


def test_the_whole_entry_of_another_kernel(monkeypatch, caplog):
    for kernel in (Toy(1), Toy(2)):
        compiler.load(kernel)
    os.replace(place(Toy(2)).object_file, place(Toy(1)).object_file)
    os.replace(place(Toy(2)).manifest_file, place(Toy(1)).manifest_file)
    compiled_again(Toy(1), monkeypatch, caplog, "symbol 'toy_float32_2'")


def test_a_file_that_everyone_may_write(monkeypatch, caplog):
    compiler.load(Toy())
    place(Toy()).object_file.chmod(0o666)
    compiled_again(Toy(), monkeypatch, caplog, "is writable by everyone")
    assert place(Toy()).object_file.stat().st_mode & 0o777 == 0o644


def test_a_link_and_a_pipe_are_no_entries(monkeypatch, caplog, tmp_path):
    compiler.load(Toy())
    path = place(Toy()).object_file
    os.replace(path, tmp_path / "elsewhere.o")
    path.symlink_to(tmp_path / "elsewhere.o")
    compiled_again(Toy(), monkeypatch, caplog, "cannot be opened")
    path.unlink()
    os.mkfifo(path)
    compiled_again(Toy(), monkeypatch, caplog, "is not a regular file")


NO_FILES = {
    "directory": lambda path: path.mkdir(),
    "directory with a file": lambda path: (path.mkdir(), (path / "a").touch()),
    "named pipe": os.mkfifo,
    "link to itself": lambda path: path.symlink_to(path),
    "dangling link": lambda path: path.symlink_to(path.with_name("nothing")),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "terabyte": lambda path: (path.touch(), os.truncate(path, 2**40)),
}


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize("part", ["manifest_file", "object_file"])
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_of_the_cache_is_never_read(monkeypatch, tmp_path, kind, part):
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    entry = cache.Entry(Path("."), "toy", "0" * 64)
    entry.write(b"an object", {})
    path = getattr(entry, part)
    path.unlink()
    NO_FILES[kind](path)
    with pytest.raises(cache.DamagedError, match=f"^{path.name} (is|cannot)"):
        entry.read()


def test_files_that_may_not_be_read(monkeypatch, tmp_path):
    entry = cache.Entry(tmp_path, "toy", "0" * 64)
    entry.write(b"an object", {})

    def refused(path, flags):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache.os, "open", refused)
    with pytest.raises(cache.DamagedError, match="cannot be opened \\(Permission denied\\)"):
        entry.read()


def test_a_file_that_fails_as_it_is_read(monkeypatch, tmp_path):
    """As on a network file system that has gone."""
    entry = cache.Entry(tmp_path, "toy", "0" * 64)
    entry.write(b"an object", {})

    def stale(descriptor):
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:  # pytest asks for the status of files too
        patch.setattr(cache.os, "fstat", stale)
        with pytest.raises(cache.DamagedError, match="cannot be read \\(Stale file handle\\)"):
            entry.read()


DAMAGED_JSON = {
    "deep list": b"[" * 200_000,
    "deep list, closed": b"[" * 200_000 + b"]" * 200_000,
    "deep object": b'{"a":' * 200_000,
    "deep value": b'{"symbol": ' + b"[" * 900 + b"]" * 900 + b"}",
    "long number": b'{"symbol": ' + b"9" * 10_000 + b"}",
    "infinite": b'{"symbol": 1e999}',
    "NaN": b'{"symbol": NaN}',
    "UTF-16": '{"symbol": "toy"}'.encode("utf-16"),
    "no UTF-8": b'{"symbol": "\xff\xfe"}',
    "zeros": bytes(1000),
    "types": b'{"symbol": {}, "key": [], "sha256": 1}',
    "long text": b'{"symbol": "' + b"a" * 1_000_000 + b'"}',
}


@pytest.mark.parametrize("kind", DAMAGED_JSON)
def test_a_manifest_that_says_anything_at_all(tmp_path, kind):
    entry = cache.Entry(tmp_path, "toy", "0" * 64)
    entry.write(b"an object", {})
    entry.manifest_file.write_bytes(DAMAGED_JSON[kind])
    with pytest.raises(cache.DamagedError, match="its manifest") as raised:
        entry.read()
    assert len(str(raised.value)) < 1000


def test_a_manifest_that_is_a_directory_is_compiled_past(monkeypatch, caplog):
    """It cannot be written either: every process compiles, and says both."""
    compiler.load(Toy())
    path = place(Toy()).manifest_file
    path.unlink()
    path.mkdir()
    another_process(monkeypatch)
    refuses_cpu_tensors(compiler.load(Toy()))
    assert compiler.stats() == (1, 0, 1)
    damaged, unwritten = warnings(caplog)
    assert f"{path.name} is not a regular file" in damaged
    assert "cannot write to" in unwritten


def test_a_manifest_nested_too_deeply_is_compiled_again(monkeypatch, caplog):
    compiler.load(Toy())
    place(Toy()).manifest_file.write_bytes(DAMAGED_JSON["deep list"])
    compiled_again(Toy(), monkeypatch, caplog, "manifest")


def memory_only(caplog, root, *words):
    """Load two kernels: both are compiled, one warning with these words, and no entry is written."""
    before = sorted(root.rglob("*")) if root.is_dir() else []
    for kernel in (Toy(1), Toy(2)):
        refuses_cpu_tensors(compiler.load(kernel))
    assert compiler.stats() == (2, 0, 2)
    assert compiler.load(Toy(1)) is compiler.load(Toy(1))
    assert not compiler.is_cached(Toy(1))
    (record,) = warnings(caplog)
    assert record.startswith("compiled kernels are kept in memory only: ")
    for word in words:
        assert word in record
    assert (sorted(root.rglob("*")) if root.is_dir() else []) == before


def test_a_directory_that_cannot_be_made(root, caplog):
    root.write_text("a file")
    memory_only(caplog, root, "cannot write to", str(root), cache.VARIABLE)


def test_a_full_disk(root, caplog, monkeypatch):
    def fsync(descriptor):
        raise OSError(28, "No space left on device")

    place(Toy())._make_folder()
    monkeypatch.setattr(cache.os, "fsync", fsync)
    for kernel in (Toy(1), Toy(2)):
        compiler.load(kernel)
    (record,) = warnings(caplog)
    assert "No space left on device" in record
    assert {path.suffix for path in root.rglob("*") if path.is_file()} == {".lock"}  # no temporary file is left


def test_a_user_without_a_home(monkeypatch, caplog, root):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.Path, "home", home)
    memory_only(caplog, root, "home directory", cache.VARIABLE)


@pytest.mark.parametrize("version", [False, True], ids=["the directory", "the version's folder"])
def test_a_directory_that_everyone_may_write_is_not_used(root, caplog, monkeypatch, version):
    compiler.load(Toy(1))  # so that there is something to be had
    another_process(monkeypatch)
    folder = root / fusedmoe.__version__ if version else root
    folder.chmod(0o777)
    memory_only(caplog, root, str(folder), "is writable by everyone", cache.VARIABLE)


@pytest.mark.parametrize("version", [False, True], ids=["the directory", "the version's folder"])
def test_a_directory_of_another_user_is_not_used(root, caplog, monkeypatch, version):
    compiler.load(Toy(1))
    another_process(monkeypatch)
    folder = root / fusedmoe.__version__ if version else root
    give_away(folder, monkeypatch)
    memory_only(caplog, root, "belongs to another user", cache.VARIABLE)


def test_a_file_of_another_user_is_not_used(monkeypatch, caplog):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    compiler.load(Toy())
    give_away(place(Toy()).object_file, monkeypatch)
    compiled_again(Toy(), monkeypatch, caplog, "belongs to another user (id 65534)")


def give_away(path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        others = os.geteuid() + 1
        monkeypatch.setattr(cache.os, "geteuid", lambda: others)


def test_what_root_built_is_used(monkeypatch, caplog):
    compiler.load(Toy())
    distrust = cache._distrust
    monkeypatch.setattr(cache, "_distrust", lambda status: distrust(os.stat_result((*status[:4], 0, *status[5:]))))
    monkeypatch.setattr(cache.os, "geteuid", lambda: 12345)
    another_process(monkeypatch)
    compiler.load(Toy())
    assert compiler.stats() == (0, 1, 1)
    assert warnings(caplog) == []


def test_a_wide_umask_makes_no_directory_that_is_refused(monkeypatch, root):
    before = os.umask(0)
    try:
        compiler.load(Toy())
    finally:
        os.umask(before)
    assert compiler.is_cached(Toy())
    assert all(not path.stat().st_mode & 0o022 for path in [root, *root.rglob("*")])


def test_which_directory(monkeypatch, tmp_path):
    home = Path(os.path.realpath(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    version = "1.2.3"
    for variable, xdg, expected in (
        (str(home / "here"), str(home / "xdg"), home / "here"),
        ("~/there", None, home / "there"),
        ("", str(home / "xdg"), home / "xdg" / "fusedmoe"),
        (None, str(home / "xdg"), home / "xdg" / "fusedmoe"),
        (None, "relative", home / ".cache" / "fusedmoe"),
        (None, "", home / ".cache" / "fusedmoe"),
        (None, None, home / ".cache" / "fusedmoe"),
    ):
        for name, value in ((cache.VARIABLE, variable), ("XDG_CACHE_HOME", xdg)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        assert cache.folder(version) == expected / version
    assert cache.folder(version, home / "given") == home / "given" / version


def test_switched_off(monkeypatch, root, caplog, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, "0")
    monkeypatch.chdir(tmp_path)
    refuses_cpu_tensors(compiler.load(Toy()))
    assert compiler.stats() == (1, 0, 1)
    assert not compiler.is_cached(Toy())
    assert warnings(caplog) == []
    with pytest.raises(cache.CacheUnusableError, match="FUSEDMOE_CACHE_DIR=0"):
        compiler.build(Toy())
    assert list(tmp_path.iterdir()) == []  # no directory called 0 either


def test_the_key_is_that_of_the_text_of_the_sources(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "toy_package" / "inner"
    package.mkdir(parents=True)
    files = [package.parent / "__init__.py", package / "__init__.py", package / "tiles.py", tmp_path / "toy_single.py"]
    for file in files:
        file.write_text("raise AssertionError('imported')\n")
    single, inner, whole = (Toy(sources=(n,)) for n in ("toy_single", "toy_package.inner.tiles", "toy_package"))
    before = [cache_key.key(kernel) for kernel in (single, inner, whole)]
    assert len(set(before)) == 3
    assert [cache_key.key(kernel) for kernel in (single, inner, whole)] == before
    with open(files[2], "a") as file:
        file.write("# one more line\n")
    after = [cache_key.key(kernel) for kernel in (single, inner, whole)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]
    assert "toy_package" not in sys.modules
    for missing in ("toy_package.outer", "toy_nothing", "toy_nothing.at_all"):
        with pytest.raises(ModuleNotFoundError, match=missing):
            cache_key.key(Toy(sources=(missing,)))


def test_a_changed_source_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "toy_source.py"
    kernel = Toy(sources=(__name__, "toy_source"))
    for text, expected in (("A = 1\n", (1, 0, 1)), ("A = 2\n", (1, 0, 1)), ("A = 1\n", (0, 1, 1))):
        source.write_text(text)
        another_process(monkeypatch)
        compiler.load(kernel)
        assert compiler.stats() == expected


def test_a_source_edited_after_it_was_imported_keeps_the_kernel_off_the_disk(root, tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "toy_edited.py"
    source.write_text("A = 1\n")
    monkeypatch.setitem(sys.modules, "toy_edited", None)
    del sys.modules["toy_edited"]
    __import__("toy_edited")
    source.write_text("A = 2\n")
    os.utime(source, ns=(time.time_ns(), cache_key._started_ns + 1))
    compiler.load(Toy(sources=("toy_edited",)))
    assert compiler.stats() == (1, 0, 1)
    assert "toy_edited.py was edited while this process runs" in warnings(caplog)[0]
    assert list(root.rglob("*.o")) == []


def test_what_else_the_key_holds(monkeypatch):
    def key(kernel=Toy()):
        cache_key.built_with.cache_clear()
        return cache_key.key(kernel)

    plain = key()
    assert key() == plain
    assert key(Toy(2)) != plain
    assert key(Toy(arch="sm_100a")) != plain
    for name in ("CUTE_DSL_LINEINFO", "CUTE_DSL_COMPILER_OPT", "CUTE_DSL_OF_A_LATER_VERSION"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            one = key()
            patch.setenv(name, "2")
            assert len({plain, one, key()}) == 3, name
    for name in ("CUTE_DSL_ARCH", "CUTE_DSL_KEEP", "CUTE_DSL_LOG_LEVEL", "CUTE_DSL_LIBS", "PATH"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert key() == plain, name
    for attribute, stand_in in (
        ("_version", lambda name: "1" if name == "apache-tvm-ffi" else cache_key.metadata.version("torch")),
        ("_cpu", lambda: "x86_64 avx512f"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cache_key, attribute, stand_in)
            assert key() != plain, attribute
    with monkeypatch.context() as patch:
        patch.setattr(cutlass, "CUDA_VERSION", "13.0")
        assert key() != plain
    with monkeypatch.context() as patch:
        patch.setattr(cache_key, "__version__", "9.9.9")
        assert key() != plain


def test_the_manifest_says_what_the_object_was_built_with():
    compiler.load(Toy())
    manifest = json.loads(place(Toy()).manifest_file.read_text())
    assert manifest["key"] == cache_key.key(Toy())
    assert manifest["built_with"]["fusedmoe"] == fusedmoe.__version__
    assert manifest["built_with"]["nvidia-cutlass-dsl"] == cache_key.metadata.version("nvidia-cutlass-dsl")
    assert cache_key.platform.machine() in manifest["built_with"]["CPU"]


def test_symbols():
    compiler.load(Toy(1))
    with pytest.raises(ValueError, match="two kernels have the symbol 'toy_float32_1'"):
        compiler.load(Awaited(1))
    for symbol in ("../toy", "1toy", "", "toy-1", "x" * 201, "toy\n"):
        with pytest.raises(ValueError, match="is not a C identifier"):
            compiler.load(Broken(symbol=symbol))


def test_a_kernel_that_does_not_compile_leaves_nothing_behind(root):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such instruction"):
            compiler.load(Broken())
    assert {path.suffix for path in root.rglob("*") if path.is_file()} == {".lock"}
    assert compiler.stats() == (0, 0, 0)


@pytest.fixture
def ships(monkeypatch):
    def ship(*kernels):
        monkeypatch.setattr(shipped, "shipped", lambda arch: kernels)

    return ship


def lines(capsys):
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err.splitlines()


def test_the_shipped_list():
    assert isinstance(shipped.shipped("sm_90a"), tuple)
    for kernel in shipped.shipped("sm_90a"):
        assert pickle.loads(pickle.dumps(kernel)) == kernel
    with pytest.raises(fusedmoe.InputError, match="'sm_80': expected one of sm_90a, sm_100a, sm_103a"):
        shipped.shipped("sm_80")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_the_shipped_list_for_blackwell(arch):
    kernels = shipped.shipped(arch)
    assert {kernel.arch for kernel in kernels} == {arch}
    symbols = [kernel.symbol for kernel in kernels]
    assert len(set(symbols)) == len(symbols)
    family = arch.removesuffix("a").replace("_", "")  # as GPUs of both may be in one machine
    assert {symbol.partition("_")[0] for symbol in symbols} == {family}
    of_hopper = {kernel.symbol for kernel in shipped.shipped("sm_90a")}
    # of nvfp4, and of bf16, whose activations and tails products of Hopper compute
    others = "quantize_packed", "e2m1", "magnitudes", "zero_tail", "_again"
    moving = [s for s in symbols if not any(name in s for name in others)]
    ours = {symbol.replace(family, "sm90") for symbol in moving}
    assert ours <= of_hopper
    assert {symbol.partition("_")[2] for symbol in symbols} >= {
        "offsets_int64", "quantize_packed_bf16_rows_columns", "quantize_packed_bf16_rows_columns_gathered",
        "quantize_packed_format_bf16_e2m1_two_level_16_rows_columns_sorted_rotated_stochastic",
        "magnitudes_bf16_experts_experts_rotated_sorted", "gather_rows_bf16", "sum_slots_by_8_bf16",
        "row_dots_bf16_fp32", "slot_values_fp32", "column_sums_bf16_bf16",
        "zero_tail_bf16", "activate_swiglu_bf16_scaled_fp32", "activate_backward_swiglu_bf16_scaled_fp32_sums_again",
    }  # fmt: skip


@pytest.mark.parametrize("arch", ["sm_100a", "103"])
def test_the_kernels_for_blackwell_are_built_and_those_of_nvidia_named(arch, root, capsys):
    number = "".join(filter(str.isdigit, arch))
    wanted = ["--arch", arch, "--only", f"sm{number}_slot_values_*", "--jobs", "1"]
    first = f"sm{number}_slot_values_fp32"
    assert main(["compile", *wanted]) == 0
    out, _ = lines(capsys)
    assert out[0].startswith(f"{first}  compiled")
    assert out[-2].startswith(f"2 kernels for sm_{number}a in ")
    assert out[-1] == shipped.BLACKWELL
    assert main(["compile", *wanted, "--list"]) == 0
    assert lines(capsys)[0] == [f"{first}  cached", f"sm{number}_slot_values_bf16  cached", shipped.BLACKWELL]
    assert main(["compile", "--list", "--only", "sm90_slot_values_*"]) == 0
    assert lines(capsys)[0] == ["sm90_slot_values_fp32  not cached", "sm90_slot_values_bf16  not cached"]


def test_patterns_in_the_help_and_the_pages_match_shipped_kernels(capsys):
    with pytest.raises(SystemExit):
        main(["compile", "--help"])
    pages = [path.read_text("utf-8") for path in (Path(__file__).parents[2] / "docs").rglob("*.md")]
    patterns = re.findall(r"'(sm90_\w*\*\w*)'", "".join([capsys.readouterr().out, *pages]))
    assert len(patterns) >= 2
    symbols = [kernel.symbol for kernel in shipped.shipped("sm_90a")]
    assert [pattern for pattern in patterns if not fnmatch.filter(symbols, pattern)] == []


@pytest.mark.parametrize("arch", ["90", "sm_90", "SM_90a", "sm_90a"])
def test_an_architecture_is_named_as_for_explain(arch, capsys):
    assert main(["compile", "--list", "--arch", arch, "--only", "sm90_offsets*"]) == 0
    assert lines(capsys)[0][0].startswith("sm90_offsets")


@pytest.mark.parametrize(("arch", "message"), [
    ("80", "arch 'sm_80a': expected one of sm_90a, sm_100a, sm_103a"),
    ("h100", "--arch: expected a number such as 90, for sm_90 (H100, H200), got 'h100'"),
])  # fmt: skip
def test_an_architecture_without_kernels_is_refused(arch, message, capsys):
    with pytest.raises(SystemExit):
        main(["compile", "--arch", arch])
    assert message in lines(capsys)[1][0]


def test_compile_command(ships, capsys, monkeypatch):
    ships(Toy(1), Toy(2))
    assert main(["compile", "--list"]) == 0
    assert lines(capsys) == (["toy_float32_1  not cached", "toy_float32_2  not cached"], [])
    assert main(["compile", "--jobs", "1", "--only", "*_1"]) == 0
    out, err = lines(capsys)
    assert out[0].startswith("toy_float32_1  compiled")
    assert out[1].startswith(f"1 kernel for sm_90a in {place(Toy()).folder}: 1 compiled; ")
    assert [line.partition(",")[0] for line in err] == ["1/1 kernels"]
    assert main(["compile", "--list"]) == 0
    assert lines(capsys)[0] == ["toy_float32_1  cached", "toy_float32_2  not cached"]
    assert main(["compile", "--jobs", "1"]) == 0
    out, _ = lines(capsys)
    assert out[0] == "toy_float32_1  already cached"
    assert "2 kernels" in out[2]
    assert "1 compiled, 1 already cached; " in out[2]
    another_process(monkeypatch)
    compiler.load(Toy(1))
    compiler.load(Toy(2))
    assert compiler.stats() == (0, 2, 2)


def test_compile_command_into_another_directory(ships, capsys, tmp_path, root):
    ships(Toy(1))
    assert main(["compile", "--jobs", "1", "--cache-dir", str(tmp_path / "image")]) == 0
    assert compiler.is_cached(Toy(1), tmp_path / "image")
    assert not root.exists()


@pytest.mark.slow  # test_other_processes and test_compile_command have its parts
def test_compile_command_in_several_processes(ships, capsys):
    """One kernel does not compile, one takes the compiler's process along: the third is built all the same."""
    ships(Deadly(survivor=os.getpid()), Broken(), Toy(1))
    assert main(["compile", "--jobs", "2"]) == 1
    out, err = lines(capsys)
    assert sorted(line.split()[:2] for line in out[:3]) == [
        ["toy_broken", "FAILED"],
        ["toy_deadly", "FAILED"],
        ["toy_float32_1", "compiled"],
    ]
    assert "1 compiled, 2 failed; " in out[3]
    assert [line.partition(",")[0] for line in err[:3]] == ["1/3 kernels", "2/3 kernels", "3/3 kernels"]
    assert sorted(err[3:]) == [
        "fusedmoe compile: error: toy_broken: RuntimeError: no such instruction",
        "fusedmoe compile: error: toy_deadly: the process that compiled it died; is there enough memory?",
    ]
    assert compiler.is_cached(Toy(1))


def test_compile_command_says_what_is_wrong(ships, capsys, root, monkeypatch):
    ships()
    assert main(["compile"]) == 0
    assert lines(capsys)[0] == [f"fusedmoe {fusedmoe.__version__} ships no kernels for sm_90a"]
    ships(Toy())
    for arguments, message in (
        (["--only", "nothing*"], "--only nothing*: no kernel's name matches"),
        (["--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--cache-dir", ""], "--cache-dir: expected a directory, got an empty name"),
        (["--lst"], "did you mean --list?"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["compile", *arguments])
        assert caught.value.code == 2
        out, err = lines(capsys)
        assert out == []
        assert message in "".join(err)
    monkeypatch.setenv(cache.VARIABLE, "0")
    assert main(["compile"]) == 1
    assert "FUSEDMOE_CACHE_DIR=0 switches the cache off; add --cache-dir" in lines(capsys)[1][0]
    monkeypatch.setenv(cache.VARIABLE, str(root))
    root.write_text("a file")
    assert main(["compile", "--jobs", "1"]) == 1
    assert f"toy_float32_1: cannot write to {place(Toy()).folder} (File exists)" in "".join(lines(capsys)[1])
    assert compiler.stats().compiled == 0  # found out first
    root.unlink()
    root.mkdir()
    root.chmod(0o777)
    assert main(["compile", "--jobs", "1"]) == 1
    assert "is writable by everyone" in "".join(lines(capsys)[1])
