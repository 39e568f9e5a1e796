"""The quantize kernels compile for sm_90a without a GPU: nothing spills, and memory is accessed in wide vectors."""

import itertools
import re

import pytest
import torch
from test_sm90_rows_compile import instructions, starting  # noqa: F401  (a fixture)

from fusedmoe.kernels.rows.quantize.block_functions import bind_quantize_rows, bind_quantize_weight
from fusedmoe.kernels.sm90.products import has_strides, with_strides
from fusedmoe.numerics.formats import E5M2, fp8_block, fp8_row, fp8_tensor, mxfp8, nvfp4

pytest.importorskip("cutlass")

from fusedmoe.kernels.rows.quantize.blocks import CTAS_PER_SM, STRIP, THREADS, VECTOR, QuantizeRows, QuantizeWeight
from fusedmoe.kernels.rows.quantize.dequantize import Dequantize, DequantizeTransposed
from fusedmoe.kernels.rows.quantize.formats import Magnitudes, QuantizeFormat
from fusedmoe.kernels.rows.quantize.gather_codes import ROWS as ROWS_PER_WARP
from fusedmoe.kernels.rows.quantize.gather_codes import GatherCodes
from fusedmoe.kernels.rows.quantize.transpose_codes import TransposeCodes

FORMS = [(True, False), (False, True), (True, True)]
ROWS = [
    QuantizeRows("bf16", "e4m3", *form, True, *how)
    for form, how in itertools.product(FORMS, [(False, False), (True, False), (True, True)])
]
WEIGHTS = [QuantizeWeight("bf16", "e4m3", *form, True) for form in FORMS]
OTHERS = [
    QuantizeRows("fp16", "e5m2", True, True, True, True),
    QuantizeRows("bf16", "e4m3", True, True, False, True),
    QuantizeWeight("fp16", "e5m2", True, True, False),
]
KERNELS = [*ROWS, *WEIGHTS, *OTHERS]
REGISTERS_PER_SM = 1 << 16


# both forms of rows of the source and through an index, both forms of a weight, other dtypes
COVERING = [ROWS[6], ROWS[8], WEIGHTS[2], *OTHERS]


@pytest.mark.parametrize(
    "kernel",
    [*COVERING, *(pytest.param(k, marks=pytest.mark.slow) for k in KERNELS if k not in COVERING)],
    ids=lambda k: k.symbol,
)
def test_compiles_for_hopper(kernel, instructions):  # noqa: F811
    (code,) = instructions(kernel).values()
    assert starting(code, "EXIT")
    assert not starting(code, ("STL", "LDL", "ATOM", "RED"))
    assert bool(starting(code, "CALL")) is not kernel.power_of_two  # the slow path of a division

    loads = [i for i in starting(code, "LDG") if ".NA" in i]
    assert loads == ["LDG.E.NA.128"] * STRIP
    # all rows are on their way before the first is used
    order = [i for i in code if i in loads or i.startswith("VIMNMX.S16x2")]
    assert order[:STRIP] == loads

    stores = starting(code, "STG")
    assert stores.count("STG.E.64") == (STRIP if kernel.rows else 0)  # adjacent lanes write adjacent codes
    assert stores.count("STG.E.128") == (4 if kernel.columns else 0)
    conversions = starting(code, "F2FP.SATFINITE")
    assert len(conversions) == (kernel.rows + kernel.columns) * STRIP * VECTOR // 2


def test_symbols_tell_the_kernels_apart():
    every = [*KERNELS, *OF_FORMATS, *OTHERS_OF_FORMATS]
    assert len({kernel.symbol for kernel in every}) == len(every)


MX, ROW, TENSOR, NV, NV_SQUARE = mxfp8(), fp8_row(), fp8_tensor(), nvfp4(), nvfp4(across=16)
OF_FORMATS = [
    QuantizeFormat("bf16", True, False, False, MX, True, True),
    QuantizeFormat("bf16", True, True, False, MX, True, True),
    QuantizeFormat("bf16", True, False, False, ROW, True, True),
    QuantizeFormat("bf16", True, False, False, TENSOR, True, True),
    QuantizeFormat("bf16", True, False, False, TENSOR, True, True, amax=True),
    QuantizeFormat("bf16", True, False, True, NV, True, True),
    QuantizeFormat("bf16", True, False, True, NV, True, True, stochastic=True),
    QuantizeFormat("bf16", False, False, False, NV_SQUARE, True, True),
]
OTHERS_OF_FORMATS = [
    Magnitudes("bf16", True, False, False, True, True, False, False),
    Magnitudes("bf16", True, False, True, False, False, True, True),
    *[kind("e4m3", "e8m0", 32, 1) for kind in (Dequantize, DequantizeTransposed)],
    *[kind("e2m1", "e4m3", 16, 1) for kind in (Dequantize, DequantizeTransposed)],
]


@pytest.mark.parametrize(
    "kernel",
    # quick: of the kernels of a format, the one with the most steps
    [pytest.param(k, marks=[pytest.mark.slow] if i in (1, 3, 5) else []) for i, k in enumerate(OF_FORMATS)],
    ids=lambda k: k.symbol,
)
def test_formats_compile_for_hopper(kernel, instructions):  # noqa: F811
    (code,) = instructions(kernel).values()
    assert starting(code, "EXIT")
    assert not starting(code, ("STL", "LDL", "ATOM"))
    assert len([i for i in starting(code, "RED") if ".MAX" in i]) == len(starting(code, "REDG")) == kernel.amax
    assert [i for i in starting(code, "LDG") if ".NA" in i] == ["LDG.E.NA.128"] * STRIP
    packed = kernel.bits == 4
    stores = starting(code, "STG")
    assert stores.count("STG.E" if packed else "STG.E.64") == STRIP
    assert stores.count("STG.E.128") == (2 if packed else 4)


@pytest.mark.parametrize("kernel", OTHERS_OF_FORMATS, ids=lambda k: k.symbol)
def test_magnitudes_and_dequantized_values_compile_for_hopper(kernel, instructions):  # noqa: F811
    (code,) = instructions(kernel).values()
    assert starting(code, "EXIT")
    assert not starting(code, ("STL", "LDL", "ATOM", "CALL"))
    if isinstance(kernel, Magnitudes):
        assert starting(code, "LDG.E.NA.128") == ["LDG.E.NA.128"] * STRIP
    else:
        assert {*starting(code, "STG")} == {"STG.E.128"}


def test_copies_of_codes_compile_for_hopper(instructions):  # noqa: F811
    (code,) = instructions(GatherCodes()).values()
    assert not starting(code, ("STL", "LDL"))
    moved = [i for i in code if i.startswith(("LDG.E.NA.128", "STG.E.128"))]
    assert moved == ["LDG.E.NA.128"] * ROWS_PER_WARP + ["STG.E.128"] * ROWS_PER_WARP


def test_transposed_codes_compile_for_hopper(instructions):  # noqa: F811
    (code,) = instructions(TransposeCodes()).values()
    assert starting(code, "EXIT")
    assert not starting(code, ("STL", "LDL", "ATOM", "CALL"))
    assert starting(code, "LDG.E.NA") == ["LDG.E.NA.64"] * STRIP
    assert starting(code, "STG.E.128") == ["STG.E.128"] * 4
    assert len(starting(code, "PRMT")) >= STRIP * VECTOR // 2


def test_three_ctas_fit_an_sm(monkeypatch, tmp_path):
    """By registers: ptxas has to keep to the bound, or the loads in flight would be a third less."""
    kernel = ROWS[-1]
    found = re.findall(r"\.minnctapersm (\d+)", _ptx(kernel, monkeypatch, tmp_path))
    assert found == [str(CTAS_PER_SM)]
    assert REGISTERS_PER_SM // (CTAS_PER_SM * THREADS) >= 80


def _ptx(kernel, monkeypatch, folder):
    import cutlass.cute as cute

    plain, keep = cute.compile, f"--keep-ptx --dump-dir {folder}"
    monkeypatch.setattr(cute, "compile", lambda *a, options, **k: plain(*a, options=f"{options} {keep}", **k))
    return kernel.compile().__ptx__


@pytest.mark.parametrize(("rows", "columns"), [(0, 128), (64, 0)])
@pytest.mark.parametrize("experts", [None, 3])
def test_nothing_is_launched_without_rows_or_columns(rows, columns, experts):
    """On the CPU, where a launch would raise."""
    x = torch.empty(rows, columns, dtype=torch.bfloat16)
    offsets = None if experts is None else torch.zeros(experts, dtype=torch.int32)
    (codes, scale), (codes_t, scale_t) = bind_quantize_rows(x, fp8_block(), offsets, columns=True)(x, offsets)
    assert codes.shape == (rows, columns)
    assert scale.shape == (rows, -(-columns // 128))
    assert codes_t.shape[0] == columns
    assert scale_t.shape == (columns, -(-codes_t.shape[1] // 128))


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


def test_an_empty_weight():
    weight = torch.empty(0, 128, 256, dtype=torch.bfloat16)
    (codes, scale), (codes_t, scale_t) = bind_quantize_weight(weight, fp8_block(E5M2, 128), columns=True)(weight)
    assert (codes.shape, scale.shape) == ((0, 128, 256), (0, 1, 2))
    assert (codes_t.shape, scale_t.shape) == ((0, 256, 128), (0, 2, 1))
    assert codes.dtype is codes_t.dtype is torch.float8_e5m2
