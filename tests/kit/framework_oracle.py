"""What the experts of every framework are held against: a loop over experts in fp64, written on its own."""

import importlib
import sys
from types import ModuleType

import torch


def swiglu(gate, up, limit=None, alpha=1.0, offset=0.0):
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return gate / (1 + torch.exp(-alpha * gate)) * (up + offset)


def exact(*tensors):
    """The same values in fp64, as leaves that want gradients."""
    return [t.detach().double().requires_grad_() for t in tensors]


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


def import_anew(monkeypatch, name):
    """Import a module that is forgotten after the test: what it imports may be a stand-in."""
    monkeypatch.setitem(sys.modules, name, None)  # what was there before comes back
    del sys.modules[name]
    return importlib.import_module(name)
