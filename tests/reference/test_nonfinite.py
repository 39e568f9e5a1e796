"""NaN and infinity under every recipe: what they touch is not finite, as in bf16, and everything else is as it was."""

import pytest
import torch

import fusedmoe as fm
from fusedmoe.numerics import formats

RECIPES = ["bf16", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4"]
DELAYED = fm.numerics.recipes.FP8Tensor(delayed=formats.Delayed())
E, H, I = 4, 64, 32  # noqa: E741  (experts, hidden, intermediate)
SPLITS = [20, 17, 0, 30]
ROW, EXPERT = 25, 1  # the row that is changed, and its expert
COLUMN = 7
VALUES = [torch.nan, torch.inf, -torch.inf]

every_recipe = pytest.mark.parametrize("recipe", [*RECIPES, DELAYED], ids=str)
every_value = pytest.mark.parametrize("value", VALUES, ids=str)


def expert_of_rows():
    return torch.arange(E).repeat_interleave(torch.tensor(SPLITS))


class Results:
    """The output of a call and all its gradients."""

    def __init__(self, recipe, place=None, value=0.0, calls=1):
        torch.manual_seed(0)
        experts = fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H))
        x, dy = torch.randn(sum(SPLITS), H), torch.randn(sum(SPLITS), H)
        with fm.recipe(recipe):
            for call in range(calls):
                last = call == calls - 1
                self._change(experts, x, dy, place, value if last else 0.0)
                given = x.clone().requires_grad_()
                self.y = experts(given, splits=torch.tensor(SPLITS))
                torch.manual_seed(1)  # gradients may be rounded stochastically
                wanted = [given, *experts.parameters()]
                self.dx, *self.dw = torch.autograd.grad(self.y, wanted, dy)

    @staticmethod
    def _change(experts, x, dy, place, value):
        with torch.no_grad():
            if place == "x":
                x[ROW, COLUMN] = value
            elif place == "grad":
                dy[ROW, COLUMN] = value
            elif place == "first weight":
                experts[0].weight[EXPERT, 3, COLUMN] = value
            elif place == "second weight":
                experts[2].weight[EXPERT, 3, COLUMN] = value

    def tensors(self):
        return {"y": self.y, "dx": self.dx, "dw first": self.dw[0], "dw second": self.dw[1]}


# with a step of delayed scaling before, so that there is a scale which does not follow from the values
def results(recipe, place, value):
    return Results(recipe, place, value, calls=2 if recipe is DELAYED else 1)


@pytest.mark.parametrize("place", ["x", "grad", "first weight", "second weight"])
@every_value
@every_recipe
def test_what_is_not_finite_in_bf16_is_not_finite(recipe, value, place):
    clean, found = results(recipe, place, 0.0), results(recipe, place, value)
    in_bf16 = Results("bf16", place, value)
    hit = expert_of_rows() == EXPERT
    for name, tensor in found.tensors().items():
        before, reference = clean.tensors()[name], in_bf16.tensors()[name]
        assert before.isfinite().all()
        affected = hit if name in ("y", "dx") else torch.arange(E) == EXPERT
        # row by row: a row with something that is not finite in bf16 has something here; experts of gradients alike
        assert not tensor[~reference.isfinite().flatten(1).all(1)].flatten(1).isfinite().all(1).any(), name
        # no other expert knows
        assert torch.equal(tensor[~affected], before[~affected]), name
    assert not all(t.isfinite().all() for t in found.tensors().values())


@every_value
@every_recipe
def test_other_rows_of_the_expert_are_as_they_were(recipe, value):
    clean, found = results(recipe, "x", 0.0), results(recipe, "x", value)
    others = torch.arange(sum(SPLITS)) != ROW
    assert torch.equal(found.y[others], clean.y[others])
    assert not found.y[ROW].isfinite().any()
    clean, found = results(recipe, "grad", 0.0), results(recipe, "grad", value)
    assert torch.equal(found.dx[others], clean.dx[others])
    assert not found.dx[ROW].isfinite().all()


@pytest.mark.parametrize("place", ["loss", "weight"])
@every_recipe
def test_a_gradient_scaler_skips_the_step(recipe, place):
    torch.manual_seed(0)
    experts = fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H))
    if place == "weight":
        with torch.no_grad():
            experts[0].weight[EXPERT, 3, COLUMN] = torch.nan
    before = [p.detach().clone() for p in experts.parameters()]
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    largest = 2.0**127
    scaler = torch.amp.GradScaler("cpu", init_scale=largest if place == "loss" else 2.0)
    x, splits = torch.randn(sum(SPLITS), H), torch.tensor(SPLITS)
    with fm.recipe(recipe):
        y = experts(x, splits=splits)
    # one gradient of the loss times its scale is beyond fp32
    loss = y.sum() + 3 * y[ROW, COLUMN] if place == "loss" else y.sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scale = scaler.get_scale()
    scaler.update()
    assert scaler.get_scale() == scale / 2
    for p, was in zip(experts.parameters(), before, strict=True):
        assert torch.equal(p.nan_to_num(nan=12345.0), was.nan_to_num(nan=12345.0))


def test_delayed_scales_survive_an_infinite_step():
    """An infinity is no magnitude: the steps after it scale by those that were finite."""
    torch.manual_seed(0)
    fc, x = fm.GroupedLinear(1, H, I), torch.randn(8, H)
    splits = torch.tensor([8])
    with fm.recipe(DELAYED):
        fc(x.requires_grad_(), splits=splits).sum().backward()
        poisoned = x.detach().clone()
        poisoned[0, 0] = torch.inf
        fc(poisoned.requires_grad_(), splits=splits)
        larger = (100 * x.detach()).requires_grad_()
        fc(larger, splits=splits)
        y = fc(larger, splits=splits)
    want = torch.nn.functional.linear(larger, fc.weight[0])
    assert (y - want).norm() / want.norm() < 0.1
