"""What training under a recipe comes to: how far results are off, scales that outlive a step, random bits, gradients
that add up, and losses that go down.
"""

import copy
import io
import math
import pickle
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed, fp8_tensor, nvfp4
from fusedmoe.numerics.recipes import MXFP8, NVFP4, RECIPES, FP8Block, FP8Row, FP8Tensor

E, K, N = 4, 512, 512
ROWS = 1024
SPLITS = torch.tensor([256, 300, 180, 288])


def sqnr(got, want):
    """Signal over the noise of quantization, in decibels."""
    got, want = got.detach().double(), want.detach().double()
    assert want.norm() > 0
    return 20 * math.log10(want.norm() / max((got - want).norm(), 1e-300))


def outcome(module, x, dy, recipe, **named):
    torch.manual_seed(0)
    with fm.recipe(recipe):
        y = module(x, **named)
        return [y, *torch.autograd.grad(y, [x, *module.parameters()], dy)]


def noise(module, x, dy, recipe):
    plain = outcome(module, x, dy, "bf16", splits=SPLITS)
    return [sqnr(a, b) for a, b in zip(outcome(module, x, dy, recipe, splits=SPLITS), plain, strict=True)]


@pytest.fixture(scope="module")
def one_layer():
    torch.manual_seed(0)
    fc = fm.GroupedLinear(E, K, N, dtype=torch.bfloat16)
    x, dy = (torch.randn(ROWS, n).bfloat16() for n in (K, N))
    return fm.Sequential(fc), x.requires_grad_(), dy


@pytest.fixture(scope="module")
def mlp():
    torch.manual_seed(0)
    up, down = fm.GroupedLinear(E, K, 2 * 256), fm.GroupedLinear(E, 256, K)
    for fc in (up, down):
        nn.init.normal_(fc.weight, std=fc.in_features**-0.5)
    x, dy = (torch.randn(ROWS, K).bfloat16() for _ in range(2))
    return fm.Sequential(up, fm.SwiGLU(), down).bfloat16(), x.requires_grad_(), dy


# what quantizes nothing would be far above
NOTHING_DONE = 45.0


@pytest.mark.parametrize("recipe", [MXFP8(), FP8Block(), MXFP8(weight_2d=True)], ids=str)
def test_one_layer_is_as_exact_as_its_format_lets_it_be(recipe, one_layer):
    out, dx, dw = noise(*one_layer, recipe)
    text = f"{recipe}: out {out:.1f} dB, dx {dx:.1f} dB, dw {dw:.1f} dB"
    assert min(out - 28, dx - 26, dw - 25) >= 0, text
    assert max(out, dx, dw) < NOTHING_DONE, text


@pytest.mark.parametrize(
    ("recipe", "least", "most"),
    [
        (FP8Row(), 22, 25),
        (FP8Block(), 22, 25),
        (FP8Block(power_of_two=False), 22, 25),
        (MXFP8(), 22, 25),
        (FP8Tensor(hybrid=False), 22, 25),
        (FP8Tensor(), 19.5, 22),
        (MXFP8(hybrid=True), 19.5, 22),
        (FP8Row(hybrid=True), 19.5, 22),
        (FP8Block(hybrid=True), 19.5, 22),
        (NVFP4(), 9.5, 11.3),
        (NVFP4(stochastic_rounding=False), 11, 13),
    ],
    ids=str,
)
def test_two_layers_and_an_activation(recipe, least, most, mlp):
    found = noise(*mlp, recipe)
    names = ("out", "dx", "dw of the first", "dw of the second")
    text = f"{recipe}: " + ", ".join(f"{n} {db:.1f} dB" for n, db in zip(names, found, strict=True))
    assert least <= min(found) < most, text  # the worst of them: gradients, where theirs is another format
    assert max(found) < most + 5, text


def test_the_base_recipe_changes_no_bit(mlp):
    chain, x, dy = mlp
    plain = outcome(chain, x, dy, "bf16", splits=SPLITS)
    torch.manual_seed(0)
    y = chain(x, splits=SPLITS)
    again = [y, *torch.autograd.grad(y, [x, *chain.parameters()], dy)]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# --- delayed scaling -----------------------------------------------------------------------------------------------


class Ring:
    """One tensor's scale by hand: what a step multiplies by follows from the steps before it."""

    def __init__(self, largest, delayed):
        self.largest, self.delayed, self.seen, self.encode = largest, delayed, [], 1.0

    def step(self, x):
        """Return what the step makes of the tensor, then remember its amax."""
        encode = torch.tensor(self.encode, dtype=torch.float32)
        dtype = torch.float8_e4m3fn if self.largest == 448 else torch.float8_e5m2
        codes = (x.float() * encode).clamp(-self.largest, self.largest).to(dtype)
        values = codes.float() * (1 / encode)
        self.seen.insert(0, x.abs().max().item())
        del self.seen[self.delayed.history :]
        amax = self.seen[0] if self.delayed.most_recent else max(self.seen)
        if amax > 0 and math.isfinite(amax):
            numerator = torch.tensor(self.largest / 2**self.delayed.margin, dtype=torch.float32)
            self.encode = min((numerator / torch.tensor(amax, dtype=torch.float32)).item(), torch.finfo().max)
        return values


DELAYED = [
    Delayed(),
    Delayed(history=1),
    Delayed(history=3),
    Delayed(history=3, most_recent=True),
    Delayed(history=2, margin=2),
]
SIZES = [1.0, 8.0, 8.0, 0.25, 0.25, 0.25, 0.25, 0.0, 64.0, 1e-3]  # it grows, and is clipped; it shrinks; it vanishes


@pytest.mark.parametrize("delayed", DELAYED, ids=str)
def test_the_scale_in_use_is_that_of_the_steps_before(delayed):
    quantizer = fm.Quantizer(fp8_tensor(), delayed=delayed)
    op, ring = fm.Quantize(quantizer), Ring(448.0, delayed)
    grown = []
    for size in SIZES:
        x = torch.randn(16, 32, requires_grad=True)
        with torch.no_grad():
            x *= size
        y = op(x)
        expected = ring.step(x.detach())
        assert torch.equal(y, expected)
        grown.append(y.detach().abs().max() < 0.9 * x.abs().max())
        state = op.state_dict()
        assert state["amax_history.input.amax"].shape == (delayed.history, 1)
        held = state["amax_history.input.amax"][: len(ring.seen), 0]
        assert torch.equal(held, torch.tensor(ring.seen, dtype=torch.float32))
        assert op.amax_history.input.encode.tolist() == [ring.encode]
    assert any(grown), "nothing was ever clipped"


def test_each_role_and_each_expert_has_scales_of_its_own():
    delayed = Delayed(history=2)
    fc = fm.GroupedLinear(3, 32, 32)
    recipe = FP8Tensor(delayed=delayed)
    splits = torch.tensor([5, 0, 7])
    rings = {
        "input": [Ring(448.0, delayed) for _ in range(3)],
        "weight": [Ring(448.0, delayed) for _ in range(3)],
        "grad": [Ring(57344.0, delayed) for _ in range(3)],
    }
    for step in range(4):
        x = (torch.randn(14, 32) * 3**step).requires_grad_()
        dy = torch.randn(14, 32) * 10**-step
        x.detach()[12:] = 1e30  # rows of no expert
        dy[12:] = 1e30
        with torch.no_grad():
            fc.weight *= 1.5
        with fm.recipe(recipe):
            y = fc(x, splits=splits)
        dx, dw = torch.autograd.grad(y, (x, fc.weight), dy)
        for e, (first, end) in enumerate([(0, 5), (5, 5), (5, 12)]):
            weight = rings["weight"][e].step(fc.weight[e].detach())
            if end == first:
                assert not dw[e].any()
                continue
            rows, grad = rings["input"][e].step(x[first:end].detach()), rings["grad"][e].step(dy[first:end])
            for got, want in (
                (y[first:end], rows @ weight.T),
                (dx[first:end], grad @ weight),
                (dw[e], grad.T @ rows),
            ):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
        for role, of_role in rings.items():
            encode = getattr(fc.amax_history, role).encode
            assert encode.tolist() == [ring.encode for ring in of_role]


def test_inference_uses_the_scales_and_leaves_them():
    op = fm.Quantize(fm.Quantizer(fp8_tensor(), delayed=Delayed(history=4)))
    x = torch.randn(8, 32, requires_grad=True) * 5
    op(x)
    before = {name: t.clone() for name, t in op.state_dict().items()}
    expected = fm.quantize(x.detach(), fp8_tensor(), encode=op.amax_history.input.encode.clone()).dequantize()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(op(x.detach()), expected)
            op(100 * x.detach())
        assert all(torch.equal(before[name], t) for name, t in op.state_dict().items())


def test_training_may_begin_after_inference():
    fc, x = fm.GroupedLinear(2, 32, 32), torch.randn(6, 32, requires_grad=True)
    with fm.recipe(FP8Tensor(delayed=Delayed(history=4))):
        with torch.inference_mode():
            fc(x.detach(), splits=torch.tensor([2, 4]))
        fc(x, splits=torch.tensor([2, 4])).sum().backward()
    assert fc.state_dict()["amax_history.input.amax"][0].all()


def trained(recipe, steps=2):
    fc = fm.GroupedLinear(2, 32, 32)
    for _ in range(steps):
        with fm.recipe(recipe):
            fc(torch.randn(6, 32, requires_grad=True), splits=torch.tensor([2, 4])).sum().backward()
    return fc


DELAYED_RECIPE = FP8Tensor(delayed=Delayed(history=4))
KEYS = {f"amax_history.{role}.{part}" for role in ("input", "weight", "grad") for part in ("amax", "reference")}


def test_a_state_dict_takes_the_scales_along():
    fc, x = trained(DELAYED_RECIPE), torch.randn(6, 32)
    state = fc.state_dict()
    assert set(state) == {"weight", *KEYS}
    other = fm.Sequential(fm.GroupedLinear(2, 32, 32))
    other.load_state_dict({f"0.{name}": t for name, t in state.items()})
    for name, t in other.state_dict().items():
        assert torch.equal(t, state[name.removeprefix("0.")])
        assert t.any()
    fm.clear_weight_cache(fc)  # its weight was quantized by the scales of the first step
    with fm.recipe(DELAYED_RECIPE), torch.no_grad():
        expected = fc(x, splits=torch.tensor([2, 4]))
        assert torch.equal(other(x, splits=torch.tensor([2, 4])), expected)
        fresh = fm.GroupedLinear(2, 32, 32)
        fresh.load_state_dict({"weight": fc.weight})
        assert not torch.equal(fresh(x, splits=torch.tensor([2, 4])), expected)
    other.load_state_dict(other.state_dict())  # once they are in use, too
    kept = {name: t.clone() for name, t in other.state_dict().items()}
    with fm.recipe(DELAYED_RECIPE):
        other(torch.randn(6, 32, requires_grad=True), splits=torch.tensor([2, 4]))
    assert not torch.equal(other.state_dict()["0.amax_history.input.amax"], kept["0.amax_history.input.amax"])
    assert torch.equal(kept["0.amax_history.input.amax"], state["amax_history.input.amax"])  # a copy, not the same


def test_what_was_loaded_is_a_copy():
    fc, other = trained(DELAYED_RECIPE), fm.GroupedLinear(2, 32, 32)
    other.load_state_dict(fc.state_dict())
    loaded = {name: t.clone() for name, t in other.state_dict().items()}
    with fm.recipe(DELAYED_RECIPE):
        fc(torch.full((6, 32), 9.0, requires_grad=True), splits=torch.tensor([2, 4])).sum().backward()
    assert not torch.equal(fc.state_dict()["amax_history.input.amax"], loaded["amax_history.input.amax"])
    assert all(torch.equal(t, loaded[name]) for name, t in other.state_dict().items())


def test_checkpoints_without_scales_load_and_checkpoints_with_them_do_no_harm():
    fc = trained(DELAYED_RECIPE)
    fresh = fm.GroupedLinear(2, 32, 32)
    assert fc.load_state_dict(fresh.state_dict()) == ([], [])
    plain = fm.GroupedLinear(2, 32, 32)
    assert plain.load_state_dict(trained(DELAYED_RECIPE).state_dict()) == ([], [])
    x = torch.randn(6, 32)
    expected = torch.cat([x[:2] @ plain.weight[0].T, x[2:] @ plain.weight[1].T])
    torch.testing.assert_close(plain(x, splits=torch.tensor([2, 4])), expected)
    assert set(plain.state_dict()) == {"weight", *KEYS}
    assert set(fc.state_dict()) == {"weight"}, "it starts anew"
    half = {name: t for name, t in plain.state_dict().items() if name != "amax_history.grad.reference"}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*amax_history.grad.amax"):
        plain.load_state_dict(half)


def test_a_history_of_another_length_goes_on():
    fc = trained(DELAYED_RECIPE)
    before = fc.state_dict()["amax_history.input.amax"].clone()
    with fm.recipe(FP8Tensor(delayed=Delayed(history=7))):
        fc(torch.randn(6, 32, requires_grad=True), splits=torch.tensor([2, 4])).sum().backward()
    amax = fc.state_dict()["amax_history.input.amax"]
    assert amax.shape == (7, 2)
    assert amax[0].all()
    assert torch.equal(amax[1:5], before)
    assert before[:2].all()
    with fm.recipe(FP8Tensor(delayed=Delayed(history=2))):
        fc(torch.randn(6, 32, requires_grad=True), splits=torch.tensor([2, 4])).sum().backward()
    shorter = fc.state_dict()["amax_history.input.amax"]
    assert torch.equal(shorter[1:], amax[:1])


def test_copies_have_scales_of_their_own():
    fc = trained(DELAYED_RECIPE)
    state = {name: t.clone() for name, t in fc.state_dict().items()}
    buffer = io.BytesIO()
    torch.save(fc, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(fc), pickle.loads(pickle.dumps(fc)), torch.load(buffer, weights_only=False)):
        assert set(other.state_dict()) == set(state)
        assert all(torch.equal(t, state[name]) for name, t in other.state_dict().items())
        with fm.recipe(DELAYED_RECIPE):
            other(torch.full((6, 32), 9.0, requires_grad=True), splits=torch.tensor([2, 4])).sum().backward()
        assert not torch.equal(other.state_dict()["amax_history.input.amax"], state["amax_history.input.amax"])
    assert all(torch.equal(t, state[name]) for name, t in fc.state_dict().items())


def test_an_op_of_the_chain_keeps_its_own_scales_and_a_recipes_are_the_layers():
    delayed = fm.Quantizer(fp8_tensor(), delayed=Delayed(history=2))
    chain = fm.Sequential(fm.Quantize(delayed, weight=delayed), fm.Linear(32, 32), fm.Quantize(backward=delayed))
    chain(torch.randn(6, 32, requires_grad=True)).sum().backward()
    keys = {name for name in chain.state_dict() if "amax" in name}
    parts = ("amax", "reference")
    owners = {"0": "input", "1": "weight", "2": "grad"}
    assert keys == {f"{label}.amax_history.{role}.{part}" for label, role in owners.items() for part in parts}


# --- stochastic rounding -------------------------------------------------------------------------------------------


def gradients(chain, x, dy, seed, recipe):
    with fm.recipe(recipe):
        y = chain(x, splits=SMALL)
        torch.manual_seed(seed)
        return torch.autograd.grad(y, [x, *chain.parameters()], dy)


SMALL = torch.tensor([10, 0, 22])


def small_layer():
    return fm.Sequential(fm.GroupedLinear(3, 64, 64)), torch.randn(32, 64, requires_grad=True)


def test_the_same_seed_rounds_the_same_way():
    (chain, x), dy = small_layer(), torch.randn(32, 64)
    first, again, other = (gradients(chain, x, dy, seed, "nvfp4") for seed in (1, 1, 2))
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    nearest = NVFP4(stochastic_rounding=False)
    for a, c in zip(gradients(chain, x, dy, 1, nearest), gradients(chain, x, dy, 2, nearest), strict=True):
        assert torch.equal(a, c)


def test_the_output_is_not_rounded_at_random():
    chain, x = small_layer()
    with fm.recipe("nvfp4"):
        outputs = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            outputs.append(chain(x, splits=SMALL))
    assert torch.equal(*outputs)


def test_the_mean_of_many_is_the_gradient_where_rounding_to_nearest_is_always_off_the_same_way():
    """Every block is one 6 and fifteen 0.4, which stand between 0 and 0.5 and are nearest to 0.5."""
    chain, x = small_layer()
    dy = torch.full((32, 64), 0.4)
    dy[:, ::16] = 6.0
    weight = chain[0].weight.detach()
    exact = torch.cat([dy[:10] @ weight[0], dy[10:] @ weight[2]])
    only_grad = fm.Quantizer(nvfp4(), stochastic_rounding=True)
    stochastic = fm.Sequential(chain[0], fm.Quantize(backward=only_grad))
    nearest = fm.Sequential(chain[0], fm.Quantize(backward=nvfp4()))
    biased = (gradients(nearest, x, dy, 0, "bf16")[0] - exact).norm()
    draws = torch.stack([gradients(stochastic, x, dy, seed, "bf16")[0] for seed in range(200)])
    assert (draws[0] - exact).norm() > biased  # one draw is worse
    assert (draws.mean(0) - exact).norm() < 0.35 * biased  # their mean is better by far


# --- gradients that add up -----------------------------------------------------------------------------------------


def moe(dtype=torch.float32):
    torch.manual_seed(3)
    return fm.MoE(hidden=64, intermediate=32, num_experts=4, top_k=2, shared_intermediate=32, dtype=dtype)


@pytest.mark.parametrize("recipe", [MXFP8(), FP8Row(), NVFP4()], ids=lambda r: r.name)
def test_checkpointing_changes_no_bit(recipe):
    layers = nn.ModuleList([moe(), moe()])
    x = torch.randn(24, 64)
    found = []
    for again in (False, True):
        layers.zero_grad()
        leaf = x.clone().requires_grad_()
        y = leaf
        torch.manual_seed(7)
        with fm.recipe(recipe):
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=False) if again else layer(y)
            y.square().sum().backward()
        found.append([y.detach(), leaf.grad, *(p.grad for p in layers.parameters())])
    for plain, recomputed in zip(*found, strict=True):
        assert plain.any()
        assert torch.equal(plain, recomputed)


def in_another_thread(run):
    """As a GPU's backward pass is run."""
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backward", ["in the block", "after it", "in another thread"])
@pytest.mark.parametrize("recipe", [MXFP8(), FP8Tensor()], ids=lambda r: r.name)
def test_what_is_checkpointed_is_computed_again_by_the_recipe_of_its_forward(recipe, backward, use_reentrant):
    chain, x = small_layer()

    def plain(t):
        return chain(t, splits=SMALL)

    found = []
    for call in (plain, partial(checkpoint, plain, use_reentrant=use_reentrant)):
        chain.zero_grad()
        leaf = x.detach().clone().requires_grad_()
        with fm.recipe(recipe):
            loss = call(leaf).square().sum()
            if backward == "in the block":
                loss.backward()
        if backward == "after it":
            loss.backward()
        elif backward == "in another thread":
            in_another_thread(loss.backward)
        found.append([leaf.grad, *(p.grad for p in chain.parameters())])
    chain.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    plain(leaf).square().sum().backward()
    for expected, got, unquantized in zip(*found, [leaf.grad, *(p.grad for p in chain.parameters())], strict=True):
        assert torch.equal(got, expected)
        assert not torch.equal(got, unquantized)


def no_call(chain, x):
    pass


def evaluation_in_bf16(chain, x):
    with torch.no_grad(), fm.recipe("bf16"):
        chain(x, splits=SMALL)


def explanation(chain, x):
    chain.explain(x, splits=SMALL)


@pytest.mark.parametrize(
    ("use_reentrant", "between"),  # with use_reentrant=True the last call without gradients is the one, as documented
    [(False, no_call), (False, evaluation_in_bf16), (False, explanation), (True, no_call), (True, explanation)],
)
@pytest.mark.parametrize("within", [None, partial(fm.strict, False), partial(fm.disabled, "none.*")])
def test_nothing_in_between_changes_what_is_computed_again(use_reentrant, between, within):
    (layer,), x = small_layer()
    chain = fm.Sequential(layer, nn.Identity(), fm.GroupedLinear(3, 64, 64))

    def run(t):
        with within() if within else nullcontext():
            return chain(t, splits=SMALL)

    found = []
    for call in (run, partial(checkpoint, run, use_reentrant=use_reentrant)):
        leaf = x.detach().clone().requires_grad_()
        with fm.recipe("mxfp8"):
            loss = call(leaf).square().sum()
        between(chain, x)
        in_another_thread(loss.backward)
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_settings_within_what_is_computed_again_hold(use_reentrant):
    chain, x = small_layer()

    def both(t):
        with fm.recipe("mxfp8"):
            y = chain(t, splits=SMALL)
        return y + chain(t, splits=SMALL)

    found = []
    for call in (both, partial(checkpoint, both, use_reentrant=use_reentrant)):
        leaf = x.detach().clone().requires_grad_()
        with fm.recipe("fp8_row"):
            loss = call(leaf).square().sum()
        in_another_thread(loss.backward)
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_step_counts_once_and_is_computed_again_with_its_own_scales(use_reentrant):
    """Rows that grow threefold a step: the scale of the next step would be another altogether."""
    recipe = FP8Tensor(delayed=Delayed(history=3))
    rows = torch.randn(40, 64)
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        layer = moe()
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-9)
        gradients = []
        for i in range(4):
            x = (rows * 3**i).requires_grad_()
            with fm.recipe(recipe):
                y = checkpoint(layer, x, use_reentrant=use_reentrant) if again else layer(x)
            optimizer.zero_grad()
            y.square().mean().backward()
            optimizer.step()
            gradients += [x.grad, *(p.grad.clone() for p in layer.experts.parameters())]
        state = {name: t for name, t in layer.state_dict().items() if "amax_history" in name}
        found.append((state, gradients))
    (state, expected), (state_again, got) = found
    assert all(torch.equal(state_again[name], t) for name, t in state.items())
    assert all(t[:3].all() for name, t in state.items() if name.endswith(".amax"))  # it has learnt, and each step once
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def nested(*use_reentrant):
    """Checkpoint in checkpoint."""

    def call(run, *args):
        for reentrant in use_reentrant:
            run = partial(checkpoint, run, use_reentrant=reentrant)
        return run(*args)

    return call


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("use_reentrant", [(), (False,), (True,), *product((False, True), repeat=2)], ids=str)
def test_each_step_counts_once_however_often_it_is_computed(use_reentrant, evaluate):
    chain = fm.Sequential(fm.Linear(32, 32), fm.SquaredReLU(), fm.Linear(32, 32))
    rows = torch.randn(8, 32)
    for i in range(3):
        x = (rows * 2**i).requires_grad_()
        with fm.recipe(DELAYED_RECIPE):
            loss = nested(*use_reentrant)(chain, x).square().sum()
            if evaluate:
                with torch.no_grad():
                    chain(100 * rows)
            loss.backward()
    amax = rows.abs().max()
    assert chain[0].amax_history.input.amax[:, 0].tolist() == [4 * amax, 2 * amax, amax, 0]
    assert chain[2].amax_history.input.amax[:3].all()
    assert not chain[2].amax_history.input.amax[3:].any()


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_no_weight_is_kept_at_the_scale_from_before_the_first_step(use_reentrant):
    layer, x = fm.Linear(32, 32), torch.randn(8, 32, requires_grad=True)
    with torch.no_grad():
        layer.weight *= 0.01
    for step in range(2):
        with fm.recipe(DELAYED_RECIPE):
            y = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
            y.sum().backward()
        assert (fm.weight_cache_bytes(layer) > 0) == (step > 0)


def test_what_has_not_begun_is_in_no_state_dict():
    chain, x = fm.Sequential(fm.Linear(32, 32), nn.Identity(), fm.Linear(32, 32)), torch.randn(8, 32)
    with fm.recipe(DELAYED_RECIPE):
        chain.explain(x.requires_grad_())
        with torch.no_grad():
            chain(x)
    assert not any("amax" in name for name in chain.state_dict())


def test_a_weight_quantized_for_inference_counts_once_it_is_trained():
    recipe = FP8Tensor(delayed=Delayed(history=8))
    layer = fm.GroupedLinear(2, 32, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    splits = torch.tensor([2, 4])
    for step in range(1, 4):
        x = torch.randn(6, 32)
        with fm.recipe(recipe):
            with torch.no_grad():
                layer(x, splits=splits)
            layer(x.requires_grad_(), splits=splits).square().sum().backward()
            layer(x, splits=splits).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps = layer.amax_history.weight.amax.all(dim=1).sum()
        assert steps == step + 1, "the very first step has two calls that quantize the weight"


def test_a_frozen_weight_is_not_left_at_the_scale_of_the_first_step():
    layer = fm.GroupedLinear(2, 64, 64).requires_grad_(False)
    with torch.no_grad():
        layer.weight *= 0.01  # at scale 1 nearly all underflow
    x, splits = torch.randn(6, 64), torch.tensor([2, 4])
    for _ in range(3):
        with fm.recipe(FP8Tensor(delayed=Delayed(history=4))):
            y = layer(x.clone().requires_grad_(), splits=splits)
            y.sum().backward()
    with fm.recipe("fp8_tensor"):
        expected = layer(x, splits=splits)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("through", ["the same module", "a checkpoint"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (FP8Tensor(hybrid=True), FP8Tensor(hybrid=False)),
        (FP8Tensor(hybrid=False), FP8Tensor(hybrid=True)),
        (FP8Tensor(), FP8Tensor(power_of_two=True)),
    ],
    ids=["hybrid to e4m3", "e4m3 to hybrid", "power of two"],
)
def test_scales_follow_a_changed_format(before, after, through):
    delayed = Delayed(history=4)
    layer, x, dy = fm.GroupedLinear(1, 64, 64), torch.randn(32, 64), torch.randn(32, 64)
    splits = torch.tensor([32])

    def step(layer, recipe):
        leaf = x.clone().requires_grad_()
        with fm.recipe(replace(recipe, delayed=delayed)):
            y = layer(leaf, splits=splits)
        y.backward(dy)
        return y.detach(), leaf.grad, layer.weight.grad.clone()

    for _ in range(2):
        step(layer, before)
        layer.zero_grad()
    if through == "a checkpoint":
        state = layer.state_dict()
        layer = fm.GroupedLinear(1, 64, 64)
        layer.load_state_dict(state)
    got = step(layer, after)
    layer.zero_grad()
    with fm.recipe(after):  # the same rows in every step: current scaling has the same scales
        expected = layer(leaf := x.clone().requires_grad_(), splits=splits)
    expected.backward(dy)
    for a, b in zip(got, (expected.detach(), leaf.grad, layer.weight.grad), strict=True):
        assert torch.equal(a, b)
    encode = layer.amax_history.input.encode
    assert (encode.log2() % 1 == 0).all() == after.power_of_two


def test_delayed_scales_do_not_depend_on_the_default_dtype():
    for dtype in (torch.bfloat16, torch.float64):
        layer = fm.GroupedLinear(2, 32, 32, dtype=torch.float32)
        torch.set_default_dtype(dtype)
        try:
            with fm.recipe(DELAYED_RECIPE):
                layer(torch.randn(6, 32, dtype=torch.float32), splits=torch.tensor([2, 4])).sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        assert layer.amax_history.input.encode.dtype is torch.float32


def test_explaining_is_no_step():
    chain = fm.Sequential(fm.GroupedLinear(2, 32, 32), nn.Identity(), fm.GroupedLinear(2, 32, 32))
    x, splits = torch.randn(6, 32, requires_grad=True), torch.tensor([2, 4])
    with fm.recipe(DELAYED_RECIPE):
        chain(x, splits=splits).sum().backward()
        chain(x, splits=splits)
        state = {name: t.clone() for name, t in chain.state_dict().items()}
        with torch.no_grad():
            chain[0].weight *= 2
        chain.explain(x, splits=splits)
        for name, t in state.items():
            if name != "0.weight":
                assert torch.equal(chain.state_dict()[name], t)
        chain(x, splits=splits)
    first, second = chain[0].amax_history.weight.amax[:2]
    assert torch.equal(first, 2 * second), "the changed weight counts"


def test_loading_is_in_place_and_a_stock_checkpoint_starts_anew():
    """A CUDA graph would go on using the same tensors."""
    layer, other = trained(DELAYED_RECIPE), trained(DELAYED_RECIPE)
    held = layer.amax_history.input
    encode = held.encode
    layer.load_state_dict(other.state_dict())
    assert layer.amax_history.input is held
    assert torch.equal(encode, other.amax_history.input.encode)
    layer.load_state_dict({"weight": other.weight})
    assert layer.amax_history.input is held
    assert torch.equal(encode, torch.ones(2))
    assert not held.amax.any()


def test_micro_batches_add_up():
    """Whole experts' rows to each micro-batch: what shares a scale stays together."""
    chain = fm.Sequential(fm.GroupedLinear(2, 64, 64), fm.SwiGLU(), fm.GroupedLinear(2, 32, 64))
    x, dy = torch.randn(64, 64), torch.randn(64, 64)
    with fm.recipe("mxfp8"):
        chain(x, splits=torch.tensor([32, 32])).backward(dy)
        whole = [p.grad.clone() for p in chain.parameters()]
        chain.zero_grad()
        for part, splits in ((slice(0, 32), [32, 0]), (slice(32, 64), [0, 32])):
            chain(x[part], splits=torch.tensor(splits)).backward(dy[part])
    for p, want in zip(chain.parameters(), whole, strict=True):
        assert want.any()
        torch.testing.assert_close(p.grad, want, rtol=1e-6, atol=1e-6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleList([fm.MoE(hidden=64, intermediate=64, num_experts=4, top_k=2) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss_after_training(recipe, steps=60):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(5)
    teacher = torch.randn(64, 64, generator=generator) / 8
    x = torch.randn(128, 64, generator=generator)
    target = torch.tanh(x @ teacher)
    losses = []
    for _ in range(steps):
        with fm.recipe(recipe):
            loss = (model(x) - target).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], sum(losses[-5:]) / 5


@pytest.fixture(scope="module")
def bf16_loss():
    first, last = loss_after_training("bf16")
    assert last < 0.005 * first
    return last


TRAINED = {**{name: recipe for name, recipe in RECIPES.items() if name != "bf16"}, "delayed": DELAYED_RECIPE}


@pytest.mark.parametrize(
    "name",  # quick: blocks and one scale per expert, each level of scales
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("fp8_row", "fp8_tensor") else []) for name in TRAINED],
)
def test_training_gets_about_as_far_as_without(name, bf16_loss):
    first, last = loss_after_training(TRAINED[name])
    text = f"{name}: from {first:.4f} to {last:.4f}; without a recipe {bf16_loss:.4f}"
    assert last < (8 if name == "nvfp4" else 2) * bf16_loss < 0.05 * first, text
    assert last != bf16_loss
