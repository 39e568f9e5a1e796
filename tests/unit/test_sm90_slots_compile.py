"""The kernels that sort and move rows compile for sm_90a without a GPU: nothing spills, rows move 16 bytes per lane."""

import pytest
import torch

from fusedmoe.kernels.rows.move import slot_functions
from fusedmoe.kernels.sm90 import limits

pytest.importorskip("cutlass")

from test_sm90_rows_compile import disassembled, starting

from fusedmoe.kernels.rows.move import slots
from fusedmoe.kernels.rows.move.route import THREADS, Route
from fusedmoe.kernels.rows.move.slots import GatherRows, RowDots, SlotValues, SumSlots
from fusedmoe.kernels.rows.move.sum_on_few_sms import SHARED_BYTES, WARPS, SumOnFewSms

KERNELS = [
    Route("int64", "fp32", 128, False),
    Route("int32", "bf16", limits.MOST_EXPERTS, True),
    GatherRows("bf16", None),
    GatherRows("fp16", "fp32"),
    SumSlots("bf16", None),
    SumSlots("fp16", "bf16", 4),
    SumSlots("bf16", "fp32", 8, adds=True, rounds=True),
    RowDots("bf16", "fp32"),
    SlotValues("fp32"),
    SumOnFewSms("bf16", 8, adds=True),
    SumOnFewSms("fp16", 2),
    SumOnFewSms("bf16", 1),
]


QUICK = [KERNELS[i] for i in (0, 2, 4, 6, 7, 8, 10)]  # each class


@pytest.mark.parametrize(
    "kernel", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in KERNELS], ids=lambda k: k.symbol
)
def test_compiles_for_hopper_without_spills(kernel, monkeypatch, tmp_path):
    launches = disassembled(kernel, monkeypatch, tmp_path)
    chunked = isinstance(kernel, Route) and kernel.chunked
    assert set(launches) == ({"count", "place"} if chunked else {"place"} if isinstance(kernel, Route) else {"kernel"})
    for code in launches.values():
        assert starting(code, "EXIT")
        assert not starting(code, ("STL", "LDL", "CALL", "ATOMG", "RED."))  # counts alone are atomic, in shared memory


@pytest.mark.parametrize(
    "kernel",
    [GatherRows("bf16", "fp32"), *(SumSlots("bf16", "fp32", n) for n in slots.SLOTS), RowDots("bf16", "fp32")],
    ids=lambda k: k.symbol,
)
def test_rows_move_16_bytes_a_lane_with_several_loads_in_flight(kernel, monkeypatch, tmp_path):
    (code,) = disassembled(kernel, monkeypatch, tmp_path).values()
    wide = [i for i in starting(code, "LDG") if i.endswith(".128")]
    if isinstance(kernel, SumSlots):
        assert len(wide) == kernel.slots * kernel.vectors >= slots.LOADS
    else:
        assert len(wide) >= {GatherRows: slots.VECTORS, RowDots: 2 * slots.VECTORS}[type(kernel)]
    if not isinstance(kernel, RowDots):
        assert set(starting(code, "STG")) == {"STG.E.128"}
    if isinstance(kernel, SumSlots):  # a lane's row and its scale: one load each, none between those of two rows
        assert len(starting(code, "LDG")) == len(wide) + 2


@pytest.mark.parametrize(
    ("slots", "adds"),
    [(8, True), (1, False), *(pytest.param(*how, marks=pytest.mark.slow) for how in ((4, False), (2, True)))],
)
def test_a_sum_on_few_sms_copies_most_of_an_sms_shared_memory_at_once(slots, adds, monkeypatch, tmp_path):
    kernel = SumOnFewSms("bf16", slots, adds)
    (code,) = disassembled(kernel, monkeypatch, tmp_path).values()
    copies = starting(code, "LDGSTS")
    assert len(copies) == kernel.copies
    assert all(".128" in copy for copy in copies)
    assert starting(code, "PREEXIT")  # the next launch may begin
    stage = WARPS * 32 * 16 * kernel.copies
    assert SHARED_BYTES >= kernel.stages * stage > SHARED_BYTES - stage
    assert (kernel.stages - 1) * stage > 128 << 10


def test_symbols_tell_the_kernels_apart():
    assert len({kernel.symbol for kernel in KERNELS}) == len(KERNELS)


def test_there_is_a_kernel_for_the_most_experts():
    assert max(slot_functions.ROOM) == limits.MOST_EXPERTS <= THREADS


def test_functions_for_many_numbers_of_rows_keep_little_memory(monkeypatch):
    """Plans keep a function for each number of rows, each with a vector in place of a missing scale."""
    launched = []
    monkeypatch.setattr(slot_functions, "load", lambda kernel: lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(slot_functions, "_no_scales", {}, raising=False)
    kept, scales, most = [], [], 2 * 600
    for tokens in range(1, 601):
        row_of_slot, rows = torch.arange(2 * tokens).view(tokens, 2), torch.zeros(2 * tokens, 8, dtype=torch.bfloat16)
        total = slot_functions.bind_sum_slots(rows, row_of_slot, None)
        gather = slot_functions.bind_gather_rows(rows[:tokens], row_of_slot, None)
        total(rows, row_of_slot)
        gather(rows[:tokens], row_of_slot, row_of_slot.flatten())
        (_, _, of_sum, *_), (_, _, _, of_rows, *_) = launched[-2:]
        for scale in (of_sum, of_rows):
            assert (scale.shape, scale.dtype, scale.stride()) == ((2 * tokens,), torch.float32, (1,))
        kept += [total, gather]
        scales += [of_sum.untyped_storage(), of_rows.untyped_storage()]
    each = {storage.data_ptr(): storage.nbytes() for storage in scales}
    assert sum(each.values()) <= 4 * 4 * most
