"""Which tiles a product runs with: a small model of an SM's time, and measured exceptions by coarse shape.

The candidates are data, legal by construction: each one compiles without spills (the compile tests read its SASS). No
tuning happens at run time; ``fusedmoe tune`` measures the candidates of a shape on this machine.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from fusedmoe.kernels.sm90.config import TILE_K, TileConfig

Family = Literal["plain", "activation", "derivative", "heavy_derivative", "wgrad"]

PP_192 = TileConfig(128, 192, 2, 1, pingpong=True)
PP_128 = TileConfig(128, 128, 2, 1, pingpong=True)
CO_256 = TileConfig(128, 256, 2, 1, pingpong=False)
CO_256_TALL = TileConfig(256, 128, 1, 2, pingpong=False)
PP_192_WIDE = TileConfig(128, 192, 1, 2, pingpong=True)
PP_128_WIDE = TileConfig(128, 128, 1, 2, pingpong=True)
CO_256_WIDE = TileConfig(128, 256, 1, 2, pingpong=False)
PP_128_ALONE = TileConfig(128, 128, pingpong=True)
CO_256_ALONE = TileConfig(128, 256, pingpong=False)

# A cluster of two row tiles shares the weights and wastes half of itself where an expert's rows end; one of two column
# tiles shares the rows. A CTA alone loads everything itself, which the L2 is too slow for, but it can draw its tiles
# from a counter. Not here, since they spill registers: 128x192 for a clamped, interleaved or erf derivative ("heavy").
# Measured and left out: 128x160 (a quarter slower than 128x192 throughout), L2 eviction hints on what is read once (up
# to 15% slower), 256x128 over two rows of a weight gradient (never the fastest).
CANDIDATES: dict[Family, tuple[TileConfig, ...]] = {
    "plain": (PP_192, PP_192_WIDE, CO_256, CO_256_WIDE, PP_128_WIDE, CO_256_ALONE),
    "activation": (PP_192, PP_192_WIDE, CO_256, CO_256_WIDE, PP_128_WIDE, CO_256_ALONE),
    "derivative": (PP_192, PP_192_WIDE, PP_128_WIDE, PP_128_ALONE),
    "heavy_derivative": (PP_128, PP_128_WIDE, PP_128_ALONE),
    "wgrad": (PP_192, CO_256, CO_256_TALL, CO_256_ALONE),
}

# Cycles of an epilogue for 64 x 32 results of a warpgroup, and what a ping-pong pair cannot hide of it.
EPILOGUE_CYCLES: dict[Family, int] = {
    "plain": 350, "activation": 900, "derivative": 1600, "heavy_derivative": 2200, "wgrad": 350,
}  # fmt: skip
LOAD_BYTES_A_CYCLE = 40.0  # of an SM from the L2, all SMs loading
START_CYCLES = 1500.0  # of a tile whose loads cannot run ahead of it: once a CTA


@dataclass(frozen=True)
class Problem:
    """A product, as far as the choice depends on it.

    Attributes
    ----------
    rows, experts : int
        Rows in all, and experts. For a weight gradient, the rows are what is summed over.
    columns, depth : int
        Columns of the result (accumulators: gate and up count twice); extent of the contraction. For a weight gradient
        the result's columns and rows.
    sms : int
        CTAs at a time.
    """

    family: Family
    rows: int
    experts: int
    columns: int
    depth: int
    sms: int
    alone: bool = False


def cycles(problem: Problem, config: TileConfig) -> float:
    """Estimate the cycles of a product."""
    p = problem
    if p.family == "wgrad":
        tiles = float(p.experts * _tiles(p.depth, config.tile_m, config.cluster_m))
        tiles *= _tiles(p.columns, config.tile_n, config.cluster_n)
        k_tiles = max(p.rows / p.experts / TILE_K + 0.5, 1.0)
    else:
        rows = p.rows / max(p.experts, 1)
        granule = config.tile_m * config.cluster_m
        # experts' rows end anywhere in their last tile
        a_expert = max((rows + granule / 2) / granule, min(rows, 1.0)) * config.cluster_m
        tiles = a_expert * p.experts * _tiles(p.columns, config.tile_n, config.cluster_n)
        k_tiles = -(-p.depth // TILE_K)
    multiply = config.tile_m * config.tile_n / 32
    load = (config.tile_m / config.cluster_n + config.tile_n / config.cluster_m) * TILE_K * 2 / LOAD_BYTES_A_CYCLE
    main_loop = k_tiles * max(multiply, load)
    epilogue = EPILOGUE_CYCLES[p.family] * config.blocks * config.tile_n / 32
    tile = max(main_loop, (main_loop + epilogue) / 2) if config.pingpong else main_loop + epilogue
    return START_CYCLES + max(tiles / p.sms, 1.0) * tile


def _tiles(extent: int, tile: int, cluster: int) -> int:
    return -(-extent // (tile * cluster)) * cluster


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem) -> TileConfig:
    """Return the candidate with the least estimated time."""
    candidates = [c for c in CANDIDATES[problem.family] if c.ctas == 1 or not problem.alone]
    return min(candidates, key=lambda config: cycles(problem, config))


def band(problem: Problem, config: TileConfig) -> int:
    """Return how many row tiles (clusters) of an expert are worked on side by side, see `tiles.place`.

    A thousand rows: fewer and large weights are streamed from memory again and again, more and the rows are. The
    derivative streams so much past the L2 beside its operands that rows are best used at once, by all column tiles
    together, as long as the weights are small: 1.51 ms against 1.70 (Qwen3-30B-A3B on an H100).
    """
    rows = 1024
    if problem.family in ("derivative", "heavy_derivative") and problem.columns * problem.depth <= 4 << 20:
        rows = 256
    return max(rows // (config.tile_m * config.cluster_m), 1)
