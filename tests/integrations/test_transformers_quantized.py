"""Experts of transformers with quantized weights: they run as transformers runs them, and a warning says so once."""

import logging

import pytest
import torch
from kit import moe_families
from kit.stand_in_experts import H, Plain, T, arguments, config
from torch import nn
from transformers import FineGrainedFP8Config
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.base.log import forget_said

WARNING = "its weights are quantized to"


@pytest.fixture(autouse=True)
def registered():
    forget_said()
    fusedmoe_transformers.register()
    torch.manual_seed(0)


def dequantized(weight, scale, block):
    rows, columns = weight.shape[-2:]
    scale = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return weight.float() * scale[..., :rows, :columns]


@pytest.fixture
def plain_products(monkeypatch):
    """transformers' FP8 products in plain PyTorch: its kernels are downloaded, and need a GPU."""
    called = []

    def linear(x, weight, scale, block, bias=None, activation_scale=None, allow_deepgemm=True):
        called.append("linear")
        return nn.functional.linear(x.float(), dequantized(weight, scale, block), bias).to(x.dtype)

    def grouped(x, weight, scale, offsets, tokens_per_expert, block):
        called.append("grouped")
        parts = x.float().tensor_split(offsets[:-1].long())
        ws = dequantized(weight, scale, block)
        return torch.cat([part @ w.T for part, w in zip(parts, ws, strict=True)]).to(x.dtype)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", linear)
    monkeypatch.setattr(finegrained_fp8, "fp8_grouped_matmul", grouped)
    return called


def fp8_model(scheme="dynamic"):
    """A small model whose linear layers and experts were replaced as when an FP8 checkpoint is loaded."""
    tiny = moe_families.tiny("qwen3_moe", "fusedmoe", torch.bfloat16)
    settings = FineGrainedFP8Config(activation_scheme=scheme, weight_block_size=(16, 16))
    model = finegrained_fp8.replace_with_fp8_linear(
        tiny.model,
        modules_to_not_convert=["lm_head", *(f"{name}_proj" for name in "qkvo")],
        quantization_config=settings,
        pre_quantized=True,
    )
    model.to_empty(device="cpu") if any(p.is_meta for p in model.parameters()) else None
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.full_like(p, 0.02) if "scale" in name else torch.randn(p.shape) * 0.5 + ("norm" in name))
        for module in model.modules():  # buffers of rotary embeddings were emptied too
            if hasattr(module, "inv_freq"):
                module.inv_freq.copy_(torch.linspace(1, 0.01, module.inv_freq.numel()))
    experts = [m for m in model.modules() if type(m).__name__ == "FP8Experts"]
    assert len(experts) == 2
    assert experts[0].gate_up_proj.dtype is torch.float8_e4m3fn
    return model, tiny.inputs["input_ids"]


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and WARNING in r.getMessage()]


@pytest.mark.parametrize(
    ("scheme", "as_in", "product"), [("dynamic", "grouped_mm", "grouped"), ("static", "eager", "linear")]
)
def test_a_checkpoint_in_fp8_runs_as_without_fusedmoe(scheme, as_in, product, plain_products, caplog):
    model, ids = fp8_model(scheme)
    with caplog.at_level(logging.WARNING):
        got = [logits(model, ids) for _ in range(2)]
    assert set(plain_products) >= {product}
    assert {"grouped": "linear", "linear": "grouped"}[product] not in plain_products
    (said,) = warnings_of(caplog)  # once for all layers and calls
    assert said.startswith("FP8Experts: its weights are quantized to torch.float8_e4m3fn, and transformers runs it")
    reason = {
        "dynamic": "expected blocks of 128 x 128, got (16, 16)",
        "static": "expected dynamic scales of activations, got 'static'",
    }
    assert f": {reason[scheme]}. To use" in said
    model.set_experts_implementation(as_in)
    want = logits(model, ids)
    assert want.std() > 0.01
    assert all(torch.equal(y, want) for y in got)


def test_explain_says_that_experts_in_fp8_do_not_run_here(plain_products):
    model, _ = fp8_model()
    explained = fm.explain(model)
    assert not explained.plans
    assert "FP8Experts" in str(explained)
    assert "quantized to torch.float8_e4m3fn" in str(explained)
    experts = next(m for m in model.modules() if type(m).__name__ == "FP8Experts")
    with pytest.raises(fm.InputError, match=r"^FP8Experts: its weights are quantized"):
        fusedmoe_transformers.explain(experts)


def test_experts_in_fp8_that_were_dequantized_run_here(plain_products, caplog):
    model, ids = fp8_model()
    before = logits(model, ids)
    forget_said()
    caplog.clear()
    for experts in [m for m in model.modules() if type(m).__name__ == "FP8Experts"]:
        for name in ("gate_up_proj", "down_proj"):
            weight = dequantized(getattr(experts, name), getattr(experts, f"{name}_scale_inv"), experts.block_size)
            setattr(experts, name, nn.Parameter(weight.bfloat16()))
    plain_products.clear()
    got = logits(model, ids)
    assert not plain_products
    assert not warnings_of(caplog)
    assert fm.explain(model).plans
    torch.testing.assert_close(got, before, rtol=0.05, atol=0.05)


@use_experts_implementation
class Indexing(Plain):
    """With what transformers' models define themselves: expert by expert."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token, k = torch.where(top_k_index == e)
            gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[e]).chunk(2, -1)
            rows = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[e])
            y.index_add_(0, token, rows * top_k_weights[token, k, None])
        return y


@pytest.mark.parametrize("called_before", [False, True])
def test_weights_that_are_tensors_of_torchao_run_in_the_models_own_way(called_before, caplog):
    pytest.importorskip("torchao")
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, quantize_

    module = Indexing(config()).bfloat16().requires_grad_(False)
    given = [t.detach() for t in arguments(torch.bfloat16)]
    in_bf16 = module(*given)
    if not called_before:
        module = Indexing(config()).bfloat16().requires_grad_(False)
    quantize_(module, FqnToConfig(dict.fromkeys(("gate_up_proj", "down_proj"), Int8WeightOnlyConfig())), filter_fn=None)
    assert type(module.down_proj).__name__ == "Int8Tensor"
    with caplog.at_level(logging.WARNING):
        got = [module(*given) for _ in range(2)]
    assert len(warnings_of(caplog)) == 1
    module.config._experts_implementation = "eager"
    want = module(*given)
    assert want.shape == (T, H)
    assert want.abs().sum() > 0
    assert all(torch.equal(y, want) for y in got)
    if called_before:
        assert (want - in_bf16).norm() / in_bf16.norm() < 0.1


def test_quantized_experts_of_llama4_are_refused():
    tiny = moe_families.tiny("llama4", None, num_hidden_layers=1, layer_types=["full_attention"])
    ((name, experts),) = tiny.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    message = f"patch_llama4: {name}: expected unquantized Llama4TextExperts, got quantized ones"
    with pytest.raises(fm.InputError, match=message):
        fusedmoe_transformers.patch_llama4(tiny.model)
