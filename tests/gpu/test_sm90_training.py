"""Training through the public API on Hopper: which kernels run, how exact they are, and that nothing waits for the GPU.

How exact: a fused result is at most half again as far from fp64 as what plain PyTorch makes of the same inputs.

Axes: R rows sorted by expert, E experts, K chosen experts per token, H hidden, I intermediate features.
"""

import copy
from dataclasses import replace

import pytest
import torch
from test_async import capture

import fusedmoe as fm
from benchmarks import shapes

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not hopper, reason="needs an sm_90 GPU")

BF16 = torch.bfloat16
E, K, H, I = 12, 3, 192, 136  # noqa: E741
SPLITS = (130, 0, 61, 1, 0, 27, 128, 255, 0, 64, 5, 300)
TAIL = 29

ACTIVATIONS = {
    "swiglu": fm.SwiGLU,
    "gpt-oss": lambda: fm.SwiGLU(
        limit=1.0, alpha=1.702, offset=1.0, interleaved=True
    ),  # a limit that random rows reach
    "geglu": fm.GeGLU,
    "squared_relu": fm.SquaredReLU,
}


def experts(act="swiglu", *, scale=True, bias=False, shape=(E, H, I), device="cuda", dtype=BF16, **settings):
    activation = ACTIVATIONS[act]()
    count, hidden, intermediate = shape
    wide = 1 if isinstance(activation, fm.SquaredReLU) else 2
    linear = {"bias": bias, "device": device, "dtype": dtype, **settings}
    return fm.Sequential(
        fm.GroupedLinear(count, hidden, wide * intermediate, **linear),
        activation,
        *([fm.Scale("probs")] if scale else []),
        fm.GroupedLinear(count, intermediate, hidden, **linear),
    )


def rows(splits, tail, *width, dtype=BF16):
    """Random rows, then NaN."""
    x = torch.randn(sum(splits) + tail, *width, device="cuda").to(dtype)
    x[sum(splits) :] = torch.nan
    return x


def inputs(splits=SPLITS, tail=TAIL, hidden=H, *, scale=True):
    """Inputs of a chain, and the gradient of its output."""
    named = {"splits": torch.tensor(splits, device="cuda")}
    if scale:
        named["probs"] = rows(splits, tail, dtype=torch.float32).sigmoid()
    return rows(splits, tail, hidden), named, rows(splits, tail, hidden)


def outcome(chain, x, named, dy):
    """The output of a call and every gradient, by name."""
    leaves = {"x": x, **{name: t for name, t in named.items() if t.is_floating_point()}}
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    chain.zero_grad()
    y = chain(leaves["x"], **{**named, **{name: t for name, t in leaves.items() if name != "x"}})
    y.backward(dy)
    leaves |= dict(chain.named_parameters())
    return {"y": y.detach(), **{name: t.grad for name, t in leaves.items() if t.grad is not None}}


def outcome_of_fp64(chain, x, named, dy):
    """The same of the same values in plain PyTorch and fp64."""
    named = {name: t.double() if t.is_floating_point() else t for name, t in named.items()}
    with fm.disabled("*"):
        return outcome(copy.deepcopy(chain).double(), x.double(), named, dy.double())


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def assert_as_exact_as_plain_pytorch(chain, x, named, dy):
    """Run a chain fused, without a miss, and unfused; compare both with fp64. The fused results."""
    exact = outcome_of_fp64(chain, x, named, dy)
    with fm.disabled("sm90.*"):
        plain = outcome(chain, x, named, dy)
    with fm.strict():
        fused = outcome(chain, x, named, dy)
    assert fused.keys() == plain.keys() == exact.keys()
    for name, want in exact.items():
        assert fused[name].dtype is plain[name].dtype, name
        assert want.any(), f"{name}: zeros would pass"
        ours, theirs = error(fused[name], want), error(plain[name], want)
        # a preactivation's rounding across the limit switches its gradient on or off, in both
        assert theirs < 0.1, f"{name}: relative error of plain PyTorch {theirs}"
        assert ours <= 1.5 * theirs + 1e-6, f"{name}: relative error {ours}, that of plain PyTorch {theirs}"
    return fused


def assert_tail_and_empty_experts_are_zero(results, splits):
    empty = torch.tensor([count == 0 for count in splits], device="cuda")
    for name, value in results.items():
        if name.endswith(("weight", "bias")):
            assert not value[empty].any(), name
        else:
            assert not value[sum(splits) :].any(), name


# ---------------------------------------------------------------------------------------------------------- which run


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_plan_is_made_of_hopper_kernels_in_both_directions(act, scale, bias):
    x, named, _ = inputs(scale=scale)
    named = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in named.items()}
    (plan,) = experts(act, scale=scale, bias=bias).explain(x.requires_grad_(), **named).plans
    assert not plan.unfused
    sums = ["sm90.column_sums"] if bias else []
    assert [step.rule for step in plan.steps] == [
        "sm90.grouped_gemm_activation", "sm90.grouped_gemm",
        *sums, "sm90.grouped_wgrad", "sm90.grouped_dgrad_activation", *sums, "sm90.grouped_wgrad", "sm90.grouped_dgrad",
    ]  # fmt: skip
    assert not any(step.host_sync for step in plan.steps)
    assert str(plan).count("sm90.") == len(plan.steps) + len(plan.glue)


def test_plan_of_a_moe_is_all_fused():
    layer = fm.MoE(H, I, E, K, bias=True, device="cuda", dtype=BF16)
    (plan,) = layer.explain(torch.randn(100, H, device="cuda", dtype=BF16, requires_grad=True)).plans
    assert {step.rule for step in plan.fused} == {
        "sm90.gathered_gemm_activation", "sm90.grouped_gemm", "sm90.column_sums", "sm90.grouped_wgrad",
        "sm90.gathered_wgrad_x", "sm90.grouped_dgrad_activation", "sm90.grouped_dgrad", "sm90.router_dispatch",
        "sm90.combine", "sm90.dcombine", "sm90.combine_weight_grad", "sm90.router_backward",
    }  # fmt: skip
    assert not plan.unfused
    assert not any(step.host_sync for step in plan.steps)


# ---------------------------------------------------------------------------------------------------------- how exact


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("scale", [False, True], ids=["", "scale"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_results_and_gradients(act, scale, bias):
    torch.manual_seed(1)
    x, named, dy = inputs(scale=scale)
    results = assert_as_exact_as_plain_pytorch(experts(act, scale=scale, bias=bias), x, named, dy)
    assert len(results) == 4 + scale + 2 * bias
    assert_tail_and_empty_experts_are_zero(results, SPLITS)


def once(chain, x, named, dy):
    """The output and every gradient, of these very tensors."""
    chain.zero_grad()
    x = x.requires_grad_()
    y = chain(x, **named)
    parameters = dict(chain.named_parameters())
    return {
        "y": y.detach(),
        **dict(zip(["x", *parameters], torch.autograd.grad(y, [x, *parameters.values()], dy), strict=True)),
    }


def kinds_of_calls():
    """The same numbers in rows that lie otherwise in memory, another number of rows, another gradient's strides."""
    for tail in (0, TAIL):
        x, named, dy = inputs(tail=tail)
        pitched = x.new_empty(len(x), H + 8)[:, :H].copy_(x)
        unaligned = x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)
        by_columns = x.t().contiguous().t()
        yield from [(x, named, dy), (pitched, named, dy), (unaligned, named, dy), (by_columns, named, dy)]
        yield from [(x.clone(), named, dy[:1].expand_as(dy)), (x.clone(), named, dy.t().contiguous().t())]


def test_calls_of_different_kinds_in_turns():
    torch.manual_seed(4)
    chain, kinds = experts(bias=True), list(kinds_of_calls())
    with fm.disabled("sm90.*"):
        expected = [once(chain, *kind) for kind in kinds]
    for _ in range(3):
        for kind, plain in zip(kinds, expected, strict=True):
            for name, got in once(chain, *kind).items():
                assert plain[name].any(), f"{name}: zeros would pass"
                assert error(got, plain[name].double()) < 0.02, name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one():
    """As where a model's layers are spread over the GPUs of one process."""
    torch.manual_seed(5)
    chain, (x, named, dy) = experts(bias=True), inputs()
    expected = once(chain, x, named, dy)
    for _ in range(2):
        there = (
            chain.to("cuda:1"),
            x.detach().to("cuda:1"),
            {k: t.to("cuda:1") for k, t in named.items()},
            dy.to("cuda:1"),
        )
        with fm.strict():
            results = once(*there)
        assert torch.cuda.current_device() == 0
        for name, got in results.items():
            assert got.device == torch.device("cuda:1")
            assert expected[name].any(), f"{name}: zeros would pass"
            assert torch.equal(got.to("cuda:0"), expected[name]), name


@pytest.mark.parametrize("options", [{"sm_margin": 20}, {"schedule": "static"}], ids=str)
def test_options(options):
    torch.manual_seed(2)
    chain = experts(bias=True)
    x, named, dy = inputs()
    for name, value in options.items():
        setattr(chain, name, value)
    assert_as_exact_as_plain_pytorch(chain, x, named, dy)


def scaled_down(shape):
    """A real model's experts with an eighth of the features and of the experts, 4 at least."""
    eighth = lambda width: -(-width // 64) * 8  # noqa: E731
    experts = max(shape.experts // 8, 4)
    return replace(
        shape, tokens=shape.tokens // 32, hidden=eighth(shape.hidden), intermediate=eighth(shape.intermediate),
        experts=experts, top_k=min(shape.top_k, experts),
    )  # fmt: skip


@pytest.mark.parametrize("name", shapes.load())
def test_experts_of_real_models_scaled_down(name):
    """From tokens to tokens, with the same routing for all; a half of the experts gets most of the rows."""
    torch.manual_seed(3)
    shape = scaled_down(shapes.load()[name])
    gpt_oss = shape.activation == "clamped_swiglu"
    layer = fm.MoE(
        shape.hidden, shape.intermediate, shape.experts, shape.top_k,
        activation=ACTIVATIONS["gpt-oss" if gpt_oss else "swiglu"](), bias=gpt_oss, router_bias=gpt_oss,
        score="topk_softmax" if gpt_oss else "softmax", device="cuda", dtype=BF16,
    )  # fmt: skip
    x, dy = (torch.randn(shape.tokens, shape.hidden, device="cuda", dtype=BF16) for _ in range(2))
    with torch.no_grad():
        layer.router.weight[: shape.experts // 2] *= 3
        routing = layer.router(x)
    named = {"expert_index": routing.expert_index, "expert_weight": routing.expert_weight}
    assert_as_exact_as_plain_pytorch(layer.experts, x, named, dy)


def test_gradients_are_added_to_main_grad_in_fp32():
    """Several micro-batches, other splits in each; the operands of one layer's gradient are exact."""
    torch.manual_seed(4)
    chain = fm.Sequential(
        fm.GroupedLinear(E, H, I, bias=True, accumulate_into_main_grad=True, device="cuda", dtype=BF16)
    )
    weight = chain[0].weight
    weight.main_grad = torch.randn_like(weight, dtype=torch.float32)
    want = weight.main_grad.double()
    untouched = weight.main_grad[1].clone()
    for turn in (0, 3, 7):
        splits = (*SPLITS[turn:], *SPLITS[:turn])
        splits = (splits[0] + splits[1], 0, *splits[2:])
        x, dy = rows(splits, TAIL, H), rows(splits, TAIL, I)
        with fm.strict():
            chain(x.requires_grad_(), splits=torch.tensor(splits, device="cuda")).backward(dy)
        used = sum(splits)
        parts = zip(dy[:used].double().split(splits), x.detach()[:used].double().split(splits), strict=True)
        want += torch.stack([a.T @ b for a, b in parts])
    assert weight.grad is None
    assert error(weight.main_grad, want) < 1e-5
    assert torch.equal(weight.main_grad[1], untouched), "an expert without rows"


def test_main_grad_of_both_layers():
    torch.manual_seed(5)
    chain = experts(accumulate_into_main_grad=True)
    batches = [inputs() for _ in range(3)]
    twin = experts().double()
    twin.load_state_dict(chain.state_dict())
    weights = chain[0].weight, chain[3].weight
    grads = {}
    for way, settings in {"plain": fm.disabled("sm90.*"), "fused": fm.strict()}.items():
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        with settings:
            for x, named, dy in batches:
                chain(x, **named).backward(dy)
        grads[way] = [weight.main_grad for weight in weights]
    with fm.disabled("*"):
        for x, named, dy in batches:
            twin(x.double(), splits=named["splits"], probs=named["probs"].double()).backward(dy.double())
    for plain, fused, exact in zip(grads["plain"], grads["fused"], (twin[0].weight, twin[3].weight), strict=True):
        assert error(fused, exact.grad) < 0.02
        assert error(fused, exact.grad) <= 1.5 * error(plain, exact.grad)


# ------------------------------------------------------------------------------------------------ nothing waits


@pytest.mark.parametrize(
    ("act", "schedule"), [*((act, "dynamic") for act in ACTIVATIONS), ("swiglu", "static")], ids=str
)
def test_no_host_synchronisation(act, schedule, no_sync):
    torch.manual_seed(6)
    chain = experts(act, bias=True)
    chain.schedule = schedule
    x, named, dy = inputs()
    first = outcome(chain, x, named, dy)  # the first call compiles
    with no_sync(), fm.strict():
        second = outcome(chain, x, named, dy)
    assert all(torch.equal(second[name], first[name]) for name in first)


def test_no_host_synchronisation_of_a_moe(no_sync):
    layer = fm.MoE(H, I, E, K, bias=True, score="sigmoid", device="cuda", dtype=BF16)
    x = torch.randn(300, H, device="cuda", dtype=BF16, requires_grad=True)

    def step():
        y, stats = layer(x, return_stats=True)
        (y.float().square().mean() + 0.01 * stats.load_balancing_loss).backward()

    step()
    with no_sync(), fm.strict():
        step()
    assert x.grad.any()


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, capturable=True),
}


class Training:
    """A chain, its optimizer, and the tensors that a graph reads its batch from."""

    def __init__(self, act, optimizer):
        torch.manual_seed(7)
        self.chain = experts(act, bias=True)
        self.optimizer = OPTIMIZERS[optimizer](self.chain.parameters())
        self.x, named, self.target = inputs()
        self.splits, self.probs = named["splits"], named["probs"]
        for poisoned in (self.x, self.probs, self.target):
            poisoned.nan_to_num_()
        self.loss = None

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        y = self.chain(self.x, splits=self.splits, probs=self.probs)
        loss = (y - self.target).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def next_batch(self, seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        used = (len(self.x), len(self.x) - 100, 1, 0)[seed % 4]
        chosen = torch.randint(E, (used,), device="cuda", generator=generator) ** 2 // E  # the first ones more often
        self.splits.copy_(torch.bincount(chosen, minlength=E))
        self.x.normal_(generator=generator)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("act", ["swiglu", "gpt-oss"])
def test_a_graph_of_a_training_step_follows_new_splits(act, optimizer):
    captured, eager = Training(act, optimizer), Training(act, optimizer)
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
