"""NaN and infinity under every recipe: what they touch is not finite, as in bf16, and everything else is as it was."""

import pytest
import torch
from kit.compare import pairwise
from kit.layers import outcome

import fusedmoe as fm
from fusedmoe.numerics import formats

DELAYED = fm.numerics.recipes.FP8Tensor(delayed=formats.Delayed())
RECIPES = ["bf16", "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4", DELAYED]
E, H, I = 4, 64, 32  # noqa: E741  (experts, hidden, intermediate)
SPLITS = torch.tensor([20, 17, 0, 30])
ROWS = 67
ROW, EXPERT = 25, 1  # the row that is changed, and its expert
COLUMN = 7


def experts():
    torch.manual_seed(0)
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H))


def results(recipe, place=None, value=0.0):
    module, x, dy = experts(), torch.randn(ROWS, H), torch.randn(ROWS, H)
    changed = {
        "x": x[ROW],
        "grad": dy[ROW],
        "0.weight": module[0].weight[EXPERT, 3],
        "2.weight": module[2].weight[EXPERT, 3],
    }
    # with a step of delayed scaling before, so that there is a scale which does not follow from the values
    for last in (False, True) if recipe is DELAYED else (True,):
        with torch.no_grad():
            if place:
                changed[place][COLUMN] = value if last else 0.0
        torch.manual_seed(1)  # gradients may be rounded stochastically
        found = outcome(module, x.clone().requires_grad_(), dy, recipe, splits=SPLITS)
    return found


@pytest.mark.parametrize(
    ("recipe", "place", "value"),
    pairwise(RECIPES, ["x", "grad", "0.weight", "2.weight"], [torch.nan, torch.inf, -torch.inf]),
    ids=str,
)
def test_results_that_are_not_finite_in_bf16_are_not_finite(recipe, place, value):
    clean, found, in_bf16 = results(recipe, place, 0.0), results(recipe, place, value), results("bf16", place, value)
    expert_of_row = torch.arange(E).repeat_interleave(SPLITS)
    for name, tensor in found.items():
        before, reference = clean[name], in_bf16[name]
        assert before.isfinite().all()
        affected = (expert_of_row if name in ("y", "x") else torch.arange(E)) == EXPERT
        # row by row: a row with something that is not finite in bf16 has something here; experts of gradients alike
        assert not tensor[~reference.isfinite().flatten(1).all(1)].flatten(1).isfinite().all(1).any(), name
        # no other expert knows
        assert torch.equal(tensor[~affected], before[~affected]), name
    assert not all(t.isfinite().all() for t in found.values())
    if place in ("x", "grad"):  # other rows of the expert are as they were
        rows, others = {"x": "y", "grad": "x"}[place], torch.arange(ROWS) != ROW
        assert torch.equal(found[rows][others], clean[rows][others])
        assert not found[rows][ROW].isfinite().all()
        assert place == "grad" or not found[rows][ROW].isfinite().any()
