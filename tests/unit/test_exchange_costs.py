"""The estimates by which products beside an exchange are divided, and share the SMs with it."""

from types import SimpleNamespace

import pytest

from fusedmoe.builtin_rules.exchange import beside

QWEN, DEEPSEEK, MIXTRAL = (8192, 2048, 768, 128, 8), (4096, 7168, 2048, 256, 8), (8192, 4096, 14336, 8, 2)


def second_layer(shape, ranks=4):
    """Arguments of the estimates: tokens, bytes of a row, chosen experts, experts of a rank, operations of a row."""
    tokens, hidden, intermediate, experts, chosen = shape
    group = SimpleNamespace(ranks=ranks, engine=SimpleNamespace(by_kernels=True))
    return group, ranks * tokens, 2 * hidden, chosen, experts // ranks, 2 * hidden * intermediate


def sms(shape, tflops=beside.TFLOPS, by_experts=False):
    group, tokens, row_bytes, chosen, experts, flops = second_layer(shape)
    product_us = group.ranks * beside.us_of_step(group, tokens, chosen, flops, tflops)
    return beside.sms_of_leaving(group, tokens, row_bytes, chosen, product_us, experts if by_experts else 0)


def test_a_longer_product_leaves_fewer_sms_to_the_sums():
    for by_experts in (False, True):
        of = [sms(shape, by_experts=by_experts) for shape in (MIXTRAL, DEEPSEEK, QWEN)]
        assert beside.LEAST_SMS <= of[0] < of[1] < of[2] <= beside.MOST_SMS
    assert sms(MIXTRAL, beside.TFLOPS * 20) > sms(MIXTRAL)
    for tokens in (1, 100, 10_000, 1_000_000):
        assert sms((tokens, *QWEN[1:])) % 2 == 0, "clusters have two CTAs"


@pytest.mark.parametrize(("shape", "reads"), [(QWEN, False), (DEEPSEEK, True), (MIXTRAL, False)])
def test_few_rows_take_as_long_as_their_weights(shape, reads):
    group, tokens, row_bytes, chosen, experts, flops = second_layer(shape)
    assert beside.reads_weights(group, tokens, chosen, experts, flops, beside.TFLOPS) is reads
    assert beside.reads_weights(group, 4, chosen, experts, flops, beside.TFLOPS)
    divided = beside.experts_beside(group, tokens, row_bytes, chosen, experts, flops, beside.TFLOPS)
    assert 1 <= divided <= experts
    assert (divided < experts / 4) is (shape == DEEPSEEK)
