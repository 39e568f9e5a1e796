"""docs/one_call.md: its tables have the files that real calls visit. `call_hops` defines a hop; ``-s`` prints them."""

import re

import pytest
import torch
from kit.call_hops import PACKAGE, PROGRAM, frames_of, hops_of

import fusedmoe as fm
from fusedmoe.base import changes

PAGE = PACKAGE.parent / "docs" / "one_call.md"
ROW = re.compile(r"^\| (?P<up>\^ )?`(?P<file>[^`]+)` \| `(?P<function>[^`]+)` \| .+ \|$", re.MULTILINE)
MOST_FILES, MOST_STEPS_BACK_UP = 14, 8
# the folders whose files the page lists for a first call
OF_A_PLAN = ("layers/", "call/", "expert_parallel/", "fusion/", PROGRAM)

pytestmark = pytest.mark.usefixtures("builtin_rules", "hopper_machine")


def tables():
    """The rows of the page's tables, (goes back up, file, function) each: forward, backward; steady and first."""
    found = {}
    for chapter in PAGE.read_text("utf-8").split("\n## ")[1:3]:
        state = chapter.split()[0].lower()
        forward, backward = chapter.split("\nBackward")
        for way, text in (("forward", forward), ("backward", backward)):
            found[state, way] = [(bool(m["up"]), m["file"], m["function"]) for m in ROW.finditer(text)]
    return found


TABLES = tables()


@pytest.fixture
def call():
    """The forward and the backward pass of an `MoE`, as functions."""
    layer = fm.MoE(hidden=64, intermediate=32, num_experts=8, top_k=2, dtype=torch.bfloat16)
    x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
    count, y = changes.count, []

    def forward():
        changes.count = count  # stand-ins construct ops, which counts as a change
        y.append(layer(x).sum())

    def backward():
        changes.count = count
        y.pop().backward()

    return forward, backward


def test_the_page_has_the_hops_of_a_steady_call(call):
    for _ in range(3):
        for pass_ in call:
            pass_()
    for way, pass_ in zip(("forward", "backward"), call, strict=True):
        hops = hops_of(pass_)
        print(way, *hops, sep="\n")  # noqa: T201
        if way == "forward":
            assert len({hop.file for hop in hops}) <= MOST_FILES
            assert sum(hop.goes_back_up for hop in hops) <= MOST_STEPS_BACK_UP
        start = [hop.file for hop in hops].index(PROGRAM) + 1
        of_steps = [hop for hop in hops[start:] if hop.file.startswith(("builtin_rules/", "kernels/", "ops/"))]
        end = len(hops) - 1 if way == "backward" else len(hops)  # the page's last row comes after the steps
        assert hops[start:end] == of_steps[: end - start]
        own = [(hop.goes_back_up, hop.file, hop.function) for hop in (*hops[:start], *hops[end:])]
        assert own == TABLES["steady", way]


def test_the_page_has_the_files_of_a_first_call(call):
    for way, pass_ in zip(("forward", "backward"), call, strict=True):
        visited = [file for file in dict.fromkeys(frame[0] for frame in frames_of(pass_)) if file.startswith(OF_A_PLAN)]
        own = [file for _, file, _ in TABLES["first", way]]
        steady = {file for _, file, _ in TABLES["steady", way]}
        assert {*visited} - steady == {*own} - steady
        assert [file for file in visited if file in own] == own


def test_the_functions_of_the_page_exist():
    for row in [row for table in TABLES.values() for row in table if row[1] != PROGRAM]:
        _, file, function = row
        text = (PACKAGE / file).read_text("utf-8")
        assert re.search(rf"^\s*(def|class) {function}\b", text, re.MULTILINE), row
