"""The engine ``"alltoall"``: each rank gets exactly the rows that the others have for it. NCCL and gloo.

The numbers of rows depend on the contents of tensors, and the hosts must know them: each call waits for its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch import distributed as dist

from fusedmoe.expert_parallel.engine import VaryingEngine, as_bytes, forbid_capture, writes_no_weight


class AllToAll(VaryingEngine):
    """All-to-alls of parts that differ in length."""

    name: ClassVar[str] = "alltoall"

    def counts(self, sent_PC: Tensor) -> Tensor:
        forbid_capture(sent_PC, "engine='alltoall'")
        received_PC = torch.empty_like(sent_PC)
        with writes_no_weight(self.group, sent_PC.device):
            dist.all_to_all_single(received_PC, sent_PC, group=self.group)
        return torch.stack([sent_PC, received_PC]).cpu()

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        with writes_no_weight(self.group, rows.device):
            dist.all_to_all_single(as_bytes(out), as_bytes(rows.contiguous()), [*received], [*sent], group=self.group)
        return out
