"""Which tiles a product runs with: a small model of an SM's time, and measured exceptions by coarse shape.

`choose` asks, in this order: the table that ``fusedmoe tune`` wrote on this machine (tuned.py), the measurements that
come with fusedmoe (measured.py), the model. The candidates are data, legal by construction: the compile tests read the
SASS of each, and name the few values that are spilled. No tuning happens at run time.

The model, in cycles of an SM at the clock that an H100 keeps under full tensor load, 1.45 GHz:

    rows      = rows of an expert, as a router that chooses at random deals them out: at some quantiles, averaged
    tiles     = experts with rows * (row tiles in pairs * column tiles + row tile left over * column tiles in pairs)
    multiply  = tile_m * tile_n / 32                                            64 of K, at 2048 multiply-adds a cycle
    load      = (tile_m / sharers of the rows + tile_n / sharers of the weights) * 128 bytes / LOAD_BYTES_A_CYCLE
    main      = tiles of K * max(multiply, load)
    epilogue  = boxes of 64 x 32 results of a warpgroup * EPILOGUE_CYCLES[family]
    tile      = max(main, (main + epilogue) / 2) in ping-pong, else main + epilogue (+ WGRAD_CYCLES)
    sms_busy  = START_CYCLES + ceil(tiles / sms) * tile (+ the last tile's epilogue in ping-pong)
    readers   = clusters of row tiles that work side by side and read the same weights
    loaded    = columns of all column tiles, whole pairs of them where the rows are shared / columns
    memory    = bytes of operands and results / MEMORY_BYTES_A_CYCLE, weights (1 + READ_AGAIN * (readers - 1)
                + READ_PAST * (loaded - 1)) times
    cycles    = (sms_busy ** OVERLAP + memory ** OVERLAP) ** (1 / OVERLAP)

The last line is the maximum of both, nearly: where memory decides, the tiles that keep the SMs less busy are better.
What decides, then: how much of the last tiles is wasted; a cooperative tile's epilogue is exposed, that of a ping-pong
tile hidden; two column tiles that share the rows load more than the L2 gives, and weights that more than one cluster
reads do not stay in the L2 until all have read them; few rows stream weights, whatever the tiles. The constants are
fitted to measurements of 204 products of nine models' layers, with 4 to 4096 rows an expert, on an H100 (``python -m
benchmarks --only tiles`` makes them, the result files have them): what the model chooses takes 0.7% longer than the
best candidate there in the mean. Where a model's own layer loses more than 3%, measured.py has it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from fusedmoe.kernels.sm90 import tuned
from fusedmoe.kernels.sm90.config import EPILOGUE_COLUMNS, TILE_K, TileConfig
from fusedmoe.kernels.sm90.measured import MEASURED, Coarse

Family = Literal["plain", "activation", "transposed_activation", "derivative", "heavy_derivative", "wgrad"]

PP_192 = TileConfig(128, 192, 2, 1, pingpong=True)
PP_128 = TileConfig(128, 128, 2, 1, pingpong=True)
CO_256 = TileConfig(128, 256, 2, 1, pingpong=False)
CO_256_TALL = TileConfig(256, 128, 1, 2, pingpong=False)
CO_256_ALONE = TileConfig(128, 256, pingpong=False)

# Ragged rows come in clusters of two: two row tiles that share the weights, or, where an expert has one row tile left,
# two column tiles that share the rows (tiles.py). A CTA alone loads everything itself, which the L2 is too slow for,
# and is no faster even where there is one row an expert. Not here: 128x192 for "heavy" derivatives, those of GeGLU.
# Their code is unrolled to more instructions than an SM's cache holds, about 8,000: in a product of GPT-OSS-20B's size
# on an H100, 6,500 to 8,400 of them take 1.7 to 1.8 ms, 8,800 1.85, 9,000 2.1 to 2.2, 9,900 2.87; those of 128x128,
# 5,000 to 7,000, take 2.1. A loop over the two blocks of 64 rows, with the accumulators moved in between, would be half
# as long, but ptxas spills all of them then.
# Nor for a "transposed" activation, whose weight is [gate | up] with unit stride along N: both halves of a tile come
# 64 columns at a time.
# Measured and left out: 128x160 (a quarter slower than 128x192 throughout), L2 eviction hints on what is read once (up
# to 15% slower), 256x128 over two rows of a weight gradient (never the fastest), clusters that always share the weights
# (a second tile is often empty: up to a fifth slower, 256 to 640 rows an expert) or always the rows.
CANDIDATES: dict[Family, tuple[TileConfig, ...]] = {
    "plain": (PP_192, CO_256, PP_128),
    "activation": (PP_192, CO_256, PP_128),
    "transposed_activation": (CO_256, PP_128),
    "derivative": (PP_192, PP_128),
    "heavy_derivative": (PP_128,),
    "wgrad": (PP_192, CO_256, CO_256_TALL, CO_256_ALONE),
}

# Cycles of an epilogue for 64 x 32 results of a warpgroup, as far as nothing hides them. That of "heavy_derivative" is
# an estimate, that of "transposed_activation" the other activation's, the others are fitted.
EPILOGUE_CYCLES: dict[Family, int] = {
    "plain": 400, "activation": 600, "transposed_activation": 600, "derivative": 3450, "heavy_derivative": 4700,
    "wgrad": 680,
}  # fmt: skip
# Values of two bytes that a row has beside its K in memory, in columns of the result: read and written.
ROW_VALUES: dict[Family, float] = {
    "plain": 1, "activation": 1.5, "transposed_activation": 1.5, "derivative": 5, "heavy_derivative": 5, "wgrad": 1,
}  # fmt: skip
LOAD_BYTES_A_CYCLE = 36.5  # of an SM from the L2, all SMs loading
MEMORY_BYTES_A_CYCLE = 14.5 * 132  # of the GPU: 2.8 TB/s
READ_AGAIN = 0.25  # of the weights, out of memory, for every reader but the first
READ_PAST = 0.5  # of the weights that tiles past the last column would have
BAND_ROWS = 1024  # see `band`
START_CYCLES = 500.0  # of a tile whose loads cannot run ahead of it: once a CTA
WGRAD_CYCLES = 4100.0  # of a weight gradient's tile: its main loop is short, and begins where an expert does
OVERLAP = 11.0
# Quantiles of a normal distribution at 10%, 30%, ... 90%.
QUANTILES = (-1.28, -0.52, 0.0, 0.52, 1.28)


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
        """What measurements are kept under: (family, half octaves of rows an expert, columns, octaves of the depth).

        Half octaves are ``round(2 * log2(rows))``. Columns are as they are: how many tiles they fill decides.
        """
        return self.family, round(2 * _log2(self.rows / max(self.experts, 1))), self.columns, round(_log2(self.depth))


def _log2(extent: float) -> float:
    return math.log2(max(extent, 1))


def cycles(problem: Problem, config: TileConfig) -> float:
    """Estimate the cycles of a product, see the module's page."""
    p = problem
    if p.family == "wgrad":
        weights, reads = float(p.experts), 1.0
        k_tiles = max(p.rows / max(p.experts, 1) / TILE_K + 0.5, 1.0)  # an expert's rows end anywhere in the last one
        tall = _tiles(p.depth, config.tile_m, config.cluster_m)
        wide = _tiles(p.columns, config.tile_n, config.cluster_n)
        kinds = [(weights * tall * wide, config.cluster_n, config.cluster_m)]
    else:
        rows = p.rows / max(p.experts, 1)
        weights = -math.expm1(-rows) * p.experts  # of experts that have any row
        k_tiles = float(-(-p.depth // TILE_K))
        row_tiles = [math.ceil(max(rows + z * math.sqrt(rows), 1.0) / config.tile_m) for z in QUANTILES]
        side_by_side = max(BAND_ROWS // (config.tile_m * config.cluster_m), 1)
        readers = _mean([min((n + 1) // 2, side_by_side) for n in row_tiles])
        reads = 1 + READ_AGAIN * (readers - 1)
        in_pairs, left_over = _mean([n // 2 * 2 for n in row_tiles]), _mean([n % 2 for n in row_tiles])
        kinds = [
            (weights * in_pairs * _tiles(p.columns, config.tile_n, 1), 1, 2),
            (weights * left_over * _tiles(p.columns, config.tile_n, 2), 2, 1),
        ]
        loaded = sum(n for n, _, _ in kinds) * config.tile_n / max(weights * (in_pairs + left_over) * p.columns, 1.0)
        reads += READ_PAST * (loaded - 1)
    multiply = config.tile_m * config.tile_n / 32
    epilogue = float(EPILOGUE_CYCLES[p.family] * config.blocks * config.tile_n // EPILOGUE_COLUMNS)
    tiles = work = 0.0
    for count, rows_shared, weights_shared in kinds:
        load = (config.tile_m / rows_shared + config.tile_n / weights_shared) * TILE_K * 2 / LOAD_BYTES_A_CYCLE
        main = k_tiles * max(multiply, load)
        tile = max(main, (main + epilogue) / 2) if config.pingpong else main + epilogue
        if p.family == "wgrad":
            tile += WGRAD_CYCLES
        tiles, work = tiles + count, work + count * tile
    tile = work / max(tiles, 1.0)
    busy = START_CYCLES + max(math.ceil(tiles / p.sms), 1) * tile
    if config.pingpong:
        busy += epilogue  # nothing hides the last tile's
    values = p.rows * (p.depth + ROW_VALUES[p.family] * p.columns) + reads * weights * p.columns * p.depth
    memory = 2 * values / MEMORY_BYTES_A_CYCLE
    return float((busy**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP))


def _mean(values: list[int]) -> float:
    return sum(values) / len(values)


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
    rows = BAND_ROWS
    if problem.family in ("derivative", "heavy_derivative") and problem.columns * problem.depth <= 4 << 20:
        rows = 256
    return max(rows // (config.tile_m * config.cluster_m), 1)
