"""``sm90.offsets_from_splits``: the end of each expert's rows, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedmoe.base.environment import debugging
from fusedmoe.builtin_rules import guards
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.ops.glue import DeriveOffsets


class OffsetsFromSplits(FusionRule, name="offsets_from_splits", direction="forward"):
    """``offsets[e] = min(splits[0] + ... + splits[e], rows)``. ``FUSEDMOE_DEBUG`` checks the splits first."""

    derive: DeriveOffsets

    def offer(self, ctx: PlanContext) -> Step:
        dtype = ctx.dtype("derive.splits")
        require(dtype in (torch.int32, torch.int64), "splits are %s, not int32 or int64: convert them", dtype)
        return Step(needs=("derive.splits", "derive.rows"), gives=("derive.offsets",))

    def bind(self, ctx: PlanContext, splits: Tensor, rows: Tensor) -> Run:
        kernel = guards.on_readable(splits, row_functions.bind_offsets_from_splits(splits, rows.shape[0]))
        if not debugging():
            return kernel

        def checked(splits: Tensor, rows: Tensor) -> Tensor:
            self.derive.check(splits, rows)
            return kernel(splits, rows)

        return checked
