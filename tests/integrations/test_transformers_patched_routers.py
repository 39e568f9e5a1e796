"""Routers of transformers that `patch_routers` runs as `fusedmoe.Router`, in one chain with their experts."""

import copy
import pickle

import pytest
import torch
from kit import moe_families
from kit.compare import assert_close
from kit.toy import outcome
from torch import distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedmoe as fm
from fusedmoe.integrations.transformers import patch_routers, router_kinds, routers, unpatch_routers

# their routers compute logits in fp32, so that the choice is the same; the page of families has all of them
IN_FP32 = [
    "beam", "deepseek_v2", "deepseek_v3", "dots3_note", "ernie4_5_moe", "flint", "glm4_moe", "hy_v3", "kimi_linear",
    "mimo_v2_flash", "mistral_large4", "nemotron_h",
]  # fmt: skip
# which compute them in the dtype of the model
IN_OWN_DTYPE = ["gpt_oss", "granitemoe_swa", "minimax_m2", "minimax_m3_vl", "mixtral", "qwen3_moe"]
# the ops of the router's chain: experts that read projected tokens are apart, and weights after a bias are no op
OPS = {"nemotron_h": 1, "gpt_oss": 6}
CLOSE = {"rtol": 2e-4, "atol": 2e-6}
OWN, ALONE, TOGETHER = [("dispatch", 6)], [("router", 1), ("dispatch", 6)], [("router", 7)]

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def chains(monkeypatch):
    """The first op and the number of ops of each chain that ran."""
    ran, run = [], routers.modes.run

    def counted(chain, *args):
        ran.append((next(iter(chain._modules)), len(chain)))
        return run(chain, *args)

    monkeypatch.setattr(routers.modes, "run", counted)
    return ran


def built(family="glm4_moe", *args, **settings):
    if family not in moe_families.family_names():
        pytest.skip("this version of transformers has no such family")
    return moe_families.tiny(family, "fusedmoe", *args, **settings)


def first(tiny):
    """The first block with experts, and its router."""
    block = tiny.model.get_submodule(tiny.experts[0][0].rpartition(".")[0])
    return block, block.gate if hasattr(block, "gate") else block.router


@pytest.mark.parametrize("family", [*IN_FP32, *IN_OWN_DTYPE])
def test_the_same_model(family, chains, caplog):
    """Choices, weights, logits, outputs and gradients, with the same parameters."""
    tiny = built(family)
    keys, parameters, number = list(tiny.model.state_dict()), list(tiny.model.parameters()), len(tiny.experts)
    want = moe_families.step(tiny)
    if family in IN_OWN_DTYPE:
        reason = "it computes its logits in the dtype of the model, float32"
        assert patch_routers(tiny.model) == 0
        assert f"leaves {type(first(tiny)[1]).__name__} as it is: {reason}" in caplog.text
        assert f"chooses the experts and runs unchanged: {reason}" in str(fm.explain(tiny.model, tokens=8))
        assert patch_routers(tiny.model, fp32_logits=True) == number
    assert patch_routers(tiny.model) == number
    assert "the model's own router" not in str(fm.explain(tiny.model, tokens=8))
    chains.clear()
    got = moe_families.step(tiny)
    assert_close(got, want, **CLOSE)
    assert [chain for chain in chains if chain[0] == "router"] == [("router", OPS.get(family, 7))] * number
    assert list(tiny.model.state_dict()) == keys
    assert all(a is b for a, b in zip(tiny.model.parameters(), parameters, strict=True))
    if family in IN_OWN_DTYPE:
        block, router = first(tiny)
        correction = [block.e_score_correction_bias] if family == "minimax_m2" else []  # an argument of its router
        found = router.bfloat16()(torch.randn(3, 64).bfloat16(), *correction)
        assert [t.dtype for t in found] == [torch.float32, torch.float32, torch.int64]
    assert unpatch_routers(tiny.model) == number
    assert not any("forward" in vars(m) or routers.ROUTER in vars(m) for m in tiny.model.modules())


@pytest.mark.parametrize("family", ["glm4_moe", "ernie4_5_moe", "deepseek_v2"])
def test_the_same_choice_in_bf16(family):
    block, router = first(built(family, torch.bfloat16))
    x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y, (logits, weights, index) = block(x), router(x.view(-1, 64))
    patch_routers(block)
    our_logits, our_weights, our_index = router(x.view(-1, 64))
    index, order = index.sort()
    our_index, our_order = our_index.sort()
    assert torch.equal(our_index, index)
    torch.testing.assert_close(our_logits, logits)
    torch.testing.assert_close(our_weights.gather(1, our_order), weights.gather(1, order).float(), rtol=4e-3, atol=0)
    # Ernie's own router rounds its weights to bf16
    assert (block(x) - y).norm() < (5e-3 if "ernie" in family else 1e-3) * y.norm()


def test_the_plan():
    tiny = built("glm4_moe", torch.bfloat16)
    reason = "Glm4MoeTopkRouter, chooses the experts and runs unchanged: call patch_routers(model) to run it"
    assert reason in str(fm.explain(tiny.model, tokens=64, arch=90))
    patch_routers(tiny.model)
    (group,) = fm.explain(tiny.model, tokens=64, arch=90).groups
    assert not group.router
    (plan,) = group.explanation.plans
    assert not plan.unfused
    assert {"sm90.router_dispatch", "sm90.router_backward"} <= {step.rule for step in plan.steps}
    # apart
    tiny.experts[0][1].register_forward_hook(lambda *_: None)
    apart, together = fm.explain(tiny.model, tokens=64, arch=90).groups
    assert [len(g.explanation.plans) for g in (apart, together)] == [2, 1]
    assert "sm90.router" in {step.rule for step in apart.explanation.steps}
    assert not apart.router
    with torch.autocast("cpu"):
        assert "it is patched, but autocast is on" in str(fm.explain(tiny.model, tokens=64))


def test_recorded_logits_and_the_loss_of_them(chains):
    tiny = built("qwen3_moe")
    want = moe_families.step(tiny, output_router_logits=True)
    recorded = tiny.model(**tiny.inputs, output_router_logits=True).router_logits
    patch_routers(tiny.model, fp32_logits=True)
    assert_close(moe_families.step(tiny, output_router_logits=True), want, **CLOSE)
    assert "aux_loss" in want
    chains.clear()
    with torch.inference_mode():  # the hooks of transformers change nothing
        again = tiny.model(**tiny.inputs, output_router_logits=True).router_logits
    assert_close(dict(enumerate(again)), dict(enumerate(recorded)), **CLOSE)
    assert chains == TOGETHER * 2


# ---- changes after the patch --------------------------------------------------------------------------------------


def experts_elsewhere(tiny):
    """As in expert parallelism: the index of experts elsewhere is the number of those here, and their weight zero."""

    def only_here(module, args, routed):
        logits, weights, index = routed
        return logits, weights.masked_fill(index >= 5, 0), index.masked_fill(index >= 5, 5)

    block, router = first(tiny)
    router.register_forward_hook(only_here)
    keep_experts(5, block.experts)


def keep_experts(number, experts, *others):
    experts.num_experts = number
    for module, name in ((experts, "gate_up_proj"), (experts, "down_proj"), *others):
        setattr(module, name, nn.Parameter(getattr(module, name).detach()[:number].clone()))


def pruned(tiny):
    block, router = first(tiny)
    keep_experts(4, block.experts, (router, "weight"))
    router.num_experts = 4


def on_router(hook):
    return lambda tiny: first(tiny)[1].register_forward_hook(hook)


def halve_data(module, args, routed):
    routed[1].data.mul_(0.5)


def halve_in_transformers(module, args, routed):
    """By a hook that is taken for one that only records."""
    routed[1].mul_(0.5)


halve_in_transformers.__module__ = "transformers.integrations"


def frozen(part):
    def change(tiny):
        for name, parameter in tiny.model.named_parameters():
            parameter.requires_grad_(f".{part}." not in name)

    return change


# family, the change, the chains that run then, and why the model's own router runs, in explain()
CHANGES = {
    "another choice": (
        "glm4_moe", lambda t: setattr(first(t)[1], "top_k", 3), OWN + TOGETHER, "its settings have changed since",
    ),
    "pruned": ("qwen3_moe", pruned, OWN + TOGETHER, "its weight has another shape than before"),
    "autocast": ("glm4_moe", moe_families.autocast, OWN * 2, ""),
    "hook on experts": (
        "glm4_moe", lambda t: t.experts[0][1].register_forward_hook(lambda _, __, y: 2 * y), ALONE + TOGETHER, "",
    ),
    "eager experts": ("glm4_moe", lambda t: t.model.set_experts_implementation("eager"), ALONE[:1] * 2, ""),
    "experts elsewhere": ("glm4_moe", experts_elsewhere, ALONE + TOGETHER, ""),
    "another result": (  # which the experts must get
        "glm4_moe", on_router(lambda _, __, routed: (routed[0], 2 * routed[1], routed[2])), ALONE + TOGETHER, "",
    ),
    "tokens of the router": (  # such as noise, which the experts must not read
        "glm4_moe",
        lambda t: first(t)[1].register_forward_pre_hook(lambda _, args: (1.5 * args[0], *args[1:])),
        ALONE + TOGETHER, "",
    ),
    "weights in place by transformers": (
        "glm4_moe", on_router(halve_in_transformers), TOGETHER + OWN + TOGETHER, "",
    ),
    "weights through data": (  # a change that torch does not count
        "glm4_moe", on_router(halve_data), ALONE + TOGETHER, "",
    ),
    "fp64": ("glm4_moe", lambda t: t.model.double(), OWN * 2, "tokens or weight are not in bf16"),
    "wrapped": ("glm4_moe", lambda t: setattr(first(t)[0], "gate", nn.Sequential(first(t)[1])), ALONE + TOGETHER, ""),
    "checkpointing": ("glm4_moe", lambda t: moe_families.checkpointed(t.model), TOGETHER * 4, ""),
    **{f"frozen {part}": ("glm4_moe", frozen(part), TOGETHER * 2, "") for part in ("gate", "experts")},
}  # fmt: skip
SAME = {"fp64", "wrapped", "checkpointing", "eager experts", *(name for name in CHANGES if name.startswith("frozen"))}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_changes_after_the_patch(name, chains):
    family, change, expected, reason = CHANGES[name]
    tiny = built(family)
    patch_routers(tiny.model, fp32_logits=True)
    before = moe_families.step(tiny)["logits"]
    change(tiny)
    assert f"it is patched, but {reason}" in str(fm.explain(tiny.model, tokens=8)) or not reason
    chains.clear()
    got = moe_families.step(tiny)
    assert chains == expected
    assert torch.allclose(got["logits"].float(), before, rtol=1e-3, atol=1e-4) is (name in SAME)
    assert unpatch_routers(tiny.model) == 2
    assert_close(got, moe_families.step(tiny), **CLOSE)


def test_copies():
    tiny = built("hy_v3")
    patch_routers(tiny.model)
    want = moe_families.step(tiny)
    own = tiny.model
    for model in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert not {*map(id, model.modules())} & {*map(id, own.modules())}
        tiny.model = model
        block, router = first(tiny)
        held = vars(router)[routers.ROUTER]
        assert held is vars(block.experts)[routers.ROUTER]
        assert (held.block, held.router) == (block, router)
        assert_close(moe_families.step(tiny), want, rtol=0, atol=0)
        with torch.no_grad():
            router.weight.neg_()
        assert not torch.allclose(moe_families.step(tiny)["logits"], want["logits"])


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
@pytest.mark.parametrize("experts_too", [False, True])
def test_under_fsdp(mesh, experts_too, chains):
    """Each layer, or also its experts, which are then gathered by their own call."""
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    tiny = built()
    want = moe_families.step(tiny)
    patch_routers(tiny.model)
    for layer in tiny.model.model.layers:
        if experts_too:
            fully_shard(layer.mlp.experts, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(tiny.model, mesh=mesh)
    chains.clear()
    logits, loss = moe_families.logits_and_loss(tiny.model(**tiny.inputs))
    loss.backward()
    got = {"logits": logits, **{name: p.grad.full_tensor() for name, p in tiny.model.named_parameters()}}
    assert_close(got, {name: want[name] for name in got}, **CLOSE)
    assert chains == (ALONE if experts_too else TOGETHER) * 2
    assert "under FSDP, a call gathers it and runs fm.Router" in str(fm.explain(tiny.model, tokens=8))


# ---- graphs -------------------------------------------------------------------------------------------------------

X = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.usefixtures("fresh_graphs")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks around
def test_one_graph_with_one_operator():
    """Without an eager call of the patched block before it."""
    block, router = first(built("hy_v3", num_hidden_layers=1))
    want = outcome(block, X)
    patch_routers(block)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    assert_close(outcome(block, X, compiled), want, **CLOSE)
    assert counter.frame_count == 1
    assert sum("run_chain" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes) == 1
    router.top_k = 3  # a guard; the model's own router runs
    changed = outcome(block, X, compiled)
    assert counter.frame_count == 2
    assert_close(changed, outcome(block, X), **CLOSE)
    assert not torch.allclose(changed["y"], want["y"])


# ---- errors, and what is not patched ------------------------------------------------------------------------------


def test_a_router_that_differs_is_left(monkeypatch, caplog):
    tiny = built()
    router = type(first(tiny)[1])
    forward = router.forward
    monkeypatch.setattr(router_kinds, "_verdicts", {})
    monkeypatch.setattr(router, "forward", lambda self, x: (*forward(self, x)[:2], forward(self, x)[2].flip(1)))
    assert patch_routers(tiny.model) == 0
    assert "it differs from fm.Router" in caplog.text


def test_errors():
    with pytest.raises(fm.InputError, match=r"expected a model of .* with routers next to experts, got Linear"):
        patch_routers(nn.Linear(2, 2))
    tiny = built()
    with pytest.raises(fm.InputError, match="fp32_logits"):
        patch_routers(tiny.model, fp32_logits="yes")
    first(tiny)[1].forward = print
    with pytest.raises(fm.InputError, match=r"layers\.0\.mlp.* was already replaced, by"):
        patch_routers(tiny.model)
