"""GroupedLoRA alone and in chains, against a loop over the experts that adds the update row by row."""

import copy

import pytest
import torch
from kit.compare import assert_accurate, assert_bitwise, pairwise
from kit.layers import drawn, leaf, outcome, poison_tail
from kit.oracles import exact_outcome, quantized
from kit.rounding import ROUNDOFF, error_bound, error_of_sums

import fusedmoe as fm
from fusedmoe.numerics.formats import mxfp8
from fusedmoe.numerics.formats.roles import ROLES, nvfp4_roles
from fusedmoe.numerics.recipes import NVFP4
from fusedmoe.ops import LoRADown, LoRAUp

E, K, N, RANK, ALPHA = 4, 16, 24, 8, 12.0
SPLITS, TOTAL, ROWS = torch.tensor([7, 0, 1, 11]), 19, 22  # three rows more than the experts have
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def lora(k=K, n=N, rank=RANK, alpha=ALPHA, bias=True, dtype=F64, trained=(), **settings):
    layer = fm.GroupedLinear(E, k, n, bias=bias, dtype=F64)
    op = drawn(fm.GroupedLoRA(layer, rank, alpha, **settings), 0.3).to(dtype)  # an update with B at zero is none
    for name, parameter in op.named_parameters():
        assert parameter.requires_grad is ("lora" in name)
        parameter.requires_grad_("lora" in name or name in trained)
    return op


ALL = ("base_layer.weight", "base_layer.bias")


def rows(k=K, n=N, dtype=F64, total=ROWS):
    """Rows and the gradient of the output; those of no expert are NaN."""
    x, dy = leaf(total, k, dtype=dtype), torch.randn(total, n, dtype=dtype)
    poison_tail(TOTAL, x, dy)
    return x, dy


@pytest.mark.parametrize(
    ("size", "bias", "dtype"),  # in fp32 the first and the last go through F.grouped_mm, partly
    pairwise([(K, N, RANK), (3, 5, 2), (K, 8, 1)], [False, True], [F64, F32, BF16, torch.float16]),
    ids=str,
)
def test_the_formula(size, bias, dtype):
    k, n, rank = size
    op, (x, dy) = lora(k, n, rank, bias=bias, dtype=dtype, trained=ALL), rows(k, n, dtype)
    found = outcome(op, x, dy, splits=SPLITS)
    assert all(t.dtype is dtype for t in found.values())
    # the layer's rounding, its bias's, those of the rows between A and B and of their gradient, and the sum's
    assert_accurate(found, exact_outcome(op, x, dy, splits=SPLITS), error_bound(dtype, k, rank, n, 11, roundings=5))
    # zeros that are zeros, not small
    assert not found["y"][TOTAL:].any()
    assert not found["x"][TOTAL:].any()
    for name, _ in op.named_parameters():
        assert not found[name][SPLITS == 0].any()
        assert found[name][SPLITS > 0].flatten(1).any(1).all()


@pytest.mark.parametrize("part", [LoRADown(3, 2, 2, dtype=F64), LoRAUp(3, 2, 3, 1.5, dtype=F64)])
def test_each_part_alone(part):
    drawn(part, 1.0)
    down = isinstance(part, LoRADown)
    x, h = leaf(5, 2 if down else 3), leaf(5, 2).requires_grad_(not down)

    def run(x, weight, h):
        given = {"splits": torch.tensor([2, 0, 2])} | ({} if down else {"lora_rows": h})
        y = torch.func.functional_call(part, {"weight": weight}, (x,), given)
        return (y[0] * 1.0, y[1]["lora_rows"]) if down else y

    assert torch.autograd.gradcheck(run, (x, part.weight, h))
    if down:  # a gradient through either result alone
        assert torch.autograd.gradcheck(lambda *args: run(*args)[0], (x, part.weight, h))
        assert torch.autograd.gradcheck(lambda *args: run(*args)[1], (x, part.weight, h))


def steps(module, x, splits=SPLITS, **named):
    (part,) = [plan for _, plan in module.explain(x, splits=splits, **named).parts]
    return [op for step in part.steps for op in step.ops], part


def test_only_what_is_wanted_is_computed_and_only_what_is_needed_is_kept():
    op, x = lora(), leaf(ROWS, K)
    forward = ["lora_A.LoRADown", "base_layer.GroupedLinear", "lora_B.LoRAUp"]
    up, down = ["lora_B.LoRAUpWgrad", "lora_B.LoRAUpDgrad"], ["lora_A.LoRADownWgrad"]
    found, plan = steps(op, x)
    assert found == [*forward, *up, "base_layer.Dgrad", *down, "lora_A.LoRADownDgrad"]
    assert set(plan.kept) == {"lora_A.input", "lora_A.lora_rows", "offsets"}  # no rows of out_features
    # the first layer of a model that is frozen before it
    assert steps(op, x.detach())[0] == [*forward, *up, *down]
    op.lora_A.weight.requires_grad_(False)
    assert steps(op, x.detach())[0] == [*forward, "lora_B.LoRAUpWgrad"]
    op.lora_A.weight.requires_grad_()
    op.lora_B.weight.requires_grad_(False)
    found, plan = steps(op, x.detach())
    assert found == [*forward, "lora_B.LoRAUpDgrad", *down]
    assert set(plan.kept) == {"lora_A.input", "offsets"}
    op.base_layer.weight.requires_grad_()
    assert "base_layer.Wgrad" in steps(op, x)[0]
    with torch.no_grad():
        assert steps(op, x)[0] == forward


def mlp_of(first, second, opened):
    return fm.Sequential(*(first if opened else [first]), fm.SwiGLU(), *(second if opened else [second]))


def mlp(opened, **settings):
    first, second = lora(K, 2 * RANK, alpha=None, bias=False, **settings), lora(RANK, K, alpha=20, **settings)
    return first, second, mlp_of(first, second, opened)


@pytest.mark.parametrize("opened", [True, False], ids=["its ops", "itself"])
def test_in_a_chain_with_an_activation(opened):
    first, second, chain = mlp(opened)
    x, dy = rows(K, K)
    found, want = (
        outcome(chain, x, dy, splits=SPLITS),
        exact_outcome(mlp_of(first, second, False), x, dy, splits=SPLITS),
    )
    assert len(want) == 6
    assert_accurate([*found.values()], [*want.values()], 1e-14)
    assert not any(found[name][TOTAL:].any() for name in ("y", "x"))
    assert first.lora_B.scale == 1  # alpha=None
    assert len(chain.explain(x, splits=SPLITS).parts) == 1


def test_between_dispatch_and_combine():
    chain = fm.Sequential(fm.Dispatch(E), lora(K, 2 * RANK), fm.SwiGLU(), lora(RANK, K), fm.Combine())
    given = {"x": leaf(9, K), "dy": torch.randn(9, K, dtype=F64), "expert_index": torch.randint(E, (9, 2))}
    given["expert_weight"] = torch.rand(9, 2, dtype=F64, requires_grad=True)
    assert_accurate(outcome(chain, **given), exact_outcome(chain, **given), 1e-13)


def test_at_first_it_is_the_layer():
    layer = fm.GroupedLinear(E, K, N, bias=True)
    x = torch.randn(19, K)
    expected = layer(x, splits=SPLITS)
    op = fm.GroupedLoRA(layer, RANK)
    assert torch.equal(op(x, splits=SPLITS), expected)
    bound, a = K**-0.5, op.lora_A.weight
    assert bound * 0.95 < a.max() <= bound
    assert -bound <= a.min() < -bound * 0.95
    assert not op.lora_B.weight.any()
    assert op.lora_B.scale == 1
    drawn(op).reset_lora()
    assert a.abs().max() <= bound
    assert not op.lora_B.weight.any()
    assert torch.equal(op.merged().weight, layer.weight)


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_merged(dtype):
    op = lora(dtype=dtype)
    layer, base = op.merged(), op.base_layer
    assert type(layer) is fm.GroupedLinear
    weight, bias, a, b = (t.double() for t in (base.weight, base.bias, op.lora_A.weight, op.lora_B.weight))
    in_bf16 = dtype is BF16
    bound = 2 * ROUNDOFF[dtype] if in_bf16 else error_of_sums(RANK, RANK, dtype=dtype)
    assert_accurate(layer.weight, weight + ALPHA / RANK * b @ a, bound)
    assert layer.weight.dtype is layer.bias.dtype is dtype
    assert torch.equal(layer.bias.double(), bias)
    assert layer.weight.requires_grad
    assert torch.equal(base.weight.double(), weight)  # is left as it was
    x = torch.randn(19, K).to(dtype)
    bound = 8 * ROUNDOFF[dtype] if in_bf16 else 2 * error_of_sums(K, RANK, dtype=dtype)  # of both
    assert_accurate(layer(x, splits=SPLITS), op(x, splits=SPLITS).double(), bound)
    layer.bias.data.zero_()  # its own
    assert base.bias.any()


def test_wider_parameters_are_multiplied_as_the_rows_are():
    op, (x, dy) = lora(dtype=BF16), rows(dtype=BF16, total=TOTAL)
    wide = fm.GroupedLoRA(copy.deepcopy(op.base_layer), RANK, ALPHA, dtype=F32)
    wide.load_state_dict(op.state_dict())
    narrow, got = (outcome(module, x, dy, splits=SPLITS) for module in (op, wide))
    assert [t.dtype for t in got.values()] == [BF16] * 2 + [F32] * 2
    for name, t in got.items():
        if name in ("x", "y"):
            assert_bitwise(t, narrow[name])
        else:
            assert_accurate(t, narrow[name].double(), ROUNDOFF[BF16])


def test_autocast():
    op, (x, dy) = lora(dtype=F32, trained=("base_layer.weight",)), rows(dtype=F32, total=TOTAL)
    narrow = copy.deepcopy(op).bfloat16()
    want = outcome(narrow, x.detach().bfloat16(), dy.bfloat16(), splits=SPLITS)
    with torch.autocast("cpu", dtype=BF16):
        got = outcome(op, x.detach(), dy.bfloat16(), splits=SPLITS)
    assert got["y"].dtype is BF16
    assert_bitwise(got, {k: t if k == "y" else t.float() for k, t in want.items()})


@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_row", "fp8_block", "mxfp8", NVFP4(stochastic_rounding=False)])
def test_a_recipe_quantizes_the_layer_and_nothing_of_the_update(recipe):
    op, (x, dy) = lora(64, 48, 8, dtype=F32), rows(64, 48, F32)
    linear = quantized(ROLES[recipe] if isinstance(recipe, str) else nvfp4_roles(stochastic_rounding=False))
    want = exact_outcome(op, x, dy, linear, splits=SPLITS)
    assert_accurate(outcome(op, x, dy, recipe, splits=SPLITS), want, 1e-5)


def test_state_dict_has_the_names_of_peft_and_loads_the_bare_layers():
    op, other, x = lora(), lora(), torch.randn(19, K, dtype=F64)
    names = ["base_layer.bias", "base_layer.weight", "lora_A.weight", "lora_B.weight"]
    assert sorted(op.state_dict()) == names
    other.load_state_dict(op.state_dict())
    assert torch.equal(other(x, splits=SPLITS), op(x, splits=SPLITS))
    assert op[1] is op.base_layer
    assert [*op[:2].state_dict()] == ["lora_A.weight", "base_layer.weight", "base_layer.bias"]
    bare = fm.Sequential(fm.GroupedLinear(E, K, N, bias=True, dtype=F64)).state_dict()
    chain = fm.Sequential(other)
    found = chain.load_state_dict(bare, strict=False)
    assert (sorted(found.missing_keys), found.unexpected_keys) == (["0.lora_A.weight", "0.lora_B.weight"], [])
    assert torch.equal(other.base_layer.weight, bare["0.weight"])
    assert torch.equal(other.base_layer.bias, bare["0.bias"])
    assert sorted(bare) == ["0.bias", "0.weight"]  # the caller's, as it was
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*0\.lora_A\.weight"):
        chain.load_state_dict(bare)


def test_on_the_meta_device():
    with torch.device("meta"):
        op = fm.GroupedLoRA(fm.GroupedLinear(E, K, N), RANK)
        y = op(torch.empty(19, K), splits=torch.empty(E, dtype=torch.int64))
    assert y.shape == (19, N)
    assert op.merged().weight.is_meta
    loaded, x = lora(bias=False, alpha=None, dtype=F32), torch.randn(19, K)
    op.load_state_dict(loaded.state_dict(), assign=True)
    assert_bitwise(op(x, splits=SPLITS).detach(), loaded(x, splits=SPLITS).detach())


def call(op, x, splits=SPLITS, **named):
    return lambda: op(x, splits=splits, **named)


def changed(op):
    op.lora_A.weight = torch.nn.Parameter(torch.zeros(E, RANK, K + 1))
    return op


X, OP = torch.randn(19, K, dtype=F64), lora()
REFUSED = {
    "rank 0": (lambda: fm.GroupedLoRA(fm.GroupedLinear(2, 4, 4), 0), "rank"),
    "alpha nan": (lambda: fm.GroupedLoRA(fm.GroupedLinear(2, 4, 4), 2, float("nan")), "alpha"),
    "Linear": (lambda: fm.GroupedLoRA(fm.Linear(4, 4), 2), "layer: expected a GroupedLinear"),
    "LoRA": (lambda: fm.GroupedLoRA(lora(), 2), "layer: expected a GroupedLinear"),
    "features": (call(OP, X[:, 1:]), r"lora_A\.LoRADown.*x: .*\(19, 15\)"),
    "dtype": (call(OP, X.float()), r"base_layer\.GroupedLinear.*x: .*float32"),
    "no splits": (lambda: OP(X), "'splits' is missing"),
    "weight": (call(changed(lora()), X), "weight: expected shape"),
    "splits": (call(OP, X, SPLITS[:3]), "splits: expected shape"),
    "dtype of lora_rows": (call(OP.lora_B, X[:, :1].expand(19, N), lora_rows=X[:, :8].float()), "lora_rows: .*float32"),
    "lora_rows": (call(OP.lora_B, X[:, :1].expand(19, N), lora_rows=X[:, :7]), "LoRAUp.*lora_rows: .*shape"),
    "Quantize": (
        call(fm.Sequential(fm.Quantize(weight=fm.Quantizer(mxfp8())), *lora(32, 32, dtype=F32)), torch.randn(19, 32)),
        r"linear layer .*1\.LoRADown",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    refused, word = REFUSED[case]
    with pytest.raises(fm.InputError, match=word):
        refused()


def test_under_the_layers_own_kernels():
    _, _, chain = mlp(opened=False, dtype=BF16)
    _, plan = steps(chain, leaf(ROWS, K, dtype=BF16), arch=90)
    used = {op: step.rule for step in plan.steps for op in step.ops if step.rule}
    assert used == {
        "0.base_layer.GroupedLinear": "sm90.grouped_gemm",
        "1.SwiGLU": "sm90.activation",
        "2.base_layer.GroupedLinear": "sm90.grouped_gemm",
        "2.base_layer.Dgrad": "sm90.grouped_dgrad",
        "1.DSwiGLU": "sm90.dactivation",
        "0.base_layer.Dgrad": "sm90.grouped_dgrad",
    }


def test_merged_keeps_the_settings_of_the_layer():
    layer = fm.GroupedLinear(E, K, N, accumulate_into_main_grad=True, recipe="mxfp8", dtype=BF16)
    merged = fm.GroupedLoRA(layer, 4).eval().merged()
    assert repr(merged) == repr(layer)
    assert not merged.training


def test_no_rows():
    op = lora()
    found = outcome(op, leaf(0, K), splits=torch.zeros(E, dtype=torch.int64))
    assert (found["y"].shape, found["x"].shape) == ((0, N), (0, K))
    assert not any(t.any() for t in found.values())
