"""The Hopper kernels compute what they should: their machine code, as PTX, on the emulator.

Each kind of kernel, with functions and problems of tests/gpu. CONTRIBUTING.md states which of those tests run on the
emulator too. `make test` runs a covering few, and `make test-emulator` all.
"""

import contextlib
import shutil
from copy import deepcopy

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, which compiles the kernels")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi, as the kernels do")

import test_sm90_activation as activations
import test_sm90_fp8 as fp8
import test_sm90_fp8_wgrad as fp8_wgrad
import test_sm90_gather as gather
import test_sm90_gather_k as gather_k
import test_sm90_kernels as products
import test_sm90_quantize as quantized
import test_sm90_quantize_formats as formats
import test_sm90_router as router
import test_sm90_rows as rows
import test_sm90_slots as slots
import test_sm100_quantize as packed
from emulator.gpu import emulated
from kit.poison import nan_in_new_tensors

import fusedmoe as fm
from fusedmoe.fusion.search import candidates
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.rows.move.slot_functions import bind_gather_rows, bind_row_dots, bind_slot_values, bind_sum_slots
from fusedmoe.kernels.sm90 import products as functions
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.tiles.choice import CO_256, CO_256_ROWS, CO_256_TALL, PP_128, PP_192, PP_192_TALL

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
SMALL = {"splits": (130, 0, 61, 1), "tail": 21}
ACTS, ACTIVATIONS = products.ACTIVATIONS, activations.ACTIVATIONS

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, which links the kernels' host code")


@pytest.fixture(scope="module", autouse=True)
def gpu():
    with emulated() as machine:
        yield machine


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def tiles(monkeypatch):
    return lambda config: monkeypatch.setattr(functions, "choose", lambda problem: config)


def product(make, **settings):
    return lambda: make(**SMALL, **settings).check()


def wgrad_of_codes(**settings):
    return lambda: fp8_wgrad.Problem(**settings).check()


def gated_in_codes():
    x, w = fp8.rows(**SMALL, k=144), fp8.weights(SMALL["splits"], 512, 144)
    assert fp8.check_codes(x, w, SMALL["splits"], ACTS["swiglu"]).any()


def derivative_in_codes():
    """By rows and by columns, with blocks of 128 rows that end at, before and after the last one of an expert."""
    assert all(t.any() for t in fp8.check_derivative_codes((0, 127, 128, 129, 1, 0), 21, 128, 144))


QUICK = {  # the tiles, and a call that checks its results
    "plain": (PP_192, product(products.plain, biased=True, scale=FP32)),
    "gpt-oss": (CO_256, product(products.activation, a=ACTS["gpt-oss"], biased=True)),
    "wgrad": (PP_192, product(products.wgrad)),
    "wgrad adds": (CO_256, product(products.wgrad, out=FP32, accumulate=True)),
    "codes": (CO_256, product(fp8.plain, n=272, k=144, biased=True, scale=True, exact=True)),
    "codes e5m2": (CO_256_ROWS, product(fp8.plain, n=144, k=272, dtype="e5m2")),
    "wgrad of codes": (CO_256, wgrad_of_codes()),
    "wgrad of codes adds": (CO_256_TALL, wgrad_of_codes(dtype="e5m2", accumulate=True)),
    "wgrad of codes adds bf16": (CO_256, wgrad_of_codes(accumulate=BF16)),
    "router": (None, lambda: router.test_choices_weights_counts_and_sums(CPU, router.CASES["qwen2, fp32 weight"], 33)),
    "offsets": (None, lambda: rows.test_offsets_are_those_of_plain_pytorch(CPU, "one has all", 33, torch.int64)),
    "tail": (None, lambda: rows.test_the_tail_is_zeroed(CPU, 300, 264, BF16)),
    "quantized rows": (None, lambda: quantized.test_rows_sorted_by_expert(CPU, "around a tile", "both")),
    "quantized tokens": (None, lambda: quantized.test_rows_through_an_index(CPU, "columns")),
    "quantized weight": (None, lambda: quantized.test_weights(CPU, (2, 272, 144), "both", transposed=True)),
    "transposed codes": (None, lambda: quantized.test_transposed_codes(CPU, (2, 272, 144))),
    "mxfp8": (None, lambda: formats.test_formats(CPU, "mxfp8", (-1, -2))),
    "mxfp8 weight": (None, lambda: formats.test_weights(CPU, "mxfp8 32x32", (-1, -2), transposed=True)),
    "mxfp8 dequantized": (None, lambda: formats.test_dequantized_weights(CPU, "mxfp8 32x32")),
    "mxfp8 dequantized rows": (None, lambda: formats.test_dequantized_rows(CPU, "mxfp8")),
    "packed rows": (None, lambda: packed.test_rows_sorted_by_expert(CPU, "around a packed tile", "columns")),
    "packed tokens": (None, lambda: packed.test_rows_through_an_index(CPU, "columns", halves=True)),
    "packed weight halves": (None, lambda: packed.test_weights(CPU, 2, 256, 128, "both", True)),
    "packed weight": (None, lambda: packed.test_weights(CPU, 2, 256, 128, "columns", False)),
    "row of nan": (None, lambda: activations.test_a_row_of_nan_spoils_no_other(CPU)),
    "bounds of a clamp": (None, lambda: activations.test_the_bounds_of_a_clamp_are_inside(CPU, activations.CLAMPS[0])),
    **{f"rows {shape}": (None, lambda shape=shape: activations.test_results_and_gradients(
        CPU, ACTIVATIONS[3], FP16, None, shape)) for shape in ((1, 8), (3, 24), (5, 1032))},
    # a clamped gate beside up, and an activation with one input
    **{str(a): (None, lambda a=a: activations.test_results_and_gradients(CPU, a, BF16, FP32, (70, 264)))
       for a in ACTIVATIONS if (a.interleaved and a.limit) or not a.gated},
}  # fmt: skip
SLOW = {
    "plain n": (CO_256, product(products.plain, major="n")),
    "plain fp16 n": (PP_192, product(products.plain, dtype=FP16, major="n")),
    "swiglu": (PP_192, product(products.activation)),
    "geglu n": (PP_128, product(products.activation, a=ACTS["geglu_tanh"], major="n", keep=False)),
    "derivative": (PP_192, product(products.derivative)),
    "derivative gpt-oss": (PP_128, product(products.derivative, a=ACTS["gpt-oss"], scale=BF16)),
    "derivative squared": (
        PP_192, product(products.derivative, a=ACTS["squared_relu"], scale=None, gradient=False)
    ),
    "wgrad adds bf16": (PP_192, product(products.wgrad, accumulate=True)),
    "wgrad tall": (CO_256_TALL, product(products.wgrad)),
    "gathered": (CO_256, product(gather.plain)),
    "gathered activation": (PP_128, product(gather.activation)),
    "gathered derivative": (PP_192, product(gather.derivative)),
    "wgrad gathers dy": (CO_256, lambda: gather_k.Problem("grad_output", **SMALL).check()),
    "wgrad gathers x": (PP_192_TALL, lambda: gather_k.Problem("x", **SMALL).check()),
    "codes gated": (CO_256, gated_in_codes),
    "codes derivative": (CO_256_ROWS, product(fp8.derivative, n=144, k=272)),
    "derivative in codes": (CO_256_ROWS, derivative_in_codes),
    "packed rows both": (None, lambda: packed.test_rows_sorted_by_expert(CPU, "around a packed tile", "both")),
    "packed tokens both": (None, lambda: packed.test_rows_through_an_index(CPU, "both", halves=True)),
    "nvfp4 weight": (None, lambda: formats.test_weights(CPU, "nvfp4 16x16", (-1, -2), transposed=True)),
    "nvfp4 dequantized": (None, lambda: formats.test_dequantized_weights(CPU, "nvfp4 16x16")),
    "nvfp4 dequantized rows": (None, lambda: formats.test_dequantized_rows(CPU, "nvfp4 rotated")),
    **{f"router {name}": (None, lambda name=name: router.test_choices_weights_counts_and_sums(
        CPU, router.CASES[name], 33)) for name in ("qwen3", "deepseek-v3")},
    **{name: (None, lambda name=name: formats.test_formats(CPU, name, (-1, -2))) for name in ("nvfp4 gradient", "row")},
    **{f"offsets {kind}": (None, lambda kind=kind: rows.test_offsets_are_those_of_plain_pytorch(
        CPU, kind, 33, torch.int64)) for kind in ("random", "negative")},
    **{f"far apart {a}": (None, lambda a=a: activations.test_rows_further_apart(CPU, a)) for a in ACTIVATIONS},
    **{str(a): (None, lambda a=a: activations.test_results_and_gradients(CPU, a, BF16, FP32, (70, 264)))
       for a in ACTIVATIONS if str(a) not in QUICK},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "check"),
    [pytest.param(*case, id=name) for name, case in QUICK.items()]
    + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()],
)
def test_results_of(config, check, tiles, gpu):
    if config is not None:
        tiles(config)
    launches = gpu.launches
    check()
    assert gpu.launches > launches
    assert not gpu.counters.counter.any(), "a kernel leaves its tile counter zero"


def test_adding_in_16_bits_has_the_bits_of_two_steps(tiles):
    products.test_adding_in_16_bits_has_the_bits_of_two_steps(CPU, CO_256, tiles)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_schedules_change_no_bit(schedule, tiles):
    tiles(PP_192)
    case = products.plain((300, 0, 7, 200), 5, 400, 64)
    (want,), (got,) = case.run(KernelOptions()), case.run(KernelOptions(sm_margin=2, schedule=schedule))
    assert torch.equal(got, want)


def test_weight_gradients_of_fp8_codes_beside_a_sum(tiles, gpu):
    """Few CTAs, which draw their tiles under either schedule, and leave the counter zero."""
    tiles(CO_256)
    case = fp8_wgrad.Problem()
    launches = gpu.launches
    operands = Codes(case.dy, case.dy_scale), Codes(case.x, case.x_scale), case.offsets
    run = functions.bind_grouped_wgrad(*operands, BF16, False, KernelOptions(schedule="static"), beside=True)
    assert torch.equal(run(*operands), case.want.to(BF16))
    assert gpu.launches == launches + 1
    assert [kernel.symbol for kernel in gpu.hosts if kernel.symbol.endswith("_beside")]
    assert not gpu.counters.counter.any()


@pytest.mark.parametrize("scale", [pytest.param(None, marks=pytest.mark.slow), FP32], ids=["", "scale"])
def test_rows_and_slots(scale):
    """Sentinels; more slots of a token than are summed at once, and fewer."""
    for tokens, chosen in ((70, 9), (33, 2)):
        slot_of_row, row_of_slot, used = slots.routed(tokens, chosen, 13, CPU, "sentinels")
        count, columns = tokens * chosen, 264
        source = slots.between_nan(tokens, columns, BF16, CPU)
        factors = torch.rand(count) + 0.5
        weight = None if scale is None else factors
        with nan_in_new_tensors():
            rows = bind_gather_rows(source, row_of_slot, weight)(source, row_of_slot, slot_of_row, weight)
            sums = bind_sum_slots(rows, row_of_slot, weight)(rows, row_of_slot, weight)
            dots = bind_row_dots(source, rows, row_of_slot, FP32)(source, rows, row_of_slot, slot_of_row)
            values = bind_slot_values(factors, row_of_slot)(factors, row_of_slot)
        present = row_of_slot < used
        scaled = torch.where(torch.arange(count) < used, torch.ones(count) if scale is None else factors, 0).double()
        copied = source[slot_of_row // chosen].double()
        slots.close(rows[:used], (copied * scaled[:, None])[:used])
        assert not rows[used:].any()
        at = row_of_slot.clamp(max=count - 1)
        slots.close(sums, (rows.double()[at] * torch.where(present, scaled[at], 0)[..., None]).sum(1))
        want = (rows.double() * copied).sum(1)
        assert torch.allclose(dots[:used].double(), want[:used], rtol=1e-4, atol=1e-3)
        assert torch.equal(values, torch.where(present, factors[at], 0))


# ---- whole layers


def step(layer, x, dy):
    y = layer(x)
    return (y, *torch.autograd.grad(y, (x, *layer.parameters()), dy))


def layer_problem(hidden, width, num_experts, **settings):
    layer = fm.MoE(hidden, width, num_experts, 2, dtype=BF16, **settings)
    return layer, torch.randn(70, hidden, dtype=BF16).requires_grad_(), torch.randn(70, hidden, dtype=BF16)


def rules_of(layer, x):
    ran = {step.rule for plan in layer.explain(x).plans for step in plan.steps}
    assert None not in ran, "each step has a kernel"
    return ran


@pytest.mark.usefixtures("builtin_rules")
def test_a_whole_layer():
    """Router, gathered products and sums, forward and backward: the plan of a GPU, against the unfused steps."""
    layer, x, dy = layer_problem(128, 64, 6, router_bias=True)
    got = step(layer, x, dy)
    with fm.disabled("sm90.*"):
        want = step(layer, x, dy)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 2e-2 * b.norm()
    rules_of(layer, x)


@pytest.mark.slow  # the tests of FP8 codes above run such kernels, and test_sm90_fp8_rules.py its plan
@pytest.mark.usefixtures("builtin_rules")
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_tensor", "fp8_block:wgrad=bf16", "fp8_tensor:wgrad=bf16"])
def test_a_whole_layer_in_fp8(recipe):
    """The plan of a GPU against the emulated recipe. Both have the same error, that of the format."""
    layer, x, dy = layer_problem(128, 128, 4)
    with fm.recipe(recipe):
        got, ran = step(layer, x, dy), rules_of(layer, x)
        with fm.disabled("sm90.*"):
            fm.clear_weight_cache(layer)
            emulated_recipe = step(layer, x, dy)
    with fm.recipe("bf16"):
        exact = step(deepcopy(layer).float(), x.detach().float().requires_grad_(), dy.float())
    for a, b, c in zip(got, emulated_recipe, exact, strict=True):
        error, of_recipe = (a.double() - c).norm(), (b.double() - c).norm()
        assert (a - b).norm() < 10 ** (-30 / 20) * b.norm(), "30 dB"
        assert error < 1.5 * of_recipe
        assert of_recipe < 0.1 * c.norm()
    assert {f"sm90.fp8_grouped_{name}" for name in ("gemm_activation", "gemm", "dgrad_activation", "dgrad")} <= ran


@pytest.mark.slow
@pytest.mark.usefixtures("builtin_rules")
def test_columns_that_backward_quantizes_again_change_no_bit(monkeypatch):
    monkeypatch.setattr(candidates, "_US_PER_LAUNCH", 0.0)  # as with more rows
    layer, x, dy = layer_problem(128, 128, 4)
    with fm.recipe("fp8_block"):
        ran, got = rules_of(layer, x), step(layer, x, dy)
        assert "sm90.gathered_quantize_columns" in ran
        with fm.disabled("sm90.gathered_quantize_columns"):
            _, want = rules_of(layer, x), step(layer, x, dy)
    for a, b in zip(got, want, strict=True):
        assert b.any(), "zeros would pass"
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.usefixtures("builtin_rules")
def test_delayed_scaling():
    """Three training steps of small integers, which are exact: results and histories have the bits of plain PyTorch."""
    recipe = fm.numerics.recipes.FP8Tensor(power_of_two=True, delayed=fm.numerics.formats.Delayed(2))
    splits = torch.tensor(SMALL["splits"])
    first, last = fm.GroupedLinear(4, 32, 2 * 48, dtype=BF16), fm.GroupedLinear(4, 48, 32, dtype=BF16)
    fused = fm.Sequential(first, fm.ReGLU(), fm.Scale("probs"), last)
    with torch.no_grad():
        for weight in fused.parameters():
            weight.copy_(torch.randint(-1, 2, weight.shape))
    plain = deepcopy(fused)
    for power in range(3):
        x = (torch.randint(-1, 2, (213, 32)).to(BF16) * 2**power).requires_grad_()
        dy, probs = torch.randint(-1, 2, (213, 32)).to(BF16), torch.full((213,), 0.5)
        found = []
        for chain in (fused, plain):
            with fm.recipe(recipe), contextlib.nullcontext() if chain is fused else fm.disabled("sm90.*"):
                y = chain(x, splits=splits, probs=probs)
                found.append((y, *torch.autograd.grad(y, (x, *chain.parameters()), dy)))
        for got, want in zip(*found, strict=True):
            assert want.any()
            assert torch.equal(got, want)
        got, want = (chain.state_dict() for chain in (fused, plain))
        assert all(torch.equal(t, want[name]) for name, t in got.items())
    assert len(got) == 2 + 2 * 3 * 2, "input, weight and gradient of two layers"
    with fm.recipe(recipe):
        (plan,) = fused.explain(x, splits=splits, probs=probs).plans
    assert not plan.unfused
    assert "sm90.fp8_grouped_gemm_activation" in {step.rule for step in plan.fused if "3:input.Quantize" in step.ops}
