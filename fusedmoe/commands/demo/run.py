"""The whole demo: read the text, show the plan, train, evaluate, write the results."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import fusedmoe as fm
from fusedmoe.commands.demo import checkpoint, report
from fusedmoe.commands.demo.data import Split, bigram_bits_per_byte, load_split
from fusedmoe.commands.demo.errors import DemoError, InterruptedRunError, UsageError
from fusedmoe.commands.demo.evaluate import bits_per_byte, sample
from fusedmoe.commands.demo.files import make_folder
from fusedmoe.commands.demo.options import DTYPES, Call, Job, check_device, flag, job_of
from fusedmoe.commands.demo.progress import progress_on
from fusedmoe.commands.demo.signals import StopSignals
from fusedmoe.commands.demo.train import Trainer, made_with, train
from fusedmoe.numerics.recipes import BF16

PROMPT = b"The "
CHANGEABLE = ("steps", "device", "threads")  # --resume takes the other fields of the job from the checkpoint
ADDED_LATER = {"recipe": BF16.name}  # fields that older checkpoints lack, and the values of their runs


def standard_output() -> Console:
    """Return the demo's default console."""
    return Console(highlight=False, soft_wrap=True, emoji=False, markup=False)


def run(given: dict[str, Any], call: Call, console: Console | None = None, resume_with: str | None = None) -> int:
    """Run the demo and return the exit status.

    Parameters
    ----------
    given : dict
        The chosen fields of :class:`~fusedmoe.commands.demo.options.Job`; the checkpoint or the defaults give the
        others.
    call : Call
        The options of this call.
    console : rich.console.Console, optional
        The output; by default the standard output.
    resume_with : str, optional
        The command that resumes a stopped run; by default that of :func:`resume_command`.

    Raises
    ------
    DemoError
        For every error that the user can correct.
    """
    started = time.perf_counter()
    console = console or standard_output()
    state = checkpoint.load(call.output) if call.resume else None
    job = job_of(given) if state is None else resumed_job(state, given)
    split = load_split()
    check_text(job, split)
    make_folder(call.output)
    try:
        with reproducible(job), fm.recipe(job.recipe):
            return _run(job, call, state, split, console, started, resume_with or resume_command(call))
    except fm.InputError as error:
        if job.recipe == BF16.name:
            raise  # the options were checked, so this is a bug of the demo
        raise UsageError(f"--recipe {job.recipe}: {error}") from error
    except RuntimeError as error:  # the CPU allocator raises no torch.OutOfMemoryError
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            message = f"out of memory on {job.device}; choose a smaller --batch, --context, --hidden or --layers"
            raise DemoError(message) from error
        raise


def _run(
    job: Job,
    call: Call,
    state: checkpoint.State | None,
    split: Split,
    console: Console,
    started: float,
    resume_with: str,
) -> int:
    bigram_bits = bigram_bits_per_byte(split.train, split.held_out)
    trainer = Trainer(job, split.train)
    describe(trainer, split, bigram_bits, console)
    if state is not None:
        trainer.load_state(state)
        describe_resumption(trainer, state, call, console)
    elif (previous := checkpoint.set_aside(call.output)) is not None:
        console.print(f"The checkpoint of an earlier run is kept as {previous}.")

    if call.stop_at is not None and call.stop_at < trainer.step:
        raise UsageError(f"--stop-at {call.stop_at}: the checkpoint has {trainer.step} steps already")
    already_done = trainer.step
    with StopSignals() as stop:
        if trainer.step < job.steps:
            with progress_on(console, trainer.step, job.steps, job.batch * job.context) as progress:
                train(trainer, split, call, progress, stop)
    if stop.requested is not None:
        message = f"stopped after step {trainer.step} of {job.steps}, saved in {call.output / checkpoint.NAME}"
        raise InterruptedRunError(f"{message}; continue with: {resume_with}", stop.requested)
    if trainer.step < job.steps:
        console.print(f"Stopped at --stop-at {trainer.step} of {job.steps} steps; continue with: {resume_with}")
        return 0

    finish(trainer, split, bigram_bits, call, console, trainer.step - already_done, started)
    return 0


def resumed_job(state: checkpoint.State, given: dict[str, Any]) -> Job:
    """Return the checkpoint's job with the given :data:`CHANGEABLE` fields.

    Raises
    ------
    UsageError
        When another given field differs from the checkpoint's.
    """
    known = {item.name for item in dataclasses.fields(Job)}
    saved = state.get("job")
    if not isinstance(saved, dict) or set(ADDED_LATER | saved) != known:
        raise UsageError("the checkpoint was written by another version of the demo; start without --resume")
    saved = ADDED_LATER | saved
    for name, value in given.items():
        if name not in CHANGEABLE and value != saved[name]:
            raise UsageError(
                f"{flag(name)} {value}: the checkpoint was made with {flag(name)} {saved[name]}; "
                f"leave out the option, or start again without --resume"
            )
    if given.get("steps", saved["steps"]) < state["step"]:
        raise UsageError(f"--steps {given['steps']}: the checkpoint has {state['step']} steps already")
    if "device" not in given:
        try:
            check_device(saved["device"])
        except UsageError as error:
            raise UsageError(
                f"the checkpoint is from {saved['device']}, which this machine lacks; add --device cpu"
            ) from error
    job = Job(**(saved | given))
    job.check()
    return job


def check_text(job: Job, split: Split) -> None:
    """Raise a :class:`UsageError` if the text is shorter than the model's context."""
    longest = min(len(split.train), len(split.held_out)) - 1
    if job.context > longest:
        raise UsageError(f"--context {job.context}: the held-out text allows at most {longest}")


def describe(trainer: Trainer, split: Split, bigram_bits: float, console: Console) -> None:
    """Print the text, the model, the training job and the plan of the experts."""
    job = trainer.job
    total, active = trainer.model.parameter_counts()
    threads = "1 thread" if job.threads == 1 else f"{job.threads} threads"
    where = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else threads
    console.print(
        f"Text: Python's reference pages, each paragraph once: {len(split.train):,} bytes to train on, "
        f"{len(split.held_out):,} held out."
    )
    console.print(f"Baseline: a byte-bigram model, {bigram_bits:.3f} bits per byte on the held-out text.")
    console.print(
        f"Model: {job.layers} layers, hidden {job.hidden}, {job.heads} heads, {job.experts} experts of "
        f"{job.intermediate} ({job.activation}), {job.router} router, top {job.top_k}: {total:,} parameters, "
        f"{active:,} of them active per token."
    )
    console.print(
        f"Training: {job.steps:,} steps of {job.batch} x {job.context} bytes, {job.dtype}, "
        f"recipe {job.recipe}{' (no quantization)' if job.recipe == BF16.name else ''}, seed {job.seed}, "
        f"on {job.device} ({where})."
    )
    shape = (job.batch, job.context, job.hidden)
    hidden = torch.zeros(shape, device=trainer.device, dtype=DTYPES[job.dtype], requires_grad=True)
    console.print("\nHow the experts of a layer run:")
    console.print(str(trainer.model.typed_blocks[0].moe.explain(hidden)))
    console.print()


def describe_resumption(trainer: Trainer, state: checkpoint.State, call: Call, console: Console) -> None:
    """Print the step from which the run resumes, and the changes that prevent bitwise equal results."""
    job = trainer.job
    console.print(f"Resuming after step {trainer.step} of {job.steps}, from {call.output / checkpoint.NAME}.")
    then = {**state["made_with"], **{flag(name): state["job"][name] for name in CHANGEABLE}}
    now = {**made_with(), **{flag(name): getattr(job, name) for name in CHANGEABLE}}
    changes = [f"{what} was {then.get(what)}, is {now[what]}" for what in now if then.get(what) != now[what]]
    if changes:
        console.print(f"Not bit for bit the result of an uninterrupted run: {'; '.join(changes)}.")


def resume_command(call: Call) -> str:
    """Return the command that resumes from this call's checkpoint."""
    return f"fusedmoe demo --resume{output_option(call)}"


def output_option(call: Call) -> str:
    """Return ``" --output <folder>"``, or an empty string for the default folder."""
    return "" if call.output == Path("fusedmoe-demo") else f" --output {shlex.quote(str(call.output))}"


def finish(
    trainer: Trainer, split: Split, bigram_bits: float, call: Call, console: Console, steps_now: int, started: float
) -> None:
    """Evaluate, print the verdict and a sample, and write the figure and the results."""
    job, history = trainer.job, trainer.history
    if not history.evaluations or history.evaluations[-1][0] != trainer.step:
        history.evaluations.append((trainer.step, bits_per_byte(trainer.model, split.held_out)))
    bits = history.evaluations[-1][1]
    if call.sample_bytes:
        text = sample(trainer.model, PROMPT, call.sample_bytes, job.seed)
        console.print("\nA sample of the model's text:")
        console.print("\n".join(f"  | {line}" for line in printable(text).split("\n")))
    console.print(f"\nHeld-out text: {bits:.3f} bits per byte; the byte-bigram model: {bigram_bits:.3f}.")
    console.print(verdict(bits, bigram_bits))
    figure = report.write_figure(call.output, history, bigram_bits)
    results = {
        "held_out_bits_per_byte": bits,
        "bigram_bits_per_byte": bigram_bits,
        "evaluations": history.evaluations,
        "training_seconds": round(trainer.seconds, 2),
        "tokens_per_second": round(trainer.step * job.batch * job.context / max(trainer.seconds, 1e-9)),
        "job": dataclasses.asdict(job),
        "made_with": made_with(),
    }
    numbers = report.write_json(call.output / report.RESULTS_NAME, results)
    if figure is None:
        console.print(report.MISSING_MATPLOTLIB)
    written = [path for path in (figure, numbers, call.output / checkpoint.NAME) if path is not None]
    console.print(f"Written: {', '.join(str(path) for path in written)}")
    console.print(f"{steps_now:,} steps, {clock(time.perf_counter() - started)} in all.")


def verdict(bits: float, bigram_bits: float) -> str:
    """Compare the model with the bigram model in one sentence."""
    if bits < bigram_bits:
        return f"Below the bigram model by {bigram_bits - bits:.3f} bits: it has learnt more than pairs of letters."
    return "NOT below the bigram model: train for more --steps, or with another --lr."


def printable(text: bytes) -> str:
    """Decode UTF-8 for a terminal; invalid bytes and control characters, except line feeds, become U+FFFD."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(char if char == "\n" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in decoded)


def clock(seconds: float) -> str:
    """Return a duration as ``"2 min 5 s"``."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def reproducible(job: Job) -> Iterator[None]:
    """Use the job's number of threads, and on a GPU only deterministic kernels."""
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)  # the number determines the order of summation, thus the last bits
    try:
        with contextlib.nullcontext() if torch.device(job.device).type == "cpu" else deterministic_kernels():
            yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Raise an error for operations without a deterministic kernel."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS's default workspace is not deterministic
    mode = torch.get_deterministic_debug_mode()
    memory: Any = torch.utils.deterministic  # the stubs lack its attribute
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # a debugging aid that costs a launch per allocation
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)
