"""NVIDIA's Blackwell grouped GEMMs with device code in PyTorch (``tests/blackwell``): layouts, numerics, mistakes."""

import shutil
from dataclasses import replace
from importlib import import_module

import pytest
import torch

pytest.importorskip("cutlass")
pytest.importorskip("tvm_ffi")
pytest.importorskip("cudnn.gemm.cutedsl.grouped", exc_type=ImportError)
if shutil.which("gcc") is None:
    pytest.skip("needs gcc, which links the kernels' host code", allow_module_level=True)

from blackwell import calls, scales
from blackwell.expert_mlp import Glue, Problem, in_fusedmoe, in_plain_pytorch, through_kernels
from blackwell.on_cpu import blackwell_on_cpu

import fusedmoe as fm
from fusedmoe import formats

swizzling = import_module("fusedmoe.formats.swizzle")
BF16 = torch.bfloat16
E, R, H, I = 5, 700, 256, 192
SPLITS = torch.tensor([300, 0, 257, 1, 99])  # uneven, without rows, with one row; 43 rows belong to no expert
CLAMP = {"linear_offset": 1.0, "geglu_alpha": 1.702, "glu_clamp_max": 7.0, "glu_clamp_min": -7.0}


@pytest.fixture
def launches():
    with blackwell_on_cpu() as launches:
        yield launches


def problem(act, clamp=None, scale=0.06):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    w1 = (randn(E, 2 * I if act == "swiglu" else I, H) * scale).to(BF16)
    w2 = (randn(E, H, I) * 0.06).to(BF16)
    probs = torch.rand(R, generator=generator)
    return Problem(act, clamp, w1, w2, randn(R, H).to(BF16), randn(R, H).to(BF16), probs, SPLITS)


PROBLEMS = {
    "SwiGLU": (problem("swiglu"), fm.SwiGLU()),
    # a large weight: one in six elements of gate or up is beyond the limit
    "clamped SwiGLU": (problem("swiglu", CLAMP, scale=0.3), fm.SwiGLU(limit=7.0, alpha=1.702, offset=1.0)),
    "squared ReLU": (problem("srelu"), fm.SquaredReLU()),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_expert_mlp_equals_the_same_arithmetic_and_the_emulation(name, launches):
    p, op = PROBLEMS[name]
    results = through_kernels(p, Glue())
    plain, emulated = results.errors(in_plain_pytorch(p)), results.errors(in_fusedmoe(p, op))
    print(name, plain, emulated)
    assert max(plain.values()) <= 4e-3, plain
    assert max(emulated.values()) <= 3e-2, emulated
    # on the device only: nothing of a launch shows it
    assert [l.kernel.discrete_col_sfd for l in launches if "mSFDCol_mnl" in l] == [True, True]
