"""The parts of a `Sequential` explained one after the other, without running any: on tensors without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._subclasses.fake_tensor import FakeTensorMode

from fusedmoe.errors import InputError
from fusedmoe.partition import ChainPart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fusedmoe.fusion.plan import PlanData
    from fusedmoe.inputs import Parameters
    from fusedmoe.kernels.options import KernelOptions
    from fusedmoe.partition import ModulePart


def explain_shapes(
    parts: Sequence[ChainPart | ModulePart],
    x: Tensor,
    inputs: Mapping[str, Tensor],
    options: KernelOptions,
    parameters: Parameters | None,
) -> tuple[tuple[str, PlanData | None], ...]:
    """Return the title and the plan of each part, as `Explanation.parts` has them.

    Raises
    ------
    InputError
        A module in front of another part cannot be called on tensors that have no memory.
    """
    explained = []
    counted = True
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(x, static_shapes=True)
        named: dict[str, Tensor] = {name: mode.from_tensor(t, static_shapes=True) for name, t in inputs.items()}
        for part in parts:
            chain = part.chain_for(counted) if isinstance(part, ChainPart) else None
            plan = None if chain is None else chain.explain(x, named, options, parameters)
            explained.append((part.title, plan))
            if part is parts[-1]:
                break
            try:
                x, counted = part.run(x, named, options, parameters, counted)
            except Exception as error:
                if isinstance(part, ChainPart) or isinstance(error, InputError):
                    raise
                raise InputError(
                    f"explain: module {part.label!r} ({type(part.module).__name__}) cannot be called on tensors "
                    f"without memory, and what follows it depends on its result: {type(error).__name__}: {error}"
                ) from error
    return tuple(explained)
