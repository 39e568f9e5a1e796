"""A model on paper of one MoE layer's training step under expert parallelism, for 2 to 512 GPUs.

`benchmarks.ep_model_page` writes it into docs/expert_parallel.md. Times of links are those of two GPUs, or
assumptions (`NCCL`, `PEER`, `SLOW_LINK`). Times of experts are scaled from ``layer.json``. Nothing that it says
of more than two GPUs was measured.

A step has four exchanges: the tokens are gathered and their results return, in forward; the gradients of the results
are gathered and those of the tokens return, in backward. The routing is uniform, and every rank has equally many rows.

Axes: P ranks, G ranks of a node, D nodes, N tokens per rank, K experts per token, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import shapes
from benchmarks.ep import DEEPSEEK_V3
from benchmarks.shapes import Shape
from fusedmoe.builtin_rules.exchange.beside import LATENCY_US, LINK_GB_S
from fusedmoe.commands.bench.layer import OURS
from fusedmoe.commands.bench.measure import FORWARD, STEP

GPUS = (2, 8, 64, 512)
NODE = 8  # GPUs that NVLink connects
TOKENS = 8192  # N
NUMBER_BYTES = 2  # bf16
LAYERS = ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3")


def layers() -> dict[str, Shape]:
    """Return the layers of the model, by name."""
    known = shapes.load() | {DEEPSEEK_V3.name: DEEPSEEK_V3}
    return {name: known[name] for name in LAYERS}


# ---- links ---------------------------------------------------------------------------------------------------------


class Link:
    """The time of a transfer: straight lines between (bytes, us) of some sizes, the last of which goes on."""

    def __init__(self, *points: tuple[float, float]) -> None:
        self.points = points

    @classmethod
    def line(cls, latency_us: float, gb_s: float) -> Link:
        return cls((0, latency_us), (2**30, latency_us + 2**30 / gb_s / 1e3))

    def ms(self, nbytes: float) -> float:
        """Return the time of a transfer; nothing is no transfer."""
        if nbytes <= 0:
            return 0.0
        place = next((i for i, (size, _) in enumerate(self.points[1:-1], start=1) if nbytes <= size), -1)
        (size0, us0), (size1, us1) = self.points[place - 1], self.points[place]
        return (us0 + (us1 - us0) * (nbytes - size0) / (size1 - size0)) / 1e3


# Measured on two H200s of one host in November 2026 (NVLink, torch 2.11, NCCL 2.28.9). Half of NCCL's buffer goes to
# the peer: all_to_all_single of 16 MiB, 256 MiB and 1 GiB had 159, 279 and 332 GB/s each way. The latency is that of an
# all-gather of 1 KiB.
NCCL_GB_S = {2**23: 159, 2**27: 279, 2**29: 332}  # bytes to the peer: GB/s
NCCL_LATENCY_US = 26.0
NCCL = Link((0, NCCL_LATENCY_US), *((size, size / gb_s / 1e3) for size, gb_s in NCCL_GB_S.items()))
# An exchange by the kernels of `"symmetric"`, with the figures by which its rules divide rows.
PEER = Link.line(LATENCY_US, LINK_GB_S)
# Assumptions: InfiniBand of 400 Gb/s per GPU, and its latency. The host reads numbers of rows, and launches the rest.
SLOW_GB_S, SLOW_LATENCY_US, HOST_SYNC_US = 50.0, 50.0, 100.0
SLOW_LINK = Link.line(SLOW_LATENCY_US, SLOW_GB_S)


# ---- copies of a token ---------------------------------------------------------------------------------------------


def chance(shape: Shape, parts: float) -> float:
    """``1 - C(E - E/parts, K) / C(E, K)``: the chance that a token chooses an expert of one of equal parts."""
    here = round(shape.experts / parts)
    return 1 - math.comb(shape.experts - here, shape.top_k) / math.comb(shape.experts, shape.top_k)


@dataclass(frozen=True)
class Copies:
    """Copies of a token's row that a rank gets in one exchange, over NVLink and over the slow link, per token."""

    fast: float
    slow: float = 0.0

    @property
    def total(self) -> float:
        return self.fast + self.slow


@dataclass(frozen=True)
class Ranks:
    """P ranks in D nodes of G."""

    ranks: int

    @property
    def of_node(self) -> int:
        return min(self.ranks, NODE)

    @property
    def nodes(self) -> int:
        return self.ranks // self.of_node

    def direct(self, per_rank: float) -> Copies:
        """Return the copies if each other rank sends ``per_rank`` of them itself."""
        return Copies(per_rank * (self.of_node - 1), per_rank * (self.ranks - self.of_node))


def ranks_of(shape: Shape, gpus: int) -> Ranks:
    """Return the ranks that share a layer's experts: each has at least one. More GPUs have replicas of them."""
    return Ranks(min(gpus, shape.experts))


# ---- engines -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """A way to exchange tokens.

    Attributes
    ----------
    traffic
        The copies of a gather and of a return, for a layer and ranks.
    local_rows
        Rows that a rank reads or writes in its own memory, per token and step, beyond those of the layer on one GPU.
    sent_rows
        The same as a part of one gather, which overlaps as that does.
    of_package
        Whether ``fusedmoe`` has it.
    beside
        The share of a product's rows that are computed while other rows travel, 0 for none.
    """

    name: str
    traffic: Callable[[Shape, Ranks], tuple[Copies, Copies]]
    local_rows: Callable[[Shape, Ranks], float]
    sent_rows: float = 0
    of_package: bool = True
    beside: Callable[[Ranks], float] = lambda ranks: 0
    host_syncs: int = 0
    fast: Link = NCCL
    forwards: bool = False  # whether what came over the slow link goes on over NVLink
    several_nodes: bool = True

    def runs(self, ranks: Ranks) -> bool:
        return ranks.nodes == 1 or self.several_nodes

    def ms(self, copies: Copies, row_bytes: float) -> float:
        """Return the time of an exchange. Both links work at the same time."""
        fast, slow = self.fast.ms(copies.fast * row_bytes), SLOW_LINK.ms(copies.slow * row_bytes)
        return max(fast, slow) + (NCCL_LATENCY_US / 1e3 if self.forwards and slow else 0)


def _all_tokens(shape: Shape, ranks: Ranks) -> tuple[Copies, Copies]:
    """Every rank gets all tokens. In a gather, a row enters a node once, and is then forwarded; results do not."""
    p, g = ranks.ranks, ranks.of_node
    return Copies(p - 1, (p - g) / g), ranks.direct(1)


def _pulled(shape: Shape, ranks: Ranks) -> tuple[Copies, Copies]:
    """A rank reads the tokens that chose one of its experts. The sums of all tokens return."""
    return ranks.direct(chance(shape, ranks.ranks)), ranks.direct(1)


def _deduplicated(shape: Shape, ranks: Ranks) -> tuple[Copies, Copies]:
    copies = ranks.direct(chance(shape, ranks.ranks))
    return copies, copies


def _by_node(shape: Shape, ranks: Ranks) -> tuple[Copies, Copies]:
    """One copy per node over the slow link, to the rank with the sender's place in its node, which sends it on."""
    d, g = ranks.nodes, ranks.of_node
    copies = Copies(d * (g - 1) * chance(shape, ranks.ranks), (d - 1) * chance(shape, d))
    return copies, copies


def _local_all(shape: Shape, ranks: Ranks) -> float:
    """Two sums read P parts and write one row; combine and the gradient of dispatch write P rows instead of one."""
    return 2 * (ranks.ranks + 1) + 2 * (ranks.ranks - 1)


def _local_parts(shape: Shape, ranks: Ranks) -> float:
    """Twice: the sums for other ranks are written, and the parts that come in place of them are read."""
    return 2 * 2 * (ranks.ranks - 1)


def _local_copies(traffic: Callable[[Shape, Ranks], tuple[Copies, Copies]]) -> Callable[[Shape, Ranks], float]:
    """Twice: the copies are packed before they leave, written as results, and summed where they return."""

    def rows(shape: Shape, ranks: Ranks) -> float:
        copies = traffic(shape, ranks)[0].total
        return 2 * (2 * copies + copies + copies + 2)

    return rows


def _own(ranks: Ranks) -> float:
    """The rows of this rank's tokens."""
    return 1 / ranks.ranks


def _all_but_one(ranks: Ranks) -> float:
    """Rank by rank: the rows of the last rank that arrives, or of the first that leaves, hide nothing."""
    return 1 - 1 / ranks.ranks


SYMMETRIC = Engine(
    "symmetric", _pulled, _local_parts, sent_rows=3, beside=_all_but_one, fast=PEER, several_nodes=False
)  # fmt: skip
ALLGATHER = Engine("allgather", _all_tokens, _local_all, beside=_own)
ALLTOALL = Engine("alltoall", _deduplicated, _local_copies(_deduplicated), host_syncs=1)
HIERARCHICAL = Engine(
    "hierarchical", _by_node, _local_copies(_by_node), of_package=False, beside=_own, forwards=True
)  # fmt: skip
ENGINES = (SYMMETRIC, ALLGATHER, ALLTOALL, HIERARCHICAL)


# ---- experts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rate:
    """The measured speed of a layer on one GPU, without its router where that was measured."""

    measured: str  # the shape
    forward_tflops: float
    backward_tflops: float

    def ms(self, shape: Shape, tokens: int) -> tuple[float, float]:
        """Return the times of forward and backward of ``tokens * K`` rows."""
        flops = shape.forward_flops(tokens * shape.top_k)
        return flops / self.forward_tflops / 1e9, 2 * flops / self.backward_tflops / 1e9


def rate(results: dict[str, Any], shape: Shape) -> Rate:
    """Return the speed of a layer from ``layer.json``: of the shape, or of the one whose experts' size is nearest."""
    size = shape.hidden * shape.intermediate
    found = min(
        results["shapes"],
        key=lambda s: (s["name"] != shape.name, abs(math.log(s["hidden"] * s["intermediate"] / size))),
    )
    ms = {row["case"]: row["ms"] for row in found["rows"] if row["name"] == OURS}
    router, same = results["router"], ("tokens", "hidden", "experts", "top_k")
    if all(router[field] == found[field] for field in same):
        for row in router["rows"]:
            if row["name"] == OURS:
                ms[row["case"]] -= row["ms"]
    flops = Shape(**{field: found[field] for field in Shape.__dataclass_fields__}).forward_flops()
    return Rate(found["name"], flops / ms[FORWARD] / 1e9, 2 * flops / (ms[STEP] - ms[FORWARD]) / 1e9)


# ---- a step --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The prediction of one step. Times are in ms. ``row_bytes`` are those of all tokens of a rank."""

    engine: Engine
    ranks: Ranks
    gather: Copies
    back: Copies
    row_bytes: int
    forward_ms: float
    backward_ms: float
    gather_ms: float
    return_ms: float
    local_ms: float
    sync_ms: float

    @property
    def compute_ms(self) -> float:
        return self.forward_ms + self.backward_ms

    @property
    def around_ms(self) -> float:
        """The time of passes over memory and of waiting hosts, which nothing hides."""
        return self.local_ms + self.sync_ms

    @property
    def exposed_ms(self) -> float:
        """The time of communication without overlap."""
        return 2 * (self.gather_ms + self.return_ms) + self.around_ms

    @property
    def overlapped_ms(self) -> float:
        """The time of communication that the stages of the layer do not hide.

        The rows ``beside`` of FC1 hide the gather, those of FC2 the return, and those of the gradient of FC2 the gather
        in backward. FC1's weight gradient hides the return of the gradients.
        """
        share = self.engine.beside(self.ranks)
        stages = (
            (self.gather_ms, self.forward_ms * 2 / 3 * share),
            (self.return_ms, self.forward_ms / 3 * share),
            (self.gather_ms, self.backward_ms / 6 * share),
            (self.return_ms, self.backward_ms / 3 if share else 0.0),
        )
        return sum(max(0.0, ms - hidden) for ms, hidden in stages) + self.around_ms

    @property
    def ms(self) -> float:
        """The time of the step."""
        return self.compute_ms + self.overlapped_ms


def predict(results: dict[str, Any], shape: Shape, gpus: int, engine: Engine, tokens: int = TOKENS) -> Step:
    """Predict a step of a layer."""
    ranks, row = ranks_of(shape, gpus), tokens * shape.hidden * NUMBER_BYTES
    forward_ms, backward_ms = rate(results, shape).ms(shape, tokens)
    gather, back = engine.traffic(shape, ranks)
    pass_ms = row / results["ceiling"]["copy_tb_s"] / 1e9  # reads or writes a row per token
    return Step(
        engine, ranks, gather, back, row, forward_ms, backward_ms,
        gather_ms=engine.ms(gather, row) + engine.sent_rows * pass_ms,
        return_ms=engine.ms(back, row),
        local_ms=engine.local_rows(shape, ranks) * pass_ms,
        sync_ms=engine.host_syncs * HOST_SYNC_US / 1e3,
    )  # fmt: skip


def steps(results: dict[str, Any], shape: Shape, gpus: int) -> dict[str, Step]:
    """Return the prediction of each engine that can run."""
    ranks = ranks_of(shape, gpus)
    running = [e for e in ENGINES if e.runs(ranks) and (e is not HIERARCHICAL or ranks.nodes > 1)]
    return {engine.name: predict(results, shape, gpus, engine) for engine in running}


def best(found: Iterable[Step]) -> Step:
    """Return the fastest step of an engine of the package."""
    return min((step for step in found if step.engine.of_package), key=lambda step: step.ms)


# ---- comparison with measured steps ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """A step of ``ep.json``, and its prediction with experts as fast as measured there without communication."""

    machine: str
    commit: str
    layer: str
    tokens: int
    engine: Engine
    measured_ms: float
    predicted_ms: float

    @property
    def deviation(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def checks(results: dict[str, Any], measured: Iterable[dict[str, Any]]) -> list[Check]:
    """Compare the predicted communication with each ``ep.json`` that has a step without communication."""
    found = []
    for of_gpu in measured:
        for entry in of_gpu["shapes"]:
            if entry["recipe"] != "bf16":
                continue
            times = {row["name"]: row["ms"] for row in entry["rows"] if row["ms"]}
            shape, without = layers().get(entry["name"]), times.get("no communication")
            if shape is None or without is None:
                continue
            for engine in ENGINES:
                if engine.name in times:
                    step = predict(results, shape, of_gpu["ranks"], engine, entry["tokens_per_rank"])
                    factor = without / step.compute_ms
                    ms = replace(step, forward_ms=factor * step.forward_ms, backward_ms=factor * step.backward_ms).ms
                    named = of_gpu["machine"], of_gpu["commit"], shape.name, entry["tokens_per_rank"], engine
                    found.append(Check(*named, times[engine.name], ms))
    return found


# ---- memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Buffers:
    """Bytes on a rank, for one layer.

    Attributes
    ----------
    weights
        Those of the rank's experts, in bf16.
    gathered
        The tokens of all ranks, the results of this rank's experts for them, and those that it gets from all ranks.
    arriving
        The tokens that arrive with one copy per token and rank.
    most_rows
        The experts' rows (preactivation, activated rows, result), as many as any routing needs: ``P * N * min(K, E /
        P)``.
    """

    weights: float
    gathered: float
    arriving: float
    most_rows: float


def buffers(shape: Shape, gpus: int, tokens: int = TOKENS) -> Buffers:
    """Return the bytes of a layer's buffers."""
    p, row = ranks_of(shape, gpus).ranks, tokens * shape.hidden * NUMBER_BYTES
    of_row = (3 * shape.intermediate + shape.hidden) * NUMBER_BYTES
    return Buffers(
        weights=shape.experts // p * 3 * shape.hidden * shape.intermediate * NUMBER_BYTES,
        gathered=3 * p * row,
        arriving=(p - 1) * chance(shape, p) * row,
        most_rows=p * tokens * min(shape.top_k, shape.experts // p) * of_row,
    )
