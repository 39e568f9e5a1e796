"""MXFP8 and NVFP4 as cudnn-frontend's kernels read and write them: codes, and scales of blocks in tiles.

MXFP8 has E4M3 codes, and E8M0 scales of blocks of 32. NVFP4 has E2M1 codes, and E4M3 scales of blocks of 16. A tile
holds 128 x 4 scales: row i and column j at byte (i % 32) * 16 + i // 32 * 4 + j. Independent of fusedmoe.
"""

import torch

BLOCK = 32
TILE = 512  # bytes
E4M3_MAX = 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])


def round_up(n, multiple):
    return -(-n // multiple) * multiple


def untiled(tiles):
    """Return a matrix of scales from its tiles: (R, C, 512) to (128 R, 4 C)."""
    down, across, _ = tiles.shape
    return tiles.view(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(down * 128, across * 4)


def tiled(scale):
    """Return the bytes of a matrix of scales, padded with zeros to whole tiles, in row-major order of the tiles."""
    rows, columns = scale.shape
    padded = scale.new_zeros(round_up(rows, 128), round_up(columns, 4))
    padded[:rows, :columns] = scale
    return padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def decoded(byte):
    """Return the powers of two of E8M0 bytes; 255 is NaN."""
    powers = torch.ldexp(torch.ones(byte.shape), byte.to(torch.int32) - 127)
    return powers.masked_fill(byte == 255, torch.nan)


def dequantized(codes, scale):
    """Return fp32 values of codes (M, K), and of the bytes of scales (at least M, at least K / block)."""
    rows, columns = codes.shape
    if codes.dtype is torch.uint8:
        values, block = E2M1[codes.to(torch.int64)], 16
        scale = scale[:rows].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    else:
        values, block, scale = codes.to(torch.float32), BLOCK, decoded(scale[:rows])
    return values * scale.repeat_interleave(block, 1)[:, :columns]


def quantized(values, norm_const):
    """Return codes (M, K) and scales (M, K / 32) of fp32 values: ``quant_sfd_row`` of the kernels.

    A scale is the absolute maximum, times the fp32 reciprocal of 448, rounded up to a power of two.
    """
    blocks = values.unflatten(1, (-1, BLOCK))
    target = blocks.abs().amax(-1) * torch.tensor(1 / E4M3_MAX) * norm_const
    mantissa, exponent = torch.frexp(target)  # 0.5 <= mantissa < 1
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    scale = torch.where(target > 0, (exponent + 127).clamp(0, 254), 0).to(torch.uint8)
    factor = (norm_const / decoded(scale)).clamp(max=torch.finfo(torch.float32).max)
    codes = (blocks * factor[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(1), scale
