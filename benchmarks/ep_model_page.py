"""docs/expert_parallel_scale.md: expert parallelism on 2 to 512 GPUs, as `benchmarks.ep_model` predicts it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import ep_check, ep_model
from benchmarks.ep_check import Check
from benchmarks.ep_model import (
    ALLGATHER,
    ALLTOALL,
    BARRIER_US,
    GPUS,
    HIERARCHICAL,
    HOST_SYNC_US,
    KERNEL_GB_S,
    NCCL_GB_S,
    NCCL_LATENCY_US,
    NODE,
    PULL_GB_S,
    PUSH_GB_S,
    SLOW_GB_S,
    SLOW_LATENCY_US,
    SORTED,
    SYMMETRIC,
    TOKENS,
    Step,
)
from benchmarks.marked import table
from benchmarks.shapes import Shape
from fusedmoe.expert_parallel.engine import expected_share
from fusedmoe.expert_parallel.symmetric import FEW

SHOWN = (ALLGATHER, ALLTOALL, SORTED, HIERARCHICAL)
Found = dict[tuple[str, int], dict[str, Step]]  # by layer and the fewest GPUs with these ranks, and by engine
INTRODUCTION = """\
# Expert parallelism at scale, on paper

This page predicts one training step of one MoE layer on 2 to 512 GPUs, for each way to exchange tokens. **All
figures are predicted, except where a table says *measured*. Nobody has run [expert parallelism](expert_parallel.md)
of `fusedmoe` on more than two GPUs, or on several hosts.** The model is `benchmarks/ep_model.py`. `python -m
benchmarks --only ep-model` prints this page in seconds, without a GPU. `python -m benchmarks.page` writes it.

A step has four exchanges. Forward gathers the tokens and returns their results. Backward gathers the gradients of
the results and returns those of the tokens. The choice of experts is uniform and random, rows are bf16, and each
rank has {tokens} tokens.

P ranks share E experts, each rank has N tokens, and a token chooses K experts. A node has {node} GPUs.

{layers}

A rank has at least one expert. So P is at most E, and more GPUs have replicas of the experts, which exchange no
tokens.
"""
SOURCES = """\
## Measured and assumed

{sources}

The model leaves out: launches and waiting hosts, except for the row above; expert ids and routing weights, 8 K
bytes per copy of a token; the exchange of the gradients of routing weights, 4 K bytes; SMs that NCCL's kernels take
from the products; ranks with more rows than others; the traffic of other parts of the model. Products are assumed
to run at the same speed on more rows per expert.
"""
CHECK = """\
## Check against measurements

{checks}

- *no communication* is dispatch, experts and combine on rows that are there already. *All-to-all by hand* sends rows
  sorted by expert, without deduplication, over NCCL to experts in plain torch (*unfused*) or in `fusedmoe`.
- *exposed* is the time of the step minus that of *no communication*. That of *unfused* includes its slower experts.
- *first* are measurements on two H200s from before the benchmark section
  [`ep`](benchmarks.md#expert-parallelism).{later}
- The speed of the experts is that of `layer.json`, from single calls. Sustained calls are slower on these GPUs, by
  their power limit. The model adds nothing for this.
{other_gpu}- Where no host waits for its device, the model is off by up to {worst}.
- Where a host waits, it is off by up to {waiting}. Such a host
  launches the rest of the step late. This takes as long as the host does, and the model has `HOST_SYNC_US` for it.
- **Two engines whose predictions differ by less than {margin:.0%} are equal on this page. An engine whose host waits
  may be slower than predicted.**
"""
LATER = " The others are those of that section."
OTHER_GPU = """\
- On another GPU than that of `layer.json`, the experts of the prediction take the time of *no communication* in the
  `ep.json` of that GPU, and plain torch is slower by the same factor: so all rows except *unfused* check communication
  alone.
"""
BYTES = """\
## Bytes

Copies of a token's row that leave a rank, and arrive, in one exchange:

- `allgather`: P - 1.
- `alltoall` sends a token once to each rank that has one of its experts: (P - 1) (1 - C(E - E/P, K) / C(E, K)).
  This is about (P - 1) (1 - (1 - 1/P)^K).
- `symmetric`: as `allgather` with copy engines. Where a rank has an expert of at most {few:.0%} of the tokens, a
  kernel reads these alone: as `alltoall`.
- *sorted* sends a row for each chosen expert, as an all-to-all of rows sorted by expert does: K (P - 1) / P.
- *hierarchical* sends a token once to each node that has one of its experts, to the GPU with the sender's place in
  that node. This GPU sends it on over NVLink. With D nodes: (D - 1) (1 - C(E - E/D, K) / C(E, K)) over the slow
  link.

{copies}

*+* separates copies over NVLink from copies over the slow link. An all-gather passes each row once into a node. The
results of all ranks return to the token's rank one by one, over the slow link: the column has this direction.

{megabytes}

MB per rank and direction, of one return. A gather is the same, except that of `allgather` on several nodes.
"""
TIMES = """\
## Times

{times}

Milliseconds of forward + backward. *gather* and *return* are one exchange of each kind. *experts* are dispatch,
products and combine. *exposed* is the time of communication that adds to the step, with the passes over memory that
pack and sum:

- *none*: no overlap.
- *stages*: products run while tokens travel, as the kernels of sm_90 do. FC1 of the own tokens hides the gather of
  the others. FC2 of the own tokens runs last and hides the return of other results. In backward, the gradient of
  FC2 of the own tokens hides the gather, and the weight gradient of FC1 hides the return.
- *least*: a bound for every schedule of one layer. All products hide all exchanges.

*step* is the prediction with the overlap that the engine has: *stages* for `symmetric` and `allgather`, *none* for
`alltoall` and *sorted*. *hierarchical* is not in `fusedmoe`. Its step is with *stages*.
"""
CHOICE = """\
## Which engine

{choice}

The first engine is the fastest one of `fusedmoe`. Those after *or* are less than {margin:.0%} slower, which this
model cannot tell apart. The last column is the step of the fastest engine divided by that of *hierarchical*. The model
cannot tell these two apart where the column is below {ratio:.2f}.

- **Two GPUs**: in the model, the stages hide all exchanges of `symmetric` and `allgather`. The copies of `symmetric`
  take no SM from the products. [Expert parallelism](benchmarks.md#expert-parallelism) has the measured steps.
- **One node of {node}**: `symmetric` has the shortest steps. If K = P = {node}, it reads {read:.0%} of the rows. The
  own tokens are an eighth of the rows, and hide little: between {hidden_least:.0%} and {hidden_most:.0%} of the
  exchanges are hidden. *least* says that a product which follows the arriving ranks one by one could hide at least
  {bound_least:.0%}. For K much less than P, as in Mixtral, `symmetric` and `alltoall` send a quarter of the bytes of
  `allgather`.
- **Several nodes: not `allgather`.** It sends {ratio_64:.0f} times the bytes of `alltoall` on 64 GPUs
  with the experts of Qwen3, and {ratio_512:.0f} times on 128. Its steps take {slow_least:.1f} to {slow_most:.1f}
  times as long. Its buffers alone are gigabytes.
- **Several nodes: keep the ranks of a layer in one node, if the experts fit.** A group of {node} ranks in each node
  has the steps of {node} GPUs on this page. A rank then has {weights_30b:.2f} GB of weights in each layer of
  Qwen3-30B-A3B, and {weights_v3:.1f} GB in each layer of DeepSeek-V3, besides gradients and the state of the
  optimizer.
- **If they do not fit, exchanges take longer than products, with every engine of `fusedmoe`.** With {slow:.0f} GB/s
  per GPU, the exchanges of `alltoall`
  take {share_least:.1f} to {share_most:.1f} times the experts' time. Here hierarchical dispatch, such as that of
  DeepEP, has to come in: for DeepSeek-V3 on 64 GPUs it sends {by_node_64:.0%} of the bytes of `alltoall` over the
  slow link. On 512 GPUs it sends {by_node_512:.0%}, since a token's experts are then on almost as many nodes as
  ranks.
- Even then exchanges are longer than products. It takes more than this model has: routing that limits the nodes of
  a token (DeepSeek-V3 allows 4: at most 4 copies, instead of {copies_64:.1f} on 64 GPUs and {copies_512:.1f} on
  512), tokens in FP8, or attention of another micro-batch beside the exchange.
"""
MEMORY = """\
## Memory

{memory}

GB per rank, for one layer and {tokens} tokens per rank. *weights* are those of the experts, in bf16. *tokens* and
*parts* are those of all ranks, which `allgather` and `symmetric` gather and return; backward has buffers of the
same size. *shared* are the two buffers of `symmetric`, one pair for all layers. *arriving* are the tokens that
`alltoall` gets. *rows* are the preactivations, activated rows and results of the experts, for N K rows on each
rank, and for the P N min(K, E/P) rows that any routing can need. The last column grows with P: on several nodes,
`allgather` needs a capacity. `alltoall` has the rows that arrive, N K under even routing.
"""
UNTESTED = """\
## Untested

- More than two GPUs. NVLink is assumed to give each GPU the same bandwidth when it talks to seven others.
- Several hosts. The bandwidth of InfiniBand is its nominal one, without congestion. Its latency is a guess.
- Hierarchical dispatch. Its two links are assumed to work at the same time, and to be packed perfectly.
"""


def render(results: dict[str, Any], measured: Sequence[dict[str, Any]] = ()) -> str:
    """Return the page, from ``layer.json`` and the ``ep.json`` of each GPU that has one."""
    layers = ep_model.layers()
    found: Found = {
        (name, gpus): ep_model.steps(results, layer, gpus)
        for name, layer in layers.items()
        for gpus in GPUS
        if gpus in (2, NODE) or _ranks(layer, gpus) > NODE
    }
    compared = ep_check.checks(results, measured)
    margin = math.ceil(20 * abs(_worst(compared, host_waits=False).deviation)) / 20
    text = [
        INTRODUCTION.format(tokens=TOKENS, node=NODE, layers=_layers(results, layers)),
        SOURCES.format(sources=_sources(results)),
        _check(results, compared, margin),
        BYTES.format(few=FEW, copies=_copies(layers, found), megabytes=_megabytes(found)),
        TIMES.format(times=_times(found)),
        CHOICE.format(
            choice=_choice(found, margin),
            margin=margin,
            ratio=1 + margin,
            node=NODE,
            slow=SLOW_GB_S,
            **_figures(layers, found),
        ),
        MEMORY.format(memory=_memory(layers, found), tokens=TOKENS),
        UNTESTED,
    ]
    return "\n".join(text)


def _ranks(layer: Shape, gpus: int) -> int:
    return ep_model.ranks_of(layer, gpus).ranks


def _head(name: str, gpus: int) -> list[str]:
    """Return the first cells of a row: the layer, and all numbers of GPUs with the same ranks."""
    layer = ep_model.layers()[name]
    p = _ranks(layer, gpus)
    same = [n for n in GPUS if _ranks(layer, n) == p]
    return [name, ", ".join(map(str, same)) + (f" (P = {p})" if same != [p] else "")]


def _layers(results: dict[str, Any], layers: dict[str, Shape]) -> str:
    rows = []
    for name, s in layers.items():
        rate = ep_model.rate(results, s)
        tflops = f"{rate.forward_tflops:.0f}, {rate.backward_tflops:.0f}"
        rows.append([name, *map(str, (s.hidden, s.intermediate, s.experts, s.top_k)), tflops, rate.measured])
    return table(["layer", "H", "I", "E", "K", "TFLOP/s, forward and backward", "measured on"], rows)


def _sources(results: dict[str, Any]) -> str:
    gpus = "measured on two H200s of one host, November 2026"
    nccl = ", ".join(f"{gb_s} GB/s ({size >> 20} MiB to the peer)" for size, gb_s in NCCL_GB_S.items())
    rows = [
        ["NCCL over NVLink, each way", f"{nccl}, {NCCL_LATENCY_US:.0f} us", gpus],
        ["copy engine over NVLink, each way", f"{PULL_GB_S} GB/s from the peer ({PUSH_GB_S} to it)", gpus],
        ["kernel that reads rows over NVLink, each way", f"{KERNEL_GB_S} GB/s from the peer", gpus],
        ["barrier of symmetric memory", f"{BARRIER_US} us", gpus],
        [
            "speed of the experts and of copies",
            f"the table above; {results['ceiling']['copy_tb_s']:.1f} TB/s read and written",
            f"measured on one {results['machine']}, `layer.json` (commit {results['commit'][:12]}); for a layer that "
            "it does not have, the one whose experts' size is nearest",
        ],
        ["NVLink between more than two GPUs", "as between two", "**assumed**"],
        ["link between nodes (`SLOW_GB_S`)", f"{SLOW_GB_S:.0f} GB/s per GPU: InfiniBand of 400 Gb/s", "**assumed**"],
        ["its latency (`SLOW_LATENCY_US`)", f"{SLOW_LATENCY_US:.0f} us", "**assumed**"],
        ["a host that reads numbers of rows (`HOST_SYNC_US`)", f"{HOST_SYNC_US:.0f} us", "**assumed**"],
    ]
    return table(["", "value", "source"], rows)


def _worst(compared: Iterable[Check], host_waits: bool) -> Check:
    return max((c for c in compared if c.host_waits is host_waits), key=lambda check: abs(check.deviation))


def _stated(check: Check) -> str:
    case = check.case
    return f"{abs(check.deviation):.0%}: *{check.what}* of {case.layer} with {case.tokens} tokens per GPU"


def _check(results: dict[str, Any], compared: Sequence[Check], margin: float) -> str:
    """Return the section that compares the model with measurements."""
    other_gpu = any(ep_check.other_gpu(results, check.case.machine) for check in compared)
    return CHECK.format(
        checks=_checks(compared),
        later=LATER if len({check.case.source for check in compared}) > 1 else "",
        other_gpu=OTHER_GPU if other_gpu else "",
        worst=_stated(_worst(compared, host_waits=False)),
        waiting=_stated(_worst(compared, host_waits=True)),
        margin=margin,
    )


def _checks(compared: Iterable[Check]) -> str:
    rows = []
    for check in compared:
        case, exposed = check.case, (check.measured_exposed_ms, check.predicted_exposed_ms)
        rows.append(
            [
                case.layer, str(case.ranks), str(case.tokens), check.what, f"{check.measured_ms:.1f}",
                f"{check.predicted_ms:.1f}", f"{check.deviation:+.0%}",
                *("" if ms is None else f"{ms:.1f}" for ms in exposed), f"{case.machine}, {case.source}",
            ]
        )  # fmt: skip
    head = ["layer", "GPUs", "tokens per GPU", "", "measured, ms", "predicted, ms", "deviation"]
    return table([*head, "exposed: measured, ms", "predicted, ms", "measurement"], rows)


def _both(copies: ep_model.Copies) -> str:
    return f"{copies.fast:.2f} + {copies.slow:.2f}" if copies.slow else f"{copies.fast:.2f}"


def _copies(layers: dict[str, Shape], found: Found) -> str:
    rows = []
    for (name, gpus), steps in found.items():
        p = next(iter(steps.values())).ranks.ranks
        about = (p - 1) * expected_share(p, layers[name].top_k)
        cells = [_both(steps[e.name].back) if e.name in steps else "" for e in SHOWN]
        rows.append([*_head(name, gpus), *cells[:2], f"{about:.2f}", *cells[2:]])
    return table(["layer", "GPUs", "allgather", "alltoall", "about", "sorted", "hierarchical"], rows)


def _megabytes(found: Found) -> str:
    rows = []
    for (name, gpus), steps in found.items():
        sizes = [f"{steps[e.name].back.total * steps[e.name].row_bytes / 1e6:.0f}" if e.name in steps else ""
                 for e in SHOWN]  # fmt: skip
        rows.append([*_head(name, gpus), *sizes])
    return table(["layer", "GPUs", *(e.name for e in SHOWN)], rows)


def _times(found: Found) -> str:
    rows = []
    for (name, gpus), steps in found.items():
        for engine, step in steps.items():
            times = step.gather_ms, step.return_ms, step.compute_ms
            exposed = step.exposed_ms, step.overlapped_ms, step.least_ms
            rows.append([*_head(name, gpus), engine, *(f"{ms:.2f}" for ms in (*times, *exposed, step.ms))])
    head = ["layer", "GPUs", "engine", "gather", "return", "experts"]
    return table([*head, "exposed: none", "stages", "least", "step"], rows)


def _choice(found: Found, margin: float) -> str:
    rows = []
    for (name, gpus), steps in found.items():
        best = ep_model.best(steps.values())
        close = [
            f"`{s.engine.name}`"
            for s in steps.values()
            if s is not best and s.engine.of_package and s.ms < (1 + margin) * best.ms
        ]
        by_node = steps.get(HIERARCHICAL.name)
        rows.append(
            [
                *_head(name, gpus), f"`{best.engine.name}`" + (f" or {', '.join(close)}" if close else ""),
                f"{best.ms:.1f}", f"{best.compute_ms / best.ms:.0%}",
                f"{best.ms / by_node.ms:.2f}" if by_node else "",
            ]
        )  # fmt: skip
    return table(["layer", "GPUs", "engine", "step, ms", "experts in it", "x hierarchical"], rows)


def _figures(layers: dict[str, Shape], found: Found) -> dict[str, float]:
    """Return the figures in the text below the table of the choice."""
    in_a_node = [steps[SYMMETRIC.name] for (_, gpus), steps in found.items() if gpus == NODE]
    hidden = [1 - (s.overlapped_ms - s.around_ms) / (s.exposed_ms - s.around_ms) for s in in_a_node]
    bound = [1 - (s.least_ms - s.around_ms) / (s.exposed_ms - s.around_ms) for s in in_a_node]
    over_nodes = [steps for steps in found.values() if HIERARCHICAL.name in steps]
    slower = [steps[ALLGATHER.name].ms / steps[ALLTOALL.name].ms for steps in over_nodes]
    share = [2 * (s.gather_ms + s.return_ms) / s.compute_ms for s in (steps[ALLTOALL.name] for steps in over_nodes)]
    qwen3, deepseek = ep_model.LAYERS[0], ep_model.LAYERS[-1]

    def copies(name: str, gpus: int, engine: ep_model.Engine) -> ep_model.Copies:
        return found[name, gpus][engine.name].back

    by_node = {
        gpus: copies(deepseek, gpus, HIERARCHICAL).slow / copies(deepseek, gpus, ALLTOALL).slow for gpus in (64, 512)
    }
    return {
        "hidden_least": min(hidden), "hidden_most": max(hidden), "bound_least": min(bound),
        "slow_least": min(slower), "slow_most": max(slower), "share_least": min(share), "share_most": max(share),
        "ratio_64": copies(qwen3, 64, ALLGATHER).total / copies(qwen3, 64, ALLTOALL).total,
        "ratio_512": copies(qwen3, 512, ALLGATHER).total / copies(qwen3, 512, ALLTOALL).total,
        "by_node_64": by_node[64], "by_node_512": by_node[512],
        "weights_30b": ep_model.buffers(layers[qwen3], NODE).weights / 1e9,
        "weights_v3": ep_model.buffers(layers[deepseek], NODE).weights / 1e9,
        "read": expected_share(NODE, NODE),
        "copies_64": copies(deepseek, 64, HIERARCHICAL).slow, "copies_512": copies(deepseek, 512, HIERARCHICAL).slow,
    }  # fmt: skip


def _memory(layers: dict[str, Shape], found: Found) -> str:
    rows = []
    for name, gpus in found:
        b = ep_model.buffers(layers[name], gpus)
        sizes = b.weights, b.gathered, b.parts, b.shared, b.arriving, b.rows, b.most_rows
        rows.append([*_head(name, gpus), *(f"{nbytes / 1e9:.2f}" for nbytes in sizes)])
    head = ["layer", "GPUs", "weights", "tokens", "parts", "shared", "arriving", "rows", "rows of any routing"]
    return table(head, rows)
