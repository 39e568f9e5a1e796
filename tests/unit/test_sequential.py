"""`Sequential`: a container like `torch.nn.Sequential`, its state, foreign modules that split the chain, and hooks."""

import copy
import functools
import io
import pickle
import re

import pytest
import torch
from kit import toy
from kit.toy import E, H, I, assert_same, experts, inputs, only_plan, outcome, rows, rules_used
from torch import nn
from torch.nn.modules import module as torch_module

import fusedmoe as fm


@pytest.fixture
def chain():
    return experts()


def test_it_is_a_torch_sequential(chain):
    assert isinstance(chain, nn.Sequential)
    assert [type(op) for op in chain] == [fm.GroupedLinear, fm.SwiGLU, fm.GroupedLinear]
    assert (len(chain), chain[-1]) == (3, chain[2])
    for outside in (3, -4):
        with pytest.raises(IndexError):
            chain[outside]
    first = chain[:2]
    assert type(first) is fm.Sequential
    assert list(first) == [chain[0], chain[1]]
    x, named = rows(), inputs()
    torch.testing.assert_close(chain[2:](first(x, **named), **named), chain(x, **named))
    torch.testing.assert_close(chain[2](chain[1](chain[0](x, **named)), **named), chain(x, **named))
    assert "(0): GroupedLinear(num_groups=3, in_features=8, out_features=8)" in repr(chain)


def test_changes_are_seen_by_the_next_call(chain):
    x, named = rows(), inputs()
    y = chain(x, **named)
    chain[1] = fm.GeGLU()
    assert not torch.equal(chain(x, **named), y)
    chain[1] = fm.SwiGLU()
    assert torch.equal(chain(x, **named), y)
    last = chain.pop(2)
    assert chain(x, **named).shape == (9, I)
    del chain[-1]
    assert chain(x, **named).shape == (9, 2 * I)
    chain.append(last)
    chain.insert(1, fm.SwiGLU())
    assert torch.equal(chain(x, **named), y)
    chain.extend([fm.SwiGLU(), fm.SquaredReLU()])
    assert chain(x, **named).shape == (9, H // 2)
    assert list(chain.state_dict()) == ["0.weight", "2.weight"]


def test_sums_and_multiples_are_sequentials():
    first = fm.Sequential(fm.GroupedLinear(E, H, H, dtype=torch.float64), sm_margin=8)
    second, other = fm.Sequential(fm.SquaredReLU()), nn.Sequential(fm.SquaredReLU())
    x = rows()
    for made in (first + second, first + other, other + first, 2 * first, first * 2):
        assert type(made) is fm.Sequential
        assert made.sm_margin == 8
        want = x
        for op in made:
            want = op(want, **(inputs() if op is first[0] else {}))
        torch.testing.assert_close(made(x, **inputs()), want)
    assert len(first * 2) == 2
    with pytest.raises(TypeError):
        first + 2
    with pytest.raises(fm.InputError, match="Sequential: times: expected a number of repetitions, 1 or more, got 0"):
        first * 0


def test_a_nested_sequential_counts_as_its_ops():
    up, act, down = experts()
    flat, nested = fm.Sequential(up, act, down), fm.Sequential(up, fm.Sequential(act, down))
    x, named = rows(), inputs()
    assert list(nested.state_dict()) == ["0.weight", "1.1.weight"]
    (plan,) = nested.explain(x, **named).plans
    assert [s.ops for s in plan.steps if s.direction == "forward"] == [
        ("0.GroupedLinear",), ("1.0.SwiGLU",), ("1.1.GroupedLinear",),
    ]  # fmt: skip
    renamed = {"1.1.weight": "2.weight"}
    assert_same({renamed.get(k, k): v for k, v in outcome(nested, x, **named).items()}, outcome(flat, x, **named))


# ---- state ----------------------------------------------------------------------------------------------------------


def test_copies():
    chain = fm.Sequential(fm.Scale("probs"), *experts())
    x, named, file = rows(), inputs(scale=True), io.BytesIO()
    with fm.register(toy.gemm_glu()):  # a plan that holds functions of this process
        expected = outcome(chain, x, **named)
        torch.save(chain, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for twin in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain)), loaded):
            assert type(twin) is fm.Sequential
            assert twin[1].weight is not chain[1].weight
            assert_same(outcome(twin, x, **named), expected)


@pytest.mark.parametrize("materialize", ["to_empty", "assign"])
def test_built_on_the_meta_device(materialize):
    with torch.device("meta"):
        chain = experts()
    assert chain[0].weight.is_meta
    real = experts()
    if materialize == "to_empty":
        chain.to_empty(device="cpu")
        chain.load_state_dict(real.state_dict())
    else:
        chain.load_state_dict(real.state_dict(), assign=True)
    x, named = rows(), inputs()
    assert_same(outcome(chain, x, **named), outcome(real, x, **named))


def test_a_bias_may_appear_and_go():
    chain, x, named = experts(), rows(), inputs()
    y = chain(x, **named)
    chain[2].bias = nn.Parameter(torch.ones(E, H, dtype=torch.float64))
    with_bias = outcome(chain, x, **named)
    torch.testing.assert_close(with_bias["y"][:7], y.detach()[:7] + 1)
    assert torch.equal(with_bias["y"][7:], torch.zeros(2, H, dtype=torch.float64))
    assert "2.bias" in with_bias
    chain[2].bias = None
    assert torch.equal(chain(x, **named), y)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_parametrized_weight_is_read_through_its_parametrization():
    chain, x, named = experts(), rows(), inputs()
    expected = copy.deepcopy(chain)
    with torch.no_grad():
        expected[0].weight.mul_(2)
    nn.utils.parametrize.register_parametrization(chain[0], "weight", Doubled())
    with fm.register(toy.gemm()):
        plan = only_plan(chain, x, **named)
        got = outcome(chain, x, **named)
    want = outcome(expected, x, **named)
    # torch gives a parametrized module a class of its own, which no rule names
    assert rules_used(plan) == ["toy.gemm"]
    assert "got ParametrizedGroupedLinear, a subclass of GroupedLinear" in toy.status(plan, "toy.gemm", 0)[1]
    torch.testing.assert_close(got["y"], want["y"])
    torch.testing.assert_close(got["0.parametrizations.weight.original"], 2 * want["0.weight"])


# ---- foreign modules ------------------------------------------------------------------------------------------------


def routing(tokens=6):
    return {
        "expert_index": torch.tensor([[0, 2], [2, E], [2, 0], [0, 0], [-1, 2], [2, 0]])[:tokens],
        "expert_weight": torch.rand(tokens, 2, dtype=torch.float64, requires_grad=True),
    }


def tokens(count=6):
    return torch.randn(count, H, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("where", [1, 4])
def test_what_dispatch_provides_crosses_a_split_with_its_gradients(where):
    """Router weights reach Combine, or Scale, on the other side of a foreign module; their gradients come back."""
    modules = [fm.Dispatch(), *experts(), fm.Combine()]
    whole = fm.Sequential(*modules)
    split = fm.Sequential(*modules[:where], nn.Identity(), *modules[where:])
    x, named = tokens(), routing()
    expected, got = outcome(whole, x, **named), outcome(split, x, **named)
    assert {"x", "expert_weight"} < expected.keys()
    renamed = {f"{i + (i >= where)}.weight": f"{i}.weight" for i in range(5)}
    assert_same({renamed.get(k, k): v for k, v in got.items()}, expected)
    assert len(split.explain(x, **named).plans) == 2
    assert split.runtime_inputs == whole.runtime_inputs == ("expert_index", "expert_weight")


dynamos_own = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")


@dynamos_own
@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_module_that_returns_no_tensor_to_an_op_is_named(backend):
    chain = fm.Sequential(fm.Linear(4, 4), nn.GRU(4, 4), fm.Linear(4, 4))
    call = chain if backend is None else torch.compile(chain, backend=backend)
    text = r"Sequential: 1\.GRU: output: expected a tensor, the rows for 2\.Linear, got tuple"
    with pytest.raises(fm.InputError, match=text):
        call(torch.randn(3, 4))


@dynamos_own
def test_compiled_after_another_with_a_module_that_dynamo_does_not_trace():
    """The graph up to there was taken for the next one too."""
    x = torch.randn(3, 4)
    for chain in (fm.Sequential(fm.Linear(4, 4), nn.GRU(4, 4)), fm.Sequential(fm.Linear(4, 4), nn.Tanh())):
        torch.testing.assert_close(torch.compile(chain, backend="eager")(x), chain(x))


# ---- hooks ----------------------------------------------------------------------------------------------------------


TITLE = "module {}: {}: called as a module because of its hooks"


def titles(chain, x, **named):
    return [title for title, _ in chain.explain(x, **named).parts]


@pytest.fixture
def setup():
    chain, x, named = experts(), rows(), inputs()
    return chain, x, named, outcome(chain, x, **named)


def test_hooks_run_and_may_change_the_output(setup):
    chain, x, named, before = setup
    seen = {}
    _, act, down = chain
    handles = [
        act.register_forward_hook(lambda _m, args, out: seen.update(forward=(args[0].shape, out.shape))),
        down.register_forward_pre_hook(lambda _m, _args, kwargs: seen.update(pre=set(kwargs)), with_kwargs=True),
        act.register_full_backward_hook(lambda _m, dx, dy: seen.update(backward=(dx[0].shape, dy[0].shape))),
        down.register_full_backward_pre_hook(lambda _m, dy: seen.update(pre_backward=dy[0].shape)),
        chain.register_forward_hook(lambda *_: seen.update(own="splits nothing")),
    ]
    assert_same(outcome(chain, x, **named), before)
    shapes = (9, H), (9, I)
    assert seen == {
        "forward": shapes, "pre": {"splits"}, "backward": shapes, "pre_backward": (9, H), "own": "splits nothing",
    }  # fmt: skip
    assert titles(chain, x, **named) == ["chain 0", TITLE.format(1, "SwiGLU"), TITLE.format(2, "GroupedLinear")]
    for handle in handles:
        handle.remove()
    assert titles(chain, x, **named) == ["chain 0 to 2"]
    with act.register_forward_hook(lambda _m, _args, out: 2 * out):
        torch.testing.assert_close(outcome(chain, x, **named)["y"], 2 * before["y"])


def test_a_replaced_forward_runs(setup):
    """As accelerate does it."""
    chain, x, named, before = setup
    calls = []
    old = chain[0].forward

    def forward(module, *args, **kwargs):
        calls.append(set(kwargs))
        return old(*args, **kwargs)

    chain[0].forward = functools.update_wrapper(functools.partial(forward, chain[0]), old)
    assert_same(outcome(chain, x, **named), before)
    assert calls == [{"splits"}]
    assert titles(chain, x, **named)[0] == TITLE.format(0, "GroupedLinear")


class Negated(fm.SwiGLU):
    def forward(self, x, /, **inputs):
        return -super().forward(x, **inputs)


def test_a_subclass_that_overrides_forward_runs_it(setup):
    chain, x, named, before = setup
    chain[1] = Negated()
    got = outcome(chain, x, **named)
    torch.testing.assert_close(got["y"], -before["y"])
    torch.testing.assert_close(got["x"], -before["x"])
    assert titles(chain, x, **named)[1] == TITLE.format(1, "Negated")


def test_global_hooks_run_for_every_op(setup):
    chain, x, named, before = setup
    seen = []
    with torch_module.register_module_forward_hook(lambda m, _args, _out: seen.append(type(m))):
        assert_same(outcome(chain, x, **named), before)
        assert seen == [fm.GroupedLinear, fm.SwiGLU, fm.GroupedLinear, fm.Sequential]
    assert titles(chain, x, **named) == ["chain 0 to 2"]


# ---- runtime inputs: each given once, by name; what is wrong is refused with the ops that want it -------------------


def refused(text, chain, *args, **named):
    with pytest.raises(fm.InputError, match=re.escape(text)):
        chain(*args, **named)


PROBS = torch.ones(9, dtype=torch.float64)
REFUSED = {
    "missing": (experts, {}, "Sequential: the runtime input 'splits' is missing, which 0.GroupedLinear, 2.Gr"),
    "missing after a split": (
        lambda: fm.Sequential(fm.SwiGLU(), nn.Identity(), fm.Scale("gains")), {}, "'gains' is missing, which 2.Scale"
    ),
    "missing for an op alone": (lambda: experts()[0], {}, "'splits' is missing, which op.GroupedLinear takes"),
    "None": (experts, {"splits": None}, "the runtime input 'splits' is missing"),
    "unused": (
        lambda: experts(scale=True), {**inputs(scale=True), "porbs": PROBS},
        "no op takes the runtime input 'porbs'; the inputs that ops take: 'splits' (for 0.GroupedLinear, "
        "3.GroupedLinear), 'probs' (for 2.Scale)",
    ),
    "derived": (
        experts, {**inputs(), "offsets": torch.tensor([3, 3, 7])}, "no op takes the runtime input 'offsets'"
    ),
    "provided": (
        lambda: fm.Sequential(fm.Dispatch(), *experts(), fm.Combine()), {**routing(), **inputs()},
        "Sequential: 'splits' is given, but 0.Dispatch provides it",
    ),
    **{
        f"type of {value}": (
            experts, {"splits": value},
            f"splits: expected a tensor, got {type(value).__name__}; 0.GroupedLinear, 2.GroupedLinear takes it",
        )
        for value in ([3, 0, 4], "3")
    },
    **{
        f"splits {i}": (experts, {"splits": splits}, f"splits: {text}")
        for i, (splits, text) in enumerate([
            (torch.tensor([3, 4]), "expected shape (3,), one count per expert, got (2,)"),
            (torch.tensor(7), "expected shape (experts,), got ()"),
            (torch.tensor([3.0, 0, 4]), "expected integers, rows per expert, got torch.float32"),
            (torch.tensor([3, -1, 4]), "expected counts of at least 0, got -1 for expert 1"),
            (torch.tensor([3, 3, 4]), "expected a sum of at most 9, the number of rows, got 10"),
            (
                torch.tensor([3, 0, 4], device="meta"),
                "expected on cpu, where the rows are, got on meta; 0.GroupedLinear, 2.GroupedLinear takes it",
            ),
        ])
    },
    **{
        f"probs {i}": (
            lambda: experts(scale=True), {**inputs(), "probs": probs},
            f"2.Scale: Scale('probs'): probs: expected {text}",
        )
        for i, (probs, text) in enumerate([
            (torch.ones(8), "shape (9,), one value per row, got (8,)"),
            (torch.ones(9, dtype=torch.int64), "a floating-point dtype"),
        ])
    },
}  # fmt: skip


@pytest.mark.parametrize(("make", "named", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_inputs(make, named, text):
    chain, x = make(), rows()
    if "splits" in chain.runtime_inputs:
        chain(x, **{name: t for name, t in inputs(scale=True).items() if name in chain.runtime_inputs})
    refused(text, chain, x, **named)  # after a call that fitted, too
    if isinstance(chain, fm.Sequential) and "missing" in text:
        with pytest.raises(fm.InputError, match="is missing"):
            chain.explain(x, **named)


def test_wrong_rows():
    refused("Sequential: x: expected a tensor, got list", experts(), [[1.0]], **inputs())
    refused("x: expected a tensor, got list", fm.SwiGLU(), [[1.0]])
    refused("0.GroupedLinear: x: expected rows, got a scalar", experts(), torch.tensor(1.0), **inputs())
    named = "0.GroupedLinear: GroupedLinear(num_groups=3, in_features=8, out_features=8)"
    for call in (experts(), experts().explain):
        refused(f"{named}: x: expected shape (rows, 8), got (9, 7)", call, torch.ones(9, 7).double(), **inputs())
    alone = fm.Sequential(fm.Dispatch())
    refused("Dispatch(): num_experts is None, and no grouped op follows", alone, rows(), **routing())
    refused("0.GroupedLinear", experts(), rows(dtype=torch.float32), **inputs())  # a dtype that is not the weight's
    chain = experts()
    chain(rows(), **inputs())
    chain[2].weight = nn.Parameter(torch.zeros(E, H, I + 1, dtype=torch.float64))
    refused("weight: expected shape (3, 8, 4), got (3, 8, 5)", chain, rows(), **inputs())
    with pytest.raises(TypeError, match="positional"):
        experts()(rows(), torch.tensor([3, 0, 4]))


SPARSE_OR_NESTED = {
    "expected a dense tensor, got layout torch.sparse_coo; call .to_dense()": torch.Tensor.to_sparse,
    "expected a dense tensor, got a nested tensor; ": lambda x: torch.nested.nested_tensor(
        [x, x[:3]], layout=torch.jagged
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("message", SPARSE_OR_NESTED)
def test_sparse_and_nested_tensors(message):
    x, moe = rows(), fm.MoE(H, I, E, 2, dtype=torch.float64)
    other = SPARSE_OR_NESTED[message](x)
    with pytest.raises(fm.InputError, match=rf"0\.GroupedLinear: x: {re.escape(message)}"):
        experts()(other, **inputs())
    for call in (moe, moe.explain):
        with pytest.raises(fm.InputError, match=f"MoE: x: {re.escape(message)}"):
            call(other)
    with pytest.raises(fm.InputError, match=rf"op\.SwiGLU: x: {re.escape(message)}"):
        fm.SwiGLU()(other)
    with pytest.raises(fm.InputError, match="splits: expected a dense tensor, got "):
        experts()(x, splits=torch.tensor([4, 5]).to_sparse())


@pytest.mark.parametrize("ends", [(), ("module",)], ids=["one chain", "across a split"])
def test_probs_must_not_be_applied_twice(ends):
    middle = [nn.Identity() for _ in ends]
    chain = fm.Sequential(fm.Dispatch(), *experts(scale=True, dtype=torch.float32), *middle, fm.Combine())
    last = 5 + len(middle)
    refused(
        f"'probs' would be applied twice, by 3.Scale and by {last}.Combine; apply it in one of the two only",
        chain, torch.ones(6, H), **routing(),
    )  # fmt: skip


def test_a_call_on_the_meta_device_gives_meta_outputs():
    with torch.device("meta"):
        chain = fm.Sequential(fm.Dispatch(), *experts(scale=False, dtype=torch.bfloat16), fm.Combine())
        y = chain(
            torch.empty(5, H, dtype=torch.bfloat16),
            expert_index=torch.empty(5, 2, dtype=torch.int64),
            expert_weight=torch.empty(5, 2),
        )
    assert (y.device.type, tuple(y.shape), y.dtype) == ("meta", (5, H), torch.bfloat16)
