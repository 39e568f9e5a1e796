"""Rows after the last expert's inside of a chain: stand-ins leave NaN there, as kernels that need not write them. Every
op that reads them, and every result, has zeros, as without kernels.
"""

import pytest
import torch
from kit.sm90_machine import BF16, SPLITS, E, H, I, experts, operands, routed, rows, strided
from kit.sm90_stand_ins import calls
from kit.toy import outcome

import fusedmoe as fm

pytestmark = pytest.mark.usefixtures("hopper_machine")
END = sum(SPLITS)
GIVEN = {"splits": torch.tensor(SPLITS)}


class Affine(fm.Op):
    """Whose gradients of parameters autograd sums over all rows."""

    parameter_names = ("weight",)

    def __init__(self, features):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(features, dtype=BF16))

    def compute(self, x, weight):
        return x * weight


class Tanh(fm.Op):
    zeroes_tail = True  # of zeros alone

    def compute(self, x):
        return x.tanh()


class Norms(fm.Op):
    """Values per row that a later part reads."""

    provides = ("norms",)

    def infer(self, x):
        return fm.TensorSpec(tuple(x.shape), x.dtype), fm.TensorSpec((x.shape[0],), x.dtype)

    def compute(self, x):
        return x * 1, x.norm(dim=1)


class TimesNorms(torch.nn.Module):
    runtime_inputs = ("norms",)

    def forward(self, x, norms):
        assert not norms[END:].any()
        return x * norms[:, None]


def linear(k=H, n=I):
    return fm.GroupedLinear(E, k, n, dtype=BF16)


CHAINS = {
    "an op with parameters": lambda: [linear(), Affine(I), linear(I, H)],
    "after an activation": lambda: [linear(H, 2 * I), fm.SwiGLU(), Affine(I), linear(I, H)],
    "zeros of zeros": lambda: [linear(), Tanh()],
    "values per row": lambda: [linear(), Norms(), TimesNorms(), linear(I, H)],
    "routed again": lambda: [linear(H, H), fm.Router(H, E, 2, dtype=BF16), fm.Dispatch(E), linear(H, H), fm.Combine()],
    "codes": lambda: [linear(128, 128), fm.Quantize("fp8_block"), Affine(128), linear(128, 128)],
}


@pytest.mark.parametrize("name", CHAINS)
def test_results_and_gradients_are_those_without_kernels(name):
    chain = fm.Sequential(*CHAINS[name]())
    for p in chain.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = rows(features=chain[0].in_features)
    with fm.disabled("*"):
        expected = outcome(chain, x, **GIVEN)
    calls.clear()
    found = outcome(chain, x, **GIVEN)
    assert any("gemm" in name for name, _ in calls), "kernels ran"
    assert found.keys() == expected.keys()
    for key, want in expected.items():
        assert not found[key].isnan().any(), key
        assert torch.allclose(found[key].float(), want.float(), rtol=0.05, atol=0.05 * want.float().abs().max()), key
    for key in ("y", "x"):
        assert not found[key][END:].any() or name == "routed again"


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_a_step_that_declines_leaves_zeros_too(recipe):
    """The preactivation comes back from the graph of autograd at an address that kernels do not read."""
    chain = experts(scale=True)
    x, named = operands(chain)
    unpack = lambda t: strided(t, "address") if t.dtype is BF16 else t  # noqa: E731
    with fm.recipe(recipe), torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = chain(x, **named)
        y.backward(torch.ones_like(y))
    for grad in (named["probs"].grad, x.grad):
        assert grad[:END].any()
        assert not grad[END:].any()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_a_routed_layer_writes_no_tail(recipe):
    chain = routed()
    x, named = operands(chain)
    with fm.recipe(recipe):
        chain(x, **named).sum().backward()
    written = [what["options"].zero_tail for _, what in calls if "options" in what]
    assert len(written) == 6
    assert not any(written)
