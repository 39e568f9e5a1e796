"""What a `Sequential` holds: state dicts, copies, pickles, devices and dtypes, parameters that come and go."""

import copy
import io
import pickle

import pytest
import torch
from kit import toy
from kit.toy import E, H, I, assert_same, experts, inputs, only_plan, outcome, rows, rules_used
from torch import nn

import fusedmoe as fm
from fusedmoe import InputError

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: _saved_and_loaded(m),
}


def _saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", COPIES)
def test_copies(how):
    chain = fm.Sequential(fm.Scale("probs"), *experts())
    x, named = rows(), inputs(scale=True)
    with fm.register(toy.gemm_glu()):  # a plan that holds functions of this process
        chain(x, **named)
        chain[0](x, probs=named["probs"])
        twin = COPIES[how](chain)
    assert type(twin) is fm.Sequential
    assert twin[1].weight is not chain[1].weight
    assert_same(outcome(twin, x, **named), outcome(chain, x, **named))


@pytest.mark.parametrize("materialize", ["to_empty", "assign"])
def test_built_on_the_meta_device(materialize):
    with torch.device("meta"):
        chain = experts()
    assert chain[0].weight.is_meta
    real = experts()
    if materialize == "to_empty":
        chain.to_empty(device="cpu")
        chain.load_state_dict(real.state_dict())
    else:
        chain.load_state_dict(real.state_dict(), assign=True)
    x, named = rows(), inputs()
    assert_same(outcome(chain, x, **named), outcome(real, x, **named))


def test_a_call_on_the_meta_device_gives_meta_outputs():
    with torch.device("meta"):
        chain = fm.Sequential(fm.Dispatch(), *experts(scale=False, dtype=torch.bfloat16), fm.Combine())
        y = chain(
            torch.empty(5, H, dtype=torch.bfloat16),
            expert_index=torch.empty(5, 2, dtype=torch.int64),
            expert_weight=torch.empty(5, 2),
        )
    assert (y.device.type, tuple(y.shape), y.dtype) == ("meta", (5, H), torch.bfloat16)


def test_rows_of_another_dtype_than_the_weight_are_refused():
    with pytest.raises(InputError, match=r"0\.GroupedLinear.*x: expected torch.float64, the dtype of weight"):
        experts()(rows(dtype=torch.float32), **inputs())


def test_a_parameter_of_another_shape_is_refused_by_name():
    chain = experts()
    chain(rows(), **inputs())
    chain[2].weight = nn.Parameter(torch.zeros(E, H, I + 1, dtype=torch.float64))
    with pytest.raises(InputError, match=r"2\.GroupedLinear.*weight: expected shape \(3, 8, 4\), got \(3, 8, 5\)"):
        chain(rows(), **inputs())


def test_a_bias_may_appear_and_go():
    chain, x, named = experts(), rows(), inputs()
    y = chain(x, **named)
    chain[2].bias = nn.Parameter(torch.ones(E, H, dtype=torch.float64))
    with_bias = outcome(chain, x, **named)
    torch.testing.assert_close(with_bias["y"][:7], y.detach()[:7] + 1)
    assert torch.equal(with_bias["y"][7:], torch.zeros(2, H, dtype=torch.float64))
    assert "2.bias" in with_bias
    chain[2].bias = None
    assert torch.equal(chain(x, **named), y)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_parametrized_weight_is_read_through_its_parametrization():
    chain, x, named = experts(), rows(), inputs()
    expected = copy.deepcopy(chain)
    with torch.no_grad():
        expected[0].weight.mul_(2)
    nn.utils.parametrize.register_parametrization(chain[0], "weight", Doubled())
    with fm.register(toy.gemm()):
        plan = only_plan(chain, x, **named)
        got = outcome(chain, x, **named)
    want = outcome(expected, x, **named)
    # torch gives a parametrized module a class of its own, which no rule names
    assert rules_used(plan) == ["toy.gemm"]
    assert "got ParametrizedGroupedLinear, a subclass of GroupedLinear" in toy.status(plan, "toy.gemm", 0)[1]
    torch.testing.assert_close(got["y"], want["y"])
    torch.testing.assert_close(got["0.parametrizations.weight.original"], 2 * want["0.weight"])
