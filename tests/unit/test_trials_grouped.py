"""The trial that stores the boxes of a step together: its code for sm_90a has one fence and commit group per step."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
from test_sm90_compile import PROCESSES, compile_and_disassemble, tool  # skips without the CuTe DSL

from benchmarks.trials.grouped_stores import GroupedStores, MoreBuffers
from fusedmoe.kernels.compiler import SYMBOL
from fusedmoe.kernels.sm90.choice import PP_128, PP_192
from fusedmoe.kernels.sm90.config import BARRIER_BYTES, SMEM_BYTES
from fusedmoe.kernels.sm90.epilogues import activation, derivative
from fusedmoe.kernels.sm90.ragged_m import RaggedM

DERIVATIVE = {"b_major": "n", "epilogue": derivative("swiglu", keep=True, row_scale=True)}
FC1 = {"epilogue": activation("swiglu", keep=True)}
# Each layout of the buffers, with its barriers per step; each tile; rows in order and gathered.
COVERING = {
    "in place": (GroupedStores("bf16", PP_128, **DERIVATIVE, in_place=True), 1),
    "one set": (GroupedStores("bf16", PP_192, **DERIVATIVE, gather=True), 2),
}


def base_of(kernel):
    """The shipped kernel."""
    return RaggedM(kernel.dtype, kernel.config, kernel.arch, kernel.b_major, kernel.epilogue, kernel.gather)


@pytest.fixture(scope="module")
def reports():
    """Reports of each trial and of the shipped kernel, by name; all are compiled ahead, two at a time."""
    tools = tool("nvdisasm"), tool("cuobjdump")
    pool = ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), multiprocessing.get_context("spawn"))
    try:
        yield {
            name: [pool.submit(compile_and_disassemble, k, *tools) for k in (kernel, base_of(kernel))]
            for name, (kernel, _) in COVERING.items()
        }
    finally:
        pool.shutdown(cancel_futures=True)


def count(report, *prefixes):
    return sum(opcode.startswith(prefixes) for opcode in report.opcodes)


@pytest.mark.parametrize("name", COVERING)
def test_a_step_has_one_fence_and_commit_group(name, reports):
    kernel, barriers = COVERING[name]
    trial, base = (future.result() for future in reports[name])
    steps = kernel.config.blocks * kernel.steps
    boxes = steps * kernel.epilogue.boxes
    assert count(trial, "HGMMA") == count(base, "HGMMA") > 0
    assert count(trial, "UTMASTG") == count(base, "UTMASTG") == boxes
    assert count(base, "UTMACMDFLUSH") == boxes
    assert count(trial, "UTMACMDFLUSH") == steps
    assert count(base, "FENCE") - count(trial, "FENCE") == boxes - steps
    assert count(base, "BAR.") - count(trial, "BAR.") == boxes - barriers * steps
    assert count(trial, "STSM") == count(base, "STSM")
    assert count(trial, "STL", "LDL") <= count(base, "STL", "LDL")
    products = [i for i, opcode in enumerate(trial.opcodes) if opcode.startswith("HGMMA")]
    assert not [o for o in trial.opcodes[products[0] : products[-1]] if o.startswith(("STL", "LDL"))]
    assert len(trial.opcodes) < len(base.opcodes)


TRIALS = [
    *(GroupedStores("bf16", c, **FC1, gather=g) for c in (PP_128, PP_192) for g in (False, True)),
    *(
        GroupedStores("bf16", c, **DERIVATIVE, gather=g, in_place=in_place, ahead=ahead)
        for c in (PP_128, PP_192)
        for g in (False, True)
        for in_place in (False, True)
        for ahead in (False, True)
    ),
    *(MoreBuffers("bf16", PP_128, **DERIVATIVE, buffers=n) for n in (3, 4)),
]


@pytest.mark.parametrize("kernel", TRIALS, ids=[kernel.symbol for kernel in TRIALS])
def test_keeps_the_stages_of_the_shipped_kernel(kernel):
    assert kernel.stages >= base_of(kernel).stages
    assert kernel.smem_bytes + BARRIER_BYTES <= SMEM_BYTES
    assert SYMBOL.fullmatch(kernel.symbol)
    assert {*base_of(kernel).sources, "benchmarks.trials.grouped_stores"} == {*kernel.sources}


def test_symbols_tell_the_trials_apart():
    assert len({kernel.symbol for kernel in TRIALS}) == len(TRIALS)


@pytest.mark.parametrize("option", ["in_place", "ahead"])
def test_only_a_derivative_reads_a_preactivation(option):
    with pytest.raises(ValueError, match="expected a derivative, got sm90_ragged_m_bf16_bk_swiglu_keep"):
        GroupedStores("bf16", PP_128, **FC1, **{option: True})
