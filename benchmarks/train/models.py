"""The models: transformers' classes with the widths of published models, cut to what one GPU holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCABULARY = 24_576


@dataclass(frozen=True)
class Model:
    """A model, and the tokens of a step.

    Attributes
    ----------
    name : str
        The name on the command line.
    title : str
        The published model, and the part of it that is trained.
    config : callable
        Returns the configuration of transformers.
    sequences, length, micro_batches : int
        Sequences per micro-batch, tokens per sequence, and micro-batches per optimizer step.
    attention : str
        transformers' implementation of attention.
    std : float
        Standard deviation of the initial matrices.
    without : tuple of pairs of str
        Experts implementations that do not compute this model, each with the reason.
    """

    name: str
    title: str
    config: Callable[[], Any]
    sequences: int = 2
    length: int = 4096
    micro_batches: int = 4
    attention: str = "sdpa"
    std: float = 0.02
    without: tuple[tuple[str, str], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.sequences * self.length * self.micro_batches


def qwen3(layers: int = 6, **sizes: Any) -> Any:
    """Return the configuration of Qwen3-30B-A3B with fewer layers."""
    from transformers import Qwen3MoeConfig

    chosen = {
        "vocab_size": VOCABULARY, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128,
    } | sizes  # fmt: skip
    return Qwen3MoeConfig(
        num_hidden_layers=layers, norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.001,
        use_cache=False, **chosen,
    )  # fmt: skip


def olmoe(layers: int = 16, **sizes: Any) -> Any:
    """Return the configuration of OLMoE-1B-7B."""
    from transformers import OlmoeConfig

    chosen = {
        "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
        "num_experts_per_tok": 8, "num_attention_heads": 16, "num_key_value_heads": 16,
    } | sizes  # fmt: skip
    return OlmoeConfig(
        num_hidden_layers=layers, output_router_logits=True, router_aux_loss_coef=0.01, use_cache=False, **chosen
    )


def gpt_oss(layers: int = 4, **sizes: Any) -> Any:
    """Return the configuration of GPT-OSS-20B with fewer layers."""
    from transformers import GptOssConfig

    chosen = {
        "vocab_size": VOCABULARY, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
        "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    } | sizes  # fmt: skip
    return GptOssConfig(
        num_hidden_layers=layers, output_router_logits=True, router_aux_loss_coef=0.001, sliding_window=128,
        use_cache=False, **chosen,
    )  # fmt: skip


def deepseek_v3(layers: int = 3, **sizes: Any) -> Any:
    """Return the configuration of DeepSeek-V3 with one dense layer, fewer MoE layers, and 32 of 256 experts.

    A GPU has as many experts under 8-way expert parallelism.
    """
    from transformers import DeepseekV3Config

    chosen = {
        "vocab_size": VOCABULARY, "hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
        "n_routed_experts": 32, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    } | sizes  # fmt: skip
    return DeepseekV3Config(
        num_hidden_layers=layers, first_k_dense_replace=1, routed_scaling_factor=2.5, use_cache=False, **chosen
    )


SONIC_HAS_NO_CLAMP = "computes SwiGLU without the clamp and the factor of this model"
MODELS = (
    Model("qwen3", "Qwen3-30B-A3B, 6 of 48 layers", qwen3),
    Model("olmoe", "OLMoE-1B-7B, whole", olmoe, sequences=1),
    Model(
        "gpt-oss", "GPT-OSS-20B, 4 of 24 layers", gpt_oss, attention="flex_attention",
        without=(("sonicmoe", SONIC_HAS_NO_CLAMP), ("liger", "has no experts for this model")),
    ),
    Model("deepseek-v3", "DeepSeek-V3, 1 dense and 2 MoE layers, 32 of 256 experts", deepseek_v3, std=0.006),
)  # fmt: skip


def built(model: Model, device: torch.device) -> nn.Module:
    """Return a model in bf16 with stock experts. `initialize` gives it values."""
    from transformers import AutoModelForCausalLM

    with device:
        return AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
            model.config(),
            dtype=torch.bfloat16,
            attn_implementation=model.attention,
            experts_implementation="grouped_mm",
        )


@torch.no_grad()
def initialize(model: nn.Module, std: float, seed: int) -> None:
    """Draw the parameters: normal matrices, norms of ones, biases of zeros."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:
            parameter.zero_()
        elif parameter.dim() > 1:
            parameter.normal_(std=std, generator=generator)
        else:
            parameter.fill_(1)


def active_parameters(model: nn.Module) -> int:
    """Return the parameters that a token is multiplied by: those of ``top_k`` experts, and no embedding."""
    config: Any = model.config
    experts = config.num_local_experts
    count = 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            continue
        routed = ".experts." in name
        count += parameter.numel() * (config.num_experts_per_tok / experts if routed else 1)
    return round(count)


def flops_per_token(model: nn.Module, length: int) -> float:
    """Return the FLOP of a token, forward and backward: 6 per active parameter, and causal attention.

    Attention multiplies (length, d) matrices twice per head, of which the causal mask needs half. A token of a layer
    with a sliding window needs the window. A recomputation does not count.
    """
    config: Any = model.config
    qk, v = (
        (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
        if hasattr(config, "v_head_dim")
        else (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,) * 2
    )
    window = getattr(config, "sliding_window", None) or length
    windows = [
        min(length, 2 * window) if kind == "sliding_attention" else length
        for kind in getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    ]
    return 6.0 * active_parameters(model) + 3 * config.num_attention_heads * sum(windows) * (qk + v)
