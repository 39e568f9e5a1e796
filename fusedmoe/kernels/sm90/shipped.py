"""The Hopper kernels that are built ahead of time: those of common models, with the candidate tiles of `choice`.

All other kernels are compiled at their first use.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from fusedmoe.kernels.build.kernel import Kernel
from fusedmoe.kernels.exchange.pull import Pull
from fusedmoe.kernels.exchange.push import Push
from fusedmoe.kernels.exchange.push_sums import PushSums
from fusedmoe.kernels.exchange.scatter import Scatter
from fusedmoe.kernels.exchange.send import Send
from fusedmoe.kernels.exchange.signal import Signal
from fusedmoe.kernels.exchange.total import Total
from fusedmoe.kernels.rows.activation.kernel import Activate, ActivateBackward
from fusedmoe.kernels.rows.move.offsets import ColumnSums, Offsets
from fusedmoe.kernels.rows.move.parts import Parts, SumParts
from fusedmoe.kernels.rows.move.ranges import RowRanges
from fusedmoe.kernels.rows.move.route import Route
from fusedmoe.kernels.rows.move.slots import SLOTS, GatherRows, RowDots, SlotValues, SumSlots
from fusedmoe.kernels.rows.move.sum_on_few_sms import SumOnFewSms
from fusedmoe.kernels.rows.quantize.amax_history import UpdateAmaxHistory
from fusedmoe.kernels.rows.quantize.blocks import QuantizeColumnsOfCodes, QuantizeRows, QuantizeWeight
from fusedmoe.kernels.rows.quantize.dequantize import Dequantize
from fusedmoe.kernels.rows.quantize.formats import Magnitudes, QuantizeFormat
from fusedmoe.kernels.rows.quantize.gather_codes import GatherCodes
from fusedmoe.kernels.rows.quantize.transpose_codes import TransposeCodes
from fusedmoe.kernels.rows.quantize.transpose_rows import TransposeRows
from fusedmoe.kernels.rows.router.choose import Choose
from fusedmoe.kernels.rows.router.gradient import ChooseBackward
from fusedmoe.kernels.sm90.epilogue.codes_by_expert import CodesByExpert
from fusedmoe.kernels.sm90.epilogue.derivative_codes import DerivativeCodes, derivative_codes
from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, PLAIN_FP32, activation, derivative
from fusedmoe.kernels.sm90.epilogue.quantized import RowCodes
from fusedmoe.kernels.sm90.gemm.block_scales import BlockScaledRows
from fusedmoe.kernels.sm90.gemm.block_scales_k import BlockScaledColumns
from fusedmoe.kernels.sm90.gemm.operands import Plain, Promoted
from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
from fusedmoe.kernels.sm90.gemm.tensor_scales import TensorScaled
from fusedmoe.kernels.sm90.router import LOGIT_TILES, WGRAD_TILE
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, PP_192, WGRADS
from fusedmoe.numerics.activations import KINDS
from fusedmoe.numerics.formats import E4M3, E5M2, fp8_tensor

if TYPE_CHECKING:
    from fusedmoe.kernels.device.warps import WarpKernel

BESIDE = ("bf16", False), ("bf16", True), ("fp32", False)
"""Of weight gradients that run beside another kernel: the dtypes, and whether they are added."""


def moving_rows() -> list[WarpKernel]:
    """Return the kernels that sort, move and sum rows, which Blackwell runs too."""
    kernels: list[WarpKernel] = [Offsets("int32"), Offsets("int64")]
    routed = itertools.product(("fp32", "bf16"), (64, 128, 256, 512), (False, True))
    kernels += [Route("int64", *settings) for settings in routed]
    for scale in (None, "fp32", "bf16"):
        kernels += [GatherRows("bf16", scale), *(SumSlots("bf16", scale, at_once) for at_once in SLOTS)]
    kernels += [RowDots("bf16", "fp32"), RowDots("bf16", "bf16"), SlotValues("fp32"), SlotValues("bf16")]
    return [*kernels, ColumnSums("bf16", "bf16"), ColumnSums("bf16", "fp32"), ColumnSums("fp16", "fp16")]


def activations(*agains: bool) -> list[WarpKernel]:
    """Return the kernels of SwiGLU apart from products; ``agains``: whether backward ones recompute its result."""
    kernels: list[WarpKernel] = []
    for scale in (None, "fp32"):
        kind = "bf16", "swiglu", False, False, scale
        kernels.append(Activate(*kind))
        kernels += [ActivateBackward(*kind, scale is not None, again) for again in agains]
    return kernels


def shipped() -> tuple[Kernel, ...]:
    """Return the kernels, the most used ones first."""
    kernels: list[Kernel] = []

    # bf16: every candidate of SwiGLU and of products without an activation
    for config in CANDIDATES["plain"]:
        kernels += [RaggedM(Plain("bf16"), config, b_major=major) for major in ("k", "n")]
    for config, keep, gather in itertools.product(CANDIDATES["activation"], (True, False), (False, True)):
        kernels.append(RaggedM(Plain("bf16"), config, epilogue=activation("swiglu", keep=keep), gather=gather))
    for config, keep in itertools.product(CANDIDATES["transposed_activation"], (True, False)):  # as in Llama-4
        kernels.append(RaggedM(Plain("bf16"), config, b_major="n", epilogue=activation("swiglu", keep=keep)))
    for config, (keep, scaled) in itertools.product(
        CANDIDATES["derivative"], ((True, False), (True, True), (False, False))
    ):
        epilogue = derivative("swiglu", keep=keep, row_scale=scaled)
        kernels.append(RaggedM(Plain("bf16"), config, b_major="n", epilogue=epilogue))
    for config in CANDIDATES["derivative"]:
        epilogue = derivative("swiglu", keep=True, row_scale=True)
        kernels.append(RaggedM(Plain("bf16"), config, b_major="n", epilogue=epilogue, gather=True))
    for gathered, family in WGRADS.items():
        for config in CANDIDATES[family]:
            for out, adds in itertools.product(("bf16", "fp32"), (False, True)):
                kernels.append(RaggedK(Plain("bf16"), config, out=out, accumulate=adds, gathered=gathered))
    # that of a layer's last weight, beside the sum over slots
    for config, (out, adds) in itertools.product(CANDIDATES["wgrad_gathered_a"], BESIDE):
        kernels.append(RaggedK(Plain("bf16"), config, out=out, accumulate=adds, gathered="a", beside=True))

    # bf16: the other activations, with the tiles of training
    others = [("swiglu", True, False), ("swiglu", True, True)]
    others += [(name, False, False) for name, kind in KINDS.items() if kind.shipped and name != "swiglu"]
    for (kind, clamped, interleaved), keep in itertools.product(others, (True, False)):
        epilogue = activation(kind, clamped=clamped, interleaved=interleaved, keep=keep)
        # interleaved weights: as GroupedLinear stores them, and as GPT-OSS's checkpoints do
        majors = "kn" if interleaved else "k"
        kernels += [RaggedM(Plain("bf16"), PP_192, b_major=major, epilogue=epilogue) for major in majors]
    for (kind, clamped, interleaved), scaled in itertools.product(others, (False, True)):
        config = CANDIDATES["heavy_derivative" if KINDS[kind].heavy else "derivative"][0]
        epilogue = derivative(kind, clamped=clamped, interleaved=interleaved, keep=True, row_scale=scaled)
        kernels.append(RaggedM(Plain("bf16"), config, b_major="n", epilogue=epilogue))

    # fp16: one of each
    kernels += [RaggedM(Plain("fp16"), PP_192, b_major=major) for major in ("k", "n")]
    kernels.append(RaggedM(Plain("fp16"), PP_192, epilogue=activation("swiglu", keep=True)))
    kernels.append(RaggedM(Plain("fp16"), PP_192, b_major="n", epilogue=derivative("swiglu", keep=True)))
    kernels.append(RaggedK(Plain("fp16"), PP_192, out="fp16"))

    kernels += moving_rows()
    kernels += activations(False)

    # the recipe fp8_block, with gradients in E4M3 or E5M2
    for element, columns, of_tokens in itertools.product(("e4m3", "e5m2"), (True, False), (False, True)):
        kernels.append(QuantizeRows("bf16", element, True, columns, True, True, of_tokens))
    kernels.append(GatherCodes())
    kernels.append(QuantizeRows("bf16", "e4m3", False, True, True, True, True))  # of tokens, in backward
    for columns in (True, False):
        kernels.append(QuantizeRows("bf16", "e4m3", True, columns, True, False))  # of dense layers
        kernels.append(QuantizeWeight("bf16", "e4m3", True, columns, True))
    kernels.append(TransposeCodes())
    for config in CANDIDATES["fp8_plain"]:
        kernels += [RaggedM(BlockScaledRows(element), config, epilogue=PLAIN) for element in ("e4m3", "e5m2")]
    for config, keep, codes in itertools.product(CANDIDATES["fp8_activation"], (True, False), (RowCodes(), None)):
        epilogue = activation("swiglu", keep=keep, result=codes)
        kernels.append(RaggedM(BlockScaledRows("e4m3"), config, epilogue=epilogue))
    for config, keep, scaled in itertools.product(CANDIDATES["fp8_derivative"], (True, False), (True, False)):
        epilogue = derivative("swiglu", keep=keep, row_scale=scaled)
        kernels.append(RaggedM(BlockScaledRows("e4m3"), config, epilogue=epilogue))
    for config, scaled in itertools.product(CANDIDATES["fp8_derivative_codes"], (True, False)):
        epilogue = derivative_codes("swiglu", DerivativeCodes(), row_scale=scaled)
        kernels.append(RaggedM(BlockScaledRows("e4m3"), config, epilogue=epilogue))
    for config in CANDIDATES["fp8_wgrad"]:
        for out, adds in itertools.product(("bf16", "fp32"), (False, True)):
            kernels.append(RaggedK(BlockScaledColumns("e4m3"), config, out=out, accumulate=adds))
        for out, adds in BESIDE:  # the sum over slots
            kernels.append(RaggedK(BlockScaledColumns("e4m3"), config, out=out, accumulate=adds, beside=True))

    # the recipe fp8_tensor, whose gradients are in E5M2, with current and with delayed scaling
    for code, of_tokens, amax in itertools.product((E4M3, E5M2), (False, True), (False, True)):
        kernels.append(QuantizeFormat("bf16", True, of_tokens, False, fp8_tensor(code), True, True, amax=amax))
    for amax in (False, True):  # of weights
        kernels.append(QuantizeFormat("bf16", False, False, False, fp8_tensor(E4M3), True, True, amax=amax))
    for by_expert, of_tokens in ((True, False), (True, True), (False, False)):
        kernels.append(Magnitudes("bf16", by_expert, of_tokens, False, False, False, True, False))
    for config in CANDIDATES["fp8_plain"]:
        kernels += [RaggedM(TensorScaled(element), config, epilogue=PLAIN) for element in ("e4m3", "e5m2")]
    for config, keep, delayed in itertools.product(CANDIDATES["fp8_activation"], (True, False), (True, False)):
        epilogue = activation("swiglu", keep=keep, result=CodesByExpert() if delayed else None)
        kernels.append(RaggedM(TensorScaled("e4m3"), config, epilogue=epilogue))
    kernels += [TransposeRows(), UpdateAmaxHistory()]
    for config, keep, scaled in itertools.product(CANDIDATES["fp8_derivative"], (True, False), (True, False)):
        epilogue = derivative("swiglu", keep=keep, row_scale=scaled)
        kernels.append(RaggedM(TensorScaled("e5m2"), config, epilogue=epilogue))
    for config in CANDIDATES["fp8_wgrad"]:
        for out, adds in itertools.product(("bf16", "fp32"), (False, True)):
            kernels.append(RaggedK(TensorScaled("e5m2"), config, out=out, accumulate=adds))

    # the router of bf16 tokens, with a bf16 or fp32 weight, without a bias
    kernels += [RaggedM(Promoted("bf16"), tile, epilogue=PLAIN_FP32) for tile in LOGIT_TILES]
    kernels.append(RaggedK(Promoted("bf16"), WGRAD_TILE, out="fp32"))
    for experts, blocks in itertools.product((64, 128), ((0, 1), (0, 0, 1, 2))):
        parts = 1 if len(blocks) == 2 else 3
        kernels.append(Choose("topk_softmax", experts, False, None, False, False, parts, parts > 1, False, slots=8))
        of_weight = ("bf16", (0, 0)) if parts == 1 else ("fp32", (1, 0, 0))
        of_rows = ("topk_softmax", experts, False, blocks, True, "", False, False)
        kernels.append(ChooseBackward(*of_rows, *of_weight, slots=8))
    kernels.append(Choose("sigmoid", 256, True, None, True, True, 1, False, False, slots=8))  # DeepSeek-V3
    kernels.append(ChooseBackward("sigmoid", 256, True, (0, 1), True, "", False, False, "bf16", (0, 0), slots=8))
    kernels += [Parts("fp32", (0, 1, 2)), SumParts("bf16", 2), SumParts("fp32", 3), SumParts("fp32", 1)]
    kernels += [Route("int64", "fp32", experts, True, counted=True) for experts in (64, 128, 256)]
    kernels += [SumSlots("bf16", None, at_once, adds=True) for at_once in SLOTS]
    kernels += [SumOnFewSms("bf16", at_once, adds=True) for at_once in SLOTS]

    # expert parallelism: products of ranges of rows, exchanges, sums with a received part
    of_bf16 = itertools.product([Plain("bf16")], CANDIDATES["plain"])
    of_codes = itertools.product([BlockScaledRows("e4m3")], CANDIDATES["fp8_plain"])
    for operands, config in (*of_bf16, *of_codes):
        kernels += [RaggedM(operands, config, ranges=True, signals=signals) for signals in (False, True)]
    for config, keep in itertools.product(CANDIDATES["activation"], (True, False)):
        epilogue = activation("swiglu", keep=keep)
        kernels.append(RaggedM(Plain("bf16"), config, epilogue=epilogue, gather=True, ranges=True))
    for config, keep in itertools.product(CANDIDATES["fp8_activation"], (True, False)):
        epilogue = activation("swiglu", keep=keep, result=RowCodes())
        kernels.append(RaggedM(BlockScaledRows("e4m3"), config, epilogue=epilogue, ranges=True))
    for config in CANDIDATES["derivative"]:
        epilogue = derivative("swiglu", keep=True, row_scale=True)
        kernels.append(RaggedM(Plain("bf16"), config, b_major="n", epilogue=epilogue, gather=True, ranges=True))
    for config in CANDIDATES["fp8_derivative_codes"]:
        epilogue = derivative_codes("swiglu", DerivativeCodes(), row_scale=True)
        kernels.append(RaggedM(BlockScaledRows("e4m3"), config, epilogue=epilogue, ranges=True))
    kernels += [
        RowRanges(),
        RowRanges(256),
        QuantizeColumnsOfCodes(),
        Signal(),
        Scatter(),
        Dequantize("e4m3", "fp32", 128, 1),
        Send("bf16"),
        Pull("bf16"),
        Push("bf16"),
        Push("bf16", "fp32"),
        PushSums("bf16"),
        PushSums("bf16", counts=True),
        PushSums("bf16", counts=True, by_experts=True),
        PushSums("bf16", values="fp32"),
    ]
    kernels += [Send("bf16", scaled=True), Send("bf16", "int32", scaled=True), Send("bf16", "int64", scaled=True)]
    kernels += [Send("bf16", "int32"), Send("bf16", "int64"), Total("bf16"), Total("bf16", "fp32")]
    kernels += [SumSlots("bf16", None, at_once, adds=True, rounds=True) for at_once in SLOTS]
    return tuple(kernels)
