"""A decoder-only transformer over bytes. Every MLP is a ``fusedmoe.MoE``; the rest is stock PyTorch.

Shape suffixes: B batch, S sequence (bytes of context), D hidden, N attention heads, H features per head.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

import fusedmoe as fm
from fusedmoe.commands.demo.data import VOCABULARY
from fusedmoe.commands.demo.options import DTYPES, Job

ROPE_BASE = 10_000.0


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

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


def rope_tables(positions: int, features: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of `rotate`, each (positions, features)."""
    frequency = ROPE_BASE ** -(torch.arange(0, features, 2, dtype=torch.float32, device=device) / features)
    angle = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


class Block(nn.Module):
    """x + attention(norm(x)), then x + MoE(norm(x))."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(job.hidden, eps=1e-6)
        self.attention = Attention(job.hidden, job.heads)
        self.moe_norm = nn.RMSNorm(job.hidden, eps=1e-6)
        self.moe = fm.MoE(job.hidden, job.intermediate, job.experts, job.top_k)
        self.dropout = nn.Dropout(job.dropout)

    def forward(
        self, x_BSD: torch.Tensor, rope_SH: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, fm.MoEStats]:
        """Return the hidden states (B, S, D) and the MoE's losses and load."""
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), rope_SH))
        y_BSD, stats = self.moe(self.moe_norm(x_BSD), return_stats=True)
        return x_BSD + self.dropout(y_BSD), stats


class ByteTransformer(nn.Module):
    """A model that maps bytes to logits of the next byte; embedding and head share a weight.

    Its sizes, device and dtype are those of the job. ``job.context`` is the maximum input length.
    """

    rope_cos: torch.Tensor
    rope_sin: torch.Tensor

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        with torch.device(job.device):
            self.embedding = nn.Embedding(VOCABULARY, job.hidden)
            self.blocks = nn.ModuleList(Block(job) for _ in range(job.layers))
            self.norm = nn.RMSNorm(job.hidden, eps=1e-6)
            cos, sin = rope_tables(job.context, job.hidden // job.heads, self.embedding.weight.device)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        with torch.no_grad():
            nn.init.normal_(self.embedding.weight, std=job.hidden**-0.5)
            for block in self.typed_blocks:
                nn.init.normal_(block.attention.qkv.weight, std=job.hidden**-0.5)
                nn.init.zeros_(block.attention.out.weight)
        self.to(DTYPES[job.dtype])

    @property
    def typed_blocks(self) -> list[Block]:
        """``blocks`` with a static type; ``ModuleList`` has none."""
        return cast("list[Block]", list(self.blocks))

    def forward(self, bytes_BS: torch.Tensor) -> tuple[torch.Tensor, list[fm.MoEStats]]:
        """Return logits (B, S, 256) in the model's dtype, and the losses and load of each layer's MoE."""
        length = bytes_BS.shape[1]
        rope_SH = (self.rope_cos[:length], self.rope_sin[:length])
        x_BSD = self.embedding(bytes_BS)
        all_stats = []
        for block in self.typed_blocks:
            x_BSD, stats = block(x_BSD, rope_SH)
            all_stats.append(stats)
        return F.linear(self.norm(x_BSD), self.embedding.weight), all_stats

    def parameter_counts(self) -> tuple[int, int]:
        """Return the number of all parameters and of those active per token."""
        total = sum(parameter.numel() for parameter in self.parameters())
        experts = sum(parameter.numel() for block in self.typed_blocks for parameter in block.moe.experts.parameters())
        return total, total - experts + experts * self.job.top_k // self.job.experts
