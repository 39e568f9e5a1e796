"""A PTX kernel as blocks of Python functions.

A block is a run of instructions without a jump into it. It ends with at most one jump, or with one instruction that may
suspend the warp. An instruction that lanes have to run together begins a block.
"""

from dataclasses import dataclass

import numpy as np

from emulator import ptx
from emulator.instructions import compiled
from emulator.memory import RESERVED
from emulator.registers import BITS, DTYPES, GARBAGE, LANES, U4

PARAMETERS_ALIGNED = 128
JUMPS = ("bra", "bra.uni", "ret")


@dataclass
class Block:
    operations: list  # functions of the warp
    instructions: list  # for messages
    wait: object = None  # a function of the warp that returns a condition to wait for, or None
    members: object = None  # lanes that run it together: "all", or the slot of a mask
    branch: tuple | None = None  # the slot of the predicate, and whether it is negated
    target: int | None = None
    next: int | None = None  # None: the lanes end


class Compiled:
    """A program as blocks. Numbers and special registers have slots, as registers have."""

    def __init__(self, program):
        self.program = program
        self.initial = [np.full(32, GARBAGE & (1 << BITS[k]) - 1, DTYPES[k]) for k in program.kinds]
        self.constants, self.specials = {}, {}
        self.offsets, end = {}, 0
        for parameter in program.parameters:
            self.offsets[parameter.name] = end
            end += -(-parameter.size // PARAMETERS_ALIGNED) * PARAMETERS_ALIGNED
        self.parameter_bytes = end
        self.blocks = self._blocks()

    # ---- operands

    def slot(self, operand, kind):
        """Return the slot of a register, a number or a special register; numbers have the given kind."""
        if isinstance(operand, ptx.Register):
            return operand.slot
        if isinstance(operand, ptx.Number):
            return self.constant(operand.bits, kind)
        if isinstance(operand, ptx.Special):
            return self._new(self.specials, operand.name, np.zeros(32, DTYPES[kind]))
        if isinstance(operand, ptx.Symbol):
            if operand.name.startswith("__dynamic_shmem__"):
                return self.constant(RESERVED, kind)
            return self.constant(self.offsets[operand.name], kind)
        raise TypeError(f"operand {operand}")

    def constant(self, bits, kind):
        value = np.full(32, bits & (1 << BITS[kind]) - 1, DTYPES[kind])
        return self._new(self.constants, (bits, kind), value)

    def _new(self, table, key, value):
        if key not in table:
            table[key] = len(self.initial)
            self.initial.append(value)
        return table[key]

    def registers(self, launch, cta, warp):
        """Return the registers that a warp starts with."""
        values = {"laneid": LANES, "tid.x": LANES + U4(32 * warp), "cluster_ctarank": cta.rank}
        for axis, name in enumerate("xyz"):
            values[f"ctaid.{name}"] = cta.index[axis]
            values[f"nctaid.{name}"] = launch.grid[axis]
            values[f"ntid.{name}"] = launch.block[axis]
        registers = list(self.initial)
        for name, slot in self.specials.items():
            registers[slot] = np.broadcast_to(values[name], 32).astype(registers[slot].dtype)
        return registers

    def parameters(self, launch):
        """Return the bytes of the parameters of a launch."""
        data = np.zeros(self.parameter_bytes + 16, np.uint8)
        for parameter, value in zip(self.program.parameters, launch.arguments, strict=True):
            at = self.offsets[parameter.name]
            data[at : at + parameter.size] = np.frombuffer(value, np.uint8)
        return data

    def line(self, pc):
        """Return the line of a block's first instruction."""
        block = self.blocks[pc]
        return block.instructions[0].line if block.instructions else "?"

    # ---- blocks

    def _blocks(self):
        code, labels = self.program.instructions, self.program.labels
        results = [None if i.opcode in JUMPS else compiled(self, i) for i in code]
        begins = {0, *labels.values()}
        for at, (instruction, result) in enumerate(zip(code, results, strict=True)):
            if instruction.opcode in JUMPS or (result is not None and result.waits):
                begins.add(at + 1)
            if result is not None and result.members is not None:
                begins.add(at)
        begins = sorted(b for b in begins if b < len(code))
        number = {begin: i for i, begin in enumerate(begins)}
        blocks = []
        for i, begin in enumerate(begins):
            end = begins[i + 1] if i + 1 < len(begins) else len(code)
            block = Block([], code[begin:end], next=i + 1 if end < len(code) else None)
            for instruction, result in zip(code[begin:end], results[begin:end], strict=True):
                if instruction.opcode == "ret":
                    assert instruction.guard is None
                    block.next = None
                elif instruction.opcode in JUMPS:
                    target = number[labels[instruction.operands[0].name]]
                    if instruction.guard is None:
                        block.next = target
                    else:
                        block.branch, block.target = (instruction.guard[0].slot, instruction.guard[1]), target
                elif result.waits:
                    block.wait = result.run
                else:
                    block.operations.append(result.run)
                if result is not None and result.members is not None:
                    block.members = result.members
            blocks.append(block)
        return blocks
