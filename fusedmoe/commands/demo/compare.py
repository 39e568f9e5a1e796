"""``fusedmoe demo --compare``: train one job under several numeric recipes, one after another.

Each recipe has its own folder, ``<output>/<recipe>``, with the files of a single run.
"""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from fusedmoe.commands.demo import checkpoint, comparison
from fusedmoe.commands.demo.comparison import Outcome, outcome_of
from fusedmoe.commands.demo.errors import DemoError, InterruptedRunError, UsageError
from fusedmoe.commands.demo.options import Call, Job, check_comparison, flag, job_of
from fusedmoe.commands.demo.report import MISSING_MATPLOTLIB
from fusedmoe.commands.demo.run import CHANGEABLE, output_option, resumed_job, run, standard_output


def compare(given: dict[str, Any], call: Call, console: Console | None = None) -> int:
    """Train the job under each recipe of ``call.compare``, print and write the comparison, return the exit status.

    With ``call.resume``, finished runs are reused and the others continue from their checkpoints.

    Parameters
    ----------
    given : dict
        The chosen fields of :class:`~fusedmoe.commands.demo.options.Job`, without the recipe; the checkpoints or the
        defaults give the others.
    call : Call
        The options of this call; they apply to each run.
    console : rich.console.Console, optional
        The output; by default the standard output.

    Raises
    ------
    DemoError
        For every error that the user can correct.
    """
    console = console or standard_output()
    recipes = call.compare or ()
    check_comparison(recipes)
    if "recipe" in given:
        raise UsageError(
            f"--recipe {given['recipe']} with --compare {','.join(recipes)}: leave out --recipe; --compare names "
            f"the recipes"
        )
    job = _common_job(given, call, recipes)
    if not call.resume:
        _set_aside(call.output, recipes, console)
    resume_with = resume_command(given, call, recipes)
    try:
        outcomes = _outcomes(job, call, recipes, console, resume_with)
    except KeyboardInterrupt:  # raised outside a training loop, or by a second Ctrl-C within it
        if not any(_has_checkpoint(call.output / recipe) for recipe in recipes):
            raise
        message = f"interrupted; checkpoints already written are intact; continue with: {resume_with}"
        raise InterruptedRunError(message, signal.SIGINT) from None
    if len(outcomes) < len(recipes):
        console.print(f"\nNothing is compared before every run has {job.steps} steps; continue with: {resume_with}")
        return 0
    _finish(outcomes, job, call.output, console)
    return 0


def resume_command(given: dict[str, Any], call: Call, recipes: tuple[str, ...]) -> str:
    """Return the command that resumes this comparison, with the options that some checkpoints lack."""
    changes = {name: given[name] for name in CHANGEABLE if call.resume and name in given}
    if call.eval_interval is not None:
        changes["eval_interval"] = call.eval_interval  # no checkpoint has it
    options = "".join(f" {flag(name)} {value}" for name, value in changes.items())
    return f"fusedmoe demo --compare {','.join(recipes)} --resume{options}{output_option(call)}"


def _common_job(given: dict[str, Any], call: Call, recipes: tuple[str, ...]) -> Job:
    """Return the job with the first recipe: a new job, or that of the existing checkpoints."""
    if not call.resume:
        return job_of(given | {"recipe": recipes[0]})
    jobs = {name: _resumed_job(given, call.output, name) for name in recipes if _has_checkpoint(call.output / name)}
    if not jobs:
        folders = ", ".join(str(call.output / name) for name in recipes)
        raise DemoError(
            f"no checkpoint in any of {folders}; start without --resume, or name their folder with --output"
        )
    (first, job), *others = jobs.items()
    for other, other_job in others:
        _check_same(first, job, other, other_job)
    return dataclasses.replace(job, recipe=recipes[0])


def _resumed_job(given: dict[str, Any], output: Path, recipe: str) -> Job:
    folder = output / recipe
    try:
        return resumed_job(checkpoint.load(folder), given | {"recipe": recipe})
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from error


def _check_same(a: str, job_a: Job, b: str, job_b: Job) -> None:
    """Raise a :class:`UsageError` if two runs differ in more than the recipe."""
    for item in dataclasses.fields(Job):
        value_a, value_b = getattr(job_a, item.name), getattr(job_b, item.name)
        if item.name != "recipe" and value_a != value_b:
            option = flag(item.name)
            remedy = f"choose one with {option}" if item.name in CHANGEABLE else "start again without --resume"
            raise UsageError(
                f"the run of {a} has {option} {value_a}, that of {b} {option} {value_b}; compared runs must differ "
                f"only in the recipe; {remedy}"
            )


def _set_aside(output: Path, recipes: tuple[str, ...], console: Console) -> None:
    """Rename the checkpoints of an earlier comparison before the first run, so that --resume cannot mix the two."""
    for recipe in recipes:
        if (previous := checkpoint.set_aside(output / recipe)) is not None:
            console.print(f"The checkpoint of an earlier run is kept as {previous}.")


def _outcomes(job: Job, call: Call, recipes: tuple[str, ...], console: Console, resume_with: str) -> list[Outcome]:
    """Return the outcomes of the recipes, except runs that stopped at --stop-at."""
    outcomes = []
    for number, recipe in enumerate(recipes, start=1):
        if number > 1:
            console.print()
        console.print(f"Recipe {number} of {len(recipes)}: {recipe}")
        outcome = _outcome(dataclasses.replace(job, recipe=recipe), call, console, resume_with)
        outcomes += [] if outcome is None else [outcome]
    return outcomes


def _outcome(job: Job, call: Call, console: Console, resume_with: str) -> Outcome | None:
    """Train the remaining steps of a recipe and return its outcome; None if it stopped at --stop-at."""
    folder = call.output / job.recipe
    resume = call.resume and _has_checkpoint(folder)
    if resume and (outcome := outcome_of(folder, job)) is not None:
        console.print(f"Finished earlier; its numbers are in {folder}.")
        return outcome
    own_call = dataclasses.replace(call, output=folder, compare=None, resume=resume)
    run(dataclasses.asdict(job), own_call, console, resume_with)
    return outcome_of(folder, job)


def _has_checkpoint(folder: Path) -> bool:
    return (folder / checkpoint.NAME).exists()


def _finish(outcomes: list[Outcome], job: Job, output: Path, console: Console) -> None:
    """Print the table, and write the figure and the results."""
    console.print(
        f"\nHeld-out text in bits per byte, lower is better; the byte-bigram model: {outcomes[0].bigram_bits:.3f}."
    )
    console.print(comparison.table(outcomes))
    figure = comparison.write_figure(output, outcomes)
    numbers = comparison.write_results(output, outcomes, job)
    if figure is None:
        console.print(MISSING_MATPLOTLIB)
    console.print(f"Written: {', '.join(str(path) for path in (figure, numbers) if path is not None)}")
