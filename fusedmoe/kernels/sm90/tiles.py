"""Which tile a CTA works on next: one scheduler warp a CTA turns ``offsets`` into tiles, on the device.

The warp walks the experts in chunks of 32, one a lane, with a warp-wide prefix sum over their tiles, and writes each
tile as one `SLOT` into a ring in shared memory; the loading and the math warps read it there. Tile numbers only grow,
so it never walks back. What it writes is the same for every CTA of a cluster but for the cluster's own rank, hence the
CTAs of a cluster need not speak to each other about it.

Rows behind the last expert's are one more expert, E, whose tiles have no main loop: they are where zeros get written.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from fusedmoe.kernels.sm90.config import TileConfig

RING_STAGES = 4
SLOT = 8  # Int32s a slot; their meaning:
# expert (or END), first row, rows from there on, column tile, row tile (ragged K) or whether a cluster shares the rows
# (ragged M), tiles of K
FIELDS = 6
END = -1


@cute.jit
def inclusive_sum(value: Int32, lane: Int32) -> Int32:
    """Sum over this lane and those below it."""
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step)
        if lane >= (1 << step):
            value += below
    return value


@cute.jit
def expert_rows(offsets: cute.Tensor, rows: Int32, expert: Int32, tail: cutlass.Constexpr[bool]) -> tuple[Int32, Int32]:
    """First row and row count of an expert; with ``tail``, expert E has what is left of ``rows``."""
    experts = cute.size(offsets)
    first, end = Int32(0), Int32(0)
    if expert < experts + (1 if tail else 0):
        if expert > 0:
            first = offsets[expert - 1]
        end = rows
        if expert < experts:
            end = offsets[expert]
    return first, end - first


@cute.jit
def put(ring, state, slots: cute.Tensor, lane: Int32, values):
    """Write one slot and hand it to the readers; the ring's next state."""
    ring.producer_acquire(state)
    if lane == 0:
        for i in cutlass.range_constexpr(len(values)):
            slots[i, state.index] = values[i]
        ring.producer_commit(state)
    state.advance()
    return state


@cute.jit
def take(ring, turn: Int32, slots: cute.Tensor):
    """Read slot number ``turn``, all lanes of a warp together; the next number and the slot's values."""
    # not a state of its own that is carried along: that would be two registers more in the math warps, which have none
    state = pipeline.PipelineState(RING_STAGES, turn, turn % RING_STAGES, turn // RING_STAGES % 2)
    ring.consumer_wait(state)
    # one lane reads for all: it is the one that says so to the ring, which race checkers insist on
    values = cute.make_rmem_tensor((FIELDS,), Int32)
    values.fill(0)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(FIELDS):
            values[i] = slots[i, state.index]
        ring.consumer_release(state)
    return turn + 1, [cute.arch.shuffle_sync(values[i], 0) for i in range(FIELDS)]


@cute.jit
def band_of(local: Int32, tall: Int32, tiles_n: Int32, band: Int32) -> tuple[Int32, Int32, Int32]:
    """First row and height, in row tiles, of the band that an expert's tile number ``local`` is in; its number there.

    An expert's tiles are worked on in bands of ``band`` row tiles, so that the CTAs at work share the rows and the
    columns that they read through the L2.
    """
    first = local // (band * tiles_n) * band
    return first, cutlass.min(tall - first, band), local - first * tiles_n


@cute.jit
def place(local: Int32, tall: Int32, tiles_n: Int32, band: Int32) -> tuple[Int32, Int32]:
    """Row and column tile of an expert's tile number ``local``: row tiles of a band fastest."""
    first, height, within = band_of(local, tall, tiles_n, band)
    column = within // height
    return first + within - column * height, column


class Drawing:
    """How a cluster draws its tiles, where the schedule is dynamic: CTA 0 from a counter in memory, and CTA 1 of a
    cluster from CTA 0, through one word of its shared memory. ``told`` is the barrier that the word arrives at, in CTA
    1; ``read`` the one in CTA 0 that says that it may be written again.
    """

    def __init__(self, ctas: int, word: cute.Tensor, told: cute.Pointer, read: cute.Pointer) -> None:
        self.ctas, self.word, self.told, self.read = ctas, word, told, read


def make_drawing(smem: SmemAllocator, config: TileConfig) -> Drawing:
    """Allocate what a cluster draws with, and initialise its barriers; the caller synchronises."""
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
    """Which tiles are a CTA's: those of its cluster, number ``cluster`` out of ``clusters``, in which it has the ranks
    ``rank_m`` and ``rank_n``. Where ``dynamic`` is not 0, a cluster's first tile is its own, and it draws the others
    from ``counter``. ``band``: see `place`.
    """

    def __init__(self, config: TileConfig, band: Int32, counter: cute.Tensor, dynamic: Int32, drawing: Drawing) -> None:
        self.config, self.band, self.counter, self.dynamic, self.drawing = config, band, counter, dynamic, drawing
        self.rank_m, self.rank_n = ranks(config)
        _, self.cluster, _ = cute.arch.block_idx()
        _, self.clusters, _ = cute.arch.grid_dim()


def ranks(config: TileConfig) -> tuple[Int32, Int32]:
    """Return this CTA's place among the row tiles of its cluster, and among the column tiles."""
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    return rank % config.cluster_m, rank // config.cluster_m


@cute.jit
def next_tile(tile: Int32, share: Share, lane: Int32, turn: Int32) -> Int32:
    """Return the tile after ``tile``: a fixed stride on, or the next that nobody has drawn. ``turn`` counts the
    calls.
    """
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
                cute.arch.mbarrier_wait(drawing.read, (turn & 1) ^ 1)  # the first wait is for nothing
                cute.arch.store_async_dsmem(drawing.word.iterator, drawn, drawing.told, 1)
        elif lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(drawing.told, 4)
            cute.arch.mbarrier_wait(drawing.told, turn & 1)
            drawn = drawing.word[0]
            cute.arch.mbarrier_arrive(drawing.read, 0)
        tile = cute.arch.shuffle_sync(drawn, 0)
    return tile


@cute.jit
def finish_drawing(share: Share, turn: Int32) -> None:
    """Wait, in CTA 0, until CTA 1 has read the last word: its arrival needs this CTA's shared memory."""
    if const_expr(share.drawing.ctas > 1):
        if share.dynamic != 0 and turn > 0 and cute.arch.block_idx_in_cluster() == 0:
            cute.arch.mbarrier_wait(share.drawing.read, (turn & 1) ^ 1)


@cute.jit
def place_pairs(
    local: Int32, row_tiles: Int32, tiles_n: Int32, band: Int32, rank: Int32, turned: Int32
) -> tuple[Int32, Int32, Boolean]:
    """Row and column tile of the CTA ``rank`` in a cluster's tile number ``local``, and whether it is of the row tile
    left over: see `schedule_ragged_m`.

    Pairs of row tiles are as `place` has them. In the last band of an odd number of row tiles, two columns go together:
    their pairs, and among them the two of the row tile left over, so that CTAs that read the same weights work side by
    side. Where among them differs, by ``turned``: a tile that shares the rows takes longer, and clusters that had
    no others would fall behind.
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
        if column + 1 == tiles_n:  # one column is the last
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
    """How many tiles a cluster makes of an expert's rows: see `schedule_ragged_m`."""
    row_tiles = (rows + tile_m - 1) // tile_m
    return row_tiles // 2 * tiles_n + row_tiles % 2 * ((tiles_n + 1) // 2)


@cute.jit
def schedule_ragged_m(
    offsets: cute.Tensor, rows: Int32, tiles_n: Int32, k_tiles: Int32, share: Share, ring, slots: cute.Tensor
) -> None:
    """Tiles of a product with ragged rows, for clusters of two CTAs.

    A cluster takes two row tiles of an expert and shares the weights. Where an expert has an odd number of row tiles,
    one is left over: of that, a cluster takes two column tiles, and shares the rows.
    """
    tile_m = share.config.tile_m
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, RING_STAGES)
    lane = cute.arch.lane_idx()
    experts = cute.size(offsets)
    tile, turn = share.cluster, Int32(0)
    chunk, before = Int32(0), Int32(0)  # the chunk's first expert; tiles of all earlier chunks
    _, count = expert_rows(offsets, rows, lane, True)
    ends = inclusive_sum(cluster_tiles(count, tiles_n, tile_m), lane)
    while chunk <= experts:
        total = cute.arch.shuffle_sync(ends, 31)
        if tile >= before + total:
            chunk += 32
            before += total
            _, count = expert_rows(offsets, rows, chunk + lane, True)
            ends = inclusive_sum(cluster_tiles(count, tiles_n, tile_m), lane)
        else:
            within = tile - before
            owner = cute.arch.popc(cute.arch.vote_ballot_sync(Boolean(ends <= within)))
            expert = chunk + owner
            own = cute.arch.shuffle_sync(count, owner)
            local = within - (cute.arch.shuffle_sync(ends, owner) - cluster_tiles(own, tiles_n, tile_m))
            row_tiles = (own + tile_m - 1) // tile_m
            row_tile, column, left_over = place_pairs(local, row_tiles, tiles_n, share.band, share.rank_m, expert)
            row = row_tile * tile_m
            first, _ = expert_rows(offsets, rows, expert, True)  # again: registers are scarce here
            depth = Int32(0) if expert == experts else k_tiles
            state = put(ring, state, slots, lane, (expert, first + row, own - row, column, Int32(left_over), depth))
            tile = next_tile(tile, share, lane, turn)
            turn += 1
    finish_drawing(share, turn)
    state = put(ring, state, slots, lane, (Int32(END), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)))


@cute.jit
def schedule_ragged_k(
    offsets: cute.Tensor,
    tiles_m: Int32,
    tiles_n: Int32,
    tile_k: cutlass.Constexpr[int],
    share: Share,
    ring,
    slots: cute.Tensor,
) -> None:
    """Tiles of a product with ragged K: each expert has the same number."""
    cluster_m, cluster_n = share.config.cluster_m, share.config.cluster_n
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, RING_STAGES)
    lane = cute.arch.lane_idx()
    experts = cute.size(offsets)
    tall, wide = (tiles_m + cluster_m - 1) // cluster_m, (tiles_n + cluster_n - 1) // cluster_n
    tile, turn = share.cluster, Int32(0)
    while tile < experts * tall * wide:
        expert = tile // (tall * wide)
        row_tile, column_tile = place(tile - expert * (tall * wide), tall, wide, share.band)
        first = Int32(0)
        if expert > 0:
            first = offsets[expert - 1]
        count = offsets[expert] - first
        values = (
            expert, first, count, column_tile * cluster_n + share.rank_n, row_tile * cluster_m + share.rank_m,
            (count + tile_k - 1) // tile_k,
        )  # fmt: skip
        state = put(ring, state, slots, lane, values)
        tile = next_tile(tile, share, lane, turn)
        turn += 1
    finish_drawing(share, turn)
    state = put(ring, state, slots, lane, (Int32(END), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)))
