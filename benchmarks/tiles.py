"""Times of all candidate tiles for many layers, to which the constants of `fusedmoe.kernels.sm90.tiles.choice` are
fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from fusedmoe.kernels.sm90.tiles import tuning
from fusedmoe.kernels.sm90.tiles.tuning import Mlp

# rows per expert, from text generation to a training step, by (hidden, intermediate, experts, chosen experts per token)
# of models' layers
LAYERS: dict[tuple[int, int, int, int], tuple[int, ...]] = {
    (1536, 256, 128, 8): (1536,),
    (1536, 1024, 32, 2): (1536,),
    (4096, 1024, 64, 4): (2048,),
    (4096, 1408, 128, 8): (512,),
    (2048, 1024, 64, 8): (4096,),
    (2048, 768, 128, 8): (4, 16, 64, 100, 160, 320, 512, 1024, 2048),
    (2048, 512, 512, 10): (16, 64, 128, 200, 320, 640),
    (4096, 1536, 128, 8): (16, 64, 256, 512, 1024),
    (4096, 14336, 8, 2): (16, 64, 256, 1024, 4096),
    (2880, 2880, 32, 4): (64, 300, 2048),
    (7168, 2048, 8, 1): (64, 512, 4096),
}


def measure(device: torch.device, reps: int) -> Iterator[dict[str, Any]]:
    """Yield each product of the layers' training steps, with the milliseconds of its candidates by name."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    for (hidden, intermediate, experts, top_k), rows in LAYERS.items():
        for rows_per_expert in rows:
            mlp = Mlp(hidden, intermediate, experts, rows_per_expert * experts, top_k=top_k)
            for product in tuning.products(mlp, sms):
                times = tuning.measure(mlp, product, reps, lambda config: None)
                ms = {config.name: round(taken, 5) for config, taken in times.items()}
                yield {"problem": asdict(product.problem), "ms": ms}
            print(f"{hidden} x {intermediate}, {experts} experts of {rows_per_expert} rows: measured", flush=True)
