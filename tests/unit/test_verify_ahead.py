"""`fusedmoe verify` compiles kernels in several processes, before one process checks them."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fusedmoe.commands.verify import rules
from fusedmoe.commands.verify.ahead import compile_ahead, one_per_layout
from fusedmoe.commands.verify.cases import LAYOUTS, Case, Sizes, cases_for
from fusedmoe.commands.verify.checks import Found, Outcome
from fusedmoe.kernels.build import compiler

CPU = torch.device("cpu")
CASES = [Case("experts", recipe, layout) for recipe in ("bf16", "fp16", "fp8_block") for layout in LAYOUTS[:2]]


def write_down(case):
    """Runs in a process of the pool."""
    folder = os.environ["FUSEDMOE_CACHE_DIR"]
    with open(f"{folder}/{case.name}-{os.getpid()}", "w"):
        pass
    if case.recipe == "fp16":
        raise RuntimeError("a kernel that does not compile")


def end(case):
    os._exit(1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDMOE_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_case_per_set_of_kernels_runs_in_another_process(folder):
    said = []
    compile_ahead(CASES, Sizes(), CPU, said.append, write_down, processes=2)
    ran = [path.name.rsplit("-", 1) for path in folder.iterdir() if "experts" in path.name]
    assert sorted(name for name, _ in ran) == sorted(case.name for case in CASES[::2])
    assert str(os.getpid()) not in {process for _, process in ran}
    assert said == ["compiling the kernels of 3 cases in 2 processes"]


def test_a_process_that_dies_ends_nothing_else(folder):
    compile_ahead(CASES, Sizes(), CPU, str, end, processes=2)


@pytest.mark.parametrize(("variable", "processes"), [("0", 2), (None, 1)])
def test_without_a_cache_or_with_one_process_nothing_runs(folder, monkeypatch, variable, processes):
    if variable is not None:
        monkeypatch.setenv("FUSEDMOE_CACHE_DIR", variable)
    said = []
    compile_ahead(CASES, Sizes(), CPU, said.append, write_down, processes)
    assert not [*folder.iterdir()]
    assert not said


def test_cases_that_differ_only_in_their_rows():
    cases = cases_for(90)
    chosen = one_per_layout(cases)
    assert len(chosen) < len(cases) == len({*cases})
    assert {replace(case, layout=LAYOUTS[0]) for case in chosen} == {replace(c, layout=LAYOUTS[0]) for c in cases}


@pytest.mark.parametrize("compiles", [0, 1, 4])
def test_it_begins_after_the_first_case_that_compiles(monkeypatch, compiles):
    """Cases whose kernels are all in the cache compile nothing, and no process is started for the others."""
    ran, ahead = [], []

    def run_case(case, *settings):
        ran.append(case)
        return Outcome(case, ("a rule",), Found())

    monkeypatch.setattr(rules, "run_case", run_case)
    monkeypatch.setattr(rules, "_rules_of", lambda machine: [])
    monkeypatch.setattr(compiler, "stats", lambda: SimpleNamespace(compiled=max(0, len(ran) - compiles)))
    machine = SimpleNamespace(device=CPU, arch=90)
    rules.verify(machine, CASES, Sizes(), compile_ahead=lambda *given: ahead.append(given))
    assert ran == CASES
    assert ahead == [(CASES[compiles + 1 :], Sizes(), CPU)]
