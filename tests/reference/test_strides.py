"""Tensors as they come: strided, expanded, sliced, off their alignment."""

import pytest
import torch
import torch.nn.functional as F
from kit.compare import assert_accurate, label, pairwise
from kit.layers import H, chain, leaf, outcome
from kit.oracles import exact_outcome
from kit.rounding import ROUNDOFF, error_of_sums
from kit.splits import SPLITS
from torch import nn

import fusedmoe as fm

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def transposed(t):
    return t.mT.contiguous().mT


def every_second_column(t):
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))
    wide[..., ::2] = t
    return wide[..., ::2]


def slice_of_wider_rows(t):
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 3), float("nan"))
    wide[..., 1:-2] = t
    return wide[..., 1:-2]


def off_alignment(t):
    flat = t.new_full((t.numel() + 1,), float("nan"))
    flat[1:] = t.flatten()
    return flat[1:].view(t.shape)


def one_number(t):
    return t[0, 0].expand(t.shape)


def sliding_window(t):
    return t.new_tensor(range(64)).sin().as_strided(t.shape, (4, 1))


LAYOUTS = [transposed, every_second_column, slice_of_wider_rows, off_alignment]


def bound(dtype, *lengths, roundings):
    """Of the difference of two results: of roundings to bf16, or of the sums of both."""
    return roundings * ROUNDOFF[dtype] if dtype is torch.bfloat16 else 2 * error_of_sums(*lengths, dtype=dtype)


@pytest.mark.parametrize(
    ("which", "layout", "dtype"),
    [
        *pairwise(["x", "dy"], [*LAYOUTS, one_number, sliding_window], DTYPES),
        *pairwise(["0.weight", "2.weight"], LAYOUTS, DTYPES),
    ],
    ids=label,
)
def test_rows_gradients_and_weights(which, layout, dtype):
    seq = chain("mlp", 3, dtype)
    given = {"x": leaf(6, H, dtype=dtype), "dy": torch.randn(6, H).to(dtype)}
    strided = layout((given[which] if which in given else seq.get_parameter(which)).detach())
    assert not strided.is_contiguous() or strided.data_ptr() % 16

    def run(t):
        if which in given:
            return outcome(seq, **given | {which: t.requires_grad_(which == "x")}, splits=SPLITS)
        seq[int(which[0])].weight = nn.Parameter(t)
        return outcome(seq, **given, splits=SPLITS)

    want = run(strided.contiguous().clone())
    assert_accurate(run(strided), want, bound(dtype, H, H, 3, roundings=8))  # two layers, three rows


@every_dtype
def test_one_weight_for_all_experts_and_a_row_whose_pitch_is_not_its_width(dtype):
    layer, shared = fm.GroupedLinear(3, H, H, dtype=dtype), torch.randn(1, H, H).to(dtype)
    layer.weight = nn.Parameter(shared.expand(3, H, H))
    x = torch.randn(5, H).to(dtype)
    want = F.linear(x.double(), shared[0].double())
    assert_accurate(layer(x, splits=SPLITS), want, bound(dtype, H, roundings=4))
    # one row: torch calls any pitch contiguous
    row = torch.randn(H, 1).to(dtype).mT
    assert row.stride() == (1, 1)
    layer, dy = fm.GroupedLinear(1, H, H, dtype=dtype), torch.randn(H, 1).to(dtype).mT
    call = {"x": row.requires_grad_(), "dy": dy, "splits": torch.tensor([1])}
    assert_accurate(outcome(layer, **call), exact_outcome(layer, **call), bound(dtype, H, roundings=4))


def test_strided_runtime_inputs():
    seq, x, probs = chain("scaled mlp"), torch.randn(6, H, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    strided = torch.stack((SPLITS, SPLITS), dim=1)[:, 0]
    for given in (torch.stack((probs, probs), dim=1)[:, 0], probs[:1].expand(6)):
        want = seq(x, splits=SPLITS, probs=given.contiguous())
        assert torch.equal(seq(x, splits=strided, probs=given), want)


@pytest.mark.parametrize("which", ["x", "dy"])
def test_rows_reach_the_grouped_product_with_unit_stride_along_features(which, monkeypatch):
    """On a GPU the product needs an aligned first row of each expert, which only contiguous rows guarantee."""
    rows, k, n, splits, seen = 16, 24, 32, torch.tensor([5, 0, 8]), []  # a pitch of 16 rows is aligned itself
    product = F.grouped_mm

    def noting(a, b, **named):
        seen.extend(t for t in (a, b) if t.dim() == 2)
        return product(a, b, **named)

    layer = fm.GroupedLinear(3, k, n, dtype=torch.bfloat16)
    given = {"x": leaf(rows, k, dtype=torch.bfloat16), "dy": torch.randn(rows, n).to(torch.bfloat16)}
    want = outcome(layer, **given, splits=splits)
    given[which] = transposed(given[which].detach()).requires_grad_(which == "x")
    monkeypatch.setattr(F, "grouped_mm", noting)
    found = outcome(layer, **given, splits=splits)
    assert len(seen) == 4  # x, dy, and for the weight gradient dy transposed and x
    for t in seen:
        by_rows = t if t.shape[0] == rows else t.mT
        assert by_rows.shape[0] == rows
        assert by_rows.stride(1) == 1
    assert_accurate(found, want, 8 * ROUNDOFF[torch.bfloat16])
