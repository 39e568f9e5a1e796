"""The functions that launch kernels of rows: sizes that they choose, kernels that they load, and calls without rows."""

import pytest
import torch

from fusedmoe.base import lasting
from fusedmoe.kernels.rows.activation import functions as activation_functions
from fusedmoe.kernels.rows.move import functions, slot_functions
from fusedmoe.kernels.rows.quantize import format_functions
from fusedmoe.kernels.rows.quantize.block_functions import bind_quantize_rows, bind_quantize_weight
from fusedmoe.kernels.sm90 import limits
from fusedmoe.kernels.sm90 import router as host
from fusedmoe.kernels.sm90.products import has_strides, with_strides
from fusedmoe.kernels.sm100 import quantize_functions as packed_functions
from fusedmoe.kernels.sm100.quantize_functions import PACKING, bind_quantize_packed, bind_quantize_packed_nvfp4
from fusedmoe.numerics.activations import Activation
from fusedmoe.numerics.formats import E5M2, fp8_block, nvfp4
from fusedmoe.numerics.formats.groups import PACKED_ROWS

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# ---- sizes


def test_host_and_kernels_agree():
    pytest.importorskip("cutlass")
    from fusedmoe.kernels.rows.move import offsets, route
    from fusedmoe.kernels.sm100 import quantize, quantize_nvfp4

    assert functions.WARP_COLUMNS == offsets.LANES * offsets.VECTOR
    assert functions.SLICE_UNIT == offsets.IN_FLIGHT
    assert max(slot_functions.ROOM) == limits.MOST_EXPERTS <= route.THREADS
    assert host.CHUNK_SLOTS == route.CHUNK
    of_host = PACKING, packed_functions.TILE, packed_functions.SCALES
    assert (quantize.PACKING, quantize.TILE, quantize.SCALES) == of_host == (PACKED_ROWS, 128, 512)
    assert (quantize_nvfp4.PACKING, quantize_nvfp4.SCALES) == (PACKING, packed_functions.SCALES)


@pytest.mark.parametrize("columns", [8, 1408, 16384])
@pytest.mark.parametrize("num_rows", [1, 33, 8191, 2**31 - 1])
def test_slices_fill_the_gpu_and_are_no_shorter_than_need_be(num_rows, columns):
    rows = functions.rows_per_slice(num_rows, columns)
    warps = -(-num_rows // rows) * -(-columns // functions.WARP_COLUMNS)
    assert rows % functions.SLICE_UNIT == 0
    assert rows >= functions.LEAST_SLICE_ROWS
    assert rows == functions.LEAST_SLICE_ROWS or functions.TARGET_WARPS // 2 < warps <= functions.TARGET_WARPS


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_the_network_sorts(n):
    """If it sorts zeros and ones, it sorts everything."""
    pytest.importorskip("cutlass")
    from fusedmoe.kernels.rows.router.choose import sorting_network

    rows = torch.cartesian_prod(*[torch.arange(2, dtype=torch.int8)] * n).view(-1, n)
    values = list(rows.unbind(1))
    for a, b in sorting_network(n):
        values[a], values[b] = torch.maximum(values[a], values[b]), torch.minimum(values[a], values[b])
    assert torch.equal(torch.stack(values, 1), rows.sort(1, descending=True).values)


@pytest.mark.parametrize("chosen", [1, 2, 9, 10, 32])
@pytest.mark.parametrize("tokens", [1, 31, 5000, 1 << 20])
def test_the_slots_of_a_chunk_fit_the_kernel_that_places_them(tokens, chosen):
    size = host.chunk_tokens(tokens, chosen)
    assert 1 <= size * chosen <= host.CHUNK_SLOTS
    assert tokens <= size * max(host.CHUNKS, -(-tokens // min(host.MOST_CHUNK_TOKENS, host.CHUNK_SLOTS // chosen)))


# ---- the router's settings


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((FP32, FP32, None, 64, 8, 1), "x is float32"),
        ((FP16, FP32, None, 64, 8, 1), "the router's weight is float32: expected float16"),
        ((BF16, BF16, FP64, 64, 8, 1), "the router's bias is float64"),
        ((BF16, BF16, None, 128, 33, 1), "33 chosen experts, 1 groups"),
        ((BF16, FP32, FP32, 3, 2, 1), None),
    ],
)
def test_limits_of_the_router(arguments, reason):
    found = limits.why_not_router(*arguments)
    assert found is None if reason is None else reason in found


# ---- calls without rows, columns or experts: on the CPU, where a launch would raise


@pytest.mark.parametrize(("num_rows", "columns", "experts"), [(0, 16, 3), (5, 0, 3), (5, 16, 0)])
def test_column_sums_of_nothing(num_rows, columns, experts):
    grad = torch.full((num_rows, columns), torch.nan, dtype=BF16)
    sums = functions.column_sums(grad, torch.zeros(experts, dtype=torch.int32), FP32)
    assert (sums.shape, sums.dtype) == ((experts, columns), FP32)
    assert not sums.any()


def test_offsets_of_nothing():
    assert functions.offsets_from_splits(torch.empty(0, dtype=torch.int64), 5).shape == (0,)
    offsets = functions.offsets_from_splits(torch.tensor([3, 4]), 0)
    assert (offsets.dtype, offsets.tolist()) == (torch.int32, [0, 0])


@pytest.mark.parametrize(("rows", "columns"), [(0, 128), (64, 0)])
def test_quantized_rows_of_nothing(rows, columns):
    x, offsets = torch.empty(rows, columns, dtype=BF16), torch.zeros(3, dtype=torch.int32)
    for ends in (None, offsets):
        (codes, scale), (codes_t, scale_t) = bind_quantize_rows(x, fp8_block(), ends, columns=True)(x, ends)
        assert (codes.shape, scale.shape) == ((rows, columns), (rows, -(-columns // 128)))
        assert codes_t.shape[0] == columns
        assert scale_t.shape == (columns, -(-codes_t.shape[1] // 128))
    for index in (None, torch.zeros(rows, dtype=torch.int32)):
        forms = bind_quantize_packed(x, offsets, index, columns=True, halves=True)(x, offsets, index)
        assert [(codes.shape, codes.dtype) for codes, _ in forms] == [
            ((3 * PACKING if rows else 0, columns), torch.float8_e4m3fn)
        ] * 2
        assert all((scale.shape, scale.dtype) == ((0,), torch.float8_e8m0fnu) for _, scale in forms)
    forms = bind_quantize_packed_nvfp4(x, offsets, columns=True)(x, offsets, (torch.ones(3), torch.ones(3)))
    packed = 3 * PACKING if rows else 0
    assert [codes.shape for codes, _ in forms] == [(packed, columns // 2), (columns, packed // 2)]
    assert all((scale.shape, scale.dtype) == ((0,), torch.float8_e4m3fn) for _, scale in forms)


def test_an_empty_weight():
    weight = torch.empty(0, 128, 256, dtype=BF16)
    (codes, scale), (codes_t, scale_t) = bind_quantize_weight(weight, fp8_block(E5M2, 128), columns=True)(weight)
    assert (codes.shape, scale.shape) == ((0, 128, 256), (0, 1, 2))
    assert (codes_t.shape, scale_t.shape) == ((0, 256, 128), (0, 2, 1))
    assert codes.dtype is codes_t.dtype is torch.float8_e5m2


# ---- tensors and kernels of a call


@pytest.mark.parametrize("shape", [(5, 1), (7, 3), (8, 2), (2, 5, 3), (2, 4, 4), (1, 1, 1)], ids=str)
def test_scales_with_other_strides_are_copied(shape):
    scale = torch.rand(shape)
    copied = with_strides(scale)
    assert torch.equal(copied, scale)
    assert copied.stride()[-2:] == (1, -(-shape[-2] // 4) * 4)
    assert not has_strides(scale)
    assert has_strides(copied)
    assert with_strides(copied) is copied
    room = torch.rand(2, 8)
    assert has_strides(room.mT[:5])
    assert not has_strides(room.mT[1:])  # its address


def test_rows_of_first_slots_share_memory():
    device = torch.device("cpu")
    for chosen in (1, 3):
        tables = set()
        for rows in (0, 1, 2, 5, 7, 8, 6):
            found = lasting.row_of_first_slot(rows, chosen, device)
            assert found[:, 0].tolist() == [*range(rows)]
            assert (found[:, 1:] == lasting.NO_ROW).all()
            assert found.shape == (rows, chosen)
            assert found.is_contiguous()
            assert found.dtype is torch.int64
            tables.add(found.untyped_storage().data_ptr())
        assert len(tables) == 3  # of 1, 2 and 8 rows


def bind_each():
    """Bind one function of each kernel."""
    rows, index = torch.zeros(6, 16, dtype=BF16), torch.zeros(3, 2, dtype=torch.int64)
    weight, offsets = torch.zeros(3, 2), torch.zeros(4, dtype=torch.int32)
    functions.bind_offsets_from_splits(torch.zeros(4, dtype=torch.int64), 6)
    functions.bind_column_sums(rows, offsets)
    functions.bind_zero_tail(rows, offsets)
    slot_functions.bind_route(index, weight, 4)
    slot_functions.bind_gather_rows(rows, index, weight.flatten())
    slot_functions.bind_sum_slots(rows, index, None)
    slot_functions.bind_sum_slots_and_part(rows, index, None)
    slot_functions.bind_row_dots(rows, rows, index, FP32)
    slot_functions.bind_slot_values(weight.flatten(), index)
    activation_functions.bind_activation(rows, None, Activation("swiglu"))
    activation_functions.bind_activation_backward(rows[:, :8], rows, None, Activation("swiglu"), False, False)
    format_functions.bind_magnitudes(rows, offsets, of_experts=True)
    format_functions.bind_quantize_format(rows, nvfp4(), offsets)


@pytest.mark.parametrize(("arch", "expected"), [(None, "sm_90a"), (90, "sm_90a"), (100, "sm_100a"), (103, "sm_103a")])
def test_functions_load_the_kernels_of_the_device(arch, expected, monkeypatch):
    pytest.importorskip("cutlass")
    loaded = []
    monkeypatch.setattr("fusedmoe.base.target.arch_of", lambda device: arch)
    for module in (functions, slot_functions, format_functions, activation_functions):
        monkeypatch.setattr(module, "load", loaded.append)
    bind_each()
    assert [kernel.arch for kernel in loaded] == [expected] * 13
    assert {kernel.symbol.partition("_")[0] for kernel in loaded} == {expected.removesuffix("a").replace("_", "")}
