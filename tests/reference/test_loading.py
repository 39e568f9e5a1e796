"""`load_experts`, from the layouts that other projects keep their weights in."""

import pytest
import torch
from kit.compare import assert_bitwise
from torch import nn

import fusedmoe as fm

E, HIDDEN, WIDE, K = 5, 8, 6, 2
DOUBLE = torch.float64


class Written:
    """The parts of a layer, one linear layer for each expert and projection."""

    def __init__(self, bias=False):
        self.router = nn.Linear(HIDDEN, E, bias, dtype=DOUBLE)
        sizes = {"gate": (HIDDEN, WIDE), "up": (HIDDEN, WIDE), "down": (WIDE, HIDDEN)}
        self.parts = {n: [nn.Linear(*size, bias, dtype=DOUBLE) for _ in range(E)] for n, size in sizes.items()}

    def linears(self, name):
        return self.parts[name]

    def stack(self, name, kind="weight"):
        return torch.stack([getattr(linear, kind).detach() for linear in self.parts[name]])

    def rows(self, kind="weight", interleaved=False):
        """Gate and up in one: [gate; up] or alternating rows."""
        both = (self.stack("gate", kind), self.stack("up", kind))
        return torch.stack(both, 2).flatten(1, 2) if interleaved else torch.cat(both, 1)


def linears(w):
    return {name: w.linears(name) for name in ("gate", "up", "down")}


def apart(w):
    return {name: w.stack(name) for name in ("gate", "up", "down")}


def apart_transposed(w):
    return {name: t.mT.contiguous() for name, t in apart(w).items()} | {"transposed": True}


def alternating(w):
    return {"gate_up": w.rows(interleaved=True), "down": w.stack("down"), "interleaved": True}


def alternating_transposed(w):
    return {"gate_up": w.rows(interleaved=True).mT, "down": w.stack("down").mT, "interleaved": True, "transposed": True}


def listed(w):
    return {"gate_up": list(w.rows()), "down": nn.ModuleList(w.linears("down"))}


LAYOUTS = [linears, apart, apart_transposed, alternating, alternating_transposed, listed]


def layer(bias=False, **options):
    return fm.MoE(HIDDEN, WIDE, E, K, bias=bias, router_bias=bias, dtype=DOUBLE, **options)


def assert_loaded(ours, theirs, interleaved=False):
    kinds = ["weight"] if theirs.router.bias is None else ["weight", "bias"]
    want = {f"router.{kind}": getattr(theirs.router, kind) for kind in kinds}
    want |= {f"experts.gate_up.{kind}": theirs.rows(kind, interleaved) for kind in kinds}
    want |= {f"experts.down.{kind}": theirs.stack("down", kind) for kind in kinds}
    assert_bitwise(dict(ours.named_parameters()), want)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "alternating layer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, interleaved):
    theirs, ours = Written(), layer(activation=fm.SwiGLU(interleaved=interleaved))
    assert fm.load_experts(ours, **layout(theirs), router=theirs.router) is ours
    assert_loaded(ours, theirs, interleaved)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "alternating layer"])
def test_biases_come_with_linears_and_beside_tensors(interleaved):
    theirs = Written(bias=True)
    ours = layer(True, activation=fm.SwiGLU(interleaved=interleaved))
    fm.load_experts(ours, **linears(theirs), router=theirs.router)
    assert_loaded(ours, theirs, interleaved)
    ours = layer(True, activation=fm.SwiGLU(interleaved=interleaved))
    biases = {"gate_up_bias": theirs.rows("bias", interleaved=True), "down_bias": [*theirs.stack("down", "bias")]}
    router = {"router": theirs.router.weight, "router_bias": theirs.router.bias}
    fm.load_experts(ours, **alternating(theirs), **biases, **router)
    assert_loaded(ours, theirs, interleaved)


def test_a_sequential_and_an_activation_without_a_gate():
    chain = fm.Sequential(fm.GroupedLinear(E, HIDDEN, WIDE), fm.SquaredReLU(), fm.GroupedLinear(E, WIDE, HIDDEN))
    up, down = torch.randn(E, WIDE, HIDDEN), torch.randn(E, HIDDEN, WIDE)
    fm.load_experts(chain, up=up, down=down)
    assert_bitwise([*chain.parameters()], [up, down])
    # a shared expert is one expert
    shared, w = layer(shared_intermediate=WIDE).shared, Written()
    fm.load_experts(shared, **{name: layers[:1] for name, layers in linears(w).items()})
    assert_bitwise([*shared.parameters()], [w.rows()[0], w.stack("down")[0]])


def test_parameters_stay_the_layers_own():
    ours, theirs = fm.MoE(HIDDEN, WIDE, E, K, dtype=torch.bfloat16), Written()
    ours.experts.down.weight.requires_grad_(False)
    before = list(ours.parameters())
    fm.load_experts(ours, **linears(theirs), router=theirs.router)
    assert all(a is b for a, b in zip(ours.parameters(), before, strict=True))
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert not ours.experts.down.weight.requires_grad
    assert torch.equal(ours.experts.down.weight, theirs.stack("down").bfloat16())
    assert all(p.grad_fn is None for p in ours.parameters())


def test_a_layers_own_weights_may_be_the_source():
    """Halves that change places, and alternating rows that are put in order: each overwrites what another one reads."""
    theirs, ours = Written(), layer()
    rest = {"down": theirs.stack("down"), "router": theirs.router}
    fm.load_experts(ours, gate_up=theirs.rows(interleaved=True), **rest)
    weights = {"gate_up": ours.experts.gate_up.weight, "down": ours.experts.down.weight, "router": ours.router.weight}
    fm.load_experts(ours, **weights, interleaved=True)
    assert_loaded(ours, theirs)
    fm.load_experts(ours, gate=theirs.stack("up"), up=theirs.stack("gate"), **rest)
    weight = ours.experts.gate_up.weight
    fm.load_experts(ours, gate=weight[:, WIDE:], up=weight[:, :WIDE], **rest)
    assert_loaded(ours, theirs)


def refusals():
    w, written = Written(), Written(bias=True)
    good, biased = linears(w) | {"router": w.router}, linears(written)
    gate, down = w.stack("gate"), w.stack("down")
    short = [*w.linears("down")[:3], nn.Linear(WIDE + 1, HIDDEN, bias=False), w.linears("down")[4]]
    some_biased = [nn.Linear(HIDDEN, WIDE, bias=i == 2) for i in range(E)]
    not_transposed = apart(w) | {"router": w.router}
    chain = fm.Sequential(fm.GroupedLinear(E, HIDDEN, WIDE), fm.SquaredReLU(), fm.GroupedLinear(E, WIDE, HIDDEN))
    meta, ours = torch.empty(E, HIDDEN, WIDE, device="meta"), layer()
    return {
        "shape of one": (ours, good | {"down": short}, r"down\[3\]: expected shape"),
        "not transposed": (ours, not_transposed | {"transposed": True}, r"gate: .*; for \(out, in\) omit transposed"),
        "experts alone": (ours, good | {"gate": gate[:4]}, r"gate: expected shape [^;]*$"),
        "router transposed": (ours, good | {"router": w.router.weight.T}, "router: expected shape .*not apply"),
        "sparse": (ours, good | {"gate": gate.to_sparse()}, "gate: .*sparse_coo"),
        "transposed no": (ours, good | {"transposed": "no"}, "transposed: .*'no'"),
        "number instead": (ours, good | {"gate": 3}, "gate: expected a tensor"),
        "no router": (ours, good | {"router": None}, "router: expected a weight"),
        "module": (ours, good | {"gate": [nn.Identity()] * E}, r"gate\[0\]: .*Identity"),
        "interleaved": (ours, good | {"interleaved": True}, "interleaved: expected gate_up"),
        "number": (ours, good | {"up": w.linears("up")[:4]}, "up: expected 5 experts"),
        "nothing": (ours, {"down": down, "router": w.router}, "gate_up, got none"),
        "twice": (ours, good | {"gate_up": w.rows()}, "gate_up, got gate and up and gate_up"),
        "router bias": (ours, good | {"router": nn.Linear(HIDDEN, E)}, "router_bias: expected none"),
        "bias": (ours, biased | {"router": w.router}, "gate_bias: expected none"),
        "no bias": (layer(True), linears(w) | {"router": written.router}, "gate_bias: expected biases"),
        "some biases": (ours, good | {"gate": some_biased}, "gate_bias: .*in every nn.Linear"),
        "lone bias": (ours, good | {"gate_up_bias": torch.zeros(E, 2 * WIDE)}, "together with gate_up"),
        "codes": (ours, good | {"down": down.to(torch.float8_e4m3fn)}, "down: .*dequantize"),
        "meta": (ours, good | {"down": meta}, "down: .*with contents"),
        "meta layer": (layer(device="meta"), good, "layer: .*meta device"),
        "no layer": (None, linears(w), "layer: .*NoneType"),
        "one product": (fm.Sequential(fm.GroupedLinear(E, 4, 4)), linears(w), "layer: .*GroupedLinear"),
        "router of experts": (ours.experts, good, "router: expected none"),
        "no gate": (chain, linears(w), "expected up without gate"),
    }


@pytest.mark.parametrize("case", refusals())
def test_arguments_that_do_not_fit_are_named_and_change_nothing(case):
    ours, arguments, word = refusals()[case]
    before = [p.clone() for p in ours.parameters()] if isinstance(ours, nn.Module) and case != "meta layer" else []
    with pytest.raises(fm.InputError, match=f"load_experts: .*{word}"):
        fm.load_experts(ours, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters() if before else [], before, strict=True))
