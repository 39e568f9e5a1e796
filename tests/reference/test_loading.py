"""`load_experts` against hand-written layers, in the layouts that other projects keep their weights in."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedmoe as fm

E, HIDDEN, WIDE, K, T = 5, 8, 6, 2, 12
DOUBLE = torch.float64


class Expert(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, WIDE, bias, dtype=DOUBLE)
        self.up = nn.Linear(HIDDEN, WIDE, bias, dtype=DOUBLE)
        self.down = nn.Linear(WIDE, HIDDEN, bias, dtype=DOUBLE)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Written(nn.Module):
    """A hand-written layer: a loop over the experts."""

    def __init__(self, bias=False):
        super().__init__()
        self.router = nn.Linear(HIDDEN, E, bias, dtype=DOUBLE)
        self.experts = nn.ModuleList(Expert(bias) for _ in range(E))

    def forward(self, x):
        weight, index = torch.softmax(self.router(x), -1).topk(K, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = (index == e).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(x[token]) * weight[token, slot, None])
        return y

    def linears(self, name):
        return [getattr(expert, name) for expert in self.experts]

    def stack(self, name, kind="weight"):
        return torch.stack([getattr(linear, kind) for linear in self.linears(name)])

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


def compare(ours, theirs):
    """Values and the gradients of the rows and the experts' weights."""
    x = torch.randn(T, HIDDEN, dtype=DOUBLE, requires_grad=True)
    dy = torch.randn(T, HIDDEN, dtype=DOUBLE)
    y, expected = ours(x), theirs(x)
    torch.testing.assert_close(y, expected)
    got, got_down = torch.autograd.grad(y, (x, ours.experts.down.weight), dy)
    want, *want_down = torch.autograd.grad(expected, (x, *[expert.down.weight for expert in theirs.experts]), dy)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_down, torch.stack(want_down))


@pytest.mark.parametrize("own_interleaved", [False, True], ids=["halves", "alternating layer"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_the_loop(layout, own_interleaved):
    theirs, ours = Written(), layer(activation=fm.SwiGLU(interleaved=own_interleaved))
    assert fm.load_experts(ours, **layout(theirs), router=theirs.router) is ours
    compare(ours, theirs)


@pytest.mark.parametrize("own_interleaved", [False, True], ids=["halves", "alternating layer"])
def test_biases_come_with_linears_and_beside_tensors(own_interleaved):
    theirs = Written(bias=True)
    by_linears, by_tensors = (layer(True, activation=fm.SwiGLU(interleaved=own_interleaved)) for _ in range(2))
    fm.load_experts(by_linears, **linears(theirs), router=theirs.router)
    compare(by_linears, theirs)
    fm.load_experts(
        by_tensors,
        gate_up=theirs.rows(interleaved=True),
        gate_up_bias=theirs.rows("bias", interleaved=True),
        interleaved=True,
        down=theirs.stack("down"),
        down_bias=[linear.bias for linear in theirs.linears("down")],
        router=theirs.router.weight,
        router_bias=theirs.router.bias,
    )
    for (name, a), b in zip(by_tensors.named_parameters(), by_linears.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_sequential_and_an_activation_without_a_gate():
    chain = fm.Sequential(fm.GroupedLinear(E, HIDDEN, WIDE), fm.SquaredReLU(), fm.GroupedLinear(E, WIDE, HIDDEN))
    up, down = torch.randn(E, WIDE, HIDDEN), torch.randn(E, HIDDEN, WIDE)
    fm.load_experts(chain, up=up, down=down)
    assert torch.equal(chain[0].weight, up)
    assert torch.equal(chain[2].weight, down)
    # a shared expert is one expert
    ours, theirs = fm.MoE(HIDDEN, WIDE, E, K, shared_intermediate=WIDE, dtype=DOUBLE), Expert(bias=False)
    fm.load_experts(ours.shared, gate=[theirs.gate], up=[theirs.up], down=[theirs.down])
    x = torch.randn(T, HIDDEN, dtype=DOUBLE)
    torch.testing.assert_close(ours.shared(x), theirs(x))


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
    theirs = Written()
    ours, alternating_rows = layer(), theirs.rows(interleaved=True)
    fm.load_experts(ours, gate_up=alternating_rows, down=theirs.stack("down"), router=theirs.router)
    weights = {"gate_up": ours.experts.gate_up.weight, "down": ours.experts.down.weight, "router": ours.router.weight}
    fm.load_experts(ours, **weights, interleaved=True)
    compare(ours, theirs)
    rest = {"down": theirs.stack("down"), "router": theirs.router}
    fm.load_experts(ours, gate=theirs.stack("up"), up=theirs.stack("gate"), **rest)
    weight = ours.experts.gate_up.weight
    fm.load_experts(ours, gate=weight[:, WIDE:], up=weight[:, :WIDE], **rest)
    compare(ours, theirs)


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
