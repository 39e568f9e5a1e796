"""Models of transformers on a GPU: their experts and routers run fused, alike eager ones, generate, and compile.

test_training_on_text.py trains more of them.
"""

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

COMMON = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 256, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, intermediate_size=256, moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **COMMON, intermediate_size=256, num_local_experts=8, num_experts_per_tok=2
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, intermediate_size=128, num_local_experts=16, num_experts_per_tok=4, swiglu_limit=1.0
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{n: v for n, v in COMMON.items() if n != "head_dim"} | {"num_key_value_heads": 4},
        intermediate_size=256, moe_intermediate_size=128, n_routed_experts=16,
        num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=0, kv_lora_rank=64, q_lora_rank=64,
        qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=64,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def registered():
    integration.register()


def made(name, device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name](), dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return model.to(device, dtype).eval()


def tokens(device, seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(1, 256, (2, 128), device=device, generator=generator)


def step(model, ids, implementation=None):
    if implementation is not None:
        model.set_experts_implementation(implementation)
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits, "loss": out.loss, **gradients}


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_as_exact_as_eager_ones(device, name):
    """In one experts module, whose routing no rounding changes; in a model a rounding may choose another expert."""
    model = made(name, device)
    experts = next(m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "num_experts"))
    exact = copy.deepcopy(experts).double()
    generator = torch.Generator(device).manual_seed(1)
    chosen = model.config.num_experts_per_tok
    scores = torch.rand(300, experts.num_experts, device=device, generator=generator)
    index = scores.topk(chosen).indices
    weight = torch.rand(300, chosen, device=device, generator=generator) / chosen
    x = torch.randn(300, 256, device=device, generator=generator).bfloat16()
    grad = torch.randn(300, 256, device=device, generator=generator).bfloat16()

    def call(module, dtype, implementation):
        module.config._experts_implementation = implementation
        module.zero_grad()
        leaves = [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        y = module(leaves[0], index, leaves[1])
        y.backward(grad.to(dtype))
        return [y.detach(), *(t.grad for t in leaves), *(p.grad.clone() for p in module.parameters())]

    want = call(exact, torch.float64, "eager")
    eager = call(experts, torch.bfloat16, "eager")
    with fm.strict():
        fused = call(experts, torch.bfloat16, "fusedmoe")
    assert not integration.explain(experts, tokens=300).plans[0].unfused
    for a, b, c in zip(fused, eager, want, strict=True):
        size = c.norm()
        assert size > 0
        assert (a.double() - c).norm() <= 1.5 * (b.double() - c).norm() + 1e-6 * size


def in_fp32(model, ids):
    """What a step of the model gives in fp32, by eager experts."""
    return step(copy.deepcopy(model).float(), ids, "eager" if hasattr(model, "set_experts_implementation") else None)


def assert_as_exact(got, want, exact):
    """In bf16, where a rounding chooses another expert for a token or two, which other tokens then look at: as far from
    fp32 as another way to compute it is.
    """
    assert got.keys() == want.keys() == exact.keys()
    ours, its = ((t["logits"] - exact["logits"]).norm(dim=-1) / exact["logits"].norm(dim=-1) for t in (got, want))
    assert ours.median() <= 1.5 * its.median() + 0.01
    assert (got["loss"] - exact["loss"]).abs() <= 2 * (want["loss"] - exact["loss"]).abs() + 0.01 * exact["loss"]
    for key in exact.keys() - {"logits", "loss"}:
        assert exact[key].norm() > 0, key
        ours, its = (torch.cosine_similarity(t[key].float().flatten(), exact[key].flatten(), 0) for t in (got, want))
        assert 1 - ours <= 2 * (1 - its) + 0.02, key
        assert 0.8 < got[key].norm() / want[key].norm() < 1.25, key


def test_llama4_trains_alike(device):
    """Its weights are (E, in, out), gate and up one after the other, and the routing weight multiplies what goes into
    an expert: that runs by itself, the products are fused.
    """
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(
        **COMMON, intermediate_size=128, intermediate_size_mlp=256, num_local_experts=8, num_experts_per_tok=1,
        interleave_moe_layer_step=1, attention_chunk_size=64,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    model = model.to(device, torch.bfloat16).eval()
    exact, eager = in_fp32(model, tokens(device)), step(model, tokens(device))
    assert integration.patch_llama4(model) == 2
    with fm.strict():
        fused = step(model, tokens(device))
    assert_as_exact(fused, eager, exact)
    (group,) = fm.explain(model).groups
    assert {op.partition(".")[0] for s in group.explanation.plans[0].unfused for op in s.ops} == {"input"}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_compiles_into_one_graph_for_every_routing(device, name):
    torch._dynamo.reset()
    model = made(name, device)
    model.set_experts_implementation("fusedmoe")
    compiled = torch.compile(model, fullgraph=True)
    exact, want = in_fp32(model, tokens(device)), step(model, tokens(device))
    got = step(compiled, tokens(device))
    assert_as_exact({key.removeprefix("_orig_mod."): t for key, t in got.items()}, want, exact)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(1, 11):
            found = step(compiled, tokens(device, seed))
            assert found["loss"].isfinite()


def test_nothing_waits_for_the_device(device, no_sync):
    experts = made("qwen3_moe", device).model.layers[0].mlp.experts
    experts.config._experts_implementation = "fusedmoe"
    x = torch.randn(300, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    index, weight = torch.rand(300, 16, device=device).topk(4).indices, torch.rand(300, 4, device=device)
    experts(x, index, weight).sum().backward()
    with no_sync():
        y = experts(x, index, weight)
        y.backward(torch.ones_like(y))


# ---- patched routers: the kernels run them with their experts, with the choices of the models


def block_of(name, device):
    """The MoE part of a layer, with its correction of the choice in fp32, and tokens."""
    block = made(name, device).model.layers[0].mlp
    block.experts.config._experts_implementation = "fusedmoe"
    if hasattr(block.gate, "e_score_correction_bias"):
        block.gate.e_score_correction_bias = 0.1 * torch.randn(16, device=device)
    return block, torch.randn(1, 600, 256, device=device).bfloat16()


def routed_outcome(block, x, dtype=torch.bfloat16):
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


def test_patched_routers_have_the_same_choice_and_results_that_are_as_exact(device):
    block, x = block_of("deepseek_v3", device)
    double = copy.deepcopy(block).double()
    double.experts.config._experts_implementation = "eager"
    exact = routed_outcome(double, x, torch.float64)[3]
    logits, index, weights, own = routed_outcome(block, x)
    assert integration.patch_routers(block) == 1
    with fm.strict():
        our_logits, our_index, our_weights, ours = routed_outcome(block, x)
    torch.testing.assert_close(our_logits, logits, rtol=2e-5, atol=2e-5)
    same = (our_index == index).all(-1)
    assert same.sum() >= len(same) - 1  # scores may tie within a rounding
    torch.testing.assert_close(our_weights[same], weights[same], rtol=1e-4, atol=1e-6)
    assert exact.keys() == own.keys() == ours.keys()
    for name, want in exact.items():
        error, its = (((t[name].double() - want).norm() / want.norm()).item() for t in (ours, own))
        assert want.any(), name
        assert error <= 1.5 * its + 1e-6, f"{name}: {error} instead of {its}"


def test_logits_in_fp32_choose_as_fp64_does(device):
    block, x = block_of("qwen3_moe", device)
    exact = x[0].double() @ block.gate.weight.double().T
    want = exact.topk(4).indices.sort().values
    assert integration.patch_routers(block) == 0
    own = routed_outcome(block, x)
    assert integration.patch_routers(block, fp32_logits=True) == 1
    with fm.strict():
        logits, index, _, _ = routed_outcome(block, x)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=2e-5, atol=2e-5)
    assert (index != want).any(-1).sum() <= 1
    assert (own[1] != want).any(-1).sum() > 1, "logits in bf16 choose others"
