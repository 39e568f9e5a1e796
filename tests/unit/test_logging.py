"""What is read from the environment, and what is logged, once, at which level."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from kit import toy
from kit.toy import dgrad_dglu, experts, gemm, gemm_glu, inputs, rows, rule

import fusedmoe as fm
from fusedmoe.base import environment
from fusedmoe.base.environment import configure_logging
from fusedmoe.ops import GroupedLinear

NAME, OTHER = "FUSEDMOE_A_TEST", "FUSEDMOE_ANOTHER"


def test_a_change_is_noticed_at_once(monkeypatch):
    read = environment.reader(NAME, OTHER)
    seen = [read()]
    assert read() == seen[0]
    for name, text in [(NAME, "sm90.*, straße"), (OTHER, "sm90.*, straße"), (NAME, "1"), (NAME, "")]:
        monkeypatch.setenv(name, text)
        assert read() not in seen
        seen.append(read())
        assert read() == seen[-1]
    monkeypatch.delenv(NAME)
    monkeypatch.delenv(OTHER)
    assert read() == seen[0]
    with mock.patch.dict(os.environ, {NAME: "1", OTHER: "sm90.*, straße"}, clear=True):
        assert read() == seen[3]
    assert read() == seen[0]


def test_a_python_that_keeps_its_environment_elsewhere(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    read = environment.reader(NAME)
    before = read()
    os.environ[NAME] = "1"
    assert read() != before


def test_what_is_read(monkeypatch, caplog):
    before = environment.environment_state()
    monkeypatch.setenv("FUSEDMOE_DISABLE", "sm90.*")
    assert environment.disabled_by_environment() == "sm90.*"
    assert environment.environment_state() != before
    for text, expected in (("1", True), (" True ", True), ("", False), ("off", False), ("2", False), ("2", False)):
        monkeypatch.setenv("FUSEDMOE_DEBUG", text)
        assert environment.debugging() is expected
    assert [r.getMessage() for r in caplog.records] == ["FUSEDMOE_DEBUG=2: expected 1 or 0; treated as 0"]  # once


PLANNER = "fusedmoe.fusion.search.planner"


def messages(caplog, level=None):
    return [r.getMessage() for r in caplog.records if level in (None, r.levelno)]


def test_every_new_plan_is_logged_step_by_step(caplog):
    caplog.set_level(logging.INFO, logger="fusedmoe")
    chain, x, named = experts(), rows(), inputs()
    with fm.register(gemm_glu(), gemm(), dgrad_dglu()):
        chain(x, **named)
        assert messages(caplog, logging.INFO)[:6] == [
            "new plan: cpu, float64, recipe bf16, kept for backward 1164 bytes for 9 rows, of "
            "0.GroupedLinear (3 x 8 -> 8), 2.GroupedLinear (3 x 4 -> 8)",
            "  1. forward 0.GroupedLinear + 1.SwiGLU: toy.gemm_glu",
            "  2. forward 2.GroupedLinear: toy.gemm",
            "  3. backward 2.Wgrad: plain PyTorch",
            "  4. backward 2.Dgrad + 1.DSwiGLU: toy.dgrad_dglu",
            "  5. backward 0.Wgrad: plain PyTorch",
        ]
        caplog.clear()
        chain(x, **named)
        assert messages(caplog) == []  # not a new plan
        with torch.no_grad():
            chain(x, **named)
        assert messages(caplog)[0].startswith("new plan: ")


def test_a_fallback_is_a_warning_where_the_device_could(caplog):
    with fm.register(gemm_glu()):
        for _ in range(3):  # said once for all layers and calls
            layer = experts(limit=7.0)
            for count in (9, 100):
                layer(rows(count), **inputs())
    runs, why = "runs unfused on a device that has a kernel for it", "toy.gemm_glu: CONSTRAINT: limit 7.0 is not taken"
    assert messages(caplog, logging.WARNING) == [
        *(f"{op} {runs}: {why}, use limit=None" for op in ("GroupedLinear", "SwiGLU")),
        f"GroupedLinear {runs}: toy.gemm_glu: NO_MATCH: slot 'act': expected SwiGLU | GeGLU, got the end of the chain",
    ]
    assert all(r.name == PLANNER for r in caplog.records)


def test_a_fallback_is_information_where_the_device_could_not(caplog):
    caplog.set_level(logging.INFO, logger="fusedmoe")
    with fm.register(rule("gpu.gemm", {"fc": GroupedLinear}, available=toy.needs_sm90)):
        experts()(rows(), **inputs())
    assert messages(caplog, logging.WARNING) == []
    assert "GroupedLinear runs unfused: gpu.gemm: UNAVAILABLE: needs sm_90, this device is cpu" in messages(caplog)


@pytest.mark.parametrize(("value", "nearest"), [
    ("fusion:trace", "fusion:debug"), ("fusoin", "fusion"), ("fusoin:debug", "fusion:debug"), ("kernels", ""),
    ("1", ""),
])  # fmt: skip
def test_a_bad_value_lists_the_good_ones_and_the_nearest(caplog, value, nearest):
    configure_logging(value)
    hint = f"; did you mean {nearest!r}?" if nearest else ""
    expected = f"FUSEDMOE_LOG: expected 'fusion' or 'fusion:debug', got {value!r}, which is ignored{hint}"
    assert messages(caplog) == [expected]


def test_a_pattern_that_matches_no_rule_is_said_once_with_the_nearest(caplog):
    """As the first plan is made, when the rules of entry points are there."""
    with fm.register(gemm("sm90.gemm")), fm.disabled("sm90", "nosuch.rule", "SM90.*", "sm90.gem?"):
        assert messages(caplog) == []
        for _ in range(2):
            experts()(rows(), **inputs())
    begin = "FUSEDMOE_DISABLE or fm.disabled: no rule has a name that matches"
    assert messages(caplog, logging.WARNING) == [
        f"{begin} 'sm90', so it switches nothing off; did you mean 'sm90.*'?",
        f"{begin} 'nosuch.rule', so it switches nothing off",
        f"{begin} 'SM90.*', so it switches nothing off; did you mean 'sm90.*'?",
    ]


SCRIPT = """
import torch, fusedmoe as fm
from kit import toy
with fm.register(toy.gemm_glu(guard=toy.refuse)):
    toy.experts()(toy.rows(), **toy.inputs())
    toy.experts(limit=7.0)(toy.rows(), **toy.inputs())
"""


def run(script=SCRIPT, **environment):
    """Run a script as a process of its own; return it with its stderr."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FUSEDMOE_") and k != "TORCH_LOGS"}
    return subprocess.run(
        [sys.executable, "-c", script], env=clean | {"PYTHONPATH": path} | environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def test_fusedmoe_log_fusion():
    done = run("import logging; logging.basicConfig(level=logging.DEBUG)\n" + SCRIPT, FUSEDMOE_LOG="fusion")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    first = f"INFO {PLANNER}:   1. forward 0.GroupedLinear + 1.SwiGLU: toy.gemm_glu"
    assert lines.count(first) == 1  # beside a handler of the root logger, too
    declined = "0.GroupedLinear + 1.SwiGLU: toy.gemm_glu declined this call: rows are 9, not a multiple of 128"
    assert f"WARNING fusedmoe.fusion.program.source: {declined}; it runs unfused" in lines
    assert not any("fusedmoe" in line for line in lines if line.startswith("DEBUG"))


@pytest.mark.slow
def test_switches_that_say_nothing_known_are_said_at_import():
    wrong = {"FUSEDMOE_DISABEL": "x", "FUSEDMOE_DEBUG": "maybe", "FUSEDMOE_CACHE_DIR": "off", "FUSEDMOE_XYZZY": ""}
    done = run("import fusedmoe", **wrong, FUSEDMOE_COMMIT="abc")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == [
        "FUSEDMOE_CACHE_DIR=off: used as a directory name; did you mean 0, which disables the cache?",
        "FUSEDMOE_DEBUG=maybe: expected 1 or 0; treated as 0",
        "FUSEDMOE_DISABEL: fusedmoe reads no such environment variable; did you mean 'FUSEDMOE_DISABLE'?",
        "FUSEDMOE_XYZZY: fusedmoe reads no such environment variable",
    ]
