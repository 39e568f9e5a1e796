"""The quantize kernels for Blackwell compile without a GPU, for Hopper too: nothing spills, and accesses are wide."""

import itertools
from dataclasses import replace

import pytest
import torch
from test_sm90_rows_compile import instructions, starting  # noqa: F401  (a fixture)

from fusedmoe.kernels.sm100.quantize_functions import PACKING, SCALES, TILE, bind_quantize_packed

pytest.importorskip("cutlass")

from fusedmoe.kernels.rows.quantize.blocks import CTAS_PER_SM, STRIP, VECTOR
from fusedmoe.kernels.sm100 import quantize
from fusedmoe.kernels.sm100.quantize import QuantizePacked, QuantizePackedWeight

FORMS = [(True, False), (False, True), (True, True)]
KERNELS = [
    *(QuantizePacked("bf16", False, *form) for form in FORMS),
    *(QuantizePacked(dtype, True, True, True, gathered) for dtype, gathered in (("bf16", True), ("fp16", False))),
]
WEIGHTS = [QuantizePackedWeight("bf16", True, *form) for form in FORMS]
WEIGHTS += [QuantizePackedWeight("fp16", False, True, True)]


def on_each_architecture(kernels, others, slow=()):
    """(kernel, architecture): kernels on one architecture, without the slow ones, and the first on the others, in every
    run.
    """
    return [
        pytest.param(k, arch, marks=[pytest.mark.slow] if k in slow or (arch in others and k is not kernels[0]) else [],
                     id=f"{k.symbol}-{arch}")
        for k in kernels for arch in ("sm_100a", *others)
    ]  # fmt: skip


@pytest.mark.parametrize(("kernel", "arch"), on_each_architecture(KERNELS, ("sm_90a", "sm_103a"), slow=KERNELS[1:3]))
def test_compiles(kernel, arch, instructions):  # noqa: F811
    (code,) = instructions(replace(kernel, arch=arch)).values()
    assert starting(code, "EXIT")
    assert not starting(code, ("STL", "LDL", "CALL", "ATOM", "RED"))
    forms = kernel.rows + kernel.columns

    loads = [i for i in starting(code, "LDG") if ".NA" in i]
    assert loads == ["LDG.E.NA.128"] * STRIP
    # all rows are on their way before the first is used
    order = [i for i in code if i in loads or i.startswith("VIMNMX.S16x2")]
    assert order[:STRIP] == loads

    stores = starting(code, "STG")
    assert stores.count("STG.E.64") == forms * STRIP  # adjacent lanes write adjacent codes
    assert stores.count("STG.E.128") == len(stores) - forms * STRIP == forms  # scales
    assert len(starting(code, "F2FP.SATFINITE")) == forms * STRIP * VECTOR // 2


@pytest.mark.parametrize(("kernel", "arch"), on_each_architecture(WEIGHTS, ("sm_90a",), slow=WEIGHTS[1:2]))
def test_weights_compile(kernel, arch, instructions):  # noqa: F811
    (code,) = instructions(replace(kernel, arch=arch)).values()
    assert starting(code, "EXIT")
    assert not starting(code, ("STL", "LDL", "CALL", "ATOM", "RED"))
    assert starting(code, "LDG") == ["LDG.E.NA.128"] * STRIP
    codes = STRIP * VECTOR // 16  # stores of codes by columns
    stores = ["STG.E.64"] * (STRIP * kernel.rows) + ["STG.E.128"] * (codes * kernel.columns)
    assert sorted(starting(code, "STG")) == sorted(stores + ["STG.E.128"] * (kernel.rows + kernel.columns))
    assert len(starting(code, "F2FP.SATFINITE")) == (kernel.rows + kernel.columns) * STRIP * VECTOR // 2


def test_symbols_tell_the_kernels_apart():
    every = [
        made
        for dtype in ("bf16", "fp16")
        for how in itertools.product((False, True), repeat=3)
        if any(how[1:])
        for made in (*(QuantizePacked(dtype, *how, g) for g in (False, True)), QuantizePackedWeight(dtype, *how))
    ]
    assert len({kernel.symbol for kernel in every}) == len(every)


def test_three_ctas_fit_an_sm():
    """By shared memory, of which most is left to the L1 cache."""
    assert (quantize.PACKING, quantize.TILE, quantize.SCALES) == (PACKING, TILE, SCALES)
    assert CTAS_PER_SM * 4 <= 228 * quantize.SHARED_PERCENT // 100  # KiB, with that of the system
    assert CTAS_PER_SM * 20 <= 228 * quantize.SHARED_PERCENT_OF_WEIGHTS // 100


@pytest.mark.parametrize(("rows", "columns"), [(0, 128), (64, 0)])
@pytest.mark.parametrize("gathered", [False, True], ids=["", "index"])
def test_nothing_is_launched_without_rows_or_columns(rows, columns, gathered):
    """On the CPU, where a launch would raise."""
    x = torch.empty(rows, columns, dtype=torch.bfloat16)
    offsets = torch.zeros(3, dtype=torch.int32)
    index = torch.zeros(rows, dtype=torch.int32) if gathered else None
    forms = bind_quantize_packed(x, offsets, index, columns=True, halves=True)(x, offsets, index)
    assert len(forms) == 2
    for codes, scale in forms:
        assert codes.shape == (3 * PACKING if rows else 0, columns)
        assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
        assert scale.shape == (0,)
