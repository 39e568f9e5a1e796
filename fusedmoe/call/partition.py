"""The partition of a `Sequential` into chains of ops and single modules, with the runtime inputs that they take.

An op that is called alone has a partition of one chain. ``splits`` *counts* a set of rows if its entries are their
numbers per expert.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from weakref import ref

from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled

from fusedmoe.base.autocast import casts_rows
from fusedmoe.base.errors import InputError
from fusedmoe.base.inputs import Parameters, check_inputs, check_names, check_parameters, not_a_tensor
from fusedmoe.base.log import say_once
from fusedmoe.call.batches import BatchedPart, begins_batches
from fusedmoe.call.chain import Chain
from fusedmoe.call.parts import ChainPart, ModulePart, Part
from fusedmoe.call.placing import Member, placed
from fusedmoe.call.sorted_rows import (
    Boundary,
    accepts_splits,
    boundaries,
    module_call,
)
from fusedmoe.call.still_valid import ModulesOfPartition
from fusedmoe.expert_parallel.shards import Averaged, check_ddp, owners
from fusedmoe.fusion.graph.forward import Graph, first_takers_of_offsets
from fusedmoe.kernels.options import DEFAULT, KernelOptions
from fusedmoe.ops.dispatch import Combine
from fusedmoe.ops.op import Node, Op, Runnable

logger = logging.getLogger("fusedmoe.layers.sequential")


@contextmanager
def buffers_kept(parts: Sequence[Part]) -> Iterator[None]:
    """Restore the buffers of modules after the block, in which ``explain()`` calls modules."""
    modules = [part.module for part in parts if isinstance(part, ModulePart)]
    buffers = [(b, b.clone()) for m in modules for b in m.buffers() if not b.is_inference()]
    try:
        yield
    finally:
        for buffer, before in buffers:
            buffer.data.copy_(before)  # without a new version for autograd


def partition_for(
    root: Runnable, given: Collection[str] = (), returned: tuple[str, ...] = (), casts: bool | None = None
) -> Partition:
    """Return the partition of a module for a call with these runtime inputs. It is cached while it is valid.

    - ``root``, ``given``: the module, and the names of the runtime inputs.
    - ``returned``: the provided values that the call returns besides its rows.
    - ``casts``: whether autocast changes the dtype of the call's rows; None if it is off.
    """
    state = root._of_process
    partition: Partition | None = state.partition
    if partition is None or not partition.modules.hold(root):
        partition = state.partition = Partition(root)
        partition.name(state.place)
        partition.warn_of_options()
    sorted_rows = partition.may_be_sorted and "splits" in given
    # the dtype of rows that a module returns is not known
    divided = partition.mixed and casts is not None and (casts or len(partition.parts) > 1)
    if sorted_rows or divided or (returned and not isinstance(root, Op)):
        kind = sorted_rows, divided, returned
        partition = state.other_partitions.get(kind)
        if partition is None or not partition.modules.hold(root):
            partition = state.other_partitions[kind] = Partition(root, *kind)
            partition.name(state.place)
    return partition


def partition_of_call(
    root: Runnable,
    x: Tensor,
    inputs: dict[str, Tensor],
    parameters: Parameters | None = None,
    returned: tuple[str, ...] = (),
) -> Partition:
    """Return the partition of a module for a call with these arguments, which are checked; see `partition_for`."""
    casts = casts_rows(x) if _is_any_autocast_enabled() and isinstance(x, Tensor) else None
    partition = partition_for(root, inputs, returned, casts)
    if not isinstance(x, Tensor):
        raise not_a_tensor(partition.who, "x", x)
    if inputs.keys() != partition.names or (inputs and False in [isinstance(t, Tensor) for t in inputs.values()]):
        check_inputs(partition.who, partition.wanted, inputs, partition.provided)
    if parameters is not None:
        check_parameters(partition.parameters, parameters)
    return partition


class Partition:
    """The parts of a module in order.

    Arguments:
    - ``root``: a `Sequential`, an `MoE`, or an op that is called alone.
    - ``sorted_rows``: the caller gives ``splits`` although no op requires them; see `may_be_sorted`.
    - ``divided``: ops that autocast casts and ops that it does not cast are in different chains; see `Op.autocasts`.
    - ``returned``: the provided values that the call returns besides its rows. An op that is called alone returns all
      of them.

    Its attributes:
    - ``parts`` (list): `ChainPart`, `ModulePart` and `BatchedPart`.
    - ``modules`` (ModulesOfPartition): the modules that it was made from. If they have changed, the partition does not
      hold.
    - ``wanted`` (dict): each runtime input that the caller must give, with the ops that take it.
    - ``names`` (set of str): the names in `wanted`.
    - ``parameters`` (dict): for each parameter of the chains its op, and its name in the op.
    - ``provided`` (dict): each value that an op provides, with the op's label.
    - ``changes_rows`` (bool): whether a module declares that its output has other rows than its input.
    - ``may_be_sorted`` (bool): whether no op requires ``splits``, but one accepts them.
    - ``exchanges`` (bool): whether an op or a module exchanges tensors with other ranks.
    - ``mixed`` (bool): whether a chain has ops that autocast casts and ops that it does not cast.
    """

    def __init__(
        self, root: Runnable, sorted_rows: bool = False, divided: bool = False, returned: tuple[str, ...] = ()
    ) -> None:
        self._root_ref = ref(root)  # the module has its partition: a cycle would keep the weights of a deleted module
        self._returned = root.provides if isinstance(root, Op) else returned
        self._opened: list[tuple[str, Runnable]] = []
        self.modules = ModulesOfPartition()
        own = [Member("op", root, joins=True)] if isinstance(root, Op) else self._members(root, "")
        members, self.modules.replaced = placed(own)
        if all_ops := _nodes(members):
            Graph(all_ops)  # raises if a weight is applied twice, also by two ops with a module in between
        groups = _grouped(members, divided)
        self.mixed = any(len({m.module.autocasts for m in g if isinstance(m.module, Op)}) > 1 for g in groups)
        sorted_by = f"op.{type(root).__name__}" if isinstance(root, Op) else "Sequential"
        rows = boundaries([(m.label, m.module) for m in members], sorted_by if sorted_rows else None)
        self.changes_rows = rows[0].rows != rows[-1].rows
        ends = [*accumulate(map(len, groups), initial=0)]
        around = [rows[start : end + 1] for start, end in pairwise(ends)]  # the rows before, in and after each group
        self.wanted: dict[str, list[str]] = {"splits": [sorted_by]} if sorted_rows else {}
        self.provided: dict[str, str] = {}
        self.parts = self._parts_of(groups, around)
        self.may_be_sorted = "splits" not in self.wanted and any(
            accepts_splits(m.module, m.joins) for m, row in zip(members, rows, strict=False) if row == (0, None)
        )
        self.names = self.wanted.keys()
        self.exchanges = any(getattr(m.module, "exchanges", False) or getattr(m.module, "travels", ()) for m in members)
        chains = [part.chain for part in self.parts if not isinstance(part, ModulePart)]
        self.parameters = {key: (op, name) for chain in chains for op, name, key in chain.parameters}
        only = self.parts[0] if len(self.parts) == 1 else None
        self._only_chain = only.chain if isinstance(only, ChainPart) else None
        self._before: list[Callable[[], object]] = []  # to call before each run
        if self.exchanges:
            for _, op, ep in owners(root):
                ep.copies.add(op)
            self._before.append(check_ddp)
        if (averaged := Averaged(root)).modules:  # parameters that are shards
            self._before.append(averaged.add_hooks)

    def run(
        self, x: Tensor, named: dict[str, Tensor], options: KernelOptions, parameters: Parameters | None = None
    ) -> Tensor:
        """Run the parts on these rows, values and parameters by name; return the rows of the last part."""
        for prepare in self._before:
            prepare()
        if self._only_chain is not None:  # most calls
            return self._only_chain.run(x, named, options, parameters)
        counted = True
        for part in self.parts:
            x, counted = part.run(x, named, options, parameters, counted)
        return x

    def _parts_of(self, groups: list[list[Member]], around: list[list[Boundary]]) -> list[Part]:
        """Return the part of each group; fill `wanted` and `provided`. ``around`` are the rows at a group's members."""
        takes = [_takes(group) for group in groups]
        shared = [_shared_rows(group, among) for group, among in zip(groups, around, strict=True)]
        parts: list[Part] = []
        for i, group in enumerate(groups):
            for name, ops in takes[i].items():
                if name not in self.provided:
                    self.wanted.setdefault(name, []).extend(ops)
            later = {name for t in takes[i + 1 :] for name in t}
            if any(shared[i + 1 :]):
                later.add("splits")
            before = tuple(self.provided)
            provides = {
                name: f"{m.label}.{type(m.module).__name__}"
                for m in group
                for name in (*getattr(m.module, "provides", ()), *getattr(m.module, "provides_if_read", ()))
            }
            self.provided |= provides
            if begins_batches(group[0].module):
                parts.append(self._batched_part(group, provides, later, before))
            elif group[0].joins:
                exports = [name for name in provides if name in later or name in self._returned]
                returns_rows = not isinstance(self._root, Op) or self._root.returns_rows
                parts.append(_chain_part(_nodes(group), exports, shared[i], before, not i, returns_rows))
            else:
                (member,) = group
                gives_rows = _gives_rows(member, groups[i + 1][0]) if i + 1 < len(groups) else ""
                read = tuple(name for name in provides if name in later or name in self._returned)
                call = module_call(member.module, tuple(takes[i]), read, around[i], not i, gives_rows)
                parts.append(ModulePart(member.label, member.module, call))
        return parts

    def _batched_part(
        self, group: list[Member], provides: Mapping[str, str], later: set[str], before: Sequence[str]
    ) -> BatchedPart:
        """Return the part of the experts that run in batches of rows."""
        who = f"{group[0].label}.Dispatch: ExpertParallel(batch_rows=...)"
        if not isinstance(group[-1].module, Combine):
            raise InputError(
                f"{who}: expected only ops, without hooks, up to the Combine, got {group[-1].label}."
                f"{type(group[-1].module).__name__} as the last op of the chain"
            )
        if read := sorted(later & provides.keys()):
            raise InputError(f"{who}: expected no op after the Combine that takes {', '.join(read)} of a batch")
        if random := [m.label for m in group if isinstance(m.module, Op) and m.module.draws_random]:
            raise InputError(f"{who}: expected ops that draw no random numbers, got {', '.join(random)}")
        return BatchedPart(Chain(_nodes(group), provided=before))

    def _members(self, parent: Runnable, prefix: str) -> list[Member]:
        """Return every module in order; `modules` compares them from now on."""
        self.modules.add_parent(parent, is_root=parent is self._root)
        members = []
        for name, module in parent._chained():
            if module is None:
                raise InputError(f"Sequential: {prefix}{name}: expected a module, got None")
            hooked = self.modules.add_child(module)
            hooked = hooked or (self.modules.global_hook and not _without_parameters(module))
            if not hooked and parent._opens(module):
                self._opened.append((prefix + name, module))
                members += self._members(module, f"{prefix}{name}.")
            else:
                joins = isinstance(module, Op) and type(module).forward is type(module).forward_in_chain and not hooked
                members.append(Member(prefix + name, module, joins))
        return members

    @property
    def _root(self) -> Runnable:
        root = self._root_ref()
        assert root is not None, "only a module uses its partition"
        return root

    def name(self, name: str) -> None:
        """Set the name of the Sequential in a model, which log lines and errors put before the labels of ops."""
        for part in self.parts:
            if not isinstance(part, ModulePart) and not isinstance(self._root, Op):
                part.chain.name = f"{name}, {part.title}" if name else ""
                for label, op in part.chain.nodes:
                    op._of_process.place = f"{name}.{label}".lstrip(".")

    def warn_of_options(self) -> None:
        """Warn of nested Sequentials whose options differ: those of the outermost Sequential apply."""
        message = "nested Sequential %r: %s applies only when it is called by itself; set it on the outer Sequential"
        for label, module in self._opened:
            if module._options not in (DEFAULT, self._root._options):
                say_once(logger, logging.WARNING, message, label, ", ".join(module._options.changed()))

    @property
    def who(self) -> str:
        """The module's name in errors."""
        return repr(self._root) if isinstance(self._root, Op) else "Sequential"

    def check_names(self, given: Sequence[str]) -> None:
        """Check that the caller gives exactly the runtime inputs that are wanted."""
        check_names(self.who, self.wanted, given, self.provided)


def _shared_rows(group: Sequence[Member], among: Sequence[Boundary]) -> dict[int, str]:
    """Return the sets of rows in a part that only ops of other parts sort by expert, by number from 0, with that op."""
    own = first_takers_of_offsets(_nodes(group)) if group[0].joins else {}
    found: dict[int, str | None] = {}
    for boundary in among:
        found.setdefault(boundary.rows - among[0].rows, boundary.taker)
    return {rows: taker for rows, taker in found.items() if taker is not None and rows not in own}


def _gives_rows(member: Member, after: Member) -> str:
    """Return `ModuleCall.gives_rows` of a module."""
    if not after.joins:
        return ""
    here, there = (f"{m.label}.{type(m.module).__name__}" for m in (member, after))
    return f"{here}: output: expected a tensor, the rows for {there}"


def _chain_part(
    nodes: Sequence[Node],
    exports: Sequence[str],
    shared: Mapping[int, str],
    before: Sequence[str],
    first: bool,
    returns_rows: bool,
) -> ChainPart:
    """Return the part of these ops."""
    chain = Chain(nodes, exports, shared, before, returns_rows)
    lost = {rows: taker for rows, taker in shared.items() if rows}
    # only a module before the part can have changed the number of its input rows
    apart = None if first or 0 not in shared else Chain(nodes, exports, lost, before, returns_rows)
    sorts_rows = any(node.op.changes_rows for node in nodes) or bool(first_takers_of_offsets(nodes))
    return ChainPart(chain, apart, sorts_rows)


def _without_parameters(module: nn.Module) -> bool:
    """Whether `Sequential.forward_with` passes the parameters of an op in the module, which then cannot be called."""
    return any(
        isinstance(m, Op) and m.parameter_names and all(getattr(m, name, None) is None for name in m.parameter_names)
        for m in module.modules()
    )


def _nodes(members: Sequence[Member]) -> list[Node]:
    return [Node(m.label, m.module) for m in members if isinstance(m.module, Op)]


def _grouped(members: Sequence[Member], divided: bool) -> list[list[Member]]:
    """Return the members of each part: neighbouring ops, or any other module alone. ``divided``: see `Partition`."""
    groups: list[list[Member]] = []
    for member in members:
        before = groups[-1][-1] if groups else None
        apart = before and divided and _autocasts(member) != _autocasts(before)
        if before and not apart:  # the experts of a batch
            ends = begins_batches(groups[-1][0].module) and isinstance(before.module, Combine)
            apart = ends or begins_batches(member.module)
        if before and member.joins and before.joins and not apart:
            groups[-1].append(member)
        else:
            groups.append([member])
    return groups


def _autocasts(member: Member) -> bool:
    return isinstance(member.module, Op) and member.module.autocasts


def _takes(group: Sequence[Member]) -> dict[str, list[str]]:
    """Return the runtime inputs that a part takes from outside, with the ops that take them."""
    if nodes := _nodes(group):
        return Graph(nodes).takers
    (member,) = group
    names: tuple[str, ...] = getattr(member.module, "runtime_inputs", ())
    return {name: [member.label] for name in names}
