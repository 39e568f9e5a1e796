"""``sm90.transposed_weight``: the form by columns of a weight that a layer stores in FP8, in one launch."""

from __future__ import annotations

from torch import Tensor

from fusedmoe.builtin_rules.products.fp8 import guard_codes
from fusedmoe.builtin_rules.requirements import OnSm90, decline
from fusedmoe.fusion.language.rule import FusionRule, PlanContext, Run, Step, require
from fusedmoe.kernels.rows.quantize import block_functions
from fusedmoe.kernels.sm90 import limits
from fusedmoe.ops.glue import StoredWeight


class TransposedWeight(OnSm90, FusionRule, name="sm90.transposed_weight", direction="backward"):
    """Codes and scales, transposed, for an input gradient. Scales have the strides that its kernel reads."""

    stored: StoredWeight

    def offer(self, ctx: PlanContext) -> Step:
        _, out_features, in_features = ctx.spec("stored.weight").shape
        for name, width in (("in_features", in_features), ("out_features", out_features)):
            decline(limits.why_not_width_of_codes(name, width))
        return Step(needs=("stored.weight", "stored.scale"), gives=(), keeps=("stored.output:columns",))

    def bind(self, ctx: PlanContext, weight: Tensor, scale: Tensor) -> Run:
        guard_codes(weight)
        require(weight.is_contiguous(), "the codes are not contiguous")
        return block_functions.bind_transpose_codes(weight, scale)
