"""Rules for Blackwell whose kernels are those for Hopper, compiled for the GPU's architecture. They have no matrix
product: they sort and move rows, apply activations to them, sum them, and derive offsets.
"""

from __future__ import annotations

from fusedmoe.builtin_rules.products.linear import LinearColumnSums
from fusedmoe.builtin_rules.rows import dispatch
from fusedmoe.builtin_rules.rows.activation import ActivationRule, DActivationRule
from fusedmoe.builtin_rules.rows.column_sums import ColumnSums
from fusedmoe.builtin_rules.rows.offsets import OffsetsFromSplits
from fusedmoe.builtin_rules.sm100.backend import OnSm100


class DispatchOnSm100(OnSm100, dispatch.DispatchRule, name="sm100.dispatch", direction="forward"):
    """`sm90.dispatch` on Blackwell."""


class CombineOnSm100(OnSm100, dispatch.CombineRule, name="sm100.combine", direction="forward"):
    """`sm90.combine` on Blackwell."""


class DCombineOnSm100(OnSm100, dispatch.DCombineRule, name="sm100.dcombine", direction="backward"):
    """`sm90.dcombine` on Blackwell."""


class CombineWeightGradOnSm100(
    OnSm100, dispatch.CombineWeightGradRule, name="sm100.combine_weight_grad", direction="backward"
):
    """`sm90.combine_weight_grad` on Blackwell."""


class DDispatchOnSm100(OnSm100, dispatch.DDispatchRule, name="sm100.ddispatch", direction="backward"):
    """`sm90.ddispatch` on Blackwell."""


class DispatchWeightGradOnSm100(
    OnSm100, dispatch.DispatchWeightGradRule, name="sm100.dispatch_weight_grad", direction="backward"
):
    """`sm90.dispatch_weight_grad` on Blackwell."""


class ActivationOnSm100(OnSm100, ActivationRule, name="sm100.activation", direction="forward"):
    """`sm90.activation` on Blackwell."""


class DActivationOnSm100(OnSm100, DActivationRule, name="sm100.dactivation", direction="backward"):
    """`sm90.dactivation` on Blackwell."""


class ColumnSumsOnSm100(OnSm100, ColumnSums, name="sm100.column_sums", direction="backward"):
    """`sm90.column_sums` on Blackwell."""


class LinearColumnSumsOnSm100(OnSm100, LinearColumnSums, name="sm100.linear_column_sums", direction="backward"):
    """`sm90.linear_column_sums` on Blackwell."""


class OffsetsFromSplitsOnSm100(OnSm100, OffsetsFromSplits, name="sm100.offsets_from_splits", direction="forward"):
    """`sm90.offsets_from_splits` on Blackwell."""


ROWS = (
    DispatchOnSm100,
    CombineOnSm100,
    DCombineOnSm100,
    CombineWeightGradOnSm100,
    DDispatchOnSm100,
    DispatchWeightGradOnSm100,
    ActivationOnSm100,
    DActivationOnSm100,
    ColumnSumsOnSm100,
    LinearColumnSumsOnSm100,
    OffsetsFromSplitsOnSm100,
)
