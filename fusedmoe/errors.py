"""The one exception for bad input."""

from __future__ import annotations


class InputError(ValueError):
    """An argument of an op is wrong: the message names op and argument, says what came and what was expected."""


NO_EXPERT_PARALLELISM = "expert parallelism: not yet: weights are one rank's, which holds all experts of the layer"


def inside_jit_trace(who: str) -> InputError:
    """Return the error for a call inside ``torch.jit.trace``; ``who`` was called."""
    return InputError(
        f"{who}: expected a call outside of torch.jit.trace, got one inside: a trace would keep the sizes and kernels "
        "of this call. Use torch.export.export or torch.compile; for ONNX, torch.onnx.export(dynamo=True)"
    )
