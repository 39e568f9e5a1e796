"""The earlier names of public modules: the modules themselves, with a warning."""

import importlib
import pickle
import subprocess
import sys

import pytest

import fusedmoe as fm
from fusedmoe.base.aliases import PRESENT_NAMES


@pytest.mark.parametrize("name", PRESENT_NAMES)
def test_an_earlier_name_is_the_present_module(name, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    present = importlib.import_module(PRESENT_NAMES[name])
    with pytest.warns(FutureWarning, match=f"{name} is now {present.__name__}"):
        assert importlib.import_module(name) is present
    assert present.__spec__.name == present.__name__ == PRESENT_NAMES[name]


def test_a_process_that_imports():
    """Submodules are not loaded twice; the built-in rules are registered; no framework is imported."""
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
assert not any(name.split(".")[0].startswith("transformer") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_pickle_that_names_the_earlier_module_loads():
    recipe = fm.numerics.recipes.named("fp8_block")
    data = pickle.dumps(recipe, protocol=0)
    earlier = data.replace(b"fusedmoe.numerics.recipes.recipe", b"fusedmoe.recipes.recipe")
    assert earlier != data
    sys.modules.pop("fusedmoe.recipes.recipe", None)
    with pytest.warns(FutureWarning, match="fusedmoe.recipes"):
        assert pickle.loads(earlier) == recipe


def test_an_unknown_module_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="recipe_s"):
        importlib.import_module("fusedmoe.recipe_s")
