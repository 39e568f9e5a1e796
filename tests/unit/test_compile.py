"""Under torch.compile a chain is a graph break: same results, and Dynamo does not trace the planner."""

import pytest
import torch

import fusedmoe as fm


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own looking around
@pytest.mark.parametrize("make", [
    lambda: fm.Sequential(fm.GroupedLinear(4, 16, 32), fm.SwiGLU(), fm.GroupedLinear(4, 16, 16)),
    lambda: fm.GroupedLinear(4, 16, 32),
])  # fmt: skip
def test_compiled_is_eager(make):
    torch.manual_seed(0)
    module = make()
    x = torch.randn(12, 16, requires_grad=True)
    splits = torch.tensor([3, 4, 0, 5])
    y = module(x, splits=splits)
    y.square().sum().backward()
    want = x.grad.clone()
    x.grad = None
    z = torch.compile(module, backend="eager")(x, splits=splits)
    z.square().sum().backward()
    assert torch.equal(y, z)
    assert torch.equal(x.grad, want)
