"""Barriers, and instructions that run beside the warp: copies, tensor copies (TMA) and products of the tensor cores.

A product is computed when it is issued. Until the warp waits for it, nothing may write the shared memory that it reads.
Each function returns a function of the warp, or a `Result`.
"""

import functools
from collections import deque

import numpy as np

from emulator import ptx
from emulator.arithmetic import from_bf16, from_fp8
from emulator.barriers import MBarrier
from emulator.memory import AccessError
from emulator.registers import BITS, DTYPES, U2, U4, Result
from emulator.tensor_map import SIZES, swizzled

RANK_SHIFT = 24  # of a CTA's rank + 1 in an address of another CTA's shared memory
F4 = np.float32


class Queue(deque):
    """Asynchronous work in order, and the groups of it that a warp committed."""

    committed = completed = 0

    def commit(self, machine):
        self.committed += 1
        machine.add_work(self, self._complete)

    def _complete(self):
        self.completed += 1

    def at_most(self, count):
        """Return the condition that at most `count` groups are under way, of those committed until now."""
        needed = self.committed - count
        return lambda: self.completed >= needed


def address_of(code, address, kind="r"):
    """Return a function of the warp that returns the addresses of the active lanes."""
    slot = code.slot(address.base, kind)
    if not address.offset:
        return lambda w: w.select(w.registers[slot])
    offset = DTYPES[kind](address.offset & (1 << BITS[kind]) - 1)
    return lambda w: w.select(w.registers[slot] + offset)


def resolve(w, address):
    """Return the CTA of an address of the cluster's shared memory, and the address in that CTA."""
    rank, offset = address >> RANK_SHIFT, address & (1 << RANK_SHIFT) - 1
    cta = w.cta if rank == 0 else w.cta.cluster.ctas[rank - 1]
    if cta is not w.cta and not cta.running:
        raise AccessError("access to the shared memory of a CTA that has ended")
    return cta, offset


# ---- barriers


def mbarrier_init(code, opcode, operands):
    address, count = address_of(code, operands[0]), code.slot(operands[1], "r")

    def run(w):
        for at, n in zip(address(w), w.select(w.registers[count]), strict=True):
            w.cta.mbarriers[int(at)] = MBarrier(int(n))

    return run


def mbarrier_arrive(code, opcode, operands):
    address = address_of(code, operands[1])
    count = code.slot(operands[2], "r") if len(operands) > 2 else code.constant(1, "r")
    expects = "expect_tx" in opcode

    def run(w):
        for at, n in zip(address(w), w.select(w.registers[count]), strict=True):
            cta, offset = resolve(w, int(at))
            barrier = cta.mbarrier(offset)
            if expects:
                barrier.expect(int(n))
                barrier.arrive()
            else:
                barrier.arrive(int(n))

    return run


def mbarrier_try_wait(code, opcode, operands):
    """The wait ends when the phase has completed, so the predicate is always true."""
    target, address, parity = operands[0].slot, address_of(code, operands[1]), code.slot(operands[2], "r")
    true = np.ones(32, bool)

    def run(w):
        at, parities = address(w), w.select(w.registers[parity])
        wanted = {(int(a), int(p)) for a, p in zip(at, parities, strict=True)}
        w.put(target, true)
        waits = [(w.cta.mbarrier(a), p) for a, p in wanted]
        return lambda: all(barrier.passed(p) for barrier, p in waits)

    return Result(run, waits=True)


def bar(code, opcode, operands):
    number = code.slot(operands[0], "r")
    count = code.slot(operands[1], "r") if len(operands) > 1 else None
    waits = "sync" in opcode

    def run(w):
        expected = w.cta.threads if count is None else w.only(count)
        passed = w.cta.meeting(w.only(number)).arrive(32, expected)
        return passed if waits else None

    return Result(run, waits=waits, members="all")


def cluster_arrive(code, opcode, operands):
    def run(w):
        ctas = w.cta.cluster.ctas
        lanes = bin(w.lanes).count("1")
        w.cluster_passed = w.cta.cluster.meeting.arrive(lanes, sum(cta.threads for cta in ctas))

    return run


def cluster_wait(code, opcode, operands):
    return Result(lambda w: w.cluster_passed, waits=True)


def fence_async(code, opcode, operands):
    def run(w):
        w.machine.now += 1
        w.cta.fences[w.index] = w.machine.now
        w.machine.now += 1

    return run


def commit(queue):
    """Return the instruction that commits a group of a queue of the warp."""
    return lambda code, opcode, operands: lambda w: getattr(w, queue).commit(w.machine)


def wait(queue):
    """Return the instruction that waits until at most so many groups of a queue are under way."""

    def instruction(code, opcode, operands):
        return Result(lambda w: getattr(w, queue).at_most(operands[0].bits), waits=True)

    return instruction


# ---- copies of 16 bytes


def cp_async(code, opcode, operands):
    target, source = address_of(code, operands[0]), address_of(code, operands[1], "rd")
    size = code.slot(operands[3], "r") if len(operands) > 3 else code.constant(16, "r")
    assert operands[2].bits == 16

    def run(w):
        to, sizes = target(w), w.select(w.registers[size])
        if (to & U4(15)).any():
            raise AccessError("a copy is not aligned to 16 bytes")
        addresses = source(w)
        granules = (to >> U4(4)).astype(np.int64)
        shared, machine, now = w.cta.shared, w.machine, w.machine.now
        values = np.zeros((len(granules), 16), np.uint8)
        for i, (address, n) in enumerate(zip(addresses, sizes, strict=True)):
            if n:
                if address & np.uint64(15):
                    raise AccessError("the source of a copy is not aligned to 16 bytes")
                data, base = machine.memory.bytes_at(int(address), int(address) + int(n))
                values[i, : int(n)] = data[int(address) - base : int(address) - base + int(n)]
        shared.begin_write(granules)
        machine.add_work(w.copies, lambda: shared.finish_write(granules, values, written_at=now, writer=w.index))

    return run


def cp_async_arrive(code, opcode, operands):
    address = address_of(code, operands[0])

    def run(w):
        barriers = [w.cta.mbarrier(int(at)) for at in address(w)]

        def arrive():
            for barrier in barriers:
                barrier.arrive()

        w.machine.add_work(w.copies, arrive)

    return run


# ---- tensor copies


def _tensor_map(w, slot):
    address = w.only(slot)
    return w.machine.tensor_map(address & (1 << 60) - 1)


def _coordinates(code, address):
    slots = [code.slot(c, "r") for c in address.coordinates]
    return lambda w: tuple(int(np.int32(np.uint32(w.only(s)))) for s in slots)


def tensor_load(code, opcode, operands):
    target, source, barrier = address_of(code, operands[0]), operands[1], address_of(code, operands[2])
    map_, coordinates = code.slot(source.base, "rd"), _coordinates(code, source)
    multicast = code.slot(operands[3], "rs") if "multicast" in opcode else None

    def run(w):
        machine = w.machine
        descriptor, at = _tensor_map(w, map_), coordinates(w)
        own, offset = resolve(w, one(target(w)))
        barrier_cta, barrier_at = resolve(w, one(barrier(w)))
        if multicast is None:
            targets = [(own, barrier_cta)]
        else:
            ranks = w.only(multicast)
            ctas = w.cta.cluster.ctas
            targets = [(ctas[r], ctas[r]) for r in range(len(ctas)) if ranks >> r & 1]
        granules = descriptor.granules(offset)
        if at[0] * SIZES[descriptor.element] % 16:
            raise AccessError("the first element of a box is not at a multiple of 16 bytes: an illegal instruction")
        for cta, _ in targets:
            if not cta.running:
                raise AccessError("a copy to a CTA that has ended")
            cta.shared.begin_write(granules)
        values = descriptor.load(machine.memory, at)
        for cta, of_barrier in targets:
            machine.add_work(deque(), functools.partial(_received, cta, of_barrier, barrier_at, granules, values))

    return run


def one(values):
    """Return the address in all active lanes. A warp issues one tensor copy, however many of its lanes are active."""
    if (values != values[0]).any():
        raise AccessError("lanes have different addresses")
    return int(values[0])


def _received(cta, of_barrier, barrier_at, granules, values):
    cta.shared.finish_write(granules, values)
    of_barrier.mbarrier(barrier_at).receive(granules.size * 16)


def tensor_store(code, opcode, operands):
    target, source = operands[0], address_of(code, operands[1])
    map_, coordinates = code.slot(target.base, "rd"), _coordinates(code, target)
    add = opcode.startswith("cp.reduce")

    def run(w):
        machine, shared = w.machine, w.cta.shared
        descriptor, at = _tensor_map(w, map_), coordinates(w)
        granules = descriptor.granules(one(source(w)))
        shared.check_visible(granules, w.cta.fences, w.index)
        shared.readers[granules] += 1

        def store():
            descriptor.store(machine.memory, at, shared.granules[granules], add=add)
            shared.readers[granules] -= 1

        machine.add_work(w.bulk, store)

    return run


def st_async(code, opcode, operands):
    target, value, barrier = address_of(code, operands[0]), code.slot(operands[1], "r"), address_of(code, operands[2])

    def run(w):
        for to, v, at in zip(target(w), w.select(w.registers[value]), barrier(w), strict=True):
            cta, offset = resolve(w, int(to))
            barrier_cta, barrier_at = resolve(w, int(at))
            w.machine.add_work(deque(), functools.partial(_stored, cta, offset, v, barrier_cta, barrier_at))

    return run


def _stored(cta, offset, value, barrier_cta, barrier_at):
    cta.shared.of_type[U4][offset // 4] = value
    barrier_cta.mbarrier(barrier_at).receive(4)


# ---- products

ELEMENTS = {
    "bf16": (U2, from_bf16), "f16": (U2, lambda a: a.view(np.float16).astype(F4)),
    "e4m3": (np.uint8, lambda a: from_fp8(a, "e4m3")), "e5m2": (np.uint8, lambda a: from_fp8(a, "e5m2")),
}  # fmt: skip


@functools.cache
def operand_granules(rows, depth, size, transposed, swizzle, leading, stride):
    """Return the 16-byte granules of an operand before swizzling, as byte offsets.

    (rows, depth * size / 16) if K is contiguous in memory, else (rows * size / 16, depth).
    """
    width = {1: 128, 2: 64, 3: 32, 0: 16}[swizzle]
    per = 16 // size
    if not transposed:
        row, chunk = np.arange(rows)[:, None], np.arange(depth // per)[None] * 16
        return row // 8 * stride + row % 8 * width + chunk % width + chunk // width * leading
    at, k = np.arange(0, rows, per)[:, None], np.arange(depth)[None]
    across = width // size
    return at // across * leading + at % across * size + k // 8 * stride + k % 8 * width


def operand(w, descriptor, rows, first, count, depth, dtype, transposed):
    """Return rows [first, first + count) of an operand in shared memory, (count, depth), and its granules."""
    size = np.dtype(dtype).itemsize
    start, leading, stride = (descriptor >> s & 0x3FFF for s in (0, 16, 32))
    swizzle = descriptor >> 62
    offsets = operand_granules(rows, depth, size, transposed, swizzle, leading << 4, stride << 4)
    per = 16 // size
    offsets = offsets[first // per : (first + count) // per] if transposed else offsets[first : first + count]
    granules = swizzled((start << 4) + offsets, {1: 128, 2: 64, 3: 32, 0: 0}[swizzle]) >> 4
    shared = w.cta.shared
    shared.check_visible(granules, w.cta.fences, w.index)
    values = shared.granules[granules].view(dtype)  # (rows, chunks, per) or (chunks, depth, per)
    values = values.swapaxes(1, 2).reshape(count, depth) if transposed else values.reshape(count, depth)
    return values, granules


def wgmma(code, opcode, operands):
    shape, accumulator, a_type, b_type = opcode.split(".")[4:]
    n, k = (int(s) for s in shape.removeprefix("m64n").split("k"))
    assert accumulator == "f32"
    assert all(isinstance(o, ptx.Register) for o in operands[1:4]), "operands in registers are not supported"
    registers = [r.slot for r in operands[0].items]
    assert len(registers) == n // 2
    a_slot, b_slot, scale = operands[1].slot, operands[2].slot, operands[3].slot
    assert [o.bits for o in operands[4:6]] == [1, 1]
    (a_dtype, a_value), (b_dtype, b_value) = ELEMENTS[a_type], ELEMENTS[b_type]
    size = np.dtype(a_dtype).itemsize
    assert k * size == k * np.dtype(b_dtype).itemsize == 32, opcode
    assert len(operands) == (6 if size == 1 else 8), "operands of 16 bits may be transposed, those of FP8 may not"
    transposed = [bool(o.bits) for o in operands[6:]] or [False, False]

    def run(w):
        a, a_granules = operand(w, w.only(a_slot), 64, w.index % 4 * 16, 16, k, a_dtype, transposed[0])
        b, b_granules = operand(w, w.only(b_slot), n, 0, n, k, b_dtype, transposed[1])
        # a register: rows 8 h + g, columns 8 j + 2 q + c, of lane 4 g + q
        product = (
            a_value(np.ascontiguousarray(a)).astype(np.float64) @ b_value(np.ascontiguousarray(b)).astype(np.float64).T
        )
        product = product.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, 32)
        if w.registers[scale].all():
            product += np.array([w.registers[r] for r in registers]).view(F4)
        elif w.registers[scale].any():
            raise AccessError("lanes differ in whether a product is added")
        for register, values in zip(registers, product.astype(F4).view(U4), strict=True):
            w.registers[register] = values
        for granules in (a_granules, b_granules):
            w.cta.shared.readers[granules] += 1
            w.products.append(granules)

    return Result(run, members="all")


def wgmma_commit(code, opcode, operands):
    def run(w):
        w.product_groups.append(w.products)
        w.products = []

    return Result(run, members="all")


def wgmma_wait(code, opcode, operands):
    count = operands[0].bits

    def run(w):
        while len(w.product_groups) > count:
            for granules in w.product_groups.popleft():
                w.cta.shared.readers[granules] -= 1

    return Result(run, members="all")


TABLE = {
    "mbarrier.init": mbarrier_init, "mbarrier.arrive": mbarrier_arrive, "mbarrier.try_wait": mbarrier_try_wait,
    "bar.": bar, "barrier.cluster.arrive": cluster_arrive, "barrier.cluster.wait": cluster_wait,
    "fence.proxy.async": fence_async,
    "cp.async.bulk.commit_group": commit("bulk"), "cp.async.bulk.wait_group": wait("bulk"),
    "cp.async.bulk.tensor": lambda code, opcode, operands: (
        tensor_store if ".global.shared::cta" in opcode else tensor_load
    )(code, opcode, operands),
    "cp.reduce.async.bulk.tensor": tensor_store,
    "cp.async.mbarrier.arrive.noinc": cp_async_arrive, "cp.async.commit_group": commit("copies"),
    "cp.async.wait_group": wait("copies"), "cp.async.cg": cp_async,
    "st.async": st_async,
    "wgmma.mma_async": wgmma, "wgmma.commit_group": wgmma_commit, "wgmma.wait_group": wgmma_wait,
}  # fmt: skip
