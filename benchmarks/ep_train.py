"""Training of a Qwen3-MoE whose experts several GPUs share: `examples/qwen3_moe_expert_parallel.py`, with the experts
of `fusedmoe` and with those of transformers under FSDP2. The figures go to ``ep_train.json``.

Each variant is a job of its own, which ``torchrun`` starts on all GPUs of the machine. All have the same text, batch,
random weights, and AdamW in fp32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.marked import table
from benchmarks.results import write

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "qwen3_moe_expert_parallel.py"
STOCK = "transformers, FSDP2"
OURS = ("--capacity", "2")  # memory for twice the rows of even routing; more rows would be an error
VARIANTS = {
    STOCK: ("--experts", "stock"),
    f"{STOCK}, compiled": ("--experts", "stock", "--compile"),
    "fusedmoe": OURS,
    "fusedmoe, compiled": (*OURS, "--compile"),
    "fusedmoe, fp8_block, compiled": (*OURS, "--recipe", "fp8_block", "--compile"),
    "fusedmoe, fp8_block, codes travel, compiled": (*OURS, "--recipe", "fp8_block", "--dispatch-fp8", "--compile"),
}
SIZES = {"shape": "qwen3-30b-a3b", "layers": 14, "length": 2048, "sequences": 4, "steps": 40, "every": 10}
LAYERS_OF_140_GB = 26  # by arithmetic: they have not run; SIZES has those that fit 80 GB
TINY = {"shape": "tiny", "layers": 1, "length": 32, "sequences": 1, "steps": 4, "every": 2}
TIMEOUT_S = 300

SECTION = """\
### Training of a model

`python -m benchmarks --only ep-train` runs `examples/qwen3_moe_expert_parallel.py` on all GPUs of a machine: the first
layers of Qwen3-30B-A3B with random weights, the text of docs/ by bytes, AdamW in fp32, products in bf16. *{stock}* has
the experts of transformers, sharded by FSDP2 as all other parameters are. *compiled*: attention, norms and the loss
are, by `torch.compile`. The experts of each token are drawn, all with the same probability: random routers would send
most tokens to the same few experts. A rank has memory for twice the rows of even routing (`capacity=2`), and more would
be an error. As many layers are kept as fit into memory, which all variants allocate by `expandable_segments`. The speed
is the median over the intervals of {every} steps after the first one. Each of them ends with a collective of all ranks,
after which the hosts start with empty queues.
"""
MEASURED = """\
{ranks} x {machine}, torch {torch}, transformers {transformers}, commit {commit}: {layers} layers, {sequences} sequences
of {length} tokens per rank, {steps} steps.

{rows}
"""


def settings() -> dict[str, Any]:
    """Return the sizes: those of a GPU with its memory, or tiny ones for a CPU."""
    if not torch.cuda.is_available():
        return TINY
    large = torch.cuda.get_device_properties(0).total_memory > 130e9
    return SIZES | {"layers": LAYERS_OF_140_GB} if large else SIZES


def run(ranks: int, sizes: dict[str, Any], results: Path) -> Path:
    """Train each variant, and print its figures. Write the file after each, and return it."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_text("".join(file.read_text("utf-8") for file in sorted((ROOT / "docs").glob("*.md"))), "utf-8")
        for name, options in VARIANTS.items():
            rows[name] = _trained(ranks, sizes, text, options)
            print(f"{name:30}{_line(rows[name])}", flush=True)
            written = write(results, "ep_train", {"ranks": ranks, **sizes, "rows": rows})
    return written


def _trained(ranks: int, sizes: dict[str, Any], text: Path, options: Iterable[str]) -> dict[str, Any]:
    """Return the result of a job, or its error as ``note``."""
    batch, common = ranks * sizes["sequences"], ("shape", "layers", "length", "steps", "every")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(EXAMPLE), "--draw-experts", "--text", str(text), "--lr", "1e-4", "--batch", str(batch), *options]
    command += [word for name in common for word in (f"--{name}", str(sizes[name]))]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # without this, the memory that torch holds and cannot use limits the number of layers
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | os.environ | {"PYTHONPATH": path}
    try:
        job = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired as ended:
        said = (ended.stderr or b"").decode()
        return {"note": f"did not end within {TIMEOUT_S} s: {said[-4000:]}"}
    if job.returncode:
        return {"note": job.stderr[-4000:]}
    return json.loads(job.stdout.splitlines()[-1])


def _line(row: dict[str, Any]) -> str:
    if "note" in row:
        return row["note"]
    peak = max(row["peak_gib"])
    return f"{row['tokens_per_s']:9,.0f} tokens/s per rank  {peak:5.1f} GiB  loss {row['losses'][-1]:.4f}"


def render(measured: Iterable[dict[str, Any]]) -> str:
    """Return the part of docs/benchmarks.md, with a table for each machine that has results."""
    parts = [SECTION.format(stock=STOCK, every=SIZES["every"])]
    for results in measured:
        done = {name: row for name, row in results["rows"].items() if "note" not in row}
        stock = done[STOCK]["tokens_per_s"] if STOCK in done else None
        rows = [
            [
                name, f"{row['tokens_per_s']:,.0f}", "" if stock is None else f"{row['tokens_per_s'] / stock:.2f}",
                f"{max(row['peak_gib']):.1f}", f"{row['losses'][-1]:.3f}",
            ]
            for name, row in done.items()
        ]  # fmt: skip
        heading = {name: results[name] for name in ("ranks", "machine", "commit", "layers", "sequences", "length")}
        versions = {name: results["versions"][name] for name in ("torch", "transformers")}
        head = ["experts", "tokens/s per GPU", f"x {STOCK}", "peak, GiB", "last loss"]
        parts.append(MEASURED.format(**heading, **versions, steps=results["steps"], rows=table(head, rows)))
    return "\n".join(parts)
