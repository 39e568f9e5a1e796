"""The exception for invalid input."""

from __future__ import annotations


class InputError(ValueError):
    """An argument is invalid. The message names the op, the argument, the expected value and the actual one."""


SPREAD_OVER_RANKS = (
    "experts are spread over ranks by expert_parallel=fm.ExpertParallel(group) of MoE, or of Dispatch and Combine"
)


def inside_jit_trace(who: str) -> InputError:
    """Return the error for a call of ``who`` inside ``torch.jit.trace``."""
    return InputError(
        f"{who}: expected a call outside of torch.jit.trace, got one inside: a trace would fix the sizes and kernels "
        "of this call. Use torch.export.export or torch.compile; for ONNX, torch.onnx.export(dynamo=True)"
    )
