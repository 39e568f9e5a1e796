"""Calls of NVIDIA's grouped products for Blackwell, the classes of ``cudnn.gemm.cutedsl.grouped``.

A kernel is compiled once for each layer shape, and serves any number of rows. Work memory of a kernel is allocated in
each call, so calls on several streams share none.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fusedmoe.base.lasting import is_capturing, lasting
from fusedmoe.numerics.activations import Activation

Operands = dict[str, Tensor | None]

_TILE_LINES, _TILE_SCALES = 128, 4  # of a tile of swizzled scales: lines of codes, and scales per line
_TILES: dict[str, Any] = {"mma_tiler_mn": (256, 256), "cluster_shape_mn": (2, 1)}
_ALIGNMENT = 128  # of work memory, in bytes
_NAMES = ("padded_offsets", "global_scale_a", "global_scale_b")  # of arguments that do not end with "_tensor"


class Kernel:
    """A kernel of cudnn-frontend, which is compiled in its first call.

    - ``name``: the name of its class.
    - ``settings``: further arguments of the constructor.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self._name, self._settings = name, settings
        self._api: Any = None
        self._scratch: tuple[str, int] | None = None  # the argument for work memory, and its bytes

    def __call__(self, operands: Operands, **scalars: float) -> None:
        if self._api is None:
            self._compile(operands)
        given: dict[str, Any] = {n if n in _NAMES else f"{n}_tensor": t for n, t in operands.items()}
        if self._scratch is not None:
            name, size = self._scratch
            given[name] = _aligned(size, next(t.device for t in operands.values() if t is not None))
        self._api.execute(**given, **scalars)

    def _compile(self, operands: Operands) -> None:
        from cudnn.gemm.cutedsl import grouped  # deferred: imports the CuTe DSL

        samples = {f"sample_{name}": t for name, t in operands.items()}
        if (ends := operands.get("offsets")) is not None:  # the constructor reads them on the host
            samples["sample_offsets"] = torch.zeros(ends.shape, dtype=ends.dtype, device="cpu")
            size = grouped.get_grouped_gemm_wgrad_workspace_size_sm100(len(ends))
            self._scratch = "descriptor_workspace", size
        api = getattr(grouped, self._name)(**samples, **self._settings, **_TILES)
        api.check_support()
        api.compile()
        if hasattr(api, "scratch_workspace_bytes"):
            self._scratch = "workspace", api.scratch_workspace_bytes()
        self._api = api


@functools.cache
def kernel(
    name: str, device: torch.device, shape: tuple[int, ...], *kind: object, block: int, **more: object
) -> Kernel:
    """Return the kernel for weights of this shape.

    - ``name``: the name of its class.
    - ``kind``: tells kernels with other operands apart.
    - ``block``: codes that share a scale.
    - ``more``: further arguments of the constructor.
    """
    return Kernel(name, {"sf_vec_size": block, **more})


def glu_name(activation: Activation) -> str:
    """Return the package's name of a gated activation: its "swiglu" has no constants."""
    return "swiglu" if activation.limit is None else "geglu"


def glu_constants(activation: Activation) -> dict[str, float]:
    """Return the constants of a clamped activation, by the package's names."""
    if activation.limit is None:
        return {}
    bounds = {"glu_clamp_max": activation.limit, "glu_clamp_min": -activation.limit}
    return {"linear_offset": activation.offset, "geglu_alpha": activation.alpha, **bounds}


def scale_tiles(lines: int, length: int, block: int) -> tuple[int, int]:
    """Return the tiles of scales of some lines of codes: down and across."""
    return -(-lines // _TILE_LINES), -(-length // (block * _TILE_SCALES))


def scales_like(codes: Tensor, lines: int, length: int, block: int, dtype: torch.dtype) -> Tensor:
    """Return empty scales, in tiles, for some lines of codes."""
    down, across = scale_tiles(lines, length, block)
    return codes.new_empty(down * across * _TILE_LINES * _TILE_SCALES, dtype=dtype)


_ones: dict[torch.device, Tensor] = {}


def ones(count: int, device: torch.device) -> Tensor:
    """Return fp32 ones, which nothing may change. Those of all calls share memory."""
    found = _ones.get(device)
    if found is None or found.shape[0] < count:
        size = 1 << count.bit_length()
        found = lasting(lambda: torch.ones(size, dtype=torch.float32, device=device), device)
        if not is_capturing(device):  # a graph fills them only when it is replayed
            _ones[device] = found
    return found[:count]


def transposed(bias_EN: Tensor | None) -> Tensor | None:
    """Return a bias as the kernels take it."""
    return None if bias_EN is None else bias_EN.T


def in_views(operands: Operands, block: int, codes_per_byte: int = 1) -> Operands:
    """Return the operands in the views that the kernels of the squared ReLU take: rows (P, F, 1), weights (N, K, E),
    factors (P, 1, 1), and scales (32, 4, lines / 128, 4, length / 128, matrices).
    """
    codes_ENK = operands["b"]
    assert codes_ENK is not None
    experts = codes_ENK.shape[0]
    found = dict(operands)
    for name, t in operands.items():
        if t is None:
            continue
        if name in ("a", "c", "d", "d_row", "d_col"):
            found[name] = t.as_strided((*t.shape, 1), (t.shape[1], 1, t.numel()))
        elif name == "b":
            found[name] = t.permute(1, 2, 0)
        elif name in ("prob", "dprob"):
            found[name] = t.view(-1, 1, 1)
        elif name.startswith("sf"):
            codes = operands[{"sfa": "a", "sfb": "b", "sfd_row": "c", "sfd_col": "c"}[name]]
            assert codes is not None
            lines, length = codes.shape[-2:] if name != "sfd_col" else codes.shape[::-1]
            tiles = scale_tiles(lines, length * codes_per_byte, block)
            blocks = t.view(experts if name == "sfb" else 1, *tiles, 32, 4, _TILE_SCALES)
            found[name] = blocks.permute(3, 4, 1, 5, 2, 0)
    return found


def _aligned(size: int, device: torch.device) -> Tensor:
    memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % _ALIGNMENT :][:size]
