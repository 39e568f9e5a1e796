"""Dense MLPs on Hopper: `Linear` layers with the grouped kernels of one group. How exact they are, and CUDA graphs."""

import copy

import pytest
import torch
from test_async import capture
from test_sm90_training import ACTIVATIONS, assert_as_exact_as_plain_pytorch, error, outcome

import fusedmoe as fm
from fusedmoe.kernels.sm90 import one_group

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not hopper, reason="needs an sm_90 GPU")

BF16 = torch.bfloat16
H, I = 192, 136  # noqa: E741  (hidden, intermediate)


def mlp(act="swiglu", *, bias=True, hidden=H, intermediate=I, dtype=BF16, **settings):
    activation = ACTIVATIONS[act]()
    wide = 1 if isinstance(activation, fm.SquaredReLU) else 2
    linear = {"bias": bias, "device": "cuda", "dtype": dtype, **settings}
    return fm.Sequential(
        fm.Linear(hidden, wide * intermediate, **linear), activation, fm.Linear(intermediate, hidden, **linear)
    )


def rows(*shape, dtype=BF16):
    return torch.randn(*shape, H, device="cuda", dtype=dtype)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_results_and_gradients(act, bias):
    torch.manual_seed(1)
    chain = mlp(act, bias=bias)
    assert_as_exact_as_plain_pytorch(chain, rows(1003), {}, rows(1003))
    (plan,) = chain.explain(rows(1003).requires_grad_()).plans
    assert not plan.unfused


@pytest.mark.parametrize("shape", [(1,), (7,), (129,), (3, 85), (2, 1, 64)], ids=str)
def test_shapes_of_rows(shape):
    torch.manual_seed(2)
    results = assert_as_exact_as_plain_pytorch(mlp(), rows(*shape), {}, rows(*shape))
    assert results["y"].shape == results["x"].shape == (*shape, H)


def test_large_widths():
    """Many tiles of columns, and a contraction of many stages, in the gradients of the weights too."""
    torch.manual_seed(3)
    chain = mlp(bias=False, hidden=H, intermediate=2888)
    assert_as_exact_as_plain_pytorch(chain, rows(4099), {}, rows(4099))


def test_fp16_and_a_transposed_weight():
    torch.manual_seed(4)
    chain = mlp(dtype=torch.float16)
    for i in (0, 2):
        chain[i].weight = torch.nn.Parameter(chain[i].weight.detach().T.contiguous().T)
    x, dy = (rows(130, dtype=torch.float16) for _ in range(2))
    assert_as_exact_as_plain_pytorch(chain, x, {}, dy)


def test_strides_of_rows_and_gradients():
    torch.manual_seed(5)
    chain = mlp()
    x = rows(33, 9).transpose(0, 1)
    dy = torch.randn(9, 1, H, device="cuda", dtype=BF16).expand(9, 33, H)
    assert_as_exact_as_plain_pytorch(chain, x, {}, dy)


@pytest.mark.parametrize("options", [{"sm_margin": 20}, {"schedule": "static"}], ids=str)
def test_options(options):
    torch.manual_seed(6)
    chain = mlp()
    for name, value in options.items():
        setattr(chain, name, value)
    assert_as_exact_as_plain_pytorch(chain, rows(515), {}, rows(515))


def test_main_grad():
    torch.manual_seed(7)
    chain = fm.Sequential(fm.Linear(H, I, accumulate_into_main_grad=True, device="cuda", dtype=BF16))
    weight = chain[0].weight
    weight.main_grad = torch.randn_like(weight, dtype=torch.float32)
    want = weight.main_grad.double()
    for count in (300, 1, 77):
        x, dy = rows(count), torch.randn(count, I, device="cuda", dtype=BF16)
        with fm.strict():
            chain(x.requires_grad_()).backward(dy)
        want += dy.double().T @ x.detach().double()
    assert weight.grad is None
    assert error(weight.main_grad, want) < 1e-5


def test_rows_of_no_expert_count_in_no_gradient():
    torch.manual_seed(8)
    splits, tail = (61, 0, 130, 7), 29
    chain = fm.Sequential(fm.GroupedLinear(4, H, H, device="cuda", dtype=BF16), *mlp())
    x, dy = rows(sum(splits) + tail), rows(sum(splits) + tail)
    x[sum(splits) :] = dy[sum(splits) :] = torch.nan
    results = assert_as_exact_as_plain_pytorch(chain, x, {"splits": torch.tensor(splits, device="cuda")}, dy)
    assert not results["x"][sum(splits) :].any()


def test_shared_expert():
    torch.manual_seed(9)
    layer = fm.MoE(H, I, 8, 2, shared_intermediate=264, shared_gate=True, device="cuda", dtype=BF16)
    x = rows(2, 150).requires_grad_()
    with fm.strict():
        layer(x).sum().backward()
    assert_as_exact_as_plain_pytorch(layer.shared, rows(300), {}, rows(300))
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


def test_no_host_synchronisation(no_sync):
    torch.manual_seed(10)
    chain, x, dy = mlp(), rows(300), rows(300)
    first = outcome(chain, x, {}, dy)  # the first call compiles
    with no_sync(), fm.strict():
        second = outcome(chain, x, {}, dy)
        outcome(chain, rows(301), {}, rows(301))  # a number of rows that was not seen before
    assert all(torch.equal(second[name], first[name]) for name in first)


@pytest.mark.parametrize("table", [True, False], ids=["", "the graph's own offsets"])
def test_cuda_graph(table, monkeypatch):
    """A graph, its replays, and calls of the same kind after it; also if the table of offsets does not exist before."""
    torch.manual_seed(11)
    chain, x, dy = mlp(), rows(300), rows(300)
    if not table:
        outcome(mlp(), rows(301), {}, rows(301))  # loads the kernels
        monkeypatch.setattr(one_group, "_tables", {})
        monkeypatch.setattr(one_group, "_TABLE_ROWS", 0)
    leaf, results = x.clone().requires_grad_(), {}

    def step():
        leaf.grad = None
        chain.zero_grad(set_to_none=True)
        y = chain(leaf)
        y.backward(dy)
        results.update({"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in chain.named_parameters()}})

    graph = capture(step)
    for _ in range(2):
        with torch.no_grad():
            leaf.copy_(rows(300))
        graph.replay()
        got = {name: t.detach().clone() for name, t in results.items()}
        expected = outcome(chain, leaf.detach(), {}, dy)
        for name, want in expected.items():
            assert want.any(), f"{name}: zeros would pass"
            assert torch.equal(got[name], want), name


@torch.no_grad()
def test_first_call_in_a_graph(monkeypatch):
    """A new kind of call is bound while a graph is captured; the same kind then runs outside of the graph."""
    torch.manual_seed(12)
    chain, x = mlp(), rows(299)
    chain(rows(300))  # loads the kernels
    monkeypatch.setattr(one_group, "_tables", {})
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = chain(x)
    outside = chain(x)  # before the graph has run
    with fm.disabled("sm90.*"):
        assert error(outside, chain(x).double()) < 0.02
    graph.replay()
    assert torch.equal(captured, outside)


def test_torch_compile():
    torch.manual_seed(13)
    chain, x, dy = mlp(), rows(2, 100), rows(2, 100)
    expected = outcome(chain, x, {}, dy)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    chain.zero_grad()
    with fm.strict():
        y = compiled(leaf)
        y.backward(dy)
    got = {"y": y.detach(), "x": leaf.grad, **{name: p.grad for name, p in chain.named_parameters()}}
    assert all(torch.equal(got[name], want) for name, want in expected.items())


@pytest.mark.parametrize("apart", [False, True], ids=["", "weights apart in memory"])
def test_mlp_of_transformers(apart):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    from fusedmoe.integrations.transformers import patch_dense

    torch.manual_seed(14)
    config = transformers.LlamaConfig(hidden_size=H, intermediate_size=I, mlp_bias=True)
    plain = LlamaMLP(config).to("cuda", BF16)
    exact, fused = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    assert patch_dense(fused) == 1
    if apart:
        fused.up_proj.weight = torch.nn.Parameter(fused.up_proj.weight.detach().clone())
    x, dy = rows(3, 85), rows(3, 85)
    want, theirs = outcome(exact, x.double(), {}, dy.double()), outcome(plain, x, {}, dy)
    with fm.strict():
        ours = outcome(fused, x, {}, dy)
    assert ours.keys() == want.keys()
    for name, t in want.items():
        assert t.any(), f"{name}: zeros would pass"
        assert error(ours[name], t) <= 1.5 * error(theirs[name], t) + 1e-6, name
