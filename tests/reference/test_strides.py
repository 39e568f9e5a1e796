"""Tensors as they come: strided, expanded, sliced, off their alignment."""

import pytest
import torch
import torch.nn.functional as F
from kit.compare import assert_accurate, label, pairwise
from kit.layers import H, chain, leaf, outcome
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


def every_second_row(t):
    wide = t.new_full((2 * t.shape[0], *t.shape[1:]), float("nan"))
    wide[::2] = t
    return wide[::2]


def one_row(t):
    return t[:1].expand(t.shape)


def one_number(t):
    return t[0, 0].expand(t.shape)


def sliding_window(t):
    return t.new_tensor(range(64)).sin().as_strided(t.shape, (4, 1))


LAYOUTS = [transposed, every_second_column, slice_of_wider_rows, off_alignment, every_second_row]


def run(seq, x, dy):
    return outcome(seq, x.detach().requires_grad_(), dy, splits=SPLITS)


def bound(dtype, *lengths, roundings):
    """Of the difference of two results: of roundings to bf16, or of the sums of both."""
    return roundings * ROUNDOFF[dtype] if dtype is torch.bfloat16 else 2 * error_of_sums(*lengths, dtype=dtype)


@pytest.mark.parametrize(
    ("which", "layout", "dtype"),
    pairwise(["x", "dy"], [*LAYOUTS, one_row, one_number, sliding_window], DTYPES),
    ids=label,
)
def test_rows_and_their_gradient(which, layout, dtype):
    seq = chain("mlp", 3, dtype)
    given = {"x": torch.randn(6, H).to(dtype), "dy": torch.randn(6, H).to(dtype)}
    given[which] = layout(given[which])
    assert not given[which].is_contiguous() or given[which].data_ptr() % 16
    want = run(seq, **given | {which: given[which].contiguous().clone()})
    assert_accurate(run(seq, **given), want, bound(dtype, H, H, 3, roundings=8))  # two layers, three rows


@pytest.mark.parametrize(("which", "layout", "dtype"), pairwise([0, 2], LAYOUTS, DTYPES), ids=label)
def test_weights(which, layout, dtype):
    seq = chain("mlp", 3, dtype)
    x, dy = torch.randn(6, H).to(dtype), torch.randn(6, H).to(dtype)
    want = run(seq, x, dy)
    seq[which].weight = nn.Parameter(layout(seq[which].weight.detach()))
    assert_accurate(run(seq, x, dy), want, bound(dtype, H, H, 3, roundings=8))


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
    y, dx, dw = outcome(layer, row.detach().requires_grad_(), dy, splits=torch.tensor([1])).values()
    want = F.linear(row.double(), layer.weight[0].detach().double())
    assert_accurate(y, want, bound(dtype, H, roundings=4))
    assert_accurate(dw[0], dy.double().T @ row.double(), bound(dtype, 1, roundings=1.01))
    assert dx.shape == (1, H)


def test_strided_runtime_inputs():
    seq, x, probs = chain("scaled mlp"), torch.randn(6, H, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    strided = torch.stack((SPLITS, SPLITS), dim=1)[:, 0]
    half = torch.tensor(0.5, dtype=torch.float64)
    for splits, given in [(every_second_row(SPLITS.double()).long(), every_second_row(probs)), (strided, probs)]:
        assert torch.equal(seq(x, splits=splits, probs=given), seq(x, splits=SPLITS, probs=probs))
    want = seq(x, splits=SPLITS, probs=torch.full_like(probs, 0.5))
    assert torch.equal(seq(x, splits=SPLITS, probs=half.expand(6)), want)


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
