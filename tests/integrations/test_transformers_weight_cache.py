"""Experts of transformers quantize a weight once over micro-batches, and again as soon as it may have changed.

The module's parameters are arguments of each call. tests/unit/test_weight_cache.py has every kind of change.
"""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from kit import moe_families
from torch import distributed as dist
from torch import nn

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers
from fusedmoe.integrations.transformers import expert_modules
from fusedmoe.ops.state import weight_cache

FAMILIES = ["qwen3_moe", "mixtral", "gpt_oss"]  # the last with weights that are stored (E, in, out)
LAYERS, WEIGHTS, FORMS = 2, 2, 2  # forms: by rows for the output, by columns for the data gradient
EACH = LAYERS * WEIGHTS * FORMS


@pytest.fixture(autouse=True)
def mxfp8():
    fusedmoe_transformers.register()
    with fm.recipe("mxfp8"):
        yield


def built(family="qwen3_moe", dtype=torch.float32):
    return moe_families.tiny(family, "fusedmoe", dtype)


def train(tiny, micro_batches=1):
    """The losses of micro-batches of different tokens."""
    ids, losses = tiny.inputs["input_ids"], []
    for i in range(micro_batches):
        inputs = {name: t.roll(i, -1) if t is ids else t for name, t in tiny.inputs.items()}
        losses.append(tiny.model(**inputs).loss)
        losses[-1].backward()
    return [loss.detach() for loss in losses]


def logits(tiny):
    """The logits of the model in eval mode."""
    training = tiny.model.training
    tiny.model.eval()
    with torch.no_grad():
        found = moe_families.logits_and_loss(tiny)[0]
    tiny.model.train(training)
    return found


def assert_as_fresh(tiny):
    """A copy has quantized nothing yet."""
    fresh = copy.copy(tiny)
    fresh.model = copy.deepcopy(tiny.model)
    assert fm.weight_cache_bytes(fresh.model) == 0
    assert torch.equal(logits(tiny), logits(fresh))


# ---- how often ----------------------------------------------------------------------------------------------------


def autocast(tiny):
    forward = tiny.model.forward

    def cast(**inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return forward(**inputs)

    tiny.model.forward = cast


def patched_routers(tiny):
    assert fusedmoe_transformers.patch_routers(tiny.model, fp32_logits=True) == LAYERS


def frozen(tiny):
    for _, experts in tiny.experts:
        experts.requires_grad_(False)


def checkpointed(tiny, use_reentrant=False):
    model = tiny.model  # by the name that it has in this version
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
    model.train()


def reentrant(tiny):
    checkpointed(tiny, use_reentrant=True)
    tiny.model.enable_input_require_grads()


WAYS = {f.__name__: f for f in (autocast, patched_routers, frozen, checkpointed, reentrant)}


@pytest.mark.parametrize(("family", "way"), [*((f, None) for f in FAMILIES), ("gpt_oss", "autocast"), *(
    ("qwen3_moe", way) for way in WAYS
)])  # fmt: skip
def test_once_over_micro_batches_and_again_after_a_step(family, way, count):
    tiny = built(family)
    if way is not None:
        WAYS[way](tiny)
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)
    for _ in range(3):
        train(tiny, micro_batches=3)
        # a reentrant checkpoint first runs without gradients, and quantizes by rows alone
        assert count() == EACH + (EACH // FORMS if way == "reentrant" else 0)
        logits(tiny)
        assert count() == 0
        optimizer.step()
        optimizer.zero_grad()
    assert fm.weight_cache_bytes(tiny.model) > 0


def test_llama4_and_dense_layers_too(count):
    tiny = moe_families.tiny("llama4", None, torch.float32, num_experts_per_tok=2)
    fusedmoe_transformers.patch_llama4(tiny.model)
    train(tiny, micro_batches=3)
    assert count() == EACH
    assert fm.weight_cache_bytes(tiny.model) > 0


@pytest.mark.parametrize("set_to_none", [False, True], ids=["grad zeroed", "grad None"])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_without_a_cache(family, set_to_none, monkeypatch):
    """Losses and weights, to the bit, with gradient clipping, validation and a learning rate that changes much."""
    found = []
    for cached in (True, False):
        if not cached:
            monkeypatch.setattr(weight_cache, "keep", lambda *_, **__: None)
        tiny = built(family)
        optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-2)
        for _ in range(4):
            found += train(tiny, micro_batches=3)
            nn.utils.clip_grad_norm_(tiny.model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            found.append(logits(tiny))
        found += [p.detach() for p in tiny.model.parameters()]
        assert (fm.weight_cache_bytes(tiny.model) > 0) is cached
    half = len(found) // 2
    assert not torch.equal(found[0], found[4])
    for got, want in zip(found[:half], found[half:], strict=True):
        assert torch.equal(got, want)


# ---- changes ------------------------------------------------------------------------------------------------------


def in_place(experts):
    with torch.no_grad():
        experts.down_proj.mul_(1.5)


def replaced(experts):
    experts.down_proj = nn.Parameter(experts.down_proj.detach() * 1.5)


def loaded(experts):
    experts.load_state_dict({name: 1.5 * t for name, t in experts.state_dict().items()})


def through_data_without_gradient(experts):
    experts.down_proj.data.mul_(1.5)
    experts.down_proj.grad = None


def through_data_with_gradient_zeroed(experts):
    experts.down_proj.data.mul_(1.5)
    experts.down_proj.grad.zero_()


def through_data_and_cleared(experts):
    experts.down_proj.data.mul_(1.5)
    fm.clear_weight_cache(experts)


CHANGES = [
    in_place, replaced, loaded, through_data_without_gradient, through_data_with_gradient_zeroed,
    through_data_and_cleared,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_again_after_a_change(family, micro_batches, change):
    tiny = built(family)
    train(tiny, micro_batches)
    before = logits(tiny)
    change(tiny.experts[0][1])
    assert not torch.equal(logits(tiny), before)
    assert_as_fresh(tiny)


def test_experts_that_share_their_weights_follow_both():
    tiny = built()
    (_, first), (_, second) = tiny.experts
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=1.0)
    for _ in range(2):
        train(tiny, micro_batches=3)
        assert_as_fresh(tiny)
        optimizer.step()
        optimizer.zero_grad()
        assert_as_fresh(tiny)


def test_debugging_finds_writes_that_torch_does_not_count(monkeypatch):
    monkeypatch.setenv("FUSEDMOE_DEBUG", "1")
    for family in ("qwen3_moe", "gpt_oss"):
        tiny = built(family)
        train(tiny, micro_batches=2)
        tiny.experts[1][1].down_proj.data.mul_(2)
        with pytest.raises(fm.InputError, match=r"down\.GroupedLinear.*weight: changed .*fm\.clear_weight_cache"):
            logits(tiny)
        fm.clear_weight_cache(tiny.model)
        assert_as_fresh(tiny)


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda tiny: None, patched_routers], ids=["", "patched routers"])
def test_the_bytes_of_a_model(change):
    tiny = built()
    change(tiny)
    assert fm.weight_cache_bytes(tiny.model) == 0
    train(tiny)
    elements = sum(p.numel() for _, experts in tiny.experts for p in experts.parameters())
    assert fm.weight_cache_bytes(tiny.model) == 2 * elements * 33 // 32  # a byte each in two forms, and scales
    assert fm.weight_cache_bytes(tiny.experts[0][1]) == elements * 33 // 32
    fm.clear_weight_cache(tiny.experts[0][1])
    assert fm.weight_cache_bytes(tiny.model) == elements * 33 // 32
    fm.clear_weight_cache(tiny.model)
    assert fm.weight_cache_bytes(tiny.model) == 0


def test_copies_and_pickles_take_nothing_along():
    tiny = built("gpt_oss")
    train(tiny, micro_batches=2)
    own, want = tiny.model, logits(tiny)
    saved = io.BytesIO()
    torch.save(own, saved)
    saved.seek(0)
    for model in (copy.deepcopy(own), pickle.loads(pickle.dumps(own)), torch.load(saved, weights_only=False)):
        assert fm.weight_cache_bytes(model) == 0
        tiny.model = model
        assert torch.equal(logits(tiny), want)
        assert fm.weight_cache_bytes(model) > 0
    tiny.model = own
    assert fm.weight_cache_bytes(own) > 0
    assert torch.equal(logits(tiny), want)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_neither_parameters_nor_gradients_are_kept_alive(family):
    tiny = built(family)
    train(tiny, micro_batches=2)
    (_, experts), _ = tiny.experts
    weight, grad = weakref.ref(experts.down_proj), weakref.ref(experts.down_proj.grad)
    experts.down_proj.grad = None
    gc.collect()
    assert grad() is None
    replaced(experts)
    gc.collect()
    assert weight() is None


# ---- sharded weights ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_under_fsdp2_weights_are_quantized_in_each_call(mesh, family, reshard, count):
    """FSDP2 fills the memory of the same parameter again, of which a group of one process shows nothing."""
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    tiny, whole = built(family), built(family)
    for layer in tiny.model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(tiny.model, mesh=mesh, reshard_after_forward=reshard)
    for _ in range(2):
        assert train(tiny, 2) == train(whole, 2)
        for _ in range(3):
            count()
            got = logits(tiny)
            assert count() == EACH / FORMS
            assert torch.equal(got, logits(whole))
            assert fm.weight_cache_bytes(tiny.model) == 0
            for module in (tiny.model, *tiny.model.model.layers):
                module.reshard()
            for model in (tiny.model, whole.model):
                in_place(model.model.layers[0].mlp.experts)
        for model in (tiny.model, whole.model):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
def test_local_tensors_of_dtensors_are_not_kept(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    tiny = built()
    (_, experts), _ = tiny.experts
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).detach()
        setattr(experts, name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))
    for _ in range(2):
        train(tiny)
        logits(tiny)
        assert fm.weight_cache_bytes(experts) == 0
        with torch.no_grad():
            experts.down_proj.to_local().data.mul_(1.5)
    fresh = built()
    with torch.no_grad():
        for mine, its in zip(tiny.model.parameters(), fresh.model.parameters(), strict=True):
            its.copy_(mine.to_local() if hasattr(mine, "to_local") else mine)
    assert torch.equal(logits(tiny), logits(fresh))


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")
def test_weights_that_are_gathered_for_each_call_are_not_kept(mesh, count):
    """As by DeepSpeed's ZeRO-3: by a collective, so that no call could use what is kept."""
    tiny = built()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
        train(tiny)
        assert count() == EACH
        assert fm.weight_cache_bytes(tiny.model) == 0
    train(tiny)  # nothing was gathered
    assert fm.weight_cache_bytes(tiny.model) > 0
    assert count() == EACH
    train(tiny)
    assert count() == 0
    dist.all_reduce(torch.ones(1))
    train(tiny)
    assert count() == EACH
    assert_as_fresh(tiny)


# ---- torch.compile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_compiled_experts_keep_nothing_and_follow_the_weights(family, count):
    """After their backward pass, eager calls do not use a stale weight either."""
    tiny, plain = built(family), built(family)
    (_, experts), (_, eager) = tiny.experts[0], plain.experts[0]
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    x = torch.randn(12, 64)
    index, weights = torch.randint(8, (12, 2)), torch.rand(12, 2)
    for _ in range(2):
        for call, module in ((compiled, experts), (eager, eager)):
            fm.clear_weight_cache(module)
            call(x, index, weights).square().sum().backward()
        for name in ("gate_up_proj", "down_proj"):
            torch.testing.assert_close(getattr(experts, name).grad, getattr(eager, name).grad)
        assert fm.weight_cache_bytes(experts) == 0
        with torch.no_grad():
            before = experts(x, index, weights)  # eager: kept
            assert fm.weight_cache_bytes(experts) > 0
            torch.testing.assert_close(compiled(x, index, weights), before)
        compiled(x, index, weights).square().sum().backward()
        eager(x, index, weights).square().sum().backward()
        for module in (experts, eager):
            for p in module.parameters():
                p.data.sub_(p.grad, alpha=0.1)
                p.grad.zero_()
        with torch.no_grad():
            assert torch.equal(experts(x, index, weights), copy.deepcopy(experts)(x, index, weights))
            assert not torch.equal(experts(x, index, weights), before)


def test_where_the_ops_are():
    """The ops of a module are not its submodules, so `weight_cache_bytes` looks for them in its `__dict__`."""
    tiny = built()
    train(tiny)
    assert expert_modules.OPS in tiny.experts[0][1].__dict__
    assert not any(isinstance(m, fm.GroupedLinear) for m in tiny.model.modules())
