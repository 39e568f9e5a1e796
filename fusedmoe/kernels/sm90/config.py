"""Tile configurations of the Hopper matrix products, as data: what is legal, and what it takes of an SM.

A math warpgroup multiplies blocks of 64 rows. *Ping-pong*: two warpgroups take tiles in turn, each a whole one, so that
one's epilogue runs under the other's main loop. *Cooperative*: both share a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

SMEM_BYTES = 227 * 1024  # what a CTA may have on sm_90
TILE_K = 64  # 128 bytes of bf16: the widest swizzle
EPILOGUE_COLUMNS = 32  # columns of a box on its way through shared memory
BLOCK_ROWS = 64
BARRIER_BYTES = 1024


@dataclass(frozen=True)
class TileConfig:
    """One way to cut a product into tiles.

    Attributes
    ----------
    tile_m, tile_n : int
        Rows and columns of a CTA's tile.
    cluster_m, cluster_n : int
        CTAs that work side by side on neighbouring tiles and share what they load: with ``cluster_m`` 2 the weights,
        with ``cluster_n`` 2 the rows. Over ragged rows a cluster is 2 x 1, and shares the rows where an expert has one
        row tile left over.
    pingpong : bool
        See the module's page.
    """

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = True

    @property
    def name(self) -> str:
        """Short text, part of the kernel's symbol."""
        how = "pp" if self.pingpong else "co"
        return f"{self.tile_m}x{self.tile_n}{how}_c{self.cluster_m}{self.cluster_n}"

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows that one warpgroup has of a tile."""
        return self.tile_m // BLOCK_ROWS // (1 if self.pingpong else 2)

    def stages(self, epilogue_bytes: int) -> int:
        """Stages of A and B that fit beside an epilogue."""
        stage = (self.tile_m + self.tile_n) * TILE_K * 2
        return min((SMEM_BYTES - BARRIER_BYTES - epilogue_bytes) // stage, 8)
