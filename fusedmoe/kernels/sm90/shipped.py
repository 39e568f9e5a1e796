"""The Hopper kernels that are built ahead of time: those of common models, with the candidate tiles of `choice`.

All other kernels are compiled at their first use.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from fusedmoe.kernels.activation import Activation
from fusedmoe.kernels.sm90.choice import CANDIDATES, PP_192
from fusedmoe.kernels.sm90.epilogues import activation, derivative
from fusedmoe.kernels.sm90.functions import heavy
from fusedmoe.kernels.sm90.ragged_k import RaggedK
from fusedmoe.kernels.sm90.ragged_m import RaggedM
from fusedmoe.kernels.sm90.rows import ColumnSums, Offsets
from fusedmoe.kernels.sm90.slots import SLOTS, GatherRows, Route, RowDots, SlotValues, SumSlots

if TYPE_CHECKING:
    from fusedmoe.kernels.activation import Kind
    from fusedmoe.kernels.kernel import Kernel


def shipped() -> tuple[Kernel, ...]:
    """Return the kernels, the most used ones first."""
    kernels: list[Kernel] = []

    # bf16: every candidate of SwiGLU and of products without an activation
    for config in CANDIDATES["plain"]:
        kernels += [RaggedM("bf16", config, b_major=major) for major in ("k", "n")]
    for config, keep in itertools.product(CANDIDATES["activation"], (True, False)):
        kernels.append(RaggedM("bf16", config, epilogue=activation("swiglu", keep=keep)))
    for config, keep in itertools.product(CANDIDATES["transposed_activation"], (True, False)):  # as in Llama-4
        kernels.append(RaggedM("bf16", config, b_major="n", epilogue=activation("swiglu", keep=keep)))
    for config, (keep, scaled) in itertools.product(
        CANDIDATES["derivative"], ((True, False), (True, True), (False, False))
    ):
        epilogue = derivative("swiglu", keep=keep, row_scale=scaled)
        kernels.append(RaggedM("bf16", config, b_major="n", epilogue=epilogue))
    for config in CANDIDATES["wgrad"]:
        kernels += [RaggedK("bf16", config, out="bf16"), RaggedK("bf16", config, out="fp32", accumulate=True)]
    kernels.append(RaggedK("bf16", PP_192, out="fp32"))

    # bf16: the other activations, with the tiles of training
    others: list[tuple[Kind, bool, bool]] = [
        ("swiglu", True, False), ("swiglu", True, True), ("geglu_tanh", False, False), ("geglu_erf", False, False),
        ("reglu", False, False), ("squared_relu", False, False),
    ]  # fmt: skip
    for (kind, clamped, interleaved), keep in itertools.product(others, (True, False)):
        epilogue = activation(kind, clamped=clamped, interleaved=interleaved, keep=keep)
        # interleaved weights: as GroupedLinear stores them, and as GPT-OSS's checkpoints do
        majors = "kn" if interleaved else "k"
        kernels += [RaggedM("bf16", PP_192, b_major=major, epilogue=epilogue) for major in majors]
    for (kind, clamped, interleaved), scaled in itertools.product(others, (False, True)):
        config = CANDIDATES["heavy_derivative" if heavy(Activation(kind)) else "derivative"][0]
        epilogue = derivative(kind, clamped=clamped, interleaved=interleaved, keep=True, row_scale=scaled)
        kernels.append(RaggedM("bf16", config, b_major="n", epilogue=epilogue))

    # fp16: one of each
    kernels += [RaggedM("fp16", PP_192, b_major=major) for major in ("k", "n")]
    kernels.append(RaggedM("fp16", PP_192, epilogue=activation("swiglu", keep=True)))
    kernels.append(RaggedM("fp16", PP_192, b_major="n", epilogue=derivative("swiglu", keep=True)))
    kernels.append(RaggedK("fp16", PP_192, out="fp16"))

    kernels += [Offsets("int32"), Offsets("int64")]
    routed = itertools.product(("fp32", "bf16"), (64, 128, 256, 512), (False, True))
    kernels += [Route("int64", *settings) for settings in routed]
    for scale in (None, "fp32", "bf16"):
        kernels += [GatherRows("bf16", scale), *(SumSlots("bf16", scale, at_once) for at_once in SLOTS)]
    kernels += [RowDots("bf16", "fp32"), RowDots("bf16", "bf16"), SlotValues("fp32"), SlotValues("bf16")]
    kernels += [ColumnSums("bf16", "bf16"), ColumnSums("bf16", "fp32"), ColumnSums("fp16", "fp16")]
    return tuple(kernels)
