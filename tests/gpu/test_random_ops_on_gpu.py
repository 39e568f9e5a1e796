"""Ops that draw random numbers on a GPU: their backward pass draws the same ones, without a host synchronisation."""

import pytest
import torch
import torch.nn.functional as F

import fusedmoe as fm

E, H = 4, 64


class Dropout(fm.Op):
    draws_random = True

    def compute(self, x):
        return F.dropout(x, 0.5)


class Undeclared(fm.Op):
    def compute(self, x):
        return F.dropout(x, 0.5)


def experts(op, device):
    torch.manual_seed(0)
    kind = {"device": device, "dtype": torch.bfloat16}
    return fm.Sequential(fm.GroupedLinear(E, H, H, **kind), op, fm.GroupedLinear(E, H, H, **kind))


def rows(device):
    x = torch.randn(96, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.tensor([20, 0, 40, 36], device=device)


def test_the_backward_pass_draws_the_same_mask(device, no_sync):
    seq = experts(Dropout(), device)
    x, splits = rows(device)
    wanted = [x, *seq.parameters()]
    torch.autograd.grad(seq(x, splits=splits).sum(), wanted)
    state, of_cpu = torch.cuda.get_rng_state(), torch.get_rng_state()
    with no_sync():
        y = seq(x, splits=splits)
        torch.rand(5, device=device)
        got = [y, *torch.autograd.grad(y.float().square().sum(), wanted)]
    after = torch.rand(1, device=device)
    assert torch.equal(torch.get_rng_state(), of_cpu)

    torch.cuda.set_rng_state(state)
    first, _, last = seq
    y = last(F.dropout(first(x, splits=splits), 0.5), splits=splits)
    torch.rand(5, device=device)
    want = [y, *torch.autograd.grad(y.float().square().sum(), wanted)]
    assert torch.equal(after, torch.rand(1, device=device))
    for a, b in zip(got, want, strict=True):
        assert b.any()
        assert ((a.double() - b.double()).norm() / b.double().norm()).item() < 1e-2


def test_one_that_does_not_say_so_is_an_error(device):
    seq = experts(Undeclared(), device)
    x, splits = rows(device)
    with pytest.raises(fm.InputError, match="draws_random = True"):
        seq(x, splits=splits)


def test_a_graph_captures_inference_and_refuses_training(device):
    seq = experts(Dropout(), device)
    x, splits = rows(device)
    seq(x, splits=splits).sum().backward()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            seq(x, splits=splits)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = seq(x, splits=splits)
        graph.replay()
        first = y.clone()
        graph.replay()
    assert first.any()
    assert not torch.equal(first, y), "each replay draws anew"
    with pytest.raises(fm.InputError, match="CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        seq(x, splits=splits)
