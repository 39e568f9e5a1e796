"""Comparisons of lists or dicts of tensors. None of them accepts zeros for everything."""

import itertools

import torch

from kit.rounding import relative_error


def pairs(got, want):
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        return [(name, got[name], want[name]) for name in want]
    if isinstance(want, torch.Tensor):
        got, want = [got], [want]
    return [(i, *both) for i, both in enumerate(zip(got, want, strict=True))]


def assert_bitwise(got, want, zeros=False):
    """The same dtypes and values; unless `zeros`, each with something in it."""
    for name, a, b in pairs(got, want):
        assert a.dtype is b.dtype, name
        assert torch.equal(a, b), name
        assert zeros or b.any(), f"{name}: zeros would pass"


def assert_close(got, want, rtol=1e-11, atol=1e-12, zeros=False):
    found = pairs(got, want)
    assert zeros or any(b.any() for _, _, b in found), "zeros would pass"
    for name, a, b in found:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_accurate(got, exact, bound):
    """Within a `relative_error` of fp64 results, by norms."""
    for name, a, b in pairs(got, exact):
        error = relative_error(a, b.detach().double())
        assert error < bound, f"{name}: {error:.2e}, expected less than {bound:.2e}"


def with_gradients(y, wanted, dy=None):
    """``[y, *gradients]``; None is zero."""
    grads = torch.autograd.grad(y, [*wanted], torch.ones_like(y) if dy is None else dy, materialize_grads=True,
                                allow_unused=True)  # fmt: skip
    return [y.detach(), *grads]


def assert_same_function(y, expected, wanted, dy=None, **tolerances):
    """Values, and gradients for a normal gradient of the output."""
    dy = torch.randn_like(y) if dy is None else dy
    assert_close(with_gradients(y, wanted, dy), with_gradients(expected, wanted, dy), **tolerances)


def pairwise(*axes):
    """Few tuples that have every two values of every two axes together: greedily, and always the same ones."""
    places = [*itertools.combinations(range(len(axes)), 2)]
    missing = {(i, a, j, b) for i, j in places for a in range(len(axes[i])) for b in range(len(axes[j]))}
    chosen = []
    every = [*itertools.product(*(range(len(axis)) for axis in axes))]
    while missing:
        best = max(every, key=lambda case: sum((i, case[i], j, case[j]) in missing for i, j in places))
        missing -= {(i, best[i], j, best[j]) for i, j in places}
        chosen.append(tuple(axis[k] for axis, k in zip(axes, best, strict=True)))
    return chosen


def label(case):
    """The id of a parameter: the name of a function, the text of anything else."""
    if isinstance(case, tuple):
        return ", ".join(map(label, case))
    return getattr(case, "__name__", None) or str(case)
