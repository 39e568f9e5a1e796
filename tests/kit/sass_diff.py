"""Compare the machine code (SASS) of the shipped kernels at a revision with that of the working tree.

    make sass-diff BASE=main ARGS='--only sm90_ragged_k_*'

A change that only restructures kernels needs no run on a GPU if this tool finds no difference. The exit status is 0
without a difference, 1 with one, and 2 if the comparison was not possible.

Compared are the instructions of a kernel with their scheduling control bits, the other sections of its cubin, such as
constants and the attributes of a launch, and the host code that launches it, as the CuTe DSL traces it (MLIR). So
equivalent host code may be reported. The names of functions do not matter.

Both sides are trees of git: ``BASE:fusedmoe``, and the tree of the files that git tracks or would add now. Each is
extracted, and compiled in processes that import it.

Tracing a kernel gives MLIR, which determines the machine code together with the options and the compiler. So a kernel
whose MLIR was compiled before, at any revision, is traced only, and a tree with known kernels is not imported at all.
The results are in ``sass_diff/<compiler>/`` in fusedmoe's cache directory: ``trees/<hash of the tree>-<architecture>``
has the hash of the MLIR of each kernel, and ``kernels/<hash of the MLIR>`` its `Code`. ``--fresh`` does without them.
"""

import argparse
import concurrent.futures
import contextlib
import fnmatch
import functools
import hashlib
import importlib
import io
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from concurrent.futures.process import BrokenProcessPool
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = "fusedmoe"
SHIPPED = "fusedmoe.kernels.build.shipped"  # the module that has `shipped(arch)`
ARCHES = ("sm_90a", "sm_100a")
FORMAT = 2  # of the cache; a change of what is kept or hashed changes it
COMPILER = "nvidia-cutlass-dsl"  # begins the names of the distributions that determine machine code, with ptxas
OLD_SECONDS = 60 * 24 * 3600  # after which a file of the cache is removed
SIDES = ("in base", "here")
PROGRESS = 50  # kernels between lines
WITHOUT_EFFECT = (".shstrtab", ".strtab", ".symtab", ".debug", ".rela.debug", ".rel.debug", ".note")  # sections

DEVICE = re.compile(r"\bcuda\.kernel @([\w.$]+)")  # the definition of a function in MLIR
HOST = re.compile(r"\bfunc\.func (?:private |public )?@([\w.$]+)")


class UnableError(Exception):
    """The comparison is not possible; the message has the reason and a remedy."""


# -- machine code


class Code(NamedTuple):
    """A cubin, the names of its functions in the order of the MLIR, and the host code of the launches as text."""

    cubin: bytes
    functions: tuple[str, ...]
    launch: str


def sections(code):
    """Return type, flags, size and bytes of each section that matters, by name with the number of a function instead of
    its name.
    """
    cubin = code.cubin
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"a cubin begins with {cubin[:5]!r}: expected a 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + size * i) for i in range(count)]
    names = headers[of_names][4]
    found, compiled_functions = {}, []
    for at, type_, flags, _, offset, length in headers:
        name = cubin[names + at : cubin.index(b"\0", names + at)].decode()
        if not name or name.removeprefix(".nv.merc").startswith(WITHOUT_EFFECT):  # .nv.merc: of another form of code
            continue
        if name.startswith(".text."):
            compiled_functions.append(name.removeprefix(".text."))
        for number, function in enumerate(code.functions):
            if name.endswith(f".{function}"):
                name = f"{name.removesuffix(function)}{number}"
                break
        in_file = type_ not in (0, 8)  # SHT_NULL and SHT_NOBITS, such as shared memory
        found[name] = type_, flags, length, cubin[offset : offset + length] if in_file else b""
    if sorted(compiled_functions) != sorted(code.functions):
        raise ValueError(f"a cubin has the functions {compiled_functions}: expected {list(code.functions)}")
    return found


def differences(name, base, here):
    """Return the lines that show how two versions of a kernel differ, with the first instructions; none if equal."""
    one, other, lines = sections(base), sections(here), []
    for number in range(min(len(base.functions), len(here.functions))):
        text = f".text.{number}"
        codes = [[data[at : at + 16] for at in range(0, len(data), 16)] for data in (one[text][3], other[text][3])]
        pairs = enumerate(itertools.zip_longest(*codes, fillvalue=b""))
        at, pair = next(((at, pair) for at, pair in pairs if pair[0] != pair[1]), (None, ()))
        for side, encoding in zip(("base", "here"), pair, strict=False):
            shown = encoding[::-1].hex() or "none: the code has ended"
            lines.append(f"    {side}: instruction {at} of function {number}: {shown}")
        if pair:
            del one[text], other[text]
    parts = ["instructions"] if lines else []
    parts += sorted(section for section in {*one, *other} if one.get(section) != other.get(section))
    parts += ["host code of the launch"] if base.launch != here.launch else []
    return [f"{name}: {', '.join(parts)}", *lines] if parts else []


# -- the cache: a store is a folder


def kernel_file(store, key):
    return store / "kernels" / key


def tree_file(store, tree, arch):
    return store / "trees" / f"{tree}-{arch}"


def kept(file):
    return pickle.loads(zlib.decompress(file.read_bytes()))


def keep(file, value):
    """Replace a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, new = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    with open(descriptor, "wb") as opened:
        opened.write(zlib.compress(pickle.dumps(value)))
    os.replace(new, file)


def kept_keys(store, tree, arch):
    """Return the hash of each kernel of a tree by symbol, None if it is not known; None if no kernel is known."""
    file = tree_file(store, tree, arch)
    if not file.exists():
        return None
    return {symbol: key if key and kernel_file(store, key).exists() else None for symbol, key in kept(file).items()}


def remove_old(store):
    for file in store.glob("*/*"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it
            if file.stat().st_mtime < time.time() - OLD_SECONDS:
                file.unlink()


def cache_folder():
    """Return the folder of the results of this compiler, in fusedmoe's cache directory; None if that is off."""
    root = os.environ.get("FUSEDMOE_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / PACKAGE
    return None if root == "0" else Path(root).expanduser() / "sass_diff" / compiler()


def compiler():
    """Return a hash of what determines MLIR and machine code, besides the sources of the kernels."""
    try:
        import cutlass
    except ImportError as error:
        raise UnableError(f"compiling kernels needs nvidia-cutlass-dsl: {error}") from error
    installed = {(d.metadata["Name"], d.version) for d in metadata.distributions()}
    installed = sorted(d for d in installed if d[0].startswith(COMPILER))
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith("CUTE_")}
    parts = FORMAT, installed, str(cutlass.CUDA_VERSION), sys.version_info[:2], variables
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


def compile_kernel(arch, symbol, store):
    """Compile a kernel into a store, unless it is there; return its key."""
    from cutlass import cute

    calls, compile_ = [], cute.compile

    def compile_with_cubin(*args, options="", **others):
        call = SimpleNamespace(known=False)
        calls.append(call)

        def hook(_, module, __):
            text = str(module)
            call.functions = tuple(DEVICE.findall(text))
            every = *call.functions, *HOST.findall(text)
            call.key = hashlib.sha256(f"{options}\n{anonymous(text, every)}".encode()).hexdigest()
            call.known = kernel_file(store, call.key).exists()
            if call.known:
                raise StopCompilingError
            host = [operation for operation in module.body if operation.operation.name != "gpu.module"]
            # with local scope, types are written in place: else those of the device change the numbers of the host's
            asm = "\n".join(op.operation.get_asm(use_local_scope=True) for op in host)
            call.launch = anonymous(asm, every)

        return compile_(*args, options=f"{options} --keep-cubin --dump-dir {dump}", trace_finalize_hooks=hook, **others)

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
        sections(code)  # raises an error if the functions are not those of the cubin
        keep(kernel_file(store, call.key), tuple(code))
    return call.key


# -- both sides


class Side(NamedTuple):
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
    """Return the key of each kernel of a side with a wanted symbol, or why it does not compile, by architecture and
    symbol.
    """
    known, failed = {arch: kept_keys(store, side.tree, arch) for arch in arches}, {}
    if None in known.values() or missing(known, wanted):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            side.extract(folder)
            failed = complete(known, folder, side, wanted, store, jobs)
    keys = {(arch, symbol): key for arch, of_arch in known.items() for symbol, key in of_arch.items() if wanted(symbol)}
    return {**keys, **failed}


def missing(known, wanted):
    return [(arch, name) for arch, keys in known.items() for name, key in keys.items() if key is None and wanted(name)]


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
        todo = missing(known, wanted)
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
                keep(tree_file(store, side.tree, arch), keys)
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
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return run(parsed(arguments), Path(root), Path(scratch))
    except UnableError as error:
        say(f"sass-diff: error: {error}", sys.stderr)
        return 2


def run(options, root, scratch):
    started = time.perf_counter()
    base, here = revision(root, options.base), working_tree(root, scratch)
    if base.tree == here.tree and not options.fresh:
        say(f"{PACKAGE}/ is the same in {base.name} and here, so its kernels are")
        return 0
    folder = None if options.fresh else cache_folder()
    stores = [folder or scratch / side for side in ("base", "here")]
    remove_old(stores[0])

    arches, wanted = options.arch or ARCHES, functools.partial(fnmatch.fnmatchcase, pat=options.only)
    of_base, of_here = (
        compiled(side, arches, wanted, store, options.jobs) for side, store in zip((base, here), stores, strict=True)
    )
    names = {**of_base, **of_here}
    if not names:
        raise UnableError(f"--only {options.only}: no kernel's name matches; `fusedmoe compile --list` shows the names")
    shown = [compared(" ".join(name), [of_base.get(name), of_here.get(name)], stores) for name in names]
    differ = [lines for lines in shown if lines]
    for lines in differ:
        say("\n".join(lines))
    seconds = time.perf_counter() - started
    say(f"{len(names)} kernels in {base.name} or here: {len(differ)} differ; {seconds:.0f} s")
    return 1 if differ else 0


def compared(name, results, stores):
    """Return the lines that show how a kernel differs. A result of a side is a key, a `Failed`, or None if the side
    does not have the kernel.
    """
    for result, side, other in zip(results, SIDES, reversed(SIDES), strict=True):
        if result is None:
            return [f"{name}: only {other}"]
        if isinstance(result, Failed):
            return [f"{name}: does not compile {side}: {result.error}"]
    if stores[0] == stores[1] and results[0] == results[1]:  # the same MLIR
        return []
    base, here = (Code(*kept(kernel_file(store, key))) for store, key in zip(stores, results, strict=True))
    return differences(name, base, here)


if __name__ == "__main__":
    sys.exit(main())
