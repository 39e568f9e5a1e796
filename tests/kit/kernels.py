"""The table of kernels whose machine code is checked: a covering few for every run, and all others."""

from dataclasses import replace
from itertools import product

from fusedmoe.kernels.build.shipped import shipped
from fusedmoe.kernels.exchange.pull import Pull
from fusedmoe.kernels.exchange.push import Push
from fusedmoe.kernels.exchange.push_sums import PushSums
from fusedmoe.kernels.exchange.scatter import Scatter
from fusedmoe.kernels.exchange.send import Send
from fusedmoe.kernels.exchange.signal import Signal
from fusedmoe.kernels.exchange.total import Total
from fusedmoe.kernels.rows.activation.kernel import Activate, ActivateBackward
from fusedmoe.kernels.rows.move.offsets import ColumnSums, Offsets, ZeroTail
from fusedmoe.kernels.rows.move.parts import Parts, SumParts
from fusedmoe.kernels.rows.move.route import Route
from fusedmoe.kernels.rows.move.slots import GatherRows, RowDots, SlotValues, SumSlots
from fusedmoe.kernels.rows.move.sum_on_few_sms import SumOnFewSms
from fusedmoe.kernels.rows.quantize.amax_history import UpdateAmaxHistory
from fusedmoe.kernels.rows.quantize.blocks import QuantizeRows, QuantizeWeight
from fusedmoe.kernels.rows.quantize.dequantize import Dequantize, DequantizeTransposed
from fusedmoe.kernels.rows.quantize.formats import Magnitudes, QuantizeFormat
from fusedmoe.kernels.rows.quantize.gather_codes import GatherCodes
from fusedmoe.kernels.rows.quantize.transpose_codes import TransposeCodes
from fusedmoe.kernels.rows.quantize.transpose_rows import TransposeRows
from fusedmoe.kernels.rows.router.choose import Choose
from fusedmoe.kernels.rows.router.gradient import ChooseBackward
from fusedmoe.kernels.sm90 import limits
from fusedmoe.kernels.sm90.epilogue.codes_by_expert import CodesByExpert
from fusedmoe.kernels.sm90.epilogue.derivative_codes import DerivativeCodes, derivative_codes
from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, activation, derivative
from fusedmoe.kernels.sm90.epilogue.quantized import RowCodes
from fusedmoe.kernels.sm90.gemm.block_scales import BlockScaledRows
from fusedmoe.kernels.sm90.gemm.block_scales_k import BlockScaledColumns
from fusedmoe.kernels.sm90.gemm.operands import Plain
from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
from fusedmoe.kernels.sm90.gemm.tensor_scales import TensorScaled
from fusedmoe.kernels.sm90.shipped import BESIDE
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, CO_256, CO_256_ROWS, CO_256_TALL
from fusedmoe.kernels.sm100.quantize import QuantizePacked, QuantizePackedWeight
from fusedmoe.kernels.sm100.quantize_nvfp4 import QuantizePackedFormat
from fusedmoe.numerics.formats import fp8_row, fp8_tensor, mxfp8, nvfp4

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
KINDS = ("swiglu", "geglu_tanh", "geglu_erf", "reglu", "squared_relu")
BF16 = Plain("bf16")
BLOCKS, COLUMNS, TENSOR = BlockScaledRows("e4m3"), BlockScaledColumns("e4m3"), TensorScaled("e4m3")
SHIPPED = shipped("sm_90a")
SHIPPED_BF16 = [k for k in SHIPPED if isinstance(k, (RaggedM, RaggedK)) and not k.operands.scaled]
SHIPPED_ROWS = [k for arch in ARCHITECTURES for k in shipped(arch) if not isinstance(k, (RaggedM, RaggedK))]

GPT_OSS = activation("swiglu", clamped=True, interleaved=True, keep=True)
GPT_OSS_BACKWARD = derivative("swiglu", clamped=True, interleaved=True, keep=True, row_scale=True)
GEGLU_BACKWARD = derivative("geglu_tanh", keep=True, row_scale=True)
SWIGLU_BACKWARD = derivative("swiglu", keep=True, row_scale=True)


def products_of_bf16():
    """The products that `choose` may pick besides those that are shipped."""
    for family, epilogue in (("derivative", GPT_OSS_BACKWARD), ("heavy_derivative", GEGLU_BACKWARD)):
        for config, gather in product(CANDIDATES[family], (False, True)):
            yield RaggedM(BF16, config, b_major="n", epilogue=epilogue, gather=gather)
    yield RaggedM(BF16, CO_256, epilogue=GPT_OSS)
    yield from (replace(k, gather=True) for k in SHIPPED_BF16 if isinstance(k, RaggedM) and not k.gather | k.signals)


def products_of_codes(operands, codes, gradient, kinds=KINDS, dtypes=("e4m3", "e5m2")):
    """The products of FP8 rows that `choose` may pick, except clamped activations."""
    for dtype, config in product(dtypes, CANDIDATES["fp8_plain"]):
        yield RaggedM(operands(dtype), config, epilogue=PLAIN)
    for config, keep, result, kind in product(CANDIDATES["fp8_activation"], (True, False), (None, codes), kinds):
        yield RaggedM(operands("e4m3"), config, epilogue=activation(kind, keep=keep, result=result))
    for config, keep, scaled, kind in product(CANDIDATES["fp8_derivative"], (True, False), (True, False), kinds):
        yield RaggedM(operands(gradient), config, epilogue=derivative(kind, keep=keep, row_scale=scaled))


def derivatives_in_codes(kinds=KINDS):
    for config, kind, row_scale in product(CANDIDATES["fp8_derivative_codes"], kinds, (True, False)):
        yield RaggedM(BLOCKS, config, epilogue=derivative_codes(kind, DerivativeCodes(), row_scale=row_scale))


def wgrads_of_codes(operands, dtypes=("e4m3", "e5m2"), outs=("bf16", "fp32")):
    for dtype, config, out, adds in product(dtypes, CANDIDATES["fp8_wgrad"], outs, (False, True)):
        yield RaggedK(operands(dtype), config, out=out, accumulate=adds)


def wgrads_beside():
    for config, (out, adds) in product(CANDIDATES["fp8_wgrad"], BESIDE):
        yield RaggedK(COLUMNS, config, out=out, accumulate=adds, beside=True)


def products_of_ranges():
    for config, signals in product(CANDIDATES["fp8_plain"], (False, True)):
        yield RaggedM(BLOCKS, config, ranges=True, signals=signals)


def other_products_of_codes():
    """One of each other clamp, format of a result, and choice of forms."""
    for operands, codes, results in (
        (BLOCKS, RowCodes(), (RowCodes("e5m2"), RowCodes(power_of_two=False))),
        (TENSOR, CodesByExpert(), (CodesByExpert("e5m2"),)),
    ):
        yield RaggedM(operands, CO_256, epilogue=activation("swiglu", clamped=True, keep=True, result=codes))
        for result in results:
            yield RaggedM(operands, CO_256, epilogue=activation("swiglu", keep=True, result=result))
        yield RaggedM(operands, CO_256_ROWS, epilogue=GPT_OSS_BACKWARD)
    yield RaggedM(BlockScaledRows("e5m2"), CO_256_ROWS, epilogue=SWIGLU_BACKWARD)
    for config, keep in product(CANDIDATES["fp8_activation"], (True, False)):
        yield RaggedM(BLOCKS, config, epilogue=activation("swiglu", keep=keep, result=RowCodes()), ranges=True)
    some_forms = [forms for forms in product((True, False), repeat=3) if any(forms) and not all(forms)]
    for codes, dtype in (
        *((DerivativeCodes(*forms), "e4m3") for forms in some_forms),
        (DerivativeCodes(element="e5m2"), "e5m2"),
    ):
        yield RaggedM(BlockScaledRows(dtype), CO_256_ROWS, epilogue=derivative_codes("swiglu", codes, row_scale=True))
    clamped = derivative_codes("swiglu", DerivativeCodes(), clamped=True, row_scale=True)
    yield RaggedM(BLOCKS, CO_256_ROWS, epilogue=clamped)


PRODUCTS_BF16 = [*SHIPPED_BF16, *products_of_bf16()]
PRODUCTS_FP8 = [
    *products_of_codes(BlockScaledRows, RowCodes(), "e4m3"), *derivatives_in_codes(),
    *products_of_codes(TensorScaled, CodesByExpert(), "e5m2"), *other_products_of_codes(),
    *wgrads_of_codes(BlockScaledColumns), *wgrads_beside(), *wgrads_of_codes(TensorScaled), *products_of_ranges(),
]  # fmt: skip
PRODUCTS = {kernel.symbol: kernel for kernel in (*PRODUCTS_BF16, *PRODUCTS_FP8)}
QUICK_PRODUCTS = (
    "sm90_ragged_m_bf16_bk_plain_128x192pp_c21",
    "sm90_ragged_m_fp16_bn_plain_128x192pp_c21",
    "sm90_ragged_m_bf16_bn_swiglu_keep_128x128pp_c21",
    "sm90_ragged_m_bf16_bn_dswiglu_scale_keep_128x192pp_c21",
    "sm90_ragged_m_bf16_bk_swiglu_clamp_inter_keep_128x256co_c21",
    "sm90_ragged_m_gather_ranges_bf16_bk_swiglu_keep_128x192pp_c21",
    "sm90_ragged_m_ranges_signals_bf16_bk_plain_128x192pp_c21",
    "sm90_ragged_m_bf16_bk_plain_fp32_128x128co_c21_promoted",
    "sm90_ragged_k_bf16_bf16_128x192pp_c21",
    "sm90_ragged_k_gather_b_bf16_fp32_add_256x128co_c12",
    *(kernel.symbol for kernel in (
        RaggedM(BlockScaledRows("e5m2"), CO_256, epilogue=PLAIN),
        RaggedM(BLOCKS, CO_256, ranges=True, signals=True),
        RaggedM(BLOCKS, CO_256, epilogue=activation("swiglu", keep=True, result=RowCodes())),
        RaggedM(BLOCKS, CO_256, epilogue=activation("swiglu", keep=True, result=RowCodes()), ranges=True),
        RaggedM(BLOCKS, CO_256_ROWS, epilogue=derivative_codes("geglu_erf", DerivativeCodes(), row_scale=True)),
        RaggedM(TENSOR, CO_256, epilogue=activation("swiglu", keep=True, result=CodesByExpert())),
        RaggedM(TensorScaled("e5m2"), CO_256_ROWS, epilogue=SWIGLU_BACKWARD),
        RaggedK(TensorScaled("e5m2"), CO_256_TALL, out="fp32", accumulate=True),
        RaggedK(COLUMNS, CO_256, beside=True),
        RaggedK(BlockScaledColumns("e5m2"), CO_256_TALL, out="fp32", accumulate=True),
        RaggedK(COLUMNS, CO_256, accumulate=True),
    )),
)  # fmt: skip

QUICK_ROWS = [
    Offsets("int64"), ZeroTail("bf16"), ColumnSums("bf16", "bf16"),
    Route("int64", "fp32", 128, False), Route("int32", "bf16", limits.MOST_EXPERTS, True),
    GatherRows("bf16", "fp32"), SumSlots("bf16", "fp32", 8, adds=True, rounds=True), SumSlots("fp16", "bf16", 4),
    RowDots("bf16", "fp32"), SlotValues("fp32"), SumOnFewSms("bf16", 8, adds=True), SumOnFewSms("bf16", 2),
    PushSums("bf16", counts=True), PushSums("bf16", counts=True, by_experts=True), PushSums("bf16", values="fp32"),
    Parts("fp32", (0, 1, 2)), SumParts("fp32", 1),
    Send("bf16", "int64"), Send("fp16", "int32", "bf16"), Send("bf16"), Send("bf16", "int64", scaled=True),
    Send("bf16", scaled=True), Pull("bf16"), Pull("fp16"), Push("bf16"), Push("fp16", "bf16"), Total("bf16"),
    Total("fp16", "fp16"), Signal(), Scatter(),
    Choose("topk_softmax", 128, False, None, False, False, 1, False, False, slots=8),
    Choose("sigmoid", 512, True, "fp32", True, True, 3, True, True),
    ChooseBackward("sigmoid", 512, True, (0, 0, 1, 2), of_rows=True, grads="lpz", sums=True),
    ChooseBackward("softmax", 256, True, (0, 0, 1, 2), of_rows=True, weight="fp32", rows=(1, 0, 0), slots=32),
    Activate("bf16", "swiglu", False, False, "fp32"), Activate("bf16", "squared_relu", False, False, "fp16"),
    ActivateBackward("bf16", "swiglu", True, True, None, False, False),
    ActivateBackward("fp16", "geglu_tanh", True, False, "bf16", True, True),
    QuantizeRows("bf16", "e4m3", False, True, True, True, True),
    QuantizeRows("fp16", "e5m2", True, True, True, True, True),
    QuantizeRows("bf16", "e4m3", True, True, False, True), QuantizeWeight("bf16", "e4m3", True, True, True),
    QuantizeFormat("bf16", True, False, False, mxfp8(), True, True),
    QuantizeFormat("bf16", True, False, False, fp8_row(), True, True),
    QuantizeFormat("bf16", True, False, False, fp8_tensor(), True, True, amax=True),
    QuantizeFormat("bf16", True, False, True, nvfp4(), True, True, stochastic=True),
    QuantizeFormat("bf16", False, False, False, nvfp4(across=16), True, True),
    Magnitudes("bf16", True, False, True, False, False, True, True),
    Dequantize("e4m3", "e8m0", 32, 1), Dequantize("e4m3", "fp32", 128, 1), DequantizeTransposed("e2m1", "e4m3", 16, 1),
    GatherCodes(), TransposeCodes(), TransposeRows(), UpdateAmaxHistory(),
    QuantizePacked("bf16", False, True, True), QuantizePacked("bf16", True, True, True, True),
    QuantizePackedWeight("bf16", True, True, True), QuantizePackedWeight("fp16", False, True, True),
    QuantizePackedFormat("bf16", True, False, True, nvfp4(), True, True, True, halves=True),
]  # fmt: skip
# each class that Blackwell has too
QUICK_ROWS += [
    replace(kernel, arch=arch)
    for kernel, arch in zip(
        (Offsets("int64"), Route("int64", "fp32", 128, True), GatherRows("bf16", "fp32"), SumSlots("bf16", None),
         Activate("bf16", "swiglu", False, False, "fp32"), QuantizePacked("bf16", True, True, True),
         QuantizePackedWeight("bf16", True, True, True),
         QuantizePackedFormat("bf16", True, True, True, nvfp4(), True, True, False, halves=False),
         Send("bf16", "int64"), Pull("bf16"), Push("bf16", "fp32"), Total("bf16", "fp32")),
        ("sm_100a", "sm_103a") * 6, strict=True,
    )
]  # fmt: skip
ROWS = list(dict.fromkeys((*QUICK_ROWS, *SHIPPED_ROWS)))
