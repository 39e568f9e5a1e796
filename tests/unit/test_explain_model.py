"""`fm.explain(model)`: which modules are explained, how alike ones are put together, and what the table says."""

import pytest
import torch
from torch import nn

import fusedmoe as fm
from fusedmoe.layers import explain_model
from fusedmoe.layers.explain_model import register_explainer

H, I, E = 16, 8, 4  # noqa: E741
pytestmark = pytest.mark.usefixtures("builtin_rules")


def moe():
    return fm.MoE(H, I, E, 2, shared_intermediate=I)


def experts(*more):
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), *more, fm.GroupedLinear(E, I, H))


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(H), mlp


def test_modules_that_are_planned_alike_are_one_line():
    model = nn.Module()
    model.layers = nn.ModuleList([Block(moe()), Block(moe()), Block(experts()), Block(moe())])
    result = fm.explain(model)
    assert [(g.kind, g.names) for g in result.groups] == [
        ("MoE", ("layers.0.mlp", "layers.1.mlp", "layers.3.mlp")),
        ("Sequential", ("layers.0.mlp.shared", "layers.1.mlp.shared", "layers.3.mlp.shared")),
        ("Sequential", ("layers.2.mlp",)),
    ]
    lines = str(result).splitlines()
    assert lines[2].startswith("layers.{0-1,3}.mlp         MoE")
    assert lines[3].startswith("layers.{0-1,3}.mlp.shared  Sequential")
    assert lines[4].startswith("layers.2.mlp ")
    assert "0 of 7 fused" in lines[2]
    assert "0 of 3 fused" in lines[4]
    assert "0 of 5 fused" in lines[4]
    assert "needs an sm_90 GPU, this device is cpu" in str(result)


class OwnRouter(nn.Linear):
    stats = None


class RoutedBlock(nn.Module):
    def __init__(self, name, experts):
        super().__init__()
        self.experts = experts
        setattr(self, name, OwnRouter(H, E))


@pytest.mark.parametrize("name", ["router", "gate"])
def test_a_router_of_the_models_own_is_named(name):
    dense = fm.Sequential(fm.Linear(H, 2 * I), fm.SwiGLU(), fm.Linear(I, H))
    assert [g.router for g in fm.explain(RoutedBlock(name, dense)).groups] == [""]
    model = nn.ModuleList([RoutedBlock(name, experts()), RoutedBlock(name, experts()), experts(), moe()])
    result = fm.explain(model)
    assert [(g.name, g.router) for g in result.groups] == [
        ("{0-1}.experts", "OwnRouter"), ("2", ""), ("3", ""), ("3.shared", ""),
    ]  # fmt: skip
    line = "{0-1}.experts: the model's own router, OwnRouter, chooses the experts and runs unchanged"
    assert line in str(result).splitlines()
    assert str(result).count("own router") == 1


def test_a_router_with_hooks_is_not_another_router():
    layer = moe()
    layer.router.register_forward_hook(lambda module, args, routing: None)
    assert [group.router for group in fm.explain(nn.Sequential(layer)).groups] == ["", ""]


def test_a_registered_explainer_is_asked(monkeypatch):
    class Foreign(nn.Module):
        pass

    monkeypatch.setattr(explain_model, "_explainers", [])
    model, layer = nn.Sequential(nn.Linear(H, H), Foreign()), moe()
    assert fm.explain(model).groups == ()
    register_explainer(lambda module, tokens: None)
    register_explainer(
        lambda module, tokens: layer.explain(torch.zeros(tokens, H)) if type(module) is Foreign else None
    )
    (group,) = fm.explain(model, tokens=100).groups
    assert (group.kind, group.names) == ("Foreign", ("1",))
    assert str(group.explanation) == str(layer.explain(torch.zeros(100, H)))


def test_what_holds_around_it_counts():
    model = nn.Sequential(fm.MoE(H, I, E, 2))
    with torch.no_grad():
        (plan,) = fm.explain(model).plans
        assert {step.direction for step in plan.steps} == {"forward"}
    with fm.recipe("mxfp8"), torch.autocast("cpu", torch.bfloat16):
        (plan,) = fm.explain(model).plans
    assert (plan.recipe, plan.dtype) == ("mxfp8", "bfloat16")


def test_rows_that_need_what_nobody_can_guess_are_named():
    model = nn.ModuleList([experts(fm.Scale("gates")), experts(fm.Scale("probs")), fm.Sequential(fm.SwiGLU())])
    model.append(experts().without_parameters())
    gates, probs, nothing, without = fm.explain(model).groups
    assert (gates.explanation, gates.note) == (None, "takes gates: call its own explain()")
    assert probs.explanation is not None
    assert nothing.note == "no linear layer determines the width of its rows: call its own explain()"
    assert without.note == "its parameters are arguments of each call: call its own explain_with()"
    assert "takes gates" in str(fm.explain(model))


class Foreign(nn.Module):
    """Experts of a framework, which say themselves what they will do with so many rows."""

    def __init__(self):
        super().__init__()
        self.inner = experts()

    def explain_rows(self, rows):
        if rows > 100:
            raise fm.InputError("at most 100 rows")
        return self.inner.explain(torch.zeros(rows, H), splits=torch.tensor([rows, 0, 0, 0]))


def test_a_module_that_explains_rows_is_asked():
    model = nn.Sequential(Foreign(), experts(), Foreign())
    foreign, own = fm.explain(model, tokens=10).groups
    assert (foreign.kind, foreign.names) == ("Foreign", ("0", "2"))
    assert str(foreign.explanation) == str(model[0].explain_rows(10))
    assert own.names == ("1",)
    foreign, _ = fm.explain(model, tokens=101).groups
    assert (foreign.explanation, foreign.note) == (None, "at most 100 rows")


def test_one_that_cannot_be_planned_does_not_keep_the_others_from_it():
    class Wrong(Foreign):
        def explain_rows(self, rows):
            return "a table"

    model = nn.ModuleList(
        [fm.MoE(H, I, E, 2).double(), fm.Sequential(nn.Linear(H, 3), fm.GroupedLinear(E, H, H)), Wrong(), moe()]
    )
    with fm.recipe("mxfp8"):
        double, foreign, wrong, layer, shared = fm.explain(model).groups
    assert "float64" in double.note
    assert foreign.explanation is None
    assert wrong.note == "explain_rows: expected an Explanation, got str"
    assert layer.explanation is not None
    assert shared.explanation is not None
