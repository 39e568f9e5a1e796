"""``explain()`` of the parts of a `Sequential`, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedmoe.base.errors import InputError
from fusedmoe.base.inputs import Parameters
from fusedmoe.call.batches import BatchedPart
from fusedmoe.call.parts import ChainPart, ModulePart, Part
from fusedmoe.fusion.report.data import PlanData
from fusedmoe.kernels.options import KernelOptions


def explain_parts(
    parts: Sequence[Part],
    x: Tensor,
    named: dict[str, Tensor],
    options: KernelOptions,
    parameters: Parameters | None,
    *,
    run: bool,
) -> tuple[tuple[str, PlanData | None], ...]:
    """Return the title and the plan of each part, as `Explanation.parts` has them.

    With ``run``, every part except the last is run. Otherwise only modules are, on tensors without memory.

    Raises `InputError`: a module before another part cannot be called on tensors without memory.
    """
    explained: list[tuple[str, PlanData | None]] = []
    counted = True
    with nullcontext() if run else FakeTensorMode(allow_non_fake_inputs=True) as mode:
        if mode is not None:
            x = mode.from_tensor(x, static_shapes=True)
            named = {name: mode.from_tensor(t, static_shapes=True) for name, t in named.items()}
        for part in parts:
            if isinstance(part, BatchedPart):
                explained.append(part.explain(x, named, options, parameters))
            else:
                chain = part.chain_for(counted) if isinstance(part, ChainPart) else None
                plan = None if chain is None else chain.explain(x, named, options, parameters)
                explained.append((part.title, plan))
            if part is parts[-1]:
                break
            try:
                x, counted = part.run(x, named, options, parameters, counted)
            except Exception as error:
                if mode is None or not isinstance(part, ModulePart) or isinstance(error, InputError):
                    raise
                raise InputError(
                    f"explain: module {part.label!r} ({type(part.module).__name__}) cannot be called on tensors "
                    f"without memory, and the next part depends on its result: {type(error).__name__}: {error}"
                ) from error
    return tuple(explained)
