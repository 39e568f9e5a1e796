"""The logits of GPT-OSS with eager experts and with fusedmoe: they differ only by rounding.

    python examples/gpt_oss_logits.py                                             # a tiny model with random weights
    python examples/gpt_oss_logits.py --model openai/gpt-oss-20b --exact float32  # 84 GB of memory

The model runs in fp64 for exact logits, and then in fp32 and bf16 with both implementations of the experts. If fusedmoe
computed another function, its logits would be further from the exact ones than the eager ones. Then both generate a few
tokens greedily. Needs transformers.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers import PreTrainedModel as Model

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers

PROMPT = "Mixture-of-Experts models send every token to a few of many experts, and"
EXPERTS = ("eager", "fusedmoe")


class Result(NamedTuple):
    largest: dict[tuple[str, str], float]  # max |logit - exact logit|, by dtype and implementation
    relative: dict[tuple[str, str], float]  # median over the tokens of |logits - exact| / |exact|
    generated: dict[str, list[int]]  # the prompt and the new tokens, by implementation
    explanation: fm.ModelExplanation


def load(name: str | None) -> tuple[Model, list[int]]:
    """Return the model and the tokens of the prompt; the tiny model's tokens are bytes."""
    if name is not None:
        # the checkpoint's experts are quantized; both implementations run them dequantized
        kind = {"dtype": torch.bfloat16, "quantization_config": Mxfp4Config(dequantize=True)}
        return AutoModelForCausalLM.from_pretrained(name, **kind), AutoTokenizer.from_pretrained(name)(PROMPT).input_ids
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_local_experts=8,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=32,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, initializer_range=0.15,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "bias" in name:  # initialised to zeros, which would hide a missing bias
            torch.nn.init.normal_(parameter, std=0.5)
    return cast(model, torch.bfloat16), list(PROMPT.encode())  # bf16 values are exact in every dtype below


def cast(model: Model, dtype: torch.dtype) -> Model:
    """Cast the parameters, not the buffers: rotary embeddings are fp32 in a bf16 model too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def logits_of(model: Model, experts: str, tokens: Tensor) -> Tensor:
    model.set_experts_implementation(experts)
    return model(input_ids=tokens).logits.double()


def main(argv: list[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GPT-OSS checkpoint; by default a tiny model with random weights")
    parser.add_argument("--exact", choices=["float64", "float32"], default="float64", help="dtype of the exact logits")
    parser.add_argument("--tokens", type=int, default=12, help="new tokens")
    options = parser.parse_args(argv)

    fusedmoe_transformers.register()  # makes the name "fusedmoe" known
    model, prompt = load(options.model)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    tokens = torch.tensor([prompt], device=model.device)

    # casting bf16 to fp64 and back is exact
    exact = logits_of(cast(model, getattr(torch, options.exact)), "eager", tokens)
    print(f"{exact.shape[1]} tokens, logits from {exact.min():.2f} to {exact.max():.2f}\n")
    print(f"against {options.exact}   experts    largest difference   relative, of the median token")
    largest, relative = {}, {}
    for dtype in ("float32", "bfloat16"):
        if dtype == options.exact:
            continue
        cast(model, getattr(torch, dtype))
        for experts in EXPERTS:
            difference = logits_of(model, experts, tokens) - exact
            key = dtype, experts
            largest[key] = difference.abs().max().item()
            # the median: in bf16, rounding may change the chosen experts of single tokens in both implementations
            relative[key] = (difference.norm(dim=-1) / exact.norm(dim=-1)).median().item()
            print(f"{dtype:15}   {experts:8}   {largest[key]:18.1e}   {relative[key]:29.1e}")

    explanation = fm.explain(model, tokens=tokens.numel())
    print(f"\n{explanation}\n")

    # rounding may change the choice between two almost equally likely tokens; in fp32 that is rare
    if options.model is None:
        cast(model, torch.float32)
    generated = {}
    for experts in EXPERTS:
        model.set_experts_implementation(experts)
        found = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=options.tokens, do_sample=False
        )
        generated[experts] = found[0].tolist()
        print(f"{experts:8} writes {generated[experts][len(prompt) :]}")
    same = generated["eager"] == generated["fusedmoe"]
    print("the same" if same else "not the same: rounding chose between equally likely tokens")
    return Result(largest, relative, generated, explanation)


if __name__ == "__main__":
    main()
