"""Models of transformers under torch.compile, with the experts of this package: one graph, the same results."""

import pytest
import torch
from kit import moe_families
from kit.stand_in_experts import Beta
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedmoe.integrations.transformers as fusedmoe_transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo looks around
]
FAMILIES = ["deepseek_v3", "gpt_oss"]
FAMILIES += [
    pytest.param(name, marks=pytest.mark.slow) for name in ("llama4", "mixtral", "nemotron_h", "olmoe", "qwen3_moe")
]
# whose own code breaks the graph, whatever runs its experts, and why
BREAKS_BY_ITSELF = {
    "ernie4_5_vl_moe": "it asks whether there are tokens of images: data-dependent branching",
    "qwen4_exp": "its sparse attention takes sizes from a tensor: data-dependent expression",
}
ROUTINGS = 10


@pytest.fixture(autouse=True)
def fresh():
    fusedmoe_transformers.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def one_layer(family, dtype=torch.float32):
    fewer = {"num_hidden_layers": 1}
    if family in ("gpt_oss", "llama4"):
        fewer["layer_types"] = ["full_attention"]
    if family == "nemotron_h":  # has one layer of each kind
        fewer = {}
    tiny = moe_families.tiny(family, None if family == "llama4" else "fusedmoe", dtype, **fewer)
    if family == "llama4":
        fusedmoe_transformers.patch_llama4(tiny.model)
    assert len(tiny.experts) == 1
    return tiny


def results(tiny, run, inputs):
    tiny.model.zero_grad()
    output = run(**inputs)
    output.loss.backward()
    grads = {name: p.grad.clone() for name, p in tiny.model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach(), "loss": output.loss.detach(), **grads}


def assert_same(got, want, **tolerances):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], **tolerances, msg=lambda text, name=name: f"{name}: {text}")
        assert want[name].any(), f"{name}: zeros would pass"


def other_tokens(tiny, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, tiny.inputs["input_ids"].shape, generator=generator)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_for_every_routing(family):
    tiny = one_layer(family)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tiny.model, fullgraph=True, backend=counter)
    routings = set()
    experts = tiny.experts[0][1]
    handle = experts.register_forward_pre_hook(lambda module, args: routings.add(args[1].numpy().tobytes()))
    wants = [results(tiny, tiny.model, other_tokens(tiny, seed)) for seed in range(2)]
    for seed in range(2, ROUTINGS):
        tiny.model(**other_tokens(tiny, seed))
    handle.remove()
    assert len(routings) == ROUTINGS, "the same routing again"
    for seed, want in enumerate(wants):
        assert_same(results(tiny, compiled, other_tokens(tiny, seed)), want, rtol=1e-4, atol=1e-6)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2, ROUTINGS):
            compiled(**other_tokens(tiny, seed))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")  # of grouped_mm
@pytest.mark.parametrize("implementation", [pytest.param("grouped_mm", marks=pytest.mark.slow), "fusedmoe"])
@pytest.mark.parametrize("family", BREAKS_BY_ITSELF)
def test_what_breaks_a_graph_by_itself(family, implementation):
    if family not in moe_families.family_names():
        pytest.skip("this version of transformers has no such family")
    tiny = moe_families.tiny(family, implementation, torch.bfloat16)
    compiled = torch.compile(tiny.model, fullgraph=True, backend="eager")
    reason = BREAKS_BY_ITSELF[family].rpartition(": ")[2]
    with torch.no_grad(), pytest.raises(Exception, match=f"(?i){reason}"):
        compiled(**tiny.inputs)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:UserWarning")  # of Inductor's own code
def test_inductor():
    """A layer's router and experts: of a whole model it compiles far more that is not ours."""
    block = one_layer("qwen3_moe").model.model.layers[0].mlp
    x = torch.randn(2, 12, 64)

    def outcome(run):
        block.zero_grad()
        given = x.clone().requires_grad_()
        y = run(given)
        y.square().sum().backward()
        return {"y": y.detach(), "x": given.grad, **{name: p.grad.clone() for name, p in block.named_parameters()}}

    want = outcome(block)
    assert_same(outcome(torch.compile(block, fullgraph=True)), want, rtol=1e-4, atol=1e-5)


class Mish(nn.Module):
    def forward(self, gate):
        return gate * torch.tanh(nn.functional.softplus(gate))


def change_limit(experts):
    experts.swiglu_limit = 0.5


def change_beta(experts):
    experts.act_fn.beta = 2.0


def change_class(experts):
    experts.act_fn = Mish()


@pytest.mark.parametrize("change", [change_limit, change_beta, change_class])
def test_a_changed_gate_is_seen(change):
    """Settings and the class of the activation are what the graph has guards on."""
    tiny = moe_families.tiny("glm5_next" if change is change_limit else "qwen3_moe", "fusedmoe")
    experts = tiny.experts[0][1]
    if change is change_beta:
        experts.act_fn = Beta()
    x = torch.randn(20, 64) * 10
    given = (x, torch.rand(20, 8).topk(2).indices, torch.rand(20, 2))
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    before = compiled(*given)
    torch.testing.assert_close(before, experts(*given))
    change(experts)
    after = compiled(*given)
    torch.testing.assert_close(after, experts(*given))
    assert not torch.allclose(after, before)
