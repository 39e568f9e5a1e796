"""What `explain()` says of quantized values: their bytes, those that pad each expert's rows too, and their formats.

The bytes are compared with those of the tensors that a call really saves.
"""

import pytest
import torch
from kit.saved import check_bytes, experts, rows, splits
from kit.toy import only_plan

import fusedmoe as fm
from fusedmoe.numerics.formats import QuantizedSpec, Quantizer, nvfp4
from fusedmoe.numerics.formats.roles import ROLES
from fusedmoe.numerics.recipes import MXFP8, RECIPES

BF16 = torch.bfloat16
every_recipe = pytest.mark.parametrize("recipe", [*RECIPES, MXFP8(weight_2d=True)], ids=lambda r: getattr(r, "name", r))


# --- bytes ---------------------------------------------------------------------------------------------------------


SHAPES = {
    "many small experts": (64, 512, 64, 64),
    "odd sizes": (1, 10, 33, 17),
    "fewer rows than experts": (200, 7, 40, 24),
    "no rows": (3, 0, 64, 64),
}


@every_recipe
def test_the_bytes_kept_are_those_saved(recipe):
    for shape in list(SHAPES) if recipe in ("fp8_block", "nvfp4") else list(SHAPES)[:2]:
        num_groups, num_rows, hidden, intermediate = SHAPES[shape]
        chain = experts(num_groups, hidden, intermediate)
        with fm.recipe(recipe):
            check_bytes(chain, rows(num_rows, hidden), splits=splits(num_groups, num_rows))


@every_recipe
def test_a_dense_mlp_and_a_routed_chain(recipe):
    index, weight = torch.randint(0, 4, (20, 2)), torch.rand(20, 2, requires_grad=True)
    with fm.recipe(recipe):
        for shape in ((5, 33), (3, 7, 48), (130, 130)):
            chain = fm.Sequential(fm.Linear(shape[-1], 2 * 36), fm.SwiGLU(), fm.Linear(36, shape[-1])).to(BF16)
            check_bytes(chain, rows(*shape))
        chain = fm.Sequential(fm.Dispatch(), *experts(), fm.Combine())
        check_bytes(chain, rows(20, 32), expert_index=index, expert_weight=weight)


def test_offsets_that_codes_alone_hold_are_kept_too():
    chain = fm.Sequential(fm.Dispatch(num_experts=4), fm.Quantize("mxfp8"), fm.SwiGLU(), fm.Combine())
    index, weight = torch.randint(0, 4, (20, 2)), torch.rand(20, 2, requires_grad=True)
    plan = check_bytes(chain, rows(20, 32), expert_index=index, expert_weight=weight)
    assert plan.kept[-1] == "0.offsets"


@pytest.mark.parametrize("quantizer", [*(q for r in ROLES.values() for q in r), Quantizer(nvfp4())], ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_spec_knows_the_bytes(quantizer, axis):
    format = quantizer.format
    rotated = quantizer.hadamard and axis == -2
    for num_rows in (0, 1, 31, 100):
        x = torch.randn(num_rows, 45)
        spec = QuantizedSpec((num_rows, 45), x.dtype, format, axis, rotated=rotated)
        assert spec.nbytes == fm.quantize(x, quantizer, axis).nbytes
        if axis == -1 and (format.block[0] or 1) > 1:
            continue  # experts would share blocks
        for num_groups in (1, 3, 50):
            offsets = splits(num_groups, num_rows).cumsum(0, dtype=torch.int32)
            found = fm.quantize(x, quantizer, axis, offsets=offsets)
            assert spec._replace(experts=num_groups).nbytes == found.nbytes
    if not quantizer.hadamard:
        weight = torch.randn(3, 130, 45)
        spec = QuantizedSpec((3, 130, 45), weight.dtype, format, axis, stacked=True)
        assert spec.nbytes == fm.quantize(weight, quantizer, axis).nbytes


def test_steps_move_the_codes_with_what_pads_them_and_gradients_as_they_are():
    chain, x, named = experts(16), rows(40, 32), {"splits": splits(16, 40)}
    with fm.recipe("mxfp8"):
        steps = {s.ops[0]: s for s in only_plan(chain, x, **named).steps}
    by_rows, by_columns = 40 * 33, 32 * (1 + 16) * 33  # one whole block of rows, and one for each expert
    offsets, in_bf16, weight = 16 * 4, 40 * 32 * 2, 16 * 32 * 33
    assert steps["2:input.Quantize"].bytes_moved == in_bf16 + offsets + by_rows + by_columns
    assert steps["2.Wgrad"].bytes_moved == 2 * by_columns + offsets + 16 * 32 * 32 * 2
    assert steps["2.Dgrad"].bytes_moved == by_rows + weight + offsets + in_bf16


# --- formats -------------------------------------------------------------------------------------------------------
