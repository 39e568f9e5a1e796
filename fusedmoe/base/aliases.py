"""The earlier names of public modules, which import the modules under their present names for one release.

``import fusedmoe.recipes`` returns the module `fusedmoe.numerics.recipes`, with a `FutureWarning`. Pickles that name a
class by its earlier module load too.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PRESENT_NAMES = {
    "fusedmoe.explain_model": "fusedmoe.layers.explain_model",
    "fusedmoe.formats": "fusedmoe.numerics.formats",
    "fusedmoe.fusion.plan": "fusedmoe.fusion.report.data",
    "fusedmoe.fusion.registry": "fusedmoe.fusion.language.registry",
    "fusedmoe.fusion.rule": "fusedmoe.fusion.language.rule",
    "fusedmoe.integrations.megatron_checkpoint": "fusedmoe.integrations.megatron.checkpoint",
    "fusedmoe.loading": "fusedmoe.layers.loading",
    "fusedmoe.lora": "fusedmoe.layers.lora",
    "fusedmoe.losses": "fusedmoe.layers.losses",
    "fusedmoe.moe": "fusedmoe.layers.moe",
    "fusedmoe.ops.squared_relu": "fusedmoe.ops.glu",
    "fusedmoe.plotting": "fusedmoe.layers.plotting",
    "fusedmoe.recipes": "fusedmoe.numerics.recipes",
    "fusedmoe.sequential": "fusedmoe.layers.sequential",
    "fusedmoe.settings": "fusedmoe.call.settings",
}


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of `PRESENT_NAMES`, and the submodules of those that are packages."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return None if _present(name) is None else ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        present = str(_present(spec.name))
        warnings.warn(f"{spec.name} is now {present}; import it by that name", FutureWarning, stacklevel=2)
        module = importlib.import_module(present)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Undo the change of the import system; the module was executed under its present name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _present(name: str) -> str | None:
    if not name.startswith("fusedmoe."):
        return None
    for earlier, present in PRESENT_NAMES.items():
        if name == earlier or name.startswith(f"{earlier}."):
            return present + name.removeprefix(earlier)
    return None


def install() -> None:
    """Let imports find the modules by their earlier names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before the finder of files, which would load submodules a second time


def earlier_name(name: str) -> ModuleType:
    """``fusedmoe.recipes`` without an import statement for it: the ``__getattr__`` of the package."""
    earlier = f"fusedmoe.{name}"
    if earlier not in PRESENT_NAMES:
        raise AttributeError(f"module 'fusedmoe' has no attribute {name!r}")
    return importlib.import_module(earlier)
