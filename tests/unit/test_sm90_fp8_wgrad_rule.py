"""``sm90.fp8_grouped_wgrad`` on the CPU: plans, and results with a stand-in for the kernel.

All other steps run in plain PyTorch, so results agree bit for bit with those of the unfused chain.
"""

import pytest
import torch
from kit.toy import only_plan, outcome, status

import fusedmoe as fm
from fusedmoe import FusionError, Status
from fusedmoe.builtin_rules.products.fp8 import on_readable_codes
from fusedmoe.builtin_rules.products.wgrad import Fp8GroupedWgrad
from fusedmoe.kernels.build import toolkit
from fusedmoe.kernels.sm90 import products
from fusedmoe.kernels.sm90.products import has_strides
from fusedmoe.kernels.torch.quantized_products import grouped_mm_wgrad
from fusedmoe.numerics.formats import E5M2, QuantizedTensor, Quantizer, ScaleRule, fp8_block, fp8_row, fp8_tensor, mxfp8
from fusedmoe.numerics.recipes import FP8Block

RULE = "sm90.fp8_grouped_wgrad"
BF16 = torch.bfloat16
E, H, N = 4, 32, 48
SPLITS, TAIL = (130, 0, 5, 1), 3
calls = []


def bind_grouped_wgrad(
    dy, x, offsets, dtype, accumulate, options, gather=None, gathered=None, beside=False, *, transposed=False
):
    """The function that the kernel has, of operands that it can read."""

    assert not beside
    assert gather is gathered is None
    num_rows, by_expert = dy.codes.shape[1], dy.scale.dim() == 1

    def run(dy, x, offsets, out):
        (dy, dy_scale), (x, x_scale) = dy, x
        calls.append({"dtype": dtype, "accumulate": accumulate, "codes": dy.dtype, "scale": dy_scale.stride()})
        for codes, scale in ((dy, dy_scale), (x, x_scale)):
            assert codes.stride(1) == 1
            assert codes.stride(0) % 16 == 0
            assert scale.shape == ((E,) if by_expert else (len(codes), codes.shape[1] // 128))
            assert has_strides(scale)
        format = fp8_tensor if by_expert else fp8_block
        of_element = {torch.float8_e4m3fn: format(), torch.float8_e5m2: format(E5M2)}
        a, b = (
            QuantizedTensor(codes, scale, of_element[codes.dtype], -2, (num_rows, len(codes)), result, offsets=offsets)
            for codes, scale in ((dy, dy_scale), (x, x_scale))
            for result in (BF16 if dtype is torch.float32 and accumulate else dtype,)
        )
        dw = grouped_mm_wgrad(a, b, offsets)
        return out.add_(dw) if accumulate else dw

    return run


@pytest.fixture(autouse=True)
def hopper_machine(monkeypatch):
    """The CPU says that it is an sm_90 GPU, which has one kernel."""
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
    monkeypatch.setattr(products, "bind_grouped_wgrad", bind_grouped_wgrad)
    monkeypatch.setattr(toolkit, "missing_packages", lambda: ())
    calls.clear()
    with fm.register(Fp8GroupedWgrad):
        yield


def layer(dtype=BF16, hidden=H, width=N, **settings):
    return fm.Sequential(fm.GroupedLinear(E, hidden, width, dtype=dtype, **settings))


def rows(dtype=BF16, hidden=H):
    x = torch.randn(sum(SPLITS) + TAIL, hidden, dtype=dtype)
    x[sum(SPLITS) :] = torch.nan
    return x.requires_grad_()


def splits():
    return {"splits": torch.tensor(SPLITS)}


def both_ways(chain, x, recipe="fp8_block"):
    with fm.recipe(recipe):
        with fm.disabled(RULE):
            expected = outcome(chain, x, **splits())
            assert not calls
        got = outcome(chain, x, **splits())
        plan = only_plan(chain, x, **splits())
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert want.any(), f"{name}: zeros would pass"
        assert torch.equal(got[name], want), name
    return plan


@pytest.mark.parametrize("hybrid", [False, True], ids=["e4m3", "hybrid"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["fp32", ""])
def test_one_launch_multiplies_columns(power_of_two, hybrid):
    plan = both_ways(layer(), rows(), FP8Block(hybrid=hybrid, power_of_two=power_of_two))
    (step,) = [s for s in plan.steps if s.rule == RULE]
    assert step.launches == 1
    codes = torch.float8_e5m2 if hybrid else torch.float8_e4m3fn
    assert calls == [{"dtype": BF16, "accumulate": False, "codes": codes, "scale": (1, N)}]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_result_has_the_dtype_of_the_gradient(dtype):
    both_ways(layer(dtype), rows(dtype=dtype))
    assert [c["dtype"] for c in calls] == [dtype]


def test_main_grad():
    chain, x = layer(accumulate_into_main_grad=True), rows()
    before = torch.randn(E, N, H)
    with fm.recipe("fp8_block"):
        found = []
        for disabled in ((RULE,), ()):
            chain[0].weight.main_grad = before.clone()
            with fm.disabled(*disabled):
                outcome(chain, x, **splits())
            found.append(chain[0].weight.main_grad)
    assert calls == [{"dtype": torch.float32, "accumulate": True, "codes": torch.float8_e4m3fn, "scale": (1, N)}]
    assert torch.equal(*found)
    assert not torch.equal(found[1], before)


@pytest.mark.parametrize("how", ["strides", "address"])
def test_a_main_grad_that_the_kernel_cannot_add_to(how):
    chain, x = layer(accumulate_into_main_grad=True), rows()
    around = torch.zeros(E * N * H + 4)
    main_grad = around[1:-3].view(E, N, H) if how == "address" else around[:-4].view(E, H, N).mT
    chain[0].weight.main_grad = main_grad
    with fm.recipe("fp8_block"):
        outcome(chain, x, **splits())
        assert main_grad.any()
        assert not calls
        with fm.strict(), pytest.raises(FusionError, match=r"main_grad (is not contiguous|does not begin)"):
            outcome(chain, x, **splits())


def test_codes_that_tma_cannot_read_are_copied():
    """A view of a matrix with rows of other lengths."""
    around = torch.zeros(8, 136, dtype=torch.uint8)
    odd, good = around[:, :128], torch.ones(8, 128, dtype=torch.uint8)
    given = []
    run = on_readable_codes(lambda *tensors: given.append(tensors), odd, good)
    run(odd, "scale of a", good, "scale of b", "offsets")
    ((a, *others),) = given
    assert a.stride() == (128, 1)
    assert torch.equal(a, odd)
    assert others[1] is good
    assert [others[0], *others[2:]] == ["scale of a", "scale of b", "offsets"]


def test_no_rows():
    x = torch.empty(0, H, dtype=BF16, requires_grad=True)
    chain = layer()
    with fm.recipe("fp8_block"):
        chain(x, splits=torch.zeros(E, dtype=torch.int64)).sum().backward()
    assert not calls
    assert not chain[0].weight.grad.any()


# ------------------------------------------------------------------------------------------------ must not fuse

BLOCK = fp8_block()
DECLINED = {
    "mxfp8": (mxfp8(), mxfp8(), "no kernel multiplies rows in mxfp8 e4m3 1x32 yet: expected blocks of 1x128 values"),
    "per row": (fp8_row(), fp8_row(), "no kernel multiplies rows in fp8 e4m3 per-row yet"),
    "e5m2 rows": (fp8_block(E5M2), BLOCK, "wgrad.input is e5m2: expected e4m3"),
    "rotated": (Quantizer(BLOCK, hadamard=True), Quantizer(BLOCK, hadamard=True), "grad_output is rotated"),
    "rotated rows": (Quantizer(BLOCK, hadamard=True), BLOCK, "wgrad.input is rotated: expected hadamard=False"),
    "e8m0": (
        fm.numerics.formats.Format("odd", fm.numerics.formats.E4M3, (1, 128), ScaleRule.RCEIL), BLOCK,
        "no kernel multiplies rows in odd e4m3 1x128 yet: expected fp32 scales",
    ),
    "a gradient with a scale per expert": (
        BLOCK, fp8_tensor(E5M2), "no kernel multiplies rows in fp8 e4m3 1x128 yet: expected one scale per expert",
    ),
    "rows with a scale per expert": (fp8_tensor(), BLOCK, "no kernel multiplies rows in fp8 e4m3 per-tensor yet"),
    "e5m2 rows with a scale per expert": (fp8_tensor(E5M2), fp8_tensor(), "wgrad.input is e5m2: expected e4m3"),
    "gradient only": (None, BLOCK, "wgrad.input is not quantized: expected FP8 operands"),
    "rows only": (BLOCK, None, "grad_output is not quantized: expected FP8 operands"),
}  # fmt: skip


@pytest.mark.parametrize("which", DECLINED)
def test_other_operands(which):
    of_rows, of_gradient, reason = DECLINED[which]
    inner = fm.GroupedLinear(E, H, N, dtype=BF16)
    chain = fm.Sequential(fm.Quantize(of_rows), inner, fm.Quantize(None, backward=of_gradient))
    x = rows()
    with fm.strict():  # no device has a kernel: no miss
        outcome(chain, x, **splits())
    assert not calls
    found, why = status(only_plan(chain, x, **splits()), RULE)
    assert found is Status.CONSTRAINT
    assert why.startswith(reason)


@pytest.mark.parametrize(("hidden", "width"), [(40, 32), (32, 40)])
def test_widths_that_are_not_a_multiple_of_16(hidden, width):
    name = "in_features" if hidden == 40 else "out_features"
    with fm.recipe("fp8_block"):
        plan = only_plan(layer(hidden=hidden, width=width), rows(hidden=hidden), **splits())
    assert status(plan, RULE) == (Status.CONSTRAINT, f"{name} 40 is not a multiple of 16")


def test_unquantized_weight_gradients_match_nothing():
    with fm.recipe("fp8_block:wgrad=bf16"):
        outcome(layer(), rows(), **splits())
    assert not calls
