"""Nothing waits for the device: no host synchronisation, forward or backward; a training step is one CUDA graph."""

import pytest
import torch

import fusedmoe as fm

E, H, I, K = 16, 128, 64, 4  # noqa: E741


def experts(device):
    torch.manual_seed(0)
    return fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, bias=True, device=device, dtype=torch.bfloat16),
        fm.SwiGLU(),
        fm.Scale("probs"),
        fm.GroupedLinear(E, I, H, bias=True, device=device, dtype=torch.bfloat16),
    )


def random_splits(device, rows, seed):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.bincount(torch.randint(0, E, (rows,), device=device, generator=generator) ** 2 // E, minlength=E)


def test_sequential_never_synchronises(device, no_sync):
    seq = experts(device)
    x = torch.randn(512, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(512, device=device, requires_grad=True)
    splits = random_splits(device, 500, seed=1)
    seq(x, splits=splits, probs=probs).sum().backward()  # the first call may compile and allocate
    first, x.grad = x.grad, None
    with no_sync():
        y = seq(x, splits=splits, probs=probs)
        y.sum().backward()
        with torch.no_grad():
            again = seq(x, splits=splits, probs=probs)
    assert torch.equal(x.grad, first)
    assert torch.equal(again, y)


@pytest.mark.parametrize(
    "options",
    [
        {"score": "softmax"},
        {"score": "topk_softmax", "router_bias": True, "bias": True},
        {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "shared_intermediate": 64, "shared_gate": True},
    ],
    ids=lambda o: o["score"],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_moe_never_synchronises(device, no_sync, options, deterministic):
    layer = fm.MoE(H, I, E, K, device=device, dtype=torch.bfloat16, **options)
    x = torch.randn(4, 64, H, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step():
        y, stats = layer(x, return_stats=True)
        (y.float().square().mean() + 0.01 * stats.load_balancing_loss + 0.001 * stats.z_loss).backward()
        if layer.router.balance_bias is not None:
            layer.router.update_bias(stats.load)

    torch.use_deterministic_algorithms(deterministic)
    try:
        step()
        first, x.grad = x.grad, None
        with no_sync():
            step()
        assert first.any()
        if layer.router.balance_bias is None:  # its update may change the choice
            assert torch.equal(x.grad, first)
    finally:
        torch.use_deterministic_algorithms(False)


def test_repeated_runs_are_the_same_bit_for_bit(device):
    layer = fm.MoE(H, I, E, K, bias=True, device=device, dtype=torch.bfloat16)
    x = torch.randn(2000, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    runs = []
    for _ in range(5):
        layer.zero_grad()
        x.grad = None
        y, stats = layer(x, return_stats=True)
        (y.float().square().sum() + stats.load_balancing_loss).backward()
        runs.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_uninitialized_memory_is_never_read(device):
    """Deterministic mode fills what ``torch.empty`` returns with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        seq = experts(device)
        x = torch.randn(600, H, device=device, dtype=torch.bfloat16, requires_grad=True)
        probs = torch.rand(600, device=device, requires_grad=True)
        y = seq(x, splits=random_splits(device, 500, seed=2), probs=probs)
        y.sum().backward()
        for t in (y, x.grad, probs.grad, *(p.grad for p in seq.parameters())):
            assert torch.isfinite(t).all()
    finally:
        torch.use_deterministic_algorithms(False)


def capture(step, warm_ups=3):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_a_graph_of_forward_and_backward_follows_new_splits(device):
    seq, twin = experts(device), experts(device)
    rows = 700
    x = torch.randn(rows, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(rows, device=device, requires_grad=True)
    splits = random_splits(device, 600, seed=3)
    out = {}

    def step():
        for p in (x, probs, *seq.parameters()):
            p.grad = None
        y = seq(x, splits=splits, probs=probs)
        y.float().square().sum().backward()
        out["y"] = y.detach()  # a graph kept alive across steps would tie its gradients to the stream of the warm-up

    graph = capture(step)
    for seed, used in ((4, 700), (5, 1), (6, 350), (7, 0)):
        splits.copy_(random_splits(device, used, seed))
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        again = x.detach().clone().requires_grad_()
        again_probs = probs.detach().clone().requires_grad_()
        twin.zero_grad()
        y = twin(again, splits=splits, probs=again_probs)
        y.float().square().sum().backward()
        assert torch.equal(out["y"], y)
        assert torch.equal(x.grad, again.grad)
        assert torch.equal(probs.grad, again_probs.grad)
        for p, q in zip(seq.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        if used:
            assert y.any()


def test_a_whole_training_step_of_an_moe_in_one_graph(device):
    """Router, experts, losses, backward, bias update and optimizer; compared with the same steps run eagerly."""

    def make():
        torch.manual_seed(5)
        layer = fm.MoE(H, I, E, K, score="sigmoid", shared_intermediate=64, device=device, dtype=torch.bfloat16)
        return layer, torch.optim.AdamW(layer.parameters(), lr=1e-3, capturable=True)

    batches = torch.randn(2, 256, H, device=device, dtype=torch.bfloat16)
    x, target = batches[0].clone(), torch.randn(256, H, device=device, dtype=torch.bfloat16)

    def stepper(layer, optimizer, losses):
        def step():
            optimizer.zero_grad(set_to_none=True)
            y, stats = layer(x, return_stats=True)
            loss = (y - target).float().square().mean() + 0.01 * stats.load_balancing_loss + 1e-3 * stats.z_loss
            loss.backward()
            layer.router.update_bias(stats.load)
            optimizer.step()
            losses["loss"] = loss.detach()

        return step

    captured, eager = make(), make()
    losses, eager_losses = {}, {}
    graph = capture(stepper(*captured, losses), warm_ups=3)
    eager_step = stepper(*eager, eager_losses)
    for _ in range(3):
        eager_step()  # the warm-ups; a capture itself runs nothing
    first = None
    for i in range(20):
        x.copy_(batches[i % 2])
        graph.replay()
        eager_step()
        assert torch.equal(losses["loss"], eager_losses["loss"])
        first = losses["loss"].item() if first is None else first
    for p, q in zip(captured[0].parameters(), eager[0].parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(captured[0].router.balance_bias, eager[0].router.balance_bias)
    assert losses["loss"].item() < 0.95 * first
