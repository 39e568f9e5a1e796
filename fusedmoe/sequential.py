"""`Sequential`: ops and other modules in a row, run by the fewest kernels that there are for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fusedmoe.chain import Chain, check_inputs
from fusedmoe.errors import InputError
from fusedmoe.fusion.graph import Graph
from fusedmoe.fusion.plan import Explanation
from fusedmoe.ops.op import Node, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Sequential(nn.Sequential):
    """``torch.nn.Sequential`` whose ops are fused where there is a kernel for them, with the same results.

    Built, indexed, sliced, saved and copied like ``torch.nn.Sequential``. Besides, ops take runtime inputs by name:
    each is given once, to ``forward``, for whichever ops use it, unless an earlier op provides it.

    Any other ``nn.Module`` may stand among the ops; it is called with the rows alone, and splits the chain there. So
    does an op with module hooks, or one whose ``forward`` was replaced: it is called as a module, so that the hooks
    run. A nested `Sequential` counts as its ops.

    Examples
    --------
    >>> experts = Sequential(GroupedLinear(8, 64, 2 * 32), SwiGLU(), GroupedLinear(8, 32, 64))
    >>> y = experts(x, splits=tokens_per_expert)
    """

    def forward(self, x: Tensor, /, **inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Run the ops.

        Parameters
        ----------
        x
            The rows, (R, features).
        **inputs
            The runtime inputs, by name: ``splits``, ``probs``, ...

        Raises
        ------
        InputError
            A runtime input is missing, is used by no op, or has the wrong shape, dtype or device.
        """
        layout = self._current_layout()
        named = layout.bind(x, inputs)
        for part in layout.parts:
            x = part.run(x, named)
        return x

    def explain(self, x: Tensor, /, **inputs: Tensor) -> Explanation:
        """Return what `forward` would do with this call, and why: ``print`` it for a table.

        The backward pass is planned as autograd would want it here: nothing under ``torch.no_grad()``. Chains and
        modules in front of another chain are run, to know what it gets.
        """
        layout = self._current_layout()
        named = layout.bind(x, inputs)
        explained = []
        for i, part in enumerate(layout.parts):
            explained.append((part.title, part.chain.explain(x, named) if isinstance(part, _ChainPart) else None))
            if i + 1 < len(layout.parts):
                x = part.run(x, named)
        return Explanation(tuple(explained))

    @property
    def runtime_inputs(self) -> tuple[str, ...]:
        """The runtime inputs that `forward` takes, in order of first use."""
        return tuple(self._current_layout().wanted)

    def _current_layout(self) -> _Layout:
        modules = tuple(_flattened(self, ""))
        layout: _Layout | None = self.__dict__.get("_layout")
        if layout is None or layout.modules != modules:
            layout = self.__dict__["_layout"] = _Layout(modules)
        return layout

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_layout"}


def _hooked(module: nn.Module) -> bool:
    """Whether a call of the module does more than its ``forward``, or its ``forward`` is not its class's."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or _has_any_global_hook()
    )


def _flattened(sequential: Sequential, prefix: str) -> Iterator[tuple[str, nn.Module, bool]]:
    """Every module in order, nested Sequentials opened: its label, itself, whether it joins a chain."""
    for name, module in sequential._modules.items():
        if isinstance(module, Op):
            yield prefix + name, module, type(module).forward is Op.forward and not _hooked(module)
        elif type(module) is Sequential and not _hooked(module):
            yield from _flattened(module, f"{prefix}{name}.")
        else:
            yield prefix + name, module, False


@dataclass(frozen=True)
class _ChainPart:
    chain: Chain

    @property
    def title(self) -> str:
        first, last = self.chain.nodes[0].label, self.chain.nodes[-1].label
        return f"chain {first}" if first == last else f"chain {first} to {last}"

    def run(self, x: Tensor, named: dict[str, Tensor]) -> Tensor:
        y, *exports = self.chain.run(x, named)
        named.update(zip(self.chain.exports, exports, strict=True))
        return y


@dataclass(frozen=True)
class _ModulePart:
    label: str
    module: nn.Module
    takes: tuple[str, ...]
    provides: tuple[str, ...]

    @property
    def title(self) -> str:
        why = (
            "called as a module, for its hooks"
            if self.takes or isinstance(self.module, Op)
            else "not an op: splits the chain"
        )
        return f"module {self.label}: {type(self.module).__name__}: {why}"

    def run(self, x: Tensor, named: dict[str, Tensor]) -> Tensor:
        y = self.module(x, **{name: named[name] for name in self.takes})
        if not self.provides:
            return y  # type: ignore[no-any-return]
        rows, provided = y
        named.update(provided)
        return rows  # type: ignore[no-any-return]


class _Layout:
    """The modules of a Sequential cut into chains and single modules, and the runtime inputs that they take from the
    caller.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module, bool]]) -> None:
        self.modules = tuple(modules)
        following = [m for _, m, _ in modules if isinstance(m, Op)]
        placed: list[tuple[str, nn.Module, bool]] = []
        for label, module, joins in modules:
            if isinstance(module, Op):
                following = following[1:]
                module = module.placed(following)
            placed.append((label, module, joins))
        if all_ops := [Node(label, module) for label, module, _ in placed if isinstance(module, Op)]:
            Graph(all_ops)  # refuses a weight that is applied twice, also on two sides of a split
        groups: list[list[tuple[str, nn.Module, bool]]] = []
        for entry in placed:
            if entry[2] and groups and groups[-1][-1][2]:
                groups[-1].append(entry)
            else:
                groups.append([entry])
        takes = [self._takes(group) for group in groups]
        self.wanted: dict[str, list[str]] = {}
        self.provided: dict[str, str] = {}
        self.parts: list[_ChainPart | _ModulePart] = []
        for i, group in enumerate(groups):
            for name, ops in takes[i].items():
                if name not in self.provided:
                    self.wanted.setdefault(name, []).extend(ops)
            provides = {
                name: f"{lab}.{type(m).__name__}" for lab, m, _ in group if isinstance(m, Op) for name in m.provides
            }
            later = {name for t in takes[i + 1 :] for name in t}
            self.provided |= provides
            if group[0][2]:
                nodes = [Node(label, module) for label, module, _ in group]  # type: ignore[arg-type]
                self.parts.append(_ChainPart(Chain(nodes, [name for name in provides if name in later])))
            else:
                ((label, module, _),) = group
                self.parts.append(_ModulePart(label, module, tuple(takes[i]), tuple(provides)))
        self._names = self.wanted.keys()

    @staticmethod
    def _takes(group: Sequence[tuple[str, nn.Module, bool]]) -> dict[str, list[str]]:
        """The runtime inputs that a part takes from outside of it, with the ops that do."""
        if all(isinstance(module, Op) for _, module, _ in group):
            graph = Graph([Node(label, module) for label, module, _ in group])  # type: ignore[arg-type]
            return {name: [p.label for p in graph.forward if name in p.names.values()] for name in graph.inputs}
        ((label, module, _),) = group
        return {name: [label] for name in module.runtime_inputs} if isinstance(module, Sequential) else {}

    def bind(self, x: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if not isinstance(x, Tensor):
            raise InputError(f"Sequential: x: expected a tensor, got {type(x).__name__}")
        if inputs.keys() != self._names or not all(isinstance(t, Tensor) for t in inputs.values()):
            check_inputs("Sequential", self.wanted, inputs, self.provided)
        return inputs
