"""Optimizer steps on the text, with the time and the loss of each."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.train.models import Model, initialize
from benchmarks.train.variants import Ready

RATE, WARM_UP = 3e-4, 20  # AdamW's learning rate, reached linearly in this many steps
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0


class Clock:
    """Points in time of a device, without waiting for it: CUDA events, or wall time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Return the time between two points, after the device has passed both."""
        return float(start.elapsed_time(end)) if self.on_gpu else (end - start) * 1e3


@dataclass(frozen=True)
class Job:
    """A model with its optimizer and its text, which all variants train on from the same weights."""

    of: Model
    model: Any
    optimizer: torch.optim.Optimizer
    text: Tensor  # (n, length)
    clock: Clock

    @classmethod
    def of_model(cls, of: Model, model: Any, text: Tensor) -> Job:
        device = next(model.parameters()).device
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY, fused=device.type == "cuda"
        )
        return cls(of, model, optimizer, text.to(device), Clock(device))

    def restart(self, seed: int) -> None:
        """Draw new weights, and forget the state of the optimizer."""
        self.optimizer.zero_grad()
        self.optimizer.state.clear()
        initialize(self.model, self.of.std, seed)


@dataclass
class Run:
    """Steps of a variant."""

    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)


def train(job: Job, ready: Ready, steps: int, seed: int = 0) -> Run:
    """Train from new weights. The host does not wait for the device before the last step.

    `seed` determines the weights and the order of the text. The loss of a step is the mean over its micro-batches, and
    includes the router's.
    """
    of, clock = job.of, job.clock
    job.restart(seed)
    order = torch.randperm(len(job.text), generator=torch.Generator().manual_seed(seed))
    text = job.text[order.to(job.text.device)]
    losses, points = [], []
    taken = 0
    for step in range(steps):
        for group in job.optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP)
        begin = clock.now()
        total = torch.zeros((), device=job.text.device)
        for _ in range(of.micro_batches):
            ids = text[taken : taken + of.sequences]
            taken = (taken + of.sequences) % (len(text) - of.sequences + 1)
            with ready.context():
                loss = ready.call(input_ids=ids, labels=ids).loss / of.micro_batches
                loss.backward()
            total += loss.detach()
        ready_to_update = clock.now()
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), CLIP)
        job.optimizer.step()
        job.optimizer.zero_grad()
        losses.append(total)
        points.append((begin, ready_to_update, clock.now()))
    if clock.on_gpu:
        torch.cuda.synchronize()
    return Run(
        [round(float(loss), 4) for loss in losses],
        [clock.ms(begin, end) for begin, _, end in points],
        [clock.ms(update, end) for _, update, end in points],
    )


def moe_ms(job: Job, ready: Ready, repeats: int = 3) -> float | None:
    """Return the time of the MoE blocks in a micro-batch, forward and backward; None without such blocks.

    It is the time between events around each block, so it includes gaps between launches.
    """
    blocks = [module for module in ready.model.modules() if hasattr(module, "experts")]
    if not blocks:
        return None
    points: list[tuple[Any, Any]] = []
    begun: dict[Any, Any] = {}
    clock = job.clock

    def begin(block: Any, *_: Any) -> None:
        begun[block] = clock.now()

    def end(block: Any, *_: Any) -> None:
        points.append((begun.pop(block), clock.now()))

    handles = []
    for block in blocks:
        handles += [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]
        handles += [block.register_full_backward_pre_hook(begin), block.register_full_backward_hook(end)]
    times = []
    ids = job.text[: job.of.sequences]
    for _ in range(repeats):
        points.clear()
        with ready.context():
            ready.call(input_ids=ids, labels=ids).loss.backward()
        if clock.on_gpu:
            torch.cuda.synchronize()
        times.append(sum(clock.ms(*pair) for pair in points))
    for handle in handles:
        handle.remove()
    job.optimizer.zero_grad()
    return statistics.median(times)
