"""torch.export of inference, not strict: the program gives what the module gives, also saved and loaded.
torch.jit.trace is refused.
"""

import io

import pytest
import torch
from kit.compare import assert_bitwise
from torch import nn

import fusedmoe as fm

E, H, I = 4, 16, 8  # noqa: E741  (experts, hidden, intermediate)
ROWS = torch.export.Dim("rows", min=2, max=4096)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),  # torch 2.11's own, where it loads
    pytest.mark.filterwarnings("ignore:.torch.jit.trace(_method)?. is (deprecated|not supported)"),
]


def rows(count=12):
    return torch.randn(count, H, generator=torch.Generator().manual_seed(count))


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


@pytest.mark.parametrize(("name", "dynamic"), [
    ("Sequential", False), ("one op", True), ("routed", True), ("MoE", True), ("MoE", False),
])  # fmt: skip
def test_the_program_is_the_module(name, dynamic):
    module, program = exported(name, dynamic)
    loaded = saved_and_loaded(program)
    for count in (12, 2, 1000) if dynamic else (12,):
        inputs = MODULES[name][1](count)
        with torch.no_grad():
            want = module(rows(count), **inputs)
            assert_bitwise([run(rows(count), **inputs) for run in (loaded, program.module())], [want, want])
    assert not [n.target for n in program.graph.nodes if "run_chain" in str(n.target)]
    assert program.state_dict.keys() == module.state_dict().keys()
    x = rows().requires_grad_()  # the module goes on as before
    module.train()(x, **MODULES[name][1]()).square().sum().backward()
    assert all(p.grad.any() for p in [x, *module.parameters()])


def test_a_program_in_bf16_is_of_operators_of_torch_alone():
    module, x = mlp(bias=False).eval().bfloat16(), rows().bfloat16()
    with torch.no_grad():
        program = torch.export.export(module, (x,), splits(), strict=False)
        assert_bitwise(program.module()(x, **splits()), module(x, **splits()))
    assert {node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")} == {"aten"}


@pytest.mark.parametrize("around", [lambda: fm.recipe("fp8_row"), lambda: torch.autocast("cpu", torch.bfloat16)])
def test_settings_of_the_export_are_in_the_program(around):
    with around():
        module, program = exported("Sequential", True)
    loaded = saved_and_loaded(program)
    for count in (12, 100):
        x, inputs = rows(count), splits(count)
        with torch.no_grad():
            with around():
                want = module(x, **inputs)
            assert_bitwise(loaded(x, **inputs), want)
            assert not torch.equal(module(x, **inputs), want)


@pytest.mark.parametrize("make", [lambda: fm.MoE(H, I, E, 2), fm.SwiGLU], ids=["MoE, called", "op"])
def test_a_trace_is_refused_and_the_remedies_are_named(make):
    module, x = make(), rows()
    assert module(x).any()
    with pytest.raises(fm.InputError, match=r"outside of torch\.jit\.trace.*torch\.export\.export or torch\.compile"):
        torch.jit.trace(module, (x,))
    assert module(x).any()
