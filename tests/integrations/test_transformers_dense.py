"""`patch_dense`: the dense MLPs of transformers, with the two weights of gate and up in one memory."""

import copy
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from kit.compare import assert_close
from kit.toy import outcome
from safetensors import torch as safetensors
from torch import nn
from transformers import DeepseekV4Config, GemmaConfig, LlamaConfig, LlamaForCausalLM
from transformers.activations import ACT2FN
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaMLP

import fusedmoe as fm
from fusedmoe.integrations.transformers import patch_dense, unpatch_dense

H, I = 32, 48  # noqa: E741
SIZES = {"hidden_size": H, "intermediate_size": I}
pytestmark = pytest.mark.usefixtures("registered")


def llama_mlp(bias=False, act="silu", dtype=torch.float64):
    return LlamaMLP(LlamaConfig(**SIZES, mlp_bias=bias, hidden_act=act)).to(dtype)


def llama():
    config = LlamaConfig(**SIZES, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


def rows(*shape, dtype=torch.float64):
    return torch.randn(*(shape or (2, 5)), H, dtype=dtype, requires_grad=True)


def memories(mlp):
    return {p.untyped_storage().data_ptr() for p in (mlp.gate_proj.weight, mlp.up_proj.weight)}


# ---- the same results ---------------------------------------------------------------------------------------------


def frozen(name):
    mlp = llama_mlp()
    getattr(mlp, name).requires_grad_(False)
    return mlp


def tied():
    mlp = llama_mlp()
    mlp.up_proj.weight = mlp.gate_proj.weight
    return mlp


def with_weights(gate, up):
    mlp = llama_mlp()
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = gate, up
    return mlp


def in_a_buffer():
    """Of a framework with flat parameters."""
    buffer = torch.randn(3 * I, H, dtype=torch.float64)
    return with_weights(buffer[:I], buffer[2 * I :])


def transposed():
    gate, up = torch.randn(2, H, I, dtype=torch.float64)
    return with_weights(gate.clone().t(), up.clone().t())


# and the number of memories of gate and up after the patch
MLPS = {
    "llama": (llama_mlp, 1),
    "biases": (lambda: llama_mlp(bias=True), 1),
    "gemma": (lambda: GemmaMLP(GemmaConfig(**SIZES)).double(), 1),
    "gate frozen": (lambda: frozen("gate_proj"), 1),
    "down frozen": (lambda: frozen("down_proj"), 1),
    "shared memory": (lambda: llama_mlp().share_memory(), 2),
    "tied": (tied, 1),
    "in a buffer": (in_a_buffer, 1),
    "transposed": (transposed, 2),
}
STAY = "shared memory", "in a buffer", "transposed"


@pytest.mark.parametrize("name", MLPS)
def test_the_same_results(name):
    make, number = MLPS[name]
    mlp, x = make(), rows()
    want, keys, parameters = outcome(mlp, x), [*mlp.state_dict()], [*mlp.parameters()]
    places = [p.data_ptr() for p in parameters]
    assert patch_dense(mlp) == patch_dense(mlp) == 1
    assert [*mlp.state_dict()] == keys
    assert all(a is b for a, b in zip(mlp.parameters(), parameters, strict=True))
    assert len(memories(mlp)) == number
    assert ([p.data_ptr() for p in parameters] == places) is (name in STAY)
    assert_close(outcome(mlp, x), want)
    assert unpatch_dense(mlp) == 1
    assert unpatch_dense(mlp) == 0
    assert "forward" not in vars(mlp)
    assert_close(outcome(mlp, x), want)


@pytest.mark.parametrize("name", ["llama", "biases", "tied", "in a buffer", "transposed"])
def test_no_copy_where_the_weights_follow_each_other(name, monkeypatch):
    mlp, x = MLPS[name][0](), rows()
    want = mlp(x).detach()
    patch_dense(mlp)
    mlp.load_state_dict({name: t.clone() for name, t in mlp.state_dict().items()})  # in place
    copied, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors: copied.append(1) or cat(tensors))
    torch.testing.assert_close(mlp(x).detach(), want)
    assert bool(copied) is (name not in ("llama", "biases"))


def test_weights_that_come_apart():
    mlp, x = llama_mlp(), rows()
    patch_dense(mlp)
    want = outcome(mlp, x)
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.detach().clone())
    assert len(memories(mlp)) == 2
    assert_close(outcome(mlp, x), want)
    mlp.load_state_dict({name: t.clone() for name, t in mlp.state_dict().items()}, assign=True)
    assert_close(outcome(mlp, x), want)
    patch_dense(mlp)
    assert len(memories(mlp)) == 1
    assert_close(outcome(mlp, x), want)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_weight_changed_before_backward_is_an_error(name):
    mlp = llama_mlp()
    patch_dense(mlp)
    y = mlp(rows())
    with torch.no_grad():
        getattr(mlp, name).weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        y.sum().backward()


@pytest.mark.usefixtures("fresh_graphs")
def test_compiled():
    mlp, x = llama_mlp(bias=True, dtype=torch.float32), rows(dtype=torch.float32)
    patch_dense(mlp)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    assert_close(outcome(mlp, x, compiled), outcome(mlp, x), rtol=1e-5, atol=1e-6)


# ---- states and copies --------------------------------------------------------------------------------------------


def copied(mlp):
    other = copy.deepcopy(mlp)
    for parameter in mlp.parameters():
        parameter.data.zero_()
    return other


def pickled(mlp):
    return pickle.loads(pickle.dumps(mlp))


@pytest.mark.parametrize("change", [None, unpatch_dense, copied, pickled])
def test_a_state_dict_has_no_shared_storage(change, tmp_path):
    """accelerate drops all tensors of a storage but one, and safetensors refuses a tensor of a larger storage."""
    mlp = llama_mlp(bias=True)
    want = copy.deepcopy(mlp.state_dict())
    patch_dense(mlp)
    patch_dense(mlp)
    if change is unpatch_dense:
        unpatch_dense(mlp)
    elif change is not None:
        mlp = change(mlp)
    state = mlp.state_dict()
    assert len(memories(mlp)) == (2 if change in (copied, pickled) else 1)
    assert list(state) == list(want)
    for name, t in state.items():
        assert torch.equal(t, want[name])
        assert t.data_ptr() == mlp.get_parameter(name).data_ptr()
        assert t.untyped_storage().nbytes() == t.numel() * t.element_size()
    safetensors.save_model(mlp, tmp_path / "mlp.safetensors")
    loaded = safetensors.load_file(tmp_path / "mlp.safetensors")
    assert loaded.keys() == want.keys()
    assert all(torch.equal(loaded[name], t) for name, t in want.items())
    state["up_proj.weight"].zero_()
    assert not mlp.up_proj.weight.any()
    assert mlp.gate_proj.weight.any()
    assert len(mlp.up_proj._state_dict_hooks) == 1


# ---- a module that has changed runs as before ---------------------------------------------------------------------


class Adapted(nn.Linear):
    """As peft replaces a layer."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked(mlp):
    mlp.gate_proj.register_forward_hook(lambda module, args, y: y + 1)


def pruned(mlp):
    for layer, dim in ((mlp.gate_proj, 0), (mlp.up_proj, 0), (mlp.down_proj, 1)):
        layer.weight = nn.Parameter(layer.weight.detach().narrow(dim, 0, I // 2).clone())


class Shifts(ModelHook):
    def post_forward(self, module, output):
        return output + 1


def with_bias(mlp):
    mlp.down_proj.bias = nn.Parameter(torch.ones(H, dtype=torch.float64))


REASONS = {
    "replaced": (lambda m: setattr(m.up_proj, "__class__", Adapted), "up_proj is a Adapted, not an nn.Linear"),
    "hook": (hooked, "gate_proj has hooks or a forward of its own"),
    "accelerate": (
        lambda m: add_hook_to_module(m.down_proj, Shifts()),
        "down_proj has hooks or a forward of its own (accelerate's hooks are such)",
    ),
    "function": (
        lambda m: setattr(m, "act_fn", ACT2FN["gelu"]),
        "its act_fn or its forward has changed since; call patch_dense again",
    ),
    "pruned": (pruned, "its weights have other shapes than before; call patch_dense again"),
    "bias": (with_bias, "a bias was added or removed since; call patch_dense again"),
}


@pytest.mark.parametrize(("change", "reason"), REASONS.values(), ids=REASONS)
def test_a_module_that_has_changed_runs_as_before(change, reason, caplog):
    mlp, x = llama_mlp(), rows()
    before = mlp(x).detach()
    patch_dense(mlp)
    mlp(x)
    change(mlp)
    with caplog.at_level(logging.WARNING), fm.recipe("fp8_row"):
        y = mlp(x).detach()
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"LlamaMLP: {reason}")
    assert said.endswith(", so it runs as before patch_dense, without kernels and recipes")
    assert not torch.allclose(y, before)
    unpatch_dense(mlp)
    assert torch.equal(y, mlp(x))


# ---- what is not patched, and the plan ----------------------------------------------------------------------------

OTHERS = {
    "a limit": lambda: DeepseekV4MLP(DeepseekV4Config(hidden_size=H, moe_intermediate_size=I)),
    "dropout": lambda: T5GemmaMLP(SimpleNamespace(**SIZES, hidden_activation="silu", dropout_rate=0.1)),
    "an unknown activation": lambda: llama_mlp(act="mish"),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_functions_are_left_alone(make, caplog):
    mlp = make()
    with caplog.at_level(logging.WARNING):
        assert patch_dense(mlp) == 0
    assert "forward" not in vars(mlp)
    assert f"{type(mlp).__name__}: it is no MLP whose function can be fused" in caplog.text


def test_errors():
    with pytest.raises(fm.InputError, match=r"patch_dense: expected a model with MLPs of gate_proj, .*, got Linear"):
        patch_dense(nn.Linear(2, 2))
    model = nn.ModuleList([llama_mlp(), llama_mlp()])
    model[1].forward = lambda x: x
    with pytest.raises(fm.InputError, match="patch_dense: the forward of '1' was already replaced"):
        patch_dense(model)
    assert "forward" not in vars(model[0])


def test_a_model_and_its_plan():
    model, ids = llama(), torch.randint(1, 64, (2, 7))
    assert not fm.explain(model, arch=90).groups
    want = model(input_ids=ids).logits
    assert patch_dense(model) == 2
    torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-4, atol=1e-5)
    (group,) = fm.explain(model.bfloat16(), tokens=64, arch=90).groups
    assert group.names == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert {step.rule for step in group.explanation.steps} == {
        "sm90.linear_activation", "sm90.linear", "sm90.linear_wgrad", "sm90.linear_dgrad_activation",
        "sm90.linear_dgrad",
    }  # fmt: skip
    hooked(model.model.layers[1].mlp)
    assert "LlamaMLP: gate_proj has hooks" in fm.explain(model, arch=90).groups[1].note
