"""Experts of transformers with quantized weights: those of FP8 checkpoints run on their codes, and transformers runs
others, which a warning says once.
"""

import copy
import logging
import types

import pytest
import torch
from kit import fp8_models, moe_families, stand_in_experts
from kit.compare import assert_bitwise
from kit.fp8_models import dequantized, fp8_model, in_blocks
from kit.moe_families import logits, step
from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.numerics.formats import Quantizer, fp8_block
from fusedmoe.numerics.recipes import Custom

FAMILIES = ["qwen3_moe", "deepseek_v3"]
ROWS_ALONE = Custom("rows alone", input=Quantizer(fp8_block(power_of_two=False)))  # as transformers trains
GATE = "model.layers.0.mlp.gate.weight"


@pytest.fixture(autouse=True)
def plain_products(registered, monkeypatch):
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_models.plain_linear)


def error(got, want):
    assert want.norm() > 0
    return (got - want).float().norm() / want.float().norm()


def attention(gradients):
    """The names of the gradients before both layers of experts."""
    found = [name for name in gradients if "layers.0.self_attn" in name and name.endswith("_proj.weight")]
    assert len(found) > 3
    return found


def warnings_of(caplog):
    records = [r for r in caplog.records if r.name.startswith("fusedmoe") and r.levelno >= logging.WARNING]
    return [r.getMessage() for r in records]


# ---- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_computes_what_transformers_computes(family, chains_called, caplog):
    tiny = fp8_model(family)
    with caplog.at_level(logging.WARNING), fm.recipe(ROWS_ALONE):
        got = step(tiny)
    assert len(chains_called) == 2
    assert not warnings_of(caplog)
    tiny.model.set_experts_implementation("eager")
    want = step(tiny)
    assert len(chains_called) == 2
    assert got.keys() == want.keys()
    # a value on the other side of a rounding step of FP8 differs by 6 %
    assert error(got["logits"], want["logits"]) < 2e-3
    assert not any("experts.gate_up_proj" in name or name.endswith("experts.down_proj") for name in got)
    for name in attention(got):
        assert error(got[name], want[name]) < 3e-2, name


def test_the_weights_stay_as_they_are_and_are_not_dequantized():
    tiny = fp8_model("qwen3_moe", torch.bfloat16)
    before = {name: (t.data_ptr(), t.clone()) for name, t in tiny.model.state_dict().items()}
    step(tiny)
    for name, t in tiny.model.state_dict().items():
        address, value = before[name]
        assert t.data_ptr() == address
        assert torch.equal(t.float(), value.float())
    (explained, *_) = fm.explain(tiny.model).groups
    (plan,) = explained.explanation.plans
    assert not any("weight" in value.partition(".")[2] for value in plan.kept)
    assert {q for step in plan.steps for q in step.quantizes} == {
        (place, "fp8 e4m3 1x128") for place in ("gate_up:input", "down:input", "down:grad", "gate_up:grad")
    }
    assert explained.kind == "FP8Experts"
    assert explained.names == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def test_scales_in_e8m0_quantize_rows_with_powers_of_two(chains_called):
    tiny = fp8_model("qwen3_moe", scale_fmt="ue8m0")
    assert tiny.experts[0][1].down_proj_scale_inv.dtype is torch.float8_e8m0fnu
    got = logits(tiny)
    assert len(chains_called) == 2
    assert chains_called[0].down.weight_format == fp8_block(across=128)
    for _, module in tiny.experts:
        for scale in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
            setattr(module, scale, nn.Parameter(getattr(module, scale).float(), requires_grad=False))
        module.__dict__.pop("_fusedmoe_experts")
    with fm.recipe("fp8_block"):
        assert_bitwise(got, logits(tiny))


def test_routers_run_in_one_chain_with_experts_in_fp8(chains_called):
    tiny = fp8_model("deepseek_v3")
    with fm.recipe(ROWS_ALONE):
        want = step(tiny)
        assert len(chains_called) == 2
        assert fusedmoe_transformers.patch_routers(tiny.model) == 2
        got = step(tiny)
    assert len(chains_called) == 2  # the chain of a router has the experts
    assert error(got["logits"], want["logits"]) < 1e-3
    assert error(got[GATE], want[GATE]) < 1e-2
    (group,) = fm.explain(tiny.model).groups
    assert group.explanation.steps[0].ops == ("router.Router",)


# ---- modules alone ------------------------------------------------------------------------------------------------

E, H, I, K, T = 4, 192, 128, 2, 30  # noqa: E741


def experts(has_gate=True, dtype=torch.float32, expert_dtype="fp8", block=(128, 128), scheme="dynamic", **settings):
    """Experts of an FP8 checkpoint, drawn."""
    settings = {"hidden_act": "silu", "num_experts": E, "hidden_size": H, "moe_intermediate_size": I} | settings
    config = types.SimpleNamespace(_experts_implementation="fusedmoe", num_experts_per_tok=K, dtype=dtype, **settings)
    kind = use_experts_implementation(
        experts_class=type("FP8Experts", (finegrained_fp8.FP8Experts,), {}),
        experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS,
        has_gate=has_gate,
    )
    module = kind(config, block_size=block, activation_scheme=scheme, has_gate=has_gate, expert_dtype=expert_dtype)
    for name, p in module.named_parameters():
        if p.dtype is torch.float8_e4m3fn:
            p.data.copy_(torch.randn(p.shape).mul_(100).clamp_(-448, 448))
        elif "scale" in name:
            p.data.uniform_(0.001, 0.002)
    return module


def arguments():
    return torch.randn(T, H).requires_grad_(), torch.rand(T, E).topk(K).indices, torch.rand(T, K)


def by_tokens(module, x, index, weights):
    """Token by token, with the module's own gate, in fp64 apart from the quantized rows."""
    up = module.gate_up_proj if module.has_gate else module.up_proj
    up_scale = module.gate_up_proj_scale_inv if module.has_gate else module.up_proj_scale_inv
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        for k in range(K):
            e = int(index[t, k])
            if e >= E:
                continue
            h = in_blocks(x[t : t + 1]).double() @ dequantized(up[e], up_scale[e], torch.float64).T
            h = (module._apply_gate(h) if module.has_gate else module.act_fn(h)) * weights[t, k].double()
            down = dequantized(module.down_proj[e], module.down_proj_scale_inv[e], torch.float64)
            y[t] += (in_blocks(h).double() @ down.T)[0]
    return y


GATES = {
    "silu": ({}, "SwiGLU()"),
    "oai": ({"swiglu_limit": 0.7, "swiglu_alpha": 1.702}, "SwiGLU(limit=0.7, alpha=1.702, offset=1.0)"),
    "no gate": ({"has_gate": False, "hidden_act": "relu2"}, "SquaredReLU()"),
    "soft caps": ({"mlp_gate_softcap": 3.0, "mlp_up_softcap": 2.0}, "None"),
}


@pytest.mark.parametrize(("settings", "op"), GATES.values(), ids=GATES)
def test_every_gate_of_experts_in_fp8_is_recognised(settings, op):
    module, (x, index, weights) = experts(**settings), arguments()
    assert repr(fusedmoe_transformers.recognised(module)) == op
    if op == "None":  # the weights are then multiplied in after the experts
        assert module(x, index, weights).any()
        weights = torch.ones_like(weights)
    index[::3, 0] = E  # slots of other ranks
    y = module(x, index, weights)
    assert error(y.double(), by_tokens(module, x.detach(), index, weights)) < 2e-3
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()


def test_new_weights_are_used_at_once_and_a_copy_is_independent():
    module, given = experts(), arguments()
    y = module(*given)
    other = copy.deepcopy(module)
    with torch.no_grad():
        module.down_proj_scale_inv.mul_(2)
    torch.testing.assert_close(module(*given), 2 * y)
    assert_bitwise(other(*given), y)
    for name in ("gate_up_proj", "down_proj"):  # dequantized
        weight = dequantized(getattr(other, name), getattr(other, f"{name}_scale_inv"))
        setattr(other, name, nn.Parameter(weight))
    dense = other(*given)
    assert 1e-3 < error(dense, y) < 0.1
    dense.sum().backward()
    assert other.down_proj.grad.any()


# ---- what transformers runs ---------------------------------------------------------------------------------------

QUANTIZED = "FP8Experts: its weights are quantized to torch."


@pytest.mark.parametrize(("settings", "reason"), [
    ({"expert_dtype": "fp4"}, "gate_up_proj: .* got torch.int8"),
    ({"moe_intermediate_size": 64}, r"gate_up_proj_scale_inv: expected \(4, 1, 2\)"),
])  # fmt: skip
def test_experts_that_transformers_runs(settings, reason):
    with pytest.raises(fm.InputError, match=f"^{QUANTIZED}.*: {reason}"):
        fusedmoe_transformers.explain(experts(**settings))


@pytest.mark.parametrize(("settings", "as_in", "reason"), [
    ({"block": (64, 64)}, "grouped_mm", "expected blocks of 128 x 128, got (64, 64)"),
    ({"scheme": "static"}, "eager", "expected dynamic scales of activations, got 'static'"),
])  # fmt: skip
def test_they_run_as_without_fusedmoe(settings, as_in, reason, monkeypatch, caplog):
    called = []

    def linear(x, weight, scale, block, bias=None, activation_scale=None, allow_deepgemm=True):
        called.append("eager")
        return nn.functional.linear(x, dequantized(weight, scale, block=block), bias)

    def grouped(x, weight, scale, offsets, tokens_per_expert, block):
        called.append("grouped_mm")
        parts = zip(x.tensor_split(offsets[:-1].long()), dequantized(weight, scale, block=block), strict=True)
        return torch.cat([part @ w.T for part, w in parts])

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", linear)
    monkeypatch.setattr(finegrained_fp8, "fp8_grouped_matmul", grouped)
    module, given = experts(**settings), arguments()
    with caplog.at_level(logging.WARNING), torch.no_grad():
        got = [module(*given) for _ in range(2)]
        assert set(called) == {as_in}
        (group,) = fm.explain(module).groups
        module.config._experts_implementation = as_in
        want = module(*given)
    (said,) = warnings_of(caplog)  # once for all calls
    assert said.startswith(f"{QUANTIZED}float8_e4m3fn, and transformers runs it without fusedmoe: {reason}. To use")
    assert_bitwise(got, [want, want])
    assert group.note == said


@use_experts_implementation
class Indexing(stand_in_experts.Plain):
    """With what transformers' models define themselves: expert by expert."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token, k = torch.where(top_k_index == e)
            gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[e]).chunk(2, -1)
            rows = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[e])
            y.index_add_(0, token, rows * top_k_weights[token, k, None])
        return y


def test_weights_that_are_tensors_of_torchao_run_in_the_models_own_way(caplog):
    pytest.importorskip("torchao")
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, quantize_

    module = Indexing(stand_in_experts.config()).bfloat16().requires_grad_(False)
    given = [t.detach() for t in stand_in_experts.arguments(torch.bfloat16)]
    in_bf16 = module(*given)
    quantize_(module, FqnToConfig(dict.fromkeys(("gate_up_proj", "down_proj"), Int8WeightOnlyConfig())), filter_fn=None)
    assert type(module.down_proj).__name__ == "Int8Tensor"
    with caplog.at_level(logging.WARNING):
        got = [module(*given) for _ in range(2)]
    assert len(warnings_of(caplog)) == 1
    module.config._experts_implementation = "eager"
    want = module(*given)
    assert_bitwise(got, [want, want])
    assert error(want, in_bf16) < 0.1


def test_quantized_experts_of_llama4_are_refused():
    tiny = moe_families.tiny("llama4", None, num_hidden_layers=1, layer_types=["full_attention"])
    ((name, module),) = tiny.experts
    module.down_proj = nn.Parameter(module.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    message = f"patch_llama4: {name}: expected unquantized Llama4TextExperts, got quantized ones"
    with pytest.raises(fm.InputError, match=message):
        fusedmoe_transformers.patch_llama4(tiny.model)
