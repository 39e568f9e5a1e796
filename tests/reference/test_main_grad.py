"""accumulate_into_main_grad: the weight's gradient is added to weight.main_grad, and autograd is told so."""

import pytest
import torch
from kit.compare import assert_bitwise

import fusedmoe as fm

E, K, N, ROWS = 3, 16, 24, 11
SPLITS = torch.tensor([4, 0, 5])  # two rows belong to no expert
BF16 = torch.bfloat16


def grouped(dtype=torch.float32, accumulate=True, bias=False):
    return fm.GroupedLinear(E, K, N, bias=bias, dtype=dtype, accumulate_into_main_grad=accumulate)


def dense(dtype=torch.float32, accumulate=True, bias=False):
    return fm.Linear(K, N, bias=bias, dtype=dtype, accumulate_into_main_grad=accumulate)


every_layer = pytest.mark.parametrize("make", [grouped, dense])


def call(op, x):
    return op(x, splits=SPLITS) if isinstance(op, fm.GroupedLinear) else op(x)


def given(dtype=torch.float32):
    return torch.randn(ROWS, K, dtype=dtype), torch.randn(ROWS, N, dtype=dtype)


def with_main_grad(op, value=0.0):
    weight = op.weight
    weight.main_grad = torch.full_like(weight, value, dtype=torch.promote_types(weight.dtype, torch.float32))
    return op


def twin_of(op, x, dy):
    """The same weights with their gradients, by autograd."""
    twin = (grouped if isinstance(op, fm.GroupedLinear) else dense)(op.weight.dtype, False, op.bias is not None)
    twin.load_state_dict(op.state_dict())
    call(twin, x).backward(dy)
    return twin


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64])
@every_layer
def test_calls_add_up(make, dtype):
    op = with_main_grad(make(dtype, bias=True), 1.0)
    main_grad = op.weight.main_grad
    where, expected = main_grad.data_ptr(), torch.ones_like(main_grad)
    for _ in range(3):
        x, dy = given(dtype)
        op.bias.grad = None
        call(op, x).backward(dy)
        twin = twin_of(op, x, dy)
        expected += twin.weight.grad
        torch.testing.assert_close(op.bias.grad, twin.bias.grad)
    assert torch.equal(main_grad, expected)
    assert op.weight.main_grad is main_grad
    assert main_grad.data_ptr() == where
    assert op.weight.grad is None
    assert make is dense or (main_grad[1] == 1).all(), "an expert without rows adds nothing"


def test_it_is_added_in_fp32():
    """A hundred small gradients onto a large one: bf16 would lose each of them."""
    op = with_main_grad(grouped(BF16), 256.0)
    x, dy = torch.ones(ROWS, K, dtype=BF16), torch.full((ROWS, N), 2**-10, dtype=BF16)
    for _ in range(100):
        call(op, x).backward(dy)
    assert (op.weight.main_grad[0] == 256 + 100 * 4 * 2**-10).all()


class Hook:
    """Adds the gradient of autograd unless it was added already, and drops it: Megatron's data-parallel wrapper."""

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
@every_layer
def test_a_data_parallel_wrapper_sees_each_gradient_once(make, accumulate):
    op = with_main_grad(make(BF16, accumulate))
    op.weight.zero_out_wgrad = True
    hook, (x, dy) = Hook(op.weight), given(BF16)
    for count in (1, 2):
        call(op, x).backward(dy)
        # a gradient arrives for the hook; where it is added already it means nothing, here zeros
        assert hook.ready == [(op.weight.shape, BF16, not accumulate)] * count
        torch.testing.assert_close(op.weight.main_grad, count * twin_of(op, x, dy).weight.grad.float())


@every_layer
@pytest.mark.parametrize(("main_grad", "word"), [(None, "NoneType"), ("bf16", "bfloat16"), ("shape", r"\(2, 2\)")])
def test_no_main_grad_or_one_that_does_not_fit(make, main_grad, word):
    op = make(BF16)
    if main_grad is not None:
        op.weight.main_grad = torch.zeros_like(op.weight) if main_grad == "bf16" else torch.zeros(2, 2)
    y = call(op, given(BF16)[0])
    with pytest.raises(fm.InputError, match=rf"Linear\(.*\): weight.main_grad: .*{word}"):
        y.sum().backward()


def test_main_grad_may_be_replaced_and_switched_on_between_calls():
    op, (x, dy) = with_main_grad(grouped(accumulate=False)), given()
    call(op, x).backward(dy)
    assert not op.weight.main_grad.any()
    grad, op.weight.grad = op.weight.grad, None
    op.accumulate_into_main_grad = True
    for _ in range(2):
        main_grad = with_main_grad(op).weight.main_grad
        call(op, x).backward(dy)
        assert_bitwise(main_grad, grad)


def test_autocast_accumulates_into_the_parameters_own():
    op, (x, dy) = with_main_grad(grouped()), given()
    with torch.autocast("cpu", dtype=BF16):
        call(op, x).backward(dy.to(BF16))
        twin = twin_of(op, x, dy.to(BF16))
    assert_bitwise(op.weight.main_grad, twin.weight.grad)
    assert op.weight.grad is None
