"""The optimizer, the training loop with its checkpoints, and the evaluation on held-out text."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedmoe.base.errors import InputError
from fusedmoe.commands.demo.data import Split, batches, windows
from fusedmoe.commands.demo.model import ByteTransformer
from fusedmoe.commands.demo.options import CHANGEABLE, Job, job_of
from fusedmoe.commands.options import flag

BETAS, WEIGHT_DECAY, CLIP_NORM = (0.9, 0.95), 0.1, 1.0
WARM_UP_SHARE = FINAL_SHARE = 0.05
BALANCE, Z = 0.01, 1e-4  # weights of the routers' losses
LINES, EVALUATIONS = 24, 8  # per run
CHECKPOINT = "checkpoint.pt"
RECORDED = ("step", "seconds", "losses", "loads", "evaluations")  # of a `Trainer`
BYTES_AT_A_TIME = 8192  # per forward pass of an evaluation


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step (from 0): linear warm-up, then cosine decay to a twentieth of the peak."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class MasterAdamW:
    """AdamW on float32 master weights, with gradient clipping; matrices have weight decay.

    A bfloat16 weight has an 8-bit significand. Updates below 1/512 of the weight, as most are, would be lost to
    rounding. Updates go to a float32 copy, which is then rounded into the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights: list[torch.Tensor] = list(model.parameters())
        self._masters = [w.detach().to(torch.float32, copy=True).requires_grad_() for w in self._weights]
        matrices, vectors = ([m for m in self._masters if (m.ndim >= 2) is wanted] for wanted in (True, False))
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, betas=BETAS, fused=True)

    def step(self, learning_rate: float) -> torch.Tensor:
        """Update the model from its gradients, free them, and return their norm before clipping, a 0-d tensor."""
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        norm = nn.utils.clip_grad_norm_(self._masters, CLIP_NORM)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the moments and the masters."""
        return {"adamw": self._adamw.state_dict(), "masters": self._masters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            torch._foreach_copy_(self._masters, state["masters"])


class Trainer:
    """A model in training: the optimizer, the completed steps, and their losses, loads and evaluations."""

    def __init__(self, job: Job, split: Split) -> None:
        self.job, self._split = job, split
        longest = min(len(split.train), len(split.held_out)) - 1
        if job.context > longest:
            raise InputError(f"--context {job.context}: the held-out text allows at most {longest}")
        torch.manual_seed(job.seed)
        self.model = ByteTransformer(job)
        self._optimizer = MasterAdamW(self.model)
        self._starts = batches(split.train, job)
        self.step = 0
        self.seconds = 0.0  # spent in training steps
        self.losses: list[float] = []  # training loss per step, in bits per byte
        self.loads: list[torch.Tensor] = []  # rows per expert, per step: (layers, experts) on the CPU
        self.evaluations: list[tuple[int, float]] = []  # completed steps, and bits per byte on the held-out text

    def train(self, steps: int) -> None:
        """Run these steps; the host reads their results after the last one, since that waits for a GPU.

        `InputError` is raised if a loss is not finite.
        """
        begin = time.perf_counter()
        results = [self._train_step() for _ in range(steps)]
        losses = torch.stack([loss for loss, _ in results]).tolist()
        self.seconds += time.perf_counter() - begin
        self.losses += losses
        self.loads += [load.cpu() for _, load in results]
        if not all(math.isfinite(loss) for loss in losses):
            raise InputError(f"--lr {self.job.lr:g}: no finite loss up to step {self.step}; choose a lower one")

    def _train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss, NaN where the gradients are not finite, and the load."""
        inputs, targets = windows(self._split.train, self._starts[self.step], self.job.context)
        logits, stats = self.model(inputs.to(self.job.device))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.to(self.job.device).flatten())
        balance = torch.stack([layer.load_balancing_loss for layer in stats]).sum()
        z = torch.stack([layer.z_loss for layer in stats]).sum()
        (loss + (BALANCE * balance + Z * z)).backward()
        norm = self._optimizer.step(learning_rate(self.step, self.job.steps, self.job.lr))
        self.step += 1
        return loss.detach() / math.log(2) + 0 * norm, torch.stack([layer.load for layer in stats])

    def evaluate(self) -> float:
        """Return and record the bits per byte on the held-out text."""
        bits = bits_per_byte(self.model, self._split.held_out)
        self.evaluations.append((self.step, bits))
        return bits

    def save(self, folder: Path) -> None:
        """Write the checkpoint; an interruption leaves the previous one."""
        state = {name: getattr(self, name) for name in RECORDED}
        state |= {"job": dataclasses.asdict(self.job), "model": self.model.state_dict()}
        state |= {"optimizer": self._optimizer.state_dict(), "random": torch.get_rng_state()}
        temporary = folder / f".{CHECKPOINT}.tmp"
        torch.save(state, temporary)
        os.replace(temporary, folder / CHECKPOINT)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; on a CPU, bit for bit."""
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        for name in RECORDED:
            setattr(self, name, state[name])


def resumed(folder: Path, given: dict[str, Any]) -> tuple[Job, dict[str, Any]]:
    """Return the job of the folder's checkpoint, with the given fields that may change, and the checkpoint."""
    path = folder / CHECKPOINT
    if not path.exists():
        raise InputError(f"--resume: no checkpoint at {path}; name its folder with --output")
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, value in given.items():
        if name not in CHANGEABLE and value != state["job"][name]:
            raise InputError(f"{flag(name)} {value}: the checkpoint was made with {flag(name)} {state['job'][name]}")
    job = job_of(state["job"] | given)
    if job.steps < state["step"]:
        raise InputError(f"--steps {job.steps}: the checkpoint has {state['step']} steps already")
    return job, state


def train(trainer: Trainer, folder: Path, show: Callable[[str], None] = print) -> None:
    """Train to the job's last step; show some two dozen lines, and evaluate and save eight times and at the end."""
    job, steps = trainer.job, trainer.job.steps
    every_line, every_evaluation = max(1, steps // LINES), max(1, math.ceil(steps / EVALUATIONS))
    while trainer.step < steps:
        before, seconds = trainer.step, trainer.seconds
        to_line, to_evaluation = (every - before % every for every in (every_line, every_evaluation))
        trainer.train(min(to_line, to_evaluation, steps - before))
        done, at = trainer.step - before, f"step {trainer.step:{len(str(steps))}}/{steps}"
        rate = done * job.batch * job.context / max(trainer.seconds - seconds, 1e-9)
        load = torch.stack(trainer.loads[-done:]).double().sum(dim=(0, 1))
        show(
            f"{at}  loss {sum(trainer.losses[-done:]) / done:.2f} bits/byte  {rate:,.0f} tokens/s  "
            f"busiest expert {load.max() / load.mean():.2f}x its share"
        )
        if trainer.step % every_evaluation == 0 or trainer.step == steps:
            bits = trainer.evaluate()
            trainer.save(folder)
            show(f"{at}  held-out {bits:.3f} bits/byte")


@torch.no_grad()
def bits_per_byte(model: ByteTransformer, text: torch.Tensor) -> float:
    """Return ``-mean log2 p(next byte)`` over the text (bytes,) uint8; every byte except the first is predicted once.

    The windows do not overlap, so the first bytes of a window have little context. The bigram model is scored on the
    same bytes.
    """
    context, device = model.job.context, model.embedding.weight.device
    starts = torch.arange(0, len(text) - 1, context, dtype=torch.int64, device="cpu")
    whole = starts[starts + context < len(text)]
    groups = [windows(text, group, context) for group in whole.split(max(1, BYTES_AT_A_TIME // context)) if len(group)]
    if len(whole) < len(starts):  # the last window is shorter
        groups.append(windows(text, starts[-1:], len(text) - 1 - int(starts[-1])))
    nats = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    for inputs, targets in groups:
        logits = model(inputs.to(device))[0].float().flatten(0, 1)
        nats += F.cross_entropy(logits, targets.to(device).flatten(), reduction="sum")
    model.train()
    return float(nats) / (len(text) - 1) / math.log(2)
