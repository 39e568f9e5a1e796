"""The Hopper kernels compute what they should: their machine code, as PTX, on the emulator.

Each kind of kernel, with functions and problems of tests/gpu. CONTRIBUTING.md states which of those tests run on the
emulator too.
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
import test_sm90_quantize_formats as quantized_formats
import test_sm90_router as router
import test_sm90_rows as rows
import test_sm90_slots as slots
import test_sm100_quantize as packed
from cutlass import Int32
from emulator.barriers import EmulationError
from emulator.gpu import emulated
from kit.poison import nan_in_new_tensors

import fusedmoe as fm
from fusedmoe.fusion.search import candidates
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.rows.move.slot_functions import bind_gather_rows, bind_row_dots, bind_slot_values, bind_sum_slots
from fusedmoe.kernels.sm90 import products as functions
from fusedmoe.kernels.sm90.gemm import scaled
from fusedmoe.kernels.sm90.gemm import scheduler as scheduler
from fusedmoe.kernels.sm90.launch import Codes
from fusedmoe.kernels.sm90.tiles.choice import CO_256, CO_256_ROWS, CO_256_TALL, PP_128, PP_192, PP_192_TALL

BF16, FP16, FP32 = products.BF16, products.FP16, products.FP32
CPU = torch.device("cpu")
FP8 = ("fp8_block", "fp8_tensor")
SMALL = {"splits": (130, 0, 61, 1), "tail": 21}


pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc, which links the kernels' host code")


@pytest.fixture(scope="module", autouse=True)
def gpu():
    with emulated() as machine:
        yield machine


def slow(*values):
    """Values of a case that `make test` leaves out: quicker ones, or the whole layers, run the same kind of kernel."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def tiles(monkeypatch):
    return lambda config: monkeypatch.setattr(functions, "choose", lambda problem: config)


@pytest.mark.parametrize(
    ("make", "config", "settings"),
    [
        (products.plain, PP_192, {"biased": True, "scale": FP32}),
        slow(products.plain, CO_256, {"major": "n"}),
        slow(products.plain, PP_192, {"dtype": FP16, "major": "n"}),
        slow(products.activation, PP_192, {}),
        (products.activation, CO_256, {"a": products.ACTIVATIONS["gpt-oss"], "biased": True}),
        slow(products.activation, PP_128, {"a": products.ACTIVATIONS["geglu_tanh"], "major": "n", "keep": False}),
        slow(products.derivative, PP_192, {}),
        slow(products.derivative, PP_128, {"a": products.ACTIVATIONS["gpt-oss"], "scale": BF16}),
        slow(products.derivative, PP_192,
             {"a": products.ACTIVATIONS["squared_relu"], "scale": None, "gradient": False}),
        (products.wgrad, PP_192, {}),
        (products.wgrad, CO_256, {"out": FP32, "accumulate": True}),
        slow(products.wgrad, PP_192, {"accumulate": True}),
        slow(products.wgrad, CO_256_TALL, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or getattr(value, "name", None),
)  # fmt: skip
def test_products(make, config, settings, tiles, gpu):
    tiles(config)
    launches = gpu.launches
    make(**SMALL, **settings).check()
    assert gpu.launches > launches
    assert not gpu.counters.counter.any(), "a kernel leaves its tile counter zero"


@pytest.mark.parametrize(
    ("make", "config"), [slow(gather.plain, CO_256), slow(gather.activation, PP_128), slow(gather.derivative, PP_192)]
)
def test_products_of_gathered_rows(make, config, tiles):
    """The same bits as with rows that were copied before."""
    tiles(config)
    make(**SMALL).check()


@pytest.mark.parametrize(("gathered", "config"), [slow("grad_output", CO_256), slow("x", PP_192_TALL)])
def test_weight_gradients_of_gathered_rows(gathered, config, tiles):
    tiles(config)
    gather_k.Problem(gathered, **SMALL).check()


def test_adding_in_16_bits_has_the_bits_of_two_steps(tiles):
    products.test_adding_in_16_bits_has_the_bits_of_two_steps(CPU, CO_256, tiles)


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_schedules_change_no_bit(schedule, tiles):
    tiles(PP_192)
    case = products.plain((300, 0, 7, 200), 5, 400, 64)
    (want,), (got,) = case.run(KernelOptions()), case.run(KernelOptions(sm_margin=2, schedule=schedule))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", [slow("qwen3"), slow("deepseek-v3"), "qwen2, fp32 weight"])
def test_the_router(name):
    router.test_choices_weights_counts_and_sums(CPU, router.CASES[name], 33)


@pytest.mark.parametrize("kind", ["random", "one has all", "negative"])
def test_offsets(kind):
    rows.test_offsets_are_those_of_plain_pytorch(CPU, kind, 33, torch.int64)


@pytest.mark.parametrize(
    ("config", "settings"),
    [(CO_256, {}), (CO_256_TALL, {"dtype": "e5m2", "accumulate": True}), (CO_256, {"accumulate": BF16})],
    ids=["", "add", "add in 16 bits"],
)
def test_weight_gradients_of_fp8_codes(config, settings, monkeypatch):
    monkeypatch.setattr(functions, "choose", lambda problem: config)
    fp8_wgrad.Problem(**settings).check()


def test_weight_gradients_of_fp8_codes_beside_a_sum(monkeypatch, gpu):
    """Few CTAs, which draw their tiles under either schedule, and leave the counter zero."""
    monkeypatch.setattr(functions, "choose", lambda problem: CO_256)
    case = fp8_wgrad.Problem()
    launches = gpu.launches
    operands = Codes(case.dy, case.dy_scale), Codes(case.x, case.x_scale), case.offsets
    run = functions.bind_grouped_wgrad(*operands, BF16, False, KernelOptions(schedule="static"), beside=True)
    dw = run(*operands)
    assert torch.equal(dw, case.want.to(BF16))
    assert gpu.launches == launches + 1
    assert [kernel.symbol for kernel in gpu.hosts if kernel.symbol.endswith("_beside")]
    assert not gpu.counters.counter.any()


def test_products_of_fp8_codes(monkeypatch):
    """Of rows in E4M3, and of gradients in E5M2."""
    monkeypatch.setattr(functions, "choose", lambda problem: CO_256)
    fp8.plain(**SMALL, n=272, k=144, biased=True, scale=True, exact=True).check()
    monkeypatch.setattr(functions, "choose", lambda problem: CO_256_ROWS)
    fp8.plain(**SMALL, n=144, k=272, dtype="e5m2").check()


@pytest.mark.slow
def test_products_of_fp8_codes_and_activations(monkeypatch):
    """With gate and up, with the codes of the result, and with the derivative."""
    monkeypatch.setattr(functions, "choose", lambda problem: CO_256)
    x, w = fp8.rows(**SMALL, k=144), fp8.weights(SMALL["splits"], 512, 144)
    y = fp8.check_codes(x, w, SMALL["splits"], products.ACTIVATIONS["swiglu"])
    assert y.any()
    monkeypatch.setattr(functions, "choose", lambda problem: CO_256_ROWS)
    fp8.derivative(**SMALL, n=144, k=272).check()


@pytest.mark.slow
def test_a_derivative_in_fp8_codes(monkeypatch):
    """By rows and by columns, with blocks of 128 rows that end at, before and after the last one of an expert."""
    monkeypatch.setattr(functions, "choose", lambda problem: CO_256_ROWS)
    for t in fp8.check_derivative_codes((0, 127, 128, 129, 1, 0), 21, 128, 144):
        assert t.any()


def test_quantized_rows():
    """Both forms of rows sorted by expert, with a tail of NaN; then columns of tokens, through an index."""
    quantized.test_rows_sorted_by_expert(CPU, "around a tile", "both")
    quantized.test_rows_through_an_index(CPU, "columns")


@pytest.mark.parametrize("which", ["mxfp8", slow("nvfp4 gradient"), slow("row")])
def test_quantized_rows_of_other_formats(which):
    quantized_formats.test_formats(CPU, which, (-1, -2))


@pytest.mark.parametrize("which", ["mxfp8 32x32", slow("nvfp4 16x16")])
def test_square_blocks_and_dequantized_values(which):
    quantized_formats.test_weights(CPU, which, (-1, -2), transposed=True)
    quantized_formats.test_dequantized_weights(CPU, which)
    quantized_formats.test_dequantized_rows(CPU, {"mxfp8 32x32": "mxfp8", "nvfp4 16x16": "nvfp4 rotated"}[which])


@pytest.mark.parametrize("form", [slow("both"), "columns"])
def test_quantized_packed_rows(form):
    """For Blackwell: both forms of rows sorted by expert, with a tail of NaN; then of halves, through an index."""
    packed.test_rows_sorted_by_expert(CPU, "around a packed tile", form)
    packed.test_rows_through_an_index(CPU, form, halves=True)


@pytest.mark.parametrize(("form", "halves"), [("both", True), ("columns", False)])
def test_quantized_packed_weights(form, halves):
    """For Blackwell: a weight whose rows are apart, with values of all magnitudes; then ordinary ones."""
    packed.test_weights(CPU, 2, 256, 128, form, halves)


def test_quantized_weights():
    quantized.test_weights(CPU, (2, 272, 144), "both", transposed=True)
    quantized.test_transposed_codes(CPU, (2, 272, 144))


@pytest.mark.parametrize(
    "activation",
    # quick: a clamped gate beside up, and an activation with one input
    [a if (a.interleaved and a.limit) or not a.gated else slow(a) for a in activations.ACTIVATIONS],
    ids=str,
)
def test_activations_of_rows(activation):
    activations.test_results_and_gradients(CPU, activation, BF16, FP32, (70, 264))
    activations.test_rows_further_apart(CPU, activation)


def test_the_tail_is_zeroed():
    rows.test_the_tail_is_zeroed(CPU, 300, 264, BF16)


def test_activations_of_other_rows():
    for shape in ((1, 8), (3, 24), (5, 1032)):
        activations.test_results_and_gradients(CPU, activations.ACTIVATIONS[3], FP16, None, shape)
    activations.test_a_row_of_nan_spoils_no_other(CPU)
    activations.test_the_bounds_of_a_clamp_are_inside(CPU, activations.CLAMPS[0])


@pytest.mark.parametrize("scale", [slow(None), FP32], ids=["", "scale"])
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


@pytest.mark.usefixtures("builtin_rules")
def test_a_whole_layer():
    """Router, gathered products and sums, forward and backward: the plan of a GPU, against the unfused steps."""
    layer = fm.MoE(128, 64, 6, 2, router_bias=True, dtype=BF16)
    x, dy = torch.randn(70, 128, dtype=BF16).requires_grad_(), torch.randn(70, 128, dtype=BF16)

    def step():
        y = layer(x)
        return (y, *torch.autograd.grad(y, (x, *layer.parameters()), dy))

    got = step()
    with fm.disabled("sm90.*"):
        want = step()
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 2e-2 * b.norm()
    ran = {step.rule for plan in layer.explain(x).plans for step in plan.steps}
    assert None not in ran, "each step has a kernel"


@pytest.mark.slow  # the tests of FP8 codes above run such kernels, and test_sm90_fp8_rules.py its plan
@pytest.mark.usefixtures("builtin_rules")
@pytest.mark.parametrize("recipe", [*FP8, *(f"{n}:wgrad=bf16" for n in FP8)])
def test_a_whole_layer_in_fp8(recipe):
    """The plan of a GPU against the emulated recipe. Both have the same error, that of the format."""
    layer = fm.MoE(128, 128, 4, 2, dtype=BF16)
    x, dy = torch.randn(70, 128, dtype=BF16).requires_grad_(), torch.randn(70, 128, dtype=BF16)

    def step(layer, x, dy, recipe):
        with fm.recipe(recipe):
            y = layer(x)
        return (y, *torch.autograd.grad(y, (x, *layer.parameters()), dy))

    got = step(layer, x, dy, recipe)
    with fm.recipe(recipe):
        ran = {step.rule for plan in layer.explain(x).plans for step in plan.steps}
    with fm.disabled("sm90.*"):
        fm.clear_weight_cache(layer)
        emulated_recipe = step(layer, x, dy, recipe)
        exact = step(deepcopy(layer).float(), x.detach().float().requires_grad_(), dy.float(), "bf16")
    for a, b, c in zip(got, emulated_recipe, exact, strict=True):
        error, of_recipe = (a.double() - c).norm(), (b.double() - c).norm()
        assert (a - b).norm() < 10 ** (-30 / 20) * b.norm(), "30 dB"
        assert error < 1.5 * of_recipe
        assert of_recipe < 0.1 * c.norm()
    assert None not in ran, "each step has a kernel"
    products = {f"sm90.fp8_grouped_{name}" for name in ("gemm_activation", "gemm", "dgrad_activation", "dgrad")}
    assert products <= ran


@pytest.mark.slow
@pytest.mark.usefixtures("builtin_rules")
def test_columns_that_backward_quantizes_again_change_no_bit(monkeypatch):
    monkeypatch.setattr(candidates, "_US_PER_LAUNCH", 0.0)  # as with more rows
    layer = fm.MoE(128, 128, 4, 2, dtype=BF16)
    x, dy = torch.randn(70, 128, dtype=BF16).requires_grad_(), torch.randn(70, 128, dtype=BF16)

    def step():
        with fm.recipe("fp8_block"):
            ran = {step.rule for plan in layer.explain(x).plans for step in plan.steps}
            y = layer(x)
        return ran, (y, *torch.autograd.grad(y, (x, *layer.parameters()), dy))

    ran, got = step()
    assert "sm90.gathered_quantize_columns" in ran
    assert None not in ran, "each step has a kernel"
    with fm.disabled("sm90.gathered_quantize_columns"):
        ran, want = step()
    assert None not in ran
    for a, b in zip(got, want, strict=True):
        assert b.any(), "zeros would pass"
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.usefixtures("builtin_rules")
def test_delayed_scaling():
    """Three training steps of small integers, which are exact: results and histories have the bits of plain PyTorch."""
    recipe = fm.numerics.recipes.FP8Tensor(power_of_two=True, delayed=fm.numerics.formats.Delayed(2))
    splits = torch.tensor(SMALL["splits"])
    fused = fm.Sequential(
        fm.GroupedLinear(4, 32, 2 * 48, dtype=BF16),
        fm.ReGLU(),
        fm.Scale("probs"),
        fm.GroupedLinear(4, 48, 32, dtype=BF16),
    )
    with torch.no_grad():
        for weight in fused.parameters():
            weight.copy_(torch.randint(-1, 2, weight.shape))
    plain = deepcopy(fused)
    for step in range(3):
        x = (torch.randint(-1, 2, (213, 32)).to(BF16) * 2**step).requires_grad_()
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


# ---- kernels whose arrival at a barrier does not wait for loads


@pytest.fixture
def late_copies(monkeypatch):
    """Another emulated GPU, so that kernels are compiled again. Copies and loads complete as late as they can."""
    monkeypatch.setattr("emulator.gpu.EAGERNESS", (0.0,))
    with emulated():
        yield


@pytest.mark.usefixtures("late_copies")
def test_a_tile_number_that_is_overwritten_before_it_is_read(monkeypatch, tiles):
    monkeypatch.setattr(scheduler, "one_after", lambda *values: Int32(1))
    tiles(PP_192)
    case = products.plain((300, 0, 7, 200), 5, 400, 64)
    for _ in range(3):  # seeds
        with pytest.raises(
            EmulationError, match=r"CTA \(0, .* st.async.*: overwrites .* reading: CTA \(1, .* ld.shared"
        ):
            case.run(KernelOptions(schedule="dynamic"))


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize("product", ["wgrad", slow("plain")])
def test_scales_that_are_overwritten_before_they_are_read(product, monkeypatch):
    monkeypatch.setattr(scaled, "one_after", lambda *values: Int32(1))
    if product == "wgrad":
        monkeypatch.setattr(functions, "choose", lambda problem: CO_256)
        case = fp8_wgrad.Problem((1000,))
    else:
        monkeypatch.setattr(functions, "choose", lambda problem: CO_256)
        case = fp8.plain(**SMALL, n=272, k=1040, exact=True)
    for _ in range(3):  # seeds
        with pytest.raises(EmulationError, match=r"cp.async.bulk.tensor.*: overwrites .* reading: CTA .* ld.shared"):
            case.check(KernelOptions(schedule="static"))
