"""accumulate_into_main_grad: the weight's gradient is added to weight.main_grad, and autograd is told so.

The convention is that of Megatron-LM and Transformer Engine; `Hook` is what Megatron's data-parallel wrapper does.
"""

import pytest
import torch
from torch import nn

import fusedmoe as fm

E, K, N, ROWS = 3, 16, 24, 11
SPLITS = torch.tensor([4, 0, 5])  # two rows belong to no expert


def grouped(dtype, accumulate=True, bias=False):
    return fm.GroupedLinear(E, K, N, bias=bias, dtype=dtype, accumulate_into_main_grad=accumulate)


def dense(dtype, accumulate=True, bias=False):
    return fm.Linear(K, N, bias=bias, dtype=dtype, accumulate_into_main_grad=accumulate)


def call(op, x):
    return op(x, splits=SPLITS) if isinstance(op, fm.GroupedLinear) else op(x)


def with_main_grad(op, value=0.0):
    weight = op.weight
    weight.main_grad = torch.full_like(weight, value, dtype=torch.promote_types(weight.dtype, torch.float32))
    return op


def expected_grad(op, x, dy):
    """Of the same weights, by autograd."""
    twin = (grouped if isinstance(op, fm.GroupedLinear) else dense)(op.weight.dtype, False, op.bias is not None)
    twin.load_state_dict(op.state_dict())
    call(twin, x).backward(dy)
    return twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [grouped, dense])
def test_calls_add_up(make, dtype):
    op = with_main_grad(make(dtype, bias=True), 1.0)
    main_grad = op.weight.main_grad
    where = main_grad.data_ptr()
    expected = torch.ones_like(main_grad)
    for _ in range(3):
        x, dy = torch.randn(ROWS, K, dtype=dtype), torch.randn(ROWS, N, dtype=dtype)
        op.bias.grad = None
        call(op, x).backward(dy)
        twin = expected_grad(op, x, dy)
        expected += twin.weight.grad
        torch.testing.assert_close(op.bias.grad, twin.bias.grad)
    assert torch.equal(main_grad, expected)
    assert op.weight.main_grad is main_grad
    assert main_grad.data_ptr() == where
    assert op.weight.grad is None
    assert not hasattr(op.weight, "grad_added_to_main_grad")
    if make is grouped:
        assert (main_grad[1] == 1).all(), "an expert without rows adds nothing"


def test_it_is_added_in_fp32():
    """A thousand small gradients onto a large one: bf16 would lose each of them."""
    op = with_main_grad(grouped(torch.bfloat16), 256.0)
    x, dy = torch.ones(ROWS, K, dtype=torch.bfloat16), torch.full((ROWS, N), 2**-10, dtype=torch.bfloat16)
    for _ in range(100):
        call(op, x).backward(dy)
    assert (op.weight.main_grad[0] == 256 + 100 * 4 * 2**-10).all()


class Hook:
    """Adds what autograd gives unless it was added already, drops it, and notes that the gradient is ready."""

    def __init__(self, weight):
        self.ready = []
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(self)

    def __call__(self, weight):
        assert weight.grad is not None
        if not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        self.ready.append((weight.grad.shape, weight.grad.dtype, bool(weight.grad.any())))
        weight.grad, weight.grad_added_to_main_grad = None, False


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("make", [grouped, dense])
def test_a_data_parallel_wrapper_sees_each_gradient_once(make, accumulate):
    op = with_main_grad(make(torch.bfloat16, accumulate))
    op.weight.zero_out_wgrad = True
    hook = Hook(op.weight)
    x, dy = torch.randn(ROWS, K, dtype=torch.bfloat16), torch.randn(ROWS, N, dtype=torch.bfloat16)
    for count in (1, 2):
        call(op, x).backward(dy)
        # a gradient arrives for the hook; where it is added already it means nothing, here zeros
        assert hook.ready == [(op.weight.shape, torch.bfloat16, not accumulate)] * count
        torch.testing.assert_close(op.weight.main_grad, count * expected_grad(op, x, dy).weight.grad.float())


def test_what_autograd_gets_is_taken_as_it_is():
    op = with_main_grad(grouped(torch.bfloat16))
    op.weight.grad_added_to_main_grad = False
    call(op, torch.randn(ROWS, K, dtype=torch.bfloat16)).sum().backward()
    assert op.weight.grad_added_to_main_grad is True
    assert op.weight.grad.is_contiguous()


@pytest.mark.parametrize("make", [grouped, dense])
@pytest.mark.parametrize(
    ("main_grad", "text"),
    [
        (
            None,
            "expected a tensor, since accumulate_into_main_grad=True, got NoneType; set it before the backward pass",
        ),
        ("bf16", "expected shape .*, torch.float32, on cpu, got shape .*, torch.bfloat16, on cpu"),
        ("shape", r"expected shape .*, torch.float32, on cpu, got shape \(2, 2\), torch.float32, on cpu"),
    ],
)
def test_no_main_grad_or_one_that_does_not_fit(make, main_grad, text):
    op = make(torch.bfloat16)
    if main_grad is not None:
        op.weight.main_grad = torch.zeros_like(op.weight) if main_grad == "bf16" else torch.zeros(2, 2)
    y = call(op, torch.randn(ROWS, K, dtype=torch.bfloat16))
    with pytest.raises(fm.InputError, match=rf"Linear\(.*\): weight.main_grad: {text}"):
        y.sum().backward()


def test_nothing_is_added_for_a_frozen_weight():
    op = with_main_grad(grouped(torch.float32))
    x = torch.randn(ROWS, K, requires_grad=True)
    op.weight.requires_grad_(False)
    call(op, x).sum().backward()
    assert not op.weight.main_grad.any()


def test_microbatches_may_come_back_in_any_order():
    op = with_main_grad(grouped(torch.float32))
    batches = [torch.randn(ROWS, K) for _ in range(3)]
    outputs = [call(op, x) for x in batches]
    for y in reversed(outputs):
        y.sum().backward()
    expected = sum(expected_grad(op, x, torch.ones(ROWS, N)).weight.grad for x in batches)
    torch.testing.assert_close(op.weight.main_grad, expected)


def test_main_grad_may_be_replaced_between_calls():
    op, x = with_main_grad(grouped(torch.float32)), torch.randn(ROWS, K)
    first = op.weight.main_grad
    call(op, x).sum().backward()
    second = with_main_grad(op).weight.main_grad
    call(op, x).sum().backward()
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_a_chain(dtype):
    def mlp(accumulate):
        first = fm.GroupedLinear(E, K, 2 * N, dtype=dtype, accumulate_into_main_grad=accumulate)
        second = fm.GroupedLinear(E, N, K, dtype=dtype, accumulate_into_main_grad=accumulate)
        return fm.Sequential(first, fm.SwiGLU(), second)

    plain, chain = mlp(False), mlp(True)
    chain.load_state_dict(plain.state_dict())
    x = torch.randn(ROWS, K, dtype=dtype)
    for op in (chain[0], chain[2]):
        with_main_grad(op)
    for module in (plain, chain):
        module(x, splits=SPLITS).square().sum().backward()
    for i in (0, 2):
        assert torch.equal(chain[i].weight.main_grad.to(dtype), plain[i].weight.grad)
        assert chain[i].weight.grad is None


def test_autocast_accumulates_into_the_parameters_own():
    op = with_main_grad(grouped(torch.float32))
    x = torch.randn(ROWS, K)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(op, x).sum().backward()
    twin = grouped(torch.float32, accumulate=False)
    twin.load_state_dict(op.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(twin, x).sum().backward()
    assert torch.equal(op.weight.main_grad, twin.weight.grad)
    assert op.weight.grad is None


def test_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        op, x = grouped(torch.bfloat16), torch.randn(ROWS, K, dtype=torch.bfloat16)
        for _ in range(2):
            call(with_main_grad(op), x).sum().backward()
            results.append(op.weight.main_grad)
        assert torch.equal(*results)
    finally:
        torch.use_deterministic_algorithms(False)


def test_it_can_be_switched_on_later_and_is_shown():
    op = with_main_grad(grouped(torch.float32, accumulate=False))
    x = torch.randn(ROWS, K)
    call(op, x).sum().backward()
    assert op.weight.grad is not None
    assert not op.weight.main_grad.any()
    grad, op.weight.grad = op.weight.grad, None
    op.accumulate_into_main_grad = True
    call(op, x).sum().backward()
    assert torch.equal(op.weight.main_grad, grad)
    assert "accumulate_into_main_grad=True" in repr(op)
    assert isinstance(op.weight, nn.Parameter)
