"""A `Sequential` as `torch.export` meets it: the plain PyTorch of its ops, for inference. Imported only then.

In bf16 whoever loads the program needs no `fusedmoe`; see `fusedmoe.kernels.torch.grouped_gemm` for the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusedmoe import settings
from fusedmoe.autocast import autocast_dtype, cast_arguments
from fusedmoe.chain import alone_with
from fusedmoe.fusion.plans import Conditions, plan_chain
from fusedmoe.fusion.signature import NOMINAL_ROWS
from fusedmoe.inputs import check_inputs
from fusedmoe.kernels.options import DEFAULT
from fusedmoe.partition import ChainPart

if TYPE_CHECKING:
    from torch import Tensor

    from fusedmoe.chain import Chain
    from fusedmoe.inputs import Parameters
    from fusedmoe.ops.op import Op
    from fusedmoe.sequential import Sequential


def run_sequential(
    root: Sequential, x: Tensor, inputs: dict[str, Tensor], parameters: Parameters | None = None
) -> Tensor:
    """Run a `Sequential` in a program that is being exported."""
    partition = root._partition_for(inputs)
    named = partition.bind(x, inputs)
    if parameters is not None:
        partition.check_parameters(parameters)
    counted = True
    for part in partition.parts:
        if isinstance(part, ChainPart):
            x = _run_chain(part.chain_for(counted), x, named, parameters)
            counted = counted or part.sorts_rows
        else:
            x, counted = part.run(x, named, DEFAULT, parameters, counted)
    return x


def run_op(op: Op, x: Tensor, inputs: dict[str, Tensor]) -> Any:
    """Run an op alone in a program that is being exported."""
    chain = alone_with(op, inputs)
    check_inputs(repr(op), chain.takers, inputs)
    named = dict(inputs)
    y = _run_chain(chain, x, named, None)
    return (y, {name: named[name] for name in op.provides}) if op.provides else y


def _run_chain(chain: Chain, x: Tensor, named: dict[str, Tensor], parameters: Parameters | None) -> Tensor:
    arguments = chain.arguments_of(x, named, parameters)
    if (dtype := autocast_dtype(x.device)) is not None:
        arguments = cast_arguments(arguments, dtype, len(chain.inputs))
    recipe = settings.current().recipe
    conditions = Conditions(recipe, (), DEFAULT, deterministic=False, unfused=True, nominal_rows=NOMINAL_ROWS)
    plan = plan_chain(chain, arguments, [False] * len(arguments), conditions)
    runs = plan.program.runs(False, plan.infer(arguments) if plan.graph.forms else None, check=False)
    results = plan.program.run([*arguments], *runs)[0]
    named.update(zip(chain.exports, results[1:], strict=True))  # type: ignore[arg-type]
    assert results[0] is not None
    return results[0]
