"""The built-in fusion rules, one file a fusion. A new rule is added to `BUILTIN`."""

from __future__ import annotations

from fusedmoe.fusion.rule import FusionRule
from fusedmoe.fusion.rules.column_sums import ColumnSums
from fusedmoe.fusion.rules.grouped_dgrad import GroupedDgrad
from fusedmoe.fusion.rules.grouped_dgrad_activation import GroupedDgradActivation
from fusedmoe.fusion.rules.grouped_gemm import GroupedGemm
from fusedmoe.fusion.rules.grouped_gemm_activation import GroupedGemmActivation
from fusedmoe.fusion.rules.grouped_wgrad import GroupedWgrad
from fusedmoe.fusion.rules.slots import (
    GatherGradient,
    RouteAndGather,
    RowDots,
    SlotValues,
    SumGradients,
    SumSlots,
)

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
