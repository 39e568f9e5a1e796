"""Rules for kernels that read and write quantized values in other forms than the plain steps of their ops do. They
decline each call. The fallbacks must make the forms that are read.
"""

import itertools

import pytest
import torch
from kit.compare import assert_bitwise
from kit.toy import IN, only_plan, outcome, refuse, rule, rules_used

import fusedmoe as fm
from fusedmoe.numerics.recipes import NVFP4
from fusedmoe.ops import Dgrad, DSwiGLU, GroupedLinear, Quantize, SwiGLU, Wgrad
from fusedmoe.ops.quantize import QuantizeGrad

E, H, I = 3, 64, 32  # noqa: E741


def experts():
    return fm.Sequential(GroupedLinear(E, H, 2 * I), SwiGLU(), GroupedLinear(E, I, H))


def given():
    return torch.randn(90, H, requires_grad=True), {"splits": torch.tensor([40, 0, 45])}


def declining(name, slots, needs, gives, **options):
    made = rule(f"forms.{name}", slots, needs, gives, takes_quantized=True, **options)
    made.build = lambda self, ctx, keep: refuse
    return made


DERIVATIVE_BY_ROWS = declining(
    "derivative", {"dact": DSwiGLU, "quantize": QuantizeGrad}, ("grad_output", "dact.input"), ("grad_input:rows",),
    direction="backward",
)  # fmt: skip
WGRAD_OF_ROWS, WGRAD_OF_DEQUANTIZED = (
    declining(
        f"wgrad_{form}", {"op": Wgrad}, (f"grad_output:{form}", f"op.input:{form}", "offsets"), ("op.grad_weight",),
        direction="backward",
    )
    for form in ("rows", "dequantized")
)  # fmt: skip
FORMS = (
    declining("forward", {"op": GroupedLinear}, ("input:columns", "op.weight:columns", "offsets"), ("output",)),
    WGRAD_OF_ROWS,
    WGRAD_OF_DEQUANTIZED,
    DERIVATIVE_BY_ROWS,
)
PAIRS = [rules for count in (1, 2, 4) for rules in itertools.combinations(FORMS, count)]


def product_and_activation(recomputes):
    """Rules of several ops. That for backward may compute the activation's columns again, which are then not kept."""
    slots = {"fc": GroupedLinear, "act": SwiGLU, "quantize": Quantize}
    keeps = ("act.input",) if recomputes else ("act.input", "output:columns")
    forward = declining("fc_act", slots, IN, ("output",), keeps=keeps, zeroes_tail=True)
    slots = {"dgrad": Dgrad, "dact": DSwiGLU, "quantize": QuantizeGrad}
    keeps = ("grad_input", "grad_input:columns", *(("dgrad.input:columns",) if recomputes else ()))
    needs = ("grad_output", "dgrad.weight", "offsets", "dact.input")
    return forward, declining("dgrad", slots, needs, (), direction="backward", keeps=keeps, zeroes_tail=True)


def both_ways(rules, recipe):
    """Check that a fused call gives bit for bit what an unfused one gives; return both plans."""
    chain, (x, named) = experts(), given()
    with fm.recipe(recipe):
        expected, plain = outcome(chain, x, **named), only_plan(chain, x, **named)
        with fm.register(*rules):
            plan = only_plan(chain, x, **named)
            assert_bitwise(outcome(chain, x, **named), expected)
    return plan, plain


@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_block", NVFP4(stochastic_rounding=False)], ids=str)
def test_the_fallback_makes_the_forms_that_plain_steps_read(recipe):
    fused = [len(both_ways(rules, recipe)[0].fused) for rules in PAIRS]
    assert fused[-1] == max(fused) > 1


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_fallback_of_steps_of_several_ops(recomputes):
    plan, plain = both_ways(product_and_activation(recomputes), "mxfp8")
    assert len(plan.fused) == 2
    assert {*plain.kept} - {*plan.kept} == ({"2.input:columns"} if recomputes else set())


def test_a_step_that_writes_one_form_is_chosen_where_no_other_is_read():
    def used(*rules):
        x, named = given()
        with fm.recipe("mxfp8"), fm.register(*rules):
            return set(rules_used(only_plan(experts(), x, **named)))

    assert not used(DERIVATIVE_BY_ROWS)  # the plain weight gradient reads columns
    assert used(DERIVATIVE_BY_ROWS, WGRAD_OF_ROWS) == {"forms.derivative", "forms.wgrad_rows"}
