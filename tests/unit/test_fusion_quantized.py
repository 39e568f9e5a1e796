"""Rules for kernels that take and give quantized values, as flat tensors, in the forms that are read."""

import itertools

import pytest
import torch
from kit.toy import IN, bound, only_plan, outcome, rule, rules_used

import fusedmoe as fm
from fusedmoe.kernels.torch import quantized_products
from fusedmoe.numerics.formats import QuantizedSpec, QuantizedTensor
from fusedmoe.numerics.recipes import NVFP4
from fusedmoe.ops import Dgrad, DSwiGLU, GroupedLinear, Quantize, SwiGLU, Wgrad
from fusedmoe.ops.quantize import QuantizeGrad

E, H, I = 3, 64, 32  # noqa: E741
KEEPS = ("act.input", "output:columns")
DIN = ("grad_output", "dgrad.weight", "offsets", "dact.input")


def experts():
    return fm.Sequential(GroupedLinear(E, H, 2 * I), SwiGLU(), GroupedLinear(E, I, H))


def given():
    return torch.randn(90, H, requires_grad=True), {"splits": torch.tensor([40, 0, 45])}


def on_tensors(ctx, step, run, guard=None):
    """Bind a function of `QuantizedTensor`s: it takes and returns their tensors."""
    specs = [ctx.spec(value) for value in step.needs]
    counts = [len(spec.tensors()) if isinstance(spec, QuantizedSpec) else 1 for spec in specs]

    def flat(*tensors):
        each = iter(tensors)
        held = [[next(each) for _ in range(count)] for count in counts]
        (offsets,) = next(tensors for name, tensors in zip(step.needs, held, strict=True) if "offsets" in name)
        operands = [
            spec.tensor(tensors, None if spec.stacked else offsets) if isinstance(spec, QuantizedSpec) else tensors[0]
            for spec, tensors in zip(specs, held, strict=True)
        ]
        results = run(*operands)
        results = results if isinstance(results, tuple) else (results,)
        return [t for r in results for t in (r.tensors() if isinstance(r, QuantizedTensor) else [r])]

    return bound(flat, guard)


def codes_rule(name, slots, needs, gives, forms, *, guard=None, **options):
    """A rule whose step computes, of its operands, what it gives and keeps: ``forms(self, ctx, *operands)`` has a
    function for each name.
    """
    made = rule(name, slots, needs, gives, takes_quantized=True, **options)

    def build(self, ctx, keep):
        def run(*operands):
            results = forms(self, ctx, *operands)
            return tuple(results[value]() for value in (*gives, *keep))

        return on_tensors(ctx, self.offer(ctx), run, guard)

    made.build = build
    return made


def gemm():
    def forms(self, ctx, *operands):
        return {"output": lambda: quantized_products.grouped_mm(*operands)}

    return codes_rule("toy.gemm", {"fc": GroupedLinear}, IN, ("output",), forms, zeroes_tail=True)


def gemm_glu_quantize(*, keeps=KEEPS, **options):
    """A linear layer, the activation, and the result in a small format: by rows, and by columns where that is kept."""

    def check(self, ctx):
        assert isinstance(ctx.spec("input"), QuantizedSpec)
        assert isinstance(ctx.spec("fc.weight"), QuantizedSpec)
        assert (ctx.spec("output").axis, ctx.spec("output").shape[1]) == (-1, I)
        assert ctx.spec("output:columns").axis == -2

    def forms(self, ctx, x, weight, offsets):
        h = quantized_products.grouped_mm(x, weight, offsets)

        def quantized(axis):
            return lambda: fm.quantize(self.act.compute(h), self.quantize.quantizer, axis, offsets=offsets)

        return {"output": quantized(-1), "act.input": lambda: h, "output:columns": quantized(-2)}

    slots = {"fc": GroupedLinear, "act": SwiGLU, "quantize": Quantize}
    return codes_rule(
        "toy.gemm_glu_quantize", slots, IN, ("output",), forms, keeps=keeps, check=check, zeroes_tail=True, **options
    )


def dgrad_dglu_quantize(*, recomputes=False, **options):
    """The data gradient, the activation's derivative, and that in a small format, in the forms that are read."""

    def forms(self, ctx, dy, weight, offsets, h):
        dh = self.dact.compute(quantized_products.grouped_mm_dgrad(dy, weight, offsets), h)
        quantizer = self.quantize.op.grad_quantizer
        return {
            "grad_input": lambda: fm.quantize(dh, quantizer, -1, offsets=offsets),
            "grad_input:columns": lambda: fm.quantize(dh, quantizer, -2, offsets=offsets),
            "dact.grad_input": lambda: dh,
            "dgrad.input:columns": lambda: fm.quantize(
                self.dact.op.compute(h), ctx.recipe.roles().input, -2, offsets=offsets
            ),
        }

    slots = {"dgrad": Dgrad, "dact": DSwiGLU, "quantize": QuantizeGrad}
    keeps = ("grad_input", "grad_input:columns", "dact.grad_input", *(["dgrad.input:columns"] * recomputes))
    return codes_rule(
        "toy.dgrad_dglu_quantize", slots, DIN, (), forms, direction="backward", keeps=keeps, zeroes_tail=True, **options
    )


def wgrad():
    def check(self, ctx):
        assert ctx.spec("grad_output").axis == ctx.spec("wgrad.input").axis == -2

    def forms(self, ctx, *operands):
        return {"wgrad.grad_weight": lambda: quantized_products.grouped_mm_wgrad(*operands)}

    needs = ("grad_output", "wgrad.input", "offsets")
    return codes_rule(
        "toy.wgrad", {"wgrad": Wgrad}, needs, ("wgrad.grad_weight",), forms, direction="backward", check=check
    )


def quantize_both(kind, source, result, quantizer, **options):
    """Both forms of rows in one launch."""

    def forms(self, ctx, x, offsets):
        axes = {f"{result}:rows": -1, f"{result}:columns": -2}
        return {
            name: lambda axis=axis: fm.quantize(x, quantizer(self), axis, offsets=offsets)
            for name, axis in axes.items()
        }

    keeps = (f"{result}:rows", f"{result}:columns")
    needs = (source, "quantize.offsets")
    return codes_rule(
        f"toy.{kind.__name__}", {"quantize": kind}, needs, (), forms, keeps=keeps, zeroes_tail=True, **options
    )


QUANTIZE = quantize_both(Quantize, "input", "output", lambda self: self.quantize.quantizer)
QUANTIZE_GRAD = quantize_both(
    QuantizeGrad, "grad_output", "grad_input", lambda self: self.quantize.op.grad_quantizer, direction="backward"
)


def both_ways(rules, recipe, chain, x, **named):
    """Check that a fused call gives bit for bit what an unfused one gives; return both plans."""
    with fm.recipe(recipe):
        expected, plain = outcome(chain, x, **named), only_plan(chain, x, **named)
        with fm.register(*rules):
            plan = only_plan(chain, x, **named)
            got = outcome(chain, x, **named)
    assert got.keys() == expected.keys()
    for name in expected:
        assert expected[name].any(), f"{name}: zeros would pass"
        assert torch.equal(got[name], expected[name]), name
    return plan, plain


# ---- fused steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_tensor", "fp8_block"])
def test_everything_that_is_quantized_may_be_fused(recipe):
    rules = [gemm(), gemm_glu_quantize(), dgrad_dglu_quantize(), wgrad(), QUANTIZE, QUANTIZE_GRAD]
    x, named = given()
    plan, plain = both_ways(rules, recipe, experts(), x, **named)
    assert [s.rule for s in plan.steps if "weight" not in s.ops[0]] == [
        "toy.Quantize", "toy.gemm_glu_quantize", "toy.gemm",
        "toy.QuantizeGrad", "toy.wgrad", "toy.dgrad_dglu_quantize", "toy.wgrad", None,
    ]  # fmt: skip
    assert set(plan.kept) == set(plain.kept)
    assert plan.kept_bytes == plain.kept_bytes


def refuse(*tensors):
    fm.require(False, "rows are %d, not a multiple of 128", tensors[0].shape[0])


@pytest.mark.parametrize(("which", "recomputes"), [("forward", False), ("backward", True), ("both", True)])
def test_a_step_that_declines_the_call_falls_back(which, recomputes):
    rules = [
        gemm_glu_quantize(guard=None if which == "backward" else refuse, keeps=KEEPS[: 2 - recomputes]),
        dgrad_dglu_quantize(guard=None if which == "forward" else refuse, recomputes=recomputes),
    ]
    x, named = given()
    plan, _ = both_ways(rules, "mxfp8", experts(), x, **named)
    assert len(plan.fused) == 2


# ---- rules that read or write other forms than the plain steps of their ops -----------------------------------------


def other_form(name, slots, needs, gives, **options):
    """It is planned, and declines each call, so that its fallback runs."""
    made = rule(f"forms.{name}", slots, needs, gives, takes_quantized=True, **options)
    made.build = lambda self, ctx, keep: refuse
    return made


DERIVATIVE_BY_ROWS = other_form(
    "derivative", {"dact": DSwiGLU, "quantize": QuantizeGrad}, ("grad_output", "dact.input"), ("grad_input:rows",),
    direction="backward",
)  # fmt: skip
WGRAD_OF_ROWS, WGRAD_OF_DEQUANTIZED = (
    other_form(
        f"wgrad_{form}", {"op": Wgrad}, (f"grad_output:{form}", f"op.input:{form}", "offsets"), ("op.grad_weight",),
        direction="backward",
    )
    for form in ("rows", "dequantized")
)  # fmt: skip
FORMS = (
    other_form("forward", {"op": GroupedLinear}, ("input:columns", "op.weight:columns", "offsets"), ("output",)),
    WGRAD_OF_ROWS,
    WGRAD_OF_DEQUANTIZED,
    DERIVATIVE_BY_ROWS,
)
PAIRS = [rules for count in (1, 2, 4) for rules in itertools.combinations(FORMS, count)]


@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_block", NVFP4(stochastic_rounding=False)], ids=str)
def test_the_fallback_makes_the_forms_that_plain_steps_read(recipe):
    chain, (x, named) = experts(), given()
    for rules in PAIRS:
        both_ways(rules, recipe, chain, x, **named)


def test_a_step_that_writes_one_form_is_chosen_where_no_other_is_read():
    def used(*rules):
        x, named = given()
        with fm.recipe("mxfp8"), fm.register(*rules):
            return set(rules_used(only_plan(experts(), x, **named)))

    assert not used(DERIVATIVE_BY_ROWS)  # the plain weight gradient reads columns
    assert used(DERIVATIVE_BY_ROWS, WGRAD_OF_ROWS) == {"forms.derivative", "forms.wgrad_rows"}
