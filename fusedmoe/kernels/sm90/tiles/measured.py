"""Shapes for which the model of choice.py does not choose the fastest tiles, as data.

A key is a `choice.Problem.coarse`; a value is the name of a configuration. The table has the layers of known models
for which the model's choice is more than 2% slower than the best.

Source: NVIDIA H100 80GB HBM3, 2026-11-21, and NVIDIA H200, 2026-11-23 (``trials.json``); bf16, random routing, medians.
Differences below 5% may be noise.
"""

from __future__ import annotations

Coarse = tuple[str, int, int, int]

MEASURED: dict[Coarse, str] = {
    # on the H100
    # hidden 2048, intermediate 1024, 64 experts of 4096 rows
    ("derivative", 24, 1024, 11): "128x192pp_c21",
    # hidden 2048, intermediate 768, 128 experts of 320 rows, and of 512
    ("derivative", 17, 768, 11): "128x128pp_c21",
    ("derivative", 18, 768, 11): "128x128pp_c21",
    # hidden and intermediate 2880, 32 experts of 64 rows
    ("plain", 12, 2880, 11): "128x192pp_c21",
    # hidden 2048, intermediate 512, 512 experts of 320 rows
    ("plain", 17, 2048, 9): "128x256co_c21",
    # on the H200
    # hidden 1536, intermediate 256, 128 experts of 1536 rows
    ("wgrad_gathered_b", 21, 1536, 9): "256x128co_c12",
    # hidden 1536, intermediate 1024, 32 experts of 1536 rows: FC2, and FC1's input gradient
    ("plain", 21, 1536, 10): "128x128pp_c21",
    ("plain", 21, 1536, 11): "128x128pp_c21",
    # hidden 4096, intermediate 1024, 64 experts of 2048 rows: FC2, and FC1's input gradient
    ("plain", 22, 4096, 10): "128x128pp_c21",
    ("plain", 22, 4096, 11): "128x128pp_c21",
    # FC1's input gradient: hidden 2048, intermediate 768, 128 experts of 2048 rows, and of 512
    ("plain", 22, 2048, 11): "128x128pp_c21",
    ("plain", 18, 2048, 11): "128x128pp_c21",
    # FC1's input gradient: hidden 4096, intermediate 1408, 128 experts of 512 rows
    ("plain", 18, 4096, 11): "128x128pp_c21",
}
