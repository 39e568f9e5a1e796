"""`Quantize`, and chains that compute with quantized values, against loops over the experts: each expert's rows,
gradients and weight are quantized on their own, along the axis that a product sums over, and multiplied in fp64.

Axes: R rows, E experts, K features in, N features out, T tokens.
"""

import copy
from dataclasses import replace

import pytest
import torch
from kit.compare import assert_accurate, assert_bitwise, pairwise
from kit.formats import HADAMARD
from kit.layers import leaf, outcome, poison_tail
from kit.oracles import scale
from kit.rounding import relative_error
from kit.splits import TAIL, UNEVEN, UNEVEN_ROWS, expert_rows, slots_by_expert
from torch import nn

import fusedmoe as fm
from fusedmoe.numerics.formats import Format, QuantizedTensor, mxfp8
from fusedmoe.numerics.formats.roles import ROLES, nvfp4_roles
from fusedmoe.numerics.recipes import NVFP4, RECIPES
from fusedmoe.ops import quantize as quantize_op

E, K, N = 4, 80, 72  # no whole blocks
LIVE = UNEVEN_ROWS - TAIL
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# the recipes that draw random bits have tests of their own
ORACLE_ROLES = {name: nvfp4_roles(stochastic_rounding=False) if name == "nvfp4" else r for name, r in ROLES.items()}
ORACLE_RECIPES = {name: NVFP4(stochastic_rounding=False) if name == "nvfp4" else RECIPES[name] for name in ROLES}
every_name = pytest.mark.parametrize("name", ROLES)


def meaning(x, quantizer, axis=-1):
    """The values of a matrix once it is quantized, in fp64."""
    if quantizer is None:
        return x.double()
    return fm.quantize(x, quantizer, axis).dequantize(torch.float32).double()


def over_rows(dy, grad, x, forward):
    """``dy.T @ x`` of one expert: two rotated operands where they lie, in the rotated space, padding included."""
    if not (grad and forward and grad.hadamard and forward.hadamard):
        return meaning(dy, grad, -2).T @ meaning(x, forward, -2)
    codes = [fm.quantize(t, quantizer, -2) for t, quantizer in ((dy, grad), (x, forward))]
    a, b = (replace(q, rotated=False, shape=(q.length, q.shape[1])) for q in codes)
    return a.dequantize(torch.float32).double().T @ b.dequantize(torch.float32).double()


class Layer:
    """A linear layer by hand; its gradients stay in `dw` and `db`."""

    def __init__(self, op, roles, splits=UNEVEN):
        self.weight, self.bias, self.roles, self.splits = op.weight.detach(), op.bias, roles, splits

    def forward(self, x):
        self.x = x
        y = torch.zeros(x.shape[0], self.weight.shape[1], dtype=torch.float64)
        for e, first, end in expert_rows(self.splits):
            if end > first:
                y[first:end] = meaning(x[first:end], self.roles.input) @ meaning(self.weight[e], self.roles.weight).T
                y[first:end] += 0 if self.bias is None else self.bias[e].detach().double()
        return y.to(x.dtype)

    def backward(self, dy):
        dx = torch.zeros(self.x.shape, dtype=torch.float64)
        self.dw = torch.zeros(self.weight.shape, dtype=torch.float64)
        self.db = torch.zeros(self.weight.shape[:2], dtype=torch.float64)
        for e, first, end in expert_rows(self.splits):
            if end > first:
                grad, part = self.roles.grad, dy[first:end]
                dx[first:end] = meaning(part, grad) @ meaning(self.weight[e], self.roles.weight, -2)
                self.dw[e] = over_rows(part, grad, self.x[first:end], self.roles.input)
                self.db[e] = part.double().sum(0)
        return dx.to(dy.dtype)


class Elementwise:
    """Anything that sums over nothing: fp64, and autograd."""

    def __init__(self, function):
        self.function = function

    def forward(self, x):
        self.x = x.detach().double().requires_grad_()
        self.y = self.function(self.x)
        return self.y.detach().to(x.dtype)

    def backward(self, dy):
        return torch.autograd.grad(self.y, self.x, dy.double())[0].to(dy.dtype)


class Rounded:
    """A `Quantize` among ops that sum over nothing: it gives the values of the codes."""

    def __init__(self, op, splits=UNEVEN):
        self.op, self.splits = op, splits

    def _by_expert(self, x, quantizer):
        if quantizer is None:
            return x
        y = torch.zeros_like(x)
        for _, first, end in expert_rows(self.splits):
            if end > first:
                y[first:end] = meaning(x[first:end], quantizer).to(x.dtype)
        return y

    def forward(self, x):
        return self._by_expert(x, self.op.quantizer)

    def backward(self, dy):
        return self._by_expert(dy, self.op.grad_quantizer)


def swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def by_hand(ops, x, dy):
    x = x.detach()
    for op in ops:
        x = op.forward(x)
    for op in reversed(ops):
        dy = op.backward(dy)
    return {"y": x, "x": dy}


def of_layer(layer, prefix=""):
    found = {f"{prefix}weight": layer.dw}
    return found | ({} if layer.bias is None else {f"{prefix}bias": layer.db})


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


def assert_by_hand(found, want, bound=1e-6):
    assert_accurate(found, {k: t.double() for k, t in want.items()}, bound)
    for name in ("y", "x"):
        assert found[name].shape[0] != UNEVEN_ROWS or not found[name][LIVE:].any(), name


# --- alone ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_name
def test_alone_it_returns_the_values_of_the_codes(name, dtype):
    x, backward = rows(dtype=dtype, tail=0), ORACLE_ROLES[name].grad
    quantized = fm.quantize(x.detach(), ROLES[name].input).dequantize()
    for op, want_y in ((fm.Quantize(name), quantized), (fm.Quantize(backward=backward), x.detach())):
        found = outcome(op, x, dy := torch.randn(x.shape).to(dtype))
        want_dx = dy if want_y is quantized else fm.quantize(dy, backward).dequantize()  # straight through
        assert_bitwise(found, {"y": want_y, "x": want_dx})
    assert not torch.equal(quantized, x)


@pytest.mark.parametrize("around", [lambda op: op, fm.Sequential], ids=["op", "chain of one"])
@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 3, 4, 64), (1, 64), (0, 64)], ids=str)
def test_both_directions_and_several_leading_axes(around, shape):
    x, dy = leaf(*shape, dtype=torch.float32), torch.randn(shape)
    found = outcome(around(fm.Quantize("mxfp8", "fp8_row")), x, dy)
    want_y = fm.quantize(x.detach().flatten(0, -2), ROLES["mxfp8"].input).dequantize()
    want_dx = fm.quantize(dy.flatten(0, -2), ROLES["fp8_row"].grad).dequantize()
    assert_bitwise(found, {"y": want_y.view(shape), "x": want_dx.view(shape)}, zeros=not x.numel())


def test_formats_quantizers_and_nothing():
    x, dy = rows(tail=0), torch.randn(UNEVEN_ROWS, K)
    expected = outcome(fm.Quantize("mxfp8"), x, dy)
    for same in (mxfp8(), fm.Quantizer(mxfp8())):
        assert_bitwise(outcome(fm.Quantize(same), x, dy), expected)
    assert_bitwise(outcome(fm.Quantize(), x, dy), {"y": x.detach(), "x": dy})
    assert isinstance(fm.Quantize(mxfp8()).quantizer.format, Format)


def hooked(chain):
    chain[0].register_forward_hook(lambda *_: None)
    return chain


DOUBLE = fm.GroupedLinear(E, K, N, dtype=torch.float64)
REFUSED = {
    "fp64": (lambda: fm.Quantize("mxfp8")(torch.ones(3, 64).double()), "Quantize.*x: .*float64"),
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


@pytest.mark.parametrize(("name", "bias", "dtype"), pairwise([*ROLES], [False, True], DTYPES), ids=str)
def test_a_grouped_layer(name, bias, dtype):
    fc, call = drawn(fm.GroupedLinear(E, K, N, bias=bias)).to(dtype), given(dtype=dtype)
    layer = Layer(fc, ORACLE_ROLES[name])
    want = by_hand([layer], call["x"], call["dy"]) | of_layer(layer)
    found = outcome(fc, **call, recipe=ORACLE_RECIPES[name])
    assert all(t.dtype is dtype for t in found.values())
    assert_by_hand(found, want, ROUNDED_ONCE[dtype] * (2 if bias and dtype is not torch.float32 else 1))
    assert not found["weight"][1].any()


@pytest.mark.parametrize(("name", "shape"), pairwise([*ROLES], [(70,), (5, 14), (2, 1, 35)]), ids=str)
def test_a_dense_layer(name, shape):
    fc, x, dy = drawn(fm.Linear(K, N)), leaf(*shape, K, dtype=torch.float32), torch.randn(*shape, N)
    one = copy.deepcopy(fc)
    one.weight, one.bias = nn.Parameter(fc.weight.detach()[None]), nn.Parameter(fc.bias.detach()[None])
    layer = Layer(one, ORACLE_ROLES[name], torch.tensor([70]))
    want = by_hand([layer], x.flatten(0, -2), dy.flatten(0, -2))
    want = {"y": want["y"].view(*shape, N), "x": want["x"].view(*shape, K), "weight": layer.dw[0], "bias": layer.db[0]}
    assert_accurate(outcome(fc, x, dy, ORACLE_RECIPES[name]), {k: t.double() for k, t in want.items()}, 1e-6)


PARTS = {
    "forward": {"weight": None, "grad": None},
    "weight": {"input": None, "grad": None},
    "backward": {"input": None, "weight": None},
    "forward and weight": {"grad": None},
    "formats that differ": {"weight": ROLES["fp8_block"].weight, "grad": ROLES["fp8_tensor"].grad},
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_tensor"])
def test_each_operand_may_be_quantized_alone(name, part):
    roles = ORACLE_ROLES[name]._replace(**PARTS[part])
    fc, call = drawn(fm.GroupedLinear(E, K, N, bias=True)), given()
    poison_tail(LIVE, call["x"], value=0)  # plain products sum every row
    layer = Layer(fc, roles)
    want = by_hand([layer], call["x"], call["dy"]) | of_layer(layer, "1.")
    chain = fm.Sequential(fm.Quantize(roles.input, weight=roles.weight), fc, fm.Quantize(backward=roles.grad))
    assert_by_hand(outcome(chain, **call), want)


def test_the_weight_gradient_of_rotated_tiles_is_that_of_the_tiles_rotated_back():
    """The matrix of the rotation is spelled out here; both operands stand rotated in the product."""
    roles, splits, matrix = ORACLE_ROLES["nvfp4"], torch.tensor([20, 33]), torch.from_numpy(HADAMARD)
    fc, x, dy, expected = drawn(fm.GroupedLinear(2, K, N)), torch.randn(53, K), torch.randn(53, N), []
    for _, first, end in expert_rows(splits):
        tiles = []
        for t, quantizer in ((dy, roles.grad), (x, roles.input)):
            part = nn.functional.pad(t[first:end], (0, 0, 0, -(end - first) % 16)).double()
            rotated = torch.einsum("tik, ij -> tjk", part.unflatten(0, (-1, 16)), matrix).flatten(0, 1)
            tiles.append(meaning(rotated.to(torch.bfloat16), fm.Quantizer(quantizer.format), -2))
        expected.append(tiles[0].T @ tiles[1])
    dw = outcome(fc, x, dy, NVFP4(stochastic_rounding=False), splits=splits)["weight"]
    # sums in another order: a rounding to bf16 may fall the other way
    assert_accurate(dw, torch.stack(expected), 1e-3)
    assert relative_error(dw, torch.einsum("rn, rk -> nk", dy, x).expand_as(dw).double()) > 0.05


# --- chains --------------------------------------------------------------------------------------------------------


def mlp(bias=True):
    up, down = fm.GroupedLinear(E, K, 2 * N, bias=bias), fm.GroupedLinear(E, N, K, bias=bias)
    return drawn(fm.Sequential(up, fm.SwiGLU(), fm.Scale("probs"), down))


@every_name
def test_a_chain_under_a_recipe(name):
    chain, call = mlp(), given(out=K, probs=torch.rand(UNEVEN_ROWS).requires_grad_())
    weights = call["probs"].detach().double().requires_grad_()
    up, down = (Layer(chain[i], ORACLE_ROLES[name]) for i in (0, 3))
    scaled = Elementwise(lambda t: scale(t, weights))
    ops = [up, Elementwise(swiglu), scaled, down]
    want = by_hand(ops, call["x"], call["dy"])
    live = torch.arange(UNEVEN_ROWS) < LIVE
    d_scaled = down.backward(call["dy"])  # again, for the gradient of the routing weights
    want["probs"] = (d_scaled.double() * scaled.x.detach()).sum(1) * live
    found = outcome(chain, **call, recipe=ORACLE_RECIPES[name])
    assert_by_hand(found, {k: ({**want, **of_layer(up, "0."), **of_layer(down, "3.")})[k] for k in found}, IN_A_CHAIN)
    assert not found["probs"][~live].any()


@pytest.mark.parametrize(("name", "dtype"), pairwise([*RECIPES], DTYPES), ids=str)
def test_a_recipe_may_as_well_be_written_down(name, dtype):
    chain, roles = mlp().to(dtype), RECIPES[name].roles()
    call = given(out=K, dtype=dtype, probs=torch.rand(UNEVEN_ROWS).requires_grad_())
    torch.manual_seed(5)
    inserted = outcome(chain, **call, recipe=name)
    fm.clear_weight_cache(chain)
    up, act, scaled, down = chain

    def around(op):
        return fm.Quantize(roles.input, weight=roles.weight), op, fm.Quantize(backward=roles.grad)

    torch.manual_seed(5)
    written = outcome(fm.Sequential(*around(up), act, scaled, *around(down)), **call)
    assert_bitwise([*written.values()], [*inserted.values()])


class Cube(nn.Module):
    def forward(self, x):
        assert isinstance(x, torch.Tensor)
        return x**3


@pytest.mark.parametrize(("follower", "function"), [(Cube(), lambda t: t**3), (fm.Quantize("fp8_row"), None)])
def test_a_foreign_module_or_another_quantize_gets_the_values_of_the_codes(follower, function):
    chain, x, one = fm.Sequential(fm.Quantize("mxfp8", "mxfp8"), follower), rows(tail=0), torch.tensor([UNEVEN_ROWS])
    last = Elementwise(function) if function else Rounded(follower, one)
    dy = torch.randn_like(chain(x))
    want = by_hand([Rounded(chain[0], one), last], x, dy)
    assert_accurate(outcome(chain, x, dy), {k: t.double() for k, t in want.items()}, 1e-6)


@pytest.mark.parametrize("where", ["first", "last", "middle"])
@every_name
def test_among_rows_sorted_by_expert(name, where):
    """Experts share nothing, wherever it stands; rows of none come out as zeros."""
    quantize = fm.Quantize(ORACLE_ROLES[name].input, ORACLE_ROLES[name].grad)
    fc, probs = drawn(fm.GroupedLinear(E, K, 2 * N)), torch.rand(UNEVEN_ROWS) + 0.5
    plain, rounded = Layer(fc, ROLES["mxfp8"]._replace(input=None, weight=None, grad=None)), Rounded(quantize)
    glu, weighted = Elementwise(swiglu), Elementwise(lambda t: t * probs.double()[:, None])
    if where == "first":  # the layer multiplies its values
        chain, ops = [quantize, fm.Scale("probs"), fc], [rounded, weighted, plain]
    elif where == "last":
        chain, ops = [fc, fm.SwiGLU(), quantize], [plain, glu, rounded]
    else:  # the layer's gradients are products of the codes
        chain, ops = [fc, quantize, fm.SwiGLU()], [plain, Rounded(fm.Quantize(quantize.quantizer)), glu]
        plain.roles = plain.roles._replace(grad=quantize.grad_quantizer)
    call = given(out=2 * N if where == "first" else N, **({"probs": probs} if where == "first" else {}))
    with torch.no_grad():
        call["x"][5] *= 100  # scales of one expert that would not fit another
    want, found = by_hand(ops, call["x"], call["dy"]), outcome(fm.Sequential(*chain), **call)
    # the oracle reads the tail
    assert_accurate([found[k][:LIVE] for k in ("y", "x")], [want[k][:LIVE].double() for k in ("y", "x")], IN_A_CHAIN)
    assert_accurate(found[f"{chain.index(fc)}.weight"], plain.dw, IN_A_CHAIN)
    assert not found["y"][LIVE:].any()
    assert not found["x"][LIVE:].any()


@pytest.mark.parametrize("weights", ["probs", None])
@every_name
def test_a_routed_chain(name, weights):
    roles, tokens = ORACLE_ROLES[name], 30
    index = torch.stack([torch.randperm(E)[:2] for _ in range(tokens)])
    index[3, 1] = -1  # a slot without an expert
    by_expert = slots_by_expert(index, E)
    splits, token_of = torch.bincount(index[index >= 0], minlength=E), torch.tensor([t for t, _ in by_expert])
    layers = [fm.GroupedLinear(E, K, 2 * N), fm.SwiGLU(), fm.GroupedLinear(E, N, K)]
    chain = drawn(fm.Sequential(fm.Dispatch(), *layers, fm.Combine(weights)))
    x, dy, weight = leaf(tokens, K, dtype=torch.float32), torch.randn(tokens, K), torch.rand(tokens, 2)
    weight.requires_grad_(weights is not None)
    factor = torch.stack([weight[slot].detach() for slot in by_expert])[:, None].double()
    factor = factor if weights else torch.ones_like(factor)
    up, down = Layer(chain[1], roles, splits), Layer(chain[3], roles, splits)
    dy_rows = (dy[token_of].double() * factor).float()
    of_rows = by_hand([up, Elementwise(swiglu), down], x[token_of], dy_rows)
    zeros = torch.zeros(tokens, K, dtype=torch.float64)
    want = {
        "y": zeros.index_add(0, token_of, of_rows["y"].double() * factor),
        "x": zeros.index_add(0, token_of, of_rows["x"].double()),
    }
    if weights:
        want["expert_weight"] = torch.zeros(tokens, 2, dtype=torch.float64)
        for row, (t, k) in enumerate(by_expert):
            want["expert_weight"][t, k] = (of_rows["y"][row].double() * dy[t].double()).sum()
    want |= of_layer(up, "1.") | of_layer(down, "3.")
    found = outcome(chain, x, dy, ORACLE_RECIPES[name], expert_index=index, expert_weight=weight)
    assert_accurate(found, want, IN_A_CHAIN)


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
    up, act, _, down = chain  # by an op of the chain
    y = (chain := fm.Sequential(up, act, fm.Quantize("mxfp8"), down))(x, splits=UNEVEN)
    assert calls() == [ROWS_COLUMN, ROWS_ROW]
    y.sum().backward()
    assert calls() == []
    with torch.no_grad():
        chain(x, splits=UNEVEN)
    assert calls() == [ROWS_ROW]


@pytest.mark.parametrize("count", [0, 7])
@every_name
def test_rows_of_no_expert(name, count):
    x, dy = torch.full((count, K), torch.nan, requires_grad=True), torch.full((count, K), torch.nan)
    named = {"splits": torch.zeros(E, dtype=torch.int64), "probs": torch.rand(count)}
    found = outcome(mlp(), x, dy, name, **named)
    assert found["y"].shape == found["x"].shape == (count, K)
    assert not any(t.any() for t in found.values())
