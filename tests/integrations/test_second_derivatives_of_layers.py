"""Second derivatives of whole layers, and under what else a training loop may have around a call."""

import pytest
import torch
from kit import plain_models
from torch import nn
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
    seq = fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H)).to(dtype)
    for p in seq.parameters():
        nn.init.normal_(p, std=0.5)
    return seq


def plain_experts(seq):
    plain = plain_models.Experts(E, H, I, seq[0].weight.dtype)
    return plain_models.twin(plain, seq)


def layer(shared=None):
    torch.manual_seed(0)
    moe = fm.MoE(H, I, E, 2, shared_intermediate=shared).double()
    for p in moe.parameters():
        nn.init.normal_(p, std=0.5)
    return moe


def penalty(y, x, parameters):
    """The gradients of a loss with a gradient penalty."""
    (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return [g, *torch.autograd.grad(y.square().mean() + (g.norm() - 1) ** 2, [x, *parameters])]


def assert_same(got, want, **tolerances):
    for a, b in zip(got, want, strict=True):
        assert b.abs().sum() > 0, "zeros would pass"
        torch.testing.assert_close(a, b, **tolerances)


@pytest.mark.parametrize("shared", [None, 5])
def test_a_gradient_penalty_on_a_layer_reaches_router_and_experts(shared):
    moe, x = layer(shared), rows()
    plain = plain_models.twin(plain_models.MoE(H, I, E, 2, shared), moe)
    got = penalty(moe(x), x, moe.parameters())
    named = dict(plain.named_parameters())
    assert_same(got, penalty(plain(x), x, [named[name] for name, _ in moe.named_parameters()]))


def test_a_penalty_with_the_losses_of_the_router():
    moe, x = layer(), rows()
    plain = plain_models.twin(plain_models.MoE(H, I, E, 2), moe)

    def losses(x):
        logits = plain.router(x)
        probs = logits.softmax(-1)
        load = torch.zeros(E).scatter_add_(0, probs.topk(2, -1).indices.flatten(), torch.ones(2 * ROWS)).double()
        return E * (load / (2 * ROWS) * probs.mean(0)).sum() + logits.logsumexp(-1).square().mean()

    y, stats = moe(x, return_stats=True)
    wanted = [moe.router.weight, moe.experts.down.weight]
    (g,) = torch.autograd.grad(y.sum() + stats.load_balancing_loss + stats.z_loss, x, create_graph=True)
    got = torch.autograd.grad(g.square().sum(), wanted)
    (g,) = torch.autograd.grad(plain(x).sum() + losses(x), x, create_graph=True)
    assert_same(got, torch.autograd.grad(g.square().sum(), [plain.router.weight, plain.experts["down"].weight]))


def test_tokens_that_only_the_caller_has():
    """The layer's tokens are a view of x, and a gradient of the router's weight needs them."""
    moe = layer().to(torch.bfloat16)
    x = rows().detach().to(torch.bfloat16).requires_grad_()
    got = penalty(moe(x), x, moe.parameters())
    exact = moe.double()
    (g, *found) = got
    want = penalty(exact(x.double()), x, exact.parameters())
    for a, b in zip((g, *found), want, strict=True):
        assert (a.double() - b.double()).norm() / b.double().norm() < 0.1
    moe = layer().to(torch.bfloat16)
    moe.router.requires_grad_(False)
    y = moe(x * 1)
    with pytest.raises(SecondOrderError, match=r"was freed, since first derivatives do not need it"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_hessian_vector_products():
    seq, x = experts(), rows()
    plain = plain_experts(seq)
    v = torch.randn_like(x)
    loss = lambda m: lambda x: m(x, SPLITS).square().sum() if m is plain else m(x, splits=SPLITS).square().sum()  # noqa: E731
    functional = torch.autograd.functional
    for f in (functional.hvp, functional.vhp):
        assert_same(f(loss(seq), x, v), f(loss(plain), x, v))
    assert_same([functional.hessian(loss(seq), x)], [functional.hessian(loss(plain), x)])
    directions = [torch.randn_like(p) for p in seq.parameters()]
    results = []
    for m in (seq, plain):
        parameters = list(m.parameters())
        grads = torch.autograd.grad(loss(m)(x), parameters, create_graph=True)
        results.append(torch.autograd.grad(grads, parameters, directions))
    assert_same(*results)


def in_a_batch(f, x, create_graph):
    y = f(x)
    grads = torch.randn(3, *y.shape).double()
    return torch.autograd.grad(y, x, grads, is_grads_batched=True, create_graph=create_graph)


@pytest.mark.parametrize(
    "take",
    [
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
        lambda f, x: in_a_batch(f, x, create_graph=False),
        lambda f, x: in_a_batch(f, x, create_graph=True),
    ],
    ids=["jacobian", "gradients", "differentiable gradients"],
)
def test_a_batch_of_gradients_is_an_error(take):
    """It was torch's, of some operator that has no batching rule."""
    seq, x = experts(), rows()
    with pytest.raises(fm.InputError, match=r"0\.GroupedLinear, .*: expected one gradient, got a batch .*vectorize="):
        take(lambda x: seq(x, splits=SPLITS), x)


def test_a_batch_of_hessian_rows_is_an_error_of_torch():
    seq, x = experts(), rows()
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.autograd.functional.hessian(lambda x: seq(x, splits=SPLITS).square().sum(), x, vectorize=True)


def test_a_batch_of_gradients_is_right_where_torch_can_compute_with_it():
    seq, x = fm.Sequential(fm.SwiGLU(), fm.SquaredReLU()), rows()
    jacobian = torch.autograd.functional.jacobian
    assert_same([jacobian(seq, x, vectorize=True)], [jacobian(seq, x)])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # torch's own
@pytest.mark.parametrize("name", ["grad", "jacrev", "hessian"])
def test_transforms_of_functions_are_an_error(name):
    seq, x = experts(), rows().detach()
    with pytest.raises(fm.InputError, match=r"outside of the transforms of torch\.func"):
        getattr(torch.func, name)(lambda x: seq(x, splits=SPLITS).sum())(x)


class Inner(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(H, dtype=torch.float64), moe

    def forward(self, x):
        return x + self.moe(self.norm(x))


@pytest.mark.parametrize("frozen_router", [False, True])
def test_checkpointing_frees_the_rows_inside(frozen_router):
    """Its recomputation gives back what was saved for backward. The rows are saved for the router's weight alone."""
    model, x = Inner(layer()), rows()
    model.moe.router.requires_grad_(not frozen_router)
    wanted = [p for p in model.parameters() if p.requires_grad]
    run = lambda: penalty(checkpoint(model, x, use_reentrant=False), x, wanted)  # noqa: E731
    if frozen_router:
        with pytest.raises(SecondOrderError, match="was freed"):
            run()
    else:
        assert_same(run(), penalty(model(x), x, wanted))


def test_checkpointed_experts_inside():
    norm, seq, x = nn.LayerNorm(H, dtype=torch.float64), experts(), rows()
    run = lambda x: x + seq(norm(x), splits=SPLITS)  # noqa: E731
    wanted = [*norm.parameters(), *seq.parameters()]
    want = penalty(run(x), x, wanted)
    assert_same(penalty(checkpoint(run, x, use_reentrant=False), x, wanted), want)


def test_a_checkpointed_layer():
    moe, x = layer(), rows()
    want = penalty(moe(x), x, moe.parameters())
    assert_same(penalty(checkpoint(moe, x, use_reentrant=False), x, moe.parameters()), want)


@pytest.mark.parametrize("trained", ["all", "weights"])
def test_under_autocast(trained):
    """The weights that were cast live as long as the call; they are cast again where they are needed."""
    seq = experts(torch.float32)
    x = rows(torch.float32)
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
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() / b.double().norm() < 0.05


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("ask", ["x", "parameters"])
def test_a_compiled_layer_is_an_error(backend, ask, dynamic):
    """The message is fusedmoe's or one of torch's two, which depends on the tensors that the graph keeps."""
    torch._dynamo.reset()  # a shape that an earlier test compiled for would make this one dynamic
    moe, x = layer(), rows()
    compiled = torch.compile(moe, backend=backend, fullgraph=True, dynamic=dynamic)
    with pytest.raises(RuntimeError, match=r"torch\.compile|create_graph=False"):
        penalty(compiled(x), x, [] if ask == "x" else moe.parameters())
