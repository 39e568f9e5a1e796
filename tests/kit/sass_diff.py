"""Compare the machine code (SASS) of the shipped kernels at a revision with that of the working tree.

    make sass-diff BASE=main ARGS='--only sm90_ragged_k_*'

A change that only moves or restructures code of kernels should not change what the GPU runs. If this tool finds no
difference, the change needs no run on a GPU. The exit status is 0 without a difference, 1 with one, and 2 if the
comparison was not possible.

**What is compared.** Two kernels are a pair if their architecture and their symbol are the same. Compared are:

- the encodings of all instructions, with scheduling control bits, byte by byte. They contain no names, and branches are
  relative to their own address, so names and labels do not matter;
- the other sections of the cubin: constants, shared memory, relocations, and the attributes with which the driver
  launches the kernel, such as registers and the stack. Functions are numbered instead of named in the names of
  sections. Symbol tables and debug information are left out;
- the host code of the launch, since it determines the grid, the cluster, shared memory and the tensor maps. It is
  compared as the CuTe DSL traces it (MLIR), without names of functions. So equivalent host code may be reported.

Not compared are the checks of arguments that the DSL adds to the host code, the Python code that chooses and calls
kernels, and kernels that are not shipped.

**How each side is compiled.** Both sides are trees of git: ``BASE:fusedmoe``, and the tree of the files that git tracks
or would add now. Each is extracted, and compiled in worker processes that import it.

**What is kept.** Tracing a kernel gives MLIR, which determines the machine code together with the options and the
compiler. So a kernel whose MLIR was compiled before, at any revision, is traced only. The results are in
``sass_diff/<compiler>/`` in fusedmoe's cache directory:

    trees/<hash of the tree>-<architecture>.json    the symbol of each kernel, with the hash of its MLIR
    kernels/<hash of the MLIR>.zip                  the cubin, and the host code of the launch

The hash of a tree is that of its content. So a revision is compiled once, and all commits with the same ``fusedmoe/``
share the result. Neither the CPU nor the place of the files matters. ``--fresh`` does without the cache.
"""

import argparse
import concurrent.futures
import contextlib
import fnmatch
import functools
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = "fusedmoe"
SHIPPED = "fusedmoe.kernels.build.shipped"  # the module that has `shipped(arch)`
ARCHES = ("sm_90a", "sm_100a")
FORMAT = 1  # of the cache; a change of what is kept or hashed changes it
COMPILERS = (  # distributions whose versions determine machine code; ptxas is part of the last two
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)
OLD_SECONDS = 60 * 24 * 3600  # after which a file of the cache is removed
SIDES = ("in base", "here")
PROGRESS = 50  # kernels between lines
INSTRUCTION_BYTES = 16
WITHOUT_EFFECT = (".shstrtab", ".strtab", ".symtab", ".debug", ".rela.debug", ".rel.debug", ".note")  # sections

DEVICE = re.compile(r"\bcuda\.kernel @([\w.$]+)")  # the definition of a function in MLIR
HOST = re.compile(r"\bfunc\.func (?:private |public )?@([\w.$]+)")


class UnableError(Exception):
    """The comparison is not possible; the message has the reason and a remedy."""


# -- machine code


class Section(NamedTuple):
    """A section of a cubin; ``data`` is empty if the section takes no space in the file, such as shared memory."""

    type: int
    flags: int
    size: int
    data: bytes


@dataclass(frozen=True)
class Code:
    """What a kernel is compiled to: a cubin, the names of its functions in the order of the MLIR, and the host code of
    the launches as text.
    """

    cubin: bytes
    functions: tuple[str, ...]
    launch: str

    @functools.cached_property
    def sections(self):
        """The sections that matter, by name with the number of a function instead of its name."""
        return comparable(sections(self.cubin), self.functions)

    def encodings(self, number):
        """The instructions of a function."""
        code = self.sections[f".text.{number}"].data
        return [code[at : at + INSTRUCTION_BYTES] for at in range(0, len(code), INSTRUCTION_BYTES)]


def sections(cubin):
    """Return the sections of a 64-bit ELF file by name, in their order."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"a cubin begins with {cubin[:5]!r}: expected a 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + size * i) for i in range(count)]
    names = headers[of_names][4]
    found = {}
    for name, type_, flags, _, offset, length in headers:
        key = cubin[names + name : cubin.index(b"\0", names + name)].decode()
        in_file = type_ not in (0, 8)  # SHT_NULL and SHT_NOBITS
        found[key] = Section(type_, flags, length, cubin[offset : offset + length] if in_file else b"")
    return found


def comparable(all_sections, functions):
    """Return the sections without symbol tables and debug information, by name with the number of a function instead of
    its name.
    """
    compiled = [name.removeprefix(".text.") for name in all_sections if name.startswith(".text.")]
    if sorted(compiled) != sorted(functions):
        raise ValueError(f"a cubin has the functions {compiled}: expected {list(functions)}")
    found = {}
    for name, section in all_sections.items():
        if name and not name.removeprefix(".nv.merc").startswith(WITHOUT_EFFECT):  # .nv.merc: for another form of code
            for number, function in enumerate(functions):
                if name.endswith(f".{function}"):
                    name = f"{name.removesuffix(function)}{number}"
                    break
            found[name] = section
    return found


def first_difference(one, other):
    """Return the first place where two sequences differ; the end of the shorter one counts. None if they are equal."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


@dataclass(frozen=True)
class Difference:
    """Where two versions of a kernel differ."""

    instructions: dict[int, int]  # the first one of each function that differs, by the number of the function
    sections: tuple[str, ...]  # beside the instructions
    launch: bool  # the host code

    def __str__(self):
        names = ("instructions", *self.sections, "host code of the launch")
        return ", ".join(names[not self.instructions : len(names) - (not self.launch)])


def compare(base, here):
    """Return the difference between two kernels, or None."""
    one, other = base.sections, here.sections
    both = range(min(len(base.functions), len(here.functions)))
    instructions = {number: first_difference(base.encodings(number), here.encodings(number)) for number in both}
    instructions = {number: at for number, at in instructions.items() if at is not None}
    left = {*one, *other} - {f".text.{number}" for number in instructions}
    names = tuple(sorted(name for name in left if one.get(name) != other.get(name)))
    if not instructions and not names and base.launch == here.launch:
        return None
    return Difference(instructions, names, base.launch != here.launch)


# -- a difference for people


def report(name, base, here, difference):
    """Return the text that shows a difference, with the encodings of the first instructions that differ."""
    lines = [f"{name}: {difference}"]
    for number, at in difference.instructions.items():
        for side, code in (("base", base), ("here", here)):
            encoding = b"".join(code.encodings(number)[at : at + 1])[::-1].hex() or "none: the code has ended"
            lines.append(f"    {side}: instruction {at} of function {number}: {encoding}")
    return "\n".join(lines)


# -- the cache


@dataclass(frozen=True)
class Store:
    """A folder with compiled kernels, and with the kernels of trees."""

    folder: Path

    def kernel_file(self, key):
        return self.folder / "kernels" / f"{key}.zip"

    def tree_file(self, tree, arch):
        return self.folder / "trees" / f"{tree}-{arch}.json"

    def has(self, key):
        return self.kernel_file(key).exists()

    def code(self, key):
        with zipfile.ZipFile(self.kernel_file(key)) as file:
            functions = json.loads(file.read("functions.json"))
            return Code(file.read("cubin"), tuple(functions), file.read("launch.mlir").decode())

    def keep_code(self, key, code):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_LZMA) as file:
            file.writestr("cubin", code.cubin)
            file.writestr("functions.json", json.dumps(code.functions))
            file.writestr("launch.mlir", code.launch)
        replace(self.kernel_file(key), content.getvalue())

    def keys(self, tree, arch):
        """Return the hash of each kernel of a tree by symbol, None if it is not known; None if no kernel is known."""
        try:
            text = self.tree_file(tree, arch).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return {symbol: key if key and self.has(key) else None for symbol, key in json.loads(text).items()}

    def keep_keys(self, tree, arch, keys):
        replace(self.tree_file(tree, arch), json.dumps(keys, indent=1).encode())

    def remove_old(self):
        for file in self.folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):  # another process may remove it
                if file.stat().st_mtime < time.time() - OLD_SECONDS:
                    file.unlink()


def replace(path, content):
    """Replace a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with open(descriptor, "wb") as file:
        file.write(content)
    os.replace(new, path)


def cache_folder():
    """Return the folder of the results of this compiler, in fusedmoe's cache directory; None if that is off."""
    root = os.environ.get("FUSEDMOE_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / PACKAGE
    return None if root == "0" else Path(root).expanduser() / "sass_diff" / compiler()


@functools.cache
def compiler():
    """Return a hash of what determines MLIR and machine code, beside the sources of the kernels."""
    try:
        import cutlass
    except ImportError as error:
        raise UnableError(f"compiling kernels needs nvidia-cutlass-dsl: {error}") from error
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions() if d.metadata["Name"] in COMPILERS}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith("CUTE_")}
    parts = FORMAT, sorted(installed.items()), str(cutlass.CUDA_VERSION), sys.version_info[:2], variables
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# -- in a worker process: trace and compile


class Failed(NamedTuple):
    """An error of a worker, as text: its class may not exist in this process."""

    error: str


def begin(folder):
    """Prepare a process that imports fusedmoe from a folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path.insert(0, str(folder))


def attempt(function, *arguments):
    """Return the result of a function, or its error."""
    try:
        return function(*arguments)
    except Exception as error:  # noqa: BLE001  reported, and the other kernels are compiled
        return Failed(f"{type(error).__name__}: {error}")


def symbols(folder, arch):
    """Return the symbols of the kernels of fusedmoe in a folder."""
    package = importlib.import_module(PACKAGE)
    if Path(package.__file__).parents[1] != folder:
        raise ImportError(f"{PACKAGE} was imported from {package.__file__}: expected it in {folder}")
    return list(kernels(arch))


@functools.cache
def kernels(arch):
    """Return the shipped kernels by symbol."""
    return {kernel.symbol: kernel for kernel in importlib.import_module(SHIPPED).shipped(arch)}


def anonymous(text, functions):
    """Return MLIR with the numbers of functions instead of their names."""
    numbers = {name: number for number, name in enumerate(functions)}
    for name in sorted(functions, key=len, reverse=True):  # a name may begin with another one
        text = text.replace(f"@{name}", f"@function{numbers[name]}")
    return text


class StopCompilingError(Exception):
    """Raised after tracing, since the result is known."""


@dataclass
class Compilation:
    """One call of ``cute.compile``. ``hook`` runs after tracing, and ends the call if the result is in the store."""

    store: Store
    options: str
    key: str = ""
    known: bool = False
    functions: tuple[str, ...] = ()
    launch: str = ""

    def hook(self, _, module, __):
        text = str(module)
        self.functions = tuple(DEVICE.findall(text))
        every = *self.functions, *HOST.findall(text)
        self.key = hashlib.sha256(f"{self.options}\n{anonymous(text, every)}".encode()).hexdigest()
        self.known = self.store.has(self.key)
        if self.known:
            raise StopCompilingError
        host = [operation for operation in module.body if operation.operation.name != "gpu.module"]
        # with local scope, types are written in place: else those of the device change the numbers of the host's
        self.launch = anonymous("\n".join(op.operation.get_asm(use_local_scope=True) for op in host), every)


def compile_kernel(arch, symbol, store):
    """Compile a kernel into a store, unless it is there; return its key."""
    from cutlass import cute

    calls, compile_ = [], cute.compile

    def compile_with_cubin(*args, options="", **others):
        calls.append(Compilation(store, options))
        options = f"{options} --keep-cubin --dump-dir {dump}"
        return compile_(*args, options=options, trace_finalize_hooks=calls[-1].hook, **others)

    with tempfile.TemporaryDirectory() as dump:  # of this kernel: names of files are cut, so kernels share them
        cute.compile = compile_with_cubin
        try:
            cubin = kernels(arch)[symbol].compile().__cubin__
        except Exception:
            if not (calls and calls[-1].known):
                raise
        finally:
            cute.compile = compile_
    if len(calls) != 1:
        raise ValueError(f"{symbol} called cute.compile {len(calls)} times: expected once")
    (call,) = calls
    if not call.known:
        code = Code(cubin, call.functions, call.launch)
        assert code.sections  # raises an error if the functions are not those of the cubin
        store.keep_code(call.key, code)
    return call.key


# -- both sides


@dataclass(frozen=True)
class Side:
    """A tree of fusedmoe in git."""

    name: str
    tree: str
    root: Path

    def extract(self, folder):
        """Write the files."""
        archive = git(self.root, "archive", "--format=zip", f"--prefix={PACKAGE}/", self.tree)
        with zipfile.ZipFile(io.BytesIO(archive)) as file:
            file.extractall(folder)


def git(root, *arguments, **variables):
    ran = subprocess.run(["git", *arguments], cwd=root, env={**os.environ, **variables}, capture_output=True)
    if ran.returncode:
        raise UnableError(f"git {' '.join(arguments)}: {ran.stderr.decode(errors='replace').strip()}")
    return ran.stdout


def git_line(root, *arguments, **variables):
    return git(root, *arguments, **variables).decode().strip()


def revision(root, base):
    """Return the side of a commit."""
    commit = git_line(root, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}")
    return Side(f"base ({commit[:10]})", git_line(root, "rev-parse", f"{commit}:{PACKAGE}"), root)


def working_tree(root, folder):
    """Return the side of the files as they are now, without those that git ignores. Its index is in a folder, so that
    the repository's own does not change.
    """
    index = {"GIT_INDEX_FILE": str(folder / "index")}
    git(root, "read-tree", "HEAD", **index)
    git(root, "add", "--all", PACKAGE, **index)
    return Side("here", git_line(root, "write-tree", f"--prefix={PACKAGE}/", **index), root)


def compiled(side, arches, wanted, store, jobs):
    """Return the keys of the kernels of a side, or why they do not compile, by architecture and symbol.

    ``wanted`` says whether to compile a kernel, given its symbol.
    """
    known = {arch: store.keys(side.tree, arch) for arch in arches}
    failed = {}
    if any(keys is None or missing(keys, wanted) for keys in known.values()):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            side.extract(folder)
            failed = complete(known, folder, side, wanted, store, jobs)
    keys = {(arch, symbol): key for arch, of_arch in known.items() for symbol, key in of_arch.items() if wanted(symbol)}
    return {**keys, **failed}


def missing(keys, wanted):
    return [symbol for symbol, key in keys.items() if key is None and wanted(symbol)]


def complete(known, folder, side, wanted, store, jobs):
    """Fill in the keys that are not known, and keep them. Return those of the others that do not compile, and why."""
    failed, started = {}, time.perf_counter()
    # torch has threads, and a forked process with threads may hang
    pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), begin, (folder,))
    try:
        for arch in [arch for arch, keys in known.items() if keys is None]:
            listed = pool.submit(attempt, symbols, folder, arch).result()
            if isinstance(listed, Failed):
                raise UnableError(f"{side.name}, list of the kernels for {arch}: {listed.error}")
            known[arch] = dict.fromkeys(listed)
        todo = [(arch, symbol) for arch, keys in known.items() for symbol in missing(keys, wanted)]
        futures = {pool.submit(attempt, compile_kernel, *kernel, store): kernel for kernel in todo}
        for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
            arch, symbol = futures[future]
            result = future.result()
            if isinstance(result, Failed):
                failed[arch, symbol] = result
            else:
                known[arch][symbol] = result
            if done % PROGRESS == 0 or done == len(todo):
                say(f"{side.name}: {done}/{len(todo)} kernels, {time.perf_counter() - started:.0f} s", sys.stderr)
    except BrokenProcessPool as error:
        raise UnableError(f"{side.name}: a process that compiles died; is there enough memory for {jobs}?") from error
    finally:
        pool.shutdown(cancel_futures=True)
        for arch, keys in known.items():
            if keys:
                store.keep_keys(side.tree, arch, keys)
    return failed


def say(text, stream=None):
    stream = stream or sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


# -- the command


def parsed(arguments):
    parser = argparse.ArgumentParser("sass-diff", description="Compare machine code of the shipped kernels.")
    parser.add_argument("base", metavar="BASE", help="the revision to compare the working tree with")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="kernels whose name matches: sm90_ragged_k_*")
    parser.add_argument(
        "--arch", action="append", help=f"architecture; may be given again (default: {' and '.join(ARCHES)})"
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="default: one per CPU")
    parser.add_argument("--fresh", action="store_true", help="compile every kernel; do not use the cache")
    return parser.parse_args(arguments)


def main(arguments=None, root=ROOT):
    """Run the command; return its exit status."""
    options, started = parsed(arguments), time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return run(options, Path(root), Path(scratch), started)
    except UnableError as error:
        say(f"sass-diff: error: {error}", sys.stderr)
        return 2


def run(options, root, scratch, started):
    base, here = revision(root, options.base), working_tree(root, scratch)
    if base.tree == here.tree and not options.fresh:
        say(f"{PACKAGE}/ is the same in {base.name} and here, so its kernels are")
        return 0
    folder = None if options.fresh else cache_folder()
    stores = [Store(folder or scratch / side) for side in ("base", "here")]
    stores[0].remove_old()

    arches, wanted = options.arch or ARCHES, functools.partial(fnmatch.fnmatchcase, pat=options.only)
    of_base = compiled(base, arches, wanted, stores[0], options.jobs)
    of_here = compiled(here, arches, wanted, stores[1], options.jobs)
    if not of_base and not of_here:
        raise UnableError(f"--only {options.only}: no kernel's name matches; `fusedmoe compile --list` shows the names")

    names = {**of_base, **of_here}
    texts = [shown(" ".join(name), [of_base.get(name), of_here.get(name)], stores) for name in names]
    differ = [text for text in texts if text]
    for text in differ:
        say(text)
    seconds = time.perf_counter() - started
    say(f"{len(names)} kernels in {base.name} or here: {len(differ)} differ; {seconds:.0f} s")
    return 1 if differ else 0


def shown(name, results, stores):
    """Return the text that shows how a kernel differs; empty if it does not. A result of a side is a key, a Failed, or
    None if the side does not have the kernel.
    """
    for result, side, other in zip(results, SIDES, reversed(SIDES), strict=True):
        if result is None:
            return f"{name}: only {other}"
        if isinstance(result, Failed):
            return f"{name}: does not compile {side}: {result.error}"
    if stores[0] == stores[1] and results[0] == results[1]:  # the same MLIR
        return ""
    base, here = (store.code(key) for store, key in zip(stores, results, strict=True))
    difference = compare(base, here)
    return report(name, base, here, difference) if difference else ""


if __name__ == "__main__":
    sys.exit(main())
