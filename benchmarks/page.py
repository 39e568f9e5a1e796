"""``python -m benchmarks.page``: write docs/benchmarks.md, figures of other pages.

The others are docs/fp8.md and docs/recipes.md. All figures come from the result files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import activations, demo, ep_page, ep_train, layer_page, marked, mlp, recipes_page
from benchmarks.fp8 import page as fp8_page
from benchmarks.marked import table
from benchmarks.results import ROOT
from benchmarks.train import page as train_page

PAGE = ROOT.parent / "docs" / "benchmarks.md"
FP8_PAGE, RECIPES_PAGE = PAGE.with_name("fp8.md"), PAGE.with_name("recipes.md")
EP_PAGE = PAGE.with_name("expert_parallel.md")
PICTURES, PICTURE = PAGE.parent / "_static", "nvidia-h100-80gb-hbm3-mlp-forward-backward.png"
ALL_RESULTS = ROOT / "results"  # with a folder per machine
RESULTS = ALL_RESULTS / "nvidia-h100-80gb-hbm3"
LAYER_RESULTS = ALL_RESULTS / "nvidia-h200"
COMPARED = ALL_RESULTS / "demo"  # comparisons of recipes
COMPARED_FP8 = "fp8-nvidia-h200*.json"  # those of FP8 recipes on a GPU: compare.json of each seed

INTRODUCTION = """\
# Benchmarks

`make bench` runs the benchmarks with the installed packages. It prints a table, and writes
`benchmarks/results/<machine>/*.json` with the versions and the commit. `python -m benchmarks.page` writes this page
from those files.
"""
OWN = """\
## Your own layer

`fusedmoe bench` needs no checkout. It measures one layer of your sizes, from tokens to tokens with the router:

```sh
fusedmoe bench --hidden 2048 --intermediate 768 --experts 128 --top-k 8 --tokens 8192
fusedmoe bench --hidden 2048 --intermediate 768 --experts 128 --top-k 8 --tokens 8192 --recipe fp8_block --json
fusedmoe bench --hidden 256 --intermediate 128 --experts 8 --top-k 2 --tokens 512 --device cpu
```

It compares the layer with the same layer in plain torch: `F.grouped_mm` on sorted rows, the same under `torch.compile`
(on a GPU), and a loop over the experts. All of them get the same
tokens, weights and gradient, choose the K largest logits, and are compared with fp64 before they are timed. The table
has medians and quartiles for inference, for forward with autograd, and for forward + backward. On a GPU it also has the
host time, the memory kept for backward, and the peak memory.
"""
GPU = """\
## On dispatched rows

Each time is the median of {reps} calls, measured with CUDA events around one call. The L2 cache is flushed before each
call, launch gaps of the host are hidden, and the peers take turns. The rows are dispatched already: the times include
no router, no gather and no sum over slots. The routing is {routing}. Every result was first compared with fp64 on the
same operands, for the experts with the fewest, the median and the most rows.

FC1 and FC2 are the experts' two layers. *dgrad* is the gradient of a layer's input, *wgrad* that of its weight. A
column *x peer* is the peer's time divided by that of fusedmoe: above 1, fusedmoe is faster. *torch* is `F.grouped_mm`,
with eager or compiled pointwise operations. QuACK runs with {tuned}. Each table comes from one run.

{machine}, torch {torch}, CUDA {cuda}, nvidia-cutlass-dsl {dsl}, QuACK {quack}, commit {commit}{mlp_commit}.
Measured ceilings of this GPU: {tflops:.0f} TFLOP/s (a bf16 product of 8192³), {copy:.1f} TB/s (copy, read and written).
"""
STACK = """\
## In transformers

{layers} decoder layers of Qwen3-30B-A3B's shape in transformers {transformers} (commit {commit}), in bf16, with
{tokens} tokens in {batch} sequences, for each experts implementation. The MoE part is the router and the experts of one
layer. Each time is the median of {reps} calls.

- *x grouped_mm*, *x eager*: the time of `grouped_mm` or `eager` divided by that of the implementation in the row.
- *kept*: the memory that forward keeps for backward.
- *host*: the wall time of the call without `torch.compile`.

The cases with few tokens are typical of text generation.
"""
STACK_ELSEWHERE = """\
The MoE part again on an {machine}, with that of GLM-4.5-Air, which has a shared expert (commit {commit}, medians of
{reps} calls). `fusedmoe + router` is the model after `patch_routers`.
"""
PRODUCTS = """\
### Single products

TFLOP/s of each product; in parentheses the time of {peer} divided by that of fusedmoe: above 1, fusedmoe is faster. The
result file also has the times of torch.
"""
TUNED = """\
## QuACK tuned

The same kernels against QuACK with the configurations from QuACK's own tuning, on {shape} (commit {commit}).
"""
DEEPGEMM = """\
## DeepGEMM

DeepGEMM's bf16 grouped products, with groups of multiples of 128 rows (DeepGEMM {version}, commit {commit}). Its
packages need an environment of their own, so it was measured in another process. torch was measured in both processes.
*x DeepGEMM* is the speed of fusedmoe relative to torch, divided by the speed of DeepGEMM relative to torch.
"""
FP8 = """\
## FP8

[Training in FP8 on Hopper](fp8.md#speed) has the times of {recipes} on an {machine}.
"""
HOST = """\
## Host time

A planned `Sequential(GroupedLinear, SwiGLU, GroupedLinear)` with few rows and small layers, against the same three
computations called by hand, with autograd's own backward. The times are wall times of the Python call in microseconds.
The first number is the minimum over the rounds, which is the cost of the code. The number in parentheses is the median,
which includes interference from other work on the machine.
"""


STOCK = ("grouped_mm", "eager")  # implementations of transformers
WHOLE = ("forward", "forward + backward")  # the cases of the expert MLP that the page has
PRODUCTS_PEER = "QuACK"
PEERS = {peer.name for peer in mlp.peers()}  # older result files have others, which also gathered and summed


def load(folder: Path, name: str) -> dict[str, Any] | None:
    """Read a result file; None if it does not exist."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def host_table(results: dict[str, Any]) -> str:
    """Return the table of host times."""
    versions = f"torch {results['versions']['torch']}, Python {results['versions']['python']}"
    lines = [
        f"Machine of an {results['machine']}, {versions}, commit {results['commit']}:",
        "",
        "| tensors on | pass | planned | by hand | planned - by hand |",
        "|---|---|---|---|---|",
    ]
    for device, report in results["host"].items():
        for title, times in report["passes"].items():
            cells = [f"{times[v]['least_us']:.0f} ({times[v]['median_us']:.0f})" for v in ("planned", "by hand")]
            over = report["overhead_us"][title]
            cells.append(f"{over['least']:.0f} ({over['median']:.0f})")
            lines.append(f"| {device} | {title} | {' | '.join(cells)} |")
    planning = results["host"]["cpu"]["planning_ms"]
    return "\n".join([*lines, "", f"Planning a new chain took {planning:.1f} ms there."])


def case_table(results: dict[str, Any], case: str) -> str:
    """Return the table of one case, with one row per shape."""
    rows = {s["name"]: {r["peer"]: r for r in s["rows"] if r["case"] == case} for s in results["shapes"]}
    peers = list(dict.fromkeys(p for by_peer in rows.values() for p in by_peer if p != "fusedmoe"))
    peers = [p for p in peers if p in PEERS and any(by_peer.get(p, {}).get("ms") for by_peer in rows.values())]
    host = any(by_peer.get("fusedmoe", {}).get("host_idle_us") for by_peer in rows.values())
    head = ["shape", "ms", "TFLOP/s", "% of ceiling", *(["host us"] if host else []), *(f"x {p}" for p in peers)]
    lines = [f"### {case}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, by_peer in rows.items():
        ours = by_peer.get("fusedmoe")
        if not ours or not ours["ms"]:
            continue
        cells = [name, f"{ours['ms']:.3f}", f"{ours['tflops']:.0f}", f"{ours['ceiling_percent']:.0f}"]
        cells += [f"{ours['host_idle_us']:.0f}" if ours.get("host_idle_us") else ""] if host else []
        for peer in peers:
            theirs = by_peer.get(peer) or {}
            cells.append(f"{theirs['ms'] / ours['ms']:.2f}" if theirs.get("ms") else "")
        lines.append("| " + " | ".join(cells) + " |")
    means = results["geometric_mean_speedups"].get(case, {})
    if any(p in means for p in peers):
        cells = [f"{means[p]['mean']:.2f}" if p in means else "" for p in peers]
        lines.append("| *geometric mean* " + "| " * (len(head) - 1 - len(peers)) + "| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tuned_table(results: dict[str, Any]) -> str:
    """Return the cases of one shape, compared with QuACK."""
    (shape,) = results["shapes"]
    rows = []
    for case in dict.fromkeys(r["case"] for r in shape["rows"]):
        ms = _ms(shape, case)
        times = ms["fusedmoe"], ms["QuACK"]
        rows.append([case, *(f"{t:.3f}" for t in times), f"{times[1] / times[0]:.2f}"])
    return table(["case", "ms", "QuACK, ms", "x QuACK"], rows)


def products_table(results: dict[str, Any], peer: str) -> str:
    """Return TFLOP/s of each product by shape, and the time of a peer divided by ours."""
    rows = []
    for case in dict.fromkeys(r["case"] for shape in results["shapes"] for r in shape["rows"]):
        cells = []
        for shape in results["shapes"]:
            of_case = {r["peer"]: r for r in shape["rows"] if r["case"] == case and r["ms"]}
            ours, theirs = of_case.get("fusedmoe"), of_case.get(peer)
            ratio = f" ({theirs['ms'] / ours['ms']:.2f})" if ours and theirs else ""
            cells.append(f"{ours['tflops']:.0f}{ratio}" if ours else "")
        mean = results["geometric_mean_speedups"].get(case, {}).get(peer)
        rows.append([case, *cells, f"{mean['mean']:.2f}" if mean else ""])
    return table(["product", *(shape["name"] for shape in results["shapes"]), "*geometric mean*"], rows)


def stack_table(results: dict[str, Any]) -> str:
    """Return the times in transformers, with one row per part, case and implementation of fusedmoe."""
    found = {(m["part"], m["case"], m["implementation"], m["compiled"]): m for m in results["measured"]}

    def ratio(part: str, case: str, other: str, own: str, compiled: bool = False) -> str:
        theirs, ours = (found.get((part, case, who, compiled), {}).get("ms") for who in (other, own))
        return f"{theirs / ours:.2f}" if theirs and ours else ""

    rows = []
    for part, case, own, compiled in found:
        if compiled or own in STOCK:
            continue
        plain, graph = found[part, case, own, False], found.get((part, case, own, True), {})
        kept = [found[part, case, who, False]["kept_gib"] for who in (own, "grouped_mm")]
        cells = [f"{plain['ms']:.3g}", f"{plain['host_us'] / 1e3:.2f}"]
        cells += [ratio(part, case, other, own) for other in STOCK]
        cells += ["" if gib is None else f"{gib:.2f}" for gib in kept]
        cells += [f"{graph['ms']:.3g}" if graph.get("ms") else "", ratio(part, case, "grouped_mm", own, compiled=True)]
        rows.append([part, case, f"`{own}`", *cells])
    head = ["part", "case", "experts", "ms", "host, ms", *(f"x {other}" for other in STOCK), "kept, GiB"]
    return table([*head, "kept by grouped_mm, GiB", "compiled, ms", "x grouped_mm, compiled"], rows)


def deepgemm_table(kernels: dict[str, Any], deepgemm: dict[str, Any]) -> str:
    """Return the plain products, compared with DeepGEMM relative to torch."""
    theirs = {shape["name"]: shape for shape in deepgemm["shapes"]}
    cases = dict.fromkeys(r["case"] for shape in theirs.values() for r in shape["rows"])
    rows = []
    for shape in kernels["shapes"]:
        cells = []
        for case in cases:
            here, there = _ms(shape, case), _ms(theirs[shape["name"]], case)
            ratio = there["DeepGEMM"] / there["torch eager"] * here["torch eager"] / here["fusedmoe"]
            cells += [f"{here['fusedmoe']:.3f}", f"{ratio:.2f}"]
        rows.append([shape["name"], *cells])
    names = (case.split(",")[0] for case in cases)
    return table(["shape", *(f"{name}, {figure}" for name in names for figure in ("ms", "x DeepGEMM"))], rows)


def _ms(shape: dict[str, Any], case: str) -> dict[str, float]:
    return {r["peer"]: r["ms"] for r in shape["rows"] if r["case"] == case and r["ms"]}


def render(folder: Path = RESULTS, layer_folder: Path = LAYER_RESULTS, machines: Path = ALL_RESULTS) -> str:
    """Return the page; the whole layer was measured on another machine than the rest.

    ``machines`` has the folders of all machines, of which any may have measured expert parallelism.
    """
    layer = load(layer_folder, "layer")
    parts = [
        INTRODUCTION,
        *train_page.section(load(folder, "train")),
        *(layer_page.render(layer) if layer else []),
        OWN,
    ]
    kernels, mlp = load(folder, "kernels"), load(folder, "mlp")
    if kernels:
        versions = kernels["versions"]
        parts.append(
            GPU.format(
                reps=kernels["reps"], routing=f"{kernels['routing']} random", machine=kernels["machine"],
                tuned="its own tuning" if kernels["peers_tuned"] else "its default configurations",
                torch=versions["torch"], cuda=versions.get("cuda"), dsl=versions.get("nvidia-cutlass-dsl"),
                quack=versions.get("quack-kernels"), commit=kernels["commit"], tflops=kernels["ceiling"]["tflops"],
                copy=kernels["ceiling"]["copy_tb_s"],
                mlp_commit=f" (the expert MLP: {mlp['commit']})" if mlp and mlp["commit"] != kernels["commit"] else "",
            )
        )  # fmt: skip
    if mlp:
        if (PICTURES / PICTURE).exists():
            parts.append(f"![forward and backward by shape](_static/{PICTURE})\n")
        parts += [case_table(mlp, case) + "\n" for case in WHOLE]
    if kernels:
        parts += [PRODUCTS.format(peer=PRODUCTS_PEER), products_table(kernels, PRODUCTS_PEER) + "\n"]
    if apart := load(layer_folder, "activations"):
        parts += activations.section(apart)
    if recipes := load(layer_folder, "recipes"):
        parts += recipes_page.benchmarks(recipes)
    stack = load(folder, "transformers")
    if stack:
        parts.append(
            STACK.format(
                layers=stack["layers"], reps=stack["reps"], tokens=stack["tokens"], batch=stack["batch"],
                commit=stack["commit"], transformers=stack["versions"]["transformers"],
            )
        )  # fmt: skip
        parts.append(stack_table(stack) + "\n")
        elsewhere = load(layer_folder, "transformers")
        if elsewhere:
            heading = {name: elsewhere[name] for name in ("machine", "commit", "reps")}
            parts += [STACK_ELSEWHERE.format(**heading), stack_table(elsewhere) + "\n"]
    tuned, deepgemm, host = load(folder, "kernels-tuned-peers"), load(folder, "deepgemm"), load(folder, "host")
    if tuned:
        parts.append(TUNED.format(shape=tuned["shapes"][0]["name"], commit=tuned["commit"]))
        parts.append(tuned_table(tuned) + "\n")
    if kernels and deepgemm:
        parts.append(DEEPGEMM.format(version=deepgemm["versions"]["sgl-deep-gemm"], commit=deepgemm["commit"]))
        parts.append(deepgemm_table(kernels, deepgemm) + "\n")
    parts.append(ep_page.render(load_ep(machines, "ep-*-ranks")))
    parts.append(ep_train.render(load_ep(machines, "ep_train")))
    if fp8 := load(layer_folder, "fp8"):
        parts.append(FP8.format(machine=fp8["machine"], recipes=fp8_page.measured(fp8)))
    if host:
        parts += [HOST, host_table(host) + "\n"]
    return "\n".join(parts)


def render_ep(machines: Path = ALL_RESULTS) -> str:
    """Return docs/expert_parallel.md with the measured steps."""
    part = ep_page.engines(load_ep(machines, "ep-*-ranks"))
    return marked.filled(EP_PAGE.read_text(encoding="utf-8"), {"engines": part}, "docs/expert_parallel.md")


def render_fp8(folder: Path = LAYER_RESULTS, compared: Path = COMPARED, trained: Path = RESULTS) -> str:
    """Return docs/fp8.md with the figures of the result files."""
    text = FP8_PAGE.read_text(encoding="utf-8")
    return fp8_page.filled(text, load(folder, "fp8"), load_seeds(compared), load(trained, "train_recipes"))


def render_recipes(folder: Path = LAYER_RESULTS) -> str:
    """Return docs/recipes.md with the figures of the result file of the recipes."""
    text, found = RECIPES_PAGE.read_text(encoding="utf-8"), load(folder, "recipes")
    return recipes_page.filled(text, found) if found else text


def load_ep(machines: Path, name: str) -> list[dict[str, Any]]:
    """Read the results of expert parallelism of each machine with GPUs, by the name of its folder."""
    found = (load(file.parent, file.stem) for file in sorted(machines.glob(f"*/{name}.json")))
    return [results for results in found if results and results["machine"].startswith("NVIDIA")]


def load_seeds(folder: Path) -> list[dict[str, Any]]:
    """Read the comparisons of FP8 recipes, by seed."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob(COMPARED_FP8)]
    return sorted(found, key=lambda compared: int(compared["job"]["seed"]))


def main() -> None:
    if compared := load_seeds(COMPARED):
        print(demo.draw(compared, PICTURES))
    if of_all_recipes := load(COMPARED, "compare"):
        print(demo.draw([of_all_recipes], PICTURES, demo.ALL_RECIPES))
    if trained := load(RESULTS, "train_recipes"):
        print(train_page.draw(trained, PICTURES))
    pages = {PAGE: render(), EP_PAGE: render_ep(), FP8_PAGE: render_fp8(), RECIPES_PAGE: render_recipes()}
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
