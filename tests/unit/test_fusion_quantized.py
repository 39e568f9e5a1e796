"""Rules for kernels that take and give quantized values, as flat tensors, in the forms that are read."""

from contextlib import nullcontext

import pytest
import torch
from kit.toy import bound, only_plan, outcome, rules_used, status, statuses

import fusedmoe as fm
from fusedmoe import FusionError, Status
from fusedmoe.fusion.language.rule import FusionRule, RuleError, Step
from fusedmoe.kernels.torch import quantized_products
from fusedmoe.numerics.formats import QuantizedSpec, QuantizedTensor
from fusedmoe.ops import BiasGrad, Dgrad, DSwiGLU, GroupedLinear, Quantize, SwiGLU, Wgrad
from fusedmoe.ops.quantize import QuantizeGrad

E, H, I = 3, 64, 32  # noqa: E741
RECIPES = ["mxfp8", "fp8_tensor", "fp8_row", "fp8_block"]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
KEEPS = ("act.input", "output:columns")


def experts(*, bias=False):
    return fm.Sequential(
        GroupedLinear(E, H, 2 * I, bias=bias), SwiGLU(), GroupedLinear(E, I, H, bias=bias)
    )  # fmt: skip


def given(count=90, requires_grad=True):
    return torch.randn(count, H, requires_grad=requires_grad), {"splits": torch.tensor([40, 0, 45])}


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


def gemm(name="toy.gemm", *, takes_quantized=True):
    class Gemm(FusionRule, name=name, direction="forward"):
        fc: GroupedLinear

        def offer(self, ctx):
            return Step(needs=("input", "fc.weight", "offsets"), gives=("output",), zeroes_tail=True)

        def build(self, ctx, keep):
            return on_tensors(ctx, self.offer(ctx), quantized_products.grouped_mm)

    Gemm.takes_quantized = takes_quantized
    return Gemm


def gemm_glu_quantize(*, guard=None, keeps=KEEPS, calls=None):
    """A linear layer, the activation, and the result in a small format: by rows, and by columns where that is kept."""

    class GemmGLUQuantize(FusionRule, name="toy.gemm_glu_quantize", direction="forward"):
        takes_quantized = True
        fc: GroupedLinear
        act: SwiGLU
        quantize: Quantize

        def offer(self, ctx):
            fm.require(self.fc.bias is None, "a bias is not taken")
            assert isinstance(ctx.spec("input"), QuantizedSpec)
            assert isinstance(ctx.spec("fc.weight"), QuantizedSpec)
            assert (ctx.spec("output").axis, ctx.spec("output").shape[1]) == (-1, I)
            assert ctx.spec("output:columns").axis == -2
            needs = ("input", "fc.weight", "offsets")
            return Step(needs=needs, gives=("output",), keeps=keeps, zeroes_tail=True)

        def build(self, ctx, keep):
            def run(x, weight, offsets):
                if calls is not None:
                    calls.append(("toy.gemm_glu_quantize", keep))
                h = quantized_products.grouped_mm(x, weight, offsets)
                y = self.act.compute(h)
                kept = {"act.input": lambda: h, "output:columns": lambda: quantized(y, -2)}

                def quantized(y, axis):
                    return fm.quantize(y, self.quantize.quantizer, axis, offsets=offsets)

                return (quantized(y, -1), *(kept[name]() for name in keep))

            return on_tensors(ctx, self.offer(ctx), run, guard)

    return GemmGLUQuantize


def dgrad_dglu_quantize(*, guard=None, recomputes=False, calls=None):
    """The data gradient, the activation's derivative, and that in a small format, in the forms that are read."""

    class DgradDGLUQuantize(FusionRule, name="toy.dgrad_dglu_quantize", direction="backward"):
        takes_quantized = True
        dgrad: Dgrad
        dact: DSwiGLU
        quantize: QuantizeGrad

        def offer(self, ctx):
            again = ("dgrad.input:columns",) if recomputes else ()
            return Step(
                needs=("grad_output", "dgrad.weight", "offsets", "dact.input"), gives=(),
                keeps=("grad_input", "grad_input:columns", "dact.grad_input", *again), zeroes_tail=True,
            )  # fmt: skip

        def build(self, ctx, keep):
            def run(dy, weight, offsets, h):
                if calls is not None:
                    calls.append(("toy.dgrad_dglu_quantize", keep))
                dh = self.dact.compute(quantized_products.grouped_mm_dgrad(dy, weight, offsets), h)
                forms = {
                    "grad_input": lambda: fm.quantize(dh, self.quantize.op.grad_quantizer, -1, offsets=offsets),
                    "grad_input:columns": lambda: fm.quantize(dh, self.quantize.op.grad_quantizer, -2, offsets=offsets),
                    "dact.grad_input": lambda: dh,
                    "dgrad.input:columns": lambda: fm.quantize(
                        self.dact.op.compute(h), ctx.recipe.roles().input, -2, offsets=offsets
                    ),
                }
                return tuple(forms[name]() for name in keep)

            return on_tensors(ctx, self.offer(ctx), run, guard)

    return DgradDGLUQuantize


def wgrad():
    class WgradRule(FusionRule, name="toy.wgrad", direction="backward"):
        takes_quantized = True
        wgrad: Wgrad

        def offer(self, ctx):
            assert ctx.spec("grad_output").axis == ctx.spec("wgrad.input").axis == -2
            return Step(needs=("grad_output", "wgrad.input", "offsets"), gives=("wgrad.grad_weight",))

        def build(self, ctx, keep):
            return on_tensors(ctx, self.offer(ctx), quantized_products.grouped_mm_wgrad)

    return WgradRule


def axis(name):
    return -2 if name.endswith(":columns") else -1


def quantize_rows():
    """Both forms of rows in one launch."""

    class QuantizeRows(FusionRule, name="toy.quantize", direction="forward"):
        quantize: Quantize

        def offer(self, ctx):
            keeps = ("output:rows", "output:columns")
            return Step(needs=("input", "quantize.offsets"), gives=(), keeps=keeps, zeroes_tail=True)

        def build(self, ctx, keep):
            def run(x, offsets):
                return tuple(fm.quantize(x, self.quantize.quantizer, axis(name), offsets=offsets) for name in keep)

            return on_tensors(ctx, self.offer(ctx), run)

    return QuantizeRows


def quantize_gradient():
    class QuantizeGradient(FusionRule, name="toy.quantize_grad", direction="backward"):
        quantize: QuantizeGrad

        def offer(self, ctx):
            keeps = ("grad_input:rows", "grad_input:columns")
            return Step(needs=("grad_output", "quantize.offsets"), gives=(), keeps=keeps, zeroes_tail=True)

        def build(self, ctx, keep):
            def run(dy, offsets):
                quantizer = self.quantize.op.grad_quantizer
                return tuple(fm.quantize(dy, quantizer, axis(name), offsets=offsets) for name in keep)

            return on_tensors(ctx, self.offer(ctx), run)

    return QuantizeGradient


def assert_bitwise(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        assert expected[name].any(), f"{name}: zeros would pass"
        assert torch.equal(got[name], expected[name]), name


def both_ways(rules, recipe, chain, x, **named):
    """Check that a fused call gives bit for bit what an unfused one gives; return both plans."""
    with fm.recipe(recipe):
        expected, plain = outcome(chain, x, **named), only_plan(chain, x, **named)
        with fm.register(*rules):
            plan = only_plan(chain, x, **named)
            assert_bitwise(outcome(chain, x, **named), expected)
    return plan, plain


@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "on another device"])
def test_a_format_without_a_kernel_is_no_miss_on_any_device(elsewhere):
    """The rule is not asked for a step, and its device is not the reason."""

    class Other(FusionRule, name="toy.other", direction="forward"):
        quantize: Quantize

        @classmethod
        def available(cls, device, arch):
            fm.require(not elsewhere, "needs another device")

        def supports(self, ctx):
            fm.require(self.quantize.quantizer.format.block == (1, 128), "no kernel for %s", self.quantize.quantizer)

        def offer(self, ctx):
            fm.require(False, "declines all")

    x = torch.randn(20, 32, requires_grad=True)
    with fm.register(Other):
        for format, got, reason in (
            ("mxfp8", Status.CONSTRAINT, "no kernel for mxfp8 e4m3 1x32"),
            ("fp8_block", *((Status.UNAVAILABLE, "needs another device") if elsewhere else MISSED)),
        ):
            chain = fm.Sequential(fm.Quantize(format), fm.Linear(32, 32))
            assert status(only_plan(chain, x), "toy.other") == (got, reason)
            missed = (got, reason) == MISSED
            with fm.strict(unavailable=format == "mxfp8"), pytest.raises(FusionError) if missed else nullcontext():
                chain(x)


MISSED = Status.CONSTRAINT, "declines all"


def kept_at_last(chain, x, **named):
    y = chain(x, **named)
    return sum(t.nbytes for t in y.grad_fn.saved_tensors if t is not None)


def test_a_rule_for_plain_tensors_is_not_asked_where_an_operand_is_quantized():
    chain, (x, named) = experts(), given()
    with fm.register(gemm("toy.plain", takes_quantized=False)):
        with fm.recipe("mxfp8"):
            plan = only_plan(chain, x, **named)
            with fm.strict():  # there is no kernel for it on any device
                chain(x, **named)
        assert rules_used(plan) == []
        # the recipe puts a Quantize before each linear layer: places 0 and 3
        assert statuses(plan, "toy.plain")[1] == (
            Status.CONSTRAINT,
            "takes no mxfp8 e4m3 1x32 operands",
        )
        assert rules_used(only_plan(chain, x, **named)) == ["toy.plain"] * 2  # without the recipe


def test_only_the_layer_that_is_quantized_is_closed_to_such_a_rule():
    chain, (x, named) = experts(), given()
    chain[0].recipe = "bf16"
    plan, _ = both_ways([gemm("toy.plain", takes_quantized=False)], "mxfp8", chain, x, **named)
    assert [s.ops for s in plan.fused] == [("0.GroupedLinear",)]


@every_recipe
def test_a_rule_that_says_so_takes_quantized_operands(recipe):
    plan, _ = both_ways([gemm()], recipe, experts(), *given()[:1], **given()[1])
    assert rules_used(plan) == ["toy.gemm"] * 2


@every_recipe
def test_a_layer_its_activation_and_the_quantization_of_the_result(recipe):
    calls = []
    x, named = given()
    plan, plain = both_ways([gemm_glu_quantize(calls=calls)], recipe, experts(), x, **named)
    assert [(s.ops, s.gives[1:]) for s in plan.fused] == [
        (("0.GroupedLinear", "1.SwiGLU", "2:input.Quantize"), ("1.input", "2.input:columns"))
    ]
    assert calls == [("toy.gemm_glu_quantize", KEEPS)]
    assert set(plan.kept) == set(plain.kept)
    assert plan.kept_bytes == plain.kept_bytes


def test_it_writes_no_columns_in_inference():
    calls = []
    x, named = given(requires_grad=False)
    with torch.no_grad():
        plan, _ = both_ways([gemm_glu_quantize(calls=calls)], "mxfp8", experts(), x, **named)
    assert plan.fused
    assert calls == [("toy.gemm_glu_quantize", ())]
    assert plan.kept == ()


def test_it_writes_no_columns_for_a_frozen_weight():
    calls, chain, (x, named) = [], experts(), given()
    chain[2].weight.requires_grad_(False)
    plan, _ = both_ways([gemm_glu_quantize(calls=calls)], "mxfp8", chain, x, **named)
    assert plan.fused
    assert calls == [("toy.gemm_glu_quantize", ("act.input",))]
    assert "2.input:columns" not in plan.kept


def test_a_step_that_cannot_keep_the_columns_gives_way():
    x, named = given()
    plan, _ = both_ways([gemm_glu_quantize(keeps=("act.input",))], "mxfp8", experts(), x, **named)
    assert rules_used(plan) == []
    assert statuses(plan, "toy.gemm_glu_quantize")[1] == (
        Status.CONSTRAINT,
        "cannot keep 2.input:columns, which 2.Wgrad needs",
    )


def test_a_step_that_keeps_what_is_no_form_of_anything_is_an_error():
    x, named = given()
    rule = gemm_glu_quantize(keeps=("fc.weight",))
    with fm.recipe("mxfp8"), fm.register(rule), pytest.raises(RuleError, match=r"keeps .* not made within the span"):
        experts()(x, **named)


@every_recipe
def test_a_data_gradient_a_derivative_and_its_quantization(recipe):
    calls = []
    x, named = given()
    plan, plain = both_ways([dgrad_dglu_quantize(calls=calls)], recipe, experts(), x, **named)
    assert [(s.ops, s.gives) for s in plan.fused] == [
        (("2.Dgrad", "1.DSwiGLU", "0:grad.QuantizeGrad"), ("grad(0:grad.input)", "grad(0:grad.input):columns"))
    ]
    assert calls == [("toy.dgrad_dglu_quantize", ("grad_input", "grad_input:columns"))]
    assert set(plan.kept) == set(plain.kept)


@pytest.mark.parametrize(
    ("frozen", "gives"),
    [("x", ("grad_input:columns",)), ("0", ("grad_input",))],
    ids=["no gradient of the rows", "no gradient of the weight"],
)
def test_the_gradient_has_the_forms_that_are_read(frozen, gives):
    calls, chain, (x, named) = [], experts(), given(requires_grad=frozen != "x")
    if frozen != "x":
        chain[int(frozen)].weight.requires_grad_(False)
    plan, _ = both_ways([dgrad_dglu_quantize(calls=calls), wgrad()], "mxfp8", chain, x, **named)
    assert calls == [("toy.dgrad_dglu_quantize", gives)]
    assert rules_used(plan, "backward").count("toy.wgrad") == (1 if frozen == "0" else 2)


def test_the_bias_gradient_wants_the_gradient_as_it_was():
    calls = []
    x, named = given()
    plan, _ = both_ways([dgrad_dglu_quantize(calls=calls)], "mxfp8", experts(bias=True), x, **named)
    assert plan.fused
    assert calls == [("toy.dgrad_dglu_quantize", ("grad_input", "grad_input:columns", "dact.grad_input"))]


def test_the_bias_gradient_may_be_computed_on_the_way():
    class WithBias(FusionRule, name="toy.with_bias", direction="backward"):
        takes_quantized = True
        dgrad: Dgrad
        dact: DSwiGLU
        quantize: QuantizeGrad
        dbias: BiasGrad

        def offer(self, ctx):
            return Step(
                needs=("grad_output", "dgrad.weight", "offsets", "dact.input"),
                gives=("quantize.grad_input", "quantize.grad_input:columns", "dbias.grad_bias"),
            )

        def build(self, ctx, keep):
            def run(dy, weight, offsets, h):
                dh = self.dact.compute(quantized_products.grouped_mm_dgrad(dy, weight, offsets), h)
                forms = [fm.quantize(dh, self.quantize.op.grad_quantizer, a, offsets=offsets) for a in (-1, -2)]
                return (*forms, self.dbias.compute(dh, offsets))

            return on_tensors(ctx, self.offer(ctx), run)

    x, named = given()
    plan, _ = both_ways([WithBias], "mxfp8", experts(bias=True), x, **named)
    assert [s.ops[-1] for s in plan.fused] == ["0.BiasGrad"]


def test_a_layer_that_quantizes_its_rows_itself():
    """By rows they are never there; by columns they are kept."""

    class QuantizeGemm(FusionRule, name="toy.quantize_gemm", direction="forward"):
        takes_quantized = True
        quantize: Quantize
        fc: GroupedLinear

        def offer(self, ctx):
            needs = ("input", "fc.weight", "offsets")
            return Step(needs=needs, gives=("output",), keeps=("quantize.output:columns",), zeroes_tail=True)

        def build(self, ctx, keep):
            def run(x, weight, offsets):
                forms = [fm.quantize(x, self.quantize.quantizer, axis, offsets=offsets) for axis in (-1, -2)]
                return (quantized_products.grouped_mm(forms[0], weight, offsets), *(forms[1] for _ in keep))

            return on_tensors(ctx, self.offer(ctx), run)

    x, named = given()
    plan, plain = both_ways([QuantizeGemm], "mxfp8", experts(), x, **named)
    assert [s.ops for s in plan.fused] == [
        ("0:input.Quantize", "0.GroupedLinear"),
        ("2:input.Quantize", "2.GroupedLinear"),
    ]
    assert set(plan.kept) == set(plain.kept)


@every_recipe
def test_everything_that_is_quantized_may_be_fused(recipe):
    rules = [gemm(), gemm_glu_quantize(), dgrad_dglu_quantize(), wgrad(), quantize_rows(), quantize_gradient()]
    x, named = given()
    plan, plain = both_ways(rules, recipe, experts(), x, **named)
    assert [s.rule for s in plan.steps if "weight" not in s.ops[0]] == [
        "toy.quantize", "toy.gemm_glu_quantize", "toy.gemm",
        "toy.quantize_grad", "toy.wgrad", "toy.dgrad_dglu_quantize", "toy.wgrad", None,
    ]  # fmt: skip
    assert set(plan.kept) == set(plain.kept)
    assert plan.kept_bytes == plain.kept_bytes


def test_a_backward_step_may_compute_the_columns_again():
    """For the weight gradient after it, from values that the activation's derivative reads: nothing else is kept."""
    calls = []
    chain, (x, named) = experts(), given()
    rules = [gemm_glu_quantize(keeps=("act.input",)), dgrad_dglu_quantize(recomputes=True, calls=calls)]
    plan, plain = both_ways(rules, "mxfp8", chain, x, **named)
    assert len(plan.fused) == 2
    assert calls == [("toy.dgrad_dglu_quantize", ("grad_input", "grad_input:columns", "dgrad.input:columns"))]
    assert set(plain.kept) - set(plan.kept) == {"2.input:columns"}
    with fm.recipe("mxfp8"):
        unfused = kept_at_last(chain, x, **named)
        with fm.register(*rules):
            assert unfused - kept_at_last(chain, x, **named) >= 90 * I  # a byte an element, and scales


def refuse(*tensors):
    fm.require(False, "rows are %d, not a multiple of 128", tensors[0].shape[0])


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("which", ["forward", "backward", "both"])
def test_a_step_that_declines_the_call_falls_back(which, recomputes):
    keeps = KEEPS[:1] if recomputes else KEEPS
    rules = [
        gemm_glu_quantize(guard=None if which == "backward" else refuse, keeps=keeps),
        dgrad_dglu_quantize(guard=None if which == "forward" else refuse, recomputes=recomputes),
    ]
    x, named = given()
    plan, _ = both_ways(rules, "mxfp8", experts(), x, **named)
    assert len(plan.fused) == 2


def test_a_quantize_that_the_user_put_there_is_fused_like_the_recipes():
    chain = fm.Sequential(
        Quantize("mxfp8", weight="mxfp8"),
        GroupedLinear(E, H, 2 * I),
        Quantize(backward="mxfp8"),
        SwiGLU(),
        Quantize("mxfp8", weight="mxfp8"),
        GroupedLinear(E, I, H),
        Quantize(backward="mxfp8"),
    )
    x, named = given()
    plan, _ = both_ways([gemm_glu_quantize(), dgrad_dglu_quantize()], "bf16", chain, x, **named)
    assert [s.ops for s in plan.fused] == [
        ("1.GroupedLinear", "3.SwiGLU", "4.Quantize"),
        ("5.Dgrad", "3.DSwiGLU", "2.QuantizeGrad"),
    ]


def test_a_rule_over_a_quantize_and_what_reads_its_values():
    """Nothing quantized comes out of it: the derivative, in plain PyTorch, wants what the codes stand for."""

    class QuantizeGLU(FusionRule, name="toy.quantize_glu", direction="forward"):
        quantize: Quantize
        act: SwiGLU

        def offer(self, ctx):
            return Step(needs=("input",), gives=("output",), keeps=("quantize.output",))

        def build(self, ctx, keep):
            def run(x):
                codes = fm.quantize(x, self.quantize.quantizer)
                return (self.act.compute(codes.dequantize()), *(t for _ in keep for t in codes.tensors()))

            return bound(run)

    chain, x = fm.Sequential(Quantize("mxfp8"), SwiGLU()), given()[0]
    plan, _ = both_ways([QuantizeGLU], "bf16", chain, x)
    assert rules_used(plan) == ["toy.quantize_glu"]
    with torch.no_grad():
        plan, _ = both_ways([QuantizeGLU], "bf16", chain, x.detach())
    assert rules_used(plan) == ["toy.quantize_glu"]
