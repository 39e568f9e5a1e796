"""Products of quantized values as they are emulated, in fp32 and in bf16, against fp64 of what the codes stand for.

Axes: E experts, K features in, N features out, P padded rows.
"""

import pytest
import torch
from kit.rounding import error_of_roundings
from kit.rounding import relative_error as error
from kit.splits import ends

import fusedmoe as fm
from fusedmoe.kernels.torch import grouped_gemm, quantized_products
from fusedmoe.numerics import formats
from fusedmoe.numerics.formats import Quantizer
from fusedmoe.numerics.formats.roles import ROLES, nvfp4_roles

K, N = 48, 32
SPLITS = (9, 0, 31, 21)  # no whole tile of 16 rows
USED, ROWS = sum(SPLITS), 64  # three rows belong to no expert
E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
ROTATED = Quantizer(formats.nvfp4(), hadamard=True)


def operands(dtype=torch.float32, used=USED):
    dy, x = torch.randn(ROWS, N).to(dtype), torch.randn(ROWS, K).to(dtype)
    for t in (dy, x):
        t[used:] = float("nan")
    return dy, x


def by_columns(quantizers, rows, offsets):
    return [fm.quantize(t, q, -2, offsets=offsets) for q, t in zip(quantizers, rows, strict=True)]


def nvfp4_where_it_lies(q, splits):
    """What NVFP4 by columns stands for before anything is rotated back: (M, P) fp64, bytes taken apart by hand."""
    low, high = q.data & 15, q.data >> 4
    codes = torch.stack((low, high), -1).flatten(-2).to(torch.int64)
    values = E2M1_VALUES[codes & 7] * (1 - 2 * (codes >> 3)) * q.scale.double().repeat_interleave(16, -1)
    tiles = [-(-rows // 16) for rows in splits]
    used = sum(tiles) * 16
    of_expert = q.tensor_scale.double().repeat_interleave(torch.tensor(tiles) * 16)
    values[:, :used] *= of_expert
    assert not values[:, used:].any()
    return values


def wgrad_where_it_lies(dy, x, splits):
    """The weight gradient in fp64, of two operands in NVFP4 in the rotated space, padding included: (E, N, K)."""
    dy_NP, x_KP = nvfp4_where_it_lies(dy, splits), nvfp4_where_it_lies(x, splits)
    tiles = [-(-rows // 16) * 16 for rows in splits]
    parts = zip(dy_NP[:, : sum(tiles)].split(tiles, 1), x_KP[:, : sum(tiles)].split(tiles, 1), strict=True)
    return torch.stack([a @ b.T for a, b in parts])


def wgrad_dequantized(dy, x, splits):
    """The weight gradient in fp64 of the dequantized rows that there are: (E, N, K)."""
    values = (t if isinstance(t, torch.Tensor) else t.dequantize(torch.float32) for t in (dy, x))
    dy, x = (t.double()[: sum(splits)].split(splits) for t in values)
    return torch.stack([a.T @ b for a, b in zip(dy, x, strict=True)])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["in fp32", "in bf16"])
def emulation(request, monkeypatch):
    """The dtype that products are emulated in: bf16 is what GPUs do that have such a grouped product."""
    monkeypatch.setattr(quantized_products, "_in_bf16", lambda dtype, device: request.param is torch.bfloat16)
    return request.param


def assert_product(got, want, emulation):
    """Each entry is right except for sums in fp32 and, in bf16, two roundings: of the product, and with its scales."""
    roundoff = 2 * 2.0**-8 if emulation is torch.bfloat16 else 1e-6
    torch.testing.assert_close(got.double(), want, rtol=roundoff, atol=2e-6 * want.abs().max().item())


@pytest.mark.parametrize("splits", [SPLITS, (16, 32), (5,)], ids=str)
def test_two_rotated_operands_are_multiplied_as_they_lie(emulation, splits):
    offsets = ends(*splits)
    dy, x = by_columns((ROTATED, ROTATED), operands(used=sum(splits)), offsets)
    want, got = wgrad_where_it_lies(dy, x, splits), quantized_products.grouped_mm_wgrad(dy, x, offsets)
    assert_product(got, want, emulation)
    assert not got[torch.tensor(splits) == 0].any()
    # what became of the zeros of the padding counts
    assert (error(wgrad_dequantized(dy, x, splits), want) > 1e-3) == bool(sum(splits) % 16)


@pytest.mark.parametrize("name", ROLES)
def test_a_weight_gradient_under_every_recipe(emulation, name):
    roles = nvfp4_roles(hadamard=False, stochastic_rounding=False) if name == "nvfp4" else ROLES[name]
    offsets = ends(*SPLITS)
    dy, x = by_columns((roles.grad, roles.input), operands(torch.bfloat16), offsets)
    got, want = quantized_products.grouped_mm_wgrad(dy, x, offsets), wgrad_dequantized(dy, x, SPLITS)
    assert got.dtype is torch.bfloat16
    assert error(got, want) < error_of_roundings(2, torch.bfloat16)  # of the result; in bf16, of the product too
    assert not got[1].any()


@pytest.mark.parametrize("other", [formats.nvfp4(), Quantizer(formats.mxfp8(), hadamard=True), None], ids=str)
def test_what_cannot_be_multiplied_as_it_lies_is_rotated_back(emulation, other):
    """One operand alone is rotated, or the other's blocks are longer, so that they are padded otherwise."""
    offsets = ends(*SPLITS)
    dy, x = operands()
    dy = fm.quantize(dy, ROTATED, -2, offsets=offsets)
    x = x if other is None else fm.quantize(x, other, -2, offsets=offsets)
    want = wgrad_dequantized(dy, x, SPLITS)
    # operands are rounded to bf16, since those that were rotated back need more bits
    bound = 1e-6 if emulation is torch.float32 else 5e-3
    assert error(quantized_products.grouped_mm_wgrad(dy, x, offsets), want) < bound


@pytest.mark.parametrize("by_expert", [False, True], ids=["rows alone", "by expert"])
def test_the_dense_weight_gradient_is_of_the_same_kind(emulation, by_expert):
    splits = SPLITS if by_expert else (USED,)
    rows = operands() if by_expert else [t[:USED] for t in operands()]
    dy, x = by_columns((ROTATED, ROTATED), rows, ends(*splits) if by_expert else None)
    want = wgrad_where_it_lies(dy, x, splits).sum(0)
    exact = emulation is torch.float32 or by_expert  # the scales of experts cannot be applied to a sum over all rows
    assert error(quantized_products.mm_wgrad(dy, x), want) < (1e-6 if exact else 5e-3)
    assert error(wgrad_dequantized(dy, x, splits).sum(0), want) > 1e-3


@pytest.mark.parametrize("name", ROLES)
def test_dense_products_under_every_recipe(emulation, name):
    roles = nvfp4_roles(hadamard=False, stochastic_rounding=False) if name == "nvfp4" else ROLES[name]
    dy, x = (t[:USED] for t in operands(torch.bfloat16))
    weight = torch.randn(N, K).bfloat16()
    along_k, along_n = (fm.quantize(weight, roles.weight, axis) for axis in (-1, -2))
    x_rows, dy_rows = fm.quantize(x, roles.input, -1), fm.quantize(dy, roles.grad, -1)
    x_columns, dy_columns = fm.quantize(x, roles.input, -2), fm.quantize(dy, roles.grad, -2)

    def fp64(t):
        return (t if isinstance(t, torch.Tensor) else t.dequantize(torch.float32)).double()

    for got, want in (
        (quantized_products.mm(x_rows, along_k, weight_axis=-1), fp64(x_rows) @ fp64(along_k).T),
        (quantized_products.mm(dy_rows, along_n, weight_axis=-2), fp64(dy_rows) @ fp64(along_n)),
        (quantized_products.mm(x, along_k, weight_axis=-1), fp64(x) @ fp64(along_k).T),
        (quantized_products.mm_wgrad(dy_columns, x_columns), fp64(dy_columns).T @ fp64(x_columns)),
        (quantized_products.mm_wgrad(dy, x_columns), fp64(dy).T @ fp64(x_columns)),
    ):
        assert got.dtype is torch.bfloat16
        assert got.shape == want.shape
        assert error(got, want) < 3.5e-3  # in bf16, two roundings of the result, or one of an operand


@pytest.mark.parametrize(
    ("capability", "has_kernel"),
    [((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)],
    ids=str,
)
def test_in_bf16_where_torch_has_such_a_grouped_product(monkeypatch, capability, has_kernel):
    asked = grouped_gemm._has_device_side_grouped_mm.__wrapped__  # what it says is kept, of every device
    monkeypatch.setattr(grouped_gemm, "_has_device_side_grouped_mm", asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    gpu = torch.device("cuda", 0)
    assert quantized_products._in_bf16(torch.bfloat16, gpu) is has_kernel
    assert grouped_gemm.runs_on_device(gpu, torch.bfloat16, K, N) is has_kernel
    assert not quantized_products._in_bf16(torch.float32, gpu)
    assert not quantized_products._in_bf16(torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not quantized_products._in_bf16(torch.bfloat16, gpu)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 5, 4), (6, 3, 0, 4), (6, 3, 5, 0), (6, 0, 5, 4)], ids=str)
def test_a_product_of_nothing_reads_no_offsets(shape, dtype, monkeypatch):
    """The loop over the experts, which reads them on the host, is left alone, as on a GPU without a grouped product."""
    monkeypatch.setattr(grouped_gemm, "_NATIVE_ON_CPU", set())
    monkeypatch.setattr(grouped_gemm, "_ranges", lambda offsets: pytest.fail("read on the host"))
    rows, experts, k, n = shape
    offsets = ends(*([0, rows // 2, rows // 3][:experts]))
    x, dy, weight = (torch.randn(s, dtype=dtype) for s in ((rows, k), (rows, n), (experts, n, k)))
    found = {}
    for name, run, a, b, wanted in (
        ("y", quantized_products.grouped_mm, x, weight, (rows, n)),
        ("dx", quantized_products.grouped_mm_dgrad, dy, weight, (rows, k)),
        ("dw", quantized_products.grouped_mm_wgrad, dy, x, (experts, n, k)),
    ):
        if a.numel() and b.numel():
            with pytest.raises(pytest.fail.Exception, match="read on the host"):
                run(a, b, offsets)
            continue
        found[name] = run(a, b, offsets)
        assert (found[name].shape, found[name].dtype) == (wanted, dtype)
        assert not found[name].any(), name
    assert found
