"""Experts of transformers quantize a weight once over micro-batches, and again as soon as it may have changed.

The module's parameters are arguments of each call. tests/unit/test_weight_cache.py has every kind of change.
"""

import copy

import pytest
import torch
from kit import moe_families
from kit.compare import assert_bitwise
from kit.moe_families import logits
from torch import distributed as dist

import fusedmoe as fm
import fusedmoe.integrations.transformers as fusedmoe_transformers

LAYERS, WEIGHTS, FORMS = 2, 2, 2  # forms: by rows for the output, by columns for the data gradient
EACH = LAYERS * WEIGHTS * FORMS
needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="torch is built without distributed")


@pytest.fixture(autouse=True)
def mxfp8(registered):
    with fm.recipe("mxfp8"):
        yield


def built(family="qwen3_moe"):
    tiny = moe_families.tiny(family, None if family == "llama4" else "fusedmoe")
    if family == "llama4":
        fusedmoe_transformers.patch_llama4(tiny.model)
    return tiny


def train(tiny, micro_batches=1):
    """The losses of micro-batches of different tokens."""
    ids, losses = tiny.inputs["input_ids"], []
    for i in range(micro_batches):
        inputs = {name: t.roll(i, -1) if t is ids else t for name, t in tiny.inputs.items()}
        losses.append(tiny.model(**inputs).loss)
        losses[-1].backward()
    return [loss.detach() for loss in losses]


def patched_routers(tiny):
    assert fusedmoe_transformers.patch_routers(tiny.model, fp32_logits=True) == LAYERS


def frozen(tiny):
    for _, experts in tiny.experts:
        experts.requires_grad_(False)


def checkpointed(tiny):
    moe_families.checkpointed(tiny.model, use_reentrant=False)


def reentrant(tiny):
    moe_families.checkpointed(tiny.model, use_reentrant=True)
    tiny.model.enable_input_require_grads()


CASES = [("mixtral", None), ("gpt_oss", None), ("llama4", None), ("gpt_oss", moe_families.autocast)]
CASES += [("qwen3_moe", way) for way in (patched_routers, frozen, checkpointed, reentrant)]


@pytest.mark.parametrize(("family", "way"), CASES)
def test_once_over_micro_batches_and_again_after_a_step(family, way, count):
    tiny = built(family)
    if way is not None:
        way(tiny)
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)
    for _ in range(2):
        train(tiny, micro_batches=2)
        # a reentrant checkpoint first runs without gradients, and quantizes by rows alone
        assert count() == EACH + (EACH // FORMS if way is reentrant else 0)
        logits(tiny)
        assert count() == 0
        optimizer.step()
        optimizer.zero_grad()
    elements = sum(p.numel() for _, experts in tiny.experts for p in experts.parameters() if p.dim() == 3)
    assert fm.weight_cache_bytes(tiny.model) == 2 * elements * 33 // 32  # a byte each in two forms, and scales
    fm.clear_weight_cache(tiny.experts[0][1])
    assert fm.weight_cache_bytes(tiny.model) == elements * 33 // 32
    fm.clear_weight_cache(tiny.model)
    assert fm.weight_cache_bytes(tiny.model) == 0


@needs_distributed
@pytest.mark.parametrize(("family", "reshard"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_under_fsdp2_weights_are_quantized_in_each_call(mesh, family, reshard, count):
    """FSDP2 fills the memory of the same parameter again, of which a group of one process shows nothing."""
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    tiny, whole = built(family), built(family)
    for module in (*tiny.model.model.layers, tiny.model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    assert train(tiny, 2) == train(whole, 2)
    for _ in range(2):
        count()
        got = logits(tiny)
        assert count() == EACH / FORMS
        assert_bitwise(got, logits(whole))
        assert fm.weight_cache_bytes(tiny.model) == 0
        for module in (tiny.model, *tiny.model.model.layers):
            module.reshard()
        with torch.no_grad():
            for model in (tiny.model, whole.model):
                model.model.layers[0].mlp.experts.down_proj.mul_(1.5)


@needs_distributed
def test_weights_that_are_gathered_for_each_call_are_not_kept(mesh, count):
    """As by DeepSpeed's ZeRO-3: by a collective, so that no call could use what is kept."""
    tiny = built()
    for _ in range(2):
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


@pytest.mark.usefixtures("fresh_graphs")
def test_compiled_experts_keep_nothing_and_follow_the_weights():
    """After their backward pass, eager calls do not use a stale weight either."""
    tiny, plain = built(), built()
    experts, eager = tiny.experts[0][1], plain.experts[0][1]
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    given = torch.randn(12, 64), torch.randint(8, (12, 2)), torch.rand(12, 2)
    for _ in range(2):
        for call, module in ((compiled, experts), (eager, eager)):
            fm.clear_weight_cache(module)
            call(*given).square().sum().backward()
        for name in ("gate_up_proj", "down_proj"):
            torch.testing.assert_close(getattr(experts, name).grad, getattr(eager, name).grad)
        assert fm.weight_cache_bytes(experts) == 0
        with torch.no_grad():
            before = experts(*given)  # eager: kept
            assert fm.weight_cache_bytes(experts) > 0
            torch.testing.assert_close(compiled(*given), before)
        for call, module in ((compiled, experts), (eager, eager)):
            call(*given).square().sum().backward()
            for p in module.parameters():
                p.data.sub_(p.grad, alpha=0.1)
                p.grad.zero_()
        with torch.no_grad():
            assert_bitwise(experts(*given), copy.deepcopy(experts)(*given))
            assert not torch.equal(experts(*given), before)
