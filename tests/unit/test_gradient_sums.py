"""Weight gradients that kernels add to ``weight.grad``: the same bits, and all that code sees, as if autograd adds."""

import contextlib
import copy

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.sm90_machine import BF16, SPLITS, E, called, experts, operands, rows
from torch import distributed as dist

import fusedmoe as fm

pytestmark = pytest.mark.usefixtures("hopper_machine")

H, I = 32, 16  # noqa: E741
WEIGHTS = ("0.weight", "3.weight")
NAMED = {"splits": torch.tensor(SPLITS)}
COMPILED = pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["", "compiled"])
WITH_INDUCTOR = pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def compiles_anew():
    """After a number of graphs of the same code, torch would run it uncompiled."""
    torch._dynamo.reset()


def small(**how):
    return experts(scale=True, hidden=H, width=I, **how)


def compiled(call, backend):
    return call if backend is None else torch.compile(call, backend=backend)


def added():
    """For each weight gradient so far, whether a kernel added it."""
    return [what["accumulate"] for what in called("grouped_wgrad")]


def micro_batches(count=3):
    torch.manual_seed(1)
    return [operands(small(), frozen=("probs",)) for _ in range(count)]


def weights_of(module):
    """Those of a chain, or the parameters of another module."""
    return [module.get_parameter(w) for w in WEIGHTS] if isinstance(module, fm.Sequential) else [*module.parameters()]


def loss_of(call, batch):
    x, named = batch
    return call(x, **named).float().square().sum()


def alone(module, batch):
    """The gradient of each weight, which nothing is added to."""
    got = torch.autograd.grad(loss_of(module, batch), weights_of(module))
    stand_ins.calls.clear()
    return got


def backward(call, *batches, **how):
    for batch in batches:
        loss_of(call, batch).backward(**how)


def want(module, batches):
    """Of each weight, what autograd sums: the gradient of each batch is rounded, and each sum is."""
    sums = [g.clone() for g in alone(module, batches[0])]
    for batch in batches[1:]:
        sums = [total + g for total, g in zip(sums, alone(module, batch), strict=True)]
    assert all(total.any() for total in sums)
    return sums


def check(module, expected):
    for weight, total in zip(weights_of(module), expected, strict=True):
        assert weight.grad.is_leaf
        assert not weight.grad.requires_grad
        assert torch.equal(weight.grad, total)


def near(got, total):
    """Autograd adds in another order."""
    assert total.any()
    assert (got.float() - total.float()).norm() < 0.01 * total.float().norm()


@WITH_INDUCTOR
def test_kernels_add_all_but_the_first_micro_batch(backend):
    chain, batches = small(), micro_batches()
    expected, call = want(chain, batches), compiled(chain, backend)
    backward(call, batches[0])
    places = [w.grad.data_ptr() for w in weights_of(chain)]
    backward(call, *batches[1:])
    assert added() == [False] * 2 + [True] * 4
    check(chain, expected)
    assert [w.grad.data_ptr() for w in weights_of(chain)] == places, "autograd copied a gradient"
    for weight in weights_of(chain):
        weight.grad.fill_(1)
    expected = [1 + g for g in alone(chain, batches[0])]
    backward(chain, batches[0])
    assert added() == [True, True]
    check(chain, expected)


@COMPILED
def test_torch_autograd_grad_gets_the_gradient_alone(backend):
    chain, (first, second) = small(), micro_batches(2)
    expected, other, call = want(chain, [first]), want(chain, [second]), compiled(chain, backend)
    backward(call, first)
    got = torch.autograd.grad(loss_of(call, second), weights_of(chain))
    assert all(map(torch.equal, got, other))
    check(chain, expected)


@COMPILED
@pytest.mark.parametrize("after", [False, True], ids=["before", "after accumulation"])
def test_hooks(after, backend):
    """A hook gets the gradient alone, one after accumulation the sum."""
    chain, (first, second) = small(), micro_batches(2)
    expected, call, seen = want(chain, [first, second]), compiled(chain, backend), []
    wanted = expected if after else want(chain, [second])
    backward(call, first)
    stand_ins.calls.clear()
    for weight in weights_of(chain):
        if after:
            weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        else:
            weight.register_hook(lambda grad: seen.append(grad.clone()))
    backward(call, second)
    assert added() == [after and backend is not None] * 2
    assert len(seen) == 2
    assert all(any(torch.equal(grad, g) for g in seen) for grad in wanted)
    check(chain, expected)


@COMPILED
def test_views_of_a_buffer_stay_views(backend):
    """The gradients of DDP's buckets, and those of other frameworks."""
    chain, batches = small(), micro_batches(2)
    expected, weights = want(chain, batches), weights_of(chain)
    buffer = torch.zeros(sum(w.numel() for w in weights), dtype=BF16)
    for weight, part in zip(weights, buffer.split([w.numel() for w in weights]), strict=True):
        weight.grad = part.view_as(weight)
    backward(compiled(chain, backend), *batches)
    assert added() == [backend is None] * 4
    check(chain, expected)
    assert torch.equal(buffer, torch.cat([total.flatten() for total in expected]))
    assert all(weight.grad._base is buffer for weight in weights)


def in_another_layout(chain):
    for weight in weights_of(chain):
        weight.grad = weight.grad.mT.contiguous().mT
    return contextlib.nullcontext()


def compiled_autograd(chain):
    return torch._dynamo.compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager"))


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:Anomaly Detection")
@pytest.mark.parametrize(("how", "backend"), [
    (in_another_layout, None), (compiled_autograd, "aot_eager"),
    (lambda chain: torch.autograd.detect_anomaly(check_nan=True), None),
])  # fmt: skip
def test_where_autograd_adds(how, backend):
    chain, (first, second) = small(), micro_batches(2)
    expected, call = want(chain, [first, second]), compiled(chain, backend)
    backward(call, first)
    stand_ins.calls.clear()
    with how(chain):
        backward(call, second)
    assert not any(added())
    check(chain, expected)


@pytest.mark.parametrize(("backend", "equal"), [(None, False), ("aot_eager", False), ("inductor", True)])
def test_two_calls_in_one_graph(backend, equal):
    """torch computes equal calls once, and adds both gradients."""
    chain, (first, second, third) = small(), micro_batches(3)
    backward(chain, first)
    alike = copy.deepcopy(chain)
    for weight, copied in zip(chain.parameters(), alike.parameters(), strict=True):
        copied.grad = weight.grad.clone()

    def loss(chain):
        return loss_of(chain, second) + loss_of(chain, second if equal else third)

    with fm.disabled("*"):
        loss(alike).backward()
    stand_ins.calls.clear()
    compiled(loss, backend)(chain).backward()
    assert equal or sorted(added()) == [backend is None] * 2 + [True] * 2
    for got, other in zip(weights_of(chain), weights_of(alike), strict=True):
        near(got.grad, other.grad)


@pytest.mark.parametrize("twice", [False, True], ids=["tied", "one layer twice"])
def test_a_weight_of_two_layers(twice):
    first, second = (fm.GroupedLinear(E, H, H, dtype=BF16) for _ in range(2))
    second.weight = weight = first.weight
    chain, batch = fm.Sequential(first, fm.Sequential(first) if twice else second), (rows(features=H), NAMED)
    (expected,) = torch.autograd.grad(loss_of(chain, batch), [weight])
    weight.grad = torch.ones_like(weight)
    stand_ins.calls.clear()
    backward(chain, batch)
    assert twice or sorted(added()) == [False, True]
    near(weight.grad.float() - 1, expected)


def test_a_graph_that_is_retained():
    chain, (batch,) = small(), micro_batches(1)
    expected = [g + g for g in alone(chain, batch)]
    loss = loss_of(chain, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    assert added() == [False, False, True, True]
    check(chain, expected)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_derivatives_add_by_autograd():
    chain, (first, second) = small(), micro_batches(2)
    backward(chain, first)
    with fm.disabled("*"):
        expected = [w.grad + g for w, g in zip(weights_of(chain), alone(chain, second), strict=True)]
    stand_ins.calls.clear()
    backward(chain, second, create_graph=True)
    assert not any(added())
    for weight, total in zip(weights_of(chain), expected, strict=True):
        near(weight.grad, total)


def test_a_weight_that_is_frozen_before_the_backward_pass():
    chain, (first, second) = small(), micro_batches(2)
    expected = want(chain, [first])
    backward(chain, first)
    loss = loss_of(chain, second)
    for weight in weights_of(chain):
        weight.requires_grad_(False)
    loss.backward()
    check(chain, expected)


# ---- weights (E, in, out) that are passed as .mT --------------------------------------------------------------------


class Transposed(torch.nn.Module):
    """Experts with weights (E, in, out)."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(E, H, 2 * I, dtype=BF16) / H**0.5)
        self.second = torch.nn.Parameter(torch.randn(E, I, H, dtype=BF16) / I**0.5)
        self.chain = small().without_parameters()
        for layer in (self.chain[0], self.chain[3]):
            layer.transposed_grad = True

    def forward(self, x, **named):
        return self.chain.forward_with({"0.weight": self.first.mT, "3.weight": self.second.mT}, x, **named)


@pytest.mark.parametrize("backend", [None, "inductor"], ids=["", "compiled"])
def test_kernels_add_to_transposed_gradients(backend):
    """Inductor passes the parameter itself."""
    model, batches = Transposed(), micro_batches(3)
    expected = want(model, batches)
    backward(compiled(model, backend), *batches)
    assert added() == [False] * 2 + [True] * 4
    check(model, expected)
    assert all(parameter.grad.is_contiguous() for parameter in model.parameters())


@pytest.mark.parametrize("frozen", ["first", "second"])
def test_a_frozen_transposed_weight_in_a_graph(frozen):
    model, (batch,) = Transposed(), micro_batches(1)
    model.get_parameter(frozen).requires_grad_(False)
    (trained,) = [p for p in model.parameters() if p.requires_grad]
    (wanted,) = torch.autograd.grad(loss_of(model, batch), [trained])
    backward(compiled(model, "aot_eager"), batch)
    assert wanted.any()
    assert torch.equal(trained.grad, wanted)


def test_an_own_parameter_of_a_layer_with_the_attribute():
    chain, batches = small(), micro_batches(2)
    expected = want(chain, batches)
    for layer in (chain[0], chain[3]):
        layer.weight = torch.nn.Parameter(layer.weight.detach().mT.contiguous().mT)
        layer.transposed_grad = True
    backward(chain, *batches)
    for weight, total in zip(weights_of(chain), expected, strict=True):
        assert weight.grad.mT.is_contiguous()
        near(weight.grad, total)


# ---- code that sees or changes a gradient before autograd adds it ----------------------------------------------------


class Eighth(torch.autograd.Function):
    """The same values, and an eighth of the gradient: as an average over ranks. Inductor drops it from the forward
    graph.
    """

    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        return grad / 8


class Averaged(torch.nn.Module):
    """Experts with a function between the parameters and the layers."""

    def __init__(self):
        super().__init__()
        self.chain = small()
        self.first, self.second = (torch.nn.Parameter(w.detach()) for w in weights_of(self.chain))
        self.chain = self.chain.without_parameters()

    def forward(self, x, **named):
        weights = {"0.weight": Eighth.apply(self.first), "3.weight": Eighth.apply(self.second)}
        return self.chain.forward_with(weights, x, **named)


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@WITH_INDUCTOR
def test_a_function_between_the_parameter_and_the_layer(backend):
    model, batches = Averaged(), micro_batches(3)
    expected = want(model, batches)
    backward(compiled(model, backend), *batches)
    assert not any(added())
    check(model, expected)


def test_a_hook_on_a_transposed_weight_that_nothing_holds():
    """The rows need no gradient, so that the call does not keep the weight."""
    model, batches, seen = Transposed(), micro_batches(2), []

    def loss(batch):
        x, named = batch
        first = model.first.mT
        first.register_hook(lambda grad: seen.append(grad) or grad / 8)
        views = {"0.weight": first, "3.weight": model.second.mT}
        return model.chain.forward_with(views, x.detach(), **named).float().square().sum()

    expected = [torch.autograd.grad(loss(batch), [model.first])[0] for batch in batches]
    for batch in batches:
        loss(batch).backward()
    assert len(seen) == 4
    assert torch.equal(model.first.grad, expected[0] + expected[1])


@pytest.mark.parametrize("held", ["object", "view", "nothing"])
def test_code_that_holds_a_gradient_of_a_graph(held):
    chain, batches = small(), micro_batches(3)
    call = compiled(chain, "aot_eager")
    backward(call, batches[0])
    grads = [w.grad for w in weights_of(chain)]
    kept = {"object": grads, "view": [grad.view(-1) for grad in grads], "nothing": []}[held]
    del grads
    stand_ins.calls.clear()
    backward(call, *batches[1:])
    assert added() == [held == "nothing"] * 4
    for weight, other in zip(weights_of(chain), kept, strict=False):
        assert torch.equal(weight.grad.view_as(other), other)
        assert weight.grad.data_ptr() == other.data_ptr()


def test_an_error_after_an_addition_counts_a_change(monkeypatch):
    """The cache of quantized weights, and a graph that has saved the gradient, compare its version."""
    chain, (first, second) = small(), micro_batches(2)
    backward(chain, first)
    grads = [w.grad for w in weights_of(chain)]
    before = [(grad.clone(), grad._version) for grad in grads]
    original, calls = stand_ins.grouped_wgrad, []

    def second_fails(*of, **named):
        calls.append(of)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return original(*of, **named)

    monkeypatch.setattr(stand_ins, "grouped_wgrad", second_fails)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        backward(chain, second)
    assert [torch.equal(grad, old) for grad, (old, _) in zip(grads, before, strict=True)] == [True, False]
    assert grads[1]._version > before[1][1]


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("views", [False, True], ids=["", "bucket views"])
def test_ddp(process_group, views):
    """Its reducer gets the sums, also where a kernel adds in the pass that reduces."""
    chain, batches = small(), micro_batches(3)
    expected, reduced = want(chain, batches), []
    wrapped = torch.nn.parallel.DistributedDataParallel(chain, gradient_as_bucket_view=views)
    with wrapped.no_sync():
        backward(wrapped, *batches[:2])

    def reduce(_, bucket):
        reduced.append(bucket.buffer().clone())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, reduce)
    backward(wrapped, batches[2])
    assert added() == [False] * 2 + [True] * 4
    check(chain, expected)
    total = sum(buffer.double().abs().sum() for buffer in reduced)
    assert torch.isclose(total, sum(grad.double().abs().sum() for grad in expected))
