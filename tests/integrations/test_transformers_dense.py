"""`patch_dense`: the dense MLPs of transformers, with the two weights of gate and up in one memory."""

import copy
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from safetensors import torch as safetensors
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV4Config,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
)
from transformers.activations import ACT2FN
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaMLP

import fusedmoe as fm
from fusedmoe.base.log import forget_said
from fusedmoe.integrations.transformers import dense, patch_dense, unpatch_dense

H, I = 32, 48  # noqa: E741
SIZES = {"hidden_size": H, "intermediate_size": I}


@pytest.fixture(autouse=True)
def fresh():
    forget_said()
    torch.manual_seed(0)


def llama_mlp(bias=False, act="silu", dtype=torch.float64):
    return LlamaMLP(LlamaConfig(**SIZES, mlp_bias=bias, hidden_act=act)).to(dtype)


def rows(*shape, dtype=torch.float64):
    return torch.randn(*(shape or (2, 5)), H, dtype=dtype, requires_grad=True)


def outcome(mlp, x):
    x.grad = None
    mlp.zero_grad()
    y = mlp(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in mlp.named_parameters()}}


def assert_same(got, want, rtol=1e-9, atol=1e-12):
    assert got.keys() == want.keys()
    for name, t in want.items():
        assert t.any(), f"{name}: zeros would pass"
        torch.testing.assert_close(got[name], t, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def memories(mlp):
    return {p.untyped_storage().data_ptr() for p in (mlp.gate_proj.weight, mlp.up_proj.weight)}


MLPS = {
    "llama": llama_mlp,
    "llama with biases": lambda: llama_mlp(bias=True),
    "gelu": lambda: llama_mlp(act="gelu"),
    "gemma": lambda: GemmaMLP(GemmaConfig(**SIZES)).double(),
    "qwen2": lambda: Qwen2MLP(Qwen2Config(**SIZES)).double(),
    "shared expert": lambda: DeepseekV3MLP(DeepseekV3Config(hidden_size=H), intermediate_size=I).double(),
}


@pytest.mark.parametrize("make", MLPS.values(), ids=MLPS)
def test_the_same_results(make):
    mlp, x = make(), rows()
    want, keys, parameters = outcome(mlp, x), [*mlp.state_dict()], [*mlp.parameters()]
    assert patch_dense(mlp) == patch_dense(mlp) == 1
    assert [*mlp.state_dict()] == keys
    assert all(a is b for a, b in zip(mlp.parameters(), parameters, strict=True))
    assert len(memories(mlp)) == 1
    assert_same(outcome(mlp, x), want)
    assert unpatch_dense(mlp) == 1
    assert unpatch_dense(mlp) == 0
    assert "forward" not in vars(mlp)
    assert_same(outcome(mlp, x), want)


def test_no_copy_where_the_weights_follow_each_other(monkeypatch):
    mlp, x = llama_mlp(bias=True), rows()
    patch_dense(mlp)
    want = outcome(mlp, x)
    mlp.load_state_dict({name: t.clone() for name, t in mlp.state_dict().items()})  # in place
    monkeypatch.setattr(torch, "cat", None)
    assert_same({"y": mlp(x).detach()}, {"y": want["y"]})


def test_weights_apart_in_memory():
    mlp, x = llama_mlp(), rows()
    patch_dense(mlp)
    want = outcome(mlp, x)
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.detach().clone())
    assert len(memories(mlp)) == 2
    assert_same(outcome(mlp, x), want)
    mlp.load_state_dict({name: t.clone() for name, t in mlp.state_dict().items()}, assign=True)
    assert_same(outcome(mlp, x), want)
    patch_dense(mlp)
    assert len(memories(mlp)) == 1
    assert_same(outcome(mlp, x), want)


def test_an_optimizer_keeps_its_parameters():
    mlp, twin, x = llama_mlp(), llama_mlp(), rows()
    twin.load_state_dict(mlp.state_dict())
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (mlp, twin)]
    patch_dense(mlp)
    for _ in range(2):
        for m, optimizer in zip((mlp, twin), optimizers, strict=True):
            outcome(m, x)
            optimizer.step()
    assert len(memories(mlp)) == 1
    assert_same(dict(mlp.state_dict()), dict(twin.state_dict()), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "down_proj"])
def test_frozen_layers(frozen):
    mlp, x = llama_mlp(), rows()
    getattr(mlp, frozen).requires_grad_(False)
    want = {name: t for name, t in outcome(mlp, x).items() if t is not None}
    patch_dense(mlp)
    assert_same({name: t for name, t in outcome(mlp, x).items() if t is not None}, want)
    assert f"{frozen}.weight" not in want


def test_second_derivatives():
    mlp, x = llama_mlp(), rows(3)
    patch_dense(mlp)
    weight = mlp.gate_proj.weight

    def penalty():
        (grad,) = torch.autograd.grad(mlp(x).square().sum(), weight, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [x, weight])

    got = penalty()
    unpatch_dense(mlp)
    for ours, theirs in zip(got, penalty(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies(copied):
    mlp, x = llama_mlp(), rows()
    patch_dense(mlp)
    want = outcome(mlp, x)
    other = copied(mlp)
    assert_same(outcome(other, x), want)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert_same(outcome(mlp, x), want)
    assert not other(x).any()


class Adapted(nn.Linear):
    """As peft replaces a layer."""

    def forward(self, x):
        return 2 * super().forward(x)


def replaced(mlp):
    mlp.up_proj.__class__ = Adapted


def hooked(mlp):
    mlp.gate_proj.register_forward_hook(lambda module, args, y: y + 1)


def other_function(mlp):
    mlp.act_fn = ACT2FN["gelu"]


def own_forward(mlp):
    mlp.down_proj.forward = lambda h: 3 * nn.functional.linear(h, mlp.down_proj.weight)


def pruned(mlp):
    for name, rows, columns in (("gate_proj", I // 2, H), ("up_proj", I // 2, H), ("down_proj", H, I // 2)):
        layer = getattr(mlp, name)
        layer.weight = nn.Parameter(layer.weight.detach()[:rows, :columns].clone())


def with_hook_of_accelerate(mlp):
    class Shifts(ModelHook):
        def post_forward(self, module, output):
            return output + 1

    add_hook_to_module(mlp.down_proj, Shifts())


REASONS = {
    replaced: "up_proj is a Adapted, not an nn.Linear",
    hooked: "gate_proj has hooks or a forward of its own",
    other_function: "its act_fn or its forward has changed since; call patch_dense again",
    own_forward: "down_proj has hooks or a forward of its own",
    pruned: "its weights have other shapes than before; call patch_dense again",
    with_hook_of_accelerate: "down_proj has hooks or a forward of its own (accelerate's hooks are such)",
}


@pytest.mark.parametrize("change", REASONS)
def test_a_module_that_has_changed_runs_as_before(change, caplog):
    mlp, x = llama_mlp(), rows()
    before = mlp(x).detach()
    patch_dense(mlp)
    mlp(x)
    change(mlp)
    with caplog.at_level(logging.WARNING), fm.recipe("fp8_row"):
        y = mlp(x).detach()
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith(f"LlamaMLP: {REASONS[change]}")
    assert said.endswith(", so it runs as before patch_dense, without kernels and recipes")
    assert not torch.allclose(y, before)
    unpatch_dense(mlp)
    assert torch.equal(y, mlp(x))


def test_a_pruned_module_is_patched_again():
    mlp, x = llama_mlp(), rows()
    patch_dense(mlp)
    pruned(mlp)
    want = outcome(mlp, x)
    assert patch_dense(mlp) == 1
    assert mlp._fusedmoe_mlp.shapes[0] == (I // 2, H)
    assert_same(outcome(mlp, x), want)


def test_a_graph_of_a_module_that_has_changed_says_why(caplog):
    mlp, x = llama_mlp(), rows()
    patch_dense(mlp)
    hooked(mlp)
    with caplog.at_level(logging.WARNING):
        y = torch.compile(mlp, backend="eager")(x)
    assert "LlamaMLP: gate_proj has hooks" in caplog.text
    torch.testing.assert_close(y, mlp(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeepseekV4MLP(DeepseekV4Config(hidden_size=H, moe_intermediate_size=I)),
        lambda: T5GemmaMLP(SimpleNamespace(**SIZES, hidden_activation="silu", dropout_rate=0.1)),
        lambda: llama_mlp(act="mish"),
    ],
    ids=["a limit", "dropout", "an unknown activation"],
)
def test_other_functions_are_left_alone(make, caplog):
    mlp = make()
    with caplog.at_level(logging.WARNING):
        assert patch_dense(mlp) == 0
    assert "forward" not in vars(mlp)
    assert f"{type(mlp).__name__}: it is no MLP whose function can be fused" in caplog.text


def test_errors():
    with pytest.raises(fm.InputError, match=r"patch_dense: expected a model with MLPs of gate_proj, .*, got Linear"):
        patch_dense(nn.Linear(2, 2))
    with pytest.raises(fm.InputError, match="patch_dense: model"):
        patch_dense("llama")
    model = nn.ModuleList([llama_mlp(), llama_mlp()])
    model[1].forward = lambda x: x
    with pytest.raises(fm.InputError, match="patch_dense: the forward of '1' was already replaced"):
        patch_dense(model)
    assert "forward" not in vars(model[0])


def llama():
    config = LlamaConfig(**SIZES, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, pad_token_id=0)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_weight_changed_before_backward_is_an_error(name):
    mlp = llama_mlp()
    patch_dense(mlp)
    y = mlp(rows())
    with torch.no_grad():
        getattr(mlp, name).weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        y.sum().backward()


def test_a_model(tmp_path):
    model, ids = llama(), torch.randint(1, 64, (2, 7))
    want = model(input_ids=ids, labels=ids)
    assert patch_dense(model) == 2
    got = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
    got.loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, t in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], t), name


def test_patched_in_inference_mode():
    mlp, x = llama_mlp(), rows()
    want = outcome(mlp, x)
    with torch.inference_mode():
        patch_dense(mlp)
    assert len(memories(mlp)) == 1
    assert_same(outcome(mlp, x), want)


def test_memory_that_processes_share_stays_where_it_is():
    mlp, x = llama_mlp(), rows()
    want = outcome(mlp, x)
    mlp.share_memory()
    places = [p.data_ptr() for p in mlp.parameters()]
    patch_dense(mlp)
    assert [p.data_ptr() for p in mlp.parameters()] == places
    assert all(p.is_shared() for p in mlp.parameters())
    assert_same(outcome(mlp, x), want)


def pickled(mlp):
    return pickle.loads(pickle.dumps(mlp))


@pytest.mark.parametrize("change", [None, unpatch_dense, pickled])
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
    assert len(memories(mlp)) == (2 if change is pickled else 1)
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


def test_the_plan():
    model = llama().bfloat16()
    assert not fm.explain(model, arch=90).groups
    patch_dense(model)
    (group,) = fm.explain(model, tokens=64, arch=90).groups
    assert group.names == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert {step.rule for step in group.explanation.steps} == {
        "sm90.linear_activation", "sm90.linear", "sm90.linear_wgrad", "sm90.linear_dgrad_activation",
        "sm90.linear_dgrad",
    }  # fmt: skip
    hooked(model.model.layers[1].mlp)
    assert "LlamaMLP: gate_proj has hooks" in fm.explain(model, arch=90).groups[1].note


def test_meta_parameters():
    with torch.device("meta"):
        mlp = llama_mlp()
    assert patch_dense(mlp) == 1
    mlp = mlp.to_empty(device="cpu")
    for parameter in mlp.parameters():
        nn.init.normal_(parameter)
    x = rows()
    got = outcome(mlp, x)
    unpatch_dense(mlp)
    assert_same(got, outcome(mlp, x))


def test_compiled():
    mlp, x = llama_mlp(bias=True, dtype=torch.float32), rows(dtype=torch.float32)
    patch_dense(mlp)
    want = outcome(mlp, x)
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    x.grad = None
    mlp.zero_grad()
    y = compiled(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    got = {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in mlp.named_parameters()}}
    assert_same(got, want, rtol=1e-5, atol=1e-6)


def test_memory_that_others_may_use_is_left():
    mlp = llama_mlp()
    buffer = torch.randn(3 * I * H, dtype=torch.float64)  # as of a framework with flat parameters
    mlp.gate_proj.weight.data = buffer[: I * H].view(I, H)
    patch_dense(mlp)
    assert mlp.gate_proj.weight.data_ptr() == buffer.data_ptr()
    x = rows()
    assert_same({"y": mlp(x).detach()}, {"y": type(mlp).forward(mlp, x).detach()})


def test_the_view_is_of_the_rows_of_both():
    gate, up = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    want = torch.cat([gate, up])
    dense._move_together(gate, up)
    both = dense._together(gate, up)
    assert torch.equal(both, want)
    assert both.data_ptr() == gate.data_ptr()
    both.sum().backward()
    assert gate.grad.eq(1).all()
    assert up.grad.eq(1).all()
