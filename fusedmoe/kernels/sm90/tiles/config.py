"""Tile configurations of the Hopper grouped GEMMs as data, and the sizes that decide which are legal.

A math warpgroup multiplies blocks of 64 rows. With *ping-pong* tiles the two math warpgroups take whole tiles in turn,
so the epilogue of one overlaps the mainloop of the other. *Cooperative* warpgroups share each tile.
"""

from __future__ import annotations

from dataclasses import dataclass

SMEM_BYTES = 227 * 1024  # shared memory of a CTA on sm_90
SWIZZLE_BYTES = 128  # the widest swizzle, and the extent of K in a stage
ELEMENT_BYTES = 2  # per element of an operand: bf16 or fp16
ALIGNMENT_BYTES = 16  # of addresses and pitches, required by TMA
EPILOGUE_COLUMNS = 32  # columns of a box of results in shared memory
BLOCK_ROWS = 64
SCALE_BLOCK = 128  # elements of K that share a scale, in FP8 operands; 128 x 128 elements of a weight do
SCALE_PITCH = 4  # strides of scales are multiples of 16 bytes, as TMA requires
BARRIER_BYTES = 1024  # for barriers and the scheduler's ring


@dataclass(frozen=True)
class TileConfig:
    """Sizes of a CTA's tile and of a cluster."""

    tile_m: int  # rows and columns of a CTA's tile
    tile_n: int
    # CTAs of a cluster, along row tiles and column tiles. They share loads by multicast: the weights if ``cluster_m``
    # is 2, the rows if ``cluster_n`` is 2. A cluster of a ragged M product is 2 x 1. If an expert has an odd number of
    # row tiles, a cluster takes two column tiles of the last one, and shares the rows
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = True  # ping-pong instead of cooperative, see the module's docstring

    @property
    def name(self) -> str:
        """Short text, part of the kernel's symbol."""
        schedule = "pp" if self.pingpong else "co"
        return f"{self.tile_m}x{self.tile_n}{schedule}_c{self.cluster_m}{self.cluster_n}"

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows per warpgroup and tile."""
        return self.tile_m // BLOCK_ROWS // (1 if self.pingpong else 2)

    @property
    def stage_bytes(self) -> int:
        """Bytes of A and B in a stage."""
        return (self.tile_m + self.tile_n) * SWIZZLE_BYTES

    def stages(self, epilogue_bytes: int, beside: int = 0) -> int:
        """Stages of A and B, each with some bytes ``beside`` it, that fit beside an epilogue's shared memory."""
        return min((SMEM_BYTES - BARRIER_BYTES - epilogue_bytes) // (self.stage_bytes + beside), 8)
