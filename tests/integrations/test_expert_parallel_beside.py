"""The shared expert runs while tokens travel: when it runs, and that no bit depends on it. Two ranks on a CPU."""

from functools import partial
from unittest import mock

import pytest
import torch
from kit import hopper_ranks as hopper
from kit.expert_parallel_ranks import Recording, engine, in_group, on_each
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm

pytestmark = pytest.mark.distributed

HIDDEN, EXPERTS, CHOSEN, MOST = 32, 4, 2, 9
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
UNEVEN = (9, 2)


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


class Watched(Recording):
    """Also writes down when a gather is waited for."""

    def start_gather(self, *args):
        pending = super().start_gather(*args)
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


class NoExchange(torch.nn.Module):
    def forward(self, x, **given):
        return x


def doubled_tokens(made):
    made.experts.dispatch.register_forward_pre_hook(lambda module, given: (2 * given[0], *given[1:]))
    return made


@on_each
def orders(ep):
    x, made = tokens(5 * ep.rank), layer(ep)
    found = {"plain": events(made, x), "hook": events(doubled_tokens(layer(ep)), x)}
    torch._dynamo.reset()
    made = layer(ep)
    found["compiled"] = events(made, x, torch.compile(made, backend="eager"))
    made.experts = NoExchange()
    found["no exchange"] = events(made, x)
    return found


@pytest.mark.parametrize("most", [None, MOST])
def test_it_runs_after_the_tokens_left_and_before_they_are_waited_for(four, most):
    for found in four.run(orders, 2, most)[:2]:
        assert found.pop("no exchange") == ["shared"]
        for name, order in found.items():
            assert order == BESIDE, name


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


CALLS = {
    "plain": lambda made: made,
    "recomputed": lambda made: partial(checkpoint, made, use_reentrant=False),
    "statistics": lambda made: partial(made, return_stats=True),
    "recomputed, reentrant": lambda made: partial(checkpoint, made, use_reentrant=True),
    "no_grad": lambda made: torch.no_grad()(partial(made)),
    "inference": lambda made: torch.inference_mode()(partial(made)),
    "autocast": lambda made: torch.autocast("cpu", BF16)(partial(made)),
    "recipe": lambda made: fm.recipe("fp8_block")(partial(made)),
}
FEW = "plain", "recomputed"


@on_each
def same_bits(ep, folder, counts, more, calls, dtype=torch.float32, **options):
    """The names of results that depend on when the shared expert runs; and how often it ran beside an exchange."""
    different, beside = [], []
    run = fm.ExpertParallel.run_beside
    with hopper.on_cpus(folder):
        for name in ("allgather", "symmetric"):
            of = fm.ExpertParallel(ep.group, name, max_tokens=ep.max_tokens, **more)
            made = layer(of, dtype, **options)
            seen = []
            made.shared.register_forward_hook(lambda module, given, out, seen=seen: seen.append(out.dtype))

            def noted(self, seen=seen):
                before = len(seen)
                run(self)
                beside.append(len(seen) > before)

            for kind in calls:
                x = tokens(counts[ep.rank], dtype)
                with mock.patch.object(fm.ExpertParallel, "run_beside", noted):
                    got = trained(made, x, CALLS[kind](made))
                with afterwards():
                    want = trained(made, x, CALLS[kind](made))
                assert got.keys() == want.keys()
                assert len(got) > 6 or kind in ("no_grad", "inference")
                different += [(name, kind, key) for key, t in want.items() if not torch.equal(got[key], t)]
                assert set(seen) == {BF16 if kind == "autocast" else dtype}, kind
                seen.clear()
            assert of._beside is None
    return different, beside


# tokens of each rank, the most, more settings, calls, options of the layer
CASES = {
    "all calls": (UNEVEN, MOST, {}, tuple(CALLS), {}),
    "even": ((6, 6), None, {}, FEW, {}),
    "none": ((0, 0), MOST, {}, FEW, {}),
    "dispatch_dtype": (UNEVEN, MOST, {"dispatch_dtype": FP8}, FEW, {"dtype": BF16}),
    "rerun": (UNEVEN, MOST, {"capacity": 1.0, "overflow": "rerun"}, FEW, {}),
    "drop": (UNEVEN, None, {"capacity": 0.1, "overflow": "drop"}, FEW, {}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_bit_depends_on_when_it_runs(four, folder, case):
    counts, most, more, calls, options = case
    for different, beside in four.run(same_bits, 2, most, folder, counts, more, calls, **options)[:2]:
        assert not different
        assert all(beside)
        # calls that are recomputed run again in the backward pass
        assert len(beside) == 2 * (len(calls) + sum("recomputed" in call for call in calls))


@on_each
def fused(ep, folder):
    """The order in a step that computes while tokens travel, and what depends on it."""
    hopper.stand_ins()
    with fm.disabled(*hopper.OTHERS):
        order = events(layer(ep, BF16), tokens(3 + ep.rank, BF16))
        return order, same_bits(ep.rank, 2, MOST, folder, UNEVEN, {}, FEW, BF16)


def test_a_fused_step(hopper_ranks, folder):
    for order, (different, beside) in hopper_ranks.run(fused, 2, MOST, folder)[:2]:
        assert order == BESIDE
        assert not different
        assert all(beside)
        assert beside


class Wrapped(torch.nn.Module):
    """Recomputes its module in the backward pass, or runs it under another recipe."""

    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, *args, **kwargs):
        return self.how(self.inner)(*args, **kwargs)


def replaced_forward(made, how):
    made.experts.forward = how(made.experts.forward)


def replaced_experts(made, how):
    made.experts = Wrapped(made.experts, how)


HOW = {
    "recomputed": lambda run: partial(checkpoint, run, use_reentrant=False),
    "recipe": lambda run: fm.recipe("fp8_block")(partial(run)),
}


@on_each
def wrapped(ep, replace, how):
    """Results of a layer whose experts are wrapped; with a wrapper of the same kind that changes nothing; and the
    results of both shared experts.
    """
    found, shared = [], []
    for wrapper in (HOW[how], lambda run: run):
        made = layer(ep)
        replace(made, wrapper)
        made.shared.register_forward_hook(lambda module, given, out: shared.append(out.detach()))
        found.append([*trained(made, tokens(5 + ep.rank)).values()])
    return *found, *shared


@pytest.mark.parametrize("replace", [replaced_forward, replaced_experts])
@pytest.mark.parametrize("how", HOW)
def test_a_wrapper_of_the_experts_leaves_the_shared_expert_alone(four, replace, how):
    for got, want, *shared in four.run(wrapped, 2, MOST, replace, how)[:2]:
        assert torch.equal(*shared)  # it ran once per step
        same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert same is (how == "recomputed")
        assert len(got) > 6


class Failing(torch.nn.Module):
    def forward(self, x):
        raise ArithmeticError("in the shared expert")


@in_group(size=2, settings=None)
def test_errors_and_hooks(ep, folder):
    """Results with and without: after an error, and with other tokens than those of the layer."""
    with hopper.on_cpus(folder):
        for name in ("allgather", "symmetric"):
            of = fm.ExpertParallel(ep.group, name, max_tokens=MOST)
            made, hooked, x = layer(of), doubled_tokens(layer(of)), tokens(4 * ep.rank)
            shared, made.shared = made.shared, Failing()
            for _ in range(2):
                with pytest.raises(ArithmeticError, match="in the shared expert"):
                    made(x)
                assert of._beside is None
            made.shared = shared
            got = [trained(each, x) for each in (made, hooked)]
            with afterwards():
                want = [trained(each, x) for each in (made, hooked)]
            assert all(torch.equal(a[key], t) for a, b in zip(got, want, strict=True) for key, t in b.items())
            assert not torch.equal(got[0]["y"], got[1]["y"]) or not len(x)
