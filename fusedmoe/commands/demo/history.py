"""The record of a run: the loss and the experts' load of each step, and the evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class History:
    """The record of a run, for the checkpoint and the figure."""

    losses: list[float] = field(default_factory=list)  # training loss per step, in bits per byte
    # rows per expert, per step: (layers, experts) int32 on the CPU
    loads: list[torch.Tensor] = field(default_factory=list)
    # completed steps, and the bits per byte on the held-out text
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Return the record as tensors and plain numbers."""
        return {
            "losses": torch.tensor(self.losses, dtype=torch.float64, device="cpu"),
            "loads": torch.stack(self.loads) if self.loads else torch.empty(0, dtype=torch.int32, device="cpu"),
            "evaluations": [list(evaluation) for evaluation in self.evaluations],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """Return the record that :meth:`state` saved."""
        evaluations = [(int(step), float(bits)) for step, bits in state["evaluations"]]
        return cls(losses=state["losses"].tolist(), loads=list(state["loads"]), evaluations=evaluations)
