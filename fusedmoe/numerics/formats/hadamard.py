"""The random Hadamard transform of tiles of 16 rows, which spreads one large value over sixteen.

``y = H^T x`` with ``H = diag(s) S / 4``: S is Sylvester's 16x16 Hadamard matrix, s a fixed vector of signs. H is
orthogonal, ``(H^T x)^T (H^T y) = x^T y``: rotating both operands does not change a product over the rows. The signs
are those of Transformer Engine, so that results agree with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def _signs(device: torch.device | None) -> Tensor:
    """`SIGNS` as fp32, computed on the device: a CUDA graph cannot capture a copy from pageable host memory."""
    minus = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
    return 1.0 - 2.0 * (minus >> torch.arange(TILE, device=device) & 1)


def _sylvester(x: Tensor) -> Tensor:
    """``x @ S`` over a last axis of 16: four rounds of sums and differences, in the same order on every device."""
    for size in (1, 2, 4, 8):
        pairs = x.unflatten(-1, (TILE // (2 * size), 2, size))
        x = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
    return x


def rotate(x: Tensor) -> Tensor:
    """Rotate tiles of 16 along the last axis, whose length is a multiple of 16; fp32, rounded to bf16."""
    tiles = x.to(torch.float32).unflatten(-1, (-1, TILE))
    return (_sylvester(tiles * _signs(x.device)) / 4).to(torch.bfloat16).flatten(-2)


def rotate_back(y: Tensor) -> Tensor:
    """Undo `rotate`, in fp32 and without rounding to bf16."""
    tiles = y.to(torch.float32).unflatten(-1, (-1, TILE))
    return (_sylvester(tiles) / 4 * _signs(y.device)).flatten(-2)


def matrix(device: torch.device | None = None) -> Tensor:
    """H, (16, 16) fp32: ``rotate(x) = x @ H`` along the last axis."""
    return _sylvester(torch.eye(TILE, dtype=torch.float32, device=device)) / 4 * _signs(device)[:, None]
