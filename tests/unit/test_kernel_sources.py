"""The sources of a kernel: every module whose text its machine code depends on, and no others."""

import pytest

pytest.importorskip("cutlass")

from fusedmoe.kernels.build.shipped import shipped
from fusedmoe.kernels.build.sources import sources_of


def sources(symbol):
    kernel = next(k for k in shipped("sm_90a") if k.symbol.startswith(symbol))
    return {name.removeprefix("fusedmoe.kernels.") for name in kernel.sources}


def test_parts_in_fields_count():
    """An epilogue's outputs, which the kernel's own module does not import."""
    assert "sm90.epilogue.quantized" in sources("sm90_ragged_m_e4m3_bk_swiglu_keep_e4m3_")
    plain = sources("sm90_ragged_m_bf16_bk_plain_")
    assert plain == {
        "device.codes", "device.formulas", "device.gather", "device.warps", "sm90.epilogue.outputs",
        "sm90.gemm.arguments", "sm90.gemm.common",
        "sm90.gemm.operands", "sm90.gemm.ragged_m", "sm90.gemm.scheduler", "sm90.tiles.config", "sm90.tiles.legal",
        "fusedmoe.numerics.activations",
    }  # fmt: skip


def test_imports_of_imports_count():
    assert {"rows.quantize.transpose_rows", "rows.quantize.formats", "device.codes"} <= sources("sm90_transpose_rows")


def test_host_code_is_no_source():
    for arch in ("sm_90a", "sm_100a"):
        for kernel in shipped(arch):
            folders = {name.split(".")[2] for name in sources_of(kernel)}
            assert type(kernel).__module__ in kernel.sources
            assert not folders & {"build", "torch", "options"}
            assert not any(name.endswith(("functions", "products", ".shipped")) for name in kernel.sources)
