"""Parameters that a call passes, and inference."""

import weakref

import pytest
import torch
from kit import plain_models
from kit.compare import assert_bitwise, assert_close

import fusedmoe as fm

E, H, I = 4, 8, 8  # noqa: E741  (experts, hidden, intermediate: square layers can share a weight)
SPLITS = torch.tensor([3, 0, 4, 2])
ROWS = 11  # two of them belong to no expert


def rows(requires_grad=True):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, H, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def experts(seed=0):
    torch.manual_seed(seed)
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H)).double()


def moe(seed=0):
    torch.manual_seed(seed)
    return fm.MoE(H, I, E, 2).double()


def plain_experts(weights, x):
    """The same of these weights, in plain PyTorch."""
    model = plain_models.Experts(E, H, I, torch.float64)
    return torch.func.functional_call(model, weights, (x, SPLITS))


def square(seed=0):
    """Two layers of the same shape with an activation between them."""
    torch.manual_seed(seed)
    return fm.Sequential(fm.GroupedLinear(E, H, H), fm.SquaredReLU(), fm.GroupedLinear(E, H, H)).double()


def plain_square(x, first, second):
    layer = plain_models.GroupedLinear(E, H, H, torch.float64)
    hidden = torch.func.functional_call(layer, {"weight": first}, (x, SPLITS))
    return torch.func.functional_call(layer, {"weight": second}, (hidden.clamp(min=0).square(), SPLITS))


def weighted(y):
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()


def with_gradients(y, *wanted):
    return [y, *torch.autograd.grad(weighted(y), wanted)]


def leaves(module):
    return {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}


@pytest.mark.parametrize("how", ["functional_call", "forward_with", "MoE"])
def test_replaced_parameters_get_the_gradients(how):
    make = moe if how == "MoE" else experts
    module, other, x = make(), leaves(make(1)), rows()
    if how == "forward_with":
        y = experts().without_parameters().forward_with(other, x, splits=SPLITS)
    else:
        y = torch.func.functional_call(module, other, (x,), {"splits": SPLITS} if how == "functional_call" else {})
    got = with_gradients(y, x, *other.values())
    x, same = rows(), leaves(make(1))
    if how == "MoE":
        want = torch.func.functional_call(plain_models.MoE(H, I, E, 2), same, (x,))
    else:
        want = plain_experts(same, x)
    assert_close(got, with_gradients(want, x, *same.values()))
    assert all(p.grad is None for p in module.parameters())


def test_a_weight_of_several_layers():
    """Of one Sequential, and of two."""
    first, second, x = square(0), square(1), rows()
    first[2].weight = second[0].weight = first[0].weight
    assert len(list(first.parameters())) == 1
    weighted(second(first(x, splits=SPLITS), splits=SPLITS)).backward()
    shared, last = (w.detach().clone().requires_grad_() for w in (first[0].weight, second[2].weight))
    other = rows()
    weighted(plain_square(plain_square(other, shared, shared), shared, last)).backward()
    got = [first[0].weight.grad, second[2].weight.grad, x.grad]
    assert_close(got, [shared.grad, last.grad, other.grad])


def test_wrong_parameters_are_refused_by_name():
    module, given = experts(), leaves(experts())
    with pytest.raises(fm.InputError, match=r"'0\.weight' is given, but the op has one"):
        module.forward_with(given, rows(), splits=SPLITS)
    module.without_parameters()
    for changed, message in (
        ({"1.weight": torch.zeros(1)}, r"no op takes '1\.weight'"),
        ({"0.weight": torch.zeros(E, H, 2 * I).double()}, r"weight: expected shape \(4, 16, 8\)"),
    ):
        with pytest.raises(fm.InputError, match=message):
            module.forward_with({**given, **changed}, rows(), splits=SPLITS)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(context, monkeypatch):
    module, x, references, compute = experts(), rows(), [], fm.SwiGLU.compute

    def noted(op, x):
        y = compute(op, x)
        references.extend([weakref.ref(x), weakref.ref(y)])
        return y

    def alive():
        return sum(reference() is not None for reference in references)

    monkeypatch.setattr(fm.SwiGLU, "compute", noted)
    want = module(x, splits=SPLITS)
    assert len(references) == 2
    assert alive() > 0, "nothing to see even with gradients"
    del want
    assert alive() == 0
    want = module(x, splits=SPLITS).detach()
    with context():
        y = module(x, splits=SPLITS)
        assert alive() == 0
        assert y.grad_fn is None
        assert_bitwise(y, want)


def test_parameters_made_in_inference_mode():
    want = experts()(rows(), splits=SPLITS).detach()
    with torch.inference_mode():
        module, x = experts(), rows(requires_grad=False)
        assert_bitwise(module(x, splits=SPLITS), want)
        with fm.recipe("mxfp8"):
            y = module.float()(x.float(), splits=SPLITS)
            module[2].weight.mul_(2)  # torch counts no changes of such a tensor: nothing may be kept of it
            assert_bitwise(module(x.float(), splits=SPLITS), 2 * y)
