"""Tensors as they come: strided, expanded, sliced, off their alignment."""

import pytest
import torch
import torch.nn.functional as F
from chains import H, chain, meaning
from oracles import grouped_linear
from rounding import ROUNDOFF, error_of_sums, relative_error
from torch import nn

import fusedmoe as fm

SPLITS = torch.tensor([2, 0, 3])
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


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


LAYOUTS = [transposed, every_second_column, slice_of_wider_rows, off_alignment, every_second_row]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def run(seq, x, dy):
    x = x.detach().requires_grad_()
    y = seq(x, splits=SPLITS)
    return [y, *torch.autograd.grad(y, (x, *seq.parameters()), dy)]


def bound(dtype, *lengths, roundings):
    """Of the difference of two results: of roundings to bf16, or of the sums of both."""
    return roundings * ROUNDOFF[dtype] if dtype is torch.bfloat16 else 2 * error_of_sums(*lengths, dtype=dtype)


def assert_same(found, wanted, dtype):
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        assert relative_error(got, want.detach().double()) < bound(
            dtype, H, H, 3, roundings=8
        )  # two layers, three rows


@every_dtype
@every_layout
@pytest.mark.parametrize("which", ["x", "dy"])
def test_rows_and_their_gradient(which, layout, dtype):
    seq = chain("mlp", 3, dtype)
    given = {"x": torch.randn(6, H).to(dtype), "dy": torch.randn(6, H).to(dtype)}
    wanted = run(seq, **given)
    same = layout(given[which])
    assert torch.equal(same, given[which])
    assert same.stride() != given[which].stride() or same.data_ptr() % 16
    assert_same(run(seq, **given | {which: same}), wanted, dtype)


@every_dtype
@every_layout
@pytest.mark.parametrize("which", [0, 2])
def test_weights(which, layout, dtype):
    seq = chain("mlp", 3, dtype)
    x, dy = torch.randn(6, H).to(dtype), torch.randn(6, H).to(dtype)
    wanted = run(seq, x, dy)
    seq[which].weight = nn.Parameter(layout(seq[which].weight.detach()))
    assert_same(run(seq, x, dy), wanted, dtype)


@every_dtype
def test_a_transposed_weight_gets_its_gradient_through_backward(dtype):
    seq = chain("mlp", 3, dtype)
    w = seq[0].weight.detach()
    seq[0].weight = nn.Parameter(w.mT.contiguous().mT)
    assert not seq[0].weight.is_contiguous()
    x = torch.randn(6, H).to(dtype)
    seq(x, splits=SPLITS).sum().backward()
    exact = chain("mlp", 3)
    exact.load_state_dict(seq.state_dict())
    meaning(exact, x.double(), SPLITS).sum().backward()
    assert relative_error(seq[0].weight.grad, exact[0].weight.grad) < bound(dtype, H, H, 3, roundings=3)
    assert not seq[0].weight.grad[1].any()


@every_dtype
def test_expanded_rows_and_gradient(dtype):
    seq = chain("mlp", 3, dtype)
    x, dy = torch.randn(1, H).to(dtype).expand(6, H), torch.ones((), dtype=dtype).expand(6, H)
    assert_same(run(seq, x, dy), run(seq, x.contiguous(), dy.contiguous()), dtype)


@every_dtype
def test_one_gradient_for_all_rows(dtype):
    seq = chain("mlp", 3, dtype)
    x, dy = torch.randn(6, H).to(dtype), torch.randn(1, H).to(dtype).expand(6, H)
    assert_same(run(seq, x, dy), run(seq, x, dy.contiguous()), dtype)


@every_dtype
def test_overlapping_rows(dtype):
    signal = torch.randn(64).to(dtype)
    x = signal.as_strided((6, H), (4, 1))  # a sliding window
    seq, dy = chain("mlp", 3, dtype), torch.randn(6, H).to(dtype)
    assert_same(run(seq, x, dy), run(seq, x.contiguous(), dy), dtype)


@every_dtype
def test_one_weight_for_all_experts(dtype):
    layer = fm.GroupedLinear(3, H, H, dtype=dtype)
    shared = torch.randn(1, H, H).to(dtype)
    layer.weight = nn.Parameter(shared.expand(3, H, H))
    x = torch.randn(5, H).to(dtype)
    y = layer(x, splits=SPLITS)
    assert relative_error(y, F.linear(x.double(), shared[0].double())) < bound(dtype, H, roundings=4)


@every_dtype
@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 8), (8, 1), (5, 3), (8, 3), (3, 8)])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_widths_that_fit_no_alignment(rows, k, n, dtype):
    splits = torch.tensor([0, rows])
    layer = fm.GroupedLinear(2, k, n, dtype=dtype)
    nn.init.normal_(layer.weight)
    for x, dy in [
        (torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype)),
        (transposed(torch.randn(rows, k).to(dtype)), transposed(torch.randn(rows, n).to(dtype))),
    ]:
        x.requires_grad_()
        y = layer(x, splits=splits)
        found = [y, *torch.autograd.grad(y, (x, layer.weight), dy)]
        exact_x, exact_w = x.detach().double().requires_grad_(), layer.weight.detach().double().requires_grad_()
        expected = grouped_linear(exact_x, exact_w, None, splits)
        wanted = [expected, *torch.autograd.grad(expected, (exact_x, exact_w), dy.double())]
        for got, want in zip(found, wanted, strict=True):
            assert relative_error(got, want) < ROUNDOFF[dtype] * (1.01 if dtype is torch.bfloat16 else 64)


@every_dtype
def test_a_row_whose_pitch_is_not_its_width(dtype):
    # one row: torch calls any pitch contiguous
    row = torch.randn(H, 1).to(dtype).mT
    assert row.stride() == (1, 1)
    layer = fm.GroupedLinear(1, H, H, dtype=dtype)
    x = row.detach().requires_grad_()
    y = layer(x, splits=torch.tensor([1]))
    assert relative_error(y, F.linear(row.double(), layer.weight[0].detach().double())) < bound(dtype, H, roundings=4)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), torch.randn(H, 1).to(dtype).mT)
    assert dx.shape == (1, H)
    assert dw.shape == (1, H, H)


def test_strided_runtime_inputs():
    seq = chain("scaled mlp", 3)
    x = torch.randn(6, H, dtype=torch.float64)
    probs, splits = torch.rand(6, dtype=torch.float64), SPLITS
    y = seq(x, splits=splits, probs=probs)
    assert torch.equal(y, seq(x, splits=every_second_row(splits.double()).long(), probs=every_second_row(probs)))
    strided_splits = torch.stack((splits, splits), dim=1)[:, 0]
    assert not strided_splits.is_contiguous()
    assert torch.equal(y, seq(x, splits=strided_splits, probs=probs))
    half = torch.tensor(0.5, dtype=torch.float64)
    assert torch.equal(
        seq(x, splits=splits, probs=half.expand(6)), seq(x, splits=splits, probs=torch.full_like(probs, 0.5))
    )


@pytest.mark.parametrize("which", ["x", "dy"])
def test_rows_reach_the_grouped_product_with_unit_stride_along_features(which, monkeypatch):
    """On a GPU the product needs an aligned first row of each expert, which only contiguous rows guarantee."""
    rows, k, n, splits, seen = 16, 24, 32, torch.tensor([5, 0, 8]), []  # a pitch of 16 rows is aligned itself
    product = F.grouped_mm

    def noting(a, b, **named):
        seen.extend(t for t in (a, b) if t.dim() == 2)
        return product(a, b, **named)

    layer = fm.GroupedLinear(3, k, n, dtype=torch.bfloat16)
    given = {"x": torch.randn(rows, k).to(torch.bfloat16), "dy": torch.randn(rows, n).to(torch.bfloat16)}

    def results(x, dy):
        x = x.detach().requires_grad_()
        y = layer(x, splits=splits)
        return [y, *torch.autograd.grad(y, (x, layer.weight), dy)]

    wanted = results(**given)
    monkeypatch.setattr(F, "grouped_mm", noting)
    found = results(**given | {which: transposed(given[which])})
    assert len(seen) == 4  # x, dy, and for the weight gradient dy transposed and x
    for t in seen:
        by_rows = t if t.shape[0] == rows else t.mT
        assert by_rows.shape[0] == rows
        assert by_rows.stride(1) == 1
    assert_same(found, wanted, torch.bfloat16)
