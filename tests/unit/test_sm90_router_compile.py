"""The router's kernels compile for sm_90a without a GPU: nothing spills, no float is added atomically."""

import pytest
import torch

from fusedmoe.kernels.sm90 import limits
from fusedmoe.kernels.sm90 import router as host

pytest.importorskip("cutlass")

from test_sm90_rows_compile import disassembled, starting

from fusedmoe.kernels.rows.move.parts import Parts, SumParts
from fusedmoe.kernels.rows.router.choose import Choose, sorting_network
from fusedmoe.kernels.rows.router.gradient import ChooseBackward

KERNELS = [
    Choose("topk_softmax", 128, False, None, False, False, 1, False, False, slots=8),
    Choose("softmax", 64, True, "bf16", True, True, 3, True, True),
    Choose("sigmoid", 512, True, "fp32", True, True, 3, True, True),  # the most registers
    ChooseBackward("topk_softmax", 128, False, (0, 1), of_rows=True, slots=8),
    ChooseBackward("topk_softmax", 512, False, (0, 1), of_rows=True),
    ChooseBackward("softmax", 64, True, (0, 0, 1, 2), of_rows=False, grads="lpz", sums=True),
    ChooseBackward("sigmoid", 512, True, (0, 0, 1, 2), of_rows=True, grads="lpz", sums=True),
    Choose("sigmoid", 32, True, None, True, True, 1, True, True, aligned=False),
    ChooseBackward("softmax", 32, False, (), of_rows=True, whole=True, aligned=False),
    ChooseBackward("topk_softmax", 128, False, (0, 1), of_rows=True, weight="bf16", rows=(0, 0), slots=8),
    ChooseBackward("softmax", 256, True, (0, 0, 1, 2), of_rows=True, weight="fp32", rows=(1, 0, 0), slots=32),
    Parts("fp32", (0, 1, 2)),
    SumParts("bf16", 2),
    SumParts("fp32", 1),  # the row scale's gradient, over column tiles
]


# quick: the most registers, and one kernel of each other kind
SLOW = [KERNELS[1], *KERNELS[4:6], *KERNELS[7:10], KERNELS[12]]


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(k, marks=[pytest.mark.slow] if k in SLOW else []) for k in KERNELS],
    ids=lambda k: k.symbol,
)
def test_compiles_for_hopper_without_spills(kernel, monkeypatch, tmp_path):
    (code,) = disassembled(kernel, monkeypatch, tmp_path).values()
    assert starting(code, "EXIT")
    assert not starting(code, ("STL", "LDL", "ATOMG", "RED."))  # counts alone are atomic, in shared memory
    wide = [i for i in starting(code, "LDG") if i.endswith(".128")]
    if kernel == KERNELS[0]:
        # of two tokens: the largest key, and the logits; a ballot finds the lowest lane that has the key
        assert len(starting(code, "REDUX")) == len(wide) == 2
    if isinstance(kernel, SumParts):
        assert len(wide) == 8


def test_symbols_tell_the_kernels_apart():
    assert len({kernel.symbol for kernel in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_the_network_sorts(n):
    # if it sorts zeros and ones, it sorts everything
    rows = torch.cartesian_prod(*[torch.arange(2, dtype=torch.int8)] * n).view(-1, n)
    values = list(rows.unbind(1))
    for a, b in sorting_network(n):
        values[a], values[b] = torch.maximum(values[a], values[b]), torch.minimum(values[a], values[b])
    assert len(rows) == 2**n
    assert torch.equal(torch.stack(values, 1), rows.sort(1, descending=True).values)


def test_a_lane_has_the_experts_of_the_smallest_kernel_that_holds_them():
    rooms = [host.room(experts) for experts in (1, 32, 33, 64, 65, 128, 129, 256, 257, 512)]
    assert rooms == [32, 32, 64, 64, 128, 128, 256, 256, 512, 512]
    assert host.room(limits.MOST_ROUTED_EXPERTS) == limits.MOST_ROUTED_EXPERTS


@pytest.mark.parametrize("chosen", [1, 2, 3, 8, 9, 10, 32])
@pytest.mark.parametrize("tokens", [1, 31, 4096, 5000, 32768, 1 << 20])
def test_the_slots_of_a_chunk_fit_the_kernel_that_places_them(tokens, chosen):
    route = pytest.importorskip("fusedmoe.kernels.rows.move.route")
    size = host.chunk_tokens(tokens, chosen)
    assert 1 <= size * chosen <= route.CHUNK == host.CHUNK_SLOTS
    assert tokens <= size * max(host.CHUNKS, -(-tokens // min(host.MOST_CHUNK_TOKENS, route.CHUNK // chosen)))


def test_tiles_of_the_logits_waste_few_columns():
    widths = {columns: host.logits_tile(columns).tile_n for columns in (8, 60, 64, 72, 128, 160, 192, 256, 384, 512)}
    assert widths == {8: 64, 60: 64, 64: 64, 72: 128, 128: 128, 160: 192, 192: 192, 256: 128, 384: 192, 512: 128}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("experts", [8, 60, 64, 128, 256, 512])
@pytest.mark.parametrize("tokens", [1, 33, 5000, 32768])
def test_groups_of_tokens_fill_a_gpu(tokens, experts, dtype):
    groups = host.weight_groups(tokens, experts, 2048, dtype)
    tiles = -(-(2 if dtype is torch.bfloat16 else 3) * host.padded(experts) // 128) * -(-2048 // 192)
    most = -(-tokens // host.GROUP_UNIT)
    assert 1 <= groups <= most
    assert groups == most or groups * tiles <= host.TILES < (groups + 1) * tiles


@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        (("softmax", 8), ("topk_softmax", False)),
        (("softmax", 8, False), ("softmax", False)),
        (("topk_softmax", 8, True), ("topk_softmax", False)),
        (("sigmoid", 8, True), ("sigmoid", True)),
    ],
)
def test_settings_with_the_same_weights_share_a_kernel(settings, formula):
    assert host.Choice(*settings).formula == formula


def test_a_corrected_softmax_keeps_its_sum():
    assert host.Choice("softmax", 8, corrected=True).formula == ("softmax", True)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((torch.float32, torch.float32, None, 64, 8, 1), "x is float32"),
        ((torch.bfloat16, torch.float16, None, 64, 8, 1), "the router's weight is float16: expected bfloat16 or"),
        ((torch.float16, torch.float32, None, 64, 8, 1), "the router's weight is float32: expected float16"),
        ((torch.bfloat16, torch.bfloat16, torch.float64, 64, 8, 1), "the router's bias is float64"),
        ((torch.bfloat16, torch.bfloat16, None, 516, 8, 1), "516 experts, over 512"),
        ((torch.bfloat16, torch.bfloat16, None, 128, 33, 1), "33 chosen experts, 1 groups"),
        ((torch.bfloat16, torch.bfloat16, None, 128, 8, 64), "8 chosen experts, 64 groups"),
    ],
)
def test_constraints_have_reasons(arguments, reason):
    assert reason in limits.why_not_router(*arguments)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
def test_what_the_kernels_take(weight):
    assert limits.why_not_router(torch.bfloat16, weight, torch.float32, 3, 2, 1) is None
