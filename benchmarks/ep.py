"""The experts of a layer that ranks share: each engine of `ExpertParallel`, the same rows without communication, peers.

Each rank gives tokens, expert ids and routing weights, and gets the sums of its tokens' results. A step has the
gradients of tokens, routing weights and the two weights of the rank's experts. All functions are collectives: every
rank calls them in the same order, and leaves a candidate out together with the others.

Axes: P ranks, N tokens of a rank, K chosen experts per token, E experts of all ranks, H hidden, I intermediate.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile

import fusedmoe as fm
from benchmarks.cases import release
from benchmarks.ep_timing import slowest
from benchmarks.peers import all_to_all
from benchmarks.shapes import Shape, load
from fusedmoe.commands.bench.layer import activate, relative_error
from fusedmoe.commands.bench.measure import WRONG, WRONG_QUANTIZED
from fusedmoe.commands.timing import CallTime, Timer, memory_of, why_not
from fusedmoe.expert_parallel.group import ENGINES

REFERENCE, UNFUSED_PEER, FUSED_PEER = "no communication", "all-to-all by hand, unfused", "all-to-all by hand, fusedmoe"
CODES = "symmetric, codes travel"
DEEPSEEK_V3 = Shape("deepseek-v3", 4096, hidden=7168, intermediate=2048, experts=256, top_k=8)  # all of its experts
TOKENS = {
    "qwen3-30b-a3b": (2048, 8192, 32768), DEEPSEEK_V3.name: (4096,), "qwen3-235b-a22b": (8192,), "mixtral-8x7b": (8192,)
}  # fmt: skip
"""The shapes that are measured by default, and the tokens per rank of each."""
OTHER_TOKENS = (8192,)
"""Those of other shapes."""
RECIPES = ("bf16", "fp8_block")
ONLY_FOR = {UNFUSED_PEER: "bf16", FUSED_PEER: "bf16", CODES: "fp8_block"}
"""The recipe of candidates that do not run under every one."""
TINY, TINY_TOKENS = Shape("tiny", 48, hidden=32, intermediate=16, experts=8, top_k=3), (48,)  # for a CPU
SAMPLED_TOKENS = 32  # of each rank


def known() -> dict[str, Shape]:
    """Return the shapes by name."""
    return load() | {DEEPSEEK_V3.name: DEEPSEEK_V3}


class Leaves(NamedTuple):
    """The tensors that get gradients: tokens (N, H), routing weights (N, K), and weights of this rank's experts."""

    x: Tensor
    probs: Tensor
    weight1: Tensor
    weight2: Tensor


class Work:
    """The operands of this rank: normal random rows of variance 1, and weights that preserve the variance.

    Attributes
    ----------
    x, dy : Tensor
        (N, H).
    index, probs : Tensor
        (N, K): experts of all ranks, uniform and random, and their weights in fp32.
    weight1, weight2 : Tensor
        (E / P, 2 I, H) as ``[gate; up]``, and (E / P, H, I).
    """

    def __init__(self, shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.tokens, self.device, self.dtype = shape, tokens, device, dtype
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.here = shape.experts // self.ranks
        seeded = torch.Generator(device)

        def draw(*sizes: int, fan_in: int = 1) -> Tensor:
            return torch.randn(sizes, generator=seeded, device=device, dtype=dtype).mul_(fan_in**-0.5)

        h, i = shape.hidden, shape.intermediate
        self.weight1 = torch.empty(self.here, 2 * i, h, device=device, dtype=dtype)
        self.weight2 = torch.empty(self.here, h, i, device=device, dtype=dtype)
        for expert in range(self.here):
            seeded.manual_seed(self.rank * self.here + expert)
            self.weight1[expert], self.weight2[expert] = draw(2 * i, h, fan_in=h), draw(h, i, fan_in=i)
        seeded.manual_seed(shape.experts + self.rank)
        self.x, self.dy = draw(tokens, h), draw(tokens, h)
        scores = torch.rand(tokens, shape.experts, generator=seeded, device=device)
        self.index = scores.topk(shape.top_k, dim=-1).indices
        self.probs = torch.softmax(torch.randn(self.index.shape, generator=seeded, device=device), dim=-1)

    def of_all_ranks(self, t: Tensor) -> Tensor:
        """Return a tensor (N, ...) of each rank, in rank order: (P*N, ...)."""
        parts = [torch.empty_like(t) for _ in range(self.ranks)]
        dist.all_gather(parts, t)
        return torch.cat(parts)

    def leaves(self) -> Leaves:
        weights = nn.Parameter(self.weight1), nn.Parameter(self.weight2)
        return Leaves(self.x.detach().requires_grad_(), self.probs.detach().requires_grad_(), *weights)


@dataclass(frozen=True)
class Candidate:
    """An implementation.

    Attributes
    ----------
    forward
        Returns y (N, H).
    dy
        The gradient of y.
    partial
        Whether tokens and results are those of all ranks, (P*N, H), and results only parts, of this rank's experts.
    ep
        The object of an engine of ``fusedmoe``.
    plan
        The fused steps.
    """

    forward: Callable[[], Tensor]
    leaves: Leaves
    dy: Tensor
    partial: bool = False
    ep: fm.ExpertParallel | None = None
    plan: str = ""

    def step(self) -> tuple[Tensor, ...]:
        """Return y and the gradients of the leaves."""
        y = self.forward()
        return y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)


# ---- candidates ----------------------------------------------------------------------------------------------------


def without_communication(work: Work) -> Candidate:
    """Return dispatch, experts and combine of the rows that this rank gets, from tokens that are there already."""
    own = work.leaves()
    x, probs, dy = (work.of_all_ranks(t.detach()) for t in (own.x, own.probs, work.dy))
    leaves = Leaves(x.requires_grad_(), probs.requires_grad_(), own.weight1, own.weight2)
    index = work.of_all_ranks(work.index) - work.rank * work.here
    index = torch.where((index >= 0) & (index < work.here), index, -1).to(torch.int32)
    chain = _chain(work, leaves, None)
    call = functools.partial(chain, x, expert_index=index, expert_weight=probs)
    return Candidate(call, leaves, dy, partial=True, plan=_plan(chain, x, index, probs))


def by_engine(work: Work, engine: str, wire: torch.dtype | None = None) -> Candidate:
    """Return `fm.MoE`'s experts with an engine; ``wire``: its ``dispatch_dtype``."""
    ep = fm.ExpertParallel(engine=engine, max_tokens=work.tokens, dispatch_dtype=wire)
    if ep.engine.name != engine:
        raise fm.InputError(f"ExpertParallel: engine: this version has no {engine!r}")
    leaves = work.leaves()
    chain = _chain(work, leaves, ep)
    call = functools.partial(chain, leaves.x, expert_index=work.index, expert_weight=leaves.probs)
    return Candidate(call, leaves, work.dy, ep=ep, plan=_plan(chain, leaves.x, work.index, leaves.probs))


def by_hand(work: Work, experts: Callable[[Tensor, Tensor], all_to_all.Experts]) -> Candidate:
    """Return the all-to-all of rows sorted by expert."""
    leaves = work.leaves()
    of_rows = experts(leaves.weight1, leaves.weight2)
    call = functools.partial(
        all_to_all.by_hand, leaves.x, work.index, leaves.probs, work.shape.experts, of_rows
    )  # fmt: skip
    return Candidate(call, leaves, work.dy)


CANDIDATES: dict[str, Callable[[Work], Candidate]] = {
    REFERENCE: without_communication,
    **{engine: functools.partial(by_engine, engine=engine) for engine in ENGINES},
    CODES: functools.partial(by_engine, engine="symmetric", wire=torch.float8_e4m3fn),
    UNFUSED_PEER: functools.partial(by_hand, experts=all_to_all.unfused),
    FUSED_PEER: functools.partial(by_hand, experts=all_to_all.fused),
}


def _chain(work: Work, leaves: Leaves, ep: fm.ExpertParallel | None) -> fm.Sequential:
    """Return the experts of `fm.MoE`, which share memory with the leaves."""
    s = work.shape
    experts = s.experts if ep is not None else work.here
    layer = fm.MoE(
        s.hidden, s.intermediate, experts, min(s.top_k, experts), device="meta", dtype=work.dtype, expert_parallel=ep
    )  # fmt: skip
    layer.experts.gate_up.weight, layer.experts.down.weight = leaves.weight1, leaves.weight2
    return layer.experts


def _plan(chain: fm.Sequential, x: Tensor, index: Tensor, probs: Tensor) -> str:
    """Return the fused steps and the ops of the others."""
    steps = chain.explain(x, expert_index=index, expert_weight=probs).steps
    return "; ".join(
        f"{direction}: " + ", ".join(s.rule or " ".join(s.ops) for s in steps if s.direction == direction)
        for direction in ("forward", "backward")
    )


# ---- reference -----------------------------------------------------------------------------------------------------


class Reference:
    """The results and gradients of a sample of each rank's tokens, and the gradients of one expert's weights, in fp64.

    It moves tokens by all-gathers, and adds the ranks' parts by all-reduces.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.sample = torch.linspace(0, work.tokens - 1, min(SAMPLED_TOKENS, work.tokens), device=work.device)
        self.sample = self.sample.long().unique()
        x, probs = (work.of_all_ranks(t[self.sample]).double().requires_grad_() for t in (work.x, work.probs))
        index, dy = (work.of_all_ranks(t[self.sample]) for t in (work.index, work.dy))
        y = _part(work, x, probs, index, range(work.here))
        grads = torch.autograd.grad(y, (x, probs), dy.double())
        self.expected = {name: self._own(t) for name, t in zip(("y", "x", "probs"), (y.detach(), *grads), strict=True)}

        index = work.of_all_ranks(work.index)
        rows = torch.bincount(index.flatten().cpu(), minlength=work.shape.experts)
        first = work.rank * work.here
        self.expert = int(rows[first : first + work.here].argsort(stable=True)[work.here // 2])
        weights = [w[self.expert].double().requires_grad_() for w in (work.weight1, work.weight2)]
        chosen = (index == first + self.expert).any(-1)
        x, probs, dy = (work.of_all_ranks(t)[chosen] for t in (work.x, work.probs, work.dy))
        y = _part(work, x.double(), probs.double(), index[chosen], (self.expert,), {self.expert: weights})
        grads = torch.autograd.grad(y, weights, dy.double())
        self.expected |= dict(zip(("weight1", "weight2"), grads, strict=True))

    def errors(self, candidate: Candidate) -> dict[str, float]:
        """Return the relative errors, in norm, of y and the gradients: the largest of a rank."""
        results = dict(zip(("y", *Leaves._fields), candidate.step(), strict=True))
        got = {name: results[name][self.expert] for name in ("weight1", "weight2")}
        for name in ("y", "x", "probs"):
            t = results[name]
            if candidate.partial:
                t = t.unflatten(0, (self.work.ranks, -1))[:, self.sample].flatten(0, 1)
                got[name] = self._own(t.double())
            else:
                got[name] = t[self.sample]
        return {name: slowest(relative_error(got[name], expected)) for name, expected in self.expected.items()}

    def _own(self, parts: Tensor) -> Tensor:
        """Return the sums over ranks of parts for the sampled tokens of all ranks, for this rank's."""
        total = parts.clone()
        dist.all_reduce(total)
        return total.unflatten(0, (self.work.ranks, -1))[self.work.rank]


def _part(
    work: Work,
    x: Tensor,
    probs: Tensor,
    index: Tensor,
    experts: Any,
    given: dict[int, list[Tensor]] | None = None,
) -> Tensor:
    """Return the part of this rank's experts of y, in fp64; ``given`` replaces the weights of an expert."""
    y = torch.zeros_like(x)
    for expert in experts:
        token, slot = torch.where(index == work.rank * work.here + expert)
        w1, w2 = (given or {}).get(expert) or (work.weight1[expert].double(), work.weight2[expert].double())
        rows = F.linear(activate(F.linear(x[token], w1), "swiglu"), w2)
        y = y.index_add(0, token, rows * probs[token, slot, None])
    return y


# ---- figures -------------------------------------------------------------------------------------------------------


def measure(
    shape: Shape, tokens: int, recipe: str, timer: Timer, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Measure one shape with N tokens per rank; return its entry of the result file."""
    with fm.recipe(recipe):
        return _measure(shape, tokens, recipe, timer, device, dtype)


def _measure(
    shape: Shape, tokens: int, recipe: str, timer: Timer, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    work = Work(shape, tokens, device, dtype)
    reference = Reference(work)
    rows: dict[str, dict[str, Any]] = {}
    candidates: dict[str, Candidate] = {}
    wrong = WRONG[dtype.itemsize] if recipe == "bf16" else WRONG_QUANTIZED
    for name, prepare in CANDIDATES.items():
        if ONLY_FOR.get(name, recipe) != recipe:
            continue
        candidate, note = agreed(functools.partial(_tried, prepare, work))
        rows[name] = _row(name, note)
        if candidate is None:
            continue
        errors = reference.errors(candidate)
        rows[name] |= {"errors": errors, "plan": candidate.plan}
        if not (worst := max(errors.values())) < wrong:
            rows[name]["note"] = f"wrong: relative error {worst:.2g}"
            continue
        candidates[name] = candidate
        if device.type == "cuda":
            rows[name] |= _on_gpu(candidate)
    del reference
    release(device)
    times = timer.measure({name: candidate.step for name, candidate in candidates.items()})
    base = times[REFERENCE].median_ms if REFERENCE in times else None
    for name, time in times.items():
        rows[name] |= _times(time, None if name == REFERENCE else base)
        if device.type == "cuda":
            rows[name]["eager_ms"] = eager_ms(candidates[name].step)
    exchanges = {}
    if recipe == "bf16":
        exchanges = {name: _exchanges(work, candidate, timer) for name, candidate in candidates.items() if candidate.ep}
        exchanges["sorted rows"] = _exchange_of_rows(work, timer, deduplicated=False, engine=None)
    entry = asdict(shape) | {
        "tokens_per_rank": tokens,
        "recipe": recipe,
        "rows": list(rows.values()),
        "exchanges": exchanges,
    }
    del entry["tokens"]
    return entry


def eager_ms(call: Callable[[], Any], reps: int = 20) -> float:
    """Return the time of a call that begins on idle devices, with the host's time before its first launch and between
    launches: the median over the calls of the slowest rank.
    """
    taken = []
    for _ in range(reps):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return slowest(statistics.median(taken))


def _row(name: str, note: str) -> dict[str, Any]:
    figures = (
        "ms", "quartiles_ms", "exposed_ms", "x_no_communication", "eager_ms", "host_us", "host_syncs", "peak_bytes",
        "buffer_bytes", "communication", "errors", "plan",
    )  # fmt: skip
    return {"name": name, "note": note} | dict.fromkeys(figures)


def _tried(prepare: Callable[[Work], Candidate], work: Work) -> Candidate:
    candidate = prepare(work)
    candidate.step()
    return candidate


def agreed(prepare: Callable[[], Candidate]) -> tuple[Candidate | None, str]:
    """Prepare a candidate; None, with the reason, if any rank cannot.

    If only some ranks fail inside a collective, the others wait for the time-out of the group, and the run ends.
    """
    candidate, note = None, ""
    try:
        candidate = prepare()
    except Exception as raised:  # noqa: BLE001 reported in the candidate's row
        note = why_not(raised)
    notes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(notes, note)
    note = next((told for told in notes if told), "")
    return (None, note) if note else (candidate, "")


def _times(time: CallTime, base_ms: float | None) -> dict[str, Any]:
    return {
        "ms": time.median_ms,
        "quartiles_ms": time.quartiles_ms,
        "exposed_ms": None if base_ms is None else time.median_ms - base_ms,
        "x_no_communication": None if base_ms is None else time.median_ms / base_ms,
        "host_us": time.host_idle_us,
    }


def _on_gpu(candidate: Candidate) -> dict[str, Any]:
    """Return memory, host synchronisations, and the kernels that communicate; the largest of a rank."""
    _, peak = memory_of(candidate.step, candidate.dy.device)
    shared = 0 if candidate.ep is None else candidate.ep.engine.buffer_bytes()
    figures = {"peak_bytes": peak, "buffer_bytes": shared, "host_syncs": host_syncs(candidate.step)}
    return {name: int(slowest(value)) for name, value in figures.items()} | {
        "communication": communication(candidate.step, candidate.dy.device)
    }


def host_syncs(call: Callable[[], Any]) -> int:
    """Return the number of operations of a call that make the host wait for the device."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # "error" would leave the ranks in different collectives
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


_COMMUNICATES = re.compile(r"nccl|symm|kernel_(Send|Pull|Push|PushSums|Total|Signal)arch", re.IGNORECASE)
_ALONE = re.compile(r"kernel_(Send|Total|Signal)arch")  # no product runs beside these


def communication(call: Callable[[], Any], device: torch.device) -> dict[str, float] | None:
    """Return the most thread blocks, one per SM, of a kernel that communicates beside products, and the time of all
    kernels that communicate.

    A kernel waits on the device for the other ranks, so that its time may be longer than that of its transfer. None if
    the profiler does not tell.
    """
    torch.cuda.synchronize(device)
    profiler = profile(activities=[ProfilerActivity.CUDA])
    with suppress(RuntimeError):
        profiler.start()
    call()  # a collective, also on a rank whose profiler does not start
    torch.cuda.synchronize(device)
    try:
        profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(file))
            events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
        kernels = [e for e in events if e.get("cat") == "kernel" and _COMMUNICATES.search(e["name"])]
        return {
            "sms": max((e["args"]["grid"][0] for e in kernels if not _ALONE.search(e["name"])), default=0),
            "us": sum(e["dur"] for e in kernels),
        }
    except (KeyError, OSError, RuntimeError, ValueError):
        return None


# ---- single exchanges ----------------------------------------------------------------------------------------------


def _exchanges(work: Work, candidate: Candidate, timer: Timer) -> dict[str, Any]:
    """Return the times and bandwidths of an engine's exchanges of the tokens, with their ids and weights.

    If kernels exchange them, rows without an expert of the rank do not travel. Their return has no time of its own: the
    kernels that make it also sum rows.
    """
    assert candidate.ep is not None
    engine: Any = candidate.ep.engine
    if hasattr(engine, "exchange_rows"):  # rows that differ by rank
        return _exchange_of_rows(work, timer, deduplicated=True, engine=engine)
    tokens = [work.x], work.index, work.probs, work.tokens, work.here
    calls = {"gather": lambda: engine.start_gather_of_tokens(*tokens).wait_all()}
    rows = (work.ranks - 1) * work.tokens
    if engine.by_kernels:
        there = (work.of_all_ranks(work.index) // work.here == work.rank).any(1).view(work.ranks, -1)
        rows = int(slowest(int(there.sum() - there[work.rank].sum())))
    else:
        parts = work.x.repeat(work.ranks, 1)
        calls["exchange"] = lambda: engine.exchange([parts])
    return {name: _bandwidth(time, rows * work.x[0].nbytes) for name, time in timer.measure(calls).items()}


def _exchange_of_rows(work: Work, timer: Timer, deduplicated: bool, engine: Any) -> dict[str, Any]:
    """Return the time and bandwidth of an all-to-all of rows, whose numbers the hosts know."""
    rank_of_slot = work.index // work.here
    if deduplicated:
        to_rank = F.one_hot(rank_of_slot, work.ranks).amax(1)  # (N, P): 1 if a token has an expert there
    else:
        to_rank = F.one_hot(rank_of_slot, work.ranks).sum(1)
    sent = to_rank.sum(0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    rows = work.x.repeat_interleave(to_rank.sum(1), 0)
    splits = sent.tolist(), received.tolist()
    send = all_to_all.exchanged if engine is None else engine.exchange_rows
    time = timer.measure({"exchange": functools.partial(send, rows, *splits)})["exchange"]
    others = sum(splits[0]) - splits[0][work.rank]
    return {"exchange": _bandwidth(time, int(slowest(others)) * work.x[0].nbytes)}


def _bandwidth(time: CallTime, nbytes: int) -> dict[str, float]:
    """Return the figures of an exchange that sends ``nbytes`` to other ranks."""
    return {"ms": time.median_ms, "bytes": nbytes, "gb_s": nbytes / time.median_ms / 1e6}


def lines(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the text of an entry."""
    yield (
        f"\n{entry['name']}, {entry['recipe']}: {entry['tokens_per_rank']} tokens per rank, hidden {entry['hidden']}, "
        f"intermediate {entry['intermediate']}, {entry['experts']} experts, top {entry['top_k']}"
    )
    for row in entry["rows"]:
        figures = ""
        if row["ms"]:
            figures = f"{row['ms']:9.3f} ms"
            figures += f"  exposed {row['exposed_ms']:8.3f} ms" if row["exposed_ms"] is not None else " " * 21
            figures += f"  eager {row['eager_ms']:.3f} ms" if row["eager_ms"] is not None else ""
            figures += f"  host {row['host_us']:6.0f} us"
            if row["peak_bytes"] is not None:
                nbytes = row["peak_bytes"] + row["buffer_bytes"]
                figures += f"  peak {nbytes / 2**20:6.0f} MiB  host syncs {row['host_syncs']}"
            if row["communication"]:
                figures += f"  SMs {row['communication']['sms']}"
            figures += f"  error {max(row['errors'].values()):.1e}"
        yield f"  {row['name']:26}{figures}{row['note']}"
    for name, found in entry["exchanges"].items():
        for what, figures in found.items():
            yield f"  {name}, {what} alone: {figures['ms']:.3f} ms, {figures['gb_s']:.1f} GB/s each way"
