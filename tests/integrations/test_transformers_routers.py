"""Routers of transformers that `patch_routers` runs as `fusedmoe.Router`, in one chain with their experts."""

import copy
import importlib.util
import pickle
import warnings

import pytest
import torch
from kit import moe_families
from torch import distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers
from benchmarks import page, stack
from fusedmoe.base.log import forget_said
from fusedmoe.commands.timing import CpuTimer
from fusedmoe.integrations.transformers import router_kinds, routers

# their routers compute logits in fp32, so that the choice is the same; DeepSeek-V3's, and others
LIKE_DEEPSEEK_V3 = [
    "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_v3", "deepseek_v32", "dots1", "dots3_note",
    "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next", "glm_moe_dsa", "hy_v4",
    "hy_v4_vl", "kimi_linear", "mimo_v2_flash", "nemotron_h", "solar_open",
]  # fmt: skip
IN_FP32 = ["deepseek_v2", "ernie4_5_moe", "flint", "hy_v3", "mistral_large4", *LIKE_DEEPSEEK_V3]
# which compute them in the dtype of the model
IN_OWN_DTYPE = ["gpt_oss", "granitemoe_swa", "minimax_m2", "minimax_m3_vl", "mixtral", "qwen3_moe"]
APART = {"nemotron_h"}  # its experts read projected tokens


@pytest.fixture(autouse=True)
def registered():
    forget_said()
    fusedmoe_transformers.register()


@pytest.fixture
def chains(monkeypatch):
    """The first op and the number of ops of each chain that ran."""
    ran, run = [], routers.modes.run

    def counted(chain, *args):
        ran.append((next(iter(chain._modules)), len(chain)))
        return run(chain, *args)

    monkeypatch.setattr(routers.modes, "run", counted)
    return ran


def built(family, *args, **settings):
    if family not in moe_families.family_names():
        pytest.skip("this version of transformers has no such family")
    return moe_families.tiny(family, "fusedmoe", *args, **settings)


def first(tiny):
    """The first block with experts, and its router."""
    block = tiny.model.get_submodule(tiny.experts[0][0].rpartition(".")[0])
    return block, block.gate if hasattr(block, "gate") else block.router


def recording(returned, name):
    """A hook that records a router's results, as those of transformers do."""

    def hook(module, args, routed):
        returned[name] = routed[:3]

    hook.__module__ = "transformers.utils.output_capturing"
    return hook


def results(tiny):
    """Logits and gradients of a step, and what the routers returned."""
    named = [(n, m) for n, m in tiny.model.named_modules() if router_kinds.ROUTERS.get(type(m).__name__)]
    returned = {}
    handles = [m.register_forward_hook(recording(returned, n)) for n, m in named]
    logits, loss = moe_families.logits_and_loss(tiny)
    for handle in handles:
        handle.remove()
    tiny.model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in tiny.model.named_parameters() if p.grad is not None}
    for name, (logits_TE, weights, index) in returned.items():
        index, order = index.sort()
        found |= {f"{name}: index": index, f"{name}: weights": weights.gather(1, order), f"{name}: logits": logits_TE}
    return {"logits": logits, "loss": loss, **found}


def assert_same(got, want, rtol=2e-4, atol=2e-6):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name].float(), want[name].float(), rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("family", IN_FP32)
def test_the_same_model(family, chains):
    """Choices, weights, logits, outputs and gradients, with the same parameters."""
    tiny = built(family)
    keys, parameters = list(tiny.model.state_dict()), list(tiny.model.parameters())
    want = results(tiny)
    chains.clear()
    number = len(tiny.experts)
    assert fusedmoe_transformers.patch_routers(tiny.model) == number
    got = results(tiny)
    assert_same(got, want)
    assert sum(name.endswith("index") for name in got) == number
    assert [chain for chain in chains if chain[0] == "router"] == [("router", 1 if family in APART else 7)] * number
    assert list(tiny.model.state_dict()) == keys
    assert all(a is b for a, b in zip(tiny.model.parameters(), parameters, strict=True))
    assert fusedmoe_transformers.unpatch_routers(tiny.model) == number
    assert not any("forward" in vars(m) or routers.ROUTER in vars(m) for m in tiny.model.modules())


@pytest.mark.parametrize("family", ["glm4_moe", "ernie4_5_moe", "deepseek_v2"])
def test_the_same_choice_in_bf16(family):
    block, router = first(built(family, torch.bfloat16))
    x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    y, (logits, weights, index) = block(x), router(x.view(-1, 64))
    fusedmoe_transformers.patch_routers(block)
    our_logits, our_weights, our_index = router(x.view(-1, 64))
    index, order = index.sort()
    our_index, our_order = our_index.sort()
    assert torch.equal(our_index, index)
    torch.testing.assert_close(our_logits, logits)
    torch.testing.assert_close(our_weights.gather(1, our_order), weights.gather(1, order).float(), rtol=4e-3, atol=0)
    # Ernie's own router rounds its weights to bf16
    assert (block(x) - y).norm() < (5e-3 if "ernie" in family else 1e-3) * y.norm()


@pytest.mark.parametrize("family", IN_OWN_DTYPE)
def test_a_router_that_does_not_compute_in_fp32_is_left(family, chains, caplog):
    tiny = built(family)
    assert fusedmoe_transformers.patch_routers(tiny.model) == 0
    (said,) = [r.getMessage() for r in caplog.records if "leaves" in r.getMessage()]
    assert (
        f"{type(first(tiny)[1]).__name__} as it is: it computes its logits in the dtype of the model, float32" in said
    )
    text = str(fm.explain(tiny.model, tokens=8))
    assert "chooses the experts and runs unchanged: it computes its logits in the dtype of the model" in text
    want = results(tiny)
    assert fusedmoe_transformers.patch_routers(tiny.model, fp32_logits=True) == len(tiny.experts)
    assert fusedmoe_transformers.patch_routers(tiny.model) == len(tiny.experts)
    chains.clear()
    assert_same(results(tiny), want)
    assert [name for name, _ in chains] == ["router"] * len(tiny.experts)
    assert "the model's own router" not in str(fm.explain(tiny.model, tokens=8))
    block, router = first(tiny)
    block.bfloat16()
    correction = [block.e_score_correction_bias] if family == "minimax_m2" else []  # an argument of its router
    found = router(torch.randn(3, 64).bfloat16(), *correction)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, torch.int64]


def test_the_plan():
    tiny = built("glm4_moe", torch.bfloat16)
    reason = "Glm4MoeTopkRouter, chooses the experts and runs unchanged: call patch_routers(model) to run it"
    assert reason in str(fm.explain(tiny.model, tokens=64, arch=90))
    fusedmoe_transformers.patch_routers(tiny.model)
    (group,) = fm.explain(tiny.model, tokens=64, arch=90).groups
    assert not group.router
    (plan,) = group.explanation.plans
    assert not plan.unfused
    assert {"sm90.router_dispatch", "sm90.router_backward"} <= {step.rule for step in plan.steps}
    on_meta = built("glm4_moe", torch.bfloat16).model.to("meta")
    fusedmoe_transformers.patch_routers(on_meta)
    assert str(fm.explain(on_meta, tokens=64, arch=90).groups[0].explanation) == str(group.explanation)
    # apart
    tiny.experts[0][1].register_forward_hook(lambda *_: None)
    apart, together = fm.explain(tiny.model, tokens=64, arch=90).groups
    assert [len(g.explanation.plans) for g in (apart, together)] == [2, 1]
    assert "sm90.router" in {step.rule for step in apart.explanation.steps}
    assert not apart.router
    with torch.autocast("cpu"):
        assert "it is patched, but autocast is on" in str(fm.explain(tiny.model, tokens=64))


def test_recorded_logits_and_the_loss_of_them():
    tiny = built("qwen3_moe")

    def step():
        tiny.model.zero_grad()
        output = tiny.model(**tiny.inputs, output_router_logits=True)
        (output.loss + 3 * output.aux_loss).backward()
        recorded = {f"recorded {i}": logits for i, logits in enumerate(output.router_logits)}
        grads = {name: p.grad.clone() for name, p in tiny.model.named_parameters()}
        return {"aux": output.aux_loss, **recorded, **grads}

    want = step()
    assert "recorded 1" in want
    fusedmoe_transformers.patch_routers(tiny.model, fp32_logits=True)
    assert_same(step(), want)


# ---- changes after the patch --------------------------------------------------------------------------------------


def another_choice(tiny):
    first(tiny)[1].top_k = 3
    return 1, "its settings have changed since"


def in_fp64(tiny):
    tiny.model.double()
    return 2, "tokens or weight are not in bf16"


@pytest.mark.parametrize("change", [another_choice, in_fp64])
def test_the_models_own_router_runs_again(change, chains):
    tiny = built("glm4_moe")
    fusedmoe_transformers.patch_routers(tiny.model)
    own, reason = change(tiny)
    assert f"it is patched, but {reason}" in str(fm.explain(tiny.model, tokens=8))
    got = results(tiny)
    assert len([name for name, _ in chains if name == "router"]) == len(tiny.experts) - own
    fusedmoe_transformers.unpatch_routers(tiny.model)
    assert_same(got, results(tiny))


def test_under_autocast_the_models_own_router_runs(chains):
    tiny = built("glm4_moe")
    with torch.autocast("cpu"):
        want = tiny.model(**tiny.inputs).logits
        fusedmoe_transformers.patch_routers(tiny.model)
        assert torch.equal(tiny.model(**tiny.inputs).logits, want)
    assert "router" not in {name for name, _ in chains}


def with_hook_on_experts(tiny):
    first(tiny)[0].experts.register_forward_hook(lambda _, __, y: 2 * y)


def with_eager_experts(tiny):
    tiny.model.set_experts_implementation("eager")


class Wrapped(nn.Module):
    def __init__(self, router):
        super().__init__()
        self.router = router

    def forward(self, x):
        return self.router(x)


def with_experts_elsewhere(tiny):
    """As in expert parallelism: the index of experts elsewhere is the number of those here, and their weight zero."""

    def only_here(module, args, routed):
        logits, weights, index = routed
        return logits, weights.masked_fill(index >= 5, 0), index.masked_fill(index >= 5, 5)

    block, router = first(tiny)
    router.register_forward_hook(only_here)
    block.experts.num_experts = 5
    for name in ("gate_up_proj", "down_proj"):
        setattr(block.experts, name, nn.Parameter(getattr(block.experts, name).detach()[:5].clone()))


def with_another_result(tiny):
    """A hook whose result the experts must get."""
    first(tiny)[1].register_forward_hook(lambda _, __, routed: (routed[0], 2 * routed[1], routed[2]))


@pytest.mark.parametrize(
    "change", [with_hook_on_experts, with_eager_experts, with_experts_elsewhere, with_another_result]
)
def test_modules_that_change_a_call(change, chains):
    tiny = built("glm4_moe")
    change(tiny)
    want = results(tiny)
    fusedmoe_transformers.patch_routers(tiny.model)
    chains.clear()
    assert_same(results(tiny), want)
    assert ("router", 1) in chains


def test_global_hooks_see_the_experts(chains):
    tiny = built("glm4_moe")
    experts = first(tiny)[0].experts
    hook = nn.modules.module.register_module_forward_hook(lambda module, _, y: 2 * y if module is experts else None)
    try:
        want = results(tiny)
        fusedmoe_transformers.patch_routers(tiny.model)
        chains.clear()
        assert_same(results(tiny), want)
        assert ("router", 1) in chains
    finally:
        hook.remove()


def tokens_of_the_router_alone(tiny):
    """Such as noise on the tokens of the router, which the experts must not read."""
    first(tiny)[1].register_forward_pre_hook(lambda _, args: (1.5 * args[0], *args[1:]))


def weights_in_place(tiny):
    def halve(module, args, routed):
        routed[1].mul_(0.5)

    first(tiny)[1].register_forward_hook(halve)


def weights_through_data(tiny):
    """A change that torch does not count."""

    def halve(module, args, routed):
        routed[1].data.mul_(0.5)

    first(tiny)[1].register_forward_hook(halve)


@pytest.mark.parametrize(
    ("hook", "how"),
    [
        (weights_through_data, "training"),
        *((hook, how) for hook in (tokens_of_the_router_alone, weights_in_place) for how in ("training", "inference")),
        *(
            pytest.param(hook, "compiled", marks=pytest.mark.slow)
            for hook in (tokens_of_the_router_alone, weights_in_place)
        ),
    ],
)
def test_hooks_of_a_router_that_change_tokens_or_results(hook, how):
    torch._dynamo.reset()
    tiny = built("glm4_moe")

    def run():
        if how == "training":
            return results(tiny)
        model = torch.compile(tiny.model, backend="aot_eager") if how == "compiled" else tiny.model
        with torch.inference_mode(how == "inference"):
            return {"logits": model(**tiny.inputs).logits.clone()}

    before = tiny.model(**tiny.inputs).logits
    hook(tiny)
    want = run()
    assert not torch.allclose(want["logits"], before)
    fusedmoe_transformers.patch_routers(tiny.model)
    assert_same(run(), want)
    torch._dynamo.reset()


def test_a_router_that_was_pruned_runs_as_before():
    tiny = built("qwen3_moe")
    fusedmoe_transformers.patch_routers(tiny.model, fp32_logits=True)
    results(tiny)
    block, router = first(tiny)
    for module, name in ((router, "weight"), (block.experts, "gate_up_proj"), (block.experts, "down_proj")):
        setattr(module, name, nn.Parameter(getattr(module, name).detach()[:4].clone()))
    block.experts.num_experts = 4
    logits = tiny.model(**tiny.inputs).logits
    assert "its weight has another shape than before" in fm.explain(tiny.model).groups[0].why_own_router
    fusedmoe_transformers.unpatch_routers(tiny.model)
    torch.testing.assert_close(logits, tiny.model(**tiny.inputs).logits, rtol=1e-4, atol=1e-5)
    assert fusedmoe_transformers.patch_routers(tiny.model, fp32_logits=True)
    torch.testing.assert_close(logits, tiny.model(**tiny.inputs).logits, rtol=1e-4, atol=1e-5)


def test_the_patch_draws_no_random_numbers():
    tiny = built("mixtral", router_jitter_noise=0.1)
    tiny.model.train()
    before = torch.get_rng_state()
    assert fusedmoe_transformers.patch_routers(tiny.model, fp32_logits=True) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_recorded_logits_leave_one_chain_in_inference(chains):
    """The hooks of transformers change nothing."""
    tiny = built("qwen3_moe")
    fusedmoe_transformers.patch_routers(tiny.model, fp32_logits=True)
    with torch.inference_mode():
        assert len(tiny.model(**tiny.inputs, output_router_logits=True).router_logits) == 2
    assert chains == [("router", 7)] * 2


def test_a_router_that_is_wrapped_after_the_patch(chains):
    tiny = built("glm4_moe")
    want = results(tiny)
    fusedmoe_transformers.patch_routers(tiny.model)
    chains.clear()
    block, router = first(tiny)
    block.gate = Wrapped(router)
    got = results(tiny)
    assert_same({name.replace("gate.router", "gate"): t for name, t in got.items()}, want)
    assert chains == [("router", 1), ("dispatch", 6), ("router", 7)]


def test_a_block_that_keeps_something_of_a_call_is_not_replaced(monkeypatch):
    tiny = built("glm4_moe")
    block = type(first(tiny)[0])
    forward = block.forward

    def keeping(self, x):
        self.kept = x
        return forward(self, x)

    monkeypatch.setattr(block, "forward", keeping)
    fusedmoe_transformers.patch_routers(tiny.model)
    results(tiny)
    assert first(tiny)[0].kept.shape == (2, 12, 64)


@pytest.mark.parametrize("frozen", ["gate", "experts", "mlp"])
def test_frozen(frozen):
    tiny = built("glm4_moe")
    for name, parameter in tiny.model.named_parameters():
        parameter.requires_grad_(f".{frozen}." not in name)
    want = results(tiny)
    assert not any(f".{frozen}." in name and "grad" in name for name in want)
    fusedmoe_transformers.patch_routers(tiny.model)
    assert_same(results(tiny), want)


def test_gradient_checkpointing():
    tiny = built("glm4_moe")
    tiny.model.train()
    want = results(tiny)
    # by the name that it has in this version
    enable = getattr(tiny.model, "activation_checkpointing_enable", None) or tiny.model.gradient_checkpointing_enable
    enable()
    fusedmoe_transformers.patch_routers(tiny.model)
    assert_same(results(tiny), want)


def test_copies():
    tiny = built("hy_v3")
    fusedmoe_transformers.patch_routers(tiny.model)
    want = results(tiny)
    own = tiny.model
    for model in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert not {*map(id, model.modules())} & {*map(id, own.modules())}
        block, router = first(moe_families.Tiny("", model, {}, tiny.experts))
        held = vars(router)[routers.ROUTER]
        assert held is vars(block.experts)[routers.ROUTER]
        assert (held.block, held.router) == (block, router)
        tiny.model = model
        assert_same(results(tiny), want)
        with torch.no_grad():
            router.weight.neg_()
        assert not torch.allclose(results(tiny)["logits"], want["logits"])


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_a_parametrized_router():
    tiny = built("glm4_moe")
    nn.utils.parametrize.register_parametrization(first(tiny)[1], "weight", Half())
    want = results(tiny)
    nn.utils.parametrize.remove_parametrizations(first(tiny)[1], "weight", leave_parametrized=False)
    fusedmoe_transformers.patch_routers(tiny.model)
    nn.utils.parametrize.register_parametrization(first(tiny)[1], "weight", Half())
    assert_same(results(tiny), want)


def test_lora_on_experts(chains):
    find = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        absent = "transformer_engine"
        patch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == absent else find(name, *args))
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
        tiny = built("glm4_moe")
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

        def adapted(model):
            torch.manual_seed(0)
            found = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_parameters=targets))
            for name, parameter in found.named_parameters():
                if "lora_" in name:
                    nn.init.normal_(parameter, std=0.3)
            return found

        own = tiny.model
        tiny.model = adapted(copy.deepcopy(own))
        want = results(tiny)
        assert sum("lora_" in name for name in want) == 8
        fusedmoe_transformers.patch_routers(own)
        tiny.model = adapted(own)
        chains.clear()
        assert_same(results(tiny), want)
    assert chains == [("router", 1), ("dispatch", 6)] * 2


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
@pytest.mark.parametrize("experts_too", [False, True])
def test_under_fsdp(mesh, experts_too, chains):
    """Each layer, or also its experts, which are then gathered by their own call."""
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    tiny = built("glm4_moe")
    want = results(tiny)
    fusedmoe_transformers.patch_routers(tiny.model)
    for layer in tiny.model.model.layers:
        if experts_too:
            fully_shard(layer.mlp.experts, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(tiny.model, mesh=mesh)
    chains.clear()
    got = results(tiny)
    assert_same({name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in got.items()}, want)
    assert chains == ([("router", 1), ("dispatch", 6)] if experts_too else [("router", 7)]) * 2
    assert "under FSDP, a call gathers it and runs fm.Router" in str(fm.explain(tiny.model, tokens=8))


def test_exported():
    """A program for inference; the router's op is plain PyTorch in it."""
    block, _ = first(built("glm4_moe"))
    x = torch.randn(2, 12, 64)
    fusedmoe_transformers.patch_routers(block)
    with torch.no_grad():
        program = torch.export.export(block, (x,), strict=False)
        torch.testing.assert_close(program.module()(x), block(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks around
def test_one_graph_with_one_operator():
    torch._dynamo.reset()
    tiny = built("hy_v3", num_hidden_layers=1)
    fusedmoe_transformers.patch_routers(tiny.model)
    block, router = first(tiny)
    x = torch.randn(2, 12, 64)

    def step(run):
        block.zero_grad()
        given = x.clone().requires_grad_()
        y = run(given)
        y.square().sum().backward()
        return {"y": y.detach(), "x": given.grad, **{name: p.grad.clone() for name, p in block.named_parameters()}}

    want = step(block)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    assert_same(step(compiled), want)
    assert counter.frame_count == 1
    assert sum("run_chain" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes) == 1
    router.top_k = 3  # a guard; the model's own router runs
    changed = step(compiled)
    assert counter.frame_count == 2
    assert_same(changed, step(block))
    assert not torch.allclose(changed["y"], want["y"])
    torch._dynamo.reset()


@pytest.mark.parametrize("copied", [False, True])
def test_compiled_without_an_eager_call(copied):
    torch._dynamo.reset()
    tiny = built("glm4_moe", num_hidden_layers=1)
    want = results(tiny)["logits"]
    if not copied:
        tiny = built("glm4_moe", num_hidden_layers=1)
    fusedmoe_transformers.patch_routers(tiny.model)
    if copied:
        tiny.model = copy.deepcopy(tiny.model)
    compiled = torch.compile(tiny.model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**tiny.inputs).logits, want, rtol=2e-4, atol=2e-6)
    torch._dynamo.reset()


# ---- errors, and what is not patched ------------------------------------------------------------------------------


class Like(nn.Module):
    """Not of transformers, whatever its name is."""


Like.__qualname__ = Like.__name__ = "DeepseekV3TopkRouter"


def test_a_router_of_another_package_is_not_known():
    assert router_kinds.recognise(Like()) == "fm.Router is not known to compute the same"


def test_a_router_that_differs_is_left(monkeypatch, caplog):
    tiny = built("glm4_moe")
    router = type(first(tiny)[1])
    forward = router.forward
    monkeypatch.setattr(router_kinds, "_verdicts", {})
    monkeypatch.setattr(router, "forward", lambda self, x: (*forward(self, x)[:2], forward(self, x)[2].flip(1)))
    assert fusedmoe_transformers.patch_routers(tiny.model) == 0
    assert "it differs from fm.Router" in caplog.text


def test_errors():
    with pytest.raises(
        fm.InputError, match="expected a model of transformers with routers next to experts, got Linear"
    ):
        fusedmoe_transformers.patch_routers(nn.Linear(2, 2))
    tiny = built("glm4_moe")
    with pytest.raises(fm.InputError, match="fp32_logits"):
        fusedmoe_transformers.patch_routers(tiny.model, fp32_logits="yes")
    first(tiny)[1].forward = print
    with pytest.raises(fm.InputError, match=r"layers\.0\.mlp.* was already replaced, by"):
        fusedmoe_transformers.patch_routers(tiny.model)


# ---- the benchmark ------------------------------------------------------------------------------------------------


def test_the_benchmark_in_small():
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16}
    timer, cpu = CpuTimer(1), torch.device("cpu")
    found = list(stack.measure(timer, cpu, 1, ("moe", "glm"), compiled=False, rows=(1, 16), **sizes))
    assert {m.implementation for m in found} == set(stack.IMPLEMENTATIONS)
    assert len(found) == 2 * 2 * len(stack.IMPLEMENTATIONS)
    assert all(m.ms for m in found)
    table = page.stack_table(stack.results(found, 1, 1))
    assert "| GLM-4.5-Air's MoE part | forward + backward | `fusedmoe + router` |" in table
