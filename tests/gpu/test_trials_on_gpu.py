"""Variants of kernels that are not shipped: the bits of the shipped kernels, for experts with any number of rows."""

import pytest
import torch

from benchmarks.shapes import Shape
from benchmarks.trials import run

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not hopper, reason="needs an sm_90 GPU")

CUDA = torch.device("cuda")
LOADS = {
    "around the tiles": [0, 1, 63, 64, 65, 127, 128, 129, 0, 191, 192, 255, 256, 257, 300, 0],
    "empty": [0] * 16,
    "one expert": [0] * 7 + [2304] + [0] * 8,
    "many tiles": [700, 1, 130] * 5 + [129],
}
TAIL = 40
TITLES = (
    "FC1 and the activation",
    "FC2",
    "FC2's input gradient and the activation's",
    "FC1's input gradient",
    "FC1's weight gradient",
    "FC2's weight gradient",
    "FC1's weight gradient, added",
    "FC2's weight gradient, added",
)


def products(load, tail=TAIL):
    # sizes that are multiples of no tile, and a result of several tiles in both directions
    shape = Shape("uneven", sum(load) + tail, 1096, 520, len(load), 1)
    return {p.title: p for p in run.products(shape, CUDA, torch.tensor(load, device=CUDA))}


@pytest.fixture(scope="module", autouse=True)
def built(build_ahead):
    build_ahead(kernel for product in products([8]).values() for _, kernel in run.candidates(product))


def test_the_products(built):
    assert tuple(products([8])) == TITLES


@pytest.mark.parametrize("title", TITLES)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_the_bits_are_those_of_the_shipped_kernel(load, title):
    product = products(load)[title]
    some = [candidate for candidate, _ in run.candidates(product)]
    calls = {candidate.name: run.call_of(product, candidate) for candidate in some}
    for _ in range(3):
        same = run.same_bits(calls, some)
        assert [name for name, equal in same.items() if not equal] == []
    assert any(candidate.trial for candidate in some)
