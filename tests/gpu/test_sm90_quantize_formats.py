"""The kernels for formats with small blocks, or with one scale per row or tensor: codes and scales have the bits of
`fusedmoe.quantize`, and dequantized values those of `QuantizedTensor.split`, for any splits and values.
"""

import pytest
import torch
from kit.hopper import needs_gpu, needs_hopper
from kit.poison import nan_in_new_tensors
from test_sm90_quantize import BF16, FP16, bits, offsets_of, values, weight_like

import fusedmoe as fm
from fusedmoe.builtin_rules.rows.narrow_forms import bind_forms, bind_weight_forms
from fusedmoe.kernels.rows.quantize.format_functions import bind_dequantize, bind_magnitudes
from fusedmoe.numerics.formats import (
    E5M2,
    Delayed,
    Quantizer,
    ScaleRule,
    amax_by_expert,
    fp8_row,
    fp8_tensor,
    mxfp8,
    nvfp4,
    quantize,
)
from fusedmoe.numerics.formats.delayed import AmaxHistory
from fusedmoe.numerics.formats.hadamard import rotate
from fusedmoe.ops.state.amax import Step

pytestmark = needs_hopper

QUANTIZERS = {
    "mxfp8": Quantizer(mxfp8()),
    "mxfp8 e5m2": Quantizer(mxfp8(E5M2)),
    "mxfp8 floor": Quantizer(mxfp8(rule=ScaleRule.FLOOR)),
    "nvfp4": Quantizer(nvfp4()),
    "nvfp4 rotated": Quantizer(nvfp4(), hadamard=True),
    "nvfp4 gradient": Quantizer(nvfp4(), stochastic_rounding=True, hadamard=True),
    "row": Quantizer(fp8_row()),
    "row e5m2": Quantizer(fp8_row(E5M2, power_of_two=True)),
    "tensor": Quantizer(fp8_tensor()),
    "tensor e5m2": Quantizer(fp8_tensor(E5M2, power_of_two=True, amax_epsilon=0.3)),
}
WEIGHTS = {
    "mxfp8": mxfp8(),
    "mxfp8 32x32": mxfp8(across=32),
    "nvfp4": nvfp4(),
    "nvfp4 16x16": nvfp4(16),
    "row": fp8_row(),
    "tensor": fp8_tensor(),
}
AXES = {"rows": (-1,), "columns": (-2,), "both": (-1, -2)}
SPLITS = {
    "around a block": [0, 1, 31, 32, 33, 0, 15, 16, 17],
    "around a tile": [127, 0, 128, 129],
    "all in one": [0, 0, 300, 0],
    "nothing": [0, 0, 0],
    "one row per expert": [1] * 140,  # more experts than one look at the offsets covers
    "many empty": [0] * 130 + [3, 0, 0, 5] + [0] * 130 + [40],
}


def ordinary(rows, columns, device, seed=0):
    """Normal values, which no format rounds to zero, with large ones among them."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, columns, device=device, generator=generator)
    x *= torch.rand(rows, columns, device=device, generator=generator).mul(4).exp2()
    return x.to(BF16)


def check(found, wanted):
    for form, want in zip(found, wanted, strict=True):
        assert len(form) == len(want.tensors())
        for got, expected in zip(form, want.tensors(), strict=True):
            assert got.dtype is expected.dtype
            assert got.shape == expected.shape
            assert torch.equal(bits(got), bits(expected))


def seeded(run):
    """The results of a function that draws random bits."""
    torch.manual_seed(11)
    return run()


def check_rows(x, quantizer, axes, offsets=None, index=None):
    source = x if index is None else x[index]
    with nan_in_new_tensors():
        found = seeded(lambda: bind_forms(x, quantizer, axes, offsets, index)(x, offsets, index))
    wanted = seeded(lambda: [quantize(source, quantizer, axis, offsets=offsets) for axis in axes])
    check(found, wanted)
    return wanted


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("which", QUANTIZERS)
def test_formats(device, which, axes):
    """Ordinary values; all magnitudes, NaN and infinities; a tail of NaN without an expert; fp16."""
    offsets = offsets_of([33, 0, 31, 1, 20], device)
    x = ordinary(97, 144, device)
    x[85:] = torch.nan
    for form in check_rows(x, QUANTIZERS[which], axes, offsets):
        codes = form.codes().view(torch.uint8) & (7 if which.startswith("nvfp4") else 0x7F)
        by_columns = 0.1 if which.startswith("tensor") else 0.25  # padding has more rows than the experts
        assert (codes != 0).float().mean() > (0.4 if form.axis == -1 else by_columns)
    for dtype in (BF16, FP16):
        check_rows(values(97, 144, dtype, device, seed=3, pitch=24), QUANTIZERS[which], axes, offsets)


@pytest.mark.parametrize("which", ["mxfp8", "nvfp4 gradient", "row", "tensor"])
@pytest.mark.parametrize("kind", SPLITS)
def test_rows_sorted_by_expert(device, kind, which):
    used = sum(SPLITS[kind])
    offsets = offsets_of(SPLITS[kind], device)
    for tail in (0, 40):
        x = ordinary(used + tail, 48, device, seed=tail)
        x[used:] = torch.nan
        if x.shape[0]:
            wanted = check_rows(x, QUANTIZERS[which], (-1, -2), offsets)
            assert used == 0 or all(bits(form.data).any() for form in wanted)


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("through_index", [False, True], ids=["", "index"])
def test_delayed_scaling(device, through_index, axes):
    """Codes by the factors of the step before, and the history with the amax of this one."""
    quantizer = Quantizer(fp8_tensor(), delayed=Delayed(3))
    history = AmaxHistory(quantizer, 3, torch.device(device))
    offsets = offsets_of([130, 0, 31], device)
    x = values(170, 144, BF16, device, seed=3, pitch=24)
    index = torch.arange(169, -1, -1, dtype=torch.int32, device=device) if through_index else None
    source = x if index is None else x[index]
    run = bind_forms(x, quantizer, axes, offsets, index, training=True)
    for _ in range(2):
        step, encode = Step(history, "input", True), history.encode.clone()
        with nan_in_new_tensors():
            found = run(x, offsets, index, step)
        check(found, [quantize(source, quantizer, axis, offsets=offsets, encode=encode) for axis in axes])
        assert torch.equal(history.amax[0], amax_by_expert(source, offsets))
    assert history.amax[1].any()
    assert (history.encode[::2] != 1).all()
    infer = bind_forms(x, quantizer, axes, offsets, index)
    step = Step(history, "input", False)
    check(
        infer(x, offsets, index, step),
        [quantize(source, quantizer, axis, offsets=offsets, encode=history.encode) for axis in axes],
    )
    weight = ordinary(3 * 48, 64, device).view(3, 48, 64)
    for w in (weight, weight.mT.contiguous().mT):
        step, encode = Step(history, "weight", True), history.encode.clone()
        found = bind_weight_forms(w, quantizer, axes, True)(w, step)
        check(found, [quantize(w, quantizer, axis, encode=encode) for axis in axes])
        assert torch.equal(history.amax[0], amax_by_expert(w))


@pytest.mark.parametrize("which", ["mxfp8", "nvfp4 rotated", "tensor"])
@pytest.mark.parametrize("rows", [1, 31, 129])
def test_rows_without_experts(device, rows, which):
    check_rows(ordinary(rows, 272, device), QUANTIZERS[which], (-1, -2))


@pytest.mark.parametrize("which", ["mxfp8", "nvfp4 gradient", "row"])
def test_rows_through_an_index(device, which):
    """The index of a row without an expert is not read."""
    tokens = ordinary(70, 160, device)
    generator = torch.Generator(device).manual_seed(1)
    index = torch.randint(0, 70, (210,), device=device, dtype=torch.int32, generator=generator)
    check_rows(tokens, QUANTIZERS[which], (-1, -2), None, index)
    check_rows(tokens, QUANTIZERS[which], (-1, -2), offsets_of([0, 140, 5, 0, 50], device), index)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("rule", [ScaleRule.RCEIL, ScaleRule.FLOOR])
def test_every_exponent_of_the_largest_magnitude(device, rule, element):
    """A block for each exponent of bf16, with mantissas around that of the largest code."""
    x = torch.zeros(256, 32, dtype=BF16, device=device)
    for i in range(256):
        x.view(torch.int16)[i, 5] = min(i, 254) * 128 + 96 + i % 5 - 2
    assert x.isfinite().all()
    format = mxfp8(E5M2, rule=rule) if element == "e5m2" else mxfp8(rule=rule)
    check_rows(x, Quantizer(format), (-1,))


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("which", WEIGHTS)
def test_weights(device, which, axes, transposed):
    quantizer = Quantizer(WEIGHTS[which])
    for shape in ((2, 80, 144), (48, 160)):
        for weight in (
            weight_like(shape, BF16, device, transposed),
            torch.stack([ordinary(*shape[-2:], device, seed=i) for i in range(shape[0] if len(shape) == 3 else 1)]),
        ):
            weight = weight if weight.dim() == len(shape) else weight[0]
            with nan_in_new_tensors():
                found = bind_weight_forms(weight, quantizer, axes)(weight)
            wanted = [quantize(weight, quantizer, axis) for axis in axes]
            check(found, wanted)
            assert all(bits(form.data).any() for form in wanted)


def test_magnitudes(device):
    splits = [20, 0, 33]
    x = ordinary(60, 144, device)
    x[0, 0], x[1, 1], x[30, 2] = torch.inf, -torch.nan, -1000.0
    offsets = offsets_of(splits, device)
    of_rows, of_columns, of_experts, of_rotated = bind_magnitudes(
        x, offsets, of_rows=True, of_columns=True, of_experts=True, of_experts_rotated=True
    )(x, offsets)
    finite = x.float().nan_to_num(0, 0, 0).abs()
    finite[53:] = 0
    groups = finite[:20], finite[20:53]
    assert torch.equal(of_rows, finite.amax(1))
    for e, group in ((0, groups[0]), (2, groups[1])):
        assert torch.equal(of_columns[e], group.amax(0))
        assert of_experts[e] == group.max()
    assert of_experts[1] == of_rotated[1] == 0
    assert of_experts[2] == 1000
    padded = torch.nn.functional.pad(x[20:53], (0, 0, 0, 15))
    assert of_rotated[2] == rotate(padded.mT.contiguous()).float().abs().max()


@pytest.mark.parametrize("which", ["mxfp8", "mxfp8 e5m2", "nvfp4 rotated", "tensor e5m2"])
def test_dequantized_rows(device, which):
    offsets = offsets_of([33, 0, 31, 1, 20], device)
    for x in (ordinary(100, 144, device), values(100, 144, BF16, device, seed=3)):
        for axis in (-1, -2):
            t = quantize(x, QUANTIZERS[which], axis, offsets=offsets)
            check_values(t, transposed=axis == -2)


@pytest.mark.parametrize("which", ["mxfp8", "mxfp8 32x32", "nvfp4 16x16", "tensor"])
def test_dequantized_weights(device, which):
    weight = torch.stack([ordinary(96, 160, device), values(96, 160, BF16, device)])
    for axis in (-1, -2):
        check_values(quantize(weight, WEIGHTS[which], axis))


def check_values(t, transposed=False):
    with nan_in_new_tensors():
        found = bind_dequantize(t.data, t.scale, t.format, transposed=transposed)(t.data, t.scale)
    wanted, _ = t.split(BF16)
    wanted = wanted.mT if transposed else wanted
    assert found.shape == wanted.shape
    assert found.dtype is BF16
    nan = wanted.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found.masked_fill(nan, 0).view(torch.int16), wanted.masked_fill(nan, 0).view(torch.int16))
    assert (wanted != 0).any()


# ------------------------------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_tensor"])
@pytest.mark.parametrize("settings", [{}, {"bias": True}, {"accumulate_into_main_grad": True}], ids=str)
def test_a_training_step(device, recipe, settings):
    """The results of plain PyTorch, which rounds a product before it adds a bias, and before scales per expert: such
    results, after another quantization, differ by some codes. On a GPU, plain PyTorch multiplies in another order too.
    The differences are small beside the error of the recipe itself, which is that of plain PyTorch.
    """
    splits, tail, experts, hidden, width = (33, 0, 20), 5, 3, 64, 48
    torch.manual_seed(0)
    chain = fm.Sequential(
        fm.GroupedLinear(experts, hidden, 2 * width, dtype=BF16, device=device, **settings),
        fm.SwiGLU(),
        fm.GroupedLinear(experts, width, hidden, dtype=BF16, device=device, **settings),
    )
    x, dy = ordinary(sum(splits) + tail, hidden, device), ordinary(sum(splits) + tail, hidden, device, seed=1)
    x[sum(splits) :] = torch.nan
    named = {"splits": torch.tensor(splits, device=device)}
    main = "accumulate_into_main_grad" in settings

    def step():
        fm.clear_weight_cache(chain)
        chain.zero_grad(set_to_none=True)
        for layer in (chain[0], chain[2]):
            layer.weight.main_grad = torch.full(layer.weight.shape, 0.5, device=device) if main else None
        torch.manual_seed(5)
        rows = x.clone().requires_grad_()
        y = chain(rows, **named)
        y.backward(dy)
        weights = {i: chain[i].weight.main_grad if main else chain[i].weight.grad for i in (0, 2)}
        return {"y": y.detach(), "dx": rows.grad, **weights}

    exact = step()
    with fm.recipe(recipe):
        with fm.disabled("*"):
            wanted = step()
        got = step()
        (plan,) = chain.explain(x.requires_grad_(), **named).plans
    rules = {s.rule for s in plan.steps}
    wgrad = "sm90.fp8_grouped_wgrad" if recipe == "fp8_tensor" else "sm90.dequantized_wgrad"
    assert {"sm90.quantize", "sm90.quantize_grad", "sm90.quantize_weight", wgrad} <= rules
    for name, want in wanted.items():
        assert want.abs().sum() > 0, f"{name}: zeros would pass"
        of_plain, of_kernels = ((t.double() - exact[name].double()).norm() for t in (want, got[name]))
        difference = (got[name].double() - want.double()).norm()
        assert difference < 0.6 * of_plain, f"{name}: the difference is {difference / of_plain} of the recipe's error"
        assert of_kernels < 1.1 * of_plain, f"{name}: error {of_kernels / of_plain} times that of plain PyTorch"


# -------------------------------------------------------------------------------------------------------- on a GPU


@needs_gpu
@pytest.mark.parametrize("which", ["mxfp8", "nvfp4 gradient", "row"])
def test_full_size(device, which):
    rows, columns, experts = 65_536, 2048, 128
    x = torch.randn(rows, columns, device=device).to(BF16)
    for splits in ([rows // experts] * experts, [0] * 5 + [rows - 77] + [0] * 122):
        check_rows(x, QUANTIZERS[which], (-1, -2), offsets_of(splits, device))


@needs_gpu
@pytest.mark.parametrize("which", ["mxfp8", "nvfp4 rotated", "row", "tensor"])
def test_nothing_waits_for_the_device_and_a_graph_follows_the_splits(device, no_sync, which):
    x = torch.randn(400, 256, device=device).to(BF16)
    offsets = offsets_of([5, 0, 300, 7], device)
    run = bind_forms(x, QUANTIZERS[which], (-1, -2), offsets)
    run(x, offsets)
    with no_sync():
        run(x, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(x, offsets)
    for splits in ([5, 0, 300, 7], [0, 0, 0, 0], [400, 0, 0, 0], [0, 1, 0, 390]):
        offsets.copy_(offsets_of(splits, device))
        graph.replay()
        check(found, [quantize(x, QUANTIZERS[which], axis, offsets=offsets) for axis in (-1, -2)])
