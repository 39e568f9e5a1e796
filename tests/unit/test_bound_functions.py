"""A bound function serves many calls. It keeps no tensor of the first call: the tensor would stay in memory, and its
autograd graph too.
"""

import ast
from pathlib import Path

import pytest
import torch
from kit.compare import pairwise
from kit.lifetimes import RECIPES, check_freed

import fusedmoe as fm
from fusedmoe import kernels

KERNELS = Path(kernels.__file__).parent
COMPREHENSIONS = "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"


def codes_in(code):
    """Yield the code objects in a code object, at any depth, each after its name and first line."""
    for inner in code.co_consts:
        if hasattr(inner, "co_freevars"):
            yield (inner.co_name, inner.co_firstlineno), inner
            yield from codes_in(inner)


def kept_tensors(source):
    """Return (outer, inner, name) of each tensor argument of a function that a function inside it keeps."""
    codes, found = dict(codes_in(compile(source, "source", "exec"))), []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            tensors = {a.arg for a in arguments if a.annotation and "Tensor" in ast.unparse(a.annotation)}
            line = function.decorator_list[0].lineno if function.decorator_list else function.lineno
            code = codes[function.name, line]
            own = tensors & set(code.co_cellvars)
            found += [
                (function.name, name, kept)
                for (name, _), inner in codes_in(code)
                if name not in COMPREHENSIONS
                for kept in sorted(own & set(inner.co_freevars))
            ]
    return found


def test_kept_tensors_are_found():
    source = """
def bind(weight: Tensor, bias: Tensor | None, rows: int):
    like = weight.shape

    def form():
        return weight.new_empty(like, rows)

    def run(weight: Tensor):
        return form(), (lambda bias: bias)(weight)

    return run
"""
    assert kept_tensors(source) == [("bind", "form", "weight")]


def test_functions_that_launch_kernels_keep_no_tensor():
    sources = {path: path.read_text() for path in KERNELS.rglob("*.py")}
    assert sum("def bind_" in source for source in sources.values()) > 5
    for path, source in sources.items():
        assert [kept for kept in kept_tensors(source) if "bind_" in kept[0]] == [], path


@pytest.mark.usefixtures("hopper_machine")
@pytest.mark.parametrize(("recipe", "autocast", "disabled"), pairwise(RECIPES, (False, True), ("", "*")))
def test_no_autograd_graph_outlives_its_step(recipe, autocast, disabled):
    layer = fm.MoE(128, 128, 4, 2, dtype=torch.float32 if autocast else torch.bfloat16)
    x = torch.randn(40, 128, dtype=torch.bfloat16).requires_grad_()

    def forward():
        with fm.recipe(recipe), fm.disabled(disabled), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return layer(x)

    check_freed(forward, [x, *layer.parameters()])
