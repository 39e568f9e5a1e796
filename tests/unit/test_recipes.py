"""Recipes as data, what they put into a chain, and whom they leave alone."""

import copy
import dataclasses
import pickle

import pytest
import torch
from kit.saved import check_bytes
from kit.toy import only_plan, outcome
from torch import nn

import fusedmoe as fm
from fusedmoe.call import quantization
from fusedmoe.numerics.formats import (
    E2M1,
    E4M3,
    E5M2,
    Delayed,
    Format,
    ScaleRule,
    fp8_block,
    fp8_row,
    fp8_tensor,
    mxfp8,
    nvfp4,
)
from fusedmoe.numerics.formats.roles import ROLES, Roles
from fusedmoe.numerics.recipes import (
    BF16,
    MXFP8,
    NVFP4,
    RECIPES,
    Custom,
    FP8Block,
    FP8Row,
    FP8Tensor,
    Recipe,
    named,
    resolve,
    shortest,
)
from fusedmoe.ops.op import Node

E, H, I = 2, 64, 32  # noqa: E741
SPLITS = torch.tensor([9, 5])
CLASSES = {"fp8_tensor": FP8Tensor, "fp8_row": FP8Row, "fp8_block": FP8Block, "mxfp8": MXFP8, "nvfp4": NVFP4}


def experts(**options):
    return fm.Sequential(
        fm.GroupedLinear(E, H, 2 * I, **options), fm.SwiGLU(), fm.GroupedLinear(E, I, H, **options)
    )  # fmt: skip


def rows(dtype=torch.float32):
    return torch.randn(16, H, dtype=dtype, requires_grad=True)


def steps(plan, direction="forward"):
    return [op for s in plan.steps if s.direction == direction for op in s.ops]


def rewritten(recipe, *ops):
    """The nodes of a chain under a recipe."""
    return quantization.rewritten(resolve(recipe), tuple(Node(str(i), op) for i, op in enumerate(ops)))


def quantized_by(recipe, chain, x, **named):
    """The names of what is quantized in a plan."""
    with fm.recipe(recipe):
        plan = only_plan(chain, x, **named)
    return [op for s in plan.steps for op in s.ops if "Quantize" in op]


# --- data ----------------------------------------------------------------------------------------------------------


def test_names_and_defaults():
    assert list(RECIPES) == ["bf16", *CLASSES]
    assert RECIPES["bf16"] is BF16 == Recipe()
    for name, kind in CLASSES.items():
        assert RECIPES[name] == kind() == resolve(name)
        assert (kind().name, kind().roles()) == (name, ROLES[name])
        op = fm.Quantize(name, name, name)
        assert (op.quantizer, op.weight_quantizer, op.grad_quantizer) == ROLES[name]
    assert list(ROLES) == list(CLASSES)


def q(format, **options):
    return fm.Quantizer(format, **options)


DELAYED = {"delayed": Delayed(3)}
ROTATED, DRAWN = {"hadamard": True}, {"hadamard": True, "stochastic_rounding": True}


@pytest.mark.parametrize(
    ("recipe", "input", "weight", "grad"),
    [
        (Recipe(), None, None, None),
        (FP8Tensor(), q(fp8_tensor()), q(fp8_tensor()), q(fp8_tensor(E5M2))),
        (
            FP8Tensor(power_of_two=True, **DELAYED),
            *[q(fp8_tensor(E4M3, True), **DELAYED)] * 2, q(fp8_tensor(E5M2, True), **DELAYED),
        ),
        (
            FP8Row(hybrid=True, power_of_two=True),
            q(fp8_row(E4M3, True)), q(fp8_row(E4M3, True)), q(fp8_row(E5M2, True)),
        ),
        (FP8Block(), q(fp8_block()), q(fp8_block(across=128)), q(fp8_block())),
        (
            FP8Block(hybrid=True, power_of_two=False, amax_epsilon=1e-4),
            *(q(fp8_block(E4M3, across, False, 1e-4)) for across in (1, 128)), q(fp8_block(E5M2, 1, False, 1e-4)),
        ),
        (MXFP8(), q(mxfp8()), q(mxfp8()), q(mxfp8())),
        (MXFP8(hybrid=True, weight_2d=True), q(mxfp8()), q(mxfp8(across=32)), q(mxfp8(E5M2))),
        (MXFP8(scale_rule="floor"), *[q(mxfp8(rule=ScaleRule.FLOOR))] * 3),
        (NVFP4(), q(nvfp4(), **ROTATED), q(nvfp4(16)), q(nvfp4(), **DRAWN)),
        (NVFP4(hadamard=False, stochastic_rounding=False, weight_2d=False), *[q(nvfp4())] * 3),
        (Custom("mine", input=q(mxfp8())), q(mxfp8()), None, None),
    ],
    ids=str,
)  # fmt: skip
def test_fields_say_what_each_operand_becomes(recipe, input, weight, grad):
    assert recipe.roles() == (input, weight, grad)


VARIANTS = [
    *CLASSES.values(), lambda: FP8Tensor(hybrid=False), lambda: FP8Tensor(power_of_two=True),
    lambda: FP8Row(power_of_two=True), lambda: FP8Block(amax_epsilon=1e3), lambda: MXFP8(hybrid=True),
    lambda: MXFP8(scale_rule="floor"), lambda: MXFP8(weight_2d=True), lambda: NVFP4(hadamard=False),
    lambda: NVFP4(weight_2d=False), lambda: NVFP4(stochastic_rounding=False),
    lambda: FP8Tensor(delayed=Delayed(4)), lambda: Custom(grad=q(mxfp8(E5M2))), Recipe,
]  # fmt: skip


def test_a_changed_value_is_another_plan_with_other_results():
    chain, x = experts(), rows()
    with torch.no_grad():  # small rows beside large ones: whoever shares a scale with whom shows
        for p in (chain[0].weight, chain[2].weight):
            p *= torch.logspace(-3, 0, p.shape[1])[:, None]
    seen = []
    for make in VARIANTS:
        torch.manual_seed(1)
        with fm.recipe(make()):
            seen.append(outcome(copy.deepcopy(chain), x, splits=SPLITS))
    for i, a in enumerate(seen):
        for j, b in enumerate(seen[:i]):
            assert not all(torch.equal(a[name], b[name]) for name in a), (i, j)
    # and in the same module, one after the other: plans and weights of one are not the other's
    for make, want in list(zip(VARIANTS, seen, strict=True))[:-3]:
        torch.manual_seed(1)
        with fm.recipe(make()):
            got = outcome(chain, x, splits=SPLITS)
        assert all(torch.equal(got[name], want[name]) for name in want), make()


def test_recipes_are_values():
    for make in VARIANTS:
        recipe = make()
        assert {recipe, make(), pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)} == {recipe}
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipe.name = "another"
        assert dataclasses.replace(recipe, name="another") != recipe


# --- wgrad="bf16" ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_names_with_an_unquantized_wgrad(name):
    text, kind = f"{name}:wgrad=bf16", CLASSES[name]
    recipe = kind(wgrad="bf16")
    assert named(text) == resolve(text) == recipe != kind()
    assert (shortest(recipe), shortest(kind())) == (text, name)
    roles, plain = recipe.roles(), kind().roles()
    assert roles.weight == plain.weight
    for role, other in ((roles.input, plain.input), (roles.grad, plain.grad)):
        assert role == dataclasses.replace(other, wgrad="bf16", hadamard=False)
        assert str(role).endswith(", wgrad bf16")
    assert f"recipe='{text}'" in repr(fm.Linear(H, H, recipe=text))


@pytest.mark.parametrize("name", CLASSES)
def test_unquantized_weight_gradients_read_the_values_from_before_quantization(name):
    """The rows of each layer are kept once, and what the activation's derivative reads: nothing quantized."""
    with fm.recipe(f"{name}:wgrad=bf16"):
        plan = check_bytes(experts(dtype=torch.bfloat16), rows(torch.bfloat16), splits=SPLITS)
    assert {s.ops[0]: s.needs[:2] for s in plan.steps if "Wgrad" in s.ops[0]} == {
        "2.Wgrad": ("grad(2:grad.output)", "2:input.input"), "0.Wgrad": ("grad(1.input)", "0:input.input"),
    }  # fmt: skip
    assert {s.ops[0] for s in plan.steps if s.path} == {"0.GroupedLinear", "2.GroupedLinear", "2.Dgrad", "0.Dgrad"}
    quantized = [s for s in plan.steps if "Quantize" in s.ops[0]]
    assert len(quantized) == 6
    for s in quantized:  # a weight has a form for each product
        assert any(v.endswith(":columns") for v in s.gives) is ("weight" in s.ops[0])
    assert set(plan.kept) == {"offsets", "0:input.input", "1.input", "2:input.input"}
    assert plan.kept_bytes == 4 * E + 2 * 16 * (H + 2 * I + I)


@pytest.mark.usefixtures("builtin_rules")
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", ["experts", "scaled", "weighted"])
def test_the_rules_for_unquantized_weight_gradients_match(name, kind):
    up, act, down = experts(dtype=torch.bfloat16)
    chain, given = fm.Sequential(up, act, down), {"splits": SPLITS}
    if kind != "experts":
        middle, weights = ([fm.Scale("probs")], None) if kind == "scaled" else ([], "probs")
        chain = fm.Sequential(fm.Dispatch(), up, act, *middle, down, fm.Combine(weights))
        given = {"expert_index": torch.randint(0, E, (16, 2)), "expert_weight": torch.rand(16, 2, requires_grad=True)}

    def used(recipe):
        with fm.recipe(recipe):
            steps = chain.explain(rows(torch.bfloat16), arch=90, **given).steps
        return [s.rule for s in steps if "Wgrad" in s.ops[0]]

    # the kernel that quantizes the gradient's rows reads them through their index, so nothing else reads the rows
    last = "sm90.gathered_wgrad_dy" if kind == "scaled" else "sm90.grouped_wgrad"
    first = "sm90.grouped_wgrad" if kind == "experts" else "sm90.gathered_wgrad_x"
    assert used(f"{name}:wgrad=bf16") == [last, first]
    fp8 = "sm90.fp8_grouped_wgrad"
    others = {"fp8_block": fp8, "fp8_tensor": fp8, "fp8_row": None}  # torch multiplies the codes of fp8_row
    assert used(name) == [others.get(name, "sm90.dequantized_wgrad")] * 2


# --- what they insert ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([], [], ["0:weight", "0:input", "0", "0:grad"]),
        ([("mxfp8", None, None)], [], ["1:weight", "0", "1", "1:grad"]),
        ([(None, None, "mxfp8")], [], ["0", "1:input", "1", "1:grad"]),
        ([], [(None, "mxfp8", None)], ["0:weight", "0:input", "0", "1"]),
        ([("mxfp8", None, "mxfp8")], [(None, "mxfp8", None)], ["0", "1", "2"]),
        ([(None, "mxfp8", None)], [], ["0", "1:weight", "1:input", "1", "1:grad"]),
    ],
    ids=["nothing", "rows", "weight", "gradient", "all", "a gradient before"],
)
def test_a_recipe_fills_in_what_an_op_of_the_chain_leaves(before, after, expected):
    ops = [*(fm.Quantize(*a) for a in before), fm.GroupedLinear(E, H, H), *(fm.Quantize(*a) for a in after)]
    nodes = {n.label: n.op for n in rewritten("fp8_row", *ops)}
    assert sorted(nodes) == sorted(expected)
    names = {"input": "quantizer", "weight": "weight_quantizer", "grad": "grad_quantizer"}
    for label in nodes:
        role = label.partition(":")[2]
        if role:
            assert getattr(nodes[label], names[role]) == getattr(ROLES["fp8_row"], role), label


@pytest.mark.parametrize("role", ["input", "weight", "grad"])
def test_a_recipe_of_ones_own_may_leave_operands_alone(role):
    recipe = Custom("half", **{role: q(mxfp8())})
    found = quantized_by(recipe, fm.Sequential(fm.GroupedLinear(E, H, H)), rows(), splits=SPLITS)
    assert found == [f"0:{role}.Quantize" + ("Grad" if role == "grad" else "")]
    assert Custom().roles() == Roles(None, None, None)
    assert Custom(input=q(mxfp8())).roles().with_wgrad("bf16") == (q(mxfp8(), wgrad="bf16"), None, None)
    assert quantized_by(Custom(), experts(), rows(), splits=SPLITS) == []


# --- recipes of layers ---------------------------------------------------------------------------------------------

LAYERS = {
    "GroupedLinear": (lambda **o: fm.GroupedLinear(E, H, H, **o), {"splits": SPLITS}),
    "Linear": (lambda **o: fm.Linear(H, H, **o), {}),
}


@pytest.mark.parametrize(("kind", "around"), [("GroupedLinear", "bf16"), ("Linear", "fp8_row")])
def test_a_layers_own_recipe_holds_whatever_is_around(kind, around):
    make, named = LAYERS[kind]
    own, other, x = make(recipe="mxfp8"), make(), rows()
    other.load_state_dict(own.state_dict())
    with fm.recipe("mxfp8"):
        expected = other(x, **named)
    with fm.recipe(around):
        assert torch.equal(own(x, **named), expected)
        assert not torch.equal(other(x, **named), expected)
        own.recipe = None
        assert torch.equal(own(x, **named), other(x, **named))
        own.recipe = MXFP8()
        assert torch.equal(own(x, **named), expected)
        own.recipe = "bf16"
    assert torch.equal(own(x, **named), other(x, **named))


def test_an_override_of_rewrite_replaces_the_insertion_by_roles():
    @dataclasses.dataclass(frozen=True)
    class AllButTheFirst(MXFP8):
        name: str = "all_but_the_first"

        def rewrite(self, nodes):
            return nodes[:1] + quantization.by_roles(self, nodes[1:])

    ops = fm.GroupedLinear(E, H, 2 * I), fm.SwiGLU(), fm.GroupedLinear(E, I, H)
    labels = [node.label for node in rewritten(AllButTheFirst(), *ops)]
    assert labels == ["0", "1", "2:weight", "2:input", "2", "2:grad"]
    with pytest.raises(NotImplementedError, match=r"MXFP8 does not override rewrite"):
        MXFP8().rewrite(())


def test_recipes_that_cannot_be_used():
    class NoRoles(Recipe):
        def roles(self):
            return None

    class NoHash(Recipe):
        __hash__ = None

    with pytest.raises(fm.InputError, match="must be hashable"):
        fm.recipe(NoHash())
    with fm.recipe(NoRoles()), pytest.raises(fm.InputError, match=r"roles\(\) must return"):
        fm.Linear(2, 2)(torch.ones(1, 2))


def block(name):
    if name == "moe":
        return nn.ModuleDict({"mlp": fm.MoE(H, I, 4, 2, shared_intermediate=I, shared_gate=True)})
    return nn.ModuleDict({"mlp": fm.Sequential(fm.Linear(H, 2 * I), fm.SwiGLU(), fm.Sequential(fm.Linear(I, H)))})


def test_first_and_last_layers_stay_in_bf16():
    for first, last, expected in ((0, 0, ()), (0, 2, (1, 2)), (3, 3, (0, 1, 2))):
        net = nn.Sequential(*map(block, ("dense", "moe", "dense")))
        assert fm.keep_in_bf16(net, first, last) == [f"{i}.mlp" for i in expected]
    net = nn.Sequential(*map(block, ("moe", "dense", "moe", "dense")))
    assert fm.keep_in_bf16(net, first=1, last=1) == ["0.mlp", "3.mlp"]
    linear_ops = {n: m for n, m in net.named_modules() if isinstance(m, (fm.GroupedLinear, fm.Linear))}
    assert {n for n, m in linear_ops.items() if m.recipe == BF16} == {
        "0.mlp.experts.gate_up", "0.mlp.experts.down", "0.mlp.shared.gate_up", "0.mlp.shared.down",
        "0.mlp.shared_gate", "2.mlp.shared_gate", "3.mlp.0", "3.mlp.2.0",
    }  # fmt: skip


def test_routers_and_gates_are_quantized_by_nobody():
    moe, x = fm.MoE(H, I, 4, 2, shared_intermediate=I, shared_gate=True), torch.randn(12, H)
    gates = []
    moe.shared_gate.register_forward_hook(lambda module, args, output: gates.append(output))
    _, expected = moe(x, return_stats=True)
    with fm.recipe("nvfp4"):
        _, stats = moe(x, return_stats=True)
        assert all(torch.equal(a, b) for a, b in zip(stats, expected, strict=True))
        assert torch.equal(*gates)
        (plan,) = moe.explain(x).plans
    assert {op for op in steps(plan) if "Quantize" in op} == {
        f"experts.{layer}:{operand}.Quantize" for layer in ("gate_up", "down") for operand in ("weight", "input")
    }


# --- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resolve("fp7"), "Recipe.*, or one of 'bf16', .*'nvfp4', .* except 'bf16', got 'fp7'"),
        (lambda: fm.Quantize(weight=q(nvfp4(), hadamard=True)), "weight: expected a quantizer without hadamard"),
        (lambda: fm.Quantize(weight=q(nvfp4(), stochastic_rounding=True)), "weight: .* rounds to nearest"),
        (lambda: fm.quantize(torch.ones(2, 2), q(fp8_tensor(), delayed=Delayed())), "encode: .* delayed .*, got None"),
        (lambda: q(mxfp8(), stochastic_rounding=True), "stochastic_rounding: expected a format of e2m1, got mxfp8"),
        (lambda: q(fp8_row(), hadamard=True), "hadamard: expected blocks of one row, got fp8 e4m3 per-row"),
        (lambda: q(fp8_row(), delayed=Delayed()), "delayed: expected a format with one scale per tensor, got fp8"),
        (lambda: Format("f", E4M3, (1, None), ScaleRule.RCEIL), "block: expected a size along, .* 'rceil'"),
        (lambda: Format("f", E4M3, (2, None), ScaleRule.FP32), "block: expected 1 or None across"),
        (lambda: Format("f", E4M3, (1, 32), ScaleRule.FP32, True), "tensor_scale: expected False .* 'fp32', got True"),
        (lambda: Format("f", E2M1, (1, 16), ScaleRule.TWO_LEVEL), "tensor_scale: expected True .* got False"),
        (lambda: Format("f", E2M1, (1, 16), ScaleRule.FP32), "element: expected e2m1 for the rule 'two level'"),
        (lambda: Format("f", E4M3, (1, 32), ScaleRule.RCEIL, amax_epsilon=1.0), "amax_epsilon: .* not fp32, got 1.0"),
        # wgrad="bf16"
        (lambda: q(nvfp4(), hadamard=True, wgrad="bf16"), "hadamard: expected False for wgrad='bf16'"),
        (lambda: fm.Quantize(weight=q(mxfp8(), wgrad="bf16")), "weight: expected a quantizer with wgrad='quantized'"),
        (lambda: resolve("bf16:wgrad=bf16"), "may end in ':wgrad=bf16' except 'bf16', got 'bf16:wgrad=bf16'"),
        (lambda: resolve("mxfp8:wgrad=fp16"), "expected a Recipe, .* got 'mxfp8:wgrad=fp16'"),
        (lambda: resolve(":wgrad=bf16"), "expected a Recipe, .* got ':wgrad=bf16'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_that_make_no_sense(make, message):
    with pytest.raises(fm.InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (list, r"0.Quantize\(weight=.*expected a linear layer to follow, got the end"),
        (lambda: [fm.SwiGLU()], r"a linear layer to follow, got 1.SwiGLU"),
        (lambda: [nn.Identity(), fm.Linear(H, H)], "a linear layer to follow, got the end of the chain"),
        (lambda: [fm.Quantize(weight="fp8_row"), fm.Linear(H, H)], "1.Quantize.*2's weight would be quantized twice"),
    ],
    ids=["alone", "an activation", "another module", "twice"],
)
def test_a_weight_is_that_of_the_layer_after(ops, message):
    with pytest.raises(fm.InputError, match=message):
        fm.Sequential(fm.Quantize(weight="mxfp8"), *ops())(rows())


def test_autocast_casts_what_a_recipe_then_quantizes():
    chain, x = experts(), rows()
    cast = copy.deepcopy(chain).bfloat16()
    with fm.recipe("mxfp8"):
        want = outcome(cast, x.detach().bfloat16().requires_grad_(), splits=SPLITS)
        with torch.autocast("cpu", torch.bfloat16):
            got = outcome(chain, x, splits=SPLITS)
    assert got["y"].dtype is torch.bfloat16
    for name in want:
        assert torch.equal(got[name].bfloat16(), want[name]), name
