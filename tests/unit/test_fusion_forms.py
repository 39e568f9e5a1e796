"""Rules that read or write other forms of a quantized value than the plain steps of their ops."""

from __future__ import annotations

import itertools

import pytest
import torch

import fusedmoe as fm
from fusedmoe.fusion.language.rule import Step
from fusedmoe.numerics.formats.roles import ROLES
from fusedmoe.numerics.recipes import NVFP4
from fusedmoe.ops import GroupedLinear
from fusedmoe.ops.glu import DSwiGLU
from fusedmoe.ops.grouped_linear import Wgrad
from fusedmoe.ops.quantize import QuantizeGrad

SPLITS = torch.tensor([8, 0, 17, 3])
RECIPES = {name: name for name in ("fp8_tensor", "fp8_row", "fp8_block", "mxfp8")}
RECIPES["nvfp4"] = NVFP4(stochastic_rounding=False)


def declines(*tensors):
    fm.require(False, "not this call")


class Declining:
    """Is planned, and declines each call, so that its fallback runs."""

    takes_quantized = True

    def build(self, ctx, keep):
        return declines


class ForwardOfColumns(Declining, fm.FusionRule, name="forms.forward", direction="forward"):
    op: GroupedLinear

    def offer(self, ctx):
        return Step(needs=("input:columns", "op.weight:columns", "offsets"), gives=("output",))


class WgradOfRows(Declining, fm.FusionRule, name="forms.wgrad", direction="backward"):
    op: Wgrad

    def offer(self, ctx):
        return Step(needs=("grad_output:rows", "op.input:rows", "offsets"), gives=("op.grad_weight",))


class WgradOfDequantized(Declining, fm.FusionRule, name="forms.wgrad_dequantized", direction="backward"):
    op: Wgrad

    def offer(self, ctx):
        return Step(needs=("grad_output:dequantized", "op.input:dequantized", "offsets"), gives=("op.grad_weight",))


class DerivativeByRows(Declining, fm.FusionRule, name="forms.derivative", direction="backward"):
    dact: DSwiGLU
    quantize: QuantizeGrad

    def offer(self, ctx):
        return Step(needs=("grad_output", "dact.input"), gives=("grad_input:rows",))


RULES = (ForwardOfColumns, WgradOfRows, WgradOfDequantized, DerivativeByRows)
SETS = [rules for count in (1, 2, 4) for rules in itertools.combinations(RULES, count)]


def experts():
    torch.manual_seed(0)
    return fm.Sequential(fm.GroupedLinear(4, 64, 128), fm.SwiGLU(), fm.GroupedLinear(4, 64, 64)).to(torch.bfloat16)


def results(module, recipe, rules):
    torch.manual_seed(1)
    x = torch.randn(30, 64, dtype=torch.bfloat16, requires_grad=True)
    with fm.recipe(recipe), fm.register(*rules):
        y = module(x, splits=SPLITS)
        grads = torch.autograd.grad(y.square().sum(), (x, *module.parameters()))
    return [y.detach(), *grads]


@pytest.mark.parametrize("rules", SETS, ids=lambda rules: "+".join(r.name for r in rules))
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_fallback_makes_the_forms_that_plain_steps_read(recipe, rules):
    module = experts()
    expected = results(module, RECIPES[recipe], ())
    for got, want in zip(results(module, RECIPES[recipe], rules), expected, strict=True):
        assert want.count_nonzero()
        assert torch.equal(got, want)


def fused(rules):
    x = torch.randn(30, 64, dtype=torch.bfloat16, requires_grad=True)
    with fm.recipe("mxfp8"), fm.register(*rules):
        return {step.rule for step in experts().explain(x, splits=SPLITS).steps}


def test_a_step_that_writes_one_form_is_chosen_where_no_other_is_read():
    assert "forms.derivative" not in fused([DerivativeByRows])  # the plain weight gradient reads columns
    assert {"forms.derivative", "forms.wgrad"} <= fused([DerivativeByRows, WgradOfRows])


class ColumnsToResult(fm.FusionRule, name="forms.sum", direction="forward"):
    takes_quantized = True
    op: GroupedLinear

    def offer(self, ctx):
        return Step(needs=("input:columns", "op.weight", "offsets"), gives=("output",))

    def build(self, ctx, keep):
        def bind(*operands):
            def run(codes, scale, *rest):
                assert scale.dtype is torch.float8_e8m0fnu
                return codes.float().sum().bfloat16().expand(30, self.op.out_features).contiguous()

            return run

        return bind


def test_a_step_gets_the_tensors_of_the_form_that_it_reads():
    x = torch.randn(30, 64, dtype=torch.bfloat16)
    columns = fm.quantize(x, ROLES["mxfp8"].input, axis=-2, offsets=SPLITS.cumsum(0, dtype=torch.int32))
    with fm.recipe("mxfp8"), fm.register(ColumnsToResult), torch.no_grad():
        y = fm.Sequential(fm.GroupedLinear(4, 64, 64)).to(torch.bfloat16)(x, splits=SPLITS)
    expected = columns.tensors()[0].float().sum().bfloat16()
    assert expected.item()
    assert (y[:28] == expected).all()
    assert not y[28:].any()  # the tail
