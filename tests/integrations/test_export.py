"""torch.export of inference, not strict: the program gives what the module gives, also saved and in another process."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedmoe as fm

E, H, I = 4, 16, 8  # noqa: E741  (experts, hidden, intermediate)
ROWS = torch.export.Dim("rows", min=2, max=4096)
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11's own, where it loads

LOADS = """
import sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", ".torch.jit.script(_method)?. is (deprecated|not supported)")
warnings.filterwarnings("ignore", "The given buffer is not writable")
import torch
import fusedmoe
path, names = sys.argv[1], sys.argv[2:]
for name in names:
    program = torch.export.load(f"{path}/{name}.pt2").module()
    calls = torch.load(f"{path}/{name}.calls")
    for x, inputs, expected in calls:
        with torch.no_grad():
            assert torch.equal(program(x, **inputs), expected), name
        assert expected.abs().sum() > 0
print("equal")
"""


def rows(count=12, hidden=H):
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(count))


def splits(count=12):
    return {"splits": torch.tensor([count // 3, 0, count // 2, 1 if count > 5 else 0])}


def routing(count=12):
    index = torch.arange(2 * count).view(-1, 2) % (E + 1)  # E is a sentinel
    return {"expert_index": index, "expert_weight": torch.rand(count, 2, generator=torch.Generator().manual_seed(0))}


def mlp(bias=True):
    torch.manual_seed(0)
    return fm.Sequential(fm.GroupedLinear(E, H, 2 * I, bias=bias), fm.SwiGLU(), fm.GroupedLinear(E, I, H, bias=bias))


def routed():
    return fm.Sequential(fm.Dispatch(), *mlp(), nn.LayerNorm(H), fm.Combine("probs"))


class Model(nn.Module):
    """Layers as a model has them, called with a batch of sequences flattened."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(H)
        self.moe = fm.MoE(H, I, E, 2, shared_intermediate=I, shared_gate=True)
        self.other = fm.MoE(H, I, E, 2, score="sigmoid", num_groups=2, top_groups=1, activation="geglu")

    def forward(self, x):
        x = x + self.moe(self.norm(x))
        return x + self.other(x)


class WithSplits(nn.Module):
    """Names the runtime inputs: torch.export takes ``dynamic_shapes`` of no module with ``**kwargs``."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, splits):
        return self.module(x, splits=splits)


class WithRouting(WithSplits):
    def forward(self, x, expert_index, expert_weight):
        return self.module(x, expert_index=expert_index, expert_weight=expert_weight)


MODULES = {
    "Sequential": (mlp, splits, WithSplits, {"splits": None}),
    "one op": (lambda: fm.GroupedLinear(E, H, I, bias=True), splits, WithSplits, {"splits": None}),
    "routed": (routed, routing, WithRouting, {"expert_index": {0: ROWS}, "expert_weight": {0: ROWS}}),
    "MoE": (Model, lambda count=12: {}, lambda module: module, {}),
}


def exported(name, dynamic):
    """The module, and its program for 12 rows or for any number of them."""
    make, inputs, named, shapes = MODULES[name]
    module, dynamic_shapes = make().eval(), None
    if dynamic:
        module, dynamic_shapes = named(module), {"x": {0: ROWS}, **shapes}
    with torch.no_grad():
        program = torch.export.export(module, (rows(),), inputs(), strict=False, dynamic_shapes=dynamic_shapes)
    return module, program


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_the_program_is_the_module(name, dynamic):
    module, program = exported(name, dynamic)
    loaded = saved_and_loaded(program)
    for count in (12, 2, 7, 1000) if dynamic else (12,):
        inputs = MODULES[name][1](count)
        with torch.no_grad():
            want = module(rows(count), **inputs)
            assert torch.equal(loaded(rows(count), **inputs), want)
            assert torch.equal(program.module()(rows(count), **inputs), want)
        assert want.abs().sum() > 0
    assert not [n.target for n in program.graph.nodes if "run_chain" in str(n.target)]


def test_a_program_in_bf16_is_of_operators_of_torch_alone():
    module = mlp(bias=False).eval().bfloat16()
    x = rows().bfloat16()
    with torch.no_grad():
        program = torch.export.export(module, (x,), splits(), strict=False)
        want = module(x, **splits())
        assert torch.equal(program.module()(x, **splits()), want)
    assert want.abs().sum() > 0
    assert {node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")} == {"aten"}


def test_states_have_their_names():
    module, program = exported("MoE", False)
    assert program.state_dict.keys() == module.state_dict().keys()


@pytest.mark.parametrize("recipe", ["fp8_row"])
def test_a_recipe_of_the_export_is_in_the_program(recipe):
    with fm.recipe(recipe):
        module, program = exported("Sequential", True)
    loaded = saved_and_loaded(program)
    for count in (12, 100):
        x, inputs = rows(count), splits(count)
        with torch.no_grad():
            with fm.recipe(recipe):
                want = module(x, **inputs)
            assert torch.equal(loaded(x, **inputs), want)
            assert not torch.equal(module(x, **inputs), want)


def test_autocast_of_the_export_is_in_the_program():
    with torch.autocast("cpu", torch.bfloat16):
        module, program = exported("Sequential", False)
        want = module(rows(), **splits()).detach()
    got = saved_and_loaded(program)(rows(), **splits())
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, want)


def test_wrong_arguments_are_refused_as_in_a_call():
    module = mlp()
    for wrong, inputs, message in (
        (rows(hidden=15), splits(), r"0\.GroupedLinear.*x: expected shape \(rows, 16\), got \(12, 15\)"),
        (rows(), {}, "the runtime input 'splits' is missing"),
        (rows(), {"splits": torch.tensor([1, 2])}, r"splits: expected shape \(4,\)"),
    ):
        with pytest.raises(fm.InputError, match=message):
            torch.export.export(module, (wrong,), inputs, strict=False)


def test_the_module_goes_on_as_before():
    module, _ = exported("MoE", False)
    x = rows().requires_grad_()
    module.train()(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for name, p in module.named_parameters())
    assert x.grad.abs().sum() > 0


@pytest.mark.slow  # a process that imports torch
def test_loaded_by_another_process(tmp_path):
    names = ["routed"]
    for name in names:
        module, program = exported(name, True)
        torch.export.save(program, tmp_path / f"{name}.pt2")
        calls = []
        for count in (12, 31):
            inputs = MODULES[name][1](count)
            with torch.no_grad():
                calls.append((rows(count), inputs, module(rows(count), **inputs)))
        torch.save(calls, tmp_path / f"{name}.calls")
    command = [sys.executable, "-c", LOADS, str(tmp_path), *names]
    folder = Path(fm.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"]
