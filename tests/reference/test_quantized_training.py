"""Training under a recipe: recomputation, and losses that go down."""

import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from kit.compare import assert_bitwise, pairwise
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import MXFP8, RECIPES, FP8Tensor

SMALL = torch.tensor([10, 0, 22])


def in_another_thread(run):
    """As a GPU's backward pass is run."""
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def evaluation_in_bf16(chain, x):
    with torch.no_grad(), fm.recipe("bf16"):
        chain(x, splits=SMALL)


def explanation(chain, x):
    chain.explain(x, splits=SMALL)


# with use_reentrant=True the last call without gradients is the one, as documented
BETWEEN = [(False, None), (False, evaluation_in_bf16), (False, explanation), (True, None), (True, explanation)]
WITHIN = [nullcontext, partial(fm.strict, False), partial(fm.disabled, "none.*"), partial(fm.recipe, "fp8_row")]
BACKWARD = ["in the block", "after it", "in another thread"]


@pytest.mark.parametrize(
    ("case", "within", "backward", "recipe"),
    pairwise(BETWEEN, WITHIN, BACKWARD, [MXFP8(), FP8Tensor()]),
    ids=lambda v: getattr(v, "__name__", getattr(v, "name", None)),
)
def test_a_checkpointed_call_is_computed_again_by_its_recipe(case, within, backward, recipe):
    (use_reentrant, between), x = case, torch.randn(32, 64)
    chain = fm.Sequential(fm.GroupedLinear(3, 64, 64), nn.Identity(), fm.GroupedLinear(3, 64, 64))

    def plain(t):
        with within():
            return chain(t, splits=SMALL)

    found = []
    for call, under in (
        (plain, recipe),
        (partial(checkpoint, plain, use_reentrant=use_reentrant), recipe),
        (plain, "bf16"),
    ):
        chain.zero_grad()
        rows = x.clone().requires_grad_()
        with fm.recipe(under):
            loss = call(rows).square().sum()
            if backward == "in the block":
                if between:
                    between(chain, x)
                loss.backward()
        if backward != "in the block":
            if between:
                between(chain, x)
            (in_another_thread if backward == "in another thread" else lambda run: run())(loss.backward)
        found.append([rows.grad, *(p.grad for p in chain.parameters())])
    assert_bitwise(found[1], found[0])
    same = [torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True)]
    assert all(same) if within is WITHIN[3] else not any(same)  # a recipe within the call wins


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
    model, generator = Model(), torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    teacher, x = torch.randn(64, 64, generator=generator) / 8, torch.randn(128, 64, generator=generator)
    target, losses = torch.tanh(x @ teacher), []
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


TRAINED = {name: recipe for name, recipe in RECIPES.items() if name != "bf16"}
TRAINED["delayed"] = FP8Tensor(delayed=Delayed(history=4))
QUICK = ("mxfp8", "nvfp4", "delayed")  # blocks, each level of scales


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in TRAINED]
)
def test_training_gets_about_as_far_as_without(name, bf16_loss):
    first, last = loss_after_training(TRAINED[name])
    text = f"{name}: from {first:.4f} to {last:.4f}; without a recipe {bf16_loss:.4f}"
    assert last < (8 if name == "nvfp4" else 2) * bf16_loss < 0.05 * first, text
    assert last != bf16_loss
