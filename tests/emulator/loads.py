"""Loads from shared memory that may be outstanding when their warp arrives at a barrier.

A GPU issues a load and goes on. It waits for the value at the first instruction that needs it, so the load may read
shared memory after a later arrival at a barrier. An arrival at CTA scope orders the load before the plain accesses of
the CTA's threads. It does not order the load before the writes of tensor copies, nor before those of other CTAs.

`find` follows the paths through a program to the loads that may be outstanding at an arrival, and to the instructions
that order them:

- an instruction that needs the value. Arithmetic and moves do not count, since the compiler may move them after the
  arrival: the instruction that needs their result counts. The loads of a warp complete in order, so the use of a later
  load counts too;
- a fence, and an arrival at cluster scope.

`Loads` has the outstanding loads of a running warp. A load reads its value when it is issued. A write that nothing
orders after the load, to the same bytes, is an error: see `Shared.check_loads`. So a kernel never gets another value.
"""

import functools
from collections import deque
from dataclasses import dataclass, field

from emulator import ptx
from emulator.arithmetic import ELEMENTWISE

JUMPS = ("bra", "bra.uni", "ret")
FENCES = ("fence.proxy.async", "fence.acq_rel", "fence.sc", "membar")
ASYNCHRONOUS_WRITES = ("cp.async.bulk.tensor", "st.async")


@dataclass
class Found:
    """The result of `find`, by the numbers of the instructions."""

    loads: set[int] = field(default_factory=set)
    orders: dict[int, frozenset[int]] = field(default_factory=dict)  # an instruction -> loads that it orders


def is_load(opcode):
    return opcode.startswith(("ldmatrix.", "ld.shared"))


def is_fence(opcode):
    """Return whether an instruction orders all earlier loads of its warp, before writes of any kind."""
    if opcode.startswith("mbarrier.arrive"):
        return ".release.cluster" in opcode
    if opcode.startswith("barrier.cluster.arrive"):
        return ".relaxed" not in opcode
    return opcode.startswith(FENCES)


def is_arrival(opcode):
    if opcode.startswith("mbarrier.arrive"):
        return "expect_tx" not in opcode and not is_fence(opcode)
    return opcode.startswith(("bar.sync", "bar.arrive"))


def is_movable(opcode):
    """Return whether the compiler may move an instruction across an arrival."""
    return opcode in ELEMENTWISE or opcode.startswith(("mov.", "cvta.", "mapa."))


def find(program):
    """Return the loads of a program that may be outstanding at an arrival, and the instructions that order them."""
    if not any(i.opcode.startswith(ASYNCHRONOUS_WRITES) for i in program.instructions):
        return Found()
    return _Search(program).run()


class _Search:
    """The state at a place: for each load that may be outstanding, the registers that wait for it on every path."""

    def __init__(self, program):
        self.code, labels = program.instructions, program.labels
        after = (i + 1 for i, instruction in enumerate(self.code) if instruction.opcode in JUMPS)
        self.begins = sorted({0, *labels.values(), *after} - {len(self.code)})
        self.ends = dict(zip(self.begins, (*self.begins[1:], len(self.code)), strict=True))
        self.labels = labels

    def run(self):
        states, open_ = {0: {}}, {0}
        while open_:
            begin = min(open_)
            open_.remove(begin)
            after = self._walk(begin, states[begin])
            for successor in self._successors(begin):
                joined = _joined(states.get(successor), after)
                if joined != states.get(successor):
                    states[successor] = joined
                    open_.add(successor)
        found = Found()
        for begin, state in states.items():
            self._walk(begin, state, found)
        orders = {i: frozenset(loads & found.loads) for i, loads in found.orders.items()}
        found.orders = {i: loads for i, loads in orders.items() if loads}
        return found

    def _successors(self, begin):
        end = self.ends[begin]
        last = self.code[end - 1]
        if last.opcode in JUMPS and last.opcode != "ret":
            yield self.labels[last.operands[0].name]
        if (last.opcode not in JUMPS or last.guard is not None) and end < len(self.code):
            yield end

    def _walk(self, begin, state, found=None):
        """Return the state after the instructions from `begin` to the next jump or label."""
        state = dict(state)
        for number in range(begin, self.ends[begin]):
            instruction = self.code[number]
            opcode = instruction.opcode
            if state:
                ordered = self._ordered(instruction, state)
                for load in ordered:
                    del state[load]
                if found is not None:
                    if ordered:
                        found.orders[number] = set(ordered)
                    if is_arrival(opcode):
                        found.loads.update(state)
            if is_load(opcode):
                targets = frozenset(_registers(instruction.operands[0]))
                for load in state:
                    state[load] |= targets
                state[number] = targets
        return state

    @staticmethod
    def _ordered(instruction, state):
        """Return the loads that an instruction orders. If it may be moved, its result waits for them instead."""
        if is_fence(instruction.opcode):
            return list(state)
        target = set(_registers(instruction.operands[0])) if instruction.operands else set()
        read = {register for operand in instruction.operands[1:] for register in _registers(operand)}
        if instruction.guard is not None:
            read.add(instruction.guard[0].slot)
        if not is_movable(instruction.opcode):
            return [load for load, waiting in state.items() if not waiting.isdisjoint(read | target)]
        for load, waiting in state.items():
            if not waiting.isdisjoint(read):
                state[load] = waiting | target
            elif instruction.guard is None:
                state[load] = waiting - target
        return []


def _joined(one, other):
    if one is None:
        return other
    return one | {load: waiting & one.get(load, waiting) for load, waiting in other.items()}


def _registers(operand):
    """Yield the slots of the registers of an operand."""
    if isinstance(operand, ptx.Register):
        yield operand.slot
    elif isinstance(operand, ptx.Vector):
        for item in operand.items:
            yield from _registers(item)
    elif isinstance(operand, ptx.Address):
        yield from _registers(operand.base)
        for coordinate in operand.coordinates or ():
            yield from _registers(coordinate)
    elif isinstance(operand, ptx.Pair):
        yield from _registers(operand.first)
        yield from _registers(operand.second)


class Load:
    """A load that may be outstanding: the number of its instruction, and words of so many bytes at some addresses."""

    __slots__ = ("addresses", "name", "number", "size", "warp")

    def __init__(self, number, name, warp, addresses, size):
        self.number, self.name, self.warp, self.addresses, self.size = number, name, warp, addresses, size

    def __str__(self):
        return f"{self.warp}, {self.name}"


class Loads:
    """The outstanding loads of a warp, in the order of their issue.

    A load that was outstanding at an arrival completes as asynchronous work. The instruction that needs its value waits
    for that, so other warps may run in between, as on a GPU. Each other load completes when its value is needed.
    """

    def __init__(self, shared):
        self.shared, self.outstanding = shared, deque()
        self.issued = self.finished = self.released = 0  # how many were so far
        self.work = deque()  # a channel

    def issue(self, load):
        self.outstanding.append(load)
        self.issued += 1
        self.shared.loads[load] = None

    def release(self, machine):
        """All loads until now were outstanding at an arrival."""
        for count in range(max(self.released, self.finished) + 1, self.issued + 1):
            machine.add_work(self.work, functools.partial(self.finish, count))
        self.released = self.issued

    def finish(self, count):
        """Complete the first `count` loads that were issued."""
        while self.finished < count:
            del self.shared.loads[self.outstanding.popleft()]
            self.finished += 1

    def order(self, numbers):
        """Complete the loads of these instructions, and all before them. Return False if the warp has to wait."""
        count = next((n for n in range(len(self.outstanding), 0, -1) if self.outstanding[n - 1].number in numbers), 0)
        needed = self.finished + count
        if self.finished < min(needed, self.released):
            return False
        self.finish(needed)
        return True
