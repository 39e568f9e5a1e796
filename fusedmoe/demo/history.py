"""What happened at each step: the loss, the load of every expert, and the evaluations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class History:
    """The record of a run; it goes into the checkpoint and becomes the figure.

    Attributes
    ----------
    losses : list of float
        Training loss of each step, in bits a byte.
    loads : list of Tensor
        Of each step, (layers, experts) int32 on the CPU: the rows that each expert got.
    evaluations : list of (int, float)
        Steps done, and the bits a byte on the held-out text then.
    """

    losses: list[float] = field(default_factory=list)
    loads: list[torch.Tensor] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Return the record as tensors and plain numbers."""
        return {
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "loads": torch.stack(self.loads) if self.loads else torch.empty(0, dtype=torch.int32),
            "evaluations": [list(evaluation) for evaluation in self.evaluations],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """Return the record that :meth:`state` was made from."""
        evaluations = [(int(step), float(bits)) for step, bits in state["evaluations"]]
        return cls(losses=state["losses"].tolist(), loads=list(state["loads"]), evaluations=evaluations)
