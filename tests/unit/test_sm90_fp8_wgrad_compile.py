"""The weight gradients of FP8 codes compile for sm_90a without a GPU: promotion takes two instructions per value."""

import itertools
import re

import pytest

pytest.importorskip("cutlass")

from cutlass import Int32
from test_sm90_compile import check_fp8_product, report, tool

from fusedmoe.kernels.build.shipped import shipped
from fusedmoe.kernels.sm90.gemm import scaled, scheduler
from fusedmoe.kernels.sm90.gemm.block_scales_k import BlockScaledColumns
from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, CO_128, CO_256, CO_256_TALL, PP_128
from fusedmoe.kernels.sm90.tiles.config import BARRIER_BYTES, SMEM_BYTES, TileConfig

OUTPUTS = [{"out": out, "accumulate": adds} for out in ("bf16", "fp32") for adds in (False, True)]
KERNELS = [
    RaggedK(BlockScaledColumns(dtype), config, **output)
    for dtype, config, output in itertools.product(("e4m3", "e5m2"), CANDIDATES["fp8_wgrad"], OUTPUTS)
]
KERNELS += [
    RaggedK(BlockScaledColumns("e4m3"), config, accumulate=adds, beside=True)
    for config in CANDIDATES["fp8_wgrad"]
    for adds in (False, True)
]
COVERING = [
    RaggedK(BlockScaledColumns("e4m3"), CO_256),
    RaggedK(BlockScaledColumns("e4m3"), CO_256, beside=True),
    RaggedK(BlockScaledColumns("e5m2"), CO_256_TALL, out="fp32", accumulate=True),
    RaggedK(BlockScaledColumns("e4m3"), CO_256, accumulate=True),
]
WAVES, VALUES = 2, 64  # of a stage; of a wave, per thread
MOST_INSTRUCTIONS = 2300


@pytest.mark.parametrize(
    "kernel",
    [*COVERING, *(pytest.param(k, marks=pytest.mark.slow) for k in KERNELS if k not in COVERING)],
    ids=lambda k: k.symbol,
)
def test_compiles_for_hopper(kernel):
    found = check_fp8_product(kernel, MOST_INSTRUCTIONS)
    code = found.opcodes
    assert len(found.starting("UTMALDG")) == 4  # codes and scales of both operands
    assert len(found.starting("ACQBULK")) == kernel.beside  # the wait for the launch before

    products = [i for i, opcode in enumerate(code) if opcode.startswith("QGMMA")]
    loop = code[products[0] - 70 : products[-1] + 250]  # and the instructions around it
    for opcode in ("FMUL", "FFMA"):
        assert len([i for i in loop if i.split(".")[0] == opcode]) == WAVES * VALUES
    blocks_of_columns = kernel.config.tile_n // 128
    assert loop.count("LDS.64") == VALUES // 4 * blocks_of_columns  # a pair of columns, for all rows of a thread
    promotion = code[products[-1] : products[-1] + 2 * VALUES]
    assert not [opcode for opcode in promotion if opcode.startswith("LDS")]

    element_bytes = 4 if kernel.out == "fp32" else 2
    vectors = WAVES * VALUES * element_bytes // 16
    add = "REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU" if kernel.out == "fp32" else "REDG.E.ADD.BF16x8.RN.STRONG.GPU"
    assert found.starting("REDG") == ([add] * vectors if kernel.accumulate else [])
    assert code.count("STG.E.128") == (0 if kernel.accumulate else vectors)


def test_arrivals_that_do_not_wait_for_loads_are_found(monkeypatch):
    """Without `one_after`, both overtook loads on GPUs: kernels hung, or multiplied another tile's operand."""
    for module in (scheduler, scaled):
        monkeypatch.setattr(module, "one_after", lambda *values: Int32(1))
    drawn, stage = report(COVERING[0], tool("nvdisasm"), tool("cuobjdump"))[-1]  # not kept: the sources are the same
    for found in (drawn, stage):
        assert re.match(r"\w+ SYNCS\.ARRIVE\.TRANS64\.RED\.ART0 .* during \w+ LDS", found)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.symbol)
def test_fits_an_sm_with_a_deep_enough_ring(kernel):
    assert kernel.smem_bytes + BARRIER_BYTES <= SMEM_BYTES
    assert kernel.stages == 4


def test_symbols_tell_the_kernels_apart():
    assert len({kernel.symbol for kernel in KERNELS}) == len(KERNELS)


def test_every_candidate_is_shipped():
    wanted = {k for k in KERNELS if k.operands.dtype == "e4m3" and (k.out == "bf16" or k.accumulate)}
    assert len(wanted) == 5 * len(CANDIDATES["fp8_wgrad"])
    assert wanted <= {*shipped("sm_90a")}


@pytest.mark.parametrize("config", [PP_128, TileConfig(128, 192, pingpong=False)], ids=lambda c: c.name)
def test_tiles_are_cooperative_and_have_whole_blocks(config):
    with pytest.raises(ValueError, match=rf"a multiple of 128 columns, got None and {config.name}"):
        RaggedK(BlockScaledColumns("e4m3"), config)


def test_no_operand_is_gathered():
    with pytest.raises(ValueError, match=r"no gathered operand .* got 'a'"):
        RaggedK(BlockScaledColumns("e4m3"), CO_128, gathered="a")
