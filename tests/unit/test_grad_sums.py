"""Weight gradients that kernels add to ``weight.grad``: the same bits as if autograd adds them, and whatever code may
look at a gradient sees what it sees without this. Stand-ins of the kernels run on the CPU, as in test_sm90_rules.py.
"""

import copy

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from test_sm90_rules import BF16, E, H, I, experts, hopper_machine, inputs, rows  # noqa: F401
from torch import distributed as dist

import fusedmoe as fm

pytestmark = pytest.mark.usefixtures("builtin_rules")

WEIGHTS = ("0.weight", "3.weight")


@pytest.fixture(autouse=True)
def compiles_anew():
    """After a number of graphs of the same code, torch would run it uncompiled."""
    torch._dynamo.reset()


def added():
    """For each weight gradient so far, whether a kernel added it."""
    return [what["accumulate"] for name, what in stand_ins.calls if name == "grouped_wgrad"]


def micro_batches(count=3):
    torch.manual_seed(1)
    return [(rows(), inputs(requires_grad=False)) for _ in range(count)]


def alone(chain, batch):
    """The gradient of each weight, which nothing is added to."""
    x, named = batch
    got = torch.autograd.grad(chain(x, **named).float().square().sum(), [chain.get_parameter(w) for w in WEIGHTS])
    stand_ins.calls.clear()
    return got


def backward(chain, batch, **how):
    x, named = batch
    chain(x, **named).float().square().sum().backward(**how)


def want(chain, batches):
    """Of each weight, what autograd sums: the gradient of each batch is rounded, and each sum is."""
    sums = [g.clone() for g in alone(chain, batches[0])]
    for batch in batches[1:]:
        sums = [total + g for total, g in zip(sums, alone(chain, batch), strict=True)]
    assert all(total.any() for total in sums)
    return sums


def check(chain, expected):
    for name, total in zip(WEIGHTS, expected, strict=True):
        grad = chain.get_parameter(name).grad
        assert grad.is_leaf
        assert not grad.requires_grad
        assert torch.equal(grad, total), name


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_kernels_add_all_but_the_first_micro_batch(compiled):
    chain, batches = experts(), micro_batches()
    expected = want(chain, batches)
    call = torch.compile(chain, backend="aot_eager") if compiled else chain
    backward(call, batches[0])
    places = [chain.get_parameter(w).grad.data_ptr() for w in WEIGHTS]
    for batch in batches[1:]:
        backward(call, batch)
    assert added() == [False] * 2 + [True] * 4
    check(chain, expected)
    assert [chain.get_parameter(w).grad.data_ptr() for w in WEIGHTS] == places, "autograd copied a gradient"


def test_inductor():
    chain, batches = experts(), micro_batches(2)
    expected = want(chain, batches)
    call = torch.compile(chain)
    for batch in batches:
        backward(call, batch)
    assert added() == [False] * 2 + [True] * 2
    check(chain, expected)


def test_a_gradient_of_ones_is_added_to():
    chain, (batch,) = experts(), micro_batches(1)
    expected = [1 + g for g in alone(chain, batch)]
    for name in WEIGHTS:
        weight = chain.get_parameter(name)
        weight.grad = torch.ones_like(weight)
    backward(chain, batch)
    check(chain, expected)


def test_zeroed_gradients():
    chain, batches = experts(), micro_batches()
    for batch in batches[:2]:
        backward(chain, batch)
    for weight in map(chain.get_parameter, WEIGHTS):
        weight.grad.zero_()
    expected = alone(chain, batches[2])
    backward(chain, batches[2])
    assert added() == [True, True]
    check(chain, expected)


def test_torch_autograd_grad_gets_the_gradient_alone():
    chain, (first, second) = experts(), micro_batches(2)
    expected, other = want(chain, [first]), want(chain, [second])
    backward(chain, first)
    assert all(map(torch.equal, alone(chain, second), other))
    check(chain, expected)


def test_compiled_graphs_under_torch_autograd_grad():
    chain, (first, second) = experts(), micro_batches(2)
    expected, other = want(chain, [first]), want(chain, [second])
    call = torch.compile(chain, backend="aot_eager")
    backward(call, first)
    x, named = second
    got = torch.autograd.grad(call(x, **named).float().square().sum(), [chain.get_parameter(w) for w in WEIGHTS])
    assert all(map(torch.equal, got, other))
    check(chain, expected)


def test_backward_for_some_weights():
    chain, (first, second) = experts(), micro_batches(2)
    expected = [want(chain, [first, second])[0], want(chain, [first])[1]]
    backward(chain, first)
    stand_ins.calls.clear()
    backward(chain, second, inputs=[chain.get_parameter(WEIGHTS[0])])
    assert sorted(added()) == [False, True]
    check(chain, expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_a_hook_gets_the_gradient_alone(compiled):
    chain, (first, second) = experts(), micro_batches(2)
    expected, other = want(chain, [first, second]), want(chain, [second])
    call = torch.compile(chain, backend="aot_eager") if compiled else chain
    backward(call, first)
    seen = []
    for name in WEIGHTS:
        chain.get_parameter(name).register_hook(lambda grad: seen.append(grad.clone()))
    stand_ins.calls.clear()
    backward(call, second)
    assert added() == [False, False]
    assert all(any(torch.equal(grad, g) for g in seen) for grad in other)
    check(chain, expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_a_hook_after_accumulation_sees_the_sum(compiled):
    chain, (first, second) = experts(), micro_batches(2)
    expected, seen = want(chain, [first, second]), {}
    call = torch.compile(chain, backend="aot_eager") if compiled else chain
    backward(call, first)
    for name in WEIGHTS:
        chain.get_parameter(name).register_post_accumulate_grad_hook(lambda p: seen.update({id(p): p.grad.clone()}))
    backward(call, second)
    assert added()[2:] == [compiled, compiled]
    check(chain, expected)
    for name, total in zip(WEIGHTS, expected, strict=True):
        assert torch.equal(seen[id(chain.get_parameter(name))], total)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_views_of_a_buffer_stay_views(compiled):
    """The gradients of DDP's buckets, and those of other frameworks."""
    chain, batches = experts(), micro_batches(2)
    expected = want(chain, batches)
    call = torch.compile(chain, backend="aot_eager") if compiled else chain
    weights = [chain.get_parameter(w) for w in WEIGHTS]
    buffer = torch.zeros(sum(w.numel() for w in weights), dtype=BF16)
    for weight, part in zip(weights, buffer.split([w.numel() for w in weights]), strict=True):
        weight.grad = part.view_as(weight)
    for batch in batches:
        backward(call, batch)
    assert added() == [not compiled] * 4
    check(chain, expected)
    assert torch.equal(buffer, torch.cat([total.flatten() for total in expected]))
    assert all(weight.grad._base is buffer for weight in weights)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_gradients_of_another_layout():
    chain, (first, second) = experts(), micro_batches(2)
    expected = want(chain, [first, second])
    backward(chain, first)
    for name in WEIGHTS:
        weight = chain.get_parameter(name)
        weight.grad = weight.grad.mT.contiguous().mT
    stand_ins.calls.clear()
    backward(chain, second)
    assert not any(added())
    check(chain, expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_two_calls_in_one_graph(compiled):
    chain, (first, second, third) = experts(), micro_batches(3)
    backward(chain, first)
    alike = copy.deepcopy(chain)
    for weight, copied in zip(chain.parameters(), alike.parameters(), strict=True):
        copied.grad = weight.grad.clone()

    def loss(chain):
        return sum(chain(x, **named).float().square().sum() for x, named in (second, third))

    with fm.disabled("*"):
        loss(alike).backward()
    call = torch.compile(loss, backend="aot_eager") if compiled else loss
    stand_ins.calls.clear()
    call(chain).backward()
    assert sorted(added()) == [not compiled] * 2 + [True] * 2
    for name in WEIGHTS:  # autograd adds in another order
        got, other = (c.get_parameter(name).grad.float() for c in (chain, alike))
        assert (got - other).norm() < 0.01 * other.norm()


def test_a_weight_of_two_layers():
    first = fm.GroupedLinear(E, H, H, dtype=BF16)
    second = fm.GroupedLinear(E, H, H, dtype=BF16)
    second.weight = first.weight
    chain, named = fm.Sequential(first, second), {"splits": inputs()["splits"]}
    x = rows()
    y = chain(x, **named).float().square().sum()
    (expected,) = torch.autograd.grad(y, [first.weight])
    first.weight.grad = torch.ones_like(first.weight)
    stand_ins.calls.clear()
    backward(chain, (x, named))
    assert sorted(added()) == [False, True]
    got, total = first.weight.grad.float(), 1 + expected.float()
    assert (got - total).norm() < 0.01 * expected.float().norm()


def test_one_op_twice_in_a_chain():
    layer = fm.GroupedLinear(E, H, H, dtype=BF16)
    chain, named = fm.Sequential(layer, fm.Sequential(layer)), {"splits": inputs()["splits"]}
    x = rows()
    (expected,) = torch.autograd.grad(chain(x, **named).float().square().sum(), [layer.weight])
    layer.weight.grad = torch.ones_like(layer.weight)
    backward(chain, (x, named))
    got, total = layer.weight.grad.float(), 1 + expected.float()
    assert (got - total).norm() < 0.01 * expected.float().norm()


def test_a_graph_that_is_retained():
    chain, (batch,) = experts(), micro_batches(1)
    (first, second) = alone(chain, batch)
    x, named = batch
    loss = chain(x, **named).float().square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert added() == [False, False, True, True]
    check(chain, [first + first, second + second])


@pytest.mark.filterwarnings("ignore:Using backward")
def test_second_derivatives_add_by_autograd():
    chain, (first, second) = experts(), micro_batches(2)
    backward(chain, first)
    with fm.disabled("*"):
        expected = [c.get_parameter(w).grad.clone() for c in [chain] for w in WEIGHTS]
        expected = [total + g for total, g in zip(expected, alone(chain, second), strict=True)]
    stand_ins.calls.clear()
    backward(chain, second, create_graph=True)
    assert not any(added())
    for name, total in zip(WEIGHTS, expected, strict=True):
        got = chain.get_parameter(name).grad.float()
        assert (got - total.float()).norm() < 0.01 * total.float().norm()


def test_unfused_steps_add_by_autograd():
    chain, batches = experts(), micro_batches(2)
    with fm.disabled("*"):
        expected = want(chain, batches)
        for batch in batches:
            backward(chain, batch)
    check(chain, expected)


def test_fp32_weights_under_autocast():
    chain, batches = experts(dtype=torch.float32), [(x.detach().float(), named) for x, named in micro_batches(2)]
    with torch.autocast("cpu", BF16):
        expected = want(chain, batches)
        for batch in batches:
            backward(chain, batch)
    assert not any(added())
    check(chain, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_autograd():
    from torch._dynamo import compiled_autograd

    chain, batches = experts(), micro_batches(3)
    expected = want(chain, batches)
    call = torch.compile(chain, backend="aot_eager")
    for batch in batches:
        with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="aot_eager")):
            backward(call, batch)
    assert not any(added())
    check(chain, expected)


def test_gradients_after_an_error():
    """An error in a later node of the graph leaves the gradients of the weights where they are."""
    chain, (first, second) = experts(), micro_batches(2)
    backward(chain, first)
    x, named = second
    x = x.detach().requires_grad_()
    x.register_hook(lambda grad: 1 / 0)
    expected = want(chain, [first, second])
    with pytest.raises(ZeroDivisionError):
        chain(x, **named).float().square().sum().backward()
    check(chain, expected)


# ---- weights (E, in, out) that are passed as .mT --------------------------------------------------------------------


class Transposed(torch.nn.Module):
    """Experts with weights (E, in, out)."""

    def __init__(self, transposed_grad=True):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(E, H, 2 * I, dtype=BF16) / H**0.5)
        self.second = torch.nn.Parameter(torch.randn(E, I, H, dtype=BF16) / I**0.5)
        self.chain = experts().without_parameters()
        for layer in (self.chain[0], self.chain[3]):
            layer.transposed_grad = transposed_grad

    def forward(self, x, **named):
        return self.chain.forward_with({"0.weight": self.first.mT, "3.weight": self.second.mT}, x, **named)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_gradients_have_the_layout_of_the_parameter(compiled, fused):
    model, batches = Transposed(), micro_batches(3)
    plain = Transposed(transposed_grad=False)
    plain.load_state_dict(model.state_dict())
    call = torch.compile(model, backend="aot_eager") if compiled else model
    strides = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: strides.append(grad.stride()))
    with fm.disabled(*(() if fused else ("*",))):
        for batch in batches:
            backward(call, batch)
            backward(plain, batch)
    assert sorted(strides) == sorted([p.stride() for p in model.parameters()] * len(batches))
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad.any()
        assert (parameter.grad - other.grad).float().norm() < 0.01 * other.grad.float().norm()


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_kernels_add_to_transposed_gradients(compiled):
    model, batches = Transposed(), micro_batches(3)

    def gradients(batch):
        x, named = batch
        return torch.autograd.grad(model(x, **named).float().square().sum(), list(model.parameters()))

    expected = [g.clone() for g in gradients(batches[0])]
    for batch in batches[1:]:
        expected = [total + g for total, g in zip(expected, gradients(batch), strict=True)]
    call = torch.compile(model) if compiled else model  # Inductor passes the parameter itself
    stand_ins.calls.clear()
    for batch in batches:
        backward(call, batch)
    assert added() == [False] * 2 + [True] * 4
    for parameter, total in zip(model.parameters(), expected, strict=True):
        assert parameter.grad.is_contiguous()
        assert torch.equal(parameter.grad, total)


@pytest.mark.parametrize("frozen", ["first", "second"])
def test_a_frozen_transposed_weight_in_a_graph(frozen):
    model, (batch,) = Transposed(), micro_batches(1)
    model.get_parameter(frozen).requires_grad_(False)
    (trained,) = [p for p in model.parameters() if p.requires_grad]
    x, named = batch
    (want,) = torch.autograd.grad(model(x, **named).float().square().sum(), [trained])
    backward(torch.compile(model, backend="aot_eager"), batch)
    assert want.any()
    assert torch.equal(trained.grad, want)


def test_an_own_parameter_of_a_layer_with_the_attribute():
    chain, batches = experts(), micro_batches(2)
    expected = want(chain, batches)
    for layer in (chain[0], chain[3]):
        layer.weight = torch.nn.Parameter(layer.weight.detach().mT.contiguous().mT)
        layer.transposed_grad = True
    for call in (chain, torch.compile(chain, backend="aot_eager")):
        chain.zero_grad()
        for batch in batches:
            backward(call, batch)
        for name, total in zip(WEIGHTS, expected, strict=True):
            grad = chain.get_parameter(name).grad
            assert grad.mT.is_contiguous()
            assert (grad - total).float().norm() < 0.01 * total.float().norm()


def test_a_transposed_weight_without_the_attribute():
    model, batches = Transposed(transposed_grad=False), micro_batches(2)
    for batch in batches:
        backward(model, batch)
    assert not any(added())


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


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_a_function_between_the_parameter_and_the_layer(backend):
    chain, batches = experts(), micro_batches(3)
    parameters = {
        f"{label}.weight": torch.nn.Parameter(chain.get_parameter(f"{label}.weight").detach()) for label in "03"
    }
    chain = chain.without_parameters()
    stand_ins.calls.clear()

    def loss(batch):
        x, named = batch
        weights = {name: Eighth.apply(p) for name, p in parameters.items()}
        return chain.forward_with(weights, x, **named).float().square().sum()

    call = loss if backend is None else torch.compile(loss, backend=backend)
    expected = {}
    for batch in batches:
        for name, grad in zip(WEIGHTS, torch.autograd.grad(loss(batch), [parameters[w] for w in WEIGHTS]), strict=True):
            expected[name] = expected[name] + grad if name in expected else grad.clone()
    for batch in batches:
        call(batch).backward()
    assert not any(added())
    for name in WEIGHTS:
        assert expected[name].any()
        assert torch.equal(parameters[name].grad, expected[name])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_equal_calls_in_one_graph(backend):
    """torch computes equal calls once, and adds both gradients."""
    chain, (first, second) = experts(), micro_batches(2)
    x, named = second
    backward(chain, first)
    expected = [chain.get_parameter(w).grad + 2 * g for w, g in zip(WEIGHTS, alone(chain, second), strict=True)]

    def loss():
        y = chain(x, **named).float().square().sum()
        return y + chain(x, **named).float().square().sum()

    torch.compile(loss, backend=backend)().backward()
    for name, total in zip(WEIGHTS, expected, strict=True):
        got = chain.get_parameter(name).grad
        assert (got - total).float().norm() < 0.01 * total.float().norm()


def test_one_op_with_two_weights():
    layer, other = fm.GroupedLinear(E, H, H, dtype=BF16), fm.GroupedLinear(E, H, H, dtype=BF16)
    chain = fm.Sequential(layer, fm.Sequential(layer)).without_parameters()
    weights = {"0.weight": torch.nn.Parameter(torch.randn(E, H, H, dtype=BF16) / 6), "1.0.weight": other.weight}
    named = {"splits": inputs()["splits"]}

    def loss():
        return chain.forward_with(weights, x, **named).float().square().sum()

    x = rows()
    expected = torch.autograd.grad(loss(), list(weights.values()))
    weights["0.weight"].grad = torch.zeros_like(other.weight)  # the other weight has no gradient yet
    loss().backward()
    for weight, grad in zip(weights.values(), expected, strict=True):
        assert grad.any()
        assert torch.equal(weight.grad, grad)


def test_a_weight_that_is_frozen_before_the_backward_pass():
    chain, (first, (x, named)) = experts(), micro_batches(2)
    expected = want(chain, [first])
    backward(chain, first)
    loss = chain(x, **named).float().square().sum()
    for name in WEIGHTS:
        chain.get_parameter(name).requires_grad_(False)
    loss.backward()
    check(chain, expected)


def test_hooks_on_a_transposed_weight():
    model, batches = Transposed(), micro_batches(2)
    backward(model, batches[0])
    x, named = batches[1]
    seen = []
    views = {"0.weight": model.first.mT, "3.weight": model.second.mT}
    views["0.weight"].register_hook(lambda grad: seen.append(grad.clone()))
    loss = model.chain.forward_with(views, x, **named).float().square().sum()
    views["3.weight"].retain_grad()  # after the call
    stand_ins.calls.clear()
    loss.backward()
    assert not any(added())
    assert seen[0].any()
    assert views["3.weight"].grad.any()


def test_a_hook_on_a_transposed_weight_that_nothing_holds():
    """The rows need no gradient, so that the call does not keep the weight."""
    model, batches = Transposed(), micro_batches(2)
    seen = []

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
    chain, batches = experts(), micro_batches(3)
    call = torch.compile(chain, backend="aot_eager")
    backward(call, batches[0])
    grads = [chain.get_parameter(w).grad for w in WEIGHTS]
    kept = {"object": grads, "view": [grad.view(-1) for grad in grads], "nothing": []}[held]
    del grads
    stand_ins.calls.clear()
    for batch in batches[1:]:
        backward(call, batch)
    assert added() == [held == "nothing"] * 4
    for name, other in zip(WEIGHTS, kept, strict=False):
        assert torch.equal(chain.get_parameter(name).grad.view_as(other), other)
        assert chain.get_parameter(name).grad.data_ptr() == other.data_ptr()


def test_another_transpose_than_mT():
    square = fm.GroupedLinear(8, 8, 8, dtype=BF16)
    chain = fm.Sequential(square).without_parameters()
    square.transposed_grad = True
    parameter = torch.nn.Parameter(torch.randn(8, 8, 8, dtype=BF16))
    x, splits = torch.randn(20, 8, dtype=BF16), torch.full((8,), 2)

    def loss():
        return chain.forward_with({"0.weight": parameter.transpose(0, 1)}, x, splits=splits).float().square().sum()

    (expected,) = torch.autograd.grad(loss(), [parameter])
    loss().backward()
    loss().backward()
    assert expected.any()
    assert torch.equal(parameter.grad, expected + expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_sees_the_gradient(monkeypatch):
    chain, (first, second) = experts(), micro_batches(2)
    backward(chain, first)
    original = stand_ins.grouped_wgrad
    monkeypatch.setattr(stand_ins, "grouped_wgrad", lambda *of, **named: original(*of, **named).fill_(torch.nan))
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="returned nan values"):
        backward(chain, second)


def test_an_error_after_an_addition_counts_a_change(monkeypatch):
    """The cache of quantized weights, and a graph that has saved the gradient, compare its version."""
    chain, (first, second) = experts(), micro_batches(2)
    backward(chain, first)
    grads = [chain.get_parameter(w).grad for w in WEIGHTS]
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
    changed = [not torch.equal(grad, old) for grad, (old, _) in zip(grads, before, strict=True)]
    assert changed == [False, True]
    assert grads[1]._version > before[1][1]


def test_a_layer_that_was_pickled_before_the_attribute():
    layer = fm.GroupedLinear(E, H, H, dtype=BF16)
    assert "transposed_grad" not in vars(layer)
    assert not layer.transposed_grad
    with pytest.raises(fm.InputError, match="transposed_grad: expected"):
        layer.transposed_grad = "yes"


# ---- quantized weights ----------------------------------------------------------------------------------------------


def test_weights_are_quantized_once(monkeypatch):
    """The cache of quantized weights compares the version of the gradient."""
    chain, batches = experts(), micro_batches(4)
    kept = []
    original = fm.ops.state.weight_cache.keep
    monkeypatch.setattr(
        "fusedmoe.ops.state.weight_cache.keep", lambda *of, **named: kept.append(of[0]) or original(*of, **named)
    )
    with fm.recipe("fp8_block:wgrad=bf16"), fm.disabled("sm90.fp8_*", "sm90.quantize*", "sm90.dequantized*"):
        expected = want(chain, batches)
        kept.clear()
        fm.clear_weight_cache(chain)
        for batch in batches:
            backward(chain, batch)
    assert added() == [False] * 2 + [True] * 6
    assert len(kept) == 2, len(kept)
    check(chain, expected)


# ---- DDP ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("views", [False, True], ids=["", "bucket views"])
def test_ddp(process_group, views):
    """Its reducer gets the sums, also where a kernel adds in the pass that reduces."""
    chain, batches = experts(), micro_batches(3)
    expected = want(chain, batches)
    wrapped = torch.nn.parallel.DistributedDataParallel(chain, gradient_as_bucket_view=views)
    with wrapped.no_sync():
        for batch in batches[:2]:
            backward(wrapped, batch)
    reduced = []

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
