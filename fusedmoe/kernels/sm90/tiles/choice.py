"""The choice of a product's tile configuration: a model of an SM's time, and measured exceptions by coarse shape.

`choose` looks in this order: the table that ``fusedmoe tune`` wrote on this machine (tuned.py), the measurements that
come with fusedmoe (measured.py), the model. All candidates are legal (legal.py). The compile tests read the SASS of
each, and list the few register spills. Nothing is tuned at run time.

The model, in cycles of an SM at 1.45 GHz, the clock of an H100 under full tensor load:

    row tiles = of an expert: the mean over some quantiles of its rows under random routing; exact for one group
    tiles     = experts with rows * (row tiles in pairs * column tiles + row tile left over * column tiles in pairs)
    multiply  = tile_m * tile_n / 32 for a tile of K: 64 two-byte elements, 2048 multiply-adds per cycle;
                times GATHERED_WIDE for ragged M with gathered rows and more than 128 columns
    load      = (tile_m / sharers of the rows + tile_n / sharers of the weights) * 128 bytes / LOAD_BYTES_PER_CYCLE;
                gathered rows are never shared
    main      = tiles of K * max(multiply, load)
    epilogue  = boxes of 64 x 32 results per warpgroup * EPILOGUE_CYCLES[family]
    tile      = max(main, (main + epilogue) / 2) for ping-pong, else main + epilogue; weight gradient: + WGRAD_CYCLES
    sms_busy  = START_CYCLES + ceil(tiles / sms) * tile (+ the last tile's epilogue for ping-pong)
    readers   = clusters of row tiles that run concurrently and read the same weights
    loaded    = (columns of all column tiles, in whole pairs if the rows are shared) / columns
    memory    = bytes of operands and results / MEMORY_BYTES_PER_CYCLE, with weights counted
                1 + READ_AGAIN * (readers - 1) + READ_PAST * (loaded - 1) times
    cycles    = (sms_busy ** OVERLAP + memory ** OVERLAP) ** (1 / OVERLAP)

The last line is nearly the maximum of both. If memory dominates, it prefers the tiles that keep the SMs less busy.

So the model has these effects:

- The rows that are wasted in an expert's last tiles cost time.
- The epilogue of a cooperative tile is exposed.
- Two column tiles that share the rows load more than the L2 delivers.
- Weights that several clusters read leave the L2 before all have read them.
- With few rows, reading the weights dominates.

The constants are fitted to measurements of 204 products on an H100: layers of nine models, 4 to 4096 rows per expert,
bf16 (``python -m benchmarks --only tiles``; the result files contain them). On average, the model's choice takes 0.7%
longer than the best candidate. GATHERED_WIDE is fitted to 12 products of gathered rows on an H200, where the model's
choice is the best candidate (``trials.json``). measured.py has the layers of known models where the choice takes more
than 2% longer.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from fusedmoe.kernels.sm90.tiles import tuned
from fusedmoe.kernels.sm90.tiles.config import ELEMENT_BYTES, EPILOGUE_COLUMNS, SWIZZLE_BYTES, TileConfig
from fusedmoe.kernels.sm90.tiles.legal import Needs, RaggedKNeeds, RaggedMNeeds, why_not
from fusedmoe.kernels.sm90.tiles.measured import MEASURED, Coarse

Family = Literal[
    "plain", "activation", "transposed_activation", "derivative", "heavy_derivative", "wgrad", "wgrad_gathered_a",
    "wgrad_gathered_b", "fp8_plain", "fp8_activation", "fp8_derivative", "fp8_derivative_codes",
    "fp8_wgrad",
]  # fmt: skip
WGRADS: dict[str | None, Family] = {None: "wgrad", "a": "wgrad_gathered_a", "b": "wgrad_gathered_b"}
"""The families of a weight gradient, by the gathered operand."""
RAGGED_K: frozenset[Family] = frozenset((*WGRADS.values(), "fp8_wgrad"))  # the families of all weight gradients
GATHERED = "_gathered"  # suffix of a family in `Problem.coarse`: a ragged M product of gathered rows

PP_192 = TileConfig(128, 192, 2, 1, pingpong=True)
PP_128 = TileConfig(128, 128, 2, 1, pingpong=True)
CO_256 = TileConfig(128, 256, 2, 1, pingpong=False)
CO_256_TALL = TileConfig(256, 128, 1, 2, pingpong=False)
CO_256_ALONE = TileConfig(128, 256, pingpong=False)
PP_192_TALL = TileConfig(192, 128, 1, 2, pingpong=True)
CO_256_TALL_ALONE = TileConfig(256, 128, pingpong=False)
CO_256_ROWS = TileConfig(256, 128, 2, 1, pingpong=False)
CO_128 = TileConfig(128, 128, 2, 1, pingpong=False)

# Clusters of a ragged M product have two CTAs: two row tiles that share the weights, or two column tiles of a row tile
# left over that share the rows (gemm/scheduler.py). A CTA without a cluster loads both operands itself. The L2 is too
# slow for that, and such a CTA is no faster even with one row per expert.
# "heavy_derivative", that of GeGLU, has no 128x192: its unrolled code exceeds an SM's instruction cache of about 8,000
# instructions. In a product of GPT-OSS-20B's size on an H100, 6,500 to 8,400 instructions take 1.7 to 1.8 ms, 8,800
# 1.85, 9,000 2.1 to 2.2, 9,900 2.87; those of 128x128, 5,000 to 7,000, take 2.1. A loop over the two blocks of 64 rows,
# with the accumulators moved in between, would be half as long, but ptxas then spills all of them.
# "wgrad_gathered_a" and "wgrad_gathered_b": a cluster cannot share the gathered operand. So that operand has the short
# side of the tile, and the cluster shares the other one: the L2 delivers the fewest bytes.
# "fp8_wgrad": of tiles with the same estimate, the first one is chosen. Tall ones read the fewest scales.
# Measured and left out: 128x160 (a quarter slower than 128x192 throughout); L2 eviction hints on data that is read once
# (up to 15% slower); 256x128 over two rows of a weight gradient (never the fastest); clusters that always share the
# weights (a second tile is often empty: up to a fifth slower with 256 to 640 rows per expert) or always the rows.
_WANTED: dict[Family, tuple[TileConfig, ...]] = {
    "plain": (PP_192, CO_256, PP_128),
    "activation": (PP_192, CO_256, PP_128),
    "transposed_activation": (PP_192, CO_256, PP_128),
    "derivative": (PP_192, PP_128),
    "heavy_derivative": (PP_128,),
    "wgrad": (PP_192, CO_256, CO_256_TALL, CO_256_ALONE),
    "wgrad_gathered_a": (PP_192, CO_256, CO_256_ALONE),
    "wgrad_gathered_b": (PP_192_TALL, CO_256_TALL, CO_256_TALL_ALONE),
    "fp8_plain": (CO_256, CO_256_ROWS),
    "fp8_activation": (CO_256,),
    "fp8_derivative": (CO_256_ROWS, CO_128),
    "fp8_derivative_codes": (CO_256_ROWS,),
    "fp8_wgrad": (CO_256_TALL, CO_256, CO_256_ALONE),
}
NEEDS: dict[Family, Needs] = {
    "plain": RaggedMNeeds(),
    "activation": RaggedMNeeds(halves=True),
    "transposed_activation": RaggedMNeeds(halves=True, b_major="n"),
    "derivative": RaggedMNeeds(reads=True),
    "heavy_derivative": RaggedMNeeds(reads=True),
    **{family: RaggedKNeeds(gathered=gathered) for gathered, family in WGRADS.items()},
    "fp8_plain": RaggedMNeeds(scaled=True),
    "fp8_activation": RaggedMNeeds(scaled=True, halves=True),
    "fp8_derivative": RaggedMNeeds(scaled=True, reads=True),
    "fp8_derivative_codes": RaggedMNeeds(scaled=True, reads=True, blocks=True),
    "fp8_wgrad": RaggedKNeeds(scaled=True),
}
"""The properties of the kernels of each family that their tiles depend on."""
CANDIDATES = {
    family: tuple(config for config in configs if why_not(config, NEEDS[family]) is None)
    for family, configs in _WANTED.items()
}
"""The configurations that `choose` compares, by family: those for which there is a kernel."""

# Cycles of an epilogue for 64 x 32 results of a warpgroup, if nothing overlaps them. "heavy_derivative" is an estimate,
# "transposed_activation" has the value of "activation", and a gathered weight gradient that of "wgrad". The others are
# fitted.
EPILOGUE_CYCLES: dict[Family, int] = {
    "plain": 400, "activation": 600, "transposed_activation": 600, "derivative": 3450, "heavy_derivative": 4700,
    "wgrad": 680, "wgrad_gathered_a": 680, "wgrad_gathered_b": 680, "fp8_plain": 400, "fp8_activation": 700,
    "fp8_derivative": 1200, "fp8_derivative_codes": 2000, "fp8_wgrad": 150,
}  # fmt: skip
# Values that a row reads and writes in memory besides its K operands, per column of the result.
ROW_VALUES: dict[Family, float] = {
    "plain": 1, "activation": 1.5, "transposed_activation": 1.5, "derivative": 5, "heavy_derivative": 5, "wgrad": 1,
    "wgrad_gathered_a": 1, "wgrad_gathered_b": 1, "fp8_plain": 2, "fp8_activation": 2.5, "fp8_derivative": 5,
    "fp8_derivative_codes": 5, "fp8_wgrad": 1,
}  # fmt: skip
LOAD_BYTES_PER_CYCLE = 36.5  # per SM from the L2, all SMs loading
MEMORY_BYTES_PER_CYCLE = 14.5 * 132  # per GPU: 2.8 TB/s
READ_AGAIN = 0.25  # part of the weights that each reader after the first reads from memory
READ_PAST = 0.5  # part of the weights that tiles past the last column would have
GATHERED_WIDE = 1.4
BAND_ROWS = 1024  # see `band`
START_CYCLES = 500.0  # of the first tile of a CTA, whose loads overlap nothing
WGRAD_CYCLES = 4100.0  # per tile of a weight gradient: its mainloop is short, and starts at an expert's first row
OVERLAP = 11.0
# Quantiles of a normal distribution at 10%, 30%, ... 90%.
QUANTILES = (-1.28, -0.52, 0.0, 0.52, 1.28)


@dataclass(frozen=True)
class Problem:
    """The properties of a product that the choice depends on."""

    family: Family
    rows: int  # of all experts; the contraction of a weight gradient
    experts: int
    columns: int  # of the accumulators (gate and up together), or of a weight gradient
    depth: int  # extent of the contraction, or rows of a weight gradient
    sms: int  # concurrent CTAs
    element_bytes: int = ELEMENT_BYTES  # of an operand's element
    gathered: bool = False  # whether rows are read through an index: ragged M

    @property
    def tile_k(self) -> int:
        """Extent of K in a stage."""
        return SWIZZLE_BYTES // self.element_bytes

    @property
    def coarse(self) -> Coarse:
        """The key of measurements: (family, half octaves of the rows per expert, columns, octaves of the depth).

        Half octaves are ``round(2 * log2(rows))``. Columns are exact, because the number of tiles depends on them. All
        measurements are of elements of `config.ELEMENT_BYTES`. The family of a ragged M product of gathered rows has
        `GATHERED` appended.
        """
        family = self.family + (GATHERED if self.gathered else "")
        return family, round(2 * _log2(self.rows / max(self.experts, 1))), self.columns, round(_log2(self.depth))


def _log2(extent: float) -> float:
    return math.log2(max(extent, 1))


def cycles(problem: Problem, config: TileConfig) -> float:
    """Estimate the cycles of a product, see the module's docstring."""
    p = problem
    if p.family in RAGGED_K:
        weights, reads = float(p.experts), ELEMENT_BYTES / p.element_bytes  # an element of the result has two bytes
        k_tiles = max(p.rows / max(p.experts, 1) / p.tile_k + 0.5, 1.0)  # rows end anywhere in the last tile
        tall = _tiles(p.depth, config.tile_m, config.cluster_m)
        wide = _tiles(p.columns, config.tile_n, config.cluster_n)
        kinds = [(weights * tall * wide, config.cluster_n, config.cluster_m)]
    else:
        rows = p.rows / max(p.experts, 1)
        weights = -math.expm1(-rows) * p.experts  # of the experts that have rows
        k_tiles = float(-(-p.depth // p.tile_k))
        deviation = math.sqrt(rows) if p.experts > 1 else 0.0  # one group has all rows, not a random part of them
        row_tiles = [math.ceil(max(rows + z * deviation, 1.0) / config.tile_m) for z in QUANTILES]
        side_by_side = max(BAND_ROWS // (config.tile_m * config.cluster_m), 1)
        readers = _mean([min((n + 1) // 2, side_by_side) for n in row_tiles])
        reads = 1 + READ_AGAIN * (readers - 1)
        in_pairs, left_over = _mean([n // 2 * 2 for n in row_tiles]), _mean([n % 2 for n in row_tiles])
        kinds = [
            (weights * in_pairs * _tiles(p.columns, config.tile_n, 1), 1, 2),
            (weights * left_over * _tiles(p.columns, config.tile_n, 2), 1 if p.gathered else 2, 1),
        ]
        loaded = sum(n for n, _, _ in kinds) * config.tile_n / max(weights * (in_pairs + left_over) * p.columns, 1.0)
        reads += READ_PAST * (loaded - 1)
    multiply = config.tile_m * config.tile_n / 32
    if p.gathered and config.tile_n > 128:
        multiply *= GATHERED_WIDE
    epilogue = float(EPILOGUE_CYCLES[p.family] * config.blocks * config.tile_n // EPILOGUE_COLUMNS)
    tiles = work = 0.0
    for count, rows_shared, weights_shared in kinds:
        load = (config.tile_m / rows_shared + config.tile_n / weights_shared) * SWIZZLE_BYTES / LOAD_BYTES_PER_CYCLE
        main = k_tiles * max(multiply, load)
        tile = max(main, (main + epilogue) / 2) if config.pingpong else main + epilogue
        if p.family in RAGGED_K:
            tile += WGRAD_CYCLES
        tiles, work = tiles + count, work + count * tile
    tile = work / max(tiles, 1.0)
    busy = START_CYCLES + max(math.ceil(tiles / p.sms), 1) * tile
    if config.pingpong:
        busy += epilogue  # of the last tile, which nothing hides
    values = p.rows * (p.depth + ROW_VALUES[p.family] * p.columns) + reads * weights * p.columns * p.depth
    memory = p.element_bytes * values / MEMORY_BYTES_PER_CYCLE
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
    """Return the height of a band, in row tiles of a cluster: see `tiles.band_of`.

    With fewer than a thousand rows per band, large weights are read from memory several times; with more, the rows are.
    The derivative moves much other data through the L2. If its weights are small, all column tiles of a few rows should
    run concurrently: 1.51 ms instead of 1.70 (Qwen3-30B-A3B on an H100).
    """
    rows = BAND_ROWS
    if problem.family in ("derivative", "heavy_derivative") and problem.columns * problem.depth <= 4 << 20:
        rows = 256
    return max(rows // (config.tile_m * config.cluster_m), 1)
