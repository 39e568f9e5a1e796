"""Fine-tune a Qwen3-MoE on a text file with transformers' Trainer, with the experts on fusedmoe.

    python examples/qwen3_moe_trainer.py                                     # a tiny model with random weights
    python examples/qwen3_moe_trainer.py --experts eager                     # the same with transformers' experts
    python examples/qwen3_moe_trainer.py --model CHECKPOINT --text mine.txt --lr 1e-5

Two lines use fusedmoe: `register()` and `experts_implementation="fusedmoe"`. Model, Trainer, checkpoints and auxiliary
loss are those of transformers. The tokens of the tiny model are bytes; a checkpoint has its own tokenizer. All weights
are trained. On a GPU they are bf16, which takes 8 bytes per parameter with gradients and AdamW's state. To train
Qwen3-30B-A3B on one GPU, see olmoe_lora.py. Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PrinterCallback,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers

TEXT = Path(__file__).parents[1] / "docs" / "composing.md"
LENGTH = 128  # tokens per sequence
TINY = Qwen3MoeConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
    num_experts=8, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    output_router_logits=True, router_aux_loss_coef=0.01, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    initializer_range=0.1, use_cache=False,
)  # fmt: skip


class Result(NamedTuple):
    before: float  # loss on the whole text
    after: float
    losses: list[float]  # loss of each step on its batch
    explanation: fm.ModelExplanation


def load(name: str | None, experts: str, text: str) -> tuple[PreTrainedModel, list[int]]:
    """Return the model and the tokens of the text."""
    fusedmoe_transformers.register()  # makes the name "fusedmoe" known
    gpu = torch.cuda.is_available()
    if name is None:
        dtype = torch.bfloat16 if gpu else torch.float32
        model = Qwen3MoeForCausalLM._from_config(TINY, experts_implementation=experts, dtype=dtype)
        tokens = list(text.encode())
    else:
        model = AutoModelForCausalLM.from_pretrained(name, experts_implementation=experts, dtype=torch.bfloat16)
        tokens = AutoTokenizer.from_pretrained(name)(text)["input_ids"]
    return model.to("cuda" if gpu else "cpu"), tokens


def main(argv: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Qwen3-MoE checkpoint; by default a tiny model with random weights")
    parser.add_argument("--text", type=Path, default=TEXT, help="a text file (default: docs/composing.md)")
    parser.add_argument("--experts", default="fusedmoe", help="experts_implementation: fusedmoe, eager, grouped_mm")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args(argv)
    set_seed(0)

    model, tokens = load(options.model, options.experts, options.text.read_text(encoding="utf-8"))
    sequences = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
    rows = [{"input_ids": row, "labels": row} for row in sequences]

    explanation = fm.explain(model, tokens=options.batch * LENGTH)  # the plan of a training step
    print(explanation)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=options.batch, learning_rate=options.lr,
            lr_scheduler_type="cosine", warmup_steps=4, per_device_eval_batch_size=options.batch,
            logging_steps=1, logging_strategy="steps", save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=torch.cuda.is_available(), seed=0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    print(f"\n{options.steps} steps on {sequences.numel():,} tokens of {options.text.name}, experts: {options.experts}")
    print("loss of every eighth step:", *(f"{loss:.3f}" for loss in losses[::8]))
    print(f"loss of the whole text: {before:.4f} before, {after:.4f} after")
    return Result(before, after, losses, explanation)


if __name__ == "__main__":
    main()
