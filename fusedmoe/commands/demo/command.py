"""``fusedmoe demo``: read the text, show the plan, train, compare with a byte-bigram model, write the results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch

import fusedmoe as fm
from fusedmoe.base.errors import InputError
from fusedmoe.base.extras import install_command
from fusedmoe.commands.demo.data import Split, bigram_bits_per_byte, load_split
from fusedmoe.commands.demo.model import ByteTransformer
from fusedmoe.commands.demo.options import DTYPES, add_job_arguments, given_of, job_of
from fusedmoe.commands.demo.train import CHECKPOINT, Trainer, resumed, train
from fusedmoe.layers.plotting import new_figure, plot_expert_load
from fusedmoe.numerics.recipes import BF16

PROMPT, SAMPLE_BYTES, TEMPERATURE = b"The ", 400, 0.7
FIGURE, RESULTS = "training.png", "results.json"
SMOOTHING = 0.95
MOST_THREADS = 8  # for matrix products this small, 16 are no faster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    add_job_arguments(parser)
    folder = Path("fusedmoe-demo")
    parser.add_argument("--output", type=Path, default=folder, metavar="DIR", help="folder (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --output")


def run(options: argparse.Namespace) -> int:
    """Train, print, write the results, and return the exit status."""
    started, folder, given = time.perf_counter(), options.output, given_of(options)
    job, state = resumed(folder, given) if options.resume else (job_of(given), None)
    split = load_split()
    use_half_of_the_threads()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {folder}: {error.strerror}; choose a folder that you can write to") from error
    with fm.recipe(job.recipe):
        trainer = Trainer(job, split)
        bigram_bits = bigram_bits_per_byte(split.train, split.held_out)
        describe(trainer, split, bigram_bits)
        if state is not None:
            trainer.load(state)
            print(f"Resuming after step {trainer.step} of {job.steps}, from {folder / CHECKPOINT}.")
        train(trainer, folder, lambda line: print(line, flush=True))
        print("\nA sample of the model's text:")
        print("\n".join(f"  | {line}" for line in printable(sample(trainer.model)).split("\n")))
    bits = trainer.evaluations[-1][1]
    print(f"\nHeld-out text: {bits:.3f} bits per byte; the byte-bigram model: {bigram_bits:.3f}.")
    print(verdict(bits, bigram_bits))
    written = [write_results(folder, trainer, bigram_bits), folder / CHECKPOINT]
    try:
        written.append(write_figure(folder, trainer, bigram_bits))
    except ImportError:
        print(f"no figure: matplotlib is not installed; {install_command('demo')}")
    print(f"Written: {', '.join(map(str, written))}")
    print(f"{job.steps:,} steps, {time.perf_counter() - started:.0f} s in all.")
    return 0


def use_half_of_the_threads() -> None:
    """Use half of torch's default number of threads, at most `MOST_THREADS`.

    The threads synchronise some hundred times per step, which takes milliseconds if another program uses a core. With
    one of two cores busy, a step takes 165 ms with one thread and over 350 ms with two. On an idle machine, the second
    thread saves less than a third.
    """
    torch.set_num_threads(max(1, min(MOST_THREADS, torch.get_num_threads() // 2)))


def describe(trainer: Trainer, split: Split, bigram_bits: float) -> None:
    """Print the text, the model, the training job and the plan of the experts."""
    job = trainer.job
    total, active = trainer.model.parameter_counts()
    where = torch.cuda.get_device_name() if job.device == "cuda" else f"threads: {torch.get_num_threads()}"
    print(
        f"Text: Python's reference pages, each paragraph once: {len(split.train):,} bytes to train on, "
        f"{len(split.held_out):,} held out.\n"
        f"Baseline: a byte-bigram model, {bigram_bits:.3f} bits per byte on the held-out text.\n"
        f"Model: {job.layers} layers, hidden {job.hidden}, {job.heads} heads, {job.experts} experts of "
        f"{job.intermediate}, top {job.top_k}: {total:,} parameters, {active:,} of them active per token.\n"
        f"Training: {job.steps:,} steps of {job.batch} x {job.context} bytes, {job.dtype}, "
        f"recipe {job.recipe}{' (no quantization)' if job.recipe == BF16.name else ''}, seed {job.seed}, "
        f"on {job.device} ({where}).\n\n"
        f"How the experts of a layer run:"
    )
    shape = (job.batch, job.context, job.hidden)
    hidden = torch.zeros(shape, device=job.device, dtype=DTYPES[job.dtype], requires_grad=True)
    print(trainer.model.typed_blocks[0].moe.explain(hidden), "\n", flush=True)


@torch.no_grad()
def sample(model: ByteTransformer, prompt: bytes = PROMPT, length: int = SAMPLE_BYTES) -> bytes:
    """Return the prompt and ``length`` bytes sampled from the model, with the seed of its job."""
    generator = torch.Generator().manual_seed(model.job.seed)
    text = list(prompt)
    model.eval()
    for _ in range(length):
        window = torch.tensor([text[-model.job.context :]], device=model.job.device)
        logits, _ = model(window)
        probabilities = (logits[0, -1].float().cpu() / TEMPERATURE).softmax(dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    model.train()
    return bytes(text)


def printable(text: bytes) -> str:
    """Decode UTF-8 for a terminal; invalid bytes and control characters, except line feeds, become U+FFFD."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(char if char == "\n" or char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in decoded)


def verdict(bits: float, bigram_bits: float) -> str:
    """Compare the model with the bigram model in one sentence."""
    if bits < bigram_bits:
        return f"Below the bigram model by {bigram_bits - bits:.3f} bits: it has learnt more than pairs of letters."
    return "NOT below the bigram model: train for more --steps, or with another --lr."


def write_results(folder: Path, trainer: Trainer, bigram_bits: float) -> Path:
    """Write the results as JSON and return the path."""
    job = trainer.job
    results = {
        "held_out_bits_per_byte": trainer.evaluations[-1][1],
        "bigram_bits_per_byte": bigram_bits,
        "evaluations": trainer.evaluations,
        "training_seconds": round(trainer.seconds, 2),
        "tokens_per_second": round(trainer.step * job.batch * job.context / max(trainer.seconds, 1e-9)),
        "job": dataclasses.asdict(job),
        "torch": str(torch.__version__),
    }
    path = folder / RESULTS
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return path


def write_figure(folder: Path, trainer: Trainer, bigram_bits: float) -> Path:
    """Draw the loss and each expert's load over time, and return the path; needs matplotlib."""
    figure = new_figure(9, 7)
    loss, load = figure.subplots(2, 1)
    smoothed, mean, weight = [], 0.0, 0.0
    for value in trainer.losses:
        mean, weight = (SMOOTHING * old + (1 - SMOOTHING) * new for old, new in ((mean, value), (weight, 1.0)))
        smoothed.append(mean / weight)
    steps = range(1, len(smoothed) + 1)
    loss.plot(steps, trainer.losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    loss.plot(steps, smoothed, color="tab:blue", label="training")
    loss.plot(*zip(*trainer.evaluations, strict=True), "o-", color="tab:orange", label="held-out")
    loss.axhline(bigram_bits, color="tab:gray", linestyle="--", label=f"byte bigram, held-out ({bigram_bits:.2f})")
    loss.set(title="Loss", xlabel="step", ylabel="bits per byte", xlim=(0, max(2, len(smoothed))))
    loss.legend()
    plot_expert_load(trainer.loads, axes=load)
    figure.savefig(folder / FIGURE, dpi=120)
    return folder / FIGURE
