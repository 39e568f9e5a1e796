"""The modules whose source determines a kernel's object, found from the imports of its modules."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

__all__ = ["sources_of"]

_FOLDERS = ("fusedmoe.kernels.", "fusedmoe.numerics.")
_HOST = "fusedmoe.kernels.build."  # compiles and loads kernels, and is part of none


def sources_of(kernel: Any) -> tuple[str, ...]:
    """Return the modules that define a kernel's class and the parts in its fields, and all modules that these import.

    Parts are dataclasses, functions and classes, such as the outputs of an epilogue. Of the imports, those of modules
    of `fusedmoe.kernels` and `fusedmoe.numerics` count; imports inside functions and for type checkers do not.
    """
    found: set[str] = set()
    for module in _defining(kernel):
        found |= _with_imports(module)
    return tuple(sorted(found - {"abc", "builtins"}))


def _defining(part: Any) -> set[str]:
    modules = {kind.__module__ for kind in inspect.getmro(type(part))} if is_dataclass(part) else set()
    if callable(part) and getattr(part, "__module__", None):
        modules.add(part.__module__)
    inner: Iterable[Any] = part if isinstance(part, tuple) else ()
    if is_dataclass(part):
        inner = [getattr(part, field.name) for field in fields(part)]
    return modules.union(*map(_defining, inner))


@functools.cache
def _with_imports(module: str) -> frozenset[str]:
    found, left = set(), [module]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _imports(name)
    return frozenset(found)


@functools.cache
def _imports(module: str) -> tuple[str, ...]:
    file = getattr(sys.modules.get(module), "__file__", None)
    if not module.startswith(_FOLDERS) or file is None:
        return ()
    names: list[str] = []
    for node in ast.parse(Path(file).read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.append(node.module)
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(n for n in names if n.startswith(_FOLDERS) and not n.startswith(_HOST) and _is_module(n))


def _is_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and not file.endswith("__init__.py")
