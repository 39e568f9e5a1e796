"""The parts of a `Sequential`: chains of ops, and modules that are called as modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn

from fusedmoe.base.errors import InputError
from fusedmoe.base.inputs import Parameters
from fusedmoe.call.batches import BatchedPart
from fusedmoe.call.chain import Chain
from fusedmoe.call.sorted_rows import ModuleCall, call_module, why_no_rows
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.ops.op import Op


@dataclass(frozen=True)
class ChainPart:
    """Consecutive ops that are planned together."""

    chain: Chain  # the chain for input rows that ``splits`` counts
    apart: Chain | None  # the chain for input rows that ``splits`` no longer counts; None if it is the same
    sorts_rows: bool  # whether ``splits`` counts the output rows, for any input rows

    @property
    def title(self) -> str:
        """The part's name in ``explain()``."""
        first, last = self.chain.nodes[0].label, self.chain.nodes[-1].label
        return f"chain {first}" if first == last else f"chain {first} to {last}"

    def chain_for(self, counted: bool) -> Chain:
        """Return the chain for input rows; ``counted`` is whether ``splits`` counts them."""
        return self.chain if counted or self.apart is None else self.apart

    def run(
        self, x: Tensor, named: dict[str, Tensor], options: KernelOptions, parameters: Parameters | None, counted: bool
    ) -> tuple[Tensor, bool]:
        """Run the chain; return the output rows, and whether ``splits`` counts them."""
        return self.chain_for(counted).run(x, named, options, parameters), counted or self.sorts_rows


@dataclass(frozen=True)
class ModulePart:
    """A module that is called as a module."""

    label: str
    module: nn.Module
    call: ModuleCall

    @property
    def title(self) -> str:
        """The part's name in ``explain()``, with the reason why the module is in no chain."""
        why = (
            "called as a module because of its hooks"
            if self.call.takes or isinstance(self.module, Op)
            else "not an op: splits the chain"
        )
        why = getattr(self.module, "purpose", why)
        return f"module {self.label}: {type(self.module).__name__}: {why}"

    def run(
        self, x: Tensor, named: dict[str, Tensor], options: KernelOptions, parameters: Parameters | None, counted: bool
    ) -> tuple[Tensor, bool]:
        """Call the module with `call_module`; return as `ChainPart.run`. A `Sequential` uses its own options.

        Raises `InputError`: the module returned no tensor, and an op comes after it.
        """
        y, counted = call_module(self.module, x, named, self.call, counted)
        if wrong := why_no_rows(y, self.call):
            raise InputError(wrong)
        return y, counted


Part: TypeAlias = ChainPart | ModulePart | BatchedPart
