"""Which tiles a product runs with: a small model of an SM's time, and measured exceptions by coarse shape.

`choose` asks, in this order: the table that ``fusedmoe tune`` wrote on this machine (tuned.py), the measurements that
come with fusedmoe (measured.py), the model. The candidates are data, legal by construction: each one compiles without
spills (the compile tests read its SASS). No tuning happens at run time.

The model, in cycles of an SM at the clock that an H100 keeps under full tensor load, 1.45 GHz:

    tiles     = experts with rows * row tiles of an expert, whole clusters * column tiles, whole clusters
    multiply  = tile_m * tile_n / 32                                            64 of K, at 2048 multiply-adds a cycle
    load      = (tile_m / cluster_n + tile_n / cluster_m) * 128 bytes / LOAD_BYTES_A_CYCLE
    main      = tiles of K * max(multiply, load)
    epilogue  = boxes of 64 x 32 results of a warpgroup * EPILOGUE_CYCLES[family]
    tile      = max(main, (main + epilogue) / 2) in ping-pong, else main + epilogue
    sms_busy  = START_CYCLES + ceil(tiles / sms) * tile (+ the last tile's epilogue in ping-pong)
    memory    = bytes of operands and results, each once / MEMORY_BYTES_A_CYCLE
    cycles    = (sms_busy ** OVERLAP + memory ** OVERLAP) ** (1 / OVERLAP)

The last line is the maximum of both, but for what overlaps badly where they are alike. What decides, then: a cluster of
two row tiles wastes up to 256 rows an expert, any other up to 128; a cooperative tile's epilogue is exposed, that of a
ping-pong tile hidden; a CTA alone, and two column tiles that share the rows, load more than the L2 gives; few rows
stream weights, whatever the tiles. The constants are fitted to measurements of nine models' layers on an H100: what
the model chooses is within 3% of the best candidate there, but where measured.py says otherwise.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from fusedmoe.kernels.sm90 import tuned
from fusedmoe.kernels.sm90.config import EPILOGUE_COLUMNS, TILE_K, TileConfig
from fusedmoe.kernels.sm90.measured import MEASURED, Coarse

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
# tiles shares the rows. A CTA alone loads everything itself, which the L2 is too slow for. Not here, since they
# spill registers: 128x192 for derivatives but those of plain SwiGLU and squared ReLU ("heavy": all others).
# Measured and left out: 128x160 (a quarter slower than 128x192 throughout), L2 eviction hints on what is read once (up
# to 15% slower), 256x128 over two rows of a weight gradient (never the fastest).
CANDIDATES: dict[Family, tuple[TileConfig, ...]] = {
    "plain": (PP_192, PP_192_WIDE, CO_256, CO_256_WIDE, PP_128_WIDE, CO_256_ALONE),
    "activation": (PP_192, PP_192_WIDE, CO_256, CO_256_WIDE, PP_128_WIDE, CO_256_ALONE),
    "derivative": (PP_192, PP_192_WIDE, PP_128_WIDE, PP_128_ALONE),
    "heavy_derivative": (PP_128, PP_128_WIDE, PP_128_ALONE),
    "wgrad": (PP_192, CO_256, CO_256_TALL, CO_256_ALONE),
}

# Cycles of an epilogue for 64 x 32 results of a warpgroup, as far as nothing hides them. That of "heavy_derivative" is
# an estimate, the others are fitted.
EPILOGUE_CYCLES: dict[Family, int] = {
    "plain": 300, "activation": 1250, "derivative": 2100, "heavy_derivative": 2900, "wgrad": 380,
}  # fmt: skip
# Values of two bytes that a row has beside its K in memory, in columns of the result: read and written.
ROW_VALUES: dict[Family, float] = {
    "plain": 1, "activation": 1.5, "derivative": 5, "heavy_derivative": 5, "wgrad": 1,
}  # fmt: skip
LOAD_BYTES_A_CYCLE = 36.5  # of an SM from the L2, all SMs loading
MEMORY_BYTES_A_CYCLE = 15.0 * 132  # of the GPU: 2.9 TB/s
START_CYCLES = 1500.0  # of a tile whose loads cannot run ahead of it: once a CTA
OVERLAP = 4.5
# Experts have more and fewer rows than the mean, so the model counts row tiles for each of these shares of it.
LOADS = (0.8, 0.9, 1.0, 1.1, 1.2)


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

    @property
    def coarse(self) -> Coarse:
        """What measurements are kept under: (family, log2 of the rows an expert, columns, log2 of the depth).

        Both logarithms are rounded. Columns are not: how many tiles they fill decides.
        """
        return self.family, _log2(self.rows / max(self.experts, 1)), self.columns, _log2(self.depth)


def _log2(extent: float) -> int:
    return round(math.log2(max(extent, 1)))


def cycles(problem: Problem, config: TileConfig) -> float:
    """Estimate the cycles of a product, see the module's page."""
    p = problem
    weights = float(p.experts)
    if p.family == "wgrad":
        tiles = float(p.experts * _tiles(p.depth, config.tile_m, config.cluster_m))
        k_tiles = max(p.rows / max(p.experts, 1) / TILE_K + 0.5, 1.0)  # an expert's rows end anywhere in the last one
    else:
        rows = p.rows / max(p.experts, 1)
        weights *= -math.expm1(-rows)  # of experts that have any row, with rows thrown at random
        tiles = weights * sum(_tiles(rows * load, config.tile_m, config.cluster_m) for load in LOADS) / len(LOADS)
        k_tiles = float(-(-p.depth // TILE_K))
    tiles *= _tiles(p.columns, config.tile_n, config.cluster_n)
    multiply = config.tile_m * config.tile_n / 32
    load = (config.tile_m / config.cluster_n + config.tile_n / config.cluster_m) * TILE_K * 2 / LOAD_BYTES_A_CYCLE
    main = k_tiles * max(multiply, load)
    epilogue = float(EPILOGUE_CYCLES[p.family] * config.blocks * config.tile_n // EPILOGUE_COLUMNS)
    turns = max(math.ceil(tiles / p.sms), 1)
    tile = max(main, (main + epilogue) / 2) if config.pingpong else main + epilogue
    busy = START_CYCLES + turns * tile + (epilogue if config.pingpong else 0)  # nothing hides the last tile's
    values = p.rows * (p.depth + ROW_VALUES[p.family] * p.columns) + weights * p.columns * p.depth
    memory = 2 * values / MEMORY_BYTES_A_CYCLE
    return float((busy**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP))


def _tiles(extent: float, tile: int, cluster: int) -> int:
    return math.ceil(extent / (tile * cluster)) * cluster


def candidates(problem: Problem) -> tuple[TileConfig, ...]:
    """Return the configurations that a product may run with."""
    return CANDIDATES[problem.family]


def by_model(problem: Problem) -> TileConfig:
    """Return the candidate with the least estimated time."""
    return min(candidates(problem), key=lambda config: cycles(problem, config))


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem) -> TileConfig:
    """Return the tiles to run a product with."""
    by_name = {config.name: config for config in candidates(problem)}
    for table in (tuned.table(), MEASURED):
        name = table.get(problem.coarse)
        if name in by_name:
            return by_name[name]
    return by_model(problem)


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
