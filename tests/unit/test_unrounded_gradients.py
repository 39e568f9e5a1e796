"""Gradients of weights that autocast has cast: kernels write the dtype of the parameter, and autograd does not."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.sm90_machine import BF16, SPLITS, called, experts, operands
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.ops.state import unrounded_grads

pytestmark = pytest.mark.usefixtures("hopper_machine")

FP32 = torch.float32
RECIPES = pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_tensor"])


class Transposed(torch.nn.Module):
    """Experts with weights (E, in, out), which are passed as ``.mT``."""

    def __init__(self):
        super().__init__()
        own = made()
        self.first, self.second = (torch.nn.Parameter(own[i].weight.detach().mT.contiguous()) for i in (0, 3))
        self.chain = experts(scale=True, dtype=FP32).without_parameters()
        for layer in (self.chain[0], self.chain[3]):
            layer.transposed_grad = True

    def forward(self, x, **named):
        return self.chain.forward_with({"0.weight": self.first.mT, "3.weight": self.second.mT}, x, **named)


def made(**how):
    torch.manual_seed(0)
    return experts(scale=True, dtype=FP32, **how)


def batch_of(seed=1):
    torch.manual_seed(seed)
    return operands(made(), dtype=BF16, frozen=("x", "probs"))


def loss_of(module, batch, recipe="bf16", autocast=BF16):
    x, named = batch
    cast = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    with fm.recipe(recipe), cast:
        return module(x, **named).float().square().sum()


def backward(module, *batches, **how):
    for batch in batches:
        loss_of(module, batch, **how).backward()


def written():
    """The dtype of each weight gradient that a kernel wrote, and whether it was added to a sum."""
    return [(what["dtype"], what["accumulate"]) for name, what in stand_ins.calls if name.endswith("wgrad")]


def rounded(module, *batches, **how):
    """The gradient of each parameter, as if a kernel rounds it to the dtype of autocast and autograd casts it back."""
    copy = type(module)() if isinstance(module, Transposed) else made()
    for weight in copy.parameters():
        weight.data = weight.data.to(BF16)
    sums = [torch.zeros_like(p, dtype=FP32) for p in copy.parameters()]
    for batch in batches:
        grads = torch.autograd.grad(loss_of(copy, batch, **how, autocast=None), [*copy.parameters()])
        sums = [total + g for total, g in zip(sums, grads, strict=True)]
    stand_ins.calls.clear()
    return sums


def check(module, expected, bits=False):
    """The gradients are those that are expected, which were rounded once per batch, and are not rounded."""
    for parameter, want in zip(module.parameters(), expected, strict=True):
        grad = parameter.grad
        assert grad.dtype is FP32
        assert grad.is_leaf
        assert grad.stride() == parameter.stride()
        assert want.any()
        torch.testing.assert_close(grad, want, rtol=2**-7, atol=1e-6 * want.abs().max())
        assert torch.equal(grad, want) is bits
        assert torch.equal(grad, grad.to(BF16).to(FP32)) is bits


@RECIPES
@pytest.mark.parametrize("make", [made, Transposed], ids=["", "transposed"])
def test_kernels_write_the_dtype_of_the_parameter(make, recipe):
    module, batch = make(), batch_of()
    expected = rounded(module, batch, recipe=recipe)
    backward(module, batch, recipe=recipe)
    assert written() == [(FP32, False)] * 2
    check(module, expected)


def test_the_gradient_is_closer_to_that_in_fp64():
    module, batch = made(), batch_of()
    backward(module, batch)
    exact = made().double()
    for parameter in exact.parameters():
        parameter.data = parameter.data.to(BF16).double()
    x, named = batch
    valid = slice(0, int(named["splits"].sum()))
    named = {"splits": named["splits"], "probs": named["probs"].double()[valid]}
    exact(x[valid].double(), **named).square().sum().backward()
    for parameter, other in zip(module.parameters(), exact.parameters(), strict=True):
        of_kernel, of_rounded = ((g.double() - other.grad).norm() for g in (parameter.grad, parameter.grad.to(BF16)))
        assert 0 < of_kernel < of_rounded


def test_micro_batches_add_up():
    module, batches = made(), [batch_of(seed) for seed in (1, 2, 3)]
    expected = rounded(module, *batches)
    backward(module, *batches)
    assert written() == [(FP32, False)] * 6
    check(module, expected)


def test_hooks_and_torch_autograd_grad_get_the_gradient():
    module, batch, seen = made(), batch_of(), []
    parameters = [*module.parameters()]
    for parameter in parameters:
        parameter.register_hook(lambda grad: seen.append(grad.clone()))
    got = torch.autograd.grad(loss_of(module, batch), parameters)
    assert written() == [(FP32, False)] * 2
    backward(module, batch)
    assert len(seen) == 4
    for grad in (*got, *(p.grad for p in parameters)):
        assert grad.dtype is FP32
        assert grad.any()
        assert any(torch.equal(grad, s) for s in seen)
    (alone,) = torch.autograd.grad(loss_of(module, batch), [module[3].weight])
    assert torch.equal(alone, module[3].weight.grad)


def test_a_graph_that_is_retained():
    module, batch = made(), batch_of()
    loss = loss_of(module, batch)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(module.parameters(), first, strict=True))


def test_recomputation():
    module, batch = made(), batch_of()
    backward(module, batch)
    wanted = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    checkpoint(lambda: loss_of(module, batch), use_reentrant=False).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), wanted, strict=True))


def test_second_derivatives():
    """A weight gets gradients of its uses in both derivatives: a kernel writes one, and autograd casts the other."""
    found = []
    for disabled in ((), ("*",)):
        module, batch = made(), batch_of()
        with fm.disabled(*disabled):
            grads = torch.autograd.grad(loss_of(module, batch), [*module.parameters()], create_graph=True)
            assert not written()
            assert [g.dtype for g in grads] == [FP32, FP32]
            found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), [*module.parameters()]))
        assert written() == [(FP32, False)] * (0 if disabled else 2)
        stand_ins.calls.clear()
    for got, want in zip(*found, strict=True):
        assert got.dtype is FP32
        assert 0 < (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("frozen", ["0.weight", "3.weight"])
def test_a_frozen_weight(frozen):
    module, batch = made(), batch_of()
    module.get_parameter(frozen).requires_grad_(False)
    backward(module, batch)
    assert written() == [(FP32, False)]
    assert module.get_parameter(frozen).grad is None


def test_steps_that_are_not_fused():
    """Plain PyTorch rounds the gradient to the dtype of autocast."""
    module, batch = made(), batch_of()
    expected = rounded(module, batch)
    with fm.disabled("*wgrad*"):
        backward(module, batch)
    assert not written()
    for parameter, want in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, want, rtol=2**-6, atol=1e-5 * want.abs().max())
        assert torch.equal(parameter.grad, parameter.grad.to(BF16).to(FP32))


# ---- several backward passes over a graph ---------------------------------------------------------------------------


def losses_of(module, batch):
    """Two losses of the same output."""
    x, named = batch
    with torch.autocast("cpu", BF16):
        y = module(x, **named).float()[: sum(SPLITS)]
    return y.square().sum(), (3 * y).sum()


def separate(module, batch):
    """The gradients of the two losses."""
    return [torch.autograd.grad(loss, [*module.parameters()], retain_graph=True) for loss in losses_of(module, batch)]


@pytest.mark.parametrize("inner", ["backward", "grad"])
def test_a_backward_pass_inside_a_hook_of_another_one(inner):
    """It runs between the steps of the chain and the node of the first weight's cast."""
    module, batch = made(), batch_of()
    (one, two), wanted = losses_of(module, batch), separate(module, batch)
    found = []

    def hook(parameter):
        if not found:
            found.append(None)
            if inner == "grad":
                found.extend(torch.autograd.grad(two, [*module.parameters()], retain_graph=True))
            else:
                two.backward(retain_graph=True)

    module[3].weight.register_post_accumulate_grad_hook(hook)
    one.backward(retain_graph=True)
    for i, parameter in enumerate(module.parameters()):
        assert wanted[1][i].any()
        assert torch.equal(parameter.grad, wanted[0][i] + wanted[1][i] if inner == "backward" else wanted[0][i])
        assert inner == "backward" or torch.equal(found[1 + i], wanted[1][i])


def test_two_threads_with_the_same_graph():
    module, batch = made(), batch_of()
    losses, wanted = losses_of(module, batch), separate(module, batch)

    def gradients(loss):
        return [torch.autograd.grad(loss, [*module.parameters()], retain_graph=True) for _ in range(100)]

    with ThreadPoolExecutor(2) as pool:
        for found, want in zip(pool.map(gradients, losses), wanted, strict=True):
            assert all(torch.equal(g, w) for of_pass in found for g, w in zip(of_pass, want, strict=True))


def test_a_pass_that_failed_leaves_nothing_to_later_ones():
    """It ends after the steps of the chain, before the node of the first weight's cast."""
    module, batch = made(), batch_of()
    batch[0].requires_grad_()
    (one, two), wanted = losses_of(module, batch), separate(module, batch)
    (of_rows,) = torch.autograd.grad(two, batch[:1], create_graph=True)
    second = of_rows[: sum(SPLITS)].float().square().sum()
    of_second = torch.autograd.grad(second, [*module.parameters()], retain_graph=True)
    failing = module[3].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.backward(retain_graph=True)
    failing.remove()
    for loss, expected in ((second, of_second), (one, wanted[0])):
        module.zero_grad()
        loss.backward(retain_graph=True)
        assert all(torch.equal(p.grad, w) and w.any() for p, w in zip(module.parameters(), expected, strict=True))


def test_the_gradient_of_the_cast_weight_itself():
    module, batch = made(), batch_of()
    (one, _), ((_, want), _) = losses_of(module, batch), separate(module, batch)
    (node,) = [n for n, _ in reached(one.grad_fn) if n.next_functions and leads_to(n, module[3].weight)]
    (got,) = torch.autograd.grad(one, [GradientEdge(node, 0)], retain_graph=True)
    assert torch.equal(got, want.to(BF16))


def reached(node):
    """The nodes of a graph, with their inputs."""
    seen, todo = {}, [node]
    while todo:
        found = todo.pop()
        if found is not None and found not in seen:
            seen[found] = found.next_functions
            todo += [f for f, _ in found.next_functions]
    return seen.items()


def leads_to(node, parameter):
    """Whether the node is that of the cast of a parameter."""
    return getattr(node.next_functions[0][0], "variable", None) is parameter


def test_a_changed_placeholder_is_an_error(monkeypatch):
    module, batch = made(), batch_of()
    give = unrounded_grads.Unrounded.give
    monkeypatch.setattr(unrounded_grads.Unrounded, "give", lambda self, *given: give(self, *given).clone())
    with pytest.raises(RuntimeError, match="placeholder"):
        loss_of(module, batch).backward()


# ---- state ----------------------------------------------------------------------------------------------------------


def test_a_cached_quantized_weight_holds_until_the_step():
    module, batch, counts = made(), batch_of(), []
    for _ in range(3):
        stand_ins.calls.clear()
        backward(module, batch, recipe="fp8_block")
        counts.append(len(called("quantize_weight")))
    assert counts == [2, 0, 0]
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    backward(module, batch, recipe="fp8_block")
    assert len(called("quantize_weight")) == 2


def test_the_gradient_is_not_copied(monkeypatch):
    module, batch, places = made(), batch_of(), set()
    give = unrounded_grads.Unrounded.give
    recorded = lambda self, gradient, dtype: places.add(gradient.data_ptr()) or give(self, gradient, dtype)  # noqa: E731
    monkeypatch.setattr(unrounded_grads.Unrounded, "give", recorded)
    backward(module, batch)
    assert {p.grad.data_ptr() for p in module.parameters()} == places


def test_weights_in_other_dtypes():
    module, batch = made().to(BF16), batch_of()
    backward(module, batch)
    assert written() == [(BF16, False)] * 2
    assert all(p.grad.dtype is BF16 for p in module.parameters())
