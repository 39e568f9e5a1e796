"""One rule per direction. The steps run PyTorch; a kernel would take the same tensors."""

from torch import Tensor

import fusedmoe as fm
from fusedmoe.fusion.language.rule import Run
from fusedmoe.kernels.torch.grouped_gemm import grouped_mm, grouped_mm_dgrad
from fusedmoe.ops import Dgrad
from fusedmoe_softcap.op import DSoftcap, Softcap


class GemmSoftcap(fm.FusionRule, name="softcap.gemm_softcap", direction="forward"):
    """``cap * tanh(x @ W.T / cap)``: the cap is applied in the buffer of the product."""

    fc: fm.GroupedLinear
    cap: Softcap

    def offer(self, ctx: fm.PlanContext) -> fm.Step:
        fm.require(self.fc.bias is None, "the rule supports no bias: use GroupedLinear(..., bias=False)")
        fm.require(self.cap.cap > 0, "cap %s is not positive", self.cap.cap)
        return fm.Step(needs=("input", "fc.weight", "offsets"), gives=("output",), zeroes_tail=True)

    def bind(self, ctx: fm.PlanContext, *tensors: Tensor) -> Run:
        cap = self.cap.cap

        def run(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
            return grouped_mm(x, weight, offsets).div_(cap).tanh_().mul_(cap)

        return run


class DgradOfSoftcap(fm.FusionRule, name="softcap.dgrad_dsoftcap", direction="backward"):
    """The data gradient of the layer after a Softcap; the Softcap's gradient is computed in the same buffer."""

    dgrad: Dgrad
    dcap: DSoftcap

    def offer(self, ctx: fm.PlanContext) -> fm.Step:
        needs = ("grad_output", "dgrad.weight", "offsets", "dcap.output")
        return fm.Step(needs=needs, gives=("grad_input",), zeroes_tail=True)

    def bind(self, ctx: fm.PlanContext, *tensors: Tensor) -> Run:
        cap = self.dcap.op.cap

        def run(dy: Tensor, weight: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
            dx = grouped_mm_dgrad(dy.contiguous(), weight, offsets)
            return dx.mul_(1 - (y / cap).square())

        return run
