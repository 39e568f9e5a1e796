"""Tiny models with random weights, of every family of Mixture-of-Experts models that transformers has."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

MODELS = Path(transformers.__file__).parent / "models"
DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.MULTILINE)
SUFFIXES = ("ForCausalLM", "ForTokenClassification", "TextModel")  # of the class that is built: the first there is
ROUTER = re.compile(r"\.(gate|router)\.(\w+\.)*weight$")
CORRECTION = re.compile(r"\.(e_score_correction_bias|expert_bias|balancing_biases)$")
BATCH, LENGTH = 2, 12

_NAMES = {  # by size
    128: "vocab_size vocab_size_per_layer_input",
    64: (
        "hidden_size max_position_embeddings intermediate_size intermediate_size_mlp dense_intermediate_size "
        "prefix_dense_intermediate_size"
    ),
    32: (
        "router_hidden_size moe_intermediate_size moe_hidden_size shared_intermediate_size "
        "shared_expert_intermediate_size shared_experts_intermediate_size moe_shared_expert_intermediate_size "
        "kv_lora_rank q_lora_rank mamba_d_head mamba_head_dim"
    ),
    16: (
        "head_dim swa_head_dim o_lora_rank v_head_dim index_head_dim rel_extent linear_head_dim "
        "linear_key_head_dim linear_value_head_dim mamba_d_state mamba_chunk_size ssm_state_size chunk_size "
        "block_size hc_lowrank"
    ),
    8: (
        "hidden_size_per_layer_input sliding_window sliding_window_size n_routed_experts num_local_experts "
        "num_experts moe_num_experts d_rel rotary_dim gated_norm_rank"
    ),
    4: (
        "num_attention_heads swa_num_attention_heads index_n_heads index_kpool linear_num_heads "
        "linear_num_value_heads mamba_n_heads mamba_num_heads mamba_dt_rank"
    ),
    2: (
        "num_hidden_layers num_key_value_heads swa_num_key_value_heads eos_token_id num_experts_per_tok "
        "num_experts_per_token moe_topk moe_k top_k_experts o_groups linear_num_key_heads n_groups"
    ),
    1: "bos_token_id",
    0: "pad_token_id first_k_dense_replace num_dense_layers moe_layer_start_index",
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()} | {
    "index_topk": 64,  # every key is selected, so that no rounding changes which are
    "swiglu_limit": 1.0,  # low enough that some values are beyond it
    "mlp_only_layers": [],
    "enable_moe_block": True,
    "use_cache": False,
}
# what the sizes above and the rules below do not get right, by family, or by class for those in OTHER_MODELS
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {"mlp_layer_types": ["sparse", "sparse"]} for name in ("deepseek_ocr2", "unlimited_ocr")},
    **{name: {"global_head_dim": 16} for name in ("diffusion_gemma", "gemma4")},
    "deepseek_v4": {
        "head_dim": 16, "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 32,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 16,
    },
    "ernie4_5_vl_moe": {"moe_intermediate_size": [32, 32], "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2]}},
    "glm4v_moe": {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hy_v4_vl": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}},
    "inkling2_loop": {  # the second layer runs twice
        "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2,
        "loop_num_passes": 2, "loop_gate_rank": 8,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": {"head_dim": 16},
    "Qwen3OmniMoeTalkerModel": {"shared_expert_intermediate_size": 32},
    "qwen4_exp": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1},  # its configuration takes no other
}  # fmt: skip
# parameters whose inputs are cast to float32, whatever the dtype of the model is
IN_FLOAT32 = {
    "Inkling2ForCausalLM": {"mlp.gate.weight"},
    "Inkling2LoopForCausalLM": {"mlp.gate.weight", "forget_gate_proj", "message_gate_proj"},
}
# further classes with experts of their own: tiny(family, model_class=name)
OTHER_MODELS = [("qwen3_omni_moe", "Qwen3OmniMoeTalkerModel")]
WITHOUT_TOKENS = {"Qwen3OmniMoeTalkerModel"}  # called with embeddings


@dataclass
class Tiny:
    family: str
    model: nn.Module
    inputs: dict[str, torch.Tensor]
    experts: list[tuple[str, nn.Module]]


@cache
def experts_classes() -> dict[str, list[str]]:
    """Names of the classes of experts, by family; llama4's are the ones that are not decorated."""
    found = {path.parent.name: DECORATED.findall(path.read_text("utf-8")) for path in MODELS.glob("*/modeling_*.py")}
    return {"llama4": ["Llama4TextExperts"]} | {family: names for family, names in found.items() if names}


def family_names() -> list[str]:
    return sorted(experts_classes())


def find_class(family: str, model_class: str | None = None) -> type[Any]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    if model_class is not None:
        return getattr(module, model_class)
    own = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    return next(c for suffix in SUFFIXES for c in own if c.__name__.endswith(suffix))


def small_config(config_class: type[Any], overrides: dict[str, Any]) -> Any:
    """Of those sizes, the ones that this class has; two layers, or one of each kind of layer there is."""
    fields = config_class().to_dict()
    chosen = {name: size for name, size in SIZES.items() if name in fields}
    if "qk_rope_head_dim" in fields:  # latent attention
        rope = 8 if fields["qk_rope_head_dim"] else 0
        chosen |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": 16 - rope, "head_dim": rope}
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    for groups in ("n_group", "num_expert_group"):
        if (fields.get(groups) or 1) > 1:
            chosen |= {groups: 4, "topk_group": 2}
    if types := fields.get("layer_types"):
        kinds = list(dict.fromkeys(types))
        chosen["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        chosen["num_hidden_layers"] = len(chosen["layer_types"])
    if types := fields.get("mlp_layer_types"):
        kinds = [kind for kind in dict.fromkeys(types) if kind != "dense"]
        chosen["mlp_layer_types"] = [kinds[i % len(kinds)] for i in range(chosen["num_hidden_layers"])]
    return config_class(**chosen | overrides)


@torch.no_grad()
def draw(model: nn.Module) -> None:
    """Random values for every parameter, around one where it starts as ones, and for what else routers read."""
    for name, parameter in model.named_parameters():
        # logits that differ, and corrections of them that do not decide alone, spread tokens over the experts
        scale = 0.2 if ROUTER.search(name) else 0.02 if CORRECTION.search(name) else 0.1
        noise = scale * torch.randn_like(parameter)
        constant = parameter.isfinite().all() and parameter.min() == parameter.max()
        parameter.copy_(parameter + noise if constant or parameter.ndim < 2 else noise)
    for name, buffer in model.named_buffers():
        if CORRECTION.search(name):
            buffer.normal_(std=0.02)
        elif name.endswith("tid2eid"):  # deepseek_v4: experts by token, all of them the first until they are loaded
            experts = model.get_submodule(name.rpartition(".")[0]).num_experts
            buffer.copy_(torch.rand(len(buffer), experts).topk(buffer.shape[1]).indices)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """What loading leaves in float32 in half precision stays so: code that calls `.float()` needs it to be."""
    patterns = IN_FLOAT32.get(type(model).__name__, set())
    if dtype.itemsize < 4:
        patterns = patterns | set(model._keep_in_fp32_modules_strict or [])
    # their data, as .to() changes a parameter where it is
    kept = {name: tensor.data for name, tensor in tensors(model) if any(re.search(p, name) for p in patterns)}
    model.to(dtype)
    for name, tensor in tensors(model):
        tensor.data = kept.get(name, tensor.data)


def tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def tiny(
    family: str,
    experts_implementation: str | None = "eager",
    dtype: torch.dtype = torch.float32,
    model_class: str | None = None,
    **overrides: Any,
) -> Tiny:
    """The weights are the same in every implementation of the experts and, except for rounding, in every dtype."""
    found = find_class(family, model_class)
    config = small_config(found.config_class, FAMILIES.get(model_class or family, {}) | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = found._from_config(config, experts_implementation=experts_implementation)
        draw(model)
        ids = torch.randint(3, config.vocab_size, (BATCH, LENGTH))
        embeddings = torch.randn(BATCH, LENGTH, config.hidden_size).to(dtype)
    cast(model.eval(), dtype)
    inputs = {"inputs_embeds": embeddings} if found.__name__ in WITHOUT_TOKENS else {"input_ids": ids}
    parameters = inspect.signature(found.forward).parameters
    if "moe_mm_token_type_ids" in parameters:  # tokens of text and of images have experts of their own
        inputs["moe_mm_token_type_ids"] = (ids % 3 == 0).int()
    if "labels" in parameters:
        inputs["labels"] = ids % config.num_labels if found.__name__.endswith("ForTokenClassification") else ids
    names = experts_classes()[family]
    experts = [(name, module) for name, module in model.named_modules() if type(module).__name__ in names]
    assert experts, f"{found.__name__} has none of {', '.join(names)} in it"
    return Tiny(family, model, inputs, experts)


def logits_and_loss(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and their loss; of a model without a head, the last hidden states and their cross entropy as logits."""
    logits = output["logits"] if "logits" in output else output["last_hidden_state"]
    loss = output.get("loss")
    if loss is None:  # not their mean square: the last norm keeps it nearly constant, so that its gradients cancel
        rows = logits.flatten(0, -2)
        loss = nn.functional.cross_entropy(rows, torch.arange(len(rows)) % rows.shape[-1])
    return logits, loss


def step(tiny: Tiny, run: Any = None, **inputs: Any) -> dict[str, torch.Tensor]:
    """Logits, losses and the gradients of all parameters in a training step, by name."""
    tiny.model.zero_grad()
    output = (tiny.model if run is None else run)(**tiny.inputs | inputs)
    logits, loss = logits_and_loss(output)
    loss.backward()
    auxiliary = {} if output.get("aux_loss") is None else {"aux_loss": output["aux_loss"].detach()}
    grads = {name: p.grad.clone() for name, p in tiny.model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **auxiliary, **grads}


def logits(tiny: Tiny) -> torch.Tensor:
    """The logits of the model in eval mode, without gradients."""
    training = tiny.model.training
    tiny.model.eval()
    with torch.no_grad():
        found = logits_and_loss(tiny.model(**tiny.inputs))[0]
    tiny.model.train(training)
    return found


def autocast(tiny: Tiny) -> None:
    """Have the model called under autocast."""
    tiny.model.forward = torch.autocast("cpu", torch.bfloat16)(tiny.model.forward)


def checkpointed(model: nn.Module, **how: Any) -> None:
    """Train with activation checkpointing, by the name that it has in this version of transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(how or None)
    model.train()
