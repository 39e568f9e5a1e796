"""The tiles with which a kernel exists: one function, in plain Python, for the kernels, the choice and the tests."""

from __future__ import annotations

from dataclasses import dataclass

from fusedmoe.kernels.sm90.tiles.config import ELEMENT_BYTES, SCALE_BLOCK, SWIZZLE_BYTES, TileConfig

LANES = 32
COLUMNS_AT_ONCE = SWIZZLE_BYTES // ELEMENT_BYTES  # that one load brings of a weight with unit stride along N


@dataclass(frozen=True)
class RaggedMNeeds:
    """The properties of a ragged M kernel that its tiles depend on."""

    scaled: bool = False  # FP8 codes with scales
    b_major: str = "k"  # or "n": the axis of the weight that has unit stride
    halves: bool = False  # whether a tile of the weight is half gate, half up
    reads: bool = False  # whether the epilogue has inputs
    gather: bool = False  # whether the rows of A are gathered
    blocks: bool = False  # whether the epilogue handles blocks of 128 rows
    formula: str = ""  # name of the epilogue's formula
    interleaved: bool = False  # whether the formula's gate and up alternate


@dataclass(frozen=True)
class RaggedKNeeds:
    """The properties of a ragged K kernel that its tiles depend on."""

    scaled: bool = False  # FP8 codes with scales
    gathered: str | None = None  # the operand that is gathered: "a" or "b"


Needs = RaggedMNeeds | RaggedKNeeds


def gather_warps(config: TileConfig) -> int:
    """Return the number of warps that gather rows of A in a ragged M kernel.

    Four, since two delay the product: FC1 of 262,144 x 2,048 x 1,536 takes 2.79 ms with two, 2.38 ms with four, and
    2.24 ms for rows in order. Two with 256 columns: ptxas compiles no such wgmma for 512 threads.
    """
    return 4 if config.tile_n <= 192 else 2


def why_not(config: TileConfig, needs: Needs) -> str | None:
    """Return why there is no kernel with these tiles; None if there is one."""
    if isinstance(needs, RaggedKNeeds):
        return _why_not_ragged_k(config, needs)
    if (config.cluster_m, config.cluster_n) != (2, 1):
        return f"ragged M: expected a cluster of two row tiles, got {config.name}"
    if needs.halves and needs.b_major == "n" and not needs.scaled and config.tile_n % (2 * COLUMNS_AT_ONCE):
        return f"halves of a tile are loaded {COLUMNS_AT_ONCE} columns at a time, got {config.name}"
    if needs.gather:
        warps = gather_warps(config)
        if warps == 2 and needs.reads:
            return f"warps 10 and 11 load the inputs of the epilogue, and cannot gather: {config.name}"
        if config.tile_m % (warps * LANES):
            return f"{warps} warps gather equal shares of {LANES} rows or a multiple, got {config.name}"
    wide = SCALE_BLOCK * (2 if needs.halves else 1)
    if needs.scaled and (config.pingpong or config.tile_n % wide or needs.b_major != "k"):
        return (
            f"FP8: expected a K-major weight and cooperative tiles of a multiple of {wide} columns, got "
            f"b_major {needs.b_major!r} and {config.name}"
        )
    if needs.blocks and ((config.tile_m, config.tile_n) != (2 * SCALE_BLOCK, SCALE_BLOCK) or needs.interleaved):
        return f"derivative in FP8: expected [gate | up] and tiles of 256 x 128, got {needs.formula} and {config.name}"
    return None


def check(config: TileConfig, needs: Needs) -> None:
    """Raise a ValueError if there is no kernel with these tiles."""
    reason = why_not(config, needs)
    if reason is not None:
        raise ValueError(reason)


def _why_not_ragged_k(config: TileConfig, needs: RaggedKNeeds) -> str | None:
    if needs.scaled and (needs.gathered is not None or config.pingpong or config.tile_n % SCALE_BLOCK):
        return (
            f"FP8: expected no gathered operand and cooperative tiles of a multiple of {SCALE_BLOCK} columns, got "
            f"{needs.gathered!r} and {config.name}"
        )
    if {None: 1, "a": config.cluster_n, "b": config.cluster_m}[needs.gathered] != 1:
        return (
            f"ragged K: expected a cluster that does not share {needs.gathered}, which is gathered, got {config.name}"
        )
    return None
