"""Models of transformers with the experts of this package under torch.compile and torch.export."""

import pytest
import torch
from kit import moe_families
from kit.compare import assert_close
from kit.moe_families import step
from kit.stand_in_experts import Beta
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedmoe.integrations.transformers as fusedmoe_transformers

pytestmark = [
    pytest.mark.usefixtures("registered", "fresh_graphs"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo looks around
]
ROUTINGS = 6


def slow_except(quick, names):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def one_layer(family):
    fewer = {"num_hidden_layers": 1}
    if family in ("gpt_oss", "llama4"):
        fewer["layer_types"] = ["full_attention"]
    if family == "nemotron_h":  # has one layer of each kind
        fewer = {}
    tiny = moe_families.tiny(family, None if family == "llama4" else "fusedmoe", **fewer)
    if family == "llama4":
        fusedmoe_transformers.patch_llama4(tiny.model)
    assert len(tiny.experts) == 1
    return tiny


def other_tokens(tiny, seed):
    ids = torch.randint(3, 128, tiny.inputs["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("family", slow_except(
    ("gpt_oss",), ("deepseek_v3", "gpt_oss", "llama4", "mixtral", "nemotron_h", "olmoe", "qwen3_moe")
))  # fmt: skip
def test_one_graph_for_every_routing(family):
    tiny = one_layer(family)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(tiny.model, fullgraph=True, backend=counter)
    routings = set()
    handle = tiny.experts[0][1].register_forward_pre_hook(lambda module, args: routings.add(args[1].numpy().tobytes()))
    wants = [step(tiny, **other_tokens(tiny, seed)) for seed in range(2)]
    for seed in range(2, ROUTINGS):
        tiny.model(**other_tokens(tiny, seed))
    handle.remove()
    assert len(routings) == ROUTINGS, "the same routing again"
    for seed, want in enumerate(wants):
        assert_close(step(tiny, compiled, **other_tokens(tiny, seed)), want, rtol=1e-4, atol=1e-6)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2, ROUTINGS):
            compiled(**other_tokens(tiny, seed))
    assert counter.frame_count == 1


CHANGES = {
    "limit": ("glm5_next", nn.SiLU, lambda m: setattr(m, "swiglu_limit", 0.5)),
    "number": ("qwen3_moe", Beta, lambda m: setattr(m.act_fn, "beta", 2.0)),
    "class": ("qwen3_moe", nn.SiLU, lambda m: setattr(m, "act_fn", nn.Mish())),
}


@pytest.mark.parametrize(("family", "act_fn", "change"), CHANGES.values(), ids=CHANGES)
def test_a_changed_gate_is_seen(family, act_fn, change):
    """Settings and the class of the activation are what the graph has guards on."""
    experts = moe_families.tiny(family, "fusedmoe").experts[0][1]
    experts.act_fn = act_fn()
    given = torch.randn(20, 64) * 10, torch.rand(20, 8).topk(2).indices, torch.rand(20, 2)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    before = compiled(*given)
    torch.testing.assert_close(before, experts(*given))
    change(experts)
    after = compiled(*given)
    torch.testing.assert_close(after, experts(*given))
    assert not torch.allclose(after, before)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


def program_of(module, given):
    with torch.no_grad():
        return torch.export.export(module, given, strict=False)


def nodes(program):
    return [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in program.graph.nodes]


@pytest.mark.parametrize("name", slow_except(("gpt_oss",), ("gpt_oss", "mixtral", "nemotron_h", "qwen3_moe")))
def test_the_same_program_before_and_after_a_first_call(name):
    tiny = moe_families.tiny(name, "fusedmoe")
    module, given = Logits(tiny.model), (tiny.inputs["input_ids"],)
    before = program_of(module, given)
    with torch.no_grad():
        want = module(*given)
        after = program_of(module, given)
        assert want.abs().sum() > 0
        assert torch.equal(before.module()(*given), want)
    meta = [n for n in before.graph.nodes if str(n.kwargs.get("device")) == "meta"]
    assert not meta, "tensors on the meta device are made in the program"
    assert nodes(before) == nodes(after)
