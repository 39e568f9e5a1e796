"""What `fm.strict()` misses with the rules for sm_90, and what it does not, on the CPU."""

import logging
import re

import pytest
import torch
from kit.toy import only_plan, outcome
from test_sm90_rules import BF16, E, H, I, experts, hopper_machine, inputs, rows  # noqa: F401  (a fixture)

import fusedmoe as fm

pytestmark = pytest.mark.usefixtures("builtin_rules")


def missed(chain, x, **named):
    """The ops that `fm.strict()` names."""
    with fm.strict():
        try:
            chain(x, **named)
        except fm.FusionError as error:
            return re.findall(r"^  (\S+):", str(error), re.MULTILINE)
    return []


def why(chain, label, x, **named):
    (step,) = [s for s in only_plan(chain, x, **named).unfused if s.ops == (label,)]
    return step.why


def llama4(act=fm.SwiGLU, hidden=H, dtype=BF16):
    """Llama-4's experts: the router's score multiplies what goes into them."""
    chain = fm.Sequential(
        fm.Dispatch(E),
        fm.Scale("probs"),
        fm.GroupedLinear(E, hidden, 2 * I, dtype=dtype),
        act(),
        fm.GroupedLinear(E, I, hidden, dtype=dtype),
        fm.Combine(None),
    )
    x = torch.randn(9, hidden, dtype=dtype, requires_grad=True)
    return chain, x, {"expert_index": torch.randint(0, E, (9, 2)), "expert_weight": torch.rand(9, 2).requires_grad_()}


def test_a_scale_before_the_first_layer_is_none_that_the_backward_rule_is_for(caplog):
    """The rule for `Dgrad, ScaleGrad, DScale, DSwiGLU` takes the scale between an activation and a layer."""
    chain, x, named = llama4()
    with fm.strict():
        outcome(chain, x, **named)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_what_else_is_missed_there_is_told():
    chain, x, named = llama4(hidden=36)
    found = missed(chain, x, **named)
    assert {"0.Dispatch", "2.GroupedLinear", "4.GroupedLinear", "2.Wgrad", "2.Dgrad", "5.Combine"} <= set(found)
    assert not {"1.Scale", "1.ScaleGrad", "1.DScale"} & set(found)

    class Mine(fm.SwiGLU):
        pass

    chain, x, named = llama4(Mine)
    assert missed(chain, x, **named) == ["3.Mine"]


def test_a_scale_between_an_activation_and_a_layer_is_missed_where_it_is_declined():
    named = inputs(dtype=torch.float64)
    found = missed(experts(), rows(), **named)
    assert found == ["2.Scale", "2.ScaleGrad", "2.DScale"]
    reason = "CONSTRAINT: the row scale is float64, not float32, bfloat16 or float16: convert it"
    assert why(experts(), "2.Scale", rows(), **named) == f"sm90.grouped_gemm_activation: {reason}"
    assert why(experts(), "2.DScale", rows(), **named) == f"sm90.grouped_dgrad_activation: {reason}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("act", [None, fm.SwiGLU])
def test_only_what_would_be_fused_is_missed(act, dtype):
    """A trained scale after the last layer would not be, whatever its dtype; after an activation it would."""
    ops = [fm.GroupedLinear(E, H, 2 * I, dtype=BF16), *([act()] if act else []), fm.Scale("probs")]
    chain, label = fm.Sequential(*ops), f"{len(ops) - 1}.Scale"
    of_scale = [label, f"{len(ops) - 1}.ScaleGrad", f"{len(ops) - 1}.DScale"]
    assert missed(chain, rows(), **inputs(dtype=dtype)) == (of_scale if act and dtype is torch.float64 else [])
    of_scale = [label, f"{len(ops) - 1}.DScale"] if act else [label]
    frozen = inputs(requires_grad=False, dtype=dtype)
    assert missed(chain, rows(), **frozen) == (of_scale if dtype is torch.float64 else [])


def test_a_trained_scale_after_the_last_layer_is_not_missed_and_says_what_cannot_be_kept(caplog):
    chain = fm.Sequential(fm.GroupedLinear(E, H, 2 * I, dtype=BF16), fm.Scale("probs"))
    x, named = rows(), inputs()
    assert missed(chain, x, **named) == []
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    reason = "sm90.grouped_gemm: CONSTRAINT: cannot keep 1.input, which 1.ScaleGrad needs"
    assert why(chain, "1.Scale", x, **named) == reason
    assert not only_plan(chain, x, **inputs(requires_grad=False)).steps[0].nearest_miss
