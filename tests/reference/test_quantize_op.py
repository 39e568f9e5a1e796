"""`Quantize`, and chains under recipes, against products in fp64 of operands that are quantized expert by expert."""

from dataclasses import replace

import pytest
import torch
from kit.compare import assert_accurate, assert_bitwise, pairwise
from kit.layers import leaf, outcome, poison_tail
from kit.oracles import exact_copies, exact_outcome, glu, grouped_linear, quantized, scale, values_of
from kit.splits import TAIL, UNEVEN, UNEVEN_ROWS, expert_rows
from torch import nn

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed, QuantizedTensor, mxfp8
from fusedmoe.numerics.formats.roles import ROLES, nvfp4_roles
from fusedmoe.numerics.recipes import NVFP4, RECIPES, FP8Tensor
from fusedmoe.ops import quantize as quantize_op

E, K, N = 4, 80, 72  # no whole blocks
LIVE = UNEVEN_ROWS - TAIL
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def unquantized_wgrad(quantizer):
    return replace(quantizer, wgrad="bf16", hadamard=False)


# random bits have tests of their own
NAMED = {
    name: (RECIPES[name], roles) if name != "nvfp4" else (NVFP4(stochastic_rounding=False), nvfp4_roles(True, False))
    for name, roles in ROLES.items()
}
NAMED |= {
    f"{name}:wgrad=bf16": (
        replace(recipe, wgrad="bf16"),
        roles._replace(input=unquantized_wgrad(roles.input), grad=unquantized_wgrad(roles.grad)),
    )
    for name, (recipe, roles) in NAMED.items()
}
every_name = pytest.mark.parametrize("name", ROLES)
every_recipe = pytest.mark.parametrize(("recipe", "roles"), NAMED.values(), ids=NAMED)


class Rounded(torch.autograd.Function):
    """A `Quantize` among ops that sum over nothing: it gives the values of the codes."""

    @staticmethod
    def forward(ctx, x, quantizer, grad_quantizer, splits=UNEVEN):
        ctx.again = grad_quantizer, None, splits
        y = torch.zeros_like(x)
        for _, first, end in expert_rows(splits):
            if end > first:
                y[first:end] = values_of(x[first:end], quantizer)
        return y

    @staticmethod
    def backward(ctx, dy):
        return Rounded.apply(dy, *ctx.again), None, None, None


def drawn(chain):
    for name, parameter in chain.named_parameters():
        nn.init.normal_(parameter, std=0.2 if name.endswith("weight") else 0.5)
    return chain


def rows(width=K, dtype=torch.float32, tail=TAIL):
    x = leaf(UNEVEN_ROWS, width, dtype=dtype)
    poison_tail(UNEVEN_ROWS - tail, x)
    return x


def given(width=K, out=N, dtype=torch.float32, **more):
    return {"x": rows(width, dtype), "dy": rows(out, dtype).detach(), "splits": UNEVEN, **more}


# An intermediate value that fp32 sums round differently may get the next code, a step of 1/8. Among the 10^4 values of
# an intermediate result, one that is twice as large as most then adds an error of 2/8 / 10^2. Along a wrong axis, with
# another expert's scale or one rounding more, results are off by 1e-2 and worse.
IN_A_CHAIN = 2.5e-3


def assert_exact(module, call, recipe, roles, bound):
    found = outcome(module, **call, recipe=recipe)
    assert_accurate(found, exact_outcome(module, **call, linear=quantized(roles)), bound)
    for name in ("y", "x"):
        assert found[name].shape[0] != UNEVEN_ROWS or not found[name][LIVE:].any(), name
    return found


# --- alone ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_name
def test_alone_it_returns_the_values_of_the_codes(name, dtype):
    x, backward = rows(dtype=dtype, tail=0), NAMED[name][1].grad
    values = fm.quantize(x.detach(), ROLES[name].input).dequantize()
    for op, want_y in ((fm.Quantize(name), values), (fm.Quantize(backward=backward), x.detach())):
        found = outcome(op, x, dy := torch.randn(x.shape).to(dtype))
        want_dx = dy if want_y is values else fm.quantize(dy, backward).dequantize()  # straight through
        assert_bitwise(found, {"y": want_y, "x": want_dx})
    assert not torch.equal(values, x)


@pytest.mark.parametrize("shape", [(2, 3, 4, 64), (0, 64)], ids=str)
def test_both_directions_and_several_leading_axes(shape):
    x, dy = leaf(*shape, dtype=torch.float32), torch.randn(shape)
    want_y = fm.quantize(x.detach().flatten(0, -2), ROLES["mxfp8"].input).dequantize()
    want_dx = fm.quantize(dy.flatten(0, -2), ROLES["fp8_row"].grad).dequantize()
    for forward in ("mxfp8", mxfp8(), fm.Quantizer(mxfp8())):
        op = fm.Quantize(forward, "fp8_row")
        for module in (op, fm.Sequential(op)):
            want = {"y": want_y.view(shape), "x": want_dx.view(shape)}
            assert_bitwise(outcome(module, x, dy), want, zeros=not x.numel())
    assert_bitwise(outcome(fm.Quantize(), x, dy), {"y": x.detach(), "x": dy}, zeros=not x.numel())


def hooked(chain):
    chain[0].register_forward_hook(lambda *_: None)
    return chain


DOUBLE = fm.GroupedLinear(E, K, N, dtype=torch.float64)
REFUSED = {
    "int32": (lambda: fm.Quantize("mxfp8")(torch.ones(3, 64).int()), "Quantize.*x: .*int32"),
    "one axis": (lambda: fm.Quantize("mxfp8")(torch.ones(64)), "x: expected shape"),
    "chain in fp64": (
        lambda: outcome(fm.Sequential(DOUBLE), rows(dtype=torch.float64), recipe="mxfp8", splits=UNEVEN),
        "0:weight.Quantize: .*float32",
    ),
    "gradient in fp64": (
        lambda: fm.Sequential(DOUBLE, fm.Quantize(backward="mxfp8"))(rows(dtype=torch.float64), splits=UNEVEN),
        "1.*the gradient of x: .*float64",
    ),
    "hooks before a weight": (
        lambda: hooked(fm.Sequential(fm.Quantize("mxfp8", weight="mxfp8"), fm.Linear(K, N)))(rows(tail=0)),
        "weight: expected a linear layer to follow",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    refused, word = REFUSED[case]
    with pytest.raises(fm.InputError, match=word):
        refused()


# --- around one layer ----------------------------------------------------------------------------------------------

ROUNDED_ONCE = {torch.float32: 1e-6, torch.bfloat16: 0.004, torch.float16: 0.0005}


@pytest.mark.parametrize(("name", "bias", "dtype"), pairwise([*NAMED], [False, True], DTYPES), ids=str)
def test_a_grouped_layer(name, bias, dtype):
    fc, bound = drawn(fm.GroupedLinear(E, K, N, bias=bias)).to(dtype), ROUNDED_ONCE[dtype]
    bound *= 2 if bias and dtype is not torch.float32 else 1
    found = assert_exact(fc, given(dtype=dtype), *NAMED[name], bound)
    assert all(t.dtype is dtype for t in found.values())
    assert not found["weight"][1].any()


@every_recipe
def test_a_dense_layer(recipe, roles):
    fc, x, dy = drawn(fm.Linear(K, N)), leaf(5, 14, K, dtype=torch.float32), torch.randn(5, 14, N)
    assert_exact(fc, {"x": x, "dy": dy}, recipe, roles, 1e-6)


def test_a_dense_layer_among_sorted_rows():
    chain = drawn(fm.Sequential(fm.GroupedLinear(E, K, N), fm.Linear(N, K)))
    assert_exact(chain, given(out=K), *NAMED["mxfp8:wgrad=bf16"], IN_A_CHAIN)


PARTS = {
    "forward": {"weight": None, "grad": None},
    "weight": {"input": None, "grad": None},
    "backward": {"input": None, "weight": None},
    "forward and weight": {"grad": None},
    "formats that differ": {"weight": ROLES["fp8_block"].weight, "grad": ROLES["fp8_tensor"].grad},
    "unquantized rows for the weight gradient": {"input": unquantized_wgrad(ROLES["mxfp8"].input)},
    "unquantized gradients for the weight gradient": {"grad": unquantized_wgrad(ROLES["mxfp8"].grad)},
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_tensor"])
def test_each_operand_may_be_quantized_alone(name, part):
    roles = NAMED[name][1]._replace(**PARTS[part])
    fc, call = drawn(fm.GroupedLinear(E, K, N, bias=True)), given()
    poison_tail(LIVE, call["x"], call["dy"], value=0)  # plain products sum every row
    chain = fm.Sequential(fm.Quantize(roles.input, weight=roles.weight), fc, fm.Quantize(backward=roles.grad))
    want = exact_outcome(fc, **call, linear=quantized(roles))
    assert_accurate([*outcome(chain, **call).values()], [*want.values()], 1e-6)


def test_an_unquantized_weight_gradient_is_not_rounded_stochastically():
    fc, call, found = fm.GroupedLinear(E, K, N), given(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(outcome(fc, **call, recipe=NVFP4(wgrad="bf16")))
    assert_bitwise(found[0]["weight"], found[1]["weight"])
    assert not torch.equal(found[0]["x"], found[1]["x"])


# --- chains --------------------------------------------------------------------------------------------------------


def mlp():
    up, down = fm.GroupedLinear(E, K, 2 * N, bias=True), fm.GroupedLinear(E, N, K, bias=True)
    return drawn(fm.Sequential(up, fm.SwiGLU(), fm.Scale("probs"), down))


@every_recipe
def test_a_chain(recipe, roles):
    call = given(out=K, probs=torch.rand(UNEVEN_ROWS).requires_grad_())
    found = assert_exact(mlp(), call, recipe, roles, IN_A_CHAIN)
    assert not found["probs"][LIVE:].any()


@pytest.mark.parametrize("weights", ["probs", None])
@every_recipe
def test_a_routed_chain(recipe, roles, weights):
    index = torch.stack([torch.randperm(E)[:2] for _ in range(30)])
    index[3, 1] = -1  # a slot without an expert
    layers = [fm.GroupedLinear(E, K, 2 * N), fm.SwiGLU(), fm.GroupedLinear(E, N, K)]
    chain = drawn(fm.Sequential(fm.Dispatch(), *layers, fm.Combine(weights)))
    call = {"x": leaf(30, K, dtype=torch.float32), "dy": torch.randn(30, K), "expert_index": index}
    call["expert_weight"] = torch.rand(30, 2).requires_grad_(weights is not None)
    assert_exact(chain, call, recipe, roles, IN_A_CHAIN)


class Cube(nn.Module):
    def forward(self, x):
        assert isinstance(x, torch.Tensor)
        return x**3


@pytest.mark.parametrize("follower", [Cube(), fm.Quantize("fp8_row")])
def test_a_foreign_module_or_another_quantize_gets_the_values_of_the_codes(follower):
    mx, one = ROLES["mxfp8"].input, torch.tensor([UNEVEN_ROWS])

    def function(x):
        x = Rounded.apply(x, mx, mx, one)
        return x**3 if isinstance(follower, Cube) else Rounded.apply(x, ROLES["fp8_row"].input, None, one)

    chain, x, dy = fm.Sequential(fm.Quantize("mxfp8", "mxfp8"), follower), rows(tail=0), torch.randn(UNEVEN_ROWS, K)
    want = outcome(chain, *exact_copies(x), dy.double(), call=function)
    assert_accurate(outcome(chain, x, dy), want, 1e-6)


@pytest.mark.parametrize("where", ["first", "last", "middle"])
@every_name
def test_among_rows_sorted_by_expert(name, where):
    """Experts share nothing, wherever it stands; rows of none come out as zeros."""
    roles = NAMED[name][1]
    op, fc, probs = fm.Quantize(roles.input, roles.grad), drawn(fm.GroupedLinear(E, K, 2 * N)), torch.rand(UNEVEN_ROWS)
    multiplied = quantized(roles._replace(input=None, weight=None))
    chain, function = {
        # the layer multiplies its values
        "first": (
            [op, fm.Scale("probs"), fc],
            lambda x, w: grouped_linear(scale(Rounded.apply(x, roles.input, roles.grad), probs), w, None, UNEVEN),
        ),
        "last": (
            [fc, fm.SwiGLU(), op],
            lambda x, w: Rounded.apply(glu(grouped_linear(x, w, None, UNEVEN), "swiglu"), roles.input, roles.grad),
        ),
        # the layer's gradients are products of the codes
        "middle": (
            [fc, op, fm.SwiGLU()],
            lambda x, w: glu(Rounded.apply(multiplied(x, w, None, UNEVEN), roles.input, None), "swiglu"),
        ),
    }[where]
    call = given(out=2 * N if where == "first" else N, **({"probs": probs} if where == "first" else {}))
    with torch.no_grad():
        call["x"][5] *= 100  # scales of one expert that would not fit another
    found = outcome(fm.Sequential(*chain), **call)
    poison_tail(LIVE, call["x"], call["dy"], value=0)
    x, weight = exact_copies(call["x"], fc.weight)
    y = function(x, weight)
    want = [y.detach(), *torch.autograd.grad(y, (x, weight), call["dy"].double())]
    assert_accurate([*found.values()], want, IN_A_CHAIN)
    assert not found["y"][LIVE:].any()
    assert not found["x"][LIVE:].any()


def test_delayed_scaling_records_every_amax_with_unquantized_weight_gradients_too():
    chains, call = [mlp(), mlp()], given(out=K, probs=torch.rand(UNEVEN_ROWS))
    chains[1].load_state_dict(chains[0].state_dict())
    for _ in range(2):
        for chain, wgrad in zip(chains, ("quantized", "bf16"), strict=True):
            outcome(chain, **call, recipe=FP8Tensor(delayed=Delayed(history=3), wgrad=wgrad))
    histories = [{k: v for k, v in c.state_dict().items() if "amax_history" in k} for c in chains]
    assert len(histories[0]) == 2 * 3 * 2
    assert_bitwise(*histories)


# --- its cost ------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """(axes of the tensor, axis quantized along) of every call of `quantize` since it was asked last."""
    made = []

    def counting(x, quantizer, axis=-1, **options):
        assert isinstance(x, torch.Tensor)
        assert not isinstance(x, QuantizedTensor)
        made.append((x.dim(), axis))
        return fm.quantize(x, quantizer, axis, **options)

    monkeypatch.setattr(quantize_op, "quantize", counting)

    def since():
        found = sorted(made)
        made.clear()
        return found

    return since


ROWS_ROW, ROWS_COLUMN, WEIGHT_ROW, WEIGHT_COLUMN = (2, -1), (2, -2), (3, -1), (3, -2)


def test_nothing_is_quantized_twice(calls):
    chain, x, named = mlp(), rows(), {"splits": UNEVEN, "probs": torch.rand(UNEVEN_ROWS)}
    with fm.recipe("mxfp8"):
        y = chain(x, **named)
        assert calls() == [ROWS_COLUMN] * 2 + [ROWS_ROW] * 2 + [WEIGHT_COLUMN] * 2 + [WEIGHT_ROW] * 2
        y.sum().backward()
        assert calls() == [ROWS_COLUMN] * 2 + [ROWS_ROW] * 2
        fm.clear_weight_cache(chain)
        with torch.no_grad():
            (plan,) = chain.explain(x, **named).plans
            assert not any(v.endswith(":columns") for s in plan.steps for v in s.gives)
            assert plan.kept == ()
            assert chain(x, **named).grad_fn is None
        assert calls() == [ROWS_ROW] * 2 + [WEIGHT_ROW] * 2
    with fm.recipe("mxfp8:wgrad=bf16"):
        chain(x.detach(), **named).sum().backward()
        rows_of = [call for call in calls() if call[0] == 2]
        assert rows_of == [ROWS_ROW] * 3  # of the two gradients, the second layer's alone
    up, act, _, down = chain  # by an op of the chain
    y = (chain := fm.Sequential(up, act, fm.Quantize("mxfp8"), down))(x, splits=UNEVEN)
    assert calls() == [ROWS_COLUMN, ROWS_ROW]
    y.sum().backward()
    assert calls() == []


@pytest.mark.parametrize("count", [0, 7])
@every_name
def test_rows_of_no_expert(name, count):
    x, dy = torch.full((count, K), torch.nan, requires_grad=True), torch.full((count, K), torch.nan)
    named = {"splits": torch.zeros(E, dtype=torch.int64), "probs": torch.rand(count)}
    found = outcome(mlp(), x, dy, name, **named)
    assert found["y"].shape == found["x"].shape == (count, K)
    assert not any(t.any() for t in found.values())
