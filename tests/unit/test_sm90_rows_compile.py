"""The row kernels compile for sm_90a without a GPU: nothing spills, and rows are read 16 bytes at a time."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kit.kept import contents, kept

from fusedmoe.kernels.build.cache_key import key
from fusedmoe.kernels.rows.move import functions

cutlass = pytest.importorskip("cutlass")
cute = cutlass.cute

from fusedmoe.kernels.rows.move.offsets import IN_FLIGHT, LANES, VECTOR, ColumnSums, Offsets, ZeroTail  # noqa: E402

KERNELS = [
    Offsets("int32"), Offsets("int64"), ColumnSums("bf16", "bf16"), ColumnSums("fp16", "fp32"), ZeroTail("bf16"),
]  # fmt: skip
CLASSES = (
    "Offsets", "ColumnSums", "Route", "GatherRows", "SumSlots", "RowDots", "SlotValues", "Choose", "ChooseBackward",
    "Parts", "SumParts", "SumOnFewSms", "QuantizeRows", "QuantizeWeight", "GatherCodes", "QuantizeFormat", "Magnitudes",
    "DequantizeTransposed", "Dequantize", "TransposeCodes", "QuantizePacked", "Activate", "ZeroTail",
)  # fmt: skip
LAUNCH = re.compile(rf"(\w+?)_(?:{'|'.join(CLASSES)})")
INSTRUCTION = re.compile(r"\*/ +(?:@!?U?P\d+ +)?([A-Z][\w.]*)")


def disassembler():
    found = shutil.which("nvdisasm") or next(Path(sys.prefix).glob("lib/*/site-packages/nvidia/*/bin/nvdisasm"), None)
    if found is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    return str(found)


def disassembled(kernel, monkeypatch, tmp_path):
    """Compile a kernel; the instructions of each of its launches, by the launch's name."""
    tool = disassembler()
    text = kept(["SASS", key(kernel), *contents(tool)], lambda: sass(kernel, tool, monkeypatch, tmp_path)).decode()
    _, *launches = re.split(r"^\.text\.kernel_cutlass_", text, flags=re.MULTILINE)
    return {LAUNCH.match(launch)[1]: INSTRUCTION.findall(launch) for launch in launches}


def sass(kernel, tool, monkeypatch, tmp_path):
    plain = cute.compile

    def keeping(*args, options, **kwargs):
        return plain(*args, options=f"{options} --keep-cubin --dump-dir {tmp_path}", **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(cute, "compile", keeping)
        cubin = kernel.compile().__cubin__
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    return subprocess.run([tool, "-c", file], capture_output=True, check=True).stdout


@pytest.fixture
def instructions(monkeypatch, tmp_path):
    return lambda kernel: disassembled(kernel, monkeypatch, tmp_path)


def starting(instructions, prefix):
    return [i for i in instructions if i.startswith(prefix)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.symbol)
def test_compiles_for_hopper_without_spills(kernel, instructions):
    launches = instructions(kernel)
    names = {"kernel"} if isinstance(kernel, Offsets | ZeroTail) else {"add_slices", "add_partials"}
    assert set(launches) == names
    for code in launches.values():
        assert starting(code, "EXIT")
        assert not starting(code, ("STL", "LDL", "CALL", "ATOM", "RED"))


def test_column_sums_reads_16_bytes_a_lane_and_keeps_several_loads_in_flight(instructions):
    launches = instructions(ColumnSums("bf16", "bf16"))
    first, second = launches["add_slices"], launches["add_partials"]

    rows = [i for i in starting(first, "LDG") if ".NA" in i]
    assert len(rows) == 2 * IN_FLIGHT - 1  # of the main loop, and of a piece's last rows, which are one less at most
    assert all(i.endswith(".128") for i in rows)
    assert starting(first, "STG") == ["STG.E.128"] * 2
    # the main loop loads all its rows before it adds the first of them
    order = [i for i in first if ".NA" in i or i.startswith("FADD")]
    assert order[:IN_FLIGHT] == rows[:IN_FLIGHT]
    assert order[IN_FLIGHT].startswith("FADD")

    assert len([i for i in starting(second, "LDG") if i.endswith(".128")]) > 1


def test_symbols_tell_the_kernels_apart():
    assert len({kernel.symbol for kernel in KERNELS}) == len(KERNELS)


def test_host_and_kernel_agree_on_the_width_of_a_warp_and_its_rows():
    assert functions.WARP_COLUMNS == LANES * VECTOR
    assert functions.SLICE_UNIT == IN_FLIGHT


@pytest.mark.parametrize("columns", [8, 768, 1408, 2880, 16384])
@pytest.mark.parametrize("num_rows", [1, 31, 33, 8191, 262_144, 2**31 - 1])
def test_slices_fill_the_gpu_and_are_no_shorter_than_need_be(num_rows, columns):
    rows = functions.rows_per_slice(num_rows, columns)
    warps = -(-num_rows // rows) * -(-columns // functions.WARP_COLUMNS)
    assert rows % functions.SLICE_UNIT == 0
    assert rows >= functions.LEAST_SLICE_ROWS
    assert rows == functions.LEAST_SLICE_ROWS or warps > functions.TARGET_WARPS // 2
    assert warps <= functions.TARGET_WARPS or rows == functions.LEAST_SLICE_ROWS


@pytest.mark.parametrize(("num_rows", "columns", "experts"), [(0, 16, 3), (5, 0, 3), (5, 16, 0)])
def test_nothing_is_launched_without_rows_columns_or_experts(num_rows, columns, experts):
    """On the CPU, where a launch would raise."""
    grad = torch.full((num_rows, columns), torch.nan, dtype=torch.bfloat16)
    sums = functions.column_sums(grad, torch.zeros(experts, dtype=torch.int32), torch.float32)
    assert sums.shape == (experts, columns)
    assert sums.dtype == torch.float32
    assert not sums.any()


def test_no_offsets_without_experts_and_zeros_without_rows():
    assert functions.offsets_from_splits(torch.empty(0, dtype=torch.int64), 5).shape == (0,)
    offsets = functions.offsets_from_splits(torch.tensor([3, 4]), 0)
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, 0]
