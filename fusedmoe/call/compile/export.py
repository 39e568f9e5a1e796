"""A module under `torch.export`: the plain PyTorch of its ops, for inference. Imported only for export.

A program in bf16 runs without `fusedmoe`; see `fusedmoe.kernels.torch.grouped_gemm` for other dtypes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedmoe.base.autocast import autocast_dtype, cast_arguments
from fusedmoe.base.errors import InputError
from fusedmoe.base.inputs import Parameters
from fusedmoe.call import settings
from fusedmoe.call.chain import Chain
from fusedmoe.call.partition import partition_of_call
from fusedmoe.call.parts import ChainPart
from fusedmoe.fusion.program.plan_table import Conditions, plan_chain
from fusedmoe.fusion.program.signature import NOMINAL_ROWS
from fusedmoe.kernels.options import DEFAULT
from fusedmoe.ops.op import Runnable


def run(
    root: Runnable, x: Tensor, inputs: dict[str, Tensor], parameters: Parameters | None, provides: tuple[str, ...]
) -> Any:
    """Run a module in a program that is being exported."""
    partition = partition_of_call(root, x, inputs, parameters, provides)
    if partition.exchanges:
        raise InputError(
            f"{partition.who}: torch.export: expected a module with all experts on one rank, got one with "
            "expert_parallel: a program cannot exchange tokens with other ranks"
        )
    counted = True
    for part in partition.parts:
        if isinstance(part, ChainPart):
            x = _run_chain(part.chain_for(counted), x, inputs, parameters)
            counted = counted or part.sorts_rows
        else:
            x, counted = part.run(x, inputs, DEFAULT, parameters, counted)
    return (x, {name: inputs[name] for name in provides if name in inputs}) if provides else x


def _run_chain(chain: Chain, x: Tensor, named: dict[str, Tensor], parameters: Parameters | None) -> Tensor:
    arguments = chain.arguments_of(x, named, parameters)
    if (dtype := autocast_dtype(x.device)) is not None:
        arguments = cast_arguments(arguments, dtype, chain.casts)
    recipe = settings.current().recipe
    conditions = Conditions(recipe, (), DEFAULT, deterministic=False, unfused=True, nominal_rows=NOMINAL_ROWS)
    plan = plan_chain(chain, arguments, [False] * len(arguments), conditions)
    runs = plan.program.runs(False, plan.infer(arguments) if plan.graph.forms else None, check=False)
    results = plan.program.run([*arguments], *runs)[0]
    if not chain.returns_rows:
        results = (x, *results)
    named.update(zip(chain.exports, results[1:], strict=True))  # type: ignore[arg-type]
    assert results[0] is not None
    return results[0]
