"""The functions that plans are written as: their text, what they hold on to, and rules for the steps between ops."""

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from kit import toy
from kit.toy import E, H, I, assert_same, dgrad_dglu, experts, gemm_glu, inputs, only_plan, outcome, rows, rule

import fusedmoe as fm
from fusedmoe.call.partition import partition_for
from fusedmoe.ops import BackwardOp, Op, Scale, SwiGLU
from fusedmoe.ops.glue import Dequantize, ZeroTail


def program(chain, position=0):
    (part,) = partition_for(chain).parts
    return list(part.chain.table.plans.values())[position].program


def test_the_text_of_a_plan():
    chain, x, named = experts(), rows(), inputs()
    with fm.register(gemm_glu(guard=lambda *_: None), dgrad_dglu()):
        plan = only_plan(chain, x, **named)
    assert (
        plan.forward_source
        == """\
def program(given, run0, run1, report1, fallback1, run2):
    _0_input, splits, _0_weight, _0_bias, _2_weight, _2_bias, = given
    given.clear()
    offsets = run0(splits, _0_input)
    del splits
    try:
        _2_input, _1_input = run1(_0_input, _0_weight, offsets, None)
    except Declined as reason:
        report1(reason)
        run1 = None
    if run1 is None:
        _2_input, _1_input = fallback1(_0_input, _0_weight, _0_bias, offsets)
    del _0_bias
    _2_output = run2(_2_input, _2_weight, _2_bias, offsets)
    del _2_bias, _2_input
    return (_2_output, ), (offsets, _2_weight, _1_input, _0_input, _0_weight, ),
"""
    )


@pytest.mark.parametrize(
    "labels",
    [("lambda", "run0", "日本"), ("a b", "a-b", "a_b"), ('"); raise SystemExit; ("', "\n", "#")],
)
def test_any_label_will_do(labels):
    torch.manual_seed(0)
    plain = experts()
    named = fm.Sequential(OrderedDict(zip(labels, plain, strict=True)))
    x = rows()
    rules = [gemm_glu(guard=toy.refuse), dgrad_dglu()]
    with fm.register(*rules):
        expected = outcome(plain, x, **inputs())
        got = outcome(named, x, **inputs())
    assert_same({name: got[name] for name in ("x", "y")}, {name: expected[name] for name in ("x", "y")})
    assert len(got) == len(expected)


def test_layers_that_are_alike_share_a_function():
    first, second, scaled = experts(), experts(), experts(scale=True)
    for chain in (first, second):
        chain(rows(), **inputs())
    scaled(rows(), **inputs(scale=True))
    assert program(first).run is program(second).run
    assert program(first).run is not program(scaled).run


# ---- values are released after their last use, and without a backward pass nothing is kept --------------------------


class Watch(Op):
    """y = x + 1; notes what is alive of what other watches saw when it runs."""

    def __init__(self, log):
        super().__init__()
        self._log = log

    def compute(self, x):
        self._log.append(([ref() is not None for ref in self._log.refs], "forward"))
        y = x + 1
        self._log.refs.append(weakref.ref(y))
        return y

    def backward_ops(self):
        return (DWatch(self),)


class DWatch(BackwardOp):
    needs = ("grad_output",)

    def compute(self, grad_output):
        log = self.op._log
        log.append(([ref() is not None for ref in log.refs], "backward"))
        grad = grad_output * 1
        log.refs.append(weakref.ref(grad))
        return grad


class Log(list):
    def __init__(self):
        super().__init__()
        self.refs = []


def watched(count):
    log = Log()
    return fm.Sequential(*(Watch(log) for _ in range(count))), log


def test_intermediate_values_are_released_after_their_last_use():
    chain, log = watched(4)
    y = chain(rows(requires_grad=False))
    # when the third runs, the first's result is gone; the second's is its input
    assert [alive for alive, _ in log] == [[], [True], [False, True], [False, False, True]]
    assert [ref() is not None for ref in log.refs] == [False, False, False, True]
    assert y is log.refs[-1]()


def test_nothing_is_kept_without_a_backward_pass():
    chain, x, named = experts(), rows(requires_grad=False), inputs()
    with torch.no_grad():
        assert chain(x, **named).grad_fn is None
    chain.requires_grad_(False)
    plan = only_plan(chain, x, **named)
    assert (plan.kept, plan.kept_bytes, chain(x, **named).grad_fn) == ((), 0, None)
    assert set(only_plan(chain, rows(), **named).kept) == {"1.input", "offsets"}  # of frozen weights, no rows


# ---- derived values, dequantization, tails --------------------------------------------------------------------------


def glue(plan):
    return {step.ops[0]: step.rule for step in plan.glue}


def test_a_rule_that_gives_splits_can_give_their_offsets(caplog):
    ran = []

    def gives(self):
        return ("output", *(f"dispatch.{name}" for name in self.dispatch.provides), "dispatch.offsets")

    def run(self, keep):
        def flat(x, index, weight):
            ran.append(len(x))
            values = self.dispatch.compute(x, index, weight)
            return *values, values[1].cumsum(0).to(torch.int32)

        return flat

    sorts = rule(
        "toy.sorts", {"dispatch": fm.Dispatch}, ("input", "dispatch.expert_index", "dispatch.expert_weight"), gives,
        run=run, guard=lambda x, *_: fm.require(x.shape[0] > 2, "%d tokens", x.shape[0]),
    )  # fmt: skip
    chain = fm.Sequential(fm.Dispatch(), fm.GroupedLinear(E, H, H), fm.Combine())
    for tokens in (6, 2):  # the rule declines the second call
        x = torch.randn(tokens, H, requires_grad=True)
        named = {"expert_index": torch.randint(0, E, (tokens, 2)), "expert_weight": torch.rand(tokens, 2)}
        expected = outcome(chain, x, **named)
        assert glue(only_plan(chain, x, **named)) == {"0.offsets": None}
        with fm.register(sorts):
            assert_same(outcome(chain, x, **named), expected)
            assert glue(only_plan(chain, x, **named)) == {}
    assert ran == [6]
    assert "toy.sorts declined this call: 2 tokens" in caplog.text


def test_a_rule_dequantizes():
    chain = fm.Sequential(fm.Quantize("mxfp8"), SwiGLU())
    x = torch.randn(6, 64, requires_grad=True)
    expected = outcome(chain, x)

    dequantizes = rule("toy.dequantize", {"glue": Dequantize}, ("glue.input",), ("glue.output",), takes_quantized=True)

    def build(self, ctx, keep):
        spec = ctx.spec("glue.input")

        def run(codes, scale):
            return spec._replace(shape=tuple(codes.shape)).tensor((codes, scale), None).dequantize()

        return lambda *tensors: run

    dequantizes.build = build
    with fm.register(dequantizes):
        assert [step.rule for step in only_plan(chain, x).glue] == ["toy.dequantize", None]  # forward, backward
        assert_same(outcome(chain, x), expected)


def test_a_rule_zeroes_tails():
    chain = fm.Sequential(Scale("probs"), fm.GroupedLinear(E, H, 2 * I, dtype=torch.float64), Scale("probs2"))
    x = rows()
    named = inputs(scale=True) | {"probs2": torch.rand(len(x), dtype=torch.float64)}
    expected = outcome(chain, x, **named)
    zeroes = rule(
        "toy.zero_tail", {"glue": ZeroTail}, ("glue.input", "glue.offsets"), ("glue.output",), direction="backward",
        run=lambda self, keep: self.glue.compute, takes_quantized=True, zeroes_tail=True,
    )  # fmt: skip
    with fm.register(zeroes):
        masks = [by for label, by in glue(only_plan(chain, x, **named)).items() if "zero_tail(grad(" in label]
        assert {*masks} == {"toy.zero_tail"}
        assert_same(outcome(chain, x, **named), expected)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("make", [experts, lambda: fm.MoE(toy.H, 8, 4, 2, dtype=torch.float64)], ids=["chain", "MoE"])
def test_a_deleted_module_is_freed_at_once(make, fused):
    """Its plans form no reference cycle with it: the weights would stay in memory until Python looks for cycles."""
    module, x = make(), rows()
    named = inputs() if isinstance(module, fm.Sequential) else {}
    refs = [weakref.ref(p) for p in module.parameters()]
    gc.collect()
    gc.disable()
    try:
        with fm.register(*([gemm_glu(), dgrad_dglu()] if fused else [])):
            module.explain(x, **named)
            module(x, **named).sum().backward()
            with torch.no_grad():
                module(x, **named)
        del module
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()
