"""The tile scheduler: one warp per CTA turns ``offsets`` into tiles, on the device.

For ragged M, the warp walks the experts in chunks of 32, one per lane, with a warp-wide prefix sum over their tile
counts. Tile numbers only increase, so it never goes back. For ragged K, all experts have the same number of tiles. The
warp writes each `Tile` into a ring in shared memory, where the loading warps and the math warps read it. All CTAs of a
cluster compute the same tiles except for their rank, so they exchange no messages under a static schedule.

For ragged M, the rows after the last expert's, the *tail*, are one more expert, E. Its tiles have no mainloop: they
write zeros.

A ragged M product may also compute given ranges of the experts' rows, in blocks (rows/move/ranges.py), one block after
the other. Before the first tile of a block, the warp waits for the block's word in memory, which is not negative once
the block's rows of A have arrived. The tiles of the blocks before it are computed meanwhile. A product with ``signals``
also counts the tiles of each block whose results are in memory, for a kernel that runs beside it.

| barrier | arrives | waits |
|---|---|---|
| a tile is in the ring | lane 0 of the scheduler warp (`put`) | all warps that work on tiles (`take`) |
| a place in the ring is empty | lane 0 of each of these warps, which has read the tile for all | the scheduler warp |
| `Drawing.told`, of CTA 1 | the word that CTA 0 has drawn, by an asynchronous store | lane 0 of CTA 1's scheduler |
| `Drawing.read`, of CTA 0 | lane 0 of CTA 1's scheduler, with the word in a register | lane 0 of CTA 0's scheduler |

Run: tests/unit/test_sm90_tile_order.py, tests/unit/test_emulated_kernels.py, tests/gpu/test_sm90_overlap.py;
``python -m benchmarks --only tiles``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.device.warps import LANES, MOST_READS, inclusive_sum, one_after, trap
from fusedmoe.kernels.sm90.tiles.config import SCALE_BLOCK, TileConfig

RING_STAGES = 4
SLOT = 8  # Int32s per slot of the ring: a `Tile`, rounded up
END = -1  # the expert of the slot after the last tile


class Tile(NamedTuple):
    """One tile, as the scheduler passes it to the other warps."""

    expert: Int32
    row: Int32  # first row; ragged K: first row of the expert
    rows: Int32  # from that row to the expert's last
    column: Int32  # column tile
    place: Int32  # ragged M: 1 if the cluster shares the rows, else 0; ragged K: row tile
    depth: Int32  # tiles of K


class TileWithBlock(NamedTuple):
    """A `Tile` of a ragged M product whose results have a form by columns."""

    expert: Int32
    row: Int32
    rows: Int32
    column: Int32
    place: Int32
    depth: Int32
    block: Int32  # of 128 rows, if each expert's rows begin one: that of the first row


class TileWithCounter(NamedTuple):
    """A `Tile` of a ragged M product that counts the tiles of each block of ranges."""

    expert: Int32
    row: Int32
    rows: Int32
    column: Int32
    place: Int32
    depth: Int32
    counter: Int32  # element of ``offsets`` that counts the tile; -1 for a tile past the last column


@cute.jit
def expert_rows(
    offsets: cute.Tensor,
    rows: Int32,
    expert: Int32,
    tail: cutlass.Constexpr[bool],
    experts: Int32,
    ranges: cutlass.Constexpr[bool] = False,
    padded: cutlass.Constexpr[bool] = False,
) -> tuple[Int32, Int32]:
    """First row and row count of an expert; with ``tail``, expert E has the rows after the last expert's, up to
    ``rows``.

    With ``ranges``, the rows of experts 0 to E need not follow each other. ``offsets`` has blocks of E + 1 first rows,
    E + 1 ends, a counter of tiles, and the word that `wait_for_rows` reads. Expert e of block i has the number ``i * (E
    + 1) + e``. ``padded``: after the blocks, ``offsets`` has the paddings of `RowRanges`. Then expert E of the last
    block has the rows up to ``rows``, as without ranges.
    """
    first, end = Int32(0), Int32(0)
    if const_expr(ranges):
        size = experts + 1
        at = expert + expert // size * (size + 2)
        if at + size < cute.size(offsets):  # else it is past the last block
            first, end = offsets[at], offsets[at + size]
            if const_expr(padded):
                if expert == blocks_of_ranges(offsets, experts) * size - 1:
                    end = cutlass.max(rows, end)
    else:
        if expert < experts + (1 if tail else 0):
            if expert > 0:
                first = offsets[expert - 1]
            end = cutlass.max(rows, first)
            if expert < experts:
                end = offsets[expert]
    return first, end - first


def blocks_of_ranges(offsets: cute.Tensor, experts: Int32) -> Int32:
    """Number of blocks of `expert_rows`. After them, there may be E + 1 more elements."""
    return cute.size(offsets) // (2 * (experts + 1) + 2)


@cute.jit
def wait_for_rows(offsets: cute.Tensor, experts: Int32, block: Int32, lane: Int32) -> None:
    """Wait until the words of all blocks of `expert_rows` up to this one are not negative. All lanes of the warp call
    this together, and each reads one word: an earlier block may have no tiles, but this one may read its rows too.

    Kernels on the same GPU add to a word after they have written rows. The acquiring loads make the rows visible to
    this warp, the fence to TMA, and the ring of tiles passes this on to the warps that read them. After `MOST_READS`
    the kernel ends with an error. Until then, the exchange has ended with the error of a rank that does not come.
    """
    size, left, reads = 2 * (experts + 1), Int32(-1), Int64(0)
    word = offsets.iterator + (cutlass.min(lane, block) * (size + 2) + size + 1)
    while cute.arch.vote_any_sync(left < 0):
        left = cute.arch.load(word, Int32, sem="acquire", scope="gpu")
        reads += 1
        if reads == MOST_READS:
            trap()
    cute.arch.sync_warp()
    cute.arch.fence_proxy("async.global")


@cute.jit
def put(ring, state, slots: cute.Tensor, lane: Int32, tile):
    """Write one slot of the ring and release it to the readers. Return the ring's next state."""
    ring.producer_acquire(state)
    if lane == 0:
        for i in cutlass.range_constexpr(len(tile)):
            slots[i, state.index] = tile[i]
        ring.producer_commit(state)
    state.advance()
    return state


@cute.jit
def take(ring, turn: Int32, slots: cute.Tensor, kind: cutlass.Constexpr[type] = Tile):
    """Read slot number ``turn``; all lanes of a warp call this together. Return the next number and the `Tile`."""
    # A new state: carrying it would take two more registers in the math warps, which have none left.
    state = pipeline.PipelineState(RING_STAGES, turn, turn % RING_STAGES, turn // RING_STAGES % 2)
    ring.consumer_wait(state)
    # One lane reads for all: race checkers require that the lane that releases the slot also reads it.
    values = cute.make_rmem_tensor((len(kind._fields),), Int32)
    values.fill(0)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(kind._fields)):
            values[i] = slots[i, state.index]
        ring.consumer_release(state)
    return turn + 1, kind(*[cute.arch.shuffle_sync(values[i], 0) for i in range(len(kind._fields))])


@cute.jit
def band_of(local: Int32, tall: Int32, tiles_n: Int32, band: Int32) -> tuple[Int32, Int32, Int32]:
    """Return the band of an expert's tile number ``local``: its first row and height, in row tiles, and the tile's
    number within the band.

    The tiles of an expert are ordered in bands of ``band`` row tiles, so that concurrent CTAs find the same rows and
    weights in the L2.
    """
    first = local // (band * tiles_n) * band
    return first, cutlass.min(tall - first, band), local - first * tiles_n


@cute.jit
def place(local: Int32, tall: Int32, tiles_n: Int32, band: Int32) -> tuple[Int32, Int32]:
    """Row and column tile of an expert's tile number ``local``: row tiles of a band vary fastest."""
    first, height, within = band_of(local, tall, tiles_n, band)
    column = within // height
    return first + within - column * height, column


class Drawing:
    """The state with which a cluster draws its tiles under a dynamic schedule.

    CTA 0 increments a counter in memory. It sends the number to CTA 1 through a ``word`` in CTA 1's shared memory.
    ``told``, a barrier of CTA 1, signals the arrival of the word. ``read``, a barrier of CTA 0, signals that CTA 1 has
    the word in a register (`one_after`), so that it may be overwritten.
    """

    def __init__(self, ctas: int, word: cute.Tensor, told: cute.Pointer, read: cute.Pointer) -> None:
        self.ctas, self.word, self.told, self.read = ctas, word, told, read


def make_drawing(smem: SmemAllocator, config: TileConfig) -> Drawing:
    """Allocate a `Drawing` and initialise its barriers; the caller synchronises."""
    barriers = smem.allocate_array(Int64, 2)
    word = smem.allocate_tensor(Int32, cute.make_layout(1), 16)
    init_drawing(barriers)
    return Drawing(config.ctas, word, barriers, barriers + 1)


@cute.jit
def init_drawing(barriers: cute.Pointer) -> None:
    """Initialise both barriers of a `Drawing`, for one arrival each."""
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(barriers, 1)
            cute.arch.mbarrier_init(barriers + 1, 1)


class Share:
    """A CTA's share of the tiles: those of cluster ``cluster`` out of ``clusters``, at ranks ``rank_m`` and ``rank_n``.

    If ``dynamic`` is not 0, the cluster draws all tiles after its first from ``counter``. ``band``: see `band_of`.
    """

    def __init__(self, config: TileConfig, band: Int32, counter: cute.Tensor, dynamic: Int32, drawing: Drawing) -> None:
        self.config, self.band, self.counter, self.dynamic, self.drawing = config, band, counter, dynamic, drawing
        self.rank_m, self.rank_n = ranks(config)
        _, self.cluster, _ = cute.arch.block_idx()
        _, self.clusters, _ = cute.arch.grid_dim()


def ranks(config: TileConfig) -> tuple[Int32, Int32]:
    """Return this CTA's rank among the row tiles of its cluster, and among the column tiles."""
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    return rank % config.cluster_m, rank // config.cluster_m


@cute.jit
def next_tile(tile: Int32, share: Share, lane: Int32, turn: Int32) -> Int32:
    """Return the tile after ``tile``: a fixed stride further, or the next one drawn. ``turn`` counts the calls."""
    drawing = share.drawing
    if share.dynamic == 0:
        tile += share.clusters
    else:
        drawn = Int32(0)
        if const_expr(drawing.ctas == 1):
            if lane == 0:
                drawn = share.clusters + cute.arch.atomic_add(share.counter.iterator, Int32(1))
        elif cute.arch.block_idx_in_cluster() == 0:
            if lane == 0:
                drawn = share.clusters + cute.arch.atomic_add(share.counter.iterator, Int32(1))
                cute.arch.mbarrier_wait(drawing.read, (turn & 1) ^ 1)  # the first wait returns at once
                cute.arch.store_async_dsmem(drawing.word.iterator, drawn, drawing.told, 1)
        elif lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(drawing.told, 4)
            cute.arch.mbarrier_wait(drawing.told, turn & 1)
            drawn = drawing.word[0]
            cute.arch.mbarrier_arrive(drawing.read, 0, one_after(drawn))
        tile = cute.arch.shuffle_sync(drawn, 0)
    return tile


@cute.jit
def finish_drawing(tile: Int32, tiles: Int32, share: Share, turn: Int32) -> None:
    """Leave the counter zero for the next launch. Wait, in CTA 0, until CTA 1 has read the last word: CTA 1 arrives at
    a barrier in CTA 0's shared memory.

    A cluster draws once after each tile that it computes, so all clusters together draw as often as there are
    ``tiles``. The last draw returned ``tiles - 1``. The cluster whose walk ended with it, at ``tile``, resets the
    counter: all others have drawn before.
    """
    counter = share.counter
    if share.dynamic != 0 and turn > 0 and cute.arch.block_idx_in_cluster() == 0:
        if const_expr(share.drawing.ctas > 1):
            cute.arch.mbarrier_wait(share.drawing.read, (turn & 1) ^ 1)
        if tile == share.clusters + tiles - 1:
            with cute.arch.elect_one():
                counter[0] = 0


@cute.jit
def place_pairs(
    local: Int32, row_tiles: Int32, tiles_n: Int32, band: Int32, rank: Int32, turned: Int32
) -> tuple[Int32, Int32, Boolean]:
    """Row and column tile of the CTA ``rank`` in a cluster's tile number ``local``, and whether it belongs to the row
    tile left over: see `schedule_ragged_m`.

    Pairs of row tiles are ordered as in `place`. If the number of row tiles is odd, the last band takes two columns at
    a time: the pairs of both columns, and among them the two tiles of the row tile left over. So CTAs that read the
    same weights run concurrently. The position of those two tiles varies with ``turned``: a tile that shares the rows
    takes longer, and a cluster that had only such tiles would fall behind.
    """
    first, height, within = band_of(local, row_tiles // 2, tiles_n, band)
    column, left_over = Int32(0), Boolean(False)
    if row_tiles % 2 == 0 or height == band:
        column = within // height
        within -= column * height
    else:
        together = 2 * height + 1
        two = within // together
        within -= two * together
        column = two * 2
        if column + 1 == tiles_n:  # a single last column
            together = height + 1
        at = (turned + two) % together
        left_over = Boolean(within == at)
        if left_over:
            column += rank
        else:
            if within > at:
                within -= 1
            if within >= height:
                column, within = column + 1, within - height
    row_tile = (first + within) * 2 + rank
    if left_over:
        row_tile = row_tiles - 1
    return row_tile, column, left_over


@cute.jit
def cluster_tiles(rows: Int32, tiles_n: Int32, tile_m: cutlass.Constexpr[int]) -> Int32:
    """Number of cluster tiles of an expert's rows: see `schedule_ragged_m`."""
    row_tiles = (rows + tile_m - 1) // tile_m
    return row_tiles // 2 * tiles_n + row_tiles % 2 * ((tiles_n + 1) // 2)


@cute.jit
def schedule_ragged_m(
    offsets: cute.Tensor,
    rows: Int32,
    tiles_n: Int32,
    k_tiles: Int32,
    share: Share,
    ring,
    slots: cute.Tensor,
    kind: cutlass.Constexpr[type] = Tile,
    experts: Any = None,
    ranges: cutlass.Constexpr[bool] = False,
) -> None:
    """Schedule the tiles of a ragged M product, for clusters of two CTAs. ``experts``: E, which follows from
    ``offsets`` unless these have ``ranges``, see `expert_rows`.

    A cluster takes two row tiles of an expert, and shares the weights. If the number of row tiles is odd, one is left
    over. A cluster takes two column tiles of it, and shares the rows.
    """
    tile_m = share.config.tile_m
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, RING_STAGES)
    lane = cute.arch.lane_idx()
    last = cute.size(offsets)  # the number of the last expert: that of the tail
    padded: cutlass.Constexpr[bool] = ranges and kind is TileWithBlock
    if const_expr(ranges):
        last = blocks_of_ranges(offsets, experts) * (experts + 1) - 1
    else:
        experts = last
    there = Int32(0)  # blocks of ranges whose rows have arrived
    tile, turn = share.cluster, Int32(0)
    chunk, before = Int32(0), Int32(0)  # the chunk's first expert; tiles of all earlier chunks
    _, count = expert_rows(offsets, rows, lane, True, experts, ranges, padded)
    ends = inclusive_sum(cluster_tiles(count, tiles_n, tile_m), lane)
    blocks = Int32(0)  # of 128 rows, of this lane's expert and all earlier ones
    if const_expr(kind is TileWithBlock and not ranges):
        blocks = inclusive_sum(cute.ceil_div(count, SCALE_BLOCK), lane)
    while chunk <= last:
        total = cute.arch.shuffle_sync(ends, 31)
        if tile >= before + total:
            chunk += 32
            before += total
            _, count = expert_rows(offsets, rows, chunk + lane, True, experts, ranges, padded)
            ends = inclusive_sum(cluster_tiles(count, tiles_n, tile_m), lane)
            if const_expr(kind is TileWithBlock and not ranges):
                earlier = cute.arch.shuffle_sync(blocks, LANES - 1)
                blocks = earlier + inclusive_sum(cute.ceil_div(count, SCALE_BLOCK), lane)
        else:
            within = tile - before
            owner = cute.arch.popc(cute.arch.vote_ballot_sync(Boolean(ends <= within)))
            number = chunk + owner
            if const_expr(ranges):
                block = number // (experts + 1)
                if block >= there:
                    there = block + 1
                    wait_for_rows(offsets, experts, block, lane)
            expert = number % (experts + 1) if const_expr(ranges) else number
            own = cute.arch.shuffle_sync(count, owner)
            local = within - (cute.arch.shuffle_sync(ends, owner) - cluster_tiles(own, tiles_n, tile_m))
            row_tiles = (own + tile_m - 1) // tile_m
            row_tile, column, left_over = place_pairs(local, row_tiles, tiles_n, share.band, share.rank_m, expert)
            row = row_tile * tile_m
            # again: registers are scarce here
            first, _ = expert_rows(offsets, rows, number, True, experts, ranges, padded)
            depth = Int32(0) if expert == experts else k_tiles
            found = Tile(expert, first + row, own - row, column, Int32(left_over), depth)
            if const_expr(padded):
                padding = offsets[blocks_of_ranges(offsets, experts) * (2 * (experts + 1) + 2) + expert]
                found = TileWithBlock(*found, (first + row + padding) // SCALE_BLOCK)  # type: ignore[assignment]
            elif const_expr(kind is TileWithBlock):
                start = cute.arch.shuffle_sync(blocks, owner) - cute.ceil_div(own, SCALE_BLOCK)
                found = TileWithBlock(*found, start + row // SCALE_BLOCK)  # type: ignore[assignment]
            if const_expr(kind is TileWithCounter):
                counter = block * (2 * (experts + 1) + 2) + 2 * (experts + 1)
                counter = cutlass.select_(column < tiles_n, counter, Int32(-1))
                found = TileWithCounter(*found, counter)  # type: ignore[assignment]
            state = put(ring, state, slots, lane, found)
            tile = next_tile(tile, share, lane, turn)
            turn += 1
    finish_drawing(tile, before, share, turn)
    put(ring, state, slots, lane, Tile(Int32(END), *[Int32(0)] * 5))


@cute.jit
def padded_rows(offsets: cute.Tensor, first: Int32, end: Int32, size: cutlass.Constexpr[int], lane: Int32) -> Int32:
    """Rows of the experts from ``first`` to before ``end``, at most 32, each rounded up to a multiple of ``size``."""
    _, count = expert_rows(offsets, Int32(0), first + lane, False, cute.size(offsets))
    if first + lane >= end:
        count = Int32(0)
    return cute.arch.shuffle_sync(inclusive_sum((count + size - 1) // size * size, lane), LANES - 1)


@cute.jit
def schedule_ragged_k(
    offsets: cute.Tensor,
    tiles_m: Int32,
    tiles_n: Int32,
    tile_k: cutlass.Constexpr[int],
    padded: cutlass.Constexpr[bool],
    share: Share,
    ring,
    slots: cute.Tensor,
) -> None:
    """Schedule the tiles of a ragged K product: each expert has the same number.

    With ``padded``, the rows of each expert begin at a multiple of ``tile_k``, after the padding of the expert before.
    """
    cluster_m, cluster_n = share.config.cluster_m, share.config.cluster_n
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, RING_STAGES)
    lane = cute.arch.lane_idx()
    experts = cute.size(offsets)
    tall, wide = (tiles_m + cluster_m - 1) // cluster_m, (tiles_n + cluster_n - 1) // cluster_n
    tile, turn = share.cluster, Int32(0)
    added, start = Int32(0), Int32(0)  # experts, and their padded rows
    while tile < experts * tall * wide:
        expert = tile // (tall * wide)
        row_tile, column_tile = place(tile - expert * (tall * wide), tall, wide, share.band)
        first = Int32(0)
        if expert > 0:
            first = offsets[expert - 1]
        count = offsets[expert] - first
        if const_expr(padded):
            while added < expert:
                start += padded_rows(offsets, added, expert, tile_k, lane)
                added = cutlass.min(added + LANES, expert)
            first = start
        column, row = column_tile * cluster_n + share.rank_n, row_tile * cluster_m + share.rank_m
        state = put(ring, state, slots, lane, Tile(expert, first, count, column, row, (count + tile_k - 1) // tile_k))
        tile = next_tile(tile, share, lane, turn)
        turn += 1
    finish_drawing(tile, experts * tall * wide, share, turn)
    put(ring, state, slots, lane, Tile(Int32(END), *[Int32(0)] * 5))
