"""``fusedmoe explain CONFIG``: models of transformers from their configuration, without memory for parameters."""

import json

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


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**QWEN3_30B_A3B, **changes}), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def no_memory(monkeypatch):
    """Have every parameter that takes memory be an error."""
    register = nn.Module.register_parameter

    def checked(self, name, parameter):
        assert parameter is None or parameter.device.type == "meta", f"{type(self).__name__}.{name}"
        register(self, name, parameter)

    monkeypatch.setattr(nn.Module, "register_parameter", checked)


def test_qwen3_30b_a3b(config, no_memory, capsys):
    path = config()
    assert main(["explain", path, "--strict"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "Qwen3MoeForCausalLM, 30.5 billion parameters, bfloat16\n8192 tokens, training, on an sm_90 GPU"
    )
    assert "model.layers.{0-47}.mlp.experts: Qwen3MoeExperts, x48, kept for backward 48 x " in text
    assert "4 of 4 fused  6 of 6 fused" in text
    assert text.count("chain dispatch to combine") == 1  # layers that are alike are shown once


def test_a_directory_and_a_recipe(config, no_memory, tmp_path, capsys):
    config(num_hidden_layers=2)
    assert main(["explain", str(tmp_path), "--recipe", "fp8_block", "--strict"]) == 0
    out, err = capsys.readouterr()
    assert "recipe fp8_block" in out
    assert "sm90.fp8_grouped_gemm_activation" in out
    assert err == "strict: everything is fused\n"
    assert main(["explain", str(tmp_path), "--recipe", "mxfp8", "--strict"]) == 0
    out, err = capsys.readouterr()
    assert "sm90.dequantized_gemm" in out
    assert "no kernel multiplies rows in mxfp8 e4m3 1x32" in out
    assert err == "strict: everything is fused\n"


def test_the_dtype_is_the_configurations_unless_asked(config, no_memory, capsys):
    path = config(num_hidden_layers=1, torch_dtype="float32")
    assert main(["explain", path, "--strict"]) == 1
    out, err = capsys.readouterr()
    assert ", float32\n" in out
    assert "input is float32, not bfloat16 or float16" in err
    assert main(["explain", path, "--dtype", "bfloat16", "--strict"]) == 0
    assert ", bfloat16\n" in capsys.readouterr().out
    unset = {k: v for k, v in QWEN3_30B_A3B.items() if k != "torch_dtype"}
    path = config(num_hidden_layers=1)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**unset, "num_hidden_layers": 1}, file)
    assert main(["explain", path, "--strict"]) == 0
    assert ", bfloat16\n" in capsys.readouterr().out


def test_layers_without_experts_are_no_part_of_it(config, no_memory, capsys):
    assert main(["explain", config(num_hidden_layers=4, mlp_only_layers=[1]), "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["names"] == [f"model.layers.{i}.mlp.experts" for i in (0, 2, 3)]


def test_a_dense_model_has_nothing_to_fuse(tmp_path, no_memory, capsys):
    transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64).save_pretrained(tmp_path)
    assert main(["explain", str(tmp_path)]) == 0
    assert "no module of this model runs on fusedmoe" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "--strict"]) == 1
    assert "no module of this model runs on fusedmoe" in capsys.readouterr().err


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_a_checkpoint_in_fp8_is_planned_on_its_codes(config, no_memory, capsys):
    path = config(num_hidden_layers=2, quantization_config=FP8)
    assert main(["explain", path]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith(" bfloat16, quantized by fp8")
    assert "FP8Experts" in out
    assert "fp8 e4m3 1x128: gate_up:input, down:input, down:grad, gate_up:grad" in out
    assert main(["explain", path, "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["class"] == "FP8Experts"
    assert group["names"] == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    (plan,) = group["plans"]
    assert not any(step["ops"][0].endswith("Wgrad") for step in plan["steps"])


def test_a_checkpoint_in_fp8_with_other_blocks_is_told_as_the_loaded_model_is(config, no_memory, capsys):
    path = config(num_hidden_layers=2, quantization_config=FP8 | {"weight_block_size": [64, 64]})
    assert main(["explain", path]) == 0
    out = capsys.readouterr().out
    assert "FP8Experts: its weights are quantized to torch.float8_e4m3fn" in out
    assert main(["explain", path, "--strict", "--json"]) == 1
    out, err = capsys.readouterr()
    assert "not planned: FP8Experts: its weights are quantized to torch.float8_e4m3fn" in err
    (group,) = json.loads(out)["groups"]
    assert (group["class"], group["plans"]) == ("FP8Experts", [])


@pytest.mark.parametrize("more", [{"modules_to_not_convert": ["experts"]}, {"dequantize": True}])
def test_experts_that_an_fp8_checkpoint_has_in_bf16_are_planned(config, no_memory, capsys, more):
    assert main(["explain", config(num_hidden_layers=2, quantization_config=FP8 | more), "--strict"]) == 0
    assert "4 of 4 fused  6 of 6 fused" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["mxfp4", "gptq", "awq", "bitsandbytes", "compressed-tensors", "torchao", "newest"])
def test_experts_quantized_by_another_method_are_not_planned(config, no_memory, capsys, method):
    path = config(num_hidden_layers=2, quantization_config={"quant_method": method, "bits": 4})
    message = f"the checkpoint is quantized by {method}, and fusedmoe has no kernels for quantized experts"
    assert main(["explain", path]) == 0
    out = capsys.readouterr().out
    assert message in out
    assert "of 4 fused" not in out
    assert main(["explain", path, "--strict"]) == 1
    err = capsys.readouterr().err
    assert f"model.layers.{{0-1}}.mlp.experts: not planned: {message}" in err
    assert "remove quantization_config" in err


def test_a_checkpoint_that_names_no_method_is_one_of_bitsandbytes(config, no_memory, capsys):
    assert main(["explain", config(num_hidden_layers=1, quantization_config={"load_in_4bit": True})]) == 0
    assert "the checkpoint is quantized by bitsandbytes" in capsys.readouterr().out


def test_a_checkpoint_whose_quantization_is_null_is_not_quantized(config, no_memory, capsys):
    assert main(["explain", config(num_hidden_layers=1, quantization_config=None), "--strict"]) == 0
    assert "quantized" not in capsys.readouterr().out


TWO_LAYERS = {"text_config": {"num_hidden_layers": 2}}
NOT_CAUSAL = {  # what their small configurations have: the defaults of some are those of no model
    "aria": TWO_LAYERS,
    "deepseek_ocr2": {
        "text_config": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 6}
    },
    "diffusion_gemma": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}},
    "ernie4_5_vl_moe": TWO_LAYERS,
    "glm4v_moe": TWO_LAYERS,
    "glm5_next": {},
    "hy_v4_vl": TWO_LAYERS,
    "inkling2": TWO_LAYERS,
    "inkling2_loop": TWO_LAYERS,
    "minimax_m3_vl": TWO_LAYERS,
    "mistral4": {},
    "mistral_large4": TWO_LAYERS,
    "muse_spark": TWO_LAYERS,
    "openai_privacy_filter": {},
    "qwen3_omni_moe": {
        "talker_config": {"text_config": {"shared_expert_intermediate_size": 64}, "spatial_merge_size": 2}
    },
    "qwen3_vl_moe": TWO_LAYERS,
    "unlimited_ocr": TWO_LAYERS,
}


@pytest.mark.parametrize("family", NOT_CAUSAL)
def test_a_family_that_is_no_causal_language_model(family, tmp_path, no_memory, capsys):
    if family not in moe_families.family_names():
        pytest.skip("not in this version of transformers")
    transformers.AutoConfig.for_model(family, **NOT_CAUSAL[family]).save_pretrained(tmp_path)
    assert main(["explain", str(tmp_path), "--tokens", "64", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert all(group["plans"] for group in groups)
    assert {group["class"] for group in groups} == set(moe_families.experts_classes()[family])


@pytest.mark.parametrize("chosen", [0, 9])
def test_more_experts_for_a_token_than_there_are(config, capsys, chosen):
    path = config(num_hidden_layers=1, num_experts=8, num_experts_per_tok=chosen)
    assert main(["explain", path]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"fusedmoe explain: error: {path}: experts per token: expected 1 to 8, got {chosen}\n"


def test_an_activation_that_runs_as_it_is_is_listed(config, no_memory, capsys):
    path = config(num_hidden_layers=1, hidden_act="mish")
    assert main(["explain", path, "--strict"]) == 0
    out, err = capsys.readouterr()
    assert "4 of 5 fused  8 of 9 fused" in out
    assert "fusion not required for activation.ModelFunction: no fused kernel (not an op: splits the chain)\n" in err
    assert err.endswith("strict: everything else is fused\n")
    assert main(["explain", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["without_kernel"] == {"no fused kernel (not an op: splits the chain)": ["activation.ModelFunction"]}
    assert found["groups"][0]["modules"] == ["module activation: ModelFunction: not an op: splits the chain"]


def test_llama4(tmp_path, no_memory, capsys):
    small = {"hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64, "num_attention_heads": 2}
    config = transformers.Llama4TextConfig(num_hidden_layers=2, num_local_experts=4, num_key_value_heads=2, **small)
    config.save_pretrained(tmp_path)
    assert main(["explain", str(tmp_path), "--dtype", "bfloat16"]) == 0
    assert "sm90.grouped_gemm_activation" in capsys.readouterr().out


@pytest.mark.parametrize(("content", "message"), [
    (None, "no such file or directory, nor a model in the local cache of transformers"),
    ("{", "transformers cannot read it"),
    ("[]", "got no model_type in it"),
    ('{"hidden_size": 8}', "got no model_type in it"),
    ('{"model_type": "qwen3_mo"}', "has, got 'qwen3_mo'; did you mean 'qwen3_moe'? A model whose code comes with"),
    ('{"model_type": ["qwen3_moe"]}', "has, got ['qwen3_moe']. A model"),
    ('{"model_type": "qwen3_moe", "num_experts": "many"}', "transformers cannot"),
    ('{"model_type": "qwen3_moe", "quantization_config": "fp8"}', "quantization_config: expected an object, got 'fp8'"),
    ('{"model_type": "blip_text_model"}', "transformers cannot build a model from BlipTextConfig alone"),
    ('{"model_type": "qwen3_moe", "num_attention_heads": 0}', "transformers cannot"),
])  # fmt: skip
def test_what_is_no_configuration(tmp_path, capsys, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["explain", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"fusedmoe explain: error: {path}: " in err
    assert message in err
    assert len(err) < 800


def test_a_directory_with_an_unknown_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}', encoding="utf-8")
    assert main(["explain", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "model_type: expected one that transformers" in err
    assert len(err) < 800


def test_a_directory_without_a_configuration(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 1
    assert "the directory has no config.json" in capsys.readouterr().err


def test_an_empty_name(capsys):
    with pytest.raises(SystemExit):
        main(["explain", ""])
    assert "error: CONFIG: expected a path or a name, got an empty one" in capsys.readouterr().err


def test_nothing_is_downloaded(monkeypatch, capsys):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("connected"))
    assert main(["explain", "nobody/no-such-model"]) == 1
    assert "nobody/no-such-model: no such file or directory, nor a model in the local cache" in capsys.readouterr().err


def test_without_transformers(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    assert main(["explain", "config.json"]) == 1
    assert "config.json: needs transformers 5.7 or later" in capsys.readouterr().err
