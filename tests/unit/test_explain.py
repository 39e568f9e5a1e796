"""What `explain()` prints, and its data; its bytes kept are those that a call really saves.

The tables are compared with tests/unit/snapshots/. After a change that is meant, write them anew and look at the diff::

    FUSEDMOE_UPDATE_SNAPSHOTS=1 pytest tests/unit/test_explain.py
"""

import os
from pathlib import Path

import pytest
import torch
from kit import saved, toy
from kit.saved import check_bytes
from kit.toy import dgrad_dglu, experts, gemm, gemm_glu, glu_scale, inputs, only_plan, rows, wgrad
from torch import nn

import fusedmoe as fm
from fusedmoe import Status
from fusedmoe.builtin_rules import BUILTIN
from fusedmoe.numerics.recipes import MXFP8, RECIPES
from fusedmoe.ops import GroupedLinear, Op, SwiGLU

SNAPSHOTS = Path(__file__).parent / "snapshots"


class ReadsHost(Op):
    """y = x, by way of the host"""

    def compute(self, x):
        return x.clone()

    def host_sync(self, x, device):
        return True


def moe():
    chain = fm.Sequential(fm.Dispatch(), *experts(), nn.Identity(), fm.Combine())
    named = {
        "expert_index": torch.zeros(6, 2, dtype=torch.int64),
        "expert_weight": torch.ones(6, 2, dtype=torch.float64, requires_grad=True),
    }
    return chain, rows(6), named


BF16 = torch.bfloat16


def layers_of_hopper():
    up = GroupedLinear(toy.E, 64, 2 * 32, bias=True, dtype=BF16)
    down = GroupedLinear(toy.E, 32, 64, bias=True, dtype=BF16)
    chain = fm.Sequential(up, SwiGLU(), fm.Scale("probs"), down, sm_margin=8)
    return chain, rows(dtype=BF16, hidden=64), inputs(scale=True, dtype=torch.float32)


def quantized():
    layers = [GroupedLinear(toy.E, 32, 64, recipe="nvfp4"), SwiGLU(), GroupedLinear(toy.E, 32, 32, recipe="mxfp8")]
    return fm.Sequential(*layers), rows(dtype=torch.float32, hidden=32), inputs()


CASES = {
    "unfused": ([], lambda: (experts(), rows(), inputs())),
    "fused": ([gemm_glu(), gemm(), dgrad_dglu(), wgrad()], lambda: (experts(scale=True), rows(), inputs(scale=True))),
    "no_grad": ([gemm_glu(), gemm()], lambda: (experts().requires_grad_(False), rows(requires_grad=False), inputs())),
    "constraint": ([gemm_glu(), dgrad_dglu()], lambda: (experts(limit=7.0), rows(), inputs())),
    "cannot_keep": ([gemm_glu(keeps=()), dgrad_dglu()], lambda: (experts(), rows(), inputs())),
    "shadowed": ([gemm(launches=50), glu_scale()], lambda: (experts(), rows(), inputs())),
    "host_sync": ([], lambda: (fm.Sequential(fm.SwiGLU(), ReadsHost()), rows(), {})),
    "split": ([gemm_glu(), gemm()], moe),
    "quantized": ([], quantized),
    "empty": ([], lambda: (fm.Sequential(), rows(), {})),
    "builtin": (BUILTIN, lambda: (experts(scale=True), rows(), inputs(scale=True))),
    "builtin_sm90": (BUILTIN, layers_of_hopper),
}


@pytest.mark.parametrize("case", CASES)
def test_the_table_as_printed(case, monkeypatch):
    rules, make = CASES[case]
    if case.endswith("sm90"):
        monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
        monkeypatch.setattr("fusedmoe.kernels.build.toolkit.missing_packages", lambda: ())
    chain, x, named = make()
    with fm.register(*rules):
        text = f"{chain.explain(x, **named)}\n"
    assert all(line == line.rstrip() for line in text.splitlines())
    file = SNAPSHOTS / f"{case}.txt"
    if os.environ.get("FUSEDMOE_UPDATE_SNAPSHOTS"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"{file.name} differs; see the top of this file"


def test_the_data_behind_the_table():
    chain, x, named = experts(), rows(), inputs()
    with fm.register(gemm_glu(), dgrad_dglu()):
        explanation = chain.explain(x, **named)
    (plan,) = explanation.plans
    assert explanation.parts == (("chain 0 to 2", plan),)
    first, last, *_ = plan.steps
    assert (first.direction, first.ops, first.rule, first.status, first.why) == (
        "forward", ("0.GroupedLinear", "1.SwiGLU"), "toy.gemm_glu", "FUSED", "",
    )  # fmt: skip
    assert (first.needs, first.gives) == (("0.input", "0.weight", "offsets"), ("2.input", "1.input"))
    assert (last.rule, last.nearest_miss.status, last.why) == (None, Status.NO_MATCH, str(last.nearest_miss))
    assert {*plan.fused, *plan.unfused} == set(explanation.steps)
    assert (plan.device, plan.dtype, plan.recipe) == ("cpu", "float64", "bf16")


def test_bytes_moved_are_those_of_the_shapes_explained():
    chain = experts()
    step = only_plan(chain, rows(), **inputs()).steps[0]
    #                rows in      weight           offsets   rows out
    assert step.bytes_moved == 9 * 8 * 8 + 3 * 8 * 8 * 8 + 3 * 4 + 9 * 8 * 8
    again = only_plan(chain, rows(15), **inputs()).steps[0]  # the same plan, other rows
    assert again.bytes_moved - step.bytes_moved == 6 * (8 + 8) * 8
    with fm.register(gemm(extra_bytes=1000)):
        assert only_plan(chain, rows(), **inputs()).steps[0].bytes_moved == step.bytes_moved + 1000


def test_random_numbers_after_an_explanation_are_those_without_it():
    """It calls the modules between chains, such as a dropout."""
    chain = fm.Sequential(fm.Linear(8, 8), torch.nn.Dropout(), fm.Linear(8, 8))
    before = torch.get_rng_state()
    chain.explain(torch.ones(4, 8))
    fm.explain(chain, tokens=4)
    assert torch.equal(torch.get_rng_state(), before)


# ---- quantized values -----------------------------------------------------------------------------------------------

every_recipe = pytest.mark.parametrize("recipe", [*RECIPES, MXFP8(weight_2d=True)], ids=lambda r: getattr(r, "name", r))


def routing():
    weight = torch.rand(20, 2, requires_grad=True)
    return {"expert_index": torch.randint(0, 4, (20, 2)), "expert_weight": weight}


@every_recipe
def test_the_bytes_kept_are_those_saved(recipe):
    # many small experts, odd sizes, fewer rows than experts, no rows
    shapes = [(64, 512, 64, 64), (1, 10, 33, 17), (200, 7, 40, 24), (3, 0, 64, 64)]
    with fm.recipe(recipe):
        for experts, count, hidden, intermediate in shapes if recipe in ("fp8_block", "nvfp4") else shapes[:2]:
            chain = saved.experts(experts, hidden, intermediate)
            check_bytes(chain, saved.rows(count, hidden), splits=saved.splits(experts, count))
        for shape in ((5, 33), (3, 7, 48), (130, 130)):
            chain = fm.Sequential(fm.Linear(shape[-1], 2 * 36), fm.SwiGLU(), fm.Linear(36, shape[-1])).to(BF16)
            check_bytes(chain, saved.rows(*shape))
        chain = fm.Sequential(fm.Dispatch(), *saved.experts(), fm.Combine())
        check_bytes(chain, saved.rows(20, 32), **routing())


def test_offsets_that_codes_alone_hold_are_kept_too():
    chain = fm.Sequential(fm.Dispatch(num_experts=4), fm.Quantize("mxfp8"), fm.SwiGLU(), fm.Combine())
    assert check_bytes(chain, saved.rows(20, 32), **routing()).kept[-1] == "0.offsets"


def test_steps_move_the_codes_with_what_pads_them_and_gradients_as_they_are():
    chain = saved.experts(16)
    with fm.recipe("mxfp8"):
        steps = {s.ops[0]: s for s in only_plan(chain, saved.rows(40, 32), splits=saved.splits(16, 40)).steps}
    by_rows, by_columns = 40 * 33, 32 * (1 + 16) * 33  # one whole block of rows, and one for each expert
    offsets, in_bf16, weight = 16 * 4, 40 * 32 * 2, 16 * 32 * 33
    assert steps["2:input.Quantize"].bytes_moved == in_bf16 + offsets + by_rows + by_columns
    assert steps["2.Wgrad"].bytes_moved == 2 * by_columns + offsets + 16 * 32 * 32 * 2
    assert steps["2.Dgrad"].bytes_moved == by_rows + weight + offsets + in_bf16
