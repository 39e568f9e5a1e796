"""`Router` in a chain, and called alone, against its own formulas, whose gradients autograd computes."""

import copy
import itertools

import pytest
import torch
from rounding import ROUNDOFF, error_of_sums, relative_error
from torch import nn

import fusedmoe as fm
from fusedmoe.ops import Op
from fusedmoe.ops.router import DRouter

T, HIDDEN, WIDE, E, K = 9, 6, 5, 8, 3

OPTIONS = {
    "softmax": {},
    "not renormalised": {"renormalize": False},
    "topk_softmax": {"score": "topk_softmax"},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid, not renormalised": {"score": "sigmoid", "renormalize": False},
    "groups": {"num_groups": 4, "top_groups": 2},
    "deepseek": {"score": "sigmoid", "num_groups": 4, "top_groups": 2},
    "corrected": {"balance_bias": True},
}


class Observe(fm.Op):
    """Passes the rows on, and returns the router's other values as one more row of numbers."""

    def __init__(self, *names):
        super().__init__()
        self.runtime_inputs = names

    def compute(self, x, *values):
        total = sum((value * torch.linspace(1, 2, value.numel()).view_as(value).to(value)).sum() for value in values)
        return x + total.to(x.dtype)


def router_of(dtype=torch.float64, **options):
    torch.manual_seed(0)
    router = fm.Router(HIDDEN, E, K, scale=1.7, bias=True, dtype=dtype, **options)
    for parameter in router.parameters():
        nn.init.normal_(parameter)
    if router.balance_bias is not None:
        router.balance_bias.uniform_(-0.2, 0.2)
    return router


def experts_of(dtype=torch.float64):
    return fm.Dispatch(), fm.GroupedLinear(E, HIDDEN, WIDE, dtype=dtype), fm.Combine()


def sums(routing):
    return {"probs_sum": routing.probs.sum(0), "z_sum": routing.logits.logsumexp(1).square().sum()}


def routing_of(router, x):
    """The result of the router without a chain."""
    with torch.autocast("cpu", enabled=False):
        index, weight, logits = router.compute(x, router.weight, router.bias, router.balance_bias)
        return fm.layers.moe.Routing(index, weight, logits, router._probs(router.scores(logits)))


def alone(router, rest, x):
    """The same layer with the router without a chain."""
    routing = routing_of(router, x)
    values = {"expert_index": routing.expert_index, "expert_weight": routing.expert_weight}
    values |= {"router_logits": routing.logits, **sums(routing)}
    rest = fm.Sequential(*rest)
    return rest(x, **{name: values[name] for name in rest.runtime_inputs})


def compare(router, rest, x, rtol=1e-12):
    x = x.requires_grad_()
    chain = fm.Sequential(router, *rest)
    y, expected = chain(x), alone(router, rest, x)
    assert torch.equal(y, expected)
    dy, wanted = torch.randn_like(y), (x, *chain.parameters())
    found = torch.autograd.grad(y, wanted, dy)
    for got, want in zip(found, torch.autograd.grad(expected, wanted, dy), strict=True):
        assert want.any()
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_are_those_of_autograd(options):
    compare(router_of(**options), experts_of(), torch.randn(T, HIDDEN, dtype=torch.float64))


def results_and_gradients(route, router, x, read):
    results = route(x)
    torch.manual_seed(2)
    losses = [(getattr(results, name) * torch.randn_like(getattr(results, name))).sum() for name in read]
    wanted = [t for t in (x, *router.parameters()) if t.requires_grad]
    return results, torch.autograd.grad(sum(losses), wanted)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_called_alone(options, compiled):
    router = router_of(**options)
    x = torch.randn(T, HIDDEN, dtype=torch.float64, requires_grad=True)
    route = torch.compile(router, fullgraph=True, backend="aot_eager") if compiled else router
    for read in (("expert_weight",), ("logits",), ("probs",), ("expert_weight", "logits", "probs")):
        results, grads = results_and_gradients(route, router, x, read)
        expected, expected_grads = results_and_gradients(lambda x: routing_of(router, x), router, x, read)
        assert type(results) is fm.layers.moe.Routing
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want)
            assert got.dtype is want.dtype
            assert got.requires_grad is want.requires_grad
        for got, want in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
            assert want.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", ["nothing", "parameters", "x"])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_alone_have_the_dtypes_of_what_they_belong_to(dtype, frozen, autocast):
    router = router_of(torch.float32).requires_grad_(frozen != "parameters")
    x = torch.randn(T, HIDDEN).to(dtype).requires_grad_(frozen != "x")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, grads = results_and_gradients(router, router, x, ("expert_weight", "probs"))
    _, expected = results_and_gradients(lambda x: routing_of(router, x), router, x, ("expert_weight", "probs"))
    assert len(grads) == {"nothing": 3, "parameters": 1, "x": 2}[frozen]
    for got, want in zip(grads, expected, strict=True):
        assert got.dtype is want.dtype
        bound = 4 * ROUNDOFF[dtype] if dtype is torch.bfloat16 else 2 * error_of_sums(HIDDEN, T)  # of both
        assert relative_error(got, want.double()) < bound


def test_alone_no_gradient_of_the_rows_arrives(monkeypatch):
    arrived = []
    compute = DRouter.compute
    monkeypatch.setattr(DRouter, "compute", lambda op, dy, *args: arrived.append(dy) or compute(op, dy, *args))
    x = torch.randn(T, HIDDEN, dtype=torch.float64, requires_grad=True)
    routing = router_of()(x)
    (routing.expert_weight.sum() + x.sum()).backward()
    assert arrived == [None]
    assert x.grad.any()


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_second_derivatives_alone(score):
    router = router_of(score=score)
    x = torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True)

    def route(x, weight, bias):
        return torch.func.functional_call(router, {"weight": weight, "bias": bias}, (x,))[1:]

    assert torch.autograd.gradgradcheck(route, (x, router.weight, router.bias), fast_mode=True)


OBSERVED = [("router_logits",), ("probs_sum",), ("z_sum",), ("router_logits", "probs_sum", "z_sum")]


@pytest.mark.parametrize("observed", OBSERVED, ids=" ".join)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_through_the_other_values(options, observed):
    router = router_of(**options)
    x = torch.randn(T, HIDDEN, dtype=torch.float64)
    compare(router, (*experts_of(), Observe(*observed)), x)
    compare(router, (Observe(*observed),), x)


def test_sums_are_computed_only_if_they_are_read():
    computed = []

    class Counting(fm.Router):
        def compute(self, *args, **kwargs):
            out = super().compute(*args, **kwargs)
            computed.append(len(out))
            return out

        def backward_ops(self):
            return fm.Router.backward_ops(self)

    x = torch.randn(T, HIDDEN)
    router = Counting(HIDDEN, E, K)
    fm.Sequential(router, fm.Dispatch(E))(x)
    fm.Sequential(router, Observe("z_sum"))(x)
    assert computed == [3, 5]


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_second_derivatives(score):
    router = router_of(score=score)
    chain = fm.Sequential(router, *experts_of(), Observe("router_logits", "probs_sum", "z_sum"))
    x = torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(chain, (x,), fast_mode=True)

    def of_router(weight, bias):
        return torch.func.functional_call(chain, {"0.weight": weight, "0.bias": bias}, (x.detach(),))

    assert torch.autograd.gradgradcheck(of_router, (router.weight, router.bias), fast_mode=True)


@pytest.mark.parametrize("frozen", [*itertools.product([False, True], repeat=3)], ids=str)
def test_frozen_parts(frozen):
    router, experts = router_of(), experts_of()
    for module, is_frozen in zip((router, experts[1]), frozen[:2], strict=True):
        module.requires_grad_(not is_frozen)
    x = torch.randn(T, HIDDEN, dtype=torch.float64).requires_grad_(not frozen[2])
    wanted = [t for t in (x, router.weight, router.bias, experts[1].weight) if t.requires_grad]
    chain = fm.Sequential(router, *experts)
    backward = [op for step in chain.explain(x).plans[0].steps if step.direction == "backward" for op in step.ops]
    assert ("0.RouterWeightGrad" in backward) is not frozen[0]
    assert ("0.DRouter" in backward) is not frozen[2]
    assert ("0.RouterLogitsGrad" in backward) is not (frozen[0] and frozen[2])
    if wanted:
        y, expected = chain(x), alone(router, experts, x)
        for got, want in zip(
            torch.autograd.grad(y.square().sum(), wanted),
            torch.autograd.grad(expected.square().sum(), wanted),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_the_backward_steps_of_router_and_dispatch_are_adjacent():
    x = torch.randn(T, HIDDEN, dtype=torch.float64, requires_grad=True)
    steps = fm.Sequential(router_of(), *experts_of()).explain(x).plans[0].steps
    assert [op for step in steps[-6:] for op in step.ops] == [
        "1.DispatchWeightGrad", "1.DDispatch",
        "0.RouterLogitsGrad", "0.RouterBiasGrad", "0.RouterWeightGrad", "0.DRouter",
    ]  # fmt: skip


def test_rows_that_use_no_weight_still_reach_the_tokens():
    router = router_of()
    x = torch.randn(T, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = fm.Sequential(router, fm.Dispatch(E), fm.Combine(None))(x)
    torch.testing.assert_close(y, K * x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, K))
    assert router.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_router_in_fp32_and_tokens_in_any_dtype(dtype):
    router, experts = router_of(torch.float32), experts_of(dtype)
    x = torch.randn(T, HIDDEN).to(dtype).requires_grad_()
    chain = fm.Sequential(router, *experts)
    y = chain(x)
    assert torch.equal(y, alone(router, experts, x))
    exact = copy.deepcopy(chain).double()
    exact_x, dy = x.detach().double().requires_grad_(), torch.randn_like(y)
    wanted, exact_wanted = (x, *chain.parameters()), (exact_x, *exact.parameters())
    found = torch.autograd.grad(y, wanted, dy)
    expected = torch.autograd.grad(exact(exact_x), exact_wanted, dy.double())
    for tensor, got, want in zip(wanted, found, expected, strict=True):
        assert got.dtype is tensor.dtype
        bound = 4 * ROUNDOFF[dtype] if dtype is torch.bfloat16 else error_of_sums(HIDDEN, HIDDEN, T)
        assert relative_error(got, want) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_does_not_round_what_the_router_reads(dtype, compiled):
    router, experts = router_of(torch.float32), experts_of(torch.float32)
    x = torch.randn(T, HIDDEN, dtype=dtype).requires_grad_()
    chain = fm.Sequential(router, *experts)
    with torch.autocast("cpu", torch.bfloat16):
        expected = alone(router, experts, x)
        y = (torch.compile(chain, fullgraph=True, backend="aot_eager") if compiled else chain)(x)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, expected)
    wanted, dy = (x, *chain.parameters()), torch.randn_like(y)
    found = torch.autograd.grad(y, wanted, dy)
    for tensor, got, want in zip(wanted, found, torch.autograd.grad(expected, wanted, dy), strict=True):
        assert got.dtype is tensor.dtype
        assert relative_error(got, want.double()) < 2 * ROUNDOFF[torch.bfloat16]


def test_chains_under_autocast():
    chain = fm.Sequential(router_of(torch.float32), *experts_of(torch.float32))
    x = torch.randn(T, HIDDEN)
    assert len(chain.explain(x).parts) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert [title for title, _ in chain.explain(x).parts] == ["chain 0", "chain 1 to 3"]
        assert len(chain.explain(x.bfloat16()).parts) == 1
    after_a_module = fm.Sequential(nn.LayerNorm(HIDDEN), *chain)
    with torch.autocast("cpu", torch.bfloat16):  # which gives fp32 rows
        found = after_a_module(x.bfloat16())
        assert torch.equal(found, alone(chain[0], chain[1:], after_a_module[0](x.bfloat16())))


@pytest.mark.parametrize("observed", OBSERVED, ids=" ".join)
def test_a_router_with_hooks_is_called_as_a_module(observed):
    router, rest = router_of(), (*experts_of(), Observe(*observed))
    x = torch.randn(T, HIDDEN, dtype=torch.float64)
    seen = []
    compare(router, rest, x)
    router.register_forward_hook(lambda module, args, routing: seen.append(routing))
    compare(router, rest, x)
    assert [type(routing) for routing in seen] == [fm.layers.moe.Routing]


def test_a_router_with_another_forward_is_called_as_a_module():
    class Shifted(fm.Router):
        def forward(self, x):
            routing = super().forward(x)
            return routing._replace(expert_index=(routing.expert_index + 1) % E)

    torch.manual_seed(0)
    router, plain = Shifted(HIDDEN, E, K), fm.Router(HIDDEN, E, K)
    plain.load_state_dict(router.state_dict())
    x = torch.randn(T, HIDDEN)
    experts = experts_of(torch.float32)
    routing, rest = router(x), fm.Sequential(*experts)
    expected = rest(x, expert_index=routing.expert_index, expert_weight=routing.expert_weight)
    assert torch.equal(fm.Sequential(router, *experts)(x), expected)
    assert not torch.equal(fm.Sequential(plain, *experts)(x), expected)


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
def test_torch_compile(score):
    router, rest = router_of(torch.float32, score=score), (*experts_of(torch.float32), Observe("z_sum", "probs_sum"))
    x = torch.randn(T, HIDDEN, requires_grad=True)
    chain = fm.Sequential(router, *rest)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    wanted = (x, *chain.parameters())
    chosen = []
    for correction in (0, torch.linspace(3, 0, E)):
        if router.balance_bias is not None:  # which is read at each call
            router.balance_bias.copy_(router.balance_bias + correction)
            chosen.append(router(x).expert_index)
        y, expected = compiled(x), chain(x)
        assert torch.equal(y, expected)
        found = torch.autograd.grad(y.sum(), wanted)
        for got, want in zip(found, torch.autograd.grad(expected.sum(), wanted), strict=True):
            assert torch.equal(got, want)
    assert not chosen or not torch.equal(*chosen)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_no_tokens(score):
    chain = fm.Sequential(router_of(torch.float32, score=score), *experts_of(torch.float32), Observe("z_sum"))
    x = torch.empty(0, HIDDEN, requires_grad=True)
    y = chain(x)
    assert y.shape == (0, WIDE)
    y.sum().backward()
    assert x.grad.shape == (0, HIDDEN)
    assert not chain[0].weight.grad.any()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_token_with_nan(options):
    router = router_of(torch.float32, **options)
    x = torch.randn(T, HIDDEN)
    clean = router(x)
    x[4, 0] = torch.nan
    routing = router(x)
    assert ((routing.expert_index >= 0) & (routing.expert_index < E)).all()
    assert all(len(set(ids)) == K for ids in routing.expert_index.tolist())
    assert routing.expert_weight[4].isnan().all()
    others = torch.arange(T) != 4
    assert torch.equal(routing.expert_index[others], clean.expert_index[others])
    assert torch.equal(routing.expert_weight[others], clean.expert_weight[others])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_logit_of_nan_ranks_highest(options):
    router = router_of(torch.float32, **options)
    router.requires_grad_(False).bias[5] = torch.nan
    routing = router(torch.randn(T, HIDDEN))
    assert ((routing.expert_index >= 0) & (routing.expert_index < E)).all()
    assert all(len(set(ids)) == K for ids in routing.expert_index.tolist())
    assert routing.expert_weight.isnan().any(1).all()
    if router.score != "softmax":  # whose scores are then all NaN
        assert (routing.expert_index == 5).any(1).all()


def test_two_layers_in_one_sequential():
    router, other = router_of(torch.float32), router_of(torch.float32, score="sigmoid")
    layers = [[r, fm.Dispatch(), fm.GroupedLinear(E, HIDDEN, HIDDEN), fm.Combine()] for r in (router, other)]
    x = torch.randn(T, HIDDEN, requires_grad=True)
    assert torch.equal(
        fm.Sequential(*layers[0], *layers[1])(x), fm.Sequential(*layers[1])(fm.Sequential(*layers[0])(x))
    )
    with pytest.raises(fm.InputError, match="no grouped op follows"):  # groups of experts are something else
        fm.Sequential(fm.Dispatch(), fm.Combine(), router_of(torch.float32, num_groups=2))(x)


def test_wrong_input_is_named():
    chain = fm.Sequential(router_of(torch.float32), *experts_of(torch.float32))
    with pytest.raises(fm.InputError, match=r"0\.Router.*x: expected shape \(tokens, 6\), got \(9, 5\)"):
        chain(torch.randn(T, 5))
    with pytest.raises(fm.InputError, match=r"'expert_index' is given, but 0\.Router provides it"):
        chain(torch.randn(T, HIDDEN), expert_index=torch.zeros(T, K, dtype=torch.int64))


def test_an_op_that_passes_rows_on_and_provides_values_needs_backward_ops():
    class Norms(Op):
        provides = ("norms",)
        passes_forward = True

        def infer(self, x):
            return fm.TensorSpec((x.shape[0],), x.dtype)

        def compute(self, x):
            return x.norm(dim=1)

    x = torch.randn(4, 6)
    chain = fm.Sequential(Norms(), fm.Scale("norms"))
    torch.testing.assert_close(chain(x), x * x.norm(dim=1, keepdim=True))
    with pytest.raises(NotImplementedError, match="Norms defines no backward_ops"):
        chain(x.requires_grad_())
