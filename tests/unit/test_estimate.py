"""The estimated time under a recipe and in bf16: it agrees with the measured layers, and the hint follows from it."""

import functools
import json
from pathlib import Path

import pytest
import torch

import fusedmoe as fm
from benchmarks.fp8.layers import ACCUMULATED, MICRO_BATCHES, STEP
from benchmarks.shapes import load
from fusedmoe.fusion.report.data import hints
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import FP8Tensor

pytestmark = pytest.mark.usefixtures("builtin_rules")

RESULTS = Path(__file__).parents[2] / "benchmarks/results/nvidia-h200/fp8.json"
LAYERS = {layer["name"]: layer["rows"] for layer in json.loads(RESULTS.read_text())["layers"]}
SHAPES = load()
BF16 = torch.bfloat16


def linears(shape, **kwargs):
    up = fm.GroupedLinear(shape.experts, shape.hidden, 2 * shape.intermediate, **kwargs)
    return up, fm.GroupedLinear(shape.experts, shape.intermediate, shape.hidden, **kwargs)


@functools.cache
def explained(shape, recipe="fp8_block", *, grad=True, accumulates=False, arch=90):
    """The plan of a whole layer or, for one expert per token, of experts on dispatched rows."""
    with torch.device("meta"):
        x = torch.empty(shape.tokens, shape.hidden, dtype=BF16, requires_grad=True)
        if shape.top_k > 1:
            sizes = {"hidden": shape.hidden, "intermediate": shape.intermediate}
            layer = fm.MoE(**sizes, num_experts=shape.experts, top_k=shape.top_k, dtype=BF16)
            inputs = {}
        else:
            up, down = linears(shape, dtype=BF16)
            layer = fm.Sequential(up, fm.SwiGLU(), fm.Scale("probs"), down)
            inputs = {"splits": torch.empty(shape.experts, dtype=torch.int64)}
            inputs["probs"] = torch.empty(shape.tokens, requires_grad=True)
    for module in layer.modules():
        if isinstance(module, fm.GroupedLinear):
            module.accumulate_into_main_grad = accumulates
    with fm.recipe(recipe), torch.set_grad_enabled(grad):
        (plan,) = layer.explain(x, arch=arch, **inputs).plans
    return plan


def measured(name, case, recipe):
    (row,) = [row for row in LAYERS[name] if (row["case"], row["recipe"]) == (case, recipe)]
    return row["ms"]


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_block:wgrad=bf16", "fp8_tensor, delayed"])
@pytest.mark.parametrize("name", LAYERS)
def test_estimates_agree_with_the_measured_layers(name, recipe):
    if recipe not in {row["recipe"] for row in LAYERS[name]}:
        pytest.skip("not measured")
    for case, accumulates, batches in ((STEP, False, 1), (ACCUMULATED, True, MICRO_BATCHES)):
        asked = FP8Tensor(delayed=Delayed()) if recipe.startswith("fp8_tensor") else recipe
        estimate = explained(SHAPES[name], asked, accumulates=accumulates).estimate
        us = estimate.us + estimate.weights_us / batches
        ratio, real = estimate.bf16_us / us, measured(name, case, "bf16") / measured(name, case, recipe)
        assert ratio == pytest.approx(real, rel=0.15), case
        assert us / 1e3 == pytest.approx(measured(name, case, recipe), rel=0.2), case
        needed = estimate.micro_batches
        if not 0.94 < real < 1.06:  # a clear result
            assert (needed is not None and needed <= batches) is (real > 1), case


def of_model(name):
    """The explanation of a model with one such layer."""
    shape = SHAPES[name]
    sizes = {"hidden": shape.hidden, "intermediate": shape.intermediate, "num_experts": shape.experts}
    model = torch.nn.Sequential(fm.MoE(**sizes, top_k=shape.top_k, dtype=BF16, device="meta"))
    with fm.recipe("fp8_block"):
        return str(fm.explain(model, tokens=shape.tokens, arch=90))


def test_the_hint_of_a_layer_that_is_slower_than_in_bf16():
    plan = explained(SHAPES["sonic-7b-n256"])
    assert plan.estimate.micro_batches is None
    assert hints([plan]) == [
        f"recipe fp8_block is slower than bf16 for these shapes, as {plan.estimate}. "
        'recipe="bf16" of an op leaves it unquantized'
    ]
    assert hints([plan])[0] in of_model("sonic-7b-n256")
    assert "slower" not in of_model("mixtral-8x7b")
    plan = explained(SHAPES["qwen3-next-80b-a3b"])
    assert 1 < plan.estimate.micro_batches < 100
    assert f"with fewer than {plan.estimate.micro_batches} micro-batches per optimizer step" in hints([plan])[0]
    plan = explained(SHAPES["deepseek-v3-ep32"])
    assert hints([plan]) == []


def test_plans_without_an_estimate():
    shape = SHAPES["qwen3-30b-a3b"]
    assert explained(shape, "bf16").estimate is None
    assert explained(shape, arch=100).estimate is None  # no rule for it
    x, splits = torch.zeros(512, 256, dtype=BF16), torch.full((4,), 128)
    for arch, own in ((None, None), (90, "fp8_block")):  # unfused, and the same under "bf16"
        layer = fm.Sequential(fm.GroupedLinear(4, 256, 256, dtype=BF16, recipe=own))
        with fm.recipe("bf16" if own else "fp8_block"):
            (plan,) = layer.explain(x, splits=splits, arch=arch).plans
        assert plan.formats
        assert plan.estimate is None


def test_flops_are_those_of_the_products():
    shape = SHAPES["qwen3-30b-a3b"]
    product = 2.0 * shape.rows * shape.hidden * shape.intermediate
    padding = 2.0 * 64 * shape.experts * shape.hidden * shape.intermediate
    plan = explained(shape, "bf16")
    assert sum(step.flops for step in plan.steps) == 9 * product
    assert not any(step.of_codes for step in plan.steps)
    assert sum(step.flops for step in explained(shape, "bf16", grad=False).steps) == 3 * product
    plan = explained(shape)
    assert sum(step.flops for step in plan.steps) == 9 * product + 3 * padding
    assert {step.of_codes for step in plan.steps if step.flops} == {True}
    assert sum(step.flops for step in explained(shape, "fp8_block:wgrad=bf16").steps) == 9 * product
    assert sum(step.of_codes for step in explained(shape, "fp8_block:wgrad=bf16").steps) == 4
    plan = explained(shape, "mxfp8")  # its kernels multiply dequantized values
    assert not any(step.of_codes for step in plan.steps)
    assert plan.estimate.micro_batches is None  # slower than bf16
    assert explained(shape, "fp8_row").estimate is None  # products are unfused
    assert not explained(shape, "nvfp4").unfused
    assert explained(shape, "nvfp4").estimate is None  # its quantization takes longer than its bytes
    assert explained(SHAPES["deepseek-v3-ep32"], FP8Tensor()).estimate.micro_batches == 1


def test_bytes_added_to_main_grad_count():
    shape = SHAPES["deepseek-v3-ep32"]
    plain, added = (explained(shape, accumulates=accumulates) for accumulates in (False, True))
    weights = 3 * shape.experts * shape.hidden * shape.intermediate
    more = [b.bytes_moved - a.bytes_moved for a, b in zip(plain.steps, added.steps, strict=True)]
    assert sum(more) == (8 - 2) * weights  # fp32 is read and written, in place of bf16 written
    assert sum(count > 0 for count in more) == 2
    (offsets,) = plain.glue
    assert offsets.bytes_moved == shape.experts * (8 + 4)  # of the rows, their number alone
