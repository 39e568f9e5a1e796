"""Instructions that move data, between lanes, to memory and back; and the table of all instructions.

Each function returns a function of the warp, or a `Result`. Instructions that run beside the warp are in
`asynchronous`.
"""

import time
from operator import itemgetter

import numpy as np

from emulator import asynchronous, ptx
from emulator.arithmetic import ELEMENTWISE, KINDS, from_bf16, operand_kinds, to_bf16
from emulator.asynchronous import address_of
from emulator.registers import BITS, DTYPES, LANES, U2, U4, U8, Result

SHARED_WINDOW, PARAMETER_WINDOW = 1 << 60, 1 << 61  # of generic addresses
IGNORED = (
    "setmaxnreg", "fence.mbarrier_init", "fence.acq_rel", "fence.sc", "membar", "wgmma.fence",
    "prefetch",
)  # fmt: skip


def compiled(code, instruction):
    """Return an instruction's `Result`."""
    opcode = instruction.opcode
    if instruction.guard is not None:
        return predicated(compiled(code, instruction._replace(guard=None)), *instruction.guard)
    run = elementwise(code, instruction)
    if run is not None:
        return Result(run)
    if opcode.startswith(IGNORED):
        members = "all" if ".aligned" in opcode else None
        return Result(lambda w: None, members=members)
    for prefix, function in (*TABLE.items(), *asynchronous.TABLE.items()):
        if opcode.startswith(prefix):
            result = function(code, opcode, instruction.operands)
            return result if isinstance(result, Result) else Result(result)
    raise NotImplementedError(f"line {instruction.line}: no instruction {opcode}")


def predicated(result, predicate, negated):
    """Return an instruction that runs in the lanes with a predicate alone."""
    assert result.members is None, "an instruction of several lanes has a predicate"
    assert not result.waits, "an instruction that waits has a predicate"

    def run(w):
        outside = w.mask
        lanes = w.registers[predicate.slot] != negated
        w.mask = lanes if outside is None else lanes & outside
        if w.mask.any():
            result.run(w)
        w.mask = outside

    return Result(run)


def type_of(opcode):
    return opcode.split(".")[-1]


# ---- arithmetic


def elementwise(code, instruction):
    """Return the function of an arithmetic instruction, or None if it is not one."""
    function = ELEMENTWISE.get(instruction.opcode)
    if function is None:
        return None
    kinds = operand_kinds(instruction.opcode)
    target, *sources = instruction.operands
    slots = [code.slot(s, k) for s, k in zip(sources, kinds, strict=False)]
    if instruction.opcode.startswith("cvt.") and isinstance(sources[0], ptx.Register) and sources[0].kind != kinds[0]:
        wide, narrow = function, DTYPES[kinds[0]]  # it reads the low bits of a wider register

        def function(a):
            return wide(a.astype(narrow))

    return applied(target.slot, slots, function)


def applied(target, slots, function):
    """Return the function of the warp that sets a register to a function of others."""
    first, sources = slots[0], itemgetter(*slots)

    def run(w):
        registers = w.registers
        value = function(registers[first]) if len(slots) == 1 else function(*sources(registers))
        registers[target] = value if w.mask is None else np.where(w.mask, value, registers[target])

    return run


# ---- moves


def mov(code, opcode, operands):
    target, source = operands
    kind = KINDS[type_of(opcode)]
    if isinstance(target, ptx.Vector):
        return unpack(code.slot(source, kind), [None if t is None else t.slot for t in target.items], BITS[kind])
    if isinstance(source, ptx.Vector):
        part = {"r": "rs", "rd": "r"}[kind]
        low, high = (code.slot(s, part) for s in source.items)
        dtype, shift = DTYPES[kind], DTYPES[kind](BITS[part])
        return lambda w: w.put(target.slot, w.registers[low].astype(dtype) | w.registers[high].astype(dtype) << shift)
    if source == ptx.Special("globaltimer"):
        return lambda w: w.put(target.slot, np.full(32, time.perf_counter_ns(), U8))
    slot = code.slot(source, kind)
    return lambda w: w.put(target.slot, w.registers[slot])


def unpack(source, targets, bits):
    dtype, shift = {32: U2, 64: U4}[bits], bits // 2

    def run(w):
        value = w.registers[source]
        for i, target in enumerate(targets):
            if target is not None:
                w.put(target, (value >> value.dtype.type(i * shift)).astype(dtype))

    return run


def cvta(code, opcode, operands):
    target, source = operands
    window = np.uint64(PARAMETER_WINDOW if "param" in opcode else SHARED_WINDOW)
    slot = code.slot(source, "rd")
    if ".to." in opcode:
        return lambda w: w.put(target.slot, w.registers[slot] & ~window)
    return lambda w: w.put(target.slot, w.registers[slot] | window)


def mapa(code, opcode, operands):
    target, address, rank = operands[0].slot, code.slot(operands[1], "r"), code.slot(operands[2], "r")
    return lambda w: w.put(
        target,
        w.registers[address] & U4((1 << asynchronous.RANK_SHIFT) - 1)
        | (w.registers[rank] + U4(1)) << U4(asynchronous.RANK_SHIFT),
    )


# ---- memory

LOADS = {  # dtype in memory, and what it is extended from
    "b8": (np.uint8, None), "u8": (np.uint8, None), "s8": (np.uint8, np.int8),
    "b16": (U2, None), "u16": (U2, None), "s16": (U2, np.int16),
    "b32": (U4, None), "u32": (U4, None), "s32": (U4, np.int32), "f32": (U4, None),
    "b64": (U8, None), "u64": (U8, None), "s64": (U8, np.int64),
}  # fmt: skip


def _items(operand):
    return operand.items if isinstance(operand, ptx.Vector) else (operand,)


def words(w, space, addresses, dtype, *, write):
    if space == "shared":
        return w.cta.shared.words(addresses, dtype, write=write, now=w.machine.now, warp=w.index)
    if space == "param":
        return w.machine.parameters.view(dtype), addresses // np.dtype(dtype).itemsize
    return w.machine.memory.words(addresses, dtype)


def vectors(w, space, addresses, dtype, count, *, write):
    """Return an array of words, and the index of the first word of each vector of ``count`` words in it."""
    if count > 1:
        size = np.dtype(dtype).itemsize
        if (addresses & addresses.dtype.type(size * count - 1)).any():
            raise asynchronous.AccessError("a vector is not aligned")
        last = addresses + addresses.dtype.type(size * (count - 1))
        words(w, space, last, dtype, write=write)  # checks the other end
    return words(w, space, addresses, dtype, write=write)


def space_of(opcode):
    return next(s for s in opcode.split(".") if s.split("::")[0] in ("shared", "global", "param")).split("::")[0]


def ld(code, opcode, operands):
    space, type_ = space_of(opcode), type_of(opcode)
    dtype, signed = LOADS[type_]
    targets = [t.slot for t in _items(operands[0])]
    kinds = [DTYPES[t.kind] for t in _items(operands[0])]
    address = address_of(code, operands[1], "r" if space == "shared" else "rd")

    def run(w):
        memory, index = vectors(w, space, address(w), dtype, len(targets), write=False)
        for i, (target, kind) in enumerate(zip(targets, kinds, strict=True)):
            value = memory[index + i]
            if signed is not None:
                value = value.view(signed).astype(np.dtype(f"i{np.dtype(kind).itemsize}")).view(kind)
            scatter(w, target, value.astype(kind, copy=False))

    return run


def scatter(w, target, values):
    """Set a register of the active lanes from an array of their values only."""
    if w.mask is None:
        w.registers[target] = values
    else:
        new = w.registers[target].copy()
        new[w.mask] = values
        w.registers[target] = new


def st(code, opcode, operands):
    space, type_ = space_of(opcode), type_of(opcode)
    dtype, _ = LOADS[type_]
    kind = "rs" if np.dtype(dtype).itemsize < 4 else KINDS[type_]
    sources = [code.slot(s, kind) for s in _items(operands[1])]
    address = address_of(code, operands[0], "r" if space == "shared" else "rd")

    def run(w):
        memory, index = vectors(w, space, address(w), dtype, len(sources), write=True)
        for i, source in enumerate(sources):
            memory[index + i] = w.select(w.registers[source]).astype(dtype, copy=False)

    return run


def atom(code, opcode, operands):
    space, type_ = space_of(opcode), type_of(opcode)
    if type_ == "bf16x2":
        return red_bf16x2(code, opcode, operands)
    name = opcode.replace(".v2", "").replace(".v4", "").split(".")[-2]
    dtype, signed = LOADS[type_]
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[name]
    view = np.float32 if type_ == "f32" else signed or dtype
    target = operands[0].slot if opcode.startswith("atom") else None
    at, operand = operands[-2:]
    sources = [code.slot(s, KINDS[type_]) for s in _items(operand)]
    assert target is None or len(sources) == 1, "only red takes vectors"
    address = address_of(code, at, "r" if space == "shared" else "rd")

    def run(w):
        memory, index = vectors(w, space, address(w), dtype, len(sources), write=True)
        memory, old = memory.view(view), np.empty(len(index), view)
        for word, source in enumerate(sources):
            for i, (at, v) in enumerate(zip(index + word, w.select(w.registers[source]).view(view), strict=True)):
                old[i] = memory[at]
                memory[at] = function(memory[at], v)
        if target is not None:
            scatter(w, target, old.view(dtype))

    return run


def red_bf16x2(code, opcode, operands):
    assert opcode.startswith("red.relaxed.gpu.global.add.noftz."), opcode
    sources = [code.slot(s, "r") for s in _items(operands[1])]
    address = address_of(code, operands[0], "rd")

    def run(w):
        memory, index = vectors(w, "global", address(w), U4, len(sources), write=True)
        for word, source in enumerate(sources):
            at = index + word
            assert len(np.unique(at)) == len(at), "two lanes add to one word"
            old, new = (
                from_bf16(np.ascontiguousarray(a).view(U2)) for a in (memory[at], w.select(w.registers[source]))
            )
            memory[at] = to_bf16(old + new).view(U4)

    return run


def _rows_of_matrices(operand, code, count):
    """Return a function of the warp that returns the addresses of the rows of so many matrices, 8 each."""
    address = address_of(code, operand, "r")

    def rows(w):
        at = address(w)[: 8 * count]
        if (at & U4(15)).any():
            raise asynchronous.AccessError("a row of a matrix is not aligned to 16 bytes")
        return at[:, None] + U4(4) * LANES[:4]

    return rows


def _transposed(matrix):
    """Return 8 rows of 4 words, of a matrix of 8 x 8 elements of 16 bits in 32 words."""
    return np.ascontiguousarray(matrix.view(U2).reshape(8, 8).T).view(U4)


def stmatrix(code, opcode, operands):
    assert opcode.endswith(".b16"), opcode
    sources = [s.slot for s in _items(operands[1])]
    rows = _rows_of_matrices(operands[0], code, len(sources))
    arranged = _transposed if ".trans" in opcode else lambda matrix: matrix.reshape(8, 4)

    def run(w):
        memory, index = w.cta.shared.words(rows(w), U4, write=True, now=w.machine.now, warp=w.index)
        memory[index] = np.concatenate([arranged(w.registers[s]) for s in sources])

    return Result(run, members="all")


def ldmatrix(code, opcode, operands):
    assert opcode.endswith(".b16"), opcode
    targets = [t.slot for t in _items(operands[0])]
    rows = _rows_of_matrices(operands[1], code, len(targets))
    arranged = _transposed if ".trans" in opcode else lambda matrix: matrix

    def run(w):
        memory, index = w.cta.shared.words(rows(w), U4, write=False)
        for i, target in enumerate(targets):
            w.registers[target] = arranged(memory[index[8 * i : 8 * i + 8]]).reshape(32)

    return Result(run, members="all")


# ---- between lanes


def shfl(code, opcode, operands):
    target, predicate = operands[0], None
    if isinstance(target, ptx.Pair):
        target, predicate = target.first, target.second.slot
    a, b, c, members = (code.slot(o, "r") for o in operands[1:])
    mode = opcode.split(".")[2]

    def run(w):
        r = w.registers
        lane, clamp = LANES.astype(np.int64), r[c].astype(np.int64)
        segment, limit, by = clamp >> 8 & 31, clamp & 31, r[b].astype(np.int64) & 31
        last = lane & segment | limit & ~segment
        if mode == "up":
            source = lane - by
            valid = source >= last
        elif mode == "bfly":
            source = lane ^ by
            valid = source <= last
        else:
            source = lane & segment | by & ~segment
            valid = source <= last
        source = np.where(valid, source, lane)
        if w.mask is not None and not w.mask[source[w.mask]].all():
            raise asynchronous.AccessError("a shuffle reads an inactive lane")
        w.put(target.slot, r[a][source])
        if predicate is not None:
            w.put(predicate, valid)

    return Result(run, members=members)


def vote(code, opcode, operands):
    mode = opcode.split(".")[2]
    assert mode in ("ballot", "any")
    target, source, members = operands[0].slot, code.slot(operands[1], "p"), code.slot(operands[2], "r")

    def run(w):
        votes = w.registers[source] if w.mask is None else w.registers[source] & w.mask
        ballot = np.packbits(votes, bitorder="little").view("<u4")
        w.put(target, np.repeat(ballot if mode == "ballot" else ballot != 0, 32))

    return Result(run, members=members)


def trap(code, opcode, operands):
    def run(w):
        raise asynchronous.AccessError("the kernel ends with an error")

    return run


def redux(code, opcode, operands):
    function = {"add": np.add, "min": np.minimum, "max": np.maximum}[opcode.split(".")[2]]
    view = np.int32 if opcode.endswith("s32") else np.uint32
    target, source, members = operands[0].slot, code.slot(operands[1], "r"), code.slot(operands[2], "r")

    def run(w):
        value = function.reduce(w.select(w.registers[source]).view(view), dtype=view)
        w.put(target, np.full(32, value, view).view(U4))

    return Result(run, members=members)


def elect(code, opcode, operands):
    target, predicate = operands[0].first, operands[0].second.slot
    members = code.slot(operands[1], "r")

    def run(w):
        lanes = w.only(members) & w.lanes
        leader = (lanes & -lanes).bit_length() - 1
        if target is not None:
            w.put(target.slot, np.full(32, leader, U4))
        w.put(predicate, leader == LANES)

    return Result(run, members=members)


def griddepcontrol(code, opcode, operands):
    if opcode.endswith(".launch_dependents"):
        return lambda w: w.machine.let_next_begin(w.cta)
    assert opcode.endswith(".wait")

    def wait(w):
        before = w.machine.before
        return None if before is None else lambda: before.ended

    return Result(wait, waits=True)


def bar_warp(code, opcode, operands):
    return Result(lambda w: None, members=code.slot(operands[0], "r"))


TABLE = {
    "mov.": mov, "cvta.": cvta, "mapa.": mapa,
    "ld.": ld, "st.shared": st, "st.global": st, "st.relaxed": st, "st.release": st, "atom.": atom, "red.": atom,
    "stmatrix.": stmatrix, "ldmatrix.": ldmatrix,
    "shfl.sync": shfl, "vote.sync": vote, "trap": trap, "redux.sync": redux, "elect.sync": elect,
    "bar.warp.sync": bar_warp, "griddepcontrol": griddepcontrol,
}  # fmt: skip
