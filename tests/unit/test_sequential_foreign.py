"""Foreign modules in a `Sequential`: they split the chain, and values that ops provide cross the split."""

import re

import pytest
import torch
from kit.toy import E, H, assert_same, experts, outcome
from torch import nn

import fusedmoe as fm


def routing(tokens=6):
    return {
        "expert_index": torch.tensor([[0, 2], [2, E], [2, 0], [0, 0], [-1, 2], [2, 0]])[:tokens],
        "expert_weight": torch.rand(tokens, 2, dtype=torch.float64, requires_grad=True),
    }


def tokens(count=6):
    return torch.randn(count, H, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("where", [1, 4])
def test_what_dispatch_provides_crosses_a_split_with_its_gradients(where):
    """Router weights reach Combine, or Scale, on the other side of a foreign module; their gradients come back."""
    modules = [fm.Dispatch(), *experts(), fm.Combine()]
    whole = fm.Sequential(*modules)
    split = fm.Sequential(*modules[:where], nn.Identity(), *modules[where:])
    x, named = tokens(), routing()
    expected, got = outcome(whole, x, **named), outcome(split, x, **named)
    assert {"x", "expert_weight"} < expected.keys()
    renamed = {f"{i + (i >= where)}.weight": f"{i}.weight" for i in range(5)}
    assert_same({renamed.get(k, k): v for k, v in got.items()}, expected)
    assert len(split.explain(x, **named).plans) == 2
    assert split.runtime_inputs == whole.runtime_inputs == ("expert_index", "expert_weight")


class Returning(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, x):
        return self.give(x)


dynamos_own = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")


@dynamos_own
@pytest.mark.parametrize(
    ("module", "named"),
    [
        (nn.GRU(4, 4), "GRU: output: expected a tensor, the rows for 2.{}, got tuple"),
        (Returning(lambda x: None), "Returning: output: expected a tensor, the rows for 2.{}, got NoneType"),
        (Returning(lambda x: [x]), "Returning: output: expected a tensor, the rows for 2.{}, got list"),
    ],
    ids=["tuple", "None", "list"],
)
@pytest.mark.parametrize(("grouped", "backend"), [(False, "eager"), (True, None)])
def test_a_module_that_returns_no_tensor_to_an_op_is_named(module, named, grouped, backend):
    """The op failed with an AttributeError of the tuple."""
    make = (lambda: fm.GroupedLinear(2, 4, 4)) if grouped else (lambda: fm.Linear(4, 4))
    given = {"splits": torch.tensor([1, 2])} if grouped else {}
    chain, x = fm.Sequential(make(), module, make()), torch.randn(3, 4)
    call = chain if backend is None else torch.compile(chain, backend=backend)
    with pytest.raises(fm.InputError, match=re.escape("Sequential: 1." + named.format(type(chain[2]).__name__))):
        call(x, **given)


@dynamos_own
def test_compiled_after_another_with_a_module_that_dynamo_does_not_trace():
    """The graph up to there was taken for the next one too: an op had no attribute '_description'."""
    x = torch.randn(3, 4)
    for chain in (fm.Sequential(fm.Linear(4, 4), nn.GRU(4, 4)), fm.Sequential(fm.Linear(4, 4), nn.Tanh())):
        torch.testing.assert_close(torch.compile(chain, backend="eager")(x), chain(x))
