"""Chains in a Sequential: values and gradients, for any splits and any routing."""

import pytest
import torch
import torch.nn.functional as F
from chains import CHAINS, H, I, chain, meaning, runtime_inputs
from hypothesis import given
from oracles import experts_dense, glu
from rounding import ROUNDOFF, error_of_sums, relative_error
from strategies import routings, splits_and_rows

import fusedmoe as fm

every_chain = pytest.mark.parametrize("name", CHAINS)


def leaves(seq, x, inputs):
    return [x, *[t for t in inputs.values() if t.requires_grad], *seq.parameters()]


def prepared(name, splits, rows, dtype=torch.float64):
    seq = chain(name, len(splits), dtype)
    x = torch.randn(rows, H, dtype=dtype, requires_grad=True)
    inputs = runtime_inputs(seq, rows, splits, dtype)
    if "probs" in inputs:
        inputs["probs"].requires_grad_()
    return seq, x, inputs


@every_chain
@given(splits_and_rows())
def test_any_splits(name, drawn):
    splits, rows = drawn
    seq, x, inputs = prepared(name, splits, rows)
    y, expected = seq(x, **inputs), meaning(seq, x, **inputs)
    total = int(splits.sum())
    torch.testing.assert_close(y[:total], expected[:total], rtol=1e-11, atol=1e-12)
    assert not y[total:].any()
    dy = torch.randn_like(y)
    wanted = leaves(seq, x, inputs)
    for got, want in zip(
        torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected[:total], wanted, dy[:total]), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["scale last", "scale first", "gpt_oss", "squared relu"])
def test_gradcheck(name):
    splits = torch.tensor([2, 0, 1])
    seq, x, inputs = prepared(name, splits, 4)
    names = [n for n, _ in seq.named_parameters()]

    def run(x, *rest):
        given, parameters = dict(inputs), list(rest)
        if "probs" in given:
            given["probs"] = parameters.pop(0)
        return torch.func.functional_call(seq, dict(zip(names, parameters, strict=True)), (x,), given)

    assert torch.autograd.gradcheck(run, leaves(seq, x, inputs))


@every_chain
@pytest.mark.parametrize("dtype", ROUNDOFF, ids=str)
def test_accuracy_against_fp64_of_the_same_operands(name, dtype):
    splits = torch.tensor([20, 0, 31, 1])
    seq, x, inputs = prepared(name, splits, 56, dtype)
    y = seq(x, **inputs)
    dy = torch.randn(y.shape).to(dtype)
    found = [y, *torch.autograd.grad(y, leaves(seq, x, inputs), dy)]

    exact_seq = chain(name, 4)
    exact_seq.load_state_dict(seq.state_dict())
    exact_x = x.detach().double().requires_grad_()
    exact_inputs = {k: t.detach().double().requires_grad_() if t.is_floating_point() else t for k, t in inputs.items()}
    expected = meaning(exact_seq, exact_x, **exact_inputs)
    wanted = torch.autograd.grad(expected, leaves(exact_seq, exact_x, exact_inputs), dy.double())
    # one rounding after each op, forward and backward; their errors add like those of independent draws
    bound = ROUNDOFF[dtype] * (3 if dtype.itemsize == 2 else 16)
    for got, want in zip(found, [expected, *wanted], strict=True):
        assert got.dtype is dtype
        assert relative_error(got, want) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_own_grouped_mm_agrees(dtype):
    splits = torch.tensor([6, 0, 9, 1])
    offsets = splits.cumsum(0).to(torch.int32)
    w1, w2 = torch.randn(4, 32, 16).to(dtype).requires_grad_(), torch.randn(4, 16, 16).to(dtype).requires_grad_()
    x, dy = torch.randn(16, 16).to(dtype).requires_grad_(), torch.randn(16, 16).to(dtype)

    seq = fm.Sequential(fm.GroupedLinear(4, 16, 32, dtype=dtype), fm.SwiGLU(), fm.GroupedLinear(4, 16, 16, dtype=dtype))
    seq[0].weight, seq[2].weight = torch.nn.Parameter(w1.detach()), torch.nn.Parameter(w2.detach())
    y = seq(x, splits=splits)
    found = [y, *torch.autograd.grad(y, (x, seq[0].weight, seq[2].weight), dy)]

    gate, up = F.grouped_mm(x, w1.mT, offs=offsets).float().chunk(2, dim=-1)
    expected = F.grouped_mm((F.silu(gate) * up).to(dtype), w2.mT, offs=offsets)
    wanted = [expected, *torch.autograd.grad(expected, (x, w1, w2), dy)]
    # in fp32 the sums of both layers may differ; in bf16 they are rounded to the same number or the next
    bound = error_of_sums(16, 16) if dtype is torch.float32 else ROUNDOFF[dtype]
    for got, want in zip(found, wanted, strict=True):
        assert relative_error(got, want.double()) < bound


def test_two_scales_of_different_names():
    splits = torch.tensor([2, 1])
    layer = fm.GroupedLinear(2, 3, 3, dtype=torch.float64)
    x, a, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (4,), (4,)))
    y = fm.Sequential(fm.Scale("a"), layer, fm.Scale("b"))(x, splits=splits, a=a, b=b)
    weight_R = layer.weight[[0, 0, 1]]
    expected = torch.einsum("r, r, rk, rnk -> rn", a[:3], b[:3], x[:3], weight_R)
    torch.testing.assert_close(y[:3], expected, rtol=1e-12, atol=1e-13)
    wanted = (x, a, b, layer.weight)
    for got, want in zip(
        torch.autograd.grad(y.sum(), wanted), torch.autograd.grad(expected.sum(), wanted), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


ROUTED = {
    "weights in combine": (lambda e, b: [gate_up(e, b), fm.SwiGLU(), down(e, b), fm.Combine()]),
    "weights in scale": (
        lambda e, b: [gate_up(e, False), fm.SwiGLU(), fm.Scale("probs"), down(e, False), fm.Combine(None)]
    ),
}


def gate_up(experts, bias):
    return fm.GroupedLinear(experts, H, 2 * I, bias=bias)


def down(experts, bias):
    return fm.GroupedLinear(experts, I, H, bias=bias)


def routed(kind, experts, bias, dtype=torch.float64):
    seq = fm.Sequential(fm.Dispatch(), *ROUTED[kind](experts, bias)).to(dtype)
    for parameter in seq.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return seq


def routed_meaning(seq, x, expert_index, expert_weight):
    first, last = [op for op in seq if isinstance(op, fm.GroupedLinear)]

    def expert(e, row):
        wide = F.linear(row, first.weight[e], None if first.bias is None else first.bias[e])
        return F.linear(glu(wide, "swiglu"), last.weight[e], None if last.bias is None else last.bias[e])

    return experts_dense(x, expert_index, expert_weight, first.num_groups, expert)


@given(routings())
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ROUTED)
def test_any_routing(kind, bias, drawn):
    index, experts = drawn
    seq = routed(kind, experts, bias)
    x = torch.randn(len(index), H, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(index.shape, dtype=torch.float64, requires_grad=True)
    y, expected = seq(x, expert_index=index, expert_weight=weight), routed_meaning(seq, x, index, weight)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-12)
    wanted, dy = (x, weight, *seq.parameters()), torch.randn_like(y)
    found = torch.autograd.grad(y, wanted, dy)
    if expected.requires_grad:
        want = torch.autograd.grad(expected, wanted, dy, allow_unused=True, materialize_grads=True)
    else:  # no slot has an expert
        want = [torch.zeros_like(t) for t in wanted]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ROUTED)
def test_gradcheck_of_a_routed_chain(kind):
    index = torch.tensor([[1, 0], [9, 1], [0, -1]])
    seq = routed(kind, 3, bias=False)
    names = [n for n, _ in seq.named_parameters()]
    x = torch.randn(3, H, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)

    def run(x, weight, *parameters):
        given = {"expert_index": index, "expert_weight": weight}
        return torch.func.functional_call(seq, dict(zip(names, parameters, strict=True)), (x,), given)

    assert torch.autograd.gradcheck(run, (x, weight, *seq.parameters()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bitwise_the_same_each_time(dtype):
    seq = routed("weights in combine", 8, True, dtype)
    index = torch.randint(-1, 9, (100, 3))
    x, weight = torch.randn(100, H).to(dtype).requires_grad_(), torch.rand(100, 3).requires_grad_()
    dy = torch.randn(100, H).to(dtype)

    def run():
        y = seq(x, expert_index=index, expert_weight=weight)
        return (y, *torch.autograd.grad(y, (x, weight, *seq.parameters()), dy))

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
