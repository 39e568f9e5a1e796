"""Shapes whose best tiles were measured and are not what the model of choice.py says, as data.

``(family, log2 of the rows an expert, columns, log2 of the depth)``, as `choice.Problem.coarse` rounds
them, to a configuration's name. A shape belongs here if the model's choice is more than 3% slower than the best.

Source: NVIDIA H100 80GB HBM3, 2026-11-21, bf16, rows spread evenly, medians; differences below 5% may be noise.
"""

from __future__ import annotations

Coarse = tuple[str, int, int, int]

MEASURED: dict[Coarse, str] = {
    # hidden 1536, intermediate 256: 512 columns are three tiles of 192, or four whole ones of 128
    ("activation", 11, 512, 11): "128x128pp_c12",
    # hidden 4096, intermediate 1024: gradient of the first layer's input. 128x192pp_c12, the fastest with a band of two
    # clusters, is the slowest with that of `choice.band`: 3.84 ms against QuACK's 3.22.
    ("plain", 11, 4096, 11): "128x256co_c21",
    # hidden 4096, intermediate 1536
    ("derivative", 10, 1536, 12): "128x192pp_c12",
    # hidden 2048, intermediate 512, 512 experts of 320 rows. Measured with bands of two clusters, which make those of
    # one row tile stream the weights twice; `choice.band` has more now, so these may do better than they did.
    ("activation", 8, 1024, 11): "128x192pp_c21",
    ("plain", 8, 2048, 9): "128x256co_c12",
    ("plain", 8, 2048, 10): "128x192pp_c21",
    ("derivative", 8, 512, 11): "128x192pp_c12",
}
