"""The built-in fusion rules. `import fusedmoe` registers `BUILTIN`."""

from __future__ import annotations

from fusedmoe.builtin_rules.exchange.products import (
    DgradActivationOfArrivingGradients,
    GemmActivationOfArrivingTokens,
    GemmOfLeavingRows,
    WgradBesideExchange,
)
from fusedmoe.builtin_rules.products.dequantized import DequantizedDgrad, DequantizedGemm, DequantizedWgrad
from fusedmoe.builtin_rules.products.dgrad import Fp8GroupedDgrad, GatheredDgrad, GroupedDgrad
from fusedmoe.builtin_rules.products.dgrad_activation import (
    Fp8GroupedDgradActivation,
    GatheredDgradActivation,
    GroupedDgradActivation,
)
from fusedmoe.builtin_rules.products.gemm import Fp8GroupedGemm, GatheredGemm, GroupedGemm
from fusedmoe.builtin_rules.products.gemm_activation import (
    Fp8GroupedGemmActivation,
    GatheredGemmActivation,
    GroupedGemmActivation,
)
from fusedmoe.builtin_rules.products.linear import (
    LinearActivation,
    LinearColumnSums,
    LinearGemm,
    LinearInputGradient,
    LinearInputGradientActivation,
    LinearWeightGradient,
)
from fusedmoe.builtin_rules.products.wgrad import Fp8GroupedWgrad, GatheredWgradDy, GatheredWgradX, GroupedWgrad
from fusedmoe.builtin_rules.requirements import OnSm90, OnSm100, on
from fusedmoe.builtin_rules.rows.activation import ActivationRule, DActivationRule
from fusedmoe.builtin_rules.rows.column_sums import ColumnSums
from fusedmoe.builtin_rules.rows.dispatch import (
    CombineRule,
    CombineWeightGradRule,
    DCombineRule,
    DDispatchRule,
    DispatchRule,
    DispatchWeightGradRule,
)
from fusedmoe.builtin_rules.rows.offsets import OffsetsFromSplits
from fusedmoe.builtin_rules.rows.quantize import (
    GatheredQuantizeColumns,
    GatheredQuantizeGradient,
    GatheredQuantizeRows,
    QuantizeGradient,
    QuantizeRows,
    QuantizeWeights,
)
from fusedmoe.builtin_rules.rows.router import RouterBackwardRule, RouterDispatchRule, RouterRule
from fusedmoe.builtin_rules.rows.transposed_weight import TransposedWeight
from fusedmoe.builtin_rules.sm100.dgrad_activation_quantize import PackedDgradActivationQuantize
from fusedmoe.builtin_rules.sm100.gemm import PackedDgrad, PackedGemm
from fusedmoe.builtin_rules.sm100.gemm_activation_quantize import PackedGemmActivationQuantize
from fusedmoe.builtin_rules.sm100.gemm_combine import PackedDgradDDispatch, PackedGemmCombine
from fusedmoe.builtin_rules.sm100.grouped_mm import GroupedMm, GroupedMmDgrad
from fusedmoe.builtin_rules.sm100.quantize import (
    GatheredPackedQuantize,
    GatheredPackedQuantizeGradient,
    PackedQuantize,
    PackedQuantizeGradient,
    PackedQuantizeWeight,
)
from fusedmoe.builtin_rules.sm100.wgrad import PackedWgrad
from fusedmoe.fusion.language.rule import FusionRule

ROWS: tuple[type[FusionRule], ...] = (
    ActivationRule,
    DActivationRule,
    ColumnSums,
    LinearColumnSums,
    OffsetsFromSplits,
    DispatchRule,
    CombineRule,
    DCombineRule,
    CombineWeightGradRule,
    DDispatchRule,
    DispatchWeightGradRule,
)
"""The rules for kernels without a matrix product that Hopper and Blackwell share."""
BUILTIN: tuple[type[FusionRule], ...] = (
    GroupedGemm,
    GroupedGemmActivation,
    GroupedDgrad,
    GroupedDgradActivation,
    GroupedWgrad,
    GatheredGemm,
    GatheredGemmActivation,
    GatheredDgrad,
    GatheredDgradActivation,
    GatheredWgradX,
    GatheredWgradDy,
    LinearGemm,
    LinearActivation,
    LinearInputGradient,
    LinearInputGradientActivation,
    LinearWeightGradient,
    *on(OnSm90, *ROWS),
    RouterRule,
    RouterDispatchRule,
    RouterBackwardRule,
    QuantizeRows,
    QuantizeGradient,
    QuantizeWeights,
    GatheredQuantizeRows,
    GatheredQuantizeColumns,
    GatheredQuantizeGradient,
    TransposedWeight,
    Fp8GroupedGemm,
    Fp8GroupedGemmActivation,
    Fp8GroupedDgrad,
    Fp8GroupedDgradActivation,
    DequantizedGemm,
    DequantizedDgrad,
    DequantizedWgrad,
    Fp8GroupedWgrad,
    GemmActivationOfArrivingTokens,
    GemmOfLeavingRows,
    DgradActivationOfArrivingGradients,
    WgradBesideExchange,
    *on(OnSm100, *ROWS),
    PackedQuantize,
    PackedQuantizeGradient,
    GatheredPackedQuantize,
    GatheredPackedQuantizeGradient,
    PackedQuantizeWeight,
    PackedGemm,
    PackedGemmActivationQuantize,
    PackedGemmCombine,
    PackedDgrad,
    PackedDgradDDispatch,
    PackedDgradActivationQuantize,
    PackedWgrad,
    GroupedMm,
    GroupedMmDgrad,
)
