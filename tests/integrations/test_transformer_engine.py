"""Chains from and to Transformer Engine. It needs CUDA to be imported, so a stand-in of its published ops is in its
place, which has its names and signatures and computes what it documents.
"""

import pytest
import torch
from kit import transformer_engine_stand_in as te
from kit.compare import pairwise
from kit.framework_oracle import install
from kit.rounding import relative_error

import fusedmoe as fm
from fusedmoe.integrations.transformer_engine import from_te, to_te

HIDDEN, INTERMEDIATE = 32, 16
COUNTS = [5, 0, 9, 1]

# Transformer Engine's activation, the ops here that compute the same, and whether there is a scale
ACTIVATIONS = {
    "SwiGLU": (te.SwiGLU, lambda: [fm.SwiGLU()]),
    "ClampedSwiGLU": (
        lambda **k: te.ClampedSwiGLU(limit=0.5, alpha=1.5, glu_linear_offset=0.25, **k),
        lambda: [fm.SwiGLU(0.5, 1.5, 0.25)],
    ),
    "QGEGLU": (te.QGEGLU, lambda: [fm.SwiGLU(alpha=1.702)]),
    "GEGLU": (te.GEGLU, lambda: [fm.GeGLU("tanh")]),
    "ReGLU": (te.ReGLU, lambda: [fm.ReGLU()]),
    "SReLU": (te.SReLU, lambda: [fm.SquaredReLU()]),
    "ScaledSwiGLU": (te.ScaledSwiGLU, lambda: [fm.SwiGLU(), fm.Scale("probs")]),
    "ScaledClampedQGeGLU": (
        lambda **k: te.ScaledClampedQGeGLU(limit=0.5, alpha=1.5, glu_linear_offset=0.25, **k),
        lambda: [fm.SwiGLU(0.5, 1.5, 0.25), fm.Scale("probs")],
    ),
    "ScaledSReLU": (te.ScaledSReLU, lambda: [fm.SquaredReLU(), fm.Scale("probs")]),
}
WITH_BLOCKS = ["SwiGLU", "ClampedSwiGLU", "ScaledSwiGLU", "ScaledClampedQGeGLU"]


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch):
    install(monkeypatch, te.MODULES)
    torch.manual_seed(0)


def wide(name):
    return INTERMEDIATE if name.endswith("SReLU") else 2 * INTERMEDIATE


def make_te(name, size=None, **linear):
    options = {} if size is None else {"glu_interleave_size": size}
    activation = ACTIVATIONS[name][0](**options)
    first = te.GroupedLinear(len(COUNTS), HIDDEN, wide(name), **linear)
    return te.Sequential(first, activation, te.GroupedLinear(len(COUNTS), INTERMEDIATE, HIDDEN, **linear))


def make_ours(name, interleaved=False, bias=True, **linear):
    ops = ACTIVATIONS[name][1]()
    if interleaved:
        ops[0].interleaved = True
    first = fm.GroupedLinear(len(COUNTS), HIDDEN, wide(name), bias=bias, **linear)
    last = fm.GroupedLinear(len(COUNTS), INTERMEDIATE, HIDDEN, bias=bias, **linear)
    return fm.Sequential(first, *ops, last)


def check_same(name, theirs, ours, dtype=torch.float32, reordered=None):
    """Output and every gradient, to rounding."""
    rows, tolerance = sum(COUNTS), 1e-5 if dtype is torch.float32 else 0.015
    splits, dy = torch.tensor(COUNTS), torch.randn(rows, HIDDEN)
    x, probs = torch.randn(rows, HIDDEN, dtype=dtype, requires_grad=True), (torch.rand(rows) + 0.1).requires_grad_()
    scaled = name.startswith("Scaled")
    got = ours(x, splits=splits, **({"probs": probs} if scaled else {}))
    want = theirs(x, *([splits, probs, splits] if scaled else [splits, splits]))
    assert relative_error(got, want.double()) < tolerance
    inputs = [x, probs] if scaled else [x]
    first, _, last = theirs
    leaves = [layer.of(n, e) for layer in (first, last) for n in ("weight", "bias") for e in range(len(COUNTS))]
    gradients = torch.autograd.grad(want, [*inputs, *[p for p in leaves if p is not None]], dy.to(dtype))
    grads = torch.autograd.grad(got, [*inputs, *ours.parameters()], dy.to(dtype))
    for g, w in zip(grads[: len(inputs)], gradients, strict=False):
        assert relative_error(g, w.double()) < tolerance
    packed = iter(gradients[len(inputs) :])
    for g, (key, parameter) in zip(grads[len(inputs) :], ours.named_parameters(), strict=True):
        w = torch.stack([next(packed) for _ in COUNTS]).double()
        if key.startswith("0.") and reordered is not None:
            w = reordered(w)
        assert g.shape == parameter.shape
        assert relative_error(g, w) < tolerance, key


@pytest.mark.parametrize(("name", "bias"), [(name, i % 2 == 0) for i, name in enumerate(ACTIVATIONS)])
def test_both_ways(name, bias):
    theirs = make_te(name, bias=bias)
    ours = from_te(theirs)
    assert [repr(op) for op in ours[1:-1]] == [repr(op) for op in ACTIVATIONS[name][1]()]
    check_same(name, theirs, ours)
    ours = make_ours(name, bias=bias)
    theirs = to_te(ours)
    assert [type(op).__name__ for op in theirs] == ["GroupedLinear", name, "GroupedLinear"]
    check_same(name, theirs, ours)
    back = from_te(theirs)
    assert repr(back) == repr(ours)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize(("name", "size"), [*zip(WITH_BLOCKS, [1, 4, 16, 4], strict=True)])
def test_from_blocks(name, size):
    """The rows are [gate; up] here; alternating rows stay as they are."""
    theirs = make_te(name, size)
    ours = from_te(theirs)
    before = torch.stack([theirs._modules["0"].of("weight", e) for e in range(len(COUNTS))])

    def in_order(rows):
        blocks = rows.split(size, dim=1)
        return rows if size == 1 else torch.cat([*blocks[::2], *blocks[1::2]], dim=1)

    assert ours[1].interleaved == (size == 1)
    assert torch.equal(ours[0].weight, in_order(before))
    check_same(name, theirs, ours, reordered=in_order)


@pytest.mark.parametrize(("name", "interleaved", "size"), pairwise(WITH_BLOCKS, (False, True), (None, 1, 4)), ids=str)
def test_to_blocks(name, interleaved, size):
    ours = make_ours(name, interleaved)
    theirs = to_te(ours, glu_interleave_size=size)
    assert list(theirs)[1].glu_interleave_size == (1 if interleaved and size is None else size)
    x, splits = torch.randn(sum(COUNTS), HIDDEN), torch.tensor(COUNTS)
    probs = torch.rand(sum(COUNTS)) + 0.1
    scaled = name.startswith("Scaled")
    want = theirs(x, *([splits, probs, splits] if scaled else [splits, splits])).double()
    for chain in (ours, from_te(theirs)):
        got = chain(x, splits=splits, **({"probs": probs} if scaled else {}))
        assert relative_error(got, want) < 1e-5


def test_parameters_are_copies():
    theirs = make_te("ScaledSwiGLU", single_grouped_weight=True, single_grouped_bias=True)
    ours = from_te(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    again = to_te(ours)
    before = [p.detach().clone() for module in (theirs, again) for p in module.parameters()]
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    after = [p for module in (theirs, again) for p in module.parameters()]
    assert all(torch.equal(p, b) for p, b in zip(after, before, strict=True))


def test_settings_of_layers():
    theirs = make_te("ScaledSwiGLU", accumulate_into_main_grad=True)
    for e in range(len(COUNTS)):
        theirs._modules["0"].of("weight", e).requires_grad_(False)
    ours = from_te(theirs)
    assert [op.accumulate_into_main_grad for op in ours if isinstance(op, fm.GroupedLinear)] == [True, True]
    assert [p.requires_grad for p in ours.parameters()] == [False, True, True, True]
    again = to_te(ours)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in theirs.parameters()]
    first, _, last = again
    assert first._accumulate_into_main_grad
    assert last._accumulate_into_main_grad


def test_a_nested_chain_counts_as_its_ops():
    ours = make_ours("ScaledSwiGLU")
    check_same("ScaledSwiGLU", to_te(fm.Sequential(ours[0], fm.Sequential(ours[1], ours[2]), ours[3])), ours)


# ---- what is refused ----------------------------------------------------------------------------------------------


def mixed():
    layer = te.GroupedLinear(4, HIDDEN, HIDDEN)
    layer.weight2.requires_grad_(False)
    return layer


def quantized():
    layer = te.GroupedLinear(4, HIDDEN, HIDDEN)
    layer._with_quantized_weight = True
    return layer


FROM = {
    "expected one of GroupedLinear, .*got torch": torch.nn.Identity,
    "scale_bias: expected none.*got True": lambda: te.GroupedLinear(4, 8, 8, scale_bias=True),
    "delay_wgrad_compute: expected none": lambda: te.GroupedLinear(4, 8, 8, delay_wgrad_compute=True),
    "quantized weights: expected none": quantized,
    "0.GroupedLinear: weight: expected the same requires_grad for all experts": mixed,
    "cache_quantized_input: expected none": lambda: te.SwiGLU(cache_quantized_input=True),
    "activation_recompute_in_mlp: expected none": lambda: te.ScaledSReLU(activation_recompute_in_mlp=True),
    "glu_interleave_size: expected 1 or None .* got 4": lambda: te.SwiGLU(glu_interleave_size=4),
}


@pytest.mark.parametrize("message", FROM)
def test_from_refuses(message):
    with pytest.raises(fm.InputError, match=message):
        from_te(te.Sequential(FROM[message]()))


def test_from_refuses_chains():
    with pytest.raises(fm.InputError, match=r"expected a transformer_engine\.pytorch\.ops\.Sequential, got torch"):
        from_te(torch.nn.Sequential())
    with pytest.raises(fm.InputError, match="multiple of twice the block size 5 as out_features, got 32"):
        from_te(make_te("SwiGLU", 5))


TO = [
    ([fm.Scale("probs")], "to_te: 0.Scale: expected an op with an equivalent"),
    ([fm.GeGLU("tanh", limit=7.0)], "to_te: 0.GeGLU: expected an op"),
    ([fm.SwiGLU(alpha=2.0)], r"to_te: 0.SwiGLU: expected an op .*got SwiGLU\(alpha=2.0\)"),
    ([fm.ReGLU(interleaved=True)], "to_te: 0.ReGLU: expected gate and up as halves"),
    ([fm.GeGLU("tanh"), fm.Scale("probs")], r"GeGLU: expected an op .* and a Scale"),
    ([fm.GroupedLinear(4, 8, 8, recipe="mxfp8")], "without a recipe, got recipe='mxfp8'"),
    ([fm.GroupedLinear(4, 8, 8, dtype=torch.float64)], "weight: expected fp32, fp16 or bf16, got .*float64"),
    (make_ours("SwiGLU").without_parameters(), "without a recipe, got no weight"),
    (make_ours("SwiGLU"), "glu_interleave_size: expected a positive integer or None, got 0", 0),
    ([fm.SwiGLU()], "got blocks of 4: .* no GroupedLinear precedes it", 4),
    (make_ours("SwiGLU"), "multiple of twice the block size 5 as out_features, got 32", 5),
    (torch.nn.Sequential(), r"expected a fusedmoe\.Sequential, got torch"),
]


@pytest.mark.parametrize("case", TO, ids=[message for _, message, *_ in TO])
def test_to_refuses(case):
    chain, message, *size = case
    with pytest.raises(fm.InputError, match=message):
        to_te(fm.Sequential(*chain) if isinstance(chain, list) else chain, *size)


def test_to_refuses_ops_that_this_transformer_engine_lacks(monkeypatch):
    modules = {name: {k: v for k, v in names.items() if k != "ScaledSwiGLU"} for name, names in te.MODULES.items()}
    install(monkeypatch, modules)
    with pytest.raises(fm.InputError, match=r"1\.SwiGLU: this version of Transformer Engine has no ScaledSwiGLU"):
        to_te(make_ours("ScaledSwiGLU"))
