"""Checks of machine code (SASS): no load from shared memory is outstanding when the memory is released, and no access
to memory uses an address before it is computed.

A warp releases shared memory that it has read by an arrival at an mbarrier. The hardware may perform the arrival before
an earlier load of the same warp, unless an instruction in between waits for the load. A use of the loaded value is such
an instruction, but ptxas may move it past the arrival. So only the machine code shows whether a release is safe.

**Scoreboards.** The hardware does not know when a load has completed: ptxas tells it. A load increments one of six
counters, and decrements it when it completes. Each instruction has a mask of counters that have to be 0 before it
issues. Loads from shared memory of a warp complete in order, so a counter of a later load covers the loads before it;
ptxas relies on that too, and gives many loads no counter of their own. These numbers are in bits 105 to 125 of an
instruction, which nvdisasm prints with ``-hex``. They are not documented; the layout is that of Volta and later.

**Cycles.** Arithmetic has no counters: an instruction has a number of cycles before the next one may issue. ptxas 13.0
leaves one cycle too few between a 64-bit address and its use if a read of the global timer is scheduled between them.
An H100 then uses the old upper half of the address.
"""

import re
from dataclasses import dataclass

LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(.+?)\s*;?\s*/\* 0x([0-9a-f]{16}) \*/")
UPPER = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
LABEL = re.compile(r"\s*(\.L_\w+):")
TARGET = re.compile(r"`\((\.L_\w+)\)")
OFFSET = re.compile(r"\[[^\]]*\+(0x[0-9a-f]+)\]")
GUARD = re.compile(r"@!?U?P\d+\s+")
LOADS = ("LDS", "LDSM")
ADDRESS = re.compile(r"IMAD\.WIDE\S* (R\d+),")
ADDRESS_CYCLES = 5  # after which memory may be accessed there
ACCESSES = ("LDG", "STG", "LDGSTS", "ATOMG", "RED", "LD", "ST", "ATOM")
ENDS = ("EXIT", "RET", "KILL")
NO_COUNTER = 7


@dataclass(frozen=True)
class Instruction:
    """An instruction; ``counter``: that of its result, or None; ``waits``: a mask of counters; ``cycles``: those before
    the next one.
    """

    address: str
    text: str
    guarded: bool
    counter: int | None
    waits: int
    cycles: int

    @property
    def opcode(self):
        return self.text.split()[0]

    def __str__(self):
        return f"{self.address} {self.text}"


@dataclass(frozen=True)
class Code:
    """Instructions, and the place of each label."""

    instructions: list[Instruction]
    labels: dict[str, int]


def parse(sass):
    """Return the code that ``nvdisasm -c -hex`` prints, of one kernel."""
    instructions, labels, lines = [], {}, iter(sass.splitlines())
    for line in lines:
        if found := LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := LINE.search(line):
            address, text, _ = found.groups()
            control = int(UPPER.search(next(lines))[1], 16) >> 41
            guard = GUARD.match(text)
            counter = control >> 5 & 7
            instructions.append(
                Instruction(
                    address, text[guard.end() :] if guard else text, bool(guard),
                    None if counter == NO_COUNTER else counter, control >> 11 & 63, control & 15,
                )
            )  # fmt: skip
    return Code(instructions, labels)


def successors(code, at):
    """Return the instructions that may follow the one at a place."""
    instruction = code.instructions[at]
    following = [at + 1] if at + 1 < len(code.instructions) else []
    name = instruction.opcode.split(".")[0]
    if name == "BRA":
        target = code.labels[TARGET.search(instruction.text)[1]]
        conditional = instruction.guarded or ".DIV" in instruction.opcode or len(instruction.text.split(",")) > 1
        return [target, *following] if conditional else [target]
    if name in ENDS and not instruction.guarded:
        return []
    assert name not in ("BRX", "JMX"), f"no rule for {instruction}"
    return following  # of a call too: functions, such as a division, have no loads


def is_release(instruction):
    """Whether an instruction arrives at an mbarrier without expecting bytes, which only producers do."""
    return instruction.opcode.startswith("SYNCS.ARRIVE") and bool(re.search(r"\.A[1R]T0", instruction.opcode))


def offset(instruction):
    """Return the constant part of an instruction's address."""
    found = OFFSET.search(instruction.text)
    return int(found[1], 16) if found else 0


def step(outstanding, at, instruction):
    """Return the loads that are outstanding after an instruction: by their place, a mask of the counters that cover
    each of them.
    """
    if instruction.opcode == "FENCE.VIEW.ASYNC.S":  # of `fence.proxy.async`, with the MEMBAR.ALL.CTA before it
        return {}
    left = {load: cover for load, cover in outstanding.items() if not cover & instruction.waits}
    if instruction.opcode.split(".")[0] in LOADS:
        left[at] = 0
        if instruction.counter is not None:
            left = {load: cover | 1 << instruction.counter for load, cover in left.items()}
    return left


def merged(one, other):
    """Return the loads that are outstanding on either of two paths that meet."""
    both = {**one, **other}
    return {load: one.get(load, cover) & other.get(load, cover) for load, cover in both.items()}


def unsafe_releases(code, of_threads=(range(0), range(0))):
    """Return each release during which a load may be outstanding, and those loads, as texts.

    ``of_threads`` is memory that only threads of the CTA write, and the barriers that release it, as offsets in shared
    memory. The shared memory of a CTA performs the accesses of its threads in order, so there a release need not wait.
    """
    memory, barriers = of_threads
    before = {0: {}}  # the outstanding loads, by place
    waiting = [0]
    while waiting:
        at = waiting.pop()
        after = step(before[at], at, code.instructions[at])
        for following in successors(code, at):
            known = before.get(following)
            new = after if known is None else merged(known, after)
            if new != known:
                before[following] = new
                waiting.append(following)
    found = []
    for at, release in enumerate(code.instructions):
        if at not in before or not is_release(release):
            continue
        if ".RED" not in release.opcode and offset(release) in barriers:  # not at a barrier of another CTA
            continue
        left = [code.instructions[load] for load, cover in sorted(before[at].items()) if not cover & release.waits]
        if loads := [load for load in left if offset(load) not in memory]:
            found.append(f"{release} during {', '.join(map(str, loads))}")
    return found


def early_addresses(code):
    """Return each access to memory at an address that is computed fewer than `ADDRESS_CYCLES` before, as a text."""
    found = []
    for at, computed in enumerate(code.instructions):
        result = ADDRESS.match(computed.text)
        if not result:
            continue
        passed = computed.cycles
        for access in code.instructions[at + 1 :]:
            if passed >= ADDRESS_CYCLES:
                break
            if access.opcode.split(".")[0] in ACCESSES and f"[{result[1]}.64" in access.text:
                found.append(f"{access} {passed} cycles after {computed}")
            passed += access.cycles
    return found
