"""GroupedLoRA alone and in chains, against a loop over the experts that adds the update row by row."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from oracles import exact_copies, expert_rows, glu
from rounding import ROUNDOFF, error_of_sums, relative_error

import fusedmoe as fm
from fusedmoe.numerics.formats import mxfp8
from fusedmoe.ops import LoRADown, LoRAUp

E, K, N, RANK, ALPHA = 4, 16, 24, 8, 12.0
SPLITS = torch.tensor([7, 0, 1, 11])
ROWS = 22  # three more than the experts have


def drawn(module, std=0.3):
    """The module with normal parameters: an update with B at zero is none."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return module


def lora(k=K, n=N, rank=RANK, alpha=ALPHA, bias=True, dtype=torch.float64, trained=(), **settings):
    layer = fm.GroupedLinear(E, k, n, bias=bias, dtype=torch.float64)
    op = drawn(fm.GroupedLoRA(layer, rank, alpha, **settings)).to(dtype)
    for name, parameter in op.named_parameters():
        assert parameter.requires_grad is ("lora" in name)
        parameter.requires_grad_("lora" in name or name in trained)
    return op


def meaning(x, weight, bias, a, b, splits, scale):
    """``x @ W.T + bias + scale * (x @ A.T) @ B.T`` for the rows of each expert, and zeros after them."""
    parts, end = [], 0
    for e, first, end in expert_rows(splits):
        rows = x[first:end]
        y = F.linear(rows, weight[e], None if bias is None else bias[e])
        parts.append(y + scale * F.linear(F.linear(rows, a[e]), b[e]))
    return torch.cat([*parts, x.new_zeros(x.shape[0] - end, weight.shape[1])])


def tensors(op):
    return op.base_layer.weight, op.base_layer.bias, op.lora_A.weight, op.lora_B.weight


def expected_of(op, x, splits=SPLITS):
    return meaning(x, *tensors(op), splits, op.lora_B.scale)


def rows(k=K, dtype=torch.float64):
    x = torch.randn(ROWS, k, dtype=torch.float64).to(dtype)
    x[SPLITS.sum() :] = torch.nan  # no expert's
    return x.requires_grad_()


def known(x):
    """The rows without those that are nobody's: what an oracle may be given."""
    return x.detach().nan_to_num(0.0).requires_grad_()


def assert_same(got, wanted, bound):
    for g, w in zip(got, wanted, strict=True):
        assert relative_error(g, w.double()) < bound


SIZES = [(K, N, RANK), (3, 5, 2), (K, 8, 1)]  # in fp32 the first and the last go through F.grouped_mm, partly


@pytest.mark.parametrize(("k", "n", "rank"), SIZES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_oracle_agrees(dtype, bias, k, n, rank):
    everything = ("base_layer.weight", "base_layer.bias")
    op = lora(k, n, rank, bias=bias, dtype=dtype, trained=everything)
    x, dy = rows(k, dtype), torch.randn(ROWS, n, dtype=dtype)
    y = op(x, splits=SPLITS)
    dy[SPLITS.sum() :] = torch.nan
    found = torch.autograd.grad(y, [x, *op.parameters()], dy)
    exact_x = known(x).double().detach().requires_grad_()
    exact_op = copy.deepcopy(op).double()
    expected = expected_of(exact_op, exact_x)
    wanted = torch.autograd.grad(expected, [exact_x, *exact_op.parameters()], dy.double().nan_to_num(0.0))
    assert_same([y, *found], [expected, *wanted], ROUNDOFF[dtype] * 64)
    # zeros that are zeros, not small
    assert not y[SPLITS.sum() :].any()
    assert not found[0][SPLITS.sum() :].any()
    for gradient in found[1:]:
        assert not gradient[SPLITS == 0].any()
        assert gradient[SPLITS > 0].flatten(1).any(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_against_fp64_of_the_same_operands(dtype):
    op = lora(64, 48, 8, dtype=dtype, trained=("base_layer.weight", "base_layer.bias"))
    x, dy = torch.randn(19, 64).to(dtype).requires_grad_(), torch.randn(19, 48).to(dtype)
    y = op(x, splits=SPLITS)
    found = [y, *torch.autograd.grad(y, [x, *tensors(op)], dy)]
    exact_x, *exact = exact_copies(x, *tensors(op))
    expected = meaning(exact_x, *exact, SPLITS, ALPHA / 8)
    wanted = [expected, *torch.autograd.grad(expected, [exact_x, *exact], dy.double())]
    # the layer's rounding, its bias's, those of the rows between A and B and of their gradient, and the sum's
    assert_same(found, wanted, 5 * ROUNDOFF[dtype])
    assert all(g.dtype is dtype for g in found)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", [[2, 0, 1], [0, 3, 0], [0, 0, 0]])
def test_gradcheck(counts, bias):
    op = drawn(fm.GroupedLoRA(fm.GroupedLinear(3, 2, 3, bias=bias, dtype=torch.float64), rank=2, alpha=3))
    op.requires_grad_()
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)  # a row more than the splits have
    names = [name for name, _ in op.named_parameters()]

    def run(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(op, given, (x,), {"splits": torch.tensor(counts)})

    assert torch.autograd.gradcheck(run, (x, *op.parameters()))


@pytest.mark.parametrize("part", [LoRADown(3, 2, 2, dtype=torch.float64), LoRAUp(3, 2, 3, 1.5, dtype=torch.float64)])
def test_each_part_alone(part):
    drawn(part, 1.0)
    down = isinstance(part, LoRADown)
    x = torch.randn(5, 2 if down else 3, dtype=torch.float64, requires_grad=True)
    h = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def run(x, weight, h):
        given = {"splits": torch.tensor([2, 0, 2])} | ({} if down else {"lora_rows": h})
        y = torch.func.functional_call(part, {"weight": weight}, (x,), given)
        return (y[0] * 1.0, y[1]["lora_rows"]) if down else y

    assert torch.autograd.gradcheck(run, (x, part.weight, h.requires_grad_(not down)))
    if down:  # a gradient through either result alone
        assert torch.autograd.gradcheck(lambda *args: run(*args)[0], (x, part.weight, h))
        assert torch.autograd.gradcheck(lambda *args: run(*args)[1], (x, part.weight, h))


def steps(module, x, splits=SPLITS, **named):
    (part,) = [plan for _, plan in module.explain(x, splits=splits, **named).parts]
    return [op for step in part.steps for op in step.ops], part


def test_only_what_is_wanted_is_computed_and_only_what_is_needed_is_kept():
    op = lora()
    x = rows()
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


@pytest.mark.parametrize("names", [("x",), ("lora_A",), ("lora_B",), ("base_layer",), ("x", "lora_A")])
def test_gradients_of_some_alone(names):
    op = lora()
    x = rows().requires_grad_("x" in names)
    for name, parameter in op.named_parameters():
        parameter.requires_grad_(name.partition(".")[0] in names)
    wanted = [t for t in (x, *op.parameters()) if t.requires_grad]
    dy = torch.randn(ROWS, N, dtype=torch.float64)
    found = torch.autograd.grad(op(x, splits=SPLITS), wanted, dy)
    exact_x = known(x).requires_grad_("x" in names)
    expected = torch.autograd.grad(
        expected_of(op, exact_x), [t for t in (exact_x, *op.parameters()) if t.requires_grad], dy
    )
    assert_same(found, expected, 1e-14)
    assert all(p.requires_grad or p.grad is None for p in op.parameters())


def mlp(opened, **settings):
    first, second = lora(K, 2 * RANK, alpha=None, bias=False, **settings), lora(RANK, K, alpha=20, **settings)
    return first, second, fm.Sequential(*(first if opened else [first]), fm.SwiGLU(), *(second if opened else [second]))


@pytest.mark.parametrize("opened", [True, False], ids=["its ops", "itself"])
def test_in_a_chain_with_an_activation(opened):
    first, second, chain = mlp(opened)
    x, dy = rows(), torch.randn(ROWS, K, dtype=torch.float64)
    wanted = [p for p in chain.parameters() if p.requires_grad]
    assert len(wanted) == 4
    y = chain(x, splits=SPLITS)
    found = torch.autograd.grad(y, [x, *wanted], dy)
    exact_x = known(x)
    expected = expected_of(second, glu(expected_of(first, exact_x), "swiglu"))
    assert_same([y, *found], [expected, *torch.autograd.grad(expected, [exact_x, *wanted], dy)], 1e-14)
    assert not y[SPLITS.sum() :].any()
    assert not found[0][SPLITS.sum() :].any()
    assert first.lora_B.scale == 1  # alpha=None
    assert len(chain.explain(x, splits=SPLITS).parts) == 1


def test_between_dispatch_and_combine():
    first, second = lora(K, 2 * RANK), lora(RANK, K)
    chain = fm.Sequential(fm.Dispatch(E), first, fm.SwiGLU(), second, fm.Combine())
    plain = fm.Sequential(fm.Dispatch(E), first.merged(), fm.SwiGLU(), second.merged(), fm.Combine())
    x = torch.randn(9, K, dtype=torch.float64, requires_grad=True)
    routing = {"expert_index": torch.randint(E, (9, 2)), "expert_weight": torch.rand(9, 2, requires_grad=True)}
    dy = torch.randn(9, K, dtype=torch.float64)
    wanted = [x, routing["expert_weight"]]
    y, expected = chain(x, **routing), plain(x, **routing)
    found, want = torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy)
    assert_same([y, found[0]], [expected, want[0]], 1e-13)
    assert_same([found[1]], [want[1]], 1e-6)  # the weights are fp32


def test_at_first_it_is_the_layer():
    layer = fm.GroupedLinear(E, K, N, bias=True)
    x = torch.randn(19, K)
    expected = layer(x, splits=SPLITS)
    op = fm.GroupedLoRA(layer, RANK)
    assert torch.equal(op(x, splits=SPLITS), expected)
    bound = K**-0.5
    a = op.lora_A.weight
    assert bound * 0.95 < a.max() <= bound
    assert -bound <= a.min() < -bound * 0.95
    assert not op.lora_B.weight.any()
    assert op.lora_B.scale == 1
    drawn(op).reset_lora()
    assert a.abs().max() <= bound
    assert not op.lora_B.weight.any()
    assert torch.equal(op.merged().weight, layer.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_merged(dtype):
    op = lora(dtype=dtype)
    layer = op.merged()
    assert type(layer) is fm.GroupedLinear
    weight, bias, a, b = [t.double() for t in tensors(op)]
    expected = weight + ALPHA / RANK * b @ a
    assert layer.weight.dtype is layer.bias.dtype is dtype
    in_bf16 = dtype is torch.bfloat16
    bound = 2 * ROUNDOFF[dtype] if in_bf16 else error_of_sums(RANK, RANK, dtype=dtype)
    assert relative_error(layer.weight, expected) < bound
    assert torch.equal(layer.bias.double(), bias)
    assert layer.weight.requires_grad
    assert torch.equal(op.base_layer.weight.double(), weight)  # is left as it was
    x = torch.randn(19, K).to(dtype)
    bound = 8 * ROUNDOFF[dtype] if in_bf16 else 2 * error_of_sums(K, RANK, dtype=dtype)  # of both
    assert relative_error(layer(x, splits=SPLITS), op(x, splits=SPLITS).double()) < bound
    layer.bias.data.zero_()  # its own
    assert op.base_layer.bias.any()


def test_merged_keeps_the_settings_of_the_layer():
    layer = fm.GroupedLinear(E, K, N, accumulate_into_main_grad=True, recipe="mxfp8", dtype=torch.bfloat16)
    merged = fm.GroupedLoRA(layer, 4).eval().merged()
    assert repr(merged) == repr(layer)
    assert not merged.training


def test_wider_parameters_are_multiplied_as_the_rows_are():
    op = lora(dtype=torch.bfloat16)
    wide = fm.GroupedLoRA(copy.deepcopy(op.base_layer), RANK, ALPHA, dtype=torch.float32)
    assert wide.lora_A.weight.dtype is wide.lora_B.weight.dtype is torch.float32
    with torch.no_grad():
        wide.lora_A.weight.copy_(op.lora_A.weight)
        wide.lora_B.weight.copy_(op.lora_B.weight)
    x, dy = torch.randn(19, K).bfloat16().requires_grad_(), torch.randn(19, N).bfloat16()
    results = []
    for module in (op, wide):
        y = module(x, splits=SPLITS)
        results.append([y, *torch.autograd.grad(y, [x, module.lora_A.weight, module.lora_B.weight], dy)])
    narrow, got = results
    assert [t.dtype for t in got] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert torch.equal(got[0], narrow[0])
    assert torch.equal(got[1], narrow[1])
    assert_same(got[2:], narrow[2:], ROUNDOFF[torch.bfloat16])


def test_autocast():
    op = lora(dtype=torch.float32, trained=("base_layer.weight",))
    narrow = copy.deepcopy(op).bfloat16()
    x, dy = torch.randn(19, K, requires_grad=True), torch.randn(19, N).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = op(x, splits=SPLITS)
    expected = narrow(x.bfloat16(), splits=SPLITS)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, expected)
    wanted = [op.base_layer.weight, op.lora_A.weight, op.lora_B.weight]
    found = torch.autograd.grad(y, wanted, dy)
    narrowed = [narrow.base_layer.weight, narrow.lora_A.weight, narrow.lora_B.weight]
    for got, want in zip(found, torch.autograd.grad(expected, narrowed, dy), strict=True):
        assert got.dtype is torch.float32
        assert want.any()
        assert torch.equal(got, want.float())


@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "nvfp4"])
def test_a_recipe_quantizes_the_layer_and_nothing_of_the_update(recipe):
    op = lora(64, 48, 8, bias=False, dtype=torch.float32)
    x, dy = torch.randn(19, 64, requires_grad=True), torch.randn(19, 48)
    bare = copy.deepcopy(op.base_layer)
    with fm.recipe(recipe):
        y, base = op(x, splits=SPLITS), bare(x, splits=SPLITS)
        _, plan = steps(op, x)
    assert {name.partition(":")[0] for step in plan.steps for name in step.ops if "Quantize" in name} == {"base_layer"}
    # beside the quantized layer's own result, its update in the rows' precision
    exact_x, weight, a, b = [t.detach().double() for t in (x, *tensors(op)) if t is not None]
    for leaf in (exact_x, a, b):
        leaf.requires_grad_()
    update = meaning(exact_x, torch.zeros_like(weight), None, a, b, SPLITS, ALPHA / 8)
    assert relative_error((y - base), update) < 1e-5
    assert relative_error(base, meaning(exact_x, weight, None, 0 * a, b, SPLITS, 1.0)) > 1e-3
    wanted = [op.lora_A.weight, op.lora_B.weight]
    found = torch.autograd.grad(y, [x, *wanted], dy)
    assert_same(found[1:], torch.autograd.grad(update, [a, b], dy.double(), retain_graph=True), 1e-5)
    if recipe != "nvfp4":  # which rounds gradients stochastically
        (through_base,) = torch.autograd.grad(base, x, dy)
        assert_same([found[0] - through_base], torch.autograd.grad(update, exact_x, dy.double()), 1e-5)


def test_the_layer_keeps_a_recipe_of_its_own():
    op = lora(64, 48, 8, dtype=torch.float32)
    op.base_layer.recipe = "bf16"
    x = torch.randn(19, 64)
    expected = op(x, splits=SPLITS)
    with fm.recipe("mxfp8"):
        assert torch.equal(op(x, splits=SPLITS), expected)


def test_a_quantize_of_the_weight_in_front_of_it_is_an_error():
    chain = fm.Sequential(fm.Quantize(weight=fm.Quantizer(mxfp8())), *lora(32, 32, dtype=torch.float32))
    with pytest.raises(fm.InputError, match=r"expected a linear layer to follow, got 1\.LoRADown"):
        chain(torch.randn(19, 32), splits=SPLITS)


def test_main_grad_of_a_layer_that_is_trained_too():
    op = fm.GroupedLoRA(fm.GroupedLinear(E, K, N, accumulate_into_main_grad=True), RANK)
    drawn(op).base_layer.requires_grad_()
    op.base_layer.weight.main_grad = torch.zeros(E, N, K)
    x = torch.randn(19, K)
    op(x, splits=SPLITS).sum().backward()
    assert op.base_layer.weight.grad is None
    exact_x, *exact = exact_copies(x, *[t for t in tensors(op) if t is not None])
    weight, a, b = exact
    meaning(exact_x, weight, None, a, b, SPLITS, 1.0).sum().backward()
    assert_same([op.base_layer.weight.main_grad, op.lora_A.weight.grad], [weight.grad, a.grad], 1e-5)


def test_state_dict_has_the_names_of_peft_and_loads_the_bare_layers():
    op = lora()
    names = ["base_layer.bias", "base_layer.weight", "lora_A.weight", "lora_B.weight"]
    assert sorted(op.state_dict()) == names
    assert [tuple(op.state_dict()[n].shape) for n in names] == [(E, N), (E, N, K), (E, RANK, K), (E, N, RANK)]
    other = lora()
    other.load_state_dict(op.state_dict())
    x = torch.randn(19, K, dtype=torch.float64)
    assert torch.equal(other(x, splits=SPLITS), op(x, splits=SPLITS))

    bare = fm.Sequential(fm.GroupedLinear(E, K, N, bias=True, dtype=torch.float64)).state_dict()
    chain = fm.Sequential(other)
    found = chain.load_state_dict(bare, strict=False)
    assert (sorted(found.missing_keys), found.unexpected_keys) == (["0.lora_A.weight", "0.lora_B.weight"], [])
    assert torch.equal(other.base_layer.weight, bare["0.weight"])
    assert torch.equal(other.base_layer.bias, bare["0.bias"])
    assert sorted(bare) == ["0.bias", "0.weight"]  # the caller's, as it was
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*0\.lora_A\.weight"):
        chain.load_state_dict(bare)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))], ids=["copy", "pickle"])
def test_copies(copied):
    op = lora()
    x = torch.randn(19, K, dtype=torch.float64)
    expected = op(x, splits=SPLITS)
    twin = copied(op)
    assert type(twin) is fm.GroupedLoRA
    assert torch.equal(twin(x, splits=SPLITS), expected)
    torch.nn.init.zeros_(twin.lora_B.weight)
    assert torch.equal(op(x, splits=SPLITS), expected)


def test_a_slice_is_a_sequential_and_an_index_an_op():
    op = lora()
    assert type(op[:2]) is fm.Sequential
    assert op[1] is op.base_layer


def test_parameters_of_somebody_else():
    op = lora()
    x, given = torch.randn(19, K, dtype=torch.float64), dict(op.named_parameters())
    expected = op(x, splits=SPLITS)
    bare = copy.deepcopy(op).without_parameters()
    assert torch.equal(bare.forward_with(given, x, splits=SPLITS), expected)


def test_on_the_meta_device():
    with torch.device("meta"):
        op = fm.GroupedLoRA(fm.GroupedLinear(E, K, N), RANK)
        y = op(torch.empty(19, K), splits=torch.empty(E, dtype=torch.int64))
    assert y.shape == (19, N)
    assert op.merged().weight.is_meta
    loaded = lora(bias=False, dtype=torch.float32)
    op.load_state_dict(loaded.state_dict(), assign=True)
    x = torch.randn(19, K)
    assert torch.equal(op(x, splits=SPLITS), fm.GroupedLoRA.forward(op, x, splits=SPLITS))
    assert op(x, splits=SPLITS).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank: expected a positive integer, got 0"),
        ({"rank": 2.0}, r"rank: expected a positive integer, got 2\.0"),
        ({"rank": True}, "rank: expected a positive integer, got True"),
        ({"rank": 2, "alpha": float("nan")}, "alpha: expected a finite number, got nan"),
        ({"rank": 2, "alpha": "16"}, "alpha: expected a finite number, got '16'"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(fm.InputError, match=f"GroupedLoRA: {message}"):
        fm.GroupedLoRA(fm.GroupedLinear(2, 4, 4), **settings)


@pytest.mark.parametrize("layer", [fm.Linear(4, 4), torch.nn.Linear(4, 4), lora()], ids=["Linear", "torch", "LoRA"])
def test_a_layer_that_does_not_fit(layer):
    with pytest.raises(fm.InputError, match="GroupedLoRA: layer: expected a GroupedLinear, got "):
        fm.GroupedLoRA(layer, 2)
    assert any(p.requires_grad for p in layer.parameters())


def test_arguments_that_do_not_fit():
    op = lora()
    x = torch.randn(19, K, dtype=torch.float64)
    with pytest.raises(fm.InputError, match=r"lora_A\.LoRADown.*x: expected shape \(rows, 16\), got \(19, 15\)"):
        op(x[:, 1:], splits=SPLITS)
    with pytest.raises(fm.InputError, match=r"base_layer\.GroupedLinear.*x: expected torch.float64.*got torch.float32"):
        op(x.float(), splits=SPLITS)
    with pytest.raises(fm.InputError, match=r"splits: expected shape \(4,\), one count per expert, got \(3,\)"):
        op(x, splits=SPLITS[:3])
    with pytest.raises(fm.InputError, match="runtime input 'splits' is missing"):
        op(x)
    op.lora_A.weight = torch.nn.Parameter(torch.zeros(E, RANK, K + 1))
    with pytest.raises(fm.InputError, match=r"weight: expected shape \(4, 8, 16\), got \(4, 8, 17\)"):
        op(x, splits=SPLITS)
    op = lora()
    with pytest.raises(fm.InputError, match=r"LoRAUp.*lora_rows: expected shape \(19, 8\), got \(19, 7\)"):
        op.lora_B(x[:, :1].expand(19, N), lora_rows=x[:, :7], splits=SPLITS)
    with pytest.raises(fm.InputError, match=r"LoRAUp.*lora_rows: expected torch.float64.*got torch.float32"):
        op.lora_B(x[:, :1].expand(19, N), lora_rows=x[:, :8].float(), splits=SPLITS)


def test_no_rows():
    op = lora()
    x = torch.empty(0, K, dtype=torch.float64, requires_grad=True)
    y = op(x, splits=torch.zeros(E, dtype=torch.int64))
    assert y.shape == (0, N)
    y.sum().backward()
    assert x.grad.shape == (0, K)
    for parameter in (op.lora_A.weight, op.lora_B.weight):
        assert parameter.grad.shape == parameter.shape
        assert not parameter.grad.any()


def test_under_the_layers_own_kernels(monkeypatch):
    """What would be planned on an sm_90 GPU; nothing runs."""
    monkeypatch.setattr("fusedmoe.fusion.program.plan_table.arch_of", lambda device: 90)
    monkeypatch.setattr("fusedmoe.kernels.build.toolkit.missing_packages", lambda: ())
    _, _, chain = mlp(opened=False, dtype=torch.bfloat16)
    x = rows(dtype=torch.bfloat16)
    _, plan = steps(chain, x)
    used = {op: step.rule for step in plan.steps for op in step.ops if step.rule}
    products = {"0.base_layer.GroupedLinear": "sm90.grouped_gemm", "2.base_layer.GroupedLinear": "sm90.grouped_gemm"}
    products |= {"0.base_layer.Dgrad": "sm90.grouped_dgrad", "2.base_layer.Dgrad": "sm90.grouped_dgrad"}
    assert used == products | {"1.SwiGLU": "sm90.activation", "1.DSwiGLU": "sm90.dactivation"}
    text = " ".join(str(chain.explain(x, splits=SPLITS)).split())
    assert "sm90.grouped_gemm_activation: NO_MATCH: slot 'act': expected SwiGLU" in text
    assert "got LoRAUp" in text
