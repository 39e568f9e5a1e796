"""The whole MoE layer, from tokens to tokens: router, dispatch, experts, combine.

Each candidate gets the tokens, the router's weight and the experts' two weights, and gives y, or the gradients of
these four. Memory is that beyond this state at rest: the peak of a call includes y and the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

import fusedmoe as fm
from benchmarks.cases import geometric_mean
from benchmarks.launches import launches, summary
from benchmarks.peers.sonic import SONIC, SONIC_TUNED
from benchmarks.shapes import Shape
from fusedmoe.commands.bench.layer import COMPILED, OURS, OURS_PEER, Peer, Sizes, Work
from fusedmoe.commands.bench.measure import CASES, Prepared, call_of, lines, plan, prepare, timed
from fusedmoe.commands.timing import Timer, why_not

SHAPES = ("sonic-7b-n256", "qwen3-30b-a3b", "sonic-30b-n1024", "sonic-7b-n1024")  # those of SonicMoE's own table
UNFUSED = "unfused"
SHOWN_KERNELS = 16
PEERS = (SONIC_TUNED.name, SONIC.name, COMPILED.name)


def runs(shape: Shape) -> bool:
    """Whether SonicMoE can run a shape with a router: it has no clamp, and with K = 1 the rows arrive dispatched."""
    return shape.activation == "swiglu" and shape.top_k > 1


def candidates(tuned: bool) -> tuple[Peer, ...]:
    return (OURS_PEER, SONIC, *([SONIC_TUNED] if tuned else []), COMPILED)


def measure(shape: Shape, timer: Timer, device: torch.device, peers: Iterable[Peer]) -> dict[str, Any]:
    """Measure and print one shape; return its entry of the result file."""
    sizes = Sizes(shape.hidden, shape.intermediate, shape.experts, shape.top_k, shape.tokens)
    work = Work(sizes, torch.bfloat16, device)
    load = work.load()
    print(f"\n{heading(asdict(shape))}, {int(load.min())} to {int(load.max())} rows per expert", flush=True)
    prepared = prepare(work, tuple(peers))
    unfused = _unfused(work)
    rows = timed(work, timer, prepared)
    entry = asdict(shape) | {
        "rows_per_expert": {"least": int(load.min()), "most": int(load.max())},
        "plan": plan(work),
        "rows": [asdict(row) for row in rows],
        "errors": prepared.errors | unfused.errors,
        "rerouted": prepared.rerouted | unfused.rerouted,
        "launches": _launches(work, prepared) if device.type == "cuda" else {},
    }
    print("\n".join([*lines(rows), *_more_lines(entry)]), flush=True)
    return entry


def heading(shape: dict[str, Any]) -> str:
    """Return ``name: T tokens, hidden H, ...`` of a shape's entry."""
    return (
        f"{shape['name']}: {shape['tokens']} tokens, hidden {shape['hidden']}, intermediate {shape['intermediate']}, "
        f"{shape['experts']} experts, top {shape['top_k']}"
    )


def _unfused(work: Work) -> Prepared:
    """Check our layer without fusion; its errors are the standard for those of the fused layer."""
    with fm.disabled("*"):
        return prepare(work, (OURS_PEER._replace(name=UNFUSED),))


def _launches(work: Work, prepared: Prepared) -> dict[str, dict[str, Any]]:
    """Return the launches of each candidate by case, with the single kernels of ours."""
    found: dict[str, dict[str, Any]] = {}
    for name, candidate in prepared.candidates.items():
        try:
            of_cases = {case: summary(launches(call_of(case, candidate, work), work.device)) for case in CASES}
        except Exception as raised:  # noqa: BLE001 a failing profiler must not discard the measurements
            print(f"  {name}: launches not counted: {why_not(raised)}")
            continue
        if name != OURS:
            for of_case in of_cases.values():
                del of_case["kernels"]
        found[name] = of_cases
    return found


def _more_lines(entry: dict[str, Any]) -> list[str]:
    text = [f"our plan: {entry['plan']}", "relative errors, and tokens with other experts than by fp64 logits:"]
    for name, errors in entry["errors"].items():
        rerouted = entry["rerouted"].get(name)
        shown = ", ".join(f"{what} {error:.2e}" for what, error in errors.items())
        text.append(f"  {name}: {shown}" + ("" if rerouted is None else f"; {rerouted} tokens"))
    for name, by_case in entry["launches"].items():
        for case, found in by_case.items():
            groups = ", ".join(f"{group} {us:.0f}" for group, us in found["groups_us"].items() if us)
            text.append(
                f"  {name}, {case}: {found['launches']} launches, busy {found['busy_us']:.0f} us ({groups}), "
                f"idle {found['idle_us']:.0f} us"
            )
            for kernel in found.get("kernels", ())[:SHOWN_KERNELS]:
                text.append(f"    {kernel['us']:8.1f} us  {kernel['count']:2d} x {kernel['name']}")
    return text


# ---- summary -------------------------------------------------------------------------------------------------------


def cell(shape: dict[str, Any], case: str, name: str) -> dict[str, Any]:
    """Return the row of a candidate in a case as the result file has it; empty if it was not timed."""
    return next((r for r in shape["rows"] if (r["case"], r["name"]) == (case, name) and r["ms"]), {})


def ratio(shape: dict[str, Any], case: str, name: str, figure: str = "ms") -> float | None:
    """Return a candidate's figure divided by ours, where both exist."""
    theirs, own = (cell(shape, case, who).get(figure) for who in (name, OURS))
    return theirs / own if theirs and own else None


def others(results: dict[str, Any]) -> list[str]:
    """Return the names of the other libraries that were timed, the most important one first."""
    return [name for name in PEERS if any(cell(s, case, name) for s in results["shapes"] for case in CASES)]


def speed(results: dict[str, Any], name: str, figure: str = "ms") -> dict[str, dict[str, Any]]:
    """Return, for each case, a candidate's figure divided by ours by shape, the least, and the geometric mean."""
    found = {}
    for case in CASES:
        by_shape = {s["name"]: r for s in results["shapes"] if (r := ratio(s, case, name, figure)) is not None}
        if by_shape:
            found[case] = {
                "shapes": by_shape, "least": min(by_shape.values()), "mean": geometric_mean(by_shape.values()),
            }  # fmt: skip
    return found


def summary_lines(results: dict[str, Any]) -> list[str]:
    """Return the speed and the peak memory relative to each peer: above 1, ours is faster or smaller."""
    text = []
    for name in others(results):
        for what, figure in (("time", "ms"), ("peak memory", "peak_bytes")):
            for case, found in speed(results, name, figure).items():
                each = ", ".join(f"{shape} {value:.2f}" for shape, value in found["shapes"].items())
                text.append(
                    f"{what}, {case}: {name} / {OURS} = {found['mean']:.2f} (least {found['least']:.2f}: {each})"
                )
    return text
