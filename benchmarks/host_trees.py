"""Host time of planned calls in two source trees, in turns: ``python -m benchmarks.host_trees BASE``.

BASE is the folder of another revision, for example a ``git worktree``. Each tree has two processes, since the times of
two processes of one tree differ by a few percent. In each round, the processes take turns for every case, so that other
work of the machine affects all of them equally. The GPU is idle at the start of each turn. The result is the ratio of
the times of this tree and of BASE, each the mean of its two processes: the median over the rounds, and the interval
that contains the median with 95% probability (order statistics).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import results

HERE = Path(__file__).resolve()
CASES = ("MoE", "experts")
RECIPES = ("bf16", "fp8_block")
PASSES = ("forward", "forward + backward")


# ---- the process of one tree: only public functions, which both trees have ----


def calls(device: str) -> dict[str, Any]:
    """Return functions by case, recipe and pass."""
    import torch

    import fusedmoe as fm

    torch.manual_seed(0)
    hidden, intermediate, experts = 256, 256, 8
    settings: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    layer = fm.MoE(hidden=hidden, intermediate=intermediate, num_experts=experts, top_k=2, **settings)
    chain = fm.Sequential(
        fm.GroupedLinear(experts, hidden, 2 * intermediate, **settings),
        fm.SwiGLU(),
        fm.GroupedLinear(experts, intermediate, hidden, **settings),
    )
    tokens, rows = torch.randn(64, hidden, **settings), torch.randn(128, hidden, **settings)
    splits = torch.full((experts,), 16, device=device)

    def passes(recipe: str, call: Any, x: Any) -> dict[str, Any]:
        leaf, grad = x.clone().requires_grad_(), torch.ones_like(x)

        def forward() -> None:
            with torch.no_grad(), fm.recipe(recipe):
                call(x)

        def both() -> None:
            with fm.recipe(recipe):
                y = call(leaf)
            y.backward(grad)

        return dict(zip(PASSES, (forward, both), strict=True))

    inputs = {"MoE": (layer, tokens), "experts": (lambda x: chain(x, splits=splits), rows)}
    return {
        f"{case}, {recipe}, {name}": function
        for case in CASES
        for recipe in RECIPES
        for name, function in passes(recipe, *inputs[case]).items()
    }


def serve(device: str, repeats: int) -> None:
    """Time the case whose name is read, and print microseconds per call, until the input ends."""
    import time

    import torch

    import fusedmoe as fm

    torch.set_num_threads(1)
    cases = calls(device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for call in cases.values():
        for _ in range(3 * repeats):
            call()
    print(json.dumps([fm.__file__, list(cases)]), flush=True)
    for line in sys.stdin:
        call = cases[json.loads(line)]
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        taken = (time.perf_counter() - start) / repeats * 1e6
        wait()
        print(taken, flush=True)


class Tree:
    """A process that times the calls of the package in `folder`."""

    def __init__(self, folder: Path, device: str, repeats: int) -> None:
        if not (folder / "fusedmoe" / "__init__.py").is_file():
            raise FileNotFoundError(f"{folder} has no folder fusedmoe: expected the root of a source tree")
        # the working directory, not the folder of this file, comes first in the module search path
        code = "import runpy, sys; runpy.run_path(sys.argv[1])['serve'](sys.argv[2], int(sys.argv[3]))"
        paths = os.pathsep.join(str(p) for p in (folder, HERE.parents[1], os.environ.get("PYTHONPATH", "")) if str(p))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(HERE), device, str(repeats)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        package, self.cases = self.read()
        if not Path(package).is_relative_to(folder):
            raise ImportError(f"fusedmoe was imported from {package}: expected it in {folder}")

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of a tree ended with status {self.process.wait()}; its error is above")
        return json.loads(line)

    def time_us(self, case: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return float(self.read())

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies with about 95% probability."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    middle = (len(values) - 1) / 2
    return ordered[max(math.floor(middle - half), 0)], ordered[min(math.ceil(middle + half), len(values) - 1)]


def compare(base: Path, device: str, rounds: int, repeats: int) -> list[dict[str, Any]]:
    """Return a record per case: medians of both trees in microseconds, the ratio of this tree to `base`."""
    here = HERE.parents[1]
    folders = (base.resolve(), here, here, base.resolve())
    trees: list[Tree] = []
    try:
        for folder in folders:
            trees.append(Tree(folder, device, repeats))
        taken: dict[str, list[tuple[float, float]]] = {case: [] for case in trees[1].cases}
        for round_number in range(rounds):
            for case in taken:
                times = [0.0] * len(trees)
                for turn in range(len(trees)):
                    number = (turn + round_number) % len(trees)
                    times[number] = trees[number].time_us(case)
                taken[case].append(((times[0] + times[3]) / 2, (times[1] + times[2]) / 2))
    finally:
        for tree in trees:
            tree.stop()
    records = []
    for case, pairs in taken.items():
        before, after = zip(*pairs, strict=True)
        ratios = [a / b for b, a in pairs]
        low, high = median_interval(ratios)
        records.append({
            "case": case,
            "base_us": round(statistics.median(before), 1), "us": round(statistics.median(after), 1),
            "base_least_us": round(min(before), 1), "least_us": round(min(after), 1),
            "ratio": round(statistics.median(ratios), 4), "interval": [round(low, 4), round(high, 4)],
        })  # fmt: skip
    return records


def main() -> None:
    title = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_trees", description=title)
    parser.add_argument("base", type=Path, metavar="BASE", help="the root of the other source tree")
    parser.add_argument("--revision", default="unknown", help="the revision of BASE, for the result file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="calls per turn (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=results.ROOT / "results", metavar="DIR")
    args = parser.parse_args()
    records = compare(args.base, args.device, args.rounds, args.repeats)
    for record in records:
        low, high = record["interval"]
        times = f"{record['base_us']:8.1f} {record['us']:8.1f} us"
        print(f"{record['case']:34} {times} {record['ratio']:7.3f} ({low:.3f} to {high:.3f})")
    found = {"base": args.revision, "rounds": args.rounds, "calls_per_turn": args.repeats, "cases": records}
    print("written to", results.write(args.results, "host_trees", found))


if __name__ == "__main__":
    main()
