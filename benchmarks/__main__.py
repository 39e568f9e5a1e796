"""``python -m benchmarks``: measure, print a table, write the results."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import host
from benchmarks.results import ROOT, machine, write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="rounds of each measurement (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the result files")
    parser.add_argument("--device", choices=("cpu", "cuda"), action="append", help="default: every one there is")
    args = parser.parse_args()
    devices = args.device or ["cpu"] + ["cuda"] * torch.cuda.is_available()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of the host's time: a thread pool's wake-ups are not what is measured
    print(f"host time of GroupedLinear, SwiGLU, GroupedLinear on few rows, microseconds a call; {machine()}")
    print("the least over the rounds, what the code costs; (the median, with what else the machine did)")
    print(f"{'':24}{'planned':>18}{'by hand':>18}{'by hand, lean':>18}{'planned - by hand':>20}")
    reports = {}
    for name in devices:
        report = host.measure(torch.device(name), args.rounds)
        for title, times in report.passes.items():
            row = "".join(f"{_both(times[v].least_us, times[v].median_us):>18}" for v in host.VARIANTS)
            print(f"{name + ' ' + title:24}{row}{_both(*report.overhead_us(title)):>20}")
        print(f"{name + ' planning a chain':24}{report.planning_ms:15.2f} ms")
        overhead = {
            title: dict(zip(("least", "median"), report.overhead_us(title), strict=True)) for title in report.passes
        }
        reports[name] = asdict(report) | {"overhead_us": overhead}
    print("written to", write(args.results, "host", {"host": reports}))


def _both(least_us: float, median_us: float) -> str:
    return f"{least_us:.1f} ({median_us:.1f})"


if __name__ == "__main__":
    main()
