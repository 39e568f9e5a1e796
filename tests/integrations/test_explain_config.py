"""``fusedmoe explain CONFIG``: models of transformers from their configuration, without memory for parameters."""

import json
import sys

import pytest
import transformers
from kit import moe_families
from torch import nn

from fusedmoe.commands.main import main

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 2048, "moe_intermediate_size": 768,
    "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu",
}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NO_MODULE = "no module of this model runs on fusedmoe"


@pytest.fixture
def explain(capsys):
    """Return the exit code, the text and the messages of the command."""

    def call(*arguments):
        return main(["explain", *map(str, arguments)]), *capsys.readouterr()

    return call


@pytest.fixture
def config(tmp_path):
    """Write a configuration with two layers and these changes; None removes a key."""

    def write(**changes):
        path = tmp_path / "config.json"
        settings = QWEN3_30B_A3B | {"num_hidden_layers": 2} | changes
        given = {name: value for name, value in settings.items() if value is not None or name == "quantization_config"}
        path.write_text(json.dumps(given), encoding="utf-8")
        return path

    return write


@pytest.fixture
def no_memory(monkeypatch):
    """Have every parameter that takes memory be an error."""
    register = nn.Module.register_parameter

    def checked(self, name, parameter):
        assert parameter is None or parameter.device.type == "meta", f"{type(self).__name__}.{name}"
        register(self, name, parameter)

    monkeypatch.setattr(nn.Module, "register_parameter", checked)


def test_qwen3_30b_a3b(config, no_memory, explain):
    code, text, _ = explain(config(num_hidden_layers=48), "--strict")
    assert code == 0
    assert text.startswith(
        "Qwen3MoeForCausalLM, 30.5 billion parameters, bfloat16\n8192 tokens, training, on an sm_90 GPU"
    )
    assert "model.layers.{0-47}.mlp.experts: Qwen3MoeExperts, x48, kept for backward 48 x " in text
    assert "4 of 4 fused  6 of 6 fused" in text
    assert text.count("chain dispatch to combine") == 1  # layers that are alike are shown once


def other(method):
    return {"quantization_config": {"quant_method": method, "bits": 4}}


FUSED = "4 of 4 fused  6 of 6 fused"
QUANTIZED_BY = "the checkpoint is quantized by {}, and fusedmoe has no kernels for quantized experts"
# changes, options, whether strict finds everything fused, the text and the messages of strict
CONFIGURATIONS = {
    "fp8_block": ({}, ["--recipe", "fp8_block"], True, ["recipe fp8_block", "sm90.fp8_grouped_gemm_activation"], ""),
    "float32": ({"torch_dtype": "float32"}, [], False, [", float32\n"], "input is float32, not bfloat16 or float16"),
    "float32, asked": ({"torch_dtype": "float32"}, ["--dtype", "bfloat16"], True, [", bfloat16\n"], ""),
    "fp8": (
        {"quantization_config": FP8}, [], True,
        [" bfloat16, quantized by fp8\n", "FP8Experts",
         "fp8 e4m3 1x128: gate_up:input, down:input, down:grad, gate_up:grad"], "",
    ),
    "fp8, other blocks": (
        {"quantization_config": FP8 | {"weight_block_size": [64, 64]}}, [], False,
        ["FP8Experts: its weights are quantized to torch.float8_e4m3fn"], "not planned: FP8Experts: its weights are",
    ),
    "experts in bf16": ({"quantization_config": FP8 | {"modules_to_not_convert": ["experts"]}}, [], True, [FUSED], ""),
    **{
        method: (
            other(method), [], False, [QUANTIZED_BY.format(method)],
            f"model.layers.{{0-1}}.mlp.experts: not planned: {QUANTIZED_BY.format(method)}",
        )
        for method in ("mxfp4", "newest")
    },
    "null": ({"quantization_config": None}, [], True, [FUSED], ""),
    "an unknown activation": (
        {"hidden_act": "mish"}, [], True, ["4 of 5 fused  8 of 9 fused"],
        "fusion not required for activation.ModelFunction: no fused kernel (not an op: splits the chain)\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "options", "fused", "texts", "said"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_configuration(config, no_memory, explain, changes, options, fused, texts, said):
    path = config(**changes)
    code, out, err = explain(path.parent, *options, "--strict")
    assert code == (not fused)
    assert all(text in out for text in texts)
    assert said in err
    assert err.endswith(("strict: everything is fused\n", "strict: everything else is fused\n")) is fused
    assert explain(path, *options) == (0, out, "")
    assert ("quantized by" in out) is bool(changes.get("quantization_config"))


def test_json(config, no_memory, explain):
    _, out, _ = explain(config(num_hidden_layers=4, mlp_only_layers=[1], quantization_config=FP8), "--json")
    (group,) = json.loads(out)["groups"]
    assert group["class"] == "FP8Experts"
    assert group["names"] == [f"model.layers.{i}.mlp.experts" for i in (0, 2, 3)]
    (plan,) = group["plans"]
    assert not any(step["ops"][0].endswith("Wgrad") for step in plan["steps"])


def test_a_dense_model_has_nothing_to_fuse(tmp_path, no_memory, explain):
    transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    code, out, _ = explain(tmp_path)
    assert (code, NO_MODULE in out) == (0, True)
    code, _, err = explain(tmp_path, "--strict")
    assert (code, NO_MODULE in err) == (1, True)


def test_llama4(tmp_path, no_memory, explain):
    small = {"hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_attention_heads": 2}
    config = transformers.Llama4TextConfig(num_hidden_layers=2, num_local_experts=4, num_key_value_heads=2, **small)
    config.save_pretrained(tmp_path)
    code, out, _ = explain(tmp_path, "--dtype", "bfloat16")
    assert (code, "sm90.grouped_gemm_activation" in out) == (0, True)


TWO_LAYERS = {"text_config": {"num_hidden_layers": 2}}
NOT_CAUSAL = {  # what their small configurations have: the defaults of some are those of no model
    "aria": TWO_LAYERS,
    "openai_privacy_filter": {"num_hidden_layers": 2},
    "qwen3_omni_moe": {
        "thinker_config": TWO_LAYERS,
        "talker_config": {
            "text_config": {"num_hidden_layers": 2, "shared_expert_intermediate_size": 64}, "spatial_merge_size": 2,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("family", NOT_CAUSAL)
def test_a_family_that_is_no_causal_language_model(family, tmp_path, no_memory, explain):
    if family not in moe_families.family_names():
        pytest.skip("not in this version of transformers")
    transformers.AutoConfig.for_model(family, **NOT_CAUSAL[family]).save_pretrained(tmp_path)
    code, out, _ = explain(tmp_path, "--tokens", "64", "--json")
    groups = json.loads(out)["groups"]
    assert code == 0
    assert all(group["plans"] for group in groups)
    assert {group["class"] for group in groups} == set(moe_families.experts_classes()[family])


@pytest.mark.parametrize(("content", "message"), [
    (None, "no such file or directory, nor a model in the local cache of transformers"),
    ("{", "transformers cannot read it"),
    ('{"hidden_size": 8}', "got no model_type in it"),
    ('{"model_type": "qwen3_mo"}', "has, got 'qwen3_mo'; did you mean 'qwen3_moe'? A model whose code comes with"),
    ('{"model_type": "qwen3_moe", "quantization_config": "fp8"}', "quantization_config: expected an object, got 'fp8'"),
    ('{"model_type": "qwen3_moe", "num_attention_heads": 0}', "transformers cannot"),
    ('{"model_type": "blip_text_model"}', "transformers cannot build a model from BlipTextConfig alone"),
    ({"num_experts": 8, "num_experts_per_tok": 9}, "experts per token: expected 1 to 8, got 9\n"),
])  # fmt: skip
def test_what_is_no_configuration(config, tmp_path, explain, content, message):
    path = config(**content) if isinstance(content, dict) else tmp_path / "config.json"
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    code, out, err = explain(path)
    assert (code, out) == (1, "")
    assert f"fusedmoe explain: error: {path}: " in err
    assert message in err
    assert len(err) < 800


def test_a_folder_that_is_no_model(tmp_path, explain, capsys):
    code, _, err = explain(tmp_path)
    assert (code, "the directory has no config.json" in err) == (1, True)
    with pytest.raises(SystemExit):
        explain("")
    assert "error: CONFIG: expected a path or a name, got an empty one" in capsys.readouterr().err


def test_nothing_is_downloaded(monkeypatch, explain):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("connected"))
    code, _, err = explain("nobody/no-such-model")
    assert (code, "nobody/no-such-model: no such file or directory, nor a model" in err) == (1, True)


def test_without_transformers(monkeypatch, explain):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = explain("config.json")
    assert (code, "config.json: needs transformers 5.7 or later" in err) == (1, True)
