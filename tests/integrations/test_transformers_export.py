"""`torch.export` of models of transformers: one program, whether or not the model has been called before."""

import pytest
import torch
from kit import moe_families
from kit.stand_in_experts import Beta, Plain, config
from torch import nn

import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.base.log import forget_said

FAMILIES = ["gpt_oss", "mixtral", "nemotron_h", "qwen3_moe"]  # stored (E, in, out) with biases; not gated


@pytest.fixture(autouse=True)
def registered():
    forget_said()
    fusedmoe_transformers.register()
    torch.manual_seed(0)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


def model(family):
    tiny = moe_families.tiny(family, "fusedmoe")
    return Logits(tiny.model), (tiny.inputs["input_ids"],)


def experts():
    """With an activation that is none of the ops here."""
    module = Plain(config()).float()
    module.act_fn = Beta()
    module.act_fn.beta = nn.Parameter(torch.tensor(1.5))
    index = torch.arange(20).view(10, 2) % 8
    return module, (torch.randn(10, 16), index, torch.rand(10, 2))


MODELS = {family: lambda family=family: model(family) for family in FAMILIES} | {"experts": experts}


def program_of(module, given):
    with torch.no_grad():
        return torch.export.export(module, given, strict=False)


def nodes(program):
    return [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in program.graph.nodes]


@pytest.mark.filterwarnings("ignore:.*is none of the activations")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("mixtral", "nemotron_h") else []) for name in MODELS],
)
def test_the_same_program_before_and_after_a_first_call(name):
    module, given = MODELS[name]()
    before = program_of(module, given)
    with torch.no_grad():
        want = module(*given)
        after = program_of(module, given)
        assert want.abs().sum() > 0
        assert torch.equal(before.module()(*given), want)
    meta = [n for n in before.graph.nodes if str(n.kwargs.get("device")) == "meta"]
    assert not meta, "tensors on the meta device are made in the program"
    assert nodes(before) == nodes(after)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_ahead_of_time_compilation_of_a_model_that_was_never_called(tmp_path):
    module, given = model("qwen3_moe")
    program = program_of(module, given)
    try:
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    except torch._inductor.exc.InvalidCxxCompiler:
        pytest.skip("no C++ compiler")
    run = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        want = module(*given)
        torch.testing.assert_close(run(*given), want, rtol=1e-4, atol=1e-5)
    assert want.abs().sum() > 0
