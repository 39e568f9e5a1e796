"""`fm.explain(model)` and ``fusedmoe explain``: which modules are explained, and what is printed of them.

Models of transformers are in tests/integrations/test_explain_config.py.
"""

import json

import pytest
import torch
from torch import nn

import fusedmoe as fm
from fusedmoe.commands.main import main
from fusedmoe.layers import explain_model
from fusedmoe.layers.explain_model import register_explainer

H, I, E = 16, 8, 4  # noqa: E741
pytestmark = pytest.mark.usefixtures("builtin_rules")


def moe():
    return fm.MoE(H, I, E, 2, shared_intermediate=I)


def experts(*more):
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), *more, fm.GroupedLinear(E, I, H))


def test_modules_that_are_planned_alike_are_one_line():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"mlp": make()}) for make in (moe, moe, experts, moe)])
    result = fm.explain(model)
    assert [(g.kind, g.names) for g in result.groups] == [
        ("MoE", ("layers.0.mlp", "layers.1.mlp", "layers.3.mlp")),
        ("Sequential", ("layers.0.mlp.shared", "layers.1.mlp.shared", "layers.3.mlp.shared")),
        ("Sequential", ("layers.2.mlp",)),
    ]
    begins = ("layers.{0-1,3}.mlp         MoE", "layers.{0-1,3}.mlp.shared  Sequential", "layers.2.mlp ")
    for line, begin, ops in zip(str(result).splitlines()[2:], begins, (7, 3, 5), strict=False):
        assert line.startswith(begin)
        assert f"0 of {ops} fused" in line
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
    model[3].router.register_forward_hook(lambda module, args, routing: None)  # is not another router
    result = fm.explain(model)
    assert [(g.name, g.router) for g in result.groups] == [
        ("{0-1}.experts", "OwnRouter"), ("2", ""), ("3", ""), ("3.shared", ""),
    ]  # fmt: skip
    line = "{0-1}.experts: the model's own router, OwnRouter, chooses the experts and runs unchanged"
    assert line in str(result).splitlines()
    assert str(result).count("own router") == 1


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


def test_a_registered_explainer_is_asked(monkeypatch):
    monkeypatch.setattr(explain_model, "_explainers", [])
    model, layer = nn.Sequential(nn.Linear(H, H), nn.Bilinear(H, H, H)), moe()
    assert fm.explain(model).groups == ()
    register_explainer(lambda module, tokens: None)
    register_explainer(
        lambda module, tokens: layer.explain(torch.zeros(tokens, H)) if isinstance(module, nn.Bilinear) else None
    )
    (group,) = fm.explain(model, tokens=100).groups
    assert (group.kind, group.names) == ("Bilinear", ("1",))
    assert str(group.explanation) == str(layer.explain(torch.zeros(100, H)))


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
    assert None not in (layer.explanation, shared.explanation)


# ---- the command: a layer by its sizes ------------------------------------------------------------------------------

LAYER = ["explain", "--hidden", "2048", "--intermediate", "768", "--experts", "128", "--top-k", "8"]


def test_a_layer_by_its_sizes(capsys):
    assert main([*LAYER, "--tokens", "8192", "--strict"]) == 0
    text, err = capsys.readouterr()
    assert text.startswith(
        "MoE layer, hidden 2048, intermediate 768, 128 experts, top 8, swiglu, bfloat16\n"
        "8192 tokens, training, on an sm_90 GPU; nothing was run\n"
    )
    assert "planned for sm_90 (requested), bfloat16, recipe bf16" in text
    assert "4 of 4 fused" in text
    assert err == "strict: everything is fused\n"


def test_it_is_the_plan_of_the_layer(capsys):
    main([*LAYER, "--tokens", "300", "--activation", "geglu", "--json"])
    found = json.loads(capsys.readouterr().out)
    layer = fm.MoE(2048, 768, 128, 8, activation="geglu", device="meta", dtype=torch.bfloat16)
    (plan,) = fm.explain(layer, tokens=300, arch=90).plans
    (group,) = found["groups"]
    assert (found["arch"], found["tokens"], found["missed"], group["names"]) == (90, 300, [], ["layer"])
    (printed,) = group["plans"]
    assert printed["kept_bytes"] == plan.kept_bytes > 0
    assert [step["rule"] for step in printed["steps"]] == [step.rule for step in plan.steps]
    assert [step["bytes_moved"] for step in printed["steps"]] == [step.bytes_moved for step in plan.steps]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            ["--dtype", "float32"], 1,
            ["strict: these ops run unfused although there is a kernel for them:\n",
             "  layer: experts.down.GroupedLinear: sm90.grouped_gemm: CONSTRAINT: input is float32"],
        ),
        # what has no kernel passes; the reason is that of a rule for quantized operands
        (
            ["--recipe", "fp8_row"], 0,
            ["strict: fusion not required for ", "experts.gate_up.GroupedLinear, ",
             "no kernel multiplies rows in fp8 e4m3 per-row yet: expected blocks of 1x128 values",
             "strict: everything else is fused\n"],
        ),
        (["--arch", "80"], 1, ["there are no kernels for these ops on sm_80 yet"]),
    ],
    ids=["constraint", "recipe without kernels", "architecture without kernels"],
)  # fmt: skip
def test_strict_names_what_is_unfused(capsys, arguments, status, said):
    assert main([*LAYER, *arguments]) == 0
    assert main([*LAYER, *arguments, "--strict"]) == status
    err = capsys.readouterr().err
    assert all(text in err for text in said)
    assert "takes no " not in err


@pytest.mark.parametrize(("arguments", "message"), [
    (["explain"], "expected CONFIG, or the sizes of a layer: --hidden, --intermediate, --experts, --top-k"),
    (["explain", "--hidden", "8"], "or the missing sizes of a layer: --intermediate, --experts, --top-k"),
    (["explain", "config.json", "--hidden", "8"], "--hidden: expected without CONFIG, got config.json"),
    ([*LAYER, "--arch", "h100"], "arch: expected a number such as 90, for sm_90 (H100, H200), got 'h100'"),
    ([*LAYER, "--recipe", "fp7"], "fp7"),
    ([*LAYER, "--top-k", "200"], "top_k: expected 1 to num_experts=128, got 200"),
    ([*LAYER, "--tokens", str(1 << 62)], f"--tokens {1 << 62}: must be at most 2^40"),
    ([*LAYER, "--tokens", str(1 << 40), "--hidden", str(1 << 20)], "tensors of more than 2^56 numbers"),
])  # fmt: skip
def test_wrong_options(capsys, arguments, message):
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
