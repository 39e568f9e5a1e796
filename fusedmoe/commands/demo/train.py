"""The training loop, and the state from which a run resumes bit for bit."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fusedmoe.commands.demo import checkpoint
from fusedmoe.commands.demo.data import Batches, Split
from fusedmoe.commands.demo.errors import DemoError
from fusedmoe.commands.demo.evaluate import bits_per_byte
from fusedmoe.commands.demo.history import History
from fusedmoe.commands.demo.model import ByteTransformer, ModelConfig
from fusedmoe.commands.demo.optimizer import MasterAdamW, learning_rate
from fusedmoe.commands.demo.options import DTYPES, Call, Job
from fusedmoe.commands.demo.progress import Progress
from fusedmoe.commands.demo.signals import StopSignals

CUDA_STEPS_AHEAD = 10  # steps between reads of losses and loads, each of which synchronises with the GPU


class _StepResult(NamedTuple):
    loss_bits: torch.Tensor
    gradient_norm: torch.Tensor
    load: torch.Tensor


class Trainer:
    """A model in training, with the optimizer, the data stream and the record of the run.

    Parameters
    ----------
    job : Job
        Sizes, data order and optimisation.
    train_text : Tensor
        (bytes,) uint8 on the CPU.
    """

    def __init__(self, job: Job, train_text: torch.Tensor) -> None:
        self.job = job
        self.device = torch.device(job.device)
        torch.manual_seed(job.seed)
        config = ModelConfig(**{item.name: getattr(job, item.name) for item in dataclasses.fields(ModelConfig)})
        self.model = ByteTransformer(config, self.device, DTYPES[job.dtype])
        self.optimizer = MasterAdamW(self.model, job.weight_decay)
        self.batches = Batches(train_text, job.batch, job.context, job.seed)
        self.history = History()
        self.step = 0
        self.seconds = 0.0  # spent in training steps, over all calls
        self._unread: list[_StepResult] = []

    def train_step(self) -> None:
        """Run one step; :meth:`read_results` reads its loss and load later."""
        started = time.perf_counter()
        inputs, targets = (bytes_BS.to(self.device) for bytes_BS in self.batches.next())
        logits, routing = self.model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        router_loss = self.job.aux_loss * routing.load_balancing_loss.sum() + self.job.z_loss * routing.z_loss.sum()
        (loss + router_loss).backward()
        norm = self.optimizer.step(learning_rate(self.step, self.job.steps, self.job.lr))
        if self.job.router == "sigmoid":
            self.model.update_router_biases(routing.load, self.job.bias_rate)
        self._unread.append(_StepResult(loss.detach() / math.log(2), norm, routing.load))
        self.step += 1
        self.seconds += time.perf_counter() - started

    @property
    def results_due(self) -> bool:
        """Whether to read the results: after each step on a CPU, after CUDA_STEPS_AHEAD steps on a GPU."""
        return self.device.type == "cpu" or len(self._unread) >= CUDA_STEPS_AHEAD

    def read_results(self) -> None:
        """Move the unread results into the history.

        Raises
        ------
        DemoError
            When a loss or a gradient is not finite.
        """
        if not self._unread:
            return
        started = time.perf_counter()
        losses = torch.stack([result.loss_bits for result in self._unread]).tolist()
        norms = torch.stack([result.gradient_norm for result in self._unread]).tolist()
        loads = torch.stack([result.load for result in self._unread]).to(device="cpu", dtype=torch.int32)
        self._unread.clear()
        self.seconds += time.perf_counter() - started
        first = self.step - len(losses) + 1
        for step, loss, norm in zip(range(first, self.step + 1), losses, norms, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise DemoError(
                    f"step {step} gave a loss of {loss} and a gradient norm of {norm}; train again with an --lr "
                    f"below {self.job.lr:g} (the last checkpoint is from before that step)"
                )
        self.history.losses.extend(losses)
        self.history.loads.extend(loads)

    def state(self) -> checkpoint.State:
        """Return the state from which :meth:`load_state` resumes bit for bit."""
        self.read_results()
        return {
            "job": dataclasses.asdict(self.job),
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state(),
            "data": self.batches.state(),
            "random": {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            },
            "history": self.history.state(),
            "made_with": made_with(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned.

        Raises
        ------
        DemoError
            When the state does not fit this job's sizes.
        """
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state(state["optimizer"])
            self.batches.load_state(state["data"])
            self.history = History.from_state(state["history"])
            self.step = int(state["step"])
            self.seconds = float(state["seconds"])
            torch.set_rng_state(state["random"]["cpu"])
            if self.device.type == "cuda" and state["random"]["cuda"] is not None:
                torch.cuda.set_rng_state(state["random"]["cuda"], self.device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise DemoError(f"the checkpoint does not fit the model ({reason}); start without --resume") from error


def made_with() -> dict[str, Any]:
    """Return the versions that affect the last bits of a result."""
    return {"torch": str(torch.__version__)}


def train(trainer: Trainer, split: Split, call: Call, progress: Progress, stop: StopSignals) -> None:
    """Train until the job's last step, the call's ``stop_at`` or a stop signal, and save that step.

    By default the steps of evaluations and checkpoints depend on the job alone, so that an interrupted run evaluates
    at the same steps as an uninterrupted one.
    """
    job = trainer.job
    eval_interval = call.eval_interval or max(1, math.ceil(job.steps / 8))
    checkpoint_interval = call.checkpoint_interval or max(1, math.ceil(job.steps / 8))
    last_step = min(job.steps, call.stop_at or job.steps)
    saved_step = trainer.step if call.resume else -1
    while True:
        due = trainer.step >= last_step or stop.requested is not None
        if saved_step != trainer.step and (due or trainer.step % checkpoint_interval == 0):
            checkpoint.save(call.output, trainer.state())  # also before the first step, to find a full disk early
            saved_step = trainer.step
        if due:
            return
        trainer.train_step()
        evaluate = trainer.step % eval_interval == 0 or trainer.step == job.steps
        if trainer.results_due or evaluate:
            trainer.read_results()
            progress.update(trainer.step, trainer.seconds, trainer.history)
        if evaluate:
            bits = bits_per_byte(trainer.model, split.held_out)
            trainer.history.evaluations.append((trainer.step, bits))
            progress.evaluated(trainer.step, bits)
