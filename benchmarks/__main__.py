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
    print(f"{'':22}{'planned':>10}{'by hand':>10}{'lean':>10}{'planned - by hand':>20}")
    reports = {}
    for name in devices:
        report = host.measure(torch.device(name), args.rounds)
        for title, times in (
            ("inference", report.inference),
            ("forward", report.forward),
            ("forward + backward", report.forward_backward),
        ):
            row = "".join(f"{times[v].median_us:10.1f}" for v in ("planned", "by hand", "by hand, lean"))
            print(f"{name + ' ' + title:22}{row}{report.overhead_us(times):20.1f}")
        print(f"{name + ' planning a chain':22}{report.planning_ms:10.2f} ms")
        reports[name] = asdict(report) | {
            "overhead_us": {
                "inference": report.overhead_us(report.inference),
                "forward": report.overhead_us(report.forward),
                "forward_backward": report.overhead_us(report.forward_backward),
            }
        }
    print("written to", write(args.results, "host", {"host": reports}))


if __name__ == "__main__":
    main()
