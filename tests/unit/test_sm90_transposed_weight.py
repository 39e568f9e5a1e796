"""The rule that transposes the codes of stored weights, on the CPU: plans, and results with stand-ins."""

import pytest
import torch
from kit import sm90_stand_ins as stand_ins
from kit.toy import only_plan, outcome
from test_sm90_fp8_rules import stand_ins_for_fp8  # noqa: F401  (a fixture)
from test_sm90_rules import BF16, SPLITS, E, called, hopper_machine, inputs, rows  # noqa: F401  (a fixture)

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.kernels.sm90 import products
from fusedmoe.numerics.formats import fp8_block

pytestmark = pytest.mark.usefixtures("builtin_rules")
H, I = 64, 128  # noqa: E741
RULE = "sm90.transposed_weight"


def stored(n, k):
    q = fm.quantize(torch.randn(E, n, k) / k**0.5, fp8_block(across=128, power_of_two=False))
    return fm.GroupedLinear.from_quantized(q.data, q.scale)


def experts(hidden=H):
    return fm.Sequential(stored(2 * I, hidden), fm.SwiGLU(), stored(hidden, I))


def glue(plan):
    return {step.ops[0]: step.rule for step in plan.glue if "StoredWeight" in step.ops[0]}


def both_ways(chain, x, **named):
    """Check the bits against those of codes that plain PyTorch transposes; return the plan."""
    with fm.disabled(RULE):
        expected = outcome(chain, x, **named)
    stand_ins.calls.clear()
    with fm.strict():
        got = outcome(chain, x, **named)
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        assert want.any(), f"{name}: zeros would pass"
        assert torch.equal(got[name], want), name
    return only_plan(chain, x, **named)


def test_codes_are_transposed_right_before_their_product(monkeypatch):
    """Nothing keeps them, and their scales need no copy."""
    copied = []
    monkeypatch.setattr(
        "fusedmoe.builtin_rules.products.fp8.with_strides",
        lambda scale: (copied.append(tuple(scale.shape)), products.with_strides(scale))[1],
    )
    chain = experts()
    plan = both_ways(chain, rows(hidden=H), **inputs(scale=False))
    assert glue(plan) == {"0:weight.StoredWeight": RULE, "2:weight.StoredWeight": RULE}
    assert called("transpose_codes") == [{"shape": (E, H, I)}, {"shape": (E, 2 * I, H)}]
    order = [name for name, _ in stand_ins.calls if name == "transpose_codes" or "backward" in name]
    assert order == ["transpose_codes", "block_scaled_gemm_activation_backward", "transpose_codes"]
    assert not any("weight" in value for value in plan.kept)
    assert fm.weight_cache_bytes(chain) == 0
    copied.clear()
    y = chain(rows(hidden=H), **inputs(scale=False))
    in_forward = len(copied)
    y.sum().backward()
    assert len(copied) == in_forward


def test_inference_transposes_nothing():
    with torch.no_grad():
        plan = both_ways(experts(), rows(hidden=H, requires_grad=False), **inputs(scale=False))
    assert not called("transpose_codes")
    assert RULE not in glue(plan).values()


def test_frozen_rows():
    """Only the first layer's input gradient is not wanted."""
    chain, x = fm.Sequential(stored(2 * I, H)), rows(hidden=H, requires_grad=False)
    chain(x, **inputs(scale=False))
    assert not called("transpose_codes")


# ------------------------------------------------------------------------------------------------ must not fuse


def test_widths_that_are_not_a_multiple_of_16():
    chain, x, named = experts(72), rows(hidden=72), inputs(scale=False)
    plan = only_plan(chain, x, **named)
    assert glue(plan) == {"0:weight.StoredWeight": None, "2:weight.StoredWeight": None}
    (first, second) = [step.nearest_miss for step in plan.glue if "StoredWeight" in step.ops[0]]
    assert (first.status, first.rule) == (second.status, second.rule) == (Status.CONSTRAINT, RULE)
    assert {first.reason, second.reason} == {
        "out_features 72 is not a multiple of 16",
        "in_features 72 is not a multiple of 16",
    }
    outcome(chain, x, **named)
    assert not called("transpose_codes")


def test_codes_that_are_not_contiguous():
    chain, x, named = experts(), rows(hidden=H), inputs(scale=False)
    want = outcome(chain, x, **named)
    codes = chain[0].weight
    wide = torch.zeros(E, 2 * I, H + 16, dtype=codes.dtype)
    wide.view(torch.uint8)[..., :H] = codes.view(torch.uint8)
    chain[0].weight = torch.nn.Parameter(wide[..., :H], requires_grad=False)
    stand_ins.calls.clear()
    got = outcome(chain, x, **named)
    assert called("transpose_codes") == [{"shape": (E, H, I)}]
    for name, t in want.items():
        assert t.any()
        assert torch.equal(got[name], t), name
