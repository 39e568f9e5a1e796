"""Train a small model whose experts are distributed over the ranks: expert parallelism.

    torchrun --nproc-per-node 2 examples/expert_parallel.py   # one GPU per rank, or the CPU if there are too few
    python examples/expert_parallel.py                        # one rank with all experts

Each rank has its own tokens, and another number of them in each step. Each rank has a part of the experts of each
layer; all other parameters are the same on every rank. At the end, rank 0 trains the same model alone, with all experts
and the tokens of all ranks, and prints by how much the last loss differs.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn
from torch import distributed as dist

import fusedmoe as fm

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = 64, 32, 8, 2, 3


class Model(nn.Module):
    """Residual MoE layers; ``expert_parallel`` is their only argument for expert parallelism."""

    def __init__(self, expert_parallel: fm.ExpertParallel | None = None) -> None:
        super().__init__()
        sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": EXPERTS, "top_k": TOP_K}
        self.layers = nn.ModuleList(
            fm.MoE(**sizes, balance_bias=True, expert_parallel=expert_parallel) for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the output, and the rows per expert of each layer: those of the tokens of this rank."""
        loads = []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y, stats = layer(norm(x), return_stats=True)
            x = x + y
            loads.append(stats.load)
        return x, loads


def is_shard(name: str) -> bool:
    """Whether a parameter of this name is the part of this rank; all others are the same on every rank."""
    return ".experts." in name


def new_model(ep: fm.ExpertParallel | None, device: torch.device, dtype: torch.dtype) -> Model:
    """Return the model, with the same values for any number of ranks: each rank takes its experts of the whole."""
    torch.manual_seed(0)
    values = Model().state_dict()
    if ep is not None:
        values = {name: t.chunk(ep.ranks)[ep.rank] if is_shard(name) else t for name, t in values.items()}
    model = Model(ep)
    model.load_state_dict(values)
    return model.to(device, dtype)


def new_optimizer(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)  # unlike Adam it sees the scale of a gradient


def batch(step: int, rank: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the tokens of a rank in a step, and what the model should learn: one linear map for each cluster."""
    generator = torch.Generator().manual_seed(1)
    centers = 2 * torch.randn(EXPERTS, HIDDEN, generator=generator)
    maps = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    generator.manual_seed(1000 * step + rank + 2)
    tokens = 96 + 16 * ((step + rank) % 5)
    cluster = torch.randint(EXPERTS, (tokens,), generator=generator)
    x = centers[cluster] + torch.randn(tokens, HIDDEN, generator=generator)
    target = x + torch.einsum("th,tgh->tg", x, maps[cluster])
    return x.to(device, dtype), target.to(device, dtype)


def train_step(
    model: Model, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor, ep: fm.ExpertParallel | None
) -> tuple[Tensor, Tensor]:
    """Return the loss, the mean over the tokens of all ranks, and the rows per expert of the first layer."""
    ranks = 1 if ep is None else ep.ranks
    total = torch.tensor(x.shape[0], device=x.device)
    if ep is not None:
        total = ep.sum_over_ranks(total)
    y, loads = model(x)
    # the mean over the ranks of this loss is the mean over all tokens, although the ranks have different numbers
    loss = (y - target).float().square().mean(-1).sum() * ranks / total
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach() / ranks
    if ep is not None:
        for name, parameter in model.named_parameters():
            # experts have seen the tokens of all ranks: their gradients are sums over the ranks already
            total_gradient = parameter.grad if is_shard(name) else ep.sum_over_ranks(parameter.grad)
            parameter.grad = total_gradient / ranks
        loss, loads = ep.sum_over_ranks(loss), [ep.sum_over_ranks(load) for load in loads]
    optimizer.step()
    for layer, load in zip(model.layers, loads, strict=True):
        layer.router.update_bias(load, rate=0.01)  # balances the experts; every rank computes the same bias
    return loss, loads[0]


def start() -> tuple[torch.device, torch.dtype]:
    """Join the process group that torchrun describes, or one of this process alone; return where to compute."""
    alone = "RANK" not in os.environ
    here = 0 if alone else int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpu = gpus >= (1 if alone else int(os.environ["LOCAL_WORLD_SIZE"]))
    device, dtype = (torch.device("cuda", here), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    if on_gpu:
        torch.cuda.set_device(device)
    how = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
    dist.init_process_group("nccl" if on_gpu else "gloo", **how)
    return device, dtype


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args(argv).steps
    device, dtype = start()
    try:
        ep = fm.ExpertParallel()
        model = new_model(ep, device, dtype)
        optimizer = new_optimizer(model)
        if ep.rank == 0:
            print(f"{ep} on {device}: {ep.local_experts(EXPERTS)} of {EXPERTS} experts per rank")
        losses = []
        for step in range(steps):
            loss, load = train_step(model, optimizer, *batch(step, ep.rank, device, dtype), ep)
            losses.append(loss.item())
            if ep.rank == 0:
                print(f"step {step:2}: loss {losses[-1]:.4f}, rows per expert {load.tolist()}")
        alone = []
        if ep.rank == 0:
            model = new_model(None, device, dtype)
            optimizer = new_optimizer(model)
            for step in range(steps):
                xs, targets = zip(*[batch(step, rank, device, dtype) for rank in range(ep.ranks)], strict=True)
                loss, _ = train_step(model, optimizer, torch.cat(xs), torch.cat(targets), None)
                alone.append(loss.item())
            print(f"one process with all tokens: loss {alone[-1]:.4f}, difference {abs(alone[-1] - losses[-1]):.1e}")
    finally:
        dist.destroy_process_group()
    return {"losses": losses, "alone": alone}


if __name__ == "__main__":
    main()
