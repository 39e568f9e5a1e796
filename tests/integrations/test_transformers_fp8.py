"""Experts of FP8 checkpoints of transformers run on their codes."""

import copy
import logging
import types

import pytest
import torch
from kit import fp8_models, moe_families
from kit.fp8_models import SIZES, dequantized, fp8_model, in_blocks
from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.base.log import forget_said
from fusedmoe.numerics.formats import Quantizer, fp8_block
from fusedmoe.numerics.recipes import Custom

FAMILIES = ["qwen3_moe", "deepseek_v3"]
ROWS_ALONE = Custom("rows alone", input=Quantizer(fp8_block(power_of_two=False)))  # as transformers trains


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    forget_said()
    fusedmoe_transformers.register()
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fp8_models.plain_linear)
    torch.manual_seed(0)


@pytest.fixture
def calls(monkeypatch):
    """The experts' chains that this package was called for."""
    chains, run = [], fm.Sequential.forward_with

    def noted(self, *args, **kwargs):
        chains.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(fm.Sequential, "forward_with", noted)
    return chains


def results(tiny):
    """Logits, and the gradients of all parameters that are not in FP8."""
    tiny.model.zero_grad()
    logits, loss = moe_families.logits_and_loss(tiny)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in tiny.model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def error(got, want):
    assert want.norm() > 0
    return (got - want).float().norm() / want.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_computes_what_transformers_computes(family, dtype, calls, caplog):
    tiny = fp8_model(family, dtype)
    with caplog.at_level(logging.WARNING), fm.recipe(ROWS_ALONE):
        logits, grads = results(tiny)
    assert len(calls) == 2
    assert not [r for r in caplog.records if r.name.startswith("fusedmoe") and r.levelno >= logging.WARNING]
    tiny.model.set_experts_implementation("eager")
    want, want_grads = results(tiny)
    assert len(calls) == 2
    # a value on the other side of a rounding step of FP8 differs by 6 %: few do in fp32, more in bf16
    tolerance = {torch.float32: 2e-3, torch.bfloat16: 6e-2}[dtype]
    # on some CPUs, a token chooses another expert of the second layer, since its scores are in bf16 too
    others = {torch.float32: 0, torch.bfloat16: 2}[dtype]
    same = (logits - want).float().norm(dim=-1).flatten().argsort()[: want[..., 0].numel() - others]
    assert error(logits.flatten(0, -2)[same], want.flatten(0, -2)[same]) < tolerance
    assert grads.keys() == want_grads.keys()
    assert not any("experts.gate_up_proj" in name or name.endswith("experts.down_proj") for name in grads)
    trained = [name for name in grads if "layers.0" in name and "self_attn" in name and name.endswith("_proj.weight")]
    assert len(trained) > 3
    for name in trained:  # before both layers of experts
        assert error(grads[name], want_grads[name]) < {torch.float32: 3e-2, torch.bfloat16: 0.3}[dtype], name


def test_rows_and_gradients_are_quantized(monkeypatch):
    tiny = fp8_model("qwen3_moe")
    logits, grads = results(tiny)
    tiny.model.set_experts_implementation("eager")
    want, want_grads = results(tiny)
    for name in want_grads:
        if "layers.0.self_attn" in name and name.endswith("_proj.weight"):
            assert 2e-2 < error(grads[name], want_grads[name]) < 0.15, name
    monkeypatch.setattr(fp8_models, "in_blocks", lambda x: x)
    without, _ = results(tiny)
    assert 1e-2 < error(without, want) < 0.2
    assert error(logits, want) < 0.1 * error(without, want)


def test_the_weights_stay_as_they_are_and_are_not_dequantized(calls):
    tiny = fp8_model("qwen3_moe", torch.bfloat16)
    before = {name: (t.data_ptr(), t.clone()) for name, t in tiny.model.state_dict().items()}
    results(tiny)
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


def test_recipes_of_the_call_change_the_rows():
    tiny = fp8_model("qwen3_moe")
    with torch.no_grad():
        want = moe_families.logits_and_loss(tiny)[0]
        with fm.recipe("fp8_block"):
            powers_of_two = moe_families.logits_and_loss(tiny)[0]
    assert 1e-4 < error(powers_of_two, want) < 0.1


def test_scales_in_e8m0_quantize_rows_with_powers_of_two(calls):
    tiny = fp8_model("qwen3_moe", scale_fmt="ue8m0")
    assert tiny.experts[0][1].down_proj_scale_inv.dtype is torch.float8_e8m0fnu
    with torch.no_grad():
        got = moe_families.logits_and_loss(tiny)[0]
        assert len(calls) == 2
        assert calls[0].down.weight_format == fp8_block(across=128)
        for _, module in tiny.experts:
            for scale in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
                setattr(module, scale, nn.Parameter(getattr(module, scale).float(), requires_grad=False))
            module.__dict__.pop("_fusedmoe_experts")
        with fm.recipe("fp8_block"):
            want = moe_families.logits_and_loss(tiny)[0]
    assert want.any()
    assert torch.equal(got, want)


def test_routers_run_in_one_chain_with_experts_in_fp8(calls):
    tiny = fp8_model("deepseek_v3")
    with fm.recipe(ROWS_ALONE):
        want, want_grads = results(tiny)
        assert len(calls) == 2
        assert fusedmoe_transformers.patch_routers(tiny.model) == 2
        got, grads = results(tiny)
    assert len(calls) == 2  # the chain of a router has the experts
    assert error(got, want) < 1e-3
    name = "model.layers.0.mlp.gate.weight"
    assert error(grads[name], want_grads[name]) < 1e-2
    (group,) = fm.explain(tiny.model).groups
    assert group.explanation.steps[0].ops == ("router.Router",)


@pytest.mark.slow
def test_a_compiled_model_computes_the_same():
    tiny = fp8_model("qwen3_moe", num_hidden_layers=2)
    want, want_grads = results(tiny)
    tiny.model.forward = torch.compile(tiny.model.forward, backend="aot_eager", fullgraph=False)
    got, grads = results(tiny)
    assert error(got, want) < 1e-5
    name = "model.layers.0.self_attn.q_proj.weight"
    assert error(grads[name], want_grads[name]) < 1e-4


def test_autocast_leaves_the_codes(calls):
    tiny = fp8_model("qwen3_moe")
    with torch.no_grad():
        want = moe_families.logits_and_loss(tiny)[0]
        with torch.autocast("cpu", torch.bfloat16):
            got = moe_families.logits_and_loss(tiny)[0]
    assert len(calls) == 4
    assert 1e-4 < error(got, want) < 0.1


def test_training_what_comes_before_the_experts_reduces_the_loss():
    tiny = fp8_model("qwen3_moe", torch.bfloat16)
    trained = [p for name, p in tiny.model.named_parameters() if "self_attn" in name and name.endswith("_proj.weight")]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = moe_families.logits_and_loss(tiny)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


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
        elif name.endswith("scale_inv"):
            p.data.uniform_(0.001, 0.002)
    return module


def arguments(dtype=torch.float32, tokens=T):
    x = torch.randn(tokens, H).to(dtype).requires_grad_()
    return x, torch.rand(tokens, E).topk(K).indices, torch.rand(tokens, K).to(dtype)


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
    "limit": ({"swiglu_limit": 0.7}, "SwiGLU(limit=0.7)"),
    "oai": ({"swiglu_limit": 0.7, "swiglu_alpha": 1.702}, "SwiGLU(limit=0.7, alpha=1.702, offset=1.0)"),
    "gelu": ({"hidden_act": "gelu"}, "GeGLU(approximate='none')"),
}


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_of_experts_in_fp8_is_recognised(gate):
    settings, op = GATES[gate]
    module = experts(**settings)
    assert repr(fusedmoe_transformers.recognised(module)) == op
    x, index, weights = arguments()
    got = module(x, index, weights)
    assert error(got.double(), by_tokens(module, x.detach(), index, weights)) < 2e-3


def test_a_gate_with_soft_caps_runs_unfused():
    module = experts(mlp_gate_softcap=3.0, mlp_up_softcap=2.0)
    assert fusedmoe_transformers.recognised(module) is None
    x, index, weights = arguments()
    got = module(x, index, weights)
    want = by_tokens(module, x.detach(), index, torch.ones_like(weights))
    assert error(module(x, index, torch.ones_like(weights)).double(), want) < 2e-3
    assert got.any()


def test_experts_without_a_gate():
    module = experts(has_gate=False, hidden_act="relu2")
    x, index, weights = arguments()
    assert error(module(x, index, weights).double(), by_tokens(module, x.detach(), index, weights)) < 2e-3


def test_slots_of_other_ranks_are_skipped():
    module = experts()
    x, index, weights = arguments()
    index[::3, 0] = E
    y = module(x, index, weights)
    assert error(y.double(), by_tokens(module, x.detach(), index, weights)) < 2e-3
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()


def test_trainable_flags_of_the_weights_do_not_matter():
    module = experts()
    assert module.down_proj.requires_grad  # as transformers makes it
    x, index, weights = arguments()
    y = module(x, index, weights)
    y.sum().backward()
    grad = x.grad.clone()
    module.requires_grad_(False)
    x.grad = None
    again = module(x, index, weights)
    again.sum().backward()
    assert torch.equal(y, again)
    assert torch.equal(grad, x.grad)
    assert grad.any()


def test_new_weights_are_used_at_once_and_a_copy_is_independent():
    module = experts()
    x, index, weights = arguments()
    y = module(x, index, weights)
    other = copy.deepcopy(module)
    with torch.no_grad():
        module.down_proj_scale_inv.mul_(2)
    torch.testing.assert_close(module(x, index, weights), 2 * y)
    assert torch.equal(other(x, index, weights), y)
    assert y.any()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"block": (64, 64)}, "expected blocks of 128 x 128, got (64, 64)"),
        ({"block": None}, "expected blocks of 128 x 128, got None"),
        ({"scheme": "static"}, "expected dynamic scales of activations, got 'static'"),
        ({"expert_dtype": "fp4"}, "gate_up_proj: expected codes in torch.float8_e4m3fn, got torch.int8"),
        (
            {"moe_intermediate_size": 64},
            "gate_up_proj_scale_inv: expected (4, 1, 2) in torch.float32 or torch.float8_e8m0fnu, "
            "got (4, 2, 2) in torch.float32",
        ),
    ],
)
def test_experts_that_transformers_runs(settings, reason):
    module = experts(**settings)
    with pytest.raises(fm.InputError) as caught:
        fusedmoe_transformers.explain(module)
    assert str(caught.value).startswith("FP8Experts: its weights are quantized to torch.")
    assert f"transformers runs it without fusedmoe: {reason}. To use" in str(caught.value)


def test_a_change_of_the_weights_is_noticed():
    module = experts()
    x, index, weights = arguments()
    y = module(x, index, weights)
    for name in ("gate_up_proj", "down_proj"):
        weight = dequantized(getattr(module, name), getattr(module, f"{name}_scale_inv"))
        setattr(module, name, nn.Parameter(weight))
    dense = module(x, index, weights)
    assert 1e-3 < error(dense, y) < 0.1
    dense.sum().backward()
    assert module.down_proj.grad.any()


def test_sizes_are_ragged():
    assert SIZES["hidden_size"] % 128  # so that the last blocks of the models above are not whole
