"""Recipes under FSDP2 and with distributed checkpoints: one process, gloo, on a CPU."""

import pytest
import torch
from torch import distributed as dist

import fusedmoe as fm
from fusedmoe.numerics.formats import Delayed
from fusedmoe.numerics.recipes import FP8Tensor

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(fm.MoE(32, 16, 4, 2), fm.MoE(32, 16, 4, 2))


def train(model, recipe, steps=3):
    """Losses; two micro-batches per step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        for x in torch.randn(2, 40, 32):
            with fm.recipe(recipe):
                loss = (model(x) - x.roll(1, -1)).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("recipe", "reshard"),
    [("mxfp8", True), ("fp8_tensor", False)]
    + [pytest.param(*of, marks=pytest.mark.slow) for of in (("mxfp8", False), ("fp8_tensor", True))],
)
def test_sharded_training_is_unsharded_training(mesh, recipe, reshard):
    """Quantized weights are of the weights that are there now, and go when those do."""
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    expected = train(make(), recipe)
    model = make()
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    assert train(model, recipe) == expected
    assert expected[-1] < 0.9 * expected[0]
    assert fm.weight_cache_bytes(model) == 0


def test_a_distributed_checkpoint_has_what_delayed_scaling_remembers(mesh, tmp_path):
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    recipe = FP8Tensor(delayed=Delayed(history=4))
    trained, loaded = make(), make()
    train(trained, recipe)
    train(loaded, recipe, steps=1)  # so that there is something to load into
    state = get_model_state_dict(trained)
    key = "0.experts.down.amax_history.input.reference"
    assert not torch.equal(state[key], get_model_state_dict(loaded)[key])
    checkpoint.save(state, checkpoint_id=tmp_path)
    target = get_model_state_dict(loaded)
    checkpoint.load(target, checkpoint_id=tmp_path)
    set_model_state_dict(loaded, target)
    assert torch.equal(get_model_state_dict(loaded)[key], state[key])
    x = torch.randn(40, 32)
    with fm.recipe(recipe), torch.no_grad():
        assert torch.equal(loaded(x), trained(x))


def test_a_sharded_model_is_explained_without_being_called(mesh):
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    layer = fm.MoE(32, 16, 4, 2)
    (want,) = fm.explain(layer).groups
    model = fully_shard(torch.nn.Sequential(fully_shard(layer, mesh=mesh)), mesh=mesh)
    (group,) = fm.explain(model).groups
    assert group.names == ("0",)
    assert str(group.explanation) == str(want.explanation)


def test_the_balance_bias_stays_in_fp32(mesh):
    """Sharded in bf16 from the meta device on, as a large model is made."""
    fully_shard = pytest.importorskip("torch.distributed.fsdp").fully_shard
    layer = fm.MoE(32, 16, 4, 2, score="sigmoid", device="meta")
    model = fully_shard(torch.nn.Sequential(fully_shard(layer.bfloat16(), mesh=mesh)), mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for t in (*model.parameters(), layer.router.balance_bias):
            t.zero_()
    for _ in range(1000):
        layer.router.update_bias(torch.tensor([0, 8, 8, 16]))
    _, stats = layer(torch.randn(40, 32, dtype=torch.bfloat16), return_stats=True)
    assert stats.load.sum() == 80
    expected = torch.tensor([1.0, 0.0, 0.0, -1.0])
    torch.testing.assert_close(layer.router.balance_bias, expected, rtol=0, atol=1e-3)  # its dtype too


def test_the_balance_bias_is_fp32_again_under_fsdp1_mixed_precision(mesh):
    """``buffer_dtype`` casts through ``.data``, at the first call."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    layer = fm.MoE(16, 8, num_experts=4, top_k=2, score="sigmoid")
    bf16 = fsdp.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    cpu, whole = torch.device("cpu"), fsdp.ShardingStrategy.NO_SHARD
    model = fsdp.FullyShardedDataParallel(layer, sharding_strategy=whole, device_id=cpu, mixed_precision=bf16)
    check_steps_add_up(layer, model)


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(), reason="DDP makes a stream, in a build for CUDA"
)
def test_the_balance_bias_is_fp32_again_under_ddp_mixed_precision(mesh):
    precision = pytest.importorskip("torch.nn.parallel.distributed")._MixedPrecision
    layer = fm.MoE(16, 8, num_experts=4, top_k=2, score="sigmoid")
    bf16 = precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    torch.nn.parallel.DistributedDataParallel(layer, mixed_precision=bf16)  # its calls need a GPU
    check_steps_add_up(layer)


def check_steps_add_up(layer, model=None):
    for step in range(1000):
        if model is not None and step < 4:
            model(torch.randn(6, 16)).float().sum().backward()
        assert step or layer.router.balance_bias.dtype is torch.bfloat16
        for _ in range(2):
            layer.router.update_bias(torch.tensor([0, 8, 8, 16]))
    expected = torch.tensor([2.0, 0.0, 0.0, -2.0])
    torch.testing.assert_close(layer.router.balance_bias, expected, rtol=0, atol=1e-3)
