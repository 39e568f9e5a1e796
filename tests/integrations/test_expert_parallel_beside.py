"""The shared expert runs while tokens travel: when it runs, and that no bit depends on it. Two ranks on a CPU."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

from kit.expert_parallel_ranks import Recording, engine
from kit.two_ranks import Ranks
from test_expert_parallel_overlap import OVERLAPS, stand_ins
from test_expert_parallel_symmetric import on_cpus

from fusedmoe.layers.moe import Routing

HIDDEN, EXPERTS, CHOSEN, MOST = 32, 4, 2, 9
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TOKENS = {"even": (6, 6), "uneven": (9, 2), "none on one rank": (0, 7), "none": (0, 0)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("beside"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("buffers"))


def afterwards():
    """Let every shared expert run after the routed ones, as without an exchange."""
    return mock.patch.object(fm.ExpertParallel, "run_beside", return_value=None)


def layer(ep, dtype=torch.float32, **options):
    torch.manual_seed(0)
    made = fm.MoE(
        HIDDEN, 16, EXPERTS, CHOSEN, shared_intermediate=24, dtype=dtype, expert_parallel=ep,
        **{"shared_gate": True, **options},
    )  # fmt: skip
    for p in made.parameters():
        p.data.mul_(3)
    return made


def tokens(count, dtype=torch.float32):
    x = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))
    return x.to(dtype).requires_grad_()


# ---- when it runs ---------------------------------------------------------------------------------------------------


class Watched(Recording):
    """Also writes down when a gather is waited for."""

    def start_gather(self, *args, **told):
        pending = super().start_gather(*args, **told)
        wait = pending.wait

        def noted(number):
            self.log.append(f"wait {number}")
            return wait(number)

        pending.wait = noted
        return pending


def events(made, x, call=None):
    """What happened in a call: the exchanges by their first word, waits, and the run of the shared expert."""
    with engine(made.expert_parallel, Watched) as watched, torch.no_grad():
        handle = made.shared.register_forward_hook(lambda module, given, out: watched.log.append("shared"))
        (made if call is None else call)(x)
        handle.remove()
    return [entry if isinstance(entry, str) else entry[0] for entry in watched.log]


BESIDE = ["gather", "shared", "wait 0", "wait 1", "wait 2", "exchange"]


class OwnRouter(torch.nn.Module):
    def __init__(self, router):
        super().__init__()
        self.inner = router

    def forward(self, x):
        found = self.inner(x)
        return Routing(*found)


class NoExchange(torch.nn.Module):
    def forward(self, x, **given):
        return x


def orders(rank):
    found = {}
    x = tokens(5 * rank)
    for most in (None, MOST):
        ep = fm.ExpertParallel(engine="allgather", max_tokens=most)
        found[most] = events(layer(ep), x)
    made = layer(ep)
    made.router = OwnRouter(made.router)
    found["router"] = events(made, x)
    made = layer(ep)
    made.experts.dispatch.register_forward_pre_hook(lambda module, given: (2 * given[0], *given[1:]))
    found["hook"] = events(made, x)
    torch._dynamo.reset()
    made = layer(ep)
    found["compiled"] = events(made, x, torch.compile(made, backend="eager"))
    made.experts = NoExchange()
    found["no exchange"] = events(made, x)
    return found


def test_it_runs_after_the_tokens_left_and_before_they_are_waited_for(ranks):
    for found in ranks.run(orders):
        assert found.pop("no exchange") == ["shared"]
        for name, order in found.items():
            assert order == BESIDE, name


def after_the_others(rank):
    """The engine whose host waits, a rank that is alone, and a layer that is asked for its plan."""
    log = []
    for ep in (fm.ExpertParallel(engine="alltoall"), fm.ExpertParallel([dist.new_group([i]) for i in range(2)][rank])):
        made = layer(ep)
        made.shared.register_forward_hook(lambda module, given, out: log.append("shared"))
        made.experts.register_forward_hook(lambda module, given, out: log.append("experts"))
        made(tokens(3))
    if rank == 0:  # no other rank answers
        made = layer(fm.ExpertParallel(max_tokens=MOST))
        text = str(fm.Sequential(made, torch.nn.Identity()).to("meta").explain(tokens(3).to("meta")))
        assert "Identity" in text
    dist.barrier()
    return log


def test_it_runs_last_where_nothing_travels_beside_it(ranks):
    for log in ranks.run(after_the_others):
        assert log == ["experts", "shared"] * 2


def margins(rank):
    made = layer(fm.ExpertParallel(max_tokens=MOST))
    found = [(made.sm_margin, made.shared.sm_margin)]
    made.sm_margin = 7
    alone = layer(fm.ExpertParallel([dist.new_group([i]) for i in range(2)][rank]))
    return [*found, (made.sm_margin, made.shared.sm_margin), (alone.sm_margin, alone.shared.sm_margin)]


def test_it_leaves_sms_to_the_exchange(ranks):
    for found in ranks.run(margins):
        assert found == [(0, 2), (7, 7), (0, 0)]


# ---- results --------------------------------------------------------------------------------------------------------


def trained(made, x, call=None):
    """Output, losses and gradients, by name."""
    made.zero_grad()
    x.grad = None
    y = (call or made)(x)
    y, *stats = y if isinstance(y, tuple) else (y,)
    found = {"y": y.detach()}
    loss = (y.float() * torch.linspace(-1, 2, HIDDEN)).square().sum()
    for one in stats:
        found |= {"balance": one.load_balancing_loss.detach(), "load": one.load}
        loss = loss + one.load_balancing_loss
    if y.requires_grad:
        loss.backward()
        found["x"] = x.grad
    return found | {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


def under(context, *args):
    def called(made):
        def call(x):
            with context(*args):
                return made(x)

        return call

    return called


CALLS = {
    "plain": lambda made: made,
    "statistics": lambda made: lambda x: made(x, return_stats=True),
    "recomputed": lambda made: lambda x: checkpoint(made, x, use_reentrant=False),
    "recomputed, reentrant": lambda made: lambda x: checkpoint(made, x, use_reentrant=True),
    "no_grad": under(torch.no_grad),
    "inference": under(torch.inference_mode),
    "autocast": under(torch.autocast, "cpu", BF16),
    "recipe": under(fm.recipe, "fp8_block"),
}


def same_bits(rank, folder, counts, most, settings, calls, dtype=torch.float32, options=()):
    """The names of results that depend on when the shared expert runs; and how often it ran beside an exchange."""
    different, beside = [], []
    run = fm.ExpertParallel.run_beside
    with on_cpus(folder):
        for name in ("allgather", "symmetric"):
            ep = fm.ExpertParallel(engine=name, max_tokens=most, **settings)
            made = layer(ep, dtype, **dict(options))
            seen = []
            made.shared.register_forward_hook(lambda module, given, out, seen=seen: seen.append(out.dtype))

            def noted(self, seen=seen):
                before = len(seen)
                run(self)
                beside.append(len(seen) > before)

            for kind in calls:
                x = tokens(counts[rank], dtype)
                with mock.patch.object(fm.ExpertParallel, "run_beside", noted):
                    got = trained(made, x, CALLS[kind](made))
                with afterwards():
                    want = trained(made, x, CALLS[kind](made))
                assert got.keys() == want.keys()
                assert len(got) > 6 or kind in ("no_grad", "inference")
                different += [(name, kind, key) for key, t in want.items() if not torch.equal(got[key], t)]
                assert set(seen) == {BF16 if kind == "autocast" else dtype}, kind
                seen.clear()
            assert ep._beside is None
    return different, beside


@pytest.mark.parametrize(
    ("tokens", "most"),
    [
        *(("even", None), ("uneven", MOST), ("none on one rank", None), ("none", MOST)),
        *(
            pytest.param(*how, marks=pytest.mark.slow)
            for how in (("even", MOST), ("uneven", None), ("none on one rank", MOST), ("none", None))
        ),
    ],
)
def test_no_bit_depends_on_when_it_runs(ranks, folder, tokens, most):
    for different, beside in ranks.run(same_bits, folder, TOKENS[tokens], most, {}, tuple(CALLS)):
        assert not different
        assert all(beside)
        assert len(beside) == 2 * (len(CALLS) + 2)  # two of the calls run again in the backward pass


@pytest.mark.parametrize(("settings", "dtype", "options"), [
    ({"dispatch_dtype": FP8}, BF16, ()),
    pytest.param({"combine_dtype": torch.float32}, BF16, (), marks=pytest.mark.slow),
    pytest.param({"capacity": 1.0, "overflow": "rerun"}, torch.float32, (), marks=pytest.mark.slow),
    ({"capacity": 0.1, "overflow": "drop"}, torch.float32, ()),
    ({}, torch.float32, {"bias": True, "shared_gate": False}),
], ids=["dispatch_dtype", "combine_dtype", "rerun", "drop", "biases, no gate"])  # fmt: skip
def test_no_bit_depends_on_when_it_runs_with_settings(ranks, folder, settings, dtype, options):
    calls = "plain", "statistics", "recomputed"
    for most in (None, MOST):
        for different, beside in ranks.run(same_bits, folder, TOKENS["uneven"], most, settings, calls, dtype, options):
            assert not different
            assert all(beside)
            assert beside


def fused(rank, folder):
    """The order in a step that computes while tokens travel, and what depends on it."""
    stand_ins()
    with fm.disabled(*{other for others in OVERLAPS.values() for other in others}):
        order = events(layer(fm.ExpertParallel(engine="allgather", max_tokens=MOST), BF16), tokens(3 + rank, BF16))
        return order, same_bits(rank, folder, TOKENS["uneven"], MOST, {}, ("plain", "recomputed"), BF16)


def test_a_fused_step(tmp_path, folder):
    alone = Ranks(tmp_path)  # processes that keep the stand-ins for kernels
    try:
        for order, (different, beside) in alone.run(fused, folder):
            assert order == BESIDE
            assert not different
            assert all(beside)
    finally:
        alone.stop()


class Failing(torch.nn.Module):
    def forward(self, x):
        raise ArithmeticError("in the shared expert")


class Ranked(torch.nn.Module):
    """Has an exchange of its own."""

    def __init__(self, ep):
        super().__init__()
        self.moe = layer(ep)

    def forward(self, x):
        return self.moe(x) - x


def unusual(rank, folder):
    """Results with and without: after an error, with other tokens than those of the layer, and nested."""
    different = []
    with on_cpus(folder):
        for name in ("allgather", "symmetric"):
            ep = fm.ExpertParallel(engine=name, max_tokens=MOST)
            made, x = layer(ep), tokens(4 * rank)
            shared = made.shared
            for _ in range(2):
                made.shared = Failing()
                with pytest.raises(ArithmeticError, match="in the shared expert"):
                    made(x)
                assert ep._beside is None
                made.shared = shared
            results = []
            for context in (contextlib.nullcontext(), afterwards()):
                with context:
                    results.append([trained(made, x)])
                    hooked = layer(ep)
                    hooked.experts.dispatch.register_forward_pre_hook(lambda module, given: (2 * given[0], *given[1:]))
                    results[-1].append(trained(hooked, x))
                    nested = layer(ep)
                    nested.shared = Ranked(ep)
                    results[-1].append(trained(nested, x))
            for got, want in zip(*results, strict=True):
                different += [key for key, t in want.items() if not torch.equal(got[key], t)]
            assert not torch.equal(results[0][0]["y"], results[0][1]["y"]) or not len(x)
    return different


def test_errors_hooks_and_nested_layers(ranks, folder):
    for different in ranks.run(unusual, folder):
        assert not different
