"""The kernel that copies some rows of another rank's memory, for an engine that reads only the wanted ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedmoe.base.target import arch_of
from fusedmoe.kernels.build import toolkit
from fusedmoe.kernels.rows.move import slot_functions


def bind_copy_of_rows(out: Tensor, sms: int) -> Callable[..., object] | None:
    """Return the function ``copy(source, row_of, out)`` for tensors like ``out``, on some SMs; see `Wanted`.

    None if no kernel copies such rows: it needs an sm_90 GPU, and rows (N, H) in bf16 or fp16 with H a multiple of 8.
    """
    if arch_of(out.device) != 90 or toolkit.missing_packages():
        return None
    if out.dtype not in (torch.bfloat16, torch.float16) or out.dim() != 2 or out.shape[1] % 8:
        return None
    return slot_functions.bind_copy_rows(out, sms)
