"""Whether the plan of an earlier call holds for this call: the one question that every call asks.

A call asks it twice. A *partition* holds while the modules and their hooks are the same (`ModulesOfPartition`). The
*last call* of a chain serves again if the context and the tensors are equal (`context_of_call`, `LastCall.serves`).
Then the call runs the same `BoundPlan`, without a look-up. Otherwise `PlanTable.find` looks for another one.

Every call of every layer runs these functions: they must be fast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.nn.modules.module import _has_any_global_hook

from fusedmoe.base import changes
from fusedmoe.base.environment import environment_state
from fusedmoe.base.estimating import counts_flops
from fusedmoe.call.placing import Replaced
from fusedmoe.call.settings import Settings
from fusedmoe.fusion.program.plan import BoundPlan
from fusedmoe.fusion.program.plan_table import CallContext
from fusedmoe.fusion.program.signature import Signature
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.ops.op import Runnable


class ModulesOfPartition:
    """The modules that a partition was made from, and whether they have hooks.

    - ``global_hook`` (bool): whether torch has a hook for all modules.
    - ``replaced`` (list of Replaced): the ops that other modules replace. It is filled after the walk over the modules.
    """

    def __init__(self) -> None:
        self._changes = changes.count  # before the attributes are read: another thread may change them meanwhile
        self.global_hook = _has_any_global_hook()
        self.replaced: list[Replaced] = []
        # for each parent (None: the root, which has the partition, so that a reference would be a cycle), the names of
        # the modules that run (None: all), and these modules
        self._children: list[tuple[Runnable | None, tuple[str, ...] | None, list[Any]]] = []
        self._hooked: list[tuple[nn.Module, bool]] = []

    def add_parent(self, parent: Runnable, is_root: bool) -> None:
        """Compare the children of a module from now on."""
        names, modules = parent._chained_names, parent._modules
        children: list[Any] = [*modules.items()] if names is None else [modules[name] for name in names]
        self._children.append((None if is_root else parent, names, children))

    def add_child(self, module: nn.Module) -> bool:
        """Compare the hooks of a module from now on; return whether it has any."""
        hooked = has_hooks(module)
        self._hooked.append((module, hooked))
        return hooked

    def hold(self, root: Runnable) -> bool:
        """Whether the modules of the root, and their hooks, are still the same."""
        for parent, names, children in self._children:
            modules = root._modules if parent is None else parent._modules
            if ([*modules.items()] if names is None else [*map(modules.get, names)]) != children:
                return False
        for module, hooked in self._hooked:
            if has_hooks(module) is not hooked:
                return False
        if self.replaced and self._changes != changes.count:
            count = changes.count  # read before the attributes: another thread may change them meanwhile
            if not all(op.holds() for op in self.replaced):
                return False
            self._changes = count
        return _has_any_global_hook() is self.global_hook


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class's ``forward``."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )


def context_of_call(now: Settings, options: KernelOptions) -> tuple[Any, ...]:
    """Return the fields of a `CallContext`. A steady call only compares them: making one takes the host 0.3 us more."""
    return (
        now,
        options,
        changes.count,
        environment_state(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        _len_torch_dispatch_stack() > 0 and counts_flops(),
    )


class LastCall(NamedTuple):
    """The last call of a chain."""

    call: BoundPlan
    tensors: Signature
    context: CallContext
    device_type: str

    def serves(self, tensors: Signature, context: tuple[Any, ...]) -> bool:
        """Whether a call with these tensors and this context runs the same plan. Autocast casts the arguments first."""
        return tensors == self.tensors and context == self.context and not torch.is_autocast_enabled(self.device_type)
