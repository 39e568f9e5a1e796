"""The estimated time of a fused plan, which tells whether a recipe is worth its quantization.

A step multiplies for ``m = FLOPs / rate`` and moves bytes for ``b = bytes / bandwidth``. Its time is
``max(m, b) + beside * min(m, b)``, plus 3 us per launch: prologues and epilogues of tiles are not hidden by products.

The constants are fitted to the layers that ``benchmarks/results`` has from an H200. For these layers, a test compares
the ratios of two recipes with the measured ratios. An H100 has the same rates, and 0.7 times the bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fusedmoe.fusion.report.data import PlanData, PlannedStep
from fusedmoe.fusion.report.estimate import Estimate


class _Product(NamedTuple):
    flops_per_us: float
    beside: float  # the part of the smaller of both times that is not hidden


@dataclass(frozen=True)
class _Machine:
    name: str
    bytes_per_us: float
    us_per_launch: float
    unquantized: _Product
    of_codes: _Product


_BOUND_BY_ARITHMETIC = "nvfp4"  # rotation, random bits, and a read for the largest magnitudes
_MACHINES = {90: _Machine("H200", 4.2e6, 3.0, _Product(808e6, 0.47), _Product(1320e6, 0.77))}


def estimated(plan: PlanData, in_bf16: PlanData) -> Estimate | None:
    """Return the estimate of a plan, given the plan of the same call under ``"bf16"``.

    None without an estimate: for other architectures, for plans with unfused steps, for a recipe that changes nothing,
    and for formats whose quantization takes longer than its bytes.
    """
    machine = _MACHINES.get(plan.arch or 0)
    if machine is None or plan.unfused or in_bf16.unfused or plan.formats == in_bf16.formats:
        return None
    if any(quantizer.startswith(_BOUND_BY_ARITHMETIC) for quantizer in plan.formats):
        return None
    weights = [step for step in plan.steps if step.is_of_weight]
    others = [step for step in (*plan.steps, *plan.glue) if not step.is_of_weight]
    return Estimate(
        machine.name,
        us=_us(others, machine),
        weights_us=_us(weights, machine),
        bf16_us=_us((*in_bf16.steps, *in_bf16.glue), machine),
    )


def _us(steps: Iterable[PlannedStep], machine: _Machine) -> float:
    total = 0.0
    for step in steps:
        product = machine.of_codes if step.of_codes else machine.unquantized
        times = step.flops / product.flops_per_us, step.bytes_moved / machine.bytes_per_us
        total += max(times) + product.beside * min(times) + step.launches * machine.us_per_launch
    return total
