"""The Hopper rules that compute while tokens travel: two ranks on a CPU, with stand-ins in place of the kernels.

The stand-ins have row tiles of four rows, so that a few tokens have tiles of every kind.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

import fusedmoe as fm

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from kit.two_ranks import Ranks

BF16 = torch.bfloat16
HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 32, 16, 4, 2
MOST = 50
TOKENS = {"even": (50, 50), "uneven": (37, 50), "none on one rank": (0, 41), "few": (1, 2)}

# each with the rules that it is compared with, which cost less for so few tokens
OVERLAPS = {
    "sm90.gemm_activation_of_arriving_tokens": ("sm90.gathered_gemm_activation", "sm90.grouped_gemm_activation"),
    "sm90.gemm_of_leaving_rows": ("sm90.grouped_gemm",),
    "sm90.dgrad_activation_of_arriving_gradients": (
        "sm90.gathered_dgrad_activation",
        "sm90.grouped_dgrad_activation",
    ),
    "sm90.wgrad_beside_exchange": ("sm90.grouped_dgrad",),
}

APART = "sm90.activation,sm90.dactivation"
"""Off in the ranks: for so few tokens they cost less too, and round other values."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("overlap"))
    yield started
    started.stop()


def stand_ins():
    """Let this process, a rank, have an sm_90 GPU whose kernels are the stand-ins."""
    folder = str(Path(__file__).parents[1] / "unit")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from kit import sm90_stand_ins

    from fusedmoe.fusion.program import plan_table
    from fusedmoe.kernels.build import toolkit

    plan_table.arch_of = lambda device: 90
    sm90_stand_ins.install(router=True)
    toolkit.missing_packages = lambda: ()
    os.environ["FUSEDMOE_DISABLE"] = APART
    return sm90_stand_ins


def layer(expert_parallel, rank, frozen, main_grad):
    torch.manual_seed(0)
    made = fm.MoE(HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN, dtype=BF16, expert_parallel=expert_parallel)
    here = EXPERTS // expert_parallel.ranks
    for op in (made.experts.gate_up, made.experts.down):
        weight = torch.randn(EXPERTS, *op.weight.shape[1:], generator=torch.Generator().manual_seed(op.in_features))
        op.weight.data.copy_(0.2 * weight[rank * here : (rank + 1) * here])
        op.weight.requires_grad_(not frozen)
        op.accumulate_into_main_grad = main_grad
        if main_grad:
            op.weight.main_grad = torch.ones(op.weight.shape)
    return made


def trained(made, count, rank, training=True):
    """Output and gradients, by name."""
    generator = torch.Generator().manual_seed(rank + 1)
    x = torch.randn(count, HIDDEN, generator=generator).to(BF16).requires_grad_(training)
    with torch.set_grad_enabled(training):
        y = made(x)
    found = {"y": y.detach()}
    if training:
        y.backward(torch.randn(count, HIDDEN, generator=generator).to(BF16))
        found |= {"x": x.grad} | {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
        for name, p in made.named_parameters():
            if hasattr(p, "main_grad"):
                found[name] = p.main_grad
    return found


def compare(rank, tokens, most, training, frozen, main_grad, divided=None):
    """Results with all overlaps, which are those without them bit for bit; and the names of the rules that ran.
    ``divided``: the experts whose rows come in ranges, by rank, None for those that the rules choose.
    """
    kernels = stand_ins()
    from fusedmoe.builtin_rules.exchange import beside
    from fusedmoe.builtin_rules.exchange import products as exchange_products

    def given(*args):
        return beside.experts_beside(*args) if divided is None else divided[rank]

    exchange_products.experts_beside = given
    ep = fm.ExpertParallel(engine="allgather", max_tokens=most)
    settings = rank, frozen, main_grad
    with fm.disabled(*OVERLAPS):
        expected = trained(layer(ep, *settings), tokens[rank], rank, training)
    kernels.calls.clear()
    made = layer(ep, *settings)
    with fm.disabled(*{other for others in OVERLAPS.values() for other in others}):
        got = trained(made, tokens[rank], rank, training)
        called = [name for name, _ in kernels.calls]
        x = torch.zeros(max(tokens[rank], 1), HIDDEN, dtype=BF16, requires_grad=training)
        with torch.set_grad_enabled(training):
            used = {step.rule for step in made.explain(x).steps}
    assert got.keys() == expected.keys()
    assert len(got) > 3 or not training
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
        assert value.float().norm() > 0 or not value.numel() or min(tokens) == 0, name
    return used & OVERLAPS.keys(), called.count("row_ranges")


def fewer_rows_than_experts(rank):
    """A rank's plan for its one token, made when the other had many tokens, is also that for one token of each."""
    stand_ins()
    ep = fm.ExpertParallel(engine="allgather")
    made = fm.MoE(HIDDEN, INTERMEDIATE, 128, CHOSEN, dtype=BF16, expert_parallel=ep)
    others = {other for replaced in OVERLAPS.values() for other in replaced}
    generator, different = torch.Generator().manual_seed(rank), []
    for count in ((1, 300)[rank], 1):
        x = torch.randn(count, HIDDEN, generator=generator).to(BF16)
        with torch.no_grad(), fm.disabled(*others):
            got, used = made(x), {step.rule for step in made.explain(x).steps}
        with torch.no_grad(), fm.disabled(*OVERLAPS):
            different.append(not torch.equal(got, made(x)))
    return different, used & OVERLAPS.keys()


def test_fewer_rows_than_experts(ranks):
    for different, used in ranks.run(fewer_rows_than_experts):
        assert different == [False, False]
        assert used


@pytest.mark.parametrize("most", [MOST, None], ids=["max_tokens", "agreed"])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_results_have_the_bits_of_separate_steps(ranks, tokens, most):
    for used, launches in ranks.run(compare, tokens, most, True, False, False):
        assert used == OVERLAPS.keys()
        assert launches == 3


def test_experts_whose_products_take_as_long_as_an_exchange():
    from fusedmoe.builtin_rules.exchange.beside import experts_beside

    def experts(tokens=8192, ranks=2, row_bytes=4096, flops=2 * 2048 * 1536):
        return experts_beside(SimpleNamespace(ranks=ranks), ranks * tokens, row_bytes, 8, 128 // ranks, flops, 550)

    assert 20 < experts() < 40  # of 64: 4.7 us each, beside a transfer of 120 us
    assert experts(tokens=32768) < experts()  # the latency is a smaller part
    assert experts(row_bytes=8192) > experts() > experts(flops=8 * 2048 * 1536)
    assert experts(tokens=256) == 64  # no whole tile of own rows per expert is expected
    assert experts(row_bytes=1 << 20) == 64
    assert experts(ranks=8, row_bytes=65536) == 16


def lent(rank):
    """Results with an engine that lends its memory, and overwrites it in the next exchange."""
    stand_ins()
    from fusedmoe.expert_parallel.allgather import AllGather

    class Lending(AllGather):
        memory, lends, rooms = (), 0, 0

        def _next(self):
            assert not any(pending.lent for pending in self.memory), "an exchange before all is given back"
            for pending in self.memory:
                pending.unfinished(0).fill_(torch.nan)
            self.memory = ()

        def start_gather(self, tensors, rows, wanted=None, lend=False, told=None):
            self._next()
            pending = super().start_gather(tensors, rows, wanted, lend, told)
            pending.lent = lend
            pending.give_back = lambda: setattr(pending, "lent", False)
            if lend:
                self.memory, self.lends = (pending,), self.lends + 1
            return pending

        def room(self, like, device):
            self._next()
            self.rooms += 1
            return [t.fill_(torch.nan) for t in super().room(like, device)]

        def start_exchange(self, tensors, wanted=None):
            self._next()
            return super().start_exchange([torch.nan_to_num(t, nan=5.0) for t in tensors], wanted)

    ep = fm.ExpertParallel(engine="allgather", max_tokens=MOST)
    settings = rank, False, False
    with fm.disabled(*OVERLAPS):
        expected = trained(layer(ep, *settings), 37 + rank, rank)
    ep.engine = Lending(ep.group)
    with fm.disabled(*{other for others in OVERLAPS.values() for other in others}):
        got = trained(layer(ep, *settings), 37 + rank, rank)
    return (
        [name for name, value in expected.items() if not torch.equal(got[name], value)],
        ep.engine.lends,
        ep.engine.rooms,
    )


def test_memory_that_an_engine_lends(ranks):
    """The gathered gradients, and the parts of two exchanges. What other ranks get is written before the exchange."""
    for different, lends, rooms in ranks.run(lent):
        assert not different
        assert (lends, rooms) == (1, 2)


@pytest.mark.parametrize("divided", [(0, 0), (1, 0), (1, 1)], ids=str)
def test_rows_of_some_experts_in_ranges(ranks, divided):
    """Each rank has two experts, and chooses by itself whose rows come in ranges."""
    for used, launches in ranks.run(compare, TOKENS["uneven"], MOST, True, False, False, divided):
        assert used == OVERLAPS.keys()
        assert launches == 3


def test_more_than_two_ranks(tmp_path):
    """The parts of a token are summed by one kernel."""
    four = Ranks(tmp_path, 4)
    try:
        for used, _ in four.run(compare, (50, 37, 0, 44), MOST, True, False, False):
            assert used == OVERLAPS.keys()
    finally:
        four.stop()


def test_without_gradients(ranks):
    for used, launches in ranks.run(compare, (50, 37), MOST, False, False, False):
        assert used == {"sm90.gemm_activation_of_arriving_tokens", "sm90.gemm_of_leaving_rows"}
        assert launches == 2


def test_accumulation_into_main_grad(ranks):
    for used, _ in ranks.run(compare, (50, 37), MOST, True, False, True):
        assert used == OVERLAPS.keys()


def compare_mixed(rank):
    """One rank with the overlaps, the other without: their exchanges are the same."""
    stand_ins()
    ep = fm.ExpertParallel(max_tokens=MOST)
    with fm.disabled(*OVERLAPS):
        expected = trained(layer(ep, rank, False, False), 40, rank)
    others = {other for others in OVERLAPS.values() for other in others}
    with fm.disabled(*(OVERLAPS if rank else others)):
        got = trained(layer(ep, rank, False, False), 40, rank)
    return all(torch.equal(got[name], value) for name, value in expected.items())


def test_ranks_may_choose_different_steps(ranks):
    assert ranks.run(compare_mixed) == [True, True]


def compare_codes(rank):
    """Tokens that arrive as codes: two rules decline, and the others keep the bits of separate steps."""
    stand_ins()
    ep = fm.ExpertParallel(engine="allgather", max_tokens=MOST, dispatch_dtype=torch.float8_e4m3fn)
    with fm.disabled(*OVERLAPS):
        expected = trained(layer(ep, rank, False, False), 40, rank)
    made = layer(ep, rank, False, False)
    with fm.disabled(*{other for others in OVERLAPS.values() for other in others[:1]}):
        got = trained(made, 40, rank)
        plan = made.explain(torch.zeros(40, HIDDEN, dtype=BF16, requires_grad=True))
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    declined = {a.rule for p in plan.plans for a in p.attempts if "arrive as codes of torch.float8_e4m3fn" in a.reason}
    return {step.rule for step in plan.steps} & OVERLAPS.keys(), declined


def test_tokens_that_arrive_as_codes(ranks):
    arriving = {name for name in OVERLAPS if "arriving" in name}
    for used, declined in ranks.run(compare_codes):
        assert used == OVERLAPS.keys() - arriving
        assert declined == arriving


def names_of_declined(rank):
    """The rules of one rank alone, which has nothing to exchange."""
    stand_ins()
    group = [dist.new_group([i]) for i in range(2)][rank]
    made = layer(fm.ExpertParallel(group, max_tokens=8), 0, False, False)
    plan = made.explain(torch.zeros(8, HIDDEN, dtype=BF16, requires_grad=True))
    declined = {a.rule for p in plan.plans for a in p.attempts if a.reason == "one rank exchanges nothing"}
    return {step.rule for step in plan.steps} & OVERLAPS.keys(), declined


def test_one_rank_alone_has_separate_steps(ranks):
    for used, declined in ranks.run(names_of_declined):
        assert not used
        assert declined == OVERLAPS.keys()
