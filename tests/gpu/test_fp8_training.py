"""Layers in training under ``fp8_block`` on Hopper: which kernels run, how exact they are, when weights are quantized,
and the memory that forward keeps.
"""

import copy
import json
import re

import pytest
import torch
from kit.fp8_layers import (
    BF16,
    DEVICE,
    RECIPES,
    E,
    H,
    I,
    K,
    T,
    assert_as_exact_as_the_recipe,
    assert_products_are_fp8,
    count_quantized_weights,
    experts,
    kernels,
    moe,
    rows,
    rules,
    tokens,
)
from kit.hopper import capture, needs_gpu
from kit.poison import nan_in_new_tensors
from kit.training import assert_equal, error, outcome, plan_of
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

import fusedmoe as fm
from benchmarks import demo

pytestmark = [needs_gpu, pytest.mark.filterwarnings("ignore")]  # those of torch's compiler and of NCCL

SPLITS = (130, 0, 61, 1, 27, 128, 0, 53)
EACH = pytest.mark.parametrize("recipe", RECIPES)
COLUMNS = "sm90.gathered_quantize_columns"


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    build_ahead(kernels)


# ---- which kernels, and how exact


@EACH
def test_every_step_has_a_kernel_and_nothing_waits(recipe, no_sync):
    """New memory that is NaN changes no bit."""
    for layer, (x, dy), named in ((moe(), tokens(), {}), (experts(), *of_experts(rows(SPLITS, tail=5)))):
        with fm.recipe(recipe), fm.strict(unavailable=True):
            first = outcome(layer, x, dy, **named)
            with nan_in_new_tensors():
                poisoned = outcome(layer, x, dy, **named)
            plan = plan_of(layer, x, **named)
            assert_products_are_fp8(plan, recipe)
            assert not any(step.host_sync for step in plan.steps)
            with torch.no_grad():
                (plan,) = layer.explain(x, **named).plans
            assert_products_are_fp8(plan, recipe, forward_only=True)
            fm.clear_weight_cache(layer)
            with no_sync():
                again = outcome(layer, x, dy, **named)
            assert_equal(again, first)
        assert all(t.isfinite().all() for t in first.values())
        assert_equal(poisoned, first)


def of_experts(given):
    x, named, dy = given
    return (x, dy), named


@EACH
@pytest.mark.parametrize("seed", range(4))
def test_any_routing(seed, recipe):
    """Tokens that are read through their index, of which most choose the same experts, and all of them in one case."""
    layer = moe().experts
    x, dy = tokens(seed)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(T, E, generator=generator) + torch.arange(E) * (0, 0.1, 0.3, 10)[seed]
    named = {
        "expert_index": scores.topk(K).indices.to(DEVICE),
        "expert_weight": torch.rand(T, K, generator=generator).to(DEVICE) + 0.1,
    }

    def exact():
        return outcome(copy.deepcopy(layer).float(), x.float(), dy.float(), **named)

    assert_as_exact_as_the_recipe(recipe, lambda: outcome(layer, x, dy, **named), exact)


# ---- when weights are quantized

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
}
ONCE = [(E, 2 * I, H), (E, H, I)]  # each weight in one launch, for both forms


@pytest.mark.parametrize(
    ("optimizer", "into_main_grad"), [*((name, False) for name in OPTIMIZERS), ("AdamW, fused", True)]
)
def test_weights_are_quantized_once_per_optimizer_step(optimizer, into_main_grad, monkeypatch):
    counted = count_quantized_weights(monkeypatch)
    layer = experts(accumulate_into_main_grad=into_main_grad)
    maker, settings = OPTIMIZERS[optimizer]
    step = maker(layer.parameters(), **settings)
    weights = [layer[0].weight, layer[3].weight]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    batches = [rows(SPLITS, seed=seed) for seed in range(3)]
    before = []
    for turn in range(2):
        counted.clear()
        for x, named, dy in batches:
            with fm.recipe("fp8_block"), fm.strict():
                layer(x.detach().requires_grad_(), **named).backward(dy)
        assert counted == ONCE, f"step {turn}"
        assert fm.weight_cache_bytes(layer) > 0
        for weight in weights:
            if into_main_grad:
                assert weight.grad is None
                weight.grad = weight.main_grad.to(BF16)
                weight.main_grad.zero_()
            assert weight.grad.any()
        before.append([weight.detach().clone() for weight in weights])
        step.step()
        step.zero_grad()
    assert not torch.equal(before[0][0], before[1][0])
    counted.clear()
    x, named, _ = batches[0]
    with fm.recipe("fp8_block"), torch.no_grad():
        got, want = layer(x, **named), copy.deepcopy(layer)(x, **named)
    assert sorted(counted) == sorted(2 * ONCE)
    assert torch.equal(got, want)


# ---- frozen weights


def stored(power_of_two=False):
    """Experts with the codes and scales of an FP8 checkpoint."""
    chain, format = experts(), fm.numerics.formats.fp8_block(across=128, power_of_two=power_of_two)
    for i in (0, 3):
        q = fm.quantize(chain[i].weight.detach(), format)
        chain[i] = fm.GroupedLinear.from_quantized(q.data, q.scale.contiguous(), weight_format=format)
    return chain


@pytest.mark.parametrize("power_of_two", [False, True])
def test_stored_weights(power_of_two):
    """Without a recipe: the results of plain PyTorch, which rounds scales to bf16; a code may be the next one."""
    chain, ((x, dy), named) = stored(power_of_two), of_experts(rows(SPLITS, tail=5, beyond=torch.nan))
    with fm.strict():
        got = outcome(chain, x, dy, **named)
    assert all(step.rule for step in plan_of(chain, x, **named).steps)
    with fm.disabled("sm90.*"):
        want = outcome(chain, x, dy, **named)
    for name, t in want.items():
        assert t.any(), name
        assert error(got[name], t.double()) < 2e-2, name
        assert not got[name][sum(SPLITS) :].any()


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_lora_trains_beside_products_in_fp8(weights):
    layer = stored() if weights == "fp8" else experts()
    chain = fm.Sequential(fm.GroupedLoRA(layer[0], 8, 16), *layer[1:3], fm.GroupedLoRA(layer[3], 8, 16))
    for i in (0, 3):  # an update that is not zero
        torch.nn.init.normal_(chain[i].lora_B.weight, std=0.02)
    (x, dy), named = of_experts(rows(SPLITS, tail=5, beyond=torch.nan))
    with fm.recipe("fp8_block"):
        got, plan = outcome(chain, x, dy, **named), plan_of(chain, x, **named)
        of_layers = {s.rule for s in plan.steps if any("base_layer" in op for op in s.ops)}
        with fm.disabled("sm90.*"):
            fm.clear_weight_cache(chain)
            want = outcome(chain, x, dy, **named)
    assert None not in of_layers, str(plan)
    assert {"sm90.fp8_grouped_gemm", "sm90.fp8_grouped_dgrad"} <= of_layers
    assert not any("wgrad" in rule for rule in of_layers), "the weights are frozen"
    assert {name for name in got if "weight" in name} == {f"{i}.lora_{n}.weight" for i in (0, 3) for n in "AB"}
    for name, t in want.items():
        assert t.any(), name
        assert got[name].isfinite().all(), name
        assert error(got[name], t.double()) < 10 ** (-30 / 20), name


# ---- columns that backward quantizes again


def large(hidden=1024, intermediate=256, experts=16, count=4096):
    torch.manual_seed(0)
    layer = fm.MoE(hidden, intermediate, experts, 8, device="cuda", dtype=BF16)
    x, dy = (torch.randn(count, hidden, device="cuda", dtype=BF16) for _ in range(2))
    return layer, x, dy


def test_the_memory_that_forward_keeps():
    """At most 5% more than in bf16, whose kernels keep tokens too. Qwen3-30B-A3B."""
    layer, x, _ = large(2048, 768, 128, 16384)
    x.requires_grad_()

    def kept(recipe):
        """The bytes that live from the end of forward on, beyond the result and the quantized weights."""
        with fm.recipe(recipe):
            layer(x)  # quantizes the weights
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = layer(x)
            return torch.cuda.memory_allocated() - before - y.nbytes

    with fm.disabled(COLUMNS):
        columns = kept("fp8_block")
    in_bf16, in_fp8 = kept("bf16"), kept("fp8_block")
    assert in_fp8 <= 1.05 * in_bf16
    assert columns - in_fp8 > 0.95 * (16384 * 8 * 2048)
    with fm.recipe("fp8_block"):
        plan = plan_of(layer, x)
    assert COLUMNS in rules(plan)
    assert plan.kept_bytes == pytest.approx(in_fp8 + x.nbytes, rel=0.02)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8"])
def test_columns_again_change_no_bit(recipe, no_sync):
    """Under fp8_block also in a step that is checkpointed, compiled, or one graph."""
    torch._dynamo.reset()
    layer, x, dy = large()
    with fm.recipe(recipe):
        with fm.disabled(COLUMNS):
            want = outcome(layer, x, dy)
        assert COLUMNS in rules(plan_of(layer, x))
        assert_equal(outcome(layer, x, dy), want)
        with no_sync():
            again = outcome(layer, x, dy)
        assert_equal(again, want)
        if recipe == "mxfp8":
            return
        assert_equal(outcome(layer, x, dy, lambda x: checkpoint(layer, x, use_reentrant=False)), want)
        assert_equal(outcome(layer, x, dy, torch.compile(layer, fullgraph=True)), want)
        found = []
        graph = capture(lambda: found.append(outcome(layer, x, dy)))
        x.copy_(x.flip(0))
        graph.replay()
        assert_equal(found[-1], outcome(layer, x, dy))


# ---- the demo


def test_the_demo_compares_recipes_with_every_step_fused(tmp_path, capsys):
    sizes = {"layers": 1, "hidden": 256, "intermediate": 128, "heads": 4, "experts": 8, "context": 128, "batch": 8}
    options = [f"--{name}={value}" for name, value in (sizes | {"steps": 40, "top-k": 2}).items()]
    with fm.strict():
        demo.main([",".join(["bf16", *RECIPES]), *options, "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    of_recipes = re.split(r"^Recipe \d of 3: .*$", printed, flags=re.MULTILINE)[1:]
    products = [set(re.findall(r"sm90\.fp8_grouped_\w+", part)) for part in of_recipes]
    both = {f"sm90.fp8_grouped_{name}" for name in ("gemm_activation", "gemm", "dgrad_activation", "dgrad")}
    assert products == [set(), both | {"sm90.fp8_grouped_wgrad"}, both]
    assert "unfused" not in printed
    compared = json.loads((tmp_path / "compare.json").read_text())
    assert compared["machine"] == torch.cuda.get_device_name()
    runs = {run["recipe"]: run for run in compared["runs"]}
    assert list(runs) == ["bf16", *RECIPES]
    for run in runs.values():
        (_, first), *_, (_, last) = run["evaluations"]
        assert last < first < 8
        assert abs(run["gap_percent"]) < 3
    assert len({run["held_out_bits_per_byte"] for run in runs.values()}) == 3
    for recipe in RECIPES:
        assert re.search(rf"^\| `{re.escape(recipe)}` \| [\d.]+ \| [+-][\d.]+ %", printed, re.MULTILINE), printed


# ---- FSDP2


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded after forward", "kept for backward"])
@EACH
def test_sharded_layers_have_the_same_gradients(recipe, reshard, one_rank, monkeypatch):
    """Parameters in fp32 that are gathered in bf16; each time, the gathered weight is quantized."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    whole, (x, dy) = moe(), tokens()
    layer = copy.deepcopy(whole).float()
    mesh = dist.init_device_mesh(DEVICE.type, (1,))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    counted = count_quantized_weights(monkeypatch)
    for _ in range(2):
        with fm.recipe(recipe), fm.strict():
            want = outcome(whole, x, dy)
            launches = len(counted)
            leaf = x.detach().requires_grad_()
            y = layer(leaf)
            y.backward(dy)
        assert len(counted) >= launches + 2, "each gathered weight is quantized"
        got = {"y": y.detach(), "x": leaf.grad}
        got |= {name: p.grad.full_tensor() for name, p in layer.named_parameters()}
        assert_equal(got, {name: t if name in ("y", "x") else t.float() for name, t in want.items()})
        assert fm.weight_cache_bytes(layer) == 0 or not reshard
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(whole.parameters(), layer.parameters(), strict=True):
                p.copy_(q.full_tensor())
