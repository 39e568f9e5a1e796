"""Kernels that run beside each other, and wait for each other, emulated."""

import shutil
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, as the kernels do")

from emulator.gpu import emulated
from kit.hopper_products import rows as operand_rows
from kit.hopper_products import weights
from kit.poison import nan_in_new_tensors
from kit.row_ranges import routed

from fusedmoe.builtin_rules.exchange import beside
from fusedmoe.kernels.exchange import functions
from fusedmoe.kernels.exchange.layout import CONTROL_WORDS, DONE, NUMBER, READY
from fusedmoe.kernels.options import DEFAULT
from fusedmoe.kernels.rows.move.slot_functions import bind_sum_slots
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.tiles.choice import CANDIDATES, CO_256, CO_256_ROWS, PP_128, PP_192

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, which links the kernels' host code")

BF16 = torch.bfloat16
FP8_CONFIGS = CANDIDATES["fp8_plain"]
RANKS, RANK, ROWS, CHOSEN, EXPERTS, DEPTH, COLUMNS = 4, 1, 40, 8, 3, 144, 2 * 256 + 8


def slow(*arguments):
    return pytest.param(*arguments, marks=pytest.mark.slow)


class LeavingSums:
    """A rank whose sums leave while a product computes their rows; the other ranks are memory."""

    def __init__(self, gpu, kind, by_experts, halves):
        (self.at,), nbytes = functions.places([2 * RANKS * ROWS * COLUMNS])
        self.memory = torch.full((RANKS, nbytes // 4), -1, dtype=torch.int32)
        self.memory[:, :CONTROL_WORDS] = 0
        peers = torch.tensor([m.data_ptr() for m in self.memory])
        gpu.others = [self.memory]
        region = functions.Region(peers, self.memory[RANK][:CONTROL_WORDS], RANK, 60 * 10**9)
        engine = SimpleNamespace(
            channel=lambda nbytes, device, returns: SimpleNamespace(region=region), returned=lambda: None
        )
        group = SimpleNamespace(engine=engine, ranks=RANKS, rank=RANK)
        tokens = RANKS * ROWS
        self.offsets, self.token_of_row = routed(tokens, CHOSEN, EXPERTS, seed=1)
        rows = len(self.token_of_row)
        self.row_of_slot = self.token_of_row.argsort(stable=True).view(tokens, CHOSEN)
        self.row_of_slot[self.row_of_slot >= self.offsets[-1]] = rows
        splits = self.offsets.diff(prepend=self.offsets.new_zeros(1)).tolist()
        x = operand_rows(splits, rows - sum(splits), DEPTH, kind).given
        self.given = x, weights(splits, COLUMNS, DEPTH, kind).given, None
        self.rows = torch.empty(rows, COLUMNS, dtype=BF16)
        ranges = beside.Ranges(group, self.offsets, self.token_of_row, tokens, 2, False, halves=halves)
        self.returned = beside.ReturnsOfProduct(
            group, self.rows, self.row_of_slot, ROWS, ranges,
            lambda options: products.bind_counted_gemm(*self.given, options), DEFAULT, 2, EXPERTS * by_experts,
        )  # fmt: skip

    def parts(self, rank):
        """The parts in the region of a rank."""
        of_rank = self.memory[rank].view(torch.uint8)[self.at : self.at + 2 * RANKS * ROWS * COLUMNS]
        return of_rank.view(BF16).view(RANKS, ROWS, COLUMNS)

    def run(self):
        """The sums of this rank's tokens, and the parts of the others; the parts of the other ranks are there."""
        number = int(self.memory[RANK][NUMBER])
        self.memory[RANK][DONE : DONE + RANKS] = number
        for rank in range(RANKS):
            self.parts(rank).fill_(torch.nan)
            self.memory[RANK][READY + rank] = number + (rank != RANK)
        self.parts(RANK)[:] = torch.arange(RANKS)[:, None, None]
        self.rows.fill_(torch.nan)
        y = self.returned.run(self.given, self.rows, self.row_of_slot, self.offsets, self.token_of_row)
        return y, [self.parts(rank)[RANK].clone() for rank in range(RANKS)]

    def wanted(self):
        rows = products.bind_grouped_gemm(*self.given, None, DEFAULT)(*self.given, self.offsets, None)
        sums = bind_sum_slots(rows, self.row_of_slot, None)(rows, self.row_of_slot).view(RANKS, ROWS, COLUMNS)
        assert (sums.float().norm(dim=(1, 2)) > 1).all()
        others = sum(rank for rank in range(RANKS) if rank != RANK)
        return rows, sums, (sums[RANK].float() + others).to(BF16)


@pytest.fixture(autouse=True)
def few_ctas(monkeypatch):
    monkeypatch.setattr(functions, "TOTAL_CTAS", 3)
    torch.manual_seed(0)


@pytest.mark.parametrize(("kind", "config"), [
    ("bf16", PP_192), ("bf16", CO_256), ("bf16", CO_256_ROWS), slow("bf16", PP_128),
    ("e4m3 blocks", FP8_CONFIGS[0]), slow("e4m3 blocks", FP8_CONFIGS[1]),
], ids=lambda of: getattr(of, "name", of))  # fmt: skip
@pytest.mark.parametrize(("by_experts", "halves"), [(False, False), (True, False), (True, True)])
def test_sums_leave_beside_the_product_of_their_rows(by_experts, halves, kind, config, monkeypatch):
    """From the second call on: in the first one, the code of the kernel that sums is not on the GPU."""
    monkeypatch.setattr(products, "choose", lambda problem: config)
    monkeypatch.setattr(beside, "LEAST_BLOCKS", 2)
    with emulated() as gpu, nan_in_new_tensors():
        case = LeavingSums(gpu, kind, by_experts, halves)
        rows, sums, total = case.wanted()
        gpu.beside = True
        for call in range(3):
            y, parts = case.run()
            assert gpu.began_beside == call
            end = int(case.offsets[-1])
            assert torch.equal(case.rows[:end], rows[:end])
            assert case.rows[end:].isnan().all(), "rows of no expert are not written"
            assert end < len(rows)
            assert torch.equal(y, total)
            assert not gpu.counter.any()
            for rank in {*range(RANKS)} - {RANK}:
                assert torch.equal(parts[rank], sums[rank])
                assert case.memory[rank][READY + RANK] == case.memory[RANK][NUMBER]
