"""Distributed checkpoints from one layout into another: stock names and shapes, the same training afterwards."""

import pytest
import test_fsdp_two_ranks as two
import torch
from torch import distributed as dist

import fusedmoe as fm

if not dist.is_available():
    pytest.skip("torch is built without distributed", allow_module_level=True)

dcp = pytest.importorskip("torch.distributed.checkpoint")

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

H, I, E = two.H, two.I, two.E  # noqa: E741
SHAPES = {
    "first.router.weight": (E, H),
    "first.experts.gate_up.weight": (E, 2 * I, H),
    "first.experts.down.weight": (E, H, I),
    "second.router.weight": (E, H),
    "second.experts.gate_up.weight": (E, 2 * I, H),
    "second.experts.down.weight": (E, H, I),
    "second.shared.gate_up.weight": (2 * I, H),
    "second.shared.down.weight": (H, I),
    "third.0.weight": (E, 2 * I, H),
    "third.2.weight": (E, H, I),
}


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, tokens, steps, recipe="bf16"):
    """Losses; every process has the same rows, so that every layout has the same sums."""
    losses = []
    for _ in range(steps):
        with fm.recipe(recipe):
            losses.append(two.loss_of(model, tokens, two.SPLITS[0]))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def states(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def load(model, optimizer, folder):
    from torch.distributed.checkpoint.state_dict import set_state_dict

    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def fresh():
    model = two.make(torch.float32)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    return model


def save_sharded(rank, folder, tokens, recipe):
    model = two.sharded(two.make(torch.float32))
    optimizer = optimizer_of(model)
    train(model, optimizer, tokens, 2, recipe)
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    return two.whole(model), train(model, optimizer, tokens, 2, recipe)


def load_sharded(rank, folder, tokens, recipe):
    model = two.sharded(fresh())
    optimizer = optimizer_of(model)
    train(model, optimizer, tokens, 1, recipe)  # a quantized weight from before the load must not be used after it
    load(model, optimizer, folder)
    return two.whole(model), train(model, optimizer, tokens, 2, recipe)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_from_two_ranks_to_one_process(ranks, tmp_path, recipe):
    tokens = next(two.batches(0, 1, torch.float32))
    (saved, continued), _ = ranks.run(save_sharded, tmp_path, tokens, recipe)
    assert {name: tuple(t.shape) for name, t in saved.items()} == SHAPES
    model = fresh()
    optimizer = optimizer_of(model)
    train(model, optimizer, tokens, 1, recipe)
    load(model, optimizer, tmp_path)
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == SHAPES
    torch.testing.assert_close(dict(model.state_dict()), saved, rtol=0, atol=0)
    assert all(t.unique().numel() > 1 for t in saved.values())
    assert train(model, optimizer, tokens, 2, recipe) == continued


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_from_one_process_to_two_ranks(ranks, tmp_path, recipe):
    tokens = next(two.batches(0, 1, torch.float32))
    model = two.make(torch.float32)
    optimizer = optimizer_of(model)
    train(model, optimizer, tokens, 2, recipe)
    dcp.save(states(model, optimizer), checkpoint_id=tmp_path)
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    continued = train(model, optimizer, tokens, 2, recipe)
    for got, losses in ranks.run(load_sharded, tmp_path, tokens, recipe):
        torch.testing.assert_close(got, saved, rtol=0, atol=0)
        assert losses == continued
