"""The comparison of machine code of two trees: what counts as a difference, and what is compiled only once."""

import os
import shutil
import struct
import subprocess
import time

import pytest
from kit import sass_diff
from kit.sass_diff import Code, Failed, anonymous, compared, differences, keep, kernel_file, main

ONE, TWO = bytes([1]) * 16, bytes([2]) * 16  # instructions


def code(*instructions, function="f", **others):
    return several({function: instructions}, **others)


def several(functions, shared=1024, launch="grid 1", info=b"\4\x2f", barriers=16, constant=b"\1"):
    """A cubin with these functions, a section that takes no space in the file, and a symbol table."""
    sections = [(".symtab", 2, 0, "".join(functions).encode())]
    for name, instructions in functions.items():
        sections.append((f".text.{name}", 1, barriers << 20, b"".join(instructions)))
        sections.append((f".nv.info.{name}", 0x70000000, 0, info))
        sections.append((f".nv.constant0.{name}", 1, 0, constant))
    sections.append((f".nv.shared.{name}", 8, 0, shared))
    return Code(elf(sections), tuple(functions), launch)


def elf(sections):
    """A 64-bit ELF file. A section is a name, a type, flags, and its bytes; or their number, if the file has none."""
    sections = [("", 0, 0, b""), *sections, (".shstrtab", 3, 0, b"")]
    names = "".join(f"{name}\0" for name, *_ in sections).encode()
    sections[-1] = (".shstrtab", 3, 0, names)
    data, headers, at_name = b"", b"", 0
    for name, type_, flags, content in sections:
        size = content if isinstance(content, int) else len(content)
        headers += struct.pack("<IIQQQQIIQQ", at_name, type_, flags, 0, 64 + len(data), size, 0, 0, 1, 0)
        data += b"" if isinstance(content, int) else content
        at_name += len(name) + 1
    fields = 0, 0, 0, 0, 0, 64 + len(data), 0, 64, 0, 0, 64, len(sections), len(sections) - 1
    return b"\x7fELF\x02".ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", *fields) + data + headers


TWO_FUNCTIONS = several({"f": [ONE], "g": [TWO]})


@pytest.mark.parametrize(
    ("base", "here", "differs"),
    [
        (code(ONE, TWO), code(ONE, TWO, function="another"), None),
        (TWO_FUNCTIONS, several({"g": [ONE], "f": [TWO]}), None),  # by their order
        (TWO_FUNCTIONS, several({"f": [TWO], "g": [ONE]}), "instructions"),
        (code(ONE), code(ONE, TWO), "instructions"),
        (code(ONE, TWO), code(ONE, TWO[:-1] + b"\0"), "instructions"),  # scheduling bits
        (code(ONE), code(ONE, info=b"\4\x30"), ".nv.info.0"),
        (code(ONE), code(ONE, constant=b"\2"), ".nv.constant0.0"),
        (code(ONE), code(ONE, shared=2048), ".nv.shared.0"),
        (code(ONE), code(ONE, barriers=8), ".text.0"),
        (code(ONE), TWO_FUNCTIONS, ".nv.constant0.1, .nv.info.1, .nv.shared.0, .nv.shared.1, .text.1"),
        (code(ONE), code(ONE, launch="grid 2"), "host code of the launch"),
        (code(ONE), code(TWO, launch="grid 2"), "instructions, host code of the launch"),
    ],
)
def test_differences(base, here, differs):
    first = differences("k", base, here)[:1]
    assert first == ([] if differs is None else [f"k: {differs}"])


def test_the_first_instructions_that_differ_are_shown():
    assert differences("k", code(ONE, TWO, ONE), code(ONE, ONE, TWO))[1:] == [
        f"    base: instruction 1 of function 0: {'02' * 16}",
        f"    here: instruction 1 of function 0: {'01' * 16}",
    ]


def test_a_cubin_with_another_function_is_an_error():
    with pytest.raises(ValueError, match="a cubin has the functions"):
        sass_diff.sections(Code(code(ONE).cubin, ("g",), ""))


def test_mlir_with_other_names_of_functions_is_the_same():
    text = 'cuda.kernel @{0}_1(%a) cuda.kernel @{0}_10(%a) func.func @{1}(%b) cute.print("kernel @{0}_10")'
    ours, others = text.format("sums", "launch"), text.format("sums_of_rows", "begin")
    one = anonymous(ours, [*sass_diff.DEVICE.findall(ours), *sass_diff.HOST.findall(ours)])
    assert one == anonymous(others, [*sass_diff.DEVICE.findall(others), *sass_diff.HOST.findall(others)])
    assert "sums" not in one


def test_a_kernel_that_one_side_lacks_or_cannot_compile_differs(tmp_path):
    stores = tmp_path, tmp_path
    assert compared("k", ["key", "key"], stores) == []
    assert compared("k", [None, "key"], stores) == ["k: only here"]
    failed = Failed("TypeError: none")
    assert compared("k", ["key", failed], stores) == ["k: does not compile here: TypeError: none"]


def test_the_store(tmp_path):
    assert sass_diff.kept_keys(tmp_path, "tree", "sm_90a") is None
    for key in ("key", "old"):
        keep(kernel_file(tmp_path, key), tuple(code(ONE, TWO)))
    assert Code(*sass_diff.kept(kernel_file(tmp_path, "key"))) == code(ONE, TWO)
    long_ago = time.time() - 2 * sass_diff.OLD_SECONDS
    os.utime(kernel_file(tmp_path, "old"), (long_ago, long_ago))
    sass_diff.remove_old(tmp_path)
    keep(sass_diff.tree_file(tmp_path, "tree", "sm_90a"), {"k": "key", "removed": "old", "new": None})
    assert sass_diff.kept_keys(tmp_path, "tree", "sm_90a") == {"k": "key", "removed": None, "new": None}


SHIPPED = '''
from cutlass import Float32, cute


class Add:
    """Add a number to the values of one warp."""

    symbol, number = "add", 1.0

    def compile(self):
        x = cute.runtime.make_fake_tensor(Float32, (cute.sym_int(),), (1,))
        return cute.compile(self, x, options="--gpu-arch sm_90a --enable-tvm-ffi")

    @cute.jit
    def __call__(self, x):
        self.kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, x):
        thread, _, _ = cute.arch.thread_idx()
        x[thread] = x[thread] + self.number


class AddTwo(Add):
    symbol, number = "add_two", 2.0


def shipped(arch):
    return Add(), AddTwo()
'''


def git(folder, *arguments):
    identity = "-c", "user.name=test", "-c", "user.email=test@example.com"
    ran = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository whose package has two kernels of one file, and a file that git ignores."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    root = tmp_path / "repository"
    build = root / "fusedmoe" / "kernels" / "build"
    build.mkdir(parents=True)
    for folder in (build, build.parent, build.parents[1]):
        (folder / "__init__.py").touch()
    (build / "shipped.py").write_text(SHIPPED)
    (root / ".gitignore").write_text("*.pyc\n")
    git(root, "init", "--quiet")
    commit(root)
    return root


def commit(root):
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "a revision")


def test_the_tree_of_the_files_is_that_of_their_commit(repository, tmp_path):
    (tmp_path / "scratch").mkdir()
    (repository / "fusedmoe" / "new.py").write_text("two = 2\n")
    (repository / "fusedmoe" / "new.pyc").write_text("")
    before = git(repository, "status", "--short")
    here = sass_diff.working_tree(repository, tmp_path / "scratch")
    assert git(repository, "status", "--short") == before
    here.extract(tmp_path / "extracted")
    found = {file.name for file in (tmp_path / "extracted" / "fusedmoe").iterdir()}
    assert found == {"__init__.py", "kernels", "new.py"}
    assert here.tree != sass_diff.revision(repository, "HEAD").tree
    commit(repository)
    assert here.tree == sass_diff.revision(repository, "HEAD").tree


def test_equal_trees_are_not_compiled(repository, monkeypatch, capsys):
    monkeypatch.setattr(sass_diff, "complete", None)
    assert main(["HEAD"], repository) == 0
    assert "fusedmoe/ is the same in base" in capsys.readouterr().out
    assert main(["no-such-revision"], repository) == 2
    assert "no-such-revision" in capsys.readouterr().err


@pytest.mark.slow  # starts two processes that compile
def test_an_edit_of_arithmetic_is_found_and_a_comment_is_not(repository, monkeypatch, capsys, tmp_path):
    """The lines of both kernels move, and the values of one of them change."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", str(tmp_path / "cache"))
    edited = SHIPPED.replace('"add", 1.0', '"add", 3.0').replace("class Add:", "# a comment\n\n\nclass Add:")
    (repository / "fusedmoe" / "kernels" / "build" / "shipped.py").write_text(edited)

    arguments = "HEAD", "--arch", "sm_90a", "--jobs", "1"
    assert main(arguments, repository) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "sm_90a add: instructions"
    base, here = said[1:3]
    assert base.split()[1:-1] == here.split()[1:-1], "the same place"
    assert base.split()[-1] != here.split()[-1]
    assert said[3].startswith("2 kernels in base")
    assert "1 differ" in said[3]

    monkeypatch.setattr(sass_diff, "complete", None)  # nothing is compiled again
    assert main(arguments, repository) == 1
    assert capsys.readouterr().out.splitlines()[:3] == said[:3]
