"""The demo's transformer: it looks back only, positions are relative, and its size is what it says."""

import pytest
import torch

from fusedmoe.commands.demo.model import ACTIVATION_OPS, ByteTransformer, ModelConfig, rope_tables, rotate
from fusedmoe.commands.demo.options import ACTIVATIONS, ROUTERS

SIZES = {"layers": 2, "hidden": 16, "heads": 2, "experts": 4, "top_k": 2, "intermediate": 8, "context": 12}


def model_of(**changes):
    torch.manual_seed(0)
    return ByteTransformer(ModelConfig(**{**SIZES, **changes}))


def with_all_weights_random(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_router_trains(activation, router):
    model = model_of(activation=activation, router=router)
    text = torch.randint(256, (3, 12))
    logits, routing = model(text)
    assert logits.shape == (3, 12, 256)
    assert routing.load.shape == (2, 4)
    assert routing.load.sum(dim=1).tolist() == [3 * 12 * 2] * 2  # each token goes to two experts, in each layer
    assert routing.load_balancing_loss.shape == routing.z_loss.shape == (2,)
    (logits.logsumexp(-1).sum() + routing.load_balancing_loss.sum() + routing.z_loss.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_biases_move_towards_the_experts_with_few_rows():
    model = model_of(router="sigmoid")
    model.update_router_biases(torch.tensor([[1, 9, 5, 5], [0, 0, 0, 20]]), 0.5)
    biases = [block.moe.router.balance_bias.tolist() for block in model.blocks]
    assert biases == [[0.5, -0.5, 0.0, 0.0], [0.5, 0.5, 0.5, -0.5]]


def test_the_activations_of_the_options_are_those_of_the_model():
    assert set(ACTIVATION_OPS) == set(ACTIVATIONS)


def test_a_later_byte_changes_nothing_before_it():
    model = with_all_weights_random(model_of()).eval()
    text = torch.randint(256, (1, 12))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    with torch.no_grad():
        before, after = model(text)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert all((before[0, i] - after[0, i]).abs().max() > 1e-3 for i in range(7, 12))  # and much from it on


def test_attention_scores_depend_on_distance_alone():
    cos, sin = rope_tables(32, 8, None, None)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    rotated_q, rotated_k = rotate(q.expand(32, 8), cos, sin), rotate(k.expand(32, 8), cos, sin)
    scores = rotated_q @ rotated_k.T
    for distance in (-5, 0, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert (scores[0, 0] - scores[0, 9]).abs() > 1e-2
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(32))


def test_parameter_counts():
    embedding, norms = 256 * 16, 16 * (1 + 2 * 2)
    attention, router, expert = 4 * 16 * 16, 4 * 16, 3 * 16 * 8
    total, active = model_of().parameter_counts()
    assert total == embedding + norms + 2 * (attention + router + 4 * expert)
    assert active == embedding + norms + 2 * (attention + router + 2 * expert)


def test_dropout_is_for_training_alone():
    model = with_all_weights_random(model_of(dropout=0.5))
    text = torch.randint(256, (1, 12))
    with torch.no_grad():
        assert not torch.equal(model(text)[0], model(text)[0])
        model.eval()
        assert torch.equal(model(text)[0], model(text)[0])
