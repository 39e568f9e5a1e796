"""torch.jit.trace of a module is refused: the error names the remedies, where there was an internal one."""

import pytest
import torch
from torch import nn

import fusedmoe as fm

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.trace(_method)?. is (deprecated|not supported)")

E, H, I = 4, 16, 8  # noqa: E741  (experts, hidden, intermediate)
SPLITS = torch.tensor([3, 4, 2, 3])


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H))

    def forward(self, x):
        return self.experts(x, splits=SPLITS)


MODULES = {
    "Sequential": Experts,
    "MoE": lambda: fm.MoE(H, I, E, 2),
    "op": lambda: fm.Linear(H, 4),
    "op without parameters": lambda: fm.SwiGLU(),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("called_before", [False, True], ids=["new", "called before"])
def test_a_trace_is_refused_and_the_remedies_are_named(name, frozen, called_before):
    module, x = MODULES[name]().requires_grad_(not frozen), torch.randn(12, H)
    if called_before:
        module(x)
    with pytest.raises(fm.InputError, match=r"outside of torch\.jit\.trace.*torch\.export\.export or torch\.compile"):
        torch.jit.trace(module, (x,))


def test_the_module_works_after_the_refusal():
    module, x = Experts(), torch.randn(12, H)
    expected = module(x)
    with pytest.raises(fm.InputError, match=r"torch\.jit\.trace"):
        torch.jit.trace(module, (x,))
    assert torch.equal(module(x), expected)
    assert torch.equal(torch.export.export(module, (x,)).module()(x), expected)
