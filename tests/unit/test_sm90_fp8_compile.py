"""The ragged M products of FP8 codes compile for sm_90a without a GPU: tensor cores at work, no spills."""

import itertools

import pytest

pytest.importorskip("cutlass")

from test_sm90_compile import check_fp8_product

from fusedmoe.kernels.build.shipped import shipped
from fusedmoe.kernels.sm90.epilogue.derivative_codes import DerivativeCodes, derivative_codes
from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, Backward, Epilogue, activation, derivative
from fusedmoe.kernels.sm90.epilogue.quantized import RowCodes
from fusedmoe.kernels.sm90.gemm.block_scales import BlockScaledRows
from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, CO_128, CO_256, CO_256_ROWS, PP_128
from fusedmoe.kernels.sm90.tiles.config import BARRIER_BYTES, SMEM_BYTES, TileConfig

CODES = RowCodes()
KINDS = ("swiglu", "geglu_tanh", "geglu_erf", "reglu", "squared_relu")


def products():
    """All kernels that `choose` may pick, except for formats of results and clamped kinds other than SwiGLU."""
    for dtype, config in itertools.product(("e4m3", "e5m2"), CANDIDATES["fp8_plain"]):
        yield RaggedM(BlockScaledRows(dtype), config, epilogue=PLAIN)
    for config, keep, codes in itertools.product(CANDIDATES["fp8_activation"], (True, False), (None, CODES)):
        for kind, clamped in (*((kind, False) for kind in KINDS), ("swiglu", True)):
            epilogue = activation(kind, clamped=clamped, keep=keep, result=codes)
            yield RaggedM(BlockScaledRows("e4m3"), config, epilogue=epilogue)
    for codes in (RowCodes("e5m2"), RowCodes(power_of_two=False)):
        yield RaggedM(BlockScaledRows("e4m3"), CO_256, epilogue=activation("swiglu", keep=True, result=codes))
    for config, keep, scaled in itertools.product(CANDIDATES["fp8_derivative"], (True, False), (True, False)):
        for kind, shape in (*((kind, {}) for kind in KINDS), ("swiglu", {"clamped": True, "interleaved": True})):
            epilogue = derivative(kind, keep=keep, row_scale=scaled, **shape)
            yield RaggedM(BlockScaledRows("e4m3"), config, epilogue=epilogue)
    yield RaggedM(BlockScaledRows("e5m2"), CO_256_ROWS, epilogue=derivative("swiglu", keep=True, row_scale=True))

    for config, kind, row_scale in itertools.product(CANDIDATES["fp8_derivative_codes"], KINDS, (True, False)):
        yield with_codes(config, kind, DerivativeCodes(), row_scale=row_scale)
    for forms in itertools.product((True, False), repeat=3):
        if any(forms) and not all(forms):
            yield with_codes(CO_256_ROWS, "swiglu", DerivativeCodes(*forms), row_scale=True)
    yield with_codes(CO_256_ROWS, "swiglu", DerivativeCodes(), clamped=True, row_scale=True)
    yield with_codes(CO_256_ROWS, "swiglu", DerivativeCodes(element="e5m2"), row_scale=True, dtype="e5m2")


def with_codes(config, kind, codes, *, dtype="e4m3", **shape):
    return RaggedM(BlockScaledRows(dtype), config, epilogue=derivative_codes(kind, codes, **shape))


KERNELS = list(products())
COVERING = [
    RaggedM(BlockScaledRows("e5m2"), CO_256, epilogue=PLAIN),
    RaggedM(BlockScaledRows("e4m3"), CO_256, epilogue=activation("swiglu", keep=True, result=CODES)),
    RaggedM(BlockScaledRows("e4m3"), CO_256_ROWS, epilogue=derivative("swiglu", keep=True, row_scale=True)),
    with_codes(CO_256_ROWS, "geglu_erf", DerivativeCodes(), row_scale=True),
]
# The derivative of 256 x 128 elements is unrolled: twice as long as that of 128 x 128. See `choice.CANDIDATES` for the
# number of instructions from which on a kernel is slower.
MOST_INSTRUCTIONS = 6700
OF_HEAVY = {"geglu_tanh": 7400, "geglu_erf": 8700}


@pytest.mark.parametrize(
    "kernel",
    [*COVERING, *(pytest.param(k, marks=pytest.mark.slow) for k in KERNELS if k not in COVERING)],
    ids=lambda k: k.symbol,
)
def test_compiles_for_hopper(kernel):
    report = check_fp8_product(kernel, OF_HEAVY.get(kernel.epilogue.formula.kind, MOST_INSTRUCTIONS))
    assert not report.starting("HGMMA")
    assert not report.starting("F2F.")  # conversions of single values are slow
    rounded = [opcode for opcode in report.opcodes if ".SATFINITE.E" in opcode]  # two values to codes at once
    if kernel.blocks is not None:
        # 128 x 128 values of a warpgroup: by columns in a loop of four steps, by rows after it
        of_value, formula = 128 * 128 // 128 // 2, kernel.epilogue.formula
        assert len(rounded) == of_value * (kernel.blocks.forms(formula) / 4 + kernel.blocks.rows * formula.halves)
        return
    config, per_thread = kernel.config, 64 * 128 // 128
    with_codes = any(isinstance(output, RowCodes) for output in kernel.epilogue.outputs)
    blocks = config.tile_m * config.tile_n // (2 * kernel.epilogue.formula.accumulators * 64 * 128)
    assert len(rounded) == (blocks * per_thread // 2 if with_codes else 0)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.symbol)
def test_fits_an_sm_with_a_deep_enough_ring(kernel):
    assert kernel.smem_bytes + BARRIER_BYTES <= SMEM_BYTES
    assert kernel.stages >= (3 if kernel.epilogue.formula.derivative else 4)


def test_symbols_tell_the_kernels_apart():
    assert len({kernel.symbol for kernel in KERNELS}) == len({*KERNELS}) == len(KERNELS)


def test_every_candidate_is_shipped():
    wanted = {RaggedM(BlockScaledRows("e4m3"), config, epilogue=PLAIN) for config in CANDIDATES["fp8_plain"]}
    for config, keep, codes in itertools.product(CANDIDATES["fp8_activation"], (True, False), (None, CODES)):
        wanted.add(RaggedM(BlockScaledRows("e4m3"), config, epilogue=activation("swiglu", keep=keep, result=codes)))
    for config, keep, scaled in itertools.product(CANDIDATES["fp8_derivative"], (True, False), (True, False)):
        wanted.add(RaggedM(BlockScaledRows("e4m3"), config, epilogue=derivative("swiglu", keep=keep, row_scale=scaled)))
    for config, scaled in itertools.product(CANDIDATES["fp8_derivative_codes"], (True, False)):
        wanted.add(with_codes(config, "swiglu", DerivativeCodes(), row_scale=scaled))
    assert len(wanted) == 2 + 4 + 8 + 2
    assert wanted <= {*shipped("sm_90a")}


@pytest.mark.parametrize(
    ("config", "epilogue", "most"),
    [
        (PP_128, PLAIN, 128),
        (TileConfig(128, 192, 2, 1, pingpong=False), PLAIN, 128),
        (CO_128, activation("swiglu"), 256),
    ],
    ids=["pingpong", "128x192", "half a block of gate"],
)
def test_tiles_are_cooperative_and_have_whole_blocks(config, epilogue, most):
    with pytest.raises(ValueError, match=rf"tiles of a multiple of {most} columns, got .* and {config.name}"):
        RaggedM(BlockScaledRows("e4m3"), config, epilogue=epilogue)


@pytest.mark.parametrize(
    ("config", "interleaved"), [(CO_128, False), (CO_256, False), (CO_256_ROWS, True)], ids=["128", "wide", "alternate"]
)
def test_a_warpgroup_has_whole_blocks_of_columns(config, interleaved):
    epilogue = Epilogue(Backward("swiglu", False, interleaved), (DerivativeCodes(),))
    with pytest.raises(ValueError, match=rf"expected \[gate \| up\] and tiles of 256 x 128, got .* and {config.name}"):
        RaggedM(BlockScaledRows("e4m3"), config, epilogue=epilogue)


def test_weights_have_unit_stride_along_k():
    with pytest.raises(ValueError, match=r"expected a K-major weight .* got b_major 'n'"):
        RaggedM(BlockScaledRows("e4m3"), CO_256, b_major="n", epilogue=PLAIN)
