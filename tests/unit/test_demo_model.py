"""The demo's transformer: it looks back only, positions are relative, and its size is what it says."""

import torch

from fusedmoe.commands.demo.model import ByteTransformer, rope_tables, rotate
from fusedmoe.commands.demo.options import job_of

SIZES = {
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "experts": 4,
    "top_k": 2,
    "intermediate": 8,
    "context": 12,
    "device": "cpu",
}


def model_of(**changes):
    torch.manual_seed(0)
    return ByteTransformer(job_of(SIZES | changes))


def with_all_weights_random(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def test_every_parameter_gets_a_gradient():
    model = model_of()
    logits, stats = model(torch.randint(256, (3, 12)))
    assert logits.shape == (3, 12, 256)
    assert [int(layer.load.sum()) for layer in stats] == [3 * 12 * 2] * 2  # each token goes to two experts per layer
    losses = sum(layer.load_balancing_loss + layer.z_loss for layer in stats)
    (logits.logsumexp(-1).sum() + losses).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_dtype_is_that_of_the_job():
    assert {p.dtype for p in model_of(dtype="bfloat16").parameters()} == {torch.bfloat16}


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
    cos, sin = rope_tables(32, 8, torch.device("cpu"))
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
