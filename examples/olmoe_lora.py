"""LoRA on the experts of an OLMoE: the experts' weights are frozen, and low-rank updates are trained.

    python examples/olmoe_lora.py                                  # a tiny model with random weights, on a CPU
    python examples/olmoe_lora.py --model allenai/OLMoE-1B-7B-0924 --device cuda --lr 1e-4

The training text is this file. Needs transformers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, OlmoeConfig, OlmoeForCausalLM

import fusedmoe as fm

LENGTH = 128  # tokens per sequence


class LoRAExperts(nn.Module):
    """Replaces the experts of an OLMoE layer, and shares their weights."""

    def __init__(self, experts: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        up, down = [self.layer(weight, rank, alpha) for weight in (experts.gate_up_proj, experts.down_proj)]
        self.chain = fm.Sequential(fm.Dispatch(experts.num_experts), up, fm.SwiGLU(), down, fm.Combine())

    @staticmethod
    def layer(weight: nn.Parameter, rank: int, alpha: float) -> fm.GroupedLoRA:
        num_experts, out_features, in_features = weight.shape
        linear = fm.GroupedLinear(num_experts, in_features, out_features, device="meta")
        linear.weight = weight
        return fm.GroupedLoRA(linear, rank, alpha, dtype=torch.float32)  # the updates are small enough for fp32

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.chain(hidden_states, expert_index=index, expert_weight=weights)


def add_lora(model: nn.Module, rank: int, alpha: float) -> list[nn.Parameter]:
    """Freeze the model, add LoRA to its experts, and return the trainable parameters."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.experts = LoRAExperts(layer.mlp.experts, rank, alpha)
    return [p for p in model.parameters() if p.requires_grad]


def load(name: str | None, device: str) -> tuple[nn.Module, torch.Tensor]:
    """Return the model and the tokens of the text, (sequences, LENGTH)."""
    text = Path(__file__).read_text(encoding="utf-8")
    if name is None:
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}
        special = {"pad_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2}
        model, tokens = OlmoeForCausalLM(OlmoeConfig(**sizes, **heads, **special)), list(text.encode())
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
        tokens = AutoTokenizer.from_pretrained(name)(text)["input_ids"]
    rows = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH], device=device).view(-1, LENGTH)
    return model.to(device), rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="an OLMoE checkpoint; by default a tiny model with random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    model, rows = load(options.model, options.device)
    trained = add_lora(model, options.rank, options.alpha)
    total = sum(p.numel() for p in model.parameters())
    count = sum(p.numel() for p in trained)
    print(f"trainable parameters: {count:,} of {total:,} ({count / total:.2%})")

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch, use_cache=False).loss

    with torch.no_grad():
        print(f"loss before: {loss_of(rows):.3f}")
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=0.0)
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss_of(rows[torch.randperm(len(rows))[: options.batch]]).backward()
        optimizer.step()
    with torch.no_grad():
        print(f"loss after:  {loss_of(rows):.3f}")


if __name__ == "__main__":
    main()
