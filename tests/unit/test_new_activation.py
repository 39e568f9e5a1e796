"""A new activation, ``y = tanh(gate) * up``, takes three edits: an entry of the table, a formula for registers, an op.

The fixture makes them, in place of edits of `fusedmoe.numerics.activations`, `fusedmoe.kernels.device.formulas` and
`fusedmoe.ops.glu`. Nothing else is told about the activation.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")

from cutlass import cute
from kit.compiled import compiled
from kit.kept import contents

import fusedmoe as fm
from fusedmoe.kernels.device import formulas
from fusedmoe.kernels.rows.activation.kernel import ActivateBackward
from fusedmoe.kernels.sm90.epilogue.outputs import activation
from fusedmoe.kernels.sm90.gemm.operands import Plain
from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
from fusedmoe.kernels.sm90.tiles.choice import PP_192
from fusedmoe.numerics.activations import KINDS, Kind
from fusedmoe.ops.glu import DGLU, GLU, DSwiGLU, SwiGLU

BF16 = torch.bfloat16


def tanh_glu(g, alpha):
    t = cute.math.tanh(alpha * g, fastmath=True)
    return t, alpha * (1.0 - t * t)


class TanhGLU(GLU):
    """``y = tanh(alpha * gc) * (uc + offset)``."""

    kind = "tanh_glu"

    def phi(self, g):
        return torch.tanh(self.alpha * g)

    def dphi(self, g, grad):
        return grad * self.alpha * (1 - torch.tanh(self.alpha * g).square())

    def backward_ops(self):
        return (DTanhGLU(self),)


class DTanhGLU(DGLU):
    """The derivative of `TanhGLU`."""


@pytest.fixture(autouse=True)
def three_edits(builtin_rules, monkeypatch):
    monkeypatch.setitem(KINDS, "tanh_glu", Kind())
    monkeypatch.setitem(formulas.GATES, "tanh_glu", tanh_glu)
    added = {SwiGLU: TanhGLU, DSwiGLU: DTanhGLU}  # members of FusedActivation and FusedDerivative
    for rule in builtin_rules:
        slots = [replace(slot, types=(*slot.types, *(new for old, new in added.items() if old in slot.types)))
                 for slot in rule.slots]  # fmt: skip
        monkeypatch.setattr(rule, "slots", tuple(slots))


def experts(dtype):
    return fm.Sequential(
        fm.GroupedLinear(2, 64, 2 * 128, dtype=dtype), TanhGLU(), fm.GroupedLinear(2, 128, 64, dtype=dtype)
    )


def test_in_plain_pytorch():
    torch.manual_seed(0)
    up, act, down = layers = experts(torch.float64)
    x, splits = torch.randn(7, 64, dtype=torch.float64, requires_grad=True), torch.tensor([5, 2])
    found = layers(x, splits=splits)
    gate, linear = torch.cat([rows @ w.T for rows, w in zip(x.split((5, 2)), up.weight, strict=True)]).chunk(2, -1)
    act = torch.tanh(gate) * linear
    expected = torch.cat([rows @ w.T for rows, w in zip(act.split((5, 2)), down.weight, strict=True)])
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    inputs = (x, *layers.parameters())
    torch.testing.assert_close(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_the_rules_fuse_it(recipe):
    x = torch.zeros(20, 64, dtype=BF16, requires_grad=True)
    with fm.recipe(recipe):
        (plan,) = experts(BF16).explain(x, splits=torch.tensor([12, 8]), arch=90).plans
    (forward,) = [step for step in plan.steps if "1.TanhGLU" in step.ops]
    (backward,) = [step for step in plan.steps if "1.DTanhGLU" in step.ops]
    of_codes = "fp8_" if recipe == "fp8_block" else ""
    assert forward.rule == f"sm90.{of_codes}grouped_gemm_activation"
    assert backward.rule == f"sm90.{of_codes}grouped_dgrad_activation"


KERNELS = {
    "sm90_ragged_m_bf16_bk_tanh_glu_keep": lambda: RaggedM(
        Plain("bf16"), PP_192, epilogue=activation("tanh_glu", keep=True)
    ),
    "sm90_activate_backward_tanh_glu_interleaved_bf16": lambda: ActivateBackward(
        "bf16", "tanh_glu", False, True, "fp32", True, True
    ),
}


@pytest.mark.parametrize("symbol", KERNELS)
def test_the_kernels_compile(symbol):
    kernel = KERNELS[symbol]()
    assert kernel.symbol.startswith(symbol)
    (launch,) = compiled(kernel, *contents(__file__)).values()
    assert launch.matching("MUFU.TANH")
    assert not launch.matching("MUFU.EX2")  # of the activations in the table
