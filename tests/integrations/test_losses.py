"""The router's losses beside those of transformers, computed by it."""

import pytest
import torch
from kit.compare import assert_close

import fusedmoe as fm

T, HIDDEN, E, K = 24, 6, 8, 3


@pytest.fixture
def theirs():
    return pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func


def logits_of(layers):
    return tuple((torch.randn(T, E) * 2).requires_grad_() for _ in range(layers))


@pytest.mark.parametrize(("layers", "masked"), [(1, False), (3, True)])
def test_the_loss_of_transformers_and_its_gradient(theirs, layers, masked):
    logits = logits_of(layers)
    mask = (torch.rand(4, T // 4) > 0.4).long() if masked else None
    results = []
    for loss in (fm.transformers_load_balancing_loss(logits, K, mask), theirs(logits, E, K, mask)):
        assert loss.dtype is torch.float32
        results.append([loss, *torch.autograd.grad(loss, logits)])
    assert_close(*results, rtol=None, atol=None)
    assert fm.transformers_load_balancing_loss(logits, K, torch.zeros(T)).item() == 0  # of padding alone


def test_the_loss_of_one_layer_is_top_k_times_the_layers_own(theirs):
    layer = fm.MoE(HIDDEN, 4, E, K)
    _, stats = layer(torch.randn(T, HIDDEN), return_stats=True)
    expected = theirs((stats.logits,), E, K)
    torch.testing.assert_close(K * stats.load_balancing_loss, expected)
    assert stats.load_balancing_loss < 0.5 * expected, "they are not the same"
    torch.testing.assert_close(fm.transformers_load_balancing_loss([stats.logits], K), expected)


@pytest.mark.parametrize(("arguments", "said"), [
    (([torch.zeros(T, E), torch.zeros(T, 4)], K), r"router_logits\[1\]: expected shape \(24, 8\)"),
    (([torch.zeros(T, E)], 9), "a top_k of at most"),
    (([torch.zeros(T, E)], K, torch.ones(5)), "attention_mask: expected 24 elements"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(arguments, said):
    with pytest.raises(fm.InputError, match=said):
        fm.transformers_load_balancing_loss(*arguments)
