"""The measured peak performance of this GPU, to which results are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusedmoe.commands.timing import Timer

CEILING_SIZE = 8192
COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Ceiling:
    """Performance of this GPU in this run: a dense bf16 matrix product, and a copy (bytes read and written)."""

    tflops: float
    copy_tb_s: float


def ceiling(timer: Timer, device: torch.device) -> Ceiling:
    """Measure ``8192^3`` with `torch.matmul`, and a copy of 1 GiB."""
    a, b = (torch.randn(CEILING_SIZE, CEILING_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randint(-128, 128, (COPY_BYTES,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    times = timer.measure({"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)})
    return Ceiling(
        tflops=2 * CEILING_SIZE**3 / times["matmul"].median_ms / 1e9,
        copy_tb_s=2 * COPY_BYTES / times["copy"].median_ms / 1e9,
    )
