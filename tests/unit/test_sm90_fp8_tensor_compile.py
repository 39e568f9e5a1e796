"""The products of FP8 codes with one scale per expert compile for sm_90a without a GPU, and spill no registers."""

import itertools

import pytest

pytest.importorskip("cutlass")

from test_sm90_compile import check_fp8_product, compile_and_disassemble, tool

from fusedmoe.kernels.build.shipped import shipped
from fusedmoe.kernels.rows.quantize.amax_history import IN_FLIGHT, WARPS, UpdateAmaxHistory
from fusedmoe.kernels.rows.quantize.transpose_rows import TransposeRows
from fusedmoe.kernels.sm90.epilogue.codes_by_expert import CodesByExpert
from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, activation, derivative
from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
from fusedmoe.kernels.sm90.gemm.tensor_scales import TensorScaled
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, CO_256, CO_256_ROWS, CO_256_TALL
from fusedmoe.kernels.sm90.tiles.config import BARRIER_BYTES, SMEM_BYTES

KINDS = ("swiglu", "geglu_tanh", "geglu_erf", "reglu", "squared_relu")
CODES = CodesByExpert()


def products():
    """All kernels that `choose` may pick, except for clamped kinds other than SwiGLU."""
    for dtype, config in itertools.product(("e4m3", "e5m2"), CANDIDATES["fp8_plain"]):
        yield RaggedM(TensorScaled(dtype), config, epilogue=PLAIN)
    for config, keep, codes in itertools.product(CANDIDATES["fp8_activation"], (True, False), (None, CODES)):
        for kind, clamped in (*((kind, False) for kind in KINDS), ("swiglu", True)):
            epilogue = activation(kind, clamped=clamped, keep=keep, result=codes)
            yield RaggedM(TensorScaled("e4m3"), config, epilogue=epilogue)
    yield RaggedM(TensorScaled("e4m3"), CO_256, epilogue=activation("swiglu", keep=True, result=CodesByExpert("e5m2")))
    for config, keep, scaled in itertools.product(CANDIDATES["fp8_derivative"], (True, False), (True, False)):
        for kind, shape in (*((kind, {}) for kind in KINDS), ("swiglu", {"clamped": True, "interleaved": True})):
            yield RaggedM(TensorScaled("e5m2"), config, epilogue=derivative(kind, keep=keep, row_scale=scaled, **shape))
    outputs = [{"out": out, "accumulate": adds} for out in ("bf16", "fp32") for adds in (False, True)]
    for dtype, config, output in itertools.product(("e4m3", "e5m2"), CANDIDATES["fp8_wgrad"], outputs):
        yield RaggedK(TensorScaled(dtype), config, **output)


KERNELS = list(products())
COVERING = [
    RaggedM(TensorScaled("e4m3"), CO_256, epilogue=PLAIN),
    RaggedM(TensorScaled("e4m3"), CO_256, epilogue=activation("swiglu", keep=True, result=CODES)),
    RaggedM(TensorScaled("e5m2"), CO_256_ROWS, epilogue=derivative("swiglu", keep=True, row_scale=True)),
    RaggedK(TensorScaled("e5m2"), CO_256),
    RaggedK(TensorScaled("e5m2"), CO_256_TALL, out="fp32", accumulate=True),
]
MOST_INSTRUCTIONS, OF_HEAVY = 6700, {"geglu_tanh": 7400, "geglu_erf": 8700}  # as of those with block scales


@pytest.mark.parametrize(
    "kernel",
    [*COVERING, *(pytest.param(k, marks=pytest.mark.slow) for k in KERNELS if k not in COVERING)],
    ids=lambda k: k.symbol,
)
def test_compiles_for_hopper(kernel):
    of_rows = isinstance(kernel, RaggedM)
    kind = kernel.epilogue.formula.kind if of_rows else ""
    report = check_fp8_product(kernel, OF_HEAVY.get(kind, MOST_INSTRUCTIONS))
    code = report.opcodes
    with_codes = of_rows and any(isinstance(output, CodesByExpert) for output in kernel.epilogue.outputs)
    blocks = kernel.config.blocks
    assert len(report.starting("REDG.E.MAX")) == (blocks if with_codes else 0)
    if not of_rows:
        assert len(report.starting("UTMALDG")) == 2, "codes alone"
        products = [i for i, opcode in enumerate(code) if opcode.startswith("QGMMA")]
        loop = code[products[0] : products[-1] + 150]
        values = kernel.config.tile_m * kernel.config.tile_n // (2 * 128)  # of a thread
        assert len([opcode for opcode in loop if opcode.startswith("FFMA")]) == values, "one per value"
        assert not [opcode for opcode in loop if opcode.startswith("FMUL")]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.symbol)
def test_fits_an_sm_with_a_deep_enough_ring(kernel):
    assert kernel.smem_bytes + BARRIER_BYTES <= SMEM_BYTES
    derived = isinstance(kernel, RaggedM) and kernel.epilogue.formula.derivative
    assert kernel.stages >= (3 if derived else 4)


def test_symbols_tell_the_kernels_apart():
    assert len({kernel.symbol for kernel in KERNELS}) == len({*KERNELS}) == len(KERNELS)


def test_every_candidate_is_shipped():
    """Those of the recipe fp8_tensor, whose gradients are in E5M2."""
    wanted = {RaggedM(TensorScaled(dtype), config, epilogue=PLAIN) for dtype in ("e4m3", "e5m2") for config in PLAINS}
    for config, keep, codes in itertools.product(CANDIDATES["fp8_activation"], (True, False), (None, CODES)):
        wanted.add(RaggedM(TensorScaled("e4m3"), config, epilogue=activation("swiglu", keep=keep, result=codes)))
    for config, keep, scaled in itertools.product(CANDIDATES["fp8_derivative"], (True, False), (True, False)):
        wanted.add(RaggedM(TensorScaled("e5m2"), config, epilogue=derivative("swiglu", keep=keep, row_scale=scaled)))
    outputs = ({}, {"accumulate": True}, {"out": "fp32", "accumulate": True})
    for config, output in itertools.product(CANDIDATES["fp8_wgrad"], outputs):
        wanted.add(RaggedK(TensorScaled("e5m2"), config, **output))
    assert len(wanted) == 4 + 4 + 8 + 9
    assert {*wanted, TransposeRows(), UpdateAmaxHistory()} <= {*shipped("sm_90a")}


PLAINS = CANDIDATES["fp8_plain"]


def test_codes_are_transposed_in_registers():
    code = compile_and_disassemble(TransposeRows(), tool("nvdisasm"), tool("cuobjdump")).opcodes
    assert len([opcode for opcode in code if opcode.startswith("PRMT")]) >= 32
    assert len([opcode for opcode in code if opcode.startswith("STG.E.128")]) == 4
    assert not [opcode for opcode in code if opcode.startswith(("STL", "LDL"))]


def test_a_history_is_read_in_chunks():
    """All loads of a chunk come before its stores; the registers allow a CTA of 1024 threads."""
    report = compile_and_disassemble(UpdateAmaxHistory(), tool("nvdisasm"), tool("cuobjdump"))
    assert not report.starting(("STL", "LDL"))
    assert report.registers <= 65536 // (WARPS * 32)
    moved = [opcode[:3] for opcode in report.starting(("LDG", "STG"))]
    first = moved.index("STG")
    assert moved[:first].count("LDG") >= IN_FLIGHT
    assert moved[first:].count("STG") == IN_FLIGHT + 5, "the newest step, the reference, two factors and the scale"
