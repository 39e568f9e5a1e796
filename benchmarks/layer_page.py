"""The part of docs/benchmarks.md about the whole layer, its router, and a dense MLP, from ``layer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import dense, router
from benchmarks.launches import by_group
from benchmarks.layer import COMPILED, OURS, SHAPES, SONIC_TUNED, UNFUSED, cell, heading, others, speed
from benchmarks.marked import table
from fusedmoe.commands.bench.layer import SAMPLED_TOKENS
from fusedmoe.commands.bench.measure import FORWARD, STEP

ERRORS = ("y", "x", "router", "weight1", "weight2")
PARTS = {"router": "the router alone", "dense": "a dense MLP"}
LAYER = """\
## The whole layer

One MoE layer from tokens to tokens: router, dispatch, experts and combine. Each library gets four inputs in bf16: the
tokens, the router's weight and the experts' two weights. Forward returns a result per token, and backward the gradients
of the four inputs. `fm.MoE` and SonicMoE {sonic} are called through their public functions. *torch* is a layer of
`F.grouped_mm`, index operations and pointwise operations, compiled as a whole. All of them choose the K largest logits,
and use the softmax of these as weights. The result file also has the times of inference.

Each time is the median of {reps} calls, measured with CUDA events around one call. The L2 cache is flushed before each
call, launch gaps of the host are hidden, and the libraries take turns. {machine}, torch {torch}, CUDA {cuda},
nvidia-cutlass-dsl {dsl}, QuACK {quack}, commit {commit}. Measured ceilings of this GPU: {tflops:.0f} TFLOP/s (a bf16
product of 8192³), {copy:.1f} TB/s (copy, read and written).
"""
TUNED = """\
For each shape, *SonicMoE tuned* uses the configurations from QuACK's own tuning. *SonicMoE* uses the default
configurations.
"""
RATIOS = "A column *x library* is the time of the library divided by that of fusedmoe: above 1, fusedmoe is faster.\n"
MEMORY = """\
### Memory of the layer

The peak is the memory that one call needs beyond the state at rest. It includes the result and all gradients, except
the gradient of the result. It does not include tokens and weights. *Kept* is the memory that forward keeps for
backward, without the result. A column *x library* is the peak of the library divided by that of fusedmoe: above 1,
fusedmoe needs less.
"""
LAUNCHES = """\
### Launches and host time of the layer

*Launches* is the number of kernels, copies and fills on the GPU in one call of forward + backward. *us* is the host
time: the wall time of the Python call in microseconds, while the GPU is idle. The call does not wait for the GPU.
"""
BREAKDOWN = """\
### Where the time of the layer goes

Microseconds on the GPU in one call of fusedmoe's layer, forward + backward, by kind of kernel, from torch's profiler.
*Router* includes the logits, the choice of experts and the places of the rows. The two products of its backward pass
are in *products*, because their kernels are those of the experts. *Idle* is the time between the first kernel and the
last in which no kernel runs. In backward, the sum over slots runs beside a weight gradient, and the times of both count
fully. The L2 cache is not flushed before this call. For both reasons, these times do not add up to those of the tables
above.
"""
ACCURACY = """\
### Errors of the layer

The largest errors over the shapes, relative to fp64, in norm: of the results and the gradients of {tokens} tokens, and
of the gradients of one expert's weights. *Unfused* is fusedmoe's layer without fused kernels. The fp64 reference uses
the experts that each library chooses. The last column is the number of tokens for which a library chooses other experts
than those with the largest logits in fp64. SonicMoE computes logits in bf16, the others in fp32.
"""
ROUTER = """\
### The router alone

Forward and backward of the router alone: {tokens} tokens, hidden {hidden}, {experts} experts, top {top_k}. *torch* is a
linear layer in fp32, `topk`, and the softmax of the result. The last row is the time that a router adds to a layer: the
time of the layer minus that of its experts for given routing, with intermediate {intermediate}.
"""
DENSE = """\
## A dense MLP

`fm.Sequential(fm.Linear, fm.SwiGLU, fm.Linear)` with {tokens} tokens, hidden {hidden} and intermediate {intermediate},
in bf16, against the same layers under `torch.compile`. The gradients are those of the tokens and the weights.
"""


def render(results: dict[str, Any]) -> list[str]:
    """Return the paragraphs and tables."""
    versions, names = results["versions"], others(results)
    text = [
        LAYER.format(
            sonic=versions.get("sonic-moe", "(not installed)"), reps=results["reps"], machine=results["machine"],
            torch=versions["torch"], cuda=versions.get("cuda"), dsl=versions.get("nvidia-cutlass-dsl"),
            quack=versions.get("quack-kernels"), commit=results["commit"], tflops=results["ceiling"]["tflops"],
            copy=results["ceiling"]["copy_tb_s"],
        )
    ]  # fmt: skip
    text += [TUNED] * (SONIC_TUNED.name in names) + [RATIOS]
    text += [f"### {case} of the layer\n\n{_times(results, case, names)}\n" for case in (STEP, FORWARD)]
    text.append(_shapes(results))
    if any(cell(s, STEP, OURS).get("peak_bytes") for s in results["shapes"]):
        text += [MEMORY, _memory(results, names) + "\n"]
    if any(s["launches"] for s in results["shapes"]):
        text += [LAUNCHES, _launches(results, names) + "\n", BREAKDOWN, _breakdown(results) + "\n"]
    text += [ACCURACY.format(tokens=SAMPLED_TOKENS), _errors(results, names) + "\n"]
    if found := results.get("router"):
        text += [ROUTER.format(**found), _part(found["rows"], (OURS, router.IN_LAYER), {router.TORCH: "torch"}) + "\n"]
    if found := results.get("dense"):
        peers = {dense.ONE_LINEAR: "one linear", dense.TWO_LINEARS: "two linears"}
        text += [DENSE.format(**found), _part(found["rows"], (OURS,), peers) + "\n"]
    return text


def _title(name: str) -> str:
    return "torch" if name == COMPILED.name else name


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _compared(results: dict[str, Any], case: str, names: Sequence[str], figure: str, form: str, unit: float) -> str:
    """Return a figure by shape: ours, the others', and the ratios with their geometric means."""
    ratios = {name: speed(results, name, figure).get(case, {}) for name in names}
    head = ["shape", OURS, *(_title(n) for n in names), *(f"x {_title(n)}" for n in names)]
    rows = []
    for shape in results["shapes"]:
        figures = [cell(shape, case, name).get(figure) for name in (OURS, *names)]
        shown = [_number(None if value is None else value / unit, form) for value in figures]
        divided = [_number(ratios[n].get("shapes", {}).get(shape["name"]), ".2f") for n in names]
        rows.append([shape["name"], *shown, *divided])
    means = [_number(ratios[n].get("mean"), ".2f") for n in names]
    return table(head, [*rows, ["*geometric mean*", *[""] * (1 + len(names)), *means]])


def _times(results: dict[str, Any], case: str, names: Sequence[str]) -> str:
    return _compared(results, case, names, "ms", ".2f", 1) + "\n\nMilliseconds."


def _shapes(results: dict[str, Any]) -> str:
    text = "The shapes:\n\n" + "\n".join(f"- {heading(shape)}" for shape in results["shapes"]) + "\n"
    measured = {shape["name"] for shape in results["shapes"]}
    absent = [name for name in SHAPES if name not in measured]
    absent += [title for part, title in PARTS.items() if part not in results]
    return text + (f"\nNot measured in this run: {', '.join(absent)}.\n" if absent else "")


def _memory(results: dict[str, Any], names: Sequence[str]) -> str:
    kept = []
    for shape in results["shapes"]:
        values = [cell(shape, FORWARD, name).get("kept_bytes") for name in (OURS, *names)]
        kept.append([shape["name"], *(_number(None if v is None else v / 2**30, ".2f") for v in values)])
    return "\n\n".join(
        [
            _compared(results, STEP, names, "peak_bytes", ".2f", 2**30),
            f"Peak of {STEP}, in GiB. Kept, in GiB:",
            table(["shape", OURS, *map(_title, names)], kept),
        ]
    )


def _launches(results: dict[str, Any], names: Sequence[str]) -> str:
    everyone = (OURS, *names)
    head = ["shape", *(f"{_title(n)}, launches" for n in everyone), *(f"{_title(n)}, us" for n in everyone)]
    rows = []
    for shape in results["shapes"]:
        counts = [shape["launches"].get(n, {}).get(STEP, {}).get("launches") for n in everyone]
        host = [cell(shape, STEP, n).get("host_us") for n in everyone]
        rows.append([shape["name"], *(_number(v, "d") for v in counts), *(_number(v, ".0f") for v in host)])
    return table(head, rows)


def _breakdown(results: dict[str, Any]) -> str:
    rows, groups = [], list(by_group(()))
    for shape in results["shapes"]:
        if found := shape["launches"].get(OURS, {}).get(STEP):
            times = by_group((kernel["name"], kernel["us"]) for kernel in found["kernels"])
            rows.append([shape["name"], *(f"{us:.0f}" for us in times.values()), f"{found['idle_us']:.0f}"])
    return table(["shape", *groups, "idle"], rows)


def _errors(results: dict[str, Any], names: Sequence[str]) -> str:
    rows = []
    for name in (OURS, UNFUSED, *names):
        if errors := [shape["errors"][name] for shape in results["shapes"] if shape["errors"].get(name)]:
            shown = [_number(max((e[of] for e in errors if of in e), default=None), ".1e") for of in ERRORS]
            rerouted = [shape["rerouted"].get(name, 0) for shape in results["shapes"]]
            rows.append([_title(name), *shown, str(max(rerouted))])
    return table(["", "y", "dx", "drouter", "dw1", "dw2", "tokens"], rows)


def _part(rows: Sequence[dict[str, Any]], ours: Sequence[str], peers: dict[str, str]) -> str:
    """Return the rows of a part; ``peers`` are their titles by name."""
    found = {(row["case"], row["name"]): row for row in rows if row["ms"]}
    shown = []
    for (case, name), row in found.items():
        others = [found.get((case, peer)) for peer in peers]
        ratios = [other["ms"] / row["ms"] if other and name in ours else None for other in others]
        peak = row["peak_bytes"]
        figures = [_number(row["ms"], ".3f"), *(_number(r, ".2f") for r in ratios), _number(row["host_us"], ".0f")]
        figures += [_number(row["launches"], "d"), _number(None if peak is None else peak / 2**30, ".2f")]
        shown.append([case, name, *figures])
    head = ["pass", "", "ms", *(f"x {title}" for title in peers.values()), "host us", "launches", "peak, GiB"]
    return table(head, shown)
