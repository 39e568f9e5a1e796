"""The imports of the package: no circle, the layers of docs/architecture.md, and a reason beside each late import.

Imports inside functions and imports for a type checker count too.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from kit.call_hops import layers

import fusedmoe
from fusedmoe.base.aliases import PRESENT_NAMES

PACKAGE = Path(fusedmoe.__file__).parent
ENGINE = "fusedmoe.fusion"
# no particular op and no kernel: the base classes of ops, the steps between ops, and the options of kernels
ENGINE_MAY_IMPORT = (
    "fusedmoe.ops.op",
    "fusedmoe.ops.glue",
    "fusedmoe.ops.derived",
    "fusedmoe.ops.state.random",
    "fusedmoe.kernels.options",
)
ENGINE_MUST_NOT_IMPORT = ("fusedmoe.ops", "fusedmoe.kernels", "fusedmoe.builtin_rules")
KERNELS = ("fusedmoe.kernels",)

# ---- the graph ----------------------------------------------------------------------------------------------------


class Import(NamedTuple):
    importer: str
    imported: str
    line: int
    in_function: bool
    for_types: bool  # under ``if TYPE_CHECKING``

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}"


def name_of(path: Path) -> str:
    parts = ("fusedmoe", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}
SOURCES = {name: path.read_text("utf-8") for name, path in MODULES.items()}


def imports_of(module: str) -> Iterator[Import]:
    """The imports of modules of this package."""

    def visit(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
        found: list[str] = []
        only_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}:{node.lineno}: a relative import"
            of_package = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in MODULES else str(node.module) for name in of_package]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            # a name in place of a text may be any module, such as those of base/aliases.py
            pattern = "".join(
                re.escape(ast.literal_eval(part)) if isinstance(part, ast.Constant) else r"\w+"
                for part in (node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else node.args[:1])
            )
            found = [name for name in MODULES if pattern != r"\w+" and re.fullmatch(pattern, name) and name != module]
        for name in dict.fromkeys(found):
            if name in MODULES:
                yield Import(module, name, node.lineno, in_function, for_types)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        of_types = node.body if only_types else ()
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside, for_types or child in of_types)

    return visit(ast.parse(SOURCES[module]), in_function=False, for_types=False)


IMPORTS = [found for module in sorted(MODULES) for found in imports_of(module)]


def layer_name(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


# ---- the tests ----------------------------------------------------------------------------------------------------


def test_the_walk_finds_imports_of_every_kind():
    found = {str(i): (i.in_function, i.for_types) for i in IMPORTS}
    assert found["fusedmoe -> fusedmoe.layers.moe"] == (False, False)
    assert found["fusedmoe.call.chain -> fusedmoe.call.settings"] == (False, False)  # from fusedmoe import settings
    assert found["fusedmoe.commands.main -> fusedmoe.commands.tune"] == (True, False)  # by name
    assert found["fusedmoe.kernels.rows.move.functions -> fusedmoe.kernels.rows.move.offsets"] == (True, False)
    assert found["fusedmoe.kernels.sm90.limits -> fusedmoe.numerics.formats"] == (False, True)


def test_every_module_has_a_layer():
    assert {layer_name(module) for module in MODULES} == set(layers())


def test_imports_go_down_the_layers():
    layer = layers()
    upward = {str(i) for i in IMPORTS if layer[layer_name(i.importer)] > layer[layer_name(i.imported)]}
    assert upward == set()


def test_no_imports_form_a_circle():
    left: dict[str, set[str]] = {module: set() for module in MODULES}
    for i in IMPORTS:
        left[i.importer].add(i.imported)
    # modules outside a circle import none of those left, or are imported by none of them
    while free := [m for m in left if not left[m] & left.keys() or not any(m in left[other] for other in left)]:
        for module in free:
            left.pop(module, None)
    assert {module: sorted(imported & left.keys()) for module, imported in left.items()} == {}


def test_an_import_inside_a_function_has_its_reason_beside_it():
    """A comment on its line, on the line before it, or on another import of the same lines."""
    without = set()
    for i in IMPORTS:
        if not i.in_function:
            continue
        lines, n = SOURCES[i.importer].splitlines(), i.line - 1
        while re.match(r"\s+(from|import) ", lines[n - 1]) and "#" not in lines[n]:
            n -= 1
        if "#" not in lines[n] and not lines[n - 1].lstrip().startswith("#"):
            without.add(i.importer)
    assert without == set()


def of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_the_engine_imports_no_op_no_kernel_and_no_rule():
    found = {
        str(i)
        for i in IMPORTS
        if of(i.importer, (ENGINE,)) and of(i.imported, ENGINE_MUST_NOT_IMPORT) and i.imported not in ENGINE_MAY_IMPORT
    }
    assert found == set()


def test_expert_parallelism_imports_only_the_kernels_of_exchanges():
    """For one engine, by their functions, which import the kernels where these are bound."""
    found = {
        (i.importer, i.imported)
        for i in IMPORTS
        if of(i.importer, ("fusedmoe.expert_parallel",)) and of(i.imported, KERNELS)
    }
    of_exchange = ("fusedmoe.kernels.exchange.functions", "fusedmoe.kernels.exchange.layout")
    assert found == {("fusedmoe.expert_parallel.symmetric", module) for module in of_exchange}


def test_the_engine_names_no_architecture():
    pattern = r"sm_?\d|hopper|blackwell"
    assert {m for m in MODULES if of(m, (ENGINE,)) and re.search(pattern, SOURCES[m], re.IGNORECASE)} == set()


def test_imports_are_statements_or_import_module():
    """Those that the walk finds."""
    others = re.compile(r"__import__|sys\.modules(\.get\(|\[)[\"']fusedmoe")
    assert {m for m in MODULES if others.search(SOURCES[m])} == set()


# ---- imports of a process, and earlier names of modules -------------------------------------------------------------


@pytest.mark.parametrize("name", PRESENT_NAMES)
def test_an_earlier_name_is_the_present_module(name, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    present = importlib.import_module(PRESENT_NAMES[name])
    with pytest.warns(FutureWarning, match=f"{name} is now {present.__name__}"):
        assert importlib.import_module(name) is present
    assert present.__spec__.name == present.__name__ == PRESENT_NAMES[name]


def test_a_process_that_imports():
    """Submodules are not loaded twice; the built-in rules are registered; no framework and no compiler is imported."""
    script = """
import sys, warnings
warnings.simplefilter("ignore", FutureWarning)
import fusedmoe.recipes.recipe
from fusedmoe.formats.tensor import QuantizedTensor
import fusedmoe as fm
assert fusedmoe.recipes.recipe.Recipe is fm.Recipe and QuantizedTensor is fm.QuantizedTensor
from fusedmoe.builtin_rules import BUILTIN
assert set(BUILTIN) <= set(fm.rules())
class MXFP8BlockScaling: pass  # named like a recipe of Transformer Engine
with fm.recipe(MXFP8BlockScaling()) as ours: assert ours.name == "mxfp8"
import fusedmoe.commands.compile, fusedmoe.kernels.build.shipped
from fusedmoe.kernels.build import toolkit
toolkit.why_unusable()
packages = {name.split(".")[0] for name in sys.modules}
assert not {"cutlass", "tvm_ffi", "transformers", "transformer_engine"} & packages
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_unknown_module_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="recipe_s"):
        importlib.import_module("fusedmoe.recipe_s")


# ---- the tests themselves -----------------------------------------------------------------------------------------

TESTS = Path(__file__).parents[1]
TEST_MODULES = [*TESTS.rglob("test_*.py")]
NAMES = Counter(path.stem for path in TEST_MODULES)


def test_no_test_module_imports_another():
    """Two modules share the helpers in tests/kit."""
    imports = re.compile(r"^\s*(?:from|import) +(?:\w+\.)*(\w+)", re.MULTILINE)
    for path in TEST_MODULES:
        assert NAMES.keys().isdisjoint(imports.findall(path.read_text("utf-8"))), path.stem


def test_base_names_of_test_modules_are_unique():
    """pytest imports modules by these."""
    again = {name.removeprefix("test_") for name, count in NAMES.items() if count > 1}
    assert again == set()
