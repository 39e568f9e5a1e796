"""A loop over experts for frameworks' modules, and modules that stand in for an import."""

import sys
from types import ModuleType

import torch


def loop(x, counts, expert):
    """`expert(e, rows)` of each expert's rows, and zeros in the rows past the last expert's."""
    parts, end = [], 0
    for e, count in enumerate(counts):
        parts.append(expert(e, x[end : end + count]))
        end += count
    return torch.cat([*parts, x.new_zeros(x.shape[0] - end, parts[0].shape[1])])


def install(monkeypatch, contents):
    """Let `import` find modules that are not there: `contents` is {"package.module": {"name": value}}."""
    names = {".".join(name.split(".")[:n]) for name in contents for n in range(1, name.count(".") + 2)}
    for name in sorted(names):
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
