"""The comparison of machine code of two trees: what counts as a difference, and what is compiled only once."""

import inspect
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit import sass_diff
from kit.sass_diff import Code, Failed, Side, Store, anonymous, compare, main, shown

ONE, TWO, THREE = (bytes([number]) * 16 for number in (1, 2, 3))  # instructions
SOURCES = Path(sass_diff.__file__).parents[2] / "fusedmoe"


def code(*instructions, function="f", **others):
    return several({function: instructions}, **others)


def several(functions, shared=1024, launch="grid 1", info=b"\4\x2f", barriers=16):
    """A cubin with these functions, a section that takes no space in the file, and a symbol table."""
    sections = [(".symtab", 2, 0, "".join(functions).encode())]
    for name, instructions in functions.items():
        sections.append((f".text.{name}", 1, barriers << 20, b"".join(instructions)))
        sections.append((f".nv.info.{name}", 0x70000000, 0, info))
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


# -- what differs


TWO_FUNCTIONS = several({"f": [ONE], "g": [TWO]})


@pytest.mark.parametrize(
    ("base", "here", "differs"),
    [
        (code(ONE, TWO), code(ONE, TWO), None),
        (code(ONE, TWO), code(ONE, TWO, function="another"), None),
        (TWO_FUNCTIONS, several({"g": [ONE], "f": [TWO]}), None),  # by their order
        (TWO_FUNCTIONS, several({"f": [TWO], "g": [ONE]}), ({0: 0, 1: 0}, (), None)),
        (code(ONE, TWO, ONE), code(ONE, THREE, THREE), ({0: 1}, (), None)),
        (code(ONE), code(ONE, TWO), ({0: 1}, (), None)),
        (code(ONE, TWO), code(ONE), ({0: 1}, (), None)),
        (code(ONE, TWO), code(ONE, TWO[:-1] + b"\0"), ({0: 1}, (), None)),  # scheduling bits
        (code(ONE), code(ONE, info=b"\4\x30"), ({}, (".nv.info.0",), None)),
        (code(ONE), code(ONE, shared=2048), ({}, (".nv.shared.0",), None)),
        (code(ONE), code(ONE, barriers=8), ({}, (".text.0",), None)),
        (code(ONE), TWO_FUNCTIONS, ({}, (".nv.info.1", ".text.1"), None)),
        (code(ONE, launch="block 128\ngrid 1"), code(ONE, launch="block 128\ngrid 2"), ({}, (), 1)),
    ],
)
def test_differences(base, here, differs):
    found = compare(base, here)
    if differs is None:
        assert found is None
        return
    instructions, sections, launch_line = differs
    assert (found.instructions, found.launch_line) == (instructions, launch_line)
    assert {*sections} <= {*found.sections}
    assert bool(found.sections) == bool(sections)
    assert ("instructions" in str(found), "host code of the launch" in str(found)) == (
        bool(instructions),
        launch_line == 1,
    )


def test_a_cubin_with_another_function_is_an_error():
    with pytest.raises(ValueError, match=r"a cubin has the functions \['f'\]: expected \['g'\]"):
        _ = Code(code(ONE).cubin, ("g",), "").sections
    with pytest.raises(ValueError, match=r"begins with b'\\x00': expected a 64-bit ELF file"):
        _ = Code(b"\0", ("f",), "").sections


def test_mlir_with_other_names_of_functions_is_the_same():
    text = 'cuda.kernel @{0}_1(%a) cuda.kernel @{0}_10(%a) func.func @{1}(%b) cute.print("kernel @{0}_10")'
    ours, others = text.format("sums", "launch"), text.format("sums_of_rows", "begin")
    one = anonymous(ours, [*sass_diff.DEVICE.findall(ours), *sass_diff.HOST.findall(ours)])
    assert one == anonymous(others, [*sass_diff.DEVICE.findall(others), *sass_diff.HOST.findall(others)])
    assert "sums" not in one


def test_a_kernel_that_one_side_lacks_or_cannot_compile_differs(tmp_path):
    stores = Store(tmp_path), Store(tmp_path)
    for base, here, text in (
        ("key", "key", ""),
        (None, "key", "k: only here"),
        ("key", None, "k: only in base"),
        ("key", Failed("TypeError: none"), "k: does not compile here: TypeError: none"),
    ):
        assert shown("k", [base, here], stores) == text


# -- what is kept


def test_the_store(tmp_path):
    store = Store(tmp_path)
    assert (store.has("key"), store.keys("tree", "sm_90a")) == (False, None)
    for key in ("key", "old"):
        store.keep_code(key, code(ONE, TWO))
    assert store.code("key") == code(ONE, TWO)
    store.keep_keys("tree", "sm_90a", {"k": "key", "removed": "another", "new": None})
    assert store.keys("tree", "sm_90a") == {"k": "key", "removed": None, "new": None}
    assert store.keys("tree", "sm_100a") is None
    long_ago = time.time() - 2 * sass_diff.UNUSED_SECONDS
    for key in ("key", "old"):
        os.utime(store.kernel_file(key), (long_ago, long_ago))
    assert store.has("key")  # which counts as a use
    store.remove_unused()
    assert (store.has("key"), store.has("old")) == (True, False)


def test_the_cache_is_beside_that_of_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(sass_diff, "compiler", lambda: "compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable, root in (("", tmp_path / "fusedmoe"), (str(tmp_path / "here"), tmp_path / "here"), ("0", None)):
        monkeypatch.setenv("FUSEDMOE_CACHE_DIR", variable)
        assert sass_diff.cache_folder() == (root and root / "sass_diff" / "compiler")


# -- two trees


def git(folder, *arguments):
    identity = "-c", "user.name=test", "-c", "user.email=test@example.com"
    ran = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with a file of fusedmoe and a file that git ignores."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    root = tmp_path / "repository"
    (root / "fusedmoe").mkdir(parents=True)
    (root / "fusedmoe" / "tracked.py").write_text("one = 1\n")
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
    before = git(repository, "count-objects"), git(repository, "status", "--short")
    here = sass_diff.working_tree(repository, tmp_path / "scratch")
    assert (git(repository, "count-objects"), git(repository, "status", "--short")) == before
    here.extract(tmp_path / "extracted")
    found = {file.name: file.read_text() for file in (tmp_path / "extracted" / "fusedmoe").iterdir()}
    assert found == {"tracked.py": "one = 1\n", "new.py": "two = 2\n"}
    assert here.tree != sass_diff.revision(repository, "HEAD").tree
    commit(repository)
    assert here.tree == sass_diff.revision(repository, "HEAD").tree


def test_equal_trees_are_not_compiled(repository, monkeypatch, capsys):
    monkeypatch.setattr(sass_diff, "complete", None)
    assert main(["HEAD"], repository) == 0
    assert "fusedmoe/ is the same in base" in capsys.readouterr().out
    assert main(["no-such-revision"], repository) == 2
    assert "no-such-revision" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "0"], "expected a number from 1, got '0'"),
        (["--renamed", "x"], "expected OLD=NEW, got 'x'"),
        (["--renamed", "(=x"], "'(' is no regular expression"),
    ],
)
def test_a_wrong_option_is_an_error(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["HEAD", *arguments])
    assert message in capsys.readouterr().err


def test_kernels_are_found_in_either_layout(tmp_path, monkeypatch):
    folder = tmp_path / "toy_kernels"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "shipped.py").write_text("import types\ndef shipped(arch): return [types.SimpleNamespace(symbol=arch)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sass_diff, "SHIPPED", ("toy_kernels.build.shipped", "toy_kernels.shipped"))
    assert list(sass_diff.kernels.__wrapped__("sm_90a")) == ["sm_90a"]
    monkeypatch.setattr(sass_diff, "SHIPPED", ("toy_kernels.build.shipped",))
    with pytest.raises(ModuleNotFoundError, match=r"expected it in toy_kernels\.build\.shipped"):
        sass_diff.kernels.__wrapped__("sm_90a")


def test_an_error_of_the_list_is_reported(tmp_path):
    (tmp_path / "fusedmoe").mkdir()
    (tmp_path / "fusedmoe" / "__init__.py").write_text("")
    side = Side("base", "tree", tmp_path)
    with pytest.raises(sass_diff.UnableError, match=r"base, list of the kernels for sm_90a: .* expected it in"):
        sass_diff.complete({"sm_90a": None}, tmp_path, side, bool, Store(tmp_path / "store"), 1)


@pytest.fixture
def tools():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")
    for name in ("nvdisasm", "cuobjdump"):
        try:
            sass_diff.tool(name)
        except sass_diff.UnableError as error:
            pytest.skip(str(error))


def edited(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


@pytest.mark.usefixtures("tools")
def test_an_edit_of_arithmetic_is_found_and_a_comment_is_not(repository, monkeypatch, capsys, tmp_path):
    """Two kernels of one file: the lines of both move, and the values of one of them change."""
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copytree(SOURCES, repository / "fusedmoe", dirs_exist_ok=True)
    commit(repository)
    sums = sass_diff.kernels("sm_90a")["sm90_sum_parts1_fp32"]
    file = repository / Path(inspect.getsourcefile(type(sums))).relative_to(SOURCES.parent)
    edited(file, "total.load() + one.load()", "total.load() - one.load()")
    edited(file, "import cutlass\n", "import cutlass  # a comment\n\n# and another one\n")

    arguments = "HEAD", "--arch", "sm_90a", "--only", "sm90_*parts[1_]*fp32*", "--jobs", "1"
    assert main(arguments, repository) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "sm_90a sm90_sum_parts1_fp32: instructions"
    assert said[1].startswith("    instructions ")
    assert said[2].startswith("    base: instruction ")
    assert said[3].startswith("    here: instruction ")
    base, here = (line.split()[4:] for line in said[2:4])
    assert base[0] == here[0] == "FADD"
    assert base != here
    assert said[4].startswith("2 kernels in base")
    assert "1 differ" in said[4]

    monkeypatch.setattr(sass_diff, "complete", None)  # nothing is compiled again
    assert main(arguments, repository) == 1
    assert capsys.readouterr().out.splitlines()[:4] == said[:4]


def test_the_command_runs_alone():
    """As `make sass-diff` runs it."""
    variables = {**os.environ, "PYTHONPATH": "tests"}
    command = [sys.executable, "-m", "kit.sass_diff", "--help"]
    ran = subprocess.run(command, cwd=SOURCES.parent, env=variables, capture_output=True, text=True, check=True)
    assert "--renamed OLD=NEW" in ran.stdout
