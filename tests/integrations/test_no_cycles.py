"""Tensors are freed when the last reference to them is: no cycle of references keeps them until Python collects cycles,
which it does rarely in a training loop.
"""

import pytest
import torch
from kit import moe_families
from kit.lifetimes import cycles

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers

H, I, E, K = 32, 16, 4, 2  # noqa: E741


def train(call, x, recipe="bf16"):
    with fm.recipe(recipe):
        for _ in range(2):
            call(x.detach().requires_grad_()).float().square().mean().backward()


def mlp():
    chain = fm.Sequential(
        fm.Dispatch(E), fm.GroupedLinear(E, H, 2 * I, bias=True), fm.SwiGLU(), fm.Scale("probs"),
        fm.GroupedLinear(E, I, H, bias=True), fm.Combine(None),
    )  # fmt: skip
    index, weight = torch.rand(6, E).topk(K).indices, torch.rand(6, K)
    return chain, lambda x: chain(x, expert_index=index, expert_weight=weight.requires_grad_())


def moe():
    layer = fm.MoE(H, I, E, K)
    return layer, lambda x: layer(x, return_stats=True)[0]


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("make", [mlp, moe])
def test_layers(make, recipe):
    _, call = make()
    x = torch.randn(6, H)
    train(call, x, recipe)  # plans are made
    with cycles() as kept:
        train(call, x, recipe)
    assert kept == []


def test_finds_a_cycle():
    with cycles() as kept:
        holder = [torch.zeros(3)]
        holder.append(holder)
        del holder
    assert kept == [(3,)]


@pytest.mark.parametrize(
    ("family", "patched"), [("llama4", False), ("qwen3_moe", False), ("gpt_oss", True), ("deepseek_v3", True)]
)
def test_models_of_transformers(family, patched):
    fusedmoe_transformers.register()
    if family not in moe_families.family_names():
        pytest.skip("this version of transformers has no such family")
    tiny = moe_families.tiny(family, "fusedmoe")
    stock = moe_families.tiny(family, "eager")
    if patched:
        fusedmoe_transformers.patch_routers(tiny.model, fp32_logits=True)
    ids = torch.randint(0, 50, (1, 6))

    def step(model):
        model(input_ids=ids).logits.float().square().mean().backward()

    found = []
    for model in (stock.model, tiny.model):
        step(model)
        with cycles() as kept:
            step(model)
        found.append(sorted(kept))
    assert found[1] == found[0]
