"""Train a Qwen3-MoE on several GPUs: experts on `fm.ExpertParallel`, all other parameters sharded by FSDP2.

    torchrun --nproc-per-node 4 examples/qwen3_moe_expert_parallel.py    # a tiny model with random weights; or on a CPU
    torchrun --nproc-per-node 4 examples/qwen3_moe_expert_parallel.py --model CHECKPOINT --layers 12 --text mine.txt \\
        --batch 8 --length 2048 --lr 1e-5 --steps 100 --save FOLDER
    torchrun --nproc-per-node 2 examples/qwen3_moe_expert_parallel.py --model CHECKPOINT --layers 12 --text mine.txt \\
        --batch 8 --length 2048 --lr 1e-5 --steps 200 --resume FOLDER --export MODEL

CHECKPOINT and MODEL are folders in the layout of transformers. Each rank reads its own experts and the rest of the
model, one tensor at a time. Only the experts are replaced: attention, the router and the loss are those of
transformers, with its auxiliary loss, as with ``output_router_logits=True``. The auxiliary loss is that of the tokens
of all ranks, so that a step does not depend on the number of ranks. A run goes on with any number of ranks that divides
the batch and the experts.

On GPUs, products are in bf16; weights, gradients and AdamW's state are in fp32, 16 bytes per parameter. With
``--weights bfloat16`` they are in bf16, 8 bytes, and rounding removes small updates. ``--compile`` compiles attention,
norms and the loss, most of whose time is elementwise. ``--experts stock`` leaves the experts to transformers and FSDP2,
for comparison. Random routers send most tokens to the same few experts, which a trained model does not: with
``--draw-experts``, to measure the speed of random weights, the experts of each token are drawn, all with the same
probability. Needs transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AttentionInterface, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import fusedmoe as fm

INDEX = "model.safetensors.index.json"
TEXT = Path(__file__).parents[1] / "docs" / "composing.md"
TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "router_aux_loss_coef": 0.01, "initializer_range": 0.1,
}  # fmt: skip
QWEN3_30B_A3B = {  # all other values are transformers' defaults
    "num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True, "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
SHAPES = {"tiny": TINY, "qwen3-30b-a3b": QWEN3_30B_A3B}
Weights = Callable[[str, torch.Size], Tensor]  # returns a tensor of a checkpoint by its name and shape


class Experts(nn.Module):
    """The experts of a layer that are on this rank, with the arguments of transformers' experts."""

    def __init__(self, config: Qwen3MoeConfig, ep: fm.ExpertParallel) -> None:
        super().__init__()
        sizes = config.hidden_size, config.moe_intermediate_size, config.num_experts, config.num_experts_per_tok
        self.chain = fm.MoE(*sizes, expert_parallel=ep).experts  # all of the layer except its router

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        # FSDP2 ignores the experts, so that autocast must cast their weights
        with torch.autocast(x.device.type, x.dtype, enabled=self.chain.down.weight.dtype is not x.dtype):
            return self.chain(x, expert_index=index, expert_weight=weight)


def moe_blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Qwen3MoeSparseMoeBlock)]


def new_model(
    config: Qwen3MoeConfig, ep: fm.ExpertParallel | None, device: torch.device, dtype: torch.dtype, compiled: bool
) -> Qwen3MoeForCausalLM:
    """Return a model without values: the experts of this rank, and FSDP2's shards of all other parameters.
    ``compiled``: whether attention, norms and the loss are compiled when they first run.
    """
    # without a function for its mask, attention is causal: to make one, the host would wait for the device in each step
    AttentionInterface.register("causal", sdpa_attention_forward)
    config._attn_implementation = "causal"
    with torch.device("meta"):  # no rank has memory for all experts
        model = Qwen3MoeForCausalLM(config).to(dtype)
        if ep is not None:
            for block in moe_blocks(model):
                block.experts = Experts(config, ep).to(dtype)
    if compiled:  # parts without hooks of FSDP2, and without a graph break
        model.loss_function = torch.compile(model.loss_function)
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm):
                part.compile()
    experts = {*fm.expert_parallel.shards(model).values()}
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else MixedPrecisionPolicy()
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.model.layers, model.lm_head, model):
        # layers with experts are gathered again for the backward pass; all other parameters stay gathered
        again = ep is None and module in [*model.model.layers]
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=experts, reshard_after_forward=again)
        module.set_gradient_divide_factor(1.0)  # sums over the ranks, as those of the experts are
        module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers are in no checkpoint
    return model


def checkpoint(folder: Path) -> Weights:
    """Return a function that reads tensors of a checkpoint, by their names."""
    files = json.loads((folder / INDEX).read_text())["weight_map"] if (folder / INDEX).exists() else {}
    opened = cache(lambda file: safe_open(folder / file, "pt"))
    return lambda name, shape: opened(files[name] if files else "model.safetensors").get_tensor(name)


def random_weights(config: Qwen3MoeConfig, device: torch.device) -> Weights:
    """Return a function that makes random tensors, the same on any number of ranks."""

    def made(name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:  # of a norm
            return torch.ones(shape, device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        return config.initializer_range * torch.randn(shape, generator=generator, device=device)

    return made


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint of transformers: the experts of this rank, and all others as DTensors."""
    for name, parameter in model.named_parameters():
        layer, in_experts, own = name.partition(".experts.")
        if not in_experts:
            yield name, parameter
            continue
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        parts = ("gate_proj", "up_proj") if "gate_up" in own else ("down_proj",)
        for i, expert in enumerate(mine, dist.get_rank() * len(mine)):
            for part, t in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{layer}.experts.{i}.{part}.weight", t


@torch.no_grad()
def fill(model: nn.Module, weights: Weights) -> None:
    """Give this rank's part of a model its values, one tensor at a time."""
    for name, t in tensors(model):
        value = weights(name, t.shape).to(t.device, t.dtype)
        if isinstance(t, DTensor):
            value = distribute_tensor(value, t.device_mesh, t.placements, src_data_rank=None)
        t.copy_(value)


@torch.no_grad()
def export(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    """Write a model as a checkpoint of transformers, in one file per rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    file, mine = f"model-{rank + 1:05}-of-{ranks:05}.safetensors", {}
    for name, t in tensors(model):
        whole = t.full_tensor() if isinstance(t, DTensor) else t
        if whole is t or rank == 0:
            mine[name] = whole.to("cpu", model.config.dtype, copy=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(mine, folder / file, {"format": "pt"})
    files: list[Any] = [None] * ranks
    dist.all_gather_object(files, dict.fromkeys(mine, file))
    if rank == 0:
        model.config.save_pretrained(folder)
        index = {"metadata": {}, "weight_map": {name: file for part in files for name, file in part.items()}}
        (folder / INDEX).write_text(json.dumps(index))


def balance_loss(router_logits: list[Tensor], top_k: int) -> Tensor:
    """Return transformers' auxiliary loss, of which the mean over the ranks is that of the tokens of all ranks."""
    probs = torch.cat(router_logits).float().softmax(-1)
    chosen = probs.topk(top_k).indices.flatten()
    load = probs.new_zeros(probs.shape[1]).index_add_(0, chosen, probs.new_ones(len(chosen)))
    dist.all_reduce(load)
    return probs.shape[1] * (load / (dist.get_world_size() * len(probs)) * probs.mean(0)).sum()


def imbalance(indices: list[Tensor], experts: int) -> float:
    """Return the chosen slots of the busiest rank over the mean over ranks, as the mean over layers."""
    loads = torch.stack([index.flatten().bincount(minlength=experts) for index in indices])
    dist.all_reduce(loads)
    of_ranks = loads.view(len(indices), dist.get_world_size(), -1).sum(2).float()
    return (of_ranks.amax(1) / of_ranks.mean(1)).mean().item()


def draw_experts(model: nn.Module, device: torch.device) -> None:
    """Let each router choose experts at random, all with the same probability. Weights: the softmax of their logits."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def drawn(gate: Any, args: Any, result: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, _ = result
        index = torch.rand(logits.shape, generator=generator, device=device).topk(weights.shape[1]).indices
        return logits, logits.gather(1, index).float().softmax(-1).to(weights.dtype), index

    for block in moe_blocks(model):
        block.gate.register_forward_hook(drawn)


def prepared(options: argparse.Namespace, device: torch.device) -> tuple[Qwen3MoeConfig, Weights, Tensor]:
    """Return the configuration, the values of the weights, and the text as sequences of tokens."""
    if options.model is None:
        config = Qwen3MoeConfig(**SHAPES[options.shape])
        weights, tokenized = random_weights(config, device), lambda text: list(text.encode())
    else:
        config, weights = Qwen3MoeConfig.from_pretrained(options.model), checkpoint(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenized = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    config.num_hidden_layers = min(options.layers or config.num_hidden_layers, config.num_hidden_layers)
    tokens = torch.tensor(tokenized(options.text.read_text(encoding="utf-8")))
    return config, weights, tokens[: len(tokens) // options.length * options.length].view(-1, options.length)


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train; return the losses of all ranks, and the tokens per second and memory of a rank, by name."""
    rank, ranks, on_gpu = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    config, weights, sequences = prepared(options, device)
    if options.batch % ranks or config.num_experts % ranks or not len(sequences) or config.tie_word_embeddings:
        raise SystemExit("expected ranks that divide --batch and experts, --length tokens of text, an untied lm_head")
    tokens, ep = options.batch // ranks * options.length, None
    if options.experts == "fusedmoe":
        ep = fm.ExpertParallel(
            engine=options.engine,
            max_tokens=tokens,
            capacity=options.capacity,
            batch_rows=options.batch_rows,
            dispatch_dtype=torch.float8_e4m3fn if options.dispatch_fp8 else None,
        )
        ep = ep.chosen_for(config.num_experts_per_tok)
    dtype = getattr(torch, options.weights) if on_gpu else torch.float32
    model = new_model(config, ep, device, dtype, options.compile)
    fill(model, weights)
    if options.draw_experts:
        draw_experts(model, device)
    experts = fm.expert_parallel.shards(model)
    others = [p for name, p in model.named_parameters() if name not in experts]
    groups = [{"params": group} for group in (others, [*experts.values()]) if group]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, fused=True)
    progress = {"step": 0, "sequences": 0}
    if options.resume is not None:
        state = fm.expert_parallel.state_dict(model, optimizer) | {"progress": progress}
        dcp.load(state, checkpoint_id=options.resume)
        fm.expert_parallel.load_state_dict(model, optimizer, state)
        progress = state["progress"]
    if progress["step"] >= options.steps:
        raise SystemExit(f"--steps: expected more than the {progress['step']} steps so far")
    router_logits: list[Tensor] = []
    indices: list[Tensor] = []  # of the chosen experts

    def record(gate: Any, args: Any, result: tuple[Tensor, Tensor, Tensor]) -> None:
        router_logits.append(result[0])
        indices.append(result[2])

    for block in moe_blocks(model):
        block.gate.register_forward_hook(record)
    if rank == 0:
        print(f"{config.num_hidden_layers} layers on {ranks} x {device.type}, {tokens} tokens per rank and step")
        print("experts of transformers" if ep is None else ep.settings())

    losses, rates, begun, since = [], [], time.perf_counter(), progress["step"]
    for step in range(progress["step"] + 1, options.steps + 1):
        # the text of a step depends on the batch of all ranks alone
        rows = (progress["sequences"] + torch.arange(options.batch)) % len(sequences)
        ids = sequences[rows.chunk(ranks)[rank]]
        if on_gpu:  # copied without waiting for the device, on which the step before may run
            ids = ids.pin_memory().to(device, non_blocking=True)
        router_logits.clear()
        indices.clear()
        loss = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=False).loss
        loss = loss + config.router_aux_loss_coef * balance_loss(router_logits, config.num_experts_per_tok)
        loss = loss / ranks  # gradients are sums over the ranks
        optimizer.zero_grad()
        loss.backward()
        fm.expert_parallel.clip_grad_norm_(model, 1.0)
        optimizer.step()
        losses.append(loss.detach())
        dist.all_reduce(losses[-1])
        progress = {"step": step, "sequences": progress["sequences"] + options.batch}
        if step % options.every == 0 or step == options.steps:
            now = losses[-1].item()  # waits for the device
            if ep is not None:
                ep.check()
            rates.append((step - since) * tokens / (time.perf_counter() - begun))
            peaks: list[Any] = [None] * ranks
            dist.all_gather_object(peaks, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0)
            if rank == 0:
                gib = ", ".join(f"{peak:.1f}" for peak in peaks)
                print(f"step {step}: loss {now:.6f}, {rates[-1]:,.0f} tokens/s per rank, GiB {gib}", flush=True)
            begun, since = time.perf_counter(), step
    busiest = imbalance(indices, config.num_experts)  # of the last step
    if rank == 0:
        print(f"the busiest rank has {busiest:.2f} times the mean of the chosen slots")
    if options.save is not None:
        dcp.save(fm.expert_parallel.state_dict(model, optimizer) | {"progress": progress}, checkpoint_id=options.save)
    if options.export is not None:
        export(model, options.export)
    steady = sorted(rates[1:] or rates)  # kernels are compiled before the first print
    return {
        "losses": torch.stack(losses).tolist(), "tokens_per_s": steady[len(steady) // 2], "peak_gib": peaks,
        "imbalance": busiest,
    }  # fmt: skip


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="the folder of a Qwen3-MoE; by default a model with random weights")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="of a model with random weights")
    parser.add_argument("--layers", type=int, help="keep the first layers only")
    parser.add_argument("--text", type=Path, default=TEXT, help="a text file (default: docs/composing.md)")
    parser.add_argument("--steps", type=int, default=20, help="in all, with those before --resume")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step on all ranks together")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--weights", choices=("float32", "bfloat16"), default="float32", help="on GPUs")
    parser.add_argument("--draw-experts", action="store_true", help="draw the experts of each token, for benchmarks")
    parser.add_argument("--experts", choices=("fusedmoe", "stock"), default="fusedmoe")
    parser.add_argument("--compile", action="store_true", help="compile attention, norms and the loss")
    parser.add_argument("--recipe", default="bf16", help="of fusedmoe's experts: bf16, fp8_block, ...")
    parser.add_argument("--engine", default="auto", help="of fm.ExpertParallel: auto, allgather, symmetric, alltoall")
    parser.add_argument("--dispatch-fp8", action="store_true", help="tokens travel between ranks as FP8 codes")
    parser.add_argument("--capacity", type=float, help="of fm.ExpertParallel, for less memory; an overflow is an error")
    parser.add_argument("--batch-rows", type=int, help="of fm.ExpertParallel, for less memory")
    parser.add_argument("--every", type=int, default=10, help="steps between two lines of output")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    parser.add_argument("--resume", type=Path, help="folder of such a checkpoint, to go on from it with its AdamW")
    parser.add_argument("--export", type=Path, help="folder for the model in the layout of transformers at the end")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parsed(argv)
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    how = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpu else "gloo", **how)
    try:
        with fm.recipe(options.recipe):
            result = train(options, device)
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)  # an orderly end would wait for the device, on which kernels may wait for other ranks
    if dist.get_rank() == 0:
        print(json.dumps(result))
    if not on_gpu:
        time.sleep(0.2)  # gloo's threads release the tensors of the last exchange; as Python ends, they would abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
