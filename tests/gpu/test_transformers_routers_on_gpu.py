"""Patched routers of transformers on a GPU: the kernels run them with their experts, with the choices of the models."""

import copy

import pytest
import torch
from kit.hopper import needs_gpu

transformers = pytest.importorskip("transformers")

import fusedmoe as fm  # noqa: E402
from fusedmoe.integrations import transformers as integration  # noqa: E402

pytestmark = [
    needs_gpu,
    pytest.mark.filterwarnings("ignore"),  # those of transformers and of torch's compiler
]

TOKENS, HIDDEN = 600, 256
COMMON = {
    "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts_per_tok": 4, "vocab_size": 64,
}  # fmt: skip


def glm4_moe():
    config = transformers.Glm4MoeConfig(**COMMON, head_dim=64, n_routed_experts=16, first_k_dense_replace=0)
    return transformers.Glm4MoeModel, config


def deepseek_v3():
    config = transformers.DeepseekV3Config(
        **COMMON, n_routed_experts=16, n_group=4, topk_group=2, first_k_dense_replace=0, kv_lora_rank=64,
        q_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64,
    )  # fmt: skip
    return transformers.DeepseekV3Model, config


def qwen3_moe():
    return transformers.Qwen3MoeModel, transformers.Qwen3MoeConfig(**COMMON, head_dim=64, num_experts=16)


def block_of(family, device):
    """The MoE part of a layer in bf16, with its correction of the choice in fp32, and tokens."""
    integration.register()
    torch.manual_seed(0)
    model_class, config = family()
    block = model_class._from_config(config, experts_implementation="fusedmoe").layers[0].mlp
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.1)
    block.to(device, torch.bfloat16)
    if hasattr(block.gate, "e_score_correction_bias"):
        block.gate.e_score_correction_bias = 0.1 * torch.randn(16, device=device)
    x = torch.randn(1, TOKENS, HIDDEN, device=device).bfloat16()
    return block, x


def outcome(block, x, dtype=torch.bfloat16):
    """Logits, choices, weights, output and gradients."""
    routed = []
    handle = block.gate.register_forward_hook(lambda _, __, found: routed.extend(found))
    block.zero_grad()
    leaf = x.to(dtype).requires_grad_()
    y = block(leaf)
    grad = torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(1), device=x.device).to(dtype)
    y.backward(grad)
    handle.remove()
    logits, weights, index = routed
    index, order = index.sort()
    grads = {name: p.grad.clone() for name, p in block.named_parameters()}
    return logits.detach(), index, weights.detach().gather(1, order), {"y": y.detach(), "x": leaf.grad, **grads}


@pytest.mark.parametrize("family", [glm4_moe, deepseek_v3])
def test_the_same_choice_and_results_that_are_as_exact(device, family):
    block, x = block_of(family, device)
    double = copy.deepcopy(block).double()
    double.experts.config._experts_implementation_internal = "eager"
    exact = outcome(double, x, torch.float64)[3]
    block.experts.config._experts_implementation_internal = "fusedmoe"
    logits, index, weights, own = outcome(block, x)
    assert integration.patch_routers(block) == 1
    with fm.strict():
        our_logits, our_index, our_weights, ours = outcome(block, x)
    torch.testing.assert_close(our_logits, logits, rtol=2e-5, atol=2e-5)
    same = (our_index == index).all(-1)
    assert same.sum() >= TOKENS - 1  # scores may tie within a rounding
    torch.testing.assert_close(our_weights[same], weights[same], rtol=1e-4, atol=1e-6)
    assert exact.keys() == own.keys() == ours.keys()
    for name, want in exact.items():
        error, its = (((t[name].double() - want).norm() / want.norm()).item() for t in (ours, own))
        assert want.any(), name
        assert error <= 1.5 * its + 1e-6, f"{name}: {error} instead of {its}"


def test_one_plan_and_two(device):
    block, _ = block_of(glm4_moe, device)
    integration.patch_routers(block)
    (group,) = fm.explain(block, tokens=TOKENS).groups
    (plan,) = group.explanation.plans
    assert not plan.unfused
    assert {"sm90.router_dispatch", "sm90.router_backward"} <= {step.rule for step in plan.steps}
    block.experts.register_forward_hook(lambda *_: None)
    (group,) = fm.explain(block, tokens=TOKENS).groups
    assert [bool(plan.unfused) for plan in group.explanation.plans] == [False, False]


def test_experts_apart(device):
    """With a hook on the experts, which then run in a chain of their own."""
    block, x = block_of(glm4_moe, device)
    integration.patch_routers(block)
    _, index, weights, together = outcome(block, x)
    calls = []
    block.experts.register_forward_hook(lambda _, __, y: calls.append(y.shape))
    with fm.strict():
        _, its_index, its_weights, apart = outcome(block, x)
    assert calls == [(TOKENS, HIDDEN)]
    assert torch.equal(its_index, index)
    assert torch.equal(its_weights, weights)
    for name, want in together.items():
        assert (apart[name] - want).norm() <= 0.01 * want.norm(), name


def test_logits_in_fp32_choose_as_fp64_does(device):
    block, x = block_of(qwen3_moe, device)
    exact = x.view(TOKENS, HIDDEN).double() @ block.gate.weight.double().T
    want = exact.topk(4).indices.sort().values
    assert integration.patch_routers(block) == 0
    own = outcome(block, x)
    assert integration.patch_routers(block, fp32_logits=True) == 1
    with fm.strict():
        logits, index, _, _ = outcome(block, x)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=2e-5, atol=2e-5)
    assert (index != want).any(-1).sum() <= 1
    assert (own[1] != want).any(-1).sum() > 1, "logits in bf16 choose others"


def test_nothing_waits_for_the_device(device, no_sync):
    block, x = block_of(glm4_moe, device)
    integration.patch_routers(block)
    leaf = x.requires_grad_()
    block(leaf).sum().backward()
    with no_sync():
        y = block(leaf)
        y.backward(torch.ones_like(y))


def test_compiled(device):
    torch._dynamo.reset()
    block, x = block_of(glm4_moe, device)
    integration.patch_routers(block)
    want, compiled = block(x), torch.compile(block, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    y = compiled(leaf)
    assert (y - want).norm() <= 1e-3 * want.norm()
    y.sum().backward()
    assert leaf.grad.any()
    assert block.gate.weight.grad.any()
