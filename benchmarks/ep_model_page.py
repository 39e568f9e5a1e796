"""Part of docs/expert_parallel.md: steps on 2 to 512 GPUs, as `benchmarks.ep_model` predicts them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks import ep_model
from benchmarks.ep_model import (
    ALLGATHER,
    ALLTOALL,
    GPUS,
    HIERARCHICAL,
    HOST_SYNC_US,
    NCCL_GB_S,
    NCCL_LATENCY_US,
    NODE,
    SLOW_GB_S,
    SLOW_LATENCY_US,
    SYMMETRIC,
    TOKENS,
    Check,
    Step,
)  # fmt: skip
from benchmarks.marked import table
from benchmarks.shapes import Shape
from fusedmoe.builtin_rules.exchange.beside import LATENCY_US, LINK_GB_S

Found = dict[tuple[str, int], dict[str, Step]]  # by layer and the fewest GPUs with these ranks, and by engine
SECTION = """\
Milliseconds of one training step of one MoE layer, {tokens} tokens per rank, bf16 rows, uniform random routing. P ranks
share E experts, and a token chooses K of them. A node has {node} GPUs. More GPUs than experts have replicas, which
exchange no tokens.

{choice}

The first engine is the fastest one of `fusedmoe`; the model cannot tell those after *or* apart, less than {margin:.0%}
slower. *experts* is the time without an exchange. *hierarchical*, which is not in `fusedmoe`, sends a token once to
each node that has one of its experts.

- **One node of {node}**: `symmetric` has the shortest steps. Products hide {hidden_least:.0%} to {hidden_most:.0%} of
  the exchanges.
- **Several nodes: not `allgather`.** It sends {ratio_64:.0f} times the bytes of `alltoall` on 64 GPUs with the experts
  of Qwen3, and {ratio_512:.0f} times on 128. Its steps take {slow_least:.1f} to {slow_most:.1f} times as long. It also
  needs a `capacity`: rows of any routing take up to {rows_most:.0f} GB for one layer.
- **Several nodes: keep the ranks of a layer in one node, if the experts fit.** The steps are then those of {node} GPUs,
  and a rank has {weights_30b:.2f} GB of weights in each layer of Qwen3-30B-A3B, and {weights_v3:.1f} GB in each of
  DeepSeek-V3.
- **If they do not fit, exchanges take longer than products.** With {slow:.0f} GB/s per GPU, those of `alltoall` take
  {share_least:.1f} to {share_most:.1f} times the experts' time. Hierarchical dispatch sends {by_node_64:.0%} of its
  bytes over the slow link for DeepSeek-V3 on 64 GPUs, and {by_node_512:.0%} on 512.

The model has the speed of the experts from one {machine} (`layer.json`, commit {commit}), the links of two H200s of
one host with NCCL ({nccl}, {nccl_us:.0f} us), and those of two H100s by which the rules of `symmetric` divide rows
({peer} GB/s, {peer_us} us). **Assumed**: NVLink between {node} GPUs is as fast as between two; a link
between nodes has {slow:.0f} GB/s per GPU and {slow_us:.0f} us, without congestion; a host that reads numbers of rows
takes {sync:.0f} us. Left out: launches, ids and weights of experts, the SMs of exchanges, tiles with rows of several
ranks, ranks with more rows than others, and the traffic of other parts of the model. {check}
"""
CHECK = """\
Of the steps of two GPUs in `ep.json` (commit {commits}), those without a host that waits deviate by up to {worst:.0%}
from the model, and those of `alltoall`, whose host waits and launches the rest of the step late, by up to
{waiting:.0%}."""
UNCHECKED = 0.2  # the margin without measurements


def render(results: dict[str, Any], measured: Sequence[dict[str, Any]] = ()) -> str:
    """Return the part, from ``layer.json`` and the ``ep.json`` of each GPU that has one."""
    layers = ep_model.layers()
    found: Found = {
        (name, gpus): ep_model.steps(results, layer, gpus)
        for name, layer in layers.items()
        for gpus in GPUS
        if gpus in (2, NODE) or ep_model.ranks_of(layer, gpus).ranks > NODE
    }
    check, margin = _check(ep_model.checks(results, measured))
    return SECTION.format(
        tokens=TOKENS, node=NODE, choice=_choice(found, margin), margin=margin, slow=SLOW_GB_S,
        slow_us=SLOW_LATENCY_US, sync=HOST_SYNC_US, nccl_us=NCCL_LATENCY_US,
        nccl=", ".join(f"{gb_s} GB/s for {size >> 20} MiB" for size, gb_s in NCCL_GB_S.items()), peer=LINK_GB_S,
        peer_us=LATENCY_US, machine=results["machine"], commit=results["commit"][:12], check=check,
        **_figures(layers, found),
    )  # fmt: skip


def _head(name: str, gpus: int) -> list[str]:
    """Return the first cells of a row: the layer, and all numbers of GPUs with the same ranks."""
    layer = ep_model.layers()[name]
    p = ep_model.ranks_of(layer, gpus).ranks
    same = [n for n in GPUS if ep_model.ranks_of(layer, n).ranks == p]
    return [name, ", ".join(map(str, same)) + (f" (P = {p})" if same != [p] else "")]


def _choice(found: Found, margin: float) -> str:
    engines = (SYMMETRIC, ALLGATHER, ALLTOALL, HIERARCHICAL)
    rows = []
    for (name, gpus), steps in found.items():
        best = ep_model.best(steps.values())
        close = [s for s in steps.values() if s is not best and s.engine.of_package and s.ms < (1 + margin) * best.ms]
        others = ", ".join(f"`{s.engine.name}`" for s in close)
        chosen = f"`{best.engine.name}`" + (f" or {others}" if others else "")
        times = [f"{steps[e.name].ms:.1f}" if e.name in steps else "" for e in engines]
        rows.append([*_head(name, gpus), chosen, f"{best.compute_ms:.1f}", *times])
    return table(["layer", "GPUs", "engine", "experts", *(engine.name for engine in engines)], rows)


def _check(compared: Sequence[Check]) -> tuple[str, float]:
    """Return the sentence that compares the model with measurements, and the difference that it cannot tell apart."""
    worst = {
        waits: max((abs(c.deviation) for c in compared if bool(c.engine.host_syncs) is waits), default=math.nan)
        for waits in (False, True)
    }
    if math.isnan(worst[False]):
        return "", UNCHECKED
    margin = math.ceil(20 * worst[False]) / 20
    commits = ", ".join(dict.fromkeys(c.commit[:12] for c in compared))
    return CHECK.format(commits=commits, worst=worst[False], waiting=worst[True]), margin


def _figures(layers: dict[str, Shape], found: Found) -> dict[str, float]:
    """Return the figures in the text."""
    in_a_node = [steps[SYMMETRIC.name] for (_, gpus), steps in found.items() if gpus == NODE]
    hidden = [1 - (s.overlapped_ms - s.around_ms) / (s.exposed_ms - s.around_ms) for s in in_a_node]
    over_nodes = [steps for steps in found.values() if HIERARCHICAL.name in steps]
    slower = [steps[ALLGATHER.name].ms / steps[ALLTOALL.name].ms for steps in over_nodes]
    share = [2 * (s.gather_ms + s.return_ms) / s.compute_ms for s in (steps[ALLTOALL.name] for steps in over_nodes)]
    qwen3, deepseek = ep_model.LAYERS[0], ep_model.LAYERS[-1]

    def copies(name: str, gpus: int, engine: ep_model.Engine) -> ep_model.Copies:
        return found[name, gpus][engine.name].back

    figures: dict[str, float] = {}
    for gpus in (64, 512):
        figures[f"ratio_{gpus}"] = copies(qwen3, gpus, ALLGATHER).total / copies(qwen3, gpus, ALLTOALL).total
        slow = (copies(deepseek, gpus, engine).slow for engine in (HIERARCHICAL, ALLTOALL))
        figures[f"by_node_{gpus}"] = next(slow) / next(slow)
    return figures | {
        "hidden_least": min(hidden), "hidden_most": max(hidden), "slow_least": min(slower), "slow_most": max(slower),
        "rows_most": max(ep_model.buffers(layers[name], gpus).most_rows for name, gpus in found) / 1e9,
        "share_least": min(share), "share_most": max(share),
        "weights_30b": ep_model.buffers(layers[qwen3], NODE).weights / 1e9,
        "weights_v3": ep_model.buffers(layers[deepseek], NODE).weights / 1e9,
    }  # fmt: skip
