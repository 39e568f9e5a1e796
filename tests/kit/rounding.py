"""Errors of floating-point results, and their bounds from the formats and the lengths of the sums.

A bound must hold on every processor, so it must not depend on the order of a sum: instruction sets, libraries and
numbers of threads differ in it.
"""

import torch

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance from 1 to the next number: the largest relative error of one rounding."""


def relative_error(actual, exact):
    """Norm of the error over the norm of the exact fp64 result; a result of zeros scores 1."""
    assert exact.dtype == torch.float64
    assert actual.shape == exact.shape
    norm = exact.norm()
    assert torch.isfinite(norm)
    assert norm > 0, "an exact result of zeros tells nothing"
    return ((actual.detach().double() - exact.detach()).norm() / norm).item()


def error_of_sums(*lengths, dtype=torch.float32):
    """``sum over n in lengths of sqrt(n) * u``, the bound of `relative_error` after a chain of sums.

    A sum of n products has n roundings of at most u times a partial sum. They are independent, so the norm of their
    sum grows with the square root of n (Higham and Mary, "A new approach to probabilistic rounding error analysis").
    It does not hold if a few large terms cancel each other.
    """
    return sum(n**0.5 for n in lengths) * ROUNDOFF[dtype]


def error_bound(dtype, *lengths, roundings=1):
    """The bound of `relative_error` of sums of these lengths, in fp32 or better, rounded so often to a dtype."""
    return roundings * ROUNDOFF[dtype] + error_of_sums(*lengths, dtype=torch.promote_types(dtype, torch.float32))


def error_of_roundings(count, dtype):
    """``sqrt(count / 3) * u``, the bound of `relative_error` of many numbers that were rounded one after the other.

    The errors of a rounding are spread evenly over -u to u times a power of two that is at most the number.
    """
    return (count / 3) ** 0.5 * ROUNDOFF[dtype]
