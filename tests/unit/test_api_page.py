"""The API page names what rule authors need: every backward op, and those of each op in order."""

import re
from pathlib import Path

import pytest

import fusedmoe as fm
from fusedmoe import ops

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
TABLE = dict(re.findall(r"^\| `([^|]+)` \| ((?:`\w+`(?:, )?)+) \|$", PAGE, re.MULTILINE))

OPS = {
    "GroupedLinear": lambda: fm.GroupedLinear(2, 8, 8),
    "GroupedLinear(accumulate_into_main_grad=True)": lambda: fm.GroupedLinear(2, 8, 8, accumulate_into_main_grad=True),
    "Linear": lambda: fm.Linear(8, 8),
    "Linear(accumulate_into_main_grad=True)": lambda: fm.Linear(8, 8, accumulate_into_main_grad=True),
    "SwiGLU": fm.SwiGLU,
    "GeGLU": fm.GeGLU,
    "ReGLU": fm.ReGLU,
    "SquaredReLU": fm.SquaredReLU,
    "Scale": lambda: fm.Scale("probs"),
    "Router": lambda: fm.Router(8, 4, 2),
    "Dispatch": lambda: fm.Dispatch(2),
    "Combine": fm.Combine,
    "Combine(None)": lambda: fm.Combine(None),
}


@pytest.mark.parametrize("name", OPS)
def test_the_backward_ops_of_an_op_are_those_of_the_page(name):
    expected = [type(step).__name__ for step in OPS[name]().backward_ops()]
    assert re.findall(r"`(\w+)`", TABLE[name]) == expected


def test_the_page_documents_every_backward_op():
    classes = {name for name in ops.__all__ if isinstance(getattr(ops, name), type)}
    backward = {name for name in classes if issubclass(getattr(ops, name), fm.BackwardOp)} - {"BackwardOp"}
    (members,) = re.findall(r"automodule:: fusedmoe\.ops\n   :members: (.*)", PAGE)
    assert backward <= set(members.split(", "))
    assert backward - {"DGLU"} <= set(re.findall(r"`(\w+)`", PAGE))
