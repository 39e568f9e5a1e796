"""The built-in fusion rules, one file a fusion. A new rule is added to `BUILTIN`."""

from __future__ import annotations

from fusedmoe.builtin_rules.sm90.column_sums import ColumnSums
from fusedmoe.builtin_rules.sm90.grouped_dgrad import GroupedDgrad
from fusedmoe.builtin_rules.sm90.grouped_dgrad_activation import GroupedDgradActivation
from fusedmoe.builtin_rules.sm90.grouped_gemm import GroupedGemm
from fusedmoe.builtin_rules.sm90.grouped_gemm_activation import GroupedGemmActivation
from fusedmoe.builtin_rules.sm90.grouped_wgrad import GroupedWgrad
from fusedmoe.builtin_rules.sm90.slots import (
    GatherGradient,
    RouteAndGather,
    RowDots,
    SlotValues,
    SumGradients,
    SumSlots,
)
from fusedmoe.fusion.rule import FusionRule

BUILTIN: tuple[type[FusionRule], ...] = (
    GroupedGemm,
    GroupedGemmActivation,
    GroupedDgrad,
    GroupedDgradActivation,
    GroupedWgrad,
    ColumnSums,
    RouteAndGather,
    SumSlots,
    GatherGradient,
    RowDots,
    SumGradients,
    SlotValues,
)
