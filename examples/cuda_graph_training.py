"""Train a small MoE language model whose whole training step is one CUDA graph, with expert parallelism.

    torchrun --nproc-per-node 2 examples/cuda_graph_training.py   # one GPU per rank, or the CPU if there are too few
    python examples/cuda_graph_training.py                        # one process without expert parallelism
    python examples/cuda_graph_training.py --compare 20           # replays against eager steps, bit by bit

Forward, loss, backward, averages over ranks, clipping and AdamW are one launch per step. Such a graph needs

- static inputs: tokens, targets and the learning rate are copied into tensors that the graph reads;
- a warm-up on a side stream: it compiles kernels, and makes communicators, buffers and the state of the optimizer;
- ``max_tokens``: without it, the hosts of the ranks agree on the number of tokens in each call;
- a capturable optimizer, which counts its steps on the GPU;
- no host synchronisation: no ``.item()``, no branch on the value of a tensor. Loss and load are read after a replay.

Each replay routes its own tokens. The graph has the addresses of parameters and of the optimizer's state: load a
checkpoint into them. On a CPU all steps are eager.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedmoe as fm
from fusedmoe.commands.demo.data import VOCABULARY, load_split, windows

TOP_K, BALANCE, MOST_NORM, PEAK, WARM_UP = 2, 0.01, 1.0, 2e-3, 20
HIDDEN, HEADS, INTERMEDIATE, EXPERTS_PER_RANK, CONTEXT, BATCH = (
    (512, 8, 256, 8, 256, 16) if torch.cuda.is_available() else (64, 4, 64, 4, 64, 8)
)
Step = Callable[[], tuple[Tensor, Tensor]]  # trains one step; returns this rank's loss, and its load (layers, E)


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + MoE(norm(x))``."""

    def __init__(self, experts: int, ep: fm.ExpertParallel | None) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.moe = fm.MoE(HIDDEN, INTERMEDIATE, experts, TOP_K, expert_parallel=ep)

    def forward(self, x: Tensor) -> tuple[Tensor, fm.MoEStats]:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y, stats = self.moe(self.moe_norm(x).to(q.dtype), return_stats=True)  # the router is fused for bf16 tokens
        return x + y, stats


class Model(nn.Module):
    def __init__(self, layers: int, experts: int, ep: fm.ExpertParallel | None) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.ModuleList(Block(experts, ep) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[fm.MoEStats]]:
        x, stats = self.embedding(tokens) + self.position.weight, []
        for block in self.blocks:
            x, of_layer = block(x)
            stats.append(of_layer)
        return self.head(self.norm(x)), stats


class Trainer:
    """The model, the optimizer, and the static inputs of a step: the token ids and targets (2, B, S), and ``lr``."""

    def __init__(self, layers: int, experts: int, device: torch.device, ep: fm.ExpertParallel | None) -> None:
        self.ep, self.rank, self.ranks = ep, *((0, 1) if ep is None else (ep.rank, ep.ranks))
        torch.manual_seed(0)  # on all ranks: they draw the same values, except that each has its own experts
        self.model = Model(layers, experts, ep).to(device)
        self.ids = torch.zeros(2, BATCH, CONTEXT, dtype=torch.int64, device=device)
        self.lr = torch.zeros((), device=device)
        options = {"lr": self.lr, "fused": True, "capturable": device.type == "cuda"}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self._initial = [p.detach().clone() for p in self.model.parameters()]

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Compute the gradients of the mean loss of all ranks; return this rank's loss and load."""
        with torch.autocast(self.ids.device.type, torch.bfloat16, enabled=self.ids.is_cuda):
            logits, stats = self.model(self.ids[0])
        loss = F.cross_entropy(logits.float().flatten(0, 1), self.ids[1].flatten())
        (loss + BALANCE * torch.stack([s.load_balancing_loss for s in stats]).sum()).backward()
        if self.ep is not None:
            experts = fm.expert_parallel.shards(self.model)
            torch._foreach_div_([p.grad for p in experts.values()], self.ranks)  # sums over all ranks already
            dense = [p.grad for name, p in self.model.named_parameters() if name not in experts]
            mean = self.ep.sum_over_ranks(torch.cat([grad.flatten() for grad in dense])) / self.ranks
            parts = mean.split([grad.numel() for grad in dense])
            torch._foreach_copy_(dense, [part.view_as(grad) for part, grad in zip(parts, dense, strict=True)])
        return loss.detach(), torch.stack([s.load for s in stats])

    def step(self) -> tuple[Tensor, Tensor]:
        """Train one step, without a host synchronisation; return this rank's loss and load."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, load = self.gradients()
        fm.expert_parallel.clip_grad_norm_(self.model, MOST_NORM)
        self.optimizer.step()
        return loss, load

    def captured(self) -> Step:
        """Return `step` as a CUDA graph, whose results are the same tensors in every replay."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self.step()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return results

        return replay

    @torch.no_grad()
    def begin_again(self) -> None:
        """Undo all steps, those of the warm-up too, in place: the graph has the addresses."""
        torch._foreach_copy_([*self.model.parameters()], self._initial)
        for state in self.optimizer.state.values():
            torch._foreach_zero_([*state.values()])

    def run(self, step: Step, steps: int, keep: bool) -> list[list[Tensor]]:
        """Train on random windows of the text, others on each rank; ``keep`` the loss and parameters of each step."""
        text, kept, begun = load_split().train, [], time.perf_counter()
        for i in range(steps):
            generator = torch.Generator().manual_seed(i * self.ranks + self.rank)
            starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
            self.ids.copy_(torch.stack(windows(text, starts, CONTEXT)))
            self.lr.fill_(PEAK * min(1.0, (i + 1) / WARM_UP))
            loss, load = step()
            if keep:
                kept.append([t.detach().clone() for t in (loss, *self.model.parameters())])
            if i % max(1, steps // 10) == 0 or i == steps - 1:
                loss, load = self.sum_over_ranks(loss) / self.ranks, self.sum_over_ranks(load)
                busiest, seconds = (load.max() / load.double().mean()).item(), time.perf_counter() - begun
                if self.rank == 0:
                    per_step = f"{1e3 * seconds / (i + 1):.1f} ms per step"
                    print(f"step {i:4}: loss {loss:.4f}, busiest expert {busiest:.2f}x its share, {per_step}")
        return kept

    def sum_over_ranks(self, t: Tensor) -> Tensor:
        return t if self.ep is None else self.ep.sum_over_ranks(t)


def train(options: argparse.Namespace, device: torch.device, ep: fm.ExpertParallel | None) -> int:
    """Train, or compare; return the exit code. The graph is deleted before the communicators that it uses."""
    if device.type == "cuda":  # a capture must not meet nodes of autograd that were made on the default stream
        torch.cuda.set_stream(torch.cuda.Stream())
    trainer = Trainer(options.layers, EXPERTS_PER_RANK * (1 if ep is None else ep.ranks), device, ep)
    steps, compare = options.compare or options.steps, options.compare > 0
    eager = trainer.run(trainer.step, steps, keep=True) if compare else []
    step = trainer.step if options.eager or device.type == "cpu" else trainer.captured()
    trainer.begin_again()
    replayed = trainer.run(step, steps, keep=compare)
    pairs = [zip(*pair, strict=True) for pair in zip(eager, replayed, strict=True)]
    differs = [any(not a.view(torch.int32).equal(b.view(torch.int32)) for a, b in pair) for pair in pairs]
    count = int(trainer.sum_over_ranks(torch.tensor(differs, device=device).int()).count_nonzero())
    if compare and trainer.rank == 0:
        print(f"{count} of {steps} steps differ in a bit of the loss or of a parameter")
    return int(count > 0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--recipe", default="bf16", help="of the experts: bf16, fp8_block, ...")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    parser.add_argument("--compare", type=int, default=0, metavar="N", help="compare N replays with N eager steps")
    options = parser.parse_args(argv)
    distributed, ep = "RANK" in os.environ, None
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if distributed:
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
        ep = fm.ExpertParallel(engine="symmetric" if on_gpu else "allgather", max_tokens=BATCH * CONTEXT)
    # other backward passes of attention add in any order
    with fm.recipe(options.recipe), sdpa_kernel(SDPBackend.MATH) if options.compare else nullcontext():
        code = train(options, torch.device("cuda" if on_gpu else "cpu"), ep)
    if distributed:
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
