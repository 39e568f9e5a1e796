"""A decoder-only transformer over bytes. Every MLP is a ``fusedmoe.MoE``; the rest is stock PyTorch.

Shape suffixes: B batch, S sequence (bytes of context), D hidden, N attention heads, H features per head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

import fusedmoe as fm
from fusedmoe.commands.demo.data import VOCABULARY

ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a :class:`ByteTransformer`."""

    layers: int
    hidden: int
    heads: int
    experts: int
    top_k: int
    intermediate: int
    context: int
    activation: str = "swiglu"
    router: str = "softmax"
    dropout: float = 0.0


class Routing(NamedTuple):
    """The routers' losses, each (layers,) fp32, and the rows per expert, (layers, experts)."""

    load_balancing_loss: torch.Tensor
    z_loss: torch.Tensor
    load: torch.Tensor


# --activation to op; gpt_oss is the clamped SwiGLU of the gpt-oss models
ACTIVATION_OPS: dict[str, Callable[[], fm.Op]] = {
    "swiglu": fm.SwiGLU,
    "geglu": fm.GeGLU,
    "reglu": fm.ReGLU,
    "squared_relu": fm.SquaredReLU,
    "gpt_oss": lambda: fm.SwiGLU(limit=7.0, alpha=1.702, offset=1.0),
}


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings."""

    def __init__(self, hidden: int, heads: int, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(hidden, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x_BSD: torch.Tensor, rope_SH: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return causal self-attention of (B, S, D), same shape."""
        q, k, v = rearrange(self.qkv(x_BSD), "b s (three n h) -> three b n s h", three=3, n=self.heads)
        mixed_BNSH = F.scaled_dot_product_attention(rotate(q, *rope_SH), rotate(k, *rope_SH), v, is_causal=True)
        mixed_BSD: torch.Tensor = self.out(rearrange(mixed_BNSH, "b n s h -> b s (n h)"))
        return mixed_BSD


def rotate(x_BNSH: torch.Tensor, cos_SH: torch.Tensor, sin_SH: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + H/2) of each head by the angles of the position (RoPE, Su et al. 2021)."""
    first, second = x_BNSH.chunk(2, dim=-1)
    return x_BNSH * cos_SH + torch.cat((-second, first), dim=-1) * sin_SH


def rope_tables(
    positions: int, features: int, device: torch.device | None, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of :func:`rotate`, each (positions, features), computed in fp32."""
    frequency = ROPE_BASE ** -(torch.arange(0, features, 2, device=device, dtype=torch.float32) / features)
    angle = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MoE(norm(x))."""

    def __init__(self, config: ModelConfig, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-6, device=device, dtype=dtype)
        self.attention = Attention(config.hidden, config.heads, device, dtype)
        self.moe_norm = nn.RMSNorm(config.hidden, eps=1e-6, device=device, dtype=dtype)
        self.moe = fm.MoE(
            config.hidden,
            config.intermediate,
            config.experts,
            config.top_k,
            activation=ACTIVATION_OPS[config.activation](),
            score=config.router,
            device=device,
            dtype=dtype,
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BSD: torch.Tensor, rope_SH: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, fm.MoEStats]:
        """Return the hidden states (B, S, D) and the MoE's losses and load."""
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), rope_SH))
        y_BSD, stats = self.moe(self.moe_norm(x_BSD), return_stats=True)
        return x_BSD + self.dropout(y_BSD), stats


class ByteTransformer(nn.Module):
    """A model that maps bytes to logits of the next byte; embedding and head share a weight.

    Parameters
    ----------
    config : ModelConfig
        The sizes; ``config.context`` is the maximum input length.
    device, dtype : optional
        Device and dtype of the parameters.
    """

    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(
        self, config: ModelConfig, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(Block(config, device, dtype) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6, device=device, dtype=dtype)
        cos, sin = rope_tables(config.context, config.hidden // config.heads, device, dtype)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        self._initialise()

    @property
    def typed_blocks(self) -> list[Block]:
        """``blocks`` with a static type; ``ModuleList`` has none."""
        return cast("list[Block]", list(self.blocks))

    @torch.no_grad()
    def _initialise(self) -> None:
        """Draw embeddings and qkv with a standard deviation of hidden**-0.5; zero attention's output weight."""
        nn.init.normal_(self.embedding.weight, std=self.config.hidden**-0.5)
        for block in self.typed_blocks:
            nn.init.normal_(block.attention.qkv.weight, std=self.config.hidden**-0.5)
            nn.init.zeros_(block.attention.out.weight)

    def forward(self, bytes_BS: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """Return logits (B, S, 256) in the model's dtype, and the :class:`Routing`."""
        length = bytes_BS.shape[1]
        rope_SH = (self.rope_cos[:length], self.rope_sin[:length])
        x_BSD = self.embedding(bytes_BS)
        all_stats = []
        for block in self.typed_blocks:
            x_BSD, stats = block(x_BSD, rope_SH)
            all_stats.append(stats)
        routing = Routing(
            load_balancing_loss=torch.stack([stats.load_balancing_loss for stats in all_stats]),
            z_loss=torch.stack([stats.z_loss for stats in all_stats]),
            load=torch.stack([stats.load for stats in all_stats]),
        )
        return F.linear(self.norm(x_BSD), self.embedding.weight), routing

    def update_router_biases(self, load: torch.Tensor, rate: float) -> None:
        """Update the routers' selection biases from ``load`` (layers, experts): loss-free balancing."""
        for block, load_E in zip(self.typed_blocks, load, strict=True):
            block.moe.router.update_bias(load_E, rate)

    def parameter_counts(self) -> tuple[int, int]:
        """Return the number of all parameters and of those active per token."""
        total = sum(parameter.numel() for parameter in self.parameters())
        experts = sum(parameter.numel() for block in self.typed_blocks for parameter in block.moe.experts.parameters())
        return total, total - experts + experts * self.config.top_k // self.config.experts
