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
from blackwell.compiler import Compiler
from blackwell.expert_mlp import Glue, Problem, by_columns, in_fusedmoe, in_plain_pytorch, through_kernels
from blackwell.on_cpu import blackwell_on_cpu
from cudnn.gemm.cutedsl.grouped import (
    GroupedGemmQuantSm100,
    grouped_gemm_dglu_wrapper_sm100,
    grouped_gemm_dsrelu_wrapper_sm100,
    grouped_gemm_glu_wrapper_sm100,
    grouped_gemm_quant_wrapper_sm100,
    grouped_gemm_srelu_wrapper_sm100,
    grouped_gemm_wgrad_wrapper_sm100,
)

import fusedmoe as fm
from fusedmoe.numerics import formats

swizzling = import_module("fusedmoe.numerics.formats.swizzle")
BF16 = torch.bfloat16
E, R, H, I = 4, 601, 256, 192  # noqa: E741  (compiled kernels have the number of experts of those in sm100_machine.py)
SPLITS = torch.tensor([300, 0, 257, 1])  # uneven, without rows, with one row; 43 rows belong to no expert
GLUE = Glue()
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


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "SwiGLU" else pytest.mark.slow) for n in PROBLEMS])
def test_an_expert_mlp_equals_the_same_arithmetic_and_the_emulation(name, launches):
    p, op = PROBLEMS[name]
    results = through_kernels(p, GLUE)
    plain, emulated = results.errors(in_plain_pytorch(p)), results.errors(in_fusedmoe(p, op))
    assert max(plain.values()) <= 4e-3, plain
    assert max(emulated.values()) <= 3e-2, emulated
    # on the device only: nothing of a launch shows it
    assert [launch.kernel.discrete_col_sfd for launch in launches if "mSFDCol_mnl" in launch] == [True, True]


@pytest.mark.parametrize(
    "mistake",
    {
        "gate and up not interleaved": {"interleave": lambda w: w, "deinterleave": lambda w: w},
        "up before gate": {"interleave": lambda w: GLUE.interleave(w.roll(I, -2))},
        "scales of rows not swizzled": {"swizzle_rows": lambda scale: scale.flatten()},
        "scales of columns as one matrix": {"swizzle_columns": lambda scale, ends: swizzling.swizzle(scale)},
    }.items(),
    ids=lambda mistake: mistake[0],
)
def test_mistakes_in_layouts_show(mistake, launches):
    assert_shown(**mistake[1])


@pytest.mark.slow  # it takes kernels of its own
def test_scales_of_columns_that_kernels_write_as_one_matrix_show(launches):
    assert_shown(discrete_col_sfd=False)


def assert_shown(**mistake):
    p, _ = PROBLEMS["SwiGLU"]
    errors = through_kernels(p, replace(GLUE, **mistake)).errors(in_plain_pytorch(p))
    # NaN where something was read that was not written
    assert any(not error <= 0.2 for error in errors.values()), errors


def test_experts_padded_to_128_rows_are_refused(launches):
    """The device code would read and write rows of the next expert; cudnn-frontend does not check it."""
    p, _ = PROBLEMS["SwiGLU"]
    p = replace(p, splits=torch.tensor([300, 0, 100, 1]))
    with pytest.raises(AssertionError, match="ends at row 384, which is not a multiple of 256"):
        through_kernels(p, replace(GLUE, block=128))


def operands(rows, depth, width):
    """Return random operands of a product, and the product in fp32.

    The second expert has 256 rows, the fourth the rest. As many experts as above: their number is compiled in.
    """
    generator = torch.Generator().manual_seed(rows + depth + width)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    a, b = fm.quantize(randn(rows, depth), formats.mxfp8()), fm.quantize(randn(E, width, depth), formats.mxfp8())
    ends = torch.tensor([0, 256, 256, rows], dtype=torch.int32)
    packed = calls.product(a.data, swizzling.swizzle(a.scale), b.data, swizzling.swizzle(b.scale).flatten(), ends)
    a, b = a.dequantize(torch.float32), b.dequantize(torch.float32)
    return packed, torch.cat([a[:256] @ b[1].T, a[256:] @ b[3].T])


def test_descriptors_and_pointers_of_a_launch(launches):
    rows, depth, width = 768, 384, 320
    packed, _ = operands(rows, depth, width)
    prob = torch.rand(rows)
    got = calls.glu(packed, prob)
    (launch,) = launches
    assert (launch.name, launch.kernel.act_func) == ("kernel", "swiglu")
    assert (launch.grid, launch.cluster) == ((2, 1, 74), (2, 1, 1))  # as many clusters as 148 SMs hold
    assert launch.block == (7 * 32, 1, 1)
    assert 200_000 < launch.shared <= 227 * 1024

    a, b, c = (launch.tensor_map(name) for name in ("tma_atom_a", "tma_atom_b", "tma_atom_c"))
    assert (a.address, a.shape, a.strides, a.box) == (packed["a"].data_ptr(), (depth, rows), (1, depth), (128, 128))
    assert (b.address, b.shape) == (packed["b"].data_ptr(), (depth, width, E))
    assert (b.strides, b.box) == ((1, depth, depth * width), (128, 128, 1))
    assert (c.address, c.shape, c.strides, c.swizzle) == (got["c"].data_ptr(), (width, rows), (2, 2 * width), 128)
    # tiles of 128 x 4 scales in units of 2 and of 8 bytes: along K, along the rows, experts
    sfa, sfb = launch.tensor_map("tma_atom_sfa"), launch.tensor_map("tma_atom_sfb")
    assert (sfa.address, sfa.shape, sfa.strides) == (packed["sfa"].data_ptr(), (256, 6, 3), (2, 512 * 3, 512))
    assert (sfb.shape, sfb.strides) == ((64, 3, 3, E), (8, 512 * 3, 512, 512 * 9))

    assert launch.address("prob") == prob.data_ptr()
    assert launch.address("mSFDCol_mnl") == got["sfd_col"].data_ptr()
    assert torch.equal(launch.array("padded_offsets", E, torch.int32), packed["padded_offsets"])
    assert torch.equal(launch.tensor("tma_atom_a", torch.float8_e4m3fn), packed["a"])


@pytest.mark.slow  # whole chains of test_sm100_rules.py have this activation
def test_numbers_of_the_clamped_activation(launches):
    """They are parameters of glu and constants of dglu."""
    clamp = {"linear_offset": 0.5, "geglu_alpha": 1.25, "glu_clamp_max": 3.0, "glu_clamp_min": -2.0}
    packed, _ = operands(512, 128, 128)
    c = calls.glu(packed, torch.ones(512), clamp=clamp)["c"]
    calls.dglu(operands(512, 128, 64)[0], torch.ones(512), c, clamp=clamp)
    forward, backward = launches
    assert {name: forward.number(name) for name in clamp} == {name: backward.number(name) for name in clamp} == clamp
    assert set(clamp) <= set(forward.parameters)
    assert set(clamp) <= set(backward.constants)


@pytest.mark.parametrize("width", [128, 320])
def test_glu_and_quant_add_a_bias(width, launches):
    rows = 512
    packed, expected = operands(rows, 128, width)
    prob, bias = torch.rand(rows), torch.randn(E, width).to(BF16)
    each = bias.float()[[1, 3]].repeat_interleave(256, 0)
    assert_near(calls.glu(packed, prob, bias=bias)["c"], expected + each)
    assert_near(calls.quant(packed, bias=bias, prob=prob), expected + prob[:, None] * each)  # prob times the bias only
    assert [launch.kernel.enable_bias for launch in launches] == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(BF16, marks=pytest.mark.slow)], ids=["fp32", "bf16"])
def test_wgrad_adds_to_its_output(dtype, launches):
    p, _ = PROBLEMS["SwiGLU"]
    ends = torch.tensor([256, 256, 512, 512], dtype=torch.int32)
    x, dy = p.x[:512, :128].float(), p.dy[:512, :160].float()
    (dy_codes, sf_dy), (x_codes, sf_x) = by_columns(dy, ends), by_columns(x, ends)
    dy, x = (fm.quantize(t, formats.mxfp8(), axis=-2, offsets=ends).dequantize(torch.float32) for t in (dy, x))
    before = torch.randn(E, 160, 128).to(dtype)
    out = calls.wgrad(dy_codes, x_codes, sf_dy, sf_x, ends, before.clone(), accumulate=True)
    added = torch.stack([dy[a:b].T @ x[a:b] for a, b in ((0, 256), (256, 256), (256, 512), (512, 512))])
    assert_near(out, before + added)
    assert torch.equal(out[1], before[1])  # no rows
    assert [launch.name for launch in launches] == ["helper_kernel", "kernel"]


@pytest.mark.slow  # the chains of test_sm100_rules.py run these kernels
def test_squared_relu_by_the_older_views(launches):
    rows, width = 512, 320
    packed, expected = operands(rows, 128, width)
    prob = torch.rand(rows)
    got = calls.srelu(packed, prob)
    assert_near(got["c"], expected)
    q = fm.quantize(expected.relu().square() * prob[:, None], formats.mxfp8())
    codes, scale = got["d"].float(), swizzling.unswizzle(got["sfd_row"].view(torch.uint8), rows, width // 32)
    assert_near(codes * scales.decoded(scale).repeat_interleave(32, 1), q.dequantize(torch.float32))


def test_one_api_object_serves_any_number_of_rows(launches):
    packed, _ = operands(512, 128, 64)
    api = calls.call(GroupedGemmQuantSm100, packed | {"d": calls.bf16(512, 64)}, {})
    packed, expected = operands(768, 128, 64)
    d = calls.bf16(768, 64)
    api.execute(**execute_names(packed | {"d": d}))
    assert_near(d, expected)
    # and a compiled kernel serves API objects of other sizes
    kept = len(Compiler.kept)
    packed, expected = operands(512, 256, 192)
    assert_near(calls.quant(packed), expected)
    assert len(Compiler.kept) == kept


@pytest.mark.slow  # fusedmoe uses the classes
def test_wrapper_functions_give_what_the_classes_give(launches):
    packed, _ = operands(512, 128, 128)
    prob, norm_const = torch.rand(512), torch.ones(1)
    names, config = execute_names(packed), {"sf_vec_size": 32, "discrete_col_sfd": True}
    quantized = {"d_dtype": torch.float8_e4m3fn, "norm_const_tensor": norm_const, "prob_tensor": prob}

    expected, got = calls.glu(packed, prob), grouped_gemm_glu_wrapper_sm100(**names, **quantized, **config)
    for name in ("c", "d", "d_col", "sfd_row"):
        assert same_bytes(got[f"{name}_tensor"], expected[name]), name
    ends = packed["padded_offsets"]
    columns = expected["d_col"], expected["d_col"].clone(), expected["sfd_col"], expected["sfd_col"].clone()
    summed = grouped_gemm_wgrad_wrapper_sm100(columns[0].T, *columns[1:], ends, sf_vec_size=32)["wgrad_tensor"]
    assert same_bytes(summed, calls.wgrad(*columns, ends))

    packed, _ = operands(512, 128, 64)
    names, dprob = execute_names(packed), torch.zeros(512)
    derived = calls.dglu(packed, prob, expected["c"])
    got = grouped_gemm_dglu_wrapper_sm100(
        **names, **quantized, **config, c_tensor=expected["c"], beta_tensor=torch.ones(E), dprob_tensor=dprob
    )
    assert same_bytes(got["d_row_tensor"], derived["d_row"])
    assert same_bytes(dprob, derived["dprob"])

    got = grouped_gemm_quant_wrapper_sm100(**names, d_dtype=BF16, generate_amax=False, sf_vec_size=32)
    assert same_bytes(got["d_tensor"], calls.quant(packed))


@pytest.mark.slow
def test_the_wrapper_functions_of_squared_relu(launches):
    rows, width = 512, 320
    packed, _ = operands(rows, 128, width)
    prob = torch.rand(rows)
    options = {"norm_const_tensor": torch.ones(1), "d_dtype": torch.float8_e4m3fn, "sf_vec_size": 32}
    expected = calls.srelu(packed, prob)
    views = execute_names(calls.older_views({**packed, "prob": prob, "c": expected["c"], "dprob": torch.zeros(rows)}))
    c, dprob = views.pop("c_tensor"), views.pop("dprob_tensor")
    got = grouped_gemm_srelu_wrapper_sm100(**views, **options, discrete_col_sfd=True)
    assert same_bytes(got["d_tensor"], expected["d"])

    derived = calls.dsrelu(packed, prob, expected["c"])
    got = grouped_gemm_dsrelu_wrapper_sm100(
        **views, **options, c_tensor=c, dprob_tensor=dprob, discrete_col_sfd=True, deterministic=False
    )
    assert same_bytes(got["d_row_tensor"], derived["d_row"])
    assert same_bytes(dprob, derived["dprob"])
    # the wrapper has the kernel write the activation again, by columns
    activation = expected["c"].float().relu().square() * prob[:, None]
    q = fm.quantize(activation, formats.mxfp8(), axis=-2, offsets=packed["padded_offsets"])
    assert same_bytes(got["d_srelu_tensor"], q.data[:, :rows].T)


def execute_names(tensors):
    return {name if name == "padded_offsets" else f"{name}_tensor": t for name, t in tensors.items()}


def same_bytes(a, b):
    return torch.equal(*(t.contiguous().view(torch.uint8).flatten() for t in (a, b)))


@pytest.mark.parametrize("ends", [[0] * E, [0, 0, 0, 512]], ids=["no rows", "all rows at one expert"])
def test_rows_of_no_expert_are_not_written(ends, launches):
    packed, _ = operands(768, 128, 128)
    packed["padded_offsets"] = torch.tensor(ends, dtype=torch.int32)
    got = calls.glu(packed, torch.rand(768))
    written = [~t.float().isnan().any(1) for t in (got["c"], got["d"], got["d_col"])]
    assert [int(rows.sum()) for rows in written] == [ends[-1]] * 3
    assert all(rows[: ends[-1]].all() for rows in written)
    summed = calls.wgrad(got["d_col"], got["d_col"].clone(), got["sfd_col"], got["sfd_col"], packed["padded_offsets"])
    assert [bool(expert.any()) for expert in summed] == [False, False, False, ends[-1] > 0]


def test_nothing_of_it_is_seen_outside_of_cudnn():
    from cudnn.gemm.cutedsl.grouped.quant import api

    names = ["is_available", "current_device", "get_device_capability", "current_stream"]
    before = [torch.empty, api.cute, api.cutlass, *(getattr(torch.cuda, name) for name in names)]
    with blackwell_on_cpu():
        assert torch.cuda.is_available() == before[3]()
        assert not torch.empty(1).is_cuda
        assert api.cute is not before[1]
        assert fm.Sequential(fm.SwiGLU())(torch.ones(1, 4)).device.type == "cpu"
    after = [torch.empty, api.cute, api.cutlass, *(getattr(torch.cuda, name) for name in names)]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert not api._quant_wrapper_memo


def test_scales_equal_those_of_fusedmoe():
    """The soft kernels' own quantizer and tiles, bit for bit."""
    values = torch.randn(256, 192, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 256)[:, None]
    values[3, 32:64] = 0
    codes, scale = scales.quantized(values, 1.0)
    q = fm.quantize(values, formats.mxfp8())
    assert torch.equal(scale, q.scale.view(torch.uint8))
    assert torch.equal(codes.view(torch.uint8), q.data.view(torch.uint8))
    tiles = scales.tiled(scale)
    assert torch.equal(tiles, swizzling.swizzle(q.scale).view(torch.uint8))
    assert torch.equal(scales.untiled(tiles.view(2, 2, 512))[:, :6], scale)


def assert_near(got, expected):
    """Compare by the relative error in the Frobenius norm: that of rounding to bf16 is 2e-3."""
    error = float((got.float() - expected).norm() / expected.norm())
    assert error <= 4e-3, error
