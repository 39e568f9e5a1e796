"""Whole chains in NVFP4 on the rules for Blackwell, forward and backward, on a CPU: through NVIDIA's wrappers, with
device code in PyTorch. test_sm100_rules.py has MXFP8.
"""

import shutil

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")
pytest.importorskip("cudnn.gemm.cutedsl.grouped", exc_type=ImportError)
if shutil.which("gcc") is None:
    pytest.skip("needs gcc, which links the kernels' host code", allow_module_level=True)

from sm100_chains import (
    check,
    clamped,
    device_in_pytorch,  # noqa: F401  (a fixture)
    launched,
    launches_of_test,  # noqa: F401  (a fixture)
    rules,
    swiglu,
    unfused_ops,
)
from sm100_machine import (
    blackwell_machine,  # noqa: F401  (a fixture)
    experts,
    inputs,
    tokens,
)

import fusedmoe as fm
from fusedmoe.recipes import NVFP4

pytestmark = pytest.mark.usefixtures("builtin_rules", "blackwell_machine")


def test_whole(launches):
    plan, _ = check(experts(swiglu(), scale=True), tokens(), recipe=NVFP4(stochastic_rounding=False), same=False, emulation=0.1, **inputs(scale=True))
    print(plan)
    print(rules(plan), unfused_ops(plan), launched(launches))
