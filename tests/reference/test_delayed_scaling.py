"""Delayed scaling: scales from the steps before, that outlive a step, a checkpoint and a copy."""

import math
from dataclasses import replace
from functools import partial, reduce
from itertools import product

import pytest
import torch
from kit.compare import assert_bitwise
from kit.layers import leaf, outcome
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed, fp8_tensor
from fusedmoe.numerics.formats.delayed import AmaxHistory
from fusedmoe.numerics.recipes import FP8Tensor

F32 = torch.float32
SPLITS = torch.tensor([2, 4])
RECIPE = FP8Tensor(delayed=Delayed(history=4))
KEYS = {f"amax_history.{role}.{part}" for role in ("input", "weight", "grad") for part in ("amax", "reference")}
AMAX = "amax_history.input.amax"


class Ring:
    """One tensor's scale by hand: the factor of a step follows from the steps before it."""

    def __init__(self, largest, delayed):
        self.largest, self.delayed, self.seen, self.encode = largest, delayed, [], 1.0

    def step(self, x):
        """Return the values of the tensor in this step, then remember its amax."""
        encode = torch.tensor(self.encode, dtype=F32)
        dtype = torch.float8_e4m3fn if self.largest == 448 else torch.float8_e5m2
        values = (x.float() * encode).clamp(-self.largest, self.largest).to(dtype).float() * (1 / encode)
        self.seen.insert(0, x.abs().max().item())
        del self.seen[self.delayed.history :]
        amax = self.seen[0] if self.delayed.most_recent else max(self.seen)
        if amax > 0 and math.isfinite(amax):
            numerator = torch.tensor(self.largest / 2**self.delayed.margin, dtype=F32)
            self.encode = min((numerator / torch.tensor(amax, dtype=F32)).item(), torch.finfo().max)
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
    op, ring, grown = fm.Quantize(fm.Quantizer(fp8_tensor(), delayed=delayed)), Ring(448.0, delayed), []
    for size in SIZES:
        x = (torch.randn(16, 32) * size).requires_grad_()
        y = op(x)
        assert torch.equal(y, ring.step(x.detach()))
        grown.append(y.detach().abs().max() < 0.9 * x.abs().max())
        amax = op.state_dict()[AMAX]
        assert amax.shape == (delayed.history, 1)
        assert torch.equal(amax[: len(ring.seen), 0], torch.tensor(ring.seen, dtype=F32))
        assert op.amax_history.input.encode.tolist() == [ring.encode]
    assert any(grown), "nothing was ever clipped"


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("amax", [math.inf, math.nan, 0.0])
def test_an_amax_that_gives_no_scale_leaves_it(amax, most_recent):
    quantizer = fm.Quantizer(fp8_tensor(), delayed=Delayed(history=1, most_recent=most_recent))
    history = AmaxHistory(quantizer, 2, torch.device("cpu"))
    history.update(torch.tensor([2.0, 8.0]))
    history.update(torch.tensor([4.0, amax]))
    assert history.encode.tolist() == [448 / 4, 448 / 8]


def test_each_role_and_each_expert_has_scales_of_its_own():
    delayed, fc, splits = Delayed(history=2), fm.GroupedLinear(3, 32, 32), torch.tensor([5, 0, 7])
    largest = {"input": 448.0, "weight": 448.0, "grad": 57344.0}
    rings = {role: [Ring(value, delayed) for _ in range(3)] for role, value in largest.items()}
    for step in range(4):
        x, dy = (torch.randn(14, 32) * 3**step).requires_grad_(), torch.randn(14, 32) * 10**-step
        x.detach()[12:] = dy[12:] = 1e30  # rows of no expert
        with torch.no_grad():
            fc.weight *= 1.5
        found = outcome(fc, x, dy, FP8Tensor(delayed=delayed), splits=splits)
        for e, (first, end) in enumerate([(0, 5), (5, 5), (5, 12)]):
            weight = rings["weight"][e].step(fc.weight[e].detach())
            if end == first:
                assert not found["weight"][e].any()
                continue
            rows, grad = rings["input"][e].step(x[first:end].detach()), rings["grad"][e].step(dy[first:end])
            for got, want in (
                (found["y"][first:end], rows @ weight.T),
                (found["x"][first:end], grad @ weight),
                (found["weight"][e], grad.T @ rows),
            ):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
        for role, of_role in rings.items():
            assert getattr(fc.amax_history, role).encode.tolist() == [ring.encode for ring in of_role]


def train(layer, recipe=RECIPE, x=None, **named):
    """One step."""
    named = {"splits": SPLITS} if isinstance(layer, fm.GroupedLinear) else named
    with fm.recipe(recipe):
        y = layer(leaf(6, 32, dtype=F32) if x is None else x, **named)
        y.sum().backward()
    return y.detach()


def trained(recipe=RECIPE, steps=2):
    fc = fm.GroupedLinear(2, 32, 32)
    for _ in range(steps):
        train(fc, recipe)
    return fc


def state_of(module):
    return {name: t.clone() for name, t in module.state_dict().items()}


def test_explaining_and_inference_begin_nothing_and_are_no_step():
    chain = fm.Sequential(fm.Linear(32, 32), nn.Identity(), fm.Linear(32, 32))
    x = leaf(8, 32, dtype=F32)

    def look():
        chain.explain(x)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                chain(100 * x)

    with fm.recipe(RECIPE):
        look()
    assert not any("amax" in name for name in chain.state_dict())
    for _ in range(2):
        train(chain, x=x)
    before = state_of(chain)
    with fm.recipe(RECIPE):
        with torch.no_grad():
            chain[0].weight *= 2
        look()
        after = state_of(chain)
        assert all(torch.equal(after[name], t) for name, t in before.items() if name != "0.weight")
        chain(x)
    first, second = chain[0].amax_history.weight.amax[:2]
    assert torch.equal(first, 2 * second), "the changed weight counts"


# --- state dicts and copies ----------------------------------------------------------------------------------------


def test_a_state_dict_takes_the_scales_along():
    fc, x, other = trained(), torch.randn(6, 32), fm.GroupedLinear(2, 32, 32)
    state = fc.state_dict()
    assert set(state) == {"weight", *KEYS}
    fm.Sequential(other).load_state_dict({f"0.{name}": t for name, t in state.items()})
    assert_bitwise(state_of(other), state)
    fm.clear_weight_cache(fc)  # its weight was quantized by the scales of the first step
    fresh = fm.GroupedLinear(2, 32, 32)
    fresh.load_state_dict({"weight": fc.weight})
    with fm.recipe(RECIPE), torch.no_grad():
        expected = fc(x, splits=SPLITS)
        assert torch.equal(other(x, splits=SPLITS), expected)
        assert not torch.equal(fresh(x, splits=SPLITS), expected)
    other.load_state_dict(other.state_dict())  # once they are in use, too
    before, loaded = state_of(fc), state_of(other)
    train(other)
    assert not torch.equal(other.state_dict()[AMAX], loaded[AMAX])
    assert_bitwise(state_of(fc), before)  # a copy, not the same


def test_loading_is_in_place_and_a_stock_checkpoint_starts_anew():
    """A CUDA graph would go on using the same tensors."""
    layer, other = trained(), trained()
    held = layer.amax_history.input
    encode = held.encode
    layer.load_state_dict(other.state_dict())
    assert layer.amax_history.input is held
    assert torch.equal(encode, other.amax_history.input.encode)
    assert layer.load_state_dict({"weight": other.weight}) == ([], [])
    assert set(layer.state_dict()) == {"weight"}
    assert layer.amax_history.input is held
    assert torch.equal(encode, torch.ones(2))
    assert not held.amax.any()
    # and a checkpoint with scales does no harm without the recipe
    plain, x = fm.GroupedLinear(2, 32, 32), torch.randn(6, 32)
    assert plain.load_state_dict(trained().state_dict()) == ([], [])
    expected = torch.cat([x[:2] @ plain.weight[0].T, x[2:] @ plain.weight[1].T])
    torch.testing.assert_close(plain(x, splits=SPLITS), expected)
    assert set(plain.state_dict()) == {"weight", *KEYS}
    half = {name: t for name, t in plain.state_dict().items() if name != "amax_history.grad.reference"}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*amax_history.grad.amax"):
        plain.load_state_dict(half)


def test_a_history_of_another_length_goes_on():
    fc = trained()
    before = fc.state_dict()[AMAX].clone()
    train(fc, FP8Tensor(delayed=Delayed(history=7)))
    amax = fc.state_dict()[AMAX].clone()
    assert amax.shape == (7, 2)
    assert amax[0].all()
    assert torch.equal(amax[1:5], before)
    assert before[:2].all()
    train(fc, FP8Tensor(delayed=Delayed(history=2)))
    assert torch.equal(fc.state_dict()[AMAX][1:], amax[:1])


def test_an_op_of_the_chain_keeps_its_own_scales_and_a_recipes_are_the_layers():
    delayed = fm.Quantizer(fp8_tensor(), delayed=Delayed(history=2))
    chain = fm.Sequential(fm.Quantize(delayed, weight=delayed), fm.Linear(32, 32), fm.Quantize(backward=delayed))
    train(chain, "bf16")
    owners = {"0": "input", "1": "weight", "2": "grad"}
    keys = {f"{label}.amax_history.{role}.{part}" for label, role in owners.items() for part in ("amax", "reference")}
    assert {name for name in chain.state_dict() if "amax" in name} == keys


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
    delayed, given = Delayed(history=4), {"x": leaf(32, 64, dtype=F32), "dy": torch.randn(32, 64)}
    layer, splits = fm.GroupedLinear(1, 64, 64), torch.tensor([32])
    for _ in range(2):
        outcome(layer, **given, recipe=replace(before, delayed=delayed), splits=splits)
    if through == "a checkpoint":
        state = layer.state_dict()
        layer = fm.GroupedLinear(1, 64, 64)
        layer.load_state_dict(state)
    found = outcome(layer, **given, recipe=replace(after, delayed=delayed), splits=splits)
    # the same rows in every step: current scaling has the same scales
    assert_bitwise(found, outcome(layer, **given, recipe=after, splits=splits))
    assert (layer.amax_history.input.encode.log2() % 1 == 0).all() == after.power_of_two


# --- steps that are computed again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_step_is_computed_again_with_its_own_scales(use_reentrant):
    """Rows that grow threefold a step: the scale of the next step would be another altogether."""
    rows, found = torch.randn(40, 64), []
    for again in (False, True):
        torch.manual_seed(0)
        layer = fm.MoE(hidden=64, intermediate=32, num_experts=4, top_k=2, shared_intermediate=32)
        optimizer, gradients = torch.optim.SGD(layer.parameters(), lr=1e-9), []
        for i in range(4):
            x = (rows * 3**i).requires_grad_()
            with fm.recipe(FP8Tensor(delayed=Delayed(history=3))):
                y = checkpoint(layer, x, use_reentrant=use_reentrant) if again else layer(x)
            optimizer.zero_grad()
            y.square().mean().backward()
            optimizer.step()
            gradients += [x.grad, *(p.grad.clone() for p in layer.experts.parameters())]
        state = {name: t for name, t in layer.state_dict().items() if "amax_history" in name}
        found.append([*state.values(), *gradients])
    assert all(t[:3].all() for name, t in state.items() if name.endswith(".amax"))  # it has learnt, each step once
    assert_bitwise(found[1], found[0], zeros=True)


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("use_reentrant", [(), (False,), (True,), *product((False, True), repeat=2)], ids=str)
def test_each_step_counts_once_however_often_it_is_computed(use_reentrant, evaluate):
    chain, rows = fm.Sequential(fm.Linear(32, 32), fm.SquaredReLU(), fm.Linear(32, 32)), torch.randn(8, 32)
    call = reduce(lambda run, reentrant: partial(checkpoint, run, use_reentrant=reentrant), use_reentrant, chain)
    for i in range(3):
        with fm.recipe(RECIPE):
            loss = call((rows * 2**i).requires_grad_()).square().sum()
            if evaluate:
                with torch.no_grad():
                    chain(100 * rows)
            loss.backward()
    amax = rows.abs().max()
    assert chain[0].amax_history.input.amax[:, 0].tolist() == [4 * amax, 2 * amax, amax, 0]
    assert chain[2].amax_history.input.amax[:3].all()
    assert not chain[2].amax_history.input.amax[3:].any()


# --- weights -------------------------------------------------------------------------------------------------------


def test_a_frozen_weight_is_not_left_at_the_scale_of_the_first_step():
    layer, x = fm.GroupedLinear(2, 64, 64).requires_grad_(False), torch.randn(6, 64)
    with torch.no_grad():
        layer.weight *= 0.01  # at scale 1 nearly all underflow
    y = [train(layer, x=x.clone().requires_grad_()) for _ in range(3)][-1]
    with fm.recipe("fp8_tensor"):
        expected = layer(x, splits=SPLITS)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-3 * expected.abs().max().item())
