"""Steps that are bound once for each kind of call, and steps that decline a call: the ops then run unfused."""

import logging

import pytest
import torch
from kit import toy
from kit.toy import IN, E, H, experts, gemm_glu, inputs, only_plan, outcome, rows, rule
from torch import nn

import fusedmoe as fm
from fusedmoe.fusion.language.rule import FusionError, NothingToDo
from fusedmoe.kernels.torch.grouped_gemm import grouped_mm, grouped_mm_dgrad
from fusedmoe.ops import Dgrad, GroupedLinear


def bound_gemm(log, declines=None, run_declines=None):
    """It logs "bind" and "run"."""
    gemm = rule("toy.bound", {"fc": GroupedLinear}, IN, zeroes_tail=True)

    def bind(self, ctx, x, weight, offsets):
        log.append("bind")
        if declines is not None:
            declines(x)
        kind = x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, weight.dtype

        def run(x, weight, offsets):
            log.append("run")
            if run_declines is not None:
                run_declines(x)
            assert (x.shape, x.stride(), weight.shape, weight.stride(), x.dtype, weight.dtype) == kind
            return grouped_mm(x, weight, offsets)

        return run

    gemm.bind = bind
    return gemm


@pytest.fixture
def layer():
    return fm.Sequential(GroupedLinear(E, H, 16, dtype=torch.float64))


def call(layer, x=None, **named):
    """Run it, compared with plain PyTorch."""
    x, named = rows() if x is None else x, {**inputs(), **named}
    y = layer(x, **named)
    with fm.disabled("*"), torch.no_grad():
        assert torch.equal(y, layer(x, **named))
    return y


def moved(t, offset):
    """The same values, beginning at this element of a buffer."""
    room = t.new_empty(t.numel() + offset)
    return room[offset:].view(t.shape).copy_(t)


def columns(t):
    """The same values, with unit stride along the axis before the last."""
    return t.mT.contiguous().mT


CHANGES = {
    "rows": lambda layer, x: rows(11),
    "strides of the rows": lambda layer, x: columns(x.detach()),
    "address of the rows": lambda layer, x: moved(x.detach(), 1),
    "no gradient of the rows": lambda layer, x: x.detach(),
    "type of the rows": lambda layer, x: nn.Parameter(x.detach()),
    "strides of the same weight": lambda layer, x: setattr(layer[0].weight, "data", columns(layer[0].weight.data)),
    "address of the same weight": lambda layer, x: setattr(layer[0].weight, "data", moved(layer[0].weight.data, 1)),
    "dtype of the same weight": lambda layer, x: layer.to(torch.float32) and x.detach().float(),
    "a frozen weight": lambda layer, x: layer.requires_grad_(False) and x,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_bound_once_for_calls_of_a_kind_and_anew_for_another(layer, change):
    log, x = [], rows()
    with fm.register(bound_gemm(log)):
        for _ in range(2):
            call(layer, x)
        other = change(layer, x)
        other = other if isinstance(other, torch.Tensor) else x
        for _ in range(2):
            call(layer, other)
    assert log == ["bind", "run", "run"] * 2


def test_not_bound_anew(layer):
    log, x = [], rows()
    with fm.register(bound_gemm(log)):
        assert only_plan(layer, x, **inputs()).fused
        assert not log, "explain binds nothing"
        call(layer, x)
        call(layer, torch.randn_like(x).requires_grad_())
        call(layer, x, splits=torch.tensor([0, 0, 4]))
        layer[0].weight.data = torch.randn_like(layer[0].weight)
        call(layer, x)
        layer[0].weight = nn.Parameter(torch.randn_like(layer[0].weight))
        call(layer, x)
        assert log == ["bind"] + ["run"] * 5
        for count in (12, 9, 12, 9):  # kinds in turns
            call(layer, rows(count))
    assert (log.count("bind"), log.count("run")) == (2, 9)


def test_a_kind_that_bind_declines_is_asked_for_at_every_call(layer, caplog):
    log = []
    with fm.register(bound_gemm(log, lambda x: fm.require(x.shape[0] != 12, "%d rows", x.shape[0]))):
        for count in (9, 12, 12, 9):
            call(layer, rows(count))
        assert log == ["bind", "run", "bind", "bind", "run"]
        with fm.strict():
            call(layer, rows(9))
            with pytest.raises(FusionError, match=r"^0.GroupedLinear: toy.bound declined this call: 12 rows$"):
                layer(rows(12), **inputs())
    said = [r.getMessage() for r in caplog.records if "declined" in r.getMessage()]
    assert said == ["0.GroupedLinear: toy.bound declined this call: 12 rows; it runs unfused"]


def test_nothing_to_do_is_no_fallback_and_a_bug_is_a_bug(layer, caplog):
    def nothing(x):
        if not x.shape[0]:
            raise NothingToDo("no rows")
        raise KeyError("oops")

    with fm.register(bound_gemm([], nothing)), fm.strict():
        y = layer(rows(0), splits=torch.zeros(E, dtype=torch.int64))
        with pytest.raises(KeyError, match="oops"):
            layer(rows(), **inputs())
    assert y.shape == (0, 16)
    assert not caplog.records


def test_a_backward_step_is_bound_anew_for_another_layout_of_the_gradient():
    log = []
    needs = ("grad_output", "dgrad.weight", "offsets")
    bound_dgrad = rule("toy.bound_dgrad", {"dgrad": Dgrad}, needs, ("grad_input",), direction="backward")

    def bind(self, ctx, dy, weight, offsets):
        strides = dy.stride()
        log.append(strides)

        def run(dy, weight, offsets):
            assert dy.stride() == strides
            return grouped_mm_dgrad(dy.contiguous(), weight, offsets)

        return run

    bound_dgrad.bind = bind
    layer, x = fm.Sequential(GroupedLinear(E, H, 16, dtype=torch.float64)), rows()
    grad = torch.randn(9, 16, dtype=torch.float64)
    with fm.register(bound_dgrad):
        for gradient in (grad, grad, grad[:1, :1].expand(9, 16), grad, columns(grad), columns(grad)):
            (dx,) = torch.autograd.grad(layer(x, **inputs()), [x], gradient)
            with fm.disabled("*"):
                (expected,) = torch.autograd.grad(layer(x, **inputs()), [x], gradient)
            assert torch.equal(dx, expected)
    assert log == [(16, 1), (0, 0), (16, 1), (1, 9)]


# ---- steps that decline ---------------------------------------------------------------------------------------------


def test_declined_steps_give_the_same(caplog):
    chain, x, named = experts(scale=True), rows(), inputs(scale=True)
    expected = outcome(chain, x, **named)
    with fm.register(*[make(guard=toy.refuse) for make in (gemm_glu, toy.gemm, toy.dgrad_dglu, toy.wgrad)]):
        assert only_plan(chain, x, **named).fused
        toy.assert_same(outcome(chain, x, **named), expected)
    assert "declined this call" in caplog.text


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_each_fallback_is_said_once_at_warning(caplog, grad):
    chain = experts()
    with fm.register(gemm_glu(guard=toy.refuse)), torch.set_grad_enabled(grad):
        for count in (9, 9, 10, 200):  # not once for every number of rows
            chain(rows(count), **inputs())
    (record,) = [r for r in caplog.records if "declined" in r.getMessage()]
    declined = "toy.gemm_glu declined this call: rows are 9, not a multiple of 128"
    assert record.getMessage() == f"0.GroupedLinear + 1.SwiGLU: {declined}; it runs unfused"
    assert (record.levelno, record.name) == (logging.WARNING, "fusedmoe.fusion.program.source")
    assert record.args, "%-style arguments"


def test_strict_raises_also_in_backward_if_the_forward_was_strict():
    chain, x, named = fm.Sequential(fm.SwiGLU(), experts()[2]), rows(), inputs()
    dglu = rule("toy.dglu", {"dact": toy.DSwiGLU}, ("grad_output", "dact.input"), ("grad_input",), direction="backward")
    dglu.build = lambda self, ctx, keep: toy.refuse
    few = toy.gemm(guard=lambda x, *_: fm.require(x.shape[0] <= 9, "%d rows are more than 9", x.shape[0]))
    with fm.register(dglu, few):
        with fm.strict():
            y = chain(x, **named)
            with pytest.raises(FusionError, match=r"^1.GroupedLinear: toy.gemm declined this call: 12 rows"):
                chain(rows(12), **named)
        with fm.strict(False):
            lenient = chain(x, **named)
        with pytest.raises(FusionError, match=r"^0.DSwiGLU: toy.dglu declined this call: rows are 9"):
            y.sum().backward()
        with fm.strict():
            lenient.sum().backward()
