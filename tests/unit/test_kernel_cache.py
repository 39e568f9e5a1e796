"""Compiled kernels: from memory, from the cache on disk, or compiled; and never from a file that is not theirs.

A function that came from an object file refuses tensors that are not on a GPU, naming the argument: that it does so
shows, without a GPU, which kernel it is.
"""

import functools
import json
import logging
import os
import pickle
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kit.kept import kept

import fusedmoe
from fusedmoe.commands.main import main
from fusedmoe.kernels.build import cache, cache_key, compiler, shipped

pytest.importorskip("cutlass")

import cutlass

from fusedmoe.kernels.rows.move.slots import SlotValues

KERNEL = SlotValues("fp32")


@functools.cache
def object_of(symbol):
    """The object file of some kernel, with a function of this name; compiled once for all tests."""

    def compile_():
        with tempfile.TemporaryDirectory() as folder:
            KERNEL.compile().export_to_c(object_file_path=f"{folder}/toy.o", function_name=symbol)
            return Path(folder, "toy.o").read_bytes()

    return kept(["object", symbol, cache_key.key(KERNEL)], compile_)


@dataclass(frozen=True)
class Toy:
    """A kernel that takes no time to compile."""

    number: int = 1
    sources: tuple[str, ...] = (__name__,)
    arch: str = "sm_90a"

    @property
    def symbol(self):
        return f"toy_{self.number}"

    def compile(self):
        return self

    def export_to_c(self, object_file_path, function_name):
        Path(object_file_path).write_bytes(object_of(function_name))


@dataclass(frozen=True)
class Broken(Toy):
    symbol: str = "toy_broken"

    def compile(self):
        raise RuntimeError("no such instruction")


@dataclass(frozen=True)
class Deadly(Toy):
    """Ends its process, unless it is the test's own."""

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


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def refuses_cpu_tensors(function):
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        function(torch.ones(4), torch.ones(4, dtype=torch.int64), torch.ones(4))


# ---- where a kernel comes from


def test_memory_then_disk_then_compiler(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "fusedmoe.kernels.build.compiler")
    assert not compiler.is_cached(Toy())
    first = compiler.load(Toy())
    assert compiler.stats() == (1, 0, 1)
    assert caplog.messages[0].startswith("compiled toy_1 in ")
    assert compiler.load(Toy()) is first
    assert compiler.is_cached(Toy())
    another_process(monkeypatch)
    second = compiler.load(Toy())
    assert compiler.stats() == (0, 1, 1)
    assert len(caplog.messages) == 1
    refuses_cpu_tensors(first)
    refuses_cpu_tensors(second)
    manifest = json.loads(place(Toy()).manifest_file.read_text())
    assert manifest["key"] == cache_key.key(Toy())
    assert manifest["built_with"]["fusedmoe"] == fusedmoe.__version__
    assert cache_key.platform.machine() in manifest["built_with"]["CPU"]


def test_threads_compile_once():
    functions = []
    threads = [threading.Thread(target=lambda: functions.append(compiler.load(Toy()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.stats() == (1, 0, 1)
    assert functions == [functions[0]] * 4


def test_the_lock_file_of_a_dead_process_holds_nobody_up(monkeypatch, caplog):
    monkeypatch.setattr(cache, "PATIENCE_S", 0.1)
    place(Toy())._make_folder()
    place(Toy()).lock_file.touch()
    compiler.load(Toy())
    assert warnings(caplog) == []


def test_a_lock_held_for_too_long_is_passed_by(monkeypatch, caplog):
    monkeypatch.setattr(cache, "PATIENCE_S", 0.1)
    caplog.set_level(logging.INFO)
    with place(Toy()).locked():
        compiler.load(Toy())
    assert "waiting for another process to compile toy_1" in caplog.messages
    assert len(warnings(caplog)) == 1
    assert compiler.is_cached(Toy())


def failing(number, message):
    def fails(*arguments):
        raise OSError(number, message)

    return fails


def test_a_file_system_without_locks(monkeypatch):
    object_of(Toy().symbol)  # which takes a lock of its own
    monkeypatch.setattr("fcntl.flock", failing(95, "Operation not supported"))
    compiler.load(Toy())
    assert compiler.is_cached(Toy())


def test_a_network_file_system_that_has_gone(monkeypatch):
    compiler.load(Toy())
    with monkeypatch.context() as patch:  # pytest opens files too
        patch.setattr(cache.os, "fstat", failing(116, "Stale file handle"))
        with pytest.raises(cache.DamagedError, match="cannot be read"):
            place(Toy()).read()


def test_symbols():
    compiler.load(Toy(1))
    with pytest.raises(ValueError, match="two kernels have the symbol 'toy_1'"):
        compiler.load(Toy(1, arch="sm_100a"))
    for symbol in ("../toy", "1toy", "", "toy-1", "x" * 201, "toy\n"):
        with pytest.raises(ValueError, match="is not a C identifier"):
            compiler.load(Broken(symbol=symbol))


def test_a_kernel_that_does_not_compile_leaves_nothing_behind(root):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such instruction"):
            compiler.load(Broken())
    assert {path.suffix for path in root.rglob("*") if path.is_file()} == {".lock"}
    assert compiler.stats() == (0, 0, 0)


# ---- entries that are damaged or not trusted


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


def other_manifest(**fields):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def link(path):
    os.replace(path, path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def give_away(path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        others = os.geteuid() + 1
        monkeypatch.setattr(cache.os, "geteuid", lambda: others)


def replaced(make):
    return lambda path: (path.unlink(), make(path))


NO_FILES = {
    "directory": (replaced(Path.mkdir), "is not a regular file"),
    "pipe": (replaced(os.mkfifo), "is not a regular file"),
    "link": (link, "cannot be opened"),
    "terabyte": (lambda path: os.truncate(path, 2**40), "is larger than"),
    "writable by everyone": (lambda path: path.chmod(0o666), "is writable by everyone"),
}
OBJECTS = {
    "first bit": (lambda path: flip(path, 0), "sha256"),
    "last bit": (lambda path: flip(path, -1), "sha256"),
    "3 bytes": (lambda path: os.truncate(path, 3), "sha256"),
    "missing": (Path.unlink, "no object"),
}
TEXTS = [b"", b"[]", b"\xff", b"[" * 200_000, b'{"symbol": ' + b"9" * 10_000 + b"}", b'{"symbol": NaN}',
         b'{"symbol": {}, "key": [], "sha256": 1}', b'{"symbol": "' + b"a" * 1_000_000 + b'"}']  # fmt: skip
MANIFESTS = {
    **{f"text {i}": (lambda path, text=text: path.write_bytes(text), "its manifest") for i, text in enumerate(TEXTS)},
    **{f"{name} {value}": (other_manifest(**{name: value}), f"its manifest has {name} {value!r}")
       for name in ("symbol", "key", "sha256") for value in ("0" * 64, None)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "damage", "message"),
    [
        pytest.param(part, *case, id=f"{part}-{name}")
        for part, cases in (("object_file", NO_FILES | OBJECTS), ("manifest_file", NO_FILES | MANIFESTS))
        for name, case in cases.items()
    ],
)
def test_a_damaged_entry_is_never_used(part, damage, message, tmp_path):
    entry = cache.Entry(tmp_path, "toy", "0" * 63 + "1")
    entry.write(b"an object", {})
    assert entry.read() == b"an object"
    damage(getattr(entry, part))
    with pytest.raises(cache.DamagedError, match=message) as raised:
        entry.read()
    assert len(str(raised.value)) < 1000


def test_a_damaged_entry_is_compiled_again(monkeypatch, caplog):
    """The files of another kernel: once, with a warning, and the entry is whole."""
    compiler.load(Toy(1))
    compiler.load(Toy(2))
    good = place(Toy(1)).object_file.read_bytes()
    for part in ("object_file", "manifest_file"):
        os.replace(getattr(place(Toy(2)), part), getattr(place(Toy(1)), part))
    another_process(monkeypatch)
    assert not compiler.is_cached(Toy(1))
    refuses_cpu_tensors(compiler.load(Toy(1)))
    assert compiler.stats() == (1, 0, 1)
    (record,) = warnings(caplog)
    assert str(place(Toy(1)).object_file) in record
    assert "symbol 'toy_2'" in record
    another_process(monkeypatch)
    compiler.load(Toy(1))
    assert compiler.stats() == (0, 1, 1)
    assert place(Toy(1)).object_file.read_bytes() == good
    assert place(Toy(1)).object_file.stat().st_mode & 0o777 == 0o644


def test_an_object_without_its_manifest_is_what_an_interrupted_process_leaves(monkeypatch, caplog):
    compiler.load(Toy())
    place(Toy()).manifest_file.unlink()
    another_process(monkeypatch)
    compiler.load(Toy())
    assert compiler.stats() == (1, 0, 1)
    assert warnings(caplog) == []


# ---- directories


def version_folder(root):
    return root / fusedmoe.__version__


def no_home(root, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.Path, "home", home)


@pytest.mark.parametrize(
    ("exists", "spoil", "words"),
    [
        (False, lambda root, monkeypatch: root.write_text("a file"), ("cannot write to", "cache")),
        (False, no_home, ("home directory",)),
        (True, lambda root, monkeypatch: root.chmod(0o777), ("is writable by everyone",)),
        (True, lambda root, monkeypatch: version_folder(root).chmod(0o777), (fusedmoe.__version__, "by everyone")),
        (True, give_away, ("belongs to another user",)),
        (True, lambda root, monkeypatch: give_away(version_folder(root), monkeypatch), ("belongs to another user",)),
    ],
    ids=["a file", "no home", "writable", "writable version", "another user", "version of another user"],
)
def test_a_directory_that_is_not_used(exists, spoil, words, root, monkeypatch, caplog):
    """Kernels are kept in memory, with one warning, and no entry is written."""
    if exists:
        compiler.load(Toy(1))
        another_process(monkeypatch)
    spoil(root, monkeypatch)
    before = sorted(root.rglob("*")) if root.is_dir() else []
    for kernel in (Toy(1), Toy(2)):
        refuses_cpu_tensors(compiler.load(kernel))
    assert compiler.stats() == (2, 0, 2)
    assert compiler.load(Toy(1)) is compiler.load(Toy(1))
    assert not compiler.is_cached(Toy(1))
    (record,) = warnings(caplog)
    assert record.startswith("compiled kernels are kept in memory only: ")
    assert all(word in record for word in (*words, cache.VARIABLE))
    assert (sorted(root.rglob("*")) if root.is_dir() else []) == before


def test_a_full_disk(root, caplog, monkeypatch):
    place(Toy())._make_folder()
    monkeypatch.setattr(cache.os, "fsync", failing(28, "No space left on device"))
    for kernel in (Toy(1), Toy(2)):
        compiler.load(kernel)
    (record,) = warnings(caplog)
    assert "No space left on device" in record
    assert {path.suffix for path in root.rglob("*") if path.is_file()} == {".lock"}  # no temporary file is left


def test_what_root_built_is_used(monkeypatch, caplog):
    compiler.load(Toy())
    distrust = cache._distrust
    monkeypatch.setattr(cache, "_distrust", lambda status: distrust(os.stat_result((*status[:4], 0, *status[5:]))))
    monkeypatch.setattr(cache.os, "geteuid", lambda: 12345)
    another_process(monkeypatch)
    compiler.load(Toy())
    assert compiler.stats() == (0, 1, 1)
    assert warnings(caplog) == []


def test_a_wide_umask_makes_no_directory_that_is_refused(root):
    before = os.umask(0)
    try:
        compiler.load(Toy())
    finally:
        os.umask(before)
    assert compiler.is_cached(Toy())
    assert all(not path.stat().st_mode & 0o022 for path in [root, *root.rglob("*")])


@pytest.mark.parametrize(
    ("variable", "xdg", "expected"),
    [
        ("{home}/here", "{home}/xdg", "here"),
        ("~/there", None, "there"),
        ("", "{home}/xdg", "xdg/fusedmoe"),
        (None, "{home}/xdg", "xdg/fusedmoe"),
        (None, "relative", ".cache/fusedmoe"),
        (None, None, ".cache/fusedmoe"),
    ],
)
def test_which_directory(variable, xdg, expected, monkeypatch, tmp_path):
    home = Path(os.path.realpath(tmp_path))
    monkeypatch.setenv("HOME", str(home))
    for name, value in ((cache.VARIABLE, variable), ("XDG_CACHE_HOME", xdg)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value.format(home=home))
    assert cache.folder("1.2.3") == home / expected / "1.2.3"
    assert cache.folder("1.2.3", home / "given") == home / "given" / "1.2.3"


def test_switched_off(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, "0")
    monkeypatch.chdir(tmp_path)
    refuses_cpu_tensors(compiler.load(Toy()))
    assert compiler.stats() == (1, 0, 1)
    assert not compiler.is_cached(Toy())
    assert warnings(caplog) == []
    with pytest.raises(cache.CacheUnusableError, match="FUSEDMOE_CACHE_DIR=0"):
        compiler.build(Toy())
    assert list(tmp_path.iterdir()) == []  # no directory called 0 either


# ---- the key of an entry


def test_the_key_is_that_of_the_text_of_the_sources(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "toy_package" / "inner"
    package.mkdir(parents=True)
    files = [package.parent / "__init__.py", package / "__init__.py", package / "tiles.py", tmp_path / "toy_single.py"]
    for file in files:
        file.write_text("raise AssertionError('imported')\n")
    kernels = [Toy(sources=(n,)) for n in ("toy_single", "toy_package.inner.tiles", "toy_package")]
    before = [cache_key.key(kernel) for kernel in kernels]
    assert len(set(before)) == 3
    assert [cache_key.key(kernel) for kernel in kernels] == before
    with open(files[2], "a") as file:
        file.write("# one more line\n")
    after = [cache_key.key(kernel) for kernel in kernels]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, False]
    assert "toy_package" not in sys.modules
    for missing in ("toy_package.outer", "toy_nothing", "toy_nothing.at_all"):
        with pytest.raises(ModuleNotFoundError, match=missing):
            cache_key.key(Toy(sources=(missing,)))


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
    def key(kernel=Toy(), **variables):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            cache_key.built_with.cache_clear()
            return cache_key.key(kernel)

    plain = key()
    assert key() == plain
    assert plain not in (key(Toy(2)), key(Toy(arch="sm_100a")))
    for name in ("CUTE_DSL_LINEINFO", "CUTE_DSL_COMPILER_OPT", "CUTE_DSL_OF_A_LATER_VERSION"):
        assert len({plain, key(**{name: "1"}), key(**{name: "2"})}) == 3, name
    for name in ("CUTE_DSL_ARCH", "CUTE_DSL_KEEP", "CUTE_DSL_LOG_LEVEL", "CUTE_DSL_LIBS", "PATH"):
        assert key(**{name: "1"}) == plain, name
    version = cache_key._version
    for owner, attribute, stand_in in (
        (cache_key, "_version", lambda name: "1" if name == "apache-tvm-ffi" else version(name)),
        (cache_key, "_cpu", lambda: "x86_64 avx512f"),
        (cache_key, "__version__", "9.9.9"),
        (cutlass, "CUDA_VERSION", "13.0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, stand_in)
            assert key() != plain, attribute


# ---- `fusedmoe compile`, and the list of those that are built ahead of time


@pytest.fixture
def ships(monkeypatch):
    return lambda *kernels: monkeypatch.setattr(shipped, "shipped", lambda arch: kernels)


def lines(capsys):
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err.splitlines()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_the_shipped_list(arch, capsys):
    """The command names the kernels of NVIDIA for Blackwell too."""
    assert main(["compile", "--list", "--arch", arch, "--only", "*_slot_values_fp32"]) == 0
    assert lines(capsys)[0][1:] == ([] if arch == "sm_90a" else [shipped.BLACKWELL])
    kernels = shipped.shipped(arch)
    assert len({kernel.symbol for kernel in kernels}) == len(kernels) > 50
    # architectures differ in symbols too, as GPUs of both may be in one machine
    family = arch.removesuffix("a").replace("_", "")
    assert {(kernel.arch, kernel.symbol.partition("_")[0]) for kernel in kernels} == {(arch, family)}
    assert [*pickle.loads(pickle.dumps(kernels))] == [*kernels]
    with pytest.raises(fusedmoe.InputError, match="'sm_80': expected one of sm_90a, sm_100a, sm_103a"):
        shipped.shipped("sm_80")


def test_compile_command(ships, capsys, monkeypatch, tmp_path, root):
    ships(Toy(1), Toy(2))
    assert main(["compile", "--list"]) == 0
    assert lines(capsys) == (["toy_1  not cached", "toy_2  not cached"], [])
    assert main(["compile", "--jobs", "1", "--cache-dir", str(tmp_path / "image")]) == 0
    assert compiler.is_cached(Toy(1), tmp_path / "image")
    assert not root.exists()
    capsys.readouterr()
    assert main(["compile", "--jobs", "1", "--only", "*_1"]) == 0
    out, err = lines(capsys)
    assert out[0].startswith("toy_1  compiled")
    assert out[1].startswith(f"1 kernel for sm_90a in {place(Toy()).folder}: 1 compiled; ")
    assert [line.partition(",")[0] for line in err] == ["1/1 kernels"]
    assert main(["compile", "--list"]) == 0
    assert lines(capsys)[0] == ["toy_1  cached", "toy_2  not cached"]
    assert main(["compile", "--jobs", "1"]) == 0
    out, _ = lines(capsys)
    assert out[0] == "toy_1  already cached"
    assert "2 kernels" in out[2]
    assert "1 compiled, 1 already cached; " in out[2]
    another_process(monkeypatch)
    compiler.load(Toy(1))
    compiler.load(Toy(2))
    assert compiler.stats() == (0, 2, 2)


@pytest.mark.slow  # test_compile_command has its parts
def test_compile_command_in_several_processes(ships, capsys):
    """One kernel does not compile, and one ends the compiler's process: the third is built all the same."""
    ships(Deadly(survivor=os.getpid()), Broken(), Toy(1))
    assert main(["compile", "--jobs", "2"]) == 1
    out, err = lines(capsys)
    assert "1 compiled, 2 failed; " in out[3]
    assert sorted(err[3:]) == [
        "fusedmoe compile: error: toy_broken: RuntimeError: no such instruction",
        "fusedmoe compile: error: toy_deadly: the process that compiled it died; is there enough memory?",
    ]
    assert compiler.is_cached(Toy(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing*"], "--only nothing*: no kernel's name matches"),
        (["--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--cache-dir", ""], "--cache-dir: expected a directory, got an empty name"),
        (["--lst"], "did you mean --list?"),
        (["--arch", "h100"], "--arch: expected a number such as 90, for sm_90 (H100, H200), got 'h100'"),
    ],
)
def test_compile_command_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["compile", *arguments])
    assert caught.value.code == 2
    out, err = lines(capsys)
    assert out == []
    assert message in "".join(err)


def test_compile_command_without_a_usable_directory(ships, capsys, root, monkeypatch):
    ships()
    assert main(["compile"]) == 0
    assert lines(capsys)[0] == [f"fusedmoe {fusedmoe.__version__} ships no kernels for sm_90a"]
    ships(Toy())
    monkeypatch.setenv(cache.VARIABLE, "0")
    assert main(["compile"]) == 1
    assert "FUSEDMOE_CACHE_DIR=0 switches the cache off; add --cache-dir" in lines(capsys)[1][0]
    monkeypatch.setenv(cache.VARIABLE, str(root))
    root.write_text("a file")
    assert main(["compile", "--jobs", "1"]) == 1
    assert f"toy_1: cannot write to {place(Toy()).folder} (File exists)" in "".join(lines(capsys)[1])
    assert compiler.stats().compiled == 0  # found out first
