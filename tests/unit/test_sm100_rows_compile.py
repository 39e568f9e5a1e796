"""The kernels without a matrix product compile for Blackwell as for Hopper: nothing spills. No GPU is needed."""

from dataclasses import replace

import pytest
import torch
from test_sm90_rows_compile import disassembled, starting
from test_sm100_quantize_compile import on_each_architecture

pytest.importorskip("cutlass")

from fusedmoe.kernels.build.shipped import shipped
from fusedmoe.kernels.rows.activation import functions as activation_functions
from fusedmoe.kernels.rows.activation.kernel import Activate, ActivateBackward
from fusedmoe.kernels.rows.move import functions as row_functions
from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.rows.move.offsets import ColumnSums, Offsets, ZeroTail
from fusedmoe.kernels.rows.move.route import Route
from fusedmoe.kernels.rows.move.slots import GatherRows, RowDots, SlotValues, SumSlots
from fusedmoe.kernels.rows.quantize import format_functions
from fusedmoe.kernels.rows.quantize.formats import Magnitudes, QuantizeFormat
from fusedmoe.kernels.sm90 import limits
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.formats import nvfp4

ARCHES = ("sm_100a", "sm_103a")
KERNELS = [
    Offsets("int64"), ZeroTail("bf16"), ColumnSums("bf16", "fp32"), Route("int64", "fp32", 128, True),
    Route("int32", "bf16", limits.MOST_EXPERTS, False), GatherRows("bf16", "fp32"), SumSlots("bf16", None),
    SumSlots("bf16", "bf16", 2, adds=True), RowDots("bf16", "fp32"), SlotValues("fp32"),
    Activate("bf16", "swiglu", False, False, "fp32"),
    ActivateBackward("bf16", "swiglu", False, False, "fp32", True, True),
]  # fmt: skip


def check(kernel, monkeypatch, tmp_path):
    # those for NVFP4 divide, and raise the largest magnitudes of experts
    other = () if isinstance(kernel, QuantizeFormat | Magnitudes) else ("CALL", "ATOMG", "RED.")
    for code in disassembled(kernel, monkeypatch, tmp_path).values():
        assert starting(code, "EXIT")
        assert not starting(code, ("STL", "LDL", "HGMMA", "QGMMA", *other))


@pytest.mark.parametrize(("kernel", "arch"), on_each_architecture(KERNELS, ("sm_103a",), slow=KERNELS[1::2]))
def test_compiles_without_spills(kernel, arch, monkeypatch, tmp_path):
    check(replace(kernel, arch=arch), monkeypatch, tmp_path)


@pytest.mark.slow  # the test above covers each kind of kernel
@pytest.mark.parametrize("kernel", [k for arch in ARCHES for k in shipped(arch)], ids=lambda k: k.symbol)
def test_a_shipped_kernel_compiles_without_spills(kernel, monkeypatch, tmp_path):
    check(kernel, monkeypatch, tmp_path)


def bound():
    """Bind one function of each kernel."""
    rows, index = torch.zeros(6, 16, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    weight, offsets = torch.zeros(3, 2), torch.zeros(4, dtype=torch.int32)
    row_functions.bind_offsets_from_splits(torch.zeros(4, dtype=torch.int64), 6)
    row_functions.bind_column_sums(rows, offsets)
    row_functions.bind_zero_tail(rows, offsets)
    slot_functions.bind_route(index, weight, 4)
    slot_functions.bind_gather_rows(rows, index, weight.flatten())
    slot_functions.bind_sum_slots(rows, index, None)
    slot_functions.bind_sum_slots_and_part(rows, index, None)
    slot_functions.bind_row_dots(rows, rows, index, torch.float32)
    slot_functions.bind_slot_values(weight.flatten(), index)
    activation_functions.bind_activation(rows, None, Activation("swiglu"))
    activation_functions.bind_activation_backward(rows[:, :8], rows, None, Activation("swiglu"), False, False)
    format_functions.bind_magnitudes(rows, offsets, of_experts=True)
    format_functions.bind_quantize_format(rows, nvfp4(), offsets)


@pytest.mark.parametrize(("arch", "expected"), [(None, "sm_90a"), (90, "sm_90a"), (100, "sm_100a"), (103, "sm_103a")])
def test_functions_load_the_kernels_of_the_device(arch, expected, monkeypatch):
    loaded = []
    monkeypatch.setattr("fusedmoe.base.target.arch_of", lambda device: arch)
    for functions in (row_functions, slot_functions, format_functions, activation_functions):
        monkeypatch.setattr(functions, "load", loaded.append)
    bound()
    assert [kernel.arch for kernel in loaded] == [expected] * 13
    assert {kernel.symbol.partition("_")[0] for kernel in loaded} == {expected.removesuffix("a").replace("_", "")}
