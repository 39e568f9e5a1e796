"""The experts of one rank in batches of rows: `ExpertParallel.batch_rows`.

A rank may need P*N*min(K, E/P) rows, P times those under even routing. Instead of all at once, the chain from
`Dispatch` to `Combine` runs several times, each time with the expert ids of one batch alone: of the slots whose rows,
in the order of the experts, are the next ``batch_rows``. So an expert's rows are in one batch, except where a batch
ends, and batches after the last row are empty. The number of batches follows from shapes, and no host waits.

The forward pass keeps no values of a batch. The backward pass runs each batch again, and then its backward steps. It
adds the gradients of rows in fp32, and those of weights in their dtype, as for micro-batches: a kernel adds to the sum
so far where it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.base.autocast import autocast_dtype, without_autocast
from fusedmoe.base.errors import InputError
from fusedmoe.base.inputs import Parameters
from fusedmoe.call.autograd import Kept
from fusedmoe.call.chain import Chain
from fusedmoe.fusion.report.data import PlanData, format_bytes
from fusedmoe.kernels.options import KernelOptions
from fusedmoe.numerics.expert_rows import sort_by_expert
from fusedmoe.ops.dispatch import Dispatch
from fusedmoe.ops.op import Op
from fusedmoe.ops.state import amax, grad_sums

_NO_EXPERT = -1
_DELAYED = (
    "delayed scaling: expected experts that compute all rows at once, got ExpertParallel(batch_rows=...): each batch "
    "would be a step"
)


def begins_batches(module: nn.Module) -> bool:
    """Whether a module is the `Dispatch` of a batch."""
    return isinstance(module, Dispatch) and module.limit is not None and module.limit.batch_rows is not None


@dataclass(frozen=True)
class BatchedPart:
    """A chain from the `Dispatch` of a batch to its `Combine`."""

    chain: Chain

    @property
    def _dispatch(self) -> Dispatch:
        op = self.chain.nodes[0].op
        assert isinstance(op, Dispatch)
        return op

    @property
    def _index(self) -> str:
        """The name of the expert ids (P*N, K) among the runtime inputs."""
        return self._dispatch.runtime_inputs[0]

    def _rows(self, index: Tensor) -> tuple[int, int]:
        """Return the number of all rows, for any routing, and that of a batch."""
        limit = self._dispatch.limit
        assert limit is not None
        return replace(limit, batch_rows=None).rows(*index.shape), limit.rows(*index.shape)

    def _batches(self, index: Tensor) -> int:
        rows, of_batch = self._rows(index)
        return -(-rows // of_batch) if of_batch else 1

    def run(
        self, x: Tensor, named: dict[str, Tensor], options: KernelOptions, parameters: Parameters | None, counted: bool
    ) -> tuple[Tensor, bool]:
        """Run the batches; return as `ChainPart.run`."""
        batches = self._batches(named[self._index])
        if batches == 1 or amax.looking():  # shapes are all that is looked at
            return self.chain.run(x, named, options, parameters), True
        call = _Call(self, options, parameters, batches)
        arguments = self.chain.arguments_of(x, named, parameters)
        return _CheckpointedBatches.apply(call, self.batch_of_slot(named[self._index]), *arguments), True  # type: ignore[no-untyped-call]

    def batch_of_slot(self, index: Tensor) -> Tensor:
        """Return the batch of each slot, (P*N, K) int32; -1 for a sentinel, and for a slot without a row."""
        rows, of_batch = self._rows(index)
        experts = self._dispatch.num_experts
        assert experts is not None
        _, row_of_slot, _ = sort_by_expert(index, experts)
        return torch.where(row_of_slot < rows, row_of_slot // of_batch, -1).to(torch.int32)

    def explain(
        self, x: Tensor, named: dict[str, Tensor], options: KernelOptions, parameters: Parameters | None
    ) -> tuple[str, PlanData]:
        """Return the title of the part, and the plan of a batch, which keeps the values that the part keeps."""
        index = named[self._index]
        plan = self.chain.explain(x, named, options, parameters)
        batches = self._batches(index)
        if batches == 1:
            return self.title, plan
        title = (
            f"{self.title}, {batches} times on at most {self._rows(index)[1]:,} rows; the backward pass runs each "
            f"batch again, which then keeps {format_bytes(plan.kept_bytes)}"
        )
        kept = {"input": x, **{name: named[name] for name in self.chain.inputs}, "batch of each slot": index}
        if not plan.kept:
            return title, plan
        return title, replace(plan, kept=tuple(kept), kept_bytes=sum(t.nbytes for t in kept.values()))

    @property
    def title(self) -> str:
        """The part's name in ``explain()``."""
        return f"chain {self.chain.nodes[0].label} to {self.chain.nodes[-1].label}"


class _Call(NamedTuple):
    """A call of the batches, without its tensors, except parameters that the caller gives."""

    part: BatchedPart
    options: KernelOptions
    parameters: Parameters | None
    batches: int

    def run(self, batch: int, batch_of_slot: Tensor, x: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return the part of the result that a batch has; ``inputs`` are the chain's runtime inputs."""
        named = self._named(batch, batch_of_slot, inputs)
        return self.part.chain.run(x, named, self.options, self.parameters)

    def prepared(
        self, batch: int, batch_of_slot: Tensor, x: Tensor, inputs: Sequence[Tensor], own: Sequence[Tensor | None]
    ) -> Any:
        """Return `Chain.prepared` for a batch, with these parameters of the ops."""
        named = self._named(batch, batch_of_slot, inputs)
        return self.part.chain.prepared([x, *named.values(), *own], self.options)

    def _named(self, batch: int, batch_of_slot: Tensor, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        named = dict(zip(self.part.chain.inputs, inputs, strict=True))
        index = self.part._index
        named[index] = torch.where(batch_of_slot == batch, named[index], _NO_EXPERT)
        return named


# its name contains "Checkpoint", by which code that runs inside the backward pass knows a recomputation
class _CheckpointedBatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, batch_of_slot: Tensor, x: Tensor, *others: Tensor | None) -> Tensor:
        inputs: Any = others[: len(call.part.chain.inputs)]
        ctx.call, ctx.autocast = call, autocast_dtype(x.device)
        # of the parameters, torch checks that nothing changes them before the backward pass
        ctx.save_for_backward(batch_of_slot, x, *others)
        total: Tensor | None = None
        with amax.refused(_DELAYED):
            for batch in range(call.batches):
                y = call.run(batch, batch_of_slot, x, inputs)
                total = _exact_copy(y) if total is None else total.add_(y)
        assert total is not None
        return total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # under create_graph=True
            raise InputError(
                "second derivatives (create_graph=True): expected experts that compute all rows at once, got "
                "ExpertParallel(batch_rows=...)"
            )
        call: _Call = ctx.call
        batch_of_slot, *given = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        first = 1 + len(call.part.chain.inputs)  # of the parameters
        x, *inputs = [t.detach().requires_grad_(wants) for t, wants in zip(given[:first], wanted, strict=False)]
        sums: dict[int, Tensor] = {}
        autocast = nullcontext() if ctx.autocast is None else torch.autocast(x.device.type, ctx.autocast)
        for batch in range(call.batches):
            with torch.enable_grad(), autocast:  # as in the forward pass of the layer
                plan, arguments, uncast = call.prepared(batch, batch_of_slot, x, inputs, given[first:])
            with without_autocast(x.device):
                kept = Kept.by(plan, arguments, uncast)
                so_far = {
                    op: sums[i] for op, i, _ in plan.summed_weights if i in sums and _may_be_added_to(op, sums[i])
                }
                gradients = kept.gradients([grad], wanted, so_far)
            for i, gradient in enumerate(gradients):
                if gradient is None or not wanted[i] or gradient is sums.get(i):  # a kernel may have added it
                    continue
                if i in sums:
                    sums[i].add_(gradient)
                else:
                    sums[i] = _exact_copy(gradient) if i == 0 else gradient
            del kept, gradients, gradient
        dtypes = [None if t is None else t.dtype for t in uncast]
        return (None, None, *[sums[i].to(dtype) if i in sums else None for i, dtype in enumerate(dtypes)])


def _exact_copy(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32), copy=True)


def _may_be_added_to(op: Op, total: Tensor) -> bool:
    as_written = total.mT if getattr(op, "transposed_grad", False) else total
    return as_written.is_contiguous() and total.data_ptr() % grad_sums.ALIGNMENT == 0
