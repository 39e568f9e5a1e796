"""Slots without a row on a GPU: no call waits for the device, and the error comes a fixed number of calls later."""

import pytest
import torch
from kit.hopper import needs_gpu

import fusedmoe as fm
from fusedmoe.expert_parallel.capacity import LAG

# one rank: its capacity is a part of its own slots
pytestmark = [needs_gpu, pytest.mark.usefixtures("one_rank")]

TOKENS, EXPERTS, CHOSEN, HIDDEN = 512, 8, 2, 64


def layer_and_inputs(device, engine="allgather", **settings):
    ep = fm.ExpertParallel(engine=engine, max_tokens=TOKENS, **settings)
    chain = fm.Sequential(fm.Dispatch(EXPERTS, expert_parallel=ep), fm.Combine(None, expert_parallel=ep))
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    index = torch.arange(TOKENS * CHOSEN, device=device).view(TOKENS, CHOSEN) % EXPERTS
    weight = torch.ones(TOKENS, CHOSEN, device=device)
    return ep, lambda: chain(x, expert_index=index, expert_weight=weight), x


@torch.no_grad()
def test_the_error_comes_a_fixed_number_of_calls_later(device, no_sync):
    ep, run, _ = layer_and_inputs(device, capacity=0.5)
    run()
    with no_sync():
        for _ in range(LAG - 1):
            run()
    message = rf"at most {TOKENS} rows on each rank with capacity=0.5, got {TOKENS * CHOSEN} rows .* rank 0:"
    with pytest.raises(fm.InputError, match=message):
        run()
    assert ep.dropped() == (LAG + 1) * TOKENS
    run()
    with pytest.raises(fm.InputError, match=message):
        ep.check()
    ep.check()


@torch.no_grad()
def test_dropped_slots_are_counted_in_a_graph_too(device):
    ep, run, x = layer_and_inputs(device, capacity=0.5, overflow="drop")
    for _ in range(3):
        y = run()
    assert ep.dropped() == 3 * TOKENS
    # the experts 0 to 3 have rows: both slots of every other pair of tokens
    kept = (torch.arange(TOKENS, device=device) % (EXPERTS // CHOSEN) < 2)[:, None]
    torch.testing.assert_close(y, torch.where(kept, 2 * x, 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(2):
        graph.replay()
    assert ep.dropped() == 5 * TOKENS


@torch.no_grad()
def test_an_error_of_a_graph_comes_from_the_check(device):
    ep, run, _ = layer_and_inputs(device, capacity=1.0)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    ep.check()
    small, run_small, _ = layer_and_inputs(device, capacity=0.5)
    run_small()
    with pytest.raises(fm.InputError, match=r"capacity=0\.5"):
        small.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_small()
    small.check()
    graph.replay()
    with pytest.raises(fm.InputError, match=r"capacity=0\.5"):
        small.check()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    ("settings", "named"),
    [({"capacity": 0.5, "overflow": "rerun"}, "overflow='rerun'"), ({"engine": "alltoall"}, "engine='alltoall'")],
)
def test_a_graph_cannot_read_the_rows(device, settings, named):
    _, run, _ = layer_and_inputs(device, **settings)
    assert run().any()
    refused = pytest.raises(fm.InputError, match=f"a CUDA graph can capture, got {named}")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        run()
