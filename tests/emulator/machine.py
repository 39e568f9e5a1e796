"""The machine: warps of CTAs of clusters, and the asynchronous units beside them, in an order that a seed chooses.

A warp is the unit of execution: a register is an array of 32 values. Lanes that diverge are *groups*, which join where
they meet. The group with the lowest address runs first. A wait suspends a group until its condition holds.

Copies and the like are put into channels. A channel keeps its order; which channel is next, and when, is a choice of
the seed and of `eagerness`, the probability that an asynchronous unit works after the turn of a warp. At 0, it works
only when no warp can: so a kernel that does not wait reads what was there before. At 1, it works at once.
"""

import random
from collections import deque
from dataclasses import dataclass

import numpy as np

from emulator import ptx
from emulator.asynchronous import Queue
from emulator.barriers import EmulationError, Meeting
from emulator.memory import RESERVED, Global, Shared
from emulator.program import Compiled
from emulator.tensor_map import TensorMap

WARP = 32
STEPS = 24  # blocks of instructions per turn, at most
FEW_CTAS = 2  # resident beside another launch
ALL = (1 << WARP) - 1
_masks = {}


def mask_of(lanes):
    """Return an array of booleans; None for all lanes."""
    if lanes == ALL:
        return None
    if lanes not in _masks:
        _masks[lanes] = np.array([lanes >> i & 1 for i in range(WARP)], bool)
    return _masks[lanes]


@dataclass(frozen=True)
class Launch:
    """A launch: the program, its dimensions, dynamic shared memory in bytes, and the arguments as bytes."""

    program: ptx.Program
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    arguments: tuple[bytes, ...]


class Group:
    """Lanes of a warp that are at the same block of instructions."""

    __slots__ = ("lanes", "pc", "wait")

    def __init__(self, pc, lanes, wait=None):
        self.pc, self.lanes, self.wait = pc, lanes, wait


class Cta:
    def __init__(self, machine, cluster, rank, index):
        launch = machine.launch
        self.machine, self.cluster, self.rank, self.index = machine, cluster, rank, index
        self.shared = Shared(RESERVED + launch.shared)
        self.mbarriers = {}
        self.named = {}
        self.let_next_begin = False
        threads = int(np.prod(launch.block))
        assert threads % WARP == 0
        self.threads = threads
        self.fences = np.full(threads // WARP, -1, np.int64)
        self.warps = [Warp(self, i) for i in range(threads // WARP)]

    @property
    def running(self):
        return any(warp.groups for warp in self.warps)

    def mbarrier(self, address):
        found = self.mbarriers.get(address)
        if found is None:
            raise EmulationError(f"no mbarrier was initialized at {address:#x}")
        return found

    def meeting(self, number):
        return self.named.setdefault(number, Meeting())


class Cluster:
    def __init__(self, machine, first):
        """`first` is the index of the first CTA in the grid."""
        launch = machine.launch
        self.meeting = Meeting()
        ranks = np.ndindex(*reversed(launch.cluster))  # x is the fastest
        self.ctas = []
        for rank, (z, y, x) in enumerate(ranks):
            self.ctas.append(Cta(machine, self, rank, (first[0] + x, first[1] + y, first[2] + z)))

    @property
    def running(self):
        return any(cta.running for cta in self.ctas)


class Warp:
    def __init__(self, cta, index):
        self.cta, self.index, self.machine = cta, index, cta.machine
        self.code = cta.machine.code
        self.registers = self.code.registers(cta.machine.launch, cta, index)
        self.groups = [Group(0, ALL)]
        self.lanes, self.mask = ALL, None  # of the group that runs
        self.products = []  # of wgmma since the last commit: granules that they read
        self.product_groups = deque()
        self.copies = Queue()  # of cp.async, and arrivals
        self.bulk = Queue()  # of tensor copies to global memory, with groups

    def __str__(self):
        return f"CTA {self.cta.index}, warp {self.index}"

    @property
    def live(self):
        lanes = 0
        for group in self.groups:
            lanes |= group.lanes
        return lanes

    def select(self, values):
        """Return the values of the active lanes."""
        return values if self.mask is None else values[self.mask]

    def put(self, slot, values):
        """Set a register of the active lanes."""
        registers = self.registers
        registers[slot] = values if self.mask is None else np.where(self.mask, values, registers[slot])

    def only(self, slot):
        """Return the value that a register has in all active lanes."""
        values = self.select(self.registers[slot])
        if (values != values[0]).any():
            raise EmulationError("lanes have different values where one is needed")
        return int(values[0])

    def turn(self):
        """Run up to `STEPS` blocks; return how many."""
        for step in range(STEPS):
            group = self._next()
            if group is None:
                return step
            self._run(group)
            if len(self.groups) != 1:
                self._join()
        return STEPS

    def _next(self):
        best = None
        for group in self.groups:
            if group.wait is not None:
                if not group.wait():
                    continue
                group.wait = None
            if best is None or group.pc < best.pc:
                block = self.code.blocks[group.pc]
                if block.members is not None:
                    needed = (ALL if block.members == "all" else self.only_of(group, block.members)) & self.live
                    if group.lanes & needed != needed:
                        continue
                best = group
        return best

    def only_of(self, group, slot):
        self.lanes, self.mask = group.lanes, mask_of(group.lanes)
        return self.only(slot) & ALL

    def _run(self, group):
        self.lanes, self.mask = group.lanes, mask_of(group.lanes)
        block = self.code.blocks[group.pc]
        at = 0
        try:
            for at, operation in enumerate(block.operations):  # noqa: B007, the handler uses it
                operation(self)
            if block.wait is not None:
                at = len(block.operations)
                group.wait = block.wait(self)
        except Exception as error:
            instruction = block.instructions[at]
            raise EmulationError(f"{self}, line {instruction.line}, {instruction.opcode}: {error}") from error
        if block.branch is None:
            group.pc = block.next
        else:
            self._branch(group, block)
        if group.pc is None or not group.lanes:
            self.groups.remove(group)

    def _branch(self, group, block):
        slot, negated = block.branch
        taken = self.registers[slot] if not negated else ~self.registers[slot]
        lanes = int(np.packbits(taken, bitorder="little").view("<u4")[0]) & group.lanes
        if lanes == group.lanes:
            group.pc = block.target
        elif not lanes:
            group.pc = block.next
        else:
            self.groups.append(Group(block.target, lanes))
            group.lanes &= ~lanes
            group.pc = block.next

    def _join(self):
        at = {}
        for group in self.groups[:]:
            if group.wait is not None:
                continue
            other = at.setdefault(group.pc, group)
            if other is not group:
                other.lanes |= group.lanes
                self.groups.remove(group)


class Machine:
    """Runs launches. Kernels may access the tensors that were added to `memory`.

    A launch may begin beside the one of another machine, whose CTAs have all let the next launch begin
    (`lets_next_begin`). It has few places for CTAs until that one has ended.
    """

    def __init__(self, seed=0, eagerness=0.3, resident=8):
        self.random = random.Random(seed)
        self.eagerness, self.resident = eagerness, resident
        self.without_word = -1  # CTAs that have not let the next launch begin
        self.memory = Global()
        self.ended = False

    def run(self, launch):
        """Run all CTAs of a launch to the end."""
        for _ in self.rounds(launch):
            pass

    @property
    def lets_next_begin(self):
        return self.ended or not self.without_word

    def rounds(self, launch, before=None):
        """Run all CTAs of a launch to the end, in steps. ``before``: the machine of the launch that it runs beside."""
        self.before, self.ended, self.without_word = before, False, int(np.prod(launch.grid))
        self.launch, self.now, self.channels = launch, 0, []
        if launch.program.compiled is None:
            launch.program.compiled = Compiled(launch.program)
        self.code = launch.program.compiled
        self.parameters = self.code.parameters(launch)
        self._maps = {}
        grid = [range(0, n, c) for n, c in zip(launch.grid, launch.cluster, strict=True)]
        waiting = deque((x, y, z) for z in grid[2] for y in grid[1] for x in grid[0])
        running = []
        while waiting or running:
            resident = self.resident if before is None or before.ended else FEW_CTAS
            while waiting and len(running) < max(1, resident // int(np.prod(launch.cluster))):
                running.append(Cluster(self, waiting.popleft()))
            with np.errstate(all="ignore"):
                self._round([warp for cluster in running for cta in cluster.ctas for warp in cta.warps if warp.groups])
            running = [cluster for cluster in running if cluster.running]
            yield
        with np.errstate(all="ignore"):
            while self._work():
                pass
        self.ended = True
        if before is not None and not before.ended:
            raise EmulationError("a launch beside another one ends before it: later launches depend on both")

    def let_next_begin(self, cta):
        """A CTA lets the next launch begin."""
        self.without_word -= not cta.let_next_begin
        cta.let_next_begin = True

    def tensor_map(self, offset):
        """Return the descriptor at an offset of the parameters."""
        if offset not in self._maps:
            self._maps[offset] = TensorMap.decode(self.parameters[offset : offset + 128].tobytes())
        return self._maps[offset]

    def _round(self, warps):
        self.random.shuffle(warps)
        progress = False
        for warp in warps:
            self.now += 1
            progress |= warp.turn() > 0
            while self.channels and self.random.random() < self.eagerness:
                progress |= self._work()
        if not progress and not self._work() and (self.before is None or self.before.ended):
            where = [f"{w}: lanes {g.lanes:#x} at line {w.code.line(g.pc)}" for w in warps for g in w.groups]
            raise EmulationError("no warp can go on:\n" + "\n".join(where))

    def add_work(self, channel, work):
        """Put asynchronous work into a channel, a deque."""
        if not channel:
            self.channels.append(channel)
        channel.append(work)

    def _work(self):
        """Do the first work of some channel; return whether there was any."""
        if not self.channels:
            return False
        at = self.random.randrange(len(self.channels))
        channel = self.channels[at]
        channel.popleft()()
        if not channel:
            del self.channels[at]
        return True
