"""The modules that run in the place of a `Dispatch` and a `Combine`.

A `Dispatch` without ``num_experts`` takes the number from the next grouped op. With ``expert_parallel``, both ops are
replaced by modules that exchange tokens between the ranks, and by their own forms for the experts of one rank:

- ``Dispatch``: `AgreeOnTokens` and `CountRows`, if the ranks need them, `GatherTokens`, ``Dispatch``;
- ``Combine``: ``Combine``, `ReturnTokens`;
- with an engine without static shapes, `GatherVaryingTokens` and `ReturnVaryingTokens` exchange the tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from fusedmoe.base.errors import InputError
from fusedmoe.call.sorted_rows import changes_rows
from fusedmoe.ops.dispatch import Combine, Dispatch, return_of
from fusedmoe.ops.exchange.fixed import AgreeOnTokens, CountRows, GatherTokens
from fusedmoe.ops.exchange.varying import GatherVaryingTokens
from fusedmoe.ops.grouped_linear import GroupedLinear
from fusedmoe.ops.op import Op


class Member(NamedTuple):
    """A module of a Sequential, after nested Sequentials were replaced by their modules."""

    label: str
    module: nn.Module
    joins: bool  # whether it is part of a chain


class Replaced(NamedTuple):
    """An op that other modules replace, and the facts that they follow from."""

    op: Op
    following: tuple[Op, ...]  # the ops after it
    attributes: tuple[Hashable, ...]  # those of its `with_experts`

    def holds(self) -> bool:
        """Whether the same modules still replace the op."""
        return with_experts(self.op, self.following).attributes() == self.attributes


def placed(members: Sequence[Member]) -> tuple[list[Member], list[Replaced]]:
    """Return the members that run in the place of these, and the ops that others replace."""
    following = tuple(m.module for m in members if isinstance(m.module, Op))
    result: list[Member] = []
    replaced: list[Replaced] = []
    dispatch: tuple[str, Dispatch] | None = None  # the last one
    for member in members:
        op = member.module
        if not isinstance(op, Op):
            result.append(member)
            continue
        following = following[1:]
        found = with_experts(op, following)
        if isinstance(found, Dispatch):
            dispatch = member.label, found
        elif isinstance(found, Combine) and dispatch is not None:
            _check_ranks(*dispatch, member.label, found)
            dispatch = None
        elif isinstance(found, GroupedLinear) and dispatch is not None:
            _check_shards(*dispatch, member.label, found)
        runs = _over_ranks(found) if member.joins else (("", found),)
        if found is not op or len(runs) > 1:
            replaced.append(Replaced(op, following, found.attributes()))
        for suffix, module in runs:
            label = f"{member.label}.{suffix}" if suffix else member.label
            result.append(Member(label, module, member.joins and isinstance(module, Op)))
    return _agreement_first(result), replaced


def with_experts(op: Op, following: Sequence[Op]) -> Op:
    """Return a `Dispatch` with the number of experts of the next grouped op, if it has none; else the op itself."""
    if not isinstance(op, Dispatch) or op.num_experts is not None:
        return op
    for other in following:
        if "offsets" in other.runtime_inputs and isinstance(groups := getattr(other, "num_groups", None), int):
            found = copy.copy(op)  # keeps the hooks
            found.num_experts = groups
            return found
    raise InputError(
        "Dispatch(): num_experts is None, and no grouped op follows that gives it: pass Dispatch(num_experts=...)"
    )


def _over_ranks(op: Op) -> tuple[tuple[str, nn.Module], ...]:
    """Return the modules that run in the place of an op, each with a suffix of its label.

    They follow from the class and the public attributes of the op.
    """
    if isinstance(op, Dispatch) and op.expert_parallel is not None:
        return _dispatch_over_ranks(op)
    if isinstance(op, Combine) and (ep := op.expert_parallel) is not None:
        local = Combine(op.weights)
        if ep.combine_dtype is not None:
            local.output_dtype = ep.combine_dtype
            local.runtime_inputs = (*local.runtime_inputs, "row_dtype")
        return ("", local), ("return", return_of(ep))
    return (("", op),)


def _dispatch_over_ranks(op: Dispatch) -> tuple[tuple[str, nn.Module], ...]:
    ep, experts = op.expert_parallel, op.num_experts
    assert ep is not None
    assert experts is not None
    local = Dispatch(ep.local_experts(experts, "Dispatch"))
    local.runtime_inputs = ("gathered_index", "gathered_weight")
    if not ep.engine.static_shapes:
        local.runtime_inputs = (*local.runtime_inputs, "local_rows")
        return ("gather", GatherVaryingTokens(experts, ep)), ("", local)
    limit = ep.row_limit(experts)
    before: list[tuple[str, nn.Module]] = [] if ep.max_tokens is not None else [("agree", AgreeOnTokens(ep))]
    if ep.counts_rows:
        before.append(("count", CountRows(experts, limit, ep)))
        local.runtime_inputs = (*local.runtime_inputs, "local_rows")
    else:
        local.limit = replace(limit, batch_rows=ep.batch_rows)
    return *before, ("gather", GatherTokens(experts, ep)), ("", local)


def _check_ranks(label: str, dispatch: Dispatch, other_label: str, combine: Combine) -> None:
    """Raise unless both have the same ranks: the rows of a token would be summed over others than it was sent to."""
    if dispatch.expert_parallel is not combine.expert_parallel:
        raise InputError(
            f"{other_label}.Combine: expert_parallel: expected the object of {label}.Dispatch, "
            f"{dispatch.expert_parallel}, got {combine.expert_parallel}"
        )


def _check_shards(label: str, dispatch: Dispatch, other_label: str, op: GroupedLinear) -> None:
    """Raise if an op after a `Dispatch` over ranks has weights of its own, of experts that no other rank has."""
    ep, own = dispatch.expert_parallel, op.expert_parallel
    if ep is None or ep.ranks == 1 or (own is not None and own.group is ep.group):
        return
    if any(parameter is not None for parameter in op._parameters.values()):
        raise InputError(
            f"{other_label}.{type(op).__name__}: expert_parallel: expected the ranks of {label}.Dispatch, {ep}, since "
            f"each of them has other experts, got {own}"
        )


def _agreement_first(members: list[Member]) -> list[Member]:
    """Move each `AgreeOnTokens` before the ops that leave the number of rows unchanged, so that it splits no chain."""
    for i, member in enumerate(members):
        if isinstance(member.module, AgreeOnTokens):
            first = i
            while first and members[first - 1].joins and not changes_rows(members[first - 1].module):
                first -= 1
            members.insert(first, members.pop(i))
    return members
