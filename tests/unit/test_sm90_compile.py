"""The shipped matrix products compile for sm_90a without a GPU: tensor cores at work, no spills, and they fit an SM.

A covering few are compiled in every run; those marked slow are all the others, compiled two at a time.
"""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")

from kit import machine_code
from kit.kept import contents, kept

from fusedmoe.kernels.build import shipped
from fusedmoe.kernels.build.cache_key import key
from fusedmoe.kernels.build.compiler import SYMBOL
from fusedmoe.kernels.sm90.epilogue.derivative_codes import DerivativeCodes, derivative_codes
from fusedmoe.kernels.sm90.epilogue.outputs import PLAIN, Backward, activation, derivative
from fusedmoe.kernels.sm90.epilogue.quantized import RowCodes
from fusedmoe.kernels.sm90.gemm.common import MATH_WARPGROUPS, Gemm
from fusedmoe.kernels.sm90.gemm.operands import Plain
from fusedmoe.kernels.sm90.gemm.ragged_k import RaggedK
from fusedmoe.kernels.sm90.gemm.ragged_m import RaggedM
from fusedmoe.kernels.sm90.gemm.scheduler import RING_STAGES, SLOT
from fusedmoe.kernels.sm90.tiles.choice import (
    CANDIDATES,
    CO_256,
    CO_256_TALL,
    PP_192,
    PP_192_TALL,
    ROW_VALUES,
    WGRADS,
)
from fusedmoe.kernels.sm90.tiles.config import BARRIER_BYTES, SMEM_BYTES, TileConfig

SHIPPED = [
    kernel
    for kernel in shipped.shipped("sm_90a")
    if isinstance(kernel, (RaggedM, RaggedK)) and not kernel.operands.scaled  # those have tests of their own
]
FAMILIES = [family for family in CANDIDATES if not family.startswith("fp8")]
GPT_OSS_BACKWARD = derivative("swiglu", clamped=True, interleaved=True, keep=True, row_scale=True)
GEGLU_BACKWARD = derivative("geglu_tanh", keep=True, row_scale=True)
NOT_SHIPPED = [  # what `choose` may pick besides
    *(RaggedM(Plain("bf16"), c, b_major="n", epilogue=GPT_OSS_BACKWARD) for c in CANDIDATES["derivative"]),
    *(RaggedM(Plain("bf16"), c, b_major="n", epilogue=GEGLU_BACKWARD) for c in CANDIDATES["heavy_derivative"]),
    RaggedM(Plain("bf16"), CO_256, epilogue=activation("swiglu", clamped=True, interleaved=True, keep=True)),
    *(replace(k, gather=True) for k in SHIPPED if isinstance(k, RaggedM)),
    *(RaggedM(Plain("bf16"), c, b_major="n", epilogue=GPT_OSS_BACKWARD, gather=True) for c in CANDIDATES["derivative"]),
    *(
        RaggedM(Plain("bf16"), c, b_major="n", epilogue=GEGLU_BACKWARD, gather=True)
        for c in CANDIDATES["heavy_derivative"]
    ),
]
KERNELS = {kernel.symbol: kernel for kernel in (*SHIPPED, *NOT_SHIPPED)}

# Each tile configuration of ragged M and of ragged K; both majors of a weight; halves, and gate and up in turns; rows
# that are gathered; spills.
COVERING = (
    "sm90_ragged_m_bf16_bk_plain_128x192pp_c21",
    "sm90_ragged_m_fp16_bn_plain_128x192pp_c21",
    "sm90_ragged_m_bf16_bk_swiglu_keep_128x192pp_c21",
    "sm90_ragged_m_bf16_bn_swiglu_keep_128x128pp_c21",
    "sm90_ragged_m_bf16_bn_dswiglu_scale_keep_128x192pp_c21",
    "sm90_ragged_m_bf16_bk_swiglu_clamp_inter_keep_128x256co_c21",
    "sm90_ragged_m_gather_ranges_bf16_bk_swiglu_keep_128x192pp_c21",
    "sm90_ragged_m_bf16_bk_plain_fp32_128x128co_c21_promoted",
    "sm90_ragged_k_bf16_bf16_128x192pp_c21",
    "sm90_ragged_k_bf16_fp32_add_128x256co_c11",
    "sm90_ragged_k_gather_b_bf16_fp32_add_256x128co_c12",
)
# Spills, stores and loads, each once per tile: registers of the epilogue or of the warp that schedules tiles, none of a
# main loop's. The tile without them, 128x128, takes an eighth to a fifth longer.
SPILLS = {
    "bf16_bn_dswiglu_scale_keep": 24,
    "bf16_bn_dreglu_keep": 4,
    "bf16_bn_dreglu_scale_keep": 10,
    "bf16_bn_dsquared_relu_scale_keep": 10,
    "fp16_bn_dswiglu_keep": 4,
}
SPILLS = {f"sm90_ragged_m_{name}_128x192pp_c21": most for name, most in SPILLS.items()}
# With a fourth warpgroup, which copies gathered rows, a thread of a math warpgroup has 8 registers less: the same tile.
GATHER_SPILLS = {
    "sm90_ragged_m_gather_bf16_bn_dswiglu_scale_keep_128x192pp_c21": 42,
    "sm90_ragged_m_gather_ranges_bf16_bn_dswiglu_scale_keep_128x192pp_c21": 49,
}
GATHER_SPILLS_OF_OTHERS = 24
MOST_INSTRUCTIONS = 8600  # from where on a derivative is slower than with smaller tiles, see choice.py
GATHER_INSTRUCTIONS = 500  # of warps beside the epilogue's, half of them paths for diverged lanes, which never run
PROCESSES = 2
REGISTERS = 65536 // (3 * 128) // 8 * 8  # a thread, of three warpgroups: 168
USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


def tool(name):
    """Path of a tool of the CUDA toolkit: on PATH, or out of its package on PyPI."""
    found = shutil.which(name) or next(Path(sys.prefix).glob(f"lib/*/site-packages/nvidia/*/bin/{name}"), None)
    if found is None:
        pytest.skip(f"no {name}: pip install nvidia-cuda-{name}, or fusedmoe[dev]")
    return str(found)


class Report(NamedTuple):
    """What a kernel compiled to: opcodes of its instructions, and what a thread takes."""

    opcodes: list[str]
    registers: int
    stack_bytes: int
    unsafe_releases: list[str]

    def starting(self, prefix):
        """The opcodes that start with a prefix, or with one of several."""
        return [opcode for opcode in self.opcodes if opcode.startswith(prefix)]


def compile_and_disassemble(kernel, nvdisasm, cuobjdump):
    """Also runs in processes of their own."""
    parts = ["report", key(kernel), repr(kernel), *contents(__file__, machine_code.__file__, nvdisasm, cuobjdump)]
    return Report(*json.loads(kept(parts, lambda: json.dumps(report(kernel, nvdisasm, cuobjdump)).encode())))


def report(kernel, nvdisasm, cuobjdump):
    from cutlass import cute

    compile_ = cute.compile
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")  # as in the process of the tests: the DSL warns before it drops a name
        cute.compile = lambda *args, options: compile_(*args, options=f"{options} --keep-cubin --dump-dir {folder}")
        try:
            cubin = kernel.compile().__cubin__
        finally:
            cute.compile = compile_
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        sass = subprocess.run([nvdisasm, "-c", "-hex", file], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([cuobjdump, "-res-usage", file], capture_output=True, text=True, check=True)
    ((registers, stack_bytes),) = USAGE.findall(usage.stdout + usage.stderr)  # of one kernel
    code = machine_code.parse(sass)
    opcodes = [instruction.opcode for instruction in code.instructions]
    return opcodes, int(registers), int(stack_bytes), machine_code.unsafe_releases(code, ring_of_tiles(kernel))


def ring_of_tiles(kernel):
    """The offsets in shared memory of the tiles, which threads write, and of their barriers (`Gemm.shared_memory`)."""
    if not isinstance(kernel, Gemm):
        return range(0), range(0)
    barriers = 16 * kernel.stages
    reads = barriers + 16 * RING_STAGES
    drawing = reads + 16 * MATH_WARPGROUPS * max(kernel.load_stages, 1)
    tiles = drawing + 16 + 16  # after two barriers and a word
    return range(tiles, tiles + 4 * SLOT * RING_STAGES), range(barriers, reads)


def check_fp8_product(kernel, most_instructions):
    """Compile a product of FP8 codes: tensor cores at work, their products in flight together, no spills. Return its
    report.
    """
    report = compile_and_disassemble(kernel, tool("nvdisasm"), tool("cuobjdump"))
    assert not report.starting(("STL", "LDL"))
    assert not report.stack_bytes
    assert report.registers <= REGISTERS
    assert not report.unsafe_releases
    assert len(report.opcodes) <= most_instructions
    waves = kernel.config.tile_m * kernel.config.tile_n // (2 * 64 * 128)  # of a warpgroup, for each stage
    assert waves
    assert report.starting("QGMMA") == [f"QGMMA.64x128x32.F32.{kernel.operands.dtype.upper()}.E4M3"] * (4 * waves)
    assert len(report.starting("WARPGROUP.DEPBAR")) == 2 * waves  # ptxas adds more if it serializes the products
    return report


@pytest.fixture(scope="module")
def reports(request):
    """Returns the report of a kernel, by symbol; the kernels to be tested are compiled ahead, two at a time."""
    tools = tool("nvdisasm"), tool("cuobjdump")
    if "PYTEST_XDIST_WORKER" in os.environ:  # the other cores run other tests
        yield lambda symbol: compile_and_disassemble(KERNELS[symbol], *tools)
        return
    wanted = [item.callspec.params["symbol"] for item in request.session.items if item.path == request.path
              and "symbol" in getattr(getattr(item, "callspec", None), "params", {})]  # fmt: skip
    # a fork of a process with threads, which torch has, may hang
    pool = ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), multiprocessing.get_context("spawn"))
    try:
        submitted = {symbol: pool.submit(compile_and_disassemble, KERNELS[symbol], *tools) for symbol in wanted}
        yield lambda symbol: submitted[symbol].result()
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "symbol", [*COVERING, *(pytest.param(s, marks=pytest.mark.slow) for s in KERNELS if s not in COVERING)]
)
def test_compiles_to_tensor_core_code_without_spills(symbol, reports):
    report = reports(symbol)
    assert any(opcode.startswith("HGMMA") for opcode in report.opcodes)
    assert any(opcode.startswith("UTMALDG") for opcode in report.opcodes)
    waits = [opcode for opcode in report.opcodes if opcode.startswith("ACQBULK")]  # for the launch before
    assert len(waits) == symbol.endswith("_beside")
    products = [i for i, opcode in enumerate(report.opcodes) if opcode.startswith("HGMMA")]
    # the main loop has two waits, cooperative tiles have one more; ptxas adds many if it serializes the products
    assert len([opcode for opcode in report.opcodes if opcode.startswith("WARPGROUP.DEPBAR")]) <= 3
    spills = [i for i, opcode in enumerate(report.opcodes) if opcode.startswith(("STL", "LDL"))]
    assert len(spills) <= most_spills(symbol)
    assert not [i for i in spills if products[0] < i < products[-1]]
    assert report.stack_bytes <= 8 * len(spills)
    assert report.registers <= REGISTERS
    assert not report.unsafe_releases
    assert len(report.opcodes) <= MOST_INSTRUCTIONS + (GATHER_INSTRUCTIONS if "gather" in symbol else 0)


def most_spills(symbol):
    kernel = KERNELS[symbol]
    if kernel.threads > 3 * 128 and kernel.config == PP_192:
        return GATHER_SPILLS.get(symbol, GATHER_SPILLS_OF_OTHERS)
    return SPILLS.get(symbol, 0)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_fits_an_sm_with_a_deep_enough_ring(kernel):
    assert kernel.smem_bytes + BARRIER_BYTES <= SMEM_BYTES
    if getattr(kernel, "late", False):  # halves of a result are stored one after the other
        assert kernel.config.blocks * kernel.boxes_per_block // 2 % kernel.store_stages == 0
    assert kernel.stages >= 3, "loads run ahead of the products by less than a product in flight and one being read"
    assert kernel.boxes_per_block % kernel.store_stages == 0


def test_ragged_rows_take_clusters_of_two_row_tiles():
    with pytest.raises(ValueError, match="two row tiles, got 256x128co_c12"):
        RaggedM(Plain("bf16"), CO_256_TALL)


def test_gate_and_up_side_by_side_take_tiles_of_whole_loads():
    with pytest.raises(ValueError, match="64 columns at a time, got 128x192pp_c21"):
        RaggedM(Plain("bf16"), PP_192, b_major="n", epilogue=activation("swiglu"))


@pytest.mark.parametrize(("config", "gathered"), [(PP_192, "b"), (PP_192_TALL, "a")])
def test_a_cluster_cannot_share_a_gathered_operand(config, gathered):
    with pytest.raises(ValueError, match=f"share {gathered}, which is gathered, got {config.name}"):
        RaggedK(Plain("bf16"), config, gathered=gathered)


def test_warps_that_gather_have_equal_shares_of_whole_warps():
    with pytest.raises(ValueError, match=r"4 warps gather .* 32 rows or a multiple, got 64x192co_c21"):
        RaggedM(Plain("bf16"), TileConfig(64, 192, 2, 1, pingpong=False), gather=True)


def test_symbols_tell_the_kernels_apart():
    kernels = shipped.shipped("sm_90a")
    symbols = [kernel.symbol for kernel in kernels]
    assert len(set(symbols)) == len(set(kernels)) == len(kernels)
    assert all(SYMBOL.fullmatch(symbol) for symbol in symbols)


def test_few_enough_to_build_ahead_of_time():
    assert len(shipped.shipped("sm_90a")) <= 275


def test_products_of_gathered_rows_are_shipped():
    epilogues = {
        "activation": [activation("swiglu", keep=keep) for keep in (True, False)],
        "derivative": [derivative("swiglu", keep=True, row_scale=True)],
    }
    wanted = {
        RaggedM(Plain("bf16"), config, b_major="n" if family == "derivative" else "k", epilogue=epilogue, gather=True)
        for family, some in epilogues.items()
        for config in CANDIDATES[family]
        for epilogue in some
    }
    assert len(wanted) == 8
    assert wanted <= {*SHIPPED}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_candidate_is_compiled_here(family):
    assert {kernel.config for kernel in KERNELS.values() if family_of(kernel) == family} >= set(CANDIDATES[family])


def test_every_configuration_is_shipped():
    assert {kernel.config for kernel in SHIPPED} >= {config for family in FAMILIES for config in CANDIDATES[family]}


def test_the_choice_knows_the_bytes_of_the_outputs():
    """Those of derivatives of FP8 operands are fitted: half as many as the outputs have."""
    swiglu = {"plain": PLAIN, "activation": activation("swiglu", keep=True), "derivative": GEGLU_BACKWARD}
    swiglu |= {"transposed_activation": swiglu["activation"], "heavy_derivative": swiglu["derivative"]}
    in_fp8 = {"fp8_plain": PLAIN, "fp8_activation": activation("swiglu", keep=True, result=RowCodes())}
    for epilogues, element_bytes in ((swiglu, 2), (in_fp8, 1)):
        for family, epilogue in epilogues.items():
            assert epilogue.column_bytes == element_bytes * ROW_VALUES[family], family
    assert derivative_codes("swiglu", DerivativeCodes()).column_bytes == 2 * 2 + 2 + 2 + 1


def family_of(kernel):
    if isinstance(kernel, RaggedK):
        return WGRADS[kernel.gathered]
    formula = kernel.epilogue.formula
    if not formula.kind:
        return "plain"
    if not isinstance(formula, Backward):
        return "transposed_activation" if kernel.paired and kernel.b_major == "n" else "activation"
    return "heavy_derivative" if formula.kind.startswith("geglu") else "derivative"
