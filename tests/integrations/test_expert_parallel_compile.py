"""Layers whose experts are spread over ranks, under torch.compile, torch.export and explain(): two ranks."""

import pytest
import torch
from kit.two_ranks import in_ranks
from torch import distributed as dist

import fusedmoe as fm

HIDDEN = 16


class Model(torch.nn.Module):
    def __init__(self, most):
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Linear(HIDDEN, HIDDEN)
        self.moe = fm.MoE(HIDDEN, 8, 4, 2, shared_intermediate=8, expert_parallel=fm.ExpertParallel(max_tokens=most))

    def forward(self, x):
        y, stats = self.moe(self.before(x), return_stats=True)
        return x + y, stats.load_balancing_loss


@in_ranks("ranks")
def test_a_compiled_model(rank):
    """The layer is not traced: a graph break before and after it."""
    model = Model(6)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    results = []
    for run in (model, compiled, compiled):
        for count in (5, 3 - rank):
            torch.manual_seed(count)
            x = torch.randn(count, HIDDEN, requires_grad=True)
            model.zero_grad()
            y, loss = run(x)
            (y.square().sum() + loss).backward()
            results.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    eager, once, again = results[:2], results[2:4], results[4:]
    for want, *others in zip(eager, once, again, strict=True):
        assert len(want) > 6
        for got in others:
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b)
    assert eager[0][0].any()


@in_ranks("ranks")
def test_refusals(rank):
    layer = Model(6).moe
    x = torch.randn(6, HIDDEN)
    with pytest.raises(fm.InputError, match=r"torch.export: expected a module with all experts on one rank"):
        torch.export.export(layer, (x,))
    with pytest.raises(Exception, match="exchanges tokens with other ranks"):
        torch.compile(layer, backend="eager", fullgraph=True)(x)


def explained(rank):
    """Only rank 0 explains: no other rank answers it."""
    texts = []
    if rank == 0:
        for most, device in ((None, "cpu"), (6, "meta")):
            layer = Model(most).moe.to(device)
            texts.append(str(layer.explain(torch.randn(6, HIDDEN, device=device).requires_grad_(), arch=90)))
        # exchanges run unfused for so few tokens, which is no miss; the rule for the last one sends all gradients
        alone = [
            ("experts.dispatch.gather.GatherTokens",), ("experts.combine.return.ReturnTokens",),
            ("experts.combine.return.DReturnTokens",), ("experts.dispatch.gather.DGatherTokens",),
        ]  # fmt: skip
        layer, x = layer.to(torch.bfloat16), torch.empty(6, HIDDEN, device="meta", dtype=torch.bfloat16)
        for wanted in (False, True):
            plan = layer.explain(x.requires_grad_(wanted), arch=90)
            plan.raise_if_missed()
            unfused = [s.ops for s in plan.steps if s.rule is None]
            assert unfused == alone[: 3 if wanted else 4], unfused
    dist.barrier()
    return texts


def test_explain_communicates_nothing(ranks):
    (agreed, at_most), _ = ranks.run(explained)
    # 6 rows of 16 fp32 from the other rank, with two ids of 4 bytes and two weights of 4 bytes each
    received = 6 * (16 * 4 + 2 * 4 + 2 * 4)
    assert f"experts.dispatch.gather.GatherTokens: {received} B received, as much sent" in agreed
    assert "module experts.dispatch.agree: AgreeOnTokens: the hosts agree on" in agreed
    assert "tokens per rank at most 6" in at_most
    assert "AgreeOnTokens" not in at_most
