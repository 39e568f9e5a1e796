"""Training through the public API on Hopper: how exact the kernels are, and that nothing waits for the GPU.

Axes: R rows sorted by expert, T tokens, E experts, K chosen experts per token, H hidden, I intermediate features.
"""

from typing import NamedTuple

import pytest
import torch
from kit.hopper import capture, needs_gpu
from kit.training import (
    BF16,
    assert_as_exact,
    assert_as_exact_as_plain_pytorch,
    assert_equal,
    error,
    outcome,
    plan_of,
    random_splits,
)

import fusedmoe as fm
from fusedmoe.builtin_rules.requirements import OnSm90
from fusedmoe.builtin_rules.sm100.grouped_mm import GroupedMm, GroupedMmDgrad
from fusedmoe.kernels.sm90 import one_group

pytestmark = needs_gpu

FP16, FP32 = torch.float16, torch.float32
E, K, H, I = 12, 3, 192, 136  # noqa: E741
T, TAIL = 700, 29
SPLITS = (130, 0, 61, 1, 0, 27, 128, 255, 0, 64, 5, 300)
ACTIVATIONS = {
    "swiglu": fm.SwiGLU,
    # a limit that random rows reach
    "gpt-oss": lambda: fm.SwiGLU(limit=1.0, alpha=1.702, offset=1.0, interleaved=True),
    "geglu": fm.GeGLU,
    "squared_relu": fm.SquaredReLU,
}


class Form(NamedTuple):
    """A layer: dense, of rows sorted by expert, or routed."""

    kind: str
    act: str = "swiglu"
    scale: bool = True  # rows by `probs`; of a routed layer, before the second product instead of after it
    bias: bool = False
    dtype: torch.dtype = BF16
    sentinels: bool = False

    def make(self, **settings):
        act = ACTIVATIONS[self.act]()
        wide = 1 if isinstance(act, fm.SquaredReLU) else 2
        linear = {"bias": self.bias, "device": "cuda", "dtype": self.dtype, **settings}
        if self.kind == "dense":
            return fm.Sequential(fm.Linear(H, wide * I, **linear), act, fm.Linear(I, H, **linear))
        ops = [
            fm.GroupedLinear(E, H, wide * I, **linear), act, *([fm.Scale("probs")] if self.scale else []),
            fm.GroupedLinear(E, I, H, **linear),
        ]  # fmt: skip
        if self.kind == "routed":
            ops = [fm.Dispatch(), *ops, fm.Combine(None if self.scale else "probs")]
        return fm.Sequential(*ops)

    def inputs(self, splits=SPLITS, tail=TAIL, tokens=T, chosen=K):
        """x, dy and the named inputs."""
        if self.kind == "experts":
            x, dy = rows(splits, tail, H, dtype=self.dtype), rows(splits, tail, H, dtype=self.dtype)
            probs = {"probs": rows(splits, tail, dtype=FP32).sigmoid()} if self.scale else {}
            return x, dy, {"splits": torch.tensor(splits, device="cuda"), **probs}
        x, dy = (torch.randn(tokens, H, device="cuda").to(self.dtype) for _ in range(2))
        if self.kind == "dense":
            return x, dy, {}
        index = torch.stack([torch.randperm(E, device="cuda")[:chosen] for _ in range(tokens)])
        index[index == 1] = 2  # an expert without rows; some tokens choose another twice
        if self.sentinels:
            index[::5, 0], index[1::7] = E, -1
        return x, dy, {"expert_index": index, "expert_weight": torch.rand(tokens, chosen, device="cuda")}


def rows(splits, tail, *width, dtype=BF16):
    """Random rows, then NaN."""
    x = torch.randn(sum(splits) + tail, *width, device="cuda").to(dtype)
    x[sum(splits) :] = torch.nan
    return x


FORMS = [
    *(Form("experts", act, scale, bias) for act in ACTIVATIONS for scale, bias in ((False, False), (True, True))),
    Form("experts", "swiglu", dtype=FP16),
    *(Form("dense", act, bias=bias) for act, bias in zip(ACTIVATIONS, (True, False, True, False), strict=True)),
    *(Form("routed", act, sentinels=act != "geglu") for act in ("swiglu", "geglu", "squared_relu")),
    Form("routed", "swiglu", scale=False, bias=True, sentinels=True),
    Form("routed", "swiglu", scale=True, bias=True, sentinels=True),
    Form("routed", "swiglu", dtype=FP16),
]
KINDS = [Form("experts", bias=True), Form("dense", bias=True), Form("routed")]
of_kinds = pytest.mark.parametrize("form", KINDS, ids=lambda form: form.kind)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- how exact


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form)))
def test_results_and_gradients(form):
    chain, (x, dy, named) = form.make(), form.inputs()
    results = assert_as_exact_as_plain_pytorch(chain, x, dy, **named)
    if form.kind == "experts":
        empty = torch.tensor([count == 0 for count in SPLITS], device="cuda")
        for name, value in results.items():
            assert not value[empty if name.endswith(("weight", "bias")) else slice(sum(SPLITS), None)].any(), name


def test_layers_with_one_product():
    chain = fm.Sequential(fm.Dispatch(), fm.GroupedLinear(E, H, H, device="cuda", dtype=FP16), fm.Combine())
    x, dy, named = Form("routed", dtype=FP16).inputs()
    assert_as_exact_as_plain_pytorch(chain, x, dy, **named)
    # rows of no expert count in no gradient of the dense layer after them
    chain = fm.Sequential(fm.GroupedLinear(E, H, H, device="cuda", dtype=BF16), *Form("dense", bias=True).make())
    x, dy, named = Form("experts", scale=False).inputs()
    results = assert_as_exact_as_plain_pytorch(chain, x, dy, **named)
    assert not results["x"][sum(SPLITS) :].any()


# ---- tensors in memory


def kinds_of_calls():
    """The same numbers in rows that lie otherwise in memory, another number of rows, another gradient's strides."""
    for tail in (0, TAIL):
        x, dy, named = Form("experts").inputs(tail=tail)
        pitched = x.new_empty(len(x), H + 8)[:, :H].copy_(x)
        unaligned = x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)
        by_columns = x.t().contiguous().t()
        yield from [(t, dy, named) for t in (x, pitched, unaligned, by_columns)]
        yield from [(x.clone(), dy[:1].expand_as(dy), named), (x.clone(), dy.t().contiguous().t(), named)]


def test_calls_of_different_kinds_in_turns():
    chain, kinds = Form("experts", bias=True).make(), [*kinds_of_calls()]
    with fm.disabled("sm90.*"):
        expected = [outcome(chain, x, dy, **named) for x, dy, named in kinds]
    for _ in range(3):
        for (x, dy, named), plain in zip(kinds, expected, strict=True):
            for name, got in outcome(chain, x, dy, **named).items():
                assert plain[name].any(), f"{name}: zeros would pass"
                assert error(got, plain[name].double()) < 0.02, name


@pytest.mark.parametrize("form", [Form("dense", bias=True), Form("routed")], ids=lambda form: form.kind)
def test_strides_that_the_kernels_cannot_read(form):
    """An expanded gradient and tokens with a pitch of no 16 bytes: copied, or made by plain PyTorch."""
    chain, (x, dy, named) = form.make(), form.inputs()
    expanded, pitched = dy[:1].expand_as(dy), x.new_empty(T, H + 4)[:, :H].copy_(x)
    with fm.disabled("sm90.*"):
        want = outcome(chain, x, expanded, **named)
    for rows_in in (x, pitched):
        got = outcome(chain, rows_in, expanded, **named)
        for name in ("y", "x"):
            assert want[name].any()
            assert error(got[name], want[name].double()) < 0.02


def test_tokens_without_an_expert_are_never_used():
    """They and their gradients are NaN, also in the tiles that hold the last expert's last rows."""
    form = Form("routed", sentinels=True)
    chain, (x, dy, named) = form.make(), form.inputs()
    x[1::7] = dy[1::7] = torch.nan
    results = outcome(chain, x, dy, **named)
    for name, t in results.items():
        assert t.isfinite().all(), name
        assert t.any(), name
    assert not results["y"][1::7].any()
    assert not results["x"][1::7].any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one():
    """As where a model's layers are spread over the GPUs of one process."""
    chain, (x, dy, named) = KINDS[0].make(), KINDS[0].inputs()
    expected = outcome(chain, x, dy, **named)
    for _ in range(2):
        there = (t.to("cuda:1") for t in (x, dy))
        with fm.strict():
            results = outcome(chain.to("cuda:1"), *there, **{k: t.to("cuda:1") for k, t in named.items()})
        assert torch.cuda.current_device() == 0
        assert all(t.device == torch.device("cuda:1") for t in results.values())
        assert_equal({name: t.to("cuda:0") for name, t in results.items()}, expected)


def test_memory_of_a_routed_step():
    """Neither copy of the rows exists: not that of the tokens, kept for backward, nor that of the gradient."""

    def peak():
        outcome(chain, x, dy, **named)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outcome(chain, x, dy, **named)
        return torch.cuda.max_memory_allocated() - before

    chain, tokens = Form("routed").make(), 20_000
    x, dy = (torch.randn(tokens, H, device="cuda", dtype=BF16) for _ in range(2))
    index = torch.randint(0, E, (tokens, K), device="cuda")
    named = {"expert_index": index, "expert_weight": torch.rand(tokens, K, device="cuda")}
    with fm.disabled("sm90.gathered_*"):
        copied = peak()
    assert copied - peak() > 1.5 * 2 * tokens * K * H


# ---- gradients that are added to main_grad


@pytest.mark.parametrize("form", [Form("experts"), Form("routed")], ids=lambda form: form.kind)
def test_both_products_add_to_main_grad(form):
    chain, batches = form.make(accumulate_into_main_grad=True), [form.inputs() for _ in range(3)]
    twin = form.make().double()
    twin.load_state_dict(chain.state_dict())
    weights = {name: p for name, p in chain.named_parameters() if name.endswith("weight")}
    grads = {}
    for way, settings in {"plain": fm.disabled("sm90.*"), "fused": fm.strict()}.items():
        for weight in weights.values():
            weight.main_grad = torch.zeros_like(weight, dtype=FP32)
        with settings:
            for x, dy, named in batches:
                chain(x, **named).backward(dy)
        grads[way] = {name: weight.main_grad for name, weight in weights.items()}
    with fm.disabled("*"):
        for x, dy, named in batches:
            named = {name: t.double() if t.is_floating_point() else t for name, t in named.items()}
            twin(x.double(), **named).backward(dy.double())
    exact = {name: p.grad for name, p in twin.named_parameters()}
    assert_as_exact(grads["fused"], grads["plain"], exact, most=0.02)


# ---- nothing waits, graphs, compiled code


@pytest.mark.parametrize(
    "form", [*KINDS, *(Form("experts", act, bias=True) for act in ("gpt-oss", "geglu", "squared_relu"))], ids=str
)
def test_no_host_synchronisation(form, no_sync):
    chain, (x, dy, named) = form.make(), form.inputs()
    first = outcome(chain, x, dy, **named)  # the first call compiles
    x_2, dy_2, named_2 = form.inputs(tokens=T + 1) if form.kind == "dense" else form.inputs()
    with no_sync(), fm.strict():
        second = outcome(chain, x, dy, **named)
        outcome(chain, x_2, dy_2, **named_2)  # of dense rows: a number of them that was not seen before
    assert_equal(second, first)


class Training:
    """A chain, its optimizer, and the tensors that a graph reads its batch from."""

    def __init__(self, form, optimizer):
        torch.manual_seed(7)
        self.chain, self.form = form.make(), form
        self.optimizer = optimizer(self.chain.parameters())
        self.x, self.target, self.named = form.inputs()
        for t in (self.x, self.target, *self.named.values()):
            t.nan_to_num_()
        self.loss = None

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        loss = (self.chain(self.x, **self.named) - self.target).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def next_batch(self, seed):
        torch.manual_seed(seed)
        if self.form.kind == "experts":
            used = (len(self.x), len(self.x) - 100, 1, 0)[seed % 4]
            self.named["splits"].copy_(random_splits(E, used, seed))
        elif self.form.kind == "routed":
            for name, t in self.form.inputs()[2].items():
                self.named[name].copy_(t)
        self.x.normal_()


@pytest.mark.parametrize(
    ("form", "optimizer"),
    [
        (KINDS[0], lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9)),
        (Form("experts", "gpt-oss", bias=True), lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True)),
        (KINDS[1], lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True)),
        (KINDS[2], lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True)),
    ],
    ids=["experts", "gpt-oss", "dense", "routed"],
)
def test_a_graph_of_a_training_step_follows_new_batches(form, optimizer):
    captured, eager = Training(form, optimizer), Training(form, optimizer)
    with fm.strict():
        graph = capture(captured.step, warm_ups=3)
        for _ in range(3):
            eager.step()  # the warm-ups; a capture itself runs nothing
        before = [p.clone() for p in captured.chain.parameters()]
        for seed in range(12):
            captured.next_batch(seed)
            eager.next_batch(seed)
            graph.replay()
            eager.step()
            assert torch.equal(captured.loss, eager.loss), seed
    for old, p, q in zip(before, captured.chain.parameters(), eager.chain.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, old)
        assert p.isfinite().all()


def test_a_dense_graph_with_offsets_of_its_own(monkeypatch):
    """The table of offsets does not exist before; calls of the same kind follow the graph."""
    chain, (x, dy, _) = KINDS[1].make(), KINDS[1].inputs()
    outcome(chain, x, dy)  # loads the kernels
    monkeypatch.setattr(one_group, "_tables", {})
    monkeypatch.setattr(one_group, "_TABLE_ROWS", 0)
    found = []
    graph = capture(lambda: found.append(outcome(chain, x, dy)))
    x.copy_(torch.randn_like(x))
    graph.replay()
    got = {name: t.clone() for name, t in found[-1].items()}
    assert_equal(got, outcome(chain, x, dy))


@torch.no_grad()
def test_a_first_call_in_a_graph(monkeypatch):
    """A new kind of call is bound while a graph is captured; the same kind then runs outside of the graph."""
    chain, (x, _, _) = KINDS[1].make(), KINDS[1].inputs(tokens=299)
    chain(x[:298])  # loads the kernels
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


@of_kinds
def test_compiled(form):
    torch._dynamo.reset()
    chain, (x, dy, named) = form.make(), form.inputs()
    expected = outcome(chain, x, dy, **named)
    compiled = torch.compile(chain, fullgraph=True, **({} if form.kind == "routed" else {"backend": "aot_eager"}))
    with fm.strict():
        assert_equal(outcome(chain, x, dy, compiled, **named), expected)


# ---- the rules for Blackwell's products run on Hopper too


@pytest.mark.parametrize(("bias", "tail"), [(False, 0), (True, 1), (True, 700)])
def test_products_of_torch(bias, tail):
    class Product(OnSm90, GroupedMm, name="tests.grouped_mm", direction="forward"):
        pass

    class Gradient(OnSm90, GroupedMmDgrad, name="tests.grouped_mm_dgrad", direction="backward"):
        pass

    form = Form("experts", bias=bias)
    chain, (x, dy, named) = form.make(), form.inputs(tail=tail)
    with fm.disabled("*"):
        want = outcome(chain, x, dy, **named)
    with fm.register(Product), fm.register(Gradient), fm.disabled("sm90.grouped_*"):
        got = outcome(chain, x, dy, **named)
        found = [step.rule for step in plan_of(chain, x, **named).steps]
    assert found.count("tests.grouped_mm") == found.count("tests.grouped_mm_dgrad") == 2
    for name, t in want.items():
        assert t.any(), name
        assert error(got[name], t.double()) <= 0.015, name
    assert not any(got[name][sum(SPLITS) :].any() for name in ("y", "x", "probs"))
