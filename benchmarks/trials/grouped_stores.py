"""Ragged M products whose epilogue stores all boxes of a step together, and a control.

`Gemm.put_box` stores one box at a time: each has a proxy fence, a wait until TMA has read an older buffer, a barrier of
the warpgroup, and a commit group. A step of a derivative stores three boxes: the gradients of gate and up, and the
activation. FC1 stores gate, up, and the activation. A derivative with 128 x 128 tiles has two buffers, so that each box
waits until TMA has read the box just before. Here, a step

1. computes all its values;
2. writes all its boxes to shared memory, followed by one fence and one barrier;
3. starts all its TMA stores, as one commit group.

TMA has the time of the next step's arithmetic to read the boxes. Two full sets of buffers would cost a stage of A and
B. Two layouts do not:

**One set of buffers.** Before the writes, warp 0 waits until TMA has read the set, and a second barrier tells the other
warps. Only the thread that commits a group can wait for it.

**In place**, for derivatives. A thread writes its gradients where it has read the preactivation, in the ring of inputs.
No other warp reads or writes those rows. The activation has two buffers. Before the barrier of step c, warp 0 waits
until TMA has read the boxes of step c - 1. After the barrier, the slot of step c - 1 is released to its loader, and
step c + 1 may overwrite the activation of step c - 1. So one barrier is enough.

In the tail, the loader has no more loads, and the steps write zeros to the slots in turn. No tile of an expert follows.

Not measured yet. By the code of SwiGLU's kernels, tiles of 128 x 192 spill more registers than the shipped kernel with
`ahead`; in place, if rows are gathered; and, by a few, if gate and up alternate. None of the others do.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import const_expr

from fusedmoe.kernels.sm90.epilogues import Backward
from fusedmoe.kernels.sm90.gemm import STORE_BARRIER, WARPGROUP
from fusedmoe.kernels.sm90.ragged_m import RaggedM


class Taken(Backward):
    """A derivative whose preactivation has been read: ``inputs`` are its values."""

    def take(self, kernel, block, inputs):
        return inputs


@dataclass(frozen=True)
class GroupedStores(RaggedM):
    """A ragged M kernel that stores the boxes of a step together."""

    in_place: bool = False  # gradients take the place of the preactivation in shared memory
    # The next step's preactivation is read before this step's boxes are written. So this step's fence and barrier cover
    # those reads, and, unless in place, the slots are released a step earlier.
    ahead: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.in_place or self.ahead) and not self.boxes_read:
            raise ValueError(f"in_place and ahead: expected a derivative, got {self.symbol}")
        if self.in_place and self.steps % 2:
            raise ValueError(f"in place: the buffers of the activation take turns, expected even steps: {self.symbol}")

    @property
    def symbol(self) -> str:
        options = ("_in_place" if self.in_place else "") + ("_ahead" if self.ahead else "")
        return f"{super().symbol}_grouped{options}"

    @property
    def sources(self) -> tuple[str, ...]:
        return *super().sources, __name__

    @property
    def store_stages(self) -> int:
        """Buffers that are only stored: for the boxes of a step; in place, for those of two, without the gradients."""
        return 2 * (self.epilogue.boxes - self.boxes_read) if self.in_place else self.epilogue.boxes

    @property
    def load_stages(self) -> int:
        return 0 if not self.boxes_read else 3 if self.in_place else 2

    # -- device side

    def finish_block(self, block, inputs, env, formula):
        """Accumulators of 64 rows to results, 32 columns at a time."""
        outputs = self.epilogue.outputs
        block = block._replace(scales=formula.row_scales(block, env))
        states = [output.start() for output in outputs]
        arithmetic = Taken(*astuple(formula)) if self.boxes_read else formula
        taken, released = [], 0  # preactivations of the steps so far; slots that are released
        for j in range(self.steps):
            column = block.tile.column * self.steps + j
            self.take(taken, j, formula, block, inputs, released)
            values = arithmetic.values(self, block, env, j, column, taken[j])
            states = [output.add(state, values) for output, state in zip(outputs, states, strict=True)]
            boxes = [
                (box, parameter)
                for output, parameter in zip(outputs, env.outputs, strict=True)
                for box in output.stores(self, block, values, column)
            ]
            if self.ahead:
                self.take(taken, j + 1, formula, block, inputs, released)
            self.store_together(boxes, block, inputs, j)
            while self.boxes_read and released < (j + 1 if self.in_place else len(taken)):
                inputs = (self.release_before if self.in_place else self.release)(block, inputs)
                released += 1
        for output, parameter, state in zip(outputs, env.outputs, states, strict=True):
            output.finish(self, block, env, parameter, state)
        return inputs

    def take(self, taken, j, formula, block, inputs, released) -> None:
        """Append the preactivation of step ``j`` to ``taken``, unless it is there; None without one."""
        if len(taken) > j or j == self.steps:
            return
        state = inputs
        if self.boxes_read and len(taken) > released:
            state = inputs.clone()
            state.advance()
        taken.append(formula.take(self, block, state) if self.boxes_read else None)

    def store_together(self, boxes, block, inputs, j) -> None:
        """Store the boxes of step ``j``. ``inputs`` is the state of its slot in the ring of inputs."""
        consumer, read = block.consumer, self.boxes_read
        first = consumer.group * self.store_stages
        if self.in_place:
            kept, slot = len(boxes) - read, self.own(inputs, consumer.group).index
            places = [self.read_box(slot, half) for half in range(read)] + [
                first + j % 2 * kept + i for i in range(kept)
            ]
        else:
            places = [first + i for i in range(len(boxes))]
            self.wait_until_read(consumer)
            self.meet(consumer)
        # The gradient of up before that of gate: ptxas then spills 6 registers instead of 18 (in place, 128 x 192).
        for i in (*reversed(range(read)), *range(read, len(boxes))):
            box, _ = boxes[i]
            self.write_box(box.values, consumer, self.box_copy(box, block), places[i], box.columns)
        self.send(consumer, places, [to for _, to in boxes], [self.target(box, block, to) for box, to in boxes])

    @cute.jit
    def wait_until_read(self, consumer):
        """Wait, in the warp that starts the stores, until TMA has read all boxes of the steps before."""
        if consumer.thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def meet(self, consumer) -> None:
        """The barrier of a math warpgroup. One set of buffers has two per step.

        Warp 0 could merely arrive at the first and the other warps at the second, in branches: 12 instructions more per
        step, and 2 to 6 more spills with 128 x 192 tiles. The stores must not be in the same branch as a barrier: ptxas
        then takes their coordinates for divergent, and puts each store into a loop over the lanes.
        """
        cute.arch.barrier(barrier_id=STORE_BARRIER + consumer.group, number_of_threads=WARPGROUP)

    @cute.jit
    def send(self, consumer, places, tmas, targets):
        """Start the stores of a step's boxes, once all warps have written them."""
        cute.arch.fence_proxy("async.shared", space="cta")
        if const_expr(self.in_place):
            self.wait_until_read(consumer)
        self.meet(consumer)
        if consumer.thread < 32:
            for i in cutlass.range_constexpr(len(places)):
                self.send_box(consumer, places[i], tmas[i], targets[i])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def release_before(self, block, inputs):
        """Release the slot of the step before, which TMA has read. Return the state of the next step.

        The slot of a tile's last step is released by the first step of the warpgroup's next tile.
        """
        if block.live and inputs.count > 0:
            ring, slots = block.consumer.inputs, self.load_stages
            slot = (inputs.index + slots - 1) % slots
            before = pipeline.PipelineState(slots, inputs.count, slot, inputs.phase)
            ring.consumer_release(self.own(before, block.consumer.group))
        inputs.advance()
        return inputs


@dataclass(frozen=True)
class MoreBuffers(RaggedM):
    """The control: one box at a time as in the shipped kernel, with more buffers and a shorter ring of inputs.

    A derivative with 128 x 128 tiles keeps its five stages: four buffers and two steps of inputs take the shared memory
    of two buffers and three steps.
    """

    buffers: int = 4  # a divisor of `boxes_per_block`

    @property
    def symbol(self) -> str:
        return f"{super().symbol}_{self.buffers}_buffers"

    @property
    def sources(self) -> tuple[str, ...]:
        return *super().sources, __name__

    @property
    def store_stages(self) -> int:
        return self.buffers

    @property
    def load_stages(self) -> int:
        return 2 if self.boxes_read else 0
