"""The kernel of packed rows in NVFP4 compiles for Blackwell and for Hopper, without spilled registers."""

import itertools
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, as the kernels do")

from test_sm100_quantize_compile import instructions, on_each_architecture, starting  # noqa: F401  (a fixture)

from fusedmoe.kernels.rows.quantize.blocks import STRIP
from fusedmoe.kernels.sm100 import quantize_nvfp4
from fusedmoe.kernels.sm100.quantize_functions import PACKING, SCALES, bind_quantize_packed_nvfp4
from fusedmoe.kernels.sm100.quantize_nvfp4 import QuantizePackedFormat
from fusedmoe.numerics.formats import nvfp4
from fusedmoe.numerics.formats.groups import PACKED_ROWS

KERNELS = [
    QuantizePackedFormat("bf16", True, gathered, rotated, nvfp4(), rows, columns, stochastic, halves=halves)
    for gathered, rotated, rows, columns, stochastic, halves in (
        (False, False, True, False, False, False), (True, True, True, True, False, False),
        (False, True, True, True, True, True), (True, True, False, True, True, False),
    )
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "arch"), on_each_architecture(KERNELS, ("sm_90a", "sm_103a"), slow=KERNELS[1::2]))
def test_compiles(kernel, arch, instructions):  # noqa: F811
    (code,) = instructions(replace(kernel, arch=arch)).values()
    assert starting(code, "EXIT")
    assert not starting(code, ("STL", "LDL", "ATOM", "RED"))  # divisions have slow paths, which are calls
    # all rows are on their way before the first is used
    assert len([i for i in starting(code, "LDG") if ".NA.128" in i]) == STRIP


def test_symbols_tell_the_kernels_apart():
    every = [
        QuantizePackedFormat(dtype, True, *how[:2], nvfp4(), *how[2:5], halves=how[5])
        for dtype in ("bf16", "fp16")
        for how in itertools.product((False, True), repeat=6)
        if any(how[2:4])
    ]
    assert len({kernel.symbol for kernel in every}) == len(every)
    assert (quantize_nvfp4.PACKING, quantize_nvfp4.SCALES) == (PACKING, SCALES) == (PACKED_ROWS, 512)


@pytest.mark.parametrize(("rows", "columns"), [(0, 128), (64, 0)])
def test_nothing_is_launched_without_rows_or_columns(rows, columns):
    """On the CPU, where a launch would raise."""
    x, offsets = torch.empty(rows, columns, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int32)
    factors = (torch.ones(3), torch.ones(3))
    forms = bind_quantize_packed_nvfp4(x, offsets, columns=True)(x, offsets, factors)
    packed = 3 * PACKING if rows else 0
    assert [codes.shape for codes, _ in forms] == [(packed, columns // 2), (columns, packed // 2)]
    assert all(scale.shape == (0,) and scale.dtype is torch.float8_e4m3fn for _, scale in forms)
