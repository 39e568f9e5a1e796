"""The end of a step of delayed scaling: histories, references and factors have the bits of plain PyTorch."""

import math

import pytest
import torch
from kit.hopper import DEVICE, needs_hopper
from kit.poison import nan_in_new_tensors

from fusedmoe.builtin_rules.rows.delayed import bind_end
from fusedmoe.numerics.formats import E5M2, Delayed, Quantizer, fp8_tensor
from fusedmoe.numerics.formats.delayed import AmaxHistory
from fusedmoe.ops.state.amax import Step, only_looking

pytestmark = needs_hopper

PARTS = ("amax", "reference", "encode", "previous")
FORMATS = {
    "": fp8_tensor(),
    "power of two": fp8_tensor(power_of_two=True),
    "e5m2": fp8_tensor(E5M2),
    "least": fp8_tensor(amax_epsilon=0.3),
}
SPECIAL = (0.0, math.inf, math.nan, 1e-45, 1e-38, 1e-30, 3.4e38, 448.0, 0.3, 1.0)


def pair(quantizer, experts):
    return [AmaxHistory(quantizer, experts, DEVICE) for _ in range(2)]


def check(found, wanted):
    for part in PARTS:
        got, want = (getattr(history, part).view(torch.int32) for history in (found, wanted))
        assert torch.equal(got, want), part


def amax_of(experts, seed):
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(experts, generator=generator).mul(40).sub(20).exp2()
    found[seed % experts :: 7] = SPECIAL[seed % len(SPECIAL)]
    return found.to(DEVICE)


@pytest.mark.parametrize("recent", [False, True], ids=["", "most recent"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_steps(format, recent):
    """More steps than the history has, and more experts than a warp."""
    quantizer = Quantizer(format, delayed=Delayed(5, recent, margin=1))
    got, want = pair(quantizer, 70)
    end = bind_end(quantizer)
    for seed in range(12):
        step, amax = Step(got, "input", True), amax_of(70, seed)
        scale = 1 / want.encode
        with nan_in_new_tensors():
            found = end(step, amax)
        want.update(amax)
        check(got, want)
        assert torch.equal(found, scale)
    assert len({*want.encode.tolist()}) > 10
    assert got.begun


def restored(steps, history, reference):
    """Two histories with these values, and the function that ends a step of the first one."""
    quantizer = Quantizer(fp8_tensor(), delayed=Delayed(steps))
    found = pair(quantizer, history.shape[1])
    for one in found:
        one.restore(history, torch.as_tensor(reference, device=DEVICE).expand(history.shape[1]))
    return *found, bind_end(quantizer)


def check_step(got, want, end, amax):
    amax = torch.as_tensor(amax, device=DEVICE).expand(got.encode.shape[0]).contiguous()
    end(Step(got, "input", True), amax)
    want.update(amax)
    check(got, want)


@pytest.mark.parametrize("experts", [1, 32, 33])
@pytest.mark.parametrize("steps", [1, 2, 3, 16, 33, 512, 513, 514, 1024, 1100])
def test_histories_of_any_length(steps, experts):
    """Each step moves by one place, those at the borders of a warp's share and of a chunk too."""
    history = torch.rand(steps, experts, device=DEVICE) + 1
    history[steps // 2, experts // 2] = 300
    found = restored(steps, history, 2.0)
    for amax in (1.5, 2.5):
        check_step(*found, amax)
    assert torch.equal(found[0].amax[1:2], torch.full((1, experts), 1.5, device=DEVICE)[: steps - 1])


def test_the_largest_of_a_history_may_be_anywhere():
    steps, experts = 600, 40
    for first in range(0, steps, experts):
        history = torch.rand(steps, experts, device=DEVICE)
        history[first + torch.arange(experts), torch.arange(experts)] = 7.0
        found = restored(steps, history, 1.0)
        check_step(*found, 0.5)
        dropped = first + experts == steps  # the oldest, of the last expert
        assert found[0].reference.eq(7).sum() == experts - dropped


def test_values_that_are_not_finite_in_a_restored_history():
    history = torch.ones(4, 4, device=DEVICE)
    history[1] = torch.tensor([math.nan, math.inf, 0.0, 5.0], device=DEVICE)
    got, want, end = restored(4, history, [3.0, 3.0, math.inf, math.nan])
    for one in (got, want):
        one.reference.copy_(torch.tensor([3.0, 0.0, math.inf, math.nan], device=DEVICE))
    for _ in range(2):
        check_step(got, want, end, [2.0, 2.0, 0.0, 2.0])
    assert got.reference[:2].tolist() == [3.0, 0.0]
    assert got.encode[1] == 1


def test_steps_that_do_not_count():
    """Those of inference and of `explain` return the scale, and change nothing."""
    quantizer = Quantizer(fp8_tensor(), delayed=Delayed(3))
    history, before = pair(quantizer, 5)
    end = bind_end(quantizer)
    for one in (history, before):
        one.update(torch.arange(1.0, 6, device=DEVICE))
    amax = torch.full((5,), 9.0, device=DEVICE)
    found = [end(Step(history, "input", False), None), end(Step(history, "input", False), amax)]
    with only_looking():
        found.append(end(Step(history, "input", True), amax))
    check(history, before)
    assert all(torch.equal(scale, 1 / before.encode) for scale in found)
