"""Every way into ``fp8_block`` runs the fused FP8 kernels: transformers, FP8 checkpoints, Transformer Engine's recipe,
torchtitan, Megatron-Core, FSDP2, and the demo.

Frameworks that are not installed have stand-ins of their interface, those of tests/integrations.
"""

import copy
import json
import re
from dataclasses import dataclass
from enum import Enum

import pytest
import torch
from kit.fp8_layers import (
    BF16,
    DEVICE,
    EMULATED,
    RECIPES,
    E,
    H,
    I,
    assert_equal,
    assert_products_are_fp8,
    count_quantized_weights,
    error,
    experts,
    kernels,
    moe,
    of,
    rows,
    rules,
    tokens,
)
from kit.hopper import needs_gpu, needs_hopper
from torch import distributed as dist

import fusedmoe as fm
from benchmarks import demo
from fusedmoe.fusion.program import plan_table
from fusedmoe.fusion.report.describe import describe

pytestmark = needs_hopper

EACH = pytest.mark.parametrize("recipe", RECIPES)
SPLITS = (40, 0, 21, 9) if EMULATED else (130, 0, 61, 1, 27, 128, 0, 53)


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    build_ahead(kernels())


def planned(monkeypatch):
    """The plans of all calls from now on."""
    found, plan_chain = [], plan_table.plan_chain

    def noted(chain, arguments, *others, **named):
        plan = plan_chain(chain, arguments, *others, **named)
        found.append(describe(plan, dict(zip(plan.graph.arguments, arguments, strict=True))))
        return plan

    monkeypatch.setattr(plan_table, "plan_chain", noted)
    return found


# ------------------------------------------------------------------------------------------------------ transformers

SIZES = {
    "hidden_size": H, "num_hidden_layers": 1 if EMULATED else 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 256, "max_position_embeddings": 512, "pad_token_id": 0, "intermediate_size": 256,
    "moe_intermediate_size": I, "num_experts": E, "num_experts_per_tok": 2,
}  # fmt: skip


APART = ("sm90.activation", "sm90.dactivation")
"""With few rows and weights in bf16, activations apart from products take fewer launches."""


def qwen3():
    transformers = pytest.importorskip("transformers")
    from fusedmoe.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES)
    how = {"dtype": BF16, "experts_implementation": "fusedmoe", "attn_implementation": "eager"}  # the same bits always
    model = transformers.AutoModelForCausalLM.from_config(config, **how)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
    return model.to(DEVICE).train()


def step_of_model(model):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 256, (1, 24) if EMULATED else (2, 128), generator=generator).to(DEVICE)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@pytest.mark.filterwarnings("ignore")  # those of transformers
@EACH
def test_a_model_of_transformers(recipe, monkeypatch):
    """With gradient checkpointing too."""
    model, calls = qwen3(), planned(monkeypatch)
    with fm.recipe("bf16"):
        in_bf16 = step_of_model(model)
    calls.clear()
    with fm.recipe(recipe), fm.strict(), fm.disabled(*APART):
        found = step_of_model(model)
    of_experts = [plan for plan in calls if "sm90.fp8_grouped_gemm" in rules(plan)]
    assert len(of_experts) == model.config.num_hidden_layers
    for plan in of_experts:
        assert_products_are_fp8(plan, recipe)
    assert (found["loss"] - in_bf16["loss"]).abs() < 0.02 * in_bf16["loss"]
    assert found.keys() == in_bf16.keys()
    differ = 0
    for name, t in found.items():
        assert t.isfinite().all(), name
        if name != "loss" and t.dim() > 1:
            assert torch.cosine_similarity(t.float().flatten(), in_bf16[name].float().flatten(), 0) > 0.9, name
            differ += not torch.equal(t, in_bf16[name])
    assert differ
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with fm.recipe(recipe), fm.strict(), fm.disabled(*APART):
        again = step_of_model(model)
    assert torch.equal(again["loss"], found["loss"])
    for name, t in found.items():
        assert error(again[name], t.double()) < 1e-2, name  # plain PyTorch may add in another order


@pytest.mark.filterwarnings("ignore")  # those of transformers
def test_micro_batches_of_a_model_of_transformers_quantize_weights_once(monkeypatch):
    """The weights are arguments of each call. The results are those of weights that are quantized each time."""
    counted = count_quantized_weights(monkeypatch)
    model = qwen3()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    weights, micro_batches = 2 * model.config.num_hidden_layers, 3
    each = 2 * E * (3 * H * I) * model.config.num_hidden_layers  # bytes: codes by rows and by columns
    ids = torch.randint(1, 256, (micro_batches, 1, 24), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with fm.recipe("fp8_block"), fm.strict():
        for step in range(1 if EMULATED else 2):
            found = {}
            for cached in (False, True):
                fm.clear_weight_cache(model)
                optimizer.zero_grad()
                counted.clear()
                losses = []
                for x in ids:
                    if not cached:
                        fm.clear_weight_cache(model)
                    losses.append(model(input_ids=x, labels=x, use_cache=False).loss)
                    losses[-1].backward()
                assert len(counted) == weights * (1 if cached else micro_batches), step
                grads = {name: p.grad.clone() for name, p in model.named_parameters() if "experts" in name}
                found[cached] = {"loss": torch.stack(losses).detach(), **grads}
            assert torch.equal(found[True]["loss"], found[False]["loss"])
            for name, t in found[False].items():
                assert error(found[True][name], t.double()) < 1e-2, name  # plain PyTorch may add in another order
            assert each < fm.weight_cache_bytes(model) < 1.01 * each
            counted.clear()
            with torch.no_grad():
                before = model(input_ids=ids[0], use_cache=False).logits
                assert counted == [], "validation uses the same codes"
                optimizer.step()
                assert not torch.equal(model(input_ids=ids[0], use_cache=False).logits, before)
                assert len(counted) == weights, step
    fm.clear_weight_cache(model)
    assert fm.weight_cache_bytes(model) == 0


@pytest.mark.filterwarnings("ignore")  # those of transformers
def test_an_fp8_checkpoint_of_transformers(monkeypatch):
    """The weights are multiplied as they are stored; none is quantized."""
    pytest.importorskip("transformers")
    from kit.fp8_models import fp8_model, plain_linear
    from transformers.integrations import finegrained_fp8

    from fusedmoe.integrations import transformers as integration

    integration.register()
    monkeypatch.setattr(finegrained_fp8, "fp8_linear", plain_linear)
    sizes = {"hidden_size": H, "moe_intermediate_size": I, "num_hidden_layers": 2}
    tiny = fp8_model("qwen3_moe", BF16, **sizes)
    tiny.model.to(DEVICE)
    counted, calls = count_quantized_weights(monkeypatch), planned(monkeypatch)
    ids = torch.randint(1, 128, (2, 30), generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def step():
        tiny.model.zero_grad()
        loss = tiny.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in tiny.model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **grads}

    with fm.recipe("fp8_block"):
        with fm.strict():
            found = step()
        of_experts = [plan for plan in calls if "sm90.fp8_grouped_gemm" in rules(plan)]
        with fm.disabled("sm90.*"):
            want = step()
    assert len(of_experts) == 2
    for plan in of_experts:
        assert not plan.unfused, str(plan)
        assert {"sm90.fp8_grouped_gemm_activation", "sm90.fp8_grouped_dgrad"} <= set(rules(plan))
    assert counted == []
    assert not any("experts" in name for name in found), "frozen"
    assert (found["loss"] - want["loss"]).abs() < 0.02 * want["loss"]
    for name, t in want.items():
        assert found[name].isfinite().all(), name
        if t.dim() > 1 and "norm" not in name:
            assert torch.cosine_similarity(found[name].float().flatten(), t.float().flatten(), 0) > 0.9, name


# ------------------------------------------------------------------------------------------ recipes of other packages


class Format(Enum):
    E4M3 = "e4m3"


@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = True
    amax_epsilon: float = 0.0


@dataclass
class Float8BlockScaling:
    """Transformer Engine's recipe: its names and fields."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp = QParams()
    fp8_quant_fwd_weight = QParams()
    fp8_quant_bwd_grad = QParams()
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_dpa: bool = False
    backward_override: object = None


def test_a_recipe_object_of_transformer_engine():
    layer, (x, dy) = moe(), tokens()
    with fm.recipe("fp8_block"), fm.strict():
        want = of(layer, x, dy)
    fm.clear_weight_cache(layer)
    with fm.recipe(Float8BlockScaling()), fm.strict():
        got = of(layer, x, dy)
        (plan,) = layer.explain(x.requires_grad_()).plans
    assert_products_are_fp8(plan, "fp8_block")
    assert_equal(got, want)


def filled(module, chain):
    """A framework's experts with the weights of a chain."""
    with torch.no_grad():
        for mine, weight in zip(module, (chain[0].weight, chain[3].weight), strict=True):
            mine.copy_(weight)


@EACH
def test_experts_of_torchtitan(recipe, monkeypatch):
    """Through the recipe of the override, without one around the call; parameters in fp32, as torchtitan has them."""
    from kit import torchtitan_stand_in as stand_in
    from kit.framework_oracle import import_anew, install

    install(monkeypatch, stand_in.MODULES)
    ours = import_anew(monkeypatch, "fusedmoe.integrations.torchtitan")
    config = stand_in.GroupedExperts.Config(dim=H, hidden_dim=I, num_experts=E)
    module = ours.experts(config, recipe=recipe).build().to(DEVICE)
    chain = experts()
    with torch.no_grad():
        gate, up = chain[0].weight.chunk(2, 1)
        for parameter, weight in ((module.w1_EFD, gate), (module.w3_EFD, up), (module.w2_EDF, chain[3].weight)):
            parameter.copy_(weight)
    x, named, dy = rows(SPLITS, tail=5, beyond=torch.nan)
    without_scale = fm.Sequential(chain[0], chain[1], chain[3])
    with fm.recipe(recipe):
        want = of(without_scale, x, dy, splits=named["splits"])
    with fm.strict():
        leaf = x.detach().requires_grad_()
        y = module(leaf, named["splits"])
        y.backward(dy)
    (plan,) = module.explain(leaf, named["splits"]).plans
    assert_products_are_fp8(plan, recipe)
    gate, up = want["0.weight"].chunk(2, 1)
    wanted = {"y": want["y"], "x": want["x"], "w1_EFD": gate, "w3_EFD": up, "w2_EDF": want["2.weight"]}
    got = {"y": y.detach(), "x": leaf.grad, **{name: p.grad.to(BF16) for name, p in module.named_parameters()}}
    assert_equal(got, wanted)


@EACH
def test_experts_of_megatron(recipe, monkeypatch):
    """Through the parameter of the module, with gradients that are added to ``main_grad``."""
    from kit import megatron_stand_in as stand_in
    from kit.framework_oracle import install

    from fusedmoe.integrations.megatron import FusedGroupedMLP

    install(monkeypatch, stand_in.MODULES)
    config = stand_in.transformer_config(
        activation_func=torch.nn.functional.silu, gated_linear_unit=True, hidden_size=H, moe_ffn_hidden_size=I,
        num_moe_experts=E, add_bias_linear=False, use_cpu_initialization=True, params_dtype=BF16,
        gradient_accumulation_fusion=True,
    )  # fmt: skip
    counted = count_quantized_weights(monkeypatch)
    module = FusedGroupedMLP(E, config, pg_collection=stand_in.ProcessGroupCollection(), recipe=recipe).to(DEVICE)
    chain = experts()
    weights = [module.linear_fc1.weight, module.linear_fc2.weight]
    filled(weights, chain)
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    x, named, dy = rows(SPLITS, tail=5, beyond=torch.nan)
    with fm.strict():
        for _ in range(2):
            leaf, probs = x.detach().requires_grad_(), named["probs"].detach().requires_grad_()
            y, bias = module(leaf, named["splits"], probs)
            y.backward(dy)
    assert bias is None
    assert len(counted) == 2, "once for both micro-batches"
    for layer in (chain[0], chain[3]):
        layer.accumulate_into_main_grad = True
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    with fm.recipe(recipe), fm.strict():
        for _ in range(2):
            of_chain = x.detach().requires_grad_(), named["probs"].detach().requires_grad_()
            want = chain(of_chain[0], splits=named["splits"], probs=of_chain[1])
            want.backward(dy)
    got = [y.detach(), leaf.grad, probs.grad, *(weight.main_grad for weight in weights)]
    wanted = [want.detach(), *(t.grad for t in of_chain), chain[0].weight.main_grad, chain[3].weight.main_grad]
    for a, b in zip(got, wanted, strict=True):
        assert b.any()
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------------------------- FSDP2


@pytest.fixture
def mesh():
    if EMULATED:
        backend, device = "gloo", "cpu"
    else:
        if not dist.is_nccl_available():
            pytest.skip("torch is built without NCCL")
        torch.cuda.set_device(0)
        backend, device = "nccl", "cuda"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh(device, (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # those of NCCL
@pytest.mark.parametrize("reshard", [True, False], ids=["resharded after forward", "kept for backward"])
@EACH
def test_sharded_layers_have_the_same_gradients(recipe, reshard, mesh, monkeypatch):
    """Parameters in fp32 that are gathered in bf16; each time, the gathered weight is quantized."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    whole, (x, dy) = moe(), tokens()
    layer = copy.deepcopy(whole).float()
    policy = fsdp.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    fsdp.fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    counted = count_quantized_weights(monkeypatch)
    for _ in range(2):
        with fm.recipe(recipe), fm.strict():
            want = of(whole, x, dy)
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


# ---------------------------------------------------------------------------------------------------------- the demo


@needs_gpu
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
