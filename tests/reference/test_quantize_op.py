"""`Quantize`, and chains that compute with what it gives, against loops over the experts: each expert's rows, gradients
and weight are quantized on their own, along the axis that a product sums over, and multiplied in fp64.

Axes: R rows, E experts, K features in, N features out, T tokens.
"""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from oracles import expert_rows
from rounding import error_of_sums, relative_error
from torch import nn

import fusedmoe as fm
from fusedmoe.numerics.formats import Format, QuantizedTensor, mxfp8
from fusedmoe.numerics.formats.roles import ROLES, nvfp4_roles
from fusedmoe.numerics.recipes import NVFP4, RECIPES
from fusedmoe.ops import quantize as quantize_op

E, K, N = 4, 80, 72  # no whole blocks
SPLITS = torch.tensor([37, 0, 50, 1])
ROWS, TAIL = 93, 5

# what draws random bits has tests of its own
ORACLE_ROLES = {name: nvfp4_roles(stochastic_rounding=False) if name == "nvfp4" else r for name, r in ROLES.items()}
ORACLE_RECIPES = {name: NVFP4(stochastic_rounding=False) if name == "nvfp4" else RECIPES[name] for name in ROLES}
every_name = pytest.mark.parametrize("name", ROLES)


def meaning(x, quantizer, axis=-1):
    """What a matrix stands for once it is quantized, in fp64."""
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
    """A linear layer by hand: it notes what its gradients are made of."""

    def __init__(self, op, roles, splits):
        self.weight, self.bias, self.roles, self.splits = op.weight.detach(), op.bias, roles, splits

    def forward(self, x):
        self.x = x
        y = torch.zeros(x.shape[0], self.weight.shape[1], dtype=torch.float64)
        for e, first, end in expert_rows(self.splits):
            if end > first:
                w = meaning(self.weight[e], self.roles.weight, -1)
                y[first:end] = meaning(x[first:end], self.roles.input, -1) @ w.T
                y[first:end] += 0 if self.bias is None else self.bias[e].detach().double()
        return y.to(x.dtype)

    def backward(self, dy):
        dx = torch.zeros(self.x.shape, dtype=torch.float64)
        self.dw = torch.zeros(self.weight.shape, dtype=torch.float64)
        self.db = torch.zeros(self.weight.shape[:2], dtype=torch.float64)
        for e, first, end in expert_rows(self.splits):
            if end > first:
                part, grad = self.x[first:end], self.roles.grad
                w = meaning(self.weight[e], self.roles.weight, -2)
                dx[first:end] = meaning(dy[first:end], grad, -1) @ w
                self.dw[e] = over_rows(dy[first:end], grad, part, self.roles.input)
                self.db[e] = dy[first:end].double().sum(0)
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


def swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


class Rounded:
    """A `Quantize` among ops that sum over nothing: it gives what the codes stand for."""

    def __init__(self, op, splits):
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


def by_hand(ops, x, dy):
    for op in ops:
        x = op.forward(x)
    for op in reversed(ops):
        dy = op.backward(dy)
    return x, dy


def drawn(chain):
    for name, parameter in chain.named_parameters():
        nn.init.normal_(parameter, std=0.2 if name.endswith("weight") else 0.5)
    return chain


def quantized_layer(name, op):
    """The layer with all that is quantized around it."""
    roles = ORACLE_ROLES[name]
    return [fm.Quantize(roles.input, weight=roles.weight), op, fm.Quantize(backward=roles.grad)]


def rows(count=ROWS, width=K, dtype=torch.float32, tail=TAIL):
    x = torch.randn(count, width, dtype=dtype)
    x[count - tail :] = float("nan")
    return x.requires_grad_()


def with_nan_tail(dy, tail=TAIL):
    dy[dy.shape[0] - tail :] = float("nan")
    return dy


# An intermediate value that fp32 sums round differently may, now and then, get the next code: 3e-5 of the result here.
# Along the wrong axis, with another expert's scale or one rounding more, results are off by 1e-2 and worse.
IN_A_CHAIN = 2e-4


def close(got, want, bound=1e-6):
    return relative_error(got, want.double()) < bound


# --- alone ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_name
def test_alone_it_returns_what_the_codes_stand_for(name, dtype):
    op, x = fm.Quantize(name), rows(dtype=dtype, tail=0)
    y = op(x)
    assert y.dtype is dtype
    assert torch.equal(y, fm.quantize(x.detach(), ROLES[name].input).dequantize())
    assert not torch.equal(y, x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, dy)  # straight through


@every_name
def test_alone_it_quantizes_the_gradient(name):
    quantizer = ORACLE_ROLES[name].grad
    op, x = fm.Quantize(backward=quantizer), rows(tail=0)
    y = op(x)
    assert torch.equal(y, x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, fm.quantize(dy, quantizer).dequantize())
    assert not torch.equal(dx, dy)


@pytest.mark.parametrize("around", [lambda op: op, fm.Sequential], ids=["op", "chain of one"])
def test_both_directions_at_once(around):
    op, x = around(fm.Quantize("mxfp8", "fp8_row")), rows(tail=0)
    y = op(x)
    dy = torch.randn_like(y)
    assert torch.equal(y, fm.quantize(x.detach(), ROLES["mxfp8"].input).dequantize())
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, fm.quantize(dy, ROLES["fp8_row"].grad).dequantize())


def test_nothing_to_quantize_passes_everything():
    x = rows(tail=0)
    y = fm.Quantize()(x)
    dy = torch.randn_like(y)
    assert torch.equal(y, x)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy)


@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 3, 4, 64), (1, 64), (0, 64)], ids=str)
def test_rows_may_have_several_leading_axes(shape):
    x = torch.randn(shape, requires_grad=True)
    y = fm.Quantize("fp8_row", "fp8_row")(x)
    expected = fm.quantize(x.detach().flatten(0, -2), ROLES["fp8_row"].input).dequantize()
    assert torch.equal(y, expected.view(shape))
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx.shape == shape


def test_a_format_and_a_quantizer_say_the_same():
    x = rows(tail=0)
    expected = fm.Quantize("mxfp8")(x)
    assert torch.equal(fm.Quantize(mxfp8())(x), expected)
    assert torch.equal(fm.Quantize(fm.Quantizer(mxfp8()))(x), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32], ids=str)
def test_what_cannot_be_quantized_is_refused(dtype):
    with pytest.raises(fm.InputError, match=rf"Quantize\(forward='mxfp8.*x: expected float32.*got {dtype}"):
        fm.Quantize("mxfp8")(torch.ones(3, 64, dtype=dtype))
    with pytest.raises(fm.InputError, match=r"x: expected shape \(\.\.\., rows, features\), got \(64,\)"):
        fm.Quantize("mxfp8")(torch.ones(64))


def test_a_chain_in_fp64_is_refused():
    chain, x = fm.Sequential(fm.GroupedLinear(E, K, N)).double(), rows(dtype=torch.float64)
    with fm.recipe("mxfp8"), pytest.raises(fm.InputError, match=r"0:weight.Quantize: .*expected float32, bfloat16 or"):
        chain(x, splits=SPLITS)
    with pytest.raises(fm.InputError, match=r"1.*the gradient of x: expected float32, .* got torch.float64"):
        fm.Sequential(chain[0], fm.Quantize(backward="mxfp8"))(x, splits=SPLITS)


# --- around one layer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@every_name
def test_a_grouped_layer(name, bias):
    fc = drawn(fm.GroupedLinear(E, K, N, bias=bias))
    x, dy = rows(), with_nan_tail(torch.randn(ROWS, N))
    layer = Layer(fc, ORACLE_ROLES[name], SPLITS)
    want_y, want_dx = by_hand([layer], x.detach(), dy)
    with fm.recipe(ORACLE_RECIPES[name]):
        y = fm.Sequential(fc)(x, splits=SPLITS)
    dx, dw, *db = torch.autograd.grad(y, [x, *fc.parameters()], dy)
    assert close(y, want_y)
    assert close(dx, want_dx)
    assert close(dw, layer.dw)
    assert not db or close(db[0], layer.db)
    assert not y[-TAIL:].any()
    assert not dx[-TAIL:].any()
    assert not dw[1].any()


@pytest.mark.parametrize("shape", [(70,), (5, 14), (2, 1, 35)], ids=str)
@every_name
def test_a_dense_layer(name, shape):
    fc = drawn(fm.Linear(K, N))
    x, dy = torch.randn(*shape, K, requires_grad=True), torch.randn(*shape, N)
    one = copy.deepcopy(fc)
    one.weight, one.bias = nn.Parameter(fc.weight.detach()[None]), nn.Parameter(fc.bias.detach()[None])
    layer = Layer(one, ORACLE_ROLES[name], torch.tensor([70]))
    want_y, want_dx = by_hand([layer], x.detach().flatten(0, -2), dy.flatten(0, -2))
    with fm.recipe(ORACLE_RECIPES[name]):
        y = fm.Sequential(fc)(x)
    assert y.shape == (*shape, N)
    dx, dw, db = torch.autograd.grad(y, (x, fc.weight, fc.bias), dy)
    assert dx.shape == x.shape
    for got, want in ((y.flatten(0, -2), want_y), (dx.flatten(0, -2), want_dx), (dw, layer.dw[0]), (db, layer.db[0])):
        assert close(got, want)


PARTS = {  # what each of an op's three arguments makes of the roles
    "forward": lambda r: r._replace(weight=None, grad=None),
    "weight": lambda r: r._replace(input=None, grad=None),
    "backward": lambda r: r._replace(input=None, weight=None),
    "forward and weight": lambda r: r._replace(grad=None),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_tensor"])
def test_each_operand_may_be_quantized_alone(name, part):
    roles = PARTS[part](ORACLE_ROLES[name])
    fc = drawn(fm.GroupedLinear(E, K, N, bias=True))
    x, dy = rows(), with_nan_tail(torch.randn(ROWS, N))
    x.detach()[-TAIL:] = 0  # plain products sum whatever there is
    layer = Layer(fc, roles, SPLITS)
    want_y, want_dx = by_hand([layer], x.detach(), dy)
    chain = fm.Sequential(fm.Quantize(roles.input, weight=roles.weight), fc, fm.Quantize(backward=roles.grad))
    y = chain(x, splits=SPLITS)
    got = [y, *torch.autograd.grad(y, (x, fc.weight, fc.bias), dy)]
    for a, b in zip(got, (want_y, want_dx, layer.dw, layer.db), strict=True):
        assert close(a, b)


def test_the_formats_of_the_operands_may_differ():
    roles = ROLES["mxfp8"]._replace(weight=ROLES["fp8_block"].weight, grad=ROLES["fp8_tensor"].grad)
    fc = drawn(fm.GroupedLinear(E, K, N))
    x, dy = rows(), with_nan_tail(torch.randn(ROWS, N))
    layer = Layer(fc, roles, SPLITS)
    want_y, want_dx = by_hand([layer], x.detach(), dy)
    y = fm.Sequential(fm.Quantize(roles.input, weight=roles.weight), fc, fm.Quantize(backward=roles.grad))(
        x, splits=SPLITS
    )
    for a, b in zip([y, *torch.autograd.grad(y, (x, fc.weight), dy)], (want_y, want_dx, layer.dw), strict=True):
        assert close(a, b)


def test_the_weight_gradient_of_rotated_tiles_is_that_of_the_tiles_rotated_back():
    """The matrix of the rotation is spelled out here; both operands stand rotated in the product."""
    from format_oracles import HADAMARD

    roles = ORACLE_ROLES["nvfp4"]
    splits = torch.tensor([20, 33])
    x, dy = torch.randn(53, K), torch.randn(53, N)
    fc = drawn(fm.GroupedLinear(2, K, N))
    matrix = torch.from_numpy(HADAMARD)
    expected = []
    for _, first, end in expert_rows(splits):
        tiles = []
        for t, quantizer in ((dy, roles.grad), (x, roles.input)):
            part = nn.functional.pad(t[first:end], (0, 0, 0, -(end - first) % 16)).double()
            rotated = torch.einsum("tik, ij -> tjk", part.unflatten(0, (-1, 16)), matrix).flatten(0, 1)
            plain = fm.Quantizer(quantizer.format)
            tiles.append(meaning(rotated.to(torch.bfloat16), plain, -2))
        expected.append(tiles[0].T @ tiles[1])
    with fm.recipe(NVFP4(stochastic_rounding=False)):
        y = fm.Sequential(fc)(x, splits=splits)
    (dw,) = torch.autograd.grad(y, fc.weight, dy)
    assert close(dw, torch.stack(expected), 1e-3)  # sums in another order: a rounding to bf16 may fall the other way
    assert not close(dw, torch.einsum("rn, rk -> nk", dy, x).expand_as(dw).double(), 0.05)


# --- chains --------------------------------------------------------------------------------------------------------


def mlp(bias=True):
    return drawn(
        fm.Sequential(
            fm.GroupedLinear(E, K, 2 * N, bias=bias),
            fm.SwiGLU(),
            fm.Scale("probs"),
            fm.GroupedLinear(E, N, K, bias=bias),
        )
    )


def mlp_explicit(name, chain):
    """The same, with all that the recipe inserts."""
    up, act, scale, down = chain
    return fm.Sequential(*quantized_layer(name, up), act, scale, *quantized_layer(name, down))


def results(chain, x, dy, **named):
    named = {k: v.detach().clone().requires_grad_(v.requires_grad) for k, v in named.items()}
    y = chain(x, **named)
    wanted = [x, *(v for v in named.values() if v.requires_grad), *chain.parameters()]
    return [y, *torch.autograd.grad(y, wanted, dy)]


@every_name
def test_a_chain_under_a_recipe(name):
    chain, x, dy = mlp(), rows(), with_nan_tail(torch.randn(ROWS, K))
    probs = torch.rand(ROWS).requires_grad_()
    up, down = (Layer(chain[i], ORACLE_ROLES[name], SPLITS) for i in (0, 3))
    weighted = Elementwise(lambda t: t * probs.detach().double()[:, None])
    want_y, want_dx = by_hand([up, Elementwise(swiglu), weighted, down], x.detach(), dy)
    live = torch.arange(ROWS) < ROWS - TAIL
    before = weighted.x.detach()
    # what the second layer gives for its rows, before they are scaled
    d_scaled = by_hand([layer := Layer(chain[3], ORACLE_ROLES[name], SPLITS)], weighted.y.detach().float(), dy)[1]
    want_dprobs = (d_scaled.double() * before).sum(1) * live
    assert close(layer.dw, down.dw)
    with fm.recipe(ORACLE_RECIPES[name]):
        y, dx, dprobs, dw1, db1, dw2, db2 = results(chain, x, dy, splits=SPLITS, probs=probs)
    for got, want in (
        (y, want_y), (dx, want_dx), (dprobs, want_dprobs), (dw1, up.dw), (db1, up.db), (dw2, down.dw), (db2, down.db),
    ):  # fmt: skip
        assert close(got, want, IN_A_CHAIN)
    assert not y[~live].any()
    assert not dx[~live].any()
    assert not dprobs[~live].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_what_the_recipe_inserts_may_as_well_be_written_down(name, dtype):
    chain = mlp().to(dtype)
    x, dy = rows(dtype=dtype), with_nan_tail(torch.randn(ROWS, K).to(dtype))
    probs = torch.rand(ROWS).requires_grad_()
    roles = RECIPES[name].roles()
    up, act, scale, down = chain
    explicit = []
    for op in (up, act, scale, down):
        if isinstance(op, fm.GroupedLinear):
            explicit += [fm.Quantize(roles.input, weight=roles.weight), op, fm.Quantize(backward=roles.grad)]
        else:
            explicit.append(op)
    torch.manual_seed(5)
    with fm.recipe(name):
        inserted = results(chain, x, dy, splits=SPLITS, probs=probs)
    fm.clear_weight_cache(chain)
    torch.manual_seed(5)
    written = results(fm.Sequential(*explicit), x, dy, splits=SPLITS, probs=probs)
    for got, want in zip(inserted, written, strict=True):
        assert want.any()
        assert got.dtype is want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@every_name
def test_half_precision_rounds_once_after_each_op(name, dtype):
    fc = drawn(fm.GroupedLinear(E, K, N)).to(dtype)
    x, dy = rows(dtype=dtype), with_nan_tail(torch.randn(ROWS, N).to(dtype))
    layer = Layer(fc, ORACLE_ROLES[name], SPLITS)
    want_y, want_dx = by_hand([layer], x.detach(), dy)
    with fm.recipe(ORACLE_RECIPES[name]):
        y = fm.Sequential(fc)(x, splits=SPLITS)
    dx, dw = torch.autograd.grad(y, (x, fc.weight), dy)
    for got, want in ((y, want_y), (dx, want_dx), (dw, layer.dw)):
        assert got.dtype is dtype
        assert close(got, want, 0.004 if dtype is torch.bfloat16 else 0.0005)


def third_party():
    class Softsign(fm.Op):
        def compute(self, x):
            assert isinstance(x, torch.Tensor)
            return x / (1 + x.abs())

    return Softsign()


class Cube(nn.Module):
    def forward(self, x):
        assert isinstance(x, torch.Tensor)
        return x**3


FOLLOWERS = {
    "SwiGLU": (fm.SwiGLU, swiglu),
    "third-party op": (third_party, lambda t: t / (1 + t.abs())),
    "foreign module": (Cube, lambda t: t**3),
    "Quantize": (lambda: fm.Quantize("fp8_row"), None),
}


@pytest.mark.parametrize("follower", FOLLOWERS)
def test_any_other_op_gets_what_the_codes_stand_for(follower):
    make, function = FOLLOWERS[follower]
    x = rows(tail=0)
    chain = fm.Sequential(fm.Quantize("mxfp8", "mxfp8"), make())
    y = chain(x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    splits = torch.tensor([ROWS])
    last = Elementwise(function) if function else Rounded(chain[1], splits)
    want_y, want_dx = by_hand([Rounded(chain[0], splits), last], x.detach(), dy)
    assert close(y, want_y)
    assert close(dx, want_dx)


@pytest.mark.parametrize("where", ["first", "last", "middle"])
@every_name
def test_among_rows_sorted_by_expert(name, where):
    """Experts share nothing, wherever it stands; rows of none come out as zeros."""
    quantize = fm.Quantize(ORACLE_ROLES[name].input, ORACLE_ROLES[name].grad)
    fc = drawn(fm.GroupedLinear(E, K, 2 * N))
    plain = Layer(fc, ROLES["mxfp8"]._replace(input=None, weight=None, grad=None), SPLITS)
    if where == "first":  # the layer multiplies what it gives
        chain = fm.Sequential(quantize, fm.Scale("probs"), fc)
    elif where == "last":
        chain = fm.Sequential(fc, fm.SwiGLU(), quantize)
    else:  # the layer's gradients are products of the codes
        chain = fm.Sequential(fc, quantize, fm.SwiGLU())
        plain.roles = plain.roles._replace(grad=quantize.grad_quantizer)
        forward_alone = fm.Quantize(quantize.quantizer)
    probs = torch.rand(ROWS) + 0.5
    ops = {fc: plain, quantize: Rounded(forward_alone if where == "middle" else quantize, SPLITS)}
    others = {fm.Scale: lambda t: t * probs.double()[:, None], fm.SwiGLU: swiglu}
    ops = [ops[op] if op in ops else Elementwise(others[type(op)]) for op in chain]
    x = rows()
    with torch.no_grad():
        x[5] *= 100  # scales of one expert that would not fit another
    named = {"splits": SPLITS, **({"probs": probs} if where == "first" else {})}
    y = chain(x, **named)
    dy = with_nan_tail(torch.randn_like(y))
    dx, dw = torch.autograd.grad(y, (x, fc.weight), dy)
    want_y, want_dx = by_hand(ops, x.detach(), dy)
    live = slice(0, ROWS - TAIL)
    assert close(y[live], want_y[live], IN_A_CHAIN)
    assert close(dx[live], want_dx[live], IN_A_CHAIN)
    assert close(dw, plain.dw, IN_A_CHAIN)
    assert not y[-TAIL:].any()
    assert not dx[-TAIL:].any()


@pytest.mark.parametrize("combine", ["weights", "none"])
@every_name
def test_a_routed_chain(name, combine):
    roles = ORACLE_ROLES[name]
    tokens, top_k = 30, 2
    index = torch.stack([torch.randperm(E)[:top_k] for _ in range(tokens)])
    index[3, 1] = -1  # a slot without an expert
    slots = [(t, k) for e in range(E) for t in range(tokens) for k in range(top_k) if index[t, k] == e]
    token_of = torch.tensor([t for t, _ in slots])
    splits = torch.tensor([sum(int(index[t, k]) == e for t, k in slots) for e in range(E)])
    weight = torch.rand(tokens, top_k, requires_grad=True)
    weights = [] if combine == "weights" else [None]
    chain = drawn(
        fm.Sequential(
            fm.Dispatch(), fm.GroupedLinear(E, K, 2 * N), fm.SwiGLU(), fm.GroupedLinear(E, N, K), fm.Combine(*weights)
        )
    )
    x, dy = torch.randn(tokens, K, requires_grad=True), torch.randn(tokens, K)
    factor = torch.stack([weight[t, k].detach() for t, k in slots])[:, None].double()
    factor = factor if combine == "weights" else torch.ones_like(factor)
    up, down = Layer(chain[1], roles, splits), Layer(chain[3], roles, splits)
    dy_rows = (dy[token_of].double() * factor).float()
    want_rows, want_dx_rows = by_hand([up, Elementwise(swiglu), down], x.detach()[token_of], dy_rows)
    want_y = torch.zeros(tokens, K, dtype=torch.float64).index_add_(0, token_of, want_rows.double() * factor)
    want_dx = torch.zeros(tokens, K, dtype=torch.float64).index_add_(0, token_of, want_dx_rows.double())
    named = {"expert_index": index, **({"expert_weight": weight} if combine == "weights" else {})}
    wanted = [x, *chain.parameters(), *([weight] if combine == "weights" else [])]
    if combine == "none":
        named["expert_weight"] = weight.detach()
        if "expert_weight" not in chain.runtime_inputs:
            del named["expert_weight"]
    with fm.recipe(ORACLE_RECIPES[name]):
        y = chain(x, **named)
    dx, dw1, dw2, *dweight = torch.autograd.grad(y, wanted, dy)
    for got, want in ((y, want_y), (dx, want_dx), (dw1, up.dw), (dw2, down.dw)):
        assert close(got, want, IN_A_CHAIN)
    if dweight:
        want = torch.zeros(tokens, top_k, dtype=torch.float64)
        for row, (t, k) in enumerate(slots):
            want[t, k] = (want_rows[row].double() * dy[t].double()).sum()
        assert close(dweight[0], want, IN_A_CHAIN)


def test_a_quantize_in_front_of_a_combine():
    index = torch.tensor([[0, 1], [1, 0], [2, 3], [0, 3]])
    chain = fm.Sequential(fm.Dispatch(), fm.GroupedLinear(E, K, K), fm.Quantize("mxfp8"), fm.Combine())
    drawn(chain)
    x, weight = torch.randn(4, K, requires_grad=True), torch.rand(4, 2)
    y = chain(x, expert_index=index, expert_weight=weight)
    expected = torch.zeros_like(y, dtype=torch.float64)
    for t in range(4):
        for k in range(2):
            row = x[t].detach() @ chain[1].weight[index[t, k]].detach().T
            expected[t] += weight[t, k] * meaning(row[None], ROLES["mxfp8"].input)[0]
    assert close(y, expected)
    assert torch.autograd.grad(y.sum(), x)[0].any()


# --- what it costs -------------------------------------------------------------------------------------------------


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


def test_nothing_is_quantized_twice_by_a_recipe(calls):
    chain, x = mlp(bias=True), rows()
    probs = torch.rand(ROWS)
    with fm.recipe("mxfp8"):
        y = chain(x, splits=SPLITS, probs=probs)
        forward = [(2, -2)] * 2 + [(2, -1)] * 2 + [(3, -2)] * 2 + [(3, -1)] * 2
        assert calls() == forward
        y.sum().backward()
        assert calls() == [(2, -2)] * 2 + [(2, -1)] * 2
        fm.clear_weight_cache(chain)
        with torch.no_grad():
            chain(x, splits=SPLITS, probs=probs)
        assert calls() == [(2, -1)] * 2 + [(3, -1)] * 2


def test_nothing_is_quantized_twice_by_an_op_of_the_chain(calls):
    up, act, _, down = mlp()
    chain, x = fm.Sequential(up, act, fm.Quantize("mxfp8"), down), rows()
    y = chain(x, splits=SPLITS)
    assert calls() == [(2, -2), (2, -1)]
    y.sum().backward()
    assert calls() == []
    with torch.no_grad():
        chain(x, splits=SPLITS)
    assert calls() == [(2, -1)]


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        # rows forward, weights by rows, the second's by columns for its data gradient; the first's is not wanted
        ("x", [(2, -2)] * 2 + [(2, -1)] * 2 + [(3, -2)] + [(3, -1)] * 2 + [(2, -2)] * 2 + [(2, -1)]),
        # no weight gradient: no columns of rows, nor of gradients
        ("weights", [(2, -1)] * 2 + [(3, -2)] * 2 + [(3, -1)] * 2 + [(2, -1)] * 2),
        # the last layer's weight gradient is all there is
        ("x and first", [(2, -2)] + [(2, -1)] * 2 + [(3, -1)] * 2 + [(2, -2)]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_nobody_wants_is_not_quantized(frozen, expected, calls):
    chain, x = mlp(bias=False), rows()
    if frozen.startswith("x"):
        x.requires_grad_(False)
    if frozen != "x":
        chain[0].requires_grad_(False)
    if frozen == "weights":
        chain[3].requires_grad_(False)
    named = {"splits": SPLITS, "probs": torch.rand(ROWS)}
    with fm.recipe("mxfp8"):
        chain(x, **named).sum().backward()
        assert calls() == sorted(expected)
        (plan,) = chain.explain(x, **named).plans
    backward = {op for s in plan.steps if s.direction == "backward" for op in s.ops}
    assert ("0.Dgrad" in backward) is (frozen == "weights")
    assert ("0:grad.QuantizeGrad" in backward) is (frozen != "x and first")
    assert ("3.Wgrad" in backward) is (frozen != "weights")


def test_no_gradient_no_columns_and_nothing_kept():
    chain, x = mlp(), rows()
    named = {"splits": SPLITS, "probs": torch.rand(ROWS)}
    with fm.recipe("mxfp8"), torch.no_grad():
        (plan,) = chain.explain(x, **named).plans
        assert not any(v.endswith(":columns") for s in plan.steps for v in s.gives)
        assert plan.kept == ()
        assert chain(x, **named).grad_fn is None


def test_the_codes_take_less_memory_than_bf16_rows():
    chain = fm.Sequential(fm.GroupedLinear(2, 128, 256), fm.SwiGLU(), fm.GroupedLinear(2, 128, 128)).bfloat16()
    x, splits = torch.randn(2048, 128, dtype=torch.bfloat16, requires_grad=True), torch.tensor([1000, 1048])
    (plain,) = chain.explain(x, splits=splits).plans
    with fm.recipe("mxfp8"):
        (plan,) = chain.explain(x, splits=splits).plans
    assert plan.kept_bytes < plain.kept_bytes - 2048 * 128  # of two inputs in half the bytes, one is the caller's


def test_a_derivative_reads_what_the_codes_stand_for_and_the_codes_are_kept():
    chain, x = fm.Sequential(fm.Quantize("mxfp8"), fm.SwiGLU()), torch.randn(64, 64, requires_grad=True)
    (plan,) = chain.explain(x).plans
    assert plan.kept == ("1.input",)
    y = chain(x)
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert sum(t.nbytes for t in saved) == plan.kept_bytes == 64 * (64 + 64 // 32)


# --- the op as a module --------------------------------------------------------------------------------------------


def test_hooks_make_it_a_module_of_its_own():
    chain, x = fm.Sequential(fm.SwiGLU(), fm.Quantize("mxfp8"), fm.Linear(K // 2, N)), rows(tail=0)
    expected = chain(x)
    seen = []
    handle = chain[1].register_forward_hook(lambda module, args, output: seen.append(output))
    y = chain(x)
    assert close(y, expected, 2 * error_of_sums(K // 2))  # the layer multiplies values in place of codes and scales
    assert torch.equal(seen[0], fm.quantize(chain[0](x).detach(), ROLES["mxfp8"].input).dequantize())
    y.sum().backward()
    assert x.grad.any()
    handle.remove()
    assert torch.equal(chain(x), expected)


def test_a_weight_cannot_be_quantized_by_an_op_that_hooks_set_apart():
    chain = fm.Sequential(fm.Quantize("mxfp8", weight="mxfp8"), fm.Linear(K, N))
    chain[0].register_forward_hook(lambda *_: None)
    with pytest.raises(fm.InputError, match="weight: expected a linear layer to follow, got the end of the chain"):
        chain(rows(tail=0))


@every_name
def test_no_rows(name):
    chain = mlp()
    x = torch.randn(0, K, requires_grad=True)
    with fm.recipe(name):
        y = chain(x, splits=torch.zeros(E, dtype=torch.int64), probs=torch.rand(0))
        assert y.shape == (0, K)
        y.sum().backward()
    assert x.grad.shape == (0, K)
    assert all(p.grad.shape == p.shape and not p.grad.any() for p in chain.parameters())


@every_name
def test_rows_of_no_expert(name):
    chain, x = mlp(), rows(7, tail=7)
    with fm.recipe(name):
        y = chain(x, splits=torch.zeros(E, dtype=torch.int64), probs=torch.rand(7))
        y.backward(torch.full_like(y, float("nan")))
    assert not y.any()
    assert not x.grad.any()
    assert all(not p.grad.any() for p in chain.parameters())


def test_copies_are_alike():
    chain, x = fm.Sequential(fm.Quantize("mxfp8", "fp8_row", weight="mxfp8"), fm.Linear(K, N)), rows(tail=0)
    expected = chain(x)
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert repr(other) == repr(chain)
        assert torch.equal(other(x), expected)
    assert list(chain.state_dict()) == ["1.weight", "1.bias"]


def test_its_text_names_what_it_quantizes_to():
    assert repr(fm.Quantize("mxfp8", "nvfp4")) == (
        "Quantize(forward='mxfp8 e4m3 1x32', backward='nvfp4 e2m1 1x16, stochastic rounding, Hadamard')"
    )
    assert isinstance(fm.Quantize(mxfp8()).quantizer.format, Format)
