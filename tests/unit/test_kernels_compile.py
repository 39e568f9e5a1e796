"""Every kernel compiles without a GPU: its code works on tensor cores, does not spill, and moves wide vectors."""

import re
from dataclasses import replace
from itertools import product

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")

from cutlass import Int32
from kit import kernels
from kit.compiled import compiled
from kit.kept import contents
from kit.kernels import BF16, BLOCKS, COLUMNS
from kit.machine_code import early_addresses, unsafe_releases

from fusedmoe.kernels.build.compiler import SYMBOL
from fusedmoe.kernels.build.sources import sources_of
from fusedmoe.kernels.exchange import copies, scatter, send, total
from fusedmoe.kernels.exchange.pull import Pull
from fusedmoe.kernels.exchange.push import Push
from fusedmoe.kernels.exchange.push_sums import PushSums
from fusedmoe.kernels.exchange.scatter import Scatter
from fusedmoe.kernels.exchange.send import Send
from fusedmoe.kernels.exchange.signal import Signal
from fusedmoe.kernels.exchange.total import Total
from fusedmoe.kernels.rows.activation.kernel import VECTORS, Activate, ActivateBackward
from fusedmoe.kernels.rows.move import parts, slots, sum_on_few_sms
from fusedmoe.kernels.rows.move.offsets import IN_FLIGHT, ColumnSums
from fusedmoe.kernels.rows.move.parts import SumParts
from fusedmoe.kernels.rows.move.route import Route
from fusedmoe.kernels.rows.move.slots import GatherRows, RowDots, SumSlots
from fusedmoe.kernels.rows.move.sum_on_few_sms import SumOnFewSms
from fusedmoe.kernels.rows.quantize import amax_history, gather_codes
from fusedmoe.kernels.rows.quantize.amax_history import UpdateAmaxHistory
from fusedmoe.kernels.rows.quantize.blocks import CTAS_PER_SM, STRIP, THREADS, VECTOR, QuantizeRows, QuantizeWeight
from fusedmoe.kernels.rows.quantize.dequantize import Dequantize, DequantizeTransposed
from fusedmoe.kernels.rows.quantize.formats import Magnitudes, QuantizeFormat
from fusedmoe.kernels.rows.quantize.gather_codes import GatherCodes
from fusedmoe.kernels.rows.quantize.transpose_codes import TransposeCodes
from fusedmoe.kernels.rows.quantize.transpose_rows import TransposeRows
from fusedmoe.kernels.rows.router.choose import Choose
from fusedmoe.kernels.rows.router.gradient import ChooseBackward
from fusedmoe.kernels.sm90.epilogue.codes_by_expert import CodesByExpert
from fusedmoe.kernels.sm90.epilogue.derivative_codes import DerivativeCodes, derivative_codes
from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, Backward, Epilogue, activation
from fusedmoe.kernels.sm90.epilogue.quantized import RowCodes
from fusedmoe.kernels.sm90.gemm import scaled, scheduler
from fusedmoe.kernels.sm90.gemm.block_scales import BlockScaledRows
from fusedmoe.kernels.sm90.gemm.block_scales_k import BlockScaledColumns
from fusedmoe.kernels.sm90.gemm.common import MATH_WARPGROUPS
from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
from fusedmoe.kernels.sm90.gemm.scheduler import RING_STAGES, SLOT
from fusedmoe.kernels.sm90.gemm.tensor_scales import TensorScaled
from fusedmoe.kernels.sm90.tiles.choice import (
    CANDIDATES,
    CO_128,
    CO_256,
    CO_256_ROWS,
    CO_256_TALL,
    PP_128,
    PP_192,
    ROW_VALUES,
    WGRADS,
)  # fmt: skip
from fusedmoe.kernels.sm90.tiles.config import BARRIER_BYTES, SMEM_BYTES, TileConfig
from fusedmoe.kernels.sm100 import quantize as packed
from fusedmoe.kernels.sm100.quantize import QuantizePacked, QuantizePackedWeight
from fusedmoe.kernels.sm100.quantize_nvfp4 import QuantizePackedFormat
from fusedmoe.numerics.formats import nvfp4

SPILLS = "STL|LDL"
WIDE, NARROW = r"LDG\b.*\.128", r"LDG\b(?!.*\.128)"
NARROW_STORES = r"STG\b(?!.*\.128)"


def quick_first(all_kernels, quick):
    """The cases of a test: those that are not quick are slow."""
    others = [kernel for kernel in all_kernels if kernel not in quick]
    return [*quick, *(pytest.param(kernel, marks=pytest.mark.slow) for kernel in others)]


# ---- products

REGISTERS = 65536 // (MATH_WARPGROUPS * 128 + 128) // 8 * 8  # of a thread of three warpgroups
# Spills, stores and loads, each once per tile: registers of the epilogue or of the warp that schedules tiles, none of a
# main loop's. The tile without them, 128x128, takes an eighth to a fifth longer.
MOST_SPILLS = {
    "bf16_bn_dswiglu_scale_keep": 24,
    "bf16_bn_dreglu_keep": 4,
    "bf16_bn_dreglu_scale_keep": 10,
    "bf16_bn_dsquared_relu_scale_keep": 10,
    "fp16_bn_dswiglu_keep": 4,
    # With a fourth warpgroup, which copies gathered rows, a thread of a math warpgroup has 8 registers less.
    "gather_bf16_bn_dswiglu_scale_keep": 42,
    "gather_ranges_bf16_bn_dswiglu_scale_keep": 49,
}
MOST_SPILLS = {f"sm90_ragged_m_{name}_128x192pp_c21": most for name, most in MOST_SPILLS.items()}
GATHER_SPILLS = 24
ROW_SPILLS = {"sm90_choose_sigmoid_256_renormalized_corrected_grouped_slots8": 6}  # three words, stored and loaded
MOST_INSTRUCTIONS = 8600  # from where on a derivative is slower than with smaller tiles, see choice.py
GATHER_INSTRUCTIONS = 500  # of warps beside the epilogue's, half of them paths for diverged lanes, which never run
# The derivative of 256 x 128 elements is unrolled: twice as long as that of 128 x 128.
MOST_OF_CODES, OF_HEAVY, OF_WGRAD = 6700, {"geglu_tanh": 7400, "geglu_erf": 8700}, 2300


def ring_of_tiles(kernel):
    """The offsets in shared memory of the tiles, which threads write, and of their barriers (`Gemm.shared_memory`)."""
    barriers = 16 * kernel.stages
    reads = barriers + 16 * RING_STAGES
    drawing = reads + 16 * MATH_WARPGROUPS * max(kernel.load_stages, 1)
    tiles = drawing + 16 + 16  # after two barriers and a word
    return range(tiles, tiles + 4 * SLOT * RING_STAGES), range(barriers, reads)


@pytest.mark.parametrize("symbol", quick_first(kernels.PRODUCTS, kernels.QUICK_PRODUCTS))
def test_products(symbol):
    kernel = kernels.PRODUCTS[symbol]
    (launch,) = compiled(kernel).values()
    assert launch.registers <= REGISTERS
    assert not unsafe_releases(launch.code, ring_of_tiles(kernel))
    assert not early_addresses(launch.code)
    counted = isinstance(kernel, RaggedM) and kernel.signals  # a tile before another one, and the last
    if isinstance(kernel, RaggedM) and kernel.ranges:
        assert len(launch.matching("ATOMG")) == 1  # draws of tiles
    assert len(launch.matching(r"REDG\.E\.ADD\.S32\.STRONG\.GPU")) == 2 * counted
    assert len(launch.matching("PREEXIT")) == counted  # lets the kernel begin that waits for tiles
    waits = [i for i, opcode in enumerate(launch.opcodes) if opcode == "ACQBULK"]  # for the launch before
    assert len(waits) == (0 if counted else 2 if "_ranges_" in symbol else symbol.endswith("_beside"))
    if len(waits) == 2:  # one before any access to memory
        assert waits[0] < next(i for i, opcode in enumerate(launch.opcodes) if re.match("U?LDG|UTMA|ATOM|STG", opcode))
    (check_codes if kernel.operands.scaled else check_bf16)(kernel, launch)


def check_bf16(kernel, launch):
    gathers = "gather" in kernel.symbol
    assert launch.matching("UTMALDG")
    products = [i for i, opcode in enumerate(launch.opcodes) if opcode.startswith("HGMMA")]
    # the main loop has two waits, cooperative tiles have one more; ptxas adds many if it serializes the products
    assert len(launch.matching("WARPGROUP.DEPBAR")) <= 3
    spills = [i for i, opcode in enumerate(launch.opcodes) if re.match(SPILLS, opcode)]
    of_others = GATHER_SPILLS if kernel.threads > 3 * 128 and kernel.config == PP_192 else 0
    assert len(spills) <= MOST_SPILLS.get(kernel.symbol, of_others)
    assert not [i for i in spills if products[0] < i < products[-1]]
    assert launch.stack_bytes <= 8 * len(spills)
    assert len(launch.opcodes) <= MOST_INSTRUCTIONS + GATHER_INSTRUCTIONS * gathers


def check_codes(kernel, launch):
    """Products of FP8 codes: in flight together, with their promotion in two instructions per value."""
    code, config = launch.opcodes, kernel.config
    assert not launch.stack_bytes
    assert not launch.matching(f"{SPILLS}|HGMMA")
    waves = config.tile_m * config.tile_n // (2 * 64 * 128)  # of a warpgroup, for each stage
    assert waves
    assert launch.matching("QGMMA") == [f"QGMMA.64x128x32.F32.{kernel.operands.dtype.upper()}.E4M3"] * (4 * waves)
    assert len(launch.matching("WARPGROUP.DEPBAR")) == 2 * waves  # ptxas adds more if it serializes the products
    if isinstance(kernel, RaggedM):
        assert len(code) <= OF_HEAVY.get(kernel.epilogue.formula.kind, MOST_OF_CODES)
        check_results_in_codes(kernel, launch)
        return
    assert len(code) <= OF_WGRAD
    assert len(launch.matching("UTMALDG")) == (2 if kernel.operands in map(TensorScaled, ("e4m3", "e5m2")) else 4)
    products = [i for i, opcode in enumerate(code) if opcode.startswith("QGMMA")]
    values = 64 * waves  # of a thread
    if isinstance(kernel.operands, TensorScaled):
        loop = code[products[0] : products[-1] + 150]
        assert (count(loop, "FFMA"), count(loop, "FMUL")) == (values, 0)
        return
    loop = code[products[0] - 70 : products[-1] + 250]  # and the instructions around it
    assert (count(loop, "FFMA"), count(loop, "FMUL")) == (values, values)
    assert loop.count("LDS.64") == 64 // 4 * (config.tile_n // 128)  # a pair of columns, for all rows of a thread
    assert not count(code[products[-1] : products[-1] + 2 * 64], "LDS")
    vectors = values * (4 if kernel.out == "fp32" else 2) // 16
    add = "REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU" if kernel.out == "fp32" else "REDG.E.ADD.BF16x8.RN.STRONG.GPU"
    assert launch.matching("REDG") == [add] * vectors * kernel.accumulate
    assert code.count("STG.E.128") == vectors * (not kernel.accumulate)


def count(opcodes, name):
    return [opcode.split(".")[0] for opcode in opcodes].count(name)


def check_results_in_codes(kernel, launch):
    config, formula = kernel.config, kernel.epilogue.formula
    kinds = [type(output) for output in kernel.epilogue.outputs]
    maxima = launch.matching("REDG.E.MAX")
    assert len(maxima) == (config.blocks if CodesByExpert in kinds else 0)
    if isinstance(kernel.operands, TensorScaled):
        return
    assert not launch.matching(r"F2F\.")  # conversions of single values are slow
    rounded = [opcode for opcode in launch.opcodes if ".SATFINITE.E" in opcode]  # two values to codes at once
    if kernel.blocks is not None:
        # 128 x 128 values of a warpgroup: by columns in a loop of four steps, by rows after it
        wanted = 64 * (kernel.blocks.forms(formula) / 4 + kernel.blocks.rows * formula.halves)
    else:
        blocks = config.tile_m * config.tile_n // (2 * formula.accumulators * 64 * 128)
        wanted = blocks * 64 // 2 if RowCodes in kinds else 0
    assert len(rounded) == wanted


def test_arrivals_that_do_not_wait_for_loads_are_found(monkeypatch):
    """Without `one_after`, both overtook loads on GPUs: kernels hung, or multiplied another tile's operand."""
    kernel = RaggedK(COLUMNS, CO_256)
    for module in (scheduler, scaled):
        monkeypatch.setattr(module, "one_after", lambda *values: Int32(1))
    (launch,) = compiled(kernel, "one_after", *contents(__file__)).values()
    drawn, stage = unsafe_releases(launch.code, ring_of_tiles(kernel))
    for found in (drawn, stage):
        assert re.match(r"\w+ SYNCS\.ARRIVE\.TRANS64\.RED\.ART0 .* during \w+ LDS", found)


def test_products_fit_an_sm_with_a_deep_enough_ring():
    """Loads run ahead of the products by less than a product in flight and one being read."""
    for symbol, kernel in kernels.PRODUCTS.items():
        assert kernel.smem_bytes + BARRIER_BYTES <= SMEM_BYTES, symbol
        if isinstance(kernel, RaggedK):
            least = 4 if kernel.operands.scaled else 3
        else:
            least = 4 if kernel.operands.scaled and not kernel.epilogue.formula.derivative else 3
        assert kernel.stages >= least, symbol
        if not kernel.operands.scaled:
            assert kernel.boxes_per_block % kernel.store_stages == 0, symbol
        if getattr(kernel, "late", False):  # halves of a result are stored one after the other
            assert kernel.config.blocks * kernel.boxes_per_block // 2 % kernel.store_stages == 0, symbol


TURNS = Epilogue(Backward("swiglu", False, True), (DerivativeCodes(),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RaggedM(BF16, CO_256_TALL), "two row tiles"),
        (lambda: RaggedM(BF16, PP_192, b_major="n", epilogue=activation("swiglu")), "64 columns at a time"),
        (lambda: RaggedK(BF16, PP_192, gathered="b"), "share b, which is gathered"),
        (lambda: RaggedM(BF16, TileConfig(64, 192, 2, 1, pingpong=False), gather=True), "4 warps gather .* 32 rows or"),
        (lambda: RaggedM(BLOCKS, PP_128, epilogue=PLAIN), "a multiple of 128 columns"),
        (lambda: RaggedM(BLOCKS, CO_128, epilogue=activation("swiglu")), "a multiple of 256 columns"),
        (lambda: RaggedM(BLOCKS, CO_256, b_major="n", epilogue=PLAIN), "expected a K-major weight"),
        (lambda: RaggedM(BLOCKS, CO_256_ROWS, epilogue=TURNS), r"expected \[gate \| up\] and tiles of 256 x 128"),
        (lambda: RaggedK(COLUMNS, PP_128), "a multiple of 128 columns"),
        (lambda: RaggedK(COLUMNS, CO_128, gathered="a"), "no gathered operand"),
        (lambda: RaggedM(BF16, PP_192, signals=True), "expected ranges, .* got ranges=False, 'plain'$"),
        (
            lambda: RaggedM(BF16, PP_192, epilogue=activation("swiglu"), ranges=True, signals=True),
            "without an activation, .* 'swiglu'$",
        ),
    ],
)
def test_tiles_that_a_product_cannot_have(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- kernels of rows: how many instructions begin with each pattern


def of_packed(kernel):
    forms = kernel.rows + kernel.columns
    return {r"LDG\S*\.NA\.128": STRIP, "STG.E.64": forms * STRIP, "STG.E.128": forms, "STG": forms * (STRIP + 1),
            "F2FP.SATFINITE": forms * STRIP * VECTOR // 2}  # fmt: skip


def of_packed_weight(kernel):
    by_columns = STRIP * VECTOR // 16 * kernel.columns
    return {"LDG": STRIP, "LDG.E.NA.128": STRIP, "STG.E.64": STRIP * kernel.rows,
            "STG.E.128": by_columns + kernel.rows + kernel.columns,
            "F2FP.SATFINITE": (kernel.rows + kernel.columns) * STRIP * VECTOR // 2}  # fmt: skip


def of_blocks(kernel):
    return {r"LDG\S*\.NA": STRIP, "LDG.E.NA.128": STRIP,
            "STG.E.64": STRIP * kernel.rows, "STG.E.128": 4 * kernel.columns,
            "F2FP.SATFINITE": (kernel.rows + kernel.columns) * STRIP * VECTOR // 2}  # fmt: skip


def of_format(kernel):
    stores, vectors = (r"STG\.E$", 2) if kernel.bits == 4 else ("STG.E.64", 4)
    return {r"LDG\S*\.NA": STRIP, "LDG.E.NA.128": STRIP, stores: STRIP * kernel.rows,
            "STG.E.128": vectors * kernel.columns, r"RED.*\.MAX": kernel.amax, "RED": kernel.amax}  # fmt: skip


def of_copies(kernel):
    words = isinstance(kernel, Pull)  # of the rows that have arrived
    return {"LDGSTS": copies.VECTORS, r"LDGSTS\S*\.128": copies.VECTORS, "STG.E.128": copies.VECTORS,
            "PREEXIT": 1, "ATOMG": 1, "REDG": words}  # fmt: skip


COUNTS = {
    ColumnSums: lambda k: {r"LDG\S*\.NA": 2 * IN_FLIGHT - 1, r"LDG\S*\.NA\.128": 2 * IN_FLIGHT - 1, "STG": 2,
                           "STG.E.128": 2},
    # a lane's row and its scale: one load each, none between those of two rows
    SumSlots: lambda k: {WIDE: (k.slots + k.adds) * k.vectors, NARROW: 1 + bool(k.scale), NARROW_STORES: 0},
    GatherRows: lambda k: {WIDE: slots.VECTORS, NARROW_STORES: 0},
    RowDots: lambda k: {WIDE: 2 * slots.VECTORS},
    SumOnFewSms: lambda k: {"LDGSTS": k.copies, r"LDGSTS\S*\.128": k.copies, "PREEXIT": 1},
    SumParts: lambda k: {WIDE: parts.IN_FLIGHT // k.parts * k.parts},
    # vectors of several rows, or those of one
    Activate: lambda k: {WIDE: (1 + k.gated) * VECTORS, NARROW: VECTORS * bool(k.scale), NARROW_STORES: 0},
    ActivateBackward: lambda k: {WIDE: (2 + k.gated) * VECTORS, NARROW: bool(k.scale), NARROW_STORES: k.sums},
    QuantizeRows: of_blocks, QuantizeWeight: of_blocks, QuantizeFormat: of_format,
    Magnitudes: lambda k: {"LDG.E.NA.128": STRIP},
    Dequantize: lambda k: {NARROW_STORES: 0}, DequantizeTransposed: lambda k: {NARROW_STORES: 0},
    GatherCodes: lambda k: {"LDG.E.NA.128": gather_codes.ROWS, "STG.E.128": gather_codes.ROWS},
    TransposeCodes: lambda k: {"LDG.E.NA.64": STRIP, "STG.E.128": 4, "PRMT": STRIP * VECTOR // 2},
    TransposeRows: lambda k: {"STG.E.128": 4, "PRMT": 32},
    QuantizePacked: of_packed, QuantizePackedWeight: of_packed_weight,
    QuantizePackedFormat: lambda k: {r"LDG\S*\.NA\.128": STRIP},
    # an exchange counts the CTAs that have ended
    Send: lambda k: {WIDE: send.LOADS, "STG.E.128": 2 * send.LOADS, "ATOMG": 1, "REDG": 0},
    Scatter: lambda k: {WIDE: scatter.TOKENS, "STG.E.128": scatter.TOKENS, "PREEXIT": 1, "ACQBULK": 2, "REDG": 1},
    Pull: of_copies, Push: of_copies,
    Total: lambda k: {WIDE: 2 * total.AT_ONCE, "STG.E.128": 1, "ATOMG": 1, "REDG": 0},
    Signal: lambda k: {"ATOMG": 0, "REDG": 0},
}  # fmt: skip
COUNTS[PushSums] = lambda k: {
    "LDGSTS": 2 * copies.VECTORS, "PREEXIT": not k.counts, "ACQBULK": k.counts,
    "STG.E.128": (1 + k.by_experts) * copies.VECTORS,  # sums and zeros
}  # fmt: skip
AT_LEAST = (GatherRows, RowDots, SumOnFewSms, PushSums, Total, TransposeCodes, TransposeRows)
MAXIMA = (Magnitudes, QuantizeFormat)  # the kernels that raise the largest magnitudes of experts, by atomics
EXCHANGES = (Send, Scatter, Pull, Push, PushSums, Total, Signal)
DIVIDES = (Choose, ChooseBackward, QuantizeFormat, UpdateAmaxHistory)  # whose slow path is a call
# the loads, what first uses one of them, and how many are on their way before
LOADS_AHEAD = {
    ColumnSums: (r"LDG\S*\.NA", "FADD", IN_FLIGHT), Send: (WIDE, "STG.E.128", send.LOADS),
    Total: (WIDE, "FADD", 2 * total.AT_ONCE),
    GatherCodes: ("LDG.E.NA.128", "STG.E.128", gather_codes.ROWS), Scatter: (WIDE, "STG.E.128", scatter.TOKENS),
    **dict.fromkeys((QuantizeRows, QuantizeWeight, QuantizePacked), (r"LDG\S*\.NA", r"VIMNMX\.S16x2", STRIP)),
}  # fmt: skip


@pytest.mark.parametrize("kernel", quick_first(kernels.ROWS, kernels.QUICK_ROWS), ids=lambda k: k.symbol)
def test_kernels_of_rows(kernel):
    launches, kind = compiled(kernel), type(kernel)
    divides = isinstance(kernel, DIVIDES) or not getattr(kernel, "power_of_two", True)
    for launch in launches.values():
        assert launch.matching("EXIT")
        assert len(launch.matching(SPILLS)) <= ROW_SPILLS.get(kernel.symbol, 0)
        assert divides or not launch.matching("CALL")
        atomics = isinstance(kernel, (*MAXIMA, *EXCHANGES))
        assert atomics or not launch.matching(r"ATOMG|RED[G.]"), "counts in shared memory are atomic"
        assert not early_addresses(launch.code)
    if isinstance(kernel, (QuantizeRows, QuantizeWeight)):
        assert any(launch.matching("CALL") for launch in launches.values()) is not kernel.power_of_two
    if isinstance(kernel, Route):
        assert set(launches) == ({"count", "place"} if kernel.chunked and not kernel.counted else {"place"})
        return
    main = launches["add_slices" if kind is ColumnSums else "kernel"]
    wanted = COUNTS[kind](kernel) if kind in COUNTS else {}
    found = {pattern: len(main.matching(pattern)) for pattern in wanted}
    if kind in AT_LEAST:
        found = {pattern: min(number, wanted[pattern]) for pattern, number in found.items()}
    assert found == wanted
    if kind in LOADS_AHEAD:
        loads, use, number = LOADS_AHEAD[kind]
        order = [bool(re.match(loads, opcode)) for opcode in main.matching(f"{loads}|{use}")]
        assert order[: number + 1] == [True] * number + [False]


def test_a_chosen_expert_is_found_by_one_reduction_and_one_load():
    """Of two tokens: the largest key, and the logits; a ballot finds the lowest lane that has the key."""
    kernel = Choose("topk_softmax", 128, False, None, False, False, 1, False, False, slots=8)
    (launch,) = compiled(kernel).values()
    assert len(launch.matching("REDUX")) == len(launch.matching(WIDE)) == 2


def test_several_loads_of_a_sum_are_in_flight():
    assert all(SumSlots("bf16", "fp32", n).vectors * n >= slots.LOADS for n in slots.SLOTS)
    assert len(compiled(ColumnSums("bf16", "bf16"))["add_partials"].matching(WIDE)) > 1


@pytest.mark.parametrize(("chosen", "adds"), [(2, False), (8, True)])
def test_a_sum_on_few_sms_copies_most_of_an_sms_shared_memory_at_once(chosen, adds):
    kernel = SumOnFewSms("bf16", chosen, adds)
    stage = sum_on_few_sms.WARPS * 32 * 16 * kernel.copies
    assert sum_on_few_sms.SHARED_BYTES >= kernel.stages * stage > sum_on_few_sms.SHARED_BYTES - stage
    assert (kernel.stages - 1) * stage > 128 << 10


def test_a_history_is_read_in_chunks():
    """All loads of a chunk come before its stores; the registers allow a CTA of 1024 threads."""
    (launch,) = compiled(UpdateAmaxHistory()).values()
    assert launch.registers <= 65536 // (amax_history.WARPS * 32)
    moved = [opcode[:3] for opcode in launch.matching("LDG|STG")]
    first = moved.index("STG")
    assert moved[:first].count("LDG") >= amax_history.IN_FLIGHT
    newest = 5  # the newest step, the reference, two factors and the scale
    assert moved[first:].count("STG") == amax_history.IN_FLIGHT + newest


def test_three_ctas_that_quantize_fit_an_sm():
    """By registers, or the loads in flight would be a third less; and by shared memory, most of which is L1 cache."""
    (launch,) = compiled(kernels.QuantizeRows("bf16", "e4m3", True, True, True, True, True)).values()
    assert launch.registers <= 65536 // (CTAS_PER_SM * THREADS)
    assert CTAS_PER_SM * 4 <= 228 * packed.SHARED_PERCENT // 100  # KiB, with that of the system
    assert CTAS_PER_SM * 20 <= 228 * packed.SHARED_PERCENT_OF_WEIGHTS // 100


# ---- names, and the list of those that are built ahead of time


def test_symbols_tell_the_kernels_apart():
    backward = [k for k in kernels.ROWS if isinstance(k, ActivateBackward)]
    packed_rows = [
        made
        for dtype, *how in product(("bf16", "fp16"), *[(False, True)] * 6)
        if any(how[1:3])
        for made in (
            QuantizePacked(dtype, *how[:4]), QuantizePackedWeight(dtype, *how[:3]),
            QuantizePackedFormat(dtype, True, how[0], how[3], nvfp4(), how[1], how[2], how[4], halves=how[5]),
        )
    ]  # fmt: skip
    others = [replace(k, **{name: not getattr(k, name)}) for k in backward for name in ("again", "sums")]
    every = {*kernels.PRODUCTS.values(), *kernels.SHIPPED, *kernels.ROWS, *packed_rows, *others}
    symbols = {kernel.symbol for kernel in every}
    assert len(symbols) == len(every)
    assert all(SYMBOL.fullmatch(symbol) for symbol in symbols)


def test_every_candidate_is_shipped():
    """With the settings of the recipes: gradients of fp8_tensor are in E5M2."""
    gathered = [
        RaggedM(BF16, config, b_major="n" if name == "derivative" else "k", epilogue=epilogue, gather=True)
        for name, epilogues in (
            ("activation", [activation("swiglu", keep=keep) for keep in (True, False)]),
            ("derivative", [kernels.SWIGLU_BACKWARD]),
        )
        for config, epilogue in product(CANDIDATES[name], epilogues)
    ]
    wgrads = [*kernels.wgrads_of_codes(BlockScaledColumns, ("e4m3",)), *kernels.wgrads_beside(),
              *kernels.wgrads_of_codes(TensorScaled, ("e5m2",))]  # fmt: skip
    wanted = {
        *gathered, TransposeRows(), UpdateAmaxHistory(), *kernels.derivatives_in_codes(("swiglu",)),
        *kernels.products_of_ranges(),
        *kernels.products_of_codes(BlockScaledRows, RowCodes(), "e4m3", ("swiglu",), ("e4m3",)),
        *kernels.products_of_codes(TensorScaled, CodesByExpert(), "e5m2", ("swiglu",)),
        *wgrads,
    }  # fmt: skip
    shipped = {*kernels.SHIPPED}
    assert len(wanted) >= 8 + 2 + 2 + 14 + 16 + 20
    assert wanted <= shipped
    families = [name for name in CANDIDATES if not name.startswith("fp8")]
    assert {k.config for k in kernels.SHIPPED_BF16} >= {config for name in families for config in CANDIDATES[name]}
    for name in families:
        assert {k.config for k in kernels.PRODUCTS_BF16 if family_of(k) == name} >= {*CANDIDATES[name]}
    assert len(shipped) == len(kernels.SHIPPED) <= 320, "few enough to build ahead of time"


def family_of(kernel):
    if isinstance(kernel, RaggedK):
        return WGRADS[kernel.gathered]
    formula = kernel.epilogue.formula
    if not formula.kind:
        return "plain"
    if not isinstance(formula, Backward):
        return "transposed_activation" if kernel.paired and kernel.b_major == "n" else "activation"
    return "heavy_derivative" if formula.kind.startswith("geglu") else "derivative"


def test_the_choice_knows_the_bytes_of_the_outputs():
    """Those of derivatives of FP8 operands are fitted: half as many as the outputs have."""
    swiglu, backward = activation("swiglu", keep=True), kernels.GEGLU_BACKWARD
    in_bf16 = {"plain": PLAIN, "activation": swiglu, "transposed_activation": swiglu,
               "derivative": backward, "heavy_derivative": backward}  # fmt: skip
    in_fp8 = {"fp8_plain": PLAIN, "fp8_activation": activation("swiglu", keep=True, result=RowCodes())}
    for epilogues, element_bytes in ((in_bf16, 2), (in_fp8, 1)):
        for family, epilogue in epilogues.items():
            assert epilogue.column_bytes == element_bytes * ROW_VALUES[family], family
    assert derivative_codes("swiglu", DerivativeCodes()).column_bytes == 2 * 2 + 2 + 2 + 1


# ---- sources: every module whose text the machine code depends on, and no others


def test_sources_of_a_kernel():
    """With the parts in its fields, which its own module does not import, and the imports of imports."""
    codes = RaggedM(BLOCKS, CO_256, epilogue=activation("swiglu", keep=True, result=RowCodes()))
    plain = {name.removeprefix("fusedmoe.kernels.") for name in RaggedM(BF16, PP_192).sources}
    assert "fusedmoe.kernels.sm90.epilogue.quantized" in codes.sources
    assert "fusedmoe.kernels.rows.quantize.formats" in TransposeRows().sources
    assert plain == {
        "device.codes", "device.formulas", "device.gather", "device.warps", "sm90.epilogue.outputs",
        "sm90.gemm.arguments", "sm90.gemm.common", "sm90.gemm.operands", "sm90.gemm.ragged_m", "sm90.gemm.scheduler",
        "sm90.tiles.config", "sm90.tiles.legal", "fusedmoe.numerics.activations",
    }  # fmt: skip


def test_host_code_is_no_source():
    for kernel in (*kernels.SHIPPED, *kernels.SHIPPED_ROWS):
        folders = {name.split(".")[2] for name in sources_of(kernel)}
        assert type(kernel).__module__ in kernel.sources
        assert not folders & {"build", "torch", "options"}
        assert not any(name.endswith(("functions", "products", ".shipped")) for name in kernel.sources)
