"""Weight gradients that kernels add to ``weight.grad``: the bits of the sums of autograd. And those of weights that are
cast by autocast, in fp32: rounded, they are the gradients of weights in bf16.
"""

import pytest
import torch
from kit.first_calls import forget_kept_tensors
from kit.hopper import DEVICE, capture, needs_hopper

import fusedmoe as fm
from fusedmoe.ops.state import grad_sums

pytestmark = needs_hopper

BF16 = torch.bfloat16
E, H, I, K, TOKENS = 16, 512, 384, 4, 1500  # noqa: E741  (experts, hidden, intermediate, chosen experts)


@pytest.fixture(autouse=True)
def compiles_anew():
    """After a number of graphs of the same code, torch would run it uncompiled."""
    torch._dynamo.reset()


@pytest.fixture
def taken(monkeypatch):
    """Whether each weight gradient so far is added by a kernel."""
    seen = []

    def take(op, dtype, original=grad_sums.take):
        found = original(op, dtype)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(grad_sums, "take", take)
    return seen


class Transposed(torch.nn.Module):
    """Experts with weights (E, in, out), which are passed as ``.mT``."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(E, H, 2 * I, dtype=BF16) / H**0.5)
        self.second = torch.nn.Parameter(torch.randn(E, I, H, dtype=BF16) / I**0.5)
        self.router = torch.nn.Parameter(torch.randn(E, H, dtype=BF16) / H**0.5)
        first, second = (fm.GroupedLinear(E, *sizes, device="meta", dtype=BF16) for sizes in ((H, 2 * I), (I, H)))
        first.transposed_grad = second.transposed_grad = True
        self.chain = fm.Sequential(fm.Dispatch(E), first, fm.SwiGLU(), second, fm.Combine("probs")).without_parameters()

    def forward(self, x):
        weight, index = (x @ self.router.T).float().softmax(-1).topk(K)
        weights = {"1.weight": self.first.mT, "3.weight": self.second.mT}
        return self.chain.forward_with(weights, x, expert_index=index, expert_weight=weight)


LAYERS = {"rows by expert": lambda: fm.MoE(H, I, E, K, dtype=BF16), "transposed": Transposed}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_tensor", "mxfp8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_weights_that_autocast_has_cast(kind, recipe):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layer = LAYERS[kind]()
        x = torch.randn(TOKENS, H, dtype=BF16, requires_grad=True)
    weights = [p for p in layer.parameters() if p.dim() == 3]
    with fm.recipe(recipe):
        want = torch.autograd.grad(layer(x).float().square().mean(), weights)
        for weight in weights:
            weight.data = weight.data.float()
        with torch.autocast(DEVICE.type, BF16):
            loss = layer(x).float().square().mean()
        loss.backward()
    for weight, expected in zip(weights, want, strict=True):
        grad = weight.grad
        assert grad.dtype is torch.float32
        assert expected.any()
        assert torch.equal(grad.to(BF16), expected)
        assert torch.equal(grad, expected.float()) is (recipe == "mxfp8")  # no kernel writes its gradients in fp32


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_tensor", "mxfp8"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("kind", LAYERS)
def test_micro_batches(kind, compiled, recipe, taken):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layer = LAYERS[kind]()
        batches = [torch.randn(TOKENS, H, dtype=BF16, requires_grad=True) for _ in range(4)]
    call = torch.compile(layer) if compiled else layer
    weights = [p for p in layer.parameters() if p.dim() == 3]

    def loss(x):
        return call(x).float().square().mean()

    with fm.recipe(recipe):
        alone = [torch.autograd.grad(loss(x), weights) for x in batches]
        want = [first.clone() for first in alone[0]]
        for gradients in alone[1:]:
            want = [total + g for total, g in zip(want, gradients, strict=True)]
        assert not any(taken)
        taken.clear()
        for x in batches:
            loss(x).backward()
    adds = recipe != "mxfp8"
    if recipe == "fp8_tensor" and kind == "transposed":
        adds = False  # the gradient in E5M2 is the first operand of its kernel
    if recipe == "bf16" or not compiled:  # a graph may not keep a weight that it quantizes
        assert taken.count(True) == (2 * (len(batches) - 1) if adds else 0)
    for weight, total in zip(weights, want, strict=True):
        assert total.any()
        assert weight.grad.is_contiguous()
        assert torch.equal(weight.grad, total)


def test_cuda_graphs(taken):
    """In a graph, the kernels of all micro-batches but the first add."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layer = fm.MoE(H, I, E, K, dtype=BF16)
        batches = [torch.randn(TOKENS, H, dtype=BF16) for _ in range(3)]

    def step():
        for x in batches:
            layer(x).float().square().mean().backward()

    step()
    want = [p.grad.clone() for p in layer.parameters()]

    def fresh():
        layer.zero_grad()
        step()

    taken.clear()
    graph = capture(fresh, warm_ups=1)
    # the warm-up runs on a stream of its own
    assert taken == [False] * 6 + [False] * 2 + [True] * 4
    for _ in range(3):
        for p in layer.parameters():
            p.grad.fill_(torch.nan)
        graph.replay()
    assert all(map(torch.equal, (p.grad for p in layer.parameters()), want))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # that with which torch begins
@pytest.mark.parametrize(
    ("mode", "recipe"),
    [("reduce-overhead", "bf16"), ("reduce-overhead", "fp8_block"), ("max-autotune-no-cudagraphs", "bf16")],
)
def test_other_modes_of_torch_compile(mode, recipe, monkeypatch):
    """A graph that torch captures leaves the addition to autograd, also in its first calls, which are not captured.

    These are the first calls of the process: tensors that calls keep are not in the memory of the graph.
    """
    forget_kept_tensors(monkeypatch)
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layer = fm.MoE(H, I, E, K, dtype=BF16)
        batches = [torch.randn(TOKENS, H, dtype=BF16, requires_grad=True) for _ in range(4)]
    parameters = list(layer.parameters())
    call = torch.compile(layer, mode=mode)
    with fm.recipe(recipe):
        for parameter in parameters:  # a first gradient would be in memory that the next replay overwrites
            parameter.grad = torch.full_like(parameter, 0.1)
        for x in batches:
            torch.compiler.cudagraph_mark_step_begin()
            call(x).float().square().sum().backward()
        want = [torch.full_like(p, 0.1) for p in parameters]
        for x in batches:
            alone = torch.autograd.grad(layer(x).float().square().sum(), parameters)
            want = [total + g for total, g in zip(want, alone, strict=True)]
    for parameter, total in zip(parameters, want, strict=True):
        assert (parameter.grad - total).norm() < 0.01 * total.norm()  # a sum in bf16 has an error of 2**-9
        assert (total - 0.1).norm() > total.norm() / 2
    counters = torch._dynamo.utils.counters["inductor"]
    assert (counters["cudagraph_recorded_non_static_inputs"] > 0) == (mode == "reduce-overhead")
    assert not counters["cudagraph_skips"]
