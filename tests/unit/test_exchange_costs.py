"""The estimates by which products beside an exchange are divided, and share the SMs with it."""

from types import SimpleNamespace

import pytest

from fusedmoe.builtin_rules.exchange import arriving_codes, beside

QWEN, DEEPSEEK, MIXTRAL = (8192, 2048, 768, 128, 8), (4096, 7168, 2048, 256, 8), (8192, 4096, 14336, 8, 2)


def second_layer(shape, ranks=4, rank=0):
    """Arguments of the estimates: tokens, bytes of a row, chosen experts, experts of a rank, operations of a row."""
    tokens, hidden, intermediate, experts, chosen = shape
    group = SimpleNamespace(ranks=ranks, rank=rank, engine=SimpleNamespace(by_kernels=True))
    return group, ranks * tokens, 2 * hidden, chosen, experts // ranks, 2 * hidden * intermediate


def sms(shape, tflops=beside.TFLOPS, by_experts=False, halves=False, ranks=4, rank=0):
    group, tokens, row_bytes, chosen, experts, flops = second_layer(shape, ranks, rank)
    product_us = group.ranks * beside.us_of_step(group, tokens, chosen, flops, tflops)
    return beside.sms_of_leaving(group, tokens, row_bytes, chosen, product_us, experts if by_experts else 0, halves)


def test_a_longer_product_leaves_fewer_sms_to_the_sums():
    for by_experts in (False, True):
        of = [sms(shape, by_experts=by_experts) for shape in (MIXTRAL, DEEPSEEK, QWEN)]
        assert beside.LEAST_SMS <= of[0] < of[1] < of[2] <= beside.MOST_SMS
    assert sms(MIXTRAL, beside.TFLOPS * 20) > sms(MIXTRAL)
    for tokens in (1, 100, 10_000, 1_000_000):
        assert sms((tokens, *QWEN[1:])) % 2 == 0, "clusters have two CTAs"


def test_sums_that_leave_in_halves():
    """With two ranks, all sums leave in the first half of the product. The low half of three ranks is one rank."""
    in_halves = {"by_experts": True, "halves": True}
    assert sms(DEEPSEEK, ranks=2, **in_halves) < sms(DEEPSEEK, ranks=2, by_experts=True)
    low, middle, high = (sms(QWEN, ranks=3, rank=rank, **in_halves) for rank in range(3))
    assert low != middle == high
    assert sms(DEEPSEEK, rank=0, **in_halves) == sms(DEEPSEEK, rank=3, **in_halves)


@pytest.mark.parametrize(("tokens", "own_first"), [(8192, True), (8191, False)])
def test_own_rows_come_first_if_they_fill_tiles(tokens, own_first):
    group, tokens, _, chosen, experts, _ = second_layer((tokens, *QWEN[1:]))
    assert beside.own_rows_first(group, tokens, chosen, experts) is own_first


@pytest.mark.parametrize(
    ("tokens", "ranks", "halves"), [(4096, 4, True), (4095, 4, False), (8192, 2, True), (65536, 8, False)]
)
def test_sums_leave_in_halves_if_a_half_fills_tiles_of_several_experts_of_a_token(tokens, ranks, halves):
    group, tokens, _, chosen, experts, _ = second_layer((tokens, *QWEN[1:]), ranks)
    assert beside.in_halves(group, tokens, chosen, experts) is halves


def test_a_product_begins_with_more_experts_if_rows_are_copied_after_their_arrival():
    group, tokens, row_bytes, chosen, experts, flops = second_layer(QWEN)
    copies_us = arriving_codes.us_of_copies(group, tokens, row_bytes // 2, chosen)
    given = group, tokens, row_bytes // 2, chosen, experts, 2 * flops, beside.FP8_TFLOPS  # of the first layer
    assert beside.experts_beside(*given, copies_us) > beside.experts_beside(*given)
    assert arriving_codes.us_of_copies(group, 2 * tokens, row_bytes // 2, chosen) == 2 * copies_us


@pytest.mark.parametrize(("shape", "has"), [(QWEN, True), (DEEPSEEK, False)])
def test_own_tiles_of_a_derivative_in_fp8(shape, has):
    group, tokens, _, chosen, experts, _ = second_layer(shape)
    assert arriving_codes.has_own_tiles(group, tokens, chosen, experts) is has


@pytest.mark.parametrize(("shape", "reads"), [(QWEN, False), (DEEPSEEK, True), (MIXTRAL, False)])
def test_few_rows_take_as_long_as_their_weights(shape, reads):
    group, tokens, row_bytes, chosen, experts, flops = second_layer(shape)
    assert beside.reads_weights(group, tokens, chosen, experts, flops, beside.TFLOPS) is reads
    assert beside.reads_weights(group, 4, chosen, experts, flops, beside.TFLOPS)
    divided = beside.experts_beside(group, tokens, row_bytes, chosen, experts, flops, beside.TFLOPS)
    assert 1 <= divided <= experts
    assert (divided < experts / 4) is (shape == DEEPSEEK)
