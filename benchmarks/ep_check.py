"""The comparison of `benchmarks.ep_model` with measured steps: the first ones, and those of each ``ep.json``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.ep_model import ALLGATHER, ENGINES, FUSED_PEER, REFERENCE, SORTED, UNFUSED_PEER, layers, predict
from benchmarks.shapes import Shape
from fusedmoe.commands.bench.layer import COMPILED, OURS

# Measured on two H200s before there was a section ``ep``: ms of forward + backward, by tokens per rank and name.
FIRST_GPU, FIRST_LAYER, FIRST_RANKS = "NVIDIA H200", "qwen3-30b-a3b", 2
FIRST_MEASUREMENTS = {8192: {REFERENCE: 3.2, UNFUSED_PEER: 10.0}, 32768: {REFERENCE: 12.5, UNFUSED_PEER: 32.0}}
# What the section ``ep`` measures: the engine of the model, and the candidate of ``layer.json`` that has the experts.
PREDICTED = {engine.name: (engine, OURS) for engine in ENGINES if engine.of_package} | {
    UNFUSED_PEER: (SORTED, COMPILED.name),
    FUSED_PEER: (SORTED, OURS),
}


@dataclass(frozen=True)
class Case:
    """The layer, P and N of a measurement, and its GPU."""

    layer: str
    ranks: int
    tokens: int
    machine: str
    source: str


@dataclass(frozen=True)
class Check:
    """A measured time, and the prediction of it.

    The exposed times are those of the steps minus those without communication; None if these were not measured.
    """

    case: Case
    what: str
    measured_ms: float
    predicted_ms: float
    measured_exposed_ms: float | None
    predicted_exposed_ms: float | None

    @property
    def deviation(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def host_waits(self) -> bool:
        """Whether a host waits for its device in the step."""
        return self.what in PREDICTED and PREDICTED[self.what][0].host_syncs > 0


def predicted_ms(
    results: dict[str, Any], shape: Shape, ranks: int, tokens: int, what: str, factor: float = 1.0
) -> float | None:
    """Return the predicted time of a candidate of the section ``ep``; None for one that the model does not have.

    ``factor`` multiplies the time of the experts.
    """
    if what == REFERENCE:
        return factor * predict(results, shape, ranks, ALLGATHER, tokens).compute_ms
    if what not in PREDICTED:
        return None
    engine, experts = PREDICTED[what]
    step = predict(results, shape, ranks, engine, tokens, experts)
    return replace(step, forward_ms=factor * step.forward_ms, backward_ms=factor * step.backward_ms).ms


def checks(results: dict[str, Any], measured: Iterable[dict[str, Any]] = ()) -> list[Check]:
    """Compare the model, from ``layer.json``, with the first measurements and with those of each ``ep.json``."""
    found: list[tuple[Case, Mapping[str, float]]] = [
        (Case(FIRST_LAYER, FIRST_RANKS, tokens, FIRST_GPU, "first"), times)
        for tokens, times in FIRST_MEASUREMENTS.items()
    ]
    for of_gpu in measured:
        for entry in of_gpu["shapes"]:
            case = Case(entry["name"], of_gpu["ranks"], entry["tokens_per_rank"], of_gpu["machine"], "`ep.json`")
            found.append((case, {row["name"]: row["ms"] for row in entry["rows"] if row["ms"]}))
    return [check for case, times in found if case.layer in layers() for check in _compared(results, case, times)]


def other_gpu(results: dict[str, Any], machine: str) -> bool:
    """Whether ``layer.json`` does not have the speed of the experts on a GPU."""
    return bool(machine != results["machine"])


def _compared(results: dict[str, Any], case: Case, times: Mapping[str, float]) -> Iterator[Check]:
    """Compare the times of one case, by name.

    On another GPU than that of ``layer.json``, the experts are as slow as the time without communication says. This
    time is then no check; without it, nothing is compared.
    """
    asked = results, layers()[case.layer], case.ranks, case.tokens
    measured_base, predicted_base, factor = times.get(REFERENCE), predicted_ms(*asked, REFERENCE), 1.0
    assert predicted_base is not None
    if other_gpu(results, case.machine):
        if measured_base is None:
            return
        factor = measured_base / predicted_base
        times = {what: ms for what, ms in times.items() if what != REFERENCE}
    for what, ms in times.items():
        predicted = predicted_ms(*asked, what, factor)
        if predicted is None:
            continue
        exposed: tuple[float | None, float | None] = (None, None)
        if measured_base is not None and what != REFERENCE:
            exposed = ms - measured_base, predicted - factor * predicted_base
        yield Check(case, what, ms, predicted, *exposed)
