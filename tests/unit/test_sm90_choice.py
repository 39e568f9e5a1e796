"""Which tiles a product runs with: the model, the shipped measurements, and the table of `fusedmoe tune`."""

import functools
import itertools
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import shapes
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.kernels.sm90 import launch
from fusedmoe.kernels.sm90.tiles import tuned
from fusedmoe.kernels.sm90.tiles.choice import (
    CANDIDATES,
    GATHERED,
    Problem,
    band,
    by_model,
    candidates,
    choose,
    cycles,
)
from fusedmoe.kernels.sm90.tiles.measured import MEASURED

SMS = 132
ROWS = (1, 100, 4096, 262_144)
SHAPES = ((8, 2048), (128, 768), (512, 512), (32, 2880), (1, 8))  # experts, width
CONFIGS = sorted({config for configs in CANDIDATES.values() for config in configs}, key=lambda config: config.name)


@pytest.fixture(autouse=True)
def no_table_of_this_machine(monkeypatch, tmp_path):
    """What somebody tuned here is no matter of these tests."""
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", str(tmp_path))
    caches = tuned.table, choose
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def problems(family, **settings):
    for rows, (experts, width) in itertools.product(ROWS, SHAPES):
        yield Problem(family, rows, experts, width, 2048, SMS, **settings)


@pytest.mark.parametrize("family", CANDIDATES)
def test_choice_is_the_fastest_candidate_by_the_model(family):
    for problem in problems(family):
        times = {config: cycles(problem, config) for config in CANDIDATES[family]}
        assert times[by_model(problem)] == min(times.values())
        assert choose(problem) == by_model(problem) or problem.coarse in MEASURED
        for config in CANDIDATES[family]:
            height = band(problem, config)
            assert 1 <= height <= 16
            assert height * config.tile_m * config.cluster_m <= 1024
    for problem in (Problem(family, 0, 8, 64, 64, SMS), Problem(family, 0, 0, 64, 64, SMS)):
        assert choose(problem) in candidates(problem)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("sm_margin", [0, 1, 20, 131, 132, 1000])
def test_no_more_ctas_than_sms_and_whole_clusters(config, sm_margin, monkeypatch):
    monkeypatch.setattr(launch, "sm_count", lambda device: SMS)
    sms = launch.sms_for("cuda", KernelOptions(sm_margin))
    ctas = launch.ctas_for(sms, config)
    assert config.ctas <= ctas <= sms
    assert ctas <= max(SMS - sm_margin, 2)
    assert ctas % config.ctas == 0
    assert sms - ctas < config.ctas


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h100-80gb-hbm3" / "tiles.json"


@functools.cache
def measured():
    """Products of models' layers, with the milliseconds of each candidate on an H100."""
    by_name = {config.name: config for config in CONFIGS}
    return [
        (Problem(**entry["problem"]), {by_name[name]: ms for name, ms in entry["ms"].items()})
        for entry in json.loads(RESULTS.read_text())["tiles"]
    ]


def longer(choice):
    """How many times as long as its best candidate each product takes."""
    return {problem: times[choice(problem)] / min(times.values()) for problem, times in measured()}


def test_what_is_chosen_is_nearly_the_fastest():
    """By the model alone, and with the measurements for layers of known models."""
    assert all(times.keys() == {*candidates(problem)} for problem, times in measured())
    ratios = longer(by_model).values()
    assert statistics.mean(ratios) < 1.02
    assert max(ratios) < 1.2
    assert statistics.mean(longer(lambda problem: CANDIDATES[problem.family][0]).values()) > 1.02, "one tile for all"
    layers = {(s.rows, s.experts) for s in shapes.load().values()}
    ratios = [ratio for problem, ratio in longer(choose).items() if (problem.rows, problem.experts) in layers]
    assert len(ratios) >= 6 * 8
    assert max(ratios) < 1.08
    assert statistics.mean(ratios) < 1.015


def test_measured_configurations_are_candidates():
    for coarse, name in MEASURED.items():
        family, rows, columns, depth = coarse
        size = round(2 ** (rows / 2) * 64), 64, columns, 2**depth, SMS
        problem = Problem(family.removesuffix(GATHERED), *size, gathered=family.endswith(GATHERED))
        assert problem.coarse == coarse
        assert choose(problem).name == name


def a_measured_problem():
    (family, rows, columns, depth), name = next(iter(MEASURED.items()))
    return Problem(family, round(2 ** (rows / 2) * 64), 64, columns, 2**depth, SMS), name


def test_gathered_rows_have_measurements_of_their_own(monkeypatch):
    problem, name = a_measured_problem()
    gathered = replace(problem, gathered=True)
    assert gathered.coarse == (f"{problem.family}_gathered", *problem.coarse[1:])
    assert choose(gathered) == by_model(gathered)
    other = next(config.name for config in candidates(gathered) if config != by_model(gathered))
    monkeypatch.setitem(MEASURED, gathered.coarse, other)
    choose.cache_clear()
    assert (choose(problem).name, choose(gathered).name) == (name, other)


def test_tiles_that_were_tuned_here_come_before_those_that_are_shipped(monkeypatch):
    problem, name = a_measured_problem()
    assert choose(problem).name == name
    other = next(config.name for config in candidates(problem) if config.name != name)
    for tuned_here, chosen in ((other, other), ("no candidate", name)):
        monkeypatch.setattr(tuned, "table", lambda found=tuned_here: {problem.coarse: found})
        choose.cache_clear()
        assert choose(problem).name == chosen
