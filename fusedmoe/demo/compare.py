"""``fusedmoe demo --compare``: one job trained under several numeric recipes, one after the other.

Each run is a run of its own in a folder of its own, ``<output>/<recipe>``, with the files that a single one leaves.
"""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

from rich.console import Console

from fusedmoe.demo import checkpoint, comparison
from fusedmoe.demo.comparison import Outcome, outcome_of
from fusedmoe.demo.errors import DemoError, InterruptedRunError, UsageError
from fusedmoe.demo.options import Call, Job, check_comparison, flag, job_of
from fusedmoe.demo.report import MISSING_MATPLOTLIB
from fusedmoe.demo.run import CHANGEABLE, output_option, resumed_job, run, standard_output


def compare(given: dict[str, Any], call: Call, console: Console | None = None) -> int:
    """Train the job once under each recipe of ``call.compare``, then print and write how they compare; the exit status.

    With ``call.resume``, runs that are finished are taken as they are, and the others go on from their checkpoints.

    Parameters
    ----------
    given : dict
        The fields of :class:`~fusedmoe.demo.options.Job` that were chosen, without the recipe; the others come from the
        defaults or the checkpoints.
    call : Call
        What this call does; its options hold for each of the runs.
    console : rich.console.Console, optional
        Where it prints; by default the standard output.

    Raises
    ------
    DemoError
        For whatever the user can do something about.
    """
    console = console or standard_output()
    recipes = call.compare or ()
    check_comparison(recipes)
    if "recipe" in given:
        raise UsageError(
            f"--recipe {given['recipe']} with --compare {','.join(recipes)}: leave out --recipe, for --compare names "
            f"the recipes itself"
        )
    job = _common_job(given, call, recipes)
    if not call.resume:
        _set_aside(call.output, recipes, console)
    resume_with = resume_command(given, call, recipes)
    try:
        outcomes = _outcomes(job, call, recipes, console, resume_with)
    except KeyboardInterrupt:  # outside a training loop, or the second one in it
        if not any(_has_checkpoint(call.output / recipe) for recipe in recipes):
            raise
        message = f"interrupted; checkpoints already written are intact; go on with: {resume_with}"
        raise InterruptedRunError(message, signal.SIGINT) from None
    if len(outcomes) < len(recipes):
        console.print(f"\nNothing is compared before every run has {job.steps} steps; go on with: {resume_with}")
        return 0
    _finish(outcomes, job, call.output, console)
    return 0


def resume_command(given: dict[str, Any], call: Call, recipes: tuple[str, ...]) -> str:
    """Return the command that goes on with this comparison, with the changes that not every checkpoint has yet."""
    changes = {name: given[name] for name in CHANGEABLE if call.resume and name in given}
    if call.eval_interval is not None:
        changes["eval_interval"] = call.eval_interval  # of the runs that have not begun
    options = "".join(f" {flag(name)} {value}" for name, value in changes.items())
    return f"fusedmoe demo --compare {','.join(recipes)} --resume{options}{output_option(call)}"


def _common_job(given: dict[str, Any], call: Call, recipes: tuple[str, ...]) -> Job:
    """Return the job that each recipe trains, under the first of them: new, or that of the checkpoints there are."""
    if not call.resume:
        return job_of(given | {"recipe": recipes[0]})
    jobs = {name: _resumed_job(given, call.output, name) for name in recipes if _has_checkpoint(call.output / name)}
    if not jobs:
        folders = ", ".join(str(call.output / name) for name in recipes)
        raise DemoError(
            f"no checkpoint in any of {folders}; start without --resume, or say with --output where they lie"
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
    """Raise a :class:`UsageError` where two runs differ in more than the recipe."""
    for item in dataclasses.fields(Job):
        value_a, value_b = getattr(job_a, item.name), getattr(job_b, item.name)
        if item.name != "recipe" and value_a != value_b:
            option = flag(item.name)
            remedy = f"say which with {option}" if item.name in CHANGEABLE else "start anew without --resume"
            raise UsageError(
                f"the run of {a} has {option} {value_a}, that of {b} {option} {value_b}, and runs are compared that "
                f"differ in the recipe alone; {remedy}"
            )


def _set_aside(output: Path, recipes: tuple[str, ...], console: Console) -> None:
    """Rename the checkpoints of an earlier comparison, all at once: --resume must not take one for this one's."""
    for recipe in recipes:
        if (previous := checkpoint.set_aside(output / recipe)) is not None:
            console.print(f"The checkpoint of an earlier run is kept as {previous}.")


def _outcomes(job: Job, call: Call, recipes: tuple[str, ...], console: Console, resume_with: str) -> list[Outcome]:
    """Return what the recipes came to, those that stopped at --stop-at left out."""
    outcomes = []
    for number, recipe in enumerate(recipes, start=1):
        if number > 1:
            console.print()
        console.print(f"Recipe {number} of {len(recipes)}: {recipe}")
        outcome = _outcome(dataclasses.replace(job, recipe=recipe), call, console, resume_with)
        outcomes += [] if outcome is None else [outcome]
    return outcomes


def _outcome(job: Job, call: Call, console: Console, resume_with: str) -> Outcome | None:
    """Return what a recipe came to, after training what is left of its run; None where it stopped at --stop-at."""
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
    """Print the table, and write the figure and the numbers."""
    console.print(
        f"\nHeld-out text in bits a byte, lower is better; the byte-bigram model: {outcomes[0].bigram_bits:.3f}."
    )
    console.print(comparison.table(outcomes))
    figure = comparison.write_figure(output, outcomes)
    numbers = comparison.write_results(output, outcomes, job)
    if figure is None:
        console.print(MISSING_MATPLOTLIB)
    console.print(f"Written: {', '.join(str(path) for path in (figure, numbers) if path is not None)}")
