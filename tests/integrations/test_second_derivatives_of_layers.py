"""Second derivatives of whole layers, and under what else a training loop may have around a call."""

import pytest
import torch
from kit import plain_models
from kit.compare import assert_close
from kit.layers import drawn
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.fusion.program.differentiable import SecondOrderError

E, H, I = 4, 8, 6  # noqa: E741
SPLITS = torch.tensor([3, 0, 4, 2])
ROWS = 11  # two of them belong to no expert


def rows(dtype=torch.float64):
    return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()


def experts(dtype=torch.float64):
    torch.manual_seed(0)
    return drawn(fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H)).to(dtype))


def layer(shared=None):
    torch.manual_seed(0)
    return drawn(fm.MoE(H, I, E, 2, shared_intermediate=shared).double())


def penalty(y, x, parameters):
    """The gradients of a loss with a gradient penalty."""
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return [g, *torch.autograd.grad(y.square().mean() + (g.norm() - 1) ** 2, [x, *parameters])]


def errors(got, want):
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("shared", [None, 5])
def test_a_gradient_penalty_on_a_layer_reaches_router_and_experts(shared):
    moe, x = layer(shared), rows()
    plain = plain_models.twin(plain_models.MoE(H, I, E, 2, shared), moe)
    named = dict(plain.named_parameters())
    want = penalty(plain(x), x, [named[name] for name, _ in moe.named_parameters()])
    assert_close(penalty(moe(x), x, moe.parameters()), want)
    assert_close(penalty(checkpoint(moe, x, use_reentrant=False), x, moe.parameters()), want)


def test_tokens_that_only_the_caller_has():
    """The layer's tokens are a view of x, and a gradient of the router's weight needs them."""
    moe = layer().to(torch.bfloat16)
    x = rows().detach().to(torch.bfloat16).requires_grad_()
    got = penalty(moe(x), x, moe.parameters())
    exact = moe.double()
    assert max(errors(got, penalty(exact(x.double()), x, exact.parameters()))) < 0.1
    moe = layer().to(torch.bfloat16)
    moe.router.requires_grad_(False)
    y = moe(x * 1)
    with pytest.raises(SecondOrderError, match=r"was freed, since first derivatives do not need it"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_batch_of_gradients_is_an_error():
    x = rows()
    y = experts()(x, splits=SPLITS)
    with pytest.raises(fm.InputError, match=r"0\.GroupedLinear, .*: expected one gradient, got a batch"):
        torch.autograd.grad(y, x, torch.randn(3, *y.shape).double(), is_grads_batched=True)


@pytest.mark.parametrize("trained", ["all", "weights"])
def test_under_autocast(trained):
    """The weights that were cast live as long as the call; they are cast again where they are needed."""
    seq, x = experts(torch.float32), rows(torch.float32)
    if trained == "weights":
        x = x.detach()

    def run(call, parameters):
        wanted = [*([x] if x.requires_grad else []), *parameters]
        grads = torch.autograd.grad(call().float().square().sum(), wanted, create_graph=True)
        found = torch.autograd.grad(sum(g.float().square().sum() for g in grads), wanted)
        assert [t.dtype for t in found] == [t.dtype for t in wanted]
        return found

    def ours():
        with torch.autocast("cpu", torch.bfloat16):
            return seq(x, splits=SPLITS)

    got = run(ours, seq.parameters())
    exact = experts()
    exact.load_state_dict(seq.state_dict())
    want = run(lambda: exact(x.double(), splits=SPLITS), exact.parameters())
    assert max(errors(got, want)) < 0.05


@pytest.mark.usefixtures("fresh_graphs")  # a shape that an earlier test compiled for would make this one dynamic
@pytest.mark.parametrize(("backend", "ask", "dynamic"), [
    ("eager", "x", True), ("eager", "parameters", False), ("aot_eager", "x", False), ("aot_eager", "parameters", True),
])  # fmt: skip
def test_a_compiled_layer_is_an_error(backend, ask, dynamic):
    """The message is fusedmoe's or one of torch's two, which depends on the tensors that the graph keeps."""
    moe, x = layer(), rows()
    compiled = torch.compile(moe, backend=backend, fullgraph=True, dynamic=dynamic)
    with pytest.raises(RuntimeError, match=r"torch\.compile|create_graph=False"):
        penalty(compiled(x), x, [] if ask == "x" else moe.parameters())
